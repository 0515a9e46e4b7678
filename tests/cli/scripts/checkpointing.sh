#!/bin/sh
# checkpointing.sh MPIRUN MOESAIC WORK_DIR: saving in the background and at once give the same files; a file system that
# takes no more ends the run, or does not, as the configuration says, and leaves the checkpoints that are there alone.
set -eu
. "${0%/*}/tiny_run.sh"

run run.dir=behind train.steps=12 checkpoint.every=3 > log.txt
grep -q 'step 3 | save behind/checkpoints | [0-9.]* s stall, written in [0-9.]* s' log.txt || fail "no times of the save: $(cat log.txt)"
run run.dir=atonce train.steps=12 checkpoint.every=3 checkpoint.async=false > log.txt
# The bytes of all ranks' parts are told, not those of the first one.
ranks 1 run.dir=alone train.steps=3 optimizer.warmup_steps=2 > log.txt
told() { grep '"type":"save","step":3,' "$1/metrics.jsonl" | grep -o '"bytes":[0-9.]*'; }
[ "$(told behind)" = "$(told alone)" ] || fail "a save of two ranks tells $(told behind), of one $(told alone)"
# A save that is still being written when the last step is done is waited for, and said.
run run.dir=unended train.steps=6 checkpoint.every=3 checkpoint.save_at_end=false > unended.txt
grep -q 'step 6 | save unended/checkpoints' unended.txt || fail "the last save is not reported: $(cat unended.txt)"
for step in 03 06 09 12; do
  same_state behind/checkpoints/step-000000$step atonce/checkpoints/step-000000$step "step $step: a save in the background and one at once"
done

# Files of a rank may not grow beyond 100 KB: every data file fails half-way. (Shared memory between ranks is a file too.)
small() {
  "$mpirun" -np 2 --oversubscribe --bind-to none --mca btl self,tcp sh -c 'trap "" XFSZ; ulimit -f 200; exec "$@"' sh "$moesaic" train tiny.yaml "$@"
}
for async in true false; do
  run run.dir=full$async train.steps=12 train.max_bad_steps=12 run.max_minutes=0.00001 checkpoint.every=2 > log.txt 2>&1 && fail "not stopped"
  expect 4 "the checkpoint of step 2 could not be saved" small run.dir=full$async train.steps=12 checkpoint.every=2 checkpoint.async=$async
  [ -e full$async/checkpoints/step-00000001/manifest.json ] || fail "the checkpoint before is gone"
  [ -z "$(find full$async/checkpoints -name '.tmp-*')" ] || fail "a half checkpoint was left"
  # Training goes on to the end; there the state must be saved.
  expect 4 "step 4 | save failed, training goes on" small run.dir=full$async train.steps=12 checkpoint.every=2 checkpoint.async=$async checkpoint.on_error=continue
  case $out in *"step 12/12"*) ;; *) fail "training did not go on: $out" ;; esac
  case $out in *"the checkpoint of step 12 could not be saved"*) ;; *) fail "the last save failed without a word: $out" ;; esac
  case $out in *"step 12 | save failed, training goes on"* | *"finished "*) fail "the end of a run whose last save failed is told in two ways: $out" ;; esac
  expect 0 "continuing from full$async/checkpoints/step-00000001" run run.dir=full$async train.steps=12
  same_state behind/checkpoints/step-00000012 full$async/checkpoints/step-00000012 "after a full disk"
  # The last save on the way counts as the last of the run where none follows at the end; a later one that succeeds makes up for it.
  expect 4 "the checkpoint of step 4 could not be saved" small run.dir=last$async train.steps=5 checkpoint.every=2 checkpoint.async=$async checkpoint.on_error=continue checkpoint.save_at_end=false
  case $out in *"There is no earlier one; the same command starts anew."*) ;; *) fail "a checkpoint is promised that is not there: $out" ;; esac
  case $out in *"finished "*) fail "finished, but its last save failed: $out" ;; esac
  [ ! -e last$async/finished ] || fail "a run whose last save failed is marked as finished"
done

# Another rule of what is kept: nothing is deleted before a new checkpoint is there.
kept() { (cd rule/checkpoints && echo step-*); }
run run.dir=rule train.steps=10 checkpoint.every=2 checkpoint.keep_last=2 checkpoint.keep_every=4 > log.txt
[ "$(kept)" = "step-00000004 step-00000008 step-00000010" ] || fail "kept: $(kept)"
mkdir rule/checkpoints/.tmp-step-00000006-1-deleted
expect 4 "retention  by the new rule (checkpoint.keep_last=1, keep_every=0) the next checkpoint deletes those of steps 4, 8, 10" \
  small run.dir=rule train.steps=12 checkpoint.keep_last=1
[ "$(kept)" = "step-00000004 step-00000008 step-00000010" ] || fail "a start deleted checkpoints by a new rule before it saved one: $(kept)"
[ ! -e rule/checkpoints/.tmp-step-00000006-1-deleted ] || fail "what an interrupted deletion left is still there"
expect 0 "changed    checkpoint.keep_every: 4 -> 0" resume rule train.steps=12 checkpoint.keep_every=0
[ "$(kept)" = "step-00000010 step-00000012" ] || fail "kept by the new rule: $(kept)"
# What an interrupted save did not come to is done by the rule that it had.
cp -r behind/checkpoints/step-00000006 rule/checkpoints
rm rule/finished
expect 0 "finished " resume rule
[ "$(kept)" = "step-00000010 step-00000012" ] || fail "a checkpoint that an interrupted save would have deleted stays: $(kept)"
echo "checkpointing: all checks passed"

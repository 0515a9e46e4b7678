#!/bin/sh
# resume_choices.sh MPIRUN MOESAIC WORK_DIR: --resume=PATH[@STEP], `resume RUN_DIR`, --fallback, weights alone, and which
# changed keys are refused, announced or of no consequence.
set -eu
. "${0%/*}/tiny_run.sh"

same() { same_state "$1/checkpoints/step-0000000$3" "$2/checkpoints/step-0000000$3" "$1 and $2, step $3"; } # folder, folder, step

run checkpoint.every=2 > log.txt
cp -r run whole
rm whole/finished # its copies are looked at, not taken for what has come to its end

# With the saved configuration; changes are printed.
rm -r run/checkpoints/step-00000008 run/checkpoints/step-00000006
expect 0 "continuing from run/checkpoints/step-00000004" resume run
same run whole 8
expect 0 "changed    train.steps: 8 -> 9 (other numbers from here on)" resume run train.steps=9
grep -q '"type":"changed","step":8,"after":"9","before":"8","key":"train.steps"' run/metrics.jsonl || fail "the change is not in metrics.jsonl"
expect 0 "changed    log.interval: 1 -> 3" resume run train.steps=9 log.interval=3
case $out in *"log.interval: 1 -> 3 (other"*) fail "log.interval was announced as a change of numbers" ;; esac
expect 2 "resume continues in run" resume run run.dir=other
expect 3 "is not a folder" resume nowhere
mkdir -p empty/checkpoints
expect 3 "no complete checkpoint" resume empty
rm -r run/checkpoints/step-00000009

# Another layout: the same state (the next step rounds differently, so none is done).
for ranks in 1 4; do
  rm -f run/finished
  expect 0 "continuing from run/checkpoints/step-00000008" "$mpirun" -np $ranks --oversubscribe --bind-to none "$moesaic" resume run
done

# What is refused names the keys, old and new, and the tensors.
rm run/finished
expect 2 "model.hidden_size: 32 -> 64 (it was trained as another model)" resume run model.hidden_size=64
case $out in *"'model.embed_tokens.weight' is f32 [256, 32], expected f32 [256, 64]"*) ;; *) fail "no word about the tensors: $out" ;; esac
expect 2 "run.seed: 1 -> 5 (the order of the data would change)" resume run run.seed=5
expect 2 "optimizer.name: muon -> adamw" resume run optimizer.name=adamw
expect 2 "unexpected: 'ema/model.embed_tokens.weight' f32 [256, 32] is not part of this run" resume run optimizer.ema_decay=null
case $out in *"These keys were changed:
  optimizer.ema_decay: 0.9 -> null"*) ;; *) fail "the key is not named: $out" ;; esac
case $out in *summary*) fail "a refused run sums up: $out" ;; esac

# An earlier step of the same run, the newer ones stay under other names; the same command does not go back again.
cp -r whole back
expect 0 "checkpoints/step-00000004 (step 4)" run run.dir=back checkpoint.every=2 --resume=back@4
[ -e back/checkpoints/left-step-00000008/manifest.json ] || fail "a newer checkpoint was lost"
same back whole 8
expect 0 "continues where it is" run run.dir=back checkpoint.every=2 --resume=back@4
case $out in *"step 8 of 8 was done before"*) ;; *) fail "the second start went back again: $out" ;; esac
# From another run, into a new folder.
expect 0 "(step 6)" run run.dir=fork checkpoint.every=2 --resume=whole@6
same fork whole 8
[ ! -e fork/checkpoints/step-00000006 ] || fail "the fork copied a checkpoint"
expect 0 "continues where it is" run run.dir=fork --resume=whole/checkpoints/step-00000006
expect 2 "came from elsewhere" run run.dir=fork --resume=whole@2
expect 3 "no checkpoint of step 5; there are: 2 4 6 8" run run.dir=fork2 --resume=whole@5
expect 2 "there is no such folder" run run.dir=fork2 --resume=wholly
[ ! -e fork2/config.yaml ] || fail "a refused run wrote config.yaml"

# Damage: one byte of a tensor, then a manifest that is cut off.
damage() { perl -e 'open my $f, "+<", $ARGV[0] or die; seek $f, -9, 2; read $f, my $c, 1; seek $f, -9, 2; print $f chr(ord($c) ^ 1)' "$1"; }
cp -r whole hurt
damage hurt/checkpoints/step-00000008/optimizer-rank00001.safetensors
: > hurt/checkpoints/step-00000006/manifest.json
expect 3 "in tensor 'optimizer/" run run.dir=hurt
case $out in *"To take an older one, move hurt/checkpoints/step-00000008 away, or use --fallback"*) ;; *) fail "no word of what to do: $out" ;; esac
: > hurt/checkpoints/step-00000008/manifest.json.new
mv hurt/checkpoints/step-00000008/manifest.json hurt.json
mv hurt/checkpoints/step-00000008/manifest.json.new hurt/checkpoints/step-00000008/manifest.json
expect 3 "move hurt/checkpoints/step-00000008 away, or name its step (RUN@STEP)" "$moesaic" generate hurt
expect 3 "or name its step (RUN@STEP)" "$moesaic" eval hurt
expect 3 "or use --fallback" resume hurt
mv hurt.json hurt/checkpoints/step-00000008/manifest.json
expect 0 "continuing from hurt/checkpoints/step-00000004 (step 4)" run run.dir=hurt --fallback
case $out in *"passed over (--fallback)"*"in tensor 'optimizer/"*) ;; *) fail "the damage is not named: $out" ;; esac
[ -e hurt/checkpoints/damaged-step-00000008/manifest.json ] || fail "the damaged checkpoint was lost"
same hurt whole 8
expect 0 "was done before, nothing is left to do (hurt/checkpoints/step-00000008)" run run.dir=hurt
cp -r whole worse
for step in 2 4 6 8; do damage worse/checkpoints/step-0000000$step/model-rank00000.safetensors; done
expect 3 "every checkpoint in worse/checkpoints is damaged" run run.dir=worse --fallback

# Another set of parameters that any phase trains has no state to continue from: said with the way out, which holds.
expect 2 "Leave the phases that were in train.phases" run run.dir=frozen --resume=whole@4 "train.phases=[{until: 8, freeze: ['*embed*']}]"
expect 0 "whole/checkpoints/step-00000004 (step 4)" run run.dir=frozen --resume=whole@4 "train.phases=[{until: 4}, {until: 8, freeze: ['*embed*']}]"
run run.dir=icy checkpoint.every=4 "train.phases=[{until: 8, freeze: ['*embed*']}]" > icy.txt || fail "$(cat icy.txt)"
expect 2 "what no phase has trained so far cannot be trained from here on" run run.dir=thawed --resume=icy@4 "train.phases=[{until: 4, freeze: ['*embed*']}, {until: 8}]"
# Weights alone.
expect 0 "weights    of " run run.dir=tuned checkpoint.load_weights=whole@8 train.steps=2 run.seed=9
first_loss() { grep '"step":1,' "$1/metrics.jsonl" | sed 's/.*"loss":\([0-9.]*\).*/\1/'; }
perl -e 'exit !($ARGV[0] < $ARGV[1] - 0.05)' "$(first_loss tuned)" "$(first_loss whole)" || fail "loaded weights start at the loss of fresh ones"
expect 0 "continuing from tuned/checkpoints/step-00000002" run run.dir=tuned checkpoint.load_weights=whole@8 train.steps=3 run.seed=9
expect 2 "model.embed_tokens.weight' is f32 [256, 32], expected f32 [256, 64]" run run.dir=wide checkpoint.load_weights=whole model.hidden_size=64
case $out in *"model.hidden_size: 32 -> 64"*) ;; *) fail "the key is not named: $out" ;; esac
echo "resume choices: all checks passed"

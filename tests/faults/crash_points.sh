#!/bin/sh
# crash_points.sh MPIRUN MOESAIC WORK_DIR SHIM [COUNT [SEED]]: ends a run with SIGKILL at each call that changes a file of its
# folder (with half of a write done), in the first life and in a second one that has a checkpoint to
# replace and one to delete. After each: every checkpoint there is whole, and the same command, or `resume`, comes to the bits
# and records of the quiet run. One process; two ranks where the writing rank dies; two ranks where the other one dies then.
# With COUNT, only as many points of each kind, drawn by SEED. KINDS, LIVES and FROM (a call) choose some of them.
set -eu
shim=$4 count=${5:-all} seed=${6:-1}
. "${0%/*}/same_end.sh"
shim=$(realpath "$shim")
here=$(pwd -P)
steps=2
settings="train.steps=2 model.num_experts=2 model.num_experts_per_token=1 checkpoint.every=1 checkpoint.keep_last=1 train.eval_every=2 run.dir=run"

start() { # kind, variables of the shim…
  kind=$1
  shift
  if [ "$kind" = single ]; then
    env LD_PRELOAD="$shim" FAULT_FOLDER="$here/run" FAULT_LOG="$here/calls" "$@" "$moesaic" train tiny.yaml $settings
  else
    [ "$kind" = writer ] || set -- "$@" FAULT_VICTIM="$here/victim"
    "$mpirun" -np 2 --oversubscribe --bind-to none env LD_PRELOAD="$shim" FAULT_FOLDER="$here/run" FAULT_LOG="$here/calls" FAULT_RANK=0 "$@" \
      "$moesaic" train tiny.yaml $settings
  fi
}
prepare() { # life
  rm -rf run calls victim
  [ "$1" = first ] || cp -r "base_$group" run
}
crash() { # life, kind, call
  life=$1 kind=$2 at=$3
  prepare "$life"
  set +e
  start "$kind" FAULT_AT="$at" > out.txt 2>&1
  got=$?
  set -e
  what="$life life, $kind, call $at ($(sed -n "${at}p" calls 2> /dev/null))"
  [ $got -eq 137 ] || fail "$what: exit $got instead of 137: $(cat out.txt)"
  only_whole_checkpoints run "$what"
  [ "$life" = first ] || [ $whole_ones -gt 0 ] || fail "$what: no checkpoint is left"
  # With a checkpoint the run's own copy of the configuration must do.
  if [ $whole_ones -gt 0 ]; then set -- resume run; else set -- train tiny.yaml $settings; fi
  [ "$kind" = single ] || set -- "$mpirun" -np 2 --oversubscribe --bind-to none "$moesaic" "$@"
  [ "$kind" != single ] || set -- "$moesaic" "$@"
  "$@" > out.txt 2>&1 || fail "$what: $* ends with $?: $(cat out.txt)"
  same_end run "$what"
  crashes=$((crashes + 1))
}
crashes=0
for kind in ${KINDS:-single writer other}; do
  group=$kind
  if [ "$kind" = single ]; then train="$moesaic"; else train="$mpirun -np 2 --oversubscribe --bind-to none $moesaic"; fi
  # The quiet run, and what the second life starts from: stopped after a step, with half a checkpoint where the next goes.
  rm -rf run whole "base_$group"
  $train train tiny.yaml $settings > out.txt 2>&1 || fail "the quiet run: $(cat out.txt)"
  mv run whole
  expect 75 "step 1 of 2" $train train tiny.yaml $settings run.max_minutes=0.00001
  mkdir run/checkpoints/step-00000002
  echo half > run/checkpoints/step-00000002/model.safetensors
  mv run "base_$group"
  for life in ${LIVES:-first second}; do
    prepare $life
    start $kind > out.txt 2>&1 || fail "counting: $(cat out.txt)"
    points=$(wc -l < calls)
    [ "$points" -gt 50 ] || fail "only $points calls were counted: the shim does not see the run"
    grep -q 'renameat2 .*/step-' calls || fail "no renaming of a checkpoint was counted"
    before=$crashes began=$(date +%s)
    if [ "$count" = all ]; then
      for at in $(seq "${FROM:-1}" "$points"); do crash $life $kind "$at"; done
    else
      for _ in $(seq "$count"); do
        draw "$points"
        crash $life $kind $((number + 1))
      done
    fi
    echo "$kind, $life life: $points calls, $((crashes - before)) crashes, $(($(date +%s) - began)) s"
  done
done
[ $crashes -gt 0 ] || fail "nothing was crashed"
echo "crash points: all checks passed ($crashes crashes, seed $seed)"

#!/bin/sh
# crash_points.sh MPIRUN MOESAIC WORK_DIR SHIM [COUNT [SEED]]: ends a run with SIGKILL at each call that changes a file of its
# folder (with half of a write done), in the first life and in a second one that has a checkpoint to
# replace and one to delete. After each: every checkpoint there is whole, and the same command, or `resume`, comes to the bits
# and records of the quiet run. One process; two ranks where the writing rank dies; two ranks where the other one dies then.
# With COUNT, only as many points of each kind, drawn by SEED, and in the one process those at config.yaml and at every
# renaming. KINDS, LIVES and FROM (a call) choose some of them.
set -eu
count=${5:-all} seed=${6:-1}
. "${0%/*}/shim_run.sh"

crash() { # life, kind, call
  prepare "$1"
  set +e
  start "$2" FAULT_AT="$3" > out.txt 2>&1
  got=$?
  set -e
  what="$1 life, $2, call $3 ($(sed -n "${3}p" calls 2> /dev/null))"
  if [ "$2" = other ] && [ $got -eq 0 ] && grep -q '^finished' out.txt; then
    too_late=$((too_late + 1))  # the rank that was to die had nothing left to do
  elif [ $got -ne 137 ]; then
    fail "$what: exit $got instead of 137: $(cat out.txt)"
  fi
  only_whole_checkpoints run "$what"
  [ "$1" = first ] || [ $whole_ones -gt 0 ] || fail "$what: no checkpoint is left"
  again "$2"
  same_end run "$what"
  crashes=$((crashes + 1))
}
crashes=0 too_late=0
for kind in ${KINDS:-single writer other}; do
  quiet_run $kind
  for life in ${LIVES:-first second}; do
    count_calls $life $kind
    before=$crashes began=$(date +%s)
    if [ "$count" = all ]; then
      for at in $(seq "${FROM:-1}" "$points"); do crash $life $kind "$at"; done
    else
      for _ in $(seq "$count"); do
        draw "$points"
        crash $life $kind $((number + 1))
      done
      # Few calls, and a mistake at any of them costs a file or leaves one for good.
      [ $kind != single ] || for at in $(awk '/config.yaml/ || /renameat2/ { print $1 }' counted); do crash $life $kind "$at"; done
    fi
    echo "$kind, $life life: $points calls, $((crashes - before)) crashes, $(($(date +%s) - began)) s"
  done
done
[ $crashes -gt $((10 * too_late)) ] || fail "of $crashes crashes $too_late came too late"
echo "crash points: all checks passed ($crashes crashes, $too_late of them after the rank's end, seed $seed)"

#!/bin/sh
# signal_loop.sh MPIRUN MOESAIC WORK_DIR ROUNDS SEED: two ranks; ROUNDS times SIGUSR1 for mpirun or for a random rank after a
# random time (but not before the ranks catch it: until their `main` the system answers), and the same command again. Each life
# ends with 75 after a save, or with 0, and at the end bits and records are those of a run that nobody disturbed.
set -eu
rounds=$4 seed=$5
. "${0%/*}/same_end.sh"
steps=120
settings="train.steps=$steps train.eval_every=30 checkpoint.every=12 checkpoint.keep_last=1"

began=$(date +%s%N)
run run.dir=whole $settings > out.txt 2>&1 || fail "the quiet run: $(cat out.txt)"
longest=$((($(date +%s%N) - began) / 1000000)) # milliseconds
# The ranks of mpirun $1 that catch SIGUSR1 (signal 10: bit 9 of the mask).
ready_ranks() {
  for child in $(cat "/proc/$1/task/$1/children" 2> /dev/null); do
    case $(grep SigCgt "/proc/$child/status" 2> /dev/null) in
      *[2367abef]??) [ "$(cat "/proc/$child/comm" 2> /dev/null)" != moesaic ] || echo "$child" ;;
    esac
  done
}
stopped=0 to_launcher=0 to_rank=0 late=0 finished=0
judge() { # code
  case $1 in
    75)
      stopped=$((stopped + 1))
      only_whole_checkpoints run "seed $seed, round $round"
      [ $whole_ones -gt 0 ] || fail "seed $seed, round $round: stopped without a checkpoint"
      ;;
    0)
      same_end run "seed $seed, round $round"
      finished=$((finished + 1))
      rm -rf run
      ;;
    *) fail "seed $seed, round $round: exit $1: $(cat out.txt)" ;;
  esac
}
round=0
while [ $round -lt "$rounds" ]; do
  round=$((round + 1))
  "$mpirun" -np 2 --oversubscribe --bind-to none "$moesaic" train tiny.yaml run.dir=run $settings > out.txt 2>&1 &
  launcher=$!
  draw $longest
  sleep "$(perl -e 'print $ARGV[0] / 1000' $number)"
  ranks=
  while kill -0 $launcher 2> /dev/null; do
    ranks=$(ready_ranks $launcher)
    [ "$(echo $ranks | wc -w)" -lt 2 ] || break
    # Both were there already and are gone: the end.
    ! grep -q '^finished' out.txt || break
    sleep 0.01
  done
  set -- $ranks
  draw 3
  case $number in 0) victim=${1:-} ;; 1) victim=${2:-} ;; *) victim=$launcher ;; esac
  if [ $# -lt 2 ] || ! kill -USR1 "$victim" 2> /dev/null; then
    late=$((late + 1))
  elif [ "$victim" = $launcher ]; then
    to_launcher=$((to_launcher + 1))
  else
    to_rank=$((to_rank + 1))
  fi
  code=0
  wait $launcher || code=$?
  judge $code
done
code=0
run run.dir=run $settings > out.txt 2>&1 || code=$?
[ $code -eq 0 ] || fail "seed $seed: the last life ends with $code: $(cat out.txt)"
judge 0
[ $stopped -gt 0 ] || fail "no life was stopped"
echo "signal loop: all checks passed ($rounds rounds, seed $seed: $to_launcher signals to mpirun, $to_rank to a rank, $late came too late; $stopped lives ended with 75, $finished runs came to the same end; $((($(date +%s%N) - began) / 1000000000)) s)"

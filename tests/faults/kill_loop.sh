#!/bin/sh
# kill_loop.sh MPIRUN MOESAIC WORK_DIR ROUNDS SEED: two ranks, a checkpoint every three steps; ROUNDS times SIGKILL for a random
# rank or for mpirun after a random time, and the same command again. At the end the bits and the records are those of a run
# that nobody disturbed. A run that comes to its end early is judged and started anew.
set -eu
rounds=$4 seed=$5
. "${0%/*}/same_end.sh"
steps=120
settings="train.steps=$steps train.eval_every=30 checkpoint.every=3 checkpoint.keep_last=2"

began=$(date +%s%N)
run run.dir=whole $settings > out.txt 2>&1 || fail "the quiet run: $(cat out.txt)"
longest=$((($(date +%s%N) - began) / 1000000 + 200)) # milliseconds
is_alive() { # process
  state=$(sed -n 's/^State:[[:space:]]*\(.\).*/\1/p' "/proc/$1/status" 2> /dev/null) || return 1
  case $state in '' | Z | X) return 1 ;; esac
}
# mpirun 4.1.4 may wait for ever after a rank died while it was starting the job. Without ranks there is nothing to wait for;
# with one that lives on, it would be ours that hangs.
wait_for_launcher() {
  tenths=0 alone=0
  while is_alive $launcher; do
    alone=$((alone + 1)) tenths=$((tenths + 1))
    for rank in $(cat /proc/$launcher/task/$launcher/children 2> /dev/null); do
      ! is_alive "$rank" || alone=0
    done
    if [ $alone -ge 150 ]; then
      kill -KILL $launcher
      hung_launchers=$((hung_launchers + 1))
      echo "round $round: mpirun does not end, though its ranks are gone: $(cat out.txt)"
    fi
    [ $tenths -lt 1200 ] || fail "seed $seed, round $round: a rank outlives the other by 2 minutes: $(cat out.txt)"
    sleep 0.1
  done
}
finished=0 hung_launchers=0 ranks_killed=0 launchers_killed=0 early=0
finish() {
  run run.dir=run --resume=auto $settings > out.txt 2>&1 || fail "seed $seed, round $round: the last life ends with $?: $(cat out.txt)"
  same_end run "seed $seed, round $round"
  finished=$((finished + 1))
  rm -rf run
}
round=0
while [ $round -lt "$rounds" ]; do
  round=$((round + 1))
  "$mpirun" -np 2 --oversubscribe --bind-to none "$moesaic" train tiny.yaml run.dir=run --resume=auto $settings > out.txt 2>&1 &
  launcher=$!
  draw $longest
  sleep "$(perl -e 'print $ARGV[0] / 1000' $number)"
  draw 3
  victim=$launcher
  ranks=$(cat /proc/$launcher/task/$launcher/children 2> /dev/null || true)
  set -- $ranks
  case $number in 0) victim=${1:-} ;; 1) victim=${2:-} ;; esac
  if [ -z "$victim" ] || ! kill -KILL "$victim" 2> /dev/null; then
    early=$((early + 1)) # before there was a rank, or after the end: the launcher's end is all there is to see
    kill -KILL $launcher 2> /dev/null || true
  elif [ "$victim" = $launcher ]; then
    launchers_killed=$((launchers_killed + 1))
  else
    ranks_killed=$((ranks_killed + 1))
  fi
  [ $((round % 10)) -ne 0 ] || echo "round $round"
  wait_for_launcher
  code=0
  wait $launcher || code=$?
  case $code in 0 | 137) ;; *) fail "seed $seed, round $round: exit $code: $(cat out.txt)" ;; esac
  # Ranks without a launcher end by themselves, and hold the lock until then.
  waited=0
  for rank in $ranks; do
    while [ "$(cat "/proc/$rank/comm" 2> /dev/null)" = moesaic ] && ! grep -q '^State:.*Z' "/proc/$rank/status" 2> /dev/null; do
      waited=$((waited + 1))
      [ $waited -lt 400 ] || fail "seed $seed, round $round: rank $rank outlives mpirun by 20 s"
      sleep 0.05
    done
  done
  [ ! -d run ] || only_whole_checkpoints run "seed $seed, round $round"
  if [ -e "run/$(last_step)/manifest.json" ]; then finish; fi
done
finish
[ $((ranks_killed + launchers_killed)) -gt 0 ] || fail "nothing was killed"
echo "kill loop: all checks passed ($rounds rounds, seed $seed: $ranks_killed ranks and $launchers_killed launchers killed, $early without effect, $hung_launchers times mpirun itself did not end; $finished runs came to the same end; $((($(date +%s%N) - began) / 1000000000)) s)"

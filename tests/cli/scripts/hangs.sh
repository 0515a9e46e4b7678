#!/bin/sh
# hangs.sh MPIRUN MOESAIC WORK_DIR [ROUNDS [SEED]]: a rank that is stopped or killed ends the job in bounded time with one
# message that names it, and the same command then comes to the bytes of a quiet run; a rank that is only late does not.
# ROUNDS: so many more stops at random moments. Ranks that were not started alike are refused.
set -eu
. "${0%/*}/tiny_run.sh"
rounds=${4:-0} seed=${5:-1}

steps=300 last=step-00000300 limit=4
train() { # folder, ranks, command before moesaic…: in a subshell, which becomes mpirun
  folder=$1 n=$2
  shift 2
  exec "$mpirun" -np "$n" --oversubscribe --bind-to none "$@" "$moesaic" train tiny.yaml run.dir="$folder" train.steps=$steps train.eval_every=100 \
    train.global_batch_size=6 checkpoint.every=25 checkpoint.keep_last=2 comm.watchdog_s=$limit comm.first_step_s=8
}
start() { # folder, ranks, command before moesaic…: in the background; sets $process and $ranks (their process ids)
  train "$@" > out.txt 2>&1 &
  process=$!
  ranks=
  while [ "$(echo "$ranks" | wc -w)" -lt "$2" ]; do
    kill -0 $process 2> /dev/null || fail "mpirun has ended: $(cat out.txt)"
    ranks=
    for child in $(cat "/proc/$process/task/$process/children" 2> /dev/null); do
      [ "$(cat "/proc/$child/comm" 2> /dev/null)" = moesaic ] && ranks="$ranks $child"
    done
    sleep 0.02
  done
}
rank_of() { # process: by its environment
  tr '\0' '\n' < "/proc/$1/environ" | sed -n 's/^OMPI_COMM_WORLD_RANK=//p'
}
wait_for_line() { # text
  until grep -q "$1" out.txt; do
    kill -0 $process 2> /dev/null || fail "the run has ended before '$1': $(cat out.txt)"
    sleep 0.01
  done
}
ended_within() { # seconds: sets $code; no rank may be left
  left=$(($1 * 10))
  while kill -0 $process 2> /dev/null; do
    [ $left -gt 0 ] || { kill -KILL $process $ranks; fail "still there after $1 s: $(cat out.txt)"; }
    left=$((left - 1))
    sleep 0.1
  done
  code=0
  wait $process || code=$?
  for rank in $ranks; do
    tries=0
    while [ -d "/proc/$rank" ]; do
      tries=$((tries + 1))
      [ $tries -lt 60 ] || { kill -KILL "$rank"; fail "process $rank is left"; }
      sleep 0.1
    done
  done
}
same_as_quiet() { # folder, quiet folder
  same_state "$2/checkpoints/$last" "$1/checkpoints/$last" "$1 and the quiet run"
  same_records "$2/metrics.jsonl" > quiet.records
  same_records "$1/metrics.jsonl" > disturbed.records
  cmp quiet.records disturbed.records || fail "$1: metrics.jsonl differs from the quiet run"
}
hung() { # the stopped rank: what the watchdogs must have said
  [ $code -eq 124 ] || fail "exit $code instead of 124: $(cat out.txt)"
  grep -q "no progress for .*: rank $1 gives no sign of life" out.txt || fail "rank $1 is not named: $(cat out.txt)"
  [ "$(grep -c 'no progress for' out.txt)" -eq 1 ] || fail "more than one message: $(cat out.txt)"
  grep -q 'the same command continues from the newest checkpoint' out.txt || fail "no way on: $(cat out.txt)"
}

(train quiet 2) > quiet.txt 2>&1 || fail "the quiet run: $(cat quiet.txt)"
[ ! -e quiet/watchdog ] || fail "the quiet run leaves its watchdogs' folder: $(ls quiet/watchdog)"

# One of two ranks is stopped in the middle of a step.
start stopped 2
wait_for_line 'step 60/'
victim=${ranks##* }
number=$(rank_of "$victim")
kill -STOP "$victim"
ended_within 20
hung "$number"
grep -Eq "while rank $((1 - number)) waits in [a-z_]+ #[0-9]+ of group world \(2 ranks, .*issued in step [0-9]+" out.txt ||
  fail "the exchange is not named: $(cat out.txt)"
grep -Eq "rank $((1 - number)) .*waits for rank $number" out.txt || fail "who waits for whom is not said: $(cat out.txt)"
grep -q "rank $number gives no sign" stopped/watchdog/hang.txt || fail "hang.txt: $(cat stopped/watchdog/hang.txt)"
echo "stopped rank: $(grep -m1 'no progress for' out.txt)"

# Stopped for less than the limit, then all ranks at once for longer (a suspended machine): the run goes on to its end.
start stopped 2
wait_for_line 'step 100/'
victim=${ranks##* }
kill -STOP "$victim"
sleep 1.5
kill -CONT "$victim"
wait_for_line 'step 120/'
kill -STOP $ranks
sleep $((limit + 3))
kill -CONT $ranks
ended_within 120
[ $code -eq 0 ] || fail "exit $code after all ranks had been stopped and woken: $(cat out.txt)"
same_as_quiet stopped quiet

# One of three is killed: the launcher ends the others at once and names it; of moesaic a line of rank 0 at most (SIGKILL may
# follow SIGTERM before it has spoken), and one of rank 1 where that waited for rank 0, which may have been the first to die.
told='^moesaic: rank 0 was told to end \(SIGTERM\) in .*step [0-9].*; (in no exchange|its own work comes before [a-z_]+|[0-9.]+ s in [a-z_]+)'
start killed 3
wait_for_line 'step 30/'
kill -KILL "${ranks##* }"
ended_within 15
[ $code -eq 137 ] || fail "exit $code instead of 137 after SIGKILL of a rank: $(cat out.txt)"
grep -q 'signal 9 (Killed)' out.txt || fail "the launcher does not name the dead rank: $(cat out.txt)"
[ "$(grep -c '^moesaic: rank 0' out.txt)" -le 1 ] || fail "rank 0 says it twice: $(cat out.txt)"
[ "$(grep -c '^moesaic: rank 1' out.txt)" -le 1 ] || fail "rank 1 says it twice: $(cat out.txt)"
others=$(grep '^moesaic:' out.txt | grep -Ev "$told|^moesaic: rank 1 was told to end \(SIGTERM\) in .*; waits for .*rank" || true)
[ -z "$others" ] || fail "other messages than those of a told end: $others in $(cat out.txt)"
echo "killed rank: $(grep -c . out.txt) lines, $(grep -m1 -i 'signal 9' out.txt)"

# Told to end, and given the time for it, rank 0 says where it was (to a file: the launcher drops what it has not yet read).
# shellcheck disable=SC2016
start told 2 sh -c 'exec "$@" 2> "told.$OMPI_COMM_WORLD_RANK"' sh
wait_for_line 'step 30/'
for process_id in $ranks; do
  [ "$(rank_of "$process_id")" -ne 0 ] || kill -TERM "$process_id"
done
ended_within 15
[ $code -eq 143 ] || fail "exit $code instead of 143 after SIGTERM of a rank: $(cat out.txt)"
grep -Eq "$told" told.0 || fail "rank 0 does not say where it was: $(cat out.txt told.*)"
[ "$(grep -c '^moesaic:' told.0)" -eq 1 ] || fail "more than one message: $(cat told.0)"

# Random moments, one of two or three ranks, loading and saving included.
round=0
while [ $round -lt "$rounds" ]; do
  round=$((round + 1))
  seed=$(((seed * 1103515245 + 12345) % 2147483648))
  n=$((2 + seed / 65536 % 2)) pause=$((seed / 131072 % 40)) nth=$((seed / 7 % n + 1))
  start random$n $n
  sleep "$(awk "BEGIN { print $pause / 10 }")"
  victim=$(echo "$ranks" | awk "{ print \$$nth }")
  number=$(rank_of "$victim") || number=gone
  kill -STOP "$victim" 2> /dev/null || number=gone
  ended_within 30
  echo "round $round: rank $number of $n stopped after $pause/10 s: exit $code: $(grep -m1 'no progress for' out.txt | cut -c 1-150)"
  { [ "$number" = gone ] && [ $code -eq 0 ]; } || [ $code -eq 124 ] || fail "exit $code: $(cat out.txt)"
  [ $code -ne 124 ] || grep -Eq "rank $number gives no sign of life|rank [0-9]+ .*: no progress" out.txt || fail "rank $number is not named: $(cat out.txt)"
done

# Not started alike.
pair() { # arguments of the second rank…
  program=$1
  shift
  "$mpirun" --oversubscribe --bind-to none -np 1 "$moesaic" train tiny.yaml run.dir=pair : -np 1 "$program" train tiny.yaml run.dir=pair "$@"
}
expect 2 'optimizer.lr is 0.002, 0.003 on rank 0' pair "$moesaic" optimizer.lr=2e-3
expect 2 'resume is never, auto on rank 0' pair "$moesaic" --resume=never
cp "$moesaic" other
perl -0777 -pi -e 's/(\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0)(.)/$1 . chr(255 ^ ord $2)/se' other
expect 2 "another build of moesaic than rank 0's" pair ./other
[ ! -e pair ] || fail "a refused run made its folder"
echo "all passed"

#!/bin/sh
# stop_requests.sh MPIRUN MOESAIC WORK_DIR: a run that is asked to stop (SIGUSR1 to mpirun or to a rank, the file
# RUN_DIR/stop, the time limits) at any moment ends with 75 after a save, and the same command then comes to the same bytes.
set -eu
. "${0%/*}/tiny_run.sh"

steps=300
last=step-00000300
long() { # folder, further settings…
  dir=$1
  shift
  run run.dir="$dir" train.steps=$steps train.eval_every=50 checkpoint.every=12 checkpoint.keep_last=2 "$@"
}
same_as_whole() {
  same_state "whole/checkpoints/$last" "$1/checkpoints/$last" "$1 and the quiet run"
  same_records whole/metrics.jsonl > whole.records
  same_records "$1/metrics.jsonl" > stopped.records
  [ -s whole.records ] || fail "no records to compare"
  cmp whole.records stopped.records || fail "$1: metrics.jsonl differs from the quiet run"
}
# Waits until mpirun has started both ranks and they catch SIGUSR1 (signal 10: bit 9 of the mask); sets $rank.
wait_for_rank() {
  ready=0
  while [ $ready -lt 2 ]; do
    kill -0 "$1" 2> /dev/null || fail "mpirun has ended: $(cat out.txt)"
    ready=0
    for child in $(cat "/proc/$1/task/$1/children" 2> /dev/null); do
      case $(grep SigCgt "/proc/$child/status" 2> /dev/null) in
        *[2367abef]??) [ "$(cat "/proc/$child/comm" 2> /dev/null)" = moesaic ] && ready=$((ready + 1)) && rank=$child ;;
      esac
    done
    sleep 0.02
  done
}
wait_for_line() { # process, text
  until grep -q "$2" out.txt; do
    kill -0 "$1" 2> /dev/null || return 0
    sleep 0.01
  done
}
# Starts a run in folder $1, does $2 (a function of mpirun's process) to it; the exit code must be 75 or 0.
lives=0
disturbed() {
  folder=$1 disturb=$2
  : > out.txt
  "$mpirun" -np 2 --oversubscribe --bind-to none "$moesaic" train tiny.yaml run.dir="$folder" train.steps=$steps train.eval_every=50 \
    checkpoint.every=12 checkpoint.keep_last=2 > out.txt 2>&1 &
  process=$!
  "$disturb" $process
  code=0
  wait $process || code=$?
  lives=$((lives + 1))
}

long whole > quiet.txt
grep -q 'stop  .*kill -USR1' quiet.txt || fail "the header does not say how to stop the run"

at_the_start() { wait_for_rank "$1"; kill -USR1 "$1"; }
twice_in_a_step() { wait_for_rank "$1"; wait_for_line "$1" 'step 5/'; kill -USR1 "$1"; kill -USR1 "$1"; }
a_rank_at_an_evaluation() { wait_for_rank "$1"; wait_for_line "$1" "step 50 | eval"; kill -USR1 "$rank"; }
at_a_save() { wait_for_rank "$1"; wait_for_line "$1" 'step 84/'; kill -USR1 "$1"; }
by_file() { wait_for_rank "$1"; touch signals/stop; } # there before the first step
at_the_last_step() { wait_for_rank "$1"; wait_for_line "$1" "step $((steps - 1))/"; kill -USR1 "$rank" 2> /dev/null || true; }
for moment in at_the_start twice_in_a_step a_rank_at_an_evaluation at_a_save by_file; do
  disturbed signals $moment
  [ "$code" -eq 75 ] || fail "$moment: exit $code instead of 75: $(cat out.txt)"
  grep -q "the same command continues" out.txt || fail "$moment: no word about how to continue: $(cat out.txt)"
  [ ! -e signals/stop ] || fail "$moment: the request file is still there"
done
disturbed signals at_the_last_step
[ "$code" -eq 75 ] || [ "$code" -eq 0 ] || fail "at the last step: exit $code: $(cat out.txt)"
[ "$code" -eq 0 ] || long signals > out.txt
same_as_whole signals

# A file that was there before the start was meant for another one, whichever end that came to; the file of a last step is
# removed with the mark of the end.
cp -r signals stale
touch stale/stop
expect 0 "was done before" long stale
[ -e stale/stop ] || fail "a start with nothing to do removed the file"
expect 0 "removed    stale/stop: it was there before this start" run run.dir=stale train.steps=$((steps + 2)) train.eval_every=50 checkpoint.every=12 checkpoint.keep_last=2
case $out in *"step $((steps + 2))/"*) ;; *) fail "a stale file stopped the run: $out" ;; esac
[ ! -e stale/stop ] || fail "the stale file is still there"
at_the_end() { wait_for_rank "$1"; wait_for_line "$1" "step $steps/"; touch ending/stop; }
disturbed ending at_the_end
[ "$code" -eq 0 ] || fail "asked after the last step: exit $code: $(cat out.txt)"
[ -e ending/finished ] && [ ! -e ending/stop ] || fail "a request after the last step is left for the next start"

# Pieces shorter than the interval between saves, by both time limits: every life gets on.
for life in 1 2 3; do expect 75 "run.max_minutes is over at step $life of" long timed run.max_minutes=0.00001; done
end=$(($(date +%s) + 25)) # less than the margin
for life in 4 5; do SLURM_JOB_END_TIME=$end expect 75 "SLURM_JOB_END_TIME) is near at step $life of" long timed; done
SLURM_JOB_END_TIME=$(($(date +%s) - 5)) expect 0 "finished" long timed # left over from an earlier job
SLURM_JOB_END_TIME=soon expect 2 "SLURM_JOB_END_TIME" long other
same_as_whole timed

# Without mpirun SIGTERM and SIGINT do the same.
for signal in TERM INT; do
  : > out.txt
  # A shell starts background jobs with SIGINT ignored; perl gives it back.
  perl -e '$SIG{INT} = "DEFAULT"; exec @ARGV' "$moesaic" train tiny.yaml run.dir=alone_$signal train.steps=2000 > out.txt 2>&1 &
  process=$!
  wait_for_line $process 'step 3/'
  grep -q "^stop  .*Ctrl-C once, kill -USR1 $process" out.txt || fail "the header does not say how to stop a process without mpirun: $(grep '^stop' out.txt)"
  kill -$signal $process
  code=0
  wait $process || code=$?
  [ "$code" -eq 75 ] || fail "SIG$signal to a single process: exit $code: $(tail -5 out.txt)"
  grep -q "stopped    SIG$signal" out.txt || fail "SIG$signal is not named"
done
echo "stop requests: all checks passed ($lives disturbed lives)"

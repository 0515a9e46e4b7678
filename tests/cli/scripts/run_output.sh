#!/bin/sh
# run_output.sh MPIRUN MOESAIC WORK_DIR: what a run prints and writes, under mpirun, alone, on a terminal, and killed.
set -eu
. "${0%/*}/functions.sh"
enter "$1" "$2" "$3"
expert_run
escape=$(printf '\033')
has() { grep -q -e "$2" "$1" || fail "no '$2' in $1: $(cat "$1")"; }

# Under mpirun stdout is a terminal even when it ends in a file: no bar, no colour, rank 0 alone.
NCCL_DEBUG=WARN MY_SECRET_KEY=hidden NCCL_AUTH_TOKEN=hidden ranks 2 log.detail_every=4 log.expert_every=2 log.prometheus=true > log.txt 2> err.txt || fail "$(cat log.txt err.txt)"
! grep -q "$escape" log.txt err.txt || fail "escape codes in a file"
! grep -q "hidden\|precondition_transports" log.txt || fail "a secret was printed"
[ "$(grep -c '^step 3/8 ' log.txt)" -eq 1 ] || fail "not one line per step: $(cat log.txt)"
for text in '^moesaic .*git .*MPI' '^run .*seed 1' '^hosts .*1 host(s): .* x 2$' '^layout .*2 rank(s) = dp 2 x tp 1' '^model .*parameters, .*active per token' \
  '^flops .*MFLOP per token = 3 x forward' '^data .*40 documents' '^batch .*= 256 tokens a step' '^memory .*MiB' \
  '^checkpoint run/checkpoints | every 4 steps' '^env .*NCCL_DEBUG=WARN' '^stop .*kill -USR1 [0-9]' '^step 1/8 (warm-up)' '^step 4 | moe ' '^step 4 | mem ' \
  '^step 4 | save ' '^step 4 | eval loss' '^summary .*steps 1 to 8' '^finished '; do has log.txt "$text"; done
[ "$(grep -c '"type":"header"' run/metrics.jsonl)" -eq 1 ] || fail "not one header"
[ "$(ls run/tensorboard | wc -l)" -eq 1 ] || fail "not one event file"

# Rate x time = tokens; counts of the experts add up to tokens x experts per token in every layer.
perl -MJSON::PP -ne '$r = decode_json($_);
  if ($r->{type} eq "step") { $n = $r->{tokens_per_second} * $r->{seconds}; die "step $r->{step}: $n tokens\n" if abs($n - $r->{tokens}) > 1e-6 * $n; $steps++; $t{$r->{step}} = $r->{tokens} }
  if ($r->{type} eq "experts") { for my $l (@{$r->{tokens}}) { my $s = 0; $s += $_ for @$l; die "step $r->{step}: $s assignments\n" if $s != 2 * $t{$r->{step}} } $experts += @{$r->{layers}} }
  END { die "$steps steps, $experts layers of experts\n" if $steps != 8 || $experts != 8 }' run/metrics.jsonl || fail "metrics.jsonl"

# A continuation: one more header, the steps go on, the time left is that of the steps left.
ranks 2 train.steps=12 > more.txt
has more.txt '^step 9/12 (warm-up)'
perl -ne 'if (m{^step 10/12 .*eta (\d+):(\d+):(\d+)}) { $found = 1; die "$_" if $1 * 3600 + $2 * 60 + $3 > 60 } END { die "no step 10\n" unless $found }' more.txt || fail "time left"
[ "$(grep -c '"type":"header"' run/metrics.jsonl)" -eq 2 ] || fail "not one header per life"
grep -q '"type":"resume","step":8,' run/metrics.jsonl || fail "no event of the continuation"

# Stopped and continued, a run writes the same records as one that never stopped.
for minutes in 0.000001 0.000001 1; do
  ranks 2 run.dir=again log.expert_every=2 run.max_minutes=$minutes > again.txt 2>&1 || [ $? -eq 75 ] || fail "$(cat again.txt)"
done
same_records run/metrics.jsonl | grep -v '"step":\(9\|1[0-2]\)[,}]' > whole.records
same_records again/metrics.jsonl > again.records
grep -v '"type":"eval"' whole.records > a; grep -v '"type":"eval"' again.records | cmp - a || fail "records differ after continuing: $(diff a again.records)"
[ "$(wc -l < a)" -eq 12 ] || fail "not 8 steps and 4 records of experts: $(cat a)"

# kill -9 at odd moments: every line but the last of a life is whole, and the next life begins on a line of its own.
for life in 1 2 3; do
  "$moesaic" train tiny.yaml run.dir=killed train.steps=100000 log.interval=1000 checkpoint.every=20 checkpoint.keep_last=2 train.eval_every=0 > /dev/null 2>&1 &
  pid=$!
  for i in $(seq 300); do # until this life has written
    [ "$(cat killed/metrics.jsonl 2> /dev/null | grep -c '"type":"header"')" -lt $life ] || break
    sleep 0.02
  done
  sleep 0.0$((life * 3))
  kill -9 $pid
  wait $pid 2> /dev/null || true
done
printf '{"type":"step","st' >> killed/metrics.jsonl
"$moesaic" train tiny.yaml run.dir=killed train.steps=100000 run.max_minutes=0.001 > /dev/null || [ $? -eq 75 ] || fail "the last life"
perl -MJSON::PP -ne 'chomp; my $r = eval { decode_json($_) }; if (!$r) { $torn = $.; next } die "line $. after a torn one is a $r->{type}\n" if $torn && $r->{type} ne "header"; $torn = 0; $headers++ if $r->{type} eq "header"; $last = $r
  } { die "$headers headers\n" if $headers != 4; die "no end\n" if $torn || $last->{type} ne "stop" || $last->{exit_code} != 75' killed/metrics.jsonl || fail "metrics.jsonl after kills"

# One processor for two threads.
if command -v taskset > /dev/null; then
  taskset -c "$(taskset -pc $$ | sed 's/.*: *//; s/[-,].*//')" "$moesaic" train tiny.yaml run.dir=bound run.threads=2 train.steps=2 optimizer.warmup_steps=1 > bound.txt
  has bound.txt '^warning .*1 of 1 rank(s) may use 1 processor, but run.threads is 2'
fi

# On a terminal, one process: a bar on stderr, colour; both can be turned off.
terminal() { # columns, file, command
  script -qec "stty cols $1 rows 24; $3" "$2" > /dev/null < /dev/null || fail "$3: $(cat "$2")"
}
if command -v script > /dev/null; then
  one="'$moesaic' train tiny.yaml log.interval=4"
  terminal 100 bar.txt "TERM=xterm $one run.dir=t1"
  has bar.txt "$escape\[K\[#*\.*\] .*step [0-9]*/8 | loss"
  has bar.txt "$escape\[32mfinished"
  terminal 100 plain.txt "TERM=xterm NO_COLOR=1 $one run.dir=t2 --progress=line"
  ! grep -q "$escape" plain.txt || fail "NO_COLOR and --progress=line print escape codes"
  terminal 100 dumb.txt "TERM=dumb $one run.dir=t3"
  ! grep -q "$escape" dumb.txt || fail "TERM=dumb prints escape codes"
  terminal 60 narrow.txt "TERM=xterm $one run.dir=t4 --color=never"
  ! grep -q "$escape" narrow.txt || fail "a bar in 60 columns"
  terminal 100 mpi.txt "TERM=xterm '$mpirun' -np 1 $one run.dir=t5"
  ! grep -q "$escape" mpi.txt || fail "a bar or colour under mpirun"
else
  echo "without script(1): the bar was not tried"
fi
"$moesaic" train tiny.yaml run.dir=t6 --progress=none --color=always > none.txt
! grep -q '^step 1/8' none.txt || fail "--progress=none prints steps"
has none.txt "$escape\[32mstep 4 | eval"
set +e
"$moesaic" train tiny.yaml --progress=bars > wrong.txt 2>&1
[ $? -eq 2 ] || fail "a wrong --progress is accepted"
"$moesaic" train tiny.yaml run.dir=t7 log.prometheus=/nowhere/x.prom > wrong.txt 2>&1
[ $? -eq 4 ] || fail "a folder that does not exist: $(cat wrong.txt)"
has wrong.txt "log.prometheus: /nowhere is not a folder"
echo "run output: all checks passed"

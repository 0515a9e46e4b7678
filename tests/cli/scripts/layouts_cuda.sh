#!/bin/sh
# layouts_cuda.sh MPIRUN MOESAIC WORK_DIR: two ranks on GPUs (on two devices, or in turns on one) that share experts, sequences,
# heads and vocabulary, or layers: the loss of one, in f32 and bf16.
set -eu
. "${0%/*}/functions.sh"
. "${0%/*}/cuda_runs.sh"
enter_cuda "$1" "$2" "$3"
share="$share comm.watchdog_s=60 comm.first_step_s=60"  # ranks that wait for each other say so
ranks 1 > log.txt || fail "$(cat log.txt)"
# Experts on two ranks: the loss of one, the same bits twice, checkpoints that one rank reads.
ranks 1 run.dir=plain run.precision=f32 > plain.txt || fail "$(cat plain.txt)"
for exchange in flat dense pair; do
  ranks 2 run.dir=ep_$exchange parallel.ep=2 dispatch.exchange=$exchange run.precision=f32 $share > ep.txt || fail "$(cat ep.txt)"
  close "experts on two ranks ($exchange) and on one" ep.txt plain.txt 0.0002
done
# Sequences, heads, widths and vocabulary, layers, and optimizer state on two ranks.
number=0
for layout in parallel.cp=2 "parallel.cp=2 parallel.ep=2" parallel.tp=2 "parallel.tp=2 parallel.etp=2" "parallel.tp=2 parallel.ep=2" parallel.pp=2 "parallel.pp=2 parallel.schedule=zero_bubble" parallel.zero=0; do
  number=$((number + 1))
  # shellcheck disable=SC2086 # several words
  ranks 2 run.dir=layout$number $layout run.precision=f32 $share > layout.txt || fail "$layout: $(cat layout.txt)"
  close "$layout and one rank" layout.txt plain.txt 0.0002
  # shellcheck disable=SC2086
  ranks 2 run.dir=layout${number}_bf16 $layout $share > layout.txt || fail "$layout, bf16: $(cat layout.txt)"
  close "$layout and one rank, bf16" layout.txt log.txt 0.01
done
ranks 2 run.dir=ep parallel.ep=2 $share > ep.txt || fail "$(cat ep.txt)"
close "experts on two ranks and on one, bf16" ep.txt log.txt 0.01
ranks 2 run.dir=ep_again parallel.ep=2 $share > ep_again.txt
same_state ep/checkpoints/step-00000008 ep_again/checkpoints/step-00000008 "experts on two ranks, twice"
ranks 1 run.dir=ep train.steps=10 > ep_one.txt || fail "$(cat ep_one.txt)"
grep -q 'continuing from .*step-00000008' ep_one.txt || fail "one rank does not continue the run of two"
echo "layouts_cuda: passed"

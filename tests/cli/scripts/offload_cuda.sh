#!/bin/sh
# offload_cuda.sh MPIRUN MOESAIC WORK_DIR: on a GPU, experts outside the device (in pinned host memory, in a file, a few of them
# on the device), layers in vertical order and activations in host memory: the bits of a run with everything on the device.
# shellcheck disable=SC2154,SC2086 # set by functions.sh and cuda_runs.sh; several words
set -eu
. "${0%/*}/functions.sh"
. "${0%/*}/cuda_runs.sh"
enter_cuda "$1" "$2" "$3"
# train NAME ARGUMENT…
train() {
  name=$1
  shift
  rm -rf "$name"
  "$moesaic" train tiny.yaml run.dir="$name" train.steps=6 optimizer.warmup_steps=1 checkpoint.every=6 "$@" > "$name.log" 2>&1 ||
    fail "exit $? from $name, $*: $(cat "$name.log")"
}
# same NAME: as the run that offloads nothing.
same() {
  "$moesaic" ckpt diff none "$1" > diff.txt || fail "$1 differs: $(cat diff.txt)"
  echo "$1: $(tail -n 1 diff.txt)"
  grep -q ' tensors have equal bits, 0 differ' diff.txt || fail "$1 differs: $(cat diff.txt)"
}
host="memory.host_budget=8MiB" waits="parallel.order=vertical activations.residual_offload=true activations.recompute=full"
for types in run.precision=f32 run.precision=bf16 "run.precision=bf16 optimizer.master=split" "run.precision=bf16 optimizer.name=muon"; do
  echo "$types"
  train none $types
  train states $types experts.offload=states experts.device_cache=112KiB $host
  train full $types experts.offload=full experts.device_cache=200KiB $host
  train file $types experts.offload=full experts.policy=random experts.device_cache=200KiB memory.host_budget=900KiB \
    memory.file_budget=8MiB memory.file_path=tier
  train vertical $types $waits
  train all $types experts.offload=full experts.device_cache=200KiB $host $waits
  for name in states full file vertical all; do same "$name"; done
  grep -q '^offload    full, policy sched | room on the device for [1-9]' all.log || fail "nothing was offloaded: $(cat all.log)"
  # With weights alone: the run's own loss, and what a model prints that has all of them on the device.
  "$moesaic" eval file --json experts.offload=none > whole.json 2> eval.log || fail "eval: $(cat eval.log)"
  "$moesaic" generate file --prompt the --max-new-tokens 8 experts.offload=none > whole.text 2> eval.log || fail "generate: $(cat eval.log)"
  for policy in sched random; do
    small="experts.policy=$policy experts.device_cache=60KiB memory.host_budget=64KiB"
    "$moesaic" eval file --json $small > part.json 2> eval.log || fail "eval: $(cat eval.log)"
    cmp whole.json part.json || fail "eval with offloaded experts: $(cat whole.json part.json)"
    grep -q "^  experts' gate_up weights .* .iB .* .iB" eval.log || fail "nothing was offloaded: $(cat eval.log)"
    "$moesaic" generate file --prompt the --max-new-tokens 8 $small > part.text 2> eval.log || fail "generate: $(cat eval.log)"
    cmp whole.text part.text || fail "generate with offloaded experts: $(cat whole.text part.text)"
  done
done
# Experts without tokens, whose updates wait for their next use.
few="data.sequence_length=16 train.global_batch_size=1 model.num_experts=32"
for types in run.precision=f32 "run.precision=bf16 optimizer.master=split"; do
  train none $types $few
  train lazy $types $few experts.offload=full experts.device_cache=200KiB memory.host_budget=32MiB optimizer.untouched=lazy
  same lazy
  grep -q '"replays":[1-9]' lazy/metrics.jsonl || fail "no update waited: $(grep offload lazy/metrics.jsonl)"
done
# Experts on two ranks, each with its own.
"$mpirun" -np 2 --oversubscribe --bind-to none "$moesaic" train tiny.yaml run.dir=two train.steps=6 optimizer.warmup_steps=1 checkpoint.every=6 \
  run.precision=bf16 parallel.ep=2 $share > two.log 2>&1 || fail "two ranks: $(cat two.log)"
rm -rf none
mv two none
"$mpirun" -np 2 --oversubscribe --bind-to none "$moesaic" train tiny.yaml run.dir=two train.steps=6 optimizer.warmup_steps=1 checkpoint.every=6 \
  run.precision=bf16 parallel.ep=2 $share experts.offload=full experts.device_cache=200KiB $host > two.log 2>&1 || fail "two ranks: $(cat two.log)"
same two
echo "offload_cuda: passed"

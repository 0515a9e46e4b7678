#!/usr/bin/env bash
# gpu_sanitize.sh [BUILD_DIR]: compute-sanitizer over the kernels at small sizes: memcheck, initcheck and synccheck of the
# reference cases and of one run of each tensor-core kernel; racecheck of the kernels with shared memory. AT_ONCE at a time (4), on
# all GPUs in turn, each with a time limit; fails if a tool finds something.
# Training with offloaded experts, three slots for each kind, runs under racecheck as well: kernels on slots that change hands.
# racecheck does not see the copy engine's writes: `test_cuda "[repeat]"` repeats those kernels a thousand times, in a build
# with -DMOESAIC_CUDA_STRESS=ON under random pauses.
#
# What runs the kernels with shared memory (a unit test keeps the list whole):
#   reference cases in f32 and bf16
#     attention attention_common attention_plain_backward attention_plain_forward: mla, dsa    glu: activation
#       attn_res_backward attn_res_forward: attnres
#     balance balance_counts router_loss: balance    expert_capacity expert_sort grouped_gemm grouped_tiles permute router router_backward: moe
#     sparse_mla sparse_mla_plain sparse_mla_sums: dsa
#     embedding: model    muon newton_schulz: optim, model    indexer_loss indexer_select: dsa    quant_fp8: quant
#     kda_chunk_plain_backward kda_chunk_plain_forward kda_chunk_plain_gradients kda_chunk_plain_triangles kda_prepare kda_segment: kda
#     gated_norm layer_norm rms_norm: norms    rope: mla    short_conv: short_conv    cross_entropy vocab_block vocab_divergence: loss
#   one run of each tensor-core kernel
#     attention_tiled attention_tiled_dkv attention_tiled_dq attention_tiled_forward grouped_gemm_rows
#     grouped_gemm_weight grouped_glu_tiled_backward grouped_glu_tiled_forward
#     indexer_gradients_tiled indexer_scores_tiled indexer_target_tiled kda_tiled_gradients kda_tiled_prepare kda_tiled_scan
#   cases of test_cuda named below
#     clip exchange kda_step topk schulz_products sparse_mla_tiled sparse_mla_tiled_backward sparse_mla_tiled_forward
set -euo pipefail
build=$(cd "${1:-build_gpu}" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/parts.sh
. scripts/parts.sh
export MOESAIC_REQUIRE_CUDA=1 OPENBLAS_NUM_THREADS=1 MOESAIC_REPEATS=1
tool=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
limit=${LIMIT_S:-240}
at_once=${AT_ONCE:-4} running=0 started=0
gpus=$(nvidia-smi --list-gpus | grep -c '^GPU')

check() { # NAME TOOL COMMAND…
  local name=$1 which=$2
  shift 2
  if [ "$running" -ge "$at_once" ]; then wait -n || true; running=$((running - 1)); fi
  running=$((running + 1)) started=$((started + 1))
  CUDA_VISIBLE_DEVICES=$((started % gpus)) start "$which:$name" "$limit" "$tool" --tool "$which" --error-exitcode 9 --print-limit 20 "$@"
}

# racecheck takes longest, so it starts first; its reference cases are cut by family, whole models one by one.
for dtype in f32 bf16; do
  for model in tests/golden/model__*.safetensors; do
    name=$(basename "$model" .safetensors)
    mkdir -p "$logs/cases/$name"
    ln -sf "$PWD/$model" "$logs/cases/$name/"
    check "$name,$dtype" racecheck "$build/apps/moesaic" verify --cases "$logs/cases/$name" --device cuda --dtype $dtype
  done
done
for dtype in bf16 f32; do
  for family in activation attnres balance dsa kda_core kda_cp kda_layer mla moe norms optim quant short_conv loss; do
    mkdir -p "$logs/cases/$family"
    ln -sf "$PWD"/tests/golden/"$family"__*.safetensors "$logs/cases/$family/"
    check "$family,$dtype" racecheck "$build/apps/moesaic" verify --cases "$logs/cases/$family" --device cuda --dtype $dtype
  done
done
check tensor_cores racecheck "$build/tests/test_cuda" '[repeat]'
check more racecheck "$build/tests/test_cuda" 'TopK on CUDA replays*,KDA step on CUDA*,SumOfSquares on CUDA is finite*,Cross-entropy of extreme rows*'
check exchange racecheck "$build/tests/test_cuda" 'places of experts on CUDA*,groups and counts of an exchange on CUDA*,choices of an exchange on CUDA*,checksums of bytes on CUDA*'
# Not the library's products: racecheck takes how their copies and products hand memory to each other for races.
check halves racecheck "$build/tests/test_cuda" 'Newton-Schulz on CUDA: a matrix*'
check few_slots racecheck "$build/tests/test_cuda_train" 'offloaded training on a GPU with the fewest slots*'
check gather racecheck "$build/tests/test_cuda" 'Sparse MLA on CUDA: rows without*,Sparse MLA on CUDA: no tokens*'
for which in memcheck initcheck synccheck; do
  check f32 $which "$build/apps/moesaic" verify --cases tests/golden --device cuda --dtype f32
  check bf16 $which "$build/apps/moesaic" verify --cases tests/golden --device cuda --dtype bf16
  check tensor_cores $which "$build/tests/test_cuda" '[repeat],Sparse MLA on CUDA: rows without*'
done
# initcheck does not see what the library's products store by bulk copies; these tests poison their memory before every run.
for which in memcheck synccheck; do
  check halves $which "$build/tests/test_cuda" 'Newton-Schulz on CUDA: a matrix*,Newton-Schulz on CUDA by the library*'
done
finish

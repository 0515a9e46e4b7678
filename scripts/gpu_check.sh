#!/usr/bin/env bash
# gpu_check.sh: on a machine with a CUDA toolkit and a GPU, builds into build_gpu/, runs the CUDA tests, training on the GPU (on two or
# more, over NCCL), the reference cases in three types and the large cases, side by side; then, alone, the speed of every op
# and of two models of 5 B parameters. Prints the time of every part and fails if any did. About eleven minutes on 16 cores.
# Installs nothing and needs no network. A test that finds no GPU fails.
#   BENCH=0 scripts/gpu_check.sh      leaves the speed out
#   LOGS=folder scripts/gpu_check.sh  leaves the output of every part in folder
#   SANITIZE=1 scripts/gpu_check.sh   runs scripts/gpu_sanitize.sh, too (about ten minutes more)
#   STRESS=1 scripts/gpu_check.sh     builds kernels that pause at random and repeats them a thousand times (five more)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export BUILD_DIR=build_gpu
export MOESAIC_REQUIRE_CUDA=1 OPENBLAS_NUM_THREADS=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# shellcheck source=scripts/parts.sh
. scripts/parts.sh
moesaic=$BUILD_DIR/apps/moesaic tests=$BUILD_DIR/tests

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
alone build 420 scripts/build.sh -DMOESAIC_CUDA=ON
succeeded build || finish
"$moesaic" --version

if [ "${TESTS:-1}" != 0 ]; then
  # The longest first. The tests of the kernels are two parts for that reason; the whole program, and its ranks over NCCL, are on two
  # devices where there are two.
  start kernels_2 480 "$tests/test_cuda" '~[.]~[repeat]~[grouped]~KDA*'
  start_test() { start "$1" 480 ctest --test-dir "$BUILD_DIR" -R "^$1\$" --output-on-failure --no-tests=error; }
  start_test layouts_cuda
  start kernels_1 480 "$tests/test_cuda" '[repeat]~[.],[grouped]~[.],~[.]KDA*'
  for name in selftest_cuda offload_cuda comm_nccl train_cuda experts_cuda; do start_test "$name"; done
  start training 480 "$tests/test_cuda_train"
  for dtype in f64 f32 bf16; do
    start "verify_$dtype" 480 "$moesaic" verify --cases tests/golden --device cuda --dtype "$dtype"
  done
  start kernels_far_offsets 480 "$tests/test_cuda" '[.large]'
  start_test cuda_gate
  # Large cases: the kernels for any size in f32, then the tiled ones, which must run.
  start verify_large_f32_plain 480 "$moesaic" verify --large --device cuda --threads 6 --dtype f32 --path plain
  start verify_large_bf16 480 "$moesaic" verify --large --device cuda --threads 6 --dtype bf16
fi
if [ "${STRESS:-0}" = 1 ]; then
  alone stress_build 420 cmake -S . -B build_gpu_stress -G Ninja -DCMAKE_BUILD_TYPE=Release -DMOESAIC_CUDA=ON -DMOESAIC_CUDA_STRESS=ON
  alone stress_build_tests 420 cmake --build build_gpu_stress -j "$(nproc)" --target test_cuda
  alone stress 300 build_gpu_stress/tests/test_cuda '[repeat]'
fi
if [ "${SANITIZE:-0}" = 1 ]; then alone sanitize 900 scripts/gpu_sanitize.sh "$BUILD_DIR"; fi
if [ "${BENCH:-1}" != 0 ]; then
  alone bench_ops 180 "$moesaic" bench ops --device cuda
  for model in mla_moe_5b hybrid_5b; do
    alone "bench_$model" 120 "$moesaic" bench step "configs/bench/$model.yaml" run.device=cuda data.train=README.md --steps 30
  done
fi
finish

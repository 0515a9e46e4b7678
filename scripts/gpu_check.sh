#!/usr/bin/env bash
# gpu_check.sh [CTEST_ARGUMENT…]: on a machine with a CUDA toolkit and a GPU, builds into build_gpu/, runs the CUDA tests and
# the reference cases in three types and the large cases, and prints the speed of every op. Installs nothing and needs no network. A test that
# finds no GPU fails. BENCH=0 leaves the speed out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export BUILD_DIR=build_gpu
export MOESAIC_REQUIRE_CUDA=1 OPENBLAS_NUM_THREADS=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
scripts/build.sh -DMOESAIC_CUDA=ON
moesaic=$BUILD_DIR/apps/moesaic
"$moesaic" --version

status=0
ctest --test-dir "$BUILD_DIR" -L cuda --output-on-failure --no-tests=error "$@" || status=1
for dtype in f64 f32 bf16; do
  echo "verify --device cuda --dtype $dtype"
  "$moesaic" verify --cases tests/golden --device cuda --dtype "$dtype" || status=1
done
# Large cases: the kernels for any size in f32, then the tiled ones, which must run.
for choice in "f32 --path plain" "bf16"; do
  echo "verify --large --device cuda --dtype $choice"
  # shellcheck disable=SC2086  # words of the choice are arguments
  "$moesaic" verify --large --device cuda --threads 8 --dtype $choice || status=1
done
if [ "${BENCH:-1}" != 0 ]; then "$moesaic" bench ops --device cuda || status=1; fi
exit $status

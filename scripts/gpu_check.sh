#!/usr/bin/env bash
# gpu_check.sh [CTEST_ARGUMENT…]: on a machine with a CUDA toolkit and a GPU, builds into build_gpu/
# and runs the CUDA tests. Installs nothing and needs no network. A test that finds no GPU fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export BUILD_DIR=build_gpu
scripts/build.sh -DMOESAIC_CUDA=ON
export MOESAIC_REQUIRE_CUDA=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
ctest --test-dir "$BUILD_DIR" -L cuda --output-on-failure --no-tests=error "$@"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader

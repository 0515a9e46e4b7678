#!/usr/bin/env bash
# test.sh [CTEST_ARGUMENT…]: installs what is missing, builds, runs all tests, closes with ctest's
# summary.    scripts/test.sh -L fast
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/install_packages.sh
scripts/build.sh
# mpirun refuses to run as root without both; containers and CI often are root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OPENBLAS_NUM_THREADS=1
ctest --test-dir "${BUILD_DIR:-build}" --output-on-failure --no-tests=error -j "$(nproc)" "$@"

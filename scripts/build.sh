#!/usr/bin/env bash
# build.sh [CMAKE_ARGUMENT…]: configures and builds into build/ (or $BUILD_DIR), Release.
#   scripts/build.sh -DMOESAIC_CUDA=OFF -DMOESAIC_MARCH=native
# BUILD_TARGET=moesaic builds the executable alone, without the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${BUILD_DIR:-build}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# CMake's output matters only when something is wrong.
if ! cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release "$@" >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
grep -E '^-- CUDA backend' "$log" || true
cmake --build "$build" -j "$(nproc)" ${BUILD_TARGET:+--target "$BUILD_TARGET"}

#!/usr/bin/env bash
# thread_check.sh [BUILD_DIR]: what runs on threads of its own, under ThreadSanitizer: file tier, homes and caches of experts,
# activations that wait in host memory, streams, and training with experts outside the device. Builds the tests for it first (-DMOESAIC_SANITIZE=thread,
# in build_threads). Prints a line for each; a race is in the log that it names, and the exit code is then 1. The build takes long, the
# tests some minutes. Not in CI. JOBS may be set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build=${1:-build_threads}
cmake -S . -B "$build" -G Ninja -DMOESAIC_CUDA=OFF -DMOESAIC_SANITIZE=thread >/dev/null
ninja -C "$build" -j "${JOBS:-$(nproc)}" test_memory test_nn test_train

# Tests fork processes that they kill.
export TSAN_OPTIONS="halt_on_error=0 exitcode=66 history_size=4 die_after_fork=0 ${TSAN_OPTIONS:-}" OPENBLAS_NUM_THREADS=1
failed=0
check() { # PROGRAM TESTS
  local started=$SECONDS result=ok
  "$build/tests/$1" "$2" >"$build/$1.log" 2>&1 || { result="FAILED, see $build/$1.log" failed=1; }
  printf '%-12s %-50s %4d s   %s\n' "$1" "$2" $((SECONDS - started)) "$result"
}
check test_memory '*'
check test_nn '*tier*,*member*,*stream*,*offload*'
check test_train '*offload*,*vertical*,*runs of experts*'
exit $failed

#!/usr/bin/env bash
# fuzz.sh [SECONDS] [NAME…]: builds the fuzz targets of tests/fuzz with clang (libFuzzer, AddressSanitizer,
# UndefinedBehaviorSanitizer) and runs each, or those named, for SECONDS (60). Prints the executions of each. Inputs that it
# finds interesting are kept in BUILD/corpus/NAME; the committed ones in tests/fuzz/corpus are read, not changed. An input
# that breaks something is left as BUILD/crashes/NAME-…; the exit code is then 1.    scripts/fuzz.sh 300 yaml manifest
# fuzz.sh keep [NAME…]: adds the fewest of the kept inputs to tests/fuzz/corpus that reach all code they reach together.
# Needs clang and its runtime (Debian and Ubuntu: apt-get install clang). FUZZ_BUILD_DIR, CLANGXX and JOBS may be set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=${1:-60}
case $seconds in
  keep) ;;
  *[!0-9]* | 0 | '') echo "fuzz.sh: SECONDS is '$seconds', must be a number from 1 (usage: fuzz.sh [SECONDS|keep] [NAME…])" >&2; exit 2 ;;
esac
shift || true
build=${FUZZ_BUILD_DIR:-build_fuzz}
clangxx=${CLANGXX:-clang++}
command -v "$clangxx" >/dev/null || {
  echo "fuzz.sh: no $clangxx; install it (Debian and Ubuntu: apt-get install clang) or set CLANGXX" >&2
  exit 2
}

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER="$clangxx" \
  -DMOESAIC_CUDA=OFF -DMOESAIC_FUZZ=ON >/dev/null
if [ $# -gt 0 ]; then names=("$@"); else mapfile -t names < <(cd tests/fuzz/corpus && printf '%s\n' *); fi
ninja -C "$build" -j "${JOBS:-$(nproc)}" "${names[@]/#/fuzz_}"

mkdir -p "$build/crashes" "$build/logs"
failed=0
for name in "${names[@]}"; do
  program=$(find "$build" -type f -name "fuzz_$name" -perm -u+x)
  mkdir -p "$build/corpus/$name"
  log=$build/logs/$name.log
  if [ "$seconds" = keep ]; then
    "$program" -set_cover_merge=1 -use_counters=0 -use_cmp=0 -max_len=16384 "tests/fuzz/corpus/$name" \
      "$build/corpus/$name" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
    printf '%-16s %6s inputs, %8s bytes\n' "$name" "$(find "tests/fuzz/corpus/$name" -type f | wc -l)" \
      "$(cat "tests/fuzz/corpus/$name"/* | wc -c)"
    continue
  fi
  started=$SECONDS
  result=ok
  "$program" "$build/corpus/$name" "tests/fuzz/corpus/$name" -max_total_time="$seconds" -rss_limit_mb=1024 -timeout=5 \
    -max_len=16384 -print_final_stats=1 -artifact_prefix="$build/crashes/$name-" >"$log" 2>&1 || { result="BROKEN, see $log"; failed=1; }
  executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  printf '%-16s %12s executions in %4d s   %s\n' "$name" "${executions:-?}" $((SECONDS - started)) "$result"
done
exit $failed

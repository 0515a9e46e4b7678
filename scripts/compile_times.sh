#!/usr/bin/env bash
# compile_times.sh [BUILD_DIR] [PATTERN]: CPU seconds that each CUDA source of a configured build takes from cold (ccache off,
# one at a time, objects thrown away), slowest first, and their sum. CPU seconds mean the same on a busy machine.
#   scripts/compile_times.sh build_cuda 'kda_.*'
set -euo pipefail
build=${1:-build} pattern=${2:-.*}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
export CCACHE_DISABLE=1 TIMEFORMAT='%U %S'
# shellcheck disable=SC2016  # perl's variables
ninja -C "$build" -t commands | perl -ne '
  s/^: && //; next unless m{ -c (\S+\.cu) } and $1 =~ m{/[^/]*$}; print' >"$out/commands"
while IFS= read -r command; do
  source=$(sed -E 's/.* -c ([^ ]+\.cu) .*/\1/' <<<"$command")
  grep -qE "/$pattern\.cu$" <<<"$source" || continue
  command=$(sed -E "s# -MF [^ ]+# -MF $out/d#; s# -o [^ ]+# -o $out/o#" <<<"$command")
  times=$( { time (cd "$build" && bash -c "$command" >"$out/log" 2>&1) ; } 2>&1) || { cat "$out/log"; exit 1; }
  awk -v s="$source" '{ printf "%7.2f  %s\n", $1 + $2, s }' <<<"$times"
done <"$out/commands" | sort -rn | awk '{ print; n += $1; ++files } END { printf "%7.2f  CPU seconds in %d files\n", n, files }'

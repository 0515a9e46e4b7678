#!/bin/sh
# check.sh GATE NVCC LAYERS WORK_DIR: the gate on CUDA compilations passes good kernels and fails each kind of slow one.
set -u
gate=$1 nvcc=$2 layers=$3 work=$4
here=$(cd "$(dirname "$0")" && pwd)
rm -rf "$work"
mkdir -p "$work"
fail() { echo "FAILED: $*"; cat "$work/said"; exit 1; }
compile() { # file, further flags…
  name=$1
  shift
  "$gate" "$nvcc" -I"$layers/kernels" -I"$layers/base" -I"$layers/memory" -std=c++20 -O3 --expt-relaxed-constexpr \
    '--generate-code=arch=compute_90a,code=[sm_90a]' "$@" -c "$here/$name.cu" -o "$work/$name.o" >"$work/said" 2>&1
}
refused() { # file, what the message says, further flags…
  name=$1 message=$2
  shift 2
  if compile "$name" "$@"; then fail "$name.cu passed"; fi
  grep -q "$message" "$work/said" || fail "$name.cu: no word of '$message'"
  [ ! -e "$work/$name.o" ] || fail "$name.cu: its object is still there, so the next build would take it"
}
compile fine -Xptxas=-v || fail "fine.cu was refused"
[ -s "$work/fine.o" ] && grep -q 'registers' "$work/fine.o.ptxas" || fail "fine.cu: no object or no report"
[ ! -s "$work/said" ] || fail "fine.cu: the report is not kept from the terminal"
refused serialised 'wgmma.mma_async instructions are serialized'
refused no_bounds "'setmaxnreg' ignored"
refused spill 'bytes spilled' -Xptxas=-v
refused indexed '256 bytes of stack' -Xptxas=-v
compile indexed || fail "indexed.cu without a report was refused: $(cat "$work/said")"
echo 'int x = ;' >"$work/broken.cu"
if "$gate" "$nvcc" -c "$work/broken.cu" -o "$work/broken.o" >"$work/said" 2>&1; then fail "broken.cu passed"; fi
grep -q 'expected an expression' "$work/said" || fail "broken.cu: the compiler's message is lost"
echo "cuda_gate: passed"

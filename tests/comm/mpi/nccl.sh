#!/bin/sh
# nccl.sh MPIRUN TEST_COMM_MPI: the conformance suite on GPUs. Two ranks take two devices, or share the only one.
mpirun=$1
program=$2
fail=0
devices=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
if [ "$devices" -eq 0 ]; then
  if [ "$MOESAIC_REQUIRE_CUDA" = 1 ]; then echo "FAILED: MOESAIC_REQUIRE_CUDA=1, but there is no CUDA device"; exit 1; fi
  echo "SKIPPED: no CUDA device"
  exit 0
fi
ranks() {  # ranks N ARGUMENT…
  n=$1
  shift
  "$mpirun" -np "$n" --oversubscribe --bind-to none "$program" "$@"
}
expect() {  # expect CODE FOUND WHAT
  if [ "$1" -ne "$2" ]; then echo "FAILED: $3 ended with $2, expected $1"; fail=1; else echo "passed: $3"; fi
}
ranks 1 --nccl
expect 0 $? "one rank"
if [ "$devices" -ge 2 ]; then
  ranks 2 --nccl
  expect 0 $? "two ranks on two devices"
  ranks 2 --nccl --library
  expect 0 $? "the library's reduction"
else
  ranks 2 --nccl 2>shared.log
  expect 2 $? "two ranks on one device without leave"
  grep -q 'would use the same GPU' shared.log || { echo "FAILED: no explanation"; cat shared.log; fail=1; }
  ranks 2 --nccl --share
  expect 0 $? "two ranks in turns on one device"
fi
exit $fail

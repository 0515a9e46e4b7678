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
# Ranks that share a device pose as ranks of different machines: NCCL carries what is between them over sockets.
# hang RANKS ARGUMENT…: the last rank computes for ever; the others' exchange on the device is named.
hang() {
  board=$(mktemp -d)
  n=$1
  shift
  timeout -k 5 90 "$mpirun" -np "$n" --oversubscribe --bind-to none "$program" --nccl "$@" --spin "$board/board" >hang.log 2>&1
  expect 124 $? "$n ranks, the last of which computes for ever"
  grep -Eq "no progress for .*: rank $((n - 1)) is behind: testing; in no exchange .*wait.* in all_reduce #4 of group world \($n ranks" hang.log ||
    { echo "FAILED: the exchange on the device is not named"; fail=1; cat hang.log; }
  rm -rf "$board"
}
ranks 1 --nccl
expect 0 $? "one rank"
if [ "$devices" -ge 2 ]; then
  ranks 2 --nccl --delays 1
  expect 0 $? "two ranks on two devices, each in its own time"
  ranks 2 --nccl --library
  expect 0 $? "the library's reduction"
  ranks 2 --nccl --large
  expect 0 $? "messages beyond 2 GiB"
  ranks 4 --nccl --share
  expect 0 $? "four ranks on two devices, as two machines of two"
  hang 2
else
  ranks 2 --nccl 2>shared.log
  expect 2 $? "two ranks on one device without leave"
  grep -q 'would use the same GPU' shared.log || { echo "FAILED: no explanation"; cat shared.log; fail=1; }
  ranks 2 --nccl --share
  expect 0 $? "two ranks in turns on one device"
  ranks 3 --nccl --share --delays 2
  expect 0 $? "three ranks in turns on one device, each in its own time"
  hang 2 --share
fi
exit $fail

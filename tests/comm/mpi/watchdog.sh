#!/bin/sh
# watchdog.sh MPIRUN TEST_COMM_MPI WORK_DIR: a rank that computes for ever, and one that enters another operation than the
# others, are named by one message, and the job ends with 124 in bounded time.
mpirun=$1
program=$2
rm -rf "$3"
mkdir -p "$3" && cd "$3" || exit 1
fail=0
hang() {  # OPTION RANKS TEXT
  begin=$(date +%s)
  timeout -k 5 60 "$mpirun" -np "$2" --oversubscribe --bind-to none "$program" "$1" board >hang.log 2>&1
  code=$?
  seconds=$(($(date +%s) - begin))
  if [ $code -ne 124 ] || [ $seconds -ge 40 ]; then echo "FAILED: $1 ended with $code after $seconds s"; fail=1; fi
  grep -Eq "no progress for .*: $3" hang.log || { echo "FAILED: $1: '$3' is not said"; fail=1; }
  [ "$(grep -c 'no progress for' hang.log)" -eq 1 ] || { echo "FAILED: $1: more than one message"; fail=1; }
  [ -s board/hang.txt ] || { echo "FAILED: $1: no hang.txt"; fail=1; }
  [ $fail -eq 0 ] || { cat hang.log; exit 1; }
  echo "passed: $1 on $2 ranks, $seconds s: $(grep -m1 'no progress for' hang.log)"
  rm -rf board
}
hang --spin 3 'rank 2 is behind: testing; in no exchange .*while ranks 0, 1 wait in all_reduce #5 of group world \(3 ranks, 8.0 kB\)'
hang --mismatch 2 'ranks are in exchanges that do not fit together: rank 0 in all_reduce #5 .*rank 1 in barrier #5'
hang --spin 1 'rank 0 is behind: testing; in no exchange'

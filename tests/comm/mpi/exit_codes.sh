#!/bin/sh
# exit_codes.sh MPIRUN TEST_COMM_MPI: one rank's code ends the job, and a launch that MPI does not see is refused.
mpirun=$1
program=$2
fail=0
expect() {  # expect CODE FOUND WHAT
  if [ "$1" -ne "$2" ]; then echo "FAILED: $3 ended with $2, expected $1"; fail=1; else echo "passed: $3 ended with $1"; fi
}
"$mpirun" -np 2 --oversubscribe --bind-to none "$program" --abort 42 >abort.log 2>&1
expect 42 $? "abort(42) while the other rank waits"
grep -q 'ends the job with code 42: planned' abort.log || { echo "FAILED: no reason printed"; cat abort.log; fail=1; }
SLURM_NTASKS=2 "$program" 2>singleton.log
expect 2 $? "a single process of SLURM_NTASKS=2"
grep -q 'SLURM_NTASKS=2' singleton.log || { echo "FAILED: no explanation"; cat singleton.log; fail=1; }
exit $fail

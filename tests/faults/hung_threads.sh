#!/bin/sh
# hung_threads.sh MPIRUN MOESAIC WORK_DIR SHIM: `selftest layouts` on threads of one process whose writes to the file of offloaded
# experts take for ever: the watchdog ends it with exit code 124 and names the layout.
set -eu
shim=$(realpath "$4")
. "${0%/*}/../cli/scripts/functions.sh"
enter "$1" "$2" "$3"
expert_run
mkdir tier
here=$(pwd -P)
test_with() { # variables of the shim…
  env LD_PRELOAD="$shim" FAULT_FOLDER="$here/tier" FAULT_NO_RING=1 "$@" "$moesaic" selftest layouts tiny.yaml --ranks 2 --layouts "dp=2,ep=2" --steps 1 \
    experts.offload=states experts.device_cache=80KiB memory.host_budget=120KiB memory.file_budget=2MiB memory.file_path="$here/tier" \
    comm.watchdog_s=2 comm.first_step_s=2
}
expect 0 "1 of 1 layouts agree with one rank" test_with FAULT_DELAY=1
expect 124 "no progress for 2 s: training in layout one rank" test_with FAULT_DELAY=600000
case $out in *"this ends the test with exit code 124"*) ;; *) fail "no word of the exit code: $out" ;; esac
echo "hung threads: all checks passed"

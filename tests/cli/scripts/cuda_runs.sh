# Sourced by the tests that train on a GPU, after functions.sh.

# enter_cuda MPIRUN MOESAIC WORK_DIR: as enter, with tiny.yaml for the GPU; leaves the test where there is none. $devices: how
# many there are; $share: what two ranks need to run on them.
enter_cuda() {
  devices=$(nvidia-smi --list-gpus 2> /dev/null | grep -c '^GPU' || true)
  if [ "$devices" -eq 0 ]; then
    if [ "${MOESAIC_REQUIRE_CUDA:-}" = 1 ]; then fail "MOESAIC_REQUIRE_CUDA=1, but there is no CUDA device"; fi
    echo "SKIPPED: no CUDA device"
    exit 0
  fi
  [ "$devices" -ge 2 ] && share='' || share=comm.share_gpu=true
  enter "$1" "$2" "$3"
  small_text > text.txt
  hybrid_yaml 64 3 full | sed 's/device: cpu/device: cuda/' > tiny.yaml
}
# The last evaluation's loss in what a run printed.
loss() { grep -o 'eval loss [0-9.]*' "$1" | tail -1 | awk '{ print $3 }'; }
close() { # what, file, file, relative difference
  awk -v a="$(loss "$2")" -v b="$(loss "$3")" -v t="$4" -v w="$1" \
    'BEGIN { d = a > b ? a - b : b - a; print w ":", a, "and", b; exit !(a > 0 && d <= t * b) }' || fail "$1: losses differ"
}
# selftest RANKS ARGUMENT…: the table is in table.txt. Ranks that wait for each other say where, and end.
selftest() {
  n=$1
  shift
  timeout -k 5 150 "$mpirun" -np "$n" --oversubscribe --bind-to none "$moesaic" selftest layouts tiny.yaml run.device=cuda \
    comm.watchdog_s=60 comm.first_step_s=60 "model.mtp={num_nextn_predict_layers: 1}" "$@" > table.txt 2>&1
}

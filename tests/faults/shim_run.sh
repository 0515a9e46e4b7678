# Sourced by the tests that have a fault at a chosen call, with MPIRUN MOESAIC WORK_DIR SHIM as $1 … $4: a run of two steps in
# folder $dir, under the shim, in one of its lives.
dir=${dir:-run}
shim=$(realpath "$4")
. "${0%/*}/same_end.sh"
here=$(pwd -P)
steps=2
settings="train.steps=2 model.num_experts=2 model.num_experts_per_token=1 checkpoint.every=1 checkpoint.keep_last=1 train.eval_every=2 run.dir=$dir"

two_ranks() { "$mpirun" -np 2 --oversubscribe --bind-to none "$@"; }
# Kinds: single (one process), writer (two ranks, rank 0 counts and suffers), other (rank 0 counts, the other rank dies).
start() { # kind, variables of the shim…
  kind=$1
  shift
  set -- LD_PRELOAD="$shim" FAULT_FOLDER="$here/$dir" FAULT_LOG="$here/calls" "$@"
  case $kind in
    single) env "$@" "$moesaic" train tiny.yaml $settings ;;
    writer) two_ranks env FAULT_RANK=0 "$@" "$moesaic" train tiny.yaml $settings ;;
    other) two_ranks env FAULT_RANK=0 FAULT_VICTIM="$here/victim" "$@" "$moesaic" train tiny.yaml $settings ;;
    *) fail "no such kind: $kind" ;;
  esac
}
# The same without faults; with a checkpoint the run's own copy of the configuration must do.
again() { # kind
  if [ $whole_ones -gt 0 ]; then set -- "$1" resume "$dir"; else set -- "$1" train tiny.yaml $settings; fi
  kind=$1
  shift
  case $kind in
    single) "$moesaic" "$@" > out.txt 2>&1 || fail "$what: $* ends with $?: $(cat out.txt)" ;;
    *) two_ranks "$moesaic" "$@" > out.txt 2>&1 || fail "$what: $* on two ranks ends with $?: $(cat out.txt)" ;;
  esac
}
# The quiet run (folder whole), and what the second life starts from (folder base): stopped after a step, with half a
# checkpoint where the next one goes.
quiet_run() { # kind
  rm -rf "$dir" whole base
  train="$moesaic train tiny.yaml $settings"
  [ "$1" = single ] || train="$mpirun -np 2 --oversubscribe --bind-to none $train"
  $train > out.txt 2>&1 || fail "the quiet run: $(cat out.txt)"
  mv "$dir" whole
  expect 75 "step 1 of 2" $train run.max_minutes=0.00001
  mkdir "$dir/checkpoints/step-00000002"
  echo half > "$dir/checkpoints/step-00000002/model.safetensors"
  mv "$dir" base
}
prepare() { # life
  rm -rf "$dir" calls victim
  [ "$1" = first ] || cp -r base "$dir"
}
count_calls() { # life, kind, variables of the shim…: sets $points; their names are in the file counted
  prepare "$1"
  shift
  start "$@" > out.txt 2>&1 || fail "counting: $(cat out.txt)"
  mv calls counted
  points=$(wc -l < counted)
  [ "$points" -gt 50 ] || fail "only $points calls were counted: the shim does not see the run"
  grep -q 'renameat2 .*/step-' counted || fail "no renaming of a checkpoint was counted"
}

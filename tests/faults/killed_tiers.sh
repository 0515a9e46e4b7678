#!/bin/sh
# killed_tiers.sh MPIRUN MOESAIC WORK_DIR SHIM [ROUNDS [SEED]]: SIGKILL while weights and states of experts are on their way to the
# file of the file tier. Kinds, ROUNDS of each: at a write to the file, half of it done (write); with requests in the ring of
# io_uring (ring); at a random time, with slow writes (timed); one of two ranks at such a write, the one that counts them (writer)
# or the other (other). What the killed run left of the file is then damaged, for it must not be read, and a second life with
# other budgets is killed as well. Afterwards the same command comes to the bits and records of the quiet run, which has the
# bits of one without offload, and no file is left. KINDS chooses some.
set -eu
rounds=${5:-2} seed=${6:-1}
shim=$(realpath "$4")
. "${0%/*}/same_end.sh"
expert_run
here=$(pwd -P)
steps=8
settings="train.steps=$steps checkpoint.every=2 checkpoint.keep_last=2"
common="experts.offload=full memory.file_budget=4MiB memory.file_path=tier"
# Weights and states in the file; then states alone, less of them, and weights that stay on the device. Of two ranks each has
# half of the states.
choose() { # kind
  case $1 in writer | other) host=240 more_host=240 ;; *) host=300 more_host=350 ;; esac
  tiers="$common experts.device_cache=180KiB memory.host_budget=${host}KiB"
  others="$common experts.device_cache=220KiB memory.host_budget=${more_host}KiB experts.policy=random"
}

# The command of a life, and the variables of the shim in it.
life() { # kind, settings, variables…
  of=$1 with=$2
  shift 2
  set -- LD_PRELOAD="$shim" FAULT_FOLDER="$here/tier" FAULT_LOG="$here/calls" "$@"
  case $of in
    write | timed) exec env FAULT_NO_RING=1 "$@" "$moesaic" train tiny.yaml run.dir=run $settings $with ;;
    ring) exec env FAULT_RING=1 "$@" "$moesaic" train tiny.yaml run.dir=run $settings $with ;;
    writer) exec "$mpirun" -np 2 --oversubscribe --bind-to none env FAULT_RANK=0 FAULT_RING=1 "$@" "$moesaic" train tiny.yaml run.dir=run $settings $with ;;
    other) exec "$mpirun" -np 2 --oversubscribe --bind-to none env FAULT_RANK=0 FAULT_VICTIM="$here/victim" FAULT_NO_RING=1 "$@" "$moesaic" train tiny.yaml run.dir=run $settings $with ;;
    *) fail "no such kind: $of" ;;
  esac
}
# Without a fault. For calls: how many there are; for times: how long it takes.
quiet() { # kind
  rm -rf run tier calls
  [ "$1" = timed ] && slow=FAULT_DELAY=$delay || slow=FAULT_DELAY=0
  began=$(date +%s%N)
  (life "$1" "$tiers" $slow) > out.txt 2>&1 || fail "the quiet run, $1: $(cat out.txt)"
  longest=$((($(date +%s%N) - began) / 1000000)) # milliseconds
  points=$(wc -l < calls)
  [ "$points" -gt 100 ] || fail "$1: only $points calls were counted: the shim does not see the file"
}
crash() { # kind, settings, what happens, in the first of how many equal parts of a whole run
  rm -f calls victim
  code=0
  if [ "$1" = timed ]; then
    (life "$1" "$2" FAULT_DELAY=$delay) > out.txt 2>&1 &
    process=$!
    draw $((longest / $4))
    sleep "$(perl -e 'print $ARGV[0] / 1000' $number)"
    kill -KILL $process 2> /dev/null || true
    wait $process || code=$?
    what="$3, after $number ms"
  else
    draw $((points / $4))
    (life "$1" "$2" FAULT_AT=$((number + 1))) > out.txt 2>&1 &
    wait $! || code=$?
    what="$3, call $((number + 1)) ($(sed -n "$((number + 1))p" calls 2> /dev/null || true))"
  fi
  case $code in
    137) crashes=$((crashes + 1)) ;;
    0) late=$((late + 1)) ;; # it was not long enough
    *) fail "$what: exit $code: $(cat out.txt)" ;;
  esac
  only_whole_checkpoints run "$what"
}
# What a killed run left is one of our files, from its first byte on. Its records become such that nobody would notice, or the
# file longer or shorter than the next run's.
damage() {
  for file in tier/*.bin; do
    [ -e "$file" ] || continue
    leftovers=$((leftovers + 1))
    [ -s "$file" ] || continue # killed before it wrote anything
    [ "$(head -c 8 "$file")" = MOESTIER ] || fail "$what: $file has no magic"
    draw 4
    case $number in
      0) ;; # as it is
      1) perl -e 'open F, "+<", $ARGV[0] or die; $n = -s F; seek F, 4096, 0; print F pack("f", 0.01) x (($n - 4096) / 4) if $n > 4096' "$file" ;;
      2) perl -e 'open F, ">>", $ARGV[0] or die; print F "\xff" x 3000000' "$file" ;;
      3) truncate -s 8 "$file" ;;
    esac
  done
}

delay=2 crashes=0 late=0 leftovers=0 same=0
for kind in ${KINDS:-write ring timed writer other}; do
  choose $kind
  quiet $kind
  rm -rf whole plain
  mv run whole
  case $kind in
    writer | other) run run.dir=plain $settings > out.txt ;;
    *) "$moesaic" train tiny.yaml run.dir=plain $settings > out.txt ;;
  esac
  expect 0 "tensors have equal bits, 0 differ" "$moesaic" ckpt diff plain whole
  round=0 began=$(date +%s)
  while [ $round -lt "$rounds" ]; do
    round=$((round + 1))
    rm -rf run tier
    crash $kind "$tiers" "$kind, seed $seed, round $round" 1
    damage
    crash $kind "$others" "$kind, seed $seed, round $round, second life" 4
    damage
    (life $kind "$tiers") > out.txt 2>&1 || fail "$what: the last life ends with $?: $(cat out.txt)"
    same_end run "$what"
    expect 0 "tensors have equal bits, 0 differ" "$moesaic" ckpt diff plain run
    [ -z "$(ls tier)" ] || fail "$what: left in the folder of the file tier: $(ls tier)"
    same=$((same + 1))
  done
  echo "$kind: $points calls, $longest ms; $rounds rounds, $(($(date +%s) - began)) s"
done
[ $((2 * crashes)) -gt $((crashes + late)) ] || fail "of $((crashes + late)) crashes $late came too late"
[ $leftovers -gt 0 ] || fail "no killed run left a file"
echo "killed tiers: all checks passed ($crashes crashes, $late came too late, $leftovers files left by them; $same runs came to the same end; seed $seed)"

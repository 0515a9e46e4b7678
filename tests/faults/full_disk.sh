#!/bin/sh
# full_disk.sh MPIRUN MOESAIC WORK_DIR SHIM [COUNT [SEED]]: the run's folder lies on a disk (a small tmpfs) that becomes full: for
# want of space, of every size from 4 KiB up to what the run needs; for want of inodes, of every number; and because somebody
# else fills it at each call that changes a file. The run ends with 4 and says which file, every checkpoint there is whole, and after
# the disk has grown the same command comes to the bits and records of the quiet run. In a first and a second life.
# With COUNT, only as many of each kind, drawn by SEED. LIVES chooses. Needs root to mount; else it is skipped, exit code 77.
set -eu
count=${5:-all} seed=${6:-1}
dir=disk/run
umount "$3/disk" 2> /dev/null || true # of a test that was killed
. "${0%/*}/shim_run.sh"
mkdir disk
mount -t tmpfs -o size=64m none disk 2> out.txt || {
  echo "SKIPPED: a small disk cannot be mounted here: $(cat out.txt)"
  exit 77
}
trap 'umount disk' EXIT

resize() { mount -o "remount,size=$1k,nr_inodes=$2" disk || fail "cannot make the disk $1 KiB and $2 inodes"; }
grow() { resize 65536 10000; }
# Sets $enough: nothing was missing.
full() { # life, what is missing, KiB and inodes to add, variables of the shim…
  life=$1 what="$1 life, $2"
  grow
  rm -f disk/filler
  prepare "$life"
  resize $(($(du -sk disk | cut -f1) + $3)) $(($(find disk | wc -l) + $4))
  shift 4
  code=0
  start single "$@" > out.txt 2>&1 || code=$?
  enough=no
  case $code in
    4) grep -q "disk/run" out.txt && grep -qE 'No space left on device|MiB are free' out.txt || fail "$what: no word about file and disk: $(cat out.txt)" ;;
    0) grep -q 'could not be saved' out.txt || enough=yes ;;
    *) fail "$what: exit $code: $(cat out.txt)" ;;
  esac
  only_whole_checkpoints $dir "$what"
  [ "$life" = first ] || [ $whole_ones -gt 0 ] || fail "$what: no checkpoint is left"
  grow
  [ $code -eq 0 ] || again single
  same_end $dir "$what"
  [ $enough = yes ] || stops=$((stops + 1))
}
numbers() { # from, step, to: all of them, or as many as were asked for
  if [ "$count" = all ]; then
    seq "$1" "$2" "$3"
  else
    for _ in $(seq "$count"); do
      draw $((($3 - $1) / $2 + 1))
      echo $(($1 + number * $2))
    done
  fi
}
stops=0
quiet_run single
needed=$(($(du -sk whole | cut -f1) * 3)) # two checkpoints and one in the making
for life in ${LIVES:-first second}; do
  began=$(date +%s) before=$stops
  numbers 4 4 $needed > wanted.txt
  while read -r kib; do
    full $life "$kib KiB" "$kib" 1000 < /dev/null
    [ $enough = no ] || [ "$count" != all ] || break
  done < wanted.txt
  echo "$life life: $((stops - before)) sizes of the disk that were too small, $(($(date +%s) - began)) s"
  began=$(date +%s) before=$stops
  numbers 1 1 30 > wanted.txt
  while read -r inodes; do
    full $life "$inodes inodes" 60000 "$inodes" < /dev/null
    [ $enough = no ] || [ "$count" != all ] || break
  done < wanted.txt
  echo "$life life: $((stops - before)) numbers of inodes that were too small, $(($(date +%s) - began)) s"
  began=$(date +%s) before=$stops
  count_calls $life single
  numbers 1 1 "$points" > wanted.txt
  while read -r at; do
    full $life "filled at call $at ($(sed -n "${at}p" counted))" 8192 1000 FAULT_FILL="$here/disk/filler" FAULT_AT="$at" < /dev/null
  done < wanted.txt
  echo "$life life: $(wc -l < wanted.txt) fillings at a call, of $points; $((stops - before)) stopped the run, $(($(date +%s) - began)) s"
done
[ $stops -gt 0 ] || fail "the disk was never full"
echo "full disk: all checks passed ($stops runs stopped by it, seed $seed)"

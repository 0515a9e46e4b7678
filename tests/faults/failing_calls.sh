#!/bin/sh
# failing_calls.sh MPIRUN MOESAIC WORK_DIR SHIM [COUNT [SEED]]: each call that changes a file of the run's folder fails, with
# EIO, ENOSPC or EDQUOT, with saves in the background and at once, in two lives. The run ends with 4 and names the file, and the tensor
# that was being written; every checkpoint there is whole; the same command then comes to the bits and records of
# the quiet run. (A background save of the last step that fails is said, and tried once more; then the run may end with 0.) A write that is cut short or interrupted (EINTR) changes nothing.
# With COUNT, only as many points of each kind, drawn by SEED, and once every third call that is no write, and all
# writes of metrics.jsonl.
# KINDS (single, writer), LIVES, ERRORS and ASYNCS (true, false) choose some of them.
set -eu
count=${5:-all} seed=${6:-1}
. "${0%/*}/shim_run.sh"
quiet_settings=$settings

# The call's file or its folder must be in the message; of a temporary name, the process's number may differ.
named() { # path
  name=${1##*/} folder=${1%/*}
  grep -qF "$name" out.txt || grep -qF "${folder##*/}:" out.txt || fail "$what: neither $name nor its folder is named: $(cat out.txt)"
}
faulty() { # life, kind, error or SHORT, call
  prepare "$1"
  case $3 in SHORT) fault=FAULT_SHORT=1 ;; *) fault=FAULT_ERROR=$3 ;; esac
  code=0
  start "$2" FAULT_CLOSES=1 FAULT_AT="$4" $fault > out.txt 2>&1 || code=$?
  call=$(sed -n "${4}p" calls)
  what="$1 life, $2, async=$async, $3 at call $call"
  want=4
  case $3 in SHORT | EINTR) want=0 ;; esac
  # What stands in it is for a reader; it was written, and the lock itself is no matter of the disk.
  case $call in *" close "*/.lock) want=0 ;; esac
  saved_again=$(grep -c 'of step 2 could not be saved' out.txt || true)
  case $code$want$async in 04true) [ "$saved_again" -gt 0 ] && code=4 ;; esac
  # The mark of a run that is done comes last, and a run without it is as good.
  if [ $code -eq 0 ] && grep -Eq 'warning .*/finished: ' out.txt; then want=0; fi
  [ $code -eq $want ] || fail "$what: exit $code instead of $want: $(cat out.txt)"
  only_whole_checkpoints run "$what"
  if [ $want -eq 4 ]; then
    named "${call##* }"
    case $call in
      *" write "*.safetensors) # the first one is the header
        [ "$(head -n "$4" calls | grep -cF "${call#* }")" -eq 1 ] || grep -q "(in tensor '" out.txt || fail "$what: the tensor is not named: $(cat out.txt)"
        ;;
    esac
    [ "$1" = first ] || [ $whole_ones -gt 0 ] || fail "$what: no checkpoint is left"
    again "$2"
  fi
  same_end run "$what"
  faults=$((faults + 1))
}
faults=0
for kind in ${KINDS:-single}; do
  settings=$quiet_settings
  quiet_run $kind
  for async in ${ASYNCS:-true false}; do
    settings="$quiet_settings checkpoint.async=$async"
    for life in ${LIVES:-first second}; do
      count_calls $life $kind FAULT_CLOSES=1
      writes=$(awk '$2 ~ /^write/ { print $1 }' counted) others=$(awk '$2 !~ /^write/ { print $1 }' counted)
      for error in ${ERRORS:-EIO ENOSPC EDQUOT SHORT EINTR}; do
        before=$faults began=$(date +%s)
        case $error in SHORT | EINTR) chosen=$writes ;; *) chosen="$writes $others" ;; esac
        if [ "$count" != all ]; then
          set -- $chosen
          chosen=
          for _ in $(seq "$count"); do
            draw $#
            chosen="$chosen $(echo "$@" | cut -d' ' -f$((number + 1)))"
          done
          case $life$async$error in secondtrueEIO) chosen="$chosen $(echo "$others" | awk -v seed="$seed" 'NR % 3 == seed % 3') $(awk '/ write .*metrics.jsonl/ { print $1 }' counted)" ;; esac
        fi
        for at in $chosen; do faulty $life $kind $error "$at"; done
        echo "$kind, $life life, async=$async, $error: $points calls, $((faults - before)) faults, $(($(date +%s) - began)) s"
      done
    done
  done
done
[ $faults -gt 0 ] || fail "nothing failed"
echo "failing calls: all checks passed ($faults faults, seed $seed)"

#!/bin/sh
# traced_calls.sh MPIRUN MOESAIC WORK_DIR [COUNT [SEED]]: the same criterion as failing_calls.sh, with faults that strace
# puts into system calls: EIO and ENOSPC of writes, writes that claim to have written (nothing, or 100 bytes), EIO of fsync, close,
# renaming, cutting and removing, ENOSPC of making a file or a folder, EIO of opening one to read. Every call on a path of the run's
# folder has its turn, with COUNT as many of each kind, drawn by SEED, in a first and a second life, with saves in the background and
# at once. LIVES and ASYNCS choose some of them. Needs strace, and root for a process namespace, in which names of temporary
# folders are known before; else it is skipped, exit code 77.
set -eu
count=${4:-all} seed=${5:-1}
. "${0%/*}/same_end.sh"
apart="unshare --pid --fork --mount-proc"
$apart strace -f -o trace.txt true > out.txt 2>&1 || {
  echo "SKIPPED: strace in a process namespace of its own is not possible here: $(cat out.txt)"
  exit 77
}
here=$(pwd -P)
steps=2
quiet_settings="train.steps=2 model.num_experts=2 model.num_experts_per_token=1 checkpoint.every=1 checkpoint.keep_last=1 train.eval_every=2 run.dir=$here/run"
settings=$quiet_settings

traced() { # argument of strace…
  $apart strace -f -y -s 0 -qq --seccomp-bpf -o trace.txt "$@" "$moesaic" train tiny.yaml $settings > out.txt 2>&1
}
prepare() { # life
  rm -rf run
  [ "$1" = first ] || cp -r base run
}
# Lines "call path number fault" of what may fail in the trace of a quiet run. The number counts calls of a thread on a path.
points() {
  perl -ne '
    my ($thread, $call, $rest) = /^(\d+) +(\w+)\((.*)/ or next;
    # strace selects renames by the old name, and what is named below an open folder by the folder.
    my @paths = ($rest =~ /"([^"]*)"\.*/g);
    my ($of_descriptor) = $rest =~ /^\d+<([^>]*)>/;
    my $path = $of_descriptor // $paths[$call eq "rename" ? 0 : -1] // next;
    next unless index($path, $ENV{FOLDER}) == 0;
    next if $path =~ /tfevents\.1/; # the time is in the name
    my $n = ++$count{"$thread $call $path"};
    $written{$path} = 1 if $call eq "write";
    my @faults = $call eq "write" ? ("error=EIO", "error=ENOSPC", "retval=0", ($path =~ m{/checkpoints/}) ? "retval=100" : ())
      : $call eq "openat" ? ($rest =~ /O_CREAT/ ? "error=ENOSPC" : "error=EIO") : $call eq "mkdir" ? "error=ENOSPC"
      : $call eq "close" ? (delete $written{$path} && $path !~ /\.lock$/ ? "error=EIO" : ()) : "error=EIO";
    for (@faults) { print "$call $path $n $_\n" unless $seen{"$call $path $n $_"}++ }' trace.txt
}
faulty() { # life, call, path, number, fault
  prepare "$1"
  code=0
  traced -P "$3" -e trace="$2" -e inject="$2:$5:when=$4" || code=$?
  what="$1 life, async=$async, $5 at $2 number $4 of $3"
  grep -q '(INJECTED)' trace.txt || {
    missed=$((missed + 1))
    echo "not reached: $what"
    return 0
  }
  only_whole_checkpoints run "$what"
  [ "$1" = first ] || [ $whole_ones -gt 0 ] || fail "$what: no checkpoint is left"
  case $code in
    4) ;;
    3) [ "$2" = openat ] || fail "$what: exit 3: $(cat out.txt)" ;;
    # A file that need not be read, a last save that succeeded when it was tried again, or the mark of a run that is done.
    0) [ "$2" = openat ] || grep -Eq 'of step 2 could not be saved|warning .*/finished: ' out.txt || fail "$what: nobody saw it: $(cat out.txt)" ;;
    *) fail "$what: exit $code: $(cat out.txt)" ;;
  esac
  if [ $code -ne 0 ]; then
    name=$(basename "$3" .tmp) folder=${3%/*}
    case $2 in rename*) name=$(echo "$name" | sed 's/^[.]tmp-\(step-[0-9]*\).*/\1/') ;; esac # the new one is what is said
    grep -qF "$name" out.txt || grep -qF "${folder##*/}:" out.txt || fail "$what: neither $name nor its folder is named: $(cat out.txt)"
    case $2$5$3 in
      writeerror*.safetensors) [ "$4" -eq 1 ] || grep -q "(in tensor '" out.txt || fail "$what: the tensor is not named: $(cat out.txt)" ;;
    esac
  fi
  # Who cannot read a manifest deletes none; the next start does that.
  if [ $code -ne 0 ] || [ "$2" = openat ]; then
    "$moesaic" train tiny.yaml $settings > out.txt 2>&1 || fail "$what: the next start ends with $?: $(cat out.txt)"
  fi
  same_end run "$what"
  faults=$((faults + 1))
}
"$moesaic" train tiny.yaml $settings > out.txt 2>&1 || fail "the quiet run: $(cat out.txt)"
mv run whole
expect 75 "step 1 of 2" "$moesaic" train tiny.yaml $settings run.max_minutes=0.00001
mkdir run/checkpoints/step-00000002
echo half > run/checkpoints/step-00000002/model.safetensors
# The next event file gets the number after this one, whatever the time.
: > run/tensorboard/events.out.tfevents.4000000000.host.1.0
mv run base
faults=0 missed=0
for async in ${ASYNCS:-true false}; do
  settings="$quiet_settings checkpoint.async=$async"
  for life in ${LIVES:-first second}; do
    prepare $life
    traced -e trace=openat,write,fsync,close,ftruncate,mkdir,rename,renameat2,unlink,unlinkat,rmdir || fail "counting: $(cat out.txt)"
    FOLDER=$here/run points > points.txt
    for call in write openat fsync close ftruncate mkdir rename renameat2 unlink unlinkat; do
      grep "^$call " points.txt > chosen.txt || continue
      all=$(wc -l < chosen.txt)
      before=$faults began=$(date +%s)
      if [ "$count" != all ] && [ "$count" -lt "$all" ]; then
        mv chosen.txt all.txt
        for _ in $(seq "$count"); do
          draw "$all"
          sed -n "$((number + 1))p" all.txt
        done > chosen.txt
      fi
      while read -r name path at fault; do faulty $life "$name" "$path" "$at" "$fault" < /dev/null; done < chosen.txt
      echo "$life life, async=$async, $call: $all possible, $((faults - before)) faults, $(($(date +%s) - began)) s"
    done
  done
done
[ $faults -gt 0 ] || fail "nothing failed"
[ $((missed * 10)) -le $faults ] || fail "$missed faults were not reached, of $((missed + faults))"
echo "traced calls: all checks passed ($faults faults, $missed not reached, seed $seed)"

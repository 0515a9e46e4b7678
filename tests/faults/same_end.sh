# Sourced by the fault tests, with MPIRUN MOESAIC WORK_DIR as $1 $2 $3: the tiny run of tests/cli/scripts, and what must hold
# of its folder after a fault.
scripts=${0%/*}/../cli/scripts
. "$scripts/tiny_run.sh"

last_step() { printf 'checkpoints/step-%08d' "$steps"; }
# Every folder with the name and the manifest of a checkpoint is one, to the last byte.
only_whole_checkpoints() { # run folder, what happened
  whole_ones=0
  for manifest in "$1"/checkpoints/step-*/manifest.json; do
    [ -e "$manifest" ] || continue
    out=$("$moesaic" ckpt verify "${manifest%/*}" 2>&1) || fail "$2: ${manifest%/*} is not whole: $out"
    whole_ones=$((whole_ones + 1))
  done
  n=$(find . -path "./$1/*" -name '*.tmp-*' | wc -l)
  [ "$n" -le 1 ] || fail "$2: $n temporary folders: $(find "$1" -name '*.tmp-*')"
  [ ! -e "$1/config.yaml" ] || [ "$(wc -l < "$1/config.yaml")" -eq "$(wc -l < whole/config.yaml)" ] || fail "$2: config.yaml is torn: $(tail -n 1 "$1/config.yaml")"
}
# The run has come to its end with the bits and the records of the run in folder `whole`.
same_end() { # run folder, what happened
  [ -e "$1/$(last_step)/manifest.json" ] || fail "$2: no last checkpoint"
  same_state "whole/$(last_step)" "$1/$(last_step)" "$2"
  [ -z "$(find "$1" -name '*.tmp*')" ] || fail "$2: left over: $(find "$1" -name '*.tmp*')"
  set -- "$1" "$2" "$(echo whole/checkpoints/step-*)" "$(echo "$1"/checkpoints/step-*)"
  [ "$(echo "$3" | wc -w)" -eq "$(echo "$4" | wc -w)" ] || fail "$2: the quiet run leaves $3, this one $4"
  [ whole.records -nt whole/metrics.jsonl ] || same_records whole/metrics.jsonl > whole.records
  same_records "$1/metrics.jsonl" > run.records
  [ -s whole.records ] || fail "$2: no records to compare"
  cmp whole.records run.records || fail "$2: metrics.jsonl differs from the quiet run"
}
# A number from 0 to $1 - 1 out of a sequence that the seed fixes.
drawn=0
draw() {
  drawn=$((drawn + 1))
  number=$(perl -MDigest::MD5=md5_hex -e 'print hex(substr md5_hex("$ARGV[0] $ARGV[1]"), 0, 7) % $ARGV[2]' "$seed" $drawn "$1")
}

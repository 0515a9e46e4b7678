#!/bin/sh
# Four nodes of two ranks with links of 200 Mbit/s: rows are exact, and fewer bytes between nodes are less time. About six
# seconds; the margins of the times are wide. Skipped where network namespaces are not allowed.
set -eu
lab=$1 moesaic=$2 work=$3
rm -rf "$work"
mkdir -p "$work"
cd "$work"

fail() {
  echo "FAILED: $*"
  exit 1
}
status=0
"$lab" -n 4 -p 2 -r 200 -t 100 -- "$moesaic" bench a2a --tokens 24 --choices 16 --experts 64 --repeats 5 \
  --methods pair,flat,inter_first --json > a2a.json 2> errors.txt || status=$?
if [ "$status" = 77 ]; then
  echo "SKIPPED: $(cat errors.txt)"
  exit 0
fi
[ "$status" = 0 ] || fail "exit code $status: $(cat errors.txt)"
grep -q '"nodes": 4,' a2a.json || fail "the nodes were not found by their names"
[ "$(grep -c '"rows_are_those_of_the_routing": true' a2a.json)" = 3 ] || fail "rows differ from the routing's"
seconds() {
  sed -n "/\"method\": \"$1\"/,/\"seconds\"/p" a2a.json | sed -n 's/.*"seconds": \([0-9.e-]*\).*/\1/p'
}
pair=$(seconds pair) flat=$(seconds flat) inter_first=$(seconds inter_first)
echo "pair $pair s, flat $flat s, inter_first $inter_first s"
# Expected 4.0 and 1.8 times by the bytes.
awk "BEGIN { exit !($pair >= 2 * $inter_first) }" || fail "pair takes less than twice the time of inter_first"
awk "BEGIN { exit !($flat >= 1.15 * $inter_first) }" || fail "flat takes less than 1.15 times the time of inter_first"

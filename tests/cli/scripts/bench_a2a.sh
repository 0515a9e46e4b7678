#!/bin/sh
# moesaic bench a2a on MPI ranks that pose as nodes: exact results, exact bytes, messages. About five seconds.
set -eu
mpirun=$1 moesaic=$2 work=$3
rm -rf "$work"
mkdir -p "$work"
cd "$work"

run() {
  ranks=$1
  shift
  "$mpirun" -np "$ranks" --oversubscribe --bind-to none "$moesaic" bench a2a "$@"
}
fail() {
  echo "FAILED: $*"
  exit 1
}
# count FILE TEXT NUMBER: TEXT stands in NUMBER lines
count() {
  found=$(grep -c -- "$2" "$1" || true)
  [ "$found" = "$3" ] || fail "$1 has '$2' in $found lines, not $3"
}

# Every method; 4 ranks x 24 tokens x 32 elements of 2 bytes.
run 4 --ranks-per-node 2 --tokens 24 --width 32 --repeats 2 --json > even.json
count even.json '"rows_are_those_of_the_routing": true' 7
count even.json '"passes": 1' 7
# dense: each token to 2 ranks of the other node and 1 of its own; hdense: to 1 rank there, and both copies inside.
sed -n '/"method": "dense"/,/"seconds"/p' even.json > dense.json
count dense.json '"rows": 192' 1
count dense.json '"bytes": 12288' 1
count dense.json '"rows": 96' 2
sed -n '/"method": "hdense"/,/"seconds"/p' even.json > hdense.json
count hdense.json '"rows": 96' 1
count hdense.json '"rows": 192' 1

# Three nodes of one, popular experts, buffers that are too small: further passes, the same exactness.
run 3 --ranks-per-node 1 --tokens 30 --width 16 --experts 12 --choices 4 --zipf 1.5 --buffer-factor 0.6 \
  --repeats 1 --dtype f32 --methods pair,flat,inter_first --json > skewed.json
count skewed.json '"rows_are_those_of_the_routing": true' 3
count skewed.json '"passes": 1' 0
count skewed.json '"expected_rows"' 0

# Experts placed by load: the same exactness, and ranks that have equally much to do.
run 4 --ranks-per-node 2 --tokens 200 --width 16 --experts 64 --choices 4 --zipf 1 --repeats 1 --placed --methods flat,inter_first --json > placed.json
count placed.json '"rows_are_those_of_the_routing": true' 2
perl -MJSON::PP -0777 -e '$l = decode_json(<>)->{rank_max_over_mean}; $l->{placed} < $l->{in_order} - 0.1 && $l->{placed} < 1.15 or die "$l->{in_order} -> $l->{placed}"' placed.json ||
  fail "placed experts: $(cat placed.json)"

run 2 --tokens 8 --width 300 --repeats 1 --methods flat,dense --fp8 --json > fp8.json
count fp8.json '"dispatched_row_bytes": 312' 1
run 2 --tokens 8 --width 8 --repeats 1 --methods flat,dense --raw 1,3 > table.txt
grep -q '^bare exchange of 3 MiB with every peer: [0-9.]* ms, [0-9.]* GB/s sent by a rank' table.txt || fail "no bare exchange"
grep -q '^fastest here: [a-z]*; auto takes [0-9.]* times as long' table.txt || fail "auto is not compared"
grep -q '^1 node of 2 ranks (1 host), cpu; 8 tokens a rank of 8 x bf16, top 16 of 64 experts' table.txt || fail "head of the table"
grep -q '^auto: ' table.txt || fail "no line of auto"

# What cannot be says so, with exit code 2.
expect_refusal() {
  text=$1
  shift
  status=0
  "$@" > refused.txt 2>&1 || status=$?
  [ "$status" = 2 ] || fail "exit code $status for: $*"
  grep -q -- "$text" refused.txt || fail "no '$text' in: $(cat refused.txt)"
}
expect_refusal 'no exchange method .quick.; there are pair, flat' run 1 --methods quick
expect_refusal '--choices 5: a token chooses among --experts 4' run 1 --experts 4 --choices 5
expect_refusal '4 ranks are not nodes of 3; possible: 1, 2, 4' run 4 --ranks-per-node 3
expect_refusal '--experts 63 cannot be shared out equally among 2 ranks' run 2 --experts 63
echo "bench a2a: exact"

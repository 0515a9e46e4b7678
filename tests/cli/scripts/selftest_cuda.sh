#!/bin/sh
# selftest_cuda.sh MPIRUN MOESAIC WORK_DIR: the same steps on one GPU and in layouts of two, and of four ranks that share two GPUs as
# two nodes of two, with every exchange of tokens between them. About two minutes on two GPUs.
# shellcheck disable=SC2154 # set by functions.sh and cuda_runs.sh
set -eu
. "${0%/*}/functions.sh"
. "${0%/*}/cuda_runs.sh"
enter_cuda "$1" "$2" "$3"
# agree RANKS WHERE ARGUMENT…: all layouts agree, on what WHERE says.
agree() {
  n=$1 where=$2
  shift 2
  selftest "$n" "$@" || fail "exit $? from $n ranks, $*: $(cat table.txt)"
  echo "$n ranks, $*"
  cat table.txt
  grep -q " on $where, " table.txt || fail "not on $where: $(head -n 1 table.txt)"
  grep -q '^kernels of one rank: .*grouped_linear_forward' table.txt || fail "no kernels are named"
  [ "$n" = "$(awk '$1 ~ /^(pp|dp|cp|tp)[0-9]+$/ && /e[+-][0-9]/ { for (i = 2; i <= NF; ++i) if ($i ~ /^[0-9]+$/ && $i > most) most = $i } END { print most }' table.txt)" ] ||
    fail "no layout of $n ranks"
}
if [ "$devices" -ge 2 ]; then
  two='2 x .* over NCCL .*' four='2 x .* shared by 4 ranks over NCCL .*, as nodes of 2'
else
  two='1 x .* shared by 2 ranks over NCCL .*' four='1 x .* shared by 4 ranks over NCCL .*, as nodes of 2'
fi
# Every layout of two ranks: each axis, and pairs of them.
for precision in f32 bf16 f64; do
  agree 2 "$two" run.precision=$precision $share
  for layout in "dp2 " "dp2 ep2 " "tp2 " "pp2 " "cp2 " "tp2 ep2 " "cp2 ep2 " "tp2 etp2 "; do
    grep -q "^$layout " table.txt || fail "$precision: no layout $layout"
  done
done
# Four ranks, of which two share a GPU and none that of its node: the nodes meet through the network.
posed() { agree 4 "$four" comm.share_gpu=true comm.ranks_per_node=2 --steps 2 "$@"; }
posed run.precision=f32 --layouts "dp=2,tp=2,ep=2;cp=2,tp=2,ep=2,etp=2;pp=2,dp=2,ep=2;pp=2,tp=2;dp=4,ep=2"
for exchange in flat pair dense hdense "hierarchical dispatch.hierarchy=inter_first" \
  "hierarchical dispatch.hierarchy=intra_first dispatch.hops=2" "hierarchical dispatch.hierarchy=intra_first dispatch.hops=3"; do
  # shellcheck disable=SC2086 # several words
  posed run.precision=f32 --layouts "dp=4,ep=4" dispatch.exchange=$exchange
done
posed run.precision=bf16 --layouts "dp=4,ep=4;dp=2,tp=2,ep=2" dispatch.exchange=hierarchical
# The exchange alone, every method: exact rows, and the speeds that NCCL gives inside a node and between them.
timeout -k 5 120 "$mpirun" -np 4 --oversubscribe --bind-to none "$moesaic" bench a2a --device cuda --share-gpu --ranks-per-node 2 \
  --repeats 2 --json > a2a.json 2> a2a.err || fail "bench a2a: $(cat a2a.err a2a.json)"
[ "$(grep -c '"rows_are_those_of_the_routing": true' a2a.json)" = 7 ] || fail "not the rows of the routing: $(cat a2a.json)"
grep -A 3 link_bytes_per_second a2a.json
# What cannot be says so.
if [ "$devices" -lt 4 ]; then
  if selftest 4 --layouts dp=4; then fail "four ranks on $devices GPUs without leave"; fi
  grep -q 'comm.share_gpu=true' table.txt || fail "no way out is named: $(cat table.txt)"
fi
if selftest 2 $share --layouts dp=4; then fail "four ranks of two"; fi
grep -q 'dp4 needs 4 ranks, and there are 2: start them with mpirun -np 4' table.txt || fail "no reason: $(cat table.txt)"
echo "selftest_cuda: passed"

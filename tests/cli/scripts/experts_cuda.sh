#!/bin/sh
# experts_cuda.sh MPIRUN MOESAIC WORK_DIR: experts that go to other ranks after every step, copies of busy ones, and exchanges beside
# other work, over NCCL: on two GPUs, and with four ranks in turns on them, as one node and as two nodes of two. On one GPU the ranks
# take turns on it. About a minute on two GPUs.
# shellcheck disable=SC2154,SC2086 # set by functions.sh and cuda_runs.sh; several words
set -eu
. "${0%/*}/functions.sh"
. "${0%/*}/cuda_runs.sh"
enter_cuda "$1" "$2" "$3"
[ "$devices" -ge 2 ] || echo "one GPU: ranks take turns on it, so that nothing goes over links between GPUs"
# Most tokens are alike and no bias evens out what they choose, so that three experts have most of the work, and of two ranks one has two of them.
perl -e 'srand 5; for my $d (1 .. 40) { print join(" ", map { rand() < 0.8 ? "aaaaaaa" : ("the", "cat", "sat")[rand 3] } 1 .. 60), "\n\f\n" }' > text.txt
sed -i 's/bias_rule: quantile/bias_rule: none/; s/num_experts_per_token: 2/num_experts_per_token: 3/' tiny.yaml
moves="experts.place_every=1 experts.place_decay=0.5" copies="experts.place_every=1 experts.place_decay=0.5 experts.replicas=2"
four="comm.share_gpu=true" nodes="comm.share_gpu=true comm.ranks_per_node=2 dispatch.exchange=hierarchical"

# agree RANKS WHAT ARGUMENT…: all layouts agree with one rank, and each of them had so many 'experts moved' or 'replicas'.
agree() {
  n=$1 what=$2
  shift 2
  selftest "$n" --steps 3 "$@" || fail "exit $? from $n ranks, $*: $(cat table.txt)"
  echo "$n ranks, $*"
  cat table.txt
  layouts=$(awk '$1 ~ /^(pp|dp|cp|tp)[0-9]+$/ && /e[+-][0-9]/' table.txt | wc -l)
  [ "$layouts" -gt 0 ] || fail "no layouts"
  [ "$(grep -c " [1-9][0-9]* $what" table.txt)" -eq "$layouts" ] || fail "layouts without $what"
}
# The gradients, losses and weights of one rank, whose experts stay where they are.
agree 2 "experts moved" run.precision=f64 $share $moves --layouts "dp=2,ep=2;cp=2,ep=2;tp=2,ep=2"
agree 2 replicas run.precision=f64 $share $copies --layouts "dp=2,ep=2;cp=2,ep=2;tp=2,ep=2"
agree 2 replicas run.precision=bf16 $share $copies --layouts "dp=2,ep=2"
agree 2 replicas run.precision=f64 $share $copies dispatch.exchange=flat dispatch.overlap=true dispatch.chunks=3 --layouts "dp=2,ep=2"
agree 4 replicas run.precision=f64 $four $copies --layouts "dp=4,ep=4;dp=4,ep=2;pp=2,dp=2,ep=2"
agree 4 "experts moved" run.precision=f64 $nodes $moves --layouts "dp=4,ep=4;dp=2,tp=2,ep=2,etp=2"
agree 4 replicas run.precision=f64 $nodes $copies --layouts "dp=4,ep=4;dp=4,ep=2"

# train RANKS NAME ARGUMENT…: the state of every expert is in the checkpoint under the model's number, wherever it lies.
train() {
  n=$1 name=$2
  shift 2
  timeout -k 5 120 "$mpirun" -np "$n" --oversubscribe --bind-to none "$moesaic" train tiny.yaml run.dir="$name" \
    comm.watchdog_s=60 comm.first_step_s=60 "$@" > "$name.log" 2>&1 || fail "exit $? from $name, $*: $(cat "$name.log")"
}
# near A B LIMIT: the tensors of A are in B, and differ by so much of their largest element at most; what only B has is where experts lie.
near() {
  "$moesaic" ckpt diff "$1" "$2" --json > diff.json || [ $? -eq 1 ] || fail "no comparison of $1 and $2: $(cat diff.json)"
  perl -MJSON::PP -0777 -e '$d = decode_json(<STDIN>); $n = $d->{equal_tensors}; for (@{$d->{different_tensors}}) {
    if ($_->{what} ne "") { $_->{what} eq "only in B" or die "$_->{name}: $_->{what}\n"; next }
    $n++; $_->{relative_to_max} =~ /^[0-9.e+-]+$/ or die "$_->{name} is no number\n";
    $most = $_->{relative_to_max}, $at = $_->{name} if $_->{relative_to_max} > $most }
    printf "%s and %s: %d tensors, %d of them with equal bits; the largest difference is %.1e of a largest element, in %s\n",
      @ARGV[0, 1], $n, $d->{equal_tensors}, $most, $at // "none"; exit !($n > 100 && $most <= $ARGV[2])' "$1" "$2" "$3" < diff.json ||
    fail "$2 is not $1 within $3"
}
equal() {
  "$moesaic" ckpt diff "$1" "$2" > diff.txt || fail "$1 and $2: $(cat diff.txt)"
  echo "$1 and $2: $(tail -n 1 diff.txt)"
}
train 2 still run.precision=f64 parallel.ep=2 $share
train 2 moved run.precision=f64 parallel.ep=2 $share $moves
grep 'experts moved: layer' moved.log | tail -n 1 || fail "no experts moved: $(cat moved.log)"
near still moved 1e-7
train 2 copied run.precision=f64 parallel.ep=2 $share $copies
grep 'experts moved: layer .* replicas' copied.log | tail -n 1 || fail "no copies: $(cat copied.log)"
near still copied 1e-7
# Outside the device they go from tier to tier; and Muon puts together what ranks have slices of: the same bits.
train 2 here run.precision=bf16 parallel.ep=2 $share $moves
train 2 slices run.precision=bf16 parallel.tp=2 parallel.etp=2 optimizer.name=muon $share
for offload in states full; do
  room="experts.offload=$offload experts.device_cache=200KiB memory.host_budget=8MiB"
  train 2 "$offload" run.precision=bf16 parallel.ep=2 $share $moves $room
  grep -q 'experts moved: layer' "$offload.log" || fail "no offloaded experts moved: $(cat "$offload.log")"
  equal here "$offload"
  train 2 "slices_$offload" run.precision=bf16 parallel.tp=2 parallel.etp=2 optimizer.name=muon $share $room
  equal slices "slices_$offload"
done
# Rows beside other work: the same bits; in chunks, within rounding of the sums.
train 2 beside run.precision=bf16 parallel.ep=2 dispatch.exchange=flat dispatch.overlap=true $share
train 2 behind run.precision=bf16 parallel.ep=2 dispatch.exchange=flat $share
equal behind beside
train 2 chunks run.precision=f64 parallel.ep=2 dispatch.exchange=flat dispatch.overlap=true dispatch.chunks=4 $share
near still chunks 1e-7
# In bf16, and between nodes: stopped and continued with the same bits, copies and places included.
train 2 narrow run.precision=bf16 parallel.ep=2 $share $copies
train 2 narrow_on run.precision=bf16 parallel.ep=2 $share $copies --resume=narrow@4
equal narrow narrow_on
train 4 nodes run.precision=bf16 parallel.ep=4 $nodes $copies
train 4 nodes_on run.precision=bf16 parallel.ep=4 $nodes $copies --resume=nodes@4
equal nodes nodes_on
grep 'experts moved: layer .* replicas' nodes.log | tail -n 1 || fail "no copies inside nodes: $(cat nodes.log)"
# Experts that have moved are read in order by a run that moves none.
train 1 alone run.precision=bf16 --resume=nodes@4
close "experts of two nodes and of one GPU" nodes.log alone.log 0.02
echo "experts_cuda: passed"

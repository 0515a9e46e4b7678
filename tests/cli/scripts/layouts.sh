# layouts.sh MPIRUN MOESAIC WORK_DIR: other layouts than data parallel: they train the same model, and their checkpoints
# hold the same state.
. "$(dirname "$0")/tiny_run.sh"
agree() { # LAYOUTS [a.b=c…]
  layouts=$1
  shift
  "$moesaic" selftest layouts tiny.yaml --ranks 8 --layouts "$layouts" "$@" > table.txt 2>&1 || {
    cat table.txt
    fail "selftest layouts $layouts $*"
  }
  tail -n 1 table.txt
}
# Every exchange of tokens, on one node and on four posed ones.
for exchange in dense hdense flat pair hierarchical; do
  for nodes in "" comm.ranks_per_node=2; do
    agree "dp=8,ep=8;dp=4,ep=2" train.global_batch_size=8 dispatch.exchange=$exchange $nodes
  done
done
for hops in 2 3; do
  agree "dp=8,ep=8;dp=8,ep=4" train.global_batch_size=8 dispatch.exchange=hierarchical dispatch.hierarchy=intra_first \
    dispatch.hops=$hops comm.ranks_per_node=2
done
for set in optimizer.name=adamw "activations.recompute=[full]" "activations.recompute=[moe.gate_up]" model.balance.bias_rule=quantile_exact model.balance.bias_rule=sign \
  optimizer.untouched=skip model.capacity_factor=1.0; do
  agree "dp=2,ep=2;dp=4,ep=4" "$set"
done
# Small buffers with further passes, rows in fp8, checksums.
for exchange in flat hierarchical; do
  agree "dp=4,ep=4;dp=4,ep=2" dispatch.exchange=$exchange comm.ranks_per_node=2 dispatch.buffer_factor=0.3
done
agree "dp=4,ep=4;dp=2,ep=2;dp=2" dispatch.dtype=fp8 dispatch.backward_dtype=fp8
agree "dp=2,tp=2,ep=2,etp=2;pp=2,dp=2,ep=2" dispatch.dtype=fp8 dispatch.exchange=flat dispatch.buffer_factor=0.3
agree "dp=4,ep=4" dispatch.checksum=true
agree "dp=4,ep=4;dp=2,tp=2,ep=2,etp=2;pp=2,dp=2,ep=2" dispatch.exchange=flat dispatch.overlap=true
agree "dp=4,ep=4;dp=2,tp=2,ep=2,etp=2;cp=2,ep=2" dispatch.exchange=flat dispatch.overlap=true dispatch.chunks=3
agree "pp=2,dp=2,ep=2" parallel.schedule=zero_bubble dispatch.overlap=true dispatch.chunks=2
# Chunks that cross between nodes too, by each method that fans them out there.
chunks="comm.ranks_per_node=2 dispatch.overlap=true dispatch.chunks=4"
# shellcheck disable=SC2086 # several words
{
  agree "dp=8,ep=8;dp=8,ep=4;dp=4,tp=2,ep=4,etp=2;dp=2,cp=2,ep=4;pp=2,dp=4,ep=4" train.global_batch_size=8 dispatch.exchange=hierarchical $chunks
  agree "dp=4,ep=4" dispatch.exchange=hierarchical dispatch.hierarchy=intra_first dispatch.hops=3 dispatch.dtype=fp8 $chunks
  agree "dp=4,ep=4" dispatch.exchange=hdense "activations.recompute=[full]" $chunks
  agree "dp=4,ep=4" dispatch.exchange=hierarchical experts.place_every=1 experts.replicas=2 $chunks
  agree "pp=2,dp=4,ep=4" train.global_batch_size=8 parallel.schedule=zero_bubble dispatch.exchange=hierarchical $chunks
}
# Experts that go to other ranks after every step.
for set in optimizer.name=adamw optimizer.untouched=skip "train.phases=[{until: 2, freeze: ['*experts*']}, {until: 8}]"; do
  agree "dp=4,ep=4;dp=4,ep=2;dp=2,tp=2,ep=2,etp=2;pp=2,dp=2,ep=2;cp=2,ep=2" experts.place_every=1 "$set"
  [ "$(grep -c ' experts moved' table.txt)" = 5 ] || fail "no experts moved: $(cat table.txt)"
done
# Copies of busy experts in the slots of other ranks of their node.
for set in optimizer.name=adamw "dispatch.exchange=hierarchical comm.ranks_per_node=2"; do
  # shellcheck disable=SC2086 # several words
  agree "dp=4,ep=4;dp=4,ep=2;dp=2,tp=2,ep=2,etp=2;pp=2,dp=2,ep=2;cp=2,ep=2" experts.place_every=1 experts.replicas=2 $set
  grep -q ' [1-9][0-9]* replicas' table.txt || fail "no expert was copied: $(cat table.txt)"
done
# Heads, inner widths and those of the experts split, alone and with everything else.
agree "tp=2;dp=2,tp=2,ep=2;dp=2,tp=2,etp=2;tp=2,etp=2;dp=4,ep=2,etp=2"
# Muon's matrices split along two axes, of which other ranks own other ones.
agree "tp=4,etp=2" model.num_attention_heads=4 model.linear_attn_config.num_heads=4 model.indexer.index_n_heads=4
for set in optimizer.name=adamw "activations.recompute=[full]" "activations.recompute=['*_block.*',moe.xs]" model.balance.bias_rule=quantile_exact optimizer.qk_clip_tau=0.01 \
  model.capacity_factor=1.0 "model.mtp={num_nextn_predict_layers: 1}" model.indexer.attention_form=gather \
  "model.balance={bias_rule: sign, aux_loss: sequence, aux_loss_weight: 0.01}" \
  "model.balance={bias_rule: sign, aux_loss: switch, aux_loss_weight: 0.01}"; do
  agree "tp=2;dp=2,tp=2,ep=2,etp=2" "$set"
done
agree "dp=4;dp=2,ep=2;dp=2,tp=2,ep=2,etp=2" parallel.zero=0
# Pipelines with everything else.
agree "pp=2,tp=2;pp=2,tp=2,ep=2;pp=2,dp=2,tp=2,etp=2" train.global_batch_size=8
agree "pp=2,tp=2,ep=2" "model.mtp={num_nextn_predict_layers: 1}" parallel.schedule=zero_bubble model.tie_word_embeddings=true
agree "pp=2,cp=2;pp=2,dp=2,cp=2;pp=2,cp=2,tp=2,ep=2" "model.mtp={num_nextn_predict_layers: 1}" train.global_batch_size=8
# The vocabulary split: tied, with MTP, in chunks of the head that are shorter than the group or do not divide a rank's tokens.
agree "tp=2;dp=2,tp=2" --steps 5 optimizer.name=adamw model.tie_word_embeddings=true
agree "tp=2;dp=2,tp=2,ep=2,etp=2" --steps 5 "model.mtp={num_nextn_predict_layers: 1}" model.tie_word_embeddings=true train.head_chunk_rows=1
agree "tp=4;dp=2,tp=4,ep=4" --steps 5 optimizer.name=adamw model.num_attention_heads=4 model.linear_attn_config.num_heads=4 \
  train.head_chunk_rows=10 "model.mtp={num_nextn_predict_layers: 1}"
# Split matrices under Muon where members of a family have learning rates of their own.
agree "tp=2,etp=2;dp=2,tp=2,etp=4;dp=4,tp=2,ep=2,etp=2" optimizer.untouched=skip
# The indexer's queries shared out, in its warm-up and after it.
agree "tp=2;dp=2,tp=2" "train.phases=[{until: 2, sparse_stage: warmup}, {until: 8}]"
# Sequences cut into pieces, with documents that cross the cuts, end at them, lie between them.
perl -e 'srand 3; for my $d (1 .. 300) { print join(" ", map { ("the", "cat", "sat", "on", "a", "mat", "and", "ran")[rand 8] } 1 .. (1 + int rand 14)), "\n\f\n" }' > short.txt
agree "cp=2;cp=4;dp=2,cp=2;cp=4,ep=2;cp=4,ep=2,etp=2;cp=2,tp=2"
agree "cp=2;cp=4;cp=8;dp=2,cp=2,tp=2,ep=2,etp=2" data.train=short.txt
for set in optimizer.name=adamw "activations.recompute=[full]" "activations.recompute=['attn.*',moe.xs]" model.balance.bias_rule=quantile_exact optimizer.qk_clip_tau=0.01 \
  model.capacity_factor=1.0 "model.mtp={num_nextn_predict_layers: 1}" model.indexer.attention_form=gather train.micro_batch_size=2 \
  model.mla_use_nope=false "train.phases=[{until: 2, sparse_stage: warmup}, {until: 8, sequence_length: 128}]" \
  "model.balance={bias_rule: sign, aux_loss: sequence, aux_loss_weight: 0.01}" \
  "model.balance={bias_rule: sign, aux_loss: switch, aux_loss_weight: 0.01}"; do
  agree "cp=4;cp=2,tp=2,ep=2,etp=2" data.train=short.txt "$set"
done
# Pieces long enough for ranks to lend each other queries of the indexer.
tr -d '\f' < text.txt > long.txt
agree "cp=3,ep=3;cp=4,tp=2" data.train=long.txt data.sequence_length=768 train.global_batch_size=1 model.num_experts=6
# Narrow types: every layout takes the choices of one rank, and says how many of its own are others.
mixed="dp=4;dp=4,ep=4;tp=2;cp=2;cp=2,tp=2,ep=2;dp=2,tp=2,ep=2,etp=2;pp=2,tp=2,ep=2"
agree "$mixed" run.precision=f32 train.global_batch_size=8
agree "$mixed" run.precision=bf16 "model.mtp={num_nextn_predict_layers: 1}" train.global_batch_size=8
"$mpirun" -np 4 --oversubscribe --bind-to none "$moesaic" selftest layouts tiny.yaml --layouts "dp=2,tp=2,ep=2;dp=4,ep=4" run.precision=bf16 \
  optimizer.name=adamw --json > narrow.json 2>&1 || { cat narrow.json; fail "bf16 on the ranks of mpirun"; }
perl -MJSON::PP -0777 -e '$all = decode_json(<>); @$all == 2 or die "rows"; for (@$all) {
  $_->{choices_replayed} > 10000 && $_->{choices_differing} > 0 && $_->{choices_differing} < $_->{choices_replayed} / 10 or die "$_->{layout}: $_->{choices_differing} of $_->{choices_replayed} choices" }' narrow.json ||
  fail "choices of bf16: $(cat narrow.json)"
# Axes together, drawn from all layouts of up to 8 ranks.
hybrid_yaml 32 3 full > deep.yaml
drawn() { # COUNT SEED [a.b=c…]
  count=$1 seed=$2
  shift 2
  "$moesaic" selftest layouts deep.yaml --ranks 8 --sample "$count" --seed "$seed" --steps 2 train.global_batch_size=8 "$@" > table.txt 2>&1 || {
    cat table.txt
    fail "selftest layouts, sample $seed: $*"
  }
  tail -n 1 table.txt
}
drawn 12 1 "model.mtp={num_nextn_predict_layers: 1}"
drawn 8 2 run.precision=bf16 optimizer.name=adamw
"$moesaic" selftest layouts tiny.yaml --ranks 4 --layouts "tp=4" > refused.txt 2>&1 && fail "two heads for four ranks"
grep -q "4 does not divide model.num_attention_heads (2). Nearest valid: 2" refused.txt || fail "no reason: $(cat refused.txt)"
"$moesaic" selftest layouts tiny.yaml --ranks 2 --layouts "tp=2" model.vocab_size=257 > refused.txt 2>&1 && fail "257 words for two ranks"
grep -q "2 does not divide model.vocab_size (257). Nearest valid: 1, 257; or model.vocab_size: 258" refused.txt || fail "no reason: $(cat refused.txt)"
"$moesaic" plan tiny.yaml parallel.tp=2 model.vocab_size=257 > refused.txt 2>&1 && fail "plan: 257 words for two ranks"
grep -q "or model.vocab_size: 258" refused.txt || fail "plan gives no reason: $(cat refused.txt)"
"$moesaic" plan tiny.yaml parallel.tp=2 parallel.ep=4 > plan.txt 2>&1 || { cat plan.txt; fail "no plan"; }
grep -q "Memory of a rank of 4, " plan.txt || fail "plan is of other ranks: $(grep 'Memory of' plan.txt)"
"$moesaic" selftest layouts tiny.yaml --ranks 3 --layouts "cp=3" > refused.txt 2>&1 && fail "64 tokens in three pieces"
grep -q "3 does not cut the 64 tokens of a micro-batch .* into equal pieces. Nearest valid: 2, 4" refused.txt || fail "no reason: $(cat refused.txt)"

selftest() { "$moesaic" selftest layouts tiny.yaml "$@"; }
expect 2 "dp is given twice in 'dp=2,dp=3'; layouts stand behind semicolons" selftest --ranks 4 --layouts "dp=2,dp=3"
expect 2 "a layout without a degree" selftest --ranks 4 --layouts ";"
expect 2 "run.device=cuda takes a process per GPU, and --ranks 4 are threads of one process; start it with mpirun -np 4" selftest --ranks 4 run.device=cuda
expect 2 "run.device=cuda takes a process per GPU, and this is one process; start it with mpirun -np 2" selftest run.device=cuda
expect 2 "run.device=auto: selftest layouts computes on the CPU unless run.device=cuda is among its arguments" selftest run.device=auto
expect 2 "experts.update=in_backward: selftest layouts compares gradients when a step is over" selftest --ranks 2 \
  optimizer.clip_grad_norm=0 experts.offload=full experts.update=in_backward parallel.order=vertical
expect 0 "layouts agree" selftest --ranks 2 run.precision=f64
expect 0 "layouts agree" selftest --sample 3 # four threads where nobody says how many
expect 2 "one rank has one layout; give --ranks 4, or start it with mpirun -np 4" "$mpirun" -np 1 "$moesaic" selftest layouts tiny.yaml
expect 2 "--ranks 2 are threads of one process, and a launcher started 2 processes" \
  "$mpirun" -np 2 --oversubscribe --bind-to none "$moesaic" selftest layouts tiny.yaml --ranks 2
[ "$(echo "$out" | grep -c "are threads")" -eq 1 ] || fail "said once per rank: $out"
expect 0 "layouts agree" env SLURM_JOB_ID=1 SLURM_NTASKS=2 "$moesaic" selftest layouts tiny.yaml --ranks 2 # the shell of a batch job
set +e # which expect() has set

# Runs with experts on four ranks: whole, stopped and continued, and read by other layouts.
start() { ranks=$1; shift; "$mpirun" -np "$ranks" --oversubscribe --bind-to none "$moesaic" train tiny.yaml run.precision=f64 "$@"; }
start 4 parallel.ep=4 run.dir=whole > whole.txt 2>&1 || { cat whole.txt; fail "ep 4"; }
start 4 parallel.ep=4 run.dir=parts train.steps=8 run.max_minutes=0.00001 > parts.txt 2>&1
[ $? = 75 ] || { cat parts.txt; fail "no stop"; }
start 4 parallel.ep=4 run.dir=parts --resume=must > parts.txt 2>&1 || { cat parts.txt; fail "no second life"; }
"$moesaic" ckpt diff whole/checkpoints/step-00000008 parts/checkpoints/step-00000008 > diff.txt || { cat diff.txt; fail "not the same bits"; }
"$moesaic" ckpt verify whole/checkpoints/step-00000008 || fail "damaged"
for other in "1" "2 parallel.ep=2" "4 parallel.ep=2" "4" "4 parallel.cp=4"; do
  # shellcheck disable=SC2086 # several words
  start $other run.dir=other --resume=whole@4 checkpoint.every=1 > other.txt 2>&1 || { cat other.txt; fail "$other from ep 4"; }
  grep -q "step 8/8" other.txt || fail "$other did not finish"
  rm -r other
done
"$moesaic" train tiny.yaml run.precision=f64 run.dir=one > one.txt 2>&1 || { cat one.txt; fail "one rank"; }
start 4 parallel.ep=4 run.dir=back --resume=one@4 > back.txt 2>&1 || { cat back.txt; fail "ep 4 from one rank"; }
# The same with tensors split: what two ranks saved goes on on one, and is evaluated there to the digits that one rank's run has.
start 2 parallel.tp=2 run.dir=split > split.txt 2>&1 || { cat split.txt; fail "tp 2"; }
start 2 parallel.tp=2 run.dir=halves train.steps=8 run.max_minutes=0.00001 > halves.txt 2>&1
[ $? = 75 ] || { cat halves.txt; fail "no stop of tp 2"; }
start 2 parallel.tp=2 run.dir=halves --resume=must > halves.txt 2>&1 || { cat halves.txt; fail "no second life of tp 2"; }
"$moesaic" ckpt diff split/checkpoints/step-00000008 halves/checkpoints/step-00000008 > diff.txt || { cat diff.txt; fail "not the same bits by tp 2"; }
for other in "1" "4 parallel.tp=2 parallel.ep=2"; do
  # shellcheck disable=SC2086 # several words
  start $other run.dir=other --resume=split@4 > other.txt 2>&1 || { cat other.txt; fail "$other from tp 2"; }
  grep -q "step 8/8" other.txt || fail "$other did not finish what tp 2 began"
  rm -r other
done
start 2 parallel.tp=2 run.dir=other --resume=one@4 > other.txt 2>&1 || { cat other.txt; fail "tp 2 from one rank"; }
perplexity() { "$moesaic" eval "$1" 2>&1 | grep -o "perplexity [0-9.]*" | head -n 1; }
[ -n "$(perplexity one)" ] && [ "$(perplexity split)" = "$(perplexity one)" ] || fail "perplexity: '$(perplexity split)' by tp 2, '$(perplexity one)' by one rank"
held_out() { grep "held-out" "$1"; }
[ "$(held_out split.txt)" = "$(held_out one.txt)" ] || fail "held-out: $(held_out split.txt) by tp 2, $(held_out one.txt) by one rank"
start 4 parallel.pp=2 parallel.tp=2 run.dir=staged > staged.txt 2>&1 || { cat staged.txt; fail "pp 2, tp 2"; }
[ "$(held_out staged.txt)" = "$(held_out one.txt)" ] || fail "held-out: $(held_out staged.txt) by pp 2 and tp 2, $(held_out one.txt) by one rank"
[ "$(perplexity staged)" = "$(perplexity one)" ] || fail "perplexity: '$(perplexity staged)' by pp 2 and tp 2, '$(perplexity one)' by one rank"
"$moesaic" generate split --prompt "the cat" --max-new-tokens 5 > sample.txt 2>&1 || { cat sample.txt; fail "no sample from tp 2"; }
"$moesaic" eval whole > eval.txt 2>&1 || { cat eval.txt; fail "eval of a checkpoint of four writers"; }

# Experts that move between their ranks: killed and continued with the same bits, told of, and read by any other run.
rule=model.balance.bias_rule=none
placed="parallel.ep=2 experts.place_every=3 $rule" copies="parallel.ep=4 experts.place_every=3 experts.replicas=2 $rule"
# shellcheck disable=SC2086 # several words
start 4 $placed run.dir=placed > placed.txt 2>&1 || { cat placed.txt; fail "experts that move"; }
grep -q "experts moved: layer [0-9]*: rank max/mean [0-9.]* -> [0-9.]*, [0-9]* experts, [0-9.]* MiB" placed.txt || fail "no line of moved experts: $(cat placed.txt)"
grep -q "moe max/mean [0-9.]* ranks [0-9.]* " placed.txt || fail "no load of ranks: $(cat placed.txt)"
grep -q '"type":"experts_moved","step":3,' placed/metrics.jsonl || fail "no moved experts in metrics.jsonl"
grep -q '"rank_max_over_mean":' placed/metrics.jsonl || fail "no load of ranks in metrics.jsonl"
# shellcheck disable=SC2086
start 4 $placed run.dir=moved --resume=placed@4 > moved.txt 2>&1 || { cat moved.txt; fail "no second life of experts that moved"; }
"$moesaic" ckpt diff placed/checkpoints/step-00000008 moved/checkpoints/step-00000008 > diff.txt || { cat diff.txt; fail "not the same bits with experts that moved"; }
# The same from tier to tier.
# shellcheck disable=SC2086
start 4 $placed run.dir=tiered --resume=placed@4 experts.offload=full experts.device_cache=80KiB memory.host_budget=96KiB \
  memory.file_budget=1MiB memory.file_path=tier > tiered.txt 2>&1 || { cat tiered.txt; fail "offloaded experts that move"; }
grep -q "step 6 | experts moved" tiered.txt || fail "no offloaded experts moved: $(cat tiered.txt)"
"$moesaic" ckpt diff placed/checkpoints/step-00000008 tiered/checkpoints/step-00000008 > diff.txt || { cat diff.txt; fail "not the same bits with offloaded experts that moved"; }
# shellcheck disable=SC2086
start 4 $copies run.dir=copied > copied.txt 2>&1 || { cat copied.txt; fail "experts with copies"; }
grep -q "experts moved: layer [0-9]*: .* MiB, [1-9][0-9]* replicas" copied.txt || fail "no line of replicas: $(cat copied.txt)"
# shellcheck disable=SC2086
start 4 $copies run.dir=copied_on --resume=copied@4 > moved.txt 2>&1 || { cat moved.txt; fail "no second life of copies"; }
"$moesaic" ckpt diff copied/checkpoints/step-00000008 copied_on/checkpoints/step-00000008 > diff.txt || { cat diff.txt; fail "not the same bits with copies"; }
"$moesaic" plan tiny.yaml $copies > copies.txt 2>&1 || fail "no plan with copies: $(cat copies.txt)"
grep -q "expert replicas" copies.txt || fail "no memory of replicas: $(cat copies.txt)"
expect 2 "allowed: 0, or a place_every above 0" "$moesaic" plan tiny.yaml parallel.ep=2 experts.replicas=1
for other in "1 experts.place_every=3" "4 parallel.ep=4 experts.place_every=2" "2 parallel.ep=2"; do
  # shellcheck disable=SC2086
  start $other $rule run.dir=elsewhere --resume=placed@4 > other.txt 2>&1 || { cat other.txt; fail "$other from experts that moved"; }
  grep -q "step 8/8" other.txt || fail "$other did not finish what experts that move began"
  rm -r elsewhere
done
# What a run tells of its exchanges.
start 2 parallel.ep=2 dispatch.exchange=flat dispatch.buffer_factor=0.5 dispatch.overlap=true dispatch.chunks=2 log.detail_every=2 train.steps=2 \
  run.dir=told > told.txt 2>&1 || { cat told.txt; fail "small buffers beside other work"; }
grep -q "^tokens     dispatch.exchange: flat | room for 0.5 x the mean, further passes beyond | beside other work in 2 chunks" told.txt || fail "no line of the exchange: $(cat told.txt)"
grep -q "exchange dispatch .*, waited for .* | combine .* | longest wait .* in layer" told.txt || fail "no times of the exchange: $(cat told.txt)"
grep -q '"type":"exchange","step":2,"layers":' told/metrics.jsonl || fail "no exchange in metrics.jsonl"
grep -q '"further_passes":[1-9]' told/metrics.jsonl || fail "no further passes in metrics.jsonl"
expect 2 "dense exchanges do not count what comes" "$moesaic" plan tiny.yaml parallel.ep=2 dispatch.exchange=dense dispatch.buffer_factor=1.25
expect 2 "allowed: 1, or overlap: true" "$moesaic" plan tiny.yaml parallel.ep=2 dispatch.chunks=2
echo "layouts: all agree"

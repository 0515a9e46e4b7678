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
# Heads, inner widths and those of the experts split, alone and with everything else.
agree "tp=2;dp=2,tp=2,ep=2;dp=2,tp=2,etp=2;tp=2,etp=2;dp=4,ep=2,etp=2"
for set in optimizer.name=adamw "activations.recompute=[full]" "activations.recompute=['*_block.*',moe.xs]" model.balance.bias_rule=quantile_exact optimizer.qk_clip_tau=0.01 \
  model.capacity_factor=1.0 "model.mtp={num_nextn_predict_layers: 1}" model.indexer.attention_form=gather \
  "model.balance={bias_rule: sign, aux_loss: sequence, aux_loss_weight: 0.01}" \
  "model.balance={bias_rule: sign, aux_loss: switch, aux_loss_weight: 0.01}"; do
  agree "tp=2;dp=2,tp=2,ep=2,etp=2" "$set"
done
agree "dp=4;dp=2,ep=2;dp=2,tp=2,ep=2,etp=2" parallel.zero=0
# Pipelines with everything else.
agree "pp=2,tp=2;pp=2,tp=2,ep=2;pp=2,dp=2,tp=2,etp=2" train.global_batch_size=8
agree "pp=2,tp=2,ep=2" "model.mtp={num_nextn_predict_layers: 1}" parallel.schedule=zero_bubble
"$moesaic" selftest layouts tiny.yaml --ranks 4 --layouts "tp=4" > refused.txt 2>&1 && fail "two heads for four ranks"
grep -q "4 does not divide model.num_attention_heads (2). Nearest valid: 2" refused.txt || fail "no reason: $(cat refused.txt)"
"$moesaic" selftest layouts tiny.yaml --ranks 2 --layouts "cp=2" > refused.txt 2>&1 && fail "context parallelism is not there yet"
grep -q "context parallelism" refused.txt || fail "no reason: $(cat refused.txt)"

# Runs with experts on four ranks: whole, stopped and continued, and read by other layouts.
start() { ranks=$1; shift; "$mpirun" -np "$ranks" --oversubscribe --bind-to none "$moesaic" train tiny.yaml run.precision=f64 "$@"; }
start 4 parallel.ep=4 run.dir=whole > whole.txt 2>&1 || { cat whole.txt; fail "ep 4"; }
start 4 parallel.ep=4 run.dir=parts train.steps=8 run.max_minutes=0.00001 > parts.txt 2>&1
[ $? = 75 ] || { cat parts.txt; fail "no stop"; }
start 4 parallel.ep=4 run.dir=parts --resume=must > parts.txt 2>&1 || { cat parts.txt; fail "no second life"; }
"$moesaic" ckpt diff whole/checkpoints/step-00000008 parts/checkpoints/step-00000008 > diff.txt || { cat diff.txt; fail "not the same bits"; }
"$moesaic" ckpt verify whole/checkpoints/step-00000008 || fail "damaged"
for other in "1" "2 parallel.ep=2" "4 parallel.ep=2" "4"; do
  # shellcheck disable=SC2086 # several words
  start $other run.dir=other --resume=whole@4 checkpoint.every=1 > other.txt 2>&1 || { cat other.txt; fail "$other from ep 4"; }
  grep -q "step 8/8" other.txt || fail "$other did not finish"
  rm -r other
done
"$moesaic" train tiny.yaml run.precision=f64 run.dir=one > one.txt 2>&1 || { cat one.txt; fail "one rank"; }
start 4 parallel.ep=4 run.dir=back --resume=one@4 > back.txt 2>&1 || { cat back.txt; fail "ep 4 from one rank"; }
"$moesaic" eval whole > eval.txt 2>&1 || { cat eval.txt; fail "eval of a checkpoint of four writers"; }

# What a run tells of its exchanges.
start 2 parallel.ep=2 dispatch.exchange=flat dispatch.buffer_factor=0.5 dispatch.overlap=true log.detail_every=2 train.steps=2 \
  run.dir=told > told.txt 2>&1 || { cat told.txt; fail "small buffers beside other work"; }
grep -q "^tokens     dispatch.exchange: flat | room for 0.5 x the mean, further passes beyond | beside other work" told.txt || fail "no line of the exchange: $(cat told.txt)"
grep -q "exchange dispatch .*, waited for .* | combine .* | longest wait .* in layer" told.txt || fail "no times of the exchange: $(cat told.txt)"
grep -q '"type":"exchange","step":2,"layers":' told/metrics.jsonl || fail "no exchange in metrics.jsonl"
grep -q '"further_passes":[1-9]' told/metrics.jsonl || fail "no further passes in metrics.jsonl"
expect 2 "dense exchanges do not count what comes" "$moesaic" plan tiny.yaml parallel.ep=2 dispatch.exchange=dense dispatch.buffer_factor=1.25
echo "layouts: all agree"

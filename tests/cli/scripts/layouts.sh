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
# Narrow types: every layout takes the choices of one rank, and says how many of its own are others.
mixed="dp=4;dp=4,ep=4;tp=2;dp=2,tp=2,ep=2,etp=2;pp=2,tp=2,ep=2"
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
echo "layouts: all agree"

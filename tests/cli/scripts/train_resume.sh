#!/bin/sh
# train_resume.sh MPIRUN MOESAIC WORK_DIR: trains a tiny hybrid model on two ranks, throws the last checkpoint away,
# continues with the same command, and wants the same bytes; then the messages and exit codes around resuming.
set -eu
mpirun=$1 moesaic=$2 work=$3
rm -rf "$work"
mkdir -p "$work"
cd "$work"
perl -e 'srand 7; for my $d (1 .. 40) { print join(" ", map { ("the", "cat", "sat", "on", "a", "mat", "and", "ran")[rand 8] } 1 .. 60), "\n\f\n" }' > text.txt
cat > tiny.yaml <<'YAML'
model:
  hidden_size: 32
  num_hidden_layers: 2
  vocab_size: 256
  intermediate_size: 48
  hidden_act: situ
  linear_attn_config: {kda_layers: [1], full_attn_layers: [2], num_heads: 2, head_dim: 16, gate_lower_bound: -5.0, use_full_rank_gate: true}
  num_attention_heads: 2
  q_lora_rank: 16
  kv_lora_rank: 16
  qk_nope_head_dim: 16
  qk_rope_head_dim: 8
  v_head_dim: 16
  mla_use_nope: true
  mla_use_output_gate: true
  indexer: {index_n_heads: 2, index_head_dim: 16, index_topk: 16}
  num_experts: 8
  num_experts_per_token: 2
  num_shared_experts: 1
  moe_intermediate_size: 16
  routed_expert_hidden_size: 16
  first_k_dense_replace: 1
  balance: {bias_rule: quantile}
  residual: {type: attention, attn_res_block_size: 1}
data: {train: text.txt, valid: text.txt, sequence_length: 64}
train: {steps: 8, global_batch_size: 4, micro_batch_size: 1, eval_every: 4, eval_batches: 4}
optimizer: {name: muon, lr: 3e-3, warmup_steps: 2, ema_decay: 0.9}
checkpoint: {every: 4, keep_last: 0}
run: {device: cpu, dir: run}
YAML
run() { "$mpirun" -np 2 --oversubscribe --bind-to none "$moesaic" train tiny.yaml "$@"; }
fail() { echo "FAILED: $*"; exit 1; }
expect() { # code, text, command…
  want=$1 text=$2
  shift 2
  set +e
  out=$("$@" 2>&1)
  got=$?
  set -e
  [ "$got" -eq "$want" ] || fail "exit $got instead of $want from: $*: $out"
  case $out in *"$text"*) ;; *) fail "'$text' is not in the output of: $*: $out" ;; esac
}

run > log.txt
grep -q 'step 8/8' log.txt || fail "no line of the last step"
grep -q 'held-out .*unigram entropy .*bigram entropy' log.txt || fail "no closing comparison"
cp -r run/checkpoints/step-00000008 whole
rm -r run/checkpoints/step-00000008
expect 0 "continuing from" run
for f in model.safetensors optimizer.safetensors; do
  cmp "whole/$f" "run/checkpoints/step-00000008/$f" || fail "$f differs after resuming"
done
expect 0 "continuing from" run                                 # nothing left to do
cp run/config.yaml config.before
expect 2 "--resume=never" run --resume=never log.interval=3
cmp config.before run/config.yaml || fail "a refused run changed config.yaml"
expect 2 "order of the data" run train.global_batch_size=2
expect 2 "trained as another model" run model.hidden_act=silu
expect 2 "beyond train.steps" run train.steps=6
expect 0 "changed    log.interval: 1 -> 2" run log.interval=2
expect 0 "continuing from" run train.steps=9 'train.phases=[{until: 8}, {until: 9, sequence_length: 32}]'
rm -r run/checkpoints/step-00000009
( flock 9; expect 2 "in use by another run" run ) 9> run/.lock
expect 3 "no complete checkpoint" run --resume=must run.dir=other
expect 2 "order of the data" run run.seed=2
expect 75 "max_minutes" run run.dir=timed run.max_minutes=0.00001
expect 75 "step 2 of 8" run run.dir=timed run.max_minutes=0.00001
expect 0 "continuing from" run run.dir=timed
for f in model.safetensors optimizer.safetensors; do
  cmp "whole/$f" "timed/checkpoints/step-00000008/$f" || fail "$f differs after time limits"
done
# A learning rate that breaks the weights: exit 5, and no checkpoint of the steps that only skipped.
expect 5 "not finite" run run.dir=broken optimizer.lr=1e30 checkpoint.every=1 train.steps=4
[ ! -e broken/checkpoints/step-00000004 ] || fail "a step that was skipped was saved"
expect 3 "shorter" run run.dir=short 'train.phases=[{until: 4}, {until: 8, sequence_length: 100000}]' model.max_position_embeddings=200000
expect 2 "model.kv_lora_rank" run 'model.linear_attn_config.kda_layers=[1,2]' 'model.linear_attn_config.full_attn_layers=[]' \
  model.indexer=null model.mtp.num_nextn_predict_layers=1 model.kv_lora_rank=0
# The dense warm-up needs other memory than sparse attention; the global loss starts at an even load.
expect 0 "finished" run run.dir=warm model.indexer.index_topk=2 'train.phases=[{until: 3, sparse_stage: warmup}, {until: 8}]'
expect 0 "finished" run run.dir=aux model.balance.aux_loss=global model.balance.aux_loss_weight=0.01 train.steps=2
grep '"step":1,' aux/metrics.jsonl | grep -q '"balance":0.0[0-9]*[1-9]' || fail "no global auxiliary loss in step 1"
expect 5 "in a row" run run.dir=bad debug.inject_nan_step=1 train.max_bad_steps=1
CUDA_VISIBLE_DEVICES="" expect 2 "run.device=cpu" run run.dir=gpu run.device=cuda
expect 3 "nowhere.txt" run run.dir=nodata data.train=nowhere.txt
text=$("$moesaic" generate run --prompt "the cat " --max-new-tokens 60 --temperature 0 | tr -d '\n')
[ ${#text} -gt 8 ] || fail "generate added nothing to the prompt"
a=$("$moesaic" generate run --prompt "the " --max-new-tokens 20 --seed 3)
b=$("$moesaic" generate run --prompt "the " --max-new-tokens 20 --seed 3)
[ "$a" = "$b" ] || fail "the same seed gave two texts"
averaged=$("$moesaic" generate run --prompt "the " --max-new-tokens 20 --seed 3 --average | tr -d '\n')
[ ${#averaged} -gt 4 ] || fail "generate --average added nothing to the prompt"
expect 3 "no checkpoint of step 5" "$moesaic" generate run --step 5
expect 3 "is not a folder" "$moesaic" generate nothing
echo "train and resume: all checks passed"

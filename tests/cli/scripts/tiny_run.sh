# Sourced by the scripts beside it, with MPIRUN MOESAIC WORK_DIR as $1 $2 $3: a fresh WORK_DIR to be in, text.txt,
# tiny.yaml (a hybrid model that trains 8 steps in a moment), and how to run it and to expect things of it.
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

# Sourced by tests that train: `expert_run` writes text.txt and tiny.yaml into the current folder, a hybrid model of two
# layers whose steps take milliseconds. Also fail() and, for what runs MPI, `ranks N ARGUMENT…` (needs $mpirun, $moesaic).
expert_run() {
  perl -e 'srand 7; for my $d (1 .. 40) { print join(" ", map { ("the", "cat", "sat", "on", "a", "mat", "and", "ran")[rand 8] } 1 .. 60), "\n\f\n" }' > text.txt
  cat > tiny.yaml <<'YAML'
model:
  hidden_size: 32
  num_hidden_layers: 3
  vocab_size: 256
  intermediate_size: 48
  hidden_act: situ
  linear_attn_config: {kda_layers: [1, 2], full_attn_layers: [3], num_heads: 2, head_dim: 16, gate_lower_bound: -5.0, use_full_rank_gate: true}
  num_attention_heads: 2
  q_lora_rank: 16
  kv_lora_rank: 16
  qk_nope_head_dim: 16
  qk_rope_head_dim: 8
  v_head_dim: 16
  mla_use_nope: true
  mla_use_output_gate: true
  num_experts: 8
  num_experts_per_token: 2
  num_shared_experts: 1
  moe_intermediate_size: 16
  first_k_dense_replace: 1
  balance: {bias_rule: quantile}
data: {train: text.txt, valid: text.txt, sequence_length: 64}
train: {steps: 8, global_batch_size: 4, micro_batch_size: 1, eval_every: 4, eval_batches: 4}
optimizer: {name: adamw, lr: 3e-3, warmup_steps: 2}
checkpoint: {every: 4, keep_last: 0}
run: {device: cpu, dir: run}
YAML
}
fail() {
  echo "FAILED: $*"
  exit 1
}
ranks() {
  n=$1
  shift
  "$mpirun" -np "$n" --oversubscribe --bind-to none "$moesaic" train tiny.yaml "$@"
}
# The steps, loads of experts and evaluations of a metrics.jsonl without what depends on the machine, last record of each step.
same_records() {
  perl -MJSON::PP -ne '$r = eval { decode_json($_) } or next; next unless $r->{type} =~ /^(step|experts|eval)$/;
    delete @$r{qw(seconds time tokens_per_second tflops_per_device mfu memory_bytes host_bytes)}; $all{sprintf "%08d %s", $r->{step}, $r->{type}} = $r;
    END { print JSON::PP->new->canonical->encode($all{$_}), "\n" for sort keys %all }' "$1"
}

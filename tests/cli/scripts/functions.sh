# Functions of the tests that run the whole program; sourced, by tiny_run.sh or alone. Most use $mpirun and $moesaic.

fail() {
  echo "FAILED: $*"
  exit 1
}
# enter MPIRUN MOESAIC WORK_DIR: sets $mpirun, $moesaic and $work; the current folder is then an empty WORK_DIR.
enter() {
  mpirun=$1 moesaic=$2 work=$3
  rm -rf "$work"
  mkdir -p "$work"
  cd "$work"
}
# expect CODE TEXT command…: it ends with CODE and says TEXT; what it printed is in $out.
expect() {
  want=$1 text=$2
  shift 2
  set +e
  out=$("$@" 2>&1)
  got=$?
  set -e
  [ "$got" -eq "$want" ] || fail "exit $got instead of $want from: $*: $out"
  case $out in *"$text"*) ;; *) fail "'$text' is not in the output of: $*: $out" ;; esac
}
# same_state CHECKPOINT CHECKPOINT WHAT: the same data files, of as many ranks, with the same bytes.
same_state() {
  (cd "$1" && ls -- *.safetensors) > names.1 || fail "$3: no data files in $1"
  (cd "$2" && ls -- *.safetensors) > names.2 || fail "$3: no data files in $2"
  cmp names.1 names.2 || fail "$3: $(tr '\n' ' ' < names.1) in $1, $(tr '\n' ' ' < names.2) in $2"
  while read -r name; do
    cmp "$1/$name" "$2/$name" || fail "$3: $name differs"
  done < names.1
}
# ranks N ARGUMENT…: trains tiny.yaml on N ranks.
ranks() {
  n=$1
  shift
  "$mpirun" -np "$n" --oversubscribe --bind-to none "$moesaic" train tiny.yaml "$@"
}
run() { ranks 2 "$@"; }
# resume RUN_DIR …: on two ranks.
resume() { "$mpirun" -np 2 --oversubscribe --bind-to none "$moesaic" resume "$@"; }

# small_text: 40 documents of eight words in disorder.
small_text() {
  perl -e 'srand 7; for my $d (1 .. 40) { print join(" ", map { ("the", "cat", "sat", "on", "a", "mat", "and", "ran")[rand 8] } 1 .. 60), "\n\f\n" }'
}
# hybrid_yaml HIDDEN KDA_LAYERS full|plain: a hybrid model of that width, with one layer of full attention after those of KDA, that
# trains on text.txt in steps of milliseconds. full: sparse attention, latent experts, residuals over depth, Muon, an average.
hybrid_yaml() {
  width=$1 full_layer=$(($2 + 1)) half=$(($1 / 2))
  kda=$(seq -s , 1 "$2")
  case $3 in
    full) optimizer="{name: muon, lr: 3e-3, warmup_steps: 2, ema_decay: 0.9}" extras="
  indexer: {index_n_heads: 2, index_head_dim: $half, index_topk: 16}
  routed_expert_hidden_size: $half
  residual: {type: attention, attn_res_block_size: 1}" ;;
    plain) optimizer="{name: adamw, lr: 3e-3, warmup_steps: 2}" extras= ;;
    *) fail "hybrid_yaml: $3" ;;
  esac
  cat << YAML
model:
  hidden_size: $width
  num_hidden_layers: $full_layer
  vocab_size: 256
  intermediate_size: $((width + half))
  hidden_act: situ
  linear_attn_config: {kda_layers: [$kda], full_attn_layers: [$full_layer], num_heads: 2, head_dim: $half, gate_lower_bound: -5.0, use_full_rank_gate: true}
  num_attention_heads: 2
  q_lora_rank: $half
  kv_lora_rank: $half
  qk_nope_head_dim: $half
  qk_rope_head_dim: $((half / 2))
  v_head_dim: $half
  mla_use_nope: true
  mla_use_output_gate: true
  num_experts: 8
  num_experts_per_token: 2
  num_shared_experts: 1
  moe_intermediate_size: $half
  first_k_dense_replace: 1
  balance: {bias_rule: quantile}$extras
data: {train: text.txt, valid: text.txt, sequence_length: $((2 * width))}
train: {steps: 8, global_batch_size: 4, micro_batch_size: 1, eval_every: 4, eval_batches: 4}
optimizer: $optimizer
checkpoint: {every: 4, keep_last: 0}
run: {device: cpu, dir: run}
YAML
}
# text.txt, and tiny.yaml with all that the program can do in two layers; or with two layers of experts and no more.
tiny_run() {
  small_text > text.txt
  hybrid_yaml 32 1 full > tiny.yaml
}
expert_run() {
  small_text > text.txt
  hybrid_yaml 32 2 plain > tiny.yaml
}

# same_records metrics.jsonl: the steps, loads of experts and evaluations without what depends on the machine, the last record
# of each step.
same_records() {
  perl -MJSON::PP -ne '$r = eval { decode_json($_) } or next; next unless $r->{type} =~ /^(step|experts|eval)$/;
    delete @$r{qw(seconds seconds_by_part time tokens_per_second tflops_per_device mfu memory_bytes host_bytes)}; $all{sprintf "%08d %s", $r->{step}, $r->{type}} = $r;
    END { print JSON::PP->new->canonical->encode($all{$_}), "\n" for sort keys %all }' "$1"
}

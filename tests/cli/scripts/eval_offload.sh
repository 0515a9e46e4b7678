#!/bin/sh
# eval_offload.sh MPIRUN MOESAIC WORK_DIR: `eval` and `generate` of runs whose experts do not fit on the device: what they print
# with everything there, byte for byte; memory is planned, and a shortage told.
set -eu
. "${0%/*}/tiny_run.sh"
expert_run
cat > quiz.jsonl << 'JSONL'
{"context": "the cat sat on a", "choices": [" mat", " qqq", " cat and"], "answer": 0}
{"context": "cat", "choices": [" ran", "zzzz"], "answer": 1}
JSONL

# Two ranks that share the experts, in vertical order, with budgets of training.
trained="parallel.ep=2 parallel.order=vertical activations.residual_offload=true experts.offload=full experts.device_cache=180KiB
  memory.host_budget=2MiB memory.file_budget=2MiB memory.file_path=tier"
run run.dir=run train.steps=4 $trained > log.txt || fail "training: $(cat log.txt)"

# eval_as NAME RANKS OVERRIDE…, generate_as NAME OVERRIDE…: what is printed goes to NAME.json, NAME.text; the tables to NAME.log.
eval_as() {
  name=$1 n=$2
  shift 2
  "$mpirun" -np "$n" --oversubscribe --bind-to none "$moesaic" eval run --data text.txt --tokens 1024 --choices quiz.jsonl --details "$name.details" --json "$@" \
    > "$name.json" 2> "$name.log" || fail "eval $*: $(cat "$name.log")"
}
generate_as() {
  name=$1
  shift
  "$moesaic" generate run --prompt "the cat" --max-new-tokens 3 "$@" > "$name.text" 2> "$name.table" || fail "generate $*: $(cat "$name.table")"
}
offloads() { grep -q "^  experts' gate_up weights  *[0-9.]* .iB  *[0-9.]* .iB" "$1" || fail "nothing is offloaded: $(cat "$1")"; }

eval_as whole 1 experts.offload=none
generate_as whole experts.offload=none
# A budget for everything: nothing is offloaded, whatever the run says.
eval_as fits 1 experts.device_cache=null
generate_as fits experts.device_cache=null
for name in whole fits; do
  ! grep -q "experts'" $name.log $name.table || fail "experts are offloaded although all fit: $(cat $name.log $name.table)"
done
for policy in sched lru static random; do
  eval_as $policy 1 experts.policy=$policy experts.device_cache=40KiB
  offloads $policy.log
done
for policy in sched random; do
  generate_as $policy experts.policy=$policy experts.device_cache=40KiB
  offloads $policy.table
done
# What is left of a budget; the file; two ranks, each with all experts.
expect 4 "and the rest of the run needs" "$moesaic" eval run experts.device_cache=null memory.device_budget=100KiB
least() { rest=${out##*Raise memory.device_budget to at least } && echo "${rest%%,*}"; }
eval_as budget 1 experts.device_cache=null memory.device_budget="$(least)"
expect 4 "Raise memory.device_budget to at least" "$moesaic" generate run experts.device_cache=null memory.device_budget=50KiB
generate_as budget experts.device_cache=null memory.device_budget="$(least)"
for name in budget; do offloads $name.log && offloads $name.table; done
small="experts.device_cache=40KiB memory.host_budget=120KiB"
eval_as file 1 $small
generate_as file $small
eval_as two 2 $small
for log in file.log file.table two.log; do
  grep -q "^  experts' gate_up weights .* .iB .* .iB .* .iB$" $log || fail "nothing is in the file: $(cat $log)"
done
[ -z "$(ls tier)" ] || fail "the file tier was left: $(ls tier)"
for name in fits sched lru static random budget file two; do
  cmp whole.json $name.json || fail "eval, $name: $(cat whole.json $name.json)"
  cmp whole.details $name.details || fail "details of eval, $name"
done
for name in fits sched random budget file; do cmp whole.text $name.text || fail "generate, $name: $(cat whole.text $name.text)"; done

# What is lacking, before anything is loaded; of several ranks the largest need.
expect 4 "Raise experts.device_cache to at least" "$moesaic" generate run experts.device_cache=1KiB
expect 4 "memory.device_budget is 51200 bytes, and this model needs" "$moesaic" eval run experts.offload=none memory.device_budget=50KiB experts.device_cache=null
case $out in *"Set experts.offload=full"*"or raise memory.device_budget."*) ;; *) fail "no way out: $out" ;; esac
expect 4 "memory.host_budget is 1KiB" "$mpirun" -np 2 --oversubscribe --bind-to none "$moesaic" eval run experts.device_cache=40KiB memory.host_budget=1KiB \
  memory.file_budget=null memory.file_path=null
expect 4 "at least 26KiB must be in host memory (12KiB staging for weights of gate_up" "$moesaic" eval run experts.device_cache=40KiB memory.host_budget=1KiB
expect 2 "These keys were changed:
  model.hidden_size: 32 -> 64" "$moesaic" generate run model.hidden_size=64
expect 2 "did you mean memory.host_budget" "$moesaic" generate run memory.host_budge=1MiB
echo "eval_offload: all checks passed"

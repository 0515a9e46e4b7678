#!/bin/sh
# offload.sh MPIRUN MOESAIC WORK_DIR: experts outside the device from the command line: the same bits, what is planned, shown and
# recorded, and what is refused.
set -eu
. "${0%/*}/tiny_run.sh"
expert_run

one() { "$moesaic" train tiny.yaml "$@"; }
tiers="memory.host_budget=2MiB memory.file_budget=2MiB memory.file_path=tier"
small="experts.device_cache=180KiB"

# Two ranks that share the state of experts, with and without; the file is gone afterwards.
run run.dir=plain > log.txt
for what in states full; do
  [ $what = states ] && host=48KiB small=experts.device_cache=40KiB || host=240KiB small=experts.device_cache=180KiB
  run run.dir=$what experts.offload=$what $small memory.host_budget=$host memory.file_budget=2MiB memory.file_path=tier log.detail_every=2 > log.$what
  expect 0 "314 tensors have equal bits, 0 differ" "$moesaic" ckpt diff plain $what
  [ -z "$(ls tier)" ] || fail "the file tier was left: $(ls tier)"
  grep -q "^offload    $what, policy sched | room on the device for" log.$what || fail "no summary: $(cat log.$what)"
  grep -q '^                                  *device      host memory             file$' log.$what || fail "no table: $(cat log.$what)"
  grep -q "^  experts' gate_up states .* KiB\|MiB" log.$what || fail "no states in the table"
  grep -q '^step 2 | offload hits .*states [0-9.]*% .*| up [0-9.]*[1-9][0-9]* MiB, down [0-9.]* MiB | file read' log.$what || fail "no line of details"
  [ "$(grep -c '"type":"offload","step":[1-8],' $what/metrics.jsonl)" = 8 ] || fail "not a record for every step"
  [ "$(grep -c '"layer_uses":\[' $what/metrics.jsonl)" = 4 ] || fail "layers are not told every other step"
done

# Off and on again, with other budgets and policies.
back_to() { rm -r "$1/checkpoints/step-00000008" "$1/finished"; }
back_to states
resume states experts.offload=none > log.txt
expect 0 "314 tensors have equal bits, 0 differ" "$moesaic" ckpt diff plain states
for what in states full; do
  back_to states
  resume states experts.offload=$what experts.policy=random experts.device_cache=null memory.file_budget=null memory.file_path=null memory.host_budget=null > log.txt
  expect 0 "314 tensors have equal bits, 0 differ" "$moesaic" ckpt diff plain states
done

# A stage of a pipeline without experts.
run run.dir=staged parallel.pp=2 parallel.layers=[1,2] > log.txt
for what in states full; do
  run run.dir=staged-$what parallel.pp=2 parallel.layers=[1,2] experts.offload=$what experts.device_cache=120KiB memory.host_budget=240KiB memory.file_budget=2MiB memory.file_path=tier > log.txt
  expect 0 "equal bits, 0 differ" "$moesaic" ckpt diff staged staged-$what
  grep -q "^offload    $what, .* has nothing to offload" log.txt || fail "no word of a stage without experts: $(cat log.txt)"
done

# Experts without tokens, whose updates wait for their next use; a resumed run may make them at once again.
few="data.sequence_length=16 train.global_batch_size=1 model.num_experts=32"
one run.dir=dense $few > log.txt
one run.dir=lazy $few experts.offload=full $small optimizer.untouched=lazy log.detail_every=2 > log.lazy
expect 0 "tensors have equal bits, 0 differ" "$moesaic" ckpt diff dense lazy
grep -q '"replays":[1-9][0-9]*,"steps_replayed":[1-9]' lazy/metrics.jsonl || fail "no update waited: $(grep '"offload"' lazy/metrics.jsonl)"
grep -q '^step [2468] | offload .* | replays [1-9][0-9]* of [1-9][0-9]* step(s) | host waited' log.lazy || fail "no word of replays: $(cat log.lazy)"
expect 0 "note       optimizer.untouched: lazy does what dense does here: it takes experts.offload=full" one run.dir=warned train.steps=3 optimizer.untouched=lazy memory.host_budget=1GiB
case $out in *"note       memory.host_budget: nothing is offloaded to host memory"*) ;; *) fail "no word of a budget for nothing: $out" ;; esac
back_to lazy
"$moesaic" resume lazy optimizer.untouched=decay > log.txt
expect 0 "tensors have equal bits, 0 differ" "$moesaic" ckpt diff dense lazy

# Updates in the backward of runs that do not clip: the same bits, no gradient in host memory; one that is not finite ends the
# run, which goes on with updates after the step.
free="optimizer.clip_grad_norm=0" down="parallel.order=vertical"
early="$free experts.offload=full experts.device_cache=400KiB experts.update=in_backward"
one run.dir=late $free $down > log.txt
one run.dir=early $early $down > log.early
expect 0 "tensors have equal bits, 0 differ" "$moesaic" ckpt diff late early
grep -q "^  experts' gate_up gradients  *[0-9.]* [KM]iB  *-  *-$" log.early || fail "gradients have homes: $(cat log.early)"
one run.dir=skipped $free $down debug.inject_nan_step=6 > log.txt
expect 5 "step 6: the norm of the gradients is not finite (nan), and experts.update: in_backward had updated experts by then" \
  one run.dir=half $early $down debug.inject_nan_step=6 checkpoint.every=2
[ "$(ls half/checkpoints)" = "step-00000002
step-00000004" ] || fail "what was saved: $(ls half/checkpoints)"
"$moesaic" resume half experts.update=after_step > log.txt
expect 0 "tensors have equal bits, 0 differ" "$moesaic" ckpt diff skipped half
expect 0 "gradients go round in their slots" "$moesaic" plan tiny.yaml $early $down
expect 2 "experts.update: in_backward updates experts before the norm of all gradients is known" \
  "$moesaic" plan tiny.yaml experts.offload=full experts.update=in_backward parallel.order=vertical
expect 2 "parallel.order is horizontal with" "$moesaic" plan tiny.yaml $early parallel.order=horizontal
expect 2 "several ranks have the same experts" "$moesaic" plan tiny.yaml $early $down parallel.dp=2
expect 0 "of none" "$moesaic" bench offload tiny.yaml data.train=null $free $down experts.offload=full experts.update=in_backward --tokens 256 --budgets 50%,40% --steps 1

# Which experts are used, for a simulation.
one run.dir=touched experts.offload=full experts.touch_log=touches.jsonl train.steps=3 checkpoint.every=0 > log.txt
expect 2 "clobbered/metrics.jsonl: exists and is no touch log" one run.dir=clobbered experts.offload=full experts.touch_log=metrics.jsonl train.steps=3
expect 0 "sched" "$moesaic" bench cache-sim --log touched/touches.jsonl --budget 25%,50%
expect 2 "--budget 0%: holds not a single one of 16 experts; write at least 6.25%" "$moesaic" bench cache-sim --log touched/touches.jsonl --budget 25%,0%
expect 2 "--budget 1B: holds not a single one of 16 experts" "$moesaic" bench cache-sim --log touched/touches.jsonl --budget 1B
expect 2 "--budget 1%: " "$moesaic" bench offload tiny.yaml data.train=null --tokens 256 --budgets 50%,1% --steps 1
case $out in *"write at least"*"no offload"*|*"no offload"*) fail "steps were measured for nothing: $out" ;; *"write at least"*) ;; *) fail "no way out: $out" ;; esac
expect 2 "bench offload measures one rank, and the layout has 2" "$moesaic" bench offload tiny.yaml data.train=null parallel.ep=2 --tokens 256 --budgets 50%
expect 4 "memory.file_path must be a folder that this user can write to" "$moesaic" train tiny.yaml run.dir=nowhere train.steps=3 experts.offload=full \
  experts.device_cache=120KiB memory.host_budget=300KiB memory.file_path=/dev/null/tier memory.file_budget=8MiB
expect 0 "of none" "$moesaic" bench offload tiny.yaml data.train=null --tokens 256 --budgets 50%,25% --steps 1

# Plans.
expect 0 "note: memory.host_budget: nothing is offloaded to host memory; it counts with experts.offload" "$moesaic" plan tiny.yaml memory.host_budget=1GiB
expect 0 "over the link in a step of" "$moesaic" plan tiny.yaml experts.offload=states --device-memory 1800KiB
"$moesaic" plan tiny.yaml experts.offload=full --device-memory 1800KiB --json > plan.json
perl -MJSON::PP -e 'local $/; $p = decode_json(<>); $r = $p->{rank_memory}; $sum = 0; $sum += $_ for values %{$r->{parts}};
  die "the parts are not the sum" if $sum != $r->{total}; die "over the limit" if $sum > 1800 << 10;
  $host = 0; $host += $_->{host} for @{$r->{experts}}; die "no homes" if $host == 0; die "nothing moves" if !$p->{offload_per_step}{bytes_up}' plan.json

# A line for every stage of a pipeline, and the experts of the one that has most.
out=$("$moesaic" plan tiny.yaml parallel.pp=2 parallel.layers=[2,1] experts.offload=full experts.device_cache=120KiB)
case $out in *"Memory of a rank of 2, of stage "*", which needs most on the device"*"Memory of a rank of every stage"*"Experts of stage "*) ;; *) fail "no stages in the plan: $out" ;; esac
"$moesaic" plan tiny.yaml parallel.pp=2 parallel.layers=[1,2] experts.offload=full experts.device_cache=120KiB --json > plan.json
perl -MJSON::PP -e 'local $/; $p = decode_json(<>); @s = @{$p->{stage_memory}}; die "not two stages" if @s != 2;
  die "experts in stage 0" if $s[0]{experts}; die "none in stage 1" if !$s[1]{experts}; die "not of stage 1" if $p->{offload_per_step}{stage} != 1' plan.json

# Of a pipeline the largest need, whoever is the first to fail: an experts' layer in stage 0, two in stage 1.
hybrid_yaml 32 3 plain > deep.yaml
piped="parallel.pp=2 parallel.layers=[2,2] experts.offload=full experts.device_cache=120KiB memory.host_budget=1KiB"
expect 4 "rank 1 (stage 1): experts.offload: this rank needs" "$mpirun" -np 2 --oversubscribe --bind-to none "$moesaic" train deep.yaml run.dir=no $piped
expect 4 "stage 1: experts.offload: this rank needs" "$moesaic" plan deep.yaml $piped

# What is refused, before anything is allocated and with the folder as it was.
expect 2 "memory.file_path: needs memory.file_budget" one memory.file_path=tier
waiting="activations.residual_offload=true memory.host_budget=1KiB"
expect 4 "memory.host_budget is 1024B. Raise it" one run.dir=no $waiting
expect 4 "offloaded activations of this rank need" "$moesaic" plan tiny.yaml $waiting
expect 4 "Raise experts.device_cache to at least" one run.dir=no experts.offload=states experts.device_cache=1KiB
expect 4 "and the rest of the run needs" one run.dir=no experts.offload=states memory.device_budget=1MiB
expect 4 "memory.device_budget is 1048576 bytes, and this run needs" one run.dir=no memory.device_budget=1MiB
expect 4 "memory.host_budget is 20KiB. However large a file is, at least 40KiB must be in host memory" one run.dir=no experts.offload=states experts.device_cache=80KiB memory.host_budget=20KiB
expect 4 "memory.host_budget is 60KiB. Raise it, or let what does not fit live in a file" one run.dir=no experts.offload=states experts.device_cache=80KiB memory.host_budget=60KiB
expect 4 "Raise experts.device_cache to at least" "$moesaic" plan tiny.yaml parallel.dp=4 experts.offload=states experts.device_cache=1KiB
expect 4 "Raise --device-memory to at least" "$moesaic" plan tiny.yaml experts.offload=states --device-memory 100KiB
case $out in *"experts' gate_up states"*"does not fit"*) ;; *) fail "the plan is not shown: $out" ;; esac
case $out in *"no problems found"* | *"caches hold everything"*) fail "the plan contradicts its error: $out" ;; esac
out=$("$moesaic" plan tiny.yaml memory.device_budget=1MiB)
case $out in *"this run does not start"*"does not fit into memory.device_budget") ;; *) fail "a plan over its budget: $out" ;; esac
expect 0 "over the link in a step: nothing" "$moesaic" plan tiny.yaml experts.offload=states
[ ! -e no ] || fail "a refused run left a folder"
expect 4 "tier/file" one run.dir=no experts.offload=states $small memory.host_budget=48KiB memory.file_budget=2MiB memory.file_path=text.txt/tier/file
expect 0 "memory plan" "$moesaic" doctor tiny.yaml
expect 2 "Raise experts.device_cache to at least" "$moesaic" doctor tiny.yaml experts.offload=states experts.device_cache=1KiB
expect 0 "file tier" "$moesaic" doctor tiny.yaml experts.offload=states $tiers

#!/bin/sh
# train_cuda.sh MPIRUN MOESAIC WORK_DIR: the whole program on a GPU, in bf16: the same bytes twice and after resuming, the
# same loss as on the CPU, two data-parallel ranks (on two devices, or in turns on one) against one, messages.
set -eu
. "${0%/*}/functions.sh"
. "${0%/*}/cuda_runs.sh"
enter_cuda "$1" "$2" "$3"
ranks 1 log.trace_steps=[3,5] debug.nvtx=true > log.txt || fail "$(cat log.txt)"
for step in 3 5; do
  trace=run/trace/step-0000000$step.rank0.json
  for name in '"layer 0"' '"layer 3"' '"forward"' '"backward"' '"optimizer"' '"kda_chunk_backward"' '"muon_update"'; do
    grep -q "\"name\":$name" "$trace" || fail "the trace of step $step has no $name"
  done
  if grep -Eq '"cat":"op","dur":(0\.0|-)' "$trace"; then fail "the trace of step $step has ops that took no time"; fi
done
[ "$(ls run/trace | wc -l)" -eq 2 ] || fail "traces of other steps: $(ls run/trace)"
grep -q 'device cuda:0 | precision bf16' log.txt || fail "not on the GPU in bf16: $(head -3 log.txt)"
grep 'planned .* as the driver counts' log.txt || fail "no comparison with the driver"
cp -r run/checkpoints/step-00000008 whole
ranks 1 run.dir=again > again.txt
rm -r run/checkpoints/step-00000008
ranks 1 > resumed.txt
same_state whole again/checkpoints/step-00000008 "two runs"
same_state whole run/checkpoints/step-00000008 "after resuming"
ranks 1 run.dir=cpu run.device=cpu run.precision=bf16 > cpu.txt
close "GPU and CPU" log.txt cpu.txt 0.02
# Onwards on the CPU from the GPU's checkpoint, and back.
ranks 1 train.steps=10 run.device=cpu run.precision=bf16 > over.txt || fail "$(cat over.txt)"
ranks 1 train.steps=12 > back.txt || fail "$(cat back.txt)"
grep -q 'continuing from .*step-00000010' back.txt || fail "the GPU does not continue the CPU's run"
text=$("$moesaic" generate run --prompt "the cat " --max-new-tokens 40 --temperature 0 | tr -d '\n')
[ ${#text} -gt 8 ] || fail "generate added nothing to the prompt"
# What eval finds is what the run's own evaluation found, to the last digit; choices score as on the CPU, but for rounding.
evaluated=$("$moesaic" eval run --json | sed 's/.*"data":\[{[^]]*"loss":\([^,}]*\).*/\1/')
[ "$evaluated" = "$(grep '"type":"eval","step":12,' run/metrics.jsonl | tail -1 | sed 's/.*"loss":\([^,}]*\).*/\1/')" ] ||
  fail "eval finds a loss of $evaluated, the run: $(grep '"type":"eval"' run/metrics.jsonl)"
echo '{"context": "the cat sat on a", "choices": [" mat", " qqq", " cat and ran"], "answer": 0}' > quiz.jsonl
"$moesaic" eval run --choices quiz.jsonl --details gpu.jsonl
"$moesaic" eval run --choices quiz.jsonl --details cpu.jsonl run.device=cpu run.precision=bf16
perl -MJSON::PP -e 'my ($a, $b) = map { decode_json($_)->{logp} } <>; for (0 .. 2) { die "@$a and @$b\n" if abs($a->[$_] - $b->[$_]) > 0.03 * abs($b->[$_]) }' \
  gpu.jsonl cpu.jsonl || fail "choices score otherwise on the CPU"
if [ "$devices" -lt 2 ]; then
  set +e
  ranks 2 run.dir=refused > refused.txt 2>&1
  code=$?
  set -e
  [ $code -eq 2 ] || fail "two ranks on one GPU ended with $code"
  grep -q 'comm.share_gpu=true' refused.txt || fail "no way out is named: $(cat refused.txt)"
fi
ranks 2 run.dir=two $share > two.txt || fail "$(cat two.txt)"
close "two ranks and one" two.txt log.txt 0.01
grep -q '^mfu .*MFU = FLOPs of a step / (its seconds x 2 GPU(s) x ' two.txt || grep -q '^mfu .*no MFU: no peak is known' two.txt || fail "the header does not say what MFU is: $(cat two.txt)"
# A launcher that shows each rank one GPU, as number 0: the same bits, and not one GPU for both.
cat > own_gpu.sh <<'OWN'
#!/bin/sh
CUDA_VISIBLE_DEVICES=$((OMPI_COMM_WORLD_LOCAL_RANK % GPUS)) exec "$@"
OWN
chmod +x own_gpu.sh
[ "$devices" -ge 2 ] && gpus=2 || gpus=1
GPUS=$gpus "$mpirun" -np 2 --oversubscribe --bind-to none ./own_gpu.sh "$moesaic" train tiny.yaml run.dir=own $share > own.txt || fail "$(cat own.txt)"
same_state two/checkpoints/step-00000008 own/checkpoints/step-00000008 "ranks that see one GPU each"
GPUS=$gpus "$mpirun" -np 2 --oversubscribe --bind-to none ./own_gpu.sh "$moesaic" doctor tiny.yaml > doctor.txt || [ "$gpus" -eq 1 ] || fail "$(cat doctor.txt)"
grep -q "GPU per rank  *2 rank(s), $gpus different GPU(s)" doctor.txt || fail "doctor does not say who sees what: $(cat doctor.txt)"
grep '"type":"step","step":8,' run/metrics.jsonl | perl -MJSON::PP -ne '$r = decode_json($_); $p = $r->{seconds_by_part}; $sum += $_ for values %$p;
  exit !($p->{forward} > 0 && $p->{backward} > 0 && $p->{optimizer} > 0 && abs($sum - $p->{checkpoint} - $r->{seconds}) < 0.05 * $r->{seconds})' || fail "the parts of a step are not the step: $(tail -3 run/metrics.jsonl)"
ranks 2 run.dir=two_again $share > two_again.txt
same_state two/checkpoints/step-00000008 two_again/checkpoints/step-00000008 "two ranks, twice"
set +e
ranks 1 run.dir=huge data.sequence_length=4000000 model.max_position_embeddings=4000000 train.micro_batch_size=4 > huge.txt 2>&1
code=$?
set -e
[ $code -eq 4 ] || [ $code -eq 3 ] || fail "a run that cannot fit ended with $code: $(cat huge.txt)"
echo "train_cuda: passed"

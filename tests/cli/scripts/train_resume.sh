#!/bin/sh
# train_resume.sh MPIRUN MOESAIC WORK_DIR: trains a tiny hybrid model on two ranks, throws the last checkpoint away,
# continues with the same command, and wants the same bytes; then the messages and exit codes around resuming.
set -eu
. "${0%/*}/tiny_run.sh"

run > log.txt
grep -q 'step 8/8' log.txt || fail "no line of the last step"
grep -q 'held-out .*unigram entropy .*bigram entropy' log.txt || fail "no closing comparison"
cp -r run/checkpoints/step-00000008 whole
rm -r run/checkpoints/step-00000008
expect 0 "continuing from" run
same_state whole run/checkpoints/step-00000008 "after resuming"
# Finished: started again it ends at once after a look at the changed keys. It needs no data, and writes nothing.
[ "$(cat run/finished)" = "step 8: all steps and the closing evaluation are done" ] || fail "no mark of the end"
cp -r run before
mv text.txt elsewhere.txt
expect 0 "finished   step 8 of 8 was done before, nothing is left to do (run/checkpoints/step-00000008); raise train.steps" run
case $out in *held-out* | *"model "* | *summary*) fail "a finished run did more than say so: $out" ;; esac
expect 0 "changed    log.interval: 1 -> 2" run log.interval=2
expect 0 "was done before" resume run
expect 2 "trained as another model" run model.hidden_act=silu
expect 2 "--resume=never" run --resume=never data.train=elsewhere.txt data.valid=elsewhere.txt
mv elsewhere.txt text.txt
# What an unfinished run refuses it refuses as well, in the same words; what it accepts it only looks at.
cp -r before unmarked
rm unmarked/finished
for change in parallel.dp=1 parallel.ep=4 parallel.tp=4 parallel.pp=4 data.sequence_length=32 data.valid=nowhere.txt data.tokenizer=nowhere \
  optimizer.ema_decay=null run.precision=f64 'activations.recompute=[nothing]' debug.nvtx=true; do
  set +e
  run run.dir=unmarked $change > open.txt 2>&1
  code=$?
  set -e
  [ $code -ge 2 ] || fail "$change was accepted: $(cat open.txt)"
  expect $code "$(sed -n 's/^moesaic: //p' open.txt | sed 's/unmarked/run/g')" run $change
done
expect 2 "train.global_batch_size: 4 is not a multiple" ranks 3
expect 0 "changed    optimizer.lr: 0.003 -> 0.001" run optimizer.lr=1e-3
case $out in *"step 8 of 8 was done before"*) ;; *) fail "with another learning rate: $out" ;; esac
diff -r --exclude=.lock --exclude=watchdog before run || fail "a finished run wrote something"
rm -r unmarked
# A kill between the last save and the end of the closing evaluation: no mark, or half of one.
for mark in absent half; do
  if [ $mark = half ]; then printf 'step 8: all' > run/finished; else rm run/finished; fi
  expect 0 "held-out" run
  case $out in *"continuing from"*"no step was left to do"*) ;; *) fail "with $mark mark: $out" ;; esac
  cmp before/finished run/finished || fail "the mark was not written again"
done
rm -r before
cp run/config.yaml config.before
expect 2 "--resume=never" run --resume=never log.interval=3
cmp config.before run/config.yaml || fail "a refused run changed config.yaml"
expect 2 "order of the data" run train.global_batch_size=2
expect 2 "trained as another model" run model.hidden_act=silu
expect 2 "beyond train.steps" run train.steps=6
expect 0 "changed    log.interval: 1 -> 2" run log.interval=2
expect 0 "changed    train.steps: 8 -> 9" run train.steps=9 'train.phases=[{until: 8}, {until: 9, sequence_length: 32}]'
rm -r run/checkpoints/step-00000009
# Two live runs in one folder: the second says who has it, and disturbs nothing. What a killed one left stands in nobody's way.
: > first.txt
"$moesaic" train tiny.yaml run.dir=shared train.steps=100000 train.eval_every=0 checkpoint.keep_last=2 > first.txt 2>&1 &
first=$!
until grep -q 'step 8/' first.txt; do
  kill -0 $first || fail "the first of two runs has ended: $(cat first.txt)"
  sleep 0.05
done
expect 2 "shared is in use by another run (process $first on $(hostname)); wait for it, stop it, or choose another run.dir" \
  run run.dir=shared train.steps=100000
kill -0 $first || fail "the second run ended the first"
expect 2 "process $first on" "$moesaic" resume shared
kill -KILL $first
wait $first 2> /dev/null || true
[ -s shared/.lock ] || fail "the killed run left no lock to take over"
expect 75 "continuing from shared/checkpoints/step-" run run.dir=shared train.steps=100000 run.max_minutes=0.00001
expect 3 "no complete checkpoint" run --resume=must run.dir=other
case $out in *summary*) fail "a refused run has a summary: $out" ;; esac
expect 2 "order of the data" run run.seed=2
expect 75 "max_minutes" run run.dir=timed run.max_minutes=0.00001
expect 75 "step 2 of 8" run run.dir=timed run.max_minutes=0.00001
expect 0 "continuing from" run run.dir=timed
same_state whole timed/checkpoints/step-00000008 "after time limits"
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
# A blend, in phases by tokens; conversations; a data set that is smaller than a batch.
expect 0 "phase      steps 3 to 4 | sequences of 128 tokens, 2 per step" run run.dir=blend \
  'data.train=[{path: text.txt, weight: 3}, {path: text.txt, weight: 1}]' \
  train.global_batch_size=null train.global_batch_tokens=256 train.steps=null train.eval_every=0 \
  'train.phases=[{until_tokens: 500}, {until_tokens: 1024, sequence_length: 128}]'
grep -q '"type":"data","step":4,.*"name":"text.txt"' blend/metrics.jsonl || fail "no shares of the blend in metrics.jsonl"
for i in 1 2 3 4 5 6; do echo '{"prompt": "one two ", "completion": "three"}'; done > chat.jsonl
expect 0 "warning    chat.jsonl: an epoch is 2 samples, a step draws 4" run run.dir=chat data.train=chat.jsonl train.steps=2 train.eval_every=0
expect 3 "line 1: a record needs" sh -c "echo '{\"text\": 1}' > no.jsonl; $moesaic data validate no.jsonl"
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

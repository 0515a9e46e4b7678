#!/bin/sh
# eval.sh MPIRUN MOESAIC WORK_DIR: scores the checkpoints of a small run: the loss is that of the run's own evaluation, to the
# last digit, any number of ranks prints the same bytes, and bad input is refused with its place.
set -eu
. "${0%/*}/tiny_run.sh"

run > log.txt
# "loss" of an evaluation in metrics.jsonl, and of the first data set in what eval prints: all digits.
logged() { grep "\"type\":\"eval\",\"step\":$2," "$1/metrics.jsonl" | tail -1 | sed 's/.*"loss":\([^,}]*\).*/\1/'; }
scored() { "$moesaic" eval "$@" --json | sed 's/.*"data":\[{[^]]*"loss":\([^,}]*\).*/\1/'; }
same() { [ -n "$1" ] && [ "$1" = "$2" ] || fail "$3: '$1' in metrics.jsonl, '$2' from eval"; }
same "$(logged run 8)" "$(scored run)" "the last evaluation, of everything"
same "$(logged run 4)" "$(scored run@4 --tokens 1024)" "an evaluation on the way, of 4 batches of 4 windows"
same "$(logged run 4)" "$(scored run --step 4 --tokens 1024 train.global_batch_size=8)" "the batch of training does not count"
run run.dir=split run.precision=bf16 optimizer.master=split > log.split
same "$(logged split 8)" "$(scored split)" "split masters in bf16"

cat > quiz.jsonl <<'JSONL'
{"context": "the cat sat on a", "choices": [" mat", " qqq", " cat and"], "answer": 0}
{"context": "", "choices": ["the cat", "xxx xxx"], "answer": 0}

{"context": "cat mat the ran cat mat the ran cat mat the ran cat mat the ran cat mat the ran", "choices": [" and", "zzzz"], "answer": 1}
JSONL
for ranks in 1 2 3; do
  "$mpirun" -np $ranks --oversubscribe --bind-to none "$moesaic" eval run --data one=text.txt --data two=text.txt --choices quiz.jsonl \
    --json --details details.$ranks > ranks.$ranks || fail "eval on $ranks rank(s)"
  [ "$(wc -l < ranks.$ranks)" -eq 1 ] || fail "more than one line: $(cat ranks.$ranks)"
  cmp ranks.1 ranks.$ranks || fail "$ranks ranks: $(cat ranks.1 ranks.$ranks)"
  cmp details.1 details.$ranks || fail "details of $ranks ranks"
done
perl -MJSON::PP -e 'my $j = decode_json(<>); my ($one, $two) = @{$j->{data}}; my $q = $j->{choices}[0];
  die "data" unless $one->{name} eq "one" && $two->{name} eq "two" && $one->{loss} == $two->{loss} && $one->{tokens} == 8729;
  die "perplexity" unless abs(log($one->{perplexity}) - $one->{loss}) < 1e-9;
  die "bits" unless abs($one->{bits_per_byte} * $one->{bytes} * log(2) - $one->{loss} * $one->{tokens}) < 1e-6;
  die "choices" unless $q->{name} eq "quiz" && $q->{questions} == 3 && $q->{cut_contexts} == 1 && $q->{without_context} == 1;
  die "chance" unless abs($q->{chance} - 4 / 9) < 1e-12' ranks.1 || fail "$(cat ranks.1)"
perl -MJSON::PP -e 'my (@q) = map { decode_json($_) } <>; die "lines" unless join(",", map { $_->{line} } @q) eq "1,2,4";
  for my $q (@q) { my $best = 0; my $l = $q->{logp}; $l->[$_] > $l->[$best] and $best = $_ for 1 .. $#$l; die "chosen" if $best != $q->{chosen} }
  die "bytes" unless "@{$q[0]{bytes}}" eq "4 4 8" && "@{$q[1]{tokens}}" eq "6 6"' details.1 || fail "$(cat details.1)"

expect 0 "| moving averages | f32 on cpu" "$moesaic" eval run --average
case $out in *"perplexity"*"bits/byte"*"8,729 tokens"*) ;; *) fail "no figures: $out" ;; esac
[ "$(scored run --average)" != "$(scored run)" ] || fail "--average changed nothing"
expect 0 "the context lost its beginning in 1 question(s): the model reads 64 tokens" "$moesaic" eval run --choices quiz.jsonl
case $out in *"no context in 1 question(s)"*) ;; *) fail "no word of the context that is not there: $out" ;; esac
case $out in *nats/token*perplexity*) fail "data.valid was scored although only choices were asked for: $out" ;; esac
expect 0 "quiz " "$moesaic" eval run --choices quiz.jsonl data.sequence_length=256
case $out in *"lost its beginning"*) fail "a longer window still cuts: $out" ;; esac

expect 2 "run.precision: auto -> f64: run/checkpoints/step-00000008 holds weights in f32, and they are not converted; leave the key out" \
  "$moesaic" eval run run.precision=f64
expect 2 "Nearest valid: 3, 6; or micro_batch_size 2, 4 (train.micro_batch_size is set on the command line)" "$moesaic" eval run train.micro_batch_size=3
expect 2 "These keys were changed:
  model.hidden_size: 32 -> 64" "$moesaic" eval run model.hidden_size=64
expect 2 "--tokens: found -1; allowed: a whole number, at least 0" "$moesaic" eval run --tokens -1
expect 2 "--step: found x; allowed: a whole number, at least 0" "$moesaic" generate run --step x
expect 2 "an empty argument after '--data'; is it a shell variable that is not set?" "$moesaic" eval run --data ""
expect 2 "--data a=: expected NAME=PATH, or PATH alone" "$moesaic" eval run --data a=
expect 2 "--choices =quiz.jsonl: expected NAME=PATH" "$moesaic" eval run --choices =quiz.jsonl

refused() { # code, text, line of quiz
  printf '%s\n\n%s\n' '{"context": "a", "choices": ["b", "c"], "answer": 1}' "$3" > bad.jsonl
  expect "$1" "$2" "$moesaic" eval run --choices bad.jsonl
}
refused 3 'bad.jsonl:3:1: not valid JSON' 'x'
refused 3 'bad.jsonl:3:16: not valid JSON' '{"context": "a"'
refused 3 'bad.jsonl:3: no "choices"; expected {"context"' '{"context": "a", "answer": 0}'
refused 3 'bad.jsonl:3: answer: is 2, must be 0 to 1' '{"context": "a", "choices": ["b", "c"], "answer": 2}'
refused 3 'bad.jsonl:3: choice 1: one token with nothing before it' '{"context": "", "choices": ["bb", "c"], "answer": 0}'
refused 3 'bad.jsonl:3: choice 0: 65 tokens, of which the model can predict 64 at once' \
  "{\"context\": \"a\", \"choices\": [\"$(printf '%065d' 0)\", \"c\"], \"answer\": 0}"
refused 3 'bad.jsonl:3: a zero byte' '{"context": "a\u0000", "choices": ["b", "c"], "answer": 0}'
expect 3 "bad.jsonl:3" "$mpirun" -np 2 --oversubscribe --bind-to none "$moesaic" eval run --choices bad.jsonl
expect 3 "nowhere.jsonl" "$moesaic" eval run --choices nowhere.jsonl
expect 3 "nowhere.txt" "$moesaic" eval run --data a=nowhere.txt
expect 3 "no checkpoint of step 5" "$moesaic" eval run --step 5
expect 3 "is not a folder" "$moesaic" eval nowhere
expect 2 "--step 4, but run@8 names step 8" "$moesaic" eval run@8 --step 4
expect 2 "two are named text" "$moesaic" eval run --data text.txt --data text.txt
expect 2 "--details is about --choices" "$moesaic" eval run --details d.jsonl
cp quiz.jsonl kept.jsonl
expect 2 "was not written by --details" "$moesaic" eval run --choices kept.jsonl --details kept.jsonl
cmp quiz.jsonl kept.jsonl || fail "the questions were written over"
expect 4 "nowhere/d.jsonl" "$moesaic" eval run --choices quiz.jsonl --details nowhere/d.jsonl
expect 2 "give --data NAME=PATH or --choices" "$moesaic" eval run 'data.valid=[]' train.eval_every=0
expect 2 "did you mean data.valid" "$moesaic" eval run data.vald=text.txt
expect 2 "does not fit the configuration" "$moesaic" eval run model.moe_intermediate_size=32
run run.dir=plain optimizer.ema_decay=null train.steps=1 train.eval_every=0 optimizer.warmup_steps=0 > log.plain
expect 2 "kept no averages" "$moesaic" eval plain --average
# Token files whose tokenizer nobody named: the loss, without bytes; text beside them is refused.
"$moesaic" data merge tokens text.txt > log.merge
perl -pi -e 's/"tokenizer_hash": *"bytes"/"tokenizer_hash": ""/' tokens.meta.json
run run.dir=unknown data.train=tokens data.valid=tokens > log.unknown
same "$(logged unknown 8)" "$(scored unknown)" "token files"
expect 0 '"bits_per_byte":null' "$moesaic" eval unknown --json
expect 2 "name it with --tokenizer" "$moesaic" eval unknown --data text.txt
expect 2 "name it with --tokenizer" "$moesaic" eval unknown --choices quiz.jsonl
expect 0 "bits/byte" "$moesaic" eval unknown --data text.txt --tokenizer bytes
echo "eval: all checks passed"

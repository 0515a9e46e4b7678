#!/bin/sh
# quickstart.sh MPIRUN MOESAIC SOURCE_DIR WORK_DIR: the quickstart's text and configuration, shortened: after 100 steps the
# held-out loss lies below the text's bigram entropy.
set -eu
mpirun=$1 moesaic=$2 source=$3 work=$4
rm -rf "$work"
mkdir -p "$work"
perl "$source/scripts/prepare_text.pl" "$work/text"
cd "$work"
"$mpirun" -np 2 --oversubscribe --bind-to none "$moesaic" train "$source/configs/quickstart.yaml" run.dir=run data.train=text/train.txt \
  data.valid=text/valid.txt train.steps=100 train.eval_every=0 checkpoint.every=0 log.interval=20 | tee log.txt
# held-out   loss L nats/byte | unigram entropy U (loss is X x) | bigram entropy B (loss is Y x)
awk '/^held-out/ { found = 1; loss = $3; for (i = 1; i <= NF; ++i) { if ($i == "unigram") u = $(i + 2); if ($i == "bigram") b = $(i + 2) }
     if (loss + 0 > 0.75 * u || loss + 0 >= b + 0) { print "FAILED: loss", loss, "unigram", u, "bigram", b; exit 1 } }
     END { if (!found) { print "FAILED: no closing comparison"; exit 1 } }' log.txt
"$moesaic" generate run --prompt "The program is " --max-new-tokens 60
echo "quickstart: passed"

# pipelines.sh MPIRUN MOESAIC WORK_DIR: stages of a pipeline train the same model as one rank, with every schedule, and their
# checkpoints hold the same state.
. "$(dirname "$0")/tiny_run.sh"
sed -i -e 's/num_hidden_layers: 2/num_hidden_layers: 4/' -e 's/kda_layers: \[1\], full_attn_layers: \[2\]/kda_layers: [1, 3], full_attn_layers: [2, 4]/' \
  -e 's/^  residual:.*/&\n  mtp: {num_nextn_predict_layers: 1}/' tiny.yaml
sed -e 's/^  residual:.*/  residual: {type: plain}/' -e '/^  mtp:/d' tiny.yaml > tied.yaml
agree() { # CONFIG LAYOUTS [a.b=c…]
  config=$1 layouts=$2
  shift 2
  "$moesaic" selftest layouts "$config" --ranks 8 --layouts "$layouts" parallel.pp=2 "$@" > table.txt 2>&1 || {
    cat table.txt
    fail "selftest layouts $config $layouts $*"
  }
  tail -n 1 table.txt
}
agree tiny.yaml "pp=2;pp=4" parallel.schedule=gpipe model.mtp.num_nextn_predict_layers=0
agree tiny.yaml "pp=3;pp=2,dp=2;pp=2,dp=2,ep=2"
agree tiny.yaml "pp=2" parallel.schedule=interleaved optimizer.name=adamw train.global_batch_size=6
agree tiny.yaml "pp=3;pp=2,dp=2" parallel.schedule=zero_bubble model.balance.bias_rule=quantile_exact
agree tiny.yaml "pp=2;pp=2,dp=2" parallel.schedule=zero_bubble parallel.chunks=2 "activations.recompute=[full]"
agree tied.yaml "pp=2" model.tie_word_embeddings=true "parallel.layers=[4,0]"
agree tiny.yaml "pp=2" "parallel.layers=[0,4]" train.global_batch_size=1

# Runs: whole, stopped and continued, and read by other layouts.
start() { ranks=$1; shift; "$mpirun" -np "$ranks" --oversubscribe --bind-to none "$moesaic" train tiny.yaml run.precision=f64 "$@"; }
start 4 parallel.pp=2 run.dir=whole > whole.txt 2>&1 || { cat whole.txt; fail "pp 2, dp 2"; }
start 4 parallel.pp=2 run.dir=parts run.max_minutes=0.00001 > parts.txt 2>&1 && { cat parts.txt; fail "no stop"; }
start 4 parallel.pp=2 run.dir=parts --resume=must > parts.txt 2>&1 || { cat parts.txt; fail "no second life"; }
"$moesaic" ckpt diff whole/checkpoints/step-00000008 parts/checkpoints/step-00000008 > diff.txt || { cat diff.txt; fail "not the same bits"; }
"$moesaic" ckpt verify whole/checkpoints/step-00000008 || fail "damaged"
for other in "1" "2 parallel.pp=2 parallel.schedule=interleaved" "3 parallel.pp=3" "2 parallel.ep=2"; do
  # shellcheck disable=SC2086 # several words
  start $other run.dir=other --resume=whole@4 checkpoint.every=1 > other.txt 2>&1 || { cat other.txt; fail "$other from pp 2"; }
  grep -q "step 8/8" other.txt || fail "$other did not finish"
  rm -r other
done
# What evaluation finds is what one rank finds.
"$moesaic" train tiny.yaml run.precision=f64 run.dir=one > one.txt 2>&1 || { cat one.txt; fail "one rank"; }
for run in whole one; do
  "$moesaic" eval $run > $run-eval.txt 2>&1 || { cat $run-eval.txt; fail "eval of $run"; }
done
grep -h "eval" whole.txt one.txt
start 3 parallel.pp=3 parallel.schedule=zero_bubble run.dir=back --resume=one@4 > back.txt 2>&1 || { cat back.txt; fail "pp 3 from one rank"; }
# A stage that has nothing to train in a phase, while another one's gradients are not finite.
start 4 parallel.pp=4 run.dir=frozen "train.phases=[{until: 3, freeze: ['*layers.0*', '*embed*']}, {until: 8}]" debug.inject_nan_step=2 model.mtp.num_nextn_predict_layers=0 > frozen.txt 2>&1 ||
  { cat frozen.txt; fail "a stage without gradients"; }
grep -q '"step":2,.*"skipped":true' frozen/metrics.jsonl || fail "step 2 was not skipped: $(sed -n 2,3p frozen/metrics.jsonl)"
# The vertical order, with activations in host memory, has the bits of the horizontal one.
start 2 parallel.ep=2 run.dir=across > across.txt 2>&1 || { cat across.txt; fail "ep 2"; }
start 2 parallel.ep=2 parallel.order=vertical activations.residual_offload=true "activations.offload=['*']" run.dir=down > down.txt 2>&1 ||
  { cat down.txt; fail "the vertical order"; }
"$moesaic" ckpt diff across/checkpoints/step-00000008 down/checkpoints/step-00000008 > diff.txt || { cat diff.txt; fail "not the bits of the horizontal order"; }
grep -q '"activations_out_bytes":[1-9]' down/metrics.jsonl || fail "nothing was offloaded"
# What was trained so is evaluated and continues texts like any other model.
"$moesaic" eval across > eval.across && "$moesaic" eval down > eval.down || fail "eval of a run in vertical order"
[ "$(grep nats/token eval.across)" = "$(grep nats/token eval.down)" ] || fail "other losses: $(cat eval.across eval.down)"
"$moesaic" generate down --prompt "the" --max-new-tokens 4 > generated || fail "generate from a run in vertical order"
echo "pipelines: all agree"

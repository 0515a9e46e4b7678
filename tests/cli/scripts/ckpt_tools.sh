#!/bin/sh
# ckpt_tools.sh MPIRUN MOESAIC WORK_DIR: ckpt ls, verify, inspect, diff, prune on the checkpoints of a small run.
set -eu
. "${0%/*}/tiny_run.sh"

run checkpoint.every=2 > log.txt
expect 0 "step-00000008" "$moesaic" ckpt ls run
expect 0 '"complete": true' "$moesaic" ckpt ls run --json
case $out in *'"tokens": 2048'*) ;; *) fail "8 steps of 4 x 64 tokens are not 2048: $out" ;; esac
expect 0 "run/checkpoints/step-00000002: every byte is right" "$moesaic" ckpt verify run
expect 0 "step 4" "$moesaic" ckpt inspect run@4
expect 0 "model.embed_tokens.weight" "$moesaic" ckpt inspect run --tensors 'model.embed*'
case $out in *optimizer/*) fail "--tensors let others through: $out" ;; esac
case $out in *"[256, 32]"*32768*) ;; *) fail "no shape and bytes: $out" ;; esac
expect 0 "hidden_size: 32" "$moesaic" ckpt inspect run --config
"$moesaic" ckpt inspect run --json > inspect.json
perl -MJSON::PP -e 'local $/; my $j = decode_json(<>); die "no norm" unless grep { $_->{name} eq "model.embed_tokens.weight" && $_->{norm} > 0 && $_->{not_finite} == 0 } @{$j->{tensors}}' inspect.json ||
  fail "inspect --json"
expect 0 " 0 differ" "$moesaic" ckpt diff run run@8
expect 1 "model.embed_tokens.weight: max |difference|" "$moesaic" ckpt diff run@2 run@4
case $out in *"step: 2 -> 4"*) ;; *) fail "diff does not name the steps: $out" ;; esac
cp -r run copy
expect 0 "would delete run/checkpoints/step-00000006" "$moesaic" ckpt prune run --keep-last 1 --keep-every 4 --dry-run
[ -e run/checkpoints/step-00000006/manifest.json ] || fail "--dry-run deleted"
( flock 9; expect 2 "in use by another run" "$moesaic" ckpt prune run --keep-last 1 ) 9> run/.lock
expect 0 "2 of 4 checkpoints stay" "$moesaic" ckpt prune run --keep-last 1 --keep-every 4
[ "$(ls run/checkpoints | tr '\n' ' ')" = "step-00000004 step-00000008 " ] || fail "other folders are left: $(ls -a run/checkpoints)"
expect 2 "keep-last" "$moesaic" ckpt prune run --keep-last 0
# Damage, one file each: verify and ls name it.
perl -e 'open my $f, "+<", $ARGV[0] or die; seek $f, -9, 2; read $f, my $c, 1; seek $f, -9, 2; print $f chr(ord($c) ^ 1)' copy/checkpoints/step-00000004/model-rank00000.safetensors
rm copy/checkpoints/step-00000006/optimizer-rank00001.safetensors
expect 3 "step-00000004/model-rank00000.safetensors: damaged" "$moesaic" ckpt verify copy
case $out in *"step-00000006/optimizer-rank00001.safetensors: missing"*"step-00000008: every"* | *"step-00000008: every"*"step-00000006/optimizer-rank00001.safetensors: missing"*) ;; *) fail "verify stopped early: $out" ;; esac
expect 0 "NOT COMPLETE" "$moesaic" ckpt ls copy
expect 3 "damaged in tensor" "$moesaic" ckpt diff copy@4 copy@8
expect 3 "is not a folder" "$moesaic" ckpt inspect nowhere
expect 3 "cannot be listed" "$moesaic" ckpt ls nowhere
expect 2 "subcommand" "$moesaic" ckpt
echo "ckpt tools: all checks passed"

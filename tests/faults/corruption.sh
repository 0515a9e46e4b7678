#!/bin/sh
# corruption.sh MPIRUN MOESAIC WORK_DIR: every file of a checkpoint cut, lengthened, changed by a bit, zeroed, swapped, replaced
# or deleted. `ckpt verify`, resuming and `generate` end with 3 and name the file, and the tensor where the damage is in one;
# --fallback then continues from the checkpoint before.
set -eu
. "${0%/*}/same_end.sh"
steps=2
settings="train.steps=2 model.num_experts=2 model.num_experts_per_token=1 checkpoint.every=1 train.eval_every=0 run.dir=run"
"$moesaic" train tiny.yaml $settings > out.txt 2>&1 || fail "the quiet run: $(cat out.txt)"
mv run whole
rm whole/finished # a finished run does not read its checkpoint again
newest=run/$(last_step)
previous=run/checkpoints/step-00000001
damages=0 flips=0

fresh() { rm -rf run && cp -r whole run; }
edit() { # file, perl that changes $_
  perl -0777 -e 'my ($file, $code) = @ARGV; open my $f, "<:raw", $file or die; local $_ = <$f>; my $old = $_; eval $code; die $@ if $@; die "no change" if $_ eq $old;
    open my $o, ">:raw", $file or die; print $o $_; close $o or die' "$1" "$2" || fail "$1: $2 changed nothing"
}
# What must be said of a damaged $1; with $2 = fallback also that the run continues from the checkpoint before.
must_be_found() {
  damages=$((damages + 1))
  expect 3 "$1" "$moesaic" ckpt verify run
  expect 3 "$1" "$moesaic" train tiny.yaml $settings --resume=must
  case $1 in model.safetensors | manifest.json) expect 3 "$1" "$moesaic" generate run --prompt "the " --max-new-tokens 1 ;; esac
  [ "${2:-}" = fallback ] || return 0
  expect 0 "continuing from $previous" "$moesaic" train tiny.yaml $settings --fallback
  same_end run "$1, --fallback"
}
[ -e "whole/$(last_step)/optimizer.safetensors" ] || fail "no files to damage"
for path in whole/"$(last_step)"/*; do
  file=${path##*/}
  header='(8 + unpack "Q<", $_)'
  [ $file != manifest.json ] || header=64
  for size in 0 1 7 8 "$header - 1" 'int(length($_) / 2)' 'length($_) - 1'; do
    fresh
    edit "$newest/$file" "substr(\$_, $size) = ''"
    must_be_found "$file"
  done
  for change in '$_ .= "\0"' 'substr($_, 20, 1) ^= "\1"' 'my $at = int(length($_) / 2); substr($_, $at, 4096) =~ s/./\0/gs'; do
    fresh
    edit "$newest/$file" "$change"
    must_be_found "$file" fallback
  done
  fresh
  cp "$previous/$file" "$newest/$file"
  must_be_found "$file"
  fresh
  rm "$newest/$file"
  if [ $file = manifest.json ]; then # then it is no checkpoint, as after a crash
    expect 0 "continuing from $previous" "$moesaic" train tiny.yaml $settings
    same_end run "deleted manifest"
  else
    must_be_found "$file"
  fi
done
fresh
mv "$newest/model.safetensors" kept && mv "$newest/ema.safetensors" "$newest/model.safetensors" && mv kept "$newest/ema.safetensors"
must_be_found model.safetensors fallback

# One bit in each tensor.
perl -MJSON::PP -0777 -ne 'printf "%s %d %s\n", $_->{file}, $_->{offset} + int($_->{bytes} / 2), $_->{name} for @{decode_json($_)->{tensors}}' "whole/$(last_step)/manifest.json" > tensors.txt
fresh
cp -r "$newest" one
while read -r file at name; do
  edit "one/$file" "substr(\$_, $at, 1) ^= \"\\4\""
  expect 3 "in tensor '$name'" "$moesaic" ckpt verify one
  case $out in *"one/$file: damaged"*) ;; *) fail "$file is not named: $out" ;; esac
  cp "$newest/$file" "one/$file"
  flips=$((flips + 1))
done < tensors.txt
[ $flips -gt 100 ] || fail "only $flips tensors"
expect 0 "every byte is right" "$moesaic" ckpt verify one
echo "corruption: all checks passed ($damages damages of files, $flips flipped bits in tensors)"

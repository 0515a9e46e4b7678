#!/usr/bin/env bash
# bench_overlap.sh CONFIG [a.b=c …]: time of a training step with the experts' exchanges in turn with all other work, beside it, and in
# chunks; and what the exchanges took and what of it was waited for, by rank 0's clock, over all layers, forward and backward.
# Prints a table; medians of the steps after the third. Text to train on is named as for any run (data.train=README.md will do).
#   RANKS=2 scripts/bench_overlap.sh configs/bench/hybrid_5b.yaml data.train=README.md train.global_batch_size=8
#   CHUNKS="1 4"      numbers of chunks to try (1 2 4 8)
#   STEPS=20          of a run (12)
#   METHODS="flat"    exchanges to try (flat dense)
#   MOESAIC=PATH      the program (build_gpu/apps/moesaic, else build/apps/moesaic)
set -euo pipefail
if [ $# -eq 0 ] || [ "$1" = --help ]; then
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
  exit $(($# == 0 ? 2 : 0))
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
program=${MOESAIC:-$here/build_gpu/apps/moesaic}
[ -x "$program" ] || program=$here/build/apps/moesaic
ranks=${RANKS:-2} steps=${STEPS:-12}
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT

# median_line NAME: of the run in $runs/NAME.
median_line() {
  perl -MJSON::PP -e '
    sub median { my @s = sort { $a <=> $b } @_; @s ? $s[@s / 2] : "nan" }
    my ($name, @times, %parts, $loss) = shift;
    while (<>) {
      my $r = decode_json($_);
      next unless exists $r->{step} && $r->{step} > 3;
      if ($r->{type} eq "step") { push @times, $r->{seconds}; $loss = $r->{loss} }
      next unless $r->{type} eq "exchange";
      for my $key (grep { /_(seconds|bytes)$/ } keys %$r) { my $sum = 0; $sum += $_ for @{$r->{$key}}; push @{$parts{$key}}, $sum }
    }
    my $ms = sub { sprintf "%.2f", 1e3 * median(@{$parts{$_[0]} // []}) };
    my @s = sort { $a <=> $b } @times;
    printf "| %s | %.1f (%.1f to %.1f) | %s, %s | %s, %s | %.0f | %.4f |\n", $name, 1e3 * median(@times), 1e3 * $s[0], 1e3 * $s[-1],
      $ms->("dispatch_seconds"), $ms->("dispatch_exposed_seconds"), $ms->("combine_seconds"), $ms->("combine_exposed_seconds"),
      (median(@{$parts{dispatch_bytes} // []}) + median(@{$parts{combine_bytes} // []})) / 1048576, $loss;
  ' "$1" "$runs/$1/metrics.jsonl"
}

# measure NAME ARGUMENT…
number=0
measure() {
  local name=$1
  shift
  mkdir -p "$runs/$name"
  if ! mpirun -np "$ranks" --oversubscribe --bind-to none "$program" train "${arguments[@]}" "$@" run.dir="$runs/$name" parallel.ep="$ranks" \
    train.steps="$steps" optimizer.warmup_steps=2 checkpoint.every=0 checkpoint.save_at_end=false log.detail_every=1 >"$runs/log" 2>&1; then
    tail -n 30 "$runs/log" >&2
    echo "bench_overlap: '$name' failed" >&2
    exit 1
  fi
  if [ "$number" -eq 0 ]; then
    grep -E '^(moesaic|model|device|ranks|layout|tokens)' "$runs/log" || true
    echo
    echo '| `dispatch.` | step, ms (least to most) | dispatch took, waited for, ms | combine took, waited for, ms | MiB sent a step | last loss |'
    echo '| --- | --- | --- | --- | --- | --- |'
  fi
  number=$((number + 1))
  median_line "$name"
}

arguments=("$@")
for method in ${METHODS:-flat dense}; do
  measure "exchange=$method" dispatch.exchange="$method"
  for chunks in ${CHUNKS:-1 2 4 8}; do
    measure "exchange=$method overlap=true chunks=$chunks" dispatch.exchange="$method" dispatch.overlap=true dispatch.chunks="$chunks"
  done
done

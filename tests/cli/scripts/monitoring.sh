#!/bin/sh
# monitoring.sh MPIRUN MOESAIC SOURCE_DIR WORK_DIR: the Prometheus file of a real run against `promtool`, the alert rules
# with their tests, and the dashboard: every metric that a rule, a panel or the documentation names is one that runs write.
set -eu
. "${0%/*}/functions.sh"
source=$3
enter "$1" "$2" "$4"
mkdir textfile
expert_run
names() { # of metrics in the files
  grep -ho 'moesaic_[a-z][a-z_]*' "$@" | sort -u
}
ranks 2 parallel.ep=2 dispatch.buffer_factor=1 log.prometheus=textfile log.peak_tflops=0.01 log.detail_every=2 model.mtp.num_nextn_predict_layers=1 > log.txt || fail "$(cat log.txt)"
prom=textfile/moesaic_run.prom
[ "$(ls textfile)" = moesaic_run.prom ] || fail "other files beside the metrics: $(ls textfile)"
[ "$(tail -c 1 $prom | od -An -tx1 | tr -d ' ')" = 0a ] || fail "no newline at the end"
grep '^# TYPE' $prom | awk '{ print $3 }' | sort -u > written.txt
# Some need more: a GPU, a blend of several sources, offloaded experts.
printf '%s\n' moesaic_device_memory_bytes moesaic_data_ratio moesaic_offload_hit_ratio moesaic_offload_bytes \
  moesaic_offload_host_wait_seconds moesaic_offload_replays moesaic_offload_steps_replayed >> written.txt
sort -u -o written.txt written.txt
for file in dashboard.json alerts.yml; do
  names "$source/docs/monitoring/$file" > used.txt
  [ "$(wc -l < used.txt)" -ge 10 ] || fail "$file names few metrics"
  unknown=$(comm -13 written.txt used.txt)
  [ -z "$unknown" ] || fail "$file uses what no run writes: $unknown"
done
names "$source/docs/monitoring.md" > used.txt
[ "$(comm -3 written.txt used.txt)" = "" ] || fail "docs/monitoring.md and the metrics differ: $(comm -3 written.txt used.txt)"
perl -MJSON::PP -e 'local $/; my $d = decode_json(<>); my ($n, %id);
  for my $p (@{$d->{panels}}) { die "two panels $p->{id}\n" if $id{$p->{id}}++; next if $p->{type} eq "row"; $n++;
    die "$p->{title}: no expression\n" unless @{$p->{targets}}; $_->{expr} =~ /\{run=~"\$run"\}/ or die "$p->{title}: all runs\n" for @{$p->{targets}} }
  die "few panels\n" if $n < 15' "$source/docs/monitoring/dashboard.json" || fail "dashboard.json"
if ! command -v promtool > /dev/null; then
  echo "SKIPPED: names were compared, but promtool (package prometheus) is not here to check the formats"
  exit 0
fi
promtool check metrics < $prom || fail "promtool check metrics"
promtool check rules "$source/docs/monitoring/alerts.yml"
(cd "$source/docs/monitoring" && promtool test rules alerts_test.yml)
echo "monitoring: all checks passed"

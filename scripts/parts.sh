# Sourced by the scripts that check a GPU machine: runs parts side by side, each with a time limit and a log, and closes with a
# table.
# The logs are in the folder LOGS, which stays, or in one that goes at the end.
#   start NAME LIMIT_S COMMAND…     in the background; the output goes to $logs/NAME.log
#   alone NAME LIMIT_S COMMAND…     waits for all that runs, then runs with nothing beside it and shows its output
#   succeeded NAME                  whether a part that has ended did
#   finish                          waits, prints the logs of what failed and the table; status 1 if anything failed
if [ -n "${LOGS:-}" ]; then
  logs=$LOGS
  mkdir -p "$logs"
else
  logs=$(mktemp -d)
  trap 'rm -rf "$logs"' EXIT
fi
part_names=()
script_start=$SECONDS

run_part() {
  local name=$1 limit=$2 start=$SECONDS status=0
  shift 2
  timeout -k 10 "$limit" "$@" || status=$?
  echo "$status $((SECONDS - start)) $limit" >"$logs/$name.end"
}

start() {
  part_names+=("$1")
  run_part "$@" >"$logs/$1.log" 2>&1 &
}

alone() {
  wait
  part_names+=("$1")
  run_part "$@" 2>&1 | tee "$logs/$1.log"
}

succeeded() {
  [ "$(cut -d ' ' -f 1 "$logs/$1.end")" = 0 ]
}

finish() {
  wait
  local name status seconds limit verdict failed=0
  for name in "${part_names[@]}"; do
    read -r status seconds limit <"$logs/$name.end"
    if [ "$status" -ne 0 ]; then
      printf '\n== %s: last lines of its output\n' "$name"
      tail -n 60 "$logs/$name.log"
    fi
  done
  printf '\n%-34s %9s  %s\n' part seconds result
  for name in "${part_names[@]}"; do
    read -r status seconds limit <"$logs/$name.end"
    case $status in
      0) verdict=passed ;;
      124 | 137) verdict="FAILED: not done within $limit s" ;;
      *) verdict="FAILED: status $status" ;;
    esac
    if grep -q '^SKIPPED:' "$logs/$name.log"; then verdict="$verdict, with parts skipped"; fi
    [ "$status" -eq 0 ] || failed=1
    printf '%-34s %9s  %s\n' "$name" "$seconds" "$verdict"
  done
  printf '%-34s %9s\n' total "$((SECONDS - script_start))"
  return $failed
}

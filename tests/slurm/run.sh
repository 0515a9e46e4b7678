#!/usr/bin/env bash
# run.sh MOESAIC SOURCE_DIR WORK_DIR: the batch scripts of scripts/slurm on a real Slurm of one node, from the distribution's
# packages. Each job hears its time limit's signal, saves, comes back (by requeue, or as the next element of the array) and
# must end with the same bytes as a run that nobody disturbed. Then launches that Slurm and MPI do not agree on.
#
# For speed: a requeued job may start after 9 s instead of 2 minutes (cred_expire), and the jobs are submitted shortly before
# slurmctld looks at time limits. Nothing else is helped along.
# Needs root and the packages munge, slurmctld, slurmd and slurm-client; without them the test is skipped, or fails when
# MOESAIC_REQUIRE_SLURM=1.
set -u
[ $# -eq 3 ] || { echo "usage: $0 MOESAIC SOURCE_DIR WORK_DIR"; exit 2; }
moesaic=$1 source=$2 work=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/slurm/cluster.sh
source "$here/cluster.sh"
PATH=$PATH:/usr/sbin

skip() {
  [ "${MOESAIC_REQUIRE_SLURM:-0}" != 1 ] || { echo "FAILED: MOESAIC_REQUIRE_SLURM=1, but $1"; exit 1; }
  echo "SKIPPED: slurm: $1"
  exit 0
}
[ "$(id -u)" -eq 0 ] || skip "only root can start a Slurm"
for tool in munged slurmctld slurmd sbatch srun perl; do
  command -v "$tool" > /dev/null || skip "$tool is not installed (apt-get install munge slurmctld slurmd slurm-client)"
done

# A hybrid model, and as many steps as take some ten seconds: longer than until the signal.
scripts=$source/tests/cli/scripts
# shellcheck disable=SC1091  # sets the folder, text.txt and tiny.yaml
source "$scripts/tiny_run.sh" mpirun "$moesaic" "$work"
cluster=
finish() {
  stop_cluster
  [ -z "$cluster" ] || rm -rf "$cluster"
}
trap finish EXIT
trap 'exit 1' INT TERM
fail() {
  echo "FAILED: $*"
  squeue -l 2>/dev/null
  tail -n 40 ./*.log
  tail -n 20 "$cluster/slurmctld.log" "$cluster/slurmd.log"
  exit 1
}

steps=3000
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OPENBLAS_NUM_THREADS=1
export MOESAIC=$moesaic MPIRUN_ARGS=--oversubscribe MPIRUN_MAPPING='--bind-to none'
settings=(train.steps="$steps" train.eval_every=0 train.eval_batches=1 checkpoint.every=0 log.interval=500)

cluster=$(mktemp -d "${TMPDIR:-/tmp}/slurm.XXXXXX") # short: sockets have names of at most 107 bytes
start_cluster "$cluster" || fail "no cluster"
unset -v "${!OMPI_COMM@}" "${!PMIX@}" 2>/dev/null
echo "cluster    $(slurmctld -V), up after $SECONDS s"

mpirun -np 2 --oversubscribe --bind-to none "$moesaic" train tiny.yaml run.dir=quiet "${settings[@]}" > quiet.log 2>&1 ||
  fail "the undisturbed run"
echo "quiet run  done after $SECONDS s"

# The signal is due at the first look at limits.
submit() { # NAME SCRIPT signal option…
  local name=$1 script=$2 signal=$3
  shift 3
  sbatch --parsable --job-name="$name" --ntasks-per-node=2 --time=1 --signal="$signal" "$@" \
    "$source/scripts/slurm/$script" tiny.yaml run.dir="$name" "${settings[@]}"
}
wait_for_limit_check 7
a=$(submit mpirun train.sbatch B:USR1@60 --output=mpirun.log) || fail "sbatch train.sbatch"
b=$(submit srun train_srun.sbatch USR1@60 --output=srun.log) || fail "sbatch train_srun.sbatch"
c=$(submit array train_array.sbatch B:USR1@60 --array=0-3%1 --output=array_%a.log) || fail "sbatch train_array.sbatch"
echo "submitted  jobs $a $b $c after $SECONDS s"

wait_until 200 nothing_is_queued || fail "the jobs are not done"
echo "jobs done  after $SECONDS s"

job_field() { # JOB FIELD
  scontrol -o show job "$1" | grep -o " $2=[^ ]*" | head -n 1 | cut -d= -f2
}
# Steps and losses, without the times.
losses() {
  grep -o '"type":"step","step":[0-9]*,"loss":[^,]*' "$1/metrics.jsonl"
}
check_run() { # NAME LOG…
  local name=$1
  shift
  cat "$@" > "$name.all"
  grep -q "^stopped .*exit code 75" "$name.all" || fail "$name: no life was stopped by the signal"
  grep -q "^stopped .*SIGUSR1" "$name.all" || fail "$name: it was not the signal that stopped it"
  grep -q "^continuing from" "$name.all" || fail "$name: no life continued"
  grep -q "^finished  *step $steps of $steps" "$name.all" || fail "$name: not finished"
  for file in "quiet/checkpoints/step-0000$steps"/*.safetensors; do
    cmp "$file" "$name/checkpoints/step-0000$steps/${file##*/}" || fail "$name: ${file##*/} differs"
  done
  [ "$(losses quiet | wc -l)" -eq "$steps" ] || fail "quiet: $(losses quiet | wc -l) steps in metrics.jsonl"
  [ "$(losses quiet)" = "$(losses "$name")" ] || fail "$name: other losses, or another number of steps"
  echo "$name: $(grep -c '^stopped' "$name.all") stop(s), the same bytes and losses as the undisturbed run"
}
check_run mpirun mpirun.log
check_run srun srun.log
check_run array array_*.log
for job in "$a" "$b"; do
  [ "$(job_field "$job" Restarts)" -ge 1 ] || fail "job $job was not requeued"
  [ "$(job_field "$job" JobState)" = COMPLETED ] || fail "job $job ended as $(job_field "$job" JobState)"
done
for text in "queueing job $a again" "life 2"; do grep -q "$text" mpirun.log || fail "mpirun: no '$text' in the log"; done
for text in "queueing job $b again" "life 2"; do grep -q "$text" srun.log || fail "srun: no '$text' in the log"; done
grep -q "the next element continues" array_0.log || fail "array: the first element did not leave the rest"
for i in 0 1 2 3; do
  [ "$(job_field "${c}_$i" JobState)" = COMPLETED ] || fail "array: element $i ended as $(job_field "${c}_$i" JobState)"
done

grep -q "was done before, nothing is left to do" array_3.log || fail "array: the last element did more than leave: $(cat array_3.log)"

# An element of a chain that can only fail ends the chain; a job that has come back too often ends, too.
broken=$(sbatch --parsable -n 2 --array=0-3%1 --output=broken_%a.log "$source/scripts/slurm/train_array.sbatch" \
  tiny.yaml model.hidden_sise=3)
often=$(MAX_REQUEUES=0 sbatch --parsable -n 2 --output=often.log "$source/scripts/slurm/train.sbatch" \
  tiny.yaml run.dir=often run.max_minutes=0.00001)
alone=$(sbatch --parsable -n 2 --output=alone.log --wrap "$moesaic train tiny.yaml run.dir=alone")

# What ranks see of a machine with two GPUs when the job asks for one per task. mpirun starts its daemons on further nodes with
# srun, as the stand-in does here.
cat > see.sh <<'SEE'
#!/bin/sh
echo "rank sees ${CUDA_VISIBLE_DEVICES:-nothing}"
SEE
cat > daemon.sh <<'DAEMON'
#!/bin/sh
exec srun --ntasks=1 --nodes=1 "$PWD/see.sh"
DAEMON
chmod +x see.sh daemon.sh
MOESAIC=$PWD/see.sh sbatch --parsable -n 2 --gpus-per-task=1 --output=gpus_srun.log "$source/scripts/slurm/train_srun.sbatch" x > /dev/null
for script in train train_array; do
  MPIRUN=$PWD/daemon.sh sbatch --parsable -n 2 --array=0 --gpus-per-task=1 --gpu-bind=single:1 --output=gpus_$script.log \
    "$source/scripts/slurm/$script.sbatch" x > /dev/null
done

# Launches that do not fit are refused, by one process, with exit code 2; those that do are not.
refused() { # TEXT command…
  local text=$1 out code
  shift
  out=$("$@" 2>&1)
  code=$?
  [ "$code" -eq 2 ] || fail "exit $code instead of 2 from: $*: $out"
  [ "$(grep -c "$text" <<< "$out")" -eq 1 ] || fail "'$text' is not once in the output of: $*: $out"
}
refused "srun started this process as one of 2, without PMIx" srun --mpi=none -n 2 "$moesaic" train tiny.yaml run.dir=none
[ ! -e none ] || fail "a refused launch left a run folder"
salloc -n 2 mpirun -np 1 "$moesaic" train tiny.yaml run.dir=one > one.log 2>&1 || fail "mpirun -np 1 in an allocation of two"
salloc -n 1 "$moesaic" train tiny.yaml run.dir=bare > bare.log 2>&1 || fail "no launcher in an allocation of one"
srun --mpi=none -n 2 "$moesaic" plan tiny.yaml > plan.log 2>&1 || fail "plan needs no ranks"
wait_until 30 nothing_is_queued || fail "the last jobs are not done"
[ "$(job_field "${broken}_0" ExitCode)" = 2:0 ] || fail "broken: exit $(job_field "${broken}_0" ExitCode)"
[ ! -e broken_1.log ] || fail "broken: the chain went on after a wrong configuration"
[ "$(job_field "$often" ExitCode)" = 75:0 ] || fail "often: exit $(job_field "$often" ExitCode)"
[ "$(job_field "$alone" ExitCode)" = 2:0 ] || fail "alone: exit $(job_field "$alone" ExitCode)"
grep -q "inside a Slurm allocation for 2 tasks" alone.log || fail "alone: not explained"

for gpu in 0 1; do [ "$(grep -c "^rank sees $gpu$" gpus_srun.log)" -eq 1 ] || fail "srun: no rank has GPU $gpu: $(cat gpus_srun.log)"; done
for script in train train_array; do grep -q "^rank sees 0,1$" gpus_$script.log || fail "$script: $(cat gpus_$script.log)"; done

folder=$SLURM_CONF
stop_cluster
SLURM_CONF=$folder
left=$(cluster_processes)
unset SLURM_CONF
[ -z "$left" ] || fail "processes left: $left"
echo "slurm: all checks passed after $SECONDS s"

# shellcheck shell=bash
# A Slurm of one node for tests, sourced by run.sh: munge, slurmctld and slurmd of the distribution, started as root,
# with every file in one folder and on ports of their own, so that a Slurm of the machine is not touched.
#   start_cluster FOLDER    returns when the node takes jobs; exports SLURM_CONF
#   wait_for_limit_check S  returns S seconds before slurmctld looks at time limits, which it does every 30 s from its start
#   stop_cluster            ends the daemons and whatever their jobs left; safe to call at any time

cluster_pids=()
slurmctld_start=0

# A free TCP port in the range where the system itself opens none.
free_port() {
  perl -MIO::Socket::INET -e '
    for my $port (map { 20000 + int rand 10000 } 1 .. 200) {
      my $s = IO::Socket::INET->new(LocalPort => $port, Listen => 1, ReuseAddr => 1) or next;
      print $port; exit 0 }
    exit 1'
}

write_slurm_conf() { # FOLDER
  local dir=$1 host
  host=$(hostname -s)
  # CPUs are made up, so that three jobs run side by side on two cores; cred_expire is also the time that a requeued
  # job waits before it may start again (120 s by default).
  cat > "$dir/slurm.conf" <<CONF
ClusterName=moesaic
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket,cred_expire=8
CryptoType=crypto/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,batch_sched_delay=0
MpiDefault=pmix
JobRequeue=1
ReturnToService=2
KillWait=2
MinJobAge=600
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 Gres=gpu:2 State=UNKNOWN
PartitionName=test Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
  # Two GPUs for Slurm to hand out: it wants devices, looks at nothing but their names, and sets CUDA_VISIBLE_DEVICES.
  printf 'Name=gpu File=%s\n' /dev/null /dev/zero > "$dir/gres.conf"
}

# Waits until a command succeeds.
wait_until() { # SECONDS command…
  local until=$((SECONDS + $1))
  shift
  until "$@"; do
    [ "$SECONDS" -lt "$until" ] || return 1
    sleep 0.2
  done
}

node_is_idle() {
  [ "$(sinfo -h -o %T 2>/dev/null)" = idle ]
}

start_cluster() { # FOLDER
  local dir=$1
  mkdir -p "$dir/state" "$dir/spool"
  chmod 755 "$dir"
  write_slurm_conf "$dir"
  export SLURM_CONF=$dir/slurm.conf
  dd if=/dev/urandom of="$dir/munge.key" bs=128 count=1 status=none
  chmod 600 "$dir/munge.key"
  munged --foreground --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/munged.pid" \
    --seed-file="$dir/munge.seed" --log-file="$dir/munged.log" --num-threads=2 2> "$dir/munged.err" &
  cluster_pids+=($!)
  wait_until 10 test -S "$dir/munge.socket" || { echo "munged did not start"; cat "$dir"/munged.*; return 1; }
  slurmctld -D -c > "$dir/slurmctld.out" 2>&1 &
  cluster_pids+=($!)
  slurmctld_start=$SECONDS
  slurmd -D > "$dir/slurmd.out" 2>&1 &
  cluster_pids+=($!)
  wait_until 30 node_is_idle || { echo "the node did not come up"; tail "$dir/slurmctld.log" "$dir/slurmd.log"; return 1; }
}

wait_for_limit_check() { # SECONDS
  local now=$(((SECONDS - slurmctld_start) % 30)) at=$((30 - $1))
  sleep $(((at - now + 30) % 30))
}

# Processes of this cluster: daemons, job steps and their jobs all know its slurm.conf. This shell exported it after its own
# start, so it is not among them.
cluster_processes() {
  local environment
  for environment in /proc/[0-9]*/environ; do
    if env -u SLURM_CONF grep -qsxzF "SLURM_CONF=$SLURM_CONF" "$environment"; then
      environment=${environment#/proc/}
      echo "${environment%/environ}"
    fi
  done
}

nothing_is_queued() {
  [ -z "$(timeout 5 squeue -h -o %i 2>/dev/null)" ]
}

has_no_processes() {
  [ -z "$(cluster_processes)" ]
}

stop_cluster() {
  local pid
  [ -n "${SLURM_CONF:-}" ] || return 0
  timeout 5 scancel --user=root --quiet 2>/dev/null
  wait_until 5 nothing_is_queued
  for pid in "${cluster_pids[@]}" $(cluster_processes); do kill "$pid" 2>/dev/null; done
  if ! wait_until 8 has_no_processes; then
    for pid in $(cluster_processes); do kill -KILL "$pid" 2>/dev/null; done
  fi
  wait "${cluster_pids[@]}" 2>/dev/null
  cluster_pids=()
  unset SLURM_CONF
}

#!/bin/bash
# A cluster on one machine: network namespaces as nodes, with shaped links between them, and a program started on all of
# them by Open MPI's own mpirun. Ranks of one node talk through shared memory, ranks of different nodes through TCP over the
# links. To try what depends on nodes (bench a2a, training over several "machines"). Needs root and iproute2.
#
#   scripts/lab.sh [-n NODES] [-p RANKS_PER_NODE] [-r MBIT] [-t SECONDS] -- PROGRAM ARGUMENT…
#
#   -n  nodes (4)                      -r  rate of every node's link each way in Mbit/s, 0 = not shaped (200)
#   -p  ranks of a node (2)            -t  mpirun is stopped after so many seconds (120)
#
# MPI_EXTRA in the environment: further options of mpirun. Exit code: mpirun's; 77 when this machine cannot (said why).
# Addresses are 10.77.0.1 … NODES, inside the lab's own namespaces only; nothing is left behind.
#
# Example: scripts/lab.sh -n 4 -p 2 -- build/apps/moesaic bench a2a
set -u

# Called by mpirun as its remote shell: HOST COMMAND…. Enters the node's network, takes a host name of its own (else Open MPI
# takes all nodes for one machine) and runs the command through a shell, as ssh does.
if [ "${LAB_PREFIX:-}" ] && [ "${1:-}" != -- ] && [ -e "/run/netns/${LAB_PREFIX}-${1:-}" ]; then
  host=$1
  shift
  lab_command=$*
  export host lab_command
  exec nsenter --net="/run/netns/$LAB_PREFIX-$host" \
    unshare --uts /bin/sh -c 'hostname "$host"; exec /bin/sh -c "$lab_command"'
fi

nodes=4 ranks=2 rate=200 limit=120
while getopts "n:p:r:t:" option; do
  case $option in
    n) nodes=$OPTARG ;;
    p) ranks=$OPTARG ;;
    r) rate=$OPTARG ;;
    t) limit=$OPTARG ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || { echo "lab.sh: no program given (scripts/lab.sh [options] -- PROGRAM …)" >&2; exit 2; }

cannot() {
  echo "lab.sh: $1" >&2
  exit 77
}
[ "$(id -u)" = 0 ] || cannot "only root may make network namespaces"
for tool in ip tc nsenter unshare hostname mpirun; do
  command -v "$tool" > /dev/null || cannot "no $tool here"
done

self=$(readlink -f "$0")
LAB_PREFIX=lab$$
export LAB_PREFIX
switch=$LAB_PREFIX-switch
files=$(mktemp -d)

cleanup() {
  trap - EXIT INT TERM
  for name in "$switch" $(seq -f "$LAB_PREFIX-n%g" 0 $((nodes - 1))); do
    [ -e "/run/netns/$name" ] || continue
    for signal in TERM KILL; do  # what still runs inside the lab
      left=$(ip netns pids "$name" 2> /dev/null)
      [ -z "$left" ] && break
      kill -$signal $left 2> /dev/null
      sleep 0.2
    done
    ip netns del "$name"
  done
  rm -rf "$files"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

ip netns add "$switch" 2> /dev/null || cannot "this machine does not allow network namespaces"
ip -n "$switch" link set lo up
ip -n "$switch" link add br0 type bridge || cannot "no bridges here"
ip -n "$switch" link set br0 up
hosts=
for i in $(seq 0 $((nodes - 1))); do
  node=$LAB_PREFIX-n$i
  ip netns add "$node" || exit 1
  ip -n "$node" link set lo up
  ip -n "$switch" link add "p$i" type veth peer name eth0 netns "$node" || cannot "no veth pairs here"
  ip -n "$switch" link set "p$i" master br0 up
  ip -n "$node" link set eth0 up
  ip -n "$node" addr add "10.77.0.$((i + 1))/24" dev eth0
  if [ "$rate" != 0 ]; then  # what the node sends, and what it gets
    ip netns exec "$node" tc qdisc add dev eth0 root tbf rate "${rate}mbit" burst 64kb latency 100ms &&
      ip netns exec "$switch" tc qdisc add dev "p$i" root tbf rate "${rate}mbit" burst 64kb latency 100ms ||
      cannot "links cannot be shaped here (tc qdisc tbf)"
  fi
  hosts="$hosts${hosts:+,}n$i:$ranks"
done
sleep 0.5

# mpirun runs on node 0, and starts its daemons on the others through this script. Killed ranks would leave segments of shared
# memory; here they go with the lab.
"$self" n0 timeout -k 5 "$limit" mpirun --allow-run-as-root \
  --prefix "$(dirname "$(dirname "$(command -v mpirun)")")" -H "$hosts" \
  -np $((nodes * ranks)) --map-by slot --bind-to none \
  --mca plm rsh --mca plm_rsh_agent "$self" --mca plm_rsh_no_tree_spawn 1 \
  --mca pml ob1 --mca btl self,vader,tcp \
  --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24 \
  --mca orte_keep_fqdn_hostnames 1 --mca mpi_yield_when_idle 1 \
  --mca orte_tmpdir_base "$files" --mca btl_vader_backing_directory "$files" \
  -x OPENBLAS_NUM_THREADS=1 ${MPI_EXTRA:-} "$@"

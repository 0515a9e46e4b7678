#!/bin/sh
# rank_agreement.sh MPIRUN MOESAIC WORK_DIR: two ranks in two folders, as on machines without shared storage. With equal files they
# train if rank 0 writes all; with another configuration, another command, other data, or a checkpoint that one of them lacks the run ends before its
# first step and says which rank has what.
set -e
. "$(dirname "$0")/tiny_run.sh"

for rank in a b; do mkdir $rank; cp text.txt tiny.yaml $rank; done
# both: with the same arguments; what stands behind -- is for the second rank alone.
both() {
  all=
  while [ $# -gt 0 ] && [ "$1" != -- ]; do all="$all $1"; shift; done
  [ $# -eq 0 ] || shift
  # shellcheck disable=SC2086
  "$mpirun" --oversubscribe --bind-to none -np 1 -wdir "$work/a" "$moesaic" train tiny.yaml $all : \
    -np 1 -wdir "$work/b" "$moesaic" train tiny.yaml $all "$@"
}

# What has no ranks to share its work is done once.
expect 0 "runs in one process: rank 0 of 2 does it (OMPI_COMM_WORLD_SIZE=2" "$mpirun" -np 2 --oversubscribe "$moesaic" plan tiny.yaml
[ "$(echo "$out" | grep -c 'no problems found')" = 1 ] || fail "two plans: $out"
expect 2 "is not the folder that rank 0 writes to; every rank writes its part of a checkpoint there" both run.dir=other
rm -r a/other
expect 0 "finished   step 8 of 8" both parallel.zero=0
[ ! -e b/run ] || fail "rank 1 wrote files"
rm a/run/finished # what is done is said before anything is looked at
expect 2 "there is no run/checkpoints/step-00000008, which rank 0 has; run.dir" both parallel.zero=0 --resume=must
expect 2 "optimizer.lr is 0.001, 0.003 on rank 0; all ranks need the same configuration" both run.dir=other -- optimizer.lr=1e-3
expect 2 "rank 1 on" both run.dir=other -- run.seed=2
expect 2 "resume is never, auto on rank 0" both run.dir=other -- --resume=never
[ ! -e a/other ] || fail "a refused run left a folder"

# Another length, and the same length with another word.
head -40 text.txt > b/text.txt
expect 2 "text.txt holds" both run.dir=other
expect 2 "every rank must see the same files" both run.dir=other
sed '1s/^..../dogs/' text.txt > b/text.txt
expect 2 "every rank must see the same files" both run.dir=other
rm b/text.txt
expect 3 "rank 1 ends the job with code 3: text.txt: cannot open" both run.dir=other
echo "ranks that disagree are told apart"

#!/usr/bin/env bash
# From a fresh machine to a trained small model: installs packages, builds, prepares English text,
# trains configs/quickstart.yaml on two ranks (about three minutes on two cores), writes a sample.
#   scripts/quickstart.sh [OVERRIDE…]        e.g. train.steps=50
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
say() { printf '\n== %s\n' "$*"; }

say "packages"
scripts/install_packages.sh
say "build"
BUILD_TARGET=moesaic scripts/build.sh
moesaic=${BUILD_DIR:-build}/apps/moesaic

say "text"
if [ -s data/quickstart/train.txt ] && [ -s data/quickstart/valid.txt ]; then
  wc -c data/quickstart/train.txt data/quickstart/valid.txt
else
  scripts/prepare_text.pl data/quickstart
fi

run=runs/quickstart
if [ -e "$run" ]; then run=runs/quickstart-$(date +%Y%m%d-%H%M%S); fi

say "training into $run"
# One rank = one core = one BLAS thread. Binding fails in some containers and two ranks do not need it.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OPENBLAS_NUM_THREADS=1
mpirun -np 2 --oversubscribe --bind-to none "$moesaic" train configs/quickstart.yaml "run.dir=$run" "$@"

say "a sample"
"$moesaic" generate "$run" --prompt "You can use " --max-new-tokens 200 --temperature 0.7

say "what to try next"
cat <<NEXT
  $moesaic generate $run --prompt "It is not " --max-new-tokens 400
  $moesaic explain model.num_experts
  $moesaic plan configs/kimi_k3.yaml
  mpirun -np 2 --bind-to none $moesaic resume $run train.steps=1000       # goes on from the last checkpoint
  your own text (plain text; a line with a form feed separates documents):
  export OPENBLAS_NUM_THREADS=1       # as root also: OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  mpirun -np 2 --bind-to none $moesaic train configs/quickstart.yaml run.dir=runs/mine data.train=my_train.txt data.valid=my_valid.txt
NEXT

# Sourced by the scripts beside it, with MPIRUN MOESAIC WORK_DIR as $1 $2 $3: the functions, and a fresh WORK_DIR to be in with
# text.txt and tiny.yaml, a hybrid model that trains 8 steps in a moment. Elsewhere $scripts names the folder of this file.
. "${scripts:-${0%/*}}/functions.sh"
enter "$1" "$2" "$3"
tiny_run

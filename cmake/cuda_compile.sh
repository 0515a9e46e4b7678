#!/bin/sh
# cuda_compile.sh COMPILER ARGUMENT… -o OBJECT: launches the CUDA compiler (through ccache, which repeats what the compiler
# said) and reads the assembler's report. Whatever would quietly cost a kernel its speed is an error: products of a
# warpgroup run one after another (C7510, C7511), an ignored setmaxnreg (C7508); and where the report has the kernels'
# resources (-Xptxas=-v, the flag of the hot ones), a spill or any other use of local memory. Those reports stay beside the
# objects, as OBJECT.ptxas.
object='' previous=''
for argument; do
  [ "$previous" != -o ] || object=$argument
  previous=$argument
done
said=$(mktemp)
trap 'rm -f "$said"' EXIT
"$@" 2>"$said"
status=$?
grep -v -e '^ptxas info  *: [^(]' -e ' bytes stack frame' "$said" >&2
[ $status -eq 0 ] && [ -n "$object" ] || exit $status
if grep -q ' bytes stack frame' "$said"; then cp "$said" "$object.ptxas"; fi
bad=$(awk '
  /Potential Performance Loss/ { print }
  /Function properties for/ { name = $NF }
  / bytes stack frame/ && ($1 != 0 || $5 != 0 || $9 != 0) {
    print name ": local memory, where registers belong (" $1 " bytes of stack, " $5 + $9 " bytes spilled)"
  }' "$said")
[ -n "$bad" ] || exit 0
rm -f "$object"
printf 'error: slow code of %s:\n%s\n' "$object" "$bad" >&2
exit 1

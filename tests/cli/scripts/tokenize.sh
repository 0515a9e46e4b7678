#!/bin/sh
# tokenize.sh MPIRUN MOESAIC WORK_DIR SOURCE_DIR: from text to tokens to a trained run to text again with a tokenizer.json;
# what is refused, and that memory does not grow with the number of documents.
set -eu
. "${0%/*}/tiny_run.sh"
files=$4/tests/tokenizer/files
"$moesaic" data tokenize --help > /dev/null
case $("$moesaic" data tokenize text.txt --tokenizer "$files/tokenizer.json" --out probe 2>&1 || true) in
  *"byte-level tokenizer only"*)
    echo "SKIPPED: tokenizers of words: this build has no PCRE2 and utf8proc"
    exit 0 ;;
esac
tokenize() { "$moesaic" data tokenize "$@"; }

# Any number of threads, a file or a pipe, text or JSONL: the same files.
tokenize text.txt --tokenizer "$files/tokenizer.json" --out tokens/a --threads 1 > log.txt
grep -q 'documents end with <|endoftext|> (341)' log.txt || fail "the end of documents is not shown: $(cat log.txt)"
grep -q 'documents  40 from 1 file(s)' log.txt || fail "not 40 documents: $(cat log.txt)"
tokenize - --tokenizer "$files" --out tokens/b --threads 3 < text.txt > log.txt
perl -0777 -ne 'for (split /^\f\n/m) { s/\n/\\n/g; print "{\"id\": 1, \"body\": \"$_\"}\n" }' text.txt > text.jsonl
tokenize text.jsonl --json-key body --tokenizer "$files" --out tokens/c > log.txt
for other in b c; do
  cmp tokens/a.bin "tokens/$other.bin" && cmp tokens/a.idx "tokens/$other.idx" || fail "tokens/$other differs"
done
tokenize text.txt --tokenizer "$files/ranks" --out tokens/ranks --no-append-eod > log.txt
grep -q 'no token ends documents' log.txt || fail "--no-append-eod: $(cat log.txt)"

# What is wrong is said, and leaves nothing behind.
expect 3 "text.jsonl:1: has no member \"text\"; there are: id body (--json-key)" tokenize text.jsonl --tokenizer bytes --out tokens/x
printf 'fine\n\f\nb\377d\n' > invalid.txt
expect 3 "invalid.txt:3: the document that begins here is not valid UTF-8" tokenize invalid.txt --tokenizer "$files" --out tokens/x --invalid-utf8 refuse
expect 0 "invalid UTF-8 in 1 places became U+FFFD, first in the document at invalid.txt:3" tokenize invalid.txt --tokenizer "$files" --out tokens/invalid
expect 3 "text.txt:1: this document has more than 100 bytes" tokenize text.txt --tokenizer "$files" --out tokens/x --max-document 100
expect 2 "--eod-token \"<none>\" is none of its tokens" tokenize text.txt --tokenizer "$files" --out tokens/x --eod-token "<none>"
expect 2 "already exists" tokenize text.txt --tokenizer "$files" --out tokens/a
expect 3 "no such tokenizer" tokenize text.txt --tokenizer nowhere.json --out tokens/x
sed 's/"NFC"/"NFKC"/' "$files/tokenizer.json" > other.json
expect 3 "other.json: normalizer.type: the normalizer NFKC is not implemented" tokenize text.txt --tokenizer other.json --out tokens/x
[ -z "$(find tokens -name 'x*' -o -name '*.tmp')" ] || fail "something was left behind: $(ls tokens)"

# A million tiny documents: 50 MB of documents and their lengths, with less than that for text (libraries are not counted).
perl -e 'print "{\"text\": \"tiny document $_\"}\n" for 1 .. 1_000_000' > tiny.jsonl
(ulimit -d 900000; tokenize tiny.jsonl --tokenizer "$files" --out tokens/tiny --threads 2 > log.txt) || fail "memory grows with documents"
grep -q 'documents  1,000,000' log.txt || fail "documents are missing: $(cat log.txt)"

# A run keeps its tokenizer.
cp "$files/tokenizer.json" mine.json
own="data.train=tokens/a data.valid=tokens/a data.tokenizer=mine.json model.vocab_size=352"
expect 2 "model.vocab_size is 256, and must be at least 343" run data.train=text.txt data.valid=text.txt data.tokenizer=mine.json
expect 2 "text, which is read byte by byte" run data.tokenizer=mine.json model.vocab_size=352
expect 2 "was made with" run data.train=tokens/ranks data.valid=tokens/ranks data.tokenizer=mine.json model.vocab_size=352
# shellcheck disable=SC2086
run $own > log.txt
cmp mine.json run/tokenizer/tokenizer.json || fail "the run has no copy of its tokenizer"
rm mine.json
"$moesaic" generate run --prompt "the cat ü" --max-new-tokens 40 > out.txt
perl -CI -e 'local $/; my $t = <STDIN>; exit($t =~ /^the cat ü/ ? 0 : 1)' < out.txt || grep -q '^the cat ü' out.txt || fail "generate: $(cat out.txt)"
iconv -f UTF-8 -t UTF-8 out.txt > /dev/null || fail "generate printed half a character"
expect 0 "the" "$moesaic" generate run --prompt "the" --max-new-tokens 3 --tokenizer "$files/tokenizer.json"
expect 2 "was trained with another tokenizer" "$moesaic" generate run --tokenizer "$files/ranks"
# Continued with the copy; refused with another content.
# shellcheck disable=SC2086
expect 0 "step 9/9" run $own train.steps=9
sed 's/^"ignore_merges": false/"ignore_merges": true/' "$files/tokenizer.json" > mine.json
mv tokens/a.meta.json kept.json
# shellcheck disable=SC2086
expect 2 "was trained with another tokenizer" run $own train.steps=10
# Token files that nobody knows the tokenizer of.
run data.train=tokens/a data.valid=tokens/a model.vocab_size=352 run.dir=unknown train.steps=1 optimizer.warmup_steps=0 > log.txt
expect 2 "name it with --tokenizer" "$moesaic" generate unknown
expect 0 "the" "$moesaic" generate unknown --prompt "the" --max-new-tokens 2 --tokenizer "$files/tokenizer.json"
echo "tokenize: all as expected"

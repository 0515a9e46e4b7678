#!/usr/bin/env python3
"""Makes tests/tokenizer/files: a small tokenizer.json, a small rank file, and what the Python packages tokenizers and
tiktoken make of some texts with them. Run by hand, with both packages installed, when the files should change:

    python3 tests/oracles/make_tiny_files.py tests/tokenizer/files
"""
import json
import os
import sys

import compare_tokenizers as compare
from tokenizers import AddedToken, normalizers, pre_tokenizers

SAMPLE = ["the quick brown fox jumps over the lazy dog; then they thank them for the other thing.",
          "for (int i = 0; i < 10; ++i) { count += values[i]; }\n\treturn count;\n",
          "die Straße über den Fluss führt nach München, und der Fluß fließt über die Brücke",
          "中文分词中文分词 中国 2026年11月 12345 678"] * 3

TEXTS = ["", " ", "the", " the other thing", "The THEN ther", "for (int i = 0; i < 10; ++i)\r\n\r\n\t x", "über die Bru\u0308cke, Fluß", "中文分词 2026年",
         "12345678", "don't WE'LL 'ſ", "<|endoftext|>", "a<|endoftext|>the<|im_start|> b", "<|endoftext|", "x  [PAD]  y[PAD]z", "👍🏽 e\u0301 각",
         "\u180ea\u00a0b\u3000c\x85d", "   a   \n\n  b  ", "!?!?==", "\x00\x01", "the" * 40, "zqxj" * 30, "ＴＨＥ ﬁ"]
BYTES = [b"\xff", b"a\x80b", b"\xe4\xb8", b"\xe4\xb8\xad\xe4the", b"\xf0\x9f\x91\x8d\xf0\x9f", b"\xed\xa0\x80 \xc0\xaf"]


def expect(path, encode):
    raw = [t.encode() for t in TEXTS] + BYTES
    with open(path, "w") as file:
        for text in raw:
            ids = encode(text.decode("utf-8", errors="replace"))
            file.write(json.dumps({"bytes": text.hex(), "ids": ids}) + "\n")


def main():
    folder = sys.argv[1]
    added = [compare.special("<|endoftext|>"), compare.special("<|im_start|>"), AddedToken("[PAD]", lstrip=True, normalized=False)]
    tok, path = compare.trained(folder, SAMPLE, pre_tokenizers.Sequence([compare.split(compare.QWEN), compare.byte_level()]),
                                normalizers.NFC(), added, vocab=340)
    with open(path) as file:
        spec = json.load(file)
    spec["model"]["merges"] = [" ".join(m) for m in spec["model"]["merges"]]
    with open(path, "w") as file:
        json.dump(spec, file, ensure_ascii=False, indent=0)
        file.write("\n")
    expect(os.path.join(folder, "tokenizer_json.expected"), lambda t: tok.encode(t).ids)

    vocab = sorted((i, t) for t, i in spec["model"]["vocab"].items())
    alphabet = compare.byte_of_character()
    ranks = {bytes(alphabet[c] for c in t): i for i, (_, t) in enumerate(vocab)}
    specials = {t: len(ranks) + i for i, t in enumerate(["[BOS]", "[EOS]", "<|endoftext|>", "<|im_start|>"])}
    config = {"tokenizer_class": "TikTokenTokenizer", "eos_token": "[EOS]"}
    encoding, _ = compare.rank_kind(folder, "ranks", ranks, specials, config, compare.KIMI)
    expect(os.path.join(folder, "ranks.expected"), lambda t: encoding.encode(t, allowed_special="all"))


if __name__ == "__main__":
    main()

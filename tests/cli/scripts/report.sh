#!/bin/sh
# report.sh MOESAIC SOURCE_DIR WORK_DIR: `moesaic report` on a small run of two lives, a skipped step and two torn lines. The
# page must be well-formed, load nothing, and show the numbers of the records that count.
set -eu
. "${0%/*}/functions.sh"
source=$2
enter none "$1" "$3"
cp -r "$source/tests/cli/report_run" base
mkdir -p other
sed 's/"tokens_per_second":2000.0/"tokens_per_second":3000.0/' base/metrics.jsonl > other/metrics.jsonl
sed 's/lr: 0.001/lr: 0.01/' base/config.yaml > other/config.yaml
"$moesaic" report base other --out compare.html --csv csv > out.txt || fail "$(cat out.txt)"
grep -q 'base: step 8 of 8, 1 skipped | loss 2.4000 (smoothed' out.txt || fail "$(cat out.txt)"
grep -q 'eval 2.5000 (best 2.5000, step 8) | 2000 tok/s | moe max/mean 2.00, dead 1 | 2 start(s) | 2 torn' out.txt || fail "$(cat out.txt)"
grep -q '3000 tok/s (1.50×)' out.txt || fail "$(cat out.txt)"
[ "$(sed -n '$=' csv/base_steps.csv)" = 9 ] || fail "not a line per step and a heading: $(cat csv/base_steps.csv)"
grep -q '^5,0,3,1.5,0.001,1000,5000,' csv/base_steps.csv || fail "$(cat csv/base_steps.csv)"
grep -q '^5,.*,0.1,0.2,0.06,0.05,0.02,0.04,0.07$' csv/base_steps.csv || fail "no seconds by part: $(cat csv/base_steps.csv)"
grep -q '^8,2,0,400,2$' csv/other_experts.csv || fail "$(cat csv/other_experts.csv)"
"$moesaic" report base > out.txt || fail "$(cat out.txt)"
[ -s base/report.html ] || fail "no base/report.html"
set +e
out=$("$moesaic" report "$work/absent" 2>&1)
code=$?
set -e
[ "$code" = 3 ] || fail "exit $code for a folder that is none: $out"
case $out in *"is not the folder of a run"*"Give run.dir"*) ;; *) fail "$out" ;; esac
command -v python3 > /dev/null || { echo "SKIPPED: no python3 to parse the page"; exit 0; }
python3 - compare.html base/report.html <<'PY' || fail "the page"
import sys, xml.etree.ElementTree as tree
from html.parser import HTMLParser
SVG = "{http://www.w3.org/1999/xhtml}"
for name in sys.argv[1:]:
    text = open(name, encoding="utf-8").read()
    root = tree.fromstring(text.split("\n", 1)[1])  # after the DOCTYPE
    HTMLParser().feed(text)
    words = " ".join("".join(root.itertext()).split())
    for element in root.iter():
        assert not {"src", "href", "onload"} & set(element.attrib), element.attrib
        assert element.tag.split("}")[-1] not in ("script", "link", "iframe"), element.tag
        for value in (element.get("d", ""), element.get("cx", "")):
            assert "nan" not in value and "inf" not in value, value
    assert "@import" not in text and "url(" not in text
    svgs = [e for e in root.iter() if e.tag.endswith("svg")]
    runs = 2 if name == "compare.html" else 1
    titles = [e.text for e in root.iter() if e.tag.endswith("figcaption")]
    for title in ("Loss", "Loss by tokens", "Loss by time", "Gradient norm", "Learning rate", "Tokens per second", "Seconds per step",
                  "TFLOP/s per device", "Model FLOPs utilisation", "Memory", "Busiest expert against the mean",
                  "Experts without a token", "Entropy of the expert load", "Router bias"):
        assert titles.count(title) == 1, (title, titles)
    for title in ["Time by part: base"] + ["Time by part: other"] * (runs == 2):
        figure = [f for f in root.iter() if f.tag.endswith("figure") and f[0].text == title]
        assert len(figure) == 1, (title, titles)
        areas = [e for e in figure[0].iter() if e.get("class") == "part"]
        assert len(areas) == 7 and all(e.get("d", "").endswith("Z") for e in areas), len(areas)
        key = " ".join("".join(e.itertext()) for e in figure[0] if e.get("class") == "key")
        assert key.split() == "other checkpoint data communication optimizer backward forward".split(), key
    assert len(svgs) == 14 + 4 * runs, len(svgs)  # per run its time, a map and two layers
    for part in ("2.4000", "2.5000 (best 2.5000, step 8)", "8 of 8, 1 skipped", "finished (exit code 0)",
                 "model <tiny> & small", "clipped at 1", "checkpoint of step 4", "continued from step 4"):
        assert part in words, part
    assert "99" not in [e.text for e in root.iter()], "a record that a later life replaced"
    assert ("optimizer.lr" in words.split("Starts")[0]) == (runs == 2)
PY
echo "report: all checks passed"

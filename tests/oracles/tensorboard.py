#!/usr/bin/env python3
"""tensorboard.py MPIRUN MOESAIC WORK_DIR: the event files of a run, read back by the `tensorboard` package itself.

Trains a tiny model with experts, throws the last checkpoint away, goes on from an older step, and wants from TensorBoard
the values of metrics.jsonl, every step once (the later life's), histograms of the experts' tokens, the heat map and the
configuration. The package lives in a virtual environment of its own below WORK_DIR; where it cannot be installed the test
says SKIPPED.
"""
import json
import os
import shutil
import struct
import subprocess
import sys


def f32(x):
    return struct.unpack("f", struct.pack("f", float(x)))[0]


def fail(text):
    print("FAILED:", text)
    sys.exit(1)


def in_environment(folder):
    """Runs this script again with the package; ends with SKIPPED where that is not to be had."""
    python = os.path.join(folder, "bin", "python")
    check = "import tensorboard.backend.event_processing.event_accumulator"
    if not os.path.exists(python) or subprocess.run([python, "-c", check], capture_output=True).returncode:
        for command in ([sys.executable, "-m", "venv", folder],
                        [python, "-m", "pip", "install", "--quiet", "--retries", "1", "--timeout", "20", "tensorboard"]):
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode != 0:
                lines = (result.stderr + result.stdout).strip().splitlines() or ["no output"]
                print("SKIPPED: no tensorboard package:", " ".join(command[1:4]), "said:", lines[-1])
                shutil.rmtree(folder, ignore_errors=True)
                sys.exit(0)
    os.execv(python, [python, "-I", *sys.argv, "--inside"])  # -I: this file's name must not hide the package


def train(mpirun, moesaic, arguments):
    command = [mpirun, "-np", "2", "--oversubscribe", "--bind-to", "none", moesaic, "train", "tiny.yaml", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        fail(f"{' '.join(command)}: {result.stdout}{result.stderr}")


def last_records(path):
    """By type and step; the last one of a step wins."""
    records = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            records[record["type"], record.get("step", 0)] = record
    return records


def compare(accumulator, records, first_new_step):
    steps = sorted(step for kind, step in records if kind == "step")
    tags = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/lr": "lr", "perf/step_seconds": "seconds",
            "perf/tokens_per_second": "tokens_per_second", "train/total_tokens": "total_tokens"}
    for tag, key in tags.items():
        events = accumulator.Scalars(tag)
        if [e.step for e in events] != steps:
            fail(f"{tag}: steps {[e.step for e in events]} instead of {steps}")
        for event in events:
            expected = f32(records["step", event.step][key])
            if event.value != expected:
                fail(f"{tag} of step {event.step}: {event.value} instead of {expected}")
    for event in accumulator.Scalars("eval/loss"):
        if event.value != f32(records["eval", event.step]["loss"]):
            fail(f"eval/loss of step {event.step}")
    starts = [e.wall_time for e in accumulator.Scalars("train/loss")]
    if starts != sorted(starts):
        fail("an event of the earlier life survived")
    counts = [r for (kind, _), r in sorted(records.items()) if kind == "experts"]
    if not counts or counts[-1]["step"] <= first_new_step:
        fail("no records of experts after the continuation")
    for record in counts:
        for layer, tokens in zip(record["layers"], record["tokens"]):
            found = [h for h in accumulator.Histograms(f"moe/L{layer:02}/tokens") if h.step == record["step"]]
            if len(found) != 1:
                fail(f"{len(found)} histograms of layer {layer} in step {record['step']}")
            h = found[0].histogram_value
            if (h.min, h.max, h.num, h.sum) != (min(tokens), max(tokens), len(tokens), sum(tokens)):
                fail(f"histogram of layer {layer}: {h}")
            if sum(h.bucket) != len(tokens):
                fail(f"bars of layer {layer}: {h.bucket}")
    images = accumulator.Images("moe/load")
    if [i.step for i in images] != [r["step"] for r in counts] or not images[0].encoded_image_string.startswith(b"\x89PNG"):
        fail("heat maps")
    text = accumulator.Tensors("config")[-1].tensor_proto.string_val[0].decode()
    if "hidden_size: 32" not in text:
        fail(f"configuration: {text[:200]}")
    return len(steps)


def main():
    mpirun, moesaic, work = sys.argv[1:4]
    moesaic, work = os.path.abspath(moesaic), os.path.abspath(work)
    os.makedirs(work, exist_ok=True)
    if "--inside" not in sys.argv:
        in_environment(os.path.join(work, "venv"))
    from tensorboard.backend.event_processing import event_accumulator as ea
    tiny = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli", "scripts", "functions.sh")
    os.chdir(work)
    shutil.rmtree("run", ignore_errors=True)
    subprocess.run(["sh", "-c", f". '{tiny}'; expert_run"], check=True)
    settings = ["log.expert_every=2", "train.steps=10", "checkpoint.every=4"]
    train(mpirun, moesaic, settings)
    for step in (8, 10):  # as if the first life had been killed after step 7
        shutil.rmtree(f"run/checkpoints/step-{step:08}")
    train(mpirun, moesaic, settings)
    files = sorted(os.listdir("run/tensorboard"))
    if len(files) != 2:
        fail(f"event files: {files}")
    with open(os.path.join("run/tensorboard", files[-1]), "ab") as file:
        file.write(b"\x40\x00\x00")  # the tail of a record that was torn by a kill
    accumulator = ea.EventAccumulator("run/tensorboard", size_guidance=dict.fromkeys(ea.DEFAULT_SIZE_GUIDANCE, 0))
    accumulator.Reload()
    steps = compare(accumulator, last_records("run/metrics.jsonl"), 4)
    import tensorboard
    print(f"tensorboard {tensorboard.__version__}: {steps} steps equal to metrics.jsonl, purged after step 4, all checks passed")


if __name__ == "__main__":
    main()

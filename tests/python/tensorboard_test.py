# ctest: seconds=20 label=multiprocess
"""Event files of smp-train, as TensorBoard reads them."""

import json
import os
import subprocess
import tempfile

from tensorboard.backend.event_processing.event_accumulator import (
    EventAccumulator,
)

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
BIN = os.environ.get("SMP_BIN_DIR") or os.path.join(ROOT, "build/release/bin")

# What metrics.jsonl calls each.
SCALARS = {
    "loss/training": "loss",
    "loss/held_out": "held_out_loss",
    "optimizer/lr": "lr",
    "optimizer/grad_norm": "grad_norm",
    "speed/step_seconds": "step_seconds",
    "speed/samples_per_second": "samples_per_second",
    "speed/bubble_ratio": "bubble_ratio",
    "communication/requests": "requests",
    "communication/bytes_sent": "bytes_sent",
}


def train(run_dir, *settings):
    command = [
        os.path.join(BIN, "smp-train"),
        os.path.join(ROOT, "config/quickstart.toml"),
        f"--run-dir={run_dir}",
        "--model.width=64",
        "--data.sequence_length=32",
        "--train.eval_steps=1",
        "--train.sample=0",
        *settings,
    ]
    subprocess.run(command, check=True, timeout=300, capture_output=True)


def events_of(run_dir):
    events = EventAccumulator(os.path.join(run_dir, "tensorboard"))
    events.Reload()
    return events


def check_scalars(events, lines):
    for tag, key in SCALARS.items():
        wanted = {x["step"]: x[key] for x in lines if x.get(key) is not None}
        got = {x.step: x.value for x in events.Scalars(tag)}
        assert got.keys() == wanted.keys(), (tag, got, wanted)
        for step, value in wanted.items():
            # Event files have float32.
            assert abs(got[step] - value) <= 1e-6 * abs(value), (tag, step)


def main():
    with tempfile.TemporaryDirectory() as folder:
        run = os.path.join(folder, "run")
        train(
            run,
            "--monitor.tensorboard=true",
            "--train.steps=6",
            "--train.eval_interval=3",
        )
        with open(os.path.join(run, "metrics.jsonl")) as file:
            lines = [json.loads(x) for x in file if '"loss"' in x]
        assert len(lines) == 6
        events = events_of(run)
        check_scalars(events, lines)
        text = events.Tensors("partition")
        assert len(text) == 1
        shown = text[0].tensor_proto.string_val[0].decode()
        assert shown.startswith("```\npartition: "), shown[:200]
        assert "transformer" in shown and "\x1b" not in shown

        train(os.path.join(folder, "without"), "--train.steps=2")
        assert not os.path.exists(os.path.join(folder, "without/tensorboard"))
    print("ok")


main()

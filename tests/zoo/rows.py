"""Trains every model of the zoo with smp-train, over real processes, and
compares with what eager PyTorch expects.

A row is a model, a number of ranks, a number of microbatches and settings. The
settings `defaults` are none but those which the README has; `simple` and
`interleaved` name a schedule and spread models that would pay best on one rank;
with `shared` two ranks share every module that has a distributed implementation.
Models of published collections (models/published.py) are large: each is exported,
trained with `defaults`, those of `transformers` with `shared` too, and removed.
Losses of all steps, the whole first gradient and all parameters and buffers at
the end are compared (tests/data/zoo/README.md). A relative difference is
max|a - b| / (max|b| + 0.01), and may be 1e-5; that is the bound of the C++ tests,
1e-5 max|b| + 1e-7 (more where ranks share a ReLU, see below).
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

import torch
from safetensors.torch import load_file

from export import (
    LEARNING_RATE,
    MICROBATCHES,
    PUBLISHED_MICROBATCHES,
    PUBLISHED_RATE,
    PUBLISHED_STEPS,
    RANKS,
    STEPS,
    threads_of,
)
from models import PUBLISHED

SPREAD = """\
threads = 1
strategy = "paper"  # a model so small would pay best on one rank
memory_weight = 1.0
"""
SMALL_SETTINGS = {
    "simple": 'pipeline = "simple"\n' + SPREAD,
    "interleaved": 'pipeline = "interleaved"\n' + SPREAD,
    "defaults": "",
}
SHARING = 2  # ranks that share modules
# The same samples for both: labels of padded rows are not as many on each, so
# the mean of two halves is another number.
SHARED = f"""\
ddp = true
tensor_parallel_degree = {SHARING}
prescaled_batch = true

[tensor_parallel]
modules = ["*"]
"""
SETTINGS = SMALL_SETTINGS | {"shared": SHARED}
BOUND = 1e-5
# Where the sums of a layer are added in another order, a number within a rounding
# error of 0 may get another sign before a ReLU. Then one token has a gradient for
# it or has none: one element of a bias and one row of a weight were seen to differ
# by 1.2e-5 after the second step.
BOUND_OF_RELU = 1e-4
RELU = ("opt_125m",)
TIMEOUT = 600  # seconds for a row

CONFIG = """\
[smp]
pipeline_parallel_degree = {stages}
microbatches = {microbatches}
{more}
[model]
type = "torchscript"
path = "{models}/{name}.pt"

[data]
type = "safetensors"
path = "{models}/{name}.batch.safetensors"

[optimizer]
type = "sgd"
lr = {rate}

[train]
steps = {steps}
dump_gradients = [1]
save_model = true
"""


class Row(NamedTuple):
    name: str
    ranks: int
    microbatches: int
    settings: str

    @property
    def stages(self) -> int:
        return self.ranks // SHARING if self.settings == "shared" else self.ranks

    def __str__(self):
        return f"{self.name}, {self.ranks} ranks, {self.microbatches} microbatches, {self.settings}"


class Outcome(NamedTuple):
    difference: float  # the largest one, relative
    what: str  # where it is
    requests: int  # between ranks, in one step
    error: Optional[str] = None


def train(row: Row, arguments) -> Optional[str]:
    """Returns why it failed, or None."""
    directory = run_dir(row, arguments)
    shutil.rmtree(directory, ignore_errors=True)  # of an earlier run
    directory.mkdir(parents=True)
    config = directory / "zoo.toml"
    published = row.name in PUBLISHED
    steps, rate = (PUBLISHED_STEPS, PUBLISHED_RATE) if published else (STEPS, LEARNING_RATE)
    more, models = SETTINGS[row.settings], arguments.models.resolve()
    values = dict(row._asdict(), stages=row.stages, more=more, models=models, rate=rate, steps=steps)
    config.write_text(CONFIG.format(**values))
    command = [arguments.smp_train, config, "--run-dir", directory, "--log-level", "warn"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"did not end within {TIMEOUT} s"
    if done.returncode == 0:
        return None
    lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
    return f"exit code {done.returncode}: {lines[-1]}"


def run_dir(row: Row, arguments) -> Path:
    return arguments.work / row.name / f"ranks{row.ranks}-mb{row.microbatches}-{row.settings}"


def numbers_of(row: Row, arguments) -> Dict[str, torch.Tensor]:
    """What a run left, under the names of NAME.expected.safetensors."""
    directory = run_dir(row, arguments)
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    result = {"losses": torch.tensor([x["loss"] for x in steps], dtype=torch.float64)}
    for file, prefix in (("gradients-1", "gradient/"), ("model", "after/")):
        for name, x in load_file(directory / f"{file}.safetensors").items():
            result[prefix + name] = x
    return result


def expected(row: Row, arguments) -> Dict[str, torch.Tensor]:
    """What it should leave; the run on one rank if no file says so."""
    threads = f"-{threads_of(row.ranks)}" if row.name in PUBLISHED else ""
    file = arguments.models / f"{row.name}.expected{threads}.safetensors"
    if not file.exists():
        return numbers_of(row._replace(ranks=1), arguments)
    prefix = f"{row.microbatches}/"
    return {k[len(prefix) :]: x for k, x in load_file(file).items() if k.startswith(prefix)}


def compare(row: Row, arguments) -> Outcome:
    got, wanted = numbers_of(row, arguments), expected(row, arguments)
    steps = (run_dir(row, arguments) / "metrics.jsonl").read_text().splitlines()
    requests = json.loads(steps[-1])["requests"]
    worst = (0.0, "")
    for name in sorted(got.keys() | wanted.keys()):
        a, b = got.get(name), wanted.get(name)
        if name.startswith("gradient/"):  # none and zeros are the same
            a = torch.zeros_like(b) if a is None else a
            b = torch.zeros_like(a) if b is None else b
        if a is None or b is None:
            return Outcome(float("inf"), name, requests, f"{name} is {'missing' if a is None else 'not expected'}")
        if a.shape != b.shape or a.dtype != b.dtype:
            return Outcome(float("inf"), name, requests, f"{name}: {tuple(a.shape)} instead of {tuple(b.shape)}")
        if b.numel() == 0:
            continue
        a, b = a.double(), b.double()
        x = ((a - b).abs().max() / (b.abs().max() + 0.01)).item()
        worst = max(worst, (x if x == x else float("inf"), name))
    kinks = row.settings == "shared" and row.name in RELU
    error = None if worst[0] <= (BOUND_OF_RELU if kinks else BOUND) else f"{worst[1]} differs by {worst[0]:.1e}"
    return Outcome(*worst, requests, error)


def run(row: Row, arguments) -> Outcome:
    error = train(row, arguments)
    if error is None:
        try:
            return compare(row, arguments)
        except (OSError, KeyError, ValueError) as e:
            error = f"{type(e).__name__}: {e}"
    return Outcome(float("inf"), "", 0, error)


def cell(outcomes: List[Outcome]) -> str:
    if any(x.error for x in outcomes):
        return "FAILED"
    return format(max(x.difference for x in outcomes), ".1e")


def run_small(names: List[str], arguments) -> Dict[Row, Outcome]:
    """Trains the models that export.py wrote, several at once. Prints a line
    for each.
    """
    outcomes: Dict[Row, Outcome] = {}

    def run_all(name):
        for row in itertools.starmap(Row, itertools.product([name], RANKS, MICROBATCHES, SMALL_SETTINGS)):
            outcomes[row] = run(row, arguments)
            if outcomes[row].error:
                print(f"  {row}: {outcomes[row].error}", flush=True)

    width = max(map(len, names))
    head = "".join(f"{f'pp {n}':>11}" for n in RANKS)
    print(f"largest relative difference of losses, gradients, parameters and buffers, over {len(MICROBATCHES)} numbers of")
    print(f"microbatches and {len(SMALL_SETTINGS)} settings; requests of a step between ranks, at most\n")
    print(f"{'model':{width}}{head}{'requests':>12}", flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for name, _ in zip(names, pool.map(run_all, names)):
            mine = {row: x for row, x in outcomes.items() if row.name == name}
            cells = "".join(f"{cell([x for row, x in mine.items() if row.ranks == n]):>11}" for n in RANKS)
            print(f"{name:{width}}{cells}{max(x.requests for x in mine.values()):>12}", flush=True)
    return outcomes


def run_published(name: str, arguments) -> Dict[Row, Outcome]:
    """Exports a model, trains it and removes it. Prints a line for each row."""
    export = [sys.executable, Path(__file__).with_name("export.py"), "--published", arguments.models, name]
    done = subprocess.run(export, capture_output=True, text=True)
    outcomes = {}
    # Others share little, and batch norm over few rows enlarges what a sum in
    # another order changes.
    settings = ("defaults", "shared") if PUBLISHED[name].traced else ("defaults",)
    rows = [Row(name, n, PUBLISHED_MICROBATCHES, x) for x in settings for n in RANKS]
    for row in [x for x in rows if x.stages > 0]:
        begin = time.monotonic()
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
            x = Outcome(float("inf"), "", 0, f"not exported: {lines[-1]}")
        else:
            x = run(row, arguments)
            if not x.error and row.stages > 1 and x.requests == 0:
                x = x._replace(error="all of it runs on one rank")
        what = x.error or f"{x.difference:.1e}, {x.requests} requests"
        print(f"  {row}: {what} ({time.monotonic() - begin:.0f} s)", flush=True)
        outcomes[row] = x
        for file in run_dir(row, arguments).glob("*.safetensors"):
            file.unlink()
    for file in arguments.models.glob(f"{name}.*"):
        file.unlink()
    return outcomes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smp-train", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True, help="what export.py wrote")
    parser.add_argument("--work", type=Path, required=True, help="where runs leave their files")
    parser.add_argument("--jobs", type=int, default=1, help="models at once")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    small = sorted(x.stem for x in arguments.models.glob("*.pt"))
    outcomes: Dict[Row, Outcome] = {}
    if names := [x for x in arguments.names or small if x not in PUBLISHED]:
        outcomes.update(run_small(names, arguments))
    if names := [x for x in arguments.names or PUBLISHED if x in PUBLISHED]:
        print("\nmodels of published collections: largest relative difference", flush=True)
        for name in names:
            outcomes.update(run_published(name, arguments))
    failures = sum(1 for x in outcomes.values() if x.error)
    print(f"\n{len(outcomes)} rows, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

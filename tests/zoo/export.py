"""Writes the zoo: for each model NAME

    NAME.pt                     the model, scripted or traced
    NAME.batch.safetensors      one batch: input0, input1, ...
    NAME.expected.safetensors   what PyTorch itself makes of model and batch

A model comes from a seed of its own, so adding one leaves the others as they
are. The expected numbers are those of the Python module, not of the file: for
M microbatches (1 and 4) the losses of STEPS steps of SGD (M/losses), the
gradient of the first (M/gradient/NAME) and all parameters and buffers after the
last (M/after/NAME).

Of a model of a published collection (models/published.py) whatever is expected
depends on the number T of threads: a convolution adds in another order, and a
normalisation of few rows makes of a rounding error one of 1e-3. So there is
NAME.expected-T.safetensors for as many threads as smp-train gives to a rank.
Of those in WEIGHTLESS it writes published/NAME.pt, where large tensors are one element long and expanded: their
code and their sizes, but not their weights.

    export.py DIRECTORY [NAME ...]
    export.py --compare SHIPPED DIRECTORY [NAME ...]   exit code 1: they differ
    export.py --published DIRECTORY NAME ...   models of published collections,
                                               whole, with expected numbers
"""

import argparse
import copy
import multiprocessing
import os
import sys
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from models import PUBLISHED, ZOO

STEPS = 3
LEARNING_RATE = 0.05
MICROBATCHES = (1, 4)

RANKS = (1, 2, 4)  # of the rows that are compared (rows.py)
# Gradients of microbatches are added in the order in which they end. With a
# larger rate such a rounding error of the first step becomes one of 1e-4 in the
# second, where layers are normalised over few rows.
PUBLISHED_RATE = 0.002
PUBLISHED_STEPS = 2
PUBLISHED_MICROBATCHES = 4

# What ships to be tested with weights made at random (tests/apps/models/zoo_test.cpp).
WEIGHTLESS = ("distilgpt2", "llama_4_layers_tied", "resnet18")


def loss_of(result):
    return result[0] if isinstance(result, tuple) else result


def save_script(script, path):
    """Saves without the debug records: they name the files of this machine."""
    with tempfile.TemporaryDirectory() as directory:
        whole = str(Path(directory) / path.name)
        script.save(whole)
        reader = torch._C.PyTorchFileReader(whole)
        writer = torch._C.PyTorchFileWriter(str(path))
        for record in reader.get_all_records():
            if record.endswith(".debug_pkl") or record in ("version", "byteorder", ".data/serialization_id"):
                continue
            data = reader.get_record(record)
            writer.write_record(record, data, len(data))
        writer.write_end_of_file()


def without_weights(script):
    """Leaves of parameters and large masks the sizes and one element."""
    with torch.no_grad():
        for x in [*script.parameters(), *script.buffers()]:
            if isinstance(x, torch.nn.Parameter) or (x.nbytes > 4096 and x.dtype == torch.bool):
                x.data = torch.zeros(1, dtype=x.dtype).expand(x.shape)
    return script


def expected(module, batch, microbatches, steps, rate):
    """Trains a copy of the module, one microbatch after the other."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), rate)
    parts = list(zip(*[x.chunk(microbatches) for x in batch]))
    losses, gradients = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for part in parts:
            loss = loss_of(module(*[x.clone() for x in part]))
            total += loss.item()
            (loss / microbatches).backward()
        losses.append(total / microbatches)
        if step == 0:
            gradients = {
                f"{microbatches}/gradient/{name}": p.grad.clone()
                for name, p in module.named_parameters()
                if p.grad is not None
            }
        optimizer.step()
    after = {
        f"{microbatches}/after/{name}": x.detach().clone().contiguous()
        for xs in (module.named_parameters(), module.named_buffers())
        for name, x in xs
    }
    return {f"{microbatches}/losses": torch.tensor(losses, dtype=torch.float64), **gradients, **after}


def make(name, entry):
    torch.manual_seed(zlib.crc32(name.encode()))
    module, batch = entry.make()
    return module.train(), batch


def script_of(module, batch, traced):
    if traced:
        return torch.jit.trace(copy.deepcopy(module), tuple(x.clone() for x in batch), check_trace=False)
    return torch.jit.script(copy.deepcopy(module))


def threads_of(ranks):
    """Returns how many threads `smp-train` gives by default to each of them."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def save_model(name, entry, directory):
    """Returns the module and the batch."""
    module, batch = make(name, entry)
    save_script(script_of(module, batch, entry.traced), directory / f"{name}.pt")
    save_file({f"input{i}": x.contiguous() for i, x in enumerate(batch)}, directory / f"{name}.batch.safetensors")
    return module, batch


def export(name, directory):
    module, batch = save_model(name, ZOO[name], directory)
    if not ZOO[name].random:
        numbers = {k: v for m in MICROBATCHES for k, v in expected(module, batch, m, STEPS, LEARNING_RATE).items()}
        save_file(numbers, directory / f"{name}.expected.safetensors")


def export_published(name, directory):
    module, batch = save_model(name, PUBLISHED[name], directory)
    for threads in {threads_of(n) for n in RANKS}:
        torch.set_num_threads(threads)
        numbers = expected(module, batch, PUBLISHED_MICROBATCHES, PUBLISHED_STEPS, PUBLISHED_RATE)
        save_file(numbers, directory / f"{name}.expected-{threads}.safetensors")


def export_weightless(name, directory):
    (directory / "published").mkdir(exist_ok=True)
    entry = PUBLISHED[name]
    script = script_of(*make(name, entry), entry.traced)
    save_script(without_weights(script), directory / "published" / f"{name}.pt")


def in_processes(f, names, directory, count=None):
    """Exports each model from a process of its own: TorchScript numbers its
    class names by what the process made before.
    """
    directory.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    with context.Pool(count, maxtasksperchild=1) as pool:
        pool.starmap(f, [(name, directory) for name in names], chunksize=1)


def difference(made, shipped):
    """Returns what differs between two files, or None. Numbers may differ in
    their last places: other processors add in another order.
    """
    if made.suffix == ".pt":
        a, b = zipfile.ZipFile(made), zipfile.ZipFile(shipped)
        code = [{n: z.read(n) for n in z.namelist() if n.endswith(".py")} for z in (a, b)]
        if code[0] != code[1]:
            return "other code"
        a, b = ({k: v for k, v in torch.jit.load(str(f)).state_dict().items()} for f in (made, shipped))
    else:
        a, b = load_file(str(made)), load_file(str(shipped))
    if a.keys() != b.keys():
        return f"other names: {sorted(a.keys() ^ b.keys())[:4]}"
    for name, x in a.items():
        y = b[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{name}: {tuple(x.shape)} {x.dtype} instead of {tuple(y.shape)} {y.dtype}"
        if x.numel() and not (x.double() - y.double()).abs().max() <= 1e-5 * y.double().abs().max() + 1e-7:
            return f"{name}: other numbers"
    return None


def compare(directory, shipped):
    """Returns a line for each file of `directory` that `shipped` has otherwise."""
    lines = []
    for made in sorted(x for x in directory.rglob("*") if x.is_file()):
        other = shipped / made.relative_to(directory)
        what = difference(made, other) if other.exists() else "is missing"
        if what:
            lines.append(f"{other}: {what}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", type=Path, metavar="SHIPPED")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    names = arguments.names or [*ZOO, *PUBLISHED]
    if unknown := [x for x in names if x not in ZOO and x not in PUBLISHED]:
        parser.error(f"there is no {unknown[0]}; choose among {', '.join([*ZOO, *PUBLISHED])}")
    if os.environ.get("PYTHONHASHSEED") != "0":  # TorchScript writes sets in the order of hashes
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    warnings.simplefilter("ignore")  # TorchScript is deprecated, and what a tracer cannot follow
    transformers.logging.set_verbosity_error()
    if arguments.published:  # they are large: one at a time
        in_processes(export_published, [x for x in names if x in PUBLISHED], arguments.directory, 1)
        return 0
    torch.set_num_threads(1)
    in_processes(export, [x for x in names if x in ZOO], arguments.directory)
    in_processes(export_weightless, [x for x in names if x in WEIGHTLESS], arguments.directory)
    lines = compare(arguments.directory, arguments.compare) if arguments.compare else []
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())

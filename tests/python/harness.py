"""Cases that ranks run together, each compared with one process.

A file of cases is a program, which starts itself as several ranks, once for
each of its variants, or for what the command line says:

    python tests/python/modules_test.py
    python tests/python/modules_test.py -n 2 [--KEY=VALUE ...] [CASE ...]

All cases of a run share one session, one after the other; keys are those of
smp.init.
"""

import ast
import collections
import copy
import gc
import math
import os
import random
import subprocess
import sys
import tempfile
import traceback

import torch
import torch.nn.functional as F

import smp

_cases = []

# Overrides the number of steps of each comparison.
steps_wanted = None
verifies = False  # each step also runs in one process
places = None  # the seed of random places of modules


def case(function):
    _cases.append(function)
    return function


def _value(text):
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def ranks(n, *cases, **options):
    """A variant of a file of cases: how many ranks, and their options."""
    settings = [f"--{name}={value}" for name, value in options.items()]
    return ["-n", str(n), *settings, *cases]


def run(*variants, **options):
    """``options`` of smp.init that have no text."""
    if "SMP_RANK" in os.environ:
        run_cases(sys.argv[1:], options)
        return
    for args in [sys.argv[1:]] if len(sys.argv) > 1 else variants:
        print("==", *args, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            start(sys.argv[0], args, os.path.join(folder, "run"))


def start(program, args, run_dir):
    """Runs a file of cases as ranks; ends this process if one fails."""
    command = [sys.executable, "-m", "smp.run", "--run-dir", run_dir]
    code = subprocess.call([*command, *args[:2], program, *args[2:]])
    if code != 0:
        for name in sorted(os.listdir(run_dir)):
            if name.startswith("log-") and name != "log-0.txt":
                with open(os.path.join(run_dir, name)) as file:
                    print(f"-- {name}\n{file.read()[-4000:]}", flush=True)
        sys.exit(code)


def run_cases(args, more):
    """Runs the cases that the command line names, or all. The first failure
    ends the run."""
    options = {"pipeline_parallel_degree": 2, "microbatches": 4, "threads": 1}
    wanted = []
    for arg in args:
        if arg.startswith("--"):
            name, _, value = arg[2:].partition("=")
            options[name] = _value(value)
        else:
            wanted.append(arg)
    global steps_wanted, verifies, places
    steps_wanted = options.pop("steps", None)
    places = options.pop("places", None)
    verifies = options.pop("verify", False)
    torch.set_num_threads(1)
    smp.init(options, **more)
    unknown = set(wanted) - {f.__name__ for f in _cases}
    assert not unknown, f"no case is called {unknown}"
    for f in _cases:
        if wanted and f.__name__ not in wanted:
            continue
        try:
            f()
        except BaseException:
            print(f"case {f.__name__} failed on rank {smp.rank()}", flush=True)
            raise
        gc.collect()
        smp.barrier()
        if smp.rank() == 0:
            print(f"ok {f.__name__}", flush=True)
    smp.shutdown()


def microbatches(batch, n):
    """The microbatches of a batch: a dict of tensors."""
    parts = {k: x.chunk(n) for k, x in batch.items()}
    return [{k: xs[i] for k, xs in parts.items()} for i in range(n)]


def train_alone(net, batch, loss_of, optimizer, steps, n=4, weight=1.0):
    """The same steps in this process; returns the losses."""
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for part in microbatches(batch(i), n):
            loss = loss_of(net, part) / n
            (loss * weight).backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def tensors_of(net):
    result = dict(net.named_parameters(remove_duplicate=False))
    result.update(net.named_buffers(remove_duplicate=False))
    return result


def largest_difference(mine, net):
    theirs = tensors_of(net)
    worst = 0.0
    for name, x in mine.items():
        if x.numel() and name in theirs:
            y = theirs[name].detach()
            worst = max(worst, (x.double() - y.double()).abs().max().item())
    return worst


def compare(
    net,
    batch,
    loss_of,
    steps=3,
    make=lambda ps: torch.optim.SGD(ps, lr=0.05),
    pins=None,
    within=2e-6,
    prepare=lambda model: None,
    alone=None,
    each_step=False,
    anywhere=True,
):
    """Trains a module on the ranks and in one process; returns the model.

    ``alone`` is what the process trains, by default a copy of ``net``. Modules
    that draw random numbers draw the same only in smp.verify, and others make the
    last digit matter: those are compared in ``each_step``. Not all modules can be
    ``anywhere``."""
    steps = steps_wanted or steps
    if alone is None and not each_step:
        alone = copy.deepcopy(net)
    place(net, pins or (random_places(net) if anywhere else {}))
    model = smp.DistributedModel(net)
    prepare(model)
    optimizer = smp.DistributedOptimizer(make(model.parameters()))

    train_step = make_step(model, loss_of)
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        part = own_part(batch(i))
        checks = verifies or each_step
        out = smp.verify(train_step, part) if checks else train_step(part)
        loss = out.reduce_mean().item()
        losses.append(sum(smp.allgather(loss)) / smp.size())
        optimizer.step()
    if each_step:
        assert all(math.isfinite(x) for x in losses), losses
        return model
    parts = 4 * smp.data_size()
    expected = train_alone(
        alone, batch, loss_of, make(alone.parameters()), steps, parts
    )
    for x, y in zip(losses, expected):
        assert abs(x - y) <= within * max(1.0, abs(y)), (losses, expected)
    moved = largest_difference(model.state_dict(), alone)
    assert moved <= 20 * within, f"weights differ by {moved}"
    return model


def place(net, places):
    for path, rank in places.items():
        smp.set_partition(net.get_submodule(path), rank % smp.pp_size())


def random_places(net):
    """Of a third of the modules of any kind, except those that have to be
    together, as they share a parameter."""
    if places is None:
        return {}
    owners = collections.Counter(
        id(p) for m in net.modules() for p in m.parameters(recurse=False)
    )
    g = random.Random(places)
    return {
        path: g.randrange(smp.pp_size())
        for path, m in net.named_modules()
        if path
        and all(owners[id(p)] == 1 for p in m.parameters(recurse=False))
        and g.random() < 0.3
    }


def start_model(net):
    place(net, HALVES)
    return smp.DistributedModel(net)


def own_part(batch):
    """Of each batch, this replica's samples."""
    n, i = smp.data_size(), smp.data_rank()
    return {k: x.chunk(n)[i] for k, x in batch.items()}


def own(model, *modules):
    """Whether this rank has all of these modules."""
    return set(modules) <= set(model.local_module_names())


def expect(kind, text, function):
    """``function`` raises ``kind``, with ``text`` in what it says."""
    try:
        function()
    except kind as e:
        assert text in str(e), f"'{text}' is not in: {e}"
        return e
    except BaseException:
        traceback.print_exc()
        raise
    raise AssertionError(f"{kind.__name__} with '{text}' was expected")


# -- a small net -------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.a = torch.nn.Linear(d, d)
        self.b = torch.nn.Linear(d, d)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(x)))


class Net(torch.nn.Module):
    def __init__(self, block=Block, n=4):
        super().__init__()
        torch.manual_seed(0)
        self.h = torch.nn.ModuleList([block() for _ in range(n)])
        self.head = torch.nn.Linear(32, 5)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.head(x)


def samples(i, n=16):
    g = torch.Generator().manual_seed(i)
    return {
        "x": torch.randn(n, 32, generator=g),
        "y": torch.randint(0, 5, (n,), generator=g),
    }


def loss_of(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def make_step(model, loss_of=loss_of):
    @smp.step
    def train_step(batch):
        loss = loss_of(model, batch)
        model.backward(loss)
        return loss

    return train_step


# Half of the blocks on each of two ranks, so that each step crosses.
HALVES = {"h.0": 0, "h.1": 0, "h.2": 1, "h.3": 1, "head": 1}
TURNS = {"h.0": 0, "h.1": 1, "h.2": 0, "h.3": 1, "head": 0}

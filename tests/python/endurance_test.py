# ctest: seconds=150 label=proof
"""Many small steps, and a program that does something else besides."""

import contextlib
import gc
import threading

import torch

import smp
from harness import case, ranks, run


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def train(steps, at):
    """Trains on the ranks, and in one process on rank 0; calls ``at`` before
    each step."""
    mine, theirs = net(), net()
    for i, x in enumerate(mine):
        smp.set_partition(x, i // 2)
    model = smp.DistributedModel(mine)
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01)
    )
    alone = torch.optim.SGD(theirs.parameters(), lr=0.01)

    @smp.step
    def step(x):
        loss = (model(x) - x).square().mean()
        model.backward(loss)
        return loss

    for i in range(steps):
        at(i)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        loss = step(x).reduce_mean().item()
        optimizer.step()
        if smp.rank() != 0:
            continue
        alone.zero_grad()
        expected = 0.0
        for part in x.chunk(4):
            one = (theirs(part) - part).square().mean() / 4
            one.backward()
            expected += one.item()
        alone.step()
        assert abs(loss - expected) < 1e-4 * expected, (i, loss, expected)


@case
def ten_thousand_steps():
    seen = {}

    def look(i):
        if i in (2_000, 9_999):
            gc.collect()
            seen[i] = resident()

    train(10_000, look)
    grown = seen[9_999] - seen[2_000]
    assert grown < 4_000_000, f"{grown / 1e6} MB more after 8,000 steps"


@contextlib.contextmanager
def busy_thread():
    """One that never lets go of the interpreter by itself."""
    ends = threading.Event()

    def spin():
        n = 0
        while not ends.is_set():
            for _ in range(1000):
                n += 1

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


@case
def a_thread_of_python():
    with busy_thread():
        train(1_000, lambda i: None)


if __name__ == "__main__":
    run(ranks(2))

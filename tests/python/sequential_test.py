# ctest: seconds=40 label=multiprocess
"""torch.nn.Sequential: consecutive children on one rank are one request."""

import types

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import smp
from harness import (
    Block,
    case,
    compare,
    loss_of,
    make_step,
    own_part,
    ranks,
    run,
    samples,
)

# The middle of six children on the other rank.
MIDDLE = {"0": 0, "1": 0, "2": 1, "3": 1, "4": 1, "5": 0}


def below(path):
    return {f"{path}.{name}": rank for name, rank in MIDDLE.items()}


class Around(nn.Module):
    """A module that calls a Sequential."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.rows(x))


class Looping(Around):
    def forward(self, x):
        seen = [x]
        for child in self.rows:
            seen.append(child(seen[-1]))
        return self.head(seen[-1] + seen[3] + seen[4])


class Slicing(Around):
    def forward(self, x):
        return self.head(self.rows[3:](x) + self.rows[:5](x))


class Checkpointing(Around):
    def forward(self, x):
        return self.head(checkpoint(self.rows, x, use_reentrant=False))


class Reentrant(Around):
    def forward(self, x):
        return self.head(
            checkpoint(self.rows, x.requires_grad_(), use_reentrant=True)
        )


class Backwards(nn.Sequential):
    def __iter__(self):
        return reversed(list(self._modules.values()))


class Residual(nn.Sequential):
    def forward(self, x):
        for child in self:
            x = x + 0.1 * child(x)
        return x


class Announced(Block):
    """Its class does something around calls."""

    def __call__(self, x):
        return super().__call__(x * 0.5) + 0.1


class Split(nn.Module):
    def forward(self, x):
        return x.chunk(2, -1)


class Joined(nn.Module):
    def __init__(self, plus=0.0):
        super().__init__()
        self.plus = plus

    def forward(self, xs):
        return torch.cat([xs[0] + self.plus, xs[1]], -1)


class Looked(Joined):
    """Returns something that is no tensor, and takes it."""

    def forward(self, xs):
        if isinstance(xs, dict):
            return xs["x"] * xs["by"]
        return {"x": super().forward(xs), "by": 0.5}


def blocks(kind=nn.Sequential, block=Block):
    return kind(*[block() for _ in range(6)])


def shared_activation():
    act = nn.GELU()
    a, b = nn.Linear(32, 32), nn.Linear(32, 32)
    return nn.Sequential(nn.Linear(32, 32), act, a, act, b, act)


def with_hooks():
    net = blocks()
    net.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    net.register_forward_hook(lambda m, args, out: out + m[3](args[0]))
    return net


def with_hooks_of_children():
    net = blocks()
    for child in net:
        child.register_forward_hook(lambda m, args, out: out * 0.5)
        child.a.register_full_backward_hook(
            lambda m, gi, go: (gi[0] * 0.5,) if gi[0] is not None else None
        )
    return net


def with_another_forward():
    net = blocks()
    net.forward = types.MethodType(
        lambda self, x: self[4](self[3](self[2](x)) * 2), net
    )
    return net


def compiled():
    net = blocks()
    net[3].compile(backend="aot_eager")
    return net


def frozen():
    def norm():
        return nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 32))

    net = nn.Sequential(*[norm() for _ in range(6)])
    net[3].eval()
    return net


def norms():
    return nn.Sequential(
        Block(),
        nn.BatchNorm1d(32),
        nn.ReLU(inplace=True),
        nn.BatchNorm1d(32),
        nn.ReLU(inplace=True),
        nn.Linear(32, 32),
    )


def tuples():
    return nn.Sequential(
        Block(), Split(), Joined(1.0), Split(), Joined(), Block()
    )


def tuples_that_cross():
    return nn.Sequential(
        Split(), Joined(), Block(), Block(), Split(), Joined(1.0)
    )


def dicts_that_cross():
    return nn.Sequential(
        Block(), Block(), Split(), Joined(), Split(), Looked()
    ).append(Looked())


def nested():
    inner = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    return nn.Sequential(Block(), Block(), inner, Block(), Block(), Block())


ROWS = (blocks, nested, compiled, norms, tuples, shared_activation)
OTHERS = (
    with_hooks,
    with_hooks_of_children,
    with_another_forward,
    frozen,
    tuples_that_cross,
    dicts_that_cross,
    lambda: blocks(Backwards),
    lambda: blocks(Residual),
    lambda: blocks(block=Announced),
)


def requests(model):
    make_step(model)(own_part(samples(8)))
    return sum(smp.allgather(smp.last_step()["requests"]))


def compare_rows(net, pins, **how):
    return compare(net, samples, loss_of, pins=pins, steps=4, **how)


@case
def what_a_sequential_may_be():
    for make in ROWS + OTHERS:
        torch.manual_seed(0)
        compare_rows(Around(make()), {**below("rows"), "head": 0})


@case
def what_may_call_it():
    for kind in (Looping, Slicing, Checkpointing, Reentrant):
        torch.manual_seed(0)
        compare_rows(kind(blocks()), {**below("rows"), "head": 0})


@case
def one_request_for_consecutive_children():
    torch.manual_seed(0)
    found = {}
    for kind in (Around, Looping):
        model = compare_rows(kind(blocks()), {**below("rows"), "head": 0})
        found[kind] = requests(model)
        del model
    # Of each microbatch two less, forward and backward.
    assert found[Looping] - found[Around] == 16, found


@case
def a_model_that_is_a_sequential():
    torch.manual_seed(0)
    net = blocks().append(nn.Linear(32, 5))
    model = compare_rows(net, {**MIDDLE, "6": 0})
    assert requests(model) == 8  # of each microbatch one, and its backward


@case
def numbers_that_children_draw():
    torch.manual_seed(0)

    def block():
        return nn.Sequential(nn.Dropout(), nn.Linear(32, 32), nn.Dropout())

    net = Around(blocks(block=block))
    compare_rows(net, {**below("rows"), "head": 0}, each_step=True)


@case
def children_computed_again_together():
    for strategy in ("each", "group_2", "contiguous"):
        torch.manual_seed(0)
        net = Around(blocks())
        smp.set_activation_checkpointing(net.rows, strategy=strategy)
        compare_rows(net, {**below("rows"), "head": 0})


if __name__ == "__main__":
    run(
        ranks(2),
        ranks(2, static_mode=True, fast_mode=True),
        ranks(2, verify=True),
    )

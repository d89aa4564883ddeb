# ctest: seconds=25 label=multiprocess
"""State that Python modules keep, on two ranks and in one process."""

import collections
import dataclasses
import random
import types

import numpy as np
import torch
import torch.nn as nn

import harness
import smp
from harness import (
    HALVES,
    TURNS,
    Block,
    Net,
    case,
    compare,
    expect,
    loss_of,
    own,
    ranks,
    run,
    samples,
)


@case
def batch_norm():
    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.n = nn.BatchNorm1d(32)

        def forward(self, x):
            return x + self.n(self.a(x))

    compare(Net(Normed), samples, loss_of)


class Counts(Block):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * (self.calls % 5))


@case
def an_attribute_that_code_counts_up():
    model = compare(Net(Counts), samples, loss_of)
    assert (
        "sets its attribute 'calls'" in model.order_text()
    ), model.order_text()
    for i, block in enumerate(model.module.h):
        if own(model, f"h.{i}"):
            steps = harness.steps_wanted or 3
            assert block.calls == 4 * steps, block.calls


class Logs(Block):
    def __init__(self):
        super().__init__()
        self.log = []

    def forward(self, x):
        self.log.append(float(len(self.log)))
        return super().forward(x) * (1 + 0.1 * (sum(self.log) % 5))


# The trace sees one microbatch: this begins later.
class Late(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.factor = 1.0

    def forward(self, x):
        self.seen += 1
        if self.seen > 6:
            self.factor = 1.0 + 0.1 * (self.seen.item() % 3)
        return super().forward(x) * self.factor


class Replaces(Block):
    """Puts another tensor into the slot of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


class Memory:
    """An object of the user's own."""

    def __init__(self):
        self.calls = 0
        self.seen = []
        self.last = {"mean": torch.zeros(32)}

    def keep(self, x):
        self.calls += 1
        self.seen.append(float(x.mean()))
        self.last["mean"].mul_(0.5).add_(x.mean(0))

    def read(self):
        return self.last["mean"] * (self.calls % 3) + sum(self.seen[-3:])


class Remembers(Block):
    def __init__(self):
        super().__init__()
        self.memory = Memory()

    def forward(self, x):
        self.memory.keep(x.detach())
        return super().forward(x) + 0.1 * self.memory.read()


class Keeper:
    """Has an object, and the two know each other."""

    def __init__(self, memory=None):
        self.memory = memory or Memory()
        self.memory.keeper = self

    def keep(self, x):
        self.memory.keep(x)

    def read(self):
        return self.memory.read()


@dataclasses.dataclass(slots=True)
class Sums:
    count: int = 0
    all: list = dataclasses.field(default_factory=list)


class RemembersInside(Block):
    def __init__(self):
        super().__init__()
        self.sums = types.SimpleNamespace(of=Sums())
        self.keepers = {"first": [Keeper()]}
        self.memory = Keeper()

    def forward(self, x):
        for keeper in (self.memory, self.keepers["first"][0]):
            keeper.keep(x.detach())
            x = x + 0.1 * keeper.read()
        self.sums.of.count += 1
        self.sums.of.all.append(float(x.mean()))
        recent = float(np.tanh(sum(self.sums.of.all[-2:])))
        x = x + 0.1 * (self.sums.of.count % 3 + recent)
        return super().forward(x)


class RemembersEach(Block):
    def __init__(self):
        super().__init__()
        self.memories = [Memory(), Memory()]
        self.recent = collections.deque(maxlen=2)
        self.sums = np.zeros(2)

    def forward(self, x):
        for memory in self.memories:
            memory.keep(x.detach())
        self.recent.append(float(x.detach().mean()))
        self.sums[1] += self.recent[-1]
        x = super().forward(x) + 0.1 * sum(self.recent)
        x = x + 0.1 * float(np.tanh(self.sums[1]))
        return x + 0.1 * self.memories[1].read()


class Changes(Block):
    """Changes the attribute of a module in it."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.a.factor = 1.0

    def forward(self, x):
        self.calls += 1
        self.a.factor = 1.0 + (self.a.factor + 0.1) % 0.3
        return super().forward(x) * self.a.factor


class Draws(Block):
    """Has generators of its own."""

    def __init__(self):
        super().__init__()
        self.generators = [
            np.random.default_rng(0),
            np.random.RandomState(0),
            random.Random(0),
        ]
        self.torch = torch.Generator().manual_seed(0)

    def forward(self, x):
        drawn = sum(g.random() for g in self.generators[::2])
        drawn += self.generators[1].rand() + torch.rand(
            (), generator=self.torch
        )
        return super().forward(x) * (1 + 0.1 * drawn)


KEEPING = Counts, Logs, Replaces, Remembers, RemembersInside, RemembersEach
KEEPING += Changes, Draws


@case
def whatever_keeps_state():
    for block in KEEPING:
        model = compare(Net(block), samples, loss_of)
        if block is Remembers:
            assert "'memory." in model.order_text(), model.order_text()
        del model  # a session has one at a time


def checkpoint(blocks):
    return lambda model: [
        smp.set_activation_checkpointing(model.module.h[i]) for i in blocks
    ]


@case
def whatever_keeps_state_is_computed_again():
    for block in KEEPING:
        compare(Net(block), samples, loss_of, prepare=checkpoint(range(4)))


class Pyramid(nn.Module):
    """Keeps something until its children on another rank have answered."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(32, 5)
        self.memory = Memory()

    def forward(self, x):
        self.memory.keep(x)
        for block in self.h:
            x = block(x)
        return self.head(x + self.memory.read())


@case
def an_object_that_the_model_itself_keeps():
    compare(Pyramid(), samples, loss_of, pins=HALVES, anywhere=False)


class Noting(Block):
    """Several have the same object."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def forward(self, x):
        self.memory.keep(x.detach())
        return super().forward(x) + 0.1 * self.memory.read()


class Shares(Net):
    def __init__(self, of):
        super().__init__()
        memory = Memory()
        for i in range(3):
            self.h[i] = Noting(of(memory))


@case
def an_object_that_several_modules_keep():
    text = "the object '{}' of 'h.0', which 'h.1' has, too, changes"

    def train(of, pins):
        return compare(Shares(of), samples, loss_of, pins=pins, anywhere=False)

    together = {"h.0": 0, "h.1": 0, "h.2": 0, "h.3": 1, "head": 1}
    for of, name in (lambda x: x, "memory"), (Keeper, "memory.memory"):
        expect(smp.Error, text.format(name), lambda: train(of, TURNS))
        model = train(of, together)  # as the error says
        assert "one after the other" in model.order_text(), model.order_text()
        del model


class Options:
    def __init__(self):
        self.kind = None
        self.scale = 0.5


class Body(Net):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def forward(self, x):
        return super().forward(x) * self.options.scale


class Decides(nn.Module):
    """Writes into the options that its body has, too, as classifiers of
    transformers do."""

    def __init__(self):
        super().__init__()
        self.options = Options()
        self.body = Body(self.options)

    def forward(self, x):
        if self.options.kind is None:
            self.options.kind = "one"
        return self.body(x) * len(self.options.kind)


@case
def options_that_several_modules_have():
    pins = {"body": 1}
    net = Decides()
    model = compare(net, samples, loss_of, pins=pins, anywhere=False)
    assert net.options.kind == "one"  # on all ranks
    assert not model.order_text(), model.order_text()


@case
def state_that_begins_late_in_what_is_computed_again():
    def train():
        compare(
            Net(Late), samples, loss_of, steps=4, prepare=checkpoint([0, 3])
        )

    if not smp._state.options.get("fast_mode"):
        train()
        return
    text = "it must then be left out of activation checkpointing"
    expect(smp.Error, text, train)  # steps are not run again

    def declared(model):  # as the error says
        checkpoint([0, 3])(model)
        for i in (1, 2):
            smp.set_stateful(model.module.h[i], "begins to count")

    net = Net()
    net.h[1], net.h[2] = Late(), Late()
    compare(net, samples, loss_of, steps=4, prepare=declared)


@case
def declared_state_is_not_computed_again():
    def prepare(model):
        checkpoint([0])(model)
        smp.set_stateful(model.module.h[0], "keeps a file")

    expect(
        smp.Error,
        "'h.0' has state that smp cannot put back",
        lambda: compare(Net(), samples, loss_of, prepare=prepare),
    )


@case
def an_attribute_that_changes_later():
    def train():
        return compare(Net(Late), samples, loss_of, pins=HALVES, steps=4)

    if smp._state.options.get("fast_mode"):  # steps are not run again
        expect(smp.Error, "sets its attribute 'factor'", train)
        return
    model = train()
    assert "factor" in model.order_text(), model.order_text()


@case
def an_attribute_set_before_anything_is_traced():
    def later(model):
        with torch.no_grad():
            model.partition()

    def train():
        return compare(Net(Counts), samples, loss_of, prepare=later)

    if smp._state.options.get("fast_mode"):
        expect(smp.Error, "smp.set_stateful(module, why)", train)
        declare = lambda model: [
            smp.set_stateful(block, "counts its calls")
            for block in model.module.h
        ]
        compare(Net(Counts), samples, loss_of, prepare=declare)
        return
    model = train()
    assert "calls" in model.order_text(), model.order_text()


class Measured(nn.Module):
    """Leaves a loss and a count on itself."""

    def __init__(self, loss):
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.loss = loss
        self.scale = 1.0
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.a(x) * self.scale
        self.loss = x.pow(2).mean()
        return x

    def halved(self, x):
        return 0.5 * self.loss * x


class Around(nn.Module):
    def __init__(self, use, loss=None):
        super().__init__()
        torch.manual_seed(0)
        self.c = Measured(loss)
        self.head = nn.Linear(32, 5)
        self.use = use

    def forward(self, x):
        return self.head(self.use(self.c, x))


def _set(name):
    def use(c, x):
        setattr(c, name, 1.0 + getattr(use, "n", 0))
        use.n = 1.0
        return c(x)

    return use


@case
def attributes_of_a_module_of_another_rank():
    loss = "attribute 'loss' of 'c' changes as it runs, on pp_rank 1"
    for use, first, text in (
        (lambda c, x: c(x) + 0.1 * c.loss, None, loss),
        (lambda c, x: c(x) + c.loss * 0.1, torch.zeros(()), loss),
        (lambda c, x: torch.stack([c(x)[0], c.loss + x[0]]), None, loss),
        (lambda c, x: torch.add(c(x), c.loss), None, loss),
        (lambda c, x: c.halved(c(x)), None, loss),
        (lambda c, x: c(x) / (1 + c.calls), None, "attribute 'calls' of 'c'"),
        (_set("scale"), None, "attribute 'scale' of 'c' was set here"),
    ):
        expect(
            smp.Error,
            text,
            lambda: compare(
                Around(use, first),
                samples,
                loss_of,
                pins={"c": 1},
                anywhere=False,
            ),
        )

    class Returns(Measured):  # as the error says
        def forward(self, x):
            x = super().forward(x)
            return x, self.loss

    def use(c, x):
        x, loss = c(x)
        return x + 0.1 * loss

    net = Around(use)
    net.c = Returns(None)
    compare(net, samples, loss_of, pins={"c": 1})


@case
def attributes_of_a_model_that_has_ended():
    net = Net(Counts)
    model = compare(net, samples, loss_of)
    elsewhere = [b for i, b in enumerate(net.h) if not own(model, f"h.{i}")]
    assert all("changes as it runs" in repr(b.calls) for b in elsewhere)
    model._end()
    assert all(b.calls == 0 for b in elsewhere)


if __name__ == "__main__":
    run(
        ranks(2),
        ranks(2, static_mode=True, fast_mode=True, steps=9),
        ranks(2, verify=True),
    )

# ctest: seconds=25 label=multiprocess
"""State that Python modules keep, on two ranks and in one process."""

import torch
import torch.nn as nn

import harness
import smp
from harness import (
    HALVES,
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


@case
def a_buffer_that_code_replaces():
    class Means(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(32))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return super().forward(x - self.mean)

    compare(Net(Means), samples, loss_of)


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


@case
def a_list_that_code_fills():
    class Logs(Block):
        def __init__(self):
            super().__init__()
            self.log = []

        def forward(self, x):
            self.log.append(float(len(self.log)))
            return super().forward(x) * (1 + 0.1 * (sum(self.log) % 5))

    compare(Net(Logs), samples, loss_of)


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


@case
def state_that_backward_cannot_put_back():
    def mark(blocks):
        return lambda model: [
            smp.set_activation_checkpointing(model.module.h[i]) for i in blocks
        ]

    for block, text in (
        (Counts, "'h.0' has state that smp cannot put back"),
        (Late, "computed again in backward"),
    ):
        expect(
            smp.Error,
            text,
            lambda: compare(
                Net(block), samples, loss_of, steps=4, prepare=mark([0, 3])
            ),
        )
    if not smp._state.options.get("fast_mode"):  # as the error says
        net = Net()
        net.h[1] = Late()
        compare(net, samples, loss_of, steps=4, prepare=mark([0, 3]))


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

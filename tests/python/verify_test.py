# ctest: seconds=20 label=multiprocess
"""smp.verify: a step over the ranks against one process."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import smp
from harness import (
    Block,
    Net,
    case,
    expect,
    loss_of,
    make_step,
    own_part,
    ranks,
    run,
    samples,
    start_model,
)


class Rich(Block):
    """Draws numbers, and keeps state in a buffer and in attributes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(float(self.calls))
        x = super().forward(F.dropout(x, 0.1, self.training))
        return self.norm(x) * (1 + 0.01 * len(self.seen) + 0.01 * self.calls)


class Sliced(Net):
    def forward(self, x):
        for block in self.h[:3]:  # makes a ModuleList
            x = block(x)
        return self.head(x)


def tied():
    net = Net()
    net.h[3].a.weight = net.h[0].a.weight
    return net


def train_with_a_look(net):
    model = start_model(net)
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    train_step = make_step(model)
    for i in range(4):
        optimizer.zero_grad()
        batch = own_part(samples(i, 32))
        # At the first step, and later; and one that nobody looks at.
        out = train_step(batch) if i == 2 else smp.verify(train_step, batch)
        assert 0 < out.reduce_mean().item() < 10, out
        optimizer.step()


@case
def steps_of_training():
    for net in Net(), Net(Rich), Sliced(), tied():
        train_with_a_look(net)


@case
def gradients_that_add_up():
    model = start_model(Net())
    train_step = make_step(model)
    for i in range(3):
        smp.verify(train_step, own_part(samples(i)))


@case
def evaluation():
    model = start_model(Net(Rich))
    model.eval()

    @smp.step
    def evaluate(batch):
        return {"out": model(batch["x"]), "loss": loss_of(model, batch)}

    for i in range(2):
        with torch.no_grad():
            found = smp.verify(evaluate, own_part(samples(i)))
        assert found["out"].concat().shape[1] == 5


@case
def a_module_that_differs_is_named():
    class Differs(Block):
        def forward(self, x):
            y = super().forward(x)
            return y + (1e-3 if there and torch.is_grad_enabled() else 0)

    # The single process runs on the first rank.
    there = smp.pp_rank() == 1
    net = Net()
    net.h[2] = Differs()
    model = start_model(net)
    train_step = make_step(model)
    for i in range(2):
        e = expect(
            smp.Error,
            "the first: step",
            lambda: smp.verify(train_step, own_part(samples(i))),
        )
        assert "module 'h.2', rank 1: result 0" in str(e), e


@case
def a_gradient_that_differs_is_named():
    there = smp.pp_rank() == 1

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * (1.01 if there else 1.0)

    class Differs(Block):
        def forward(self, x):
            return super().forward(Scaled.apply(x))

    net = Net()
    net.h[3] = Differs()
    model = start_model(net)
    train_step = make_step(model)
    e = expect(
        smp.Error,
        "different",
        lambda: smp.verify(train_step, own_part(samples(0))),
    )
    assert "gradient" in str(e) and "module 'h.2'" in str(e), e


class Uncopied:
    def __deepcopy__(self, memo):
        raise TypeError("not twice")


@case
def what_cannot_be_compared_is_said():
    net = Net()
    model = start_model(net)
    expect(smp.Error, "made by @smp.step", lambda: smp.verify(model, 1))

    @smp.step
    def around(batch):  # not through the DistributedModel
        loss = F.cross_entropy(net(batch["x"]), batch["y"])
        model.backward(loss)
        return loss

    e = expect(
        smp.Error,
        "the single process failed",
        lambda: smp.verify(around, own_part(samples(0))),
    )
    assert "smp.DistributedModel" in str(e), e
    net.h[0].odd = Uncopied()
    expect(
        smp.Error,
        "the model cannot be copied: not twice",
        lambda: smp.verify(make_step(model), own_part(samples(0))),
    )
    del net.h[0].odd
    # The session goes on.
    smp.verify(make_step(model), own_part(samples(0)))


if __name__ == "__main__":
    run(
        ranks(2),
        ranks(2, static_mode=True, fast_mode=True),
        ranks(4, "steps_of_training", ddp=True),
    )

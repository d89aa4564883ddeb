# ctest: seconds=30 label=multiprocess
"""Modules that ranks share by classes of the program: smp.tp_register."""

import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

import smp
from harness import (
    case,
    compare,
    expect,
    loss_of,
    make_step,
    own_part,
    ranks,
    run,
    samples,
)


class Mlp(nn.Module):
    def __init__(self, width, hidden=64, eps=0.5):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x, *, gain):
        h = F.gelu(self.up(self.norm(x)))
        return {"out": self.scale * self.down(h) * gain}


class ParallelMlp(nn.Module):
    """Columns of the first weight and rows of the second."""

    def __init__(self, hidden, width, eps):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.up = nn.Linear(width, hidden // smp.tp_size())
        self.down = nn.Linear(hidden // smp.tp_size(), width)
        self.register_buffer("scale", torch.zeros(width))

    def gather(self, x):
        return smp.nn.fused_allgather_for_tp(x, 0)

    def reduce(self, x):
        return smp.nn.reduce_scatter_for_tp(x, 0)

    def forward(self, x, gain):
        h = F.gelu(self.up(self.gather(self.norm(x))))
        y = self.reduce(F.linear(h, self.down.weight))
        return self.scale * (y + self.down.bias) * gain


class MegatronMlp(ParallelMlp):
    """For ranks that have the same samples."""

    scaled_batch = False

    def gather(self, x):
        return smp.nn.bwd_allreduce_for_tp(x)

    def reduce(self, x):
        return smp.nn.fwd_allreduce_for_tp(x)


class ExchangingMlp(ParallelMlp):
    """Each rank has some columns of all samples, then all of its own."""

    def forward(self, x, gain):
        h = F.gelu(self.up(self.gather(self.norm(x))))
        h = smp.nn.scatter_and_merge_for_tp(h, 0, 1)
        weight = smp.nn.fused_allgather_for_tp(self.down.weight, 1)
        return self.scale * F.linear(h, weight, self.down.bias) * gain


class NarrowMlp(MegatronMlp):
    """With what is the same on all ranks."""

    def forward(self, x, gain):
        h = F.gelu(self.up(self.gather(self.norm(x))))
        h = smp.nn.narrow_for_tp(smp.nn.merge_for_tp(h, -1), -1)
        y = self.reduce(F.linear(h, self.down.weight))
        return self.scale * (y + self.down.bias) * gain


class Net(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        with smp.tensor_parallelism():
            self.h = nn.ModuleList([Mlp(32), Mlp(32, hidden=32, **sizes)])
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.first(x)
        for i, block in enumerate(self.h):
            x = x + block(x, gain=1.0 + i)["out"]
        return self.head(x)


PLACES = {"first": 0, "h.0": 0, "h.1": 1, "head": 1}


def register(kind):
    smp.tp_register_with_module(
        Mlp,
        kind,
        lambda width, hidden=64, eps=0.5: ((hidden, width), {"eps": eps}),
        lambda x, gain: ((x,), {"gain": gain}),
        lambda x: {"out": x},
    )


def same_samples():
    return smp.data_size() < smp.dp_size()


def held(model):
    return {n: list(x.shape) for n, x in model.local_named_parameters()}


@case
def classes_of_the_program():
    kinds = [ParallelMlp, ExchangingMlp]
    if same_samples():
        kinds += [MegatronMlp, NarrowMlp]
    for kind in kinds:
        register(kind)
        with smp.delay_param_initialization(kind is ParallelMlp):
            net = Net()
        model = compare(
            net, samples, loss_of, pins=PLACES, within=1e-5, alone=Net()
        )
        shapes = held(model)
        assert shapes.get("h.0.up.weight", [32, 32]) == [32, 32], shapes
        assert shapes.get("h.1.down.weight", [32, 16]) == [32, 16], shapes
        assert shapes.get("h.1.down.bias", [32]) == [32], shapes
        assert model.state_dict()["h.0.up.weight"].shape == (64, 32)
        if smp.rank() == 0:
            text = model.partition_text()
            assert f"{kind.__name__} shared by 2 ranks: h.0, h.1" in text, text
        step = make_step(model)
        smp.verify(step, own_part(samples(7)))
        del net, model, step


def trained(model, steps):
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    step = make_step(model)

    def run(numbers):
        for i in numbers:
            optimizer.zero_grad()
            step(own_part(samples(i)))
            optimizer.step()

    run(steps)
    return optimizer, run


@case
def their_checkpoints():
    register(ParallelMlp)
    folder = smp.broadcast(tempfile.mkdtemp())
    model = smp.DistributedModel(Net())
    optimizer, go_on = trained(model, range(2))
    smp.save_checkpoint(folder, model=model, optimizer=optimizer)
    middle = model.state_dict()
    go_on(range(2, 4))
    last = model.state_dict()
    del model, optimizer, go_on
    model = smp.DistributedModel(Net())
    optimizer, go_on = trained(model, range(4, 5))
    model.load_state_dict(middle)
    assert largest(model.state_dict(), middle) == 0
    go_on(range(5, 6))
    del model, optimizer, go_on
    model = smp.DistributedModel(Net())
    optimizer, go_on = trained(model, ())
    smp.resume_from_checkpoint(folder, model, optimizer)
    go_on(range(2, 4))
    assert largest(model.state_dict(), last) < 1e-6


def largest(xs, ys):
    assert xs.keys() == ys.keys()
    return max((xs[n] - ys[n]).abs().max().item() for n in xs)


# -- what is not shared, and computes as before -----------------------------------


class OtherNames(ParallelMlp):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.more = nn.Parameter(torch.zeros(1))


class OtherBuffers(ParallelMlp):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("seen", torch.zeros(1))


class OtherSizes(ParallelMlp):
    def __init__(self, hidden, width, eps):
        super().__init__(hidden - 2, width, eps)


class Late(Mlp):
    pass


def replaced_forward(net):
    net.h[0].up.forward = lambda x: F.linear(x, net.h[0].up.weight) * 1.0


def with_hook(net):
    net.h[0].register_forward_hook(lambda m, args, out: out)


def of_late_class(net):
    with smp.tensor_parallelism():
        net.h[0] = Late(32)
    smp.tp_register(Late)(ParallelMlp)


@case
def what_ranks_do_not_share():
    def unchanged(net):
        pass

    for kind, prepare, why in (
        (ParallelMlp, with_hook, "it has hooks"),
        (ParallelMlp, replaced_forward, "'up' in it: its forward was replaced"),
        (ParallelMlp, of_late_class, "it was made before smp.tp_register"),
        (OtherNames, unchanged, "only OtherNames has a parameter 'more'"),
        (OtherBuffers, unchanged, "only OtherBuffers has a buffer 'seen'"),
        (OtherSizes, unchanged, "its 'up.weight' is [64, 32], and [31, 32] in"),
        (MegatronMlp, unchanged, "MegatronMlp.scaled_batch is False"),
    ):
        if kind is MegatronMlp and same_samples():
            continue
        register(kind)
        net = Net()
        prepare(net)
        model = smp.DistributedModel(net)
        make_step(model)(own_part(samples(0)))
        if smp.rank() == 0:
            text = model.partition_text()
            assert f"{kind.__name__} not shared, as {why}" in text, (why, text)
        del model
    smp.tp_register_with_module(Mlp, ParallelMlp, lambda *_, **__: None)
    model = smp.DistributedModel(Net())
    make_step(model)(own_part(samples(0)))
    if smp.rank() == 0:
        assert "the init_hook of its class says so" in model.partition_text()


class Counting(ParallelMlp):
    calls = 0

    def forward(self, x, gain):
        self.calls = self.calls + 1
        return super().forward(x, gain)


class Replacing(ParallelMlp):
    def forward(self, x, gain):
        self.scale = self.scale.clone()
        return super().forward(x, gain)


@case
def what_is_refused():
    for kind, why in (
        (Counting, "Counting makes its attribute 'calls'"),
        (Replacing, "Replacing replaces its buffer 'scale'"),
    ):
        register(kind)
        model = smp.DistributedModel(Net())
        step = make_step(model)
        expect(smp.Error, why, lambda: step(own_part(samples(0))))
        del model, step

    def broken(width, **_):
        raise ValueError("no such width")

    smp.tp_register(Mlp, broken)(ParallelMlp)
    model = smp.DistributedModel(Net())
    step = make_step(model)
    expect(smp.Error, "no such width", lambda: step(own_part(samples(0))))
    expect(smp.Error, "takes classes of", lambda: smp.tp_register(Mlp(32))(Mlp))
    expect(
        smp.Error, "has no forward", lambda: smp.tp_register(nn.ModuleList)(Mlp)
    )
    expect(
        smp.Error,
        "outside of a step",
        lambda: smp.nn.fwd_allreduce_for_tp(torch.ones(1)),
    )
    expect(AttributeError, "tp_register", lambda: smp.nn.DistributedLinear)


if __name__ == "__main__":
    shared = {"ddp": True, "tensor_parallel_degree": 2}
    run(
        ranks(4, **shared),
        ranks(
            2,
            **shared,
            pipeline_parallel_degree=1,
            prescaled_batch=True,
            **{"activation_checkpointing.modules": "['h.*']"},
        ),
    )

# ctest: seconds=60 label=multiprocess
"""Optimizers, half precision, replicas, shared modules and checkpoints."""

import os
import shutil
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

import smp
from harness import (
    TURNS,
    Net,
    case,
    compare,
    expect,
    largest_difference,
    loss_of,
    make_step,
    own_part,
    place,
    ranks,
    run,
    samples,
    train_alone,
)

# What tensor-parallel ranks are tried with.
SHARED = "modules_that_ranks_share", "checkpoints", "clipping"


def adamw(ps):
    return torch.optim.AdamW(ps, lr=0.01)


@case
def optimizers_of_torch():
    of = torch.optim
    for make in (
        lambda ps: of.SGD(ps, lr=0.05, momentum=0.9, nesterov=True),
        adamw,
        lambda ps: of.Adam(ps, lr=0.01, amsgrad=True),
        lambda ps: of.Adagrad(ps, lr=0.05, initial_accumulator_value=0.1),
        # It divides by the difference of two averages, which rounding makes.
        lambda ps: of.RMSprop(ps, 0.01, eps=1e-3, momentum=0.5, centered=True),
        lambda ps: of.NAdam(ps, lr=0.01),
    ):
        compare(Net(), samples, loss_of, make=make, steps=4, within=1e-5)


@case
def groups_and_schedules():
    def make(ps):
        ps = list(ps)
        return torch.optim.AdamW(
            [
                {"params": ps[:5], "lr": 0.02},
                {"params": ps[5:], "weight_decay": 0.1},
            ],
            lr=0.01,
        )

    compare(Net(), samples, loss_of, make=make)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] < 0.01


@case
def clipping():
    net = Net()
    model = smp.DistributedModel(net)
    alone = Net()
    make_step(model)(own_part(samples(0)))
    norm = smp.clip_grad_norm_(model, 0.01).item()
    train_alone(
        alone,
        samples,
        loss_of,
        torch.optim.SGD(alone.parameters(), lr=0.0),
        1,
        4 * smp.data_size(),
    )
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.01).item()
    assert abs(norm - expected) < 1e-5, (norm, expected)
    for name, p in alone.named_parameters():
        gradient = model.gradients()[name]
        assert torch.allclose(gradient, p.grad, atol=1e-7), name

    def clip_values():
        nn.utils.clip_grad_value_(model.parameters(), 1e-4)

    if smp._core.shards_gradients():
        return expect(smp.Error, "leave shard_gradients out", clip_values)
    clip_values()
    largest = max(x.abs().max() for x in model.gradients().values())
    assert largest == torch.tensor(1e-4), largest


@case
def a_loss_scale_that_finds_itself():
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(
        adamw(model.parameters()),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 4096, "scale_factor": 4},
    )
    expect(
        smp.Error,
        "unknown 'window'; it may have",
        lambda: smp.DistributedOptimizer(
            adamw(model.parameters()), dynamic_loss_args={"window": 3}
        ),
    )
    step = make_step(model)
    assert optimizer.loss_scale == 4096
    step(own_part(samples(0)))
    assert optimizer.step() is True
    optimizer.zero_grad()
    bad = own_part(samples(1))
    bad["x"] = torch.full_like(bad["x"], float("inf"))
    step(bad)
    assert optimizer.step() is False
    assert optimizer.loss_scale == 1024


@case
def an_optimizer_of_another_model_is_refused():
    other = Net()
    model = smp.DistributedModel(Net())
    expect(
        smp.Error,
        "not a parameter of the DistributedModel",
        lambda: smp.DistributedOptimizer(adamw(other.parameters())),
    )
    alone = adamw(model.parameters())
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()))
    expect(
        smp.Error, "before", lambda: optimizer.add_param_group({"params": []})
    )
    make_step(model)(own_part(samples(0)))
    expect(smp.Error, "AdamW.step() of parameters of the", alone.step)
    optimizer.step()
    adamw(other.parameters()).step()


@case
def values_between_ranks():
    me = smp.rank()
    assert (
        smp.allgather({"rank": me, "t": torch.tensor([me])})[1]["t"].item() == 1
    )
    assert smp.broadcast((me, "x"), smp.CommGroup.WORLD, 1) == (1, "x")
    if me == 0:
        smp.send(
            [1, torch.ones(3)], dest_rank=1, rank_type=smp.RankType.WORLD_RANK
        )
    elif me == 1:
        x = smp.recv_from(src_rank=0)
        assert x[0] == 1 and torch.equal(x[1], torch.ones(3))
    assert smp.get_group("world") == list(range(smp.size()))


def with_folder(f):
    path = tempfile.mkdtemp() if smp.rank() == 0 else None
    path = smp.broadcast(path)
    try:
        return f(path)
    finally:
        smp.barrier()
        if smp.rank() == 0:
            shutil.rmtree(path, ignore_errors=True)


def checkpoint_with(make, net=Net, within=2e-6):
    def run(path):
        alone = net()
        other = make(alone.parameters())
        model = smp.DistributedModel(net())
        optimizer = smp.DistributedOptimizer(make(model.parameters()))
        step = make_step(model)
        for i in range(2):
            optimizer.zero_grad()
            step(own_part(samples(i)))
            optimizer.step()
        folder = smp.save_checkpoint(
            path,
            model=model,
            optimizer=optimizer,
            user_content={"epoch": [1, 2.5]},
        )
        assert folder.endswith("-2") or folder.endswith("2"), folder
        whole = os.path.join(path, "whole.safetensors")
        smp.save_checkpoint(whole, partial=False, model=model)
        if smp.rank() == 0:
            assert os.path.getsize(whole) > 0
        del model, optimizer, step
        torch.manual_seed(5)
        model = smp.DistributedModel(net())
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        optimizer = smp.DistributedOptimizer(make(model.parameters()))
        found = smp.resume_from_checkpoint(path, model, optimizer)
        assert found["epoch"] == [1, 2.5] and found["step"] == 2, found
        step = make_step(model)
        optimizer.zero_grad()
        step(own_part(samples(2)))
        optimizer.step()
        parts = 4 * smp.data_size()
        train_alone(alone, samples, loss_of, other, 3, parts)
        moved = largest_difference(model.state_dict(), alone)
        assert moved <= 20 * within, moved
        assert (
            smp.resume_from_checkpoint(tempfile.gettempdir() + "/none-here")
            is None
        )

    with_folder(run)


@case
def goes_on_with_other_ranks():
    """From the checkpoint of the variant of this file that ran before, whatever
    ranks that had."""
    path = os.environ.get("SMP_TEST_FOLDER")
    if path is None:
        return
    net, alone = Net(), Net()
    turned = smp.size() // 2
    place(net, {path: rank + turned for path, rank in TURNS.items()})
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()))
    found = smp.resume_from_checkpoint(path, model, optimizer)
    assert found or smp.size() == 2
    done = found["step"] if found else 0
    make_step(model)(own_part(samples(done)))
    optimizer.step()
    train_alone(alone, samples, loss_of, adamw(alone.parameters()), done + 1)
    moved = largest_difference(model.state_dict(), alone)
    assert moved <= 4e-5, (done, moved)
    smp.save_checkpoint(path, model=model, optimizer=optimizer)
    if smp.rank() == 0:
        print(f"went on from step {done}", flush=True)


@case
def checkpoints():
    checkpoint_with(adamw)
    checkpoint_with(lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9))
    checkpoint_with(lambda ps: torch.optim.Adagrad(ps, lr=0.05))
    checkpoint_with(OwnOptimizer)
    checkpoint_with(DerivedOptimizer)


class OwnOptimizer(torch.optim.Optimizer):
    """Whose state smp knows only once it exists."""

    def __init__(self, ps):
        super().__init__(ps, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(n=0, mean=torch.zeros_like(p))
                state["n"] += 1
                assert isinstance(state["n"], int)
                state["mean"].mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] / state["n"] * state["mean"])


class DerivedOptimizer(torch.optim.Adam):
    pass


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.EmbeddingBag(16, 5, sparse=True)
        self.b = nn.Embedding(16, 5, sparse=True)

    def forward(self, x):
        ids = (x.clamp(-1, 0.9) * 8).long() + 8
        return self.a(ids) + self.b(ids).sum(1)


@case
def an_optimizer_of_sparse_gradients():
    def make(ps):
        return torch.optim.SparseAdam(ps, lr=0.01)

    compare(Tables(), samples, loss_of, make=make, pins={"a": 0, "b": 1})
    checkpoint_with(make, Tables)


@case
def the_state_of_an_optimizer():
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()))
    make_step(model)(own_part(samples(0)))
    optimizer.step()
    state = optimizer.state_dict()
    assert state["h.0.a.weight/exp_avg"].shape == (32, 32)
    assert state["head.bias/step"].item() == 1
    assert state.pop("param_groups")[0]["lr"] == 1e-2
    optimizer.load_state_dict({k: x * 0 + 3 for k, x in state.items()})
    again = optimizer.state_dict()
    assert again["h.0.a.weight/exp_avg"].eq(3).all()
    assert again["head.bias/step"].item() == 3


@case
def the_state_of_an_optimizer_of_ones_own():
    """Loaded before the partition: what it keeps does not exist yet."""

    def start():
        model = smp.DistributedModel(Net())
        optimizer = smp.DistributedOptimizer(OwnOptimizer(model.parameters()))
        return model, optimizer, make_step(model)

    def train(steps):
        for i in steps:
            optimizer.zero_grad()
            step(own_part(samples(i)))
            optimizer.step()

    model, optimizer, step = start()
    train(range(2))
    weights, state = model.state_dict(), optimizer.state_dict()
    assert state["h.0.a.weight/n"].item() == 2
    del model, optimizer, step
    model, optimizer, step = start()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert not model.partitioned
    train([2])
    assert optimizer.state_dict()["head.bias/n"].item() == 3
    alone = Net()
    other = OwnOptimizer(alone.parameters())
    train_alone(alone, samples, loss_of, other, 3, 4 * smp.data_size())
    moved = largest_difference(model.state_dict(), alone)
    assert moved <= 4e-5, moved


# What two ranks hold of the weights that they share.
HALVES = {
    "table.weight": ([16, 16], [8, 32]),
    "up.weight": ([32, 32], [64, 16]),
    "down.weight": ([16, 64], [32, 32]),
}


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 32, padding_idx=0)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32, eps=0.5)
        self.head = nn.Linear(32, 5)

    def forward(self, i, x):
        x = x + self.table(i)
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))


@case
def modules_that_ranks_share():
    if smp.tp_size() == 1:
        return

    def batch(i):
        g = torch.Generator().manual_seed(i)
        return {
            "i": torch.randint(0, 16, (16,), generator=g),
            "x": torch.randn(16, 32, generator=g),
            "y": torch.randint(0, 5, (16,), generator=g),
        }

    def mark(model):
        smp.set_tensor_parallelism(model.module)

    def loss_of(m, b):
        return F.cross_entropy(m(b["i"], b["x"]), b["y"])

    model = compare(Shared(), batch, loss_of, prepare=mark, within=1e-5)
    shapes = {n: list(x.shape) for n, x in model.local_named_parameters()}
    cut = sum(shapes.get(name) in halves for name, halves in HALVES.items())
    wanted = sum(name in shapes for name in HALVES)
    assert cut == wanted > 0, shapes
    assert model.state_dict()["up.weight"].shape == (64, 32)
    whole = Shared()
    whole.up.register_forward_hook(lambda m, a, out: out)
    del model
    smp.set_tensor_parallelism(whole)
    model = compare(whole, batch, loss_of, within=1e-5)
    shapes = {n: list(x.shape) for n, x in model.local_named_parameters()}
    assert shapes.get("up.weight", [64, 32]) == [64, 32], shapes


@case
def weights_in_half_precision():
    options = smp._state.options
    half = (
        torch.bfloat16
        if options.get("bf16_params")
        else torch.float16 if options.get("fp16_params") else None
    )
    if half is None:
        return
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()))
    step = make_step(model)
    first = None
    for i in range(20):
        optimizer.zero_grad()
        loss = step({"x": samples(0)["x"].to(half), "y": samples(0)["y"]})
        loss = loss.reduce_mean().item()
        first = first or loss
        optimizer.step()
    assert loss < 0.7 * first, (first, loss)
    assert all(p.dtype == half for p in model.local_parameters())
    masters = optimizer.param_groups[0]["params"]
    assert all(p.dtype == torch.float32 for p in masters)


if __name__ == "__main__":
    alone = {"ddp": True, "pipeline_parallel_degree": 1}
    folder = tempfile.TemporaryDirectory()
    os.environ.setdefault("SMP_TEST_FOLDER", folder.name)
    run(
        ranks(2),
        ranks(2, **alone, shard_optimizer_state=True),
        ranks(4, ddp=True, shard_optimizer_state=True, shard_gradients=True),
        ranks(4, *SHARED, ddp=True, tensor_parallel_degree=2),
        ranks(2, "weights_in_half_precision", bf16_params=True),
        ranks(2, "weights_in_half_precision", fp16_params=True),
    )

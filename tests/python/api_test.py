# ctest: seconds=30 label=multiprocess
"""The names of the withdrawn product's API that the other files do not use."""

import copy
import inspect
import os
import tempfile

import torch
from torch.nn.utils import clip_grad_norm_

import smp
from harness import (
    HALVES,
    Block,
    Net,
    case,
    expect,
    largest_difference,
    make_step,
    microbatches,
    own,
    own_part,
    place,
    ranks,
    run,
    samples,
)


class Overflow(torch.autograd.Function):
    """Multiplies the gradient of ``w`` only."""

    @staticmethod
    def forward(ctx, w, factor):
        ctx.factor = factor
        return w.view_as(w)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor.max(), None


class Overflows(Block):
    def forward(self, x, factor):
        w = Overflow.apply(self.a.weight, factor)
        return x + self.b(torch.nn.functional.linear(x, w, self.a.bias))


class Scaled(Net):
    """Its first block's gradient overflows where the batch says so."""

    def __init__(self):
        super().__init__()
        self.h[0] = Overflows()

    def forward(self, x, factor):
        x = self.h[0](x, factor)
        for block in self.h[1:]:
            x = block(x)
        return self.head(x)


def overflowing(i):
    found = samples(i)
    found["f"] = torch.full((16,), float("inf") if i in (2, 5) else 1.0)
    return found


def scaled_loss(net, batch):
    return torch.nn.functional.cross_entropy(
        net(batch["x"], batch["f"]), batch["y"]
    )


@case
def a_grad_scaler_decides_for_all_ranks():
    net = Scaled()
    alone = copy.deepcopy(net)
    place(net, HALVES)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05)
    )
    reference = torch.optim.SGD(alone.parameters(), lr=0.05)
    how = dict(init_scale=1000.0, growth_interval=2, backoff_factor=0.25)
    scaler = smp.amp.GradScaler(**how)
    theirs = torch.amp.GradScaler("cpu", **how)

    @smp.step
    def train_step(batch):
        loss = scaled_loss(model, batch)
        model.backward(scaler.scale(loss))
        return loss

    parts = 4 * smp.data_size()
    for i in range(8):
        clips = i % 2 == 1
        batch = overflowing(i)
        optimizer.zero_grad()
        train_step(own_part(batch))
        reference.zero_grad()
        for part in microbatches(batch, parts):
            theirs.scale(scaled_loss(alone, part) / parts).backward()
        if clips:
            scaler.unscale_(optimizer)
            norm = smp.clip_grad_norm_(model, 0.5)
            theirs.unscale_(reference)
            expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            if i != 5:
                assert abs(norm - expected) < 1e-5 * expected, (norm, expected)
        assert scaler.step(optimizer) is (i not in (2, 5))
        theirs.step(reference)
        scaler.update()
        theirs.update()
        assert scaler.get_scale() == theirs.get_scale(), (i, scaler.get_scale())
        moved = largest_difference(model.state_dict(), alone)
        assert moved < 2e-5, (i, moved)
    assert scaler.state_dict().keys() == theirs.state_dict().keys()
    again = smp.amp.GradScaler()
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == scaler.state_dict() == theirs.state_dict()


@case
def what_a_grad_scaler_refuses():
    model = smp.DistributedModel(Net())
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = smp.DistributedOptimizer(made, static_loss_scale=8.0)
    scaler = smp.amp.GradScaler()
    expect(smp.Error, "call step(optimizer)", scaler.update)
    expect(smp.Error, "SGD", lambda: scaler.step(made))
    expect(smp.Error, "enabled=False", lambda: scaler.step(optimizer))
    torchs = torch.amp.GradScaler("cpu")
    torchs.scale(torch.ones(1))
    expect(
        smp.Error, "write smp.amp.GradScaler", lambda: torchs.step(optimizer)
    )
    off = smp.amp.GradScaler(enabled=False)
    assert off.scale(1) == 1 and off.state_dict() == {} and off.get_scale() == 1


@case
def local_state_in_files_of_their_own():
    """A file for each rank, read by another partition, and one for all."""
    folder = smp.broadcast(tempfile.mkdtemp())
    name = os.path.join(folder, "checkpoint.pt")
    whole = os.path.join(folder, "whole.pt")
    expected = _trained(range(4))

    _trained(range(2), save=name, whole=whole, keep=True)
    smp.barrier()
    assert os.path.exists(f"{name}_{smp.mp_rank()}")
    turned = {path: 1 - rank for path, rank in HALVES.items()}
    for f, partial in ((name, True), (whole, False)):
        found = _trained(range(2, 4), turned, load=f, partial=partial)
        for n, x in expected.items():
            assert torch.allclose(x, found[n], 0, 1e-6), (n, x - found[n])
    if smp.rank() == 0:
        e = expect(smp.Error, "partial=False", lambda: smp.load(whole))
        assert "whole.pt_0" in str(e)


def _trained(steps, places=HALVES, save=None, whole=None, load=None, **how):
    net = Net()
    place(net, places)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    if load:
        found = smp.load(load, partial=how["partial"])
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    train_step = make_step(model)
    for i in steps:
        optimizer.zero_grad()
        train_step(own_part(samples(i)))
        if i == 1:  # a schedule would do it
            optimizer.param_groups[0]["lr"] = 0.03
        optimizer.step()
    if save:
        state = {
            "model": model.local_state_dict(),
            "optimizer": optimizer.local_state_dict(),
        }
        assert state["model"]["_smp_is_partial"]
        all_of_it = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        if smp.rdp_rank() == 0:
            smp.save(state, save)
        smp.save(all_of_it, whole, partial=False)
    return model.state_dict()


@case
def rows_of_one_replica_are_not_the_state():
    if smp.rdp_size() == 1:
        return
    net = Net()
    place(net, HALVES)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    make_step(model)(own_part(samples(0)))
    optimizer.step()
    part, whole = optimizer.local_state_dict(), optimizer.state_dict()
    divided = any(smp.allgather("_smp_is_divided" in part))
    assert divided == bool(smp._state.options.get("shard_optimizer_state"))
    if divided:
        expect(smp.Error, "rows", lambda: optimizer.load_state_dict(part))
    else:
        optimizer.load_state_dict(part)
    optimizer.load_state_dict(whole)


@case
def a_model_is_created_late_and_in_its_type():
    before = torch.get_default_dtype()
    with smp.model_creation(dtype=torch.float64):
        net = Net()
    assert torch.get_default_dtype() == before
    alone = Net().double()
    place(net, HALVES)
    model = smp.DistributedModel(net)

    def loss_of(model, batch):
        return torch.nn.functional.cross_entropy(
            model(batch["x"].double()), batch["y"]
        )

    make_step(model, loss_of)(own_part(samples(0)))
    found = model.state_dict()
    assert {x.dtype for x in found.values()} == {torch.float64}
    assert found.keys() == dict(alone.named_parameters()).keys()
    assert not torch.equal(found["h.0.a.weight"], found["h.1.a.weight"])
    expect(smp.Error, "optimize", lambda: _created(tensor_parallelism=1, x=2))


@case
def a_published_model_is_created_late():
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(64, 32, 32, 4, 2, attn_pdrop=0.0, resid_pdrop=0.0)
    config.embd_pdrop = 0.0
    with smp.delay_param_initialization():
        net = AutoModelForCausalLM.from_config(config)
    blocks = net.transformer.h
    blocks = {f"transformer.h.{i}": i // 2 for i in range(len(blocks))}
    place(net, blocks)
    model = smp.DistributedModel(net)
    ids = torch.arange(128).view(16, 8) % 64

    @smp.step
    def look(ids):
        return model(input_ids=ids, labels=ids).loss.detach()

    found = look(ids.chunk(smp.data_size())[smp.data_rank()]).reduce_mean()
    found = sum(smp.allgather(found.item())) / smp.size()
    alone = AutoModelForCausalLM.from_config(config)
    state = model.state_dict()
    assert state["lm_head.weight"] is not None
    alone.load_state_dict(state)
    expected = alone(input_ids=ids, labels=ids).loss.item()
    assert abs(found - expected) < 1e-5 * expected, (found, expected)


def _created(**options):
    with smp.model_creation(**options):
        pass


class Counted(Net):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(32)

    def forward(self, x):
        return super().forward(self.norm(x))


@case
def what_a_rank_owns_and_hooks():
    net = Counted()
    place(net, {**HALVES, "norm": 1})
    model = smp.DistributedModel(net)
    assert [n for n, _ in model.named_children()] == ["h", "head", "norm"]
    assert dict(model.named_modules())["h.0.a"] is net.h[0].a
    traced, told = [], []

    def hook(model, optimizer):
        assert model.partitioned and optimizer is not None
        told.append(len(list(model.local_parameters())))

    model.register_post_partition_hook(hook)
    model.register_post_partition_hook(hook).remove()
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1)
    )
    net.head.register_forward_pre_hook(
        lambda *_: traced.append(smp.is_tracing())
    )
    make_step(model)(own_part(samples(0)))
    assert told == [len(list(model.local_named_parameters()))]
    assert not smp.is_tracing() and (smp.rank() > 0 or traced[0])
    names = dict(model.local_named_modules())
    assert list(names.values()) == list(model.local_modules())
    assert ("norm" in names) == own(model, "norm")
    buffers = dict(model.local_named_buffers())
    assert len(buffers) == (3 if "norm" in names else 0), buffers
    assert len(list(model.local_buffers())) == len(buffers)
    assert torch.nn.ModuleList([model]).to("cpu")[0] is model
    expect(smp.Error, "convert the module before", model.half)
    assert model.gradients()
    model.zero_grad()
    assert not model.gradients()
    assert smp.get_mp_group() == smp.get_group(smp.MP_GROUP)
    assert smp.rank() in smp.get_dp_group()
    assert smp.DP_GROUP is smp.CommGroup.DP_GROUP and smp.WORLD == "world"
    del optimizer


class Unsaved(Net):
    """With a buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        table = torch.linspace(1.0, 2.0, 32)
        self.h[2].register_buffer("table", table, persistent=False)

    def forward(self, x):
        return super().forward(x * self.h[2].table)


@case
def buffers_that_no_state_dict_has_keep_their_values():
    expected = None
    for late in (False, True):
        with smp.delay_param_initialization(late):
            net = Unsaved()
        place(net, HALVES)
        model = smp.DistributedModel(net)
        if late:
            model.load_state_dict(expected[1])
        before = make_step(model)(own_part(samples(0))).reduce_mean()
        state = model.state_dict()
        assert "h.2.table" not in state
        model.load_state_dict({**state, "_smp_is_partial": False})
        after = make_step(model)(own_part(samples(0))).reduce_mean()
        assert before == after, (before, after)
        assert expected is None or before == expected[0], (before, expected[0])
        expected = before, state
        del model


@case
def torch_clips_all_of_the_model_or_nothing():
    net = Net()
    place(net, HALVES)
    model = smp.DistributedModel(net)
    make_step(model)(own_part(samples(0)))
    clip = clip_grad_norm_  # as many programs import it
    other = torch.nn.Linear(2, 2)
    for parts, norm_type in (
        (model.parameters(), 1),
        (list(model.parameters())[:3], 2),
        ([*model.parameters(), *other.parameters()], 2),
    ):
        expect(smp.Error, "2-norm", lambda: clip(parts, 1.0, norm_type))

    def squares():
        return sum(x.pow(2).sum() for x in model.gradients().values())

    for limit, xs in (
        (0.02, model.parameters()),
        (0.01, [p for p in model.parameters() if p.requires_grad]),
    ):
        norm = clip(xs, limit)
        assert norm > 1.9 * limit, (norm, limit)
        assert abs(squares().sqrt() - limit) < 1e-4, (squares(), limit)
    assert clip is torch.nn.utils.clip_grad_norm_
    other(torch.ones(2, 2)).sum().backward()
    assert clip(other.parameters(), 1.0) > 1


class Pair:
    """Divides itself; one value is not divided."""

    def __init__(self, x, whole):
        self.x, self.whole = x, whole

    def smp_slice(self, parts, index, axis):
        size = self.x.shape[axis] // parts
        return Pair(self.x.narrow(axis, index * size, size), self.whole)


@case
def arguments_that_divide_themselves():
    @smp.step(microbatches=2, input_split_axes={"b": 1})
    def look(pair, b):
        assert pair.x.shape == (2, 3) and pair.whole.shape == (5,)
        assert b[0].x.shape == (4, 1)
        return pair.x.sum()

    one = Pair(torch.arange(12.0).reshape(4, 3), torch.ones(5))
    out = look(one, [Pair(torch.ones(4, 2), None)])
    assert out.reduce_sum().item() == 66 and out[0].item() == 15


def _check_signature(name, function):
    signature = inspect.signature(function)
    given = [p for p in signature.parameters.values() if p.name != "self"]
    missing = [p.name for p in given if p.annotation is p.empty]
    assert not missing, f"{name}: no types of {missing}"
    assert signature.return_annotation is not signature.empty, name


def _check_class(name, kind):
    for part, x in vars(kind).items():
        if part.startswith("_") and part != "__init__":
            continue
        x = x.fget if isinstance(x, property) else x
        if inspect.isfunction(x):
            _check_signature(f"{name}.{part}", x)
            # Else those above it have one.
            assert inspect.getdoc(getattr(kind, part)), f"{name}.{part}"


@case
def public_names_have_types_and_a_text():
    names = {f"smp.{name}": getattr(smp, name) for name in smp.__all__}
    for inner in (smp.amp, smp.nn):
        for name, x in vars(inner).items():
            if getattr(x, "__module__", None) == inner.__name__:
                if not name.startswith("_"):
                    names[f"{inner.__name__}.{name}"] = x
    assert "smp.nn.merge_for_tp" in names and "smp.amp.GradScaler" in names
    for name, x in names.items():
        assert inspect.getdoc(x), f"{name}: no docstring"
        if inspect.isclass(x):
            _check_class(name, x)
        elif callable(x):
            _check_signature(name, x)
    folder = os.path.dirname(smp.__file__)
    assert os.path.exists(os.path.join(folder, "py.typed"))


@case
def what_is_not_there_says_what_to_use():
    for name in ("get_dp_process_group", "checkpoint", "optimizers"):
        e = expect(smp.Error, name, lambda: getattr(smp, name))
        assert "is not there" in str(e), e
    assert not hasattr(smp.nn, "DistributedLinear") and not hasattr(smp, "x")
    model = smp.DistributedModel(Net())
    for name in ("join", "register_comm_hook", "distributed_modules"):
        expect(smp.Error, name, lambda: getattr(model, name))
    expect(AttributeError, "no_such", lambda: model.no_such)
    expect(smp.Error, "state_dict()", model.cpu)


if __name__ == "__main__":
    run(
        ranks(2),
        ranks(2, static_mode=True, fast_mode=True),
        ranks(4, ddp=True),
        ranks(
            4,
            "a_grad_scaler_decides_for_all_ranks",
            "rows_of_one_replica_are_not_the_state",
            ddp=True,
            shard_optimizer_state=True,
            shard_gradients=True,
        ),
    )

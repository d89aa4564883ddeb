# ctest: seconds=20 label=multiprocess
"""What goes wrong in modules and steps, and what is refused."""

import collections
import contextlib
import copy
import dataclasses
import gc
import io
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import BatchEncoding

import smp
from harness import (
    HALVES,
    Block,
    Net,
    case,
    compare,
    expect,
    loss_of,
    make_step,
    ranks,
    run,
    samples,
    start_model,
)


@case
def an_exception_in_a_module():
    class Fails(Block):
        boom = False

        def forward(self, x):
            if self.boom:
                raise KeyError("no such thing")
            return super().forward(x)

    net = Net(Fails)
    net.h[3].boom = True
    model = start_model(net)

    train_step = make_step(model)
    for _ in range(2):
        e = expect(smp.Error, "KeyError", lambda: train_step(samples(0)))
        assert e.module == "h.3" and e.rank == 1, (e.module, e.rank, e)
        assert "in forward" in str(e) and "raise KeyError" in str(e), e
        assert isinstance(e.__cause__, KeyError) == (
            smp.rank() == 1
        ), e.__cause__
    net.h[3].boom = False
    loss = train_step(samples(0)).reduce_mean().item()
    assert loss > 0
    net.h[0].boom = True  # rank 0 runs it itself
    e = expect(smp.Error, "KeyError", lambda: train_step(samples(0)))
    assert e.module == "h.0" and e.rank == 0, (e.module, e.rank, e)


@case
def a_module_that_forward_replaces():
    class Replaces(Net):
        def forward(self, x):
            if isinstance(self.head, nn.Linear):
                self.head = nn.Sequential(self.head)
            return super().forward(x)

    class Adds(Net):
        def forward(self, x):
            self.scale = nn.Linear(1, 1)
            return super().forward(x)

    for net, place in (Replaces(), "head"), (Adds(), "scale"):
        text = f"forward puts another module at '{place}'"
        model = start_model(net)
        expect(smp.Error, text, lambda: make_step(model)(samples(0)))
        del model


class Raises(torch.autograd.Function):
    boom = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if Raises.boom:
            raise KeyError("no gradient")
        return g


@case
def an_exception_in_a_backward_function():
    class Late(nn.LayerNorm):  # of a class that the rank has not seen before
        pass

    class Fails(Block):
        def forward(self, x):
            return Raises.apply(super().forward(x))

    class Grows(Net):
        def forward(self, x):
            return super().forward(x if Raises.boom else self.late(x))

    net = Grows()
    net.h[3], net.late = Fails(), Late(32)
    smp.set_partition(net.late, 1)
    train_step = make_step(start_model(net))
    for _ in range(2):
        e = expect(smp.Error, "KeyError", lambda: train_step(samples(0)))
        assert e.rank == 1 and 'KeyError("no gradient")' in str(e), (e.rank, e)
        assert isinstance(e.__cause__, KeyError) == (smp.rank() == 1), e
    Raises.boom = False
    assert train_step(samples(0)).reduce_mean().item() > 0


@case
def an_exception_in_the_body():
    model = smp.DistributedModel(Net())
    kept = []

    @smp.step
    def train_step(model, batch):
        kept.append(loss_of(model, batch))
        raise ValueError("in the body")

    for _ in range(2):
        e = expect(
            smp.Error, "in the body", lambda: train_step(model, samples(0))
        )
        assert isinstance(e.__cause__, ValueError) == (smp.rank() == 0), e
        del e
        gc.collect()
        kept.clear()  # results of a step that is over, before the next


@case
def an_error_that_a_module_catches():
    class Careful(Net):
        def forward(self, x):
            for block in self.h:
                x = block(x)
            try:
                self.head(x[:, :3])
            except RuntimeError as e:
                assert "shapes" in str(e), e
            return self.head(x)

    # A caught failure of a remote call still ends the step: it is not lost.
    net = Careful()
    smp.set_partition(net.h, 0)
    smp.set_partition(net.head, 0)
    compare(net, samples, loss_of)


@case
def devices_by_default():
    """Around all, torch's own; 'meta' is refused where it has no values."""
    with torch.device("cpu"):
        step = make_step(start_model(Net()))
        assert torch.isfinite(step(samples(0)).reduce_mean())
    with torch.device("meta"):
        expect(smp.Error, "outside of torch.device", lambda: step(samples(0)))
        net = Net()
    del step
    gc.collect()
    expect(
        smp.Error,
        "'h.0.a.weight' is on the device 'meta'",
        lambda: smp.DistributedModel(net),
    )


@case
def defaults_of_torch():
    """Those of a script hold on the threads that run its modules, too."""

    class Makes(Block):
        def forward(self, x):
            assert torch.ones(32).dtype == x.dtype
            return super().forward(x) * torch.full((32,), 1 + 1e-9)

    before = torch.get_default_dtype()
    torch.set_default_device("cpu")
    torch.set_default_dtype(torch.float64)
    try:
        compare(Net(Makes), samples, loss_of, pins=HALVES, within=1e-13)
        # Here the scale would be infinite.
        torch.set_default_dtype(torch.float16)
        loss = torch.ones((), dtype=torch.float32)
        assert smp.amp.GradScaler().scale(loss) == 2**16
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


class Odd:
    pass


class Takes(Block):
    def forward(self, x, odd):
        return super().forward(x)


class Passes(Net):
    def forward(self, x):
        for block in self.h:
            x = block(x, Odd())
        return self.head(x)


@case
def what_cannot_be_sent_is_named():
    train_step = make_step(start_model(Passes(Takes)))
    e = expect(
        smp.Error, "register_pytree_node", lambda: train_step(samples(0))
    )
    assert "module h.2 is pinned" in str(e), e
    assert "argument 1: a" in str(e) and "Odd" in str(e), e


@case
def what_takes_it_stays_with_its_caller():
    compare(Passes(Takes), samples, loss_of)


@case
def a_model_cannot_be_pickled_whole():
    model = smp.DistributedModel(Net())
    expect(
        smp.Error, "save_checkpoint", lambda: torch.save(model, io.BytesIO())
    )
    inner = copy.deepcopy(model.module)  # before the partition it can
    assert inner(torch.zeros(2, 32)).shape == (2, 5)


@case
def mistakes_have_a_way_out():
    model = smp.DistributedModel(Net())

    @smp.step
    def calls_backward(model, batch):
        loss_of(model, batch).backward()

    expect(
        smp.Error,
        "model.backward(loss)",
        lambda: calls_backward(model, samples(0)),
    )
    clip = torch.nn.utils.clip_grad_norm_
    some = list(model.parameters())[1:]
    expect(smp.Error, "smp.clip_grad_norm_", lambda: clip(some, 1.0))
    expect(
        smp.Error, "one DistributedModel", lambda: smp.DistributedModel(Net())
    )
    expect(smp.Error, "was called before", lambda: smp.init())
    del model
    expect(
        smp.Error,
        "block.compile()",
        lambda: smp.DistributedModel(torch.compile(Net(), backend="eager")),
    )
    expect(
        smp.Error,
        "DistributedModel before it",
        lambda: smp.save_checkpoint("x"),
    )


@case
def parts_that_are_new_after_the_partition():
    model = smp.DistributedModel(Net())
    net = model.module
    net.extra = Block()  # before it, all ranks see it
    train_step = make_step(model)
    train_step(samples(0))

    def set_parameter():
        net.h[1].a.weight = nn.Parameter(torch.zeros(32, 32))

    def set_head():
        net.head = nn.Linear(32, 5)

    for change, text in (
        (lambda: net.h.append(Block()), "'h' gets a new module '4'"),
        (set_head, "the model gets a new module 'head'"),
        (set_parameter, "'h.1.a' gets a new parameter 'weight'"),
    ):
        expect(smp.Error, text, change)
    net.h[0].a = net.h[0].a
    net.again = net.head
    nn.Sequential(nn.Linear(3, 3)).more = Block()  # is not of the model
    train_step(samples(1))
    # As the error says.
    model.load_state_dict({k: 0 * x for k, x in model.state_dict().items()})
    assert train_step(samples(1)).reduce_mean().item() > 1.6


@contextlib.contextmanager
def torch_distributed():
    """Of this rank alone, beside smp."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


@case
def wrappers_of_torch():
    text = "smp.init(ddp=True) makes replicas"

    def inside(net, kind="DistributedDataParallel"):
        e = expect(smp.Error, text, lambda: smp.DistributedModel(net))
        assert f"a {kind}: give smp the module inside of it" in e.text, e

    def around(wrap):
        model = smp.DistributedModel(Net())

        @smp.step
        def train_step(batch):
            return loss_of(wrapped, batch)

        def train():
            nonlocal wrapped
            wrapped = wrap(model) or model
            train_step(samples(0))

        wrapped = None
        e = expect(smp.Error, text, train)
        assert "around smp.DistributedModel" in e.text, e

    with torch_distributed():
        inside(nn.parallel.DistributedDataParallel(Net()))
        inside(nn.Sequential(nn.parallel.DistributedDataParallel(Net())))
        mesh = init_device_mesh("cpu", (1,))
        inside(fully_shard(Net(), mesh=mesh), "FSDPModule")
        around(nn.parallel.DistributedDataParallel)
        around(lambda model: fully_shard(model, mesh=mesh))
        compare(Net(), samples, loss_of)


@case
def saving_a_part_as_if_it_were_all():
    net = Net()
    model = start_model(net)
    torch.save(net, io.BytesIO())  # all of it is here
    make_step(model)(samples(0))
    for what in net, net.h, list(net.parameters()):
        expect(
            smp.Error,
            "save model.state_dict()",
            lambda: torch.save(what, io.BytesIO()),
        )
    file = io.BytesIO()
    torch.save(model.state_dict(), file)  # as the error says
    file.seek(0)
    Net().load_state_dict(torch.load(file))


@dataclasses.dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    scale: float = 1.0


class Holder:
    def __init__(self, x):
        self.x = x


@case
def what_a_step_divides():
    x = torch.arange(16.0)

    def parts_of(value, get):
        @smp.step(microbatches=4)
        def look(value):
            return get(value).clone()

        return look(value)

    whole = collections.UserDict(a={"x": x}, n=3)
    for value, get in (
        (whole, lambda v: v["a"]["x"] + 0 * v["n"]),
        (BatchEncoding({"x": x}), lambda v: v["x"]),
        (BatchEncoding({"x": x}), lambda v: v.x),
        ([Pair(x, 2.0)], lambda v: v[0].x * v[0].scale / 2),
        ({x}, lambda v: next(iter(v))),
        (frozenset([x]), lambda v: next(iter(v))),
    ):
        out = parts_of(value, get)
        if smp.rank() == 0:
            assert torch.equal(torch.cat(out.outputs), x), (value, out)
    assert whole["a"]["x"] is x

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out = parts_of(Holder(x), lambda v: v.x)
    assert out.outputs[3].shape == (16,)
    texts = [str(w.message) for w in told]
    if smp.rank() == 0:
        assert any("argument 'value'" in t for t in texts), texts
        assert "non_split_inputs says that it is meant" in texts[0]


@case
def arguments_of_a_step():
    @smp.step(
        non_split_inputs=["mask"], input_split_axes={"rows": 1}, microbatches=2
    )
    def look(x, mask, *more, rows=None, **named):
        assert (
            x.shape == (8, 32) and mask.shape == (3,) and rows.shape == (5, 2)
        )
        assert more[0].shape == (1,) and named["z"].shape == (2, 1)
        return x.sum()

    out = look(
        torch.ones(16, 32),
        torch.ones(3),
        torch.ones(2),
        rows=torch.ones(5, 4),
        z=torch.ones(4, 1),
    )
    assert out.reduce_sum().item() == 512

    def takes_no_x():
        @smp.step(non_split_inputs=["x"])
        def no_such(y):
            return y

    expect(smp.Error, "non_split_inputs names 'x'", takes_no_x)

    @smp.step
    def of_images(images):
        return 0.0

    images = [torch.ones(3, 8, 8) for _ in range(8)]
    expect(smp.Error, "needs a class with smp_slice", lambda: of_images(images))


if __name__ == "__main__":
    run(ranks(2), ranks(2, static_mode=True, fast_mode=True))

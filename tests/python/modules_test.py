# ctest: seconds=40 label=multiprocess
"""What Python modules do, on two ranks and in one process."""

import dataclasses
import enum
import random
from collections import OrderedDict, namedtuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

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
def a_plain_net():
    model = compare(Net(), samples, loss_of)
    assert model.partitioned


@case
def a_net_whose_blocks_alternate_between_ranks():
    model = compare(Net(), samples, loss_of, pins=TURNS, steps=6)
    assert own(model, "h.1") == (smp.pp_rank() == 1)


@case
def a_parameter_used_outside_of_its_module():
    class Uses(Net):
        def forward(self, x):
            for block in self.h:
                x = block(x)
            y = F.linear(x, self.head.weight, self.head.bias)
            return y + self.h[3].a.weight.sum()

    compare(Uses(), samples, loss_of, pins={**HALVES, "h.3": 1, "h.2": 0})


@case
def tied_weights():
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.h[3].a.weight = self.h[0].a.weight

    model = compare(Tied(), samples, loss_of)
    state = model.state_dict()
    assert torch.equal(state["h.3.a.weight"], state["h.0.a.weight"])


@case
def a_block_used_twice():
    class Twice(Net):
        def forward(self, x):
            for block in [*self.h, self.h[1]]:
                x = block(x)
            return self.head(x)

    compare(Twice(), samples, loss_of, pins=TURNS)


@case
def branches_and_sequentials():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.left = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), Block())
            self.right = nn.Sequential(Block(), nn.LayerNorm(32))
            self.out = nn.ModuleDict({"head": nn.Linear(64, 5)})

        def forward(self, x):
            return self.out["head"](
                torch.cat([self.left(x), self.right(x)], -1)
            )

    compare(
        Branches(), samples, loss_of, pins={"left": 0, "right": 1, "out": 1}
    )


@case
def checkpointing_by_torch():
    class Kept(Net):
        reentrant = False

        def forward(self, x):
            if self.reentrant:
                x = x.requires_grad_()
            for block in self.h:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            return self.head(x)

    compare(Kept(), samples, loss_of)

    class Reentrant(Kept):
        reentrant = True

    compare(Reentrant(), samples, loss_of)


@case
def checkpointing_by_smp():
    def mark(model):
        for block in model.module.h:
            smp.set_activation_checkpointing(block)

    compare(Net(), samples, loss_of, prepare=mark)


@case
def autocast():
    def loss_in_half(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, batch)

    compare(Net(), samples, loss_in_half)


@case
def a_function_with_a_backward_of_its_own():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 2 * x * g

    class Squares(Block):
        def forward(self, x):
            return x + 0.1 * Square.apply(self.b(F.gelu(self.a(x))))

    compare(Net(Squares), samples, loss_of)


@case
def arguments_that_are_changed():
    class Changes(Block):
        def forward(self, x, log):
            x.mul_(0.5)
            log.append(x.sum().item())
            return super().forward(x)

    class Logged(Net):
        def forward(self, x):
            x = x.clone()
            log = []
            for block in self.h:
                x = x + block(x, log)
            assert len(log) == 4, log
            return self.head(x)

    compare(Logged(Changes), samples, loss_of)


@case
def hooks():
    net = Net()
    for block in net.h:
        block.register_forward_hook(lambda m, a, out: out * 1.5)
        block.a.register_full_backward_hook(
            lambda m, gi, go: None if gi[0] is None else (gi[0] * 0.5,)
        )
    compare(net, samples, loss_of)


Pair = namedtuple("Pair", "x scale")


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclasses.dataclass
class State:
    pair: Pair
    kind: Kind = Kind.ONE
    counts: list = dataclasses.field(default_factory=list)


@case
def all_kinds_of_arguments():
    flags = {"a": (1, None, "s", 2.5, True), 3: [b"\x00\xff", {1, 2}, 1j]}

    class Takes(Block):
        def forward(self, state, *, flags=None, dtype=None, **more):
            assert dtype is torch.float32 and flags == self.flags, (
                dtype,
                flags,
            )
            assert more == {"size": torch.Size([2, 3]), "part": slice(1, 2)}
            assert state.kind is Kind.TWO
            y = Block.forward(self, state.pair.x) * state.pair.scale
            return State(
                Pair(y, state.pair.scale),
                state.kind,
                [*state.counts, OrderedDict(a=1)],
            )

    class Passes(Net):
        def forward(self, x):
            state = State(Pair(x, 0.9), Kind.TWO)
            for block in self.h:
                block.flags = flags
                state = block(
                    state,
                    flags=flags,
                    dtype=torch.float32,
                    size=torch.Size([2, 3]),
                    part=slice(1, 2),
                )
            assert len(state.counts) == 4 and state.counts[0]["a"] == 1
            return self.head(state.pair.x)

    net = Passes(Takes)
    for block in net.h:
        block.flags = flags
    compare(net, samples, loss_of, pins=TURNS)


@case
def sizes_of_a_result_that_is_elsewhere():
    class Views(Block):
        def forward(self, x):
            n, d = x.shape
            return super().forward(x).view(n, d)

    class Looks(Net):
        def forward(self, x):
            for block in self.h:
                x = block(x)
                n, d = x.shape
                x = x.reshape(n, d) * float(d > 0)
                assert x.dim() == 2 and x.numel() == n * d and x.is_contiguous()
            return self.head(x)

    compare(Looks(Views), samples, loss_of, pins=TURNS, steps=6)


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    more: object = None


@case
def calls_that_go_on_without_their_results():
    def train(wrap, unwrap):
        class Wraps(Block):
            def forward(self, x):
                return wrap(super().forward(x))

        class Unwraps(Net):
            def forward(self, x):
                for block in self.h:
                    x = unwrap(block(x))
                return self.head(x)

        compare(Unwraps(Wraps), samples, loss_of, pins=HALVES, steps=6)
        return smp.allgather(smp.last_step()["waits"], smp.CommGroup.PP_GROUP)

    fewest = train(lambda x: x, lambda x: x)
    for wrap, unwrap in (
        (lambda x: (x, None), lambda y: y[0]),
        (lambda x: {"hidden": [x], "kind": "b"}, lambda y: y["hidden"][0]),
        (lambda x: Output(x), lambda y: y.hidden),
        (lambda x: BaseModelOutput(x), lambda y: y.last_hidden_state),
        (lambda x: BaseModelOutput(x), lambda y: y[0]),
    ):
        found = train(wrap, unwrap)
        assert found == fewest, (found, fewest)
    # A number may be another one each time.
    assert sum(train(lambda x: (x, x.dim()), lambda y: y[0])) > sum(fewest)


@case
def results_that_turn_out_to_be_others():
    # Of one kind of call, as far as its arguments tell.
    class Sometimes(Block):
        def forward(self, x, step):
            y = super().forward(x)
            return (y, y * 0.5 if step.item() == 3 else None)

    class Looks(Net):
        def forward(self, x, step):
            for block in self.h:
                x, more = block(x, step)
                x = x if more is None else x + more
            return self.head(x)

    def batch(i):
        return {**samples(i), "i": torch.full((16,), float(i))}

    def train():
        compare(
            Looks(Sometimes),
            batch,
            lambda model, b: F.cross_entropy(model(b["x"], b["i"][0]), b["y"]),
            pins=TURNS,
            steps=6,
        )

    if smp._state.options.get("fast_mode"):  # steps are not run again
        expect(smp.Error, "its result has another structure", train)
    else:
        train()


@case
def a_value_that_python_reads():
    class Reads(Net):
        def forward(self, x):
            for block in self.h:
                x = block(x)
                if x.sum().item() > 0:
                    x = x * 0.5
            return self.head(x)

    compare(Reads(), samples, loss_of, pins=TURNS)


@case
def modules_that_are_compiled():
    net = Net()
    for block in net.h:
        block.compile(backend="aot_eager")
    compare(net, samples, loss_of)


@case
def parameters_made_on_their_owners_alone():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.h = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
            self.first = nn.Linear(32, 64)
            self.head = nn.Linear(64, 5)

        def forward(self, x):
            x = self.first(x)
            for layer in self.h:
                x = x + F.gelu(layer(x))
            return self.head(x)

    alone = Wide()
    after = torch.get_rng_state()
    with smp.delay_param_initialization():
        net = Wide()
    assert torch.equal(torch.get_rng_state(), after)
    compare(net, samples, loss_of, alone=alone)


@case
def a_gradient_within_a_step():
    def penalised(model, batch):
        x = batch["x"].clone().requires_grad_()
        out = model(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch["y"]) + 0.01 * g.pow(2).mean()

    net = Net()
    for path in TURNS:
        smp.set_partition(net.get_submodule(path), 0)
    compare(net, samples, penalised)


@case
def results_in_containers():
    model = smp.DistributedModel(Net())

    @smp.step
    def evaluate(model, batch, names=("a",)):
        with torch.no_grad():
            out = model(batch["x"])
        return {
            "out": out,
            "rows": out.shape[0],
            "loss": F.cross_entropy(out, batch["y"]),
        }

    found = evaluate(model, samples(0))
    assert found["rows"].outputs == [4, 4, 4, 4]
    whole = found["out"].concat()
    assert whole.shape == (16, 5)
    with torch.no_grad():
        loss = F.cross_entropy(whole, samples(0)["y"]).item()
    assert abs(found["loss"].reduce_mean().item() - loss) < 1e-6
    assert found["loss"].stack().shape == (4,)


@case
def inputs_that_are_changed():
    class Fills(Net):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(5, 32)

        def forward(self, x, words):
            words.masked_fill_(words == 3, 0)
            return super().forward(x + self.words(words))

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"], batch["words"]), batch["y"])

    def batch(i):
        result = samples(i)
        return {**result, "words": result["y"].clone()}

    compare(Fills(), batch, loss, pins={**HALVES, "words": 0})


class Settings:
    def __init__(self, scale):
        self.scale = scale
        self.names = ["a", "b"]


class Uses(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)

    def forward(self, x, other, settings, factors, number):
        factors += 1
        x = other(self.a(x)) + other.bias
        return x * settings.scale * number * float(factors.mean()), settings


class Passes(nn.Module):
    """Gives a module on another rank what each rank has, and numpy's."""

    def __init__(self, scale=0.5):
        super().__init__()
        torch.manual_seed(0)
        self.settings = Settings(scale)
        self.other, self.uses = nn.Linear(32, 32), Uses()
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        factors = np.ones(3, np.float32)
        x, found = self.uses(
            x, self.other, self.settings, factors, np.float32(0.7)
        )
        assert found is self.settings
        return self.head(x * float(factors.sum()))


@case
def what_each_rank_has_as_an_argument():
    pins = {"uses": 1, "other": 0, "head": 0}
    model = compare(Passes(), samples, loss_of, pins=pins)
    assert own(model, "uses") == (smp.pp_rank() == 1)
    del model  # a session has one at a time

    expect(
        smp.Error,
        "has other values on another rank",
        lambda: compare(Passes(smp.rank()), samples, loss_of, pins=pins),
    )


class Masks(Block):
    """Draws as some published models do."""

    def forward(self, x):
        keep = torch.from_numpy(np.random.rand(*x.shape) > 0.2)
        if random.random() < 0.3:
            x = 0.5 * x
        return super().forward(x * keep.to(x.dtype))


@case
def random_numbers_of_python_and_numpy():
    before = random.getstate(), np.random.get_state()[1].tolist()
    compare(Net(Masks), samples, loss_of, each_step=True)
    after = random.getstate(), np.random.get_state()[1].tolist()
    assert before == after


def first(out):
    return out[0] if isinstance(out, tuple) else out


class Classifier(nn.Module):
    """Of series of 32 numbers each."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(first(self.body(x)).mean(1))


class OfItself(nn.Module):
    """A layer with several arguments, all of them the series."""

    def __init__(self, layer, n, **more):
        super().__init__()
        self.layer, self.n, self.more = layer, n, more

    def forward(self, x):
        return first(self.layer(*[x] * self.n, **self.more))


class Bag(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        found = self.layer((x[:, :, 0] * 8).long().clamp(-8, 7) + 8)
        return found.view(len(x), -1, 32)


def pair(wrap):
    return nn.Sequential(
        wrap(nn.Linear(32, 32)), nn.ReLU(), wrap(nn.Linear(32, 32))
    )


def transformer_layer():
    return nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)


# Those of torch itself that are more than their parameters.
LAYERS = [
    lambda: nn.LSTM(32, 32, 2, batch_first=True),
    lambda: nn.GRU(32, 16, batch_first=True, bidirectional=True),
    lambda: nn.TransformerEncoder(transformer_layer(), 2),
    lambda: OfItself(
        nn.Transformer(32, 4, 1, 1, 64, 0.0, batch_first=True),
        2,
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(10),
    ),
    lambda: OfItself(nn.MultiheadAttention(32, 4, batch_first=True), 3),
    lambda: pair(nn.utils.parametrizations.weight_norm),
    lambda: pair(nn.utils.parametrizations.spectral_norm),
    lambda: pair(nn.utils.spectral_norm),
    lambda: Bag(nn.EmbeddingBag(16, 32, sparse=True)),
    lambda: Bag(nn.Embedding(16, 32, sparse=True)),
]


@case
def layers_of_torch():
    def batch(i):
        g = torch.Generator().manual_seed(i)
        return {
            "x": torch.randn(16, 10, 32, generator=g),
            "y": torch.randint(0, 5, (16,), generator=g),
        }

    for layer in LAYERS:
        torch.manual_seed(0)
        compare(Classifier(layer()), batch, loss_of, pins={"body": 1})


if __name__ == "__main__":
    run(
        ranks(2),
        ranks(2, "checkpointing_by_smp", offload_activations=True),
        ranks(2, static_mode=True, fast_mode=True, steps=9),
        ranks(2, verify=True),
    )

"""Arguments and results of all kinds."""

from typing import Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.entry import WIDTH, CLASSES, classes, model, rows


class TakesAll(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(
        self,
        features: Dict[str, Tensor],
        history: List[Tensor],
        span: Tuple[int, float],
        axes: List[int],
        bias: Optional[Tensor] = None,
        kind: str = "tanh",
        scale: Optional[float] = None,
        gated: bool = False,
    ) -> Tuple[Dict[str, Tensor], List[Tensor], Tuple[Optional[Tensor], str]]:
        x = self.fc(features["x"])
        if bias is not None:
            x = x + bias
        if scale is not None:
            x = x * scale
        x = torch.tanh(x) if kind == "tanh" else torch.relu(x)
        gate: Optional[Tensor] = None
        if gated:
            gate = torch.sigmoid(self.gate(x))
        for h in history:
            x = x + h * span[1]
        x = x - x.mean(axes, keepdim=True) / span[0]
        return {"x": x, "was": features["x"]}, [x * 2, x + 1], (gate, kind)


class Arguments(nn.Module):
    """Dicts, lists, tuples, options, strings and plain numbers between modules."""

    def __init__(self):
        super().__init__()
        self.a = TakesAll()
        self.b = TakesAll()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tuple[Tensor, Dict[str, Tensor]]:
        features, history, _ = self.a({"x": x}, [], (3, 0.5), [1])
        features, history, more = self.b(
            features, history, (2, 0.25), [0, 1], bias=x, kind="relu", scale=0.7, gated=True
        )
        gate, kind = more
        h = features["x"] + features["was"]
        if gate is not None:
            h = h * gate
        if kind == "relu":
            h = h + history[1]
        return F.cross_entropy(self.head(h), y), {"gate": h.detach()}


@model("arguments")
def arguments():
    return Arguments(), [rows(WIDTH), classes()]


class Collector(nn.Module):
    """Appends to a list and writes into a dict that its caller owns."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: List[Tensor], notes: Dict[str, Tensor]) -> Tensor:
        h = torch.tanh(self.fc(x))
        seen.append(h)
        notes["last"] = h.mean(-1, keepdim=True)
        return h


class Collected(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Collector() for _ in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen: List[Tensor] = []
        notes: Dict[str, Tensor] = {}
        for layer in self.layers:
            x = layer(x, seen, notes)
        return F.cross_entropy(self.head(torch.stack(seen).sum(0) + notes["last"]), y)


@model("changed_list")
def changed_list():
    return Collected(), [rows(WIDTH), classes()]


class WritesItsArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        change = torch.tanh(self.fc(x.clone()))
        x.mul_(0.5).add_(change)
        return x


class InPlace(nn.Module):
    """A module changes its argument, once whole, once through a view."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.writes = WritesItsArgument()
        self.relu = nn.ReLU(inplace=True)
        self.same = nn.Identity()
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x) * 1.5
        self.writes(h[:, : x.size(1)])
        k = self.same(h + 0.1)
        k.mul_(2)
        self.relu(k)
        return F.cross_entropy(self.head(h + k), y)


@model("in_place")
def in_place():
    return InPlace(), [rows(WIDTH), classes()]


@torch.jit.interface
class Encoder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pass


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.of_head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))

    @torch.jit.export
    def classify(self, x: Tensor) -> Tensor:
        return self.of_head(x) + self.of_head.bias.sum() * 0.1


class Methods(nn.Module):
    """Methods other than forward, an interface, and parameters read from
    outside: their values, their shape, through a list.
    """

    encoder: Encoder

    def __init__(self):
        super().__init__()
        self.encoder = Narrow()
        self.other = Classifier()
        self.by_name = nn.ModuleDict({"one": nn.Linear(WIDTH, WIDTH), "two": nn.Linear(WIDTH, WIDTH)})

    @torch.jit.export
    def decay(self) -> Tensor:
        total = torch.zeros(())
        for w in [self.other.fc.weight, self.by_name["one"].weight[1:3]]:
            total = total + w.pow(2).sum()
        return total

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.encoder(x)
        for name, part in self.by_name.items():
            h = h + part(h) / part.weight.size(0)
        return F.cross_entropy(self.other.classify(self.other(h)), y) + 0.01 * self.decay()


@model("methods")
def methods():
    return Methods(), [rows(WIDTH), classes()]

"""Chains and trees."""

from typing import Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.entry import ROWS, WIDTH, CLASSES, classes, model, rows


class MLP(nn.Module):
    """A chain in two nested Sequentials."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 20),
            nn.GELU(),
            nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20)),
            nn.LayerNorm(20),
        )
        self.head = nn.Linear(20, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), y)


@model("mlp", traced=True)
def mlp():
    return MLP(), [rows(WIDTH), classes()]


class TwoTowers(nn.Module):
    """Two encoders that share nothing and meet in a product."""

    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 8))
        self.item = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, query: Tensor, item: Tensor, clicked: Tensor) -> Tuple[Tensor, Tensor]:
        score = (self.query(query) * self.item(item)).sum(-1) * self.scale
        return F.binary_cross_entropy_with_logits(score, clicked), score


@model("two_towers")
def two_towers():
    return TwoTowers(), [rows(WIDTH), rows(10), torch.randint(0, 2, (ROWS,)).float()]


class Level(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(self.norm(x)))


class SkipLink(nn.Module):
    """What the first block gives is used again by the last one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.middle = nn.ModuleList([Level(16) for _ in range(4)])
        self.last = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        start = torch.relu(self.first(x))
        h = start
        for level in self.middle:
            h = level(h)
        return F.cross_entropy(self.last(torch.cat([h, start], -1)), y)


@model("skip_link")
def skip_link():
    return SkipLink(), [rows(WIDTH), classes()]

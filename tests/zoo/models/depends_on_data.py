"""What runs depends on the data."""

from typing import Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.entry import WIDTH, WORDS, CLASSES, classes, model, rows, words
from models.trees import Level


class Branch(nn.Module):
    """Which of two modules runs depends on the rows."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.low = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.high = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        if bool(x.sum() > 0):
            h = self.high(h)
        else:
            h = self.low(h)
        return F.cross_entropy(self.head(h), y)


@model("branch")
def branch():
    x = rows(WIDTH)
    x[0:2] += 1  # the microbatches of two rows go high, low, high, low
    x[2:4] -= 1
    x[4:6] += 1
    x[6:8] -= 1
    return Branch(), [x, classes()]


class EarlyExit(nn.Module):
    """Leaves a loop over modules when it is sure."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.levels = nn.ModuleList([Level(16) for _ in range(4)])
        self.exits = nn.ModuleList([nn.Linear(16, CLASSES) for _ in range(4)])

    def forward(self, x: Tensor, y: Tensor) -> Tuple[Tensor, int]:
        h = self.first(x)
        loss = torch.zeros(())
        depth = 0
        done = False
        for level, exit in zip(self.levels, self.exits):
            if not done:
                h = level(h)
                logits = exit(h)
                loss = loss + F.cross_entropy(logits, y)
                depth += 1
                done = bool(logits.detach().softmax(-1).amax(-1).mean() > 0.40 - 0.01 * depth)
        return loss / depth, depth


@model("early_exit")
def early_exit():
    scale = torch.tensor([0.3, 0.3, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    return EarlyExit(), [rows(WIDTH) * scale[:, None], classes()]


class Experts(nn.Module):
    """Each row goes to one expert. Who gets no row is called with none
    (`always`) or not at all.
    """

    def __init__(self, experts: int, always: bool):
        super().__init__()
        self.always = always
        self.router = nn.Linear(16, experts)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 16)) for _ in range(experts)]
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero().squeeze(-1)
            if self.always or mine.numel() > 0:
                out = out.index_add(0, mine, expert(x[mine]))
        return x + out * weight.unsqueeze(-1)


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.sparse = Experts(3, False)
        self.empty = Experts(4, True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.empty(self.sparse(torch.tanh(self.first(x))))), y)


@model("experts")
def experts():
    return MixtureOfExperts(), [rows(WIDTH), classes()]


class Packed(nn.Module):
    """Padding is cut out before the expensive part: sizes differ with every
    microbatch.
    """

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, length: Tensor, y: Tensor) -> Tensor:
        real = torch.arange(tokens.size(1)) < length[:, None]
        packed = self.body(self.words(tokens[real]))
        row = real.nonzero()[:, 0]
        mean = torch.zeros(tokens.size(0), packed.size(1)).index_add(0, row, packed) / length[:, None]
        return F.cross_entropy(self.head(mean), y)


@model("packed")
def packed():
    return Packed(), [words(9), torch.tensor([9, 1, 3, 3, 8, 2, 5, 9]), classes()]

"""Who is called, and how often."""

from typing import Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.entry import WIDTH, WORDS, CLASSES, classes, model, rows, words
from models.language import TransformerBlock
from models.trees import Level


class Reused(nn.Module):
    """One module runs three times and stands in the tree twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.level = Level(16)
        self.between = nn.Linear(16, 16)
        self.tail = nn.Sequential(nn.LayerNorm(16), self.level, nn.Linear(16, CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.level(self.level(self.first(x)))
        return F.cross_entropy(self.tail(torch.relu(self.between(h))), y)


@model("reused")
def reused():
    return Reused(), [rows(WIDTH), classes()]


class Pair(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        return torch.tanh(self.left(x)), torch.tanh(self.right(x))


class UnusedOutput(nn.Module):
    """Outputs that lead nowhere, that are only looked at, and a module that
    nobody calls.
    """

    def __init__(self):
        super().__init__()
        self.first = Pair(WIDTH)
        self.dead = Pair(WIDTH)
        self.looked_at = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tuple[Tensor, Tensor]:
        used, _ = self.first(x)
        self.dead(used)
        norm = self.looked_at(used).detach().norm()
        return F.cross_entropy(self.head(used), y), norm


@model("unused_output")
def unused_output():
    return UnusedOutput(), [rows(WIDTH), classes()]


class FrozenTrunk(nn.Module):
    """Only the head and an adapter in the middle are trained."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.low = TransformerBlock(WIDTH, 2, False)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.high = TransformerBlock(WIDTH, 2, False)
        self.head = nn.Linear(WIDTH, CLASSES)
        for part in [self.words, self.low, self.high]:
            part.requires_grad_(False)

    def forward(self, tokens: Tensor, y: Tensor) -> Tensor:
        x = self.low(self.words(tokens))
        return F.cross_entropy(self.head(self.high(x + self.adapter(x)).mean(1)), y)


@model("frozen_trunk")
def frozen_trunk():
    return FrozenTrunk(), [words(), classes()]


class Teacher(nn.Module):
    """Runs without gradients and counts how often."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.calls = 0
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.net(x) / self.temperature).softmax(-1)


class Distillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = Teacher()
        self.student = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tuple[Tensor, int]:
        with torch.no_grad():
            target = self.teacher(x)
        return F.cross_entropy(self.student(x), target), self.teacher.calls


@model("teacher")
def teacher():
    return Distillation(), [rows(WIDTH)]

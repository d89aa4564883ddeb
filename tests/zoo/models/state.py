"""State that calls change."""

from typing import Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.entry import WIDTH, CLASSES, classes, model, rows


class ConvNet(nn.Module):
    """Batch norm: running statistics depend on the order of microbatches."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), y)


@model("convnet")
def convnet():
    return ConvNet(), [rows(2, 8, 8), classes()]


class Running(nn.Module):
    """Keeps a mean in a buffer that it binds anew, and one that it writes."""

    mean: Tensor
    peak: Tensor

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("peak", torch.zeros(WIDTH))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        with torch.no_grad():
            self.mean = 0.8 * self.mean + 0.2 * h.mean(0)
            self.peak[1:] = torch.maximum(self.peak[1:] * 0.9, h.amax(0)[1:])
        self.steps += 1
        return torch.tanh(h - self.mean)


class Counts(nn.Module):
    """State that its parent reads, and changes."""

    def __init__(self):
        super().__init__()
        self.running = Running()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tuple[Tensor, int]:
        self.rows += x.size(0)
        h = self.running(x) + self.running.peak / self.running.steps
        self.running.peak.mul_(0.99)
        return F.cross_entropy(self.head(h), y), self.running.steps


@model("running_state")
def running_state():
    return Counts(), [rows(WIDTH), classes()]

"""Writes what smp-train takes from PyTorch (docs/torchscript.md): a model that
returns its loss, one batch, and a configuration.

    python export_model.py
    smp-train verify run.toml --split
    smp-train run.toml

It prints the loss that the first step of smp-train shows.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

CONFIG = """\
[smp]
pipeline_parallel_degree = 2
microbatches = 4

[model]
type = "torchscript"
path = "model.pt"

[data]
type = "safetensors"        # input0, input1: the arguments of forward
path = "batch.safetensors"

[train]
steps = 50
save_model = true
"""


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A model as anybody writes it, which knows nothing of smp."""

    def __init__(self, width: int):
        super().__init__()
        self.first = nn.Linear(32, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(4)])
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


class NetWithLoss(nn.Module):
    """Takes the tensors of a batch and returns the loss, as smp-train wants."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)


def main():
    torch.manual_seed(1)
    model = NetWithLoss(Net(256))
    x = torch.randn(128, 32)
    y = x[:, :10].argmax(1)  # int64
    torch.jit.script(model).save("model.pt")
    save_file({"input0": x, "input1": y}, "batch.safetensors")
    Path("run.toml").write_text(CONFIG)
    with torch.no_grad():
        print(f"loss {model(x, y).item():.6f}")


if __name__ == "__main__":
    main()

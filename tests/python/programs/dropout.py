"""Prints the losses of a net with dropout, on as many ranks as there are."""

import os

import torch
import torch.nn.functional as F

import smp


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(32, 32)
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(x + F.gelu(self.a(x)))


ranks = int(os.environ.get("SMP_WORLD_SIZE", "1"))
smp.init(pipeline_parallel_degree=ranks, microbatches=4, seed=3, threads=1)
torch.manual_seed(0)
net = torch.nn.Sequential(*[Block() for _ in range(4)], torch.nn.Linear(32, 5))
for i, block in enumerate(net):
    smp.set_partition(block, i % ranks)
model = smp.DistributedModel(net)
optimizer = smp.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1)
)


@smp.step
def train_step(x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


for i in range(4):
    g = torch.Generator().manual_seed(i)
    x = torch.randn(16, 32, generator=g)
    y = torch.randint(0, 5, (16,), generator=g)
    optimizer.zero_grad()
    loss = train_step(x, y).reduce_mean().item()
    optimizer.step()
    if smp.rank() == 0:
        print(f"loss {loss:.5f}", flush=True)

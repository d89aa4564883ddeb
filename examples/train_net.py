"""A model, a step and an optimizer of your own, on two pipeline ranks:

python -m smp.run -n 2 train_net.py
"""

import torch

import smp


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self, width=256, blocks=4):
        super().__init__()
        self.first = torch.nn.Linear(32, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = torch.nn.Linear(width, 10)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


smp.init(pipeline_parallel_degree=2, microbatches=4)
torch.manual_seed(1)  # every rank makes the same model
model = smp.DistributedModel(Net())
optimizer = smp.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=1e-3)
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)


@smp.step
def train_step(x, y):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    model.backward(loss)  # instead of loss.backward()
    return loss


for i in range(1, 51):
    x = torch.randn(64, 32)
    y = x[:, :10].argmax(1)  # which of the first ten is largest
    optimizer.zero_grad()
    loss = train_step(x, y).reduce_mean()
    norm = smp.clip_grad_norm_(model, 1.0)  # over all ranks
    optimizer.step()
    schedule.step()
    if smp.rank() == 0 and i % 10 == 0:
        print(f"step {i}: loss {loss:.3f}, norm {norm:.2f}")

"""Without an option of its own: all of them are in a file."""

import torch

import smp

smp.init()
with smp.partition(1):
    head = torch.nn.Linear(8, 3)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), head)
model = smp.DistributedModel(net)


@smp.step
def look(x):
    return model(x).sum()


out = look(torch.ones(6, 8))
print("microbatches", len(out), "of", smp.pp_size(), "ranks", flush=True)
names = smp.allgather(model.local_module_names())
print(
    "the head is on", [i for i, xs in enumerate(names) if "2" in xs], flush=True
)

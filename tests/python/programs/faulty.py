"""Trains a small net on two ranks, and goes wrong as its argument says."""

import ctypes
import os
import signal
import sys
import threading

import torch
import torch.nn.functional as F

import smp


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(32, 32)

    holds = False

    def forward(self, x):
        if self.holds:  # native code that keeps the interpreter's lock
            ctypes.PyDLL(None).pause()  # until a signal ends the rank
        return x + torch.relu(self.a(x))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.h = torch.nn.ModuleList([Block() for _ in range(4)])
        self.head = torch.nn.Linear(32, 5)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.head(x)


how = sys.argv[1]
options = {"pipeline_parallel_degree": 2, "microbatches": 4}
if how == "wrong-key":
    options["microbatchs"] = 4
if how in ("lock", "stop", "hold"):
    options["monitor"] = {"stall_timeout": 5.0, "on_stall": "end"}
smp.init(options)
net = Net()
for i, block in enumerate(net.h):
    smp.set_partition(block, i % 2)
model = smp.DistributedModel(net)
optimizer = smp.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1)
)
lock = threading.Lock()


@smp.step
def train_step(x, y):
    if how == "lock":
        with lock:
            loss = F.cross_entropy(model(x), y)
            loss.item()
    else:
        loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


def spin():
    while True:
        pass


def go_wrong():
    if smp.rank() == 1 and how == "raise":
        raise ValueError("of rank 1")
    if smp.rank() == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if smp.rank() == 1 and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if smp.rank() == 1 and how == "loop":
        spin()
    net.h[3].holds = how == "hold"
    if smp.rank() == 1 and how == "leave":
        sys.exit(0)
    if smp.rank() == 0 and how == "interrupt":
        os.kill(os.getppid(), signal.SIGINT)


class Failing(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        if how == "worker" and i == 40:
            raise IndexError("sample 40 is broken")
        return torch.randn(32), i % 5


loader = torch.utils.data.DataLoader(
    Failing(), batch_size=16, num_workers=1 if how == "worker" else 0
)
for step in range(2000 if how == "interrupt" else 4):
    for i, (x, y) in enumerate(loader):
        if step > 0 and i == 1:
            go_wrong()
        optimizer.zero_grad()
        train_step(x, y)
        optimizer.step()
# In one piece: ranks may share the console.
sys.stdout.write(f"done on rank {smp.rank()}\n")
sys.stdout.flush()
if how == "no-shutdown":
    os.environ["X"] = "1"  # the end of the program ends the session

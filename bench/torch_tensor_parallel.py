"""What bench_tp compares with, by PyTorch over gloo.

gpt: the job of bench/gpt_job.hpp; its blocks by torch.distributed.tensor.parallel
(ColwiseParallel, RowwiseParallel), with the same samples on all ranks.
ncf: the model of runtime/train/models/ncf.hpp; each rank has a part of the
channels of all four tables, and all compute the rest for the same samples.
Started by bench_tp, one process per rank. Rank 0 writes the seconds of each step
to --file.
"""

import argparse
import os
import time

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, x, ranks):
        super().__init__()
        self.heads = x.heads // ranks
        self.ln_1 = nn.LayerNorm(x.width)
        self.c_attn = nn.Linear(x.width, 3 * x.width)
        self.attn_proj = nn.Linear(x.width, x.width)
        self.ln_2 = nn.LayerNorm(x.width)
        self.c_fc = nn.Linear(x.width, 4 * x.width)
        self.mlp_proj = nn.Linear(4 * x.width, x.width)

    def forward(self, x):
        b, t, _ = x.shape
        qkv = self.c_attn(self.ln_1(x)).view(b, t, 3, self.heads, -1)
        q, k, v = (y.transpose(1, 2) for y in qkv.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(b, t, -1))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, x, ranks):
        super().__init__()
        self.wte = nn.Embedding(x.vocabulary, x.width)
        self.wpe = nn.Embedding(x.length, x.width)
        self.h = nn.Sequential(*(Block(x, ranks) for _ in range(x.layers)))
        self.ln_f = nn.LayerNorm(x.width)
        self.lm_head = nn.Linear(x.width, x.vocabulary, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))
        return self.lm_head(self.ln_f(self.h(x)))


def gpt_job(x, ranks):
    model = Gpt(x, ranks)
    plan = {"c_attn": ColwiseParallel(), "attn_proj": RowwiseParallel(),
            "c_fc": ColwiseParallel(), "mlp_proj": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.h:
        parallelize_module(block, mesh, plan)
    whole, cut = [], []
    for p in model.parameters():
        (cut if isinstance(p, torch.distributed.tensor.DTensor) else whole).append(p)
    optimizers = [torch.optim.AdamW(p, 1e-3, weight_decay=0.1) for p in (whole, cut)]
    torch.manual_seed(7)
    rows = torch.randint(x.vocabulary, (x.batch, x.length + 1))
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step():
        for y in optimizers:
            y.zero_grad()
        for a, b in zip(tokens.chunk(x.microbatches), targets.chunk(x.microbatches)):
            loss = F.cross_entropy(model(a).flatten(0, 1), b.flatten())
            (loss / x.microbatches).backward()
        for y in optimizers:
            y.step()

    return step


class Merge(torch.autograd.Function):
    """[B, C / T] -> [B, C], the channels of all ranks."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()


class Ncf(nn.Module):
    def __init__(self, users, items, ranks, narrow=64, wide=512):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(n, width // ranks) for width in (narrow, wide) for n in (users, items))
        layers = []
        width = 2 * wide
        while width > narrow:
            layers += [nn.Dropout(0), nn.Linear(width, width // 2), nn.ReLU()]
            width //= 2
        self.layers = nn.Sequential(*layers)
        self.predict = nn.Linear(2 * narrow, 1)

    def forward(self, users, items):
        a, b, c, d = (Merge.apply(table(i)) for table, i in zip(self.tables, (users, items) * 2))
        network = self.layers(torch.cat((c, d), -1))
        return self.predict(torch.cat((a * b, network), -1)).squeeze(-1)


def ncf_job(x, ranks):
    model = Ncf(x.users, x.items, ranks)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    torch.manual_seed(7)
    users = torch.randint(x.users, (x.samples,))
    items = torch.randint(x.items, (x.samples,))
    labels = torch.randint(2, (x.samples,)).float()

    def step():
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(users, items), labels).backward()
        optimizer.step()

    return step


def main():
    parser = argparse.ArgumentParser()
    for name in ("width", "layers", "heads", "length", "vocabulary", "batch", "microbatches", "users", "items",
                 "samples"):
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--job", choices=("gpt", "ncf"), required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--file", required=True)
    x, _ = parser.parse_known_args()
    rank = int(os.environ["SMP_RANK"])
    ranks = int(os.environ["SMP_WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo", init_method="file://" + x.rendezvous, rank=rank, world_size=ranks)
    step = {"gpt": gpt_job, "ncf": ncf_job}[x.job](x, ranks)
    times = []
    begin = time.perf_counter()
    for _ in range(x.warmup + x.steps):
        step()
        end = time.perf_counter()
        times.append(end - begin)
        begin = end
    if rank == 0:
        with open(x.file, "w") as out:
            print("step", *times[x.warmup:], file=out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The GPT job of bench/gpt_job.hpp by torch.distributed.pipelining.

Started by bench_schedules: as one process without a pipeline, or as two ranks
with Schedule1F1B over gloo. Rank 0 writes the seconds of each step to --file.
"""

import argparse
import os
import time

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F


class Affine(nn.Module):
    """x W + b with W: [in, out], as GPT-2 has it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        y = torch.addmm(self.bias, x.flatten(0, 1), self.weight)
        return y.view(x.size(0), x.size(1), -1)


class Block(nn.Module):
    def __init__(self, x):
        super().__init__()
        self.heads = x.heads
        self.ln_1 = nn.LayerNorm(x.width)
        self.c_attn = Affine(x.width, 3 * x.width)
        self.attn_proj = Affine(x.width, x.width)
        self.ln_2 = nn.LayerNorm(x.width)
        self.c_fc = Affine(x.width, 4 * x.width)
        self.mlp_proj = Affine(4 * x.width, x.width)

    def forward(self, x):
        b, t, c = x.shape
        qkv = self.c_attn(self.ln_1(x)).view(b, t, 3, self.heads, -1)
        q, k, v = (y.transpose(1, 2) for y in qkv.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(b, t, c))
        h = F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")
        return x + self.mlp_proj(h)


class Embedding(nn.Module):
    def __init__(self, x):
        super().__init__()
        self.wte = nn.Embedding(x.vocabulary, x.width)
        self.wpe = nn.Embedding(x.length, x.width)

    def forward(self, tokens):
        return self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))


def stage(x, rank, ranks):
    """The layers of one rank: equally many blocks on each."""
    share = x.layers // ranks
    parts = [Block(x) for _ in range(share)]
    if rank == 0:
        parts.insert(0, Embedding(x))
    if rank == ranks - 1:
        parts.append(nn.LayerNorm(x.width))
        parts.append(nn.Linear(x.width, x.vocabulary, bias=False))
    return nn.Sequential(*parts)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_step(model, x, tokens, targets):
    for a, b in zip(tokens.chunk(x.microbatches), targets.chunk(x.microbatches)):
        (loss_of(model(a), b) / x.microbatches).backward()


def pipeline_step(model, x, rank, ranks):
    part = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(part, x.microbatches, loss_fn=loss_of)

    def run(tokens, targets):
        inputs = (tokens,) if rank == 0 else ()
        schedule.step(*inputs, target=targets if rank == ranks - 1 else None)

    return run


def main():
    parser = argparse.ArgumentParser()
    for name in ("width", "layers", "heads", "length", "vocabulary", "batch",
                 "microbatches"):
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pin", type=int, default=0)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--file", required=True)
    x, _ = parser.parse_known_args()
    rank = int(os.environ["SMP_RANK"])
    ranks = int(os.environ["SMP_WORLD_SIZE"])
    if x.pin:
        os.sched_setaffinity(0, {rank % os.cpu_count()})
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = stage(x, rank, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method="file://" + x.rendezvous,
                                rank=rank, world_size=ranks)
        step = pipeline_step(model, x, rank, ranks)
    else:
        def step(tokens, targets):
            plain_step(model, x, tokens, targets)
    torch.manual_seed(7)
    rows = torch.randint(x.vocabulary, (x.batch, x.length + 1))
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    times = []
    begin = time.perf_counter()
    for _ in range(x.warmup + x.steps):
        optimizer.zero_grad()
        step(tokens, targets)
        optimizer.step()
        end = time.perf_counter()
        times.append(end - begin)
        begin = end
    if rank == 0:
        with open(x.file, "w") as out:
            print("step", *times[x.warmup:], file=out)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

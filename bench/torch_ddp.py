"""The GPT job of bench/gpt_job.hpp by torch's DistributedDataParallel.

Started by bench_ddp: as one process, or as two ranks over gloo with half of the
batch each; with --shard=1 each has the optimizer's state of a part. Rank 0
writes the seconds of each step to --file.
"""

import argparse
import contextlib
import os
import time

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from torch_pipelining import loss_of, stage


def main():
    parser = argparse.ArgumentParser()
    for name in ("width", "layers", "heads", "length", "vocabulary", "batch",
                 "microbatches"):
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pin", type=int, default=0)
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--file", required=True)
    x, _ = parser.parse_known_args()
    rank = int(os.environ["SMP_RANK"])
    ranks = int(os.environ["SMP_WORLD_SIZE"])
    if x.pin:
        os.sched_setaffinity(0, {rank % os.cpu_count()})
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = stage(x, 0, 1)
    unsynced = contextlib.nullcontext
    if ranks > 1:
        dist.init_process_group("gloo", init_method="file://" + x.rendezvous,
                                rank=rank, world_size=ranks)
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        unsynced = model.no_sync
    options = {"lr": 1e-3, "weight_decay": 0.1}
    if ranks > 1 and x.shard:
        optimizer = ZeroRedundancyOptimizer(model.parameters(),
                                            torch.optim.AdamW, **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    torch.manual_seed(7)
    rows = torch.randint(x.vocabulary, (x.batch, x.length + 1)).chunk(ranks)[rank]
    parts = x.microbatches // ranks
    tokens = rows[:, :-1].contiguous().chunk(parts)
    targets = rows[:, 1:].contiguous().chunk(parts)
    times = []
    begin = time.perf_counter()
    for _ in range(x.warmup + x.steps):
        optimizer.zero_grad()
        for i in range(parts):
            last = i == parts - 1
            with contextlib.nullcontext() if last else unsynced():
                (loss_of(model(tokens[i]), targets[i]) / parts).backward()
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

"""The other side of bench/comm.cpp: collectives of torch.distributed over gloo.

Started once per rank; rank 0 writes the seconds of each call to --file, a line
"KIND.BYTES SECONDS ..." per size.
"""

import argparse
import datetime
import os
import time

import torch
import torch.distributed as dist


def times_of(calls, call):
    """Seconds of each call, after some that do not count."""
    result = []
    warm = calls // 10 + 2
    for i in range(calls + warm):
        dist.barrier()
        begin = time.perf_counter()
        call()
        spent = time.perf_counter() - begin
        if i >= warm:
            result.append(spent)
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--sizes", required=True, help="BYTES:CALLS,...")
    x, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    rank = int(os.environ["SMP_RANK"])
    world = int(os.environ["SMP_WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="file://" + x.rendezvous,
                            rank=rank, world_size=world,
                            timeout=datetime.timedelta(seconds=120))
    found = {}
    for entry in x.sizes.split(","):
        size, calls = map(int, entry.split(":"))
        whole = torch.zeros(size // 4)
        found[f"allreduce.{size}"] = times_of(
            calls, lambda: dist.all_reduce(whole))
        parts = torch.ones(world, size // 4 // world)

        def all_to_all():
            taken = torch.empty_like(parts)
            dist.all_to_all_single(taken, parts)

        found[f"all_to_all.{size}"] = times_of(calls, all_to_all)
    if rank == 0:
        with open(x.file, "w") as out:
            for name, times in found.items():
                print(name, *times, file=out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

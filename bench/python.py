# What Python costs:
#
#   ./dev bench python [--part=abc] [--rounds=N] [--steps=N] [--calls=N]
#                      [--widths=64,256] [--attention=eager|sdpa]
#
# (a) A call of a module on the own rank, through smp and without it.
#
# (b) A call of a module on another rank that waits for its result, beside the
# same in C++ (bench_call): a request and a response with 64 KB each.
#
# (c) Training steps of a GPT-2 of transformers in 8 microbatches, over two ranks
# of one thread each and in one process without smp, in turn; and over two
# processes with torch.distributed.pipelining, which traces the model, and what it
# makes of attention by PyTorch's own function (sdpa) fails on the second rank. A
# pipeline of p ranks and m microbatches cannot be faster than (m + p - 1) / (m p)
# of one process.

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

MICROBATCHES, LAYERS, LENGTH, BATCH, VOCABULARY = 8, 8, 128, 32, 512
IDEAL = (MICROBATCHES + 1) / (2 * MICROBATCHES)


# -- what is measured, in processes of its own ---------------------------------


def calls(x):
    import torch

    import smp

    torch.set_num_threads(1)
    smp.init(
        pipeline_parallel_degree=2,
        auto_partition=False,
        fast_mode=False,
        threads=1,
    )

    class PlusOne(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x + self.one

    net = torch.nn.Module()
    net.near, net.far = PlusOne(), PlusOne()
    smp.set_partition(net.near, 0)
    smp.set_partition(net.far, 1)
    plain = PlusOne()
    model = smp.DistributedModel(net)
    found = {}

    def measure(name, module, per_step=100):
        @smp.step(microbatches=1, non_split_inputs=["x"])
        def run(x):
            times = []
            for _ in range(per_step):
                begin = time.perf_counter()
                module(x)
                times.append(time.perf_counter() - begin)
            return times

        for i in range(2 + x.calls // per_step):
            with torch.no_grad():
                out = run(torch.randn(16 * 1024))
            if i >= 2:
                found.setdefault(name, []).extend(t.outputs[0] for t in out)

    measure("plain", plain)
    measure("near", model.near)
    measure("far", model.far)
    if smp.rank() == 0:
        write(x, found)


def gpt2(x):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=x.width,
        n_layer=LAYERS,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation=x.attention,
        use_cache=False,
        tie_word_embeddings=False,  # the peer cannot
    )
    return GPT2LMHeadModel(config), torch.randint(
        0, VOCABULARY, (BATCH, LENGTH)
    )


def loss_of(logits, labels):
    from torch.nn import functional as F

    logits = logits[:, :-1].reshape(-1, logits.size(-1))
    return F.cross_entropy(logits, labels[:, 1:].reshape(-1))


def steps(x, run, optimizer, tells=True):
    times = []
    for i in range(x.warmup + x.steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        run()
        optimizer.step()
        if i >= x.warmup:
            times.append(time.perf_counter() - begin)
    if tells:
        write(x, {"step": times})


def adamw(model):
    import torch

    return torch.optim.AdamW(model.parameters(), 1e-3)


def over_ranks(x):
    net, ids = gpt2(x)

    import smp

    smp.init(
        pipeline_parallel_degree=2,
        microbatches=MICROBATCHES,
        threads=1,
        optimize="speed",
    )
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(adamw(model))

    @smp.step
    def step(ids):
        loss = loss_of(model(input_ids=ids).logits, ids)
        model.backward(loss)
        return loss

    steps(x, lambda: step(ids), optimizer, smp.rank() == 0)


def alone(x):
    net, ids = gpt2(x)

    def run():
        for part in ids.chunk(MICROBATCHES):
            loss = loss_of(net(input_ids=part).logits, part)
            (loss / MICROBATCHES).backward()

    steps(x, run, adamw(net))


def peer(x):
    net, ids = gpt2(x)

    import torch
    from torch import distributed as dist
    from torch.distributed import pipelining

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    # gloo sends no tensor with gaps, as gradients of a model may be.
    operation = dist.P2POp
    dist.P2POp = lambda op, x, *args, **more: operation(
        op, x.contiguous() if op is dist.isend else x, *args, **more
    )
    middle = f"transformer.h.{LAYERS // 2}"
    pipe = pipelining.pipeline(
        net,
        mb_args=(),
        mb_kwargs={"input_ids": ids.chunk(MICROBATCHES)[0]},
        split_spec={middle: pipelining.SplitPoint.BEGINNING},
    )
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)

    def run():
        if rank == 0:
            schedule.step(input_ids=ids)
        else:
            schedule.step(target=ids)

    steps(x, run, adamw(stage.submod), rank == 0)
    dist.destroy_process_group()


def write(x, numbers):
    with open(x.file, "w") as file:
        json.dump(numbers, file)


# -- rounds ----------------------------------------------------------------------


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def measured(x, role, ranks, **options):
    """Runs a role in fresh processes; returns its numbers, or why not."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "numbers.json")
        given = {**vars(x), **options, "file": file}
        mine = [__file__, "--role", role] + [
            f"--{k}={v}" for k, v in given.items() if k != "role"
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if ranks == 2 and role != "peer":
            run = [*"-m smp.run -n 2 --run-dir".split(), folder + "/run"]
            mine = run + mine
            ranks = 1
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        env.update(WORLD_SIZE=str(ranks), GLOO_SOCKET_IFNAME="lo")
        if ranks == 1:
            env.pop("WORLD_SIZE")
        found = []
        for rank in range(ranks):
            own = {**env, "RANK": str(rank)} if ranks > 1 else env
            found.append(
                subprocess.Popen(
                    [sys.executable, *mine],
                    env=own,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        texts = [p.communicate(timeout=600)[0] for p in found]
        if not os.path.exists(file):
            lines = [x for x in "\n".join(texts).splitlines() if "Error: " in x]
            return None, lines[0] if lines else texts[0].splitlines()[-1:]
        with open(file) as numbers:
            return json.load(numbers), None


def in_cpp(x):
    """What bench_call says of the same calls."""
    return subprocess.run(
        ["bench_call", "--part=a", f"--calls={x.calls}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def print_calls(x):
    us = {"plain": [], "near": [], "far": []}
    for _ in range(x.rounds):
        found, why = measured(x, "calls", 2)
        if found is None:
            raise SystemExit(f"calls: {why}")
        for name, times in found.items():
            us[name] += [1e6 * t for t in times]
    print(f"{'a call, us':<46} {'min':>8} {'median':>8}")
    for name, text in (
        ("plain", "of torch alone, 64 KB"),
        ("near", "on the own rank"),
        ("far", "on another rank, which waits"),
    ):
        xs = us[name]
        print(f"  {text:<44} {min(xs):8.1f} {statistics.median(xs):8.1f}")
    print()
    print(in_cpp(x), end="", flush=True)


def print_steps(x, width):
    roles = {"alone": 1, "over_ranks": 2, "peer": 2}
    found = {role: [] for role in roles}
    failed = {}
    for _ in range(x.rounds):
        for role, ranks in roles.items():
            numbers, why = measured(x, role, ranks, width=width)
            if numbers is None:
                failed[role] = why
            else:
                found[role] += numbers["step"]
    one = found["alone"]
    ideal = IDEAL * min(one), IDEAL * statistics.median(one)
    print(f"width {width:<36} {'min ms':>8} {'median':>8} {'over ideal':>17}")
    for role, text in (
        ("alone", "one process"),
        ("over_ranks", "smp, 2 ranks"),
        ("peer", "torch.distributed.pipelining, 2 ranks"),
    ):
        if not found[role]:
            print(f"  {text:<44} failed: {failed[role]}")
            continue
        least, middle = min(found[role]), statistics.median(found[role])
        ratio = f"{least / ideal[0]:8.3f} {middle / ideal[1]:8.3f}"
        print(
            f"  {text:<40} {1e3 * least:8.1f} {1e3 * middle:8.1f} "
            f"{ratio if role != 'alone' else '':>17}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--role")
    parser.add_argument("--part", default="abc")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--widths", default="64,256")
    parser.add_argument("--attention", default="eager")
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--file", default="")
    x = parser.parse_args()
    if x.role:
        return globals()[x.role](x)
    if set(x.part) & set("ab"):
        print_calls(x)
    if "c" in x.part:
        for width in x.widths.split(","):
            print_steps(x, int(width))


if __name__ == "__main__":
    main()

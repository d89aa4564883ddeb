# ctest: seconds=50 label=multiprocess
"""Scripts that were written for something else, with few changes or none."""

import json
import os
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F

import smp
from harness import expect

HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAMS = os.path.join(HERE, "programs")
sys.path.insert(0, PROGRAMS)


def run(ranks, program, *args, **environment):
    """The lines that rank 0 prints."""
    command = [sys.executable]
    with tempfile.TemporaryDirectory() as folder:
        if ranks > 1:
            command += ["-m", "smp.run", "-n", str(ranks)]
        done = subprocess.run(
            [*command, os.path.join(PROGRAMS, program), *args],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=150,
            text=True,
            env={**os.environ, **environment},
        )
    if done.returncode != 0:
        print(done.stdout)
        sys.exit(f"{program} on {ranks} ranks ended with {done.returncode}")
    return done.stdout.splitlines()


def losses_in(lines):
    found = [x.split() for x in lines if x.startswith("loss ")]
    return {int(x[1]): float(x[2]) for x in found}


def check(what, found, expected, within=2e-6):
    if found.keys() != expected.keys() or any(
        abs(x - expected[i]) > within for i, x in found.items()
    ):
        sys.exit(f"{what}: {found}, wanted {expected}")
    print(f"ok {what}", flush=True)


# -- the withdrawn product -------------------------------------------------------


def options(**more):
    return json.dumps({"partitions": 2, "microbatches": 4, **more})


def withdrawn_alone():
    """What one process computes."""
    import withdrawn

    torch.manual_seed(7)
    net = withdrawn.GroupedNet()
    optimizer = torch.optim.Adadelta(net.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    result = {}
    for i, (data, target) in enumerate(withdrawn.batches(6)):
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(data.chunk(4), target.chunk(4)):
            loss = F.nll_loss(net(x), y) / 4
            loss.backward()
            total += loss.item()
        optimizer.step()
        schedule.step()
        result[i] = total
    return result


def a_script_of_the_withdrawn_product():
    expected = withdrawn_alone()
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "SM_HP_MP_PARAMETERS": options(
                ddp=True,
                placement_strategy="spread",
                optimize="speed",
                shard_optimizer_state=True,
                ddp_port=29400,
            )
        }
        lines = run(2, "withdrawn.py", folder, **given)
        check("the withdrawn product's script", losses_in(lines), expected)
        rest = run(2, "withdrawn.py", folder, "resume", **given)
        later = {i: x for i, x in expected.items() if i >= 3}
        check("its checkpoint", losses_in(rest), later)
        if rest[-1] != lines[-1] or "test loss" not in lines[-1]:
            sys.exit(f"its evaluation: {rest[-1]}, wanted {lines[-1]}")


def its_half_precision():
    with tempfile.TemporaryDirectory() as folder:
        given = {"SM_HP_MP_PARAMETERS": options(fp16=True)}
        found = losses_in(run(2, "withdrawn.py", folder, **given))
    check("its fp16", found, withdrawn_alone(), within=0.02)
    if found == withdrawn_alone():
        sys.exit("fp16 was ignored")


def its_options():
    from smdistributed.modelparallel.torch import _config

    def translated(size=1, **options):
        os.environ["SMP_WORLD_SIZE"] = str(size)
        try:
            return _config.translated(options)
        finally:
            del os.environ["SMP_WORLD_SIZE"]

    table = [
        (1, dict(partitions=2, horovod=False), dict(partitions=2)),
        (1, dict(fp16=True, bf16=False), dict(fp16_params=True)),
        (1, dict(skip_tracing=True), dict(trace_device="none")),
        (1, dict(optimize="speed", memory_weight=0.5), dict(memory_weight=0.5)),
        (1, dict(default_partition=1), {}),
        (
            2,
            dict(ddp=True, placement_strategy="spread", partitions=2),
            dict(ddp=True, partitions=2),
        ),
        (
            4,
            dict(ddp=True, placement_strategy="spread", partitions=2),
            dict(
                ddp=True,
                placement_strategy="spread",
                partitions=2,
                broadcast_buffers=True,
            ),
        ),
        (1, dict(sdp_max_live_parameters=1), {}),
        (1, dict(nosuch=1), dict(nosuch=1)),  # smp.init refuses it
    ]
    for size, given, wanted in table:
        found = translated(size, **given)
        assert found == wanted, (given, found, wanted)
    expect(
        smp.Error,
        "shard_gradients",
        lambda: translated(sharded_data_parallel_degree=2),
    )
    expect(smp.Error, "TensorFlow", lambda: translated(horovod=True))
    shim = sys.modules["smdistributed.modelparallel.torch"]
    expect(
        smp.Error, "unknown key smp.nosuch", lambda: shim.init({"nosuch": 1})
    )
    expect(
        smp.Error,
        "scaled_dot_product",
        lambda: shim.nn.DistributedTransformerLayer,
    )
    expect(
        smp.Error,
        "smp.init({'broadcast_buffers': False})",
        lambda: _refused_buffers(shim, _config),
    )
    print("ok its options", flush=True)


def _refused_buffers(shim, config):
    config.keep({"ddp": True})
    shim.DistributedModel(torch.nn.Linear(1, 1), broadcast_buffers=False)


# -- transformers' Trainer -------------------------------------------------------


def trainer(ranks, out, *args):
    given = {}
    if ranks > 1:
        given["SM_HP_MP_PARAMETERS"] = options()
        given["SM_FRAMEWORK_PARAMS"] = '{"sagemaker_mpi_enabled": true}'
    else:
        args = ("--use_cpu", "true", *args)
    args = [
        *("--output_dir", out, "--report_to", "none", "--disable_tqdm", "true"),
        *("--per_device_train_batch_size", "8", "--num_train_epochs", "1"),
        *("--logging_steps", "1", "--save_steps", "3"),
        *("--save_strategy", "steps", "--learning_rate", "1e-2"),
        *("--weight_decay", "0.1", "--max_grad_norm", "0.5", *args),
    ]
    return run(ranks, "trainer.py", *args, **given)


def the_trainer_of_transformers():
    with tempfile.TemporaryDirectory() as folder:
        expected = trainer(1, os.path.join(folder, "alone"))
        wanted = losses_in(expected)
        assert len(wanted) == 6, expected
        out = os.path.join(folder, "2")
        found = trainer(2, out)
        check("the Trainer of transformers", losses_in(found), wanted, 2e-4)
        for of in ("test loss", "norm"):
            x, y = (last(of, lines) for lines in (found, expected))
            assert abs(x - y) < 2e-5 * y, (of, x, y)
        saved = os.path.join(out, "checkpoint-3")
        # This torch refuses to read it, with or without smp.
        os.remove(os.path.join(saved, "rng_state.pth"))
        rest = trainer(2, out, "--resume_from_checkpoint", saved)
        later = {i: x for i, x in wanted.items() if i > 3}
        check("its checkpoint", losses_in(rest), later, 2e-4)


def last(what, lines):
    return [float(x.split()[-1]) for x in lines if x.startswith(what)][-1]


# -- a script for one process ----------------------------------------------------


def a_script_with_ten_other_lines():
    old, new = (lines_of(name) for name in ("gpt_one.py", "gpt_two.py"))
    changed = [x for x in new if x not in old]
    assert len(changed) <= 10, changed
    with tempfile.TemporaryDirectory() as folder:
        expected = run(1, "gpt_one.py", folder)
        one = torch.load(os.path.join(folder, "ckpt.pt"))
        found = run(2, "gpt_two.py", folder)
        two = torch.load(os.path.join(folder, "ckpt.pt"))
    check("a script for one process", losses_in(found), losses_in(expected))
    tests = [
        {int(x.split()[2]): float(x.split()[3]) for x in lines if "test" in x}
        for lines in (found, expected)
    ]
    check("its evaluation", *tests)
    assert one["model"].keys() == two["model"].keys()
    for name, x in one["model"].items():
        assert torch.allclose(x, two["model"][name], 0, 2e-5), name


def lines_of(name):
    """Without what it says of itself, and however deep they are."""
    with open(os.path.join(PROGRAMS, name)) as file:
        code = file.read().partition('"""\n\n')[2]
    return [x.strip() for x in code.splitlines()]


def main():
    its_options()
    a_script_of_the_withdrawn_product()
    its_half_precision()
    the_trainer_of_transformers()
    a_script_with_ten_other_lines()


if __name__ == "__main__":
    main()

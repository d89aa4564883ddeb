# ctest: seconds=60 label=multiprocess
"""Programs as users start them: how they end, and what they then say."""

import os
import re
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
DROPOUT = os.path.join(HERE, "programs", "dropout.py")
BIN = os.environ.get("SMP_BIN_DIR") or os.path.join(
    HERE, "..", "..", "build/release/bin"
)
CONFIGURED = os.path.join(HERE, "programs", "configured.py")
FAULTY = os.path.join(HERE, "programs", "faulty.py")


# As users have it: the tests' own settings of UCX would hide its warnings.
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")}


def run(command, folder, limit=100, **more):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**ENVIRONMENT, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=limit,
        text=True,
    )
    return done.returncode, done.stdout


def expect(command, code, *texts, **more):
    with tempfile.TemporaryDirectory() as folder:
        found, output = run(command, folder, **more)
        problems = [x for x in texts if x not in output]
        if found != code or problems or "UCX  WARN" in output:
            print(output)
            sys.exit(
                f"{command}: ended with {found}, wanted {code}; no {problems}"
            )
        print("ok", *command[-2:], flush=True)


def configured():
    """By a file that SMP_CONFIG names."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "run.toml")
        with open(path, "w") as file:
            file.write(
                "[smp]\npipeline_parallel_degree = 2\nmicrobatches = 3\n"
            )
        expect(
            ["-m", "smp.run", "-n", "2", CONFIGURED],
            0,
            "microbatches 3 of 2 ranks",
            "the head is on [1]",
            SMP_CONFIG=path,
        )
        with open(path, "a") as file:
            file.write("microbatch = 3\n")
        expect(
            ["-m", "smp.run", "-n", "2", CONFIGURED],
            2,
            f"{path}:4: unknown key smp.microbatch",
            SMP_CONFIG=path,
        )


def compare_dropout():
    """On any number of ranks the same numbers are drawn."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for n in (1, 2, 4):
            code, output = run(["-m", "smp.run", "-n", str(n), DROPOUT], folder)
            losses = [x for x in output.splitlines() if x.startswith("loss")]
            if code != 0 or len(losses) != 4:
                sys.exit(f"dropout on {n} ranks: {output}")
            found.append(losses)
    if found[0] != found[1] or found[0] != found[2] or len(set(found[0])) < 4:
        sys.exit(f"dropout differs between 1, 2 and 4 ranks: {found}")
    print("ok dropout", flush=True)


def line_of(text):
    with open(FAULTY) as file:
        return 1 + [x.strip() for x in file].index(text)


def look_at_a_run():
    """Stacks of a rank that never gives the interpreter's lock back to who
    waits for it, and of one in C++; and where its modules are."""
    wanted = {
        f'faulty.py", line {line_of("while True:")} in spin',
        f'faulty.py", line {line_of("pass")} in spin',
    }
    with tempfile.TemporaryDirectory() as folder:
        ranks = ["-m", "smp.run", "-n", "2", "--run-dir", "run", FAULTY, "loop"]
        with subprocess.Popen([sys.executable, *ranks], cwd=folder) as program:
            end = time.monotonic() + 90
            output = {0: "", 1: ""}
            while program.poll() is None and not (
                any(x in output[1] for x in wanted)
                and "in train_step" in output[0]
            ):
                if time.monotonic() > end:
                    break
                for rank in output:
                    output[rank] = subprocess.run(
                        [os.path.join(BIN, "smp-inspect"), "run", "stack"]
                        + [str(rank)],
                        cwd=folder,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,  # it has not begun
                        timeout=60,
                        text=True,
                    ).stdout
            places = subprocess.run(
                [os.path.join(BIN, "smp-inspect"), "run", "partition"],
                cwd=folder,
                stdout=subprocess.PIPE,
                timeout=60,
                text=True,
            ).stdout
            ended = program.poll()
            program.kill()
    if ended is not None or not any(x in output[1] for x in wanted):
        sys.exit(f"stack of rank 1: {ended}, {output[1]}; wanted {wanted}")
    if "in train_step" not in output[0]:
        sys.exit(f"stack of rank 0: {output[0]}")
    if not all(
        re.search(rf"\n +{i} +Block .* {i % 2}\n", places) for i in range(4)
    ):
        sys.exit(f"partition: {places}")
    print("ok look", flush=True)


def main():
    look_at_a_run()
    compare_dropout()
    configured()
    ranks = ["-m", "smp.run", "-n", "2", FAULTY]
    expect([*ranks, "no-shutdown"], 0, "done on rank 0")
    expect([*ranks, "wrong-key"], 2, "did you mean smp.microbatches")
    expect([*ranks, "raise"], 3, "rank 1", "ValueError: of rank 1")
    expect([*ranks, "kill"], 3, "rank 1: killed by signal 9 (SIGKILL)")
    expect([*ranks, "leave"], 4, "every rank has to call each step")
    expect([*ranks, "interrupt"], 130, "interrupted")
    expect([*ranks, "worker"], 3, "sample 40 is broken")
    expect([*ranks, "lock"], 4, "waits for the execution token")
    expect([*ranks, "stop"], 4, "rank 1 has not answered for")
    holds = (
        "module h.3, microbatch 0, forward (no thread can take Python's lock"
    )
    expect([*ranks, "hold"], 4, f"rank 1 executes {holds} for")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", FAULTY]
    expect([*torchrun, "no-shutdown"], 0, "done on rank 0", "done on rank 1")
    expect(
        [FAULTY, "alone"], 1, "start the program with python -m smp.run -n 2"
    )
    expect(["-m", "smp.run", "-n", "0", FAULTY], 2, "1 or more")
    expect(["-m", "smp.run", "none.py"], 2, "none.py: no such file")
    expect(["-m", "smp.run", "--help"], 0, "Exit codes")
    expect(["-c", "import smp; smp.rank()"], 1, "call smp.init() first")


if __name__ == "__main__":
    main()

# ctest: seconds=60 label=multiprocess
"""Programs as users start them: how they end, and what they then say."""

import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
DROPOUT = os.path.join(HERE, "programs", "dropout.py")
FAULTY = os.path.join(HERE, "programs", "faulty.py")


def run(command, folder, limit=100):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=limit,
        text=True,
    )
    return done.returncode, done.stdout


def expect(command, code, *texts):
    with tempfile.TemporaryDirectory() as folder:
        found, output = run(command, folder)
        problems = [x for x in texts if x not in output]
        if found != code or problems:
            print(output)
            sys.exit(
                f"{command}: ended with {found}, wanted {code}; no {problems}"
            )
        print("ok", *command[-2:], flush=True)


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


def main():
    compare_dropout()
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

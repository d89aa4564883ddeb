"""python -m smp.run -n 2 train.py ARGS: starts a program as several ranks."""

import argparse
import os
import sys


def main():
    parser = argparse.ArgumentParser(
        prog="python -m smp.run",
        description="Starts a Python program as the ranks of one run, on this "
        "machine, and ends all of them if one fails. Rank 0 writes to the "
        "console; each rank has a log in the run's directory.",
        epilog="Exit codes: 0 done, 2 bad command line or configuration, 3 a rank "
        "failed, 4 stalled, 5 not finite, 130 interrupted.",
    )
    parser.add_argument(
        "-n", "--ranks", type=int, default=1, help="number of ranks"
    )
    parser.add_argument(
        "--run-dir",
        default="",
        help="directory for logs (default: runs/TIME-PROGRAM)",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="PROGRAM is a module"
    )
    parser.add_argument("program", help="a Python file, or with -m a module")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    x = parser.parse_args()
    if x.ranks < 1:
        parser.error("-n: expected a number of ranks, 1 or more")
    if not x.module and not os.path.exists(x.program):
        parser.error(f"{x.program}: no such file")
    from . import Error, _core

    command = [
        sys.executable,
        "-u",
        *(["-m"] if x.module else []),
        x.program,
        *x.args,
    ]
    name = os.path.splitext(os.path.basename(x.program))[0]
    try:
        code = _core.start_ranks(x.ranks, command, x.run_dir, name)
    except Error as e:
        print(f"smp: {e}", file=sys.stderr)
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

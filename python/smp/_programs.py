"""The programs of the wheel: smp-train, smp-top and smp-inspect."""

import os
import sys


def _run(name):
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", name)
    os.execv(path, [path, *sys.argv[1:]])


def smp_train():
    _run("smp-train")


def smp_top():
    _run("smp-top")


def smp_inspect():
    _run("smp-inspect")

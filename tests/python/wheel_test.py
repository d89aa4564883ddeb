# ctest: seconds=60 label=proof processors=2
"""The wheel of `./dev wheel`, in an environment that has nothing of this tree."""

import os
import re
import shutil
import subprocess
import sys
import tempfile

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "..", ".."))

# Trains, and says which files it has loaded.
PROGRAM = """
import smp
exec(open("train_net.py").read())
files = {x.split(" ", 5)[5].strip() for x in open("/proc/self/maps") if "/" in x}
print("loaded:", *(x for x in sorted(files) if ".so" in x), sep="\\n")
"""


def run(command, folder=ROOT, limit=600, **options):
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=limit,
        text=True,
        **options,
    )
    print("==", *command, "\n" + done.stdout[-6000:], flush=True)
    assert done.returncode == 0, f"exited with code {done.returncode}"
    return done.stdout


def python_with_pip():
    for python in ("python3", "/usr/bin/python3"):
        found = subprocess.run([python, "-m", "pip", "--version"])
        if found.returncode == 0:
            return python
    raise AssertionError("no Python has pip")


def cached(name):
    with open(os.path.join(ROOT, "build/package/CMakeCache.txt")) as file:
        return re.search(rf"^{name}:\w+=(.*)$", file.read(), re.M)[1]


def make_environment(folder, wheel):
    """An empty environment with the wheel. PyTorch, what it needs, and UCX are
    those of this machine, under the names that their wheels give them."""
    python = os.path.join(folder, "bin/python")
    run([sys.executable, "-m", "venv", "--without-pip", folder])
    run(
        [python_with_pip(), "-m", "pip", "--python", python, "install"]
        + ["--no-deps", "--no-index", wheel],
    )
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = os.path.join(folder, "lib", version, "site-packages")
    theirs = os.path.dirname(os.path.dirname(torch.__file__))
    for name in os.listdir(theirs):
        if not name.startswith(("smp", "smdistributed", "__", "libucx")):
            if not os.path.exists(os.path.join(packages, name)):
                os.symlink(
                    os.path.join(theirs, name), os.path.join(packages, name)
                )
    os.symlink(cached("SMP_UCX_DIR"), os.path.join(packages, "libucx"))
    return python, packages


def main():
    for name in os.listdir(os.path.join(ROOT, "build")):
        if name in ("wheel", "package"):
            shutil.rmtree(os.path.join(ROOT, "build", name))
    run([os.path.join(ROOT, "dev"), "wheel"])
    (name,) = [
        x
        for x in os.listdir(os.path.join(ROOT, "build/wheel"))
        if x.endswith(".whl")
    ]
    with tempfile.TemporaryDirectory() as folder:
        wheel = shutil.copy(os.path.join(ROOT, "build/wheel", name), folder)
        venv = os.path.join(folder, "venv")
        python, packages = make_environment(venv, wheel)
        work = os.path.join(folder, "work")
        os.mkdir(work)
        for file in ("examples/train_net.py", "config/quickstart.toml"):
            shutil.copy(os.path.join(ROOT, file), work)
        shutil.copytree(os.path.join(ROOT, "config/data"), work + "/data")
        with open(os.path.join(work, "program.py"), "w") as file:
            file.write(PROGRAM)
        clean = {
            "PATH": os.path.join(venv, "bin") + ":/usr/bin:/bin",
            "HOME": folder,
            "OMP_NUM_THREADS": "1",
        }

        def installed(*command):
            return run(list(command), work, env=clean)

        output = installed("python", "-m", "smp.run", "-n", "2", "program.py")
        losses = [float(x) for x in re.findall(r"loss ([\d.]+)", output)]
        assert len(losses) == 5 and losses[-1] < 0.7 * losses[0], losses
        # Nothing of the tree, and nothing of this system but what is UCX's own.
        loaded = output.partition("loaded:\n")[2].split()
        for part in ("/smp/_core.", "/smp/lib/libsmp", "/libucp"):
            assert any(part in x for x in loaded), part
        for x in loaded:
            if re.search("smp|caf|libuc", os.path.basename(x)):
                assert x.startswith((packages, cached("SMP_UCX_DIR"))), x
            assert not x.startswith(ROOT), x
        output = installed("smp-train", "quickstart.toml", "--train.steps=3")
        assert "done after 3 of 3 steps" in output
        for program in ("smp-top", "smp-inspect"):
            assert f"{program} " in installed(program, "--help")


main()

# ctest: seconds=40 label=proof processors=2
"""models_test.py with the next major version of transformers."""

import os
import subprocess
import sys

packages = os.environ.get("SMP_NEXT_TRANSFORMERS")
if not packages:
    print(
        "skipped: `./dev test` did not install that version, as SMP_PYTHON is set"
    )
    sys.exit(4)

path = [packages, os.environ.get("PYTHONPATH", "")]
env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
print_version = "import transformers; print(transformers.__version__)"
version = subprocess.check_output(
    [sys.executable, "-c", print_version], env=env, text=True
)
assert version.startswith("5."), version
models = os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "models_test.py"
)
sys.exit(subprocess.call([sys.executable, models], env=env))

"""The session of this process: its begin, its end, and how it fails."""

import atexit
import faulthandler
import inspect
import json
import os
import sys
import traceback
from typing import Any

from . import _autograd, _core, _state
from ._errors import Error
from ._schedule import Schedule

# Options of a session that a configuration file does not have.
_OF_PROGRAMS = ("average_grads_across_microbatches",)
_TABLES = (
    "tensor_parallel",
    "activation_checkpointing",
    "transport",
    "monitor",
)


def _text(x):
    """A value as TOML."""
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, str):
        return json.dumps(x)
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join(_text(y) for y in x) + "]"
    if isinstance(x, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(k)} = {_text(y)}" for k, y in x.items())
            + "}"
        )
    return repr(x)


def _settings(options):
    for name, x in options.items():
        if x is None:
            continue
        if isinstance(x, dict) and name in _TABLES:
            for key, y in x.items():
                yield f"{name}.{key}={_text(y)}"
        else:
            yield f"{name if '.' in name else 'smp.' + name}={_text(x)}"


def init(
    config: dict[str, Any] | str | os.PathLike[str] | None = None,
    **options: Any,
) -> None:
    """Joins the other ranks. Options are the keys of docs/config.md, those of
    ``[smp]`` by their names alone: ``smp.init(pipeline_parallel_degree=2,
    microbatches=8)``. ``config`` is a dict of them, or the path of a TOML file;
    without it, the file that SMP_CONFIG names, if it does. Options win.
    ``pipeline`` may be a class derived from ``smp.Schedule``."""
    text, name = "", "smp.init"
    if config is None:
        config = os.environ.get("SMP_CONFIG")
    if isinstance(config, (str, os.PathLike)):
        name = os.fspath(config)
        try:
            with open(name, encoding="utf-8") as file:
                text = file.read()
        except OSError as e:
            raise Error(f"smp.init: {name}: {e.strerror}") from None
        config = {}
    options = {**(config or {}), **options}
    own = {k: bool(options.pop(k)) for k in _OF_PROGRAMS if k in options}
    schedule = options.get("pipeline")
    if inspect.isclass(schedule):
        if not issubclass(schedule, Schedule):
            raise Error(
                f"smp.init: pipeline = {schedule.__name__} is no schedule: "
                "derive the class from smp.Schedule"
            )
        del options["pipeline"]
    else:
        schedule = None
    _show_frames()
    _state.manual_partition = _core.begin(
        text, name, list(_settings(options)), own, schedule
    )
    _state.model = None
    _state.optimizers.clear()
    _state.updates = 0
    _state.marks.clear()
    _state.options = options
    end_on_uncaught_exceptions()
    _autograd.install()


def _show_frames():
    """Lets smp-inspect RUN stack show the frames of Python, also while another
    thread holds the interpreter's lock: each thread is asked for its own."""
    probe = _core.script_probe()
    if probe is not None:
        signal, file = probe
        faulthandler.register(signal, file=file, all_threads=False, chain=False)


def end_on_uncaught_exceptions():
    sys.excepthook = _end_after_exception


def is_initialized() -> bool:
    """Whether this process is in a session."""
    return _core.running()


def shutdown() -> None:
    """Ends the session, after all ranks have got here. The end of a program
    does it too."""
    if not _core.running():
        return
    model = _state.current_model()
    for x in _state.live_optimizers():
        x._core = None
    if model is not None:
        model._end()
    _autograd.remove()
    _core.end()


def _end_after_exception(kind, value, trace):
    """An exception that nobody caught: the other ranks must not wait for this
    one."""
    sys.stdout.flush()
    traceback.print_exception(kind, value, trace)
    sys.stderr.flush()
    if kind is KeyboardInterrupt:
        os._exit(130)
    _core.end_after_exception(getattr(value, "code", "user_code"))


def run_dir() -> str:
    """The directory for the files of this run; empty if it has none."""
    return _core.run_dir()


def last_step() -> dict[str, Any]:
    """Statistics of the last step on this rank: ``seconds``, ``waits``,
    ``bytes_sent`` and so on."""
    return _core.last_step()


atexit.register(shutdown)
if _core.started_by() is not None:  # one of several ranks
    end_on_uncaught_exceptions()

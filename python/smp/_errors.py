"""Exceptions, and what they say on other ranks."""

import os
import traceback

_HERE = os.path.dirname(os.path.abspath(__file__))


class Error(RuntimeError):
    """An error of smp, the same on all ranks.

    ``code`` is its kind ("config", "user_code", "rank_down", "stalled", ...),
    ``rank`` where it happened (None: nowhere in particular), ``module`` the
    path of the module that ran, ``text`` what happened. If user code raised an
    exception, it is ``__cause__`` on the rank where it did.
    """

    code = "config"
    rank: int | None = None
    module = ""

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self.text = text


class TraceFinished(BaseException):
    """Leaves the body of a step that is traced; no ``except Exception``."""


def _is_of_smp(path):
    return os.path.dirname(os.path.abspath(path)) == _HERE


def text_of(kind, value, trace):
    """The exception in one line, then where it was raised."""
    what = "".join(traceback.format_exception_only(kind, value)).strip()
    frames = traceback.extract_tb(trace)
    torch = os.sep + os.path.join("torch", "nn", "modules", "module.py")
    lines = [
        f'  File "{f.filename}", line {f.lineno}, in {f.name}'
        + (f"\n    {f.line}" if f.line else "")
        for f in frames
        if not _is_of_smp(f.filename) and not f.filename.endswith(torch)
    ]
    return "\n".join([what, *lines[-8:]])

"""Files of a program's own objects: one, or one for each rank of a replica."""

import os
import pickle
from typing import Any

import torch

from . import _core
from ._errors import Error

# In a state dict: that it has what one rank owns.
PARTIAL = "_smp_is_partial"


def _path(what, f, partial):
    if not isinstance(f, (str, os.PathLike)):
        raise Error(f"smp.{what} takes the name of a file, not a {type(f)}")
    return f"{os.fspath(f)}_{_core.mp_rank()}" if partial else os.fspath(f)


def save(
    obj: Any,
    f: str | os.PathLike[str],
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = torch.serialization.DEFAULT_PROTOCOL,
) -> None:
    """``torch.save``. With ``partial`` each rank of a replica has a file of its
    own, ``f`` and its mp_rank, ``checkpoint.pt_0``; else all write the same one.
    Not collective: call it where ``smp.rdp_rank() == 0``, or on all ranks."""
    path = _path("save", f, partial)
    # Ranks that write the same file must not see half of it.
    unfinished = f"{path}.{_core.rank()}.part"
    try:
        torch.save(obj, unfinished, pickle_module, pickle_protocol)
        os.replace(unfinished, path)
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)


def load(
    f: str | os.PathLike[str],
    map_location: Any = None,
    pickle_module: Any = None,
    partial: bool = True,
    **options: Any,
) -> Any:
    """``torch.load`` of what ``save`` wrote with the same ``partial``.
    ``options`` are torch's, such as ``weights_only=False`` for objects that are
    not tensors, numbers and text."""
    path = _path("load", f, partial)
    if partial and not os.path.exists(path):
        whole = os.path.exists(os.fspath(f))
        raise Error(
            f"smp.load: there is no file '{path}'"
            + (
                f", but '{os.fspath(f)}': load that with partial=False"
                if whole
                else "; a partial file is for as many ranks as it was saved on"
            )
        )
    return torch.load(path, map_location, pickle_module, **options)

"""Checkpoints: each rank writes what it has, any grid of ranks reads it."""

import json
import os
from collections.abc import Sequence
from typing import Any

from . import _core, _state
from ._errors import Error
from ._model import DistributedModel
from ._optimizer import DistributedOptimizer


def _optimizers(x):
    if x is None:
        return []
    return [y._core for y in (x if isinstance(x, (list, tuple)) else [x])]


def _step_of(tag):
    if tag is None:
        return _state.updates
    text = str(tag).removeprefix("step-")
    if not text.isdigit():
        raise Error(
            f"smp.save_checkpoint: the tag {tag!r} is not the number of a step"
        )
    return int(text)


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: int | str | None = None,
    partial: bool = True,
    model: DistributedModel | None = None,
    optimizer: (
        DistributedOptimizer | Sequence[DistributedOptimizer] | None
    ) = None,
    user_content: dict[str, Any] | None = None,
    num_kept_partial_checkpoints: int | None = 2,
) -> str:
    """Saves the model and the optimizer's state to ``path/step-TAG``; ``tag``
    is the number of a step, by default how many updates there were.
    ``user_content`` is what JSON can hold, by name. With ``partial=False`` all
    of the model goes into one safetensors file, ``path``. Collective.

    Returns the folder, or the file."""
    model = model or _state.model_of_session("smp.save_checkpoint")
    if not partial:
        _core.save_state(str(path), model._core)
        return str(path)
    content = {}
    for name, x in (user_content or {}).items():
        try:
            content[str(name)] = json.dumps(x)
        except TypeError as e:
            raise Error(
                f"smp.save_checkpoint: user_content[{name!r}]: {e}"
            ) from None
    return _core.save_checkpoint(
        str(path),
        _step_of(tag),
        model._core,
        _optimizers(optimizer),
        content,
        num_kept_partial_checkpoints or 0,
    )


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    model: DistributedModel | None = None,
    optimizer: (
        DistributedOptimizer | Sequence[DistributedOptimizer] | None
    ) = None,
) -> dict[str, Any] | None:
    """Resumes from the newest checkpoint in ``path``, or from that one, before
    the first step. Returns its ``user_content``, with the number of its step as
    "step"; None if there is none. Collective."""
    model = model or _state.model_of_session("smp.resume_from_checkpoint")
    found = _core.resume_from_checkpoint(
        str(path), model._core, _optimizers(optimizer)
    )
    if found is None:
        return None
    _, step, content = found
    _state.updates = step
    result = {name: json.loads(x) for name, x in content.items()}
    result.setdefault("step", step)
    return result

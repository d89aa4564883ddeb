"""Checkpoints by the product's arguments."""

import json
import os
import re

import torch

import smp as _smp
from smp import Error, _state


def _number(tag):
    found = re.findall(r"\d+", str(tag))
    if not found:
        raise Error(
            f"smp.save_checkpoint: the tag {tag!r} has no number, by which "
            "checkpoints are ordered; write step100"
        )
    return int(found[-1])


def save(obj, f, partial=True, *args, v3=False, **options):
    """As ``smp.save``; ``v3`` was about files of sharded state."""
    _smp.save(obj, f, partial, *args, **options)


def load(f, *args, back_compat=False, **options):
    """As ``smp.load``."""
    return _smp.load(f, *args, **options)


def save_checkpoint(
    path,
    tag,
    partial=True,
    model=None,
    optimizer=None,
    user_content=None,
    translate_if_full=True,
    num_kept_partial_checkpoints=None,
):
    """As ``smp.save_checkpoint``; the number in ``tag`` is that of the step. With
    ``partial=False`` rank 0 writes what ``torch.load`` reads, all of the model:
    ``path/TAG``; of the optimizer nothing. Collective."""
    if partial:
        return _smp.save_checkpoint(
            path,
            _number(tag),
            model=model,
            optimizer=optimizer,
            user_content=user_content,
            num_kept_partial_checkpoints=num_kept_partial_checkpoints,
        )
    model = model or _state.model_of_session("smp.save_checkpoint")
    found = model.state_dict()
    if _smp.rank() == 0:
        os.makedirs(path, exist_ok=True)
        _smp.save(found, os.path.join(path, str(tag)), partial=False)
        with open(os.path.join(path, f"user_content_{tag}"), "w") as file:
            json.dump(user_content, file)
        with open(os.path.join(path, "newest"), "w") as file:
            file.write(str(tag))
    _smp.barrier()
    return os.path.join(path, str(tag))


def _weights(path, tag):
    """All of a model; transformers names a file that it does not write."""
    given = os.path.join(path, tag)
    safe = os.path.join(path, "model.safetensors")
    if os.path.exists(given) or not os.path.exists(safe):
        return torch.load(given, "cpu")
    from safetensors.torch import load_file

    return load_file(safe)


def resume_from_checkpoint(
    path,
    tag=None,
    partial=True,
    strict=True,
    load_optimizer=True,
    load_sharded_optimizer_state=True,
    translate_function=None,
):
    """Resumes the session's model and optimizer, before the first step. Returns
    the ``user_content``. Collective."""
    model = _state.model_of_session("smp.resume_from_checkpoint")
    if partial:
        if tag is not None:
            path = os.path.join(path, f"step-{_number(tag)}")
        optimizer = _state.first_optimizer() if load_optimizer else None
        found = _smp.resume_from_checkpoint(path, model, optimizer)
        if found is None:
            raise Error(f"smp.resume_from_checkpoint: no checkpoint in {path}")
        return found
    if tag is None:
        with open(os.path.join(path, "newest")) as file:
            tag = file.read().strip()
    state = _weights(path, str(tag))
    if translate_function is not None:
        state = translate_function(state)
    model.load_state_dict(state, strict)
    content = os.path.join(path, f"user_content_{tag}")
    if not os.path.exists(content):
        return None
    with open(content) as file:
        return json.load(file)

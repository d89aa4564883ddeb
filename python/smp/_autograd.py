"""What torch's own backward has to know while a session runs."""

import functools
import math

import torch

from . import _core, _state
from ._errors import Error

_originals = {}


def _install(module, name, make):
    original = getattr(module, name)
    _originals[module, name] = original
    setattr(module, name, functools.wraps(original)(make(original)))


def _backward(original):
    def call(*args, **kwargs):
        # Inside of a step: what torch's engine looks at must have arrived.
        if _core.prepare_backward():
            raise Error(
                "loss.backward() inside of a step: write model.backward(loss), "
                "which runs across ranks when the schedule says so"
            )
        return original(*args, **kwargs)

    return call


def _grad(original):
    def call(*args, **kwargs):
        _core.prepare_backward()
        return original(*args, **kwargs)

    return call


def _clip(original):
    def call(
        parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, **_
    ):
        xs = parameters
        if isinstance(xs, torch.Tensor):
            xs = [xs]
        xs = list(xs)
        model = _state.current_model()
        own = () if model is None else model.module.parameters()
        own = {id(p) for p in own}
        wanted = {id(p) for p in xs}
        if not own & wanted:
            return original(xs, max_norm, norm_type, error_if_nonfinite, **_)
        if own != wanted or norm_type != 2:
            raise Error(
                "torch's clip_grad_norm_ sees the gradients of one rank only: "
                "write smp.clip_grad_norm_(model, max_norm), over all "
                "parameters and with the 2-norm"
            )
        # All of the model, so there is no doubt what is meant.
        norm = model._core.clip_grad_norm_(float(max_norm))
        if error_if_nonfinite and not math.isfinite(norm):
            raise Error(f"the norm of the gradients is {norm}")
        return torch.tensor(norm)

    return call


def install():
    if not _originals:
        _install(torch.autograd, "backward", _backward)
        _install(torch.autograd, "grad", _grad)
        _install(torch.nn.utils, "clip_grad_norm_", _clip)


def remove():
    for (module, name), original in _originals.items():
        setattr(module, name, original)
    _originals.clear()

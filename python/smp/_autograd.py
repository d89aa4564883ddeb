"""What torch's own backward has to know while a session runs."""

import functools

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
    def call(parameters, *args, **kwargs):
        xs = parameters
        if not isinstance(xs, torch.Tensor):
            xs = list(parameters)
            model = _state.current_model()
            own = () if model is None else model.module.parameters()
            if {id(p) for p in own} & {id(p) for p in xs}:
                raise Error(
                    "torch's clip_grad_norm_ sees the gradients of one rank "
                    "only: write smp.clip_grad_norm_(model, max_norm)"
                )
        return original(xs, *args, **kwargs)

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

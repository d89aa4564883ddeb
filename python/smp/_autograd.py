"""What torch's own backward has to know while a session runs."""

import functools

import torch

from . import _core
from ._errors import Error

_originals = {}


def _install(module, name, before):
    original = getattr(module, name)

    @functools.wraps(original)
    def call(*args, **kwargs):
        before()
        return original(*args, **kwargs)

    _originals[module, name] = original
    setattr(module, name, call)


def _before_backward():
    # Inside of a step: what torch's engine looks at must have arrived.
    if _core.prepare_backward():
        raise Error(
            "loss.backward() inside of a step: write model.backward(loss), which "
            "runs across ranks when the schedule says so"
        )


def _before_grad():
    _core.prepare_backward()


def _before_clip():
    if _core.running():
        raise Error(
            "torch's clip_grad_norm_ sees the gradients of one rank only: write "
            "smp.clip_grad_norm_(model, max_norm)"
        )


def install():
    if not _originals:
        _install(torch.autograd, "backward", _before_backward)
        _install(torch.autograd, "grad", _before_grad)
        _install(torch.nn.utils, "clip_grad_norm_", _before_clip)


def remove():
    for (module, name), original in _originals.items():
        setattr(module, name, original)
    _originals.clear()

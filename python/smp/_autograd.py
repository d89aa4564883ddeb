"""What torch's own functions have to know while a session runs."""

import functools
import math

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import _core, _state
from ._errors import Error
from ._optimizer import clip_grad_norm_

_hooks = []  # of torch
_originals = []  # (holder, name, what it held)


def _install(holder, name, make):
    original = getattr(holder, name)
    _originals.append((holder, name, original))
    setattr(holder, name, functools.wraps(original)(make(original)))


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


def _install_within(module, name, make):
    """Also for those who imported the function by its name before: torch wraps
    it in one that looks up what it calls."""
    function = getattr(module, name)
    names = function.__code__.co_freevars
    if "func" in names:
        cell = function.__closure__[names.index("func")]
        _install(cell, "cell_contents", make)
    else:
        _install(module, name, make)


def _parts_of_model(xs):
    """Those of the model among some parameters, by identity; and its own."""
    model = _state.current_model()
    own = [] if model is None else list(model.module.parameters())
    wanted = {id(p) for p in xs}
    return wanted & {id(p) for p in own}, own


def _clip(original):
    def call(
        parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, **_
    ):
        xs = parameters
        if isinstance(xs, torch.Tensor):
            xs = [xs]
        xs = list(xs)
        found, own = _parts_of_model(xs)
        if not found:
            return original(xs, max_norm, norm_type, error_if_nonfinite, **_)
        trained = {id(p) for p in own if p.requires_grad}
        if not trained <= found or len(found) < len(xs) or norm_type != 2:
            raise Error(
                "torch's clip_grad_norm_ sees the gradients of one rank only: "
                "write smp.clip_grad_norm_(model, max_norm), over all "
                "parameters and with the 2-norm"
            )
        # All that have gradients, so there is no doubt what is meant.
        norm = clip_grad_norm_(_state.current_model(), max_norm)
        if error_if_nonfinite and not math.isfinite(norm):
            raise Error(f"the norm of the gradients is {norm}")
        return norm

    return call


def _clip_values(original):
    def call(parameters, *args, **kwargs):
        xs = parameters
        xs = [xs] if isinstance(xs, torch.Tensor) else list(xs)
        if _parts_of_model(xs)[0] and _core.shards_gradients():
            raise Error(
                "torch's clip_grad_value_ does not see the gradients that "
                "shard_gradients leaves to other replicas: clip their norm, or "
                "leave shard_gradients out"
            )
        return original(xs, *args, **kwargs)

    return call


def _refuse_alone(optimizer, *_):
    """Another rank, replica or copy in float32 may have what it should update."""
    if any(x._inner is optimizer for x in _state.live_optimizers()):
        return
    xs = [p for group in optimizer.param_groups for p in group["params"]]
    if _parts_of_model(xs)[0]:
        raise Error(
            f"{type(optimizer).__name__}.step() of parameters of the "
            "DistributedModel: give the optimizer to smp.DistributedOptimizer, "
            "and call step() of that"
        )


def install():
    if not _originals:
        _hooks.append(register_optimizer_step_pre_hook(_refuse_alone))
        _install(torch.autograd, "backward", _backward)
        _install(torch.autograd, "grad", _grad)
        _install_within(torch.nn.utils, "clip_grad_norm_", _clip)
        _install_within(torch.nn.utils, "clip_grad_value_", _clip_values)


def remove():
    for holder, name, original in reversed(_originals):
        setattr(holder, name, original)
    _originals.clear()
    while _hooks:
        _hooks.pop().remove()

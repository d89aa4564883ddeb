"""The tensors in a step's arguments: slices of them, and where they are."""

import collections.abc
import copy
import dataclasses
import warnings

import torch
from torch.utils import _pytree as pytree

from . import _core
from ._errors import Error


def _map(f, x, whole=lambda y: isinstance(y, torch.Tensor)):
    """``x`` with ``f(y)`` for each ``y`` in it that is ``whole`` or no container.
    Mappings, sets and dataclasses that pytree does not know are copied only if
    something in them is new."""

    def leaf(y):
        if whole(y):
            return f(y)
        if isinstance(y, collections.abc.MutableMapping):
            return _with(
                y, {k: (z, _map(f, z, whole)) for k, z in y.items()}, _put
            )
        if dataclasses.is_dataclass(y) and not isinstance(y, type):
            names = [field.name for field in dataclasses.fields(y)]
            inside = {n: getattr(y, n) for n in names if hasattr(y, n)}
            found = {n: (z, _map(f, z, whole)) for n, z in inside.items()}
            return _with(y, found, object.__setattr__)
        if isinstance(y, (set, frozenset)):
            old = list(y)
            new = [_map(f, z, whole) for z in old]
            same = all(a is b for a, b in zip(old, new))
            return y if same else type(y)(new)
        return f(y)

    return pytree.tree_map(leaf, x, is_leaf=whole)


def _put(mapping, key, x):
    mapping[key] = x


def _with(holder, found, put):
    """A copy with what is new, of pairs of old and new."""
    changed = {
        name: new for name, (old, new) in found.items() if new is not old
    }
    if not changed:
        return holder
    result = copy.copy(holder)
    for name, new in changed.items():
        put(result, name, new)
    return result


def _is_divided(x):
    return isinstance(x, torch.Tensor) or hasattr(x, "smp_slice")


def tensors_in(x):
    found = []

    def look(y):
        if isinstance(y, torch.Tensor):
            found.append(y)
        return y

    _map(look, x)
    return found


def on_device(x):
    """With its tensors on the device of the rank."""
    tensors = tensors_in(x)
    moved = zip(tensors, _core.on_device(tensors))
    moved = {id(old): new for old, new in moved if new is not old}
    return _map(lambda y: moved.get(id(y), y), x) if moved else x


def split(x, parts, index, axis, place):
    """The slice for a microbatch of an argument of a step."""

    def slice_of(t):
        if not _is_divided(t):
            _warn_if_whole(t, place)
            return t
        if not isinstance(t, torch.Tensor):
            return t.smp_slice(parts, index, axis)
        try:
            return _core.slice(t, parts, index, axis)
        except Error as e:
            way_out = ""
            if isinstance(x, (list, tuple)):
                way_out = (
                    "; a list with an item for each sample needs a class with "
                    "smp_slice (docs/python.md, Steps)"
                )
            raise Error(f"{place}: {e}{way_out}") from None

    return _map(slice_of, x, _is_divided)


def _warn_if_whole(x, place):
    if callable(x) or not _core.keeps_attributes(x):
        return
    if any(
        isinstance(y, torch.Tensor) and y.dim() > 0
        for y in _core.fields_of(x).values()
    ):
        kind = type(x).__name__
        warnings.warn(
            f"{place} is a {kind}, whose tensors are passed whole to each "
            "microbatch: pass them in a dict or a dataclass, or give the class "
            "smp_slice (docs/python.md, Steps); non_split_inputs says that it is "
            "meant",
            stacklevel=2,
        )

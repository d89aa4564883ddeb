"""Classes whose objects ranks can exchange.

Nothing is pickled. An object travels as the name of its class and its parts;
the class has to be loaded on the rank that gets it. Known are those in torch's
pytree registry (``torch.utils._pytree.register_pytree_node``), named tuples,
dataclasses, enums, and the few of Python and torch below.
"""

import collections
import dataclasses
import enum
import sys

import torch
from torch.utils import _pytree as pytree


def _name_of(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_named_tuple(kind):
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_cache(kind):
    # Keys and values of attention; in some versions a module without tensors.
    return any(x.__module__ == "transformers.cache_utils" for x in kind.__mro__)


_OF_MODULES = frozenset(torch.nn.Module().__dict__)


# How objects of a class come apart, and together again: (context, parts).
_OWN = {
    "torch.Size": (
        torch.Size,
        lambda x: (None, list(x)),
        lambda _, parts: torch.Size(parts),
    ),
    "slice": (
        slice,
        lambda x: (None, [x.start, x.stop, x.step]),
        lambda _, parts: slice(*parts),
    ),
    "range": (
        range,
        lambda x: (None, [x.start, x.stop, x.step]),
        lambda _, parts: range(*parts),
    ),
    "set": (set, lambda x: (None, sorted(x, key=repr)), lambda _, p: set(p)),
    "frozenset": (
        frozenset,
        lambda x: (None, sorted(x, key=repr)),
        lambda _, p: frozenset(p),
    ),
    "bytes": (
        bytes,
        lambda x: (None, [x.decode("latin-1")]),
        lambda _, p: p[0].encode("latin-1"),
    ),
    "torch.memory_format": (
        torch.memory_format,
        lambda x: (None, [str(x).rpartition(".")[2]]),
        lambda _, p: getattr(torch, p[0]),
    ),
    "torch.layout": (
        torch.layout,
        lambda x: (None, [str(x).rpartition(".")[2]]),
        lambda _, p: getattr(torch, p[0]),
    ),
}
_OWN_BY_CLASS = {kind: name for name, (kind, _, _) in _OWN.items()}


def take_apart(x):
    """Its (name, context, parts), or why it cannot be sent, alone in a tuple."""
    kind = type(x)
    own = _OWN_BY_CLASS.get(kind)
    if own is not None:
        return (own, *_OWN[own][1](x))
    if isinstance(x, enum.Enum):
        return _name_of(kind), None, [x.name]
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        parts, context = node.flatten_fn(x)
        return _name_of(kind), context, list(parts)
    if _is_named_tuple(kind):
        return _name_of(kind), None, list(x)
    if dataclasses.is_dataclass(kind):
        names = [f.name for f in dataclasses.fields(x)]
        return _name_of(kind), names, [getattr(x, n) for n in names]
    if _is_cache(kind):
        names = [n for n in x.__dict__ if n not in _OF_MODULES]
        return _name_of(kind), names, [x.__dict__[n] for n in names]
    if isinstance(x, torch.nn.Module):
        return (
            f"a module ({_name_of(kind)}) cannot be sent to another rank: call "
            "it here, or let the module that needs it have it as an attribute",
        )
    return (
        f"a {_name_of(kind)} cannot be sent to another rank: make its class a "
        "dataclass, or register it with "
        "torch.utils._pytree.register_pytree_node(cls, flatten, unflatten)",
    )


_by_name = {}


def _class_called(name):
    """A class that this program has loaded; nothing is imported."""
    kind = _by_name.get(name)
    if kind is None:
        for other in pytree.SUPPORTED_NODES:
            _by_name.setdefault(_name_of(other), other)
        kind = _by_name.get(name)
    if kind is not None:
        return kind
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        found = sys.modules.get(".".join(parts[:n]))
        if found is None:
            continue
        for part in parts[n:]:
            found = getattr(found, part, None)
        known = isinstance(found, type) and (
            _is_named_tuple(found)
            or issubclass(found, enum.Enum)
            or dataclasses.is_dataclass(found)
            or _is_cache(found)
        )
        if known:
            _by_name[name] = found
            return found
    raise TypeError(
        f"a {name} arrived, but this rank has no such class: all ranks have to "
        "import its module, at its top level"
    )


def put_together(name, context, parts):
    own = _OWN.get(name)
    if own is not None:
        return own[2](context, parts)
    kind = _class_called(name)
    if issubclass(kind, enum.Enum):
        return kind[parts[0]]
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        return node.unflatten_fn(list(parts), context)
    if _is_named_tuple(kind):
        return kind(*parts)
    result = object.__new__(kind)
    if isinstance(result, torch.nn.Module):
        torch.nn.Module.__init__(result)
    for field, part in zip(context, parts):
        object.__setattr__(result, field, part)
    return result


def replace(old, new):
    """Gives ``old`` and what is in it the content of ``new``."""
    if isinstance(old, list):
        old[:] = new
    elif isinstance(old, collections.OrderedDict) and not isinstance(new, dict):
        pass
    elif isinstance(old, dict) and not hasattr(old, "__dataclass_fields__"):
        old.clear()
        old.update(new)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, tuple):
        for x, y in zip(old, new):
            replace(x, y)
    elif type(old) is type(new) and hasattr(old, "__dict__"):
        old.__dict__.clear()
        old.__dict__.update(new.__dict__)

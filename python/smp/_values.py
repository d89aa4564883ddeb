"""Classes whose objects ranks can exchange.

Nothing is pickled. An object travels as the name of its class and its parts;
the class has to be loaded on the rank that gets it. Known are those in torch's
pytree registry (``torch.utils._pytree.register_pytree_node``), named tuples,
dataclasses, enums, and the few of Python, numpy and torch below. What each rank
has, as modules of the model and objects that they hold, travels as its place.
"""

import collections
import contextlib
import dataclasses
import enum
import sys
import weakref
import zlib

import torch
from torch.utils import _pytree as pytree

from . import _state


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
    if kind.__module__ == "numpy":
        found = _numbers_of_numpy(x)
        if found is not None:
            return found
    place = _place_of(x)
    if place is not None:
        return _HELD, None, place
    if isinstance(x, torch.nn.Module):
        return (
            f"a module ({_name_of(kind)}) that is not of the model cannot be sent "
            "to another rank: let the module that needs it have it as an attribute",
        )
    return (
        f"a {_name_of(kind)} cannot be sent to another rank: make its class a "
        "dataclass, or register it with "
        "torch.utils._pytree.register_pytree_node(cls, flatten, unflatten)",
    )


# -- what is on each rank ----------------------------------------------------------

_HELD = "smp.held"
_by_value = False
# Of a model: (path of a module, attribute) by the object's id.
_places = {}


@contextlib.contextmanager
def by_value():
    """Inside of this, nothing is sent as its place."""
    global _by_value
    _by_value = True
    try:
        yield
    finally:
        _by_value = False


def is_plain_object(x):
    """Of a class of the user's own, with attributes."""
    return (
        type(x).__dictoffset__ != 0
        and not callable(x)
        and not isinstance(x, (torch.nn.Module, torch.Tensor, dict, list))
        and not dataclasses.is_dataclass(x)
    )


def _find_places(model):
    modules = list(model.module.named_modules())
    held = {
        id(x): (path, name)
        for path, module in reversed(modules)
        for name, x in reversed(module.__dict__.items())
        if is_plain_object(x)
    }
    held.update((id(x), (path, "")) for path, x in modules)
    _places.clear()
    _places.update(model=weakref.ref(model), held=held)


def _place_of(x):
    """Where the model has it on each rank, and a sum of its settings; or None."""
    model = _state.current_model()
    if model is None or _by_value:
        return None
    if not _places or _places["model"]() is not model:
        _find_places(model)
    found = _places["held"].get(id(x))
    if found is None or _at_place(model, *found) is not x:
        return None
    return [*found, _sum_of(x)]


def _at_place(model, path, name):
    module = model.module.get_submodule(path)
    return module.__dict__.get(name) if name else module


def _sum_of(x):
    """Settings that differ between ranks are seen by it."""
    if isinstance(x, torch.nn.Module):
        return 0
    return zlib.crc32(_text_of(vars(x)).encode())


def _text_of(x):
    if isinstance(x, dict):
        return "".join(
            f"{k}:{_text_of(y)};" for k, y in sorted(x.items(), key=str)
        )
    if isinstance(x, (list, tuple)):
        return "".join(f"{_text_of(y)}," for y in x)
    if x is None or isinstance(x, (bool, int, float, str, torch.dtype)):
        return repr(x)
    return type(x).__qualname__


def _held_at(path, name, sum):
    result = _at_place(_state.current_model(), path, name)
    if _sum_of(result) != sum:
        raise TypeError(
            f"the {_name_of(type(result))} '{name}' of '{path or 'the model'}' has "
            "other values on another rank: set them on all ranks, before the first "
            "step, or pass them as arguments"
        )
    return result


def _numbers_of_numpy(x):
    """Of an array or a single number: what ``take_apart`` returns."""
    numpy = sys.modules["numpy"]
    array = numpy.asarray(x)
    if array.dtype.kind not in "biufc" or array.dtype.name.endswith(
        "longdouble"
    ):
        return None
    if isinstance(x, numpy.ndarray):
        return "numpy.ndarray", None, [torch.tensor(array)]
    return "numpy.generic", array.dtype.str, [x.item()]


# -- objects of classes ------------------------------------------------------------

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
    if name == _HELD:
        return _held_at(*parts)
    if name == "numpy.ndarray":
        return parts[0].numpy()
    if name == "numpy.generic":
        return sys.modules["numpy"].dtype(context).type(parts[0])
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
    elif type(old).__name__ == "ndarray":
        old[...] = new
    elif isinstance(old, tuple):
        for x, y in zip(old, new):
            replace(x, y)
    elif type(old) is type(new) and hasattr(old, "__dict__"):
        old.__dict__.clear()
        old.__dict__.update(new.__dict__)

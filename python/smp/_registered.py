"""Classes of the program by which ranks share modules of other classes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import _core
from ._errors import Error

# Attribute of modules of registered classes: the arguments of __init__.
_MADE_WITH = "_smp_made_with"


class _Entry(NamedTuple):
    distributed: type
    init_hook: Callable[..., Any] | None
    forward_hook: Callable[..., Any] | None
    return_hook: Callable[..., Any] | None


_entries = {}  # by the class of the modules


def tp_register(
    origin_module: type[torch.nn.Module],
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> Callable[[type[torch.nn.Module]], type[torch.nn.Module]]:
    """Decorates a class by which tensor-parallel ranks share modules of the
    class ``origin_module``, where ``smp.tensor_parallelism`` names them.

    ``init_hook(*args, **kwargs)`` gets what ``origin_module`` was made with, and
    returns ``(args, kwargs)`` for the decorated class; None: this module is not
    shared. ``forward_hook`` does the same for each call, and ``return_hook(x)``
    turns what the decorated class returns into what ``origin_module`` does.
    Without a hook things pass unchanged.

    The decorated class has the parameters of the other one, by the same names,
    each whole or with one axis divided by ``smp.tp_size()``: they become slices
    of the values that the module has. Its forward gets this rank's samples, and
    uses the collectives of ``smp.nn``. If it uses its slices for those alone, as
    with ``prescaled_batch``, it says ``scaled_batch = False``.
    """

    def register(distributed):
        tp_register_with_module(
            origin_module, distributed, init_hook, forward_hook, return_hook
        )
        return distributed

    return register


def tp_register_with_module(
    origin: type[torch.nn.Module],
    dist: type[torch.nn.Module],
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> None:
    """``smp.tp_register`` for a class ``dist`` that is there already."""
    for kind in (origin, dist):
        if not isinstance(kind, type) or not issubclass(kind, torch.nn.Module):
            raise Error(f"smp.tp_register takes classes of modules, not {kind}")
    if origin.forward is torch.nn.Module.forward:
        raise Error(
            f"smp.tp_register: {origin.__name__} has no forward; register the "
            "class around it"
        )
    if origin not in _entries:
        _remember_arguments(origin)
    _entries[origin] = _Entry(dist, init_hook, forward_hook, return_hook)
    _core.tp_register(origin, describe)


def _remember_arguments(kind):
    own = kind.__init__

    @functools.wraps(own)
    def init(self, *args, **kwargs):
        if type(self) is kind:
            object.__setattr__(self, _MADE_WITH, (args, kwargs))
        own(self, *args, **kwargs)

    kind.__init__ = init


class _NotShared(Exception):
    """Says why."""


def describe(module):
    """The name of the distributed class; why ranks cannot share the module by
    it, or an empty text; the axes of the parameters that they cut, by name;
    ``scaled_batch``; what runs its calls."""
    entry = _entries.get(type(module))
    if entry is None:
        why = "another class of that name is registered, not its own"
        return type(module).__name__, why, {}, True, None
    name = entry.distributed.__name__
    scaled = getattr(entry.distributed, "scaled_batch", True)
    try:
        if not scaled and _core.data_size() != _core.rdp_size():
            raise _NotShared(
                f"{name}.scaled_batch is False, and ranks have samples of their "
                "own; set prescaled_batch in smp.init, or gather them"
            )
        made = _object_for(module, entry)
        axes = _axes(module, made)
    except _NotShared as e:
        return name, str(e), {}, scaled, None
    return name, "", axes, scaled, StandIn(module, made, entry)


def _object_for(module, entry):
    given = module.__dict__.get(_MADE_WITH)
    if given is None:
        raise _NotShared(
            "it was made before smp.tp_register; register its class first"
        )
    args, kwargs = given
    if entry.init_hook is not None:
        given = entry.init_hook(*args, **kwargs)
        if given is None:
            raise _NotShared("the init_hook of its class says so")
        args, kwargs = given
    with torch.random.fork_rng(devices=[]):
        return entry.distributed(*args, **kwargs)


def _named(of, kind):
    return dict(getattr(of, "named_" + kind)(remove_duplicate=False))


def _axes(module, made):
    """Those of parameters that ranks cut. Frees what ``made`` has."""
    name = type(made).__name__
    result, of_tensor = {}, {}
    for kind in ("parameters", "buffers"):
        own, other = _named(module, kind), _named(made, kind)
        for x in sorted(own.keys() ^ other.keys()):
            raise _NotShared(
                f"only {'it' if x in own else name} has a "
                f"{kind[:-1]} '{x}'; both need the same"
            )
        for x, whole in own.items():
            axis = _axis(x, list(whole.shape), list(other[x].shape), name)
            if axis is not None and kind == "buffers":
                raise _NotShared(f"ranks have its buffer '{x}' whole")
            if of_tensor.setdefault(id(whole), axis) != axis:
                raise _NotShared(f"its '{x}' is cut in two ways")
            if axis is not None:
                result[x] = axis
    _put_in(made, dict.fromkeys([*_named(made, "parameters")]), "_parameters")
    return result


def _axis(name, whole, part, kind):
    if whole == part:
        return None
    peers = _core.tp_size()
    cut = [i for i, (n, m) in enumerate(zip(whole, part)) if n != m]
    if len(whole) == len(part) and len(cut) == 1:
        (axis,) = cut
        if part[axis] * peers == whole[axis]:
            return axis
    raise _NotShared(
        f"its '{name}' is {whole}, and {part} in {kind}; one axis may be "
        f"divided by {peers}"
    )


def _put_in(module, tensors, where):
    for path, x in tensors.items():
        parent, _, name = path.rpartition(".")
        getattr(module.get_submodule(parent), where)[name] = x


class StandIn:
    """An object of a distributed class in place of a module."""

    def __init__(self, module, made, entry):
        self._module = module
        self._made = made
        self._entry = entry
        self._buffers = _named(module, "buffers")
        # Modules of torch.nn itself keep nothing.
        self.watched = [
            x
            for x in made.modules()
            if not type(x).__module__.startswith("torch.nn.modules.")
        ]

    def adopt(self):
        """Takes the tensors of the module, of which ranks have slices now."""
        self._buffers = _named(self._module, "buffers")
        _put_in(self._made, _named(self._module, "parameters"), "_parameters")
        _put_in(self._made, self._buffers, "_buffers")

    def __call__(self, args, kwargs):
        made, entry = self._made, self._entry
        if made.training is not self._module.training:
            made.train(self._module.training)
        if entry.forward_hook is not None:
            args, kwargs = entry.forward_hook(*args, **kwargs)
        result = made(*args, **kwargs)
        for name, x in self._buffers.items():
            if made.get_buffer(name) is not x:
                raise Error(
                    f"{type(made).__name__} replaces its buffer '{name}': "
                    "change it in place"
                )
        return (
            result if entry.return_hook is None else entry.return_hook(result)
        )

"""One step over the ranks, compared with the same in one process."""

import contextlib
import copy
import dataclasses
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import _core, _opaque, _state, _values
from ._errors import Error
from ._values import _OF_MODULES

# What smp and torch.compile leave in a module: the copy runs its own code.
_CALLS = "_compiled_call_impl", "_smp_compiled_call"


def verify(train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs ``train_step(*args, **kwargs)`` over the ranks, as a call would, and
    returns what it returns; then compares it with the same step of one process,
    which pp_rank 0 runs from the same weights, with the same random numbers.
    Call it on all ranks. Says on rank 0 what was compared.

    Compared are what the step returns for each microbatch, the arguments,
    results and gradients of all calls of modules, the gradients of all
    parameters, and all buffers. pp_rank 0 needs memory for the whole model. The
    step's function and the model's hooks run twice.

    Raises ``smp.Error`` that names the first module where both differ.
    """
    if not hasattr(train_step, "bodies"):
        raise Error("smp.verify takes a function made by @smp.step")
    model = _state.model_of_session("smp.verify")
    check = _Check(model)
    try:
        if model.partitioned:
            check.begin(_attributes(model))
        else:
            # The model keeps what waits for its partition.
            waiting = weakref.WeakMethod(check.begin)
            model._core.on_partition(lambda: waiting() and waiting()())
        result = train_step(*args, **kwargs)
        check.end_step()
    finally:
        check.stop()
    check.compare(train_step.bodies(args, kwargs))
    return result


class _Check:
    def __init__(self, model):
        self._model = model
        self._core = _core.Verification(model._core)
        self._alone = None  # on pp_rank 0
        self._failed = None

    def begin(self, attributes=()):
        self._core.begin()
        if _core.pp_rank() != 0:
            return
        try:
            self._alone = _Alone(self._model, self._core.before, attributes)
        except Exception as e:  # told when all ranks listen
            self._failed = RuntimeError(f"the model cannot be copied: {e}")
            self._failed.__cause__ = e

    def end_step(self):
        self._core.end_step()

    def stop(self):
        self._core.stop()

    def compare(self, bodies):
        if self._alone is not None and self._failed is None:
            try:
                self._alone.run(self._core, *bodies)
            except Exception as e:
                self._failed = e
            finally:
                self._alone.end()
        self._tell_failure()
        equal, text = self._core.compare(_inside_compiled(self._model.module))
        if _core.rank() == 0:
            print(f"smp.verify: {text}", file=sys.stderr, flush=True)
        text = _core.broadcast(text, "world", 0)
        if not equal:
            raise Error(f"smp.verify: {text}")

    def _tell_failure(self):
        e = self._failed
        mine = None if e is None else f"{type(e).__name__}: {e}"
        if isinstance(e, Error):
            mine += (
                " (there a step's function reaches modules of the model by its "
                "smp.DistributedModel alone)"
            )
        for x in _core.allgather(mine, "world"):
            if x is not None:
                raise Error(
                    f"smp.verify: the single process failed: {x}"
                ) from e


class _Alone:
    """The plain model of the single process."""

    def __init__(self, model, state, attributes):
        self._model = model
        module = model.module
        self._tensors = {}
        memo = {}
        for kind, named in (
            ("parameter", module.named_parameters(remove_duplicate=False)),
            ("buffer", module.named_buffers(remove_duplicate=False)),
        ):
            for name, x in named:
                if id(x) in memo or name not in state:
                    continue
                memo[id(x)] = self._tensors[name] = _tensor_like(
                    x, state[name], kind
                )
        for x in module.modules():
            for slot in _CALLS:
                if slot in x.__dict__:
                    memo[id(x.__dict__[slot])] = None
            for y in _left_tensors(vars(x)):
                memo[id(y)] = y.detach().clone()
        self._copy = copy.deepcopy(module, memo)
        # Functions are copied as they are, whatever the memo says (3.14).
        for x in self._copy.modules():
            for slot in _CALLS:
                x.__dict__.pop(slot, None)
        if model._guard is not None:
            model._guard.undo(self._copy, memo)
        for path, found in attributes:
            _receive(self._copy.get_submodule(path), found)
        self._root = _core.Module(self._copy)

    def run(self, check, body, microbatches):
        with self._in_place(check):
            check.run_alone(self._root, self._tensors, body, microbatches)

    @contextlib.contextmanager
    def _in_place(self, check):
        """The step's function knows the model by its DistributedModel."""
        model = self._model
        module, core, root = model.module, model._core, model._root
        model.module = self._copy
        object.__setattr__(model, "_core", check)
        object.__setattr__(model, "_root", self._root)
        try:
            yield
        finally:
            object.__setattr__(model, "_core", core)
            object.__setattr__(model, "_root", root)
            model.module = module  # looks at the partition

    def end(self):
        for x in self._copy.modules():
            _core.release_module(x)
        self._root = self._copy = None


def _left_tensors(attributes):
    """Those of the last step that attributes still have, with their graphs."""
    seen, left = set(), [attributes]
    while left:
        x = left.pop()
        if isinstance(x, torch.Tensor):
            if not x.is_leaf:
                yield x
            continue
        if id(x) in seen:
            continue
        if _core.keeps_attributes(x):
            inside = _core.fields_of(x).values()
        elif isinstance(x, dict):
            inside = x.values()
        elif isinstance(x, (list, tuple)):
            inside = x
        else:
            continue
        seen.add(id(x))
        left.extend(inside)


def _inside_compiled(root):
    """Compiled code does not call them one by one."""
    result = set()
    for path, module in root.named_modules(remove_duplicate=False):
        if _CALLS[1] in module.__dict__:
            result |= {
                f"{path}.{name}" for name, _ in module.named_modules() if name
            }
    return result


def _tensor_like(x, content, kind):
    content = content.detach().to(x.device, copy=True)
    if kind == "buffer":
        return content
    return torch.nn.Parameter(content, x.requires_grad)


@dataclasses.dataclass
class _Object:
    """What an object of the user's has in attributes."""

    attributes: dict


@dataclasses.dataclass
class _Opaque:
    """The state of an object that ``_opaque`` knows; integers as texts, as they
    may have more than 64 bits."""

    state: Any


def _map_integers(x, f):
    if isinstance(x, dict):
        return {k: _map_integers(y, f) for k, y in x.items()}
    if isinstance(x, (tuple, list)):
        return tuple(_map_integers(y, f) for y in x)
    return f(x)


def _to_text(x):
    return f"int {x}" if type(x) is int else x


def _from_text(x):
    is_int = isinstance(x, str) and x.startswith("int ")
    return int(x[4:]) if is_int else x


def _sendable(x, seen, depth=8):
    if isinstance(x, _opaque.classes()):
        state = _opaque.state_of(x)[1]
        if state is not None:
            return _Opaque(_map_integers(state, _to_text))
    if depth == 0:
        return x
    if _core.keeps_attributes(x):
        if id(x) in seen:  # objects may know each other in circles
            return _Object({})
        seen.add(id(x))
        return _Object(_all_sendable(_core.fields_of(x), seen, depth - 1))
    if type(x) is list:
        return [_sendable(y, seen, depth - 1) for y in x]
    if type(x) is dict:
        return {k: _sendable(y, seen, depth - 1) for k, y in x.items()}
    return x


def _all_sendable(xs, seen, depth=8):
    found = {name: _sendable(x, seen, depth) for name, x in xs.items()}
    return {name: x for name, x in found.items() if _core.can_be_sent(x)}


def _received(old, x):
    if isinstance(x, _Object):
        if _core.keeps_attributes(old):
            _receive(old, x.attributes)
        return old
    if isinstance(x, _Opaque):
        state = _map_integers(x.state, _from_text)
        _opaque.put_back_into(old, state)
        return old
    if type(x) is list and type(old) is list and len(x) == len(old):
        return [_received(y, z) for y, z in zip(old, x)]
    if type(x) is dict and type(old) is dict:
        return {k: _received(old.get(k), y) for k, y in x.items()}
    return x


def _receive(holder, found):
    old = _core.fields_of(holder)
    for name, x in found.items():
        object.__setattr__(holder, name, _received(old.get(name), x))


def _attributes(model):
    """What modules with state keep in attributes, from the ranks that have it.
    What cannot be sent stays as it is here."""
    mine = []
    with _values.by_value():
        for path in model._core.stateful_modules():
            found = vars(model.module.get_submodule(path))
            names = found.keys() - _OF_MODULES.union(_CALLS)
            state = _all_sendable({n: found[n] for n in names}, set())
            mine.append((path, state))
        return [x for xs in _core.allgather(mine, "pp") for x in xs]

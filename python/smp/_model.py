"""The user's model, of which each rank owns a part."""

import collections
import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from . import _absent, _core, _elsewhere, _generators, _refusals, _state
from ._errors import Error
from ._files import PARTIAL
from ._groups import CommGroup, allgather


def _fresh(x):
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, x)


class DistributedModel(torch.nn.Module):
    """Takes any ``torch.nn.Module``, unchanged; its modules then run on the
    ranks that own them, inside of ``@smp.step`` functions. Every rank makes the
    same model.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        _refusals.refuse_wrappers(module)
        _refusals.refuse_meta(module)
        if not _core.running():
            raise Error("smp.DistributedModel needs smp.init() before it")
        _core.take_exception("")
        if _alive():
            raise Error(
                "a session has one DistributedModel: put both models into one "
                "torch.nn.Module, or end the first with smp.shutdown()"
            )
        self.module = module
        object.__setattr__(self, "_root", _core.Module(module))
        object.__setattr__(self, "_core", _core.Model(self._root))
        _state.model = weakref.ref(self)
        _state.optimizers.clear()
        _state.updates = 0
        object.__setattr__(self, "_hooks", _refusals.refuse_new_parts())
        object.__setattr__(self, "_guard", None)
        _core.take_traced_changes()
        _core.take_drawn()
        _core.note_shared_objects(list(module.modules()))
        model = weakref.ref(self)
        self._core.on_partition(lambda: _elsewhere.guard(model()))
        self._core.on_partition(_generators.include)
        self._core.on_partition(lambda: _refusals.refuse_pickling(model()))
        _place_by_name(module)
        _apply_marks()

    # -- calls -----------------------------------------------------------------

    @property
    def _ddp_params_and_buffers_to_ignore(self):
        raise _refusals.wrapped(self, "DistributedDataParallel")  # who asks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, inside of a step."""
        call = _core.TracedCall()
        try:
            _state.tracing = True
            parts = _elsewhere.children_of(self.module)
            while call.again():
                _core.call_traced(self.module, *_fresh(args), **_fresh(kwargs))
                _elsewhere.refuse_replaced(self.module, parts)
            _state.tracing = False
            run = self._root or self.module
            return run(*args, **kwargs)
        finally:
            _state.tracing = False
            del call

    def backward(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: (
            torch.Tensor | Sequence[torch.Tensor | None] | None
        ) = None,
        retain_graph: bool = False,
    ) -> None:
        """Instead of ``loss.backward()``: ends the forward phase of a
        microbatch, and runs its backward phase across ranks."""
        if isinstance(tensors, torch.Tensor):
            tensors, grad_tensors = [tensors], [grad_tensors]
        grads = list(grad_tensors or [None] * len(tensors))
        self._core.backward(list(tensors), grads, retain_graph)

    def train(self, mode: bool = True) -> "DistributedModel":
        """Training or evaluation mode, on all ranks."""
        self.training = mode
        self.module.train(mode)
        return self

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside of this, steps accumulate gradients that replicas average at
        the first step after it."""

        @contextlib.contextmanager
        def scope():
            inside = self._core.begin_no_sync()
            try:
                yield
            finally:
                del inside

        return scope()

    # -- partition ---------------------------------------------------------------

    def partition(self) -> None:
        """Partitions now instead of at the first step, without measuring."""
        self._core.partition()

    @property
    def partitioned(self) -> bool:
        """Whether each rank knows what it owns."""
        return self._core.partitioned

    def partition_text(self, all: bool = False) -> str:
        """Which module is where, and why."""
        return self._core.partition_text(all=all)

    def order_text(self) -> str:
        """The modules that microbatches pass in order, and why."""
        return self._core.order_text()

    def register_post_partition_hook(
        self, hook: Callable[..., Any]
    ) -> RemovableHandle:
        """Calls ``hook(model, optimizer)`` after the partition, or at once. The
        handle that it returns removes it."""
        kept = collections.OrderedDict()
        handle = RemovableHandle(kept)
        kept[handle.id] = hook
        model = weakref.ref(self)  # it keeps what waits for its partition

        def run():
            for wanted in list(kept.values()):
                wanted(model(), _state.first_optimizer())

        self._core.on_partition(run)
        return handle

    # -- what this rank owns -------------------------------------------------------

    def local_module_names(self) -> list[str]:
        """Paths of the modules that this rank owns."""
        return self._core.local_module_names()

    def local_named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """These modules by their paths."""
        for name in self.local_module_names():
            yield name, self.module.get_submodule(name)

    def local_modules(self) -> Iterator[torch.nn.Module]:
        """The modules that this rank owns."""
        yield from (x for _, x in self.local_named_modules())

    def local_named_parameters(
        self,
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Of parameters, what this rank has."""
        yield from self._core.local_parameters().items()

    def local_parameters(self) -> Iterator[torch.nn.Parameter]:
        """The same without names."""
        yield from self._core.local_parameters().values()

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers that this rank has."""
        seen = set()
        for path, module in self.local_named_modules():
            for name, x in module._buffers.items():
                if x is not None and id(x) not in seen:
                    seen.add(id(x))
                    yield f"{path}.{name}" if path else name, x

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """The same without names."""
        yield from (x for _, x in self.local_named_buffers())

    def local_state_dict(self) -> dict[str, Any]:
        """What this rank owns, and that it is a part."""
        return {**self._core.local_state_dict(), PARTIAL: True}

    # -- the whole model -------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """All parameters and buffers, whole, the same on all ranks. Collective
        over the pipeline."""
        if args or kwargs:
            raise Error("DistributedModel.state_dict takes no arguments")
        found = self._core.state_dict()
        names = {}
        for name, x in self._named_tensors():
            names.setdefault(id(x), []).append(name)
        result = {}
        for same in names.values():
            for name in same:  # a tied weight under each of its names
                if same[0] in found:
                    result[name] = found[same[0]]
        return result

    def load_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Each rank takes what it owns. Local state dicts are put together
        first, so that any partition reads them: then collective over the ranks
        that hold the model."""
        if not strict:
            raise Error("DistributedModel.load_state_dict is always strict")
        state = whole_state(state_dict, "the model")
        first, known = {}, set()
        for name, x in self._named_tensors():
            first.setdefault(id(x), name)
            known.add(name)
        kept = set(first.values())
        # Buffers that no state dict has keep their values.
        own = {n: x for n, x in self.named_buffers() if n not in known}
        own.update(
            {n: x for n, x in state.items() if n in kept or n not in known}
        )
        self._core.load_state_dict(own)

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self,
        memo: set[torch.nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        return self.module.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return self.module.named_children()

    def apply(
        self, fn: Callable[[torch.nn.Module], None]
    ) -> "DistributedModel":
        self.module.apply(fn)
        return self

    def _apply(self, fn, recurse=True):
        if self._core is None or not self.partitioned:
            self.module._apply(fn, recurse)
            return self
        # They stay where smp has placed them; others are not here.
        for x in self.local_parameters():
            if fn(x.new_empty(0)).dtype != x.dtype:
                raise Error(
                    "the type of a DistributedModel cannot change after its "
                    "first step: convert the module before it, or use "
                    "bf16_params or fp16_params of smp.init"
                )
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, also those that optimizers keep."""
        self.module.zero_grad(set_to_none)
        for x in _state.live_optimizers():
            x.zero_grad()

    def cpu(self) -> "DistributedModel":
        raise Error(
            "no rank has all of a DistributedModel: state_dict() returns all of "
            "it on the host, for load_state_dict of a module without smp"
        )

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of all parameters that have one. Collective."""
        return self._core.gradients()

    def _named_tensors(self):
        skipped = set()
        for path, module in self.module.named_modules():
            for name in module._non_persistent_buffers_set:
                skipped.add(f"{path}.{name}" if path else name)
        yield from self.module.named_parameters(remove_duplicate=False)
        for name, x in self.module.named_buffers(remove_duplicate=False):
            if name not in skipped:
                yield name, x

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = super().__getattr__("module")
        if hasattr(module, name):
            return getattr(module, name)
        return _absent.refuse("DistributedModel", name, _absent.OF_MODEL)

    def __getstate__(self):
        raise Error(
            "a DistributedModel cannot be pickled or copied, as no rank has all "
            "of it: smp.save_checkpoint saves it, state_dict() returns it whole"
        )

    def _end(self):
        """Its modules run here again."""
        if self._core is None:
            return
        object.__setattr__(self, "_core", None)
        for hook in self._hooks:
            hook.remove()
        if self._guard is not None:
            self._guard.undo(self.module)
        for module in self.module.modules():
            _core.release_module(module)
        object.__setattr__(self, "_root", None)

    def __del__(self):
        if "_core" in self.__dict__:
            self._end()


def whole_state(state, of):
    """A state dict as it is, or the local ones of all ranks of the replica
    together; without what says so."""
    if not state.get(PARTIAL):
        return {name: x for name, x in state.items() if name != PARTIAL}
    if _core.tp_size() > 1:
        raise Error(
            f"a local state dict of {of} cannot be loaded with "
            "tensor_parallel_degree: a rank has slices; save state_dict(), or "
            "use smp.save_checkpoint"
        )
    result = {}
    for part in allgather(dict(state), CommGroup.MP_GROUP):
        result.update(part)
    result.pop(PARTIAL)
    return result


def is_tracing() -> bool:
    """Whether this rank runs the model for the first time, to measure it."""
    return _state.tracing


def _alive(patience=1.0):
    """Whether there is a model that stays: cycles wait for the collector, and a
    thread that ran the last step may take a moment to let go of its model."""
    if _state.current_model() is not None:
        gc.collect()
    until = time.monotonic() + patience
    while _state.current_model() is not None and time.monotonic() < until:
        time.sleep(0.01)
    return _state.current_model() is not None


def _place_by_name(module):
    for path, pp_rank in _state.manual_partition.items():
        try:
            found = module.get_submodule(path)
        except AttributeError:
            raise Error(
                f"smp.manual_partition: there is no module '{path}'"
            ) from None
        set_partition(found, pp_rank)


# -- marks ---------------------------------------------------------------------


def _mark(name, module, *args):
    """Made before there is a model, a mark waits for it: which module is the
    root is known only then."""
    model = _state.current_model()
    if model is None:
        _state.marks.append((name, weakref.ref(module), args))
    else:
        x = model._root if module is model.module else module
        getattr(_core, name)(x, *args)


def _apply_marks():
    marks, _state.marks = _state.marks, []
    for name, module, args in marks:
        if module() is not None:
            _mark(name, module(), *args)


def set_partition(module: torch.nn.Module, pp_rank: int) -> None:
    """Places ``module``, with all below it, before the first step."""
    _mark("set_partition", module, pp_rank)


def set_stateful(module: torch.nn.Module, why: str) -> None:
    """Says that ``module`` keeps state that smp cannot see, such as a file:
    microbatches pass it in order. Its attributes need no declaration."""
    _mark("set_stateful", module, why)


def set_tensor_parallelism(
    module: torch.nn.Module, enabled: bool = True, optimize: str = ""
) -> None:
    """Tensor-parallel ranks share ``module`` and those below it, or do not."""
    _mark("set_tensor_parallelism", module, enabled, optimize)


def set_activation_checkpointing(
    module: torch.nn.Module,
    strategy: str = "each",
    preserve_rng_state: bool = True,
) -> None:
    """Backward computes ``module`` again instead of keeping its activations."""
    _mark("set_activation_checkpointing", module, strategy, preserve_rng_state)


class _marks:
    """Calls ``mark`` for modules that are made, or become part of others, inside
    of it."""

    def _mark(self, module):
        raise NotImplementedError

    def __enter__(self):
        of_torch = torch.nn.modules.module

        def on_module(_parent, _name, module):
            if module is not None:
                self._mark(module)

        def on_parameter(module, _name, _parameter):
            self._mark(module)

        self._handles = [
            of_torch.register_module_module_registration_hook(on_module),
            of_torch.register_module_parameter_registration_hook(on_parameter),
        ]
        return self

    def __exit__(self, *_):
        for handle in self._handles:
            handle.remove()


class partition(_marks):
    """``with smp.partition(1): self.block = Block()`` places the block."""

    def __init__(self, pp_rank: int) -> None:
        self._pp_rank = pp_rank

    def _mark(self, module):
        set_partition(module, self._pp_rank)


class tensor_parallelism(_marks):
    """Modules that are set inside of it are shared, or not."""

    def __init__(self, enabled: bool = True, optimize: str = "") -> None:
        self._how = enabled, optimize

    def _mark(self, module):
        set_tensor_parallelism(module, *self._how)


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Parameters made inside of it get memory only on the ranks that own them,
    at the partition, with the values that they would have had."""
    scope = _core.Deferring(enabled)
    try:
        yield
    finally:
        del scope


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Iterator[None]:
    """For the construction of a large model: ``delay_param_initialization``,
    ``tensor_parallelism(**options)`` if it is wanted, and ``dtype`` as torch's
    default."""
    with contextlib.ExitStack() as stack:
        if tensor_parallelism:
            stack.enter_context(_shared(options))
        if dtype is not None:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        stack.enter_context(delay_param_initialization())
        yield


def _shared(options):
    unknown = options.keys() - {"optimize"}
    if unknown:
        raise Error(
            f"smp.model_creation: unknown option {', '.join(sorted(unknown))}; "
            "tensor_parallelism has optimize"
        )
    return tensor_parallelism(**options)

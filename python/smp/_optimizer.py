"""Optimizers: any ``torch.optim`` class on a partitioned model."""

import weakref
from typing import Any

import torch

from . import _core, _state
from ._errors import Error
from ._files import PARTIAL
from ._model import DistributedModel, whole_state

# In a state dict: the options of each group, such as its learning rate, and
# that other replicas have the rest.
GROUPS, DIVIDED = "param_groups", "_smp_is_divided"

# Fields that are not the optimizer's (runtime/checkpoint/checkpoint_parts.hpp).
_OF_SMP = "master", "average"

# -- what C++ asks of an optimizer (python_optimizer.cpp) -----------------------

# The state of torch's own classes: fields with the shape of the parameter, and
# counts. Of others it is known once it exists.
_FIELDS = {
    "SGD": (["momentum_buffer"], []),
    "Adam": (["exp_avg", "exp_avg_sq", "max_exp_avg_sq"], ["step"]),
    "AdamW": (["exp_avg", "exp_avg_sq", "max_exp_avg_sq"], ["step"]),
    "Adagrad": (["sum"], ["step"]),
    "RMSprop": (["square_avg", "momentum_buffer", "grad_avg"], ["step"]),
    "Adadelta": (["square_avg", "acc_delta"], ["step"]),
    "Adamax": (["exp_avg", "exp_inf"], ["step"]),
    "RAdam": (["exp_avg", "exp_avg_sq"], ["step"]),
    "Rprop": (["prev", "step_size"], ["step"]),
    "SparseAdam": (["exp_avg", "exp_avg_sq"], ["step"]),
}

# By optimizer of another class, as long as it has no state: what is in the
# checkpoint that it is resumed from.
_expected = weakref.WeakKeyDictionary()


def type_of(optimizer):
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim."):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def options_of(group):
    result = {}
    for name, x in group.items():
        if name == "betas":
            result["beta1"], result["beta2"] = map(float, x)
        elif isinstance(x, (bool, int, float)):
            result[name] = float(x)
        elif isinstance(x, torch.Tensor) and x.numel() == 1:
            result[name] = x.item()
    return result


def set_options(group, values):
    if "betas" in group and "beta1" in values:
        group["betas"] = (values["beta1"], values["beta2"])
    for name, value in values.items():
        x = group.get(name)
        if isinstance(x, torch.Tensor):
            x.fill_(value)
        elif isinstance(x, (bool, int, float)):
            group[name] = type(x)(value)


def _is_count(x):
    return isinstance(x, (bool, int)) or (
        isinstance(x, (float, torch.Tensor))
        and (not isinstance(x, torch.Tensor) or x.dim() == 0)
        and float(x).is_integer()
    )


def state_fields(optimizer):
    known = _FIELDS.get(type_of(optimizer))
    if known is not None:
        return [(x, False) for x in known[0]] + [(x, True) for x in known[1]]
    fields = dict(_expected.get(optimizer, {}))
    for state in optimizer.state.values():
        for name, x in state.items():
            if x is not None:
                is_tensor = isinstance(x, torch.Tensor) and x.dim() > 0
                fields.setdefault(name, not is_tensor)
    return list(fields.items())


def expect_fields(optimizer, fields):
    _expected[optimizer] = fields


def _makes_counts_of_tensors(optimizer):
    """As those of torch and classes derived from them do."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    return names & _FIELDS.keys() and "SparseAdam" not in names


def state_of(optimizer, parameter):
    result = []
    for name, x in optimizer.state.get(parameter, {}).items():
        if x is None:
            continue
        if (
            isinstance(x, torch.Tensor)
            and x.shape == parameter.shape
            and not (x.dim() == 0 and name == "step")
        ):
            result.append((name, x))
        elif _is_count(x):
            result.append((name, torch.tensor(int(x), dtype=torch.int64)))
        else:
            raise Error(
                f"the state '{name}' of {type_of(optimizer)} is neither a tensor "
                "of the parameter's shape nor a count, so a checkpoint cannot "
                "hold it; save the model alone (optimizer=None)"
            )
    return result


def set_state(optimizer, parameter, fields):
    if not fields:
        optimizer.state.pop(parameter, None)
        return
    state = {}
    for name, x in fields.items():
        if x.dtype == torch.int64 and x.dim() == 0:
            known = optimizer.state.get(parameter, {}).get(name)
            if known is None:
                as_tensor = _makes_counts_of_tensors(optimizer)
            else:
                as_tensor = isinstance(known, torch.Tensor)
            state[name] = (
                torch.tensor(float(x), dtype=torch.float32)
                if as_tensor
                else int(x)
            )
        else:
            state[name] = x.to(parameter.device)
    optimizer.state[parameter] = state


def forget_others(optimizer):
    """The groups have other tensors now: those that this rank updates."""
    mine = {p for group in optimizer.param_groups for p in group["params"]}
    if isinstance(optimizer, torch.optim.Adagrad):
        for group in optimizer.param_groups:
            for p in group["params"]:
                _begin_adagrad(optimizer, group, p)
    for p in [p for p in optimizer.state if p not in mine]:
        del optimizer.state[p]


def _begin_adagrad(optimizer, group, p):
    """Its constructor makes the sums, for parameters as they were then."""
    state = optimizer.state[p]
    known = state.get("sum")
    if (
        known is not None
        and known.shape == p.shape
        and known.device == p.device
    ):
        return
    first = group["initial_accumulator_value"]
    state["step"] = torch.tensor(0.0, dtype=torch.float32)
    state["sum"] = torch.full_like(
        p, first, memory_format=torch.preserve_format
    )


# -- what a program uses ---------------------------------------------------------


class DistributedOptimizer(torch.optim.Optimizer):
    """Lets an optimizer of ``torch.optim``, or any like them, update the
    parameters that this rank owns.

    Make the optimizer as usual, from ``model.parameters()`` of the
    ``DistributedModel``, before the first step. Learning-rate schedulers take
    this object. With ``static_loss_scale`` or ``dynamic_loss_scale``,
    ``model.backward`` scales the loss and ``step`` divides the gradients;
    ``dynamic_loss_args`` may have ``init_scale``, ``scale_factor``,
    ``scale_window`` and ``min_scale``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = None,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, float] | None = None,
        ema_decay: float | None = None,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            raise Error("the optimizer is a DistributedOptimizer already")
        model = _state.model_of_session("smp.DistributedOptimizer")
        self._inner = optimizer
        _check_parameters(optimizer, model)
        self._given = {
            id(p) for group in optimizer.param_groups for p in group["params"]
        }
        self._core = _core.Optimizer(
            optimizer,
            _this_module(),
            static_loss_scale=static_loss_scale,
            dynamic_loss_scale=dynamic_loss_scale,
            dynamic_loss_args=dynamic_loss_args or {},
            ema_decay=ema_decay,
        )
        _state.optimizers.append(weakref.ref(self))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer; since the first step with what this rank
        updates."""
        if self._core is not None:
            self._core.update_groups()
        return self._inner.param_groups

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """That of the optimizer."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:
        """Those of the optimizer."""
        return self._inner.defaults

    @property
    def loss_scale(self) -> float:
        """By which the next ``backward`` multiplies its loss."""
        return self._core.loss_scale

    def step(self, closure: None = None) -> bool:
        """Updates what this rank owns. False: gradients were not finite, and
        the dynamic loss scale is smaller now; no rank updated anything."""
        if closure is not None:
            raise Error(
                "DistributedOptimizer.step takes no closure: run the step, then "
                "call step()"
            )
        updated = self._core.step()
        if _state.optimizers[0]() is self:
            _state.updates += 1
        return updated

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._core.zero_grad()

    def swap_averages(self) -> None:
        """Swaps parameters and the averages of ``ema_decay``."""
        self._core.swap_averages()

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole model's parameters, by name and field, and
        the options of the groups, the same on all ranks. Collective."""
        return {**self._core.state_dict(), GROUPS: self._options()}

    def local_state_dict(self) -> dict[str, Any]:
        """What this rank has of it, and that it is a part."""
        state = self._core.local_state_dict()
        state.update({GROUPS: self._options(), PARTIAL: True})
        if self._is_divided():
            state[DIVIDED] = True
        return state

    def _options(self):
        return [
            {name: x for name, x in group.items() if name != "params"}
            for group in self._inner.param_groups
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what belongs to this rank out of a ``state_dict``, before the
        first step at the partition. Local state dicts are put together first,
        so that any partition reads them: then collective over the ranks that
        hold the model."""
        state = whole_state(state_dict, "the optimizer")
        if state.pop(DIVIDED, False):
            raise Error(
                "a local state dict made with shard_optimizer_state cannot be "
                "loaded, as it has rows of some parameters only; save "
                "state_dict(), or use smp.save_checkpoint"
            )
        options = state.pop(GROUPS, self._options())
        if len(options) != len(self._inner.param_groups):
            raise Error(
                f"the state has {len(options)} groups of parameters, the "
                f"optimizer {len(self._inner.param_groups)}"
            )
        for group, saved in zip(self._inner.param_groups, options):
            group.update(saved)
        model = _state.model_of_session("DistributedOptimizer.load_state_dict")
        _expect_fields_of(self._inner, state)
        me = weakref.ref(self)
        # Before the partition nobody knows what this rank will update.
        model._core.on_partition(
            lambda: me() and me()._core.load_state_dict(state)
        )

    def _is_divided(self):
        """Whether replicas divide what is updated among them."""
        model = _state.model_of_session("DistributedOptimizer.local_state_dict")
        if not model.partitioned or _core.rdp_size() == 1:
            return False
        local = {id(p): p for p in model.local_parameters()}
        have = sum(p.numel() for g in self.param_groups for p in g["params"])
        return have < sum(local[i].numel() for i in self._given & set(local))

    @property
    def _step_supports_amp_scaling(self):
        # torch's GradScaler asks for it in its step().
        raise Error(
            "torch's GradScaler sees the gradients of one rank only: write "
            "smp.amp.GradScaler"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise Error(
            "a group cannot be added to a DistributedOptimizer: give it to the "
            "optimizer before"
        )

    def __repr__(self):
        return f"DistributedOptimizer({self._inner!r})"

    def __getstate__(self):
        raise Error(
            "a DistributedOptimizer cannot be pickled or copied; "
            "smp.save_checkpoint saves it, state_dict() returns its state"
        )


def _expect_fields_of(optimizer, state):
    fields = {}
    for name, x in state.items():
        field = name.rpartition("/")[2]
        if field not in _OF_SMP:
            fields[field] = fields.get(field, True) and x.dim() == 0
    expect_fields(optimizer, fields)


def _this_module():
    import sys

    return sys.modules[__name__]


def _check_parameters(optimizer, model):
    known = {id(p) for p in model.module.parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in known:
                raise Error(
                    "the optimizer has a tensor of shape "
                    f"{list(p.shape)} that is not a parameter of the "
                    "DistributedModel: make the optimizer from its "
                    "model.parameters(), after smp.DistributedModel(...)"
                )


def clip_grad_norm_(model: DistributedModel, max_norm: float) -> torch.Tensor:
    """Scales all gradients so that their norm over all ranks is at most
    ``max_norm``; returns the norm before. Collective."""
    norm = model._core.clip_grad_norm_(float(max_norm))
    return torch.tensor(norm, dtype=torch.float32)

"""Loss scaling with the gradients of all ranks: what ``torch.amp.GradScaler``
does in one process."""

import math
from typing import Any

import torch

from . import _state
from ._errors import Error
from ._groups import allgather
from ._optimizer import DistributedOptimizer


def _numbers_error(text):
    result = Error(text)
    result.code = "numbers"
    return result


class GradScaler:
    """As ``torch.amp.GradScaler``: ``model.backward(scaler.scale(loss))`` in
    the step, then on all ranks ``scaler.step(optimizer)`` and
    ``scaler.update()``. If any gradient on any rank is not finite, no rank
    updates anything and the scale falls by ``backoff_factor``; after
    ``growth_interval`` updates without that it rises by ``growth_factor``.

    Every optimizer of the model gets its gradients unscaled at once. With
    ``fp16_params`` the optimizer scales the loss itself, so a GradScaler is
    refused there."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._enabled = enabled
        self._scale = self._checked(init_scale, "init_scale")
        self.set_growth_factor(growth_factor)
        self.set_backoff_factor(backoff_factor)
        self.set_growth_interval(growth_interval)
        self._tracker = 0
        # Whether a gradient was not finite; None: not looked at since update().
        self._overflow = None

    @staticmethod
    def _checked(scale, name):
        scale = float(scale)
        if not 1 <= scale < math.inf:
            raise Error(f"GradScaler: {name} = {scale}; allowed: 1 or more")
        return scale

    # -- in the step -----------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """A tensor times the scale, or a list or tuple of them."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            # Not a number of Python: a loss in float16 would overflow.
            return outputs * torch.tensor(
                self._scale, dtype=torch.float32, device=outputs.device
            )
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(x) for x in outputs)
        raise Error(
            f"GradScaler.scale takes tensors, not a {type(outputs).__name__}"
        )

    # -- after it, on all ranks ------------------------------------------------

    def unscale_(self, optimizer: DistributedOptimizer) -> None:
        """Divides the gradients of the model by the scale, for what looks at
        them before ``step``, as ``smp.clip_grad_norm_`` does. Collective."""
        if not self._enabled:
            return
        model = self._check(optimizer)
        if self._overflow is not None:
            raise Error(
                "GradScaler.unscale_: the gradients are unscaled already; call "
                "it once between update() and update()"
            )
        # Clipping reaches gradients wherever they are: here, in the shards of
        # replicas, in half precision. So to divide is to clip to a part of
        # their norm, which also tells whether all of them are finite.
        norm = model._core.clip_grad_norm_(math.inf)
        self._overflow = any(allgather(not math.isfinite(norm)))
        if not self._overflow and self._scale > 1:
            model._core.clip_grad_norm_((norm + 1e-6) / self._scale)

    def step(self, optimizer: DistributedOptimizer) -> bool:
        """``optimizer.step()`` with unscaled gradients. False, and no update
        on any rank, if one of them was not finite. Collective."""
        if not self._enabled:
            return optimizer.step()
        if self._overflow is None:
            self.unscale_(optimizer)
        self._check(optimizer)
        return False if self._overflow else optimizer.step()

    def update(self, new_scale: float | None = None) -> None:
        """Makes the scale of the next step, once all optimizers have stepped,
        or sets it."""
        if not self._enabled:
            return
        overflow, self._overflow = self._overflow, None
        if new_scale is not None:
            self._scale = self._checked(new_scale, "new_scale")
        elif overflow is None:
            raise Error("GradScaler.update: call step(optimizer) before it")
        elif overflow:
            self._tracker = 0
            self._scale *= self._backoff_factor
            if self._scale < 1:
                raise _numbers_error(
                    "gradients are not finite with a loss scale of "
                    f"{self._scale / self._backoff_factor:g}: something else "
                    "is wrong with them"
                )
        else:
            self._tracker += 1
            if self._tracker == self._growth_interval:
                self._tracker = 0
                # Beyond float32 no gradient is finite.
                grown = self._scale * self._growth_factor
                self._scale = grown if grown < 2.0**127 else self._scale

    @staticmethod
    def _check(optimizer):
        if not isinstance(optimizer, DistributedOptimizer):
            raise Error(
                "smp.amp.GradScaler takes an smp.DistributedOptimizer, not a "
                f"{type(optimizer).__name__}"
            )
        if optimizer.loss_scale != 1:
            raise Error(
                "smp.amp.GradScaler: the optimizer scales the loss already "
                "(static_loss_scale, dynamic_loss_scale, fp16_params); leave "
                "one of them out: GradScaler(enabled=False) does nothing"
            )
        return _state.model_of_session("smp.amp.GradScaler")

    # -- what it is ------------------------------------------------------------

    def get_scale(self) -> float:
        """By which the next loss is multiplied."""
        return self._scale if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """By which the scale rises."""
        return self._growth_factor

    def set_growth_factor(self, x: float) -> None:
        """Sets it, to more than 1."""
        if not x > 1:
            raise Error(f"GradScaler: growth_factor = {x}; more than 1 allowed")
        self._growth_factor = float(x)

    def get_backoff_factor(self) -> float:
        """By which the scale falls."""
        return self._backoff_factor

    def set_backoff_factor(self, x: float) -> None:
        """Sets it, to between 0 and 1."""
        if not 0 < x < 1:
            raise Error(
                f"GradScaler: backoff_factor = {x}; between 0 and 1 allowed"
            )
        self._backoff_factor = float(x)

    def get_growth_interval(self) -> int:
        """After how many updates the scale rises."""
        return self._growth_interval

    def set_growth_interval(self, x: int) -> None:
        """Sets it, to 1 or more."""
        if x < 1:
            raise Error(f"GradScaler: growth_interval = {x}; 1 or more allowed")
        self._growth_interval = int(x)

    def is_enabled(self) -> bool:
        """Whether it does anything."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """With the names of torch's; empty if it is not enabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what ``state_dict`` returned."""
        if not self._enabled:
            return
        missing = self.state_dict().keys() - state_dict.keys()
        if missing:
            raise Error(
                "GradScaler.load_state_dict: no " + ", ".join(sorted(missing))
            )
        self._scale = self._checked(state_dict["scale"], "scale")
        self.set_growth_factor(state_dict["growth_factor"])
        self.set_backoff_factor(state_dict["backoff_factor"])
        self.set_growth_interval(state_dict["growth_interval"])
        self._tracker = int(state_dict["_growth_tracker"])

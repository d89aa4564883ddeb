"""The classes of smp by the product's arguments."""

import weakref

import smp as _smp
import torch
from smp import Error
from torch.utils import _pytree as pytree

from . import _config

_hooks = []  # of the next step, with weak references to their models


class DistributedModel(_smp.DistributedModel):
    """As ``smp.DistributedModel``. Arguments that only concern speed change
    nothing: smp measures, buckets and overlaps by the keys of smp.init."""

    def __init__(
        self,
        module,
        trace_device="gpu",
        trace_execution_times=False,
        overlapping_allreduce=True,
        backward_passes_per_step=1,
        average_grads_across_microbatches=True,
        bucket_cap_mb=25,
        trace_memory_usage=False,
        broadcast_buffers=True,
        gradient_as_bucket_view=False,
    ):
        wanted = {
            "average_grads_across_microbatches": average_grads_across_microbatches
        }
        if _config.given.ddp:
            wanted["broadcast_buffers"] = broadcast_buffers
        for name, x in wanted.items():
            if getattr(_config.given, name) != x and not x:
                raise Error(
                    f"DistributedModel: {name}={x} has to be known earlier: "
                    f"give it to smp.init({{'{name}': {x}}}), or put it into "
                    "SM_HP_MP_PARAMETERS"
                )
        super().__init__(module)

    def forward(self, *args, **kwargs):
        """With ``fp16`` or ``bf16`` the model gets such inputs, and its outputs
        are float32."""
        half = _config.half_type()
        if half is None:
            return super().forward(*args, **kwargs)
        args, kwargs = _cast((args, kwargs), torch.float32, half)
        return _cast(super().forward(*args, **kwargs), half, torch.float32)

    def register_post_step_hook(self, hook):
        """Calls ``hook(model, optimizer)`` once, after the next step."""
        _hooks.append((weakref.ref(self), hook))

    def local_state_dict(self, gather_if_shard=True):
        return super().local_state_dict()


def _cast(x, old, new):
    def cast(t):
        return t.to(new) if t.dtype == old else t

    return pytree.tree_map_only(torch.Tensor, cast, x)


def set_activation_checkpointing(
    module, preserve_rng_state=True, pack_args_as_tuple=False, strategy="each"
):
    """As ``smp.set_activation_checkpointing``; arguments need no packing."""
    _smp.set_activation_checkpointing(module, strategy, preserve_rng_state)


class DistributedOptimizer(_smp.DistributedOptimizer):
    """As ``smp.DistributedOptimizer``; scales of the loss only with ``fp16``."""

    def __init__(
        self,
        optimizer,
        static_loss_scale=1.0,
        dynamic_loss_scale=False,
        dynamic_loss_args=None,
        **more,
    ):
        args = _of_smp({**(dynamic_loss_args or {}), **more})
        half = _config.given.fp16 or _config.given.fp16_params
        dynamic = half and dynamic_loss_scale
        super().__init__(
            optimizer,
            static_loss_scale=(
                static_loss_scale if half and not dynamic else None
            ),
            dynamic_loss_scale=dynamic,
            dynamic_loss_args=args,
        )

    @property
    def optimizer(self):
        """The one that was given."""
        return self._inner

    def clip_master_grads(self, max_norm):
        model = _smp._state.model_of_session("clip_master_grads")
        return _smp.clip_grad_norm_(model, max_norm)

    def local_state_dict(self, gather_if_shard=True):
        """What this rank has, of which other partitions can make the whole; with
        ``shard_optimizer_state`` all of it. Collective."""
        if _config.given.shard_optimizer_state:
            return self.state_dict()
        return super().local_state_dict()


def _of_smp(args):
    """Those that smp's dynamic scale has."""
    fixed = {"delayed_shift": 1, "consecutive_hysteresis": False}
    for name, x in fixed.items():
        if args.pop(name, x) != x:
            raise Error(
                f"DistributedOptimizer: {name} is not there; the dynamic loss "
                f"scale behaves as with {x}: leave it out, or use "
                "smp.amp.GradScaler"
            )
    return args


def after_step():
    if not _hooks:
        return
    hooks = _hooks[:]
    _hooks.clear()
    for model, hook in hooks:
        if model() is not None:
            hook(model(), _smp._state.first_optimizer())

"""What smp cannot train, and what must not be done with a model that it has."""

import functools
import weakref

import torch

from . import _state
from ._errors import Error

_WRAPPERS = {
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
}
_INSTEAD = (
    "smp.init(ddp=True) makes replicas, shard_optimizer_state and shard_gradients "
    "divide what they hold"
)


def _named(path):
    return f"'{path}'" if path else "the model"


def refuse_wrappers(module):
    if not isinstance(module, torch.nn.Module):
        raise Error(
            f"smp.DistributedModel takes a module, not a {type(module)}"
        )
    if type(module).__name__ == "OptimizedModule":
        raise Error(
            "smp.DistributedModel takes the module itself, not what "
            "torch.compile made of it: compile its blocks, block.compile()"
        )
    for path, x in module.named_modules():
        for kind in _WRAPPERS.intersection(c.__name__ for c in type(x).__mro__):
            raise Error(
                f"{_named(path)} is a {kind}: give smp the module inside of it; {_INSTEAD}"
            )
        if isinstance(x, torch.jit.ScriptModule):
            raise Error(
                f"{_named(path)} is a TorchScript module: give smp the Python module, or "
                'train the file with smp-train (model.type = "torchscript")'
            )


def wrapped(model, kind):
    return Error(
        f"{kind} around smp.DistributedModel: call smp's model itself; {_INSTEAD}"
    )


def refuse_wrappers_around(model):
    """Those that change the module rather than hold it."""
    if any(c.__name__ == "FSDPModule" for c in type(model).__mro__):
        raise wrapped(model, "fully_shard")
    for name, x in model.module.named_parameters():
        if type(x).__name__ in ("FlatParameter", "DTensor"):
            raise wrapped(model, f"what made '{name}' a {type(x).__name__}")


def refuse_meta(module):
    for kind in ("parameter", "buffer"):
        for name, x in getattr(module, f"named_{kind}s")():
            if x.is_meta:
                raise Error(
                    f"the {kind} '{name}' is on the device 'meta', where it has "
                    "no values: make the model in "
                    "smp.delay_param_initialization(), which takes no memory "
                    "either, or give it memory with to_empty"
                )


def refuse_new_parts():
    """After the partition other ranks would not learn of them."""

    # Of the partitioned model, whose modules do not change any more: forward
    # may make a list of some of them for each call.
    paths = weakref.WeakKeyDictionary()

    def check(parent, name, x):
        model = _state.current_model()
        if model is None or x is None:
            return
        if not paths:
            if not model.partitioned:
                return
            paths.update((m, path) for path, m in model.module.named_modules())
        is_module = isinstance(x, torch.nn.Module)
        if parent not in paths or (
            x in paths
            if is_module
            else any(x is p for p in model.module.parameters())
        ):
            return
        raise Error(
            f"{_named(paths[parent])} gets a new "
            f"{'module' if is_module else 'parameter'} '{name}' after the "
            "partition, when ranks know which there are: add it before the "
            "first step; DistributedModel.load_state_dict gives new values to "
            "what is there"
        )

    of_torch = torch.nn.modules.module
    return (
        of_torch.register_module_module_registration_hook(check),
        of_torch.register_module_parameter_registration_hook(check),
    )


def refuse_pickling(model):
    """At the partition: what another rank owns has no content to be saved here."""

    def refuse(name, *_):
        raise Error(
            f"'{name}' is pickled, or saved by torch.save, but another rank owns "
            "it: save model.state_dict(), or use smp.save_checkpoint"
        )

    local = [*model.local_parameters(), *model.local_buffers()]
    own = {id(x) for x in local}
    for name, x in model._named_tensors():
        if id(x) not in own:
            x.__reduce_ex__ = functools.partial(refuse, name)

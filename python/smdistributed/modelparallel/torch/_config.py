"""The options of the withdrawn product, as those of smp.init."""

import json
import os
import types

import torch
from smp import Error

# What it documented, with its defaults: programs read them.
_DEFAULTS = {
    "microbatches": 1,
    "pipeline": "interleaved",
    "optimize": "memory",
    "placement_strategy": "cluster",
    "auto_partition": True,
    "default_partition": 0,
    "tensor_parallel_degree": 1,
    "fp16": False,
    "fp16_params": False,
    "bf16": False,
    "shard_optimizer_state": False,
    "prescaled_batch": False,
    "skip_tracing": False,
    "memory_weight": None,
    "ddp": False,
    "active_microbatches": None,
    "deterministic_server": False,
    "offload_activations": False,
    "activation_loading_horizon": 4,
    "sharded_data_parallel_degree": 1,
    "average_grads_across_microbatches": True,
    "broadcast_buffers": True,
}

# They told the product how processes find each other.
_OF_ITS_LAUNCHER = ("ddp_port", "ddp_dist_backend")

# The options of this session.
given = types.SimpleNamespace(**_DEFAULTS)


def options_of(config):
    text = os.environ.get("SM_HP_MP_PARAMETERS", "{}")
    try:
        result = json.loads(text)
    except json.JSONDecodeError as e:
        raise Error(f"SM_HP_MP_PARAMETERS is no JSON: {e}") from None
    if not isinstance(result, dict):
        raise Error("SM_HP_MP_PARAMETERS has no table of options")
    return {**result, **(config or {})}


def keep(options):
    given.__dict__.clear()
    given.__dict__.update({**_DEFAULTS, **options})
    degree = options.get(
        "partitions", options.get("pipeline_parallel_degree", 1)
    )
    given.partitions = given.pipeline_parallel_degree = degree


def half_type():
    """What the model computes in, if it is not float32."""
    if given.fp16:
        return torch.float16
    return torch.bfloat16 if given.bf16 else None


def _world_size():
    # smp.run, torchrun, Open MPI, Slurm, MPICH: smp.init reads the rest.
    for name in (
        "SMP_WORLD_SIZE",
        "WORLD_SIZE",
        "OMPI_COMM_WORLD_SIZE",
        "SLURM_STEP_NUM_TASKS",
        "PMI_SIZE",
    ):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 1


def translated(options):
    """Options of smp.init, which refuses what it does not know. Those that are
    without effect, which the product ignored, are left out."""
    x = dict(options)
    _refuse(x)
    for name in _OF_ITS_LAUNCHER:
        x.pop(name, None)
    for name, ours in (("fp16", "fp16_params"), ("bf16", "bf16_params")):
        if x.pop(name, False):
            x[ours] = True
    if x.pop("skip_tracing", False):
        x["trace_device"] = "none"
    _drop_idle(x)
    return x


def _refuse(x):
    if x.pop("horovod", False):
        raise Error("horovod is of TensorFlow; ddp = true makes replicas")
    degree = x.pop("sharded_data_parallel_degree", 1)
    for name in [name for name in x if name.startswith("sdp_")]:
        del x[name]
    if degree > 1:
        raise Error(
            f"sharded_data_parallel_degree = {degree} is not there: replicas do "
            "not divide the parameters; ddp, shard_optimizer_state and "
            "shard_gradients = true divide gradients and optimizer state among "
            "them, pipeline_parallel_degree and tensor_parallel_degree the "
            "parameters"
        )


def _drop_idle(x):
    def drop(*names):
        for name in names:
            x.pop(name, None)

    parts = x.get("partitions", x.get("pipeline_parallel_degree", 1))
    shared = x.get("tensor_parallel_degree", 1)
    replicas = _world_size() // max(parts * shared, 1)
    if not x.get("ddp"):
        drop("placement_strategy", "shard_optimizer_state", "prescaled_batch")
        drop("broadcast_buffers")
    elif shared * replicas <= 1:
        drop("placement_strategy", "shard_optimizer_state", "broadcast_buffers")
    else:
        x.setdefault("broadcast_buffers", True)
    if sum(n > 1 for n in (parts, shared, replicas)) < 2:
        drop("placement_strategy")
    if shared == 1:
        drop("prescaled_batch")
    if x.get("auto_partition", True):
        drop("default_partition")
    else:
        drop("memory_weight", *(["optimize"] if shared == 1 else []))
    if x.get("memory_weight") is not None and shared == 1:
        drop("optimize")
    if not x.get("offload_activations"):
        drop("activation_loading_horizon")
    if x.get("pipeline") == "simple":
        drop("active_microbatches")

"""smp: any PyTorch module over several ranks, with the numbers of one process.

    import torch, smp

    smp.init(pipeline_parallel_degree=2, microbatches=8)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def train_step(batch, labels):
        loss = loss_of(model(batch), labels)
        model.backward(loss)
        return loss

    for batch, labels in loader:
        optimizer.zero_grad()
        loss = train_step(batch, labels).reduce_mean()
        optimizer.step()

Start it with ``python -m smp.run -n 2 train.py`` or with torchrun.
"""

import os as _os

# LibTorch's OpenMP and UCX read these when they are loaded. UCX warns of those
# that come later.
for _name, _value in (
    ("OMP_WAIT_POLICY", "passive"),
    ("UCX_MEM_MMAP_HOOK_MODE", "none"),
    ("UCX_MEMTYPE_CACHE", "n"),
    ("UCX_DEBUG_SIGNO", "0"),
):
    _os.environ.setdefault(_name, _value)

import torch as _torch  # noqa: E402, F401 -- its libraries come before ours

from . import _core, _errors, _values  # noqa: E402

_core.prepare(_errors.Error, _errors.TraceFinished, _values)
_core.settle_process()

from . import _absent, amp, nn  # noqa: E402
from ._checkpoint import resume_from_checkpoint, save_checkpoint  # noqa: E402
from ._errors import Error  # noqa: E402
from ._files import load, save  # noqa: E402
from ._groups import (  # noqa: E402
    DP_GROUP,
    MP_GROUP,
    WORLD,
    CommGroup,
    RankType,
    allgather,
    barrier,
    broadcast,
    data_rank,
    data_size,
    dp_barrier,
    dp_rank,
    dp_size,
    get_dp_group,
    get_group,
    get_mp_group,
    local_rank,
    local_size,
    mp_barrier,
    mp_rank,
    mp_size,
    pp_barrier,
    pp_rank,
    pp_size,
    rank,
    rdp_barrier,
    rdp_rank,
    rdp_size,
    recv_from,
    send,
    size,
    tp_barrier,
    tp_rank,
    tp_size,
)
from ._model import (  # noqa: E402
    DistributedModel,
    delay_param_initialization,
    is_tracing,
    model_creation,
    partition,
    set_activation_checkpointing,
    set_partition,
    set_stateful,
    set_tensor_parallelism,
    tensor_parallelism,
)
from ._optimizer import DistributedOptimizer, clip_grad_norm_  # noqa: E402
from ._process import (
    init,
    is_initialized,
    last_step,
    run_dir,
    shutdown,
)  # noqa: E402
from ._registered import tp_register, tp_register_with_module  # noqa: E402
from ._schedule import Schedule, start_backward, start_forward  # noqa: E402
from ._step import StepOutput, step  # noqa: E402
from ._verify import verify  # noqa: E402

__all__ = [
    "CommGroup",
    "DP_GROUP",
    "DistributedModel",
    "DistributedOptimizer",
    "Error",
    "MP_GROUP",
    "RankType",
    "Schedule",
    "StepOutput",
    "WORLD",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "clip_grad_norm_",
    "data_rank",
    "data_size",
    "delay_param_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_group",
    "get_mp_group",
    "init",
    "is_initialized",
    "is_tracing",
    "last_step",
    "load",
    "local_rank",
    "local_size",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "model_creation",
    "nn",
    "partition",
    "pp_barrier",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_barrier",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "resume_from_checkpoint",
    "run_dir",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_stateful",
    "set_tensor_parallelism",
    "shutdown",
    "size",
    "start_backward",
    "start_forward",
    "step",
    "tensor_parallelism",
    "tp_barrier",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
    "verify",
]


def __getattr__(name):
    return _absent.refuse("smp", name, _absent.OF_PACKAGE)

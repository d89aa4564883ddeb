"""What the withdrawn product had and this library has not, and what to use."""

from ._errors import Error


class Absent(Error, AttributeError):
    """So that ``hasattr`` is False."""


_GROUPS = (
    "smp makes no process groups of torch.distributed: smp.allgather, "
    "smp.broadcast and smp.barrier take an smp.CommGroup, and "
    "torch.distributed.new_group takes the ranks of smp.get_group(group)"
)
_TORCHS = (
    "keep torch's classes, and make them inside of smp.tensor_parallelism(), or "
    "register one of your own with smp.tp_register; for FusedLayerNorm and "
    "FlashAttentionLayer use torch's LayerNorm and scaled_dot_product_attention"
)
_SHARED = (
    "model.partition_text() says which modules tensor-parallel ranks share, and "
    "local_state_dict() has the parts that this rank holds"
)

OF_PACKAGE = {
    "get_world_process_group": _GROUPS,
    "get_mp_process_group": _GROUPS,
    "get_dp_process_group": _GROUPS,
    "get_pp_process_group": _GROUPS,
    "get_tp_process_group": _GROUPS,
    "get_rdp_process_group": _GROUPS,
    "checkpoint": "torch.utils.checkpoint.checkpoint works in modules, and "
    "smp.set_activation_checkpointing(module) needs no change of code",
    "checkpoint_sequential": "smp.set_activation_checkpointing(sequential, "
    'strategy="group_2") does it without a change of code',
    "optimizers": "smp.DistributedOptimizer takes any optimizer of torch.optim",
}

OF_NN = {
    name: _TORCHS
    for name in (
        "DistributedModule",
        "DistributedLinear",
        "DistributedEmbedding",
        "DistributedLayerNorm",
        "DistributedTransformer",
        "DistributedTransformerLMHead",
        "DistributedTransformerLayer",
        "DistributedAttentionLayer",
        "DistributedTransformerOutputLayer",
        "FusedLayerNorm",
        "FlashAttentionLayer",
    )
}

OF_MODEL = {
    "join": "replicas need equally many batches: give each of them as many, by "
    "a sampler that drops or repeats samples",
    "register_comm_hook": "replicas average gradients themselves, by the keys "
    "overlapping_allreduce, bucket_cap_mb and shard_gradients of smp.init",
    "distributed_modules": _SHARED,
    "is_distributed_parameter": _SHARED,
    "is_distributed_buffer": _SHARED,
    "is_scaled_batch_parameter": _SHARED,
    "is_scaled_batch_buffer": _SHARED,
    "default_reducer_named_parameters": _SHARED,
    "scaled_batch_reducer_named_parameters": _SHARED,
}


def refuse(owner, name, known):
    """@raises Absent if the name is known, else AttributeError"""
    if name in known:
        raise Absent(f"{owner}.{name} is not there: {known[name]}")
    raise AttributeError(f"{owner} has no attribute '{name}'")

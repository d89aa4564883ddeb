"""What distributed classes (``smp.tp_register``) communicate with.

All tensor-parallel ranks call these in the same module and order, with tensors
of the same sizes; T is their number, ``smp.tp_size()``. Each has its gradient,
which is that of the losses of all these ranks together. Axes count from the end
if they are negative.
"""

import torch

from . import _absent, _core


def fused_allgather_for_tp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """[..., n, ...] -> [..., T n, ...]: the values of all ranks along ``dim``.
    Backward: ``reduce_scatter_for_tp``."""
    return _core.fused_allgather_for_tp(x, dim)


def reduce_scatter_for_tp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """[..., T n, ...] -> [..., n, ...]: the sum over all ranks, of which each
    gets its slice of ``dim``. Backward: ``fused_allgather_for_tp``."""
    return _core.reduce_scatter_for_tp(x, dim)


def scatter_and_merge_for_tp(
    x: torch.Tensor, split_dim: int, merge_dim: int
) -> torch.Tensor:
    """Slices along ``split_dim``, sends each rank one slice and merges what
    arrives along ``merge_dim``. Backward: the same with both exchanged."""
    return _core.scatter_and_merge_for_tp(x, split_dim, merge_dim)


def fwd_allreduce_for_tp(x: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, the same on all. Backward: the identity, as the
    gradient is the same on all, too."""
    return _core.fwd_allreduce_for_tp(x)


def bwd_allreduce_for_tp(x: torch.Tensor) -> torch.Tensor:
    """The identity, for an ``x`` that is the same on all ranks. Backward: the sum
    of the gradients of all ranks."""
    return _core.bwd_allreduce_for_tp(x)


def narrow_for_tp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """[..., T n, ...] -> [..., n, ...]: this rank's slice, along ``dim``, of what
    is the same on all. Backward: all get the whole gradient."""
    return _core.narrow_for_tp(x, dim)


def merge_for_tp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """[..., n, ...] -> [..., T n, ...]: the values of all ranks along ``dim``,
    the same on all. Backward: this rank's slice of the gradient."""
    return _core.merge_for_tp(x, dim)


def __getattr__(name):
    return _absent.refuse("smp.nn", name, _absent.OF_NN)

"""Ranks and their groups."""

import enum
from typing import Any

from . import _core


class CommGroup(str, enum.Enum):
    """A group of ranks: WORLD, PP_GROUP (one pipeline), TP_GROUP, DP_GROUP,
    RDP_GROUP, MP_GROUP (one replica of the model)."""

    WORLD = "world"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    DP_GROUP = "dp"
    RDP_GROUP = "rdp"
    MP_GROUP = "mp"


class RankType(str, enum.Enum):
    """How a rank is addressed: by its position among these."""

    WORLD_RANK = "world"
    PP_RANK = "pp"
    TP_RANK = "tp"
    DP_RANK = "dp"
    RDP_RANK = "rdp"
    MP_RANK = "mp"


WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP


def _name(group):
    return group.value if isinstance(group, enum.Enum) else group


def rank() -> int:
    """Position of this rank among all."""
    return _core.rank()


def size() -> int:
    """Number of ranks."""
    return _core.size()


def local_rank() -> int:
    """Position of this rank on this machine."""
    return _core.local_rank()


def local_size() -> int:
    """Number of ranks on this machine."""
    return _core.local_size()


def pp_rank() -> int:
    """Position of this rank in its pipeline."""
    return _core.pp_rank()


def pp_size() -> int:
    """Number of ranks in its pipeline."""
    return _core.pp_size()


def tp_rank() -> int:
    """Position of this rank among those that share modules with it."""
    return _core.tp_rank()


def tp_size() -> int:
    """Number of ranks among those that share modules with it."""
    return _core.tp_size()


def dp_rank() -> int:
    """Position of this rank among those with the same part of the model."""
    return _core.dp_rank()


def dp_size() -> int:
    """Number of ranks among those with the same part of the model."""
    return _core.dp_size()


def rdp_rank() -> int:
    """Position of this rank among those with the same parameters."""
    return _core.rdp_rank()


def rdp_size() -> int:
    """Number of ranks among those with the same parameters."""
    return _core.rdp_size()


def mp_rank() -> int:
    """Position of this rank in its replica of the model."""
    return _core.mp_rank()


def mp_size() -> int:
    """Number of ranks in its replica of the model."""
    return _core.mp_size()


def data_rank() -> int:
    """Which part of each batch is for this rank, of ``data_size()``."""
    return _core.data_rank()


def data_size() -> int:
    """How many parts a batch has."""
    return _core.data_size()


def get_group(group: CommGroup | str) -> list[int]:
    """The ranks in this rank's group, ascending."""
    return _core.get_group(_name(group))


def get_mp_group() -> list[int]:
    """The ranks that hold this replica of the model."""
    return get_group(CommGroup.MP_GROUP)


def get_dp_group() -> list[int]:
    """The ranks that hold this part of the model."""
    return get_group(CommGroup.DP_GROUP)


def send(
    obj: Any, dest_rank: int, rank_type: RankType | str = RankType.WORLD_RANK
) -> None:
    """Sends an object to a rank, its position in the group, which calls
    ``recv_from``. Does not wait."""
    _core.send(obj, dest_rank, _name(rank_type))


def recv_from(
    src_rank: int, rank_type: RankType | str = RankType.WORLD_RANK
) -> Any:
    """Waits for the next object from a rank: from its ``send`` or
    ``broadcast``."""
    return _core.recv_from(src_rank, _name(rank_type))


def broadcast(
    obj: Any, group: CommGroup | str = CommGroup.WORLD, src: int = 0
) -> Any:
    """The object of rank ``src`` of the group, on all its ranks."""
    return _core.broadcast(obj, _name(group), src)


def allgather(obj: Any, group: CommGroup | str = CommGroup.WORLD) -> list[Any]:
    """The objects of all ranks of the group, by position. Collective."""
    return _core.allgather(obj, _name(group))


def barrier(group: CommGroup | str = CommGroup.WORLD) -> None:
    """Waits for all ranks of the group."""
    _core.barrier(_name(group))


def pp_barrier() -> None:
    """Waits for all ranks of this pipeline."""
    barrier(CommGroup.PP_GROUP)


def tp_barrier() -> None:
    """Waits for all ranks of this group of ranks that share modules."""
    barrier(CommGroup.TP_GROUP)


def dp_barrier() -> None:
    """Waits for all ranks of this group of ranks with this part of the model."""
    barrier(CommGroup.DP_GROUP)


def rdp_barrier() -> None:
    """Waits for all ranks of this group of ranks with these parameters."""
    barrier(CommGroup.RDP_GROUP)


def mp_barrier() -> None:
    """Waits for all ranks of this replica of the model."""
    barrier(CommGroup.MP_GROUP)

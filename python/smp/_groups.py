"""Ranks and their groups."""

import enum

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


rank, size = _core.rank, _core.size
local_rank, local_size = _core.local_rank, _core.local_size
pp_rank, pp_size = _core.pp_rank, _core.pp_size
tp_rank, tp_size = _core.tp_rank, _core.tp_size
dp_rank, dp_size = _core.dp_rank, _core.dp_size
rdp_rank, rdp_size = _core.rdp_rank, _core.rdp_size
mp_rank, mp_size = _core.mp_rank, _core.mp_size
data_rank, data_size = _core.data_rank, _core.data_size


def get_group(group):
    """The ranks in this rank's group, ascending."""
    return _core.get_group(_name(group))


def get_mp_group():
    """The ranks that hold this replica of the model."""
    return get_group(CommGroup.MP_GROUP)


def get_dp_group():
    """The ranks that hold this part of the model."""
    return get_group(CommGroup.DP_GROUP)


def send(obj, dest, rank_type=RankType.WORLD_RANK):
    """Sends an object to a rank, its position in the group, which calls
    ``recv_from``. Does not wait."""
    _core.send(obj, dest, _name(rank_type))


def recv_from(src, rank_type=RankType.WORLD_RANK):
    """Waits for the next object from a rank: from its ``send`` or
    ``broadcast``."""
    return _core.recv_from(src, _name(rank_type))


def broadcast(obj, group=CommGroup.WORLD, src=0):
    """The object of rank ``src`` of the group, on all its ranks."""
    return _core.broadcast(obj, _name(group), src)


def allgather(obj, group=CommGroup.WORLD):
    """The objects of all ranks of the group, by position. Collective."""
    return _core.allgather(obj, _name(group))


def barrier(group=CommGroup.WORLD):
    """Waits for all ranks of the group."""
    _core.barrier(_name(group))


def pp_barrier():
    barrier(CommGroup.PP_GROUP)


def tp_barrier():
    barrier(CommGroup.TP_GROUP)


def dp_barrier():
    barrier(CommGroup.DP_GROUP)


def rdp_barrier():
    barrier(CommGroup.RDP_GROUP)


def mp_barrier():
    barrier(CommGroup.MP_GROUP)

"""``import smdistributed.modelparallel.torch as smp``: smp by the names and
arguments that the withdrawn product documented, so that its scripts run with
their imports unchanged. docs/python/withdrawn.md says what is different."""

import functools
import types

import smp as _smp
from smp import *  # noqa: F401, F403

from . import _config
from ._checkpoint import (  # noqa: F401
    load,
    resume_from_checkpoint,
    save,
    save_checkpoint,
)
from ._model import (  # noqa: F401
    DistributedModel,
    DistributedOptimizer,
    after_step,
    set_activation_checkpointing,
)

# What transformers asks of it.
state = types.SimpleNamespace(
    cfg=_config.given,
    module_manager=types.SimpleNamespace(translate_functions=[]),
)
model = types.SimpleNamespace(DistributedModel=DistributedModel)
optimizer = types.SimpleNamespace(DistributedOptimizer=DistributedOptimizer)


def init(config=None):
    """Joins the other ranks. The options are those in the environment variable
    SM_HP_MP_PARAMETERS, as JSON, and then ``config``, a dict. A program may call
    it again without any."""
    if config is None and _smp.is_initialized():
        return
    options = _config.options_of(config)
    _smp.init(_config.translated(options))
    _config.keep(options)


def step(
    function=None,
    non_split_inputs=(),
    input_split_axes=None,
    detach_outputs=True,
):
    """As ``smp.step``."""
    if not callable(function):
        names = non_split_inputs if function is None else function
        return functools.partial(
            step,
            non_split_inputs=names,
            input_split_axes=input_split_axes,
            detach_outputs=detach_outputs,
        )
    inner = _smp.step(
        function,
        non_split_inputs=non_split_inputs or (),
        input_split_axes=input_split_axes,
        detach_outputs=detach_outputs,
    )

    @functools.wraps(function)
    def run(*args, **kwargs):
        result = inner(*args, **kwargs)
        after_step()
        return result

    return run


def broadcast(obj, group):
    """Sends to the other ranks of the group, which call ``recv_from``."""
    place = _smp.get_group(group).index(_smp.rank())
    _smp.broadcast(obj, group, place)


def __getattr__(name):
    return getattr(_smp, name)

"""The random numbers of Python and of numpy, which modules may draw as they draw
torch's."""

import random
import sys

import torch

from . import _core
from ._groups import allgather


def _numpy():
    return sys.modules.get("numpy")


def state():
    numpy = _numpy()
    return random.getstate(), numpy and numpy.random.get_state()


def is_same(x, y):
    """Tells whether nothing was drawn between two states."""
    (a, m), (b, n) = x, y
    return a == b and (
        m is None or n is None or _comparable(m) == _comparable(n)
    )


def put_back(x):
    random.setstate(x[0])
    if x[1] is not None:
        _numpy().random.set_state(x[1])


def seed(x):
    random.seed(x)
    if numpy := _numpy():
        numpy.random.seed([x & 0xFFFFFFFF, x >> 32])


def include():
    """At the partition: if the model draws from them, each call gets its own
    numbers, as of torch's, wherever it runs. Collective."""
    _core.include_generators(any(allgather(_core.take_drawn())))


# -- generators that modules keep --------------------------------------------------


def classes():
    """Those of objects that change as numbers are drawn from them."""
    result = [random.Random, torch.Generator]
    if numpy := _numpy():
        result += [numpy.random.Generator, numpy.random.RandomState]
    return tuple(result)


def _comparable(x):
    if isinstance(x, dict):
        return tuple((k, _comparable(y)) for k, y in x.items())
    if isinstance(x, (tuple, list)):
        return tuple(_comparable(y) for y in x)
    return x.tobytes() if hasattr(x, "tobytes") else x


def state_of(x):
    """What can be compared, and what ``put_back_into`` takes."""
    if isinstance(x, random.Random):
        found = x.getstate()
    elif isinstance(x, torch.Generator):
        found = x.get_state()
        return bytes(found.tolist()), found
    elif hasattr(x, "bit_generator"):
        found = x.bit_generator.state
    else:
        found = x.get_state()
    return _comparable(found), found


def put_back_into(x, found):
    if isinstance(x, random.Random):
        x.setstate(found)
    elif hasattr(x, "bit_generator"):
        x.bit_generator.state = found
    else:
        x.set_state(found)

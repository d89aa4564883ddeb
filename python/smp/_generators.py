"""The random numbers of Python and of numpy, which modules may draw as they draw
torch's."""

import random

from . import _core
from ._groups import allgather
from ._opaque import comparable
from ._opaque import loaded_numpy as _numpy


def state():
    numpy = _numpy()
    return random.getstate(), numpy and numpy.random.get_state()


def is_same(x, y):
    """Tells whether nothing was drawn between two states."""
    (a, m), (b, n) = x, y
    return a == b and (m is None or n is None or comparable(m) == comparable(n))


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

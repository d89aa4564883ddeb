"""Objects that modules keep, and whose state is elsewhere than in attributes:
generators of random numbers, and numpy's arrays."""

import random
import sys

import torch

# Larger arrays are data rather than state.
LOOKED_AT_BYTES = 1 << 20


def loaded_numpy():
    return sys.modules.get("numpy")


def classes():
    result = [random.Random, torch.Generator]
    if numpy := loaded_numpy():
        result += [numpy.random.Generator, numpy.random.RandomState]
        result += [numpy.ndarray]
    return tuple(result)


def comparable(x):
    if isinstance(x, dict):
        return tuple((k, comparable(y)) for k, y in x.items())
    if isinstance(x, (tuple, list)):
        return tuple(comparable(y) for y in x)
    return x.tobytes() if hasattr(x, "tobytes") else x


def _is_array(x):
    numpy = loaded_numpy()
    return numpy is not None and isinstance(x, numpy.ndarray)


def state_of(x):
    """What can be compared, and what ``put_back_into`` takes; both None for what
    is not looked at."""
    if _is_array(x):
        if (
            x.nbytes > LOOKED_AT_BYTES
            or x.dtype.hasobject
            or isinstance(x, loaded_numpy().memmap)
        ):
            return None, None
        return x.tobytes(), x.copy()
    if isinstance(x, random.Random):
        found = x.getstate()
    elif isinstance(x, torch.Generator):
        found = x.get_state()
        return bytes(found.tolist()), found
    elif hasattr(x, "bit_generator"):
        found = x.bit_generator.state
    else:
        found = x.get_state()
    return comparable(found), found


def put_back_into(x, found):
    if found is None:
        return
    if _is_array(x):
        if x.flags.writeable:
            x[...] = found
    elif isinstance(x, random.Random):
        x.setstate(found)
    elif hasattr(x, "bit_generator"):
        x.bit_generator.state = found
    else:
        x.set_state(found)

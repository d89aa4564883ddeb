"""How a model gets into the zoo, and its batches."""

from typing import Callable, Dict, List, NamedTuple, Tuple

import torch
from torch import Tensor, nn

ROWS = 8  # of a batch; 4 microbatches of 2
WIDTH = 12
LENGTH = 6  # tokens in a row
WORDS = 29
CLASSES = 5


class Entry(NamedTuple):
    make: Callable[[], Tuple[nn.Module, List[Tensor]]]
    traced: bool
    random: bool  # draws random numbers: no number can be expected beforehand


ZOO: Dict[str, Entry] = {}


def model(name: str, traced: bool = False, random: bool = False):
    """Adds a function that makes a model and a batch to the zoo."""

    def add(make):
        ZOO[name] = Entry(make, traced, random)
        return make

    return add


def rows(*sizes: int) -> Tensor:
    return torch.randn(ROWS, *sizes)


def words(length: int = LENGTH) -> Tensor:
    return torch.randint(0, WORDS, (ROWS, length))


def classes() -> Tensor:
    return torch.randint(0, CLASSES, (ROWS,))

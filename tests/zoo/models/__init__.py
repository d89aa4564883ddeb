"""Small models, each with one habit that breaks a pipeline that assumes too much.

They are written as a PyTorch user writes them: nothing here knows about smp.
A model is called with one batch of ROWS rows and returns its loss (a mean over
the rows), or a tuple that begins with it.
"""

from models import (  # noqa: F401 (each adds to ZOO, or to PUBLISHED)
    trees,
    language,
    depends_on_data,
    calls,
    arguments,
    state,
    library,
    hugging_face,
    published,
)
from models.entry import ZOO
from models.published import PUBLISHED

__all__ = ["PUBLISHED", "ZOO"]

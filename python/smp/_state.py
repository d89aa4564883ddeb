"""What belongs to the session of this process."""

from ._errors import Error

model = None  # weak reference to the DistributedModel
optimizers = []  # weak references
marks = []  # of modules before there is a model
updates = 0  # of the model so far, as its first optimizer counts
tracing = False  # the first call of the model, which measures it
options = {}  # of smp.init
manual_partition = {}  # pp_ranks by module


def current_model():
    """The session's model, or None."""
    return model() if model is not None else None


def live_optimizers():
    """The DistributedOptimizers of the model, the first one first."""
    return [x for x in (y() for y in optimizers) if x is not None]


def first_optimizer():
    """The one that programs mean if they name none; or None."""
    return next(iter(live_optimizers()), None)


def model_of_session(what):
    found = current_model()
    if found is None:
        raise Error(f"{what} needs an smp.DistributedModel before it")
    return found

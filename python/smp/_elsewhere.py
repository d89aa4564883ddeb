"""Attributes that a module changes as it runs, on ranks where it does not run."""

from . import _core
from ._errors import Error
from ._groups import CommGroup, allgather


class Elsewhere:
    """Stands for the value of such an attribute. Whoever uses it is told."""

    __slots__ = ("_text",)

    def __init__(self, text):
        object.__setattr__(self, "_text", text)

    def __repr__(self):
        return f"<{self._text}>"

    def __deepcopy__(self, memo):
        return self

    def __getattr__(self, name):
        raise Error(self._text)

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = [*args, *(kwargs or {}).values()]
        for x in found:
            if isinstance(x, cls):
                raise Error(x._text)
            if isinstance(x, (list, tuple)):
                found.extend(x)
        return NotImplemented


def _refuse(self, *args):
    raise Error(self._text)


for _name in (
    "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or "
    "radd rsub rmul rmatmul rtruediv rfloordiv rmod rdivmod rpow rlshift rrshift "
    "rand rxor ror iadd isub imul imatmul itruediv ifloordiv imod ipow ilshift "
    "irshift iand ixor ior neg pos abs invert int float complex index round bool "
    "len length_hint getitem setitem delitem iter next reversed contains call lt "
    "le eq ne gt ge enter exit setattr delattr"
).split():
    setattr(Elsewhere, f"__{_name}__", _refuse)


def _copied(x):
    return x.copy() if isinstance(x, (list, dict, set)) else x


class Guard:
    """Puts an ``Elsewhere`` for each attribute in ``changed``, {path: names}, of
    modules that run on the pp_rank ``owners[path]``."""

    def __init__(self, module, changed, owners):
        self._before = {}
        for path, names in changed.items():
            x = module.get_submodule(path)
            where = f"'{path}'" if path else "the model itself"
            rank = owners.get(path, "another one")
            self._before[path] = {
                name: x.__dict__[name] for name in names if name in x.__dict__
            }
            for name in names:
                x.__dict__[name] = Elsewhere(
                    f"attribute '{name}' of {where} changes as it runs, on "
                    f"pp_rank {rank}, so that its value is not here: let "
                    "forward return it"
                )
            if path:
                _core.set_elsewhere(x, sorted(names))

    def undo(self, module):
        """Gives ``module``, or a copy of it, what it had before."""
        for path, before in self._before.items():
            attributes = module.get_submodule(path).__dict__
            for name, x in list(attributes.items()):
                if isinstance(x, Elsewhere):
                    del attributes[name]
                    if name in before:
                        attributes[name] = _copied(before[name])


def guard(model):
    """At the partition: what a module changes as it runs is on the rank where it
    runs. Collective."""
    paths = {id(x): path for path, x in model.module.named_modules()}
    found = {}
    for x, name in _core.take_traced_changes():
        if id(x) in paths:
            found.setdefault(paths[id(x)], set()).add(name)
    changed = {}  # the rank that measured the model knows
    for one in allgather(found):
        for path, names in one.items():
            changed.setdefault(path, set()).update(names)
    if not changed:
        return
    mine = changed.keys() & set(model.local_module_names())
    owners = {}
    for pp_rank, here in enumerate(allgather(mine, CommGroup.PP_GROUP)):
        owners.update(dict.fromkeys(here, pp_rank))
    others = {p: names for p, names in changed.items() if p not in mine}
    object.__setattr__(model, "_guard", Guard(model.module, others, owners))

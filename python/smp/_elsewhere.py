"""What modules change as they run: attributes, on ranks where they do not run,
and their modules."""

import copy

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

    def undo(self, module, memo=None):
        """Gives ``module`` what it had before; or a copy of it, made by deepcopy
        with that memo, copies."""
        for path, before in self._before.items():
            attributes = module.get_submodule(path).__dict__
            for name, x in list(attributes.items()):
                if isinstance(x, Elsewhere):
                    del attributes[name]
                    if name in before:
                        x = before[name]
                        attributes[name] = (
                            x if memo is None else copy.deepcopy(x, memo)
                        )


def _place_in(attributes, x):
    """The name of an object there, such as ``memory.recent`` of one that another
    object has; or None."""
    seen, left = set(), [("", attributes)]
    for before, inside in left:  # which grows
        for name, y in inside.items():
            if y is x:
                return before + name
            if _core.keeps_attributes(y) and id(y) not in seen:
                seen.add(id(y))
                left.append((f"{before}{name}.", _core.fields_of(y)))
    return None


def _holders(module, x):
    """The modules that have an object, and as which attribute."""
    found = {p: _place_in(vars(m), x) for p, m in module.named_modules()}
    return {path: name for path, name in found.items() if name}


def _keep_shared(model, changed):
    """Of an object that several modules have and change, each rank would have its
    own. On one rank, microbatches run one after the other. Texts and flags that
    code sets, such as transformers' ``config.problem_type``, are set everywhere.
    """

    def held(holders):
        path, name = next(iter(holders.items()))
        found = model.module.get_submodule(path)
        for part in name.split("."):
            found = _core.fields_of(found)[part]
        return found

    mine = [(_holders(model.module, x), y) for x, y in changed]
    found = sum(allgather(mine), [])
    states = [holders for holders, settings in found if settings is None]
    for holders, settings in found:
        if settings is not None and holders not in states:
            for name, x in settings.items():
                object.__setattr__(held(holders), name, x)
    _core.note_changing_objects(
        [held(holders) for holders in states],
        [held(holders) for holders, _ in found],
    )
    if not states:
        return
    model._core.run_serially()
    local = allgather(set(model.local_module_names()), CommGroup.PP_GROUP)
    for holders in states:
        ranks = [
            pp_rank
            for pp_rank, names in enumerate(local)
            if not names.isdisjoint(holders)
        ]
        if len(ranks) < 2:
            continue
        (path, name), (other, _) = list(holders.items())[:2]
        raise Error(
            f"the object '{name}' of '{path or 'the model'}', which '{other}' has, "
            f"too, changes as they run, and they are on pp_ranks {ranks}, where each "
            "has its own: return what is kept there, or put these modules on one "
            "rank with smp.set_partition"
        )


def guard(model):
    """At the partition: what a module changes as it runs is on the rank where it
    runs. Collective."""
    paths = {id(x): path for path, x in model.module.named_modules()}
    found = {}
    attributes, shared = _core.take_traced_changes()
    for x, name in attributes:
        if id(x) in paths:
            found.setdefault(paths[id(x)], set()).add(name)
    _keep_shared(model, shared)
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


def children_of(module):
    """The children of each module by its path."""
    return {path: dict(x._modules) for path, x in module.named_modules()}


def refuse_replaced(module, before):
    """After a traced call: ``before`` is what ``children_of`` returned before."""
    replaced = None
    for path, x in list(module.named_modules()):
        kept = before.get(path, dict(x._modules))
        for name in kept.keys() | x._modules.keys():
            if kept.get(name) is not x._modules.get(name):
                replaced = replaced or f"{path}.{name}".strip(".")
        x._modules.clear()
        x._modules.update(kept)
    if replaced:
        raise Error(
            f"forward puts another module at '{replaced}', which smp cannot "
            "follow: let it choose between modules that it has, or do that before "
            "smp.DistributedModel"
        )

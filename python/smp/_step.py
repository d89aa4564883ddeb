"""Steps over microbatches."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import _core, _refusals, _state
from ._errors import Error
from ._inputs import on_device, split, tensors_in


class StepOutput:
    """What a step's function returned for each microbatch, of one tensor or
    value in its result."""

    def __init__(self, outputs: Iterable[Any]) -> None:
        self.outputs = list(outputs)

    def _tensors(self):
        if not all(isinstance(x, torch.Tensor) for x in self.outputs):
            return [torch.as_tensor(x) for x in self.outputs]
        return self.outputs

    def reduce_mean(self) -> torch.Tensor:
        """Their mean."""
        return self.reduce_sum() / len(self.outputs)

    def reduce_sum(self) -> torch.Tensor:
        """Their sum."""
        result = self._tensors()[0].clone()
        for x in self._tensors()[1:]:
            result += x
        return result

    def concat(self, axis: int = 0) -> torch.Tensor:
        """One after the other along an axis; single numbers as a vector."""
        xs = self._tensors()
        return torch.stack(xs) if xs[0].dim() == 0 else torch.cat(xs, axis)

    def stack(self) -> torch.Tensor:
        """Along a new axis 0."""
        return torch.stack(self._tensors())

    def __getitem__(self, i):
        return self.outputs[i]

    def __len__(self):
        return len(self.outputs)

    def __repr__(self):
        return f"StepOutput({self.outputs!r})"


def _merge(results):
    flat = [pytree.tree_flatten(x) for x in results]
    form = flat[0][1]
    if any(other != form for _, other in flat):
        return StepOutput(results)
    leaves = [StepOutput(xs) for xs in zip(*(x for x, _ in flat))]
    return pytree.tree_unflatten(leaves, form)


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Iterable[str] = (),
    input_split_axes: dict[str, int] | None = None,
    detach_outputs: bool = True,
    microbatches: int | None = None,
    no_rerun: bool = False,
) -> Callable[..., Any]:
    """Makes a function one step of training or evaluation: it is called once
    for each microbatch, on the first rank of the pipeline, with a slice of each
    tensor in its arguments along axis 0, also in lists, dicts and other mappings,
    sets and dataclasses. All ranks call the step. Modules and
    the arguments named in ``non_split_inputs`` are passed whole;
    ``input_split_axes`` names other axes. What it returns are ``StepOutput``
    objects, in the form of the function's result, on all ranks.
    """
    if function is None:
        return functools.partial(
            step,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            detach_outputs=detach_outputs,
            microbatches=microbatches,
            no_rerun=no_rerun,
        )
    axes = dict(input_split_axes or {})
    whole = set(non_split_inputs)
    signature = inspect.signature(function)
    _check_names(signature, whole, axes)
    code = hash(getattr(function, "__code__", function)) & (2**63 - 1)

    def bodies(args, kwargs):
        """What runs one microbatch, and how many there are."""
        given = signature.bind(*args, **kwargs)
        n = microbatches or _core.microbatches()

        def part(name, x, index):
            if name in whole or isinstance(x, torch.nn.Module):
                return x if isinstance(x, torch.nn.Module) else on_device(x)
            place = f"argument '{name}' of the step"
            return on_device(split(x, n, index, axes.get(name, 0), place))

        def body(index):
            parts = inspect.BoundArguments(signature, {})
            for name, x in given.arguments.items():
                kind = signature.parameters[name].kind
                if kind is inspect.Parameter.VAR_POSITIONAL:
                    x = tuple(part(name, y, index) for y in x)
                elif kind is inspect.Parameter.VAR_KEYWORD:
                    x = {key: part(key, y, index) for key, y in x.items()}
                else:
                    x = part(name, x, index)
                parts.arguments[name] = x
            return _no_modules(parts.args), lambda: function(
                *parts.args, **parts.kwargs
            )

        return body, n

    @functools.wraps(function)
    def run(*args, **kwargs):
        if torch.get_default_device().type == "meta":
            raise Error(
                "a step with 'meta' as torch's default device, which smp does "
                "not pass on to the threads and ranks that run it: call it "
                "outside of torch.device('meta')"
            )
        model = _state.current_model()
        if model is not None and not model.partitioned:
            _refusals.refuse_wrappers_around(model)
        body, n = bodies(args, kwargs)
        inputs = tensors_in([*_no_modules(args), kwargs])
        try:
            results = _core.run_step(
                body, n, code, inputs, detach_outputs, no_rerun
            )
        except Error as e:
            cause = _core.take_exception(e.text)
            if cause is None:
                raise
            raise e from cause
        return _merge(results)

    run.bodies = bodies
    return run


def _no_modules(xs):
    return [x for x in xs if not isinstance(x, torch.nn.Module)]


def _check_names(signature, whole, axes):
    takes_any = any(
        p.kind is inspect.Parameter.VAR_KEYWORD
        for p in signature.parameters.values()
    )
    for option, names in (
        ("non_split_inputs", whole),
        ("input_split_axes", axes),
    ):
        for name in names:
            if name not in signature.parameters and not takes_any:
                raise Error(
                    f"smp.step: {option} names '{name}', but the function has "
                    f"{', '.join(signature.parameters) or 'no arguments'}"
                )
    for name in whole & set(axes):
        raise Error(f"smp.step: '{name}' is not split, so it has no axis")

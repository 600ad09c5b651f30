"""Functions as they are called: modules as functions, draws that are the same in each call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.engine.transformed import Transformed
from torchard.testing.derived import Derivatives, generators_kept
from torchard.testing.report import Differs, is_assertion
from torchard.testing.surroundings import modules_behind

__all__ = [
    "as_function",
    "as_tensors",
    "buffers_kept",
    "drawing_alike",
    "law",
    "law_of_chained",
    "leaving_buffers",
    "left_out",
    "saying_that_it_draws",
    "seeded",
    "updates_of_buffers",
    "watched",
    "with_parameters",
]

Fn = Callable[..., Any]
Params = ParamSpec("Params")
Result = TypeVar("Result")


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which torch's global generators begin at a seed; their states are restored afterwards.

    All threads share the generators: draws of another thread come from this seed too, and change the
    numbers that this context draws.
    """
    with generators_kept():
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        yield


def as_function(fn: Fn) -> Fn:
    """A module as a function of its arguments; each call begins with the buffers' present values.

    Functions that are not modules are returned unchanged.
    """
    if not isinstance(fn, torch.nn.Module):
        return fn
    module = fn

    def call(*args: Any) -> Any:
        return _called(module, {}, args)

    call.__name__ = type(module).__name__
    return call


@contextlib.contextmanager
def buffers_kept(*fns: Any) -> Iterator[None]:
    """A context that restores the buffers of modules among these functions, and of modules they call."""
    kept = {
        id(buffer): (owner, name, buffer, buffer.detach().clone())
        for module in modules_behind(*fns)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if type(buffer) is torch.Tensor and not buffer.is_meta
    }
    try:
        yield
    finally:
        for owner, name, buffer, value in kept.values():
            setattr(owner, name, buffer)
            if not torch.equal(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)


def leaving_buffers(check: Callable[Params, Result]) -> Callable[Params, Result]:
    """A law that restores the buffers of the modules that its functions call."""

    @functools.wraps(check)
    def of_functions(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        __tracebackhide__ = is_assertion
        with buffers_kept(*filter(callable, (*args, *kwargs.values()))):
            return check(*args, **kwargs)

    return of_functions


def law(check: Callable[Params, Result]) -> Callable[Params, Result]:
    """A law that checks its arguments and accepts modules as functions.

    The function under test draws the same random numbers in each call by the law, and NumPy arrays that
    it returns are converted to tensors.
    """
    return _law(check, lambda fn: _with_tensors(drawing_alike(fn)))


def law_of_chained(check: Callable[Params, Result]) -> Callable[Params, Result]:
    """A `law` that passes results on to functions, so NumPy arrays are not converted."""
    return _law(check, drawing_alike)


def _law(check: Callable[Params, Result], tested: Callable[[Fn], Fn]) -> Callable[Params, Result]:
    run = checked(check)

    @leaving_buffers
    @functools.wraps(check)
    def of_functions(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        __tracebackhide__ = is_assertion
        given: Any = [as_function(x) if isinstance(x, torch.nn.Module) else x for x in args]
        if given and callable(given[0]) and not isinstance(given[0], Transformed):
            given[0] = tested(given[0])
        return run(*given, **kwargs)

    return of_functions


def _with_tensors(fn: Fn) -> Fn:
    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        return as_tensors(fn(*args))

    return call


def as_tensors(result: Any) -> Any:
    """A result in which NumPy arrays and numbers are tensors, if torch has their dtype."""
    return tree.map(_as_tensor, result)


def _as_tensor(x: Any) -> Any:
    if not isinstance(x, (np.ndarray, np.number, np.bool_)) or x.dtype.kind not in "biufc":
        return x
    try:
        return torch.tensor(x.copy())
    except TypeError:  # a long double
        return x


def drawing_alike(fn: Fn) -> Fn:
    """A function whose draws from torch's global generators are the same in each call."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with seeded(0):
            return fn(*args, **kwargs)

    vars(call)["drawing"] = fn  # for `saying_that_it_draws`
    return call


_SEED = 0x5EED_0F_7E57  # a seed that no tested function sets


def watched(fn: Fn, args: Sequence[Any]) -> tuple[Any, bool]:
    """A result, and whether the call draws from torch's global generators, or seeds them."""
    with seeded(_SEED):
        before = _states()
        result = fn(*args)
        return result, _states() != before


def _states() -> list[bytes]:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [state.numpy().tobytes() for state in (torch.get_rng_state(), *on_gpus)]


@contextlib.contextmanager
def saying_that_it_draws(fn: Fn, args: Sequence[Any]) -> Iterator[None]:
    """A context that adds a note to a `Differs` error if the function draws random numbers.

    The random numbers that an example gets depend on its position and on the number of examples.

    Args:
        fn: the function under test, as wrapped by `law`.
        args: its arguments.
    """
    __tracebackhide__ = is_assertion
    try:
        yield
    except Differs as error:
        if watched(getattr(fn, "drawing", fn), args)[1]:
            error.heading = (
                "fn draws from torch's global generator, and the numbers that an example gets depend "
                "on its position and on the number of examples: switch dropout off by module.eval(), "
                f"or pass the random numbers as an argument.\n{error.heading}"
            )
        raise


def with_parameters(fn: Fn, reference: Fn, args: Sequence[Any]) -> tuple[Fn, Fn, tuple[Any, ...]]:
    """Two functions, and arguments for both.

    Two modules with the same parameters become functions of these parameters too: the last argument is a
    dict of parameters by name, so that derivatives with respect to them are compared.
    """
    if not (isinstance(fn, torch.nn.Module) and isinstance(reference, torch.nn.Module)):
        return as_function(fn), as_function(reference), tuple(args)
    parameters = {name: p.detach() for name, p in reference.named_parameters()}
    if not parameters or not _have_same(parameters, dict(fn.named_parameters())):
        return as_function(fn), as_function(reference), tuple(args)

    def taking(module: torch.nn.Module) -> Fn:
        return lambda *args: _called(module, args[-1], args[:-1])

    return taking(fn), taking(reference), (*args, parameters)


def updates_of_buffers(fn: Fn, reference: Fn) -> tuple[Fn, Fn] | None:
    """Two modules as functions that return the buffers after a call; None if buffer names differ."""
    if not (isinstance(fn, torch.nn.Module) and isinstance(reference, torch.nn.Module)):
        return None
    names = [{name for name, _ in module.named_buffers()} for module in (fn, reference)]
    if not names[0] or names[0] != names[1]:
        return None

    def updates(module: torch.nn.Module) -> Fn:
        def after(*args: Any) -> Derivatives:
            changed = _copied_buffers(module)
            _run(module, {}, changed, args)
            return Derivatives((f"buffer {name}", x) for name, x in changed.items())

        return after

    return updates(fn), updates(reference)


def left_out(fn: Fn, reference: Fn) -> dict[str, str]:
    """The values of two modules that are not compared, each with the reason."""
    if not (isinstance(fn, torch.nn.Module) and isinstance(reference, torch.nn.Module)):
        return {}
    kinds = torch.nn.Module.named_parameters, torch.nn.Module.named_buffers
    (ours, theirs), (mine, others) = ([dict(kind(m)) for m in (fn, reference)] for kind in kinds)
    found: dict[str, str] = {}
    if (ours or theirs) and not (ours.keys() == theirs.keys() and _have_same(ours, theirs)):
        what = "values" if ours.keys() == theirs.keys() else "names"
        found["gradients of parameters"] = (
            f"the {what} of the modules' parameters differ; load one's state_dict into the other"
        )
    if mine.keys() != others.keys():
        found["buffers"] = "the names of the modules' buffers differ"
    return found


def _have_same(these: Mapping[str, torch.Tensor], those: Mapping[str, torch.Tensor]) -> bool:
    return these.keys() == those.keys() and all(
        x.shape == those[name].shape and x.dtype == those[name].dtype and torch.equal(x, those[name])
        for name, x in these.items()
    )


def _called(module: torch.nn.Module, parameters: dict[str, Any], args: Sequence[Any]) -> Any:
    buffers = _copied_buffers(module)
    dtypes = [p.dtype for p in parameters.values()]
    if dtypes and dtypes[0].is_floating_point:  # parameters of a module in another precision are cast
        buffers = {n: b.to(dtypes[0]) if b.is_floating_point() else b for n, b in buffers.items()}
    return _run(module, parameters, buffers, args)


def _copied_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    # A copy that is created inside a torch.func transform may be written to inside it.
    return {name: b.clone() for name, b in module.named_buffers() if b is not None}


def _run(
    module: torch.nn.Module,
    parameters: dict[str, Any],
    buffers: dict[str, torch.Tensor],
    args: Sequence[Any],
) -> Any:
    own = {name: p.detach() for name, p in module.named_parameters()}  # the module's .grad is unchanged
    return torch.func.functional_call(module, {**own, **buffers, **parameters}, tuple(args))

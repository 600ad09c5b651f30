"""check_training: a loss or a training step trains the leaves that it should, and no others."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.core.tensor_spec import is_inexact
from torchard.testing.calls import drawing_alike
from torchard.testing.report import Trials
from torchard.testing.rounding.roundings import alike

__all__ = ["check_training"]

_Tensors = Mapping[str, torch.Tensor]

# Step sizes along the gradient, relative to the size of the parameters; one of them must lower the loss.
_STEPS = tuple(2.0**-n for n in range(1, 24, 2))


@checked
def check_training(
    step: Callable[..., Any],
    params: Any,
    *batch: Any,
    frozen: Sequence[str] = (),
    buffers: Sequence[str] | None = None,
    optional: Sequence[str] = (),
    descends: bool = True,
) -> Trials:
    """Assert that a loss or a training step trains the right leaves and does not change the others.

    For a loss, every trainable leaf must have a gradient that is finite and not all zero, a frozen leaf
    must have none, and a small step against the gradient must lower the loss. For a training step, every
    trainable leaf must change and stay finite, buffers must change, and all other leaves must not change
    (a module's own buffers may, if none are given); a second step on the same batch must give a lower
    loss. If the step returns new parameters, the loss of the old parameters must not have changed. A
    module's step must not add to the gradients of the previous step. Each call draws the same numbers.

    Args:
        step: a loss function, from ``(params, *batch)`` to a scalar; a step, from ``(params, *batch)`` to
            new parameters and the loss; or a module's step, from ``(module, *batch)`` to the loss, which
            trains the module in place. Further state, such as an optimizer's, is part of ``params``.
        params: a pytree, or a ``torch.nn.Module``, which this check trains by two steps.
        batch: the further arguments of ``step``.
        frozen: ``fnmatch`` patterns of leaves that must not be trained, for paths such as
            ``params['embed']['w']`` or names such as ``embed.weight``; ``*`` matches any characters.
            Parameters of a module that require no gradient are frozen, and so are leaves that are not
            floating.
        buffers: patterns of leaves that are not trained, and that a step must change: running statistics,
            a count. By default a module's buffers may change or not; if patterns are given, no other
            buffer may change.
        optional: patterns of leaves that may be trained or not, such as a bias before BatchNorm, whose
            gradient is zero up to rounding.
        descends: whether the loss must go down.

    Returns:
        A report to print: the number and names of trained leaves, and the number of other leaves.

    Raises:
        AssertionError: the step or loss is wrong; the message names every wrong leaf and the reason.
        TypeError: ``step`` returns neither a loss nor a step's results, or trains nothing in a module.
        ValueError: a pattern names no leaf, or there is nothing to train.

    >>> import torch
    >>> from torchard.testing import check_training
    >>> params = {"w": torch.ones(2), "b": torch.zeros(())}
    >>> loss = lambda params, x: (x @ params["w"] + params["b"]).square().mean()
    >>> print(check_training(loss, params, torch.eye(2)))
    2 leaves trained by a loss: params['b'], params['w']
    >>> check_training(lambda params, x: (x @ params["w"]).square().mean(), params, torch.eye(2))
    Traceback (most recent call last):
        ...
    AssertionError: the loss does not train what it should:
      params['b'] has no gradient: the loss does not depend on it
    """
    step, state = drawing_alike(step), _state(params)
    listed = {"frozen": frozen, "buffers": buffers or (), "optional": optional}
    trained = _trained(params, state, listed)
    before = {path: x.detach().clone() for path, x in state.items()}
    own = dict(params.named_parameters()) if isinstance(params, torch.nn.Module) else {}
    gradients = {path: x.grad for path, x in own.items()}
    with _accumulated(own) as written:
        result = step(params, *batch)
    if _is_scalar(result) and not isinstance(params, torch.nn.Module):
        what, problems = "loss", _written(before, _state(params))
        problems = problems or _of_loss(step, params, batch, trained, optional, descends)
    else:
        loss, new = _after_step(result, params)
        after = _state(new)
        changed = {p for p in before.keys() & after.keys() if _differ(before[p], after[p])}
        if own and loss.requires_grad and not written and not changed & own.keys():
            _check_is_step(own, gradients)
        free = _free(params, before.keys() | after.keys(), frozen, buffers, optional)
        problems = _of_step(before, after, trained, buffers or (), free)
        what = "step"
        if written and not changed & trained:
            problems.insert(0, _NO_STEP)
        problems += _finite_loss(loss)
        watched = {path: x for path, x in own.items() if path in changed}
        problems = problems or _of_second_step(step, params, new, batch, loss, watched, descends)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise AssertionError(f"the {what} does not train what it should:\n{lines}")
    rest = len(state) - len(trained)
    return Trials(
        len(trained),
        f"{'leaf' if len(trained) == 1 else 'leaves'} trained by a {what}: {_some(sorted(trained))}"
        + (f"; {rest} not trained" if rest else ""),
    )


_NO_STEP = (
    "backward() gives gradients, and no parameter changes: gradients are cleared (zero_grad) before "
    "optimizer.step(), or there is no optimizer.step(), or the optimizer has other parameters"
)


def _check_is_step(parameters: _Tensors, gradients: Mapping[str, torch.Tensor | None]) -> None:
    """Check that a module's function that changes no parameter at least computes gradients.

    Raises:
        TypeError: the function is a loss.
    """
    if all(parameters[path].grad is g for path, g in gradients.items()):
        raise TypeError(
            "check_training: this is a loss of a module, which trains nothing: it calls no backward(), "
            "and changes no parameter. Pass a step, with backward() and optimizer.step(), or a loss of "
            "parameters, check_training(lambda params, *batch: ..., dict(module.named_parameters()), "
            "*batch), which calls the module by torch.func.functional_call."
        )


def _of_second_step(
    step: Callable[..., Any],
    params: Any,
    new: Any,
    batch: Any,
    loss: torch.Tensor,
    watched: _Tensors,
    descends: bool,
) -> list[str]:
    """Faults of the loss after a step, or of gradients that the step leaves for the next step.

    Gradients of parameters that a step does not change may add up, because no optimizer clears them.
    """
    is_module = isinstance(params, torch.nn.Module)
    if not is_module and not descends:
        return []
    with _accumulated(watched) as stale:
        result = step(new, *batch)
    if any(stale.values()):
        return [
            f"{path} has the previous step's gradient added to the new one: call optimizer.zero_grad()"
            for path in sorted(stale)
            if stale[path]
        ]
    again = _after_step(result, new)[0]
    problems = _descent(loss, again, "after a step") if descends else []
    if problems or is_module:
        return problems
    back = _after_step(step(params, *batch), params)[0]
    first, second, third = (float(value.detach()) for value in (loss, again, back))
    if abs(third - first) <= (first - second) / 2:
        return []
    return [
        f"the loss goes from {first:.6g} to {second:.6g} after a step, and with the old parameters it "
        f"is {third:.6g} then: it depends on something that is not in params"
    ]


@contextlib.contextmanager
def _accumulated(leaves: _Tensors) -> Iterator[dict[str, bool]]:
    """The leaves that get gradients in the context; True if the first adds to an earlier gradient."""
    held: dict[str, bool] = {}
    stale: dict[str, bool] = {}

    def before(_: torch.Tensor, path: str) -> None:
        kept = leaves[path].grad
        held.setdefault(path, kept is not None and bool(kept.any()))

    def after(_: torch.Tensor, path: str) -> None:
        stale.setdefault(path, held[path])

    handles = []
    for path, leaf in leaves.items():
        if leaf.requires_grad:
            handles.append(leaf.register_hook(functools.partial(before, path=path)))
            hook = functools.partial(after, path=path)
            handles.append(leaf.register_post_accumulate_grad_hook(hook))
    try:
        yield stale
    finally:
        for handle in handles:
            handle.remove()


def _written(before: _Tensors, after: _Tensors) -> list[str]:
    """The changes that a loss made; a loss must not make any."""
    return [
        f"{path} was changed by the loss"
        for path, x in before.items()
        if _differ(x, after[path])
    ]


def _differ(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape != y.shape or x.dtype != y.dtype or not bool(alike(x, y.detach()).all())


def _of_loss(
    loss: Callable[..., Any],
    params: Any,
    batch: Any,
    trained: set[str],
    optional: Sequence[str],
    descends: bool,
) -> list[str]:
    floats, rest = tree.partition(params)
    leaves = [x.detach().requires_grad_() for x in tree.leaves(floats)]
    structure, paths = tree.structure(floats), tree.paths(floats, "params")

    def at(values: Any) -> torch.Tensor:
        found: torch.Tensor = loss(tree.combine(tree.unflatten(structure, values), rest), *batch)
        return found

    with torch.enable_grad():
        value = at(leaves)
    if problems := _finite_loss(value):
        return problems
    found: list[torch.Tensor | None] = [None] * len(leaves)
    if value.requires_grad:
        found = list(torch.autograd.grad(value, leaves, allow_unused=True))
    gradients = dict(zip(paths, found, strict=True))
    problems = [
        f"{path} has {fault}"
        for path, gradient in gradients.items()
        if (fault := _fault(gradient, path in trained, _matches(path, optional)))
    ]
    if problems or not descends:
        return problems
    moves = [
        torch.zeros_like(x) if g is None or path not in trained else g
        for path, x, g in zip(paths, leaves, found, strict=True)
    ]
    return _line_search(at, [x.detach() for x in leaves], moves, value)


def _fault(gradient: torch.Tensor | None, is_trained: bool, is_optional: bool) -> str:
    """The fault of a gradient; empty if it has none."""
    if gradient is not None and not bool(gradient.isfinite().all()):
        return "a gradient that is not finite"
    none = gradient is None or not bool(gradient.any())
    if none == is_trained and not is_optional:
        return (
            "no gradient: the loss does not depend on it"
            if is_trained and gradient is None
            else f"a gradient{f' of zeros{_HINT}' if none else ', and should be frozen'}"
        )
    return ""


def _line_search(
    loss: Callable[[Any], torch.Tensor],
    at: list[torch.Tensor],
    gradients: list[torch.Tensor],
    value: torch.Tensor,
) -> list[str]:
    """Find a step against the gradient that lowers the loss, whatever the scale of loss and gradient."""
    steepness = sum(float(g.abs().square().sum()) for g in gradients) ** 0.5
    size = 1 + sum(float(x.abs().square().sum()) for x in at) ** 0.5
    with torch.no_grad():
        for step in _STEPS:
            moved = [x - g * (step * size / steepness) for x, g in zip(at, gradients, strict=True)]
            if bool(loss(moved) < value):
                return []
    return ["no small step against its gradient makes the loss go down"]


_HINT = " (if this is correct, as for a bias before BatchNorm, name it in optional=)"


def _of_step(
    before: _Tensors,
    after: _Tensors,
    trained: set[str],
    buffers: Sequence[str],
    free: set[str],
) -> list[str]:
    problems = [
        f"{path} is {'lost' if path in before else 'new'}"
        for path in (before.keys() ^ after.keys()) - free
    ]
    for path in before.keys() & after.keys():
        old, new = before[path], after[path]
        if old.shape != new.shape or old.dtype != new.dtype:
            if path in free:
                continue
            problems.append(
                f"{path} was {old.dtype} of shape {list(old.shape)}, and is {new.dtype} of "
                f"{list(new.shape)}"
            )
            continue
        should = path in trained or _matches(path, buffers)
        does = _differ(old, new)
        if does and is_inexact(new) and not bool(new.isfinite().all()):
            problems.append(f"{path} is not finite after the step")
        elif should != does and path not in free:
            problems.append(
                f"{path} {'changes, and should not' if does else f'does not change{_HINT}'}"
            )
    return sorted(problems)


def _after_step(result: Any, params: Any) -> tuple[torch.Tensor, Any]:
    """The loss of a step, and the parameters after it."""
    if isinstance(params, torch.nn.Module):
        if _is_scalar(result):
            return result, params
    elif isinstance(result, tuple) and len(result) == 2 and _is_scalar(result[1]):
        return result[1], result[0]
    raise TypeError(
        "check_training: step must return a scalar loss or, if params is not a module, (new_params, "
        f"loss) with a scalar loss. It returned {_described(result)}."
    )


def _finite_loss(loss: torch.Tensor) -> list[str]:
    return [] if bool(loss.isfinite()) else [f"the loss is {float(loss.detach())}"]


def _descent(first: torch.Tensor, second: torch.Tensor, when: str) -> list[str]:
    if bool(second.detach() < first.detach()):
        return []
    return [f"the loss goes from {float(first.detach()):.6g} to {float(second.detach()):.6g} {when}"]


def _is_scalar(value: Any) -> bool:
    return is_inexact(value) and not value.is_complex() and value.numel() == 1


# -- leaves -------------------------------------------------------------------------------------------


def _state(params: Any) -> _Tensors:
    """All tensors by path; a module's tensors by name."""
    if isinstance(params, torch.nn.Module):
        return {**dict(params.named_parameters()), **dict(params.named_buffers())}
    pairs = zip(tree.paths(params, "params"), tree.leaves(params), strict=True)
    return {path: x for path, x in pairs if isinstance(x, torch.Tensor)}


def _trained(params: Any, state: _Tensors, listed: Mapping[str, Sequence[str]]) -> set[str]:
    """The leaves that must be trained.

    Raises:
        ValueError: a pattern names no leaf, or no leaf remains.
    """
    for name, patterns in listed.items():
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            if not any(_matches(path, [pattern]) for path in state):
                raise ValueError(
                    f"check_training: {name} has {pattern!r}, which names no leaf; there are "
                    f"{_some(list(state))}."
                )
    trainable = {path for path, x in state.items() if is_inexact(x)}
    if isinstance(params, torch.nn.Module):
        trainable = {name for name, p in params.named_parameters() if p.requires_grad}
    trained = {path for path in trainable if not any(_matches(path, p) for p in listed.values())}
    if not trained:
        raise ValueError(
            "check_training: nothing to train: every parameter is frozen or has a non-floating dtype."
        )
    return trained


def _free(
    params: Any,
    paths: set[str],
    frozen: Sequence[str],
    buffers: Sequence[str] | None,
    optional: Sequence[str],
) -> set[str]:
    """The leaves that a step may change or not: optional leaves, and buffers without patterns."""
    free = {path for path in paths if _matches(path, optional)}
    if buffers is None and isinstance(params, torch.nn.Module):
        own = paths - dict(params.named_parameters()).keys()
        free |= {path for path in own if not _matches(path, frozen)}
    return free


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a path; brackets in patterns are literal."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(path, pattern.replace("[", "[[]")) for pattern in listed)


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} of shape {list(value.shape)}"
    return f"a {type(value).__name__}"

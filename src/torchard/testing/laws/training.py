"""check_training: a loss or a training step reaches what it should train, and nothing else."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.testing.rounding.roundings import alike, is_float

__all__ = ["check_training"]

_Tensors = dict[str, torch.Tensor]

# Steps along the gradient, relative to the size of the parameters: of one of them the loss goes down.
_STEPS = tuple(2.0**-n for n in range(1, 24, 2))


@checked
def check_training(
    step: Callable[..., Any],
    params: Any,
    *batch: Any,
    frozen: Sequence[str] = (),
    buffers: Sequence[str] = (),
    descends: bool = True,
) -> None:
    """Assert that a loss or a training step trains what it should, and leaves the rest as it is.

    Of a loss, every trainable leaf must have a gradient that is finite and not all zero, a frozen one
    none, and a small step against the gradient must lower the loss. Of a training step, every trainable
    leaf must change and stay finite, buffers must change, all else must not, and on the same batch again
    the loss must be lower.

    Args:
        step: a loss, ``(params, *batch)`` to a scalar; a step, ``(params, *batch)`` to new parameters and
            the loss; or of a module, ``(module, *batch)`` to the loss, which trains it in place. A step
            that keeps further state, such as an optimizer's, has it among ``params``.
        params: a pytree, or a ``torch.nn.Module``, which is trained by two steps here.
        batch: what ``step`` takes besides.
        frozen: patterns of leaves that must not be trained, as ``fnmatch`` reads them, for paths such as
            ``params['embed']['w']`` or names such as ``embed.weight``; ``*`` stands for any characters.
            Parameters of a module that require no gradient are frozen, and so are leaves that are not
            floating, and buffers.
        buffers: patterns of such leaves that a step must change: running statistics, a count.
        descends: whether the loss must go down.

    Raises:
        AssertionError: something is wrong; names every leaf and what is wrong with it.
        TypeError: ``step`` returns none of these.
        ValueError: a pattern names no leaf, or there is nothing to train.

    >>> import torch
    >>> from torchard.testing import check_training
    >>> params = {"w": torch.ones(2), "b": torch.zeros(())}
    >>> loss = lambda params, x: (x @ params["w"] + params["b"]).square().mean()
    >>> check_training(loss, params, torch.eye(2))
    >>> check_training(lambda params, x: (x @ params["w"]).square().mean(), params, torch.eye(2))
    Traceback (most recent call last):
        ...
    AssertionError: the loss does not train what it should:
      params['b'] has no gradient: the loss does not depend on it
    """
    state = _state(params)
    trained = _trained(params, state, frozen, buffers)
    before = {path: x.detach().clone() for path, x in state.items()}
    result = step(params, *batch)
    if _is_scalar(result) and not isinstance(params, torch.nn.Module):
        what, problems = "loss", _written(before, _state(params))
        problems = problems or _of_loss(step, params, batch, trained, descends)
    else:
        loss, params = _after_step(result, params)
        problems = _of_step(before, _state(params), trained, buffers)
        what = "step"
        problems += _finite_loss(loss)
        if descends and not problems:
            again, _ = _after_step(step(params, *batch), params)
            problems += _descent(loss, again, "after a step")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise AssertionError(f"the {what} does not train what it should:\n{lines}")


def _written(before: dict[str, torch.Tensor], after: dict[str, Any]) -> list[str]:
    """What a loss changed, which changes nothing."""
    return [
        f"{path} was changed by the loss"
        for path, x in before.items()
        if not bool(alike(x, after[path].detach()).all())
    ]


def _of_loss(
    loss: Callable[..., Any], params: Any, batch: Any, trained: set[str], descends: bool
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
        if (fault := _fault(gradient, path in trained))
    ]
    if problems or not descends:
        return problems
    moves = [
        torch.zeros_like(x) if g is None or path not in trained else g
        for path, x, g in zip(paths, leaves, found, strict=True)
    ]
    return _line_search(at, [x.detach() for x in leaves], moves, value)


def _fault(gradient: torch.Tensor | None, is_trained: bool) -> str:
    """What is wrong with a gradient, or nothing."""
    if gradient is not None and not bool(gradient.isfinite().all()):
        return "a gradient that is not finite"
    none = gradient is None or not bool(gradient.any())
    if none == is_trained:
        return (
            "no gradient: the loss does not depend on it"
            if is_trained and gradient is None
            else f"a gradient{' of zeros' if none else ', and should be frozen'}"
        )
    return ""


def _line_search(
    loss: Callable[[Any], torch.Tensor],
    at: list[torch.Tensor],
    gradients: list[torch.Tensor],
    value: torch.Tensor,
) -> list[str]:
    """A step against the gradient that lowers the loss is found, however large either is."""
    steepness = sum(float(g.abs().square().sum()) for g in gradients) ** 0.5
    size = 1 + sum(float(x.abs().square().sum()) for x in at) ** 0.5
    with torch.no_grad():
        for step in _STEPS:
            moved = [x - g * (step * size / steepness) for x, g in zip(at, gradients, strict=True)]
            if bool(loss(moved) < value):
                return []
    return ["the loss goes down for no small step against its gradient"]


def _of_step(
    before: _Tensors, after: _Tensors, trained: set[str], buffers: Sequence[str]
) -> list[str]:
    problems = [
        f"{path} is {'lost' if path in before else 'new'}" for path in before.keys() ^ after.keys()
    ]
    for path in before.keys() & after.keys():
        old, new = before[path], after[path]
        if old.shape != new.shape or old.dtype != new.dtype:
            problems.append(
                f"{path} was {old.dtype} of shape {list(old.shape)}, and is {new.dtype} of "
                f"{list(new.shape)}"
            )
            continue
        should = path in trained or _matches(path, buffers)
        does = not bool(alike(old, new.detach()).all())
        if is_float(new) and not bool(new.isfinite().all()):
            problems.append(f"{path} is not finite after the step")
        elif should != does:
            problems.append(f"{path} {'changes, and should not' if does else 'does not change'}")
    return sorted(problems)


def _after_step(result: Any, params: Any) -> tuple[torch.Tensor, Any]:
    """The loss of a step, and the parameters after it."""
    if isinstance(params, torch.nn.Module):
        if _is_scalar(result):
            return result, params
    elif isinstance(result, tuple) and len(result) == 2 and _is_scalar(result[1]):
        return result[1], result[0]
    raise TypeError(
        "check_training: step has to return a scalar loss, or new parameters and a scalar loss as "
        f"(params, loss); of a module, the loss. It returned {_described(result)}."
    )


def _finite_loss(loss: torch.Tensor) -> list[str]:
    return [] if bool(loss.isfinite()) else [f"the loss is {float(loss.detach())}"]


def _descent(first: torch.Tensor, second: torch.Tensor, when: str) -> list[str]:
    if bool(second.detach() < first.detach()):
        return []
    return [f"the loss goes from {float(first.detach()):.6g} to {float(second.detach()):.6g} {when}"]


def _is_scalar(value: Any) -> bool:
    return is_float(value) and not value.is_complex() and value.numel() == 1


# -- leaves -------------------------------------------------------------------------------------------


def _state(params: Any) -> _Tensors:
    """All tensors by path; those of a module by name."""
    if isinstance(params, torch.nn.Module):
        return {**dict(params.named_parameters()), **dict(params.named_buffers())}
    pairs = zip(tree.paths(params, "params"), tree.leaves(params), strict=True)
    return {path: x for path, x in pairs if isinstance(x, torch.Tensor)}


def _trained(
    params: Any, state: _Tensors, frozen: Sequence[str], buffers: Sequence[str]
) -> set[str]:
    """What has to be trained.

    Raises:
        ValueError: a pattern names no leaf, or nothing remains.
    """
    for name, patterns in (("frozen", frozen), ("buffers", buffers)):
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            if not any(_matches(path, [pattern]) for path in state):
                raise ValueError(
                    f"check_training: {name} has {pattern!r}, which names no leaf; there are "
                    f"{', '.join(list(state)[:8])}{', ...' if len(state) > 8 else ''}."
                )
    trainable = {path for path, x in state.items() if is_float(x)}
    if isinstance(params, torch.nn.Module):
        trainable = {name for name, p in params.named_parameters() if p.requires_grad}
    trained = {p for p in trainable if not _matches(p, frozen) and not _matches(p, buffers)}
    if not trained:
        raise ValueError("check_training: there is nothing to train: all is frozen, or not floating.")
    return trained


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """Brackets of a path stand for themselves."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(path, pattern.replace("[", "[[]")) for pattern in listed)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} of shape {list(value.shape)}"
    return f"a {type(value).__name__}"

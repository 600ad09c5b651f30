"""replaced: a copy of an nn.Module in which a function takes the place of some submodules."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchard.functional import torch_internals as internals
from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import KernelError, NoMatch

__all__ = ["replaced"]

M = TypeVar("M", bound=nn.Module)


@checked
def replaced(module: M, path: str | Sequence[str], block: Callable[..., Any]) -> M:
    """A copy of a module in which a function replaces some submodules.

    The copy shares the module's tensors, under the same names, so the state_dict of either loads into
    the other; the module is not changed. Code that reads the weights of a replaced submodule without
    calling it (as ``nn.MultiheadAttention`` does with ``out_proj``) still does so.

    Args:
        module: any ``nn.Module`` that can be deep-copied.
        path: the path of a submodule, ``"layers.0.norm"``, or a pattern, ``"layers.*.norm"``, for every
            submodule that matches and is not inside another match. A list, ``["0", "1", "2"]``, is a run
            of consecutive children of an ``nn.Sequential`` that one call replaces; with patterns, in
            every Sequential that has such a run.
        block: a pure function ``block(params, *inputs)``. ``params`` has the parameters and buffers of
            the replaced submodule, under its own names (``"weight"``), or, for a list, under those of
            the Sequential (``"0.weight"``). Buffers are read-only.

    Returns:
        The copy.

    Raises:
        NoMatch: no submodule has the path.
        KernelError: the submodules of a list are not consecutive, or a submodule has already been
            replaced; when called: the block returns different shapes or dtypes from the submodule.

    Source: Slapo, Chen et al., arXiv:2302.08005, section 3.

    >>> import torch, torchard as ta
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    >>> def norm(params, x):
    ...     return ta.nn.layer_norm(x, params["weight"], params["bias"])
    >>> copy = ta.replaced(model, "0", norm)
    >>> x = torch.arange(8.0).view(2, 4)
    >>> torch.allclose(copy(x), model(x)), list(copy.state_dict()) == list(model.state_dict())
    (True, True)
    """
    what = f"replaced({type(module).__name__}, {path!r})"
    patterns = [path] if isinstance(path, str) else list(path)
    copied = _copied(module, lambda tensor: tensor)
    for run in _runs(what, copied, patterns, alone=isinstance(path, str)):
        _install(what, copied, run, isinstance(path, str), block)
    return copied


def _copied(module: M, of: Callable[[Tensor], Tensor]) -> M:
    """A copy of a module and its submodules, with ``of(tensor)`` in the place of each tensor."""
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [v for part in module.modules() for v in vars(part).values() if type(v) is Tensor]
    return copy.deepcopy(module, {id(tensor): of(tensor) for tensor in tensors})


def _runs(what: str, module: nn.Module, patterns: list[str], alone: bool) -> list[list[str]]:
    """The runs of submodules, by path, each of which one call replaces.

    Args:
        alone: whether every matching submodule is a run of its own.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    matches = _matches(what, modules, patterns, alone)
    runs: dict[str, list[str]] = {}
    for path in _outermost(what, modules, matches):
        runs.setdefault(path if alone else path.rpartition(".")[0], []).append(path)
    if not alone:
        for parent, run in runs.items():
            unmet = [q for q in patterns if all(q not in matches[path] for path in run)]
            _check_run(what, modules[parent], parent, run, unmet)
    return list(runs.values())


def _matches(
    what: str, modules: dict[str, nn.Module], patterns: list[str], alone: bool
) -> dict[str, set[str]]:
    """For each path that matches some pattern, the patterns that it matches."""
    matches: dict[str, set[str]] = {}
    for pattern in patterns:
        paths = {p for p in modules if fnmatchcase(p, pattern) and (p or (alone and not pattern))}
        if not paths:
            shown = ", ".join(map(repr, [*modules][1:13])) + ", …" * (len(modules) > 13)
            raise NoMatch(f"{what}: no submodule has the path {pattern!r}; there are {shown}.")
        for path in paths:
            matches.setdefault(path, set()).add(pattern)
    return matches


def _outermost(
    what: str, modules: dict[str, nn.Module], matches: dict[str, set[str]]
) -> Iterator[str]:
    """The matching paths that are not inside another match, in the module's order."""
    for path in filter(matches.__contains__, modules):
        around = [q for q in modules if path and q != path and (q == "" or path.startswith(f"{q}."))]
        if matches.keys().isdisjoint(around):
            yield path
        if any(isinstance(modules[q], _Replaced) for q in (*around, path)):
            raise KernelError(f"{what}: {path!r} is already replaced; start from the original module.")


def _check_run(what: str, parent: nn.Module, path: str, run: list[str], unmet: list[str]) -> None:
    """Check that a list names consecutive children of one Sequential.

    Args:
        parent, path: the parent of the run, and its path.
        unmet: the patterns that nothing in the run matches.
    """
    names = [f"{path}.{name}" if path else name for name in internals.child_table(parent)]
    between = names[names.index(run[0]) : names.index(run[-1])]
    absent = [*unmet, *(name for name in between if name not in run)]
    ordered = type(parent).forward is nn.Sequential.forward
    if absent or not (ordered or len(run) == 1):
        raise KernelError(
            f"{what}: a list names consecutive children of one nn.Sequential, but "
            + (
                f"{absent[0]!r} is missing from the run that begins at {run[0]!r}"
                if absent
                else f"{path!r}, the parent of {run[0]!r}, is not one"
            )
            + ". Name all from the first to the last, or replace each on its own."
        )


class _Replaced(nn.Module):
    """A mixin to a replaced part's class, which keeps its names, hooks, attributes and type checks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = vars(self).get("_call")
        return args[0] if call is None else call(args, kwargs)


def _install(what: str, root: nn.Module, run: list[str], alone: bool, block: Any) -> None:
    """Make the first part of a run call the block, and the others return their input."""
    names = [path.rpartition(".")[2] for path in run]
    parts = [_unshared(root, path) for path in run]
    on_meta = [_copied(p, lambda t: torch.empty_like(t, device="meta")) for p in parts]
    like = on_meta[0] if alone else nn.Sequential(OrderedDict(zip(names, on_meta, strict=True)))
    for part in parts:
        vars(part).pop("forward", None)
        called = f"{getattr(block, '__name__', type(block).__name__)}[{type(part).__name__}]"
        part.__class__ = type(called, (_Replaced, type(part)), {})
    prefixes = [""] if alone else [f"{name}." for name in names]
    call = _Call(what, block, dict(zip(prefixes, parts, strict=True)), like)
    vars(parts[0])["_call"] = call


def _unshared(root: nn.Module, path: str) -> nn.Module:
    """The submodule at a path; a copy of it there if it has several paths (as one ReLU may)."""
    owner, _, name = path.rpartition(".")
    part = root.get_submodule(path)
    if sum(child is part for m in root.modules() for child in internals.child_table(m).values()) > 1:
        state = {k: dict(v) if isinstance(v, dict) else v for k, v in vars(part).items()}
        part = type(part).__new__(type(part))
        vars(part).update(state)
        internals.child_table(root.get_submodule(owner))[name] = part
    return part


class _Call:
    """The call of a block in the place of some parts.

    Args:
        what: the call of `replaced`, for errors.
        parts: the replaced parts, by the prefix of their parameters' names.
        like: the parts as they were, on the meta device.
    """

    def __init__(self, what: str, block: Any, parts: dict[str, nn.Module], like: nn.Module) -> None:
        self.what, self.block, self.parts, self.like = what, block, parts, like
        self.checked: set[str] = set()

    def __call__(self, args: Any, kwargs: Any) -> Any:
        params: dict[str, Tensor] = {}
        for prefix, part in self.parts.items():
            for named in (part.named_parameters, part.named_buffers):
                params.update({prefix + k: t for k, t in named(remove_duplicate=False)})
        out = self.block(params, *args, **kwargs)
        arguments = params, args, kwargs
        if _described(arguments) not in self.checked:
            self._check(arguments, _described(out))
            self.checked.add(_described(arguments))
        return out

    def _check(self, arguments: Any, have: str) -> None:
        """Compare the result with the replaced modules' on the same inputs on the meta device."""
        with internals.no_modes(), internals.autocast_off(), torch.no_grad():
            try:
                on_meta = tree.map(_on_meta, arguments)
                result = torch.func.functional_call(self.like, *on_meta, tie_weights=False)
            except (RuntimeError, TypeError, ValueError):
                return  # they need data, or do not take these inputs
        if have != _described(result):
            raise KernelError(
                f"{self.what}: {getattr(self.block, '__name__', self.block)} returned {have}, but the "
                f"replaced module returns {_described(result)}. Shapes and dtypes must agree."
            )


def _on_meta(leaf: Any) -> Any:
    """A tensor like a leaf on the meta device; the leaf itself if it is not a tensor."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")


def _described(values: Any) -> str:
    """A tree's shapes and dtypes as text; under autocast, which chooses dtypes, its shapes."""

    def described(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return type(leaf).__name__
        dtype = "" if internals.autocast_on() else str(leaf.dtype).removeprefix("torch.")
        return f"{dtype}{list(leaf.shape)}"

    return str(tree.map(described, values)).replace("'", "")

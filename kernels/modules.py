"""replaced: another function in the place of parts of an nn.Module, with their weights."""

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
    """A copy of a module in which a function computes what some of its submodules did.

    The copy has the module's own tensors under its own names, so the state_dict of either loads into
    the other; the module is left as it is. Code that reads the weights of a replaced submodule without
    calling it (as ``nn.MultiheadAttention`` does with ``out_proj``) still does so.

    Args:
        module: any ``nn.Module`` that can be deep-copied.
        path: of a submodule, ``"layers.0.norm"``, or a pattern, ``"layers.*.norm"``, for each that fits
            and is inside no other that fits. A list, ``["0", "1", "2"]``, is a run of neighbours in an
            ``nn.Sequential`` that one call replaces; with patterns, in each Sequential that has them.
        block: a pure function ``block(params, *inputs)``. ``params`` has the parameters and buffers of
            what is replaced, under the submodule's own names (``"weight"``), or, for a list, those of
            the Sequential (``"0.weight"``). Buffers are only read.

    Returns:
        The copy.

    Raises:
        NoMatch: there is no such submodule.
        KernelError: a list that is not of neighbours, or a submodule replaced before; when called, a
            block that returns other shapes or dtypes than what it replaces.

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
    """A copy of a tree of modules, with something else for each of its tensors."""
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [v for part in module.modules() for v in vars(part).values() if type(v) is Tensor]
    return copy.deepcopy(module, {id(tensor): of(tensor) for tensor in tensors})


def _runs(what: str, module: nn.Module, patterns: list[str], alone: bool) -> list[list[str]]:
    """The paths of the parts that one call replaces, for each call."""
    every = dict(module.named_modules(remove_duplicate=False))
    fitting = _fitting(what, every, patterns, alone)
    runs: dict[str, list[str]] = {}
    for path in _outermost(what, every, fitting):
        runs.setdefault(path if alone else path.rpartition(".")[0], []).append(path)
    if not alone:
        for parent, run in runs.items():
            unmet = [q for q in patterns if all(q not in fitting[path] for path in run)]
            _check_run(what, every[parent], parent, run, unmet)
    return list(runs.values())


def _fitting(
    what: str, every: dict[str, nn.Module], patterns: list[str], alone: bool
) -> dict[str, set[str]]:
    """For each path that fits some pattern, the patterns that it fits."""
    found: dict[str, set[str]] = {}
    for pattern in patterns:
        meant = {p for p in every if fnmatchcase(p, pattern) and (p or (alone and not pattern))}
        if not meant:
            shown = ", ".join(map(repr, [*every][1:13])) + ", …" * (len(every) > 13)
            raise NoMatch(f"{what}: no submodule has the path {pattern!r}; there are {shown}.")
        for path in meant:
            found.setdefault(path, set()).add(pattern)
    return found


def _outermost(
    what: str, every: dict[str, nn.Module], fitting: dict[str, set[str]]
) -> Iterator[str]:
    """Those that are inside no other that fits, in the module's order."""
    for path in filter(fitting.__contains__, every):
        around = [q for q in every if path and q != path and (q == "" or path.startswith(f"{q}."))]
        if fitting.keys().isdisjoint(around):
            yield path
        if any(isinstance(every[q], _Replaced) for q in (*around, path)):
            raise KernelError(f"{what}: {path!r} is replaced already; start from the original.")


def _check_run(what: str, parent: nn.Module, path: str, run: list[str], unmet: list[str]) -> None:
    """Refuse a list that is not of neighbours in one Sequential.

    Args:
        unmet: the patterns that no part of the run fits.
    """
    names = [f"{path}.{name}" if path else name for name in internals.child_table(parent)]
    between = names[names.index(run[0]) : names.index(run[-1])]
    absent = [*unmet, *(name for name in between if name not in run)]
    ordered = type(parent).forward is nn.Sequential.forward
    if absent or not (ordered or len(run) == 1):
        raise KernelError(
            f"{what}: a list is of consecutive parts of one nn.Sequential, and "
            + (f"{absent[0]!r} is not next to" if absent else f"{path!r} is none, around")
            + f" {run[0]!r}. Name all from the first to the last, or replace each alone."
        )


class _Replaced(nn.Module):
    """Mixed into a part's class, so that names, hooks, attributes and tests of its type stay."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = vars(self).get("_call")
        return args[0] if call is None else call(args, kwargs)


def _install(what: str, root: nn.Module, run: list[str], alone: bool, block: Any) -> None:
    names = [path.rpartition(".")[2] for path in run]
    parts = [_apart(root, path) for path in run]
    bare = [_copied(p, lambda t: torch.empty_like(t, device="meta")) for p in parts]
    like = bare[0] if alone else nn.Sequential(OrderedDict(zip(names, bare, strict=True)))
    for part in parts:
        vars(part).pop("forward", None)
        called = f"{getattr(block, '__name__', type(block).__name__)}[{type(part).__name__}]"
        part.__class__ = type(called, (_Replaced, type(part)), {})
    prefixes = [""] if alone else [f"{name}." for name in names]
    call = _Call(what, block, dict(zip(prefixes, parts, strict=True)), like)
    vars(parts[0])["_call"] = call


def _apart(root: nn.Module, path: str) -> nn.Module:
    """A part at one place only (one ReLU may stand at many)."""
    owner, _, name = path.rpartition(".")
    part = root.get_submodule(path)
    if sum(child is part for m in root.modules() for child in internals.child_table(m).values()) > 1:
        state = {k: dict(v) if isinstance(v, dict) else v for k, v in vars(part).items()}
        part = type(part).__new__(type(part))
        vars(part).update(state)
        internals.child_table(root.get_submodule(owner))[name] = part
    return part


class _Call:
    """A block with what it replaces: by prefix of its names, and as it was, without weights."""

    def __init__(self, what: str, block: Any, parts: dict[str, nn.Module], like: nn.Module) -> None:
        self.what, self.block, self.parts, self.like = what, block, parts, like
        self.checked: set[str] = set()

    def __call__(self, args: Any, kwargs: Any) -> Any:
        params: dict[str, Tensor] = {}
        for prefix, part in self.parts.items():
            for named in (part.named_parameters, part.named_buffers):
                params.update({prefix + k: t for k, t in named(remove_duplicate=False)})
        out = self.block(params, *args, **kwargs)
        given = params, args, kwargs
        if _spoken(given) not in self.checked:
            self._check(given, _spoken(out))
            self.checked.add(_spoken(given))
        return out

    def _check(self, given: Any, have: str) -> None:
        """That what comes out is like what the parts return, which are run without data."""
        with internals.no_modes(), internals.autocast_off(), torch.no_grad():
            try:
                bare = tree.map(_bare, given)
                want = torch.func.functional_call(self.like, *bare, tie_weights=False)
            except (RuntimeError, TypeError, ValueError):
                return  # they need data, or do not take these inputs
        if have != _spoken(want):
            raise KernelError(
                f"{self.what}: {getattr(self.block, '__name__', self.block)} returned {have}, and what "
                f"it replaces returns {_spoken(want)}. Both must agree in shapes and dtypes."
            )


def _bare(leaf: Any) -> Any:
    like = isinstance(leaf, Tensor)
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if like else leaf


def _spoken(values: Any) -> str:
    """Shapes and dtypes; autocast has dtypes of its own."""

    def spoken(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return type(leaf).__name__
        dtype = "" if internals.autocast_on() else str(leaf.dtype).removeprefix("torch.")
        return f"{dtype}{list(leaf.shape)}"

    return str(tree.map(spoken, values)).replace("'", "")

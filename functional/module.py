"""functionalize: an nn.Module as a pure function of its parameters."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchard.functional import torch_internals as internals
from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import PurityError
from torchard.functional.core.locks import Lock
from torchard.functional.core.placed import is_placed
from torchard.functional.core.scope_frames import Frame, path_of
from torchard.functional.dropout import Keyed
from torchard.functional.effects.batch_norm_modules import traceable_forward
from torchard.functional.programs.tags import NAME, SCOPE
from torchard.functional.trace import name
from torchard.functional.tracing.pytree_interop import register_torch_nodes
from torchard.functional.tracing.trace_state import TraceState, active, in_frames

__all__ = ["Functional", "functionalize"]


@checked
def functionalize(module: nn.Module) -> tuple[Functional, dict[str, Tensor]]:
    """Turn an ``nn.Module`` into a pure function of its parameters.

    The module is left as it is and is no longer needed: the function works on a copy without weights, in
    the train or eval mode that the module has now. Modules on the meta device work too.

    Args:
        module: any ``nn.Module`` that can be deep-copied.

    Returns:
        ``fn`` and ``params``. ``fn(params, *args)`` is ``module(*args)``; see `Functional`. ``params`` is
        a dict of the module's parameters by dotted path, detached, sharing its memory. Tied parameters
        appear once, under their first name, and their gradient is the sum over the uses.

    >>> import torch, torchard as ta
    >>> fn, params = ta.functionalize(torch.nn.Linear(3, 2))
    >>> {name: p.shape for name, p in params.items()}
    {'weight': torch.Size([2, 3]), 'bias': torch.Size([2])}
    >>> gradient = torch.func.grad(lambda params: fn(params, torch.ones(3)).sum())(params)
    >>> gradient["weight"]
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    return Functional(module), {k: p.detach() for k, p in module.named_parameters()}


class Functional:
    """A pure function ``fn(params, *args, key=None, buffers=None, **kwargs)`` made by `functionalize`.

    Every submodule computes in the scope of its path: traces, plans and messages speak of
    ``transformer.h.0.mlp``. For ``constrain_at``, the first tensor that a module with parameters takes is
    named ``in`` and the first it returns ``out``: ``"transformer.h.*.mlp/out"``.

    Args (of a call):
        params: a dict with the names that `functionalize` returned.
        key: int64 ``[2]``; every dropout in train mode draws from its own key, folded from this one.
        buffers: a dict like ``fn.buffers``. If given, the result is a pair: the module's result, and the
            buffers as one forward of the module would leave them, even where a checkpoint runs it
            twice. Gradients flow through buffer updates as in torch: not through those under no_grad.

    ``key`` and ``buffers`` are always ``fn``'s own: a forward with arguments of these names takes them by
    position.

    Attributes:
        buffers: the module's buffers by dotted path; constants of a call without ``buffers``.
        module: the copy; its parameters and buffers are on the meta device.

    Raises (when called):
        PurityError: dropout in train mode without a key, a buffer update without ``buffers``, a tensor or
            number kept in a plain attribute, or a shared buffer replaced by another tensor.
        KeyError: the names of ``params`` or ``buffers`` are not those of the module.

    >>> import torch, torchard as ta
    >>> fn, params = ta.functionalize(torch.nn.BatchNorm1d(2))
    >>> isinstance(fn, ta.Functional)
    True
    >>> y, buffers = fn(params, torch.tensor([[0.0, 2.0], [2.0, 6.0]]), buffers=fn.buffers)
    >>> buffers["running_mean"]
    tensor([0.1000, 0.4000])
    """

    # In slots, the copy is out of sight of closures.py: it would guard every setting in it.
    __slots__ = ("__dict__", "_lock", "_names", "_ties", "_training", "module")

    def __init__(self, module: nn.Module) -> None:
        self.__name__ = type(module).__name__
        self.buffers = {k: b.detach() for k, b in module.named_buffers()}
        self.constants = _plain_tensors(module)
        self.module = _hollow(module, self.constants)
        self._ties = _ties(module)
        self._names = [k for k, _ in module.named_parameters()]
        self._training = {k for k in self.buffers if module.get_submodule(_owner(k)).training}
        self._lock = Lock()
        for path, part in self.module.named_modules():
            part.forward = _scoped(path, part, traceable_forward(part))

    def __repr__(self) -> str:
        return f"functionalize({self.__name__}, {len(self._names)} parameters)"

    def __call__(
        self,
        params: Mapping[str, Tensor],
        *args: Any,
        key: Tensor | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        params = _tensors("params", params, self._names)
        if buffers is None:
            given = {k: b.clone() if k in self._training else b for k, b in self.buffers.items()}
        else:
            buffers = _tensors("buffers", buffers, self.buffers)
            given = {k: buffers[k].clone() for k in self.buffers}
        versions = {k: internals.version(b) for k, b in given.items()}
        values = {**params, **given}
        values |= {k: values[first] for k, first in self._ties.items()}
        # One copy serves all threads, with one thread's parameters in it at a time.
        with self._lock, Keyed(key), _attributes_kept(self.module):
            out = torch.func.functional_call(self.module, values, args, kwargs, tie_weights=False)
        register_torch_nodes(out)
        # functional_call writes back what the module has put in the place of what it was given.
        after = {k: values[k] for k in given}
        for k, first in self._ties.items():
            if values[k] is not values[first]:
                raise _parted(k, first)
        if buffers is not None:
            return out, after
        for k, value in after.items():
            if value is not given[k] or internals.version(value) != versions[k]:
                raise _updated(k)
        return out


def _hollow(module: nn.Module, constants: list[Tensor]) -> nn.Module:
    """A copy of the module tree with no weights in it, ties and all."""
    memo: dict[int, Any] = {id(t): t for t in constants}
    for tensor in (*module.parameters(), *module.buffers()):
        bare: Tensor = torch.empty_like(tensor, device="meta", requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            bare = nn.Parameter(bare, tensor.requires_grad)
        memo[id(tensor)] = bare
    return copy.deepcopy(module, memo)


def _plain_tensors(module: nn.Module) -> list[Tensor]:
    """Tensors that modules hold as mere attributes, so that a trace finds them again."""
    registered = {id(t) for t in (*module.parameters(), *module.buffers())}
    held = [v for part in module.modules() for v in vars(part).values() if isinstance(v, Tensor)]
    return [t for t in held if id(t) not in registered]


def _ties(module: nn.Module) -> dict[str, str]:
    """Further names of parameters and buffers, and the first one of each."""
    first: dict[int, str] = {}
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    for path, tensor in named:
        first.setdefault(id(tensor), path)
    return {path: first[id(tensor)] for path, tensor in named if first[id(tensor)] != path}


@contextlib.contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """What a forward leaves in plain attributes goes with the call: the next one starts afresh."""
    parts = list(module.modules())
    held = [d for part in parts for d in (vars(part), internals.buffer_table(part))]
    before = [dict(d) for d in held]
    try:
        yield
    finally:
        for now, then in zip(held, before, strict=True):
            now.clear()
            now.update(then)


def _check_state(path: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """A forward that puts a tensor or number in the place of another keeps state in it."""
    kinds = (Tensor, int, float)
    for key, old in before.items():
        new = after.get(key)
        if new is old or not (isinstance(old, kinds) and isinstance(new, kinds)):
            continue
        if isinstance(old, Tensor) or isinstance(new, Tensor) or new != old:
            raise PurityError(
                f"module {path!r} changes its attribute {key!r} in forward: a pure function cannot keep "
                f"it. Make it a buffer, self.register_buffer({key!r}, ...), and pass buffers=."
            )


def _parted(path: str, first: str) -> PurityError:
    return PurityError(
        f"module {_owner(path)!r} or {_owner(first)!r} puts another tensor in the place of a buffer that "
        f"they share ({first!r}, {path!r}), so that they would share it no longer: write to it in place, "
        f"as in self.{path.rpartition('.')[2]}.copy_(new)."
    )


def _owner(path: str) -> str:
    return path.rpartition(".")[0]


def _tensors(what: str, given: Any, wanted: Any) -> Mapping[str, Tensor]:
    """What a module is given by name; a placed value that a trace closes over is its operand there."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{what} is a {type(given).__name__}; a functionalized module is called with the dict that "
            "functionalize returned first: fn(params, ...)."
        )
    _check_names(what, given, wanted)
    placed = [k for k, value in given.items() if is_placed(value)]
    if not placed:
        return given
    state = active()
    if state is None:
        raise TypeError(
            f"{what} has placed values ({placed[0]!r} is one): a module runs under shard, as in "
            "shard(fn, mesh)(params, ...)."
        )
    return {k: state.lift(value) if is_placed(value) else value for k, value in given.items()}


def _check_names(what: str, given: Mapping[str, Any], wanted: Any) -> None:
    missing = sorted(set(wanted) - set(given))
    unknown = sorted(set(given) - set(wanted))
    if missing or unknown:
        problems = [f"lack {', '.join(missing)}"] * bool(missing)
        problems += [f"have {', '.join(unknown)}, which the module has not"] * bool(unknown)
        raise KeyError(
            f"{what} {' and '.join(problems)}; pass a dict with the names that functionalize gave "
            "(of tied parameters, the first)."
        )


def _updated(path: str) -> PurityError:
    return PurityError(
        f"module {_owner(path)!r} updates its buffer {path!r}: a pure function returns new values. "
        "Pass buffers=fn.buffers and go on with the ones that come back, as in "
        "out, buffers = fn(params, ..., buffers=buffers), or functionalize(module.eval())."
    )


# -- scopes and boundaries --------------------------------------------------------------------------


def _scoped(path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """forward, in the scope of its module; its first tensor and its result get names."""
    named = any(True for _ in module.parameters())

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = dict(vars(module))
        out = within(*args, **kwargs)
        _check_state(path or type(module).__name__, before, vars(module))
        return out

    def within(*args: Any, **kwargs: Any) -> Any:
        state = active()
        if state is None or not path:
            return forward(*args, **kwargs)
        with in_frames((*state.frames, Frame(path, module=True))):
            if named:
                args, kwargs = _named_argument(args, kwargs)
            out = forward(*args, **kwargs)
            return _named_result(state, out) if named else out

    return run


def _named_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for i, value in enumerate(args):
        if isinstance(value, Tensor):
            # A node of its own: what reads the value elsewhere is not the module's business.
            return (*args[:i], name(value.view_as(value), "in"), *args[i + 1 :]), kwargs
    for k, value in kwargs.items():
        if isinstance(value, Tensor):
            return args, {**kwargs, k: name(value.view_as(value), "in")}
    return args, kwargs


def _named_result(state: TraceState, out: Any) -> Any:
    if isinstance(out, Tensor):
        return name(out if _is_own(state, out) else out.view_as(out), "out")
    if type(out) in (tuple, list) and out and isinstance(out[0], Tensor):
        return type(out)((_named_result(state, out[0]), *out[1:]))
    return out


def _is_own(state: TraceState, value: Tensor) -> bool:
    """Whether the open module itself made the value, and nobody has named it."""
    node = internals.proxy_node(state.tracer, internals.base_tensor(value))
    if node is None or node.op != "call_function":
        return False
    return SCOPE.get(node) == path_of(state.frames) and not NAME.on(node)

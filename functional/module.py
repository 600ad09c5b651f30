"""functionalize: an nn.Module as a pure function of its parameters."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import PurityError
from torchard.functional.core.locks import Lock
from torchard.functional.core.placed import is_placed
from torchard.functional.core.scope_frames import Frame
from torchard.functional.core.wrapper import ModuleCopy
from torchard.functional.dropout import Keyed
from torchard.functional.module_layers import check_untied, stacked_layers
from torchard.functional.modules.checks import check_contents, created, parted, updated
from torchard.functional.modules.copying import hollow, owner_of, plain_tensors, ties
from torchard.functional.modules.registered import OwnTensors, Registered, named_tensors
from torchard.functional.modules.scopes import called_at, iterate, name_held, scope
from torchard.functional.modules.shapes import shapes_noted
from torchard.functional.modules.state import kept_apart, undone
from torchard.functional.tracing.object_results import register_torch_nodes
from torchard.functional.tracing.torch_checkpoint import recomputed_within
from torchard.functional.tracing.trace_state import active

__all__ = ["Functional", "functionalize"]


@checked
def functionalize(
    module: nn.Module, *, stacked: str | Sequence[str] = ()
) -> tuple[Functional, dict[str, Tensor]]:
    """Turn an ``nn.Module`` into a pure function of its parameters.

    The module is unchanged, and the function does not need it: it works on a copy without weights, in the
    module's current train or eval mode. Modules on the meta device work too.

    Args:
        module: any ``nn.Module`` that can be deep-copied.
        stacked: paths of lists of modules (``"model.layers"``) that differ in the values of their
            parameters and buffers only, and that the forward applies one after the other. They run as a
            `repeat`, so that tracing, planning and compiling take the time of one layer. Their parameters
            are stacked copies, ``model.layers.*.mlp.weight``, with a leading dim of layers.

    Returns:
        ``fn`` and ``params``. ``fn(params, *args)`` is ``module(*args)``; see `Functional`. ``params`` is
        a dict of the module's parameters by dotted path, detached, sharing memory with it. Tied
        parameters appear once, under their first name, and their gradient is the sum over the uses. In a
        forward, ``requires_grad`` of a parameter is an attribute of the tensor that is passed in the
        call: False for tensors of ``params``, and True for all that are differentiated.

    Raises:
        LoopError: ``stacked`` names no list, or its modules differ in their structure; when called, if
            the forward does anything else with the layers, reads an attribute that differs, or changes
            something between their calls. (In objects that layers share, only attributes and the
            containers in them are checked.)

    >>> import torch, torchard as ta
    >>> fn, params = ta.functionalize(torch.nn.Linear(3, 2))
    >>> {name: p.shape for name, p in params.items()}
    {'weight': torch.Size([2, 3]), 'bias': torch.Size([2])}
    >>> gradient = torch.func.grad(lambda params: fn(params, torch.ones(3)).sum())(params)
    >>> gradient["weight"]
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    fn = Functional(module, stacked)
    return fn, fn.stack({k: p.detach() for k, p in module.named_parameters()})


class Functional(ModuleCopy):
    """A pure function ``fn(params, *args, key=None, buffers=None, **kwargs)`` made by `functionalize`.

    Every submodule computes in the scope of its path, so that traces, plans and messages name it:
    ``transformer.h.0.mlp``. The first tensor argument of a module with parameters is labelled ``in`` and
    its first result ``out``, for ``constrain_at``: ``"transformer.h.*.mlp/out"``.

    Args:
        module: as for `functionalize`.
        stacked: as for `functionalize`.

    Args (of a call):
        params: a dict with the names that `functionalize` returned.
        key: int64 ``[2]``; every dropout in train mode draws from its own key, folded from this one.
        buffers: a dict like ``fn.buffers``. If given, the result is a pair: the module's result, and the
            buffers after one forward of the module, even if a checkpoint runs it twice. Gradients flow
            through buffer updates as in torch, so not through updates under no_grad.

    The keywords ``key`` and ``buffers`` always belong to ``fn``: if a module's forward has arguments with
    these names, pass them by position.

    Attributes:
        buffers: the module's buffers by dotted path, which share its memory (stacked ones are copies); a
            call without ``buffers=`` uses them as constants.
        module: the copy of the module; its parameters and buffers are on the meta device.
        stacks: the module's lists of stacked layers.

    Raises (when called):
        PurityError: dropout runs in train mode without a key, a buffer is updated without ``buffers``,
            the forward stores a tensor or number in a plain attribute, or replaces a shared buffer.
        TypeError: ``params`` or ``buffers`` is not a dict, or has placed values outside of `shard`.
        KeyError: the names of ``params`` or ``buffers`` are not those of the module.

    >>> import torch, torchard as ta
    >>> fn, params = ta.functionalize(torch.nn.BatchNorm1d(2))
    >>> isinstance(fn, ta.Functional)
    True
    >>> y, buffers = fn(params, torch.tensor([[0.0, 2.0], [2.0, 6.0]]), buffers=fn.buffers)
    >>> buffers["running_mean"]
    tensor([0.1000, 0.4000])
    """

    # Slots hide the copy from guards, which walk it as a `ModuleCopy`, not attribute by attribute.
    __slots__ = (
        *("__dict__", "_lock", "_names", "_shapes", "_tensors", "_ties", "_trained", "_training"),
        *("module", "stacks"),
    )

    def __init__(self, module: nn.Module, stacked: str | Sequence[str] = ()) -> None:
        self.__name__ = type(module).__name__
        self.stacks = stacked_layers(module, stacked)
        self.buffers = self.stack({k: b.detach() for k, b in module.named_buffers()})
        self.constants = plain_tensors(module)
        self._ties = ties(module)
        check_untied(self._ties, self.stacks)
        self._names = self.names_of(k for k, _ in module.named_parameters())
        self._trained = set(self.names_of(k for k, p in module.named_parameters() if p.requires_grad))
        trained = (k for k, _ in module.named_buffers() if _is_training(module, k))
        self._training = set(self.names_of(trained))
        self._install(*hollow(module, self.constants), named_tensors(module))
        self._shapes = self._shapes_of(module)

    def _install(self, module: nn.Module, private: list[Any], originals: Mapping[str, Tensor]) -> None:
        """Let the function work on a copy of a module. See `OwnTensors` for the arguments."""
        self.module, self._lock = module, Lock()
        for path, part in module.named_modules():
            name_held(path, part)
            scope(path, Frame(path, module=True), part, vars(part).get("forward"))
        for layers in self.stacks:
            layers.install(module, iterate)
        self._tensors = OwnTensors(originals, module, private, self._ties)

    def tensors_in(self, tables: Sequence[dict[str, Any]]) -> list[int]:
        """See `ModuleCopy`."""
        return self._tensors.tensors_in(tables)

    def hold_at(self, path: str) -> None:
        """See `ModuleCopy`."""
        self.held_at = path

    def __copy__(self) -> Functional:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> Functional:
        copied = memo[id(self)] = type(self).__new__(type(self))
        with self._lock:
            module, private = hollow(self.module, self.constants, memo)
            copied._set({**self.__getstate__(), "stacks": [copy.copy(each) for each in self.stacks]})
            copied.buffers = copy.deepcopy(self.buffers, memo)
            copied._install(module, private, dict(self._tensors.originals))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **{name: getattr(self, name) for name in _STATE}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set(state)
        self._install(self.module, [], {})

    def _set(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

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
        if torch.compiler.is_dynamo_compiling():
            named = {"key": key, "buffers": buffers, **kwargs}
            return internals.outside_of_compile(self, (params, *args), named)
        params = _tensors("params", params, self._names)
        if buffers is None:
            # A write is refused when the call has ended. In a trace nothing has been written until then,
            # and buffers that are only read need no copy.
            read_only = set() if active() is None else self.buffers.keys() - self._training
            given = {k: b if k in read_only else _cloned(b) for k, b in self.buffers.items()}
        else:
            buffers = _tensors("buffers", buffers, self.buffers)
            given = {k: _cloned(buffers[k]) for k in self.buffers}
        versions = {k: internals.version(b) for k, b in given.items() if not b.is_inference()}
        values = {**params, **given}
        values |= {k: values[first] for k, first in self._ties.items()}
        rows = [layers.take(values) for layers in self.stacks]
        registered = Registered(self._tensors, values)
        # All threads share one copy, which holds the parameters of one thread at a time.
        with contextlib.ExitStack() as inside:
            inside.enter_context(shapes_noted(params, self._shapes))
            inside.enter_context(self._lock)
            inside.enter_context(internals.uncompiled())
            inside.enter_context(called_at(self.held_at))
            keyed = inside.enter_context(Keyed(key))
            contents = self._tensors.contents()
            inside.enter_context(undone(contents))
            with contextlib.ExitStack() as running:
                places = running.enter_context(registered.running())
                for layers, tensors in zip(self.stacks, rows, strict=True):
                    within = functools.partial(self._entered, registered)
                    running.enter_context(layers.running(tensors, keyed, within))
                running.enter_context(internals.as_parameters(params.values()))
                if active() is None:
                    here = functools.partial(self._recomputing, values, given, keyed)
                    running.enter_context(recomputed_within(here))
                out = kept_apart(self.module(*args, **kwargs), contents)
                values |= places.buffers()
            check_contents(self.__name__, contents)
            if buffers is not None and (new := contents.new_buffers()):
                raise created(new)
        register_torch_nodes(out)
        # The module may have assigned other tensors in place of those given.
        after = {k: values.get(k, given[k]) for k in given}
        for k, first in self._ties.items():
            if values[k] is not values[first]:
                raise parted(k, first)
        if buffers is not None:
            return out, after
        for k, value in after.items():
            if value is not given[k] or (k in versions and internals.version(value) != versions[k]):
                raise updated(k)
        return out

    def _shapes_of(self, module: nn.Module) -> dict[str, list[int]]:
        """The shapes of params, by name."""
        shapes: dict[str, list[int]] = {}
        for name, parameter in module.named_parameters():
            count = [layers.count for layers in self.stacks if layers.place(name)]
            shapes[self.names_of([name])[0]] = [*count, *parameter.shape]
        return shapes

    @contextlib.contextmanager
    def _entered(self, registered: Registered) -> Iterator[None]:
        """A context in which the module has the tensors of a call, which may have ended."""
        with self._lock:
            if registered.is_entered():
                with registered:
                    yield
            else:
                with undone(self._tensors.contents()), registered.running():
                    yield

    def _recomputing(
        self, values: Mapping[str, Tensor], buffers: Iterable[str], keyed: Keyed
    ) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """A context in which torch's checkpoint runs a part of a call again, in the backward."""
        if self.stacks:
            raise PurityError(
                f"{source.of_here()} calls torch.utils.checkpoint in a module with stacked layers. "
                "Outside of transforms, stacked layers cannot be recomputed. Use torchard.checkpoint(fn) "
                "instead, or wrap the function in jit."
            )
        first = keyed.first + keyed.drawn

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            # A recomputation must not write to the call's results again.
            fresh = {**values, **{k: _cloned(values[k]) for k in buffers}}
            fresh |= {k: fresh[one] for k, one in self._ties.items()}
            with self._entered(Registered(self._tensors, fresh)), Keyed(keyed.key, first):
                yield

        return again

    def split(self, params: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Split parameters into those that the module trains, and those that it has frozen.

        A gradient has an entry for every parameter that is differentiated, whatever its ``requires_grad``
        in the module: differentiate with respect to ``trained``, and call
        ``fn({**trained, **frozen}, ...)``.

        Args:
            params: a dict with the names that `functionalize` returned; values of any kind, so specs too.

        Returns:
            ``trained`` and ``frozen``, by the ``requires_grad`` that the module's parameters had when it
            was functionalized.

        Raises:
            KeyError: the names of ``params`` are not those of the module.

        >>> import torch, torchard as ta
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        >>> _ = model[0].requires_grad_(False)
        >>> fn, params = ta.functionalize(model)
        >>> trained, frozen = fn.split(params)
        >>> loss = lambda trained, x: fn({**trained, **frozen}, x).sum()
        >>> list(torch.func.grad(loss)(trained, torch.ones(2, 3)))
        ['1.weight', '1.bias']
        """
        _check_names("params", params, self._names)
        trained = {k: value for k, value in params.items() if k in self._trained}
        return trained, {k: value for k, value in params.items() if k not in self._trained}

    def stack(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters or buffers of the module by their names, those of stacked layers stacked.

        >>> import torch, torchard as ta
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        >>> fn, params = ta.functionalize(torch.nn.ModuleDict({"layers": mlp}), stacked="layers")
        >>> {name: list(p.shape) for name, p in params.items()}
        {'layers.*.weight': [2, 3, 3], 'layers.*.bias': [2, 3]}
        >>> fn.stack(torch.nn.ModuleDict({"layers": mlp}).state_dict()).keys() == params.keys()
        True
        """
        for layers in self.stacks:
            named = layers.stack(named)
        return dict(named)

    def names_of(self, names: Iterable[str]) -> list[str]:
        """The names in ``params`` of the module's tensors with these names, each once."""
        for layers in self.stacks:
            places = [(name, layers.place(name)) for name in names]
            names = [layers.row(place[1]) if place else name for name, place in places]
        return list(dict.fromkeys(names))


# The entries of a function's pickle besides its attributes.
_STATE = ("_names", "_shapes", "_ties", "_trained", "_training", "module", "stacks")


def _cloned(buffer: Tensor) -> Tensor:
    """A copy that has a version in inference mode too, because versions reveal updates."""
    with torch.inference_mode(False):
        return buffer.clone()


def _is_training(module: nn.Module, path: str) -> bool:
    return module.get_submodule(owner_of(path)).training


def _tensors(what: str, given: Any, wanted: Any) -> Mapping[str, Tensor]:
    """The params or buffers of a call, checked. In a trace, placed values among them become operands."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{what} is a {type(given).__name__}; the first argument of a functionalized module is the "
            "dict that functionalize returned: fn(params, ...)."
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
        problems += [f"have {', '.join(unknown)}, which the module does not have"] * bool(unknown)
        raise KeyError(
            f"{what} {' and '.join(problems)}; pass a dict with the names that functionalize returned "
            "(of tied parameters, the first)."
        )

"""A mode around traced functions: foreign tensors become operands, Python floats promote weakly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import PurityError
from torchard.functional.core.failed_calls import note_call, note_operands
from torchard.functional.core.placed import is_placed
from torchard.functional.core.scope_frames import path_of
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.effects import grouped_products
from torchard.functional.effects.mutation import forgets_turns
from torchard.functional.effects.picked import assign_picked, is_picking, pick
from torchard.functional.programs.tags import SOURCE, VAL
from torchard.functional.torch_internals.accessors import pytree as torch_pytree
from torchard.functional.torch_internals.composite_functions import COMPOSED
from torchard.functional.torch_internals.operators import aten
from torchard.functional.tracing import inner_gradients
from torchard.functional.tracing import registered_derivatives as registered
from torchard.functional.tracing.autograd_state import answer, question
from torchard.functional.tracing.stand_ins import any_stand_in, stand_in
from torchard.functional.tracing.tensor_memory import is_deep_copy
from torchard.functional.tracing.trace_state import TraceState

__all__ = ["TensorLifting", "is_weak"]

# Tensor attributes that do not depend on values.
_METADATA = {
    *("shape", "dtype", "device", "ndim", "layout", "names", "itemsize", "nbytes"),
    *("is_cuda", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested"),
}


class TensorLifting(TorchFunctionMode):
    """Replaces foreign tensors by operands, and promotes traced Python floats as Python does."""

    def __init__(self, state: TraceState) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = internals.unpatched(func), kwargs or {}
        if _reads_metadata(func):
            return func(*args, **kwargs)
        if (name := question(func)) is not None:
            return answer(self.state, name, func, args, kwargs)
        try:
            return self._call(func, args, kwargs)
        except Exception as error:
            with internals.no_function_modes():
                if note_call(error, self._where(), func, args, kwargs):
                    named = _named(self.state, _tensors(args, kwargs))
                    note_operands(error, path_of(self.state.frames), named)
            raise

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if internals.forward_ad_active():
            self.state.inner_levels = internals.level_kinds()
        if is_deep_copy(self.state, func, args):
            return self._cut(torch.Tensor.detach, self._natives(args[:1]), {}).clone()
        args, kwargs = self._natives(args), self._natives(kwargs)
        if self.state.turned and func in _PLAIN_GRADIENTS and forgets_turns(self.state.tracer.graph):
            _check_levels(args[0] if args else kwargs.get("outputs", kwargs.get("tensors")))
        args, kwargs, weak = _weaken(args, kwargs)
        if _is_detach(func):
            return self._cut(func, args, kwargs)
        if _is_data(func):
            return self._data(func, args, kwargs)
        if is_picking(func, args):
            record = pick if func is torch.Tensor.__getitem__ else assign_picked
            return record(self.state.tracer, self.state.picked, *args, **kwargs)
        if (composed := self._composed(func, args, kwargs)) is not NotImplemented:
            return composed
        out = self._run(_WITHOUT_READING.get(func, func), args, kwargs)
        if weak and isinstance(out, torch.Tensor) and out.ndim == 0:
            out._torchard_weak = True  # type: ignore[attr-defined]
        return out

    def _composed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of the replacement of a torch function; NotImplemented if it has no replacement."""
        replaced = COMPOSED.get(func) or grouped_products.replacement(func)
        if replaced is None:
            return NotImplemented
        with TensorLifting(self.state):
            return replaced(*args, **kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function with its registered derivative, and record which gradients it returns."""
        if func in registered.UNDER_LEVELS and registered.is_live():
            func = registered.UNDER_LEVELS[func]
        if registered.may_have_formula(func):
            where = str(self._where())
            return registered.call(func, args, kwargs, where, lambda: TensorLifting(self.state))
        out = func(*args, **kwargs)
        if func is torch.autograd.grad:
            inner_gradients.note(self.state, args[1] if len(args) > 1 else kwargs["inputs"], out)
        return out

    def _where(self) -> str | None:
        replayed = self.state.replaying
        return source.of_here() if replayed is None else SOURCE.get(replayed)

    def _natives(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if self.state.native(value) else self.state.lift(value)
        if isinstance(value, (list, tuple)):
            items = [self._natives(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(items)
        if isinstance(value, dict):
            return {key: self._natives(item) for key, item in value.items()}
        # A placed value that the function closes over.
        return self.state.lift(value) if is_placed(value) else value

    def _cut(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.__name__ == "detach_":
            self.state.without_grad = True  # detach_ leaves no node: derivatives run the function again
            self.state.given = None
            if _only_mapped(args[0]):  # torch raises, and there is no gradient to stop
                return args[0]
        self.state.cutting = True
        try:
            return func(*args, **kwargs)
        finally:
            self.state.cutting = False

    def _data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``y.data`` as a detach: tracers may miss the read, and always miss ``y.data = z``."""
        if func.__name__ == "__set__":
            raise PurityError(
                f"{source.of_here()} assigns to the .data of a tensor, which a trace cannot record. Use "
                "the new tensor instead, or write y.data.copy_(z) or y.copy_(z)."
            )
        if internals.level_kinds()[-1:] != [internals.VMAP]:  # vmap refuses .data
            args = (func(*args, **kwargs),)
        return self._cut(torch.Tensor.detach, args, {})


def _one_hot(ids: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """F.one_hot without its check of the largest id, which reads a value under functorch levels."""
    if num_classes <= 0:
        return F.one_hot(ids, num_classes)
    classes = torch.arange(num_classes, device=ids.device)
    return (ids.unsqueeze(-1) == classes).to(torch.int64)


def _assign(into: torch.Tensor, index: Any, value: Any) -> None:
    """``x[mask] = 0`` without counting the elements of the mask, as torch does under vmap."""
    if _fills(into, index, value):
        into.masked_fill_(_with_rank_of(index, into), value)
    else:
        into[index] = value


def _text(tensor: torch.Tensor, spec: str) -> str:
    """A tensor's text in an f-string: its kind, as it has no value yet. Format specs do not apply."""
    if spec:
        raise PurityError(
            f"{source.of_here()} puts the value of a tensor in a text (an f-string with {spec!r}) while "
            "the function is traced, where tensors have none. Leave the text out, make it outside of the "
            "transform, or leave out the format: the text then shows dtype and shape."
        )
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# Composite operations that read values although they need not, and replacements that are traced.
_WITHOUT_READING: dict[Any, Any] = {
    F.one_hot: _one_hot,
    torch.Tensor.__setitem__: _assign,
    torch.Tensor.__format__: _text,
    torch.Tensor.__repr__: lambda tensor, **_: internals.text_of(tensor),
}


_PLAIN_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


def _check_levels(outputs: Any) -> None:
    """Refuse plain autograd on fake tensors if it loses in-place changes of dims (`forgets_turns`)."""
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    if not all(isinstance(x, torch.Tensor) and internals.in_gradient_level(x) for x in outputs):
        raise PurityError(
            f"{source.of_here()} takes a gradient by torch.autograd in a function that changes the dims "
            "of a tensor in place (unsqueeze_, squeeze_, t_, transpose_), which autograd loses when it "
            "regenerates views during a trace. Use the operation without the underscore, or "
            "torch.func.grad."
        )


def _reads_metadata(func: Any) -> bool:
    owner = getattr(func, "__self__", None)
    return getattr(func, "__name__", "") == "__get__" and (
        getattr(owner, "__name__", "") in _METADATA
    )


def _is_detach(func: Any) -> bool:
    return getattr(func, "__name__", "") in ("detach", "detach_")


def _only_mapped(tensor: torch.Tensor) -> bool:
    kinds = set(internals.level_kinds())
    return kinds == {internals.VMAP} and not internals.base_tensor(tensor).requires_grad


def _fills(into: Any, index: Any, value: Any) -> bool:
    """Whether an assignment is a masked_fill: it writes one number wherever a mask is set."""
    mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.ndim > 0
    number = isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.ndim == 0)
    return mask and number and index.shape == into.shape[: index.ndim]


def _with_rank_of(mask: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    return mask.reshape(*mask.shape, *[1] * (into.ndim - mask.ndim))


def _is_data(func: Any) -> bool:
    return getattr(getattr(func, "__self__", None), "__name__", "") == "data"


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    flat = [*args, *kwargs.values()]
    return [value for value in flat if isinstance(value, torch.Tensor)]


# Functions through which values are passed when they are labelled or differentiated.
_SAME = (aten.alias.default, aten.view.default, aten.detach.default)


def _named(state: TraceState, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors among ``tensors`` that are inputs of the trace, by their paths in the call."""
    inputs = dict(zip(state.tracer.graph.find_nodes(op="placeholder"), state.paths, strict=False))
    found = {}
    for tensor in tensors:
        node = internals.proxy_node(state.tracer, internals.base_tensor(tensor))
        while node is not None and node.target in _SAME:
            node = node.all_input_nodes[0]
        if node is not None and node in inputs and VAL.of(node).shape == tensor.shape:
            found[inputs[node]] = tensor
    return found


def is_weak(value: Any) -> bool:
    """Whether a value is a 0-d tensor that carries a Python float of a trace in progress."""
    return getattr(value, "_torchard_weak", False) is True


def _weaken(args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    """Cast traced Python floats so that they promote like floats, not like float64 tensors.

    torch promotes a 0-d tensor weakly against a tensor with dims, but not against integers and other
    0-d tensors. The last result is whether all operands are Python floats; then the result is a float.
    """
    tensors = _tensors(args, kwargs)
    weak = [tensor for tensor in tensors if is_weak(tensor)]
    if not weak:
        return args, kwargs, False
    strong = [tensor for tensor in tensors if not is_weak(tensor)]
    if not strong:
        return args, kwargs, True
    floating = any(is_inexact(t) for t in strong)
    if floating and any(t.ndim and t.is_floating_point() for t in strong):
        return args, kwargs, False
    dtype = torch.result_type(strong[0], 1.0)
    for other in strong[1:]:
        dtype = torch.promote_types(dtype, torch.result_type(other, 1.0))

    def cast(value: Any) -> Any:
        return value.to(dtype) if is_weak(value) else value

    return tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}, False


def _operands(tree: Any) -> Any:
    """A tree in which tensors are replaced by their stand-ins, and by operands of the active trace."""
    if any_stand_in():
        tree = torch_pytree.tree_map(stand_in, tree, is_leaf=is_placed)
    for mode in reversed(internals.function_modes()):
        if isinstance(mode, TensorLifting):
            return torch_pytree.tree_map(mode._natives, tree, is_leaf=is_placed)
    return tree


# For derivatives inside a function with respect to closed-over tensors and placed objects.
internals.before_reading(_operands)

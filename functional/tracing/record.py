"""Runs a function of flat tensors on fake tensors, in a clean thread state, and records its graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import DerivativeError, PurityError, UnexpectedTracerError
from torchard.functional.core.failed_calls import note_line
from torchard.functional.core.tensor_spec import TensorSpec
from torchard.functional.effects.mutation import forgets_turns
from torchard.functional.effects.picked import Picked
from torchard.functional.programs.graphs import without_garbage
from torchard.functional.programs.markers import after
from torchard.functional.programs.tagging import inherit
from torchard.functional.programs.tags import SOURCE, VAL
from torchard.functional.torch_internals.operators import aten
from torchard.functional.tracing.inner_gradients import primals_of
from torchard.functional.tracing.tensor_lifting import TensorLifting
from torchard.functional.tracing.torch_checkpoint import taken_as_segments
from torchard.functional.tracing.trace_state import Closure, TraceState, entered

__all__ = ["Recording", "record"]


@dataclass
class Recording:
    """The result of a trace; in `graph`, placeholders of closures follow those of inputs.

    Attributes:
        without_grad: whether the graph alone does not determine its derivatives.
        forgets_turns: see `mutation.forgets_turns`.
        primals: for each output that is a gradient taken inside, the input it belongs to; else None.
        reads_autograd: whether the graph depends on which inputs require gradients in the call.
        picked: lookups that represent views.
    """

    graph: fx.Graph
    inputs: int
    closures: list[Closure]
    asks: list[Any]
    without_grad: bool
    forgets_turns: bool
    primals: list[fx.Node | None]
    reads_autograd: bool = False
    picked: Sequence[Picked] = ()


@without_garbage()
def record(
    fn: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    specs: Sequence[TensorSpec],
    *,
    gradients: Sequence[bool] = (),
    grad_mode: bool = True,
    given: Sequence[Any] | None = None,
    paths: Sequence[str] = (),
) -> Recording:
    """Record the graph of fn on fake tensors of these specs; its outputs are in fn's order.

    Args:
        gradients: for each input, whether it requires gradients inside (for plain autograd).
        grad_mode: torch's grad mode inside fn. If it is off, derivatives of the recording are wrong.
        given: the values of the inputs in the call, if the call is known.
        paths: the names of the inputs in messages.

    Raises:
        PurityError: fn branches on a tensor's value.
    """
    levels, grad_of_call = internals.level_kinds(), torch.is_grad_enabled()
    internals.bound_fake_cache()
    with internals.clean_thread_state(grad_mode):
        fakes = internals.FakeTensorMode(allow_non_fake_inputs=True)
        state = TraceState(
            fakes, levels, grad_mode=grad_mode, given=given, grad_of_call=grad_of_call, paths=paths
        )
        inputs = _fake_inputs(fakes, specs, gradients)
        tracing = internals.proxying(state.tracer, fakes, inputs, state.below_forward_ad)
        try:
            with entered(state), tracing, internals.uncompiled():
                state.last_input = _last_placeholder(state.tracer.graph)
                outputs = _run(state, fn, inputs)
                _check_layouts(state.tracer.graph)
                nodes = tuple(_output_node(state, output) for output in outputs)
            state.tracer.graph.output(_after_effects(state, nodes))
        finally:  # after a refused trace too, tensors that were kept outside have no values
            internals.end_fakes(state.tracer, _leaked)
    closures = [closure for closure, _ in state.closures.values()]
    forgets = state.turned and forgets_turns(state.tracer.graph)
    recording = Recording(
        state.tracer.graph,
        len(specs),
        closures,
        state.asks,
        state.without_grad,
        forgets,
        primals_of(state, nodes),
        state.reads_autograd,
        state.picked,
    )
    _lift_attributes(recording, state)
    return recording


def _fake_inputs(
    fakes: internals.FakeTensorMode, specs: Sequence[TensorSpec], gradients: Sequence[bool]
) -> list[torch.Tensor]:
    inputs = [internals.fake(fakes, spec) for spec in specs]
    for tensor, spec in zip(inputs, specs, strict=True):
        if spec.weak:
            tensor._torchard_weak = True  # type: ignore[attr-defined]  # torchard's mark
    for tensor, wanted in zip(inputs, gradients, strict=False):
        if wanted:
            tensor.requires_grad_()
    return inputs


# Parts of torch's messages when C++ code reads the value of a tensor that has none.
_READS_A_VALUE = (
    *("get value out of a tracing tensor", "its data is not allocated yet"),
    *(".numpy() is not supported for tensor subclasses", ".tolist() is not supported for tensor"),
    "Not available for 'meta' device type",  # an element of a storage
    # under levels of torch.func
    *("Tensor that doesn't have storage", "on a tensor with unallocated storage"),
    *("calling .item() on a Tensor", "attempting to use a Tensor in some data-dependent control flow"),
)
# Operators by which Python code reads a value; all other operators read values for their own use. Below
# them, an operator whose result has an unknown shape because of values that it saves for its backward.
_OF_BRANCHES = ("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::allclose")
_KEEPS_UNKNOWN_SHAPES = ("aten::_ctc_loss",)
_DRAWN = (
    "draws random numbers from a torch.Generator: its state would not advance when the trace is run "
    "again. Pass a key and use torchard.random, or draw outside and pass the tensor"
)
_NOT_STRIDED = (
    "makes or uses a sparse or nested tensor, and a trace records strided ones only. Use a dense tensor, "
    "with a mask or with indices (index_add, F.embedding without sparse=True), or compute it outside of "
    "the transform"
)
# Remedies for other code that cannot be traced, by parts of torch's messages, of the module names of its
# errors, or of the names of the files that raise them.
_INSTEAD = {
    "does not require grad": (
        "takes a gradient by torch.autograd with respect to an argument, for which autograd records "
        "nothing during a trace. Use torch.func.grad (or vjp, jacrev) inside or around this function"
    ),
    "support saved tensor hooks": (
        "sets saved-tensor hooks inside torch.func.grad, which torch does not support. Use "
        "torchard.checkpoint, which works under every transform"
    ),
    "override the setup_context staticmethod": (
        "calls an autograd.Function without setup_context, which torch.func does not support; gradients "
        "taken inside of a transform, and second and higher ones, are torch.func's. Take the gradient "
        "outside, as in torch.func.grad(jit(f)) in place of jit(torch.func.grad(f)); or give it a "
        "forward without ctx, and a setup_context(ctx, inputs, output)"
    ),
    **dict.fromkeys(
        ("INTERNAL ASSERT FAILED", "returned an invalid gradient"),
        "fails inside torch's autograd while it is traced. This is known to happen for writes to views "
        "of detached tensors, and for writes through as_strided: write to a clone instead",
    ),
    "argument of type: <class 'torch.storage": (
        "replaces the memory of a tensor by set_(), which a trace cannot record. Use the new tensor in "
        "its place, or copy it into the old one by copy_()"
    ),
    "Creating a new Tensor subclass": (
        "converts a value to a subclass (as_subclass), which a trace cannot record. Convert the "
        "function's result outside of the transform"
    ),
    **dict.fromkeys(
        ("Cannot swap t1", "Cannot swap t2"),
        "swaps tensors by torch.utils.swap_tensors, which a trace cannot record. Swap their names: "
        "a, b = b, a",
    ),
    **dict.fromkeys(
        (f"Tensor' object has no attribute '{name}'" for name in ("full", "spec", "mesh", "shards")),
        "reads an attribute that placed values have outside of a trace. In a traced function all values "
        "are global tensors: leave out .full(), or write torchard.full(value), which is right in both",
    ),
    **dict.fromkeys(
        (
            *(os.path.join("torch", "nested"), "._nested_", "NestedTensorImpl"),  # a file; an operator
            *("SparseTensorImpl", "Sparse CSR"),
            *("sparse coordinate tensor layout", "Values and compressed tensor instance"),
        ),
        _NOT_STRIDED,
    ),
    # torch 2.11 raises; from 2.12 on the tracer keeps the generator as an attribute
    internals.GENERATOR_IN_ERRORS: _DRAWN,
    **dict.fromkeys(
        internals.CONTROL_FLOW_IN_ERRORS,
        "uses an operator of torch.compile (torch.cond, while_loop, scan, map, flex_attention), which "
        "cannot be traced here. Use cond, while_loop, scan and map of torchard, and "
        "F.scaled_dot_product_attention",
    ),
}


def _last_placeholder(graph: fx.Graph) -> fx.Node | None:
    placeholders = graph.find_nodes(op="placeholder")
    return placeholders[-1] if placeholders else None


def _run(state: TraceState, fn: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    try:
        with internals.fake_errors_unlogged(), TensorLifting(state), taken_as_segments():
            return list(fn(list(inputs)))
    except (
        internals.DataDependentOutputException,
        internals.DynamicOutputShapeException,
        internals.GuardOnDataDependentSymNode,
    ) as error:
        raise _branching(error) from error
    except Exception as error:
        text = str(error)
        if "does not require grad" in text and source.calls_after_user(error, "_autograd_grad"):
            raise _pulled_outside(error) from error
        if any(part in text for part in _READS_A_VALUE):
            raise _branching(error) from error
        if "derivative for" in text and "is not implemented" in text:
            raise DerivativeError(
                f"torch has no derivative of an operation in the function: {text.rstrip('.')}. "
                "detach() its operands, or differentiate with respect to other arguments only."
            ) from error
        for part, instead in _INSTEAD.items():
            if part in (text + source.files_of(error)) and not isinstance(error, PurityError):
                where = source.of_error(error) or "a line that could not be found"
                raise PurityError(f"{where} {instead}.") from error
        note_line(error)
        raise


def _check_layouts(graph: fx.Graph) -> None:
    """Refuse tensors that are not strided; the gradient of an embedding may be sparse, for example."""
    for node in graph.nodes:
        val = VAL.get(node)
        if isinstance(val, torch.Tensor) and val.layout is not torch.strided:
            raise PurityError(f"{SOURCE.get(node) or 'an unknown line'} {_NOT_STRIDED}.")


def _pulled_outside(error: BaseException) -> PurityError:
    return PurityError(
        f"{source.of_error(error) or 'an unknown line'} calls the function that torch.func.vjp returned "
        "outside of the function that is traced here (the block of repeat, for example), which does not "
        "record it. Take the vjp inside as well: repeat(lambda p, v: vjp(f, x)[1](v)[0], ...)."
    )


def _leaked(node: fx.Node) -> UnexpectedTracerError:
    what = "an argument or closed-over tensor of a traced function"
    if node.op == "call_function":
        what = f"the result of {node.target} at {SOURCE.get(node)}"
    return UnexpectedTracerError(
        f"{what} is used after the trace that recorded it. Tensors of a trace have no values, so a "
        "traced function must not keep them (in a list, an attribute, a cache): return the tensor, or "
        "compute it outside the transform."
    )


def _branching(error: BaseException) -> PurityError:
    where = source.of_error(error) or source.of_here() or "a line that could not be found"
    op = getattr(error, "func", None)
    if _reads_for_itself(error):
        return PurityError(
            f"{where} calls {op}, which reads the values of tensors that it is given (lengths, "
            "targets): it cannot be traced. Call it outside of the transform, on the function's "
            "result, or write it with operations that do not depend on values."
        )
    if (instead := _OF_KNOWN_SIZE.get(op)) is not None:
        return PurityError(
            f"{where} calls {op}, whose result has a size that depends on values: it cannot be traced. "
            f"{instead}."
        )
    operation = f" (by {op})" if op is not None else ""
    return PurityError(
        f"{where} needs the value of a tensor while the function is traced{operation}: branching, "
        "item(), bool(), float() and shapes that depend on values cannot be traced. Use cond or "
        "torch.where for a branch, while_loop for a loop, debug.print to print, pass the number as an "
        "int, bool or string argument (these are static), or compute it outside the transform."
    )


# What to write in place of operations whose results have sizes that depend on values.
_OF_KNOWN_SIZE: dict[Any, str] = {
    aten.bincount.default: (
        "minlength is only the least size. If all values are below n, count them by "
        "x.new_zeros(n).scatter_add(0, x, torch.ones_like(x)); with weights, by "
        "weights.new_zeros(n).scatter_add(0, x, weights)"
    )
}


def _reads_for_itself(error: BaseException) -> bool:
    """Whether an operator reads values for its own use, not for the Python code around it."""
    if isinstance(error, internals.DataDependentOutputException):
        return internals.qualified_name(error.func) not in _OF_BRANCHES
    if isinstance(error, internals.DynamicOutputShapeException):
        return internals.qualified_name(error.func).partition(".")[0] in _KEEPS_UNKNOWN_SHAPES
    return False


def _output_node(state: TraceState, output: torch.Tensor) -> fx.Node:
    if not state.native(output):
        output = state.lift(output)
    node = internals.proxy_node(state.tracer, output)
    if node is None:
        with state.fakes:
            node = internals.proxy_node(state.tracer, aten.alias.default(output))
    if node is None:
        raise PurityError(
            "an output of the traced function was computed by operations that the trace did not record: "
            "return tensors computed by torch from the arguments."
        )
    return node


def _after_effects(state: TraceState, outputs: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """The outputs, of which the last effects are read: those of gradients by the last output."""
    tied = list(outputs)
    for of_gradients, place in ((False, 0), (True, -1)):
        token = state.tokens.pop(of_gradients, None)
        if token is not None:
            node = internals.proxy_node(state.tracer, internals.base_tensor(token))
            value = tied[place]
            tied[place] = state.tracer.graph.call_function(after, (value, node, of_gradients))
            inherit(tied[place], value, "value")
            VAL.set(tied[place], VAL.of(value))
    return tuple(tied)


def _lift_attributes(recording: Recording, state: TraceState) -> None:
    """Turn constants that the tracer embedded into operands; constants made by the function come last."""
    graph = recording.graph
    operands: dict[int, fx.Node] = {}
    nodes = [(node, _is_made(node, state)) for node in graph.find_nodes(op="get_attr")]
    for node, made in sorted(nodes, key=lambda pair: pair[1]):
        value = getattr(state.tracer.root, node.target)
        if isinstance(value, torch.Generator):
            raise _drawn(node)
        if isinstance(value, internals.FakeTensor) and value.fake_mode is state.fakes:
            raise PurityError(f"{_first_line(node)} {_NOT_RECORDED}.")
        if id(value) in state.stood_in:
            raise DerivativeError(
                "a tensor that the function closes over is differentiated both inside the function and "
                "outside of it: pass it as an argument."
            )
        if id(value) not in operands:
            operand = _placeholder(graph, state, value)
            operands[id(value)] = operand
            recording.closures.append(Closure(value, TensorSpec.of(value), operand, None, made))
        node.replace_all_uses_with(operands[id(value)])
        graph.erase_node(node)


def _drawn(node: fx.Node) -> PurityError:
    return PurityError(f"{_first_line(node)} {_DRAWN}.")


def _first_line(node: fx.Node) -> str:
    lines = map(SOURCE.get, node.users)
    return next((line for line in lines if line), "a line")


_NOT_RECORDED = (
    "reads a tensor that a trace cannot follow: nn.Parameter(x), or another subclass made of x, inside "
    "of torch.func.grad, vmap or jvp. Use x itself; it has a gradient there without being a parameter"
)


def _is_made(node: fx.Node, state: TraceState) -> bool:
    """Whether the traced function made the constant itself, so that it can never change."""
    if id(getattr(state.tracer.root, str(node.target))) in state.constants:
        return True
    return all(user.target is aten.lift_fresh_copy.default for user in node.users)


def _placeholder(graph: fx.Graph, state: TraceState, value: torch.Tensor) -> fx.Node:
    with internals.inserting_after(graph, _last_placeholder(graph)):
        node = graph.placeholder("constant")
    with internals.clean_thread_state(), state.fakes:
        VAL.set(node, TensorSpec.of(value).empty())
    return node

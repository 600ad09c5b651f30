"""The program of one run: the operations that a call ran on its values.

A trace must be valid for all values, so it refuses branches on values, masks, `item()`, draws from the
global generator, and an autograd.Function without setup_context. A recording represents one call: it has
the branches that were taken, and random draws and numbers that were read from tensors are constants. It
takes the same branches with other rounding errors, so the error bound is valid for this call only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core import tree
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import PurityError
from torchard.functional.effects.mutation import storage_key, written_nodes
from torchard.functional.effects.writes import functionalize_writes
from torchard.functional.programs.program import FREE, Leaf, Program
from torchard.functional.programs.tags import PHASE, SOURCE, VAL
from torchard.functional.programs.views import sweep
from torchard.functional.torch_internals.accessors import pytree
from torchard.functional.torch_internals.operators import aten
from torchard.functional.tracing.object_results import with_objects
from torchard.functional.tracing.trace_call import OutTree

__all__ = ["program_of"]

_Key = tuple[Any, ...]


def program_of(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Program, list[torch.Tensor]]:
    """The straight-line program of one run of a function, and its inputs.

    Args:
        fn: any function of pytrees; it runs once.
        args: its arguments; tensors among their leaves are plain tensors.

    Returns:
        A program whose primals are the tensors of the arguments. Tensors that the function closes over,
        draws at random, or creates by other means than torch's operators are constants. The values of
        nodes (`VAL`) are real tensors: the results, or what later writes left in the results' memory.

    Raises:
        PurityError: an operation writes in place and has no pure form.
    """
    leaves, structure = tree.flatten(tuple(args))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    recording = _Recording()
    inputs = [recording.add("primal", leaves[i]) for i in places]
    with internals.uncompiled(), _Mode(recording):
        result = with_objects(fn(*tree.unflatten(structure, leaves)), lambda tensor: True)
    results, out_tree = tree.flatten(result)
    outputs = [recording.node_of(x) for x in results if isinstance(x, torch.Tensor)]
    recording.graph.output(tuple(outputs))
    recording.copy_what_is_written()
    functionalize_writes(recording.graph)
    sweep(recording.graph)
    constants = [c for c in recording.constants if c.node.users]
    for constant in recording.constants:
        if not constant.node.users:
            recording.graph.erase_node(constant.node)
    names, out = tree.paths(tuple(args), "args"), tree.paths(result, "out")
    program = Program(
        graph=recording.graph,
        inputs=(
            *(Leaf(names[i]) for i in places),
            *(Leaf(f"constant {i}", role="constant") for i, _ in enumerate(constants)),
        ),
        outputs=tuple(
            Leaf(path, FREE, "output")
            for path, x in zip(out, results, strict=True)
            if isinstance(x, torch.Tensor)
        ),
        in_tree=structure,
        out_tree=OutTree.of(results, out_tree),
        name=getattr(fn, "__name__", type(fn).__name__),
        constants=tuple(c.value for c in constants),
    )
    values = [*(x.value for x in inputs), *program.constants]
    _check_complete(program, values, [x for x in results if isinstance(x, torch.Tensor)])
    return program, values


def _check_complete(
    program: Program, inputs: list[torch.Tensor], results: list[torch.Tensor]
) -> None:
    """Check that the program gives the same results as the run.

    Raises:
        PurityError: the results differ, because code other than torch's operators wrote to memory.
    """
    with torch.no_grad():
        known = fx.Interpreter(torch.nn.Module(), graph=program.graph).run(
            *inputs, enable_io_processing=False
        )
    for leaf, have, want in zip(program.outputs, known, results, strict=True):
        with torch.no_grad():
            same = torch.allclose(
                have.detach().to(torch.complex128 if want.is_complex() else torch.float64),
                want.detach().to(torch.complex128 if want.is_complex() else torch.float64),
                rtol=1e-2,
                atol=1e-2,
                equal_nan=True,
            )
        if not same:
            raise PurityError(
                f"{leaf.path} is not what operators of torch computed: something else writes to memory "
                "of tensors (NumPy, another thread), so that roundings cannot be measured: "
                "write it with operations of torch, or compare with it by hand."
            )


@dataclass(frozen=True)
class _Operand:
    """A tensor that no recorded operation created: its placeholder, and its value when first read."""

    node: fx.Node
    value: torch.Tensor


@dataclass
class _Recording:
    """A graph that is being recorded, and the node of each tensor.

    A tensor is identified by its memory, offset and strides, not by its Python object, because autograd
    passes on copies of views that share their memory. Two tensors with the same memory, offset and
    strides have the same value at any time.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    constants: list[_Operand] = field(default_factory=list)
    nodes: dict[_Key, fx.Node] = field(default_factory=dict)
    last: fx.Node | None = None  # the last placeholder
    kept: list[Any] = field(
        default_factory=list
    )  # keeps memory alive: freed memory would be reused for other tensors

    def add(self, name: str, tensor: torch.Tensor, value: torch.Tensor | None = None) -> _Operand:
        """A placeholder for a tensor, with a copy of its current contents."""
        with internals.inserting_after(self.graph, self.last):
            node = self.last = self.graph.placeholder(name)
        copy = tensor.detach().clone() if value is None else value
        self._know(node, tensor)
        return _Operand(node, copy)

    def constant(self, tensor: torch.Tensor) -> fx.Node:
        """A placeholder for a tensor that no operation created."""
        operand = self.add("constant", tensor)
        self.constants.append(operand)
        return operand.node

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor; a new constant if no operation computed it."""
        node = self.nodes.get(_key(tensor))
        return self.constant(tensor) if node is None else node

    def operands(self, value: Any, held: bool) -> Any:
        """An operation's arguments with nodes in place of tensors; called before the operation writes.

        Args:
            held: whether masks are constants, because the number of elements that they select is a shape.
        """

        def operand(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            hold = held and x.dtype == torch.bool
            return self.constant(x.clone()) if hold else self.node_of(x)

        return pytree.tree_map(operand, value)

    def call(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the arguments and results of an operation."""
        node = self.graph.call_function(func, args, kwargs)
        SOURCE.set(node, source.of_here())
        PHASE.set(node, "forward" if internals.graph_task() == -1 else "backward")
        self._result(node, result)

    def copy_what_is_written(self) -> None:
        """Replace each placeholder whose memory is written by a copy, which operations read and write."""
        written = {storage_key(into) for node in self.graph.nodes for into in written_nodes(node)}
        for node in self.graph.find_nodes(op="placeholder"):
            if storage_key(node) in written:
                with internals.inserting_after(self.graph, self.last):
                    copy = self.graph.call_function(aten.clone.default, (node,))
                node.replace_all_uses_with(
                    copy, delete_user_cb=lambda user, copy=copy: user is not copy
                )
                VAL.set(copy, VAL.of(node))
                VAL.set(node, VAL.of(node).clone())  # in separate memory

    def _result(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._know(node, value)
        elif isinstance(value, (tuple, list)):
            VAL.set(node, value)
            for i, item in enumerate(value):
                if not isinstance(item, (torch.Tensor, tuple, list)):
                    continue
                part = self.graph.call_function(operator.getitem, (node, i))
                SOURCE.set(part, SOURCE.get(node))
                PHASE.set(part, PHASE.get(node) or "forward")
                self._result(part, item)

    def _know(self, node: fx.Node, tensor: torch.Tensor) -> None:
        alias = tensor.detach()  # its dims stay as they are if the tensor's are changed in place
        VAL.set(node, alias)
        self.nodes[_key(tensor)] = node
        self.kept.append(alias)


class _Mode(internals.TorchDispatchMode):
    """Records operations as they run, below every level of torch.func; operations of derivatives too."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.native_batch_norm.default and args[3] is not None:
            func = aten._native_batch_norm_legit.default  # its schema states the write to statistics
        operands = self.recording.operands((args, kwargs), held=_has_shape_of_values(func))
        result = func(*args, **kwargs)
        if _draws(func, args, kwargs):
            self._drawn(func, args, kwargs, operands, result)
        elif internals.schema(func).is_mutable or any(True for _ in _tensors(result)):
            self.recording.call(func, operands[0], operands[1], result)
        return result

    def _drawn(self, func: Any, args: Any, kwargs: Any, operands: Any, result: Any) -> None:
        """Record a draw as a constant, which a draw in place writes over its operand."""
        if func is aten.native_dropout.default:
            _, mask = result
            scale = 1.0 / (1.0 - args[1]) if args[1] < 1 else 0.0
            kept = self.recording.constant(mask * scale)
            self.recording.call(aten.mul.Tensor, (operands[0][0], kept), {}, result[0])
            return
        for tensor in _tensors(result):
            if self.recording.nodes.get(_key(tensor)) is None:
                self.recording.constant(tensor)
            else:
                into = self.recording.node_of(tensor)
                value = self.recording.constant(tensor.detach().clone())
                self.recording.call(aten.copy_.default, (into, value), {}, tensor)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in internals.schema(func).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return not ("dropout_p" in names and given.get("dropout_p", 0.0) == 0.0)


def _has_shape_of_values(func: Any) -> bool:
    """Whether a mask among the operands determines the result's shape."""
    return torch.Tag.dynamic_output_shape in func.tags or func in _SCATTERS


_SCATTERS = (aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor))


def _key(tensor: torch.Tensor) -> _Key:
    """A tensor's memory, offset and strides."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise PurityError(
            f"{source.begins_here()}roundings of sparse, nested and quantized tensors are not measured. "
            "Compare dense ones, as by x.to_dense()."
        )
    return (
        internals.storage_id(tensor),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )

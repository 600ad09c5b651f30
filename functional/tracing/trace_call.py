"""Tracing one call of a function to a Program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.errors import PurityError
from torchard.functional.core.placed import is_placed
from torchard.functional.effects.unused_results import check_used, effects_in
from torchard.functional.guards.closures import reader_of
from torchard.functional.guards.present_cells import with_present_cells
from torchard.functional.programs.program import FREE, Leaf, Program
from torchard.functional.programs.tags import WEAK
from torchard.functional.tracing.object_results import (
    check_unchanged,
    has_objects,
    restored,
    with_objects,
)
from torchard.functional.tracing.purify import purify
from torchard.functional.tracing.record import Recording, record
from torchard.functional.tracing.settings import Settings
from torchard.functional.tracing.signature import Arguments, specs_of_arguments
from torchard.functional.tracing.trace_state import Closure, active, split_by, splitting

__all__ = ["OutTree", "placed_as", "trace_call"]


def trace_call(
    fn: Callable[..., Any],
    arguments: Arguments,
    paths: Sequence[str],
    *,
    grad_mode: bool = True,
    called: bool = True,
) -> Program:
    """The program of one call with these arguments.

    Args:
        grad_mode: torch's grad mode inside fn.
        called: whether the arguments belong to a call, so that fn sees their autograd state.
    """
    traced = frozenset(arguments.traced)
    leaves = zip(paths, arguments.leaves, strict=True)
    static = {path: leaf for i, (path, leaf) in enumerate(leaves) if i not in traced}
    flat_fn = _FlatFunction(fn, arguments, static)
    specs = specs_of_arguments(arguments)
    names = [paths[i] for i in arguments.traced]
    given = [arguments.leaves[i] for i in arguments.traced]
    recorded = record(flat_fn, specs, grad_mode=grad_mode, given=given if called else None, paths=names)
    effects = effects_in(recorded.graph)
    recording = purify(recorded, names, static)
    check_used(effects, recording.graph)
    lifted = [closure for closure in recording.closures if not closure.made]
    constants = [closure for closure in recording.closures if closure.made]
    for closure in lifted:
        closure.reader = reader_of(fn, closure.value)
    for node, spec in zip(recording.graph.find_nodes(op="placeholder"), specs, strict=False):
        if spec.weak:
            WEAK.set(node, True)
    return Program(
        graph=recording.graph,
        inputs=(
            *(Leaf(path, _tag(leaf)) for path, leaf in zip(names, given, strict=True)),
            *(Leaf(_path_to(closure), closure.tag, "closure") for closure in lifted),
            *(Leaf(f"constant {i}", role="constant") for i, _ in enumerate(constants)),
        ),
        outputs=_outputs(flat_fn.paths, recording),
        in_tree=arguments.structure,
        out_tree=flat_fn.result,
        name=getattr(fn, "__name__", type(fn).__name__),
        asks=tuple(dict.fromkeys(recording.asks)),
        closures=tuple(lifted),
        constants=tuple(closure.value for closure in constants),
        retrace=flat_fn.retrace(lifted) if recording.without_grad else None,
        forgets_turns=recording.forgets_turns,
        reads_autograd=recording.reads_autograd,
    )


def _outputs(paths: Sequence[str], recording: Recording) -> tuple[Leaf, ...]:
    """The leaves of the results; a result that is a gradient names its input."""
    places = {node: i for i, node in enumerate(recording.graph.find_nodes(op="placeholder"))}
    of = [None if primal is None else places.get(primal) for primal in recording.primals]
    return tuple(Leaf(path, FREE, "output", i) for path, i in zip(paths, of, strict=True))


def placed_as(program: Program, arguments: Arguments) -> Program:
    """The program of a call with the same trace, whose arguments are placed as these."""
    placed = [_tag(leaf) for leaf in arguments.values]
    given = [replace(leaf, tag=tag) for leaf, tag in zip(program.inputs, placed, strict=False)]
    return replace(program, inputs=(*given, *program.inputs[len(given) :]))


def _tag(leaf: Any) -> Any:
    return leaf.__torchard_placed__().placement if is_placed(leaf) else None


def _path_to(closure: Closure) -> str:
    """The path of a closure, for messages and plans: ``closure 'p['w1']'``."""
    return "closure" if closure.reader is None else f"closure '{closure.reader}'"


class _FlatFunction:
    """fn as a function of flat tensors, which records the tree of its result.

    Args:
        static: the arguments that are not traced, by their paths in the call.

    Attributes:
        result: the tree of the last result, with holes for tensors; None before the first call.
        paths: the path of each tensor in the last result.
    """

    def __init__(
        self, fn: Callable[..., Any], arguments: Arguments, static: Mapping[str, Any]
    ) -> None:
        self.fn = fn
        self.arguments = arguments
        self.static = static
        self.result: Any = None
        self.paths: list[str] = []

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = list(self.arguments.leaves)
        for i, tensor in zip(self.arguments.traced, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = tree.unflatten(self.arguments.structure, leaves)
        output = self.fn(*args, **kwargs)
        self._check_arguments()
        return self._tensors(with_objects(output))

    def _check_arguments(self) -> None:
        state = active()
        if state is not None:
            check_unchanged(self.static, state.native)

    def _tensors(self, output: Any) -> list[torch.Tensor]:
        leaves, structure = tree.flatten(output)
        paths = tree.paths(output, "out")
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise PurityError(
                f"{getattr(self.fn, '__name__', self.fn)} returned {type(output).__name__} without a "
                "tensor: a traced function must return tensors, possibly in dicts, lists and tuples."
            )
        self.paths = [
            path for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, torch.Tensor)
        ]
        self.result = OutTree.of(leaves, structure)
        return tensors

    def retrace(
        self, closures: Sequence[Closure]
    ) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        """fn as a function of its inputs and closures, from which derivatives are traced."""
        traced = frozenset(self.arguments.traced)
        static = [None if i in traced else leaf for i, leaf in enumerate(self.arguments.leaves)]
        self.arguments = replace(self.arguments, leaves=static)  # outlives the call's tensors
        self.fn = with_present_cells(self.fn, tensors=False)
        count = len(traced)
        settings, rewrite = Settings.current(), splitting()

        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            state = active()
            assert state is not None
            operands = tensors[count : count + len(closures)]
            values = [closure.now(self.fn) for closure in closures]
            stood_in = state.standing_in(closures, values, operands)
            with settings.applied(), split_by(rewrite), stood_in:
                return self(tensors[:count])

        return run


class OutTree:
    """The tree of a function's result: static leaves, and holes for tensors.

    Attributes:
        objects: whether nodes of the tree represent objects; see object_results.py.
    """

    def __init__(
        self, structure: Any, static: tuple[Any, ...], holes: tuple[int, ...], objects: bool
    ) -> None:
        self.structure = structure
        self.static = static
        self.holes = holes
        self.objects = objects

    @classmethod
    def of(cls, leaves: Sequence[Any], structure: Any) -> OutTree:
        """The tree of a result with these leaves."""
        holes = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        static = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        objects = has_objects(structure.unflatten(leaves))
        return cls(structure, tuple(static), tuple(holes), objects)

    def build(self, tensors: Sequence[Any]) -> Any:
        """The tree with these values in its holes."""
        return restored(self.nodes(tensors)) if self.objects else self.nodes(tensors)

    def nodes(self, values: Sequence[Any]) -> Any:
        """Like `build`, with nodes in place of objects; values of any type are allowed."""
        if len(values) == len(self.static):
            return self.structure.unflatten(values)
        leaves = list(self.static)
        for hole, value in zip(self.holes, values, strict=True):
            leaves[hole] = value
        return self.structure.unflatten(leaves)

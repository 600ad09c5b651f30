"""Program: one traced pure function, and the contracts of what rewrites and runs it.

A Program is a flat ATen FX graph over *global* values. What other rooms know of a value travels on
the graph as neutral tags, so that this file knows neither meshes nor kernels:

=============  ==================================================================================
node.meta      meaning
=============  ==================================================================================
``val``        fake tensor (or a tuple of them): the global shape, dtype and device
``source``     ``"model.py:12 in mlp"``, the user's line that made the node
``scope``      ``"block/3"``, the enclosing :func:`torchard.scope`
``frames``     the entries of scopes and the calls of transforms it was made in (scope_frames.py)
``segments``   the checkpointed segments it is in, outermost first (segments.py)
``phase``      ``"forward"`` or ``"backward"``
``recompute``  True: made again for the backward; no split may save it
``residual``   True: a split saves the value for the backward
``kernel``     the name of the fused kernel the node stands for
``use``        a record of what the kernel took the place of
``apart``      such a record, on what has come of a kernel that was taken apart again
``fuse``       the rewrites of calls of ``fuse`` it was traced in
``strided``    by whom the value's memory is read by strides (strided_inputs.py)
``layout``     how the value is laid out over a mesh (printable)
``collective`` a record of what the node sends over the network: printable, and it may have a short
               ``title`` and a ``payload``. In a lowered graph, on the calls that do it
``stage``      there, ``"issue"`` or ``"wait"``, where other processes take part
``peers``      there, a sentence on who takes part
=============  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx

__all__ = [
    "FREE",
    "INHERITED",
    "Bound",
    "Finishing",
    "Free",
    "Leaf",
    "Placement",
    "Program",
    "Records",
    "Rewrite",
    "Runtime",
    "finished",
]

Bound = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

# The tags that hold for whatever takes a node's place, or is made beside it on its account.
INHERITED = ("source", "scope", "frames", "segments", "phase", "recompute", "fuse")


class Free:
    """The tag of an output whose placement the rewrites may choose."""

    def __repr__(self) -> str:
        return "FREE"


FREE = Free()


@runtime_checkable
class Placement(Protocol):
    """How one global value is held as several tensors. Hashable; equal placements hold alike."""

    @property
    def width(self) -> int:
        """How many tensors of this process hold the value."""

    def batched(self) -> Placement:
        """The placement of the same value with a new, unsplit dimension in front (vmap)."""

    def wrap(self, parts: Sequence[torch.Tensor]) -> Any:
        """The user's object around these tensors."""

    def rewrite(self) -> Rewrite:
        """What must rewrite a program with such a value if no transform of the stack does."""


@dataclass(frozen=True)
class Leaf:
    """One input or output of a Program.

    Attributes:
        path: where the user knows it from: ``args[0]['w1']``, ``out[1]``, ``closure 'h'``.
        tag: a Placement; None for one plain tensor; FREE (outputs only) for "rewrites choose".
        role: inputs are ``primal | cotangent | tangent | closure | constant | residual``,
            outputs are ``output | gradient | tangent | residual``.
        of: the output a cotangent belongs to, the input a gradient belongs to. A rewrite must
            give a cotangent the tag of its output and a gradient the tag of its input.
        hint: what a transform's ``annotate`` left here for its rewrite, keyed by the transform.
    """

    path: str
    tag: Placement | Free | None = None
    role: str = "primal"
    of: int | None = None
    hint: Any = None

    def batched(self) -> Leaf:
        """The leaf with a new leading dimension."""
        tag = self.tag.batched() if isinstance(self.tag, Placement) else self.tag
        hint = self.hint.batched() if hasattr(self.hint, "batched") else self.hint
        return replace(self, tag=tag, hint=hint)


class Rewrite(Protocol):
    """What a transform does: ``Program -> Program``. Hashable: it is part of every cache key.

    One with a ``stage`` is done before those with a higher one (1 by default), whatever the order in
    which they were said. One with ``wants`` says by it which labelled nodes it is about.
    """

    def annotate(self, program: Program) -> Program:
        """Check a freshly traced program and leave hints on its leaves.

        Runs once per signature on the trace of the user's own function, whose trees are known;
        programs derived from it (joint, vmapped, pushed forward) inherit the leaves.
        """

    def __call__(self, program: Program) -> Program:
        """The rewritten program. Afterwards no output's tag is FREE unless nobody placed it."""

    def inline(self, program: Program) -> Program:
        """The rewritten program for replay inside an outer trace: still global and unplaced."""


@runtime_checkable
class Finishing(Protocol):
    """What a rewrite that has the last word besides does, when nothing else will be done."""

    def finish(self, program: Program) -> Program:
        """The program, with what checkpoints make again in it; it may be changed in place."""


def finished(program: Program, rewrites: Sequence[Finishing]) -> Program:
    """What the last words of some rewrites make of a program."""
    for rewrite in rewrites:
        program = rewrite.finish(program)
    return program


class Runtime(Protocol):
    """What turns a rewritten program into something that runs on tensors."""

    def bind(self, program: Program) -> Bound:
        """A callable on all parts of all inputs, in order, to all parts of all outputs."""


@dataclass
class Program:
    """A traced pure function. Treat the graph as a value: rewrites work on ``copy()``.

    Attributes:
        graph: placeholders first, one per input; the output node holds a tuple with one node (or
            constant, or None) per output.
        inputs, outputs: a Leaf for each, in graph order.
        in_tree, out_tree: the user's trees (None on derived programs, which are flat).
        runtime: who binds it; None runs the graph as it is, one tensor per leaf.
        asks: rewrites that pieces inside the trace asked for (a nested ``shard``); whoever lowers
            the program appends those its own stack lacks.
        name: of the traced function.
        facts: what rewrites and runtimes note for each other; kept by ``copy()``.
        closures: what the inputs of role ``closure`` stand for (see trace.py).
        constants: values of the last inputs, those of role ``constant``: made while tracing.
        again: the function itself, to be run again for derivatives, where the graph alone does
            not show them (gradients switched off inside, autograd.Function).
        forgets_turns: plain autograd on fakes would go wrong in ``again`` (see effects/mutation.py).
    """

    graph: fx.Graph
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    in_tree: Any = None
    out_tree: Any = None
    runtime: Runtime | None = None
    asks: tuple[Rewrite, ...] = ()
    name: str = "f"
    facts: dict[Hashable, Any] = field(default_factory=dict)
    closures: tuple[Any, ...] = ()
    constants: tuple[torch.Tensor, ...] = ()
    again: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None
    forgets_turns: bool = False

    # -- reading ------------------------------------------------------------------------------

    @property
    def placeholders(self) -> list[fx.Node]:
        """The input nodes, one per input."""
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def results(self) -> tuple[Any, ...]:
        """What the output node returns, one per output."""
        values: Any = self.graph.output_node().args[0]
        return tuple(values)

    def extend(self, name: str, val: torch.Tensor) -> fx.Node:
        """A further placeholder behind the others, in a copy that will only be bound: it has no leaf."""
        with self.graph.inserting_after(self.placeholders[-1]):
            node = self.graph.placeholder(name)
        node.meta["val"] = val
        return node

    @property
    def calls(self) -> list[fx.Node]:
        """The nodes that compute something, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @property
    def collectives(self) -> Records:
        """What crosses the network, in order: the ``collective`` tags."""
        return Records(node.meta["collective"] for node in self.calls if "collective" in node.meta)

    @property
    def kernels(self) -> Records:
        """The fused kernels, in order: the ``use`` tags; those that came apart again say so.

        ``.missed``: what is nearly one, or could not become one, each with the reason.
        """
        apart = {id(n.meta["apart"]): n.meta["apart"] for n in self.calls if "apart" in n.meta}
        uses = [*(n.meta["use"] for n in self.calls if "use" in n.meta), *apart.values()]
        misses: tuple[Callable[[], list[Any]], ...] = self.facts.get("misses", ())
        return Records(uses, lambda: [one for found in misses for one in found()])

    # -- making -------------------------------------------------------------------------------

    def copy(self) -> Program:
        """A program whose graph and tags may be changed without changing this one."""
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
        return replace(self, graph=graph, facts=dict(self.facts))


class Records(list[Any]):
    """Records of one kind. Printing uses their class's ``table(records)``, if it has one.

    Args:
        missed: what is nearly such a record, looked for when it is asked for.
    """

    def __init__(
        self, records: Iterable[Any] = (), missed: Callable[[], list[Any]] | None = None
    ) -> None:
        super().__init__(records)
        self._missed = missed

    @cached_property
    def missed(self) -> Records:
        """Of what is nearly such a record, why it is none."""
        return Records(() if self._missed is None else self._missed())

    def __str__(self) -> str:
        table = getattr(type(self[0]), "table", None) if self else None
        own = str(table(self)) if table else "\n".join(map(str, self)) or "none"
        return f"{own}\n\n{self.missed}" if self._missed and self.missed else own

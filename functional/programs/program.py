"""Program: one traced pure function, and the contracts of rewrites and runtimes.

A Program is a flat ATen FX graph over *global* values. Other packages attach information to values as
tags (tagging.py, tags.py), so that this module depends on neither meshes nor kernels. The types below
refer to each other in a circle, and so are in one module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import fx

from torchard.functional.programs.graphs import bytes_of
from torchard.functional.programs.loops import regrouped
from torchard.functional.programs.records import Record, Records, Work
from torchard.functional.programs.tagging import Tag
from torchard.functional.programs.tags import APART, COLLECTIVE, LOOP, USE, VAL
from torchard.functional.torch_internals import ProgramGraph

__all__ = [
    "FREE",
    "Bound",
    "Compiler",
    "Free",
    "Hint",
    "Leaf",
    "Pass",
    "Placement",
    "Program",
    "RankGraph",
    "Rewrite",
    "Runtime",
    "Stage",
    "ordered_passes",
]

H = TypeVar("H")

Bound = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""A bound program: a function from the list of all input tensors to the list of all output tensors.

>>> import torch, torchard as ta
>>> from torchard.transforms import Bound
>>> x = torch.tensor([1.0, 2.0])
>>> double: Bound = ta.trace(lambda x: x + x)(x).bind()
>>> double([x])
[tensor([2., 4.])]
"""


class Free:
    """The tag of an output whose placement the rewrites may choose."""

    def __repr__(self) -> str:
        return "FREE"


FREE = Free()
"""The tag of an output whose placement the rewrites may choose.

>>> import torch, torchard as ta
>>> from torchard.transforms import FREE
>>> program = ta.trace(lambda x: x + x)(torch.ones(2))
>>> [leaf.tag for leaf in program.outputs]
[FREE]
"""


@runtime_checkable
class Placement(Protocol):
    """How one global value is held as several tensors. Hashable; equal placements hold values alike.

    >>> import torch, torchard as ta
    >>> from torchard.transforms import Placement
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> program = ta.trace(lambda x: x + x)(ta.place(torch.ones(4), mesh, ta.P("tp")))
    >>> tag = program.inputs[0].tag
    >>> isinstance(tag, Placement), tag.width, tag
    (True, 2, P('tp') on Mesh(tp=2, virtual))
    """

    @property
    def width(self) -> int:
        """The number of tensors in this process that hold the value."""

    def batched(self) -> Placement:
        """The placement of the same value with a new, unsplit dimension in front (vmap)."""

    def wrap(self, parts: Sequence[torch.Tensor]) -> Any:
        """The user's object around these tensors."""

    def rewrite(self) -> Rewrite:
        """The rewrite that a program with such a value needs, if no transform of the stack covers it."""


class Hint(Protocol):
    """A note that ``annotate`` of a rewrite leaves on a leaf for its ``__call__``.

    >>> from dataclasses import dataclass
    >>> from torchard.transforms import Hint, Leaf
    >>> @dataclass(frozen=True)
    ... class Bits(Hint):
    ...     bits: int
    ...     def batched(self):
    ...         return self
    >>> Leaf("args[0]").hinted(Bits(8)).batched().hint(Bits)
    Bits(bits=8)
    """

    def batched(self) -> Hint:
        """The hint of the same leaf with a new leading dimension."""


@dataclass(frozen=True)
class Leaf:
    """One input or output of a Program.

    Attributes:
        path: what messages call it: ``args[0]['w1']``, ``out[1]``, ``closure 'h'``.
        tag: a Placement; None for one plain tensor; FREE for an output that rewrites may place.
        role: inputs are ``primal | cotangent | tangent | closure | constant | residual``,
            outputs are ``output | gradient | tangent | residual``.
        of: for a cotangent, the index of its output; for a gradient, that of its input. A rewrite must
            give a cotangent the tag of its output and a gradient the tag of its input. For an output,
            the index of the input whose gradient it is, if the function itself takes that gradient.
        hints: what ``annotate`` of rewrites left here for their ``__call__``, one of each type.

    >>> import torch, torchard as ta
    >>> from torchard.transforms import Leaf
    >>> h = torch.ones(2)
    >>> program = ta.trace(lambda params: params["w"] * h)({"w": torch.ones(2)})
    >>> [(leaf.path, leaf.role) for leaf in program.inputs]
    [("args[0]['w']", 'primal'), ("closure 'h'", 'closure')]
    >>> isinstance(program.inputs[0], Leaf)
    True
    """

    path: str
    tag: Placement | Free | None = None
    role: str = "primal"
    of: int | None = None
    hints: tuple[Hint, ...] = ()

    def hint(self, kind: type[H]) -> H | None:
        """The hint of a type; None if no rewrite left one."""
        return next((hint for hint in self.hints if isinstance(hint, kind)), None)

    def hinted(self, hint: Hint) -> Leaf:
        """The leaf with a hint, in place of another one of its type."""
        return replace(self, hints=(*self.unhinted(type(hint)).hints, hint))

    def unhinted(self, kind: type[Hint]) -> Leaf:
        """The leaf without its hint of a type."""
        return replace(self, hints=tuple(hint for hint in self.hints if type(hint) is not kind))

    def batched(self) -> Leaf:
        """The leaf with a new leading dimension."""
        tag = self.tag.batched() if isinstance(self.tag, Placement) else self.tag
        return replace(self, tag=tag, hints=tuple(hint.batched() for hint in self.hints))


class Stage(IntEnum):
    """When a pass runs among others, whatever the order of their stack; the first runs first.

    >>> from torchard.transforms import Stage
    >>> sorted([Stage.PLAN, Stage.RECOMPUTE, Stage.REPLACE])[0].name
    'REPLACE'
    """

    MARK = auto()
    """Marks that later stages read: segments of `checkpoint`."""
    REPLACE = auto()
    """Operations are replaced by others, as `fuse` does."""
    CUT = auto()
    """Operations are assigned to the stages of a pipeline."""
    SLICE = auto()
    """The batch is sliced into microbatches."""
    PLAN = auto()
    """Values are placed, and what runs them is set: `shard`, `jit`. The default."""
    RECOMPUTE = auto()
    """What a backward needs is saved, recomputed or offloaded. Then dead code is removed."""
    SCHEDULE = auto()
    """Collectives, those of recomputed values too, are merged and issued early."""
    ORDER = auto()
    """Operations are put in the order in which they run."""


class Pass(NamedTuple):
    """One pass of a rewrite over a program.

    Attributes:
        stage: when it runs; passes of one stage run in the order of the stack.
        run: from a program to a program. After `Stage.RECOMPUTE` it may change the graph in place.
        reads_loops: whether it takes a program with loops (functional/loops); if not, they are unrolled.
        remedy: what the `UnrolledLoopWarning` advises; without advice there is no warning.

    >>> from dataclasses import dataclass
    >>> import torch
    >>> from torchard.transforms import Pass, Rewrite, Stage, Transformed
    >>> @dataclass(frozen=True)
    ... class Count(Rewrite):
    ...     @property
    ...     def passes(self):
    ...         return Pass(Stage.ORDER, self), Pass(Stage.MARK, self.first)
    ...     def first(self, program):
    ...         print(len(program.calls), "operations as traced")
    ...         return program
    ...     def __call__(self, program):
    ...         print(len(program.calls), "operations that run")
    ...         return program
    >>> _ = Transformed(lambda x: x.sin(), [Count()])(torch.ones(3))
    1 operations as traced
    1 operations that run
    """

    stage: Stage
    run: Callable[[Program], Program]
    reads_loops: bool = False
    remedy: str = (
        "If it treats all iterations alike, list it in the rewrite's passes with reads_loops=True."
    )

    def __call__(self, program: Program) -> Program:
        """The program after this pass."""
        after: Any = self.run(program)
        if not isinstance(after, Program):
            raise TypeError(f"{self.name} returned {after!r}, and a pass must return a Program.")
        return after

    @property
    def name(self) -> str:
        """What messages call it: its function, or the class of its rewrite."""
        return str(getattr(self.run, "__qualname__", type(self.run).__name__))


def ordered_passes(stack: Iterable[Rewrite]) -> tuple[list[Pass], list[Pass]]:
    """The passes of a stack in the order in which they run: until dead code is removed, and after."""
    passes = sorted((one for rewrite in stack for one in rewrite.passes), key=lambda one: one.stage)
    late = [one for one in passes if one.stage > Stage.RECOMPUTE]
    return passes[: len(passes) - len(late)], late


class Rewrite:
    """What a transform does: ``Program -> Program``. Hashable: it is part of every cache key.

    A rewrite preserves values up to rounding. Derivatives are those of the program before it, which is
    differentiated first: the rewrite is then called on the derivative's program (joint, pulled back,
    pushed forward or batched), whose leaves are inherited. So rewriting and differentiating commute,
    and a rewrite needs no rule for autograd, vmap or jvp. It may replace, add, reorder and drop
    operations, tag nodes (tags.py), give leaves Placements and set a Runtime. It may not change the
    number or order of leaves, mutate the graph that it is given, or read values. What changes values on
    purpose is a `ValueRewrite` (value_rewrite.py).

    Attributes:
        stage: when ``__call__`` runs among the passes of a stack.
        passes: what runs when: ``__call__`` at ``stage``, or several passes, as a property. If all of
            them read loops, an ``inline`` of its own takes programs in which a loop is one node.
        asks: further rewrites that must run in the same lowering.
        donate_argnums: positions of the arguments whose memory the call may take.
        sizes: those of the axes over which it may split a dim; see ``whole``.

    >>> from dataclasses import dataclass
    >>> import torch
    >>> from torchard.transforms import Rewrite, Transformed, op_name
    >>> @dataclass(frozen=True)
    ... class DropDoubleNegation(Rewrite):
    ...     def __call__(self, program):
    ...         program = program.copy()
    ...         for node in program.calls:
    ...             if op_name(node) == "aten.neg" == op_name(node.args[0]):
    ...                 node.replace_all_uses_with(node.args[0].args[0])
    ...         program.graph.eliminate_dead_code()
    ...         return program
    >>> f = Transformed(lambda x: (-(-x)).sin(), [DropDoubleNegation()])
    >>> [op_name(node) for node in f.lower(torch.ones(3)).calls]
    ['aten.sin']
    >>> torch.func.grad(f)(torch.tensor(0.0))
    tensor(1.)
    """

    stage: Stage = Stage.PLAN
    donate_argnums: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (Pass(self.stage, self),)

    @property
    def asks(self) -> tuple[Rewrite, ...]:
        return ()

    def annotate(self, program: Program) -> Program:
        """Check a freshly traced program and leave hints on its leaves.

        Runs once per signature on the trace of the user's own function, whose trees are known;
        programs derived from it (joint, vmapped, pushed forward) inherit the leaves.
        """
        return program

    def __call__(self, program: Program) -> Program:
        """The rewritten program. A rewrite that places values also places the outputs that are FREE."""
        raise TypeError(f"{type(self).__name__} has neither __call__ nor passes: define one of them.")

    def whole(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """A value of a trace in progress, which must not be split along a dim.

        A function may be written for axes of known ``sizes``, so that less is moved (`associative_scan`).
        """
        return x

    def failed(self, error: Exception) -> None:
        """Called with the error of a call, which may have come before the program was run.

        Where a program runs in several processes, the others may wait for this one.
        """

    def inline(self, program: Program) -> Program:
        """The rewritten program for replay inside an outer trace: still global and unplaced.

        By default all passes run, on the bodies of loops too.
        """
        for one in sorted(self.passes, key=lambda one: one.stage):
            program = one(program)
        return program

    def covers(self, other: Rewrite) -> bool:
        """Whether this rewrite does what another one would, which then need not run."""
        return self == other

    def wants(self, node: fx.Node) -> bool:
        """Whether a labelled value must survive until this rewrite runs."""
        return False


class RankGraph(NamedTuple):
    """What one rank runs: a graph, and fake tensors like its inputs.

    Attributes:
        home: its coordinates along the axes of pipelines.
    """

    graph: fx.Graph
    inputs: list[torch.Tensor]
    home: Mapping[str, int] = MappingProxyType({})

    @staticmethod
    def of(program: Program) -> RankGraph:
        """What a process runs that holds each value whole."""
        return RankGraph(program.graph, [VAL.of(node) for node in program.placeholders])


class Runtime(ABC):
    """What binds a rewritten program to a callable on tensors.

    The defaults are those of one process that holds each value whole, in one tensor.

    >>> from dataclasses import dataclass, replace
    >>> import torch
    >>> from torchard.transforms import Lowered, Rewrite, Runtime, Transformed
    >>> class Timed(Runtime):
    ...     def bind(self, program):
    ...         bound = Lowered.of(replace(program, runtime=None)).bind()
    ...         def run(parts):
    ...             print(f"running {program.name}")
    ...             return bound(parts)
    ...         return run
    >>> @dataclass(frozen=True)
    ... class Time(Rewrite):
    ...     def __call__(self, program):
    ...         return replace(program, runtime=Timed())
    >>> def double(x):
    ...     return x + x
    >>> Transformed(double, [Time()])(torch.ones(2))
    running double
    tensor([2., 2.])
    """

    @abstractmethod
    def bind(self, program: Program) -> Bound:
        """A callable on all parts of all inputs, in order, to all parts of all outputs."""

    def graph(self, program: Program) -> fx.GraphModule | None:
        """The graph that this process runs, for a compiler; None if there is no such graph."""
        return None

    def guard(self, program: Program, bound: Bound, graph: fx.Graph) -> Bound:
        """The callable with the checks and agreements that each call needs first.

        Args:
            graph: the graph that this process runs.
        """
        return bound

    def residual_tag(self, node: fx.Node) -> Placement | None:
        """The placement of a residual between the forward and the backward."""
        return None

    def bytes_of(self, node: fx.Node, item: int = 0) -> int:
        """Bytes of a value, or of one item of a tuple, on the device that holds most of it."""
        return bytes_of(node, item)

    def ranks(self, program: Program, direct: bool = False) -> Sequence[RankGraph]:
        """What single ranks run; of those that hold equally much, one.

        Args:
            direct: whether they send to each other directly, as generated code does, and not by
                broadcasts, as compilers need.
        """
        return [RankGraph.of(program)]

    def work(self, program: Program) -> Work | None:
        """How the plan splits the work; None on a single device."""
        return None


class Compiler(Protocol):
    """How a program is compiled, in place of running generated Python; see `jit`.

    >>> from dataclasses import dataclass, replace
    >>> import torch
    >>> from torchard.transforms import Compiler, Lowered, Rewrite, Transformed
    >>> class Interpreter(Compiler):
    ...     donate_argnums = ()
    ...     def bind(self, program):
    ...         run = torch.fx.Interpreter(torch.fx.GraphModule({}, program.graph))
    ...         return lambda parts: list(run.run(*parts))
    >>> @dataclass(frozen=True)
    ... class Interpret(Rewrite):
    ...     def __call__(self, program):
    ...         return replace(program, compiler=Interpreter())
    >>> Transformed(lambda x: x + x, [Interpret()])(torch.ones(2))
    tensor([2., 2.])
    """

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the arguments whose memory the call may take."""

    @property
    def runs_updates(self) -> bool:
        """Whether it runs operations that update many parameters, each by one kernel of torch."""
        return False

    @property
    def keeps_loops(self) -> bool:
        """Whether it compiles the body of a loop once; if not, loops cost what their iterations do."""
        return True

    def bind(self, program: Program) -> Bound:
        """As `Runtime.bind`."""


@dataclass
class Program:
    """A traced pure function. Treat the graph as a value: rewrites work on ``copy()``.

    Attributes:
        graph: placeholders first, one per input; the output node holds a tuple with one node (or
            constant, or None) per output.
        inputs, outputs: a Leaf for each, in graph order.
        in_tree, out_tree: the user's trees (None on derived programs, which are flat).
        runtime: what binds it; None runs the graph as it is, one tensor per leaf.
        compiler: what compiles the runtime's graph of it; None runs generated Python.
        stack: the rewrites of the lowering in progress, innermost first.
        differentiable: for a joint program, which outputs depend on the inputs that it differentiates.
        asks: the rewrites that transforms inside the trace asked for (a nested ``shard``); lowering
            appends those that its stack lacks.
        name: the name of the traced function.
        misses: functions that find near misses of kernels, each with the reason.
        written: functions that find what kernels could compute and is left as it is written.
        unrolled: which loops were unrolled, and for which pass.
        closures: what the inputs of role ``closure`` stand for (see tracing/trace_state.py).
        constants: the values of the last inputs, those of role ``constant``, made while tracing.
        retrace: the function itself, to be run again for derivatives where the graph does not
            determine them (gradients switched off inside, autograd.Function).
        forgets_turns: whether plain autograd on fakes is wrong in ``retrace`` (effects/mutation.py).
        reads_autograd: whether it depends on which inputs require gradients (tracing/autograd_state.py).

    >>> import torch, torchard as ta
    >>> from torchard.transforms import Program
    >>> def affine(x, w, b):
    ...     return x @ w + b
    >>> program = ta.trace(affine)(torch.ones(2, 3), torch.ones(3, 4), torch.ones(4))
    >>> isinstance(program, Program), program.name
    (True, 'affine')
    >>> [node.name for node in program.calls], [leaf.path for leaf in program.outputs]
    (['mm', 'add'], ['out'])
    """

    graph: fx.Graph
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    in_tree: Any = None
    out_tree: Any = None
    runtime: Runtime | None = None
    compiler: Compiler | None = None
    stack: tuple[Rewrite, ...] = ()
    differentiable: tuple[bool, ...] = ()
    asks: tuple[Rewrite, ...] = ()
    name: str = "f"
    misses: tuple[Callable[[], list[Any]], ...] = ()
    written: tuple[Callable[[], Records], ...] = ()
    unrolled: str = ""
    closures: tuple[Any, ...] = ()
    constants: tuple[torch.Tensor, ...] = ()
    retrace: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None
    forgets_turns: bool = False
    reads_autograd: bool = False

    # -- reading ------------------------------------------------------------------------------

    @property
    def placeholders(self) -> list[fx.Node]:
        """The input nodes, one per input."""
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def output(self) -> fx.Node:
        """The output node; its tags are those of the program as a whole."""
        return self.graph.output_node()

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes that are returned, one per output."""
        values: Any = self.graph.output_node().args[0]
        return tuple(values)

    @property
    def is_joint(self) -> bool:
        """Whether it has a backward, which follows its forward."""
        return any(leaf.role == "cotangent" for leaf in self.inputs)

    def extend(self, name: str, val: torch.Tensor) -> fx.Node:
        """Add a placeholder after the others, without a leaf, to a copy that will only be bound."""
        with self.graph.inserting_after(self.placeholders[-1]):
            node = self.graph.placeholder(name)
        VAL.set(node, val)
        return node

    @property
    def calls(self) -> list[fx.Node]:
        """The nodes that compute something, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @property
    def collectives(self) -> Records:
        """The collectives, in order: the ``collective`` tags.

        Those of a loop are listed once for each iteration; the table shows them once, with "× n".
        """
        records, shown = _records(self.graph, COLLECTIVE)
        return Records(records, shown=shown)

    @property
    def kernels(self) -> Records:
        """The fused kernels, in order: the ``use`` tags, and the kernels that were decomposed again.

        Then the operations that kernels could compute and that are left as they are written. ``.missed``:
        near misses, and matches that could not be replaced, each with the reason.
        """
        apart = {id(APART.of(n)): APART.of(n) for n in self.calls if APART.on(n)}.values()
        left = [found() for found in self.written]
        uses, shown = _records(self.graph, USE)
        return Records(
            [*uses, *apart, *(record for records in left for record in records)],
            lambda: [miss for misses in self.misses for miss in misses()],
            [*(shown or uses), *apart, *(record for records in left for record in records.shown)],
        )

    # -- copying ------------------------------------------------------------------------------

    def copy(self) -> Program:
        """A copy whose graph and tags may be changed without changing this one."""
        graph = ProgramGraph()
        env: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
        return replace(self, graph=graph)


def _records(graph: fx.Graph, tag: Tag[Any]) -> tuple[list[Record], list[Record] | None]:
    """The records of a graph's nodes in the order in which they run, and those that a table shows."""
    tagged = [node for node in graph.nodes if node.op == "call_function" and tag.on(node)]
    if not any(map(LOOP.on, tagged)):
        return [tag.of(node) for node in tagged], None
    records: list[Record] = []
    shown: list[Record] = []
    for loop, nodes in groupby(regrouped(graph), key=LOOP.get):
        own: list[Record] = [tag.of(node) for node in nodes if tag.on(node)]
        if loop is None:
            records += own
            shown += own
        else:
            records += [record.in_iteration(i) for i in loop.order() for record in own]
            shown += [record.repeated(loop.count) for record in own]
    return records, shown

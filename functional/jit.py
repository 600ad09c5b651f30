"""jit: trace a function, then compile its program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.profiler import record_function

from torchard.functional import torch_internals as internals
from torchard.functional.checks.looks import checks_in, wrong
from torchard.functional.compiling.compile_once import compiled_once
from torchard.functional.compiling.compile_progress import CompileProgress
from torchard.functional.compiling.compiler_repairs import REPAIRS, has_half_precision
from torchard.functional.compiling.faulty_lowerings import call_torch
from torchard.functional.compiling.region_donation import donated_operands
from torchard.functional.compiling.regions import by_regions
from torchard.functional.compiling.small_products import sum_small_products
from torchard.functional.compiling.writes_in_place import write_in_place
from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import CheckError, PurityError
from torchard.functional.core.locks import Lock
from torchard.functional.engine.lowered_function import width
from torchard.functional.engine.transformed import Transformed
from torchard.functional.execution.binding import BoundLater, Compiling
from torchard.functional.execution.choices import effects_of_branches, outlined
from torchard.functional.execution.codegen import compiled
from torchard.functional.execution.donated import donated_parts, own
from torchard.functional.execution.failures import compiled_failed
from torchard.functional.memory.planned import Planned, PlannedHalves
from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.program import Bound, Pass, Program, Rewrite, Stage
from torchard.functional.programs.records import Record
from torchard.functional.programs.tagging import strip
from torchard.functional.programs.tags import CHECKS, HALVES, Checks
from torchard.functional.programs.views import is_dense
from torchard.functional.remat.barrier import insert_barriers, keep_compared
from torchard.functional.remat.split import Split

__all__ = ["Compile", "jit"]


@checked
def jit(
    fn: Callable[..., Any],
    *,
    backend: str = "inductor",
    donate_argnums: int | Sequence[int] = (),
    memory: Literal["allocated", "planned"] = "allocated",
) -> Transformed:
    """Trace a function once per signature, and compile the program.

    The flat graph of the traced (and sharded, checkpointed, fused) program goes to a backend of
    `torch.compile`, forward and backward separately. `torch.compile` on the function itself would not do:
    with autograd Functions under `torch.func` transforms it is silently wrong (torch 2.13).

    Args:
        fn: a pure function of pytrees.
        backend: any backend of `torch.compile`; ``"eager"`` runs generated straight-line Python.
        donate_argnums: positions of arguments whose memory the call may reuse. Using such a tensor
            afterwards raises DonatedError. What the function writes to them is written in place, and
            Inductor's kernels write results over them; one whose memory something else holds is copied
            first.
        memory: ``"allocated"`` asks the allocator for each value; ``"planned"``, of the backend
            ``"eager"``, gives each one a place in memory that is reserved once (functional/memory).
            Results are always outside of that memory; those of a step that donates its arguments take
            theirs. Values are the same bit for bit, but for products within a merged collective, which
            may round otherwise if not aligned.

    Returns:
        A function that computes what ``fn`` does, with ``.lower`` and ``.lower_joint``. Tensors and
        floats are traced; shapes, dtypes, devices, strides and all other arguments make up the signature.

    Raises:
        ValueError: the backend does not exist, ``memory`` is neither of the two or planned of a compiler,
            a position is negative, or the call has no positional argument there. The first and the last
            are raised when the function is called.

    >>> import torch, torchard as ta
    >>> traced = []
    >>> def double(x):
    ...     traced.append(x.shape)                     # runs while tracing only
    ...     return x + x
    >>> run = ta.jit(double, backend="eager")
    >>> run(torch.ones(2)), run(torch.zeros(2)), run(torch.ones(3))
    (tensor([2., 2.]), tensor([0., 0.]), tensor([2., 2., 2.]))
    >>> traced
    [torch.Size([2]), torch.Size([3])]
    """
    if memory not in ("allocated", "planned"):
        raise ValueError(f'jit(memory={memory!r}): pass "allocated" or "planned".')
    if memory == "planned" and backend != "eager":
        raise ValueError(
            f'jit(memory="planned", backend={backend!r}): compiled code allocates by itself. '
            'Pass backend="eager" for planned memory, or leave memory out; donate_argnums is for both.'
        )
    numbers = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    if any(n < 0 for n in numbers):
        raise ValueError(
            f"jit(donate_argnums={donate_argnums!r}): positions of arguments count from 0."
        )
    return Transformed(fn, (Compile(backend, numbers, memory == "planned"),))


@dataclass(frozen=True)
class Compile(Rewrite):
    """The rewrite of `jit`: sets the program's compiler and leaves the graph as it is."""

    backend: str = "inductor"
    donate_argnums: tuple[int, ...] = ()
    planned: bool = False

    @property
    def passes(self) -> tuple[Pass, ...]:
        chosen = Pass(Stage.PLAN, self, reads_loops=True)
        if self.backend == "eager":
            return (chosen,)
        return chosen, Pass(Stage.SCHEDULE, keep_compared, reads_loops=True)

    @property
    def runs_updates(self) -> bool:
        """Of a compiler: whether it leaves updates of many parameters out of what is compiled."""
        return self.backend in ("eager", "inductor")

    @property
    def keeps_loops(self) -> bool:
        """See `Compiler`."""
        return self.backend != "eager"

    def annotate(self, program: Program) -> Program:
        """Check that the donated positions are positions of the call's arguments."""
        args, _ = tree.unflatten(program.in_tree, [None] * program.in_tree.num_leaves)
        beyond = [n for n in self.donate_argnums if n >= len(args)]
        if beyond:
            raise ValueError(
                f"jit(donate_argnums={beyond[0]}): {program.name} was called with {len(args)} positional "
                "arguments, which count from 0. Donated arguments are passed by position."
            )
        return program

    def __call__(self, program: Program) -> Program:
        return replace(program, compiler=self)

    def inline(self, program: Program) -> Program:
        """The program as it is: inside another trace, the outermost transform decides how it runs."""
        return program

    def bind(self, program: Program) -> Bound:
        """The compiled program, from the runtime's graph of it if there is a runtime."""
        if self.backend == "eager" and not self.planned:
            return _generated(program)
        generated = BoundLater(lambda: _generated(program))
        if self.planned and program.runtime is None:
            return self._planned(program.copy().graph, generated, program)
        module = _flat_module(program)
        if module is None:
            return generated
        if self.planned:
            run = self._planned(module.graph, generated, program)
        else:
            run = self._compiled(module, generated, program)
        return run if program.runtime is None else program.runtime.guard(program, run, module.graph)

    def _planned(self, graph: fx.Graph, generated: Bound, program: Program) -> Bound:
        """The graph in planned memory; a backward shares that of its forward, which is bound first.

        Raises:
            PurityError: a branch has an effect; planned memory computes all branches.
        """
        if checks_in(graph) is not None:
            raise PurityError(
                f"{program.name} is checked, and jit(memory='planned') cannot look at each result: leave "
                "out memory='planned' while you look for an error."
            )
        for effect in effects_of_branches(graph):
            raise PurityError(
                f"{effect.where}{effect.name} is called in a branch, and jit(memory='planned') computes "
                "all branches. Call it outside of the branch, or leave out memory='planned'."
            )
        halves: Split | None = HALVES.get(program.output)
        if halves is None:
            donated = donated_parts(program)
            return Planned(graph, generated, program.name, donated)
        if program is halves.forward:
            saved, count = halves.parts(width)
            name = program.name.removesuffix("_forward")
            both = PlannedHalves(graph, generated, saved, count, name)
            halves.bound[self] = both
            return both.forward
        both = halves.bound[self]
        assert isinstance(both, PlannedHalves)
        return both.with_backward(graph, generated).backward

    def _compiled(
        self, module: fx.GraphModule, generated: Bound, program: Program
    ) -> _Compiled | _Regions:
        """The module, or its regions, compiled when they are first called."""
        progress = CompileProgress(program.name)

        def region(graph: fx.Graph, repeated: bool = False) -> Bound:
            insert_barriers(graph)
            if repeated and self.backend == "inductor":
                sum_small_products(graph)
            part = fx.GraphModule(torch.nn.Module(), graph)
            return _Compiled(part, compiled(graph, program.name), self.backend, progress)

        def block(graph: fx.Graph) -> Bound:
            graph = outlined(graph, block) or graph
            outer = by_regions(graph, region)
            return region(graph) if outer is None else compiled(outer, program.name)

        # Arguments of a forward are residuals, too.
        whole_step = self.backend == "inductor" and not HALVES.on(program.output)
        whole_step &= checks_in(module.graph) is None  # else it may run again
        donated = donated_parts(program) if whole_step else []
        graph = outlined(module.graph, block) or module.graph
        outer = by_regions(graph, region, may_write=whole_step)
        if outer is not None:
            for run, positions in donated_operands(outer, donated).items() if whole_step else ():
                assert isinstance(run, _Compiled)
                run.donated = positions
            return _Regions(compiled(outer, program.name, donated), generated)
        insert_barriers(module.graph)
        module.recompile()
        whole = _Compiled(module, generated, self.backend, progress, program.collectives)
        whole.donated = donated
        return whole


def _generated(program: Program) -> Bound:
    """The program as Python code."""
    if program.runtime is not None:
        return program.runtime.bind(program)
    return compiled(program.graph, program.name, donated_parts(program))


def _flat_module(program: Program) -> fx.GraphModule | None:
    """The graph that this process runs, as a module; None if the runtime has no such graph."""
    if program.runtime is not None:
        return program.runtime.graph(program)
    graph = program.copy().graph
    for node in graph.find_nodes(op="placeholder"):
        node.target = node.name  # what a module's forward calls it: targets may be equal
    return fx.GraphModule(torch.nn.Module(), graph)


class _Regions(Compiling):
    """A program of compiled regions."""

    def __init__(self, run: Bound, generated: Bound) -> None:
        self.run, self.generated = run, generated

    def __call__(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.generated(parts) if internals.has_modes() else self.run(parts)


def _settings() -> tuple[bool, str]:
    """torch's settings that compilers read, and that a trace does not depend on."""
    return torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()


class _Compiled(Compiling):
    """A program that is compiled at its first call, and again for inputs of other strides or settings.

    Whatever else the compiled code depends on is part of the signature of the call.

    Attributes:
        donated: the positions of inputs that the compiled code may write over.
    """

    donated: Sequence[int] = ()

    def __init__(
        self,
        module: fx.GraphModule,
        generated: Bound,
        backend: str,
        progress: CompileProgress,
        collectives: Sequence[Record] = (),
    ) -> None:
        self.module = module
        self.generated = generated
        self.checks = checks_in(module.graph)
        # By result, what is looked for in it: nothing in an input, or in what is not checked.
        self.own = [CHECKS.get(node) for node in output_values(module.graph)]
        self.backend = backend
        self.name = self.__name__ = progress.name
        self.progress = progress
        progress.total += 1
        self.collectives = collectives
        # The compiled code, and the positions of inputs that it writes over.
        self.by_key: dict[Any, tuple[Callable[..., Any], list[int]]] = {}
        self.lock = Lock()

    def __call__(
        self, parts: Sequence[torch.Tensor], owned: Sequence[int] = ()
    ) -> list[torch.Tensor]:
        """Run it.

        Args:
            owned: the positions of inputs that may be written over, whatever else holds them.
        """
        if internals.has_modes():  # a tracer must see the operations
            return self.generated(parts)
        run, donated = self._made(parts)
        inputs = parts if isinstance(parts, list) else list(parts)
        if shared := [i for i in donated if i not in owned]:
            own(inputs, shared)
        try:
            if internals.profiler_enabled():
                # Operations inside compiled code have no ranges of their own.
                with record_function(f"{self.name}, compiled by {self.backend}"):
                    return list(run(inputs))
            return list(run(inputs)) if self.checks is None else self._checked(run, inputs, self.checks)
        except Exception as error:  # re-raised with a note, or as a CollectiveError
            compiled_failed(error, self.name, self.backend, self.collectives)
            raise

    def _checked(
        self, run: Callable[..., Any], inputs: list[torch.Tensor], checks: Checks
    ) -> list[torch.Tensor]:
        """The results; if one is wrong, the operations run one by one, and are looked at."""
        results = list(run(list(inputs)))
        if any(wrong(x, checks) for x in results):
            self.generated(tuple(inputs))  # raises an error at a checked operation
            if any(own is not None and wrong(x, own) for x, own in zip(results, self.own, strict=True)):
                raise CheckError(
                    f"what {self.backend} compiled of {self.name} returned wrong values that its "
                    "operations, one by one, do not"
                )
        return results

    def prepare(self, parts: Sequence[torch.Tensor]) -> None:
        """See `Compiling`."""
        self._made(parts)

    def code_for(self, parts: Sequence[torch.Tensor]) -> Callable[..., Any] | None:
        """Inductor's code for parts of these strides, if calls of this run it and nothing else."""
        if self.backend != "inductor" or self.checks is not None or self.donated:
            return None
        return self._made(parts)[0]

    def _made(self, parts: Sequence[torch.Tensor]) -> tuple[Callable[..., Any], list[int]]:
        """The compiled code for parts of these strides, and the inputs that it writes over."""
        key = (*_settings(), *[part.stride() for part in parts])
        made = self.by_key.get(key)
        if made is None:
            with self.lock:
                made = self.by_key.get(key) or self.by_key.setdefault(key, self._compile(parts))
        return made

    def _compile(self, parts: Sequence[torch.Tensor]) -> tuple[Callable[..., Any], list[int]]:
        module = fx.GraphModule(self.module, self.module.graph)
        strip(module.graph)
        if self.backend == "inductor":
            call_torch(module.graph)
            module.recompile()
        # Other backends keep nothing on disk that another process would find.
        once = compiled_once(module, parts) if self.backend == "inductor" else nullcontext()
        with self.progress.part(), once, warnings.catch_warnings(), torch.no_grad():
            # Importing the compiler warns about torch.jit.
            warnings.simplefilter("ignore")
            # A copy of one that is not dense has other strides.
            donated = [i for i in self.donated if is_dense(parts[i])]
            halves = has_half_precision(module.graph, parts)
            passes = (*REPAIRS, write_in_place)
            run = internals.compile_graph(module, parts, self.backend, passes, donated, halves)
            return run, donated

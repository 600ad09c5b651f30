"""Trials: the operations that a kernel would replace, run as they are written and as the kernel.

A kernel that moves fewer bytes may still be slower: torch's own operations on a few megabytes run in
caches, a product takes its bias along, and a compiler fuses operations with their neighbours. So both are
taken out of the program as programs of their own, and run as the whole program would be: as generated
Python, or by the compiler of the stack, with the neighbours that it would fuse them with.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.bounded import Recent
from torchard.functional.core.errors import KernelError
from torchard.functional.core.outputs import tensors_of
from torchard.functional.execution.binding import bind
from torchard.functional.jit import Compile
from torchard.functional.programs.graphs import computation, extracted
from torchard.functional.programs.kernel_call import Fused
from torchard.functional.programs.program import Bound, Leaf, Program
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import is_view
from torchard.kernels.execution.pool import machine_memory
from torchard.kernels.execution.rank_consensus import agreed_choice
from torchard.kernels.rewriting.plan import Replacement
from torchard.kernels.rewriting.post_passes import in_any_layout

__all__ = ["Trial", "compiler_of"]

_LOG = logging.getLogger("torchard.fuse")

# A kernel pays if it takes at most this part of the time.
_PAYS = 0.95
# Rounds of both, and seconds after which there are no more of them.
_LEAST, _MOST, _SECONDS = 5, 25, 0.1

_VERDICTS: Recent[bool] = Recent(512)


def compiler_of(program: Program) -> Compile | None:
    """What will compile a program that is being lowered; None if it runs as Python."""
    compilers = [r for r in program.stack if isinstance(r, Compile) and r.backend != "eager"]
    return compilers[-1] if compilers else None


class Trial:
    """Operations of a program, before and after kernels replace them.

    Args:
        program: the whole program, before they are replaced.
        plan: their replacement.
        compiler: as `compiler_of` returns it. Then the neighbours are part of the trial, too.
    """

    def __init__(self, program: Program, plan: Replacement, compiler: Compile | None) -> None:
        self.name, self.compiler = program.name, compiler
        self.beside = [] if compiler is None else _neighbours(plan)
        self.operands: list[fx.Node] = []
        self.before = self._part([*plan.gone, *self.beside], plan.results)

    def _part(self, nodes: Iterable[fx.Node], results: Sequence[fx.Node]) -> Program:
        """Some operations as a program; its operands are noted in `operands`, and may be more."""
        inside = {node for node in nodes if not _is_item_of_other(node, nodes)}
        order = list(_in_order(inside))
        read = (n for node in order for n in node.all_input_nodes if n not in inside)
        self.operands = list(dict.fromkeys((*self.operands, *read)))
        results = list(dict.fromkeys((*results, *self.beside)))
        graph = extracted(internals.ProgramGraph(), order, self.operands, results)
        in_any_layout(graph)
        inputs = tuple(Leaf(node.name) for node in self.operands)
        outputs = tuple(Leaf(node.name, role="output") for node in results)
        return Program(graph=graph, inputs=inputs, outputs=outputs, name=self.name)

    @property
    def key(self) -> Hashable:
        """Equal for equal computations."""
        part = self.before
        lines = computation((*part.calls, part.output), part.placeholders)
        values = map(VAL.of, part.placeholders)
        kinds = tuple((tuple(v.shape), v.stride(), v.dtype, v.device) for v in values)
        return kinds, lines, self.compiler, torch.get_num_threads()

    @property
    def feasible(self) -> bool:
        """Whether it can be run here: not on a device that has no memory, and in a part of the memory."""
        held = sum(v.nbytes for n in self.before.graph.nodes for v in tensors_of(VAL.get(n)))
        on_meta = any(VAL.of(node).device.type == "meta" for node in self.operands)
        return held < machine_memory() // 4 and not on_meta

    def pays(self, inserted: Iterable[fx.Node], results: Sequence[fx.Node]) -> bool:
        """Whether it is faster with the kernels; all processes of a group decide alike.

        Args:
            inserted: the operations that replace those of the plan.
            results: what is read in the place of the plan's results.
        """
        uses = tuple(str(node.target) for node in inserted if isinstance(node.target, Fused))
        key = uses, self.key

        def decided() -> bool:
            faster = self._is_faster(self._part([*inserted, *self.beside], results))
            return agreed_choice(repr(key), str(faster)) == "True"

        return _VERDICTS.get(key, decided)

    def _is_faster(self, after: Program) -> bool:
        try:
            with internals.no_modes(), torch.no_grad():
                written, kernel = self._seconds_of(self.before, after)
        except KernelError:  # an implementation that is wrong
            raise
        except Exception as error:  # operations that check values, and compilers, raise anything
            _LOG.info("no trial of %s: %s", self.name, error)
            return False
        return kernel < _PAYS * written

    def _seconds_of(self, *parts: Program) -> list[float]:
        values = [_example(VAL.of(node)) for node in self.operands]
        runs = (bind(replace(part, compiler=self.compiler)) for part in parts)
        given = (values[: len(part.inputs)] for part in parts)
        return _least_seconds(list(zip(runs, given, strict=True)))


def _in_order(inside: set[fx.Node]) -> Iterator[fx.Node]:
    """Some operations, each after its operands: a kernel may have been inserted before its own."""
    done: set[fx.Node] = set()
    todo = sorted(inside, reverse=True)
    while todo:
        node = todo[-1]
        first = [n for n in node.all_input_nodes if n in inside and n not in done]
        if first:
            todo += first
            continue
        todo.pop()
        if node not in done:
            done.add(node)
            yield node


def _neighbours(plan: Replacement) -> list[fx.Node]:
    """The operations just before and after, and the views between.

    A compiler might fuse them, or compute in the memory of their results.
    """

    def reached(nodes: Iterable[fx.Node], onwards: Callable[[fx.Node], Iterable[fx.Node]]) -> None:
        todo = [n for node in nodes for n in onwards(node)]
        while todo:
            node = todo.pop()
            if node.op == "call_function" and node not in plan.gone and node not in found:
                found[node] = None
                todo += onwards(node) if is_view(node) else ()

    found: dict[fx.Node, None] = {}
    reached(plan.gone, lambda node: node.all_input_nodes)
    reached(plan.results, lambda node: node.users)
    return [node for node in found if not isinstance(VAL.get(node), tuple)]


def _is_item_of_other(node: fx.Node, inside: Iterable[fx.Node]) -> bool:
    """Whether a node is one of several results of an operation that is not inside."""
    return node.target is operator.getitem and node.all_input_nodes[0] not in inside


def _example(like: torch.Tensor) -> torch.Tensor:
    """A tensor of this kind: numbers between 0 and 1, or zeros, which are indices everywhere."""
    count = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    count = 0 if 0 in like.shape else count
    if like.dtype.is_floating_point:
        draw = torch.Generator(like.device).manual_seed(0)
        memory = torch.rand(count, generator=draw, device=like.device).to(like.dtype)
    else:
        memory = torch.zeros(count, dtype=like.dtype, device=like.device)
    return memory.as_strided(like.shape, like.stride())


def _least_seconds(runs: Sequence[tuple[Bound, Sequence[torch.Tensor]]]) -> list[float]:
    """The least seconds of each, in turns, after a warm-up in which compilers compile."""
    least = [math.inf] * len(runs)
    began = math.inf
    for number in range(-1, _MOST):
        for i in range(len(runs)):
            seconds = _seconds(*runs[i])
            if number >= 0:
                least[i] = min(least[i], seconds)
        began = perf_counter() if number < 0 else began
        if number >= _LEAST - 1 and perf_counter() - began > _SECONDS:
            break
    return least


def _seconds(run: Bound, values: Sequence[torch.Tensor]) -> float:
    on_device = any(v.device.type != "cpu" for v in values)
    if on_device:
        torch.accelerator.synchronize()
    start = perf_counter()
    result = run(tuple(values))
    if on_device:
        torch.accelerator.synchronize()
    seconds = perf_counter() - start
    del result
    return seconds



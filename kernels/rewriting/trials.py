"""Trials: the operations that a kernel would replace, run as they are written and as the kernel.

A kernel that moves fewer bytes may still be slower: torch's own operations of a few megabytes run in
caches, a product takes its bias along, and a compiler fuses operations with their neighbours. So the
operations are taken out of the program as a program of their own, which is run both ways as the whole
program would be: as generated Python, or by the compiler of the stack. For a compiler the neighbours that
it would fuse them with come along.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.bounded import Recent
from torchard.functional.execution.binding import bind
from torchard.functional.jit import Compile
from torchard.functional.programs.program import Bound, Leaf, Program
from torchard.functional.programs.tagging import forget
from torchard.functional.programs.tags import LOOP, VAL
from torchard.kernels.execution.pool import machine_memory
from torchard.kernels.execution.rank_consensus import agreed_choice

__all__ = ["Trial", "compiler_of"]

# A kernel pays if it takes at most this part of the time.
_PAYS = 0.97
# Rounds of both, and seconds after which there are no more of them.
_LEAST, _MOST, _SECONDS = 5, 25, 0.25

_VERDICTS: Recent[bool] = Recent(512)


def compiler_of(program: Program) -> Compile | None:
    """What will compile a program that is being lowered; None if it runs as Python."""
    compilers = [r for r in program.stack if isinstance(r, Compile) and r.backend != "eager"]
    return compilers[-1] if compilers else None


class Trial:
    """A part of a program as a program.

    Args:
        program: the whole program.
        nodes: the operations.
        results: those of them that are read afterwards.
        compiler: as `compiler_of` returns it. Then their neighbours are part of it, too.
    """

    def __init__(
        self,
        program: Program,
        nodes: Iterable[fx.Node],
        results: Sequence[fx.Node],
        compiler: Compile | None,
    ) -> None:
        self.compiler = compiler
        inside = set(nodes)
        if compiler is not None:
            beside = _fused_with(inside, results)
            results = [*results, *(n for n in beside if not inside.issuperset(n.users))]
            inside |= beside
        order = [node for node in program.graph.nodes if node in inside and not _item_of(node, inside)]
        self.part = _part_of(program, order, list(dict.fromkeys(results)))
        self.values = [VAL.of(node) for node in self.part.placeholders]

    @property
    def key(self) -> Hashable:
        """Equal for parts that are equal computations."""
        numbers = {node: i for i, node in enumerate(self.part.graph.nodes)}

        def line(node: fx.Node) -> Hashable:
            operands = fx.map_arg((node.args, node.kwargs), lambda operand: f"%{numbers[operand]}")
            return str(node.target), repr(operands)

        kinds = tuple((tuple(v.shape), v.stride(), v.dtype, v.device) for v in self.values)
        threads = torch.get_num_threads()
        lines = tuple(line(node) for node in self.part.graph.nodes if node.op != "placeholder")
        return kinds, lines, self.compiler, threads

    @property
    def feasible(self) -> bool:
        """Whether it can be run here: all on a device, and in a small part of the memory."""
        held = sum(v.nbytes for node in self.part.graph.nodes for v in _tensors(VAL.get(node)))
        return held < machine_memory() // 4 and all(v.device.type != "meta" for v in self.values)

    def pays(self, fused: Callable[[Program], Program]) -> bool:
        """Whether the part is faster with kernels; all processes of a group decide alike.

        Args:
            fused: replaces operations of a program by kernels.
        """
        key = self.key
        return _VERDICTS.get(key, lambda: agreed_choice(repr(key), str(self._pays(fused))) == "True")

    def _pays(self, fused: Callable[[Program], Program]) -> bool:
        with internals.no_modes(), torch.no_grad():
            values = [_example(v) for v in self.values]
            runs = [self._bound(self.part), self._bound(fused(self.part))]
            written, kernel = _least_seconds(runs, values)
        return kernel < _PAYS * written

    def _bound(self, program: Program) -> Bound:
        return bind(replace(program, compiler=self.compiler))


def _fused_with(inside: set[fx.Node], results: Sequence[fx.Node]) -> set[fx.Node]:
    """The operations that a compiler might fuse with these: pointwise ones just before and after."""
    before = {n for node in inside for n in node.all_input_nodes}
    after = {n for node in results for n in node.users}
    return {n for n in (before | after) - inside if torch.Tag.pointwise in getattr(n.target, "tags", ())}


def _item_of(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a node is one of several results of an operation that is not inside."""
    return node.target is operator.getitem and inside.isdisjoint(node.all_input_nodes)


def _part_of(program: Program, order: Sequence[fx.Node], results: Sequence[fx.Node]) -> Program:
    graph = internals.ProgramGraph()
    operands = dict.fromkeys(n for node in order for n in node.all_input_nodes)
    env: dict[fx.Node, fx.Node] = {}
    for node in operands:
        if node not in order:
            env[node] = graph.placeholder(f"in{len(env)}")
            VAL.set(env[node], VAL.of(node))
    role = "cotangent" if program.is_joint else "primal"
    inputs = tuple(Leaf(node.name, role=role) for node in env.values())
    for node in order:
        env[node] = graph.node_copy(node, env.__getitem__)
        forget(env[node], LOOP)
    graph.output(tuple(env[node] for node in results))
    outputs = tuple(Leaf(node.name, role="output") for node in results)
    return Program(graph=graph, inputs=inputs, outputs=outputs, name=program.name)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, torch.Tensor)]


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


def _least_seconds(runs: Sequence[Bound], values: Sequence[torch.Tensor]) -> list[float]:
    """The least seconds of each, in turns, after a warm-up in which compilers compile."""
    least = [math.inf] * len(runs)
    began = math.inf
    for number in range(-1, _MOST):
        for i in range(len(runs)):
            seconds = _seconds(runs[i], values)
            if number >= 0:
                least[i] = min(least[i], seconds)
        began = perf_counter() if number < 0 else began
        if number >= _LEAST - 1 and perf_counter() - began > _SECONDS:
            break
    return least


def _seconds(run: Bound, values: Sequence[torch.Tensor]) -> float:
    on_device = values[0].device.type != "cpu"
    if on_device:
        torch.accelerator.synchronize()
    start = perf_counter()
    result = run(tuple(values))
    if on_device:
        torch.accelerator.synchronize()
    seconds = perf_counter() - start
    del result
    return seconds



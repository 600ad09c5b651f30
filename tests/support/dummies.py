"""Rewrites and a placement that do next to nothing, to test the machinery that carries them.

`Pair` holds a value as two halves along one dimension: the smallest placement that has more parts
than values, so that any confusion of the two shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.placed import Facts
from torchard.functional.execution.codegen import compiled
from torchard.functional.programs.program import FREE, Program, Rewrite, Runtime


@dataclass(frozen=True)
class Identity(Rewrite):
    """Copies the program."""

    def annotate(self, program: Program) -> Program:
        return program

    def __call__(self, program: Program) -> Program:
        return program.copy()

    def inline(self, program: Program) -> Program:
        return program.copy()


@dataclass(frozen=True)
class Mark(Identity):
    """Writes a tag on every node, forward and backward."""

    key: str = "layout"
    value: Any = "marked"

    def __call__(self, program: Program) -> Program:
        program = program.copy()
        for node in program.calls:
            node.meta[self.key] = self.value
        return program

    inline = __call__


@dataclass(frozen=True)
class Halves:
    """Held as two tensors along one dimension."""

    dim: int = 0
    width = 2

    def batched(self) -> Halves:
        return Halves(self.dim + 1)

    def wrap(self, parts: Sequence[torch.Tensor]) -> Pair:
        return Pair(list(parts), self)

    def rewrite(self) -> Split:
        return Split()


class Pair:
    """A value in two halves: a leaf for transforms, a node with two children for trees."""

    def __init__(self, parts: list[torch.Tensor], placement: Halves) -> None:
        self.parts, self.placement = parts, placement

    def __torchard_placed__(self) -> Facts:
        first = self.parts[0]
        shape = list(first.shape)
        shape[self.placement.dim] *= 2
        return Facts(torch.Size(shape), first.dtype, first.device, self.placement, tuple(self.parts))

    def full(self) -> torch.Tensor:
        return torch.cat(self.parts, self.placement.dim)


tree.register(
    Pair,
    lambda pair: (pair.parts, pair.placement),
    lambda placement, parts: Pair(list(parts), placement),
)


def halves(value: torch.Tensor) -> Pair:
    return Pair([part.clone() for part in value.chunk(2, 0)], Halves())


class PairRuntime(Runtime):
    """Puts the halves together, runs, and takes the results apart."""

    def bind(self, program: Program) -> Any:
        run = compiled(program.graph)

        def bound(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            rest = iter(parts)
            whole = [
                next(rest)
                if leaf.tag is None
                else torch.cat([next(rest), next(rest)], leaf.tag.dim)
                for leaf in program.inputs
            ]
            assert not list(rest), "more parts than the leaves have"
            found: list[torch.Tensor] = []
            for leaf, value in zip(program.outputs, run(whole), strict=True):
                found += (
                    [value]
                    if leaf.tag is None
                    else [part.clone() for part in value.chunk(2, leaf.tag.dim)]
                )
            return found

        return bound

    def residual_tag(self, node: torch.fx.Node) -> Halves | None:
        return _fits(node.meta["val"])


def _fits(value: torch.Tensor) -> Halves | None:
    return Halves() if value.ndim and value.shape[0] and value.shape[0] % 2 == 0 else None


@dataclass(frozen=True)
class Split(Identity):
    """Holds every output that can be in halves so; needs PairRuntime to run."""

    def __call__(self, program: Program) -> Program:
        program = program.copy()
        outputs = [
            replace(leaf, tag=_fits(node.meta["val"])) if leaf.tag is FREE else leaf
            for leaf, node in zip(program.outputs, program.results, strict=True)
        ]
        inputs = [
            replace(leaf, tag=outputs[leaf.of].tag)
            if leaf.role == "cotangent" and leaf.of is not None
            else leaf
            for leaf in program.inputs
        ]
        assert all(leaf.tag is not FREE for leaf in inputs)
        return replace(program, inputs=tuple(inputs), outputs=tuple(outputs), runtime=PairRuntime())

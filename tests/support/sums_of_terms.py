"""Sums of several terms of one value: the sum and its gradients by two inputs, in one graph.

What a compiler orders and fuses there: reductions by rows, and gradients that are written in place. And
what it must not lose: that a value is read after it was written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from compiler_programs import INEXACT, Trial
from torch._functorch import config as functorch
from torch._inductor import config

__all__ = ["lost_reads", "sums_of_terms"]

Tensor = torch.Tensor

# Of v [m, n] and weights w [n]: what is computed by rows, or by all, ...
BY_ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "amax of rows": lambda v, w: v.amax(1).sum(),
    "below the largest": lambda v, w: F.relu(v - v.max() + 0.125).sum(1).sum(),
    "below the smallest": lambda v, w: F.relu(v - 2 * v.amin()).sum(1).sin().sum(),
    "softmax": lambda v, w: (v.softmax(1) * w).sum(),
    "logsumexp": lambda v, w: v.logsumexp(1).sum(),
    "normalised": lambda v, w: (F.layer_norm(v, v.shape[-1:]) * w).sum(),
    "mean of rows": lambda v, w: (v - v.mean(1, keepdim=True)).pow(2).sum(),
    "max of rows": lambda v, w: v.max(1)[0].sin().sum(),
}
# ... and what has a gradient that is written into zeros.
WRITING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "max of columns": lambda v, w: (v.max(0)[0] * w).sum(),
    "min of columns": lambda v, w: (v.min(0)[0] * w).sum(),
    "median of columns": lambda v, w: (v.median(0)[0] * w).sum(),
    "topk of columns": lambda v, w: (v.topk(2, dim=0)[0] * w).sum(),
    "gathered": lambda v, w: (v.gather(0, v.argmin(0, keepdim=True)) * w).sum(),
    "rows": lambda v, w: (v[torch.tensor([1, 0, 1])] * w).sum(),
    "part": lambda v, w: (v[1:, ::2].cos() * w[::2]).sum(),
    "cummax": lambda v, w: (v.cummax(0)[0] * w).sum(),
    "with a row written": lambda v, w: (v.index_copy(0, torch.tensor([1]), w[None]) * v).sum(),
    "largest of groups": lambda v, w: (_by_groups(v) * w).sum(),
}


def _by_groups(v: Tensor) -> Tensor:
    groups = torch.arange(v.shape[0])[:, None].expand_as(v) % 2
    return v.new_zeros(2, v.shape[1]).scatter_reduce(0, groups, v, "amax")


def sums_of_terms(dtype: torch.dtype, seeds: Iterable[int]) -> Iterator[Trial]:
    """Sums of some terms of one value: the sum, and its gradients by both inputs, in one graph."""
    for seed in seeds:
        rng = Random(seed)
        value, count = rng.choice(list(INEXACT)), rng.randint(1, 3)
        terms = [*rng.sample(list(BY_ROWS), count), rng.choice(list(WRITING))]
        rows, columns = rng.choice([(5, 7), (16, 32), (8, 16), (33, 4), (6, 64)])
        generator = torch.Generator().manual_seed(seed)
        shapes = (2 * columns, columns), (rows, columns)
        tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        name = f"sums_of_terms({dtype}, [{seed}]): {' + '.join(terms)} of {value} {[rows, columns]}"
        yield Trial(name, _value_and_gradients(_summed(value, terms)), tensors)


def _summed(value: str, terms: Sequence[str]) -> Callable[[Tensor, Tensor], Tensor]:
    def summed(w: Tensor, x: Tensor) -> Tensor:
        v = INEXACT[value](x)
        first, *others = ((BY_ROWS | WRITING)[term](v, w[0]) for term in terms)
        return sum(others, first)

    return summed


def _value_and_gradients(fn: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    def both(*tensors: Tensor) -> list[Tensor]:
        gradients, value = torch.func.grad_and_value(fn, argnums=(0, 1))(*tensors)
        return [*gradients, value]

    return both


# -- what the compiler's scheduler knows --------------------------------------------------------------


@contextlib.contextmanager
def lost_reads() -> Iterator[list[str]]:
    """A context in which Inductor compiles anew: gives what its nodes read before fusion, and not after.

    A node that does not depend on what it reads may run before that is written. Whether it does is for
    the scheduler to choose, by the memory that a program takes.
    """
    before: dict[str, set[str]] = {}
    lost: list[str] = []

    def note(nodes: list[Any]) -> list[Any]:
        before.update((node.get_name(), _reads(node)) for node in _single(nodes))
        return nodes

    def compare(nodes: list[Any]) -> list[Any]:
        gone = ((node, before[node.get_name()] - _reads(node)) for node in _single(nodes))
        lost.extend(f"{node.get_name()} no longer reads {names}" for node, names in gone if names)
        return nodes

    passes: dict[str, Any] = {"_pre_fusion_custom_pass": note, "_post_fusion_custom_pass": compare}
    anew = functorch.patch(enable_autograd_cache=False)
    with anew, config.patch(fx_graph_cache=False, **passes):
        yield lost


def _reads(node: Any) -> set[str]:
    return {dep.name for dep in node.read_writes.reads}


def _single(nodes: list[Any]) -> Iterator[Any]:
    return (single for node in nodes for single in node.get_nodes())

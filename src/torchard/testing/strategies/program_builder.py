"""Draws a program step by step: its inputs, operations that fit, and its results."""

from __future__ import annotations

import math
import re
from random import Random

import torch

from torchard.sharding import Mesh
from torchard.testing.strategies.control import CONTROL
from torchard.testing.strategies.operations import OPERATIONS
from torchard.testing.strategies.pool import IDS, Pool
from torchard.testing.strategies.random_program import NAMES, OURS, RandomProgram
from torchard.testing.strategies.source import tensor_source

__all__ = ["ProgramBuilder"]


class ProgramBuilder:
    """Draws a program step by step.

    Args:
        rng: makes all choices.
        dtype: the dtype of floating inputs.
        mesh: the mesh for which values may be constrained, or None.
        control_flow: whether steps may be loops and branches.
    """

    _TRIES = 4

    def __init__(
        self, rng: Random, dtype: torch.dtype, mesh: Mesh | None, control_flow: bool = False
    ) -> None:
        self.pool = Pool(rng, dtype, mesh)
        self.operations = (*OPERATIONS, *(4 * CONTROL if control_flow else ()))
        self.lines: dict[str, str] = {}
        self.input_sources = _inputs(self.pool)
        for name, text in self.input_sources.items():
            self.pool.values[name] = eval(text, NAMES)
        self.pool.inputs = len(self.input_sources)

    def step(self) -> None:
        """Add an operation, if one of a few tries fits and gives numbers of moderate size."""
        for _ in range(self._TRIES):
            line = self.pool.choice(self.operations)(self.pool)
            value = None if line is None else self._value_of(line)
            if line is not None and value is not None:
                name = f"v{len(self.pool.values)}"
                self.lines[name], self.pool.values[name] = line, value
                return

    def _value_of(self, line: str) -> torch.Tensor | None:
        try:
            value: torch.Tensor = eval(line, NAMES, self.pool.values)
        except (RuntimeError, IndexError):
            return None
        small = value.numel() <= 2000 and value.ndim <= 4
        return value if small and bool((value.abs() < 1e4).all()) else None

    def program(self) -> RandomProgram:
        """The program so far: returns its last value and maybe another, and may leave inputs unused."""
        last = next(reversed(self.lines), None) or "v0"
        other = self.pool.any() if self.pool.flip() else None
        results = f"{last}, {other}" if other else last
        body = [*(f"{name} = {line}" for name, line in self.lines.items()), f"return {results}"]
        used = set(_NAME.findall("\n".join(body)))
        unused_too = self.pool.flip()
        inputs = [name for name in self.input_sources if unused_too or name in used]
        order = [name for name in (*inputs, *self.lines) if _NUMBERED.fullmatch(name)]
        new = {name: f"v{i}" for i, name in enumerate(order)}
        function = "\n    ".join([f"def f({', '.join(inputs)}):", *body])
        function = _NUMBERED.sub(lambda match: new[match[0]], function)
        sources = {new.get(name, name): self.input_sources[name] for name in inputs}
        imports = _imports(function, *sources.values())
        return RandomProgram(f"{imports}\n\n\n{function}", sources)


_NUMBERED = re.compile(r"\bv\d+\b")
_NAME = re.compile(r"\b[a-zA-Z_]\w*")


def _imports(*texts: str) -> str:
    """The imports that a program and the expressions of its inputs need."""
    used = set(_NAME.findall(" ".join(texts)))
    lines = ["import torch"]
    if "F" in used:
        lines.append("import torch.nn.functional as F")
    ours = sorted(set(OURS) & used)
    if ours:
        lines.append(f"from torchard import {', '.join(ours)}")
    return "\n".join(lines)


# -- inputs -------------------------------------------------------------------------------------------

_SIZES = range(1, 7)
_RANKS = (0, 1, 2, 2, 2, 3, 3)
# Inputs of up to this many numbers are written out, with this many decimals.
_WRITTEN_OUT, _DECIMALS = 8, 2
# One input in this many has integers.
_WHOLE = 8


def _inputs(pool: Pool) -> dict[str, str]:
    """Floating inputs whose dims often agree, ids for leading dims, and a key: expressions by name."""
    sizes = [pool.choice(_SIZES) for _ in range(3)]
    shapes = [
        tuple(pool.choice(sizes) for _ in range(pool.choice(_RANKS)))
        for _ in range(pool.choice((2, 3, 4)))
    ]
    seed = 8 * pool.choice(range(1000))
    found = {f"v{i}": _floating(pool, shape, seed + i) for i, shape in enumerate(shapes)}
    ids = pool.choice(shapes)[: pool.choice(range(3))]
    found["ids"] = _drawn(f"torch.randint(0, {IDS}, {ids}", seed + 7)
    found["key"] = f"random.key({pool.choice(range(8))})"
    return found


def _floating(pool: Pool, shape: tuple[int, ...], seed: int) -> str:
    """Normal numbers, or small integers."""
    small, whole = math.prod(shape) <= _WRITTEN_OUT, pool.choice(range(_WHOLE)) == 0
    if whole and small:
        first = 1 + seed % 8
        count = torch.arange(first, first + math.prod(shape), dtype=pool.dtype)
        return tensor_source(count.view(shape))
    call = f"torch.randint(-3, 4, {shape}" if whole else f"torch.randn({shape}"
    return _drawn(f"{call}, dtype={pool.dtype}", seed)


def _drawn(call: str, seed: int) -> str:
    """The draws of torch's generator, written out if there are few of them."""
    text = f"{call}, generator=torch.Generator().manual_seed({seed}))"
    drawn: torch.Tensor = eval(text, NAMES)
    if drawn.numel() > _WRITTEN_OUT:
        return text
    return tensor_source(drawn.round(decimals=_DECIMALS) if drawn.is_floating_point() else drawn)

"""What a kernel is run on in tests: inputs whose dims go together, in any layout and dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchard.kernels import KERNELS, Kernel, Pattern

__all__ = ["LITERALS", "NAMES", "Case", "inputs_of", "plain"]

NAMES = tuple(sorted(KERNELS))
# A probability of a quarter.
LITERALS = {"eps": 1e-5, "threshold": 1 << 30, "cap": 3.0, "scale": 0.5}


def plain(pattern: Pattern) -> Callable[..., Any]:
    """The reference as anybody would call it."""
    literals = {name: LITERALS[name] for name in pattern.literals}

    def reference(*tensors: Tensor) -> Any:
        return pattern.fn(*tensors, **literals)

    return reference


@dataclass(frozen=True)
class Case:
    """Sizes by name, those of ``...``, a dtype, how each input lies, a seed."""

    sizes: dict[str, int]
    lead: tuple[int, ...]
    dtype: torch.dtype
    layouts: tuple[str, ...]
    seed: int


def names_of(pattern: Pattern) -> list[str]:
    assert pattern.dims is not None
    found = dict.fromkeys(n for dims in pattern.dims.inputs for n in dims)
    return [n for n in found if n != "..." and not n.isdigit()]


def inputs_of(kernel: Kernel, pattern: Pattern, case: Case) -> list[Tensor]:
    assert pattern.dims is not None
    draw = torch.Generator().manual_seed(case.seed)
    found = []
    for i, dims in enumerate(pattern.dims.inputs):
        shape: list[int] = []
        for n in dims:
            shape += case.lead if n == "..." else [int(n) if n.isdigit() else case.sizes[n]]
        dtype = pattern.dims.dtype(i)
        layout = case.layouts[i % len(case.layouts)]
        if dtype.is_floating_point:
            found.append(laid_out(torch.randn(shape, generator=draw), layout).to(case.dtype))
        else:  # labels and keys
            bound = max(1, min(case.sizes.values()))
            found.append(laid_out(torch.randint(bound, shape, generator=draw), layout))
    return found


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values, stored in another way."""
    if layout == "transposed" and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "last dim first" and x.ndim > 2:
        return x.movedim(-1, 1).contiguous().movedim(1, -1)
    if layout == "strided" and x.ndim:
        wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "cut" and x.ndim:
        return torch.cat([x, x + 1], -1)[..., : x.shape[-1]]
    return x


def outputs(value: Any) -> Sequence[Tensor]:
    return value if isinstance(value, (tuple, list)) else [value]

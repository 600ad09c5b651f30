"""Arguments drawn for a function, by a line that says their dims and what they must be.

    draw("b s d, d :positive, b :index=d", seed=3)

is a tuple of three tensors. Dims of one name have one size, 2 to 4; a number is itself. Kinds:
``positive`` (not zero either), ``unit`` (between -1 and 1), ``probability`` (between 0 and 1),
``simplex`` (that sum to 1 over the last dim), ``definite`` (symmetric positive definite),
``increasing`` (over the last dim), ``flags`` (integers 0 and 1) and ``index=n`` (integers below the
size n).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

STYLES = ("ordinary", "scaled", "mixed", "integers", "zeros", "ties")
# Decimal exponents of the size of "scaled" and "mixed" values.
EXPONENTS = (-3.0, 3.0)


def draw(
    spec: str, seed: int, styles: tuple[str, ...] = STYLES, most: float = EXPONENTS[1]
) -> tuple[Tensor, ...]:
    """Tensors in float64, and of indices and flags in int64.

    Args:
        spec: what is drawn, see above.
        seed: of the generator.
        styles: of values, one of which is drawn for all tensors.
        most: the largest decimal exponent.
    """
    generator = torch.Generator().manual_seed(seed)
    style = styles[_integer(generator, 0, len(styles))]
    sizes: dict[str, int] = {}
    found = []
    for part in spec.split(","):
        dims, _, kind = part.partition(":")
        shape = [_size(dim, sizes, generator) for dim in dims.split()]
        if kind.startswith("index="):
            below = _size(kind.removeprefix("index=").strip(), sizes, generator)
            found.append(torch.randint(below, shape, generator=generator))
        else:
            values = _VALUES[style](shape, generator, most)
            found.append(_KINDS[kind.strip()](values))
    return tuple(found)


def _integer(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (), generator=generator))


def _size(dim: str, sizes: dict[str, int], generator: torch.Generator) -> int:
    if dim.isdigit():
        return int(dim)
    return sizes.setdefault(dim, _integer(generator, 2, 5))


# -- styles -------------------------------------------------------------------------------------------

Values = Callable[[list[int], torch.Generator, float], Tensor]


def _ordinary(shape: list[int], generator: torch.Generator, most: float) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64) * min(1.0, 10.0**most)


def _powers(shape: list[int], generator: torch.Generator, most: float) -> Tensor:
    least = min(EXPONENTS[0], most)
    exponents = torch.rand(shape, generator=generator, dtype=torch.float64) * (most - least) + least
    return 10.0**exponents


def _scaled(shape: list[int], generator: torch.Generator, most: float) -> Tensor:
    return _ordinary(shape, generator, 0.0) * _powers([], generator, most)


def _mixed(shape: list[int], generator: torch.Generator, most: float) -> Tensor:
    """Each element of a size of its own."""
    return _ordinary(shape, generator, 0.0) * _powers(shape, generator, most)


def _integers(shape: list[int], generator: torch.Generator, most: float) -> Tensor:
    largest = max(1, min(3, math.floor(10.0**most)))
    return torch.randint(-largest, largest + 1, shape, generator=generator).double()


def _zeros(shape: list[int], generator: torch.Generator, most: float) -> Tensor:
    """A third of the elements are zero."""
    keep = torch.rand(shape, generator=generator) > 1 / 3
    return torch.where(keep, _ordinary(shape, generator, most), 0.0)


def _ties(shape: list[int], generator: torch.Generator, most: float) -> Tensor:
    """Few different values."""
    return (_ordinary(shape, generator, most) * 2).round() / 2


_VALUES: dict[str, Values] = {
    "ordinary": _ordinary,
    "scaled": _scaled,
    "mixed": _mixed,
    "integers": _integers,
    "zeros": _zeros,
    "ties": _ties,
}


# -- kinds --------------------------------------------------------------------------------------------


def _definite(x: Tensor) -> Tensor:
    """Well conditioned: a multiple of the identity and a smaller symmetric matrix."""
    scaled = x / x.abs().amax((-2, -1), keepdim=True).clamp(min=1e-3)
    n = x.shape[-1]
    return (scaled + scaled.mT) / (2 * n) + 2 * torch.eye(n, dtype=x.dtype)


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "positive": lambda x: x.abs() + 1e-3,
    "unit": lambda x: x / (1 + x.abs()) * 0.9,
    "probability": lambda x: x / (1 + x.abs()) * 0.45 + 0.5,
    "simplex": lambda x: (x / (1 + x.abs())).softmax(-1),
    "definite": _definite,
    "increasing": lambda x: (x / (1 + x.abs()) + 1.5).cumsum(-1),
    "flags": lambda x: (x > 0).long(),
}

"""Local attention, sharded by hand with a subtle mistake: found by a property, shrunk, led to its line.

    python examples/property_testing.py             the mistake is found
    python examples/property_testing.py --mended    nothing is found

Each token sees itself and the tokens before it, `window` in all; the weights are sigmoids of the scores
(Ramapuram et al., arXiv:2409.04431, section 2). The sequence is split over two ranks, so the first tokens
of a rank need the last keys and values of its left neighbour: a halo.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchard import Mesh, P, RetraceWarning, axis_index, ppermute, random, shard_map
from torchard.testing import equal, localize

ORDERS = ("value", "gradient")
MESH = Mesh({"sp": 2}, virtual=True)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Inputs:
    """q, k, v [tokens, width] and how many tokens each token sees."""

    q: Tensor
    k: Tensor
    v: Tensor
    window: int

    def __str__(self) -> str:
        tokens, width = self.q.shape
        return f"{tokens} tokens of width {width}, window {self.window}"


def local_attention(window: int) -> Attention:
    """On one device: q, k, v [tokens, width] to [tokens, width]."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nothing = k.new_zeros(window - 1, k.shape[1])
        return weighted(q, torch.cat([nothing, k]), torch.cat([nothing, v]), window)

    return attention


def weighted(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """q [tokens, width] on k, v [window - 1 + tokens, width]; values that are not there are 0."""
    keys, values = k.unfold(0, window, 1), v.unfold(0, window, 1)  # [tokens, width, window]
    scores = torch.einsum("td,tdw->tw", q, keys)
    return torch.einsum("tw,tdw->td", scores.sigmoid(), values)


def sharded(window: int, mended: bool) -> Attention:
    """The same by hand: q, k, v [tokens / 2, width] on each rank."""

    def with_halo(x: Tensor) -> Tensor:
        """x with the last rows of the left neighbour in front."""
        last = x[x.shape[0] - window + 1 :]
        halo = ppermute(last, "sp", [(0, 1), (1, 0)])
        if mended:  # there is nothing to the left of the first rank
            halo = torch.where(axis_index("sp") == 0, torch.zeros_like(halo), halo)
        return torch.cat([halo, x])

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return weighted(q, with_halo(k), with_halo(v), window)

    return shard_map(local, MESH, (P("sp"), P("sp"), P("sp")), P("sp"))


@st.composite
def inputs(draw: st.DrawFn) -> Inputs:
    """Any sequence that two ranks can share, any window that does not reach beyond the neighbour."""
    tokens, width = 2 * draw(st.integers(1, 4)), draw(st.integers(1, 4))
    window = draw(st.integers(1, 1 + tokens // 2))
    keys = random.split(random.key(draw(st.integers(0, 99))), 3)
    q, k, v = (random.normal(key, (tokens, width)) for key in keys)
    return Inputs(q, k, v, window)


def search(mended: bool) -> tuple[str, Inputs | None]:
    """The message for the smallest inputs on which the two differ, and those; None if there are none."""
    last: list[Inputs] = []

    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=15,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs())
    def check(x: Inputs) -> None:
        last[:] = [x]
        equal(sharded(x.window, mended), local_attention(x.window), x.q, x.k, x.v, orders=ORDERS)

    try:
        check()
    except AssertionError as error:
        return str(error).split("\nFailing test case")[0], last[0]
    return "equal on all inputs", None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mended", action="store_true", help="without the mistake")
    mended: bool = parser.parse_args().mended
    message, x = search(mended)
    print(message)
    if x is not None:
        print(f"\nsmallest inputs: {x}")
        print(localize(sharded(x.window, mended), local_attention(x.window), x.q, x.k, x.v))


if __name__ == "__main__":
    warnings.simplefilter("ignore", RetraceWarning)  # every example has its own shapes
    main()

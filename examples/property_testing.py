"""A hand-sharded loss with a subtle mistake: found by a property, shrunk by hypothesis, led to its line.

    python examples/property_testing.py             the mistake is found
    python examples/property_testing.py --mended    nothing is found

The vocabulary of a language model is split over two ranks. Each rank has the logits of its half, and the
loss of a token needs the logit of its target from the rank that has it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchard import Mesh, P, axis_index, pmax, psum, random, shard_map
from torchard.testing import equal, localize

MESH = Mesh({"tp": 2}, virtual=True)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Inputs = tuple[Tensor, Tensor, Tensor]


def loss(table: Tensor, hidden: Tensor, targets: Tensor) -> Tensor:
    """The loss on one device: table [vocabulary, width], hidden [tokens, width], targets [tokens]."""
    return F.cross_entropy(hidden @ table.T, targets)


def sharded(mended: bool) -> Loss:
    """The same by hand: table [vocabulary / 2, width] on each rank."""

    def local(table: Tensor, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = hidden @ table.T
        highest = pmax(logits.detach().amax(-1), "tp")
        total = psum((logits - highest[:, None]).exp().sum(-1), "tp")
        count = table.shape[0]
        position = targets - axis_index("tp") * count
        last = count - 1 if mended else count
        mine = (position >= 0) & (position <= last)
        own = logits.gather(-1, position.clamp(0, count - 1)[:, None])[:, 0]
        picked = psum(torch.where(mine, own, 0.0), "tp")
        return (total.log() + highest - picked).mean()

    return shard_map(local, MESH, (P("tp"), P(), P()), P())


@st.composite
def inputs(draw: st.DrawFn) -> Inputs:
    """Random tables and hidden values, and any targets."""
    vocabulary, width = 2 * draw(st.integers(1, 4)), draw(st.integers(1, 4))
    targets = draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=6))
    keys = random.split(random.key(draw(st.integers(0, 99))), 2)
    table = random.normal(keys[0], (vocabulary, width))
    return table, random.normal(keys[1], (len(targets), width)), torch.tensor(targets)


def found(run: Loss) -> Inputs | None:
    """The smallest inputs on which the two differ; None if there are none."""
    last: list[Inputs] = []

    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=50,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs())
    def check(args: Inputs) -> None:
        last[:] = [args]
        equal(run, loss, *args, orders=["value", "gradient"])

    try:
        check()
    except AssertionError as error:
        print(str(error).split("\nFailing test case")[0])
        return last[0]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mended", action="store_true", help="without the mistake")
    options = parser.parse_args()
    run = sharded(options.mended)
    args = found(run)
    if args is None:
        print("equal on all inputs")
        return
    table, hidden, targets = args
    shapes = f"table {list(table.shape)}, hidden {list(hidden.shape)}"
    print(f"\nsmallest inputs: {shapes}, targets {targets.tolist()}")
    print(localize(run, loss, *args))


if __name__ == "__main__":
    main()

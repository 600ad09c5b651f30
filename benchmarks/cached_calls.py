"""A cached call by number of leaves, beside JAX's jit and plain torch: microseconds, in one run.

python benchmarks/cached_calls.py [--out FILE]    (JAX: pip install -e '.[oracle]')

The function does next to nothing with its leaves. Times are those of the whole call; overheads are what
is above plain torch's operations. Rivals take turns, and each figure is a median over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from torchard import Mesh, P, jit, place, shard

LEAVES = (1, 16, 64, 256)
MESH = Mesh({"dp": 1}, virtual=True)
Call = Callable[[], Any]


def one(leaves: Sequence[Any]) -> Any:
    return leaves[0] * 2


def everything(leaves: Sequence[Any]) -> list[Any]:
    return [leaf * 2 for leaf in leaves]


def rivals(fn: Callable[..., Any], count: int) -> dict[str, Call]:
    """The same function of the same number of leaves, called by each."""
    plain = [torch.ones(8) for _ in range(count)]
    placed = place(plain, MESH, P("dp"))
    compiled, sharded = jit(fn, backend="eager"), shard(fn, MESH, out_specs=P("dp"))
    found: dict[str, Call] = {
        "plain torch": lambda: fn(plain),
        "jit": lambda: compiled(plain),
        "shard, plain": lambda: sharded(plain),
        "shard, placed": lambda: sharded(placed),
    }
    try:
        import jax
    except ModuleNotFoundError:
        return found
    arrays = [jax.numpy.ones(8) for _ in range(count)]
    by_jax = jax.jit(fn)
    return {**found, "jax.jit": lambda: by_jax(arrays)}


def microseconds(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """The median time of each, which take turns."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 3):
        for name, call in calls.items():
            began = time.perf_counter()
            for _ in range(50):
                call()
            took[name].append((time.perf_counter() - began) / 50 * 1e6)
    return {name: statistics.median(each[3:]) for name, each in took.items()}


def table(rounds: int) -> str:
    lines = []
    for fn in (one, everything):
        times = [microseconds(rivals(fn, count), rounds) for count in LEAVES]
        result = "one result" if fn is one else "all results"
        lines.append(f"{result:16}" + "".join(f"{f'{n} leaves':>12}" for n in LEAVES))
        lines += [f"{name:16}" + "".join(f"{t[name]:12.1f}" for t in times) for name in times[0]]
        lines += [_ratios("jit : jax.jit", times, "jit", "jax.jit")] if "jax.jit" in times[0] else []
        lines += [_ratios("jit : plain", times, "jit", "plain torch"), ""]
    return "\n".join(lines)


def _ratios(title: str, times: Sequence[dict[str, float]], name: str, other: str) -> str:
    return f"{title:16}" + "".join(f"{t[name] / t[other]:12.2f}" for t in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        text = table(given.rounds)
    if given.out:
        given.out.write_text(f"torch {torch.__version__}, one thread; microseconds\n{text}")
    print(text)


if __name__ == "__main__":
    main()

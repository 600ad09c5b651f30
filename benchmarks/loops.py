"""Loops of 1,000 small steps and scans as trees, beside Python's loops and JAX's.

    python benchmarks/loops.py           all of them; the table is saved in results/
    python benchmarks/loops.py --quick   few rounds, nothing saved

JAX is timed if it is installed (``pip install 'jax[cpu]'``). All compute the same, which is compared
first. A row's rivals take turns in one process with one thread; "first" is the first call, tracing and
compiling included, after torch, its compiler and JAX have each compiled something else.
"""

from __future__ import annotations

import argparse
import datetime
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bench import RESULTS, aligned, machine
from timing import in_turns
from workload import Rival

import torchard as ta

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    jax = None

STEPS, WIDTH, LENGTH = 1000, 16, 4096
Fn = Callable[[], Any]


def _recurrence() -> tuple[torch.Tensor, ...]:
    return torch.randn(STEPS, WIDTH), torch.randn(WIDTH, WIDTH) / 4, torch.zeros(WIDTH)


def _step(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + h @ w) + 0.5 * h


def _in_python(x: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    for i in range(STEPS):
        h = _step(h, x[i], w)
    return h


def _by_scan(x: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return ta.scan(lambda h, x: (_step(h, x, w), None), h, x)[0]


def _by_jax(x: Any, w: Any, h: Any) -> Any:
    return jax.lax.scan(lambda h, x: (jnp.tanh(x + h @ w) + 0.5 * h, None), h, x)[0]


def scan_rivals() -> dict[str, Fn]:
    """A gated recurrence: its last state."""
    args = _recurrence()
    found = _ours_and_python(_by_scan, _in_python, args)
    if jax is not None:
        given, run = list(map(_to_jax, args)), jax.jit(_by_jax)
        found["jax.jit"] = lambda: run(*given).block_until_ready()
    return found


def gradient_rivals() -> dict[str, Fn]:
    """The gradient of its last state's sum, by the weights."""
    x, w, h = _recurrence()

    def python(x: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        w = w.clone().requires_grad_()
        (found,) = torch.autograd.grad(_in_python(x, w, h).sum(), w)
        return found

    def ours(x: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda w: _by_scan(x, w, h).sum())(w)

    found = _ours_and_python(ours, python, (x, w, h))
    if jax is not None:
        a, b, c = map(_to_jax, (x, w, h))
        run = jax.jit(lambda x, w, h: jax.grad(lambda w: _by_jax(x, w, h).sum())(w))
        found["jax.jit"] = lambda: run(a, b, c).block_until_ready()
    return found


def while_rivals() -> dict[str, Fn]:
    """Newton's method with damping, until a count is reached."""
    x, limit = torch.rand(WIDTH) + 1, torch.tensor(STEPS)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x - 0.01 * (x * x - 2) / (2 * x)

    def python(x: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        i = torch.zeros((), dtype=torch.int64)
        while i < limit:
            x, i = step(x), i + 1
        return x

    def ours(x: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        return ta.while_loop(lambda c: c[1] < limit, lambda c: (step(c[0]), c[1] + 1), (x, 0))[0]

    found = _ours_and_python(ours, python, (x, limit))
    if jax is not None:
        a, b = map(_to_jax, (x, limit))
        run = jax.jit(
            lambda x, limit: jax.lax.while_loop(
                lambda c: c[1] < limit,
                lambda c: (c[0] - 0.01 * (c[0] * c[0] - 2) / (2 * c[0]), c[1] + 1),
                (x, 0),
            )[0]
        )
        found["jax.jit"] = lambda: run(a, b).block_until_ready()
    return found


def tree_rivals() -> dict[str, Fn]:
    """A linear recurrence of 4,096 steps, by the steps' composition."""
    a, b = torch.rand(LENGTH, WIDTH), torch.randn(LENGTH, WIDTH)

    def compose(f: Any, g: Any) -> Any:
        return f[0] * g[0], f[1] * g[0] + g[1]

    def python(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        h, found = torch.zeros(WIDTH), []
        for i in range(LENGTH):
            h = a[i] * h + b[i]
            found.append(h)
        return torch.stack(found)

    def ours(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ta.associative_scan(compose, (a, b))[1]

    found = _ours_and_python(ours, python, (a, b))
    if jax is not None:
        c, d = map(_to_jax, (a, b))
        run = jax.jit(lambda a, b: jax.lax.associative_scan(compose, (a, b))[1])
        found["jax.jit"] = lambda: run(c, d).block_until_ready()
    return found


ROWS: dict[str, Callable[[], dict[str, Fn]]] = {
    f"scan, {STEPS} steps": scan_rivals,
    f"gradient of it, {STEPS} steps": gradient_rivals,
    f"while_loop, {STEPS} steps": while_rivals,
    f"associative_scan, {LENGTH} steps": tree_rivals,
}


def _ours_and_python(ours: Any, python: Any, args: tuple[Any, ...]) -> dict[str, Fn]:
    eager, compiled = ta.jit(ours, backend="eager"), ta.jit(ours)
    return {
        "Python loop": lambda: python(*args),
        "outside of transforms": lambda: ours(*args),
        'jit(backend="eager")': lambda: eager(*args),
        "jit": lambda: compiled(*args),
    }


def _to_jax(x: torch.Tensor) -> Any:
    return jnp.asarray(x.numpy())


def _warm_up() -> None:
    ta.jit(lambda x: x.sin() + 1)(torch.ones(3))
    torch.compile(lambda x: x.cos() + 1)(torch.ones(3))
    if jax is not None:
        jax.jit(lambda x: jnp.sin(x) + 1)(jnp.ones(3)).block_until_ready()


def rows_of(name: str, rounds: int) -> list[list[str]]:
    """A table's rows: the median, the ratio to Python's loop, and the seconds of the first call."""
    rivals, first, want = ROWS[name](), {}, None
    for rival, run in rivals.items():
        began = time.perf_counter()
        result = torch.as_tensor(np.asarray(run()))
        first[rival] = time.perf_counter() - began
        want = result if want is None else want
        torch.testing.assert_close(result, want, rtol=1e-3, atol=1e-3)
    timings = in_turns([Rival(rival, run, lambda: {}) for rival, run in rivals.items()], rounds)
    rows = []
    for timing in timings:
        low, high = timing.quartiles_of_times(timings[0])
        ratio = f"{timing.times(timings[0]):.3f} ({low:.3f}–{high:.3f})"
        rows.append(
            [name, timing.name, f"{timing.median * 1e3:.2f}", ratio, f"{first[timing.name]:.2f}"]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    _warm_up()
    rows = [row for name in ROWS for row in rows_of(name, 3 if quick else 21)]
    table = aligned([["loop", "rival", "ms", "time / Python loop (quartiles)", "first call, s"], *rows])
    text = f"{machine()}, JAX {jax.__version__ if jax else 'not installed'}\n\n{table}\n"
    print(text)
    if not quick:
        (RESULTS / f"{datetime.date.today()}-loops.md").write_text(f"# Loops\n\n```text\n{text}```\n")


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    main()

"""torchard beside JAX on eight ranks: values, gradients, and collectives; writes a table of both.

    make oracle

Fails where a value or gradient differs by more than 1e-5 of its largest, or torchard sends more than JAX
by more than the sum of one number takes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import torch
from cases import AXES, CASES, Case
from hlo import Sent, collectives
from jax.sharding import NamedSharding, PartitionSpec

import torchard as ta

TOLERANCE = 1e-5
# Bytes that the sum of one number may cost more, over eight ranks instead of two.
NUMBER = 3
RANKS = 8


@dataclass(frozen=True)
class Run:
    """A loss, its gradients by name, and what crossed the network."""

    loss: float
    gradients: dict[str, np.ndarray[Any, Any]]
    sent: list[Sent]

    @property
    def bytes(self) -> int:
        return round(sum(one.bytes for one in self.sent))

    @property
    def kinds(self) -> str:
        counts = sorted(Counter(one.kind for one in self.sent).items())
        return ", ".join(f"{n} {kind}" for kind, n in counts) or "none"


def in_torch(case: Case) -> Run:
    mesh = ta.Mesh(AXES, virtual=True)
    arrays = case.arrays()
    specs = [{name: ta.P(*case.specs.get(name, ())) for name in group} for group in arrays]
    params, batch = (
        ta.place({name: torch.from_numpy(a) for name, a in group.items()}, mesh, spec)
        for group, spec in zip(arrays, specs, strict=True)
    )

    def step(params: Any, batch: Any) -> Any:
        gradients, loss = torch.func.grad_and_value(case.torch)(params, batch)
        return loss, gradients

    run = ta.shard(step, mesh, out_specs=(ta.P(), specs[0]))
    loss, gradients = run(params, batch)
    sent = [Sent(c.kind, c.bytes) for c in run.lower(params, batch).collectives]
    return Run(float(loss), {name: _whole(g) for name, g in gradients.items()}, sent)


def _whole(value: Any) -> np.ndarray[Any, Any]:
    """The array of a placed value, or of a plain one (a spec of P())."""
    whole: torch.Tensor = value.full() if isinstance(value, ta.MeshTensor) else value
    return whole.numpy()


def in_jax(case: Case) -> Run:
    shape = tuple(AXES.values())
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), tuple(AXES))
    arrays = case.arrays()
    placed = [
        {
            name: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*case.specs.get(name, ()))))
            for name, a in group.items()
        }
        for group in arrays
    ]
    shardings = [{name: a.sharding for name, a in group.items()} for group in placed]
    step = jax.jit(
        jax.value_and_grad(case.jax),
        in_shardings=tuple(shardings),
        out_shardings=(NamedSharding(mesh, PartitionSpec()), shardings[0]),
    )
    with jax.set_mesh(mesh):
        compiled = step.lower(*placed).compile()
        loss, gradients = compiled(*placed)
    sent = collectives(compiled.as_text(), RANKS)
    return Run(float(loss), {name: np.asarray(g) for name, g in gradients.items()}, sent)


def difference(ours: Run, theirs: Run) -> float:
    """The largest difference of the loss or a gradient, over the largest value of it."""
    pairs = [(np.array(ours.loss), np.array(theirs.loss))]
    pairs += [(ours.gradients[name], theirs.gradients[name]) for name in ours.gradients]
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)


def row(name: str, case: Case) -> tuple[str, list[str]]:
    """A case's line of the table, and what is wrong with it."""
    ours, theirs = in_torch(case), in_jax(case)
    apart = difference(ours, theirs)
    wrong = []
    if not apart <= TOLERANCE:
        wrong.append(f"{name}: differs by {apart:.1e}")
    if ours.bytes > theirs.bytes + NUMBER:
        wrong.append(f"{name}: sends {ours.bytes:,} bytes, JAX {theirs.bytes:,}")
    cells = [name, f"{apart:.0e}", ours.kinds, f"{ours.bytes:,}", theirs.kinds, f"{theirs.bytes:,}"]
    return "| " + " | ".join([*cells, case.note]) + " |", wrong


HEAD = f"""# torchard beside JAX

Losses and gradients on a mesh of dp {AXES["dp"]} × tp {AXES["tp"]} in float32, torch {torch.__version__}
and JAX {jax.__version__}, as `make oracle` wrote them. Bytes are those that a rank sends under the ring
algorithm.

| case | difference | torchard's collectives | bytes | JAX's collectives | bytes | why they differ |
|---|---:|---|---:|---|---:|---|
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, help="the file of the table; by default it is printed")
    options = parser.parse_args(argv)
    rows, wrong = [], []
    for name, case in CASES.items():
        if options.only is None or options.only in name:
            line, bad = row(name, case)
            rows.append(line)
            wrong += bad
    text = HEAD + "\n".join(rows) + "\n"
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

"""Each kernel of the library beside the operations that it replaces: as Python, compiled, as the kernel.

    python benchmarks/kernel_rows.py              all kernels; the table is saved in results/
    python benchmarks/kernel_rows.py NAME ...     only these, nothing saved

A row is the kernel's first reference and its gradients of all floating-point inputs, at one size.
`python` runs torch's operations one by one, `jit` is compiled by Inductor, and `fuse` runs the kernel as
requested, whether or not it pays. Gradients are those of torch.func, as in a step that returns them.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from bench import RESULTS, aligned, machine
from timing import in_turns
from torch import Tensor
from workload import Rival

from torchard import fuse, jit, random, tree
from torchard.functional import torch_internals as internals
from torchard.kernels import KERNELS, Kernel

# The rows of element-wise kernels, by their number of elements.
SIZES = {"1 M": 1 << 10, "16 M": 1 << 14}
SHAPES = {
    "...": 0,  # the rows
    **{"b": 4, "h": 8, "s": 512, "t": 512, "d": 1024, "r": 32},
    **{"n": 1024, "v": 32_768, "g": 256, "u": 256, "q": 256, "k": 256, "c": 16},
}
HEADS = {"d": 64, "e": 64}
NORMS = {"n": 8, "g": 8, "c": 8, "s": 4096}
LITERALS = {"eps": 1e-5, "scale": 0.125 / 50, "cap": 50.0, "threshold": int(0.1 * 2**32)}


def sizes_of(kernel: Kernel) -> dict[str, int]:
    if kernel.name.startswith("attention"):
        return {**SHAPES, **HEADS}
    if kernel.name == "group_norm":
        return {**SHAPES, **NORMS}
    if kernel.name.startswith(("rope", "linear")):
        return {**SHAPES, "d": 64 if kernel.name == "rope" else 128}
    return {**SHAPES, "d": 256, "v": 256} if kernel.name.endswith(("qkv", "gate_up")) else SHAPES


def arguments(kernel: Kernel, rows: int) -> list[Tensor]:
    """Random inputs of a kernel's first reference."""
    dims, sizes, draw = kernel.patterns[0].dims, sizes_of(kernel), torch.Generator().manual_seed(0)
    assert dims is not None
    values = []
    for names, dtype in zip(dims.inputs, dims.dtypes, strict=True):
        shape = [rows if n == "..." else int(n) if n.isdigit() else sizes[n] for n in names]
        shape += [1024] if names == ("...",) else []
        if names == ("2",):
            values.append(random.key(0))
        elif dtype == torch.int64:
            values.append(torch.randint(sizes["v"], shape, generator=draw))
        else:
            scale = math.prod(shape[:1]) ** -0.5 if kernel.name.startswith("linear") else 1.0
            values.append(torch.randn(shape, generator=draw) * scale)
    return values


def step_of(kernel: Kernel) -> Callable[..., Any]:
    """The reference's outputs and gradients, for cotangents that are not known in advance."""
    pattern = kernel.patterns[0]
    fn = functools.partial(pattern.fn, **{n: LITERALS[n] for n in pattern.literals})

    def step(*values: Tensor) -> Any:
        floating = [i for i, x in enumerate(values) if x.is_floating_point()]

        def of_floating(*given: Tensor) -> Any:
            by_place = dict(zip(floating, given, strict=True))
            return tree.leaves(fn(*(by_place.get(i, x) for i, x in enumerate(values))))

        outputs, pullback = torch.func.vjp(of_floating, *(values[i] for i in floating))
        return outputs, pullback([out.cos() if out.ndim else out * 0 + 1 for out in outputs])

    return step


def row_of(kernel: Kernel, size: str, rounds: int) -> list[str]:
    step, values = step_of(kernel), arguments(kernel, SIZES[size])
    runs = {
        "python": jit(step, backend="eager"),
        "jit": jit(step),
        "fuse": fuse(step, kernel) if not kernel.gradient_only else fuse(step, prefer="memory"),
    }
    rivals = [Rival(n, functools.partial(run, *values), lambda _: []) for n, run in runs.items()]
    python, compiled, fused = in_turns(rivals, rounds)
    uses = runs["fuse"].lower(*values).kernels
    how = dict.fromkeys(str(use.how) for use in uses if not str(use.how).startswith("as written"))
    shapes = ", ".join("×".join(map(str, x.shape)) for x in values)
    return [
        *(kernel.name, shapes, *(f"{1e3 * t.median:.2f}" for t in (python, compiled, fused))),
        *(f"{python.times(fused):.2f}", f"{compiled.times(fused):.2f}", "; ".join(how)),
    ]


def table(names: Sequence[str], rounds: int) -> str:
    rows = [["kernel", "inputs", "python ms", "jit", "fuse", "python / fuse", "jit / fuse", "by"]]
    for name in names:
        kernel = KERNELS[name]
        dims = kernel.patterns[0].dims
        by_rows = dims is not None and any("..." in names for names in dims.inputs)
        for size in SIZES if by_rows else ["1 M"]:
            torch.compiler.reset()
            try:
                rows.append(row_of(kernel, size, rounds))
            except Exception as error:  # the other rows are measured all the same
                rows.append([name, size, *[""] * 5, f"{type(error).__name__}: {str(error)[:80]}"])
            print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    return aligned(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these kernels: " + ", ".join(KERNELS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    internals.compile_in_this_process()
    warnings.simplefilter("ignore")
    title = f"{machine().partition(';')[0]}; one process, {options.threads} threads; medians"
    text = f"{title}\n\n{table(options.names or list(KERNELS), options.rounds)}"
    print(text)
    if not options.names:
        version = torch.__version__.split("+")[0]
        (RESULTS / f"{datetime.date.today()}-kernel_rows-torch-{version}.txt").write_text(text + "\n")


if __name__ == "__main__":
    main()

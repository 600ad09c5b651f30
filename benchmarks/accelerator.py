"""The speed of the Triton kernels on a GPU: each against its lower bound of traffic, and a training step.

    python benchmarks/accelerator.py              every kernel in bfloat16, then the step
    python benchmarks/accelerator.py NAME ...     only these kernels; "step" is the training step

The floor of a kernel is the bytes of its operands, each read once, and of its results, each written
once. Its bandwidth is also given as a share of that of a copy on the same device. Operands are at least
four times as large as the second-level cache. torch.compile and Liger-Kernel (if it is installed) run
the kernel's reference, and their own backward through autograd: the ratio in the row of a backward is
that of forward and backward together. Errors are norm-wise against float32, divided by those of eager
operations.

The step is HuggingFace's GPT-2 small in bfloat16, without dropout: gradients and plain descent, by
eager autograd, with torch.compile around the model, and as jit(fuse(step)).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from bench import aligned
from fusion import flat
from torch import Tensor

import torchard
from torchard import Kernel, Pattern, fuse, jit
from torchard.kernels import KERNELS
from torchard.kernels.execution.optional_backends import Imported, implementation

DEVICE = "cuda"
# The length of rows and of vocabularies; for rope, the numbers of positions and heads, and the head dim.
HIDDEN, VOCABULARY, POSITIONS, HEADS, HEAD = 4096, 50304, 2048, 32, 128
LITERALS = {"eps": 1e-5, "threshold": round(0.1 * 2**32)}
LIGER = {
    "cross_entropy": "liger_cross_entropy",
    "layer_norm": "liger_layer_norm",
    "softmax": "liger_softmax",
}
# For the training step.
BATCH, CONTEXT, RATE = 16, 1024, 1e-4

Run = Callable[[], Any]


def seconds(run: Run, rounds: int = 20, warmup: int = 5) -> float:
    """The median time by the device's own clock."""
    for _ in range(warmup):
        run()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start, end in pairs:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in pairs)) / 1e3


# -- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A kernel or its gradient on the device.

    Attributes:
        run: the implementation.
        reference: the same in eager operations.
        args: the arguments of both.
    """

    name: str
    run: Callable[..., Any]
    reference: Callable[..., Any]
    args: list[Tensor]

    @property
    def bytes(self) -> int:
        """The floor; a result that shares memory with an argument counts once."""
        results = flat(self.run(*self.args))
        sizes = {x.data_ptr(): x.nbytes for x in (*self.args, *results) if x.numel()}
        return sum(sizes.values())

    def error(self) -> float:
        """The error against float32, divided by that of eager operations."""
        exact = flat(
            self.reference(*(x.float() if x.is_floating_point() else x for x in self.args))
        )
        ours, eager = (flat(run(*self.args)) for run in (self.run, self.reference))
        return distance(ours, exact) / max(distance(eager, exact), 1e-9)


def distance(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The norm-wise relative error of all values together."""
    pairs = list(zip(values, exact, strict=True))
    squares = sum(float((a.float() - b).norm()) ** 2 for a, b in pairs)
    return float((squares / sum(float(b.norm()) ** 2 for _, b in pairs)) ** 0.5)


def elements() -> int:
    """The number of elements of the largest operand: half a gigabyte, or four times the cache."""
    cache = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    return max(1 << 28, 4 * cache // 2)


def inputs_of(pattern: Pattern, count: int) -> list[Tensor]:
    """Inputs for a pattern, with consistent dims; the largest has `count` elements."""
    assert pattern.dims is not None
    sizes = {"d": HIDDEN, "v": VOCABULARY, "h": HEADS, "s": POSITIONS}
    names = {name for dims in pattern.dims.inputs for name in dims}
    if "h" in names:
        sizes["d"] = HEAD
    row = sizes["v"] if "v" in names else HEADS * HEAD * POSITIONS if "h" in names else HIDDEN
    rows = count // row
    shapes = {"...": (rows,) if "d" in names else (rows, HIDDEN), "n": (rows,), "b": (rows,)}
    draw = torch.Generator(DEVICE).manual_seed(0)
    inputs = []
    for dims, dtype in zip(pattern.dims.inputs, pattern.dims.dtypes, strict=True):
        shape = [n for name in dims for n in shapes.get(name, (sizes.get(name, 2),))]
        if dtype.is_floating_point:
            dtype = torch.bfloat16
            inputs.append(torch.randn(shape, generator=draw, device=DEVICE, dtype=dtype))
        else:
            inputs.append(torch.randint(VOCABULARY, shape, generator=draw, device=DEVICE))
    return inputs


def case_of(kernel: Kernel, count: int) -> Case:
    """A kernel on the device, with inputs of `count` elements."""
    chosen, pattern = implementation(kernel.implementations, DEVICE), kernel.patterns[0]
    assert chosen.run is not None
    literals = {name: LITERALS[name] for name in pattern.literals}
    run, reference = (functools.partial(f, **literals) for f in (chosen.run, pattern.fn))
    return Case(kernel.name, run, reference, inputs_of(pattern, count))


def forward_and_backward(fn: Callable[..., Any], args: Sequence[Tensor]) -> Run:
    """A call of fn and its backward by autograd."""
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in args]
    floating = [x for x in inputs if x.requires_grad]
    cotangents = [torch.ones_like(x) for x in flat(fn(*inputs))]

    def run() -> Any:
        return torch.autograd.grad(flat(fn(*inputs)), floating, cotangents, allow_unused=True)

    return run


def rivals(name: str, forward: Case) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The other implementations of a kernel, by the table's column."""
    yield "compile", torch.compile(forward.reference, dynamic=False)
    function = liger(LIGER.get(name))
    if function is not None:
        literals = {"eps": LITERALS["eps"]} if name.endswith("norm") else {}
        yield "liger", functools.partial(function, **literals)


def liger(name: str | None) -> Callable[..., Any] | None:
    """A function of Liger-Kernel; None if it has none for this kernel or is not installed."""
    try:
        module = importlib.import_module("liger_kernel.transformers.functional")
    except ImportError:
        return None
    return None if name is None else getattr(module, name, None)


HEAD_OF_TABLE = ["bfloat16", "GB floor", "ms", "GB/s", "share of copy", "error / eager's"]
HEAD_OF_TABLE += ["compile / ours", "liger / ours"]


def rows_of(name: str, copying: float) -> Iterator[list[str]]:
    """The rows of a kernel and of its backward."""
    kernel, count = KERNELS[name], elements()
    assert kernel.backward is not None
    total = 0.0
    forward = case_of(kernel, count)
    for case in (forward, case_of(kernel.backward, count)):
        ours = seconds(functools.partial(case.run, *case.args))
        total += ours
        rate = case.bytes / ours
        cells = [case.name, f"{case.bytes / 1e9:.2f}", f"{1e3 * ours:.3f}", f"{rate / 1e9:,.0f}"]
        cells += [f"{rate / copying:.2f}", f"{case.error():.2f}"]
        ratios = {"compile": "", "liger": ""}
        for rival, fn in rivals(name, forward):
            if case is forward:
                run: Run = functools.partial(fn, *(x.clone() for x in forward.args))
            else:
                run = forward_and_backward(fn, forward.args)
            ratios[rival] = f"{seconds(run) / total:.2f}"
        yield [*cells, *ratios.values()]


def copying() -> float:
    """The bytes per second that a copy reads and writes."""
    x = torch.empty(elements(), dtype=torch.bfloat16, device=DEVICE)
    y = torch.empty_like(x)
    return 2 * x.nbytes / seconds(lambda: y.copy_(x))


def kernels(names: Sequence[str]) -> str:
    """The table of kernels."""
    rate, rows = copying(), [HEAD_OF_TABLE]
    for name in names:
        rows += rows_of(name, rate)
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)
        torch.compiler.reset()
    return f"copying: {rate / 1e9:,.0f} GB/s\n\n{aligned(rows)}"


# -- a training step ------------------------------------------------------------------------------


def of_logits(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def eager_step(model: Any, ids: Tensor) -> Run:
    def run() -> None:
        of_logits(model(ids, use_cache=False).logits, ids).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= RATE * p.grad
                p.grad = None

    return run


def fused_step(model: Any, ids: Tensor) -> tuple[Run, Any]:
    """The same step as jit(fuse(step)), and its program."""
    fn, params = torchard.functionalize(model)
    params = {name: p.detach().clone() for name, p in params.items()}

    def loss(params: Any) -> Tensor:
        return of_logits(fn(params, ids, use_cache=False).logits, ids)

    def step(params: Any) -> Any:
        gradients = torch.func.grad(loss)(params)
        return {name: p - RATE * gradients[name] for name, p in params.items()}

    fused = fuse(step)
    return functools.partial(jit(fused), params), fused.lower(params)


def peak(run: Run) -> int:
    """The most bytes allocated on the device during a run."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def training_step() -> str:
    """The table of training steps, and the kernels of the fused one."""
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    model.to(DEVICE, torch.bfloat16).eval()  # no dropout
    ids = torch.randint(VOCABULARY - 47, (BATCH, CONTEXT), device=DEVICE)
    eager = eager_step(model, ids)
    with FlopCounterMode(display=False) as counter:
        eager()
    flops = counter.get_total_flops()
    rows = [[f"GPT-2 small, {BATCH} x {CONTEXT}", "ms", "TFLOP/s", "peak, GB"]]

    def row(name: str, run: Run) -> None:
        time = seconds(run)
        cells = [f"{1e3 * time:.1f}", f"{flops / time / 1e12:.0f}", f"{peak(run) / 1e9:.2f}"]
        rows.append([name, *cells])

    row("eager", eager)
    row("torch.compile", eager_step(torch.compile(model), ids))
    run, program = fused_step(model, ids)
    row("jit(fuse(step))", run)
    return f"{aligned(rows)}\n\n{program.kernels}"


def main() -> None:
    every = [n for n, k in KERNELS.items() if isinstance(k.implementations.get("cuda"), Imported)]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these: step, " + ", ".join(every))
    chosen = parser.parse_args().names or [*every, "step"]
    if unknown := set(chosen) - {*every, "step"}:
        parser.error(f"there is no kernel {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: run it where torch.cuda.is_available(), with triton installed")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    if names := [name for name in chosen if name != "step"]:
        print(kernels(names))
    if "step" in chosen:
        print(training_step())


if __name__ == "__main__":
    main()

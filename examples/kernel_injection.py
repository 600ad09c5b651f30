"""Kernels put into a module from outside: in place of one operation, then of a run of layers.

    python examples/kernel_injection.py
    python examples/kernel_injection.py --size 2048 --compiler inductor

The module is Linear – LayerNorm – ReLU – Linear, whose LayerNorm normalizes its whole input, over two
dims. The module itself is not changed; a replacement is one line:

    fuse(fn, layer_norm, spread)                            # operations that match a pattern
    replaced(module, ["0", "1", "2"], linear_norm_relu)     # layers, by a function of their weights

Each is compared with the module and timed against it; which one is the fastest depends on sizes and
device. A picture of the times is saved in out/.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchard import Pattern, functionalize, fuse, jit, replaced, trace
from torchard.functional.engine.transformed import Transformed

RUN = ["0", "1", "2"]


def module_of(n: int) -> nn.Sequential:
    """The model, for inputs [n, n]; scale and shift are random: ones and zeros would hide errors."""
    norm = nn.LayerNorm([n, 2 * n])
    nn.init.normal_(norm.weight, 1, 0.1)
    nn.init.normal_(norm.bias, 0, 0.1)
    return nn.Sequential(nn.Linear(n, 2 * n), norm, nn.ReLU(), nn.Linear(2 * n, n))


# -- patterns ----------------------------------------------------------------------------------------
# Plain functions; a parameter with the default "..." matches any number. The dims say how shard may
# split a match: not along dims under "whole", here those over which mean and variance are taken.


def norm(x: Tensor, w: Tensor, b: Tensor, eps: Any = ...) -> Tensor:
    return F.layer_norm(x, x.shape[-2:], w, b, eps)


def run(x: Tensor, w1: Tensor, b1: Tensor, w: Tensor, b: Tensor, eps: Any = ...) -> Tensor:
    return F.relu(norm(F.linear(x, w1, b1), w, b, eps))


layer_norm = Pattern(norm, "... m d, m d, m d -> ... m d | whole m d", name="layer_norm")
three_layers = Pattern(
    run, "... m k, d k, d, m d, m d -> ... m d | whole m k d", name="three_layers"
)


# -- replacements -------------------------------------------------------------------------------------


def spread(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    """The norm by operations that use all cores; torch's own gives a row, here all of x, to one core."""
    centred = x - x.mean((-2, -1), keepdim=True)
    variance = centred.square().mean((-2, -1), keepdim=True)
    return torch.addcmul(b, centred * torch.rsqrt(variance + eps), w)


def linear_norm_relu(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The three layers as one function of their weights."""
    hidden = F.linear(x, params["0.weight"], params["0.bias"])
    return spread(hidden, params["1.weight"], params["1.bias"], 1e-5).relu()


# -- comparing ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """The largest difference of a variant from the module's result, and its seconds in each round."""

    name: str
    difference: float
    seconds: list[float]

    @property
    def quartiles(self) -> list[float]:
        return statistics.quantiles(self.seconds, n=4, method="inclusive")


def variants(module: nn.Module, compiler: str) -> dict[str, Callable[..., Tensor]]:
    """The module, and all replacements that must compute the same."""
    fn, _ = functionalize(module)
    block, _ = functionalize(replaced(module, RUN, linear_norm_relu))
    return {
        "native": fn,
        "fuse(fn, layer_norm)": fuse(fn, layer_norm, compiler=compiler),
        "fuse(fn, layer_norm, spread)": fuse(fn, layer_norm, spread),
        "fuse(fn, three_layers)": fuse(fn, three_layers, compiler=compiler),
        'replaced(module, ["0", "1", "2"], …)': block,
    }


def measure(
    runs: Mapping[str, Callable[..., Tensor]], args: Sequence[Any], rounds: int
) -> list[Timed]:
    """Compare and time the variants, in turns, so that a disturbance affects all of them alike.

    The first calls, which compile, are not timed.
    """
    programs = {name: jit(run, backend="eager") for name, run in runs.items()}
    expected, rows = runs["native"](*args), []
    for name, program in programs.items():
        difference = float((program(*args) - expected).abs().max())
        assert difference < 1e-5, f"{name}: differs by {difference} from the module"
        rows.append(Timed(name, difference, []))
    for _ in range(rounds):
        for row, program in zip(rows, programs.values(), strict=True):
            began = now(expected)
            program(*args)
            row.seconds.append(now(expected) - began)
    return rows


def now(tensor: Tensor) -> float:
    """The time, taken when the tensor's device has no work left."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()


def table(rows: Sequence[Timed]) -> str:
    lines = [f"{'':40}{'difference':>12}{'ms: quartile':>14}{'median':>10}{'quartile':>10}"]
    for row in rows:
        low, middle, high = (1e3 * q for q in row.quartiles)
        lines.append(f"{row.name:40}{row.difference:12.1e}{low:14.3f}{middle:10.3f}{high:10.3f}")
    return "\n".join(lines)


def draw(path: Path, rows: Sequence[Timed], title: str) -> None:
    """Save a picture: a point for each call, in order, boxes from quartile to quartile, and medians."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    times = [[1e3 * s for s in row.seconds] for row in rows]
    for place, column in enumerate(times, 1):
        spread = torch.linspace(-0.2, 0.2, len(column)).tolist()
        axes.plot([place + s for s in spread], column, ".", color="0.7", markersize=3, zorder=0)
    axes.boxplot(times, showfliers=False, widths=0.5)
    axes.set_xticks(range(1, len(rows) + 1), [row.name.replace(", ", ",\n", 1) for row in rows])
    axes.tick_params(axis="x", labelsize=8)
    top = max(row.quartiles[2] for row in rows)
    axes.set(ylabel="one call, ms", ylim=(0, 1.6e3 * top), title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=2048 if cuda else 256, help="input features")
    parser.add_argument("--rounds", type=int, default=100, help="how often each is timed")
    parser.add_argument("--plot", type=Path, default=Path("out/kernel_injection.png"))
    # Compiling takes a while, and on a CPU kernels are compiled for large tensors only.
    parser.add_argument("--compiler", choices=("eager", "inductor"), default="eager")
    # More threads than free cores slow everything down: torch's threads spin while they wait.
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)

    torch.manual_seed(0)
    device, n = "cuda" if cuda else "cpu", options.size
    module = module_of(n).to(device)
    fn, params = functionalize(module)
    args = params, torch.randn(n, n, device=device)
    print(f"1. The program of the module:\n\n{trace(fn)(*args)}\n")

    runs = variants(module, options.compiler)
    print("2. The matches in it, and what runs in their place:\n")
    for name, run in runs.items():
        if isinstance(run, Transformed):
            print(f"{name}\n{run.lower(*args).kernels}\n")
    kept = replaced(module, RUN, linear_norm_relu).state_dict(keep_vars=True)
    assert all(kept[k] is v for k, v in module.state_dict(keep_vars=True).items())

    rows = measure(runs, args, options.rounds)
    print(f"3. Equal to five decimals, with the same weights; {options.rounds} calls of each:\n")
    print(table(rows))
    draw(options.plot, rows, f"Linear – LayerNorm([{n}, {2 * n}]) – ReLU – Linear, {device}")
    print(f"\ntimes of all calls: {options.plot}")


if __name__ == "__main__":
    main()

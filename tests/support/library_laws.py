"""Words over the library's transforms and torch's, on five models: right, or refused, and why.

    python tests/support/library_laws.py --every 70 --out tests/results/laws.md

A word is a stack, written from the inside out.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from refusals import refuses
from torch.nn import functional as F

from torchard import Mesh, RetraceWarning, random
from torchard.testing import check_stack

LETTERS = ("shard", "fuse", "checkpoint", "jit", "grad", "vmap", "jvp")
WORDS = [word for n in range(1, 5) for word in product(LETTERS, repeat=n)]
MESHES = [Mesh(axes, virtual=True) for axes in ({"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 3})]


def draw(seed: int, *shape: int) -> torch.Tensor:
    return random.normal(random.key(seed), shape, dtype=torch.float64) * 0.5


def mlp(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ p["up"] + p["bias"], approximate="tanh") @ p["down"]


def attention(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ p["qkv"]).chunk(3, -1)
    return (q @ k.mT / 2).softmax(-1) @ v @ p["out"]


def conv_net(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(torch.tanh(F.conv2d(x, p["kernel"], p["bias"], padding=1)), 2).sum((2, 3))


def gpt_layer(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    h = x + attention(p, F.layer_norm(x, x.shape[-1:], p["gain"]))
    return h + mlp(p, F.layer_norm(h, h.shape[-1:], p["gain"]))


def recurrence(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Rows that are written in place, read through detach, summed and compared."""
    h = x.clone()
    for row in range(h.shape[0] - 1):
        h[row + 1] = torch.tanh(h[row].detach() + x[row + 1] @ p["w"])
    return h.cumsum(0).flip(0) * h.amax(0)


MLP = {"up": draw(1, 4, 6), "bias": draw(2, 6), "down": draw(3, 6, 4)}
ATTENTION = {"qkv": draw(4, 4, 12), "out": draw(5, 4, 4)}
Model = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
MODELS: dict[str, Model] = {
    "mlp": (mlp, (MLP, draw(6, 5, 4))),
    "attention": (attention, (ATTENTION, draw(7, 6, 4))),
    "conv net": (conv_net, ({"kernel": draw(8, 3, 2, 3, 3), "bias": draw(9, 3)}, draw(10, 2, 2, 4, 4))),
    "gpt layer": (gpt_layer, ({**MLP, **ATTENTION, "gain": draw(11, 4)}, draw(12, 6, 4))),
    "recurrence": (recurrence, ({"w": draw(13, 4, 4)}, draw(14, 3, 4))),
}


def words(model: str, every: int) -> list[tuple[str, ...]]:
    """One in so many words, spread over all lengths, others for each model."""
    return WORDS[61 * list(MODELS).index(model) % every :: every]


def outcome(model: str, word: tuple[str, ...], number: int) -> str:
    """What `judged` says of a word on a model."""
    fn, args = MODELS[model]
    return judged(fn, args, word, MESHES[(number + list(MODELS).index(model)) % len(MESHES)])


def judged(fn: Callable[..., Any], args: tuple[Any, ...], word: tuple[Any, ...], mesh: Mesh) -> str:
    """Nothing if a stack equals the same derivations of the plain function; else the refusal.

    Raises:
        AssertionError: it computes something else.
        Exception: it fails by an error that is no refusal.
    """
    try:
        check_stack(fn, [word], *args, mesh=mesh)
    except Exception as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if isinstance(error, AssertionError):
            raise
        if refuses(error):
            return said
        if str(error) == _torch_says(fn, word, args):
            return f"torch refuses the plain function too, {said}"
        raise
    return ""


def _torch_says(fn: Callable[..., Any], word: tuple[str, ...], args: tuple[Any, ...]) -> str:
    """The error of the word's derivations of the plain function, if there is one."""
    try:
        check_stack(fn, [[letter for letter in word if letter in ("grad", "vmap", "jvp")]], *args)
    except RuntimeError as error:
        return str(error)
    return ""


def table(every: int) -> tuple[str, int]:
    """The results of one in so many words on each model, and how many were wrong."""
    rows, refused, wrong = [], Counter[str](), []
    for model in MODELS:
        began, found = time.monotonic(), Counter[str]()
        chosen = words(model, every)
        for number, word in enumerate(chosen):
            try:
                said = outcome(model, word, number)
            except Exception as error:
                wrong.append(f"{model}, {' '.join(word)}: {type(error).__name__}: {error}")
                found["wrong"] += 1
                continue
            found["refused" if said else "right"] += 1
            if said:
                refused[f"{model}, {' '.join(word)}: {said}"] += 1
        cells = (model, len(chosen), found["right"], found["refused"], found["wrong"])
        seconds = time.monotonic() - began
        rows.append("| " + " | ".join(map(str, cells)) + f" | {seconds:.0f} |")
        print(rows[-1], file=sys.stderr, flush=True)
    return HEAD.format(every=every) + results_text(rows, sorted(refused), wrong), len(wrong)


def results_text(rows: list[str], refused: list[str], wrong: list[str]) -> str:
    """The rows of a table, and lists of what was refused and wrong, if anything was."""
    lists = {"Refused": refused, "Wrong": wrong}
    parts = [f"{name}:\n\n" + "\n".join(f"- {line}" for line in of) for name, of in lists.items() if of]
    return "\n".join([*rows, *(f"\n{part}" for part in parts)]) + "\n"


HEAD = f"""# The library's laws

Stacks of up to four of {", ".join(LETTERS)} on five models and three meshes, one
in {{every}} of {len(WORDS):,}, as `make laws` wrote them. Right: values and derivatives equal
the plain function's.

| model | words | right | refused | wrong | seconds |
|---|---:|---:|---:|---:|---:|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=70)
    parser.add_argument("--out", type=Path, help="the file of the table; by default it is printed")
    options = parser.parse_args()
    warnings.simplefilter("ignore", RetraceWarning)
    return told(*table(options.every), options.out)


def told(text: str, wrong: int, out: Path | None) -> int:
    """Print a table, or write it to a file; gives the exit status, 1 if anything was wrong."""
    if out is None:
        print(text)
    else:
        out.write_text(text)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

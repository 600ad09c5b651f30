"""The seconds that fuse adds to a first call, for the gradients of eight HuggingFace models.

    python benchmarks/first_fuse.py               all of them; the table is saved in results/
    python benchmarks/first_fuse.py Llama ...     only these, nothing saved

Each model is lowered in a process of its own, twice: with nothing kept on disk of the library's patterns
(kernels/patterns/derivations.py), and with what another process left there. What is timed is lowering;
trials of kernels are part of it. `all` looks for every kernel (`prefer="memory"`), as reports do.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from bench import RESULTS, aligned, machine

from torchard import fuse, jit, trace

MODELS = ["BERT", "GPT-2", "Llama", "Gemma 2", "T5", "ViT", "Whisper", "BART"]
SUPPORT = Path(__file__).parents[1] / "tests" / "support"


def gradients(name: str) -> tuple[Any, Any]:
    """The gradients of a model's loss in float32, and their arguments."""
    sys.path.append(str(SUPPORT))
    from zoo import Case

    case = Case.single(name)
    return torch.func.grad(case.loss(case.fn)), (case.params, case.inputs)


def measured(name: str) -> dict[str, Any]:
    """The seconds of each, and what was found."""
    fn, args = gradients(name)
    # Imports and first uses, which what is timed shall not pay for.
    jit(fuse(lambda x: x.sin() * x.softmax(-1)), backend="eager")(torch.ones(2, 2))
    jit(fn, backend="eager").lower(*args)

    def seconds(lower: Any) -> tuple[float, Any]:
        began = time.perf_counter()
        lowered = lower(*args)
        return time.perf_counter() - began, lowered

    traced, _ = seconds(trace(fn))
    plain, _ = seconds(jit(fn, backend="eager").lower)
    fused, program = seconds(jit(fuse(fn), backend="eager").lower)
    every, memory = seconds(jit(fuse(fn, prefer="memory"), backend="eager").lower)
    found = program.kernels
    kernels = [use for use in found if not str(use.how).startswith("as written")]
    return {
        "operations": len(program.calls),
        "trace": traced,
        "fuse": fused - plain,
        "all": every - plain,
        "kernels": len(kernels),
        "written": len(found) - len(kernels),
        "of memory": len(memory.kernels),
        "misses": [str(miss) for miss in found.missed],
    }


def in_process(name: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", __file__, "--one", name]
    environment = {**os.environ, "TORCHARD_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(output.stdout.splitlines()[-1])
    return result


HEAD = ["model", "operations", "trace s", "fuse s, cold", "warm", "warm / trace", "all s, warm"]
HEAD += ["kernels", "left as written", "near misses"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these models: " + ", ".join(MODELS))
    parser.add_argument("--one", default="", help="measure this one here, and print it as JSON")
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        print(json.dumps(measured(options.one)))
        return
    rows, misses = [HEAD], list[str]()
    for name in options.names or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = in_process(name, folder), in_process(name, folder)
        times = [f"{cold['fuse']:.2f}", f"{warm['fuse']:.2f}", f"{warm['fuse'] / warm['trace']:.2f}"]
        counts = [str(warm[k]) for k in ("kernels", "written")] + [str(len(warm["misses"]))]
        rows.append([
            *(name, str(warm["operations"]), f"{warm['trace']:.2f}", *times),
            *(f"{warm['all']:.2f}", *counts),
        ])  # fmt: skip
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)
        misses += [f"{name}: {miss}" for miss in dict.fromkeys(warm["misses"])]
    text = f"{machine()}\n\n{aligned(rows)}\n\nnear misses\n" + "\n".join(misses)
    print(text)
    if not options.names:
        version = torch.__version__.split("+")[0]
        (RESULTS / f"{datetime.date.today()}-first_fuse-torch-{version}.txt").write_text(text + "\n")


if __name__ == "__main__":
    main()

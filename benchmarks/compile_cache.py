"""The time to compile in a first and in a second process: jit beside torch.compile.

Each rival compiles the loss and gradients of a GPT-2 in two processes, one after the other, with a cache
directory that is empty at first: the second process finds what the first has compiled.

    python benchmarks/compile_cache.py            12 layers
    python benchmarks/compile_cache.py --quick    2 layers
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import optree
import torch

from torchard import jit, random

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import train_gpt

RIVALS = ("jit", "torch.compile")


def first_call(rival: str, layers: int) -> float:
    """The seconds that the first call takes."""
    size = train_gpt.Size(context=64, width=128, heads=4, layers=layers)
    params = train_gpt.init(size, random.key(0))
    batch = torch.zeros(2, size.context + 1, dtype=torch.int64)
    loss = functools.partial(train_gpt.loss, size)
    if rival == "jit":
        run = jit(torch.func.grad(loss))
        started = time.perf_counter()
        run(params, batch)
    else:
        compiled = torch.compile(loss)
        optree.tree_map(lambda p: p.requires_grad_(), params)
        started = time.perf_counter()
        compiled(params, batch).backward()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rival", choices=RIVALS, help="make one call of it and print its seconds")
    options = parser.parse_args()
    layers = 2 if options.quick else options.layers
    if options.rival:
        print(first_call(options.rival, layers))
        return
    print(f"first call of loss and gradients, GPT-2 of {layers} layers, seconds")
    print(f"{'':>14} {'empty cache':>14} {'next process':>14}")
    for rival in RIVALS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-W", "ignore", __file__]
            command += ["--rival", rival, "--layers", str(layers)]
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
            runs = [
                subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                for _ in range(2)
            ]
        print(f"{rival:>14}", *(f"{float(r.stdout.split()[-1]):14.1f}" for r in runs), flush=True)


if __name__ == "__main__":
    main()

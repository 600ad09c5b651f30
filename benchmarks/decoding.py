"""Writes in place: buffers filled by rows, a donated cache, and decoders, beside plain torch.

    python benchmarks/decoding.py            all tables; added to a file in results/
    python benchmarks/decoding.py --quick    smaller sizes, few rounds, nothing saved
    python benchmarks/decoding.py --only rows cache decoder huggingface ranks

Plain torch is what an expert writes: in place, without jit. All rivals compute the same, which is checked
before they are timed; ratios are to plain torch in the same round, and their median over rounds is given.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import decoders
import torch
import torch.distributed as dist
from bench import RESULTS, aligned, machine
from decoders import Size, Step
from timing import in_turns
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from workload import Rival

from torchard import Mesh, jit

PLAIN = "plain torch"
EAGER: dict[str, dict[str, Any]] = {
    "jit eager": {"backend": "eager"},
    "jit planned": {"backend": "eager", "memory": "planned"},
}
WAYS = {**EAGER, "jit inductor": {}}
Call = Callable[[], Any]


def row(name: str, calls: Mapping[str, Call], rounds: int, per: int = 1) -> list[str]:
    """A line of a table: milliseconds of plain torch, then each rival's, with its ratio."""
    rivals = [Rival(each, call, list) for each, call in calls.items()]
    first, *rest = in_turns(rivals, rounds)
    cells = [name, f"{1e3 * first.median / per:.3f}"]
    return cells + [f"{1e3 * r.median / per:.3f} ({r.times(first):.2f} ×)" for r in rest]


def head(title: str, names: Sequence[str]) -> list[str]:
    return [f"{title}: ms", *names]


# -- rows of a buffer -------------------------------------------------------------------------------


def rows(x: Tensor, w: Tensor, count: int) -> Tensor:
    """Each row of a buffer written once: [count, x]."""
    y = torch.zeros(count, *x.shape)
    for i in range(count):
        x = torch.tanh(x * w)
        y[i] = x
    return y


def add(x: Tensor, w: Tensor, count: int) -> Tensor:
    """Rows of a buffer added to, one after another."""
    y = torch.zeros(count, *x.shape)
    for i in range(count):
        y[i % 4].add_(x)
    return y


def by_rows(quick: bool, rounds: int) -> str:
    """Loops that fill a buffer; the bytes that a call moves, beside those of the result."""
    width = 4096 if quick else 65536
    x, w = torch.linspace(-1, 1, width), torch.linspace(1, 2, width)
    found = [[*head("a buffer by rows", (PLAIN, *WAYS)), "bytes moved", "of the result", "peak"]]
    for fn in (rows, add):
        for count in (16, 32, 64):
            calls: dict[str, Call] = {PLAIN: functools.partial(fn, x, w, count)}
            for name, options in WAYS.items():
                calls[name] = functools.partial(jit(fn, **options), x, w, count)
                torch.testing.assert_close(calls[name](), calls[PLAIN]())
            program = jit(fn, backend="eager").lower(x, w, count)
            sizes = [program.work.bytes, count * width * 4, program.peak]
            line = row(f"{fn.__name__}, {count}", calls, rounds)
            found.append([*line, *(f"{size / 1e6:.1f} MB" for size in sizes)])
    return aligned(found)


# -- one row of a donated cache ---------------------------------------------------------------------


def assigned(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    """By an assignment to a clone: an argument may not be written."""
    cache = cache.clone()
    cache[:, :, at] = new
    return cache


def put(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    return cache.movedim(2, 0).index_put((at,), new.movedim(2, 0)).movedim(0, 2)


def scattered(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    return cache.scatter(2, at[None, None, :, None].expand_as(new), new)


WRITES: dict[str, Callable[..., Tensor]] = {
    "index_copy": lambda cache, at, new: cache.index_copy(2, at, new),
    "cache[:, :, at] = new": assigned,
    "index_put": put,
    "scatter": scattered,
    "slice_scatter": lambda cache, at, new: cache.slice_scatter(new, 2, 5, 6),
}


def one_row(quick: bool, rounds: int) -> str:
    """One position of a cache of 33 MB, over and over."""
    shape = (1, 16, 512 if quick else 8192, 64)
    cache, at, new = torch.zeros(shape), torch.tensor([5]), torch.ones(1, 16, 1, 64)
    found = [head(f"one position of a donated cache {list(shape)}", (PLAIN, *WAYS))]
    for name, fn in WRITES.items():
        calls: dict[str, Call] = {PLAIN: lambda: cache.index_copy_(2, at, new)}
        for way, options in WAYS.items():
            calls[way] = _held(jit(fn, donate_argnums=0, **options), cache.clone(), at, new)
            assert torch.equal(calls[way](), cache.index_copy(2, at, new)), (name, way)
        found.append(row(name, calls, rounds))
    return aligned(found)


def _held(run: Callable[..., Tensor], cache: Tensor, *rest: Tensor) -> Call:
    """A call that donates what the one before returned."""
    held = [cache]

    def call() -> Tensor:
        held.append(run(held.pop(), *rest))
        return held[0]

    return call


# -- decoders ---------------------------------------------------------------------------------------


def calls_of(steps: Mapping[str, tuple[Step, Any, Any]], tokens: int, start: int) -> dict[str, Call]:
    """A call of each decodes the same positions again; each step is given with parameters and caches.

    Raises:
        AssertionError: one yields other tokens than the first.
    """
    found: dict[str, Call] = {}
    wanted = None
    for name, (step, params, caches) in steps.items():
        held = [caches]
        predicted, held[0] = decoders.decode(step, params, held[0], start)
        wanted = predicted if wanted is None else wanted
        assert torch.equal(predicted, wanted), f"{name}: {predicted}, not {wanted}"

        def call(step: Step = step, params: Any = params, held: list[Any] = held) -> None:
            _, held[0] = decoders.decode(step, params, held[0], tokens, start)

        found[name] = call
    return found


def one_process(quick: bool, rounds: int) -> str:
    """A decoder with a static cache. An expert who slices the cache reads only what is written."""
    size = Size(length=256) if quick else Size()
    params, tokens = decoders.params(size), 8
    steps = {PLAIN: (decoders.plain(size), params, decoders.caches(size))}
    for name, options in WAYS.items():
        run = jit(decoders.pure(size), donate_argnums=1, **options)
        steps[name] = run, params, decoders.caches(size)
    line = row(str(size), calls_of(steps, tokens, 16), rounds, tokens)
    return aligned([head("a decoder, per token", tuple(steps)), line])


def huggingface(quick: bool, rounds: int) -> str:
    """HuggingFace's Llama with its static cache."""
    size = Size(length=256) if quick else Size()
    module, pure, params = decoders.hugging_face(size)
    tokens = 8
    steps: dict[str, tuple[Step, Any, Any]] = {PLAIN: (decoders.in_place(module, size), None, None)}
    for name, options in WAYS.items():
        run = jit(pure, donate_argnums=1, **options)
        steps[name] = run, params, decoders.caches(size)
    line = row(str(size), calls_of(steps, tokens, 16), rounds, tokens)
    return aligned([head("HuggingFace's Llama, StaticCache, per token", tuple(steps)), line])


# -- two ranks --------------------------------------------------------------------------------------


def ranks(rank: int, meeting: str, size: Size, rounds: int) -> None:
    """Tensor parallel decoding on two ranks, by hand and by shard."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    store = dist.FileStore(meeting, 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(minutes=2)
    )
    steps = {"by hand": decoders.by_hand(size, rank, 2)}
    for name, options in WAYS.items():
        run, params, caches = decoders.sharded(size, Mesh({"tp": 2}))
        steps[name] = jit(run, donate_argnums=1, **options), params, caches
    tokens = 8
    line = row(str(size), calls_of(steps, tokens, 16), rounds, tokens)
    if rank == 0:
        Path(f"{meeting}.table").write_text(
            aligned([head("a decoder on two gloo ranks, per token", tuple(steps)), line])
        )
    dist.barrier()
    dist.destroy_process_group()


def two_ranks(quick: bool, rounds: int) -> str:
    """Two processes, one thread each."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"{folder}/meeting"
        spawn(ranks, (meeting, Size(length=256) if quick else Size(), rounds), nprocs=2)
        return Path(f"{meeting}.table").read_text()


TABLES = {
    "rows": by_rows,
    "cache": one_row,
    "decoder": one_process,
    "huggingface": huggingface,
    "ranks": two_ranks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes, nothing saved")
    parser.add_argument("--only", nargs="+", default=list(TABLES), choices=list(TABLES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = [machine()]
    with torch.no_grad():
        for name in options.only:
            texts.append(TABLES[name](options.quick, 5 if options.quick else 20))
            print(f"\n{texts[-1]}", flush=True)
    if not options.quick:
        version = torch.__version__.partition("+")[0]
        path = RESULTS / f"{datetime.date.today()}-decoding-torch-{version}.txt"
        with path.open("a") as file:
            file.write("\n\n".join(texts) + "\n\n")


if __name__ == "__main__":
    main()

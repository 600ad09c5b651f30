"""Published packages: which laws of torchard.testing can be tested of their functions and modules.

    make reach

A law that holds or fails can be tested; any other error is a refusal, whose message is listed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from draws import draw
from outcomes import Outcome, outcome
from reach_functions import FUNCTIONS, Reached
from reach_modules import MODULES

from torchard.testing import check_batching, check_derivatives, check_dtypes, check_pure

REACHED = [*FUNCTIONS, *MODULES]
VALUES_AND_GRADIENTS = ("value", "gradient")


def prepared(entry: Reached) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments; of a module, its parameters are the first one."""
    module, _, name = entry.path.partition(":")
    target = getattr(importlib.import_module(module), name)
    args = draw(entry.spec, 0, ("ordinary",), entry.most)
    if entry.init is None:
        return functools.partial(target, **entry.options), args
    torch.manual_seed(0)
    built = target(*entry.init, **entry.made).double().eval()
    params = {k: p.detach() for k, p in built.named_parameters()}

    def call(params: Any, *args: Any) -> Any:
        return torch.func.functional_call(built, params, args)

    return (call, (params, *args)) if params else (lambda *args: built(*args), args)


def laws(fn: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    def derivatives() -> None:
        """By reverse mode alone where the function has no forward mode."""
        try:
            check_derivatives(fn, *args, order=1)
        except (NotImplementedError, RuntimeError):
            check_derivatives(fn, *args, order=1, modes=("reverse",))

    return {
        "check_pure": lambda: check_pure(fn, *args),
        "check_derivatives": derivatives,
        "check_dtypes": lambda: check_dtypes(fn, *args, dtypes=(torch.float32,)),
        "check_batching": lambda: check_batching(fn, *args, orders=VALUES_AND_GRADIENTS),
    }


def outcomes_of(entry: Reached) -> dict[str, Outcome]:
    known: list[Any] = []
    began = outcome(lambda: known.extend(prepared(entry)))
    if began.word != "holds":
        return {"made": began}
    fn, args = known
    called = outcome(lambda: fn(*args))
    if called.word != "holds":  # then the arguments are not such as it takes
        return {"call": called}
    return {law: outcome(call, limit=40) for law, call in laws(fn, args).items()}


def reachable(found: dict[str, Outcome]) -> bool:
    """Whether a law of values and gradients can be tested."""
    words = [found[law].word for law in ("check_derivatives", "check_dtypes") if law in found]
    return any(word != "refused" for word in words)


def table(rows: dict[Reached, dict[str, Outcome]], seconds: float) -> str:
    names = ("check_pure", "check_derivatives", "check_dtypes", "check_batching")
    packages = dict.fromkeys(entry.package for entry in rows)
    versions = ", ".join(f"{p} {version(p)}" for p in packages)
    lines = [f"| package | function | {' | '.join(names)} | s |", f"|---|---|{'---|' * len(names)}---:|"]
    notes = []
    for entry, found in rows.items():
        words = " | ".join(found[n].word if n in found else "not called" for n in names)
        total = sum(f.seconds for f in found.values())
        lines.append(f"| {entry.package} | `{entry.name}` | {words} | {total:.1f} |")
        notes += [
            f"- {entry.package}, {entry.name}, {law}: {f.word}: {shown(f)}"
            for law, f in found.items() if f.word != "holds"
        ]  # fmt: skip
    count = sum(map(reachable, rows.values()))
    heading = (
        f"{count} of {len(rows)} functions and modules of {len(packages)} packages can be tested by "
        f"`check_derivatives` or `check_dtypes`, as `make reach` ran them with torch {torch.__version__} "
        f"in {seconds:.0f} s: {versions}. "
        'A law "holds", "fails", or is "refused"; "not called": the function itself fails.'
    )
    parts = ["# Reach", heading, "\n".join(lines), "## What does not hold", "\n".join(notes) or "None."]
    return "\n\n".join(parts) + "\n"


def shown(found: Outcome) -> str:
    marked = next((" ".join(x.split()) for x in found.why.split("\n") if "<--" in x), "")
    return " ".join(f"{found.first_line} {marked}".split())[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="packages or functions whose names contain this")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    began, rows = time.time(), {}
    for entry in REACHED:
        if not given.only or given.only in f"{entry.package} {entry.name}":
            rows[entry] = outcomes_of(entry)
            words = {law: f.word for law, f in rows[entry].items()}
            print(entry.package, entry.name, words, flush=True)
    text = table(rows, time.time() - began)
    if given.out:
        given.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()

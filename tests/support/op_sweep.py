"""The operator sweep: sample calls of torch's ``op_db`` × random specs × 2–4 virtual ranks.

``make sweep`` runs every sample, forward and gradient, and writes what it found to
``tests/results``: what was right, what torchard refuses and with which words, and which operations
have a factor rule, came apart, or were gathered.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import platform
import re
import sys
import time
import traceback
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from op_db import Case, cases, entries, name_of
from paths import RESULTS
from refusals import refuses
from sharded_programs import equal_when_sharded
from torch import fx

from torchard.functional.core.errors import RetraceWarning
from torchard.sharding import Mesh, P, place, shard
from torchard.sharding.decompositions.decompose import comes_apart
from torchard.sharding.planning.decision import Plan
from torchard.sharding.planning.propagation.plan import choose
from torchard.sharding.rules import lookup
from torchard.sharding.scheduling import improved
from torchard.sharding.testing import random_spec
from torchard.testing import Differs

MESHES = [Mesh(axes, virtual=True) for axes in ({"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2})]
LEAST = 4  # an entry of few samples is tried with several specs

RIGHT, REFUSED, NOTHING, WRONG, BROKEN = "right", "refused", "nothing", "wrong", "broken"


@dataclass(frozen=True)
class Verdict:
    """What became of one case: right, refused (by a torchard error), nothing to compare (torch itself
    cannot run it, or it returns no tensor), wrong values, or broken (some other error)."""

    kind: str
    case: str
    where: str = ""
    why: str = ""


@dataclass
class Seen:
    """Every overload that was planned, and how."""

    without: set[str] = field(default_factory=set)
    ruled: set[str] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)
    gathered: set[str] = field(default_factory=set)

    def plan(self, graph: fx.Graph, given: Any, mesh: Mesh) -> Plan:
        before = Counter(n.target for n in graph.nodes if n.op == "call_function")
        could = {n.target for n in graph.nodes if n.op == "call_function" and comes_apart(n)}
        self.without |= {str(op) for op in before if _is_operation(op) and lookup(op) is None}
        made = choose(graph, given, mesh)
        after = Counter(n.target for n in made.graph.nodes if n.op == "call_function")
        self.apart |= {str(op) for op in before - after if op in could}
        for node, option in made.decision.option.items():
            gathered = option.rule.gathered and bool(option.rule.ins)
            (self.gathered if gathered else self.ruled).add(str(node.target))
        return made


def _is_operation(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload)


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Look at every plan that ``shard`` makes."""
    improved.choose = seen.plan
    try:
        yield
    finally:
        improved.choose = choose


# -- one case -----------------------------------------------------------------------------------------


def judge(case: Case, rng: Random) -> Verdict:
    """Run one case on a random mesh with random specs, beside torch alone."""
    mesh = rng.choice(MESHES)
    specs = tuple(random_spec(rng, x.shape, mesh) for x in case.tensors)
    where = f"on {mesh} with {specs}"
    with warnings.catch_warnings():
        # Deprecated and beta operations warn under torch alone, too; what torchard says still counts.
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RetraceWarning)
        grads = _runs_alone(case)
        if grads is None:
            return Verdict(NOTHING, str(case), why="torch alone does not run it, or gives no tensor")
        try:
            _check(case, mesh, specs, grads, rng.random() < 0.8)
        except AssertionError as error:
            kind = WRONG if error.__traceback__ and _ours(error) else BROKEN
            return Verdict(kind, str(case), where, _words(error))
        except Exception as error:
            refused = refuses(error)
            why = _words(error) if refused else _words(error) + "\n" + _tail(error)
            return Verdict(REFUSED if refused else BROKEN, str(case), where, why)
    return Verdict(RIGHT, str(case), where)


def _runs_alone(case: Case) -> bool | None:
    """Whether torch alone runs it with gradients (True), without (False), or not at all (None)."""
    for grads in (True, False) if case.differentiable else (False,):
        which = zip(case.tensors, case.wanted, strict=True)
        tensors = [x.clone().requires_grad_(grads and wanted) for x, wanted in which]
        try:
            with torch.set_grad_enabled(grads):
                out = case(*tensors)
                followed = [x for x in out if x.requires_grad]
                if followed and grads:
                    torch.autograd.grad(followed, [x for x in tensors if x.requires_grad],
                                        [torch.ones_like(x) for x in followed], allow_unused=True)
            if out:
                return grads
        except Exception:
            continue
    return None


def _check(case: Case, mesh: Mesh, specs: tuple[P, ...], grads: bool, placed: bool) -> None:
    args = tuple(case.tensors)
    if not case.determined:
        want, have = case(*args), shard(case, mesh)(*place(args, mesh, specs))
        for w, h in zip(want, have, strict=True):
            assert (w.shape, w.dtype) == (h.shape, h.dtype)
        return
    orders = ("value", "gradient") if grads else ("value",)
    equal_when_sharded(case, args, mesh, specs, placed=placed, orders=orders)


def _ours(error: BaseException) -> bool:
    """Whether the comparison itself failed, not an assertion on the way."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, Differs) or last.filename.endswith("op_sweep.py")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:600]}"


def _tail(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return "\n".join(f"  {Path(f.filename).name}:{f.lineno} {f.name}" for f in frames)


# -- the sweep ----------------------------------------------------------------------------------------


def sweep(
    chosen: Iterable[Any], limit: int | None = None, least: int = LEAST, first: int | None = None
) -> Iterator[tuple[str, Verdict]]:
    """Verdicts on some entries.

    Args:
        limit: how many samples of each one, evenly spaced; None takes all.
        least: how often an entry of few samples is tried at least.
        first: samples to choose from (some entries take long to make theirs); None looks at all.
    """
    for entry in chosen:
        try:
            found = list(itertools.islice(cases(entry), first))
        except Exception as error:  # e.g. samples for another device
            yield name_of(entry), Verdict(NOTHING, name_of(entry), why=f"no samples: {_words(error)}")
            continue
        if not found:
            yield name_of(entry), Verdict(NOTHING, name_of(entry), why="no samples for this device")
        if limit is not None and len(found) > limit:
            found = [found[(2 * i + 1) * len(found) // (2 * limit)] for i in range(limit)]
        while 0 < len(found) < least:
            found = found + found[: least - len(found)]
        for i, case in enumerate(found):
            yield name_of(entry), judge(case, Random(zlib.crc32(f"{name_of(entry)} {i}".encode())))


def report(verdicts: list[tuple[str, Verdict]], seen: Seen, seconds: float) -> str:
    """The findings as text."""
    by_kind: dict[str, dict[str, list[Verdict]]] = defaultdict(lambda: defaultdict(list))
    for name, verdict in verdicts:
        by_kind[verdict.kind][name].append(verdict)
    names = {name for name, _ in verdicts}
    gathered = seen.gathered - seen.ruled
    lines = [
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}; "
        f"{seconds:.0f} s",
        f"{len(names)} entries of op_db, {len(verdicts)} cases (sample × mesh × specs)",
        *(
            f"{kind:8} {sum(map(len, by_kind[kind].values())):6} cases, {len(by_kind[kind]):4} entries"
            for kind in (RIGHT, REFUSED, NOTHING, WRONG, BROKEN)
        ),
        "",
        f"{len(seen.ruled | seen.gathered | seen.apart)} overloads planned: {len(seen.ruled)} split by a "
        f"factor rule; {len(seen.without)} have none, of which {len(seen.without & seen.apart)} came "
        f"apart at least once and {len(gathered)} were gathered",
        "",
        *_listed("gathered for want of a rule", gathered),
        *_listed("without a rule, and taken apart at least once", seen.without & seen.apart),
        *_listed("gathered in some calls", seen.gathered & seen.ruled),
        *_listed("with a rule, and taken apart at least once", seen.apart - seen.without),
        *_listed("with a factor rule", seen.ruled),
    ]
    for kind in (WRONG, BROKEN):
        lines += [f"{kind}:"] if by_kind[kind] else []
        for found in by_kind[kind].values():
            lines += [f"  {v.case} {v.where}\n    {v.why}" for v in found[:3]]
    lines += ["refused, by entry:", *_reasons(by_kind[REFUSED])]
    lines += ["", "nothing to compare, by entry:", *_reasons(by_kind[NOTHING])]
    return "\n".join(lines) + "\n"


def _listed(title: str, names: Iterable[str]) -> list[str]:
    found = sorted(names)
    return [f"{title} ({len(found)}):", *(f"  {n}" for n in found), ""]


def _reasons(found: dict[str, list[Verdict]]) -> list[str]:
    """Entries by what was said, the place in the source left out."""
    groups: dict[str, set[str]] = defaultdict(set)
    for name, verdicts in found.items():
        for v in verdicts:
            groups[re.sub(r"\S+:\d+:? ", "", v.why)[:110].replace("\n", " ")].add(name)
    return [f"  {why}\n    {', '.join(sorted(names))}" for why, names in sorted(groups.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="a regular expression on the entries' names")
    parser.add_argument("--limit", type=int, help="at most so many samples of an entry")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seen, verdicts, started = Seen(), [], time.time()
    chosen = [e for e in entries() if re.search(options.only or "", name_of(e))]
    with watched(seen):
        for name, verdict in sweep(chosen, options.limit):
            verdicts.append((name, verdict))
            if verdict.kind in (WRONG, BROKEN):
                print(f"{verdict.kind}: {verdict.case} {verdict.where}\n    {verdict.why}", flush=True)
    text = report(verdicts, seen, time.time() - started)
    default = RESULTS / f"op-sweep-torch-{torch.__version__.split('+')[0]}.txt"
    out = options.out or (None if options.only or options.limit else default)
    if out is None:
        print(text)
    else:
        out.parent.mkdir(exist_ok=True)
        out.write_text(text)
        print("\n".join(text.splitlines()[:9]), f"\n-> {out}")
    return int(any(v.kind in (WRONG, BROKEN) for _, v in verdicts))


if __name__ == "__main__":
    sys.exit(main())

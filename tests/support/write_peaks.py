"""Memory and bytes of random programs that write in place: what reports say, and what is measured.

    python tests/support/write_peaks.py [COUNT [SEED]]     1,000 cases: counts, or the smallest failure

`check` calls the function of a case under a mode that sees every operation. `Program.peak` and
`.memory.peak` are compared with the bytes of live storages, `.memory.planned` with these and the block
where memory is planned, and `.work.bytes` with what the operations read and write.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from paths import EXAMPLES

sys.path.append(str(EXAMPLES))

import torch
from hypothesis import strategies as st
from live_bytes import LiveBytes, parts
from random_writes import CLOSED
from refusals import refuses
from torch import Tensor
from write_cases import AT, DERIVED, Case, cases, explore
from write_checks import torch_refuses

from torchard import tree
from torchard.functional.execution.donated import donated_parts
from torchard.functional.memory.planned import Planned
from torchard.functional.programs.program import Program
from torchard.functional.torch_internals import is_mutable, storage_id
from torchard.functional.torch_internals.operators import aten

__all__ = ["Counted", "WrongReport", "check", "peak_cases"]


class WrongReport(AssertionError):
    """A report that is not what is measured."""


class Counted(LiveBytes):
    """Counts what operations read and write, too.

    Attributes:
        bytes: those of operands and results; of a write, of what it reads beside the part it writes.
    """

    def __init__(self, already: Iterable[Tensor] = ()) -> None:
        super().__init__(already)
        self.bytes = 0
        self._copies: set[int] = set()  # results of scatters, by storage, before their part is written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.bytes += moved(func, args, kwargs or {}, out)
        if func is aten.new_empty_strided.default:
            self._copies.add(storage_id(out))
        elif func is aten.copy_.default and args[0]._is_view() and storage_id(out) in self._copies:
            self._copies.remove(storage_id(out))
            self.bytes -= size_of(out)  # an element of a result is counted once
        return out


def moved(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """The bytes that an operation reads and writes: of a view, and of an allocation, none."""
    given, made = tensors((args, kwargs)), tensors(out)
    if func.overloadpacket.__name__ in ("set_", "detach", "empty", "new_empty", "new_empty_strided"):
        return 0
    if func.overloadpacket.__name__.startswith("_fused"):
        bases = [x for tree_of in (args[0], *args[2:]) for x in tree_of]  # all but the gradients
        return sum(map(size_of, [*given, *bases]))
    if is_mutable(func):
        changed = written(func.overloadpacket.__name__, args)
        others = [x for x in given if x is not args[0]]
        return sum(map(size_of, others)) + changed * args[0].element_size()
    memory = set(map(storage_id, given))
    if made and all(storage_id(x) in memory for x in made):
        return 0
    return sum(map(size_of, {id(x): x for x in [*given, *made]}.values()))


def written(name: str, args: Any) -> int:
    """How many elements of its first operand an operation writes at most, and reads if it needs them."""
    base, *others = args
    if name == "index_put_":
        picked = max(index.numel() for index in others[0] if index is not None)
        rest = [n for n, index in zip(base.shape, others[0], strict=False) if index is None]
        return int(picked * torch.Size([*rest, *base.shape[len(others[0]) :]]).numel())
    if name in ("index_copy_", "index_add_", "index_fill_"):
        return int(others[1].numel() * base.numel() // base.shape[others[0]])
    if name in ("scatter_", "scatter_add_"):
        return int(others[1].numel())
    if name in ("copy_", "masked_fill_"):
        return int(base.numel())
    return int(2 * base.numel())  # read and written


def tensors(value: Any) -> list[Tensor]:
    return [x for x in tree.leaves(value) if isinstance(x, Tensor)]


def size_of(x: Tensor) -> int:
    return x.numel() * x.element_size()


def check(case: Case) -> str:
    """ "right", or why nothing was compared.

    Raises:
        WrongReport: a report is not what is measured.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            said, have = said_and_measured(case)
        except Exception as error:
            if refuses(error):
                return f"refused: {type(error).__name__}"
            if torch_refuses(case, type(error)):
                return "torch refuses"
            raise
    if said != have:
        raise WrongReport(f"reports say {said}, and measured is {have}")
    return "right"


def said_and_measured(
    case: Case, mode: type[LiveBytes] = Counted
) -> tuple[dict[str, int], dict[str, int]]:
    """What the reports of a case say, and what a second call of it has."""
    lower, call = case.lowered_and_called()
    program = lower()
    if case.way == "planned":
        return _planned(program, case)
    call(lambda given: nullcontext())
    live: list[LiveBytes] = []

    def begin(given: list[Any]) -> LiveBytes:
        gc.collect()
        closed = [CLOSED] if any(leaf.role == "closure" for leaf in program.inputs) else []
        live.append(mode([*parts(given, closed), *program.constants]))
        return live[0]

    call(begin)
    said, have = {"peak": program.peak}, {"peak": live[0].peak() if live[0].seen else program.peak}
    if isinstance(live[0], Counted):
        said |= {"memory": program.memory.peak, "bytes": program.work.bytes}
        have |= {"memory": have["peak"], "bytes": live[0].bytes}
    return said, have


class InBlock(LiveBytes):
    """Counts a block once, whatever is in it."""

    def __init__(self, block: Tensor, already: Sequence[Tensor]) -> None:
        self.block = block
        super().__init__([block, *already])

    def _meet(self, tensor: Tensor) -> int:
        inside = tensor.data_ptr() - self.block.data_ptr() in range(self.block.numel())
        return super()._meet(self.block if inside else tensor)


def _planned(program: Program, case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """The same of planned memory, which is not used under a mode: its code is called."""
    _, *values = case.arguments(0)
    given = {"primal": [*values, AT], "closure": [CLOSED], "constant": list(program.constants)}
    parts = [given[leaf.role].pop(0) for leaf in program.inputs]
    donated = donated_parts(program)
    held = [part for i, part in enumerate(parts) if i not in donated]
    del values, given
    plan = Planned(program.graph, program.bind(), "f", donated).plan(parts)
    assert plan is not None
    run = plan.code.bound(memory := {k: torch.empty(n, dtype=torch.uint8) for k, n in plan.sizes.items()})
    empty = torch.empty(0, dtype=torch.uint8)
    with InBlock(memory.get(torch.device("cpu"), empty), parts) as live:
        results = run(parts)
    del results, held
    planned = program.memory.planned
    return {"planned": planned}, {"planned": live.peak() if live.seen else planned}


def peak_cases(*ways: str) -> st.SearchStrategy[Case]:
    """Cases whose arguments have memory of their own: that of views is larger."""
    found = cases([*DERIVED, "value", "value"], ways or ["eager", "eager", "planned"])
    alone = found.map(lambda c: replace(c, placed="apart", holds=False, threads=False, inside=True))
    return alone.filter(lambda case: case.way == "eager" or case.derived != "backward twice")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=1_000)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    given = parser.parse_args()
    explore(given.count, given.seed, peak_cases(), check)


if __name__ == "__main__":
    main()

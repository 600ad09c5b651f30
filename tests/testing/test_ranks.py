"""Two ranks of gloo: the pool that runs functions on them, and where they part."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchard import Mesh, P, place, shard
from torchard.testing import RankError, RankPool, localize_ranks

MESH_OF_ONE = Mesh({"dp": 1}, virtual=True)


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ up)
    return (hidden @ down).square().sum()


def matrices(rank: int = 0, differs: int | None = None) -> tuple[torch.Tensor, ...]:
    """The arguments of mlp; one of them differs in its last bit on rank 1."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.randn(shape, generator=generator) for shape in ((4, 4), (4, 8), (8, 2))]
    if rank == 1 and differs is not None:
        last = found[differs].flatten()[-1:]
        last.copy_(torch.nextafter(last, last + 1))
    return tuple(found)


def found_on_a_rank(sharded: bool, differs: int | None, gradients: bool) -> tuple[list[str], Any, str]:
    """The operations at which ranks part, who agrees, and the text."""
    mesh, args = Mesh({"dp": 2}), matrices(dist.get_rank(), differs)
    specs = (P("dp"), P(), P())
    fn = shard(mlp, mesh, specs, check_replicated=False) if sharded else mlp
    found = localize_ranks(fn, mesh, *args, gradients=gradients)
    return [operation.op for operation in found.operations], found.ranks, str(found)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("differs", [None, 0, 1, 2])
def test_arguments_that_differ_by_a_bit(
    two_ranks: RankPool, sharded: bool, differs: int | None, gradients: bool
) -> None:
    first, second = two_ranks(found_on_a_rank, sharded, differs, gradients)
    assert first == second
    operations, groups, text = first
    if differs is None:
        assert operations == [] and text == "the ranks agree"
    else:
        assert operations[0] == f"args[{differs}]" and groups[0] == ((0,), (1,))
        assert "ranks that agree: 0 | 1" in text


def another_constant() -> str:
    rank = dist.get_rank()

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return (y * (2 + rank)).cos()

    return str(localize_ranks(fn, Mesh({"dp": 2}), torch.ones(3)))


def test_an_operation_that_reads_the_rank(two_ranks: RankPool) -> None:
    text, _ = two_ranks(another_constant)
    assert "in fn  aten.mul f32[3]: off by 8.41e-01" in text
    assert len(text.splitlines()) == 2


def another_program() -> str:
    fn = torch.sin if dist.get_rank() else torch.cos
    try:
        localize_ranks(lambda x: fn(x), Mesh({"dp": 2}), torch.ones(3))
    except ValueError as error:
        return str(error)
    return ""


def test_other_programs_are_refused(two_ranks: RankPool) -> None:
    for text in two_ranks(another_program):
        assert "rank 1 runs a different program from rank 0" in text
        assert "aten.sin f32[3]" in text and "instead of aten.cos f32[3]" in text


def sharded_weights_differ() -> str:
    """Shards may differ from rank to rank; only what is replicated must not."""
    mesh = Mesh({"tp": 2})
    x, up, down = place(matrices(), mesh, (P(), P(None, "tp"), P("tp")))
    return str(localize_ranks(mlp_on(mesh), mesh, x, up, down))


def mlp_on(mesh: Mesh) -> Any:
    return shard(mlp, mesh)


def test_shards_may_differ(two_ranks: RankPool) -> None:
    assert two_ranks(sharded_weights_differ) == ["the ranks agree"] * 2


def test_a_virtual_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="a virtual mesh has one process"):
        localize_ranks(mlp, MESH_OF_ONE, *matrices())


def fails_on_one(which: int) -> int:
    if dist.get_rank() == which:
        raise KeyError("no such thing")
    return os.getpid()


def test_a_failure_names_its_rank(two_ranks: RankPool) -> None:
    before = two_ranks(fails_on_one, 2)
    assert before == two_ranks(fails_on_one, 2), "the processes stay"
    with pytest.raises(RankError, match=r"(?s)^rank 1: Traceback.*KeyError: 'no such thing'"):
        two_ranks(fails_on_one, 1)
    assert not set(before) & set(two_ranks(fails_on_one, 2)), "they are started anew"


def ends(how: str) -> None:
    if dist.get_rank() == 0:
        os._exit(3) if how == "exit" else time.sleep(60)


def test_a_rank_that_ends() -> None:
    said = "rank 0: the process ended with exit code 3"
    with RankPool(2) as ranks, pytest.raises(RankError, match=said):
        ranks(ends, "exit")


def test_a_rank_that_does_not_answer() -> None:
    with RankPool(1) as ranks:
        ranks(os.getpid)
        ranks.timeout = 0.2
        with pytest.raises(RankError, match=r"rank 0: no answer within 0.2 s"):
            ranks(ends, "late")


def test_a_function_inside_of_another_is_refused(two_ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="not defined at the top level of a module"):
        two_ranks(lambda: 1)


SCRIPT = """
import torch.distributed
from torchard.testing import RankPool

if {condition}:
    with RankPool(2) as ranks:
        print(ranks(torch.distributed.get_rank))
"""


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "bare"])
def test_scripts_start_ranks_below_a_guard(tmp_path: Path, guarded: bool) -> None:
    condition = '__name__ == "__main__"' if guarded else "True"
    (tmp_path / "script.py").write_text(SCRIPT.format(condition=condition))
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    if guarded:
        assert done.stdout == "[0, 1]\n", done.stderr
    else:
        last = done.stderr.splitlines()[-3:]
        assert last[0].endswith("RankError: rank 0: the process ended with exit code 1"), done.stderr
        assert last[2].endswith('must be below `if __name__ == "__main__":`.')

"""What is raised while a program runs says what it was: an operation, or a collective of the plan."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import forked
import lost_ranks
import pytest
import torch
from once import once
from torch import fx

from torchard import CollectiveError, Mesh, P, jit, place, scope, shard
from torchard.functional.execution.codegen import compiled
from torchard.functional.torch_internals import store as store_module
from torchard.functional.trace import trace

Told = dict[str, Any]


def broken(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("the network\nis down")


class Record:
    title, payload = "psum over dp, block/0 backward", "3×4 float32"


def graph_of(**tags: Any) -> fx.Graph:
    """Adds one, then raises."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.add, (x, 1))
    y.meta.update(scope="block/7", phase="forward", source="model.py:1 in f")
    z = graph.call_function(broken, (y,))
    z.meta.update(tags)
    graph.output((z,))
    return graph


def test_an_operation_that_raises_is_noted() -> None:
    run = compiled(graph_of(scope="block/3", phase="backward", source="model.py:12 in mlp"), "step")
    with pytest.raises(ValueError, match="the network") as raised:
        run([torch.ones(2)])
    (note,) = raised.value.__notes__
    assert note == "while step ran broken, in block/3 backward, for model.py:12 in mlp"


def test_an_operation_without_tags_is_named_at_least() -> None:
    with pytest.raises(ValueError) as raised:
        compiled(graph_of())([torch.ones(2)])
    assert raised.value.__notes__ == ["while program ran broken"]


def test_what_is_raised_outside_of_all_operations_is_left_alone() -> None:
    with pytest.raises(ValueError, match="unpack") as raised:
        compiled(graph_of())([torch.ones(2), torch.ones(2)])
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize(
    ("stage", "doing"), [("issue", "this rank began it"), ("wait", "this rank waited")]
)
def test_a_collective_that_raises_is_named(stage: str, doing: str) -> None:
    record = Record()
    tags = {"collective": record, "stage": stage, "peers": "Ranks 0 and 1 take part."}
    with pytest.raises(CollectiveError) as raised:
        compiled(graph_of(**tags, source="model.py:12 in mlp"), "step")([torch.ones(2)])
    said = str(raised.value)
    begin = f"{record.title} ({record.payload}), for model.py:12 in mlp: failed while {doing}"
    assert said.startswith(begin) and "in step: the network\nRanks 0 and 1 take part. " in said
    assert "from the last checkpoint" in said
    assert raised.value.collective is record and isinstance(raised.value.__cause__, ValueError)


def lookup(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    with scope("embedding"):
        return torch.nn.functional.embedding(index, table) * 2


@pytest.mark.parametrize("backend", ["", "eager", "aot_eager"])
def test_a_real_operation_on_every_way_to_run_it(backend: str) -> None:
    """An index that is out of range, found only when it runs."""
    mesh = Mesh({"dp": 2}, virtual=True)
    run: Any = shard(lookup, mesh)
    run = jit(run, backend=backend) if backend else run
    index = place(torch.tensor([0, 1, 2, 9]), mesh, P("dp"))
    with pytest.raises(IndexError) as raised:
        run(torch.ones(4, 3), index)
    (note,) = raised.value.__notes__
    if backend == "aot_eager":
        assert note == "while lookup ran, compiled by aot_eager"
    else:
        assert note.startswith("while lookup ran embedding, in embedding forward, for test_f")


def test_an_emulated_collective_is_an_operation() -> None:
    """In one process nobody else can be gone."""
    mesh = Mesh({"tp": 2}, virtual=True)
    x = place(torch.ones(4, 2), mesh, P("tp"))
    program = shard(lambda x: x.sum(0), mesh, out_specs=P()).lower(x)
    assert len(program.collectives) == 1
    with pytest.raises(RuntimeError) as raised:
        program.bind()([torch.ones(2, 2), torch.ones(2, 3)])
    assert not isinstance(raised.value, CollectiveError) and raised.value.__notes__


def test_a_program_without_a_runtime_is_named() -> None:
    program = trace(lookup)(torch.ones(4, 3), torch.tensor([0]))
    with pytest.raises(IndexError) as raised:
        program.bind()([torch.ones(4, 3), torch.tensor([9])])
    assert raised.value.__notes__[0].startswith("while lookup ran embedding, in embedding")


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the host that serves it is cut off, and its own timeout is none."""
    monkeypatch.setattr(store_module, "_GRACE", 0.0)
    asked, store = threading.Event(), object()
    monkeypatch.setattr(store_module, "_silent", [])
    said = "through which ranks report the plan does not answer.*restart them from the last"
    with pytest.raises(store_module.StoreError, match=said):
        store_module.ask(store, asked.wait, 0.01, "the plan")
    with pytest.raises(store_module.StoreError, match=said):  # who asks once more is told at once
        store_module.ask(store, lambda: "yes", 60.0, "the plan")
    asked.set()
    assert store_module.ask(object(), lambda: "yes", 60.0, "the plan") == "yes"


def test_a_store_whose_host_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where rank 0, which serves it, ends first."""
    monkeypatch.setattr(store_module, "_silent", [])

    def broken() -> None:
        raise torch.distributed.DistNetworkError("Connection reset by peer")

    store = object()
    for _ in range(2):  # the second time it is not asked
        with pytest.raises(store_module.StoreError, match="rank 0's, or torchrun's"):
            store_module.ask(store, broken, 1.0, "the plan")

    def late() -> None:
        raise torch.distributed.DistStoreError("wait timeout after 10ms, keys: /a")

    with pytest.raises(torch.distributed.DistStoreError):
        store_module.ask(object(), late, 1.0, "the plan")


# -- on real ranks ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """What rank 0 of every job is told."""
    found: dict[str, Told] = once(tmp_path_factory, "lost-ranks", run_jobs)
    return found


def run_jobs(folder: Path) -> Any:
    return forked.told("lost_ranks.py", folder, folder=folder, seconds=2 * lost_ranks.PATIENCE)


def after_the_timeout(job: Told) -> bool:
    """The process group's, and no sooner; jobs that wait for longer are told as "still waits"."""
    return bool(job["seconds"] > lost_ranks.TIMEOUT - 0.1)


def test_each_collective_of_a_plan_is_named_when_it_is_missed(told: dict[str, Told]) -> None:
    plan = told["stopped at 0"]["plan"]
    assert [title for title, _, _ in plan] == [
        "all_reduce over tp, block/0 forward",
        "all_reduce over tp, block/1 forward",
        "all_reduce over tp, block/1 backward",
        "all_reduce over tp, block/0 backward",
    ]
    for number, (title, payload, record) in enumerate(plan):
        job = told[f"stopped at {number}"]
        assert job["type"] == "CollectiveError" and job["collective"] == record
        begin = f"{title} ({payload}), for lost_ranks.py:"
        assert job["text"].startswith(begin) and "in block: failed while this rank" in job["text"]
        assert "in step: " in job["text"] and "Timed out waiting 8000ms" in job["text"]
        assert "Ranks 0 and 1 of Mesh(one=1, tp=2) take part and wait 8 s for one" in job["text"]
        assert after_the_timeout(job)


def test_a_rank_that_is_killed_is_missed_at_once(told: dict[str, Told]) -> None:
    job = told["killed"]
    assert job["type"] == "CollectiveError", job
    assert "Connection" in job["text"]
    assert job["text"].startswith("all_reduce over tp, block/0 forward (")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("backward", "all_reduce over tp, block/1 backward (3×4 float32, 48 bytes per rank), for "),
        ("merged", "all_reduce over tp, block backward (96 float32, 384 bytes per rank, 4 merged)"),
        ("neighbours", "all_to_all over tp, ring forward (1 float32, 4 bytes per rank, neighb"),
        ("pipelined", "send over pp, block/1 backward (3×4 float32, 48 bytes per rank, B1 of chunk 1)"),
        ("manual", "all_reduce over tp, forward (3 float32, 12 bytes per rank), for lost_ranks"),
        ("along_one_axis", "all_reduce over tp, forward (3 float32, 12 bytes per rank), for lost_"),
        ("along_two_axes", "all_reduce over one·tp, forward (3 float32, 12 bytes per rank), for "),
        ("compiled", "a collective of step failed (wait_tensor"),
    ],
)
def test_a_rank_that_is_silent(told: dict[str, Told], name: str, said: str) -> None:
    job = told[name]
    assert job["type"] == "CollectiveError", job
    assert job["text"].startswith(said) and "checkpoint" in job["text"], job["text"]
    assert after_the_timeout(job)


def test_a_rank_that_does_not_come_to_place(told: dict[str, Told]) -> None:
    job = told["placing"]
    assert job["type"] == "ExchangeError" and after_the_timeout(job), job
    assert "rank 1 did not report what it passed to place within 8 s. It has ended, or" in job["text"]
    assert "pass a larger timeout to Mesh (by default it is the process group's)" in job["text"]


def test_of_a_compiled_program_the_collectives_are_listed(told: dict[str, Told]) -> None:
    said = told["compiled"]["text"]
    assert "compiled by aot_eager, so it is not known which one; it is one of: all_reduce over" in said
    assert all(title in said for title, _, _ in told["stopped at 0"]["plan"])

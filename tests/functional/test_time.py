"""Predicted time on machines of which it has a closed form."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import grad

from torchard import Link, Machine, Mesh, P, jit, repeat, shard
from torchard.machines import cpu, h100, h200, v100

NEVER = float("inf")
# Computes at once and sends at once; each test slows one of its rates.
IDEAL = Machine("ideal", flops={"float32": NEVER}, bandwidth=NEVER, launch=0.0)
M, K, N = 8, 16, 32
X, W = torch.ones(M, K), torch.ones(K, N)
MESH = Mesh({"a": 4}, virtual=True)


def seconds(program: Any, machine: Machine, *args: Any) -> float:
    return float(program.lower(*args).time(machine).seconds)


def test_products_take_their_flops() -> None:
    machine = replace(IDEAL, flops={"float32": 1e6})
    product = jit(torch.mm, backend="eager")
    assert seconds(product, machine, X, W) == pytest.approx(2 * M * K * N / 1e6)
    machine = replace(machine, flops={"float32": 1e6, "float64": 1e5})
    double = X.double(), W.double()
    assert seconds(product, machine, *double) == pytest.approx(2 * M * K * N / 1e5)


def test_flops_are_those_of_the_program() -> None:
    """Also on a machine that takes no time for them."""
    times = [jit(torch.mm, backend="eager").lower(X, W).time(m) for m in (IDEAL, h100())]
    assert [time.flops for time in times] == [2 * M * K * N] * 2


@pytest.mark.parametrize(
    "how", [{"flops": {"float32": 0.0}}, {"flops": {"float32": -1.0}}, {"bandwidth": 0.0}]
)
def test_rates_are_more_than_nothing(how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Machine 'ideal': the rate .* rates are more than 0"):
        replace(IDEAL, **how)


def test_links_carry_something_some_time() -> None:
    with pytest.raises(ValueError, match="Link: the rate bandwidth is 0"):
        Link(0.0)
    with pytest.raises(ValueError, match="Link: latency is inf"):
        Link(1.0, NEVER)
    with pytest.raises(ValueError, match="Machine 'ideal': launch is inf"):
        replace(IDEAL, launch=NEVER)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"efficiency": {"aten.mm": 0}}, "efficiency['aten.mm'] is 0; a share is a finite number more"),
        ({"efficiency": {"aten.mm": NEVER}}, "efficiency['aten.mm'] is inf; a share is a finite number"),
        ({"alone": NEVER}, "alone is inf; it is a finite number, at least 1"),
        ({"flops": {"float32": 1.0, "flaot32": 1.0}}, "'flaot32', which is not the name of a dtype"),
        ({"flops": {"flaot32": 1.0}}, "dtype of torch; the nearest are 'float32', "),
        ({"flops": {"half": 1.0}}, "flops has a rate for 'half'"),  # dtypes are called float16
        (
            {"links": {"dp/allreduce": Link(1.0)}},
            "links has a link for 'dp/allreduce'; write a mesh axis, as in 'dp', or a mesh axis and one "
            "of 'all_gather', 'all_reduce', 'all_to_all', 'ppermute', 'psum_scatter', 'send', as in",
        ),
        ({"links": {"dp/": Link(1.0)}}, "links has a link for 'dp/'; write"),
        ({"links": {"dp tp": Link(1.0)}}, "links has a link for 'dp tp'; write"),
    ],
)
def test_wrong_rates_are_named(how: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^Machine 'ideal': .*{re.escape(named)}"):
        replace(IDEAL, **how)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"flops": {"float32": math.nan}}, "flops['float32'] is nan (a float), but each value of flops "),
        ({"links": {"dp": 3}}, "links['dp'] is 3 (an int), but each value of links must be a Link"),
        ({"links": [3]}, "links is [3] (a list), but links must be a dict (each value a Link)"),
    ],
)
def test_a_value_in_a_dict_of_rates_is_named(how: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        replace(IDEAL, **how)


@pytest.mark.parametrize("preset", [v100, h100, h200, cpu])
def test_axes_between_hosts_are_several(preset: Any) -> None:
    """A string has letters, which would each be an axis."""
    said = "between is 'dp' (a str), but between must be a list or tuple (each item a string)"
    with pytest.raises(TypeError, match=re.escape(f"{preset.__name__}: {said}")):
        preset(between="dp")
    assert preset(between={"dp"}) == preset(between=("dp",))


def test_links_of_other_axes_than_the_programs() -> None:
    """Sending would take no time, unless the machine has a link for all other axes."""
    sums = shard(torch.mm, Mesh({"a": 2, "b": 2}, virtual=True), (P(None, "a"), P("a")), P())
    machine = replace(IDEAL, name="host", links={"d": Link(1e6), "c/all_reduce": Link(1e6)})
    said = (
        "machine 'host' has links for 'c', 'd', and the program sends along 'a', on a mesh with the axes "
        "'a', 'b': sending would take no time"
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        seconds(sums, machine, X, W)
    assert seconds(sums, replace(machine, link=Link(1e6)), X, W) == pytest.approx(M * N * 4 / 1e6)
    assert seconds(sums, replace(machine, link=Link(NEVER, 1.0)), X, W) == pytest.approx(1)
    assert seconds(sums, replace(machine, links={"b": Link(1e6)}), X, W) == 0  # along a at once
    assert seconds(sums, h100(between=["c"]), X, W) > 0
    assert seconds(shard(torch.mm, MESH, (P("a"), P())), machine, X, W) == 0  # which sends nothing
    assert seconds(jit(torch.mm, backend="eager"), machine, X, W) == 0


def test_operations_take_their_bytes_and_a_launch() -> None:
    machine = replace(IDEAL, bandwidth=1e6, launch=1e-3)
    double = jit(lambda x: (x + x).view(-1), backend="eager")  # a view takes no time
    assert seconds(double, machine, X) == pytest.approx(2 * M * K * 4 / 1e6 + 1e-3)
    product = jit(torch.mm, backend="eager")
    touched = 4 * (M * K + K * N + M * N)
    assert seconds(product, replace(machine, flops={"float32": 1e12}), X, W) == (
        pytest.approx(touched / 1e6 + 1e-3)
    )


def test_views_and_calls_take_what_the_machine_says() -> None:
    machine = replace(IDEAL, bandwidth=1e6, launch=1e-3, view=1e-4, call=1e-2)
    double = jit(lambda x: (x + x).view(-1), backend="eager")
    assert seconds(double, machine, X) == pytest.approx(2 * M * K * 4 / 1e6 + 1e-3 + 1e-4 + 1e-2)
    time = double.lower(X).time(machine)
    assert time.computing == pytest.approx(time.seconds - 1e-2)


def test_an_operation_reaches_its_share_of_the_rates() -> None:
    machine = replace(IDEAL, flops={"float32": 1e6}, efficiency={"aten.mm": 0.5, "aten.add": 2.0})
    product = jit(torch.mm, backend="eager")
    assert seconds(product, machine, X, W) == pytest.approx(2 * M * K * N / 0.5e6)
    machine = replace(machine, bandwidth=1e6)
    double = jit(lambda x: (x + x).sin(), backend="eager")
    assert seconds(double, machine, X) == pytest.approx(2 * M * K * 4 * (1 / 2e6 + 1 / 1e6))


def test_shares_of_products_that_memory_bounds_and_of_strided_operands() -> None:
    machine = replace(IDEAL, bandwidth=1e6, efficiency={"aten.mm": 0.5, "aten.mm/memory": 0.25})
    product = jit(torch.mm, backend="eager")
    assert seconds(product, machine, X, W) == pytest.approx(4 * (M * K + K * N + M * N) / 0.25e6)
    slow = replace(machine, flops={"float32": 1e3})
    assert seconds(product, slow, X, W) == pytest.approx(2 * M * K * N / 0.5e3)

    machine = replace(IDEAL, bandwidth=1e6, efficiency={"aten.add": 2.0, "aten.add/strided": 0.5})
    for of, share in ((lambda x, y: x + y, 2.0), (lambda x, y: x.t() + y.t(), 2.0), (turned, 0.5)):
        taken = seconds(jit(of, backend="eager"), machine, torch.ones(8, 8), torch.ones(8, 8))
        assert taken == pytest.approx(3 * 4 * 64 / 1e6 / share)


def turned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.t() + y


def test_a_transfer_keeps_its_rank_busy() -> None:
    """For a share of the time of its bytes, and of its latency; the product does not wait for the sum."""
    machine = replace(IDEAL, flops={"float32": 1e6}, links={"a": Link(1e6, 1e-3)})

    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(), torch.mm(x, w)

    run = shard(both, MESH, (P("a"), P()), (P(), P("a")))
    product, sent = 2 * M * K * N / 4 / 1e6, 1.5 * 4 / 1e6
    assert seconds(run, machine, X, W) == pytest.approx(product)
    busy = replace(machine, overlaps=0.0)
    assert seconds(run, busy, X, W) == pytest.approx(product + sent)
    busy = replace(machine, overlaps=0.5, hides=0.25)
    assert seconds(run, busy, X, W) == pytest.approx(product + 0.5 * sent + 0.75 * 1e-3)
    with pytest.raises(ValueError, match=r"hides is 1.5; it is a share"):
        replace(IDEAL, hides=1.5)


def test_a_write_in_place_takes_what_it_writes() -> None:
    machine, cache, row = replace(IDEAL, bandwidth=1e6), torch.zeros(100, 10), torch.ones(10)

    def put(cache: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return cache.select_scatter(row, 0, 3)

    run = jit(put, backend="eager", donate_argnums=(0,))
    assert seconds(run, machine, cache, row) == pytest.approx(2 * 10 * 4 / 1e6)
    assert seconds(jit(put, backend="eager"), machine, cache, row) > 8000 / 1e6


def test_ranks_take_the_time_of_their_shards() -> None:
    machine = replace(IDEAL, flops={"float32": 1e6})
    run = shard(torch.mm, MESH, (P("a"), P()))
    time = run.lower(X, W).time(machine)
    assert time.seconds == time.computing == pytest.approx(2 * M * K * N / 4 / 1e6)
    assert time.share == pytest.approx(1) and not time.exposed


def test_a_sum_over_ranks_takes_its_link() -> None:
    """A ring's all_reduce sends 2 (n - 1) / n of its bytes."""
    machine = replace(IDEAL, links={"a": Link(1e6, 1e-3)})
    time = shard(torch.mm, MESH, (P(None, "a"), P("a")), P()).lower(X, W).time(machine)
    assert time.seconds == pytest.approx(1.5 * M * N * 4 / 1e6 + 1e-3)
    (exposed,) = time.exposed
    assert exposed.seconds == exposed.sent == pytest.approx(time.seconds) and exposed.times == 1
    by_kind = replace(IDEAL, links={"a/all_gather": Link(1.0, 1.0)})
    assert seconds(shard(torch.mm, MESH, (P(None, "a"), P("a")), P()), by_kind, X, W) == 0


def chain(x: torch.Tensor, w: torch.Tensor, depth: int = 6) -> torch.Tensor:
    for _ in range(depth):
        x = x @ w
    return x


def test_what_is_sent_while_ranks_compute_is_hidden() -> None:
    """A sum over ranks is on its way while what does not need it is computed."""

    def two(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        total = x @ w
        return chain(y, v) + total

    args = torch.ones(64, 16), torch.ones(16, 16), torch.ones(64, 16), torch.ones(16, 16)
    plan = shard(two, MESH, (P(None, "a"), P("a"), P(), P()), P()).lower(*args)
    product, sent = 2 * 64 * 16 * 16, 1.5 * 64 * 16 * 4
    for taken, exposed in ((0.5, 0.0), (8.0, 2.0)):  # beside 6 seconds of products
        machine = Machine("m", {"float32": product}, NEVER, 0.0, links={"a": Link(sent / taken, 0.0)})
        time = plan.time(machine)
        assert time.computing == pytest.approx(6.25)
        assert time.seconds == pytest.approx(6.25 + exposed)
        assert sum(each.seconds for each in time.exposed) == pytest.approx(exposed)
        alone = plan.time(replace(machine, overlaps=0.0))
        assert alone.seconds == pytest.approx(6.25 + taken)


def test_one_slow_axis() -> None:
    mesh = Mesh({"a": 2, "b": 2}, virtual=True)
    machine = replace(IDEAL, links={"b": Link(1e6, 0.0)})
    along_a = shard(torch.mm, mesh, (P(None, "a"), P("a")), P())
    along_b = shard(torch.mm, mesh, (P(None, "b"), P("b")), P())
    along_both = shard(torch.mm, mesh, (P(None, ("a", "b")), P(("a", "b"))), P())
    assert seconds(along_a, machine, X, W) == 0
    assert seconds(along_b, machine, X, W) == pytest.approx(M * N * 4 / 1e6)
    assert seconds(along_both, machine, X, W) == pytest.approx(1.5 * M * N * 4 / 1e6)


@pytest.mark.parametrize("of", [lambda f: f, lambda f: grad(lambda *a: f(*a).sum())])
def test_a_loop_takes_each_iteration(of: Any) -> None:
    def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return repeat(lambda w, x: torch.tanh(x @ w), w, x)

    machine = Machine("m", {"float32": 1e6}, 1e6, 1e-3, link=Link(1e6, 1e-3))
    run = shard(of(layers), MESH, (P("a"), P(None, "a")))
    x = torch.ones(64, 16)
    three, four, nine = (seconds(run, machine, x, torch.ones(n, 16, 16)) for n in (3, 4, 9))
    assert nine - four == pytest.approx(5 * (four - three))
    assert four > three


def test_forward_and_backward() -> None:
    """Gradients that are taken outside: a backward multiplies twice as much."""
    machine = replace(IDEAL, flops={"float32": 1e6})
    w = W.clone().requires_grad_()
    forward = 2 * M * K * N / 1e6
    assert seconds(jit(lambda w: (X @ w).sin(), backend="eager"), machine, W) == pytest.approx(forward)
    run = jit(grad(lambda w, x: (x @ w).sin().sum(), (0, 1)), backend="eager")
    assert seconds(run, machine, w.detach(), X) == pytest.approx(3 * forward)


def test_reports(tmp_path: Path) -> None:
    machine = Machine("m", {"float32": 1e9}, 1e9, 1e-6, link=Link(1e6, 1e-3))
    time = shard(torch.mm, MESH, (P(None, "a"), P("a")), P()).lower(X, W).time(machine)
    text = str(time)
    assert "on m: computes" in text and "all_reduce(a) [8, 32] float32" in text
    assert "test_time.py" not in text or "exposed" in text
    events = traced(time, tmp_path)
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["compute", "a"]
    ends = [e["ts"] + e["dur"] for e in events if e["ph"] == "X"]
    assert max(ends) == pytest.approx(time.seconds * 1e6)


def traced(time: Any, folder: Path) -> list[dict[str, Any]]:
    """The events of a time's trace, which keep the rules of the Trace Event Format.

    Those of complete and metadata events: Google, "Trace Event Format", 2016.
    """
    document = json.loads(time.trace(folder / "trace.json").read_text())
    assert document.keys() == {"traceEvents"}
    busy: dict[Any, float] = {}
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert type(event["pid"]) is int and type(event["tid"]) is int
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            continue
        assert event["ph"] == "X" and event["ts"] >= 0 and event["dur"] >= 0
        thread = event["pid"], event["tid"]  # complete events of a thread are nested, or apart
        assert event["ts"] >= busy.get(thread, 0.0) - 1e-6
        busy[thread] = event["ts"] + event["dur"]
    return list(document["traceEvents"])


@pytest.mark.parametrize("text", ["[1]", "{", '{"name": "m"}', '{"links": {"a": 5}}'])
def test_files_that_are_no_machines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "host.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"host\.json is not a file that Machine.save wrote"):
        Machine.load(path)
    with pytest.raises(TypeError, match="time: machine"):
        jit(torch.neg, backend="eager").lower(X).time("host")  # type: ignore[arg-type]


def test_machines_are_files(tmp_path: Path) -> None:
    for machine in (v100(), h100(between=["dp"]), h200()):
        machine.save(tmp_path / "machine.json")
        assert Machine.load(tmp_path / "machine.json") == machine
    assert h100(between=["dp"]).link_of(["tp", "dp"]) == h100(between=["dp"]).links["dp"]
    half = h100().shared_by(2)
    assert half.rate("bfloat16") == h100().rate("bfloat16") / 2 and half.launch == 2 * h100().launch



"""Measured machines: rates that explain what was timed, one machine for all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchard import Link, Machine, Mesh, MeshError, jit, machines
from torchard.sharding.layouts.collective_ops import CollectiveOp
from torchard.sharding.measuring import calibration, steps
from torchard.sharding.measuring.calibration import Size
from torchard.sharding.measuring.links import fitted
from torchard.sharding.measuring.operations import Sample
from torchard.sharding.measuring.rates import explained

RATE, BANDWIDTH, LAUNCH, VIEW = 5e10, 1e10, 4e-6, 2e-6


def sample(name: str, flops: int, size: int, share: float = 1.0) -> Sample:
    busy = max(flops / RATE, size / BANDWIDTH) / share
    return Sample(name, LAUNCH + busy, flops, size, view=False)


def test_rates_are_those_by_which_samples_took_as_long() -> None:
    """Of operations that reach different shares of the rates, and in several sizes."""
    samples = [Sample("aten.view", VIEW, 0, 0, view=True)] * 40
    samples += [sample("aten.ones", 0, 4)] * 4
    for size in (10**5, 10**6, 10**7):
        samples += [sample("aten.mm", 100 * size, size)] * 5
        samples += [sample("aten.bmm", 100 * size, size, 0.5)] * 2
        samples += [sample(name, 0, size, share) for name, share in (("aten.add", 2), ("aten.gelu", 0.5))]
    rates = explained(samples)
    assert rates.launch == pytest.approx(LAUNCH, rel=0.01) and rates.view == VIEW
    assert rates.flops == pytest.approx(RATE, rel=0.01)
    for name, share in (("aten.add", 2), ("aten.gelu", 0.5)):
        assert rates.bandwidth * rates.efficiency[name] == pytest.approx(BANDWIDTH * share, rel=0.01)
    assert rates.efficiency["aten.mm"] == pytest.approx(1)
    assert rates.efficiency["aten.bmm"] == pytest.approx(0.5)


def test_products_that_memory_bounds_have_a_share_of_their_own() -> None:
    """It is not in the rate of FLOPs; large samples weigh more than small ones that a cache may hold."""
    samples = [Sample("aten.view", VIEW, 0, 0, view=True)] * 40 + [sample("aten.ones", 0, 4)] * 4
    samples += [sample("aten.mm", 100 * size, size) for size in (10**5, 10**6, 10**7)]
    samples += [sample("aten.mm", size, size, 0.5) for size in (10**5, 10**6, 10**7)]
    samples += [sample("aten.add", 0, size) for size in (10**6, 10**7)]
    samples += [sample("aten.relu", 0, 10**7), sample("aten.relu", 0, 10**5, share=10)]
    rates = explained(samples)
    assert rates.flops == pytest.approx(RATE, rel=0.01)
    assert rates.efficiency["aten.mm"] == pytest.approx(1)
    reached = rates.bandwidth / BANDWIDTH
    assert rates.efficiency["aten.mm/memory"] * reached == pytest.approx(0.5, rel=0.01)
    assert rates.efficiency["aten.relu"] * reached == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-4, 1e9), (0.0, 1e8), (1e-3, 1e10)])
def test_links_are_those_by_which_collectives_took_as_long(latency: float, bandwidth: float) -> None:
    sent = [1e3, 1e5, 1e6, 1e7]
    link = fitted(sent, [latency + size / bandwidth for size in sent])
    assert link.latency == pytest.approx(latency, abs=1e-9)
    assert link.bandwidth == pytest.approx(bandwidth)


def test_a_link_may_be_of_any_collective_that_sends() -> None:
    kinds = [op.kind for op in CollectiveOp.__subclasses__() if op.sends]
    links = {f"dp/{kind}": Link(1.0 + n) for n, kind in enumerate(kinds)}
    machine = Machine("m", {"float32": 1e9}, 1e9, links=links)
    assert [machine.link_of(["dp"], kind) for kind in kinds] == [*links.values()] and len(kinds) == 6


def test_steps_that_take_longer_than_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one, by slower launches and latencies; a large one, by rates: its launches are known."""
    seen: list[tuple[Machine, Size]] = []

    def longer(mesh: Mesh, machine: Machine, size: Size) -> float:
        seen.append((machine, size))
        return 2.0 if len(seen) == 1 else 3.0

    monkeypatch.setattr(steps, "_longer", longer)
    links = {"dp": Link(6e6, 1e-3), "dp/send": Link(3e6, 2e-3)}
    machine = Machine("m", {"float32": 6e9}, 9e9, launch=1e-6, view=2e-6, call=3e-6, links=links)
    found = steps.as_in_steps(Mesh({"dp": 2}, virtual=True), machine)
    slow = {"launch": 2e-6, "view": 4e-6, "call": 6e-6}
    assert seen[1][0] == replace(
        machine, **slow, links={"dp": Link(6e6, 2e-3), "dp/send": Link(3e6, 4e-3)}
    )
    assert seen[0][1].width < seen[1][1].width
    links = {"dp": Link(2e6, 2e-3), "dp/send": Link(1e6, 4e-3)}
    assert found == replace(machine, **slow, flops={"float32": 2e9}, bandwidth=3e9, links=links)


def test_a_virtual_mesh_has_no_rates() -> None:
    with pytest.raises(MeshError, match=r"Mesh\(dp=2, virtual\) is virtual"):
        machines.measure(Mesh({"dp": 2}, virtual=True))


def test_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its rates are of this host, to an order of magnitude, and a file has all of them."""
    monkeypatch.setattr(calibration, "SIZES", (Size(1, 16, 32), Size(1, 64, 64)))
    machine = machines.measure()
    assert 1e8 < machine.flops["float32"] < 1e13 and 1e7 < machine.bandwidth < 1e13
    assert 1e-7 < machine.launch < 1e-2 and machine.view < 1e-2 and machine.call < 1
    assert {"aten.mm", "aten.gelu", "adamw"} <= machine.efficiency.keys() and not machine.links
    machine.save(tmp_path / "host.json")
    assert Machine.load(tmp_path / "host.json") == replace(machine)
    square = torch.ones(512, 512)
    product = jit(torch.mm, backend="eager").lower(square, square).time(machine)
    assert product.seconds == pytest.approx(2 * 512**3 / machine.flops["float32"], rel=0.5)

"""Plans that explain themselves: closed forms of their seconds, bounds, and what others would change."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from two_layouts import BOTH_WAYS, read_both_ways

from torchard import (
    Link,
    Machine,
    Mesh,
    P,
    PlanReport,
    ShapeDtype,
    accumulate,
    constrain,
    jit,
    name,
    pipeline,
    place,
    psum,
    repeat,
    shard,
    shard_map,
    trace,
)
from torchard.functional.machines.presets import PLANNING
from torchard.sharding.planning.minimum import model as minimized_model
from torchard.sharding.scheduling.explained import model, report

ALONG_ONE = "differs from this one along one axis"
ENDLESS = float("inf")
COMPUTES_AT_ONCE = Machine("computes at once", {"float32": ENDLESS}, ENDLESS, link=Link(1e9))
TP, BOTH = Mesh({"tp": 4}, virtual=True), Mesh({"dp": 2, "tp": 2}, virtual=True)
SIDES = st.sampled_from([8, 16, 32, 64, 128, 256])
MEGATRON: Any = {"in_specs": (P(), P(None, "tp"), P("tp")), "out_specs": P()}


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.relu(x @ up) @ down


def shapes(m: int, k: int, h: int, p: int) -> tuple[ShapeDtype, ...]:
    return ShapeDtype((m, k)), ShapeDtype((k, h)), ShapeDtype((h, p))


def sent(lowered: Any) -> int:
    return sum(each.bytes * each.times for each in lowered.collectives)


# -- closed forms ----------------------------------------------------------------------------------


@given(SIDES, SIDES, SIDES, SIDES)
def test_a_megatron_mlp(m: int, k: int, h: int, p: int) -> None:
    """Its sum, and what it would cost to gather operands of the second product instead."""
    lowered = shard(mlp, TP, machine=COMPUTES_AT_ONCE, **MEGATRON).lower(*shapes(m, k, h, p))
    plan, byte = lowered.plan, 4 * 3 / 4 / 1e9  # seconds of an element that four ranks have parts of
    without = (
        m * h + h * p,  # both operands are gathered
        k * h + h * p,
        m * h / 4 + h * p + m * p,  # one is, and the split of the other moved, which the result has
        m * h + h * p / 4 + m * p,
        k * h + h * p / 4 + m * p,
    )
    summed = 2 * m * p
    assert plan.seconds == pytest.approx(byte * min(summed, *without), rel=1e-4)
    assert plan.bound == pytest.approx(plan.seconds) and plan.gap == 0.0
    if summed < min(without):
        (reason,) = plan.why(lowered.collectives[0])
        assert reason.change.seconds == pytest.approx(byte * (min(without) - summed), rel=1e-3)
        assert reason.change.bytes == 3 * (min(without) - summed)
        assert [each.kind for each in reason.change.less] == ["all_reduce"]
    (result,) = plan.why("out")
    assert result.spec == P(None, None) != result.other


def test_what_is_moved_as_a_view_is_moved_otherwise() -> None:
    """Not another view of it: the product is computed where the parameter is, and gathered."""
    run = shard(lambda x, w: x @ w.T, TP, (P(), P("tp")), P(), machine=COMPUTES_AT_ONCE)
    lowered = run.lower(ShapeDtype((512, 32)), ShapeDtype((64, 32)))
    (reason,) = lowered.plan.why(lowered.collectives[0])
    assert sent(lowered) == 3 * 64 * 32 and reason.layout == "moves args[1]"
    assert reason.change.bytes == 3 * (512 * 64 - 64 * 32)


def test_what_several_operations_read_is_moved_once() -> None:
    lowered = shard(lambda x: (x.cumsum(0), x.cumprod(0)), TP, P("tp"), P()).lower(ShapeDtype((8, 8)))
    assert sent(lowered) == 3 * 8 * 8 and len(lowered.collectives) == 1
    assert lowered.plan.seconds - lowered.plan.computing == pytest.approx(4e-6 + 192e-9)


def test_computing_is_that_of_the_busiest_rank() -> None:
    """32 of 125 columns; the time to read is less than that to compute."""
    machine = Machine("m", {"float32": 1e9}, ENDLESS, link=Link(1e9, latency=1e-3))
    run = shard(torch.mm, TP, (P(), P(None, "tp")), P(None, "tp"), machine=machine)
    plan = run.lower(ShapeDtype((16, 8)), ShapeDtype((8, 125))).plan
    assert plan.computing == pytest.approx(2 * 16 * 8 * 32 / 1e9)
    assert plan.seconds == pytest.approx(plan.computing) and "sends 0 µs" in str(plan)


def test_uneven_shards_are_sent_padded() -> None:
    machine = Machine("m", {"float32": ENDLESS}, ENDLESS, link=Link(1e6, latency=1.0))
    run = shard(torch.relu, TP, P("tp"), P(), machine=machine)
    lowered = run.lower(ShapeDtype((10, 7)))
    assert sent(lowered) == 3 * 3 * 7 * 4
    assert lowered.plan.seconds == pytest.approx(1 + sent(lowered) / 1e6)


def test_a_loop_counts_each_iteration() -> None:
    def layers(ws: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        return repeat(lambda w, x: torch.relu(x @ w[0]) @ w[1], ws, x)

    ws = ShapeDtype((7, 16, 64)), ShapeDtype((7, 64, 16))
    columns, rows = P(None, None, "tp"), P(None, "tp")
    run = shard(layers, TP, ((columns, rows), P()), P(), machine=COMPUTES_AT_ONCE)
    lowered = run.lower(ws, ShapeDtype((8, 16)))
    each = 2 * 8 * 16 * 4 * 3 / 4
    assert lowered.plan.seconds == pytest.approx(7 * each / 1e9, rel=1e-4)
    (reason,) = lowered.plan.why(lowered.collectives[3])
    assert sent(lowered) == 7 * each and [each.times for each in reason.change.less] == [7]
    assert "all_reduce(tp) [8, 16] float32 × 7" in str(reason)


def test_what_operations_send_themselves_is_sent() -> None:
    """Elements of neighbours: each inner rank gets a row of 16 from either side."""

    def pooled(x: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(x, 3, 1, 1).square().sum()

    rows, shape = P(None, None, "tp"), ShapeDtype((8, 4, 64, 16))
    lowered = shard(pooled, TP, rows, P()).lower(shape)
    halo, total = lowered.collectives
    assert halo.bytes == 8 * 4 * 2 * 16 * 4
    plan = lowered.plan
    assert plan.seconds - plan.computing == pytest.approx(2 * 4e-6 + (halo.bytes + total.bytes) / 1e9)
    assert re.search(r"all_to_all\(tp\)  4,096 .*in pooled", str(plan))
    (gain,) = plan.specs
    assert gain.change.bytes == sent(shard(pooled, TP, gain.other, P()).lower(shape)) - sent(lowered)
    assert [each.bytes for each in gain.change.less] == [halo.bytes]
    (reason,) = plan.why(halo)
    assert "is sent within torchard.windows at" in str(reason) and reason.change.seconds > 0
    assert halo in reason.change.less and halo.bytes not in [each.bytes for each in reason.change.more]


@pytest.mark.parametrize("machine", [None, PLANNING])
def test_what_is_sent_and_what_is_computed_add_up(machine: Machine | None) -> None:
    """Parameters of a loop are gathered for the backward again; a sum of gradients will be merged."""

    def layers(ws: Tensor, x: Tensor) -> Tensor:
        return repeat(lambda w, x: torch.relu(x @ w), ws, x).square().sum()

    columns, gradient = P(None, None, "tp"), torch.func.grad(layers)
    run = shard(gradient, TP, (columns, P("tp")), columns, machine=machine)
    plan = run.lower(ShapeDtype((3, 64, 64)), ShapeDtype((1024, 64))).plan
    assert plan.computing + sum(each.seconds for each in plan._sent) == pytest.approx(plan.seconds)
    told = [(each.sent.kind, each.times, each.merged) for each in plan._sent]
    if machine is None:
        assert told == [("all_gather", 3, False)] * 2 + [("psum_scatter", 3, False)]
    else:
        assert told == [("all_gather", 2, False), ("psum_scatter", 1, True)]
        assert plan._sent[1].seconds == pytest.approx(0.1 * 4e-6 + 3 * 64 * 48 * 4 / 1e9)
    assert ("merged" in str(plan)) == bool(machine)


# -- bounds ----------------------------------------------------------------------------------------

SPECS = (P(), P("tp"), P(None, "tp"), P("dp"), P(None, "dp"), P("dp", "tp"), P("tp", "dp"))
# None that may come apart, by which programs have other operations.
OPERATIONS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.mm,
    torch.add,
    lambda x, y: torch.relu(x),
    lambda x, y: x.T,
    lambda x, y: x * y.sum(0),
    lambda x, y: x - x.sum(0, keepdim=True) / 8,
)


# By 25 and 107 plans are forced that are cheaper than all that differ along one axis at a time.
@pytest.mark.parametrize("seed", [25, 107, *range(examples(ci=12, explore=300))])
def test_no_plan_that_is_forced_costs_less_than_the_bound(seed: int) -> None:
    drawn = random.Random(seed)
    count = drawn.randint(2, 5)
    steps = [
        (drawn.choice(OPERATIONS), drawn.randrange(3 + i), drawn.randrange(3 + i)) for i in range(count)
    ]
    ins = (P("dp", "tp"), drawn.choice(SPECS), drawn.choice(SPECS))
    outs = (drawn.choice(SPECS), drawn.choice(SPECS))

    def report(forced: dict[int, P], machine: Machine | None) -> PlanReport:
        def fn(*args: Tensor) -> tuple[Tensor, Tensor]:
            values = [*args]
            for i, (operation, a, b) in enumerate(steps):
                value = operation(values[a], values[b])
                values.append(constrain(value, forced[i]) if i in forced else value)
            return values[-1], values[-2]

        run = shard(fn, BOTH, in_specs=ins, out_specs=outs, machine=machine)
        found = run.lower(*[ShapeDtype((8, 8))] * 3).plan
        assert isinstance(found, PlanReport)
        return found

    free = report({}, COMPUTES_AT_ONCE)
    assert free.bound is not None and free.gap is not None
    assert free.bound <= free.seconds and 0 <= free.gap <= 1
    for _ in range(8):
        forced = {i: drawn.choice(SPECS) for i in range(count) if drawn.random() < 0.6}
        plan = report(forced, COMPUTES_AT_ONCE)
        assert free.bound <= plan.seconds + 1e-11, forced


def test_a_better_plan_is_named() -> None:
    """By rules parameters are gathered along the axis of a batch; to gather so few rows sends less."""
    args, columns = (ShapeDtype((512, 512)), ShapeDtype((8, 512))), P(None, "tp")
    gradient = torch.func.grad(lambda w, x: (x @ w).square().sum())
    by_rules, minimized = (
        shard(gradient, TP, (columns, P("tp")), columns, machine=machine).lower(*args).plan
        for machine in (None, PLANNING)
    )
    assert by_rules.machine is minimized.machine is PLANNING
    assert (by_rules.minimized, minimized.minimized) == (False, True)
    assert minimized.gap == 0.0 and minimized.better is None
    assert by_rules.bound == pytest.approx(minimized.seconds)
    assert by_rules.better.seconds == pytest.approx(minimized.seconds - by_rules.seconds)
    assert by_rules.gap == pytest.approx(1 - minimized.seconds / by_rules.seconds)
    assert "by rules: no machine= was given to shard" in str(by_rules)
    assert "\nthe cheapest plan of these operations takes" in str(by_rules)
    assert "\nno plan of these operations takes less\n" in str(minimized)
    vars(by_rules)["better"] = replace(by_rules.better, exact=False)
    found = r"no plan of these operations takes less than .* \(gap .*%\); one that takes .* was found: at"
    assert re.search(found, str(by_rules))




def test_a_bound_holds_for_values_in_any_two_layouts() -> None:
    """Rules gather what a minimum moves once from rows to columns."""
    by_rules, minimized = (
        shard(read_both_ways, TP, machine=machine, **BOTH_WAYS).lower(ShapeDtype((64, 64))).plan
        for machine in (None, PLANNING)
    )
    assert minimized.seconds < by_rules.seconds / 2
    assert by_rules.bound == pytest.approx(minimized.seconds, rel=1e-4)


def test_where_other_plans_are_too_many_there_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimized_model, "_RESHARDS", 3)
    plan = shard(mlp, TP, **MEGATRON).lower(*shapes(8, 8, 8, 8)).plan
    assert plan.bound is plan.gap is plan.better is None
    assert "no bound: along tp there are too many plans to compare\n" in str(plan)
    assert "other specs are too many" in str(plan)
    with pytest.raises(ValueError, match="mlp has so many operations"):
        plan.why("args[0]")


@pytest.mark.parametrize(
    ("machine", "least"), [(PLANNING, "\n"), (None, " than ")]
)
def test_where_plans_along_all_axes_are_too_many_those_along_each_are_told(
    machine: Machine | None, least: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_OPTIONS", 12)
    mesh, columns = Mesh({"dp": 2, "tp": 2}, virtual=True), P("tp", "dp")
    gradient = torch.func.grad(lambda w, x: (x @ w).square().sum())
    run = shard(gradient, mesh, (columns, P("dp")), columns, machine=machine)
    plan = run.lower(ShapeDtype((512, 512)), ShapeDtype((8, 512))).plan
    assert plan.bound is None
    text = f"along dp and tp there are too many plans to compare; none that {ALONG_ONE} takes less{least}"
    assert text in str(plan)


# -- why -------------------------------------------------------------------------------------------


def tensor_parallel(params: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    up, down = params
    hidden = name(torch.relu(x @ up), "hidden")
    return (hidden @ down).square().sum()


def gradients(up: P, machine: Machine | None = None, out: P | None = None) -> Any:
    specs = (up, P("tp")), P()
    run = shard(torch.func.grad(tensor_parallel), TP, specs, (out or up, P("tp")), machine=machine)
    return run.lower((ShapeDtype((64, 128)), ShapeDtype((128, 64))), ShapeDtype((16, 64)))


def test_the_input_whose_spec_should_be_another_is_named_first() -> None:
    wrong, right = gradients(P("tp")), gradients(P(None, "tp"))
    (gain, *others) = wrong.plan.specs
    assert (gain.path, gain.spec, gain.other) == ("args[0][0]", P("tp", None), P(None, "tp"))
    assert gain.change.bytes == sent(right) - sent(wrong) < 0
    assert gain.change.seconds == pytest.approx(right.plan.seconds - wrong.plan.seconds)
    assert all(gain.change.seconds <= other.change.seconds < 0 for other in others)
    promised, _ = wrong.plan._other_spec(next(iter(wrong.plan._specified)))
    assert promised == pytest.approx(-gain.change.seconds, rel=1e-5)
    (reason,) = wrong.plan.why("args[0][0]")
    assert (reason.fixed, reason.other) == ("its spec", P(None, "tp"))
    assert reason.change.bytes == gain.change.bytes
    text = "args[0][0] f32[64, 128] is P('tp', None), which its spec fixes\nas P(None, 'tp'): -"
    assert str(reason).startswith(text)
    assert "args[0][0]" not in [gain.path for gain in right.plan.specs]
    assert right.plan.why("args[0][0]")[0].change.seconds > 0


def test_outputs_of_another_spec_stay_when_that_of_an_input_is_changed() -> None:
    tied, free = gradients(P("tp")), gradients(P("tp"), out=P())
    (with_gradient, *_), (alone, *_) = tied.plan.specs, free.plan.specs
    assert alone.change.bytes == sent(gradients(P(None, "tp"), out=P())) - sent(free)
    assert alone.change.bytes != with_gradient.change.bytes


def test_values_are_named_by_path_label_line_or_collective() -> None:
    lowered = gradients(P(None, "tp"))
    plan = lowered.plan
    (hidden,) = plan.why("hidden")
    assert (hidden.layout, hidden.spec) == ("P(None, 'tp')", P(None, "tp"))
    assert hidden.change.seconds > 0 and hidden.other != hidden.spec
    line = next(each.source for each in lowered.collectives)
    by_line = plan.why(line.partition(" in ")[0])
    assert len(by_line) > 1 and str(by_line) == str(plan.why(line))
    assert plan.why("out[0]")[0].what.startswith("mm at")
    for record in lowered.collectives:
        (reason,) = plan.why(record)
        assert str(record) in str(reason) and reason.spec is None


def test_what_specs_fix_at_both_ends_is_in_each_plan() -> None:
    lowered = shard(lambda x: x + 0, TP, P("tp"), P(None, "tp"), machine=COMPUTES_AT_ONCE).lower(
        ShapeDtype((8, 8))
    )
    (reason,) = lowered.plan.why(lowered.collectives[0])
    assert str(reason).endswith("+0 µs (+0.0%), +0 bytes per rank; one like it moves another value")

    def square(x: Tensor) -> Tensor:
        return constrain(x, P(None, "tp"))

    lowered = shard(square, TP, P("tp"), P(None, "tp")).lower(ShapeDtype((8, 8)))
    (reason,) = lowered.plan.why(lowered.collectives[0])
    assert reason.change is None and str(reason).endswith("\nall plans of these operations have it")


def test_a_change_does_not_list_a_collective_like_one_of_the_plan() -> None:
    """Eight columns are gathered as 64 rows are."""
    lowered = shard(lambda x: torch.sort(x, 0)[0], TP, P("tp"), P()).lower(ShapeDtype((64, 8)))
    (reason,) = lowered.plan.why("args[0]")
    assert lowered.collectives and reason.other == P(None, "tp")
    assert not reason.change.more and not reason.change.less and reason.change.bytes == 0
    assert reason.change.alike == 1 and str(reason).endswith("\n  = 1 of equal kind, axes and bytes")


def test_what_each_plan_along_one_axis_has_another_may_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of split columns and rows, and one of split rows: a sum is completed along both axes."""
    specs, args = (P("dp", "tp"), P("tp"), P("dp")), (shapes(32, 64, 4, 0)[:2], ShapeDtype((32, 16)))

    def gradient(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return y.T @ (x @ w)

    def reason() -> Any:
        run = shard(gradient, BOTH, specs, P(), machine=COMPUTES_AT_ONCE)
        lowered = run.lower(*args[0], args[1])
        ((summed,),) = [lowered.collectives]
        assert summed.axes == ("dp", "tp")
        return lowered.plan.why(summed)[0]

    assert reason().change.bytes > 0
    monkeypatch.setattr(report.PlanReport, "_proved", None)  # as if there were too many
    assert reason().change is None
    assert str(reason()).endswith(f"\nall plans that {ALONG_ONE.replace('differs', 'differ')} have it")


@pytest.mark.parametrize("out", [P(None, None), P(None, "tp")])
@pytest.mark.parametrize("placed", [True, False])
def test_an_input_that_is_returned_is_told_with_its_output(out: P, placed: bool) -> None:
    x, rows = torch.ones(8, 8), P("tp")
    lowered = shard(lambda x: x, TP, rows, out).lower(place(x, TP, rows) if placed else x)
    (reason,) = lowered.plan.why("out")
    spec, by = (P("tp", None), "its spec") if placed else (P(None, None), "the plain argument")
    assert (reason.spec, reason.fixed) == (spec, by)
    assert (f", returned as out in {out}, is" in str(reason)) == (placed or out != spec)
    assert not re.search(" at $", str(reason), re.M)


def test_a_spec_without_another_that_takes_no_more_memory() -> None:
    """Five columns: split over four ranks, two of them are more than a quarter."""
    lowered = shard(lambda x: torch.sort(x, 0)[0], TP, P("tp"), P()).lower(ShapeDtype((64, 5)))
    (reason,) = lowered.plan.why("args[0]")
    assert lowered.collectives and reason.change is None
    assert "nothing uses it in another layout that takes no more memory" in str(reason)


def test_members_of_a_merged_collective_are_all_moved() -> None:
    run = shard(torch.func.grad(tensor_parallel), Mesh({"dp": 2}, virtual=True), (P(), P("dp")), P())
    lowered = run.lower((ShapeDtype((64, 128)), ShapeDtype((128, 64))), ShapeDtype((4096, 64)))
    ((merged),) = lowered.collectives
    (reason,) = lowered.plan.why(merged)
    assert merged.note == "2 merged" and reason.layout.count("mm at") == 2 - reason.layout.count("t at")


def test_why_is_told_what_there_is() -> None:
    plan = gradients(P(None, "tp")).plan
    with pytest.raises(ValueError, match=r"'hiden' is no input, output, .*'hidden'"):
        plan.why("hiden")
    (foreign,) = shard(torch.relu, TP, P("tp"), P()).lower(ShapeDtype((6, 2))).collectives
    with pytest.raises(ValueError, match="no collective of the plan of tensor_parallel"):
        plan.why(foreign)


def test_a_constraint_is_what_fixes_a_layout() -> None:
    """To compute the product split as its operands are would send nothing."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return constrain(x @ w, P(None, "tp")).relu()

    lowered = shard(fn, TP, (P("tp"), P()), P("tp")).lower(ShapeDtype((64, 64)), ShapeDtype((64, 64)))
    line = lowered.collectives[-1].source
    (fixed,) = [each for each in lowered.plan.why(line) if each.fixed]
    assert (fixed.fixed, fixed.spec, fixed.other) == ("constrain", P(None, "tp"), P("tp", None))
    assert fixed.change.bytes == -sent(lowered)


# -- programs --------------------------------------------------------------------------------------


def test_programs_without_a_plan_say_so() -> None:
    with pytest.raises(ValueError, match="relu has no plan, since it runs on no mesh; lower a function"):
        _ = trace(torch.relu)(torch.ones(3)).plan


def test_what_is_sent_by_hand_is_in_each_plan() -> None:
    """The rest of a program with a shard_map is planned."""

    def local(x: Tensor, w: Tensor) -> Tensor:
        return shard_map(lambda x: psum(x, "tp"), TP, P("tp"), P())(x) @ w

    args = ShapeDtype((64, 64)), ShapeDtype((64, 64))
    lowered = shard(local, TP, (P("tp"), P("tp")), P(None, "tp")).lower(*args)
    by_hand, *chosen = lowered.collectives
    assert by_hand.kind == "all_reduce" and chosen
    assert all(lowered.plan.why(each) for each in chosen)
    (reason,) = lowered.plan.why(by_hand)
    assert "is sent within torchard.psum at" in str(reason) and reason.change is None
    assert str(reason).endswith("all plans of these operations have it")
    alone = shard_map(lambda x: psum(x, "tp"), TP, P("tp"), P()).lower(args[0]).plan
    assert len(alone._sent) == 1 and not alone.idle
    assert alone.seconds - alone.computing == pytest.approx(4e-6 + 6 * 16 * 64 / 1e9)


def test_derivatives_compiled_programs_and_microbatches_have_plans() -> None:
    args = shapes(32, 16, 64, 16)
    run = shard(mlp, TP, **MEGATRON)
    joint = run.lower_joint(*args)
    assert joint.plan.seconds > run.lower(*args).plan.seconds
    assert str(jit(run, backend="eager").lower(*args).plan) == str(run.lower(*args).plan)
    sliced = accumulate(lambda x, up, down: mlp(x, up, down).mean(), 2, batch=(0, None, None))
    assert shard(sliced, TP, MEGATRON["in_specs"]).lower(*args).plan.gap is not None


def test_a_pipeline_is_planned_without_its_stages() -> None:
    def layers(ws: list[Tensor], x: Tensor) -> Tensor:
        for w in ws:
            x = torch.relu(x @ w)
        return x.sum()

    run = pipeline(torch.func.grad(layers), Mesh({"pp": 2, "tp": 2}, virtual=True), "pp", microbatches=2,
                   batch=(None, 0))  # fmt: skip
    lowered = run.lower([ShapeDtype((8, 8))] * 4, ShapeDtype((4, 8)))
    assert "stages compute one after another, and what they send is not counted" in str(lowered.plan)
    sends = [each for each in lowered.collectives if each.kind == "send"]
    with pytest.raises(ValueError, match="between stages"):
        lowered.plan.why(sends[0])


def test_a_plan_that_is_lowered_again_is_explained_alike() -> None:
    first, second = (gradients(P("tp")).plan for _ in range(2))
    assert str(first) == str(second)
    assert str(first.why("hidden")) == str(second.why("hidden"))


def test_axes_that_split_nothing_are_named() -> None:
    plan = shard(torch.relu, BOTH, P("tp"), P("tp")).lower(ShapeDtype((8, 8))).plan
    assert plan.idle == ("dp",) and "nothing that is given is split over dp" in str(plan)
    whole = shard(torch.relu, BOTH, P(), P()).lower(ShapeDtype((8, 8))).plan
    assert whole.gap == 0.0 and whole.idle == ("dp", "tp") and not whole.specs

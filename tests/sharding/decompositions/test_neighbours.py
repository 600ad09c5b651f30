"""Operations that read their neighbours along a split dim fetch those, and are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from neighbours import FUNCTIONS, KERNEL, image, slope
from sharded_programs import equal_when_sharded

from torchard import Mesh, P, place, shard

MESHES: dict[str, tuple[dict[str, int], Any, int]] = {
    "13 lines over 3": ({"tp": 3}, "tp", 13),
    "12 lines over 2 x 2": ({"dp": 2, "tp": 2}, ("tp", "dp"), 12),
}
NESTED = ("difference", "roll", "cat", "convolution")
RUNS = [(n, m) for m, names in zip(MESHES, (FUNCTIONS, NESTED), strict=True) for n in names]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "mesh"), RUNS)
def test_equals_one_device(name: str, mesh: str) -> None:
    axes, split, lines = MESHES[mesh]
    on, spec = Mesh(axes, virtual=True), P(None, None, split)
    for fn in (FUNCTIONS[name], slope(FUNCTIONS[name])):
        x = image(lines)
        have, want = shard(fn, on, out_specs=spec)(place(x, on, spec)).full(), fn(x)
        torch.testing.assert_close(have, want, rtol=0, atol=1e-12 * float(want.abs().max()))


def sent(fn: Any, lines: int) -> list[tuple[str, tuple[int, ...]]]:
    mesh, spec = Mesh({"tp": 3}, virtual=True), P(None, None, "tp")
    plan = shard(fn, mesh, out_specs=spec).lower(place(image(lines), mesh, spec)).collectives
    return [(c.kind, c.shape) for c in plan]


def test_what_a_rank_has_is_not_sent() -> None:
    assert sent(lambda x: F.max_pool2d(x, 2), 12) == []
    assert sent(lambda x: F.pad(x, (0, 0, 0, 2)), 13) == []
    assert sent(lambda x: x.roll(4, 2), 12) == [("all_to_all", (2, 3, 4, 4))]


def test_a_gradient_lends_its_border_too() -> None:
    fn = slope(lambda x: F.conv2d(x, KERNEL, padding=(1, 0)))
    assert sent(fn, 12) == [("all_to_all", (2, 3, 2, 4))] * 2


def test_what_falls_outside_an_uneven_image_falls_on_its_edge() -> None:
    fn = slope(lambda x: F.interpolate(x, size=(2 * x.shape[2], 4), mode="bilinear"))
    assert sent(fn, 26) == [("all_to_all", (2, 3, 2, 4)), ("all_to_all", (2, 3, 4, 4))]
    mesh, spec = Mesh({"tp": 3}, virtual=True), P(None, None, "tp")
    have, want = shard(fn, mesh)(place(image(26), mesh, spec)).full(), fn(image(26))
    torch.testing.assert_close(have, want, rtol=0, atol=1e-12 * float(want.abs().max()))


def test_the_weight_s_gradient_is_reduced() -> None:
    mesh, spec = Mesh({"tp": 3}, virtual=True), P(None, None, "tp")

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, padding=(1, 0)).cos().sum()

    run, x = shard(torch.func.grad(loss), mesh), image(13)
    have = run(KERNEL, place(x, mesh, spec))
    torch.testing.assert_close(have.full(), torch.func.grad(loss)(KERNEL, x), rtol=0, atol=1e-11)
    plan = run.lower(KERNEL, place(x, mesh, spec)).collectives
    kinds = {c.kind: c.shape for c in plan}
    assert kinds == {"all_to_all": (2, 3, 2, 4), "all_reduce": tuple(KERNEL.shape)}


def test_strides_that_meet_blocks_at_other_phases_are_gathered() -> None:
    """Blocks of 5 lines, every second one: the gradient has no one window for all."""
    fn = slope(lambda x: F.conv2d(x, KERNEL, padding=(1, 0), stride=(2, 1)))
    assert "all_gather" in {kind for kind, _ in sent(fn, 13)}


Images = Callable[[torch.Tensor], torch.Tensor]
WIDE = torch.arange(2.0 * 3 * 5 * 3, dtype=torch.float64).view(2, 3, 5, 3).cos()

# Over 2 ranks: images of one line per rank, results of one line per rank or in all, other settings.
SMALL: dict[str, tuple[Images, int]] = {
    "convolution of 2 lines": (lambda x: F.conv2d(x, KERNEL, padding=(1, 0)), 2),
    "convolution to 1 line": (lambda x: F.conv2d(x, WIDE), 5),
    "convolution to 2 lines": (lambda x: F.conv2d(x, KERNEL, padding=(1, 0), stride=(4, 1)), 8),
    "transposed convolution of 2 lines": (lambda x: F.conv_transpose2d(x, KERNEL[:3, :2]), 2),
    "transposed convolution at other phases": (
        lambda x: F.conv_transpose2d(x, KERNEL[:3, :2], stride=(3, 1)), 5
    ),
    "max pool of 2 lines": (lambda x: F.max_pool2d(x, (1, 2)), 2),
    "max pool to 1 line": (lambda x: F.max_pool2d(x, (4, 2)), 4),
    "mean pool of 2 lines": (lambda x: F.avg_pool2d(x, (1, 2)), 2),
    "mean pool to 1 line": (lambda x: F.avg_pool2d(x, (4, 2)), 4),
    "nearest of 2 lines": (lambda x: F.interpolate(x, scale_factor=2), 2),
    "nearest by no whole factor": (lambda x: F.interpolate(x, size=(9, 4)), 6),
    "bilinear of 2 lines": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), 2),
    "bilinear by corners": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True), 6
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_small_images_are_right_too(name: str) -> None:
    fn, lines = SMALL[name]
    mesh, split = Mesh({"tp": 2}, virtual=True), P(None, None, "tp")
    equal_when_sharded(fn, (image(lines),), mesh, (split,), split)


# Each rank has exactly the elements that its one result reads (pytorch#191926).
ONE_WINDOW: dict[str, tuple[Images, int]] = {
    "convolution of patches": (lambda x: F.conv2d(x, KERNEL[..., :1], stride=(3, 1)), 9),
    "convolution of lines": (lambda x: F.conv2d(x, KERNEL[:, :, :1]), 3),
    "transposed convolution": (lambda x: F.conv_transpose2d(x, KERNEL[:3, :2], stride=(3, 1)), 3),
    "max pool": (lambda x: F.max_pool2d(x, (4, 1)), 12),
    "mean pool": (lambda x: F.avg_pool2d(x, (4, 1)), 12),
    "patches": (lambda x: x.unflatten(2, (-1, 4)).sum(3), 12),
}


@pytest.mark.parametrize("name", ONE_WINDOW)
def test_one_window_per_rank_needs_no_neighbours(name: str) -> None:
    fn, lines = ONE_WINDOW[name]
    assert sent(fn, lines) == sent(slope(fn), lines) == []
    mesh, split = Mesh({"tp": 3}, virtual=True), P(None, None, "tp")
    equal_when_sharded(fn, (image(lines),), mesh, (split,), split)


def test_one_line_per_rank_lends_its_neighbours_one() -> None:
    """Two lines of four arrive, of the three that a gather would bring."""
    mesh, split = Mesh({"tp": 4}, virtual=True), P(None, None, "tp")
    run = shard(lambda x: F.conv2d(x, KERNEL, padding=(1, 0)), mesh, out_specs=split)
    (only,) = run.lower(place(image(4), mesh, split)).collectives
    assert (only.kind, only.shape) == ("all_to_all", (2, 3, 2, 4))


INF, NAN = float("inf"), float("nan")
HARD_TO_RANK = {
    "nothing but the worst": [-INF] * 13,
    "few above the worst": [-INF] * 11 + [1.0, -INF],
    "the worst of the other side": [INF] * 12 + [NAN],
    "no numbers": [NAN] * 13,
    "some no numbers": [0.0, NAN, 2.0, INF, -INF, NAN, 1.0, 3.0, -INF, INF, NAN, -1.0, -2.0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("name", HARD_TO_RANK)
def test_topk_of_uneven_blocks(name: str, largest: bool, dtype: torch.dtype) -> None:
    """What fills the last block is never taken, whatever it ties with; places are distinct."""
    values = torch.tensor(HARD_TO_RANK[name], dtype=torch.float64)
    if dtype == torch.int64:
        values = values.nan_to_num(7, 2.0**62, -(2.0**62)).to(dtype)
        limits = torch.iinfo(dtype)
        values[values >= 2**62], values[values <= -(2**62)] = limits.max, limits.min
    x = values.to(dtype).repeat_interleave(4).repeat(2, 1)
    mesh, spec = Mesh({"tp": 3}, virtual=True), P(None, "tp")
    run = shard(lambda x: x.topk(3, 1, largest), mesh, out_specs=P())
    have, at = run(place(x, mesh, spec))
    want, _ = x.topk(3, 1, largest)
    torch.testing.assert_close(have, want, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(x.gather(1, at), want, equal_nan=True, rtol=0, atol=0)
    assert all(len(set(row)) == 3 for row in at.tolist())
    plan = run.lower(place(x, mesh, spec)).collectives
    # Each rank's best of each row, and where the best of them were.
    assert [(c.kind, c.shape) for c in plan] == [("all_gather", (2, 1, 3)), ("all_reduce", (2, 3))]


def flips_around_sums(fn: Any, dtype: torch.dtype = torch.float64) -> list[str]:
    """What of them is left in a plan."""
    mesh = Mesh({"tp": 3}, virtual=True)
    values = torch.arange(6 * 48, dtype=dtype).reshape(6, 48)
    x = place(values, mesh, P(None, "tp"))
    run = shard(fn, mesh)
    torch.testing.assert_close(run(x).full(), fn(values))
    kinds = [str(node.target) for node in run.lower(x).calls]
    return [kind for kind in kinds if "flip" in kind or "sums" in kind or "cumsum" in kind]


def test_a_running_sum_between_flips_runs_from_the_end() -> None:
    both = ["torchard.sums_from.default"] * 2  # within blocks, and over them
    assert flips_around_sums(lambda x: x.flip(1).cumsum(1).flip(-1)) == both
    slope_of = torch.func.grad(lambda x: x.cumsum(1).sin().sum())
    assert [kind for kind in flips_around_sums(slope_of) if "flip" in kind] == []
    for other in (
        lambda x: x.flip(1).cumsum(0).flip(1),
        lambda x: x.flip(0).cumsum(1).flip(1),
        lambda x: x.flip(0, 1).cumsum(1).flip(0, 1),
        lambda x: x.flip(1).cumsum(1, dtype=torch.float32).flip(1),
    ):
        assert "torchard.sums_from.default" not in flips_around_sums(other)
    assert "torchard.sums_from.default" not in flips_around_sums(
        lambda x: x.flip(1).cumsum(1).flip(1), torch.int32
    )

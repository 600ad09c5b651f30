"""What shard_map refuses: every message, with what it names."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.func import grad, jvp

from torchard import (
    Mesh,
    MeshError,
    P,
    SpecError,
    all_gather,
    axis_index,
    constrain,
    jit,
    pmax,
    pmean,
    ppermute,
    psum,
    psum_scatter,
    shard,
    shard_map,
)
from torchard.functional.core.errors import DerivativeError

X2, XY = Mesh({"x": 2}, virtual=True), Mesh({"x": 2, "y": 2}, virtual=True)


def local_loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return psum(torch.sin(x * w).sum(), "x")


def on_two(fn: Any, out: P | None = None) -> Any:
    return shard_map(fn, X2, (P(), P("x")), out or P())


mapped = on_two(local_loss)


def by_x(fn: Any, out: P | None = None, into: P | None = None) -> Any:
    """Manual along x, automatic along y."""
    return shard_map(fn, XY, (P(), into or P("x")), out or P(), axis_names={"x"})


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)


class Product(torch.autograd.Function):
    """Mixes its operands where shard_map cannot see it."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        return grads[0] * b, grads[0] * a


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    found: Any = Product.apply
    out: torch.Tensor = found(a, b)
    return out


def into(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(w)
    y += x[0]
    return psum(y, "x")


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a sum too many": (
        on_two(lambda w, x: psum(w, "x")),
        MeshError,
        r"psum: the value is invariant over 'x': every rank already holds the same .* pvary",
    ),
    "a mean of a sum": (
        on_two(lambda w, x: pmean(psum(x, "x"), "x")),
        MeshError,
        r"pmean: the value is invariant over 'x'",
    ),
    "varying, said to be replicated": (
        on_two(lambda w, x: {"a": w, "b": x * 2}),
        SpecError,
        r"out\['b'\] \(local shape \[2, 6\]\) the spec P\(\).* along 'x', but it varies .* Reduce it .*"
        r"all_gather\(x, 'x', invariant=True\), or name 'x' in the spec",
    ),
    "gathered, said to be replicated": (
        on_two(lambda w, x: all_gather(x, "x")),
        SpecError,
        r"out .* varies over it",
    ),
    "uneven": (
        lambda w, x: mapped(w, x[:3]),
        SpecError,
        r"args\[1\] the spec P\('x'\), which splits dim 0 of shape \[3, 6\] over 'x' into 2 shards.* "
        r"Pad it to 4, or use shard",
    ),
    "a spec too long": (
        shard_map(local_loss, X2, (P("x", None), P("x")), P()),
        SpecError,
        r"in_specs: args\[0\] has spec .* of length 2, but its shape is \[6\]",
    ),
    "an axis the mesh has not": (
        shard_map(local_loss, X2, (P(), P("z")), P()),
        SpecError,
        r"args\[1\] has spec P\('z'\), but .* has no axis 'z'",
    ),
    "a collective over an axis the mesh has not": (
        on_two(lambda w, x: psum(x, "z")),
        MeshError,
        r"psum over 'z': name one or several different axes of .*: x\.",
    ),
    "named factors": (
        shard_map(local_loss, X2, (P(), P.factors("(a b) c", a=2, b="x")), P()),
        SpecError,
        r"shard_map takes no named factors",
    ),
    "specs that are no prefix": (
        shard_map(local_loss, X2, (P(), P(), P()), P()),
        SpecError,
        r"in_specs is not a prefix of args",
    ),
    "outside": (lambda w, x: psum(x, "x"), MeshError, r"psum is called outside shard_map"),
    "shard_map inside": (
        on_two(lambda w, x: mapped(w, x)),
        MeshError,
        r"shard_map inside shard_map",
    ),
    "a collective in jit inside": (
        on_two(lambda w, x: jit(lambda x: psum(x, "x"))(x)),
        MeshError,
        r"psum is called in a function that another transform .* traces inside shard_map",
    ),
    "constrain inside": (
        on_two(lambda w, x: psum(constrain(x, P("x")), "x")),
        MeshError,
        r"constrain at .*test_shard_map_errors.py:\d+ in <lambda> is inside a shard_map",
    ),
    "constrain over a manual axis": (
        by_x(lambda w, x: psum(constrain(constrain(x, P(None, "y")), P("x")), "x")),
        MeshError,
        r"constrain at .*test_shard_map_errors.py:\d+ in <lambda> is inside a shard_map and names 'x'.* "
        r"axes that axis_names leaves out",
    ),
    "an argument split over an automatic axis": (
        by_x(local_loss, into=P("x", "y")),
        SpecError,
        r"in_specs gives args\[1\] the spec P\('x', 'y'\), which names 'y', but axis_names makes "
        r"only 'x' manual.* drop 'y' here .* constrain\(x, P\('y'\)\); or add it to axis_names",
    ),
    "a result split over an automatic axis": (
        by_x(lambda w, x: {"a": x, "b": x}, out=P(("x", "y"))),
        SpecError,
        r"out_specs gives out\['a'\] the spec P\(\('x', 'y'\)\), which names 'y'.*\n.*out\['b'\]",
    ),
    "varying along the one manual axis": (
        by_x(lambda w, x: x.sum(0)),
        SpecError,
        r"out \(local shape \[6\]\) the spec P\(\).* the same along 'x', but it varies over it",
    ),
    "a sum over an automatic axis": (
        by_x(lambda w, x: psum(x, ("x", "y"))),
        MeshError,
        r"psum over \('x', 'y'\): 'y' is automatic .* whose axis_names are 'x'\. .*x.sum\(0\) .* "
        r"Drop 'y' here, or add it to axis_names",
    ),
    "a place along an automatic axis": (
        by_x(lambda w, x: x * axis_index("y")),
        MeshError,
        r"axis_index over 'y': 'y' is automatic",
    ),
    "an axis that neither is": (
        by_x(lambda w, x: psum(x, "z")),
        MeshError,
        r"psum over 'z': name one or several different axes of .*: x\.",
    ),
    "uneven along the one manual axis": (
        lambda w, x: by_x(local_loss)(w, x[:3]),
        SpecError,
        r"args\[1\] the spec P\('x'\), which splits dim 0 of shape \[3, 6\] over 'x' into 2 shards",
    ),
    "shard_map of what is left inside": (
        by_x(lambda w, x: shard_map(local_loss, XY, (P(), P()), P(), axis_names={"y"})(w, x)),
        MeshError,
        r"shard_map inside shard_map: write one shard_map whose axis_names are all the axes",
    ),
    "parts that do not divide": (
        on_two(lambda w, x: psum_scatter(x[:, :3], "x", dim=1, tiled=True), P("x")),
        MeshError,
        r"psum_scatter: dim 1 of shape \[2, 3\] cannot be divided into 2 equal shards",
    ),
    "more parts than ranks": (
        on_two(lambda w, x: psum_scatter(x, "x", dim=1), P("x")),
        MeshError,
        r"psum_scatter: without tiled=True dim 1 must have one entry for each of the 2 ranks",
    ),
    "sent twice": (
        on_two(lambda w, x: ppermute(x, "x", [(0, 1), (1, 1)]), P("x")),
        MeshError,
        r"ppermute over 'x': .* every target at most once, each from 0 to 1",
    ),
    "the gradient of a maximum": (
        grad(on_two(lambda w, x: pmax(x * w, "x").sum())),
        DerivativeError,
        r"pmax has no derivative; detach\(\) its operand",
    ),
    "the tangent of a maximum": (
        lambda w, x: jvp(on_two(lambda w, x: pmax(x * w, "x").sum()), (w, x), (w, x)),
        DerivativeError,
        r"pmax has no derivative",
    ),
    "writing into an invariant value": (
        on_two(into),
        MeshError,
        r"writes a value into a tensor that varies over fewer axes",
    ),
    "an unseen mixture": (
        grad(on_two(lambda w, x: psum(product(w, x[0]).sum(), "x"))),
        DerivativeError,
        r"the gradient of args\[0\] varies over \('x',\).* pvary\(x, \('x',\)\)",
    ),
    "an unseen mixture behind a sum": (
        grad(on_two(lambda w, x: psum(product(psum(w * x[0], "x"), x[0]).sum(), "x"))),
        DerivativeError,
        r"the cotangent that psum got varies over 'x'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    fn, kind, message = REFUSED[name]
    with pytest.raises(kind) as caught:
        fn(*data())
    assert re.search(message, str(caught.value)), str(caught.value)


def test_what_is_no_tensor_has_no_spec() -> None:
    times = lambda x, n: (x * n, n)  # noqa: E731
    with pytest.raises(SpecError, match=r"gives args\[1\] the spec .* but it is not a tensor; use None"):
        shard_map(times, X2, (P("x"), P("x")), P("x"))(torch.ones(4), 3)
    for spec in (None, P()):
        value, n = shard_map(times, X2, (P("x"), spec), (P("x"), P()))(torch.ones(4), 3)
        assert torch.equal(value.full(), torch.full((4,), 3.0)) and n == 3


AXIS_NAMES: dict[str, tuple[Any, str]] = {
    "none of the mesh": ({"z"}, r"axis_names={'z'}\): Mesh.* has no axis 'z'; its axes are x, y\."),
    "a string": ("x", r"axis_names='x'\): name the manual axes of .* in a set, as in axis_names={'y'}"),
    "none at all": ((), r"axis_names=\(\)\): name the manual axes .* use shard if none is"),
}


@pytest.mark.parametrize("name", AXIS_NAMES)
def test_refuses_axis_names(name: str) -> None:
    names, message = AXIS_NAMES[name]
    with pytest.raises(MeshError, match=message):
        shard_map(local_loss, XY, (P(), P("x")), P(), axis_names=names)


def test_another_mesh_inside_shard() -> None:
    with pytest.raises(MeshError, match="one program runs on one mesh"):
        shard(mapped, XY)(*data())


def varies(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x * w).sin().sum()


GRADIENTS: dict[str, Any] = {
    "grad": lambda w, x: grad(varies)(w, x),
    "computed from it": lambda w, x: grad(varies)(w, x) * 2 + 1,
    "of a psum": lambda w, x: grad(local_loss)(w, x),
    "clipped": lambda w, x: grad(varies)(w, x).clamp(-1, 1) / 3,
}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_gradient_that_is_summed_already(gradient: str) -> None:
    """Every data-parallel loop in another library ends in this psum."""
    for collective, also in ((psum, ""), (pmean, "gradient / axis_size('x')")):
        with pytest.raises(MeshError) as error:
            on_two(lambda w, x, c=collective: c(GRADIENTS[gradient](w, x), "x"))(*data())
        for part in (collective.__name__, "is a gradient", "already summed over them", "'x'", also):
            assert part in str(error.value)
    w, x = data()
    want = [grad(varies)(w, part) for part in x.chunk(2)]
    have = on_two(GRADIENTS["grad"])(w, x)  # what the message says to write
    torch.testing.assert_close(have, want[0] + want[1])


def test_a_value_that_is_no_gradient_is_told_as_before() -> None:
    with pytest.raises(MeshError, match="every rank already holds the same value"):
        on_two(lambda w, x: psum(w * 2, "x"))(*data())

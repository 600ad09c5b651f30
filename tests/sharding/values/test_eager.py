"""Single operations on placed values in plain code: those of plain torch, forward and backward."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager_operations import (
    MESH,
    MESHES,
    OPERATIONS,
    SOME,
    operands,
    outcome,
    whole,
)
from effort import examples

from torchard import (
    DonatedError,
    Mesh,
    MeshError,
    MeshTensor,
    P,
    PlacementError,
    jit,
    place,
    shard,
)
from torchard.sharding.values import eager


def specs_on(mesh: Mesh) -> list[P]:
    """For a matrix: whole, each axis on each dim, both on one, one on each."""
    one = [P(), *(P(a) for a in mesh.axes), *(P(None, a) for a in mesh.axes)]
    both = list(itertools.permutations(mesh.axes, 2)) if len(mesh.axes) > 1 else []
    return [*one, *(P(pair) for pair in both), *(P(*pair) for pair in both)]


# Every n-th of them for one operation, and every n-th operation where the place does not matter.
EVERY = examples(ci=171, explore=1)
PLACES = [(mesh, xs, ys) for mesh in MESHES for xs in specs_on(mesh) for ys in specs_on(mesh)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_those_of_plain_torch(name: str) -> None:
    operation = OPERATIONS[name]
    want = outcome(operation, *operands())
    # Each operation on a few of the places, all places over all operations.
    start = list(OPERATIONS).index(name)
    for mesh, xs, ys in PLACES[start % EVERY :: EVERY]:
        x, y = operands()
        have = outcome(operation, place(x, mesh, xs), place(y, mesh, ys))
        for one, other in zip(have, want, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert (mine is None) == (theirs is None), (mesh, xs, ys)
                if theirs is not None:
                    tolerance = 1e-5 if theirs.dtype == torch.float32 else 1e-12
                    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", SOME)
def test_plans_are_made_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[str] = []
    count = eager._Operation._count

    def counted(self: Any, *args: Any) -> None:
        traces.append(self.__name__)
        count(self, *args)

    monkeypatch.setattr(eager._Operation, "_count", counted)
    for again in (False, True):
        x, y = operands()
        outcome(OPERATIONS[name], place(x, MESH, P("a")), place(y, MESH, P("b")))
        if again:
            assert traces == []
        traces.clear()


@pytest.mark.parametrize("number", [0.25, -3.5, 1e-8])
def test_floats_share_a_plan(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = place(operands()[0], MESH, P("a"))
    assert torch.equal((x * 0.5).full(), operands()[0] * 0.5)
    monkeypatch.setattr(eager._Operation, "_count", lambda *args: pytest.fail("traced again"))
    assert torch.equal((x * number).full(), operands()[0] * number)


def test_a_plain_tensor_may_be_either_operand() -> None:
    x, y = operands()
    placed = place(x, MESH, P("a"))
    for have, want in [
        (y + placed, y + x), (placed + y, x + y), (y @ placed.T, y @ x.T), (y > placed, y > x),
        (torch.add(y, placed, alpha=0.5), torch.add(y, x, alpha=0.5)),
        (torch.tensor(2.0) * placed, 2 * x), (placed * np.float64(2.0), 2 * x),
    ]:  # fmt: skip
        torch.testing.assert_close(have.full(), want)


def test_what_it_sends_is_in_the_plan_of_the_operation() -> None:
    x, y = (place(v, MESH, P("a")) for v in operands())
    assert [r.kind for r in shard(torch.add, MESH).lower(x, y).collectives] == []
    assert [r.kind for r in shard(torch.sum, MESH).lower(x).collectives] == ["all_reduce"]
    assert (x + y).spec == P("a", None)


@pytest.mark.parametrize(
    "index", [torch.tensor([3, 1]), torch.tensor([[0, 2], [1, 1]]), torch.tensor(2), torch.tensor([1])]
)
@pytest.mark.parametrize("around", [lambda i: i, lambda i: (i, 0), lambda i: (slice(1, None), i)])
def test_placed_indices_are_what_plain_ones_are(index: torch.Tensor, around: Any) -> None:
    """A plain tensor takes what has a length and items for a tuple of indices."""
    x = operands()[0][:, :4]
    want = x[around(index)]
    for spec in (P(), P("a"))[: 1 + index.ndim]:
        i = around(place(index, MESH, spec))
        assert torch.equal(whole(x[i]), want)
        assert torch.equal(whole(place(x, MESH, P("b"))[i]), want)
        if index.ndim:  # a position is a value, which a trace does not have
            assert torch.equal(whole(shard(lambda x, i=i: x[i] * 1, MESH)(x)), want)
    assert [int(i) for i in place(index.flatten(), MESH, P())] == index.flatten().tolist()
    with pytest.raises(TypeError, match=re.escape("use x.shape[0]")):
        len(place(index.flatten(), MESH, P()))


# -- values read --------------------------------------------------------------------------------------


def test_what_has_one_value_is_a_number() -> None:
    for spec in (P(), P("a")):
        x = place(torch.tensor([2.5]), MESH, spec)
        assert (x.item(), float(x), int(x), complex(x), bool(x)) == (2.5, 2.5, 2, 2.5 + 0j, True)
    scalar = place(torch.tensor(3), MESH, P())
    assert f"{scalar:>4}" == "   3" and [10, 20, 30, 40][scalar] == 40 and bool(scalar) is True
    assert not place(torch.tensor(0.0), MESH, P())
    x = place(operands()[0], MESH, P("a", "b"))
    assert float(x.mean()) == pytest.approx(float(operands()[0].mean()))


def test_shapes_are_those_of_the_whole() -> None:
    want, _ = operands()
    x = place(want, MESH, P("a", "b"))
    assert (len(x), x.size(), x.size(1), x.dim(), x.ndim, x.numel()) == (4, (4, 6), 6, 2, 2, 24)
    assert x.is_floating_point() and not torch.is_complex(x) and x.element_size() == 8
    assert torch.result_type(x, torch.ones(2, dtype=torch.complex128)) == torch.complex128
    assert np.array_equal(np.asarray(x), want.numpy()) and x.tolist() == want.tolist()
    assert np.array_equal(x.numpy(), want.numpy())
    assert torch.equal(x, x) and torch.equal(x, want) and not torch.equal(x, want + 1)
    assert torch.allclose(x, want + 1e-12) and not torch.allclose(x, want + 1)
    assert want[2, 3].item() in x and 100.0 not in x


def test_it_is_compared_by_value_and_kept_by_identity() -> None:
    x = place(operands()[0], MESH, P("a"))
    same = place(operands()[0], MESH, P("b"))
    assert bool((x == same).all()) and {x: 1}[x] == 1 and len({x, same}) == 2
    assert (x == None) is False and (x != "text") is True and x in [x]  # noqa: E711
    with pytest.raises(TypeError, match="unsupported operand"):
        x + "text"


def test_repr_needs_no_other_rank() -> None:
    x = place(operands()[0], MESH, P("a"))
    assert repr(x) == "MeshTensor([4, 6], torch.float64, P('a', None), Mesh(a=2, b=2, virtual))"
    assert f"{x}" == str(x) == repr(x)


# -- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "operation", "parts"),
    [
        ("add_", lambda x: x.add_(1), ("writes in place", "x = x + 1")),
        ("iadd", lambda x: x.__iadd__(1), ("writes in place", "x = x + 1")),
        ("setitem", lambda x: x.__setitem__(0, 1.0), ("writes in place", "torch.where")),
        ("setitem", lambda x: torch.ones(4, 6).__setitem__(0, x[0]), ("writes in place",)),
        ("copy_", lambda x: torch.ones(4, 6).copy_(x), ("writes in place",)),
        ("exp", lambda x: torch.exp(x, out=torch.ones(4, 6)), ("writes in place",)),
        ("nonzero", lambda x: x.nonzero(), ("value of a tensor", "x.full()")),
        ("getitem", lambda x: x[x > 2], ("value of a tensor", "x.full()")),
        ("dropout", lambda x: F.dropout(x), ("random numbers", "key")),
        ("rand_like", lambda x: torch.rand_like(x), ("random numbers", "key")),
        ("stride", lambda x: x.stride(), ("without a tensor", "x.full()")),
        ("unbind", lambda x: torch.tensor(x), ("torch.tensor(x)", "x.full()")),
        ("cuda", lambda x: x.to("cuda"), ("its mesh's device", "x.full()")),
        ("item", lambda x: x.item(), ("[4, 6]", "x.full()")),
        ("bool", lambda x: bool(x), ("no truth value", ".full()")),
    ],
)
def test_what_is_refused_says_why_and_what_to_do(name: str, operation: Any, parts: Any) -> None:
    x = place(operands()[0], MESH, P("a"))
    with pytest.raises(PlacementError) as error:
        operation(x)
    for part in parts:
        assert part in str(error.value), str(error.value)


def test_augmented_assignment_is_no_rebinding() -> None:
    x = y = place(operands()[0], MESH, P("a"))
    with pytest.raises(PlacementError, match=re.escape("x = x + 1")):
        x += 1
    assert x is y


def test_values_on_several_meshes() -> None:
    x, y = operands()
    with pytest.raises(MeshError) as error:
        torch.add(place(x, MESH, P("a")), place(y, MESHES[0], P("a")))
    for part in ("add", str(MESH), str(MESHES[0]), "place(y.full(), mesh, spec)"):
        assert part in str(error.value)


def test_no_such_attribute() -> None:
    x = place(operands()[0], MESH, P("a"))
    with pytest.raises(AttributeError, match="'foo'"):
        _ = x.foo
    assert not hasattr(x, "__cuda_array_interface__") and not hasattr(x, "data_ptr")
    assert isinstance(copy.copy(x), MeshTensor)


def test_donated_values() -> None:
    x = place(operands()[0], MESH, P("a"))
    jit(shard(lambda x: x * 2, MESH), backend="eager", donate_argnums=0)(x)
    for use in (
        lambda: x + 1, lambda: x.dtype, lambda: x.device, lambda: x.shape, lambda: x[0],
        lambda: x.sum(), lambda: len(x), lambda: x.detach(), lambda: x.grad, lambda: x.spec,
        lambda: x.requires_grad_(), lambda: x.item(), lambda: torch.exp(x), lambda: x == x,
        lambda: x.requires_grad, lambda: x.backward(), lambda: x.redistribute(P()),
    ):  # fmt: skip
        with pytest.raises(DonatedError, match="donated"):
            use()
    assert "donated" in repr(x)

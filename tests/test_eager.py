"""Single operations on placed values in plain code: those of plain torch, forward and backward."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
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

MESHES = [Mesh(axes, virtual=True) for axes in ({"a": 2}, {"a": 3, "b": 1}, {"a": 2, "b": 2})]
MESH = MESHES[2]

# Of x and y, both [4, 6].
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "x + y": lambda x, y: x + y,
    "x + 1": lambda x, y: x + 1,
    "1.5 - x": lambda x, y: 1.5 - x,
    "x * y": lambda x, y: x * y,
    "x / 3": lambda x, y: x / 3,
    "2 / x": lambda x, y: 2 / x,
    "x // 2": lambda x, y: x.detach() // 2,
    "x % 2": lambda x, y: x % 2,
    "x ** 2": lambda x, y: x**2,
    "2 ** x": lambda x, y: 2**x,
    "-x": lambda x, y: -x,
    "abs(x)": lambda x, y: abs(x - 3),
    "x @ y.T": lambda x, y: x @ y.T,
    "x == y": lambda x, y: x == y,
    "x > y": lambda x, y: x > y,
    "x <= 2": lambda x, y: x <= 2,
    "(x > 2) & ~(y > 3)": lambda x, y: (x > 2) & ~(y > 3),
    "x[0]": lambda x, y: x[0],
    "x[-1, 2]": lambda x, y: x[-1, 2],
    "x[1:3]": lambda x, y: x[1:3],
    "x[:, ::2]": lambda x, y: x[:, ::2],
    "x[..., None]": lambda x, y: x[..., None],
    "x[[2, 0]]": lambda x, y: x[[2, 0]],
    "x[tensor]": lambda x, y: x[torch.tensor([3, 3, 1])],
    "x[tensor, tensor]": lambda x, y: x[torch.tensor([3, 1]), torch.tensor([0, 5])],
    "list(x)": lambda x, y: list(x),
    "sum of rows": lambda x, y: sum(row * i for i, row in enumerate(y)),
    "x.sum()": lambda x, y: x.sum(),
    "x.mean(0)": lambda x, y: x.mean(0),
    "x.norm()": lambda x, y: x.norm(),
    "x.std(1)": lambda x, y: x.std(1),
    "x.max(1)": lambda x, y: x.max(dim=1),
    "x.argmax(-1)": lambda x, y: x.argmax(-1),
    "x.cumsum(0)": lambda x, y: x.cumsum(0),
    "x.softmax(1)": lambda x, y: x.softmax(1),
    "x.T": lambda x, y: x.T,
    "x.mT": lambda x, y: x.mT,
    "x.reshape": lambda x, y: x.reshape(2, 12),
    "x.flatten": lambda x, y: x.flatten(),
    "x.split": lambda x, y: x.split(3, dim=1),
    "x.clamp": lambda x, y: x.clamp(min=0.5, max=4.0),
    "x.to(float32)": lambda x, y: x.to(torch.float32),
    "x.double()": lambda x, y: x.double(),
    "x.clone()": lambda x, y: x.clone(),
    "x.detach() * x": lambda x, y: x.detach() * x,
    "x.expand": lambda x, y: x[:1].expand(3, 6),
    "torch.exp": lambda x, y: torch.exp(x),
    "torch.where": lambda x, y: torch.where(x > y, x, 0.5),
    "torch.cat": lambda x, y: torch.cat([x, y], dim=1),
    "torch.stack": lambda x, y: torch.stack([x, y]),
    "torch.einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "torch.maximum": lambda x, y: torch.maximum(x, y),
    "torch.zeros_like": lambda x, y: torch.zeros_like(x),
    "torch.full_like": lambda x, y: torch.full_like(x, 2.5),
    "torch.linalg.vector_norm": lambda x, y: torch.linalg.vector_norm(x, dim=0),
    "F.gelu": lambda x, y: F.gelu(x),
    "F.layer_norm": lambda x, y: F.layer_norm(x, (6,), eps=1e-3),
    "F.linear": lambda x, y: F.linear(x, y),
    "F.leaky_relu": lambda x, y: F.leaky_relu(x - 2, 0.3),
    "F.mse_loss": lambda x, y: F.mse_loss(x, y),
    "F.one_hot": lambda x, y: F.one_hot(x.long().clamp(0, 6), 7),
    "several": lambda x, y: ((x - x.mean(0)) / (x.var(0) + 1e-3).sqrt() @ y.T).relu(),
}  # fmt: skip


def specs_on(mesh: Mesh) -> list[P]:
    """For a matrix: whole, each axis on each dim, both on one, one on each."""
    one = [P(), *(P(a) for a in mesh.axes), *(P(None, a) for a in mesh.axes)]
    both = list(itertools.permutations(mesh.axes, 2)) if len(mesh.axes) > 1 else []
    return [*one, *(P(pair) for pair in both), *(P(*pair) for pair in both)]


# Every n-th of them for one operation, and every n-th operation where the place does not matter.
EVERY = examples(ci=171, explore=1)
SOME = list(OPERATIONS)[:: examples(ci=8, explore=1)]
PLACES = [(mesh, xs, ys) for mesh in MESHES for xs in specs_on(mesh) for ys in specs_on(mesh)]


def whole(value: Any) -> Any:
    return value.full() if isinstance(value, MeshTensor) else value


def loss_of(results: Any) -> Any:
    """A number that depends on every floating result, each entry with another weight."""
    total: Any = 0.0
    for i, leaf in enumerate(results):
        if leaf.requires_grad:
            weights = torch.arange(float(leaf.numel()), dtype=leaf.dtype).reshape(leaf.shape)
            total = total + (leaf * (weights.sin() + i)).sum()
    return total


def outcome(operation: Any, x: Any, y: Any) -> tuple[list[Any], list[Any]]:
    """Results and the gradients of both operands."""
    results = leaves_of(operation(x.requires_grad_(), y.requires_grad_()))
    loss = loss_of(results)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    return [whole(r).detach() for r in results], [whole(v.grad) for v in (x, y)]


def leaves_of(value: Any) -> list[Any]:
    if isinstance(value, (torch.Tensor, MeshTensor)):
        return [value]
    return [leaf for item in value for leaf in leaves_of(item)]


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.rand(4, 6, generator=generator, dtype=torch.float64) * 5 + 0.1 for _ in range(2))
    y[1] = x[1].round()
    return x, y


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
        ("stride", lambda x: x.stride(), ("no tensor", "x.full()")),
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

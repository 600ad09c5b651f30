"""Operations on placed values in plain code, under derivatives and closed over by traced functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eager_operations import MESH, OPERATIONS, SOME, leaves_of, operands, whole

from torchard import P, PlacementError, functionalize, place, shard

# -- autograd -----------------------------------------------------------------------------------------


def loss(x: Any, w: Any) -> Any:
    return ((x @ w.T).tanh() ** 2).mean()


@pytest.mark.parametrize("where", ["plain code", "shard", "after operations"])
def test_gradients_through_operations_and_transforms(where: str) -> None:
    def whole_loss(x: Any, w: Any, inner: Any = loss) -> Any:
        h = (x * 2 - 1).relu() if where == "after operations" else x
        return inner(h, w)

    inner = loss if where == "plain code" else shard(loss, MESH)
    x, w = operands()
    plain = [v.clone().requires_grad_() for v in (x, w)]
    whole_loss(*plain).backward()
    for spec in (P("a"), P(None, "b"), P("b", "a")):
        placed = [place(v, MESH, spec).requires_grad_() for v in (x, w)]
        whole_loss(*placed, inner).backward()
        for mine, theirs in zip(placed, plain, strict=True):
            assert mine.grad is not None and mine.grad.spec == mine.spec
            torch.testing.assert_close(mine.grad.full(), theirs.grad)
        asked = torch.autograd.grad(whole_loss(*placed, inner), placed)
        for mine, theirs in zip(asked, plain, strict=True):
            torch.testing.assert_close(mine.full(), theirs.grad)
        by_func = torch.func.grad(whole_loss, argnums=(0, 1))(*[v.detach() for v in placed])
        for mine, theirs in zip(by_func, plain, strict=True):
            torch.testing.assert_close(mine.full(), theirs.grad)


def test_second_derivatives_and_tangents() -> None:
    x, w = operands()

    def by_x(x: Any, w: Any) -> Any:
        return torch.func.grad(loss)(x, w)

    want = torch.func.grad(lambda x: (by_x(x, w) * x).sum())(x)
    px, pw = place(x, MESH, P("a")), place(w, MESH, P(None, "b"))
    torch.testing.assert_close(torch.func.grad(lambda x: (by_x(x, pw) * x).sum())(px).full(), want)
    _, tangent = torch.func.jvp(lambda x: loss(x, pw), (px,), (px,))
    torch.testing.assert_close(tangent, torch.func.jvp(lambda x: loss(x, w), (x,), (x,))[1])


def test_backward_from_a_value_with_dims() -> None:
    x, ct = operands()
    plain = x.clone().requires_grad_()
    (plain * plain).backward(ct)
    placed = place(x, MESH, P("a")).requires_grad_()
    (placed * placed).backward(place(ct, MESH, P(None, "b")))
    torch.testing.assert_close(whole(placed.grad), plain.grad)
    placed.grad = None
    assert placed.grad is None
    with pytest.raises(PlacementError, match="both be MeshTensors"):
        (placed * placed).backward(ct)  # type: ignore[arg-type]


def test_plain_results_beside_placed_ones_and_chosen_inputs() -> None:
    x, w = operands()
    plain = [v.clone().requires_grad_() for v in (x, w)]
    ((plain[0] * 2).sum() + (plain[1] * plain[1] * x).sum()).backward()
    a, b = place(x, MESH, P("a")).requires_grad_(), w.clone().requires_grad_()
    results = [a * 2, b * b]
    starts = [place(torch.ones_like(x), MESH, P(None, "b")), x]
    for mine, theirs in zip(torch.autograd.grad(results, [a, b], starts), plain, strict=True):
        torch.testing.assert_close(whole(mine), theirs.grad)
    c = place(x, MESH, P("a")).requires_grad_()
    for result, start in (((a * c).sum(), None), (a * c, place(torch.ones_like(x), MESH, P("a")))):
        a.grad = None
        torch.autograd.backward(result, start, retain_graph=True, inputs=[a])
        assert c.grad is None
        torch.testing.assert_close(whole(a.grad), x)
        for computed in (a, [a * 2]):  # torch takes the first for a list of rows
            with pytest.raises(PlacementError, match=r"pass a list of leaves, inputs=\[x\]"):
                torch.autograd.backward(result, start, inputs=computed)


def test_no_gradient_flows_where_it_is_stopped() -> None:
    x = place(operands()[0], MESH, P("a")).requires_grad_()
    assert (x * 2).requires_grad and not (x.detach() * 2).requires_grad
    with torch.no_grad():
        assert not (x * 2).requires_grad
    assert not (x > 1).requires_grad


# -- closed over by a traced function -------------------------------------------------------------


@pytest.mark.parametrize("name", SOME)
def test_a_function_closes_over_placed_values(name: str) -> None:
    x, y = operands()
    want = leaves_of(OPERATIONS[name](x, y))
    placed = place(x, MESH, P("a")), place(y, MESH, P(None, "b"))
    run = shard(lambda z: [*leaves_of(OPERATIONS[name](*placed)), z * placed[0]], MESH)
    *have, last = run(x)
    for mine, theirs in zip(have, want, strict=True):
        torch.testing.assert_close(whole(mine), theirs)
    torch.testing.assert_close(whole(last), x * x)


def test_closed_over_values_are_read_afresh_and_get_gradients() -> None:
    x, y = operands()
    holder = {"w": place(y, MESH, P("a")).requires_grad_()}
    run = shard(lambda z: (z @ holder["w"].T).sum() + holder["w"].norm(), MESH)
    for _ in range(2):
        w = y.clone().requires_grad_()
        want = (x @ w.T).sum() + w.norm()
        want.backward()
        have = run(x)
        have.backward()
        torch.testing.assert_close(have, want)
        torch.testing.assert_close(whole(holder["w"].grad), w.grad)
        y = y + 1
        holder["w"] = place(y, MESH, P("a")).requires_grad_()


def test_a_functionalized_module_of_placed_parameters() -> None:
    """Under a transform, given or closed over; in plain code it says what to write."""
    fn, params = functionalize(torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh()).double())
    x, placed = operands()[0], place(params, MESH, {"0.weight": P("a"), "0.bias": P("a")})
    for run in (shard(lambda x: fn(placed, x) * 1, MESH), lambda x: shard(fn, MESH)(placed, x)):
        torch.testing.assert_close(whole(run(x)), fn(params, x))
    with pytest.raises(TypeError, match=r"'0\.weight' is one.*shard\(fn, mesh\)\(params"):
        fn(placed, x)
    with pytest.raises(TypeError, match=r"params is a Tensor; .*fn\(params, \.\.\.\)"):
        fn(x)  # type: ignore[arg-type]

"""Rules of users: right ones are taken, wrong ones are refused by the factor that is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchard import Mesh, P, place, register_rule, shard
from torchard.sharding.layouts.factors import RuleError
from torchard.sharding.rules import REGISTRY

MESH = Mesh({"tp": 2}, virtual=True)
LIBRARY = torch.library.Library("torchard_tests", "FRAGMENT")
LIBRARY.define("centred(Tensor x) -> Tensor")
LIBRARY.define("weighted(Tensor x, Tensor w) -> Tensor")
LIBRARY.impl("centred", lambda x: x - x.mean(-1, keepdim=True), "CompositeExplicitAutograd")
LIBRARY.impl("weighted", lambda x, w: (x.exp() @ w), "CompositeExplicitAutograd")
LIBRARY.define("ranked(Tensor x) -> (Tensor, Tensor)")
LIBRARY.define("rolled(Tensor x, int by) -> Tensor")
LIBRARY.impl("ranked", lambda x: tuple(x.sort(-1)), "CompositeExplicitAutograd")
LIBRARY.impl("rolled", lambda x, by: x.roll(by, -1), "CompositeExplicitAutograd")
RANKED = torch.ops.torchard_tests.ranked.default
ROLLED = torch.ops.torchard_tests.rolled.default
CENTRED = torch.ops.torchard_tests.centred.default
WEIGHTED = torch.ops.torchard_tests.weighted.default


@pytest.fixture(autouse=True)
def rules_as_they_were() -> Iterator[None]:
    yield
    for target in (CENTRED, WEIGHTED, RANKED, ROLLED):
        REGISTRY.pop(target, None)


def run(target: object, spec: P, *shapes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    args = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]
    placed = [place(a, MESH, spec) for a in args]
    have = shard(lambda *a: target(*a), MESH, out_specs=P())(*placed)  # type: ignore[operator]
    torch.testing.assert_close(have, target(*args))  # type: ignore[operator]


@pytest.mark.parametrize("spec", [P("tp"), P(None, "tp")], ids=str)
@pytest.mark.parametrize("rows", [6, 600])
def test_right_rules(spec: P, rows: int) -> None:
    register_rule(CENTRED, text="b n -> b n | whole n | linear 0")
    register_rule(WEIGHTED, text="b k, k j -> b j | linear 1")
    run(CENTRED, spec, (rows, 4))
    run(WEIGHTED, spec, (rows, 4), (4, 6))


@pytest.mark.parametrize("rows", [6, 600])
@pytest.mark.parametrize(
    ("target", "text", "wrong"),
    [
        (CENTRED, "b n -> b n", "'n'"),
        (CENTRED, "b n -> b n | linear 0", "'n'"),
        (WEIGHTED, "b k, k j -> b j | linear 0", "linear 0"),
        (WEIGHTED, "b k, k j -> b j | linear 0 1", "linear 0 1"),
        (WEIGHTED, "b k, k j -> b j | reduce k max", "'k'"),
    ],
)
def test_wrong_rules(target: object, text: str, wrong: str, rows: int) -> None:
    register_rule(target, text=text)
    shapes = [(rows, 4)] if target is CENTRED else [(rows, 4), (4, 6)]
    with pytest.raises(RuleError, match=wrong) as raised:
        run(target, P("tp"), *shapes)
    assert "vmap" not in str(raised.value)


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("spec", [P("tp"), P(None, "tp")], ids=str)
def test_right_rules_of_several_results_and_of_integers(spec: P) -> None:
    register_rule(RANKED, text="b n -> b n, b n | whole n")
    register_rule(ROLLED, text="b n -> b n | whole n | linear 0")
    for x in (integers(6, 4), integers(6, 4).double() + torch.rand(6, 4)):
        placed = place(x, MESH, spec)
        have = shard(lambda x: (*RANKED(x), ROLLED(x, 1)), MESH, out_specs=P())(placed)
        torch.testing.assert_close(tuple(have), (*RANKED(x), ROLLED(x, 1)))


def test_operands_too_large_for_a_check() -> None:
    register_rule(ROLLED, text="b n -> b n | whole n")
    x = integers(1100, 1000)
    have = shard(lambda x: ROLLED(x, 1), MESH, out_specs=P())(place(x, MESH, P("tp")))
    assert torch.equal(have, ROLLED(x, 1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_wrong_rules_of_several_results_and_of_integers(dtype: torch.dtype) -> None:
    register_rule(RANKED, text="b n -> b n, b n")
    register_rule(ROLLED, text="b n -> b n")
    x = place(integers(6, 4).to(dtype), MESH, P("tp"))
    for fn in (lambda x: RANKED(x)[1], lambda x: ROLLED(x, 1)):
        with pytest.raises(RuleError, match="is wrong about 'n'"):
            shard(fn, MESH)(x)


def test_local_code_of_another_shape_or_dtype_is_refused() -> None:
    x = place(torch.randn(6, 4, dtype=torch.float64), MESH, P("tp"))
    for wrong in (lambda y: y[:1], lambda y: y.float()):
        register_rule(
            CENTRED,
            text="b n -> b n | whole n",
            emit=lambda call, local, wrong=wrong: local.call(wrong, local.args[0]),
        )
        with pytest.raises(RuleError, match="is wrong about 'b'"):
            shard(lambda x: CENTRED(x), MESH)(x)
        REGISTRY.pop(CENTRED)

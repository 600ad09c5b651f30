"""What checkpoint says of policies and scopes that are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchard import CheckpointError, checkpoint, name, policies, scope

X = torch.ones(2, 3)


def model(x: torch.Tensor) -> torch.Tensor:
    x = name(x.sin(), "before")
    for i in range(2):
        with scope(f"block/{i}"):
            x = name(x.sin(), "hidden").cos()
    with scope("head"):
        return (x**2).sum()


def unlabelled(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


def said(fn: Any, **how: Any) -> str:
    """The message of the gradient of a checkpointed function, which is that of the call as well."""
    with pytest.raises(CheckpointError) as called:
        checkpoint(fn, **how)(X)
    with pytest.raises(CheckpointError) as differentiated:
        torch.func.grad(checkpoint(fn, **how))(X)
    assert str(called.value) == str(differentiated.value)
    return str(called.value)


def test_a_label_that_does_not_exist() -> None:
    assert said(model, policy=policies.save_names("hidden", "hiden")) == (
        "checkpoint(model, policy=save_names('hidden', 'hiden')): the label 'hiden' is on no value; the "
        "labels are 'before', 'hidden'."
    )
    assert said(unlabelled, policy=policies.save_all_but_names("x")) == (
        "checkpoint(unlabelled, policy=save_all_but_names('x')): the label 'x' is on no value; label "
        "one with name(x, ...)."
    )


@pytest.mark.parametrize("combine", [policies.save_dots.__and__, policies.save_dots.__or__])
def test_a_label_of_a_combination(combine: Any) -> None:
    both = combine(policies.offload_names("hiden"))
    assert said(model, policy=both).startswith(
        f"checkpoint(model, policy={both}): the label 'hiden' is on no value; the labels are"
    )


def test_a_label_outside_of_where() -> None:
    assert said(model, policy=policies.offload_names("before"), where="block/*") == (
        "checkpoint(model, policy=offload_names('before')): the label 'before' is on no value inside of "
        "where='block/*'; the labels are 'hidden'."
    )
    assert said(model, policy=policies.save_names("hidden"), where=["head"]) == (
        "checkpoint(model, policy=save_names('hidden')): the label 'hidden' is on no value inside of "
        "where='head'; label one with name(x, ...)."
    )


def test_where_that_matches_nothing() -> None:
    there = "matches no scope of it; there are 'block/0', 'block/1', 'head'."
    assert said(model, where="blocks/*") == f"checkpoint(model, where='blocks/*') {there}"
    # Each of several patterns must match.
    assert said(model, where=["block/*", "tail"]) == f"checkpoint(model, where='tail') {there}"
    assert said(unlabelled, where="block/*") == (
        "checkpoint(unlabelled, where='block/*') matches no scope of it; it has no scopes: open one "
        "with `with scope('block/0'):`."
    )

    def third(path: str) -> bool:
        return path == "block/2"

    assert said(model, where=third) == f"checkpoint(model, where=third) {there}"


@pytest.mark.parametrize(
    ("where", "says"),
    [((), "names no scope"), ([], "names no scope"), (3, "where=3"), (["block/*", 3], "is a string")],
)
def test_where_that_is_no_pattern(where: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        checkpoint(model, where=where)


def test_several_ways_to_say_where() -> None:
    """Patterns and functions, one or several."""
    for where in ("block/*", ["block/0", lambda path: path == "block/1"], lambda path: "/" in path):
        program = checkpoint(torch.func.grad(model), where=where).lower(X)
        scopes = {node.meta["scope"] for node in program.calls if "recompute" in node.meta}
        assert scopes == {"block/0", "block/1"}


def test_many_scopes_are_not_all_listed() -> None:
    def deep(x: torch.Tensor) -> torch.Tensor:
        for i in range(14):
            with scope(f"layer{i}"):
                x = x.sin()
        return x.sum()

    assert said(deep, where="block").endswith("'layer11' and 2 more.")


@pytest.mark.parametrize("policy", ["save_dots", 3, None, ["a"], policies.Policy])
def test_what_is_no_policy(policy: Any) -> None:
    with pytest.raises(CheckpointError) as raised:
        checkpoint(model, policy=policy)
    assert str(raised.value) == (
        f"policy={policy!r} is not a policy: pass one of torchard.policies, such as policies.save_dots, "
        "or a function of (op, shapes, scope, name)."
    )
    with pytest.raises(CheckpointError, match="is not a policy"):
        policies.save_dots | policy


@pytest.mark.parametrize("answer", ["keep", 1.5, [], "Save"])
def test_a_policy_that_returns_nonsense(answer: Any) -> None:
    def odd(op: str, shapes: Any, scope: str, name: str | None) -> Any:
        return answer

    with pytest.raises(CheckpointError) as raised:
        torch.func.grad(checkpoint(model, policy=odd))(X)
    assert str(raised.value) == (
        f"the policy odd returned {answer!r} for aten.cos [2, 3] in block/1: it must return 'save', "
        "'recompute' or 'offload' (or a bool)."
    )


@pytest.mark.parametrize("sign", ["&", "|"])
def test_a_budget_cannot_be_combined(sign: str) -> None:
    for pair in (
        (policies.save_dots, policies.budget(fraction=0.5)),
        (policies.budget(bytes=1 << 20), policies.save_dots),
    ):
        with pytest.raises(CheckpointError) as raised:
            pair[0] & pair[1] if sign == "&" else pair[0] | pair[1]
        assert str(raised.value) == (
            f"{pair[0]} {sign} {pair[1]}: a budget decides on every value, so it cannot be combined with "
            "another policy. Checkpoint a part of the function with `where` instead."
        )


@pytest.mark.parametrize("given", [{}, {"fraction": 0.5, "bytes": 3}])
def test_a_budget_is_one_number(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"takes either fraction or bytes"):
        policies.budget(**given)


@pytest.mark.parametrize("fraction", [-0.1, 1.5])
def test_a_budget_is_a_fraction(fraction: float) -> None:
    with pytest.raises(ValueError, match=rf"budget\(fraction={fraction}\): the fraction must be"):
        policies.budget(fraction=fraction)

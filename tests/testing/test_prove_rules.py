"""Certificates: each claim of each factor rule holds for its operator; of a broken rule some does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from broken_rules import CHANGES, broken, claims_of
from one_op import one_op
from op_samples import called, samples
from pointwise_samples import pointwise_overloads

from torchard.sharding.rules import REGISTRY, Call, lookup
from torchard.testing.prove.certificates import certify

FAMILY = [op for op in pointwise_overloads() if op not in REGISTRY and lookup(op) is not None]


def refused(target: Any) -> Iterator[str]:
    """What is not certified of an operator's rule, on its sample calls."""
    for sample in samples(target):
        op = one_op(target, sample)
        call, rule = Call.of(op.node), op.rule
        for claim in claims_of(rule):
            if reason := certify(call, rule, claim):
                yield f"{claim}: {reason}"


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("target", [*REGISTRY, *FAMILY], ids=called)
def test_every_rule_is_certified(target: Any) -> None:
    assert not list(refused(target))


aten = __import__("torch").ops.aten
# Rules that are wrong when they are changed so, whatever the shapes.
WRONG = {
    "whole_lost": ["_softmax", "_log_softmax", "cumsum.default", "sort.stable", "mean.dim", "flip"],
    "linear_gained": ["relu", "exp", "sigmoid", "_softmax", "amax", "add.Scalar", "maximum"],
    "other_reduction": [
        "sum.dim_IntList",
        "mm",
        "bmm",
        "embedding",
        "amax",
        "gather",
        "select.int",
    ],
    "reduction_lost": ["sum.dim_IntList", "mm", "embedding", "index_select", "amin"],
    "emitter_lost": ["view", "expand", "embedding", "slice.Tensor", "tril", "full", "arange.start"],
}


def overload(name: str) -> Any:
    packet, _, which = name.partition(".")
    return getattr(getattr(aten, packet), which or "default")


@pytest.mark.parametrize(("change", "name"), [(c, n) for c, names in WRONG.items() for n in names])
def test_a_broken_rule_is_not(change: str, name: str) -> None:
    target = overload(name)
    changes = {c.__name__: c for c in CHANGES}
    with broken(target, changes.get(change), seed=0):
        assert any(f"{target} does not obey its rule" in why for why in refused(target))

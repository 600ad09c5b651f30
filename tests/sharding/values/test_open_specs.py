"""Specs with open dims: as values, and wherever a spec must say where data is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchard import (
    Mesh,
    MeshTensor,
    P,
    ShapeDtype,
    SpecError,
    constrain,
    initialize,
    load,
    place,
    random,
    redistribute,
    shard,
    shard_map,
    stack,
)

OPEN = P.UNCONSTRAINED
MESH = Mesh({"dp": 2, "tp": 2}, virtual=True)
SPEC = P("dp", OPEN)
X = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "spec", [SPEC, P(OPEN), P(OPEN, ("dp", "tp"), None, weak=True), P(OPEN, "tp").at(dp=1)], ids=str
)
def test_a_spec_is_a_value(spec: P) -> None:
    assert "P.UNCONSTRAINED" in repr(spec)
    for other in (eval(repr(spec)), pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert other == spec and hash(other) == hash(spec) and repr(other) == repr(spec)


def test_open_is_not_none() -> None:
    assert repr(SPEC) == "P('dp', P.UNCONSTRAINED)"
    assert SPEC not in (P("dp"), P("dp", None)) and P(OPEN) not in (P(), P(None))
    assert not P(OPEN).is_replicated and SPEC.axes == ("dp",)
    assert SPEC.led(1) == P(None, *SPEC) == stack([SPEC, SPEC]) == P(None, "dp", OPEN)


def test_outside_of_shard_a_constraint_is_the_identity() -> None:
    assert constrain(X, P("batch", OPEN)).equal(X)


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "in_specs": (lambda: shard(torch.sin, MESH, (SPEC,))(X), "in_specs[0]"),
    "in_specs by name": (lambda: shard(lambda x: x, MESH, {"x": [SPEC]})([X]), "in_specs['x'][0]"),
    "out_specs": (lambda: shard(lambda x: {"y": x}, MESH, None, {"y": SPEC})(X), "out_specs['y']"),
    "place": (lambda: place({"w": X}, MESH, {"w": SPEC}), "specs['w']"),
    "place with rules": (lambda: place(X, MESH, P("b", OPEN), rules={"b": "dp"}), "specs"),
    "place in a trace": (lambda: shard(lambda x: place(x, MESH, SPEC), MESH)(X), "specs"),
    "redistribute": (lambda: redistribute(place(X, MESH, P()), SPEC), "the value"),
    "from_shards": (lambda: MeshTensor.from_shards([X], MESH, SPEC, shape=(8, 6)), "the value"),
    "shard_map": (lambda: shard_map(torch.sin, MESH, (SPEC,), P())(X), "in_specs[0]"),
    "shard_map's result": (lambda: shard_map(torch.sin, MESH, (P(),), SPEC)(X), "out_specs"),
    "initialize": (
        lambda: initialize(
            lambda name, key, shape, dtype: torch.zeros(shape),
            {"w": ShapeDtype((4, 6))},
            MESH,
            {"w": SPEC},
            random.key(0),
        ),
        "specs['w']",
    ),
    "load": (lambda: load("nowhere", {"w": X}, MESH, {"w": SPEC}), "specs['w']"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_spec_that_says_where_data_is_has_no_open_dim(call: str) -> None:
    run, path = CALLS[call]
    with pytest.raises(SpecError) as error:
        run()
    text = str(error.value)
    assert text.startswith(f"{path} has spec P(") and "which leaves dim 1 open" in text
    assert "give the dim its axes, or None" in text and "constrain" in text


def test_each_open_spec_of_a_tree_is_named() -> None:
    with pytest.raises(SpecError, match=r"(?s)specs\['a'\] has spec .*\nspecs\['b'\] has spec "):
        place({"a": X, "b": X}, MESH, {"a": SPEC, "b": P(OPEN)})


def test_a_dim_is_open_as_a_whole() -> None:
    with pytest.raises(SpecError, match=r"entry \('dp', P.UNCONSTRAINED\) is neither"):
        P(("dp", OPEN))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"P\.factors: heads is P.UNCONSTRAINED"):
        P.factors("(heads d)", heads=OPEN, d=2)  # type: ignore[arg-type]


def test_a_constraint_that_does_not_fit() -> None:
    with pytest.raises(SpecError, match=r"use P\('dp', P.UNCONSTRAINED\)"):
        constrain(X, P("dp", OPEN, None))
    with pytest.raises(SpecError, match=r"P\(P.UNCONSTRAINED, 'model'\), but .* has no axis 'model'"):
        shard(lambda x: constrain(x, P(OPEN, "model")), MESH)(X)
    with pytest.raises(SpecError, match=r"P\('batch', P.UNCONSTRAINED\), but 'batch' is neither"):
        shard(lambda x: constrain(x, P("batch", OPEN)), MESH, rules={"seq": None})(X)

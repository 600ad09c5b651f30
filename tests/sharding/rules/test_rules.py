"""Every factor rule: each factor split in turn, local operation + implied collective = the operation.

Driven by the registry: a rule without a sample call in ``op_samples`` fails here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_op import OneOp, one_op, run_option, ways
from op_samples import called, samples
from pointwise_samples import pointwise_overloads
from sample_calls import Sample

from torchard.functional.execution.codegen import compiled
from torchard.sharding import Mesh
from torchard.sharding.decompositions.decompose import decompose, same_call
from torchard.sharding.decompositions.functional_forms import BIASED_PRODUCTS, DECOMPOSITIONS
from torchard.sharding.layouts.options import Option, options
from torchard.sharding.rules import REGISTRY, lookup
from torchard.sharding.testing import layouts, meshes

aten = torch.ops.aten
# Tagged pointwise, and called by none of the simple samples (each is an error of torch itself).
NOT_CALLABLE = set[str]()
NONE = aten.sin.default._schema
ADDED = [aten.index_put.default, aten.index_add.default, aten.scatter_add.default]


def _same(have: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert have.dtype == want.dtype
    if tolerance and have.dtype.is_floating_point:
        # Integers and booleans come back in float32, where a kernel's vector and scalar paths
        # may round apart (cosh on AVX2 does).
        tolerance = max(tolerance, 4 * torch.finfo(have.dtype).eps)
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def _check_option(target: Any, sample: Sample, op: OneOp, mesh: Mesh, option: Option) -> None:
    try:
        found = run_option(op, option, mesh)
        assert [f.shape for f in found] == [r.shape for r in op.results]
        if sample.values:
            for have, want in zip(found, op.results, strict=True):
                _same(have, want, sample.tolerance)
    except Exception as error:
        # Only now: to print the operands takes as long as a good part of the check.
        where = f"{target} {sample.args} on {mesh} from {[str(i) for i in option.ins]}"
        raise AssertionError(f"{where}: {error}") from error


def _check(target: Any) -> int:
    count = 0
    for sample in samples(target):
        op = one_op(target, sample)
        for mesh, option in ways(op):
            _check_option(target, sample, op, mesh, option)
            count += 1
    return count


# torch 2.15 says so at its first call, once for the process.
@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("target", REGISTRY, ids=called)
def test_registered_rule(target: Any) -> None:
    assert samples(target), f"{target} has a rule and no sample call: add one to op_samples.py"
    _check(target)


FAMILY = [op for op in pointwise_overloads() if op not in REGISTRY and lookup(op) is not None]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", FAMILY, ids=str)
def test_pointwise_family(target: Any) -> None:
    assert samples(target) or str(target) in NOT_CALLABLE
    assert _check(target) or not samples(target)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", [*REGISTRY, *FAMILY], ids=called)
def test_every_option_for_any_layouts(target: Any) -> None:
    """Whatever layouts the operands have, composite and pending ones too, and are wished for."""

    @given(st.data())
    @settings(max_examples=2, database=None)
    def run(data: st.DataObject) -> None:
        sample = data.draw(st.sampled_from(samples(target)))
        op, mesh = one_op(target, sample), data.draw(meshes())
        ins = [data.draw(layouts(v.shape, mesh, pending=True)) for v in op.inputs]
        wished = [data.draw(layouts(op.results[0].shape, mesh))]
        found = list(options(op.rule, ins, wished, mesh.sizes))
        assert found
        for option in data.draw(st.permutations(found))[:4]:
            _check_option(target, sample, op, mesh, option)

    if samples(target):
        run()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", [*REGISTRY, *DECOMPOSITIONS], ids=called)
def test_taken_apart_it_is_the_operation(target: Any) -> None:
    """Whatever ``decompose`` makes of a call (torch's table may write in place) gives its results."""
    for sample in samples(target):
        op = one_op(target, sample)
        if not decompose(op.graph, op.node):
            # A product without a bias is as far apart as it comes; so is what is not added to a table.
            assert target not in DECOMPOSITIONS or target in (*BIASED_PRODUCTS, *ADDED)
            continue
        op.graph.lint()
        assert not any(same_call(n, op.node) for n in op.graph.nodes)
        assert not any(getattr(n.target, "_schema", NONE).is_mutable for n in op.graph.nodes)
        found = compiled(op.graph)(op.inputs)
        for have, want in zip(found, op.results, strict=True):
            if sample.values:
                _same(have, want, max(sample.tolerance, 1e-12))

"""Random programs: their text is what they do, and they shrink to what a person can read."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
import torch
from effort import cases, examples
from hypothesis import find, given, settings
from hypothesis import strategies as st
from same_bits import assert_same_bits, assert_same_memory
from torch.func import grad

from torchard import checkpoint, fuse, jit, shard
from torchard.functional.core import tree
from torchard.sharding import Mesh
from torchard.testing import check_pure
from torchard.testing.strategies import RandomProgram, programs, random_program

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
MESH = Mesh({"dp": 2, "tp": 2}, virtual=True)


def pasted(text: str) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """The function and the inputs of a text, which imports what it uses."""
    names: dict[str, Any] = {}
    exec(text, names)
    return names["f"], names["inputs"]


def assert_is_its_text(program: RandomProgram) -> None:
    function, inputs = pasted(repr(program))
    for have, want in zip(inputs, program.inputs, strict=True):
        assert_same_memory(have, want)
    assert_same_bits(function(*inputs), program(*program.inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=examples(ci=20, explore=2000))
@given(data=st.data())
def test_the_printed_text_gives_the_same_bits(dtype: torch.dtype, data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from([None, MESH]))
    assert_is_its_text(data.draw(programs(dtype=dtype, mesh=mesh)))


def test_one_seed_is_one_program() -> None:
    for seed in range(examples(ci=50, explore=500)):
        program = random_program(seed, steps=seed % 8 + 1, mesh=MESH)
        assert repr(program) == repr(random_program(seed, steps=seed % 8 + 1, mesh=MESH))
        assert_is_its_text(program)


@settings(max_examples=examples(ci=20, explore=1000))
@given(programs())
def test_programs_are_pure_and_of_moderate_size(program: RandomProgram) -> None:
    for out in tree.leaves(program(*program.inputs)):
        assert out.is_floating_point()
        assert bool((out.abs() < 1e4).all())
    check_pure(program, *program.inputs)


# -- shrinking ----------------------------------------------------------------------------------------


def steps(program: RandomProgram) -> list[str]:
    return re.findall(r" (v\d+ = .*)", program.source)


# For each pattern the steps that it needs, and how many numbers their inputs.
SMALLEST = {
    r"torch\.cat": (1, 1),
    r"@": (1, 1),
    r"layer_norm": (1, 1),
    r"\.unflatten": (1, 1),
    r"nn\.dropout": (1, 1 + 2),
    r"nn\.cross_entropy": (1, 3 + 1),  # three logits and an id
    r"layer_norm(.|\n)*torch\.cat": (2, 1),
    r"(v\d+) = nn\.dropout(.|\n)* = nn.layer_norm\(\1\)": (2, 1 + 2),  # the one feeds the other
    r"\.softmax(.|\n)*softmax(.|\n)*softmax": (3, 1),
}


@pytest.mark.parametrize("pattern", cases(list(SMALLEST)[:2], list(SMALLEST)[2:]))
def test_the_smallest_program_with_an_operation(pattern: str) -> None:
    program = find(
        programs(),
        lambda program: bool(re.search(pattern, program.source)),
        settings=settings(max_examples=5000, database=None),
    )
    needed, numbers = SMALLEST[pattern]
    assert len(steps(program)) == needed, program
    assert sum(x.numel() for x in program.inputs) == numbers, program
    for x in program.inputs:  # small whole numbers
        assert bool((x == x.round()).all()) and bool((x.abs() < 10).all()), program
    assert " return v" in program.source and "," not in program.source.split("return")[1]


def test_a_failing_example_can_be_pasted() -> None:
    @settings(database=None, derandomize=True, max_examples=1000)
    @given(programs())
    def fails(program: RandomProgram) -> None:
        assert "softmax" not in program.source

    with pytest.raises(AssertionError) as failure:
        fails()
    (note,) = [n for n in failure.value.__notes__ if "program=" in n]
    text = note.split("program=\n")[1].split("\n,\n")[0]
    function, inputs = pasted(text)
    assert function(*inputs).numel() == inputs[0].numel() == 1


def test_failures_in_different_lines_of_a_program_are_of_one_kind() -> None:
    """Hypothesis tells failures apart by where they were raised; a deleted step must not count."""

    @settings(database=None, derandomize=True, max_examples=1000)
    @given(programs())
    def fails(program: RandomProgram) -> None:
        if "nn." not in program.source:
            with suppress(NotImplementedError):  # some operations raise this one of integers
                program(*(x.long() for x in program.inputs))

    with pytest.raises(RuntimeError) as failure:  # one, not a group of several
        fails()
    assert any(
        re.match(r"random_program\.py:\d+ in f: v\d+ = ", n) for n in failure.value.__notes__
    )


def test_loops_and_branches_are_drawn_and_stay_right() -> None:
    """Every kind occurs, and programs equal themselves under transforms, in value and gradient."""
    kinds = {"cond", "scan", "fori_loop", "while_loop", "associative_scan"}
    seen = set[str]()
    for seed in range(examples(ci=12, explore=300)):
        program = random_program(seed, steps=4, control_flow=True)
        seen |= {kind for kind in kinds if f"{kind}(" in program.source}
        assert_is_its_text(program)
        floats = tuple(i for i, x in enumerate(program.inputs) if x.is_floating_point())

        def loss(*inputs: Any, program: RandomProgram = program) -> torch.Tensor:
            return sum((y.sin().sum() for y in tree.leaves(program(*inputs))), torch.zeros(()))

        for transform in _TRANSFORMS:
            pairs = [(transform(program), program)]
            if floats:
                pairs.append((transform(grad(loss, floats)), grad(loss, floats)))
            for have, want in pairs:
                for x, y in zip(
                    tree.leaves(tree.whole(have(*program.inputs))),
                    tree.leaves(want(*program.inputs)),
                    strict=True,
                ):
                    torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert seen == kinds


_TRANSFORMS = (lambda f: jit(f, backend="eager"), lambda f: shard(f, MESH), checkpoint, fuse)

"""The mutants of `make mutants` still fit the library: each text is there, once."""

from __future__ import annotations

import ast
import shlex

import pytest
from mutants import Mutant, mirrored, written_by_hand
from paths import ROOT

MUTANTS = written_by_hand()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mutant_applies(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    mutated = ast.parse(mutant.applied(text))
    assert ast.dump(mutated) != ast.dump(ast.parse(text)), "the mistake changes nothing"


def test_mutants_have_tests() -> None:
    for mutant in MUTANTS:
        named = [word for word in shlex.split(mutant.tests) if word.endswith(".py")]
        missing = [name for name in (*named, *mirrored(mutant.file)) if not (ROOT / name).exists()]
        assert not missing, f"{mutant.name}: {missing}"


def test_names_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))

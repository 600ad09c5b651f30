"""Small changes at places drawn at random: the operators of Cosmic Ray, one for each kind of place.

Cosmic Ray is used for its operators only, through its API; `mutants.py` runs the tests. Changes of
annotations, messages, decorators and statements of a module (aliases of types, tables) are left out:
most of them change nothing, or fail on import.
"""

from __future__ import annotations

import difflib
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from mutants import Mutant
from paths import ROOT

ROOMS = ("functional", "sharding", "kernels")
_BINARY = (
    *("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul"),
    *("BitOr_BitAnd", "BitAnd_BitOr", "LShift_RShift", "RShift_LShift", "BitXor_BitOr"),
)
_COMPARISON = (
    *("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Is_IsNot", "IsNot_Is"),
)
OPERATORS = (
    *(f"ReplaceBinaryOperator_{kind}" for kind in _BINARY),
    *(f"ReplaceComparisonOperator_{kind}" for kind in _COMPARISON),
    *("ReplaceUnaryOperator_Delete_USub", "ReplaceUnaryOperator_Delete_Not"),
    *("AddNot", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "NumberReplacer"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
)
# What a place may not be inside of.
_OUTSIDE = {"annassign", "decorator", "raise_stmt", "assert_stmt", "fstring", "tfpdef"}
_SILENT = {"__repr__", "__str__"}

Place = tuple[str, tuple[int, int]]


def drawn(count: int, seed: int) -> list[Mutant]:
    """So many mutants, of files drawn by the number of their lines; places differ."""
    rng = random.Random(seed)
    files = [str(p.relative_to(ROOT)) for room in ROOMS for p in sorted((ROOT / room).rglob("*.py"))]
    texts = {file: (ROOT / file).read_text() for file in files}
    lines = [texts[file].count("\n") for file in files]
    known: dict[str, dict[Place, list[tuple[str, int]]]] = {}
    mutants: dict[Place, Mutant] = {}
    while len(mutants) < count:
        (file,) = rng.choices(files, lines)
        if file not in known:
            known[file] = _places(file, texts[file])
        if known[file]:
            place = rng.choice(sorted(known[file]))
            operator, occurrence = rng.choice(known[file][place])
            mutants.setdefault(place, _mutant(file, texts[file], place, operator, occurrence))
    return list(mutants.values())


def _places(file: str, text: str) -> dict[Place, list[tuple[str, int]]]:
    """For each place, the operators that change it, and which of its changes in the file that is."""
    places: dict[Place, list[tuple[str, int]]] = defaultdict(list)
    nodes = list(ast_nodes(get_ast(text)))
    for name in OPERATORS:
        operator, occurrence = get_operator(f"core/{name}")(), 0
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                if _counts(node):
                    places[file, start].append((name, occurrence))
                occurrence += 1
    return dict(places)


def _counts(node: Any) -> bool:
    """Whether a change of a node can change results."""
    around = list(_around(node))
    functions = [n for n in around if n.type in ("funcdef", "lambdef")]
    named = {n.name.value for n in functions if n.type == "funcdef"}
    if not functions or named & _SILENT or _OUTSIDE & {n.type for n in around}:
        return False
    if any(n.type == "argument" and n.children[0].get_code().strip() == "strict" for n in around):
        return False  # zip(..., strict=True) is an assertion
    innermost = functions[0]
    annotated = innermost.type == "funcdef" and innermost.annotation
    return not annotated or not (annotated.start_pos <= node.start_pos < annotated.end_pos)


def _around(node: Any) -> Iterator[Any]:
    while node is not None:
        yield node
        node = node.parent


def _mutant(file: str, text: str, place: Place, operator: str, occurrence: int) -> Mutant:
    changed = mutate_code(text, get_operator(f"core/{operator}")(), occurrence)
    assert changed is not None
    difference = difflib.ndiff(text.splitlines(), changed.splitlines())
    lines = [line for line in difference if line[:1] in "+-"]
    what = " ⇒ ".join(line[2:].strip() for line in lines)
    name = f"{file}:{place[1][0]}:{place[1][1]}"
    return Mutant(name, file, text, changed, f"`{what}`")

"""Random programs with writes under transforms: right numbers, and nothing written that a user holds.

    python tests/support/write_checks.py [COUNT [SEED]]     10,000 cases: counts, or the smallest failure
    python tests/support/write_checks.py --compiled 200     the same by Inductor, without derivatives

`check` calls the function of a case several times. It compares all results with those of `AsValues`, bit
by bit, and every tensor that the user holds with its value before: arguments that are not donated, memory
that they are views of, views of donated ones, closures, and results of earlier calls. Planned memory is
poisoned.
"""

from __future__ import annotations

import argparse
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from random_writes import CLOSED
from refusals import refuses
from torch import Tensor
from write_cases import AT, Case, cases, explore

from torchard import MeshTensor, tree
from torchard.functional.memory.planned_code import poisoned

__all__ = ["Wrong", "check", "explore", "torch_refuses"]

LARGEST = 2.0**45  # below this, no sum is rounded

class Wrong(AssertionError):
    """A number, or a tensor that was written."""


class Held:
    """Tensors that the user holds, and their values."""

    def __init__(self) -> None:
        self._values: list[tuple[str, Tensor, Tensor]] = []

    def add(self, name: str, *tensors: Tensor) -> None:
        self._values += [(name, tensor, tensor.clone()) for tensor in tensors]

    def forget(self, gone: Tensor) -> None:
        """A donated tensor, whatever else it was."""
        self._values = [each for each in self._values if each[1] is not gone]

    def check(self, when: str) -> None:
        for name, tensor, value in self._values:
            if not torch.equal(tensor, value):
                raise Wrong(f"{when} {name} was written: {tensor.tolist()}, it was {value.tolist()}")


def _whole(results: Any) -> list[Tensor]:
    leaves = tree.leaves(results, is_leaf=lambda v: isinstance(v, MeshTensor))
    return [v.full() if isinstance(v, MeshTensor) else v for v in leaves]


def _compare(have: Any, want: Any, when: str) -> None:
    for number, (a, b) in enumerate(zip(_whole(have), _whole(want), strict=True)):
        if a.shape != b.shape or not torch.equal(a, b):
            raise Wrong(f"{when}: result {number} is {a.tolist()}, not {b.tolist()}")


class Session:
    """A user who calls one function again and again, and looks at everything else."""

    def __init__(self, case: Case) -> None:
        self.case, self.held = case, Held()
        self.reference, self.run = case.reference(), case.subject()
        self.held.add("a closed-over tensor", CLOSED)
        self.held.add("the index", AT)

    def wanted(self, values: Sequence[Tensor]) -> Any:
        return tree.map(lambda x: x.clone(), self.reference(*[v.clone() for v in values], AT))

    def call(self, number: int, when: str, first: Tensor | None = None) -> Any:
        """Call it with arguments of this number, or with another first one."""
        case, held = self.case, self.held
        base, *values = case.arguments(number)
        if first is not None:
            values[0] = first
        want = self.wanted(values)
        held.add("the caller's memory", base)
        for position, value in enumerate(values):
            if case.holds:
                held.add(f"a view of argument {position}", value[1:])
            if position in case.donated:
                held.forget(value)
            else:
                held.add(f"argument {position}", value)
        have = self.run(*case.on_mesh(*values), AT)
        _compare(have, want, when)
        held.check(when)
        return have, want

    def calls(self) -> None:
        first, want = self.call(0, "1st call")
        self.held.add("a result of the 1st call", *_whole(first))
        again, _ = self.call(0, "2nd call")
        _compare(first, want, "the results of the 1st call, after the 2nd")
        self._written(again)
        self.call(1, "3rd call")
        results = tree.leaves(first, is_leaf=lambda v: isinstance(v, MeshTensor))
        alone = all(results[0] is not other for other in (CLOSED, *results[1:]))
        fits = type(results[0]) is Tensor and results[0].shape == (4, 4)
        if self.case.derived == "value" and fits and alone:
            self.call(2, "4th call, of a result of the 1st", results[0])

    def _written(self, results: Any) -> None:
        """The user writes into a result that is nobody else's."""
        used = {each[1].untyped_storage().data_ptr() for each in self.held._values}
        for result in _whole(results):
            if result.untyped_storage().data_ptr() not in used and 0 not in result.stride():
                result.fill_(77)


def _in_threads(case: Case) -> None:
    run, errors = case.subject(), []
    _, *values = case.arguments(0)
    want = case.reference()(*[v.clone() for v in values], AT)

    def work() -> None:
        try:
            for _ in range(3):
                _, *values = case.arguments(0)
                have = run(*case.on_mesh(*values), AT)
                _compare(have, want, "in a thread")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def check(case: Case) -> str:
    """ "right", or why nothing was compared.

    Raises:
        Wrong: a number is wrong, or something that the user holds was written.
        Exception: the library failed where it neither refuses nor torch does.
    """
    _, *values = case.arguments(0)
    wanted = _whole(case.reference()(*values, AT))
    exact = _whole(case.reference()(*[v.double() for v in values], AT))
    if any(float(x.abs().max()) > LARGEST for x in exact if x.numel()):
        return "too large"
    if case.dtype.is_floating_point and any(map(_differ, wanted, exact)):
        return "rounded"
    try:
        with poisoned(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Session(case).calls()
            if case.threads and case.derived != "jvp":  # whose levels all of torch's threads share
                _in_threads(case)
    except Wrong:
        raise
    except Exception as error:
        if refuses(error):
            return f"refused: {type(error).__name__}"
        if torch_refuses(case, type(error)):
            return "torch refuses"
        raise
    return "right"


def _differ(a: Tensor, b: Tensor) -> bool:
    return not torch.equal(a.double(), b.double())


def torch_refuses(case: Case, kind: type[Exception]) -> bool:
    """Whether plain torch raises such an exception, too, as vmap does for some writes."""
    _, *values = case.arguments(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.in_torch()(*values, AT)
    except kind:
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=10_000)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--compiled", action="store_true", help="by Inductor")
    given = parser.parse_args()
    drawn = cases(["value"], ["compiled"]) if given.compiled else cases()
    explore(given.count, given.seed, drawn, check)


if __name__ == "__main__":
    main()

"""checked: errors at the first operation that returns NaN or infinity, or reads past an end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchard.functional.core.arguments import checked as arguments_checked
from torchard.functional.core.scope_frames import Frame
from torchard.functional.engine.transformed import Transformed
from torchard.functional.loops.call import in_bodies
from torchard.functional.programs.program import Pass, Program, Rewrite, Stage
from torchard.functional.programs.tags import CHECKS, Checks

__all__ = ["Check", "checked"]


@arguments_checked
def checked(
    fn: Callable[..., Any], nan: bool = True, inf: bool = False, index: bool = True
) -> Transformed:
    """Raise an error at the first operation of a function, or of a derivative, whose result is wrong.

    A transform like others: ``grad(checked(f))`` checks the gradient too, ``jit(checked(f))`` the
    compiled code. Of a compiled region, results are looked at; if one is wrong, its operations run one by
    one to find where it begins. What a region computes and does not return is not looked at.

    Args:
        fn: a pure function of pytrees.
        nan: whether NaN is wrong.
        inf: whether an infinite value is wrong; many programs mask with them.
        index: whether an index past the end of a dim is wrong, where torch, a mesh or a compiler would
            ignore it.

    Returns:
        The function, whose calls wait for each operation.

    Raises (when called):
        CheckError: names the operation, how many of its values are wrong, and whether an operand's are;
            the line, the scope with its iteration, forward or backward, the microbatch and the rank.

    Source: ``jax.experimental.checkify``, ``jax_debug_nans``.

    >>> import torch, torchard as ta
    >>> def f(x):
    ...     with ta.scope("score"):
    ...         return (x - 1).log().sum()
    >>> ta.checked(f)(torch.tensor([2.0, 3.0]))
    tensor(0.6931)
    >>> ta.checked(f)(torch.tensor([0.5, 2.0]))
    Traceback (most recent call last):
        ...
    torchard.CheckError: <doctest checked[1]>:3 in f: aten.log returned NaN at [0], 1 of 2 values, of
        finite operands (score forward)
    """
    return Transformed(fn, [Check(Checks(nan, inf, index))])


@dataclass(frozen=True)
class Check(Rewrite):
    """The rewrite of `checked`: tags operations."""

    checks: Checks

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (Pass(Stage.MARK, self, reads_loops=True),)

    def __call__(self, program: Program) -> Program:
        return self._tagged(program, ())

    def inline(self, program: Program) -> Program:
        """The tagged program, and tagged bodies of its loops."""
        return in_bodies(program, self._tagged)

    def _tagged(self, program: Program, outer: tuple[Frame, ...]) -> Program:
        program = program.copy()
        for node in program.calls:
            CHECKS.set(node, self.checks.and_those(CHECKS.get(node)))
        return program

"""A pure function and inputs for it, both of them Python text."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from hypothesis.vendor.pretty import RepresentationPrinter

import torchard

__all__ = ["NAMES", "OURS", "RandomProgram"]

# What the text of a program may import from torchard.
OURS = (
    *("P", "associative_scan", "cond", "constrain", "fori_loop", "nn", "random", "scan"),
    "while_loop",
)
# The names in which a program's text is evaluated; the text's imports define the same names.
NAMES: dict[str, Any] = {
    "torch": torch,
    "F": torch.nn.functional,
    **{name: getattr(torchard, name) for name in OURS},
}
_FILE = "random_program.py"


@dataclass(frozen=True, repr=False, eq=False)
class RandomProgram:
    """A pure function and inputs for it. Its ``repr`` is Python text that creates both.

    Calling it calls the function. An error that one of its lines raises has a note that shows the line.

    Attributes:
        source: the text of the function ``f``, its imports first.
        input_sources: for each input its name in the function, and an expression that creates it.
        inputs: the inputs.
        function: the function ``f``.

    >>> from torchard.testing import strategies as ts
    >>> program = ts.random_program(4, steps=1)
    >>> type(program) is ts.RandomProgram
    True
    >>> program
    import torch
    <BLANKLINE>
    <BLANKLINE>
    def f(v0):
        v1 = v0 @ v0.mT
        return v1, v1
    <BLANKLINE>
    <BLANKLINE>
    inputs = (
        torch.tensor([[-0.71, -0.52], [0.78, -0.4], [-1.13, 0.31]], dtype=torch.float64),
    )
    """

    source: str
    input_sources: dict[str, str]
    inputs: tuple[torch.Tensor, ...] = field(init=False)
    function: FunctionType = field(init=False)

    def __post_init__(self) -> None:
        inputs = tuple(eval(text, NAMES) for text in self.input_sources.values())
        names = dict(NAMES)
        exec(compile(self.source, _FILE, "exec"), names)
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "function", names["f"])

    def __call__(self, *inputs: Any) -> Any:
        try:
            return self.function(*inputs)
        except Exception as error:
            line = self._line_of(error)
            if line is None:
                raise
            # Hypothesis distinguishes failures by their last line. Were that one of the program,
            # none would be the same after a step is gone.
            error.add_note(f"{_FILE}:{line} in f: {self.source.splitlines()[line - 1].strip()}")
            raise error.with_traceback(None)  # noqa: B904

    def _line_of(self, error: Exception) -> int | None:
        """The line of the function that raised an error itself."""
        last = error.__traceback__
        while last and last.tb_next:
            last = last.tb_next
        return last.tb_lineno if last and last.tb_frame.f_code is self.function.__code__ else None

    def __repr__(self) -> str:
        inputs = "".join(f"    {text},\n" for text in self.input_sources.values())
        return f"{self.source}\n\n\ninputs = (\n{inputs})"

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        """On separate lines, from the margin on, so that it can be copied."""
        indentation, printer.indentation = printer.indentation, 0
        for line in repr(self).splitlines():
            printer.break_()
            printer.text(line)
        printer.break_()
        printer.indentation = indentation

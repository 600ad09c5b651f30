"""Kernel: what is run in place of several operations, and everything that has to be known of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from torchard.functional.core.arguments import AtLeast, check_fields, checked
from torchard.functional.core.errors import KernelError
from torchard.kernels.execution.optional_backends import Imported
from torchard.kernels.patterns.gradient import gradients_of
from torchard.kernels.patterns.pattern import Pattern
from torchard.kernels.terms.dims import Dims

__all__ = ["KERNELS", "Kernel", "register_kernel"]

Implementation = Callable[..., Any]
Implementations = Mapping[str, Implementation | Imported]


@dataclass(frozen=True, eq=False)
class Kernel:
    """Several operations in one.

    Attributes:
        name: for reports and policies.
        references: pure functions, the first of which says what it computes; the others are the same
            in other spellings that round differently. They are what is looked for, and the test oracle.
        dims: of inputs and outputs, ``"... d, d -> ... d"``: what fits together, and how it may be
            split. After ``|``, dims that must be ``whole``: split, the kernel comes apart.
        implementations: by type of device (``"cuda"``, ``"cpu"``; ``"any"`` for the rest), functions of
            the tensors and, by name, the literals, or the names of such (`Imported`), done without where
            what they need is not installed. What has none is compiled from its reference.
        vjp: ``"reference"``: the derivative of the reference, found and compiled like it. Or
            implementations of that derivative by device: functions of the inputs, then the outputs, that
            torch's formulas read, then the cotangents, that return the gradients of all floating inputs,
            those that are the same (of a sum's operands) once. None: it has none, and gradients through
            it are refused.
        joint: implementations, by device, of both at once: functions of the inputs, then the cotangents,
            that return the outputs, then the gradients. Run where a program has both and a cotangent
            does not depend on the outputs, as that of a loss.
        by_time: whether on a CPU the reference, compiled, is tried beside an implementation, and the
            faster of them runs.
        together: whether an implementation's results may be views of one piece of memory.
        tolerance: how far from float64 it may be, in multiples of its reference's own error.
        weights: parameters that are inputs of the program wherever it is looked for.
        of: of a gradient's, the kernel it is the gradient of.

    Raises:
        PatternError: dims and references do not fit together.
    """

    name: str
    references: tuple[Pattern | Callable[..., Any], ...]
    dims: str | None = None
    implementations: Implementations = field(default_factory=dict)
    vjp: Literal["reference"] | Implementations | None = "reference"
    joint: Implementations = field(default_factory=dict, kw_only=True)
    by_time: bool = field(default=False, kw_only=True)
    together: bool = field(default=False, kw_only=True)
    tolerance: Annotated[float, AtLeast(0)] = 2.0
    weights: tuple[str, ...] = ()
    of: Kernel | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        """What is looked for."""
        return tuple(
            reference
            if isinstance(reference, Pattern)
            else Pattern(reference, self.dims, name=self.name, weights=self.weights)
            for reference in self.references
        )

    @cached_property
    def gradient(self) -> Kernel | None:
        """The kernel of its gradients; None where nothing floating comes out."""
        found = [gradient for pattern in self.patterns for gradient in gradients_of(pattern)]
        if not found:
            return None
        given = dict(self.vjp) if isinstance(self.vjp, Mapping) else {}
        name = f"{self.name}_backward"
        return Kernel(
            name,
            tuple(found),
            None,
            given,
            None,
            self.tolerance,
            of=self,
            by_time=self.by_time,
            together=self.together,
        )

    @property
    def backward(self) -> Kernel | None:
        """That of its gradients, if it may be used."""
        return None if self.vjp is None else self.gradient

    @property
    def parsed(self) -> Dims | None:
        """The dims, read."""
        return self.patterns[0].dims


KERNELS: dict[str, Kernel] = {}


@checked
def register_kernel(kernel: Kernel) -> Kernel:
    """Make a kernel one of those that ``fuse(fn)`` looks for.

    Raises:
        KernelError: another one has its name.
    """
    if KERNELS.setdefault(kernel.name, kernel) is not kernel:
        raise KernelError(f"there is a kernel {kernel.name!r} already")
    return kernel

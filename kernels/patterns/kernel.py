"""Kernels, which compute several operations as one, and the registry of the library's kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

import torch

from torchard.functional.core.arguments import AtLeast, check_fields, checked
from torchard.functional.core.errors import KernelError
from torchard.kernels.execution.optional_backends import Imported
from torchard.kernels.patterns.gradient import gradients_of
from torchard.kernels.patterns.pattern import Pattern
from torchard.kernels.terms.dims import Dims

__all__ = ["KERNELS", "Kernel", "register_kernel"]

_LIBRARY = "torchard.kernels.library."

Implementation = Callable[..., Any]
Implementations = Mapping[str, Implementation | Imported]


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel: several operations computed as one.

    Attributes:
        name: the name in reports and for policies.
        references: pure functions. The first one defines what the kernel computes; the others write the
            same function in different ways, which round differently. `fuse` searches for all of them, and
            tests compare the kernel with them.
        dims: how the dims of inputs and outputs correspond, and how the kernel may be split over a mesh:
            ``"... d, d -> ... d | whole d"``. If a ``whole`` dim is split, the operations of the
            reference run instead.
        implementations: functions by device type (``"cuda"``, ``"cpu"``; ``"any"`` for the rest). They
            take the tensors, then literals by name. An `Imported` implementation is skipped if the
            package that it needs is not installed. A device without an implementation runs the compiled
            reference.
        vjp: the derivative. ``"reference"``: the derivative of the reference, found and compiled like it.
            A dict: implementations by device type, which are functions of the inputs, then the outputs
            that torch's formulas read, then the cotangents, and return the gradients of all
            floating-point inputs; equal gradients, such as those of the operands of a sum, are returned
            once, and those of inputs that the reference detaches are not. None: gradients are refused.
        tolerance: the largest error against float64, in multiples of the reference's own error, that the
            library's tests allow its kernels. Nothing reads it at run time; test a kernel of your own by
            ``torchard.testing.equal(fuse(fn, kernel), fn, *args)``.
        weights: parameters that must be inputs of the program, for kernels that are only faster for
            weights.
        of: if this kernel computes a gradient, the kernel whose gradient it is.
        joint: implementations of kernel and gradient at once, by device type: functions of the inputs,
            then the cotangents, which return the outputs, then the gradients. They run if a program has
            both and the cotangents do not depend on the outputs, as for a loss.
        by_time: on a CPU, also time the compiled reference, and run the faster one.
        shared_storage: results of an implementation may be views of one buffer.
        gradient_only: the references are operators of torch's as they are; only their gradients are
            looked for.

    Raises:
        KernelError: an implementation is for a device that torch does not know.
        PatternError (when it is first searched for): ``dims`` and ``references`` do not agree.

    >>> import torch, torchard as ta
    >>> def biased_relu(x, b):
    ...     return torch.relu(x + b)
    >>> def in_place(x, b):
    ...     return (x + b).relu_()
    >>> kernel = ta.Kernel("biased_relu", (biased_relu,), "... d, d -> ... d", {"any": in_place})
    >>> fused = ta.fuse(biased_relu, kernel)
    >>> fused(torch.tensor([[-3.0, 1.0]]), torch.ones(2))
    tensor([[0., 2.]])
    >>> [(use.kernel, use.operations) for use in fused.lower(torch.ones(1, 2), torch.ones(2)).kernels]
    [('biased_relu', 2)]
    """

    name: str
    references: tuple[Pattern | Callable[..., Any], ...]
    dims: str | None = None
    implementations: Implementations = field(default_factory=dict)
    vjp: Literal["reference"] | Implementations | None = "reference"
    joint: Implementations = field(default_factory=dict, kw_only=True)
    by_time: bool = field(default=False, kw_only=True)
    shared_storage: bool = field(default=False, kw_only=True)
    gradient_only: bool = field(default=False, kw_only=True)
    tolerance: Annotated[float, AtLeast(0)] = 2.0
    weights: tuple[str, ...] = ()
    of: Kernel | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for given in (self.implementations, self.vjp, self.joint):
            for device in given if isinstance(given, Mapping) else ():
                _check_device(self.name, device)

    @cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns of the references."""
        patterns = tuple(
            reference
            if isinstance(reference, Pattern)
            else Pattern(reference, self.dims, name=self.name, weights=self.weights)
            for reference in self.references
        )
        registered = self._is_registered
        for number, pattern in enumerate(patterns):
            if registered and str(pattern.fn.__module__).startswith(_LIBRARY):
                pattern.key = f"{self.name} {number}"
        return patterns

    @property
    def _is_registered(self) -> bool:
        """Whether its patterns are those of the registered kernel: others may use its references."""
        known = KERNELS.get(self.name)
        if known is None or self.of is not None:
            return False
        mine, theirs = ((k.references, k.dims, k.weights) for k in (self, known))
        return mine == theirs

    @cached_property
    def gradient(self) -> Kernel | None:
        """The kernel of the gradients; None if no output is differentiable."""
        gradients = [gradient for pattern in self.patterns for gradient in gradients_of(pattern)]
        if not gradients:
            return None
        vjp = dict(self.vjp) if isinstance(self.vjp, Mapping) else {}
        name = f"{self.name}_backward"
        return Kernel(
            name,
            tuple(gradients),
            None,
            vjp,
            None,
            self.tolerance,
            of=self,
            by_time=self.by_time,
            shared_storage=self.shared_storage,
        )

    @property
    def backward(self) -> Kernel | None:
        """The kernel of the gradients, if derivatives are allowed; else None."""
        return None if self.vjp is None else self.gradient

    @property
    def parsed(self) -> Dims | None:
        """The parsed dims."""
        return self.patterns[0].dims


def _check_device(kernel: str, device: str) -> None:
    if device == "any":
        return
    try:
        torch.device(device)
    except RuntimeError as error:
        raise KernelError(
            f"kernel {kernel!r} has an implementation for {device!r}, which is no device of torch's: "
            "name its type ('cpu', 'cuda', ...), or 'any' for all others."
        ) from error


KERNELS: dict[str, Kernel] = {}
"""The registered kernels, by name: those that ``fuse(fn)`` looks for. See `register_kernel`.

>>> from torchard.kernels import KERNELS
>>> KERNELS["rms_norm"].dims                        # d must not be split
'... d, d -> ... d | whole d'
"""


@checked
def register_kernel(kernel: Kernel) -> Kernel:
    """Add a kernel to those that ``fuse(fn)`` searches for.

    It takes effect in calls that are traced after it; a function's calls like an earlier one are not
    traced again.

    Args:
        kernel: a `Kernel` with a new name.

    Returns:
        The kernel.

    Raises:
        KernelError: another kernel has this name.

    >>> import torch, torchard as ta
    >>> from torchard.kernels import KERNELS
    >>> cube = ta.register_kernel(ta.Kernel("cube", (lambda x: x * x * x,)))
    >>> del KERNELS["cube"]                                   # what the example registered
    >>> ta.register_kernel(ta.Kernel("rms_norm", (lambda x: x * x,)))
    Traceback (most recent call last):
        ...
    torchard.KernelError: a kernel named 'rms_norm' is already registered
    """
    if KERNELS.setdefault(kernel.name, kernel) is not kernel:
        raise KernelError(f"a kernel named {kernel.name!r} is already registered")
    return kernel

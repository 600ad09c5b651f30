"""Patterns: plain functions whose occurrences are looked for.

A pattern is traced, like any function, at the shapes and dtypes at which it is compared, and once at
arbitrary shapes, for its *skeleton*: its operations and data flow, which suggest where to look.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from torchard.functional.core.arguments import checked
from torchard.functional.core.bounded import Recent
from torchard.functional.core.errors import PatternError
from torchard.functional.core.outputs import tensors_of
from torchard.functional.execution.binding import bind
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.functional.trace import trace
from torchard.functional.tracing.signature import ShapeDtype
from torchard.kernels.patterns.derivations import DERIVATIONS
from torchard.kernels.patterns.match_plan import MatchPlan
from torchard.kernels.patterns.skeleton import Skeleton, same_form
from torchard.kernels.terms.dims import Dims
from torchard.kernels.terms.evaluate import evaluate
from torchard.kernels.terms.store import Store

__all__ = ["Alternative", "Pattern", "any_of", "call"]

Specs = tuple[tuple[tuple[int, ...], torch.dtype], ...]
# Unusual numbers that represent literals in a trace, to find where each literal is used.
_MARKERS = (0.73190117, 0.61803717, 0.52915737, 0.44721737)


@dataclass
class _Choices:
    """The choices for a pattern's any_of and call in one trace, in order."""

    taken: tuple[int, ...] = ()
    operations: tuple[Callable[..., Any] | None, ...] = ()
    counts: list[int] = field(default_factory=list)
    predicates: list[Callable[[str], bool]] = field(default_factory=list)


_choices: contextvars.ContextVar[_Choices | None] = contextvars.ContextVar("choices", default=None)


@checked
def any_of(*functions: Callable[..., Any]) -> Callable[..., Any]:
    """Inside a pattern, a function that matches any of several; elsewhere, the first of them.

    Args:
        functions: the alternatives, which have the same parameters.

    Returns:
        A function with those parameters.

    >>> import torch, torchard as ta
    >>> activation = ta.any_of(torch.relu, torch.nn.functional.silu)
    >>> def biased(x, b):
    ...     return activation(x + b)
    >>> x, b = torch.ones(2, 4), torch.ones(4)
    >>> for f in (torch.relu, torch.nn.functional.silu, torch.tanh):
    ...     print(len(ta.find(lambda x, b: f(x + b), biased)(x, b)))
    1
    1
    0
    """

    def chosen(*args: Any, **kwargs: Any) -> Any:
        choices = _choices.get()
        if choices is None:
            return functions[0](*args, **kwargs)
        place = len(choices.counts)
        choices.counts.append(len(functions))
        taken = choices.taken[place] if place < len(choices.taken) else 0
        return functions[taken](*args, **kwargs)

    return chosen


def call(predicate: Callable[[str], bool]) -> Callable[..., torch.Tensor]:
    """Inside a pattern, any one operation whose name a predicate accepts.

    Its operands are the tensors with which it is called; its result is assumed to be like the first one.

    Args:
        predicate: a function of the operation's name, such as ``"gelu"`` or ``"mul.Tensor"``.

    Returns:
        A function of tensors, for use in a pattern.

    Raises:
        PatternError (when called): outside a pattern.

    >>> import torch, torchard as ta
    >>> from torchard.kernels import call
    >>> pointwise = call(lambda name: name in ("relu", "tanh"))
    >>> def biased(x, b):
    ...     return pointwise(x + b)
    >>> len(ta.find(lambda x, b: torch.tanh(x + b), biased)(torch.ones(2, 4), torch.ones(4)))
    1
    """

    def called(*tensors: torch.Tensor) -> torch.Tensor:
        choices = _choices.get()
        if choices is None:
            raise PatternError("call(predicate) can only be called inside a pattern.")
        place = len(choices.predicates)
        choices.predicates.append(predicate)
        operation = choices.operations[place] if place < len(choices.operations) else None
        if operation is not None:
            result: torch.Tensor = operation(*tensors)
            return result
        return torch.ops.torchard_pattern.any(list(tensors), place)  # type: ignore[no-any-return]

    return called


_library = torch.library.Library("torchard_pattern", "DEF")
_library.define("any(Tensor[] operands, int place) -> Tensor")
_library.impl(
    "any", lambda operands, place: torch.empty_like(operands[0]), "CompositeExplicitAutograd"
)


class Pattern:
    """A function to search for in programs, however it is written there.

    Args:
        fn: a function of tensors and of literals. A literal is a parameter with a default: ``...``
            matches any number, any other default matches only that number.
        dims: how the dims of inputs and outputs correspond, ``"... d, d -> ... d"``. Without it, inputs
            may broadcast in any way.
        name: the name in reports; by default that of ``fn``.
        weights: parameters that must be inputs of the program, for kernels that are only faster for
            weights.

    Raises:
        PatternError: ``fn`` takes no tensor. When it is first searched for: it cannot be traced, or does
            not return the dims of the outputs.

    >>> import torch, torchard as ta
    >>> def norm(x, w, eps=...):
    ...     return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w
    >>> pattern = ta.Pattern(norm, "... d, d -> ... d")
    >>> def model(x, w):
    ...     return ta.nn.rms_norm(x, w, eps=1e-5).relu()
    >>> (match,) = ta.find(model, pattern)(torch.ones(2, 4), torch.ones(4))
    >>> match.literals
    (('eps', 1e-05),)
    """

    @checked
    def __init__(
        self,
        fn: Callable[..., Any],
        dims: str | None = None,
        *,
        name: str | None = None,
        weights: Sequence[str] = (),
    ) -> None:
        inputs, literals = [], []
        for parameter in _parameters(fn):
            if parameter.default is ...:
                literals.append(parameter.name)
            elif parameter.default is parameter.empty:
                inputs.append(parameter.name)
        name = name or str(getattr(fn, "__name__", type(fn).__name__))
        if not inputs:
            raise PatternError(f"the pattern {name} has no tensor among its parameters")
        read = None if dims is None else Dims.read(dims, len(inputs), name)
        self._set(fn, name, inputs, literals, read, weights)

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        name: str,
        inputs: Sequence[str],
        literals: Sequence[str],
        dims: Dims | None,
        weights: Sequence[str] = (),
    ) -> Pattern:
        """A pattern with given inputs and literals."""
        pattern = cls.__new__(cls)
        pattern._set(fn, name, inputs, literals, dims, weights)
        return pattern

    def _set(
        self,
        fn: Callable[..., Any],
        name: str,
        inputs: Sequence[str],
        literals: Sequence[str],
        dims: Dims | None,
        weights: Sequence[str],
    ) -> None:
        self.fn, self.name, self.dims = fn, name, dims
        self.inputs, self.literals = list(inputs), list(literals)
        self.weights = frozenset(i for i, name in enumerate(inputs) if name in weights)
        # The key of what is derived of it and kept on disk; None for patterns that are not the library's.
        self.key: str | None = None
        # The pattern whose gradient it is.
        self.origin: Pattern | None = None

    def __repr__(self) -> str:
        return f"Pattern({self.name})"

    @cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The alternatives: one for every combination of choices of its any_of."""
        if self.key is None:
            return self._alternatives()
        specs, skeleton, half = DERIVATIONS.get(self.key, self._derived)
        known = Alternative(self, (), specs)
        known.skeleton, known.half = skeleton, half
        return (known,)

    def _derived(self) -> tuple[Specs, Skeleton, Skeleton | None]:
        """What is kept of a pattern without choices."""
        (only,) = self._alternatives()
        return only._specs, only.skeleton, only.half

    def _alternatives(self) -> tuple[Alternative, ...]:
        choices = _Choices()
        specs, program = self._example(choices)
        if len(program.inputs) != len(specs):
            raise PatternError(
                f"the pattern {self.name} reads a tensor that is not an argument of it: make it a "
                "parameter, or compute with a number."
            )
        if self.dims is not None:
            self.dims.check_results([tuple(VAL.of(n).shape) for n in program.results], self.name)
        alternatives = [
            Alternative(self, taken, specs)
            for taken in itertools.product(*map(range, choices.counts))
        ]
        # The first has already been traced.
        alternatives[0].example, alternatives[0].predicates = (specs, program), choices.predicates
        return tuple(alternatives)

    def _example(self, choices: _Choices) -> tuple[Specs, Program]:
        """Shapes at which the pattern can be traced, and the program there."""
        error: Exception | None = None
        for specs in self._candidates():
            choices.counts.clear()
            choices.predicates.clear()
            try:
                return specs, self._trace(specs, self._marked(), choices)
            except Exception as raised:  # whatever a user's function raises at wrong shapes
                error = error or raised
        raise PatternError(
            f"the pattern {self.name} cannot be traced: {error}. State how its dims correspond, "
            f"as in Pattern({self.name}, '... d, d -> ... d')."
        ) from error

    def _candidates(self) -> Iterator[Specs]:
        if self.dims is not None:
            yield tuple((shape, self.dims.dtype(i)) for i, shape in enumerate(self.dims.example()))
            return
        for ranks in itertools.product((2, 1, 3, 4, 0), repeat=len(self.inputs)):
            yield tuple(((6,) * rank, torch.float32) for rank in ranks)

    def _marked(self) -> dict[str, float]:
        return dict(zip(self.literals, _MARKERS, strict=False))

    def _trace(
        self,
        specs: Specs,
        literals: dict[str, Any],
        choices: _Choices,
        device: torch.device | str = "cpu",
    ) -> Program:
        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            return tensors_of(self.fn(*tensors, **literals))

        run.__name__ = self.name
        with _chosen(choices):
            program = trace(run)(*(ShapeDtype(shape, dtype, device) for shape, dtype in specs))
        # Traced on contiguous values, it runs on values of any strides.
        for node in program.calls:
            if node.target is aten.view.default:
                node.target = aten.reshape.default
        return program


def _parameters(fn: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    try:
        return [*inspect.signature(fn).parameters.values()]
    except ValueError:  # it is written in C++
        name = getattr(fn, "__name__", repr(fn))
        raise PatternError(
            f"{name} has no signature that names its parameters: use a function that calls it, as in "
            f"lambda x: {name}(x)."
        ) from None


@contextlib.contextmanager
def _chosen(choices: _Choices) -> Iterator[None]:
    token = _choices.set(choices)
    try:
        yield
    finally:
        _choices.reset(token)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress warnings of traces that are tried and may fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# The cached plans of all patterns, bounded.
_PLANS: Recent[MatchPlan | None] = Recent(1024)


class Alternative:
    """A pattern with one choice for each of its any_of.

    Attributes:
        taken: the index of the choice for each any_of.
    """

    def __init__(self, pattern: Pattern, taken: tuple[int, ...], specs: Specs) -> None:
        self.pattern = pattern
        self.taken = taken
        self._specs = specs
        self.predicates: list[Callable[[str], bool]] = []

    @cached_property
    def example(self) -> tuple[Specs, Program]:
        """Arbitrary shapes, and the program traced at them."""
        choices = _Choices(self.taken)
        program = self.pattern._trace(self._specs, self.pattern._marked(), choices)
        self.predicates = choices.predicates
        return self._specs, program

    @cached_property
    def skeleton(self) -> Skeleton:
        """The terms at arbitrary shapes."""
        return self._skeleton(*self.example)

    @cached_property
    def half(self) -> Skeleton | None:
        """The skeleton in half precision, if its form differs: casts separate sums and products."""
        rounded = self.rounded
        return None if rounded is None or same_form(rounded, self.skeleton) else rounded

    @cached_property
    def rounded(self) -> Skeleton | None:
        """The skeleton in half precision; None if the pattern does not support it."""
        half = torch.bfloat16
        specs = tuple((s, half if t.is_floating_point else t) for s, t in self._specs)
        program = self.at(specs, tuple(self.pattern._marked().items()))
        return None if program is None else self._skeleton(specs, program)

    def _skeleton(self, specs: Specs, program: Program) -> Skeleton:
        store = Store()
        values = [store.leaf(("input", i), shape, dtype) for i, (shape, dtype) in enumerate(specs)]
        env = evaluate(program.graph, values, store, sharing=True)
        return Skeleton(
            tuple(env[node].term for node in program.results),
            tuple(env[node].access for node in program.results),
            tuple(value.term for value in values),
            {marker: name for name, marker in self.pattern._marked().items()},
        )

    def at(
        self,
        specs: Specs,
        literals: Sequence[tuple[str, Any]] = (),
        operations: tuple[Callable[..., Any], ...] = (),
        device: torch.device | str = "cpu",
    ) -> Program | None:
        """The program at these shapes and dtypes; None if it cannot be traced at them."""
        plan = self.plan(specs, literals, operations, device)
        return None if plan is None else plan.program

    def plan(
        self,
        specs: Specs,
        literals: Sequence[tuple[str, Any]] = (),
        operations: tuple[Callable[..., Any], ...] = (),
        device: torch.device | str = "cpu",
    ) -> MatchPlan | None:
        """The plan by which the program at these shapes and dtypes is evaluated; None as for `at`."""
        key = (self, specs, tuple(literals), operations, str(device))

        def make() -> MatchPlan | None:
            program = self._at(specs, dict(literals), operations, device)
            if program is None or not self._accepts(specs, literals, operations, program):
                return None
            return MatchPlan(program)

        return _PLANS.get(key, make)

    def _accepts(
        self,
        specs: Specs,
        literals: Sequence[tuple[str, Any]],
        operations: tuple[Callable[..., Any], ...],
        program: Program,
    ) -> bool:
        """Whether its program runs on these dtypes: torch refuses mixes that fake tensors accept.

        It is run at the shapes of the example, which are small, once for all shapes.
        """
        if len({dtype for _, dtype in specs if dtype.is_floating_point}) < 2:
            return True
        small = tuple((shape, t) for (shape, _), (_, t) in zip(self._specs, specs, strict=True))
        if specs != small:
            return self.at(small, literals, operations) is not None
        try:
            bind(program)([torch.zeros(shape, dtype=dtype) for shape, dtype in specs])
        except RuntimeError:
            return False
        return True

    def _at(
        self,
        specs: Specs,
        literals: dict[str, Any],
        operations: tuple[Callable[..., Any], ...],
        device: torch.device | str,
    ) -> Program | None:
        try:
            with _quietly():
                choices = _Choices(self.taken, operations)
                return self.pattern._trace(specs, literals, choices, device)
        except (RuntimeError, IndexError, TypeError, ValueError, AssertionError):
            return None  # it does not support these shapes

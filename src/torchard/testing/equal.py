"""equal: two functions agree, in values and derivatives, up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.engine.transformed import Transformed
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.tracing.object_results import with_objects
from torchard.testing.calls import (
    as_function,
    as_tensors,
    buffers_kept,
    leaving_buffers,
    left_out,
    seeded,
    updates_of_buffers,
    with_parameters,
)
from torchard.testing.derived import (
    ALL_ORDERS,
    Derivatives,
    check_orders,
    derived,
    derived_reference,
    lack,
)
from torchard.testing.differences import Wanted, differences_of, kind_of
from torchard.testing.localize import localize, parting
from torchard.testing.observe import recorded
from torchard.testing.report import Difference, Differs, Report, is_assertion
from torchard.testing.rounding.bounds import expected
from torchard.testing.rounding.precision import OWN, Precision, precisions
from torchard.testing.rounding.programs import program_of
from torchard.testing.rounding.roundings import alike

__all__ = ["Reference", "equal"]

Fn = Callable[..., Any]
__tracebackhide__ = is_assertion


@leaving_buffers
@checked
def equal(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    *args: Any,
    orders: Sequence[str] = ALL_ORDERS,
    seed: int = 0,
    allow_narrower: bool = True,
) -> Report:
    """Assert that two functions agree on these arguments, in values and derivatives, up to rounding.

    The reference is evaluated in float64, and its rounding errors are measured by runs in which each of
    its operations is perturbed by as much as its dtype rounds. So a bound follows from the dtypes, the
    number of roundings and the conditioning of the function; if nothing is rounded (small integers),
    values must be equal. If ``fn`` computes in narrower dtypes, bounds also allow for its own roundings.

    Args:
        fn: the function under test: sharded, checkpointed, fused, compiled, in half precision, or written
            in a different way. Modules are not changed. If two modules have the same parameters,
            gradients in these are compared too, as a last argument; if they have the same buffers, a
            call's updates of these are compared.
        reference: a plain function that computes the same. It may branch on values, index by masks and
            draw from torch's global generator, whose seed is fixed for each call.
        args: pytrees, the arguments of both; placed values are gathered for the reference.
        orders: what is compared: "value"; "gradient" (reverse mode); "jvp" (forward mode); "second" (the
            gradient of a product with the gradient). Derivatives are taken outside, with respect to all
            floating leaves, along fixed directions of small integers. Derivatives that torch does not
            have are skipped and named in the report, if all four are requested. Further entries are ways
            to call ``fn``, whose results are compared with the reference's values: "backward" (leaves
            that require gradients, and backward()), "no_grad", "inference_mode", "twice" (the second
            call), "thread", "compiled" (by torch.compile).
        seed: of the perturbed runs.
        allow_narrower: whether bounds allow for the roundings of ``fn`` if it computes in narrower dtypes
            than the reference. If not, a sum in float16 is wrong if the reference's is in float32.

    Returns:
        A report with a row for each value; print it.

    Raises:
        Differs: an AssertionError: the functions differ; the message is the report, and where they first
            differ.
        ValueError: ``orders`` has an unknown entry, or is empty.

    Source: Higham, Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput.
    41 (2019), for the growth of errors; TTrace, arXiv:2506.09280, for tolerances by perturbation.

    >>> import torch
    >>> from torchard.testing import equal
    >>> def softmax(x):
    ...     e = (x - x.max()).exp()
    ...     return e / e.sum()
    >>> x = torch.tensor([0.5, 2.0, -1.0])
    >>> equal(softmax, lambda x: x.softmax(0), x).good
    True
    >>> equal(lambda x: x.sum() * 3, lambda x: x.sum() * 2, x)
    Traceback (most recent call last):
        ...
    torchard.Differs: fn differs from its reference:
    value ...
    """
    precision = None if allow_narrower else OWN
    updates = updates_of_buffers(fn, reference)
    ours, theirs, given = with_parameters(fn, reference, args)
    report = Reference(theirs, given, orders, seed, precision=precision).check(ours, *given)
    if updates is not None:
        mine, other = updates
        report += Reference(other, args, ["value"], seed, precision=precision).check(mine, *args)
    skipped = left_out(fn, reference).items()
    return report + [Difference(what, type(None), skipped=why) for what, why in skipped]


class Reference:
    """A plain function that others are compared with on the same arguments: it is evaluated once.

    Args:
        fn: the function.
        args: its arguments; placed values are gathered.
        orders: what is compared; see `equal`.
        seed: of the perturbed runs.
        both: whether the other function's own roundings count too, as they do where both sides of a law
            are computed by the same function; else a function that rounds more than this one is wrong.
        precision: in which dtypes results count as computed; by default the narrowest of this function
            and the other.
        twin: with ``both``, the same function in as many operations as the other's, so that sums of their
            gradients are rounded alike; by default ``fn``.
    """

    def __init__(
        self,
        fn: Fn,
        args: Any,
        orders: Sequence[str] = ALL_ORDERS,
        seed: int = 0,
        both: bool = False,
        precision: Precision | None = None,
        twin: Fn | None = None,
    ) -> None:
        check_orders(orders)
        self.fn, self.args, self.orders, self.seed = as_function(fn), tree.whole(args), orders, seed
        self.both, self.precision = both, precision
        self.twin = twin or self.fn
        self.structure: Any = None  # of the result, if it holds no objects
        self._known: dict[tuple[str, frozenset[tuple[str, Precision]]], dict[str, Any]] = {}

    def check(self, fn: Fn, *args: Any) -> Report:
        """Assert that a function agrees with this one; its arguments may be placed.

        Raises:
            AssertionError: they differ; the message is the report, and where they part.
        """
        report, wrong = Report(), []
        for order in self.orders:
            found = self._compared(fn, order, args)
            report += found
            wrong += [] if found.good else [order]
            if wrong and self.both:  # the law is broken; to measure the bounds of both sides takes long
                break
        if wrong:
            raise Differs(report, lambda: self._where(fn, wrong[0], args))
        return report

    def called(self, fn: Fn, *args: Any) -> Any:
        """A call with the generators at the seed, so that two functions that draw alike draw the same.

        Raises:
            AssertionError: fn writes to an argument: what it is compared with would be given another one.
        """
        versions = _versions(args)
        with seeded(self.seed):
            result = fn(*args)
        for path, version in _versions(args).items():
            if version != versions.get(path):
                raise AssertionError(
                    f"fn changes {path} in place, and equal compares only results: let it change a "
                    "clone, and return the clone"
                )
        return tree.map(_kept, _whole(result))

    def _compared(self, fn: Fn, order: str, args: Any) -> Report:
        try:
            return self._differences(derived(fn, order), order, args)
        except Exception as error:
            reason = lack(error)
            if reason is None or tuple(self.orders) != ALL_ORDERS or order == "value":
                raise
            return Report([Difference(_NAMES[order], type(None), skipped=reason)])

    def _where(self, fn: Fn, order: str, args: Any) -> str:
        """Where two functions part, and whether they do so in each call."""
        with buffers_kept(fn, self.fn):
            return self._parting(fn, order, args)

    def _parting(self, fn: Fn, order: str, args: Any) -> str:
        ours, theirs = derived(fn, order), derived_reference(self.fn, order)
        if not _same(self.called(ours, *args), self.called(ours, *args)):
            return _RANDOM
        if isinstance(fn, Transformed):
            with seeded(self.seed):
                found = localize(fn, self.fn, *args, gradients=order != "value", seed=self.seed)
        else:
            with seeded(self.seed):
                mine = recorded(lambda *xs: _whole(ours(*xs)), args)
            with seeded(self.seed):
                other = recorded(theirs, self.args)
            found = parting(mine, other, self.seed, self.precision)
        return "" if found.agree or found.problem else str(found)

    def _differences(self, fn: Fn, order: str, args: Any) -> Report:
        result = self.called(fn, *args)
        have = _by_path(result, order)
        if self.both:  # sides of a law, of which neither is more right: equal bits need no bounds
            other = self.called(derived_reference(self.twin, order), *self.args)
            alike_built = tree.structure(result) == tree.structure(other)
            if alike_built and _identical(have, _by_path(other, order)):
                return Report(Difference(path, kind_of(x)) for path, x in have.items())
        want = self._wanted(order, {})
        report = differences_of(have, want)
        if report.good and order == "value" and (problem := _other_tree(result, self.structure)):
            return Report([Difference("out", type(result), problem=problem)])
        if report.good:
            return report
        if self.precision is None:  # it takes a run of fn, and narrower dtypes only widen bounds
            if known := self._precisions(fn, order):
                want = self._wanted(order, known)
            report = differences_of(have, want)
        if report.good or not (self.both or any(map(_has_exact, want.values()))):
            return report
        own = self._expected(*self._program(fn), order, {})
        return differences_of(have, _widened(want, own, self.both))

    def _wanted(self, order: str, precision_of: Mapping[str, Precision]) -> dict[str, Any]:
        key = order, frozenset(precision_of.items())
        if key not in self._known:
            program, inputs = self._program(derived_reference(self.fn, order))
            if order == "value" and not program.out_tree.objects:
                self.structure = program.out_tree.structure
            self._known[key] = self._expected(program, inputs, order, precision_of)
        return self._known[key]

    def _program(self, fn: Fn) -> tuple[Program, list[torch.Tensor]]:
        with seeded(self.seed):
            return program_of(lambda *args: _whole(fn(*args)), self.args)

    def _precisions(self, fn: Fn, order: str) -> dict[str, Precision]:
        """The dtypes in which fn computes its results, by path; empty without a recording."""
        try:
            program, _ = self._program(fn)
        except Exception:  # whatever a recording refuses: then the reference's own dtypes are used
            return {}
        of: list[Any] = [OWN] * len(program.results)
        for precision, results in precisions(program).items():
            for i in results:
                of[i] = precision
        found = _by_path(program.out_tree.nodes(of), order)
        return {path: x for path, x in found.items() if isinstance(x, Precision)}

    def _expected(
        self,
        program: Program,
        inputs: Sequence[Any],
        order: str,
        precision_of: Mapping[str, Precision],
    ) -> dict[str, Any]:
        """The expected results of a function with this program, by path."""
        results = _by_path(program.out_tree.nodes(program.results), order)
        groups: dict[Precision, list[str]] = {}
        for path, node in results.items():
            if isinstance(node, fx.Node):
                groups.setdefault(precision_of.get(path, self.precision or OWN), []).append(path)
        for precision, paths in groups.items():
            nodes = [results[path] for path in paths]
            known = expected(program, inputs, nodes, precision=precision, seed=self.seed)
            for path, node in zip(paths, nodes, strict=True):
                results[path] = Wanted(known[node], VAL.of(node).dtype)
        return results


# The names, in reports, of quantities that are not compared.
_NAMES = {
    "gradient": "gradients",
    "jvp": "tangents of results",
    "second": "second gradients",
}


def _has_exact(want: Any) -> bool:
    """Whether an element is computed without rounding: of another computation, its own count."""
    known = isinstance(want, Wanted) and want.value.bound is not None
    return known and bool((want.value.bound == 0).any())


def _by_path(result: Any, order: str) -> dict[str, Any]:
    name = "" if order in ALL_ORDERS else f"{order}: "
    if isinstance(result, Derivatives):
        return {name + path: value for path, value in result.items()}
    result = with_objects(result, lambda tensor: True)
    paths = (name + path for path in tree.paths(result, "out"))
    return dict(zip(paths, tree.leaves(result), strict=True))


def _widened(wanted: dict[str, Any], own: dict[str, Any], everywhere: bool) -> dict[str, Any]:
    """The expected results, with a second function's bounds added."""
    both = {
        path: Wanted(want.value.widened(own[path].value, everywhere), want.dtype)
        for path, want in wanted.items()
        if isinstance(want, Wanted) and isinstance(own.get(path), Wanted)
        if want.value.exact.shape == own[path].value.exact.shape
    }
    return {**wanted, **both}


def _versions(args: Any) -> dict[str, int]:
    """How often each tensor of the arguments was written to."""
    leaves = zip(tree.paths(args, "args"), tree.leaves(args), strict=True)
    return {
        path: internals.version(x)
        for path, x in leaves
        if isinstance(x, torch.Tensor) and not x.is_inference()
    }


def _whole(result: Any) -> Any:
    """A result with placed values gathered, and arrays of NumPy as tensors."""
    return as_tensors(tree.whole(result))


def _kept(x: Any) -> Any:
    """A copy, which a later call cannot write to: functions may return the same buffer each time."""
    return x.detach().clone() if isinstance(x, torch.Tensor) and x.layout == torch.strided else x


def _other_tree(result: Any, wanted: Any) -> str:
    """How the tree of a result differs from the reference's, whose structure may be unknown."""
    have = tree.structure(result)
    return "" if wanted is None or have == wanted else f"the tree is {have}, reference {wanted}"


def _same(these: Any, those: Any) -> bool:
    """Whether two results are the same to the last bit."""
    pairs = zip(tree.leaves(tree.whole(these)), tree.leaves(tree.whole(those)), strict=True)
    return all(bool(alike(a, b).all()) for a, b in pairs if isinstance(a, torch.Tensor))


def _identical(have: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two results by path are tensors of the same kinds, and the same to the last bit."""
    pairs = [(x, other.get(path)) for path, x in have.items()]
    return have.keys() == other.keys() and all(
        isinstance(x, torch.Tensor)
        and isinstance(y, torch.Tensor)
        and (x.shape, x.dtype, x.device, x.layout) == (y.shape, y.dtype, y.device, torch.strided)
        and bool(alike(x, y).all())
        for x, y in pairs
    )


_RANDOM = (
    "fn is random: two calls with the same arguments, and with torch's generators at the same seed, "
    "differ. Pass the random values as an argument"
)

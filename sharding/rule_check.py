"""Registration of rules by users, which are checked against their operation when they are first used.

A wrong rule would silently give wrong numbers. So on small random tensors each factor is split over two
ranks, as in a plan, and operands in which the rule calls the operation linear are written as sums; the
results must equal the operation's. Operations that cannot be called on such tensors, because they take
indices or check values, are not checked.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.effects.unused_results import declare_pure
from torchard.functional.execution.codegen import compiled
from torchard.functional.programs.graphs import with_operands
from torchard.functional.programs.tagging import inherit
from torchard.functional.programs.tags import VAL
from torchard.sharding.layouts.factors import Rule, RuleError
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.layouts.options import Option, build
from torchard.sharding.lowering.lower import Lowering
from torchard.sharding.lowering.simulated_transport import SimulatedTransport
from torchard.sharding.lowering.windows import attach_windows
from torchard.sharding.planning.decision import BATCH, Given, LayoutDecision
from torchard.sharding.rules import registry
from torchard.sharding.rules.registry import Call, Emit, Text, rule_of
from torchard.sharding.scheduling.partition import partition
from torchard.sharding.values.mesh import Mesh

__all__ = [
    "check_overloads",
    "check_rule",
    "close",
    "random_like",
    "register_rule",
    "tensors_of",
]

_MOST = 2**20  # the most elements of operands for which a rule is checked at the shapes of the call
_SMALL = 4  # the size of factors if the operation has no arguments that could depend on sizes


def register_rule(
    *targets: Any,
    text: Text,
    emit: Emit | None = None,
    alias: bool = False,
) -> None:
    """Register a sharding rule for operations, which states how the factors of their dims may be split.

    The rule is checked against the operation when it is first used. It takes effect in calls that are
    traced after the registration; a function's calls like an earlier one are not traced again.

    A rule names the factors of every dim, first for all tensor operands, then for all results (operands
    that are not tensors are left out). A repeated name is the same factor, which must be split in the
    same way wherever it occurs; a factor that is in no result is summed over ranks::

        i k, k j -> i j                     a contraction: if k is split, partial sums are added
        ..., ... -> ...                     pointwise: any number of dims, broadcast from the right
        b (h d) -> b h d                    a dim that is a product of factors, the outermost first
        b (h=4 d) -> b d                    a factor with its size, where no shape determines it
        i, 1 -> i                           a dim of size one, which has no factor

    Clauses state what dims cannot express::

        ... d -> ... d | whole d            may not be split; ``...`` is all dims of it, ``.0`` the last
        ... d -> ... | reduce d max         partial results over d are combined by max or min, not summed
        n n, n k -> n k, n n | same k       results without k are the same for every part of k, not sums
        -> i j | index i j                  i and j are on no operand; ``emit`` computes the rank's part
        1 -> i | free i                     i is on no operand, and the result is the same at every index
        -> i | index i | run i              i is split as one dim or not at all: each part is contiguous
        i k, k j -> i j | linear 0 | linear 1    linear in 0 and in 1: either may be a pending sum
        ..., ... -> ... | linear 0 1        jointly linear in both: both or neither may be pending sums
        n -> r c | tie n r                  r blocks of a dim n, split together, one block per rank
        r c -> r w | whole c w | halo r c 2    of each block's c, 2 are sent to other ranks or received

    Args:
        targets: ``torch.ops`` overloads.
        text: the rule, or a function from the call to it, which may return None to gather the operands.
        emit: a function ``emit(call, local)`` that computes one coordinate's shard, if this is not the
            operation on the local operands (None). ``local.args`` and ``local.kwargs`` are the local
            arguments, and ``local.call(op, *args)`` applies an operation to local values, and returns its
            result. ``local.result_range(dim)`` and ``operand_range(k, dim)`` are the global indices that
            this coordinate holds, ``shape(result)`` and ``operand_shape(k)`` its shapes,
            ``result_axes(dim)`` and ``operand_axes(k, dim)`` the mesh axes that split a dim.
            ``call.target``, ``call.arg(position, name)``, ``call.ins`` and ``call.outs`` are the global
            call: its operation, its arguments, and the shapes of its operands and results.
        alias: whether the operation is a bijective view.

    Raises:
        TypeError: a target is not an overload, such as ``torch.ops.mine.norm.default``.
        RuleError: (when it is first used) the text is not a rule, or does not fit the shapes (the
            message points at the position); or the operation, split by the rule, gives different results
            (it names the factor).

    >>> import torch, torchard as ta
    >>> @torch.library.custom_op("docs::scaled_mm", mutates_args=())
    ... def scaled_mm(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    ...     return scale * (a @ b)
    >>> @scaled_mm.register_fake
    ... def _(a, b, scale):
    ...     return a.new_empty(a.shape[0], b.shape[1])
    >>> ta.register_rule(torch.ops.docs.scaled_mm.default, text="i k, k j -> i j")
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> a = ta.place(torch.ones(2, 4), mesh, ta.P(None, "tp"))
    >>> b = ta.place(torch.ones(4, 2), mesh, ta.P("tp", None))
    >>> run = ta.shard(lambda a, b: scaled_mm(a, b, 0.5), mesh, out_specs=ta.P())
    >>> run(a, b)
    tensor([[2., 2.],
            [2., 2.]])
    >>> [c.kind for c in run.lower(a, b).collectives]            # k is split: one sum over ranks
    ['all_reduce']
    """
    check_overloads("register_rule", targets)
    known: set[Any] = set()

    def check(call: Call, rule: Rule) -> None:
        kind = (call.target, rule.ins, rule.outs, rule.linear)
        if kind in known:
            return
        known.add(kind)  # first, since the check itself looks up the rule
        try:
            check_rule(call, rule)
        except RuleError:
            known.discard(kind)
            raise

    for target in targets:
        declare_pure(target)
    registry.register_rule(*targets, text=text, emit=emit, alias=alias, check=check)


def check_overloads(caller: str, targets: Sequence[Any]) -> None:
    """Refuse targets that no node of a program has: packets of overloads, custom ops, names."""
    for target in targets:
        if not isinstance(target, internals.OpOverload):
            raise TypeError(
                f"{caller}({target!r}): pass overloads of operators, such as "
                "torch.ops.mine.norm.default."
            )


def check_rule(call: Call, rule: Rule) -> None:
    """Compare an operation with the same operation split by its rule.

    Raises:
        RuleError: the results differ.
    """
    with internals.clean_thread_state(gradients=False):
        _check(call, rule)


def _check(call: Call, rule: Rule) -> None:
    try:
        sample = _SampleCall(call, rule)
    except Exception:  # the operation cannot be called on random tensors
        return
    mesh = Mesh({"ranks": 2}, virtual=True)
    for factor, size in enumerate(sample.rule.sizes):
        if factor in sample.rule.whole or size < 2:
            continue
        axes = tuple(("ranks",) if f == factor else () for f in range(len(sample.rule.sizes)))
        option = build(sample.rule, axes, (), mesh.sizes)
        if option is not None and not sample.agrees(sample.split, option, mesh):
            name = rule.names[factor] if factor < len(rule.names) else str(factor)
            raise RuleError(
                f"the factor rule of {call.target} is wrong about {name!r}: with {name!r} split over "
                f"two ranks the results differ from the operation's, on {call.ins} -> {call.outs}. If it "
                f'may not be split, add "| whole {name}"; if partial results are not summed, '
                f'"| reduce {name} max"; if local code differs from the operation, pass emit=.'
            )
    for group in sample.rule.linear:
        if not sample.agrees(sample.by_summands, group):
            clause = " ".join(["linear", *map(str, sorted(group))])
            raise RuleError(
                f'the factor rule of {call.target} is wrong in "{clause}": the operation is not linear '
                "in these operands; leave the clause out."
            )


class _SampleCall:
    """A graph of one call on small random tensors, and its results."""

    def __init__(self, call: Call, rule: Rule) -> None:
        self.generator = torch.Generator().manual_seed(0)
        shapes = self._shapes(call, rule)
        self.inputs = [
            random_like(VAL.of(o), shape, self.generator)
            for o, shape in zip(call.operands, shapes, strict=True)
        ]
        self.graph, self.node = fx.Graph(), call.node
        placeholders = []
        for i, value in enumerate(self.inputs):
            placeholders.append(self.graph.placeholder(f"x{i}"))
            VAL.set(placeholders[-1], value)
        entered = dict(zip(call.operands, placeholders, strict=True))
        self.call = self.graph.node_copy(call.node, entered.__getitem__)
        self.wanted = self.apply(self.inputs)
        several = isinstance(VAL.of(call.node), (tuple, list))
        value = self._value(self.inputs)
        inherit(self.call, call.node)  # without what is cached for other shapes
        VAL.set(self.call, tuple(value) if several else value)
        self.outs = [self.call] if not several else self._items(value)
        self.graph.output(tuple(self.outs))
        self.rule = rule_of(Call.of(self.call)) if shapes != list(call.ins) else rule

    def _shapes(self, call: Call, rule: Rule) -> list[tuple[int, ...]]:
        """The shapes of the operands: small ones if no argument can be a size, else those of the call."""
        arguments = (*call.node.args, *call.node.kwargs.values())
        settings = [a for a in arguments if not isinstance(a, fx.Node)]
        if not settings and call.operands and sum(map(math.prod, call.ins)) > 2**10:
            small = [min(n, _SMALL) for n in rule.sizes]
            return [tuple(math.prod(small[f] for f in dim) for dim in dims) for dims in rule.ins]
        if sum(map(math.prod, call.ins)) > _MOST:
            raise NotImplementedError
        return list(call.ins)

    def _items(self, values: Any) -> list[fx.Node]:
        nodes = []
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                nodes.append(self.graph.call_function(operator.getitem, (self.call, i)))
                VAL.set(nodes[-1], value)
        return nodes

    def _value(self, inputs: list[torch.Tensor]) -> Any:
        args, kwargs = with_operands(self.node, inputs)
        target: Any = self.node.target
        return target(*args, **kwargs)

    def apply(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors_of(self._value(inputs))

    def agrees(self, run: Callable[..., list[torch.Tensor]], *how: Any) -> bool:
        """Whether ``run`` gives the results of the call, up to rounding, and raises no error."""
        try:
            results = run(*how)
        except Exception:
            return False
        return len(results) == len(self.wanted) and all(map(close, results, self.wanted))

    def split(self, option: Option, mesh: Mesh) -> list[torch.Tensor]:
        """The results of a plan in which the operation runs by this option."""
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        decision = LayoutDecision(option={self.call: option}, raw={self.call: option.outs})
        inputs = {n: (Layout.replicated(VAL.of(n).shape), BATCH) for n in placeholders}
        decision.home.update({n: layout for n, (layout, _) in inputs.items()})
        decision.home.update(zip(self.outs, option.outs, strict=True))
        decision.outputs = tuple(Layout.replicated(r.shape) for r in self.wanted)
        given = Given(dict(inputs), decision.outputs)
        spmd = partition(self.graph, given, decision, mesh.sizes)
        attach_windows(spmd, mesh)
        local = Lowering(spmd, mesh, mesh.all_coords(), SimulatedTransport()).run()
        return compiled(local)(list(self.inputs))  # a copy, since the call empties the list

    def by_summands(self, group: frozenset[int]) -> list[torch.Tensor]:
        """The sum of the results for two summands of these operands."""
        first, second = list(self.inputs), list(self.inputs)
        for k in group:
            first[k] = random_like(self.inputs[k], self.inputs[k].shape, self.generator)
            second[k] = self.inputs[k] - first[k]
        return [a + b for a, b in zip(self.apply(first), self.apply(second), strict=True)]


def random_like(
    like: torch.Tensor, shape: Sequence[int], generator: torch.Generator
) -> torch.Tensor:
    """Normal numbers, or zeros and ones in integer and boolean dtypes."""
    if is_inexact(like):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(like.dtype)
    return torch.randint(0, 2, shape, generator=generator).to(like.dtype)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors that an operation returns."""
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def close(
    have: torch.Tensor, want: torch.Tensor, roundings: int = 100, least: float = 1.0
) -> bool:
    """Whether two results differ by at most some roundings of the largest entry, or of ``least``."""
    if have.shape != want.shape or have.dtype != want.dtype:
        return False
    if not is_inexact(want):
        return torch.equal(have, want)
    largest = float(want.abs().nan_to_num(0.0, 0.0).max()) if want.numel() else 0.0
    bound = roundings * torch.finfo(want.dtype).eps * max(largest, least)
    return torch.allclose(have, want, rtol=0, atol=bound, equal_nan=True)

"""The gradient of a pattern, as a pattern.

It is a function of what autograd's formulas read: of those inputs, of those outputs (a softmax's, a sum
that goes on and into a norm), and of the cotangents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchard.functional.core.outputs import outputs_of
from torchard.functional.execution.binding import bind
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.trace import trace
from torchard.functional.tracing.signature import ShapeDtype
from torchard.kernels.patterns.pattern import Pattern
from torchard.kernels.patterns.skeleton import same_form
from torchard.kernels.terms.dims import Dims

__all__ = ["RESULT", "gradients_of"]

# What a gradient's input that is the forward's output j is called, but for j.
RESULT = "result_"


def gradients_of(pattern: Pattern) -> list[Pattern]:
    """Of the inputs and outputs they depend on and a cotangent for each floating output, the gradients.

    As torch spells them, and once more as it does where they are to be differentiated again (as all of
    torch.func's may be) if that is another form. None if there is none.
    """
    once = _gradient_of(pattern, again=False)
    if once is None:
        return []
    again = _gradient_of(pattern, again=True)
    return [once] if again is None or _alike(once, again) else [once, again]


def _alike(one: Pattern, other: Pattern) -> bool:
    """Whether what one finds, the other does."""
    a, b = one.alternatives[0], other.alternatives[0]
    if one.inputs != other.inputs or not same_form(a.skeleton, b.skeleton):
        return False
    if a.rounded is None or b.rounded is None:
        return a.rounded is b.rounded
    return same_form(a.rounded, b.rounded, rounding=True)


def _gradient_of(pattern: Pattern, again: bool) -> Pattern | None:
    """Of an input that no gradient reads (a bias that is only added) the shape alone is needed, which the
    dims say; without dims it stays an input.
    """
    specs, program = pattern.alternatives[0].example
    floating = [i for i, (_, dtype) in enumerate(specs) if dtype.is_floating_point]
    outputs = [VAL.of(node) for node in program.results]
    followed = [j for j, val in enumerate(outputs) if val.dtype.is_floating_point]
    if not floating or not followed:
        return None
    joint = _Joint(pattern, floating, followed, again)
    whole = _Gradients(joint, tuple(range(len(specs))), (), tuple(range(len(floating))))
    results = joint.results_read(whole.pattern().alternatives[0].example)
    cut = replace(whole, results=results)
    skeleton = cut.pattern().alternatives[0].skeleton
    roots = list(zip(skeleton.roots, skeleton.accesses, strict=True))
    # Of gradients that are the same, as of a sum's operands, one is enough.
    distinct = tuple(j for j, root in enumerate(roots) if root not in roots[:j])
    used = cut.used
    if pattern.dims is not None:
        read = frozenset().union(*map(skeleton.reads, skeleton.roots))
        used = tuple(i for i in used if i in read)
    return replace(cut, used=used, returned=distinct).pattern()


@dataclass(frozen=True)
class _Joint:
    """Outputs and gradients of a pattern. floating, followed: its inputs and outputs that are."""

    pattern: Pattern
    floating: Sequence[int]
    followed: Sequence[int]
    again: bool

    def __call__(
        self, inputs: Sequence[Any], cotangents: Sequence[Any], literals: dict[str, Any]
    ) -> tuple[list[Any], list[Any]]:
        with torch.enable_grad():
            given = list(inputs)
            for i in self.floating:
                given[i] = inputs[i].detach().requires_grad_()
            out = self.pattern.fn(*given, **literals)
        outs = outputs_of(out)
        outs = [outs[j] for j in self.followed]
        gradients = torch.autograd.grad(
            outs,
            [given[i] for i in self.floating],
            cotangents,
            create_graph=self.again,
            materialize_grads=True,
        )
        return outs, [g.detach() for g in gradients]

    def program(
        self, inputs: Sequence[Any], cotangents: Sequence[Any], literals: dict[str, Any]
    ) -> Program:
        """A trace of it, outputs first."""
        count = len(inputs)

        def flat(*tensors: Any) -> list[Any]:
            outs, gradients = self(tensors[:count], tensors[count:], literals)
            return [*outs, *gradients]

        like = (ShapeDtype(tuple(t.shape), t.dtype, t.device) for t in (*inputs, *cotangents))
        return trace(flat)(*like)

    def results_read(self, example: Any) -> tuple[int, ...]:
        """The outputs that gradients read."""
        specs, _ = example
        tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in specs]
        count = len(self.pattern.inputs)
        literals = self.pattern._marked()
        program = self.program(tensors[:count], tensors[count:], literals)
        if len(program.inputs) != len(specs):  # it closes over tensors
            return ()
        every = tuple(range(len(self.followed)))
        cut = _cut(program, len(self.followed), every)
        return tuple(
            j for j, n in zip(every, cut.placeholders[len(specs) :], strict=True) if n.users
        )


def _cut(program: Program, count: int, results: Sequence[int]) -> Program:
    """The gradients of a joint program, some of its first `count` results inputs behind the others."""
    program = program.copy()
    graph, outputs = program.graph, program.results
    for j in results:
        given = program.extend(f"{RESULT}{j}", VAL.of(outputs[j]))
        if outputs[j].op == "call_function":  # what is an input as it is stays that
            outputs[j].replace_all_uses_with(given)
    graph.output_node().args = (tuple(outputs[count:]),)
    graph.eliminate_dead_code()
    return replace(program, outputs=program.outputs[count:])


@dataclass(frozen=True)
class _Gradients:
    """Some of the gradients, as a function of some inputs, some outputs, and the cotangents."""

    joint: _Joint
    used: tuple[int, ...]
    results: tuple[int, ...]
    returned: tuple[int, ...]

    def pattern(self) -> Pattern:
        """The pattern of it."""
        of = self.joint.pattern
        names = [of.inputs[i] for i in self.used]
        names += [f"{RESULT}{self.joint.followed[j]}" for j in self.results]
        names += [f"cotangent_{j}" for j in range(len(self.joint.followed))]
        weights = [of.inputs[i] for i in of.weights]
        name = f"{of.name}_backward"
        return Pattern.of(self, name, names, of.literals, self._dims(), weights)

    def _dims(self) -> Dims | None:
        """A gradient is like its input, a cotangent like its output."""
        of = self.joint.pattern.dims
        if of is None:
            return None
        outputs = [of.outputs[j] for j in self.joint.followed]
        results = [outputs[j] for j in self.results]
        return Dims(
            of.text + " backward",
            (*(of.inputs[i] for i in self.used), *results, *outputs),
            tuple(of.inputs[self.joint.floating[j]] for j in self.returned),
            (*(of.dtypes[i] for i in self.used), *[torch.float32] * (len(results) + len(outputs))),
            of.whole,
        )

    def __call__(self, *tensors: torch.Tensor, **literals: Any) -> Any:
        known, behind = dict(zip(self.used, tensors, strict=False)), tensors[len(self.used) :]
        results, cotangents = behind[: len(self.results)], behind[len(self.results) :]
        inputs = self._complete(known, cotangents)
        if results:
            program = self.joint.program(inputs, cotangents, literals)
            cut = _cut(program, len(cotangents), self.results)
            found = bind(cut)([*inputs, *cotangents, *results])
        else:
            _, found = self.joint(inputs, cotangents, literals)
        return tuple(found[j] for j in self.returned)

    def _complete(
        self, known: dict[int, torch.Tensor], cotangents: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """All inputs: of those that nothing depends on, zeros of their shapes."""
        count = len(self.joint.pattern.inputs)
        if len(known) == count:
            return [known[i] for i in range(count)]
        of = self.joint.pattern.dims
        assert of is not None
        given = [known.get(i) for i in range(count)]
        outputs = tuple(of.outputs[j] for j in self.joint.followed)
        dims = replace(of, inputs=(*of.inputs, *outputs))
        shapes = dims.complete(
            [None if t is None else tuple(t.shape) for t in (*given, *cotangents)]
        )
        zeros = (cotangents[0].new_zeros(shape) for shape in shapes[:count])
        return [z if t is None else t for t, z in zip(given, zeros, strict=True)]

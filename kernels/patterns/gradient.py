"""The gradient of a pattern, as a pattern.

It is a function of the inputs and outputs that autograd's formulas read (a softmax's output; a sum that
is both returned and normalised), and of the cotangents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx

from torchard.functional.core.outputs import outputs_of
from torchard.functional.execution.binding import bind
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.functional.trace import trace
from torchard.functional.tracing.signature import ShapeDtype
from torchard.kernels.patterns.derivations import DERIVATIONS
from torchard.kernels.patterns.pattern import Pattern
from torchard.kernels.patterns.skeleton import same_form
from torchard.kernels.terms.dims import Dims

__all__ = ["RESULT", "gradients_of"]

# The prefix of the name of a gradient's input that is output j of the forward.
RESULT = "result_"


def gradients_of(pattern: Pattern) -> list[Pattern]:
    """The gradients of a pattern, as patterns of the inputs and outputs they read and the cotangents.

    Both as torch computes them and, if their form differs, as it computes them with create_graph, which
    torch.func always sets. Empty if nothing is differentiable, or an operation may be any.
    """
    key = pattern.key and f"{pattern.key} gradients"
    forms = DERIVATIONS.get(key, lambda: [g.form for g in _gradients_of(pattern)])
    gradients = [_Gradients.of(pattern, form).pattern() for form in forms]
    for number, gradient in enumerate(gradients):
        gradient.key, gradient.origin = key and f"{key} {number}", pattern
    return gradients


def _gradients_of(pattern: Pattern) -> list[_Gradients]:
    if pattern.alternatives[0].predicates:
        return []
    once = _gradient_of(pattern, again=False)
    if once is None:
        return []
    again = _gradient_of(pattern, again=True)
    return [once] if again is None or _alike(once.pattern(), again.pattern()) else [once, again]


def _alike(first: Pattern, second: Pattern) -> bool:
    """Whether two patterns have the same occurrences."""
    a, b = first.alternatives[0], second.alternatives[0]
    if first.inputs != second.inputs or not same_form(a.skeleton, b.skeleton):
        return False
    if a.rounded is None or b.rounded is None:
        return a.rounded is b.rounded
    return same_form(a.rounded, b.rounded, rounding=True)


def _gradient_of(pattern: Pattern, again: bool) -> _Gradients | None:
    """The gradient of a pattern; None if there is none.

    Only the shape of an input that no gradient reads (a bias that is only added) is needed. The dims
    determine it; without dims the input remains an input of the gradient.
    """
    specs, program = pattern.alternatives[0].example
    floating = [i for i, (_, dtype) in enumerate(specs) if dtype.is_floating_point]
    outputs = [VAL.of(node) for node in program.results]
    followed = [j for j, val in enumerate(outputs) if val.dtype.is_floating_point]
    if not floating or not followed:
        return None
    joint = _Joint(pattern, floating, followed, again)
    joint = replace(joint, differentiable=joint.following(specs))
    if not joint.differentiable:
        return None
    gradients = _Gradients(joint, tuple(range(len(specs))), (), tuple(range(len(floating))))
    results = joint.results_read(gradients.pattern().alternatives[0].example)
    cut = replace(gradients, results=results)
    skeleton = cut.pattern().alternatives[0].skeleton
    cut = replace(cut, literals=_read_literals(cut.pattern()) if results else None)
    roots = list(zip(skeleton.roots, skeleton.accesses, strict=True))
    # Equal gradients, such as those of a sum's operands, are computed once; those of what the pattern
    # detaches are zero.
    distinct = tuple(
        j for j, root in enumerate(roots) if root not in roots[:j] and root[0].op != "constant"
    )
    if not distinct:
        return None
    used = cut.used
    if pattern.dims is not None:
        read = frozenset().union(*map(skeleton.reads, skeleton.roots))
        used = tuple(i for i in used if i in read)
    return replace(cut, used=used, returned=distinct)


def _read_literals(pattern: Pattern) -> tuple[str, ...]:
    """The literals that a gradient depends on, other than through the outputs that it reads."""
    alternative, marked = pattern.alternatives[0], pattern._marked()
    specs, program = alternative.example

    def matters(name: str) -> bool:
        other = alternative.at(specs, tuple({**marked, name: marked[name] / 2}.items()))
        return other is None or str(other.graph) != str(program.graph)

    return tuple(filter(matters, marked))


@dataclass(frozen=True)
class _Joint:
    """A function that returns the outputs and the gradients of a pattern.

    Attributes:
        floating, followed: the indices of its floating-point inputs, and outputs.
        again: whether the gradients may be differentiated again.
        differentiable: those of the outputs that have cotangents; a detached one has none.
    """

    pattern: Pattern
    floating: Sequence[int]
    followed: Sequence[int]
    again: bool
    differentiable: tuple[int, ...] = ()

    def following(self, specs: Sequence[Any]) -> tuple[int, ...]:
        """The floating-point outputs that depend on the inputs."""
        flags: list[bool] = []

        def run(*tensors: Any) -> list[Any]:
            _, outs = self._outputs(tensors, self.pattern._marked())
            flags[:] = [out.requires_grad for out in outs]
            return outs

        trace(run)(*(ShapeDtype(shape, dtype) for shape, dtype in specs))
        return tuple(j for j, flag in zip(self.followed, flags, strict=True) if flag)

    def _outputs(self, inputs: Sequence[Any], literals: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """The inputs, and the floating-point outputs, as autograd's graph has them."""
        with torch.enable_grad():
            operands = list(inputs)
            for i in self.floating:
                operands[i] = inputs[i].detach().requires_grad_()
            outs = outputs_of(self.pattern.fn(*operands, **literals))
        return operands, [outs[j] for j in self.followed]

    def __call__(
        self, inputs: Sequence[Any], cotangents: Sequence[Any], literals: dict[str, Any]
    ) -> tuple[list[Any], list[Any]]:
        operands, outs = self._outputs(inputs, literals)
        gradients = torch.autograd.grad(
            [out for j, out in zip(self.followed, outs, strict=True) if j in self.differentiable],
            [operands[i] for i in self.floating],
            cotangents,
            create_graph=self.again,
            materialize_grads=True,
        )
        return outs, [g.detach() for g in gradients]

    def program(
        self, inputs: Sequence[Any], cotangents: Sequence[Any], literals: dict[str, Any]
    ) -> Program:
        """The traced joint function, outputs first."""
        count = len(inputs)

        def flat(*tensors: Any) -> list[Any]:
            outs, gradients = self(tensors[:count], tensors[count:], literals)
            return [*outs, *gradients]

        like = (ShapeDtype(tuple(t.shape), t.dtype, t.device) for t in (*inputs, *cotangents))
        return trace(flat)(*like)

    def results_read(self, example: Any) -> tuple[int, ...]:
        """The indices of the outputs that gradients read."""
        specs, _ = example
        tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in specs]
        count = len(self.pattern.inputs)
        literals = self.pattern._marked()
        program = self.program(tensors[:count], tensors[count:], literals)
        every = tuple(range(len(self.followed)))
        cut = _cut(program, len(self.followed), every)
        return tuple(
            j for j, n in zip(every, cut.placeholders[len(specs) :], strict=True) if n.users
        )


def _cut(program: Program, count: int, results: Sequence[int]) -> Program:
    """The gradients of a joint program, with some of its first `count` results as further inputs."""
    program = program.copy()
    graph, outputs = program.graph, program.results
    for j in results:
        placeholder = program.extend(f"{RESULT}{j}", VAL.of(outputs[j]))
        for output in _same_value(outputs[j]):
            output.replace_all_uses_with(placeholder, delete_user_cb=lambda user: user.op != "output")
    graph.output_node().args = (tuple(outputs[count:]),)
    graph.eliminate_dead_code()
    return replace(program, outputs=program.outputs[count:])


def _same_value(output: fx.Node) -> Iterator[fx.Node]:
    """An output and what it is detached from; not an input, which is read as itself."""
    while output.op == "call_function":
        yield output
        if output.target is not aten.detach.default:
            break
        output = output.all_input_nodes[0]


@dataclass(frozen=True)
class _Gradients:
    """Some gradients, as a function of some inputs, some outputs, and the cotangents."""

    joint: _Joint
    used: tuple[int, ...]
    results: tuple[int, ...]
    returned: tuple[int, ...]
    literals: tuple[str, ...] | None = None

    @property
    def form(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """All but the pattern, by which it can be made again."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        joint = {field.name: getattr(own["joint"], field.name) for field in fields(self.joint)}
        del own["joint"], joint["pattern"]
        return joint, own

    @staticmethod
    def of(pattern: Pattern, form: tuple[dict[str, Any], dict[str, Any]]) -> _Gradients:
        """The gradients of a pattern that have a form."""
        joint, own = form
        return _Gradients(_Joint(pattern, **joint), **own)

    def pattern(self) -> Pattern:
        """The pattern of this function."""
        of = self.joint.pattern
        names = [of.inputs[i] for i in self.used]
        names += [f"{RESULT}{self.joint.followed[j]}" for j in self.results]
        names += [f"cotangent_{j}" for j in range(len(self.joint.differentiable))]
        weights = [of.inputs[i] for i in of.weights]
        name = f"{of.name}_backward"
        literals = of.literals if self.literals is None else list(self.literals)
        return Pattern.of(self, name, names, literals, self._dims(), weights)

    def _dims(self) -> Dims | None:
        """The dims: a gradient has those of its input, a cotangent those of its output."""
        of = self.joint.pattern.dims
        if of is None:
            return None
        outputs = [of.outputs[j] for j in self.joint.differentiable]
        results = [of.outputs[self.joint.followed[j]] for j in self.results]
        return Dims(
            of.text + " backward",
            (*(of.inputs[i] for i in self.used), *results, *outputs),
            tuple(of.inputs[self.joint.floating[j]] for j in self.returned),
            (*(of.dtypes[i] for i in self.used), *[torch.float32] * (len(results) + len(outputs))),
            of.whole,
        )

    def __call__(self, *tensors: torch.Tensor, **literals: Any) -> Any:
        literals = {**self.joint.pattern._marked(), **literals}
        known, rest = dict(zip(self.used, tensors, strict=False)), tensors[len(self.used) :]
        results, cotangents = rest[: len(self.results)], rest[len(self.results) :]
        inputs = self._complete(known, cotangents)
        if results:
            program = self.joint.program(inputs, cotangents, literals)
            cut = _cut(program, len(self.joint.followed), self.results)
            gradients = bind(cut)([*inputs, *cotangents, *results])
        else:
            _, gradients = self.joint(inputs, cotangents, literals)
        return tuple(gradients[j] for j in self.returned)

    def _complete(
        self, known: dict[int, torch.Tensor], cotangents: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """All inputs, with zeros for those that no gradient reads."""
        count = len(self.joint.pattern.inputs)
        if len(known) == count:
            return [known[i] for i in range(count)]
        of = self.joint.pattern.dims
        assert of is not None
        given = [known.get(i) for i in range(count)]
        outputs = tuple(of.outputs[j] for j in self.joint.differentiable)
        dims = replace(of, inputs=(*of.inputs, *outputs))
        shapes = dims.complete(
            [None if t is None else tuple(t.shape) for t in (*given, *cotangents)]
        )
        zeros = (cotangents[0].new_zeros(shape) for shape in shapes[:count])
        return [z if t is None else t for t, z in zip(given, zeros, strict=True)]

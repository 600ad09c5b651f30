"""Derivatives of programs, as programs: joint, pullback, pushforward, batched.

Each retraces the program with a derivative around it, so that a rewrite sees both in one graph.
Placements are inherited: a gradient has its primal's, a cotangent its output's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core.tensor_spec import TensorSpec, contiguous, is_inexact_dtype
from torchard.functional.programs.program import Leaf, Program
from torchard.functional.programs.tags import VAL
from torchard.functional.tracing.purify import purify, replay, specs_of
from torchard.functional.tracing.record import record
from torchard.functional.tracing.trace_state import silent

__all__ = [
    "batched",
    "callable_of",
    "derived_program",
    "joint",
    "pullback",
    "pushforward",
    "split_inputs",
    "with_tangents",
]

Fn = Callable[[list[torch.Tensor]], list[torch.Tensor]]
Vjp = Callable[[list[torch.Tensor]], tuple[list[Any], list[Any]]]


def callable_of(program: Program) -> Fn:
    """The program as a function of all its inputs.

    A graph does not record ``no_grad`` regions or custom autograd.Functions. In those cases the original
    function is rerun.
    """
    if program.retrace is not None:
        return program.retrace
    graph = program.graph
    return lambda inputs: replay(graph, inputs)


def _out_specs(program: Program) -> list[TensorSpec]:
    return [TensorSpec.of(VAL.of(node)) for node in program.results]


def derived_program(
    program: Program,
    fn: Fn,
    inputs: Sequence[tuple[Leaf, TensorSpec]],
    outputs: Callable[[], list[Leaf]],
    gradients: Sequence[bool] = (),
) -> Program:
    """The program of fn; the constants of the old program remain its last inputs."""
    count = len(program.inputs) - len(program.constants)
    constants = list(zip(program.inputs, specs_of(program.graph), strict=True))[count:]
    inputs = [*inputs, *constants]
    specs = [spec for _, spec in inputs]
    with internals.autocast_off():
        recording = purify(record(fn, specs, gradients=gradients), [leaf.path for leaf, _ in inputs])
    fresh = [Leaf(f"constant {i}", role="constant") for i, _ in enumerate(recording.closures)]
    return Program(
        graph=recording.graph,
        inputs=(*(leaf for leaf, _ in inputs), *fresh),
        outputs=tuple(outputs()),
        name=program.name,
        asks=tuple(dict.fromkeys((*program.asks, *recording.asks))),
        closures=program.closures,
        constants=(*program.constants, *(closure.value for closure in recording.closures)),
        retrace=fn if recording.without_grad else None,
        forgets_turns=recording.forgets_turns,
    )


def split_inputs(program: Program) -> tuple[int, list[tuple[Leaf, TensorSpec]]]:
    """The number of inputs that are not constants, and these inputs."""
    count = len(program.inputs) - len(program.constants)
    return count, list(zip(program.inputs, specs_of(program.graph), strict=True))[:count]


def _cotangents(program: Program, tags: Sequence[Any] | None) -> list[tuple[Leaf, TensorSpec]]:
    cotangents = []
    for i, (leaf, spec) in enumerate(zip(program.outputs, _out_specs(program), strict=True)):
        if not is_inexact_dtype(spec.dtype):
            continue
        tag, of = (leaf.tag, i) if tags is None else (tags[i], None)
        cotangent = Leaf(f"cotangent of {leaf.path}", tag, "cotangent", of, leaf.hints)
        cotangents.append((cotangent, contiguous(spec.shape, spec.dtype, spec.device)))
    return cotangents


def _gradient_leaves(program: Program, mask: Sequence[bool], present: Sequence[bool]) -> list[Leaf]:
    wanted = [i for i, w in enumerate(mask) if w]
    return [
        replace(
            program.inputs[i],
            path=f"gradient of {program.inputs[i].path}",
            role="gradient",
            of=i,
        )
        for i, has in zip(wanted, present, strict=True)
        if has
    ]


class _Vjp(NamedTuple):
    """A function from inputs and cotangents to outputs and gradients.

    Attributes:
        present: once it ran, which of the wanted gradients exist.
        follows: once it ran, which outputs depend on the inputs of the mask.
    """

    run: Vjp
    present: list[bool]
    follows: list[bool]


def _vjp(program: Program, mask: Sequence[bool], count: int, cotangents: int) -> _Vjp:
    f = callable_of(program)
    floats = [is_inexact_dtype(spec.dtype) for spec in _out_specs(program)]
    present: list[bool] = []
    follows: list[bool] = []

    def run(inputs: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
        primals, rest = inputs[:count], inputs[count:]
        outputs = f([*primals, *rest[cotangents:]])
        wanted = [primal for primal, w in zip(primals, mask, strict=False) if w]
        pairs = [
            (output, ct)
            for output, ct in zip(
                (o for o, fl in zip(outputs, floats, strict=True) if fl),
                rest[:cotangents],
                strict=True,
            )
            if output.requires_grad
        ]
        grads: Sequence[Any] = [None] * len(wanted)
        if pairs and wanted:
            ys, cts = zip(*pairs, strict=True)
            grads = torch.autograd.grad(ys, wanted, cts, allow_unused=True)
        present[:] = [grad is not None for grad in grads]
        follows[:] = [output.requires_grad for output in outputs]
        return list(outputs), [grad for grad in grads if grad is not None]

    return _Vjp(_in_level(run, mask) if _needs_level(program) else run, present, follows)


def _needs_level(program: Program) -> bool:
    """Whether plain autograd on fake tensors would be wrong when the function runs again.

    Inside a level of torch.func, which wraps the fake tensors, torch replays views by their strides. A
    level is not always used, because torch.func refuses hooks and Functions without setup_context.
    """
    return program.retrace is not None and program.forgets_turns


def _in_level(run: Vjp, mask: Sequence[bool]) -> Vjp:
    """Gradients that are taken inside a level of torch.func."""

    def inside(inputs: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
        with internals.gradient_level(inputs, mask) as (wrapped, out):
            outputs, grads = run(wrapped)
            return list(map(out, outputs)), list(map(out, grads))

    return inside


def _as_function(program: Program) -> Program:
    """The program without the roles that its derivation set, to be differentiated again."""
    inputs = tuple(
        replace(leaf, role="primal", of=None) if leaf.role in ("cotangent", "tangent") else leaf
        for leaf in program.inputs
    )
    outputs = tuple(
        replace(leaf, role="output", of=None if leaf.role == "tangent" else leaf.of)
        for leaf in program.outputs
    )
    return replace(program, inputs=inputs, outputs=outputs)


def joint(program: Program, mask: Sequence[bool]) -> Program:
    """Outputs and gradients in one graph.

    Inputs are the program's, then one cotangent for every floating output (role ``cotangent``,
    ``of`` that output), then its constants. Outputs are the program's, then one gradient (role
    ``gradient``, ``of`` that input) for each input of the mask that the outputs depend on.
    ``differentiable`` says which outputs depend on inputs of the mask.

    Args:
        mask: one bool per input; only floating inputs may ask for a gradient.
    """
    program = _as_function(program)
    count, primals = split_inputs(program)
    cotangents = _cotangents(program, None)
    vjp = _vjp(program, mask, count, len(cotangents))

    def fn(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs, grads = vjp.run(inputs)
        return [*outputs, *grads]

    derived = derived_program(
        program,
        fn,
        [*primals, *cotangents],
        lambda: [*program.outputs, *_gradient_leaves(program, mask, vjp.present)],
        () if _needs_level(program) else tuple(mask),
    )
    return replace(derived, differentiable=tuple(vjp.follows))


def pullback(program: Program, mask: Sequence[bool], tags: Sequence[Any]) -> Program:
    """The function from primals and cotangents to gradients; it is itself differentiable.

    Args:
        tags: the placements of the outputs, and so of their cotangents.
    """
    program = _as_function(program)
    count, primals = split_inputs(program)
    cotangents = _cotangents(program, tags)
    wanted = [i for i, w in enumerate(mask) if w]

    def fn(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        given, rest = inputs[:count], inputs[count:]
        constants = rest[len(cotangents) :]
        f, at = _restricted(program, given, wanted, constants)
        # Not autograd.grad: this function may itself be run again under a transform.
        vjp: Any = torch.func.vjp(f, *at)[1]
        return list(vjp(tuple(rest[: len(cotangents)])))

    return derived_program(
        program,
        fn,
        [*primals, *cotangents],
        lambda: _gradient_leaves(program, mask, [True] * len(wanted)),
    )


def _restricted(
    program: Program,
    given: Sequence[torch.Tensor],
    wanted: Sequence[int],
    constants: Sequence[torch.Tensor],
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """The floating outputs as a function of some inputs, and the values of these inputs."""
    f = callable_of(program)
    floats = [i for i, spec in enumerate(_out_specs(program)) if is_inexact_dtype(spec.dtype)]

    def restricted(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        primals = list(given)
        for i, value in zip(wanted, values, strict=True):
            primals[i] = value
        with silent():
            outputs = f([*primals, *constants])
        return tuple(outputs[i] for i in floats)

    return restricted, tuple(given[i] for i in wanted)


def _tangent(leaf: Leaf, spec: TensorSpec, i: int) -> tuple[Leaf, TensorSpec]:
    """The tangent of an input."""
    tangent = replace(leaf, path=f"tangent of {leaf.path}", role="tangent", of=i)
    return tangent, contiguous(spec.shape, spec.dtype, spec.device)


def pushforward(program: Program, mask: Sequence[bool], tags: Sequence[Any]) -> Program:
    """The function from primals and tangents of the mask's inputs to tangents of floating outputs."""
    program = _as_function(program)
    count, primals = split_inputs(program)
    wanted = [i for i, w in enumerate(mask) if w]
    floats = [i for i, spec in enumerate(_out_specs(program)) if is_inexact_dtype(spec.dtype)]
    tangents = [_tangent(*primals[i], i) for i in wanted]

    def fn(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        given, rest = inputs[:count], inputs[count:]
        constants = rest[len(wanted) :]

        f, at = _restricted(program, given, wanted, constants)
        return list(torch.func.jvp(f, at, tuple(rest[: len(wanted)]))[1])

    return derived_program(
        program,
        fn,
        [*primals, *tangents],
        lambda: [
            replace(
                program.outputs[i],
                path=f"tangent of {program.outputs[i].path}",
                tag=tags[i],
                role="tangent",
                of=i,
            )
            for i in floats
        ],
    )


def with_tangents(program: Program, mask: Sequence[bool]) -> Program:
    """The function from primals and tangents of the mask's inputs to outputs, then tangents of floats."""
    program = _as_function(program)
    count, primals = split_inputs(program)
    wanted = [i for i, w in enumerate(mask) if w]
    is_float = [is_inexact_dtype(spec.dtype) for spec in _out_specs(program)]
    tangents = [_tangent(*primals[i], i) for i in wanted]
    f = callable_of(program)

    def fn(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        given, rest = inputs[:count], inputs[count:]
        constants = rest[len(wanted) :]

        def moved(*values: torch.Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            primals = list(given)
            for i, value in zip(wanted, values, strict=True):
                primals[i] = value
            with silent():
                outputs = f([*primals, *constants])
            pairs = list(zip(outputs, is_float, strict=True))
            return tuple(x for x, fl in pairs if fl), tuple(x for x, fl in pairs if not fl)

        at = tuple(given[i] for i in wanted)
        pair: Any = torch.func.jvp(moved, at, tuple(rest[: len(wanted)]), has_aux=True)
        floats, pushed, others = pair
        left, right = iter(floats), iter(others)
        return [*(next(left if fl else right) for fl in is_float), *pushed]

    return derived_program(
        program,
        fn,
        [*primals, *tangents],
        lambda: [
            *program.outputs,
            *(
                replace(leaf, path=f"tangent of {leaf.path}", role="tangent", of=i)
                for i, leaf in enumerate(program.outputs)
                if is_float[i]
            ),
        ],
    )


def batched(program: Program, mapped: Sequence[bool], size: int, tags: Sequence[Any]) -> Program:
    """vmap: a new dimension in front of the inputs of the mask and of every output."""
    f = callable_of(program)
    count, primals = split_inputs(program)
    inputs = [
        (leaf.batched(), contiguous((size, *spec.shape), spec.dtype, spec.device))
        if m
        else (leaf, spec)
        for (leaf, spec), m in zip(primals, mapped, strict=True)
    ]
    dims = tuple(0 if m else None for m in mapped)

    def fn(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        constants = inputs[count:]

        def sample(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(f([*operands, *constants]))

        return list(torch.vmap(sample, in_dims=dims)(*inputs[:count]))

    return derived_program(
        program,
        fn,
        inputs,
        lambda: [
            replace(leaf, tag=tag).batched()
            for leaf, tag in zip(program.outputs, tags, strict=True)
        ],
    )

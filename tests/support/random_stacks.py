"""Random functions × derivations × stacks of transforms, and one law: right, or refused by name.

What a case gives is compared with the same derivations of the plain function. An exception of the
library's own classes is a refusal; torch's own exception counts as one where torch alone raises the same
type. Anything else is a failure of the library.

``python tests/support/random_stacks.py COUNT`` draws so many and lists failures and refusals by message.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from any_size import fuse
from derivations import DERIVATIONS, FORWARD, OUTERMOST, Derivation, Fn, batched, floating
from idioms import IDIOMS
from op_db import cases, entries
from refusals import refuses

from torchard import checkpoint, jit, policies
from torchard.functional.core.errors import RetraceWarning
from torchard.sharding import Mesh, MeshTensor, P, place, shard
from torchard.sharding.testing import random_spec
from torchard.testing.strategies import RandomProgram, random_program

__all__ = ["FAILED", "NOTHING", "REFUSED", "RIGHT", "WRONG", "Case", "draw", "judge"]

RIGHT, REFUSED, NOTHING, WRONG, FAILED = "right", "refused", "nothing", "wrong", "failed"
MESHES = [
    Mesh(axes, virtual=True)
    for axes in ({"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 1, "pp": 2})
]
POLICIES = {
    "": policies.save_nothing,
    "dots": policies.save_dots,
    "everything": policies.save_everything,
}


Layer = tuple[str, Callable[[Fn], Fn]]


@dataclass
class Case:
    """A function, its inputs, and what is done to it, from the inside out."""

    name: str
    fn: Fn
    inputs: tuple[torch.Tensor, ...]
    layers: tuple[Layer, ...]

    def plain(self) -> Fn:
        """Derived, not transformed."""
        return self._built([layer for _, layer in self.layers if isinstance(layer, Derivation)])

    def transformed(self) -> Fn:
        return self._built([layer for _, layer in self.layers])

    def _built(self, layers: list[Callable[[Fn], Fn]]) -> Fn:
        fn = self.fn
        for layer in layers:
            fn = layer(fn)
        return fn

    def __str__(self) -> str:
        text = self.name
        for name, _ in self.layers:
            text = f"{name}({text})"
        return text


@dataclass(frozen=True)
class Verdict:
    kind: str
    why: str = ""


# -- drawing ------------------------------------------------------------------------------------------


# Each order makes programs several times as long; four of them are tens of thousands of operations.
_ORDERS = 3


Source = Callable[[Random, Mesh], tuple[str, Fn, tuple[torch.Tensor, ...]]]


def draw(seed: int, sources: Sequence[Source] = ()) -> Case:
    """The case of this number: a random program, an idiom, or a sample call of an operator.

    Args:
        sources: what functions are drawn by, if not by these.
    """
    rng = Random(seed)
    mesh = rng.choice(MESHES)
    source = rng.choice(sources or [_random_program, _idiom, _idiom, _operator])
    name, fn, inputs = source(rng, mesh)
    derivations: list[Derivation] = []
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        derivations.append(_derivation(rng, inputs, derivations))
    outermost = rng.random() < 0.15 and bool(floating(inputs))
    if outermost:
        can = [d for d in OUTERMOST if _order(derivations) + d.order <= _ORDERS]
        derivations += [rng.choice(can)] if can else []
        outermost = bool(can)
    layers: list[Layer] = [(d.name, d) for d in derivations]
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4, 5])):
        layers.insert(rng.randint(0, len(layers) - outermost), _transform(rng, mesh, inputs))
    # In plain code a derivative straight of a placed tensor is torch's, shard by shard.
    if rng.random() < 0.2 and not isinstance(layers[-1][1], Derivation):
        layers.append(_placed(rng, mesh, inputs))
    return Case(f"{seed}: {name}", fn, inputs, tuple(layers))


def _derivation(
    rng: Random, inputs: tuple[torch.Tensor, ...], before: list[Derivation]
) -> Derivation:
    can = [d for d in DERIVATIONS if floating(inputs) and _order(before) + d.order <= _ORDERS]
    if floating(inputs) and inputs[floating(inputs)[0]].numel() > 12:
        can = [d for d in can if d.name not in ("laplacian", "jacobian")]
    vmapped = not can or rng.random() < 0.3
    return batched(rng, len(inputs)) if vmapped else rng.choice(can)


def _order(derivations: list[Derivation]) -> int:
    return sum(d.order for d in derivations)


def _transform(rng: Random, mesh: Mesh, inputs: tuple[torch.Tensor, ...]) -> Layer:
    which = rng.choice(["shard", "shard", "checkpoint", "fuse", "jit"])
    how = rng.choice([*[_of_arguments] * 6, _of_a_tree, _closing_over])
    apply: Callable[[Fn, Any], Fn]
    specs = None
    name = which
    if which == "shard":
        drawn = tuple(random_spec(rng, x.shape, mesh, fused=True) for x in inputs)
        if len(inputs) > 6:  # the layers of a model are split alike
            alike = dict(zip((x.shape for x in inputs), drawn, strict=True))
            drawn = tuple(alike[x.shape] for x in inputs)
        specs = drawn if rng.random() < 0.7 else None
        name = f"shard[{mesh.sizes}, {specs}]"
        apply = lambda fn, at: shard(fn, mesh, at, P())  # noqa: E731
    elif which == "checkpoint":
        kept = rng.choice(sorted(POLICIES))
        policy = POLICIES[kept]
        name = f"checkpoint[{kept}]"
        apply = lambda fn, at: checkpoint(fn, policy=policy)  # noqa: E731
    elif which == "fuse":
        apply = lambda fn, at: fuse(fn)  # noqa: E731
    else:
        apply = lambda fn, at: jit(fn, backend="eager")  # noqa: E731
    return f"{name}{'' if how is _of_arguments else how.__name__}", how(apply, specs)


def _of_arguments(apply: Callable[[Fn, Any], Fn], specs: Any) -> Callable[[Fn], Fn]:
    return lambda fn: _plainly(apply(fn, specs))


def _of_a_tree(apply: Callable[[Fn, Any], Fn], specs: Any) -> Callable[[Fn], Fn]:
    """Arguments and results in containers."""
    at = None if specs is None else ({"first": specs[0], "rest": list(specs[1:])},)

    def layer(fn: Fn) -> Fn:
        def of_tree(tree: dict[str, Any]) -> Any:
            first, *others = fn(tree["first"], *tree["rest"])
            return {"others": others, "first": first}

        transformed: Any = apply(of_tree, at)

        def run(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found = transformed({"first": xs[0], "rest": list(xs[1:])})
            return found["first"], *found["others"]

        return _plainly(run)

    return layer


def _closing_over(apply: Callable[[Fn, Any], Fn], specs: Any) -> Callable[[Fn], Fn]:
    """The first argument is not passed, but found by the function."""
    at = None if specs is None else specs[1:]

    def layer(fn: Fn) -> Fn:
        def run(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return apply(lambda *rest: fn(xs[0], *rest), at)(*xs[1:])

        return _plainly(run)

    return layer


def _placed(rng: Random, mesh: Mesh, inputs: tuple[torch.Tensor, ...]) -> Layer:
    """What comes in lives on the mesh already, some of it."""
    specs = [random_spec(rng, x.shape, mesh) if rng.random() < 0.7 else None for x in inputs]

    def layer(fn: Any) -> Fn:
        return lambda *xs: fn(
            *(x if s is None else place(x, mesh, s) for s, x in zip(specs, xs, strict=True))
        )

    return f"placed[{mesh.sizes}, {specs}]", layer


def _plainly(fn: Fn) -> Fn:
    """A transform around one that shards may give back what lives on the mesh."""
    return lambda *xs: tuple(x.full() if isinstance(x, MeshTensor) else x for x in fn(*xs))


def _idiom(rng: Random, mesh: Mesh) -> tuple[str, Fn, tuple[torch.Tensor, ...]]:
    name = rng.choice(sorted(IDIOMS))
    fn, inputs = IDIOMS[name]
    return name, fn, inputs


def _random_program(rng: Random, mesh: Mesh) -> tuple[str, Fn, tuple[torch.Tensor, ...]]:
    seed, length = rng.randint(0, 2**32 - 1), rng.randint(1, 4)
    program = random_program(seed, steps=length, mesh=mesh)
    name = f"random_program({seed}, steps={length}, mesh={mesh})"
    return name, in_a_tuple(program), program.inputs


def in_a_tuple(program: RandomProgram) -> Fn:
    """Its results as derivations take them."""

    def fn(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = program(*xs)
        return out if isinstance(out, tuple) else (out,)

    return fn


# What they give is not determined, or torch's own samples of them are not plain tensors.
_LEFT_OUT = "empty|rand|normal|bernoulli|multinomial|dropout|sparse|masked\\.|ops.aten|resize"


def _operator(rng: Random, mesh: Mesh) -> tuple[str, Fn, tuple[torch.Tensor, ...]]:
    while True:
        entry = rng.choice(entries())
        found = [] if re.search(_LEFT_OUT, entry.name) else _samples(entry)
        if found:
            return _called(rng.choice(found))


def _called(case: Any) -> tuple[str, Fn, tuple[torch.Tensor, ...]]:
    # The sample's own marks of what wants a gradient would detach inside; all may have one.
    case.wanted = [True] * len(case.tensors)
    return str(case), lambda *xs: tuple(case(*xs)), tuple(case.tensors)


def _samples(entry: Any) -> list[Any]:
    try:
        found = list(islice(cases(entry), 12))
    except Exception:  # samples for another device, say
        return []
    return [c for c in found if c.tensors and all(x.numel() <= 60 for x in c.tensors)]


# -- judging ------------------------------------------------------------------------------------------


def judge(case: Case) -> Verdict:
    """Run a case beside torch alone."""
    if "space.tensor_overload" in case.name:
        return Verdict(NOTHING, "torch has a derivative of it under func.vmap alone")
    if "cross_entropy.chunked" in case.name and any(name in FORWARD for name, _ in case.layers):
        return Verdict(NOTHING, "torch takes tangents to be zero")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batching rules torch lacks, deprecated operations
        warnings.simplefilter("error", RetraceWarning)
        want, refused = _outcome(case.plain(), case.inputs)
        if want is not None and not all(x.numel() < 5000 for x in want):
            return Verdict(NOTHING, "too large")
        have, error = _outcome(case.transformed(), case.inputs)
    if refused is not None:
        if error is None or refuses(error) or _alike(error, refused):
            return Verdict(NOTHING, f"torch alone: {_words(refused)}")
        return Verdict(FAILED, f"{_words(error)}\n  torch alone: {_words(refused)}\n{_tail(error)}")
    if error is not None:
        why = f"{_words(error)}\n{_tail(error)}"
        return Verdict(REFUSED if refuses(error) else FAILED, why)
    assert have is not None and want is not None
    return _compared(have, want, case)


def _outcome(
    fn: Fn, inputs: tuple[torch.Tensor, ...]
) -> tuple[tuple[torch.Tensor, ...] | None, BaseException | None]:
    try:
        return tuple(fn(*(x.clone() for x in inputs))), None
    except Exception as error:
        return None, error


def _compared(
    have: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], case: Case
) -> Verdict:
    if len(have) != len(want):
        return Verdict(WRONG, f"{len(have)} results instead of {len(want)}")
    for i, (h, w) in enumerate(zip(have, want, strict=True)):
        if (h.shape, h.dtype) != (w.shape, w.dtype):
            kinds = f"{h.dtype}{list(h.shape)}, not {w.dtype}{list(w.shape)}"
            return Verdict(WRONG, f"out[{i}] is {kinds}")
        narrow = w.dtype in (torch.float32, torch.complex64, torch.float16, torch.bfloat16)
        tolerance = 1e-3 if narrow else 1e-6
        scale = _largest(w)
        if not torch.allclose(h, w, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            moved = _outcome(case.plain(), tuple(map(_nudged, case.inputs)))[0]
            if moved and not torch.allclose(moved[i], w, rtol=1e-6, atol=1e-6 * scale, equal_nan=True):
                return Verdict(NOTHING, "ill conditioned")
            return Verdict(WRONG, f"out[{i}] differs")
    return Verdict(RIGHT)


def _largest(x: torch.Tensor) -> float:
    """Of its entries, at least 1."""
    if not x.numel():
        return 1.0
    x = x if x.is_floating_point() or x.is_complex() else x.double()
    return max(1.0, float(x.abs().nan_to_num(0, 0, 0).max()))


def _nudged(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + 4 * torch.finfo(x.dtype).eps) if x.is_floating_point() or x.is_complex() else x


def _alike(error: BaseException, other: BaseException) -> bool:
    """Of one type, or raised in torch's own code: its kernels and those for fakes differ in theirs."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    in_torch = "/site-packages/torch/" in last.filename
    return in_torch or isinstance(error, type(other)) or isinstance(other, type(error))


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _tail(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return "\n".join(f"  {Path(f.filename).name}:{f.lineno} {f.name}" for f in frames)


# -- many at once -------------------------------------------------------------------------------------


def _group(verdict: Verdict) -> str:
    """The message without what is the case's own."""
    head = verdict.why.split("\n")[0]
    return re.sub(r"\S+\.py:\d+|0x[0-9a-f]+|\d+", "#", head)[:140]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="each failure when it is found")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds: Counter[str] = Counter()
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for seed in range(options.first, options.first + options.count):
        case = draw(seed)
        verdict = judge(case)
        kinds[verdict.kind] += 1
        if verdict.kind in (WRONG, FAILED, REFUSED):
            groups[verdict.kind, _group(verdict)].append(f"{case}\n    {verdict.why}")
        if options.verbose and verdict.kind in (WRONG, FAILED, REFUSED):
            print(f"{verdict.kind}: {case}\n    {verdict.why}\n{dict(kinds)}", flush=True)
    print(dict(kinds))
    for (kind, _), found in sorted(groups.items(), key=lambda pair: (pair[0][0], -len(pair[1]))):
        print(f"{kind} × {len(found)}: {found[0]}")
    return int(bool(kinds[WRONG] + kinds[FAILED]))


if __name__ == "__main__":
    sys.exit(main())

"""Random programs with writes, and what is drawn around them: derivatives, transforms, memory.

`write_checks.py` says what must hold of each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from random_writes import CLOSED, AsValues, InPlace, Memory, Program, programs
from torch import Tensor

from torchard import Mesh, P, accumulate, jit, place, shard

__all__ = ["AT", "DERIVED", "MESHES", "Case", "cases", "drawn"]

Fn = Callable[..., Any]
SHAPES = ((4, 4), (4, 4), (4,))
AT = torch.tensor([1, 0])


@dataclass(frozen=True)
class Case:
    """A program, and all that is drawn around it.

    Attributes:
        derived: a name of DERIVED.
        inside: whether the derivative is transformed, not the transformed function derived.
        way: a name of WAYS.
        placed: how arguments lie in memory, a name of PLACED.
        specs: whether each argument is replicated on a mesh, or split by rows or columns.
        donated: positions of donated arguments.
        holds: whether the user holds a view of each argument from before.
        threads: whether calls come from several threads.
        dtype: of the arguments; closed-over tensors are float64.
    """

    program: Program
    derived: str = "value"
    inside: bool = True
    way: str = "eager"
    placed: str = "apart"
    specs: tuple[int, ...] = (0, 0, 0)
    donated: frozenset[int] = frozenset()
    holds: bool = False
    threads: bool = False
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        how = "inside" if self.inside else "outside"
        way = f"{self.way}, {self.dtype}"
        lines = [f"{self.derived} ({how}), {way}, arguments {self.placed}, specs {self.specs}"]
        lines.append(f"donated {sorted(self.donated)}, holds {self.holds}, threads {self.threads}")
        return "\n".join([*lines, str(self.program)])

    @property
    def _inside(self) -> bool:
        return self.inside and self.derived != "backward twice"  # which is autograd's

    def plain(self, memory: type[Memory]) -> Fn:
        run = self.program.by(memory)
        return lambda x, y, z, at: run(CLOSED, z, y, x, at)

    def reference(self) -> Fn:
        return REFERENCES[self.derived](self.plain(AsValues))

    def subject(self) -> Fn:
        fn, derive = self.plain(InPlace), DERIVED[self.derived]
        if self._inside:
            return self._transformed(derive(fn))
        return derive(self._transformed(fn))

    def in_torch(self) -> Fn:
        """The function as a user of torch writes it, without transforms of the library."""
        fn = self.plain(InPlace)
        return _batched(fn) if self.derived == "accumulate" else DERIVED[self.derived](fn)

    def _transformed(self, fn: Fn) -> Fn:
        options: dict[str, Any] = {"backend": "eager", "donate_argnums": tuple(sorted(self.donated))}
        if self.way == "planned":
            return jit(fn, memory="planned", **options)
        if self.way == "compiled":
            return jit(fn, donate_argnums=options["donate_argnums"])
        if self.way in MESHES:
            fn = shard(fn, MESHES[self.way])
        return jit(fn, **options)

    def lowered_and_called(self) -> tuple[Callable[[], Any], Callable[[Callable[..., Any]], Any]]:
        """A function for the program that runs, and one that calls it, in a context of its arguments."""

        def fresh() -> list[Any]:
            _, *values = self.arguments(0)
            return [*self.on_mesh(*values), AT]

        if self.derived == "backward twice":
            run = self._transformed(_loss_of(self.plain(InPlace)))
            one = torch.ones(()).double()

            def both(begin: Callable[..., Any]) -> Any:
                leaves = [x.requires_grad_() for x in fresh()[:3]]
                with begin([*leaves, AT, one]):
                    total = run(*leaves, AT)
                    return total, torch.autograd.grad(total, leaves, one, allow_unused=True)

            return lambda: run.lower_joint(*fresh(), argnums=(0, 1, 2)), both
        run = self.subject()

        def call(begin: Callable[..., Any]) -> Any:
            given = fresh()
            with begin(given):
                return run(*given)

        return lambda: run.lower(*fresh()), call

    def arguments(self, number: int) -> tuple[Any, ...]:
        """The caller's memory, and three arguments: small integers, others for each number."""
        draw = torch.Generator().manual_seed(number)
        base = torch.randint(-9, 10, (9, 4), generator=draw).to(self.dtype)
        return base, *PLACED[self.placed](base)

    def on_mesh(self, *values: Tensor) -> list[Any]:
        """The arguments, placed if there is a mesh."""
        if self.way not in MESHES or not self._inside:
            return list(values)
        mesh = MESHES[self.way]
        specs = [[P(), P("dp"), P(None, "dp") if v.ndim > 1 else P("dp")] for v in values]
        return [place(v, mesh, s[n]) for v, s, n in zip(values, specs, self.specs, strict=True)]


# -- how a function is derived --------------------------------------------------------------------------


def _loss(fn: Fn, at: Tensor) -> Fn:
    def loss(*xs: Tensor) -> Tensor:
        total = (xs[0] * 0).sum()  # requires a gradient, whatever the results do
        for number, out in enumerate(fn(*xs, at)):
            total = total + (number + 1) * (out * out).sum()
        return total

    return loss


def _loss_of(fn: Fn) -> Fn:
    return lambda x, y, z, at: _loss(fn, at)(x, y, z).double()


def _jvp(fn: Fn) -> Fn:
    def run(x: Tensor, y: Tensor, z: Tensor, at: Tensor) -> Any:
        tangents = tuple(torch.ones_like(v) for v in (x, y, z))
        return torch.func.jvp(lambda *vs: fn(*vs, at), (x, y, z), tangents)

    return run


def _vjp(fn: Fn) -> Fn:
    """The pull is called twice."""

    def run(x: Tensor, y: Tensor, z: Tensor, at: Tensor) -> Any:
        outs, pull = torch.func.vjp(lambda *vs: fn(*vs, at), x, y, z)
        first = pull(tuple(torch.ones_like(out) for out in outs))
        return outs, first, pull(tuple(out.detach() for out in outs))

    return run


def _backward(fn: Fn) -> Fn:
    """By autograd, through a graph that is retained."""

    def run(x: Tensor, y: Tensor, z: Tensor, at: Tensor) -> Any:
        leaves = [v.detach().requires_grad_() for v in (x, y, z)]
        loss = _loss(fn, at)(*(leaf * 1 for leaf in leaves))
        more: dict[str, Any] = {"retain_graph": True, "materialize_grads": True, "allow_unused": True}
        first = torch.autograd.grad(loss, leaves, **more)
        return loss.detach(), first, torch.autograd.grad(loss * 2, leaves, **more)

    return run


def _of_batch(fn: Fn) -> Fn:
    return lambda xs, y, z, at: torch.func.vmap(lambda x: _loss(fn, at)(x, y, z))(xs).sum()


def _batched(fn: Fn) -> Fn:
    return lambda x, y, z, at: torch.func.grad(_of_batch(fn), (1, 2))(torch.stack([x, y]), y, z, at)


def _one_by_one(fn: Fn) -> Fn:
    """What vmap computes."""

    def run(x: Tensor, y: Tensor, z: Tensor, at: Tensor) -> Any:
        return tuple(map(torch.stack, zip(fn(x, y, z, at), fn(y, y, z, at), strict=True)))

    return run


DERIVED: dict[str, Callable[[Fn], Fn]] = {
    "value": lambda fn: fn,
    "grad": lambda fn: lambda x, y, z, at: torch.func.grad(_loss(fn, at), (0, 1, 2))(x, y, z),
    "jvp": _jvp,
    "vjp": _vjp,
    "backward twice": _backward,
    "vmap": lambda fn: lambda x, y, z, at: torch.func.vmap(fn, (0, None, None, None))(
        torch.stack([x, y]), y, z, at
    ),
    "accumulate": lambda fn: lambda x, y, z, at: accumulate(
        torch.func.grad(_of_batch(fn), (1, 2)), 2, batch=(0, None, None, None)
    )(torch.stack([x, y]), y, z, at),
}
REFERENCES: dict[str, Callable[[Fn], Fn]] = {
    **DERIVED,
    "vmap": _one_by_one,
    "accumulate": lambda fn: lambda x, y, z, at: torch.func.grad(
        lambda y, z, first, second: _loss(fn, at)(first, y, z) + _loss(fn, at)(second, y, z), (0, 1)
    )(y, z, x, y),
}
DTYPES = [torch.float32, torch.bfloat16, torch.int64]
MESHES = {
    "dp=2": Mesh({"dp": 2}, virtual=True),
    "dp=2 tp=2": Mesh({"dp": 2, "tp": 2}, virtual=True),
}
WAYS = ("eager", "planned", *MESHES)
# Three arguments in the memory of [9, 4] that the caller holds, or of their own.
PLACED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "apart": lambda base: (base[:4].clone(), base[4:8].clone(), base[8].clone()),
    "in one storage": lambda base: (base[:4], base[4:8], base[8]),
    "overlapping": lambda base: (base[:4], base[2:6], base[3]),
    "turned": lambda base: (base[:4].t(), base[4:8].clone().t(), base[:4, 1]),
    "one twice": lambda base: (x := base[:4].clone(), x, base[8].clone()),
}


# -- what is drawn --------------------------------------------------------------------------------------


def _draw(
    count: int,
    number: int,
    strategy: st.SearchStrategy[Case],
    phases: Sequence[Phase],
    run: Callable[[Case], None],
) -> None:
    """Run that many cases by a seed."""
    how = settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        phases=phases,
    )
    seed(number)(how(given(strategy)(run)))()


def drawn(count: int, number: int, strategy: st.SearchStrategy[Case]) -> list[Case]:
    """That many cases by a seed, each once."""
    found: dict[Case, None] = {}

    def run(case: Case) -> None:
        found[case] = None

    _draw(count, number, strategy, [Phase.generate], run)
    return list(found)


def explore(
    count: int, number: int, strategy: st.SearchStrategy[Case], check: Callable[[Case], str]
) -> None:
    """Print what a check finds in that many cases; the smallest that fails is raised, with its text."""
    found: Counter[str] = Counter()

    def run(case: Case) -> None:
        note(str(case))
        found[check(case)] += 1

    torch.set_num_threads(1)
    began = time.perf_counter()
    print(f"{count} cases, seed {number}", flush=True)
    _draw(count, number, strategy, [Phase.generate, Phase.shrink], run)
    print(f"{dict(found)}, {time.perf_counter() - began:.0f} s")


def cases(derived: Sequence[str] = (), ways: Sequence[str] = ()) -> st.SearchStrategy[Case]:
    """Cases; of half of them the function is not derived, and of more than half there is no mesh."""
    return st.builds(
        Case,
        program=programs(),
        derived=st.sampled_from(derived or ["value"] * len(DERIVED) + list(DERIVED)),
        inside=st.booleans(),
        way=st.sampled_from(ways or ["eager", "planned", *WAYS]),
        placed=st.sampled_from(list(PLACED)),
        specs=st.tuples(*[st.integers(0, 2)] * 3),
        donated=st.frozensets(st.integers(0, 2)),
        holds=st.booleans(),
        threads=st.sampled_from([False] * 7 + [True]),
        dtype=st.sampled_from([torch.float64] * 4 + DTYPES),
    ).filter(_is_possible)


def _is_possible(case: Case) -> bool:
    differentiable = case.dtype.is_floating_point or case.derived in ("value", "vmap")
    return differentiable and (case.placed != "one twice" or case.donated <= {2})

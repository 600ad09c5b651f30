"""Programs on which a compiler's results may differ from eager's, and a comparison that finds it.

A compiler fuses: it writes into memory that eager copies, and computes a value again in each kernel that
reads it, rounded otherwise. The programs here do what this breaks: they write into expanded values, and
compare a value exactly with what was made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

from torchard.testing.rounding.bounds import Expected, expected
from torchard.testing.rounding.programs import program_of

__all__ = ["Trial", "compared", "differs", "expanded_writes", "first_wrong", "of_trials"]

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


@dataclass
class Trial:
    """One function of tensors, which returns a list of tensors, and its name in reports."""

    name: str
    fn: Callable[..., list[Tensor]]
    tensors: list[Tensor]

    def __call__(self) -> list[Tensor]:
        return self.fn(*self.tensors)


def of_trials(trials: Sequence[Trial]) -> Callable[[list[list[Tensor]]], list[list[Tensor]]]:
    """All of them in one function: to compile it takes little longer than to compile one."""

    def batch(given: list[list[Tensor]]) -> list[list[Tensor]]:
        return [trial.fn(*tensors) for trial, tensors in zip(trials, given, strict=True)]

    return batch


# -- the comparison -----------------------------------------------------------------------------------


def differs(trial: Trial, have: Tensors, want: Tensors) -> str:
    """How results differ from eager's by more than rounding explains; nothing if they do not.

    They may differ by some units in the last place of the largest value, or be as close to the same
    computation in float64 as eager's are, or as far from it as roundings of its operations explain.
    """
    double: list[Tensor] | None = None
    known: list[Expected | None] | None = None
    for i, (h, w) in enumerate(zip(have, want, strict=True)):
        if h.shape != w.shape or h.dtype != w.dtype:
            return f"result {i}: {h.dtype}{list(h.shape)}, not {w.dtype}{list(w.shape)}"
        if _close(h, w):
            continue
        double = double or _in_double(trial)
        if double is not None and _as_good(h, w, double[i]):
            continue
        known = known or _bounds(trial)
        bound = known[i] if i < len(known) else None
        if bound is None or not _within(bound, h):
            return f"result {i}: {_some(h, w)}, not {_some(w, h)}"
    return ""


def _within(bound: Expected, have: Tensor) -> bool:
    excess = bound.excess(have)
    return not excess.numel() or float(excess.max()) <= 1


def _bounds(trial: Trial) -> list[Expected | None]:
    """Each result with the error that rounding explains; nothing if it cannot be evaluated in float64."""
    try:
        program, inputs = program_of(trial.fn, trial.tensors)
        nodes = [x for x in program.results if isinstance(x, torch.fx.Node)]
        known: Any = expected(program, inputs, nodes)
    except Exception:  # of an operation that takes no float64: then there is no bound
        return []
    return [known.get(x) for x in program.results]


def _close(have: Tensor, want: Tensor) -> bool:
    if not (want.is_floating_point() or want.is_complex()):
        return torch.equal(have, want)
    if want.numel() == 0:
        return True
    few = 64 if want.itemsize > 2 else 1  # of 8 bits each is much
    bound = few * torch.finfo(want.dtype).eps
    have, want = _wide(have), _wide(want)
    finite = want.abs()[torch.isfinite(want.abs())]
    scale = float(finite.max()) if finite.numel() else 1.0
    return torch.allclose(have, want, rtol=bound, atol=bound * scale, equal_nan=True)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)


def _as_good(have: Tensor, want: Tensor, exact: Tensor) -> bool:
    if exact.shape != want.shape or not (want.is_floating_point() or want.is_complex()):
        return False
    have, wide, exact = _wide(have), _wide(want), _wide(exact)
    if not torch.equal(torch.isfinite(have.abs()), torch.isfinite(exact.abs())):
        return False
    ours, theirs = (float((x - exact).abs().nan_to_num(0, 0, 0).max()) for x in (have, wide))
    return ours <= 8 * theirs


def _in_double(trial: Trial) -> list[Tensor] | None:
    def widened(x: Tensor) -> Tensor:
        return _wide(x) if x.is_floating_point() or x.is_complex() else x

    try:
        return trial.fn(*map(widened, trial.tensors))
    except RuntimeError:  # an operation that takes no float64
        return None


def _some(x: Tensor, other: Tensor) -> str:
    wrong = (x != other).flatten() & ~((x != x) & (other != other)).flatten()
    return f"{x.flatten()[wrong][:4].tolist()} ({int(wrong.sum())} of {x.numel()})"


def compared(
    trials: Sequence[Trial], transform: Callable[[Any], Any]
) -> Iterator[tuple[Trial, str]]:
    """The trials that a transform of all of them together gets wrong, and how; also by an error."""
    if not trials:
        return
    try:
        results = transform(of_trials(trials))([trial.tensors for trial in trials])
    except Exception as error:  # of any trial: to find which
        if len(trials) == 1:
            yield trials[0], f"{type(error).__name__}: {str(error)[:400]}"
            return
        middle = len(trials) // 2
        yield from compared(trials[:middle], transform)
        yield from compared(trials[middle:], transform)
        return
    for trial, have in zip(trials, results, strict=True):
        if problem := differs(trial, have, trial()):
            yield trial, problem


def first_wrong(trials: Sequence[Trial], transform: Callable[[Any], Any]) -> str:
    """The first of them that is wrong, for an assertion; nothing if none is."""
    return next((f"{trial.name}: {problem}" for trial, problem in compared(trials, transform)), "")


# -- writes into expanded values ----------------------------------------------------------------------

_I = torch.tensor([0, 2, 1])
_MASK = torch.arange(20).reshape(4, 5) % 3 == 0

# Functions of a value [4, 5] and of ones [3, 5].
WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_put": lambda v, o: v.index_put((_I,), o),
    "index_put, added": lambda v, o: v.index_put((_I,), o, True),
    "index_put of columns": lambda v, o: v.index_put((_I, _I), o[:, 0]),
    "index_add": lambda v, o: v.index_add(0, _I, o),
    "index_copy": lambda v, o: v.index_copy(0, _I, o),
    "index_fill": lambda v, o: v.index_fill(0, _I, 1.0),
    "index_reduce": lambda v, o: v.index_reduce(0, _I, o, "amax"),
    "scatter": lambda v, o: v.scatter(0, _I[:, None].expand(3, 5), o),
    "scatter a number": lambda v, o: v.scatter(0, _I[:, None].expand(3, 5), 2.0),
    "scatter_add": lambda v, o: v.scatter_add(0, _I[:, None].expand(3, 5), o),
    "scatter_reduce": lambda v, o: v.scatter_reduce(0, _I[:, None].expand(3, 5), o, "prod"),
    "masked_scatter": lambda v, o: v.masked_scatter(_MASK, o),
    "masked_fill": lambda v, o: v.masked_fill(_MASK, 1.0),
    "diagonal_scatter": lambda v, o: v.diagonal_scatter(o[0, :4] * 2),
    "select_scatter": lambda v, o: v.select_scatter(o[0] * 3, 0, 1),
    "slice_scatter": lambda v, o: v.slice_scatter(o[:2] * 3, 0, 1, 3),
    "as_strided_scatter": lambda v, o: v.contiguous().as_strided_scatter(o, (3, 5), (5, 1), 5),
    "put": lambda v, o: v.clone().put(_I, o[:, 0]),
    "a row in place": lambda v, o: _set(v.clone(), o),
    "added in place": lambda v, o: v.clone().index_put_((_I,), o, accumulate=True),
}


def _set(v: Tensor, o: Tensor) -> Tensor:
    v[1] = o[0]
    v[:, ::2] += 1
    return v


# Values [4, 5] that repeat elements of memory, of a value [1, 5].
BASES: dict[str, Callable[[Tensor], Tensor]] = {
    "expand": lambda z: z.expand(4, 5),
    "expand of a computed value": lambda z: z.sin().expand(4, 5),
    "expand of a row": lambda z: z[0].expand(4, 5),
    "expand of a column": lambda z: z[:, :1].exp().expand(4, 5),
    "broadcast_to": lambda z: torch.broadcast_to(z.cos(), (4, 5)),
    "transposed": lambda z: z.sin().mT.expand(5, 4).mT,
    "rows of more": lambda z: z.sin().expand(6, 5)[1:5],
    "merged": lambda z: z.sin().expand(2, 2, 1, 5).flatten(1, 2).reshape(4, 5),
    "a dim of a number": lambda z: z.sum().expand(4, 5),
    "unfolded": lambda z: F.pad(z, (0, 3)).sin()[0].unfold(0, 5, 1),
    "full": lambda z: z.new_full((1, 5), 2.0).expand(4, 5),
    "unsqueezed": lambda z: z.sin().unsqueeze(0).expand(2, 4, 5)[1],
}


def expanded_writes() -> list[Trial]:
    """Every write into every value, and the gradients through it."""
    z, one = torch.arange(5.0).reshape(1, 5), torch.rand(3, 5) + 1
    return [
        Trial(f"{write} into {base}", _with_gradients(_written(base, write)), [z, one])
        for base in BASES
        for write in WRITES
    ]


def _written(base: str, write: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, o: WRITES[write](BASES[base](z), o)


def _with_gradients(fn: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    def both(*tensors: Tensor) -> list[Tensor]:
        value, pull = torch.func.vjp(fn, *tensors)
        return [value, *pull(value.detach().cos())]

    return both


# -- exact comparisons of a value and what was made of it ---------------------------------------------

INEXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "exp": torch.exp,
    "erf": torch.erf,
    "gelu": F.gelu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "silu": F.silu,
    "log1p": lambda x: x.abs().log1p(),
    "pow": lambda x: x.abs().pow(1.3),
    "atan2": lambda x: torch.atan2(x, 1 + x * x),
    "softplus": F.softplus,
    "rsqrt": lambda x: (x * x + 0.3).rsqrt(),
    "softmax": lambda x: x.softmax(-1),
    "division": lambda x: x.mul(1.7).div(x * x + 0.7),
    "sum of three": lambda x: torch.stack([x * 0.3, x.sin(), x.exp()]).sum(0),
    "lgamma": lambda x: torch.lgamma(x.abs() + 0.5),
    "normalised": lambda x: F.layer_norm(x, x.shape[-1:]),
    "small product": lambda x: x @ (x.mT @ x).sin(),
}

# Of v [m, n]: what has large errors if it is read in two roundings.
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda v: v.amax(-1),
    "amax of columns": lambda v: v.amax(0),
    "amax of all": lambda v: v.amax(),
    "amin": lambda v: v.amin(-1),
    "aminmax": lambda v: torch.stack(list(v.aminmax(dim=1))),
    "max": lambda v: v.max(),
    "max of rows": lambda v: v.max(1)[0],
    "min of rows": lambda v: v.min(1)[0],
    "inf norm": lambda v: v.norm(p=float("inf")),
    "inf norm of rows": lambda v: torch.linalg.vector_norm(v, float("inf"), dim=-1),
    "-inf norm": lambda v: torch.linalg.vector_norm(v, -float("inf"), dim=0),
    "maximum": lambda v: torch.maximum(v, v.amax(1, keepdim=True)),
    "minimum": lambda v: torch.minimum(v, v.amax(0, keepdim=True)),
    "equal": lambda v: (v == v.amax(1, keepdim=True)).float() * v,
    "counted": lambda v: v / (v >= v.amax(1, keepdim=True)).sum(1, keepdim=True),
    "equal after scaling": lambda v: v * (v * 3 >= v.amax(1, keepdim=True) * 3),
    "differences": lambda v: v * ((v - v.amin(1, keepdim=True)) <= 0),
    "root": lambda v: (v.amax(1, keepdim=True) - v).sqrt().detach() + v,
    "logarithm": lambda v: v * torch.isfinite((v.amax(1, keepdim=True) - v + 1e-30).log()),
    "arccos": lambda v: torch.acos(v / v.abs().amax(1, keepdim=True)).detach() * v,
    "topk": lambda v: v * (v >= v.topk(2, dim=1)[0][:, 1:]),
    "sorted": lambda v: v * (v == v.sort(dim=1)[0][:, :1]),
    "median": lambda v: v * (v == v.median(1, keepdim=True)[0]),
    "median of all": lambda v: v.median(),
    "kthvalue": lambda v: v * (v <= v.kthvalue(2, dim=1, keepdim=True)[0]),
    "cummax": lambda v: v * (v == v.cummax(1)[0]),
    "argmax": lambda v: v * (v == v.gather(1, v.argmax(1, keepdim=True))),
    "own transpose": lambda v: v * ((v @ v.mT).amax() == (v @ v.mT).mT.amax()),
    "flipped twice": lambda v: v * (v.flip(0).contiguous().flip(0) == v),
    "selected": lambda v: v * (v[:1] == v),
    "gathered": lambda v: v * (v[torch.tensor([1, 0])][:1] == v),
    "catted": lambda v: v * (torch.cat([v, v.flip(0)]).amax(0) == v),
    "ties of itself": lambda v: torch.cat([v, v.flip(0), v.roll(1, 0)]).amax(0),
    "hinge": lambda v: (v - v.amax(1, keepdim=True)).relu() / (v.amax(1, keepdim=True) - v + 1e-9),
    "max pool": lambda v: F.max_pool2d(v[None], (1, 2), stride=1)[0],
    "max pool undone": lambda v: v[:, :-1] * (v[:, :-1] == F.max_pool1d(v, 2, 1)),
    "scatter_reduce": lambda v: v[0].scatter_reduce(0, torch.arange(v.shape[1]) % 2, v[1], "amax"),
    "index_reduce": lambda v: v.index_reduce(0, torch.tensor([0, 0]), v[:2], "amax"),
    "bins": lambda v: v * torch.searchsorted(v.sort(1)[0], v.contiguous()),
    "buckets": lambda v: v * ((v - v.amin()) / (v.amax() - v.amin()) * 4).floor(),
    "quantised": lambda v: (v / v.abs().amax(1, keepdim=True) * 2).round() * v,
    "logsumexp": lambda v: v.logsumexp(1),
    "value and largest": lambda v: torch.cat([v, v.amax(1, keepdim=True)], 1),
    "renorm": lambda v: v.renorm(float("inf"), 0, 0.3) if hasattr(v, "renorm") else v,
    "clamp": lambda v: v.clamp(v.amin(1, keepdim=True), v.amax(1, keepdim=True)),
    "heaviside": lambda v: v * torch.heaviside(v - v.amax(1, keepdim=True), v.detach() * 0 + 0.5),
    "sign": lambda v: v * torch.sign(v - v.amax(1, keepdim=True)),
    "remainder": lambda v: torch.remainder(v, v.amax(1, keepdim=True)),
    "unique": lambda v: v * (v[..., None] == v[..., None, :]).sum(-1),
    "ranks": lambda v: v * (v[:, None, :] <= v[:, :, None]).sum(-1),
}


def comparisons(dtype: torch.dtype, seed: int, every: int = 1) -> list[Trial]:
    """Every exact comparison of every inexact value (or every so many of them), with gradients."""
    rng, made = Random(seed), []
    shapes = [(2, 3), (3, 3), (5, 7), (2, 19), (33, 4), (4, 64)]
    for value in INEXACT:
        for exact in EXACT:
            shape, chosen = rng.choice(shapes), rng.randrange(every) == 0
            if not chosen:
                continue
            if "gathered" in exact or "reduce" in exact:
                shape = (2, *shape[1:])
            generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
            x = torch.randn(shape, generator=generator).to(dtype)
            fn = _with_gradients(_compared(value, exact))
            made.append(Trial(f"{exact} of {value} {list(shape)} {dtype}", fn, [x]))
    return made


def _compared(value: str, exact: str) -> Callable[[Tensor], Tensor]:
    return lambda x: EXACT[exact](INEXACT[value](x))

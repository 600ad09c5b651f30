"""Faults of Inductor's, each with programs that show it, and what torchard does about it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import effect_programs
import torch
import torch.nn.functional as F
from compiler_programs import Trial, comparisons, differs

from torchard.functional import checkpoint, jit

__all__ = ["FAULTS", "Fault", "unrepaired"]

Tensor = torch.Tensor


@dataclass(frozen=True)
class Fault:
    """One fault: what Inductor does, what is done about it, and calls in some of which it shows.

    Attributes:
        fn: a function that is compiled wrongly.
        transform: of it, by which it is compiled.
        exactly: whether results are compared bit for bit: roundings are what is wrong.
    """

    what: str
    remedy: str
    fn: Callable[..., Any]
    calls: Sequence[Sequence[Tensor]]
    transform: Callable[[Any], Any] = jit
    exactly: bool = False

    def wrong(self) -> list[Sequence[Tensor]]:
        """The calls that are wrong now."""
        run = self.transform(self.fn)
        return [call for call in self.calls if not self.is_right(_tried(run, call), call)]

    def is_right(self, value: Any, call: Sequence[Tensor]) -> bool:
        """Whether a value is that of a call of the plain function."""
        trial = Trial(self.what, lambda *x: _listed(self.fn(*x)), list(call))
        if value is None:
            return False
        if self.exactly:
            return all(map(torch.equal, _listed(value), trial()))
        return not differs(trial, _listed(value), trial())


def _tried(run: Callable[..., Any], call: Sequence[Tensor]) -> Any:
    """The result of a call; None if the compiler fails."""
    try:
        return run(*call)
    except Exception:  # of the compiler's
        return None


def _listed(out: Any) -> list[Tensor]:
    return out if isinstance(out, list) else [out]


@contextlib.contextmanager
def unrepaired() -> Iterator[None]:
    """A context in which `jit` hands programs to Inductor as they are."""
    module = importlib.import_module("torchard.functional.jit")
    compilers = importlib.import_module("torchard.functional.torch_internals.compilers")
    nothing: dict[str, Any] = {
        "REPAIRS": (),
        "has_half_precision": lambda graph, inputs: False,
        "keep_compared": lambda program: program,
        "call_torch": lambda graph: None,
    }
    contexts = ("changed_inductor", "first_calls_are_plain")
    as_it_is: dict[str, Any] = {**dict.fromkeys(contexts, contextlib.nullcontext), "_SETTINGS": {}}
    with mock.patch.multiple(module, **nothing), mock.patch.multiple(compilers, **as_it_is):
        yield


def _keeps_maxima(op: str, shapes: Any, scope: str, name: str | None) -> bool:
    return op == "aten.amax"


def _random(*shape: int, count: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    seeds = (torch.Generator().manual_seed(seed) for seed in range(count))
    return tuple((torch.randn(shape, generator=seed).to(dtype),) for seed in seeds)


def _complex(*shape: int) -> Any:
    return ((torch.complex(*(x for (x,) in _random(*shape, count=2))),),)


def _maxima(x: Tensor) -> Tensor:
    y = F.gelu(x)
    return (y * y.amax(-1, keepdim=True)).sum() + torch.maximum(y, y.amax(0, keepdim=True)).sum()


def _of_maxima(w: Tensor, x: Tensor) -> list[Tensor]:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        y = x.sin()
        by_rows = y.amax(1) + F.relu(y - y.max() + 0.125).sum(1)
        return by_rows.sum() + (y.max(0)[0] * w[0]).sum()

    (by_w, by_x), value = torch.func.grad_and_value(loss, argnums=(0, 1))(w, x)
    return [by_w, by_x, value]


def _shifted(x: Tensor) -> Tensor:
    """Rows that move on, in place: they are large, and many."""
    for _ in range(8):
        x = torch.slice_scatter(x, x[:-1], 0, 1)
    return x


def _at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is compiled anew at each call."""
    return lambda *args: jit(lambda *args: fn(*args))(*args)


def _laid_out_freely(x: Tensor) -> Tensor:
    """A complex value of which Inductor chooses the strides."""
    squared = x.t().contiguous().square()
    return torch.complex((squared.mT + squared.mT).mT, x)


def _gradient(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.func.grad(lambda *args: fn(*args).sin().sum())


def _concatenated(*inputs: Tensor) -> list[Tensor]:
    """Results in what was a part of a concatenation, before memory for another one is taken."""
    given = iter(inputs)
    return [out for trial in CONCATENATED for out in trial.fn(*(next(given) for _ in trial.tensors))]


CONCATENATED = [
    trial
    for trial in comparisons(torch.bfloat16, 0, 2)
    if trial.name.partition(" [")[0]
    in {
        *("value and largest of lgamma", "quantised of normalised"),
        *("amax of columns of normalised", "catted of normalised", "index_reduce of normalised"),
    }
]


def _of_program(number: int) -> tuple[Callable[[Tensor], Tensor], Sequence[Sequence[Tensor]]]:
    program, x = effect_programs.program(number)
    return torch.func.grad(program), [[x.float()]]


FAULTS = [
    Fault(
        "writes into an expanded value change all elements that are one place in memory",
        "such values are copied first",
        lambda z: z.sin().expand(4, 5).index_add(0, torch.tensor([0, 2, 1]), torch.ones(3, 5)),
        _random(1, 5),
    ),
    Fault(
        "two copies of one value, rounded otherwise, are compared: gradients of maxima are 0 or NaN",
        "values that are read by two routes are stored, and read from memory",
        torch.func.grad(_maxima),
        _random(2, 3, count=20),
    ),
    Fault(
        "the same between the forward and a backward that recomputes the value, but not its maximum",
        "the checkpoint keeps the value, too",
        torch.func.grad(_maxima),
        _random(5, 7, count=20),
        lambda _: torch.func.grad(jit(checkpoint(_maxima, policy=_keeps_maxima))),
    ),
    Fault(
        "bfloat16 and float16 values are compared before they are rounded",
        "Inductor is told to round wherever eager does (`emulate_precision_casts`)",
        torch.func.grad(_maxima),
        _random(2, 19, count=3, dtype=torch.bfloat16),
    ),
    Fault(
        "`x * 0` is 0 where x is infinite or no number",
        "constants are not folded before kernels are made",
        lambda x: torch.isnan(x * 0),
        ((torch.tensor([torch.nan, torch.inf, -torch.inf, 2.0]),),),
        exactly=True,
    ),
    Fault(
        "`x.bfloat16().float()` is x",
        "the same",
        lambda x: x.bfloat16().float() - x,
        _random(64),
        exactly=True,
    ),
    Fault(
        "what a compensated sum in bfloat16 has lost is 0",
        "the same",
        lambda x: x - ((x.roll(1, 0) + x) - x.roll(1, 0)),
        _random(64, dtype=torch.bfloat16),
        exactly=True,
    ),
    Fault(
        "a kernel whose loops were changed runs before the write in place of what it reads: gradients of "
        "`x.max(0)[0]` are left out",
        "what a kernel depends on is kept when its loops change (`changed_inductor.py`)",
        _of_maxima,
        [[x for shape in ((32, 32), (16, 32)) for (x,) in _random(*shape, dtype=torch.bfloat16)]],
        exactly=True,
    ),
    Fault(
        "a kernel that reads other elements than the next one writes in place is fused with it, if "
        "something was written before",
        "reads are known by all names of what is read (`changed_inductor.py`)",
        _shifted,
        _random(128, 128),
        exactly=True,
    ),
    Fault(
        "gradients of average pools with `ceil_mode`: windows at the end count as if they were full",
        "torch's own kernel is called",
        _gradient(lambda x: F.avg_pool2d(x, 3, stride=2, padding=1, ceil_mode=True)),
        _random(1, 2, 6, 8),
    ),
    Fault(
        "the same in three dimensions",
        "torch's own kernel is called",
        _gradient(lambda x: F.avg_pool3d(x, (4, 5, 6), (2, 3, 2), padding=2, ceil_mode=True)),
        _random(1, 1, 6, 5, 6),
    ),
    Fault(
        "gradients of nearest-neighbour upsampling by a factor: elements are assigned by sizes",
        "torch's own kernel is called",
        _gradient(lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest")),
        _random(2, 3, 4, 4),
    ),
    Fault(
        "a result is written in place into a part of a concatenation, whose memory another value gets",
        "nothing is written in place into a part (`changed_inductor.py`)",
        _concatenated,
        [[x for trial in CONCATENATED for x in trial.tensors]],
    ),
    Fault(
        "numbers are not rounded to half precision: `x + 0.1`, `x * torch.full_like(x, 0.1)`",
        "they are rounded where eager torch does so",
        lambda x: (x + 0.1) * torch.full_like(x, 0.3),
        _random(64, dtype=torch.bfloat16),
        exactly=True,
    ),
    Fault(
        "`//` in half precision rounds otherwise: some results differ by 1",
        "torch's own kernel is called",
        lambda x: x // 0.1,
        _random(1000, dtype=torch.bfloat16),
        exactly=True,
    ),
    Fault(
        "constants that are converted to a narrower float keep their digits",
        "they are folded",
        lambda a: a * (torch.ones_like(a) * 0.7).bfloat16().float(),
        _random(64),
        exactly=True,
    ),
    Fault(
        "in the first call torch's kernels forget to conjugate: `linalg.pinv` of complex values",
        "the first call is like all others (`changed_inductor.py`)",
        torch.linalg.pinv,
        _complex(4, 4),
        _at_once,
    ),
    Fault(
        "a conjugated value is laid out otherwise, as a result or for torch's kernel: not conjugated",
        "values are conjugated at once",
        lambda x: _laid_out_freely(x).conj(),
        _random(4, 4),
    ),
    Fault(
        "what torch's kernel returns has other strides than Inductor knows: an error in the call",
        "it is copied (`changed_inductor.py`)",
        _gradient(lambda x: torch.linalg.lu(x)[1].abs()),
        _complex(3, 7, 5),
    ),
    Fault(
        "sums of complex values are those of before a write in place",
        "they are not decomposed (`changed_inductor.py`)",
        *_of_program(37),
    ),
    Fault(
        "a sum of complex values that are broadcast: an error within the compiler",
        "they are not decomposed (`changed_inductor.py`)",
        *_of_program(35),
    ),
    Fault(
        "the largest absolute value of complex numbers is rounded before it is converted to a wider "
        "dtype; gradients of `renorm` compare it",
        "torch's own kernel is called",
        lambda x: torch.linalg.vector_norm(x, float("inf"), 0, dtype=torch.complex128),
        _complex(8, 9),
        exactly=True,
    ),
    Fault(
        "`take` by an index without dims: an error within the compiler",
        "torch's own kernel is called",
        lambda x: x.take(torch.tensor(2)),
        _random(4),
    ),
]

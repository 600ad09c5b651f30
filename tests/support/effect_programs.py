"""Random programs that write in place, through views, and stop gradients, by seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

Values = list[torch.Tensor]
Step = tuple[str, Callable[[Values], torch.Tensor | None]]

F64 = torch.float64


class Stop(torch.autograd.Function):
    """A stop of the user's own."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradient)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
        return Stop.apply(x), in_dims[0]


@dataclass
class Program:
    """Steps on a list of values, the first of which is given; the loss reads all floating ones."""

    steps: list[Step]
    weights: list[float]

    def values(self, x: torch.Tensor) -> Values:
        values = [x]
        for _, step in self.steps:
            made = step(values)
            if made is not None:
                values.append(made)
        return values

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        loss = x.new_zeros(())
        for value, weight in zip(self.values(x), self.weights, strict=True):
            if weight and value.is_complex():
                loss = loss + weight * (value.real * value.real + value.imag).sum()
            elif weight and value.is_floating_point():
                loss = loss + weight * (value * value + value).sum()
        return loss

    def __repr__(self) -> str:
        lines, count = ["", "  v0 = x"], 1
        for text, _ in self.steps:
            writes = text.startswith("!")
            lines.append(f"  {text[1:]}" if writes else f"  v{count} = {text}")
            count += not writes
        return "\n".join([*lines, f"  weights {self.weights}"])


# Each is a template of text, with v for the value and o for another of its shape, and what it does.
MAKES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "{v}.clone()": lambda v, o: v.clone(),
    "{v} * 1.5": lambda v, o: v * 1.5,
    "{v} * {o}": lambda v, o: v * o,
    "{v}.sin()": lambda v, o: v.sin(),
    "torch.complex({v}, {o})": lambda v, o: torch.complex(v, o) if not v.is_complex() else v * o,
    "torch.zeros_like({v})": lambda v, o: torch.zeros_like(v),
    "{v}.t().contiguous()": lambda v, o: v.mT.contiguous() if v.ndim > 1 else v.clone(),
}

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "{v}[0]": lambda v: v[0],
    "{v}[..., -1]": lambda v: v[..., -1],
    "{v}[1:]": lambda v: v[1:],
    "{v}[..., ::2]": lambda v: v[..., ::2],
    "{v}.mT": lambda v: v.transpose(-2, -1),  # which a number refuses, too
    "{v}.diagonal(1)": lambda v: v.diagonal(1),
    "{v}.view(-1)": lambda v: v.view(-1),
    "{v}.view(-1)[::3]": lambda v: v.view(-1)[::3],
    "{v}.unsqueeze(0)": lambda v: v.unsqueeze(0),
    "{v}.unfold(0, 2, 2)": lambda v: v.unfold(0, 2, 2),
    "{v}.as_strided((2, 2), (5, 2), 1)": lambda v: v.as_strided((2, 2), (5, 2), 1),
    "{v}.as_strided((3,), (5,), 0)": lambda v: v.as_strided((3,), (5,), 0),
    "{v}.as_strided((2, 3), (1, 4), 2)": lambda v: v.as_strided((2, 3), (1, 4), 2),
    "{v}.real": lambda v: v.real if v.is_complex() else v.narrow(0, 0, 1),
    "{v}.imag": lambda v: v.imag if v.is_complex() else v.narrow(-1, 1, 1),
    "{v}.conj()": lambda v: v.conj() if v.is_complex() else v.movedim(0, -1),
}

STOPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "{v}.detach()": lambda v: v.detach(),
    "{v}.data": lambda v: v.data,
    "{v}.detach().clone()": lambda v: v.detach().clone(),
    "no_grad({v} * 2)": lambda v: _without(lambda: v * 2),
    "Stop({v})": lambda v: Stop.apply(v),
}

# Of v, one value of its shape o, and a real mask of its shape.
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "{v}.add_(1)": lambda v, o: v.add_(1),
    "{v}.mul_(0.5)": lambda v, o: v.mul_(0.5),
    "{v}.mul_({o})": lambda v, o: v.mul_(o),
    "{v}.sub_({o}, alpha=2)": lambda v, o: v.sub_(o, alpha=2),
    "{v} += {o}": lambda v, o: v.__iadd__(o),
    "{v}.div_(2)": lambda v, o: v.div_(2),
    "{v}.copy_({o})": lambda v, o: v.copy_(o),
    "{v}.fill_(0.5)": lambda v, o: v.fill_(0.5),
    "{v}.zero_()": lambda v, o: v.zero_(),
    "{v}.neg_()": lambda v, o: v.neg_(),
    "{v}.tanh_()": lambda v, o: v.tanh_(),
    "{v}.sigmoid_()": lambda v, o: v.sigmoid_(),
    "{v}.relu_()": lambda v, o: v.sin_() if v.is_complex() else v.relu_(),
    "{v}.clamp_(-0.3, 0.4)": lambda v, o: v.cos_() if v.is_complex() else v.clamp_(-0.3, 0.4),
    "{v}.lerp_({o}, 0.3)": lambda v, o: v.lerp_(o, 0.3),
    "{v}.addcmul_({o}, {o})": lambda v, o: v.addcmul_(o, o),
    "{v}.masked_fill_(mask, 0.3)": lambda v, o: v.masked_fill_(_mask(v), 0.3),
    "{v}[0] = 0": lambda v, o: v.__setitem__(0, 0),
    "{v}[0] = {o}[-1]": lambda v, o: v.__setitem__(0, o[-1]),
    "{v}[1:] = {o}[:-1].clone()": lambda v, o: v.__setitem__(slice(1, None), o[:-1].clone()),
    "{v}[..., ::2] *= 3": lambda v, o: v[..., ::2].mul_(3),
    "{v}[[0, -1]] = 1": lambda v, o: v.__setitem__([0, v.shape[0] - 1], 1),
    "{v}[mask] = 0": lambda v, o: v.__setitem__(_mask(v), 0),
    "{v}.fill_diagonal_(0.5)": lambda v, o: v.fill_diagonal_(0.5),
    "{v}.diagonal().mul_(2)": lambda v, o: v.diagonal().mul_(2),
    "{v}.index_add_(0, [0], {o}[:1] * 1)": lambda v, o: v.index_add_(0, torch.tensor([0]), o[:1] * 1),
    "{v}.index_fill_(0, [1], 2)": lambda v, o: v.index_fill_(0, torch.tensor([1]), 2),
    "{v}.tril_()": lambda v, o: v.tril_(),
    "{v}.cumsum_(0)": lambda v, o: v.cumsum_(0),
    "{v}.pow_(2)": lambda v, o: v.pow_(2),
    "{v}.view(-1)[::3].mul_(2)": lambda v, o: v.view(-1)[::3].mul_(2),
    "{v}.as_strided((2, 2), (3, 2), 1).mul_(2)": lambda v, o: v.as_strided((2, 2), (3, 2), 1).mul_(2),
    "{v}.mT.add_({o}.mT)": lambda v, o: v.mT.add_(o.mT),
    "{v}.unsqueeze_(0)": lambda v, o: v.unsqueeze_(0),
    "{v}.squeeze_(0)": lambda v, o: v.squeeze_(0),
    "{v}.transpose_(0, -1)": lambda v, o: v.transpose_(0, -1),
    "{v}.detach().mul_(0.5)": lambda v, o: v.detach().mul_(0.5),
    "{v}.data.add_(0.5)": lambda v, o: v.data.add_(0.5),
    "no_grad: {v}.mul_(0.5)": lambda v, o: _without(lambda: v.mul_(0.5)),
    "no_grad: {v}.copy_({o})": lambda v, o: _without(lambda: v.copy_(o)),
    "{v}.detach_()": lambda v, o: v.detach_(),
    "ids": lambda v, o: _by_ids(v),
}


def _without(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return run()


def _mask(v: torch.Tensor) -> torch.Tensor:
    """By position: comparing values would make programs discontinuous."""
    return (torch.arange(v.numel()) % 3 == 0).view(v.shape)


def _by_ids(v: torch.Tensor) -> object:
    """An integer tensor, written to, then indexed by."""
    ids = torch.zeros(2, dtype=torch.int64)
    ids[1] += v.shape[0] - 1
    ids.view(2, 1)[0].add_(1).sub_(1)
    return v.index_copy_(0, ids, v[ids].detach() * 2) if v.shape[0] > 1 else v.mul_(1)


def program(seed: int, length: int = 7) -> tuple[Program, torch.Tensor]:
    """A program of that many steps that runs, and its input."""
    rng = Random(seed)
    rows, columns = rng.choice([(4, 4), (3, 4), (2, 6), (4, 3)])
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=F64)
    steps: list[Step] = [("{v}.clone()".format(v="v0"), lambda values: values[0].clone())]
    tried = 0
    while len(steps) < length and tried < 60:
        tried += 1
        step = _step(rng, Program(steps, []).values(x))
        if step is not None and _runs(Program([*steps, step], []), x):
            steps.append(step)
    count = len(Program(steps, []).values(x))
    weights = [0.0, *(rng.choice([0.0, 0.5, 1.0]) for _ in range(count - 2)), 1.0]
    return Program(steps, weights), x


def _runs(candidate: Program, x: torch.Tensor) -> bool:
    try:
        values = candidate.values(x.clone())
    except (RuntimeError, IndexError):
        return False
    total = sum(float(v.abs().sum()) for v in values)
    return total < 1e4 and max(v.numel() for v in values) <= 64


def _within(value: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether a view has only what the value has."""
    places = torch.arange(value.untyped_storage().nbytes() // value.element_size())
    own = places.as_strided(value.shape, value.stride(), value.storage_offset())
    try:
        return bool(torch.isin(view(own), own).all())
    except RuntimeError:  # outside of the memory
        return False


def _crosses(read: torch.Tensor, written: torch.Tensor) -> bool:
    """Whether two tensors of one shape share memory, but not each element with the same one."""
    if read.untyped_storage().data_ptr() != written.untyped_storage().data_ptr():
        return False
    places = torch.arange(read.untyped_storage().nbytes() // read.element_size())
    views = (places.as_strided(v.shape, v.stride(), v.storage_offset()) for v in (read, written))
    mine, theirs = (view.flatten().tolist() for view in views)
    return mine != theirs and not set(mine).isdisjoint(theirs)


def _step(rng: Random, values: Values) -> Step | None:
    i = rng.choice([len(values) - 1, rng.randrange(len(values))])
    alike = [j for j, v in enumerate(values) if (v.shape, v.dtype) == (values[i].shape, values[i].dtype)]
    j = rng.choice(alike)
    kind = rng.choices(("make", "view", "stop", "write"), (2, 3, 2, 6))[0]
    named = {"v": f"v{i}", "o": f"v{j}"}
    if kind == "make":
        text, make = rng.choice(list(MAKES.items()))
        return text.format(**named), lambda values: make(values[i], values[j])
    given = values[0].untyped_storage().data_ptr()
    mine = values[i].untyped_storage().data_ptr() != given
    if kind == "view":
        text, view = rng.choice(list(VIEWS.items()))
        # The memory around an argument is not the function's; of memory around a view torch gives no
        # gradient, where the library does.
        if "as_strided" in text and not (mine and _within(values[i], view)):
            return None
        return text.format(**named), lambda values: view(values[i])
    if kind == "stop":
        text, stop = rng.choice(list(STOPS.items()))
        return text.format(**named), lambda values: stop(values[i])
    if not mine:
        return None
    text, write = rng.choice(list(WRITES.items()))
    if "as_strided" in text and not _within(values[i], lambda v: v.as_strided((2, 2), (3, 2), 1)):
        return None
    # Of memory that is read where it is written, in another order, torch makes what its loops happen to:
    # of [[1, 2], [3, 4]] by `v.mT.copy_(v)`, with gaps, so that it does not refuse it, [[1, 3], [3, 4]].
    if "{o}" in text and _crosses(values[j], values[i]):
        return None

    def run(values: Values) -> None:
        write(values[i], values[j])

    return f"!{text.format(**named)}", run

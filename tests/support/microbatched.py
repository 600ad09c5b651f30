"""Functions of a batch, and the ways in which they are accumulated and differentiated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import optree
import torch
import torch.nn.functional as F
from any_size import fuse

from torchard import Mesh, P, accumulate, checkpoint, jit, random, shard

__all__ = ["BATCH", "CASES", "DERIVED", "STACKS", "Case", "batch_of", "sum_of"]

F64 = torch.float64
ROWS, LENGTH, WIDTH, WORDS = 12, 6, 8, 11
BATCH = (None, 0, 0)
DP = Mesh({"dp": 2}, virtual=True)
DP_TP = Mesh({"dp": 2, "tp": 2}, virtual=True)


@dataclass(frozen=True)
class Case:
    """A loss of parameters, inputs and labels, and arguments for it."""

    loss: Callable[..., Any]
    args: tuple[Any, ...]


def draw(seed: int, *shape: int) -> torch.Tensor:
    return random.normal(random.key(seed), shape, dtype=F64) * 0.3


def mlp(p: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ p["up"] + p["bias"])
    return ((hidden @ p["down"] - y) ** 2).mean()


def gpt_logits(p: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    x = F.embedding(ids, p["embedding"]) + p["positions"]
    for _ in range(2):
        h = F.layer_norm(x, (WIDTH,), p["gain"], p["shift"])
        heads = (h @ p["qkv"]).unflatten(-1, (3, 2, WIDTH // 2)).movedim(-3, 0)
        q, k, v = heads.transpose(-3, -2).unbind(0)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        scores = (q @ k.mT / 2).masked_fill(later, -torch.inf)
        x = x + (scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2) @ p["out"]
        h = F.layer_norm(x, (WIDTH,), p["gain"], p["shift"])
        x = x + F.gelu(h @ p["up"], approximate="tanh") @ p["down"]
    return F.layer_norm(x, (WIDTH,), p["gain"], p["shift"]) @ p["embedding"].T


def gpt(p: dict[str, torch.Tensor], ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Tied embeddings; some labels are ignored, not as many in each slice."""
    return F.cross_entropy(gpt_logits(p, ids).flatten(0, 1), labels.flatten(), ignore_index=-1)


def weighted(p: dict[str, torch.Tensor], ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.1, 1, WORDS, dtype=F64)
    logits = gpt_logits(p, ids).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), weight, ignore_index=-1, label_smoothing=0.1)


def masked(p: dict[str, torch.Tensor], ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(gpt_logits(p, ids).transpose(1, 2), labels, ignore_index=-1, reduction="none")
    return (each * (labels >= 0)).sum() / (labels >= 0).sum() + 0.01 * p["embedding"].square().sum()


def dropped(p: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ p["up"])
    mask = random.bernoulli(random.key(7), 0.4, hidden.shape)
    return ((hidden.masked_fill(mask, 0) @ p["down"] - y) ** 2).mean()


def images(p: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.unflatten(1, (2, 3, -1))
    h = F.silu(F.group_norm(F.conv2d(x, p["kernel"], padding=1), 2))
    return (F.avg_pool2d(h, 2).flatten(1) @ p["head"] - y.sum(1, keepdim=True)).abs().mean()


def complex_waves(p: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    spectrum = torch.fft.fft(x.to(torch.complex128), dim=1) * torch.complex(p["re"], p["im"])
    return spectrum.abs().square().sum() + spectrum.real.logsumexp(1).mean() + y.mean()


_GPT = {
    "embedding": draw(0, WORDS, WIDTH),
    "positions": draw(1, LENGTH, WIDTH),
    "qkv": draw(2, WIDTH, 3 * WIDTH),
    "out": draw(3, WIDTH, WIDTH),
    "up": draw(4, WIDTH, 4 * WIDTH),
    "down": draw(5, 4 * WIDTH, WIDTH),
    "gain": 1 + draw(6, WIDTH),
    "shift": draw(7, WIDTH),
}
_IDS = random.randint(random.key(8), (ROWS, LENGTH), 0, WORDS)
_LABELS = random.randint(random.key(9), (ROWS, LENGTH), -1, WORDS)
_LABELS[:4] = -1  # a whole slice without labels
_X, _Y = draw(10, ROWS, WIDTH), draw(11, ROWS, 2)
_MLP = {"up": draw(12, WIDTH, 16), "bias": draw(13, 16), "down": draw(14, 16, 2)}
_IMAGES = {"kernel": draw(15, 4, 2, 3, 3), "head": draw(16, 4 * 2, 1)}

CASES = {
    "mlp": Case(mlp, (_MLP, _X, _Y)),
    "gpt": Case(gpt, (_GPT, _IDS, _LABELS)),
    "weighted": Case(weighted, (_GPT, _IDS, _LABELS)),
    "masked": Case(masked, (_GPT, _IDS, _LABELS)),
    "dropout": Case(dropped, (_MLP, _X, _Y)),
    "images": Case(images, (_IMAGES, draw(17, ROWS, 24), _Y)),
    "complex": Case(complex_waves, ({"re": draw(18, WIDTH), "im": draw(19, WIDTH)}, _X, _Y)),
}


def _split(fn: Callable[..., Any]) -> Any:
    return shard(fn, DP, in_specs=(None, P("dp"), P("dp")), out_specs=P())


def _both(fn: Callable[..., Any]) -> Any:
    return shard(fn, DP_TP, in_specs=(None, P("dp"), P("dp")), out_specs=P())


# Each takes a function and a number of slices.
STACKS: dict[str, Callable[[Any, int], Any]] = {
    "alone": lambda f, n: accumulate(f, n, batch=BATCH),
    "shard outside": lambda f, n: _split(accumulate(f, n, batch=BATCH)),
    "shard inside": lambda f, n: accumulate(_split(f), n, batch=BATCH),
    "two axes": lambda f, n: _both(accumulate(f, n, batch=BATCH)),
    "checkpoint outside": lambda f, n: checkpoint(accumulate(f, n, batch=BATCH)),
    "checkpoint inside": lambda f, n: accumulate(checkpoint(f), n, batch=BATCH),
    "fuse outside": lambda f, n: fuse(accumulate(f, n, batch=BATCH)),
    "fuse inside": lambda f, n: accumulate(fuse(f), n, batch=BATCH),
    "jit": lambda f, n: jit(accumulate(f, n, batch=BATCH), backend="eager"),
    "nested": lambda f, n: accumulate(accumulate(f, n, batch=BATCH), 2, batch=BATCH),
    "in a trace": lambda f, n: jit(lambda *args: accumulate(f, n, batch=BATCH)(*args), backend="eager"),
}


def _norm(tree: Any) -> torch.Tensor:
    leaves = optree.tree_leaves(tree)
    return sum((leaf.square().sum() for leaf in leaves), torch.zeros((), dtype=F64))


def _batched(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(p: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        xs, ys = torch.stack([x, x.flip(0)]), torch.stack([y, y.flip(0)])
        return torch.vmap(fn, in_dims=(None, 0, 0))(p, xs, ys)

    return run


# Each takes a stack's transform and a loss: derivatives outside, inside, and both.
DERIVED: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "value": lambda t, f: t(f),
    "grad outside": lambda t, f: torch.func.grad(t(f)),
    "grad inside": lambda t, f: t(torch.func.grad(f)),
    "value and grad inside": lambda t, f: t(torch.func.grad_and_value(f)),
    "jvp": lambda t, f: lambda p, *xs: torch.func.jvp(lambda p: t(f)(p, *xs), (p,), (p,)),
    "hessian-vector product": lambda t, f: (
        lambda p, *xs: torch.func.jvp(lambda p: torch.func.grad(t(f))(p, *xs), (p,), (p,))[1]
    ),
    "gradient of a gradient": lambda t, f: (
        torch.func.grad(lambda p, *xs: _norm(t(torch.func.grad(f))(p, *xs)))
    ),
    "vmap": lambda t, f: _batched(t(f)),
    "vmap of grad": lambda t, f: _batched(torch.func.grad(t(f))),
}


# -- random programs -----------------------------------------------------------------------------------


def sum_of(program: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """A number that depends on all floating results."""
    floats = [v for v in optree.tree_leaves(program(*inputs)) if v.is_floating_point()]
    return sum(((v * v + v).sum(dtype=F64) for v in floats), torch.zeros((), dtype=F64))


def batch_of(inputs: tuple[torch.Tensor, ...], draw: Random) -> tuple[int, tuple[int | None, ...]] | None:
    """The number of slices, and the dim of some inputs that have the same size there."""
    arrays = [(i, x) for i, x in enumerate(inputs) if x.dtype != torch.int64 or x.shape != (2,)]  # no key
    dims = [(i, d, n) for i, x in arrays for d, n in enumerate(x.shape) if n > 1]
    if not dims:
        return None
    _, _, size = draw.choice(dims)
    batch: list[int | None] = [None] * len(inputs)
    for i, d, n in draw.sample(dims, len(dims)):
        if n == size and (draw.random() < 0.7 or batch == [None] * len(inputs)):
            batch[i] = d
    return draw.choice([k for k in range(2, size + 1) if size % k == 0]), tuple(batch)

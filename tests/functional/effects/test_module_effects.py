"""Modules with effects: what is returned is the plain module's, whatever is stacked and asked for.

Truth is the module itself on one device, run once, with its buffers changed in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.nn.utils import spectral_norm as hooked_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._pytree import tree_map

from torchard import Mesh, MeshTensor, P, checkpoint, functionalize, jit, shard

F64 = torch.float64
BATCH = 5


# -- modules ----------------------------------------------------------------------------------------


class Ema(nn.Module):
    """Moving averages, written in the ways that people write them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.linspace(-1, 1, 6))
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            getattr(self, self.how)(x)
        return x - self.mean

    def no_grad(self, x: Tensor) -> None:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.seen += 1

    def detached(self, x: Tensor) -> None:
        self.mean.mul_(0.8).add_(0.2 * x.detach().mean(0))
        self.seen.add_(len(x))

    def assigned(self, x: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        self.seen = self.seen + 1

    def copied(self, x: Tensor) -> None:
        with torch.no_grad():
            self.mean.copy_(0.9 * self.mean + 0.1 * x.mean(0))

    def by_rows(self, x: Tensor) -> None:
        with torch.no_grad():
            self.mean[::2] = x.mean(0)[::2]
            self.mean[1:3].mul_(0.5)
        self.seen[...] = self.seen * 2

    def data(self, x: Tensor) -> None:
        self.mean.data.mul_(0.9).add_(0.1 * x.data.mean(0))

    def unread(self, x: Tensor) -> None:
        """What the output reads is the old mean."""
        old = self.mean.clone()
        with torch.no_grad():
            self.mean += x.mean(0)
        self.mean = self.mean + 0 * old

    def gradient(self, x: Tensor) -> None:
        """Nothing stops the gradient: torch lets it through."""
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)


class Codebook(nn.Module):
    """VQ-VAE's, with moving averages of clusters (van den Oord et al. 2017, appendix A.1)."""

    def __init__(self, data: bool) -> None:
        super().__init__()
        self.data = data
        self.register_buffer("codes", torch.linspace(-2, 2, 24).view(4, 6).sin())
        self.register_buffer("sizes", torch.ones(4))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
        chosen = torch.eye(4, dtype=x.dtype)[nearest]
        quantised = F.embedding(nearest, self.codes)
        if self.training:
            with torch.no_grad():
                if self.data:
                    self.sizes.data.mul_(0.8).add_(chosen.sum(0), alpha=0.2)
                    self.sums.data.mul_(0.8).add_(chosen.t() @ x.data, alpha=0.2)
                    self.codes.data.copy_(self.sums / (self.sizes[:, None] + 1e-5))
                else:
                    self.sizes.mul_(0.8).add_(chosen.sum(0), alpha=0.2)
                    self.sums.mul_(0.8).add_(chosen.t() @ x, alpha=0.2)
                    self.codes.copy_(self.sums / (self.sizes[:, None] + 1e-5))
        return x + (quantised - x).detach()


class Recurrent(nn.Module):
    """Its state is a buffer; the gradient goes through it, inside of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)
        self.register_buffer("state", torch.linspace(0, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            self.state = torch.tanh(self.cell(self.state) + x.mean(0))
        return x * self.state


class Shared(nn.Module):
    """One buffer of two modules, which both write to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Ema("no_grad"), Ema("detached")
        self.second.mean = self.first.mean

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).sin())


class Twice(nn.Module):
    """One module called twice: its second call sees what the first one wrote."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + self.part(2 * x.sin())


def image(*shape: int) -> Callable[[nn.Module], nn.Module]:
    return lambda norm: nn.Sequential(nn.Linear(6, 12), nn.Unflatten(1, shape), norm, nn.Flatten(1))


NORMS: dict[str, Callable[[], nn.Module]] = {}
for _affine in (True, False):
    for _momentum in (0.3, None):
        _how = {"affine": _affine, "momentum": _momentum}
        _name = f"{'affine' if _affine else 'plain'} {_momentum}"
        NORMS[f"BatchNorm1d {_name}"] = lambda how=_how: nn.BatchNorm1d(6, **how)
        NORMS[f"BatchNorm1d of lines {_name}"] = lambda how=_how: image(3, 4)(
            nn.BatchNorm1d(3, **how)
        )
        NORMS[f"BatchNorm2d {_name}"] = lambda how=_how: image(3, 2, 2)(nn.BatchNorm2d(3, **how))
        NORMS[f"BatchNorm3d {_name}"] = lambda how=_how: image(2, 1, 3, 2)(nn.BatchNorm3d(2, **how))
NORMS |= {
    "BatchNorm1d untracked": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "BatchNorm2d untracked": lambda: image(3, 2, 2)(nn.BatchNorm2d(3, track_running_stats=False)),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(6),
    "InstanceNorm1d": lambda: image(3, 4)(nn.InstanceNorm1d(3, track_running_stats=True)),
    "InstanceNorm2d": lambda: image(3, 2, 2)(
        nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
    ),
    "InstanceNorm3d": lambda: image(1, 3, 2, 2)(
        nn.InstanceNorm3d(1, momentum=None, track_running_stats=True)
    ),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: spectral_norm(nn.Linear(6, 6)),
    "spectral_norm of a convolution": lambda: image(3, 2, 2)(spectral_norm(nn.Conv2d(3, 3, 2))),
    "hooked spectral_norm": lambda: hooked_spectral_norm(nn.Linear(6, 6)),
    "several steps of spectral_norm": lambda: spectral_norm(nn.Linear(6, 4), n_power_iterations=3),
    **{
        f"ema {how}": lambda how=how: Ema(how)
        for how in (
            *("no_grad", "detached", "assigned", "copied", "by_rows"),
            *("data", "unread", "gradient"),
        )
    },
    "codebook": lambda: Codebook(data=False),
    "codebook by data": lambda: Codebook(data=True),
    "recurrent": Recurrent,
    "shared": Shared,
    "a batch norm twice": lambda: Twice(nn.BatchNorm1d(6, momentum=0.2)),
    "an average twice": lambda: Twice(Ema("no_grad")),
    "a codebook twice": lambda: Twice(Codebook(data=False)),
}
MODULES = NORMS | OTHERS


def made(name: str, train: bool) -> nn.Module:
    """The module between two layers, its statistics off their defaults."""
    torch.manual_seed(len(name))
    module = nn.Sequential(nn.Linear(4, 6), MODULES[name](), nn.Flatten(1), nn.Tanh()).double()
    for key, buffer in module.named_buffers():
        if "running" in key:
            buffer.copy_(torch.rand_like(buffer) + 0.5)
        if "num_batches" in key:
            buffer.fill_(2)
    return module.train(train)


# -- what is asked of them --------------------------------------------------------------------------

Tree = Mapping[str, Tensor]


def number(out: Tensor) -> Tensor:
    return (
        out * torch.linspace(-1, 2, out.shape[-1], dtype=out.dtype)
    ).sin().sum() + out.square().mean()


def plain(module: nn.Module, x: Tensor, part: str) -> Any:
    """The module itself: its buffers are changed in place, its gradients are autograd's."""
    module, x = copy.deepcopy(module), x.clone().requires_grad_()
    out = module(x)
    loss = number(out)
    after = {k: b.detach() for k, b in module.named_buffers()}
    returned = {"loss": loss.detach(), "loss and buffers": (loss.detach(), after), "buffers": after}
    if part != "gradients":
        return returned[part]
    given = dict(module.named_parameters())
    found = torch.autograd.grad(loss, [*given.values(), x], materialize_grads=True)
    return (dict(zip(given, found, strict=False)), found[-1]), (out.detach(), after)


def asked(fn: Any, part: str) -> Callable[..., Any]:
    """Of parameters, buffers and input."""

    def run(p: Tree, b: Tree, x: Tensor) -> Any:
        out, after = fn(p, x, buffers=b)
        loss = number(out)
        return {
            "loss": loss,
            "loss and buffers": (loss, after),
            "buffers": after,
            "gradients": (loss, (out, after)),
        }[part]

    return run


PARTS = ["loss", "loss and buffers", "buffers", "gradients"]


def split(f: Any, size: int) -> Any:
    mesh = Mesh({"dp": size}, virtual=True)
    return shard(f, mesh, in_specs=(P(), P(), P("dp")))


def fully(f: Any) -> Any:
    """Parameters are split, too."""
    mesh = Mesh({"dp": 2, "tp": 2}, virtual=True)
    return shard(f, mesh, in_specs=(P("tp"), P(), P("dp", "tp")))


def eager(f: Any) -> Any:
    return jit(f, backend="eager")


STACKS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda f: f,
    "jit": eager,
    "shard evenly": lambda f: split(f, 5),
    "shard unevenly": lambda f: split(f, 2),
    "checkpoint": checkpoint,
    "checkpoint where": lambda f: checkpoint(f, where="*"),
    "checkpoint one": lambda f: checkpoint(f, where="1"),
    "jit of checkpoint": lambda f: eager(checkpoint(f)),
    "shard of checkpoint": lambda f: split(checkpoint(f), 2),
    "shard of checkpoint where": lambda f: split(checkpoint(f, where="*"), 2),
    "checkpoint of shard": lambda f: checkpoint(split(f, 3)),
    "jit of shard": lambda f: eager(split(f, 2)),
    "shard of jit": lambda f: split(eager(f), 2),
    "checkpoint of checkpoint": lambda f: checkpoint(checkpoint(f, where="1")),
    "jit of shard of checkpoint": lambda f: eager(split(checkpoint(f, where="1"), 3)),
    "shard fully": fully,
}


def whole(value: Any) -> Any:
    if isinstance(value, (tuple, dict)):
        items = {
            k: whole(v) for k, v in (value.items() if isinstance(value, dict) else enumerate(value))
        }
        return items if isinstance(value, dict) else tuple(items.values())
    return value.full() if isinstance(value, MeshTensor) else value


def check(name: str, train: bool, stack: str, part: str, inside: bool) -> None:
    module = made(name, train)
    fn, params = functionalize(module)
    x = torch.randn(BATCH, 4, dtype=F64, generator=torch.Generator().manual_seed(7))
    f = asked(fn, part)
    before = {k: b.clone() for k, b in fn.buffers.items()}
    if part == "gradients":
        wrap = STACKS[stack]
        grads = lambda g: grad(g, (0, 2), has_aux=True)  # noqa: E731
        f = wrap(grads(f)) if inside else grads(wrap(f))
    else:
        f = STACKS[stack](f)
    have = whole(f(params, fn.buffers, x))
    torch.testing.assert_close(have, plain(module, x, part), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(fn.buffers, before, rtol=0, atol=0)


CASES = [
    (name, train, stack, part, inside)
    for name in MODULES
    for train in (True, False)
    for stack in STACKS
    for part in PARTS
    if part != "buffers" or (train and "untracked" not in name)
    # The buffers alone are computed by a hook, ahead of the module's forward: in no scope.
    if not (part == "buffers" and "hooked" in name and "where" in stack)
    for inside in ((True, False) if part == "gradients" else (False,))
]


@given(st.sampled_from(CASES))
@settings(max_examples=examples(ci=10, explore=len(CASES)), deadline=None)
def test_modules_with_effects(case: tuple[str, bool, str, str, bool]) -> None:
    check(*case)


# -- other derivatives ------------------------------------------------------------------------------


def with_state(module: nn.Module, params: Tree, buffers: Tree) -> nn.Module:
    """A copy that has these parameters and buffers."""
    module = copy.deepcopy(module)
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensor.data.copy_({**params, **buffers}[key])
    return module


def of_some(rng: Random, tree: Tree) -> Tree:
    noise = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return {
        k: v + 0.1 * torch.rand(v.shape, generator=noise, dtype=F64)
        if v.is_floating_point()
        else v + 1
        for k, v in tree.items()
    }


def mapped(name: str, train: bool, stack: str, part: str, inside: bool, seed: int) -> None:
    """vmap over parameters, buffers, inputs, whichever: as a loop over modules."""
    rng, module = Random(seed), made(name, train)
    fn, params = functionalize(module)
    given: list[Tree] = [params, fn.buffers, {"x": torch.rand(BATCH, 4, dtype=F64)}]
    dims = [rng.choice([0, None]) for _ in given]
    dims[rng.choice([0, 2])] = 0
    copies = [[of_some(rng, tree) for _ in range(2)] for tree in given]
    each = [c if d == 0 else [g, g] for c, d, g in zip(copies, dims, given, strict=True)]
    stacked = [
        g if d is None else tree_map(lambda *v: torch.stack(v), *c)
        for c, d, g in zip(copies, dims, given, strict=True)
    ]
    f = asked(fn, part)
    if part == "gradients":
        grads = lambda g: grad(g, (0, 2), has_aux=True)  # noqa: E731
        f = STACKS[stack](grads(f)) if inside else grads(STACKS[stack](f))
    else:
        f = STACKS[stack](f)
    have = whole(vmap(lambda p, b, x: f(p, b, x["x"]), tuple(dims))(*stacked))
    want = [plain(with_state(module, p, b), x["x"], part) for p, b, x in zip(*each, strict=True)]
    torch.testing.assert_close(
        have, tree_map(lambda *v: torch.stack(v), *want), rtol=1e-8, atol=1e-8
    )


def pushed(name: str, train: bool, stack: str, seed: int) -> None:
    """jvp of the loss: as torch's, of a functional call of the module."""
    rng, module = Random(seed), made(name, train)
    fn, params = functionalize(module)
    x, buffers = torch.rand(BATCH, 4, dtype=F64), fn.buffers
    along = of_some(rng, params), of_some(rng, {"": x})[""]

    def truth(p: Tree, x: Tensor) -> Tensor:
        values = {**p, **{k: b.clone() for k, b in buffers.items()}}
        return number(torch.func.functional_call(module, values, (x,)))

    f = STACKS[stack](asked(fn, "loss"))
    have = jvp(lambda p, x: f(p, buffers, x), (params, x), along)
    torch.testing.assert_close(whole(have), jvp(truth, (params, x), along), rtol=1e-8, atol=1e-8)


# torch has no rule for vmap and no forward mode for what spectral_norm writes by out= in training.
TRACED = [
    case for case in CASES if case[2] != "plain" and not ("spectral_norm" in case[0] and case[1])
]


@given(st.sampled_from(TRACED), st.integers(0, 1 << 30))
@settings(max_examples=examples(ci=3, explore=2000), deadline=None)
def test_mapped(case: tuple[str, bool, str, str, bool], seed: int) -> None:
    mapped(*case, seed)


@given(st.sampled_from(TRACED), st.integers(0, 1 << 30))
@settings(max_examples=examples(ci=3, explore=1000), deadline=None)
def test_pushed_forward(case: tuple[str, bool, str, str, bool], seed: int) -> None:
    name, train, stack, *_ = case
    pushed(name, train, stack, seed)


# -- trained ----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(self.two(F.relu(self.first(self.one(x))))))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Conv2d(2, 4, 3), nn.Sequential(Block(), Block())
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.stem(x)).mean((2, 3))


class Fourier(nn.Module):
    """A layer of a Fourier operator beside one of bounded slope, as a discriminator's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            spectral_norm(nn.Conv2d(2, 2, 3)), nn.InstanceNorm2d(2, track_running_stats=True)
        )
        self.last = hooked_spectral_norm(nn.Linear(6, 1))
        self.double()
        self.weight = nn.Parameter(torch.randn(2, 2, 3, dtype=torch.cdouble) / 4)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x)
        mixed = torch.zeros_like(modes)
        mixed[..., :3] = torch.einsum("bchm,cdm->bdhm", modes[..., :3], self.weight)
        x = torch.fft.irfft(mixed, n=x.shape[-1]) + x
        return self.last(F.leaky_relu(self.layers(x)).mean(1))


@pytest.mark.parametrize("net", [Residual, Fourier])
def test_trained_as_on_one_device(net: type[nn.Module]) -> None:
    """Three steps, recomputed layer by layer, over a split batch."""
    torch.manual_seed(0)
    module = net()
    fn, params = functionalize(copy.deepcopy(module))
    batches = torch.randn(3, 5, 2, 8, 8, dtype=F64)

    def loss(p: Tree, b: Tree, x: Tensor) -> Any:
        out, after = fn(p, x, buffers=b)
        return number(out), after

    def step(p: Tree, b: Tree, x: Tensor) -> Any:
        slopes, after = grad(checkpoint(loss, where="layers.*"), has_aux=True)(p, b, x)
        return {k: p[k] - 0.1 * slopes[k] for k in p}, after

    mesh = Mesh({"dp": 2}, virtual=True)
    run, state = (
        shard(step, mesh, in_specs=(P(), P(), P("dp")), out_specs=P()),
        (params, fn.buffers),
    )
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for x in batches:
        state = run(*state, x)
        optimizer.zero_grad()
        number(module(x)).backward()
        optimizer.step()
    want = dict(module.named_parameters()), dict(module.named_buffers())
    torch.testing.assert_close(whole(state), want, rtol=1e-8, atol=1e-8)

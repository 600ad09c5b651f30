"""Tensors of stacked layers that are read outside of the loop: values and gradients are the module's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad

from torchard import LoopError, Mesh, P, PurityError, checkpoint, functionalize, jit, place, shard

DEPTH, WIDTH = 3, 4
X = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)
        self.others: Any = ()

    def forward(self, x: Tensor) -> Tensor:
        if self.others:
            return self.linear(x) + self.others[0].linear(x)
        return torch.tanh(self.linear(x)) * self.scale


class Net(nn.Module):
    """A forward of the test's, given the module, its layers and x."""

    def __init__(self, forward: Callable[..., Any], layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(DEPTH))
        self.reads = forward

    def forward(self, x: Tensor) -> Any:
        return self.reads(self, list(self.layers), x)

    def loop(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def weight(layer: Any) -> Tensor:
    return layer.linear.weight


def under_no_grad(net: Any, layers: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        first, norm = weight(layers[0]), weight(layers[1]).norm()
    return net.loop(x) @ first / norm


def between(net: Any, layers: Any, x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=x.dtype)
    for layer in layers:
        total = total + layer.linear.bias.square().sum()
        x = layer(x)
    return x * total


def twice(net: Any, layers: Any, x: Tensor) -> Tensor:
    return net.loop(net.loop(x) @ weight(layers[2])) * weight(layers[0]).mean()


def penalty(net: Any, layers: Any, x: Tensor) -> Any:
    return net.loop(x), sum(p.square().sum() for p in net.layers.parameters())


def exchanged(net: Any, layers: Any, x: Tensor) -> Tensor:
    """The first layer's weights with other numbers, and back."""
    table = dict(layers[1].named_parameters())
    return net.loop(x) + functional_call(layers[1].linear, {"weight": table["linear.bias"].diag()}, x)


def dicts(net: Any, layers: Any, x: Tensor) -> Tensor:
    """The tables themselves, by what dicts have."""
    table = layers[1].linear._parameters
    copies = [dict(table), {**table}, table | {}, {} | table, table.copy()]
    copies[0].update(table)
    rows = [each["weight"] for each in copies] + [table.setdefault("weight", None)]
    return net.loop(x) * torch.stack(rows).square().sum((1, 2)).cos().sum()


READS: dict[str, Any] = {
    "matmul": lambda net, layers, x: net.loop(x) @ weight(layers[0]),
    "first": lambda net, layers, x: net.loop(F.linear(x, weight(layers[-1]), layers[0].linear.bias)),
    "addmm": lambda net, layers, x: torch.addmm(layers[0].linear.bias, net.loop(x), weight(layers[1])),
    "einsum": lambda net, layers, x: torch.einsum("bi,ij->bj", net.loop(x), weight(layers[1])),
    "embedding": lambda net, layers, x: net.loop(x) + F.embedding(torch.arange(4), weight(layers[2])),
    "norms": lambda net, layers, x: net.loop(x) / sum(weight(each).norm() for each in layers),
    "layer norm": lambda net, layers, x: F.layer_norm(net.loop(x), (WIDTH,), layers[1].linear.bias),
    "a submodule": lambda net, layers, x: layers[1].linear(net.loop(x)),
    "a buffer": lambda net, layers, x: net.loop(x) * layers[1].scale,
    "dtype and device": lambda net, layers, x: net.loop(x.float().to(weight(layers[0]))),
    "device": lambda net, layers, x: net.loop(x.to(next(net.layers.parameters()).device)),
    "a size": lambda net, layers, x: net.loop(x) / weight(layers[0]).numel(),
    "all of them": penalty,
    "a vector": lambda net, layers, x: net.loop(x) * nn.utils.parameters_to_vector(
        net.layers.parameters()).square().sum(),
    "a state dict": lambda net, layers, x: net.loop(x) + net.state_dict(keep_vars=True)[
        "layers.1.linear.weight"],
    "by path": lambda net, layers, x: net.loop(x) @ net.get_submodule("layers.2.linear").weight,
    "named buffers": lambda net, layers, x: net.loop(x) * dict(net.named_buffers())["layers.0.scale"],
    "under no_grad": under_no_grad,
    "between layers": between,
    "two rounds": twice,
    "called with others": exchanged,
    "as dicts": dicts,
    "no loop": lambda net, layers, x: x @ weight(layers[1]),
}  # fmt: skip


def made(reads: Any, layer: type[nn.Module] = Layer) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(1)
    module = Net(reads, layer).double()
    return *functionalize(module), *functionalize(module, stacked="layers")


def loss(fn: Any) -> Any:
    def run(params: Any, x: Tensor) -> Tensor:
        out = fn(params, x)
        return sum(each.sin().sum() for each in (out if isinstance(out, tuple) else (out,)))

    return run


@pytest.mark.parametrize("case", READS)
def test_reads_are_the_modules(case: str) -> None:
    """Values, and gradients with respect to every row, plain, traced, checkpointed and sharded."""
    fn, params, stacked, rows = made(READS[case])
    torch.testing.assert_close(stacked(rows, X), fn(params, X), rtol=1e-12, atol=1e-12)
    want = stacked.stack(grad(loss(fn))(params, X))
    mesh = Mesh({"dp": 2}, virtual=True)
    runs = (
        grad(loss(stacked)),
        jit(grad(loss(stacked)), backend="eager"),
        grad(checkpoint(loss(stacked))),
        shard(grad(loss(stacked)), mesh),
    )
    for run, x in zip(runs, (X, X, X, place(X, mesh, P("dp"))), strict=True):
        for name, value in run(rows, x).items():
            value = value.full() if hasattr(value, "full") else value
            torch.testing.assert_close(value, want[name], rtol=1e-10, atol=1e-10, msg=name)


def test_backward_reaches_the_stacks() -> None:
    fn, params, stacked, rows = made(READS["under no_grad"])
    rows = {k: v.clone().requires_grad_() for k, v in rows.items()}
    params = {k: v.clone().requires_grad_() for k, v in params.items()}
    loss(stacked)(rows, X).backward()
    loss(fn)(params, X).backward()
    for name, value in stacked.stack({k: v.grad for k, v in params.items()}).items():
        torch.testing.assert_close(rows[name].grad, value)


def test_numbers_of_a_row() -> None:
    """Outside of a trace, as for any module; a trace has no numbers."""
    fn, params, stacked, rows = made(lambda net, layers, x: net.loop(x) * float(layers[2].scale[0]))
    torch.testing.assert_close(stacked(rows, X), fn(params, X))
    with pytest.raises(PurityError, match="needs the value of a tensor"):
        jit(stacked, backend="eager")(rows, X)


# -- refusals ---------------------------------------------------------------------------------------


def writing(net: Any, layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
        layers[0].scale.add_(1)
    return x


def replacing(net: Any, layers: Any, x: Tensor) -> Tensor:
    layers[1].scale = layers[1].scale * 2
    return net.loop(x)


def replacing_after(net: Any, layers: Any, x: Tensor) -> Tensor:
    out = net.loop(x)
    layers[1].scale = out.sum(0)
    return out


def replacing_a_module(net: Any, layers: Any, x: Tensor) -> Tensor:
    layers[1].linear = layers[0].linear
    return net.loop(x)


def giving_weights(net: Any, layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = functional_call(layer, {"linear.weight": weight(layer) * 2}, x)
    return x


def hooking(net: Any, layers: Any, x: Tensor) -> Tensor:
    layers[1].linear.register_forward_hook(lambda m, args, out: out + 1)
    return net.loop(x)


class Hooking(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.register_forward_hook(lambda m, args, out: out + 1)
        return super().forward(x)


class Noting(Layer):
    """A list that all layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = SUMS

    def forward(self, x: Tensor) -> Tensor:
        self.sums.append(x.sum())
        return super().forward(x)


SUMS: list[Any] = []


def first_of_all(net: Any, layers: Any, x: Tensor) -> Tensor:
    return net.loop(x)


REFUSED: dict[str, tuple[Any, type[nn.Module], str]] = {
    "a write between": (writing, Layer, "is written to before layer 1"),
    "a buffer replaced": (replacing, Layer, "buffer 'scale' of layer 1 is replaced"),
    "a buffer replaced after": (replacing_after, Layer, "replaces 'scale' of layer 1"),
    "a module replaced": (replacing_a_module, Layer, r"a module of layers\.1 has changed"),
    "weights given": (giving_weights, Layer, "'weight' of layer 0 is replaced"),
    "hooks on layers": (hooking, Layer, r"layers\.1\.linear has the forward hook at .*_rows.py:"),
    "hooks in layers": (first_of_all, Hooking, "forward of a layer writes to a"),
    "a list of all": (first_of_all, Noting, "forward of a layer writes to a list that it holds"),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_changes_of_layers_are_refused(case: str, traced: bool) -> None:
    reads, layer, message = REFUSED[case]
    _, _, stacked, rows = made(reads, layer)
    run = jit(stacked, backend="eager") if traced else stacked
    for _ in range(2):
        with pytest.raises(LoopError, match=message) as refused:
            run(rows, X)
        assert str(refused.value).startswith("test_module_rows.py:")


@pytest.mark.parametrize("what", ["a layer", "the module", "the module, in a closure"])
def test_layers_that_reach_others_are_refused(what: str) -> None:
    """In the loop's body the first layer is whichever layer runs."""
    module = Net(first_of_all).double()
    for layer in module.layers:
        if what == "the module, in a closure":
            layer.others = lambda: module.layers
        else:
            layer.others = [module.layers[0] if what == "a layer" else module]
    stacked, rows = functionalize(module, stacked="layers")
    with pytest.raises(LoopError, match="reads its attribute 'others', which refers to layers of the li"):
        stacked(rows, X)

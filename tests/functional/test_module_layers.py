"""functionalize(stacked=...): equal to the module, whatever its loop hands on; others are refused."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp

from torchard import LoopError, checkpoint, functionalize, jit, random, trace
from torchard.functional.costs.flops import op_name
from torchard.functional.loops.call import loop_calls
from torchard.functional.programs.unrolled import has_loops, unrolled
from torchard.testing import equal

DEPTH, WIDTH = 4, 6
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Block(nn.Module):
    """A layer with a buffer, dropout, sizes that are left out, and a number of its own."""

    def __init__(self, number: int = 0, p: float = 0.5) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.number = nn.Dropout(p), number
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x)).view(*x.shape[:-1], 2, -1).transpose(-1, -2)
        y = torch.softmax(y, -1).transpose(-2, -1).reshape(*x.shape[:-1], -1)
        return x + self.dropout(torch.tanh(y * self.scale))


class Deep(nn.Module):
    """Layers in a list, between others; a forward of one's own is given what a test varies."""

    def __init__(self, block: Callable[[int], nn.Module], forward: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.layers = nn.ModuleList(map(block, range(DEPTH)))
        self.apply_layers = forward

    def forward(self, x: Tensor) -> Any:
        return self.apply_layers(self, self.first(x))


def handing_on(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x)
    return self.last(x)


def twice(self: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        for layer in self.layers:
            x = layer(x)
    return self.last(x)


def masked(self: Any, x: Tensor) -> Tensor:
    mask, state = x > 0, x.cumsum(0)
    for layer in self.layers:
        x, state, _ = layer(x, state, mask=mask, more={"scale": 2.0, "nothing": None})
    return self.last(x) + state


class Several(Block):
    """Two values are handed on, and one is only returned; others are the same for all layers."""

    def forward(self, x: Tensor, state: Tensor, *, mask: Tensor, more: Any) -> Any:  # type: ignore[override]
        y = super().forward(torch.where(mask, x, state))
        return y, state + y * more["scale"], y.sum()


def last_aside(self: Any, x: Tensor) -> Tensor:
    """Also returns what the last layer returns besides."""
    mask, state = x > 0, x
    for layer in self.layers:
        x, state, aside = layer(x, state, mask=mask, more={"scale": 1.0})
    return x * aside


MODELS: dict[str, tuple[Callable[[int], nn.Module], Any]] = {
    "one value": (Block, handing_on),
    "twice": (Block, twice),
    "several values": (Several, masked),
    "a result aside": (Several, last_aside),
    "a sequence": (lambda i: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Block(i)), handing_on),
}


def made(name: str, train: bool) -> tuple[Any, Any, Any, Any]:
    """The function and its parameters, and the same with stacked layers."""
    torch.manual_seed(1)
    module = Deep(*MODELS[name]).double().train(train)
    fn, params = functionalize(module)
    stacked, rows = functionalize(module, stacked="layers")
    return fn, params, stacked, rows


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_module(name: str, train: bool) -> None:
    """Values, gradients and tangents, plain and traced; dropouts draw the same masks."""
    fn, params, stacked, rows = made(name, train)
    key = random.key(3)

    def loss(f: Any) -> Any:
        return lambda p, x: f(p, x, key=key).square().sum()

    assert torch.equal(fn(params, X, key=key), stacked(rows, X, key=key))
    want = stacked.stack(grad(loss(fn))(params, X))
    for have in (grad(loss(stacked)), jit(grad(loss(stacked)), backend="eager")):
        for name_, value in have(rows, X).items():
            torch.testing.assert_close(value, want[name_], rtol=1e-12, atol=1e-12)
    _, pushed = jvp(loss(stacked), (rows, X), (rows, X))
    torch.testing.assert_close(pushed, jvp(loss(fn), (params, X), (params, X))[1])
    orders = ["second"] if train else ["value", "jvp"]
    equal(jit(loss(stacked), backend="eager"), loss(stacked), rows, X, orders=orders)


@pytest.mark.parametrize("name", MODELS)
def test_one_loop_and_no_other_work(name: str) -> None:
    """One layer is traced, and the gradient has the operations that the module's has, none twice."""
    fn, params, stacked, rows = made(name, True)
    key = random.key(3)
    loss = lambda f: lambda p, x: f(p, x, key=key).square().sum()  # noqa: E731
    calls = loop_calls(trace(loss(stacked))(rows, X).graph)
    assert [call.target.count for call in calls] == [DEPTH] * (2 if name == "twice" else 1)
    programs = [
        jit(lambda p, x, f=f: grad(loss(f))(p, x), backend="eager").lower(p, X)
        for f, p in ((stacked, rows), (fn, params))
    ]
    assert has_loops(programs[0])
    have, want = (
        Counter(op_name(n) for n in unrolled(p).calls if op_name(n) in _COMPUTES) for p in programs
    )
    assert have == want and len(want) > 4


_COMPUTES = {"aten.tanh", "aten.tanh_backward", "aten.mm", "aten.addmm", "aten._softmax"}
_COMPUTES |= {"aten.native_layer_norm", "aten.native_layer_norm_backward", "aten.where.self"}


def test_scopes_name_the_layer() -> None:
    stacked, rows = made("one value", False)[2:]
    run = jit(grad(lambda p, x: stacked(p, x).sum()), backend="eager")
    scopes = {node.meta.get("scope") for node in run.lower(rows, X).calls}
    assert {"layers.*", "layers.*.norm", "layers.*.linear", "first"} <= scopes
    straight = {node.meta.get("scope") for node in unrolled(run.lower(rows, X)).calls}
    assert {"layers.0.norm", "layers.3.linear"} <= straight


def test_segments_are_layers() -> None:
    _, _, stacked, rows = made("one value", False)
    kept = checkpoint(lambda p, x: stacked(p, x).sum(), where="layers.*")
    plain = lambda p, x: stacked(p, x).sum()  # noqa: E731
    equal(kept, plain, rows, X, orders=["value", "gradient"])
    run = jit(grad(kept), backend="eager").lower(rows, X)
    assert run.residuals.bytes < jit(grad(plain), backend="eager").lower(rows, X).residuals.bytes


def test_parameters_on_meta() -> None:
    module = Deep(*MODELS["one value"]).to("meta")
    fn, params = functionalize(module, stacked=["layers"])
    assert params["layers.*.linear.weight"].shape == (DEPTH, WIDTH, WIDTH)
    assert fn.buffers["layers.*.scale"].is_meta and "layers.0.scale" not in fn.buffers


# -- refusals ---------------------------------------------------------------------------------------


def collecting(self: Any, x: Tensor) -> Any:
    kept = []
    for layer in self.layers:
        x = layer(x)
        kept.append(x)
    return kept


def adding(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x) + 1
    return x


def scaling(self: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(self.layers):
        x = layer(x, i)
    return x


def skipping(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers[::2]:
        x = layer(x)
    return x


def stopping(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers[:2]:
        x = layer(x)
    return self.last(self.first(X))


def apart(self: Any, x: Tensor) -> Tensor:
    results = [layer(x) for layer in self.layers]
    return results[0]


def summing_aside(self: Any, x: Tensor) -> Any:
    kept = []
    for layer in self.layers:
        x = layer(x)
        kept.append(x.mean())
    return x, kept


class Scaled(Block):
    def forward(self, x: Tensor, by: float) -> Tensor:  # type: ignore[override]
        return super().forward(x) * by


class Numbered(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.number + 1)


class Even(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.number else x


class Counting(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.scale.add_(1)
        return super().forward(x)


class Growing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


def without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        for layer in self.layers[:2]:
            x = layer(x)
    for layer in self.layers[2:]:
        x = layer(x)
    return x


def in_half_precision(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = self.layers[0](x)
    for layer in self.layers[1:]:
        x = layer(x)
    return x


def writing(self: Any, x: Tensor) -> Tensor:
    state = x * 1.0
    for layer in self.layers:
        x = layer(x, state)
        state.add_(1)
    return x


class Setting:
    """An object that a loop changes."""

    by = 1.0


def setting(self: Any, x: Tensor) -> Tensor:
    setting = Setting()
    for i, layer in enumerate(self.layers):
        setting.by = float(i)
        x = layer(x, setting)
    return x


def with_an_iterator(self: Any, x: Tensor) -> Tensor:
    numbers = iter(range(9))
    for layer in self.layers:
        x = layer(x, numbers)
    return x


def closing_over(self: Any, x: Tensor) -> Tensor:
    scale = [1.0]

    def by(y: Tensor) -> Tensor:
        return y * scale[0]

    for i, layer in enumerate(self.layers):
        scale[0] = float(i)
        x = layer(x, by)
    return x


def with_signed_zeros(self: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(self.layers):
        x = layer(x, -0.0 if i else 0.0)
    return x


def numbering(self: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(self.layers):
        layer.number = float(i)
        x = layer(x)
    return x


def numbering_before(self: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(self.layers):
        layer.number = float(i)
    return handing_on(self, x)


def filling(self: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(self.layers):
        self.layers[0].shared[0] = float(i)
        x = layer(x)
    return x


def crossed(self: Any, x: Tensor) -> Tensor:
    """What one round hands on is used in the next."""
    kept = []
    for layer in self.layers:
        x = layer(x)
        kept.append(x)
    y = self.layers[0](x)
    for layer, each in zip(self.layers[1:], kept, strict=False):
        y = layer(each)
    return y


def dropping(self: Any, x: Tensor) -> Tensor:
    other = x
    for layer in self.layers:
        x, other = layer(x), self.last(other)
    return x + other


class Kept:
    """A result that optree does not know."""

    def __init__(self, *values: Any) -> None:
        self.values = values


def hiding(self: Any, x: Tensor) -> Any:
    kept = [x]
    for layer in self.layers:
        kept.append(layer(kept[-1]))
    return kept[-1], Kept(*kept)


class Counted(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return super().forward(x)


class Loss(Block):
    """Keeps a loss for whoever reads it after the loop."""

    aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = (y.sum(),)
        return y


class By(Block):
    def forward(self, x: Tensor, by: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x) * (by if isinstance(by, Tensor) else getattr(by, "by", 1.0))


class Holding(Block):
    def __init__(self, number: int = 0) -> None:
        super().__init__(0)
        self.shared = SHARED

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.shared[0]


class Extra(Block):
    """Only later layers have an attribute."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(0)
        if number:
            self.extra = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self, "extra", 1.0)


class Table(Block):
    """A plain tensor that differs."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(0)
        self.table = torch.full((WIDTH,), float(number), dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table


SHARED = [1.0]


REFUSED: dict[str, tuple[Callable[[int], nn.Module], Any, str]] = {
    "a result that is kept": (Block, collecting, "layers.0 is returned by the module"),
    "a result that is used": (Block, adding, "layers.0 is used by add before the next layer"),
    "arguments that differ": (Scaled, scaling, r"argument \[0\]\[1\] of layer 1 is neither that"),
    "layers left out": (Block, skipping, "layer 2 is called where layer 1 is expected"),
    "a loop that stops": (Block, stopping, "the forward calls 2 of 4 layers"),
    "layers side by side": (Block, apart, "layer 1 does not take the result of layer 0"),
    "a sum aside": (Block, summing_aside, "layers.0 is used by mean before the next layer"),
    "an attribute that differs": (Numbered, handing_on, r"layers\.\* reads its attribute 'number'"),
    "a test of one": (Even, handing_on, r"'number', which differs between layers \(0, 1, 2, 3\)"),
    "a buffer that is updated": (Counting, handing_on, "updates its buffer 'scale'"),
    "another grad mode": (Block, without_gradients, "layer 2 is called under a different grad mode"),
    "another autocast": (Block, in_half_precision, "layer 1 is called under a different grad mode or"),
    "an argument that is written to": (By, writing, r"argument \[0\]\[1\] may have changed before l"),
    "an object that changes": (By, setting, r"argument \[0\]\[1\] may have changed before layer 1"),
    "an iterator": (By, with_an_iterator, r"argument \[0\]\[1\] may have changed before layer 1"),
    "a closure that changes": (By, closing_over, r"argument \[0\]\[1\] may have changed before layer"),
    "zeros of other signs": (By, with_signed_zeros, r"argument \[0\]\[1\] of layer 1 is neither that"),
    "an attribute that is set": (Numbered, numbering, "'number' of layer 1 is 1, and that of layer 0 "),
    "attributes that are set": (Numbered, numbering_before, "'number' of layer 1 is 1.0, and that of la"),
    "a list that all hold": (Holding, filling, "attribute 'shared' of layer 1 may have changed"),
    "rounds that are mixed": (Block, crossed, "result of layers.0 is an argument of layers.1"),
    "a dropout between": (Block, dropping, "a dropout outside of the layers draws a mask before layer 1"),
    "a result that is hidden": (Block, hiding, "layers.0 is returned by the module, or stored in it"),
    "a layer that counts": (Counted, handing_on, "'number'"),
    "a layer that keeps a loss": (Loss, handing_on, "the forward of a layer writes its attribute 'aux'"),
    "an attribute of some": (Extra, handing_on, "reads its attribute 'extra', which differs between"),
    "a table that differs": (Table, handing_on, "reads its attribute 'table', which differs between"),
    "a result of another dtype": (Growing, handing_on, "float64.*float32"),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_other_loops_are_refused(case: str, traced: bool) -> None:
    block, forward, message = REFUSED[case]
    module = Deep(block, forward).double().train(case == "a dropout between")
    stacked, rows = functionalize(module, stacked="layers")
    run = jit(stacked, backend="eager") if traced else stacked
    with pytest.raises(LoopError, match=message) as refused:
        run(rows, X, key=random.key(0))
    assert str(refused.value).startswith("test_module_layers.py:")


def test_layers_that_differ_are_refused() -> None:
    wide = Deep(lambda i: nn.Linear(WIDTH, WIDTH, bias=i > 0), handing_on)
    with pytest.raises(LoopError, match=r"layers\.1 has float32\[6\] with.* at 'bias', and layers\.0 "):
        functionalize(wide, stacked="layers")
    mixed = Deep(lambda i: nn.Tanh() if i == 2 else nn.Identity(), handing_on)
    with pytest.raises(LoopError, match=r"layers\.2 has a Tanh, and layers\.0 has a Identity"):
        functionalize(mixed, stacked="layers")
    tied = Deep(Block, handing_on)
    tied.layers[1].linear.weight = tied.first.weight
    with pytest.raises(LoopError, match="are the same tensor"):
        functionalize(tied, stacked="layers")
    for module, path, text in (
        (nn.Linear(2, 2), "layers", r"Linear has no list.*; there is none in it\.$"),
        (nn.Sequential(nn.Linear(2, 2)), "layers", r"; there is none in it. .*nn.Sequential\(module\)"),
        (nn.Sequential(nn.Sequential(nn.Linear(2, 2))), "", r"; there are '0'. The module itself is a"),
        (nn.Sequential(nn.Sequential()), "0", r"; there is none in it. The module itself is a list"),
        (nn.Sequential(), "x", r"; there is none in it\.$"),
    ):
        with pytest.raises(LoopError, match=text):
            functionalize(module, stacked=path)
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fn, params = functionalize(nn.Sequential(layers), stacked="0")
    assert list(params) == ["0.*.weight", "0.*.bias"]
    assert fn(params, torch.ones(1, 2)).shape == (1, 2)
    with pytest.raises(LoopError, match="no list of modules at this path; there are 'layers'"):
        functionalize(tied, stacked="blocks")


def test_structures_that_differ_in_little_are_refused() -> None:
    def factory(by: int) -> Any:
        class Same(Block):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * by

        return Same()

    with pytest.raises(LoopError, match=r"layers\.1 has a .*Same, and layers\.0 has a .*Same"):
        functionalize(Deep(factory, handing_on), stacked="layers")
    names = [("a", nn.Tanh()), ("b", nn.Sigmoid())]
    turned = Deep(lambda i: nn.Sequential(OrderedDict(names[:: 1 if i else -1])), handing_on)
    with pytest.raises(LoopError, match=r"layers\.1 has a Tanh at 'a'"):
        functionalize(turned, stacked="layers")
    frozen = Deep(lambda i: nn.Linear(WIDTH, WIDTH).requires_grad_(i != 2), handing_on)
    with pytest.raises(LoopError, match=r"layers\.2 has .* without gradients at 'weight'"):
        functionalize(frozen, stacked="layers")
    hooked = Deep(Block, handing_on)
    hooked.layers[1].linear.register_forward_hook(lambda m, args, out: out * 2)
    with pytest.raises(LoopError, match=r"1\.linear has the forward hook at test_.*:\d+ in <l"):
        functionalize(hooked, stacked="layers")
    nested = Deep(lambda i: nn.ModuleList([nn.Tanh()]), handing_on)
    with pytest.raises(LoopError, match=r"'layers\.0' is 'layers' or inside of it"):
        functionalize(nested, stacked=["layers", "layers.0"])
    named = nn.Sequential(OrderedDict(one=nn.Tanh()))
    with pytest.raises(LoopError, match="called 'one'; stacked layers are numbered from 0"):
        functionalize(nn.ModuleDict({"layers": named}), stacked="layers")
    with pytest.raises(LoopError, match="no list of modules at this path"):
        functionalize(named, stacked="")


def test_two_lists_at_once() -> None:
    """One after the other, and in turns."""

    class Two(nn.Module):
        def __init__(self, in_turns: bool) -> None:
            super().__init__()
            self.in_turns = in_turns
            self.a, self.b = (nn.ModuleList(Block() for _ in range(3)) for _ in "ab")

        def forward(self, x: Tensor) -> Tensor:
            y = x
            if self.in_turns:
                for a, b in zip(self.a, self.b, strict=True):
                    x, y = a(x), b(y)
                return x * y
            for layer in (*self.a, *self.b):
                x = layer(x)
            return x

    for in_turns in (False, True):
        module = Two(in_turns).double().eval()
        fn, params = functionalize(module)
        stacked, rows = functionalize(module, stacked=["a", "b"])
        assert torch.equal(stacked(rows, X), fn(params, X))
        have = jit(lambda p, f=stacked: f(p, X), backend="eager")(rows)
        torch.testing.assert_close(have, fn(params, X))


def test_a_module_that_is_used_twice() -> None:
    layer = nn.Linear(WIDTH, WIDTH).double()
    fn, params = functionalize(nn.Sequential(layer, nn.Tanh(), layer))
    torch.testing.assert_close(fn(params, X), layer(torch.tanh(layer(X))))
    assert list(params) == ["0.weight", "0.bias"]


def test_layers_with_functions_whose_variables_are_not_assigned() -> None:
    """A closure may have empty cells."""

    class Active(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, skipped = nn.Linear(WIDTH, WIDTH), True

            def active(x: Tensor) -> Tensor:
                return x.relu() if skipped else x + late

            self.active = active
            if not skipped:
                late = 1

        def forward(self, x: Tensor) -> Tensor:
            return self.active(self.linear(x))  # type: ignore[no-any-return]

    class Actives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Active() for _ in range(DEPTH))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    module = Actives().double()
    stacked, rows = functionalize(module, stacked="layers")
    torch.testing.assert_close(stacked(rows, X), module(X))

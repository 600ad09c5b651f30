"""functionalize: values and gradients are the module's own, and nothing of it is touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree

from torchard import (
    Mesh,
    P,
    PurityError,
    checkpoint,
    functionalize,
    jit,
    name,
    random,
    scope,
    shard,
    trace,
)

KEY = random.key(5)
IDS = torch.tensor([1, 4, 4, 9, 0])
MESHES = [Mesh({"tp": 2}, virtual=True), Mesh({"dp": 2, "tp": 3}, virtual=True)]


class Mlp(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 8), nn.Dropout(p), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(x))))


class Net(nn.Module):
    """Tied weights, a buffer that training updates, one that it does not, a plain tensor."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList([Mlp(p), Mlp(p)])
        self.bn = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.linspace(1, 2, 6))
        self.shift = torch.linspace(0, 1, 10, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.bn(x)) + self.shift


def net(train: bool, p: float = 0.5) -> Net:
    torch.manual_seed(3)
    return Net(p).double().train(train)


def truth(module: nn.Module, *args: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and gradients of the sum of its squares, by the module itself."""
    module = copy.deepcopy(module)
    out = module(*args)
    out.square().sum().backward()
    return out.detach(), {k: p.grad for k, p in module.named_parameters()}


# -- values and gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["plain", "jit", "shard"])
def test_values_and_gradients_are_the_modules(how: str) -> None:
    module = net(train=False)
    fn, params = functionalize(module)

    def loss(p: Any) -> Any:
        out = fn(p, IDS)
        return out.square().sum(), out

    wrap = {"plain": loss, "jit": jit(loss, backend="eager"), "shard": shard(loss, MESHES[0])}
    got, out = torch.func.grad(wrap[how], has_aux=True)(params)
    want_out, want = truth(module, IDS)
    out = out.full() if hasattr(out, "full") else out
    torch.testing.assert_close(out, want_out)
    assert got.keys() == want.keys()
    for k in want:
        torch.testing.assert_close(got[k], want[k])


def test_tied_weights_appear_once() -> None:
    _, params = functionalize(net(train=False))
    assert "emb.weight" in params and "head.weight" not in params


def test_the_module_is_left_alone() -> None:
    module = net(train=True)
    before = {k: (id(v), v.clone()) for k, v in module.state_dict(keep_vars=True).items()}
    forwards = [part.forward for part in module.modules()]
    fn, params = functionalize(module)
    fn(params, IDS, key=KEY, buffers=fn.buffers)
    trace(fn)(params, IDS, key=KEY, buffers=fn.buffers)
    with pytest.raises(PurityError):
        fn(params, IDS)
    for k, value in module.state_dict(keep_vars=True).items():
        assert id(value) == before[k][0] and torch.equal(value, before[k][1])
    assert [part.forward for part in module.modules()] == forwards
    assert not any("forward" in vars(part) for part in module.modules())


def test_fn_holds_no_weights() -> None:
    fn, _ = functionalize(net(train=False))
    assert all(t.is_meta for t in (*fn.module.parameters(), *fn.module.buffers()))


def test_a_call_is_traced_once() -> None:
    """The plain tensor and the buffers are found again, so the trace is kept."""
    fn, params = functionalize(net(train=False))
    traced = []

    def loss(p: Any) -> Tensor:
        traced.append(1)
        return fn(p, IDS).sum()

    run = jit(loss, backend="eager")
    first = run(params)
    fn.buffers["scale"] = fn.buffers["scale"] * 2
    second = run(params)
    assert len(traced) == 1
    assert not torch.equal(first, second)  # and read anew at each call


def test_meta_modules_have_their_program() -> None:
    with torch.device("meta"):
        module = Net().eval()
    fn, params = functionalize(module)
    assert all(p.is_meta for p in params.values())
    program = trace(fn)(params, IDS.to("meta"))
    assert tuple(program.results[0].meta["val"].shape) == (5, 10)


class Result:
    def __init__(self, **found: Tensor) -> None:
        self.found = found


torch_pytree.register_pytree_node(
    Result,
    lambda r: (list(r.found.values()), list(r.found)),
    lambda values, names: Result(**dict(zip(names, values, strict=True))),
)


class Returns(nn.Module):
    def forward(self, x: Tensor) -> tuple[Result, Tensor]:
        return Result(double=x * 2, triple=x * 3), x + 1


def test_results_that_torchs_pytree_knows_are_trees() -> None:
    fn, params = functionalize(Returns())
    x = torch.arange(4.0)
    for call in (fn, jit(fn, backend="eager"), shard(fn, MESHES[0], out_specs=P())):
        result, more = call(params, x)
        assert torch.equal(result.found["triple"], x * 3) and torch.equal(more, x + 1)


# -- buffers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["plain", "jit", "shard"])
def test_updated_buffers_come_back(how: str) -> None:
    module = net(train=True, p=0.0)
    fn, params = functionalize(module)
    want = copy.deepcopy(module)
    want_out = want(IDS)
    call = {"plain": fn, "jit": jit(fn, backend="eager"), "shard": shard(fn, MESHES[0])}[how]
    out, buffers = call(params, IDS, buffers=fn.buffers)
    full = {k: b.full() if hasattr(b, "full") else b for k, b in buffers.items()}
    torch.testing.assert_close(out.full() if hasattr(out, "full") else out, want_out)
    assert full.keys() == dict(want.named_buffers()).keys()
    for k, value in want.named_buffers():
        torch.testing.assert_close(full[k], value)
    assert torch.equal(fn.buffers["bn.running_mean"], torch.zeros(6))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n = self.n + 1  # assigned, not written in place
        return x * self.w * self.n


def test_a_buffer_that_is_assigned_comes_back() -> None:
    fn, params = functionalize(Counter().eval())
    x = torch.ones(2)
    out, buffers = fn(params, x, buffers=fn.buffers)
    out, buffers = fn(params, x, buffers=buffers)
    assert buffers["n"] == 2 and torch.equal(out, torch.full((2,), 2.0))
    with pytest.raises(PurityError, match=r"'n'.*buffers=fn\.buffers"):
        fn(params, x)


def test_an_update_without_buffers_is_an_error() -> None:
    fn, params = functionalize(net(train=True, p=0.0))
    for call in (fn, trace(fn)):
        with pytest.raises(PurityError, match=r"'bn' updates .* buffers=fn\.buffers"):
            call(params, IDS)


# -- dropout ----------------------------------------------------------------------------------------


def test_dropout_draws_from_the_key_alone() -> None:
    fn, params = functionalize(Mlp().double())
    x = torch.randn(4, 6, dtype=torch.float64)
    state = torch.get_rng_state()
    out = fn(params, x, key=KEY)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(out, fn(params, x, key=KEY))
    assert not torch.equal(out, fn(params, x, key=random.key(6)))
    # By hand: the first dropout of a call draws from number 0 of the key.
    mask = random.bernoulli(random.fold_in(KEY, 0), 0.5, (4, 8))
    hidden = F.gelu(F.linear(x, params["up.weight"], params["up.bias"])).masked_fill(mask, 0) * 2
    torch.testing.assert_close(out, F.linear(hidden, params["down.weight"], params["down.bias"]))


def test_every_dropout_of_a_call_has_its_own_mask() -> None:
    fn, params = functionalize(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
    kept = (fn(params, torch.ones(10_000), key=KEY) != 0).double().mean()
    assert 0.23 < kept < 0.27


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_masks_are_the_same_on_any_mesh(mesh: Mesh) -> None:
    fn, params = functionalize(net(train=True))

    def loss(p: Any, b: Any, key: Tensor) -> Any:
        out, b = fn(p, IDS, buffers=b, key=key)
        return out.square().sum(), b

    want, _ = torch.func.grad(loss, has_aux=True)(params, fn.buffers, KEY)
    got, _ = torch.func.grad(shard(loss, mesh), has_aux=True)(params, fn.buffers, KEY)
    for k in want:
        torch.testing.assert_close(got[k], want[k])


def test_a_batch_of_keys_has_a_batch_of_masks() -> None:
    fn, params = functionalize(Mlp().double())
    x = torch.randn(4, 6, dtype=torch.float64)
    keys = random.split(KEY, 3)
    got = torch.vmap(lambda k: fn(params, x, key=k))(keys)
    for one, key in zip(got, keys, strict=True):
        torch.testing.assert_close(one, fn(params, x, key=key))


def test_dropout_without_a_key_is_an_error() -> None:
    fn, params = functionalize(Mlp())
    for call in (fn, trace(fn)):
        with pytest.raises(PurityError, match=r"test_module.*dropout\(p=0\.5\).*key=") as e:
            call(params, torch.ones(2, 6))
        assert "eval()" in str(e.value)


@pytest.mark.parametrize(
    ("layer", "shape", "whole"),
    [
        (nn.Dropout(0.3, inplace=True), (40, 50), ()),
        (nn.Dropout1d(0.3), (40, 50, 3), (2,)),
        (nn.Dropout1d(0.3), (500, 3), (1,)),
        (nn.Dropout2d(0.3), (40, 50, 2, 2), (2, 3)),
        (nn.Dropout3d(0.3), (500, 2, 2, 2), (1, 2, 3)),
    ],
    ids=str,
)
def test_feature_dropout_drops_whole_channels(layer: Any, shape: Any, whole: Any) -> None:
    fn, _ = functionalize(layer)
    out = fn({}, torch.ones(shape), key=KEY)
    channels = out.amax(whole) if whole else out
    if whole:
        assert torch.equal(channels, out.amin(whole))
    assert set(channels.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
    assert 0.6 < (channels != 0).double().mean() < 0.8


@pytest.mark.parametrize("layer", [nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)], ids=str)
def test_alpha_dropout_keeps_mean_and_variance(layer: nn.Module) -> None:
    fn, _ = functionalize(layer)
    out = fn({}, random.normal(KEY, (200, 200, 2)), key=random.key(1))
    assert abs(out.mean()) < 0.02 and abs(out.var() - 1) < 0.03


def test_attention_with_dropout_is_right_on_average() -> None:
    """Dropout leaves the mean of what attention returns; one mask does not."""
    q = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 5, 3, dtype=torch.float64)

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            p = 0.25 if self.training else 0.0
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=p, is_causal=True, enable_gqa=True
            )

    want = Attention().eval()(q, k, v)
    fn, _ = functionalize(Attention())
    many = torch.vmap(lambda key: fn({}, q, k, v, key=key))(random.split(KEY, 4000))
    assert not torch.allclose(many[0], want, atol=0.1)
    torch.testing.assert_close(many.mean(0), want, atol=0.1, rtol=0)


@pytest.mark.parametrize("weights", [True, False])
def test_dropout_inside_multihead_attention(weights: bool) -> None:
    fn, params = functionalize(nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True))
    x = torch.randn(2, 6, 8)
    state = torch.get_rng_state()

    def run(params: Any, x: Tensor, key: Tensor) -> Tensor:
        return fn(params, x, x, x, need_weights=weights, key=key)[0]

    out = run(params, x, KEY)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.allclose(out, run(params, x, random.key(6)))
    torch.testing.assert_close(out, jit(run, backend="eager")(params, x, KEY))


def test_without_dropout_multihead_attention_is_torchs() -> None:
    module = nn.MultiheadAttention(8, 2, dropout=0.0, batch_first=True)
    fn, params = functionalize(module)
    x = torch.randn(2, 6, 8)
    torch.testing.assert_close(fn(params, x, x, x)[0], module(x, x, x)[0])


# -- scopes -----------------------------------------------------------------------------------------


def test_scopes_are_module_paths() -> None:
    fn, params = functionalize(net(train=False))

    def model(p: Any) -> Tensor:
        with scope("model"):
            return fn(p, IDS)

    program = trace(model)(params)
    scopes = {node.meta["scope"] for node in program.calls}
    inside = {"emb", "blocks.0", "blocks.0.up", "blocks.0.down", "blocks.1", "bn", "head"}
    assert {"model"} | {f"model/{path}" for path in inside} <= scopes
    named = {f"{n.meta['scope']}/{n.meta['name']}" for n in program.calls if "name" in n.meta}
    for path in inside:
        assert {f"model/{path}/in", f"model/{path}/out"} <= named


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return name(self.lin(x).relu(), "hidden")


def test_names_given_inside_a_module_stay() -> None:
    fn, params = functionalize(nn.Sequential(Named()))
    program = trace(fn)(params, torch.ones(3, 2))
    named = [f"{n.meta['scope']}/{n.meta['name']}" for n in program.calls if "name" in n.meta]
    assert named == ["0/in", "0.lin/in", "0.lin/out", "0/hidden", "0/out"]


class Scaled(nn.Module):
    """Called with a number first, by keyword, or with no tensor at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 2))
        self.last = 1.5

    def forward(self, times: int = 1, x: Tensor | None = None) -> Tensor:
        self.last = float("1.5")  # an equal number is no state
        return self.weight if x is None else x * self.weight * times


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(2, x) + self.part(times=3, x=x) + self.part(4)


def test_labels_of_arguments_and_results_wherever_they_are() -> None:
    module, x = Calls(), torch.ones(3, 2)
    fn, params = functionalize(module)
    torch.testing.assert_close(jit(fn, backend="eager")(params, x), module(x))
    named = [n.meta["name"] for n in trace(fn)(params, x).calls if "name" in n.meta]
    assert named == ["in", "out", "in", "out", "out"]


def test_backward_nodes_have_their_modules_scope() -> None:
    fn, params = functionalize(net(train=False))
    program = trace(torch.func.grad(lambda p: fn(p, IDS).sum()))(params)
    backward = [node for node in program.calls if node.meta["phase"] == "backward"]
    products = [n for n in backward if n.target is torch.ops.aten.mm.default]
    assert {n.meta["scope"] for n in products} >= {"blocks.0.up", "blocks.1.down", "head"}


# -- wrong names ------------------------------------------------------------------------------------


def test_wrong_parameters_are_named() -> None:
    fn, params = functionalize(net(train=False))
    lacking = {k: v for k, v in params.items() if k != "bn.bias"}
    with pytest.raises(KeyError, match=r"params lack bn\.bias and have head\.weight"):
        fn({**lacking, "head.weight": params["emb.weight"]}, IDS)
    with pytest.raises(KeyError, match="buffers lack"):
        fn(params, IDS, buffers={})


# -- state ------------------------------------------------------------------------------------------


class Keeps(nn.Module):
    """What it keeps, and how."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.hidden, self.seen = how, 0, torch.zeros(3), None
        self.cache: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "a number":
            self.calls += 1
        if self.how == "a tensor":
            self.hidden = self.hidden + x
        if self.how == "for inspection":
            self.seen = x.sin()
        if self.how == "in a cache":
            if self.cache is None:
                self.cache = torch.arange(3.0)
            return x + self.cache
        return x + self.hidden


@pytest.mark.parametrize("how", ["a number", "a tensor"])
@pytest.mark.parametrize("wrap", [lambda f: f, trace, lambda f: jit(f, backend="eager")])
def test_state_in_plain_attributes_is_refused(how: str, wrap: Any) -> None:
    fn, params = functionalize(nn.Sequential(Keeps(how)))
    name = "calls" if how == "a number" else "hidden"
    for _ in range(2):
        with pytest.raises(PurityError, match=f"'0' changes its attribute '{name}' in forward"):
            wrap(fn)(params, torch.ones(3))


@pytest.mark.parametrize("how", ["for inspection", "in a cache"])
def test_what_a_forward_leaves_behind_goes_with_the_call(how: str) -> None:
    """A tracer that stayed would be a value of nothing in the next call."""
    module = nn.Sequential(Keeps(how))
    fn, params = functionalize(module)
    for x in (torch.ones(3), torch.ones(2, 3)):
        for run in (jit(fn, backend="eager"), fn):
            torch.testing.assert_close(run(params, x), copy.deepcopy(module)(x))
    assert fn.module[0].seen is None and fn.module[0].cache is None


class Pair(nn.Module):
    """Two modules with one buffer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Module(), nn.Module()
        self.a.register_buffer("mean", torch.zeros(3))
        self.b.register_buffer("mean", self.a.mean)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "writes":
            self.b.mean.add_(x)
        else:
            self.b.mean = self.b.mean + x
        return x * self.a.mean


def test_shared_buffers_stay_shared() -> None:
    fn, params = functionalize(Pair("writes"))
    assert list(fn.buffers) == ["a.mean"]
    out, after = jit(fn, backend="eager")(params, torch.ones(3), buffers=fn.buffers)
    assert torch.equal(out, torch.ones(3)) and torch.equal(after["a.mean"], torch.ones(3))


def test_buffers_that_are_shared_no_longer_are_refused() -> None:
    fn, params = functionalize(Pair("assigns"))
    with pytest.raises(PurityError, match=r"'b' or 'a' replaces a buffer .* self\.mean\.copy_"):
        fn(params, torch.ones(3), buffers=fn.buffers)


class Output(dict[str, Tensor]):
    """A result like HuggingFace's, of which torch's pytrees know, and this library's do not."""


torch_pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output)),
    lambda values, keys: Output(zip(keys, values, strict=True)),
)


class WithOutput(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"inner": Output(y=y, sum=y.sum()), "x": x}


def test_results_of_types_that_only_torch_knows() -> None:
    module, x = WithOutput(3, 2), torch.randn(4, 3)
    fn, params = functionalize(module)
    for run in (fn, jit(fn, backend="eager"), checkpoint(fn)):
        out, want = run(params, x), module(x)
        assert type(out["inner"]) is Output and list(out["inner"]) == ["y", "sum"]
        torch.testing.assert_close(out, want)


def uncounted(momentum: float | None) -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(3, momentum=momentum)
    norm.num_batches_tracked = None
    return norm


# A module, and one that does on a CPU what it does on its device.
BATCH_NORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "of all ranks": (lambda: nn.SyncBatchNorm(3), lambda: nn.BatchNorm1d(3)),
    "of all ranks, untracked": (
        lambda: nn.SyncBatchNorm(3, track_running_stats=False),
        lambda: nn.BatchNorm1d(3, track_running_stats=False),
    ),
    "cumulative": (lambda: nn.BatchNorm1d(3, momentum=None),) * 2,
    "cumulative, untracked": (
        lambda: nn.BatchNorm1d(3, momentum=None, track_running_stats=False),
    ) * 2,
    "cumulative, uncounted": (lambda: uncounted(None),) * 2,
}  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norms_that_are_called_otherwise(name: str, training: bool) -> None:
    module, plain = (make().double().train(training) for make in BATCH_NORMS[name])
    fn, params = functionalize(module)
    buffers, run = fn.buffers, jit(fn, backend="eager")
    for batch in torch.randn(2, 5, 3, dtype=torch.float64):
        out = run(params, batch, buffers=buffers)
        out, buffers = out if isinstance(out, tuple) else (out, buffers)
        torch.testing.assert_close(out, plain(batch))
    torch.testing.assert_close(buffers, dict(plain.named_buffers()))


def test_cumulative_averages() -> None:
    """``momentum=None``: every batch counts alike."""
    module = nn.BatchNorm1d(3, momentum=None).double()
    fn, params = functionalize(module)
    buffers, run = fn.buffers, jit(fn, backend="eager")
    batches = torch.randn(4, 5, 3, dtype=torch.float64)
    for batch in batches:
        out, buffers = run(params, batch, buffers=buffers)
        torch.testing.assert_close(out, module(batch))
    torch.testing.assert_close(buffers["running_mean"], batches.mean((0, 1)))
    torch.testing.assert_close(buffers, dict(module.named_buffers()))

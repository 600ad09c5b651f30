import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.fx.experimental.proxy_tensor import make_fx

from torchard.functional import nn, random

KEY = random.key(11)


def tensor(*shape):
    return torch.randn(*shape, dtype=torch.float64)


IDS = torch.tensor([[0, 4, 1], [4, 2, 2]])

# name: ours, torch's, arguments to differentiate
LAYERS = {
    "linear": (nn.linear, F.linear, (tensor(2, 3, 4), tensor(5, 4), tensor(5))),
    "linear without bias": (nn.linear, F.linear, (tensor(3, 4), tensor(5, 4))),
    "embedding": (lambda t: nn.embedding(t, IDS), lambda t: F.embedding(IDS, t), (tensor(5, 3),)),
    "layer_norm": (
        lambda *a: nn.layer_norm(*a, eps=1e-3),
        lambda x, w, b: F.layer_norm(x, (6,), w, b, 1e-3),
        (tensor(2, 3, 6), tensor(6), tensor(6)),
    ),
    "bare layer_norm": (nn.layer_norm, lambda x: F.layer_norm(x, (6,)), (tensor(2, 6),)),
    "rms_norm": (
        lambda *a: nn.rms_norm(*a, eps=1e-3),
        lambda x, w: F.rms_norm(x, (6,), w, 1e-3),
        (tensor(2, 6), tensor(6)),
    ),
    "bare rms_norm": (nn.rms_norm, lambda x: F.rms_norm(x, (6,), None, 1e-6), (tensor(2, 6),)),
    "gelu": (nn.gelu, F.gelu, (tensor(9),)),
    "tanh gelu": (
        lambda x: nn.gelu(x, "tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
        (tensor(9),),
    ),
    "relu": (nn.relu, F.relu, (tensor(9),)),
    "silu": (nn.silu, F.silu, (tensor(9),)),
    "softmax": (lambda x: nn.softmax(x, 0), lambda x: F.softmax(x, 0), (tensor(3, 4),)),
    "log_softmax": (nn.log_softmax, lambda x: F.log_softmax(x, -1), (tensor(3, 4),)),
}


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_torchs(name):
    ours, theirs, args = LAYERS[name]
    assert_same(ours(*args), theirs(*args))
    every = tuple(range(len(args)))
    weights = torch.rand_like(ours(*args))

    def gradients(layer):
        return torch.func.grad(lambda *a: (layer(*a[:-1]) * a[-1]).sum(), every)

    expected = gradients(theirs)(*args, weights)
    assert_same(gradients(ours)(*args, weights), expected)
    traced = make_fx(gradients(ours), tracing_mode="fake", _allow_non_fake_inputs=True)
    assert_same(traced(*args, weights)(*args, weights), expected)
    assert gradcheck(ours, [a.clone().requires_grad_() for a in args])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_is_torchs_with_classes_last(reduction):
    logits, targets = tensor(2, 3, 5), IDS.clone()
    expected = F.cross_entropy(logits.movedim(-1, 1), targets, reduction=reduction)
    assert_same(nn.cross_entropy(logits, targets, reduction), expected)
    for index, options in ((-100, {}), (2, {"ignore_index": 2})):
        targets[0, 0] = index
        expected = F.cross_entropy(
            logits.movedim(-1, 1), targets, reduction=reduction, **options
        )
        assert_same(nn.cross_entropy(logits, targets, reduction, **options), expected)
    by_formula = -torch.log_softmax(logits, -1).gather(-1, IDS[..., None])
    assert_same(nn.cross_entropy(logits, IDS, "none"), by_formula.squeeze(-1))


def test_rms_norm_of_half_precision_squares_in_float32():
    x = torch.full((4,), 300.0, dtype=torch.float16)
    assert_same(nn.rms_norm(x), torch.ones(4, dtype=torch.float16))


@pytest.mark.parametrize("rate", [0.3, torch.tensor(0.3, dtype=torch.float64)])
def test_dropout(rate):
    x = tensor(200, 100)
    y = nn.dropout(KEY, x, rate)
    kept = y != 0
    assert abs(kept.double().mean() - 0.7) < 4 * math.sqrt(0.21 / x.numel())
    assert_same(y[kept], x[kept] / 0.7)
    assert torch.equal(nn.dropout(KEY, x, rate), y)
    other = nn.dropout(random.key(12), x, rate) != 0
    assert abs((other == kept).double().mean() - 0.58) < 4 * math.sqrt(0.58 * 0.42 / x.numel())
    gradient = torch.func.grad(lambda x: nn.dropout(KEY, x, rate).sum())(x)
    assert_same(gradient, kept.double() / 0.7)


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_dropout_of_nothing(rate):
    x = tensor(5)
    assert torch.equal(nn.dropout(KEY, x, rate), x)


@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)])
def test_dropout_of_everything(rate):
    value = torch.func.grad_and_value(lambda x: nn.dropout(KEY, x, rate).sum())
    gradient, total = value(tensor(5))
    assert total == 0 and torch.equal(gradient, torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_dropout_rates_are_probabilities(rate):
    with pytest.raises(ValueError, match="probability"):
        nn.dropout(KEY, tensor(3), rate)


def test_dropout_keeps_dtypes():
    for dtype in (torch.float32, torch.bfloat16):
        for rate in (0.5, torch.tensor(0.5, dtype=torch.float64)):
            assert nn.dropout(KEY, torch.ones(4, dtype=dtype), rate).dtype == dtype


def test_dropout_traces_to_one_draw():
    graph = make_fx(lambda k, x: nn.dropout(k, x, 0.5), tracing_mode="fake")(KEY, tensor(8))
    names = [str(node.target) for node in graph.graph.nodes]
    assert names.count("torchard.random_bits.default") == 1
    x = tensor(8)
    assert torch.equal(graph(random.key(5), x), nn.dropout(random.key(5), x, 0.5))


@pytest.mark.parametrize(
    ("draw", "std"),
    [
        (nn.init_normal(KEY, (300, 400)), 0.02),
        (nn.init_normal(KEY, (300, 400), 3.0, torch.float64), 3.0),
        (nn.init_normal_fan_in(KEY, (300, 400)), 1 / 20),
        (nn.init_normal_fan_in(KEY, (300, 400), math.sqrt(2)), math.sqrt(2) / 20),
        (nn.init_uniform_fan_in(KEY, (300, 400)), 1 / 20 / math.sqrt(3)),
        (nn.init_uniform_fan_in(KEY, (120_000,), fan_in=16), 1 / 4 / math.sqrt(3)),
    ],
)
def test_initialisers(draw, std):
    wide = draw.double()
    assert wide.mean().abs() < 4 * std / math.sqrt(wide.numel())
    assert abs(wide.std() / std - 1) < 4 / math.sqrt(2 * wide.numel())

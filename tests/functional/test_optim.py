import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchard import ShapeDtype, jit
from torchard.functional import optim
from torchard.functional.core import tree
from torchard.functional.optim import adamw, sgd, warmup_cosine


def start(dtype=torch.float64):
    return {
        "w": torch.randn(4, 3, dtype=dtype),
        "rest": [torch.randn(5, dtype=dtype), torch.tensor(0.7, dtype=dtype)],
    }


def loss(params, shift):
    return sum((p.sin() * (p + shift) ** 2).sum() for p in tree.leaves(params) if p is not None)


CASES = [
    (sgd(0.1), torch.optim.SGD, {"lr": 0.1}),
    (
        sgd(0.1, momentum=0.9, weight_decay=0.03),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.03},
    ),
    (
        sgd(0.05, momentum=0.8, nesterov=True),
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.8, "nesterov": True},
    ),
    (
        sgd(torch.tensor(0.1, dtype=torch.float64), weight_decay=0.1),
        torch.optim.SGD,
        {"lr": 0.1, "weight_decay": 0.1},
    ),
    (adamw(0.03), torch.optim.AdamW, {"lr": 0.03}),
    (adamw(0.03, weight_decay=0.0), torch.optim.Adam, {"lr": 0.03}),
    (
        adamw(lambda step: 0.03, b1=0.7, b2=0.95, eps=1e-4, weight_decay=0.2),
        torch.optim.AdamW,
        {"lr": 0.03, "betas": (0.7, 0.95), "eps": 1e-4, "weight_decay": 0.2},
    ),
]


def twenty_steps(update, params, state):
    for number in range(20):
        grads = torch.func.grad(loss)(params, number / 20)
        params, state = update(grads, state, params)
    return params, state


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES)
def test_twenty_steps_are_torchs(ours, theirs, options):
    params = start()
    reference = [p.clone().requires_grad_() for p in tree.leaves(params)]
    optimizer = theirs(reference, **options)
    for number in range(20):
        optimizer.zero_grad()
        loss(reference, number / 20).backward()
        optimizer.step()
    got, state = twenty_steps(ours.update, params, ours.init(params))
    assert state.step.item() == 20
    for mine, other in zip(tree.leaves(got), reference, strict=True):
        assert (mine - other).abs().max() <= 1e-12


@pytest.mark.parametrize(("ours", "_theirs", "_options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_arguments_stay_as_they_were(ours, _theirs, _options, dtype):
    params, grads = start(dtype), start(dtype)
    state = ours.init(params)
    before = [t.clone() for t in tree.leaves((params, grads, state)) if t is not None]
    new, later = ours.update(grads, state, params)
    after = [t for t in tree.leaves((params, grads, state)) if t is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert tree.structure((new, later)) == tree.structure((params, state))
    for old, fresh in zip(tree.leaves((params, state)), tree.leaves((new, later)), strict=True):
        assert old is None or (fresh.dtype, fresh.shape) == (old.dtype, old.shape)
        assert old is None or not torch.equal(old, fresh)


@pytest.mark.parametrize("rate", [warmup_cosine(0.1, 10, warmup=3), lambda s: 0.1 / (s + 1)])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_one_trace_serves_every_step(make, rate):
    ours = make(rate)
    params = start()
    state = ours.init(params)
    traced = make_fx(ours.update, tracing_mode="fake")(start(), state, params)
    by_trace = twenty_steps(traced, params, state)
    eager = twenty_steps(ours.update, params, state)
    for got, expected in zip(tree.leaves(by_trace), tree.leaves(eager), strict=True):
        assert got is expected is None or torch.equal(got, expected)
    constant = twenty_steps(make(0.1).update, params, state)
    assert not torch.equal(constant[0]["w"], eager[0]["w"])


def test_schedule_is_called_with_the_steps_taken_so_far():
    params = {"w": torch.zeros(1, dtype=torch.float64)}
    ours = sgd(lambda step: step + 1.0)
    state = ours.init(params)
    for expected in (-1.0, -3.0, -6.0):
        params, state = ours.update({"w": torch.ones(1, dtype=torch.float64)}, state, params)
        assert params["w"].item() == expected


def test_adamw_scales_with_its_schedule():
    params, grads = start(), start()
    ours, unit = adamw(lambda step: step + 3.0), adamw(1.0)
    state = unit.init(params)
    for rate in (3.0, 4.0):
        new, _ = ours.update(grads, state, params)
        by_one, state = unit.update(grads, state, params)
        torch.testing.assert_close(new["w"] - params["w"], rate * (by_one["w"] - params["w"]))


def test_warmup_cosine():
    rate = warmup_cosine(2.0, 12, warmup=4, floor=0.5)
    got = torch.stack([rate(torch.tensor(s)) for s in range(15)])
    expected = [0.5, 1.0, 1.5, 2.0]
    expected += [0.5 + 0.75 * (1 + math.cos(math.pi * s / 8)) for s in range(9)] + [0.5, 0.5]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("ours", [sgd(0.1), sgd(0.1, momentum=0.9), adamw(0.1)])
def test_absent_parameters_stay_absent(ours):
    params = {"w": torch.ones(2), "b": None}
    new, _ = ours.update(params, ours.init(params), params)
    assert new["b"] is None and not torch.equal(new["w"], params["w"])


@pytest.mark.parametrize("ours", [sgd(0.1), sgd(0.1, momentum=0.9), adamw(0.1)])
def test_a_tree_without_parameters(ours):
    new, state = ours.update({}, ours.init({}), {})
    assert new == {} and state.step.item() == 1


@pytest.mark.parametrize("ours", [sgd(0.1), sgd(0.1, momentum=0.9), adamw(0.1)])
def test_the_state_of_parameters_without_data_has_none(ours):
    """A training step is lowered from shapes alone, to the program that values give."""

    def step(params, state):
        return ours.update(params, state, params)

    params = {"w": torch.ones(4, 3), "half": torch.ones(2, dtype=torch.float16), "b": None}
    shapes = tree.map(lambda p: p if p is None else ShapeDtype(tuple(p.shape), p.dtype), params)
    state, empty = ours.init(params), ours.init(shapes)
    assert tree.map(lambda x: x if x is None else ShapeDtype(tuple(x.shape), x.dtype), state) == empty
    run = jit(step, backend="eager")
    assert str(run.lower(shapes, empty)) == str(run.lower(params, state))


def test_an_update_can_be_differentiated():
    """As meta-learning does: the loss after a step, by the learning rate before it."""
    params = start()
    grads = torch.func.grad(loss)(params, 0.3)

    def after(rate):
        ours = adamw(rate)
        return loss(ours.update(grads, ours.init(params), params)[0], 0.3)

    rate, h = torch.tensor(0.01, dtype=torch.float64), 1e-6
    numeric = (after(rate + h) - after(rate - h)) / (2 * h)
    torch.testing.assert_close(torch.func.grad(after)(rate), numeric, rtol=1e-6, atol=0)


def test_registered_nodes_are_seen_through():
    class Box:
        def __init__(self, inner):
            self.inner = inner

    tree.register(Box, lambda b: ((b.inner,), None), lambda _, children: Box(*children))
    ours = optim.adamw(0.1)
    params = Box({"w": torch.ones(2)})
    new, state = ours.update(params, ours.init(params), params)
    assert isinstance(new, Box) and isinstance(state.mean, Box)
    bare, _ = ours.update(params.inner, ours.init(params.inner), params.inner)
    assert torch.equal(new.inner["w"], bare["w"])


def test_errors():
    with pytest.raises(ValueError, match="momentum > 0"):
        sgd(0.1, nesterov=True)
    params = start()
    with pytest.raises(ValueError, match="rest"):
        sgd(0.1).update({"w": params["w"], "rest": []}, sgd(0.1).init(params), params)


# -- every optimiser, schedule and dtype against Python's own floats ---------------------------------

SCHEDULES = {
    "number": (lambda: 0.03, lambda t: 0.03),
    "tensor": (lambda: torch.tensor(0.03, dtype=torch.float64), lambda t: 0.03),
    "inverse": (lambda: lambda step: 0.03 / (step + 1), lambda t: 0.03 / (t + 1)),
    "halved": (lambda: lambda step: 0.03 * 0.7 ** (step // 2), lambda t: 0.03 * 0.7 ** (t // 2)),
    "root": (
        lambda: lambda step: 0.03 / (1 + step / 3).sqrt(),
        lambda t: 0.03 / (1 + t / 3) ** 0.5,
    ),
    "cosine": (lambda: warmup_cosine(0.03, 7, 3, 1e-3), lambda t: cosine(t, 0.03, 7, 3, 1e-3)),
    "decay only": (lambda: warmup_cosine(0.03, 9), lambda t: cosine(t, 0.03, 9, 0, 0.0)),
}


def cosine(t, peak, steps, warmup, floor):
    if t < warmup:
        return peak * (t + 1) / warmup
    done = min(max((t - warmup) / (steps - warmup), 0.0), 1.0)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))


def sgd_step(p, g, state, t, rate, decay, momentum, nesterov):
    g = g + decay * p
    if not momentum:
        return p - rate * g, state
    v = momentum * state[0] + g
    return p - rate * (g + momentum * v if nesterov else v), (v,)


def adam_step(p, g, state, t, rate, decay, b1, b2, eps):
    m, s = b1 * state[0] + (1 - b1) * g, b2 * state[1] + (1 - b2) * g * g
    mean, square = m / (1 - b1 ** (t + 1)), s / (1 - b2 ** (t + 1))
    return p * (1 - rate * decay) - rate * mean / (math.sqrt(square) + eps), (m, s)


OPTIMISERS = {
    "sgd": (sgd, sgd_step, {"momentum": 0.0, "nesterov": False}),
    "momentum": (sgd, sgd_step, {"momentum": 0.8, "nesterov": False}),
    "nesterov": (sgd, sgd_step, {"momentum": 0.8, "nesterov": True}),
    "adamw": (adamw, adam_step, {"b1": 0.9, "b2": 0.999, "eps": 1e-8}),
    "adamw, other numbers": (adamw, adam_step, {"b1": 0.7, "b2": 0.95, "eps": 1e-4}),
}
DECAYS = {
    "none": (0.0, (0.0, 0.0, 0.0)),
    "one": (0.1, (0.1, 0.1, 0.1)),
    "a tree": ({"a": 0.1, "b": [0.0, 0.3]}, (0.1, 0.0, 0.3)),
    "a prefix": ({"a": 0.2, "b": 0.0}, (0.2, 0.0, 0.0)),
    "a tensor": (torch.tensor(0.1, dtype=torch.float64), (0.1, 0.1, 0.1)),
}
# Roundings of a handful of steps, relative to parameters of size 1.
ROUNDING = {torch.float64: 2e-15, torch.float32: 1e-6, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_steps_are_those_of_pythons_floats(optimiser, schedule, decay, dtype):
    make, one_step, numbers = OPTIMISERS[optimiser]
    rate, rate_at = SCHEDULES[schedule]
    given, decays = DECAYS[decay]
    ours = make(rate(), weight_decay=given, **numbers)
    params = {"a": torch.randn(3), "b": [torch.randn(()), torch.ones(2)]}
    params = tree.map(lambda p: p.to(dtype), params)
    state = ours.init(params)
    wanted = [[(x, (0.0, 0.0)) for x in p.flatten().tolist()] for p in tree.leaves(params)]
    for t in range(5):
        grads = tree.map(lambda p, t=t: torch.randn(p.shape, dtype=dtype) + t, params)
        params, state = ours.update(grads, state, params)
        wanted = [
            [
                one_step(x, g, s, t, rate_at(t), w, **numbers)
                for (x, s), g in zip(row, grad.flatten().tolist(), strict=True)
            ]
            for row, grad, w in zip(wanted, tree.leaves(grads), decays, strict=True)
        ]
    for got, row in zip(tree.leaves(params), wanted, strict=True):
        assert got.dtype == dtype
        expected = torch.tensor([x for x, _ in row], dtype=torch.float64).reshape(got.shape)
        assert (got.double() - expected).abs().max() <= ROUNDING[
            dtype
        ] * expected.abs().max().clamp(1)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: sgd(-0.1), "lr=-0.1"),
        (lambda: sgd("fast"), "lr is 'fast'"),
        (lambda: adamw(torch.ones(2)), "lr="),
        (lambda: adamw(0.1, b1=1.0), "b1=1.0"),
        (lambda: adamw(0.1, eps=float("nan")), "eps is nan"),
        (lambda: sgd(0.1, momentum=None), "momentum is None"),
        (lambda: adamw(0.1, weight_decay={"w": "much"}), "weight_decay"),
        (lambda: adamw(0.1, weight_decay=-1), "weight_decay"),
        (lambda: warmup_cosine(0.1, "ten"), "steps is 'ten'"),
    ],
)
def test_wrong_numbers_are_named_where_they_are_given(make, named):
    with pytest.raises((TypeError, ValueError), match=named):
        make()


@pytest.mark.parametrize("make", [sgd, adamw])
def test_weight_decay_that_is_no_prefix_says_where(make):
    params = start()
    ours = make(0.1, weight_decay={"w": 0.1})
    with pytest.raises(ValueError, match=r"weight_decay is not a prefix of the parameters.*rest"):
        ours.update(params, ours.init(params), params)


@pytest.mark.parametrize("b1", [0.0, 0.3, 0.5, 0.6])
def test_a_mean_that_forgets_keeps_small_gradients_after_large_ones(b1: float) -> None:
    init, update = adamw(0.1, b1=b1, b2=0.0, weight_decay=0.0)
    ours = torch.ones(2)
    theirs = torch.ones(2, requires_grad=True)
    state, rival = init(ours), torch.optim.AdamW([theirs], lr=0.1, betas=(b1, 0.0), weight_decay=0)
    for size in (1e4, 1e-4):
        gradient = torch.full((2,), size)
        ours, state = update(gradient, state, ours)
        theirs.grad = gradient.clone()
        rival.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=0)

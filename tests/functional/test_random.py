import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from torchard.functional import random
from torchard.functional.philox import block_cpu, block_torch, philox4x64

N = 1 << 18
KEY = random.key(3)

# Random123's kat_vectors, philox4x64 10: counter, key, result.
KNOWN = [
    (
        [0] * 4,
        [0] * 2,
        [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B],
    ),
    (
        [2**64 - 1] * 4,
        [2**64 - 1] * 2,
        [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0],
    ),
    (
        [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
        [0x452821E638D01377, 0xBE5466CF34E90C6C],
        [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6],
    ),
]


def signed(words):
    return [torch.tensor(w - 2**64 if w >> 63 else w) for w in words]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert philox4x64(signed(counter), signed(key)) == signed(expected)


def test_words_are_the_halves_of_the_cipher_low_first():
    words = random.bits(torch.zeros(2, dtype=torch.int64), (8,)).tolist()
    pairs = zip(words[::2], words[1::2], strict=True)
    assert [low | high << 32 for low, high in pairs] == KNOWN[0][2]


def test_values_never_change():
    """Seeds are part of people's results: a change here is a breaking change."""
    key = random.key(42)
    assert random.bits(key, (3,)).tolist() == [1026800233, 1341165195, 1705316057]
    assert random.split(key).tolist() == [
        [-9049447768490344767, 2938584405645929225],
        [-5713949175565057040, 7600172231462287031],
    ]
    assert random.fold_in(key, 7).tolist() == [-263544318537017432, -7835231905423046791]


@st.composite
def blocks(draw):
    # Long inner dims cross the sizes at which the CPU path changes its way of drawing.
    dims = st.sampled_from([0, 1, 2, 3, 5, 8, 17, 300, 3000, 40000])
    size = draw(st.lists(dims, max_size=4).filter(lambda s: math.prod(s) <= 200_000))
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in size]
    keys = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=2))
    return torch.tensor(keys), size, [a for a, _ in ends], [b for _, b in ends]


@pytest.mark.parametrize(
    ("size", "start", "stop"),
    [
        ((100_000,), (31,), (99_999,)),  # several draws in a row
        ((500, 300), (3, 0), (499, 300)),  # contiguous, beginning inside a counter
        ((500, 300), (3, 7), (499, 290)),  # rows with small gaps, drawn together
        ((4, 30_001), (1, 5), (4, 20_000)),  # rows with large gaps, drawn one by one
        ((3, 4, 50, 100), (1, 1, 3, 7), (3, 4, 50, 9)),  # both
    ],
)
def test_blocks_of_every_kind(size, start, stop):
    check_block(random.key(5), size, start, stop)


@given(blocks())
def test_a_block_is_a_slice_of_the_whole(case):
    check_block(*case)


def check_block(key, size, start, stop):
    whole = torch.ops.torchard.random_bits(key, size, [0] * len(size), size)
    expected = whole[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
    got = torch.ops.torchard.random_bits(key, size, start, stop)
    assert got.shape == expected.shape and torch.equal(got, expected)
    assert torch.equal(block_torch(key, size, start, stop), expected)


@given(st.integers(0, 2**62), st.integers(0, 50))
def test_words_far_into_the_stream(first, count):
    ends = [first + count], [first], [first + count]
    assert torch.equal(block_cpu(KEY, *ends), block_torch(KEY, *ends))


@given(st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(0, 4), max_size=3))
def test_batches_of_keys(batch, shape):
    keys = random.split(KEY, math.prod(batch)).reshape(*batch, 2)
    got = random.bits(keys, shape)
    assert got.shape == (*batch, *shape)
    rows = [random.bits(k, shape) for k in keys.reshape(-1, 2)]
    expected = torch.stack(rows) if rows else torch.empty(0, *shape, dtype=torch.int64)
    assert torch.equal(got.reshape(len(rows), *shape), expected)
    assert torch.equal(got, block_torch(keys, shape, [0] * len(shape), shape))


def chi_square(counts, expected):
    """The statistic as a number of standard deviations from its mean."""
    counts = counts.double()
    freedom = counts.numel() - 1
    return ((counts - expected) ** 2 / expected).sum().sub(freedom).div(math.sqrt(2 * freedom))


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_bytes_are_uniform(shift):
    words = random.bits(KEY, (N,)) >> shift & 255
    assert abs(chi_square(torch.bincount(words, minlength=256), N / 256)) < 4


def test_every_bit_is_fair_and_uncorrelated_with_the_others():
    words = random.bits(KEY, (N,))
    signs = (words[:, None] >> torch.arange(32) & 1).double() * 2 - 1
    assert (signs.mean(0).abs() * math.sqrt(N)).max() < 4.5
    gram = signs.T @ signs / math.sqrt(N)
    assert (gram - gram.diag().diag()).abs().max() < 4.5
    serial = (signs[1:] * signs[:-1]).mean(0) * math.sqrt(N)
    assert serial.abs().max() < 4.5


def test_streams_of_related_keys_are_independent():
    related = [KEY, *random.split(KEY, 3), random.fold_in(KEY, 0), random.fold_in(KEY, 1)]
    related += [random.key(4), random.fold_in(random.key(4), 0)]
    related += random.split(random.split(KEY)[0])
    draws = random.normal(torch.stack(related), (N,), torch.float64)
    gram = draws @ draws.T / math.sqrt(N)
    assert (gram - gram.diag().diag()).abs().max() < 4.5
    signs = random.bits(torch.stack(related), (N,)) >> 31
    agree = (signs[:, None] == signs[None]).double().mean(-1) - 0.5
    agree.fill_diagonal_(0)
    assert agree.abs().max() * 2 * math.sqrt(N) < 4.5


def test_no_two_derived_keys_are_equal():
    keys = [random.split(random.key(s), 50) for s in range(20)]
    numbers = torch.arange(50)
    keys += [random.fold_in(random.key(s).expand(50, 2), numbers) for s in range(20)]
    assert len(torch.cat(keys).unique(dim=0)) == 2000


def test_split_does_not_depend_on_how_many():
    assert torch.equal(random.split(KEY, 5)[:2], random.split(KEY, 2))


def test_fold_in_of_a_tensor_is_fold_in_of_its_number():
    numbers = torch.tensor([0, 5, -1, 2**40], dtype=torch.int64)
    expected = torch.stack([random.fold_in(KEY, int(n)) for n in numbers])
    assert torch.equal(random.fold_in(KEY, numbers), expected)
    small = random.fold_in(KEY, torch.tensor(5, dtype=torch.int32))
    assert torch.equal(small, expected[1])


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, -(2**63)])
def test_seeds_of_64_bits(seed):
    assert random.key(seed).tolist() == [(seed + 2**63) % 2**64 - 2**63] * 2


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_moments_and_range(dtype):
    draw = random.uniform(KEY, (N,), dtype)
    assert draw.dtype == dtype and draw.min() >= 0 and draw.max() < 1
    wide = draw.double() + torch.finfo(dtype).eps / 4
    for power in (1, 2, 3):
        mean, square = 1 / (power + 1), 1 / (2 * power + 1)
        error = (wide**power).mean() - mean
        assert error.abs() < 4 * math.sqrt((square - mean**2) / N)
    assert abs(chi_square(torch.histc(wide, 64, 0, 1), N / 64)) < 4


def test_uniform_fills_the_mantissa():
    for dtype, digits in zip(FLOATS, (53, 24, 11, 8), strict=True):
        numbers = random.uniform(KEY, (N,), dtype).double() * 2.0**digits
        assert torch.equal(numbers, numbers.round())
        odd = numbers.to(torch.int64) & 1
        assert abs(odd.double().mean() - 0.5) < 4 * 0.5 / math.sqrt(N)


def test_uniform_between_bounds():
    unit = random.uniform(KEY, (100,), torch.float64)
    torch.testing.assert_close(
        random.uniform(KEY, (100,), torch.float64, -3.0, 5.0), unit * 8 - 3, rtol=0, atol=1e-15
    )
    bound = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    random.uniform(KEY, (100,), torch.float64, 1.0, bound).sum().backward()
    torch.testing.assert_close(bound.grad, unit.sum())


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_moments(dtype):
    draw = random.normal(KEY, (N,), dtype)
    assert draw.dtype == dtype and draw.isfinite().all()
    wide = draw.double()
    for power, mean, square in ((1, 0, 1), (2, 1, 3), (3, 0, 15), (4, 3, 105)):
        error = (wide**power).mean() - mean
        assert error.abs() < 4 * math.sqrt((square - mean**2) / N)
    cells = torch.histc(torch.special.ndtr(wide.float()), 16, 0, 1)
    assert dtype.itemsize == 2 or abs(chi_square(cells, N / 16)) < 4


def test_normal_ends_are_finite_and_symmetric(monkeypatch):
    for dtype, bound in ((torch.float32, 5.3), (torch.float64, 8.3)):
        ends = []
        for word in (0, 2**32 - 1):
            words = torch.full((2,), word)
            monkeypatch.setattr(random, "bits", lambda key, shape, w=words: w)
            ends.append(random.normal(KEY, (), dtype).flatten()[0].item())
        assert -bound < ends[0] == -ends[1] < -bound + 0.2


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.3, 0.5, 1.0])
def test_bernoulli(p):
    draw = random.bernoulli(KEY, p, (N,))
    assert draw.dtype == torch.bool
    assert abs(draw.double().mean() - p) <= 4 * math.sqrt(p * (1 - p) / N)
    assert torch.equal(draw, random.bernoulli(KEY, torch.tensor(p, dtype=torch.float64), (N,)))
    # The same words decide for every p, so masks of growing p are nested.
    assert not (draw & ~random.bernoulli(KEY, min(1.0, p + 0.1), (N,))).any()


@pytest.mark.parametrize(("low", "high"), [(0, 10), (-5, 2), (7, 8), (0, 1 << 16), (0, 3 << 29)])
def test_randint(low, high):
    draw = random.randint(KEY, (N,), low, high)
    assert draw.dtype == torch.int64 and draw.min() >= low and draw.max() < high
    span = high - low
    assert abs(draw.double().mean() - (low + high - 1) / 2) <= 4 * span / math.sqrt(12 * N)
    cells = min(span, 64)
    counts = torch.bincount((draw - low) * cells // span, minlength=cells)
    assert span == 1 or abs(chi_square(counts, N / cells)) < 4


def everything(key):
    first, second = random.split(random.fold_in(key, 5))
    return (
        random.uniform(first, (3, 4)),
        random.normal(second, (5,), torch.float64),
        random.bernoulli(random.fold_in(first, torch.tensor(2)), 0.5, (7,)),
        random.randint(second, (2, 3), 0, 1 << 20),
    )


def test_vmap_of_mapped_and_unmapped_keys():
    keys = random.split(KEY, 3)
    batched = torch.vmap(everything)(keys)
    columns = torch.vmap(everything, in_dims=1)(keys.T)
    rows = zip(*[everything(k) for k in keys], strict=True)
    for got, column, expected in zip(batched, columns, rows, strict=True):
        assert torch.equal(got, torch.stack(expected)) and torch.equal(column, got)
    shared = torch.vmap(lambda x: x + random.uniform(KEY, (4,)))(torch.zeros(3, 1))
    assert torch.equal(shared, random.uniform(KEY, (4,)).expand(3, 4))
    nested = torch.vmap(torch.vmap(lambda k: random.bits(k, (2,))))(random.split(keys, 2))
    assert torch.equal(nested, random.bits(random.split(keys, 2), (2,)))


def test_tracing_records_one_op_per_draw():
    graph = make_fx(lambda k: random.normal(k, (4, 5)), tracing_mode="fake")(KEY)
    names = [str(node.target) for node in graph.graph.nodes]
    assert names.count("torchard.random_bits.default") == 1
    assert torch.equal(graph(random.key(9)), random.normal(random.key(9), (4, 5)))
    traced = make_fx(everything, tracing_mode="fake")(KEY)
    for got, expected in zip(traced(KEY), everything(KEY), strict=True):
        assert torch.equal(got, expected)


def test_keys_can_be_made_inside_a_trace():
    graph = make_fx(lambda x: x * random.uniform(random.key(2**63 + 5), x.shape))(torch.ones(4))
    assert torch.equal(graph(torch.ones(4)), random.uniform(random.key(2**63 + 5), (4,)))


def test_grad_passes_by():
    def noisy(x, key):
        return (x**2 * random.uniform(key, x.shape, x.dtype)).sum()

    x = torch.arange(4, dtype=torch.float64)
    expected = 2 * x * random.uniform(KEY, (4,), torch.float64)
    assert torch.equal(torch.func.grad(noisy)(x, KEY), expected)
    graph = make_fx(torch.func.grad(noisy), tracing_mode="fake")(x, KEY)
    assert torch.equal(graph(x, KEY), expected)
    _, tangent = torch.func.jvp(lambda x: noisy(x, KEY), (x,), (torch.ones_like(x),))
    assert torch.equal(tangent, expected.sum())
    keys = random.split(KEY, 3)
    per_key = torch.vmap(torch.func.grad(noisy), (None, 0))(x, keys)
    assert torch.equal(per_key[2], torch.func.grad(noisy)(x, keys[2]))


def test_compiled_draws_are_the_same():
    compiled = torch.compile(everything, fullgraph=True)
    for got, expected in zip(compiled(KEY), everything(KEY), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_op_registration():
    args = (random.split(KEY, 3), [5, 6], [1, 2], [4, 6])
    torch.library.opcheck(torch.ops.torchard.random_bits.default, args)


def test_nothing_global_moves():
    before = torch.get_rng_state()
    everything(random.key(1))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: random.bits(torch.zeros(2), (3,)), r"float32 of shape \[2\].*random\.key"),
        (lambda: random.split(torch.zeros(3, dtype=torch.int64)), r"shape \[3\]"),
        (lambda: random.uniform(KEY, (3,), torch.int64), "int64.*randint"),
    ],
)
def test_wrong_types(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_wrong_values():
    with pytest.raises(ValueError, match=r"p is 1\.5"):
        random.bernoulli(KEY, 1.5, (3,))
    with pytest.raises(ValueError, match=r"low=3 and high=3 leave 0 integers"):
        random.randint(KEY, (3,), 3, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same():
    for got, expected in zip(everything(KEY.cuda()), everything(KEY), strict=True):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-6, atol=0)

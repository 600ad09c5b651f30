"""Random numbers from keys: pure functions, no generator and no global state.

A key is an int64 tensor [2]; batches of keys are [*batch, 2], and every draw from a batch has the
batch's dims in front. Bits depend on the key and the linear index in the whole array alone, so a
mask is the same on one device or many, in the forward or in a recompute. Under `torch.vmap` an
unmapped key gives every example the same values; split it and map the keys for different ones.
As in JAX, a key is for one use: draw from it once, or split it.

Everything is pointwise ATen on top of one opaque op, `torchard::random_bits`, whose words are
Philox4x64-10 (Salmon et al., SC 2011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchard.functional.core.arguments import checked
from torchard.functional.philox import block_cpu, block_torch

__all__ = ["bernoulli", "bits", "fold_in", "key", "normal", "randint", "split", "uniform"]

# Words from here on are never drawn: new keys are made of them.
SPLIT_WORDS = 1 << 62
FOLD_WORDS = SPLIT_WORDS + (1 << 61)


# Not `custom_op`: its wrapper costs more than a small draw.
LIBRARY = torch.library.Library("torchard", "FRAGMENT")
LIBRARY.define(
    "random_bits(Tensor key, SymInt[] size, SymInt[] start, SymInt[] stop) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _random_bits(
    key: Tensor, size: Sequence[int], start: Sequence[int], stop: Sequence[int]
) -> Tensor:
    """The block [start, stop) of the array of words of shape `size`.

    key int64 [*batch, 2] -> int64 [*batch, *(stop - start)], each in [0, 2^32).
    """
    words: Tensor = torch.ops.torchard.random_bits(key, size, start, stop)
    return words


def _run(key: Tensor, size: Sequence[int], start: Sequence[int], stop: Sequence[int]) -> Tensor:
    block = block_cpu if key.device.type == "cpu" else block_torch
    return block(key, size, start, stop)


def _fake(key: Tensor, size: Sequence[int], start: Sequence[int], stop: Sequence[int]) -> Tensor:
    block = [e - s for s, e in zip(start, stop, strict=True)]
    return key.new_empty((*key.shape[:-1], *block))


def _vmap(
    info: object,
    in_dims: tuple[int | None, ...],
    key: Tensor,
    size: Sequence[int],
    start: Sequence[int],
    stop: Sequence[int],
) -> tuple[Tensor, int]:
    return _random_bits(key.movedim(in_dims[0] or 0, 0), size, start, stop), 0


LIBRARY.impl("random_bits", _run, "CompositeExplicitAutograd")
torch.library.register_fake("torchard::random_bits", _fake, lib=LIBRARY)
torch.library.register_vmap("torchard::random_bits", _vmap, lib=LIBRARY)


def check_key(who: str, key: Tensor) -> None:
    if key.dtype != torch.int64 or key.dim() < 1 or key.shape[-1] != 2:
        raise TypeError(
            f"{who}: a key is an int64 tensor [*batch, 2], got {key.dtype} of shape {list(key.shape)}; "
            "make one with torchard.random.key(seed)"
        )


def _signed(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _new_keys(key: Tensor, count: int, first: int) -> Tensor:
    """Keys [*batch, count, 2] from the words of `key` that nobody draws."""
    check_key("random", key)
    stop = first + 4 * count
    words = _random_bits(key, [stop], [first], [stop]).reshape(*key.shape[:-1], count, 2, 2)
    return torch.bitwise_or(words[..., 0], words[..., 1] << 32)


@checked
def key(seed: int, *, device: torch.device | str | None = None) -> Tensor:
    """The key [2] of a seed, of which the low 64 bits count."""
    return torch.full((2,), _signed(seed), dtype=torch.int64, device=device)


@checked
def split(key: Tensor, n: int = 2) -> Tensor:
    """n new keys, [*batch, n, 2], independent of each other and of what `key` draws."""
    return _new_keys(key, n, SPLIT_WORDS)


@checked
def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """The key [*batch, 2] numbered `data` of `key`: a step, a layer, a rank.

    data is an int or an integer tensor that broadcasts with the batch. Different numbers give
    independent keys, also from those of `split`.
    """
    hashed = _new_keys(key, 1, FOLD_WORDS).squeeze(-2)
    mixed = hashed ^ (data.to(torch.int64).unsqueeze(-1) if isinstance(data, Tensor) else data)
    return _new_keys(mixed, 1, FOLD_WORDS).squeeze(-2)


@checked
def bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Uniform 32-bit words, int64 [*batch, *shape] in [0, 2^32)."""
    check_key("random", key)
    return _random_bits(key, list(shape), [0] * len(shape), list(shape))


def _bits64(key: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Two words for every element, each [*batch, *shape]."""
    words = bits(key, (*shape, 2))
    return words[..., 0], words[..., 1]


def _integers(key: Tensor, shape: Sequence[int], dtype: torch.dtype, digits: int) -> Tensor:
    """Whole numbers of `digits` bits, in a floating dtype that holds them exactly."""
    if digits <= 32:
        return (bits(key, shape) >> 32 - digits).to(dtype)
    low, high = _bits64(key, shape)
    return ((high << digits - 32) | (low >> 64 - digits)).to(dtype)


def _check_floating(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(
            f"random: dtype is {dtype}; it must be real and floating; for integers use randint"
        )


@checked
def uniform(
    key: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    low: float | Tensor = 0.0,
    high: float | Tensor = 1.0,
) -> Tensor:
    """Uniform in [low, high), [*batch, *shape]: every multiple of eps/2 of [0, 1) is as likely.

    With other bounds than 0 and 1 rounding can return `high` itself.
    """
    _check_floating(dtype)
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    unit = _integers(key, shape, dtype, digits) * 2.0**-digits
    if isinstance(low, float | int) and isinstance(high, float | int) and (low, high) == (0, 1):
        return unit
    return unit * (high - low) + low


@checked
def normal(key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal, [*batch, *shape], as sqrt(2) erfinv(u) with u on a symmetric open grid.

    float32 reaches 5.3 standard deviations, float64 8.2; half precisions are rounded float32.
    """
    _check_floating(dtype)
    wide = dtype if dtype.itemsize > 2 else torch.float32
    # One digit less than the dtype has: 2 n + 1 - 2^digits must be exact, and never +-2^digits.
    digits = -round(math.log2(torch.finfo(wide).eps))
    odd = _integers(key, shape, wide, digits) * 2 + (1 - 2**digits)
    return (torch.erfinv(odd * 2.0**-digits) * math.sqrt(2)).to(dtype)


@checked
def bernoulli(key: Tensor, p: float | Tensor, shape: Sequence[int]) -> Tensor:
    """Booleans [*batch, *shape], True with probability p to within 2^-32.

    p is a number in [0, 1] or a tensor that broadcasts with the result; out of a tensor, what lies
    below 0 means never and what lies above 1 always.
    """
    words = bits(key, shape)
    if isinstance(p, Tensor):
        return words < p.to(torch.float64) * 2**32
    if not 0 <= p <= 1:
        raise ValueError(f"p is {p}; a probability lies in [0, 1]")
    return words < math.ceil(p * 2**32)


@checked
def randint(key: Tensor, shape: Sequence[int], low: int, high: int) -> Tensor:
    """Integers int64 [*batch, *shape] in [low, high), each as likely to within 2^-32.

    Lemire's multiplication in place of a remainder ("Fast random integer generation in an
    interval", TOMACS 2019), without its rejection, so that the shape is static; intervals longer
    than 2^16 take 64 random bits.
    """
    span = high - low
    if not 0 < span <= 1 << 31:
        raise ValueError(
            f"randint: low {low} and high {high} leave {span} integers; it takes 1 to 2^31 of them."
        )
    if span <= 1 << 16:
        return (bits(key, shape) * span >> 32) + low
    least, most = _bits64(key, shape)
    return ((most * span + (least * span >> 32)) >> 32) + low

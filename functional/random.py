"""Random numbers from keys: pure functions, no generator and no global state.

A key is an int64 tensor [2]; batches of keys are [*batch, 2], and every draw from a batch has the batch's
dims in front. Bits depend only on the key and the linear index in the whole array, so a mask is the same
on one device or many, in the forward or when it is recomputed. Under `torch.vmap` an unmapped key gives
every example the same values; split it and map over the keys for different ones. As in JAX, use a key
only once: draw from it, or split it.

All draws are pointwise ATen operations on the result of one opaque op, `torchard::random_bits`, whose
words are Philox4x64-10 (Salmon et al., SC 2011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from torchard.functional.core.arguments import Like, checked
from torchard.functional.philox import block_cpu, block_torch

__all__ = ["bernoulli", "bits", "fold_in", "key", "normal", "randint", "split", "uniform"]

Key = Annotated[Tensor, Like("random.key(0)")]
Shape = Annotated[Sequence[int], Like("(2, 3)")]

# Words from here on are reserved for new keys, and never drawn.
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
    """New keys [*batch, count, 2], from reserved words of `key`."""
    check_key("random", key)
    stop = first + 4 * count
    words = _random_bits(key, [stop], [first], [stop]).reshape(*key.shape[:-1], count, 2, 2)
    return torch.bitwise_or(words[..., 0], words[..., 1] << 32)


@checked
def key(seed: int, *, device: torch.device | str | None = None) -> Tensor:
    """Make a key from a seed.

    Args:
        seed: any int, of which the low 64 bits are used.
        device: the device of the key and of all draws from it; by default torch's default device.

    Returns:
        A key, int64 ``[2]``.

    >>> from torchard import random
    >>> random.key(7)
    tensor([7, 7])
    """
    return torch.full((2,), _signed(seed), dtype=torch.int64, device=device)


@checked
def split(key: Key, n: int = 2) -> Tensor:
    """Make several keys from one. Do not use ``key`` itself afterwards.

    Args:
        key: int64 ``[*batch, 2]``.
        n: the number of new keys.

    Returns:
        Keys, int64 ``[*batch, n, 2]``, independent of each other and of draws from ``key``.

    >>> from torchard import random
    >>> keys = random.split(random.key(0), 3)
    >>> keys.shape
    torch.Size([3, 2])
    >>> random.randint(keys, (4,), 0, 10)                     # one row for each key of the batch
    tensor([[4, 1, 5, 4],
            [2, 7, 5, 9],
            [3, 8, 1, 2]])
    """
    return _new_keys(key, n, SPLIT_WORDS)


@checked
def fold_in(key: Key, data: int | Tensor) -> Tensor:
    """Derive a key from a key and a number, such as the number of a step, a layer or a rank.

    Args:
        key: int64 ``[*batch, 2]``.
        data: the number, an int or an integer tensor that broadcasts with ``batch``.

    Returns:
        A key, int64 ``[*batch, 2]``. Different numbers give independent keys, which are also independent
        of those that `split` returns.

    >>> from torchard import random
    >>> key = random.key(0)
    >>> [random.randint(random.fold_in(key, step), (), 0, 1000).item() for step in (0, 1, 2, 0)]
    [92, 88, 86, 92]
    """
    hashed = _new_keys(key, 1, FOLD_WORDS).squeeze(-2)
    mixed = hashed ^ (data.to(torch.int64).unsqueeze(-1) if isinstance(data, Tensor) else data)
    return _new_keys(mixed, 1, FOLD_WORDS).squeeze(-2)


@checked
def bits(key: Key, shape: Shape) -> Tensor:
    """Draw uniform 32-bit words.

    Args:
        key: int64 ``[*batch, 2]``.
        shape: the shape of the draw from one key.

    Returns:
        Integers in [0, 2^32), int64 ``[*batch, *shape]``.

    Source: Philox4x64-10, Salmon et al., SC 2011, section 3.3.

    >>> from torchard import random
    >>> random.bits(random.key(0), (3,))
    tensor([3392549196,  374689182, 1731006428])
    """
    check_key("random", key)
    return _random_bits(key, list(shape), [0] * len(shape), list(shape))


def _bits64(key: Key, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Two words for every element, each [*batch, *shape]."""
    words = bits(key, (*shape, 2))
    return words[..., 0], words[..., 1]


def _integers(key: Key, shape: Sequence[int], dtype: torch.dtype, digits: int) -> Tensor:
    """Random integers of `digits` bits, in a floating dtype that holds them exactly."""
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
    key: Key,
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    low: float | Tensor = 0.0,
    high: float | Tensor = 1.0,
) -> Tensor:
    """Draw uniformly from [low, high).

    Args:
        key: int64 ``[*batch, 2]``.
        shape: the shape of the draw from one key.
        dtype: a real floating dtype.
        low, high: the bounds, numbers or tensors that broadcast with the result. With bounds other than
            0 and 1, a result may be rounded to ``high``.

    Returns:
        ``[*batch, *shape]`` of this dtype. With bounds 0 and 1, all multiples of eps / 2 in [0, 1) are
        equally likely.

    Raises:
        TypeError: the dtype is not real and floating.

    >>> import torch
    >>> from torchard import random
    >>> random.uniform(random.key(0), (4,), low=10.0, high=20.0)
    tensor([17.8989, 10.8724, 14.0303, 18.5597])
    >>> random.uniform(random.key(0), (4,), torch.int64)
    Traceback (most recent call last):
        ...
    TypeError: random: dtype is torch.int64; it must be real and floating; for integers use
        randint
    """
    _check_floating(dtype)
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    unit = _integers(key, shape, dtype, digits) * 2.0**-digits
    if isinstance(low, float | int) and isinstance(high, float | int) and (low, high) == (0, 1):
        return unit
    return unit * (high - low) + low


@checked
def normal(key: Key, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw from the standard normal distribution.

    The result is sqrt(2) erfinv(u), with u uniform on a symmetric open grid. float32 reaches 5.3 standard
    deviations and float64 8.2; float16 and bfloat16 are rounded from float32.

    Args:
        key: int64 ``[*batch, 2]``.
        shape: the shape of the draw from one key.
        dtype: a real floating dtype.

    Returns:
        ``[*batch, *shape]`` of this dtype.

    Raises:
        TypeError: the dtype is not real and floating.

    >>> import torch
    >>> from torchard import random
    >>> random.normal(random.key(0), (2, 2), torch.float64)
    tensor([[-1.3580,  1.0624],
            [ 1.0084, -0.0156]], dtype=torch.float64)
    """
    _check_floating(dtype)
    wide = dtype if dtype.itemsize > 2 else torch.float32
    # One digit less than the dtype has: 2 n + 1 - 2^digits must be exact, and never +-2^digits.
    digits = -round(math.log2(torch.finfo(wide).eps))
    odd = _integers(key, shape, wide, digits) * 2 + (1 - 2**digits)
    return (torch.erfinv(odd * 2.0**-digits) * math.sqrt(2)).to(dtype)


@checked
def bernoulli(key: Key, p: float | Tensor, shape: Shape) -> Tensor:
    """Draw booleans that are True with probability p.

    Args:
        key: int64 ``[*batch, 2]``.
        p: a number in [0, 1], or a tensor that broadcasts with the result; entries of a tensor below 0
            count as 0, and those above 1 as 1.
        shape: the shape of the draw from one key.

    Returns:
        Booleans ``[*batch, *shape]``; the probability is exact to 2^-32.

    Raises:
        ValueError: ``p`` is a number outside [0, 1].

    >>> import torch
    >>> from torchard import random
    >>> random.bernoulli(random.key(0), torch.tensor([0.0, 0.5, 1.0]), (3,))
    tensor([False,  True,  True])
    """
    words = bits(key, shape)
    if isinstance(p, Tensor):
        return words < p.to(torch.float64) * 2**32
    if not 0 <= p <= 1:
        raise ValueError(f"p is {p}; a probability lies in [0, 1]")
    return words < math.ceil(p * 2**32)


@checked
def randint(key: Key, shape: Shape, low: int, high: int) -> Tensor:
    """Draw integers from [low, high).

    Args:
        key: int64 ``[*batch, 2]``.
        shape: the shape of the draw from one key.
        low: the smallest integer.
        high: one more than the largest integer; ``high - low`` is between 1 and 2^31.

    Returns:
        int64 ``[*batch, *shape]``; each integer has the same probability to within 2^-32.

    Raises:
        ValueError: the interval is empty or longer than 2^31.

    Source: Lemire, "Fast random integer generation in an interval", TOMACS 29 (2019), without its
    rejection step, so that shapes are static.

    >>> from torchard import random
    >>> random.randint(random.key(0), (8,), -5, 5)
    tensor([ 2, -5, -1,  3,  3,  3,  4, -1])
    """
    span = high - low
    if not 0 < span <= 1 << 31:
        raise ValueError(
            f"randint: low={low} and high={high} leave {max(span, 0)} integers; expected 1 to 2**31."
        )
    if span <= 1 << 16:
        return (bits(key, shape) * span >> 32) + low
    least, most = _bits64(key, shape)
    return ((most * span + (least * span >> 32)) >> 32) + low

"""Arguments that torch's compiled check finds to be like those of the last call have the same key."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchard import jit, tree
from torchard.functional.engine.cache_entry import CacheEntry
from torchard.functional.tracing.signature import Known, read

Pair = namedtuple("Pair", "x y")
Other = namedtuple("Other", "x y")


@tree.register_dataclass
@dataclass
class Fields:
    """Two fields, of which the second is static."""

    x: Any
    y: Any = field(metadata={"static": True})


class Registered(dict[Any, Any]):
    """A mapping that is a node by functions of the user's, which say nothing of its keys."""


tree.register(
    Registered,
    lambda d: (list(d.values()), tuple(d)),
    lambda keys, xs: Registered(zip(keys, xs, strict=True)),
)


X = torch.arange(6.0).view(2, 3)
# No two of them may share a trace.
DIFFERENT: dict[str, Any] = {
    "tensor": X,
    "dtype": X.double(),
    "shape": X[:, :2].clone(),
    "strides": X.T.contiguous().T,
    "rank": X.flatten(),
    "number": 2.0,
    "integer": 2,
    "nothing": None,
    "list": [X],
    "scalar": torch.tensor(1.0),
    "complex": X + 0j,
}


@pytest.mark.parametrize("first", DIFFERENT)
def test_other_arguments_have_other_keys(first: str) -> None:
    known = Known.of(read((DIFFERENT[first], X.clone()), {}))
    for second, value in DIFFERENT.items():
        call = (value, X.clone()), {}
        found = read(*call, known).key
        assert found == read(*call).key
        assert (found == read((DIFFERENT[first], X.clone()), {}).key) is (first == second)


def test_settings_are_part_of_what_is_compared() -> None:
    known = Known.of(read((X,), {}))
    assert known is not None and known.leaves_of(((X,), {}))
    with torch.autocast("cpu", torch.bfloat16):
        assert read((X,), {}, known).key != known.key
    torch.set_default_dtype(torch.float64)
    try:
        assert not known.leaves_of(((X,), {}))
    finally:
        torch.set_default_dtype(torch.float32)


def test_transforms_and_lazy_values_are_read_one_by_one() -> None:
    known = Known.of(read((X,), {}))
    assert known is not None
    seen: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(known.leaves_of(((x,), {})) is not None)
        return x.sum()

    torch.func.grad(f)(X)
    torch.func.vmap(f)(torch.stack([X, X]))
    assert seen == [False, False]
    conjugate = Known.of(read((X + 0j,), {}))
    assert conjugate is not None and conjugate.leaves_of((((X + 0j).conj(),), {})) is None


@pytest.mark.filterwarnings("ignore::torchard.RetraceWarning")
def test_calls_of_changing_arguments() -> None:
    f = jit(lambda x, y: x * 2 + y.sum(), backend="eager")
    tensors = [v for v in DIFFERENT.values() if isinstance(v, torch.Tensor)]
    for x, y in itertools.product(tensors, tensors):
        for _ in range(2):
            torch.testing.assert_close(f(x, y), x * 2 + y.sum())


def test_no_tensor_is_held() -> None:
    x = torch.ones(3)
    known = Known.of(read((x,), {}))
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert known is not None and alive() is None


# Containers of two values, by kind; where one takes the place of another, the trace is another one.
CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "pair": Pair,
    "other pair": Other,
    "dict": lambda x, y: {"x": x, "y": y},
    "dict, turned round": lambda x, y: {"y": y, "x": x},
    "dict of numbers": lambda x, y: {0: x, 1: y},
    "OrderedDict": lambda x, y: OrderedDict(x=x, y=y),
    "OrderedDict, turned round": lambda x, y: OrderedDict(y=y, x=x),
    "defaultdict": lambda x, y: defaultdict(int, x=x, y=y),
    "defaultdict of lists": lambda x, y: defaultdict(list, x=x, y=y),
    "deque": lambda x, y: deque([x, y]),
    "deque of at most 5": lambda x, y: deque([x, y], maxlen=5),
    "fields": lambda x, y: Fields((x, y), 1),
    "fields, another": lambda x, y: Fields((x, y), 2),
    "fields of a dict": lambda x, y: Fields({"x": x, "y": y}, 1),
    "fields of an OrderedDict": lambda x, y: Fields(OrderedDict(x=x, y=y), 1),
    "registered": lambda x, y: Registered(x={"a": x}, y={"b": y}),
    "registered, of two": lambda x, y: Registered(x=x, y=y),
    "deeper": lambda x, y: ((x,), [y]),
    "longer": lambda x, y: [x, y, y + 1],
}


@given(st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_known_trees_are_read_as_all_trees_are(rng: Random) -> None:
    """A random tree is known; others, in which one container is of another kind, are read beside it."""
    kinds = [rng.choice(list(CONTAINERS)) for _ in range(rng.randint(1, 5))]
    known = Known.of(read((_tree(kinds),), {"scale": X.clone()}))
    for at, kind in [
        (0, kinds[0]),
        *itertools.product(range(len(kinds)), rng.sample(list(CONTAINERS), 4)),
    ]:
        args = (_tree([*kinds[:at], kind, *kinds[at + 1 :]]),)
        found, fresh = read(args, {"scale": X}, known), read(args, {"scale": X})
        assert found.key == fresh.key
        assert found.structure == fresh.structure
        assert [*map(id, found.leaves)] == [*map(id, fresh.leaves)]


def _tree(kinds: Sequence[str]) -> Any:
    """Containers in each other, the first outermost, of different tensors."""
    inner: Any = X.clone()
    for kind in reversed(kinds):
        inner = (
            CONTAINERS[kind](X.clone(), inner)
            if kind != "longer"
            else [X.clone(), X.clone(), inner]
        )
    return inner


@pytest.mark.parametrize("lazy", [lambda z: z.conj(), lambda z: z.conj().imag, lambda z: z.imag])
def test_lazy_values_are_computed_whatever_was_known(
    lazy: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    z = torch.complex(X, X + 1)
    computed = lazy(z).resolve_conj().resolve_neg()
    for first in (lazy(z), computed.clone()):
        f = jit(lambda x, y: (_bits(x), _bits(y)), backend="eager")
        f(first, lazy(z))
        values = [first, lazy(z), computed.clone(), lazy(z).clone()]
        for x, y in itertools.product(values, values):
            resolved = (v.resolve_conj().resolve_neg() for v in (x, y))
            torch.testing.assert_close(f(x, y), tuple(map(_bits, resolved)))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The memory of a value, which a lazy one does not have yet."""
    return x.view(torch.float32).view(torch.int32)


def test_what_a_function_reads_is_compared_once_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    scale, compared = [1.0], list[CacheEntry]()
    closures = CacheEntry.closures

    def counted(entry: CacheEntry, *args: Any) -> Any:
        compared.append(entry)
        return closures(entry, *args)

    monkeypatch.setattr(CacheEntry, "closures", counted)
    f = jit(lambda x: x * scale[0], backend="eager")
    for value, count in ((1.0, 0), (1.0, 1), (2.0, 2), (2.0, 3)):  # the first call finds no entry
        scale[0] = value
        torch.testing.assert_close(f(X), X * value)
        assert len(compared) == count

"""Transformed functions are copied and pickled, called from several threads, and in children of forks."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from any_size import fuse

from torchard import Mesh, P, checkpoint, functionalize, jit, name, policies, shard
from torchard.functional import torch_internals as internals
from torchard.functional.core.locks import Lock
from torchard.functional.remat.policies import Shapes, as_policy

X = torch.arange(4.0)


def double(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def labelled(x: torch.Tensor) -> torch.Tensor:
    return name(x.sin(), "a") * 2


@checkpoint
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x.cos() * 3


class Holder(torch.nn.Module):
    """A module that holds a transformed function, one of its own parameters among what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(X.clone())
        self.fast = checkpoint(self.inner)
        self.act = jit(double, backend="eager")

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fast(x))


MAKE: dict[str, Callable[[], Any]] = {
    "checkpoint": lambda: checkpoint(double),
    "checkpoint by policy": lambda: checkpoint(labelled, policy=policies.save_names("a")),
    "jit": lambda: jit(double, backend="eager"),
    "fuse": lambda: fuse(double),
    "shard": lambda: shard(double, Mesh({"x": 2}, virtual=True), P("x"), P()),
    "a stack": lambda: jit(checkpoint(fuse(double)), backend="eager"),
    "decorated": lambda: decorated,
    "a module": Holder,
    "functionalized": lambda: functionalize(torch.nn.Tanh())[0],
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}


def call(fn: Any) -> torch.Tensor:
    args = ({}, X) if type(fn).__name__ == "Functional" else (X,)
    out = fn(*args)
    return out.full() if hasattr(out, "full") else out


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("what", MAKE)
@pytest.mark.parametrize("called", [False, True])
def test_a_copy_computes_the_same(what: str, how: str, called: bool) -> None:
    if what == "functionalized" and how == "pickle":
        pytest.skip("its modules' forwards are closures; pickle the module and functionalize again")
    fn = MAKE[what]()
    want = call(fn) if called else call(MAKE[what]())
    torch.testing.assert_close(call(COPIES[how](fn)), want, rtol=0, atol=0)
    torch.testing.assert_close(call(fn), want, rtol=0, atol=0)


def test_a_copied_module_reads_its_own_parameters() -> None:
    first = Holder()
    first(X)
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.weight.fill_(2.0)
    torch.testing.assert_close(second(X), double(X * 2))
    torch.testing.assert_close(first(X), double(X * X))


def keeps_products(op: str, shapes: Any, scope: str, name: str | None) -> bool:
    return op == "aten.mm"


ALL_POLICIES = [
    *(policies.save_nothing, policies.save_everything, policies.save_dots),
    *(policies.save_dots_with_no_batch_dims, policies.save_collectives),
    *(policies.save_names("a"), policies.save_all_but_names("a"), policies.offload_names("a")),
    *(policies.save_names("a") & policies.save_dots, policies.save_names("b") | policies.save_dots),
    *(policies.budget(fraction=0.5), as_policy(keeps_products)),
]


@pytest.mark.parametrize("policy", ALL_POLICIES, ids=str)
@pytest.mark.parametrize("how", COPIES)
def test_a_copied_policy_decides_the_same(policy: Any, how: str) -> None:
    again = COPIES[how](policy)
    assert str(again) == str(policy) and again.labels == policy.labels
    shapes = Shapes(((1, 2, 2), (1, 2, 2)), (1, 2, 2))
    for op in ("aten.mm", "aten.bmm", "aten.sin", "collective.all_reduce"):
        for label in (None, "a", "b"):
            assert again.over(op, shapes, "", [label]) == policy.over(op, shapes, "", [label])


def test_names_in_the_package_are_the_functions() -> None:
    from torchard import functional
    from torchard.functional import trace

    assert functional.checkpoint is checkpoint and functional.jit is jit
    assert all(map(inspect.isfunction, (functional.checkpoint, functional.jit, trace)))


def test_first_calls_from_several_threads_compile_one_after_another() -> None:
    runs = [jit(lambda x, k=k: (x * k).sin() + k) for k in range(2)]
    barrier = threading.Barrier(4)

    def first(i: int) -> torch.Tensor:
        barrier.wait()
        return runs[i % 2](X)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(first, range(4)))
    for i, value in enumerate(found):
        torch.testing.assert_close(value, (X * (i % 2)).sin() + i % 2)


def in_child(queue: Any, run: Any) -> None:
    queue.put((run(X).tolist(), torch.compiler.is_compiling()))


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_forked_while_another_thread_traces_can_trace() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        go_on.wait(60)
        return x * 2

    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    run = jit(double, backend="eager")
    thread = threading.Thread(target=lambda: jit(slow, backend="eager")(X))
    thread.start()
    try:
        assert inside.wait(60)
        child = context.Process(target=in_child, args=(queue, run))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert queue.get() == (double(X).tolist(), False)
    finally:
        go_on.set()
        thread.join()
        if child.is_alive():
            child.kill()


def test_a_lock_is_of_its_process() -> None:
    lock = Lock()
    with lock:
        assert lock.is_held()
        with copy.deepcopy(lock) as nothing:
            assert nothing is None
        lock.after_fork()
        assert lock.is_held()
        with lock:
            pass
    assert not lock.is_held()
    assert not internals.told_modes.one_at_a_time.is_held()

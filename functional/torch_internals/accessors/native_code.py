"""The kernels that one call of Inductor's code for a CPU runs, and libraries from C++ source.

Inductor's code is a Python function, `call`, in a module of its own: it allocates buffers and calls
kernels, under names of the module. Other objects under these names tell what it does with them.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchard.functional.torch_internals.accessors.required import needed, require

__all__ = ["Handle", "NativeCall", "NativeCalls", "Run", "library", "native_calls"]

# Products in torch's libraries, by the names that Inductor's code calls them by.
_PRODUCTS = {name: f"aoti_torch_cpu_{name}_out" for name in ("mm", "bmm", "addmm")}
_DTYPE = "aoti_torch_dtype_"
_HANDLES = ("aoti_torch_create_tensor_from_blob", "aoti_torch_delete_tensor_object")
_one_at_a_time = threading.Lock()  # a module's names are changed meanwhile
Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class NativeCall:
    """A call of a C function.

    Attributes:
        address: of the function.
        operands: a kernel is given their memory; a product their handles, that of the result first.
        is_product: whether it is given handles, and returns an error code.
    """

    address: int
    operands: tuple[torch.Tensor, ...]
    is_product: bool


@dataclass
class NativeCalls:
    """What a call of compiled code did.

    Attributes:
        results: what it returned: inputs, buffers, and views of both.
        calls: the C functions that it called, in order.
        buffers: the memory that it allocated.
        constants: what it reads besides its inputs.
    """

    results: Sequence[torch.Tensor] = ()
    calls: list[NativeCall] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    constants: list[torch.Tensor] = field(default_factory=list)


def native_calls(run: Run, inputs: Sequence[torch.Tensor]) -> NativeCalls | None:
    """What a compiled function does with these inputs; None if it does more than call C functions."""
    names = _names_of(run, inputs)
    if names is None:
        return None
    recorder = _Recorder(names)
    with _one_at_a_time, recorder.recording(), recorder:
        recorder.found.results = list(run(list(inputs)))
    return recorder.found if recorder.complete else None


def _names_of(run: Run, inputs: Sequence[torch.Tensor]) -> dict[str, Any] | None:
    """The module's names; None if it calls none of Inductor's code, or several parts of it."""
    found: list[dict[str, Any]] = []

    def on_event(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "call" and "extern_kernels" in frame.f_globals:
            found.append(frame.f_globals)

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        run(list(inputs))
    finally:
        sys.setprofile(before)
    return found[0] if len(found) == 1 else None


class _Recorder(TorchDispatchMode):
    """Notes what this thread calls by the names of a module, and whether it computes in other ways."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self.complete, self.found = names, True, NativeCalls()
        self.found.constants = [x for x in names.values() if isinstance(x, torch.Tensor)]
        self.thread, self.inside = threading.get_ident(), False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which the module's names are of what notes its calls."""
        before = {
            name: value
            for name, value in self.names.items()
            if name.startswith("cpp_fused") or name in ("extern_kernels", "empty_strided_cpu")
        }
        for name, value in before.items():
            self.names[name] = self._noting(name, value)
        try:
            yield
        finally:
            self.names.update(before)

    def _noting(self, name: str, value: Any) -> Any:
        if name == "extern_kernels":
            return _Products(self, value)
        return self._noted(value, self._allocated if name == "empty_strided_cpu" else self._kernel)

    def _noted(self, function: Any, note: Callable[..., None]) -> Any:
        """The function, each call of which is noted, with its result, if it is of this thread."""

        def call(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != self.thread:
                return function(*args, **options)
            self.inside = True
            try:
                result = function(*args, **options)
            finally:
                self.inside = False
            note(function, result, *args, **options)
            return result

        return call

    def _allocated(self, _: Any, result: torch.Tensor, *args: Any) -> None:
        self.found.buffers.append(result)

    def _kernel(self, function: Any, _: Any, *args: Any) -> None:
        file = getattr(getattr(function, "__self__", None), "__file__", None)
        kernel = None if file is None else getattr(ctypes.CDLL(file), "kernel", None)
        if kernel is None or not all(isinstance(x, torch.Tensor) for x in args):
            self.complete = False
        else:
            self.found.calls.append(NativeCall(_address(kernel), args, False))

    def product(self, name: str, *operands: Any, out: Any = None, **options: Any) -> None:
        """Note a product, of a result that is given."""
        library, known = _of_torch(), _PRODUCTS.get(name, "")
        dtypes = [_DTYPE + _name(x.dtype) for x in operands if isinstance(x, torch.Tensor)]
        there = all(hasattr(library, x) for x in (known, *_HANDLES, *dtypes))
        if not there or out is None or any(x != 1 for x in options.values()):
            self.complete = False
        else:
            address = _address(getattr(library, known))
            self.found.calls.append(NativeCall(address, (out, *operands), True))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.complete &= self.inside or func.is_view
        return func(*args, **(kwargs or {}))


class _Products:
    """Inductor's `extern_kernels`, each of which is noted."""

    def __init__(self, recorder: _Recorder, given: Any) -> None:
        self._recorder, self._given = recorder, given

    def __getattr__(self, name: str) -> Any:
        def note(_: Any, result: Any, *args: Any, **options: Any) -> None:
            self._recorder.product(name, *args, **options)

        return self._recorder._noted(getattr(self._given, name), note)


def _address(function: Any) -> int:
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


@cache
def _of_torch() -> ctypes.CDLL | None:
    """torch's library for CPUs, if it is where it is looked for."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        file = Path(torch.__file__).parent / "lib" / name
        if file.exists():
            return ctypes.CDLL(str(file))
    return None


class Handle:
    """What torch's C functions take for a tensor: here, for a view of memory that the caller keeps.

    Attributes:
        number: it.
    """

    def __init__(
        self, address: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> None:
        library: Any = _of_torch()
        code = getattr(library, _DTYPE + _name(dtype))()
        sizes, strides = ((ctypes.c_int64 * len(x))(*x) for x in (size, stride))
        made = ctypes.c_void_p()
        failed = library.aoti_torch_create_tensor_from_blob(
            ctypes.c_void_p(address), ctypes.c_int64(len(sizes)), sizes, strides, ctypes.c_int64(0),
            ctypes.c_int32(code), ctypes.c_int32(0), ctypes.c_int32(0), ctypes.byref(made),
        )  # fmt: skip
        assert not failed and made.value is not None
        self.number = made.value
        self._delete: Any = library.aoti_torch_delete_tensor_object
        self._made = made

    def __del__(self) -> None:
        if hasattr(self, "_made"):
            self._delete(self._made)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).partition(".")[2]


def library(source: str) -> ctypes.CDLL:
    """The library of C++ source, compiled as Inductor's own, and kept on disk with them."""
    with needed():
        from torch._inductor.codecache import CppCodeCache

        require(CppCodeCache, "load")
    found = CppCodeCache.load(source)
    assert isinstance(found, ctypes.CDLL)
    return found

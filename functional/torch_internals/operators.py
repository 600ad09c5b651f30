"""torch's operators, looked up so that one that this version of torch lacks is not an error.

Versions of torch add and remove overloads. Tables (factor rules, formulas, decompositions) name
those of every supported version; an operator that torch lacks is an `Absent`, which is in no program,
so its entry is never used.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__all__ = ["COLLECTIVES", "Absent", "aten", "c10d", "missing", "prims"]


class Absent:
    """Stands for an operator that this version of torch does not have."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}, absent from torch {torch.__version__}>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"torch {torch.__version__} has no operator {self.name}: install a version of torch in the "
            "range of torchard's pyproject.toml."
        )


_missing: dict[str, Absent] = {}


def missing() -> tuple[str, ...]:
    """The names of operators that were looked up so far and that torch lacks."""
    return tuple(sorted(_missing))


class _Packet:
    """All overloads of one operator; a call selects one as torch does."""

    def __init__(self, space: str, name: str) -> None:
        self._name = f"{space}.{name}"
        self._torch = getattr(getattr(torch.ops, space), name, None)

    def __getattr__(self, overload: str) -> Any:
        if overload.startswith("__"):  # from copy, pickle, inspect: not an operator's name
            raise AttributeError(overload)
        target = getattr(self._torch, overload, None)
        if target is None:
            name = f"{self._name}.{overload}"
            target = _missing.setdefault(name, Absent(name))
        self.__dict__[overload] = target  # cached: the next lookup does not call this
        return target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._torch is None:
            return Absent(self._name)(*args, **kwargs)
        return self._torch(*args, **kwargs)


class _Namespace:
    """The operators of one namespace of ``torch.ops``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, operator: str) -> _Packet:
        if operator.startswith("__"):
            raise AttributeError(operator)
        packet = self.__dict__[operator] = _Packet(self._name, operator)
        return packet


aten: Any = _Namespace("aten")
prims: Any = _Namespace("prims")
# Functional collectives; no public module has these operators. Compiled code contains this name.
COLLECTIVES = "_c10d_functional"
c10d: Any = _Namespace(COLLECTIVES)

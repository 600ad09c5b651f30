"""Machine: rates of one rank's computation, and of the links between ranks."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch

from torchard.functional.core.arguments import AtLeast, check_fields, nearest

__all__ = ["Link", "Machine"]

# What may follow the name of an axis in `Machine.links`.
_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "ppermute", "psum_scatter", "send")
_DTYPES = sorted({str(x)[6:] for x in vars(torch).values() if isinstance(x, torch.dtype)})


def _check_rates(who: str, **rates: float) -> None:
    for name, rate in rates.items():
        if not rate > 0:
            raise ValueError(f"{who}: the rate {name} is {rate}; rates are more than 0.")


def _check_seconds(who: str, **times: float) -> None:
    for name, seconds in times.items():
        if math.isinf(seconds):
            raise ValueError(f"{who}: {name} is {seconds}; it is a finite number of seconds.")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


@dataclass(frozen=True)
class Link:
    """How ranks along a mesh axis send to each other.

    Attributes:
        bandwidth: bytes per second that a rank sends, and receives.
        latency: seconds that a collective takes if it sends almost nothing.

    Source: Hockney, "The communication challenge for MPP", 1994.

    >>> import torchard as ta
    >>> ta.Link(bandwidth=1e9, latency=1e-4).seconds(1e6)
    0.0011
    """

    bandwidth: Annotated[float, AtLeast(0)]
    latency: Annotated[float, AtLeast(0)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        _check_rates("Link", bandwidth=self.bandwidth)
        _check_seconds("Link", latency=self.latency)

    def seconds(self, size: float) -> float:
        """The seconds of a collective by which a rank sends a number of bytes (Hockney's model)."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """The rates of a machine, by which ``.lower(...).time(machine)`` predicts seconds.

    Raises:
        ValueError: there is no rate for float32, or one for what is no dtype; a rate is 0; a time, an
            efficiency or ``alone`` is infinite; ``overlaps`` or ``hides`` is not a share; a key of
            ``links`` names no axis, or no collective.

    Attributes:
        name: the name of the machine.
        flops: floating point operations per second of products in each dtype, such as ``"bfloat16"``.
        bandwidth: bytes per second between memory and a rank's processor.
        launch: seconds that each operation takes, however small.
        view: seconds that a view takes.
        call: seconds that a call of a program takes, however little it computes.
        efficiency: the share of these rates that an operation reaches, by its name, such as
            ``"aten.gelu"``; ``"aten.mm/memory"`` where memory bounds a product, and
            ``"aten.clone/strided"`` where an operand's elements lie in another order than the
            result's. Of all others, 1.
        memory: bytes of memory of a rank.
        link: the link of axes that are not in ``links``.
        links: the link of each mesh axis, ``"tp"``, or of one collective along it, ``"tp/all_gather"``.
        overlaps: the share of the time that a transfer's bytes take in which the rank can compute; in the
            rest it sends.
        hides: the share of a transfer's latency in which the rank can compute.
        alone: how many times as fast a rank computes and sends while no other that shares its processor
            does: rates are those of ranks that all do.
        source: where the rates are from.

    >>> import torch, torchard as ta
    >>> slow = ta.Machine("slow", flops={"float32": 1e6}, bandwidth=1e6)
    >>> operands = ta.ShapeDtype((10, 50)), ta.ShapeDtype((50, 100))
    >>> product = ta.jit(torch.mm, backend="eager").lower(*operands)
    >>> round(product.time(slow).seconds, 3)             # 100,000 FLOPs
    0.1
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: Annotated[float, AtLeast(0)]
    launch: Annotated[float, AtLeast(0)] = 0.0
    view: Annotated[float, AtLeast(0)] = 0.0
    call: Annotated[float, AtLeast(0)] = 0.0
    efficiency: Mapping[str, float] = field(default_factory=dict)
    memory: Annotated[int, AtLeast(0)] = 0
    link: Link = Link(float("inf"))
    links: Mapping[str, Link] = field(default_factory=dict)
    overlaps: Annotated[float, AtLeast(0)] = 1.0
    hides: Annotated[float, AtLeast(0)] = 1.0
    alone: Annotated[float, AtLeast(1)] = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_names()
        if "float32" not in self.flops:
            raise ValueError(
                f'Machine {self.name!r} has rates for {", ".join(self.flops) or "no dtype"}; flops needs '
                'a rate for "float32", which other dtypes have by default.'
            )
        _check_rates(f"Machine {self.name!r}", bandwidth=self.bandwidth, **self.flops)
        _check_seconds(f"Machine {self.name!r}", launch=self.launch, view=self.view, call=self.call)
        for name, share in self.efficiency.items():
            if not 0 < share < math.inf:
                raise ValueError(
                    f"Machine {self.name!r}: efficiency[{name!r}] is {share}; a share is a finite number "
                    "more than 0."
                )
        if math.isinf(self.alone):
            raise ValueError(
                f"Machine {self.name!r}: alone is {self.alone}; it is a finite number, at least 1."
            )
        for name in ("overlaps", "hides"):
            if getattr(self, name) > 1:
                raise ValueError(f"Machine: {name} is {getattr(self, name)}; it is a share, from 0 to 1.")

    def _check_names(self) -> None:
        """Check the keys of rates: dtypes, and mesh axes with or without a collective."""
        for dtype in self.flops:
            if dtype not in _DTYPES:
                raise ValueError(
                    f"Machine {self.name!r}: flops has a rate for {dtype!r}, which is not the name of a "
                    f"dtype of torch; the nearest are {_listed(nearest(dtype, _DTYPES, 2))}."
                )
        for key in self.links:
            axis, slash, kind = key.partition("/")
            if not axis.isidentifier() or (slash and kind not in _COLLECTIVES):
                raise ValueError(
                    f"Machine {self.name!r}: links has a link for {key!r}; write a mesh axis, as in "
                    f"'dp', or a mesh axis and one of {_listed(_COLLECTIVES)}, as in 'dp/all_reduce'."
                )

    def sending(self, link: Link, size: float) -> float:
        """The seconds for which a rank that sends a number of bytes by a link computes nothing."""
        return (1 - self.hides) * link.latency + (1 - self.overlaps) * size / link.bandwidth

    def speed(self, computing: float) -> float:
        """How many times as fast a rank computes while a share of all ranks does."""
        return min(self.alone, 1 / computing) if computing else 1.0

    def __hash__(self) -> int:  # its rates are mappings, which have no hash
        return hash(self.name)

    def rate(self, dtype: str) -> float:
        """FLOPs per second of products in a dtype; of one that is not known, those of float32."""
        return self.flops.get(dtype, self.flops["float32"])

    def share(self, name: str) -> float:
        """The share of the rates that an operation reaches, by its name."""
        share = self.efficiency.get(name)
        return self.efficiency.get(name.partition("/")[0], 1.0) if share is None else share

    def link_of(self, axes: Sequence[str], kind: str = "") -> Link:
        """The link of a collective; over several axes, the slowest of theirs."""
        each = [self.links.get(f"{a}/{kind}", self.links.get(a, self.link)) for a in axes]
        if len(each) < 2:
            return each[0] if each else self.link
        return Link(min(x.bandwidth for x in each), max(x.latency for x in each))

    def shared_by(self, ranks: float) -> Machine:
        """The machine as each of several ranks sees it, that share a processor and its memory."""
        return replace(self.slowed(ranks, ranks), memory=int(self.memory / ranks))

    def slowed(self, launching: float, moving: float) -> Machine:
        """The machine whose launches, views and calls, and whose rates, are slower by factors."""
        return replace(
            self,
            flops={dtype: rate / moving for dtype, rate in self.flops.items()},
            bandwidth=self.bandwidth / moving,
            launch=self.launch * launching,
            view=self.view * launching,
            call=self.call * launching,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rates to a JSON file."""
        Path(path).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Machine:
        """Read the rates from a JSON file that `save` wrote.

        Raises:
            ValueError: the file has other contents.
        """
        try:
            known = json.loads(Path(path).read_text(encoding="utf-8"))
            links = {axis: Link(**link) for axis, link in known.pop("links").items()}
            return Machine(**known | {"link": Link(**known["link"]), "links": links})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"Machine.load: {path} is not a file that Machine.save wrote ({error}); "
                "save the machine again."
            ) from error

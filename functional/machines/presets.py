"""Machines from their makers' data sheets: the rates are limits, which programs do not reach.

FLOPs are those of dense products. A link's bandwidth is that of one direction.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torchard.functional.core.arguments import checked
from torchard.functional.machines.machine import Link, Machine

__all__ = ["PLANNING", "cpu", "default", "h100", "h200", "v100"]

_NDR = Link(400e9 / 8, 10e-6)  # InfiniBand NDR, one port of 400 Gb/s for each GPU
_EDR = Link(4 * 100e9 / 8 / 8, 10e-6)  # four ports of 100 Gb/s for the eight GPUs of a host

_V100 = Machine(
    "V100",
    flops={"float16": 125e12, "float32": 15.7e12, "float64": 7.8e12},
    bandwidth=900e9,
    launch=4e-6,
    memory=32 * 2**30,
    link=Link(300e9 / 2, 5e-6),
    source="NVIDIA V100 Tensor Core GPU data sheet (SXM2, 32 GB), 2020",
)
_H100 = Machine(
    "H100",
    flops={
        "float8_e4m3fn": 1979e12,
        "bfloat16": 989.4e12,
        "float16": 989.4e12,
        "float32": 66.9e12,
        "float64": 66.9e12,
    },
    bandwidth=3.35e12,
    launch=3e-6,
    memory=80 * 10**9,
    link=Link(900e9 / 2, 5e-6),
    source="NVIDIA H100 Tensor Core GPU data sheet (SXM5), 2024; architecture white paper",
)
_H200 = replace(
    _H100,
    name="H200",
    bandwidth=4.8e12,
    memory=141 * 10**9,
    source="NVIDIA H200 Tensor Core GPU data sheet (SXM), 2024",
)

_ETHERNET = Link(10e9 / 8, 500e-6)
_CORE = Machine(
    "one core of a host",
    flops={"float32": 76.8e9, "float64": 38.4e9},
    bandwidth=8e9,
    launch=5e-6,
    memory=4 * 2**30,
    link=Link(1e9, 400e-6),
    overlaps=0.0,  # gloo sends by processors, which compute otherwise
    source="AMD EPYC 9654 data sheet, 2022; gloo between processes of a host",
)

# A plan is to send what an expert's would: little, however small the program is. So the network is slow,
# and its latency is that of 4 kB.
PLANNING = Machine(
    "a slow network",
    flops={"float32": 64e9},
    bandwidth=384e9,
    link=Link(1e9, 4e-6),
    source="a byte that is sent costs as much as 64 FLOPs, or 384 bytes of memory; a collective 4 kB",
)


def default(device_type: str) -> Machine:
    """The machine by which choices are made on a type of device, unless another is given.

    On CPUs ranks are cores of one host, and send by gloo; otherwise they are H100s of one host.
    """
    return _CORE if device_type == "cpu" else _H100


@checked
def v100(between: Collection[str] = ()) -> Machine:
    """A host of eight V100s, joined by NVLink.

    Args:
        between: the mesh axes along which ranks are on different hosts, joined by InfiniBand EDR.

    Returns:
        The machine, as one of its GPUs sees it.

    >>> from torchard import machines
    >>> machines.v100().link_of(["tp"]).bandwidth
    150000000000.0
    """
    return _between(_V100, between, _EDR)


@checked
def h100(between: Collection[str] = ()) -> Machine:
    """A host of eight H100s, joined by NVLink.

    Args:
        between: the mesh axes along which ranks are on different hosts, joined by InfiniBand NDR.

    Returns:
        The machine, as one of its GPUs sees it.

    >>> from torchard import machines
    >>> machines.h100().link_of(["tp"]).bandwidth
    450000000000.0
    """
    return _between(_H100, between, _NDR)


@checked
def cpu(between: Collection[str] = ()) -> Machine:
    """A core of a server, whose ranks send to each other by gloo.

    Args:
        between: the mesh axes along which ranks are on different hosts, joined by Ethernet of 10 Gb/s.

    Returns:
        The machine, as one rank on one core sees it: the one by which choices on CPUs are made.

    >>> from torchard import machines
    >>> machines.cpu().link_of(["tp"]).latency
    0.0004
    """
    return _between(_CORE, between, _ETHERNET)


@checked
def h200(between: Collection[str] = ()) -> Machine:
    """A host of eight H200s, joined by NVLink.

    Args:
        between: the mesh axes along which ranks are on different hosts, joined by InfiniBand NDR.

    Returns:
        The machine, as one of its GPUs sees it.

    >>> from torchard import machines
    >>> machines.h200().link_of(["tp"]).bandwidth
    450000000000.0
    """
    return _between(_H200, between, _NDR)


def _between(machine: Machine, axes: Collection[str], link: Link) -> Machine:
    return replace(machine, links=dict.fromkeys(axes, link))

"""Machines, for ``.lower(...).time(machine)``: from their makers' data sheets, or measured.

>>> import torchard as ta
>>> from torchard import machines
>>> hosts = machines.h100(between=["dp"])              # tp inside of a host, dp between hosts
>>> hosts.link_of(["tp"]).bandwidth, hosts.link_of(["dp"]).bandwidth
(450000000000.0, 50000000000.0)
"""

from torchard.functional.machines.presets import cpu, h100, h200, v100
from torchard.sharding.measuring.measure import measure

__all__ = ["cpu", "h100", "h200", "measure", "v100"]

"""One rank of a group that does not exist: what it would send goes nowhere, what arrives is arbitrary.

    python one_rank.py WORLD LAYERS WIDTH PREFETCH...

prints what a rank holds during a step on one row, for each distance, as JSON. Torch's fake process group
has no store, so the others' answers, which are this rank's own, are given here.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

from paths import EXAMPLES

warnings.simplefilter("error")
# torch imports its own TorchScript modules, and says so.
warnings.filterwarnings("ignore", "`torch.jit.*` is deprecated", DeprecationWarning)
sys.path.append(str(EXAMPLES))

import live_bytes  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import train_gpt  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import torchard.sharding.lowering.plan_consistency as agree  # noqa: E402
from torchard import Mesh, Schedule  # noqa: E402


def main(world: int, layers: int, width: int, *prefetch: int) -> None:
    def alone(mesh: Mesh, what: str, mine: Any, *_: Any, **__: Any) -> list[Any]:
        return [mine] * world

    torch.set_num_threads(1)
    agree.exchange = alone
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    size = train_gpt.Size(context=32, width=width, heads=4, layers=layers)
    mesh = Mesh({"dp": world})
    found = [live_bytes.fully_sharded(mesh, size, 1, Schedule(prefetch=n)) for n in prefetch]
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""Ten steps of AdamW by a pipeline are those of one device, wherever parameters and moments live."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from microbatched import BATCH
from pipelined import MODELS, model, whole

from torchard import Mesh, P, optim, pipeline, place, stage_specs
from torchard.sharding.pipelining.schedules import SCHEDULES

INSIDE: dict[str, dict[str, int]] = {"alone": {}, "dp": {"dp": 2}, "fsdp": {"dp": 2}, "tp": {"tp": 2}}


@pytest.mark.sampled(90)
@pytest.mark.filterwarnings("ignore::torchard.IdleAxisWarning")
@pytest.mark.parametrize(
    ("name", "inside", "ranks", "schedule"), list(product(MODELS, INSIDE, (2, 4), SCHEDULES))
)
def test_ten_steps_of_adamw(name: str, inside: str, ranks: int, schedule: str) -> None:
    case = model(name, 8)
    params, *batch = case.args
    optimizer = optim.adamw(1e-2)

    def train(params: Any, state: Any, *batch: torch.Tensor) -> Any:
        gradients, loss = torch.func.grad_and_value(case.loss)(params, *batch)
        return *optimizer.update(gradients, state, params), loss

    mesh = Mesh({"pp": ranks, **INSIDE[inside]}, virtual=True)
    step = pipeline(
        train,
        mesh,
        "pp",
        stages=case.layers,
        microbatches=5,
        batch=(None, None, *BATCH[1:]),
        schedule=schedule,
    )
    want, have = (params, optimizer.init(params)), (params, optimizer.init(params))
    if inside == "fsdp":
        specs = P("dp")
    else:
        split = {"up": P(None, "tp"), "bias": P("tp"), "down": P("tp")} if inside == "tp" else {}
        layers = [{key: split.get(key, P()) for key in layer} for layer in params["layers"]]
        given = {**{key: P() for key in params}, "layers": layers}
        specs = stage_specs(step, params, have[1], *batch, specs=given)
    placed = place(params, mesh, specs)
    have = (placed, optimizer.init(placed))
    rows = [place(x, mesh, P("dp")) if "dp" in mesh.shape else x for x in batch]
    for _ in range(10):
        *want, loss = train(*want, *batch)
        *have, found = step(*have, *rows)
        torch.testing.assert_close(whole(found), loss, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(whole(have[0]), want[0], rtol=1e-7, atol=1e-7)

"""What cannot be a pipeline is refused by name, with its line and a remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelined import model

from torchard import AccumulateError, Mesh, PipelineError, PipelineSchedule, Task, pipeline, scope

MESH = Mesh({"pp": 2}, virtual=True)


def crossed(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with scope("a"):
        x = x @ w
    with scope("b"):
        x = x @ w
    with scope("a"):
        return x @ w


def statistics(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with scope("a"):
        x = x @ w
    x = x / x.std(0)
    with scope("b"):
        return x @ w


W, X = torch.eye(4), torch.ones(8, 4)
SERIAL = PipelineSchedule((tuple(Task(0, m, "F") for m in range(3)),))


@pytest.mark.parametrize(
    ("fn", "options", "error", "message"),
    [
        (crossed, {"stages": ("a", "b")}, PipelineError, r"stage 1 \(.*:\d+ in crossed\) gives a value"),
        (crossed, {"stages": "layer/*"}, PipelineError, r"'layer/\*' matches no scope; its scopes"),
        (crossed, {"stages": ("a", "c")}, PipelineError, "'c' matches no scope"),
        (crossed, {"stages": ("a", "?")}, PipelineError, "both match the scope 'a'"),
        (crossed, {"stages": "b"}, PipelineError, "scopes that match 'b', but there is 1"),
        (crossed, {"schedule": "2f2b"}, PipelineError, "no such schedule; the given ones are 'gpipe'"),
        (crossed, {"schedule": SERIAL}, PipelineError, "it is for 1 ranks and 3 microbatches; axis 'pp'"),
        (crossed, {"microbatches": 3, "batch": (None, 0)}, AccumulateError, r"^pipeline\(microbatches=3"),
        (crossed, {"microbatches": 2, "batch": (None, 2)}, AccumulateError, r"^pipeline\(.* no dim 2"),
        (crossed, {"microbatches": 2}, AccumulateError, r"^pipeline\(crossed, .* no argument has"),
        (statistics, {"microbatches": 2, "batch": (None, 0)}, AccumulateError, "Statistics of the batch"),
    ],
)
def test_is_refused(fn: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pipeline(fn, MESH, "pp", **options)(W, X)


def test_an_axis_that_is_not_there() -> None:
    with pytest.raises(PipelineError, match=r"axis='stage'.*its axes are pp"):
        pipeline(crossed, MESH, "stage")


def test_more_stages_than_patterns() -> None:
    case = model("mlp")
    stages = ("layer/[01]", "layer/[23]")
    with pytest.raises(PipelineError, match="2 patterns for 4 chunks"):
        pipeline(case.loss, MESH, "pp", stages=stages, schedule="zb-v")(*case.args)

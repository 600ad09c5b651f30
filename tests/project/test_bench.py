"""What the benchmark compares computes the same; nothing is timed here."""

from __future__ import annotations

import re
from pathlib import Path

import forked
import pytest
from paths import BENCHMARKS, SUPPORT


@pytest.mark.timeout(240)
def test_rivals_agree(tmp_path: Path) -> None:
    script = SUPPORT / "forked_bench.py"
    done = forked.run([str(script), "--check"], tmp_path, 200, stderr=tmp_path / "stderr")
    assert done.returncode == 0, done.stderr
    found = re.search(r"all rivals agree with one device in float64 to (\S+)", done.stdout)
    assert found and 0 < float(found[1]) < 1e-5


def test_a_wrong_rival_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench
    import workload

    shape = workload.Shape(8, 1, 2, rounds=1, layers=1)
    right = workload.reference(shape)
    wrong = [*right[:-1], right[-1] * (1 + 1e-3)]
    rivals = [
        workload.Rival(n, lambda: None, lambda _, v=v: v)
        for n, v in (("right", right), ("wrong", wrong))
    ]
    errors = bench.errors_of(rivals, shape)
    assert errors["right"] == 0 and errors["wrong"] > bench.TOLERANCE

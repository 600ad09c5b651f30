"""The examples, in this process on virtual meshes: they assert their own plans and comparisons."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import cases
from paths import EXAMPLES

from torchard import Mesh, place, random, shard
from torchard.testing import equal, localize


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import an example by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    handler = signal.getsignal(signal.SIGINT)  # which those that train take over
    yield importlib.import_module
    signal.signal(signal.SIGINT, handler)


def test_slapo_mlp(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    load("slapo_mlp").main(width=32, rows=(2, 4))
    text = capsys.readouterr().out
    assert "2 collectives" in text and "gradient of args[0]['w1']" in text
    assert len(re.findall(r"^\S+\(.*\) +\d\.\de-\d\d$", text, re.M)) == 4


def test_recurrent(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Its gradient is completed once, whatever the number of steps; each loss is printed where it ran."""
    trained = load("recurrent").main(ranks=2, steps=10)
    text = capsys.readouterr().out
    assert "1 collective" in text
    shown = re.findall(r"step (\d): loss ([\d.]+)", text)
    assert [i for i, _ in shown] == ["0", "5"] * 2 and shown[:2] == shown[2:]
    for name, want in trained["alone"].items():
        torch.testing.assert_close(trained["mesh"][name].full(), want, rtol=1e-5, atol=1e-6)


def test_sequence_parallel(load: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    load("sequence_parallel").main(steps=3, out=tmp_path)
    assert "5 collectives" in capsys.readouterr().out
    (trace,) = tmp_path.glob("*.json")
    events = json.loads(trace.read_text())["traceEvents"]
    names = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert names["step 0"] == names["step 2"] == 1
    scopes = ("first", "second")
    assert all(names[f"{s} {phase}"] >= 3 for s in scopes for phase in ("forward", "backward"))
    assert names["all_gather over tp, first forward"] == 3


def test_parallelize_plan(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    load("parallelize_plan").main(width=16)
    text = capsys.readouterr().out
    assert "0.norm/in          pinned       P('dp', 'tp')" in text
    assert "plan['*.l3']: it matches no module" in text and "'columns' is not a style" in text


@pytest.mark.filterwarnings("ignore::torchard.RetraceWarning")
def test_property_testing(load: Any) -> None:
    example = load("property_testing")
    message, x = example.search(mended=False)
    assert "out " in message and str(x) == "2 tokens of width 1, window 2"
    found = localize(example.sharded(2, False), example.local_attention(2), x.q, x.k, x.v)
    assert {(o.op, o.source.split()[-1]) for o in found.fn} == {("torchard.ppermute", "with_halo")}
    equal(example.sharded(2, True), example.local_attention(2), x.q, x.k, x.v, orders=example.ORDERS)


def test_nvfuser_mlp(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    load("nvfuser_mlp").main()
    assert "bit for bit" in capsys.readouterr().out


def test_checkpointing(load: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--layers", "1", "--width", "16", "--context", "8", "--batch", "4", "--rounds", "1"]
    load("checkpointing").main([*sizes, "--budgets", "0.5", "0", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    rows = re.findall(r"^(\S.*?) +([\d,]+) +([\d,]+) +([\d.]+) +[\d.]+$", text, re.M)
    peaks = {policy: int(peak.replace(",", "")) for policy, _, peak, _ in rows}
    assert len(peaks) == 1 + 7 + 2
    assert peaks["budget(fraction=0.0)"] == min(peaks.values())
    assert (tmp_path / "checkpointing.png").stat().st_size > 10_000


def test_kernel_injection(load: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "plots" / "times.png"
    load("kernel_injection").main(["--size", "24", "--rounds", "3", "--plot", str(plot)])
    text = capsys.readouterr().out
    assert "native_layer_norm" in text and text.count("addmm(") == 2
    kernels = re.findall(
        r"^(layer_norm|three_layers) +forward +[12] .* (\d) +[\d,]+ +[\d,]+$", text, re.M
    )
    assert kernels == [("layer_norm", "1"), ("layer_norm", "1"), ("three_layers", "3")]
    differences = re.findall(r" (\d\.\de[-+]\d\d) +[\d.]+ +[\d.]+ +[\d.]+$", text, re.M)
    assert len(differences) == 5 and all(float(found) < 1e-5 for found in differences)
    assert plot.stat().st_size > 10_000


# -- train_gpt: every plan has its recipe's collectives, and trains like one device -------------------

SMALL = ["--width", "16", "--context", "8", "--heads", "2", "--layers", "1", "--steps", "3"]
LITTLE = ["--batch", "8", "--validate", "8", "--sample", "4", "--lr", "0.01"]
# By pass, kind and axes, of one layer. Logits split by vocabulary take a maximum, a sum and, in the
# backward, one more; the loss joins another sum of the backward. Otherwise it takes a sum and a count.
VOCABULARY = {
    "forward all_reduce[max] tp": 1,
    "forward all_reduce tp": 1,
    "backward all_reduce tp": 1,
}
RECIPES = {
    "tp": VOCABULARY
    | {
        "forward all_reduce tp": 2 + 3,  # of a joint program, whose loss does not wait for the backward
        "backward all_reduce tp": 1 + 3,
    },  # embedding, attention, mlp
    "tp+sp": VOCABULARY
    | {
        "forward psum_scatter tp": 3,
        "forward all_gather tp": 3,
        "backward psum_scatter tp": 3 + 1,  # the embedding's gradient
        "backward all_gather tp": 2,
        "backward all_reduce tp": 1 + 1,  # the gradients of norms and biases, as one
    },
    "fsdp": {
        "forward all_gather dp": 2 + 1,  # the layer, what is around it, and positions by themselves
        "backward all_gather dp": 2,
        "backward psum_scatter dp": 1 + 2,  # the layer, the head, the embeddings
        "forward all_reduce dp": 2,
    },
}


def sent(text: str) -> Counter[str]:
    """Pass, kind and axes of each line of a printed plan."""
    rows = re.findall(r"^(\w+\S*) +([a-z·]+) .* (forward|backward) ", text, re.M)
    return Counter(f"{phase} {kind} {axes}" for kind, axes, phase in rows)


def test_train_gpt(
    load: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """By one plan; from where that was after two steps on, by another on another mesh."""
    jobs, example = load("_job"), load("train_gpt")
    # Without the signals and the exits of a process of its own.
    monkeypatch.setattr(jobs, "job", lambda *args: contextlib.nullcontext(jobs.Job(*args)))
    kept = str(tmp_path / "kept")
    runs = {
        "tp+sp": ["--virtual", "tp=3", "--save", kept, "--save-every", "2"],
        "fsdp": ["--virtual", "dp=2", "--resume", kept],
    }
    for plan, options in runs.items():
        example.main([*SMALL, *LITTLE, "--plan", plan, "--out", str(tmp_path), *options])
        shutil.rmtree(tmp_path / "kept" / "step-3", ignore_errors=True)
        text = capsys.readouterr().out
        assert sent(text) == RECIPES[plan]
        assert "no factor rule" not in text
        compared = re.findall(r"sharded (\S+), one device (\S+) \(difference (\S+)\)", text)
        assert len(compared) == 2, text  # the last batch, and held-out text
        for numbers in compared:
            sharded, alone, difference = map(float, numbers)
            assert difference < 1e-4 and abs(sharded - alone) < 1e-4 and sharded < 5.53
        stem = options[1].replace("=", "")
        assert (tmp_path / f"loss-{plan}-virtual-{stem}.png").stat().st_size > 10_000


# Of two layers on two stages, two microbatches. Activations and their gradients cross; so do the loss and
# the gradient of the tied embedding, which is added up at the first stage.
CROSS = {"forward send pp": 2 + 1, "backward send pp": 2 + 1 + 1}
PIPELINES = {
    "pp": ("pp=2", CROSS),
    "pp+tp": (
        "pp=2,tp=2",
        CROSS
        | {
            "forward all_reduce tp": 2 * (1 + 2 + 2 + 1),  # embedding, layers, loss
            "forward all_reduce[max] tp": 2,
            "backward all_reduce tp": 2 * (1 + 1 + 2 + 2),  # loss, head, layers
        },
    ),
    "pp+fsdp": (
        "pp=2,dp=2",
        CROSS
        | {
            "forward all_gather dp": 2 + 2 + 1,  # layers, the embedding on both stages, positions
            "backward all_gather dp": 2 + 1,
            "backward psum_scatter dp": 2 + 3,  # layers, the head, embeddings
            "forward all_reduce dp": 2,
        },
    ),
}


@pytest.mark.parametrize("plan", cases(["pp+tp", "pp+fsdp"], ["pp"]))
def test_train_gpt_by_a_pipeline(
    load: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    plan: str,
) -> None:
    jobs, example = load("_job"), load("train_gpt")
    monkeypatch.setattr(jobs, "job", lambda *args: contextlib.nullcontext(jobs.Job(*args)))
    mesh, want = PIPELINES[plan]
    options = ["--layers", "2", "--microbatches", "2", "--virtual", mesh, "--out", str(tmp_path)]
    example.main([*SMALL, *LITTLE, "--plan", plan, *options])
    text = capsys.readouterr().out
    assert sent(text) == want
    assert "1f1b on pp, 2 microbatches" in text
    for number in re.findall(r"\(difference (\S+)\)", text):
        assert float(number) < 1e-4


@pytest.mark.parametrize("plan", ["tp", "fsdp+tp"])
def test_train_gpt_s_other_plans(load: Any, plan: str) -> None:
    example, mesh = load("train_gpt"), Mesh({"dp": 1 + (plan != "tp"), "tp": 2}, virtual=True)
    size = example.Size(context=8, width=16, heads=2, layers=1, tied=plan == "tp")
    recipe = example.recipes(size)[plan]
    params = place(example.init(size, random.key(0)), mesh, recipe.specs)
    batch = place(torch.zeros(4, 9, dtype=torch.int64), mesh, recipe.batch)
    run = shard(functools.partial(example.loss, size), mesh, constrain_at=recipe.pins)
    found = sent(str(run.lower_joint(params, batch).collectives))
    # The same over tp, whatever is gathered and scattered over dp; the loss is a sum over both.
    over_tp = Counter[str]()
    for key, count in found.items():
        if key.endswith("tp"):
            over_tp[key.replace("dp·tp", "tp")] += count
    assert over_tp == RECIPES["tp"]
    assert (found["backward psum_scatter dp"] > 0) == (plan == "fsdp+tp")

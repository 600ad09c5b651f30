"""Wrong arguments: every parameter of every public function, and values of every wrong kind.

Each is refused in the caller's own words (the parameter, what was passed), or stands in the table of what
is meant.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn as torch_nn

import torchard as ta
from torchard import Mesh, MeshTensor, P, place, random, shard_map
from torchard.testing import check_derivatives, equal, prove

MESH = Mesh({"a": 2, "b": 2}, virtual=True)
X = torch.arange(24.0).reshape(4, 6)


def double(x: Any) -> Any:
    return x * 2


WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a str": lambda: "abc",
    "an int": lambda: 3,
    "a float": lambda: 2.7,
    "a list": lambda: [1, "b"],
    "a dict": lambda: {"k": 2.7},
    "a function": lambda: double,
    "a tensor": lambda: torch.ones(2, 3),
    "negative": lambda: -1,
    "NaN": lambda: float("nan"),
    "a module": lambda: torch_nn.Linear(6, 6),
    "a class": lambda: torch_nn.Linear,
    "an object": lambda: object(),
    "True": lambda: True,
}


class Case:
    """A call that is right, of which one argument at a time is made wrong."""

    def __init__(self, call: Callable[..., Any], **right: Any) -> None:
        self.call, self.right = call, right


def on_ranks(collective: Callable[..., Any], **right: Any) -> Case:
    """A collective, called where it may be."""

    def call(**given: Any) -> Any:
        x = given.pop("x", None)
        if "x" not in right:
            return shard_map(lambda v: v + collective(**given), MESH, P("a"), P("a"))(X)
        if x is not X:
            return shard_map(lambda v: collective(x, **given), MESH, P("a"), P("a"))(X)
        return shard_map(lambda v: collective(v, **given), MESH, P("a"), P("a"))(X)

    return Case(call, **right)


def folder() -> Path:
    return Path(tempfile.mkdtemp())


def init(name: str, key: Any, shape: Any, dtype: Any) -> Any:
    return torch.zeros(shape, dtype=dtype)


class Two(torch_nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch_nn.Linear(4, 8), torch_nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x).relu())


def saved() -> Path:
    path = folder() / "saved"
    ta.save(path, {"x": X})
    return path


PLACED = place(X, MESH, P("a"))
KERNEL = ta.Kernel("twice", (double,))
KEY = ta.random.key(0)
SAVED = saved()
PLANNED = ta.shard(double, MESH, P("a")).lower(X)
CASES: dict[str, Case] = {
    "Link": Case(ta.Link, bandwidth=1e9, latency=1e-4),
    "Machine": Case(
        partial(ta.Machine, flops={"float32": 1e12}),
        **{"name": "m", "bandwidth": 1e11, "launch": 1e-6, "memory": 1, "overlaps": 1.0, "alone": 1.0},
    ),
    "Mesh": Case(Mesh, axes={"a": 2}, virtual=True, device_type="cpu", timeout=30.0),
    "MeshTensor.from_shards": Case(
        MeshTensor.from_shards, parts=list(PLACED.parts), mesh=MESH, spec=P("a"), shape=(4, 6)
    ),
    "P.factors": Case(P.factors, pattern="(a b)", weak=False),
    "Schedule": Case(ta.Schedule, prefetch=1, bucket_bytes=1024),
    "ShapeDtype": Case(ta.ShapeDtype, shape=(2, 3), dtype=torch.float32, device="cpu"),
    "Colwise": Case(
        ta.Colwise, input_layouts=None, output_layouts=1, unit=1, heads=None, transposed=None, parts=1
    ),
    "Rowwise": Case(
        ta.Rowwise, input_layouts=None, output_layouts=1, unit=1, heads=None, transposed=True
    ),
    "PlanReport.why": Case(PLANNED.plan.why, what="args[0]"),
    "Pattern": Case(ta.Pattern, fn=double, dims=None, name=None, weights=()),
    "Kernel": Case(ta.Kernel, name="k", references=(double,), dims=None, vjp="reference", tolerance=2.0),
    "repeat": Case(
        ta.repeat, block=lambda w, x: w * x, stacked=torch.ones(2, 1), x=X, collect=False, key=None,
        index=False, name="block",
    ),
    "scan": Case(
        ta.scan, body=lambda c, x: (c, x), carry=X, xs=X, length=None, reverse=False, unroll=1, name="s"
    ),
    "fori_loop": Case(ta.fori_loop, lower=0, upper=2, body=lambda i, c: c, carry=X, name="s"),
    "while_loop": Case(
        ta.while_loop, cond=lambda c: False, body=lambda c: c, carry=X, max_steps=None, name="s"
    ),
    "map": Case(ta.map, fn=double, xs=X, batch_size=None, name="s"),
    "associative_scan": Case(ta.associative_scan, f=torch.add, xs=X, dim=0, reverse=False),
    "checked": Case(ta.checked, fn=double, nan=True, inf=False, index=True),
    "error_if": Case(ta.error_if, pred=False, message="wrong"),
    "linearize": Case(lambda fn: ta.linearize(fn, X), fn=double),
    "typeof": Case(ta.typeof, x=X),
    "linear_transpose": Case(lambda fn: ta.linear_transpose(fn, X), fn=double),
    "closure_convert": Case(lambda fn: ta.closure_convert(fn, X), fn=double),
    "cond": Case(ta.cond, pred=True, true=lambda: X, false=lambda: X, name="s"),
    "switch": Case(ta.switch, index=0, branches=[lambda: X], name="s"),
    "custom_vjp": Case(ta.custom_vjp, fn=double, nondiff_argnums=0),
    "custom_vjp.defvjp": Case(ta.custom_vjp(double).defvjp, fwd=double, bwd=double),
    "custom_jvp": Case(ta.custom_jvp, fn=double, nondiff_argnums=0),
    "custom_jvp.defjvp": Case(ta.custom_jvp(double).defjvp, rule=double),
    "custom_jvp.defjvps": Case(ta.custom_jvp(double).defjvps),
    "root": Case(
        lambda f, **given: ta.implicit.root(f, X, solve=lambda f, x: x, **given),
        f=double, tangent_solve=None,
    ),
    "linear_solve": Case(
        lambda matvec, **given: ta.implicit.linear_solve(
            matvec, X, solve=lambda f, x: x, **given
        ),
        matvec=double, transpose_solve=None, symmetric=False,
    ),
    "debug.print": Case(ta.debug.print, fmt="x"),
    "debug.callback": Case(lambda fn: ta.debug.callback(fn, X), fn=double),
    "io_callback": Case(lambda fn: ta.io_callback(fn, X, X), fn=double),
    "pure_callback": Case(
        lambda fn, vectorized: ta.pure_callback(fn, X, X, vectorized=vectorized),
        fn=double, vectorized=False,
    ),
    "eval_shape": Case(lambda fn: ta.eval_shape(fn, X), fn=double),
    "value_and_grad": Case(ta.value_and_grad, fn=double, argnums=0, has_aux=False),
    "stack": Case(ta.stack, trees=[X, X]),
    "unstack": Case(ta.unstack, stacked=X),
    "shard": Case(
        lambda **given: ta.shard(**given)(X),
        fn=double, mesh=MESH, in_specs=P("a"), out_specs=P("a"), constrain_at=None, rules=None,
        reduce_dtype=None, schedule=None, check_replicated=True,
    ),
    "shard_map": Case(
        lambda **given: ta.shard_map(**given)(X),
        fn=double, mesh=MESH, in_specs=P("a"), out_specs=P("a"), axis_names=None, check_replicated=True,
    ),
    "jit": Case(lambda **given: ta.jit(**given)(X.clone()), fn=double, backend="eager", donate_argnums=0),
    "checkpoint": Case(
        lambda **given: ta.checkpoint(**given)(X), fn=double, policy=ta.policies.save_dots, where=None
    ),
    "accumulate": Case(lambda **given: ta.accumulate(**given)(X), fn=double, steps=2, batch=0),
    "pipeline": Case(
        lambda **given: ta.pipeline(**given)(torch.ones(6, 6)),
        fn=double, mesh=Mesh({"pp": 1}, virtual=True), axis="pp", stages=None, microbatches=2, batch=0,
        schedule="gpipe",
    ),
    "stage_specs": Case(
        lambda fn, specs: ta.stage_specs(fn, X, specs=specs),
        fn=ta.pipeline(double, Mesh({"pp": 1}, virtual=True), "pp"), specs=None,
    ),
    "PipelineSchedule": Case(ta.PipelineSchedule, ranks=((ta.Task(0, 0, "F"),),), name="mine"),
    "fuse": Case(
        lambda **given: ta.fuse(**given)(X),
        fn=double, pattern=None, kernel=None, compiler="inductor", prefer="time", where=None, name=None,
    ),
    "find": Case(lambda **given: ta.find(**given)(X), fn=double, pattern=double, where=None),
    "trace": Case(lambda **given: ta.trace(**given)(X), fn=double),
    "saved_residuals": Case(lambda fn: ta.saved_residuals(fn, X), fn=double),
    "functionalize": Case(ta.functionalize, module=torch_nn.Linear(2, 2)),
    "replaced": Case(ta.replaced, module=Two(), path="up", block=lambda params, x: x),
    "parallelize": Case(
        ta.parallelize,
        model=Two(), mesh=MESH, plan={"up": ta.Colwise()}, axis="a", batch=None, fsdp=None, rules=None,
        program=None,
    ),
    "place": Case(ta.place, values={"x": X}, mesh=MESH, specs=P("a"), rules=None, check_replicated=True),
    "redistribute": Case(ta.redistribute, value=PLACED, spec=P("b")),
    "from_dtensor": Case(ta.from_dtensor, value=None),  # a right one needs process groups
    "to_dtensor": Case(ta.to_dtensor, value=None),
    "initialize": Case(
        ta.initialize,
        init=init, params={"w": X}, mesh=MESH, specs=P("a"), key=KEY, rules=None,
    ),
    "save": Case(
        lambda path=None, **given: ta.save(folder() / "new" if path is None else path, **given),
        path=None, tree={"x": X}, check_replicated=True, timeout=600.0,
    ),
    "load": Case(
        ta.load,
        path=SAVED, like={"x": X}, mesh=MESH, specs=P("a"), rules=None, partial=False, timeout=600.0,
    ),
    "constrain": Case(
        lambda **given: ta.shard(lambda x: ta.constrain(**given), MESH)(X), x=X, spec=P("a")
    ),
    "name": Case(ta.name, value=X, label="x"),
    "scope": Case(lambda name: ta.scope(name).__enter__(), name="x"),
    "global_norm": Case(ta.global_norm, values={"x": X}),
    "clip_by_global_norm": Case(ta.clip_by_global_norm, values={"x": X}, limit=1.0),
    "any_of": Case(lambda functions: ta.any_of(double, functions), functions=double),
    "register_kernel": Case(ta.register_kernel, kernel=None),
    "register_rule": Case(
        lambda **given: ta.register_rule(torch.ops.aten.special_airy_ai.default, **given),
        text="... -> ...", emit=None, alias=False,
    ),
    "register_decomposition": Case(
        lambda **given: ta.register_decomposition(torch.ops.aten.special_airy_ai.default, **given),
        fn=torch.special.airy_ai,
    ),
    "psum": on_ranks(ta.psum, x=X, axes="a"),
    "pmean": on_ranks(ta.pmean, x=X, axes="a"),
    "pmax": on_ranks(ta.pmax, x=X, axes="a"),
    "pmin": on_ranks(ta.pmin, x=X, axes="a"),
    "pvary": on_ranks(ta.pvary, x=X, axes="a"),
    "all_gather": on_ranks(ta.all_gather, x=X, axes="a", dim=0, tiled=True, invariant=False),
    "psum_scatter": on_ranks(ta.psum_scatter, x=X, axes="a", dim=0, tiled=True),
    "all_to_all": on_ranks(ta.all_to_all, x=X, axes="a", split_dim=0, concat_dim=1, tiled=True),
    "ppermute": on_ranks(ta.ppermute, x=X, axes="a", perm=[(0, 1)]),
    "axis_index": on_ranks(ta.axis_index, axes="a", device=None),
    "axis_size": on_ranks(ta.axis_size, axes="a"),
    "policies.budget": Case(ta.policies.budget, fraction=0.5),
    "policies.save_names": Case(lambda names: ta.policies.save_names("a", names), names="b"),
    "policies.offload_names": Case(lambda names: ta.policies.offload_names("a", names), names="b"),
    "policies.save_all_but_names": Case(
        lambda names: ta.policies.save_all_but_names("a", names), names="b"
    ),
    "random.key": Case(ta.random.key, seed=0, device=None),
    "random.split": Case(ta.random.split, key=KEY, n=2),
    "random.fold_in": Case(ta.random.fold_in, key=KEY, data=2),
    "random.bits": Case(ta.random.bits, key=KEY, shape=(2,)),
    "random.normal": Case(ta.random.normal, key=KEY, shape=(2,), dtype=torch.float32),
    "random.uniform": Case(
        ta.random.uniform, key=KEY, shape=(2,), dtype=torch.float32, low=0.0, high=1.0
    ),
    "random.bernoulli": Case(ta.random.bernoulli, key=KEY, p=0.5, shape=(2,)),
    "random.randint": Case(ta.random.randint, key=KEY, shape=(2,), low=0, high=3),
    "optim.sgd": Case(ta.optim.sgd, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "optim.adamw": Case(ta.optim.adamw, lr=0.1, b1=0.9, b2=0.9, eps=1e-8, weight_decay=0.1),
    "optim.warmup_cosine": Case(ta.optim.warmup_cosine, peak=1.0, steps=10, warmup=2, floor=0.0),
}  # fmt: skip

# The only public functions that are not above are torch's own under another name.
ELSEWHERE = {
    *("Activations", "Pairwise", "SequenceParallel", "Style"),  # Colwise's parameters
    *("Functional", "MeshTensor", "P"),  # made by the constructors above, or of what test_errors.py tests
    "full",  # any tree
    "initialize",
    "Task",  # of which PipelineSchedule checks its lists
}

# What of these is meant, by parameter; all else is refused.
MEANT: dict[str, tuple[str, ...]] = {
    "repeat.key": ("None",),
    "repeat.name": ("a str",),
    "unstack.stacked": ("a tensor",),
    **dict.fromkeys(
        ("scan.carry", "fori_loop.carry", "while_loop.carry"),
        ("None", "an int", "a float", "a dict", "a tensor", "negative", "NaN", "True"),
    ),
    **dict.fromkeys(("scan.xs", "map.xs"), ("a tensor",)),
    **dict.fromkeys(
        ("scan.name", "fori_loop.name", "map.name", "cond.name", "switch.name", "while_loop.name"),
        ("a str",),
    ),
    **dict.fromkeys(("fori_loop.lower", "fori_loop.upper", "switch.index"), ("an int", "negative")),
    **{"associative_scan.xs": ("a tensor",), "associative_scan.dim": ("negative",)},
    **{"associative_scan.reverse": ("True",)},
    **{"scan.length": ("None",), "scan.reverse": ("True",), "scan.unroll": ("an int", "True")},
    **{"while_loop.body": ("a function", "a module"), "while_loop.max_steps": ("None", "an int")},
    **{"map.fn": ("a function", "a module"), "map.batch_size": ("None", "an int")},
    **dict.fromkeys(("checked.nan", "checked.inf", "checked.index"), ("True",)),
    **{"checked.fn": ("a function", "a module"), "error_if.message": ("a str",)},
    **{"linear_transpose.fn": ("a function", "a module"), "typeof.x": ("a tensor",)},
    **dict.fromkeys(("linearize.fn", "closure_convert.fn"), ("a function",)),
    **{"cond.pred": ("True",), "cond.false": ("a function", "a module")},
    **dict.fromkeys(
        ("eval_shape.fn", "value_and_grad.fn", "debug.callback.fn", "io_callback.fn",
         "pure_callback.fn", "custom_vjp.fn", "custom_vjp.defvjp.fwd", "custom_vjp.defvjp.bwd",
         "custom_jvp.fn", "custom_jvp.defjvp.rule", "root.f", "linear_solve.matvec"),
        ("a function", "a module"),
    ),
    **dict.fromkeys(
        ("root.tangent_solve", "linear_solve.transpose_solve"),
        ("None", "a function", "a module"),
    ),
    **dict.fromkeys(
        ("custom_vjp.nondiff_argnums", "custom_jvp.nondiff_argnums"), ("an int", "negative")
    ),
    "debug.print.fmt": ("a str",),
    "value_and_grad.argnums": ("an int", "negative"),
    "value_and_grad.has_aux": ("True",),
    **dict.fromkeys(("linear_solve.symmetric", "pure_callback.vectorized"), ("True",)),
    **dict.fromkeys(("accumulate.batch", "pipeline.batch"), ("negative",)),
    **dict.fromkeys(("pipeline.stages", "stage_specs.specs"), ("None",)),
    "pipeline.microbatches": ("an int",),
    "PipelineSchedule.name": ("a str",),
    **dict.fromkeys(
        ("Mesh.virtual", "P.factors.weak", "shard.check_replicated", "shard_map.check_replicated",
         "place.check_replicated", "load.partial", "register_rule.alias",
         "all_gather.tiled", "all_gather.invariant", "psum_scatter.tiled", "all_to_all.tiled",
         "optim.sgd.nesterov", "save.check_replicated"),
        ("True",),
    ),
    **dict.fromkeys(
        ("Kernel.tolerance", "load.timeout", "clip_by_global_norm.limit",
         "optim.sgd.momentum", "optim.adamw.eps", "optim.warmup_cosine.peak",
         "optim.warmup_cosine.steps", "optim.warmup_cosine.warmup", "optim.warmup_cosine.floor",
         "save.timeout"),
        ("an int", "a float"),
    ),
    **dict.fromkeys(
        ("P.factors.pattern", "Kernel.name", "name.label", "scope.name",
         "policies.save_names.names", "policies.offload_names.names",
         "policies.save_all_but_names.names"),
        ("a str",),
    ),
    **dict.fromkeys(
        ("Schedule.prefetch", "Colwise.unit", "Colwise.parts", "Rowwise.unit", "random.split.n",
         "random.randint.high"),
        ("an int",),
    ),
    **dict.fromkeys(
        ("Schedule.bucket_bytes", "Colwise.input_layouts", "Colwise.output_layouts",
         "Colwise.heads", "Rowwise.input_layouts", "Rowwise.output_layouts", "Rowwise.heads"),
        ("None", "an int"),
    ),
    **dict.fromkeys(
        ("Colwise.transposed", "Rowwise.transposed"),
        ("None", "True"),
    ),
    **dict.fromkeys(
        ("Pattern.fn", "shard.fn", "shard_map.fn", "jit.fn", "checkpoint.fn", "checkpoint.policy",
         "accumulate.fn", "pipeline.fn", "fuse.fn", "find.fn", "trace.fn", "saved_residuals.fn",
         "replaced.block", "any_of.functions"),
        ("a function", "a module"),
    ),
    **dict.fromkeys(
        ("Pattern.dims", "Kernel.vjp", "shard.in_specs", "shard.out_specs", "shard.constrain_at",
         "shard.rules", "shard.reduce_dtype", "shard.schedule", "shard_map.in_specs",
         "shard_map.axis_names", "checkpoint.where", "fuse.kernel", "fuse.name", "fuse.where",
         "parallelize.batch", "parallelize.fsdp", "parallelize.rules", "parallelize.program",
         "place.specs", "place.rules", "initialize.specs", "initialize.rules", "load.specs",
         "load.rules", "axis_index.device", "random.key.device"),
        ("None",),
    ),
    **dict.fromkeys(
        ("Pattern.name", "Kernel.dims", "save.path"),
        ("None", "a str"),
    ),
    "fuse.pattern": ("None", "a function"),
    "find.pattern": ("a function",),
    "find.where": ("None", "a str", "a function"),
    "Mesh.timeout": ("None", "an int", "a float"),
    **dict.fromkeys(["Link.bandwidth", "Link.latency"], ("an int", "a float")),
    **dict.fromkeys(
        [f"Machine.{name}" for name in ("bandwidth", "launch", "alone")],
        ("an int", "a float"),
    ),
    **{"Machine.name": ("a str",), "Machine.memory": ("an int",)},
    "functionalize.module": ("a module",),
    **dict.fromkeys(
        ("initialize.params", "constrain.x", "name.value", "pvary.x",
         "all_gather.x", "psum_scatter.x", "all_to_all.x", "ppermute.x"),
        ("a tensor",),
    ),
    **dict.fromkeys(
        ("global_norm.values", "clip_by_global_norm.values"),
        ("None", "a tensor"),
    ),
    "register_rule.text": ("a str", "a function", "a module"),
    "register_rule.emit": ("None", "a function", "a module"),
    "register_decomposition.fn": ("a function", "a module"),
    **dict.fromkeys(
        ("all_gather.dim", "psum_scatter.dim", "all_to_all.split_dim", "all_to_all.concat_dim",
         "random.randint.low"),
        ("negative",),
    ),
    "random.key.seed": ("an int", "negative"),
    "random.fold_in.data": ("an int", "a tensor", "negative"),
    **dict.fromkeys(
        ("random.uniform.low", "random.uniform.high"),
        ("an int", "a float", "negative"),
    ),
    **dict.fromkeys(
        ("optim.sgd.lr", "optim.adamw.lr"),
        ("an int", "a float", "a function", "a module"),
    ),
    **dict.fromkeys(
        ("optim.sgd.weight_decay", "optim.adamw.weight_decay"),
        ("an int", "a float", "a dict"),
    ),
    "place.values": ("None", "a tensor"),
    "save.tree": tuple(WRONG.keys() - {"a function", "a module", "a class", "an object"}),
}  # fmt: skip

# What is right in kind and fails in the user's own function, or against the other operand.
TOLD_BY_OTHERS = {
    ("load.path", "a str"), ("find.where", "a module"),
    ("parallelize.model", "a module"), ("initialize.init", "a function"), ("initialize.init", "a module"),
    ("random.uniform.low", "a tensor"), ("random.uniform.high", "a tensor"),
    ("random.bernoulli.p", "a tensor"), ("repeat.block", "a function"), ("repeat.block", "a module"),
    ("repeat.stacked", "a tensor"), ("repeat.x", "a tensor"), ("scan.body", "a function"),
    ("scan.body", "a module"), ("fori_loop.body", "a function"), ("fori_loop.body", "a module"),
    ("cond.true", "a function"), ("cond.true", "a module"),
    ("error_if.pred", "True"), ("error_if.pred", "a tensor"), ("linearize.fn", "a module"),
    ("closure_convert.fn", "a module"),
    ("associative_scan.f", "a function"), ("associative_scan.f", "a module"),
}  # fmt: skip


def wrong_arguments() -> Iterator[Any]:
    for name, case in CASES.items():
        for parameter in case.right:
            yield pytest.param(name, parameter, id=f"{name} {parameter}")


def told(case: Case, parameter: str, value: Any) -> str:
    """What is wrong with what the caller is told; nothing if it names the parameter."""
    try:
        case.call(**{**case.right, parameter: value})
    except Exception as error:
        kind = type(error)
        ours = kind.__module__.startswith("torchard") or kind in (TypeError, ValueError)
        return "" if ours and parameter in str(error) else f"{kind.__name__}: {error}"
    return "accepted"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "parameter"), list(wrong_arguments()))
def test_wrong_arguments_are_refused_by_name(
    name: str, parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = f"{name}.{parameter}"
    kinds = {kind: make for kind, make in WRONG.items() if (where, kind) not in TOLD_BY_OTHERS}
    found = {kind: told(CASES[name], parameter, make()) for kind, make in kinds.items()}
    meant = dict.fromkeys(MEANT.get(where, ()), "accepted")
    assert {kind: text for kind, text in found.items() if text} == meant


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ta.shard(double, "a"), "mesh is 'a' (a str), but mesh must be a Mesh, as in Mesh({"),
        (lambda: ta.shard(double, None), "mesh must be a Mesh"),
        (lambda: Mesh(4), "axes must be a dict (each value an integer"),
        (lambda: Mesh([2, 2]), "axes is [2, 2] (a list)"),
        (lambda: Mesh({"a": 2.7}, virtual=True), "axes['a'] is 2.7 (a float)"),
        (lambda: Mesh({"a": True}, virtual=True), "axes['a'] is True"),
        (lambda: Mesh({"a": 0}, virtual=True), "its size at least 1"),
        (lambda: Mesh({2: 2}, virtual=True), "a key of axes is 2"),
        (lambda: Mesh({"a": 2}, virtual=True, device_type="cudaa"), "device_type='cudaa'"),
        (lambda: Mesh({"a": 2}, virtual=True, device_type="cuda:0"), "without an index"),
        (lambda: ta.functionalize(double), "module must be an nn.Module"),
        (lambda: ta.functionalize(torch_nn.Linear), "an instance, not its class"),
        (lambda: ta.redistribute(X, P("a")), "value must be a MeshTensor, as in place("),
        (lambda: ta.shard(double, MESH, schedule=3), "a Schedule, as in Schedule(prefetch=2)"),
        (lambda: ta.name(3, "a"), "value must be a tensor"),
        (lambda: ta.jit(double, donate_argnums="a"), "donate_argnums is 'a'"),
        (lambda: ta.jit(double, memory="planned"), 'Pass backend="eager" for planned memory'),
        (lambda: ta.jit(double, donate_argnums=-1), "count from 0"),
        (lambda: ta.jit(double, backend="eager", donate_argnums=3)(X), "called with 1 positional"),
        (lambda: ta.jit(double, backend="eager", donate_argnums=(0, 1))(X), "donate_argnums=1"),
        (lambda: place("abc", MESH, P()), "no tensor in values"),
        (lambda: place([1, 2], MESH, P()), "no tensor in values"),
        (lambda: place({"w": X.numpy()}, MESH, P()), "values['w'] is a ndarray"),
        (lambda: ta.fuse(double, kernel=double), "without a pattern"),
        (lambda: ta.fuse(double, prefer="speed"), "prefer must be 'time' or 'memory'"),
        (lambda: ta.fuse(double, name="twice"), "fuse(fn, pattern, name='twice')"),
        (lambda: ta.fuse(double, KERNEL, double), "and the Kernel 'twice', which already has references"),
        (lambda: ta.fuse(double, KERNEL, KERNEL), "and the Kernel 'twice', which already has references"),
        (lambda: ta.fuse(double, KERNEL, name="b"), "dataclasses.replace(kernel, name='b')"),
        (lambda: ta.Schedule(prefetch=1.5), "prefetch is 1.5"),
        (lambda: ta.PipelineSchedule([[]]), "(a list), but ranks must be a tuple (each item a tuple"),
        (lambda: ta.ShapeDtype((2, -1)), "sizes must not be negative"),
        (lambda: ta.checkpoint(), "checkpoint takes a function and returns one: call checkpoint(fn, ..."),
        (lambda: ta.jit(double, X, X), "jit: too many positional arguments. jit takes a function"),
        (lambda: ta.place(), "place: missing a required argument: 'values'. Call place(values, mesh, "),
        (lambda: Mesh((2, 2), ("dp", "tp")), 'with axes as in {"dp": 2, "tp": 4}'),
        (lambda: Mesh((2, 2)), "axes is (2, 2) (a tuple), but axes must be a dict (each value an integ"),
        (lambda: Mesh((2, 2)), 'or a DeviceMesh, as in {"dp": 2, "tp": 4}.'),
        (lambda: Mesh(dp=2, tp=2), "Call Mesh(axes, *, virtual=False, "),
        (lambda: random.normal(3, (4,)), "key is 3 (an int), but key must be a tensor, as in random."),
        (lambda: random.normal((4,)), "Call normal(key, shape, dtype=torch.float32), with key as in"),
        (lambda: random.normal(random.key(0), 3, 4), "shape is 3 (an int), but shape must be"),
        (lambda: random.uniform(random.key(0), 0.0, 1.0, (3,)), "(each item an integer), as in (2, 3)."),
        (lambda: equal(double, double, X, rtol=1), "Call equal(fn, reference, *args, orders=("),
        (lambda: check_derivatives(double, X, tol=1), "Call check_derivatives(fn, *args, order=2, "),
        (lambda: prove(ta.shard(double, MESH)), "a Program, as in shard(fn, mesh, ...).lower(*args)"),
        (lambda: prove(double), "a Program, as in shard(fn, mesh, ...).lower(*args)"),
    ],
)  # fmt: skip
def test_what_is_said(call: Callable[[], Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert said in str(error.value)


def test_what_is_right_passes() -> None:
    for case in CASES.values():
        if not {"value", "kernel"} & set(case.right) or case.call in (ta.name, ta.redistribute):
            case.call(**case.right)
    assert place({"w": X, "n": 3, "none": None}, MESH, P("a"))["n"] == 3
    assert place({}, MESH, P()) == {} and place(None, MESH, P()) is None
    assert ta.ShapeDtype([2, 3]) == ta.ShapeDtype((2, 3))


def test_every_public_function_is_in_the_table() -> None:
    public = {
        name for name in ta.__all__
        if callable(getattr(ta, name))
        and not (inspect.isclass(getattr(ta, name)) and issubclass(getattr(ta, name), Exception))
    }  # fmt: skip
    named = {name.partition(".")[0] for name in CASES}
    assert public - named - ELSEWHERE == set()

"""Errors and warnings of the package."""

from __future__ import annotations

from typing import Any

__all__ = [
    "AccumulateError",
    "BranchError",
    "CheckpointError",
    "CollectiveError",
    "DerivativeError",
    "DonatedError",
    "KernelError",
    "LoopError",
    "NoMatch",
    "PatternError",
    "PipelineError",
    "PurityError",
    "RetraceWarning",
    "StaticArgumentError",
    "TorchVersionWarning",
    "UnexpectedTracerError",
    "UnrolledLoopWarning",
]


class PurityError(RuntimeError):
    """The function is not pure. The message names the line and what to write instead.

    >>> import torch, torchard as ta
    >>> @ta.jit
    ... def clip(x):
    ...     return x if x.norm() < 1 else x / x.norm()
    >>> clip(torch.ones(4))
    Traceback (most recent call last):
        ...
    torchard.PurityError: <doctest PurityError[1]>:3 in clip needs the value of a tensor while
        the function is traced (by aten._local_scalar_dense.default): branching, item(), bool(),
        float() and shapes that depend on values cannot be traced. Use cond or torch.where for a
        branch, while_loop for a loop, debug.print to print, pass the number as an int, bool or
        string argument (these are static), or compute it outside the transform.
    """


class UnexpectedTracerError(RuntimeError):
    """A tensor of a trace was used after the trace had ended. The message names the line that created it.

    >>> import torch, torchard as ta
    >>> leaked = []
    >>> def f(x):
    ...     y = x * 2
    ...     leaked.append(y)
    ...     return y.sum()
    >>> program = ta.trace(f)(torch.ones(3))
    >>> leaked[0] + 1
    Traceback (most recent call last):
        ...
    torchard.UnexpectedTracerError: the result of aten.mul.Tensor at <doctest
        UnexpectedTracerError[2]>:2 in f is used after the trace that recorded it. Tensors of a
        trace have no values, so a traced function must not keep them (in a list, an attribute,
        a cache): return the tensor, or compute it outside the transform.
    """


class StaticArgumentError(TypeError):
    """An argument is neither traced (a tensor or float) nor a hashable static value.

    >>> import torch, torchard as ta
    >>> class Config:
    ...     __hash__ = None
    >>> ta.trace(lambda x, config: x)(torch.ones(3), Config())
    Traceback (most recent call last):
        ...
    torchard.StaticArgumentError: args[1] is a Config, which is neither a tensor, a float nor
        hashable: it can be neither traced nor part of the cache key. Pass a tensor, a hashable
        value (a tuple instead of an array), or register the type with torchard.tree.register.
    """


class DerivativeError(RuntimeError):
    """A function or operation has no derivative, or torch's would be wrong.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> largest = ta.shard_map(lambda x: ta.pmax(x.sum(), "tp"), mesh, ta.P("tp"), ta.P())
    >>> torch.func.grad(largest)(torch.ones(4))
    Traceback (most recent call last):
        ...
    torchard.DerivativeError: pmax has no derivative; detach() its operand (as for the maximum in a
        softmax), or take the maximum of an all_gather.
    raised at ... in <module>
    """


class CheckpointError(ValueError):
    """A checkpoint cannot be made as requested: an unknown label or scope, or too small a budget.

    >>> import torch, torchard as ta
    >>> f = ta.checkpoint(lambda x: x.sin().sum(), policy=ta.policies.save_names("hidden"))
    >>> f(torch.ones(3))
    Traceback (most recent call last):
        ...
    torchard.CheckpointError: checkpoint(<lambda>, policy=save_names('hidden')): the label
        'hidden' is on no value; label one with name(x, ...).
    """


class AccumulateError(ValueError):
    """A function cannot be computed in slices of its batch: it needs the entire batch, or has none.

    >>> import torch, torchard as ta
    >>> f = ta.accumulate(lambda x: x.sort(0).values.sum(1), 2, batch=0)
    >>> f(torch.ones(4, 3))
    Traceback (most recent call last):
        ...
    torchard.AccumulateError: <doctest AccumulateError[1]>:1 in <lambda>: aten.sort.default of
        [4, 3] cannot be computed one microbatch at a time: it needs the whole batch, which is dim 0
        here. Compute it outside of accumulate, split a dim of the arguments that it treats one by one
        (batch=...), or use checkpoint, which saves memory without slices.
    """


class PipelineError(ValueError):
    """A function cannot be cut into the stages of a pipeline, or its schedule cannot be run.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"pp": 2}, virtual=True)
    >>> f = ta.pipeline(lambda x: x.exp(), mesh, "pp", stages="block/*")
    >>> f(torch.ones(4))
    Traceback (most recent call last):
        ...
    torchard.PipelineError: pipeline(<lambda>, stages=...): 'block/*' matches no scope; label its
        layers with torchard.scope.
    """


class BranchError(ValueError):
    """The branches of a conditional, or what chooses among them, do not fit together.

    >>> import torch, torchard as ta
    >>> @ta.jit
    ... def f(x):
    ...     return ta.cond(x.sum() > 0, lambda x: x, lambda x: x.sum(), x)
    >>> f(torch.ones(3))
    Traceback (most recent call last):
        ...
    torchard.BranchError: cond: of branch true its result is float32[3], and of branch false
        float32[]; branches must return the same shapes and dtypes.
        raised at <doctest BranchError[1]>:3 in f
    """


class LoopError(ValueError):
    """A loop's rows, counts or carries do not fit together. The message names the leaf.

    >>> import torch, torchard as ta
    >>> ta.repeat(lambda w, x: x @ w, torch.ones(3, 4, 5), torch.ones(2, 4))
    Traceback (most recent call last):
        ...
    torchard.LoopError: <doctest LoopError[1]>:1 in <module>: repeat: x is float32[2, 4], and the
        block returned float32[2, 5]; the next layer receives this result, so it must have the
        shape and dtype of x. Convert it in the block, or x before.
    """


class PatternError(ValueError):
    """A function cannot serve as a pattern.

    >>> import torch, torchard as ta
    >>> ta.Pattern(lambda: torch.ones(3))
    Traceback (most recent call last):
        ...
    torchard.PatternError: the pattern <lambda> has no tensor among its parameters
    """


class NoMatch(ValueError):
    """A requested pattern, scope or submodule does not occur. The message names the nearest candidates.

    >>> import torch, torchard as ta
    >>> def biased_gelu(x, b):
    ...     return torch.nn.functional.gelu(x + b)
    >>> fused = ta.fuse(lambda x, b: torch.relu(x + b), biased_gelu)
    >>> fused(torch.ones(4), torch.ones(4))
    Traceback (most recent call last):
        ...
    torchard.NoMatch: fuse(<lambda>, biased_gelu): the pattern has no match in it: its last operation
        does not occur. find(fn, pattern)(*args) lists matches;
        print(trace(fn)(*args)) shows the operations.
    """


class KernelError(ValueError):
    """A kernel differs from its reference, or cannot be used as requested.

    >>> import torch, torchard as ta
    >>> def double(x):
    ...     return x + x
    >>> fused = ta.fuse(double, double, lambda x: (x + x).sum())      # of another shape
    >>> try:
    ...     fused(torch.ones(4))
    ... except ta.KernelError as error:
    ...     print(error)
    kernel 'double' returned float32[] for float32[4]; its reference returns float32[4]. Both must
    agree; inside, the kernel may compute in any dtype.
    """


class RetraceWarning(UserWarning):
    """A function was traced for the eighth time.

    The message names the cause: a changing argument, or a changing global, closure variable or attribute
    that the function reads.

    >>> import torch, torchard as ta, warnings
    >>> f = ta.jit(lambda x, step: x * step, backend="eager")
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     for step in range(8):
    ...         _ = f(torch.ones(3), step)             # an int is static: each one is a new trace
    >>> caught[0].category.__name__
    'RetraceWarning'
    >>> print(caught[0].message)
    <lambda> was traced 8 times: args[1] took 8 different values (0, 1, 2, 3...), and each is a
    new trace. Pass a changing number as a float or a tensor, and pad changing shapes.
    """


class TorchVersionWarning(UserWarning):
    """The installed version of torch is outside the range that torchard is tested with.

    >>> import torchard as ta
    >>> from torchard.functional.torch_internals import versions
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     versions.check("1.13.1")                   # what an import of torchard checks
    >>> isinstance(caught[0].message, ta.TorchVersionWarning)
    True
    >>> print(caught[0].message)
    torchard is tested with torch 2.11 to 2.15, and this is torch 1.13.1: it may fail where
    torch's internals have changed. Install a version in that range.
    """


class UnrolledLoopWarning(UserWarning):
    """A pass of a transform does not read loops, which are therefore unrolled.

    `accumulate` and `pipeline` always unroll; the text of their programs says so.

    >>> import torch, torchard as ta, warnings
    >>> def layers(ws, x):
    ...     return ta.repeat(lambda w, x: ta.name(x @ w, "out"), ws, x)
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> run = ta.shard(layers, mesh, constrain_at={"block/1/out": ta.P("tp")})
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     _ = run.lower(torch.ones(3, 2, 2), torch.ones(4, 2))
    >>> caught[0].category is ta.UnrolledLoopWarning
    True
    >>> print(caught[0].message)
    Shard (stage PLAN) does not read loops: the 3 iterations of the loop at <doctest
        UnrolledLoopWarning[1]>:2 in layers are unrolled, each planned and compiled by itself.
        constrain_at['block/1/out'] may select some iterations and not others: if all of them may
        have this spec, write 'block/*/out'; otherwise keep the pattern and ignore this warning.
    """


class CheckError(RuntimeError):
    """A check of `checked` or `error_if` found what it looks for.

    Attributes:
        message: what was found.
        source: the user's line.
        place: the scope, with its iteration, and the phase.
        rank: the rank, or the coordinates on a virtual mesh; empty without a mesh.

    >>> import torch, torchard as ta
    >>> ta.error_if(torch.tensor(2.0) > 1, "too large")
    Traceback (most recent call last):
        ...
    torchard.CheckError: <doctest CheckError[1]>:1 in <module>: too large
    """

    def __init__(self, message: str, source: str = "", place: str = "", rank: str = "") -> None:
        super().__init__(message, source, place, rank)
        self.message, self.source, self.place, self.rank = message, source, place, rank

    def __str__(self) -> str:
        begins = f"{self.source}: " if self.source else ""
        where = ", ".join(filter(None, (self.place, self.rank)))
        return begins + self.message + (f" ({where})" if where else "")


class DonatedError(RuntimeError):
    """A value was used after it had been donated to a call.

    >>> import torch, torchard as ta
    >>> step = ta.jit(lambda w, g: w - g, backend="eager", donate_argnums=0)
    >>> w = torch.ones(3)
    >>> new = step(w, torch.ones(3))
    >>> w + 1
    Traceback (most recent call last):
        ...
    torchard.DonatedError: a tensor was used after it had been donated (jit(...,
        donate_argnums=...)): its memory belongs to the results. Use the value the step
        returned, pass a clone, or leave this argument out of donate_argnums.
    """


class CollectiveError(RuntimeError):
    """A collective failed: a process that takes part has ended, hangs, or cannot be reached.

    Args:
        message: names the collective, its scope and source line, and the ranks that take part.
        collective: its record, as ``.lower(...).collectives`` lists it; None if it is not known.

    >>> # torchrun --nproc-per-node 2
    >>> import os, torch, torch.distributed as dist, torchard as ta
    >>> dist.init_process_group("gloo")
    >>> mesh = ta.Mesh({"dp": 2})
    >>> total = ta.shard(lambda x: x.sum(), mesh)
    >>> x = ta.place(torch.arange(8.0), mesh, ta.P("dp"))
    >>> total(x)
    tensor(28.)
    >>> if dist.get_rank() == 1:
    ...     os._exit(0)                                                 # rank 1 is lost
    >>> total(x)
    Traceback (most recent call last):
        ...
    torchard.CollectiveError: all_reduce over dp, forward (scalar float32, 4 bytes per rank), for
        <doctest CollectiveError[3]>:1 in <lambda>: failed while this rank waited for the others ...
        Ranks 0 and 1 of Mesh(dp=2) take part and wait 1800 s for one another. ...
    """

    def __init__(self, message: str, collective: Any = None) -> None:
        super().__init__(message)
        self.collective = collective

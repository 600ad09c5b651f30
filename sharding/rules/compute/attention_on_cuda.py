"""Attention by the kernels for CUDA devices: batch and heads may be split, without dropout.

Query positions may not: the kernels take their number, and the log-sum-exp is padded along them. What
they return of random numbers is not read without dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchard.functional import torch_internals as internals
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.compute.attention import attention_dims, mask_dims
from torchard.sharding.rules.registry import Call, Local, register_rule

KERNELS = (
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
)
_BACKWARDS = (
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
)
_OUT = {"out", "output", "grad_out", "grad_out_"}
_LOGSUMEXP = {"logsumexp", "log_sumexp"}


class _Names:
    """The dims of operands and results, by their names in the schema."""

    def __init__(
        self, query: Sequence[int], key: Sequence[int], named: tuple[str, str, str]
    ) -> None:
        self.scores = (*query[:3], key[2])
        self.query, self.key, self.value = named
        self.heads = self.query.removeprefix("b ").removesuffix(" s d")
        self.others = 0

    def of(self, name: str, shape: Sequence[int]) -> str:
        """The dims of a tensor; those that attention does not have are its own."""
        if name in _OUT:
            return f"b {self.heads} s e"
        if name in _LOGSUMEXP:
            return f"b {self.heads} " + ("s 1" if len(shape) == 4 else self._rows(shape[2]))
        if name == "attn_bias":
            return mask_dims(shape, self.scores, self.heads)
        known = {"query": self.query, "key": self.key, "value": self.value}
        return known.get(name) or self._own(shape)

    def _rows(self, padded: int) -> str:
        return "s" if padded == self.scores[2] else "l"

    def _own(self, shape: Sequence[int]) -> str:
        names = [f"x{self.others + i}" for i in range(len(shape))]
        self.others += len(shape)
        return " ".join(names)


def _forward(call: Call) -> str | None:
    return _text(call, ("output", "logsumexp", *[""] * (len(call.outs) - 2)))


def _backward(call: Call) -> str | None:
    return _text(call, ("query", "key", "value", "attn_bias"))


def _text(call: Call, results: Sequence[str]) -> str | None:
    """The rule of a call whose results have these dims."""
    schema = internals.schema(call.target).arguments
    given = dict(zip([a.name for a in schema], call.node.args, strict=False)) | call.node.kwargs
    shapes = dict(zip(call.operands, call.ins, strict=False))
    query, key = (shapes[given[name]] for name in ("query", "key"))
    named = attention_dims(query, key)
    if named is None or given.get("dropout_p", 0.0):
        return None
    names = _Names(query, key, named)
    ins = [names.of(name, shapes[x]) for name, x in given.items() if x in call.operands]
    outs = [names.of(name, shape) for name, shape in zip(results, call.outs, strict=False)]
    used = set(" ".join((*ins, *outs)).replace("(", " ").replace(")", " ").split())
    split = [word.partition("=")[0] for word in ("b", *names.heads.strip("()").split())]
    whole = sorted(name for name in used - {"1"} if name.partition("=")[0] not in split)
    last = f"same {' '.join(split)}" if results[0] == "output" else "linear 0"
    return f"{', '.join(ins)} -> {', '.join(outs)} | whole {' '.join(whole)} | {last}"


def _emit(call: Call, local: Local) -> Any:
    """Apply the kernel; of no heads, or examples, it would raise."""
    if 0 not in local.operand_shape(0):
        return local.call(call.target, *local.args, **local.kwargs)
    like, results = local.args[0], [v for v in VAL.of(call.node) if isinstance(v, Tensor)]
    zeros = [
        local.call(aten.new_zeros.default, like, local.shape(i), dtype=result.dtype)
        for i, result in enumerate(results)
    ]
    rest = iter(zeros)
    return tuple(next(rest) if isinstance(v, Tensor) else v for v in VAL.of(call.node))


register_rule(*KERNELS, emit=_emit, text=_forward)
register_rule(*_BACKWARDS, emit=_emit, text=_backward)

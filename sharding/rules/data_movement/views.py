"""Operations that rearrange elements: views, permutations, expand, flips, padding."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchard.functional.programs.tags import SOURCE, VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, Local, letters, register_rule, spell


def view_text(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    """The factor rule of a view: the common refinement of both shapes, greedily from the left.

    Where boundaries do not align (6·4 as 8·3), the rest of their group is whole.
    """
    ins: list[list[str]] = [[] for _ in before]
    outs: list[list[str]] = [[] for _ in after]
    whole: list[str] = []
    a, b, i, j, n = list(before), list(after), 0, 0, 0
    while i < len(a) or j < len(b):
        if i < len(a) and a[i] == 1:
            i += 1
        elif j < len(b) and b[j] == 1:
            j += 1
        else:
            common = math.gcd(a[i], b[j])
            if common > 1:
                ins[i].append(f"f{n}={common}")
                outs[j].append(f"f{n}={common}")
                a[i], b[j], n = a[i] // common, b[j] // common, n + 1
            else:
                i, j, n = _unaligned((a, i, ins), (b, j, outs), n, whole)
    return (
        f"{' '.join(_group(d) for d in ins)} -> {' '.join(_group(d) for d in outs)}"
        + "".join(f" | whole {w}" for w in whole)
    )


def _unaligned(
    left: tuple[list[int], int, list[list[str]]],
    right: tuple[list[int], int, list[list[str]]],
    n: int,
    whole: list[str],
) -> tuple[int, int, int]:
    """Take dims from both sides until their products agree; none of these dims may be split."""
    (a, i, ins), (b, j, outs) = left, right
    have, want = 1, 1
    while have != want or have == 1:
        sizes, at, names = (a, i, ins) if have <= want else (b, j, outs)
        names[at].append(f"f{n}={sizes[at]}")
        whole.append(f"f{n}")
        n += 1
        if sizes is a and have <= want:
            have, a[i], i = have * a[i], 1, i + 1
        else:
            want, b[j], j = want * b[j], 1, j + 1
    return i, j, n


def _group(names: list[str]) -> str:
    return "1" if not names else f"({' '.join(names)})"


def _view(call: Call) -> str | None:
    if 0 in call.ins[0] or 0 in call.outs[0]:
        return None
    return f"{view_text(call.ins[0], call.outs[0])} | linear 0"


def _emit_view(call: Call, local: Local) -> Any:
    return local.call(aten.reshape.default, local.args[0], local.shape())


register_rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    text=_view,
    emit=_emit_view,
    alias=True,
)


def _squeeze(call: Call) -> str:
    names = ["1" if n == 1 else f"d{i}" for i, n in enumerate(call.ins[0])]
    return f"{spell(names)} -> {spell(_match(names, call.outs[0]))} | linear 0"


def _match(names: list[str], shape: tuple[int, ...]) -> list[str]:
    """Names of the dims of a result that differs from its operand only in dims of size one."""
    rest = iter(n for n in names if n != "1")
    return ["1" if n == 1 else next(rest) for n in shape]


register_rule(
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    text=_squeeze,
    emit=_emit_view,
    alias=True,
)


def _permute(call: Call) -> str:
    names = letters(len(call.ins[0]))
    dims = [d % len(names) for d in call.arg(1)] if names else []
    return f"{spell(names)} -> {spell([names[d] for d in dims])} | linear 0"


def _transpose(call: Call) -> str:
    names = letters(len(call.ins[0]))
    if not names:
        return " -> | linear 0"
    out = list(names)
    a, b = call.arg(1) % len(names), call.arg(2) % len(names)
    out[a], out[b] = out[b], out[a]
    return f"{spell(names)} -> {spell(out)} | linear 0"


def _t(call: Call) -> str:
    names = letters(len(call.ins[0]))
    return f"{spell(names)} -> {spell(names[::-1])} | linear 0"


register_rule(aten.permute.default, text=_permute, alias=True)
register_rule(aten.transpose.int, text=_transpose, alias=True)
register_rule(aten.t.default, text=_t, alias=True)


def _expand(call: Call) -> str:
    ins, outs = call.ins[0], call.outs[0]
    names = letters(len(outs))
    lead = len(outs) - len(ins)
    kept = [n if ins[i] == outs[lead + i] else "1" for i, n in enumerate(names[lead:])]
    free = [n for i, n in enumerate(names) if i < lead or kept[i - lead] == "1"]
    return f"{spell(kept)} -> {spell(names)} | linear 0 | free {' '.join(free)}"


def _emit_expand(call: Call, local: Local) -> Any:
    return local.call(aten.expand.default, local.args[0], local.shape())


register_rule(aten.expand.default, text=_expand, emit=_emit_expand)


def _flip(call: Call) -> str:
    names = letters(len(call.ins[0]))
    dims = call.arg(2, "dims", []) if call.target is aten.roll.default else call.arg(1, "dims")
    which = [names[d % len(names)] for d in dims if names] or names
    return f"{spell(names)} -> {spell(names)} | linear 0" + "".join(f" | whole {n}" for n in which)


register_rule(aten.flip.default, aten.roll.default, text=_flip)


def _pad(call: Call) -> str:
    names, pads = letters(len(call.ins[0])), call.arg(1)
    padded = {len(names) - 1 - k // 2 for k, p in enumerate(pads) if p}
    out = [f"w{i}" if i in padded else n for i, n in enumerate(names)]
    whole = "".join(f" | whole {names[i]} w{i}" for i in sorted(padded))
    linear = " | linear 0" if not call.arg(2, "value", 0) else ""
    return f"{spell(names)} -> {spell(out)}{whole}{linear}"


register_rule(aten.constant_pad_nd.default, text=_pad)


def _as_strided(call: Call) -> str:
    names, outs = letters(len(call.ins[0])), [f"w{i}" for i in range(len(call.outs[0]))]
    whole = f" | whole {spell(names + outs)}" if names + outs else ""
    return f"{spell(names)} -> {spell(outs)}{whole} | linear 0"


def _emit_as_strided(call: Call, local: Local) -> Any:
    """as_strided reads memory, so its operand is first laid out as it was during tracing."""
    val = VAL.of(call.operands[0])
    order = sorted(range(val.ndim), key=lambda d: (-val.stride(d), d))
    if val.storage_offset() or not val.permute(order).is_contiguous():
        raise NotImplementedError(
            f"as_strided at {SOURCE.get(call.node)} reads memory outside of a slice, which "
            "sharded values do not have; index the tensor that was sliced instead."
        )
    packed = local.call(aten.permute.default, local.args[0], order)
    packed = local.call(aten.clone.default, packed, memory_format=torch.contiguous_format)
    return local.call(call.target, packed, *local.args[1:], **local.kwargs)


register_rule(aten.as_strided.default, text=_as_strided, emit=_emit_as_strided)

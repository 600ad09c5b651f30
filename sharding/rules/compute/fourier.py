"""Fourier transforms: the transformed dims are whole."""

from __future__ import annotations

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, register_rule


def _fourier(call: Call) -> str:
    """Transformed dims are new factors in the result: transforms from or to reals change a size."""
    rank = len(call.ins[0])
    whole = {d % rank for d in call.arg(1)}
    ins = [f"d{i}" for i in range(rank)]
    outs = [f"w{i}" if i in whole else n for i, n in enumerate(ins)]
    clause = " ".join(f"d{i} w{i}" for i in sorted(whole))
    return f"{' '.join(ins)} -> {' '.join(outs)} | linear 0" + (f" | whole {clause}" if clause else "")


register_rule(
    aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default, text=_fourier
)

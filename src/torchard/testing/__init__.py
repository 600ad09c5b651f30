"""Property-based numerical testing: laws of functions, and where two functions first differ.

- `equal`: values and derivatives agree up to rounding, by bounds that are measured, not chosen.
- `check_...`: laws of one function; `invariant`, `equivariant`, `homogeneous`: its symmetries.
- `inverse`, `idempotent`, `batch_independent`, `causal`, `padding_invariant`, `monotone`: its structure.
- `assert_...`, `max_traces`: its costs.
- `localize`: the first operations at which two functions differ; `localize_ranks`: two ranks of a job.
- `prove`: a sharded plan computes the same as its global program, for all values.
- `tensors`, `pytrees`, `keys`, `meshes`, `specs_for`, `policies`, `stacks`, `programs`: strategies for
  hypothesis, which is imported when one of them is first used (``pip install 'torchard[hypothesis]'``).
  ``from torchard.testing import *`` leaves them out: ``from torchard.testing import strategies as ts``.
- `RankPool`: ranks of gloo to run tests on; `torchard.testing.pytest_plugin` has fixtures.

Files:

- equal.py, differences.py, report.py: two functions agree: values, derivatives as functions of the same
  arguments, and ways to call (``derived.py``). The roundings of ``fn`` count too if both sides of a law
  are the user's, or if the reference rounds nothing.
- calls.py: modules as functions; random draws that are the same in each call.
- localize.py: where two functions first differ: the values of both runs (``observe.py``) are matched by
  value, and the operations between matching values and differing results are reported.
- varying.py: values of single ranks, inside of ``shard_map``: they are combined in every way that gives a
  shape of the reference.
- ranks.py: where the ranks of a job first differ: checksums of values that should be replicated.
- rank_pool.py, pytest_plugin.py: ranks to run tests on; fixtures and a seed.
- laws/: laws of one function, by ``equal``. ``derivatives.py`` compares forward mode, reverse mode and
  finite differences: a cheap comparison accepts derivatives that agree to seven digits, and a careful one
  with measured noise judges the others (``finite_differences.py``, ``noise.py``). Kinks inside of a
  function are found by nudging intermediate values (``nudged``); derivatives at a kink are also compared
  at nearby arguments.
- surroundings.py: the objects that a function's code refers to, and which of them a call changes.
- counts.py: collectives, kernels, residuals and traces.
- strategies/: strategies for hypothesis, in the only folder that imports it. A program is drawn as Python
  text; the same text runs and is printed. A generator, hypothesis's or Python's, makes all choices
  (``pool.py``), simplest first, and each step is an element of a list that hypothesis can shorten.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchard.testing.counts import (
    assert_collectives,
    assert_kernels,
    assert_residual_bytes,
    max_traces,
)
from torchard.testing.equal import equal
from torchard.testing.laws.batches import (
    batch_independent,
    permutation_equivariant,
    permutation_invariant,
)
from torchard.testing.laws.derivatives import check_derivatives
from torchard.testing.laws.inverses import idempotent, inverse
from torchard.testing.laws.order import monotone
from torchard.testing.laws.purity import Purity, check_pure
from torchard.testing.laws.sequences import causal, check_associative, padding_invariant
from torchard.testing.laws.symmetries import equivariant, homogeneous, invariant
from torchard.testing.laws.training import check_training
from torchard.testing.laws.transforms import (
    check_batching,
    check_checkpoint,
    check_dtypes,
    check_sharding,
    check_stack,
)
from torchard.testing.localize import Divergence, Operation, localize
from torchard.testing.prove import Gap, Proof, Unproved, prove
from torchard.testing.rank_pool import RankError, RankPool
from torchard.testing.ranks import RankDivergence, localize_ranks
from torchard.testing.report import (
    DerivativeReport,
    Difference,
    Differs,
    OrderReport,
    Report,
    Trials,
)

if TYPE_CHECKING:
    from torchard.testing.strategies import *  # noqa: F403

# Not the strategies: a star import needs no hypothesis, and does not hide torchard.policies.
__all__ = [
    "DerivativeReport",
    "Difference",
    "Differs",
    "Divergence",
    "Gap",
    "Operation",
    "OrderReport",
    "Proof",
    "Purity",
    "RankDivergence",
    "RankError",
    "RankPool",
    "Report",
    "Trials",
    "Unproved",
    "assert_collectives",
    "assert_kernels",
    "assert_residual_bytes",
    "batch_independent",
    "causal",
    "check_associative",
    "check_batching",
    "check_checkpoint",
    "check_derivatives",
    "check_dtypes",
    "check_pure",
    "check_sharding",
    "check_stack",
    "check_training",
    "equal",
    "equivariant",
    "homogeneous",
    "idempotent",
    "invariant",
    "inverse",
    "localize",
    "localize_ranks",
    "max_traces",
    "monotone",
    "padding_invariant",
    "permutation_equivariant",
    "permutation_invariant",
    "prove",
]

_STRATEGIES = (
    *("RandomProgram", "keys", "meshes", "modules", "policies", "programs"),
    *("pytrees", "random_program", "specs_for", "stacks", "tensors"),
)


def __getattr__(name: str) -> Any:
    """Strategies are imported when they are first used: laws need no hypothesis."""
    if name not in _STRATEGIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("torchard.testing.strategies"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_STRATEGIES})

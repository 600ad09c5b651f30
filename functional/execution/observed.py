"""The results of operations, observed once on fake tensors: sizes, and which values share memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.effects.in_place import WRITTEN_VIEWS
from torchard.functional.execution.storages import Fresh, Results
from torchard.functional.iterations.collecting import copied, new_buffer
from torchard.functional.programs.loops import regrouped
from torchard.functional.programs.markers import rows, total
from torchard.functional.programs.tags import STAGE
from torchard.functional.torch_internals.operators import aten
from torchard.functional.updates.in_place import written_operands

__all__ = ["fakes_like", "observed", "results_of"]

# The values that a loop collects have memory of their own.
_COLLECTED: dict[Any, Any] = {
    rows: lambda value, count, *_: new_buffer(value, count),
    total: lambda value, *_: aten.add.Tensor(value, value),
}
_RUN = {**_COLLECTED, **dict.fromkeys(WRITTEN_VIEWS, lambda base, *_, **__: copied(base))}


def observed(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> dict[fx.Node, Any]:
    """The values of a graph's nodes, each in one iteration, for inputs like these."""
    fakes = internals.FakeTensorMode()
    values: dict[fx.Node, Any] = dict(
        zip(graph.find_nodes(op="placeholder"), fakes_like(inputs, fakes), strict=True)
    )
    with internals.no_modes(), torch.no_grad(), fakes:
        for node in regrouped(graph):
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                function = _RUN.get(node.target, node.target)
                if written_operands(node):
                    function = _bases
                # torch's fakes of awaited values are new tensors
                function = _awaited if STAGE.get(node) == "wait" else function
                values[node] = function(*args, **kwargs)
    return values


def results_of(values: Mapping[fx.Node, Any]) -> Results:
    """What nodes compute, by their values: these say what shares memory."""

    def results(node: fx.Node) -> Any:
        shared = {
            internals.storage_id(x): operand
            for operand in node.all_input_nodes
            for x in (values[operand] if isinstance(values[operand], tuple) else [values[operand]])
            if isinstance(x, torch.Tensor)
        }

        def one(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return None
            source = shared.get(internals.storage_id(x))
            return Fresh(x, x.untyped_storage().nbytes()) if source is None else source

        value = values[node]
        return list(map(one, value)) if isinstance(value, (tuple, list)) else one(value)

    return results


def _bases(bases: Sequence[Any], *_: Any) -> tuple[Any, ...]:
    """The results of an update in place."""
    return tuple(bases)


def _awaited(value: Any) -> Any:
    """The value that was sent or received; a direct transfer is a tuple that begins with this value."""
    return value[0] if isinstance(value, tuple) else value


def fakes_like(tensors: Sequence[torch.Tensor], fakes: Any) -> list[torch.Tensor]:
    """Fake tensors of the same shapes, strides, dtypes and devices."""
    with internals.no_modes(), fakes:
        return [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in tensors
        ]

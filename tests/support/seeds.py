"""The founding cases as functions: what is run on virtual meshes, over gloo, and on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from torchard import MeshTensor, P, constrain, optim, place, random, shard

Params = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Seed:
    """A founding case.

    Attributes:
        sizes: features in, hidden, out.
        batch: the leading dims of the input.
        specs: of the parameters.
        x_spec, out_spec: of the input (None: a plain tensor) and of the output.
        activation: between the two linears.
        pin: the spec of the hidden activation, if it must be said.
    """

    sizes: tuple[int, int, int]
    batch: tuple[int, ...]
    specs: dict[str, P]
    x_spec: P | None
    out_spec: P | None
    activation: Any
    pin: P | None = None

    def forward(self, params: Params, x: torch.Tensor) -> torch.Tensor:
        hidden = self.activation(F.linear(x, params["w1"], params["b1"]))
        if self.pin is not None:
            hidden = constrain(hidden, self.pin)
        return F.linear(hidden, params["w2"], params["b2"])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n, h, m = self.sizes
        return {"w1": (h, n), "b1": (h,), "w2": (m, h), "b2": (m,)}

    def normal(self, dtype: torch.dtype) -> tuple[Params, torch.Tensor, torch.Tensor]:
        """Parameters, input and cotangent drawn from keys."""
        keys = iter(random.split(random.key(7), 6))
        params = {
            k: random.normal(next(keys), s, dtype=dtype) / s[-1] ** 0.5
            for k, s in self.shapes().items()
        }
        x = random.normal(next(keys), (*self.batch, self.sizes[0]), dtype=dtype)
        ct = random.normal(next(keys), (*self.batch, self.sizes[2]), dtype=dtype)
        return params, x, ct

    def integers(self, dtype: torch.dtype) -> tuple[Params, torch.Tensor, torch.Tensor]:
        """Sparse small integers: every partial sum is at most 256, exact in bf16 in any order."""
        keys = iter(random.split(random.key(11), 12))

        def draw(shape: tuple[int, ...], keep: float) -> torch.Tensor:
            values = random.randint(next(keys), shape, -1, 2)
            kept = random.uniform(next(keys), shape) < keep
            return torch.where(kept, values, 0).to(dtype)

        # The expected number of terms in the longest sum is about 4.
        params = {k: draw(s, min(1.0, 8 / s[-1])) for k, s in self.shapes().items()}
        rows = 1
        for n in self.batch:
            rows *= n
        x = draw((*self.batch, self.sizes[0]), min(1.0, 16 / self.sizes[0]))
        ct = draw((*self.batch, self.sizes[2]), min(1.0, 16 / rows))
        return params, x, ct


S0 = Seed(
    (1024, 1024, 1024),
    (2, 512),
    {"w1": P("tp", None), "b1": P("tp"), "w2": P(None, "tp"), "b2": P()},
    None,
    P(),
    F.gelu,
)
S4 = Seed(
    (10, 32, 5),
    (4, 12),
    {"w1": P("tp", None), "b1": P("tp"), "w2": P(None, "tp"), "b2": P()},
    P(None, "tp"),
    P(None, "tp"),
    F.relu,
    P(None, None, "tp"),
)


def whole(value: Any) -> torch.Tensor:
    """The plain tensor behind a result."""
    return value.full() if isinstance(value, MeshTensor) else value


def sharded_arguments(seed: Seed, mesh: Any, params: Params, x: torch.Tensor) -> tuple[Any, Any]:
    """Parameters and input as the case has them on a mesh."""
    placed = place(params, mesh, seed.specs)
    return placed, x if seed.x_spec is None else place(x, mesh, seed.x_spec)


def outputs_and_gradients(
    fn: Any, params: Any, x: Any, ct: torch.Tensor
) -> dict[str, torch.Tensor]:
    """fn's output and the gradients of ⟨fn, ct⟩, by name, as plain tensors."""
    if isinstance(x, MeshTensor) or any(isinstance(v, MeshTensor) for v in params.values()):
        mesh = next(iter(params.values())).mesh
        inner = shard(lambda y, c: (y * c).sum(), mesh)
    else:

        def inner(y: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            return (y * c).sum()

    def objective(p: Any, x: Any) -> Any:
        y = fn(p, x)
        return inner(y, ct), y

    (dp, dx), y = torch.func.grad(objective, argnums=(0, 1), has_aux=True)(params, x)
    found = {"out": whole(y), "x": whole(dx)}
    return found | {k: whole(v) for k, v in dp.items()}


def train(fn: Any, params: Any, x: Any, ct: torch.Tensor, steps: int) -> tuple[list[float], Any]:
    """AdamW, lr 0.25, on the mean square distance to a target: losses and final parameters."""
    init, update = optim.adamw(0.25)

    def step(params: Any, state: Any, x: Any, target: torch.Tensor) -> Any:
        def loss(p: Any) -> torch.Tensor:
            return ((fn(p, x) - target) ** 2).mean()

        grads, value = torch.func.grad_and_value(loss)(params)
        params, state = update(grads, state, params)
        return params, state, value

    mesh = next((v.mesh for v in params.values() if isinstance(v, MeshTensor)), None)
    run = step if mesh is None else shard(step, mesh)
    state, losses = init(params), []
    for _ in range(steps):
        params, state, value = run(params, state, x, ct)
        losses.append(float(value))
    return losses, {k: whole(v) for k, v in params.items()}


def kinds(records: Any) -> list[tuple[str, str]]:
    """(phase, kind) of collectives, for comparison with a list written by hand."""
    return sorted((r.phase, r.kind) for r in records)

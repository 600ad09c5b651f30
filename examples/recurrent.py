"""A recurrent network, by a scan: its plan, an activation with a rule of its own, and what it prints.

``python examples/recurrent.py`` trains it on a virtual mesh of four ranks.
"""

from typing import Any

import torch

from torchard import (
    Mesh,
    P,
    custom_vjp,
    debug,
    error_if,
    fori_loop,
    jit,
    place,
    random,
    scan,
    shard,
    value_and_grad,
)

Params = dict[str, torch.Tensor]


@custom_vjp
def square(x: torch.Tensor) -> torch.Tensor:
    """x²; its backward reads x, which autograd.Function would save by save_for_backward."""
    return x * x


square.defvjp(lambda x: (x * x, x), lambda x, cotangent: (2 * x * cotangent,))


def loss(params: Params, xs: torch.Tensor) -> torch.Tensor:
    """The mean square of the last state, xs [batch, time, features]."""

    def step(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.tanh(x @ params["in"] + state @ params["state"]), None

    first = xs.new_zeros(xs.shape[0], params["state"].shape[0])  # split as the batch is
    last, _ = scan(step, first, xs.movedim(1, 0))
    return square(last - 0.5).mean()


def train(params: Params, xs: torch.Tensor, steps: int = 20, rate: float = 0.5) -> Params:
    """Gradient descent, which says how it goes and stops if it diverges."""

    def step(i: torch.Tensor, params: Params) -> Params:
        value, slopes = value_and_grad(loss)(params, xs)
        debug.callback(_show, i, value)
        error_if(~value.isfinite(), "step {i}: the loss is {value}", i=i, value=value)
        return {name: params[name] - rate * slopes[name] for name in params}

    result: Params = fori_loop(0, steps, step, params)
    return result


def _show(i: torch.Tensor, value: torch.Tensor) -> None:
    if int(i) % 5 == 0:
        print(f"step {int(i)}: loss {value:.4f}")


def main(ranks: int = 4, steps: int = 20) -> dict[str, Any]:
    """Train on a mesh and alone; returns the parameters of both."""
    mesh, keys = Mesh({"dp": ranks}, virtual=True), random.split(random.key(0), 3)
    params = {
        "in": random.normal(keys[0], (16, 16)) / 4,
        "state": random.normal(keys[1], (16, 16)) / 4,
    }
    xs = random.normal(keys[2], (8, 12, 16))
    placed = {name: place(x, mesh, P()) for name, x in params.items()}, place(xs, mesh, P("dp"))
    print("one step of gradients, of a recurrence of", xs.shape[1], "steps:")
    print(shard(value_and_grad(loss), mesh).lower(*placed).collectives)
    on_mesh = shard(lambda params, xs: train(params, xs, steps), mesh)(*placed)
    alone = jit(lambda params, xs: train(params, xs, steps), backend="eager")(params, xs)
    return {"mesh": on_mesh, "alone": alone}


if __name__ == "__main__":
    main()

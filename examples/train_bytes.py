"""Train a byte-level language model on real English text, on any mesh, by a function for one device.

    torchrun --nproc-per-node 2 examples/train_bytes.py --mesh tp=2
    torchrun --nproc-per-node 2 examples/train_bytes.py --mesh dp=2
    python examples/train_bytes.py --virtual dp=2,tp=4

The model, in `_model.py`, is written for one device, and so is the training step. `recipe` says which
mesh axis splits which dim of each parameter (as in Megatron-LM, `up` by its outputs, `down` by its
inputs); the collectives and all other layouts follow. At the end the same function is trained on one
device, for comparison.
"""

from __future__ import annotations

import functools

import _model
import _train

from torchard import P


def recipe(size: _model.Size) -> _train.Recipe:
    """The specs of the parameters and of the batch, over a mesh with the axes "dp" and "tp"."""
    up, down = {"w": P("tp", None), "b": P("tp")}, {"w": P(None, "tp"), "b": P()}
    blocks = [{"up": up, "down": down}] * size.blocks
    specs = {"embed": P(), "blocks": blocks, "out": {"w": P(), "b": P()}}
    return _train.Recipe(specs, P("dp"))


def main(argv: list[str] | None = None) -> None:
    parser = _train.options(__doc__)
    parser.add_argument("--hidden", type=int, default=_model.Size.hidden, help="width of the MLPs")
    options = parser.parse_args(argv)
    size = _model.Size(hidden=options.hidden)
    model = _train.Model(
        context=size.context,
        targets=1,
        init=functools.partial(_model.init, size=size),
        loss=_model.loss,
        predict=_model.logits,
    )
    _train.run("train_bytes", options, model, recipe(size), axes=("dp", "tp"))


if __name__ == "__main__":
    main()

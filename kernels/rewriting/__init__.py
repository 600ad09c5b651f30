"""Kernels in the place of what was matched, and the reports of it.

A kernel and its gradient are planned together (`search.py`): what the forward keeps for the
backward alone goes with both. `replace.py` decides whose users turn where and what goes;
`memory_traffic.py` counts bytes before and after. Values that another transform means by a label
stay values; so does what an edge of a checkpointed segment runs through. `fused_loss_grad.py` fuses
a loss with its gradient where the cotangent does not depend on the loss, so that the logits are
read once. `near_misses.py` says on demand what nearly matched, with reasons.
"""

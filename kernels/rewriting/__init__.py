"""Replacement of matched operations by kernels, and reports of it.

A kernel and its gradient are replaced as one plan (`search.py`): values that the forward keeps only
for the backward are eliminated with both. `plan.py` says what a kernel reads and what becomes dead;
`replace.py` redirects users to the kernel's results and erases dead nodes; `memory_traffic.py` counts
the bytes moved before and after. Values that another transform selects by a label are kept, and so are
values that cross the boundary of a checkpointed segment. `fused_loss_grad.py` fuses a loss with its
gradient where the cotangent does not depend on the loss, so that the logits are read once.
`near_misses.py` lists near misses on demand, with reasons.
"""

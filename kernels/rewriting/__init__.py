"""Replacement of matched operations by kernels, and reports of it.

A kernel and its gradient are replaced as one plan (`search.py`), which eliminates values that the forward
saves only for the backward. `plan.py` determines the operands of a kernel and the nodes that become dead;
`replace.py` redirects users to the kernel's results and erases dead nodes; `memory_traffic.py` counts the
bytes moved before and after. Values that other transforms select by a label are not eliminated, and
neither are values that cross the boundary of a checkpointed segment. `fused_loss_grad.py` fuses a loss
with its gradient if the cotangent does not depend on the loss, so that the logits are read once.
`near_misses.py` lists near misses on demand, with reasons.
"""

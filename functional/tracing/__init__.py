"""From a function and its arguments to a pure program.

`trace_call.py` runs the function on fake tensors (`record.py`), outside of the functorch levels and modes
around the call. While the function runs, `trace_state.py` tags each node with information that is only
known then (source line, scope, phase), `tensor_lifting.py` turns foreign tensors into operands, before
functorch wraps them, and `inner_gradients.py` records the input of each gradient that is taken inside. If
a trace fails, the thread's dispatch state is restored. `purify.py` returns a graph without mutation,
randomness and bookkeeping.
"""

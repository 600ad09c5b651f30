"""From a function and its arguments to a pure program.

`trace_call.py` runs the function on fake tensors (`record.py`) outside of every functorch level and
mode, whatever the call stands in. While it runs, `trace_state.py` tags each node with what could
not be told afterwards (source line, scope, phase) and `tensor_lifting.py` turns foreign tensors
into operands, before functorch wraps them; of gradients that are taken inside, `inner_gradients.py`
remembers which input autograd was asked for. The thread's dispatch state is restored when a trace
fails. `purify.py` ends with a graph without mutation, randomness and bookkeeping.
"""

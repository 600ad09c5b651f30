"""How a transformed function is called, cached, composed and differentiated.

`transformed.py` has the calls and the cache of signatures, `cache_entry.py` an entry of it and the
conditions under which it may be used. Below the user's trees, arguments and results are flat lists of
*parts*, the tensors that hold the leaves (`lowered_function.py`). `autograd_functions.py` connects a
program with autograd: one Function for a single level of gradients, whose halves are split and bound;
another for any other stack of levels, which saves primals alone and differentiates by transforming the
derivative.
"""

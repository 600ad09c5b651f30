"""Patterns, and matching with proof.

A pattern is a function. Traced once at arbitrary shapes it gives a **skeleton**, by which bindings of its
inputs are proposed, ignoring shapes and numbers (`unify.py`). A proposal is **verified by evaluation**
(`verify.py`): the pattern is traced at exactly the shapes and dtypes of the bound values and evaluated in
the program's own store; it matches if the resulting term is the term of a node. So proposals may be
generous, and a match is proven, up to rounding. Inputs are bound one after another (`match_plan.py`): a
term that depends only on bound inputs must be in the program, unless its reader could absorb it. If two
ways to write a function have different normal forms, both are references of the same kernel.

A gradient is a pattern too (`gradient.py`). Seed cotangents stay symbolic; folding them to 1 would
erase the factor. `effort.py` bounds the steps of a search, linearly in the program.
"""

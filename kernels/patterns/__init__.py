"""What to look for in a program, and the proof that it is there.

A pattern is a function. Traced once at arbitrary shapes it gives a **skeleton**, which proposes
what its inputs might be, shapes and numbers aside (`unify.py`). A proposal is **verified by
evaluation** (`verify.py`): the pattern is traced at exactly the shapes and dtypes of what it was
bound to and evaluated in the program's own store; it matches if the resulting term is one that a
node has. So proposing may be generous, and a match is a proof, up to rounding. Inputs are tried one
after another (`match_plan.py`): whatever they suffice for has to be in the program, unless what
reads it could take it apart. Spellings that the normal form does not identify are further
references of the same kernel.

A gradient is a pattern too (`gradient.py`). Seed cotangents stay symbolic; folding them to 1 would
erase the factor. `effort.py` bounds the steps of a search, linearly in the program.
"""

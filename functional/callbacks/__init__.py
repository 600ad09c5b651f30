"""Effects: calls of Python functions with the values of a program, in the order of the source.

One idea: **an effect is an operation whose result is a token, and reads the token of the one before**.
Tokens are values (0-d bools), so that loops carry them, branches return them, and what has an effect is
neither dead, nor merged, nor moved past another one, without any pass that knows of effects. The last
token of a program is tied to one of its results (`after`). A derivative that computes the forward again
does so without its effects (`silent`). `error_if` is an effect that raises an error; `checked` has
results looked at (checks/).
"""

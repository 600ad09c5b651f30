"""Derivatives that the user states: of a function, by a rule, and of a solution, by its equation.

A call with a rule of its own is one autograd Function (rules.py), whatever the rule is: given backward
(custom_vjp.py), given forward (custom_jvp.py), or either of these, batched. Rules are ordinary functions,
so what they compute is traced, planned, differentiated and vmapped like the rest of a program. Solvers
(implicit.py) are functions with such a rule.
"""

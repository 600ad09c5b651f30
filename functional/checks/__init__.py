"""Checks of values while a program runs: error_if, and checked.

One idea: **a check is a tag**. `checked` tags the operations of a program (tags.py, `CHECKS`), operations
that replace them inherit it, and the code that runs an operation with the tag looks at its result
(execution/failures.py). So no pass knows of checks. `error_if` is an effect (callbacks/), whose function
raises.
"""

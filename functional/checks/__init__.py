"""What is looked for in the values of a program while it runs.

One idea: **a check is a tag**. `checked` (callbacks/checked.py) tags operations of a program (`CHECKS`
in tags.py), operations that replace them inherit the tag, and the code that runs an operation with it
looks at its result. So no pass knows of checks.
"""

"""How far rounding may move the values of a program: its model, and runs that measure it."""

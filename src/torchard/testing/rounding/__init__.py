"""How far rounding may move the values of a program: a model of rounding, and runs that measure it."""

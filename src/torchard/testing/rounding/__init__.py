"""How far rounding may move a program's values: a model of roundings, and runs that measure it."""

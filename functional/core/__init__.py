"""Errors, checks of arguments, pytrees, and other parts that do not depend on programs."""

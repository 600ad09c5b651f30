"""Errors, checks of arguments, pytrees, and other code that does not depend on programs."""

"""Errors, checks of arguments, trees, and other things that know nothing of programs."""

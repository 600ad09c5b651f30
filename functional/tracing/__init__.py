"""From a function and its arguments to a pure program."""

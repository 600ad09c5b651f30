"""Laws of one function. Each states two functions that should be equal, which are compared by `equal`."""

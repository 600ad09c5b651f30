"""Laws of one function: what should be equal to what, compared by `equal`."""

"""Which layout each value of a program gets."""

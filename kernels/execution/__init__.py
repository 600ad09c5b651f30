"""Which implementation of a kernel runs, and how."""

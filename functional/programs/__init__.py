"""A program: its graph and leaves, the contracts of what rewrites and runs it, what its nodes mean."""

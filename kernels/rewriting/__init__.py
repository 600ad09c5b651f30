"""Kernels in the place of what was matched, and the reports of it."""

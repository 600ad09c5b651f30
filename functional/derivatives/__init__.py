"""Derivatives of programs, and batches of them, as programs."""

"""Pipelines: which ranks compute which operations, and in which order."""

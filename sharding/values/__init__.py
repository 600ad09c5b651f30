"""Meshes, specs, and the values that are placed by them."""

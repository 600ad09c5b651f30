"""Writes in place become values; buffers of modules become results."""

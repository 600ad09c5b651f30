"""Styles: sharding plans for whole models.

A style writes specs of parameters and constraints on labelled activations; propagation does the rest. By
default, activations have no constraints: the specs of weights already imply Megatron's collectives, and a
constraint fixes all dims of a value, so it would gather the batch over other axes (unless ``batch=``
names them).

Attention heads must not be split, and no shape shows where they are. `heads.py` follows each dim of each
weight through a trace by the factor rules, which state what every view, slice and contraction does to a
dim. It finds the projections fused in one weight, and splits grouped queries with their keys and values.
"""

"""Styles: sharding plans for whole models.

A style writes specs of parameters and constraints on labelled activations; propagation does the rest.
Activations are left to propagation by default: the specs of weights already imply Megatron's collectives,
and a constraint fixes all dims of a value, so that it would gather the batch over other axes (unless
``batch=`` names them).

Attention heads must not be split, and no shape says where they are. `heads.py` follows each dim of each
weight through a trace by the factor rules, which state what every view, slice and contraction does to a
dim. It finds the projections fused in one weight, and splits grouped queries with their keys and values.
"""

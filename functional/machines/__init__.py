"""Machines: rates by which the time of a program is predicted.

One idea: **a machine is a few rates, and time is what a list of what runs takes at these rates**. A
machine knows no programs; `reports/clock.py` runs the list of instructions with seconds in the place of
tensors, and `reports/time.py` says where they go.
"""

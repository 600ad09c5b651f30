"""Costs: what an operation takes, counted in one place: FLOPs, bytes of memory, seconds on a machine.

Every choice that the library makes by cost reads these: budgets of memory, plans, schedules, stages. An
operation in a loop costs its iterations, so no reader multiplies by hand.
"""

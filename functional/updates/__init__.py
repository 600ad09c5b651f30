"""Optimizers' updates: the arithmetic of one parameter, and one kernel for many parameters.

One idea: **a kernel replaces arithmetic that was compared with its reference, operation by operation**.
What is traced, differentiated, mapped and planned are the ordinary operations of each parameter
(arithmetic.py). Only what runs is changed, also beside what a compiler compiles: each reference is
recorded (terms.py) and searched for in the program (templates.py), and parameters whose numbers are equal
are updated by one call (merging.py). A call is a value (kernels.py) until memory is assigned. Then it
writes into copies (in_place.py), which are not made of memory that the program owns.
"""

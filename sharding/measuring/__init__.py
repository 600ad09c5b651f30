"""Measuring: the rates of the machine that runs this, for ``.lower(...).time(machine)``.

One idea: **operations are timed where they run, in a program**, since the memory that a step has just
touched, the allocator and the other ranks make them several times slower than a loop over one of them.
So a training step that contains what models contain (`calibration.py`) is run operation by operation on
all ranks at once (`operations.py`), its times are explained by few rates (`rates.py`), and collectives
are timed in chains (`links.py`). Nothing here knows the programs whose time is predicted.
"""

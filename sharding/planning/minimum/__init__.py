"""Plans improved to the minimum of their time along one axis after another.

`choices.py` lists what each operation and each value may do along an axis. `minimum.py` writes the time
of a plan as a sum of terms over these choices, which `elimination.py` minimizes exactly, and `bounds.py`
nearly, with a bound, where that is too wide; `reshards.py` gives the times of reshards.
`sharding/scheduling/improved.py` decides whether the plan that is found replaces the one that it began
with.
"""

"""Plans as minima of their time on a machine, along one axis after another and along each two.

`plan.py` begins with the decision in which all is whole (`whole.py`). `choices.py` lists what each
operation and each value may do along some axes, `alternatives.py` which operations may come apart.
`model.py` writes the time of a plan as a sum of terms over these choices, which `elimination.py`
minimizes exactly, and `bounds.py` nearly, with a bound, where that is too wide; `reshards.py` gives the
times of reshards, and `later_passes.py` what other passes make of them.
"""

"""Why a plan is as it is: what it costs, what every other one costs at least, what another choice would.

`model.py` puts a plan among all plans along some axes, in the model that it was minimized in
(`planning/minimum/`); `moves.py` has the moves that the model counts. `others.py` finds the cheapest plan
in which one thing is otherwise, and `changes.py` lists the collectives by which two plans differ.
`named.py` finds the values that users name, and `report.py` is what they read.
"""

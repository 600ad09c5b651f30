"""Pipelines: which ranks compute which operations, and in which order.

`chunks.py` divides a program's layers into chunks of equal cost, and `homes.py` gives each value the rank
that holds it, and sends values between ranks. `schedules.py` has orders of forwards and backwards, and
`tasks.py` puts the operations of a program in such an order. `report.py` reports the result.
"""

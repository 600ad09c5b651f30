"""Which operations become one.

Imports `torchard.functional`, never `torchard.sharding`.
"""

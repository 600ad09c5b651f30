"""Private attributes and tables of torch's, each read under a name of ours.

Imports nothing of ours but itself, so that all other folders may import it.
"""

"""Private attributes and tables of torch, each under a public name.

Imports nothing else of this library, so that all other folders may import it.
"""

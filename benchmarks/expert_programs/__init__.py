"""Programs as their authors would write them, each with the bytes that an expert's code would send.

Each file has the programs of one subject. The comment above a case derives the expert's bytes, and holds
for the cases below it that have none. Sizes are such that no other plan has about the same cost. A plan
that repeats much work on every rank to send less counts only where its case says `repeats`.
"""

from __future__ import annotations

import importlib

from .case import CASES, Case, Program, Sent

__all__ = ["CASES", "SUBJECTS", "Case", "Program", "Sent"]

SUBJECTS = (
    *("recurrent", "adapters", "generative", "updates", "transformers", "losses", "images"),
    *("classical", "simulations", "recommenders", "sequences", "populations", "derivatives"),
)
"""The files, in the order of the table; importing one adds its cases."""

for _subject in SUBJECTS:
    importlib.import_module(f".{_subject}", __name__)

"""One rank of a docstring's example: python docstring_ranks.py FILE NAME, by torchrun.

All ranks type the same lines; the output is that of rank 0.
"""

from __future__ import annotations

import os
import sys

from docstrings import DocstringDocument, report

if __name__ == "__main__":
    path, name = sys.argv[1:]
    (example,) = (e for e in DocstringDocument.parse(path) if e.parsed.name == name)
    said = report(example.parsed)
    if os.environ["RANK"] == "0":
        print(said, end="", flush=True)
    os._exit(0)  # without waiting for ranks that the example has lost

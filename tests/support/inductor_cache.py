"""Scripts that compile in processes of their own, with an Inductor cache that begins empty."""

from __future__ import annotations

from pathlib import Path

import forked

__all__ = ["last_lines"]


def last_lines(code: str, folder: Path, runs: int = 2) -> list[str]:
    """The last line that each run of a script prints; later runs find what earlier ones have compiled."""
    script = folder / "compiles.py"
    script.write_text(code)
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    said = []
    for _ in range(runs):
        with forked.Job([str(script)], folder, 200, environment) as job:
            said.append(job.stdout.read().splitlines()[-1])
    return said

"""Where things lie, from the root of the project."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
EXAMPLES = ROOT / "examples"
BENCHMARKS = ROOT / "benchmarks"
RESULTS = TESTS / "results"

"""What a law says of a function: nothing, that it is wrong, or that it cannot be tested."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zoo import TimeUp, within

LIMIT = 60  # seconds for one law


@dataclass(frozen=True)
class Outcome:
    """Of one law: "holds", "fails" or "refused", why, and how long it took."""

    word: str
    why: str = ""
    seconds: float = 0.0

    @property
    def first_line(self) -> str:
        return self.why.split("\n")[0]


def outcome(law: Callable[[], Any], limit: int = LIMIT) -> Outcome:
    """Run a law.

    An AssertionError says that the function is wrong; any other error that the law cannot test it.
    """
    began = time.perf_counter()
    word, why = "holds", ""
    try:
        with within(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            law()
    except AssertionError as error:
        word, why = "fails", str(error)
    except TimeUp as error:
        word, why = "refused", str(error)
    except Exception as error:
        word, why = "refused", f"{type(error).__name__}: {error}"
    return Outcome(word, why, time.perf_counter() - began)

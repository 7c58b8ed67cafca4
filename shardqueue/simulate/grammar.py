"""Numbers on the command line."""

from __future__ import annotations

import math
from fractions import Fraction

from shardqueue.errors import InvalidInputError

LEAST_SPEED, MOST_SPEED = 1e-6, 1e6
MOST_SECONDS = 1e9


def number(name: str, text: str, low: float, high: float, remedy: str) -> float:
    """Read a number from `low` to `high`, such as 0.25 or 1/4.

    Raises:
        InvalidInputError: it is none; the error is about `name`.
    """
    try:
        value = float(Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        value = math.inf
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidInputError(name, text, f"a number from {low:g} to {high:g}", remedy)
    return value


def whole(name: str, text: str, low: int, high: int) -> int:
    """Read a whole number from `low` to `high`.

    Raises:
        InvalidInputError: it is none; the error is about `name`.
    """
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise InvalidInputError(name, text, f"a whole number from {low} to {high}", f"pass {max(low, 1)}")
    return value

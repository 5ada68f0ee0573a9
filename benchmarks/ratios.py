"""Ratios of alternating measurements."""

import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How much more of something B does than A: the ratio of medians, and the range of the ratios round by round."""

    ratio: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, a: Sequence[float], b: Sequence[float]) -> "Ratio":
        """From the rounds of A and B, in the order in which they alternated.

        Raises:
            ValueError: Not the same number of rounds, or none.
        """
        if len(a) != len(b) or not a:
            raise ValueError(f"a ratio needs as many rounds of both, at least 1; got {len(a)} and {len(b)}")
        rounds = [y / x for x, y in zip(a, b, strict=True)]
        return cls(statistics.median(b) / statistics.median(a), min(rounds), max(rounds))

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ({self.lowest:.2f} to {self.highest:.2f})"


def in_units(x: float) -> str:
    """A rate in three digits: 1234567 is 1.23M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if x >= size:
            return f"{x / size:.3g}{unit}" if x < 1000 * size else f"{x / size:.0f}{unit}"
    return f"{x:.3g}"

"""Errors for names that do not exist, each with the names that its writer may have meant."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any


def nearest_names(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `name`, best first, whatever their case; all of them where none is alike but few exist.

    Args:
        name: What was asked for.
        known: The names that exist.
        count: At most this many, or twice as many where all are given.
    """
    by_lower: dict[str, str] = {}
    for candidate in known:
        by_lower.setdefault(candidate.lower(), candidate)
    wanted = name.lower()
    close = difflib.get_close_matches(wanted, by_lower, n=count, cutoff=0.5)
    # Long common parts hide behind a low ratio: "breakout" in "gymnax:breakout-minatar".
    containing = sorted((c for c in by_lower if wanted and wanted in c and c not in close), key=len)
    found = [by_lower[c] for c in [*containing[: count - 1], *close][:count]]
    return found or (sorted(by_lower.values()) if len(by_lower) <= 2 * count else [])


def unknown_name(what: str, name: str, known: Collection[str]) -> ValueError:
    """An error of one line that says what does not exist and what is near: `what` is "environment", for instance."""
    near = nearest_names(name, known)
    hint = f"nearest: {', '.join(near)}" if near else f"there are {len(known)}, for example {sorted(known)[0]}"
    return ValueError(f"there is no {what} {name!r}; {hint}")


def check_parameters(environment: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuses parameters that `environment` does not have.

    Raises:
        ValueError: Names the first unknown parameter and the valid ones nearest to it.
    """
    for name in given:
        if name not in known:
            if not known:
                raise ValueError(f"{environment} has no parameters; got {name!r}")
            raise unknown_name(f"parameter of {environment} named", name, known)

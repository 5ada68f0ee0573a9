"""What `conftest.py` has every call in some modules of the package checked by."""

from collections.abc import Callable
from typing import Any

from beartype import beartype


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Arguments and results against the signature, except those of constructors: JAX makes trees of anything."""
    return function if function.__name__ == "__init__" else beartype(function)

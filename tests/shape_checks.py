"""What `conftest.py` has every call in some modules of the package checked by."""

from collections.abc import Callable
from typing import Any

from beartype import beartype


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Arguments and results against the signature.

    Not of constructors: `jax.tree.map` fills the dataclasses that are pytrees with whatever it maps to.
    """
    return function if function.__name__ == "__init__" else beartype(function)

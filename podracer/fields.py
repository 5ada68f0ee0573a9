"""Nested configurations, as JSON has them, field by field."""

from collections.abc import Iterator
from typing import Any


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"agent": {"discount": 0.9}}` as `{"agent.discount": 0.9}`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = value and isinstance(value, dict)  # An empty one is a value.
        flat |= flatten(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return flat


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """What changed from one configuration to another, a phrase for each field."""
    old, new = flatten(before), flatten(after)
    for name in sorted(old.keys() | new.keys()):
        if name in old and name in new and old[name] == new[name]:
            continue
        was, now = (repr(values[name]) if name in values else "absent" for values in (old, new))
        yield f"{name} was {was} and is {now}"

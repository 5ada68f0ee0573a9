"""Nested configurations, as JSON has them, field by field."""

from collections.abc import Iterator
from typing import Any


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"agent": {"discount": 0.9}}` as `{"agent.discount": 0.9}`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """What changed from one configuration to another, a phrase for each field."""
    old, new = flatten(before), flatten(after)
    for name in sorted(old.keys() | new.keys()):
        was, now = (repr(values[name]) if name in values else "absent" for values in (old, new))
        if was != now:
            yield f"{name} was {was} and is {now}"

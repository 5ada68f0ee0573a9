"""What the fields of a configuration may be, with errors that name the field, its value and the rule."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Rule:
    """A condition on a value, and how an error says it."""

    says: str
    holds: Callable[[Any], bool]

    def or_none(self) -> "Rule":
        """The same rule, for a field that may be None."""
        return Rule(f"{self.says}, or None", lambda value: value is None or self.holds(value))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


COUNT = Rule("an integer of at least 1", lambda value: type(value) is int and value >= 1)
COUNT_FROM_0 = Rule("an integer of at least 0", lambda value: type(value) is int and value >= 0)
FRACTION = Rule("within [0, 1]", lambda value: _number(value) and 0 <= value <= 1)
POSITIVE = Rule("a positive number", lambda value: _number(value) and value > 0)
NOT_NEGATIVE = Rule("a finite number, 0 or more", lambda value: _number(value) and value >= 0)
SWITCH = Rule("True or False", lambda value: isinstance(value, bool))


def one_of(*values: str) -> Rule:
    """One of these names."""
    return Rule(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


def instance_of(kind: type) -> Rule:
    """A configuration of its own."""
    return Rule(f"a {kind.__name__}", lambda value: isinstance(value, kind))


def check_fields(config: Any, rules: Mapping[str, Rule]) -> None:
    """Every field of a dataclass against its rule.

    Raises:
        ValueError: A value breaks its rule.
        KeyError: A field has no rule.
    """
    for field in dataclasses.fields(config):
        value, rule = getattr(config, field.name), rules[field.name]
        if not rule.holds(value):
            raise ValueError(f"{field.name} is {value!r}; it must be {rule.says}")

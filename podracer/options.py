"""Options from the fields of a dataclass: tyro's parser, with errors of one line and whole numbers such as 1e7."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import tyro

from podracer.envs.names import unknown_name

Arguments = TypeVar("Arguments")

# Options that are used so often that they have a name without their group.
_SHORT = {
    "--num-envs": "--architecture.num-envs",
    "--rollout-length": "--architecture.rollout-length",
    "--serial": "--architecture.serial",
}

_INTEGERS = (int, int | None)  # The types of options that are whole numbers.

IMPORT_HELP = (
    "`--import MODULE`, with any command and as often as needed, first imports modules that register environments, "
    "agents or experiments."
)


class UsageError(ValueError):
    """A command line that cannot be understood."""


def parse(kind: type[Arguments], arguments: list[str], prog: str, default: Arguments | None = None) -> Arguments:
    """Tyro's parser, with its boxed errors as one line.

    Raises:
        ValueError: The arguments do not fit.
    """
    settings: dict[str, Any] = {} if default is None else {"default": default}
    normalized = _in_digits(options_in_full(arguments), default or kind)
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            parsed, unknown = tyro.cli(
                kind,
                args=normalized,
                prog=prog,
                description=IMPORT_HELP,
                config=(tyro.conf.AvoidSubcommands,),
                return_unknown_args=True,
                **settings,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(_one_line(captured.getvalue())) from None
    if unknown:
        option = next((token for token in unknown if token.startswith("-")), None)
        if option is None:
            raise UsageError(f"{prog.partition(' ')[2]} takes no argument {unknown[0]!r}")
        known = [name for name, _ in _options(default or kind)]
        raise unknown_name("option", option.partition("=")[0], [*known, *_SHORT, "--import"])
    return parsed


def options_in_full(arguments: list[str]) -> list[str]:
    """Options with hyphens and in full."""
    split = [argument.partition("=") for argument in arguments]
    names = [name.replace("_", "-") if name.startswith("--") else name for name, _, _ in split]
    return [_SHORT.get(name, name) + equals + value for name, (_, equals, value) in zip(names, split, strict=True)]


def option_value(arguments: list[str], name: str) -> str | None:
    """What follows an option, None where it is not given."""
    for i, argument in enumerate(arguments):
        if argument == name and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith(name + "="):
            return argument.partition("=")[2]
    return None


def without_option(arguments: list[str], name: str) -> list[str]:
    """The arguments without an option and its value."""
    kept, rest = [], iter(arguments)
    for argument in rest:
        if argument == name:
            next(rest, None)
        elif not argument.startswith(name + "="):
            kept.append(argument)
    return kept


def _options(fields_of: Any, prefix: str = "--") -> Iterator[tuple[str, Any]]:
    """The names and types of the options that the fields of a dataclass are."""
    for field in dataclasses.fields(fields_of):
        name = prefix + field.name.replace("_", "-")
        value = getattr(fields_of, field.name, None)
        if dataclasses.is_dataclass(value):  # The experiment's own have no prefix.
            yield from _options(value, prefix if field.name == "experiment" else f"{name}.")
        else:
            yield name, field.type


def _in_digits(arguments: list[str], fields_of: Any) -> list[str]:
    """Values of integer options as tyro reads them: 10000000 for 1e7.

    Raises:
        ValueError: One is not a whole number.
    """
    types = dict(_options(fields_of))
    result: list[str] = []
    option = ""  # That the argument is the value of.
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and types.get(name) in _INTEGERS:
            result.append(f"{name}={_whole_number(name, value, types[name])}")
        elif types.get(option) in _INTEGERS and not argument.startswith("--"):
            result.append(_whole_number(option, argument, types[option]))
        else:
            result.append(argument)
        option = argument
    return result


def _whole_number(option: str, text: str, kind: Any) -> str:
    if text == "None" and kind is not int:
        return text
    with contextlib.suppress(ValueError):
        return str(int(text))
    with contextlib.suppress(ValueError):
        if float(text).is_integer():  # Infinity and NaN are not.
            return str(int(float(text)))
    raise UsageError(f"{option} is {text}; it must be a whole number")


def _one_line(text: str) -> str:
    """What a box of tyro's says, between the title in its frame and the rule above its help."""
    said: list[str] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()[1:]:
        line = re.sub(r"^[\s\u2500-\u257f]+|[\s\u2500-\u257f]+$", "", line)
        if line.strip("-"):  # Where the terminal is of ASCII there is a rule below the title too.
            said += line.split()
        elif said:
            break
    return re.sub(r"^Error parsing (experiment(\.\w+)*: )?", "", " ".join(said))

"""Where measurements go: tables on the terminal, and one JSON file with every timing."""

import dataclasses
import datetime
import json
import pathlib
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import host_hash

SCHEMA = 1
# Tables need their width even where the output goes to a file.
_console = Console(width=None if sys.stdout.isatty() else 120)


@dataclasses.dataclass(frozen=True)
class Section:
    """One benchmark's results.

    Attributes:
        name: Its name on the command line.
        data: JSON values, raw timings included.
        tables: The same for people.
    """

    name: str
    data: dict[str, Any]
    tables: list[Table]


def show(what: str | Table) -> None:
    """A table, or a line on what is going on."""
    _console.print(what)


def yes_or_no(reached: bool) -> str:
    """What a table says of a target."""
    return "yes" if reached else "no"


def document(machine: dict[str, Any], sections: list[Section], quick: bool, started: datetime.datetime) -> dict:
    """What the JSON file holds."""
    return {
        "schema": SCHEMA,
        "started": started.isoformat(timespec="seconds"),
        "quick": quick,
        "machine": machine,
        "results": {section.name: section.data for section in sections},
    }


def write(contents: dict[str, Any], directory: pathlib.Path) -> pathlib.Path:
    """Writes a document under a name of its own, by its date and hardware."""
    directory.mkdir(parents=True, exist_ok=True)
    stamp = contents["started"].replace(":", "").split("+")[0]
    path = directory / f"{stamp}-{host_hash(contents['machine'])}.json"
    path.write_text(json.dumps(contents, indent=1) + "\n")
    return path

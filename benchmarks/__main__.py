"""`python -m benchmarks [NAME ...] [--quick] [--out DIR]`, or `make bench`."""

import argparse
import datetime
import importlib
import pathlib

from benchmarks import machine, report

# Each is a module with `measure(quick) -> Section`; imported when it runs, as each decides how JAX starts.
NAMES = ("speed", "overhead", "memory", "shuffle", "convolutions", "sebulba")


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmarks that are named, all by default, and writes what is done after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="a check that they run; the numbers mean little")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    here = machine.describe()
    report.show(machine.in_words(here))
    started = datetime.datetime.now(datetime.UTC)
    sections: list[report.Section] = []
    for name in options.names or NAMES:
        module = importlib.import_module(f"benchmarks.{name}")
        sections.append(module.measure(options.quick))
        # After each: an hour of measurements should survive the failure of the last of them.
        path = report.write(report.document(here, sections, options.quick, started), options.out)
    report.show(f"every timing is in {path}")


if __name__ == "__main__":
    main()

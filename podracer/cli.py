"""The command line: `podracer train ppo_cartpole --seed 1`.

Exit codes: 0 done, 2 bad input, 130 on Ctrl-C after a checkpoint was saved, 1 on anything else.
"""

import contextlib
import dataclasses
import importlib
import os
import pathlib
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import tyro

import podracer
from podracer.envs.names import unknown_name
from podracer.interrupts import exits_within
from podracer.options import IMPORT_HELP, UsageError, option_value, options_in_full, parse, without_option

# Seconds from Ctrl-C to the end of the process, without those in which a checkpoint is written. With what it takes to
# notice, less than 10.
_PATIENCE = 8.0
_MOMENT = 0.5  # Seconds that a device has to end what it does, when a program has failed.


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with exits_within(_PATIENCE):
            code = _dispatch(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe such as `podracer list envs | head` has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt as error:
        _print_error("interrupted")
        code = 130
        _end_if_a_device_hangs(code, error)
    except Exception as error:
        if os.environ.get("PODRACER_TRACEBACK"):
            traceback.print_exc()
        # What went wrong with ending the run after it, so that the last line is the error.
        for note in getattr(error, "__notes__", ()):
            if "\n" not in note:  # As the traceback of an environment's process has.
                _print_error(note)
        if isinstance(error, ValueError | FloatingPointError):
            _print_error(error)
        else:
            _print_error(f"{type(error).__name__}: {error} (PODRACER_TRACEBACK=1 shows where)")
        code = 2 if isinstance(error, ValueError) else 1
        if code == 1:  # Bad input is refused before there is a device.
            _end_if_a_device_hangs(code, error)
    sys.exit(code)


def _dispatch(arguments: list[str]) -> int:
    arguments = _import_modules(arguments)
    if arguments and arguments[0] in ("--version", "-V"):
        print(f"podracer {podracer.__version__}")
        return 0
    if not arguments or arguments[0] in ("--help", "-h"):
        print(_help())
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    if command not in _COMMANDS:
        raise unknown_name("command", command, list(_COMMANDS))
    return _COMMANDS[command](rest)


def _import_modules(arguments: list[str]) -> list[str]:
    """Imports what `--import` names, so that what it registers is known; returns the other arguments.

    Raises:
        ValueError: A module does not exist, or does not import.
    """
    others, rest = [], iter(arguments)
    for argument in rest:
        option, equals, module = argument.partition("=")
        if option != "--import":
            others.append(argument)
            continue
        module = module if equals else next(rest, "")
        if not module or module.startswith("-"):
            raise UsageError("--import needs the name of a module")
        if sys.path[:1] != [os.getcwd()]:
            sys.path.insert(0, os.getcwd())  # As `python -m` does.
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise UsageError(f"cannot import {module}: {type(error).__name__}: {error}") from error
    return others


def _train(arguments: list[str]) -> int:
    """train EXPERIMENT: train, evaluate, and leave everything in a run directory."""
    from podracer.experiment import Experiment

    @dataclasses.dataclass(frozen=True)
    class Train:
        # Every field of the experiment is an option without a prefix.
        experiment: Annotated[Experiment, tyro.conf.arg(name="")]
        run_dir: pathlib.Path | None = None
        """Where to leave the run's files; a new directory under runs/ by default."""
        resume: bool = False
        """Go on with the run in the run directory, from its newest checkpoint."""
        overwrite: bool = False
        """Remove an earlier run in the run directory."""
        quiet: bool = False
        """Show nothing but warnings and the final line."""
        wandb_project: str | None = None
        """Log to this project of Weights & Biases as well."""

    parsed = _parse_with_experiment(Train, "train", arguments)
    return 0 if parsed is None else _run(parsed.experiment, parsed)


def _parse_with_experiment(kind: Any, command: str, arguments: list[str]) -> Any:
    """Arguments that begin with the name of an experiment and may change any field of it; None after help."""
    from podracer import experiments
    from podracer.run_directory import RunDirectory

    arguments = options_in_full(arguments)
    named = bool(arguments) and not arguments[0].startswith("-")
    name, options = (arguments[0], arguments[1:]) if named else (None, arguments)
    if "--resume" in options:
        # What is resumed is the run as it was configured, with the same options to change it as a new one.
        run_dir = option_value(options, "--run-dir")
        if run_dir is None:
            raise UsageError("--resume needs --run-dir, the run to go on with")
        default = RunDirectory.existing(run_dir).experiment()
        if name is not None and name != default.name:
            raise ValueError(f"{run_dir} is a run of {default.name}, not of {name}")
    elif name is not None:
        default = experiments.get(name)
    elif options and options[0] in ("--help", "-h"):
        print(f"usage: podracer {command} EXPERIMENT [options]\n\nexperiments: {', '.join(experiments.names())}")
        print(f"\n`podracer {command} EXPERIMENT --help` lists the options.")
        return None
    else:
        raise UsageError(f"{command} begins with the name of an experiment: {', '.join(experiments.names())}")
    if (architecture := option_value(options, "--architecture")) is not None:
        default, options = _with_architecture(default, architecture), without_option(options, "--architecture")
    # Tyro would make an option of each of the default's parameters, and take no others.
    without_parameters = dataclasses.replace(default, env_parameters={})
    parsed = parse(kind, options, f"podracer {command} {default.name}", kind(without_parameters))
    experiment = parsed.experiment
    if experiment.env == default.env and option_value(options, "--env-parameters") is None:
        experiment = dataclasses.replace(experiment, env_parameters=default.env_parameters)
    return dataclasses.replace(parsed, experiment=experiment)


def _with_architecture(experiment: Any, name: str) -> Any:
    """The experiment under another architecture, with as many environments and steps."""
    from podracer.experiment import architecture_class

    kind, now = architecture_class(name), experiment.architecture
    if isinstance(now, kind):
        return experiment
    changed = kind(num_envs=now.num_envs, rollout_length=now.rollout_length)
    return dataclasses.replace(experiment, architecture=changed)


def _resume(arguments: list[str]) -> int:
    """resume RUN: go on with a run that was stopped."""
    from podracer.run_directory import RunDirectory

    @dataclasses.dataclass(frozen=True)
    class Resume:
        run_dir: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
        devices: int | None = None
        """How many devices to use."""
        quiet: bool = False
        """Show nothing but warnings and the final line."""
        wandb_project: str | None = None
        """Log to this project of Weights & Biases as well."""
        resume: Annotated[bool, tyro.conf.Suppress] = True
        overwrite: Annotated[bool, tyro.conf.Suppress] = False

    parsed = parse(Resume, arguments, "podracer resume")
    experiment = RunDirectory.existing(parsed.run_dir).experiment()
    if parsed.devices is not None:
        experiment = dataclasses.replace(experiment, devices=parsed.devices)
    return _run(experiment, parsed)


def _run(experiment: Any, options: Any) -> int:
    from podracer.training import train

    result = train(
        experiment,
        options.run_dir,
        resume=options.resume,
        overwrite=options.overwrite,
        quiet=options.quiet,
        wandb_project=options.wandb_project,
    )
    print(result.run_dir)
    for error in result.errors:
        _print_error(f"not everything could be written: {error}")
    return 1 if result.errors else 0


def _evaluate(arguments: list[str]) -> int:
    """evaluate RUN: play episodes with a run's newest checkpoint, or another."""
    from podracer.evaluate import evaluate
    from podracer.loading import load_policy
    from podracer.progress import Progress
    from podracer.run_directory import RunDirectory, json_text

    @dataclasses.dataclass(frozen=True)
    class Evaluate:
        run_dir: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
        episodes: int = 128
        """How many, each in an environment of its own."""
        checkpoint: str = "newest"
        """newest, best (by the return in training), or the update that it was saved after."""
        greedy: bool | None = None
        """Whether it acts greedily, and not as it explores; by default as the experiment says."""
        json: bool = False
        """Print one JSON object, and nothing of how it is getting on."""

    parsed = parse(Evaluate, arguments, "podracer evaluate")
    checkpoint = _checkpoint(parsed.checkpoint)
    RunDirectory.existing(parsed.run_dir)
    _check_positive("--episodes", parsed.episodes)
    progress = Progress(0, quiet=parsed.json)
    with progress.phase(f"loading {parsed.run_dir}", "loaded"):
        loaded = load_policy(parsed.run_dir, checkpoint, report=_print_error)
    with progress.phase(f"compiling, and playing {parsed.episodes} episodes", "played"):
        greedy = loaded.experiment.evaluation_greedy if parsed.greedy is None else parsed.greedy
        result = evaluate(loaded.agent, loaded.environment, loaded.params, loaded.key(), parsed.episodes, greedy=greedy)
    if result.unfinished:
        _print_error(f"{result.unfinished} episodes did not end and are left out")
    if parsed.json:
        print(json_text({"experiment": loaded.experiment.name, "updates": loaded.updates, **result.summary()}))
    else:
        print(f"{loaded.experiment.name} after {loaded.updates} updates: {result}")
    return 0 if len(result.returns) else 1


def _record(arguments: list[str]) -> int:
    """record RUN: an episode of a run's newest checkpoint, or another, as a GIF."""
    from podracer.evaluate import record
    from podracer.loading import load_policy
    from podracer.progress import Progress
    from podracer.recording import save_gif
    from podracer.run_directory import RunDirectory

    @dataclasses.dataclass(frozen=True)
    class Record:
        run_dir: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
        out: pathlib.Path | None = None
        """The file; episode.gif in the run directory by default."""
        checkpoint: str = "newest"
        """newest, best (by the return in training), or the update that it was saved after."""
        max_steps: int = 1000
        """Where to cut a long episode."""
        greedy: bool | None = None
        """Whether it acts greedily, and not as it explores; by default as the experiment says."""

    parsed = parse(Record, arguments, "podracer record")
    checkpoint = _checkpoint(parsed.checkpoint)
    out = parsed.out or RunDirectory.existing(parsed.run_dir).episode
    _check_out(out)
    _check_positive("--max-steps", parsed.max_steps)
    progress = Progress(0)
    with progress.phase(f"loading {parsed.run_dir}", "loaded"):
        loaded = load_policy(parsed.run_dir, checkpoint, report=_print_error)
    with progress.phase("compiling, and playing an episode", "played"):
        key = loaded.key(recording=True)
        greedy = loaded.experiment.evaluation_greedy if parsed.greedy is None else parsed.greedy
        frames, episode_return = record(
            loaded.agent, loaded.environment, loaded.params, key, max_steps=parsed.max_steps, greedy=greedy
        )
    path = save_gif(frames, out)
    print(f"{path}: return {episode_return:.4g}")
    return 0


def _checkpoint(text: str) -> Any:
    if text.isdecimal():
        return int(text)
    if text not in ("newest", "best"):
        raise UsageError(f"--checkpoint is {text}; it must be newest, best or the number of an update")
    return text


def _plot(arguments: list[str]) -> int:
    """plot RUN [RUN ...]: learning curves; seeds of the same settings give mean and spread."""
    from podracer.plotting import plot_curves

    @dataclasses.dataclass(frozen=True)
    class Plot:
        run_dirs: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
        out: pathlib.Path = pathlib.Path("curve.png")
        """The file."""

    parsed = parse(Plot, arguments, "podracer plot")
    if not parsed.run_dirs:
        raise UsageError("plot needs at least one run directory")
    _check_out(parsed.out)
    print(plot_curves(list(parsed.run_dirs), parsed.out))
    return 0


def _list(arguments: list[str]) -> int:
    """list {experiments,agents,envs}: what there is by name."""
    kinds = ("experiments", "agents", "envs")
    if len(arguments) != 1:
        raise UsageError(f"list takes one of {', '.join(kinds)}")
    match arguments[0]:
        case "experiments":
            from podracer import experiments

            rows = [(name, experiments.get(name).env) for name in experiments.names()]
        case "agents":
            from podracer.agents import registry

            rows = [(name, registry.config_class(name).__module__) for name in registry.registered_agents()]
        case "envs":
            from podracer import envs

            rows = [
                (entry.id, f"{entry.package} {entry.version or f'not installed: pip install {entry.package}'}")
                for entry in envs.list_environments()
            ]
        case kind:
            raise unknown_name("list of", kind, kinds)
    width = max(len(name) for name, _ in rows)
    for name, what in rows:
        print(f"{name:<{width}}  {what}")
    return 0


def _bench(arguments: list[str]) -> int:
    """bench sebulba EXPERIMENT: try numbers of threads and environments, and print the fastest."""
    from podracer.experiment import Experiment
    from podracer.sebulba.tuning import trials

    @dataclasses.dataclass(frozen=True)
    class Bench:
        # Every field of the experiment is an option without a prefix.
        experiment: Annotated[Experiment, tyro.conf.arg(name="")]
        seconds: float = 60.0
        """For all of them, without compiling."""

    if arguments[:1] != ["sebulba"]:
        raise UsageError("bench takes the name of an architecture, which is sebulba, and then of an experiment")
    if option_value(arguments, "--architecture") is None:
        arguments = [*arguments, "--architecture", "sebulba"]
    parsed = _parse_with_experiment(Bench, "bench sebulba", arguments[1:])
    if parsed is None:
        return 0
    if not parsed.seconds > 0:
        raise UsageError(f"--seconds is {parsed.seconds}; it must be above 0")
    print(f"{'threads':>7}{'envs':>7}{'rollout':>9}{'steps/s':>11}{'frames/s':>11}  slower")
    best: Any = None
    try:
        for trial in trials(parsed.experiment, parsed.seconds):
            config = trial.config
            figures = [trial.steps_per_second, trial.frames_per_second]
            shown = "".join(f"{'-' if figure is None else format(figure, ',.0f'):>11}" for figure in figures)
            threads = config.threads_per_actor_device
            print(f"{threads:>7}{config.num_envs:>7}{config.rollout_length:>9}{shown}  {trial.bottleneck}", flush=True)
            if trial.steps_per_second is not None and (best is None or trial.steps_per_second > best.steps_per_second):
                best = trial
    finally:  # After Ctrl-C, of those that were tried.
        if best is not None:
            print(
                f"fastest: --num-envs {best.config.num_envs} --rollout-length {best.config.rollout_length} "
                f"--architecture.threads-per-actor-device {best.config.threads_per_actor_device}"
            )
    if best is None:
        raise RuntimeError("none of them can run")
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "resume": _resume,
    "evaluate": _evaluate,
    "record": _record,
    "plot": _plot,
    "bench": _bench,
    "list": _list,
}


def _help() -> str:
    lines = ["usage: podracer COMMAND ...", "", "Reinforcement learning at scale in JAX.", ""]
    for command in _COMMANDS.values():
        usage, _, what = (command.__doc__ or "").partition(": ")
        lines.append(f"  {usage:<34}{what}")
    lines += ["", IMPORT_HELP, "`podracer COMMAND --help` lists a command's options; `--version` the version."]
    return "\n".join(lines)


def _check_positive(option: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{option} is {value}; it must be at least 1")


def _check_out(path: pathlib.Path) -> None:
    """Whether a file can go there, before there is anything to write."""
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no directory {path.parent}")
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a directory")


def _end_if_a_device_hangs(code: int, error: BaseException) -> None:
    """Ends the process at once if what a device does for the program that failed is not done in a moment.

    The interpreter would wait for it, however long it takes.

    Args:
        code: To exit with.
        error: What ended the program; its traceback still has the arrays that are waited for.
    """
    if (jax := sys.modules.get("jax")) is None:
        return

    def wait() -> None:
        with contextlib.suppress(Exception):  # Of what cannot be computed any more.
            jax.block_until_ready(jax.live_arrays())

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    waiter.join(_MOMENT)
    if waiter.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _print_error(error: object) -> None:
    print(f"podracer: {' '.join(str(error).split())}", file=sys.stderr)

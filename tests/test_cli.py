import ast
import errno
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import pytest
import tiny_runs
from tiny_runs import TinyConfig, metrics_of

import podracer
from podracer import cli, envs, loading, training
from podracer.anakin import Anakin
from podracer.envs.packages import EnvironmentUnavailableError
from podracer.experiment import Experiment
from podracer.options import _one_line
from podracer.run_directory import RunDirectory
from podracer.sebulba import SebulbaConfig


@pytest.fixture(scope="module", autouse=True)
def compiled_programs(tmp_path_factory):
    with tiny_runs.compiled_programs(tmp_path_factory.getbasetemp() / "compiled") as variables:
        yield variables


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return tiny_runs.experiment().run(tmp_path_factory.mktemp("cli") / "run", quiet=True)


@pytest.fixture
def podracer_exits(capsys):
    """Runs a command; gives its exit code, standard output and the lines of standard error."""

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return stop.value.code, output.out, output.err.splitlines()

    return run


@pytest.fixture
def refused(podracer_exits, monkeypatch, tmp_path):
    """Runs a command that has to fail as bad input: code 2, one line, nothing compiled and nothing written."""
    monkeypatch.setattr(Anakin, "compile", lambda anakin: pytest.fail("compiled"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code, out, error = podracer_exits(*arguments)
        assert (code, out, len(error)) == (2, "", 1), (code, out, error)
        assert list(tmp_path.iterdir()) == []
        assert error[0].startswith("podracer: ")
        return error[0].removeprefix("podracer: ")

    return run


@pytest.fixture
def trained(monkeypatch):
    """Catches what would be trained."""
    calls = []

    def train(experiment, run_dir, **options):
        calls.append((experiment, run_dir, options))
        return training.Result(run_dir, {}, None, None)

    monkeypatch.setattr(training, "train", train)
    return calls


BAD_INPUT = {
    # Names, with the nearest.
    "trian": "there is no command 'trian'; nearest: train",
    "train ppo_cartpol": "there is no experiment 'ppo_cartpol'; nearest: ppo_cartpole, ",
    "train sac_cartpole": "there is no experiment 'sac_cartpole'; nearest: ppo_cartpole",
    "train tiny_catch --agent.sise 1": "there is no option '--agent.sise'; nearest: --agent.sizes",
    "train tiny_catch --total-step=5": "there is no option '--total-step'; nearest: --total-steps",
    "train tiny_catch --num-env 8": "there is no option '--num-env'; nearest: --num-envs",
    "train tiny_catch --env podracer:Cach": "there is no environment 'podracer:Cach'; nearest: podracer:Catch",
    "train tiny_catch --env gymnax:Breakout": "there is no environment 'gymnax:Breakout'; nearest: gymnax:Breakout-",
    "train tiny_catch --env-parameters row 3": "there is no parameter of podracer:Catch named 'row'; nearest: rows",
    "list environments": "there is no list of 'environments'; nearest: experiments, envs",
    # What does not divide, with both numbers and the nearest that do.
    "train tiny_catch --devices 3": "num_envs is 8, which is not a multiple of the 3 devices; nearest valid: 6 or 9",
    "train tiny_catch --num-envs 6 --devices 4": "num_envs is 6, which is not a multiple of the 4 devices; nearest",
    "train ppo_cartpole --agent.num-minibatches 3": "num_minibatches is 3, which does not divide 128 steps x 4 "
    "environments = 512 on each device; nearest valid: 2 or 4",
    "train tiny_catch --devices 9": "devices is 9; this machine has 8",
    # Numbers out of range, and what is not a number.
    "train tiny_catch --total-steps 31": "total_steps is 31, less than one update of 8 environments x 4 steps = 32",
    "train tiny_catch --total-steps -1": "total_steps is -1, less than one update",
    "train tiny_catch --total-steps nan": "--total-steps is nan; it must be a whole number",
    "train tiny_catch --total-steps inf": "--total-steps is inf; it must be a whole number",
    "train tiny_catch --total-steps 1e-3": "--total-steps is 1e-3; it must be a whole number",
    "train tiny_catch --total-steps=2.5": "--total-steps is 2.5; it must be a whole number",
    "train tiny_catch --total-steps None": "--total-steps is None; it must be a whole number",
    "train tiny_catch --devices two": "--devices is two; it must be a whole number",
    "train tiny_catch --checkpoints.interval 0.5": "--checkpoints.interval is 0.5; it must be a whole number",
    "evaluate nowhere --episodes 1.5": "--episodes is 1.5; it must be a whole number",
    "evaluate nowhere --checkpoint latest": "--checkpoint is latest; it must be newest, best or the number",
    "train tiny_catch --num-envs 0": "num_envs is 0; it must be an integer of at least 1",
    "train tiny_catch --rollout-length -4": "rollout_length is -4; it must be an integer of at least 1",
    "train tiny_catch --seed -1": "seed is -1; it must be within [0, 2^32)",
    "train tiny_catch --devices 0": "devices is 0; it must be at least 1",
    "train tiny_catch --agent.learning-rate -0.1": "learning_rate is -0.1; it must be a finite number, 0 or more",
    "train ppo_cartpole --agent.learning-rate nan": "learning_rate is nan; it must be a finite number, 0 or more",
    "train ppo_cartpole --agent.discount 1.5": "discount is 1.5; it must be within [0, 1]",
    "train ppo_cartpole --agent.network.torso rnn": "invalid choice 'rnn' for argument '--agent.network.torso'. "
    "Expected one of ('mlp', 'cnn', 'nature', 'impala', 'impala_deep').",
    "train tiny_catch --checkpoints.keep-last 0": "keep_last is 0 and keep_best 1; at least 1 and 0 are needed",
    "train tiny_catch --env-parameters rows 1": "Catch needs rows >= 2",
    # What is missing or too much.
    "train": "train begins with the name of an experiment: impala_breakout_minatar, impala_pong, ",
    "train --seed 1": "train begins with the name of an experiment: impala_breakout_minatar, impala_pong, ",
    "train tiny_catch --seed": "Missing value for argument '--seed'.",
    "train tiny_catch --seed --quiet": "Missing value for argument '--seed'.",
    "train tiny_catch more": "train tiny_catch takes no argument 'more'",
    "train --resume": "--resume needs --run-dir, the run to go on with",
    "train --resume --run-dir nowhere": "nowhere is not a run directory: it has no config.json",
    "resume": "Missing from podracer resume: RUN",
    "resume nowhere": "nowhere is not a run directory: it has no config.json",
    "evaluate nowhere": "nowhere is not a run directory: it has no config.json",
    "record nowhere": "nowhere is not a run directory: it has no config.json",
    "plot": "plot needs at least one run directory",
    "plot nowhere": "nowhere is not a run: it has no metrics.jsonl",
    # Where nothing can be written, whatever there is to write.
    "plot nowhere --out missing/x.png": "cannot write missing/x.png: there is no directory missing",
    "plot nowhere --out .": "cannot write .: it is a directory",
    "record nowhere --out missing/x.gif": "cannot write missing/x.gif: there is no directory missing",
    # Modules of the user.
    "train tiny_catch --import": "--import needs the name of a module",
    "list envs --import no_such_module": "cannot import no_such_module: ModuleNotFoundError: No module named 'no_such",
    "trian --import=jaxtyping": "there is no command 'trian'; nearest: train",
    "list": "list takes one of experiments, agents, envs",
}


@pytest.mark.parametrize("command", BAD_INPUT)
def test_bad_input(command, refused):
    assert refused(*command.split()).startswith(BAD_INPUT[command])


def test_an_observation_that_the_network_cannot_take_is_named(refused):
    message = refused("train", "ppo_cartpole", "--agent.network.torso", "cnn")
    assert "(4,)" in message or "[4]" in message


def test_an_environment_without_its_package_names_the_command(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    message = refused("train", "ppo_cartpole")
    assert "gymnax" in message


def test_an_environment_whose_package_is_missing(refused):
    def make(name, **parameters):
        raise EnvironmentUnavailableError("the package jumbo is not installed; install it with `pip install jumbo`")

    envs.registry._suites["jumbo"] = envs.registry._Suite(make, lambda: ("Snake",), "jumbo")
    try:
        message = refused("train", "tiny_catch", "--env", "jumbo:Snake")
    finally:
        del envs.registry._suites["jumbo"]
    assert message == "the package jumbo is not installed; install it with `pip install jumbo`"


@pytest.mark.parametrize(
    "box",
    [
        """
╭─ Value error ────────────────────────────────╮
│ Error parsing experiment.agent: value is -1; │
│ it must be at least 0-1                      │
│ ──────────────────────────────────────────── │
│ For full helptext, see podracer train --help │
╰──────────────────────────────────────────────╯
""",
        """
  Value error
 --------------------------------------------
  Error parsing experiment.agent: value is -1;
  it must be at least 0-1
 --------------------------------------------
  For full helptext, see podracer train --help
""",
    ],
    ids=["unicode", "ascii"],
)
def test_a_box_becomes_a_line_on_any_terminal(box):
    assert _one_line(box.lstrip("\n")) == "value is -1; it must be at least 0-1"


def test_parameters_of_an_environment(podracer_exits, trained):
    """Those of the experiment are kept, replaced as a whole, or left with the environment that they are of."""
    for options, parameters in {
        "": {"rows": 3, "columns": 3},
        "--seed 1": {"rows": 3, "columns": 3},
        "--env podracer:Catch": {"rows": 3, "columns": 3},
        "--env-parameters rows 7": {"rows": 7},
        "--env podracer:Countdown": {},
        "--env podracer:Countdown --env_parameters length 5 ends both": {"length": 5, "ends": "both"},
    }.items():
        assert podracer_exits("train", "tiny_catch", *options.split())[0] == 0
        assert trained.pop()[0].env_parameters == parameters


def test_an_existing_run_is_not_overwritten_unless_asked_for(finished, podracer_exits, trained, monkeypatch, tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create(tiny_runs.experiment(), overwrite=False)
    directory.metrics.write_text("old")
    monkeypatch.undo()
    monkeypatch.setattr(Anakin, "compile", lambda anakin: pytest.fail("compiled"))
    code, _, error = podracer_exits("train", "tiny_catch", "--run-dir", directory.path)
    assert (code, error) == (
        2,
        [f"podracer: {directory.path} is not empty; choose another run directory, or --resume or --overwrite"],
    )
    assert directory.metrics.read_text() == "old"


def test_overwriting(podracer_exits, tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create(tiny_runs.experiment(), overwrite=False)
    directory.metrics.write_text("old")
    code, out, error = podracer_exits("train", "tiny_catch", "--run-dir", directory.path, "--overwrite", "--quiet")
    assert (code, out, error) == (0, f"{directory.path}\n", [])
    assert len(metrics_of(directory.path)) == 12


def test_every_field_is_an_option(podracer_exits, trained, tmp_path):
    options = """--seed 3 --total-steps 6400 --num-envs 16 --rollout_length 8 --devices 4 --env podracer:Countdown
        --env-parameters length 5 ends truncation --agent.learning-rate 0.25 --agent.no-bias --agent.sizes 7 8 9
        --checkpoints.keep-best 0 --updates-per-window 2 --evaluation-episodes 5 --no-stop-on-nonfinite --name other
        --wandb-project mine --overwrite --quiet"""
    code, out, _ = podracer_exits("train", "tiny_catch", *options.split(), f"--run-dir={tmp_path}")
    assert (code, out) == (0, f"{tmp_path}\n")
    ((experiment, run_dir, more),) = trained
    assert experiment == Experiment(
        name="other",
        env="podracer:Countdown",
        env_parameters={"length": 5, "ends": "truncation"},
        agent=TinyConfig(learning_rate=0.25, bias=False, sizes=(7, 8, 9)),
        architecture=podracer.AnakinConfig(num_envs=16, rollout_length=8),
        seed=3,
        total_steps=6400,
        devices=4,
        updates_per_window=2,
        evaluation_episodes=5,
        stop_on_nonfinite=False,
        checkpoints=podracer.CheckpointConfig(interval=2, keep_last=2, keep_best=0),
    )
    assert run_dir == tmp_path
    assert more == {"resume": False, "overwrite": True, "quiet": True, "wandb_project": "mine"}


def test_every_field_of_sebulba_is_an_option(podracer_exits, trained):
    options = """--architecture sebulba --num-envs 16 --rollout-length 8 --serial --architecture.actor-devices 0
        --architecture.learner-devices 2 5 --architecture.threads-per-actor-device 1 --architecture.max-lag 0
        --architecture.refresh step --architecture.batch-splits 4 --architecture.start-timeout 9.5
        --architecture.step-timeout 3 --architecture.max-restarts 2"""
    assert podracer_exits("train", "tiny_catch", *options.split())[0] == 0
    assert trained.pop()[0].architecture == SebulbaConfig(
        num_envs=16,
        rollout_length=8,
        serial=True,
        actor_devices=(0,),
        learner_devices=(2, 5),
        threads_per_actor_device=1,
        max_lag=0,
        refresh="step",
        batch_splits=4,
        start_timeout=9.5,
        step_timeout=3.0,
        max_restarts=2,
    )


def test_without_options_an_experiment_is_as_it_is_registered(podracer_exits, trained):
    for name in podracer.experiments.names():
        assert podracer_exits("train", name)[0] == 0
        assert trained.pop()[0] == podracer.experiments.get(name)


@pytest.mark.parametrize(
    ("text", "steps"), [("1e7", 10_000_000), ("10_000_000", 10_000_000), ("1.5e3", 1500), ("640", 640), ("2E2", 200)]
)
def test_whole_numbers_in_any_notation(text, steps, podracer_exits, trained):
    equals = f"--checkpoints.interval={text}"
    assert podracer_exits("train", "tiny_catch", "--total-steps", text, equals, "--updates-per-window", "1")[0] == 0
    ((experiment, _, _),) = trained
    assert (experiment.total_steps, experiment.checkpoints.interval) == (steps, steps)
    assert type(experiment.total_steps) is int


def test_only_whole_numbers_change_notation(podracer_exits, trained):
    command = "--agent.learning-rate 1e-1 --name 1e3 --devices None --env-parameters rows 3 columns 1e1"
    assert podracer_exits("train", "tiny_catch", *command.split())[0] == 0
    ((experiment, _, _),) = trained
    assert (experiment.agent.learning_rate, experiment.name, experiment.devices) == (0.1, "1e3", None)
    assert repr(experiment.env_parameters) == "{'rows': 3, 'columns': 10.0}"


USERS_MODULE = """
import dataclasses
import podracer

podracer.envs.register("mine:Grid", podracer.envs.catch.Catch)
small = podracer.experiments.get("ppo_cartpole", env="podracer:Catch")
podracer.experiments.register(dataclasses.replace(small, name="my_experiment"))
"""


def test_a_module_of_the_user_is_known_to_every_command(tmp_path):
    """In the directory where the command is given, as for `python -m`."""
    (tmp_path / "my_module.py").write_text(USERS_MODULE)
    (tmp_path / "another.py").write_text("print('imported')")
    for arguments, expected in {
        "--import=my_module list envs --import another": "mine:Grid",
        "train --import my_module my_experiment --env mine:Grid --help": "--total-steps",
    }.items():
        command = [sys.executable, "-c", "import sys; del sys.path[0]; from podracer import cli; cli.main()"]
        result = subprocess.run(
            [*command, *arguments.split()], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert expected in result.stdout
        assert ("imported\n" in result.stdout) == ("another" in arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise RuntimeError('it went\\nwrong')", "RuntimeError: it went wrong"),
        ("raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_a_module_that_does_not_import_is_bad_input(content, message, podracer_exits, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_module.py").write_text(content)
    code, out, error = podracer_exits("list", "envs", "--import", "broken_module")
    assert (code, out, error) == (2, "", [f"podracer: cannot import broken_module: {message}"])


@pytest.mark.parametrize(
    "command", ["resume RUN", "train --run-dir RUN --resume", "train tiny_catch --resume --run_dir=RUN"]
)
def test_three_ways_to_resume(command, podracer_exits, trained, tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create(tiny_runs.experiment(seed=9, total_steps=640), overwrite=False)
    arguments = command.replace("RUN", str(directory.path)).split()
    assert podracer_exits(*arguments, "--devices", "1", "--quiet")[0] == 0
    ((experiment, run_dir, more),) = trained
    assert experiment == tiny_runs.experiment(seed=9, total_steps=640, devices=1)
    assert run_dir == directory.path
    assert more == {"resume": True, "overwrite": False, "quiet": True, "wandb_project": None}


def test_resuming_with_another_configuration_is_refused(finished, podracer_exits, monkeypatch):
    monkeypatch.setattr(Anakin, "compile", lambda anakin: pytest.fail("compiled"))
    again = ["train", "tiny_catch", "--resume", "--run-dir", finished.run_dir]
    for option, message in {
        "--agent.learning-rate 0.1": "agent.learning_rate was 0.5 and is 0.1",
        "--total-steps 1000": "total_steps was 384 and is 1000",
        "--num-envs 16": "architecture.num_envs was 8 and is 16",
    }.items():
        code, _, error = podracer_exits(*again, *option.split())
        assert (code, error) == (2, [f"podracer: {finished.run_dir} is a run of another experiment: {message}"])
    code, _, error = podracer_exits("train", "ppo_cartpole", *again[2:])
    assert (code, error) == (2, [f"podracer: {finished.run_dir} is a run of tiny_catch, not of ppo_cartpole"])


def test_evaluate(finished, podracer_exits):
    code, out, error = podracer_exits("evaluate", finished.run_dir, "--episodes", "4", "--json")
    assert (code, error) == (0, [])
    expected = {"experiment": "tiny_catch", "updates": 12, **finished.summary["evaluation"]}
    assert json.loads(out) == expected
    # As text, with what takes its time announced.
    code, out, error = podracer_exits("evaluate", finished.run_dir, "--episodes", "4")
    assert (code, untimed(error)) == (
        0, [f"loading {finished.run_dir} ...", "loaded", "compiling, and playing 4 episodes ...", "played"]
    )  # fmt: skip
    assert out.startswith(f"tiny_catch after 12 updates: return {expected['mean']:.4g} +- ")


def untimed(lines):
    return [re.sub(r" in [\d.]+ s$", "", line) for line in lines]


@pytest.mark.parametrize(
    ("command", "message"),
    {
        "evaluate RUN --episodes 0": "--episodes is 0; it must be at least 1",
        "record RUN --max-steps 0": "--max-steps is 0; it must be at least 1",
        "record RUN --out missing/x.gif": "cannot write missing/x.gif: there is no directory missing",
        "plot RUN --out missing/x.png": "cannot write missing/x.png: there is no directory missing",
    }.items(),
)
def test_bad_input_is_refused_before_a_run_is_loaded(command, message, finished, refused, monkeypatch):
    monkeypatch.setattr(loading, "load_policy", lambda *a, **k: pytest.fail("loaded"))
    monkeypatch.setattr("podracer.plotting.read_curve", lambda run: pytest.fail("read"))
    assert refused(*command.replace("RUN", str(finished.run_dir)).split()) == message


def test_record(finished, podracer_exits, tmp_path):
    recorded = (finished.run_dir / "episode.gif").read_bytes()
    code, out, error = podracer_exits("record", finished.run_dir, "--out", tmp_path / "again.gif")
    assert (code, untimed(error)) == (
        0, [f"loading {finished.run_dir} ...", "loaded", "compiling, and playing an episode ...", "played"]
    )  # fmt: skip
    assert out in (f"{tmp_path / 'again.gif'}: return {value}\n" for value in (-1, 1))
    # The same episode as the run recorded at its end.
    assert (tmp_path / "again.gif").read_bytes() == recorded


def test_plot(finished, podracer_exits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert podracer_exits("plot", finished.run_dir) == (0, "curve.png\n", [])
    code, out, _ = podracer_exits("plot", finished.run_dir, finished.run_dir, "--out", "two.png")
    assert (code, out) == (0, "two.png\n")
    for name in ("curve.png", "two.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_lists(podracer_exits):
    code, out, _ = podracer_exits("list", "experiments")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(podracer.experiments.names())
    code, out, _ = podracer_exits("list", "agents")
    assert code == 0
    assert {"ppo", "random", "tiny"} <= {line.split()[0] for line in out.splitlines()}
    code, out, _ = podracer_exits("list", "envs")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0
    assert rows["gymnax:Breakout-MinAtar"].startswith("gymnax 1.")
    assert "podracer:Catch" in rows


def test_a_list_says_what_is_not_installed(podracer_exits, monkeypatch):
    entry = envs.EnvironmentEntry("jumbo:Snake", "jumbo", None)
    monkeypatch.setattr(envs, "list_environments", lambda: (entry,))
    code, out, _ = podracer_exits("list", "envs")
    assert (code, out) == (0, "jumbo:Snake  jumbo not installed: pip install jumbo\n")


def test_help_and_version(podracer_exits):
    assert podracer_exits("--version") == (0, f"podracer {podracer.__version__}\n", [])
    code, out, error = podracer_exits("--help")
    assert (code, error) == (0, [])
    for command in cli._COMMANDS:
        assert f"\n  {command} " in out
    code, out, _ = podracer_exits("train", "--help")
    assert code == 0
    assert "ppo_breakout_minatar" in out
    code, out, error = podracer_exits("train", "tiny_catch", "--help")
    assert (code, error) == (0, [])
    for option in ("--seed", "--total-steps", "--run-dir", "--devices", "--agent.learning-rate", "--quiet"):
        assert option in out
    for command in ("resume", "evaluate", "record", "plot"):
        assert podracer_exits(command, "--help")[0] == 0
    code, out, _ = podracer_exits()
    assert code == 2
    assert "usage" in out


def test_anything_else_exits_with_1_and_one_line(podracer_exits, monkeypatch, tmp_path):
    def fail(*arguments, **options):
        raise RuntimeError("it went\nwrong")

    monkeypatch.setattr(training, "train", fail)
    code, out, error = podracer_exits("train", "tiny_catch", "--run-dir", tmp_path)
    assert (code, out) == (1, "")
    assert error == ["podracer: RuntimeError: it went wrong (PODRACER_TRACEBACK=1 shows where)"]
    monkeypatch.setenv("PODRACER_TRACEBACK", "1")
    code, out, error = podracer_exits("train", "tiny_catch", "--run-dir", tmp_path)
    assert code == 1
    assert 'raise RuntimeError("it went\\nwrong")' in [line.strip() for line in error]


def test_not_a_number_exits_with_1_and_names_the_update(podracer_exits, tmp_path):
    options = ["--env", "tiny:Endless", "--env-parameters", "nan_at", "22", "--quiet"]
    code, _, error = podracer_exits("train", "tiny_catch", "--run-dir", tmp_path / "run", *options)
    assert (code, error) == (
        1, ["podracer: reward was not finite at update 6; the last checkpoint is of update 4"]
    )  # fmt: skip


def test_a_full_disk_exits_with_1_after_training_to_the_end(podracer_exits, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("podracer.checkpoint.ocp.AsyncCheckpointer.save", refuse)
    code, out, error = podracer_exits("train", "tiny_catch", "--run-dir", tmp_path / "run", "--quiet")
    assert code == 1
    assert out == f"{tmp_path / 'run'}\n"
    assert any("could not save the checkpoint of update 2: no space left on the device" in line for line in error)
    assert error[-1].startswith("podracer: not everything could be written: ")
    assert metrics_of(tmp_path / "run")[-1]["updates"] == 12


def test_an_evaluation_without_a_finished_episode_exits_with_1(podracer_exits, finished, monkeypatch):
    # The package has the function by the module's name.
    module = sys.modules["podracer.evaluate"]
    monkeypatch.setattr(module, "evaluate", lambda *a, e=podracer.evaluate, **k: e(*a, **k, max_steps=1))
    code, out, error = podracer_exits("evaluate", finished.run_dir, "--episodes", "2", "--json")
    assert (code, error) == (1, ["podracer: 2 episodes did not end and are left out"])
    assert json.loads(out) == {
        "experiment": "tiny_catch", "updates": 12, "mean": None, "std": None, "min": None, "max": None, "episodes": 0,
        "greedy": True,
    }  # fmt: skip


def test_ctrl_c_exits_with_130(podracer_exits, monkeypatch, tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(training, "train", lambda *a, **k: signal.raise_signal(signal.SIGINT))
    code, out, error = podracer_exits("train", "tiny_catch", "--run-dir", tmp_path)
    signal.signal(signal.SIGINT, before)
    assert (code, out, error) == (130, "", ["podracer: interrupted"])


def test_names_are_checked_before_jax_starts(tmp_path):
    """A machine's devices are taken, and its memory with them, only by a command that can run."""
    script = """
import sys
from podracer import cli
from jax._src import xla_bridge
for command in sys.argv[1:]:
    try:
        cli.main(command.split())
    except SystemExit as stop:
        assert stop.code == 2, command
    assert not xla_bridge._backends, command
"""
    commands = [
        "train ppo_cartpol", "train ppo_cartpole --agent.learning-rat 1", "train ppo_cartpole --agent.discount nan",
        "train ppo_cartpole --total-steps 3", "resume nowhere", "evaluate nowhere", "trian",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-c", script, *commands], check=True, cwd=tmp_path, timeout=300)


def test_a_process_uses_every_core_where_it_is_worth_it(tmp_path):
    """Without being told, JAX makes one device of a CPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    script = """
import jax, podracer
experiment = podracer.experiments.get("ppo_breakout_minatar")
experiment._ask_for_cpu_devices()
print(len(jax.devices()), len(experiment._device_choices()[0]))
"""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    made, chosen = map(int, result.stdout.split())
    assert made == cores
    assert chosen == max(n for n in (1, 2, 4) if n <= cores)
    assert len(jax.devices()) == 8, "tests run on eight"


@pytest.mark.slow
def test_the_program_in_the_readme_learns(tmp_path, compiled_programs):
    readme = pathlib.Path(__file__).parent.parent / "README.md"
    (program,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | compiled_programs
    command = [sys.executable, "-W", "error", "-c", program]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")
    *returns, summary = result.stdout.splitlines()
    assert len(returns) == 6
    assert ast.literal_eval(summary)["episodes"] == 128
    assert ast.literal_eval(summary)["mean"] > 100 > float(returns[0])

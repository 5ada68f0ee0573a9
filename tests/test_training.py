import contextlib
import dataclasses
import errno
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest
import tiny_runs
from tiny_runs import TinyConfig, bits_of, metrics_of, saved_state

from podracer import plotting, training
from podracer.anakin import Anakin
from podracer.checkpoint import Checkpointer
from podracer.envs.packages import EnvironmentUnavailableError
from podracer.evaluate import Evaluation
from podracer.experiment import CheckpointConfig, Experiment
from podracer.loading import load_policy
from podracer.logging import TensorBoardLogger
from podracer.run_directory import RunDirectory, identity


@pytest.fixture(scope="module", autouse=True)
def compiled_programs(tmp_path_factory):
    with tiny_runs.compiled_programs(tmp_path_factory.getbasetemp() / "compiled") as variables:
        yield variables


@pytest.fixture(autouse=True)
def ctrl_c():
    """Shells have background jobs, such as these tests may be, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", autouse=True)
def made_once():
    """The same program serves every run of an experiment, as it would within one process of a user's."""
    made = {}

    def make_architecture(experiment, make=Experiment.make_architecture):
        name = repr((experiment.env, experiment.env_parameters, experiment.agent, experiment.architecture))
        name += repr((experiment.num_updates, experiment.devices))
        if name not in made:
            made[name] = make(experiment)
        return made[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "make_architecture", make_architecture)
        yield


@pytest.fixture
def only_training(monkeypatch):
    """What comes after the last update takes longer than these runs."""
    monkeypatch.setattr(plotting, "plot_curves", lambda *arguments: None)
    monkeypatch.setattr(training, "record", lambda *arguments, **options: ([np.zeros((4, 4, 3), np.uint8)], 0.0))
    monkeypatch.setattr(training, "evaluate", lambda *arguments, **options: Evaluation(np.zeros(3), np.ones(3)))


@pytest.fixture
def no_compiling(monkeypatch):
    """Bad input has to be refused before anything is compiled."""

    def refuse(self):
        pytest.fail("compiled")

    monkeypatch.setattr(Anakin, "compile", refuse)
    monkeypatch.setattr(Anakin, "init", lambda self, seed: refuse(self))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, compiled_programs):
    """A run from beginning to end."""
    return tiny_runs.experiment().run(tmp_path_factory.mktemp("runs") / "finished", quiet=True)


def until(update):
    """Stops a run like Ctrl-C does, as soon as the window that ends with this update has been read."""

    def interrupt(run, updates, window, read=training._Run._read):
        value = read(run, updates, window)
        if updates == update:
            signal.raise_signal(signal.SIGINT)
        return value

    return interrupt


def stopped(run_dir, update, monkeypatch, **changes):
    """A run that was stopped after an update, or after the one that was under way then."""
    with monkeypatch.context() as patch:
        patch.setattr(training._Run, "_read", until(update))
        with pytest.raises(KeyboardInterrupt):
            tiny_runs.experiment(**changes).run(run_dir, quiet=True)
    return run_dir


def start(script, compiled, *arguments):
    """A process with the tiny experiment, whose standard error can be read while it goes on."""
    beginning = """
        import signal, sys
        # Shells have background jobs ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        import tiny_runs
        from podracer import cli
    """
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | compiled | {"PYTHONPATH": path}
    command = [sys.executable, "-c", textwrap.dedent(beginning) + textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_until(condition, process, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def test_a_run_leaves_everything_in_its_directory(finished):
    path = finished.run_dir
    assert {file.name for file in path.iterdir()} == {
        "config.json", "metrics.jsonl", "tensorboard", "checkpoints", "curve.png", "episode.gif", "summary.json"
    }  # fmt: skip
    assert Experiment.from_dict(json.loads((path / "config.json").read_text())) == tiny_runs.experiment()
    summary = json.loads((path / "summary.json").read_text())
    assert summary == finished.summary
    # Episodes of Catch with 3 rows have 2 steps, and the third row of each cycle is the reset.
    assert (summary["experiment"], summary["seed"], summary["updates"], summary["env_steps"]) == (
        "tiny_catch",
        0,
        12,
        256,
    )
    assert set(summary) == {
        "experiment", "seed", "env_steps", "updates", "steps_per_second", "compile_seconds", "wall_seconds",
        "evaluation",
    }  # fmt: skip
    assert set(summary["evaluation"]) == {"mean", "std", "min", "max", "episodes", "greedy"}
    assert summary["evaluation"]["episodes"] == 4
    assert summary["wall_seconds"] > summary["compile_seconds"] > 0
    assert not finished.errors
    assert [int(file.name) for file in sorted((path / "checkpoints").iterdir(), key=lambda f: int(f.name))][-2:] == [
        10,
        12,
    ]


def test_metrics_have_each_update_once_with_what_was_promised(finished):
    lines = metrics_of(finished.run_dir, timing=True)
    assert [line["updates"] for line in lines] == list(range(1, 13))
    for line in lines:
        names = {"env_steps", "updates", "steps_per_second", "loss", "learning_rate"}
        assert set(line) == names | {"episodes", "episode_return", "episode_length"}
        assert line["steps_per_second"] > 0
        assert line["episode_length"] == 2
    # Steps that were taken, not rows: two thirds of them.
    assert sum(line["episodes"] for line in lines) * 2 == lines[-1]["env_steps"] == 256
    np.testing.assert_allclose([line["learning_rate"] for line in lines], 0.5 * (1 - np.arange(12) / 12), rtol=1e-6)


def test_the_same_seed_gives_the_same_run_and_another_one_another(finished, tmp_path, only_training):
    # Which was evaluated, and this is not.
    same = tiny_runs.experiment().run(tmp_path / "same", quiet=True)
    assert metrics_of(same.run_dir) == metrics_of(finished.run_dir)
    assert bits_of(same.state) == bits_of(finished.state)
    other = tiny_runs.experiment(seed=1).run(tmp_path / "other", quiet=True)
    assert metrics_of(other.run_dir) != metrics_of(finished.run_dir)


def test_windows_and_checkpoints_change_what_is_written_only(finished, tmp_path, only_training):
    changes = {"updates_per_window": 5, "checkpoints": CheckpointConfig(interval=0, keep_best=0)}
    result = tiny_runs.experiment(**changes).run(tmp_path / "run", quiet=True)
    # But for the sums over the last window, which here is longer.
    assert bits_of(result.state.learner) == bits_of(finished.state.learner)
    assert bits_of(result.state.rollout.environment) == bits_of(finished.state.rollout.environment)
    lines, all_lines = metrics_of(result.run_dir), metrics_of(finished.run_dir)
    assert [line["updates"] for line in lines] == [5, 10, 12]
    assert [line["env_steps"] for line in lines] == [all_lines[i]["env_steps"] for i in (4, 9, 11)]
    assert lines[0]["loss"] == pytest.approx(np.mean([line["loss"] for line in all_lines[:5]]))
    assert [file.name for file in (result.run_dir / "checkpoints").iterdir()] == ["12"]


def test_stopped_and_resumed_equals_uninterrupted(finished, tmp_path, monkeypatch, capsys, only_training):
    run_dir = stopped(tmp_path / "run", 5, monkeypatch, checkpoints=CheckpointConfig(interval=4))
    # The window under way when it was stopped is not lost.
    update, _, counters = saved_state(run_dir)
    assert update == counters["updates"] == metrics_of(run_dir)[-1]["updates"] == 6
    assert f"podracer resume {run_dir}" in capsys.readouterr().err
    assert not (run_dir / "summary.json").exists()

    result = tiny_runs.experiment().run(run_dir, resume=True)
    assert "resumed at update 6" in capsys.readouterr().err
    assert bits_of(result.state) == bits_of(finished.state)
    assert saved_state(run_dir)[1] == saved_state(finished.run_dir)[1]
    assert metrics_of(run_dir) == metrics_of(finished.run_dir)
    same = ("experiment", "seed", "env_steps", "updates")
    assert [result.summary[name] for name in same] == [finished.summary[name] for name in same]


def test_a_finished_run_is_resumed_without_training(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(training._Run, "finish", lambda run: training.Result(run.directory.path, {}, None, run.state))
        result = tiny_runs.experiment().run(tmp_path / "run", quiet=True)
    before, (update, state, counters) = metrics_of(result.run_dir, timing=True), saved_state(result.run_dir)
    assert not (result.run_dir / "summary.json").exists()
    monkeypatch.setattr(Anakin, "compile", lambda anakin: pytest.fail("compiled"))
    monkeypatch.setattr(Anakin, "run", lambda *arguments: pytest.fail("trained"))
    again = tiny_runs.experiment(evaluation_episodes=3).run(result.run_dir, resume=True, quiet=True)
    assert metrics_of(result.run_dir, timing=True) == before
    assert saved_state(result.run_dir) == (update, state, counters)
    assert json.loads((result.run_dir / "summary.json").read_text()) == again.summary
    assert again.summary["evaluation"]["episodes"] == 3


def test_resuming_before_the_first_checkpoint_begins_again(finished, tmp_path, capsys, only_training):
    directory = RunDirectory(tmp_path / "run")
    directory.create(tiny_runs.experiment(), overwrite=False)
    # Killed within the second window.
    directory.metrics.write_text('{"updates": 1, "env_steps": 20}\n{"upda')
    with pytest.raises(ValueError, match="another experiment: seed was 0 and is 1"):
        tiny_runs.experiment(seed=1).run(directory.path, resume=True, quiet=True)
    result = tiny_runs.experiment().run(directory.path, resume=True, quiet=True)
    assert "no checkpoint yet" in capsys.readouterr().err
    assert metrics_of(directory.path) == metrics_of(finished.run_dir)
    assert bits_of(result.state) == bits_of(finished.state)


@pytest.mark.parametrize("flip", [True, False], ids=["flipped", "half-written"])
def test_a_damaged_checkpoint_is_skipped_and_named(flip, finished, tmp_path, monkeypatch, capsys, only_training):
    run_dir = stopped(tmp_path / "run", 5, monkeypatch)
    newest = run_dir / "checkpoints" / "6"
    file = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if flip else content[: len(content) // 2])
    result = tiny_runs.experiment().run(run_dir, resume=True, quiet=True)
    assert "skipped the checkpoint of update 6" in capsys.readouterr().err
    assert bits_of(result.state) == bits_of(finished.state)
    assert metrics_of(run_dir) == metrics_of(finished.run_dir)


def test_no_readable_checkpoint_is_an_error_before_anything_is_compiled(tmp_path, monkeypatch, request):
    run_dir = stopped(tmp_path / "run", 3, monkeypatch)
    for path in (run_dir / "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    request.getfixturevalue("no_compiling")
    with pytest.raises(ValueError, match=r"no readable checkpoint.*update 4.*update 2"):
        tiny_runs.experiment().run(run_dir, resume=True, quiet=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent": TinyConfig(learning_rate=0.25)}, r"agent.learning_rate was 0.5 and is 0.25"),
        ({"total_steps": 640}, r"total_steps was 384 and is 640"),
        ({"seed": 1}, r"seed was 0 and is 1"),
        ({"env_parameters": {"rows": 4, "columns": 3}}, r"env_parameters.rows was 3 and is 4"),
    ],
)
def test_another_experiment_is_not_resumed(changes, message, finished, no_compiling):
    before = metrics_of(finished.run_dir, timing=True)
    with pytest.raises(ValueError, match=message):
        tiny_runs.experiment(**changes).run(finished.run_dir, resume=True, quiet=True)
    assert metrics_of(finished.run_dir, timing=True) == before


def test_a_checkpoint_of_another_experiment_is_refused(finished, tmp_path, no_compiling):
    """Though config.json says that it is this one: somebody has copied a checkpoint, or edited the file."""
    other = tiny_runs.experiment(seed=1)
    directory = RunDirectory(tmp_path / "run")
    directory.create(other, overwrite=False)
    directory.checkpoints.symlink_to(finished.run_dir / "checkpoints", target_is_directory=True)
    with pytest.raises(ValueError, match=r"another experiment: seed was 0 and is 1"):
        other.run(directory.path, resume=True, quiet=True)


def test_a_config_that_was_edited_is_refused(tmp_path, monkeypatch):
    run_dir = stopped(tmp_path / "run", 2, monkeypatch, env_parameters={})
    config = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps(config | {"env_parameters": {"rows": 5}}))
    with pytest.raises(ValueError, match=r"another experiment: env_parameters was \{\} and is absent"):
        RunDirectory(run_dir).experiment().run(run_dir, resume=True, quiet=True)


def test_a_checkpoint_that_does_not_say_on_how_many_devices(tmp_path, monkeypatch, capsys, only_training):
    run_dir = stopped(tmp_path / "run", 4, monkeypatch)
    experiment = tiny_runs.experiment()
    with contextlib.closing(Checkpointer(run_dir / "checkpoints", config=identity(experiment))) as checkpointer:
        restored = checkpointer.restore(experiment.make_architecture().shapes)
        metadata = {name: value for name, value in restored.metadata.items() if name != "devices"}
        checkpointer.save(restored.update + 1, restored.state, metadata)
    capsys.readouterr()
    experiment.run(run_dir, resume=True, quiet=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_saved_on_four_devices_and_resumed_on_others(devices, tmp_path, monkeypatch, capsys, only_training):
    run_dir = stopped(tmp_path / "run", 4, monkeypatch, devices=4)
    _, state, _ = saved_state(run_dir)
    seen = {}

    def restore(run, restore=training._Run.restore):
        restore(run)
        seen["state"] = bits_of(run.state)
        seen["devices"] = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(run.state)}

    monkeypatch.setattr(training._Run, "restore", restore)
    result = tiny_runs.experiment(devices=devices).run(run_dir, resume=True, quiet=True)
    assert ("the run was on 4 devices and goes on with" in capsys.readouterr().err) == (devices != 4)
    assert seen == {"state": state, "devices": {devices}}
    assert [line["updates"] for line in metrics_of(run_dir)] == list(range(1, 13))
    assert result.summary["env_steps"] == 256


def test_steps_past_2_to_the_31_are_counted_right(tmp_path, monkeypatch, only_training):
    run_dir = stopped(tmp_path / "run", 9, monkeypatch)
    experiment = tiny_runs.experiment()
    checkpointer = Checkpointer(run_dir / "checkpoints", config=identity(experiment))
    restored = checkpointer.restore(experiment.make_architecture().shapes)
    begun = restored.metadata["env_steps"]
    # As if the first ten updates had taken that many.
    checkpointer.save(9, restored.state, restored.metadata | {"env_steps": 2**31 - 3, "updates": 10})
    checkpointer.close()
    result = experiment.run(run_dir, resume=True, quiet=True)
    assert result.summary["env_steps"] == 2**31 - 3 + 256 - begun > 2**31
    assert metrics_of(run_dir)[-1]["env_steps"] == result.summary["env_steps"]


def test_a_kill_at_any_moment_costs_nothing(finished, tmp_path, compiled_programs):
    run_dir = tmp_path / "run"
    process = start(
        "cli.main(['train', 'tiny_catch', '--quiet', '--run-dir', sys.argv[1]])", compiled_programs, run_dir
    )
    wait_until(lambda: list(run_dir.glob("checkpoints/[1-8]")), process)
    time.sleep(random.uniform(0, 0.1))
    process.kill()
    process.communicate()
    assert not (run_dir / "summary.json").exists(), "it was finished before it was killed"
    process = start("cli.main(['resume', '--quiet', sys.argv[1]])", compiled_programs, run_dir)
    assert (process.communicate()[1], process.returncode) == ("", 0)
    update, state, counters = saved_state(run_dir)
    finished_update, finished_state, finished_counters = saved_state(finished.run_dir)
    assert (update, state) == (finished_update, finished_state)
    assert counters["env_steps"] == finished_counters["env_steps"]
    assert metrics_of(run_dir) == metrics_of(finished.run_dir)


@pytest.mark.slow
def test_a_kill_costs_ppo_nothing(tmp_path):
    """The real agent with all that it can remember, each process compiling for itself."""
    script = """
        import podracer
        from podracer.agents import PPOConfig
        from podracer.networks import NetworkConfig
        config = PPOConfig(
            num_epochs=2, num_minibatches=2, normalize_observations=True, scale_rewards=True,
            network=NetworkConfig(hidden_sizes=(8,), shared=True, recurrent_size=4),
        )
        podracer.experiments.register(tiny_runs.experiment(name="ppo_tiny", agent=config, total_steps=60 * 32))
        cli.main(sys.argv[1:])
    """
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(script, {}, "train", "ppo_tiny", "--quiet", "--run-dir", whole)
    assert (process.communicate()[1], process.returncode) == ("", 0)
    process = start(script, {}, "train", "ppo_tiny", "--quiet", "--run-dir", killed)
    for interrupted_at in ("[2-9]", "[2-4]?"):
        wait_until(lambda pattern=interrupted_at: list(killed.glob(f"checkpoints/{pattern}")), process)
        time.sleep(random.uniform(0, 0.2))
        process.kill()
        process.communicate()
        assert not (killed / "summary.json").exists(), "it was finished before it was killed"
        process = start(script, {}, "resume", "--quiet", killed)
    assert (process.communicate()[1], process.returncode) == ("", 0)
    assert saved_state(killed)[:2] == saved_state(whole)[:2]
    assert metrics_of(killed) == metrics_of(whole)
    assert [line["updates"] for line in metrics_of(killed)] == list(range(1, 61))


def test_ctrl_c_saves_and_exits_with_130(finished, tmp_path, compiled_programs, only_training):
    run_dir = tmp_path / "run"
    script = """
        from podracer import training
        def read(run, *arguments, read=training._Run._read):
            import time
            time.sleep(0.1)  # Long enough to press a key.
            return read(run, *arguments)
        training._Run._read = read
        cli.main(["train", "tiny_catch", "--quiet", "--run-dir", sys.argv[1]])
    """
    process = start(script, compiled_programs, run_dir)
    metrics = run_dir / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") > 2, process)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert time.monotonic() - began < 10
    assert error.splitlines()[-1] == "podracer: interrupted"
    assert "Traceback" not in error
    update, _, _ = saved_state(run_dir)
    assert update == metrics_of(run_dir)[-1]["updates"] < 12
    result = tiny_runs.experiment().run(run_dir, resume=True, quiet=True)
    assert bits_of(result.state) == bits_of(finished.state)
    assert metrics_of(run_dir) == metrics_of(finished.run_dir)


def test_ctrl_c_is_heard_while_compiling(tmp_path, compiled_programs):
    # C code that no signal interrupts, as XLA's is, for minutes.
    script = """
        import hashlib
        from podracer.anakin import Anakin
        Anakin.compile = lambda anakin: hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
        cli.main(["train", "tiny_catch", "--run-dir", sys.argv[1]])
    """
    process = start(script, compiled_programs, tmp_path / "run")
    while "compiling" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert time.monotonic() - began < 10
    assert error == "podracer: interrupted before what was under way had ended; what was saved is kept\n"


def test_a_full_disk_does_not_stop_training(tmp_path, monkeypatch, capsys, only_training):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("podracer.checkpoint.checkpoint_leaves.snapshot", lambda leaves: leaves)
    monkeypatch.setattr("podracer.checkpoint.ocp.AsyncCheckpointer.save", refuse)
    result = tiny_runs.experiment().run(tmp_path / "run", quiet=True)
    assert result.summary["updates"] == 12
    assert len(result.errors) == 6
    assert capsys.readouterr().err.count("no space left on the device") == 6


def test_what_any_log_could_not_write_is_an_error_of_the_run(tmp_path, monkeypatch, only_training):
    monkeypatch.setattr(TensorBoardLogger, "write", lambda log, metrics: log.errors.append(OSError("full")))
    monkeypatch.setattr(
        training, "save_gif", lambda frames, path: (tmp_path / "nowhere" / "episode.gif").write_bytes(b"")
    )
    result = tiny_runs.experiment().run(tmp_path / "run", quiet=True)
    assert [type(error) for error in result.errors] == [OSError] * 12 + [FileNotFoundError]
    # What could be written was.
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == result.summary


ENDLESS = {"env": "tiny:Endless", "env_parameters": {"nan_at": 22}}


def test_a_reward_that_is_not_a_number_is_named_with_its_update(tmp_path, monkeypatch, only_training):
    with pytest.raises(
        FloatingPointError, match=r"reward was not finite at update 6; the last checkpoint is of update 4"
    ):
        tiny_runs.experiment(**ENDLESS).run(tmp_path / "run", quiet=True)
    assert [line["updates"] for line in metrics_of(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_what_is_not_a_number_can_be_allowed(tmp_path, monkeypatch, capsys, only_training):
    # Nobody waits for episodes that never end.
    monkeypatch.setattr(training, "evaluate", lambda *a, **k: Evaluation(np.zeros(0), np.zeros(0), 4))
    result = tiny_runs.experiment(**ENDLESS, stop_on_nonfinite=False).run(tmp_path / "run", quiet=True)
    error = capsys.readouterr().err
    assert error.count("not finite") == 1
    assert "reward was not finite at update 6" in error
    assert "4 evaluation episodes did not end" in error
    lines = metrics_of(result.run_dir)
    assert [line["updates"] for line in lines] == list(range(1, 13))
    assert [line["loss"] is None for line in lines] == [i >= 5 for i in range(12)]
    assert all(line["episode_return"] is None and line["episodes"] == 0 for line in lines)
    summary = json.loads((result.run_dir / "summary.json").read_text())
    nothing = dict.fromkeys(("mean", "std", "min", "max"))
    assert summary["evaluation"] == {**nothing, "episodes": 0, "greedy": True}


def test_a_run_without_a_finished_episode_has_no_curve(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "evaluate", lambda *a, **k: Evaluation(np.zeros(0), np.zeros(0), 4))
    monkeypatch.setattr(training, "record", lambda *arguments, **options: ([np.zeros((4, 4, 3), np.uint8)], 0.0))
    result = tiny_runs.experiment(env="tiny:Endless", env_parameters={}).run(tmp_path / "run")
    assert "no curve: " in capsys.readouterr().err
    assert not (result.run_dir / "curve.png").exists()
    assert (result.run_dir / "episode.gif").exists()
    assert not result.errors


def test_what_fails_after_training_began_is_not_called_bad_input(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        error = ValueError("shapes do not match")
        error.add_note("nor do dtypes")
        raise error

    monkeypatch.setattr(training, "evaluate", fail)
    with pytest.raises(RuntimeError, match="the run failed: shapes do not match") as failed:
        tiny_runs.experiment().run(tmp_path / "run", quiet=True)
    assert failed.value.__notes__ == ["nor do dtypes"]
    assert saved_state(tmp_path / "run")[0] == 12


def test_compiling_is_announced_before_it_is_spent(tmp_path, monkeypatch, capsys):
    class Enough(Exception):
        pass

    def look(anakin):
        raise Enough(capsys.readouterr().err)

    monkeypatch.setattr(Anakin, "compile", look)
    with pytest.raises(Enough) as seen:
        tiny_runs.experiment(total_steps=400).run(tmp_path / "run")
    assert str(seen.value).splitlines() == [
        "tiny_catch: 384 steps (of 400 asked for) in 12 updates of 8 environments x 4 steps on 2 CPU devices",
        "compiling ...",
    ]


def test_off_a_terminal_progress_is_plain_lines(tmp_path, capsys, only_training):
    tiny_runs.experiment(total_steps=400).run(tmp_path / "run")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[0] for line in lines[2:15]] == ["compiled", *(str(32 * i) for i in range(1, 13))]
    assert "384 of 384 steps (100 %)" in lines[14]
    assert not any("\x1b" in line or "\r" in line for line in lines)


def test_quiet_shows_nothing(tmp_path, capsys, only_training):
    tiny_runs.experiment().run(tmp_path / "run", quiet=True)
    assert capsys.readouterr() == ("", "")


def test_nothing_is_left_of_a_run_that_was_refused(tmp_path, no_compiling):
    run_dir = tmp_path / "run"
    missing = dataclasses.make_dataclass("Unregistered", [], frozen=True, namespace={"make": TinyConfig().make})
    with pytest.raises(ValueError, match=r"Unregistered is not registered; call podracer.agents.register"):
        tiny_runs.experiment(agent=missing()).run(run_dir)
    with pytest.raises(ValueError, match=r"num_envs is 8.*3 devices.*6 or 9"):
        tiny_runs.experiment(devices=3).run(run_dir)
    with pytest.raises(ValueError, match=r"no environment 'podracer:Catsch'; nearest: podracer:Catch"):
        tiny_runs.experiment(env="podracer:Catsch").run(run_dir)
    assert not run_dir.exists()


def test_wandb_is_asked_for_before_anything_is_compiled(tmp_path, monkeypatch, no_compiling):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(EnvironmentUnavailableError, match="pip install wandb"):
        tiny_runs.experiment().run(tmp_path / "run", wandb_project="project")
    assert not (tmp_path / "run").exists()


def test_resuming_needs_a_run(tmp_path, finished):
    with pytest.raises(ValueError, match="name its run directory"):
        tiny_runs.experiment().run(resume=True)
    with pytest.raises(ValueError, match="not to be overwritten"):
        tiny_runs.experiment().run(finished.run_dir, resume=True, overwrite=True)
    with pytest.raises(ValueError, match=r"not a run directory: it has no config\.json"):
        tiny_runs.experiment().run(tmp_path, resume=True)


def test_a_loaded_policy_evaluates_as_the_run_did(finished, monkeypatch):
    # A pickle would run whatever code it names.
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *arguments, **keywords: pytest.fail("unpickled"))
    before = {path: path.read_bytes() for path in finished.run_dir.rglob("*") if path.is_file()}
    loaded = load_policy(finished.run_dir)
    params = bits_of(loaded.params)
    key = loaded.key()
    evaluation = training.evaluate(loaded.agent, loaded.environment, loaded.params, key, 4)
    assert evaluation.summary() == finished.summary["evaluation"]
    np.testing.assert_array_equal(evaluation.returns, finished.evaluation.returns)
    assert bits_of(loaded.params) == params
    assert {path: path.read_bytes() for path in finished.run_dir.rglob("*") if path.is_file()} == before


def test_a_policy_is_loaded_from_the_checkpoint_that_is_asked_for(tmp_path, monkeypatch, only_training):
    experiment = tiny_runs.experiment(checkpoints=CheckpointConfig(interval=1, keep_last=12))
    experiment.run(tmp_path / "run", quiet=True)
    returns = {line["updates"]: line["episode_return"] for line in metrics_of(tmp_path / "run")}
    scored = [update for update, value in returns.items() if value is not None]
    best = max(scored, key=lambda update: (returns[update], update))
    loaded = {name: load_policy(tmp_path / "run", name) for name in ("newest", "best", 3)}
    assert {name: policy.updates for name, policy in loaded.items()} == {"newest": 12, "best": best, 3: 3}
    assert bits_of(loaded[3].params) != bits_of(loaded["newest"].params)
    with pytest.raises(ValueError, match="no checkpoint of update 13"):
        load_policy(tmp_path / "run", 13)


def test_what_cannot_be_saved_costs_no_earlier_run(tmp_path, no_compiling):
    directory = RunDirectory(tmp_path / "run")
    directory.create(tiny_runs.experiment(), overwrite=False)
    directory.metrics.write_text("kept")
    agent = TinyConfig(learning_rate=np.float32(0.5))
    with pytest.raises(ValueError, match=r"agent.learning_rate is .*, of type float32"):
        tiny_runs.experiment(agent=agent).run(directory.path, overwrite=True, quiet=True)
    assert directory.metrics.read_text() == "kept"


def test_no_file_of_a_run_is_a_pickle(finished):
    files = [path for path in finished.run_dir.rglob("*") if path.is_file()]
    assert len(files) > 6
    for path in files:
        content = path.read_bytes()
        # Every pickle of protocol 2 or later begins so and ends with STOP.
        assert not (content[:1] == b"\x80" and content.endswith(b".")), path
        assert path.suffix not in (".pkl", ".pickle", ".npy", ".npz"), path

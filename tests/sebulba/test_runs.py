"""A run under Sebulba from beginning to end, and what ends it before."""

import dataclasses
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time

import gymnasium
import jax
import numpy as np
import pytest
from envs import gymnasium_toys
from sebulba.toy_runs import experiment
from sebulba.toys import ScriptedEnvironment
from tiny_runs import bits_of, metrics_of, saved_state

import podracer
from podracer import cli, training
from podracer.agents import IMPALAConfig, PPOConfig
from podracer.evaluate import evaluate
from podracer.loading import load_policy
from podracer.networks import NetworkConfig
from podracer.sebulba import SebulbaConfig
from podracer.sebulba.learner import Learning

TESTS = pathlib.Path(__file__).parent.parent


def of_updates(run_dir, *names):
    return [[line.get(name) for name in names] for line in metrics_of(run_dir)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """On one device, as `podracer` has it on a CPU."""
    return experiment(devices=1).run(tmp_path_factory.mktemp("finished") / "run", quiet=True)


def test_a_run_says_where_its_time_went_and_how_far_policies_lagged(finished):
    assert {path.name for path in finished.run_dir.iterdir()} >= {"curve.png", "episode.gif", "summary.json"}
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert summary["updates"] == 12
    assert summary["bottleneck"].startswith(("the actors", "the learner", "balanced"))
    for side, names in (("actors", {"step", "act", "transfer", "parameters"}), ("learner", {"trajectories", "update"})):
        assert names < summary["time"][side].keys()
        assert sum(summary["time"][side].values()) == pytest.approx(1)
    lines = metrics_of(finished.run_dir)
    assert [line["policy_lag"] for line in lines] == [0] + [1] * 11
    assert lines[-1]["policy_lag_1"] == 1
    # An episode has 3 steps and a reset, which is none: row 4 of 4.
    resets = sum(1 for row in range(60) if row % 4 == 3)
    assert lines[-1]["env_steps"] == summary["env_steps"] == 8 * (60 - resets)
    assert summary["evaluation"]["mean"] == 3
    assert summary["evaluation"]["episodes"] == 4


@pytest.mark.parametrize("serial", [False, True])
def test_the_same_seed_gives_the_same_run(serial, finished, tmp_path):
    architecture = dataclasses.replace(experiment().architecture, serial=serial)
    again = experiment(devices=1, architecture=architecture).run(tmp_path / "run", quiet=True)
    assert bits_of(again.state) == bits_of(finished.state)
    other = experiment(devices=1, seed=1).run(tmp_path / "other", quiet=True)
    assert bits_of(other.state) != bits_of(finished.state)


@pytest.fixture
def interrupted_after_5(monkeypatch):
    """Runs an experiment until Ctrl-C comes after its fifth update."""

    def interrupt(run, updates, window, read=training._Run._read):
        score = read(run, updates, window)
        if updates == 5:
            signal.raise_signal(signal.SIGINT)
        return score

    def run(experiment, run_dir):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with monkeypatch.context() as patch:
            patch.setattr(training._Run, "_read", interrupt)
            with pytest.raises(KeyboardInterrupt):
                experiment.run(run_dir, quiet=True)
        signal.signal(signal.SIGINT, before)

    return run


def test_a_resumed_run_keeps_counters_and_schedules_and_says_what_begins_anew(
    finished, tmp_path, interrupted_after_5, capsys
):
    run_dir = tmp_path / "run"
    interrupted_after_5(experiment(devices=1), run_dir)
    saved, _, metadata = saved_state(run_dir)
    assert 5 <= saved < 12
    assert metadata["env_steps"] == metrics_of(run_dir)[-1]["env_steps"]
    experiment(devices=1).run(run_dir, resume=True, quiet=True)
    assert "the environments begin new episodes" in capsys.readouterr().err
    assert of_updates(run_dir, "updates", "learning_rate") == of_updates(finished.run_dir, "updates", "learning_rate")
    assert metrics_of(run_dir)[-1]["updates"] == 12


EXACT = {
    "ppo, adam, moments of observations and returns": PPOConfig(
        num_minibatches=2,
        network=NetworkConfig(hidden_sizes=(4,)),
        normalize_observations=True,
        scale_rewards=True,
    ),
    "impala lstm, rmsprop": IMPALAConfig(network=NetworkConfig(hidden_sizes=(4,), recurrent_size=3)),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_is_restored_is_exactly_what_was_saved(name, tmp_path, interrupted_after_5):
    """Where environments that begin anew do what the others would have done, a resumed run ends as one that went on."""
    architecture = SebulbaConfig(num_envs=8, rollout_length=4, threads_per_actor_device=1, max_lag=0)
    changes = {"architecture": architecture, "total_steps": 12 * 32, "env_parameters": {"numbered": False}}
    changes["agent"] = EXACT[name]
    whole = experiment(devices=1, **changes).run(tmp_path / "whole", quiet=True)
    interrupted_after_5(experiment(devices=1, **changes), tmp_path / "run")
    assert saved_state(tmp_path / "run")[0] == 5
    resumed = experiment(devices=1, **changes).run(tmp_path / "run", resume=True, quiet=True)
    assert bits_of(resumed.state) == bits_of(whole.state)
    names = "updates", "env_steps", "learning_rate", "episode_return"
    assert of_updates(tmp_path / "run", *names) == of_updates(tmp_path / "whole", *names)


def test_the_rate_is_that_of_real_steps(tmp_path):
    """4 environments that sleep 50 ms a step make at most 80 steps a second, and 3 of 4 rows are steps."""
    architecture = SebulbaConfig(num_envs=4, rollout_length=8, threads_per_actor_device=1)
    changes = {"architecture": architecture, "env_parameters": {"delay": 0.05}, "total_steps": 320}
    result = experiment(devices=1, **changes).run(tmp_path / "run", quiet=True)
    rates = [line["steps_per_second"] for line in metrics_of(result.run_dir, timing=True)]
    assert 60 * 0.8 < statistics.median(rates[2:]) <= 60 * 1.05
    assert result.summary["steps_per_second"] <= 60


def test_frames_are_counted_and_rated_as_steps_are(finished, tmp_path):
    result = experiment(devices=1, env_parameters={"frames_per_step": 4}).run(tmp_path / "run", quiet=True)
    for line in (*metrics_of(result.run_dir, timing=True), result.summary):
        assert line["frames"] == 4 * line["env_steps"]
        assert line["frames_per_second"] == 4 * line["steps_per_second"]
    assert not {"frames", "frames_per_second"} & finished.summary.keys()


def test_returns_are_of_whole_games_and_unclipped_whatever_is_learnt_from(tmp_path):
    """Of 3 steps with a reward of 5, in the middle of which a life is lost."""
    agent = IMPALAConfig(reward_clip=1.0, network=NetworkConfig(hidden_sizes=(4,)))
    script = {"reward": 5.0, "life_lost_at": 2}
    result = experiment(devices=1, agent=agent, env_parameters=script, total_steps=160).run(
        tmp_path / "run", quiet=True
    )
    returns = [line["episode_return"] for line in metrics_of(result.run_dir)]
    assert returns == [15.0] * 4
    assert list(result.evaluation.returns) == [15.0] * 4
    assert list(result.evaluation.lengths) == [3] * 4


def test_evaluation_is_the_same_from_a_checkpoint(finished):
    loaded = load_policy(finished.run_dir)
    again = evaluate(loaded.agent, loaded.environment, loaded.params, loaded.key(), 4)
    assert again.summary() == finished.evaluation.summary()


def test_an_experiment_says_how_its_policy_is_evaluated(finished, tmp_path):
    result = experiment(devices=1, evaluation_greedy=False).run(tmp_path / "run", quiet=True)
    assert bits_of(result.state) == bits_of(finished.state)
    assert [one.summary["evaluation"]["greedy"] for one in (finished, result)] == [True, False]


def test_where_things_run_may_change_between_a_run_and_its_continuation(tmp_path, interrupted_after_5):
    interrupted_after_5(experiment(devices=1), tmp_path / "run")
    saved = saved_state(tmp_path / "run")[0]
    places = {"threads_per_actor_device": 1, "actor_devices": (3,), "learner_devices": (1, 2), "step_timeout": 9.0}
    architecture = dataclasses.replace(experiment().architecture, **places)
    result = experiment(architecture=architecture).run(tmp_path / "run", resume=True, quiet=True)
    assert saved < result.summary["updates"] == result.state.updates == 12
    assert {shard.device for shard in result.state.updates.addressable_shards} == set(jax.devices()[1:3])


def test_what_is_learnt_may_not(finished):
    architecture = dataclasses.replace(experiment().architecture, max_lag=0)
    with pytest.raises(ValueError, match=r"architecture\.max_lag"):
        experiment(architecture=architecture).run(finished.run_dir, resume=True)


def test_an_environment_on_the_host_is_refused_under_anakin():
    from podracer.anakin import AnakinConfig

    with pytest.raises(ValueError, match=r"toys:Scripted is not written in JAX.*--architecture sebulba"):
        experiment(architecture=AnakinConfig(8, 5)).make()


ATARI = {
    "ale": ("ale:pong", {}),
    "envpool": ("envpool:Pong-v5", {}),
    "envpool, two at a time": ("envpool:Pong-v5", {"batch_size": 2}),
}


@pytest.mark.parametrize("name", ATARI)
def test_pixels_of_games_arrive_as_bytes_and_are_learnt_from(name):
    env, parameters = ATARI[name]
    network = NetworkConfig(torso="impala", channels=(2, 2), hidden_sizes=(8,), shared=True)
    pong = podracer.experiments.get(
        "impala_pong",
        env=env,
        env_parameters=parameters,
        agent=IMPALAConfig(reward_clip=1.0, network=network),
        architecture=SebulbaConfig(num_envs=4, rollout_length=4, threads_per_actor_device=1),
        devices=1,
    )
    sebulba = pong.make_architecture()
    seen, assemble = [], sebulba._learning.assemble
    sebulba._learning.assemble = lambda parts: seen.append(assemble(parts)) or seen[-1]
    with sebulba:
        before = sebulba.init(0)
        weights = bits_of(before.learner.params)
        state, window = sebulba.run(before, 2)
    (trajectory,) = seen[-1]
    observation = trajectory.timestep.observation
    assert (observation.shape, observation.dtype) == ((5, 4, 84, 84, 4), "uint8")
    assert len(np.unique(observation)) > 2
    window.summarize()  # Everything is finite.
    assert int(window.env_steps) == 2 * 4 * 4
    assert bits_of(state.learner.params) != weights


@pytest.mark.parametrize("name", ["Blackjack-v1", "Tree-v0"])
def test_observations_of_any_structure_go_from_gymnasium_to_a_resumed_run(
    name, tmp_path, interrupted_after_5, monkeypatch
):
    """A tuple of numbers, and a tree with every kind of leaf and an action mask."""
    own = dict(gymnasium.registry)
    monkeypatch.setattr(gymnasium, "registry", own)
    monkeypatch.setattr(gymnasium.envs.registration, "registry", own)
    gymnasium.register("Tree-v0", gymnasium_toys.Hidden)
    agent = PPOConfig(num_minibatches=2, network=NetworkConfig(hidden_sizes=(4,), recurrent_size=3))
    changes = {"env": f"gymnasium:{name}", "agent": agent, "devices": 1}
    interrupted_after_5(experiment(**changes), tmp_path / "run")
    result = experiment(**changes).run(tmp_path / "run", resume=True, quiet=True)
    assert result.summary["updates"] == 12
    assert result.evaluation.summary()["episodes"] == 4
    loaded = load_policy(tmp_path / "run")
    again = evaluate(loaded.agent, loaded.environment, loaded.params, loaded.key(), 4)
    assert again.summary() == result.evaluation.summary()


def test_a_jax_environment_runs_under_sebulba(tmp_path):
    changes = {"env": "podracer:Catch", "env_parameters": {"rows": 3, "columns": 3}, "devices": 1}
    result = experiment(**changes).run(tmp_path / "run", quiet=True)
    assert result.summary["evaluation"]["episodes"] == 4


_started = []


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    for process in _started:
        process.kill()
        process.communicate()
    _started.clear()


def start(*arguments, script=""):
    """`podracer` in a process of its own."""
    beginning = f"""
        import signal, sys
        # Shells have background jobs ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from podracer import cli
        {script}
        cli.main(sys.argv[1:])
    """
    command = [sys.executable, "-c", textwrap.dedent(beginning), "--import", "sebulba.toy_runs", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(TESTS), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    _started.append(subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes))
    return _started[-1]


def wait_for_updates(process, run_dir, count):
    metrics, end = run_dir / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.is_file() and metrics.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.02)


def ends_with(process, code, within):
    began = time.monotonic()
    _, error = process.communicate(timeout=200)
    assert process.returncode == code, error
    assert time.monotonic() - began < within
    assert "Traceback" not in error
    return error.splitlines()


@pytest.mark.parametrize("lag", [0, 1])
def test_ctrl_c_saves_and_exits_with_130(lag, tmp_path):
    """Without lag it falls into the wait for trajectories, of steps that take their time."""
    run_dir = tmp_path / "run"
    options = ["--architecture.max-lag", lag, "--env-parameters", "delay", "0.05", "--total-steps", "1e5"]
    process = start("train", "tiny_scripted", "--quiet", "--run-dir", run_dir, *options)
    wait_for_updates(process, run_dir, 3)
    process.send_signal(signal.SIGINT)
    assert ends_with(process, 130, 10)[-1] == "podracer: interrupted"
    update, _, _ = saved_state(run_dir)
    assert update == metrics_of(run_dir)[-1]["updates"]


def test_ctrl_c_is_heard_while_environments_hang(tmp_path):
    run_dir = tmp_path / "run"
    options = ["--env-parameters", "hang_at", "13", "--architecture.step-timeout", "100"]
    process = start("train", "tiny_scripted", "--quiet", "--run-dir", run_dir, *options)
    wait_for_updates(process, run_dir, 2)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert ends_with(process, 130, 10)[-1] == "podracer: interrupted"
    assert saved_state(run_dir)[0] == 2


# An update that no device has done in time, though two before were saved.
STALLS = (
    "import jax, time; from tiny_runs import Tiny; update = Tiny.update; wait = lambda n: "
    "n == 2 and (print(flush=True), time.sleep(60)); Tiny.update = lambda self, learner, *a, **k: ("
    "jax.debug.callback(wait, learner['updates']), update(self, learner, *a, **k))[1]"
)
# What prints a line when the command is there, and the options that keep it there.
STAGES = {
    # A call of C, which hears nothing before it is done: as XLA is.
    "compiling": (
        "import hashlib, jax; jax.stages.Lowered.compile = "
        'lambda *a: print(flush=True) or hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)',
        [],
    ),
    "updating": (STALLS, []),
    "making environments": (
        "from sebulba import toy_runs as t; made = t.ScriptedEnvironment.__init__; "
        "t.ScriptedEnvironment.__init__ = lambda *a: a[2].num_envs > 1 and print(flush=True) or made(*a)",
        ["make_delay", "60"],
    ),
    # At a step that training does not come to.
    "evaluating": (
        "from podracer import training; evaluate = training.evaluate; "
        "training.evaluate = lambda *a, **k: print(flush=True) or evaluate(*a, **k)",
        ["hang_at", "80", "length", "100"],
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_is_heard_at_every_stage(stage, tmp_path):
    script, parameters = STAGES[stage]
    options = ["--architecture.step-timeout", "100", *(["--env-parameters", *parameters] if parameters else [])]
    process = start("train", "tiny_scripted", "--quiet", "--run-dir", tmp_path / "run", *options, script=script)
    too_late = threading.Timer(200, process.kill)
    too_late.start()
    assert process.stdout.readline() == "\n", process.communicate()[1]
    too_late.cancel()
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    lost = " before what was under way had ended; what was saved is kept" * (stage in ("compiling", "updating"))
    assert ends_with(process, 130, 10)[-1] == f"podracer: interrupted{lost}"
    if stage in ("updating", "evaluating"):
        assert saved_state(tmp_path / "run")[0] == {"updating": 2, "evaluating": 12}[stage]


def test_a_run_that_ends_early_says_where_its_time_went(tmp_path):
    options = ["--run-dir", tmp_path / "run", "--env-parameters", "fail_at", "28"]
    lines = ends_with(start("train", "tiny_scripted", *options), 1, 200)
    actors, learner, bottleneck, error = lines[-4:]
    assert actors.startswith("time of the actors: ")
    assert "step " in actors
    assert learner.startswith("time of the learner: ")
    assert bottleneck.startswith("bottleneck: ")
    assert "the emulator crashed" in error


def test_environments_that_were_made_anew_are_told_and_counted(tmp_path, capsys):
    architecture = dataclasses.replace(experiment().architecture, max_restarts=1)
    script = {"fail_at": 28, "fail_times": 1}
    result = experiment(devices=1, architecture=architecture, env_parameters=script).run(tmp_path / "run", quiet=True)
    # Of the 28th step: the third in a rollout of 5, by 4 environments.
    assert (result.summary["environment_restarts"], result.summary["discarded_rows"]) == (1, 8)
    told = [line for line in capsys.readouterr().err.splitlines() if "crashed" in line]
    assert len(told) == 1
    assert told[0].endswith("step: RuntimeError: the emulator crashed; made anew, 1 of 1")


def test_a_crash_is_one_line_and_exit_code_1_and_keeps_the_last_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    options = ["--env-parameters", "fail_at", "28"]
    process = start("train", "tiny_scripted", "--quiet", "--run-dir", run_dir, *options)
    error = ends_with(process, 1, 200)[-1]
    # It failed in the update after the last that was logged.
    assert time.time() - (run_dir / "metrics.jsonl").stat().st_mtime < 5
    assert "actor 0 on" in error
    assert "toys:Scripted 0 to 3: step: RuntimeError: the emulator crashed" in error
    assert saved_state(run_dir)[0] == 4


def test_an_environment_that_hangs_ends_the_run_with_exit_code_1(tmp_path):
    run_dir = tmp_path / "run"
    process = start("train", "tiny_scripted", "--quiet", "--run-dir", run_dir, "--env-parameters", "hang_at", "13")
    wait_for_updates(process, run_dir, 2)
    note, error = ends_with(process, 1, 10)[-2:]
    assert note.endswith("toys:Scripted 0 to 3 did not end")
    assert "toys:Scripted 0 to 3: step has not come back" in error
    assert saved_state(run_dir)[0] == 2


def test_a_device_that_hangs_ends_the_run_and_the_process(tmp_path):
    options = ["--quiet", "--run-dir", tmp_path / "run", "--architecture.device-timeout", "2"]
    process = start("train", "tiny_scripted", *options, script=STALLS)
    assert process.stdout.readline() == "\n", process.communicate()[1]
    error = ends_with(process, 1, 10)[-1]
    assert "TimeoutError: update 2 has not come back for 2.0 s; the limit is device_timeout, 2 s" in error
    assert saved_state(tmp_path / "run")[0] == 2


@pytest.fixture
def fails(capsys):
    """A command that has to end with exit code 1 and no thread; gives the last line of its error."""

    def run(*arguments, since=time.time):
        with pytest.raises(SystemExit) as stopped:
            cli.main([str(argument) for argument in arguments])
        assert stopped.value.code == 1
        assert time.time() - since() < 5
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("actor")]
        return capsys.readouterr().err.splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("module", "name", "saved"),
    [(Learning, "update", 4), (training.JsonlLogger, "write", 4), (training, "evaluate", 12)],
)
def test_what_breaks_anywhere_ends_the_run_and_keeps_the_last_checkpoint(
    module, name, saved, fails, tmp_path, monkeypatch
):
    calls, function = [], getattr(module, name)

    def breaks(*arguments, **options):
        calls.append(time.time())
        if len(calls) == 6 or name == "evaluate":
            raise RuntimeError("it broke")
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, breaks)
    options = "--quiet", "--run-dir", tmp_path / "run", "--devices", 1
    error = fails("train", "tiny_scripted", *options, since=lambda: calls[-1])
    assert "it broke" in error
    assert saved_state(tmp_path / "run")[0] == saved


def test_environments_that_fail_in_evaluation_end_the_run_and_keep_the_last_checkpoint(fails, tmp_path):
    """At a step that training does not come to."""
    options = ["--quiet", "--run-dir", tmp_path / "run", "--devices", 1]
    script = ["--env-parameters", "fail_at", 80, "length", 100]
    last = tmp_path / "run" / "metrics.jsonl"
    error = fails("train", "tiny_scripted", *options, *script, since=lambda: last.stat().st_mtime)
    assert "environments toys:Scripted: step: RuntimeError: the emulator crashed" in error
    assert saved_state(tmp_path / "run")[0] == 12


def test_a_reward_that_is_no_number_ends_the_run_and_is_named(fails, tmp_path):
    options = ["--run-dir", tmp_path / "run", "--devices", 1, "--env-parameters", "nan_at", 22]
    error = fails("train", "tiny_scripted", "--quiet", *options)
    # Update 5 has the steps 21 to 25.
    assert error == "podracer: reward was not finite at update 5; the last checkpoint is of update 4"


def children_of(process):
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def in_processes(run_dir):
    """A run whose environments are in two processes for each of two threads, once it makes progress."""
    options = ["--env", "gymnasium:CartPole-v1", "--env-parameters", "vectorization", "async", "num_processes", "2"]
    process = start("train", "tiny_scripted", "--quiet", "--run-dir", run_dir, "--total-steps", "1e6", *options)
    wait_for_updates(process, run_dir, 3)
    children = children_of(process)
    assert len(children) == 4
    return process, children


def are_gone(pids):
    end = time.monotonic() + 5
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_environment_process_that_dies_ends_the_run_and_leaves_no_other(tmp_path):
    process, children = in_processes(tmp_path / "run")
    os.kill(children[1], signal.SIGKILL)
    error = ends_with(process, 1, 10)[-1]
    assert "gymnasium:CartPole-v1" in error
    assert "SIGKILL" in error
    assert are_gone(children)


def test_ctrl_c_in_a_terminal_leaves_no_environment_process(tmp_path):
    """Which sends it to all processes of the command."""
    process, children = in_processes(tmp_path / "run")
    os.killpg(process.pid, signal.SIGINT)
    assert ends_with(process, 130, 10)[-1] == "podracer: interrupted"
    assert are_gone(children)


def test_an_environment_that_hangs_while_it_is_evaluated_is_named():
    architecture = dataclasses.replace(experiment().architecture, step_timeout=0.5)
    environment, agent = experiment(architecture=architecture, env_parameters={"hang_at": 2}).make()
    params = agent.actor_params(agent.init(jax.random.key(0)))
    with pytest.raises(TimeoutError, match=r"environments toys:Scripted: step has not come back for 0.5 s"):
        evaluate(agent, environment, params, jax.random.key(0), 4)


@pytest.mark.parametrize("serial", [False, True])
def test_serial_runs_everything_of_the_environments_in_the_main_thread(serial, tmp_path, monkeypatch):
    """So that a debugger that stops there stops all, and no time-out ends the run meanwhile."""
    threads, emit = set(), ScriptedEnvironment._emit
    monkeypatch.setattr(
        ScriptedEnvironment, "_emit", lambda self: threads.add(threading.current_thread()) or emit(self)
    )
    architecture = dataclasses.replace(experiment().architecture, serial=serial)
    experiment(devices=1, architecture=architecture, total_steps=80).run(tmp_path / "run", quiet=True)
    assert (threads == {threading.main_thread()}) == serial


def test_every_command_takes_a_run_under_sebulba(finished, capsys, tmp_path):
    def outputs(*arguments):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["--import", "sebulba.toy_runs", *map(str, arguments)])
        output = capsys.readouterr()
        assert stopped.value.code == 0, output.err
        return output.out

    shown = json.loads(outputs("evaluate", finished.run_dir, "--episodes", 4, "--json"))
    assert (shown["mean"], shown["episodes"], shown["updates"]) == (3.0, 4, 12)
    assert shown["greedy"]
    explored = json.loads(outputs("evaluate", finished.run_dir, "--episodes", 4, "--json", "--greedy", "False"))
    assert not explored["greedy"]
    outputs("record", finished.run_dir, "--out", tmp_path / "episode.gif")
    outputs("plot", finished.run_dir, "--out", tmp_path / "curve.png")
    assert {path.name for path in tmp_path.iterdir()} >= {"episode.gif", "curve.png"}
    before = bits_of(finished.state)
    outputs("resume", finished.run_dir, "--quiet")
    assert saved_state(finished.run_dir)[1] == before


def test_the_configuration_is_read_back(finished):
    values = json.loads((finished.run_dir / "config.json").read_text())
    assert values["architecture"]["name"] == "sebulba"
    assert isinstance(load_policy(finished.run_dir).experiment.architecture, SebulbaConfig)

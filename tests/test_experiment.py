import dataclasses
import json
import math

import jax
import numpy as np
import pytest
import tiny_runs
from tiny_runs import TinyConfig

from podracer import experiments
from podracer.agents import PPOConfig
from podracer.anakin import AnakinConfig
from podracer.experiment import CheckpointConfig, Experiment
from podracer.networks import NetworkConfig


@pytest.mark.parametrize("name", experiments.names())
def test_every_experiment_is_the_same_after_json(name):
    experiment = experiments.get(name)
    assert Experiment.from_dict(json.loads(json.dumps(experiment.to_dict()))) == experiment
    assert experiment.name == name


def test_every_field_survives_json():
    experiment = Experiment(
        name="all",
        env="gymnax:CartPole-v1",
        agent=PPOConfig(
            learning_rate=1e-3,
            value_clip=None,
            target_kl=0.01,
            normalize_observations=True,
            network=NetworkConfig(torso="cnn", hidden_sizes=(), channels=(4, 8), activation="silu"),
        ),
        env_parameters={"max_steps_in_episode": 7, "a": True, "b": 0.5, "c": "text"},
        architecture=AnakinConfig(num_envs=6, rollout_length=5),
        seed=2**32 - 1,
        total_steps=2**35,
        devices=3,
        updates_per_window=17,
        evaluation_episodes=9,
        evaluation_greedy=False,
        stop_on_nonfinite=False,
        checkpoints=CheckpointConfig(interval=0, keep_last=5, keep_best=0),
    )
    again = Experiment.from_dict(json.loads(json.dumps(experiment.to_dict())))
    assert again == experiment
    assert hash(again.agent) == hash(experiment.agent)
    for field in dataclasses.fields(Experiment):
        default = experiments.get("ppo_cartpole")
        assert getattr(experiment, field.name) != getattr(default, field.name) or field.name == "env", field.name


def test_a_field_that_is_left_out_has_its_default():
    experiment = Experiment.from_dict({"name": "short", "env": "podracer:Catch", "agent": {"name": "tiny"}})
    assert experiment == Experiment(name="short", env="podracer:Catch", agent=TinyConfig())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 1}, r"no field 'learning_rate'"),
        ({"total_step": 1}, r"no field 'total_step'; nearest: total_steps"),
        (
            {"agent": {"name": "tiny", "learning_rat": 1}},
            r"no field 'agent.learning_rat'; nearest: agent.learning_rate",
        ),
        ({"agent": {"name": "tyni"}}, r"no agent 'tyni'; nearest: tiny"),
        ({"agent": {}}, r"no agent ''"),
        ({"agent": "tiny"}, r"an agent, which is one with a name"),
        ({"agent": {"name": "tiny", "learning_rate": "fast"}}, r"agent.learning_rate is 'fast', which is of the wrong"),
        ({"agent": {"name": "tiny", "learning_rate": math.nan}}, r"learning_rate is nan; it must be a finite number"),
        (
            {"agent": {"name": "tiny", "learning_rate": True}},
            r"agent.learning_rate is True, which is of the wrong type",
        ),
        ({"agent": {"name": "tiny", "bias": "false"}}, r"agent.bias is 'false', which is of the wrong type"),
        ({"agent": {"name": "tiny", "sizes": [1, "2"]}}, r"agent.sizes is \[1, '2'\], which is of the wrong type"),
        (
            {"agent": {"name": "ppo", "network": {"torso": "rnn"}}},
            r"agent.network.torso is 'rnn', which is of the wrong",
        ),
        ({"agent": {"name": "ppo", "network": None}}, r"agent.network is None, which is of the wrong type"),
        ({"seed": 1.0}, r"seed is 1.0, which is of the wrong type"),
        ({"devices": "all"}, r"devices is 'all', which is of the wrong type"),
        ({"env": None}, r"env is None, which is of the wrong type"),
        ({"env_parameters": {"rows": [1]}}, r"env_parameters is .*, which is of the wrong type"),
        ({"env_parameters": ["rows"]}, r"env_parameters is .*, which is of the wrong type"),
        ({"architecture": {"num_envs": 0}}, r"num_envs is 0; it must be an integer of at least 1"),
        ({"architecture": 8}, r"architecture is 8, which is of the wrong type"),
        ({"checkpoints": {"interval": -1}}, r"interval is -1; it must be at least 0"),
        ({"checkpoints": {"keep_last": 0}}, r"keep_last is 0"),
        ({"total_steps": 100}, r"total_steps is 100, less than one update of 64 environments x 128 steps = 8,192"),
    ],
)
def test_what_json_may_not_say(change, message):
    values = {"name": "n", "env": "podracer:Catch", "agent": {"name": "tiny"}}
    with pytest.raises(ValueError, match=message):
        Experiment.from_dict(values | change)


@pytest.mark.parametrize("values", [[], "text", {}, {"name": "n", "env": "e"}, None])
def test_what_is_not_an_experiment_at_all(values):
    with pytest.raises(ValueError, match="an experiment is an object with an agent"):
        Experiment.from_dict(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": -1}, r"seed is -1; it must be within \[0, 2\^32\)"),
        ({"seed": 2**32}, r"seed is 4294967296"),
        ({"seed": 0.5}, r"seed is 0.5; it must be an integer"),
        ({"total_steps": 31}, r"total_steps is 31, less than one update of 8 environments x 4 steps = 32"),
        ({"total_steps": -5}, r"total_steps is -5"),
        ({"total_steps": math.nan}, r"total_steps is nan; it must be an integer"),
        ({"total_steps": 1e6}, r"total_steps is 1000000.0; it must be an integer"),
        ({"total_steps": 32 * 2**31}, r"makes 2,147,483,648 updates of .*; at most 2,147,483,647 are counted"),
        ({"devices": 0}, r"devices is 0; it must be at least 1"),
        ({"devices": "2"}, r"devices is '2'; it must be an integer"),
        ({"updates_per_window": 0}, r"updates_per_window is 0; it must be at least 1"),
        ({"updates_per_window": 2**26, "total_steps": 2**35}, r"67,108,864 updates of .* are too many for one call"),
        ({"evaluation_episodes": 0}, r"evaluation_episodes is 0; it must be at least 1"),
        ({"evaluation_episodes": None}, r"evaluation_episodes is None; it must be an integer"),
        ({"agent": None}, r"agent is None; a configuration such as podracer.agents.PPOConfig is needed"),
    ],
)
def test_what_no_experiment_may_be(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_runs.experiment(**changes)


def test_one_update_may_be_all_that_a_call_can_count():
    architecture = AnakinConfig(num_envs=2**20, rollout_length=2**10)
    assert tiny_runs.experiment(architecture=architecture, total_steps=2**40).window == 1
    with pytest.raises(ValueError, match=r"1 update of .* = 2,147,483,648 are too many"):
        tiny_runs.experiment(architecture=AnakinConfig(2**20, 2**11), total_steps=2**40, updates_per_window=None)


def test_total_steps_are_rounded_down_to_whole_updates():
    experiment = tiny_runs.experiment(architecture=AnakinConfig(num_envs=4, rollout_length=128), total_steps=10_000)
    assert (experiment.num_updates, experiment.num_updates * experiment.steps_per_update) == (19, 9_728)


@pytest.mark.parametrize(
    ("total_steps", "updates_per_window", "interval", "window", "checkpoint_interval"),
    [
        (32 * 100, None, None, 1, 5),  # About twenty checkpoints.
        (32 * 1000, None, None, 5, 50),  # About two hundred windows.
        (32 * 2**30, None, None, 8192, 53_690_368),  # Never longer than Ctrl-C and the progress bar can wait.
        (32 * 100, 7, None, 7, 7),
        (32 * 100, 7, 15, 7, 21),  # Rounded up to whole windows.
        (32 * 100, 7, 0, 7, 0),
        (32 * 100, 500, 1, 100, 100),
    ],
)
def test_windows_and_checkpoints(total_steps, updates_per_window, interval, window, checkpoint_interval):
    experiment = tiny_runs.experiment(
        total_steps=total_steps,
        updates_per_window=updates_per_window,
        checkpoints=CheckpointConfig(interval=interval),
    )
    assert (experiment.window, experiment.checkpoint_interval) == (window, checkpoint_interval)


@pytest.mark.parametrize(
    ("num_envs", "rollout_length", "devices", "chosen"),
    [
        (8, 4, None, 1),  # Too little to do to be worth dividing.
        (2048, 64, None, 8),
        (60, 128, None, 3),  # 7,680 rows are enough for three.
        (62, 128, None, 2),  # Enough for three, which do not divide 62.
        (8, 4, 4, 4),
    ],
)
def test_devices_of_a_cpu_are_used_where_they_are_worth_it(num_envs, rollout_length, devices, chosen):
    architecture = AnakinConfig(num_envs=num_envs, rollout_length=rollout_length)
    experiment = tiny_runs.experiment(architecture=architecture, devices=devices, total_steps=2**30)
    assert experiment._device_choices()[0] == jax.devices()[:chosen]


@pytest.mark.parametrize(("minibatches", "chosen"), [(8, 2), (16, 1)])
def test_no_more_devices_are_chosen_than_the_agent_can_divide_its_work_among(minibatches, chosen):
    """16 environments in sequences: 8 minibatches of 1 on each of two devices, 16 on one only."""
    agent = PPOConfig(num_minibatches=minibatches, network=NetworkConfig(hidden_sizes=(), recurrent_size=2))
    architecture = AnakinConfig(num_envs=16, rollout_length=256)
    changes = {
        "env": "podracer:Catch",
        "agent": agent,
        "architecture": architecture,
        "devices": None,
        "total_steps": 2**20,
    }
    assert tiny_runs.experiment(**changes).make_architecture().mesh.size == chosen
    changes["agent"] = dataclasses.replace(agent, num_minibatches=32)
    with pytest.raises(ValueError, match="num_minibatches is 32"):
        tiny_runs.experiment(**changes).make_architecture()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent": TinyConfig(learning_rate=np.float32(0.5))}, r"agent.learning_rate is .*0.5.*, of type float32"),
        ({"seed": np.int64(1)}, r"seed is .*1.*; it must be an integer"),
        ({"env_parameters": {"rows": np.int64(5)}}, r"env_parameters.rows is .*5.*, of type int64"),
        ({"env_parameters": {"rows": (5, 6)}}, r"env_parameters is .*, which is of the wrong type"),
        ({"env_parameters": {"rows": math.inf}}, r"env_parameters.rows is inf, of type float"),
    ],
)
def test_what_config_json_could_not_give_back(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_runs.experiment(**changes).check_can_be_saved()


@pytest.mark.parametrize("name", experiments.names())
def test_every_experiment_can_run(name):
    """Tracing finds everything that is refused."""
    experiments.get(name, devices=1).make_architecture()


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match="devices is 9; this machine has 8"):
        tiny_runs.experiment(devices=9).make_architecture()


def test_names_of_experiments():
    assert experiments.get("ppo_breakout_minatar").env == "gymnax:Breakout-MinAtar"
    assert experiments.get("tiny_catch", seed=3).seed == 3
    assert list(experiments.names()) == sorted(experiments.names())
    with pytest.raises(ValueError, match="no experiment 'ppo_breakot_minatar'; nearest: ppo_breakout_minatar"):
        experiments.get("ppo_breakot_minatar")
    with pytest.raises(ValueError, match="no field 'sed'; nearest: seed"):
        experiments.get("tiny_catch", sed=1)
    experiments.register(tiny_runs.experiment())  # The same one again.
    with pytest.raises(ValueError, match="there is an experiment 'tiny_catch' already"):
        experiments.register(tiny_runs.experiment(seed=1))

"""Experiments by name, `agent_environment`. Their results are in docs/results.md."""

import dataclasses
from typing import Any

from podracer.agents.impala import IMPALAConfig
from podracer.agents.ppo import PPOConfig
from podracer.anakin import AnakinConfig
from podracer.envs.names import unknown_name
from podracer.experiment import Experiment
from podracer.networks import NetworkConfig
from podracer.sebulba import SebulbaConfig

_experiments: dict[str, Experiment] = {}


def register(experiment: Experiment) -> Experiment:
    """Makes an experiment known by its name.

    Raises:
        ValueError: Another experiment has the name.
    """
    if _experiments.setdefault(experiment.name, experiment) != experiment:
        raise ValueError(f"there is an experiment {experiment.name!r} already")
    return experiment


def get(name: str, /, **changes: Any) -> Experiment:
    """A named experiment, with some of its fields changed.

    Raises:
        ValueError: There is none of this name, or it has no such field; the nearest are named.
    """
    if name not in _experiments:
        raise unknown_name("experiment", name, list(_experiments))
    fields = [field.name for field in dataclasses.fields(Experiment)]
    for field in changes:
        if field not in fields:
            raise unknown_name("field", field, fields)
    return dataclasses.replace(_experiments[name], **changes)


def names() -> tuple[str, ...]:
    """All names, in order."""
    return tuple(sorted(_experiments))


_CARTPOLE_PPO = PPOConfig(learning_rate=1e-3, num_minibatches=4, network=NetworkConfig(shared=True))
_MINATAR_PPO = PPOConfig(
    learning_rate=2.5e-3,
    num_epochs=4,
    num_minibatches=8,
    # From high to none: with a constant 0.01 some seeds of Breakout settle for a loop that leaves one brick.
    entropy_coefficient=0.03,
    entropy_coefficient_end=0.0,
    network=NetworkConfig(hidden_sizes=(64, 64), activation="relu", shared=True),
)

register(
    Experiment(
        name="ppo_cartpole",
        env="gymnax:CartPole-v1",
        agent=_CARTPOLE_PPO,
        architecture=AnakinConfig(num_envs=4, rollout_length=128),
        total_steps=500_000,
    )
)
# In Asterix and SpaceInvaders what happens soon tells good actions from bad; a longer trace adds the luck of later.
for _name, _game, _gae_lambda in (
    ("breakout", "Breakout", 0.95),
    ("asterix", "Asterix", 0.7),
    ("freeway", "Freeway", 0.95),
    ("space_invaders", "SpaceInvaders", 0.7),
):
    register(
        Experiment(
            name=f"ppo_{_name}_minatar",
            env=f"gymnax:{_game}-MinAtar",
            agent=dataclasses.replace(_MINATAR_PPO, gae_lambda=_gae_lambda),
            architecture=AnakinConfig(num_envs=64, rollout_length=128),
            total_steps=10_000_000,
        )
    )
register(
    Experiment(
        name="ppo_acrobot",
        env="gymnax:Acrobot-v1",
        agent=PPOConfig(learning_rate=1e-3, num_minibatches=8, network=NetworkConfig(shared=True)),
        architecture=AnakinConfig(num_envs=32, rollout_length=128),
        total_steps=3_000_000,
    )
)
register(
    Experiment(
        name="ppo_pendulum",
        env="gymnax:Pendulum-v1",
        agent=PPOConfig(
            learning_rate=1e-3,
            discount=0.95,
            num_epochs=10,
            num_minibatches=16,
            entropy_coefficient=0.0,
            normalize_observations=True,
            scale_rewards=True,
        ),
        architecture=AnakinConfig(num_envs=16, rollout_length=128),
        total_steps=1_000_000,
    )
)
register(
    Experiment(
        name="ppo_mountain_car_continuous",
        env="gymnax:MountainCarContinuous-v0",
        agent=PPOConfig(
            learning_rate=1e-3,
            discount=0.999,
            num_epochs=10,
            num_minibatches=8,
            # Doing nothing is the nearest optimum: only full force at random reaches the goal before that is learnt.
            entropy_coefficient=0.3,
            entropy_coefficient_end=0.0,
            normalize_observations=True,
            scale_rewards=True,
        ),
        architecture=AnakinConfig(num_envs=32, rollout_length=256),
        total_steps=1_000_000,
    )
)
# The cue of the first step decides what the eleventh is worth: without memory every policy has mean return 0.
register(
    Experiment(
        name="ppo_memory",
        env="podracer:ProbeMemory",
        env_parameters={"length": 10},
        agent=PPOConfig(
            learning_rate=1e-3,
            num_minibatches=4,
            network=NetworkConfig(hidden_sizes=(32,), shared=True, recurrent_size=32),
        ),
        architecture=AnakinConfig(num_envs=64, rollout_length=32),
        total_steps=500_000,
    )
)
register(
    Experiment(
        name="impala_breakout_minatar",
        env="gymnax:Breakout-MinAtar",
        agent=IMPALAConfig(
            optimizer="adam",
            learning_rate=2e-3,
            loss_reduction="mean",
            max_grad_norm=0.5,
            lambda_=0.95,
            num_minibatches=4,
            # With less of it, or with advantages as they are, policies settle for a loop that ends after 7 bricks.
            normalize_advantages=True,
            entropy_coefficient=0.15,
            entropy_coefficient_end=0.0,
            network=_MINATAR_PPO.network,
        ),
        architecture=AnakinConfig(num_envs=64, rollout_length=16),
        total_steps=10_000_000,
    )
)

# On the host, under Sebulba.
register(
    Experiment(
        name="ppo_cartpole_gymnasium",
        env="gymnasium:CartPole-v1",
        agent=_CARTPOLE_PPO,
        # Environments in Python: with two threads, each waits for the other's lock, and both make half as many steps.
        architecture=SebulbaConfig(num_envs=16, rollout_length=64, threads_per_actor_device=1),
        total_steps=500_000,
    )
)
register(
    Experiment(
        name="ppo_half_cheetah",
        env="envpool:HalfCheetah-v4",
        agent=PPOConfig(
            learning_rate=3e-4,
            num_epochs=10,
            num_minibatches=16,
            entropy_coefficient=0.0,
            normalize_observations=True,
            scale_rewards=True,
        ),
        architecture=SebulbaConfig(num_envs=16, rollout_length=128, threads_per_actor_device=1),
        total_steps=2_000_000,
        evaluation_episodes=32,
    )
)
# Atari: steps of four frames, so that 3e6 steps are 12 million frames. Evaluated as they explore: Pong leaves so little
# to chance that 20 greedy games came to 4 different scores, by lines of play that repeat each other.
register(
    Experiment(
        name="ppo_pong",
        env="ale:pong",
        agent=PPOConfig(
            # With an entropy coefficient of 0.01, actions settle before the ball has been met often enough: at learning
            # rates of 7e-4 and 1e-3 nothing was learnt for a million steps, and some seeds ended at 13 and 17.
            learning_rate=7e-4,
            learning_rate_end=1e-4,
            num_epochs=2,
            num_minibatches=8,
            value_clip=None,
            entropy_coefficient=0.03,
            entropy_coefficient_end=0.0,
            reward_clip=1.0,
            network=NetworkConfig(torso="impala", shared=True),
        ),
        architecture=SebulbaConfig(num_envs=32, rollout_length=32),
        total_steps=3_000_000,
        evaluation_episodes=10,
        evaluation_greedy=False,
    )
)
register(
    Experiment(
        name="impala_pong",
        env="ale:pong",
        agent=IMPALAConfig(reward_clip=1.0, network=NetworkConfig(torso="impala", shared=True)),
        architecture=SebulbaConfig(num_envs=64, rollout_length=20),
        total_steps=3_000_000,
        evaluation_episodes=10,
        evaluation_greedy=False,
    )
)

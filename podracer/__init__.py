"""Reinforcement learning at scale in JAX: one agent definition, two architectures, any number of devices."""

from podracer import agents, envs, experiments, networks
from podracer.agent import ActorOutput, Agent
from podracer.anakin import Anakin, AnakinConfig, AnakinState
from podracer.evaluate import Evaluation, Evaluator, evaluate
from podracer.experiment import CheckpointConfig, Experiment
from podracer.types import (
    ArraySpec,
    BoundedSpec,
    DiscreteSpec,
    EnvironmentSpec,
    MaskedObservation,
    MultiDiscreteSpec,
    StepType,
    TimeStep,
    Trajectory,
    valid_mask,
)

__version__ = "0.1.0"

__all__ = [
    "ActorOutput",
    "Agent",
    "Anakin",
    "AnakinConfig",
    "AnakinState",
    "ArraySpec",
    "BoundedSpec",
    "CheckpointConfig",
    "DiscreteSpec",
    "EnvironmentSpec",
    "Evaluation",
    "Evaluator",
    "Experiment",
    "MaskedObservation",
    "MultiDiscreteSpec",
    "StepType",
    "TimeStep",
    "Trajectory",
    "agents",
    "envs",
    "evaluate",
    "experiments",
    "networks",
    "valid_mask",
]

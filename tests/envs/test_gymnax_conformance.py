"""The conformance suite over every environment that gymnax registers."""

import gymnax as gymnax_package
import numpy as np
import pytest
from gymnax.utils import load_mnist

from podracer import envs
from podracer.envs import gymnax
from podracer.envs.testing import EnvironmentConformance

# What is so on purpose, and short episodes where the default is long.
SHORT = {"max_steps_in_episode": 12}
CASES = {
    "CartPole-v1": ({}, {}),
    "Pendulum-v1": (SHORT, {}),
    "Acrobot-v1": (SHORT, {}),
    "MountainCar-v0": (SHORT, {}),
    "MountainCarContinuous-v0": (SHORT, {}),
    "Asterix-MinAtar": (SHORT, {"deterministic_reset": True}),
    "Breakout-MinAtar": ({}, {}),
    "Freeway-MinAtar": (SHORT, {}),
    "Seaquest-MinAtar": (SHORT, {"deterministic_reset": True}),
    "SpaceInvaders-MinAtar": (SHORT, {"deterministic": True}),
    "Catch-bsuite": ({}, {}),
    "DeepSea-bsuite": ({}, {"deterministic": True}),
    "MemoryChain-bsuite": ({}, {}),
    "UmbrellaChain-bsuite": ({}, {}),
    "DiscountingChain-bsuite": (SHORT, {"deterministic": True}),
    "MNISTBandit-bsuite": ({}, {}),
    "SimpleBandit-bsuite": ({}, {}),
    "FourRooms-misc": (SHORT, {"deterministic_reset": True}),
    "MetaMaze-misc": (SHORT, {}),
    "PointRobot-misc": (SHORT, {}),
    "BernoulliBandit-misc": (SHORT, {}),
    "GaussianBandit-misc": (SHORT, {}),
    "Reacher-misc": (SHORT, {}),
    "Swimmer-misc": (SHORT, {}),
    "Pong-misc": (SHORT, {"deterministic": True}),
    "FrozenLake-misc": ({}, {"deterministic_reset": True}),
}
FAST = ("CartPole-v1", "Pendulum-v1", "Breakout-MinAtar", "FrozenLake-misc")


def _no_download():
    """Sixty pictures of noise in the place of MNIST, which gymnax would download."""
    generator = np.random.default_rng(0)
    images, labels = generator.integers(0, 256, (60, 28, 28), np.uint8), generator.integers(0, 10, 60, np.uint8)
    return (images, labels), (images, labels)


class GymnaxConformance(EnvironmentConformance):
    """The suite for one environment, named by the class made below."""

    name: str
    parameters: dict

    @pytest.fixture(autouse=True)
    def _mnist(self, monkeypatch):
        monkeypatch.setattr(load_mnist, "load_mnist", _no_download)

    def make(self):
        return envs.make(f"gymnax:{self.name}", **self.parameters)


for _name, (_parameters, _declared) in CASES.items():
    _class = "Test" + _name.replace("-", "").replace("_", "")
    _marks = [] if _name in FAST else [pytest.mark.slow]
    globals()[_class] = type(
        _class,
        (GymnaxConformance,),
        {"name": _name, "parameters": _parameters, "num_steps": 60, "pytestmark": _marks, **_declared},
    )


def test_every_registered_environment_is_covered():
    assert set(CASES) == set(gymnax_package.registered_envs) == set(gymnax._NAMES)

"""The environment of docs/your_own_environment.md is what the page says it is."""

import pathlib
import re

import jax
import numpy as np
import pytest

from podracer import envs, experiments
from podracer.envs import Autoreset, registry
from podracer.envs.rendering import render
from podracer.envs.testing import EnvironmentConformance

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "your_own_environment.md"
ENVIRONMENT, TRAINING, CONFORMANCE = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def _execute(code, name):
    """What code of the page defines, in a module called `name`, with the registries left as they were."""
    defined = {"__name__": name}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_environments", dict(registry._environments))
        patch.setattr(experiments, "_experiments", dict(experiments._experiments))
        exec(compile(code, str(PAGE), "exec"), defined)
    return defined


PAGE_DEFINES = _execute(ENVIRONMENT + CONFORMANCE, "your_own_environment")


class TestGridOfThePage(PAGE_DEFINES["TestGrid"]):
    """The suite exactly as the page inherits it."""


def test_the_page_tests_its_environment_with_the_suite():
    assert issubclass(PAGE_DEFINES["TestGrid"], EnvironmentConformance)
    assert PAGE_DEFINES["environment"] == PAGE_DEFINES["Grid"](size=6)
    assert not any(entry.id == "mine:Grid" for entry in envs.list_environments())


@pytest.mark.parametrize("time_limit", [3])
def test_the_page_tells_termination_from_truncation(time_limit):
    stream = Autoreset(PAGE_DEFINES["Grid"](size=4, time_limit=time_limit))
    state, timestep = stream.reset(jax.random.split(jax.random.key(0), 64))
    step = jax.jit(stream.step)
    for t in range(time_limit):
        previous = timestep
        action = envs.sample_action(stream.spec, jax.random.key(t), 64)
        state, timestep = step(state, action, jax.random.split(jax.random.key(t + 50), 64))
    ended = np.asarray(timestep.last())
    reached = np.asarray(timestep.reward) == 1
    assert 0 < reached.sum() < ended.sum()
    np.testing.assert_array_equal(np.asarray(timestep.discount), np.where(reached, 0, 1))
    assert not np.array_equal(previous.observation[ended], timestep.observation[ended])


def test_the_page_draws_its_environment():
    environment = PAGE_DEFINES["environment"]
    state, observation = environment.reset(jax.random.key(0))
    frame = render(environment, state, observation)
    assert frame.shape == (192, 192, 3)
    assert frame.max() == 255


def test_the_page_trains_on_its_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = _execute(ENVIRONMENT + TRAINING, "__main__")["result"]
    assert result.summary["experiment"] == "ppo_grid"
    assert (tmp_path / "runs" / "ppo_grid" / "config.json").exists()
    assert result.evaluation.summary()["mean"] > 0.9
    assert "ppo_grid" not in experiments.names()


def test_the_page_as_a_module_trains_nothing(tmp_path, monkeypatch):
    """The command line imports it to find what it registers."""
    monkeypatch.chdir(tmp_path)
    assert "result" not in _execute(ENVIRONMENT + TRAINING, "my_module")
    assert not list(tmp_path.iterdir())

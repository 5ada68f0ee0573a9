"""The environment of docs/your_own_host_environment.md is what the page says it is."""

import pathlib
import re

import numpy as np
import pytest

from podracer import envs
from podracer.envs import EnvironmentSlice, registry
from podracer.envs.host_testing import HostEnvironmentConformance
from podracer.types import StepType

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "your_own_host_environment.md"
ENVIRONMENT, CONFORMANCE, VECTOR_ENVIRONMENT = re.findall(
    r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
)


def _execute(code, name):
    """What code of the page defines, in a module called `name`, with the registry left as it was."""
    defined = {"__name__": name}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_environments", dict(registry._environments))
        exec(compile(code, str(PAGE), "exec"), defined)
    return defined


PAGE_DEFINES = _execute(ENVIRONMENT + CONFORMANCE + VECTOR_ENVIRONMENT, "your_own_host_environment")


class TestCorridorsOfThePage(PAGE_DEFINES["TestCorridors"]):
    """The suite exactly as the page inherits it."""


def test_the_page_tests_its_environment_with_the_suite():
    assert issubclass(PAGE_DEFINES["TestCorridors"], HostEnvironmentConformance)
    assert PAGE_DEFINES["factory"].name == "mine:Corridors"
    assert PAGE_DEFINES["factory"].spec.observation.shape == (8,)
    assert not any(entry.id == "mine:Corridors" for entry in envs.list_environments())


@pytest.mark.parametrize(("action", "discount", "reward"), [(1, 0, 1), (0, 1, 0)])
def test_the_page_tells_termination_from_truncation(action, discount, reward):
    environment = PAGE_DEFINES["Corridors"](EnvironmentSlice(16), length=4, time_limit=5)
    environment.reset()
    ended = np.zeros(16, bool)
    for _ in range(6):
        timestep = environment.step(np.full(16, action))
        last = timestep.step_type == StepType.LAST
        ended |= last
        assert (timestep.discount == np.where(last, discount, 1)).all()
        assert (timestep.reward == np.where(last, reward, 0)).all()
    assert ended.all()


def test_the_vector_environment_of_the_page_is_stepped():
    carts = PAGE_DEFINES["carts"]
    assert (carts.name, carts.spec.observation.shape) == ("mine:Carts", (4,))
    environment = carts(EnvironmentSlice(3))
    environment.reset()
    lasts = sum(environment.step(np.zeros(3, np.int32)).last() for _ in range(30))
    assert (lasts >= 2).all()
    environment.close()

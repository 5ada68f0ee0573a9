"""The agent of docs/your_own_agent.md, as it is printed there: in the suite, and trained."""

import re
from pathlib import Path
from typing import Any

import pytest

import podracer

PAGE = Path(__file__).parents[2] / "docs" / "your_own_agent.md"
AGENT, CONFORMANCE, TRAINING, REGISTERING = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)

namespace: dict[str, Any] = {"__name__": __name__}
exec(compile(AGENT + CONFORMANCE, str(PAGE), "exec"), namespace)

TestA2C = namespace["TestA2C"]


def test_the_page_trains_the_agent(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(TRAINING, str(PAGE), "exec"), namespace)
    returns = [float(line.removeprefix("mean return ")) for line in capsys.readouterr().out.splitlines()]
    assert len(returns) == 3
    assert returns[0] < returns[2]
    assert returns[2] > 0.9


def test_the_page_makes_an_experiment_of_it() -> None:
    # The page's part before has the imports, and a program that takes its time.
    imports = "\n".join(re.findall(r"^from podracer.*$", TRAINING, re.MULTILINE))
    exec(compile(imports + "\n" + REGISTERING, str(PAGE), "exec"), namespace)
    experiment = podracer.experiments.get("a2c_catch")
    experiment.check_can_be_saved()
    _, agent = experiment.make()
    assert agent == namespace["A2C"](agent.spec, agent.network)


def test_the_agent_is_as_short_as_it_is_said_to_be() -> None:
    assert len(AGENT.splitlines()) < 100
    assert max(map(len, AGENT.splitlines())) <= 120

"""Where time goes and how far policies lag, by hand."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from podracer.sebulba.actor import Rollout
from podracer.sebulba.report import SebulbaWindow, Tally, TimeBudget, bottleneck, shares
from podracer.window import Window

ACTOR = {"make": 0.0, "reset": 0.0, "step": 0.5, "act": 0.2, "transfer": 0.1, "parameters": 0.2}
LEARNER = {"other": 0.0, "trajectories": 0.05, "update": 0.9, "publish": 0.05}


def window(**changes):
    zero = jnp.int32(0)
    sums = Window(
        updates=jnp.int32(2),
        env_steps=jnp.int32(60),
        metrics={"loss": jnp.float32(6)},
        episodes=zero,
        return_sum=jnp.float32(0),
        length_sum=jnp.float32(0),
        nonfinite={"reward": jnp.int32(2**31 - 1)},
    )
    values = {"episodes": (4, 10.0, 24), "lag": {0: 30, 1: 90}, "actor_shares": ACTOR, "learner_shares": LEARNER}
    return SebulbaWindow(sums, 2, **values | changes)


def test_a_summary_has_means_lag_shares_and_losses():
    summary = window(discarded_rows=8, failures=("it crashed",)).summarize()
    assert summary["loss"] == 3
    assert (summary["episodes"], summary["episode_return"], summary["episode_length"]) == (4, 2.5, 6)
    assert (summary["policy_lag"], summary["policy_lag_0"], summary["policy_lag_1"]) == (0.75, 0.25, 0.75)
    assert summary["actor_time_step"] == 0.5
    assert summary["learner_time_update"] == 0.9
    assert (summary["discarded_rows"], summary["environment_restarts"]) == (8, 1)


def test_no_episode_has_no_return():
    assert np.isnan(window(episodes=(0, 0.0, 0)).summarize()["episode_return"])


def test_a_tally_adds_up_rollouts():
    tally = Tally()
    rollouts = [Rollout([], np.array([3, 3, 2]), (1, 5.0, 7)), Rollout([], np.array([1, 2, 2]), (0, 0.0, 0), 6)]
    tally.add(3, rollouts, 4)
    tally.add(4, [Rollout([], np.array([3, 3, 3]), (2, 1.0, 2))], 4)
    assert tally.updates == 2
    assert tally.episodes == (3, 6.0, 9)
    assert tally.lag == {0: 8, 1: 24, 2: 4}
    assert tally.discarded_rows == 6


def test_shares_are_of_the_time_between_two_readings():
    assert shares({"a": 1.0}, {"a": 2.0, "b": 3.0}) == {"a": 0.25, "b": 0.75}
    assert shares({"a": 1.0}, {"a": 1.0}) == {"a": 0.0}


@pytest.mark.parametrize(
    ("actor", "learner", "words"),
    [
        ({"parameters": 0.02, "step": 0.7}, {"trajectories": 0.4}, "the actors: the learner waits 40% .* 70% stepping"),
        ({"parameters": 0.0, "act": 0.8}, {"trajectories": 0.4}, "they spend 80% acting"),
        ({"parameters": 0.5}, {"trajectories": 0.1}, "the learner: actors wait 50% .* 90% updating"),
        ({"parameters": 0.05}, {"trajectories": 0.06}, "balanced: actors wait 5% of their time, the learner 6%"),
    ],
)
def test_the_slower_side_is_said_in_words(actor, learner, words):
    assert re.search(words, bottleneck(ACTOR | actor, LEARNER | learner))


def test_a_budget_weighs_windows_by_their_time():
    budget = TimeBudget()
    assert budget.bottleneck() is None
    assert budget.shares() == {}
    budget.add(window(), 1.0)
    budget.add(window(learner_shares=LEARNER | {"trajectories": 0.95, "update": 0.0}), 3.0)
    assert budget.shares()["learner"]["trajectories"] == pytest.approx((0.05 + 3 * 0.95) / 4)
    assert sum(budget.shares()["actors"].values()) == pytest.approx(1)
    assert budget.bottleneck().startswith("the actors")


def test_a_budget_is_told_in_lines_with_the_largest_first():
    budget = TimeBudget()
    assert budget.lines() == []
    budget.add(window(actor_shares=dict.fromkeys(ACTOR, 0.0) | {"act": 0.25, "step": 0.746, "make": 0.004}), 2.0)
    first, second, last = budget.lines()
    assert first == "time of the actors: step 75%, act 25%"
    assert second.startswith("time of the learner: update 90%")
    assert last == f"bottleneck: {budget.bottleneck()}"

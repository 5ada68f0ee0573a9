"""The tests notice when one token of the mathematics is wrong.

Each row of `MUTATIONS` is made in a copy of the source, and the tests named in the row have to fail there. Where a row
survives, a test is missing. To cover more code, add rows.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Source file, what it says, what it is made to say, and the tests that have to notice: a file, or one test of it.
MUTATIONS = [
    ("ops/advantages.py", "values[1:] - values[:-1]", "values[1:] + values[:-1]", "ops/test_advantages.py"),
    ("ops/advantages.py", "timestep.last()[1:]", "timestep.last()[:-1]", "ops/test_advantages.py"),
    ("ops/advantages.py", "timestep.reward[1:]", "timestep.reward[:-1]", "ops/test_advantages.py"),
    ("ops/advantages.py", "timestep.discount[1:]", "timestep.discount[:-1]", "ops/test_advantages.py"),
    ("ops/advantages.py", "reverse=True", "reverse=False", "ops/test_advantages.py"),
    ("ops/vtrace.py", "v_t - v_tm1", "v_t + v_tm1", "ops/test_vtrace.py"),
    ("ops/vtrace.py", "timestep.reward[1:]", "timestep.reward[:-1]", "ops/test_vtrace.py"),
    ("ops/vtrace.py", "timestep.discount[1:]", "timestep.discount[:-1]", "ops/test_vtrace.py"),
    ("ops/vtrace.py", "jnp.where(valid, discount *", "jnp.where(True, discount *", "ops/test_vtrace.py"),
    ("ops/vtrace.py", "jnp.minimum(log_ratios, jnp.log(rho_clip))", "log_ratios", "ops/test_vtrace.py"),
    ("ops/vtrace.py", "jnp.log(c_clip)", "jnp.log(rho_clip)", "ops/test_vtrace.py"),
    ("ops/vtrace.py", "c_tm1 = lambda_ *", "c_tm1 =", "ops/test_vtrace.py"),
    ("ops/vtrace.py", "rows = (rho_tm1 * td_error", "rows = (td_error", "ops/test_vtrace.py"),
    ("ops/vtrace.py", "reverse=True", "reverse=False", "ops/test_vtrace.py"),
    ("ops/vtrace.py", "[errors[1:], jnp", "[errors[:-1], jnp", "ops/test_vtrace.py"),
    ("ops/vtrace.py", "discount_t * lambda_ * following", "discount_t * following", "ops/test_vtrace.py"),
    ("ops/rewards.py", "reward, -limit", "reward, 0", "ops/test_rewards.py"),
    ("types.py", "step_type[:-1] != StepType.LAST", "step_type[1:] != StepType.LAST", "ops/test_advantages.py"),
    ("ops/distributions.py", "mask | ~mask.any", "mask | mask.any", "ops/test_distributions.py"),
    ("ops/distributions.py", "jnp.where(legal, logits", "jnp.where(~legal, logits", "ops/test_distributions.py"),
    ("ops/distributions.py", "- self.log_scale - 0.5", "+ self.log_scale - 0.5", "ops/test_distributions.py"),
    ("ops/distributions.py", "- sample - jax.nn.softplus", "+ sample - jax.nn.softplus", "ops/test_distributions.py"),
    ("ops/distributions.py", "(high - low) / 2)", "(high - low) * 2)", "ops/test_distributions.py"),
    ("ops/distributions.py", "return sample + jnp.asarray", "return sample - jnp.asarray", "ops/test_distributions.py"),
    ("ops/normalization.py", "(1 - fraction) * old", "(1 + fraction) * old", "ops/test_normalization.py"),
    ("ops/normalization.py", "seen = count * replicas", "seen = count / replicas", "ops/test_normalization.py"),
    ("ops/normalization.py", "jnp.where(constant, 0,", "jnp.where(constant, 1,", "ops/test_normalization.py"),
    ("ops/normalization.py", "jnp.square(kept - mean", "jnp.square(kept + mean", "ops/test_normalization.py"),
    (
        "ops/minibatches.py",
        "gcd(num_minibatches, length)",
        "gcd(num_minibatches, batch_size)",
        "ops/test_minibatches.py",
    ),
    (
        "ops/minibatches.py",
        "jnp.repeat(rows, self.batch_parts",
        "jnp.repeat(rows, self.time_parts",
        "ops/test_minibatches.py",
    ),
    ("ops/minibatches.py", "samples % num_minibatches", "length % num_minibatches", "ops/test_minibatches.py"),
    ("parallel.py", "jax.lax.pmean", "jax.lax.psum", "test_parallel.py"),
    ("parallel.py", "start += leaves[i].size", "start = leaves[i].size", "test_parallel.py"),
    ("parallel.py", "check_vma=False", "check_vma=True", "test_parallel.py"),
    ("parallel.py", "axis_index(axis) == 0", "axis_index(axis) == 1", "test_parallel.py"),
    ("networks/inputs.py", "len(spec.shape) > 1", "len(spec.shape) > 0", "networks/test_inputs.py"),
    ("networks/convolution.py", "arranged[::-1, ::-1]", "arranged[::-1]", "networks/test_convolution.py"),
    ("networks/actor_critic.py", "first[:, None], 0, s", "~first[:, None], 0, s", "networks/test_actor_critic.py"),
    ("ops/normalization.py", "jnp.where(count > 0, count, 1)", "jnp.maximum(count, 1)", "ops/test_normalization.py"),
    (
        "agents/ppo.py",
        "advantage + values[:-1]",
        "advantage + values[1:]",
        "agents/test_ppo.py::test_a_gradient_step_is_that_of_the_papers_loss",
    ),
    (
        "agents/ppo.py",
        "recurrent)[1][-1]",
        "recurrent)[1][0]",
        "agents/test_ppo.py::test_recurrent_values_are_recomputed_from_the_states_that_acted",
    ),
    (
        "agents/ppo.py",
        "returns.variance <= 1e-10",
        "returns.variance < 1e-10",
        "agents/test_ppo.py::test_returns_that_never_vary_leave_rewards_as_they_are",
    ),
    (
        "agents/impala.py",
        "-log_prob * advantage",
        "log_prob * advantage",
        "agents/test_impala.py::test_a_gradient_step_is_that_of_the_papers_loss",
    ),
    (
        "agents/impala.py",
        "jax.lax.stop_gradient(values)",
        "values",
        "agents/test_impala.py::test_a_gradient_step_is_that_of_the_papers_loss",
    ),
    (
        "agents/impala.py",
        "corrected.target - values[:-1]",
        "corrected.target - values[1:]",
        "agents/test_impala.py::test_a_truncation_and_a_termination_have_other_targets",
    ),
    (
        "agents/impala.py",
        "log_prob - extras.log_prob",
        "extras.log_prob - log_prob",
        "agents/test_impala.py::test_weights_are_those_of_the_learners_policy_over_the_acting_one",
    ),
    (
        "agents/impala.py",
        "timestep.first(), trajectory.actor_state)",
        "timestep.last(), trajectory.actor_state)",
        "agents/test_impala.py::test_every_ratio_is_1_on_what_the_learner_has_just_acted",
    ),
    (
        "agents/impala.py",
        "initial_scale=1.0",
        "initial_scale=0.0",
        "agents/test_impala.py::test_a_gradient_step_is_that_of_the_papers_loss",
    ),
    (
        "agents/impala.py",
        "rows = replicas *",
        "rows = 1 *",
        "agents/test_impala.py::test_a_batch_may_be_divided_among_devices",
    ),
    (
        "agents/ppo.py",
        "reward = clip_rewards(timestep, self.config.reward_clip).reward",
        "reward = timestep.reward",
        "agents/test_ppo.py::test_acting_remembers_the_discounted_return_of_clipped_rewards",
    ),
    (
        "envs/autoreset.py",
        "1 - terminated.astype",
        "1 - (terminated | truncated).astype",
        "envs/test_autoreset.py::test_every_row_of_a_known_stream",
    ),
    (
        "envs/autoreset.py",
        "previous == StepType.LAST",
        "previous == StepType.FIRST",
        "envs/test_autoreset.py::test_every_row_of_a_known_stream",
    ),
    (
        "rollout.py",
        "jnp.where(first, 0, self.running_length + 1)",
        "jnp.where(first, 1, self.running_length + 1)",
        "test_rollout.py::test_statistics_go_on_over_windows_and_start_anew_with_an_episode",
    ),
    (
        "evaluate.py",
        "counts = ~progress.done",
        "counts = progress.done",
        "test_evaluate.py::test_every_environment_plays_exactly_one_episode",
    ),
    (
        "sebulba/parameter_slot.py",
        "wanted if self._max_lag <= 1 else newest",
        "newest",
        "sebulba/test_parameter_slot.py",
    ),
    ("sebulba/parameter_slot.py", "old < version - self._max_lag", "old < version", "sebulba/test_parameter_slot.py"),
    ("sebulba/devices.py", "max(1, count // 4)", "max(1, count // 2)", "sebulba/test_devices.py"),
    ("sebulba/report.py", "update - rollout.versions", "rollout.versions - update", "sebulba/test_report.py"),
    (
        "sebulba/acting.py",
        "Stream.ACT, *place)",
        "Stream.ACT, *place[::-1])",
        "sebulba/test_sebulba.py::test_without_lag_it_gives_the_parameters_and_the_trajectories_of_anakin",
    ),
    (
        "sebulba/acting.py",
        "x.at[-1].set(row)",
        "x.at[0].set(row)",
        "sebulba/test_sebulba.py::test_without_lag_it_gives_the_parameters_and_the_trajectories_of_anakin",
    ),
    (
        "sebulba/acting.py",
        "jax.tree.map(jnp.copy, output.actor_state)",
        "output.actor_state",
        "sebulba/test_sebulba.py::test_what_the_agent_keeps_is_no_view_of_the_environments_memory",
    ),
    (
        "sebulba/actor.py",
        "versions[t] = version",
        "versions[t] = number",
        "sebulba/test_sebulba.py::test_the_lag_is_what_the_agent_saw",
    ),
    (
        "sebulba/crew.py",
        "EnvironmentSlice(size, index * size",
        "EnvironmentSlice(size, index",
        "sebulba/test_sebulba.py::test_column_b_is_the_same_environment_in_every_trajectory_and_rows_follow_each_other",
    ),
    (
        "sebulba/crew.py",
        "self._queues[len(self._collected) :]",
        "self._queues",
        "sebulba/test_sebulba.py::test_what_came_before_it_was_stopped_is_learnt_from_when_it_goes_on",
    ),
    (
        "sebulba/actor.py",
        "if self._is_fresh_each_step and t:",
        "if False:",
        "sebulba/test_sebulba.py::test_parameters_may_change_at_every_step",
    ),
    (
        "sebulba/runner.py",
        "state.updates is not self._returned",
        "False",
        "sebulba/test_sebulba.py::test_a_state_from_elsewhere_makes_actors_begin_anew_though_it_is_as_old",
    ),
    (
        "sebulba/episodes.py",
        "self.running_return[first] = self.running_length[first] = 0",
        "self.running_return[first] = self.running_length[first] = 1",
        "sebulba/test_sebulba.py::test_steps_of_resets_are_not_counted",
    ),
    (
        "sebulba/learner.py",
        "jax.tree.map(jnp.copy, self._agent.actor_params(learner))",
        "self._agent.actor_params(learner)",
        "sebulba/test_sebulba.py::test_two_runs_with_one_seed_are_equal_whatever_the_timing",
    ),
]


def run_tests(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """The named tests of the copy in `folder`, on the package of that copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{tests}"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def copy_source(folder: Path) -> None:
    for name in ("podracer", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


@pytest.mark.slow
@pytest.mark.parametrize("tests", sorted({row[-1] for row in MUTATIONS}))
def test_without_a_mutation_the_tests_pass(tmp_path, tests):
    copy_source(tmp_path)
    result = run_tests(tmp_path, tests)
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("source", "old", "new", "tests"), MUTATIONS)
def test_a_mutation_is_noticed(tmp_path, source, old, new, tests):
    copy_source(tmp_path)
    path = tmp_path / "podracer" / source
    text = path.read_text()
    path.write_text(text.replace(old, new))
    result = run_tests(tmp_path, tests)
    # 1: tests were collected and failed. Anything else says that nothing was tested.
    assert result.returncode == 1, f"{old!r} -> {new!r} in {source} went unnoticed:\n{result.stdout}"


@pytest.mark.parametrize(("source", "old", "new", "tests"), MUTATIONS)
def test_every_mutation_is_one_place_in_todays_source(source, old, new, tests):
    assert (ROOT / "podracer" / source).read_text().count(old) == 1
    assert old != new
    file, _, test = tests.partition("::")
    assert f"def {test}" in (ROOT / "tests" / file).read_text()

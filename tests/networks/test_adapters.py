"""A user's own NNX and equinox modules as networks: equal to the module, and trained by PPO."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from podracer import envs
from podracer.agents.ppo import PPO, PPOConfig
from podracer.anakin import Anakin, AnakinConfig
from podracer.networks import Network, from_equinox, from_nnx
from podracer.types import ArraySpec, DiscreteSpec, EnvironmentSpec, MaskedObservation

SPEC = EnvironmentSpec({"a": ArraySpec((2, 2)), "b": ArraySpec((3,), "uint8")}, DiscreteSpec(4))


class NNXModule(nnx.Module):
    """On a batch of observations."""

    def __init__(self, rngs, size=7, actions=4):
        self.hidden = nnx.List([nnx.Linear(size, 5, rngs=rngs), nnx.Linear(5, 5, rngs=rngs)])
        self.policy = nnx.Linear(5, actions, rngs=rngs)
        self.value = nnx.Linear(5, 1, rngs=rngs)
        self.activation = nnx.relu

    def __call__(self, observation):
        batch_size = jax.tree.leaves(observation)[0].shape[0]
        leaves = [x.reshape(batch_size, -1).astype(jnp.float32) for x in jax.tree.leaves(observation)]
        x = jnp.concatenate(leaves, -1)
        for layer in self.hidden:
            x = self.activation(layer(x))
        return self.policy(x), self.value(x)[:, 0]


class EquinoxModule(eqx.Module):
    """On one observation. The activation and the numbers are parts that are not trained."""

    hidden: list[eqx.nn.Linear]
    policy: eqx.nn.Linear
    value: eqx.nn.Linear
    activation: object
    scale: float
    offset: float = eqx.field(static=True)

    def __init__(self, key, size=7, actions=4):
        keys = jax.random.split(key, 4)
        self.hidden = [eqx.nn.Linear(size, 5, key=keys[0]), eqx.nn.Linear(5, 5, key=keys[1])]
        self.policy = eqx.nn.Linear(5, actions, key=keys[2])
        self.value = eqx.nn.Linear(5, "scalar", key=keys[3])
        self.activation = jax.nn.relu
        self.scale = 2.0
        self.offset = 0.5

    def __call__(self, observation):
        x = jnp.concatenate([leaf.reshape(-1).astype(jnp.float32) for leaf in jax.tree.leaves(observation)])
        x = self.scale * x + self.offset
        for layer in self.hidden:
            x = self.activation(layer(x))
        return self.policy(x), self.value(x)


ADAPTERS = {
    "nnx": (from_nnx, NNXModule),
    "equinox": (from_equinox, EquinoxModule),
}


def observation_for(spec, *lead):
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda s: jnp.asarray(generator.integers(0, 9, (*lead, *s.shape)).astype(s.dtype)), spec.observation
    )


@pytest.fixture(params=ADAPTERS)
def adapter(request):
    return ADAPTERS[request.param]


@pytest.fixture
def network(adapter):
    from_library, module = adapter
    return from_library(module, SPEC)


def by_hand(params, observation, library):
    """Both modules' forward pass in NumPy."""
    lead = observation["b"].shape[:-1]
    x = np.concatenate([np.asarray(observation[name], np.float32).reshape(*lead, -1) for name in ("a", "b")], -1)
    x = 2 * x + 0.5 if library == "equinox" else x

    def layer(x, name):
        if library == "nnx":
            return x @ np.asarray(params[f"{name}/kernel"]) + np.asarray(params[f"{name}/bias"])
        return x @ np.asarray(params[f"{name}/weight"]).T + np.asarray(params[f"{name}/bias"])

    for i in range(2):
        x = np.maximum(layer(x, f"hidden/{i}"), 0)
    return layer(x, "policy"), layer(x, "value")[..., 0]


@pytest.mark.parametrize("library", ADAPTERS)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
def test_equals_a_forward_pass_by_hand(random_params, library, lead):
    from_library, module = ADAPTERS[library]
    network = from_library(module, SPEC)
    params = random_params(network.init, observation_for(SPEC, 1))
    observation = observation_for(SPEC, *lead)
    policy, value = jax.jit(network.apply)(params, observation)
    assert (policy.shape, value.shape) == ((*lead, 4), lead)
    for found, expected in zip((policy, value), by_hand(params, observation, library), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("library", ADAPTERS)
def test_parameters_are_a_flat_dictionary_of_what_the_module_holds(library):
    from_library, module = ADAPTERS[library]
    network = from_library(module, SPEC)

    def by_hand(key):
        if library == "nnx":
            made = NNXModule(nnx.Rngs(key))
            return {"hidden/1/kernel": made.hidden[1].kernel[...], "policy/bias": made.policy.bias[...]}
        made = EquinoxModule(key)
        return {"hidden/1/weight": made.hidden[1].weight, "policy/bias": made.policy.bias}

    # Together, as half of the work is the same.
    both = jax.jit(lambda seed: (network.init(jax.random.key(seed), None), by_hand(jax.random.key(seed))))
    (one, expected), (other, _) = both(0), both(1)
    assert len(one) == 8
    for name, leaf in one.items():
        assert isinstance(name, str)
        assert leaf.dtype == jnp.float32
        # Another key makes another module. Biases begin at 0 in one of the libraries.
        assert (leaf != other[name]).all() or name.endswith("bias")
    for name, leaf in expected.items():
        np.testing.assert_allclose(one[name], leaf, rtol=1e-6)


def test_all_parameters_have_gradients(random_params, network):
    observation = observation_for(SPEC, 16)
    params = random_params(network.init, observation)

    def loss(params):
        policy, value = network.apply(params, observation)
        return jnp.square(policy - 1).sum() + jnp.square(value - 1).sum()

    grads = jax.jit(jax.grad(loss))(params)
    assert grads.keys() == params.keys()
    assert all(np.isfinite(grad).all() and grad.any() for grad in grads.values())


def test_hashable_and_traced_once(random_params, adapter):
    from_library, module = adapter
    traces = []

    class Counted(module):
        def __call__(self, observation):
            traces.append(None)
            return super().__call__(observation)

    network = from_library(Counted, SPEC)
    assert isinstance(network, Network)
    assert hash(network) == hash(network)
    params = random_params(network.init, None)
    apply = jax.jit(lambda network, params, x: network.apply(params, x), static_argnums=0)
    traces.clear()
    for _ in range(3):
        apply(network, params, observation_for(SPEC, 2))
    assert len(traces) == 1


# Nearly all of the time is the compilation of an update, which is the same for both.
@pytest.mark.parametrize("library", ["nnx", pytest.param("equinox", marks=pytest.mark.slow)])
def test_ppo_trains_it_under_anakin(library):
    from_library, module = ADAPTERS[library]
    environment = envs.make("podracer:Catch")
    size = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(environment.spec.observation))

    def make_module(key):
        return module(key, size, environment.spec.action.num_actions)

    network = from_library(make_module, environment.spec)
    agent = PPO(environment.spec, network, PPOConfig(learning_rate=3e-3, num_epochs=2, num_minibatches=2), 10)
    anakin = Anakin(agent, environment, AnakinConfig(num_envs=8, rollout_length=16), jax.devices()[:1])
    state = anakin.init(0)
    before = jax.device_get(state.learner.params)
    state, window = anakin.run(state, 3)
    assert window.summarize()["episodes"] > 0
    after = jax.device_get(state.learner.params)
    assert after.keys() == before.keys()
    for name in after:
        assert np.isfinite(after[name]).all(), name
        assert (after[name] != before[name]).any(), name


def test_a_mask_is_not_handed_to_the_module(random_params, adapter):
    from_library, module = adapter
    masked = EnvironmentSpec(MaskedObservation(SPEC.observation, ArraySpec((4,), "bool")), SPEC.action)
    network = from_library(module, masked)
    params = random_params(network.init, None)
    assert jax.eval_shape(network.apply, params, observation_for(SPEC, 2))[1].shape == (2,)


def nnx_with(**attributes):
    """A maker of modules with more attributes, each made by a function of the random numbers."""

    def make_module(rngs):
        module = NNXModule(rngs)
        for name, make in attributes.items():
            setattr(module, name, make(rngs))
        return module

    return make_module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rngs: nnx.BatchNorm(5, rngs=rngs), "extra/mean is a BatchStat and not an nnx.Param"),
        (lambda rngs: nnx.Dropout(0.1, rngs=rngs), "extra/rngs/count is a RngCount and not an nnx.Param"),
        (lambda rngs: nnx.Param(jnp.arange(3)), "extra is an array of int32"),
        (lambda rngs: jnp.zeros(3, jnp.float32), "not an nnx.Param"),
        (lambda rngs: np.zeros(3, np.float32), "not an nnx.Param"),
    ],
)
def test_nnx_variables_that_are_no_parameters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        from_nnx(nnx_with(extra=make), SPEC)


def test_equinox_arrays_that_are_no_floats_are_refused():
    class Counting(EquinoxModule):
        count: jax.Array

        def __init__(self, key):
            super().__init__(key)
            self.count = jnp.int32(0)

    with pytest.raises(ValueError, match="count is an array of int32"):
        from_equinox(Counting, SPEC)


def returning(change, module):
    """A kind of module with a changed result."""

    class Changed(module):
        def __call__(self, observation):
            return change(*super().__call__(observation))

    return Changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda policy, value: policy, "returns a .*; it must return"),
        (lambda policy, value: (policy, value, ()), "returns a tuple"),
        (lambda policy, value: (policy, value[..., None]), r"value are of shape \(1,\)"),
        (lambda policy, value: (policy[..., :3], value), r"policy outputs are of shape \(3,\)"),
        (lambda policy, value: (policy, None), "value are a NoneType"),
    ],
)
def test_other_results_are_refused_at_construction(adapter, change, message):
    from_library, module = adapter
    with pytest.raises(ValueError, match=message) as error:
        from_library(returning(change, module), SPEC)
    assert "(policy outputs [4], value [])" in str(error.value)


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_neither_library_is_imported_before_it_is_used():
    code = "import sys, podracer.networks; print('flax.nnx' in sys.modules, 'equinox' in sys.modules)"
    result = run_python(code)
    assert result.stdout.split() == ["False", "False"], result.stderr


def test_without_equinox_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "equinox", None)
    with pytest.raises(ImportError, match=r"package equinox: pip install -e '\.\[equinox\]'"):
        from_equinox(EquinoxModule, SPEC)

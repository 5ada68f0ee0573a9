"""The networks that a configuration stands for, feed-forward and recurrent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.networks import Network, NetworkConfig, RecurrentNetwork, actor_critic
from podracer.types import ArraySpec, BoundedSpec, DiscreteSpec, EnvironmentSpec, MultiDiscreteSpec

VECTOR = EnvironmentSpec(ArraySpec((3,)), DiscreteSpec(4))
PIXELS = EnvironmentSpec(ArraySpec((6, 6, 2), "uint8"), MultiDiscreteSpec((2, 3)))
FRAMES = EnvironmentSpec(ArraySpec((20, 21, 2)), DiscreteSpec(4))
JOINTS = EnvironmentSpec({"angle": ArraySpec((2,)), "image": ArraySpec((3, 3), "uint8")}, BoundedSpec((-1, 0), (1, 1)))


def observation_for(spec, *lead, seed=0):
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray((3 * generator.normal(size=(*lead, *s.shape))).astype(s.dtype)), spec.observation
    )


def paths(params):
    """The names of the layers on the way to each leaf."""
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(params)}


@pytest.mark.parametrize(
    ("config", "spec", "outputs"),
    [
        (NetworkConfig(hidden_sizes=(8,)), VECTOR, 4),
        (NetworkConfig(hidden_sizes=()), VECTOR, 4),
        (NetworkConfig(hidden_sizes=(8, 4), activation="relu", shared=True), JOINTS, 4),
        (NetworkConfig("cnn", (8,), (4, 4), "silu"), PIXELS, 5),
        (NetworkConfig("cnn", (8,), (4,), shared=True), PIXELS, 5),
        (NetworkConfig("impala", (8,), (4, 4), shared=True), FRAMES, 4),
        (NetworkConfig("impala_deep", (8,), (2, 3), shared=True), PIXELS, 5),
    ],
)
def test_outputs_and_values_for_any_leading_axes(random_params, config, spec, outputs):
    network = actor_critic(config, spec)
    assert isinstance(network, Network)
    hash(network)
    params = random_params(network.init, observation_for(spec, 1))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    apply = jax.jit(network.apply)
    found = {}
    for lead in ((), (2, 3)):
        policy, value = found[lead] = apply(params, observation_for(spec, *lead, seed=len(lead)))
        assert (policy.shape, policy.dtype) == ((*lead, outputs), jnp.float32)
        assert (value.shape, value.dtype) == (lead, jnp.float32)
    observation = observation_for(spec, 2, 3, seed=2)
    flat = apply(params, jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), observation))
    for a, b in zip(flat, found[2, 3], strict=True):
        np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-4, atol=1e-4)


def test_a_hand_computed_forward_pass(random_params):
    network = actor_critic(NetworkConfig(hidden_sizes=(5,)), VECTOR)
    x = observation_for(VECTOR, 7)
    params = random_params(network.init, x)["params"]

    def layer(x, params):
        return x @ np.asarray(params["kernel"]) + np.asarray(params["bias"])

    policy, value = jax.jit(network.apply)({"params": params}, x)
    actor = np.tanh(layer(np.asarray(x), params["actor_torso"]["Dense_0"]))
    critic = np.tanh(layer(np.asarray(x), params["critic_torso"]["Dense_0"]))
    np.testing.assert_allclose(policy, layer(actor, params["Dense_0"]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(value, layer(critic, params["Dense_1"])[:, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_the_torso_is_shared_or_not(random_params, shared):
    network = actor_critic(NetworkConfig(hidden_sizes=(5,), shared=shared), VECTOR)
    x = observation_for(VECTOR, 4)
    params = random_params(network.init, x)
    torsos = {name.split("/")[1] for name in paths(params)} - {"Dense_0", "Dense_1"}
    assert torsos == ({"torso"} if shared else {"actor_torso", "critic_torso"})
    # Whether learning the value moves what the policy sees.
    grads = jax.jit(jax.grad(lambda p: network.apply(p, x)[1].sum()))(params)["params"]
    moved = {name for name, grad in grads.items() if any(np.any(leaf != 0) for leaf in jax.tree.leaves(grad))}
    assert moved == {"Dense_1", "torso" if shared else "critic_torso"}


def test_heads_begin_small_for_the_policy_and_plain_for_the_value():
    network = actor_critic(NetworkConfig(hidden_sizes=(16,)), VECTOR)
    params = jax.jit(network.init)(jax.random.key(0), observation_for(VECTOR, 1))["params"]
    assert np.linalg.norm(params["Dense_0"]["kernel"], axis=0) == pytest.approx(0.01, rel=1e-4)
    assert np.linalg.norm(params["Dense_1"]["kernel"], axis=0) == pytest.approx(1, rel=1e-4)
    torso = np.asarray(params["actor_torso"]["Dense_0"]["kernel"])
    np.testing.assert_allclose(torso @ torso.T, 2 * np.eye(3), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_sizes": (64, 0)}, r"hidden_sizes is \(64, 0\); it must be a tuple of integers, each at least 1"),
        ({"hidden_sizes": (64.0,)}, r"hidden_sizes is \(64\.0,\)"),
        ({"hidden_sizes": (64, None)}, r"hidden_sizes is \(64, None\)"),
        ({"hidden_sizes": 64}, "hidden_sizes is 64"),
        ({"hidden_sizes": [64]}, r"hidden_sizes is \[64\]"),  # Not hashable, as a configuration has to be.
        ({"channels": (-1,)}, r"channels is \(-1,\)"),
        ({"channels": (True,)}, r"channels is \(True,\)"),
        ({"channels": (0,)}, r"channels is \(0,\); .*, or None for the torso's own"),
        ({"torso": "nature", "channels": (32, 64)}, r"channels is \(32, 64\); torso 'nature' has 3 convolutions"),
        ({"torso": "impala", "channels": ()}, r"channels is \(\); torso 'impala' has 2 convolutions"),
        ({"torso": "transformer"}, "torso is 'transformer'; valid: mlp, cnn, nature, impala, impala_deep"),
        ({"activation": "gelu"}, "activation is 'gelu'; valid: tanh, relu, silu, None"),
        ({"shared": "no"}, "shared is 'no'; valid: False, True"),
        ({"recurrent_size": -1}, "recurrent_size is -1; it must be an integer, 0 for none or more"),
        ({"recurrent_size": 2.0}, r"recurrent_size is 2\.0"),
        ({"recurrent_size": None}, "recurrent_size is None"),
        ({"recurrent_cell": "rnn"}, "recurrent_cell is 'rnn'; valid: lstm, gru"),
    ],
)
def test_bad_configurations_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        NetworkConfig(**fields)


# The parameters of the torso of each paper, on 84x84x4: kernels' shapes in order of their layers.
PUBLISHED = {
    "nature": [(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64), (7 * 7 * 64, 512)],
    "impala": [(8, 8, 4, 16), (4, 4, 16, 32), (9 * 9 * 32, 256)],
    "impala_deep": [
        (3, 3, 4, 16),
        (3, 3, 16, 32),
        (3, 3, 32, 32),
        (11 * 11 * 32, 256),
        *[(3, 3, 16, 16)] * 4,
        *[(3, 3, 32, 32)] * 8,
    ],
}


@pytest.mark.parametrize("torso", PUBLISHED)
def test_torsos_are_as_published(torso):
    spec = EnvironmentSpec(ArraySpec((84, 84, 4), "uint8"), DiscreteSpec(18))
    network = actor_critic(NetworkConfig(torso, shared=True), spec)
    x = jax.ShapeDtypeStruct((1, 84, 84, 4), jnp.uint8)
    params = jax.eval_shape(network.init, jax.random.key(0), x)["params"]
    kernels = [leaf.shape for path, leaf in jax.tree.leaves_with_path(params["torso"]) if path[-1].key == "kernel"]
    assert kernels == PUBLISHED[torso]
    jaxpr = str(jax.make_jaxpr(lambda p, x: network.apply({"params": p}, x))(params, x))
    assert "tanh" not in jaxpr


def test_settings_replace_the_torsos_own(random_params):
    config = NetworkConfig("impala", (7,), (2, 3), "tanh", shared=True)
    network = actor_critic(config, FRAMES)
    x = observation_for(FRAMES, 1)
    params = jax.eval_shape(network.init, jax.random.key(0), x)["params"]["torso"]
    assert params["Conv_0"]["kernel"].shape == (8, 8, 2, 2)
    assert params["Conv_1"]["kernel"].shape == (4, 4, 2, 3)
    assert params["MLP_0"]["Dense_0"]["kernel"].shape == (3, 7)
    assert "tanh" in str(jax.make_jaxpr(network.apply)(random_params(network.init, x), x))


RECURRENT = {
    "lstm": (NetworkConfig(hidden_sizes=(8,), recurrent_size=6), VECTOR),
    "gru": (NetworkConfig(hidden_sizes=(8,), recurrent_size=6, recurrent_cell="gru"), VECTOR),
}
ON_IMAGES = {
    "lstm on images": (NetworkConfig("impala", (8,), (3, 4), recurrent_size=6), FRAMES),
    "gru on images": (NetworkConfig("impala_deep", (8,), (3,), recurrent_size=6, recurrent_cell="gru"), PIXELS),
}


def with_state(random_params, config, spec):
    """A recurrent network with its parameters and a stored state that is not the initial one."""
    network = actor_critic(config, spec)
    assert isinstance(network, RecurrentNetwork)
    # Small, for saturated cells forget everything.
    params = jax.tree.map(lambda x: 0.3 * x, random_params(network.init, observation_for(spec, 1)))
    generator = np.random.default_rng(9)
    state = jax.tree.map(lambda x: jnp.asarray(generator.normal(size=x.shape), x.dtype), network.initial_state(3))
    return network, params, state


@pytest.fixture(scope="module", params=RECURRENT)
def recurrent(request, random_params):
    return with_state(random_params, *RECURRENT[request.param])


@pytest.mark.parametrize(("cell", "leaves"), [("lstm", 2), ("gru", 1)])
def test_the_initial_state_is_per_environment(cell, leaves):
    network = actor_critic(*RECURRENT[cell])
    for batch_size in (1, 3):
        state = jax.tree.leaves(network.initial_state(batch_size))
        assert [(x.shape, x.dtype) for x in state] == [((batch_size, 6), jnp.dtype("float32"))] * leaves


@pytest.mark.parametrize("name", RECURRENT | ON_IMAGES)
def test_unrolling_equals_stepping(random_params, name):
    config, spec = (RECURRENT | ON_IMAGES)[name]
    network, params, state = with_state(random_params, config, spec)
    # Two episode ends inside, and one environment whose window begins with an episode.
    observation, first = observation_for(spec, 5, 3), np.zeros((5, 3), bool)
    first[[2, 4], 0] = first[0, 1] = True
    first = jnp.asarray(first)
    (policies, values), final = jax.jit(network.unroll)(params, observation, first, state)
    assert policies.shape[:2] == values.shape == (5, 3)
    apply = jax.jit(network.apply)
    for t in range(5):
        (policy, value), state = apply(params, observation[t], first[t], state)
        np.testing.assert_allclose(policies[t], policy, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(values[t], value, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), final, state)
    # A state that did not matter would make all of this true of nothing.
    assert not np.allclose(values, jax.jit(network.unroll)(params, observation, first, network.initial_state(3))[0][1])


@pytest.mark.parametrize("name", ON_IMAGES)
def test_only_the_cell_goes_step_by_step(name):
    config, spec = ON_IMAGES[name]
    network = actor_critic(config, spec)
    params = jax.eval_shape(network.init, jax.random.key(0), observation_for(spec, 3))
    first = jnp.zeros((5, 3), bool)
    jaxpr = jax.make_jaxpr(network.unroll)(params, observation_for(spec, 5, 3), first, network.initial_state(3))
    (scan,) = (equation for equation in jaxpr.eqns if equation.primitive.name == "scan")
    assert "conv_general_dilated" in str(jaxpr)
    body = str(scan.params["jaxpr"])
    assert "dot_general" in body
    assert "conv_general_dilated" not in body
    # 8 features go in, and the heads' outputs are not made in there.
    assert {x.aval.shape[2:] for x in scan.invars if x.aval.shape[:2] == (5, 3)} == {(8,), ()}
    assert {x.aval.shape for x in scan.outvars} == {(3, 6), (5, 3, 6)}


def test_a_network_without_a_faster_way_is_scanned():
    def apply(params, observation, first, state):
        state = jnp.where(first, 0, state) + params * observation
        return 2 * state, state

    network = RecurrentNetwork(lambda key, observation: 1.0, apply, lambda batch_size: jnp.zeros(batch_size))
    first = jnp.asarray([[True, False], [False, False], [False, True]])
    observation = jnp.arange(6, dtype=jnp.float32).reshape(3, 2)
    outputs, state = jax.jit(network.unroll)(jnp.float32(10), observation, first, jnp.asarray([7.0, 8.0]))
    np.testing.assert_allclose(outputs, [[0, 36], [40, 96], [120, 100]])
    np.testing.assert_allclose(state, [60, 50])


def test_the_state_restarts_where_an_episode_does(recurrent):
    network, params, state = recurrent
    apply = jax.jit(network.apply)
    observation, first = observation_for(VECTOR, 3), jnp.asarray([True, False, True])
    restarted, after = apply(params, observation, first, state)
    fresh, after_fresh = apply(params, observation, first, network.initial_state(3))
    continued, _ = apply(params, observation, jnp.zeros(3, bool), state)
    for found, new, old in zip(restarted, fresh, continued, strict=True):
        np.testing.assert_array_equal(found[::2], new[::2])
        np.testing.assert_array_equal(found[1], old[1])
        assert (found[1] != new[1]).any()
        assert (found[0] != old[0]).any()
    for found, new in zip(jax.tree.leaves(after), jax.tree.leaves(after_fresh), strict=True):
        np.testing.assert_array_equal(found[::2], new[::2])


def test_nothing_before_an_episode_reaches_it(recurrent):
    network, params, state = recurrent
    observation = observation_for(VECTOR, 5, 3)
    first = jnp.zeros((5, 3), bool).at[3].set(True)

    def later(observation, state):
        policy, value = network.unroll(params, observation, first, state)[0]
        return jnp.square(policy[3:]).sum() + value[3:].sum()

    grads = jax.jit(jax.grad(later, (0, 1)))(observation, state)
    assert (np.asarray(grads[0][:3]) == 0).all()
    assert (np.asarray(grads[0][3:]) != 0).any()
    for leaf in jax.tree.leaves(grads[1]):
        np.testing.assert_array_equal(leaf, 0)
    # And a garbage state does not either.
    garbage = jax.tree.map(lambda x: jnp.full_like(x, 1e30), state)
    clean, dirty = (jax.jit(network.unroll)(params, observation, first, s)[0][1] for s in (state, garbage))
    np.testing.assert_array_equal(clean[3:], dirty[3:])


def test_memory_reaches_forward_within_an_episode(recurrent):
    network, params, state = recurrent
    observation, first = observation_for(VECTOR, 5, 3), jnp.zeros((5, 3), bool).at[0].set(True)
    grads = jax.jit(jax.grad(lambda x: network.unroll(params, x, first, state)[0][1][4].sum()))(observation)
    assert (np.abs(grads).sum((1, 2)) > 0).all()

"""What a torso is given of an observation of any structure."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.networks import NetworkConfig, actor_critic
from podracer.networks.inputs import flattener, image
from podracer.types import ArraySpec, DiscreteSpec, EnvironmentSpec, MaskedObservation, split_mask

IMAGE = ArraySpec((4, 5, 3), "uint8", 0, 255)


class Pair(NamedTuple):
    left: Any
    right: Any


# An observation's spec, and the size of the vector that it becomes.
STRUCTURES = {
    "vector": (ArraySpec((3,)), 3),
    "scalar": (ArraySpec((), "int32"), 1),
    "flags": (ArraySpec((2, 2), "bool"), 4),
    "tuple": ((ArraySpec((), "int32"), ArraySpec((), "int32"), ArraySpec((), "bool")), 3),
    "dict": ({"image": IMAGE, "vector": ArraySpec((2,))}, 62),
    "nested": ({"a": {"b": ArraySpec((2,)), "c": (ArraySpec((1, 2)),)}, "d": ArraySpec(())}, 5),
    "named tuple": (Pair(ArraySpec((2,)), {"x": ArraySpec((3,), "int8")}), 5),
    "stacked images": (ArraySpec((2, 4, 4, 3), "uint8"), 96),
}


def observation_for(spec, *lead, seed=0):
    """Random numbers of the spec's shapes and dtypes."""
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(generator.integers(0, 2, (*lead, *s.shape)).astype(s.dtype)), spec)


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("lead", [(), (5,), (2, 3)])
def test_all_leaves_are_joined_after_any_leading_axes(name, lead):
    spec, size = STRUCTURES[name]
    observation = observation_for(spec, *lead)
    x = jax.jit(flattener(spec))(observation)
    assert (x.shape, x.dtype) == ((*lead, size), jnp.float32)
    leaves = zip(jax.tree.leaves(observation), jax.tree.leaves(spec), strict=True)
    scale = [np.asarray(leaf, np.float32) / (255 if s.dtype == "uint8" else 1) for leaf, s in leaves]
    expected = np.concatenate([leaf.reshape(*lead, -1) for leaf in scale], -1)
    np.testing.assert_allclose(x, expected, rtol=1e-6)


SCALES = [
    (ArraySpec((84, 84, 4), "uint8"), 255, 1.0),
    (ArraySpec((2, 8, 8, 3), "uint8"), 255, 1.0),
    (ArraySpec((8, 8), "uint8"), 255, 1.0),
    # Ten bytes are no image, and a float image is scaled already.
    (ArraySpec((10,), "uint8"), 255, 255.0),
    (ArraySpec((8, 8, 3), "float32"), 1, 1.0),
    (ArraySpec((8, 8, 3), "float32"), 255, 255.0),
    (ArraySpec((8, 8, 3), "bool"), 1, 1.0),
    (ArraySpec((8, 8, 3), "int32"), 255, 255.0),
]


@pytest.mark.parametrize(("spec", "value", "expected"), SCALES)
def test_uint8_images_are_divided_by_255_and_nothing_else_is(spec, value, expected):
    x = jnp.full((2, *spec.shape), value, spec.dtype)
    np.testing.assert_array_equal(flattener(spec)(x), expected)
    if len(spec.shape) == 3:
        # Bytes are left to the convolution.
        prepared = image(spec, 3, "cnn")(x)
        np.testing.assert_array_equal(prepared, x if spec.dtype == "uint8" else expected)
        assert prepared.dtype == ("uint8" if spec.dtype == "uint8" else "float32")


@pytest.mark.parametrize(
    ("scaled_bytes", "of_images", "of_vectors"), [("images", 1, 255), ("all", 1, 1), ("none", 255, 255)]
)
def test_which_bytes_are_scaled_can_be_said(scaled_bytes, of_images, of_vectors):
    spec = {"image": IMAGE, "vector": ArraySpec((10,), "uint8")}
    x = jax.tree.map(lambda leaf: jnp.full((2, *leaf.shape), 255, jnp.uint8), spec)
    joined = flattener(spec, scaled_bytes)(x)
    np.testing.assert_array_equal(joined[:, :60], of_images)
    np.testing.assert_array_equal(joined[:, 60:], of_vectors)
    prepared = image(IMAGE, 3, "cnn", scaled_bytes)(x["image"])
    assert prepared.dtype == ("float32" if scaled_bytes == "none" else "uint8")
    assert float(prepared.max()) == 255


def test_a_network_scales_the_bytes_that_it_is_told_to():
    spec = EnvironmentSpec(ArraySpec((6, 6, 1), "uint8"), DiscreteSpec(2))
    network, unscaled = (actor_critic(NetworkConfig("cnn", scaled_bytes=which), spec) for which in ("images", "none"))
    pixels = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 6, 6, 1)), jnp.uint8)
    params = network.init(jax.random.key(0), pixels)
    divided = jnp.asarray(pixels, jnp.float32) / 255
    np.testing.assert_allclose(network.apply(params, pixels)[1], network.apply(params, divided)[1], rtol=1e-5)
    floats = jnp.asarray(pixels, jnp.float32)
    np.testing.assert_allclose(unscaled.apply(params, pixels)[1], unscaled.apply(params, floats)[1], rtol=1e-5)
    with pytest.raises(ValueError, match="scaled_bytes is 'no'; valid: images, all, none"):
        NetworkConfig(scaled_bytes="no")


def test_an_image_that_was_normalised_is_not_scaled_again():
    # An agent that normalises observations hands on floats around 0, which 255 would make vanish.
    spec = ArraySpec((3, 3, 1), "uint8")
    x = jnp.linspace(-2, 2, 9, dtype=jnp.float32).reshape(1, 3, 3, 1)
    np.testing.assert_array_equal(image(spec, 3, "cnn")(x), x)
    np.testing.assert_array_equal(flattener(spec)(x), x.reshape(1, 9))


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"a": ArraySpec((2,)), "b": ArraySpec((3,), "complex64")}, "['b']"),
        ((ArraySpec((2,)), "text"), "[1]"),
        (ArraySpec((2,), "<U3"), "(root)"),
        ({"deep": {"er": ArraySpec((2,), "datetime64[s]")}}, "['deep']['er']"),
    ],
)
def test_a_leaf_that_is_no_number_is_named(spec, named):
    for prepare in (flattener, lambda spec: image(spec, 3, "cnn")):
        with pytest.raises(ValueError, match="networks take arrays of real numbers") as error:
            prepare(spec)
        assert f"leaf {named} is" in str(error.value)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (ArraySpec((4,)), "(root) of shape (4,)"),
        (ArraySpec((2, 9, 9, 3), "uint8"), "(root) of shape (2, 9, 9, 3)"),
        ({"image": IMAGE, "speed": ArraySpec(())}, "['image'] of shape (4, 5, 3), ['speed'] of shape ()"),
        (ArraySpec((9, 2, 3)), "(root) of shape (9, 2, 3)"),
    ],
)
def test_what_is_not_one_image_is_refused_with_its_leaves(spec, named):
    with pytest.raises(ValueError, match="torso 'nature' takes one image") as error:
        image(spec, 3, "nature")
    assert named in str(error.value)
    assert "torso 'mlp'" in str(error.value)


def test_networks_refuse_at_construction():
    spec = EnvironmentSpec({"name": ArraySpec((3,), "<U3")}, DiscreteSpec(2))
    with pytest.raises(ValueError, match=r"\['name'\]"):
        actor_critic(NetworkConfig(), spec)
    # Each convolution takes a pixel off every side, so three of them need 7 x 7.
    small = EnvironmentSpec(ArraySpec((6, 9, 1)), DiscreteSpec(2))
    actor_critic(NetworkConfig("cnn", channels=(4, 4)), small)
    with pytest.raises(ValueError, match="at least 7 x 7"):
        actor_critic(NetworkConfig("cnn", channels=(4, 4, 4)), small)


@pytest.mark.parametrize(("torso", "smallest"), [("nature", 36), ("impala", 20), ("impala_deep", 1)])
def test_every_torso_says_what_image_it_needs(torso, smallest):
    def make(shape):
        actor_critic(NetworkConfig(torso), EnvironmentSpec(ArraySpec(shape, "uint8"), DiscreteSpec(2)))

    make((smallest, smallest, 1))
    # The second has its channels first.
    for shape in [(smallest + 1, smallest - 1, 1), (smallest - 1, 84, 84), (84, 84)]:
        with pytest.raises(ValueError, match=f"torso '{torso}' .* at least {smallest} x {smallest}") as error:
            make(shape)
        assert f"(root) of shape {shape}" in str(error.value)


def test_masks_are_no_input(random_params):
    spec = ArraySpec((3,))
    observation = MaskedObservation(jnp.ones((2, 3), jnp.float32), jnp.ones((2, 4), bool))
    rest, mask = split_mask(observation)
    assert rest is observation.observation
    assert mask is observation.action_mask
    assert split_mask(rest) == (rest, None)
    masked = EnvironmentSpec(MaskedObservation(spec, ArraySpec((4,), "bool")), DiscreteSpec(4))
    network = actor_critic(NetworkConfig(hidden_sizes=(8,)), masked)
    params = random_params(network.init, rest)
    assert jax.eval_shape(network.apply, params, rest)[0].shape == (2, 4)

"""Policy and value networks, built from a configuration and an environment's spec."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from podracer.networks.base import Network, RecurrentNetwork
from podracer.networks.inputs import ScaledBytes, flattener, image
from podracer.networks.torsos import ACTIVATIONS, CNN, MLP, ResidualCNN, dense, smallest_image
from podracer.ops.distributions import num_parameters
from podracer.types import EnvironmentSpec, split_mask


@dataclasses.dataclass(frozen=True)
class _Torso:
    """What a torso is where the configuration leaves it open, and the kernels of its convolutions."""

    hidden_sizes: tuple[int, ...]
    activation: str
    channels: tuple[int, ...] = ()
    kernels: tuple[tuple[int, int], ...] = ()


TORSOS = {
    "mlp": _Torso((64, 64), "tanh"),
    "cnn": _Torso((64, 64), "tanh", (16,)),
    "nature": _Torso((512,), "relu", (32, 64, 64), ((8, 4), (4, 2), (3, 1))),
    "impala": _Torso((256,), "relu", (16, 32), ((8, 4), (4, 2))),
    "impala_deep": _Torso((256,), "relu", (16, 32, 32)),
}
CELLS = {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """An actor-critic network.

    | torso | takes | what it is, unless said otherwise |
    |---|---|---|
    | `mlp` | any observation, all leaves flattened and joined | dense 64, 64; tanh |
    | `cnn` | one image `[H, W, C]` | convolutions 3x3, as many as there are channels: 16; dense 64, 64; tanh |
    | `nature` | the same, at least 36 x 36 | DQN's (Mnih et al. 2015): 32@8x8/4, 64@4x4/2, 64@3x3/1; dense 512; relu |
    | `impala` | the same, at least 20 x 20 | IMPALA's shallow network: 16@8x8/4, 32@4x4/2; dense 256; relu |
    | `impala_deep` | the same | IMPALA's deep network: residual sections of 16, 32, 32 channels; dense 256; relu |

    Attributes:
        torso: One of the table.
        hidden_sizes: Units of the dense layers; None for the torso's own.
        channels: Of the convolutions, or of the sections of `impala_deep`; None for the torso's own.
        activation: After every hidden layer; None for the torso's own.
        shared: Whether actor and critic share the torso, which halves the work of small networks on a CPU.
        recurrent_size: Units of a recurrent cell after a shared torso; 0 for none.
        recurrent_cell: Of which kind.
        scaled_bytes: Which uint8 leaves of an observation are divided by 255: images, which have two axes or more, all
            (such as the memory of an Atari console), or none.

    Raises:
        ValueError: A size is no integer or too small, or a name is unknown; the rule is said.
    """

    torso: Literal["mlp", "cnn", "nature", "impala", "impala_deep"] = "mlp"
    hidden_sizes: tuple[int, ...] | None = None
    channels: tuple[int, ...] | None = None
    activation: Literal["tanh", "relu", "silu"] | None = None
    shared: bool = False
    recurrent_size: int = 0
    recurrent_cell: Literal["lstm", "gru"] = "lstm"
    scaled_bytes: ScaledBytes = "images"

    def __post_init__(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {
            "torso": tuple(TORSOS),
            "activation": (*ACTIVATIONS, None),
            "shared": (False, True),
            "recurrent_cell": tuple(CELLS),
            "scaled_bytes": get_args(ScaledBytes),
        }
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                raise ValueError(f"{name} is {getattr(self, name)!r}; valid: {', '.join(map(str, valid))}")
        for name in ("hidden_sizes", "channels"):
            sizes = getattr(self, name)
            tuple_of_sizes = isinstance(sizes, tuple) and all(type(size) is int and size >= 1 for size in sizes)
            if sizes is not None and not tuple_of_sizes:
                raise ValueError(
                    f"{name} is {sizes!r}; it must be a tuple of integers, each at least 1, or None for the torso's own"
                )
        convolutions = len(TORSOS[self.torso].kernels)
        if self.channels is not None and convolutions and len(self.channels) != convolutions:
            raise ValueError(f"channels is {self.channels!r}; torso {self.torso!r} has {convolutions} convolutions")
        if type(self.recurrent_size) is not int or self.recurrent_size < 0:
            raise ValueError(f"recurrent_size is {self.recurrent_size!r}; it must be an integer, 0 for none or more")

    def torso_module(self, name: str) -> nn.Module:
        """The torso as a module."""
        own = TORSOS[self.torso]
        hidden_sizes = own.hidden_sizes if self.hidden_sizes is None else self.hidden_sizes
        activation = ACTIVATIONS[self.activation or own.activation]
        if self.torso == "mlp":
            return MLP(hidden_sizes, activation, name=name)
        if self.torso == "impala_deep":
            return ResidualCNN(self._channels(), hidden_sizes, activation, name=name)
        return CNN(self._channels(), hidden_sizes, activation, own.kernels, name=name)

    def smallest_image(self) -> int:
        """How wide and high an image has to be for the torso."""
        if self.torso == "cnn":
            return smallest_image([(3, 1)] * len(self._channels()))
        return smallest_image(TORSOS[self.torso].kernels)

    def _channels(self) -> tuple[int, ...]:
        return TORSOS[self.torso].channels if self.channels is None else self.channels


class ActorCritic(nn.Module):
    """From `[*B, ...]` to `(policy outputs [*B, P], value [*B])`."""

    config: NetworkConfig
    num_outputs: int

    @nn.compact
    def __call__(self, x: Float[Array, "*B"]) -> tuple[Float[Array, "*B P"], Float[Array, "*B"]]:
        if self.config.shared:
            actor = critic = self.config.torso_module("torso")(x)
        else:
            actor = self.config.torso_module("actor_torso")(x)
            critic = self.config.torso_module("critic_torso")(x)
        return dense(self.num_outputs, 0.01)(actor), dense(1, 1.0)(critic)[..., 0]


class RecurrentActorCritic(nn.Module):
    """A torso, a recurrent cell and heads over `[T, B, ...]`; the state restarts where an episode does.

    Only the cell goes step by step. Torso and heads see all rows at once, which is far faster for convolutions.
    """

    config: NetworkConfig
    num_outputs: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "T B *"], first: Bool[Array, "T B"], state: PyTree
    ) -> tuple[tuple[Float[Array, "T B P"], Float[Array, "T B"]], PyTree]:
        def step(cell: nn.RNNCellBase, state: PyTree, inputs: tuple[jax.Array, jax.Array]) -> tuple[PyTree, jax.Array]:
            features, first = inputs
            return cell(jax.tree.map(lambda s: jnp.where(first[:, None], 0, s), state), features)

        rows = x.reshape(-1, *x.shape[2:])
        features = self.config.torso_module("torso")(rows).reshape(*first.shape, -1)
        cell = CELLS[self.config.recurrent_cell](self.config.recurrent_size)
        over_time = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
        state, features = over_time(cell, state, (features, first))
        features = features.reshape(-1, self.config.recurrent_size)
        policy, value = dense(self.num_outputs, 0.01)(features), dense(1, 1.0)(features)
        return (policy.reshape(*first.shape, -1), value.reshape(first.shape)), state


def actor_critic(config: NetworkConfig, spec: EnvironmentSpec) -> Network | RecurrentNetwork:
    """The network of `config` for an environment.

    Raises:
        ValueError: The torso cannot take the observation; the leaf is named.
    """
    observation_spec, _ = split_mask(spec.observation)
    if config.torso == "mlp":
        prepare, axes = flattener(observation_spec, config.scaled_bytes), 1
    else:
        prepare, axes = image(observation_spec, config.smallest_image(), config.torso, config.scaled_bytes), 3
    outputs = num_parameters(spec.action)
    if config.recurrent_size:
        return _recurrent(config, RecurrentActorCritic(config, outputs), prepare)
    module = ActorCritic(config, outputs)

    def apply(params: PyTree, observation: PyTree) -> tuple[Float[Array, "*B P"], Float[Array, "*B"]]:
        x = prepare(observation)
        lead = x.shape[:-axes]
        # One leading axis: with two, the weights' gradient contracts over both, which XLA does at half the speed.
        policy, value = module.apply(params, x.reshape(-1, *x.shape[-axes:]))
        return policy.reshape(*lead, -1), value.reshape(lead)

    return Network(init=lambda key, observation: module.init(key, prepare(observation)), apply=apply)


def _recurrent(
    config: NetworkConfig, module: RecurrentActorCritic, prepare: Callable[[PyTree], jax.Array]
) -> RecurrentNetwork:
    def initial_state(batch_size: int) -> PyTree:
        zeros = jnp.zeros((batch_size, config.recurrent_size), jnp.float32)
        return (zeros, zeros) if config.recurrent_cell == "lstm" else zeros

    def init(key: jax.Array, observation: PyTree) -> Any:
        x = prepare(observation)[None]
        return module.init(key, x, jnp.ones(x.shape[:2], bool), initial_state(x.shape[1]))

    def unroll(params: PyTree, observation: PyTree, first: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        return module.apply(params, prepare(observation), first, state)

    def apply(params: PyTree, observation: PyTree, first: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        outputs, state = unroll(params, jax.tree.map(lambda x: x[None], observation), first[None], state)
        return jax.tree.map(lambda x: x[0], outputs), state

    return RecurrentNetwork(init, apply, initial_state, apply_over_time=unroll)

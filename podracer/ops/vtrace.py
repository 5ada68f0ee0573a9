"""V-trace: value targets and policy advantages from what another policy acted."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podracer.types import Trajectory, valid_mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VTrace:
    """What the two losses read, `[T, B]`.

    Attributes:
        target: What the value is fitted to; the value itself on masked rows.
        advantage: What weights the gradient of the log-probability, importance weight included; 0 on masked rows.
        rho: The clipped importance weight alone; 0 on masked rows.
    """

    target: Float[Array, "T B"]
    advantage: Float[Array, "T B"]
    rho: Float[Array, "T B"]


def vtrace(
    trajectory: Trajectory,
    values: Float[Array, "T1 B"],
    log_ratios: Float[Array, "T B"],
    discount: float | jax.Array,
    lambda_: float | jax.Array,
    rho_clip: float | jax.Array,
    c_clip: float | jax.Array,
) -> VTrace:
    """V-trace (Espeholt et al. 2018, arXiv 1802.01561, section 4.1), cut at episode ends.

    ```
    rho_t   = min(rho_clip, pi(a_t) / mu(a_t)),    c_t = lambda * min(c_clip, pi(a_t) / mu(a_t))
    delta_t = rho_t (r_{t+1} + gamma * discount_{t+1} * V_{t+1} - V_t)
    v_t     = V_t + delta_t + gamma * discount_{t+1} * c_t (v_{t+1} - V_{t+1}),    v_T = V_T
    A_t     = rho_t (r_{t+1} + gamma * discount_{t+1} * ((1 - lambda) V_{t+1} + lambda v_{t+1}) - V_t)
    ```

    where `v = V` on LAST rows: what follows is of another episode. So a truncation bootstraps from the value of the
    true final observation, a termination from 0, and nothing flows across the row `LAST -> FIRST`.

    With lambda 1 the advantage is the paper's, `rho_t (r_{t+1} + gamma v_{t+1} - V_t)`. The paper has a lambda in `c_t`
    only (remark 2); here the bootstrap is mixed as well, as in rlax, so that on-policy `A` is GAE(lambda), and not one
    step longer. As in the paper, and unlike rlax, one `rho_clip` serves the targets and the advantages.

    Args:
        trajectory: Its rewards, discounts and step types are read.
        values: `[T + 1, B]`, the learner's value V of each timestep.
        log_ratios: `[T, B]`, `log pi(a) - log mu(a)` of the learner's policy `pi` and the one that acted, `mu`.
        discount: gamma.
        lambda_: lambda; 1 in the paper.
        rho_clip: The bound of `rho`, which says whose value is learnt: infinite that of `pi`, near 0 that of `mu`.
        c_clip: The bound of `c`, which says how far what happened later reaches back; at most `rho_clip`.

    Returns:
        Targets, advantages and weights. Nothing in them stops gradients: give it values and ratios that are constants.
    """
    valid = valid_mask(trajectory)
    timestep = trajectory.timestep
    v_tm1, v_t = values[:-1], values[1:]
    r_t = timestep.reward[1:]
    discount_t = jnp.where(valid, discount * timestep.discount[1:], 0)
    log_ratios = jnp.where(valid, log_ratios, 0)
    # Clipped before the exponential, which then cannot overflow.
    rho_tm1 = jnp.exp(jnp.minimum(log_ratios, jnp.log(rho_clip)))
    c_tm1 = lambda_ * jnp.exp(jnp.minimum(log_ratios, jnp.log(c_clip)))
    td_error = jnp.where(valid, r_t + discount_t * v_t - v_tm1, 0)

    def backwards(following: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta, decay = row
        error = delta + decay * following
        return error, error

    rows = (rho_tm1 * td_error, discount_t * c_tm1)
    _, errors = jax.lax.scan(backwards, jnp.zeros_like(v_t[-1]), rows, reverse=True)
    following = jnp.concatenate([errors[1:], jnp.zeros_like(errors[:1])])
    return VTrace(
        target=v_tm1 + errors,
        advantage=rho_tm1 * (td_error + discount_t * lambda_ * following),
        rho=jnp.where(valid, rho_tm1, 0),
    )

"""Eight CPU devices, JAX's strictest checks, and shapes as the signatures say, for every test."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

# Not where bad input must reach the code's own messages, nor where tests pass half an agent.
install_import_hook(
    ["podracer.ops", *(f"podracer.networks.{name}" for name in ("base", "convolution", "pooling", "torsos"))],
    "shape_checks.checked",
)

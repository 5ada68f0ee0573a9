"""XLA without its optimisations: what these tests compile runs for a second and takes five times longer to optimise."""

import os

# Read when JAX first looks for devices, which no module does while it is imported.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"

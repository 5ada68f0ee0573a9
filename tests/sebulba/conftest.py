"""Fast compilation: what these tests compile runs for a moment."""

import os

os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"

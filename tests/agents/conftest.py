"""What all tests of agents share: fast compilation, and which of the inherited tests can wait."""

import os

import pytest

# What these tests compile runs for a second and takes five times longer to optimise. XLA reads the flags when JAX first
# looks for devices, which no module does while it is imported.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The page's agent shows that it learns on Catch and bootstraps; its other probes are for `make test-slow`."""
    for item in items:
        if "TestA2C::test_solves" in item.nodeid:
            item.add_marker(pytest.mark.slow)

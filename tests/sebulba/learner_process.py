"""One of the processes that learn together: `python learner_process.py OUT PROCESSES INDEX PORT`."""

import sys

import jax
import numpy as np

from podracer import parallel
from podracer.agents import IMPALAConfig, PPOConfig
from podracer.agents.testing import AgentConformance
from podracer.agents.testing.checks import columns_of
from podracer.networks import NetworkConfig
from podracer.sebulba.learner import Learning

DEVICES = 4  # Over all processes.
NETWORK = NetworkConfig(hidden_sizes=(8,), shared=True)
AGENTS = (PPOConfig(num_minibatches=2, network=NETWORK), IMPALAConfig(network=NETWORK))


def learnt(config):
    """The learner's arrays before and after 3 updates on a trajectory, of which every device has its columns."""

    class Subject(AgentConformance):
        def make(self, spec, num_updates):
            return config.make(spec, num_updates)

    subject = Subject()
    trajectory = subject._rollout()[1]
    size = subject.num_envs // DEVICES

    def shard(i):
        return columns_of(trajectory, slice(i * size, (i + 1) * size))

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shard(0))
    learning = Learning(subject._agent(), parallel.make_mesh(jax.devices()), shapes, num_actors=1, batch_splits=1)
    learning.compile()
    state, window = learning.init(jax.random.key(0)), learning.empty_window()
    before = on_the_host(state.learner)
    for _ in range(3):
        mine = [(i, device) for i, device in enumerate(jax.devices()) if device.process_index == jax.process_index()]
        parts = [jax.device_put(shard(i), device) for i, device in mine]
        state, window = learning.update(state, window, learning.assemble([parts]))
    return before, on_the_host(state.learner)


def on_the_host(learner):
    return [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(learner)]


def main(out, processes, index, port):
    jax.config.update("jax_num_cpu_devices", DEVICES // int(processes))
    if int(processes) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", int(processes), int(index))
    assert jax.device_count() == DEVICES
    arrays = {}
    for config in AGENTS:
        for when, leaves in zip(("before", "after"), learnt(config), strict=True):
            arrays |= {f"{when} {type(config).__name__} {i}": leaf for i, leaf in enumerate(leaves)}
    np.savez(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])

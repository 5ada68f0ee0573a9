import ast
import pathlib
import subprocess
import sys
import textwrap

import pytest
import tiny_runs

import podracer

PACKAGE = pathlib.Path(podracer.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_importing_is_cheap():
    """No environment library, no plotting, and no JAX backend, which would fix the devices."""
    script = """
        import sys, podracer
        from jax._src import xla_bridge
        assert not xla_bridge._backends, "importing podracer started JAX"
        for name in ("gymnax", "gymnasium", "jumanji", "brax", "matplotlib", "tensorboardX", "wandb", "orbax"):
            assert name not in sys.modules, name
        assert podracer.experiments.get("ppo_breakout_minatar").env == "gymnax:Breakout-MinAtar"
        assert "gymnax" not in sys.modules
        assert not xla_bridge._backends, "naming an experiment started JAX"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=300)


def test_everything_that_is_promised_is_there():
    for name in podracer.__all__:
        assert getattr(podracer, name) is not None
    assert set(podracer.__all__) <= set(dir(podracer))
    experiment = podracer.experiments.get("ppo_breakout_minatar")
    assert isinstance(experiment, podracer.Experiment)
    assert (experiment.env, experiment.total_steps) == ("gymnax:Breakout-MinAtar", 10_000_000)


def test_two_levels_of_use(tmp_path):
    """An experiment runs; below it, the architecture runs updates of a state that is a pytree."""
    experiment = tiny_runs.experiment(total_steps=64)
    result = experiment.run(tmp_path / "run", quiet=True)
    environment, agent = experiment.make()
    anakin = podracer.Anakin(agent, environment, experiment.architecture, experiment._device_choices()[0])
    state, window = anakin.run(anakin.init(experiment.seed), 2)
    assert int(window.updates) == 2
    assert tiny_runs.bits_of(state.learner) == tiny_runs.bits_of(result.state.learner)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_can_run_code_from_a_file(path):
    """No pickle, nothing built on it, and no evaluation of text: a run directory may come from anybody."""
    if path.name == "gymnasium_processes.py":
        # What it reads are the answers of processes that it has started itself.
        pytest.skip("it reads no file, but the pipes of its own processes")
    banned = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch", "yaml"}
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "compile", "__import__"), f"{path}:{node.lineno}"
        elif isinstance(node, ast.keyword):
            assert node.arg != "allow_pickle", f"{path}:{node.lineno}"
        assert not {name.partition(".")[0] for name in names} & banned, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_uses_what_jax_has_replaced(path):
    """`jax.tree_map` alone is told by its module: `jax.tree.map` and `jax.tree_util.tree_map` are what replaced it."""
    replaced = {"tree_multimap", "device_put_sharded", "device_put_replicated", "pmap"}
    for node in ast.walk(ast.parse(path.read_text())):
        module, names = "", set()
        if isinstance(node, ast.Attribute):
            module, names = ast.unparse(node.value), {node.attr}
        elif isinstance(node, ast.ImportFrom):
            module, names = node.module, {alias.name for alias in node.names}
        assert not names & (replaced | {"tree_map"} if module == "jax" else replaced), f"{path}:{node.lineno}"

"""Names, parameters and every error message of `make` and `register`."""

import subprocess
import sys
import types

import gymnax as gymnax_package
import pytest

from podracer import envs
from podracer.envs import gymnax, names, packages, registry
from podracer.envs.testing import EnvironmentConformance


@pytest.fixture
def clean_registry(monkeypatch):
    monkeypatch.setattr(registry, "_environments", dict(registry._environments))
    monkeypatch.setattr(registry, "_suites", dict(registry._suites))


def test_importing_the_environments_imports_no_environment_library():
    code = "import sys, podracer.envs, podracer.envs.testing; assert not {'gymnax', 'gymnasium'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_are_listed_and_corrected_before_jax_starts(tmp_path):
    """Importing gymnax makes arrays, so that alone would take a machine's devices for a misspelt name."""
    script = """
import sys
from jax._src import xla_bridge
from podracer import cli, envs
ids = {entry.id for entry in envs.list_environments()}
assert {"gymnax:CartPole-v1", "podracer:Catch"} < ids, ids
for id in ("podracer:Cach", "gymnax:CartPol-v1", "CartPole-v1"):
    try:
        envs.make(id)
    except ValueError as error:
        assert "nearest: " in str(error), error
    else:
        raise AssertionError(id)
    try:
        cli.main(["train", "ppo_cartpole", "--env", id])
    except SystemExit as stop:
        assert stop.code == 2, id
    else:
        raise AssertionError(id)
assert "gymnax" not in sys.modules
assert not xla_bridge._backends
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, timeout=300)


def test_another_version_of_gymnax_is_asked_for_its_names(monkeypatch):
    newer = types.SimpleNamespace(registered_envs=["CartPole-v2"])
    monkeypatch.delitem(sys.modules, "gymnax")
    monkeypatch.setattr(gymnax, "import_package", lambda *names: newer)
    assert "CartPole-v1" in gymnax.names()
    monkeypatch.setattr(gymnax, "installed_version", lambda package: "1.0.2")
    assert gymnax.names() == ("CartPole-v2",)


def test_makes_with_parameters_of_the_class_and_of_gymnax():
    environment = envs.make("gymnax:Catch-bsuite", rows=6, columns=4, max_steps_in_episode=3)
    assert environment.spec.observation.shape == (6, 4)
    assert environment._params.max_steps_in_episode == 3
    assert environment == envs.make("gymnax:Catch-bsuite", max_steps_in_episode=3, columns=4, rows=6)
    assert hash(environment) == hash(envs.make("gymnax:Catch-bsuite", max_steps_in_episode=3, columns=4, rows=6))
    assert environment != envs.make("gymnax:Catch-bsuite")
    assert envs.make("podracer:Catch", rows=7) == envs.Catch(rows=7)


@pytest.mark.parametrize(
    ("id", "expected"),
    [
        (
            "gymnax:Brekout-MinAtar",
            "there is no environment 'gymnax:Brekout-MinAtar'; nearest: gymnax:Breakout-MinAtar",
        ),
        ("gymnax:breakout", "gymnax:Breakout-MinAtar"),
        ("CartPole-v1", "gymnax:CartPole-v1"),
        ("gymnx:CartPole-v1", "nearest: gymnax:CartPole-v1"),
        ("podracer:Ctach", "podracer:Catch"),
        ("gymnax:", "there is no environment 'gymnax:'"),
        ("", "there is no environment ''; there are "),
        ("gymnax:zzzzqqqq", "there are 26, for example gymnax:Acrobot-v1"),
    ],
)
def test_unknown_environments_name_the_nearest(id, expected):
    with pytest.raises(ValueError, match="there is no environment") as error:
        envs.make(id)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("id", "parameters", "expected"),
    [
        ("gymnax:CartPole-v1", {"max_steps": 5}, ("'max_steps'", "nearest: max_steps_in_episode")),
        ("gymnax:Catch-bsuite", {"row": 5}, ("'row'", "rows")),
        ("podracer:Catch", {"colums": 5}, ("'colums'", "columns", "podracer:Catch")),
        ("podracer:ProbeMasked", {"length": 5}, ("podracer:ProbeMasked has no parameters", "'length'")),
        (
            "gymnax:CartPole-v1",
            {"max_steps_in_episode": 0},
            ("is 0; it must be an integer of 1 or more", "default 500"),
        ),
        ("gymnax:CartPole-v1", {"max_steps_in_episode": 2.5}, ("is 2.5", "an integer of 1 or more")),
        ("gymnax:CartPole-v1", {"gravity": float("nan")}, ("gravity of gymnax:CartPole-v1 is nan", "a finite number")),
        ("gymnax:CartPole-v1", {"gravity": "strong"}, ("'strong'", "a finite number")),
        ("gymnax:Asterix-MinAtar", {"ramping": 1}, ("is 1", "True or False")),
        ("gymnax:MemoryChain-bsuite", {"memory_length": 2.0}, ("is 2.0", "an integer")),
        ("gymnax:Acrobot-v1", {"available_torque": (1.0, 2.0)}, ("available_torque", "shape (3,)")),
        ("podracer:Countdown", {"ends": "never"}, ("'never'", "termination, truncation, both")),
        ("podracer:Countdown", {"length": 0}, ("length is 0", "at least 1")),
        ("podracer:Catch", {"columns": 30}, ("columns=30", "at most 19 with rows=10")),
        ("podracer:Catch", {"rows": 1}, ("rows >= 2", "rows=1")),
        ("podracer:ProbeMemory", {"length": 0}, ("length is 0",)),
        ("podracer:ProbeDelayedReward", {"length": 0}, ("length is 0",)),
    ],
)
def test_bad_parameters_are_named_with_the_rule(id, parameters, expected):
    with pytest.raises(ValueError, match=r".") as error:
        envs.make(id, **parameters)
    for part in expected:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_parameters_that_are_arrays_or_keys():
    torque = envs.make("gymnax:Acrobot-v1", available_torque=[-2, 0, 2])
    assert torque._params.available_torque.tolist() == [-2.0, 0.0, 2.0]
    assert hash(torque) == hash(
        envs.make("gymnax:Acrobot-v1", available_torque=torque._params.available_torque.astype(int))
    )
    maps = [envs.make("gymnax:DeepSea-bsuite", size=6, action_mapping_key=seed) for seed in (0, 1)]
    assert (maps[0]._environment.action_mapping != maps[1]._environment.action_mapping).any()
    assert envs.make("gymnax:FourRooms-misc", goal_fixed=[1, 2])._environment.goal_fixed.tolist() == [1, 2]


@pytest.mark.parametrize(("id", "extra"), [("envpool:CartPole-v1", "envpool"), ("ale:pong", "atari")])
def test_a_missing_package_is_named_with_the_extra_that_brings_what_it_needs(id, extra, monkeypatch):
    def missing(module):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module.partition(".")[0])

    monkeypatch.setattr(packages.importlib, "import_module", missing)
    with pytest.raises(envs.EnvironmentUnavailableError, match=rf"or podracer-rl with the extra \[{extra}\]"):
        envs.make_host(id)


def test_lists_every_environment_with_its_package_and_version():
    entries = {entry.id: entry for entry in envs.list_environments()}
    assert {f"gymnax:{name}" for name in gymnax_package.registered_envs} < set(entries)
    assert entries["gymnax:CartPole-v1"].package == "gymnax"
    assert entries["gymnax:CartPole-v1"].version == packages.installed_version("gymnax")
    assert entries["podracer:Catch"].package == "podracer"
    assert entries["podracer:Catch"].version is not None
    assert list(entries) == sorted(entries)


def test_a_missing_package_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    monkeypatch.setattr(packages.importlib.metadata, "version", _not_found)
    with pytest.raises(envs.EnvironmentUnavailableError, match="pip install gymnax"):
        envs.make("gymnax:CartPole-v1")
    with pytest.raises(ValueError, match="nearest: gymnax:CartPole-v1"):  # Misspellings are found all the same.
        envs.make("gymnax:CartPol-v1")
    with pytest.raises(ImportError, match="is not installed"):
        envs.make("gymnax:Breakout-MinAtar")
    versions = {entry.version for entry in envs.list_environments() if entry.package == "gymnax"}
    assert versions == {None}
    assert sum(entry.package == "gymnax" for entry in envs.list_environments()) == 26


def _not_found(package):
    raise packages.importlib.metadata.PackageNotFoundError(package)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import jax\njax.a_function_that_was_removed", "AttributeError"),
        ("import a_dependency_that_is_missing", "No module named 'a_dependency_that_is_missing'"),
        ("raise RuntimeError('no such driver')", "RuntimeError: no such driver"),
    ],
)
def test_a_broken_package_is_named_with_its_version_and_the_cause(monkeypatch, tmp_path, source, cause):
    (tmp_path / "gymnax.py").write_text(source)
    for module in [name for name in sys.modules if name.partition(".")[0] == "gymnax"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packages.importlib.metadata, "version", lambda package: "9.9.9")
    with pytest.raises(envs.EnvironmentUnavailableError, match=r"gymnax 9\.9\.9 is installed but cannot be") as error:
        envs.make("gymnax:CartPole-v1")
    assert cause in str(error.value)
    assert any(entry.id == "gymnax:CartPole-v1" for entry in envs.list_environments())


def test_a_gymnax_that_does_not_know_truncation_is_too_old(monkeypatch):
    old = types.SimpleNamespace(Environment=object, registered_envs=gymnax_package.registered_envs)
    monkeypatch.setattr(gymnax, "import_package", lambda *names: old)
    with pytest.raises(envs.EnvironmentUnavailableError, match=r"1\.0\.1 or later is needed: `pip install -U gymnax`"):
        gymnax.make("CartPole-v1")


def test_mnist_that_cannot_be_downloaded_is_a_clear_error(monkeypatch):
    def offline(*arguments):
        raise OSError("Name or service not known")

    monkeypatch.setattr("gymnax.utils.load_mnist.load_mnist", offline)
    with pytest.raises(envs.EnvironmentUnavailableError, match="gymnax:MNISTBandit-bsuite needs a data set") as error:
        envs.make("gymnax:MNISTBandit-bsuite")
    assert "Name or service not known" in str(error.value)


@pytest.mark.usefixtures("clean_registry")
class TestRegister:
    def test_an_environment(self):
        envs.register("mine:Grid", lambda size=3: envs.Countdown(size))
        assert envs.make("mine:Grid", size=5) == envs.Countdown(5)
        assert any(entry.id == "mine:Grid" and entry.version == "local" for entry in envs.list_environments())
        with pytest.raises(ValueError, match="parameter of mine:Grid named 'siz'; nearest: size"):
            envs.make("mine:Grid", siz=5)
        with pytest.raises(ValueError, match="nearest: mine:Grid"):
            envs.make("mine:Gird")

    def test_a_suite(self):
        envs.register("mine", lambda name, **parameters: envs.Countdown(**parameters), names=lambda: ("A", "B"))
        assert envs.make("mine:B", length=4) == envs.Countdown(4)
        assert {"mine:A", "mine:B"} < {entry.id for entry in envs.list_environments()}
        with pytest.raises(ValueError, match="nearest: mine:B, mine:A"):
            envs.make("mine:C")

    def test_a_suite_without_a_list_of_names(self):
        envs.register("open", lambda name: envs.Countdown(int(name)))
        assert envs.make("open:7") == envs.Countdown(7)

    def test_twice_is_refused_unless_it_is_the_same(self):
        envs.register("mine:Grid", envs.Countdown)
        envs.register("mine:Grid", envs.Countdown)
        with pytest.raises(ValueError, match="'mine:Grid': it is registered already"):
            envs.register("mine:Grid", envs.Catch)
        with pytest.raises(ValueError, match="'gymnax': it is registered already"):
            envs.register("gymnax", envs.Catch)

    @pytest.mark.parametrize("name", ["", ":", "mine:", ":Grid", " mine:Grid"])
    def test_malformed_names_are_refused(self, name):
        with pytest.raises(ValueError, match="cannot register"):
            envs.register(name, envs.Countdown)

    def test_what_is_not_a_factory_or_not_an_environment_is_refused(self):
        with pytest.raises(ValueError, match="is not callable"):
            envs.register("mine:Grid", envs.Countdown())
        envs.register("mine:Wrong", lambda: object())
        with pytest.raises(ValueError, match="'mine:Wrong' returned a object, which has no spec, reset, step"):
            envs.make("mine:Wrong")

    def test_environments_registered_with_gymnax_are_found(self, monkeypatch):
        monkeypatch.setattr(gymnax_package.registration, "_registry", dict(gymnax_package.registration._registry))
        before = list(gymnax_package.registered_envs)
        from gymnax.environments.bsuite.catch import Catch

        try:
            gymnax_package.register("Fresh-v0", Catch)
            assert envs.make("gymnax:Fresh-v0", rows=4).spec.observation.shape == (4, 5)
        finally:
            gymnax_package.registered_envs[:] = before


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("rowz", ["rows", "columns"], "rows"),
        ("COLUMNS", ["rows", "columns"], "columns"),
        ("breakout", ["CartPole-v1", "Breakout-MinAtar"], "Breakout-MinAtar"),
    ],
)
def test_nearest_names(name, known, expected):
    assert names.nearest_names(name, known)[0] == expected


class TestMadeByName(EnvironmentConformance):
    def make(self):
        return envs.make("podracer:Catch", rows=5, columns=3)

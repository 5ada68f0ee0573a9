"""Importing environment packages, any of which may be missing or broken."""

import importlib
import importlib.metadata
from types import ModuleType

# Of this distribution: what a package needs besides, in versions that work.
_EXTRAS = {"ale-py": "atari", "envpool": "envpool", "gymnasium": "gymnasium", "wandb": "wandb"}


class EnvironmentUnavailableError(ImportError, ValueError):
    """The environment is known but cannot be made here: its package or its data is missing, too old or broken."""


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, None where it is not installed. Imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_package(package: str, module: str | None = None) -> ModuleType:
    """Imports an optional package the moment an environment needs it.

    Args:
        package: The name that `pip install` takes.
        module: The module to import; the package's own name where None.

    Raises:
        EnvironmentUnavailableError: The package is missing (the message has the install command) or its import fails
            (the message has its version and the cause).
    """
    module = module or package
    try:
        return importlib.import_module(module)
    except Exception as error:  # A package written for another JAX may raise anything while it is imported.
        # A dependency of an installed package may be what is missing: that package is broken, not absent.
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            extra = f", or podracer-rl with the extra [{_EXTRAS[package]}]" if package in _EXTRAS else ""
            raise EnvironmentUnavailableError(
                f"the package {package} is not installed; install it with `pip install {package}`{extra}"
            ) from error
        raise EnvironmentUnavailableError(
            f"{package} {installed_version(package) or '(unknown version)'} is installed but cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error

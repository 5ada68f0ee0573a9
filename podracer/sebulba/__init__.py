"""Sebulba: environments on the host, devices that act, devices that learn."""

from podracer.sebulba.actor import ActorError
from podracer.sebulba.config import SebulbaConfig
from podracer.sebulba.learner import SebulbaState
from podracer.sebulba.report import SebulbaWindow
from podracer.sebulba.runner import Sebulba

__all__ = ["ActorError", "Sebulba", "SebulbaConfig", "SebulbaState", "SebulbaWindow"]

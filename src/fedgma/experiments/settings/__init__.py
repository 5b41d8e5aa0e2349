"""The settings of a run: what can be set, what follows from what is set, and what is recorded of it."""

from fedgma.experiments.settings.defaults import complete
from fedgma.experiments.settings.recorded import record
from fedgma.experiments.settings.run import SECTIONS, Settings

__all__ = ["SECTIONS", "Settings", "complete", "record"]

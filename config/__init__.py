"""Settings: what may be set, where it comes from, and what is wrong with it."""

from .load import add_flags, load
from .settings import RunSettings, Settings, TunerSettings

__all__ = ["RunSettings", "Settings", "TunerSettings", "add_flags", "load"]

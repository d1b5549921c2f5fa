"""The daemon: sockets, engine and command line."""

from .daemon import Daemon, serve
from .recorder import Recorded, read_record

__all__ = ["Daemon", "Recorded", "read_record", "serve"]

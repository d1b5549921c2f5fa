"""The record: every batch that counted, in the order in which it was taken; a switch of `serve`.

The file is a sequence of msgpack arrays ``[time, run, actor, frame]``: nanoseconds since 1970, two names, and the
batch's own frame as it came over the wire (`decode_batch` reads it). It is appended to; `read_record` reads it back.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgpack as _untyped_msgpack  # pyright: ignore[reportMissingTypeStubs]

from ..wire.codec import Batch, decode_batch, encode_batch
from ..wire.errors import ConfigError, FrameError

msgpack: Any = _untyped_msgpack


class Recorded(NamedTuple):
    """One batch of a record."""

    time: int
    """When it was taken; nanoseconds since 1970."""
    run: str
    actor: str
    batch: Batch


class Recorder:
    """Appends batches to a file.

    Args:
        path: the file; it is created if need be.

    Raises:
        ConfigError: the file cannot be opened for appending.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            if os.path.isfile(path) and os.path.getsize(path):
                next(read_record(path), None)
            self._file: IO[bytes] = open(path, "ab", buffering=2**20)  # noqa: SIM115 - open for the daemon's life
        except OSError as error:
            raise ConfigError(f"record: cannot append to {self.path}: {error.strerror}") from error
        except FrameError as error:
            raise ConfigError(f"record: {error}; name another file") from error
        self._packer: Any = msgpack.Packer()

    def write(self, run: str, actor: str, batch: Batch) -> None:
        """Appends one batch. Raises OSError when the disk does."""
        self._file.write(self._packer.pack((time.time_ns(), run, actor, encode_batch(batch))))

    def flush(self) -> None:
        """Hands what is buffered to the operating system. Raises OSError when the disk does."""
        self._file.flush()

    def close(self) -> None:
        """Writes what is buffered and closes the file; what the disk does not take is lost, and was said before."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_record(path: str | os.PathLike[str]) -> Iterator[Recorded]:
    """The batches of a record, in order.

    Raises:
        FrameError: the file is not a record. (A last entry cut short by a crash is passed over.)
    """
    with Path(path).open("rb") as file:
        entries = msgpack.Unpacker(file, max_ext_len=0, max_map_len=0, max_array_len=4)
        while True:
            try:
                taken_at, run, actor, frame = next(entries)
                batch = decode_batch(frame)
                if not isinstance(batch, Batch):
                    raise FrameError("got a batch without its actions")
                recorded = Recorded(taken_at, run, actor, batch)
            except StopIteration:
                return
            except (TypeError, ValueError, msgpack.exceptions.UnpackException) as error:
                raise FrameError(f"{os.fspath(path)} is not a record: {error}") from error
            yield recorded

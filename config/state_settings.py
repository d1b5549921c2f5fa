"""Where the daemon keeps what must survive it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from .section import Positive, Section

DEFAULT_DIRECTORY = "cotuned-state"


class StateSettings(Section):
    """Durable state: what has been told to a client survives the daemon's death."""

    directory: str | None = Field(
        default=DEFAULT_DIRECTORY,
        description="Folder for state.db, relative to the working directory; made if need be. "
        'Null or "": nothing is kept, and durable means applied.',
    )
    interval: Positive = Field(
        default=0.25, le=60, description="Most seconds from a change to its commit while nobody waits for it."
    )
    history_rows: int = Field(
        default=100_000, ge=0, le=2**31, description="Most lines of history kept, all runs together; the oldest go."
    )
    synchronous: Literal["normal", "full"] = Field(
        default="normal",
        description="SQLite's: normal survives the daemon's death, full also a power cut, at one disk flush a commit.",
    )

    @field_validator("directory")
    @classmethod
    def _empty_is_none(cls, directory: str | None) -> str | None:
        return directory or None

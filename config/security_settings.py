"""Who may connect: the daemon's own key and the folder of its clients' keys."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from .section import Section


class SecuritySettings(Section):
    """CURVE on all three sockets; `docs/security.md` says how to make the keys."""

    server_key: str | None = Field(
        default=None, description="File with the daemon's secret key (keys/server.key_secret); null: no CURVE."
    )
    clients: str | None = Field(
        default=None,
        description="Folder with actor/, learner/ and observer/, each with public keys; null: clients/ beside it.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> SecuritySettings:
        if self.clients is not None and self.server_key is None:
            raise ValueError(
                f"clients: got {self.clients!r:.120} without security.server_key, so no key would be looked at; set "
                "both, or neither"
            )
        return self

    @property
    def clients_folder(self) -> Path:
        """Where the clients' keys are; only with a `server_key`."""
        assert self.server_key is not None
        return Path(self.clients) if self.clients is not None else Path(self.server_key).parent / "clients"

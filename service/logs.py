"""Structured logs: one JSON object a line on standard error, never one a batch."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

logger = logging.getLogger("cotuned")


class JsonLines(logging.Formatter):
    """``{"time": …, "level": …, "event": …, …}`` with whatever `log` was given."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up(level: str) -> None:
    """Sends the daemon's log to standard error from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def log(level: int, event: str, **fields: Any) -> None:
    """One line: `event` says what happened, in a word or two; `fields` say the rest."""
    logger.log(level, event, extra={"fields": fields})

"""Structured logs: events with fields, as text for people or one JSON object a line for machines.

In: `log_event(logger, level, event, **fields)`. Out: a record whose message reads `event key=value ...` and whose fields
`JsonFormatter` prints as JSON. Prompts and answers are never logged, only ids and counts.
"""

from __future__ import annotations

import json
import logging
from typing import Any

__all__ = ["JsonFormatter", "log_event"]


def log_event(logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
    """Log one event; costs next to nothing while `level` is off."""
    if logger.isEnabledFor(level):
        text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        logger.log(level, "%s %s", event, text, extra={"event": event, "fields": fields})


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time, level, logger, then event and fields, or the message of an ordinary record."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON; an exception's traceback goes into `exception`."""
        entry: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if hasattr(record, "fields"):
            entry |= {"event": getattr(record, "event", ""), **record.fields}
        else:
            entry["message"] = record.getMessage()
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if " " in text or not text else text

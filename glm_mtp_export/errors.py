"""The exceptions a user can meet: one class per remedy, each with the exit code the command line uses.

A message names the tensor, field or file, gives what was found and what was expected, and ends in the next step.
"""

from __future__ import annotations

__all__ = [
    "ArtifactError",
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "GlmMtpError",
    "MissingDependencyError",
    "OptionError",
    "RequestError",
]


class GlmMtpError(Exception):
    """Base of every error that is the input's fault or the machine's, never a bug; shown without a traceback."""

    exit_code = 2


class OptionError(GlmMtpError):
    """An option or a combination of options cannot be used: change the command."""


class ConfigError(GlmMtpError):
    """`config.json` cannot be used: mend the named field."""


class CheckpointError(GlmMtpError):
    """The weights on disk cannot be used: fetch or mend the named tensor or file."""


class ArtifactError(GlmMtpError):
    """An exported artifact is damaged, incomplete or of another version: export again."""


class EngineError(GlmMtpError):
    """An engine cannot be built, loaded or trusted here: rebuild it with what the message names."""


class RequestError(GlmMtpError):
    """A generation request cannot be served: change the request."""


class MissingDependencyError(GlmMtpError):
    """A package that this command needs is not installed: the message has the pip command."""

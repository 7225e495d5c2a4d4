"""Exceptions that end a recording."""

from __future__ import annotations


class UnreplayableError(ValueError):
    """The pipeline's loop is not a function of (x, sigma, prompt rows) that can be inferred; the
    sentence names the inference that failed."""


class Halt(BaseException):
    """A callback raises it to leave the loop. It is no Exception: pipelines must not catch it."""


class Unknown(BaseException):
    """An encoder was called with new arguments in a run that should need only known answers."""


class CallError(ValueError):
    """The pipeline's own call fails; the sentence says where, and what could be the reason."""


class TooFewSteps(CallError):
    """The pipeline's loop makes too few of the requested steps."""

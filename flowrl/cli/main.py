"""The command line: train, generate, score, evaluate, report, show, check, serve, list.

Exit codes: 0 done, 1 a failure while running, 2 the user's input was wrong and nothing was started.
"""

from __future__ import annotations

from flowrl.cli import check, evaluate, generate, score, serve, show, train  # noqa: F401
from flowrl.cli.common import app


def main() -> None:
    """Entry point of the `flowrl` command."""
    app()

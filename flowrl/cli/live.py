"""`flowrl live`: the report of a run as a page that follows its training."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from flowrl.cli.common import echo, one_sentence_errors
from flowrl.cli.report import Group, Runs

USUAL = "Default: 8322, or a free one where that is taken."
Port = Annotated[int | None, typer.Option(min=0, max=65535, help=USUAL)]
Open = Annotated[bool, typer.Option("--open", help="Open the page in the browser.")]


def live(runs: Runs, port: Port = None, open_page: Open = False, group: Group = None) -> None:
    """Show the report of a run as a local page that follows it. Several runs are compared. Nothing
    is written into their folders."""
    with one_sentence_errors():
        from flowrl.report.live_page import LivePage, listen

        server = listen(LivePage(runs, group), port)
    address = "http://{}:{}".format(*server.server_address)
    echo(f"{address} shows {', '.join(map(str, runs))} until Ctrl-C")
    with server, suppress(KeyboardInterrupt):
        if open_page:
            typer.launch(address)
        server.serve_forever()

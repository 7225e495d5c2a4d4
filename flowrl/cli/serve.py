"""`flowrl serve`: rewards behind HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from flowrl.cli.common import app, one_sentence_errors


@app.command()
def serve(
    reward: Annotated[
        list[str], typer.Argument(help="REWARD, REWARD=WEIGHT or REWARD.SETTING=VALUE.")
    ],
    host: Annotated[
        str, typer.Option(help="Address; beyond this machine it needs --token-env.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any.")] = 8321,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with the token that clients send.")
    ] = None,
    max_mb: Annotated[float, typer.Option(min=1, help="Of one request, in megabytes.")] = 512,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Most samples of several requests scored together.")
    ] = 64,
    device: Annotated[str | None, typer.Option(help="Default: a GPU if there is one.")] = None,
) -> None:
    """Serve rewards to other processes; reward=remote asks them."""
    from flowrl.rewards import parse_words
    from flowrl.rewards.server.app import Server

    with one_sentence_errors():
        server = Server(
            parse_words(reward),
            host=host,
            port=port,
            token_env=token_env,
            max_mb=max_mb,
            max_batch=max_batch,
            device=device,
        )
    typer.echo(server.describe())
    server.run()

"""`flowrl serve`: rewards behind HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from flowrl.cli.common import REWARD, echo, one_sentence_errors, parse_rewards
from flowrl.runtime.excerpt import part

Rewards = Annotated[
    list[str],
    typer.Argument(metavar=REWARD, help="A reward and its settings."),
]
Host = Annotated[str, typer.Option(help="Address; beyond this machine it needs --token-env.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0: any.")]
TokenEnv = Annotated[
    str | None, typer.Option(help="Environment variable with the token that clients send.")
]
MaxMb = Annotated[
    float, typer.Option(min=1, help="Of one request, in megabytes; all have twice as much.")
]
MaxBatch = Annotated[
    int, typer.Option(min=1, help="Most samples of several requests scored together.")
]
MaxConnections = Annotated[int, typer.Option(min=1, help="Most that are open at once.")]
Device = Annotated[str | None, typer.Option(help="Default: a GPU if there is one.")]


def serve(
    reward: Rewards,
    host: Host = "127.0.0.1",
    port: Port = 8321,
    token_env: TokenEnv = None,
    max_mb: MaxMb = 512,
    max_batch: MaxBatch = 64,
    max_connections: MaxConnections = 1000,
    device: Device = None,
) -> None:
    """Serve rewards to other processes; reward=remote asks them."""
    with one_sentence_errors():
        entries = parse_rewards(reward)  # the words, before torch is imported
        part("flowrl.rewards.server.app", "token_for")(host, token_env)

        from flowrl.rewards.server.app import Server

        server = Server(
            entries,
            host=host,
            port=port,
            token_env=token_env,
            device=device,
            max_mb=max_mb,
            max_batch=max_batch,
            max_connections=max_connections,
        )
    echo(server.describe())
    server.run()

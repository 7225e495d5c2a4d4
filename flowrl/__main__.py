"""`python -m flowrl` is the `flowrl` command."""

from flowrl.cli.main import main

main()

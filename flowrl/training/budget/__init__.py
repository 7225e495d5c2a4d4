"""`flowrl budget`: memory and seconds of a run, from its config, before it starts."""

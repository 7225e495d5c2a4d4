"""Services that runs use: log, run folder, checkpoints, processes, signals, plugins, statistics."""

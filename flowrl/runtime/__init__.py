"""What runs stand on: log, run folder, checkpoints, processes, signals, plugins, statistics."""

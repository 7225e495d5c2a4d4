"""What everything stands on: log, run folder, checkpoints, processes, signals, statistics."""

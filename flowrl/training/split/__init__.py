"""One network over several processes: sharded weights, split sequences."""

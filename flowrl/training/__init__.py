"""Training: the loop, its parts, and its files on disk."""

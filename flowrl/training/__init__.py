"""Training: the loop, what it is built from, and what it leaves on disk."""

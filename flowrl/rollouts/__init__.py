"""Rollouts: what an iteration trains on, sampled or read from files, and scored."""

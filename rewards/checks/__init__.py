"""Checks whether a reward can be trusted: its contract, its order, and attacks."""

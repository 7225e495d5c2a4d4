"""Whether a reward can be trusted: checks of its contract, its order, and attacks."""

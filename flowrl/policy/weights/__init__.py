"""Weights of a policy: what is trained, where it lies, in which type, how it is called."""

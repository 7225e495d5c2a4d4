"""Weights of a policy: the trained parts, their places, types and forwards."""

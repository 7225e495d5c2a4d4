"""Rewards behind HTTP: the service and what the client reward shares with it."""

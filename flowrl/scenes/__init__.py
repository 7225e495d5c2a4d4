"""Worlds of small pictures that a verifier can read, and the one grammar of their prompts."""

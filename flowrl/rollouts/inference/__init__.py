"""Sampling without training: `flowrl generate`, candidates, refinement."""

"""Evaluation on held-out prompts, and suites that put models and runs side by side."""

from flowrl.evaluation.held_out import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]

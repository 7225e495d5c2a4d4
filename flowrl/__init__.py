"""flowrl: align image and video diffusion and flow models with reinforcement learning.

    policy = flowrl.load_policy("shapes-sd3")
    media = flowrl.generate(policy, ["a red circle"], steps=16, guidance=3.0)
    run = flowrl.train(flowrl.load_config("quickstart"))

Names load when first used, so importing flowrl is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "load_policy": "flowrl.policy",
    "Policy": "flowrl.policy",
    "load_config": "flowrl.config",
    "Config": "flowrl.config",
    "Trainer": "flowrl.training.loop",
    "Run": "flowrl.training.records",
    "train": "flowrl.training.train",
    "generate": "flowrl.rollouts.inference.generate",
    "evaluate": "flowrl.evaluation",
    "evaluate_run": "flowrl.evaluation.of_run",
    "reward": "flowrl.rewards",
    "score": "flowrl.rewards",
    "show": "flowrl.report.show",
    "show_tree": "flowrl.report.show",
}
__all__ = [
    "Config",
    "Policy",
    "Run",
    "Trainer",
    "__version__",
    "evaluate",
    "evaluate_run",
    "generate",
    "load_config",
    "load_policy",
    "reward",
    "score",
    "show",
    "show_tree",
    "train",
]

if TYPE_CHECKING:
    from flowrl.config import Config, load_config
    from flowrl.evaluation import evaluate
    from flowrl.evaluation.of_run import evaluate_run
    from flowrl.policy import Policy, load_policy
    from flowrl.report.show import show, show_tree
    from flowrl.rewards import reward, score
    from flowrl.rollouts.inference.generate import generate
    from flowrl.training.loop import Trainer
    from flowrl.training.records import Run
    from flowrl.training.train import train


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'flowrl' has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(_HOMES[name]), name)

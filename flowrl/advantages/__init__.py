"""Credit: from rewards to one advantage per sample, and per trained transition."""

from flowrl.advantages.group import group_relative
from flowrl.advantages.several import best_worst, combine, win_rate
from flowrl.advantages.suspicion import Sign, suspects
from flowrl.advantages.trees import (
    branch,
    decisiveness,
    dense,
    gains,
    granular,
    siblings,
    spread,
    step_gains,
    td,
    tree_backup,
)

__all__ = [
    "Sign",
    "best_worst",
    "branch",
    "combine",
    "decisiveness",
    "dense",
    "gains",
    "granular",
    "group_relative",
    "siblings",
    "spread",
    "step_gains",
    "suspects",
    "td",
    "tree_backup",
    "win_rate",
]

"""Credit: from rewards to one advantage per sample, and per trained transition."""

from flowrl.advantages.group import best_worst, combine, group_relative, win_rate
from flowrl.advantages.trees import (
    branch,
    decisiveness,
    granular,
    siblings,
    spread,
    td,
    tree_backup,
)

__all__ = [
    "best_worst",
    "branch",
    "combine",
    "decisiveness",
    "granular",
    "group_relative",
    "siblings",
    "spread",
    "td",
    "tree_backup",
    "win_rate",
]

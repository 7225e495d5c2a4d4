"""The settings that there are, read from a file: no plugin is imported for it, and no torch.

schemas.json holds the settings of the config's sections ("config"), of each algorithm and of each
reward that flowrl ships, as their classes declare them; scripts/docs/config_reference.py writes it,
and a test compares it with them. A setting has its default, what it accepts in words, the types
that it takes, and its sentence. A plugin of one's own is not in it: its class is loaded.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("schemas.json")


@cache
def settings(owner: str) -> dict[str, dict[str, Any]] | None:
    """Key -> {"default", "accepts", "kinds", "says"} for "config", "algorithms.NAME" or
    "rewards.NAME"; None: flowrl ships nothing of this name."""
    return json.loads(FILE.read_text(encoding="utf-8")).get(owner)  # type: ignore[no-any-return]

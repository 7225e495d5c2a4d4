"""YAML that nobody checked yet, bounded in size and depth before it is read; its tree as dotted
keys."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import yaml

LARGEST = 1_000_000  # most bytes of a file
DEEPEST = 50  # most lists and mappings inside one another
PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read(path: Path) -> str:
    """Read the text of a YAML file; if it cannot be read or is too large -> OSError or
    ValueError."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} bytes, which no config needs")
    return data.decode("utf-8")


def load(text: str) -> Any:
    """Parse a text into plain values; if that fails -> ValueError. OmegaConf (from 2.4 on) limits
    the size to which aliases expand."""
    # imported here, because a server of rewards needs no OmegaConf
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    depth = 0
    try:
        # the only step that does not recurse, so deep text cannot exhaust the stack
        for event in yaml.parse(text, Loader=PARSER):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ValueError(f"it nests more than {DEEPEST} lists and mappings")
        return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ValueError(str(error)) from error


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out

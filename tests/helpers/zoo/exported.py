"""The pipeline classes and the block sets that diffusers exports, and why some were not tried."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import yaml

VERSION = "0.42.1"  # of the diffusers whose classes the table of docs/models.md has
UNTRIED = Path(__file__).parent / "untried.yaml"
# StableDiffusionPipeline and StableDiffusionPipelineSafe, not ImagePipelineOutput; a modular
# pipeline goes by the name of its blocks
CLASS = re.compile(r"(?!.*(ModularPipeline|Output|Config)$).*(Pipeline|Blocks$)")


def exported() -> set[str]:
    """Names of all classic pipeline classes and of all block sets in the top package."""
    import diffusers

    return {name for name in dir(diffusers) if CLASS.match(name)}


def untried() -> dict[str, list[str]]:
    """Reason -> names of the classes that were not tried for it."""
    return yaml.safe_load(UNTRIED.read_text(encoding="utf-8"))


def unnamed(tried: Iterable[str]) -> str:
    """Say which exported classes were neither tried nor left out for a reason; "": none."""
    import diffusers

    known = {*tried, *(name for names in untried().values() for name in names)}
    new = sorted(exported() - known)
    if not new:
        return ""
    return (
        f"diffusers {diffusers.__version__} has {', '.join(new)}, and docs/models.md does not say"
        " whether it is a policy; add a case to tests/helpers/zoo, or a reason to its untried.yaml"
    )

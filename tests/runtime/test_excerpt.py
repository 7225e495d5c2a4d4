"""A part of a module is what the whole module gives, and runs nothing that it does not need."""

import importlib
from pathlib import Path

import pytest

from flowrl.runtime import excerpt, registry

PLUGINS = {"flowrl.algorithms": ("ALGORITHM", "Config"), "flowrl.rewards": ("REWARD", "Settings")}


@pytest.mark.parametrize("package", PLUGINS)
def test_the_settings_of_an_excerpt_are_those_of_the_plugin(package):
    plugin, attribute = PLUGINS[package]
    for name in registry.shipped(package):
        module = importlib.import_module(f"{package}.{name}")
        own = excerpt.Excerpt(module.__name__, Path(module.__file__)).stated(plugin, attribute)
        whole = getattr(getattr(module, plugin), attribute)
        assert own is not whole and own.__module__.endswith("(excerpt)")
        assert own.model_json_schema() == whole.model_json_schema(), name


MODULE = """
from __future__ import annotations
import nowhere_at_all
from nowhere_at_all import Tensor
from pydantic import BaseModel, field_validator

SIZES = {"small": 1, "large": 3}

def halved(x: Tensor, nowhere_at_all: Tensor) -> Tensor:
    return nowhere_at_all / 2 if x else halved(x, 1)

class Options(BaseModel):
    size: int = SIZES["large"]

    @field_validator("size")
    @classmethod
    def check(cls, value):
        if value not in SIZES.values():
            raise ValueError(f"choose {limit()}")
        return value

def limit():
    return max(SIZES.values())

def uses_it(y):
    return nowhere_at_all.norm(y)

class Plugin:
    Config = Options
    scale = f"up to {SIZES['large']}"

    def __call__(self, x: Tensor) -> Tensor:
        return x

PLUGIN = Plugin
"""


def test_an_excerpt_runs_only_the_statements_that_are_needed(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    found = excerpt.Excerpt("mine", tmp_path / "mine.py")
    options = found.stated("PLUGIN", "Config")
    assert options().size == 3 and found.stated("PLUGIN", "scale") == "up to 3"
    with pytest.raises(ValueError, match="choose 3"):
        options(size=2)
    assert found.halved(1, 4) == 2 and found.stated("PLUGIN", "Settings") is None
    with pytest.raises(ModuleNotFoundError):
        _ = found.uses_it
    with pytest.raises(AttributeError, match="mine has no Nothing"):
        _ = found.Nothing


def test_what_is_imported_already_is_taken_as_it_is():
    own = importlib.import_module("flowrl.samplers.sde")
    assert excerpt.part("flowrl.samplers", "sde") is own
    assert excerpt.part("flowrl.samplers.sde", "choices") is own.choices
    assert excerpt.declared("flowrl.nowhere", "REWARD", "Settings") is None

"""The repeated blocks of a network: each is gathered, compiled or moved as a unit."""

from __future__ import annotations

from torch import nn


def blocks(network: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a network in the order of its modules; none lies within another.

    For models of diffusers and transformers, blocks are of the classes that they list themselves
    (`_repeated_blocks`, `_no_split_modules`), the innermost if they are nested, as in UNets; for
    others, blocks are the members of the outermost lists of two modules or more.
    """
    named = _of_classes(network, _listed(network))
    return named if len(named) > 1 else _members(network)


def _listed(network: nn.Module) -> set[str]:
    """Names of the classes that a model lists as its blocks."""
    own = (getattr(network, name, None) for name in ("_repeated_blocks", "_no_split_modules"))
    return {name for listed in own for name in listed or ()}


def _of_classes(network: nn.Module, names: set[str]) -> list[nn.Module]:
    """Find the modules of these classes that hold no other of them."""
    found = [m for m in network.modules() if type(m).__name__ in names and _weighs(m)]
    chosen = set(map(id, found))
    return [m for m in found if sum(id(inner) in chosen for inner in m.modules()) == 1]


def _members(module: nn.Module) -> list[nn.Module]:
    out: list[nn.Module] = []
    for child in module.children():
        members = [m for m in child.children() if _weighs(m)]
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(members) > 1:
            out += members
        else:
            out += _members(child)
    return out


def _weighs(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None

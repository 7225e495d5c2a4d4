"""Policies of the embedded model, loaded once a process: a copy takes a tenth of the time."""

import copy
import copyreg
import types

import torch

from flowrl.config import build

LOADED = {}
load = build.load_policy

# schedulers' configs hold some, which `copy` does not know
copyreg.pickle(types.MappingProxyType, lambda held: (types.MappingProxyType, (dict(held),)))


def load_policy(source, **given):
    """`flowrl.load_policy`, for build.make_policy; what is not the embedded model as it is, or is
    loaded in a way of its own, is loaded anew."""
    plain = given["encoding"] is None and given["quantize"] == "none" and not given["split"]
    plain &= given["dtype"] in (None, torch.float32)  # others hold results, which are not copied
    if not isinstance(source, str) or "shapes" not in source or not plain:
        return load(source, **given)
    key = (source, repr(given), torch.initial_seed(), torch.get_num_threads())
    if key not in LOADED:
        LOADED[key] = load(source, **given)
    return copy.deepcopy(LOADED[key])

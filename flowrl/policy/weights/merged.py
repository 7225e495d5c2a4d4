"""Save a network with adapters in its layers as one without: their sum is added to the weights.

Otherwise `pipe.save_pretrained` would write the names of the layers that hold adapters, which no
pipeline loads.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

from flowrl.policy.weights.quantised import is_quantised


def save_merged(module: nn.Module) -> None:
    """Let module.save_pretrained write merged weights from now on."""
    if not hasattr(module, "save_pretrained") or "save_pretrained" in vars(module):
        return
    # pipelines look at the signature; a copy of the module gets a partial of its own
    save = functools.partial(_save, module)
    module.save_pretrained = functools.update_wrapper(save, module.save_pretrained)


def _save(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kind = type(module).__name__
    if any(is_quantised(p) for p in module.parameters()):
        raise ValueError(
            f"the {kind} is quantised, and a LoRA is not added to such weights;"
            " save the LoRA alone (policy.save_lora), or load the pipeline without quantize"
        )
    hook = module.register_state_dict_post_hook(_merge)
    # with this attribute, transformers would save the adapters alone
    loaded = vars(module).pop("_hf_peft_config_loaded", False)
    try:
        if any("_ip." in key for key in module.state_dict()):
            raise ValueError(
                f"the {kind} has an IP-Adapter, without which it would be loaded; call"
                " pipe.unload_ip_adapter(), and load it again after this"
            )
        return type(module).save_pretrained(module, *args, **kwargs)
    finally:
        hook.remove()
        module._hf_peft_config_loaded = loaded


def _merge(module: nn.Module, state: dict[str, Any], prefix: str, meta: Any) -> None:
    for name, layer in module.named_modules():
        own = f"{prefix}{name}."
        inside = [key for key in state if key.startswith(own)]
        # the layer has no adapters, or lies within a layer that was merged
        if not hasattr(layer, "get_base_layer") or not inside:
            continue
        for key in inside:
            del state[key]
        base = _twin(layer).get_base_layer()
        state |= {own + key: value for key, value in base.state_dict().items()}


@torch.no_grad()
def _twin(layer: Any) -> Any:
    """Copy a layer and add its adapters to the copied weights."""
    if not hasattr(layer, "get_base_layer"):
        return copy.deepcopy(layer)
    twin = copy.copy(layer)
    twin._modules = {**layer._modules, "base_layer": _twin(layer.base_layer)}
    twin.merged_adapters = []
    there = set() if layer.disable_adapters else layer._get_available_adapters()
    twin.merge(adapter_names=[name for name in layer.active_adapters if name in there])
    return twin

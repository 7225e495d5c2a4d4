"""A network with LoRA in its layers is saved as one without: each weight with its LoRA added.

`pipe.save_pretrained` would else write the names of the layers that hold LoRA, which no pipeline
loads.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from flowrl.policy.quantised import is_quantised


def save_merged(module: nn.Module) -> None:
    """From now on module.save_pretrained writes merged weights, the network as it computes."""
    if not hasattr(module, "save_pretrained") or "save_pretrained" in vars(module):
        return
    # pipelines look at the signature; a copy of the module gets a partial of its own
    save = functools.partial(_save, module)
    module.save_pretrained = functools.update_wrapper(save, module.save_pretrained)


def _save(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if any(is_quantised(p) for p in module.parameters()):
        raise ValueError(
            f"the {type(module).__name__} is quantised, and a LoRA is not added to such weights;"
            " save the LoRA alone (policy.save_lora), or load the pipeline without quantize"
        )
    hook = module.register_state_dict_post_hook(_merge)
    try:
        return type(module).save_pretrained(module, *args, **kwargs)
    finally:
        hook.remove()


def _merge(module: nn.Module, state: dict[str, Any], prefix: str, meta: Any) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in module.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        own = f"{prefix}{name}."
        for key in [key for key in state if key.startswith(own)]:
            value = state.pop(key)
            if key.startswith(f"{own}base_layer."):
                state[key.replace(".base_layer.", ".")] = value
        if not layer.disable_adapters:
            whole = state[f"{own}weight"].clone()
            for adapter in layer.active_adapters:
                whole += layer.get_delta_weight(adapter).to(whole)
            state[f"{own}weight"] = whole

"""Refuse a live pipeline's networks if they are wrapped in a way that flowrl cannot use.

A policy calls, records and changes the modules themselves. Wrappers around them would be left out
or renamed, and one that remembers earlier calls would answer a replay differently from a loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import nn

# prefix of classes that wrap a module or take its place -> what is wrong, and what to do
WRAPPERS = {
    "torch._dynamo.": "compiled; give the module within (._orig_mod) and use train.compile=blocks",
    "torch.jit.": "compiled by TorchScript; load it as a plain module",
    "torch.nn.parallel.": "wrapped; give the module within (.module): processes share batches",
    "torch.distributed.": "split over processes; load it whole and use train.shard",
    "deepspeed.": "wrapped by DeepSpeed; give the module within, and use train.shard",
    "peft.peft_model.": "a PeftModel; merge it (merge_and_unload), or give the plain module and"
    " load the adapter by pipe.load_lora_weights",
}


def check(networks: Mapping[str, nn.Module], replayed: Collection[str], *, adapted: bool) -> None:
    """ValueError for the first thing that keeps networks from being trained or replayed. replayed:
    names of those in the loop; adapted: they get a LoRA."""
    for name, network in networks.items():
        for path, module in network.named_modules():
            top = name in replayed and not path
            for what in _odd(module, top=top, adapted=adapted):
                where = f"{name}.{path}" if path else f"the {name}"
                raise ValueError(f"{where} ({type(module).__name__}) {what}")


def _odd(module: nn.Module, *, top: bool, adapted: bool) -> Iterator[str]:
    places = [f"{kind.__module__}." for kind in type(module).__mro__]
    for package, what in WRAPPERS.items():
        if any(place.startswith(package) for place in places):
            yield f"is {what}"
    if module._compiled_call_impl is not None:
        yield "is compiled in place; load it anew and use train.compile=blocks"
    hook = getattr(module, "_hf_hook", None)  # accelerate's hook; some kinds move only inputs
    each = getattr(hook, "hooks", [hook])
    moves = any(getattr(own, "offload", hasattr(own, "prev_module_hook")) for own in each)
    theirs = getattr(module, "_diffusers_hook", None)
    if moves or (theirs is not None and theirs.hooks):
        yield (
            "has hooks of accelerate or diffusers that offload, cast or cache; load it without:"
            " model.offload, model.encoders=leave and model.quantize save memory"
        )
    if adapted and getattr(module, "fused_projections", False):
        yield (
            "computes with fused projections, which a LoRA on to_q, to_k and to_v does not reach;"
            " call unfuse_qkv_projections() first"
        )
    for own in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()) * top:
        if not str(getattr(own, "__module__", "")).startswith("flowrl."):
            yield (
                f"has a forward hook ({getattr(own, '__qualname__', own)}), which would act twice"
                " in a replay; remove it, or put it on the modules within"
            )

"""What is trained, and its views: the current weights, an older copy, the frozen reference.

Optimizer, EMA and checkpoints read `named` and nothing else.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.policy.replay.arguments import map_tensors
from flowrl.policy.weights.masters import Master, matrices, version
from flowrl.policy.weights.merged import save_merged
from flowrl.policy.weights.quantised import is_quantised, silence
from flowrl.runtime.processes import shares
from flowrl.runtime.registry import did_you_mean

DEFAULTS = {"rank": 32, "alpha": 64, "targets": None, "init": "gaussian"}
ATTENTION = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
)
TEXT_ATTENTION = (  # CLIP, T5, and language models
    *("q_proj", "k_proj", "v_proj", "out_proj", "o_proj"),
    *("SelfAttention.q", "SelfAttention.k", "SelfAttention.v", "SelfAttention.o"),
)


def targets(modules: Mapping[str, nn.Module], wanted: list[str] | None) -> dict[str, list[str]]:
    """Full names of the Linear layers that get LoRA, by component: those whose name ends in
    `wanted`; by default attention projections, else every Linear."""
    linear = {
        part: [name for name, layer in weighted(module) if isinstance(layer, nn.Linear)]
        for part, module in modules.items()
    }
    every = [layer for layers in linear.values() for layer in layers]
    kinds = " and ".join(type(module).__name__ for module in modules.values())
    for name in wanted or ():
        if not any(_ends(layer, name) for layer in every):
            raise ValueError(
                f'lora targets: no Linear layer of {kinds} ends in "{name}"'
                f"{did_you_mean(name, {ending(layer) for layer in every})}"
            )
    out = {}
    for part, layers in linear.items():
        usual = TEXT_ATTENTION if part.startswith("text_encoder") else ATTENTION
        out[part] = [name for name in layers if any(_ends(name, w) for w in wanted or usual)]
        if wanted and not out[part]:
            raise ValueError(
                f"lora targets: {part} has no Linear layer that ends in one of"
                f" {', '.join(wanted)}; add an ending of its own, or leave targets out"
            )
        out[part] = out[part] or layers
    return out


def weighted(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers that have a weight, by name; of those with adapters the layer below."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    below = "\n"
    for name, layer in module.named_modules():
        if name.startswith(below):
            continue
        if isinstance(layer, BaseTunerLayer):
            below, layer = f"{name}.", layer.get_base_layer()
        if isinstance(getattr(layer, "weight", None), Tensor):
            yield name, layer


def _ends(layer: str, name: str) -> bool:
    return layer == name or layer.endswith("." + name)


def ending(layer: str) -> str:
    """The last part of a layer's name that is no number, and what follows: "to_q", "to_out.0"."""
    parts = layer.split(".")
    last = max((k for k, part in enumerate(parts) if not part.isdigit()), default=0)
    return ".".join(parts[last:])


def _first(names: list[str]) -> str:
    return f"{len(names)} weights, {names[0]} first" if names else "none"


def _options(lora: Mapping[str, Any]) -> dict[str, Any]:
    """lora with its defaults filled in; ValueError where an option is unknown or of another
    type."""
    own = {**DEFAULTS, **lora}
    unknown = sorted(set(own) - set(DEFAULTS))
    if unknown:
        raise ValueError(f"lora={{...}} takes rank, alpha, targets and init, not {unknown[0]!r}")
    wanted = own["targets"]
    for name in ("rank", "alpha"):
        number = isinstance(own[name], int | float) and not isinstance(own[name], bool)
        if not number or own[name] <= 0 or (name == "rank" and own[name] != int(own[name])):
            raise ValueError(f"lora={{...}}: {name}={own[name]!r} should be a number above 0")
    if wanted is not None and (isinstance(wanted, str) or not wanted):
        raise ValueError(
            f"lora={{...}}: targets={wanted!r} should be a list of names, such as ['to_q', 'to_v']"
        )
    return own


class TrainedParts:
    """Trainable parameters of `modules`: LoRA adapter "default" (lora given, options filled in) or
    all of them (full). Always fp32. frozen: for now there are none, in any view."""

    def __init__(self, modules: dict[str, Any], lora: dict[str, Any] | None) -> None:
        self.modules = modules  # networks as loaded, never wrapped
        if not isinstance(lora, Mapping | None):
            raise ValueError(
                f"lora={lora!r} should be a mapping, such as {{'rank': 8, 'alpha': 16}}"
            )
        self.lora = None if lora is None else dict(lora)
        self.copies: dict[str, dict[str, Tensor]] = {}  # full mode: other views' values
        self.targets: dict[str, list[str]] = {}  # names of the layers with LoRA, by component
        self.matrices: dict[str, list[nn.Linear]] = {}  # LoRA's A and B of each view
        self.beneath: list[nn.Linear] = []  # those that stand beside ours in every view
        # our adapters that are on in each view; on top of those that a layer came with
        self.views: dict[str, tuple[str, ...]] = {"reference": ()}
        self.standing = {} if lora is None else standing(modules.values())
        self.compared: dict[tuple[str, str], tuple[Any, bool]] = {}  # pairs of views, see equal
        self.active = "default"
        self.wide = False  # full mode: weights were made fp32
        self.frozen = not modules
        self.options = _options(lora or {})
        if lora is None:
            self.thaw(True)
        else:
            self._add_adapter("default")

    def freeze(self, on: bool) -> None:
        """Train nothing of these (on), or as before."""
        self.frozen = False
        self.thaw(not on)
        self.frozen = on or not self.modules

    def thaw(self, on: bool) -> None:
        """Ask for gradients of what is trained (on), or of nothing; never of quantised weights."""
        own = [p for m in self.modules.values() for p in m.parameters()]
        for weight in own if self.lora is None else self.named().values():
            weight.requires_grad_(on and not is_quantised(weight))

    def _add_adapter(self, view: str) -> None:
        if view == "default":
            self.targets = targets(self.modules, self.options["targets"])
        name = view
        while any(name in getattr(m, "peft_config", {}) for m in self.modules.values()):
            name += "_"  # the pipeline came with one of that name
        self.views[view] = (name,)
        for part, module in self.modules.items():
            if view == "default":
                module.requires_grad_(False)
                save_merged(module)
                # wherever it is called from: a loop, a replay, a check
                module.register_forward_pre_hook(self._refresh)
            _inject(module, self._config(part), name)
            for layer in _layers(module):
                layer.set_adapter(self.views["default"][0])  # no gradient for other adapters
            for key, p in module.named_parameters():
                if f".{name}." in key:
                    # fp32 whatever the frozen dtype: small updates would round away
                    p.data = p.data.float()
        self.layers = [layer for m in self.modules.values() for layer in _layers(m)]
        self.matrices[view] = matrices(self.layers, name)
        if view == "default":
            ours = [layer for layer in self.standing if name in getattr(layer, "lora_A", ())]
            self.beneath = [
                m for layer in ours for own in self.standing[layer] for m in matrices([layer], own)
            ]
        self._activate(self.active)

    def _refresh(self, *call: Any) -> None:
        """Before a forward: the bf16 copies of the active view follow their masters."""
        for matrix in (*self.matrices.get(self.active, ()), *self.beneath):
            if isinstance(matrix, Master):
                matrix.refresh()

    def _config(self, part: str) -> Any:
        """peft's LoraConfig of a component."""
        from peft import LoraConfig

        return LoraConfig(
            r=self.options["rank"],
            lora_alpha=self.options["alpha"],
            init_lora_weights=self.options["init"],
            target_modules=self.targets[part],
        )

    def named(self, view: str = "default") -> dict[str, nn.Parameter]:
        """Parameters of a view by stable name, "<component>.<path>"; read live, so sharded
        replacements are seen."""
        if self.frozen:
            return {}
        if self.lora is None and not self.wide:
            self._widen()
        mark = f".{self.views[view][-1]}." if self.lora is not None else ""
        return {
            f"{part}.{key.replace(mark, '.') if mark else key}": p
            for part, module in self.modules.items()
            for key, p in module.named_parameters()
            if mark in key
        }

    def _widen(self) -> None:
        """fp32 weights for full mode: small updates of bf16 would round away. Done when they are
        first asked for, so that a policy that only samples keeps the memory it was loaded with.
        Inputs in lower precision are widened as they come in.
        """
        for part, module in self.modules.items():
            if any(is_quantised(p) for p in module.parameters()):
                raise ValueError(
                    f"the weights of the {part} are quantised, and cannot all be trained; use"
                    " train.mode=lora (lora={...} of load_policy)"
                )
            if _layers(module):
                raise ValueError(
                    f"the {part} has adapters ({', '.join(module.peft_config)}), and all weights"
                    " cannot be trained beside them; use train.mode=lora, which trains a LoRA on"
                    " top, or make them weights: pipe.fuse_lora(), pipe.unload_lora_weights()"
                )
        self.wide = True
        for module in self.modules.values():
            if any(p.dtype != torch.float32 for p in module.parameters()):
                module.float()
                module.register_forward_pre_hook(_widened, with_kwargs=True)

    def has(self, view: str) -> bool:
        """Whether a copy of the weights of this name was added, or none is needed."""
        return self.frozen or view in self._views()

    def add_view(self, name: str) -> None:
        """A second set of the trainable weights, copied from the current ones."""
        if self.frozen:
            return
        if name in ("default", *self._views()) or (name == "reference" and self.lora is not None):
            raise ValueError(f"view {name!r} exists; there are {['default', *self._views()]}")
        if self.lora is None:
            self.copies[name] = {k: p.detach().clone() for k, p in self.named().items()}
        else:
            self._add_adapter(name)
            self.copy("default", name, 0.0)

    def _views(self) -> list[str]:
        if self.lora is None:
            return list(self.copies)
        return [name for name in self.views if name not in ("default", "reference")]

    def tensors(self, view: str) -> dict[str, Tensor]:
        """Values of a view by name, sharing storage with it."""
        if self.frozen:
            return {}
        if view != "default" and view not in self._views():
            raise ValueError(
                f"no view {view!r}; there are {['default', *self._views()]}; make one with"
                f" policy.add_view({view!r})"
            )
        if self.lora is None:
            if view != self.active:
                return self.copies[self.active if view == "default" else view]
            view = "default"
        return {k: p.detach() for k, p in self.named(view).items()}

    def equal(self, a: str, b: str) -> bool:
        """Whether two views hold the same values; compared once for as long as neither is
        written."""
        if self.frozen:
            return True
        now, known = (self._versions(a), self._versions(b)), self.compared.get((a, b))
        if known is None or known[0] != now:
            other = self.tensors(b)
            same = all(torch.equal(value, other[key]) for key, value in self.tensors(a).items())
            known = self.compared[a, b] = (now, same)
        return known[1]

    def _versions(self, view: str) -> list[Any]:
        if self.lora is None:
            return [version(value) for value in self.tensors(view).values()]
        return [version(matrix.weight) for matrix in self.matrices.get(view, ())]

    @torch.no_grad()
    def copy(self, src: str, dst: str, decay: float) -> None:
        """dst = decay * dst + (1 - decay) * src."""
        source, target = self.tensors(src), self.tensors(dst)
        for key in target:
            value, new = shares.held(target[key]), shares.held(source[key])
            if decay == 0.0:
                value.copy_(new)
            else:
                value.lerp_(new.to(value), 1 - decay)

    @torch.no_grad()
    def load(self, view: str, state: dict[str, Tensor]) -> None:
        """Strict: the names and shapes must be those of tensors(view)."""
        if self.frozen and state:
            raise ValueError(
                f"this policy's own weights are not trained, and the state has {_first([*state])};"
                " load it with the train.parts that it was made with"
            )
        target = self.tensors(view)
        missing, extra = sorted(set(target) - set(state)), sorted(set(state) - set(target))
        if missing and len(missing) == len(target):
            raise ValueError(
                "these weights belong to another model: none has a name that this one knows; they"
                f" are {_first(extra)}, and the model trains {_first(missing)}"
            )
        if missing or extra:
            raise ValueError(
                f"state of view {view!r} does not fit: {len(missing)} names missing {missing[:3]},"
                f" {len(extra)} unknown {extra[:3]}"
            )
        for key, value in target.items():
            if value.shape != state[key].shape:
                raise ValueError(
                    f"state of view {view!r}: {key} has shape {tuple(state[key].shape)}, and"
                    f" {tuple(value.shape)} is expected (another rank?)"
                )
            shares.held(value).copy_(shares.share_of(state[key], value))

    @contextlib.contextmanager
    def view(self, name: str) -> Iterator[None]:
        """Compute with another view's weights inside the block. Costs an attribute a layer;
        requires_grad is untouched."""
        before = self.active
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, name: str) -> None:
        if name == self.active or self.frozen:
            return
        if self.lora is not None:
            if name not in self.views:
                self.tensors(name)  # says which there are
            self._activate(name)
        else:
            if name != "default" and name not in self.copies:
                raise ValueError(
                    f"view {name!r} needs a copy of all weights in full mode; call"
                    f" policy.add_view({name!r}) before training"
                )
            if self.active != "default":  # put the trained values back first
                self._exchange(self.active)
            if name != "default":
                self._exchange(name)
        self.active = name

    def _activate(self, view: str) -> None:
        """Switch every layer to what it came with, and a view's adapters on top."""
        for layer in self.layers:
            on = [*self.standing.get(layer, ()), *self.views[view]]
            layer._active_adapter, layer._disable_adapters = on, not on

    def _exchange(self, name: str) -> None:
        """Swap values between the parameters and a copy, by pointer where these are whole."""
        copies = self.copies[name]
        for key, p in self.named().items():
            if shares.is_split(p):  # its block gathers it from where it lies
                own, other = shares.held(p), shares.held(copies[key])
                kept = own.clone()
                own.copy_(other)
                other.copy_(kept)
            else:
                p.data, copies[key] = copies[key], p.data


def _widened(
    module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Half-precision inputs of a call in fp32."""

    def wide(value: Tensor) -> Tensor:
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value

    return map_tensors(wide, args), map_tensors(wide, kwargs)


def _inject(module: Any, config: Any, name: str) -> None:
    """Put an adapter into a network, through its own method where it has one."""
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        # two adapters are what we want
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        silence()
        if hasattr(module, "add_adapter"):
            module.add_adapter(config, adapter_name=name)
        else:
            inject_adapter_in_model(config, module, adapter_name=name)
            module.peft_config = {**getattr(module, "peft_config", {}), name: config}


def adapter_of(module: nn.Module) -> str | None:
    """The adapter that a policy trains in a network, by its name there."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    names = [owner.views["default"][0] for owner in owners if isinstance(owner, TrainedParts)]
    return next((name for name in names if name in getattr(module, "peft_config", {})), None)


def standing(modules: Iterable[nn.Module]) -> dict[Any, list[str]]:
    """The adapters that layers came with and that are switched on, by layer; ValueError where they
    are added to its weights, as a new one would have no effect there."""
    found = {layer: layer.active_adapters for m in modules for layer in _layers(m)}
    if any(layer.merged for layer in found):
        raise ValueError(
            "the pipeline has a LoRA fused into its weights whose layers are still there; call"
            " pipe.unload_lora_weights(), which keeps the fused weights, or pipe.unfuse_lora()"
        )
    return {
        layer: [name for name in on if name in layer._get_available_adapters()]
        for layer, on in found.items()
        if not layer.disable_adapters
    }


def _layers(module: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [m for m in module.modules() if isinstance(m, BaseTunerLayer)]

"""A live pipeline's adapters, hooks and wrappers stay on in every view, or are refused."""

import json

import accelerate
import peft
import pytest
import questions
import tiny
import torch
from diffusers import DiffusionPipeline, FirstBlockCacheConfig
from diffusers.models.attention_processor import IPAdapterAttnProcessor
from peft import LoKrConfig, LoraConfig

import flowrl
from flowrl.policy.weights import quantised

LORA = {"rank": 2, "alpha": 3}
TARGETS = ["to_q", "to_v", "to_out.0"]


def velocity(policy):
    with torch.no_grad():
        return questions.velocity(policy, prompts=["a <cat> on a mat", "two red circles"])


def load(pipe, lora=None, **call):
    return flowrl.load_policy(pipe, lora=lora, height=16, width=16, **call)


def move(policy):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in policy.trainable.named().values():
            weight += 0.2 * torch.randn(weight.shape, generator=generator)


# ---------------------------------------------------------------------------
# what stays on


def config(**options):
    options = {"r": 3, "lora_alpha": 5, "target_modules": TARGETS} | options
    return LoraConfig(init_lora_weights=False, **options)


def style(scale=0.7, part="transformer", name="style", dtype=None, **options):
    def add(pipe):
        pipe.to(dtype or torch.float32)
        getattr(pipe, part).add_adapter(config(**options), name)
        pipe.set_adapters([name], [scale])

    return add


def two(pipe):
    """Of the names that flowrl's own have, and on with other scales."""
    style(name="default")(pipe)
    pipe.transformer.add_adapter(config(target_modules=["to_k", "to_q"]), "old")
    pipe.set_adapters(["default", "old"], [0.4, 0.6])


def switched_off(pipe):
    style()(pipe)
    pipe.disable_lora()


def wide(pipe):
    """fp32 LoRA on a network in bf16."""
    style(dtype=torch.bfloat16)(pipe)
    for name, module in pipe.transformer.named_modules():
        if "lora_" in name:
            module.float()


def lokr(pipe):
    own = LoKrConfig(r=3, target_modules=["to_q"], init_weights=False)
    peft.inject_adapter_in_model(own, pipe.transformer, "style")


def fused(pipe):
    style()(pipe)
    pipe.fuse_lora()
    pipe.unload_lora_weights()


def eight_bits(pipe):
    quantised.quantise({"transformer": pipe.transformer}, "int8", "cpu")
    style()(pipe)


def inner_hook(pipe):
    block = pipe.transformer.transformer_blocks[0]
    block.register_forward_hook(lambda m, a, out: tuple(0.5 * o for o in out))


def token(pipe):
    vector = torch.full((2, pipe.text_encoder.config.hidden_size), 0.7)
    pipe.load_textual_inversion({"<cat>": vector}, token="<cat>")


BROUGHT = {
    "a LoRA": ("sd3", style()),
    "two, of our names": ("sd3", two),
    "one that is off": ("sd3", switched_off),
    "DoRA": ("sd3", style(use_dora=True)),
    "LoRA on convolutions": ("sd15", style(part="unet", target_modules=["conv1", "to_q"])),
    "LoKr": ("sd3", lokr),
    "bf16": ("sd3", style(dtype=torch.bfloat16)),
    "fp32 on bf16": ("sd3", wide),
    "a LoRA of the text encoder": ("sd15", style(part="text_encoder", target_modules=["q_proj"])),
    "fused weights": ("sd3", fused),
    "a LoRA on 8 bits": ("sd3", eight_bits),
    "a hook within": ("sd3", inner_hook),
    "a textual inversion": ("sd15", token),
}


def brought(case):
    name, add = BROUGHT[case]
    pipe = tiny.pipeline(name)
    torch.manual_seed(0)
    add(pipe)
    return pipe


@pytest.mark.long
@pytest.mark.parametrize("case", BROUGHT)
def test_what_a_pipeline_came_with_is_on_in_every_view_in_export_and_in_merge(case, tmp_path):
    alone = velocity(load(brought(case)))
    policy = load(brought(case), LORA)
    narrow = policy.dtype == torch.bfloat16
    # four units in the last place of bf16 at 16, below the largest velocity
    close = {"atol": 0.5 if narrow else 1e-4, "rtol": 0}
    assert torch.allclose(velocity(policy), alone, **close)
    policy.trainable.add_view("old")
    move(policy)
    trained = velocity(policy)
    assert not torch.allclose(trained, alone, atol=1.0)
    for view in ("old", "reference"):
        with policy.view(view):
            assert torch.allclose(velocity(policy), alone, **close)
    asked = [k for k, p in policy.networks.popitem()[1].named_parameters() if p.requires_grad]
    assert len(asked) == len(policy.trainable.named())
    policy.save_lora(tmp_path / "lora")
    again = brought(case)
    # get_active_adapters leaves out those of text encoders before diffusers 0.42
    before = sorted({name for names in again.get_list_adapters().values() for name in names})
    again.load_lora_weights(str(tmp_path / "lora"), adapter_name="trained")
    if case not in ("LoKr", "one that is off") and "two" not in case:
        again.set_adapters([*before, "trained"], [*[0.7] * len(before), 1.0])
        assert torch.allclose(velocity(load(again)), trained, **close)
    if case == "a LoRA on 8 bits":
        with pytest.raises(ValueError, match="is quantised, and a LoRA is not added"):
            policy.pipe.save_pretrained(tmp_path / "merged")
    elif case != "a hook within":
        policy.pipe.save_pretrained(tmp_path / "merged")
        kind = torch.bfloat16 if narrow else torch.float32
        merged = DiffusionPipeline.from_pretrained(tmp_path / "merged", torch_dtype=kind)
        assert torch.allclose(velocity(load(merged)), trained, atol=1.0 if narrow else 1e-3, rtol=0)
        assert torch.equal(velocity(policy), trained), "the policy itself is not merged"


def test_the_self_check_compares_with_the_pipeline_as_it_came():
    alone, policy = velocity(load(brought("a LoRA"))), load(brought("a LoRA"), LORA)
    move(policy)
    assert not torch.allclose(velocity(policy), alone, atol=0.5)
    with policy.view("reference"):
        assert torch.allclose(velocity(policy), alone, atol=1e-5)
    assert policy.self_check().errors["came"] < 1e-6
    policy.trainable.standing.clear()  # the style would be lost in policy and pipeline alike
    policy.trainable._activate("default")
    with pytest.raises(flowrl.policy.UnreplayableError, match="those that the pipeline came with"):
        policy.self_check()


@pytest.mark.long
def test_an_ip_adapter_stays_on_and_is_not_lost_in_a_merge(tmp_path):
    def make():
        pipe = tiny.pipeline("sd15")
        unet, torch_seed = pipe.unet, torch.manual_seed(1)
        sizes = {
            "down": unet.config.block_out_channels,
            "mid_": unet.config.block_out_channels[-1:],
        }
        sizes["up_b"] = sizes["up"] = tuple(reversed(sizes["down"]))
        weights = {}
        for k, name in enumerate(n for n in unet.attn_processors if "attn2" in n):
            place = 0 if name.startswith("mid") else int(name.split(".")[1])
            size = sizes[name[:4].removesuffix("_b")][place]
            own = IPAdapterAttnProcessor(size, unet.config.cross_attention_dim).state_dict()
            for half in ("k", "v"):
                drawn = torch.randn(own[f"to_{half}_ip.0.weight"].shape, generator=torch_seed)
                weights[f"{2 * k + 1}.to_{half}_ip.weight"] = drawn
        width = unet.config.cross_attention_dim
        projection = {"proj.weight": torch.randn(4 * width, 8), "proj.bias": torch.zeros(4 * width)}
        projection |= {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}
        unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": weights}])
        return pipe

    picture = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(3))
    alone = velocity(load(make(), ip_adapter_image_embeds=[picture]))
    policy = load(make(), LORA, ip_adapter_image_embeds=[picture])
    assert torch.equal(velocity(policy), alone)
    other = load(make(), LORA, ip_adapter_image_embeds=[-picture])
    assert not torch.allclose(velocity(other), alone, atol=1e-3), "it is on"
    with pytest.raises(ValueError, match="has an IP-Adapter, without which"):
        policy.pipe.save_pretrained(tmp_path)


# ---------------------------------------------------------------------------
# what is refused


def compiled_within(pipe):
    blocks = pipe.transformer.transformer_blocks
    blocks[0] = torch.compile(blocks[0], backend="eager")


def casting(pipe):
    how = {"storage_dtype": torch.float8_e4m3fn, "compute_dtype": torch.float32}
    pipe.transformer.enable_layerwise_casting(**how)


def grouped(pipe):
    cpu = torch.device("cpu")
    pipe.transformer.enable_group_offload(cpu, cpu, offload_type="leaf_level")


def unloaded(pipe):
    style()(pipe)
    pipe.fuse_lora()


def put(wrap):
    return lambda pipe: setattr(pipe, "transformer", wrap(pipe.transformer))


REFUSED = {
    "compiled; give": put(lambda m: torch.compile(m, backend="eager")),
    r"compiled; give .*compile=blocks": compiled_within,
    "compiled in place": lambda pipe: pipe.transformer.compile(backend="eager"),
    r"wrapped; give the module within \(.module\)": put(torch.nn.DataParallel),
    "a PeftModel": put(lambda m: peft.get_peft_model(m, config(), "style")),
    "hooks of accelerate": lambda pipe: accelerate.cpu_offload(pipe.transformer, "cpu"),
    "hooks of accelerate.*": lambda pipe: accelerate.cpu_offload_with_hook(pipe.transformer, "cpu"),
    "hooks of .* diffusers that offload": grouped,
    "hooks of .* diffusers that offload, cast": casting,
    "hooks of .* diffusers that offload, cast or cache": lambda pipe: pipe.transformer.enable_cache(
        FirstBlockCacheConfig(threshold=0.2)
    ),
    "a forward hook .*act twice": lambda pipe: pipe.transformer.register_forward_hook(
        lambda m, a, out: (0.9 * out[0],)
    ),
    "a forward hook .*act twice.*within": lambda pipe: pipe.transformer.register_forward_pre_hook(
        lambda m, a: None
    ),
    "fused projections.*unfuse_qkv": lambda pipe: pipe.transformer.fuse_qkv_projections(),
    "unload_lora_weights.*unfuse_lora": unloaded,
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_stay_on_is_refused_in_a_sentence(said):
    pipe = tiny.pipeline("flux" if "cache" in said else "sd3")
    REFUSED[said](pipe)
    with pytest.raises(ValueError, match=said):
        load(pipe, LORA, **({"max_sequence_length": 12} if "cache" in said else {}))


@pytest.mark.long
def test_all_weights_are_not_trained_beside_adapters_but_may_be_sampled_with():
    policy = load(brought("a LoRA"))
    velocity(policy)
    with pytest.raises(ValueError, match=r"has adapters \(style\).*train.mode=lora.*fuse_lora"):
        policy.trainable.named()


@pytest.mark.long
def test_a_pipeline_is_a_policy_by_its_hooks_and_not_by_a_name():
    pipe = brought("two, of our names")
    load(pipe, LORA)
    with pytest.raises(ValueError, match='is a policy already: its transformer has the adapter "d'):
        load(pipe, LORA)


def test_generate_takes_a_lora_of_another_trainer(tmp_path):
    """Its rank, targets and parts are read off the file."""
    pipe = tiny.pipeline("sd15")
    pipe.save_pretrained(tmp_path / "model")
    style(part="unet", target_modules=["to_q", "net.2"])(pipe)
    pipe.text_encoder.add_adapter(config(r=2, target_modules=["q_proj"]), "style")
    pipe.set_adapters(["style"], [1.0])
    expected = velocity(load(pipe))
    weights = {
        part: peft.get_peft_model_state_dict(getattr(pipe, part), adapter_name="style")
        for part in ("unet", "text_encoder")
    }
    own = {f"{part}_lora_layers": layers for part, layers in weights.items()}
    told = {
        f"{part}_lora_adapter_metadata": json.loads(
            json.dumps(getattr(pipe, part).peft_config["style"].to_dict(), default=list)
        )
        for part in weights
    }
    pipe.save_lora_weights(tmp_path / "style", **own, **told)
    from flowrl.config.build import lora_of

    file, settings = lora_of(tmp_path / "style")
    assert file is None
    policy = flowrl.load_policy(str(tmp_path / "model"), height=16, width=16, **settings)
    assert policy.trainable.part_names == ["denoiser", "text_encoder"]
    assert torch.allclose(velocity(policy), expected, atol=1e-4)

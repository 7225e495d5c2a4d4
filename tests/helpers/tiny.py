"""Tiny random diffusers pipelines, built in memory, and a toy flow with a known answer.

One factory an architecture part (denoiser, VAE, text encoder, tokenizer), then ten to twenty-five
lines a pipeline. Every weight is redrawn from a seed: diffusers starts gates, modulations and
output layers at zero, and with those two prompts or two times give equal outputs, so every check
passes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

PROMPTS = ["two red circles", "a blue square left of a green triangle"]
FLOW_IMAGES = {"height": 16, "width": 16}
# name -> keyword arguments of the pipeline's own call
CALLS: dict[str, dict] = {
    "sd15": FLOW_IMAGES,
    "sdxl": FLOW_IMAGES,
    "sd3": FLOW_IMAGES,
    "flux": {**FLOW_IMAGES, "max_sequence_length": 12},
    "qwenimage": {**FLOW_IMAGES, "max_sequence_length": 24},
    "wan21": {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 12},
    "wan22": {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 12},
}
NAMES = list(CALLS)
WORDS = (
    "one two three four a red blue green yellow purple circle square triangle circles squares"
    " triangles left right of above below and the photo image system user assistant describe by"
    " detailing color shape size texture quantity text spatial relationships objects"
)


def randomise(module: nn.Module, seed: int = 0, gain: float = 1.0) -> nn.Module:
    """Redraw every parameter: matrices with variance gain^2 / fan_in, vectors near one (scales) or
    zero (biases, tables)."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.ndim >= 2:
            p.data = (
                gain * noise
                if "embed" in name and "proj" not in name and p.ndim == 2 and p.shape[0] > 64
                else gain * noise / math.sqrt(p[0].numel())
            )
        else:
            p.data = 0.1 * noise + (1.0 if name.endswith("weight") else 0.0)
    return module.eval().requires_grad_(False)


# ---------------------------------------------------------------------------
# text


def tokenizer(kind: str = "clip", length: int = 12):
    """A word-level tokenizer with the special tokens of CLIP, T5 or Qwen; each word of the toy
    world (and Qwen's template) is one token."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    bos, eos, pad, unk = {
        "clip": ("<|startoftext|>", "<|endoftext|>", "<|endoftext|>", "<unk>"),
        "t5": (None, "</s>", "<pad>", "<unk>"),
        "qwen": ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<unk>"),
    }[kind]
    words = WORDS.split()
    specials = [s for s in dict.fromkeys((pad, eos, bos, unk)) if s]
    vocab = {
        w: i
        for i, w in enumerate(
            [*specials, *words, "background", "Describe", ",", ":", ".", "\n", "word"]
        )
    }
    tok = Tokenizer(models.WordLevel(vocab, unk_token=unk))
    tok.pre_tokenizer = (
        pre_tokenizers.Split(Regex(r" +|\n|[,.:]"), "isolated")
        if kind == "qwen"
        else pre_tokenizers.Whitespace()
    )
    if (
        kind == "qwen"
    ):  # drop blanks, keep line breaks: Qwen's template counts 34 tokens before the prompt
        from tokenizers import normalizers

        tok.normalizer = normalizers.Replace(" ", "\u0001")
        tok.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split("\u0001", "removed"),
                pre_tokenizers.Split(Regex(r"\n|[,.:]"), "isolated"),
            ]
        )
    elif kind == "clip":
        tok.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A {eos}", special_tokens=[(bos, vocab[bos]), (eos, vocab[eos])]
        )
    else:
        tok.post_processor = processors.TemplateProcessing(
            single=f"$A {eos}", special_tokens=[(eos, vocab[eos])]
        )
    named = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "unk_token": unk}
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, model_max_length=length, **{k: v for k, v in named.items() if v}
    )


def clip_text(tok, projection: bool = False, seed: int = 1, width: int = 16) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tok),
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        projection_dim=width,
        max_position_embeddings=tok.model_max_length,
        bos_token_id=tok.bos_token_id,
        eos_token_id=tok.eos_token_id,
        pad_token_id=1,
    )
    return randomise((CLIPTextModelWithProjection if projection else CLIPTextModel)(config), seed)


def t5_text(tok, umt5: bool = False, seed: int = 2, width: int = 16) -> nn.Module:
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    sizes = {
        "d_model": width,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": len(tok),
    }
    return randomise(
        UMT5EncoderModel(UMT5Config(**sizes)) if umt5 else T5EncoderModel(T5Config(**sizes)), seed
    )


def qwen_text(tok, seed: int = 3) -> nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {
        "mrope_section": [1, 1, 2],
        "rope_type": "default",
        "type": "default",
        "rope_theta": 1e6,
    }
    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": len(tok),
        "rope_scaling": rope,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
    }
    return randomise(
        Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        ),
        seed,
    )


# ---------------------------------------------------------------------------
# denoisers


def unet(cross: int, *, xl: bool = False, seed: int = 4) -> nn.Module:
    from diffusers import UNet2DConditionModel

    extra = (
        {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 16 + 6 * 8,
            "use_linear_projection": True,
        }
        if xl
        else {}
    )
    net = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=cross,
        **extra,
    )
    return randomise(net, seed)


def sd3_transformer(seed: int = 5) -> nn.Module:
    from diffusers import SD3Transformer2DModel

    net = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    return randomise(net, seed)


def flux_transformer(seed: int = 6) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    net = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    return randomise(net, seed)


def qwen_transformer(seed: int = 7) -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    net = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    return randomise(net, seed)


def wan_transformer(seed: int = 8) -> nn.Module:
    from diffusers import WanTransformer3DModel

    net = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=64,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    return randomise(net, seed)


# ---------------------------------------------------------------------------
# VAEs


def image_vae(scaling: float = 0.5, shift: float | None = None, seed: int = 9) -> nn.Module:
    from diffusers import AutoencoderKL

    net = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
        scaling_factor=scaling,
        shift_factor=shift,
        force_upcast=False,
    )
    return randomise(net, seed, 0.5)


MEAN, STD = [0.1, -0.2, 0.3, 0.0], [0.9, 1.2, 1.0, 0.8]  # of video latents, by channel


def qwen_vae(seed: int = 10) -> nn.Module:
    from diffusers import AutoencoderKLQwenImage

    net = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=MEAN,
        latents_std=STD,
    )
    return randomise(net, seed, 0.7)


def wan_vae(seed: int = 11) -> nn.Module:
    from diffusers import AutoencoderKLWan

    net = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=MEAN,
        latents_std=STD,
    )
    return randomise(net, seed, 0.7)


# ---------------------------------------------------------------------------
# pipelines


def sd15(scheduler=None):
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    tok = tokenizer()
    ddim = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    return StableDiffusionPipeline(
        vae=image_vae(),
        text_encoder=clip_text(tok),
        tokenizer=tok,
        unet=unet(16),
        scheduler=scheduler or ddim,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl(scheduler=None):
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    tok = tokenizer()
    euler = EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        timestep_spacing="leading",
        steps_offset=1,
    )
    return StableDiffusionXLPipeline(
        vae=image_vae(),
        text_encoder=clip_text(tok),
        text_encoder_2=clip_text(tok, True, seed=12),
        tokenizer=tok,
        tokenizer_2=tok,
        unet=unet(32, xl=True),
        scheduler=scheduler or euler,
        add_watermarker=False,
    )


def sd3(scheduler=None):
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    tok, t5 = tokenizer(), tokenizer("t5")
    return StableDiffusion3Pipeline(
        transformer=sd3_transformer(),
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(1.5, 0.06),
        text_encoder=clip_text(tok, True),
        tokenizer=tok,
        text_encoder_2=clip_text(tok, True, seed=12),
        tokenizer_2=tok,
        text_encoder_3=t5_text(t5, width=32),
        tokenizer_3=t5,
    )


def flux(scheduler=None):
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    tok, t5 = tokenizer(), tokenizer("t5")
    return FluxPipeline(
        scheduler=scheduler
        or FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=image_vae(0.4, 0.1),
        text_encoder=clip_text(tok),
        tokenizer=tok,
        text_encoder_2=t5_text(t5),
        tokenizer_2=t5,
        transformer=flux_transformer(),
    )


def qwenimage(scheduler=None):
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline

    tok = tokenizer("qwen", 2048)
    shift = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    return QwenImagePipeline(
        scheduler=scheduler or shift,
        vae=qwen_vae(),
        text_encoder=qwen_text(tok),
        tokenizer=tok,
        transformer=qwen_transformer(),
    )


def wan21(scheduler=None):
    from diffusers import UniPCMultistepScheduler, WanPipeline

    tok = tokenizer("t5", 64)
    unipc = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return WanPipeline(
        tokenizer=tok,
        text_encoder=t5_text(tok, umt5=True),
        vae=wan_vae(),
        scheduler=scheduler or unipc,
        transformer=wan_transformer(),
    )


def wan22(scheduler=None):
    pipe = wan21(scheduler)
    return type(pipe)(
        **pipe.components | {"transformer_2": wan_transformer(seed=13)}, boundary_ratio=0.875
    )


FACTORIES = {
    "sd15": sd15,
    "sdxl": sdxl,
    "sd3": sd3,
    "flux": flux,
    "qwenimage": qwenimage,
    "wan21": wan21,
    "wan22": wan22,
}


def pipeline(name: str, scheduler=None):
    """A fresh tiny pipeline by name; scheduler replaces its usual one."""
    return FACTORIES[name](scheduler)


def policy(name: str, *, lora: dict | None = None, scheduler=None, **changes):
    """load_policy on a tiny pipeline, with the call arguments that keep it tiny."""
    from flowrl.policy import load_policy

    return load_policy(pipeline(name, scheduler), lora=lora, **{**CALLS[name], **changes})


# ---------------------------------------------------------------------------
# a toy


class ToyFlow(nn.Module):
    """A small MLP v = f(x, t, cond) over latents of any shape, for learning tests; t in [0, 1],
    cond (B, C)."""

    def __init__(
        self, shape: tuple[int, ...] = (2,), cond: int = 2, width: int = 64, seed: int = 0
    ) -> None:
        super().__init__()
        size = math.prod(shape)
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Linear(size + cond + 2, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, size),
        )

    def forward(self, x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        time = torch.stack([t, t.square()], -1).to(x.dtype)
        return self.net(torch.cat([x.flatten(1), time, cond], -1)).reshape(x.shape)


class GaussianFlow(nn.Module):
    """The exact velocity of x0 ~ N(cond, std^2): closed form, no weights but a shift that learning
    moves. cond (B, D), x (B, D)."""

    def __init__(self, dim: int = 2, std: float = 0.5) -> None:
        super().__init__()
        self.shift, self.std = nn.Parameter(torch.zeros(dim)), std

    def forward(self, x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        t, mean = t.reshape(-1, *[1] * (x.ndim - 1)).to(x.dtype), cond + self.shift
        var = (1 - t) ** 2 * self.std**2 + t**2
        score = (x - (1 - t) * mean) / var  # eps_hat / t and (mean - x0_hat) / ((1 - t) std^2)
        return t * score - (mean + (1 - t) * self.std**2 * score)


def toy_cond(prompts: list[str], dim: int = 2) -> Tensor:
    """(P, dim) numbers in [-1, 1] that depend on the text alone."""
    codes = [sum((i + 1) * ord(c) for i, c in enumerate(p)) for p in prompts]
    return torch.tensor([[math.sin(code * (k + 1)) for k in range(dim)] for code in codes])


def pretrain_toy(
    flow: ToyFlow,
    mean: float = 0.0,
    std: float = 1.0,
    steps: int = 300,
    batch: int = 256,
    seed: int = 0,
    cond_dim: int = 2,
) -> ToyFlow:
    """Fit flow to N(mean, std^2) whatever the condition, by flow matching; well under two
    seconds."""
    generator, optimizer = (
        torch.Generator().manual_seed(seed),
        torch.optim.Adam(flow.parameters(), lr=3e-3),
    )
    for _ in range(steps):
        x0 = mean + std * torch.randn(batch, 2, generator=generator)
        eps, t = torch.randn(batch, 2, generator=generator), torch.rand(batch, generator=generator)
        cond = 2 * torch.rand(batch, cond_dim, generator=generator) - 1
        loss = (
            (flow((1 - t[:, None]) * x0 + t[:, None] * eps, t, cond) - (eps - x0)).square().mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return flow

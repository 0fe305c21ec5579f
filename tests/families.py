"""Tiny configurations of every family, for all tests that go over families.

Each uses what its family has: windows shorter than a test's sequences, layers of both kinds,
grouped queries, scales and caps far from 1. A name is a family, or a family and what is special.
"""

import contextlib
import copy
import math
import re
import sys
from unittest import mock

GEMMA4 = ("gemma4_text", "gemma4_unified_text")
DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
OFFSET = ("gemma", "gemma2", "gemma3_text", *DELTA)  # model types whose norms multiply by 1 + w

LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
COMMON = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_theta=5000.0,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=1,
    torch_dtype="float32",
)
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)


def longrope(n):
    """Factors of n pairs."""
    return dict(
        type="longrope",
        short_factor=[1.0 + 0.05 * i for i in range(n)],
        long_factor=[1.2 + 0.7 * i for i in range(n)],
    )


def family(model_type, architecture, **changes):
    return dict(COMMON, model_type=model_type, architectures=[architecture], **changes)


def llama(**changes):
    return family("llama", "LlamaForCausalLM", hidden_act="silu", **changes)


def qwen2(**changes):
    return family("qwen2", "Qwen2ForCausalLM", hidden_act="silu", **changes)


def qwen3(**changes):
    return family("qwen3", "Qwen3ForCausalLM", hidden_act="silu", head_dim=24, **changes)


def mistral(**changes):
    return family("mistral", "MistralForCausalLM", hidden_act="silu", sliding_window=9, **changes)


def ministral(**changes):
    return family(
        "ministral",
        "MinistralForCausalLM",
        hidden_act="silu",
        head_dim=24,
        sliding_window=9,
        layer_types=ALTERNATING,
        **changes,
    )


def phi3(**changes):
    """Phi-4-mini's shape: RoPE on three quarters of a head, longrope."""
    phi = dict(
        hidden_act="silu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        partial_rotary_factor=0.75,
        rope_scaling=longrope(6),
        original_max_position_embeddings=16,
        sliding_window=None,
        tie_word_embeddings=True,
    )
    return dict(family("phi3", "Phi3ForCausalLM"), **dict(phi, **changes))


def olmo2(**changes):
    return family("olmo2", "Olmo2ForCausalLM", hidden_act="silu", **changes)


GEMMA = dict(
    hidden_size=72,  # its root, the scale of the embedding, is not exact in bf16
    hidden_activation="gelu_pytorch_tanh",
    head_dim=24,
    query_pre_attn_scalar=20,
    sliding_window=9,
    tie_word_embeddings=True,
)


def gemma2(**changes):
    gemma = dict(GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    return dict(family("gemma2", "Gemma2ForCausalLM"), **dict(gemma, **changes))


def gemma3(**changes):
    gemma = dict(
        GEMMA,
        final_logit_softcapping=None,
        sliding_window_pattern=2,
        rope_local_base_freq=300.0,
        rope_scaling=None,
    )
    return dict(family("gemma3_text", "Gemma3ForCausalLM"), **dict(gemma, **changes))


GEMMA4_ROPE = dict(
    full_attention=dict(rope_type="proportional", rope_theta=5000.0, partial_rotary_factor=0.35),
    sliding_attention=dict(rope_type="default", rope_theta=300.0),
)


def gemma4(model_type="gemma4_text", architecture="Gemma4ForCausalLM", **changes):
    """Heads of 24 in windows, of 40 elsewhere."""
    gemma = dict(
        hidden_size=72,
        hidden_activation="gelu_pytorch_tanh",
        head_dim=24,
        global_head_dim=40,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        sliding_window=9,
        layer_types=ALTERNATING[1:] + ["full_attention"],
        final_logit_softcapping=3.0,
        tie_word_embeddings=True,
        rope_parameters=GEMMA4_ROPE,
    )
    cfg = dict(family(model_type, architecture), **dict(gemma, **changes))
    return {k: v for k, v in cfg.items() if k != "rope_theta"}


# Both kinds of layers, of which the last three have no keys and values of their own.
SHARED_KV = dict(
    num_hidden_layers=6,
    layer_types=ALTERNATING[:2] * 3,
    num_kv_shared_layers=3,
    use_double_wide_mlp=True,
)


PER_LAYER = dict(hidden_size_per_layer_input=20, vocab_size_per_layer_input=517)


def gemma4_e2b(**changes):
    """E2B: these, and embeddings of each layer."""
    return gemma4(**SHARED_KV | PER_LAYER | dict(attention_k_eq_v=False) | changes)


def gemma4_moe(**changes):
    """26B-A4B: experts beside an MLP of another width."""
    sparse = dict(enable_moe_block=True, num_experts=7, top_k_experts=3, moe_intermediate_size=40)
    return gemma4(**dict(sparse, **changes))


def granite(**changes):
    multipliers = dict(
        embedding_multiplier=3.0,
        attention_multiplier=0.15,
        residual_multiplier=0.4,
        logits_scaling=2.5,
        tie_word_embeddings=True,
    )
    return dict(
        family("granite", "GraniteForCausalLM", hidden_act="silu"), **dict(multipliers, **changes)
    )


def smollm3(**changes):
    smol = dict(
        hidden_act="silu",
        no_rope_layer_interval=2,
        no_rope_layers=None,
        use_sliding_window=False,
        sliding_window=None,
        layer_types=None,
        tie_word_embeddings=True,
    )
    return dict(family("smollm3", "SmolLM3ForCausalLM"), **dict(smol, **changes))


def olmo3(**changes):
    """Old config files: rope_theta is that of the layers without windows alone."""
    olmo = dict(hidden_act="silu", sliding_window=9, layer_types=ALTERNATING, rope_scaling=YARN)
    return family("olmo3", "Olmo3ForCausalLM", **dict(olmo, **changes))


def gemma(**changes):
    one = dict(hidden_act="gelu_pytorch_tanh", head_dim=24, hidden_size=72)
    one |= dict(tie_word_embeddings=True)
    return dict(family("gemma", "GemmaForCausalLM"), **dict(one, **changes))


def seed_oss(**changes):
    seed = dict(hidden_act="silu", head_dim=24, attention_bias=True, attention_out_bias=False)
    seed |= dict(attention_dropout=0.0, residual_dropout=0.0)
    return family("seed_oss", "SeedOssForCausalLM", **dict(seed, **changes))


def exaone4(**changes):
    exaone = dict(hidden_act="silu", sliding_window=9, layer_types=ALTERNATING)
    exaone |= dict(sliding_window_pattern=2)
    return family("exaone4", "Exaone4ForCausalLM", **dict(exaone, **changes))


def hunyuan(**changes):
    rope = dict(type="dynamic", alpha=50.0, factor=1.0, beta_fast=32, beta_slow=1)
    dense = dict(hidden_act="silu", head_dim=24, rope_scaling=rope)
    return family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", **dict(dense, **changes))


def glm4(**changes):
    glm = dict(hidden_act="silu", head_dim=24, attention_bias=True, partial_rotary_factor=0.5)
    return family("glm4", "Glm4ForCausalLM", **dict(glm, **changes))


def ministral3(**changes):
    rope = dict(
        rope_type="yarn",
        rope_theta=5000.0,
        factor=4.0,
        original_max_position_embeddings=12,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=0.5,
        llama_4_scaling_beta=0.3,
    )
    mistral = dict(hidden_act="silu", head_dim=24, rope_parameters=rope, sliding_window=None)
    cfg = family("ministral3", "Ministral3ForCausalLM", **dict(mistral, **changes))
    return {k: v for k, v in cfg.items() if k != "rope_theta"}


SPARSE = dict(hidden_act="silu", num_experts_per_tok=2, router_aux_loss_coef=0.02)


def olmoe(**changes):
    sparse = dict(SPARSE, num_experts=16, clip_qkv=None, norm_topk_prob=False)
    return family("olmoe", "OlmoeForCausalLM", **dict(sparse, **changes))


def qwen3_moe(**changes):
    """Sparse, dense, sparse."""
    sparse = dict(
        SPARSE,
        head_dim=24,
        num_experts=16,
        moe_intermediate_size=40,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        decoder_sparse_step=1,
    )
    return family("qwen3_moe", "Qwen3MoeForCausalLM", **dict(sparse, **changes))


def mixtral(**changes):
    sparse = dict(SPARSE, num_local_experts=4, sliding_window=9)
    return family("mixtral", "MixtralForCausalLM", **dict(sparse, **changes))


def gpt_oss(**changes):
    """Limits that bite; a context longer than before YaRN; an odd number of rows of experts."""
    yarn = dict(rope_type="yarn", factor=4.0, truncate=False)
    yarn |= dict(beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=12)
    sparse = dict(
        hidden_act="silu",
        head_dim=24,
        num_local_experts=7,
        num_experts_per_tok=3,
        sliding_window=9,
        swiglu_limit=0.8,
        swiglu_alpha=1.3,
        rope_scaling=yarn,
    )
    return family("gpt_oss", "GptOssForCausalLM", **dict(sparse, **changes))


LATENT = dict(
    hidden_act="silu",
    num_key_value_heads=4,
    kv_lora_rank=24,
    qk_rope_head_dim=8,
    n_routed_experts=12,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    attention_bias=False,
)
MSCALES = dict(YARN, mscale=0.7, mscale_all_dim=0.4)


def deepseek_v2(**changes):
    """Values narrower than keys, q with one projection, a dense layer, groups."""
    v2 = dict(LATENT, q_lora_rank=None, qk_nope_head_dim=16, v_head_dim=12, n_shared_experts=2)
    v2 |= dict(topk_method="group_limited_greedy", n_group=3, topk_group=2, rope_scaling=MSCALES)
    v2 |= dict(first_k_dense_replace=1, routed_scaling_factor=1.5, norm_topk_prob=False)
    return family("deepseek_v2", "DeepseekV2ForCausalLM", **dict(v2, **changes))


def deepseek_v3(**changes):
    v3 = dict(LATENT, q_lora_rank=20, qk_nope_head_dim=12, v_head_dim=10, n_shared_experts=1)
    v3 |= dict(n_group=2, topk_group=1, rope_scaling=MSCALES, rope_interleave=True)
    v3 |= dict(first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True)
    return family("deepseek_v3", "DeepseekV3ForCausalLM", **dict(v3, **changes))


def glm4_moe_lite(**changes):
    """Values as wide as keys."""
    glm = dict(LATENT, q_lora_rank=20, qk_nope_head_dim=8, v_head_dim=16, n_shared_experts=1)
    glm |= dict(n_group=1, topk_group=1, routed_scaling_factor=1.8, norm_topk_prob=True)
    glm |= dict(rope_parameters=dict(rope_type="default", rope_theta=5000.0))
    glm |= dict(mlp_layer_types=["sparse", "dense", "sparse"])
    cfg = family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", **dict(glm, **changes))
    return {k: v for k, v in cfg.items() if k != "rope_theta"}


# The norm after the delta rule divides by what may be far smaller than the terms that it is a sum
# of, and so multiplies roundings, of weights and inputs alike. Gradients in bf16 were wrong by 8
# times their bound with an eps of 1e-6, and by 0.6 with 0.1; transformers' fp64 model had errors of
# that size where it rounded its activations to bf16.
DELTA_NET = dict(
    hidden_act="silu",
    rms_norm_eps=0.1,
    head_dim=24,
    partial_rotary_factor=0.25,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=12,
    linear_value_head_dim=20,
    linear_conv_kernel_dim=4,
)


def qwen3_5(**changes):
    return family("qwen3_5_text", "Qwen3_5ForCausalLM", **dict(DELTA_NET, **changes))


def qwen3_5_moe(**changes):
    sparse = dict(SPARSE | DELTA_NET, num_experts=16, moe_intermediate_size=40)
    sparse |= dict(shared_expert_intermediate_size=28)
    return family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", **dict(sparse, **changes))


def qwen3_next(**changes):
    """Sparse, dense, sparse."""
    sparse = dict(SPARSE | DELTA_NET, num_experts=16, moe_intermediate_size=40)
    sparse |= dict(shared_expert_intermediate_size=28, norm_topk_prob=True, mlp_only_layers=[1])
    return family("qwen3_next", "Qwen3NextForCausalLM", **dict(sparse, **changes))


def vision_language(model_type, architecture, text, vision, **changes):
    """A text model, as a part of a model with a vision tower of odd sizes."""
    text = {k: v for k, v in text.items() if k not in ("architectures", "tie_word_embeddings")}
    return dict(
        model_type=model_type,
        architectures=[architecture],
        text_config=text,
        vision_config=vision,
        torch_dtype="float32",
        **changes,
    )


def qwen_vision(dim):
    sizes = dict(depth=1, hidden_size=20, intermediate_size=13, num_heads=1, out_hidden_size=dim)
    return dict(sizes, fullatt_block_indexes=[0], num_position_embeddings=9)


MROPE = dict(rope_type="default", mrope_section=[2, 3, 3])
VISION = dict(
    hidden_size=18,
    intermediate_size=13,
    num_hidden_layers=1,
    num_attention_heads=1,
    image_size=28,
    patch_size=14,
)
# Text models inside vision-language models.
TOWERS = {
    "gemma3-vision": vision_language(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        gemma3(),
        dict(VISION, model_type="siglip_vision_model"),
        mm_tokens_per_image=4,
    ),
    "gemma4-vision": vision_language(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        gemma4_moe(**dict(SHARED_KV, **PER_LAYER, use_double_wide_mlp=False)),
        dict(VISION, model_type="gemma4_vision", num_key_value_heads=1, head_dim=18, patch_size=4)
        | dict(position_embedding_size=10, pooling_kernel_size=2),
        tie_word_embeddings=True,
    ),
    "qwen2_5_vl": vision_language(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        qwen2(rope_scaling=dict(MROPE, type="mrope"), num_key_value_heads=1)
        | dict(model_type="qwen2_5_vl_text"),
        qwen_vision(64),
        tie_word_embeddings=False,
    ),
    "qwen3_vl": vision_language(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        qwen3(rope_scaling=dict(MROPE, mrope_section=[4, 4, 4], mrope_interleaved=True))
        | dict(model_type="qwen3_vl_text"),
        dict(qwen_vision(64), deepstack_visual_indexes=[0]),
        tie_word_embeddings=True,
    ),
    "qwen3_5-vision": vision_language(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        qwen3_5(rope_scaling=dict(MROPE, mrope_section=[1, 1, 1], mrope_interleaved=True)),
        qwen_vision(64),
        tie_word_embeddings=True,
    ),
    "ministral3-vision": vision_language(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        ministral3(head_dim=16),
        dict(VISION, model_type="pixtral", head_dim=18),
        tie_word_embeddings=True,
    ),
    "mistral3": vision_language(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        mistral(head_dim=16),
        dict(VISION, model_type="pixtral", head_dim=18),
        tie_word_embeddings=False,
    ),
}


# One of each family.
FAMILIES = {
    "mistral": mistral(),
    "ministral": ministral(),
    "phi3": phi3(),
    "olmo2": olmo2(),
    "gemma2": gemma2(),
    "gemma3": gemma3(),
    "gemma4": gemma4(),
    "granite": granite(),
    "smollm3": smollm3(),
    "olmo3": olmo3(),
    "gemma": gemma(),
    "seed_oss": seed_oss(),
    "exaone4": exaone4(),
    "hunyuan": hunyuan(),
    "glm4": glm4(),
    "ministral3": ministral3(),
}
# Families with experts.
LATENTS = {
    "deepseek_v2": deepseek_v2(),
    "deepseek_v3": deepseek_v3(),
    "glm4_moe_lite": glm4_moe_lite(),
}
EXPERTS = {
    "olmoe": olmoe(),
    "qwen3_moe": qwen3_moe(),
    "mixtral": mixtral(),
    "gpt_oss": gpt_oss(),
    "gemma4-moe": gemma4_moe(),
    **LATENTS,
}
# Families with gated delta-nets, whose states transformers does not reset between documents.
DELTA_NETS = {
    "qwen3_5": qwen3_5(),
    "qwen3_5_moe": qwen3_5_moe(),
    "qwen3_next": qwen3_next(),
}
# What else a config of a family may say.
VARIANTS = {
    "llama-yarn": llama(rope_scaling=YARN),
    "qwen2-window": qwen2(use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3-window": qwen3(use_sliding_window=True, sliding_window=9, layer_types=ALTERNATING),
    "mistral-full": mistral(num_key_value_heads=4) | dict(sliding_window=None),
    "phi3-short": phi3(original_max_position_embeddings=64, tie_word_embeddings=False),
    "phi3-window": phi3(
        rope_scaling=None, partial_rotary_factor=1.0, num_key_value_heads=4, sliding_window=9
    ),
    "olmo2-linear": olmo2(rope_scaling=dict(type="linear", factor=4.0)),
    "gemma2-plain": gemma2(
        attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False
    ),
    "gemma3-linear": gemma3(
        rope_scaling=dict(rope_type="linear", factor=8.0),
        final_logit_softcapping=3.0,
        tie_word_embeddings=False,
    ),
    "gemma4-values": gemma4(
        "gemma4_unified_text",
        "Gemma4UnifiedForCausalLM",
        attention_k_eq_v=False,
        use_bidirectional_attention="vision",
        final_logit_softcapping=None,
        tie_word_embeddings=False,
    ),
    "gemma4-shared": gemma4(
        "gemma4_unified_text",
        "Gemma4UnifiedForCausalLM",
        **dict(SHARED_KV, num_kv_shared_layers=2),
    ),
    "gemma4-e2b": gemma4_e2b(),
    "granite-untied": granite(tie_word_embeddings=False),
    "exaone4-full": exaone4(sliding_window=None, layer_types=["full_attention"] * 3)
    | dict(sliding_window_pattern=None),
    "seed_oss-plain": seed_oss(attention_bias=False, tie_word_embeddings=True),
    "hunyuan-plain": hunyuan(rope_scaling=None, tie_word_embeddings=True),
    "smollm3-window": smollm3(use_sliding_window=True, sliding_window=9, no_rope_layers=[1, 0, 1]),
}
CONFIGS = {**FAMILIES, **VARIANTS}


def deep(cfg):
    """With more in it: the smallest arena, 2 MiB, does not hold all saved activations."""
    changes = dict(num_hidden_layers=6, intermediate_size=352)
    if cfg.get("layer_types"):
        changes["layer_types"] = cfg["layer_types"] * 2
    return {**cfg, **changes}


DEEP = {f"{name}-deep": deep(cfg) for name, cfg in FAMILIES.items()}
DEEP_DELTA = {"qwen3_5-deep": deep(DELTA_NETS["qwen3_5"])}
ALL = {**CONFIGS, **DEEP, **EXPERTS, **DELTA_NETS, **DEEP_DELTA}


def wide(cfg):
    """Of sizes that a GPU's libraries take: heads of 64 elements, of Gemma 128 and in Gemma 4's full
    layers 512, with MLA 192 of keys and 128 of values. All experts are used: in bf16 a router that
    chooses would send some tokens to others than in fp32.
    """
    gemma = cfg["model_type"] in ("gemma2", "gemma3_text", *GEMMA4)
    changes = dict(hidden_size=256, intermediate_size=512, head_dim=128 if gemma else 64)
    if cfg.get("global_head_dim"):
        changes["global_head_dim"] = 512
    if cfg.get("hidden_size_per_layer_input"):
        changes["hidden_size_per_layer_input"] = 64
    if "kv_lora_rank" in cfg:
        changes |= dict(kv_lora_rank=64, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
        changes |= dict(q_lora_rank=cfg["q_lora_rank"] and 96, n_group=1, topk_group=1)
        changes["head_dim"] = 64  # of RoPE
    if "linear_num_key_heads" in cfg:
        changes |= dict(linear_key_head_dim=64, linear_value_head_dim=128, rms_norm_eps=1e-6)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    names += ("num_experts_per_tok", "top_k_experts")
    changes |= {name: 4 for name in names if name in cfg}
    if "moe_intermediate_size" in cfg:
        changes["moe_intermediate_size"] = 128
    if cfg.get("sliding_window"):
        changes["sliding_window"] = 37
    if (cfg.get("rope_scaling") or {}).get("type") == "longrope":
        changes["rope_scaling"] = longrope(24)
    return {**cfg, **changes}


def rope_of(config):
    """RoPE's parameters of transformers' config, by transformers 5's names: of all layers, and of
    those with windows where they have others."""
    if not hasattr(config, "rope_parameters"):  # transformers 4
        rope = dict(getattr(config, "rope_scaling", None) or {"rope_type": "default"})
        rope = {"rope_type": rope.get("type"), "rope_theta": config.rope_theta} | rope
        for key in ("partial_rotary_factor", "original_max_position_embeddings"):
            if hasattr(config, key):
                rope[key] = getattr(config, key)
        return rope, {"rope_theta": getattr(config, "rope_local_base_freq", None)}
    rope = config.rope_parameters
    return rope.get("full_attention", rope), rope.get("sliding_attention")


def named_constants(model):
    """What is on disk and not trained: Gemma 4's layer_scalar."""
    return [(k, p) for k, p in model.named_buffers() if k.endswith("layer_scalar")]


def random_model(cfg, seed=1):
    """transformers' model with weights that use every part: products of unit size, norm weights
    unlike each other, biases not zero."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**copy.deepcopy(cfg))  # which it writes into
    config._attn_implementation = config._experts_implementation = "eager"
    whole, text = "vision_config" in cfg, cfg.get("text_config", cfg)
    kind = transformers.AutoModelForImageTextToText if whole else transformers.AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [(k, b) for k, b in model.named_buffers() if k.endswith("correction_bias")]
        for key, p in sorted([*model.named_parameters(), *biases]):
            x = torch.randn(p.shape, generator=generator)
            if "norm" in key:
                plain = text["model_type"] not in OFFSET or "linear_attn.norm" in key
                x = 0.2 * x + plain
                if text["model_type"] in GEMMA4 and re.search("[qk]_norm", key):
                    x = x / len(x) ** 0.25  # scores have no scale of their own
            elif key.endswith("bias"):
                x = 0.3 * x
            elif key.endswith("sinks"):
                pass
            elif "embed" in key:
                x = 0.1 * x
            elif key.endswith(("router.scale", "per_expert_scale")):
                x = 0.3 * x + 1
            else:
                x = x / math.sqrt(p.shape[-1])
            p.copy_(x)
            if key.endswith("gate.weight") and len(x) > 8:
                p[5] *= 1e-3  # an expert that no token of a test's batch chooses
        for i, (_, p) in enumerate(named_constants(model)):
            p.fill_(0.7 + 0.1 * i)
    return model


@contextlib.contextmanager
def delta_rule_in_fp64(model):
    """transformers has the gated delta rule in fp32, in an fp64 model too."""
    import torch

    class Wide:
        float32 = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    own = sys.modules[type(model).__module__]
    with (
        mock.patch.object(own, "torch", Wide()),
        mock.patch.object(torch.Tensor, "float", lambda x: x),
    ):
        yield


# By the dimension that has the layers.
LAYERS_PARTS = {
    "embed_tokens_per_layer.weight": 1,
    "per_layer_model_projection.weight": 0,
    "per_layer_projection_norm.weight": None,
}


def as_on_disk(named, model_type):
    """{name: tensor} of a model in memory, where transformers 5 has a layer's experts as two
    tensors, under the names of files; and layers' parts of Gemma 4's shared tensors."""
    out = {}
    for key, x in named.items():
        stem, _, what = key.rpartition("model.")
        if what in LAYERS_PARTS and isinstance(x, float):
            continue  # of parts no spread is known
        if what in LAYERS_PARTS:
            n = sum(k.endswith("per_layer_input_gate.weight") for k in named)
            parts = [x] if x.ndim == 1 else x.chunk(n, LAYERS_PARTS[what])
            out |= {f"{stem}model.layers.{i}.{what}": part for i, part in enumerate(parts)}
            continue
        if model_type == "mixtral":
            key = key.replace(".mlp.", ".block_sparse_moe.")
        gate, up, down = (
            ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        )
        if model_type == "gpt_oss" and key.endswith(("gate_up_proj", "down_proj")):
            stem, what = key.rsplit(".", 1)
            out |= {f"{stem}.{e}.{what}": w.T for e, w in enumerate(x)}
        elif key.endswith("experts.gate_up_proj"):
            for e, w in enumerate(x):
                g, u = w.chunk(2)
                out[key.replace("gate_up_proj", f"{e}.{gate}.weight")] = g
                out[key.replace("gate_up_proj", f"{e}.{up}.weight")] = u
        elif key.endswith("experts.down_proj"):
            for e, w in enumerate(x):
                out[key.replace("down_proj", f"{e}.{down}.weight")] = w
        else:
            out[key] = x
    return out

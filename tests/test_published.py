"""The configs of models that are used most, with the fields and the sizes that they are published
with: each is opened, or refused by a field's name. docs/models.md has the table, which

    PYTHONPATH=python python tests/test_published.py

writes anew."""

import json
import math
import pathlib
import re
import sys

import pytest
from penstock import FormatError
from penstock.model import ModelConfig

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs/models.md"
BEGIN, END = "<!-- tests/test_published.py -->", "<!-- end -->"


def sizes(vocab, dim, ffn, layers, heads, kv, **more):
    keys = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    names = [*keys.split(), "num_key_value_heads"]
    return dict(zip(names, (vocab, dim, ffn, layers, heads, kv), strict=True), **more)


def model(model_type, architecture, text, **more):
    base = dict(architectures=[architecture], model_type=model_type, torch_dtype="bfloat16")
    return base | text | more


SILU = dict(hidden_act="silu", attention_dropout=0.0, initializer_range=0.02, use_cache=True)
LLAMA3 = dict(
    factor=8.0,
    high_freq_factor=4.0,
    low_freq_factor=1.0,
    original_max_position_embeddings=8192,
    rope_type="llama3",
)


def llama(*size, **more):
    base = dict(SILU, attention_bias=False, mlp_bias=False, pretraining_tp=1, rms_norm_eps=1e-5)
    base |= dict(max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=LLAMA3)
    base |= dict(tie_word_embeddings=False, bos_token_id=128000, eos_token_id=[128001, 128009])
    return model("llama", "LlamaForCausalLM", sizes(*size), **base | more)


def qwen2(*size, **more):
    base = dict(SILU, max_position_embeddings=32768, max_window_layers=28, rms_norm_eps=1e-6)
    base |= dict(rope_theta=1e6, sliding_window=131072, use_sliding_window=False)
    base |= dict(tie_word_embeddings=False, bos_token_id=151643, eos_token_id=151645)
    return model("qwen2", "Qwen2ForCausalLM", sizes(*size), **base | more)


def qwen3(*size, **more):
    base = dict(SILU, attention_bias=False, head_dim=128, max_position_embeddings=40960)
    base |= dict(max_window_layers=36, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1e6)
    base |= dict(sliding_window=None, use_sliding_window=False, tie_word_embeddings=False)
    return model("qwen3", "Qwen3ForCausalLM", sizes(*size), **base | more)


def gemma3(text, **more):
    base = dict(mm_tokens_per_image=256, boi_token_index=255999, eoi_token_index=256000)
    base |= dict(image_token_index=262144, eos_token_id=[1, 106], initializer_range=0.02)
    base |= dict(vision_config=dict(model_type="siglip_vision_model", hidden_size=1152))
    text = dict(model_type="gemma3_text", sliding_window=1024, **text)
    text["rope_scaling"] = dict(factor=8.0, rope_type="linear")
    return model("gemma3", "Gemma3ForConditionalGeneration", base, text_config=text, **more)


def gemma4(kind, *size, kv, **more):
    base = dict(image_token_id=258880, video_token_id=258884, audio_token_id=258881)
    base |= dict(audio_config=None, tie_word_embeddings=True, eos_token_id=[1, 106])
    base |= dict(vision_config=dict(model_type=f"gemma4{kind}_vision"))
    text = sizes(*size, model_type=f"gemma4{kind}_text", head_dim=256, global_head_dim=512)
    text |= dict(num_global_key_value_heads=kv, attention_k_eq_v=True, sliding_window=1024)
    text |= dict(hidden_activation="gelu_pytorch_tanh", final_logit_softcapping=30.0)
    text |= dict(hidden_size_per_layer_input=0, use_bidirectional_attention="vision")
    text |= dict(num_kv_shared_layers=0, enable_moe_block=False, attention_bias=False)
    text |= dict(max_position_embeddings=262144, rms_norm_eps=1e-6, pad_token_id=0)
    text["rope_parameters"] = dict(
        full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
        sliding_attention=dict(rope_type="default", rope_theta=10000.0),
    )
    name = f"Gemma4{kind[1:].capitalize()}ForConditionalGeneration"
    return model(f"gemma4{kind}", name, base, text_config=text | more)


def gemma2(*size, **more):
    base = dict(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh")
    base |= dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, head_dim=256)
    base |= dict(query_pre_attn_scalar=256, sliding_window=4096, rope_theta=10000.0)
    base |= dict(cache_implementation="hybrid", attention_bias=False, rms_norm_eps=1e-6)
    base |= dict(max_position_embeddings=8192, pad_token_id=0, bos_token_id=2, eos_token_id=1)
    return model("gemma2", "Gemma2ForCausalLM", sizes(*size), **base | more)


def phi3(*size, rotary, **more):
    base = dict(SILU, embd_pdrop=0.0, resid_pdrop=0.0, rms_norm_eps=1e-5, rope_theta=10000.0)
    base |= dict(attention_bias=False, partial_rotary_factor=rotary)
    return model("phi3", "Phi3ForCausalLM", sizes(*size), **base | more)


def long(pairs, max_positions, sliding_window):
    factors = dict(long_factor=[1.0 + i / 8 for i in range(pairs)], short_factor=[1.0] * pairs)
    return dict(
        rope_scaling=dict(factors, type="longrope"),
        original_max_position_embeddings=4096,
        max_position_embeddings=max_positions,
        sliding_window=sliding_window,
    )


LATENT = dict(
    attention_bias=False,
    ep_size=1,
    kv_lora_rank=512,
    moe_layer_freq=1,
    pretraining_tp=1,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    seq_aux=True,
    v_head_dim=128,
)


def mscale(x):
    """DeepSeek's YaRN."""
    lengths = dict(factor=40, original_max_position_embeddings=4096, type="yarn")
    return dict(lengths, beta_fast=32, beta_slow=1, mscale=x, mscale_all_dim=x)


def mistral(*size, **more):
    base = dict(SILU, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=1e6)
    base |= dict(sliding_window=None, tie_word_embeddings=False, head_dim=128)
    return model("mistral", "MistralForCausalLM", sizes(*size), **base | more)


MINISTRAL_ROPE = dict(
    beta_fast=32.0,
    beta_slow=1.0,
    factor=16.0,
    llama_4_scaling_beta=0.1,
    mscale=1.0,
    mscale_all_dim=1.0,
    original_max_position_embeddings=16384,
    rope_theta=1e6,
    rope_type="yarn",
    type="yarn",
)
QWEN_EXPERTS = dict(decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True)
QWEN_EXPERTS |= dict(router_aux_loss_coef=0.001, num_experts=128, num_experts_per_tok=8)
QWEN_EXPERTS |= dict(moe_intermediate_size=768, output_router_logits=False)
GPT_OSS = dict(SILU, attention_bias=True, head_dim=64, max_position_embeddings=131072)
GPT_OSS |= dict(rms_norm_eps=1e-5, sliding_window=128, swiglu_limit=7.0, rope_theta=150000)
GPT_OSS |= dict(num_experts_per_tok=4, experts_per_token=4, initial_context_length=4096)
GPT_OSS |= dict(router_aux_loss_coef=0.9, output_router_logits=False, pad_token_id=199999)
GPT_OSS |= dict(tie_word_embeddings=False, eos_token_id=200002)
GPT_OSS["quantization_config"] = dict(
    modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    quant_method="mxfp4",
)
GPT_OSS["rope_scaling"] = dict(
    beta_fast=32.0,
    beta_slow=1.0,
    factor=32.0,
    original_max_position_embeddings=4096,
    rope_type="yarn",
    truncate=False,
)
DELTA_NET = dict(linear_num_key_heads=16, linear_num_value_heads=32, linear_conv_kernel_dim=4)
DELTA_NET |= dict(linear_key_head_dim=128, linear_value_head_dim=128)
QWEN_VISION = dict(vision_config=dict(depth=32), vision_start_token_id=151652)
QWEN_VISION |= dict(image_token_id=151655, video_token_id=151656, vision_end_token_id=151653)
MISTRAL_FP8 = dict(activation_scheme="static", dequantize=False, quant_method="fp8")
MISTRAL_FP8 |= dict(weight_block_size=None)
MISTRAL_FP8["modules_to_not_convert"] = [
    "model.vision_tower",
    "model.multi_modal_projector",
    "lm_head",
    "model.vision_tower",
    "model.multi_modal_projector",
]
PIXTRAL = dict(vision_config=dict(model_type="pixtral"), image_token_index=10)
PIXTRAL |= dict(multimodal_projector_bias=False, spatial_merge_size=2, vision_feature_layer=-1)
OLMO3_TYPES = (["sliding_attention"] * 3 + ["full_attention"]) * 8

# by name: the config, and the field that a message names; "": it opens
PUBLISHED = {
    "Llama 3.1 8B": (llama(128256, 4096, 14336, 32, 32, 8), ""),
    "Llama 3.2 1B": (
        llama(
            *(128256, 2048, 8192, 16, 32, 8),
            head_dim=64,
            tie_word_embeddings=True,
            rope_scaling=LLAMA3 | dict(factor=32.0),
        ),
        "",
    ),
    "Llama 3.2 3B": (
        llama(
            *(128256, 3072, 8192, 28, 24, 8),
            head_dim=128,
            tie_word_embeddings=True,
            rope_scaling=LLAMA3 | dict(factor=32.0),
        ),
        "",
    ),
    "Llama 3.3 70B": (llama(128256, 8192, 28672, 80, 64, 8), ""),
    "DeepSeek R1 Distill Llama 8B": (
        llama(128256, 4096, 14336, 32, 32, 8, bos_token_id=128000, eos_token_id=128001),
        "",
    ),
    "SmolLM2 1.7B": (
        llama(
            *(49152, 2048, 8192, 24, 32, 32),
            max_position_embeddings=8192,
            rope_scaling=None,
            rope_theta=130000,
            rope_interleaved=False,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        ),
        "",
    ),
    "Qwen2.5 0.5B": (qwen2(151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True), ""),
    "Qwen2.5 7B": (qwen2(152064, 3584, 18944, 28, 28, 4), ""),
    "Qwen2.5 Coder 32B": (qwen2(152064, 5120, 27648, 64, 40, 8, max_window_layers=70), ""),
    "Qwen3 0.6B": (qwen3(151936, 1024, 3072, 28, 16, 8, tie_word_embeddings=True), ""),
    "Qwen3 4B 2507": (
        qwen3(
            *(151936, 2560, 9728, 36, 32, 8),
            tie_word_embeddings=True,
            max_position_embeddings=262144,
            rope_theta=5000000,
        ),
        "",
    ),
    "Qwen3 8B": (qwen3(151936, 4096, 12288, 36, 32, 8), ""),
    "Qwen3 30B-A3B": (
        qwen3(151936, 2048, 6144, 48, 32, 4, **QWEN_EXPERTS)
        | dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"]),
        "",
    ),
    "Qwen2.5-VL 7B": (
        qwen2(
            *(152064, 3584, 18944, 28, 28, 4),
            max_position_embeddings=128000,
            sliding_window=32768,
            rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]),
            vision_token_id=151654,
            **QWEN_VISION,
        )
        | dict(model_type="qwen2_5_vl", architectures=["Qwen2_5_VLForConditionalGeneration"]),
        "",
    ),
    "Qwen3-VL 8B": (
        model(
            "qwen3_vl",
            "Qwen3VLForConditionalGeneration",
            QWEN_VISION,
            tie_word_embeddings=False,
            text_config=sizes(151936, 4096, 12288, 36, 32, 8)
            | dict(SILU, model_type="qwen3_vl_text", head_dim=128, rope_theta=5000000)
            | dict(attention_bias=False, max_position_embeddings=262144, rms_norm_eps=1e-6)
            | dict(
                rope_scaling=dict(
                    mrope_interleaved=True, mrope_section=[24, 20, 20], rope_type="default"
                )
            ),
        ),
        "",
    ),
    "Qwen3-Next 80B-A3B": (
        qwen3(151936, 2048, 5120, 48, 16, 2, **QWEN_EXPERTS)
        | dict(model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"], head_dim=256)
        | dict(num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512)
        | dict(shared_expert_intermediate_size=512, full_attention_interval=4, rope_theta=1e7)
        | dict(partial_rotary_factor=0.25, max_position_embeddings=262144)
        | DELTA_NET,
        "",
    ),
    "Qwen3.5 9B": (
        model(
            "qwen3_5",
            "Qwen3_5ForConditionalGeneration",
            QWEN_VISION,
            text_config=sizes(248320, 4096, 12288, 32, 16, 4)
            | dict(DELTA_NET, model_type="qwen3_5_text", full_attention_interval=4, head_dim=256),
        ),
        "",
    ),
    "Qwen3.5 35B-A3B": (
        model(
            "qwen3_5_moe",
            "Qwen3_5MoeForConditionalGeneration",
            QWEN_VISION,
            text_config=dict(DELTA_NET, model_type="qwen3_5_moe_text", num_experts=256)
            | dict(hidden_size=2048, num_hidden_layers=40, shared_expert_intermediate_size=512)
            | dict(num_attention_heads=16, num_key_value_heads=2, moe_intermediate_size=512),
        ),
        "",
    ),
    "Gemma 2B": (
        model(
            "gemma",
            "GemmaForCausalLM",
            sizes(256000, 2048, 16384, 18, 8, 1),
            hidden_act="gelu",
            hidden_activation=None,
            head_dim=256,
            attention_bias=False,
            max_position_embeddings=8192,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=10000.0,
            pad_token_id=0,
        ),
        "",
    ),
    "Gemma 2 9B": (gemma2(256000, 3584, 14336, 42, 16, 8), ""),
    "Gemma 3 1B": (
        model(
            "gemma3_text",
            "Gemma3ForCausalLM",
            sizes(262144, 1152, 6912, 26, 4, 1),
            hidden_activation="gelu_pytorch_tanh",
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            cache_implementation="hybrid",
            head_dim=256,
            query_pre_attn_scalar=256,
            rope_local_base_freq=10000,
            rope_theta=1000000,
            sliding_window=512,
            sliding_window_pattern=6,
            max_position_embeddings=32768,
        ),
        "",
    ),
    "Gemma 3 4B": (
        gemma3(dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34)),
        "",
    ),
    "Gemma 3 27B": (
        gemma3(
            dict(
                hidden_size=5376,
                intermediate_size=21504,
                num_hidden_layers=62,
                num_attention_heads=32,
                num_key_value_heads=16,
                head_dim=128,
                query_pre_attn_scalar=168,
            )
        ),
        "",
    ),
    "Gemma 4 12B": (gemma4("_unified", *(262144, 3840, 15360, 48, 16, 8), kv=1), ""),
    "Gemma 4 31B": (gemma4("", *(262144, 5376, 21504, 60, 32, 16), kv=4), ""),
    "Gemma 4 26B-A4B": (
        gemma4(
            "",
            *(262144, 2816, 2112, 30, 16, 8),
            kv=2,
            enable_moe_block=True,
            num_experts=128,
            top_k_experts=8,
            moe_intermediate_size=704,
        ),
        "",
    ),
    "Gemma 4 E2B": (
        gemma4(
            "",
            *(262144, 1536, 6144, 35, 8, 1),
            kv=None,
            attention_k_eq_v=False,
            sliding_window=512,
            layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
            hidden_size_per_layer_input=256,
            vocab_size_per_layer_input=262144,
            num_kv_shared_layers=20,
            use_double_wide_mlp=True,
        ),
        "",
    ),
    "Gemma 4 E4B": (
        gemma4(
            "",
            *(262144, 2560, 10240, 42, 8, 2),
            kv=None,
            attention_k_eq_v=False,
            sliding_window=512,
            hidden_size_per_layer_input=256,
            vocab_size_per_layer_input=262144,
            num_kv_shared_layers=18,
            use_double_wide_mlp=False,
        ),
        "",
    ),
    "gpt-oss 20B": (
        model(
            "gpt_oss",
            "GptOssForCausalLM",
            sizes(201088, 2880, 2880, 24, 64, 8),
            **GPT_OSS,
            layer_types=["sliding_attention", "full_attention"] * 12,
            num_local_experts=32,
        ),
        "",
    ),
    "gpt-oss 120B": (
        model(
            "gpt_oss",
            "GptOssForCausalLM",
            sizes(201088, 2880, 2880, 36, 64, 8),
            **GPT_OSS,
            layer_types=["sliding_attention", "full_attention"] * 18,
            num_local_experts=128,
        ),
        "",
    ),
    "Mistral 7B v0.3": (mistral(32768, 4096, 14336, 32, 32, 8), ""),
    "Mistral Nemo 12B": (
        mistral(131072, 5120, 14336, 40, 32, 8, max_position_embeddings=131072),
        "",
    ),
    "Mistral Small 3.1 24B": (
        model(
            "mistral3",
            "Mistral3ForConditionalGeneration",
            PIXTRAL,
            text_config=sizes(131072, 5120, 32768, 40, 32, 8)
            | dict(SILU, model_type="mistral", head_dim=128, rms_norm_eps=1e-5)
            | dict(max_position_embeddings=131072, rope_theta=1e9, sliding_window=None),
            tie_word_embeddings=False,
        ),
        "",
    ),
    "Ministral 3 8B": (
        model(
            "mistral3",
            "Mistral3ForConditionalGeneration",
            PIXTRAL,
            text_config=sizes(131072, 4096, 14336, 34, 32, 8)
            | dict(SILU, model_type="ministral3", head_dim=128, rms_norm_eps=1e-5)
            | dict(max_position_embeddings=262144, rope_parameters=MINISTRAL_ROPE)
            | dict(sliding_window=None, tie_word_embeddings=False),
            tie_word_embeddings=False,
        ),
        "",
    ),
    "Ministral 3 8B, FP8": (
        model(
            "mistral3",
            "Mistral3ForConditionalGeneration",
            PIXTRAL,
            text_config=sizes(131072, 4096, 14336, 34, 32, 8)
            | dict(SILU, model_type="ministral3", head_dim=128, rms_norm_eps=1e-5)
            | dict(max_position_embeddings=262144, rope_parameters=MINISTRAL_ROPE)
            | dict(sliding_window=None, tie_word_embeddings=False),
            tie_word_embeddings=False,
            quantization_config=MISTRAL_FP8,
        ),
        "",
    ),
    "Mixtral 8x7B": (
        mistral(32000, 4096, 14336, 32, 32, 8, num_local_experts=8, num_experts_per_tok=2)
        | dict(model_type="mixtral", architectures=["MixtralForCausalLM"])
        | dict(router_aux_loss_coef=0.02, output_router_logits=False),
        "",
    ),
    "Phi-3.5 mini": (
        phi3(*(32064, 3072, 8192, 32, 32, 32), rotary=1.0, **long(48, 131072, 262144)),
        "",
    ),
    "Phi-4": (
        phi3(
            *(100352, 5120, 17920, 40, 40, 10),
            rotary=1.0,
            max_position_embeddings=16384,
            original_max_position_embeddings=16384,
            rope_scaling=None,
            sliding_window=None,
        )
        | dict(rope_theta=250000),
        "",
    ),
    "Phi-4 mini": (
        phi3(
            *(200064, 3072, 8192, 32, 24, 8),
            rotary=0.75,
            tie_word_embeddings=True,
            interpolation_factor=1,
            full_attn_mod=1,
            lm_head_bias=False,
            mlp_bias=False,
            **long(48, 131072, 262144),
        ),
        "",
    ),
    "OLMo 2 7B": (
        model(
            "olmo2",
            "Olmo2ForCausalLM",
            sizes(100352, 4096, 11008, 32, 32, 32),
            **dict(SILU, attention_bias=False, max_position_embeddings=4096, rms_norm_eps=1e-6),
            rope_scaling=None,
            rope_theta=500000,
            pad_token_id=100277,
        ),
        "",
    ),
    "OLMo 3 7B": (
        model(
            "olmo3",
            "Olmo3ForCausalLM",
            sizes(100278, 4096, 11008, 32, 32, 32),
            **dict(SILU, attention_bias=False, max_position_embeddings=65536, rms_norm_eps=1e-6),
            layer_types=OLMO3_TYPES,
            rope_scaling=dict(
                attention_factor=1.2079441541679836,
                beta_fast=32.0,
                beta_slow=1.0,
                factor=8.0,
                original_max_position_embeddings=8192,
                rope_type="yarn",
            ),
            rope_theta=500000,
            sliding_window=4096,
            pad_token_id=100277,
        ),
        "",
    ),
    "SmolLM3 3B": (
        model(
            "smollm3",
            "SmolLM3ForCausalLM",
            sizes(128256, 2048, 11008, 36, 16, 4),
            **dict(SILU, attention_bias=False, mlp_bias=False, rms_norm_eps=1e-6),
            layer_types=["full_attention"] * 36,
            max_position_embeddings=65536,
            max_window_layers=28,
            no_rope_layer_interval=4,
            no_rope_layers=[int((i + 1) % 4 != 0) for i in range(36)],
            rope_scaling=None,
            rope_theta=5000000.0,
            sliding_window=None,
            use_sliding_window=False,
            pad_token_id=128004,
        ),
        "",
    ),
    "Granite 3.3 8B": (
        model(
            "granite",
            "GraniteForCausalLM",
            sizes(49159, 4096, 12800, 40, 32, 8),
            **dict(SILU, attention_bias=False, mlp_bias=False, rms_norm_eps=1e-5),
            attention_multiplier=0.0078125,
            embedding_multiplier=12.0,
            logits_scaling=16.0,
            residual_multiplier=0.22,
            max_position_embeddings=131072,
            rope_theta=10000000.0,
            tie_word_embeddings=True,
        ),
        "",
    ),
    "Seed-OSS 36B": (
        model(
            "seed_oss",
            "SeedOssForCausalLM",
            sizes(155136, 5120, 27648, 64, 80, 8),
            hidden_act="silu",
            attention_bias=True,
            attention_dropout=0.1,
            attention_out_bias=False,
            head_dim=128,
            max_position_embeddings=524288,
            mlp_bias=False,
            residual_dropout=0.1,
            rms_norm_eps=1e-6,
            rope_scaling=dict(rope_type="default"),
            rope_theta=10000000.0,
            tie_word_embeddings=False,
            pad_token_id=1,
        ),
        "",
    ),
    "EXAONE 4.0 1.2B": (
        model(
            "exaone4",
            "Exaone4ForCausalLM",
            sizes(102400, 2048, 4096, 30, 32, 8),
            **dict(SILU, head_dim=64, max_position_embeddings=65536, rms_norm_eps=1e-5),
            layer_types=["full_attention"] * 30,
            rope_scaling=dict(LLAMA3, factor=16.0),
            rope_theta=1000000,
            sliding_window=None,
            sliding_window_pattern=None,
            tie_word_embeddings=True,
        ),
        "",
    ),
    "Hunyuan 7B": (
        model(
            "hunyuan_v1_dense",
            "HunYuanDenseV1ForCausalLM",
            sizes(128167, 4096, 14336, 32, 32, 8),
            **dict(SILU, attention_bias=False, head_dim=128, mlp_bias=False, rms_norm_eps=1e-5),
            max_position_embeddings=32768,
            rope_scaling=dict(
                alpha=1000.0,
                beta_fast=32,
                beta_slow=1,
                factor=1.0,
                mscale=1.0,
                mscale_all_dim=1.0,
                type="dynamic",
            ),
            rope_theta=10000.0,
            tie_word_embeddings=True,
            pad_token_id=127961,
        ),
        "",
    ),
    "GLM-4 9B 0414": (
        model(
            "glm4",
            "Glm4ForCausalLM",
            sizes(151552, 4096, 13696, 40, 32, 2),
            **dict(SILU, attention_bias=False, head_dim=128, rms_norm_eps=1e-5),
            max_position_embeddings=32768,
            partial_rotary_factor=0.5,
            rope_theta=10000.0,
            pad_token_id=151329,
            tie_word_embeddings=False,
        ),
        "",
    ),
    "DeepSeek V2 Lite": (
        model(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            sizes(102400, 2048, 10944, 27, 16, 16),
            **dict(SILU, **LATENT, rope_scaling=mscale(0.707), scoring_func="softmax"),
            aux_loss_alpha=0.001,
            first_k_dense_replace=1,
            max_position_embeddings=163840,
            moe_intermediate_size=1408,
            n_group=1,
            n_routed_experts=64,
            n_shared_experts=2,
            norm_topk_prob=False,
            num_experts_per_tok=6,
            q_lora_rank=None,
            rms_norm_eps=1e-6,
            rope_theta=10000,
            routed_scaling_factor=1.0,
            topk_group=1,
            topk_method="greedy",
        ),
        "",
    ),
    "DeepSeek V3": (
        model(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            sizes(129280, 7168, 18432, 61, 128, 128),
            **dict(SILU, **LATENT, rope_scaling=mscale(1.0), scoring_func="sigmoid"),
            first_k_dense_replace=3,
            max_position_embeddings=163840,
            moe_intermediate_size=2048,
            n_group=8,
            n_routed_experts=256,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_experts_per_tok=8,
            num_nextn_predict_layers=1,
            q_lora_rank=1536,
            quantization_config=dict(
                activation_scheme="dynamic",
                fmt="e4m3",
                quant_method="fp8",
                weight_block_size=[128, 128],
            ),
            rms_norm_eps=1e-6,
            rope_theta=10000,
            routed_scaling_factor=2.5,
            topk_group=4,
            topk_method="noaux_tc",
        ),
        "",
    ),
    "GLM 4.7 Flash": (
        model(
            "glm4_moe_lite",
            "Glm4MoeLiteForCausalLM",
            sizes(154880, 2048, 10240, 47, 20, 20),
            **dict(SILU, kv_lora_rank=512, q_lora_rank=768, qk_nope_head_dim=192),
            attention_bias=False,
            first_k_dense_replace=1,
            max_position_embeddings=202752,
            moe_intermediate_size=1536,
            n_group=1,
            n_routed_experts=64,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_experts_per_tok=4,
            num_nextn_predict_layers=1,
            pad_token_id=154820,
            partial_rotary_factor=1.0,
            qk_rope_head_dim=64,
            rms_norm_eps=1e-5,
            rope_scaling=None,
            rope_theta=1000000,
            routed_scaling_factor=1.8,
            topk_group=1,
            topk_method="noaux_tc",
            v_head_dim=256,
        ),
        "",
    ),
}


def read(folder, cfg):
    (folder / "config.json").write_text(json.dumps(cfg))
    return ModelConfig.read(folder / "config.json")


def table(folder):
    rows = ["| model | `model_type` | parameters | |", "|---|---|---|---|"]
    for name, (cfg, field) in PUBLISHED.items():
        count, said = "", f"refused: `{field}`"
        if not field:
            c = read(folder, cfg)
            count, notes = f"{c.n_elements / 1e9:.2f}B", []
            if c.multimodal:
                notes.append("its text model")
            if c.dropout:
                notes.append("dropout to be set to 0 for training")
            said = ", ".join(["opened", *notes])
        rows.append(f"| {name} | `{cfg['model_type']}` | {count} | {said} |")
    return "\n".join(rows)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_opened_or_refused_by_its_field(tmp_path, name):
    cfg, field = PUBLISHED[name]
    if not field:
        assert math.isfinite(read(tmp_path, cfg).flops(4096)["sequence"])
        return
    with pytest.raises(FormatError, match=re.escape("config.json: ") + f".*{field} is "):
        read(tmp_path, cfg)


def test_forty_models_are_in_the_table_of_the_page(tmp_path):
    assert len(PUBLISHED) >= 40
    text = PAGE.read_text()
    found = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()
    assert found == table(tmp_path), "write it anew: the first lines of this file say how"


if __name__ == "__main__":
    import tempfile

    page = PAGE.read_text()
    with tempfile.TemporaryDirectory() as where:
        made = table(pathlib.Path(where))
    before, after = page[: page.index(BEGIN)], page[page.index(END) :]
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{after}")
    sys.exit(0)

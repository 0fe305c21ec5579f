"""A Llama in PyTorch eager, for comparisons with Penstock: F.linear,
F.scaled_dot_product_attention, F.rms_norm."""

import torch
from torch.nn import functional as f


class Llama:
    """Computes the logits of token ids [n, S]. `params` maps the names of Penstock's ModelConfig
    `m` to tensors, whose dtype is that of the computation; angles are fp32."""

    def __init__(self, m, params):
        self.m, self.p = m, params

    def rope(self, seq, device):
        d = self.m.head_dim
        inv = self.m.rope.theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        angle = torch.arange(seq, dtype=torch.float64)[:, None] * inv
        angle = torch.cat([angle, angle], -1)
        return angle.cos().float().to(device), angle.sin().float().to(device)

    def __call__(self, ids):
        m, p = self.m, self.p
        n, s = ids.shape
        cos, sin = self.rope(s, ids.device)

        def rot(x):
            half = x.shape[-1] // 2
            return (x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin).to(x.dtype)

        x = f.embedding(ids, p["model.embed_tokens.weight"])
        for i in range(m.n_layers):
            w = lambda name, i=i: p[f"model.layers.{i}.{name}.weight"]
            y = f.rms_norm(x, (m.dim,), w("input_layernorm"), m.norm_eps)
            q, k, v = (
                f.linear(y, w(f"self_attn.{c}_proj")).view(n, s, -1, m.head_dim).transpose(1, 2)
                for c in "qkv"
            )
            o = f.scaled_dot_product_attention(
                rot(q), rot(k), v, is_causal=True, enable_gqa=m.n_heads != m.n_kv_heads
            )
            x = x + f.linear(o.transpose(1, 2).reshape(n, s, -1), w("self_attn.o_proj"))
            y = f.rms_norm(x, (m.dim,), w("post_attention_layernorm"), m.norm_eps)
            x = x + f.linear(
                f.silu(f.linear(y, w("mlp.gate_proj"))) * f.linear(y, w("mlp.up_proj")),
                w("mlp.down_proj"),
            )
        head = p["model.embed_tokens.weight"] if m.tied_embeddings else p["lm_head.weight"]
        return f.linear(f.rms_norm(x, (m.dim,), p["model.norm.weight"], m.norm_eps), head)

"""A Llama in PyTorch, for comparisons with Penstock: F.linear, F.scaled_dot_product_attention,
F.rms_norm, nothing else."""

import torch
from torch.nn import functional as f

PARTS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


class Llama:
    """Computes from token ids [n, S] the logits or the summed loss.

    m       the shape: n_layers, dim, n_heads, n_kv_heads, head_dim, norm_eps, rope.theta and
            tied_embeddings, such as Penstock's ModelConfig
    params  maps the names of the Hugging Face layout to tensors, whose dtype is that of the
            computation; angles are fp32
    wrap    given each of the two functions that have all the work, block and head, returns what is
            called in its place, such as torch.compile(it)
    """

    def __init__(self, m, params, wrap=lambda function: function):
        self.m, self.p, self._angles = m, params, {}
        self.block, self.head_loss = wrap(self._block), wrap(self._head_loss)

    def _rope(self, seq, device):
        if (seq, device) not in self._angles:
            d = self.m.head_dim
            inv = self.m.rope.theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
            angle = torch.arange(seq, dtype=torch.float64)[:, None] * inv
            angle = torch.cat([angle, angle], -1)
            cos_sin = (angle.cos().float().to(device), angle.sin().float().to(device))
            self._angles[seq, device] = cos_sin
        return self._angles[seq, device]

    def _linear(self, y, w):
        return f.linear(y, w)

    def _block(self, x, cos, sin, norm_1, q, k, v, o, norm_2, gate, up, down):
        m = self.m
        n, s, _ = x.shape

        def rot(t):
            half = t.shape[-1] // 2
            return (t * cos + torch.cat([-t[..., half:], t[..., :half]], -1) * sin).to(t.dtype)

        y = f.rms_norm(x, (m.dim,), norm_1, m.norm_eps)
        heads = [self._linear(y, w).view(n, s, -1, m.head_dim).transpose(1, 2) for w in (q, k, v)]
        out = f.scaled_dot_product_attention(
            rot(heads[0]),
            rot(heads[1]),
            heads[2],
            is_causal=True,
            enable_gqa=m.n_heads != m.n_kv_heads,
        )
        x = x + self._linear(out.transpose(1, 2).reshape(n, s, -1), o)
        y = f.rms_norm(x, (m.dim,), norm_2, m.norm_eps)
        return x + self._linear(f.silu(self._linear(y, gate)) * self._linear(y, up), down)

    def hidden(self, ids, call=None):
        """The last block's output [n, S, dim]. call(block, *arguments): how a block is called, such
        as through torch.utils.checkpoint."""
        cos, sin = self._rope(ids.shape[1], ids.device)
        x = f.embedding(ids, self.p["model.embed_tokens.weight"])
        for i in range(self.m.n_layers):
            weights = [self.p[f"model.layers.{i}.{part}.weight"] for part in PARTS]
            x = (call or _call)(self.block, x, cos, sin, *weights)
        return x

    def _logits(self, x, norm, head):
        return f.linear(f.rms_norm(x, (self.m.dim,), norm, self.m.norm_eps), head)

    def _head_loss(self, x, targets, norm, head):
        logits = self._logits(x, norm, head).float()
        return f.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
        )

    def _head_weights(self):
        tied = self.m.tied_embeddings
        head = self.p["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return self.p["model.norm.weight"], head

    def __call__(self, ids):
        return self._logits(self.hidden(ids), *self._head_weights())

    def loss(self, ids, targets, call=None):
        """The sum of the cross-entropy over the targets [n, S]; a target of -1 does not count."""
        return self.head_loss(self.hidden(ids, call), targets, *self._head_weights())


def _call(function, *arguments):
    return function(*arguments)

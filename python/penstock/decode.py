"""Text from a trained model: a plain forward pass with a key/value cache, in numpy and fp32.

It shows what a small model has learned. The training uses none of this code. tests/test_generate.py
compares its logits with those of transformers.
"""

from pathlib import Path

import numpy as np

from .model import ModelConfig, TensorFile

ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN, ROPE_LONGROPE = 1, 2, 3, 4
GELU_TANH = 1
QK_NORM_ROW = 2
LAYER_WINDOW, LAYER_NO_ROPE, LAYER_LOCAL_ROPE = 1, 2, 4
ONE_PLUS_W = ("gemma2", "gemma3_text")  # families whose norms multiply by 1 + w


class Decoder:
    """The model in a directory (or inside a Trainer), with the tokens that it has read so far.

    logits = decoder.feed(ids)   reads T more tokens, ids int [T]; logits float32 [vocab_size] are
                                 those after the last token
    """

    def __init__(self, source):
        self.config, read = _open(source)
        c = self.config
        self.weights = {p.name: read(p.name) for p in c.params()}
        self.head = self.weights[
            "model.embed_tokens.weight" if c.tied_embeddings else "lm_head.weight"
        ]
        self.norm_offset = np.float32(c.architecture in ONE_PLUS_W)
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        c = self.config
        self._ids = np.empty(0, np.int64)
        self._keys = [
            np.empty((c.n_kv_heads, 0, c.head_dim), np.float32) for _ in range(c.n_layers)
        ]
        self._values = [
            np.empty((c.n_kv_heads, 0, c.head_dim), np.float32) for _ in range(c.n_layers)
        ]

    def feed(self, ids) -> np.ndarray:
        """Read tokens, and return the logits after the last one. ValueError: no token, or an id
        past the vocabulary."""
        c = self.config
        ids = np.asarray(ids, np.int64).reshape(-1)
        if ids.size == 0 or ids.min() < 0 or ids.max() >= c.vocab_size:
            raise ValueError(f"give at least one token id, each from 0 to {c.vocab_size - 1}")
        before, after = len(self._ids), len(self._ids) + len(ids)
        if before and is_long(c, before) != is_long(c, after):
            ids = np.concatenate([self._ids, ids])  # other frequencies: all is computed anew
            self.reset()
        self._ids = np.concatenate([self._ids, ids])
        self._rope = {
            local: inverse_frequencies(c, after, local)
            for local in ([False, True] if c.local_rope_theta else [False])
        }
        x = self.weights["model.embed_tokens.weight"][ids] * np.float32(c.embedding_scale or 1)
        for layer in range(c.n_layers):
            x = self._block(layer, x)
        logits = self.head @ self._norm(x[-1], "model.norm.weight")
        return soft_cap(logits * np.float32(c.logit_scale or 1), c.logit_softcap)

    def _norm(self, x, name):
        """RMSNorm; x where the model has no norm of this name."""
        if name not in self.weights:
            return x
        rms = np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.config.norm_eps))
        return x / rms * (self.weights[name] + self.norm_offset)

    def _linear(self, x, prefix, names):
        """x through the projections @names, which may be one matrix on disk, each with its rows."""
        w = self.weights
        if prefix + names[0] + ".weight" in w:
            return [
                x @ w[f"{prefix}{n}.weight"].T + w.get(f"{prefix}{n}.bias", np.float32(0))
                for n in names
            ]
        if "gate_proj" in names:
            return np.split(x @ w[prefix + "gate_up_proj.weight"].T, 2, -1)
        c = self.config
        ends = np.cumsum([c.n_heads, c.n_kv_heads]) * c.head_dim
        return np.split(x @ w[prefix + "qkv_proj.weight"].T, ends, -1)

    def _block(self, layer, x):
        prefix, scale = f"model.layers.{layer}.", np.float32(self.config.residual_scale or 1)
        attention_norm, mlp_norm = prefix + "input_layernorm.weight", "post_attention_layernorm"
        attention_post = mlp_post = ""
        if prefix + "post_feedforward_layernorm.weight" in self.weights:  # OLMo 2, Gemma
            attention_post, mlp_norm = mlp_norm, "pre_feedforward_layernorm"
            mlp_post = "post_feedforward_layernorm"
        a = self._attention(layer, prefix + "self_attn.", self._norm(x, attention_norm))
        h = x + scale * self._norm(a, f"{prefix}{attention_post}.weight")
        n = self._norm(h, f"{prefix}{mlp_norm}.weight")
        gate, up = self._linear(n, prefix + "mlp.", ["gate_proj", "up_proj"])
        m = (self._activation(gate) * up) @ self.weights[prefix + "mlp.down_proj.weight"].T
        return h + scale * self._norm(m, f"{prefix}{mlp_post}.weight")

    def _activation(self, x):
        if self.config.activation == GELU_TANH:
            return x / 2 * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + 0.044715 * x**3)))
        return x / (1 + np.exp(-x))

    def _heads(self, x, n_heads, norm):
        """x [T, n_heads * head_dim] as [n_heads, T, head_dim], after the norm of that name."""
        row_norm = self.config.qk_norm == QK_NORM_ROW
        y = self._norm(x, norm) if row_norm else x
        y = y.reshape(len(x), n_heads, self.config.head_dim)
        return (y if row_norm else self._norm(y, norm)).transpose(1, 0, 2)

    def _attention(self, layer, prefix, x):
        c, past, n = self.config, self._keys[layer].shape[1], len(x)
        flags = c.layer_flags[layer]
        q, k, v = self._linear(x, prefix, ["q_proj", "k_proj", "v_proj"])
        q = self._heads(q, c.n_heads, prefix + "q_norm.weight")
        k = self._heads(k, c.n_kv_heads, prefix + "k_norm.weight")
        v = self._heads(v, c.n_kv_heads, "")
        if not flags & LAYER_NO_ROPE:
            freq, factor = self._rope[bool(flags & LAYER_LOCAL_ROPE)]
            angle = np.arange(past, past + n)[:, None] * freq
            cos, sin = ((f(angle) * factor).astype(np.float32) for f in (np.cos, np.sin))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self._keys[layer] = k = np.concatenate([self._keys[layer], k], 1)
        self._values[layer] = v = np.concatenate([self._values[layer], v], 1)
        group = c.n_heads // c.n_kv_heads
        scale = np.float32(c.attention_scale or 1 / np.sqrt(c.head_dim))
        scores = soft_cap(
            q @ np.repeat(k, group, 0).transpose(0, 2, 1) * scale, c.attention_softcap
        )
        behind = np.arange(past, past + n)[:, None] - np.arange(past + n)[None, :]
        window = c.window if flags & LAYER_WINDOW else past + n
        scores[:, (behind < 0) | (behind >= window)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = (p / p.sum(-1, keepdims=True)) @ np.repeat(v, group, 0)
        return out.transpose(1, 0, 2).reshape(n, -1) @ self.weights[prefix + "o_proj.weight"].T


def soft_cap(x, cap):
    return x if not cap else np.float32(cap) * np.tanh(x / np.float32(cap))


def _open(source):
    """The configuration of a model directory or a Trainer, and the function that reads its
    tensors."""
    if isinstance(source, (str, Path)):
        return ModelConfig.read(source), TensorFile(source).read
    return source.plan.model, source.read


def is_long(c: ModelConfig, n_tokens: int) -> bool:
    """Whether so many tokens have longrope's long factors."""
    return c.rope.kind == ROPE_LONGROPE and n_tokens > (
        c.rope.original_positions or c.max_positions
    )


def inverse_frequencies(c: ModelConfig, n_tokens: int = 1, local: bool = False):
    """RoPE's frequencies, float64 [rotary_dim / 2], and the factor of cosine and sine, as
    ps_rope_scaling of include/penstock/model.h defines them. n_tokens: the sequence's length.
    local: those of the layers with RoPE of their own."""
    r, dim = c.rope, c.rope.rotary_dim or c.head_dim
    if local:
        return c.local_rope_theta ** (-np.arange(0, dim, 2) / dim), 1.0
    freq = r.theta ** (-np.arange(0, dim, 2) / dim)
    if r.kind == ROPE_LINEAR:
        return freq / r.factor, 1.0
    if r.kind == ROPE_LLAMA3:
        turns = r.original_positions * freq / (2 * np.pi)  # over the original context
        kept = np.clip((turns - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor), 0, 1)
        return freq * (kept + (1 - kept) / r.factor), 1.0
    if r.kind == ROPE_YARN:
        return yarn(c, freq, dim)
    if r.kind == ROPE_LONGROPE:
        return longrope(c, freq, is_long(c, n_tokens))
    return freq, 1.0


def yarn(c, freq, dim):
    r, original = c.rope, c.rope.original_positions or c.max_positions

    def pair(turns):  # that makes so many turns in the original context
        return dim * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(r.theta))

    def scale(mscale):
        return 1.0 if r.factor <= 1 else 0.1 * mscale * np.log(r.factor) + 1.0

    low, high = pair(r.beta_fast or 32), pair(r.beta_slow or 1)
    if not r.keep_fraction:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1)
    both = r.mscale and r.mscale_all_dim
    factor = scale(r.mscale) / scale(r.mscale_all_dim) if both else scale(1.0)
    return freq * (1 - ramp + ramp / r.factor), r.attention_factor or factor


def longrope(c, freq, long):
    r = c.rope
    factors = np.array([(r.long_factor if long else r.short_factor)[i] for i in range(len(freq))])
    original = r.original_positions or c.max_positions
    ratio = c.max_positions / r.original_positions if r.original_positions else r.factor
    factor = 1.0 if ratio <= 1 else np.sqrt(1 + np.log(ratio) / np.log(original))
    return freq / factors, r.attention_factor or factor


def rotate(x, cos, sin):
    """RoPE on the first elements of each head of x [heads, T, head_dim], their two halves as pairs;
    cos and sin [T, rotary_dim / 2]."""
    n = 2 * cos.shape[-1]
    a, b = np.split(x[..., :n], 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., n:]], -1)


def generate(
    source, ids, n: int, temperature: float = 0.8, seed: int = 0, end_token: int = -1
) -> list[int]:
    """The n tokens that follow `ids`; fewer where end_token comes.

    source: a model directory, a Trainer without steps in flight, or a Decoder. temperature 0 takes
    the most likely token. Else tokens are drawn from softmax(logits / temperature) with `seed`."""
    decoder = source if isinstance(source, Decoder) else Decoder(source)
    decoder.reset()
    rng, out = np.random.default_rng(seed), []
    logits = decoder.feed(ids)
    while len(out) < n:
        if temperature > 0:
            # Gumbel noise: the largest sum is a draw from the softmax
            noise = -np.log(-np.log(rng.random(logits.shape)))
            token = int(np.argmax(logits / temperature + noise))
        else:
            token = int(np.argmax(logits))
        if token == end_token:
            break
        out.append(token)
        if len(out) < n:
            logits = decoder.feed([token])
    return out

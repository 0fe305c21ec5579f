"""Text from a trained model: a plain forward pass with a key/value cache, in numpy and fp32.

It shows what a small model has learned. The training uses none of this code. tests/test_generate.py
compares its logits with those of transformers.
"""

from pathlib import Path

import numpy as np

from .model import ModelConfig, TensorFile

ROPE_LINEAR, ROPE_LLAMA3 = 1, 2


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
        self.inv_freq = inverse_frequencies(c)
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        c = self.config
        self._keys = [
            np.empty((c.n_kv_heads, 0, c.head_dim), np.float32) for _ in range(c.n_layers)
        ]
        self._values = [
            np.empty((c.n_kv_heads, 0, c.head_dim), np.float32) for _ in range(c.n_layers)
        ]

    def feed(self, ids) -> np.ndarray:
        """Read tokens, and return the logits after the last one. ValueError: no token, or an id
        past the vocabulary."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        if ids.size == 0 or ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise ValueError(
                f"give at least one token id, each from 0 to {self.config.vocab_size - 1}"
            )
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.config.n_layers):
            x = self._block(layer, x)
        return self.head @ self._norm(x[-1], "model.norm.weight")

    def _norm(self, x, name):
        rms = np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.config.norm_eps))
        return x / rms * self.weights[name]

    def _block(self, layer, x):
        prefix = f"model.layers.{layer}."
        h = x + self._attention(
            layer, prefix + "self_attn.", self._norm(x, prefix + "input_layernorm.weight")
        )
        n = self._norm(h, prefix + "post_attention_layernorm.weight")
        gate, up = (
            n @ self.weights[prefix + "mlp.gate_proj.weight"].T,
            n @ self.weights[prefix + "mlp.up_proj.weight"].T,
        )
        return (
            h + (gate / (1 + np.exp(-gate)) * up) @ self.weights[prefix + "mlp.down_proj.weight"].T
        )

    def _heads(self, x, prefix, which, n_heads):
        """x [T, D] through a projection, as [n_heads, T, head_dim]."""
        y = x @ self.weights[f"{prefix}{which}_proj.weight"].T
        if self.config.qkv_bias:
            y = y + self.weights[f"{prefix}{which}_proj.bias"]
        y = y.reshape(len(x), n_heads, self.config.head_dim)
        if self.config.qk_norm and which != "v":
            y = self._norm(y, f"{prefix}{which}_norm.weight")
        return y.transpose(1, 0, 2)

    def _attention(self, layer, prefix, x):
        c, past, n = self.config, self._keys[layer].shape[1], len(x)
        angle = np.arange(past, past + n)[:, None] * self.inv_freq
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        q = rotate(self._heads(x, prefix, "q", c.n_heads), cos, sin)
        k = rotate(self._heads(x, prefix, "k", c.n_kv_heads), cos, sin)
        self._keys[layer] = k = np.concatenate([self._keys[layer], k], 1)
        self._values[layer] = v = np.concatenate(
            [self._values[layer], self._heads(x, prefix, "v", c.n_kv_heads)], 1
        )
        group = c.n_heads // c.n_kv_heads
        scores = q @ np.repeat(k, group, 0).transpose(0, 2, 1) / np.float32(np.sqrt(c.head_dim))
        scores[:, np.arange(past + n)[None, :] > np.arange(past, past + n)[:, None]] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = (p / p.sum(-1, keepdims=True)) @ np.repeat(v, group, 0)
        return out.transpose(1, 0, 2).reshape(n, -1) @ self.weights[prefix + "o_proj.weight"].T


def _open(source):
    """The configuration of a model directory or a Trainer, and the function that reads its
    tensors."""
    if isinstance(source, (str, Path)):
        return ModelConfig.read(source), TensorFile(source).read
    return source.plan.model, source.read


def inverse_frequencies(c: ModelConfig) -> np.ndarray:
    """RoPE's frequencies, float64 [head_dim / 2], as ps_rope_scaling of include/penstock/model.h
    defines them."""
    freq = c.rope.theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
    if c.rope.kind == ROPE_LINEAR:
        return freq / c.rope.factor
    if c.rope.kind == ROPE_LLAMA3:
        turns = c.rope.original_positions * freq / (2 * np.pi)  # over the original context
        kept = np.clip(
            (turns - c.rope.low_freq_factor) / (c.rope.high_freq_factor - c.rope.low_freq_factor),
            0,
            1,
        )
        return freq * (kept + (1 - kept) / c.rope.factor)
    return freq


def rotate(x, cos, sin):
    """RoPE on x [heads, T, head_dim], the two halves of head_dim as pairs; cos and sin [T, head_dim
    / 2]."""
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


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

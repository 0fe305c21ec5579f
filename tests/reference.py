"""The oracle of test_parity.py: a transformer, its loss and its training in plain PyTorch, in fp64
by default. Nothing of Penstock is imported; what a model is comes from its config.json and
safetensors files.

Beside each gradient the oracle gives the SPREAD of its terms: a gradient is a sum over tokens, g =
sum_t a_t, and its spread is sqrt(sum_t |a_t|^2), the size that g would have if the terms were
independent. Where they cancel, g is far smaller than its spread, and rounding errors, which belong
to the terms, are to be measured against the spread.
"""

import json
import math
import pathlib

import numpy as np
import safetensors.torch
import torch


def read_directory(directory, dtype=torch.float64):
    """(config, {name: tensor}) of a Hugging Face directory, whatever its shards."""
    directory = pathlib.Path(directory)
    weights = {}
    for path in sorted(directory.glob("*.safetensors")):
        weights.update(safetensors.torch.load_file(path))
    return json.loads((directory / "config.json").read_text()), {
        k: v.to(dtype) for k, v in weights.items()
    }


def shapes(cfg):
    """{name: shape} of every parameter tensor of a config, tied ones once."""
    d, f, v = cfg["hidden_size"], cfg["intermediate_size"], cfg["vocab_size"]
    hd = cfg.get("head_dim") or d // cfg["num_attention_heads"]
    q, kv = cfg["num_attention_heads"] * hd, cfg["num_key_value_heads"] * hd
    out = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    for i in range(cfg["num_hidden_layers"]):
        p = f"model.layers.{i}."
        out[p + "input_layernorm.weight"] = out[p + "post_attention_layernorm.weight"] = (d,)
        for n, rows in (("q", q), ("k", kv), ("v", kv)):
            out[f"{p}self_attn.{n}_proj.weight"] = (rows, d)
            if cfg["model_type"] == "qwen2":
                out[f"{p}self_attn.{n}_proj.bias"] = (rows,)
        if cfg["model_type"] == "qwen3":
            out[p + "self_attn.q_norm.weight"] = out[p + "self_attn.k_norm.weight"] = (hd,)
        out[p + "self_attn.o_proj.weight"] = (d, q)
        out[p + "mlp.gate_proj.weight"] = out[p + "mlp.up_proj.weight"] = (f, d)
        out[p + "mlp.down_proj.weight"] = (d, f)
    if not cfg["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    return out


def random_weights(cfg, seed):
    """fp32 weights that use every part: products of unit size, so that attention is far from
    uniform, norm weights unlike each other, biases not zero."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in sorted(shapes(cfg).items()):
        x = torch.randn(shape, generator=g)
        if name.endswith("norm.weight"):
            x = 1 + 0.2 * x
        elif name.endswith(".bias"):
            x = 0.3 * x
        elif name == "model.embed_tokens.weight":
            x = 0.1 * x  # with tied embeddings also the head: logits of unit size
        else:
            x = x / math.sqrt(shape[1])
        out[name] = x
    return out


def write_directory(directory, cfg, weights):
    directory = pathlib.Path(directory)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(cfg))
    safetensors.torch.save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def inverse_frequencies(cfg):
    hd = cfg.get("head_dim") or cfg["hidden_size"] // cfg["num_attention_heads"]
    freq = [cfg["rope_theta"] ** (-2 * i / hd) for i in range(hd // 2)]
    scaling = cfg.get("rope_scaling")
    if scaling is None:
        return freq
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return [f / factor for f in freq]
    assert scaling["rope_type"] == "llama3"
    low, high, original = (
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )
    out = []
    for f in freq:
        turns = original * f / (2 * math.pi)  # of this pair within the original context
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        out.append((1 - smooth) * f / factor + smooth * f)
    return out


class Reference:
    """Loss and gradients of a batch of sequences: tokens and targets [n, S], target -1 not
    counted."""

    def __init__(
        self, cfg, weights, document_token=None, document_end_token=None, dtype=torch.float64
    ):
        self.cfg, self.dtype = cfg, dtype
        self.document_token, self.document_end_token = document_token, document_end_token
        self.w = {k: v.detach().to(dtype, copy=True).requires_grad_() for k, v in weights.items()}
        self.z_loss = self.label_smoothing = 0.0
        # (parameter, rows of its input or None, output): the spread is made of them
        self.terms = []

    def documents(self, tokens):
        """Which document each position belongs to, and its position there."""
        begins = torch.zeros_like(tokens, dtype=torch.bool)
        begins[:, 0] = True
        if self.document_end_token is not None:
            begins[:, 1:] |= tokens[:, :-1] == self.document_end_token
        if self.document_token is not None:
            begins |= tokens == self.document_token
        document = begins.long().cumsum(1)
        index = torch.arange(tokens.shape[1]).expand_as(tokens)
        start = torch.where(begins, index, torch.zeros_like(index)).cummax(1).values
        return document, index - start

    def note(self, name, rows, out):
        if out.requires_grad:
            out.retain_grad()
            self.terms.append((name, rows, out))
        return out

    def norm(self, x, name):
        unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.cfg["rms_norm_eps"])
        return self.note(name, unit.detach(), unit * self.w[name])

    def linear(self, x, name):
        y = self.note(name + ".weight", x.detach(), x @ self.w[name + ".weight"].T)
        if name + ".bias" in self.w:
            y = self.note(name + ".bias", None, y + self.w[name + ".bias"])
        return y

    def attention(self, x, p, cos, sin, allowed):
        n, s, _ = x.shape
        heads, kv_heads = self.cfg["num_attention_heads"], self.cfg["num_key_value_heads"]
        q, k, v = (
            self.linear(x, f"{p}{c}_proj").view(n, s, h, -1)
            for c, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if p + "q_norm.weight" in self.w:
            q, k = self.norm(q, p + "q_norm.weight"), self.norm(k, p + "k_norm.weight")

        def turn(a):
            first, second = a.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        q, k = turn(q), turn(k)
        k, v = (a.repeat_interleave(heads // kv_heads, dim=2) for a in (k, v))
        scores = torch.einsum("nihd,njhd->nhij", q, k) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~allowed[:, None], -math.inf).softmax(-1)
        return self.linear(
            torch.einsum("nhij,njhd->nihd", weights, v).reshape(n, s, -1), p + "o_proj"
        )

    def loss(self, tokens, targets):
        self.terms = []
        tokens, targets = (torch.as_tensor(np.asarray(a)).long() for a in (tokens, targets))
        document, position = self.documents(tokens)
        s = tokens.shape[1]
        allowed = (document[:, :, None] == document[:, None, :]) & torch.ones(
            s, s, dtype=torch.bool
        ).tril()
        angle = position[..., None].to(self.dtype) * torch.tensor(
            inverse_frequencies(self.cfg), dtype=self.dtype
        )
        cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
        x = self.note(
            "model.embed_tokens.weight", None, self.w["model.embed_tokens.weight"][tokens]
        )
        for i in range(self.cfg["num_hidden_layers"]):
            p = f"model.layers.{i}."
            x = x + self.attention(
                self.norm(x, p + "input_layernorm.weight"), p + "self_attn.", cos, sin, allowed
            )
            y = self.norm(x, p + "post_attention_layernorm.weight")
            gate, up = self.linear(y, p + "mlp.gate_proj"), self.linear(y, p + "mlp.up_proj")
            x = x + self.linear(gate * torch.sigmoid(gate) * up, p + "mlp.down_proj")
        x = self.norm(x, "model.norm.weight")
        head = "model.embed_tokens" if self.cfg["tie_word_embeddings"] else "lm_head"
        logits = self.linear(x, head)
        picked = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        valid = targets >= 0
        lse = logits.logsumexp(-1)
        self.cross_entropy = (((lse - picked) * valid).sum() / valid.sum()).item()
        picked = (1 - self.label_smoothing) * picked + self.label_smoothing * logits.mean(-1)
        return ((lse - picked + self.z_loss * lse**2) * valid).sum() / valid.sum()

    def gradients(self, tokens, targets):
        """(loss, {name: gradient}, {name: spread})"""
        for w in self.w.values():
            w.grad = None
        loss = self.loss(tokens, targets)
        loss.backward()
        spread = dict.fromkeys(self.w, 0.0)
        for name, rows, out in self.terms:
            if name.endswith("norm.weight"):
                square = (out.grad * rows).square().sum()
            elif rows is None:
                square = out.grad.square().sum()
            else:
                square = (out.grad.square().sum(-1) * rows.square().sum(-1)).sum()
            spread[name] += square.item()
        self.terms = []
        return (
            loss.item(),
            {k: w.grad.clone() for k, w in self.w.items()},
            {k: math.sqrt(v) for k, v in spread.items()},
        )

    def train(self, batch, steps, lr_at, clip_norm, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8):
        """AdamW with clipping for so many steps: [(loss, gradient norm before clipping, learning
        rate)]."""
        decayed = [w for w in self.w.values() if w.dim() == 2]
        others = [w for w in self.w.values() if w.dim() == 1]
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, betas=betas, eps=eps)
        figures = []
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step)
            optimizer.zero_grad()
            loss = self.loss(*batch(step))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.w.values(), clip_norm)
            optimizer.step()
            figures.append((loss.item(), norm.item(), lr_at(step)))
        self.terms = []
        return figures

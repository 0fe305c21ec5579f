"""The oracle of test_fp8.py: a Llama's loss and gradients in plain PyTorch, with products of FP8
operands as docs/design/fp8.md says. Casts are torch's, sums are in fp64. Nothing of Penstock is
imported.

A tensor that Penstock stores is rounded to bf16 where it is made, and so is its gradient: a value
beside the boundary of two FP8 numbers then goes the same way here and there.
"""

import math

import torch
from reference import inverse_frequencies

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def quantized(x, dtype, wrong=1.0, amax=None):
    """@x as numbers of @dtype times one power of two: the least with which nothing up to @amax, or
    the largest of @x, saturates. @wrong: a factor of that scale, for a broken oracle."""
    amax = x.abs().max().item() if amax is None else amax
    if amax == 0:
        return x
    fraction, exponent = math.frexp(amax / LARGEST[dtype])
    scale = wrong * 2.0 ** (exponent - (fraction == 0.5))
    clamped = (x / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return clamped.float().to(dtype).double() * scale


class Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().double()

    @staticmethod
    def backward(ctx, g):
        return g.bfloat16().double()


stored = Stored.apply


class Fp8Product(torch.autograd.Function):
    flushed = []  # of each product's X: the part that became 0 and is not

    @staticmethod
    def forward(ctx, x, w, wrong, bound=None):
        before = x
        x, w = (quantized(t, torch.float8_e4m3fn, wrong) for t in (x, w))
        Fp8Product.flushed.append(((x == 0) & (before != 0)).double().mean().item())
        ctx.save_for_backward(x, w)
        ctx.wrong, ctx.bound = wrong, bound
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        g = quantized(g, torch.float8_e5m2, ctx.wrong, ctx.bound)
        return g @ w, g.T @ x, None, None


class Fp8Llama:
    """@fp8: the blocks whose products have FP8 operands; @first, @down: those of their first halves
    and their down projections too; @head: the head's. Products of weights with adapters, in
    PEFT's names, have these beside them: @lora_scale is theirs."""

    offset = 0.0  # of norms' weights

    def __init__(
        self, cfg, weights, fp8=(), first=True, down=True, head=False, wrong=1.0, lora_scale=0.0
    ):
        self.cfg, self.fp8, self.first, self.down = cfg, fp8, first, down
        self.head, self.wrong, self.lora_scale = head, wrong, lora_scale
        self.w = {k: v.detach().bfloat16().double().requires_grad_() for k, v in weights.items()}

    def norm(self, x, name, eps=None):
        eps = eps or self.cfg["rms_norm_eps"]
        unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return stored(unit * (self.w[name] + self.offset))

    def product(self, x, names, fp8, residual=0):
        w = torch.cat([self.w[name] for name in names])
        y = Fp8Product.apply(x, w, self.wrong) if fp8 else x @ w.T
        return self.adapted(residual + y, x, names)

    def adapted(self, y, x, names):
        """The columns of @y that have an adapter, with its product: x and y as they are stored."""
        parts = []
        for part, name in zip(y.split([len(self.w[name]) for name in names], -1), names):
            a, b = (self.w.get(name.replace("weight", f"lora_{c}.weight")) for c in "AB")
            if a is not None:
                part = stored(stored(part) + self.lora_scale * stored(x @ a.T) @ b.T)
            parts.append(part)
        return torch.cat(parts, -1)

    @staticmethod
    def scores(q, k, v):
        n, s, _, hd = q.shape
        scores = torch.einsum("nihd,njhd->nhij", q, k) / math.sqrt(hd)
        mask = torch.ones(s, s, dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        return stored(torch.einsum("nhij,njhd->nihd", weights, v).reshape(n * s, -1))

    def attention(self, qkv, n, s, cos, sin):
        heads, kv_heads = self.cfg["num_attention_heads"], self.cfg["num_key_value_heads"]
        hd = self.cfg["head_dim"]
        q, k, v = qkv.view(n, s, -1, hd).split([heads, kv_heads, kv_heads], 2)

        def turn(a):
            first, second = a.chunk(2, -1)
            return stored(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))

        q, k = turn(q), turn(k)
        k, v = (a.repeat_interleave(heads // kv_heads, 2) for a in (k, v))
        return self.scores(q, k, v)

    def first_half(self, y, p, fp8, n, s, cos, sin, residual):
        names = [f"{p}self_attn.{c}_proj.weight" for c in "qkv"]
        o = self.attention(stored(self.product(y, names, fp8)), n, s, cos, sin)
        return self.product(o, [p + "self_attn.o_proj.weight"], fp8, residual)

    def block(self, x, i, n, s, cos, sin):
        p, fp8 = f"model.layers.{i}.", i in self.fp8
        y = self.norm(x, p + "input_layernorm.weight")
        h = stored(self.first_half(y, p, fp8 and self.first, n, s, cos, sin, x))
        y = self.norm(h, p + "post_attention_layernorm.weight")
        return stored(self.second_half(y, p + "mlp.", fp8, h))

    def second_half(self, y, p, fp8, residual=0):
        gate_up = stored(self.product(y, [f"{p}{c}_proj.weight" for c in ("gate", "up")], fp8))
        gate, up = gate_up.chunk(2, -1)
        y = stored(torch.nn.functional.silu(gate) * up)
        return self.product(y, [p + "down_proj.weight"], fp8 and self.down, residual)

    def chunk_loss(self, tokens, targets, n_valid):
        """The chunk's part of the loss: its rows are quantized together."""
        n, s = tokens.shape
        angle = torch.arange(s).double()[:, None] * torch.tensor(inverse_frequencies(self.cfg))
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        x = stored(self.w["model.embed_tokens.weight"][tokens.flatten()])
        for i in range(self.cfg["num_hidden_layers"]):
            x = self.block(x, i, n, s, cos, sin)
        x, w = self.norm(x, "model.norm.weight"), self.w["lm_head.weight"]
        # no gradient of a logit is larger than that of a token whose probability is 0
        bound = float(torch.tensor(1.0 / int(n_valid)).float())
        logits = stored(Fp8Product.apply(x, w, self.wrong, bound) if self.head else x @ w.T)
        return torch.nn.functional.cross_entropy(
            logits, targets.flatten(), ignore_index=-1, reduction="sum"
        ) / int(n_valid)

    def gradients(self, tokens, targets, a_chunk):
        """(loss, {name: gradient}) of a batch whose chunks are @a_chunk sequences."""
        tokens, targets = (torch.as_tensor(t).long() for t in (tokens, targets))
        loss = 0.0
        for w in self.w.values():
            w.grad = None
        for i in range(0, len(tokens), a_chunk):
            part = self.chunk_loss(
                tokens[i : i + a_chunk], targets[i : i + a_chunk], (targets >= 0).sum()
            )
            part.backward()
            loss += part.item()
        return loss, {k: w.grad.clone() for k, w in self.w.items() if w.grad is not None}


class Fp8DeltaNet(Fp8Llama):
    """Qwen3.5, or Qwen3-Next without experts, of delta-nets alone. Their product of b and a never
    has FP8 operands."""

    offset = 1.0

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.nk, self.nv, self.dk, self.dv = (
            self.cfg["linear_" + key]
            for key in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        )

    def inputs(self, y, p, fp8):
        """q, k and v in one tensor, z, b and a: [T, columns]"""
        share = self.nv // self.nk
        if p + "in_proj_qkv.weight" in self.w:
            u, z = (stored(self.product(y, [p + f"in_proj_{c}.weight"], fp8)) for c in ("qkv", "z"))
            ba = self.product(y, [p + f"in_proj_{c}.weight" for c in "ba"], False)
            return u, z, *stored(ba).chunk(2, -1)
        by_head = [self.dk, self.dk, share * self.dv, share * self.dv]
        qkvz = stored(self.product(y, [p + "in_proj_qkvz.weight"], fp8))
        qkvz = qkvz.view(len(y), self.nk, -1).split(by_head, -1)
        ba = stored(self.product(y, [p + "in_proj_ba.weight"], False)).view(len(y), self.nk, -1)
        q, k, v, z, b, a = (x.flatten(1) for x in (*qkvz, *ba.chunk(2, -1)))
        return torch.cat([q, k, v], -1), z, b, a

    def rule(self, qkv, b, a, p, n, s):
        nk, nv, dk, dv = self.nk, self.nv, self.dk, self.dv
        q, k, v = qkv.view(n, s, -1).split([nk * dk, nk * dk, nv * dv], -1)
        q, k = (x.reshape(n, s, nk, dk) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(nv // nk, 2) for x in (q * dk**-0.5, k))
        v, beta = v.reshape(n, s, nv, dv), torch.sigmoid(b).view(n, s, nv)
        soft = torch.nn.functional.softplus(a + self.w[p + "dt_bias"])
        decay = torch.exp(-torch.exp(self.w[p + "A_log"]) * soft).view(n, s, nv, 1, 1)
        state, out = torch.zeros(n, nv, dk, dv).double(), []
        for t in range(s):
            state = state * decay[:, t]
            d = beta[:, t, :, None] * (v[:, t] - torch.einsum("nhkv,nhk->nhv", state, k[:, t]))
            state = state + torch.einsum("nhk,nhv->nhkv", k[:, t], d)
            out.append(torch.einsum("nhkv,nhk->nhv", state, q[:, t]))
        return stored(torch.stack(out, 1))

    def first_half(self, y, p, fp8, n, s, _cos, _sin, residual):
        p += "linear_attn."
        u, z, b, a = self.inputs(y, p, fp8)
        w = self.w[p + "conv1d.weight"]
        rows = torch.nn.functional.pad(u.view(n, s, -1).mT, (w.shape[-1] - 1, 0))
        qkv = torch.nn.functional.conv1d(rows, w, groups=len(w)).mT
        o = self.rule(stored(torch.nn.functional.silu(qkv)), b, a, p, n, s)
        unit = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + self.cfg["rms_norm_eps"])
        g = unit * self.w[p + "norm.weight"] * torch.nn.functional.silu(z.view(o.shape))
        g = stored(g).reshape(n * s, -1)
        return self.product(g, [p + "out_proj.weight"], fp8, residual)


class Fp8Latent(Fp8Llama):
    """DeepSeek-V3 with RoPE that is not scaled, whose pairs are apart. Tokens go to all experts."""

    def second_half(self, y, p, fp8, residual=0):
        if p + "gate.weight" not in self.w:
            return super().second_half(y, p, fp8, residual)
        of = torch.sigmoid(y @ self.w[p + "gate.weight"].T)
        of = of / of.sum(-1, keepdim=True) * self.cfg["routed_scaling_factor"]
        routed = [
            of[:, e, None] * super(Fp8Latent, self).second_half(y, f"{p}experts.{e}.", False)
            for e in range(of.shape[1])
        ]
        return residual + sum(routed) + super().second_half(y, p + "shared_experts.", False)

    def first_half(self, y, p, fp8, n, s, _cos, _sin, residual):
        p, heads, rank = p + "self_attn.", self.cfg["num_attention_heads"], self.cfg["kv_lora_rank"]
        dn, dr, dv = (
            self.cfg[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        at = torch.arange(s).double()[:, None]
        angle = at * self.cfg["rope_theta"] ** (-torch.arange(0, dr, 2).double() / dr)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]

        def turn(x):
            first, second = x.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        def norm(x, name):
            return self.norm(x, p + name, 1e-6)

        if self.cfg["q_lora_rank"]:
            latent = stored(self.product(y, [p + "q_a_proj.weight"], fp8))
            latent = norm(latent, "q_a_layernorm.weight")
            q = self.product(latent, [p + "q_b_proj.weight"], fp8)
        else:
            q = self.product(y, [p + "q_proj.weight"], fp8)
        q_n, q_r = stored(q).view(n, s, heads, dn + dr).split([dn, dr], -1)
        kv_a = p + "kv_a_proj_with_mqa.weight"
        parts = (
            Fp8Product.apply(y, w, self.wrong) if fp8 else y @ w.T
            for w in self.w[kv_a].split([rank, dr])
        )
        c, k_r = stored(self.adapted(torch.cat(list(parts), -1), y, [kv_a])).split([rank, dr], -1)
        c = norm(c, "kv_a_layernorm.weight")
        kv = stored(self.product(c, [p + "kv_b_proj.weight"], fp8)).view(n, s, heads, dn + dv)
        k_r = turn(k_r.view(n, s, 1, dr)).expand(n, s, heads, dr)
        q, k = (stored(torch.cat(x, -1)) for x in ((q_n, turn(q_r)), (kv[..., :dn], k_r)))
        o = self.scores(q, k, kv[..., dn:])
        return self.product(o, [p + "o_proj.weight"], fp8, residual)

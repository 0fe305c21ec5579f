"""transformers' own model with experts, for bench/curve.py, and the router's term of its loss as
Penstock has it: the mean over blocks, of each micro-batch (docs/design/experts.md)."""

import torch
from torch.func import functional_call


def read(where):
    """The model of a directory on the CPU, in fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).train()


class Model:
    """Computes from token ids [n, S] the logits with @params, which maps the names of @model's
    parameters to tensors. @model keeps no weights."""

    def __init__(self, model, params):
        device = next(iter(params.values())).device
        self.state = params | {n: b.to(device) for n, b in model.named_buffers()}
        self.model, config = model.to("meta"), model.config
        self.aux_loss, self.n_used = config.router_aux_loss_coef, config.num_experts_per_tok
        self.counts, self.logits = {}, ()

    def __call__(self, tokens):
        how = {"use_cache": False, "output_router_logits": True}
        out = functional_call(self.model, self.state, (tokens,), how)
        self.logits = [z.float() for z in out.router_logits]
        return out.logits

    def router_loss(self):
        """Of the last call's tokens, which are counted."""
        total = 0.0
        for layer, z in enumerate(self.logits):
            n_experts = z.shape[1]
            chosen = z.topk(self.n_used).indices.flatten()
            n = torch.bincount(chosen, minlength=n_experts)
            self.counts[layer] = self.counts.get(layer, 0) + n
            total = total + n_experts * (n / len(z) * z.softmax(1).mean(0)).sum()
        return self.aux_loss * total / len(self.logits)

    def load(self):
        """Tokens of an expert, the most over the mean of its block: the largest since the last
        call, as a tensor."""
        counts = torch.stack([*self.counts.values()]).double()
        self.counts = {}
        return (counts.amax(1) / counts.mean(1)).amax()

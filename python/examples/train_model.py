#!/usr/bin/env python3
"""Train a model directory from Python: plan, loop, read and change parameters, save.

    PYTHONPATH=python python python/examples/train_model.py MODEL_DIR SHARDS OUT [STEPS]

models/init_model.py makes MODEL_DIR, penstock data makes SHARDS.
"""

import sys

import numpy as np
from penstock import BudgetError, ModelConfig, Plan, Trainer

SEQ_LEN = 64


def main(model_dir: str, shards: str, out: str, steps: str = "8") -> list[float]:
    model = ModelConfig.read(model_dir)
    print(
        f"{model.architecture} with {model.n_elements:,} parameters in {len(model.params())} "
        "tensors"
    )

    smallest, _ = Plan.smallest(model, seq_len=SEQ_LEN)
    roomy = Plan(model, seq_len=SEQ_LEN)
    # halfway between the smallest plan and a plan without a cap
    cap = (smallest + roomy.report["device_used_bytes"]) // 2
    try:
        Plan(model, seq_len=SEQ_LEN, device_mem=smallest - 1)
    except BudgetError as refusal:
        print("one byte less than the smallest plan is refused:", refusal)
    plan = Plan(model, seq_len=SEQ_LEN, device_mem=cap)
    print(plan)

    losses = []
    with Trainer(
        model_dir,
        plan,
        shards,
        lr=1e-3,
        total_steps=int(steps),
        lr_schedule="cosine",
        warmup_steps=2,
        seed=1,
    ) as trainer:
        for m in trainer.steps(int(steps)):
            losses.append(m.loss)
            print(
                f"step {m.step}  loss {m.loss:.4f}  {m.tokens_per_s:,.0f} tok/s  predicted "
                f"{m.predicted_step_s:.3f} s, took {m.step_s:.3f} s"
            )
        name = "model.layers.0.self_attn.q_proj.weight"
        weights, gradient = trainer.read(name), trainer.grad(name)
        print(
            f"{name}: {weights.shape}, rms {np.sqrt((weights**2).mean()):.4f}, gradient rms "
            f"{np.sqrt((gradient**2).mean()):.2e}"
        )
        trainer.write(name, weights)  # any array of the same shape
        trainer.save(out)
    print("saved in", out)
    return losses


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])

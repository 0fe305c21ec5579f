"""Trains the cases of test_golden.py on the CPU backend: `golden_train.py FOLDER OPENBLAS`, cases as JSON on
stdin, {case: results} on stdout.

A program of its own, because the kernel that OpenBLAS picks for the CPU, which changes bits, can be
set before it is loaded only (OPENBLAS_CORETYPE). Weights and tokens come from integer arithmetic
alone, so that no library's generator or rounding has a part in them.
"""

import ctypes
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from penstock import Hardware, ModelConfig, Plan, Trainer
from safetensors.numpy import save_file

STEPS, END = 3, 0  # steps; the token that ends a document


def random_words(stream, n):
    """n 64-bit words of splitmix64, as tests/native/check.h."""
    x = np.arange(n, dtype=np.uint64) + np.uint64(stream << 32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def write_model(folder, config):
    """Matrices within 1/8 of 0, norms within 1/8 of 1, in multiples of 2^-18: exact in fp32."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model, tensors = ModelConfig.read(folder), {}
    for p in model.params():
        x = (random_words(p.index + 1, int(np.prod(p.shape))) >> np.uint64(48)).astype(
            np.float32
        ) / 2**18 - np.float32(0.125)
        tensors[p.name] = (x + (p.role == "norm")).astype(np.float32).reshape(p.shape)
    save_file(tensors, folder / "model.safetensors")
    return model


def batches(vocab, n_tokens):
    def batch(step):
        words = random_words(1000 + step, n_tokens + 1)
        tokens = (words >> np.uint64(33)).astype(np.int64) % vocab
        targets = np.where(words[:-1] % np.uint64(16) == 0, -1, tokens[1:])  # some do not count
        return tokens[:-1].astype(np.int32), targets.astype(np.int32)

    return batch


def sha256(arrays):
    h = hashlib.sha256()
    for name, array in arrays:
        h.update(f"{name} {array.shape} ".encode())
        h.update(np.ascontiguousarray(array, "<f4").tobytes())
    return h.hexdigest()


def train(folder, case):
    model = write_model(folder, case["config"])
    plan = Plan(
        model, hardware=Hardware.read(case["hardware"]), document_end_token=END, **case["ask"]
    )
    report = plan.report
    options = {
        "lr": 1e-2,
        "min_lr": 1e-3,
        "lr_schedule": "cosine",
        "total_steps": 4,
        "seed": 5,
    }
    with Trainer(
        folder, plan, batches(model.vocab_size, report["tokens_per_step"]), **options
    ) as trainer:
        steps = [
            {"loss": m.loss, "grad_norm": m.grad_norm, "valid_tokens": m.valid_tokens}
            for m in trainer.steps(STEPS)
        ]
        weights = [
            (p, trainer.read(p)) for p in sorted(trainer.params.values(), key=lambda p: p.name)
        ]
    blas = ctypes.CDLL(sys.argv[2])
    blas.scipy_openblas_get_config.restype = ctypes.c_char_p
    units = ["embedding", *(f"layer {i}" for i in range(model.n_layers)), "head"]
    shown = (
        "n_rounds",
        "n_chunks",
        "resident_param_units",
        "resident_grad_units",
        "resident_update_units",
        "units_kept",
        "saved_device_bytes",
        "saved_host_bytes",
        "saved_recompute_bytes",
    )
    return {
        "openblas": " ".join(blas.scipy_openblas_get_config().decode().split()[:2]),
        "plan": {name: report[name] for name in shown}
        | {"embed_on_host": plan.json()["embed_on_host"]},
        "steps": steps,
        "sha256": sha256((p.name, w) for p, w in weights),
        "sha256_of_units": {
            unit: sha256((p.name, w) for p, w in weights if p.unit == i)[:16]
            for i, unit in enumerate(units)
        },
    }


if __name__ == "__main__":
    json.dump(
        {
            name: train(Path(sys.argv[1]) / name, case)
            for name, case in json.load(sys.stdin).items()
        },
        sys.stdout,
    )

"""Plans for the GPUs that `penstock plan --gpu-model` knows, beside speeds that others published.

    python3 bench/described_gpus.py > bench/results/described-gpus.md

The shares of a GPU's peak in native/hardware/gpus.c are fitted to the rows that say "fitted"; those
that say "control" were not used. A published row is another program's: it recomputes more where
memory is short, and says little of its host. The plan has clipping and AdamW in every step, 131,072
tokens a step, and as much host memory as it takes.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 131072
QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6,
        "vocab_size": 152064, "rope_theta": 1e6, "max_position_embeddings": 32768,
        "tie_word_embeddings": False}  # fmt: skip
MODELS = {
    "8B": json.loads((ROOT / "models/8b.json").read_text()) | {"max_position_embeddings": 131072},
    "Qwen2.5-7B": QWEN | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                          "num_attention_heads": 28, "num_key_value_heads": 4},
    "Qwen2.5-14B": QWEN | {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
                           "num_attention_heads": 40, "num_key_value_heads": 8},
}  # fmt: skip
DATAFLOW = "dataflow, 2026-08"
MLDF = "ml_dataflow, 2025-09"
LLMQ = "llmq, 2026-05"
# GPU, model, tokens a sequence, recipe, device GiB, published tok/s, source, use
ROWS = [
    ("h100", "8B", 512, "bf16", 74, 13135, MLDF, "control"),
    ("h100", "8B", 4096, "bf16", 74, 12255, MLDF, "control"),
    ("h100", "8B", 8192, "bf16", 74, 11406, MLDF, "control"),
    ("h100", "8B", 32768, "bf16", 74, 7908, MLDF, "control"),
    ("h100", "Qwen2.5-7B", 1024, "bf16", 74, 13900, LLMQ, "control"),
    ("h100", "Qwen2.5-7B", 1024, "fp8", 74, 19200, LLMQ, "control"),
    ("h100", "Qwen2.5-14B", 1024, "fp8", 74, 9366, LLMQ, "control"),
    ("a100", "8B", 8192, "bf16", 74, 3260, MLDF, "fitted"),
    ("rtx3090", "8B", 8192, "bf16", 22, 1061, MLDF, "fitted"),
    ("rtx4090", "Qwen2.5-7B", 1024, "bf16", 22, 2780, LLMQ, "fitted"),
    ("rtx4090", "Qwen2.5-7B", 1024, "fp8", 22, 4330, LLMQ, "fitted"),
    ("rtx4090", "Qwen2.5-14B", 1024, "bf16", 22, 1350, LLMQ, "fitted"),
    ("rtx4090", "Qwen2.5-14B", 1024, "fp8", 22, 2000, LLMQ, "fitted"),
    ("rtx5090", "8B", 1024, "bf16", 30, 4141, DATAFLOW, "fitted"),
    ("rtx5090", "8B", 4096, "bf16", 30, 3513, DATAFLOW + ", of 3,464 to 3,563", "fitted"),
    ("rtx5090", "8B", 8192, "bf16", 30, 3175, MLDF, "fitted"),
]


def planned(binary: Path, row: tuple) -> float:
    """Tokens/s."""
    gpu, model, seq_len, recipe, device_gib = row[:5]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[model]))
        words = [binary, "plan", "--json", "--quiet", "--model", folder, "--gpu-model", gpu]
        words += ["--seq-len", seq_len, "--tokens-per-step", TOKENS, "--recipe", recipe]
        words += ["--device-mem", f"{device_gib}GiB", "--host-mem", "512GiB"]
        done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)["predicted_tokens_per_s"]


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--binary", type=Path, default=ROOT / "build/bin/penstock")
    a = p.parse_args()
    print("| GPU | model | sequence | recipe | GPU memory, GiB | planned, tok/s | published "
          "| ratio | source | use |\n|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for row in ROWS:
        gpu, model, seq_len, recipe, gib, published, source, use = row
        speed = planned(a.binary, row)
        print(f"| {gpu} | {model} | {seq_len:,} | {recipe} | {gib} | {speed:,.0f} | {published:,} "
              f"| {speed / published:.3f} | {source} | {use} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

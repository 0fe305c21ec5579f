"""Plans for the GPUs that `penstock plan --gpu-model` knows, beside speeds that others published.

    python3 bench/described_gpus.py && python3 bench/pages.py

The first writes planned_tokens_per_s into the rows of bench/results/published.jsonl that have a
`use`, the second the tables. The shares of a GPU's peak in native/hardware/gpus.c are fitted to the
rows whose use is "fitted"; those whose use is "control" were not used. A published row is another
program's: it recomputes more where memory is short, and says little of its host. The plan has
clipping and AdamW in every step, 131,072 tokens a step, and as much host memory as it takes.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "bench/results/published.jsonl"
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


def planned(binary: Path, row: dict) -> float:
    """Tokens/s."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[row["model"]]))
        words = [binary, "plan", "--json", "--quiet", "--model", folder, "--gpu-model", row["gpu"]]
        words += ["--seq-len", row["seq_len"], "--tokens-per-step", TOKENS]
        words += ["--recipe", row["recipe"], "--device-mem", f"{row['plan_device_gib']}GiB"]
        words += ["--host-mem", "512GiB"]
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
    rows = [json.loads(line) for line in PUBLISHED.read_text().splitlines()]
    for row in rows:
        if "use" in row:
            row["planned_tokens_per_s"] = round(planned(a.binary, row))
            print(f"{row['gpu']} {row['model']} {row['seq_len']} {row['recipe']}: planned "
                  f"{row['planned_tokens_per_s']:,}, published {row['tokens_per_s']:,} tokens/s",
                  flush=True)  # fmt: skip
    PUBLISHED.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()

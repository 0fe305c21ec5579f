"""Measures what packing gains over padding: useful tokens a second on chat-like lengths.

    PYTHONPATH=python python3 bench/packing.py [--config models/demo.json] [--seq-len 1024]
        [--tokens 4096] [--steps 4] [--backend cpu]

Documents have log-normal lengths (median 250 tokens, sigma 1), cut to one sequence, and random
tokens. They are written to shards twice: one document a row and padding, and packed by best fit. A
useful token is one that is no padding. Throughput is that of metrics.jsonl without the first
step."""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from penstock.packing import Packer
from penstock.shards import BEGINS_DOCUMENT, IS_TARGET, ShardWriter

ROOT = Path(__file__).resolve().parent.parent


class OneDocumentARow(Packer):
    def _keep(self, ids, flags):
        super()._keep(ids, flags)
        self._write()


def write(folder: Path, packer, lengths, vocab: int, seq_len: int) -> float:
    """The share of useful tokens."""
    rng = np.random.default_rng(1)
    shard_tokens = 2**31 - 1
    writer = ShardWriter(folder, "train", "penstock", vocab, shard_tokens, True, seq_len, 0)
    rows = packer(writer, seq_len, 0)
    for n in lengths:
        flags = np.full(n, IS_TARGET, np.uint8)
        flags[0] = BEGINS_DOCUMENT
        rows.append(rng.integers(1, vocab, n).astype(np.uint32), flags)
    rows.end()
    writer.close()
    return rows.n_tokens / writer.n_tokens


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--config", default=ROOT / "models/demo.json")
    ap.add_argument("--seq-len", type=int, default=1024)
    ap.add_argument("--tokens", type=int, default=4096, help="tokens a step")
    ap.add_argument("--steps", type=int, default=4)
    ap.add_argument("--backend", default="cpu")
    a = ap.parse_args()
    vocab = json.loads(Path(a.config).read_text())["vocab_size"]
    lengths = np.exp(np.random.default_rng(0).normal(np.log(250), 1, 4000)).astype(int)
    lengths = np.clip(lengths, 8, a.seq_len)
    with tempfile.TemporaryDirectory() as tmp:
        model = Path(tmp) / "model"
        model.mkdir()
        (model / "config.json").write_text(Path(a.config).read_text())
        for name, packer in (("padded", OneDocumentARow), ("packed", Packer)):
            share = write(Path(tmp) / name, packer, lengths, vocab, a.seq_len)
            run = Path(tmp) / f"run-{name}"
            words = ["train", "--model", model, "--data", Path(tmp) / name, "--init-weights"]
            words += ["--seq-len", a.seq_len, "--tokens-per-step", a.tokens, "--steps", a.steps]
            words += ["--backend", a.backend, "--shuffle", "--quiet", "--no-save", "--run-dir", run]
            subprocess.run([ROOT / "build/bin/penstock", *map(str, words)], check=True)
            steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            rate = np.median([s["tokens_per_s"] for s in steps[1:]])
            print(
                f"{name}: {share:.1%} of the tokens are useful, {rate:,.0f} tokens/s, "
                f"{share * rate:,.0f} useful tokens/s"
            )


if __name__ == "__main__":
    main()

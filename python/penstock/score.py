"""`penstock score` and `penstock embed`: what a model makes of texts.

penstock score --model DIR FILE...             prints the scores of each text
penstock embed --model DIR --out X.npy FILE... writes an array with a vector for each text

A classifier's or reward model's scores are those of a text's last token. An embedding is the mean of
the states after the final norm over a text's tokens, or the last token's. Texts are packed in rows;
each is a document of its own. A plan of the forward pass alone keeps both caps."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from . import hub
from ._lib import printed_warnings
from .chat import ChatTemplate
from .command import OK, Parser, put, run
from .conversation import is_conversation, read_conversation
from .documents import RECORD_READERS, _read_text, _text_of, find_sources, text_suffix
from .files import DataError
from .labels import NONE, NUMBERS, Labels
from .lora import Lora, scorer
from .model import ModelConfig
from .packing import best_fit
from .plan import Hardware, Plan
from .shards import BEGINS_DOCUMENT, ShardWriter
from .tokenizer import call, find_bos, load_tokenizer
from .train import Trainer


def encoded(tokenizer, folder: Path, files: list[str], field: str) -> Iterator[list[int]]:
    """The token ids of the texts in files: as `penstock data --problem` writes them."""
    bos, template = find_bos(tokenizer), None
    for source in find_sources(files):
        read = RECORD_READERS.get(text_suffix(source.path))
        if not read:
            lines = "".join(_read_text(source.path, lambda n: None)).splitlines()
            for line in lines:
                yield bos + list(call(tokenizer.encode, line, add_special_tokens=False).ids)
            continue
        for what, record in read(source.path, lambda n: None):
            if isinstance(record, DataError):
                raise record
            chat = isinstance(record, dict) and field not in record and is_conversation(record)
            if chat:
                template = template or ChatTemplate(folder)
                c = read_conversation(record, what)
                text = template.render(c.messages, c.tools, variables=c.variables)
            else:
                text = _text_of(record, field, what)
            ids = call(tokenizer.encode, text, add_special_tokens=False).ids
            yield ([] if chat else bos) + list(ids)


class Pass:
    """A forward pass over documents. on_state(document, position, is_last, values) gets what the head
    makes of each token."""

    def __init__(self, folder: Path, model: ModelConfig, documents: list[list[int]], seq_len: int):
        self.folder, self.model, self.seq_len = folder, model, seq_len
        self.documents = [d[:seq_len] for d in documents]
        self.rows = best_fit([len(d) for d in self.documents], seq_len)
        n = len(self.rows) * seq_len
        self.document, self.position = np.full(n, NONE, np.int64), np.zeros(n, np.int64)
        self.tokens, self.flags = np.zeros(n, np.uint32), np.zeros(n, np.uint8)
        for row, members in enumerate(self.rows):
            at = row * seq_len
            for i in members:
                end = at + len(self.documents[i])
                self.document[at:end], self.position[at:end] = i, np.arange(end - at)
                self.tokens[at:end] = self.documents[i]
                self.flags[at] = BEGINS_DOCUMENT
                at = end
            if at % seq_len:
                self.flags[at] = BEGINS_DOCUMENT

    def _write(self, where: str) -> None:
        """Shards with labels, whose values do not matter."""
        problem = {v: k for k, v in NUMBERS.items()}.get(self.model.problem)
        labels = Labels(problem) if problem else None
        writer = ShardWriter(
            Path(where),
            "texts",
            "penstock",
            self.model.vocab_size,
            len(self.tokens) + 2,
            True,
            row_tokens=self.seq_len,
            labels=labels,
        )
        targets = np.full(len(self.tokens), NONE, np.int32)
        writer.append(self.tokens, self.flags, targets)
        writer.close()

    def run(self, on_state: Callable, adapter=None, **options) -> None:
        size = 0

        def on_logits(step: int, token: int, values: np.ndarray) -> None:
            at = step * size + token
            if at < len(self.document) and self.document[at] >= 0:
                i, k = self.document[at], self.position[at]
                on_state(i, k, k == len(self.documents[i]) - 1, values)

        plan = Plan(
            self.model,
            seq_len=self.seq_len,
            tokens_per_step=min(8, len(self.rows)) * self.seq_len,
            forward_only=True,
            lora=Lora.read(adapter) if adapter else None,
            on_logits=on_logits,
            **options,
        )
        size = plan.report["tokens_per_step"]
        with tempfile.TemporaryDirectory() as where:
            self._write(where)
            with Trainer(self.folder, plan, data=where, lr=0.0, adapter=adapter) as trainer:
                for _ in trainer.steps(-(-len(self.tokens) // size)):
                    pass


def scores(folder, documents: list[list[int]], seq_len: int, adapter=None, **options) -> np.ndarray:
    """[documents, labels] fp32."""
    model = scorer(Path(folder), adapter)
    out = np.full((len(documents), model.n_labels), np.nan, np.float32)

    def on_state(i: int, _position: int, last: bool, values: np.ndarray) -> None:
        if last:
            out[i] = values

    Pass(Path(folder), model, documents, seq_len).run(on_state, adapter, **options)
    return out


def embeddings(
    folder,
    documents: list[list[int]],
    seq_len: int,
    pool: str = "mean",
    normalize: bool = False,
    adapter=None,
    **options,
) -> np.ndarray:
    """[documents, dim] fp32. pool: "mean" or "last". normalize: to a length of 1."""
    model = ModelConfig.read(folder).score("embedding")
    out = np.zeros((len(documents), model.dim))

    def on_state(i: int, _position: int, last: bool, values: np.ndarray) -> None:
        if pool == "mean":
            out[i] += values
        elif last:
            out[i] = values

    Pass(Path(folder), model, documents, seq_len).run(on_state, adapter, **options)
    if pool == "mean":
        out /= np.array([[min(len(d), seq_len)] for d in documents])
    if normalize:
        out /= np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-12)
    return out.astype(np.float32)


# ---- command line --------------------------------------------------------------------------------


def _parser(name: str) -> Parser:
    what = "Print the scores" if name == "score" else "Write embeddings"
    p = Parser(prog=f"penstock {name}", description=f"{what} of texts, a line or a record each.")
    p.add_argument("files", nargs="+", metavar="FILE", help="text, a text a line; or records")
    p.add_argument("--model", required=True, metavar="DIR", help="the model's directory")
    p.add_argument("--adapter", metavar="DIR", help="a LoRA adapter of the model")
    if name == "embed":
        p.add_argument("--out", required=True, metavar="FILE", help=".npy file for the array")
        p.add_argument("--pool", choices=("mean", "last"), default="mean", help="default: mean")
        p.add_argument("--normalize", action="store_true", help="to vectors of length 1")
    p.add_argument("--field", default="text", help="field of a record with the text")
    p.count("--seq-len", 2, 2**30, "tokens of a text, of which more are cut (default: the longest)")
    p.add_argument("--recipe", choices=("fp32", "bf16"), default="bf16", help="default: bf16")
    p.backend("auto")
    p.caps()
    p.add_argument("--quiet", action="store_true", help="print no notes")
    return p


def _read(args, note: Callable[[str], None]) -> tuple[Path, list[list[int]], int]:
    needs = [hub.CONFIG, hub.WEIGHTS, hub.TOKENIZER]
    folder = Path(hub.find("--model", args.model, needs, args.quiet))
    model = ModelConfig.read(folder)
    tokenizer = load_tokenizer(folder)
    documents = list(encoded(tokenizer, folder, args.files, args.field))
    empty = [i for i, d in enumerate(documents, 1) if not d]
    if not documents or empty:
        raise DataError(f"text {empty[0]} is empty" if empty else "there is no text")
    longest = max(map(len, documents))
    seq_len = args.seq_len or max(2, min(longest, model.max_positions or longest))
    n = sum(len(d) > seq_len for d in documents)
    if n:
        note(f"{n:,} of {len(documents):,} texts are longer than {seq_len} tokens and are cut")
    return folder, documents, seq_len


def _run(name: str, args) -> int:
    def note(text: str) -> None:
        if not args.quiet:
            print(f"penstock {name}: {text}", file=sys.stderr)

    folder, documents, seq_len = _read(args, note)
    options = {
        "recipe": args.recipe,
        "device_mem": args.device_mem,
        "host_mem": args.host_mem,
        "hardware": Hardware.cached(host_mem=args.host_mem, backend=args.backend),
    }
    if name == "score":
        for row in scores(folder, documents, seq_len, args.adapter, **options):
            put("\t".join(f"{x:.6g}" for x in row))
        return OK
    found = embeddings(
        folder, documents, seq_len, args.pool, args.normalize, args.adapter, **options
    )
    part = f"{args.out}.part"
    with open(part, "wb") as f:
        np.save(f, found)
    os.replace(part, args.out)
    note(f"{args.out}: {found.shape[0]:,} vectors of {found.shape[1]:,} numbers, fp32")
    return OK


def main(argv: list[str] | None = None, name: str = "score") -> int:
    args = _parser(name).parse_args(argv)
    with printed_warnings(f"penstock {name}", args.quiet):
        return run(f"penstock {name}", lambda: _run(name, args))

"""The tokenizer in a GGUF file as the files of a Hugging Face directory: tokenizer.json,
tokenizer_config.json, chat templates. The other way is penstock.export_gguf's."""

from __future__ import annotations

import json
import re
from pathlib import Path

from .chat import MORE_TEMPLATES
from .export_gguf import CUTS
from .files import DataError, rust_failure
from .gguf_file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
# Other names of llama.cpp for cuts that export_gguf has.
ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "olmo": "gpt-2",
    "refact": "smollm",
    "deepseek-r1-qwen": "qwen2",
    "glm4": "dbrx",
    "chatglm-bpe": "dbrx",
    "hunyuan-dense": "deepseek-v3",
    "exaone4": "gpt-2",
}
ADDS_BOS = ("llama-bpe", "tekken")  # where no key says, as llama.cpp has it
NFC = ("qwen2",)  # the models that llama.cpp names so compose characters first
_LEFT_OUT = (  # what changes a text before it is cut, and is not rebuilt
    "precompiled_charsmap",
    "remove_extra_whitespaces",
    "escape_whitespaces",
)


class Tokenizer:
    """Of the file's keys. write() puts its files into a directory."""

    def __init__(self, file: GgufFile, vocab_size: int):
        self.path, self.keys = file.path, file.keys
        self.vocab_size = vocab_size
        self.kind = self._key("model", str)
        if self.kind not in ("gpt2", "llama", "gemma4"):
            raise self._refused(
                f"of type {self.kind[:40]!r}: only BPE (gpt2, llama, gemma4) is rebuilt"
            )
        self.tokens = self._list("tokens", str)
        self.types = self._list("token_type", int, [NORMAL] * len(self.tokens))
        n = len(self.tokens)
        if len(self.types) != n or n > vocab_size:
            raise self._refused(
                f"of {n:,} tokens and {len(self.types):,} types, and the model's vocabulary has "
                f"{vocab_size:,}"
            )
        for name in _LEFT_OUT:
            if self.keys.get(f"tokenizer.ggml.{name}", name.startswith("escape")) != (
                name.startswith("escape")
            ):
                raise self._refused(f"with {name}, which is not rebuilt")
        self.used = [i for i, t in enumerate(self.types) if t != UNUSED]
        vocab = {self.tokens[i]: i for i in self.used}
        if len(vocab) != len(self.used):
            raise self._refused("with two tokens of the same text")
        self.vocab = vocab

    def _refused(self, why: str) -> DataError:
        return DataError(
            f"{self.path}: has a tokenizer {why}: give --no-tokenizer, and put the model's own "
            "tokenizer.json into the directory"
        )

    def _key(self, name: str, kind: type, default=None):
        value = self.keys.get(f"tokenizer.ggml.{name}", default)
        if value is not None and not isinstance(value, kind):
            raise self._refused(f"whose key tokenizer.ggml.{name} is {str(value)[:40]!r}")
        if value is None and kind is str:
            raise self._refused(f"without the key tokenizer.ggml.{name}")
        return value

    def _list(self, name: str, kind: type, default=None) -> list:
        value = self._key(name, list, default)
        if not value or not all(isinstance(x, kind) for x in value):
            raise self._refused(f"without the list tokenizer.ggml.{name}")
        return value

    def _token(self, name: str) -> str | None:
        i = self._key(f"{name}_token_id", int)
        return self.tokens[i] if i is not None and 0 <= i < len(self.tokens) else None

    # ---- tokenizer.json --------------------------------------------------------------------------

    def content(self) -> dict:
        """tokenizer.json."""
        parts = self._byte_level() if self.kind == "gpt2" else self._sentencepiece()
        normalizer, pre_tokenizer, decoder, model = parts
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [self._added(i) for i in self.used if self.types[i] not in _IN_MODEL],
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": self._ends(),
            "decoder": decoder,
            "model": model,
        }

    def _added(self, i: int) -> dict:
        return {
            "id": i,
            "content": self.tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": self.types[i] != USER_DEFINED,
        }

    def _model(self, merges: list, **more) -> dict:
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
        }
        return {**model, **more, "vocab": self.vocab, "merges": merges}

    def _byte_level(self) -> tuple:
        name = self._key("pre", str)
        name = ALIASES.get(name, name)
        found = [
            (cuts, whole) for cuts, kinds in CUTS.items() for whole, n in kinds.items() if n == name
        ]
        if not found:
            raise self._refused(f"that cuts text as llama.cpp's {name[:40]!r}, which is not known")
        cuts, whole = found[0]
        steps = [_step(cut) for cut in cuts if cut != "bytes"]
        steps.append({**_BYTES, "use_regex": "bytes" in cuts})
        pre = steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}
        normalizer = {"type": "NFC"} if name in NFC else None
        return normalizer, pre, _BYTES, self._model(self._merges(), ignore_merges=bool(whole))

    def _merges(self) -> list[list[str]]:
        merges = []
        for merge in self._list("merges", str, []) if self.keys.get(_MERGES) else []:
            left, _, right = merge.partition(" ")
            if left not in self.vocab or right not in self.vocab or left + right not in self.vocab:
                raise self._refused(f"whose merge {merge[:60]!r} is not of its tokens")
            merges.append([left, right])
        return merges

    def _merges_of_scores(self) -> list[list[str]]:
        """Of every two tokens whose union is a token, in the order of its score."""
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise self._refused(f"of {len(self.tokens):,} tokens and {len(scores):,} scores")
        plain = {t: i for t, i in self.vocab.items() if self.types[i] == NORMAL}
        merges = []
        for token, i in plain.items():
            splits = ((token[:k], token[k:]) for k in range(1, len(token)))
            pairs = [(plain[a], plain[b], a, b) for a, b in splits if a in plain and b in plain]
            merges += [(-scores[i], i, *pair) for pair in sorted(pairs)]
        return [[a, b] for *_, a, b in sorted(merges)]

    def _sentencepiece(self) -> tuple:
        merges = self._merges() if self.kind == "gemma4" else self._merges_of_scores()
        prefix = self.keys.get("tokenizer.ggml.add_space_prefix", True)
        steps = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
        steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
        back = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
        unknown = self._token("unknown")
        model = self._model(merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        return (
            {"type": "Sequence", "normalizers": steps},
            None,
            {"type": "Sequence", "decoders": back},
            model,
        )

    def _ends(self) -> dict | None:
        """What stands before and after each text."""
        default = self.kind == "llama" or self.keys.get("tokenizer.ggml.pre") in ADDS_BOS
        ends = []
        for name, adds in (("bos", default), ("eos", False)):
            token = self._token(name)
            wanted = self.keys.get(f"tokenizer.ggml.add_{name}_token", adds)
            ends.append(token if wanted and token is not None else None)
        if ends == [None, None]:
            return None
        piece = {
            kind: [
                *_piece(ends[0], at),
                *({"Sequence": {"id": i, "type_id": at}} for i, at in order),
                *_piece(ends[1], at),
            ]
            for kind, order, at in (("single", [("A", 0)], 0), ("pair", [("A", 0), ("B", 1)], 1))
        }
        special = {
            t: {"id": t, "ids": [self.vocab[t]], "tokens": [t]} for t in ends if t is not None
        }
        return {"type": "TemplateProcessing", **piece, "special_tokens": special}

    # ---- files -----------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Checked

        text = json.dumps(self.content(), ensure_ascii=False)
        try:
            Checked.from_str(text)
        except BaseException as e:
            if not rust_failure(e):
                raise
            raise self._refused(f"that tokenizers does not take ({rust_failure(e)})") from e
        (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for name, key in names.items():
            if self._token(key) is not None:
                config[f"{name}_token"] = self._token(key)
        for name in ("bos", "eos"):
            if isinstance(adds := self.keys.get(f"tokenizer.ggml.add_{name}_token"), bool):
                config[f"add_{name}_token"] = adds
        config["clean_up_tokenization_spaces"] = False
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def write_templates(keys: dict, folder: Path) -> None:
    """The file's chat templates."""
    for key, value in keys.items():
        found = re.fullmatch(r"tokenizer\.chat_template(?:\.([A-Za-z0-9_-]+))?", key)
        if not found or not isinstance(value, str):
            continue
        path = folder / "chat_template.jinja"
        if found[1]:
            (folder / MORE_TEMPLATES).mkdir(exist_ok=True)
            path = folder / MORE_TEMPLATES / f"{found[1]}.jinja"
        path.write_text(value, encoding="utf-8", newline="")


_IN_MODEL = (NORMAL, BYTE)
_MERGES = "tokenizer.ggml.merges"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _step(cut: str) -> dict:
    if cut == "digits":
        return {"type": "Digits", "individual_digits": True}
    return {
        "type": "Split",
        "pattern": {"Regex": cut},
        "behavior": "Isolated",
        "invert": False,
    }


def _piece(token: str | None, type_id: int) -> list:
    return [{"SpecialToken": {"id": token, "type_id": type_id}}] if token is not None else []

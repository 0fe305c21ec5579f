"""The prompts of `penstock train --sample-prompt`: the program takes token ids, so the text becomes
ids here, by the model's own tokenizer, before the program starts."""

from __future__ import annotations

from pathlib import Path

from . import run_file
from .command import given
from .conversation import Conversation, text_of
from .data import load_tokenizer
from .files import DataError
from .generate import encode_prompts, read_prompts

TEXTS, FILE, IDS = "--sample-prompt", "--sample-prompts", "--sample-ids"
MODEL = ("--model", "--model-name-or-path", "--base-model")  # as native/cli/aliases.c
MOST = 100_000  # characters of a word of a command line; Linux takes 131,071 bytes


def _values(words: list[str], *names: str) -> list[str]:
    """What the option of these names has, as the program reads it: --name A B, --name=A."""
    found = []
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and name in names:
            found.append(value)
        elif word in names:
            for value in words[i + 1 :]:
                if value.startswith("--"):
                    break
                found.append(value)
    return found


def _without(words: list[str], names: tuple[str, ...]) -> list[str]:
    """The words without these options."""
    kept, drops = [], False
    for word in words:
        if word.startswith("--"):
            drops = word.split("=")[0] in names
        if not drops:
            kept.append(word)
    return kept


def _of_file(words: list[str]) -> dict:
    """The options in the file of --config, where it may have prompts."""
    path = _values(words, "--config")
    try:
        text = Path(path[-1]).read_bytes() if path else b""
    except OSError:
        text = b""  # the program refuses it
    return run_file.read(path[-1]) if b"sample-prompt" in text else {}


def encode_options(words: list[str]) -> list[str]:
    """The words of `penstock train` with token ids for prompts that are text. DataError: a prompt
    or the tokenizer cannot be used."""
    texts, file, of_file = _values(words, TEXTS), _values(words, FILE), _of_file(words)
    if not (texts or file or _values(words, IDS)):
        texts, file = of_file.get("sample_prompt", []), of_file.get("sample_prompts")
        file = [file] if file else []
    if texts and file:
        raise DataError("give either --sample-prompt TEXT or --sample-prompts FILE")
    model = (_values(words, *MODEL) or [of_file.get("model")])[-1]
    if not (texts or file) or not model:
        return words  # the program refuses what is missing
    folder = Path(model)
    prompts = list(texts) if texts else given(FILE, read_prompts, Path(file[-1]))
    shown, ids = [], []
    encoded = encode_prompts(prompts, given("--model", load_tokenizer, folder), folder)
    for number, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True), 1):
        chat = isinstance(prompt, Conversation)
        shown.append(text_of(prompt.messages[-1]) if chat else prompt)
        ids.append(",".join(map(str, tokens)))
        if "\0" in shown[-1]:
            raise DataError(f"prompt {number} has a NUL, which a command line cannot have")
        if max(len(ids[-1]), len(shown[-1].encode())) > MOST:
            raise DataError(
                f"prompt {number} has {len(tokens):,} tokens, too many for a command line: "
                f"shorten it to {MOST:,} characters"
            )
    words = _without(words, (TEXTS, FILE, IDS))
    options = [f"{TEXTS}={text}" for text in shown] + [f"{IDS}={line}" for line in ids]
    return [*words, *options]

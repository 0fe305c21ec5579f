"""The prompts of `penstock train --sample-prompt`: the program takes token ids, so the text becomes
ids here, by the model's own tokenizer, before the program starts."""

from __future__ import annotations

from pathlib import Path

from .command import given
from .conversation import Conversation, text_of
from .data import load_tokenizer
from .files import DataError
from .generate import encode_prompts, read_prompts
from .words import Words

TEXTS, FILE, IDS = "--sample-prompt", "--sample-prompts", "--sample-ids"
MOST = 100_000  # characters of a word of a command line; Linux takes 131,071 bytes


def encode_options(words: Words, of_file: dict) -> None:
    """Give `penstock train` token ids for prompts that are text. of_file: the options of its run
    file. DataError: a prompt or the tokenizer cannot be used."""
    texts, file = words.values(TEXTS), words.values(FILE)
    if not (texts or file or words.values(IDS)):
        texts, file = of_file.get("sample_prompt", []), of_file.get("sample_prompts")
        file = [file] if file else []
    if texts and file:
        raise DataError("give either --sample-prompt TEXT or --sample-prompts FILE")
    model = words.last("--model") or of_file.get("model")
    if not (texts or file) or not model:
        return  # the program refuses what is missing
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
    words.take([FILE])
    words.set_list(TEXTS, shown)
    words.set_list(IDS, ids)

"""Token ids of the pieces of documents, with what of them is learned.

Some tokenizers put a blank before each text that they encode: those of the SentencePiece kind, as
Llama 2, Mistral and T5 have them, and byte-level ones with add_prefix_space. A completion follows
its prompt, and a piece of a long text the piece before it: no blank belongs there. Such a text is
encoded behind a separator, whose tokens are then dropped. Where no separator is a token of its own,
prompt and completion are encoded as one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .documents import Piece
from .files import DataError
from .labels import document, pair
from .tokenizer import call

BLANKS = "\u2581\u0120"  # how SentencePiece and byte-level tokenizers write a blank
SEPARATORS = ("\n", ".", "|")  # in the order in which they are tried
KINDS = ("text", "pair", "chat", "labelled", "judged")


@dataclass(frozen=True)
class Encoded:
    document: int
    ids: np.ndarray
    is_target: np.ndarray  # of each token, bool
    open: bool  # the document may go on, and ends with eos; else these are all its tokens
    targets: np.ndarray | None = None  # of labelled texts
    starts: tuple[int, ...] = ()  # where another document begins: the rejected answer


def blank_before(tokenizer) -> str | None:
    """A text whose tokens begin with a blank that the text lacks; None: the tokenizer puts none.
    Two texts joined have other tokens than the two have, where it does. A text that the tokenizer
    does not know tells nothing."""
    model = tokenizer.model
    unknown = {getattr(model, "unk_token", None)}
    for text in ("a", *tokenizer.get_vocab(with_added_tokens=False)):
        with contextlib.suppress(DataError):
            tokens = call(tokenizer.encode, text, add_special_tokens=False).tokens
            if tokens and tokens[0] not in unknown and not text.startswith(tuple(BLANKS)):
                return text if tokens[0].startswith(tuple(BLANKS)) else None
    return None


def behind(separator: str, encoded) -> list[int] | None:
    """The ids of what follows the separator in @encoded. None: it is no token of its own there."""
    offsets = encoded.offsets
    n = sum(begin < len(separator) for begin, _ in offsets)
    separate = any(token.strip(BLANKS) for token in encoded.tokens[:n])
    if separate and all(end <= len(separator) for _, end in offsets[:n]):
        return list(encoded.ids[n:])
    return None


class Encoder:
    """Encodes pieces with @tokenizer. What is no text begins with the ids @bos and ends with the id
    @eos. @targets "all": prompts are learned too. DataError: the tokenizer cannot encode a text."""

    def __init__(self, tokenizer, bos: list[int], eos: int, targets: str):
        self.tokenizer, self.bos, self.eos, self.targets = tokenizer, bos, eos, targets
        text = blank_before(tokenizer)
        self.puts_blank = text is not None
        # A separator that the normalizer removes, as T5's removes line ends, it removes before
        # every text.
        self.separators = [s for s in SEPARATORS if text and self._separates(s, text)]

    def pieces(self, batch: list[Piece], last_document: int) -> Iterator[Encoded]:
        """The pieces of @batch encoded, each kind at once. @last_document: that of the piece before
        these. "<|endoftext|>" inside a text is encoded as plain characters. In conversations and
        pairs special tokens are what they are."""
        by_kind = {k: [p for p in batch if p.kind == k] for k in KINDS}
        self.tokenizer.encode_special_tokens = True
        texts = iter(self._texts(by_kind["text"], last_document))
        self.tokenizer.encode_special_tokens = False
        pairs = iter(self._pairs(by_kind["pair"]))
        chats = iter(self._with_offsets([p.text for p in by_kind["chat"]]))
        labelled = iter(self._ids([p.text for p in by_kind["labelled"]]))
        chosen = iter(self._ids([p.text for p in by_kind["judged"]]))
        rejected = iter(self._ids([p.completion for p in by_kind["judged"]]))
        for p in batch:
            begin = [] if p.rendered else self.bos
            if p.kind == "labelled":
                ids = np.asarray(begin + next(labelled), np.uint32)
                is_target, targets = document(ids, p.target)
                yield Encoded(p.document, ids, is_target, False, targets)
            elif p.kind == "judged":
                a, b = begin + next(chosen), begin + next(rejected)
                is_target, targets = pair(len(a), len(b))
                ids = np.asarray(a + b, np.uint32)
                yield Encoded(p.document, ids, is_target, False, targets, (len(a),))
            elif p.kind == "text":
                ids = np.asarray(next(texts), np.uint32)
                yield Encoded(p.document, ids, np.ones(len(ids), bool), True)
            elif p.kind == "pair":
                prompt, completion = next(pairs)
                ids = np.asarray([*self.bos, *prompt, *completion, self.eos], np.uint32)
                n = 0 if self.targets == "all" else len(self.bos) + len(prompt)
                yield Encoded(p.document, ids, np.arange(len(ids)) >= n, False)
            else:
                encoded = next(chats)
                begin = np.array([b for b, _ in encoded.offsets], np.int64)
                learned = np.zeros(len(begin), bool)
                for a, b in p.spans:
                    learned |= (begin >= a) & (begin < b)
                yield Encoded(p.document, np.asarray(encoded.ids, np.uint32), learned, False)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        fast = self.tokenizer.encode_batch_fast
        found = call(fast, texts, add_special_tokens=False) if texts else []
        return [list(e.ids) for e in found]

    def _with_offsets(self, texts: list[str]) -> list:
        whole = self.tokenizer.encode_batch
        return call(whole, texts, add_special_tokens=False) if texts else []

    def _texts(self, pieces: list[Piece], last_document: int) -> list[list[int]]:
        before = [last_document, *(p.document for p in pieces)]
        follows = [p.document == b for p, b in zip(pieces, before)]
        following = iter(self._behind([p.text for p, f in zip(pieces, follows) if f]))
        ids = [next(following) if f else None for f in follows]
        alone = iter(self._ids([p.text for p, x in zip(pieces, ids) if x is None]))
        return [next(alone) if x is None else x for x in ids]

    def _pairs(self, pairs: list[Piece]) -> list[tuple[list[int], list[int]]]:
        """Of each prompt and completion the ids. A token that holds characters of both is the
        completion's, so that all of the completion is learned."""
        prompts = self._ids([p.text for p in pairs])
        follows = [bool(p.text and p.completion) for p in pairs]
        following = iter(self._behind([p.completion for p, f in zip(pairs, follows) if f]))
        ids = [next(following) if f else None for f in follows]
        alone = [i for i, x in enumerate(ids) if x is None and not (follows[i] and self.puts_blank)]
        for i, x in zip(alone, self._ids([pairs[i].completion for i in alone])):
            ids[i] = x
        joint = [i for i, x in enumerate(ids) if x is None]
        whole = self._with_offsets([pairs[i].text + pairs[i].completion for i in joint])
        for i, e in zip(joint, whole):
            n = sum(end <= len(pairs[i].text) for _, end in e.offsets)
            prompts[i], ids[i] = list(e.ids[:n]), list(e.ids[n:])
        return list(zip(prompts, ids))

    def _separates(self, separator: str, text: str) -> bool:
        with contextlib.suppress(DataError):
            return behind(separator, self._with_offsets([separator + text])[0]) is not None
        return False

    def _behind(self, texts: list[str]) -> list[list[int] | None]:
        """The ids that texts have behind other text. None: they are those of the text alone, or no
        separator is a token of its own before it."""
        ids: list = [None] * len(texts)
        for separator in self.separators:
            left = [i for i, x in enumerate(ids) if x is None]
            for i, e in zip(left, self._with_offsets([separator + texts[i] for i in left])):
                ids[i] = behind(separator, e)
        return ids

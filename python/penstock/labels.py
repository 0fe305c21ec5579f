"""Labelled texts, for models with a `score`: what records say, and the targets that shards get.

A target stands at a document's last token (include/penstock/model.h, ps_problem)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .conversation import fields_of, is_conversation
from .files import DataError

PROBLEMS = ("single-label", "multi-label", "regression", "pairs")
NUMBERS = {name: i for i, name in enumerate(PROBLEMS, 1)}  # ps_problem
MAX_LABELS, MAX_BITS = 65536, 31
NONE = -1


@dataclass
class Labels:
    """What `penstock data` is told of labels. n: the number of labels, which grows with the data
    unless it was given."""

    problem: str
    field: str = "label"
    given: int = 0
    n: int = 0
    n_long: int = 0  # documents that were cut to a row

    def __post_init__(self):
        one = self.problem in ("regression", "pairs")
        most = 1 if one else MAX_BITS if self.problem == "multi-label" else MAX_LABELS
        if self.given > most:
            raise DataError(f"--labels {self.given}: {self.problem} has at most {most}")
        self.n = 1 if one else self.given or (1 if self.problem == "multi-label" else 2)
        self.most = self.given or most

    @property
    def number(self) -> int:
        return NUMBERS[self.problem]

    def _index(self, label, what: str) -> int:
        label = int(label) if isinstance(label, (bool, np.integer)) else label
        if isinstance(label, float) and label.is_integer():
            label = int(label)
        if not isinstance(label, int) or not 0 <= label < self.most:
            raise DataError(
                f"{what}: {self.field!r} is {label!r}: give a label's number, 0 to {self.most - 1}"
            )
        self.n = max(self.n, label + 1)
        return label

    def target(self, record: dict, what: str) -> int:
        """The int32 that stands for the record's label."""
        if self.field not in record:
            raise DataError(
                f"{what} has no {self.field!r}; its fields are {fields_of(record) or 'none'}: name "
                "the label's field with --label-field"
            )
        label = record[self.field]
        if self.problem == "single-label":
            return self._index(label, what)
        if self.problem == "multi-label":
            if not isinstance(label, (list, tuple)):
                raise DataError(f"{what}: {self.field!r} is no list of the labels' numbers")
            return sum({1 << self._index(x, what) for x in label})
        if not isinstance(label, (int, float)) or label != label:
            raise DataError(f"{what}: {self.field!r} is {label!r:.40}: give a number")
        if abs(label) > float(np.finfo(np.float32).max):
            raise DataError(
                f"{what}: {self.field!r} is {label!r:.40}, too large for fp32: give a number "
                "from -3.4e38 to 3.4e38"
            )
        return int(np.float32(label).view(np.int32))


def add_label_options(p) -> None:
    """Of labelled texts, to an argparse parser."""
    p.add_argument(
        "--problem",
        choices=PROBLEMS,
        help="the records are labelled, for a classifier or a reward model: they have a label, or "
        "with pairs the answers chosen and rejected",
    )
    p.add_argument(
        "--label-field", default="label", help="field that has the label (default: label)"
    )
    p.add_argument(
        "--labels",
        type=int,
        default=0,
        metavar="N",
        help="how many labels there are (default: one more than the largest in the data)",
    )


def is_chat(record, problem: str) -> bool:
    """The chat template writes its text."""
    if not isinstance(record, dict):
        return False
    return isinstance(record.get("chosen"), list) if problem == "pairs" else is_conversation(record)


def pair_of(record, what: str) -> Iterator[tuple[str | list, bool]]:
    """(text or messages, whether they are messages) of the chosen and of the rejected answer."""
    for name in ("chosen", "rejected"):
        answer = record.get(name) if isinstance(record, dict) else None
        prompt = record.get("prompt") if isinstance(record, dict) else None
        if isinstance(answer, list) and answer:
            yield [*(prompt if isinstance(prompt, list) else []), *answer], True
        elif isinstance(answer, str) and isinstance(prompt, (str, type(None))):
            yield (prompt or "") + answer, False
        else:
            raise DataError(
                f"{what} has no answers 'chosen' and 'rejected', texts or lists of messages as its "
                f"'prompt'; its fields are {fields_of(record) or 'none'}"
            )


def document(ids: np.ndarray, target: int) -> tuple[np.ndarray, np.ndarray]:
    """(which tokens are judged, their targets)."""
    targets = np.full(len(ids), NONE, np.int32)
    targets[-1:] = target
    return np.arange(len(ids)) == len(ids) - 1, targets


def pair(n_chosen: int, n_rejected: int) -> tuple[np.ndarray, np.ndarray]:
    """The same of two documents, one after the other. A pair counts once."""
    targets = np.full(n_chosen + n_rejected, NONE, np.int32)
    targets[n_chosen - 1], targets[-1] = -1 - n_rejected, n_rejected
    return targets > 0, targets

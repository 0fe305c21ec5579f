"""`penstock embed`: pooled embeddings of texts (penstock.score)."""

from . import score


def main(argv: list[str] | None = None) -> int:
    return score.main(argv, "embed")

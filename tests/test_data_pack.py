"""Best-fit packing: whole documents in rows, their masks, what is reported and what is refused."""

import hashlib
import json

import io_native as ps
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock import data, packing
from test_data_py import run

N = 64


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, N), max_size=80))
def test_best_fit_places_each_document_once_and_no_two_rows_fit_in_one(lengths):
    rows = packing.best_fit(lengths, N)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    used = sorted(sum(lengths[i] for i in row) for row in rows)
    assert all(u <= N for u in used) and (len(used) < 2 or used[0] + used[1] > N)
    assert rows == sorted(rows) and all(row == sorted(row) for row in rows)


def test_best_fit_takes_the_row_with_the_least_room():
    assert packing.best_fit([5, 6, 3, 4, 2], 10) == [[0, 2, 4], [1, 3]]


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    words = "the quick brown fox jumps over lazy dogs".split()
    # one document is a row to the token, one a token longer, one several rows
    sizes = [*rng.integers(1, N - 1, 120), N - 1, N, 5 * N + 7]
    return [" ".join(rng.choice(words, n)) for n in sizes]


@pytest.fixture(scope="module")
def tokenizer(texts):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({w for t in texts for w in t.split()})
    t = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["</s>", "<pad>", *words])}))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return t


@pytest.fixture
def source(texts, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def read_rows(folder):
    """Every sequence as the native reader gives it: tokens, targets, where documents begin."""
    with ps.Dataset(folder, vocab=100) as ds:
        return [(*ds.read(N, i), ds.begins) for i in range(ds.n(N))]


def documents_of(rows):
    """Token lists, without padding; targets are checked: all but a document's first token."""
    found = []
    for tokens, targets, begins in rows:
        assert begins[0]
        at = [*np.flatnonzero(begins), N]
        for a, b in zip(at, at[1:]):
            if tokens[a] == 1:  # padding, to the row's end
                assert b == N and (tokens[a:] == 1).all() and (targets[a:] == -1).all()
                assert targets[a - 1] == -1
                continue
            np.testing.assert_array_equal(targets[a : b - 1], tokens[a + 1 : b])
            assert targets[b - 1] == -1
            found.append(tokens[a:b].tolist())
    return found


@pytest.mark.parametrize("buffer", [packing.BUFFER_TOKENS, 500])
@pytest.mark.parametrize("long", ["divide", "drop"])
def test_packed_documents_are_whole(texts, tokenizer, source, tmp_path, monkeypatch, long, buffer):
    monkeypatch.setattr(packing, "BUFFER_TOKENS", buffer)
    options = {"seq_len": N, "long": long, "pad": "<pad>", "shard_tokens": 1000}
    s = data.write_shards([source], tmp_path / "o", tokenizer, **options)
    rows = read_rows(tmp_path / "o")
    want = []
    for t in texts:
        ids = [*tokenizer.encode(t).ids, 0]
        parts = [ids[i : i + N] for i in range(0, len(ids), N)]
        want += [p for p in parts if len(p) > 1] if len(parts) == 1 or long == "divide" else []
    assert sorted(documents_of(rows)) == sorted(want)
    content, dropped = sum(map(len, want)), sum(len(t.split()) + 1 for t in texts)
    assert (s["long_documents"], s["seq_len"], s["documents"]) == (2, N, len(texts))
    assert s["dropped_tokens"] == dropped - content
    assert s["tokens"] - s["padding"] == content
    assert s["train"]["targets"] == sum(int((r[1] >= 0).sum()) for r in rows)
    shards = [x["tokens"] for x in s["train"]["shards"]]
    assert len(shards) > 3 and all(n == 15 * N + 1 for n in shards[:-1])
    # no two rows of a buffer fit in one, and so at most one of them is half empty
    assert len(rows) * N < 2 * content + 2 * N * (1 + content // buffer)


def test_every_row_has_a_target(tokenizer, tmp_path):
    """A prompt that fills rows of its own, and one whose completion is empty, leave only what has
    a target."""
    pairs = [("the " * 3 * N, "fox"), ("lazy dogs", ""), ("quick", "fox")]
    records = [json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs]
    (tmp_path / "p.jsonl").write_text("".join(records))
    s = data.write_shards([tmp_path / "p.jsonl"], tmp_path / "o", tokenizer, seq_len=N, pad="<pad>")
    rows = read_rows(tmp_path / "o")
    assert len(rows) == 1 and all((targets >= 0).any() for _, targets, _ in rows)
    # the end of text after an empty completion is learned; of the first pair the prompt's rows go
    assert (s["dropped_tokens"], s["train"]["targets"]) == (3 * N, 1 + 1 + 2)


def test_the_command_packs_conversations_and_reports_padding(tmp_path):
    from test_data_chat import CHATML, configure, say

    (tmp_path / "t.txt").write_text("question answer " * 100)
    t = data.train_tokenizer([tmp_path / "t.txt"], 290)
    (tmp_path / "tok").mkdir()
    t.save(str(tmp_path / "tok/tokenizer.json"))
    configure(tmp_path / "tok", CHATML)
    chats = [say(f"question {i}", "answer " * (i % 7)) for i in range(50)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
    pack = ["--pack", "best-fit", "--seq-len", 128, "--val-fraction", 0.2, "--eos", "<|endoftext|>"]
    for out in ("o", "p"):
        r = run(
            "--out", tmp_path / out, "--tokenizer", tmp_path / "tok", *pack, tmp_path / "c.jsonl"
        )
    s = json.loads((tmp_path / "o/dataset.json").read_text())
    assert f"{s['padding'] / s['tokens']:.1%} of the tokens are padding" in r.stdout
    assert (
        f"{(s['train']['targets'] + s['val']['targets']) / s['tokens']:.1%} are targets" in r.stdout
    )
    assert s["pack"] == "best-fit" and 0 < s["train"]["targets"] < s["train"]["tokens"] / 2
    # the manifest has every file, and both runs wrote the same bytes
    for part, folder in (("train", "."), ("val", "val")):
        for shard in s[part]["shards"]:
            for file, digest in (("file", "sha256"), ("mask", "mask_sha256")):
                raw = (tmp_path / "o" / folder / shard[file]).read_bytes()
                assert hashlib.sha256(raw).hexdigest() == shard[digest]
                assert raw == (tmp_path / "p" / folder / shard[file]).read_bytes()
    with ps.Dataset(tmp_path / "o", vocab=400) as ds:
        assert ds.n(128) * 128 + 1 == s["train"]["tokens"]


def test_bad_packing_is_one_sentence_and_leaves_nothing(source, tmp_path):
    (tmp_path / "long.txt").write_text("word " * 1000)
    pack = ("--pack", "best-fit")
    for args, says in [
        ((*pack, source), "belong together"),
        (("--seq-len", 64, source), "belong together"),
        (("--long", "drop", source), "for --pack best-fit alone"),
        ((*pack, "--seq-len", 1, source), "rows of --seq-len 1: give 2 to 99999999"),
        ((*pack, "--seq-len", -5, source), "rows of --seq-len -5"),
        ((*pack, "--seq-len", 100, "--shard-tokens", 100, source), "give 2 to 99,"),
        ((*pack, "--seq-len", 8, "--long", "drop", tmp_path / "long.txt"), "longer than a row"),
    ]:
        r = run("--out", tmp_path / "out", "--train-tokenizer", 300, *args, code=2)
        assert says in r.stderr
        assert not (tmp_path / "out").exists()

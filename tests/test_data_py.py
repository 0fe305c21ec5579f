"""penstock.data: text to shards and back, every option, every refusal. Needs no native library."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
from penstock import data  # noqa: E402
from penstock.documents import PIECE_MAX_CHARS, cut_pieces  # noqa: E402
from penstock.shards import read_header, read_shard  # noqa: E402

UNICODE = "Grüße, 世界! 🚀\n\ttabs  and   spaces \r\nnaïve — Ελληνικά\n<|endoftext|> is text here\n"


def run(*args, code=0):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    r = subprocess.run(
        [sys.executable, "-m", "penstock.data", *map(str, args)],
        capture_output=True,
        text=True,
        env=env,
    )
    assert r.returncode == code, r.stderr
    if code == 2:
        assert r.stderr.count("\n") == 1 and "Traceback" not in r.stderr, r.stderr
    return r


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Three documents, the first longer than a piece."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [
        f"line {i}: the quick brown fox{' ' * (i % 4)} jumps\n"
        + ("\n    indented\n" if i % 7 == 0 else "")
        for i in range(6000)
    ]
    (folder / "a.txt").write_bytes(("".join(lines) + UNICODE).encode())
    (folder / "b.md").write_bytes(("# title\n\n" + UNICODE * 3).encode())
    (folder / "c.jsonl").write_text(
        json.dumps({"text": UNICODE + "no newline at the end", "id": 1}) + "\n\n"
    )
    return folder


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return data.train_tokenizer([corpus], 600)


def texts(corpus):
    return [
        (corpus / "a.txt").read_bytes().decode(),
        (corpus / "b.md").read_bytes().decode(),
        json.loads((corpus / "c.jsonl").read_text())["text"],
    ]


def documents(tokenizer, ids, eos=0):
    ids, out, start = np.asarray(ids), [], 0
    for end in np.flatnonzero(ids == eos):
        out.append(tokenizer.decode([int(i) for i in ids[start:end]], skip_special_tokens=False))
        start = end + 1
    assert start == len(ids), "tokens after the last end of text"
    return out


def shards(summary, out, part="train"):
    folder = Path(out) if part == "train" else Path(out) / "val"
    return [read_shard(folder / s["file"]) for s in summary[part]["shards"]]


def test_a_parent_that_will_be_made_is_named(corpus, tmp_path):
    """A slip in a long path is seen before the work; --quiet says nothing."""
    ask = ["--train-tokenizer", 300, corpus / "b.md"]
    for out, quiet, said in (
        ("a/b/c", [], f"its parent {tmp_path / 'a/b'} does not exist and will be made\n"),
        ("a/b/d", [], ""),
        ("e/f", ["--quiet"], ""),
    ):
        stderr = run("--out", tmp_path / out, *quiet, *ask).stderr
        assert stderr == (said and f"penstock data: --out {tmp_path / out}: {said}")
        assert (tmp_path / out / "dataset.json").exists()


@pytest.mark.parametrize("format", ["penstock", "llmc-gpt2", "llmc-llama3"])
def test_round_trip_over_several_shards(corpus, tokenizer, tmp_path, format):
    s = data.write_shards([corpus], tmp_path / "o", tokenizer, format=format, shard_tokens=10_000)
    parts = shards(s, tmp_path / "o")
    assert len(parts) > 3 and all(len(p) == 10_000 for p in parts[:-1])
    assert [len(p) for p in parts] == [x["tokens"] for x in s["train"]["shards"]] and sum(
        map(len, parts)
    ) == s["tokens"]
    assert documents(tokenizer, np.concatenate(parts)) == texts(corpus)
    assert s["documents"] == 3
    h = read_header(tmp_path / "o" / "train-00000.bin")
    assert (h.format, h.dtype.itemsize) == (format, 4 if format == "llmc-llama3" else 2)
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == sorted(
        [x["file"] for x in s["train"]["shards"]] + ["dataset.json", "tokenizer.json"]
    )


def test_pieces_do_not_change_the_tokens(corpus, tokenizer, tmp_path):
    whole = texts(corpus)[0]
    assert len(list(cut_pieces([whole]))) > 3
    tokenizer.encode_special_tokens = True
    expected = tokenizer.encode(whole, add_special_tokens=False).ids
    tokenizer.encode_special_tokens = False
    s = data.write_shards([corpus / "a.txt"], tmp_path / "o", tokenizer)
    assert list(shards(s, tmp_path / "o")[0]) == expected + [0]


@pytest.mark.parametrize(
    "text", ["", "x", "a\n" * 200_000, "y" * 2_500_000, "word " * 400_000, "\n" * 300_000]
)
@pytest.mark.parametrize("step", [1 << 20, 70_001])
def test_pieces_lose_nothing_and_are_bounded(text, step):
    pieces = list(cut_pieces(text[i : i + step] for i in range(0, len(text), step)))
    assert "".join(pieces) == text and all(0 < len(p) <= PIECE_MAX_CHARS for p in pieces)


def test_large_vocabularies_take_four_bytes(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000}
    t = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (tmp_path / "t.txt").write_text("w69999 w1 w65536")
    s = data.write_shards([tmp_path / "t.txt"], tmp_path / "o", t)
    assert list(shards(s, tmp_path / "o")[0]) == [69999, 1, 65536, 70000]
    assert (s["bytes_per_token"], s["vocab_size"], s["eos_token"]) == (4, 70001, "</s>")
    with pytest.raises(data.DataError, match="two bytes a token"):
        data.write_shards([tmp_path / "t.txt"], tmp_path / "p", t, format="llmc-gpt2")
    assert not (tmp_path / "p").exists()


def test_validation_is_disjoint_and_near_its_fraction(tokenizer, tmp_path):
    with open(tmp_path / "d.jsonl", "w") as f:
        for i in range(500):
            f.write(json.dumps({"body": f"document {i} of many"}) + "\n")
    s = data.write_shards(
        [tmp_path / "d.jsonl"], tmp_path / "o", tokenizer, field="body", val_fraction=0.1
    )
    train, val = (
        documents(tokenizer, np.concatenate(shards(s, tmp_path / "o", p))) for p in ("train", "val")
    )
    assert not set(train) & set(val) and sorted(train + val) == sorted(
        f"document {i} of many" for i in range(500)
    )
    # greedy: the share is at most one document above the fraction, and never more than one below it
    longest = max(len(tokenizer.encode(d).ids) for d in train + val) + 1
    assert abs(s["val"]["tokens"] - 0.1 * s["tokens"]) <= longest


def test_validation_of_one_long_document(corpus, tokenizer, tmp_path):
    s = data.write_shards([corpus / "a.txt"], tmp_path / "o", tokenizer, val_fraction=0.2)
    train, val = (
        documents(tokenizer, np.concatenate(shards(s, tmp_path / "o", p))) for p in ("train", "val")
    )
    assert len(val) >= 1 and sum(map(len, train + val)) == len(texts(corpus)[0])
    assert sorted("".join(train + val)) == sorted(texts(corpus)[0]) and not set(train) & set(val)


def test_cli_is_reproducible_and_complete(corpus, tmp_path):
    for name in ("one", "two"):
        r = run(
            "--out",
            tmp_path / name,
            "--train-tokenizer",
            500,
            "--val-fraction",
            0.1,
            "--shard-tokens",
            20000,
            corpus,
        )
        assert "3 documents" in r.stdout
    files = sorted(
        p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file()
    )
    assert Path("val/val-00000.bin") in files and Path("tokenizer_config.json") in files
    for f in files:
        assert (tmp_path / "one" / f).read_bytes() == (tmp_path / "two" / f).read_bytes(), f
    # its tokenizer is taken again, from the folder, and gives the same shards
    run(
        "--out",
        tmp_path / "three",
        "--tokenizer",
        tmp_path / "one",
        "--val-fraction",
        0.1,
        "--shard-tokens",
        20000,
        corpus,
    )
    for f in files:
        assert (tmp_path / "one" / f).read_bytes() == (tmp_path / "three" / f).read_bytes(), f


def test_force_replaces_all_shards(corpus, tokenizer, tmp_path):
    data.write_shards([corpus], tmp_path, tokenizer, shard_tokens=5000, val_fraction=0.2)
    with pytest.raises(data.DataError, match="already has"):
        data.write_shards([corpus], tmp_path, tokenizer)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    (tmp_path / "x.jsonl").write_text("not json\n")
    with pytest.raises(
        data.DataError, match="line 1 is not JSON"
    ):  # what was there survives a failure
        data.write_shards([corpus, tmp_path / "x.jsonl"], tmp_path, tokenizer, force=True)
    assert all(p.read_bytes() == b for p, b in before.items()) and not list(
        tmp_path.glob(".penstock*")
    )
    data.write_shards([corpus], tmp_path, tokenizer, force=True)
    assert sorted(p.name for p in tmp_path.rglob("*.bin")) == ["train-00000.bin"]


def test_patterns_folders_and_files_that_are_not_utf8(tmp_path, tokenizer):
    for name, raw in {
        "a.txt": b"one",
        "sub/b.txt": b"two",
        "sub/bad.txt": b"caf\xe9",
        "sub/c.txt.gz": gzip.compress(b"three"),
        "c.bin": b"no",
    }.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(raw)
    s = data.write_shards([tmp_path / "in"], tmp_path / "o", tokenizer)
    assert (
        documents(tokenizer, shards(s, tmp_path / "o")[0]) == ["one", "two", "three"]
        and len(s["skipped"]) == 1
    )
    s = data.write_shards(
        [str(tmp_path / "in" / "**" / "b*.txt"), tmp_path / "in" / "sub" / "b.txt"],
        tmp_path / "p",
        tokenizer,
    )
    assert documents(tokenizer, shards(s, tmp_path / "p")[0]) == ["two"]
    with pytest.raises(data.DataError, match="not UTF-8"):
        data.write_shards([tmp_path / "in" / "sub" / "bad.txt"], tmp_path / "q", tokenizer)


def test_a_full_disk_is_a_failure_and_leaves_nothing(corpus, tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data.ShardWriter, "close", fail)
    words = ["--out", tmp_path / "out", "--train-tokenizer", "300", "--quiet", corpus]
    assert data.main([str(w) for w in words]) == 1
    error = capsys.readouterr().err
    assert error == f"penstock data: {tmp_path / 'out'}: writing failed: No space left on device\n"
    assert not [*(tmp_path / "out").iterdir()]


def test_bad_input_is_one_sentence_and_leaves_nothing(corpus, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("hello")
    (tmp_path / "bad.jsonl").write_text('{"text": 5}\n')
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    (tmp_path / "notok.json").write_text("{}")
    (tmp_path / "cut.json").write_text('[{"text": "a"}, {"te')
    (tmp_path / "text.json").write_text('"text"')
    whole = gzip.compress(b"some text " * 1000)
    (tmp_path / "cut.txt.gz").write_bytes(whole[:-20])
    (tmp_path / "no.jsonl.gz").write_text('{"text": "x"}')
    out, train = tmp_path / "out", ("--train-tokenizer", 300)
    for args, says in [
        ((*train, tmp_path / "empty.txt"), "no text"),
        ((*train, tmp_path / "gone.txt"), "no file or folder has this name"),
        (("--train-tokenizer", 256, corpus), "need 257"),
        ((*train, tmp_path / "bad.jsonl"), "line 1"),
        ((*train, tmp_path / "half.jsonl"), "surrogate"),
        ((*train, tmp_path / "cut.json"), "cut.json: is not JSON ("),
        ((*train, tmp_path / "text.json"), "neither an array of records nor a record a line"),
        ((*train, tmp_path / "cut.txt.gz"), "cut.txt.gz: cannot be read as gzip: Compressed file"),
        ((*train, tmp_path / "no.jsonl.gz"), "no.jsonl.gz: cannot be read as gzip: Not a gzipped"),
        ((*train, "--field", "id", corpus), "field 'id'"),
        ((*train, "--val-fraction", 1, corpus), "fraction"),
        ((*train, "--shard-tokens", 1, corpus), "1 tokens a shard"),
        ((*train, "--val-fraction", 0.5, tmp_path / "short.txt"), "cannot be divided"),
        ((*train, "--eos", "<none>", corpus), "<none>"),
        (("--tokenizer", tmp_path / "gone", corpus), f"--tokenizer {tmp_path}/gone: No such file"),
        (("--tokenizer", tmp_path / "notok.json", corpus), "cannot be read as a tokenizer"),
    ]:
        assert says in run("--out", out, *args, code=2).stderr
        assert not out.exists() or not list(out.iterdir())
    assert "takes a folder" in run("--out", tmp_path / "short.txt", *train, corpus, code=2).stderr


def header(words):
    h = np.zeros(256, dtype="<u4")
    h[: len(words)] = words
    return h.tobytes()


def test_read_shard_knows_every_variant(tmp_path):
    ids = np.arange(10) * 1000
    bintok = [int.from_bytes(b"BIN.", "little"), int.from_bytes(b"TOK\n", "little")]
    variants = [
        (header([20240520, 1, 10]), "<u2", b"", "llmc-gpt2"),
        (header([20240801, 7, 10]), "<u4", b"", "llmc-llama3"),
        (header(bintok + [1, 4, 10, 0, 0]), "<i4", b"", "bin.tok"),
        (header(bintok + [2, 4, 10, 50000, 1]), "<i4", b"\xff\x03", "bin.tok"),
        (header(bintok + [1, 4, 10, 0, 0x2A2A2A2A]), "<i4", b"", "bin.tok"),
        (header(bintok + [1, 4, 10, 0, 0x2A2A2A2A]), "<i4", b"\xff\x03", "bin.tok"),
        (header([20261121, 1, 2, 0, 10, 0, 9001]), "<u2", b"", "penstock"),
        (header([20261121, 1, 4, 0, 10, 0, 9001]), "<u4", b"", "penstock"),
    ]
    for raw, dtype, masks, name in variants:
        (tmp_path / "s.bin").write_bytes(raw + ids.astype(dtype).tobytes() + masks)
        assert (
            list(read_shard(tmp_path / "s.bin")) == list(ids)
            and read_header(tmp_path / "s.bin").format == name
        )
        (tmp_path / "s.bin").write_bytes((raw + ids.astype(dtype).tobytes() + masks)[:-1])
        with pytest.raises(data.DataError, match="tokens take"):
            read_shard(tmp_path / "s.bin")
    for raw, says in [
        (b"abc", "has 3 bytes"),
        (header([1, 2]), "no known format of token shards"),
        (header([20261121, 1, 3]), "bytes a token"),
    ]:
        (tmp_path / "s.bin").write_bytes(raw)
        with pytest.raises(data.DataError, match=says):
            read_shard(tmp_path / "s.bin")


def test_module_does_not_load_the_native_library():
    code = "import sys, penstock.data; sys.exit(any(m.startswith(('penstock._', 'cffi')) for m in sys.modules))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / "python")}
        ).returncode
        == 0
    )


def test_transformers_gives_a_model_no_more_than_it_takes(corpus, tmp_path):
    """AutoTokenizer adds token_type_ids by default, which generate() of a Llama refuses."""
    from transformers import AutoTokenizer

    run("--out", tmp_path / "out", "--train-tokenizer", 500, corpus)
    assert set(AutoTokenizer.from_pretrained(tmp_path / "out")("def")) == {
        "input_ids",
        "attention_mask",
    }

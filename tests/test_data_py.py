"""penstock.data: text to shards and back, every option, every refusal. Needs no native library."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import HANGS_S, called

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
from penstock import data  # noqa: E402
from penstock.documents import PIECE_MAX_CHARS, _batch_rows, cut_pieces  # noqa: E402
from penstock.shards import read_header, read_shard  # noqa: E402
from penstock.tokenizer import WORD, cut_words  # noqa: E402

UNICODE = "Grüße, 世界! 🚀\n\ttabs  and   spaces \r\nnaïve — Ελληνικά\n<|endoftext|> is text here\n"


def run(*args, code=0):
    r = called(data.main, *args)
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


@pytest.mark.oldest
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
    cut = "--val-fraction 0.1 --shard-tokens 20000".split()
    for name in ("one", "two"):
        r = run("--out", tmp_path / name, "--train-tokenizer", 500, *cut, corpus)
        assert "3 documents" in r.stdout
    files = sorted(
        p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file()
    )
    assert Path("val/val-00000.bin") in files and Path("tokenizer_config.json") in files
    for f in files:
        assert (tmp_path / "one" / f).read_bytes() == (tmp_path / "two" / f).read_bytes(), f
    # its tokenizer is taken again, from the folder, and gives the same shards
    run("--out", tmp_path / "three", "--tokenizer", tmp_path / "one", *cut, corpus)
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


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_folder_with_a_model_or_a_tokenizer_gets_no_data_set(corpus, tokenizer, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(data.DataError, match=f"has a .*{name}.*: choose another folder"):
        data.write_shards([corpus], tmp_path, tokenizer)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]


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
    assert not (tmp_path / "out").exists()


def test_bad_input_is_one_sentence_and_leaves_nothing(corpus, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("hello")
    (tmp_path / "bad.jsonl").write_text('{"text": 5}\n')
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    (tmp_path / "body.jsonl").write_text('{"title": "a", "body": "b"}')
    (tmp_path / "list.jsonl").write_text("[1]")
    (tmp_path / "folder").mkdir()
    for name in ("x.jsonl.zst", "x.txt.xz", "folder/x.jsonl.bz2", "folder/a.txt"):
        (tmp_path / name).write_bytes(b"(\xb5/\xfd")
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
        (
            (*train, tmp_path / "body.jsonl"),
            "line 1 has no text in field 'text'; its fields are "
            "'title', 'body': name the text's field with --field",
        ),
        ((*train, tmp_path / "list.jsonl"), "line 1 is no object with fields"),
        ((*train, tmp_path / "x.jsonl.zst"), "x.jsonl.zst: is compressed, and Python 3.14"),
        ((*train, tmp_path / "x.txt.xz"), "x.txt.xz: is compressed, and of such files .gz is read"),
        ((*train, tmp_path / "folder"), "folder/x.jsonl.bz2: is compressed"),
        ((*train, "--val-fraction", 1, corpus), "fraction"),
        ((*train, "--shard-tokens", 1, corpus), "1 tokens a shard"),
        ((*train, "--val-fraction", 0.5, tmp_path / "short.txt"), "cannot be divided"),
        ((*train, "--eos", "<none>", corpus), "<none>"),
        (("--tokenizer", tmp_path / "gone", corpus), f"--tokenizer {tmp_path}/gone: No such file"),
        (("--tokenizer", tmp_path / "notok.json", corpus), "cannot be read as a tokenizer"),
    ]:
        assert says in run("--out", out, *args, code=2).stderr
        assert not out.exists()
    assert "takes a folder" in run("--out", tmp_path / "short.txt", *train, corpus, code=2).stderr


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    "name, content, want",
    [
        ("a.txt", b"Hello\r\n\xef\xbb\xbfWorld", ["Hello\r\n\ufeffWorld"]),
        ("a.jsonl", b'{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
        ("a.json", b'\n{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
        ("a.json", b'[{"text": "one"},\n{"text": "two"}]', ["one", "two"]),
        ("a.jsonl", b'\n{"text": "one"}\n', ["one"]),
    ],
)
def test_a_byte_order_mark_is_no_text(tokenizer, tmp_path, name, content, want):
    (tmp_path / name).write_bytes(BOM + content)
    s = data.write_shards([tmp_path / name], tmp_path / "o", tokenizer)
    assert documents(tokenizer, shards(s, tmp_path / "o")[0]) == want


def test_zstd_is_read_where_python_has_it(tokenizer, tmp_path, monkeypatch):
    """An object stands for the module of Python 3.14."""
    zstd = types.SimpleNamespace(open=gzip.open, ZstdError=KeyError)
    monkeypatch.setattr("penstock.documents.zstd", zstd)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/x.jsonl.zst").write_bytes(gzip.compress(b'{"text": "small"}'))
    s = data.write_shards([tmp_path / "in"], tmp_path / "o", tokenizer)
    assert documents(tokenizer, shards(s, tmp_path / "o")[0]) == ["small"]


def test_what_is_left_out_is_named(tmp_path):
    for name, content in {
        "a.txt": b"one", "b.json": b"[]", "c.json": b"[]", "d": b"", "e.md": b"caf\xe9"
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    words = ["--out", tmp_path / "o", "--train-tokenizer", 300, tmp_path]
    told = run(*words).stderr
    why = "3 files are not read, being no text by name (.json 2, no suffix 1), the first "
    assert f"penstock data: {why}{tmp_path}/b.json\n" in told
    assert f"penstock data: 1 file is left out: no UTF-8, the first {tmp_path}/e.md\n" in told
    assert run(*words, "--force", "--quiet").stderr == ""


@pytest.fixture(scope="module")
def with_bos(tokenizer):
    """Token 600 begins a text, and 601 ends it."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    t = Tokenizer.from_str(tokenizer.to_str())
    t.add_special_tokens(["<s>", "<end>"])
    ids = [(x, t.token_to_id(x)) for x in ("<s>", "<end>")]
    t.post_processor = TemplateProcessing(single="<s> $A <end>", special_tokens=ids)
    return t


@pytest.mark.oldest
@pytest.mark.parametrize("bos", [True, False])
def test_texts_begin_as_the_tokenizer_begins_them(corpus, with_bos, tmp_path, bos):
    """Once a document, also where it is in several pieces and in both splits."""
    mark = [with_bos.token_to_id("<s>")] if bos else []
    (tmp_path / "t.jsonl").write_text('{"text": "plain words"}\n{"text": "<s> is text"}\n')
    out = tmp_path / "o"
    s = data.write_shards([tmp_path / "t.jsonl", corpus / "a.txt"], out, with_bos, bos=bos)
    with_bos.encode_special_tokens = True
    want = [[*mark, *with_bos.encode(text, add_special_tokens=False).ids, 0]
            for text in ("plain words", "<s> is text", texts(corpus)[0])]  # fmt: skip
    with_bos.encode_special_tokens = False
    assert shards(s, out)[0].tolist() == sum(want, []) and s["bos_token_ids"] == mark
    s = data.write_shards([corpus / "a.txt"], tmp_path / "v", with_bos, bos=bos, val_fraction=0.5)
    both = [shards(s, tmp_path / "v", part)[0] for part in ("train", "val")]
    assert [int((ids == 600).sum()) for ids in both] == [len(mark), 0]


def test_prompts_begin_as_the_tokenizer_begins_them(with_bos, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    for bos in (True, False):
        out = tmp_path / f"o{bos}"
        ids = shards(data.write_shards([tmp_path / "p.jsonl"], out, with_bos, bos=bos), out)[0]
        # what the tokenizer adds at a text's end does not come between the two
        prompt = with_bos.encode("a", add_special_tokens=False).ids
        assert ids.tolist()[:-2] == ([600] if bos else []) + prompt


def test_bad_records_are_left_out_and_counted(tmp_path):
    lines = ["{", '{"id": 1}', '{"text": "one"}', "{", '{"text": 5}', "[", '{"text": "two"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    words = ["--train-tokenizer", 300, "--skip-bad", tmp_path / "a.jsonl"]
    told = run("--out", tmp_path / "o", *words).stderr
    about = json.loads((tmp_path / "o/dataset.json").read_text())
    assert about["documents"] == 2 and list(about["bad_records"].values()) == [2, 1, 1, 1]
    assert "2 records are left out: is not JSON (Expecting property name" in told
    assert "1 record is left out: has no text in field 'text'; its fields are 'id'\n" in told
    (tmp_path / "a.jsonl").write_text("{\n{\n")
    told = run("--out", tmp_path / "p", *words, code=2).stderr
    assert "no text" in told and not (tmp_path / "p").exists()


def test_a_folder_is_left_as_it_was_found(corpus, tokenizer, tmp_path, monkeypatch):
    """A refusal removes what it made; the next command removes what a killed one left; two
    commands never write into one folder."""
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{\n')
    with pytest.raises(data.DataError, match="line 2 is not JSON"):
        data.write_shards([tmp_path / "bad.jsonl"], tmp_path / "a/b/c", tokenizer)
    assert not (tmp_path / "a").exists()
    (tmp_path / "o/.penstock-data-killed/val").mkdir(parents=True)
    (tmp_path / "o/mine.md").write_text("notes")
    with pytest.raises(data.DataError, match="line 2 is not JSON"):
        data.write_shards([tmp_path / "bad.jsonl"], tmp_path / "o", tokenizer)
    assert [p.name for p in (tmp_path / "o").iterdir()] == ["mine.md"]
    with data._work_folder(tmp_path / "o"):
        with pytest.raises(data.DataError, match="another `penstock data` writes into it"):
            data.write_shards([corpus / "b.md"], tmp_path / "o", tokenizer)

    def late(tokenizer):
        (tmp_path / "late").mkdir()
        (tmp_path / "late/dataset.json").write_text("of another command")
        return 600

    monkeypatch.setattr(data, "vocabulary_size", late)
    with pytest.raises(data.DataError, match="another command wrote into it meanwhile"):
        data.write_shards([corpus / "b.md"], tmp_path / "late", tokenizer)
    assert (tmp_path / "late/dataset.json").read_text() == "of another command"


def test_a_line_has_a_limit(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.documents.MAX_RECORD_BYTES", 99)
    monkeypatch.setattr("penstock.documents.READ_BYTES", 7)
    text = json.dumps({"text": "x" * 86})
    (tmp_path / "a.jsonl").write_text(f'{text}\n{{"text": "{"x" * 500}"}}\n{text}')
    with pytest.raises(data.DataError, match="line 2 has more than 99 bytes: divide it"):
        data.write_shards([tmp_path / "a.jsonl"], tmp_path / "o", tokenizer)
    s = data.write_shards([tmp_path / "a.jsonl"], tmp_path / "o", tokenizer, skip_bad=True)
    assert s["documents"] == 2 and s["bad_records"] == {"has more than N bytes: divide it": 1}


def test_a_batch_of_parquet_rows_is_bounded():
    def metadata(*groups):
        groups = [types.SimpleNamespace(total_byte_size=b, num_rows=n) for b, n in groups]
        return types.SimpleNamespace(num_row_groups=len(groups), row_group=lambda i: groups[i])

    for groups, rows in (
        ([], 1024),
        ([(1000, 10), (0, 0)], 1024),
        ([(1000, 10), (8 << 30, 512)], 4),
        ([(1 << 30, 1)], 1),
    ):
        assert _batch_rows(metadata(*groups)) == rows


def test_what_is_encoded_whole_has_a_limit(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.documents.MAX_WHOLE_CHARS", 9)
    (tmp_path / "a.jsonl").write_text('{"prompt": "12345", "completion": "67890"}')
    with pytest.raises(data.DataError, match="line 1 has 10 characters, and a conversation, or"):
        data.write_shards([tmp_path / "a.jsonl"], tmp_path / "o", tokenizer)


def broken(tokenizer, **parts):
    return json.dumps(json.loads(tokenizer.to_str()) | parts)


@pytest.mark.parametrize(
    "parts, says",
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, "cannot be read as"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "a"}},
         "cannot be read as a tokenizer: index out of bounds"),
        ({"post_processor": {"type": "TemplateProcessing", "single": ["<s>", "A"], "pair": [],
                             "special_tokens": {}}}, "cannot be read as a tokenizer"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 2**31, "</s>": 1}, "unk_token": "a"}},
         "the token 'a' has the id 2147483648, above the largest id, 2147483646"),
        ({"model": {"type": "WordLevel", "vocab": {}, "unk_token": "a"}, "added_tokens": []},
         "has no token"),
        ({"model": {"type": "WordLevel", "vocab": {"</s>": 1}, "unk_token": "a"}},
         "the tokenizer cannot encode the text: WordLevel error: Missing [UNK]"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?:x+x+)+y"},
                            "behavior": "Isolated", "invert": False}},
         "cannot encode the text: Onig: Regex search error: retry-limit-in-match over"),
    ],
    ids=["load", "normalize", "special token", "id", "empty", "unknown", "backtracking"],
)  # fmt: skip
def test_a_broken_tokenizer_is_one_sentence(tokenizer, tmp_path, capfd, parts, says):
    (tmp_path / "t.json").write_text(broken(tokenizer, **parts))
    (tmp_path / "a.txt").write_text("a b " + "x" * 30)
    words = ["--out", tmp_path / "o", "--tokenizer", tmp_path / "t.json", tmp_path / "a.txt"]
    assert data.main([str(w) for w in words]) == 2
    error = capfd.readouterr().err
    assert says in error and error.count("\n") == 1 and not (tmp_path / "o").exists()


def test_a_tokenizer_never_cuts_a_document(tokenizer, tmp_path):
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "t.json").write_text(broken(tokenizer, truncation=cut))
    text = "The quick brown fox jumps over the lazy dog."
    t = data.load_tokenizer(tmp_path / "t.json")
    assert t.encode(text).ids == tokenizer.encode(text).ids


def test_a_long_word_is_learned_in_parts():
    rest = "a few words, 多くの文字。" * 50
    for run_ in ("abc" * 1000, "世界" * 700, "--_" * 800, " \n\t" * 600):
        parts = list(cut_words(rest + run_ + rest))
        assert "".join(parts) == rest + run_ + rest
        assert 3 <= len(parts) <= 14 and max(map(len, parts[1:-1])) <= WORD
    assert list(cut_words(rest)) == [rest]


def test_ctrl_c_ends_the_training_of_a_tokenizer(tmp_path):
    """The word is learned whole here, which takes minutes."""
    code = (
        "import random, sys; from penstock import data, tokenizer\n"
        "r = random.Random(1)\n"
        "open('t.txt', 'w').write(''.join(r.choices('abcdefghijklmnop', k=1 << 20)))\n"
        "def cut(text):\n    yield text\n    print('trains', flush=True)\n"
        "tokenizer.cut_words = cut\n"
        "sys.exit(data.main(['--out', 'o', '--train-tokenizer', '20000', '--quiet', 't.txt']))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as p:  # fmt: skip
        assert p.stdout.readline() == "trains\n"
        time.sleep(0.3)
        p.send_signal(signal.SIGINT)
        _, error = p.communicate(timeout=HANGS_S)
    assert (p.returncode, error) == (130, "penstock data: stopped; nothing was written\n")
    assert not (tmp_path / "o").exists()


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
    code = "import sys, penstock.data; sys.exit(any(m.startswith(('penstock._lib', 'cffi')) for m in sys.modules))"
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

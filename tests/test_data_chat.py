"""penstock.data on conversations, pairs and Parquet: the tokens of transformers' chat templates,
masks on answers, every refusal."""

import functools
import gzip
import json
import signal
import sys
import threading
import time
import types

import numpy as np
import pytest
from penstock import Dataset, data, rendering
from penstock.chat import ChatTemplate
from penstock.documents import Piece
from penstock.encode import Encoder
from penstock.shards import BEGINS_DOCUMENT, read_shard
from test_data_py import run

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{%- if tools %}{{ tools | tojson }}{% endif %}\n"
    "{% for m in messages %}\n"
    "    {%- if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}\n"
    "{{ '<|im_start|>' + m.role + '\n' }}\n"
    "    {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as some models do: it drops what older answers thought
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def say(*texts, system=None):
    roles = ["user", "assistant"] * len(texts)
    turns = [{"role": r, "content": t} for r, t in zip(roles, texts)]
    return ([{"role": "system", "content": system}] if system else []) + turns


CONVERSATIONS = [
    say("What is 2+2?", "It is 4.", "And doubled?", " 8, naïvely 世界 "),
    say("Hello", "Hi! <|im_start|> is a token\n", system="Be brief."),
    say("Nobody answers"),
    say("once more", "with feeling 🚀"),
]


TURNS = say("hi", "ho")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer's directory; a test writes its template."""
    from tokenizers import AddedToken

    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "t.txt").write_text("the quick brown fox says hello: what is it? " * 50)
    t = data.train_tokenizer([folder / "t.txt"], 300)
    t.add_special_tokens([AddedToken(x, special=True) for x in ("<|im_start|>", "<|im_end|>")])
    t.save(str(folder / "tokenizer.json"))
    return folder


def configure(folder, template, as_file=False):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    config |= {"bos_token": {"content": "<|endoftext|>", "__type": "AddedToken"}}
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if as_file:
        (folder / "chat_template.jinja").write_text(template)
    else:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def jsonl(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def read_all(out, vocab=400):
    """What the native reader gives as one sequence: tokens, and the targets of all but the first."""
    ds = Dataset(out, vocab)
    assert ds.n_shards == 1
    tokens, targets = ds.read(ds.n_tokens - 1, 0)
    ids = read_shard(out / "train-00000.bin")
    np.testing.assert_array_equal(ids[:-1], tokens)
    return np.asarray(ids, np.int64), np.r_[-1, targets]


@pytest.mark.oldest
@pytest.mark.parametrize(
    "template, as_file",
    [(CHATML, False), (CHATML, True), (MARKED, True)],
    ids=["in the config", "a file", "with marks"],
)
def test_a_batch_is_the_chat_templates_output_token_for_token(folder, tmp_path, template, as_file):
    from transformers import PreTrainedTokenizerFast

    configure(folder, template, as_file)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    encode = functools.partial(theirs.apply_chat_template, return_dict=False)
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    records = [{"messages": c, "tools": tools if i % 2 else None}
               for i, c in enumerate(CONVERSATIONS)]  # fmt: skip
    source = jsonl(tmp_path / "c.jsonl", records)
    r = run("--out", tmp_path / "o", "--tokenizer", folder, source)
    assert "4 documents" in r.stdout and "are targets" in r.stdout
    want, learned = [], []
    for record in records:
        ids = encode(record["messages"], tools=record["tools"])
        want.append(ids)
        if template == MARKED:
            marks = theirs.apply_chat_template(
                record["messages"],
                tools=record["tools"],
                return_dict=True,
                return_assistant_tokens_mask=True,
            )["assistant_masks"]
        else:  # the tokens after each generation prompt, up to the next message
            marks = np.zeros(len(ids), int)
            for i, m in enumerate(record["messages"]):
                if m["role"] == "assistant":
                    a = len(encode(record["messages"][:i], add_generation_prompt=True))
                    marks[a : len(encode(record["messages"][: i + 1]))] = 1
        learned.append(marks)
    ids, targets = read_all(tmp_path / "o")
    assert ids.tolist() == sum(want, [])
    np.testing.assert_array_equal(targets, np.where(np.concatenate(learned), ids, -1))
    assert 0 < np.concatenate(learned).sum() < len(ids)
    flags = np.fromfile(tmp_path / "o/train-00000.mask", np.uint8)[1024:]
    begins = np.cumsum([0, *map(len, want)])[:-1]
    assert np.flatnonzero(flags & BEGINS_DOCUMENT).tolist() == begins.tolist()
    assert (tmp_path / "o/chat_template.jinja").exists() == as_file
    s = json.loads((tmp_path / "o/dataset.json").read_text())["train"]
    assert (s["tokens"], s["targets"]) == (len(ids), int((targets >= 0).sum()))


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "with marks"])
def test_the_last_answer_or_all_may_be_learned(folder, template):
    t = ChatTemplate(configure(folder, template))
    chat = CONVERSATIONS[0]
    text, spans = t.render_targets(chat, targets="answers")
    assert len(spans) == 2 and t.render_targets(chat, targets="last") == (text, spans[-1:])
    assert [text[a:b].split("<|im_end|>")[0].strip() for a, b in spans] == [
        chat[1]["content"],
        chat[3]["content"].strip(),
    ]
    assert t.render_targets(chat, targets="all") == (text, [(0, len(text))])
    assert t.render_targets(chat, first=2) == (text, spans[1:])


def test_pairs_learn_the_completion(folder, tmp_path):
    from tokenizers import Tokenizer

    configure(folder, CHATML)
    t = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pairs = [{"prompt": "what is <|im_start|>", "completion": " it?"}, {"prompt": "", "completion": "fox"}]  # fmt: skip
    source = jsonl(tmp_path / "p.jsonl", [*pairs, {"prompt": "", "completion": ""}])
    for targets in ("answers", "all"):
        out = tmp_path / targets
        run("--out", out, "--tokenizer", folder, "--targets", targets, source)
        want, learned, eos = [], [], t.token_to_id("<|im_end|>")
        for p in pairs:
            a, b = (t.encode(p[k]).ids for k in ("prompt", "completion"))
            want += [*a, *b, eos]
            learned += [0, *[targets == "all"] * (len(a) - 1), *[1] * (len(b) + 1)][
                -len(a + b) - 1 :
            ]
            learned[-len(a + b) - 1] = 0
        ids, got = read_all(out)
        assert ids.tolist() == want
        np.testing.assert_array_equal(got, np.where(learned, ids, -1))
    # of messages: the conversation, of which only the completion's answers are learned
    chat = CONVERSATIONS[0]
    for name, record in (("a", {"prompt": chat[:3], "completion": chat[3:]}), ("b", {"messages": chat})):  # fmt: skip
        targets = "answers" if name == "a" else "last"
        source = jsonl(tmp_path / f"{name}.jsonl", [record])
        run("--out", tmp_path / name, "--tokenizer", folder, "--targets", targets, source)
    for file in ("train-00000.bin", "train-00000.mask"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def blank_before(kind):
    """A tokenizer that puts a blank before a text. normalizer: as that of Llama 2 and Mistral.
    collapse: as transformers makes that of T5 and ALBERT, which lose line ends and second blanks.
    bytes: a byte-level one that is told to, with a token for a blank and a line end."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    special = ["<unk>", "</s>"]
    blank = decoders.Replace("▁", " ")
    if kind == "normalizer":
        t = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        t.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        t.decoder = decoders.Sequence([blank, decoders.ByteFallback(), decoders.Fuse()])
        special += [f"<0x{i:02X}>" for i in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    elif kind == "bytes":
        t = Tokenizer(models.BPE())
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        t.decoder = decoders.ByteLevel()
        bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=bytes_, show_progress=False
        )
    else:
        t = Tokenizer(models.Unigram())
        t.normalizer = normalizers.Replace("\n", " ")  # a line end is no token of its own
        if kind == "collapse":
            t.normalizer = normalizers.Sequence(
                [
                    t.normalizer,
                    normalizers.Strip(left=False, right=True),
                    normalizers.Replace(Regex(" {2,}"), " "),
                ]
            )
        t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        t.decoder = decoders.Sequence([blank, decoders.Fuse()])
        trainer = trainers.UnigramTrainer(
            vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    lines = ["Q: what is it? A: yes def f(x): return 2+2=4 hello", "yes \n2 \n", "hello."]
    t.train_from_iterator(lines * 50, trainer)
    assert kind != "bytes" or t.encode("\n").tokens == ["ĠĊ"]
    return t


@pytest.mark.parametrize("kind", ["normalizer", "unigram", "collapse", "bytes"])
def test_no_blank_comes_between_a_prompt_and_its_completion(tmp_path, kind):
    t = blank_before(kind)
    pairs = [
        ("Q: what is it? A:", " yes"),
        ("2+2=", "4"),
        ("def f(", "x): return x"),
        ("hel", "lo"),
        ("", "hello"),
    ]
    source = jsonl(tmp_path / "p.jsonl", [{"prompt": a, "completion": b} for a, b in pairs])
    data.write_shards([source], tmp_path / "out", t)
    ids, targets = read_all(tmp_path / "out")
    eos, at = t.token_to_id("</s>"), 0
    for prompt, completion in pairs:
        end = ids.tolist().index(eos, at)
        n = at + len(t.encode(prompt).ids)
        learned = targets[at : end + 1] >= 0
        # the first token of a document has none before it
        assert learned.tolist() == [at < i and n <= i for i in range(at, end + 1)]
        assert t.decode(ids[at:end].tolist()).removeprefix(" ") == prompt + completion
        at = end + 1


@pytest.mark.parametrize("kind", ["normalizer", "unigram", "collapse", "bytes"])
def test_a_completion_is_encoded_once(kind, monkeypatch):
    """Line ends are lost by two of these tokenizers: they are not tried before each text."""
    t, encoded = blank_before(kind), []
    encoder = Encoder(t, [], t.token_to_id("</s>"), "answers")
    monkeypatch.setattr(
        encoder, "_with_offsets", lambda texts: encoded.extend(texts) or t.encode_batch(texts)
    )
    batch = [Piece(i, "pair", "Q: what", completion=x) for i, x in enumerate(("yes", "it is"))]
    assert len(list(encoder.pieces(batch, -1))) == len(encoded) == 2


def test_a_token_of_prompt_and_completion_is_the_completions(tmp_path):
    """This tokenizer has whole words alone. It does not know "a": that tells nothing of blanks."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<unk>": 0, "</s>": 1, "▁hello": 2, "▁yes": 3, "hello": 4}
    t = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    records = [("yes hel", "lo"), ("yes", " hello yes"), ("yes", "")]
    source = jsonl(tmp_path / "p.jsonl", [{"prompt": a, "completion": b} for a, b in records])
    data.write_shards([source], tmp_path / "out", t)
    ids, targets = read_all(tmp_path / "out")
    assert ids.tolist() == [3, 2, 1, 3, 2, 3, 1, 3, 1]
    assert (targets >= 0).astype(int).tolist() == [0, 1, 1, 0, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("kind", ["normalizer", "bytes"])
def test_no_blank_comes_between_the_pieces_of_a_text(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("penstock.data.BATCH_CHARS", 1 << 17)  # of two pieces
    t = blank_before(kind)
    text = "hello it is\nx: 2\n" * (7 * (1 << 16) // 18)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("hello")
    data.write_shards([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out", t)
    eos, encode = t.token_to_id("</s>"), lambda s: t.encode(s, add_special_tokens=False).ids
    ids = read_shard(tmp_path / "out/train-00000.bin").tolist()
    assert ids == [*encode(text), eos, *encode("hello"), eos]


def test_alpacas_records_are_conversations(folder, tmp_path):
    """With input, system and history as LLaMA-Factory reads them; an array in a .json file, and a
    record a line in one, are read as .jsonl is; and all of them compressed."""
    configure(folder, CHATML)
    records = [
        {"instruction": "Add.", "input": "2+2", "output": "4"},
        {"instruction": "Hello", "input": "", "output": "Hi!", "system": "Be brief."},
        {"instruction": "And doubled?", "output": "8", "history": [["2+2?", "4"]]},
    ]
    messages = [
        say("Add.\n2+2", "4"),
        say("Hello", "Hi!", system="Be brief."),
        say("2+2?", "4", "And doubled?", "8"),
    ]
    lines = "".join(json.dumps(r) + "\n" for r in records)
    array = json.dumps(records, indent=1)
    expected = jsonl(tmp_path / "expected.jsonl", [{"messages": m} for m in messages])
    run("--out", tmp_path / "expected", "--tokenizer", folder, expected)
    for name, content in (("a.jsonl", lines), ("b.json", lines), ("c.json", array)):
        (tmp_path / name).write_text(content)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
        for source in (tmp_path / name, tmp_path / f"{name}.gz"):
            out = tmp_path / f"out-{source.name}"
            run("--out", out, "--tokenizer", folder, source)
            for file in ("train-00000.bin", "train-00000.mask"):
                found = (out / file).read_bytes()
                assert found == (tmp_path / "expected" / file).read_bytes(), (source, file)


def test_text_beside_conversations_is_learned_whole(folder, tmp_path):
    configure(folder, CHATML)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("quick fox")
    jsonl(tmp_path / "in/b.jsonl", [{"messages": CONVERSATIONS[3]}])
    run("--out", tmp_path / "o", "--tokenizer", folder, tmp_path / "in")
    ids, targets = read_all(tmp_path / "o")
    eos = ids.tolist().index(data.load_tokenizer(folder).token_to_id("<|im_end|>"))
    assert (targets[1 : eos + 1] == ids[1 : eos + 1]).all() and (targets[[0, eos + 1]] == -1).all()


def test_validation_never_divides_a_conversation(folder, tmp_path):
    configure(folder, CHATML)
    chats = [say(f"question {i}", f"answer {i}") for i in range(60)]
    source = jsonl(tmp_path / "c.jsonl", [{"messages": c} for c in chats])
    run("--out", tmp_path / "o", "--tokenizer", folder, "--val-fraction", 0.2, source)
    t, seen = data.load_tokenizer(folder), []
    for file in ("train-00000.bin", "val/val-00000.bin"):
        flags = np.fromfile((tmp_path / "o" / file).with_suffix(".mask"), np.uint8)[1024:]
        ids = read_shard(tmp_path / "o" / file)
        for part in np.split(ids, np.flatnonzero(flags & BEGINS_DOCUMENT)[1:]):
            seen.append(t.decode(part.tolist(), skip_special_tokens=False))
    template = ChatTemplate(folder)
    assert sorted(seen) == sorted(template.render(c) for c in chats)
    run("--out", tmp_path / "o", "--tokenizer", folder, "--force", folder / "t.txt")
    assert not list((tmp_path / "o").rglob("*.mask"))


def test_bad_conversations_are_one_sentence_and_leave_nothing(folder, tmp_path):
    good, out = {"messages": CONVERSATIONS[0]}, tmp_path / "out"
    for template, records, says in [
        (CHATML, [good, {"messages": []}], "line 2 has no list of messages"),
        (CHATML, [good, {"text": "x"}], "line 2 has no list of messages in 'messages'"),
        (CHATML, [good, [1]], "line 2 is no object"),
        (CHATML, [{"messages": [{"content": "x"}]}], "message 1 is no object with a 'role'"),
        (CHATML, [{"messages": [{"role": "user"}]}], "none of the 8 tokens is a target"),
        (CHATML, [{"messages": [{"role": "user", "content": 5}]}, 7], "line 2 is no object"),
        (MARKED, [{"messages": [{"role": "x", "content": ""}]}], "line 1: the chat template fails: no role x"),
        (CHATML, [{"prompt": "x", "completion": 1}], "line 1 has no text in field 'completion'"),
        (CHATML, [{"messages": say("\ud800")}], "surrogate"),
        (None, [good], "has no chat template"),
        ("{% if %}", [good], "is no jinja2"),
    ]:  # fmt: skip
        configure(folder, template)
        source = jsonl(tmp_path / "c.jsonl", records)
        assert says in run("--out", out, "--tokenizer", folder, source, code=2).stderr
        assert not out.exists()
    r = run("--out", out, "--train-tokenizer", 300, jsonl(tmp_path / "c.jsonl", [good]), code=2)
    assert "is a conversation: give the tokenizer of a chat model" in r.stderr


def test_parquet_is_read_as_jsonl_is_or_asks_for_pyarrow(folder, tmp_path, monkeypatch):
    """Where pyarrow is missing, an object stands for it that has the calls that are used."""
    configure(folder, CHATML)
    records = [{"messages": c} for c in CONVERSATIONS]
    jsonl(tmp_path / "c.jsonl", records)
    (tmp_path / "c.parquet").write_bytes(b"no Parquet")
    tokenizer, template = data.load_tokenizer(folder), ChatTemplate(folder)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(data.DataError, match="need pyarrow: pip install pyarrow"):
        data.write_shards([tmp_path / "c.parquet"], tmp_path / "n", tokenizer, template=template)
    monkeypatch.undo()
    try:
        import pyarrow
        import pyarrow.parquet

        with pytest.raises(data.DataError, match="cannot be read as Parquet"):
            data.write_shards([tmp_path / "c.parquet"], tmp_path / "n", tokenizer)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "c.parquet")
    except ImportError:

        class ParquetFile:
            metadata = types.SimpleNamespace(num_rows=len(records), num_row_groups=0)

            def __init__(self, path):
                pass

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def iter_batches(self, batch_size):
                return [types.SimpleNamespace(to_pylist=lambda: records)]

        parquet = types.SimpleNamespace(ParquetFile=ParquetFile)
        pyarrow = types.SimpleNamespace(parquet=parquet, ArrowException=ValueError)
        monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    for name in ("c.jsonl", "c.parquet"):
        done = []
        out = tmp_path / name.replace(".", "-")
        data.write_shards(
            [tmp_path / name], out, tokenizer, template=template, on_bytes=done.append
        )
        assert sum(done) == (tmp_path / name).stat().st_size
    for file in ("train-00000.bin", "train-00000.mask"):
        one, two = ((tmp_path / d / file).read_bytes() for d in ("c-jsonl", "c-parquet"))
        assert one == two


# ---- several processes ---------------------------------------------------------------------------


@pytest.fixture
def many(folder, tmp_path):
    """900 conversations of a folder with the template CHATML: more than one batch of each of two
    processes."""
    (folder / "chat_template.jinja").write_text(CHATML)
    records = [{"messages": say(f"question {i}", f"answer {i * i}")} for i in range(900)]
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path, records


def render(folder, path, processes, **options):
    template = ChatTemplate(folder, **options)
    reader = data.Reader(data.find_sources([path]), template=template, processes=processes)
    return [(p.document, p.text, p.spans) for p in reader]


def test_bad_records_of_all_processes_are_counted(folder, many):
    path, records = many
    for i in (3, 700):
        records[i] = {"messages": [{"content": "no role"}]}
    path.write_text("".join(json.dumps(r) + "\n" for r in [{"id": 1}, *records]))
    reader = data.Reader(
        data.find_sources([path]), template=ChatTemplate(folder), processes=2, skip_bad=True
    )
    assert len(list(reader)) == 898 and reader.n_documents == 898
    assert list(reader.bad.items()) == [
        ("has no text in field 'text'; its fields are 'id'", 1),
        ("message N is no object with a 'role'", 2),
    ]


def test_several_processes_render_the_same_in_the_same_order(folder, many, monkeypatch):
    path, records = many
    started = []
    start = rendering.ProcessPoolExecutor

    def count(*args):
        started.append(args)
        return start(*args)

    monkeypatch.setattr(rendering, "ProcessPoolExecutor", count)
    alone = render(folder, path, 1)
    assert len(alone) == 900 and not started
    assert render(folder, path, 2) == alone and len(started) == 1
    path.write_text("".join(json.dumps(r) + "\n" for r in records[:256]))
    assert render(folder, path, 2) == alone[:256] and len(started) == 1


def test_a_wrong_record_of_another_process_is_named(folder, many):
    path, records = many
    records[700] = {"messages": [{"content": "no role"}]}
    records[800] = {"messages": []}
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    with pytest.raises(data.DataError, match="line 701: message 1 is no object with a 'role'"):
        render(folder, path, 2)


def test_a_process_that_is_killed_ends_the_command_in_one_sentence(
    folder, many, tmp_path, monkeypatch, capsys
):
    class Killed(rendering.ProcessPoolExecutor):
        def submit(self, *args):
            future = super().submit(*args)
            for process in self._processes.values():
                process.kill()
            return future

    monkeypatch.setattr(rendering, "ProcessPoolExecutor", Killed)
    monkeypatch.setattr(data.os, "sched_getaffinity", lambda pid: {0, 1})
    words = ["--out", tmp_path / "o", "--tokenizer", folder, many[0]]
    assert data.main([str(w) for w in words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("penstock data: a process that renders conversations was killed")
    assert error.count("\n") == 1 and not (tmp_path / "o").exists()


ENDLESS = (
    "{% set r = range(99999) %}{% if messages[0].content == 'question 700' %}"
    "{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}{% endif %}" + CHATML
)


def test_an_endless_template_ends_in_a_process_and_by_ctrl_c(folder, many):
    """The limit of time, and the settings, are those of each process. Ctrl-C ends the processes."""
    (folder / "chat_template.jinja").write_text(ENDLESS)
    with pytest.raises(
        data.DataError, match="line 701: the chat template fails: .* than 0.5 s for"
    ):
        render(folder, many[0], 2, limit_s=0.5)
    ctrl_c = threading.Timer(
        2.0, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]
    )
    begun = time.monotonic()
    ctrl_c.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            render(folder, many[0], 2, limit_s=120)
            time.sleep(60)
    finally:
        ctrl_c.cancel()
    assert time.monotonic() - begun < 300  # it does not wait for the template


@pytest.mark.parametrize(
    "record, message",
    [
        (
            {"messages": [{"role": "user", "weight": 0.5}]},
            "message 1 has the weight 0.5: give 0 or 1",
        ),
        (
            {"conversations": [{"from": "who", "value": "x"}]},
            "message 1 is from 'who': give one of h",
        ),
        ({"messages": "[1"}, "line 1: 'messages' is text that is no JSON"),
        (
            {"messages": 5, "id": 1},
            "has no list of messages in 'messages': it has 'messages', 'id'",
        ),
        (
            {"messages": "[" * 100_000 + "]" * 100_000},
            "line 1: 'messages' is text that is no JSON (it is nested too deeply)",
        ),
        ({"messages": TURNS, "tools": "{}x"}, "line 1: 'tools' is text that is no JSON"),
        ({"messages": TURNS, "tools": [1]}, "line 1: 'tools' is no list of objects"),
        (
            {"messages": TURNS, "chat_template_kwargs": [1]},
            "'chat_template_kwargs' is no object of",
        ),
        (
            {"messages": TURNS, "chat_template_kwargs": {"tools": 1}},
            "names 'tools', which is no var",
        ),
        ({"ask": "x", "reply": "y"}, "its fields are 'ask', 'reply': name the"),
        ({"conversations": [{"from": [], "value": "x"}]}, "line 1: message 1 is no object with a"),
        ({"instruction": 1, "output": "x"}, "line 1 has no text in 'instruction'"),
        ({"instruction": "q", "output": "x", "history": ["q"]}, "'history' is no list of pairs"),
        ({"instruction": "q", "output": "x", "history": 5}, "'history' is no list of pairs"),
        ("[" * 100_000 + "]" * 100_000, "JSON that is nested too deeply"),
    ],
)
def test_odd_records_are_refused_in_one_sentence(folder, tmp_path, capsys, record, message):
    configure(folder, CHATML)
    (tmp_path / "a.jsonl").write_text(record if isinstance(record, str) else json.dumps(record))
    words = ["--out", tmp_path / "o", "--tokenizer", folder, tmp_path / "a.jsonl"]
    assert data.main([str(w) for w in words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1

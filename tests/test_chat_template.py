"""Chat templates and what records have for them: the ends that published templates write, the forms
of conversations, tools, variables, and templates that do harm."""

import json
import re
import signal

import pytest
from penstock import data
from penstock.chat import ChatTemplate
from penstock.documents import record_kind
from penstock.rendering import render_record
from test_data_chat import (
    CHATML,
    FORGETFUL,
    MARKED,
    TURNS,
    configure,
    folder,
    jsonl,
    read_all,
    say,
)

pytestmark = pytest.mark.oldest
assert folder  # the fixture


# ---- how templates end ---------------------------------------------------------------------------

# One template for each way in which published ones end answers and texts, with marks.
HEAD = "{% for m in messages %}{% if m.role == 'assistant' %}"
OTHER = "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n"
ANSWER = "<|im_start|>assistant\n{% generation %}{{ m.content }}"
END = "{% endgeneration %}"
MARKED_END = (
    "{% elif messages[-1].role == 'assistant' %}{% generation %}<|endoftext|>{% endgeneration %}"
    "{% else %}<|endoftext|>{% endif %}"
)
ENDS = {
    "turns": f"{HEAD}{ANSWER}<|im_end|>\n{END}{OTHER}{ASK}{{% endif %}}",
    # Phi-3; Phi-4-mini has no line ends
    "of the text": f"{HEAD}{ANSWER}<|im_end|>\n{END}{OTHER}{ASK}{MARKED_END}",
    "of the text, without line ends": (HEAD + ANSWER + "<|im_end|>" + END + OTHER + ASK).replace("\n", "")
    + MARKED_END,
    # OLMo: the last answer has no line end
    "without a line end": f"{HEAD}{ANSWER}<|im_end|>{END}{{% if not loop.last %}}{{{{ '\n' }}}}{{% endif %}}"
    f"{OTHER}{ASK}{{% endif %}}",
    # gpt-oss: the last answer ends with another token, which is what a model writes
    "with another token": f"{HEAD}{ANSWER}{END}{{% if loop.last and not add_generation_prompt %}}"
    f"{{% generation %}}<|endoftext|>{END}{{% else %}}<|im_end|>\n{{% endif %}}{OTHER}{ASK}{{% endif %}}",
    # Mistral: no generation prompt
    "of answers alone": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %} {{ m.content }}"
    f"<|im_end|>{END}{{% else %}}<|im_start|>{{{{ m.content }}}}<|im_start|>{{% endif %}}{{% endfor %}}",
}  # fmt: skip


def mask_of(offsets, spans):
    return [int(any(a <= begin < b for a, b in spans)) for begin, _ in offsets]


@pytest.mark.parametrize("name", ENDS)
def test_the_ends_of_templates_are_masked_as_transformers_masks_them(folder, tmp_path, name):
    """The same template without marks has the targets that transformers finds by the marks; also
    where a user speaks last."""
    from transformers import PreTrainedTokenizerFast

    marked = ChatTemplate(configure(folder, ENDS[name]))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    plain = re.sub("{% (end)?generation %}", "", ENDS[name])
    plain = ChatTemplate(configure(folder, plain))
    texts = ["a", "b\n", "\nc <|im_end|>", "d", "e", "f"]
    for chat in (say(*texts[:n], system="s" if n > 3 else None) for n in range(1, 7)):
        text, spans = plain.render_targets(chat)
        n = sum(m["role"] == "assistant" for m in chat)
        assert len(spans) == n and plain.render_targets(chat, targets="last")[1] == spans[-1:]
        offsets = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = offsets["offset_mapping"]
        options = dict(return_dict=True, return_assistant_tokens_mask=True)
        want = theirs.apply_chat_template(chat, **options)
        assert text == theirs.apply_chat_template(chat, tokenize=False)
        assert mask_of(offsets, spans) == want["assistant_masks"]
        assert mask_of(offsets, marked.render_targets(chat)[1]) == want["assistant_masks"]
        last = marked.render_targets(chat, targets="last")[1]
        assert mask_of(offsets, last) == mask_of(offsets, spans[-1:])
        if n > 1:  # the record itself excludes an answer
            left_out = next(i for i, m in enumerate(chat) if m["role"] == "assistant")
            chat = [m | {"weight": int(i != left_out)} for i, m in enumerate(chat)]
            assert plain.render_targets(chat) == (text, spans[1:])
            found = marked.render_targets(chat)[1]
            assert mask_of(offsets, found) == mask_of(offsets, spans[1:])


def test_what_cannot_be_divided_is_refused_with_a_way_out(folder):
    """A template that rewrites older answers, one whose generation prompt begins no answer, and one
    whose marks move: each says what helps in its case."""
    chat = say("a", "b", "c", "d")
    thinks = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    moves = (
        "{% for m in messages %}{% generation %}{{ loop.revindex }}{% endgeneration %}{% endfor %}"
    )
    for template, turns, targets, says in [
        (FORGETFUL, chat, "answers", "writes message 2 in another way .* with --targets last"),
        (FORGETFUL, chat[:3], "last", "message 2 .* leave out the messages after the last answer"),
        (thinks, chat[:2], "last", "begins message 2 .* --chat-template-kwargs"),
        (moves, chat, "last", "writes message 3 in another way .* --targets answers"),
    ]:
        template = ChatTemplate(configure(folder, template))
        with pytest.raises(data.DataError, match=says):
            template.render_targets(turns, targets=targets)
        assert template.render_targets(turns, targets="all")[1]


# ---- what records have ---------------------------------------------------------------------------


def shown(folder, record, targets="answers", **options):
    """The text and the texts of its targets."""
    template = ChatTemplate(folder, **options)
    _, text, spans = render_record(template, targets, record_kind(record, "text"), record, "here")
    return text, [text[a:b] for a, b in spans]


CALL = '{"name": "f", "arguments": {"x": 1}}'
CALLS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": CALL},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "three"},
]


def sharegpt(*turns):
    return [{"from": role, "value": text} for role, text in turns]


@pytest.mark.parametrize(
    "record, messages",
    [
        ({"messages": json.dumps(TURNS)}, TURNS),
        ({"conversation": TURNS}, TURNS),
        ({"messages": None, "conversations": json.dumps(TURNS)}, TURNS),
        ({"messages": sharegpt(("human", "hi"), ("gpt", "ho"))}, TURNS),
        ({"messages": [{"role": "human", "content": "hi"}, {"role": "gpt", "content": "ho"}]}, TURNS),
        *(
            ({"conversations": sharegpt((a, "hi"), (b, "ho"))}, TURNS)
            for a, b in (("user", "assistant"), ("human", "chatgpt"), ("human", "bard"), ("human", "bing"))
        ),
        ({"conversations": sharegpt(("human", "hi"), ("function_call", CALL), ("observation", "3"), ("gpt", "three"))}, CALLS),
        ({"conversations": sharegpt(("human", "hi"), ("gpt", "ho")), "system": "s"}, say("hi", "ho", system="s")),
        ({"question": "hi", "answer": "ho"}, TURNS),
        ({"instruction": "hi", "response": "ho", "context": ""}, TURNS),
        ({"instruction": "hi", "response": "ho", "context": "c"}, say("hi\nc", "ho")),
        ({"messages": [m | {"name": None, "tool_calls": None} for m in TURNS]}, TURNS),
    ],
)  # fmt: skip
def test_records_of_many_formats_are_conversations(folder, record, messages):
    configure(folder, CHATML)
    text, answers = shown(folder, record)
    assert (text, answers) == shown(folder, {"messages": messages})
    assert len(answers) == sum(m["role"] == "assistant" for m in messages)


def test_a_call_of_sharegpt_is_one_of_the_template_where_it_reads_calls(folder):
    reads = CHATML.replace(
        "+ m['content'] | trim +", "+ (m.tool_calls | tojson if m.tool_calls else m.content) +"
    )
    turns = sharegpt(("human", "hi"), ("function_call", CALL), ("observation", "3"), ("gpt", "three"))  # fmt: skip
    call = {"type": "function", "function": json.loads(CALL)}
    messages = [
        m | ({"content": "", "tool_calls": [call]} if m["content"] == CALL else {}) for m in CALLS
    ]
    configure(folder, reads)
    assert shown(folder, {"conversations": turns}) == shown(folder, {"messages": messages})
    plain = sharegpt(("human", "hi"), ("function_call", "no JSON"))
    assert "no JSON" in shown(folder, {"conversations": plain})[0]


@pytest.mark.parametrize(
    "excluded", [{"weight": 0}, {"weight": 0.0}, {"loss": False}, {"train": False}]
)
def test_an_answer_that_its_record_excludes_is_no_target(folder, excluded):
    chat = say("a", "b", "c", "d")
    record = {"messages": [m | (excluded if m["content"] == "b" else {"weight": 1}) for m in chat]}
    for template in (CHATML, MARKED):
        configure(folder, template)
        text, answers = shown(folder, {"messages": chat})
        assert shown(folder, record) == (text, answers[1:])
        assert shown(folder, record, "last") == (text, answers[1:])
        assert shown(folder, record, "all") == (text, [text])


LIST = "<|im_start|>{{ m.role }}\n{{ m.content PLACE }}<|im_end|>\n"
PARTS = {
    "repr": LIST.replace("PLACE", "| string"),
    "trim": LIST.replace("PLACE", "| trim"),
    "json": LIST.replace("m.content PLACE", "m.content if m.content is string else m.content | tojson"),
    "plus": LIST.replace("m.content PLACE", "'' + m.content"),
    "nothing": LIST.replace("PLACE", "if m.content is string"),
    "parts": LIST.replace(
        "{{ m.content PLACE }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        "{{ c.text if c.type == 'text' else '<image>' }}{% endfor %}{% endif %}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_joined_where_the_template_takes_text_alone(folder, name):
    configure(folder, f"{{% for m in messages %}}{PARTS[name]}{{% endfor %}}{ASK}{{% endif %}}")
    roles = ("system", "user", "assistant", "tool", "assistant")
    parts = [[{"type": "text", "text": f"{r} "}, {"type": "text", "text": "x"}] for r in roles]
    listed = [{"role": r, "content": p} for r, p in zip(roles, parts)]
    plain = [{"role": r, "content": f"{r} x"} for r in roles]
    assert shown(folder, {"messages": listed}) == shown(folder, {"messages": plain})
    listed[1]["content"][0] = {"type": "image"}
    if name == "parts":
        assert "<image>x" in shown(folder, {"messages": listed})[0]
    else:
        with pytest.raises(data.DataError, match="message 2 has a part of type 'image', and the"):
            shown(folder, {"messages": listed})


def test_null_content_is_left_out_and_not_a_word(folder):
    """As transformers 5 does. A template that needs a content refuses."""
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
    configure(folder, CHATML.replace("+ m['content'] | trim +", "~ m.content ~"))
    assert "None" not in shown(folder, {"messages": chat})[0]
    configure(folder, CHATML.replace("| trim", ""))
    with pytest.raises(data.DataError, match="here: the chat template fails: .* 'content'"):
        shown(folder, {"messages": chat})


@pytest.mark.parametrize("name", ["thinking", "reasoning", "reasoning_content"])
@pytest.mark.parametrize("read", ["thinking", "reasoning_content"])
def test_what_the_assistant_thought_has_the_name_that_the_template_reads(folder, name, read):
    """As transformers 5 does."""
    configure(folder, CHATML.replace("+ m['content']", f"+ (m.{read} or '') + m['content']"))
    chat = [TURNS[0], TURNS[1] | {name: "why? "}]
    assert shown(folder, {"messages": chat})[1] == ["why? ho<|im_end|>\n"]


# What the template of gpt-oss does, in other words: macros that call themselves, the day, a channel a
# message, a tool's call that later messages need by its name, and thoughts that are left out where a
# final answer follows.
HARMONY = """
{%- macro kind(p) -%}
  {%- if p.type == "array" -%}{{- kind(p["items"]) + "[]" }}
  {%- elif p.enum -%}{{- '"' + p.enum|join('" | "') + '"' }}{%- else -%}{{- p.type }}{%- endif -%}
{%- endmacro -%}
{{- "<|im_start|>system " + strftime_now("%Y-%m-%d") + effort|default("medium") + "<|im_end|>" }}
{%- if messages[0].role in ["system", "developer"] %}
  {{- "<|im_start|>developer " + messages[0].content + "<|im_end|>" }}
  {%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- for tool in tools or [] %}
  {%- for name, p in tool.function.parameters.properties.items() %}
    {{- name + ("?" if name not in (tool.function.parameters.required or []) else "") }}
    {{- ": " + kind(p) + (", default: " + p.default|tojson if p.default is defined else "") + ";" }}
  {%- endfor %}
{%- endfor %}
{%- set call = namespace(name=none) %}
{%- for m in turns %}
  {%- if m.role == "assistant" and "tool_calls" in m %}
    {%- set final = namespace(follows=false) %}
    {%- for later in turns[loop.index:] %}
      {%- if later.role == "assistant" and "tool_calls" not in later %}
        {%- set final.follows = true %}
      {%- endif %}
    {%- endfor %}
    {%- set call.name = m.tool_calls[0].function.name %}
    {%- if m.thinking and not final.follows %}
      {{- "<|im_start|>assistant analysis " + m.thinking + "<|im_end|>" }}
    {%- endif %}
    {{- "<|im_start|>assistant to=" + call.name + m.tool_calls[0].function.arguments|tojson }}
    {{- "<|im_end|>" }}
  {%- elif m.role == "assistant" and loop.last and not add_generation_prompt %}
    {%- if "thinking" in m %}
      {{- "<|im_start|>assistant analysis " + m.thinking + "<|im_end|>" }}
    {%- endif %}
    {{- "<|im_start|>assistant final " + m.content + "<|endoftext|>" }}
  {%- elif m.role == "assistant" %}{{- "<|im_start|>assistant final " + m.content + "<|im_end|>" }}
  {%- elif m.role == "tool" %}
    {%- if call.name is none %}{{- raise_exception("no call") }}{%- endif %}
    {{- "<|im_start|>" + call.name + " " + m.content|tojson + "<|im_end|>" }}
  {%- else %}{{- "<|im_start|>user " + m.content + "<|im_end|>" }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt -%}<|im_start|>assistant{%- endif -%}
"""
PROPERTIES = {
    "a": {"type": "string", "enum": ["x", "y"], "default": "x"},
    "b": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
}
FUNCTION = {"name": "f", "parameters": {"properties": PROPERTIES, "required": ["a"]}}
ASKED = {"function": {"name": "f", "arguments": {"a": "é"}}, "type": "function"}
USED = [
    {"role": "developer", "content": "brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "thinking": "why?", "tool_calls": [ASKED]},
    {"role": "tool", "content": '{"r": 1}'},
]
FINAL = " final ho<|endoftext|>"


@pytest.mark.parametrize(
    "messages, answers, last",
    [
        (TURNS, [FINAL], [FINAL]),
        (
            [*TURNS, TURNS[0], TURNS[1] | {"thinking": "so"}],
            [" final ho", f" analysis so<|im_end|><|im_start|>assistant{FINAL}"],
            [f" analysis so<|im_end|><|im_start|>assistant{FINAL}"],
        ),
        (USED, [' analysis why?<|im_end|><|im_start|>assistant to=f{"a": "é"}<|im_end|>'], None),
        ([*USED, TURNS[1]], "message 3 in another way where other messages follow", [FINAL]),
        (
            [*USED, TURNS[1] | {"thinking": "so"}],
            "message 3 in another way where other messages follow",
            [f" analysis so<|im_end|><|im_start|>assistant{FINAL}"],
        ),
        (USED[3:], "the chat template fails: no call", "the chat template fails: no call"),
    ],
)
def test_channels_and_calls_are_written_as_transformers_writes_them(
    folder, messages, answers, last
):
    from transformers import PreTrainedTokenizerFast

    configure(folder, HARMONY)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    record = {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
    for targets, want in (("answers", answers), ("last", last or answers)):
        if isinstance(want, str):
            with pytest.raises(data.DataError, match=want):
                shown(folder, record, targets)
            continue
        text, learned = shown(folder, record, targets)
        assert learned == want
        assert text == theirs.apply_chat_template(messages, tools=record["tools"], tokenize=False)
        ids = data.load_tokenizer(folder).encode(text, add_special_tokens=False).ids
        assert ids == theirs.apply_chat_template(messages, tools=record["tools"], return_dict=False)


# ---- tools, variables, days ----------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
VARIED = (
    "{{ strftime_now('%d %b %Y') }}{% if think is defined and think is false %}<|im_end|>{% endif %}"
    "{{ bos_token }}" + CHATML
)


def test_tools_have_the_template_that_transformers_gives_them(folder, tmp_path):
    """Of the folder of templates; as JSON text too. The folder goes with the data."""
    from transformers import PreTrainedTokenizerFast

    configure(folder, CHATML, True)
    more = folder / "additional_chat_templates"
    more.mkdir()
    try:
        (more / "tool_use.jinja").write_text("{{ tools | tojson }}" + CHATML)
        (more / "rag.jinja").write_text("x")
        theirs = PreTrainedTokenizerFast.from_pretrained(folder)
        for tools in (TOOLS, None):
            want = theirs.apply_chat_template(TURNS, tools=tools, tokenize=False)
            for form in (
                tools,
                json.dumps(tools) if tools else "",
                tools and [json.dumps(tools[0])],
            ):
                assert shown(folder, {"messages": TURNS, "tools": form})[0] == want
        source = jsonl(tmp_path / "c.jsonl", [{"messages": TURNS, "tools": json.dumps(TOOLS)}])
        assert (
            data.main(
                ["--out", str(tmp_path / "o"), "--tokenizer", str(folder), "--quiet", str(source)]
            )
            == 0
        )
        copied = tmp_path / "o/additional_chat_templates/tool_use.jinja"
        assert copied.read_text() == (more / "tool_use.jinja").read_text()
        decoded = data.load_tokenizer(folder).decode(read_all(tmp_path / "o")[0], False)
        assert decoded.startswith(json.dumps(TOOLS, ensure_ascii=False))
    finally:
        for file in more.iterdir():
            file.unlink()
        more.rmdir()


def test_variables_and_the_day_are_options_and_are_recorded(folder, tmp_path):
    """A record's own variables come before the options. The same day gives the same bytes."""
    from transformers import PreTrainedTokenizerFast

    configure(folder, VARIED)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    source = tmp_path / "c.jsonl"
    own = {"chat_template_kwargs": {"think": True, "eos_token": None}}
    jsonl(source, [{"messages": TURNS}, {"messages": TURNS} | own])
    words = ["--tokenizer", str(folder), "--quiet", str(source)]
    options = ["--chat-template-kwargs", '{"think": false}', "--date", "2025-01-31"]
    for out, more in (("a", options), ("b", options), ("c", [])):
        assert data.main(["--out", str(tmp_path / out), *words, *more]) == 0
    for file in ("train-00000.bin", "train-00000.mask", "dataset.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    about = [json.loads((tmp_path / out / "dataset.json").read_text()) for out in "ac"]
    assert about[0]["date"] == "2025-01-31T00:00:00"
    assert about[0]["chat_template_kwargs"] == {"think": False}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", about[1]["date"])
    assert "chat_template_kwargs" not in about[1]
    text = data.load_tokenizer(folder).decode(read_all(tmp_path / "a")[0], False)
    today = [theirs.apply_chat_template(TURNS, tokenize=False, think=t) for t in (False, True)]
    assert text == "".join("31 Jan 2025" + t[len("31 Jan 2025") :] for t in today)
    configure(folder, CHATML)
    assert ChatTemplate(folder).about == {}


@pytest.mark.parametrize(
    "words, message",
    [
        (["--chat-template-kwargs", "{x"], "--chat-template-kwargs: '{x' is no JSON"),
        (["--chat-template-kwargs", "[1]"], "'[1]' is no object of template variables"),
        (["--chat-template-kwargs", '{"messages": 1}'], "names 'messages', which is no variable"),
        (["--date", "today"], "--date: 'today' is given, and a day such as 2026-01-31 is needed"),
    ],
)
def test_wrong_options_of_a_template_are_refused(folder, tmp_path, capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        data.main(["--out", str(tmp_path / "o"), "--tokenizer", str(folder), *words, "x"])
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "config",
    [
        {"eot_token": "<|im_end|>"},
        {"eot_token": {"content": "<|im_end|>", "__type": "AddedToken"}},
        {"extra_special_tokens": {"eot_token": "<|im_end|>"}},
        {"model_specific_special_tokens": {"eot_token": "<|im_end|>"}},
    ],
)
def test_a_models_own_special_tokens_are_variables(folder, config):
    configure(folder, CHATML.replace("'<|im_end|>\n'", "eot_token + '\n'"))
    named = json.loads((folder / "tokenizer_config.json").read_text()) | config
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    assert shown(folder, {"messages": TURNS})[1] == ["ho<|im_end|>\n"]


# ---- templates that do harm ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "template, says",
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 0.2 s"),
        ("{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "writes more than|more than 0.2 s"),
        ("{{ 10 ** (10 ** 10) }}", "makes more than"),
        ("{{ ('x' * 99999) * 99999 }}", "makes more than"),
        ("{{ raise_exception('a\n\n \x1b b' + 'c' * 999) }}", r"fails: a \\x1b b" + "c" * 292 + r"\.\.\.$"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)  # fmt: skip
def test_a_template_that_does_not_end_is_one_sentence(folder, template, says):
    t = ChatTemplate(configure(folder, template), limit_s=0.2)
    with pytest.raises(data.DataError, match=says) as e:
        t.render_targets(TURNS)
    assert "\n" not in str(e.value)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)

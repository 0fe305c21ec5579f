"""Generation: the tokens of a prompt depend on nothing but the model and the prompt's own request.
tests/test_families.py compares the tokens of every family with those of transformers."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, called
from families import qwen3_moe, random_model
from penstock import BudgetError, DeviceError, Generator, Hardware, InvalidError
from penstock.__main__ import _in_python
from penstock.chat import ChatTemplate
from penstock.data import load_tokenizer
from penstock.files import DataError
from penstock.generate import Text, encode_prompts, main, read_prompts, stop_tokens

BINARY = ROOT / os.environ.get("PENSTOCK_BUILD", "build") / "bin" / "penstock"


def make_model(where, name="tiny-llama", dtype="fp32", **changes):
    config = json.loads((ROOT / "models" / f"{name}.json").read_text()) | changes
    (where / "config.json").write_text(json.dumps(config))
    command = [
        sys.executable,
        ROOT / "models/init_model.py",
        where / "config.json",
        where / "model",
    ]
    subprocess.run([*command, "--dtype", dtype, "--seed", "3"], check=True, capture_output=True)
    return where / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """6 blocks of about 4 MiB in fp32: larger than the 2 MiB that memory is rounded to."""
    return make_model(
        tmp_path_factory.mktemp("generate"),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
    )


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """5 blocks, 4 of them with 16 experts of 0.5 MiB in fp32; and transformers' model."""
    where = tmp_path_factory.mktemp("sparse")
    cfg = qwen3_moe(num_hidden_layers=5, hidden_size=128, moe_intermediate_size=344)
    model = random_model(cfg)
    model.save_pretrained(where)
    (where / "config.json").write_text(json.dumps(cfg))
    return where, model


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(1)
    return [rng.integers(3, 512, n).tolist() for n in (5, 1, 17, 40, 2)]


SAMPLED = dict(max_new_tokens=40, temperature=1.0, seed=[7, 8, 9, 10, 11])


def tokens(model, prompts, run=SAMPLED, **options):
    with Generator(model, **{"context": 96, "batch": 5} | options) as generator:
        return generator.run(prompts, **run), generator.report


# ---- what tokens do not depend on ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_tokens_do_not_depend_on_the_batch(model, prompts, dtype):
    """40 tokens drawn from 512: a logit that differed would change some of them."""
    together, _ = tokens(model, prompts, dtype=dtype)
    for i, prompt in enumerate(prompts):
        alone, _ = tokens(model, [prompt], SAMPLED | {"seed": SAMPLED["seed"][i]}, dtype=dtype)
        assert alone == [together[i]]
    assert tokens(model, prompts, dtype=dtype, batch=2)[0] == together
    assert tokens(model, prompts, dtype=dtype, prefill_tokens=3)[0] == together
    assert tokens(model, prompts, dtype=dtype, threads=1)[0] == together
    assert tokens(model, prompts, dtype=dtype, context=300)[0] == together


def test_tokens_do_not_depend_on_the_cap(model, prompts):
    resident, report = tokens(model, prompts, dtype="fp32")
    assert report["n_resident"] == report["n_blocks"] == 6 and not report["streamed_bytes"]
    seen = set()
    for cap in range(report["least_device_bytes"], report["device_used_bytes"], 4 << 20):
        streamed, r = tokens(model, prompts, dtype="fp32", device_mem=cap)
        assert streamed == resident
        assert r["device_used_bytes"] <= cap and r["n_resident"] < 6
        assert r["streamed_bytes"] == (6 - r["n_resident"]) * r["block_bytes"]
        seen.add(r["n_resident"])
    assert seen >= {0, 1, 2}


def test_a_cap_that_is_too_small_is_refused_with_its_parts(model):
    least = tokens(model, [[1]], dict(max_new_tokens=1))[1]["least_device_bytes"]
    tokens(model, [[1]], dict(max_new_tokens=1), device_mem=least)
    with pytest.raises(BudgetError, match=r"needs .* given: .* head, 2 x .* cache of 5 x 96"):
        Generator(model, context=96, batch=5, device_mem=least - 1)
    with pytest.raises(BudgetError, match=r"of host memory, .* for the embedding"):
        Generator(model, context=96, host_mem=2 << 20)


def test_memory_that_cannot_be_pinned_is_refused_with_what_helps(model):
    least = tokens(model, [[1]], dict(max_new_tokens=1))[1]["least_device_bytes"]
    limit = ctypes.CDLL(str(BINARY.parent.parent / "lib/libpenstock.so")).ps__pin_limit
    limit.argtypes = [ctypes.c_uint64]
    limit(4 << 20)
    try:
        with pytest.raises(DeviceError) as why:
            Generator(model, context=96, batch=5, device_mem=least)
    finally:
        limit(0)
    words = "4.0 MiB of host memory could be pinned, generation takes .* raise device_mem, so that"
    assert re.match(
        f"{words} more blocks stay .*; pinned_mem is of training alone$", str(why.value)
    )


# ---- experts on demand ---------------------------------------------------------------------------


def fetched(routes, steps, caches):
    """How many experts steps want and miss, by caches that give up what was used longest ago. A step
    is its rows, (sequence, position); a cache is a list of [used, expert], a slot each."""
    wanted = missed = 0
    for step in steps:
        for b, slots in enumerate(caches):
            now = 1 + max(used for used, _ in slots)
            want = sorted({e for i, at in step for e in routes[i][b][at]})
            lack = [e for e in want if e not in [held for _, held in slots]]
            slots[:] = [[now if held in want else used, held] for used, held in slots]
            for e in lack:
                slots[min((used, s) for s, (used, _) in enumerate(slots) if used < now)[1]] = [
                    now,
                    e,
                ]
            wanted, missed = wanted + len(want), missed + len(lack)
    return wanted, missed


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.long), "bf16"])
def test_experts_on_demand_give_the_same_tokens(sparse, prompts, dtype):
    """Under every cap, and the same as whole blocks; too few slots are refused."""
    where, _ = sparse
    run, options = dict(SAMPLED, max_new_tokens=20), dict(dtype=dtype, batch=3, context=64)
    resident, report = tokens(where, prompts, run, **options)
    assert report["n_resident"] == 5 and not report["n_slots"]
    least, used, each = (report[k + "_bytes"] for k in ("least_device", "device_used", "block"))
    seen = []
    for cap in (least, *range(used - 5 * each // 2, used - each, each // 2)):
        options["device_mem"] = cap
        got, r = tokens(where, prompts, run, **options)
        assert got == resident and r["device_used_bytes"] <= cap
        assert r["n_resident"] == 1 and 6 <= r["n_slots"] < 16
        seen.append(r["n_slots"])
        with Generator(where, experts="whole", **options) as generator:
            whole = generator.report
            if cap == least:
                assert generator.run(prompts, **run) == resident
        assert r["streamed_bytes"] < whole["streamed_bytes"]
        assert r["whole_decode_s"] == whole["decode_s"] > r["decode_s"] and not whole["n_slots"]
    with Generator(where, **options | {"batch": 8}) as generator:
        assert not generator.report["n_slots"]  # more rows than caches serve
    options["device_mem"] = used - each // 2
    with Generator(where, experts="whole", **options) as generator:
        host_mem = generator.report["host_used_bytes"]  # two blocks are resident
    for mem, on_demand in (host_mem, False), (host_mem + 2 * each, True):  # all experts, or not
        with Generator(where, host_mem=mem, **options) as generator:
            assert bool(generator.report["n_slots"]) == on_demand
    with pytest.raises(
        BudgetError, match=r"need 16 slots in each of 4 blocks and so .* lower batch"
    ):
        Generator(where, experts="on-demand", **options | {"batch": 8, "device_mem": least + each})
    assert seen == sorted(seen) and len(set(seen)) > 2


@pytest.mark.parametrize("batch,prefill", [(1, 0), (3, 0), (1, 3)])
def test_the_hits_of_experts_on_demand_are_counted(sparse, prompts, batch, prefill):
    """By transformers' routers, and caches by the book. A text ends before the others of its batch. A
    prompt that is streamed whole takes the place of the first blocks' caches."""
    where, model = sparse
    options = dict(batch=batch, context=64, dtype="fp32", prefill_tokens=prefill)
    with Generator(where, **options) as generator:
        used = generator.report["device_used_bytes"]
        free = generator.run(prompts[:3], max_new_tokens=20)
    stop = free[0][9]
    cap = used - (16 << 20)
    with Generator(where, device_mem=cap, experts="on-demand", **options) as generator:
        n_slots = generator.report["n_slots"]
        caches = [[[0, None]] * n_slots for _ in range(4)]
        assert bool(generator.report["prefill_streamed_bytes"]) == (prefill == 0)
        for _ in range(2):
            wanted = missed = 0
            got = generator.run(prompts[:3], max_new_tokens=20, stop_tokens=[stop])
            for first in range(0, 3, batch):
                group, routes, rows = range(first, min(first + batch, 3)), {}, []
                for i in group:
                    drawn = free[i][: free[i].index(stop) + 1] if stop in free[i] else free[i]
                    assert got[i] == drawn[: -1 if stop in drawn else None]
                    ids = torch.tensor([prompts[i] + drawn])
                    with torch.no_grad():
                        logits = model(ids, output_router_logits=True).router_logits
                    best = [z.topk(3, dim=1) for z in logits]
                    assert min(float((z.values[:, 1] - z.values[:, 2]).min()) for z in best) > 1e-5
                    routes[i] = [z.indices[:, :2].tolist() for z in best]
                    rows.append([(i, len(prompts[i]) + k) for k in range(len(drawn) - 1)])
                if prefill:
                    asked = [(i, k) for i in group for k in range(len(prompts[i]))]
                    steps = [asked[k : k + prefill] for k in range(0, len(asked), prefill)]
                else:
                    steps = []
                    for b in range(min(4, -(-2 * 16 // n_slots))):
                        caches[b] = [[0, None]] * n_slots
                steps += [[r[k] for r in rows if k < len(r)] for k in range(max(map(len, rows)))]
                more = fetched(routes, steps, caches)
                wanted, missed = wanted + more[0], missed + more[1]
            stats = generator.stats
            assert (stats["experts_wanted"], stats["experts_missed"]) == (wanted, missed)
    assert 11 <= n_slots < 16 and 0 < missed < wanted


def test_a_model_without_experts_has_none_on_demand(model):
    with pytest.raises(InvalidError, match="the model has no experts: give auto"):
        Generator(model, experts="on-demand")


# ---- drawing -------------------------------------------------------------------------------------


def test_greedy_takes_no_seed_and_draws_follow_theirs(model):
    with Generator(model, context=64, batch=4) as generator:

        def run(**options):
            return generator.run([[5, 6, 7]] * 2, max_new_tokens=20, **options)

        greedy = run()
        assert greedy[0] == greedy[1] == run(seed=9)[0]
        assert run(temperature=1.0, top_k=1) == run(temperature=1.0, top_p=1e-6) == greedy
        first, second = run(temperature=1.0, seed=[1, 2])
        assert first != second and run(temperature=1.0, seed=[2, 1]) == [second, first]


def test_draws_have_the_distribution_of_transformers(model):
    """One token of 2,000 seeds, after temperature, top_k and top_p."""
    ids, n, settings = [4, 5, 6], 2000, dict(temperature=0.4, top_k=12, top_p=0.85)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        scores = reference(torch.tensor([ids])).logits[:, -1]
    for kind, value in zip(("Temperature", "TopK", "TopP"), settings.values(), strict=True):
        scores = getattr(transformers, f"{kind}LogitsWarper")(value)(None, scores)
    p = scores.softmax(-1)[0].double().numpy()
    with Generator(model, context=8, batch=200, dtype="fp32") as generator:
        drawn = generator.run([ids] * n, max_new_tokens=1, seed=list(range(n)), **settings)
    counts = np.bincount(np.array(drawn).ravel(), minlength=len(p))
    kept = p > 0
    assert 3 < kept.sum() < 12 and not counts[~kept].any()
    # chi-squared with kept - 1 degrees of freedom: its mean plus 6 deviations
    freedom = kept.sum() - 1
    chi = ((counts[kept] - n * p[kept]) ** 2 / (n * p[kept])).sum()
    assert chi < freedom + 6 * np.sqrt(2 * freedom)


# ---- ending --------------------------------------------------------------------------------------


def test_a_stop_token_ends_one_text(model, prompts):
    free, _ = tokens(model, prompts)
    stop = free[0][10]
    stopped, _ = tokens(model, prompts, SAMPLED | {"stop_tokens": [stop]})
    assert stopped == [t[: t.index(stop)] if stop in t else t for t in free]
    assert len(stopped[0]) <= 10


def test_the_caller_ends_one_text_or_the_call(model, prompts):
    free, _ = tokens(model, prompts)
    with Generator(model, context=96, batch=5) as generator:
        seen = []

        def three(prompt, token):
            seen.append((prompt, token))
            return prompt == 1 and len([p for p, _ in seen if p == 1]) == 3

        got = generator.run(prompts, on_token=three, **SAMPLED)
        assert got == [free[0], free[1][:3], *free[2:]]
        for i, want in enumerate(got):
            assert [t for p, t in seen if p == i] == want
        stats = generator.stats
        assert stats["new_tokens"] == sum(map(len, got)) == len(seen)
        assert stats["prompt_tokens"] == sum(map(len, prompts))

        def fail(prompt, token):
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            generator.run(prompts, on_token=fail, **SAMPLED)
        assert generator.run(prompts, **SAMPLED) == free  # and it goes on


class Letters:
    """A tokenizer of bytes."""

    def decode(self, ids, skip_special_tokens):
        return bytes(ids).decode("utf-8", "replace")


def test_text_comes_in_whole_characters_and_before_a_stop_string():
    text = Text(Letters(), ["STOP", "äx"])
    given = [text.add(b) for b in "aä Säy ST".encode()]
    assert "".join(given) == "aä Säy " and not text.ended
    assert given == ["a", "", "", "ä ", "", "", "S", "äy", " ", "", ""]
    assert text.add(ord("A")) == "STA"
    rest = [text.add(b) for b in b"bSTO"]
    assert rest == ["b", "", "", ""]
    assert text.add(ord("P")) == "" and text.ended
    assert text.end() == "" and text.text == "aä Säy STAb"
    text = Text(Letters(), ["STOP"])
    assert [text.add(b) for b in b"xST"] == ["x", "", ""]
    assert text.end() == "ST" and text.text == "xST"


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt,options,words",
    [
        ([], {}, "prompt 1 has no token"),
        ([512], {}, "token 512 is not in the vocabulary: 0 to 511"),
        ([-1], {}, "token -1 is not in the vocabulary"),
        ([1], {"stop_tokens": [600]}, "stop token 600 is not in the vocabulary"),
        ([1] * 10, {"max_new_tokens": 7}, "has 10 tokens, and 7 new .* the context is 16"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([1], {"temperature": -1.0}, "temperature is -1"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"top_p": 0.0}, "top_p is 0"),
        ([1], {"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_a_bad_request_is_refused(model, prompt, options, words):
    with Generator(model, context=16) as generator:
        with pytest.raises(InvalidError, match=words):
            generator.run([prompt], **{"max_new_tokens": 4} | options)
        assert len(generator.run([[1]], max_new_tokens=4)[0]) == 4


@pytest.mark.parametrize(
    "options,words",
    [
        ({"batch": 0}, "0 sequences at once: 1 to 1024"),
        ({"batch": 1025}, "1025 sequences at once"),
        ({"context": 0}, "a context of 0 tokens"),
        ({"prefill_tokens": 1 << 40}, "prefill_tokens is"),
    ],
)
def test_a_bad_configuration_is_refused(model, options, words):
    with pytest.raises(InvalidError, match=words):
        Generator(model, **options)


# ---- the commands --------------------------------------------------------------------------------


def native(*words):
    return subprocess.run([BINARY, "generate", *map(str, words)], capture_output=True, text=True)


def test_the_binary_prints_token_ids(model, prompts, tmp_path):
    expected, _ = tokens(model, prompts, dict(max_new_tokens=9))
    one = native("--model", model, "--tokens", str(prompts[2]), "--max-new-tokens", 9)
    assert one.returncode == 0, one.stderr
    assert [int(t) for t in one.stdout.split()] == expected[2]
    assert re.search(r"prefill: 17 tokens, .* tokens/s; decode: 8 tokens, .* tokens/s", one.stderr)
    (tmp_path / "prompts").write_text("".join(f"{json.dumps(p)}\n" for p in prompts))
    words = ["--model", model, "--prompts", tmp_path / "prompts", "--max-new-tokens", 9]
    lines = native(*words, "--quiet", "--batch", 2)
    assert lines.stderr == ""
    assert [[int(t) for t in line.split()] for line in lines.stdout.splitlines()] == expected
    found = json.loads(native(*words, "--json").stdout)
    assert found["tokens"] == expected and found["decode_tokens_per_s"] > 0
    plan = json.loads(native(*words, "--json", "--plan").stdout)
    assert plan["blocks"] == plan["resident_blocks"] == 6 and "tokens" not in plan


def test_a_text_past_max_position_embeddings_gets_one_warning(tmp_path):
    """transformers warns too: such a model was not trained on so many tokens."""
    model = make_model(tmp_path, max_position_embeddings=16)
    for n_prompt, n_new, warned in ((8, 8, 0), (8, 9, 17), (20, 3, 20)):
        lines = "\n".join([",".join(["5"] * n_prompt)] * 2)
        (tmp_path / "prompts").write_text(lines)
        done = native(
            "--model", model, "--prompts", tmp_path / "prompts", "--max-new-tokens", n_new,
            "--stop-tokens", "511", "--backend", "cpu",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said = [line for line in done.stderr.splitlines() if "max_position" in line]
        assert len(said) == bool(warned), done.stderr
        assert (
            not warned
            or f"has {warned} tokens, and the model's max_position_embeddings is 16" in said[0]
        )


@pytest.fixture(scope="module")
def measured():
    """The machine's rates are known: nothing says that they are measured."""
    Hardware.cached()


@pytest.mark.parametrize(
    "words,message",
    [
        (["--tokens", "1"], "--model DIR is missing"),
        (["--model", "MODEL"], "give either --tokens IDS or --prompts FILE"),
        (["--model", "MODEL", "--tokens", "1,x"], "--tokens: 'x' is no token id"),
        (["--model", "MODEL", "--tokens", ""], "--tokens is empty"),
        (["--model", "MODEL", "--prompts", "missing"], "missing cannot be read: No such file"),
        (["--model", "MODEL", "--prompts", "."], "--prompts . cannot be read: Is a dir"),
        (["--model", "MODEL", "--tokens", "1", "--stop-tokens", ""], "--stop-tokens is empty"),
        (["--model", "missing", "--tokens", "1"], "missing"),
        (
            ["--model", "MODEL", "--tokens", "1", "--device-mem", "1MiB"],
            "of device memory, 1.0 MiB",
        ),
    ],
)
def test_the_binary_refuses_bad_input_in_one_sentence(model, measured, words, message):
    done = native(*[str(model) if w == "MODEL" else w for w in words])
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "text,message",
    [
        ("", "the file is empty"),
        ("1\n\n2\n", "line 2: there is no token id: give at least one"),
        ("1,2\0,3\n", "line 1 has a zero byte"),
        ("1\n2,99999999999\n", "line 2: '99999999999' is no token id: give"),
        ("[1, 2.5]\n", "line 1: '2.5' is no token id"),
    ],
)
def test_a_file_of_token_ids_is_checked_line_by_line(model, tmp_path, text, message):
    (tmp_path / "prompts").write_text(text)
    done = native("--model", model, "--prompts", tmp_path / "prompts")
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1


# ---- text ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat_model(model):
    """The model with a tokenizer of bytes and a chat template."""
    from penstock.data import train_tokenizer

    (model / "text").write_text("the cat sat on the mat. " * 20)
    train_tokenizer([model / "text"], 300).save(str(model / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (model / "chat_template.jinja").write_text(template)
    return model


def command(*words):
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "penstock",
            "generate",
            *(w if isinstance(w, bytes) else str(w) for w in words),
        ],
        capture_output=True,
        text=True,
    )


def test_text_is_the_tokens_decoded(chat_model, tmp_path):
    from penstock.data import load_tokenizer

    tokenizer = load_tokenizer(chat_model)

    def text_of(prompt):
        run = dict(max_new_tokens=12, stop_tokens=[2])
        return tokenizer.decode(tokens(chat_model, [tokenizer.encode(prompt).ids], run)[0][0])

    options = ["--model", chat_model, "--max-new-tokens", 12]
    one = command(*options, "--prompt", "the cat")
    assert one.returncode == 0, one.stderr
    assert one.stdout == text_of("the cat") + "\n"
    assert "tokens/s" in one.stderr
    chat = command(*options, "--prompt", "the cat", "--chat", "--system", "sat", "--quiet")
    assert chat.stdout == text_of("<system>sat<user>the cat<assistant>") + "\n"
    assert chat.stderr == ""
    messages = [{"role": "user", "content": "on"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"the cat"\n{{"prompt": "mat"}}\n{json.dumps({"messages": messages})}\n')
    lines = [json.loads(x) for x in command(*options, "--prompts", file).stdout.splitlines()]
    asked = ["the cat", "mat", "<user>on<assistant>"]
    assert [line["text"] for line in lines] == [text_of(p) for p in asked]
    assert lines[2]["messages"] == messages and lines[0]["new_tokens"] <= 12
    stop = text_of("the cat")[3:5]
    cut = command(*options, "--prompt", "the cat", "--stop", stop)
    assert cut.stdout == text_of("the cat").split(stop)[0] + "\n"


def test_the_templates_end_of_turn_ends_a_conversation(chat_model, tmp_path, capsys):
    """Though the model's eos_token_id is another token; a text with the same tokens goes on."""
    folder = shutil.copytree(chat_model, tmp_path / "m")
    tokenizer = load_tokenizer(folder)
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|{i}|>" for i in range(size, 512)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ end if m.role == 'assistant' }}"
    )
    template += "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    ids = tokenizer.encode("<user>the cat<assistant>").ids
    free = tokens(folder, [ids], dict(max_new_tokens=12))[0][0]
    end = next(t for t in free[1:] if t >= size and t not in free[:1])
    n = free.index(end)
    records = [{"messages": [{"role": "user", "content": "the cat"}]}, "<user>the cat<assistant>"]
    (tmp_path / "p").write_text("".join(json.dumps(r) + "\n" for r in records))
    words = ["--model", folder, "--prompts", tmp_path / "p", "--max-new-tokens", 12, "--quiet"]
    words += ["--chat-template-kwargs", json.dumps({"end": f" <|{end}|>"})]
    assert main([str(w) for w in words]) == 0
    chat, text = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (chat["text"], chat["new_tokens"]) == (tokenizer.decode(free[:n]), n)
    assert (text["text"], text["new_tokens"]) == (tokenizer.decode(free), len(free))


def test_prompts_have_tools_and_variables_of_their_own(chat_model, tmp_path):
    """And ShareGPT's messages, and the folder's template for tools."""
    folder = tmp_path / "m"
    (folder / "additional_chat_templates").mkdir(parents=True)
    shutil.copy(chat_model / "tokenizer.json", folder)
    template = "{{ x }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (folder / "chat_template.jinja").write_text(template)
    more = folder / "additional_chat_templates/tool_use.jinja"
    more.write_text("{{ tools | tojson }}" + template)
    hi, tools = [{"role": "user", "content": "hi"}], [{"type": "function"}]
    records = {
        "<user>hi<assistant>": {"messages": hi},
        '[{"type": "function"}]<user>hi<assistant>': {"messages": hi, "tools": json.dumps(tools)},
        "7<user>hi<assistant>": {"messages": hi, "chat_template_kwargs": {"x": 7}},
        "<user>ho<assistant>": {"conversations": [{"from": "human", "value": "ho"}]},
        "plain": {"prompt": "plain"},
    }
    (tmp_path / "p").write_text("".join(json.dumps(r) + "\n" for r in records.values()))
    prompts, tokenizer = read_prompts(tmp_path / "p"), load_tokenizer(folder)
    encoded = encode_prompts(prompts, tokenizer, folder)
    assert [tokenizer.decode(ids) for ids in encoded] == [*records]
    given = encode_prompts(prompts[:3], tokenizer, folder, ChatTemplate(folder, {"x": "all"}))
    assert [tokenizer.decode(ids)[:3] for ids in given] == ["all", '[{"', "7<u"]


@pytest.mark.parametrize(
    "words,message",
    [
        ([], "give either --prompt TEXT or --prompts FILE"),
        (["--prompt", ""], "prompt 1 has no token"),
        (["--prompt", "x", "--system", "y"], "--system belongs to a .* give --chat too"),
        (["--prompt", "x", "--date", "2025-01-31"], "--date belongs to a conv.* give --chat too"),
        (["--prompts", "missing"], "--prompts missing: cannot be read: No such file"),
        (["--prompt", "x", "--device-mem", "6"], "is not a size|is 6 bytes: write"),
        (["--prompt", "x", "--device-mem", "1e30"], "device_mem='1e30' is too large: .* 1e18"),
        (["--prompt", "x", "--seed", "-1"], "--seed: '-1' is given, and a whole number from 0 to"),
        (["--prompt", "x", "--top-k", str(1 << 70)], "--top-k: '1180591620717411303424' is given"),
        (["--prompt", "x", "--batch", "1025"], "--batch: .* a whole number from 1 to 1024"),
        (["--prompt", "x", "--max-new-tokens", "few"], "--max-new-tokens: 'few' is given, and a"),
        (["--prompt", "x", "--backend", "rocm"], "--backend: invalid choice: 'rocm'"),
        (
            ["--prompt", "x", "--gpu", "-1"],
            "--gpu: '-1' is given, and a whole number from 0 to 1023",
        ),
        (["--prompt", "x", "--gpu", "0", "--backend", "cpu"], "--gpu 0: --backend cpu uses none"),
        (["--prompt", b"\xff"], "prompt 1 is no text: a part of it is no UTF-8"),
    ],
)
def test_the_command_refuses_bad_input_in_one_sentence(chat_model, words, message):
    done = called(main, "--model", chat_model, *map(os.fsdecode, words))
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert re.search(message, done.stderr) and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("penstock generate: ")


def test_the_command_says_which_gpu_and_that_runs_are_deterministic(chat_model, monkeypatch):
    asked, given = [], {}

    def cached(*machine, device_mem):
        asked.append((*machine, device_mem))
        return Hardware.estimate(1, "cpu")

    class Recorder(Generator):
        def __init__(self, *args, **options):
            given.update(options)
            super().__init__(*args, **options)

    monkeypatch.setattr("penstock.generate.Hardware.cached", cached)
    monkeypatch.setattr("penstock.generate.Generator", Recorder)
    words = ["--model", str(chat_model), "--prompt", "x", "--max-new-tokens", "1"]
    assert main([*words, "--threads", "1", "--gpu", "3"]) == 2  # the machine has no GPU
    assert asked == [(1, "auto", 3, None, None)] and not given
    assert main([*words, "--deterministic"]) == 0 and given["deterministic"]
    assert main(words) == 0 and not given["deterministic"]


def test_prompts_may_have_any_line_separator_of_unicode(tmp_path):
    """JSON leaves them as they are, and Python's splitlines() divides at them."""
    prompts = ["a\u2028b", "c\x85d\u2029"]
    (tmp_path / "p").write_text("".join(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts))
    assert read_prompts(tmp_path / "p") == prompts
    (tmp_path / "p").write_text('\n"a"\r\n{"prompt": "b"}')
    assert read_prompts(tmp_path / "p") == ["a", "b"]
    (tmp_path / "p").write_text('"a"\n', encoding="utf-8-sig")  # with a BOM, as data may have
    assert read_prompts(tmp_path / "p") == ["a"]


def test_the_ids_that_end_a_text_are_checked(tmp_path):
    def ends(config):
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        return stop_tokens(tmp_path)

    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert ends({"eos_token_id": [3, 4]}) == [3, 4] and ends({"eos_token_id": 0}) == [0]
    assert ends({}) == ends({"eos_token_id": None}) == [7]
    for wrong in (-1, 1 << 31, "2", [1, "2"]):
        with pytest.raises(DataError, match=r"generation_config.json: eos_token_id is .*no token"):
            ends({"eos_token_id": wrong})


def test_token_ids_go_to_the_binary_in_both_spellings(chat_model):
    for ids in (["--tokens", "1,2"], ["--tokens=1,2"]):
        done = command("--model", chat_model, *ids, "--max-new-tokens", 2, "--quiet")
        assert done.returncode == 0 and len(done.stdout.split()) <= 2, done
    assert _in_python(["report", "run", "--plan"])
    assert not _in_python(["generate", "--plan"]) and not _in_python([])


def test_a_terminal_without_unicode_gets_what_it_can_show(chat_model, tmp_path):
    """A locale of ISO 8859-1, or of another encoding that lacks most characters."""
    texts = "ü\U0001f600"
    (tmp_path / "p").write_text(json.dumps(texts) + "\n")
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    options = ["--model", chat_model, "--max-new-tokens", "3", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "generate", *options, "--prompts", tmp_path / "p"],
        capture_output=True,
        env=env,
    )
    assert done.returncode == 0 and done.stderr == b"", done
    assert done.stdout.isascii() and json.loads(done.stdout)["prompt"] == texts


def test_a_full_disk_behind_stdout_is_an_error_in_one_sentence(chat_model):
    words = [sys.executable, "-m", "penstock", "generate", "--model", chat_model, "--prompt", "x"]
    with open("/dev/full", "w") as full:
        done = subprocess.run([*words, "--quiet"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "penstock generate: stdout cannot be written: No space left on device\n",
    )


def test_a_model_that_is_not_there_is_named_with_its_whole_path():
    done = command("--model", "none", "--prompt", "x")
    says = f"--model none: there is no such directory (as a path it is {os.path.abspath('none')})"
    assert done.returncode == 2 and says in done.stderr


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    done = command("--model", make_model(tmp_path), "--prompt", "x")
    assert done.returncode == 2 and "tokenizer.json" in done.stderr

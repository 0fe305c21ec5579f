"""Masks beside token shards: what counts as a target, where documents begin, what is refused."""

import json
import re
import subprocess

import io_native as ps
import numpy as np
import pytest
from conftest import BUILD, words_of_training, write_shard
from families import ALL, random_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from penstock import Dataset, InvalidError, ModelConfig, Plan, Trainer
from penstock.shards import BEGINS_DOCUMENT, IS_TARGET, mask_path, write_mask

SEQ = 64


def masked_shard(path, tokens, flags, row_tokens=0):
    write_shard(path, tokens)
    write_mask(path, np.asarray(flags), row_tokens)
    return path


def test_a_mask_says_which_tokens_are_targets_and_begin_documents(tmp_path):
    """Also where the mask is longer than a piece, and where a shard has none."""
    rng = np.random.default_rng(0)
    ids, flags = rng.integers(0, 512, 40_001), rng.integers(0, 4, 40_001)
    masked_shard(tmp_path / "a.bin", ids, flags)
    write_shard(tmp_path / "b.bin", ids)
    assert len((tmp_path / "a.mask").read_bytes()) == 1024 + len(ids)
    with ps.Dataset(tmp_path, vocab=512) as ds:
        for seq_len in (100, 16383, 16384, 20_000):
            n = ds.n(seq_len) // 2
            for i in range(0, n, max(1, n // 5)):
                at = i * seq_len
                tokens, targets = ds.read(seq_len, i)
                here = flags[at : at + seq_len + 1]
                want = np.where(here & IS_TARGET, ids[at : at + seq_len + 1], -1)
                np.testing.assert_array_equal(tokens, ids[at : at + seq_len])
                np.testing.assert_array_equal(targets, want[1:])
                np.testing.assert_array_equal(ds.begins, (here[:-1] & BEGINS_DOCUMENT) >> 1)
                np.testing.assert_array_equal(ds.read(seq_len, n + i)[1], ids[at + 1 :][:seq_len])
                assert not ds.begins.any()


BAD = {
    "short": (lambda m: m[:1000], "1000 bytes"),
    "magic": (lambda m: b"\1" + m[1:], "begins with the words"),
    "version": (lambda m: m[:4] + b"\2" + m[5:], "begins with the words"),
    "count": (lambda m: m[:16] + b"\7" + m[17:] + b"1234567", "masks 7 tokens"),
    "truncated": (lambda m: m[:-1], "bytes, but its 100 tokens"),
    "another shard's": (lambda m: m[:24] + b"1234" + m[28:], "another shard"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_mask_is_refused_naming_it(tmp_path, name):
    shard = masked_shard(tmp_path / "x.bin", np.arange(100), np.ones(100))
    change, says = BAD[name]
    mask_path(shard).write_bytes(change(mask_path(shard).read_bytes()))
    with pytest.raises(ps.Failed) as e:
        ps.Dataset(shard)
    assert e.value.code == ps.EFORMAT
    ps.one_sentence(e.value.message, tmp_path / "x.mask", says)


def test_a_mask_of_another_shard_of_the_same_length_is_refused(tmp_path):
    masked_shard(tmp_path / "x.bin", np.arange(100), np.ones(100))
    write_shard(tmp_path / "x.bin", np.arange(100) + 1)
    with pytest.raises(ps.Failed, match="another shard"):
        ps.Dataset(tmp_path / "x.bin")


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**32 - 1)), max_size=2),
    st.integers(-9, 9),
)
def test_mutated_masks_are_read_or_refused(tmp_path, words, more):
    shard = masked_shard(tmp_path / "x.bin", np.arange(50), np.ones(50))
    raw = bytearray(mask_path(shard).read_bytes())
    for k, v in words:
        raw[4 * k : 4 * k + 4] = v.to_bytes(4, "little")
    mask_path(shard).write_bytes(raw[:more] if more < 0 else raw + b"\0" * more)
    try:
        with ps.Dataset(shard, vocab=512) as ds:
            assert more == 0
            for i in range(ds.n(7)):
                ds.read(7, i)
    except ps.Failed as e:
        ps.one_sentence(e.message, tmp_path / "x.mask")


def test_masked_shards_that_do_not_stay_open_are_read_and_checked(tmp_path):
    for i in range(258):
        masked_shard(tmp_path / f"{i:03}.bin", [i, i + 1, i + 2], [3, 0, i & 1])
    with ps.Dataset(tmp_path, vocab=512) as ds:
        assert ds.read(2, 257)[1].tolist() == [-1, 259] and ds.read(2, 256)[1].tolist() == [-1, -1]
        (tmp_path / "257.mask").write_bytes((tmp_path / "257.mask").read_bytes() + b"x")
        with pytest.raises(ps.Failed, match="257.mask: is no longer the file"):
            ds.read(2, 257)
    with pytest.raises(ps.Failed):
        ps.Dataset(tmp_path)


# ---- training ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_model):
    return ModelConfig.read(tiny_model)


@pytest.fixture(scope="module")
def plan(model):
    return Plan(model, seq_len=SEQ, tokens_per_step=SEQ, recipe="fp32")


def steps_of(where, plan, shard, n):
    """The loss and every gradient of a step over each of the shard's first n sequences. The weights
    stay as they are."""
    steps = []
    with Trainer(where, plan, shard, shuffle=False, lr=0.0) as trainer:
        for _ in range(n):
            (m,) = trainer.steps(1)
            grads = {p.name: trainer.grad(p.name) for p in plan.model.params() if not p.exact}
            steps.append((m.loss, m.valid_tokens, grads))
    return steps


def one_step(tiny_model, plan, shard):
    return steps_of(tiny_model, plan, shard, 1)[0]


def same(a, b):
    return a[:2] == b[:2] and all((a[2][k] == b[2][k]).all() for k in a[2])


def test_a_masked_token_changes_neither_loss_nor_gradients(tiny_model, plan, tmp_path):
    """The last target is the sequence's only token that is no input too. As a target it counts."""
    ids, flags = np.arange(SEQ + 1), np.ones(SEQ + 1)
    ids2 = ids.copy()
    ids2[-1] = 400
    free = [one_step(tiny_model, plan, write_shard(tmp_path / "f.bin", x)) for x in (ids, ids2)]
    assert not same(*free)
    flags[-1] = flags[20] = 0
    masked = [
        one_step(tiny_model, plan, masked_shard(tmp_path / "m.bin", x, flags)) for x in (ids, ids2)
    ]
    assert same(*masked) and masked[0][1] == SEQ - 2

    def batch(step):
        return ids[:-1], np.where(flags, ids, -100)[1:]

    assert same(masked[0], one_step(tiny_model, plan, batch))


SPARSE = ["olmoe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "gemma4-moe"]
SPARSE += ["qwen3_5_moe"]


@pytest.mark.parametrize(
    "name, chunk",
    [("", SEQ), ("", SEQ // 4), *((name, SEQ) for name in SPARSE), ("deepseek_v3", SEQ // 4)],
)
def test_a_document_is_unaffected_by_its_neighbours(tiny_model, tmp_path, name, chunk):
    """Loss and gradients of the second of three documents, to the bit; in whole sequences and in
    slices. Where the mask names no documents, the first one changes them. A gradient of an expert's
    weights sums the rows of all documents, 29 of this one and zeros elsewhere: OpenBLAS may add
    them in another order where there are more."""
    where = tiny_model
    if name:
        where, cfg = tmp_path, dict(ALL[name], num_hidden_layers=2)
        if cfg.get("layer_types"):
            cfg["layer_types"] = cfg["layer_types"][-2:]
        random_model(cfg).save_pretrained(where)
        (where / "config.json").write_text(json.dumps(cfg))
    plan = Plan(
        ModelConfig.read(where),
        seq_len=SEQ,
        tokens_per_step=SEQ,
        chunk_tokens=chunk,
        recipe="fp32",
        **dict(router_aux_loss=0.0) if name else {},
    )
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 512, SEQ)
    other = ids.copy()
    other[:21], other[50:] = rng.integers(0, 512, 21), rng.integers(0, 512, SEQ - 50)
    flags = np.zeros(SEQ, np.uint8)
    flags[22:50] = IS_TARGET
    runs = {}
    for begins in (BEGINS_DOCUMENT,) if name else (0, BEGINS_DOCUMENT):
        flags[[0, 21, 50]] = begins
        shard = masked_shard(tmp_path / "d.bin", [*ids, *other, 0], [*flags, *flags, 0])
        runs[begins] = steps_of(where, plan, shard, 2)
    (loss, n, grads), (loss2, n2, grads2) = runs[BEGINS_DOCUMENT]
    assert n == n2 == 28 and loss == loss2
    for key, grad in grads.items():
        own = re.search(r"experts\.(\d|gate_up_proj$|down_proj$)", key)
        off = np.linalg.norm(grad - grads2[key])
        # n terms of about right angles: their sum has 1 / sqrt(n) of their sizes' sum, or more
        assert off <= (2 * 29**1.5 * 2**-24 * np.linalg.norm(grad) if own else 0), key
    assert name or runs[0][0][0] != runs[0][1][0]


def test_rows_are_not_cut_and_a_plan_for_one_document_is_refused(tiny_model, model, plan, tmp_path):
    shard = masked_shard(tmp_path / "p.bin", np.arange(3 * SEQ + 1), np.ones(3 * SEQ + 1), 2 * SEQ)
    with pytest.raises(InvalidError, match=r"packed in rows of 128 tokens.*seq_len 128"):
        Trainer(tiny_model, plan, shard)
    shard = masked_shard(tmp_path / "p.bin", np.arange(3 * SEQ + 1), np.ones(3 * SEQ + 1))
    assert Dataset(shard, model.vocab_size).marks_documents
    one = Plan(model, seq_len=SEQ, tokens_per_step=SEQ, one_document=True)
    with pytest.raises(InvalidError, match="without one_document"):
        Trainer(tiny_model, one, shard)


def test_the_command_trains_on_masks_and_refuses_a_batch_without_targets(tiny_model, tmp_path):
    n = 8 * SEQ + 1
    for name, flags, code in (("some", np.arange(n) % 3 == 0, 0), ("none", np.zeros(n), 1)):
        shard = masked_shard(tmp_path / f"{name}.bin", np.arange(n) % 500, flags)
        run_dir = tmp_path / f"run-{name}"
        words = words_of_training(tiny_model, shard, "--run-dir", run_dir, "--steps", 1)
        r = subprocess.run([BUILD / "bin/penstock", *words], capture_output=True, text=True)
        assert r.returncode == code, r.stderr
        if code:
            ps.one_sentence(r.stderr.strip(), "no valid target", "mask fewer")

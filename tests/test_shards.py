"""Token shards of every producer, read window by window, and the order in which windows are
visited."""

import os
import subprocess
import sys

import io_native as ps
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FIX = dict(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def header(**words):
    h = np.zeros(256, "<u4")
    for k, v in words.items():
        h[int(k[1:])] = v
    return h.tobytes()


def gpt2(ids):
    return header(h0=20240520, h1=1, h2=len(ids)) + np.asarray(ids, "<u2").tobytes()


def llama3(ids):
    return header(h0=20240801, h1=7, h2=len(ids)) + np.asarray(ids, "<u4").tobytes()


def penstock(ids, width=2, vocab=512):
    n = len(ids)
    return (
        header(h0=20261121, h1=1, h2=width, h4=n & 0xFFFFFFFF, h5=n >> 32, h6=vocab)
        + np.asarray(ids, f"<u{width}").tobytes()
    )


def bintok(ids, version=2, mask=None, fill=False):
    pad = bytearray(b"*" * 1023 + b"\n")
    pad[:8] = b"BIN.TOK\n"
    pad[8:28] = np.array([version, 4, len(ids), 512, mask is not None], "<u4").tobytes()
    if fill:
        pad[24:28] = b"****"
    bits = b"" if mask is None else np.packbits(np.asarray(mask, bool), bitorder="little").tobytes()
    return bytes(pad) + np.asarray(ids, "<i4").tobytes() + bits


VARIANTS = {
    "gpt2": gpt2,
    "llama3": llama3,
    "penstock u16": penstock,
    "penstock u32": lambda ids: penstock(ids, 4),
    "bintok v1": lambda ids: bintok(ids, 1),
    "bintok v2": bintok,
    "bintok masks": lambda ids: bintok(ids, 2, np.ones(len(ids))),
    "bintok of llmq's first writer": lambda ids: bintok(ids, 2, None, True),
    "with masks": lambda ids: bintok(ids, 2, np.ones(len(ids)), True),
}


def refused(paths, *parts, code=ps.EFORMAT, vocab=512):
    with pytest.raises(ps.Failed) as e:
        ps.Dataset(*paths, vocab=vocab)
    assert e.value.code == code
    ps.one_sentence(e.value.message, *parts)


def expected(ids, seq_len, idx):
    at = idx * seq_len
    return ids[at : at + seq_len], ids[at + 1 : at + seq_len + 1]


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=25, **FIX)
@given(n=st.integers(0, 300), seq_len=st.integers(1, 64), seed=st.integers(0, 99))
def test_windows_of_every_variant(tmp_path, name, n, seq_len, seed):
    ids = np.random.default_rng(seed).integers(0, 512, n)
    (tmp_path / "a.bin").write_bytes(VARIANTS[name](ids))
    with ps.Dataset(tmp_path / "a.bin", vocab=512) as ds:
        assert ps.lib.ps_dataset_n_tokens(ds.p) == n and ps.lib.ps_dataset_n_shards(ds.p) == 1
        assert ds.n(seq_len) == max(0, (n - 1) // seq_len) and ds.n(0) == 0
        for i in range(ds.n(seq_len)):
            for got, want in zip(ds.read(seq_len, i), expected(ids, seq_len, i)):
                np.testing.assert_array_equal(got, want)
        with pytest.raises(ps.Failed) as e:
            ds.read(seq_len, ds.n(seq_len))
        assert e.value.code == ps.EINVAL


def test_windows_never_cross_a_shard_and_folders_are_sorted(tmp_path):
    parts = [np.arange(a, a + n) for a, n in ((0, 10), (100, 4), (200, 13))]
    for name, ids, make in zip(("a.bin", "b.bin", "c.bin"), parts, (gpt2, llama3, bintok)):
        (tmp_path / name).write_bytes(make(ids))
    (tmp_path / "notes.txt").write_text("no shard")
    want = [expected(ids, 4, i) for ids in parts for i in range((len(ids) - 1) // 4)]
    with ps.Dataset(tmp_path, vocab=512) as ds:
        assert ps.lib.ps_dataset_n_shards(ds.p) == 3 and ds.n(4) == len(want) == 5
        for i, w in enumerate(want):
            np.testing.assert_array_equal(np.stack(ds.read(4, i)), np.stack(w))
    with ps.Dataset(tmp_path / "c.bin", tmp_path / "a.bin", vocab=512) as ds:
        assert ds.read(4, 0)[0].tolist() == [200, 201, 202, 203] and ds.n(4) == 5


@settings(max_examples=40, **FIX)
@given(n=st.integers(2, 200), seq_len=st.integers(1, 40), seed=st.integers(0, 99))
def test_masked_tokens_are_no_targets(tmp_path, n, seq_len, seed):
    g = np.random.default_rng(seed)
    ids, mask = g.integers(0, 512, n), g.integers(0, 2, n)
    (tmp_path / "m.bin").write_bytes(bintok(ids, 2, mask))
    with ps.Dataset(tmp_path / "m.bin", vocab=512) as ds:
        for i in range(ds.n(seq_len)):
            tokens, targets = ds.read(seq_len, i)
            np.testing.assert_array_equal(tokens, expected(ids, seq_len, i)[0])
            np.testing.assert_array_equal(targets, expected(np.where(mask, ids, -1), seq_len, i)[1])


BAD = {
    "empty": (b"", ["0 bytes", "1024"]),
    "no header": (b"x" * 1023, ["1023 bytes"]),
    "raw nanoGPT": (
        np.arange(2000, dtype="<u2").tobytes(),
        ["no format of token shards", "penstock data"],
    ),
    "evaluation": (header(h0=20240522, h1=1), ["evaluation"]),
    "gpt2 version": (header(h0=20240520, h1=2), ["version 2", "version 1"]),
    "llama3 version": (header(h0=20240801, h1=1), ["version 1", "version 7"]),
    "penstock version": (header(h0=20261121, h1=9, h2=2), ["version 9"]),
    "penstock width": (header(h0=20261121, h1=1, h2=3), ["3", "2 or 4"]),
    "bintok version": (bintok([1], 3), ["version 3"]),
    "bintok width": (bintok([1])[:12] + b"\2\0\0\0" + bintok([1])[16:], ["word 3", "2"]),
    "bintok that has masks and says no": (bintok([1]) + b"\1", ["1028 bytes", "1029"]),
    "bintok of no length": (
        bintok([1, 2], fill=True) + b"12",
        ["2 tokens", "1032 bytes", "with masks 1033", "1034"],
    ),
    "negative count": (header(h0=20240520, h1=1, h2=2**32 - 1), ["4294967295", "2^31"]),
    "truncated": (gpt2([1, 2, 3])[:-1], ["3 tokens", "1030", "1029", "truncated"]),
    "too long": (gpt2([1, 2, 3]) + b"x", ["1030", "1031"]),
    "truncated masks": (bintok([1] * 9, 2, [1] * 9)[:-1], ["and masks", "1062", "1061"]),
    "count past u64": (
        header(h0=20261121, h1=1, h2=4, h4=2**32 - 1, h5=2**32 - 1),
        ["18446744073709551615 tokens"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_shard_is_refused_naming_it(tmp_path, name):
    (tmp_path / "x.bin").write_bytes(BAD[name][0])
    refused([tmp_path / "x.bin"], tmp_path / "x.bin", *BAD[name][1])


@settings(max_examples=300, **FIX)
@given(
    st.sampled_from(sorted(VARIANTS)),
    st.lists(st.tuples(st.integers(0, 15), st.integers(0, 2**32 - 1)), max_size=3),
    st.integers(-9, 9),
)
def test_mutated_headers_are_read_or_refused(tmp_path, name, words, more):
    data = bytearray(VARIANTS[name](np.arange(50)))
    for k, v in words:
        data[4 * k : 4 * k + 4] = v.to_bytes(4, "little")
    data = data[:more] if more < 0 else data + b"\0" * more
    (tmp_path / "x.bin").write_bytes(data)
    try:
        with ps.Dataset(tmp_path / "x.bin", vocab=512) as ds:
            for i in range(ds.n(7)):
                ds.read(7, i)
    except ps.Failed as e:
        ps.one_sentence(e.message, tmp_path / "x.bin")


def test_no_data_and_missing_data_are_refused(tmp_path):
    refused([], "no token shard", code=ps.EINVAL)
    refused([tmp_path], tmp_path, "*.bin", code=ps.EINVAL)
    refused([tmp_path / "none.bin"], tmp_path / "none.bin", "No such file", code=ps.EIO)
    (tmp_path / "x.bin").write_bytes(gpt2([1]))
    refused([tmp_path / "x.bin"], "vocab_size is 0", code=ps.EINVAL, vocab=0)
    with ps.Dataset(tmp_path / "x.bin") as ds:
        assert ds.n(1) == 0
        with pytest.raises(ps.Failed, match="seq_len is 0"):
            ds.read(0, 0)


@pytest.mark.parametrize(
    "make, bad",
    [(gpt2, 512), (llama3, 2**31), (lambda i: penstock(i, 4), 2**32 - 1), (bintok, -1)],
    ids=["u16", "u32", "penstock", "i32"],
)
def test_a_token_past_the_vocabulary_names_shard_and_offset(tmp_path, make, bad):
    ids = np.zeros(100, np.int64)
    ids[37] = bad
    (tmp_path / "x.bin").write_bytes(make(ids))
    refused(
        [tmp_path / "x.bin"],
        tmp_path / "x.bin",
        "token 37",
        *([-1, "not negative"] if bad < 0 else [bad, "512"]),
    )


def test_a_bad_token_behind_the_first_ones_is_found_when_read(tmp_path):
    ids = np.zeros(2**20 + 2000, np.int64)
    ids[2**20 + 5] = 600
    (tmp_path / "x.bin").write_bytes(gpt2(ids))
    with ps.Dataset(tmp_path / "x.bin", vocab=512) as ds:
        ds.read(1024, 0)
        with pytest.raises(ps.Failed) as e:
            ds.read(1024, 1024)
        assert e.value.code == ps.EFORMAT
        ps.one_sentence(e.value.message, tmp_path / "x.bin", "token 1048581", "600", "512")


# Resident memory is that of mapped files too: VmRSS is the sum of RssAnon, RssFile and RssShmem.
# The windows come in a shuffled order.
RESIDENT = """
import sys; sys.path.insert(0, sys.argv[1])
import io_native as ps
def rss(): return int(open("/proc/self/statm").read().split()[1]) * 4096
with ps.Dataset(sys.argv[2], vocab=65536) as ds:
    ds.read(4096, 0)
    before, worst, n = rss(), 0, ds.n(4096)
    for i in range(n):
        ds.read(4096, ps.lib.ps_dataset_order(n, i, 1, 1))
        worst = max(worst, rss())
print(worst - before)
"""


def test_resident_memory_does_not_grow_with_the_data(tmp_path):
    (tmp_path / "x.bin").write_bytes(gpt2(np.zeros(32 << 20, np.uint16)))  # 64 MiB
    with open(
        tmp_path / "x.bin", "rb"
    ) as f:  # read anew from its first byte on: the page cache gets it in large folios
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while f.read(1 << 20):
            pass
    out = subprocess.run(
        [sys.executable, "-c", RESIDENT, os.path.dirname(__file__), tmp_path / "x.bin"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(out.stdout) < 1 << 20


def test_more_shards_than_may_be_open_are_read(tmp_path):
    for i in range(300):
        (tmp_path / f"{i:03}.bin").write_bytes(gpt2([i, i + 1, i + 2]))
    with ps.Dataset(tmp_path, vocab=512) as ds:
        assert len(os.listdir("/proc/self/fd")) < 300
        assert [ds.read(2, i)[1].tolist() for i in (0, 255, 256, 299)] == [
            [i + 1, i + 2] for i in (0, 255, 256, 299)
        ]
        (tmp_path / "new").write_bytes(gpt2([7, 7, 7]))
        os.replace(tmp_path / "new", tmp_path / "299.bin")
        with pytest.raises(ps.Failed) as e:
            ds.read(2, 299)
        assert e.value.code == ps.EIO
        ps.one_sentence(e.value.message, tmp_path / "299.bin", "no longer the file")
        os.truncate(tmp_path / "000.bin", 1026)
        with pytest.raises(ps.Failed) as e:
            ds.read(2, 0)
        ps.one_sentence(e.value.message, tmp_path / "000.bin", "cut from 1030 to 1026 bytes")


def test_windows_and_masks_longer_than_a_piece(tmp_path):
    rng = np.random.default_rng(0)
    n = 700_001
    ids, mask = rng.integers(0, 512, n), rng.integers(0, 2, n)
    (tmp_path / "m.bin").write_bytes(bintok(ids, 2, mask))
    (tmp_path / "p.bin").write_bytes(penstock(ids))
    with (
        ps.Dataset(tmp_path / "m.bin", vocab=512) as m,
        ps.Dataset(tmp_path / "p.bin", vocab=512) as p,
    ):
        for seq_len in (n - 1, 300_003, 16383, 16384, 16385):
            for i in range(m.n(seq_len)):
                want, targets = (
                    expected(ids, seq_len, i),
                    expected(np.where(mask, ids, -1), seq_len, i)[1],
                )
                np.testing.assert_array_equal(np.stack(p.read(seq_len, i)), np.stack(want))
                np.testing.assert_array_equal(
                    np.stack(m.read(seq_len, i)), np.stack([want[0], targets])
                )


# ---- order ---------------------------------------------------------------------------------------


def order(n, seed=0, epoch=0, shuffle=1):
    return [ps.lib.ps_dataset_order(n, epoch * n + i, seed, shuffle) for i in range(n)]


def test_every_epoch_is_a_permutation_for_every_size():
    for n in [*range(1, 300), *range(300, 2001, 37), 2**14 - 1, 2**14, 2**14 + 1]:
        for seed, epoch in ((0, 0), (n, 3)):
            assert sorted(order(n, seed, epoch)) == list(range(n)), n


def test_without_shuffling_positions_stand():
    assert order(7, 5, 2, shuffle=0) == list(range(7))
    assert ps.lib.ps_dataset_order(0, 5, 1, 1) == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2**40), st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_large_sizes_stay_in_range_and_do_not_collide(n, seed, epoch):
    first = min(epoch, 2**64 // n - 1) * n
    at = {(first + i * max(1, n // 97)) for i in range(min(n, 97))}
    got = [ps.lib.ps_dataset_order(n, p, seed, 1) for p in at]
    assert max(got) < n and len(set(got)) == len(got)


def test_seeds_and_epochs_give_different_orders():
    seen = {tuple(order(50, s, e)) for s in range(20) for e in range(20)}
    assert len(seen) == 400


@pytest.mark.parametrize("n", [3, 7, 10, 100])
def test_mixing_is_even(n):
    """Position p goes to value v with probability 1/n, and the next one to any other value with
    probability 1/(n-1): over 4000 seeds both chi-square statistics stay within 6 standard
    deviations, sqrt(2 dof), of their mean, dof. Rows of the first table are independent but for the
    permutation's own constraint, which only lowers the spread."""
    seeds, positions = 4000, range(0, n, max(1, n // 10))
    table, diffs = np.zeros((len(positions), n)), np.zeros(n)
    for s in range(seeds):
        for k, p in enumerate(positions):
            table[k, ps.lib.ps_dataset_order(n, p, s, 1)] += 1
        a, b = (ps.lib.ps_dataset_order(n, p, s, 1) for p in (0, 1))
        diffs[(b - a) % n] += 1
    for counts, dof in ((table, (n - 1) * len(positions)), (diffs[1:], n - 2)):
        want = counts.sum() / counts.size
        assert abs(((counts - want) ** 2 / want).sum() - dof) < 6 * np.sqrt(2 * dof)
    assert diffs[0] == 0

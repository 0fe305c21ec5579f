"""safetensors files: read and written as the safetensors library does, and refused with one
sentence where a header lies."""

import itertools
import json
import os
import struct
import subprocess
import sys

import io_native as ps
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FIX = dict(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
TORCH = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def raw(header, data=b"", n=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if n is None else n) + text + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refused(path, *parts, code=ps.EFORMAT):
    with pytest.raises(ps.Failed) as e:
        ps.Tensors(path)
    assert e.value.code == code
    ps.one_sentence(e.value.message, *parts)
    return e.value.message


# ---- reading what the library wrote --------------------------------------------------------------

names = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(
    lambda s: s != "__metadata__"
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(max_examples=150, **FIX)
@given(
    st.dictionaries(names, st.tuples(st.sampled_from(sorted(TORCH)), shapes), max_size=12),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_files_of_the_library_are_read_whole(tmp_path, plan, seed, meta):
    g = torch.Generator().manual_seed(seed)
    tensors = {
        k: (torch.randn(shape, generator=g) * 4).to(TORCH[dtype])
        for k, (dtype, shape) in plan.items()
    }
    safetensors.torch.save_file(
        tensors,
        tmp_path / "x.safetensors",
        metadata={"format": "pt", "a": "b\u00e9"} if meta else None,
    )
    with ps.Tensors(tmp_path / "x.safetensors") as f:
        assert {(n, d, s) for n, d, s, _, _ in f.infos()} == {
            (k, d, tuple(s)) for k, (d, s) in plan.items()
        }
        for k, t in tensors.items():
            if plan[k][0] not in ("F32", "BF16", "F16"):
                continue
            np.testing.assert_array_equal(f.read(k), t.float().flatten().numpy())
            np.testing.assert_array_equal(
                f.read(k, ps.BF16),
                t.to(torch.bfloat16).flatten().view(torch.int16).numpy().view(np.uint16),
            )


def test_every_half_and_the_edges_of_rounding_convert_as_torch_does(tmp_path):
    halves = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    g = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (200000,), generator=g, dtype=torch.int64).to(torch.int32)
    ties = ((torch.arange(65536, dtype=torch.int64) << 16) + 0x8000 - 2**31).to(torch.int32)
    floats = torch.cat([bits, ties, ties + 1, ties - 1]).view(torch.float32)
    safetensors.torch.save_file({"h": halves, "f": floats}, tmp_path / "x.safetensors")
    with ps.Tensors(tmp_path / "x.safetensors") as f:
        np.testing.assert_array_equal(f.read("h"), halves.float().numpy())  # NaN equals NaN here
        for k, t in (("h", halves), ("f", floats)):
            got = torch.from_numpy(f.read(k, ps.BF16).view(np.int16)).view(torch.bfloat16)
            assert torch.equal(got.isnan(), t.isnan())
            keep = ~t.isnan()
            assert torch.equal(
                got[keep].view(torch.int16), t.to(torch.bfloat16)[keep].view(torch.int16)
            )


@settings(max_examples=60, **FIX)
@given(
    st.integers(0, 40000),
    st.integers(0, 40000),
    st.sampled_from(["F32", "BF16", "F16"]),
    st.sampled_from([ps.F32, ps.BF16]),
)
def test_any_run_of_elements_is_read_alone(tmp_path, a, b, source, dtype):
    path = tmp_path / f"{source}.safetensors"
    if not path.exists():
        safetensors.torch.save_file(
            {"pad": torch.ones(3), "x": torch.arange(40000).to(TORCH[source])}, path
        )
    first, n = min(a, b), abs(a - b)
    with ps.Tensors(path) as f:
        np.testing.assert_array_equal(
            f.read("x", dtype, first, n), f.read("x", dtype)[first : first + n]
        )


# Scales of a weight of 200 x 300, by their name after the weight's, shape and dtype; rows and
# columns that one is of.
SCALES = {
    "blocks": ("_scale_inv", (2, 3), torch.float32, (128, 128)),
    "bf16 blocks": ("_scale", (2, 3), torch.bfloat16, (128, 128)),
    "rows": ("_scale", (200, 1), torch.float32, (1, 300)),
    "one": ("_scale", (), torch.float32, (200, 300)),
    "one of one": ("_scale_inv", (1,), torch.bfloat16, (200, 300)),
    "one of Mistral": ("_scale_inv", (), torch.bfloat16, (200, 300)),
    "powers of two": ("_scale_inv", (2, 3), torch.float8_e8m0fnu, (128, 128)),
}


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("case", SCALES)
def test_weights_in_fp8_are_their_values_times_their_scales(tmp_path, case, fp8):
    end, shape, dtype, (rows, cols) = SCALES[case]
    g = torch.Generator().manual_seed(3)
    q = (torch.randn((200, 300), generator=g) * 8).to(fp8)
    scale = (2.0 ** torch.randint(-9, 3, shape, generator=g) * 1.37).to(dtype)
    grid = scale.float().reshape(-(-200 // rows), -(-300 // cols))
    want = q.float() * grid.repeat_interleave(rows, 0)[:200].repeat_interleave(cols, 1)[:, :300]
    safetensors.torch.save_file(
        {"a.weight": q, "a.weight" + end: scale, "a.input_scale": torch.ones(1)},
        tmp_path / "x.safetensors",
    )
    with ps.Tensors(tmp_path / "x.safetensors") as f:
        np.testing.assert_array_equal(f.read("a.weight").reshape(200, 300), want.numpy())
        for first, n in ((0, 60000), (299, 2), (38350, 9000), (59999, 1)):
            got = torch.from_numpy(f.read("a.weight", ps.BF16, first, n).view(np.int16))
            assert torch.equal(
                got.view(torch.bfloat16), want.flatten()[first : first + n].bfloat16()
            )


@pytest.mark.parametrize(
    "scales,says",
    [
        ({}, ["F8_E4M3", "has no scales", '"a.weight_scale_inv"']),
        ({"a.weight_scale": torch.ones(3)}, ["[3, 1]", "128 x 128", "[200, 300]"]),
        ({"a.weight_scale": torch.ones((3, 2))}, ["[3, 2]", "128 x 128", "[200, 300]"]),
        ({"a.weight_scale": torch.ones(1, dtype=torch.int64)}, ["a.weight_scale", "I64"]),
    ],
)
def test_weights_in_fp8_without_scales_that_fit_are_refused(tmp_path, scales, says):
    q = torch.ones((200, 300)).to(torch.float8_e4m3fn)
    safetensors.torch.save_file({"a.weight": q} | scales, tmp_path / "x.safetensors")
    with pytest.raises(ps.Failed) as e, ps.Tensors(tmp_path / "x.safetensors") as f:
        f.read("a.weight")
    assert e.value.code == ps.EFORMAT
    ps.one_sentence(e.value.message, tmp_path / "x.safetensors", *says)


def test_reading_past_a_tensor_or_an_unconvertible_one_is_refused(tmp_path):
    safetensors.torch.save_file(
        {"i": torch.arange(4), "x": torch.ones(4)}, tmp_path / "x.safetensors"
    )
    with ps.Tensors(tmp_path / "x.safetensors") as f:
        for args, code, parts in [
            (("i",), ps.EFORMAT, ['"i"', "I64"]),
            (("x", ps.F32, 2, 3), ps.EINVAL, ['"x"', "2 to 5", "4"]),
            (("x", ps.F32, 5, 0), ps.EINVAL, ['"x"']),
            (("x", 7, 0, 1), ps.EINVAL, ["ps_dtype"]),
        ]:
            with pytest.raises(ps.Failed) as e:
                f.read(*args)
            assert e.value.code == code
            ps.one_sentence(e.value.message, tmp_path / "x.safetensors", *parts)
        os.truncate(tmp_path / "x.safetensors", os.path.getsize(tmp_path / "x.safetensors") - 1)
        with pytest.raises(ps.Failed) as e:  # the library puts wide types first: x lies at the end
            f.read("x")
        assert e.value.code == ps.EIO
        ps.one_sentence(e.value.message, tmp_path / "x.safetensors", "ends at byte")


def test_a_header_is_read_alike_wherever_its_pieces_end(tmp_path):
    """Headers are read in pieces of 64 KiB: a piece ends in front of every byte of escapes, UTF-8,
    numbers, words and brackets."""
    tricky = (
        '"x\\n\\u00e9\\ud83d\\ude00\u00e9\u20ac\U0001f600":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8],"more":[-1.5e+10,true,false,null,{"":[]}]}}'
    ).encode()
    for at in range(len(tricky)):
        front = b"{" + b" " * (65536 - 1 - at)
        (tmp_path / "x.safetensors").write_bytes(raw(front + tricky, b"12345678"))
        with ps.Tensors(tmp_path / "x.safetensors") as f:
            assert f.infos() == [("x\n\u00e9\U0001f600\u00e9\u20ac\U0001f600", "F32", (1, 2), 2, 8)]
        for cut in (b"", b"\xff", b"\x1f"):  # the text ends here, or goes wrong
            (tmp_path / "x.safetensors").write_bytes(raw(front + tricky[:at] + cut, b"12345678"))
            refused(tmp_path / "x.safetensors", tmp_path / "x.safetensors")


# ---- memory --------------------------------------------------------------------------------------

PEAK = """
import sys; sys.path.insert(0, sys.argv[1])
import io_native as ps
def peak(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
before = peak()
try:
    ps.Tensors(sys.argv[2])
    message = ""
except ps.Failed as e:
    message = e.message
print(peak() - before, message)
"""


def opened(path):
    """Bytes by which opening the file raised the peak of a process's resident memory, and the
    message if it was refused."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, os.path.dirname(__file__), path],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, _, message = done.stdout.strip().partition(" ")
    return int(peak), message


EMPTY = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
LARGE = {  # 50 to 80 MB each
    "spaces": lambda: (
        b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' + b" " * 55_000_000,
        "",
    ),
    "metadata": lambda: (
        b'{"__metadata__":{'
        + b",".join(b'"%d":"%s"' % (i, b"x" * 999_000) for i in range(60))
        + b"}}",
        "",
    ),
    "numbers nobody reads": lambda: (
        b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"b":['
        + b"1," * 40_000_000
        + b"1]}}",
        "",
    ),
    "dimensions": lambda: (
        b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[' + b"1," * 40_000_000 + b"1]}}",
        "40000001 dimensions",
    ),
    "a name": lambda: (b'{"' + b"a" * 60_000_000 + b'":{}}', "longer than 1048576 bytes"),
    "tensors": lambda: (
        b"{" + b"".join(EMPTY % i for i in range(1_000_000))[:-1] + b"}",
        '"131072" is one more than the 131072 that are read',
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_header_takes_little_memory(tmp_path, name):
    header, says = LARGE[name]()
    (tmp_path / "x.safetensors").write_bytes(raw(header))
    peak, message = opened(tmp_path / "x.safetensors")
    assert peak < 34 << 20 and (says in message if says else not message), (peak, message)


def test_a_large_index_takes_little_memory(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(4)}, tmp_path / "1.safetensors")
    for text, says in [
        ('{"weight_map":{"a":"1.safetensors"},"metadata":[%s0]}' % ("0," * 40_000_000), ""),
        (
            '{"weight_map":{%s"a":"1.safetensors"}}'
            % "".join(f'"{i}":"1.safetensors",' for i in range(2_000_000)),
            'tensor "0"',
        ),
    ]:
        (tmp_path / "model.safetensors.index.json").write_text(text)
        peak, message = opened(tmp_path)
        assert peak < 8 << 20 and (says in message if says else not message), (peak, message)


def test_an_index_that_names_things_twice_is_refused(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(4)}, tmp_path / "1.safetensors")
    one = '"weight_map":{"a":"1.safetensors"}'
    for text, says in [
        ('{"weight_map":{"a":"1.safetensors","a":"1.safetensors"}}', '"a" appears twice'),
        ("{%s,%s}" % (one, one), "weight_map appears twice"),
    ]:
        (tmp_path / "model.safetensors.index.json").write_text(text)
        refused(tmp_path, tmp_path / "model.safetensors.index.json", says)


# ---- refusing headers that lie -------------------------------------------------------------------

F = "F32"
BAD = {
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ["git lfs pull"]),
    "NUL in a dtype": (raw({"a": entry("F32\0", [1], 0, 4)}, b"1234"), ['"a"', "dtype"]),
    "empty file": (b"", ["0 bytes", "truncated"]),
    "seven bytes": (b"\0" * 7, ["7 bytes"]),
    "huge header": (struct.pack("<Q", 2**63), [str(2**63), "100000000"]),
    "header past the end": (raw({}, n=1000), ["1000", "truncated"]),
    "no brace": (raw(b" {}"), ["does not start with {"]),
    "no header": (raw(b""), ["does not start with {"]),
    "not JSON": (raw(b"{a}"), ["line 1"]),
    "not UTF-8": (raw(b'{"\xff": 1}'), ["UTF-8"]),
    "duplicate": (
        raw(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            b"1234",
        ),
        ['"a"', "twice"],
    ),
    "entry no object": (raw({"a": 3}), ['"a"', "not an object"]),
    "no dtype": (raw({"a": {"shape": [], "data_offsets": [0, 4]}}, b"1234"), ['"a"', "dtype"]),
    "unknown dtype": (raw({"a": entry("F31", [1], 0, 4)}, b"1234"), ['"a"', "F31"]),
    "dtype a number": (raw({"a": entry(3, [1], 0, 4)}, b"1234"), ['"a"', "dtype"]),
    "no shape": (raw({"a": {"dtype": F, "data_offsets": [0, 4]}}, b"1234"), ['"a"', "shape"]),
    "shape negative": (raw({"a": entry(F, [-1], 0, 4)}, b"1234"), ['"a"', "shape[0]"]),
    "shape a fraction": (raw({"a": entry(F, [1.0], 0, 4)}, b"1234"), ['"a"', "shape[0]"]),
    "shape past u64": (raw({"a": entry(F, [2**64], 0, 4)}, b"1234"), ['"a"', "shape[0]"]),
    "shape product past u64": (
        raw({"a": entry(F, [2**33, 2**33], 0, 4)}, b"1234"),
        ['"a"', "2^64"],
    ),
    "bits past u64": (raw({"a": entry(F, [2**60], 0, 4)}, b"1234"), ['"a"', "2^64"]),
    "9 dimensions": (raw({"a": entry(F, [1] * 9, 0, 4)}, b"1234"), ['"a"', "9", "8"]),
    "no offsets": (raw({"a": {"dtype": F, "shape": [1]}}, b"1234"), ['"a"', "data_offsets"]),
    "one offset": (
        raw({"a": {"dtype": F, "shape": [1], "data_offsets": [0]}}, b"1234"),
        ['"a"', "data_offsets"],
    ),
    "offset past u64": (raw({"a": entry(F, [1], 0, 2**64)}, b"1234"), ['"a"', "data_offsets"]),
    "offsets backwards": (raw({"a": entry(F, [0], 4, 0)}, b"1234"), ['"a"', "4 to 0"]),
    "past the end": (
        raw({"a": entry(F, [2], 0, 8)}, b"1234"),
        ['"a"', "0 to 8", "4 bytes", "truncated"],
    ),
    "wrong span": (raw({"a": entry(F, [2], 0, 4)}, b"1234"), ['"a"', "4 bytes", "need 8"]),
    "overlap": (
        raw({"a": entry(F, [1], 0, 4), "b": entry(F, [1], 2, 6)}, b"123456"),
        ['"b"', "overlap"],
    ),
    "same place twice": (
        raw({"a": entry(F, [1], 0, 4), "b": entry(F, [1], 0, 4)}, b"1234"),
        ["overlap"],
    ),
    "hole": (
        raw({"a": entry(F, [1], 0, 4), "b": entry(F, [1], 5, 9)}, b"123456789"),
        ['"b"', "hole"],
    ),
    "hole in front": (raw({"a": entry(F, [1], 4, 8)}, b"12345678"), ['"a"', "hole"]),
    "data after the end": (raw({"a": entry(F, [1], 0, 4)}, b"12345"), ["byte 4", "5"]),
    "half a byte": (raw({"a": entry("F4", [1], 0, 0)}), ['"a"', "whole bytes"]),
    "metadata no object": (raw({"__metadata__": 3}), ["__metadata__"]),
    "metadata no string": (raw({"__metadata__": {"k": 1}}), ["__metadata__", '"k"']),
    "nested deep": (raw(b'{"a":{"b":' + b"[" * 100 + b"]" * 100 + b"}}"), ["64 deep"]),
    "dtype twice": (
        raw(b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"1234"),
        ['"a"', "dtype", "twice"],
    ),
    "metadata too long": (raw({"__metadata__": {"k": "x" * 2**20}}), ["longer than 1048576 bytes"]),
    "no end": (raw(b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'), ["comma or }"]),
    "more after the end": (raw(b"{} 0"), ["something follows"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_header_is_refused_naming_the_file_and_what_is_wrong(tmp_path, name):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(BAD[name][0])
    refused(path, path, *BAD[name][1])


def test_missing_files_are_named(tmp_path):
    refused(tmp_path / "none", tmp_path / "none", "No such file", code=ps.EIO)
    refused(tmp_path, tmp_path, "model.safetensors", code=ps.EIO)
    refused("/dev/null", "/dev/null", "regular file", code=ps.EIO)


@pytest.mark.parametrize(
    "names, says",
    [
        (["pytorch_model.bin"], ["in pytorch_model.bin, and only safetensors", "save_pretrained"]),
        (["pytorch_model.bin.index.json"], ["in files pytorch_model-*.bin", "save_pretrained"]),
        (["zero_to_fp32.py", "latest"], ["DeepSpeed", "zero_to_fp32.py with --safe_serial"]),
        (["adapter_config.json"], ["penstock merge makes a model of it"]),
        (["config.json"], ["is it a model directory?"]),
    ],
)
def test_a_directory_without_safetensors_says_what_it_is(tmp_path, names, says):
    for name in names:
        (tmp_path / name).touch()
    refused(tmp_path, tmp_path, *says, code=ps.EIO)


def test_a_file_without_tensors_is_read(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(raw({}))
    with ps.Tensors(tmp_path / "a.safetensors") as t:
        assert t.infos() == []


def accepted_by_library(path):
    try:
        with safetensors.safe_open(path, "pt") as f:
            return sorted(f.keys())
    except Exception:  # its errors have no common class
        return None


def accepted_as_by_the_library(tmp_path, blob):
    path = tmp_path / "x.safetensors"
    path.write_bytes(blob)
    theirs = accepted_by_library(path)
    try:
        with ps.Tensors(path) as f:
            mine = sorted(i[0] for i in f.infos())
    except ps.Failed as e:
        assert e.code == ps.EFORMAT
        ps.one_sentence(e.message, path)
        # stricter than the library: the header starts with { at once, duplicate keys, 9 or more
        # dimensions, fractional bytes, odd JSON
        assert theirs is None or any(
            w in e.message
            for w in ("start with {", "twice", "at most 8", "whole bytes", "__metadata__", "U+0000")
        ), (blob, e.message)
        return
    assert theirs == mine, blob


TOKENS = [
    b"{", b"}", b"[", b"]", b",", b'"', b"0", b"1", b"4", b"-1", b"18446744073709551616", b"F32",
    b"BF16", b"data_offsets", b"\xff", b"\n", b"null", b"1e3",
]  # fmt: skip


@settings(max_examples=750, **FIX)
@given(
    st.lists(st.tuples(st.sampled_from(["F32", "BF16", "U8", "F4"]), shapes), max_size=4), st.data()
)
def test_mutated_headers_are_accepted_only_when_the_library_accepts_them(tmp_path, plan, data):
    header, at = {}, 0
    for i, (dtype, shape) in enumerate(plan):
        end = at + int(np.prod(shape, dtype=np.int64)) * {"F32": 4, "BF16": 2, "U8": 1, "F4": 1}[
            dtype
        ] // (2 if dtype == "F4" else 1)
        header[f"t{i}"] = entry(dtype, list(shape), at, end)
        at = end
    if header and data.draw(st.booleans()):  # one field
        t = header[data.draw(st.sampled_from(sorted(header)))]
        key = data.draw(st.sampled_from(sorted(t)))
        t[key] = data.draw(
            st.one_of(
                st.integers(-2, 2**65),
                st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**65)), max_size=3),
                st.sampled_from(["F32", "F16", "X"]),
            )
        )
    text = json.dumps(header).encode()
    for _ in range(data.draw(st.integers(0, 2))):  # the text
        k = data.draw(st.integers(0, len(text)))
        text = (
            text[:k] + data.draw(st.sampled_from(TOKENS)) + text[k + data.draw(st.integers(0, 3)) :]
        )
    size = at + data.draw(st.sampled_from([0, 0, 0, 1, -1]))
    blob = raw(
        text,
        b"x" * max(size, 0),
        data.draw(st.sampled_from([None, None, None, len(text) + 1, len(text) - 1, 2**40]))
        if text
        else None,
    )
    accepted_as_by_the_library(tmp_path, blob)


def test_each_change_of_two_numbers_is_accepted_only_when_the_library_accepts_it(tmp_path):
    """Places and shapes of two tensors: drawn mutations seldom come to a hole or an overlap."""
    numbers = [0, 8, 2, 8, 20, 3]  # of each tensor: begin, end, elements
    for (i, j), d, e in itertools.product(
        itertools.combinations(range(6), 2), (0, -1, 1, 4), (0, -1, 1, 4)
    ):
        n = list(numbers)
        n[i] += d
        n[j] += e
        header = {"a": entry("F32", [n[2]], n[0], n[1]), "b": entry("F32", [n[5]], n[3], n[4])}
        accepted_as_by_the_library(tmp_path, raw(json.dumps(header).encode(), b"x" * 20))


# ---- directories ---------------------------------------------------------------------------------


def sharded(folder, files, index=None):
    for name, tensors in files.items():
        safetensors.torch.save_file(tensors, folder / name)
    wm = {t: name for name, tensors in files.items() for t in tensors} if index is None else index
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": wm})
    )


def test_a_sharded_directory_is_one_set(tmp_path):
    sharded(
        tmp_path,
        {
            "a.safetensors": {"x": torch.ones(3), "z": torch.zeros(1)},
            "b.safetensors": {"y": torch.full((2,), 2.0)},
        },
    )
    with ps.Tensors(tmp_path) as f:
        assert sorted(i[0] for i in f.infos()) == ["x", "y", "z"]
        assert f.read("y").tolist() == [2, 2] and f.read("x").tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "index, parts",
    [
        (
            {"x": "a.safetensors", "y": "a.safetensors"},
            ['"y"', "a.safetensors", "does not have it"],
        ),
        ({"x": "a.safetensors", "nope": "b.safetensors"}, ['"nope"', "b.safetensors"]),
        ({"x": "../a.safetensors"}, ["weight_map", '"x"', "same folder"]),
        ({"x": 3}, ["weight_map", '"x"']),
        ({"x": ""}, ["weight_map", '"x"']),
        ({}, ["weight_map", "empty"]),
        ([1], ["weight_map"]),
    ],
)
def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path, index, parts):
    sharded(
        tmp_path,
        {"a.safetensors": {"x": torch.ones(3)}, "b.safetensors": {"y": torch.ones(2)}},
        index,
    )
    refused(tmp_path, tmp_path / "model.safetensors.index.json", *parts)


def test_a_missing_shard_and_a_tensor_in_two_shards_are_named(tmp_path):
    sharded(
        tmp_path,
        {
            "a.safetensors": {"w": torch.ones(1), "x": torch.ones(3)},
            "b.safetensors": {"x": torch.ones(3), "y": torch.ones(2)},
        },
    )
    refused(tmp_path, '"x"', "a.safetensors", "b.safetensors")
    (tmp_path / "b.safetensors").unlink()
    refused(tmp_path, tmp_path / "b.safetensors", "No such file", code=ps.EIO)


# ---- writing -------------------------------------------------------------------------------------


@settings(max_examples=80, **FIX)
@given(
    st.dictionaries(names, shapes, max_size=12),
    st.sampled_from([0, 1, 16, 64, 10**6]),
    st.integers(1, 99),
    st.sampled_from([ps.F32, ps.BF16]),
)
def test_what_we_write_the_library_reads(tmp_path_factory, plan, limit, piece, dtype):
    folder = tmp_path_factory.mktemp("w") / "model"
    width = 4 if dtype == ps.F32 else 2
    tensors = [
        (k, dtype, s, np.random.default_rng(i).bytes(width * int(np.prod(s, dtype=np.int64))))
        for i, (k, s) in enumerate(plan.items())
    ]
    ps.write(folder, tensors, limit, meta=[("step", "12"), ("note", 'a"\\\n\u00e9')], piece=piece)
    got = {}
    for path in folder.glob("*.safetensors"):
        assert struct.unpack("<Q", path.read_bytes()[:8])[0] % 8 == 0
        with safetensors.safe_open(path, "pt") as f:
            assert f.metadata() == {"format": "pt", "step": "12", "note": 'a"\\\n\u00e9'}
            shard = {k: f.get_tensor(k) for k in f.keys()}
            assert not limit or len(shard) <= 1 or sum(t.nbytes for t in shard.values()) <= limit
            got.update(shard)
    assert {
        k: (tuple(t.shape), t.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for k, t in got.items()
    } == {k: (s, d) for k, _, s, d in tensors}
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    index = folder / "model.safetensors.index.json"
    if len(list(folder.glob("*.safetensors"))) > 1:
        assert set(json.loads(index.read_text())["weight_map"]) == set(plan)
        assert json.loads(index.read_text())["metadata"]["total_size"] == sum(
            len(t[3]) for t in tensors
        )
    else:
        assert not index.exists()
    with ps.Tensors(folder) as f:
        assert sorted(i[0] for i in f.infos()) == sorted(plan)


def test_a_second_save_leaves_nothing_of_the_first(tmp_path):
    x = ("x", ps.F32, (4,), b"\0" * 16)
    y = ("y", ps.F32, (4,), b"\0" * 16)
    ps.write(tmp_path, [x, y], 16)
    (tmp_path / "other.safetensors").write_bytes(b"mine")
    ps.write(tmp_path, [x], 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "other.safetensors"]
    ps.write(tmp_path, [x, y, ("z", ps.F32, (4,), b"\0" * 16)], 16)
    ps.write(tmp_path, [x, y], 16)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "other.safetensors",
    ]


def test_an_aborted_or_short_write_leaves_nothing(tmp_path):
    folder = tmp_path / "m"
    w = ps.create(folder, [("x", ps.F32, (4,)), ("y", ps.F32, (4,))], 16)
    ps.check(ps.lib.ps_tensors_append(w, b"\0" * 20, 20))
    assert not list(folder.glob("*.safetensors"))
    assert ps.lib.ps_tensors_finish(w) == ps.ESTATE
    ps.one_sentence(ps.lib.ps_last_error().decode(), folder, "12 of 16 bytes")
    assert not folder.exists()
    ps.lib.ps_tensors_abort(ps.create(folder, [("x", ps.F32, (4,))]))
    assert not folder.exists()
    w = ps.create(folder, [("x", ps.F32, (1,))])
    assert ps.lib.ps_tensors_append(w, b"\0" * 5, 5) == ps.ESTATE
    ps.lib.ps_tensors_abort(w)
    assert not folder.exists()


@pytest.mark.parametrize(
    "tensors, stem, meta, parts",
    [
        ([("x", 0, (1,)), ("x", 0, (1,))], "model", (), ['"x"', "twice"]),
        ([("", 0, (1,))], "model", (), ["tensor 0", "name"]),
        ([("__metadata__", 0, (1,))], "model", (), ["name"]),
        ([(b"\xff", 0, (1,)), (b"\xfe", 0, (1,))], "model", (), ["twice"]),
        ([("x", 9, (1,))], "model", (), ['"x"', "ps_dtype"]),
        ([("x", 0, (2**40, 2**40))], "model", (), ['"x"', "2^63"]),
        ([("x", 0, (2**40,)), ("y", 0, (2**61 - 1,))], "model", (), ["2^63"]),
        ([("x", 0, (2**50,))], "model", (), ["PiB", "free"]),
        ([("x", 1, (1,)), ("y", 0, (1,))], "model", (), ['"y"', "aligned", "fp32"]),
        ([("x", 0, (1,))], "a/b", (), ["a/b", "stem"]),
        ([("x", 0, (1,))], "", (), ["stem"]),
        ([("x", 0, (1,))], "model", (("format", "np"),), ["format", "twice"]),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path, tensors, stem, meta, parts):
    with pytest.raises(ps.Failed) as e:
        ps.create(tmp_path / "m", tensors, 0, stem, meta)
    assert e.value.code in (ps.EINVAL, ps.EIO)
    ps.one_sentence(e.value.message, tmp_path, *parts)
    assert not (tmp_path / "m").exists()


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "no" / "deeper", tmp_path / "file"):
        with pytest.raises(ps.Failed) as e:
            ps.create(folder, [("x", ps.F32, (1,))])
        assert e.value.code == ps.EIO
        ps.one_sentence(e.value.message, folder)

"""The strict JSON reader and the writer against Python's json: random documents, mutated documents,
the edges of the grammar.

Stricter than Python's json on purpose, and mirrored by strict() below: duplicate keys, NaN and
Infinity, lone surrogates, U+0000 in a string, a byte order mark, text that is not UTF-8, more than 64
levels."""

import ctypes
import json
import re

import io_native as ps
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

CAP = 1 << 20


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    lib = ps.build_shim(
        ps.ROOT / "tests/native/json_echo.c", tmp_path_factory.mktemp("shim") / "json_echo.so"
    )
    lib.ps_last_error.restype = ctypes.c_char_p
    lib.t_json_echo.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    lib.t_json_lookup.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    return lib


class Refused(Exception):
    pass


def ours(shim, data):
    out = ctypes.create_string_buffer(CAP)
    r = shim.t_json_echo(data, len(data), out, CAP)
    if r < 0:
        message = shim.ps_last_error().decode()
        assert r == ps.EFORMAT
        ps.one_sentence(message, "doc.json: line ")
        raise Refused(message)
    assert r == 0
    return json.loads(out.value)


def strict(data):
    """What Python's json reads, or ValueError where it, or a rule on top of it, refuses."""

    def pairs(items):
        keys = [k for k, _ in items]
        if len(set(keys)) != len(keys) or "\0" in "".join(keys):
            raise ValueError("keys")
        return dict(items)

    def refuse(name):
        raise ValueError(name)

    text = data.decode("utf-8")
    value = json.loads(text, object_pairs_hook=pairs, parse_constant=refuse)
    json.dumps(
        value, ensure_ascii=False
    ).encode()  # UnicodeEncodeError, a ValueError: lone surrogates
    if depth(value) > 64 or has_nul(value):
        raise ValueError("depth or U+0000")
    return value


def has_nul(v):
    if isinstance(v, (dict, list)):
        return any(map(has_nul, v.values() if isinstance(v, dict) else v))
    return isinstance(v, str) and "\0" in v


def depth(v):
    if isinstance(v, (dict, list)):
        return 1 + max((depth(x) for x in (v.values() if isinstance(v, dict) else v)), default=0)
    return 0


def same(a, b):
    """@a is Python's value, @b came through us: numbers beyond u64 became doubles, infinities
    null."""
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, str):
        return isinstance(b, str) and a == b
    if a is None or isinstance(a, bool):
        return a is b
    if isinstance(a, int) and 0 <= a < 2**64:
        return isinstance(b, (int, float)) and a == b
    try:
        a = float(a)
    except OverflowError:
        a = float("inf")
    return b is None if abs(a) == float("inf") else a == b


text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(0, 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
)
documents = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, text),
    lambda kids: st.one_of(
        st.lists(kids, max_size=12),
        st.dictionaries(text, kids, max_size=20),
    ),
    max_leaves=40,
)
dumped = st.builds(
    lambda v, ascii, indent: json.dumps(v, ensure_ascii=ascii, indent=indent).encode(),
    documents,
    st.booleans(),
    st.sampled_from([None, 0, 2]),
)
FIX = dict(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)


@settings(max_examples=300, **FIX)
@given(dumped)
def test_documents_read_and_write_back_the_same(shim, data):
    assert same(strict(data), ours(shim, data))


INSERTS = [
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"0", b"-", b".", b"e", b"E+", b" ", b"\n",
    b"\0", b"\xff", b"\xc0\x80", b"\\u", b"\\ud800", b"\\udc00", b"\\u0000", b"NaN", b"Infinity",
    b"true", b"null", b"/*", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"1e999", b"\x1f", b"\x7f", b"'",
    b"\xe2\x80\xa8",
]  # fmt: skip


def accepts_what_python_accepts(shim, data):
    try:
        want = strict(data)
    except (ValueError, RecursionError):
        with pytest.raises(Refused):
            ours(shim, data)
        return
    assert same(want, ours(shim, data)), data


@settings(max_examples=300, **FIX)
@given(dumped, st.data())
@example(b'{"a": 1, "a": 2}', None)
def test_mutated_documents_are_accepted_exactly_when_python_accepts_them(shim, data, draw):
    for _ in range(draw.draw(st.integers(1, 3)) if draw else 0):
        at = draw.draw(st.integers(0, len(data)))
        cut = draw.draw(st.integers(0, 3))
        data = (
            data[:at]
            + draw.draw(st.one_of(st.sampled_from(INSERTS), st.binary(max_size=2)))
            + data[at + cut :]
        )
    accepts_what_python_accepts(shim, data)


def test_each_mutation_of_a_document_is_accepted_exactly_when_python_accepts_it(shim):
    """Drawn mutations seldom come to the place where a mistake of the reader shows."""
    data = b'{"a": [1, -2.5e3, "x\xc3\xa9\\n"], "\\u00e9": {"b": true}}'
    for at in range(len(data) + 1):
        for cut in range(2):
            for insert in (b"", *INSERTS):
                accepts_what_python_accepts(shim, data[:at] + insert + data[at + cut :])


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "line 1: the text ends where a value is expected"),
        (b"{\n\n  'a': 1}", "line 3: a key in double quotes is expected"),
        (b'{"a": 1,\n "b": 2,\n "a": 3}', 'line 3: the key "a" appears twice'),
        (b'{"a": 1,}', "a key in double quotes is expected"),
        (b"[1,]", "a value is expected"),
        (b"[01]", "superfluous zero"),
        (b"[1.]", "a digit must follow the decimal point"),
        (b"[1e]", "a digit must follow the exponent's e"),
        (b"[-]", "a value is expected"),
        (b"[+1]", "a value is expected"),
        (b"[.5]", "a value is expected"),
        (b"NaN", "a value is expected"),
        (b'"\t"', "a control character stands in a string unescaped"),
        (b'"\\x41"', "an unknown escape"),
        (b'"\\ud800"', "a high surrogate stands alone"),
        (b'"\\udc00"', "a low surrogate stands alone"),
        (b'"\\u12g4"', "four hexadecimal digits"),
        (b'"abc', "a string is not closed"),
        (b'{"a\\u0000b": 1}', "a key contains the character U+0000"),
        (b'["silu\\u0000x"]', "the string that ends here contains the character U+0000"),
        (b'"\xff"', "not UTF-8"),
        (b"\xef\xbb\xbf{}", "a value is expected"),
        (b"{} {}", "something follows the end"),
        (b"[" * 65 + b"]" * 65, "nested more than 64 deep"),
        (b'{"a" 1}', "a colon is expected"),
        (b"[1 2]", "a comma or ] is expected"),
        (b'{"a":1 "b":2}', "a comma or } is expected"),
    ],
)
def test_what_is_refused_is_named_with_its_line(shim, data, words):
    with pytest.raises(Refused) as e:
        ours(shim, data)
    assert words in str(e.value)


def test_64_levels_are_read(shim):
    data = b"[" * 64 + b"]" * 64
    assert ours(shim, data) == json.loads(data)


def test_integers_up_to_u64_are_exact_and_doubles_round_trip(shim):
    values = [
        2**64 - 1,
        2**53 + 1,
        2**63,
        0,
        0.1,
        1e-320,
        5e-324,
        1.7976931348623157e308,
        -1.5,
        1e21,
    ]
    assert ours(shim, json.dumps(values).encode()) == values


@settings(max_examples=50, **FIX)
@given(st.dictionaries(text, st.integers(0, 9), max_size=60))
def test_every_key_is_found_in_small_and_in_large_objects(shim, value):
    data = json.dumps(value).encode()
    assert shim.t_json_lookup(data, len(data)) == 0


def test_a_duplicate_among_many_keys_is_found(shim):
    keys = [f'"k{i}": {i}' for i in range(5000)]
    with pytest.raises(Refused, match=re.escape('"k17" appears twice')):
        ours(shim, ("{" + ", ".join(keys + ['"k17": 0']) + "}").encode())


def test_nothing_leaks(shim):
    shim.ps__live_allocations.restype = ctypes.c_int64
    assert shim.ps__live_allocations() == 0

"""Small helpers that everything relies on: the signed form of JSON, parsing what strangers send, text fit to travel."""
from __future__ import annotations

import json
import math
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, List, Optional

import pytest
import rfc8785
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import ROOT, clean_environment, poll

sys.path.insert(0, str(ROOT))
import mam as program

PROPERTY = settings(deadline=None, derandomize=True, database=None, max_examples=120,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


# ---- the signed form (RFC 8785) ----------------------------------------------------------------------------------

# RFC 8785, appendix B: the bits of a double, and how it is printed.
APPENDIX_B = [
    ("0000000000000000", "0"),
    ("8000000000000000", "0"),
    ("0000000000000001", "5e-324"),
    ("8000000000000001", "-5e-324"),
    ("7fefffffffffffff", "1.7976931348623157e+308"),
    ("ffefffffffffffff", "-1.7976931348623157e+308"),
    ("4340000000000000", "9007199254740992"),
    ("c340000000000000", "-9007199254740992"),
    ("4430000000000000", "295147905179352830000"),
    ("7fffffffffffffff", None),
    ("7ff0000000000000", None),
    ("44b52d02c7e14af5", "9.999999999999997e+22"),
    ("44b52d02c7e14af6", "1e+23"),
    ("44b52d02c7e14af7", "1.0000000000000001e+23"),
    ("444b1ae4d6e2ef4e", "999999999999999700000"),
    ("444b1ae4d6e2ef4f", "999999999999999900000"),
    ("444b1ae4d6e2ef50", "1e+21"),
    ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
    ("3eb0c6f7a0b5ed8d", "0.000001"),
    ("41b3de4355555553", "333333333.3333332"),
    ("41b3de4355555554", "333333333.33333325"),
    ("41b3de4355555555", "333333333.3333333"),
    ("41b3de4355555556", "333333333.3333334"),
    ("41b3de4355555557", "333333333.33333343"),
    ("becbf647612f3696", "-0.0000033333333333333333"),
    ("43143ff3c1cb0959", "1424953923781206.2"),
]


def printed_as_an_unsafe_integer(value: float) -> bool:
    return 2.0 ** 53 <= abs(value) < 1e21


@pytest.mark.parametrize("bits, text", APPENDIX_B)
def test_a_number_is_printed_as_the_standard_prints_it(bits: str, text: Optional[str]) -> None:
    """Another form of one number is another signature: the peer would drop the event."""
    value = struct.unpack(">d", bytes.fromhex(bits))[0]
    if text is None or printed_as_an_unsafe_integer(value):
        with pytest.raises(program.BadJson):
            program.canonical(value)
    else:
        assert program.canonical(value) == text.encode()


@pytest.mark.parametrize("value, text", [
    (0, "0"), (-0.0, "0"), (1.0, "1"), (-1.5, "-1.5"), (100.0, "100"), (1e20 / 1e20, "1"), (123456.75, "123456.75"),
    (1e-6, "0.000001"), (1e-7, "1e-7"), (1.5e-7, "1.5e-7"), (1e21, "1e+21"), (1.25e25, "1.25e+25"), (1e100, "1e+100"),
    (2 ** 53 - 1, "9007199254740991"), (1 - 2 ** 53, "-9007199254740991"), (float(2 ** 53 - 1), "9007199254740991"),
    (4.5, "4.5"), (2e-3, "0.002"), (1e-27, "1e-27"), (1e30, "1e+30"), (0.1 + 0.2, "0.30000000000000004"),
])
def test_more_numbers(value: Any, text: str) -> None:
    assert program.canonical(value) == text.encode()


def test_the_sample_of_the_standard_comes_out_byte_for_byte() -> None:
    """RFC 8785, sections 3.2.2 to 3.2.4."""
    text = r'''{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
                "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
                "literals": [null, true, false]}'''
    expected = bytes.fromhex(
        "7b226c69746572616c73223a5b6e756c6c2c747275652c66616c73655d2c226e756d62657273223a5b333333333333333333"
        "2e333333333333332c31652b33302c342e352c302e3030322c31652d32375d2c22737472696e67223a22e282ac245c753030"
        "30665c6e4127425c225c5c5c5c5c222f227d")
    assert program.canonical(program.parse_json(text.encode())) == expected


def test_keys_are_sorted_by_utf16_units() -> None:
    """RFC 8785, section 3.2.3. Python sorts by code point, which puts an emoji behind U+FB33."""
    names = {"\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter Dalet With Dagesh",
             "1": "One", "\U0001f600": "Emoji: Grinning Face", "\u0080": "Control",
             "\u00f6": "Latin Small Letter O With Diaeresis"}
    assert list(json.loads(program.canonical(names)).values()) == [
        "Carriage Return", "One", "Control", "Latin Small Letter O With Diaeresis", "Euro Sign",
        "Emoji: Grinning Face", "Hebrew Letter Dalet With Dagesh"]


@pytest.mark.parametrize("character, text", [
    ("\b", r"\b"), ("\t", r"\t"), ("\n", r"\n"), ("\f", r"\f"), ("\r", r"\r"), ('"', r'\"'), ("\\", "\\\\"),
    ("\x00", r"\u0000"), ("\x0b", r"\u000b"), ("\x1f", r"\u001f"), ("/", "/"), ("\x7f", "\x7f"), ("\u2028", "\u2028"),
    ("\u00e9", "\u00e9"), ("e\u0301", "e\u0301"), ("\U0001f600", "\U0001f600"), ("\ufeff", "\ufeff"),
])
def test_a_string_is_escaped_as_the_standard_escapes_it(character: str, text: str) -> None:
    """RFC 8785, section 3.2.2.2: short forms, lower-case hex, nothing else escaped, nothing normalised."""
    assert program.canonical([character]) == ('["%s"]' % text).encode()
    assert program.canonical({character: 1}) == ('{"%s":1}' % text).encode()


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["\U0001f600", "\ufb33", "\ue000", "\U00010000", "\uffff", "a\U0001f600", "a\ufb33", "\x00", '"\\'])
NUMBERS = st.integers(1 - 2 ** 53, 2 ** 53 - 1) | st.floats(allow_nan=False, allow_infinity=False).filter(
    lambda value: not printed_as_an_unsafe_integer(value))
JSON = st.recursive(st.none() | st.booleans() | NUMBERS | TEXT,
                    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=6), max_leaves=25)


@PROPERTY
@given(JSON)
def test_any_value_has_the_form_an_independent_implementation_gives_it(value: Any) -> None:
    """Two implementations that disagree on one byte cannot talk to each other."""
    assert program.canonical(value) == rfc8785.dumps(value)


@PROPERTY
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_float_is_printed_right_or_refused(value: float) -> None:
    """Refused is exactly what would print as an integer that doubles cannot tell from its neighbour."""
    if printed_as_an_unsafe_integer(value):
        with pytest.raises(program.BadJson):
            program.canonical([value])
    else:
        assert program.canonical(value) == rfc8785.dumps(value)
        assert float(program.canonical(value)) == value


@PROPERTY
@given(JSON)
def test_the_form_is_stable(value: Any) -> None:
    """A receiver parses and prints again; what it then verifies must be what was signed."""
    once = program.canonical(value)
    assert program.canonical(program.parse_json(once)) == once


def nested(depth: int, kind: str = "list") -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"k": value}
    return value


@pytest.mark.parametrize("value", [
    math.nan, math.inf, -math.inf, [1, math.nan], {"a": {"b": math.inf}}, "\ud800", ["a\udfff"], {"\ud800": 1},
    2 ** 53, -2 ** 53, 10 ** 400, [{"n": 2 ** 63}], float(2 ** 53), -1e20, {1: 2}, {None: 1}, {"a": b"bytes"},
    {"a": {1, 2}}, 1j, nested(program.MAX_JSON_DEPTH + 1), nested(program.MAX_JSON_DEPTH + 1, "dict"),
    nested(900),
], ids=lambda value: repr(value)[:24])
def test_what_two_implementations_could_read_differently_is_refused(value: Any) -> None:
    with pytest.raises(program.BadJson) as refusal:
        program.canonical(value)
    assert str(refusal.value)


def test_depth_is_allowed_up_to_the_limit() -> None:
    for kind in ("list", "dict"):
        assert program.canonical(nested(program.MAX_JSON_DEPTH, kind))


# ---- parsing what strangers send ---------------------------------------------------------------------------------

BAD_JSON = [
    (b"", "not JSON"), (b"{", "not JSON"), (b"[1,]", "not JSON"), (b"{'a':1}", "not JSON"), (b"nul", "not JSON"),
    (b"1 2", "not JSON"), (b"\x00", "not JSON"), (b'"a\nb"', "not JSON"), (b"01", "not JSON"),
    (b'{"a":1,"a":2}', "duplicate"), (b'[{"b":{"a":1,"\\u0061":1}}]', "duplicate"),
    (b"NaN", "NaN"), (b"[Infinity]", "Infinity"), (b'{"a":-Infinity}', "-Infinity"),
    (b"\xff", "UTF-8"), (b'"\xc3"', "UTF-8"), (b'"\xed\xa0\x80"', "UTF-8"), (b'"\xc0\x80"', "UTF-8"),
    ('{"a":1}'.encode("utf-16"), ""), ('{"a":1}'.encode("utf-16-le"), ""), ('{"a":1}'.encode("utf-32"), ""),
    ('{"a":1}'.encode("utf-8-sig"), ""),
    (b"[" * 100000, "nested"), (b"[" * 100000 + b"]" * 100000, "nested"), (b'{"a":' * 40000, "nested"),
    (b'"' + b"x" * (256 * 1024) + b'"', "bytes"),
]


@pytest.mark.parametrize("raw, why", BAD_JSON, ids=[repr(raw[:16]) for raw, _ in BAD_JSON])
def test_bad_json_is_refused_with_its_reason(raw: bytes, why: str) -> None:
    with pytest.raises(program.BadJson) as refusal:
        program.parse_json(raw)
    assert why in str(refusal.value) and len(str(refusal.value)) < 400


@pytest.mark.parametrize("raw", [
    b"9" * 5000, b"[9007199254740992]", b'{"a":-9007199254740992}', b"1e400", b"-1e400", b'["\\ud800"]',
    b'{"\\udfff":1}', b"9007199254740992.0", b"[" * 33 + b"]" * 33, b'{"a":' * 33 + b"1" + b"}" * 33,
], ids=lambda raw: repr(raw[:24]))
def test_what_could_not_be_signed_is_not_let_in(raw: bytes) -> None:
    """Docstring and DESIGN 7: everything that canonical() refuses is refused on both sides."""
    with pytest.raises(program.BadJson):
        program.parse_json(raw)


@pytest.mark.parametrize("raw, value", [
    (b"{}", {}), (b" [1, 2.5, null, true] ", [1, 2.5, None, True]), ('"\u00e9\U0001f600"'.encode(), "\u00e9\U0001f600"),
    (b'"\\ud83d\\ude00"', "\U0001f600"), (b'{"a":{"a":1}}', {"a": {"a": 1}}), (b"[" * 32 + b"]" * 32, nested(31)),
    (b'"' + b"x" * (256 * 1024 - 2) + b'"', "x" * (256 * 1024 - 2)), (b"9007199254740991", 2 ** 53 - 1),
], ids=lambda value: repr(value)[:24])
def test_good_json_is_read_as_it_stands(raw: bytes, value: Any) -> None:
    expected = json.loads(raw.decode())
    assert program.parse_json(raw) == expected
    if not str(raw).startswith("b'[[["):
        assert expected == value


def test_the_limit_can_be_another() -> None:
    assert program.parse_json(b"[1]", 3) == [1]
    with pytest.raises(program.BadJson, match="3 bytes, more than the 2"):
        program.parse_json(b"[1]", 2)


def parses_or_refuses(raw: bytes) -> None:
    try:
        program.parse_json(raw)
    except program.BadJson as refusal:
        assert str(refusal)


@PROPERTY
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_bad_json(raw: bytes) -> None:
    """Anything else would leave a callback of the MQTT client and end the daemon's thread."""
    parses_or_refuses(raw)


MUTATIONS = st.lists(st.tuples(st.sampled_from(["cut", "insert", "flip", "repeat"]), st.integers(0, 10 ** 6),
                               st.binary(min_size=1, max_size=6) | st.sampled_from(
                                   [b"\\ud8", b"NaN", b"1e999", b"[[[[", b'{"a":', b"\xef\xbb\xbf", b"-", b"\\u0000"])),
                     min_size=1, max_size=6)


def mutate(raw: bytes, mutations: List[Any]) -> bytes:
    for how, where, what in mutations:
        at = where % (len(raw) + 1)
        if how == "cut":
            raw = raw[:at] + raw[at + len(what):]
        elif how == "insert":
            raw = raw[:at] + what + raw[at:]
        elif how == "flip" and at < len(raw):
            raw = raw[:at] + bytes([raw[at] ^ what[0]]) + raw[at + 1:]
        elif how == "repeat":
            raw = raw[:at] + raw[at:at + 20] * 3 + raw[at:]
    return raw


@PROPERTY
@given(JSON, MUTATIONS)
def test_mutated_json_raises_nothing_but_bad_json(value: Any, mutations: List[Any]) -> None:
    parses_or_refuses(mutate(program.canonical(value), mutations))


# ---- text fit to travel ------------------------------------------------------------------------------------------

WORKSPACE, HOME = "/home/alice/my project", "/home/alice"
SECRETS = ["correct-horse-battery", "hunter2hunter2"]

GENERALISED = [
    ("done", "done"),
    ("", ""),
    # the workspace, with the space in its name
    ("wrote /home/alice/my project/src/a.py", "wrote ./src/a.py"),
    ("in /home/alice/my project", "in ."),
    ("/home/alice/my project/a and /home/alice/my project/b", "./a and ./b"),
    ("'/home/alice/my project/a.txt'", "'./a.txt'"),
    ("root=/home/alice/my project;x", "root=.;x"),
    ("/home/alice/my project: clean", ".: clean"),
    # the home, which the workspace is in
    ("see /home/alice/notes.txt", "see ~/notes.txt"),
    ("HOME=/home/alice", "HOME=~"),
    ("/home/alice:/home/alice/bin", "~:~/bin"),
    ("the folder /home/alice.", "the folder ~."),
    ("in /home/alice, and", "in ~, and"),
    ("-I/home/alice/include -L/home/alice/lib", "-I~/include -L~/lib"),
    ("\u8a73\u7d30\u306f/home/alice/notes.txt", "\u8a73\u7d30\u306f~/notes.txt"),
    # neighbours with the same beginning are not the home
    ("/home/alice2/x", "<path>/x"),
    ("/home/alice-old/x", "<path>/x"),
    ("/home/alice.bak/x", "<path>/x"),
    ("/home/bob/x", "<path>/x"),
    # other absolute paths
    ("read /etc/passwd", "read <path>/passwd"),
    ("read /etc/passwd.", "read <path>/passwd."),
    ("read /etc/ssl/certs/", "read <path>/certs"),
    ("(/var/log/syslog)", "(<path>/syslog)"),
    ("[/var/log/syslog]", "[<path>/syslog]"),
    ('"/var/log/syslog"', '"<path>/syslog"'),
    ("`/var/log/syslog`", "`<path>/syslog`"),
    ("{/var/log/syslog}", "{<path>/syslog}"),
    ("path=/opt/x/y", "path=<path>/y"),
    ("error:/opt/x/y:12: bad", "error:<path>/y:12: bad"),
    ("a,/opt/x/y,b", "a,<path>/y,b"),
    ("a;/opt/x/y;b", "a;<path>/y;b"),
    ("cmd >/opt/x/y 2>&1", "cmd ><path>/y 2>&1"),
    ("//server/share/x", "<path>/x"),
    ("/opt//x//y", "<path>/y"),
    # what is no absolute path
    ("1/2 done", "1/2 done"),
    ("and/or", "and/or"),
    ("src/main.py and ./b/c and ../d/e", "src/main.py and ./b/c and ../d/e"),
    ("~/x and ~bob/y", "~/x and ~bob/y"),
    ("a / b", "a / b"),
    ("24/7, 10/s, n/a", "24/7, 10/s, n/a"),
    ("wrote <b>bold</b> text", "wrote <b>bold</b> text"),
    ("<path>/x", "<path>/x"),
    ("3 tests/min", "3 tests/min"),
    # URLs
    ("see https://example.org/a/b?c=d#e", "see https://example.org/a/b?c=d#e"),
    ("http://localhost:8080/home/alice/x", "http://localhost:8080/home/alice/x"),
    ("git+ssh://git@example.org/r.git", "git+ssh://git@example.org/r.git"),
    ("https://bob:pa55word@example.org/x", "https://***@example.org/x"),
    ("https://bob:p@55word@example.org/x", "https://***@example.org/x"),
    ("https://bob:pa55word@example.org", "https://***@example.org"),
    ("https://example.org/?mail=a:b@c", "https://example.org/?mail=a:b@c"),
    ("mqtt://u:pa55word@h:1883", "mqtt://***@h:1883"),
    ("file:///home/alice/x.txt", "<path>/x.txt"),
    ("file:///etc/passwd", "<path>/passwd"),
    ("FILE:///etc/passwd", "<path>/passwd"),
    ("file:/etc/passwd", "file:<path>/passwd"),
    # secrets
    ("the key is correct-horse-battery", "the key is ***"),
    ("x=hunter2hunter2;y", "x=***;y"),
    ("hunter2hunter2correct-horse-battery", "******"),
    ("hunter2\x1bhunter2 and hunter2\u202ehunter2", "*** and ***"),
    # what drives a terminal
    ("a\tb\nc\r\nd", "a b c  d"),
    ("\x1b[31mred\x1b[0m", "[31mred[0m"),
    ("\x1b]0;title\x07", "]0;title"),
    ("a\x00b\x7fc\x9bd", "abcd"),
    ("a\u202eb\u2066c\u200fd\u061ce", "abcde"),
    ("a\u2028b\u2029c", "a b c"),
    ("lone \ud800 surrogate", "lone  surrogate"),
    ("caf\u00e9 \u65e5\u672c \U0001f600", "caf\u00e9 \u65e5\u672c \U0001f600"),
    ("/opt/x\x1b/y", "<path>/y"),
]


@pytest.mark.parametrize("text, expected", GENERALISED, ids=[repr(text)[:40] for text, _ in GENERALISED])
def test_what_travels_names_no_path_and_no_secret(text: str, expected: str) -> None:
    """A detail is read by everybody on the broker; it must say what happened, not where this machine keeps things."""
    assert program.generalise(text, WORKSPACE, HOME, SECRETS) == expected


@pytest.mark.parametrize("workspace, home, text, expected", [
    ("/w", "/root", "/w/a /root/b /c/d", "./a ~/b <path>/d"),
    ("/w/", "/root/", "/w/a /root/b", "./a ~/b"),
    ("/", "/root", "/a/b", "<path>/b"),
    ("", "", "/a/b", "<path>/b"),
    ("/home/a", "/home/a", "/home/a/x", "./x"),
    ("/home/a/w", "/home/a", "/home/a/w/x /home/a/y", "./x ~/y"),
    ("/srv/w", "/srv/w/home", "/srv/w/home/x /srv/w/y", "~/x ./y"),
    ("/w(1)+[x]", "/h", "/w(1)+[x]/a", "./a"),
    ("/w", "/h", "/w2/a /hh/b x/w/c", "<path>/a <path>/b x/w/c"),
])
def test_workspace_and_home_in_any_constellation(workspace: str, home: str, text: str, expected: str) -> None:
    assert program.generalise(text, workspace, home, []) == expected


PIECES = st.lists(st.one_of(
    st.sampled_from([WORKSPACE, HOME, HOME + "/x", WORKSPACE + "/src/a.py", "/etc/passwd", "/", "//", ".", "..", "word",
                     "https://h/p", "https://u:pw@h/p", "file:///", "~", "<path>", "-", "\x1b[0m", "\u202e", "1/2",
                     *SECRETS]),
    st.text(st.characters(max_codepoint=0x2100, exclude_categories=["Cs"]), max_size=6)), max_size=8)
GAPS = st.sampled_from([" ", "=", ":", ",", "(", "[", '"', "'", "\n", "; "])


@PROPERTY
@given(st.lists(st.tuples(GAPS, PIECES), max_size=4))
def test_no_secret_survives_anywhere(parts: Any) -> None:
    text = "".join(gap + "".join(pieces) for gap, pieces in parts)
    result = program.generalise(text, WORKSPACE, HOME, SECRETS)
    assert not [secret for secret in SECRETS if secret in result]
    assert result.isprintable() or not [c for c in result if ord(c) < 32 or 127 <= ord(c) < 160]


@PROPERTY
@given(st.lists(st.tuples(GAPS, st.sampled_from([WORKSPACE, HOME, WORKSPACE + "/a/b", HOME + "/c", "/etc/hosts", "word",
                                                 "and/or", "1/2", "."])), min_size=1, max_size=8))
def test_no_path_of_workspace_or_home_survives(parts: Any) -> None:
    """Whatever stands before a path that is no part of a word."""
    result = program.generalise("".join(gap + piece for gap, piece in parts), WORKSPACE, HOME, SECRETS)
    assert "/home" not in result and "alice" not in result and "/etc" not in result


@PROPERTY
@given(st.lists(st.tuples(GAPS, PIECES), max_size=4))
def test_generalising_again_changes_nothing(parts: Any) -> None:
    """A detail passes through it on every path, sometimes twice (an exit's last line, a forwarded verdict)."""
    text = "".join(gap + "".join(pieces) for gap, pieces in parts)
    once = program.generalise(text, WORKSPACE, HOME, SECRETS)
    assert program.generalise(once, WORKSPACE, HOME, SECRETS) == once


@PROPERTY
@given(st.text())
def test_clean_text_cannot_drive_a_terminal(text: str) -> None:
    result = program.clean_text(text)
    assert not [c for c in result if ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u2028\u2029"]
    assert not [c for c in result if ord(c) in {0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}]
    result.encode("utf-8")
    assert program.clean_text(result) == result
    if text.isprintable():
        assert result == text


@pytest.mark.parametrize("value, expected", [
    ("a hunter2hunter2", "a ***"), (["hunter2hunter2", 1, None, True], ["***", 1, None, True]),
    ({"hunter2hunter2": {"k": ["xhunter2hunter2"]}}, {"***": {"k": ["x***"]}}), (5, 5), (None, None),
])
def test_secrets_are_taken_out_of_data_wherever_they_are(value: Any, expected: Any) -> None:
    assert program.hide_secrets_in(value, SECRETS) == expected
    assert program.hide_secrets_in(value, []) == value


# ---- small things ------------------------------------------------------------------------------------------------

@PROPERTY
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), st.integers(3, 80))
def test_a_text_is_cut_between_characters(text: str, limit: int) -> None:
    """Half a character is not UTF-8, and the peer would drop the event for it."""
    result = program.cut_utf8(text, limit)
    assert len(result.encode("utf-8")) <= limit
    if len(text.encode("utf-8")) <= limit:
        assert result == text
    else:
        assert result.endswith("\u2026") and text.startswith(result[:-1])
        assert len(result.encode("utf-8")) > limit - 4


@pytest.mark.parametrize("text, good", [
    ("a", True), ("918b0612", True), ("A_b-9", True), ("-", True), ("_", True), ("x" * 64, True), ("x" * 65, False),
    ("", False), ("a b", False), ("a/b", False), ("a.b", False), ("a\n", False), ("\na", False), ("a\x00", False),
    ("\u00e9", False), ("\u0661", False), ("\u00b2", False), ("..", False), ("a:b", False), ("%1", False), ("+", False),
    ("#", False), ("$SYS", False), ("a*", False), ("\ud800", False),
])
def test_a_name_is_safe_as_a_file_a_topic_and_a_word(text: str, good: bool) -> None:
    """Ids become file names, MQTT levels and words of a shell command."""
    assert program.is_name(text) is good


@pytest.mark.parametrize("seconds, text", [
    (0, "0s"), (0.9, "0s"), (4, "4s"), (59.99, "59s"), (60, "1m00s"), (200, "3m20s"), (3599, "59m59s"), (3600, "1h00m"),
    (7500, "2h05m"), (86399, "23h59m"), (86400, "1d00h"), (3 * 86400 + 4 * 3600 + 59, "3d04h"),
    (400 * 86400, "400d00h"),
])
def test_a_duration_is_read_at_a_glance(seconds: float, text: str) -> None:
    assert program.format_duration(seconds) == text


@pytest.mark.parametrize("attempt, least, most", [(1, 0.25, 0.5), (2, 0.5, 1), (3, 1, 2), (4, 2, 4), (5, 4, 8),
                                                  (6, 4, 8), (100, 4, 8), (5000, 4, 8)])
def test_retries_back_off_within_bounds_however_long_a_broker_is_away(attempt: int, least: float, most: float) -> None:
    found = [program.backoff_s(attempt) for _ in range(200)]
    assert least <= min(found) and max(found) <= most


def test_retries_of_many_clients_do_not_fall_together() -> None:
    assert len({program.backoff_s(3) for _ in range(50)}) > 40


def test_tokens_and_ids_are_long_enough_and_all_different() -> None:
    """A token that repeats lets an old attempt speak for a new one."""
    tokens = {program.random_token() for _ in range(500)}
    assert len(tokens) == 500 and all(len(token) == 43 and program.is_name(token) for token in tokens)
    assert {len(program.random_hex(count)) for count in range(1, 40)} == set(range(1, 40))
    assert len({program.random_hex(8) for _ in range(500)}) == 500
    assert all(set(program.random_hex(32)) <= set("0123456789abcdef") for _ in range(100))


def test_an_instant_measures_by_the_clock_that_nobody_can_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting the wall clock must neither kill a job nor keep it alive for ever."""
    since = program.instant()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= program.elapsed_s(since, "1999-01-01T00:00:00Z") < 60
    monkeypatch.undo()
    boot, _, mono = since.partition(" ")
    assert boot == program.boot_id() and " " not in boot and boot
    assert program.elapsed_s("%s %.3f" % (boot, float(mono) - 90)) == pytest.approx(90, abs=5)
    assert program.elapsed_s("%s %.3f" % (boot, float(mono) + 1000)) == 0.0


@pytest.mark.parametrize("since, age_s, expected", [
    ("another-boot 12.5", 3600, 3600), (None, 50, 50), ("", 50, 50), ("another-boot 12.5", -500, 0),
    ("another-boot 12.5", None, None), (None, None, None),
])
def test_after_a_reboot_the_wall_clock_has_to_do(since: Optional[str], age_s: Optional[int],
                                                 expected: Optional[int]) -> None:
    utc = None if age_s is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - age_s))
    found = program.elapsed_s(since, utc)
    assert found is None if expected is None else found == pytest.approx(expected, abs=5)


@pytest.mark.parametrize("milliseconds", [False, True])
def test_a_timestamp_is_utc_and_is_read_back(milliseconds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        text = program.utc_now(milliseconds)
        assert text.endswith("Z") and len(text) == (24 if milliseconds else 20)
        assert abs(program.parse_utc(text) - time.time()) < 5
        assert program.parse_utc("2026-06-20T14:48:58Z") == 1781966938.0
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01T00:00:00Z", None, "2026"])
def test_a_timestamp_that_is_none_reads_as_zero(text: Any) -> None:
    assert program.parse_utc(text) == 0.0


# ---- writing files -----------------------------------------------------------------------------------------------

def test_a_file_is_replaced_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content, mode in ((b"one", 0o600), (b"", 0o600), (b"two" * 100000, 0o700)):
        program.write_atomic(str(path), content, mode)
        assert path.read_bytes() == content and stat.S_IMODE(path.stat().st_mode) == mode
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full must not cost the archive that was there."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    (tmp_path / "folder").mkdir()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, full)
        with pytest.raises(OSError):
            program.write_atomic(str(path), b"new")
        monkeypatch.undo()
    with pytest.raises(TypeError):
        program.write_atomic(str(path), "text")             # type: ignore[arg-type]
    with pytest.raises(OSError):
        program.write_atomic(str(tmp_path / "folder"), b"new")
    with pytest.raises(FileNotFoundError):
        program.write_atomic(str(tmp_path / "none" / "file"), b"new")
    assert path.read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == ["file", "folder"]


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
import mam
turn = 0
while True:
    turn = (turn + 1) % 26
    mam.write_atomic(sys.argv[2], bytes([97 + turn]) * 300000)
"""


def test_a_writer_that_is_killed_leaves_no_part(tmp_path: Path) -> None:
    """Readers see one whole version at every moment, also when the writer dies in the middle."""
    path = tmp_path / "file"
    seen = set()
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(ROOT), str(path)], stdin=subprocess.DEVNULL,
                                  env=clean_environment(tmp_path))
        try:
            poll(lambda: path.exists() or writer.poll() is not None, 30, "the first version")
            for _ in range(random.Random(len(seen)).randrange(5, 60)):
                content = path.read_bytes()
                assert len(content) == 300000 and len(set(content)) == 1
                seen.add(content[:1])
            assert writer.poll() is None
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait(20)
        content = path.read_bytes()
        assert len(content) == 300000 and len(set(content)) == 1
    assert len(seen) > 1, "the reader never saw a new version"

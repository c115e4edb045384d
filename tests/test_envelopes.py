"""What goes over the wire: signed, checked in a fixed order, and believed only when every check has passed.

A broker is a place where others write. If one of these fails, somebody else's message moves a job, or a message that
was damaged on the way ends the process that reads it.
"""
from __future__ import annotations

import hashlib
import hmac
import json
import sys
from typing import Any, Callable, Dict, List, Tuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import ROOT

sys.path.insert(0, str(ROOT))
import mam as program

PROPERTY = settings(deadline=None, derandomize=True, database=None, max_examples=80,
                    suppress_health_check=[HealthCheck.too_slow])
KEY = "kLhQ2v4mM0cF3n1x9S8d7G6b5A4z3Y2w1X0u_T-s_R4"
JOB, PREFIX, TOKEN = "918b0612", "python/mqtt/jobs/918b0612", "d" * 32
TOPIC = PREFIX + "/events"

Payload = Dict[str, Any]


def payload_of(seq: int = 2, event: str = "progress", detail: str = "section 1 done", **data: Any) -> Payload:
    return program.event_payload(JOB, seq, event, "2026-06-20T14:48:58Z", detail,
                                 {"dispatch_token": TOKEN, "attempt_id": 1, **data})


def opened(raw: bytes, topic: str = TOPIC, kind: str = "events", key: str = KEY) -> Payload:
    return program.accept_message(topic, raw, PREFIX, kind, {1: (TOKEN, key), 2: (TOKEN, key)})[0]


def reason_of(raw: bytes, **options: Any) -> str:
    with pytest.raises(program.Rejected) as refusal:
        opened(raw, **options)
    assert str(refusal.value)
    return str(refusal.value.reason)


def signed_json(payload: Any, key: str = KEY) -> bytes:
    """Signed by the book, with nothing of mam but its canonical form; extra spaces, to show they do not matter."""
    data = {name: value for name, value in payload["data"].items() if name != "hmac_sig"}
    sig = hmac.new(key.encode(), program.canonical({**payload, "data": data}), hashlib.sha256).hexdigest()
    return json.dumps({**payload, "data": {**payload["data"], "hmac_sig": sig}}, indent=1).encode()


# ---- round trip --------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.recursive(st.none() | st.booleans() | st.integers(1 - 2 ** 53, 2 ** 53 - 1) | TEXT | st.floats(-1e9, 1e9),
                      lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
                      max_leaves=12)
PAYLOADS = st.builds(lambda seq, event, detail, data: {**payload_of(seq, event, detail), "data": {
    **data, "dispatch_token": TOKEN, "attempt_id": 1}}, st.integers(0, 2 ** 53 - 1), st.sampled_from(program.EVENTS),
    TEXT, st.dictionaries(TEXT.filter(lambda name: name != "hmac_sig"), VALUES, max_size=5))


@PROPERTY
@given(PAYLOADS)
def test_what_is_signed_is_opened_as_it_was(payload: Payload) -> None:
    raw = program.sign(payload, KEY)
    found = opened(raw)
    sig = found["data"].pop("hmac_sig")
    assert found == payload and len(sig) == 64 and set(sig) <= set("0123456789abcdef")
    assert program.sign(payload, KEY) == raw, "the same event has other bytes the second time"
    assert program.sign({**payload, "data": {**payload["data"], "hmac_sig": "0" * 64}}, KEY) == raw


def test_the_signature_is_the_one_anybody_can_compute() -> None:
    """DESIGN 7: hex HMAC-SHA256 over the RFC 8785 form without `hmac_sig`, the key as the bytes of its text."""
    form = (b'{"data":{"attempt_id":1,"custom_metric":42,"dispatch_token":"' + TOKEN.encode() +
            b'"},"detail":"section 1 done","event":"progress","job_id":"918b0612","schema_version":1,"seq":2,'
            b'"timestamp":"2026-06-20T14:48:58Z"}')
    expected = hmac.new(KEY.encode("ascii"), form, hashlib.sha256).hexdigest()
    raw = program.sign(payload_of(custom_metric=42), KEY)
    assert json.loads(raw)["data"]["hmac_sig"] == expected
    assert opened(raw)["data"]["custom_metric"] == 42


def test_spaces_and_order_do_not_matter_on_the_way() -> None:
    """The form is for signing; a gateway may print the JSON anew."""
    payload = json.loads(program.sign(payload_of(x=[1, 2.5, "\u00e9"]), KEY))
    for text in (json.dumps(payload, indent=4), json.dumps(dict(reversed(list(payload.items())))),
                 json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=False)):
        assert opened(text.encode()) == payload


def test_an_unknown_field_is_kept_and_covered() -> None:
    raw = signed_json({**payload_of(), "from_the_future": {"a": 1}})
    assert opened(raw)["from_the_future"] == {"a": 1}
    assert reason_of(raw.replace(b'"a": 1', b'"a": 2')) == "signature"


# ---- damage and forgery --------------------------------------------------------------------------------------------

def test_no_flipped_bit_goes_unnoticed() -> None:
    """Every bit of a signed event, one after the other; hex in capitals would be other bytes for the same event."""
    raw = program.sign(payload_of(detail="d\u00e9tail", metric=1.5, flag=True, none=None), KEY)
    passed = []
    for at in range(len(raw) * 8):
        bad = bytearray(raw)
        bad[at // 8] ^= 1 << at % 8
        try:
            opened(bytes(bad))
            passed.append((at // 8, bytes(bad[max(0, at // 8 - 10):at // 8 + 10])))
        except program.Rejected:
            continue                            # as it must be
    assert passed == []


@PROPERTY
@given(PAYLOADS, st.integers(0, 10 ** 6), st.integers(0, 7))
def test_no_flipped_bit_changes_what_is_read(payload: Payload, at: int, bit: int) -> None:
    """Of any event. What still opens (an escape in another case) says the same, and carries the same signature."""
    raw = bytearray(program.sign(payload, KEY))
    before = json.loads(bytes(raw))
    raw[at % len(raw)] ^= 1 << bit
    try:
        found = opened(bytes(raw))
    except program.Rejected:
        return
    assert program.canonical(found) == program.canonical(before)


CHANGES: List[Tuple[str, Callable[[Payload], Any]]] = [
    ("seq", lambda p: p.update(seq=3)),
    ("detail", lambda p: p.update(detail="section 2 done")),
    ("detail normalised", lambda p: p.update(detail="e\u0301")),
    ("event", lambda p: p.update(event="completed")),
    ("timestamp", lambda p: p.update(timestamp="2026-06-20T14:48:59Z")),
    ("attempt", lambda p: p["data"].update(attempt_id=2)),
    ("token", lambda p: p["data"].update(dispatch_token="e" * 32)),
    ("data", lambda p: p["data"].update(n=43)),
    ("data type", lambda p: p["data"].update(n="42")),
    ("data nested", lambda p: p["data"]["deep"].update(k=[1, 2, 4])),
    ("data order", lambda p: p["data"]["deep"].update(k=[2, 1, 3])),
    ("data more", lambda p: p["data"].update(more=1)),
    ("data less", lambda p: p["data"].pop("n")),
    ("field more", lambda p: p.update(more=1)),
    ("true for 1", lambda p: p["data"].update(attempt_id=True)),
]


@pytest.mark.parametrize("change", [change for _, change in CHANGES], ids=[name for name, _ in CHANGES])
def test_no_changed_field_goes_unnoticed(change: Callable[[Payload], Any]) -> None:
    payload = json.loads(program.sign(payload_of(detail="\u00e9", n=42, deep={"k": [1, 2, 3]}), KEY))
    assert opened(json.dumps(payload).encode()) == payload
    change(payload)
    expected = "attempt" if payload["data"]["attempt_id"] is True else "signature"     # True picks no key
    assert reason_of(json.dumps(payload).encode()) == expected


def test_moving_a_field_into_data_goes_unnoticed_by_nobody() -> None:
    payload = json.loads(program.sign(payload_of(), KEY))
    payload["data"]["extra"] = payload.pop("detail")
    assert reason_of(json.dumps(payload).encode()) == "shape"


@pytest.mark.parametrize("key", ["", "x", KEY[:-1], KEY + " ", KEY.lower(), "key of attempt two, which is long enough"])
def test_the_key_of_another_attempt_opens_nothing(key: str) -> None:
    """A worker of attempt 1 cannot speak for attempt 2, whatever it writes into its message."""
    assert reason_of(program.sign(payload_of(), KEY), key=key) == "signature"
    assert reason_of(program.sign(payload_of(attempt_id=2), key)) == "signature"


def test_a_key_that_is_no_ascii_is_a_rejection_and_no_crash() -> None:
    assert reason_of(program.sign(payload_of(), KEY), key="schl\u00fcssel") == "signature"


GOOD_SIG = json.loads(program.sign(payload_of(), KEY))["data"]["hmac_sig"]
SIGNATURES = [None, "", GOOD_SIG[:-1], GOOD_SIG + "0", GOOD_SIG[:-2], "0" * 64, "g" * 64, "\u00e9" * 64, "\u0661" * 64,
              GOOD_SIG[:-1] + "\u0660", GOOD_SIG.upper(), GOOD_SIG[:-2] + " a", " " + GOOD_SIG[:-1],
              "0x" + GOOD_SIG[2:],
              int(GOOD_SIG, 16) % 2 ** 52, True, [GOOD_SIG], {"hex": GOOD_SIG}, GOOD_SIG[:62] + "\n\n", "\x00" * 64]


@pytest.mark.parametrize("sig", SIGNATURES, ids=lambda sig: repr(sig)[:20])
def test_only_the_right_signature_in_its_one_form_counts(sig: Any) -> None:
    payload = payload_of()
    if sig is not None:
        payload["data"]["hmac_sig"] = sig
    assert reason_of(json.dumps(payload).encode()) == "signature"


@pytest.mark.parametrize("value", [None, 1, "text", [], {}, {"data": None}, {"data": []}, {"data": {}}])
def test_verify_takes_anything_and_rejects_it(value: Any) -> None:
    with pytest.raises(program.Rejected) as refusal:
        program.verify(value, KEY)
    assert refusal.value.reason == "signature"


# ---- the checks, each with its reason ------------------------------------------------------------------------------

def changed(**fields: Any) -> bytes:
    """A properly signed event with other top-level fields; None takes one away."""
    payload = {**payload_of(), **fields}
    return signed_json({name: value for name, value in payload.items() if value is not None})


REJECTED = [
    ("version as text", changed(schema_version="1"), "schema_version"),
    ("version true", changed(schema_version=True), "schema_version"),
    ("version 2", changed(schema_version=2), "schema_version"),
    ("version 0", changed(schema_version=0), "schema_version"),
    ("version 1.0", changed(schema_version=1.5), "schema_version"),
    ("no version", changed(schema_version=None), "schema_version"),
    ("another job", changed(job_id="77aa01ce"), "topic"),
    ("job as number", changed(job_id=918), "topic"),
    ("no job", changed(job_id=None), "topic"),
    ("job of a list", changed(job_id=[JOB]), "topic"),
    ("state on the events topic", changed(event="state"), "vocabulary"),
    ("unknown event", changed(event="exploded"), "vocabulary"),
    ("event in capitals", changed(event="Progress"), "vocabulary"),
    ("event as list", changed(event=["progress"]), "vocabulary"),
    ("event as object", changed(event={"progress": 1}), "vocabulary"),
    ("no event", changed(event=None), "vocabulary"),
    ("detail as number", changed(detail=5), "shape"),
    ("no detail", changed(detail=None), "shape"),
    ("timestamp as number", changed(timestamp=5), "shape"),
    ("no timestamp", changed(timestamp=None), "shape"),
    ("seq as float", changed(seq=2.5), "seq"),
    ("seq as text", changed(seq="2"), "seq"),
    ("seq true", changed(seq=True), "seq"),
    ("seq negative", changed(seq=-1), "seq"),
    ("no seq", changed(seq=None), "seq"),
    ("seq as list", changed(seq=[2]), "seq"),
    ("not an object", b"[1,2]", "shape"),
    ("a number", b"5", "shape"),
    ("null", b"null", "shape"),
    ("no data", b'{"schema_version":1}', "shape"),
    ("data as list", b'{"schema_version":1,"data":[]}', "shape"),
    ("empty", b"", "json"),
    ("no JSON", b"hello", "json"),
    ("cut off", program.sign(payload_of(), KEY)[:-1], "json"),
    ("something behind", program.sign(payload_of(), KEY) + b"{}", "json"),
    ("UTF-16", program.sign(payload_of(), KEY).decode().encode("utf-16"), "json"),
    ("byte order mark", b"\xef\xbb\xbf" + program.sign(payload_of(), KEY), "json"),
    ("not UTF-8", program.sign(payload_of(), KEY).replace(b"section", b"sect\xffon"), "json"),
    ("a key twice", program.sign(payload_of(), KEY).replace(b'"seq":2', b'"seq":2,"seq":2'), "json"),
    ("NaN", program.sign(payload_of(n=7), KEY).replace(b'"n":7', b'"n":NaN'), "json"),
    ("infinity", program.sign(payload_of(n=7), KEY).replace(b'"n":7', b'"n":1e999'), "json"),
    ("a long integer", program.sign(payload_of(n=7), KEY).replace(b'"n":7', b'"n":' + b"7" * 5000), "json"),
    ("an unsafe integer", program.sign(payload_of(n=7), KEY).replace(b'"n":7', b'"n":9007199254740993'), "json"),
    ("a lone surrogate", program.sign(payload_of(n=7), KEY).replace(b'"n":7', b'"n":"\\ud800"'), "json"),
    ("deep", program.sign(payload_of(n=7), KEY).replace(b'"n":7', b'"n":' + b"[" * 40 + b"]" * 40), "json"),
    ("very deep", b"[" * 200000, "json"),
    ("large", program.sign(payload_of(n="x" * 256 * 1024), KEY), "size"),
    ("large and no JSON", b"x" * (256 * 1024 + 1), "size"),
]


@pytest.mark.parametrize("raw, reason", [row[1:] for row in REJECTED], ids=[row[0] for row in REJECTED])
def test_each_fault_is_counted_under_its_reason(raw: bytes, reason: str) -> None:
    """`mam doctor` and the log tell an operator what is wrong with a peer by this word."""
    assert reason_of(raw) == reason


def test_an_event_of_the_largest_size_is_taken() -> None:
    room = 256 * 1024 - len(program.sign(payload_of(n=""), KEY))
    assert opened(program.sign(payload_of(n="x" * room), KEY))["seq"] == 2
    assert reason_of(program.sign(payload_of(n="x" * (room + 1)), KEY)) == "size"


def test_seq_zero_is_a_job_without_events() -> None:
    assert opened(changed(seq=0))["seq"] == 0


@pytest.mark.parametrize("topic, kind", [
    (PREFIX + "/state", "events"), (PREFIX, "events"), (PREFIX + "/events/", "events"), (TOPIC + "/x", "events"),
    ("python/mqtt/jobs/77aa01ce/events", "events"), ("other/918b0612/events", "events"), ("", "events"),
    (PREFIX + "/control", "events"), ("/" + TOPIC, "events"), (TOPIC.upper(), "events"), (TOPIC, "state"),
])
def test_a_message_counts_on_its_own_topic_only(topic: str, kind: str) -> None:
    """Else a retained event replayed on another job's topic would end that job."""
    assert reason_of(program.sign(payload_of(), KEY), topic=topic, kind=kind) == "topic"


def test_a_job_whose_id_ends_like_another_is_another() -> None:
    raw = changed(job_id="8b0612")
    with pytest.raises(program.Rejected) as refusal:
        program.accept_message(TOPIC, raw, PREFIX, "events", {1: (TOKEN, KEY)})
    assert refusal.value.reason == "topic"


def state_of(**changes: Any) -> Any:
    job = program.Job(**{**dict.fromkeys(program.Job._fields), "job_id": JOB, "topic_prefix": PREFIX, "status": "error",
                         "reason": "unresponsive", "attempt_id": 2, "dispatch_token": TOKEN, "last_seq": 7,
                         "last_event": "error", "updated_at": "2026-06-20T14:48:58Z", "detail": "silence",
                         "auth_token": KEY, **changes})
    return program.state_payload(job)


def test_a_state_shows_the_job_and_is_opened_as_a_state() -> None:
    """A client that comes late reads from it alone how a job stands."""
    found = opened(program.sign(state_of(), KEY), PREFIX + "/state", "state")
    found["data"].pop("hmac_sig")
    assert found == {"schema_version": 1, "seq": 7, "job_id": JOB, "event": "state",
                     "timestamp": "2026-06-20T14:48:58Z", "detail": "silence", "status": "error",
                     "phase": None, "last_event": "error",
                     "data": {"dispatch_token": TOKEN, "attempt_id": 2, "reason": "unresponsive"}}
    assert reason_of(program.sign(state_of(), KEY)) == "vocabulary"
    assert reason_of(program.sign(payload_of(), KEY), topic=PREFIX + "/state", kind="state") == "vocabulary"
    assert opened(program.sign(state_of(detail=None, reason=None), KEY), PREFIX + "/state", "state")["detail"] == ""


# The faults in the order of the checks: with two at once, the earlier one is reported.
FAULTS: List[Tuple[str, Dict[str, Any]]] = [
    ("schema_version", {"schema_version": 2}), ("topic", {"job_id": "77aa01ce"}), ("vocabulary", {"event": "boom"}),
    ("shape", {"detail": 5}), ("signature", {"_unsigned": True}), ("seq", {"seq": -1}),
]


@pytest.mark.parametrize("first", range(len(FAULTS)), ids=[reason for reason, _ in FAULTS])
def test_the_checks_come_in_their_order(first: int) -> None:
    """What costs little and reveals nothing comes first; nothing inside is looked at before the signature held."""
    fields = {name: value for _, fault in FAULTS[first:] for name, value in fault.items()}
    unsigned = fields.pop("_unsigned", False)
    payload = {**payload_of(), **fields}
    raw = json.dumps({**payload, "data": {**payload["data"], "hmac_sig": "0" * 64}}).encode() if unsigned \
        else signed_json(payload)
    assert reason_of(raw) == FAULTS[first][0]


# ---- nothing but a rejection ---------------------------------------------------------------------------------------

REASONS = ("size", "json", "shape", "schema_version", "topic", "vocabulary", "attempt", "signature", "token", "intent",
           "seq")


def opens_or_rejects(raw: bytes) -> None:
    for topic, kind in ((TOPIC, "events"), (PREFIX + "/state", "state")):
        try:
            found = opened(raw, topic, kind)
        except program.Rejected as refusal:
            assert refusal.reason in REASONS
        else:
            assert found["job_id"] == JOB


@PROPERTY
@given(st.binary(max_size=300))
def test_random_bytes_are_rejected_and_nothing_else(raw: bytes) -> None:
    """Any other exception would end the callback it is raised in, and with it the reader."""
    opens_or_rejects(raw)


FRAGMENTS = st.binary(min_size=1, max_size=8) | st.sampled_from(
    [b"null", b"{}", b"[[[[", b'"\\ud800"', b"1e999", b"-0", b"9" * 30, b'{"data":', b"\xff", b"true", b'""', b"NaN"])


@PROPERTY
@given(PAYLOADS, st.lists(st.tuples(st.integers(0, 10 ** 6), st.integers(0, 12), FRAGMENTS), min_size=1, max_size=5))
def test_a_mutated_event_is_rejected_or_says_the_same(payload: Payload, mutations: Any) -> None:
    raw = program.sign(payload, KEY)
    original = json.loads(raw)
    for where, cut, put in mutations:
        at = where % (len(raw) + 1)
        raw = raw[:at] + put + raw[at + cut:]
    opens_or_rejects(raw)
    try:
        assert program.canonical(opened(raw)) == program.canonical(original)
    except program.Rejected:
        pass                                    # as nearly always


@PROPERTY
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(
    inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["data", "event", "seq", "job_id", "schema_version", "detail", "timestamp", "hmac_sig"]), inner, max_size=6),
    max_leaves=15))
def test_json_of_any_shape_is_rejected_and_nothing_else(value: Any) -> None:
    opens_or_rejects(json.dumps(value).encode("utf-8", "surrogatepass"))


@PROPERTY
@given(st.dictionaries(st.sampled_from(["event", "seq", "detail", "timestamp", "data"]), VALUES, max_size=3))
def test_a_signed_event_with_odd_fields_is_opened_or_rejected(fields: Dict[str, Any]) -> None:
    """A signature proves who wrote it, not that it makes sense."""
    payload = {**payload_of(), **fields}
    if isinstance(payload["data"], dict):
        opens_or_rejects(signed_json(payload))
    else:
        opens_or_rejects(json.dumps(payload).encode())


# ---- what a user may put in ----------------------------------------------------------------------------------------

RESERVED = ["hmac_sig", "auth_token", "dispatch_token", "attempt_id", "notification_intent", "feedback", "reason",
            "status", "settles", "artifacts", "spawned", "since"]


def refusal_of(call: Callable[..., Any], *args: Any) -> Any:
    with pytest.raises(program.MamError) as refusal:
        call(*args)
    assert refusal.value.exit == 1 and refusal.value.message
    return refusal.value


@pytest.mark.parametrize("name", RESERVED)
def test_a_reserved_name_is_refused_by_its_name(name: str) -> None:
    """Silently overwritten, a user's `status` would be read as the job's."""
    error = refusal_of(program.check_data, {"mine": 1, name: "x"})
    assert error.code == "bad_data" and name in error.message and error.hint
    assert refusal_of(program.parse_data, json.dumps({name: None})).code == "bad_data"
    assert program.check_data({"mine": {name: 1}}) == {"mine": {name: 1}}


def test_the_reserved_names_are_these() -> None:
    assert program.RESERVED_DATA == set(RESERVED)


@pytest.mark.parametrize("text, value", [
    ("{}", {}), ('{"tests": 42, "ok": true}', {"tests": 42, "ok": True}),
    ('{"a": {"b": [1, null]}}', {"a": {"b": [1, None]}}),
    (' {"\u00e9": "\U0001f600"} ', {"\u00e9": "\U0001f600"}), ('{"n": 1.5}', {"n": 1.5}),
])
def test_data_is_taken_as_it_was_given(text: str, value: Any) -> None:
    assert program.parse_data(text) == value


@pytest.mark.parametrize("text, code", [
    ("", "bad_data"), ("{", "bad_data"), ("nope", "bad_data"), ("[1]", "bad_data"), ("5", "bad_data"),
    ("null", "bad_data"), ('"x"', "bad_data"), ('{"a":1,"a":2}', "bad_data"), ('{"a":NaN}', "bad_data"),
    ('{"a":1e999}', "bad_data"), ('{"a":9007199254740992}', "bad_data"), ('{"a":9007199254740992.0}', "bad_data"),
    ('{"a":"\\ud800"}', "bad_data"), ('{"a":"\ud800"}', "bad_data"), ("{'a': 1}", "bad_data"),
    ('{"a":' + "9" * 5000 + "}", "bad_data"), ('{"a":' * 50000, "bad_data"),
    ('{"a":' * 40 + "1" + "}" * 40, "bad_data"),
    (json.dumps({"a": "x" * (128 * 1024)}), "too_large"), (json.dumps({"a": "x" * (3 * 1024 * 1024)}), "bad_data"),
], ids=lambda value: repr(value)[:24])
def test_data_that_cannot_travel_is_refused_before_anything_is_recorded(text: str, code: str) -> None:
    error = refusal_of(program.parse_data, text)
    assert error.code == code
    assert len(error.message) < 300, "the refusal repeats what was given"


def test_data_may_be_as_large_as_promised() -> None:
    room = 128 * 1024 - len(program.canonical({"a": ""}))
    assert program.check_data({"a": "x" * room})
    assert refusal_of(program.check_data, {"a": "x" * (room + 1)}).code == "too_large"


def test_data_as_deep_as_allowed_can_be_signed() -> None:
    """What --data takes must fit into an event: else publish fails with an internal error, and records nothing."""
    value: Any = 1
    accepted = []
    for _ in range(40):
        value = {"k": value}
        try:
            program.check_data(value)
        except program.MamError:
            break
        accepted.append(value)
    assert len(accepted) > 20
    assert opened(program.sign(payload_of(**accepted[-1]), KEY))["data"]["k"] == accepted[-1]["k"]


SPLITS = [("", 0, False), ("a" * 4096, 4096, False), ("a" * 4097, 4096, True), ("\u00e9" * 2048, 4096, False),
          ("\u00e9" * 2049, 4096, True), ("\U0001f600" * 1025, 4096, True), ("x" * 65536, 4096, True),
          ("\u00e9" * 32768, 4096, True)]


@pytest.mark.parametrize("text, limit, cut", SPLITS, ids=[f"{len(text)}-{text[:1]!r}" for text, _, _ in SPLITS])
def test_a_long_detail_is_cut_and_stands_whole_in_feedback(text: str, limit: int, cut: bool) -> None:
    detail, feedback = program.split_detail(text)
    assert len(detail.encode("utf-8")) <= limit
    if cut:
        assert feedback == text and detail.endswith("\u2026") and text.startswith(detail[:-1])
    else:
        assert (detail, feedback) == (text, None)


@pytest.mark.parametrize("text", ["x" * 65537, "\u00e9" * 32769, "x" * 10 ** 6])
def test_a_detail_too_long_for_feedback_is_refused(text: str) -> None:
    error = refusal_of(program.split_detail, text)
    assert error.code == "too_large" and error.hint and "65536" in error.message


# ---- keys (RFC 5869, and the two steps of DESIGN 7) ------------------------------------------------------------------

RFC_5869 = [
    ("A.1", "0b" * 22, "000102030405060708090a0b0c", "f0f1f2f3f4f5f6f7f8f9", 42,
     "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"),
    ("A.2", bytes(range(0x00, 0x50)).hex(), bytes(range(0x60, 0xb0)).hex(), bytes(range(0xb0, 0x100)).hex(), 82,
     "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
     "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87"),
    ("A.3", "0b" * 22, "", "", 42,
     "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"),
]


@pytest.mark.parametrize("key, salt, info, length, made", [row[1:] for row in RFC_5869],
                         ids=[row[0] for row in RFC_5869])
def test_hkdf_is_the_one_of_rfc_5869(key: str, salt: str, info: str, length: int, made: str) -> None:
    """A home-made derivation may be weak, and no other implementation could ever check a message."""
    assert program.hkdf_sha256(bytes.fromhex(key), bytes.fromhex(info), bytes.fromhex(salt), length).hex() == made


SECRET = "a-secret-of-at-least-32-characters-0001"
SESSION_KEY = "G1fNxGlHUxMEt6oxAUcVFuCF0usNJhvb48rwSXrO76Y"
EVENT_KEY = "rjVkml8FchF03kgjqtKO8xxdR-cXhU_o29G0n3foS0g"
CONTROL_KEY = "RUYAT9V-PO1lUFd6h8jeNfP_R8YmOG89GJ-m5Uaalwo"
PRESENCE_KEY = "8jSewDlK-u05yy5CC9iUdAufTKOs7HHjG_uh5cszBQ8"
KID = "ZBWQ2hia"


def test_the_keys_of_a_session_stay_what_they_are() -> None:
    """Computed apart from mam. Another `info`, and hosts of two versions no longer understand each other."""
    assert program.session_key(SECRET, "gpu1") == SESSION_KEY
    assert program.attempt_keys(SESSION_KEY, JOB, 3, TOKEN) == (
        EVENT_KEY, {"kid": KID, "control": CONTROL_KEY, "presence": PRESENCE_KEY})
    assert program.key_id(SESSION_KEY) == KID


def test_a_key_serves_one_purpose_of_one_attempt_of_one_session() -> None:
    """The key of a session that leaks, or the host that has it, speaks for that session alone; an old attempt for
    itself alone."""
    def keys(secret: str = SECRET, session: str = "gpu1", job: str = JOB, attempt: int = 3,
             token: str = TOKEN) -> List[str]:
        of_session = program.session_key(secret, session)
        event, others = program.attempt_keys(of_session, job, attempt, token)
        return [of_session, event, others["control"], others["presence"]]
    other_attempts = [keys(job="918b0613"), keys(attempt=4), keys(token="e" * 32)]
    made = keys() + keys(secret=SECRET[:-1] + "2") + keys(session="gpu2") + [
        key for one in other_attempts for key in one[1:3]]
    assert len(set(made)) == len(made)
    assert all(one[0] == SESSION_KEY and one[3] == PRESENCE_KEY for one in other_attempts)
    # Nothing can be moved from one field into the next: ("a", "b1") is not ("ab", "1").
    assert program.derive_key(KEY, "event", "a", "b1") != program.derive_key(KEY, "event", "ab", "1")


# ---- orders: what a runner believes ----------------------------------------------------------------------------------

NOW = "2026-06-20T14:48:58Z"
NOW_S = program.parse_utc(NOW)
DISPATCH_TOPIC, CONTROL_TOPIC = PREFIX + "/dispatch", PREFIX + "/control"
RUNNER = "0123456789abcdef"
KEYS = {KID: SESSION_KEY}


def remote_job(**changes: Any) -> Any:
    return program.Job(**{
        **dict.fromkeys(program.Job._fields), "job_id": JOB, "topic_prefix": PREFIX, "agent_session": "remote:gpu1",
        "agent": "claude-code", "role": "Worker", "timeout_sec": 3600.0, "idle_timeout_sec": 120.0,
        "heartbeat_sec": 30.0, "heartbeat_misses": 4, "ack_timeout_sec": 180.0, "expected_artifacts": '["out/a.txt"]',
        "seq_base": 4, "attempt_id": 3, "dispatch_token": TOKEN, **changes})


def mail_of(dispatch_mail: int = 0, control_mail: int = 0, attempt: int = 3, key: str = SESSION_KEY) -> Any:
    keys = program.attempt_keys(key, JOB, attempt, TOKEN)[1]
    return program.Mail(attempt, TOKEN, json.dumps(keys), RUNNER,
                        json.dumps({"issued_at": NOW, "expires_at": "2026-06-20T14:51:58Z"}), dispatch_mail,
                        json.dumps({"status": "cancelled", "reason": "cancelled", "issued_at": NOW}), control_mail)


def dispatch_of(prompt: str = "do it", **options: Any) -> bytes:
    return bytes(program.dispatch_message(remote_job(), mail_of(**options), prompt)[1])


def order(raw: bytes, topic: str = DISPATCH_TOPIC, kind: str = "dispatch", session: str = "gpu1",
          keys: Dict[str, str] = KEYS) -> Payload:
    return dict(program.accept_order(topic, raw, kind, session, keys))


def why_no_order(raw: bytes, **options: Any) -> str:
    with pytest.raises(program.Rejected) as refusal:
        order(raw, **options)
    return str(refusal.value.reason)


@pytest.mark.parametrize("prompt", ["do it", "", "\x00\x1b[31m \u2028 \U0001f600 \\u0041 \"quoted\"\r\n", "x" * 200000])
def test_a_dispatch_arrives_as_it_was_written(prompt: str) -> None:
    """The runner works on the prompt that was given, by the contract that was given, and on nothing else."""
    topic, raw, retain = program.dispatch_message(remote_job(), mail_of(), prompt)
    assert (topic, retain) == (DISPATCH_TOPIC, True)
    payload = order(raw)
    assert len(payload["data"].pop("hmac_sig")) == 64
    assert payload["data"] == {
        "dispatch_token": TOKEN, "attempt_id": 3, "kid": KID, "session": "gpu1", "runner": RUNNER, "seq_base": 4,
        "issued_at": NOW, "expires_at": "2026-06-20T14:51:58Z", "prompt": prompt,
        "contract": {"agent": "claude-code", "role": "Worker", "timeout_sec": 3600, "idle_timeout_sec": 120,
                     "heartbeat_sec": 30, "heartbeat_misses": 4, "ack_timeout_sec": 180, "artifacts": ["out/a.txt"]}}
    assert (payload["job_id"], payload["event"], payload["seq"]) == (JOB, "dispatch", 0)
    program.check_dispatch(payload["data"], NOW_S)
    assert program.dispatch_message(remote_job(), mail_of(), prompt)[1] == raw, "sent again, it has other bytes"


def test_controls_arrive_as_they_were_written() -> None:
    """A cancel is kept by the broker for a runner that is away; a resend is for the one that is there."""
    topic, raw, retain = program.control_message(remote_job(), "cancel", NOW,
                                                 {"status": "cancelled", "reason": "cancelled"}, mail_of())
    data = order(raw, topic, "control")["data"]
    assert (topic, retain, data["status"], data["reason"]) == (CONTROL_TOPIC, True, "cancelled", "cancelled")
    job = remote_job(remote_keys=mail_of().remote_keys)
    topic, raw, retain = program.control_message(job, "resend", NOW, {"from_seq": 7})
    payload = order(raw, topic, "control")
    assert (topic, retain, payload["event"], payload["data"]["from_seq"]) == (CONTROL_TOPIC, False, "resend", 7)


def resigned(change: Callable[[Payload], Any], key: str = CONTROL_KEY) -> bytes:
    payload = json.loads(dispatch_of())
    change(payload)
    return signed_json(payload, key)


NO_ORDERS = [
    ("another session's", dispatch_of(), {"session": "gpu2"}, "other_session"),
    ("no session", resigned(lambda p: p["data"].pop("session")), {}, "other_session"),
    ("session as list", resigned(lambda p: p["data"].update(session=["gpu1"])), {}, "other_session"),
    ("of a secret that is not ours", dispatch_of(key=program.session_key("x" * 32, "gpu1")), {}, "kid"),
    ("no kid", resigned(lambda p: p["data"].pop("kid")), {}, "kid"),
    ("kid as list", resigned(lambda p: p["data"].update(kid=[KID])), {}, "kid"),
    ("kid as object", resigned(lambda p: p["data"].update(kid={KID: 1})), {}, "kid"),
    ("forged with the key of another session", signed_json(
        json.loads(dispatch_of()), program.attempt_keys(program.session_key(SECRET, "gpu2"), JOB, 3, TOKEN)[1]
        ["control"]), {}, "signature"),
    ("signed with the key of events", resigned(lambda p: None, EVENT_KEY), {}, "signature"),
    ("signed with the key of presence", resigned(lambda p: None, PRESENCE_KEY), {}, "signature"),
    ("the attempt altered", resigned(lambda p: p["data"].update(attempt_id=4)), {}, "signature"),
    ("the token altered", resigned(lambda p: p["data"].update(dispatch_token="e" * 32)), {}, "signature"),
    ("attempt 0", resigned(lambda p: p["data"].update(attempt_id=0)), {}, "attempt"),
    ("attempt true", resigned(lambda p: p["data"].update(attempt_id=True)), {}, "attempt"),
    ("attempt as text", resigned(lambda p: p["data"].update(attempt_id="3")), {}, "attempt"),
    ("token as number", resigned(lambda p: p["data"].update(dispatch_token=5)), {}, "attempt"),
    ("token with a slash", resigned(lambda p: p["data"].update(dispatch_token="a/b")), {}, "attempt"),
    ("token empty", resigned(lambda p: p["data"].update(dispatch_token="")), {}, "attempt"),
    ("no token", resigned(lambda p: p["data"].pop("dispatch_token")), {}, "attempt"),
    ("on another job's topic", dispatch_of(), {"topic": "python/mqtt/jobs/77aa01ce/dispatch"}, "topic"),
    ("on the topic of control", dispatch_of(), {"topic": CONTROL_TOPIC}, "topic"),
    ("as a control", dispatch_of(), {"topic": CONTROL_TOPIC, "kind": "control"}, "vocabulary"),
    ("a job id that is a path", resigned(lambda p: p.update(job_id="a.b")),
     {"topic": "python/mqtt/jobs/a.b/dispatch"}, "attempt"),
    ("an event", signed_json(payload_of(), CONTROL_KEY), {}, "vocabulary"),
    ("too large", dispatch_of("x" * 256 * 1024), {}, "size"),
]


@pytest.mark.parametrize("raw, options, reason", [row[1:] for row in NO_ORDERS], ids=[row[0] for row in NO_ORDERS])
def test_a_runner_takes_no_orders_but_those_signed_for_it(raw: bytes, options: Dict[str, Any], reason: str) -> None:
    """A runner executes what it is told: one order too many, and somebody else's prompt runs on that host."""
    assert why_no_order(raw, **options) == reason


def test_no_flipped_bit_of_a_dispatch_goes_unnoticed() -> None:
    """Every bit, one after the other."""
    raw = dispatch_of("d\u00e9tail")
    passed = []
    for at in range(len(raw) * 8):
        bad = bytearray(raw)
        bad[at // 8] ^= 1 << at % 8
        try:
            order(bytes(bad))
            passed.append((at // 8, bytes(bad[max(0, at // 8 - 10):at // 8 + 10])))
        except program.Rejected:
            continue                            # as it must be
    assert passed == []


def orders_or_rejects(raw: bytes) -> None:
    """Whatever comes: an order, or Rejected."""
    for topic, kind in ((DISPATCH_TOPIC, "dispatch"), (CONTROL_TOPIC, "control")):
        try:
            payload = order(raw, topic, kind)
            if kind == "dispatch":
                program.check_dispatch(payload["data"], NOW_S)
        except program.Rejected:
            continue
    try:
        program.accept_presence(PRESENCE_TOPIC, raw, PRESENCE_KEY)
    except program.Rejected:
        pass


@PROPERTY
@given(st.binary(max_size=300))
def test_random_bytes_end_no_runner(raw: bytes) -> None:
    """Anybody who may publish could end it, else."""
    orders_or_rejects(raw)


ORDER_FIELDS = st.sampled_from(["data", "event", "seq", "job_id", "schema_version", "detail", "timestamp"])
ORDER_DATA = st.sampled_from(["session", "kid", "attempt_id", "dispatch_token", "runner", "seq_base", "issued_at",
                              "expires_at", "prompt", "contract", "hmac_sig", "from_seq", "status", "reason",
                              "state", "host", "version", "slots", "busy", "pool", "serving_s", "instance", "beat"])


@PROPERTY
@given(st.sampled_from(["dispatch", "cancel", "resend", "presence"]), st.dictionaries(ORDER_FIELDS, VALUES, max_size=2),
       st.dictionaries(ORDER_DATA, VALUES, max_size=3), st.booleans())
def test_an_order_with_odd_fields_is_rejected_and_nothing_else(word: str, fields: Payload, data: Payload,
                                                               signed: bool) -> None:
    """An exception would end the runner, signed or not: a wrong kid needs no key."""
    if word == "presence":
        payload, key = json.loads(presence_of()), PRESENCE_KEY
    else:
        payload, key = json.loads(dispatch_of()), CONTROL_KEY
        payload["event"] = word
    payload["data"].update(data)
    payload.update(fields)
    if signed and isinstance(payload["data"], dict):
        orders_or_rejects(signed_json(payload, key))
    else:
        orders_or_rejects(json.dumps(payload).encode())


@PROPERTY
@given(st.sampled_from(["dispatch", "presence"]), st.integers(0, 10 ** 6), st.integers(0, 12), FRAGMENTS)
def test_an_altered_order_is_rejected_or_says_the_same(which: str, where: int, cut: int, put: bytes) -> None:
    raw = dispatch_of() if which == "dispatch" else presence_of()
    at = where % (len(raw) + 1)
    altered = raw[:at] + put + raw[at + cut:]
    orders_or_rejects(altered)
    try:
        if which == "dispatch":
            assert program.canonical(order(altered)) == program.canonical(json.loads(raw))
        else:
            assert program.accept_presence(PRESENCE_TOPIC, altered, PRESENCE_KEY) == PRESENCE
    except program.Rejected:
        pass                                    # as nearly always


# ---- whether a dispatch can be carried out ---------------------------------------------------------------------------

def dispatched(**contract: Any) -> Payload:
    """The data of a good dispatch, with other terms."""
    data = dict(order(dispatch_of())["data"])
    data["contract"] = {**data["contract"], **contract}
    return data


def without(name: str) -> Payload:
    data = dispatched()
    data["contract"].pop(name)
    return data


NUMBERS = ["timeout_sec", "idle_timeout_sec", "heartbeat_sec", "heartbeat_misses", "ack_timeout_sec"]
BAD_TERMS = [(name, value) for name in NUMBERS
             for value in (0, -1, True, "5", None, [5], {}, 10 ** 12, 1.7e308, -0.0)]
BAD_TERMS += [("heartbeat_misses", 2.5)]
BAD_TERMS += [(name, value) for name in ("agent", "role") for value in (None, 5, True, ["x"], {})]
BAD_TERMS += [("artifacts", value) for value in (
    None, "a", {}, 5, [5], [None], [["a"]], [""], ["/etc/passwd"], ["../x"], [".."], ["a/../../x"], ["a\0b"],
    ["good", "/bad"], ["\ud800"])]


@pytest.mark.parametrize("name, value", BAD_TERMS, ids=[f"{name}={value!r:.20}" for name, value in BAD_TERMS])
def test_a_contract_of_a_wrong_form_is_refused(name: str, value: Any) -> None:
    """A runner that took it would fail on it later, or look at a file outside of its folder."""
    with pytest.raises(program.Rejected) as refusal:
        program.check_dispatch(dispatched(**{name: value}), NOW_S)
    assert refusal.value.reason == "shape" and ("artifacts" if name == "artifacts" else name) in str(refusal.value)


@pytest.mark.parametrize("name", [*NUMBERS, "agent", "role", "artifacts"])
def test_a_contract_without_a_term_is_refused(name: str) -> None:
    with pytest.raises(program.Rejected) as refusal:
        program.check_dispatch(without(name), NOW_S)
    assert refusal.value.reason == "shape" and name in str(refusal.value)


@pytest.mark.parametrize("changes", [
    {"contract": None}, {"contract": []}, {"prompt": None}, {"prompt": 5}, {"prompt": ["x"]}, {"seq_base": -1},
    {"seq_base": True}, {"seq_base": 1.5}, {"seq_base": "4"}, {"issued_at": None}, {"issued_at": 5},
    {"expires_at": None}, {"expires_at": 1e9}], ids=str)
def test_a_dispatch_of_a_wrong_form_is_refused(changes: Payload) -> None:
    with pytest.raises(program.Rejected) as refusal:
        program.check_dispatch({**dispatched(), **changes}, NOW_S)
    assert refusal.value.reason == "shape" and str(refusal.value) != "shape"


WHEN = [   # seconds that this host's clock is ahead of issued_at; the dispatch is good for 180 s, the skew is 300 s
    (0, ""), (180, ""), (479, ""), (481, "expired"), (86400, "expired"), (-299, ""), (-301, "from_future"),
    (-10 ** 8, "from_future")]


@pytest.mark.parametrize("ahead_s, reason", WHEN)
def test_an_old_dispatch_is_not_carried_out_and_a_wrong_clock_is_named(ahead_s: int, reason: str) -> None:
    """Yesterday's retained dispatch must not run today; and with a clock that is wrong, both times tell whose."""
    if not reason:
        program.check_dispatch(dispatched(), NOW_S + ahead_s)
        return
    with pytest.raises(program.Rejected) as refusal:
        program.check_dispatch(dispatched(), NOW_S + ahead_s)
    assert refusal.value.reason == reason
    assert NOW in str(refusal.value) and program.utc_text(NOW_S + ahead_s) in str(refusal.value)


@pytest.mark.parametrize("issued_at, expires_at", [("nonsense", "nonsense"), ("", ""), (NOW, "never")])
def test_a_time_that_is_none_is_long_ago(issued_at: str, expires_at: str) -> None:
    with pytest.raises(program.Rejected) as refusal:
        program.check_dispatch({**dispatched(), "issued_at": issued_at, "expires_at": expires_at}, NOW_S)
    assert refusal.value.reason == "expired"


# ---- presence --------------------------------------------------------------------------------------------------------

PRESENCE = program.Presence("gpu1", RUNNER, "online", "host-a", "5.0.0", 2, 1, False, 12.5, "f" * 16, 7, NOW)
PRESENCE_TOPIC = f"python/mqtt/jobs-runners/gpu1/{RUNNER}"


def presence_of(key: str = PRESENCE_KEY, **changes: Any) -> bytes:
    return bytes(program.presence_message("python/mqtt/jobs", PRESENCE._replace(**changes), key)[1])


def why_no_presence(raw: bytes, topic: str = PRESENCE_TOPIC) -> str:
    with pytest.raises(program.Rejected) as refusal:
        program.accept_presence(topic, raw, PRESENCE_KEY)
    return str(refusal.value.reason)


def test_a_presence_arrives_as_it_was_written() -> None:
    topic, raw, retain = program.presence_message("python/mqtt/jobs", PRESENCE, PRESENCE_KEY)
    assert (topic, retain) == (PRESENCE_TOPIC, True)
    assert program.accept_presence(topic, raw, PRESENCE_KEY) == PRESENCE


@pytest.mark.parametrize("raw, topic, reason", [
    (presence_of(key=program.derive_key(program.session_key(SECRET, "gpu2"), "presence")), PRESENCE_TOPIC, "signature"),
    (presence_of(), PRESENCE_TOPIC.replace("gpu1", "gpu2"), "topic"),
    (presence_of(), PRESENCE_TOPIC[:-1] + "e", "topic"),
    (presence_of(session="gpu2"), PRESENCE_TOPIC, "topic"),
    (presence_of(slots=-1), PRESENCE_TOPIC, "shape"), (presence_of(slots=True), PRESENCE_TOPIC, "shape"),
    (presence_of(busy="1"), PRESENCE_TOPIC, "shape"), (presence_of(beat=None), PRESENCE_TOPIC, "shape"),
    (presence_of(pool=1), PRESENCE_TOPIC, "shape"), (presence_of(serving_s="1"), PRESENCE_TOPIC, "shape"),
    (presence_of(serving_s=True), PRESENCE_TOPIC, "shape"), (presence_of(host=5), PRESENCE_TOPIC, "shape"),
    (presence_of(state=["online"]), PRESENCE_TOPIC, "shape"), (presence_of(instance=None), PRESENCE_TOPIC, "shape"),
    (dispatch_of(), PRESENCE_TOPIC, "topic"), (b"", PRESENCE_TOPIC, "json"),
], ids=lambda value: "" if isinstance(value, bytes) else None)
def test_a_presence_that_is_not_the_runners_own_counts_for_nothing(raw: bytes, topic: str, reason: str) -> None:
    """Else anybody could draw the prompts of a session to himself, or keep its runner from serving."""
    assert why_no_presence(raw, topic) == reason


def test_a_presence_drives_no_terminal() -> None:
    """`mam remote list` prints what other hosts say of themselves."""
    raw = presence_of(host="\x1b[31mred\n" + "h" * 200, version="\u202e5")
    found = program.accept_presence(PRESENCE_TOPIC, raw, PRESENCE_KEY)
    assert found.host.startswith("[31mred ") and len(found.host) <= 64 and found.version == "5"


# ---- what a remote job's runners are told, in which order ------------------------------------------------------------

NOTHING, OWED, KEPT, STALE = range(4)
MAIL_TABLE = [   # (dispatch, control) of each attempt, oldest first: what is next, of which attempt
    ([], None),
    ([(OWED, NOTHING)], ("dispatch", 1)),
    ([(KEPT, NOTHING)], None),
    ([(STALE, NOTHING)], ("clear_dispatch", 1)),
    ([(NOTHING, OWED)], ("control", 1)),
    ([(STALE, OWED)], ("control", 1)),                  # the runner hears of the end before its order goes
    ([(OWED, OWED)], ("control", 1)),
    ([(STALE, KEPT)], ("clear_dispatch", 1)),
    ([(NOTHING, KEPT)], None),                          # kept until the runner answers
    ([(NOTHING, STALE)], ("clear_control", 1)),
    ([(STALE, STALE)], ("clear_control", 1)),
    ([(STALE, OWED), (OWED, NOTHING)], ("control", 1)),         # redispatched: first the end of the old attempt
    ([(STALE, KEPT), (OWED, NOTHING)], ("forget_dispatch", 1)),     # its order goes with the next one's
    ([(NOTHING, KEPT), (OWED, NOTHING)], ("dispatch", 2)),
    ([(STALE, KEPT), (KEPT, NOTHING)], ("forget_dispatch", 1)),     # cleared now, the new one's would be gone
    ([(STALE, NOTHING), (NOTHING, NOTHING)], ("clear_dispatch", 1)),
    ([(NOTHING, STALE), (NOTHING, OWED)], ("forget_control", 1)),
    ([(NOTHING, STALE), (NOTHING, KEPT)], ("forget_control", 1)),
    ([(NOTHING, STALE), (STALE, STALE)], ("clear_control", 1)),
    ([(NOTHING, STALE), (KEPT, NOTHING)], ("clear_control", 1)),
    ([(NOTHING, KEPT), (STALE, OWED), (OWED, NOTHING)], ("control", 2)),
]


@pytest.mark.parametrize("mails, expected", MAIL_TABLE, ids=[str(mails) for mails, _ in MAIL_TABLE])
def test_what_is_sent_next(mails: Any, expected: Any) -> None:
    """Out of order, a runner begins the next attempt beside the old one, or a new order is taken off the broker."""
    found = program.next_mail([mail_of(dispatch, control, attempt)
                               for attempt, (dispatch, control) in enumerate(mails, 1)])
    assert (found and (found[0], found[1].attempt_id)) == expected


class Correspondence:
    """The mails of a job as its life moves them, and what a broker retains of what is sent."""

    def __init__(self) -> None:
        self.mails = [mail_of(attempt=1)]
        self.topics: Dict[str, int] = {}            # dispatch, control: the attempt whose message is retained
        self.flying: Any = None

    def change(self, at: int, **columns: int) -> None:
        self.mails[at] = self.mails[at]._replace(**columns)

    def assign(self) -> None:
        if self.mails[-1].dispatch_mail == NOTHING and self.mails[-1].control_mail == NOTHING:
            self.change(-1, dispatch_mail=OWED)

    def start(self) -> None:
        if self.mails[-1].dispatch_mail in (OWED, KEPT):
            self.change(-1, dispatch_mail=STALE)

    def end(self) -> None:
        if self.mails[-1].dispatch_mail != NOTHING and self.mails[-1].control_mail == NOTHING:
            self.change(-1, control_mail=OWED)
            self.start()

    def redispatch(self) -> None:
        self.end()
        self.mails.append(mail_of(attempt=len(self.mails) + 1))

    def answer(self) -> None:
        for at, mail in enumerate(self.mails):
            if mail.control_mail in (OWED, KEPT):
                self.change(at, control_mail=STALE)
                return

    def send(self) -> None:
        """Post what is next; an acknowledgement that is awaited comes first."""
        self.acknowledge()
        self.flying = program.next_mail([mail for mail in self.mails if mail.dispatch_mail or mail.control_mail])
        if self.flying:
            what, mail = self.flying
            name = what.rpartition("_")[2]
            if what == name:
                self.topics[name] = mail.attempt_id
            elif what.startswith("clear_"):
                self.topics.pop(name, None)

    def acknowledge(self) -> None:
        """As Registry.mark_mailed() does: nothing, if it was decided anew meanwhile."""
        if self.flying:
            what, mail = self.flying
            name = what.rpartition("_")[2]
            before, after = (OWED, KEPT) if what == name else (STALE, NOTHING)
            if getattr(self.mails[mail.attempt_id - 1], name + "_mail") == before:
                self.change(mail.attempt_id - 1, **{name + "_mail": after})
        self.flying = None


STEPS = ["assign", "start", "end", "redispatch", "answer", "send", "acknowledge"]


@PROPERTY
@given(st.lists(st.sampled_from(STEPS), max_size=40))
def test_whatever_happens_a_broker_retains_the_orders_in_force_and_no_others(steps: List[str]) -> None:
    """Else a runner that comes back runs an attempt that is over, or never hears of the one that waits for it."""
    post = Correspondence()
    for step in steps:
        getattr(post, step)()
    for _ in range(100):
        post.send()
        if post.flying is None:
            break
    assert post.flying is None, "it never comes to an end"
    kept = [mail.attempt_id for mail in post.mails if mail.dispatch_mail == KEPT]
    assert post.topics.get("dispatch") == max(kept, default=None)
    told = [mail.attempt_id for mail in post.mails if mail.control_mail == KEPT]
    assert post.topics.get("control") in (None, *told)
    if told and told[-1] == len(post.mails):
        assert post.topics["control"] == told[-1]

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

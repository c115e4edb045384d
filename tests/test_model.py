"""What may change a job, and what may not: the table of DESIGN 6, and the registry that carries it out.

If one of these fails, an agent's work is reported as what it was not: a stale worker ends a job that is at its next
attempt, a finished job runs again, or two events carry one number.
"""
from __future__ import annotations

import json
import sys
import uuid
from typing import Any, Dict, Iterator, List, Optional, Tuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import ROOT

sys.path.insert(0, str(ROOT))
import mam as program

Registry, Job = program.Registry, program.Job

# ---- the table -------------------------------------------------------------------------------------------------
#
# Columns: a job that is pending, running, validating (its attempt has ended as completed), completed, ended by its
# worker's error, cancelled, or closed as deadline_timeout.
# Cells: the new status (`validating` when something is still owed) · `same` idempotent · `no` refused · `late`
# refused, and kept as evidence · `same,late` idempotent, and kept as evidence.

STATES = ("pending", "running", "validating", "completed", "error", "cancelled", "timed_out")
TABLE = """
claim                        running    no         no         no         no         no         no
started                      running    running    late       late       late       late       late
progress                     running    running    late       late       late       late       late
permission_required          running    running    late       late       late       late       late
completed                    completed  completed  same,late  same,late  late       late       late
completed+owes               validating validating same,late  same,late  late       late       late
error                        error      error      late       late       same,late  late       same,late
error+owes                   error      error      late       late       same,late  late       same,late
settled:completed            no         no         completed  same       no         no         no
settled:error                no         no         error      no         same       no         no
set:pending                  same       pending    no         no         no         no         no
set:running                  running    same       no         no         no         no         no
set:completed                completed  completed  completed  same       no         no         no
set:error                    error      error      error      no         same       no         same
set:cancelled                cancelled  cancelled  cancelled  no         no         same       no
cancelled                    cancelled  cancelled  cancelled  no         no         same       no
deadline_timeout             error      error      error      no         no         no         same
unresponsive                 error      error      error      no         no         no         no
agent_blocked                error      error      error      no         no         no         no
spawn_failed                 error      error      error      no         no         no         no
supervisor_lost              error      error      error      no         no         no         no
session_busy                 cancelled  no         no         no         no         no         no
overruled:cancelled          cancelled  cancelled  cancelled  cancelled  cancelled  same       cancelled
overruled:error              error      error      error      error      same       error      same
redispatch                   no         no         pending    pending    pending    pending    pending
redispatch+force             pending    pending    pending    pending    pending    pending    pending
"""
CELLS = [(words[0], state, cell) for words in map(str.split, TABLE.strip().splitlines())
         for state, cell in zip(STATES, words[1:])]
WORKER = ("started", "progress", "permission_required", "completed", "error")
CLOSES = ("cancelled", "deadline_timeout", "unresponsive", "agent_blocked", "spawn_failed", "supervisor_lost",
          "session_busy")
TERMINAL = ("completed", "error", "cancelled")


def columns(job_id: str, **more: Any) -> Dict[str, Any]:
    """The columns that a registration fills in."""
    return {"job_id": job_id, "title": "t", "agent": "a", "agent_session": "queue:q", "role": "Worker",
            "broker": None, "topic_prefix": "python/mqtt/jobs/" + job_id, "timeout_sec": 3600, "idle_timeout_sec": 120,
            "heartbeat_sec": 30, "heartbeat_misses": 4, "ack_timeout_sec": 180, "expected_artifacts": "[]",
            "job_type": "direct", "max_iterations": 5, "attempt_id": 1, "transport": "local", "workdir": "/",
            "wire": None, "prompt": "p", **more}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(str(tmp_path_factory.mktemp("model") / ".mam"), create=True) as made:
        yield made


def new_job(registry: Registry, state: str = "pending", owes: bool = False) -> Job:
    """A job brought into a state of the table by requests alone."""
    job = registry.register(columns(uuid.uuid4().hex[:16], validate_cmd="true" if owes or state == "validating"
                                    else None))
    steps = {"pending": [], "running": ["started"], "validating": ["started", "completed"],
             "completed": ["started", "completed"], "error": ["started", "error"], "cancelled": ["cancelled"],
             "timed_out": ["started", "deadline_timeout"]}[state]
    for request in steps:
        answer = registry.transition(job.job_id, request, source="test")
        assert answer.committed, answer
        job = answer.job
    if owes and state == "completed":
        job = registry.transition(job.job_id, "settled", source="test", fields={"status": "completed"}).job
    wanted = {"validating": ("running", "validating"), "timed_out": ("error", None)}.get(state, (state, None))
    assert (job.status, job.phase) == wanted
    return job


def test_the_table_knows_every_request() -> None:
    """A request that is not in the table above is one whose effects nobody has thought through."""
    assert {name.partition("+")[0].partition(":")[0] for name, _, _ in CELLS} == set(program.REQUESTS)
    assert set(CLOSES) == set(program.CLOSE_REQUESTS)
    assert len(CELLS) == len(STATES) * len(TABLE.strip().splitlines())


@pytest.mark.parametrize("name, state, cell", CELLS, ids=[f"{name}-{state}" for name, state, _ in CELLS])
def test_a_request_does_what_the_table_says(registry: Registry, name: str, state: str, cell: str) -> None:
    request, _, status = name.partition("+")[0].partition(":")
    before = new_job(registry, state, owes=name.endswith("+owes"))
    log = len(registry.events(before.job_id))
    answer = registry.transition(before.job_id, request, source="test",
                                 fields={"status": status or None, "force": name.endswith("+force"), "detail": "words"})
    after, added = answer.job, registry.events(before.job_id)[log:]
    assert registry.job(before.job_id) == after

    if cell in STATES:
        assert answer.committed and not answer.idempotent
        expected = ("running", "validating") if cell == "validating" else (cell, None)
        assert (after.status, after.phase) == expected
        assert after.transition_seq == before.transition_seq + 1
        assert (after.finished_at is not None) == (after.status in TERMINAL)
        assert after.attempt_id == before.attempt_id + (request == "redispatch")
        if request in CLOSES:
            assert after.reason == request
        numbered = [event for event in added if event.seq is not None]
        speaks = request in WORKER or after.status in TERMINAL
        assert len(numbered) == speaks and after.last_seq == before.last_seq + speaks
        if speaks:
            assert numbered == [answer.event] and numbered[0].detail == "words"
            data = json.loads(numbered[0].payload)["data"]
            assert (data.get("settles") is False) == (cell == "validating")
        if after.status in TERMINAL or cell == "validating":
            assert after.outcome is not None and registry.beat(before.job_id) is None
    else:
        assert not answer.committed and answer.event is None
        assert answer.idempotent == cell.startswith("same")
        assert after == before, "a request that was not allowed has changed something"
        assert answer.reason and before.job_id in answer.reason or "needs status" in answer.reason \
            or "has not ended" in answer.reason
        kept = [event.event for event in added]
        assert kept == (["late"] if "late" in cell else [] if cell == "same" else ["refused"])


@pytest.mark.parametrize("state", STATES)
def test_what_a_late_worker_brought_is_kept_whole(registry: Registry, state: str) -> None:
    """Late work is evidence: its detail, data and feedback are in the log, and the answer says what became of it."""
    job = new_job(registry, state)
    answer = registry.transition(job.job_id, "progress", source="w", expected_attempt=7,
                                 fields={"detail": "late words", "data": {"k": 1}, "feedback": "long words"})
    assert not answer.committed and answer.job == job
    line = registry.events(job.job_id)[-1]
    payload = json.loads(line.payload)
    assert (line.event, line.detail, line.seq, line.attempt_id) == ("late", "late words", None, 7)
    assert payload["data"] == {"k": 1} and payload["feedback"] == "long words" and payload["source_event"] == "progress"
    assert job.status in answer.reason or (job.phase or "-") in answer.reason


# ---- who speaks ------------------------------------------------------------------------------------------------
#
# (attempt the job is at, what the request names, whether a worker may, whether an operator may)

FENCES = [
    (1, {}, True, True),
    (1, {"attempt": 1}, True, True),
    (1, {"token": "right"}, True, True),
    (1, {"attempt": 1, "token": "right"}, True, True),
    (1, {"attempt": 2}, False, False),
    (1, {"attempt": 0}, False, False),
    (1, {"token": "wrong"}, False, False),
    (1, {"token": ""}, False, False),
    (1, {"attempt": 1, "token": "wrong"}, False, False),
    (1, {"attempt": 2, "token": "right"}, False, False),
    (2, {}, False, True),
    (2, {"attempt": 2}, True, True),
    (2, {"token": "right"}, True, True),
    (2, {"attempt": 1}, False, False),
    (2, {"token": "old"}, False, False),
    (2, {"attempt": 2, "token": "old"}, False, False),
    (2, {"attempt": 1, "token": "right"}, False, False),
    (3, {}, False, True),
    (3, {"attempt": 2}, False, False),
    (3, {"attempt": 3}, True, True),
]


def redispatched(registry: Registry, attempts: int) -> Tuple[Job, str]:
    """(a running job at that attempt, the token of the attempt before)."""
    job, old = new_job(registry, "running"), ""
    while job.attempt_id < attempts:
        old = job.dispatch_token
        job = registry.transition(job.job_id, "redispatch", source="test", fields={"force": True}).job
        job = registry.transition(job.job_id, "started", source="test", expected_attempt=job.attempt_id).job
    return job, old


@pytest.mark.parametrize("attempt, names, worker, operator", FENCES,
                         ids=[f"{attempt}-{names}" for attempt, names, _, _ in FENCES])
@pytest.mark.parametrize("request_", ["progress", "completed", "error", "claim", "deadline_timeout", "cancelled",
                                      "redispatch"])
def test_only_the_attempt_itself_speaks_for_a_job(registry: Registry, attempt: int, names: Dict[str, Any],
                                                  worker: bool, operator: bool, request_: str) -> None:
    """A worker of an earlier attempt that wakes up must not end the job its successor is at work on."""
    before, old = redispatched(registry, attempt)
    token = {"right": before.dispatch_token, "old": old, "wrong": "0" * 32}.get(names.get("token"), names.get("token"))
    answer = registry.transition(before.job_id, request_, source="test", expected_attempt=names.get("attempt"),
                                 expected_dispatch_token=token, fields={"force": True})
    allowed = worker if request_ in WORKER else operator
    if request_ == "claim":
        allowed = False                         # it is running already
    assert answer.committed == allowed
    if not allowed:
        assert answer.job == before and not answer.idempotent and answer.reason


@pytest.mark.parametrize("names, committed", [
    ({"expected_status": "running"}, True), ({"expected_status": "pending"}, False),
    ({"expected_last_seq": 1}, True), ({"expected_last_seq": 0}, False), ({"expected_last_seq": 2}, False),
    ({"expected_status": "running", "expected_last_seq": 1, "expected_attempt": 1}, True),
    ({"expected_status": "running", "expected_last_seq": 1, "expected_attempt": 2}, False),
])
@pytest.mark.parametrize("request_", ["deadline_timeout", "unresponsive", "agent_blocked", "cancelled", "completed"])
def test_a_verdict_on_an_outdated_view_loses(registry: Registry, names: Dict[str, Any], committed: bool,
                                             request_: str) -> None:
    """An event that arrives between the look and the close wins: a job that just reported is not unresponsive."""
    before = new_job(registry, "running")
    answer = registry.transition(before.job_id, request_, source="test", **names)
    assert answer.committed is committed
    assert committed or answer.job == before


def test_a_redispatch_is_a_new_attempt_in_every_respect(registry: Registry) -> None:
    """New tokens (what the old worker holds is worth nothing), numbers that go on, no clock or beat of the old one."""
    job = registry.register(columns(uuid.uuid4().hex[:16], wire="127.0.0.1:1"))
    registry.transition(job.job_id, "started", source="w", fields={"heartbeat_sec": 30})
    old = registry.transition(job.job_id, "completed", source="w").job
    new = registry.transition(job.job_id, "redispatch", source="operator", fields={"prompt": "again\nplease"}).job
    assert (new.status, new.attempt_id, new.seq_base, new.last_seq) == ("pending", 2, 2, 2)
    assert new.dispatch_token != old.dispatch_token and new.auth_token != old.auth_token
    assert registry.attempt_token(job.job_id, 1) == old.auth_token
    assert (new.outcome, new.reason, new.phase, new.run, new.delivery) == (None, None, None, None, "none")
    assert not any((new.started_at, new.finished_at, new.claimed_at, new.delivered_at, new.last_event_mono))
    assert registry.beat(job.job_id) is None and registry.owed_events(job.job_id, 10) == [] and new.clear_owed
    assert registry.prompt(job.job_id) == "again\nplease" and new.title == "again"
    assert registry.transition(job.job_id, "started", source="w", expected_attempt=2).event.seq == 3


def test_a_named_attempt_number_never_goes_back(registry: Registry) -> None:
    job = new_job(registry, "completed")
    assert registry.transition(job.job_id, "redispatch", source="o", fields={"attempt_id": 9}).job.attempt_id == 9
    again = registry.transition(job.job_id, "redispatch", source="o", fields={"attempt_id": 3, "force": True}).job
    assert again.attempt_id == 10


# ---- any sequence of requests ------------------------------------------------------------------------------------

# The edges of DESIGN 6: (status, phase) -> (status, phase).
V = "validating"
P, R, RV, C, E, X = ("pending", None), ("running", None), ("running", V), ("completed", None), ("error", None), \
    ("cancelled", None)
CLOSED = {(at, E) for at in (P, R, RV)}
EDGES = {
    "claim": {(P, R)},
    "started": {(P, R), (R, R)}, "progress": {(P, R), (R, R)}, "permission_required": {(P, R), (R, R)},
    "completed": {(P, C), (R, C), (P, RV), (R, RV)}, "error": {(P, E), (R, E)},
    "settled": {(RV, C), (RV, E)},
    "set": {(at, to) for at in (P, R) for to in (P, R, C, E, X) if at != to} | {(RV, C), (RV, E), (RV, X)},
    "cancelled": {(at, X) for at in (P, R, RV)},
    "deadline_timeout": CLOSED, "unresponsive": CLOSED, "agent_blocked": CLOSED, "spawn_failed": CLOSED,
    "supervisor_lost": CLOSED, "session_busy": {(P, X)},
    "redispatch": {(at, P) for at in (P, R, RV, C, E, X)},
}
STEPS = st.lists(st.tuples(
    st.sampled_from(sorted(EDGES)) | st.sampled_from(["started", "progress", "completed", "redispatch"]),
    st.sampled_from(["none", "attempt", "token", "both", "old attempt", "old token", "next attempt", "wrong status",
                     "right status", "wrong seq", "right seq"]),
    st.sampled_from(program.STATUSES), st.booleans()), min_size=1, max_size=14)


def expectations(who: str, job: Job, tokens: List[str]) -> Dict[str, Any]:
    wrong = next(status for status in program.STATUSES if status != job.status)
    return {"none": {}, "attempt": {"expected_attempt": job.attempt_id},
            "token": {"expected_dispatch_token": job.dispatch_token},
            "both": {"expected_attempt": job.attempt_id, "expected_dispatch_token": job.dispatch_token},
            "old attempt": {"expected_attempt": job.attempt_id - 1},
            "old token": {"expected_dispatch_token": tokens[-1] if tokens else "none"},
            "next attempt": {"expected_attempt": job.attempt_id + 1},
            "wrong status": {"expected_status": wrong}, "right status": {"expected_status": job.status},
            "wrong seq": {"expected_last_seq": job.last_seq + 1},
            "right seq": {"expected_last_seq": job.last_seq}}[who]


def names_the_attempt(who: str) -> bool:
    return who in ("attempt", "token", "both")


def believes_wrongly(who: str) -> bool:
    return who.startswith(("old", "next", "wrong"))


def check_step(before: Job, request: str, who: str, status: str, force: bool, answer: Any) -> None:
    """What must hold after any single request."""
    after = answer.job
    if not answer.committed:
        assert after == before and answer.event is None and answer.reason
        return
    assert not answer.idempotent
    assert ((before.status, before.phase), (after.status, after.phase)) in EDGES[request]
    assert after.transition_seq == before.transition_seq + 1
    assert not believes_wrongly(who), "a request about another attempt, status or seq was let through"
    if request in WORKER:
        assert before.outcome is None, "an ended attempt has spoken"
        assert before.attempt_id == 1 or names_the_attempt(who), "a worker that named nothing has spoken"
    if before.status in TERMINAL:
        assert request == "redispatch", "an end was left"
    if request == "redispatch":
        assert force or before.outcome is not None, "a live attempt was ended without --force"
        assert after.attempt_id == before.attempt_id + 1 and after.dispatch_token != before.dispatch_token
    else:
        assert (after.attempt_id, after.dispatch_token) == (before.attempt_id, before.dispatch_token)
    if request in ("set", "settled") and after.phase is None:
        assert after.status == status


def check_whole(registry: Registry, job_id: str, commits: int) -> None:
    """What must hold of the log at the end."""
    job, events = registry.job(job_id), registry.events(job_id)
    numbered = [event for event in events if event.seq is not None]
    assert [event.seq for event in numbered] == list(range(1, job.last_seq + 1)), "a gap or a repeat"
    order = [(event.attempt_id, event.seq) for event in numbered]
    assert order == sorted(order)
    assert job.transition_seq == commits
    ends: Dict[int, int] = {}
    for event in numbered:
        payload = json.loads(event.payload)
        assert payload["seq"] == event.seq and payload["data"]["attempt_id"] == event.attempt_id
        if event.event in ("completed", "error") and payload["data"].get("settles") is not False:
            ends[event.attempt_id] = ends.get(event.attempt_id, 0) + 1
    assert all(count == 1 for count in ends.values()), "an attempt has two ends"
    assert (job.finished_at is not None) == (job.status in TERMINAL)
    assert job.phase is None or job.status == "running"


@settings(deadline=None, derandomize=True, database=None, max_examples=80,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(STEPS, st.booleans())
def test_only_legal_transitions_ever_happen(registry: Registry, steps: Any, owes: bool) -> None:
    """Whatever is asked, by whom, in which order: an end is final, numbers have no gap, strangers change nothing."""
    job = registry.register(columns(uuid.uuid4().hex[:16], expected_artifacts='["report.md"]' if owes else "[]"))
    tokens: List[str] = []
    commits = 0
    for request, who, status, force in steps:
        if request == "settled" and status not in ("completed", "error"):
            status = "completed"
        before = registry.job(job.job_id)
        answer = registry.transition(job.job_id, request, source="test", **expectations(who, before, tokens),
                                     fields={"status": status, "force": force, "detail": "d"})
        assert registry.job(job.job_id) == answer.job
        check_step(before, request, who, status, force, answer)
        commits += answer.committed
        if answer.committed and request == "redispatch":
            tokens.append(before.dispatch_token)
    check_whole(registry, job.job_id, commits)


@settings(deadline=None, derandomize=True, database=None, max_examples=40,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.sampled_from(STATES), st.sampled_from(WORKER), st.integers(-2, 1), st.booleans())
def test_a_stale_attempt_never_changes_anything(registry: Registry, state: str, request: str, behind: int,
                                                with_token: bool) -> None:
    first = new_job(registry, state)
    job = registry.transition(first.job_id, "redispatch", source="o", fields={"force": True}).job
    answer = registry.transition(job.job_id, request, source="w", expected_attempt=behind,
                                 expected_dispatch_token=first.dispatch_token if with_token else None)
    assert not answer.committed and not answer.idempotent and answer.job == job
    assert "attempt 2" in answer.reason, "a stale worker is not told where the job stands"


# ---- exit codes ------------------------------------------------------------------------------------------------

def job_with(**values: Any) -> Job:
    return Job(**{**dict.fromkeys(Job._fields), "job_id": "j", "attempt_id": 1, **values})


ENDS = {"completed": (("completed", None), 0), "by operator": (("completed", "operator"), 0),
        "error": (("error", None), 1), "failed check": (("error", "validation_failed"), 1),
        "artifact": (("error", "artifact_missing"), 1), "blocked": (("error", "agent_blocked"), 1),
        "spawn": (("error", "spawn_failed"), 1), "lost": (("error", "supervisor_lost"), 1),
        "timeout": (("error", "deadline_timeout"), 2), "silent": (("error", "unresponsive"), 2),
        "cancelled": (("cancelled", "cancelled"), 1), "set": (("cancelled", "operator"), 1),
        "busy": (("cancelled", "session_busy"), 5)}


@pytest.mark.parametrize("name", ENDS)
def test_the_exit_code_tells_how_a_job_ended(name: str) -> None:
    """Scripts branch on it; 0 for a job that failed would ship it."""
    (status, reason), code = ENDS[name]
    assert program.exit_of(job_with(status=status, reason=reason)) == code


@pytest.mark.parametrize("names, code", [
    ([], 0), (["completed"], 0), (["completed", "completed"], 0), (["error"], 1), (["completed", "error"], 1),
    (["timeout"], 2), (["completed", "timeout"], 2), (["timeout", "silent"], 2), (["timeout", "error"], 1),
    (["completed", "timeout", "cancelled"], 1), (["busy"], 5), (["busy", "busy"], 5), (["busy", "completed"], 1),
    (["busy", "timeout"], 1), (["cancelled"], 1), (["by operator", "completed"], 0),
])
def test_the_exit_code_of_several_jobs_is_the_worst_news(names: List[str], code: int) -> None:
    jobs = [job_with(status=ENDS[name][0][0], reason=ENDS[name][0][1]) for name in names]
    assert program.exit_of_all(jobs) == code
    assert program.exit_of_all(jobs[::-1]) == code


# ---- what is asked for --------------------------------------------------------------------------------------------

SESSIONS = [
    ("exec:demo", "local"), ("tmux:alice", "local"), ("tmux:%12", "local"), ("herdr:claude", "herdr"),
    ("remote:host-2", "remote"), ("queue:a_b-C9", "local"), ("exec:" + "x" * 64, "local"),
    ("exec", None), ("exec:", None), (":x", None), ("", None), ("EXEC:x", None), ("shell:x", None), ("exec:a b", None),
    ("exec:a:b", None), ("exec:\u00e9", None), ("exec:a/b", None), ("exec:a\n", None), (" exec:a", None),
    ("tmux:%", None), ("exec:%1", None), ("exec:" + "x" * 65, None), ("exec:a;rm", None), ("tmux:=a", None),
    ("exec:..", None), ("exec:\ud800", None),
]


@pytest.mark.parametrize("text, transport", SESSIONS, ids=[repr(text)[:30] for text, _ in SESSIONS])
def test_a_session_is_a_kind_and_a_name(text: str, transport: Optional[str]) -> None:
    """It becomes a target of tmux, a lock's file name and a topic level: nothing else may get there."""
    if transport is None:
        with pytest.raises(program.MamError) as refusal:
            program.check_session(text)
        assert refusal.value.code == "bad_session" and refusal.value.exit == 1 and refusal.value.hint
    else:
        assert program.check_session(text) == text and program.transport_of(text) == transport


@pytest.mark.parametrize("text, good", [("918b0612", True), ("a" * 32, True), ("My_job-1", True), ("x" * 64, True),
                                        ("", False), ("x" * 65, False), ("../x", False), ("a/b", False), ("a b", False),
                                        ("a\n", False), ("\u00e9", False), ("a+", False), ("#", False), ("-", True)])
def test_a_job_id_is_safe_everywhere_it_goes(text: str, good: bool) -> None:
    if good:
        assert program.check_job_id(text) == text
        return
    with pytest.raises(program.MamError) as refusal:
        program.check_job_id(text)
    assert refusal.value.code == "bad_job_id" and refusal.value.exit == 1
    assert "\n" not in refusal.value.message and len(refusal.value.message) < 200


@pytest.mark.parametrize("path, relative", [
    ("report.md", "report.md"), ("./report.md", "report.md"), ("out/a.txt", "out/a.txt"), ("out/", "out"),
    ("out/../a", "a"), ("/work/dir/out/a", "out/a"), ("/work/dir/../dir/a", "a"), ("..a/b", "..a/b"),
    ("a b/c", "a b/c"),
    ("...", "..."), ("", None), ("..", None), ("../a", None), ("out/../../a", None), ("/etc/passwd", None),
    ("/work/dirx/a", None), ("/work", None), ("a\0b", None), ("/work/dir/../a", None),
    ("a\udcff", None),
])
def test_an_artifact_lies_inside_the_workdir(path: str, relative: Optional[str]) -> None:
    """Its sum is reported to whoever delegated: a path that leads out would tell of other people's files.

    (A name that is no UTF-8 is refused too: it could not be stored.)
    """
    if relative is None:
        with pytest.raises(program.MamError) as refusal:
            program.check_artifact(path, "/work/dir")
        assert refusal.value.code == "bad_artifact" and refusal.value.exit == 1
    else:
        assert program.check_artifact(path, "/work/dir") == relative


@pytest.mark.parametrize("owed, phase", [({}, None), ({"validate_cmd": "true"}, "validating"),
                                         ({"expected_artifacts": '["a"]'}, "validating"),
                                         ({"expected_artifacts": '["a"]', "validate_cmd": "x"}, "validating")])
def test_a_job_with_something_owed_is_not_done_when_its_worker_says_so(registry: Registry, owed: Dict[str, Any],
                                                                       phase: Optional[str]) -> None:
    job = registry.register(columns(uuid.uuid4().hex[:16], **owed))
    done = registry.transition(job.job_id, "completed", source="w").job
    assert (done.status, done.phase) == (("running", phase) if phase else ("completed", None))
    assert done.outcome == "completed" and program.owes_more(job) == phase


def test_a_job_of_another_host_gets_no_event_from_here(registry: Registry) -> None:
    """Numbers belong to the registry where the attempt runs: two owners would use one number twice."""
    job = registry.register(columns(uuid.uuid4().hex[:16], transport="remote", agent_session="remote:h"))
    answer = registry.transition(job.job_id, "deadline_timeout", source="operator")
    assert answer.committed and answer.event is None and answer.job.last_seq == 0 and answer.job.status == "error"

"""watch, wait, subscribe: what a user sees of a job, in which order, until when, and with which exit code."""
from __future__ import annotations

import importlib
import itertools
import json
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import ROOT, clean_environment, poll
from support.cli import Mam, Result
from support.observer import Observer

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
core: Any = importlib.import_module("mam")

FOREVER = 1000.0        # seconds: a clock that does not matter here
ALREADY_OVER = 1e-9     # a wait that has run out at the next look, though not at this one


def new_job(registry: Any, **columns: Any) -> Any:
    """A registered job; `columns` replace the defaults."""
    job_id = columns.pop("job_id", uuid.uuid4().hex[:8])
    record = {"job_id": job_id, "title": "t", "agent": "a", "agent_session": "queue:q", "role": "Worker",
              "topic_prefix": "python/mqtt/jobs/" + job_id, "timeout_sec": FOREVER, "idle_timeout_sec": FOREVER,
              "heartbeat_sec": 30, "heartbeat_misses": 4, "ack_timeout_sec": FOREVER, "expected_artifacts": "[]",
              "job_type": "direct", "max_iterations": 5, "attempt_id": 1, "transport": "local",
              "workdir": registry.directory, "prompt": "p"}
    return registry.register({**record, **columns})


def say(registry: Any, job: Any, event: str, detail: str = "", **fields: Any) -> Any:
    """An event of the job's current attempt."""
    attempt = registry.job(job.job_id).attempt_id
    answer = registry.transition(job.job_id, event, expected_attempt=attempt, source="worker",
                                 fields={"detail": detail, **fields})
    assert answer.committed, answer.reason
    return answer


def close(registry: Any, job: Any, request: str) -> None:
    answer = registry.transition(job.job_id, request, source="operator")
    assert answer.committed, answer.reason


def quick(folder: Path) -> Any:
    """A registry made or opened here, without the fsync of every commit."""
    registry = core.Registry(str(folder), create=True)
    registry._execute("PRAGMA synchronous=OFF")
    return registry


@pytest.fixture
def registry(mam: Mam) -> Iterator[Any]:
    """The registry of the host `mam`, opened in this process: a publisher without the start of a process."""
    with quick(mam.registry_dir) as opened:
        yield opened


def seqs(lines: Sequence[str]) -> List[int]:
    return [int(line.split(" seq=")[1].split()[0]) for line in lines if " seq=" in line]


# ---- history, then live -------------------------------------------------------------------------------------

PUBLISHER = """
import sys
sys.path.insert(0, sys.argv[1])
import mam
with mam.Registry(sys.argv[2]) as registry:
    for number in range(int(sys.argv[4])):
        assert registry.transition(sys.argv[3], "progress", source="worker",
                                   fields={"detail": "%s.%d" % (sys.argv[5], number)}).committed
"""


def test_sixteen_publishers_at_once_are_shown_in_full_and_in_order(mam: Mam, registry: Any) -> None:
    """Lost: an event missing, shown twice or out of order while many report at once, early or late joiner."""
    job = new_job(registry)
    for number in range(3):
        say(registry, job, "progress", f"history {number}")
    followers = [mam.popen("watch", job.job_id), mam.popen("watch", job.job_id, "--json"),
                 mam.popen("subscribe", "--job", job.job_id)]
    for follower in followers:
        follower.wait_for("history 2")
    publishers = [subprocess.Popen([sys.executable, "-c", PUBLISHER, str(ROOT), str(mam.registry_dir), job.job_id,
                                    "8", str(name)], env=clean_environment(mam.home, mam.mark)) for name in range(16)]
    followers.append(mam.popen("watch", job.job_id))       # joins in the middle
    for publisher in publishers:
        assert publisher.wait(60) == 0
    say(registry, job, "completed", "done")
    total = 3 + 16 * 8 + 1
    for follower in followers:
        result = follower.wait()
        assert result.code == 0, result
        numbers = [line["seq"] for line in result.ndjson()] if "--json" in result.args else seqs(
            result.stdout.splitlines())
        assert numbers == list(range(1, total + 1)), result
    own = [line.split()[-1] for line in followers[0].stdout.splitlines() if " progress " in line and "." in line[-6:]]
    for name in range(16):
        assert [word for word in own if word.startswith(f"{name}.")] == [f"{name}.{n}" for n in range(8)]


def test_commands_that_publish_at_once_are_all_shown(mam: Mam, registry: Any) -> None:
    """Lost: an event of one of several agents that report by `mam publish` in the same moment."""
    job = new_job(registry)
    follower = mam.popen("watch", job.job_id)
    runs = [mam.popen("publish", "--job", job.job_id, "--event", "progress", "--detail", f"p{n}") for n in range(16)]
    for run in runs:
        assert run.wait().code == 0, run
    mam("publish", "--job", job.job_id, "--event", "completed", check=0)
    result = follower.wait()
    assert seqs(result.stdout.splitlines()) == list(range(1, 18))
    assert {f"p{n}" for n in range(16)} <= {line.split()[-1] for line in result.stdout.splitlines()}


def test_an_end_between_two_looks_is_shown_before_the_follower_leaves(tmp_path: Path) -> None:
    """Lost: the last line, which holds the result: the job is seen as ended before its end event is read."""
    with quick(tmp_path / ".mam") as writer:
        job = new_job(writer)
        say(writer, job, "started")

        class Reader(core.Registry):                # type: ignore[misc]
            def jobs_by_id(self, job_ids: Sequence[str]) -> Any:
                if writer.job(job.job_id).status == "running":     # after the events were read, before the jobs are
                    say(writer, job, "completed", "the result")
                return super().jobs_by_id(job_ids)

        with Reader(str(tmp_path / ".mam")) as reader:
            follower = core.Follower(reader, [job.job_id])
            shown: List[Any] = []
            core.follow(follower, shown.extend, lambda: follower.done)
    assert [event.event for event in shown] == ["started", "completed"]


def test_a_follower_that_was_killed_shows_everything_when_started_again(mam: Mam, registry: Any) -> None:
    """Lost: what was reported before and while the terminal was gone."""
    job = new_job(registry)
    say(registry, job, "started", "one")
    first = mam.popen("watch", job.job_id)
    first.wait_for("one")
    first.send_signal(signal.SIGKILL)
    assert first.wait().code == -signal.SIGKILL
    say(registry, job, "progress", "two")
    second = mam.popen("watch", job.job_id)
    second.wait_for("two")
    say(registry, job, "error", "three")
    result = second.wait()
    assert [line.split()[-1] for line in result.stdout.splitlines()] == ["one", "two", "three"]
    assert result.code == 1


def test_a_redispatched_job_is_shown_attempt_by_attempt(mam: Mam, registry: Any) -> None:
    """Lost: the numbers going on over attempts, or an old attempt's events among the new one's."""
    job = new_job(registry)
    say(registry, job, "started")
    say(registry, job, "error", "first try")
    close(registry, job, "redispatch")
    say(registry, job, "started")
    say(registry, job, "completed", "second try")
    result = mam("watch", job.job_id, check=0)
    assert seqs(result.stdout.splitlines()) == [1, 2, 3, 4]
    only = mam("watch", job.job_id, "--attempt-id", 2, check=0)
    assert seqs(only.stdout.splitlines()) == [3, 4]


# ---- holes ----------------------------------------------------------------------------------------------------

def insert(path: Path, job_id: str, attempt: int, seq: int, event: str = "progress") -> None:
    """Put an event row into the log as an inbox would, whatever its number."""
    with sqlite3.connect(str(path / "mam.db"), timeout=30) as db:
        db.execute("PRAGMA synchronous=OFF")
        db.execute("INSERT INTO events(job_id, attempt_id, seq, event, source, timestamp, logged_at, detail, payload) "
                   "VALUES(?, ?, ?, ?, 'test', 't', 't', ?, '{}')", (job_id, attempt, seq, event, f"{attempt}.{seq}"))
    db.close()


def numbers_of(events: Sequence[Any]) -> List[Tuple[int, int]]:
    return [(event.attempt_id, event.seq) for event in events]


def test_a_hole_is_waited_for_and_filled(tmp_path: Path) -> None:
    """Lost: order, when a message overtakes another by less than the wait."""
    with quick(tmp_path / ".mam") as registry:
        job = new_job(registry)
        follower = core.Follower(registry, [job.job_id])
        shown: List[Any] = []
        for seq in (1, 4, 3):
            insert(tmp_path / ".mam", job.job_id, 1, seq)
            shown += follower.poll()
        assert numbers_of(shown) == [(1, 1)]
        insert(tmp_path / ".mam", job.job_id, 1, 2)
        shown += follower.poll()
        assert numbers_of(shown) == [(1, 1), (1, 2), (1, 3), (1, 4)]


def test_a_hole_is_waited_for_no_longer_than_promised_and_never_filled_afterwards(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost: the rest of the job behind one missing message; or an old progress printed behind newer ones."""
    assert core.HOLE_WAIT_S == 2.0
    monkeypatch.setattr(core, "HOLE_WAIT_S", 0.4)
    with quick(tmp_path / ".mam") as registry:
        job = new_job(registry)
        follower = core.Follower(registry, [job.job_id])
        insert(tmp_path / ".mam", job.job_id, 1, 1)
        shown = follower.poll()
        began = time.monotonic()
        insert(tmp_path / ".mam", job.job_id, 1, 3)
        insert(tmp_path / ".mam", job.job_id, 1, 4)
        poll(lambda: shown.extend(follower.poll()) or len(shown) == 3, 10, "events behind the hole")
        assert time.monotonic() - began >= 0.4
        assert numbers_of(shown) == [(1, 1), (1, 3), (1, 4)]
        insert(tmp_path / ".mam", job.job_id, 1, 2)
        insert(tmp_path / ".mam", job.job_id, 1, 5)
        assert numbers_of(follower.poll()) == [(1, 5)]
        assert (1, 2) in numbers_of([event for event in registry.events(job.job_id) if event.seq])   # still in the log


def test_one_hole_after_another_is_waited_for_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost: the second missing message's chance, because the first one's wait had run out."""
    monkeypatch.setattr(core, "HOLE_WAIT_S", 0.3)
    with quick(tmp_path / ".mam") as registry:
        job = new_job(registry)
        follower = core.Follower(registry, [job.job_id])
        for seq in (1, 3, 5):
            insert(tmp_path / ".mam", job.job_id, 1, seq)
        assert numbers_of(follower.poll()) == [(1, 1)]
        assert numbers_of(poll(follower.poll, 10, "the event behind the first hole")) == [(1, 3)]
        monkeypatch.setattr(core, "HOLE_WAIT_S", FOREVER)
        insert(tmp_path / ".mam", job.job_id, 1, 4)
        assert numbers_of(follower.poll()) == [(1, 4), (1, 5)]


def test_the_end_waits_for_a_hole_and_then_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost: the progress just before the end, or the end itself."""
    with quick(tmp_path / ".mam") as registry:
        job = new_job(registry)
        follower = core.Follower(registry, [job.job_id])
        with registry.write():
            registry._execute("UPDATE jobs SET last_seq = 1 WHERE job_id = ?", (job.job_id,))
        say(registry, job, "completed")                     # takes number 2; number 1 is not there yet
        with core.Registry(str(tmp_path / ".mam")) as reading:
            follower = core.Follower(reading, [job.job_id])
            assert follower.poll() == [] and not follower.done
            insert(tmp_path / ".mam", job.job_id, 1, 1)
            assert numbers_of(follower.poll()) == [(1, 1), (1, 2)] and follower.done
            late = core.Follower(reading, [job.job_id])
            monkeypatch.setattr(core, "HOLE_WAIT_S", ALREADY_OVER)
            assert numbers_of(late.poll()) == [(1, 1), (1, 2)] and late.done


class Folder:
    """One registry for all examples of a property; every example has a job of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.registry = quick(path)
        self.db = sqlite3.connect(str(path / "mam.db"), timeout=30, isolation_level=None)
        self.db.execute("PRAGMA synchronous=OFF")
        self._names = itertools.count(1)

    def job(self) -> Any:
        return new_job(self.registry, job_id=f"job{next(self._names)}")

    def put(self, job: Any, number: Tuple[int, int]) -> None:
        """Insert an event; one that is there already is written anew, behind all others."""
        self.db.execute("BEGIN")
        self.db.execute("DELETE FROM events WHERE job_id = ? AND attempt_id = ? AND seq = ?", (job.job_id, *number))
        self.db.execute(
            "INSERT INTO events(job_id, attempt_id, seq, event, source, timestamp, logged_at, detail, payload) "
            "VALUES(?, ?, ?, 'progress', 'test', 't', 't', '', '{}')", (job.job_id, *number))
        self.db.execute("COMMIT")


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    folder = Folder(tmp_path_factory.mktemp("follow") / ".mam")
    yield folder
    folder.db.close()
    folder.registry.close()


@st.composite
def arrivals(draw: Callable[..., Any]) -> Tuple[List[Tuple[int, int]], List[Tuple[int, int]], List[bool]]:
    """(a stream over some attempts, its events in any order and some twice, where a look lies in between)."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    numbers = itertools.count(1)
    stream = [(attempt, next(numbers)) for attempt, length in enumerate(lengths, 1) for _ in range(length)]
    again = draw(st.lists(st.sampled_from(stream), max_size=6))
    order = draw(st.permutations(stream + again))
    return stream, order, draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))


PROPERTY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(arrivals())
@PROPERTY
def test_any_order_and_duplication_converges_to_the_same_lines(shared_folder: Folder, case: Any) -> None:
    """Lost: the same picture for every follower, whatever the way of the messages. No wait runs out here."""
    stream, order, looks = case
    job = shared_folder.job()
    with pytest.MonkeyPatch.context() as patch, core.Registry(str(shared_folder.path)) as reading:
        patch.setattr(core, "HOLE_WAIT_S", FOREVER)
        follower = core.Follower(reading, [job.job_id])
        shown: List[Any] = []
        for number, look in zip(order, looks):
            shared_folder.put(job, number)
            if look:
                shown += follower.poll()
        shown += follower.poll()
    assert numbers_of(shown) == stream


@given(arrivals(), st.lists(st.booleans(), min_size=20, max_size=20))
@PROPERTY
def test_whenever_waits_run_out_lines_go_forward_only(shared_folder: Folder, case: Any, over: List[bool]) -> None:
    """Lost: a line behind a newer one, or a line twice; and nothing is held back for ever."""
    stream, order, looks = case
    job = shared_folder.job()
    with pytest.MonkeyPatch.context() as patch, core.Registry(str(shared_folder.path)) as reading:
        follower = core.Follower(reading, [job.job_id])
        shown: List[Any] = []
        for number, look, run_out in zip(order, looks, itertools.cycle(over)):
            shared_folder.put(job, number)
            patch.setattr(core, "HOLE_WAIT_S", ALREADY_OVER if run_out else FOREVER)
            if look:
                shown += follower.poll()
        patch.setattr(core, "HOLE_WAIT_S", FOREVER)
        shown += follower.poll()
        patch.setattr(core, "HOLE_WAIT_S", ALREADY_OVER)
        for _ in stream:                # one hole is passed at every look
            shown += follower.poll()
    found = numbers_of(shown)
    assert found == sorted(set(found)) and set(found) <= set(stream)
    assert found[-1] == stream[-1]
    if not any(over):
        assert found == stream


# ---- exit codes -------------------------------------------------------------------------------------------------

ENDS = {"completed": 0, "error": 1, "cancelled": 1, "deadline_timeout": 2, "unresponsive": 2, "agent_blocked": 1,
        "spawn_failed": 1, "supervisor_lost": 1, "session_busy": 5}


def ended_job(registry: Any, how: str) -> str:
    job = new_job(registry)
    if how in ("completed", "error"):
        say(registry, job, how)
    else:
        close(registry, job, how)
    return str(job.job_id)


@pytest.mark.parametrize("how", list(ENDS))
def test_the_exit_code_tells_how_a_job_ended(mam: Mam, registry: Any, how: str) -> None:
    """Lost: a script that branches on the exit code; also when the job had ended before the look."""
    job_id = ended_job(registry, how)
    for command in (["watch", job_id], ["watch", job_id, "--json"], ["wait", job_id],
                    ["subscribe", "--job", job_id]):
        mam(*command, check=ENDS[how])


@pytest.mark.parametrize("hows, code", [
    (("completed", "completed"), 0), (("completed", "error"), 1), (("completed", "deadline_timeout"), 2),
    (("deadline_timeout", "unresponsive", "completed"), 2), (("error", "deadline_timeout"), 1),
    (("completed", "cancelled"), 1), (("session_busy",), 5), (("session_busy", "session_busy"), 5),
    (("completed", "session_busy"), 1)])
def test_wait_all_gives_one_code_for_many(mam: Mam, registry: Any, hows: Tuple[str, ...], code: int) -> None:
    """Lost: a failure among many jobs taken for success."""
    job_ids = [ended_job(registry, how) for how in hows]
    result = mam("wait", "--all", *job_ids, check=code)
    assert sorted(line.split()[0] for line in result.stdout.splitlines()) == sorted(job_ids)
    mam("wait", *job_ids, check=code)


def test_wait_any_ends_with_the_first_end(mam: Mam, registry: Any) -> None:
    """Lost: the first of several jobs, because another one still works."""
    slow, fast = new_job(registry), new_job(registry)
    waiting = mam.popen("wait", "--any", slow.job_id, fast.job_id)
    say(registry, slow, "started")
    say(registry, fast, "error", "no")
    result = waiting.wait()
    assert (result.code, result.stdout.split()[0]) == (1, fast.job_id)
    assert registry.job(slow.job_id).status == "running"


def test_wait_names_each_end_as_it_comes_and_gives_up_when_told(mam: Mam, registry: Any) -> None:
    """Lost: knowing which job is through while the others go on; a wait without end."""
    first, second = new_job(registry), new_job(registry)
    waiting = mam.popen("wait", first.job_id, second.job_id, "--timeout", 3)
    say(registry, second, "completed")
    waiting.wait_for(second.job_id)
    result = waiting.wait()
    assert result.code == 2 and first.job_id in result.stderr and second.job_id not in result.stderr
    mam("wait", "no-such-job", check=1)


# ---- subscribe, v4's subscriber ------------------------------------------------------------------------------------

def test_subscribe_says_that_it_listens_and_then_prints_v4s_lines(mam: Mam, registry: Any) -> None:
    """Lost: v4's scripts, which wait for SUBSCRIBED and cut the lines by columns."""
    job = new_job(registry)
    run = mam.popen("subscribe", "--job", job.job_id)
    run.wait_for(f"SUBSCRIBED python/mqtt/jobs/{job.job_id}/events\n")
    say(registry, job, "started", "in  two  columns")
    say(registry, job, "permission_required", "may I?")
    say(registry, job, "completed", "été 世界 😀")
    result = run.wait()
    assert result.code == 0
    lines = result.stdout.splitlines()
    stamps = [event.timestamp for event in registry.events(job.job_id) if event.seq]
    assert lines == [f"SUBSCRIBED python/mqtt/jobs/{job.job_id}/events"] + [
        f"{stamps[0]} job={job.job_id} seq=1 started              in  two  columns",
        f"{stamps[1]} job={job.job_id} seq=2 permission_required  may I?",
        f"{stamps[2]} job={job.job_id} seq=3 completed            été 世界 😀"]


def test_subscribe_without_anything_to_wait_for_exits_2(mam: Mam) -> None:
    """Lost: v4's callers, which take 2 for "nothing there"; no registry, unknown job, no open job."""
    for command in (["subscribe", "--job", "918b0612"], ["subscribe", "--wait-any"]):
        assert mam(*command, check=2).stdout == ""
    with quick(mam.registry_dir) as registry:
        ended_job(registry, "completed")
    for command in (["subscribe", "--job", "918b0612"], ["subscribe", "--wait-any"]):
        result = mam(*command, check=2)
        assert result.stdout == "" and result.stderr.startswith("mam: no ")


def test_a_job_that_ended_before_the_start_is_told_in_full(mam: Mam, registry: Any) -> None:
    """Lost: a result that came before the subscriber."""
    job = new_job(registry)
    say(registry, job, "started")
    say(registry, job, "completed", "early")
    result = mam("subscribe", "--job", job.job_id, check=0)
    assert result.stdout.splitlines()[0].startswith("SUBSCRIBED ") and result.stdout.rstrip().endswith("early")


def test_the_wall_clock_of_a_subscriber_ends_it_and_not_the_job(mam: Mam, registry: Any) -> None:
    """Lost: a script's budget; or the job, closed by somebody who only looked."""
    job = new_job(registry)
    result = mam("subscribe", "--job", job.job_id, "--timeout", 0.5, check=2)
    assert "wall-clock timeout (0.5s)" in result.stderr and job.job_id in result.stderr
    short = new_job(registry, timeout_sec=0.5)
    assert "wall-clock timeout (0.5s)" in mam("subscribe", "--job", short.job_id, check=2).stderr
    assert {registry.job(name.job_id).status for name in (job, short)} == {"pending"}


def test_a_chatty_job_keeps_no_silent_one_alive(mam: Mam, registry: Any) -> None:
    """Lost: the hung one among several jobs, unseen as long as any other talks."""
    silent, chatty = new_job(registry), new_job(registry)
    say(registry, silent, "started")
    say(registry, chatty, "started")
    stop = threading.Event()

    def talk() -> None:
        with quick(mam.registry_dir) as own:
            while not stop.wait(0.1):
                say(own, chatty, "progress")
    thread = threading.Thread(target=talk)
    thread.start()
    try:
        result = mam("subscribe", "--wait-any", "--idle-timeout", 1.5, "--timeout", 60, check=2)
    finally:
        stop.set()
        thread.join()
    assert f"idle timeout (1.5s, no events) for {silent.job_id}" in result.stderr
    assert len(seqs([line for line in result.stdout.splitlines() if chatty.job_id in line])) > 3
    assert registry.job(silent.job_id).status == "running"


def test_a_silent_command_that_lives_is_followed_to_its_end(mam: Mam, registry: Any) -> None:
    """Lost: the end of a long quiet job: its beats are signs of life for a subscriber too, by the job's own clock."""
    mam("delegate", "--agent-session", "exec:x", "--exec", "sleep 3", "--prompt", "p", "--job-id", "J1", "--detach",
        "--heartbeat", 0.2, "--heartbeat-misses", 10, check=0)
    mam("subscribe", "--job", "J1", check=0)


def test_before_the_first_event_idle_waits_for_the_acknowledgement_too(mam: Mam, registry: Any) -> None:
    """Lost: a slow-booting agent given up for dead: T + idle count before its first event."""
    job = new_job(registry)
    began = time.monotonic()
    result = mam("subscribe", "--job", job.job_id, "--ack-timeout", 1, "--idle-timeout", 0.5, check=2)
    assert time.monotonic() - began >= 1.5 and "idle timeout (1.5s" in result.stderr
    own = new_job(registry, ack_timeout_sec=0.5, idle_timeout_sec=0.25)
    assert "idle timeout (0.75s" in mam("subscribe", "--job", own.job_id, check=2).stderr


def test_ack_timeout_0_waits_for_the_first_event_and_counts_from_there(mam: Mam, registry: Any) -> None:
    """Lost: a queue that is served late (0 switches the clock off until the first event, and only until then)."""
    job = new_job(registry)
    run = mam("subscribe", "--job", job.job_id, "--ack-timeout", 0, "--idle-timeout", 0.1, "--timeout", 1, check=2)
    assert "wall-clock" in run.stderr
    say(registry, job, "started")
    run = mam("subscribe", "--job", job.job_id, "--ack-timeout", 0, "--idle-timeout", 0.3, "--timeout", 60, check=2)
    assert "idle timeout (0.3s" in run.stderr


def test_a_bad_clock_is_refused_before_anything_is_promised(mam: Mam, registry: Any) -> None:
    """Lost: a caller that saw SUBSCRIBED and believes somebody listens."""
    job = new_job(registry)
    result = mam("subscribe", "--job", job.job_id, "--ack-timeout", "soon", check=(1, 64))
    assert "--ack-timeout" in result.stderr and result.stdout == ""


def test_expect_retention_warns_and_goes_on(mam: Mam, registry: Any) -> None:
    """Lost: v4's warning that a job thought to be over is not."""
    job = new_job(registry)
    run = mam.popen("subscribe", "--job", job.job_id, "--expect-retention")
    run.wait_for("--expect-retention", stream="stderr")
    assert job.job_id in run.stderr
    say(registry, job, "completed")
    assert run.wait().code == 0
    assert "--expect-retention" not in mam("subscribe", "--job", job.job_id, "--expect-retention", check=0).stderr


def two_attempts(registry: Any) -> Tuple[Any, str, str]:
    """(a job at attempt 2, running; the token of attempt 1, that of attempt 2)."""
    job = new_job(registry)
    say(registry, job, "error", "old")
    close(registry, job, "redispatch")
    say(registry, job, "started", "new")
    return job, job.dispatch_token, registry.job(job.job_id).dispatch_token


@pytest.mark.parametrize("by", ["token", "attempt"])
def test_a_subscriber_to_one_attempt_sees_no_other(mam: Mam, registry: Any, by: str) -> None:
    """Lost: fencing: an old attempt's failure taken for the new one's."""
    job, _, token = two_attempts(registry)
    flags = ["--expect-dispatch-token", token] if by == "token" else ["--attempt-id", 2]
    run = mam.popen("subscribe", "--job", job.job_id, *flags)
    run.wait_for(" new")
    say(registry, job, "completed", "newer")
    result = run.wait()
    assert result.code == 0 and seqs(result.stdout.splitlines()) == [2, 3]


def test_an_attempt_that_is_still_to_come_is_waited_for(mam: Mam, registry: Any) -> None:
    """Lost: the result of the next attempt: the end of an older one ends no wait for it (as in v4)."""
    job = new_job(registry)
    say(registry, job, "error", "old")
    run = mam.popen("subscribe", "--job", job.job_id, "--attempt-id", 2, "--timeout", 60)
    run.wait_for("SUBSCRIBED")
    assert "idle timeout" in mam("subscribe", "--job", job.job_id, "--attempt-id", 2, "--idle-timeout", 0.2,
                                 "--ack-timeout", 0.2, check=2).stderr
    close(registry, job, "redispatch")
    say(registry, job, "completed", "new")
    result = run.wait()
    assert result.code == 0 and seqs(result.stdout.splitlines()) == [2]


def test_an_end_under_another_token_does_not_count(mam: Mam, registry: Any) -> None:
    """Lost: fencing: the caller of a token is told "completed" by an attempt that is not its own (as in v4)."""
    job, old, _ = two_attempts(registry)
    say(registry, job, "completed")
    for token in (old, "wrong"):
        result = mam("subscribe", "--job", job.job_id, "--expect-dispatch-token", token, "--timeout", 0.5, check=2)
        assert "completed" not in result.stdout


# ---- thousands -------------------------------------------------------------------------------------------------------

def test_two_thousand_open_jobs_in_one_follower(mam: Mam, registry: Any, record_property: Callable[..., None]) -> None:
    """Lost: one overview of a big workspace; a job registered later is not part of it. Costs are recorded."""
    jobs = [new_job(registry, job_id=f"m{n}") for n in range(2000)]
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    run = mam.popen("subscribe", "--wait-any", "--timeout", 100)
    run.wait_for("SUBSCRIBED python/mqtt/jobs/m1999/events", 60)
    subscribed = time.monotonic()
    later = new_job(registry, job_id="later")
    say(registry, later, "started", "of the later one")
    for job in jobs:
        say(registry, job, "completed")
    reported = time.monotonic()
    result = run.wait(100)
    ended, after = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 4000 and "later" not in result.stdout
    assert {line.split()[1] for line in lines[2000:]} == {f"job=m{n}" for n in range(2000)}
    assert registry.job("later").status == "running"
    for name, value in (("until_subscribed_s", subscribed - began), ("reporting_s", reported - subscribed),
                        ("from_the_last_report_to_the_exit_s", ended - reported),
                        ("follower_cpu_s", after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)):
        record_property(name, round(value, 2))
        print(f"2,000 jobs: {name} {value:.2f}")


# ---- closed stdout, removed registry, what is imported ---------------------------------------------------------------

@pytest.mark.parametrize("command", ["watch", "subscribe --job", "wait"])
def test_a_reader_that_leaves_causes_no_traceback(mam: Mam, registry: Any, command: str) -> None:
    """Lost: a clean terminal after `| head -1`."""
    job = new_job(registry)
    for _ in range(3):
        say(registry, job, "progress", "x" * 4000)
    shell = " ".join(f"'{word}'" for word in mam.argv(*command.split(), job.job_id))
    run = subprocess.Popen(["sh", "-c", f"({shell}; echo exit $? >&2) | head -1"], env=mam.environment(),
                           cwd=str(mam.workspace), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if command == "wait":
        say(registry, job, "completed")
    else:
        def keep_talking() -> bool:
            say(registry, job, "progress", "x" * 4000)
            return run.poll() is not None
        poll(keep_talking, 30, "the end of a follower nobody reads")
    out, err = run.communicate(timeout=30)
    assert out.count(b"\n") == 1
    assert b"Traceback" not in err and b"Exception" not in err and b"BrokenPipe" not in err, err
    assert b"exit 0" in err if command == "wait" else b"exit 141" in err, err


@pytest.mark.parametrize("command", [["watch", "J"], ["wait", "J"], ["subscribe", "--job", "J"]])
def test_a_registry_removed_under_a_follower_is_said(mam: Mam, registry: Any, command: List[str]) -> None:
    """Lost: a follower that waits for ever for a job that no longer exists anywhere."""
    mam.without_daemon()        # it would write into the folder while it is being removed
    job = new_job(registry)
    say(registry, job, "started")
    words = [job.job_id if word == "J" else word for word in command]
    if command[0] == "wait":
        words.append(ended_job(registry, "completed"))      # its line shows that the follower looks
    run = mam.popen(*words)
    run.wait_for(" completed" if command[0] == "wait" else " started ")
    shutil.rmtree(mam.registry_dir)
    result = run.wait(20)
    assert result.code == 75 and result.stderr.startswith("mam: the registry"), result


def test_a_removed_registry_is_said_in_one_way_whoever_notices(mam: Mam, registry: Any) -> None:
    """Lost: exit 75 for it: the look after jobs that were left alone must not take it for a wrong --registry-dir."""
    job = new_job(registry)
    follower = core.Follower(registry, [job.job_id])
    own = core.Settings({}, None, str(mam.workspace), str(mam.registry_dir), str(mam.home))
    tick = core._caretaker(own)
    shutil.rmtree(mam.registry_dir)

    def look() -> bool:
        tick()
        follower.poll()
        return False
    with pytest.raises(core.MamError) as caught:
        poll(look, 10)
    assert (caught.value.exit, caught.value.code) == (75, "registry_gone")


@pytest.mark.parametrize("command", [["watch", "J"], ["wait", "J"], ["subscribe", "--job", "J"]])
def test_followers_need_no_mqtt_library(mam: Mam, registry: Any, command: List[str]) -> None:
    """Lost: a fast start, and following on a host where nothing but the registry works."""
    job_id = ended_job(registry, "completed")
    result = mam(*[job_id if word == "J" else word for word in command], check=0,
                 env={"PYTHONPROFILEIMPORTTIME": "1", "MQTT_BROKER": "127.0.0.1", "MQTT_PORT": "1"})
    modules = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines() if line.startswith("import time")}
    assert "sqlite3" in modules
    assert not {name for name in modules if name.split(".")[0] in ("paho", "ssl")}


def test_whoever_only_looks_closes_nothing(mam: Mam, registry: Any) -> None:
    """Lost: a job, because somebody watched it: watch, wait and subscribe leave it open past all its clocks."""
    mam.without_daemon()        # only the daemon closes jobs
    job = new_job(registry, timeout_sec=0.2, idle_timeout_sec=0.2, ack_timeout_sec=0.2)
    say(registry, job, "started")
    watching, waiting = mam.popen("watch", job.job_id), mam.popen("wait", job.job_id)
    watching.wait_for(" started ")
    mam("subscribe", "--job", job.job_id, "--timeout", 3, "--idle-timeout", 60, check=2)    # the clock of this test
    assert watching.code is None and waiting.code is None
    assert registry.job(job.job_id).status == "running"
    say(registry, job, "completed")
    assert (watching.wait().code, waiting.wait().code) == (0, 0)


# ---- content -------------------------------------------------------------------------------------------------------

def test_a_result_of_64_kib_in_any_script_arrives_whole(mam: Mam, registry: Any) -> None:
    """Lost: the end of a long result, or its accents; the line stays one line, the JSON has all of it."""
    text = ("é世界😀ß " * 8192).encode()[:64 * 1024].decode("utf-8", "ignore").strip()
    job = new_job(registry)
    mam("publish", "--job", job.job_id, "--event", "completed", "--detail-file", "-", input=text, check=0)
    lines = mam("watch", job.job_id, check=0).stdout.splitlines()
    detail = lines[0].split("completed            ", 1)[1]
    assert len(lines) == 1 and detail.endswith("…") and text.startswith(detail[:-1])
    assert len(detail.encode()) <= 4096
    event, = mam("watch", job.job_id, "--json", check=0).ndjson()
    assert event["data"]["feedback"] == text and event["detail"] == detail
    assert mam("get-feedback", job.job_id, check=0).stdout == text + "\n"


def test_json_lines_are_the_signed_events_of_the_wire(mam: Mam, mosquitto: Any,
                                                      observe: Callable[..., Observer]) -> None:
    """Lost: one truth: what `--json` prints is, once signed with the job's key, byte for byte what travelled."""
    mam.env.update(mosquitto.env())
    job_id = mam("register", "--prompt", "p", "--agent-session", "queue:q", check=0).stdout.strip()
    seen = observe(mosquitto, f"python/mqtt/jobs/{job_id}/events")
    mam("publish", "--job", job_id, "--event", "started", check=0)
    mam("publish", "--job", job_id, "--event", "progress", "--detail", "é 😀 \\ \" /", "--data",
        '{"n": 1e21, "z": {"b": [1, 2.5], "a": null}, "é": "\\u0007"}', check=0)
    mam("publish", "--job", job_id, "--event", "completed", check=0)
    key = mam("get", job_id, "--show-secrets", check=0).json()["auth_token"]
    for command in (["watch", job_id, "--json"], ["subscribe", "--job", job_id, "--json"]):
        result: Result = mam(*command, check=0)
        payloads = [json.loads(line) for line in result.stdout.splitlines() if not line.startswith("SUBSCRIBED")]
        assert [payload["seq"] for payload in payloads] == [1, 2, 3]
        poll(lambda: len({message.payload for message in seen.messages()}) >= 3, 10, "three events on the wire")
        # Twice is as good as once: a publisher and the daemon it starts may both send the first.
        travelled = list(dict.fromkeys(message.payload for message in seen.messages()))
        assert [core.sign(payload, key) for payload in payloads] == travelled
        for payload in payloads:
            core.verify(json.loads(core.sign(payload, key)), key)
            assert "hmac_sig" not in payload["data"]


def test_json_of_wait_is_one_object_per_end(mam: Mam, registry: Any) -> None:
    """Lost: a program that reads the ends of many jobs."""
    hows: Dict[str, Optional[str]] = {ended_job(registry, "completed"): None,
                                      ended_job(registry, "unresponsive"): "unresponsive"}
    rows = mam("wait", *hows, "--json", check=2).ndjson()
    assert {row["job_id"]: row["reason"] for row in rows} == hows

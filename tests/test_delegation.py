"""delegate: from a prompt to a certain end, whoever dies on the way; and the prompt handed over exactly once."""
from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

from support import ROOT, poll
from support.cli import Background, Mam, Result, Tmux
from support.observer import Observer, retained

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
core: Any = importlib.import_module("mam")

HEADER = "Job %s, attempt 1, from mam."


@pytest.fixture(autouse=True)
def quick_ends(mam: Mam) -> None:
    mam.env.update(MAM_TERM_GRACE_S="0.3", MAM_LINGER_S="0.5")


@pytest.fixture
def registry(mam: Mam) -> Iterator[Any]:
    with core.Registry(str(mam.registry_dir), create=True) as opened:
        yield opened


def delegate_words(command: str, *more: object) -> List[object]:
    return ["delegate", "--agent-session", "exec:x", "--exec", command, "--prompt", "p", *more]


def delegate(mam: Mam, command: str, *more: object, check: Any = None) -> Result:
    return mam(*delegate_words(command, *more), check=check)


def job_of(result: Result) -> str:
    """The id of a delegated job, from its result line."""
    return result.stdout.splitlines()[-1].split("job=")[1].split()[0]


def wait_for(registry: Any, job_id: str, wanted: Callable[[Any], Any], timeout: float = 20) -> Any:
    """The job, once it is there and `wanted` is true of it."""
    last: List[Any] = [None]

    def reached() -> bool:
        last[:] = registry.jobs_by_id([job_id]) or [None]
        return last[0] is not None and bool(wanted(last[0]))
    poll(reached, timeout, lambda: f"job {job_id}, last seen {last[0]}", interval=0.02)
    return last[0]


def events_of(registry: Any, job_id: str) -> List[Dict[str, Any]]:
    """The payloads of a job's numbered events."""
    return [json.loads(event.payload) for event in registry.events(job_id) if event.seq is not None]


def names_of(registry: Any, job_id: str) -> List[str]:
    return [event["event"] for event in events_of(registry, job_id)]


def runs(mam: Mam, name: str = "ran") -> int:
    path = mam.workspace / name
    return len(path.read_text().splitlines()) if path.exists() else 0


# ---- exec ----------------------------------------------------------------------------------------------------

def test_a_command_from_prompt_to_result(mam: Mam, registry: Any) -> None:
    """Lost: the main job: events as they come, one result line, the exit code."""
    result = delegate(mam, '$MAM_PUBLISH_CMD --event progress --detail half; cat "$MAM_JOB_BRIEF"; echo; echo whole',
                      check=0)
    lines = result.stdout.splitlines()
    assert [line.split()[3] for line in lines[:-1]] == ["started", "progress", "completed"]
    assert lines[-1].startswith(f"RESULT job={job_of(result)} completed after ") and lines[-1].endswith(": whole")
    failed = delegate(mam, "echo no; exit 3", check=1)
    assert failed.stdout.splitlines()[-1].endswith("exit status 3: no")


def test_json_is_a_stream_that_ends_with_the_result(mam: Mam) -> None:
    """Lost: a program that delegates and reads what became of it."""
    rows = delegate(mam, "echo done", "--json", check=0).ndjson()
    assert [row.get("event") for row in rows] == ["started", "completed", None]
    assert rows[-1]["result"]["status"] == "completed" and rows[-1]["result"]["detail"] == "done"


def test_a_detached_job_is_carried_to_its_end_by_nobody_at_a_terminal(mam: Mam, registry: Any) -> None:
    """Lost: the id on stdout, alone; and the work and its settlement after the shell has gone."""
    result = delegate(mam, "while [ ! -f go ]; do sleep 0.02; done; echo made > made; echo done", "--detach",
                      "--artifact", "made", "--validate", "grep -q made made", check=0)
    job_id = result.stdout.strip()
    assert core.is_name(job_id) and result.stdout == job_id + "\n"
    wait_for(registry, job_id, lambda job: job.status == "running")
    (mam.workspace / "go").touch()
    job = wait_for(registry, job_id, lambda job: job.status != "running")
    assert (job.status, job.detail) == ("completed", "done")
    assert delegate(mam, "true", "--detach", "--json", check=0).json().keys() == {"job_id"}


@pytest.mark.parametrize("words, code, reason", [
    (["sleep 60", "--timeout", 0.5], 2, "deadline_timeout"),
    (["no-such-program-anywhere"], 1, "spawn_failed"),
    (["exit 4"], 1, None)])
@pytest.mark.parametrize("detached", [False, True])
def test_every_way_to_fail_is_an_end(mam: Mam, registry: Any, words: List[Any], code: int, reason: Any,
                                     detached: bool) -> None:
    """Lost: certainty: a job that stays running for ever, followed or not."""
    result = delegate(mam, *words, "--job-id", "J1", *(["--detach"] if detached else []),
                      check=0 if detached else code)
    job = wait_for(registry, "J1", lambda job: job.status == "error")
    assert (job.reason, core.exit_of(job)) == (reason, code)
    assert detached or result.stdout.splitlines()[-1].startswith("RESULT job=J1 error")


def test_a_cancelled_job_ends_its_delegator(mam: Mam, registry: Any) -> None:
    """Lost: a delegator that goes on waiting for what somebody ended."""
    run = mam.popen(*delegate_words("exec sleep 300", "--job-id", "J1"))
    wait_for(registry, "J1", lambda job: job.status == "running")
    mam("cancel", "J1", "--detail", "no longer needed", check=0)
    result = run.wait(20)
    assert result.code == 1 and result.stdout.splitlines()[-1].endswith(": no longer needed")


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("cancel", [False, True])
def test_a_delegator_that_is_ended_leaves_the_work_or_cancels_it(mam: Mam, registry: Any, number: int, code: int,
                                                                 cancel: bool) -> None:
    """Lost: running work, to a Ctrl-C; or, with --cancel-on-exit, the wish that it ends."""
    run = mam.popen(*delegate_words("echo x >> ran; while [ ! -f go ]; do sleep 0.02; done; echo done",
                                    "--job-id", "J1", *(["--cancel-on-exit"] if cancel else [])))
    run.wait_for(" started ")
    group = json.loads(registry.job("J1").run)["group"]
    run.send_signal(number)
    assert run.wait(20).code == code
    if cancel:
        assert registry.job("J1").status == "cancelled" and not core.group_members(group)
        return
    assert registry.job("J1").status == "running" and "goes on" in run.stderr
    (mam.workspace / "go").touch()
    assert mam("wait", "J1", check=0).stdout == "J1 completed\n" and runs(mam) == 1


def test_a_delegator_whose_reader_leaves_leaves_the_work(mam: Mam, registry: Any) -> None:
    """Lost: the job, to a `| head -1`."""
    shell = " ".join(shlex.quote(word) for word in mam.argv(*delegate_words(
        "while [ ! -f go ]; do sleep 0.02; done; $MAM_PUBLISH_CMD --event progress; echo done", "--job-id", "J1")))
    run = mam.stub("piped", f"#!/bin/sh\n({shell}; echo $? > code) | head -1\n")
    piped = subprocess.Popen([str(run)], env=mam.environment(), cwd=str(mam.workspace), stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
    assert piped.stdout is not None
    assert b" started " in piped.stdout.readline()
    (mam.workspace / "go").touch()
    _, err = piped.communicate(timeout=30)
    assert (mam.workspace / "code").read_text() == "141\n" and b"Traceback" not in err
    wait_for(registry, "J1", lambda job: job.status == "completed")


# ---- the prompt ----------------------------------------------------------------------------------------------

def test_the_prompt_by_argument_file_and_stdin_is_the_same(mam: Mam, registry: Any) -> None:
    """Lost: a character of the prompt by one of its three ways."""
    text = "!first\r\nsecond \u202e\u2028 😀 'q' \\ $HOME `id`\n"
    (mam.workspace / "brief.md").write_bytes(text.encode())
    for words, given in ((["--prompt", text], None), (["--prompt-file", "brief.md"], None),
                         (["--prompt-file", "-"], text)):
        name = "J" + uuid.uuid4().hex[:6]
        mam("delegate", "--agent-session", "exec:x", "--exec", f"cat > {name}", "--stdin", "--job-id", name, *words,
            input=given, check=0)
        assert (mam.workspace / name).read_bytes() == text.encode()
        assert registry.prompt(name) == text
        brief = mam.registry_dir / "briefs" / f"{name}.a1.md"
        assert brief.read_bytes() == text.encode() and brief.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content, said", [
    (b"caf\xe9 au lait", "not UTF-8 at byte 3"), (b"\xed\xa0\x80", "not UTF-8"), (b"", "empty"), (b" \n\t", "empty"),
    (b"x" * (4 * 1024 * 1024 + 1), "larger than"), (None, "cannot read")])
@pytest.mark.parametrize("way", ["file", "stdin"])
def test_a_prompt_that_cannot_be_used_is_refused_before_anything_is_registered(mam: Mam, content: Any, said: str,
                                                                             way: str) -> None:
    """Lost: a job with half a prompt, or a record of none."""
    if content is None and way == "stdin":
        content = b""
        said = "empty"
    if content is not None:
        (mam.workspace / "brief.md").write_bytes(content)
    result = mam("delegate", "--agent-session", "exec:x", "--exec", "echo x >> ran", "--prompt-file",
                 "-" if way == "stdin" else "brief.md", input=content if way == "stdin" else None, check=64)
    assert said in result.stderr and result.stderr.startswith("mam: ") and result.stdout == ""
    assert not mam.registry_dir.exists() and runs(mam) == 0


@pytest.mark.parametrize("words, code, said", [
    (["--agent-session", "exec:x"], 64, "needs a command"),
    (["--agent-session", "queue:x", "--exec", "true"], 64, "--exec goes with"),
    (["--agent-session", "nowhere"], 1, "is not a session"),
    (["--agent-session", "remote:x"], 1, "MAM_DISPATCH_SECRET is not set"),
    (["--agent-session", "herdr:x"], 1, "no program herdr"),
    (["--agent-session", "exec:x", "--exec", "true", "--workdir", "missing"], 1, "no such folder"),
    (["--agent-session", "exec:x", "--exec", "true", "--artifact", "../outside"], 1, "inside the workdir"),
    (["--agent-session", "exec:x", "--exec", "true", "--artifact", "/etc/passwd"], 1, "inside the workdir"),
    (["--agent-session", "exec:x", "--exec", "true", "--artifact", "a/../../b"], 1, "inside the workdir"),
    (["--agent-session", "exec:x", "--exec", "true", "--artifact", ""], 1, "inside the workdir"),
    (["--agent-session", "exec:x", "--exec", "true", "--job-id", "../x"], 1, "not a job id"),
    (["--agent-session", "exec:x", "--exec", "true", "--timeout", "0"], 64, "--timeout"),
    (["--agent-session", "exec:x", "--exec", "true", "--prompt", " \n"], 64, "empty"),
    (["--agent-session", "exec:x", "--exec", "true", "--prompt", "caf\udce9"], 64, "not UTF-8"),
    (["--agent-session", "exec:x", "--exec", "true", "--prompt-file", "x"], 64, "not allowed with")])
def test_what_cannot_work_is_refused_before_anything_is_registered(mam: Mam, words: List[str], code: int,
                                                                  said: str) -> None:
    """Lost: a clean registry, and a message that names the mistake."""
    result = mam("delegate", "--prompt", "p", *words, check=code)
    assert said in result.stderr and not mam.registry_dir.exists()


def test_two_delegations_of_one_id_at_once_one_wins(mam: Mam, registry: Any) -> None:
    """Lost: one job run twice, or two prompts under one name."""
    both = [mam.popen(*delegate_words("echo x >> ran; echo done", "--job-id", "J1")) for _ in range(4)]
    codes = sorted(run.wait(30).code for run in both)
    assert codes == [0, 1, 1, 1] and runs(mam) == 1
    assert sum("job already exists: J1" in run.stderr for run in both) == 3
    assert names_of(registry, "J1") == ["started", "completed"]


def test_twenty_delegations_at_once_all_end(mam: Mam, registry: Any) -> None:
    """Lost: one of many, while the registry is busy."""
    many = [mam.popen(*delegate_words(f"echo x >> ran{n}; echo r{n}", "--job-id", f"J{n}")) for n in range(20)]
    for number, run in enumerate(many):
        result = run.wait(60)
        assert result.code == 0 and result.stdout.splitlines()[-1].endswith(f": r{number}"), result
        assert runs(mam, f"ran{number}") == 1 and names_of(registry, f"J{number}") == ["started", "completed"]


# ---- artifacts and validation --------------------------------------------------------------------------------

def test_artifacts_are_described_where_the_work_was_done(mam: Mam, registry: Any) -> None:
    """Lost: knowing what was made: name, size and sum; an absolute path inside the workdir counts too."""
    (mam.workspace / "work").mkdir()
    result = delegate(mam, "mkdir -p out; printf report > out/report.md; : > empty; echo done", "--workdir", "work",
                      "--artifact", "out/report.md", "--artifact", mam.workspace / "work" / "empty",
                      "--artifact", "out", check=0)
    first, last = events_of(registry, job_of(result))[-2:]
    assert first["data"]["settles"] is False and "settles" not in last["data"]
    assert last["data"]["artifacts"] == [
        {"name": "out/report.md", "size": 6, "sha256": hashlib.sha256(b"report").hexdigest()},
        {"name": "empty", "size": 0, "sha256": hashlib.sha256(b"").hexdigest()}, {"name": "out", "folder": True}]
    assert result.stdout.splitlines()[-1].endswith(": done")


def test_a_missing_artifact_is_an_error_whatever_the_agent_said(mam: Mam, registry: Any) -> None:
    """Lost: a `completed` believed without its result."""
    result = delegate(mam, "$MAM_PUBLISH_CMD --event completed; touch there", "--artifact", "there", "--artifact",
                      "missing.md", "--validate", "echo x >> ran", check=1)
    job = registry.job(job_of(result))
    assert (job.status, job.reason) == ("error", "artifact_missing") and "missing.md" in job.detail
    assert names_of(registry, job.job_id) == ["started", "completed", "error"] and runs(mam) == 0


def test_an_artifact_written_while_tidying_up_counts(mam: Mam) -> None:
    """Lost: a file that is written after the agent's last word: it is looked for after the command has exited."""
    mam.env["MAM_LINGER_S"] = "30"
    delegate(mam, "$MAM_PUBLISH_CMD --event completed; sleep 0.3; echo late > late.md", "--artifact", "late.md",
             check=0)


@pytest.mark.parametrize("validation, code, reason, detail", [
    ("test -f made && echo $MAM_JOB_ID > validated", 0, None, "done"),
    ("echo tests run; echo 3 failed >&2; exit 9", 1, "validation_failed",
     "validation failed (exit status 9): 3 failed"),
    ("no-such-program-anywhere", 1, "validation_failed", None)])
def test_a_validation_decides(mam: Mam, registry: Any, validation: str, code: int, reason: Any, detail: Any) -> None:
    """Lost: the check that was asked for: it runs in the workdir after the work, and its failure is the job's."""
    result = delegate(mam, "touch made; echo done", "--validate", validation, "--job-id", "J1", check=code)
    job = registry.job("J1")
    assert (job.reason, job.phase) == (reason, None)
    assert detail is None or (job.detail == detail and result.stdout.splitlines()[-1].endswith(": " + detail))
    events = events_of(registry, "J1")
    assert [event["data"].get("settles") for event in events] == [None, False, None]
    if code == 0:
        assert (mam.workspace / "validated").read_text() == "J1\n"


@pytest.mark.parametrize("detached", [False, True])
def test_a_validation_past_the_wall_clock_is_a_timeout(mam: Mam, registry: Any, detached: bool) -> None:
    """Lost: exit 2 for "no time left", which must not depend on who happens to follow."""
    delegate(mam, "echo done", "--validate", "exec sleep 300", "--timeout", 2, "--job-id", "J1",
             *(["--detach"] if detached else []), check=0 if detached else 2)
    job = wait_for(registry, "J1", lambda job: job.status == "error")
    assert (job.reason, core.exit_of(job)) == ("deadline_timeout", 2)


GATE = "echo $$ > validating; while [ ! -f go ]; do sleep 0.02; done"


def validating(mam: Mam, registry: Any, *more: object) -> Any:
    """A detached job whose validation runs until a file `go` is there."""
    delegate(mam, "echo x >> ran; echo done", "--validate", GATE, "--job-id", "J1", "--detach", *more, check=0)
    poll(lambda: (mam.workspace / "validating").exists() and (mam.workspace / "validating").read_text().strip(), 20,
         "the validation")
    return wait_for(registry, "J1", lambda job: job.phase == "validating")


def test_a_job_that_is_being_validated_says_so(mam: Mam, registry: Any) -> None:
    """Lost: the difference between working and being checked, in every list."""
    job = validating(mam, registry)
    assert (job.status, job.outcome) == ("running", "completed")
    assert mam.job("J1")["phase"] == "validating" and mam.job("J1")["status"] == "running"
    assert "validating" in mam("list", check=0).stdout and "validating" in mam(check=0).stdout
    waiting = mam.popen("wait", "J1")
    again = mam("publish", "--job", "J1", "--event", "completed", "--detail", "twice", check=0)
    assert "being checked" in again.stderr
    refused = mam("publish", "--job", "J1", "--event", "progress", "--detail", "more", check=4)
    assert "leave your work in place" in refused.stderr
    assert waiting.code is None
    (mam.workspace / "go").touch()
    assert waiting.wait(20).code == 0
    assert names_of(registry, "J1") == ["started", "completed", "completed"]
    late = [event.detail for event in registry.events("J1") if event.event == "late"]
    assert late == ["twice", "more"]


def test_a_job_cancelled_while_it_is_validated_is_cancelled(mam: Mam, registry: Any) -> None:
    """Lost: cancel, during the longest part of some jobs; and a validation that runs on for nothing."""
    validating(mam, registry)
    checking = int((mam.workspace / "validating").read_text())
    mam("cancel", "J1", check=0)
    poll(lambda: core.identity_of(checking) is None, 10, "the end of the validation")
    assert registry.job("J1").status == "cancelled"
    assert names_of(registry, "J1") == ["started", "completed", "error"]


@pytest.mark.parametrize("follower", [["wait", "J1"], ["watch", "J1"], ["subscribe", "--job", "J1"]])
def test_a_killed_validator_is_replaced_by_whoever_follows_and_settles_once(mam: Mam, registry: Any,
                                                                          follower: List[str]) -> None:
    """Lost: the job, left `validating` for ever by a kill -9."""
    job = validating(mam, registry)
    os.kill(json.loads(job.supervisor)["who"]["pid"], signal.SIGKILL)
    run = mam.popen(*follower)
    wait_for(registry, "J1", lambda now: now.supervisor != job.supervisor)
    (mam.workspace / "go").touch()
    assert run.wait(20).code == 0
    assert names_of(registry, "J1") == ["started", "completed", "completed"] and runs(mam) == 1


def test_work_whose_supervisor_was_killed_is_ended_before_it_is_validated(mam: Mam, registry: Any) -> None:
    """Lost: a validation of files that stand still: the agent had said `completed` and was still at it."""
    mam.env["MAM_LINGER_S"] = "60"
    delegate(mam, "$MAM_PUBLISH_CMD --event completed; while :; do echo x >> log; sleep 0.02; done", "--validate",
             "before=$(wc -c < log); sleep 0.5; [ $before = $(wc -c < log) ]", "--job-id", "J1", "--detach", check=0)
    job = wait_for(registry, "J1", lambda job: job.phase == "validating")
    os.kill(json.loads(job.run)["supervisor"]["pid"], signal.SIGKILL)
    mam("wait", "J1", check=0)


# ---- a delegator killed at any moment ------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(4))
def test_a_delegator_killed_at_any_moment_leaves_a_job_that_ends(mam: Mam, registry: Any, seed: int) -> None:
    """Lost: consistency: whenever the delegator dies, the command runs once at most, and the end is recorded."""
    moments = random.Random(seed)
    delegate(mam, "true", check=0)
    began = time.monotonic()
    delegate(mam, "true", check=0)
    usual = time.monotonic() - began
    for number in range(5):
        job_id = f"J{number}"
        run = mam.popen(*delegate_words(f"echo x >> ran{number}; echo done", "--job-id", job_id, "--ack-timeout", 2))
        time.sleep(moments.uniform(0.2, 1.0) * usual)       # the moment of the fault, not a condition
        run.send_signal(signal.SIGKILL)
        run.process.wait(20)
        known = registry.jobs_by_id([job_id])
        result = mam("wait", job_id, "--timeout", 30)
        if not known:
            assert result.code == 1 and "no job" in result.stderr and runs(mam, f"ran{number}") == 0
            continue
        job = registry.job(job_id)
        assert job.status in core.TERMINAL_STATUSES and result.code == core.exit_of(job), (result, job)
        if job.status == "completed":
            assert runs(mam, f"ran{number}") == 1 and names_of(registry, job_id) == ["started", "completed"]
        else:                       # killed between "on its way" and the start: never handed over a second time
            assert job.reason == "agent_blocked" and runs(mam, f"ran{number}") <= 1
        numbers = [event["seq"] for event in events_of(registry, job_id)]
        assert numbers == list(range(1, len(numbers) + 1)) and job.last_seq == len(numbers)
    assert registry._execute("PRAGMA integrity_check") == [("ok",)]


def test_a_job_whose_delegator_died_before_the_delivery_is_delivered_by_a_follower(mam: Mam, registry: Any) -> None:
    """Lost: a registered job that nobody ever starts."""
    dead = core.compact_json({"role": "delegate", "who": {**core.identity_of(os.getpid()), "start": "1"}})
    registry.register({
        "job_id": "J1", "title": "t", "agent": "a", "agent_session": "exec:x", "role": "Worker",
        "topic_prefix": "python/mqtt/jobs/J1", "timeout_sec": 60, "idle_timeout_sec": 60, "heartbeat_sec": 30,
        "heartbeat_misses": 4, "ack_timeout_sec": 60, "expected_artifacts": "[]", "job_type": "direct",
        "max_iterations": 5, "attempt_id": 1, "transport": "local", "workdir": str(mam.workspace), "prompt": "p",
        "command": "echo x >> ran; echo done", "supervisor": dead})
    followers = [mam.popen("wait", "J1") for _ in range(4)]
    assert [follower.wait(20).code for follower in followers] == [0] * 4
    assert runs(mam) == 1


# ---- redispatch ----------------------------------------------------------------------------------------------

SLOW_TO_GO = ("echo start$MAM_ATTEMPT_ID >> log; [ $MAM_ATTEMPT_ID = 1 ] || exit 0; "
              "trap 'sleep 0.5; echo end$MAM_ATTEMPT_ID >> log; exit 0' TERM; while :; do sleep 0.02; done")


@pytest.mark.parametrize("detached", [False, True])
def test_the_old_command_has_gone_before_the_new_one_begins(mam: Mam, registry: Any, detached: bool) -> None:
    """Lost: two attempts at work in one folder at once; whoever keeps the job meanwhile."""
    mam.env["MAM_TERM_GRACE_S"] = "20"
    run = mam.popen(*delegate_words(SLOW_TO_GO, "--job-id", "J1", *(["--detach"] if detached else [])))
    poll(lambda: (mam.workspace / "log").exists(), 20, "the first attempt")
    wait_for(registry, "J1", lambda job: job.status == "running")
    result = mam("redispatch", "J1", "--force", "--follow", check=0)
    assert (mam.workspace / "log").read_text().split() == ["start1", "end1", "start2"]
    assert [line.split()[2] for line in result.stdout.splitlines()[:-1]] == ["seq=2", "seq=3"]
    assert run.wait(20).code == 0
    assert registry.job("J1").attempt_id == 2 and registry.job("J1").status == "completed"


def test_a_stale_worker_is_told_and_its_work_is_kept(mam: Mam, registry: Any) -> None:
    """Lost: late work, dropped in silence; or an old attempt's word taken for the new one's."""
    delegate(mam, "echo $MAM_DISPATCH_TOKEN > token; exit 1", "--job-id", "J1", check=1)
    token = (mam.workspace / "token").read_text().strip()
    mam("redispatch", "J1", "--no-deliver", check=0)
    for flags, env in ((["--attempt-id", 1], {}), (["--expect-dispatch-token", token], {}), ([], {}),
                       ([], {"MAM_JOB_ID": "J1", "MAM_ATTEMPT_ID": "1", "MAM_DISPATCH_TOKEN": token})):
        result = mam("publish", "--job", "J1", "--event", "completed", "--detail", "late work", *flags, env=dict(env),
                     check=4)
        assert "leave your work in place" in result.stderr and "attempt 2" in result.stderr
    late = [event.detail for event in registry.events("J1") if event.event == "late"]
    assert late == ["late work"] * 4 and registry.job("J1").status == "pending"


def test_an_attempt_that_was_only_opened_is_not_started_by_the_keeper(mam: Mam, registry: Any) -> None:
    """Lost: --no-deliver: the attempt starts all the same, because somebody still keeps the job."""
    delegate(mam, "echo x >> ran; while [ ! -f go ]; do sleep 0.02; done", "--job-id", "J1", "--detach", check=0)
    wait_for(registry, "J1", lambda job: job.status == "running")
    mam("redispatch", "J1", "--force", "--no-deliver", check=0)
    mam("wait", "J1", "--timeout", 1.5, check=2)
    assert registry.job("J1").status == "pending" and runs(mam) == 1


def test_a_running_job_is_redispatched_only_when_asked_twice(mam: Mam, registry: Any) -> None:
    """Lost: running work, to a redispatch by mistake."""
    delegate(mam, "exec sleep 300", "--job-id", "J1", "--detach", check=0)
    wait_for(registry, "J1", lambda job: job.status == "running")
    assert "--force" in mam("redispatch", "J1", check=4).stderr
    assert registry.job("J1").attempt_id == 1
    mam("cancel", "J1", check=0)


def test_a_redispatch_may_bring_a_better_prompt(mam: Mam, registry: Any) -> None:
    """Lost: the new prompt, or the old brief as evidence."""
    delegate(mam, 'cat "$MAM_JOB_BRIEF"; exit $((2 - MAM_ATTEMPT_ID))', "--job-id", "J1", check=1)
    result = mam("redispatch", "J1", "--prompt", "better", "--follow", check=0)
    assert result.stdout.splitlines()[-1].endswith(": better")
    assert [(mam.registry_dir / "briefs" / f"J1.a{n}.md").read_text() for n in (1, 2)] == ["p", "better"]


# ---- queue ---------------------------------------------------------------------------------------------------

def test_two_agents_take_a_queue_in_order_and_no_job_twice(mam: Mam, registry: Any) -> None:
    """Lost: a job taken by two agents, or by none; the oldest first; exit 3 when there is nothing."""
    assert mam("pick", "--agent-session", "queue:q", check=3).stdout == ""
    for number in range(6):
        mam("delegate", "--agent-session", "queue:q", "--prompt", f"p{number}", "--job-id", f"J{number}", "--detach",
            check=0)
    first = mam("pick", "--agent-session", "queue:q", "--json", check=0).json()
    assert first["job_id"] == first["MAM_JOB_ID"] == "J0" and Path(first["brief"]).read_text() == "p0"
    picks = [mam.popen("pick", "--agent-session", "queue:q") for _ in range(8)]
    taken = sorted(run.wait(20).stdout.strip() for run in picks)
    assert taken == ["", "", ""] + [f"J{number}" for number in range(1, 6)]
    assert sorted(run.code or 0 for run in picks) == [0] * 5 + [3] * 3
    assert mam("pick", "--agent-session", "queue:other", check=3).stdout == ""


def test_a_queued_job_is_followed_to_its_end(mam: Mam, registry: Any) -> None:
    """Lost: the delegator's view of work that an agent fetched itself."""
    run = mam.popen("delegate", "--agent-session", "queue:q", "--prompt", "p", "--job-id", "J1")
    wait_for(registry, "J1", lambda job: True)
    picked = mam("pick", "--agent-session", "queue:q", "--json", check=0).json()
    variables = {name: value for name, value in picked.items() if name.isupper()}
    publish = picked["MAM_PUBLISH_CMD"].split()
    for event in ("started", "completed"):
        status, _, err = core.run_program([*publish, "--event", event], timeout_s=30.0)
        assert status == 0, err
    assert variables["MAM_ATTEMPT_ID"] == "1"
    result = run.wait(20)
    assert result.code == 0 and [line.split()[3] for line in result.stdout.splitlines()[:2]] == ["started", "completed"]


def test_the_clocks_of_a_queued_job_run_from_the_claim(mam: Mam, registry: Any) -> None:
    """Lost: a job closed for being unanswered while nobody had it; or one claimed and forgotten, open for ever."""
    run = mam.popen("delegate", "--agent-session", "queue:q", "--prompt", "p", "--job-id", "J1", "--ack-timeout", 0.5,
                    "--timeout", 30)
    mam("delegate", "--agent-session", "queue:q", "--prompt", "p", "--job-id", "J2", "--ack-timeout", 0.5, "--detach",
        check=0)
    wait_for(registry, "J1", lambda job: True)
    mam("wait", "J1", "J2", "--timeout", 2, check=2)         # four times T, unclaimed
    assert {registry.job(name).status for name in ("J1", "J2")} == {"pending"}
    for _ in range(2):
        mam("pick", "--agent-session", "queue:q", check=0)
    assert run.wait(20).code == 1
    for name in ("J1", "J2"):
        assert wait_for(registry, name, lambda job: job.status == "error").reason == "agent_blocked"


def test_the_next_attempt_of_a_queued_job_has_its_clocks_too(mam: Mam, registry: Any) -> None:
    """Lost: somebody who watches: a redispatched job that is claimed and forgotten, open for ever."""
    mam("delegate", "--agent-session", "queue:q", "--prompt", "p", "--job-id", "J1", "--ack-timeout", 0.5, "--detach",
        check=0)
    for attempt in (1, 2):
        mam("pick", "--agent-session", "queue:q", check=0)
        mam("wait", "J1", "--timeout", 20, check=1)
        assert (registry.job("J1").attempt_id, registry.job("J1").reason) == (attempt, "agent_blocked")
        mam("redispatch", "J1", check=0)


# ---- tmux ----------------------------------------------------------------------------------------------------

AGENT = r'''
"""A stand-in for an agent in a pane: takes bracketed pastes, writes down what came, does what its mode says."""
import json, os, re, shlex, subprocess, sys, time, tty
log_path, mode = sys.argv[1], sys.argv[2]

def log(**row):
    with open(log_path, "a") as file:
        file.write(json.dumps(row) + "\n")

def run(text, name, *more, drop=()):
    line = [line for line in text.replace("\r", "\n").splitlines() if "--event " + name in line][0]
    words = shlex.split(line[line.index(":") + 1:])
    for word in drop:
        at = words.index(word)
        del words[at:at + 2]
    done = subprocess.run([*words, *more], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log(ran=name, code=done.returncode, said=done.stdout.decode())

def act(text):
    if mode == "work":
        run(text, "started")
        run(text, "progress")
        run(text, "completed")
    elif mode == "fail":
        run(text, "error")
    elif mode == "hang":
        run(text, "started", drop=["--heartbeat"])
    elif mode == "beat":
        run(text, "started", "--watch-pid", str(os.getpid()))

tty.setraw(0)
sys.stdout.write("\x1b[?2004hREADY\r\n")
sys.stdout.flush()
held, pasted = b"", ""
while True:
    data = os.read(0, 65536)
    if not data:
        break
    held += data
    while held:
        paste = re.match(rb"\x1b\[200~(.*?)\x1b\[201~", held, re.S)
        if paste:
            pasted += paste.group(1).decode()
            log(paste=paste.group(1).decode(), at=time.monotonic())
            sys.stdout.write("PASTED %d\r\n" % len(paste.group(1)))
            held = held[paste.end():]
        elif b"\x1b[200~".startswith(held[:6]) or held.startswith(b"\x1b[200~"):
            break                                  # the rest is on its way
        else:
            key, held = held[:1], held[1:]
            log(key=key.decode("latin-1"), at=time.monotonic())
            if key == b"\x04":
                sys.exit(0)
            if key == b"\r" and pasted:
                sys.stdout.write("SUBMITTED\r\n")
                sys.stdout.flush()
                text, pasted = pasted, ""
                act(text)
        sys.stdout.flush()
'''


class Agent:
    """A stand-in agent in a pane of a private tmux server, and what it wrote down."""

    def __init__(self, mam: Mam, tmux: Tmux, mode: str, name: str = "alice") -> None:
        self.mam, self.tmux = mam, tmux
        script = mam.folder / "agent.py"
        script.write_text(AGENT)
        self.log_path = mam.folder / f"{name}.log"
        command = " ".join(shlex.quote(str(word)) for word in (sys.executable, script, self.log_path, mode))
        self.pane = tmux.new_pane("exec " + command, name=name, cwd=mam.workspace,
                                  env={"SHIV_ROOT": mam.environment()["SHIV_ROOT"]})
        tmux.wait_for(self.pane, "READY")
        mam.env.update(MAM_TMUX_SOCKET=str(tmux.socket))

    def rows(self) -> List[Dict[str, Any]]:
        return [json.loads(line) for line in self.log_path.read_text().splitlines()] if self.log_path.exists() else []

    def pastes(self) -> List[str]:
        return [row["paste"] for row in self.rows() if "paste" in row]

    def keys(self) -> List[str]:
        return [row["key"] for row in self.rows() if "key" in row]

    def delegate(self, *more: object, check: Any = None) -> Result:
        return self.mam("delegate", "--agent-session", "tmux:alice", "--prompt", "p", "--job-id", "J1", *more,
                        check=check)

    def start(self, *more: object) -> Background:
        return self.mam.popen("delegate", "--agent-session", "tmux:alice", "--prompt", "p", "--job-id", "J1", *more)


@pytest.fixture
def agent(mam: Mam, tmux: Tmux) -> Callable[..., Agent]:
    return lambda mode, **options: Agent(mam, tmux, mode, **options)


def test_an_agent_in_a_pane_gets_the_prompt_whole_and_once(agent: Callable[..., Agent], registry: Any) -> None:
    """Lost: the main way to reach an interactive agent: one paste, then Enter, then its own words decide."""
    alice = agent("work")
    result = alice.delegate(check=0)
    assert [line.split()[3] for line in result.stdout.splitlines()[:-1]] == ["started", "progress", "completed"]
    job = registry.job("J1")
    brief = alice.mam.registry_dir / "briefs" / "J1.a1.md"
    expected = core.injection(registry, core.load_settings(str(alice.mam.registry_dir)), job, str(brief))
    assert len(alice.pastes()) == 1 and alice.keys() == ["\r"]
    lines, wanted = alice.pastes()[0].split("\r"), expected.split("\n")
    assert len(lines) == len(wanted) and lines[0] == wanted[0] and lines[-1] == wanted[-1]
    assert lines[0].startswith(HEADER % "J1") and lines[0].endswith(str(brief)) and brief.read_text() == "p"
    paste, enter = [row["at"] for row in alice.rows() if "at" in row]
    assert enter - paste >= 0.25                   # an Enter right behind a paste is swallowed by some agents
    # The end is recorded, and delegate gone, before the agent has seen how its last command ended.
    poll(lambda: [row["code"] for row in alice.rows() if "ran" in row] == [0, 0, 0], 10, "three commands that worked")
    assert job.delivery == "sent"


def test_an_agent_is_found_by_pane_and_by_the_users_own_server(agent: Callable[..., Agent], tmux: Tmux) -> None:
    """Lost: `tmux:%3`; and a server found as tmux itself finds it, without MAM_TMUX_SOCKET."""
    alice = agent("fail")
    del alice.mam.env["MAM_TMUX_SOCKET"]
    alice.mam.env.update(tmux.env())
    result = alice.mam("delegate", "--agent-session", "tmux:" + alice.pane, "--prompt", "p", check=1)
    assert result.stdout.splitlines()[-1].endswith(": why") and len(alice.pastes()) == 1


def test_a_prompt_of_1_mib_goes_by_pointer(agent: Callable[..., Agent], registry: Any) -> None:
    """Lost: a long prompt, cut by a terminal; or its escape sequences, acted on by one."""
    alice = agent("work")
    text = "!\x1b[201~\x03\r\n😀 " * (1024 * 1024 // 13)
    result = alice.mam("delegate", "--agent-session", "tmux:alice", "--prompt-file", "-", "--job-id", "J1", input=text,
                       check=0)
    assert "completed" in result.stdout
    paste, = alice.pastes()
    assert len(paste) < 4096 and alice.keys() == ["\r"]
    assert (alice.mam.registry_dir / "briefs" / "J1.a1.md").read_bytes() == text.encode()


def test_nothing_in_the_typed_text_can_end_the_paste(registry: Any, mam: Mam) -> None:
    """Lost: the pane, to a folder name with an escape sequence in it; or to a leading ! or /."""
    job_id = mam("register", "--prompt", "p", "--agent-session", "tmux:alice", check=0).stdout.strip()
    text = core.injection(registry, core.load_settings(str(mam.registry_dir)), registry.job(job_id),
                          "/tmp/\x1b[201~\x03\x04\x9b\r!x\u202e/brief.md")
    assert text.replace("\n", "").isprintable() and "\x1b" not in text and len(text.splitlines()) == 8
    assert text[0].isalpha()


def test_an_agent_that_never_answers_is_blocked_and_prompted_once(agent: Callable[..., Agent], registry: Any) -> None:
    """Lost: T; or a prompt typed a second time into an agent that is only slow."""
    alice = agent("silent")
    result = alice.delegate("--ack-timeout", 1, check=1)
    assert registry.job("J1").reason == "agent_blocked" and "RESULT job=J1 error (agent_blocked)" in result.stdout
    assert len(alice.pastes()) == 1 and alice.keys() == ["\r"]


def test_an_agent_that_falls_silent_is_unresponsive(agent: Callable[..., Agent], registry: Any) -> None:
    """Lost: the idle clock, which runs from the first event."""
    alice = agent("hang")
    alice.delegate("--idle-timeout", 1, check=2)
    assert registry.job("J1").reason == "unresponsive" and len(alice.pastes()) == 1


def test_a_detached_job_keeps_its_clocks(agent: Callable[..., Agent], registry: Any, mam: Mam, tmux: Tmux) -> None:
    """Lost: T and idle of a job that nobody follows."""
    alice, bob = agent("silent"), agent("hang", name="bob")
    alice.delegate("--ack-timeout", 1, "--detach", check=0)
    mam("delegate", "--agent-session", "tmux:bob", "--prompt", "p", "--job-id", "J2", "--idle-timeout", 1, "--detach",
        check=0)
    assert wait_for(registry, "J1", lambda job: job.status == "error").reason == "agent_blocked"
    assert wait_for(registry, "J2", lambda job: job.status == "error").reason == "unresponsive"
    assert len(alice.pastes()) == len(bob.pastes()) == 1


def test_a_beat_lives_as_long_as_the_agent(agent: Callable[..., Agent], registry: Any) -> None:
    """Lost: a thinking agent, closed though its process lives; or a dead one, believed for ever."""
    alice = agent("beat")
    run = alice.start("--idle-timeout", 2, "--heartbeat", 0.2)
    run.wait_for(" started ")
    first = registry.beat("J1").touched_mono
    poll(lambda: core.elapsed_s(registry.beat("J1").touched_mono) is not None
         and float(registry.beat("J1").touched_mono.split()[1]) > float(first.split()[1]) + 2.5, 20, "beats go on")
    assert registry.job("J1").status == "running"
    os.kill(int(alice.tmux.pane(alice.pane, "#{pane_pid}")), signal.SIGKILL)
    assert run.wait(20).code == 2 and registry.job("J1").reason == "unresponsive"


def test_one_job_at_a_time_in_a_session(agent: Callable[..., Agent], registry: Any) -> None:
    """Lost: a second prompt typed into an agent at work: exit 5, the job closed, the pane untouched."""
    alice = agent("hang")
    run = alice.start()
    run.wait_for(" started ")
    alice.tmux.wait_for(alice.pane, "SUBMITTED")
    before = alice.tmux.capture(alice.pane)
    result = alice.mam("delegate", "--agent-session", "tmux:alice", "--prompt", "p", "--job-id", "J2", check=5)
    assert "at work on job J1" in result.stderr
    job = registry.job("J2")
    assert (job.status, job.reason, job.delivery) == ("cancelled", "session_busy", "none")
    assert alice.tmux.capture(alice.pane) == before and len(alice.pastes()) == 1
    alice.mam("wait", "J2", check=5)
    alice.mam("cancel", "J1", check=0)
    assert run.wait(20).code == 1


def test_two_delegations_to_one_pane_at_once_type_once(agent: Callable[..., Agent], registry: Any) -> None:
    """Lost: two prompts mixed in one composer."""
    alice = agent("hang")
    both = [alice.mam.popen("delegate", "--agent-session", "tmux:alice", "--prompt", "p", "--job-id", f"J{n}")
            for n in range(3)]
    poll(lambda: [run.code for run in both].count(5) == 2, 40, "two that find the pane busy")
    winner, = [n for n, run in enumerate(both) if run.code is None]
    alice.mam("cancel", f"J{winner}", check=0)
    assert both[winner].wait(20).code == 1 and len(alice.pastes()) == 1


def test_a_prompt_is_not_typed_twice_by_two_who_deliver_one_job(agent: Callable[..., Agent], registry: Any) -> None:
    """Lost: "never injected twice": two processes that both saw the job undelivered, one after the other."""
    alice = agent("silent")
    job_id = alice.mam("register", "--prompt", "p", "--agent-session", "tmux:alice", check=0).stdout.strip()
    job = registry.job(job_id)
    own = core.Settings(alice.mam.environment(), None, str(alice.mam.workspace), str(alice.mam.registry_dir),
                        str(alice.mam.home))
    for _ in range(2):
        core.hand_over(registry, own, job)          # both with the record as it was before the first
    alice.tmux.wait_for(alice.pane, "SUBMITTED")
    assert len(alice.pastes()) == 1


def test_a_pane_in_copy_mode_is_left_from_it(agent: Callable[..., Agent], tmux: Tmux) -> None:
    """Lost: a prompt, swallowed or typed in fragments because somebody had scrolled."""
    alice = agent("work")
    tmux.run("copy-mode", "-t", alice.pane)
    assert tmux.pane(alice.pane, "#{pane_in_mode}") == "1"
    alice.delegate(check=0)
    assert tmux.pane(alice.pane, "#{pane_in_mode}") == "0" and len(alice.pastes()) == 1


def test_a_shell_in_the_foreground_gets_nothing(mam: Mam, tmux: Tmux) -> None:
    """Lost: a prompt run as shell commands."""
    pane = tmux.new_pane(name="alice")
    tmux.type(pane, "echo SHELL-$((40+2))")
    before = tmux.wait_for(pane, "SHELL-42")
    mam.env.update(tmux.env())
    result = mam("delegate", "--agent-session", "tmux:alice", "--prompt", "rm -rf x", check=5)
    assert "shell" in result.stderr and not mam.registry_dir.exists()
    assert tmux.capture(pane) == before


def test_a_dead_pane_and_a_missing_session_are_said(agent: Callable[..., Agent], mam: Mam, tmux: Tmux) -> None:
    """Lost: a prompt "delivered" to nobody."""
    alice = agent("silent")
    tmux.run("set-option", "-t", alice.pane, "remain-on-exit", "on")
    tmux.run("send-keys", "-t", alice.pane, "C-d")
    poll(lambda: tmux.pane(alice.pane, "#{pane_dead}") == "1", 10, "a dead pane")
    before = tmux.capture(alice.pane)
    assert "dead" in alice.delegate(check=5).stderr
    assert tmux.capture(alice.pane) == before
    result = mam("delegate", "--agent-session", "tmux:nobody", "--prompt", "p", check=1)
    assert "no tmux session nobody" in result.stderr and "new-session" in result.stderr
    assert not mam.registry_dir.exists()
    mam.env.update(MAM_TMUX_SOCKET=str(mam.folder / "none"))
    assert "no tmux session" in mam("delegate", "--agent-session", "tmux:alice", "--prompt", "p", check=1).stderr


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_delegator_ended_before_the_delivery_takes_its_job_back(agent: Callable[..., Agent], registry: Any,
                                                                 number: int, code: int) -> None:
    """Lost: a prompt typed after its delegator was told to stop; or a job that nobody has, left open."""
    alice = agent("silent")
    locks = alice.mam.registry_dir / "locks"
    locks.mkdir(mode=0o700)
    with open(locks / "pane-tmux-alice", "w") as lock:      # another delivery to this pane goes on
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = alice.start()
        wait_for(registry, "J1", lambda job: True)
        poll(lambda: (alice.mam.registry_dir / "briefs" / "J1.a1.md").exists(), 20, "the brief")
        run.send_signal(number)
        assert run.wait(20).code == code
    job = registry.job("J1")
    assert (job.status, job.delivery) == ("cancelled", "none") and alice.pastes() == [] and alice.keys() == []


def test_a_job_left_by_its_delegator_keeps_its_clocks(agent: Callable[..., Agent], registry: Any) -> None:
    """Lost: "someone watches every open job": after a Ctrl-C of the delegator T still ends a job nobody answers."""
    alice = agent("silent")
    run = alice.start("--ack-timeout", 2)
    wait_for(registry, "J1", lambda job: job.delivery == "sent")
    run.send_signal(signal.SIGINT)
    assert run.wait(20).code == 130
    assert wait_for(registry, "J1", lambda job: job.status == "error", 10).reason == "agent_blocked"


# ---- with a broker -------------------------------------------------------------------------------------------

def test_the_same_job_is_seen_by_any_client_of_a_broker(mam: Mam, broker: Any,
                                                        observe: Callable[..., Observer]) -> None:
    """Lost: the view from elsewhere, by MQTT_BROKER and MQTT_PORT alone: each event once, in order, signed."""
    given = broker.env()
    mam.env.update(MQTT_BROKER=given["MQTT_BROKER"], MQTT_PORT=given["MQTT_PORT"])
    job_id = "W" + uuid.uuid4().hex[:8]
    prefix = f"python/mqtt/jobs/{job_id}"
    seen = observe(broker, prefix + "/#")
    delegate(mam, "$MAM_PUBLISH_CMD --event progress --detail half; echo done", "--validate", "true",
             "--job-id", job_id, check=0)
    record = mam("get", job_id, "--show-secrets", check=0).json()
    keys = {1: (record["dispatch_token"], record["auth_token"])}
    seen.wait_for(lambda m: m.topic.endswith("/state") and m.json()["status"] == "completed", 20, "the last state")
    events = [core.accept_message(m.topic, m.payload, prefix, "events", keys)[0] for m in seen.messages("events")]
    by_seq = {event["seq"]: (event["event"], event["data"].get("settles")) for event in events}
    assert by_seq == {1: ("started", None), 2: ("progress", None), 3: ("completed", False), 4: ("completed", None)}
    first_seen = list(dict.fromkeys(event["seq"] for event in events))
    assert first_seen == [1, 2, 3, 4]
    last = core.parse_json(retained(broker, prefix + "/events") or b"")
    assert (last["seq"], last["event"]) == (4, "completed")
    state = core.accept_message(prefix + "/state", retained(broker, prefix + "/state"), prefix, "state", keys)[0]
    assert (state["seq"], state["status"], state["phase"]) == (4, "completed", None)


def test_a_broker_that_is_not_there_stops_no_job(mam: Mam, registry: Any) -> None:
    """Lost: local work, to a dead broker: the job ends in time, and its news stays owed."""
    mam.env.update(MQTT_BROKER="127.0.0.1", MQTT_PORT="1")
    delegate(mam, "echo done", "--job-id", "J1", check=0)
    assert registry.job("J1").status == "completed" and registry.owes("J1")

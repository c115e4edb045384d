"""`_run`: one command, its environment, its input, its output, its end; and nothing of it left behind."""
from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import ROOT, clean_environment, marked_pids, pause, poll, resume
from support.cli import Background, Mam, Result
from support.proxy import Proxy

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
core: Any = importlib.import_module("mam")

QUICK = {"MAM_TERM_GRACE_S": "0.3", "MAM_LINGER_S": "0.5"}
IGNORES_TERM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").write(str(os.getpid()))
while True:
    time.sleep(0.05)
"""


class Host:
    """A host whose jobs this test puts into the registry itself, to start `_run` by hand."""

    def __init__(self, mam: Mam) -> None:
        self.mam = mam
        mam.env.update(QUICK)
        self.registry = core.Registry(str(mam.registry_dir), create=True)

    def job(self, command: str, prompt: str = "p", **columns: Any) -> str:
        """A job on its way to `_run`, as `delegate` leaves it."""
        job_id = columns.pop("job_id", uuid.uuid4().hex[:8])
        record = {"job_id": job_id, "title": "t", "agent": "a", "agent_session": "exec:x", "role": "Worker",
                  "topic_prefix": "python/mqtt/jobs/" + job_id, "timeout_sec": 60, "idle_timeout_sec": 60,
                  "heartbeat_sec": 30, "heartbeat_misses": 4, "ack_timeout_sec": 60, "expected_artifacts": "[]",
                  "job_type": "direct", "max_iterations": 5, "attempt_id": 1, "transport": "local",
                  "workdir": str(self.mam.workspace), "prompt": prompt, "command": command}
        job = self.registry.register({**record, **columns})
        core.write_brief(self.registry, job)
        assert self.registry.move_delivery(job_id, 1, "none", "sending")
        return str(job_id)

    def start(self, command: str, **options: Any) -> Tuple[str, Background]:
        env = options.pop("env", None)
        job_id = self.job(command, **options)
        return job_id, self.mam.popen("_run", job_id, "--attempt-id", 1, env=env)

    def run(self, command: str, **options: Any) -> Any:
        """Run a command to its end and return its job."""
        env = options.pop("env", None)
        job_id = self.job(command, **options)
        self.mam("_run", job_id, "--attempt-id", 1, env=env, check=0)
        return self.registry.job(job_id)

    def events(self, job_id: str) -> List[Any]:
        """The events of a job that have a number."""
        return [event for event in self.registry.events(job_id) if event.seq is not None]

    def names(self, job_id: str) -> List[str]:
        return [event.event for event in self.events(job_id)]

    def data(self, job_id: str) -> Dict[str, Any]:
        """`data` of a job's last event."""
        return dict(json.loads(self.events(job_id)[-1].payload)["data"])

    def output(self, job_id: str) -> bytes:
        return (self.mam.registry_dir / "output" / f"{job_id}.a1.log").read_bytes()

    def wait(self, job_id: str, status: str, timeout: float = 20) -> Any:
        poll(lambda: [job.status for job in self.registry.jobs_by_id([job_id])] == [status], timeout,
             lambda: f"{status}, it is {[job.status for job in self.registry.jobs_by_id([job_id])]}", interval=0.02)
        return self.registry.job(job_id)

    def group(self, job_id: str) -> int:
        """The process group of a command that runs."""
        def known() -> Any:
            run = self.registry.job(job_id).run
            return run and json.loads(run).get("group")
        return int(poll(known, 20, "the command's group"))


@pytest.fixture
def host(mam: Mam) -> Iterator[Host]:
    made = Host(mam)
    yield made
    made.registry.close()


def pid_in(path: Path) -> int:
    """The pid a process wrote into a file."""
    return int(poll(lambda: path.exists() and path.read_text().strip(), 20, f"a pid in {path.name}"))


def gone(pid: int) -> bool:
    return core.identity_of(pid) is None


def stubborn(host: Host, name: str = "stubborn") -> str:
    """A shell command whose children, one of them a grandchild, ignore TERM and say their pids in files."""
    script = host.mam.folder / "ignores_term.py"
    script.write_text(IGNORES_TERM)
    python = f"{shlex.quote(sys.executable)} {shlex.quote(str(script))}"
    return f"({python} {name}.grandchild & wait) & exec {python} {name}.child"


def pids_of(host: Host, name: str = "stubborn") -> List[int]:
    return [pid_in(host.mam.workspace / f"{name}.{who}") for who in ("child", "grandchild")]


# ---- the exit status decides ----------------------------------------------------------------------------------

@pytest.mark.parametrize("command, status, detail, exit_status", [
    ("echo one; echo the result", "completed", "the result", 0),
    ("true", "completed", "Job JOB completed", 0),
    ("printf 'no newline'", "completed", "no newline", 0),
    ("echo one; echo the reason >&2; exit 7", "error", "exit status 7: the reason", 7),
    ("exit 1", "error", "exit status 1", 1),
    ("echo last words; kill -9 $$", "error", "ended by signal 9: last words", -9),
    ("kill -TERM $$", "error", "ended by signal 15", -15),
    ("if then", "error", None, 2),
    ("exec >&- 2>&-; sleep 0.3; exit 3", "error", "exit status 3", 3)])
def test_the_exit_status_is_the_result(host: Host, command: str, status: str, detail: Optional[str],
                                       exit_status: int) -> None:
    """Lost: how the command ended: 0 is completed with its last line, all else an error that says how."""
    job = host.run(command)
    assert (job.status, host.names(job.job_id)) == (status, ["started", status])
    if detail is not None:
        assert job.detail == detail.replace("JOB", job.job_id)
    assert host.data(job.job_id)["exit_status"] == exit_status == job.exit_status
    assert job.run_ended_at and job.delivery == "sent"


@pytest.mark.parametrize("command, workdir", [
    ("no-such-program-anywhere --flag", None), ("./not-there.sh", None), ("/no/such/program", None),
    ("true", "gone")])
def test_what_cannot_be_started_is_never_said_to_have_started(host: Host, command: str,
                                                              workdir: Optional[str]) -> None:
    """Lost: the difference between an agent that failed and one that never was."""
    job = host.run(command, **({"workdir": str(host.mam.workspace / workdir)} if workdir else {}))
    assert (job.status, job.reason, host.names(job.job_id)) == ("error", "spawn_failed", ["error"])
    assert job.detail


def test_a_file_that_is_no_program_is_a_spawn_failure(host: Host) -> None:
    """Lost: the same, for a script without its x bit."""
    (host.mam.workspace / "work.sh").write_text("#!/bin/sh\n")
    job = host.run("./work.sh")
    assert (job.reason, host.names(job.job_id)) == ("spawn_failed", ["error"])


def test_the_agents_own_word_counts_more_than_its_exit_status(host: Host) -> None:
    """Lost: the result an agent published, overwritten by the 0 or 1 of its process."""
    patient = {"MAM_LINGER_S": "30"}
    job = host.run("$MAM_PUBLISH_CMD --event error --detail 'the build is broken'; exit 0", env=dict(patient))
    assert (job.status, job.detail) == ("error", "the build is broken")
    job = host.run("$MAM_PUBLISH_CMD --event completed --detail fine; exit 9", env=dict(patient))
    assert (job.status, job.detail, job.exit_status) == ("completed", "fine", 9)


# ---- environment and input ------------------------------------------------------------------------------------

def test_the_environment_of_a_command(host: Host) -> None:
    """Lost: the names an agent reports by; or a secret, and an outer agent's variables, inside the work."""
    inner = {"CLAUDECODE": "1", "CLAUDE_CODE_SESSION_ID": "x", "CODEX_THREAD_ID": "x", "MAM_DISPATCH_SECRET": "x" * 32,
             "MAM_DISPATCH_SECRET_PREVIOUS": "y" * 32, "SHIV_INTERPRETER": "", "KEPT": "é 'x' \n y"}
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    job = host.run(f"{shlex.quote(sys.executable)} -c {shlex.quote(script)} > environment", env=dict(inner))
    found = json.loads((host.mam.workspace / "environment").read_text())
    assert found["JOB_ID"] == found["MAM_JOB_ID"] == job.job_id
    assert found["MAM_ATTEMPT_ID"] == "1" and found["MAM_DISPATCH_TOKEN"] == job.dispatch_token
    assert found["MAM_REGISTRY_DIR"] == str(host.mam.registry_dir)
    assert Path(found["MAM_JOB_BRIEF"]).read_text() == "p"
    assert found["MAM_PUBLISH_CMD"].endswith(f" publish --job={job.job_id}")
    assert found["KEPT"] == inner["KEPT"] and found["HOME"] == str(host.mam.home)
    leaked = [name for name in found if name.startswith(("SHIV_", "MAM_DISPATCH_SECRET")) or name in inner]
    assert leaked == ["KEPT"]
    assert job.auth_token not in found.values()


@pytest.mark.parametrize("name", ["with space", "quote'd", 'double"quote', "dollar$HOME`x`", "été 世界", "star*?[a]",
                                  "semi;colon&"])
def test_the_publish_command_works_unquoted_wherever_the_workspace_lies(new_mam: Callable[..., Mam],
                                                                        name: str) -> None:
    """Lost: an agent's only way to report, in a folder with an awkward name."""
    host = Host(new_mam(name))
    try:
        job = host.run("$MAM_PUBLISH_CMD --event progress --detail 'two words'; cd /; "
                       "$MAM_PUBLISH_CMD --event completed --detail \"$(cat \"$MAM_JOB_BRIEF\")\"", prompt="the brief")
        assert host.names(job.job_id) == ["started", "progress", "completed"]
        assert [event.detail for event in host.events(job.job_id)][1:] == ["two words", "the brief"]
    finally:
        host.registry.close()


AWKWARD = ("!bang\n/slash\n-dash --help\n\0NUL\x1b[201~\x1b[31m\r\nCRLF\r\tTAB\x7f\x85\u2028\u2029\ufeff"
           "\u202eRTL\u202c עברית 😀\U0010ffff $HOME `id` 'q' \"d\" \\ %s {} é\u0301")


@pytest.mark.parametrize("start", ["!", "/", "-", "\ufeff", "\n", "x"])
def test_the_brief_reaches_stdin_byte_for_byte(host: Host, start: str) -> None:
    """Lost: a character of the prompt: 1 MiB of every awkward one, without a newline at its end."""
    text = start + AWKWARD * (1024 * 1024 // len(AWKWARD.encode()))
    sent = text.encode()
    (host.mam.workspace / "brief").write_bytes(sent)
    result = host.mam("delegate", "--agent-session", "exec:x", "--exec", 'cat > got; cat "$MAM_JOB_BRIEF" > file',
                      "--stdin", "--prompt-file", "brief", check=0)
    assert "completed" in result.stdout
    assert (host.mam.workspace / "got").read_bytes() == sent
    assert (host.mam.workspace / "file").read_bytes() == sent


def test_stdin_is_empty_unless_asked_for(host: Host) -> None:
    """Lost: a command that reads stdin, waiting for ever for a terminal it does not have."""
    assert host.run("cat > got; wc -c < got").detail.strip() == "0"


# ---- output -----------------------------------------------------------------------------------------------------

@given(st.integers(100, 400), st.lists(st.integers(0, 900), max_size=12))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_output_file_keeps_head_and_tail_and_never_grows_past_its_cap(tmp_path: Path, cap: int,
                                                                       sizes: List[int]) -> None:
    """Lost: the disk; or the beginning and the end of what a command said, which tell most."""
    path = tmp_path / "out"
    file = core.CappedFile(str(path), cap)
    stream = b"".join(b"%07d " % number for number in range(2000))
    position = 0
    for size in sizes:
        file.write(stream[position:position + size])
        position += size
        assert path.stat().st_size <= cap
    file.close()
    written, kept = stream[:position], path.read_bytes()
    if len(written) <= cap:
        assert kept == written
        return
    head, mark, rest = kept.partition(b"\n[mam: ")
    number, _, tail = rest.partition(b" bytes left out here]\n")
    assert mark and number.isdigit() and len(kept) <= cap
    assert len(head) == cap // 2 and written.startswith(head) and written.endswith(tail)


def test_the_number_of_bytes_left_out_is_right(tmp_path: Path) -> None:
    """Lost: trust in the one line of mam's own in a command's output: kept and left out make up the whole."""
    file = core.CappedFile(str(tmp_path / "out"), 200)
    file.write(b"x" * 1000)
    file.close()
    head, _, rest = (tmp_path / "out").read_bytes().partition(b"\n[mam: ")
    number, _, tail = rest.partition(b" bytes left out here]\n")
    assert len(head) + int(number) + len(tail) == 1000


def test_a_flood_of_output_stays_under_the_cap(host: Host) -> None:
    """Lost: the disk, to an agent that prints without end (the cap holds while it prints)."""
    job_id, run = host.start("echo first; head -c 70000000 /dev/zero; echo; echo last")
    path = host.mam.registry_dir / "output" / f"{job_id}.a1.log"
    biggest = [0]

    def ended() -> bool:
        biggest[0] = max(biggest[0], path.stat().st_size if path.exists() else 0)
        return run.code is not None
    poll(ended, 60, "the end of the flood")
    kept = host.output(job_id)
    assert max(biggest[0], len(kept)) <= core.OUTPUT_CAP_BYTES
    assert kept.startswith(b"first\n\0") and kept.endswith(b"\0\nlast\n") and b"bytes left out here" in kept
    assert host.registry.job(job_id).detail == "last"


def test_binary_output_is_kept_and_its_last_line_is_readable(host: Host) -> None:
    """Lost: bytes of the output; or a terminal, driven by the detail of a job."""
    job = host.run(r"printf '\377\376\000\001\033[31mred\033]0;title\007\r\n'")
    assert host.output(job.job_id) == b"\xff\xfe\x00\x01\x1b[31mred\x1b]0;title\x07\r\n"
    assert job.status == "completed" and "red" in job.detail and job.detail.isprintable()


def test_what_a_command_leaves_behind_is_ended_and_noted(host: Host) -> None:
    """Lost: the end of a job whose grandchild keeps the pipe open; or a process nobody knows of."""
    job = host.run("sleep 300 & echo $! > pid; echo done")
    assert (job.status, job.detail) == ("completed", "done")
    assert gone(pid_in(host.mam.workspace / "pid"))
    notes = [event.detail for event in host.registry.events(job.job_id) if event.event == "left_running"]
    assert len(notes) == 1 and notes[0].startswith("1 process")


def test_output_flows_while_a_broker_stalls(host: Host, mosquitto: Any, proxy: Callable[[Any], Proxy]) -> None:
    """Lost: the work's speed, to a broker that accepts and then says nothing: 20 MB, then its end."""
    between = proxy(mosquitto)
    between.stall()
    host.mam.env.update(between.env(mosquitto))
    job_id, run = host.start("head -c 20000000 /dev/zero; echo; echo done; date > written",
                              wire=f"127.0.0.1:{between.port}")
    began = time.monotonic()
    poll(lambda: (host.mam.workspace / "written").exists(), 20, "the end of the command")
    job = host.wait(job_id, "completed", 10)
    assert job.detail == "done" and len(host.output(job_id)) > 20000000
    assert time.monotonic() - began < 10 and run.code is None      # before the first CONNACK is given up
    poll(lambda: between.open_connections > 0, 10, "a connection that stalls")
    between.resume()
    assert run.wait(60).code == 0
    assert not host.registry.owes(job_id)


# ---- ends of every kind ---------------------------------------------------------------------------------------------

def test_a_command_that_published_its_end_may_tidy_up_and_then_has_to_go(host: Host) -> None:
    """Lost: a session, to an agent that reports its end and never exits; or its tidying up."""
    job_id, run = host.start("trap 'echo termed > termed; exit 0' TERM; $MAM_PUBLISH_CMD --event completed --detail "
                             "mine; echo tidy > tidied; while :; do sleep 0.05; done", env={"MAM_LINGER_S": "2"})
    result = run.wait(20)
    job = host.registry.job(job_id)
    assert result.code == 0 and (job.status, job.detail, host.names(job_id)) == (
        "completed", "mine", ["started", "completed"])
    assert (host.mam.workspace / "tidied").exists() and (host.mam.workspace / "termed").exists()


def test_a_command_past_its_time_is_ended_with_its_whole_group(host: Host) -> None:
    """Lost: the deadline; TERM alone is not enough for some."""
    began = time.monotonic()
    job_id, run = host.start(stubborn(host), timeout_sec=3)
    pids = pids_of(host)
    assert run.wait(20).code == 0
    job = host.registry.job(job_id)
    assert (job.status, job.reason, core.exit_of(job)) == ("error", "deadline_timeout", 2)
    assert all(gone(pid) for pid in pids) and time.monotonic() - began >= 3.3


@pytest.mark.parametrize("how, status, reason", [
    ("cancel J", "cancelled", "cancelled"), ("status J --set cancelled", "cancelled", "operator"),
    ("status J --set completed", "completed", "operator"), ("close J --request cancelled", "cancelled", "cancelled"),
    ("close J --request unresponsive", "error", "unresponsive"), ("redispatch J --force --no-deliver", "pending", None),
    ("publish J --event completed", "completed", None)])
def test_every_end_of_a_job_ends_its_command(host: Host, how: str, status: str, reason: Optional[str]) -> None:
    """Lost: a command that works on after its job was ended, grandchildren that ignore TERM included."""
    job_id, run = host.start(stubborn(host))
    pids = pids_of(host)
    host.wait(job_id, "running")
    host.mam(*how.replace("J", job_id).split(), check=0)
    if how.startswith(("cancel", "redispatch")):
        assert all(gone(pid) for pid in pids)       # these return when it is gone
    assert run.wait(20).code == 0
    assert all(gone(pid) for pid in pids)
    job = host.registry.job(job_id)
    assert (job.status, job.reason) == (status, reason)
    assert "exit_status" not in host.data(job_id)   # an end by mam is not the command's own


def test_term_comes_first_and_a_command_may_use_its_grace(host: Host) -> None:
    """Lost: the chance to save work before KILL."""
    job_id, run = host.start("trap 'sleep 0.3; echo saved > saved; exit 0' TERM; echo r > ready; "
                             "while :; do sleep 0.02; done", env={"MAM_TERM_GRACE_S": "20"})
    poll((host.mam.workspace / "ready").exists, 20, "the trap")
    host.mam("cancel", job_id, check=0, env={"MAM_TERM_GRACE_S": "20"})
    assert run.wait(20).code == 0
    assert (host.mam.workspace / "saved").exists()


def test_sigterm_of_the_supervisor_ends_the_command_and_says_so(host: Host) -> None:
    """Lost: a job that reads running for ever after a shutdown of the host."""
    job_id, run = host.start(stubborn(host))
    pids = pids_of(host)
    host.wait(job_id, "running")
    run.stop()
    job = host.registry.job(job_id)
    assert (job.status, job.reason) == ("error", "supervisor_lost") and all(gone(pid) for pid in pids)


def test_sigterm_while_the_command_is_being_ended_leaves_nothing(host: Host) -> None:
    """Lost: a command that ignores TERM, left alone when its supervisor is told to go during the grace."""
    command = stubborn(host).replace("& exec ", "& ") + "; exit 0"     # the shell dies by TERM, its children do not
    job_id, run = host.start(command, env={"MAM_TERM_GRACE_S": "2"})
    pids = pids_of(host)
    host.wait(job_id, "running")
    leader = host.group(job_id)
    host.mam("close", job_id, "--request", "deadline_timeout", check=0)
    poll(lambda: core.group_members(leader) and leader not in core.group_members(leader), 10, "TERM to the group")
    run.send_signal(signal.SIGTERM)
    run.wait(20)
    poll(lambda: all(gone(pid) for pid in pids), 5, "the end of the group")


def test_a_killed_supervisor_is_found_and_its_command_ended_and_never_run_again(host: Host) -> None:
    """Lost: certainty: after kill -9 of `_run` its group is gone, the job closed, and a new attempt runs once."""
    command = "echo x >> ran; " + stubborn(host)
    delegating = host.mam.popen("delegate", "--agent-session", "exec:x", "--exec", command, "--prompt", "p",
                                "--job-id", "J1")
    pids = pids_of(host)
    host.wait("J1", "running")
    supervisor = json.loads(host.registry.job("J1").run)["supervisor"]["pid"]
    os.kill(supervisor, signal.SIGKILL)
    result = delegating.wait(30)
    job = host.registry.job("J1")
    assert result.code == 1 and (job.status, job.reason) == ("error", "supervisor_lost")
    poll(lambda: all(gone(pid) for pid in pids), 10, "the end of the group")
    assert host.mam("_run", "J1", "--attempt-id", 1).code == 4      # nobody runs it a second time
    assert (host.mam.workspace / "ran").read_text() == "x\n"
    with host.registry.write():
        host.registry._execute("UPDATE jobs SET command = 'echo x >> ran' WHERE job_id = 'J1'")
    host.mam("redispatch", "J1", check=0)
    host.wait("J1", "completed")
    assert (host.mam.workspace / "ran").read_text() == "x\nx\n"


def test_an_attempt_runs_once_however_often_it_is_started(host: Host) -> None:
    """Lost: work done twice by two supervisors of one attempt."""
    job_id = host.job("echo x >> ran; sleep 0.3")
    runs = [host.mam.popen("_run", job_id, "--attempt-id", 1) for _ in range(4)]
    assert sorted(run.wait().code for run in runs) == [0, 4, 4, 4]
    assert (host.mam.workspace / "ran").read_text() == "x\n"
    assert host.mam("_run", job_id, "--attempt-id", 2).code == 4


def test_a_stopped_supervisor_is_noticed_and_goes_on_to_end_its_command(host: Host) -> None:
    """Lost: the beat as a sign of life of `_run` itself; or a command left running after the verdict."""
    delegating = host.mam.popen("delegate", "--agent-session", "exec:x", "--exec", "exec sleep 300", "--prompt", "p",
                                "--job-id", "J1", "--heartbeat", 0.2, "--heartbeat-misses", 4)
    host.wait("J1", "running")
    group = host.group("J1")
    supervisor = json.loads(host.registry.job("J1").run)["supervisor"]["pid"]
    pause(supervisor)
    try:
        assert delegating.wait(20).code == 2
        assert host.registry.job("J1").reason == "unresponsive"
    finally:
        resume(supervisor)
    poll(lambda: not core.group_members(group), 10, "the end of the command")


def test_a_silent_command_is_alive_as_long_as_its_supervisor_beats(host: Host) -> None:
    """Lost: a long compile or a thinking model, closed as unresponsive though it works."""
    result = host.mam("delegate", "--agent-session", "exec:x", "--exec", "sleep 3", "--prompt", "p", "--job-id", "J1",
                      "--heartbeat", 0.2, "--heartbeat-misses", 10, check=0)
    assert "unresponsive" not in result.stdout
    assert host.registry.job("J1").status == "completed" and host.registry.beat("J1") is None


def test_a_beat_is_touched_while_a_command_runs(host: Host) -> None:
    """Lost: the ALIVE column: a running command's beat row moves on."""
    job_id, _ = host.start("sleep 300", heartbeat_sec=0.2)
    host.wait(job_id, "running")
    seen = set()

    def touched() -> bool:
        beat = host.registry.beat(job_id)
        seen.add(beat and beat.touched_mono)
        return len(seen) > 3
    poll(touched, 20, "three touches of the beat")
    host.mam("cancel", job_id, check=0)
    assert host.registry.beat(job_id) is None


# ---- the gate --------------------------------------------------------------------------------------------------------

GATE_HELPER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import mam
child = mam.GatedChild("echo ran > " + sys.argv[2], "/", {"PATH": "/bin:/usr/bin"}, "/dev/null")
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_command_whose_parent_dies_before_it_was_recorded_never_runs(tmp_path: Path, mam: Mam) -> None:
    """Lost: the promise that no command runs that the registry does not know."""
    for number in range(5):
        marker = tmp_path / f"marker{number}"
        helper = subprocess.Popen([sys.executable, "-c", GATE_HELPER, str(ROOT), str(marker)], stdout=subprocess.PIPE,
                                  env=clean_environment(mam.home, mam.mark))
        assert helper.stdout is not None
        child = int(helper.stdout.readline())
        assert not gone(child)
        helper.kill()
        helper.wait()
        helper.stdout.close()
        poll(lambda: gone(child), 10, "the end of the gated child")
        assert not marker.exists()


def test_a_released_child_runs_and_a_failed_one_says_why(tmp_path: Path) -> None:
    """Lost: the start itself; or the reason when there is none."""
    marker = tmp_path / "marker"
    child = core.GatedChild(f"echo $PWD > {shlex.quote(str(marker))}; exit 5", str(tmp_path), dict(os.environ),
                            "/dev/null")
    assert child.poll() is None and not marker.exists() and core.group_members(child.pid) == [child.pid]
    assert child.release() == ""
    status: List[Optional[int]] = [None]

    def ended() -> bool:
        status[0] = child.poll()
        return status[0] is not None
    poll(ended, 10, "the end of the child")
    os.close(child.output)
    assert status == [5] and marker.read_text().strip() == str(tmp_path.resolve())
    lost = core.GatedChild("true", str(tmp_path / "missing"), dict(os.environ), "/dev/null")
    assert "missing" in lost.release()
    os.waitpid(lost.pid, 0)
    os.close(lost.output)


# ---- who a process is ---------------------------------------------------------------------------------------------

def test_only_the_very_process_is_alive(mam: Mam) -> None:
    """Lost: a stranger's process, signalled or believed because it has an old pid; a zombie taken for life."""
    process = subprocess.Popen(["sleep", "300"], env=clean_environment(mam.home, mam.mark))
    identity = core.identity_of(process.pid)
    assert core.is_alive(identity) is True
    assert core.is_alive({**identity, "start": "1"}) is False               # the pid was given to another
    assert core.is_alive({**identity, "boot": "another"}) is False          # the host was booted since
    assert core.is_alive({**identity, "ns": "pid:[1]"}) is None             # cannot be seen from here
    assert core.is_alive(None) is False
    process.kill()
    poll(lambda: core.is_alive(identity) is False, 10, "a zombie to be dead")
    assert Path(f"/proc/{process.pid}").exists() or sys.platform != "linux"  # not reaped yet
    process.wait()
    assert core.is_alive(identity) is False and core.identity_of(process.pid) is None


@pytest.mark.root
@pytest.mark.skipif(sys.platform != "linux", reason="pid namespaces are Linux's")
def test_a_process_of_another_pid_namespace_is_unknown_not_dead(mam: Mam) -> None:
    """Lost: a living agent in a container, declared dead because its pid means nothing here."""
    identity = json.dumps(core.identity_of(os.getpid()))
    script = ("import json, sys; sys.path.insert(0, sys.argv[1]); import mam; "
              "print(mam.is_alive(json.loads(sys.argv[2])))")
    done = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", script, str(ROOT),
                           identity], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=30,
                          env=clean_environment(mam.home, mam.mark))
    if done.returncode != 0 and b"Operation not permitted" in done.stderr:
        pytest.skip("this sandbox allows no pid namespace")
    assert done.stdout == b"None\n", done.stderr


def test_a_group_of_a_stranger_is_not_signalled(host: Host) -> None:
    """Lost: somebody else's processes, after a pid was used again: cancel ends only what was recorded."""
    bystander = subprocess.Popen(["sleep", "300"], env=clean_environment(host.mam.home, host.mam.mark),
                                 start_new_session=True)
    job_id = host.job("true")
    job = host.registry.job(job_id)
    stale = {**core.identity_of(bystander.pid), "start": "1"}
    dead = {**core.identity_of(os.getpid()), "start": "1"}
    host.registry.save_run(job, {"supervisor": dead, "command": stale, "group": bystander.pid})
    host.mam("cancel", job_id, check=0)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_nothing_of_a_job_survives_it(host: Host) -> None:
    """Lost: a clean host: after an ordinary job no process of it is left."""
    result: Result = host.mam("delegate", "--agent-session", "exec:x", "--exec", "sleep 0.1", "--prompt", "p", check=0)
    assert "RESULT" in result.stdout
    poll(lambda: not marked_pids(host.mam.mark), 20, lambda: f"no process left, {marked_pids(host.mam.mark)}")

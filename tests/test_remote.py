"""Work on other hosts: a runner's life, and what the host that delegated makes of it.

Hosts are `Mam` objects that share nothing but a real broker. What each test says is what a user loses if it fails:
work that runs twice, or never, or goes on after it was cancelled; a prompt that hangs without a word.
"""
from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import pytest

from support import pause, poll, resume
from support.brokers import Broker
from support.cli import Background, Mam, Result
from support.daemons import UP_S, Post, unique
from support.inside import Inside, rows
from support.observer import Observer, retained

SECRET = "the-secret-of-these-tests-0123456789abcdef"
# The clocks of presences and of what waits for them, shorter; and every process of a host has these.
FAST = """
mam.PRESENCE_S, mam.SILENT_S, mam.SETTLE_S, mam.READ_BACK_S, mam.SPAWN_WAIT_S = 0.5, 4.0, 0.3, 2.0, 1.5
mam.CANCEL_WAIT_S = 20.0
mam.SELF_PATH = os.path.abspath(__file__)
"""
HOLD = "while [ ! -e go ]; do sleep 0.05; done\n"
DIE = "os.kill(os.getpid(), 9)"


@pytest.fixture
def inside(pyz: Path, session_folder: Path) -> Inside:
    return Inside(pyz, session_folder)


class Far:
    """A host `here` that delegates to remote:SESSION, and hosts that serve that session; all on one broker.

    A job's prompt is a shell script, which the runner's command, `sh`, reads from stdin.
    """

    def __init__(self, new_mam: Callable[..., Mam], inside: Inside, broker: Broker) -> None:
        self._new_mam, self.inside, self.module, self.broker = new_mam, inside, inside.module, broker
        self.session, self.root = unique("s"), unique("t") + "/jobs"
        self.key = self.module.session_key(SECRET, self.session)
        self.plain_here = self.host("here", MAM_DISPATCH_SECRET=SECRET)
        self.here = self.fast(self.plain_here)
        self.post = Post(self.here, inside)
        self.runner_hosts: List[Mam] = []
        self._there: Optional[Mam] = None

    def host(self, name: str, **env: str) -> Mam:
        host = self._new_mam(name)
        host.env.update({**self.broker.env(), "MAM_TOPIC_ROOT": self.root, "MAM_INSECURE_BROKER": "1",
                         "MAM_TERM_GRACE_S": "0.3", "MAM_LINGER_S": "0.5", **env})
        return host

    def fast(self, host: Mam, code: str = "") -> Mam:
        return self.inside.patched(host, FAST + code)

    def runner_host(self, name: str) -> Mam:
        self.runner_hosts.append(self.host(name, MAM_SESSION_KEY=self.key))
        return self.runner_hosts[-1]

    @property
    def there(self) -> Mam:
        self._there = self._there or self.runner_host("there")
        return self._there

    # ---- runners ---------------------------------------------------------------------------------------------

    def serve(self, *options: object, host: Optional[Mam] = None, code: str = "", wait: bool = True,
              **env: Optional[str]) -> Background:
        """Start a runner, and wait until it serves."""
        run = self.fast(host or self.there, code).popen(
            "remote", "run", "--session", self.session, "--exec", "sh", "--stdin", *options, env=dict(env))
        if wait:
            run.wait_for("serves remote:" + self.session, UP_S, "stderr")
        return run

    def folder(self, host: Optional[Mam] = None) -> Path:
        """The registry of a host's runner."""
        return (host or self.there).registry_dir / f"runner-{self.session}"

    def far_rows(self, sql: str, *params: object, host: Optional[Mam] = None) -> List[Any]:
        return rows(self.folder(host), sql, *params)

    def far_job(self, job_id: str, host: Optional[Mam] = None) -> Any:
        """The job as its runner keeps it; None if it knows of none."""
        if not (self.folder(host) / "mam.db").exists():
            return None
        with self.module.Registry(str(self.folder(host))) as registry:
            return next(iter(registry.jobs_by_id([job_id])), None)

    def wait_far(self, job_id: str, wanted: Callable[[Any], Any], host: Optional[Mam] = None) -> Any:
        def reached() -> Any:
            job = self.far_job(job_id, host)
            return job if job is not None and wanted(job) else None
        return poll(reached, UP_S, lambda: f"{self.far_job(job_id, host)}\n{self.describe()}")

    def runner_id(self, host: Optional[Mam] = None) -> str:
        return str(self.far_rows("SELECT value FROM meta WHERE key = 'runner_id'", host=host)[0][0])

    def commands(self, job_id: str, host: Optional[Mam] = None) -> List[int]:
        """The living processes of a job's command."""
        runs = [json.loads(row[0]) for row in self.far_rows(
            "SELECT run FROM attempts WHERE job_id = ? AND run IS NOT NULL", job_id, host=host)]
        groups = {run["group"] for run in runs if "group" in run}
        return [pid for group in groups for pid in self.module.group_members(group)]

    # ---- jobs ------------------------------------------------------------------------------------------------

    def words(self, script: str, *options: object) -> List[object]:
        return ["delegate", "--agent-session", "remote:" + self.session, "--prompt", script, *options]

    def delegate(self, script: str, *options: object, check: Any = None) -> Result:
        return self.here(*self.words(script, *options), check=check, timeout=90)

    def detach(self, script: str, *options: object) -> str:
        return self.delegate(script, "--detach", *options, check=0).stdout.strip()

    def wait_here(self, job_id: str, wanted: Callable[[Any], Any]) -> Any:
        def reached() -> Any:
            job = self.post.job(job_id)
            return job if wanted(job) else None
        return poll(reached, UP_S, lambda: f"{self.post.job(job_id)}\n{self.describe()}")

    def wait_spawned(self, job_id: str) -> Any:
        """The job as this host has it, once it knows that the command runs."""
        return self.wait_here(job_id, lambda job: job.claimed_at)

    def payloads(self, job_id: str) -> List[Dict[str, Any]]:
        """What this host has kept of a job's numbered events."""
        return [json.loads(row[0]) for row in self.post.rows(
            "SELECT payload FROM events WHERE job_id = ? AND seq IS NOT NULL ORDER BY attempt_id, seq", job_id)]

    def topic(self, job_id: str, kind: str) -> str:
        return f"{self.root}/{job_id}/{kind}"

    def kept(self, job_id: str) -> List[str]:
        """Which orders for a job the broker retains."""
        return [kind for kind in ("dispatch", "control") if retained(self.broker, self.topic(job_id, kind))]

    def wait_kept(self, job_id: str, *kinds: str) -> None:
        poll(lambda: self.kept(job_id) == list(kinds), UP_S, lambda: f"kept is {self.kept(job_id)}, {self.describe()}")

    def ran(self, host: Optional[Mam] = None, name: str = "ran") -> List[str]:
        """The lines that work has written in a host's workspace."""
        path = (host or self.there).workspace / name
        return path.read_text().splitlines() if path.exists() else []

    def order(self, script: str, job_id: str, now: float, attempt: int = 1, contract: Any = None,
              **data: Any) -> Tuple[str, bytes]:
        """A dispatch, signed as this host would, of a job that it knows nothing of: (topic, payload)."""
        made = self.module.attempt_keys(self.key, job_id, attempt, "t" * 32)[1]
        issued_at = self.module.utc_text(now)
        terms = {"agent": "a", "role": "r", "timeout_sec": 60, "idle_timeout_sec": 60, "heartbeat_sec": 30,
                 "heartbeat_misses": 4, "ack_timeout_sec": 60, "artifacts": []}
        fields = {"dispatch_token": "t" * 32, "attempt_id": attempt, "kid": made["kid"], "session": self.session,
                  "runner": self.runner_id(), "seq_base": 0, "issued_at": issued_at,
                  "expires_at": self.module.utc_text(now + 60), "prompt": script,
                  "contract": terms if contract is None else {**terms, **contract}, **data}
        payload = self.module.event_payload(job_id, 0, "dispatch", issued_at, "", fields)
        return self.topic(job_id, "dispatch"), self.module.sign(payload, made["control"])

    def go(self, host: Optional[Mam] = None) -> None:
        """Let what holds go on."""
        ((host or self.there).workspace / "go").touch()

    # ---- presences -------------------------------------------------------------------------------------------

    def presence_topic(self, runner: str) -> str:
        return f"{self.root}-runners/{self.session}/{runner}"

    def presence(self, runner: str, key: str = "", **changes: Any) -> Tuple[str, bytes, bool]:
        """The word of a runner that may not exist."""
        word = self.module.Presence(self.session, runner, "online", "ghost", "5.0.0", 1, 0, False, 100.0, "e" * 16, 1,
                                    self.module.utc_now())._replace(**changes)
        made = self.module.presence_message(self.root, word, self.module.derive_key(key or self.key, "presence"))
        return tuple(made)  # type: ignore[return-value]

    def haunt(self, runner: str, **changes: Any) -> None:
        """Leave a retained word of a runner that is not there."""
        with Observer(self.broker, None) as client:
            topic, raw, _ = self.presence(runner, **changes)
            client.publish(topic, raw, retain=True)

    def listed(self, check: Any = 0) -> Dict[str, Dict[str, Any]]:
        return {one["runner"]: one for one in self.here("remote", "list", "--json", check=check).json()}

    def describe(self) -> str:
        texts = [f"here: {self.post.log()[-2000:]}"]
        for host in self.runner_hosts:
            texts += [str(run)[-2000:] for run in host.background]
            log = self.folder(host) / "daemon.log"
            texts.append(log.read_text(errors="replace")[-2000:] if log.exists() else "no daemon.log")
        return "\n".join(texts)

    def check(self) -> None:
        for host in self.runner_hosts:
            log = self.folder(host) / "daemon.log"
            assert "Traceback" not in (log.read_text(errors="replace") if log.exists() else ""), self.describe()


@pytest.fixture
def make_far(new_mam: Callable[..., Mam], inside: Inside) -> Iterator[Callable[[Broker], Far]]:
    made: List[Far] = []

    def make(broker: Broker) -> Far:
        made.append(Far(new_mam, inside, broker))
        return made[-1]
    yield make
    for one in made:
        one.check()


@pytest.fixture
def far(make_far: Callable[[Broker], Far], mosquitto: Broker) -> Far:
    return make_far(mosquitto)


@pytest.fixture
def far_any(make_far: Callable[[Broker], Far], broker: Broker) -> Far:
    """On each kind of broker in turn."""
    return make_far(broker)


# ---- one job ---------------------------------------------------------------------------------------------------

def test_a_job_on_another_host_is_followed_like_a_local_one(far_any: Far, observe: Callable[..., Observer]) -> None:
    """The runner says `started`, that the command runs, and how it ended; both hosts keep the same events, and the
    broker keeps no order once the work has begun."""
    far = far_any
    watcher = observe(far.broker, far.root + "/#")
    far.serve()
    done = far.here.popen(*far.words(
        HOLD + "echo ran >> ran; $MAM_PUBLISH_CMD --event progress --detail 'half of it'; echo 'all of it'"))
    job_id = poll(lambda: far.post.rows("SELECT job_id FROM jobs") if far.post._has_file() else [], UP_S)[0][0]
    job = far.wait_spawned(job_id)
    assert (job.status, job.delivery, job.runner) == ("running", "sent", far.runner_id())
    far.wait_kept(job_id)
    far.go()
    result = done.wait()
    assert result.code == 0, result
    lines = result.stdout.splitlines()
    assert [line.split("seq=")[1].split()[1] for line in lines[:-1]] == ["started", "progress", "progress", "completed"]
    assert "all of it" in lines[-1] and lines[-1].startswith(f"RESULT job={job_id} completed")
    events = far.payloads(job_id)
    assert [event["seq"] for event in events] == [1, 2, 3, 4] and events[1]["data"]["spawned"] is True
    assert [row[0] for row in far.far_rows("SELECT payload FROM events WHERE job_id = ? AND seq IS NOT NULL ORDER BY "
                                           "seq", job_id)] == [far.module.canonical(event).decode() for event in events]
    sources = [row[0] for row in far.far_rows("SELECT source FROM events WHERE seq IS NOT NULL ORDER BY seq")]
    assert sources[:2] == ["runner", "_run"] and sources[3] == "_run"
    far.wait_kept(job_id)
    assert far.ran() == ["ran"] and not (far.here.workspace / "ran").exists()
    assert len({m.payload for m in watcher.messages("dispatch", job_id) if m.payload}) == 1
    end = json.loads(retained(far.broker, far.topic(job_id, "events")) or b"{}")
    state = json.loads(retained(far.broker, far.topic(job_id, "state")) or b"{}")
    assert (end.get("event"), end.get("seq"), state.get("status")) == ("completed", 4, "completed")


ENDS = [   # script, options, exit code, status and reason, in the detail
    ("echo bad >&2; exit 3", [], 1, ("error", None), "exit status 3: bad"),
    ("kill -9 $$", [], 1, ("error", None), "exit status 137"),
    ("sleep 60", ["--timeout", "1"], 2, ("error", "deadline_timeout"), "no end within 1s"),
    ("$MAM_PUBLISH_CMD --event error --detail 'gave up'; exit 0", [], 1, ("error", None), "gave up"),
]


def test_how_the_work_ended_is_the_exit_code_here(far: Far) -> None:
    """A script that calls `mam delegate` sees the failure of the work, wherever it was done."""
    far.serve("--parallel", 4)
    runs = [far.here.popen(*far.words(script, *options)) for script, options, *_ in ENDS]
    for run, (script, _, code, ended, detail) in zip(runs, ENDS):
        result = run.wait()
        assert result.code == code and detail in result.stdout, (script, result)
        job = far.post.job(result.stdout.splitlines()[-1].split("job=")[1].split()[0])
        assert (job.status, job.reason) == ended
        assert far.far_job(job.job_id).status == "error"
        assert far.commands(job.job_id) == []


def test_a_runner_whose_command_is_not_there_says_so(far: Far) -> None:
    """At once, and by its name; the default would be three minutes of silence."""
    run = far.fast(far.there).popen("remote", "run", "--session", far.session, "--exec", "no-such-agent -p")
    run.wait_for("serves remote:", UP_S, "stderr")
    result = far.delegate("x", check=1)
    assert "no-such-agent: not found" in result.stdout and "spawn_failed" in result.stdout


def test_the_work_sees_no_secret(make_far: Callable[[Broker], Far], own_broker: Any) -> None:
    """An agent that prints its environment must not give away the broker or the right to dispatch; and a broker's
    operator reads no key in what passes."""
    far = make_far(own_broker("mosquitto", user="mam", password="the-password-of-the-broker"))
    with Observer(far.broker, "#") as watcher:
        far.serve(MAM_DISPATCH_SECRET=SECRET)
        assert far.delegate("env > env.txt; echo done", check=0)
        crossed = b"\n".join(message.topic.encode() + message.payload for message in watcher.all)
    shown = (far.there.workspace / "env.txt").read_text()
    names = {line.partition("=")[0] for line in shown.splitlines()}
    assert {"JOB_ID", "MAM_ATTEMPT_ID", "MAM_DISPATCH_TOKEN", "MAM_PUBLISH_CMD", "MAM_REGISTRY_DIR"} <= names
    assert not names & {"MAM_DISPATCH_SECRET", "MAM_SESSION_KEY", "MQTT_PASSWORD"}
    for secret in (SECRET, far.key, "the-password-of-the-broker"):
        assert secret not in shown and secret.encode() not in crossed
    keys = [row for host in (far.here.registry_dir, far.folder()) for row in rows(
        host, "SELECT auth_token, remote_keys FROM attempts")]
    for auth_token, remote_keys in keys:
        made = json.loads(remote_keys) if remote_keys else {}
        for key in (auth_token, made.get("control"), made.get("presence")):
            assert key is None or key.encode() not in crossed


# ---- more than one job -------------------------------------------------------------------------------------------

def test_no_more_than_two_at_once_and_what_waits_does_not_die_of_waiting(far: Far) -> None:
    """Neither T nor the wall clock of a job runs out while it waits for a slot; all of them run, each once."""
    far.serve("--parallel", 2)
    log = "echo +$JOB_ID >> ran\n%secho -$JOB_ID >> ran"
    first = [far.detach(log % HOLD) for _ in range(2)]
    for job_id in first:
        far.wait_spawned(job_id)
    more = [far.detach(log % "", "--ack-timeout", 1, "--timeout", 3) for _ in range(3)]
    adopted = [far.wait_here(job_id, lambda job: job.last_event == "started") for job_id in more]
    last = max(float(job.last_event_mono.split()[1]) for job in adopted)
    poll(lambda: time.monotonic() - last > 4.0, 20, "longer than their clocks")
    for job_id in more:
        assert far.post.job(job_id).status == "running" and far.far_job(job_id).delivery == "none"
    far.go()
    for job_id in first + more:
        assert far.wait_here(job_id, lambda job: job.finished_at).status == "completed"
    busy, most = 0, 0
    for line in far.ran():
        busy += 1 if line[0] == "+" else -1
        most = max(most, busy)
    assert most == 2 and sorted(line[1:] for line in far.ran()) == sorted(2 * (first + more))


def test_once_takes_one_job_and_leaves(far: Far) -> None:
    """For a host that is made for one job: a second one would never run there, so it is not taken."""
    run = far.serve("--once")
    job_id = far.detach(HOLD + "echo ran >> ran")
    far.wait_spawned(job_id)
    refused = far.delegate("echo ran >> ran")
    assert refused.code == 1 and ("nobody serves" in refused.stdout or "takes no more work" in refused.stdout), refused
    far.go()
    assert run.wait().code == 0
    assert far.wait_here(job_id, lambda job: job.finished_at).status == "completed"
    assert far.ran() == ["ran"]
    poll(lambda: far.listed()[far.runner_id()]["state"] == "offline", UP_S, "said that it has left")


def test_drain_takes_what_waits_and_leaves(far: Far) -> None:
    """For a host that comes and goes: what has waited for it is done, and it ends by itself; also with nothing."""
    jobs = [far.detach("echo ran >> ran", "--wait-for-runner", 60) for _ in range(2)]
    far.post.wait_line()
    run = far.serve("--drain", "--parallel", 2)
    assert run.wait().code == 0
    for job_id in jobs:
        assert far.wait_here(job_id, lambda job: job.finished_at).status == "completed"
    assert far.ran() == ["ran"] * 2
    assert far.serve("--drain").wait().code == 0


def test_sigterm_answers_what_waits_and_lets_the_running_one_end(far_any: Far) -> None:
    """A reboot of the runner's host must not leave a job that is never heard of again."""
    far = far_any
    run = far.serve()
    running = far.detach(HOLD + "echo ran >> ran; echo 'and well'")
    far.wait_spawned(running)
    waiting = far.detach("echo never >> ran")
    far.wait_here(waiting, lambda job: job.last_event == "started")
    run.send_signal(signal.SIGTERM)
    assert run.wait().code == 0
    closed = far.wait_here(waiting, lambda job: job.finished_at)
    assert (closed.status, closed.reason) == ("error", "spawn_failed")
    assert closed.detail == "the runner was ended before it began"
    assert far.post.job(running).status == "running"
    poll(lambda: far.listed()[far.runner_id()]["state"] == "offline", UP_S, "offline")
    far.go()
    job = far.wait_here(running, lambda job: job.finished_at)
    assert (job.status, job.detail) == ("completed", "and well") and far.ran() == ["ran"]


# ---- the runner dies -----------------------------------------------------------------------------------------------

def test_killed_between_adoption_and_started_it_goes_on_when_it_comes_back(far: Far) -> None:
    """The order has left the broker's hands: nobody else would ever carry it out."""
    run = far.serve(code=f"mam.Runner._announce = lambda self, job: {DIE}")
    job_id = far.detach("echo ran >> ran", "--ack-timeout", 60)
    poll(lambda: run.code is not None, UP_S, "dead")
    job = far.far_job(job_id)
    assert (job.status, job.last_event, job.delivery) == ("pending", None, "none")
    far.serve()
    assert far.wait_here(job_id, lambda job: job.finished_at).status == "completed"
    assert far.ran() == ["ran"]


def test_killed_between_started_and_spawning_it_goes_on_when_it_comes_back(far: Far) -> None:
    run = far.serve(code=f"mam.start_run = lambda *of: {DIE}")
    job_id = far.detach("echo ran >> ran")
    poll(lambda: run.code is not None, UP_S, "dead")
    assert far.far_job(job_id).delivery == "none"
    far.serve()
    assert far.wait_here(job_id, lambda job: job.finished_at).status == "completed"
    assert far.ran() == ["ran"]


@pytest.mark.parametrize("where", ["mam.spawn_self = lambda *of, **more: " + DIE,
                                   "mam.Registry.adopt_run = lambda *of: " + DIE], ids=["runner", "_run"])
def test_killed_while_it_starts_the_command_it_never_starts_it_again(far: Far, where: str) -> None:
    """Whether it ran cannot be told: a job that was run twice may have done its damage twice."""
    run = far.serve(code=where)
    job_id = far.detach("echo ran >> ran")
    far.wait_far(job_id, lambda job: job.delivery == "sending")
    if "spawn_self" in where:
        poll(lambda: run.code is not None, UP_S, "dead")
        far.serve()
    job = far.wait_here(job_id, lambda job: job.finished_at)
    assert (job.status, job.reason) == ("error", "supervisor_lost") and "cannot be told" in job.detail
    assert far.ran() == [] and far.far_job(job_id).status == "error"


def test_a_runner_follows_on_what_the_last_one_left_running(far: Far) -> None:
    """After a SIGTERM an ordinary daemon looks after it; the next runner takes its place, and counts the slot."""
    first = far.serve()
    job_id = far.detach(HOLD + "echo ran >> ran")
    far.wait_spawned(job_id)
    assert first.stop().code == 0
    poll(lambda: json.loads((far.far_rows("SELECT value FROM meta WHERE key = 'daemon'") or [["{}"]])[0][0]), UP_S,
         "a daemon")
    far.serve()
    waiting = far.detach("echo next >> ran")
    far.wait_here(waiting, lambda job: job.last_event == "started")
    assert far.listed()[far.runner_id()]["busy"] == 2
    assert far.far_job(waiting).delivery == "none"
    far.go()
    for one in (job_id, waiting):
        assert far.wait_here(one, lambda job: job.finished_at).status == "completed"
    assert far.ran() == ["ran", "next"]


def test_a_delegator_killed_before_it_handed_over_loses_nothing(far: Far) -> None:
    far.serve()
    run = far.fast(far.plain_here, f"mam._hand_over = lambda *of: {DIE}").popen(*far.words("echo ran >> ran"))
    poll(lambda: run.code is not None, UP_S, "dead")
    job_id = far.post.rows("SELECT job_id FROM jobs")[0][0]
    assert far.wait_here(job_id, lambda job: job.finished_at).status == "completed" and far.ran() == ["ran"]


def test_work_outlives_its_runner_and_is_reported(far_any: Far) -> None:
    """kill -9 of the runner costs nothing: the command's own supervisor reports, and the next runner follows it on."""
    far = far_any
    run = far.serve()
    job_id = far.detach(HOLD + "echo ran >> ran; echo survived")
    far.wait_spawned(job_id)
    run.kill()
    far.serve()
    assert far.far_job(job_id).status == "running"
    assert far.listed()[far.runner_id()]["busy"] == 1
    far.go()
    job = far.wait_here(job_id, lambda job: job.finished_at)
    assert (job.status, job.detail) == ("completed", "survived") and far.ran() == ["ran"]


def test_work_is_reported_though_no_runner_comes_back(far: Far) -> None:
    run = far.serve()
    job_id = far.detach(HOLD + "echo ran >> ran; echo survived")
    far.wait_spawned(job_id)
    run.kill()
    far.go()
    job = far.wait_here(job_id, lambda job: job.finished_at)
    assert (job.status, job.detail) == ("completed", "survived") and far.ran() == ["ran"]


def test_killed_with_the_commands_supervisor_the_work_is_ended_and_closed(far: Far) -> None:
    """Its exit can no longer be seen: the command must not go on unwatched, nor be run again."""
    run = far.serve()
    job_id = far.detach("echo ran >> ran\n" + HOLD)
    far.wait_spawned(job_id)
    supervisor = json.loads(far.far_rows("SELECT run FROM attempts")[0][0])["supervisor"]["pid"]
    run.kill()
    os.kill(supervisor, signal.SIGKILL)
    assert far.commands(job_id)
    far.serve()
    job = far.wait_here(job_id, lambda job: job.finished_at)
    assert (job.status, job.reason) == ("error", "supervisor_lost")
    poll(lambda: not far.commands(job_id), UP_S, "the command is gone")
    assert far.ran() == ["ran"]


EXPIRED_S = 7200


def test_killed_between_adoption_and_refusal_it_does_not_run_when_it_comes_back(far: Far) -> None:
    """Yesterday's dispatch was not to run; a crash at the wrong moment must not make it."""
    run = far.serve(code=f"mam.Runner._answer = lambda self, job: {DIE}")
    with Observer(far.broker, far.root + "/#") as watcher:
        watcher.publish(*far.order("echo never >> ran", "old", time.time() - EXPIRED_S))
        poll(lambda: run.code is not None, UP_S, "dead")
        assert far.far_job("old").status == "pending"
        far.serve()
        answer = watcher.wait_for(lambda m: m.topic == far.topic("old", "events") and m.payload, UP_S).json()
    assert answer["event"] == "error" and answer["data"]["reason"] == "spawn_failed"
    assert "was good until" in answer["detail"]
    assert far.delegate("echo next >> ran", check=0) and far.ran() == ["next"]


# ---- several runners -------------------------------------------------------------------------------------------------

def test_a_newcomer_waits_and_takes_over_after_silence(far_any: Far) -> None:
    """Two that serve one session without --pool would both start an agent in the same place."""
    far = far_any
    second = far.runner_host("second")
    first_run = far.serve()
    run = far.serve(host=second, wait=False)
    run.wait_for("this one waits until it has been silent", UP_S, "stderr")
    assert far.delegate("echo first >> ran", check=0)
    assert far.ran() == ["first"] and far.ran(second) == []
    pause(first_run.pid)           # no last will: its connection stands
    run.wait_for(f"runner {far.runner_id(second)} serves remote:{far.session}", UP_S, "stderr")
    assert far.delegate("echo second >> ran", check=0)
    assert far.ran() == ["first"] and far.ran(second) == ["second"]
    resume(first_run.pid)          # it came first: the newcomer steps back
    run.wait_for("came first: this one takes nothing more", UP_S, "stderr")
    poll(lambda: far.listed()[far.runner_id(second)]["state"] == "offline", UP_S, "offline")
    assert far.delegate("echo first >> ran", check=0)
    assert far.ran() == ["first"] * 2 and far.ran(second) == ["second"]


def test_a_newcomer_takes_over_at_once_from_one_that_died(far: Far) -> None:
    """By the last will: no ten seconds of silence after a crash."""
    second = far.runner_host("second")
    first_run = far.serve()
    run = far.serve(host=second, wait=False)
    run.wait_for("this one waits", UP_S, "stderr")
    first_run.kill()
    run.wait_for(f"runner {far.runner_id(second)} serves", UP_S, "stderr")
    assert far.delegate("echo second >> ran", check=0) and far.ran(second) == ["second"]


def test_of_two_that_start_at_once_one_serves(far_any: Far) -> None:
    far = far_any
    hosts = [far.runner_host(f"host{number}") for number in range(2)]
    runs = [far.serve(host=host, wait=False) for host in hosts]

    def serving() -> List[str]:
        found = [rows(far.folder(host), "SELECT value FROM meta WHERE key = 'daemon'") for host in hosts
                 if (far.folder(host) / "mam.db").exists()]
        return [json.loads(one[0][0])["runner"]["state"] for one in found if one]
    poll(lambda: all("serves remote:" in run.stderr for run in runs), UP_S, "both have looked")
    poll(lambda: sorted(serving()) == ["serving", "waiting"], UP_S, lambda: f"{serving()} {far.describe()}")
    for _ in range(2):
        far.delegate("echo ran >> ran", check=0)
    assert sorted(far.ran(host) for host in hosts) == [[], ["ran"] * 2]


def test_a_pools_job_goes_to_the_least_loaded(far_any: Far) -> None:
    """Else one host works through a queue while others wait."""
    far = far_any
    hosts = [far.runner_host(f"host{number}") for number in range(3)]
    for host in hosts:
        far.serve("--pool", "--parallel", 2, host=host, wait=False)
    poll(lambda: [one["state"] for one in far.listed().values()] == ["online"] * 3, UP_S, "three are online")
    jobs = []
    for number in range(6):
        jobs.append(far.detach(HOLD + "echo $JOB_ID >> ran"))
        far.wait_spawned(jobs[-1])
        loads = sorted(len([job for job in jobs if far.far_job(job, host)]) for host in hosts)
        assert max(loads) - min(loads) <= 1, (number, loads)
    assert all(one["busy"] == 2 == one["slots"] and one["pool"] for one in far.listed().values())
    for host in hosts:
        far.go(host)
    for job_id in jobs:
        assert far.wait_here(job_id, lambda job: job.finished_at).status == "completed"
    assert sorted(line for host in hosts for line in far.ran(host)) == sorted(jobs)


# Runners, (busy, how they are known, of a pool), seconds since their session is listened to, and who is given the job:
# "" nobody yet, "closed" nobody at all. PRESENCE_S and SETTLE_S are the real ones.
CHOICES = [
    ({}, 0.5, ""), ({}, 1.5, "closed"),
    ({"a": (0, "lives", False)}, 0.1, "a"),
    ({"a": (0, "kept", False)}, 0.1, "a"),                    # the only one there is: tried at once
    ({"a": (0, "kept", False)}, 6.5, "closed"),               # by now it would have given a sign of life
    ({"a": (0, "kept", True)}, 0.1, ""),                      # of a pool: news of others may be on its way
    ({"a": (0, "gone", False)}, 1.5, "closed"),
    ({"a": (1, "lives", True), "b": (0, "lives", True)}, 0.1, "b"),
    ({"a": (1, "lives", True), "b": (0, "kept", True)}, 0.1, ""),        # it may be about to speak
    ({"a": (1, "lives", True), "b": (0, "kept", True)}, 6.5, "a"),
    ({"a": (1, "lives", True), "b": (1, "kept", True)}, 0.1, "a"),       # nothing is gained by waiting
    ({"a": (1, "lives", True), "b": (2, "kept", True)}, 0.1, "a"),
    ({"a": (1, "lives", False), "b": (0, "kept", False)}, 0.1, "a"),
    ({"a": (1, "lives", True), "b": (0, "gone", True)}, 0.1, "a"),
    ({"a": (0, "lives", True), "b": (0, "lives", True)}, 0.1, "a"),
]


@pytest.mark.parametrize("runners, listened_s, chosen", CHOICES)
def test_who_is_given_a_job(inside: Inside, runners: Dict[str, Any], listened_s: float, chosen: str) -> None:
    """The least loaded of those that live: else one host works through a queue while others wait."""
    module, now = inside.module, time.monotonic()
    dispatcher = module.Dispatcher(None, None, None)
    job = module.Job(**{**dict.fromkeys(module.Job._fields), "job_id": "j", "topic_prefix": "r/j",
                        "agent_session": "remote:s", "delivered_mono": module.instant()})
    dispatcher._filters[module.presence_filter("r/j", "s")] = (1, now - listened_s)
    for name, (busy, known, pool) in runners.items():
        presence = module.Presence("s", name, "offline" if known == "gone" else "online", "h", "5", 4, busy, pool, 1.0,
                                   name, 1, module.utc_now())
        dispatcher._seen[("s", name)] = module._Seen(presence, now - 1 if known == "lives" else None)
    given: List[str] = []
    dispatcher._assign = lambda job, runner, loads: given.append(runner)
    dispatcher.give_up = lambda job_id, why: given.append("closed")
    dispatcher._choose(job, now, {})
    assert given == ([chosen] if chosen else [])


def test_a_second_runner_in_one_workspace_is_refused(far: Far) -> None:
    """Both would take what is addressed to their one id."""
    run = far.serve()
    again = far.fast(far.there)("remote", "run", "--session", far.session, "--exec", "sh", check=5)
    assert f"a runner of remote:{far.session} runs here already (process {run.pid})" in again.stderr
    other = far.inside.patched(far.there, FAST).popen(
        "remote", "run", "--session", far.session, "--exec", "sh", "--registry-dir", far.there.folder / "elsewhere")
    other.wait_for("this one waits", UP_S, "stderr")
    assert far.delegate("echo ran >> ran; echo good", check=0)


def test_a_runner_and_a_delegator_in_one_workspace(far: Far) -> None:
    """Their registries are apart: the job of one name is not the job of the other."""
    far.plain_here.env["MAM_SESSION_KEY"] = far.key
    far.serve(host=far.plain_here)
    result = far.delegate("echo ran >> ran", check=0)
    job_id = result.stdout.splitlines()[-1].split("job=")[1].split()[0]
    assert far.post.job(job_id).transport == "remote" and far.far_job(job_id, far.plain_here).transport == "local"


# ---- nobody there ----------------------------------------------------------------------------------------------------

def test_nobody_serves_is_said_at_once(far_any: Far) -> None:
    """Not after three minutes of waiting for an agent that cannot come."""
    far = far_any
    began = time.monotonic()
    result = far.delegate("x", check=1)
    assert f"nobody serves remote:{far.session} (mam remote list)" in result.stdout and "spawn_failed" in result.stdout
    assert time.monotonic() - began < 20
    assert far.here("remote", "list", check=0).stdout == "no runner has ever served a session on this broker\n"


def test_a_dispatch_to_a_dead_runner_is_withdrawn(far_any: Far) -> None:
    """A broker that lost its runner's last will still says "online": the job must not wait for a ghost, nor run when
    that comes back tomorrow."""
    far = far_any
    far.haunt("0123456789abcdef")
    with Observer(far.broker, far.root + "/#") as watcher:
        result = far.delegate("x", check=1)
        assert f"runner 0123456789abcdef does not serve remote:{far.session} any more" in result.stdout
        job_id = result.stdout.splitlines()[-1].split("job=")[1].split()[0]
        assert watcher.messages("dispatch", job_id), "it was given to the one that is said to be there"
    poll(lambda: "dispatch" not in far.kept(job_id), UP_S, "the dispatch is withdrawn")
    assert json.loads(retained(far.broker, far.topic(job_id, "control")) or b"{}").get("event") == "cancel"


def test_a_job_waits_for_its_runner_if_asked_to(far_any: Far) -> None:
    far = far_any
    waits = far.here.popen(*far.words("echo ran >> ran", "--wait-for-runner", 60))
    far.post.wait_line()
    poll(lambda: far.post.rows("SELECT 1 FROM jobs WHERE delivery = 'sending'"), UP_S, "handed over")
    far.post.wait_look(4)
    assert waits.code is None
    far.serve()
    assert waits.wait().code == 0 and far.ran() == ["ran"]


def test_a_job_does_not_wait_longer_than_asked(far: Far) -> None:
    result = far.delegate("x", "--wait-for-runner", 1, check=1)
    assert f"nobody has served remote:{far.session} for 1s" in result.stdout


# ---- cancel ----------------------------------------------------------------------------------------------------------

def test_cancel_reaches_the_runner_and_is_answered(far_any: Far) -> None:
    """`mam cancel` comes back when the work over there has ended, its children too; and nothing of it stays behind."""
    far = far_any
    far.serve()
    job_id = far.detach("sleep 600 & echo ran >> ran\n" + HOLD)
    far.wait_spawned(job_id)
    poll(far.ran, UP_S, "at work")
    result = far.here("cancel", job_id, "--detail", "no longer needed", check=0)
    assert f"job {job_id} is cancelled, and runner {far.runner_id()} has ended it" in result.stderr
    assert (far.post.job(job_id).status, far.post.job(job_id).detail) == ("cancelled", "no longer needed")
    assert (far.far_job(job_id).status, far.far_job(job_id).reason) == ("cancelled", "cancelled")
    poll(lambda: not far.commands(job_id), UP_S, "the whole group is gone")
    far.wait_kept(job_id)
    state = json.loads(retained(far.broker, far.topic(job_id, "state")) or b"{}")
    assert state["status"] == "cancelled"
    assert "late" in far.post.notes(job_id) and "answered" in far.post.notes(job_id)
    again = far.here("cancel", job_id, check=0)
    assert "already" in again.stderr
    assert far.delegate("echo more >> ran", check=0) and far.ran() == ["ran", "more"], "the slot is free again"


@pytest.mark.parametrize("words, ended", [
    (["close", "--request", "unresponsive"], ("error", "unresponsive")),
    (["status", "--set", "completed"], ("completed", "operator")),
    (["status", "--set", "error"], ("error", "operator"))], ids=lambda value: str(value[-1]))
def test_whatever_ends_a_job_here_ends_its_work_there(far: Far, words: List[str], ended: Tuple[str, str]) -> None:
    """An operator's word is obeyed on both hosts: the two must not tell different stories for ever."""
    far.serve()
    job_id = far.detach("echo ran >> ran\n" + HOLD)
    far.wait_spawned(job_id)
    far.here(words[0], job_id, *words[1:], check=0)
    job = far.wait_far(job_id, lambda job: job.finished_at)
    assert (job.status, job.reason) == ended
    poll(lambda: not far.commands(job_id), UP_S, "the command is gone")
    far.wait_kept(job_id)
    assert (far.post.job(job_id).status, far.post.job(job_id).reason) == ended
    state = json.loads(retained(far.broker, far.topic(job_id, "state")) or b"{}")
    assert (state["status"], state["data"]["reason"]) == ended


def test_a_job_that_waits_for_a_slot_is_cancelled_and_never_runs(far: Far) -> None:
    far.serve()
    first = far.detach(HOLD)
    far.wait_spawned(first)
    waiting = far.detach("echo never >> ran")
    far.wait_here(waiting, lambda job: job.last_event == "started")
    assert "has ended it" in far.here("cancel", waiting, check=0).stderr
    far.go()
    far.wait_here(first, lambda job: job.finished_at)
    assert far.delegate("echo last >> ran", check=0) and far.ran() == ["last"]


def test_a_runner_that_is_away_obeys_when_it_comes_back(far_any: Far) -> None:
    """The cancel waits on the broker for it; once it has answered, the broker keeps nothing more."""
    far = far_any
    run = far.serve()
    job_id = far.detach("echo ran >> ran\n" + HOLD)
    far.wait_spawned(job_id)
    run.kill()
    result = far.fast(far.plain_here, "mam.CANCEL_WAIT_S = 0.5")("cancel", job_id, check=0)
    assert f"runner {far.runner_id()} has not answered yet" in result.stderr
    far.wait_kept(job_id, "control")
    assert far.commands(job_id), "it still works over there"
    far.serve()
    poll(lambda: not far.commands(job_id), UP_S, far.describe)
    assert far.wait_far(job_id, lambda job: job.finished_at).status == "cancelled"
    far.wait_kept(job_id)
    assert far.post.job(job_id).status == "cancelled" and "answered" in far.post.notes(job_id)


def test_a_cancel_that_comes_before_its_dispatch_keeps_the_work_from_running(far: Far) -> None:
    """A runner that was away finds both on the broker: it must not begin what is over."""
    far.serve("--once", wait=False)
    poll(lambda: (far.folder() / "mam.db").exists() and far.far_rows(
        "SELECT value FROM meta WHERE key = 'runner_id'"), UP_S, "it has an id")
    far.there.background[-1].stop()
    far.haunt(far.runner_id())
    with Observer(far.broker, far.root + "/#") as watcher:
        job_id = far.detach("echo never >> ran")
        dispatch = watcher.wait_for(lambda m: m.topic == far.topic(job_id, "dispatch") and m.payload, UP_S)
        far.fast(far.plain_here, "mam.CANCEL_WAIT_S = 0.1")("cancel", job_id, check=0)
        far.wait_kept(job_id, "control")
        watcher.publish(dispatch.topic, dispatch.payload, retain=True)
        run = far.serve()
        far.wait_far(job_id, lambda job: job.status == "cancelled")
        poll(lambda: retained(far.broker, far.topic(job_id, "control")) is None, UP_S, "its answer retires the control")
        watcher.publish(dispatch.topic, b"", retain=True)
    assert far.delegate("echo next >> ran", check=0)
    assert far.ran() == ["next"] and run.code is None


# ---- what a broker may do --------------------------------------------------------------------------------------------

def denying(far_session: str, kind: str, own_broker: Any) -> Broker:
    """A broker that acknowledges dispatches, and keeps none."""
    options: Dict[str, Any] = {"user": "mam", "password": "pw"}
    if kind == "nats":
        return own_broker(kind, permissions={"mam": {"publish": {"deny": ["denied.jobs.*.dispatch"]}}}, **options)
    acl = "user mam\ntopic readwrite #\ntopic deny denied/jobs/+/dispatch"
    return own_broker(kind, acl=acl, **options)


def test_a_denied_dispatch_is_noticed(make_far: Callable[[Broker], Far], own_broker: Any, broker_kind: str) -> None:
    """The broker's acknowledgement means nothing: without reading back, the job would wait for ever."""
    far = make_far(denying("", broker_kind, own_broker))
    far.root = "denied/jobs"
    for host in (far.plain_here, far.here, far.there):
        host.env["MAM_TOPIC_ROOT"] = far.root
    far.serve()
    result = far.delegate("echo never >> ran", check=1)
    assert "the broker has acknowledged the dispatch and not kept it" in result.stdout
    assert "/dispatch" in result.stdout and far.ran() == []


NOW_S = time.time()
HOSTILE_ORDERS = [   # what a dispatch for this runner has instead, and what its answer says
    ({"now": NOW_S - EXPIRED_S}, "was good until"), ({"now": NOW_S + 3 * EXPIRED_S}, "set the clocks"),
    ({"contract": {"timeout_sec": -1}}, "timeout_sec"), ({"contract": {"heartbeat_misses": "4"}}, "heartbeat_misses"),
    ({"contract": {"artifacts": ["../../etc/passwd"]}}, "no relative paths"),
    ({"contract": {"artifacts": ["/etc/passwd"]}}, "no relative paths"), ({"prompt": None}, "no prompt"),
    ({"seq_base": -1}, "seq_base"), ({"expires_at": 5}, "no issued_at or expires_at"),
]


def test_an_order_that_cannot_be_carried_out_is_answered_with_why(far: Far) -> None:
    """In words, with the key of the attempt: who sent it must not wait for its clocks, nor guess."""
    far.serve()
    with Observer(far.broker, far.root + "/#") as watcher:
        for number, (changes, _) in enumerate(HOSTILE_ORDERS):
            watcher.publish(*far.order("echo never >> ran", f"j{number}", **{"now": time.time(), **changes}))
        for number, (_, said) in enumerate(HOSTILE_ORDERS):
            message = watcher.wait_for(lambda m: m.topic == far.topic(f"j{number}", "events") and m.payload, UP_S)
            event_key = far.module.attempt_keys(far.key, f"j{number}", 1, "t" * 32)[0]
            payload, _text = far.module.accept_message(message.topic, message.payload, f"{far.root}/j{number}",
                                                       "events", {1: ("t" * 32, event_key)})
            assert payload["data"]["reason"] == "spawn_failed" and said in payload["detail"], payload
    assert far.delegate("echo next >> ran", check=0) and far.ran() == ["next"]


def test_an_order_that_is_repeated_runs_once(far: Far, observe: Callable[..., Observer]) -> None:
    """A broker, or somebody who recorded it, may send it again: while it runs, and when it is done."""
    watcher = observe(far.broker, far.root + "/#")
    far.serve("--parallel", 4)
    job_id = far.detach("echo ran >> ran\n" + HOLD)
    order = watcher.wait_for(lambda m: m.topic == far.topic(job_id, "dispatch") and m.payload, UP_S)
    far.wait_spawned(job_id)
    for _ in range(3):
        watcher.publish(order.topic, order.payload)
    far.go()
    assert far.wait_here(job_id, lambda job: job.finished_at).status == "completed"
    watcher.publish(order.topic, order.payload)
    watcher.publish(*far.order("echo replaced >> ran", job_id, time.time()))       # another token: a conflict
    assert far.delegate("echo next >> ran", check=0) and far.ran() == ["ran", "next"]
    assert "is conflict" in far.there.background[-1].stderr


def test_nothing_on_the_wire_ends_a_runner_or_a_daemon(far_any: Far) -> None:
    """Anybody who may publish could stop all work, else."""
    far = far_any
    run = far.serve()
    job_id = far.detach(HOLD + "echo ran >> ran")
    far.wait_spawned(job_id)
    daemon = far.post.pid()
    good = json.loads(far.order("x", "j1", time.time())[1])
    odd = [{**good, "data": {**good["data"], **change}} for change in (
        {"kid": [1]}, {"kid": {}}, {"kid": None}, {"session": []}, {"attempt_id": 2 ** 53}, {"attempt_id": "1"},
        {"dispatch_token": []}, {"hmac_sig": 5}, {"hmac_sig": "\u00e9" * 64})]
    raws = [b"", b"\xff", b"null", b"[" * 5000, b"{}", b'{"data":{}}', b"x" * 300000, *[
        json.dumps(one).encode() for one in odd]]
    ghost = json.loads(far.presence("f" * 16)[1])
    raws += [json.dumps({**ghost, "data": {**ghost["data"], name: value}}).encode()
             for name in ("session", "runner", "instance", "beat") for value in (None, [], {}, 1e300)]
    topics = [far.topic("j1", "dispatch"), far.topic("j1", "control"), far.topic(job_id, "control"),
              far.topic(job_id, "events"), far.topic(job_id, "state"), far.presence_topic("f" * 16),
              far.topic("\u00e9", "control")]
    if far.broker.kind == "mosquitto":                # the other ends the connection of who publishes there
        topics.append(far.topic("a b", "dispatch"))
    with Observer(far.broker, None) as client:
        for raw in raws:
            for topic in topics:
                client.publish(topic, raw, wait=False)
        client.publish(far.topic("j1", "dispatch"), b"the last of it")
    assert run.code is None
    far.go()
    assert far.wait_here(job_id, lambda job: job.finished_at).status == "completed"
    assert far.delegate("echo ran >> ran", check=0) and far.ran() == ["ran"] * 2
    assert run.code is None and far.post.pid() == daemon, far.describe()


# The registry's writer lock is refused as on a full disk while the file FLAG is there.
FULL_DISK = """
import sqlite3
def full(self, sql, params=(), real=mam.Registry._execute):
    if sql == "BEGIN IMMEDIATE" and os.path.exists({flag!r}):
        open({flag!r} + ".met", "w").close()
        raise self._sql_error(sqlite3.OperationalError("database or disk is full"))
    return real(self, sql, params)
mam.Registry._execute = full
"""


def test_an_order_that_comes_while_the_disk_is_full_is_carried_out_later(far: Far) -> None:
    """The broker has its acknowledgement and does not send it again: forgotten, the job would die of T."""
    flag = far.there.folder / "full"
    far.serve(code=FULL_DISK.format(flag=str(flag)))
    job_id = unique("full")
    with Observer(far.broker, None) as client:
        order = far.order("echo ran >> ran", job_id, time.time())
        flag.touch()
        client.publish(*order)
        poll((flag.parent / "full.met").exists, UP_S, "it tried")
        client.publish(*far.order("echo and >> ran", job_id + "2", time.time()))
        flag.unlink()
        far.wait_far(job_id + "2", lambda job: job.finished_at)
        far.wait_far(job_id, lambda job: job.finished_at)
    assert sorted(far.ran()) == ["and", "ran"]


def test_a_dispatch_read_back_while_the_disk_is_full_is_noted_later(far: Far) -> None:
    """From then on the clocks run. Else a job whose runner is there and says nothing would hang for ever."""
    met = far.plain_here.folder / "met"
    far.here = far.fast(far.plain_here, f"""
def once(self, job_id, attempt, before, after, real=mam.Registry.move_delivery):
    if after == "sent" and not os.path.exists({str(met)!r}):
        open({str(met)!r}, "w").close()
        raise mam.MamError("the disk is full", exit=mam.Exit.NOT_RECORDED, code="disk_full")
    return real(self, job_id, attempt, before, after)
mam.Registry.move_delivery = once
""")
    far.serve(code="mam.Runner._dispatch = lambda self, payload: None")
    result = far.delegate("x", "--ack-timeout", 1, check=1)
    assert "agent_blocked" in result.stdout and met.exists(), result


def test_what_was_never_answered_is_not_kept_for_ever(far: Far) -> None:
    """A runner that is gone for good: after a day the broker keeps nothing for it, and the daemon may leave."""
    far.here = far.fast(far.plain_here, "mam.ANSWER_WAIT_S = 1.0\nmam.IDLE_LEAVE_S = 0.5")
    far.haunt("0123456789abcdef")
    result = far.delegate("x", check=1)
    job_id = result.stdout.splitlines()[-1].split("job=")[1].split()[0]
    far.wait_kept(job_id)
    far.post.wait_gone()


def test_a_runner_that_the_broker_refuses_says_so(make_far: Callable[[Broker], Far], own_broker: Any) -> None:
    """Exit 3 and what to look at, not a process that tries for ever and looks alive."""
    far = make_far(own_broker("mosquitto", user="mam", password="pw"))
    host = far.fast(far.there, "mam.BACKOFF_BASE_S = mam.BACKOFF_MAX_S = 0.1")
    result = host("remote", "run", "--session", far.session, "--exec", "sh", check=3, env={"MQTT_PASSWORD": "wrong"})
    assert "mam: check .mam.env on this host" in result.stderr and "wrong" not in result.stderr


def test_a_runner_with_the_key_of_another_session_serves_nobody(far: Far) -> None:
    """Its presence counts for nothing, so no prompt goes there; and `remote list` hints at it."""
    far.there.env["MAM_SESSION_KEY"] = far.module.session_key(SECRET, "another")
    far.serve()
    assert "nobody serves" in far.delegate("echo never >> ran", check=1).stdout
    listed = far.here("remote", "list", "--json", check=0)
    assert listed.json() == [] and "signed with another secret than MAM_DISPATCH_SECRET here" in listed.stderr
    assert far.ran() == []


# ---- what is checked where -------------------------------------------------------------------------------------------

def test_artifacts_are_checked_where_the_work_was_done(far: Far) -> None:
    """Their size and sum are in the log here, so a later copy can be checked; a missing one is no success."""
    far.serve()
    content = b"the result\n" * 100
    result = far.delegate("mkdir -p out; for i in $(seq 100); do echo the result; done > out/report.txt",
                          "--artifact", "out/report.txt", check=0)
    job_id = result.stdout.splitlines()[-1].split("job=")[1].split()[0]
    last = far.payloads(job_id)[-1]
    assert last["data"]["artifacts"] == [
        {"name": "out/report.txt", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}]
    first_end = next(event for event in far.payloads(job_id) if event["event"] == "completed")
    assert first_end["data"]["settles"] is False and first_end["seq"] < last["seq"]
    assert far.post.job(job_id).status == "completed"
    missing = far.delegate("echo done", "--artifact", "out/none.txt", check=1)
    assert "artifact_missing" in missing.stdout and "missing artifact: out/none.txt" in missing.stdout


def test_a_job_runs_on_until_its_artifacts_are_checked(far: Far) -> None:
    """`completed` alone would call a job done whose result may not be there."""
    slow = """
def slow(path, name, stop, real=mam.describe_file):
    import time
    while not os.path.exists(os.path.join(os.path.dirname(path), "checked")):
        time.sleep(0.02)
    return real(path, name, stop)
mam.describe_file = slow
"""
    far.serve(code=slow)
    job_id = far.detach("echo x > x; echo done", "--artifact", "x")
    job = far.wait_here(job_id, lambda job: job.last_event == "completed")
    assert (job.status, job.phase, job.outcome, job.finished_at) == ("running", "validating", None, None)
    far.post.wait_look(3)
    assert far.post.job(job_id).status == "running"
    assert "validating" in far.here("list", check=0).stdout
    (far.there.workspace / "checked").touch()
    job = far.wait_here(job_id, lambda job: job.finished_at)
    assert (job.status, job.phase, job.outcome) == ("completed", None, "completed")


def test_validation_runs_where_the_job_was_delegated(far: Far) -> None:
    """The one who asked decides, with what is there: after the result was fetched, for example."""
    far.serve()
    far.here.stub("judge", "#!/bin/sh\necho \"$1\" >> judged\ntest \"$1\" = good\n")
    result = far.delegate("echo ran >> ran; echo x > x", "--artifact", "x", "--validate", "judge good", check=0)
    assert (far.here.workspace / "judged").read_text() == "good\n" and not (far.there.workspace / "judged").exists()
    assert "completed" in result.stdout.splitlines()[-1]
    failed = far.delegate("echo ran >> ran", "--validate", "judge bad", check=1)
    assert "validation_failed" in failed.stdout.splitlines()[-1]
    job_id = failed.stdout.splitlines()[-1].split("job=")[1].split()[0]
    assert far.far_job(job_id).status == "completed", "the runner's attempt was a success all the same"
    assert far.ran() == ["ran"] * 2


# ---- presence --------------------------------------------------------------------------------------------------------

def test_remote_list_tells_who_serves_and_who_does_not(far_any: Far) -> None:
    """online: there, and said so just now. offline: its last will. silent: the broker keeps its word and nobody stands
    behind it. What others signed is counted, and shown to nobody."""
    far = far_any
    run = far.serve("--parallel", 3)
    mine = far.runner_id()
    ghost = "f" * 16               # neither the first by its time nor by its name: the runner goes on serving
    far.haunt(ghost, host="ghost\x1b[31m", serving_s=0.0)
    far.haunt("e" * 16, key=far.module.session_key("another-secret" * 3, far.session), host="stranger")
    result = far.here("remote", "list", "--json", check=0)
    found = {one["runner"]: one for one in result.json()}
    assert sorted(found) == sorted([mine, ghost])
    assert {name: found[mine][name] for name in ("session", "state", "slots", "busy", "pool", "version")} == {
        "session": far.session, "state": "online", "slots": 3, "busy": 0, "pool": False,
        "version": far.module.__version__}
    assert found[ghost]["state"] == "silent"
    assert "signed with another secret than MAM_DISPATCH_SECRET here" in result.stderr
    shown = far.here("remote", "list", check=0).stdout
    assert "\x1b" not in shown and "stranger" not in shown and shown.splitlines()[0].split()[:3] == [
        "SESSION", "RUNNER", "STATE"]
    assert next(line for line in shown.splitlines() if mine in line).split()[:5] == [
        far.session, mine, "online", "0", "of"]
    run.kill()
    poll(lambda: far.listed()[mine]["state"] == "offline", UP_S, "by its last will", interval=0.1)


# What is known of a runner (beat 5 of instance a, living; the same after its will; nothing), a word of it, and what
# that tells: None nothing, else its state and whether it lives.
HEARD = [
    ("nothing", {}, False, ("online", True)),
    ("nothing", {}, True, ("online", False)),                      # a will need not fire
    ("nothing", {"age_s": 3600}, False, ("online", False)),        # brokers can be made to repeat
    ("nothing", {"age_s": -3600}, False, ("online", False)),
    ("nothing", {"state": "offline"}, False, ("offline", False)),
    ("living", {"beat": 6}, False, ("online", True)),
    ("living", {"beat": 5}, False, None), ("living", {"beat": 4}, False, None),
    ("living", {"beat": 6}, True, None),                           # it takes no life either
    ("living", {"beat": 6, "age_s": 3600}, False, None),
    ("living", {"beat": 1, "instance": "b"}, False, ("online", True)),
    ("living", {"beat": 9, "instance": "b"}, True, None),
    ("living", {"beat": 0, "state": "offline"}, False, ("offline", False)),
    ("living", {"beat": 0, "state": "offline", "instance": "z"}, False, None),       # the will of one before
    ("gone", {"beat": 5}, False, None), ("gone", {"beat": 6}, False, ("online", True)),
    ("gone", {"beat": 6}, True, ("online", False)), ("gone", {"beat": 1, "instance": "b"}, False, ("online", True)),
]


@pytest.mark.parametrize("before, word, retained_, told", HEARD)
def test_what_a_word_of_a_runner_tells(inside: Inside, before: str, word: Dict[str, Any], retained_: bool,
                                       told: Any) -> None:
    """A ghost that seems to live is given prompts; a living one that seems dead is given none."""
    module, now = inside.module, time.monotonic()
    first = module.Presence("s", "r", "online", "h", "5", 1, 0, False, 1.0, "a", 5, module.utc_now())
    known = {"nothing": None, "living": module._Seen(first, now - 1),
             "gone": module._Seen(first._replace(state="offline"), None)}[before]
    changes = dict(word)
    presence = first._replace(timestamp=module.utc_text(time.time() - changes.pop("age_s", 0)), **changes)
    seen = module.heard_anew(known, presence, retained_, now)
    assert (seen and (seen.presence.state, seen.lives(now))) == told
    if seen:
        assert not seen.lives(now + module.SILENT_S)


# The clocks of a remote job here, and of the same job as its runner has it (transport local): what is known of it,
# seconds since its topics are subscribed, and which clocks run.
LONG_AGO = 50.0
CLOCKS = [
    ("looking for a runner", {"delivery": "sending"}, 9.0, ["spawn_failed"]),
    ("dispatched", {"delivery": "sent"}, 9.0, ["agent_blocked"]),
    ("dispatched, and nobody listens", {"delivery": "sent"}, None, ["deadline_timeout"]),
    ("adopted", {"delivery": "sent", "started": True}, 9.0, ["unresponsive"]),
    ("adopted, and nobody listens", {"delivery": "sent", "started": True}, None, ["deadline_timeout"]),
    ("spawned", {"delivery": "sent", "started": True, "claimed": True}, 9.0, ["deadline_timeout", "unresponsive"]),
    ("spawned, and nobody listens", {"delivery": "sent", "started": True, "claimed": True}, None,
     ["deadline_timeout"]),
    ("being checked", {"delivery": "sent", "started": True, "claimed": True, "phase": "validating"}, 9.0,
     ["deadline_timeout"]),
    ("heard of before it was read back", {"delivery": "sending", "started": True}, 9.0, ["unresponsive"]),
    ("there: waits for a slot", {"transport": "local", "delivery": "none", "started": True, "claimed": True,
                                 "delivered_mono": None}, None, ["unresponsive"]),
    ("there: runs", {"transport": "local", "delivery": "sent", "started": True, "claimed": True}, None,
     ["deadline_timeout", "unresponsive"]),
]


@pytest.mark.parametrize("known, subscribed_s, clocks", [row[1:] for row in CLOCKS], ids=[row[0] for row in CLOCKS])
def test_which_clocks_run_for_a_remote_job(inside: Inside, known: Dict[str, Any], subscribed_s: Any,
                                           clocks: List[str]) -> None:
    """One too many closes a job that only waits for a slot; one too few, and it hangs for ever."""
    module = inside.module
    moment = f"{module.boot_id()} {time.monotonic() - LONG_AGO:.3f}"
    changes = dict(known)
    if changes.pop("started", False):
        changes["last_event_mono"] = moment
    if changes.pop("claimed", False):
        changes["claimed_mono"] = moment
    job = module.Job(**{**dict.fromkeys(module.Job._fields), "transport": "remote", "runner": "r",
                        "delivered_mono": moment, "timeout_sec": 60, "idle_timeout_sec": 60, "ack_timeout_sec": 60,
                        **changes})
    found = module.limits_of(job, None, 1000.0, subscribed_s)
    assert sorted(limit.request for limit in found) == clocks
    for limit in found:      # silence counts only while it was listened to
        told = limit.request in ("deadline_timeout", "spawn_failed") or subscribed_s is None
        since = LONG_AGO if told else subscribed_s
        assert limit.left_s == pytest.approx(60 - since, abs=5)


# ---- holes -----------------------------------------------------------------------------------------------------------

def test_what_was_missed_is_asked_for_and_comes_with_the_same_bytes(far_any: Far,
                                                                    observe: Callable[..., Observer]) -> None:
    """The delegating host was off: afterwards its log is complete, as if it had been there."""
    far = far_any
    watcher = observe(far.broker, far.root + "/#")
    far.serve()
    job_id = far.detach("while [ ! -e now ]; do sleep 0.05; done\n"
                        "for i in 1 2 3 4 5; do $MAM_PUBLISH_CMD --event progress --detail \"part $i\"; done\n"
                        + HOLD + "echo 'at last'")
    far.wait_spawned(job_id)
    far.post.kill_daemon()
    (far.there.workspace / "now").touch()
    watcher.wait_for(lambda m: b'"part 5"' in m.payload and m.topic.endswith("/events"), UP_S)
    before = len(far.payloads(job_id))
    assert before < 7
    far.here("daemon", "status")
    follower = far.here.popen("watch", job_id)
    poll(lambda: len(far.payloads(job_id)) == 7, UP_S, lambda: f"{far.payloads(job_id)} {far.describe()}")
    far.go()
    assert follower.wait().code == 0
    events = far.payloads(job_id)
    assert [event["seq"] for event in events] == list(range(1, 9))
    assert [event["detail"] for event in events[2:]] == [f"part {number}" for number in range(1, 6)] + ["at last"]
    sent: Dict[int, set] = {}
    for message in watcher.messages("events", job_id):
        sent.setdefault(message.json()["seq"], set()).add(message.payload)
    assert all(len(payloads) == 1 for payloads in sent.values()), "other bytes the second time"
    assert "conflict" not in far.post.notes(job_id) and "seq_gap" not in far.post.notes(job_id)
    assert any(m.json()["event"] == "resend" for m in watcher.messages("control", job_id) if m.payload)


# ---- redispatch ------------------------------------------------------------------------------------------------------

def test_a_redispatch_ends_the_old_attempt_first(far_any: Far) -> None:
    """Two attempts at once would undo each other's work; and the numbers go on."""
    far = far_any
    far.serve("--parallel", 2)
    job_id = far.detach("echo 1:start >> ran\n" + HOLD + "echo 1:end >> ran")
    far.wait_spawned(job_id)
    poll(far.ran, UP_S, "at work")
    result = far.here("redispatch", job_id, "--force", "--prompt", "echo 2 >> ran; echo second", "--follow", check=0)
    assert "second" in result.stdout
    assert far.ran() == ["1:start", "2"]
    poll(lambda: not far.commands(job_id), UP_S, "no command is left")
    job = far.wait_here(job_id, lambda job: job.finished_at)
    assert (job.attempt_id, job.status) == (2, "completed")
    events = far.payloads(job_id)
    second = [event["seq"] for event in events if event["data"]["attempt_id"] == 2]
    assert second == list(range(job.seq_base + 1, job.seq_base + 1 + len(second)))
    far.wait_kept(job_id)

"""Other hosts: an orchestrator and runners that share nothing but a broker, each in a network namespace of its own.

What each test says is what a user loses if it fails.
"""
from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import pytest

from support import ROOT, poll
from support.brokers import Broker
from support.cli import Background
from support.daemons import UP_S, Post, topics
from support.hosts import BROKER_ADDRESS, Host, Net, leftovers, pythons
from support.inside import Inside
from support.observer import Observer, retained
from support.proxy import Proxy

pytestmark = pytest.mark.root

PYTHONS = list(pythons().items())
HOSTS = ("orch", "gpu1", "gpu2", "gpu3", "gpu4")
IDLE_S = 6.0                            # with a beat each second: late ones on a busy machine end nothing
IDLE = ("--heartbeat", 1, "--heartbeat-misses", 6)
# A lost connection is noticed and replaced in about two seconds instead of twenty.
HASTE = """
mam.PUBACK_TIMEOUT_S = 1.0
mam.TCP_TIMEOUT_S = 1.0
mam.BACKOFF_BASE_S = 0.2
mam.BACKOFF_MAX_S = 0.5
"""
# Counts itself, and works until the test lets it (or all) go.
WORK = ('echo "$JOB_ID.$MAM_ATTEMPT_ID" >> ran; until [ -e go ] || [ -e "go.$JOB_ID" ]; do sleep 0.05; done; '
        'echo "did it"')
# Publishes once the test says so, while something is cut or dead.
AWAY = "until [ -e away ]; do sleep 0.05; done; $MAM_PUBLISH_CMD --event progress --detail meanwhile; "


# ---- the scene -------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    made = Net(HOSTS)
    yield made
    made.close()
    assert not leftovers(made.tag)


@pytest.fixture(scope="module")
def wires(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Broker]]:
    """One server of each kind for all tests that do not stop it."""
    running: Dict[str, Broker] = {}

    def wire(kind: str) -> Broker:
        if kind not in running:
            running[kind] = net.broker(kind, tmp_path_factory.mktemp(kind), persistence=False)
        return running[kind]
    yield wire
    for server in running.values():
        server.stop()


@pytest.fixture
def wire(wires: Callable[[str], Broker]) -> Broker:
    """The server of most tests."""
    return wires("nats")


@pytest.fixture
def either(broker_kind: str, wires: Callable[[str], Broker]) -> Broker:
    return wires(broker_kind)


@pytest.fixture
def own_wire(net: Net, tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    made: List[Broker] = []

    def make(kind: str, **options: Any) -> Broker:
        made.append(net.broker(kind, tmp_path / f"broker-{len(made)}", **options))
        return made[-1]
    yield make
    for server in made:
        server.kill()


class Rig:
    """An orchestrator, and hosts with runners of one session, for one test."""

    def __init__(self, net: Net, pyz: Path, inside: Inside, folder: Path, shiv: Path) -> None:
        self.net, self.inside, self.module = net, inside, inside.module
        self._pyz, self._folder, self._shiv = pyz, folder, shiv
        self.session = "gpu-" + uuid.uuid4().hex[:8]        # the brokers are shared
        self.secret = self.module.random_token()
        self.key = self.module.session_key(self.secret, self.session)
        self.hosts: List[Host] = []
        self.seen: List[Observer] = []
        self.wire: Any = None

    def on(self, wire: Broker, **settings: str) -> "Rig":
        """Set up the orchestrator's host for a broker."""
        self.wire = wire
        self.env = {**wire.env(), "MAM_INSECURE_BROKER": "1", **settings}
        self.orch = self.host("orch", MAM_DISPATCH_SECRET=self.secret)
        self.post = Post(self.orch, self.inside)
        self.inside.registry(self.orch).close()
        return self

    def host(self, where: str, python: Optional[str] = None, **settings: str) -> Host:
        """A host with its .mam.env, and the next of the Pythons that are there."""
        number = len(self.hosts)
        python = python or PYTHONS[number % len(PYTHONS)][1]
        made = Host(self.net, where, self._pyz, self._folder / f"{where}-{number}", self._shiv, python)
        made.settings(*[f"{name}={value}" for name, value in {**self.env, **settings}.items()])
        made.env["MAM_TERM_GRACE_S"] = "1"
        self.hosts.append(made)
        return made

    def worker(self, where: str = "gpu1", python: Optional[str] = None) -> Host:
        """A host for a runner: it has its session's key and no more."""
        return self.host(where, python, MAM_SESSION_KEY=self.key)

    def serve(self, host: Host, *options: object, command: str = WORK, code: str = "", wait: bool = True) -> Background:
        """Start a runner. `code` changes mam's constants."""
        program = self.inside.patched(host, code) if code else host
        run = program.popen("remote", "run", "--session", self.session, "--exec", command, *options)
        if wait:
            run.wait_for("serves remote:" + self.session, UP_S, "stderr")
        return run

    def side(self, host: Host) -> Post:
        """A runner's registry."""
        return Post(host.of_runner(self.session), self.inside)

    def delegate(self, *options: object, prompt: str = "do it") -> Background:
        """Delegate in the foreground of its own process."""
        return self.orch.popen("delegate", "--agent-session", "remote:" + self.session, "--prompt", prompt, *options)

    def delegate_many(self, count: int, *options: object) -> List[str]:
        """Delegate many jobs with one start of mam; their ids in order."""
        argv = ["delegate", "--agent-session", "remote:" + self.session, "--prompt", "one of many", "--detach",
                *map(str, options)]
        return self.inside.run(self.orch, f"for _ in range({count}):\n    mam.main({argv!r})\n").split()

    def job_of(self, run: Background) -> str:
        """The id of the job that a `delegate` has registered."""
        text = run.wait_for(" registered for remote:", UP_S, "stderr")
        return text.split(" registered for ")[0].split()[-1]

    def at_work(self, run: Background) -> str:
        """Wait until the command of a delegated job runs, as far as the orchestrator knows."""
        job = self.job_of(run)
        poll(lambda: self.post.rows("SELECT 1 FROM events WHERE job_id = ? AND payload LIKE ?", job,
                                    '%"spawned":true%'), UP_S,
             lambda: f"the command of {job} at work: {run} {self.post.describe()}")
        return job

    def observe(self, filter: Optional[str] = "python/mqtt/jobs/#") -> Observer:
        with self.net.inside():
            self.seen.append(Observer(self.wire, filter))
        return self.seen[-1]

    def retained(self, topic: str) -> Optional[bytes]:
        with self.net.inside():
            return retained(self.wire, topic)

    def retained_json(self, topic: str) -> Dict[str, Any]:
        found = self.retained(topic)
        return dict(json.loads(found)) if found else {}

    def close(self) -> None:
        failures = []
        for one in [*self.seen, *self.hosts]:
            try:
                one.close()
            except AssertionError as error:     # the others have to be closed too
                failures.append(str(error))
        assert not failures, "\n".join(failures)

    # ---- what must hold in the end ---------------------------------------------------------------------------

    def assert_same_log(self, job: str, *sides: Post) -> None:
        """What the runners have recorded of a job, number by number, is what the orchestrator has, beats aside."""
        def told() -> List[Any]:
            return sorted(row for side in sides for row in story(side, job))
        poll(lambda: told() == story(self.post, job), UP_S,
             lambda: f"the same log of {job}:\n{told()}\n{story(self.post, job)}\n{self.post.describe()}")
        numbers = [row[1] for row in story(self.post, job)]
        assert numbers == sorted(set(numbers))

    def assert_agreed(self, job: str, status: str, side: Optional[Post] = None, reason: Optional[str] = None) -> None:
        """Both registries and what the broker keeps say the same of an ended job, and no order is left lying."""
        prefix = topics(job)[0].rpartition("/")[0]

        def views() -> List[Any]:
            state, event = self.retained_json(prefix + "/state"), self.retained_json(prefix + "/events")
            found: List[Any] = [self.post.job(job).status, state.get("status"), event.get("data", {}).get(
                "status", event.get("event"))]
            return found + ([side.job(job).status] if side else [])

        def orders() -> List[Any]:
            return [self.retained(prefix + "/dispatch"), self.retained(prefix + "/control")]
        poll(lambda: set(views()) == {status} and orders() == [None, None], UP_S,
             lambda: f"{job} {status} everywhere: {views()} {orders()}\n{self.post.rows('SELECT * FROM attempts')}\n"
                     f"{self.post.describe()}", interval=0.1)
        if reason:
            assert self.post.job(job).reason == reason
            assert self.retained_json(prefix + "/state")["data"]["reason"] == reason


@pytest.fixture
def rig(net: Net, pyz: Path, session_folder: Path, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(net, pyz, Inside(pyz, session_folder), tmp_path, session_folder / "shiv")
    net.plug()
    yield made
    net.plug()
    made.close()


def story(side: Post, job: str) -> List[Any]:
    """(attempt, number, payload) of a job's events but for its beats."""
    return [tuple(row) for row in side.rows(
        "SELECT attempt_id, seq, payload FROM events WHERE job_id = ? AND seq IS NOT NULL AND detail <> 'heartbeat' "
        "ORDER BY attempt_id, seq", job)]


def ran(*hosts: Host) -> Counter:
    """How often each attempt's command was run."""
    lines: Counter = Counter()
    for host in hosts:
        path = host.workspace / "ran"
        lines.update(path.read_text().split() if path.exists() else [])
    return lines


def go(host: Host, job: str = "") -> None:
    (host.workspace / (f"go.{job}" if job else "go")).touch()


def commands(host: Host) -> List[int]:
    """The commands of jobs that run on a host."""
    found = []
    for pid in host.processes():
        try:
            words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue                            # gone meanwhile
        found += [pid] if words[1:2] == [b"-c"] else []
    return found


def holds(condition: Callable[[], Any], seconds: float, message: Callable[[], str]) -> None:
    """For so long, `condition` stays true."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert condition(), message()
        time.sleep(0.1)


def late(side: Post, job: str) -> List[str]:
    """The events that came for an attempt that had ended."""
    return [json.loads(row[0])["source_event"] for row in side.rows(
        "SELECT payload FROM events WHERE job_id = ? AND event = 'late'", job)]


# ---- as if it were here ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("there, here", [(0, -1), (-1, 0)], ids=["oldest-there", "newest-there"])
def test_a_job_for_another_host_behaves_as_one_here(rig: Rig, either: Broker, there: int, here: int) -> None:
    """Lost: the product. What is shown, the exit code, the result and the files have to come over."""
    rig.on(either)
    orch, gpu = rig.orch, rig.host("gpu1", PYTHONS[there][1])
    orch.python = PYTHONS[here][1]
    (orch.workspace / ".mam.env").unlink()
    orch.settings(*[f"{name}={value}" for name, value in rig.env.items()], orch("secret", "new", check=0).stdout)
    gpu.settings(orch("secret", "derive", rig.session, check=0).stdout)
    run = rig.serve(gpu, "--stdin", command='cat > brief; $MAM_PUBLISH_CMD --event progress --detail half; '
                                            'env > environment; mkdir out; echo made > out/report; echo all good')
    listed = orch("remote", "list", "--json", check=0).json()
    assert [(one["session"], one["state"], one["slots"]) for one in listed
            if one["session"] == rig.session] == [(rig.session, "online", 1)]
    brief = "Täglich $(reboot) `x` \"q\"\n"
    done = rig.delegate("--artifact", "out/report", "--validate", "touch validated", prompt=brief).wait()
    job = done.stderr.split("job ")[1].split()[0]
    assert done.code == 0, done
    words = [line.split()[3] for line in done.stdout.splitlines() if " seq=" in line]
    assert words[0] == "started" and "half" in done.stdout and words[-1] == "completed", done
    assert "all good" in done.stdout.splitlines()[-1]
    assert (gpu.workspace / "brief").read_text() == brief and (orch.workspace / "validated").exists()
    assert not (gpu.workspace / "validated").exists()
    artifacts = json.loads(story(rig.post, job)[-1][2])["data"]["artifacts"]
    assert [(one["name"], one["size"]) for one in artifacts] == [("out/report", 5)]
    given = (gpu.workspace / "environment").read_text()
    assert "MQTT_PASSWORD" not in given and "SECRET" not in given and "SESSION_KEY" not in given
    rig.assert_same_log(job, rig.side(gpu))
    rig.assert_agreed(job, "completed", rig.side(gpu))
    assert run.stop().code == 0


# ---- links, brokers --------------------------------------------------------------------------------------------

def test_a_cut_link_here_closes_nothing_and_loses_nothing(rig: Rig, wire: Broker) -> None:
    """Lost: remote work, given up because the laptop that had asked for it was off the network for a while."""
    rig.on(wire)
    gpu = rig.worker()
    rig.serve(gpu, command=AWAY + WORK)
    rig.post.run(HASTE)
    run = rig.delegate(*IDLE)
    job = rig.at_work(run)
    # With nothing on its way there is nothing whose missing acknowledgement would tell of the cut.
    poll(lambda: rig.post.rows("SELECT dispatch_mail FROM attempts") == [(0,)], UP_S, "the dispatch, taken back")
    rig.orch.unplug()
    (gpu.workspace / "away").touch()
    holds(lambda: rig.post.job(job).status == "running", IDLE_S + 2,
          lambda: f"{rig.post.job(job)} {rig.post.describe()}")
    go(gpu)
    poll(lambda: rig.side(gpu).job(job).status == "completed", UP_S, "the end, over there")
    assert rig.post.job(job).status == "running"
    rig.orch.plug()
    done = run.wait()
    assert done.code == 0 and "meanwhile" in done.stdout, done
    rig.assert_same_log(job, rig.side(gpu))
    rig.assert_agreed(job, "completed", rig.side(gpu))


def test_a_cut_link_there_is_unresponsive_and_its_result_is_kept(rig: Rig, either: Broker) -> None:
    """Lost: the certain end of a job whose host is off the network; and, later, the work it had done."""
    rig.on(either)
    gpu = rig.worker()
    rig.serve(gpu, code=HASTE)
    run = rig.delegate(*IDLE)
    job = rig.at_work(run)
    gpu.unplug()
    done = run.wait()
    assert done.code == 2 and "unresponsive" in done.stdout, done
    go(gpu)
    poll(lambda: rig.side(gpu).job(job).status == "completed", UP_S, "the end, over there")
    gpu.plug()
    poll(lambda: "completed" in late(rig.post, job), UP_S, lambda: f"the result, late: {rig.post.describe()}")
    rig.assert_agreed(job, "error", rig.side(gpu), "unresponsive")
    assert ran(gpu) == {f"{job}.1": 1}


@pytest.mark.parametrize("wipe", [False, True], ids=["with-memory", "without-memory"])
def test_a_broker_may_be_restarted_in_the_middle(rig: Rig, broker_kind: str, own_wire: Callable[..., Broker],
                                                 wipe: bool) -> None:
    """Lost: a job, because the broker was updated; and who looks only now sees nothing."""
    broker = own_wire(broker_kind)
    rig.on(broker)
    gpu = rig.worker()
    rig.serve(gpu, code=HASTE)
    run = rig.delegate()
    job = rig.at_work(run)
    with rig.net.inside():
        broker.stop()
        holds(lambda: rig.post.job(job).status == "running", 1.0, lambda: str(rig.post.job(job)))
        if wipe:
            broker.wipe()
        broker.start()
    poll(lambda: rig.retained_json(topics(job)[1]).get("status") == "running", UP_S, "the state, retained again")
    go(gpu)
    done = run.wait()
    assert done.code == 0, done
    rig.assert_same_log(job, rig.side(gpu))
    rig.assert_agreed(job, "completed", rig.side(gpu))
    assert ran(gpu) == {f"{job}.1": 1}


def test_what_a_runner_has_not_heard_is_said_again_to_a_broker_without_memory(
        rig: Rig, own_wire: Callable[..., Broker]) -> None:
    """Lost: a cancel. The work went on for hours, because the broker forgot it before the runner was back."""
    broker = own_wire("mosquitto", persistence=False)
    rig.on(broker)
    gpu = rig.worker()
    rig.serve(gpu, code=HASTE)
    rig.post.run(HASTE)
    run = rig.delegate("--heartbeat", 1, "--heartbeat-misses", 60)
    job = rig.at_work(run)
    gpu.unplug()
    poll(lambda: rig.side(gpu).line()["state"] != "up", UP_S, "the cut is noticed, so nothing is on its way to it")
    cancelled = rig.orch("cancel", job, check=0)
    assert "has not answered yet" in cancelled.stderr, cancelled
    assert run.wait().code == 1
    with rig.net.inside():
        broker.restart(kill=True)
    poll(lambda: rig.post.line()["connects"] > 1, UP_S, "connected again")
    gpu.plug()
    rig.assert_agreed(job, "cancelled", rig.side(gpu))
    poll(lambda: not commands(gpu), UP_S, "the command is gone")


# ---- deaths ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("again", [True, False], ids=["started-again", "gone"])
def test_work_outlives_its_runner_and_is_never_run_twice(rig: Rig, wire: Broker, again: bool) -> None:
    """Lost: hours of work, with the runner that was killed; or its result, because it was run again over it."""
    rig.on(wire)
    gpu = rig.worker()
    run = rig.delegate("--wait-for-runner", 60)
    runner = rig.serve(gpu)
    job = rig.at_work(run)
    os.kill(runner.pid, signal.SIGKILL)
    if again:
        rig.serve(gpu).wait_for("serves remote:", UP_S, "stderr")
    go(gpu)
    done = run.wait()
    assert done.code == 0 and "did it" in done.stdout, done
    assert ran(gpu) == {f"{job}.1": 1}
    rig.assert_same_log(job, rig.side(gpu))
    rig.assert_agreed(job, "completed", rig.side(gpu))


def test_what_waited_at_a_killed_runner_is_run_by_the_next(rig: Rig, wire: Broker) -> None:
    """Lost: jobs that a runner had taken on and not begun."""
    rig.on(wire)
    gpu = rig.worker()
    runner = rig.serve(gpu)
    jobs = rig.delegate_many(3)
    side = rig.side(gpu)
    poll(lambda: all(rig.post.job(job).last_event for job in jobs) and len(ran(gpu)) == 1, UP_S,
         lambda: f"one at work, two waiting: {rig.post.describe()}")
    os.kill(runner.pid, signal.SIGKILL)
    rig.serve(gpu, wait=False)
    go(gpu)
    for job in jobs:
        rig.post.wait_status(job, "completed")
        rig.assert_same_log(job, side)
    assert ran(gpu) == {f"{job}.1": 1 for job in jobs}


def test_an_orchestrator_that_was_killed_sees_everything_afterwards(rig: Rig, wire: Broker) -> None:
    """Lost: what a remote job did and how it ended, when the machine that delegated it crashed meanwhile."""
    rig.on(wire)
    gpu = rig.worker()
    rig.serve(gpu, command=AWAY + WORK)
    run = rig.delegate()
    job = rig.at_work(run)
    run.kill()
    for pid in rig.orch.processes():
        os.kill(pid, signal.SIGKILL)
    rig.post.wait_gone()
    (gpu.workspace / "away").touch()
    go(gpu)
    poll(lambda: rig.side(gpu).job(job).status == "completed", UP_S, "the end, over there")
    assert rig.post.job(job).status == "running"
    seen = rig.orch("watch", job)
    assert seen.code == 0, seen
    assert [word for line in seen.stdout.splitlines() for word in line.split()[3:4]][-1] == "completed"
    assert "meanwhile" in seen.stdout and "did it" in seen.stdout, seen
    rig.assert_same_log(job, rig.side(gpu))
    rig.assert_agreed(job, "completed", rig.side(gpu))


def test_a_runner_that_is_ended_answers_what_it_has_not_begun(rig: Rig, wire: Broker) -> None:
    """Lost: knowing, hours later, that a job waits at a runner that was ended in good order."""
    rig.on(wire)
    gpu = rig.worker()
    runner = rig.serve(gpu)
    jobs = rig.delegate_many(2)
    poll(lambda: all(rig.post.job(job).last_event for job in jobs) and len(ran(gpu)) == 1, UP_S,
         lambda: f"one at work, one waiting: {rig.post.describe()}")
    assert runner.stop().code == 0
    working = [job for job in jobs if f"{job}.1" in ran(gpu)][0]
    waiting = [job for job in jobs if job != working][0]
    poll(lambda: rig.post.job(waiting).status == "error", UP_S,
         lambda: f"an answer: {runner} {rig.side(gpu).job(waiting)} {rig.side(gpu).describe()}")
    job = rig.post.job(waiting)
    assert "before it began" in job.detail
    rig.assert_agreed(waiting, "error", rig.side(gpu))
    nobody = rig.orch("delegate", "--agent-session", "remote:" + rig.session, "--prompt", "x")
    assert nobody.code == 1 and "nobody serves" in nobody.stdout, nobody
    go(gpu)
    rig.post.wait_status(working, "completed")
    rig.assert_agreed(working, "completed", rig.side(gpu))
    assert ran(gpu) == {f"{working}.1": 1}


# ---- dispatches that must not run ------------------------------------------------------------------------------

class Forge:
    """Makes dispatches as an orchestrator with the secret of a rig does, and so whatever is almost one."""

    def __init__(self, rig: Rig, runner: str) -> None:
        self.rig, self.runner, self.module = rig, runner, rig.module

    def key(self, session: str = "") -> str:
        return str(self.module.session_key(self.rig.secret, session or self.rig.session))

    def dispatch(self, job: str, attempt: int = 1, age_s: float = 0.0, token: str = "", session: str = "",
                 key: str = "", **data: Any) -> bytes:
        """A dispatch of `age_s` seconds ago, good for a minute, for the session's runner; `data` replaces fields."""
        module, token = self.module, token or uuid.uuid4().hex
        issued = time.time() - age_s
        keys = module.attempt_keys(key or self.key(session), job, attempt, token)[1]
        fields = {"dispatch_token": token, "attempt_id": attempt, "kid": keys["kid"],
                  "session": session or self.rig.session, "runner": self.runner, "seq_base": 0,
                  "issued_at": module.utc_text(issued), "expires_at": module.utc_text(issued + 60), "prompt": "run me",
                  "contract": {"agent": "claude-code", "role": "Worker", "timeout_sec": 60, "idle_timeout_sec": 60,
                               "heartbeat_sec": 30, "heartbeat_misses": 4, "ack_timeout_sec": 60, "artifacts": []}}
        payload = module.event_payload(job, 0, "dispatch", fields["issued_at"], "", {**fields, **data})
        return bytes(module.sign(payload, keys["control"]))


def topic_of(job: str, kind: str) -> str:
    return f"python/mqtt/jobs/{job}/{kind}"


def runner_id(side: Post) -> str:
    return str(side.rows("SELECT value FROM meta WHERE key = 'runner_id'")[0][0])


def test_yesterdays_dispatch_is_refused_and_answered(rig: Rig, wire: Broker) -> None:
    """Lost: trust. A job given up yesterday runs this morning, when the runner's host is switched on."""
    rig.on(wire)
    gpu = rig.worker()
    side = rig.side(gpu)
    rig.serve(gpu).stop()
    job = "old-" + uuid.uuid4().hex[:8]
    forge = Forge(rig, runner_id(side))
    order = forge.dispatch(job, age_s=86400)
    rig.observe(None).publish(topic_of(job, "dispatch"), order, retain=True)
    run = rig.serve(gpu)
    said = run.wait_for(f"refused attempt 1 of job {job}", UP_S, "stderr")
    data = json.loads(order)["data"]
    assert data["issued_at"] in said and data["expires_at"] in said and "it is 20" in said, said
    poll(lambda: rig.retained_json(topic_of(job, "events")).get("event") == "error", UP_S, "the answer")
    answer = rig.retained_json(topic_of(job, "events"))
    assert answer["data"]["reason"] == "spawn_failed" and data["expires_at"] in answer["detail"]
    token = data["dispatch_token"]
    rig.module.verify(answer, rig.module.attempt_keys(rig.key, job, 1, token)[0])
    rig.seen[0].publish(topic_of(job, "dispatch"), b"", retain=True)
    assert not ran(gpu) and side.job(job).status == "error"


def test_a_dispatch_runs_at_most_once_whoever_repeats_or_alters_it(rig: Rig, either: Broker) -> None:
    """Lost: control over what runs: anybody at the broker could have it run again, or something else."""
    rig.on(either)
    gpu = rig.worker()
    runner = rig.serve(gpu, "--parallel", 4, "--stdin", command="cat >> ran; echo >> ran")
    side, wire = rig.side(gpu), rig.observe(None)
    forge = Forge(rig, runner_id(side))
    dice = random.Random(20)
    tag = uuid.uuid4().hex[:8]

    def send(job: str, order: bytes) -> None:
        wire.publish(topic_of(job, "dispatch"), order)

    def run_once(job: str, order: bytes) -> None:
        send(job, order)
        poll(lambda: side.rows("SELECT 1 FROM jobs WHERE job_id = ? AND status = 'completed'", job), UP_S,
             lambda: f"{job} runs: {runner}")
    good = forge.dispatch(f"good-{tag}", prompt="good")
    run_once(f"good-{tag}", good)
    for _ in range(3):
        send(f"good-{tag}", good)                                                       # replayed
    send(f"elsewhere-{tag}", good)                                                      # under another job's name
    send(f"good-{tag}", forge.dispatch(f"good-{tag}", prompt="other token"))
    for number in range(40):                                                            # one byte is another one
        job = f"altered-{tag}-{number}"
        order = bytearray(forge.dispatch(job, prompt="altered"))
        place = dice.randrange(len(order))
        order[place] ^= 1 << dice.randrange(7)
        send(job, bytes(order))
    other = "other-" + tag
    send(f"session-{tag}", forge.dispatch(f"session-{tag}", session=other, prompt="another session"))
    kid = rig.module.key_id(rig.key)
    send(f"key-{tag}", forge.dispatch(f"key-{tag}", key=forge.key(other), prompt="another session's key"))
    send(f"kid-{tag}", forge.dispatch(f"kid-{tag}", key=forge.key(other), kid=kid, prompt="another session's key"))
    send(f"runner-{tag}", forge.dispatch(f"runner-{tag}", runner="0123456789abcdef", prompt="another runner"))
    run_once(f"twice-{tag}", forge.dispatch(f"twice-{tag}", attempt=2, seq_base=5, prompt="attempt 2"))
    send(f"twice-{tag}", forge.dispatch(f"twice-{tag}", attempt=1, prompt="attempt 1"))
    run_once(f"last-{tag}", forge.dispatch(f"last-{tag}", prompt="last"))
    assert sorted((gpu.workspace / "ran").read_text().split("\n")) == ["", "attempt 2", "good", "last"]
    refused = side.info()["runner"]["refused"]
    assert refused["signature"] >= 20 and refused["conflict"] == 1 and refused["stale"] == 1 and refused["kid"] >= 1
    assert "refused a message on" in runner.stderr and "wrong signature" in runner.stderr


def test_another_sessions_key_forges_nothing(rig: Rig, wire: Broker) -> None:
    """Lost: the wall between hosts. Whoever breaks into one runner ends, or cancels, the jobs of all others."""
    rig.on(wire)
    gpu = rig.worker()
    rig.serve(gpu)
    watcher = rig.observe("python/mqtt/jobs/+/dispatch")
    run = rig.delegate()
    job = rig.at_work(run)
    # The thief has heard the token, and has the key of another session of the same secret.
    order = watcher.wait_for(lambda m: m.payload and job in m.topic, UP_S).json()
    token = order["data"]["dispatch_token"]
    stolen = rig.module.session_key(rig.secret, "stolen")
    event_key, more = rig.module.attempt_keys(stolen, job, 1, token)
    data = {"dispatch_token": token, "attempt_id": 1}
    for event in ("completed", "error"):
        payload = rig.module.event_payload(job, 3, event, rig.module.utc_now(), "forged", data)
        watcher.publish(topic_of(job, "events"), rig.module.sign(payload, event_key))
    state = rig.module.event_payload(job, 9, "state", rig.module.utc_now(), "forged", data)
    state.update(status="completed", phase=None, last_event="completed")
    watcher.publish(topic_of(job, "state"), rig.module.sign(state, event_key))
    for kid in (more["kid"], order["data"]["kid"]):
        payload = rig.module.event_payload(job, 0, "cancel", rig.module.utc_now(), "", {
            **data, "kid": kid, "session": rig.session, "status": "cancelled", "reason": "cancelled"})
        watcher.publish(topic_of(job, "control"), rig.module.sign(payload, more["control"]))
    poll(lambda: rig.post.info()["drops"].get("signature", 0) >= 3, UP_S,
         lambda: f"three dropped and counted: {rig.post.describe()}")
    poll(lambda: rig.side(gpu).info()["runner"]["refused"] == {"kid": 1, "signature": 1}, UP_S,
         lambda: f"two refused and counted: {rig.side(gpu).info()}")
    assert rig.post.job(job).status == rig.side(gpu).job(job).status == "running"
    go(gpu)
    done = run.wait()
    assert done.code == 0 and "forged" not in done.stdout, done
    rig.assert_same_log(job, rig.side(gpu))


def test_a_prompt_that_cannot_travel_is_refused_at_once(rig: Rig, wire: Broker) -> None:
    """Lost: an hour, waiting for a job whose brief no broker takes."""
    rig.on(wire)
    words = ("delegate", "--agent-session", "remote:" + rig.session, "--prompt-file", "-")
    done = rig.orch(*words, input="x" * 300_000)
    assert done.code == 1 and "308196 bytes" in done.stderr and "262144 are allowed" in done.stderr, done
    assert rig.post.rows("SELECT count(*) FROM jobs") == [(0,)]
    gpu = rig.worker()
    go(gpu)
    rig.serve(gpu, "--once", "--stdin", command="cat > brief")
    assert rig.orch(*words, input="x" * 200_000).code == 0
    assert (gpu.workspace / "brief").stat().st_size == 200_000


def test_a_prompt_that_this_broker_does_not_take_ends_its_job(rig: Rig, own_wire: Callable[..., Broker]) -> None:
    """Lost: every other job too, when the broker closes the connection at one dispatch again and again."""
    rig.on(own_wire("mosquitto", persistence=False, extra="max_packet_size 20000"))
    gpu = rig.worker()
    rig.serve(gpu)
    go(gpu)
    rig.post.run(HASTE)
    done = rig.delegate(prompt="x" * 60_000).wait()
    assert done.code == 1 and "larger than the broker takes" in done.stdout, done
    assert rig.delegate().wait().code == 0 and sum(ran(gpu).values()) == 1


def test_a_dispatch_that_the_broker_drops_ends_its_job(rig: Rig, own_wire: Callable[..., Broker]) -> None:
    """Lost: the reason. A user without the right to publish gets an acknowledgement all the same."""
    rig.on(own_wire("mosquitto", user="worker", password="pw-of-worker", more_users={"boss": "pw-of-boss"},
                    acl="user worker\ntopic readwrite #\nuser boss\ntopic read #\n"))
    gpu = rig.worker()
    rig.orch.settings("MQTT_USERNAME=boss", "MQTT_PASSWORD=pw-of-boss")
    rig.serve(gpu)
    done = rig.delegate().wait()
    assert done.code == 1 and "may this user publish" in done.stdout, done
    assert not ran(gpu)


def test_an_open_broker_is_refused_on_both_sides(rig: Rig, wire: Broker) -> None:
    """Lost: the prompt, to everybody on the network, without a word."""
    rig.on(wire)
    gpu = rig.worker()
    open_ = {"MAM_INSECURE_BROKER": "0"}
    there = gpu("remote", "run", "--session", rig.session, "--exec", "true", env=open_)
    here = rig.orch("delegate", "--agent-session", "remote:" + rig.session, "--prompt", "x", env=open_)
    for done in (there, here):
        assert done.code == 1 and "TLS" in done.stderr and "--insecure-broker" in done.stderr, done
    assert rig.post.rows("SELECT count(*) FROM jobs") == [(0,)]


# ---- many ------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_pool_shares_a_hundred_jobs(rig: Rig, wire: Broker) -> None:
    """Lost: the point of a pool; or a job, run by two of its runners or by none."""
    rig.on(wire)
    hosts = [rig.worker(where) for where in HOSTS[1:]]
    for host in hosts:
        rig.serve(host, "--pool", "--parallel", 2, command='echo "$JOB_ID.$MAM_ATTEMPT_ID" >> ran', wait=False)
    for host in hosts:
        host.background[-1].wait_for("serves remote:", UP_S, "stderr")
    jobs = rig.delegate_many(100, "--wait-for-runner", 60)
    poll(lambda: rig.post.rows("SELECT count(*) FROM jobs WHERE status = 'completed'") == [(100,)], 40,
         lambda: f"{rig.post.rows('SELECT status, reason, max(detail), count(*) FROM jobs GROUP BY 1, 2')}"
                 f"{[rig.side(host).log()[-1500:] for host in hosts]} {rig.post.describe()}")
    assert ran(*hosts) == {f"{job}.1": 1 for job in jobs}
    shares = [sum(ran(host).values()) for host in hosts]
    assert min(shares) >= 10, shares
    for job in jobs[:5]:
        rig.assert_same_log(job, *[rig.side(host) for host in hosts])


def test_both_ends_in_one_workspace(rig: Rig, wire: Broker) -> None:
    """Lost: trying it out on one machine; each end took the other's jobs for its own."""
    rig.on(wire)
    rig.serve(rig.orch)
    run = rig.delegate()
    job = rig.at_work(run)
    local = rig.orch("delegate", "--agent-session", "exec:x", "--exec", "echo here", "--prompt", "x", check=0)
    assert "here" in local.stdout
    go(rig.orch)
    assert run.wait().code == 0
    assert ran(rig.orch) == {f"{job}.1": 1}
    rig.assert_same_log(job, rig.side(rig.orch))
    rig.assert_agreed(job, "completed", rig.side(rig.orch))
    assert [row[0] for row in rig.side(rig.orch).rows("SELECT job_id FROM jobs")] == [job]


# ---- ends of the operator --------------------------------------------------------------------------------------

CANCEL_RACES = 20


@pytest.mark.slow
def test_cancel_against_completed_has_one_winner(rig: Rig, wire: Broker) -> None:
    """Lost: knowing how a job ended: cancelled here, completed there, and for those who look later something else."""
    rig.on(wire)
    gpu = rig.worker()
    rig.serve(gpu, "--parallel", CANCEL_RACES)
    jobs = rig.delegate_many(CANCEL_RACES)
    poll(lambda: rig.post.rows("SELECT count(*) FROM events WHERE detail = 'the command runs'") == [(len(jobs),)],
         2 * UP_S, lambda: f"all at work: {rig.post.describe()}")
    dice = random.Random(4)
    plan = [(job, dice.uniform(0, 0.25)) for job in jobs]
    rig.inside.run(rig.orch, f"""
import time
for job, pause_s in {plan!r}:
    open(os.path.join({str(gpu.workspace)!r}, "go." + job), "w").close()
    time.sleep(pause_s)
    mam.main(["cancel", job])
""")
    side = rig.side(gpu)
    ends: Counter = Counter()
    for job in jobs:
        poll(lambda: rig.post.job(job).status != "running", UP_S, lambda: str(rig.post.job(job)))
        status = rig.post.job(job).status
        rig.assert_agreed(job, status, side)
        ends[status] += 1
    assert set(ends) <= {"completed", "cancelled"} and ran(gpu) == {f"{job}.1": 1 for job in jobs}


def test_cancel_ends_the_work_there_and_says_so(rig: Rig, either: Broker) -> None:
    """Lost: the way to stop an agent that runs on another host."""
    rig.on(either)
    gpu = rig.worker()
    rig.serve(gpu)
    run = rig.delegate()
    job = rig.at_work(run)
    done = rig.orch("cancel", job, "--detail", "wrong branch", check=0)
    assert "has ended it" in done.stderr, done
    assert run.wait().code == 1
    rig.assert_agreed(job, "cancelled", rig.side(gpu))
    poll(lambda: not commands(gpu), UP_S, "the command is gone")


def test_a_job_goes_on_at_a_host_that_never_saw_it(rig: Rig, wire: Broker) -> None:
    """Lost: a job, with the host it was given to; and the story of its first attempt."""
    rig.on(wire)
    first, second = rig.worker("gpu1"), rig.worker("gpu2")
    runner = rig.serve(first, command="echo one; exit 3")
    failed = rig.delegate().wait()
    job = failed.stderr.split("job ")[1].split()[0]
    assert failed.code == 1 and "exit status 3" in failed.stdout, failed
    assert runner.stop().code == 0
    rig.serve(second, wait=False)
    go(second)
    poll(lambda: "online" in rig.orch("remote", "list", check=0).stdout, UP_S, "the other runner")
    again = rig.orch("redispatch", job, "--follow")
    assert again.code == 0 and "did it" in again.stdout, again
    assert ran(first, second) == {f"{job}.2": 1}
    rig.assert_same_log(job, rig.side(first), rig.side(second))
    # The first host comes back: it is told of the end of its attempt, and puts nothing over what the second has said.
    rig.serve(first, wait=False)
    rig.assert_agreed(job, "completed", rig.side(second))


def test_a_late_result_of_an_attempt_given_up_is_kept(rig: Rig, wire: Broker) -> None:
    """Lost: what the first host had done after all, or the result of the second, overwritten by it."""
    rig.on(wire)
    first, second = rig.worker("gpu1"), rig.worker("gpu2")
    rig.serve(first, "--pool", code=HASTE)
    run = rig.delegate("--wait-for-runner", 60)
    job = rig.at_work(run)
    first.unplug()
    go(first)
    poll(lambda: rig.side(first).job(job).status == "completed", UP_S, "the end of attempt 1, over there")
    rig.serve(second, "--pool")
    assert rig.orch("redispatch", job, "--force").code == 0
    # The first still counts as living for a moment, but as busy.
    poll(lambda: rig.post.job(job).runner == runner_id(rig.side(second)), UP_S, lambda: str(rig.post.job(job)))
    first.plug()
    poll(lambda: "completed" in late(rig.post, job), UP_S, lambda: f"late: {rig.post.describe()}")
    go(second)
    rig.post.wait_status(job, "completed")
    assert ran(first, second) == {f"{job}.1": 1, f"{job}.2": 1}
    rig.assert_agreed(job, "completed", rig.side(second))


def test_a_runner_takes_one_or_what_waits_and_leaves(rig: Rig, wire: Broker) -> None:
    """Lost: batch systems: a runner that stays idle on a rented host, or leaves before it has done its work."""
    rig.on(wire)
    gpu = rig.worker()
    go(gpu)
    jobs = rig.delegate_many(3, "--wait-for-runner", 60)
    assert rig.serve(gpu, "--once", wait=False).wait().code == 0
    assert sum(ran(gpu).values()) == 1
    # What it was given beside that is answered, and what nobody was given waits on.
    assert rig.serve(gpu, "--drain", wait=False).wait().code == 0
    poll(lambda: not rig.post.rows("SELECT 1 FROM jobs WHERE status NOT IN ('completed', 'error')"), UP_S,
         lambda: f"{rig.post.rows('SELECT status, detail FROM jobs')}")
    assert max(ran(gpu).values()) == 1 and set(ran(gpu)) == {
        f"{job}.1" for job in jobs if rig.post.job(job).status == "completed"}


# ---- secrets ---------------------------------------------------------------------------------------------------

def test_no_secret_crosses_the_broker(rig: Rig, broker_kind: str, own_wire: Callable[..., Broker]) -> None:
    """Lost: everything, to whoever may read at the broker."""
    password = "broker-" + uuid.uuid4().hex
    broker = own_wire(broker_kind, user="mam", password=password)
    with rig.net.inside():
        way = Proxy(broker.port, host=BROKER_ADDRESS)
    try:
        rig.on(broker, MQTT_PORT=str(way.port))
        seen = rig.observe("#")
        gpu = rig.worker()
        rig.serve(gpu, command='env; cat .mam.env; echo "$(cat .mam.env)" | head -c 3000 | $MAM_PUBLISH_CMD '
                               '--event progress --detail-file -; cat .mam.env | tr "\\n" " "')
        run = rig.delegate()
        job = rig.job_of(run)
        assert run.wait().code == 0
        assert rig.orch("redispatch", job, "--follow").code == 0
        rig.assert_agreed(job, "completed", rig.side(gpu))
        cancelled = rig.orch("delegate", "--agent-session", "remote:" + rig.session, "--prompt", "x", "--detach",
                             check=0).stdout.strip()
        rig.orch("cancel", cancelled)
        rig.orch("remote", "list", check=0)
    finally:
        way.close()
    secrets = {"the dispatch secret": rig.secret, "the session's key": rig.key}
    secrets["the presence key"] = rig.module.derive_key(rig.key, "presence")
    for number, (key,) in enumerate(rig.post.rows("SELECT auth_token FROM attempts")):
        secrets[f"event key {number}"] = key
    for row in rig.post.rows("SELECT remote_keys FROM attempts"):
        secrets["control key " + row[0][:12]] = json.loads(row[0])["control"]
    crossed = way.recorded_up + way.recorded_down
    assert job.encode() in crossed and len(seen.all) > 10
    for name, secret in secrets.items():
        assert secret.encode() not in crossed, name
        assert not [m for m in seen.all if secret.encode() in m.payload + m.topic.encode()], name
    # The password is in each CONNECT, which is what it is for, and nowhere else.
    assert crossed.count(password.encode()) == way.recorded_up.count(b"\x00\x04MQTT\x04") > 0
    assert not [m for m in seen.all if password.encode() in m.payload]


# ---- the scene itself ------------------------------------------------------------------------------------------

_KILLED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from support.hosts import Net
print(Net(["one", "two"]).tag, flush=True)
time.sleep(600)
"""


def test_namespaces_are_removed_after_a_kill(net: Net) -> None:
    """Lost: a clean machine, each time a test run is killed."""
    with subprocess.Popen([sys.executable, "-c", _KILLED, str(ROOT / "tests")], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        tag = run.stdout.readline().decode().strip()
        assert len(leftovers(tag)) == 3
        run.kill()
    poll(lambda: not leftovers(tag), UP_S, lambda: f"gone: {leftovers(tag)}")

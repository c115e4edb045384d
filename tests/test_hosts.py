"""Other hosts: an orchestrator and runners that share nothing but a broker, each in a network namespace of its own.

What each test says is what a user loses if it fails.
"""
from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import pytest

from support import poll
from support.brokers import Broker
from support.cli import Background
from support.daemons import UP_S, Post, topics
from support.hosts import Host, Net, leftovers, pythons
from support.inside import Inside
from support.observer import Observer, retained

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
        """Delegate in the foreground of its own process; the runner may still be starting."""
        return self.orch.popen("delegate", "--agent-session", "remote:" + self.session, "--prompt", prompt,
                               "--wait-for-runner", 60, *options)

    def delegate_many(self, count: int, *options: object) -> List[str]:
        """Delegate many jobs with one start of mam; their ids in order."""
        argv = ["delegate", "--agent-session", "remote:" + self.session, "--prompt", "one of many",
                "--wait-for-runner", "60", "--detach", *map(str, options)]
        return self.inside.run(self.orch, f"for _ in range({count}):\n    mam.main({argv!r})\n").split()

    def job_of(self, run: Background) -> str:
        """The id of the job that a `delegate` has registered."""
        text = run.wait_for(" registered for remote:", UP_S, "stderr")
        return text.split(" registered for ")[0].split()[-1]

    def at_work(self, run: Background) -> str:
        """Wait until the command of a delegated job runs, as far as the orchestrator knows."""
        job = self.job_of(run)
        poll(lambda: self.post.rows("SELECT 1 FROM events WHERE job_id = ? AND detail LIKE '%spawned%' OR job_id = ? "
                                    "AND payload LIKE '%\"spawned\":true%'", job, job), UP_S,
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
    holds(lambda: rig.post.job(job).status == "running", IDLE_S * 1.5,
          lambda: f"{rig.post.job(job)} {rig.post.describe()}")
    go(gpu)
    poll(lambda: rig.side(gpu).job(job).status == "completed", UP_S, "the end, over there")
    holds(lambda: rig.post.job(job).status == "running", 1.0, lambda: str(rig.post.job(job)))
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
    run = rig.delegate()
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



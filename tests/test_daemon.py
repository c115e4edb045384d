"""The daemon: the post office and watchdog of one registry. What each test says is what a user loses if it fails."""
from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import poll, process_table, resume
from support.brokers import Broker
from support.cli import Mam
from support.daemons import UP_S, Detour, Post, published, topics, unique
from support.inside import Inside
from support.observer import Observer, retained

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
HASTE = """
mam.PUBACK_TIMEOUT_S = 0.5
mam.BACKOFF_BASE_S = 0.1
mam.BACKOFF_MAX_S = 0.3
"""


@pytest.fixture
def inside(pyz: Path, session_folder: Path) -> Inside:
    return Inside(pyz, session_folder)


@pytest.fixture
def post(mam: Mam, inside: Inside) -> Post:
    return Post(mam, inside)


@pytest.fixture
def sleeper() -> Iterator[Callable[[], "subprocess.Popen[bytes]"]]:
    """Processes that do nothing, to be watched and killed."""
    made: List["subprocess.Popen[bytes]"] = []

    def make() -> "subprocess.Popen[bytes]":
        made.append(subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE))
        return made[-1]
    yield make
    for one in made:
        one.kill()
        one.communicate()


def state_of(broker: Broker, job_id: str) -> Dict[str, Any]:
    found = retained(broker, topics(job_id)[1])
    return dict(json.loads(found)) if found else {}


def end_of(broker: Broker, job_id: str) -> Dict[str, Any]:
    found = retained(broker, topics(job_id)[0])
    return dict(json.loads(found)) if found else {}


def seqs(observer: Observer, job_id: str) -> List[int]:
    """The numbers of a job's events on the wire in the order of their first arrival."""
    return list(dict.fromkeys(m.json()["seq"] for m in observer.messages("events", job_id) if m.payload))


def wait_heard(observer: Observer, job_id: str, seq: int) -> None:
    """What was acknowledged to its sender may be a little later here."""
    poll(lambda: seq in seqs(observer, job_id), UP_S, lambda: f"number {seq} in {seqs(observer, job_id)}")


def assert_ends_right(post: Post, broker: Broker, job_id: str, status: str = "completed") -> None:
    """What a host that looks only now sees of an ended job: its last event, and the state that belongs to it."""
    job = post.job(job_id)
    assert job.status == status

    def right() -> bool:
        event, state = end_of(broker, job_id), state_of(broker, job_id)
        return (event.get("event"), event.get("seq"), state.get("status"), state.get("seq")) == (
            status, job.last_seq, status, job.last_seq)
    # An old state that still arrives from a living sender is put right as soon as it is acknowledged.
    poll(right, UP_S, lambda: f"{end_of(broker, job_id)} and {state_of(broker, job_id)} of {job_id}, {post.describe()}")


# ---- sending ---------------------------------------------------------------------------------------------------

def test_an_agent_without_paho_publishes_in_order_through_the_daemon(post: Post, mam: Mam, broker: Broker,
                                                                     observe: Callable[..., Observer]) -> None:
    """Lost: publishing in 20 ms, and from a sandbox without network."""
    mam.env = broker.env()
    job = post.add(unique("order"))
    watcher = observe(broker)
    post.say(job, "started")
    post.run()
    post.wait_line()
    timing: Dict[str, Optional[str]] = {"PYTHONPROFILEIMPORTTIME": "1", "MQTT_PASSWORD": None}
    for number in range(3):
        done = mam("publish", job, "--event", "progress", "--detail", f"part {number}", env=timing, check=0)
        assert "import time:" in done.stderr and "paho" not in done.stderr
    assert "paho" not in mam("publish", job, "--event", "completed", env=timing, check=0).stderr
    poll(lambda: len(seqs(watcher, job)) == 5, UP_S, "all five on the wire")
    assert seqs(watcher, job) == [1, 2, 3, 4, 5]
    post.wait_sent(job)
    assert_ends_right(post, broker, job)
    states = [m.json()["seq"] for m in watcher.messages("state", job)]
    assert states == sorted(states)


def test_a_publisher_and_the_daemon_it_starts_send_once(post: Post, mam: Mam, mosquitto: Broker, proxy: Any) -> None:
    """Lost: bandwidth, and quiet logs on other hosts: each job's first event went out twice."""
    way = proxy(mosquitto)
    mam.env = way.env(mosquitto)
    job = post.add(unique("once"))
    # The publisher has seen what is owed, and sends it when the daemon that it has started is connected.
    post.inside.patched(mam, """
import time
def late(connection, messages, real=mam.Connection.publish):
    with mam.Registry(mam.load_settings().registry_dir) as registry:
        until = time.monotonic() + 20
        while time.monotonic() < until and not any(
                line["state"] == "up" for line in mam.daemon_info(registry).lines.values()):
            time.sleep(0.01)
    time.sleep(0.5)
    mam.Connection.publish = real
    real(connection, messages)
mam.Connection.publish = late
""")("publish", job, "--event", "started", check=0)
    post.wait_sent(job)
    post.wait_look(2)
    assert [published(way.recorded_up, topic) for topic in topics(job)] == [1, 1]


def test_a_publisher_that_stands_still_with_its_lock_silences_nobody(post: Post, mam: Mam, mosquitto: Broker) -> None:
    """Lost: all later news of a job, because one of its publishers was suspended while it sent."""
    mam.env = mosquitto.env()
    job = post.add(unique("held"))
    post.say(job, "started")
    with post.registry() as registry, post.module._job_lock(registry, job) as lock:
        assert lock.acquire(0)
        post.run()
        post.wait_line()
        post.wait_sent(job)


# In a network namespace of its own a process has no network at all.
NO_NETWORK = "import ctypes\nassert ctypes.CDLL(None).unshare(0x40000000) == 0\n"


@pytest.mark.root
@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
@pytest.mark.parametrize("born", ["with a network", "without"])
def test_a_publisher_with_no_network_publishes_in_order_through_the_daemon(
        post: Post, mam: Mam, broker: Broker, observe: Callable[..., Observer], born: str) -> None:
    """Lost: all that a sandboxed agent says; or everybody's news, behind a daemon that came from its sandbox."""
    if subprocess.run(["unshare", "-n", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this sandbox allows no network namespace")
    mam.env = broker.env()
    job = post.add(unique("sandbox"))
    watcher = observe(broker)
    sandboxed = post.inside.patched(mam, NO_NETWORK)
    if born == "without":
        done = sandboxed("publish", job, "--event", "started", "--attempts", 1, check=2)
        assert "recorded, not sent yet" in done.stderr and "unreachable" in done.stderr
        first = post.wait_daemon()
        assert seqs(watcher, job) == []

        def replaced() -> bool:
            mam("publish", job, "--event", "progress", check=0)
            return post.line().get("state") == "up" and post.pid() != first
        poll(replaced, UP_S, lambda: f"one that can connect: {post.describe()}", interval=0.3)
    else:
        mam("publish", job, "--event", "started", check=0)
        post.wait_line()
    for number in range(3):
        sandboxed("publish", job, "--event", "progress", "--detail", f"part {number}", check=0)
    sandboxed("publish", job, "--event", "completed", check=0)
    post.wait_sent(job)
    wait_heard(watcher, job, post.job(job).last_seq)
    assert seqs(watcher, job) == post.numbers(job) == list(range(1, post.job(job).last_seq + 1))
    assert_ends_right(post, broker, job)


@pytest.mark.parametrize("kind", ["nats", "mosquitto"])
def test_an_end_that_could_not_be_sent_arrives_when_the_broker_is_back(
        post: Post, mam: Mam, own_broker: Any, kind: str) -> None:
    """Lost: the news that the work is done, when the broker was down at that moment and the agent has left."""
    broker = own_broker(kind)
    mam.env = broker.env()
    job = post.add(unique("down"))
    mam("publish", job, "--event", "started", check=0)
    post.wait_line()
    broker.stop()
    done = mam("publish", job, "--event", "completed", "--attempts", 1, check=2)
    assert "recorded, not sent yet" in done.stderr
    broker.start()
    post.wait_sent(job)
    assert_ends_right(post, broker, job)


@pytest.mark.parametrize("moment", ["before the send", "before the arrival", "before the acknowledgement"])
def test_a_daemon_killed_in_mid_send_loses_nothing(post: Post, mam: Mam, broker: Broker, moment: str, proxy: Any,
                                                   observe: Callable[..., Observer]) -> None:
    """Lost: an event that was committed, because the one process that would send it was killed."""
    way = proxy(broker)
    mam.env = way.env(broker)
    job = post.add(unique("killed"))
    watcher = observe(broker)
    post.say(job, "started")
    run = post.run()
    post.wait_sent(job)
    if moment == "before the send":
        post.pause(run.pid)
    else:
        way.stall("up" if moment == "before the arrival" else "down")
    post.say(job, "progress", "half way")
    post.say(job, "completed", "all done")
    if moment != "before the send":
        poll(lambda: b"all done" in way.recorded_up, UP_S, "the daemon has sent it")
    run.kill()
    assert post.rows("SELECT count(*) FROM events WHERE owed = 1 AND job_id = ?", job) == [(2,)]
    if moment == "before the arrival":
        way.drop()                      # with all that was on its way
    way.resume()
    mam(check=0)                        # any command brings a daemon back
    post.wait_sent(job)
    wait_heard(watcher, job, 3)
    assert seqs(watcher, job) == [1, 2, 3]
    assert_ends_right(post, broker, job)


def test_a_daemon_that_stands_still_does_not_stop_publishers(post: Post, mam: Mam, broker: Broker,
                                                             observe: Callable[..., Observer]) -> None:
    """Lost: news that waits behind a suspended daemon; or, when it goes on, an old state over the newer one."""
    mam.env = broker.env()
    job = post.add(unique("still"))
    watcher = observe(broker)
    post.say(job, "started")
    run = post.run("mam.FRESH_S = 1.0\n")
    post.wait_sent(job)
    post.pause(run.pid)
    post.say(job, "progress", "found by nobody yet")
    quick = post.inside.patched(mam, "mam.FRESH_S = 1.0\nmam.DAEMON_WAIT_S = 1.0\n")
    poll(lambda: quick("publish", job, "--event", "progress", check=(0, 2)).code == 0, UP_S, "sent by ourselves")
    quick("publish", job, "--event", "completed", check=0)
    resume(run.pid)
    post.wait_sent(job)
    poll(lambda: not post.daemons(), UP_S, "the daemon leaves")
    wait_heard(watcher, job, post.job(job).last_seq)
    assert seqs(watcher, job) == post.numbers(job)
    assert_ends_right(post, broker, job)
    states = [(m.json()["seq"], m.json()["status"]) for m in watcher.messages("state", job)]
    assert states[-1] == (post.job(job).last_seq, "completed")


@pytest.mark.parametrize("fate", ["loses the connection", "is killed before", "is stopped, and killed after"])
def test_a_state_never_goes_backwards(post: Post, mam: Mam, broker: Broker, proxy: Any, fate: str) -> None:
    """Lost: the end of a job, hidden for ever under an older state that was held up on the way."""
    way = Detour(proxy, broker)
    mam.env = way.env()
    job = post.add(unique("back"))
    post.say(job, "started")
    run = post.run(HASTE + "mam.FRESH_S = 1.0\n")
    post.wait_sent(job)
    way.old.stall("up")
    with post.registry() as registry:
        registry.edit(job, "operator", {"role": "Second"})         # owes a state, and no event before it
    sent = published(way.old.recorded_up, topics(job)[1])
    poll(lambda: published(way.old.recorded_up, topics(job)[1]) > sent or post.line()["flying"], UP_S, "on its way")
    way.part()
    if fate == "is killed before":
        run.kill()
    if fate == "is stopped, and killed after":
        post.pause(run.pid)
        lock = mam.registry_dir / "daemon.lock"
        poll(lambda: time.time() - lock.stat().st_mtime > 1.0, UP_S, "known to stand still")
    post.inside.patched(mam, "mam.FRESH_S = 1.0\n")("publish", job, "--event", "completed", check=(0, 2))
    post.wait_sent(job)
    if fate == "is stopped, and killed after":
        run.kill()
    way.old.resume()
    poll(lambda: way.old.open_connections == 0, UP_S, "what was held up has gone somewhere")
    mam(check=0)
    post.wait_sent(job)
    assert_ends_right(post, broker, job)


def test_a_state_that_arrives_late_from_a_living_daemon_is_put_right(post: Post, mam: Mam, broker: Broker,
                                                                     proxy: Any) -> None:
    """Lost: the end of a job, under an older state that a suspended daemon had on its way and that then arrived."""
    way = Detour(proxy, broker)
    mam.env = way.env()
    job = post.add(unique("late"))
    post.say(job, "started")
    run = post.run("mam.FRESH_S = 1.0\n")
    post.wait_sent(job)
    way.old.stall("up")
    with post.registry() as registry:
        registry.edit(job, "operator", {"role": "Second"})
    poll(lambda: post.line()["flying"], UP_S, "on its way")
    post.pause(run.pid)
    way.part()
    lock = mam.registry_dir / "daemon.lock"
    poll(lambda: time.time() - lock.stat().st_mtime > 1.0, UP_S, "known to stand still")
    post.inside.patched(mam, "mam.FRESH_S = 1.0\n")("publish", job, "--event", "completed", check=0)
    way.old.resume()
    resume(run.pid)
    post.wait_gone()
    post.wait_sent(job)
    assert_ends_right(post, broker, job)


DEAD = {"pid": 1, "start": "0", "boot": "another", "ns": ""}


def senders(post: Post) -> List[str]:
    return [row[0] for row in post.rows("SELECT client_id FROM senders")]


def test_a_dead_sender_is_remembered_until_its_session_is_ended(post: Post, mam: Mam, mosquitto: Broker,
                                                                proxy: Any) -> None:
    """Lost: the fence before what a killed sender left on its way, because the first try to connect failed."""
    way = proxy(mosquitto)
    mam.env = way.env(mosquitto)
    job = post.add(unique("fence"))
    with post.registry() as registry:
        registry.add_sender("mam-dead", "%(MQTT_BROKER)s:%(MQTT_PORT)s" % mam.env, DEAD)
    post.say(job, "started")
    way.refuse()
    alone = mam.without_daemon()
    alone("publish", job, "--event", "progress", "--attempts", 1, check=2)
    assert senders(post) == ["mam-dead"]
    way.accept()
    alone("publish", job, "--event", "progress", check=0)
    assert senders(post) == []


def test_a_dead_sender_is_taken_over_by_one_of_many(post: Post, mam: Mam, broker: Broker) -> None:
    """Lost: news of all who publish at once behind a dead sender, for they throw each other off the broker."""
    mam.env = broker.env()
    jobs = [unique("many%d" % number) for number in range(12)]
    post.add(*jobs)
    with post.registry() as registry:
        registry.add_sender(unique("mam-dead"), "%(MQTT_BROKER)s:%(MQTT_PORT)s" % mam.env, DEAD)
    alone = mam.without_daemon()
    runs = [alone.popen("publish", job, "--event", "started", "--attempts", 1) for job in jobs]
    assert [run.wait().code for run in runs] == [0] * len(jobs)
    assert senders(post) == []


def test_a_sender_that_dies_beside_a_connected_daemon_is_ended(post: Post, mam: Mam, broker: Broker) -> None:
    """Lost: the daemon's leave; it stayed for ever for a dead publisher's name."""
    mam.env = broker.env()
    job = post.add(unique("beside"))
    post.say(job, "completed")
    run = post.run()
    post.wait_line()
    with post.registry() as registry:
        registry.add_sender(unique("mam-dead"), "%(MQTT_BROKER)s:%(MQTT_PORT)s" % mam.env, DEAD)
    assert run.wait(30).code == 0
    assert senders(post) == [] and post.owed() == 0


def test_a_flood_of_one_job_holds_up_no_other(post: Post, mam: Mam, nats: Broker,
                                              observe: Callable[..., Observer]) -> None:
    """Lost: hours, by a job whose one event waits behind another's five thousand."""
    mam.env = nats.env()
    flood, other = unique("flood"), unique("other")
    post.add(flood, other)
    watcher = observe(nats)
    post.say(other, "started")
    post.run()
    post.wait_sent(other)
    with post.registry() as registry, registry.write():
        job = registry.job(flood)
        for number in range(5000):
            event = registry._append_event(job, "progress", "worker", f"drop {number}", {})
            job = job._replace(last_seq=event.seq)
        registry._update_job(job, {"last_seq": job.last_seq, "status": "running"})
    post.say(other, "completed")
    watcher.wait_for(lambda m: other in m.topic and b'"completed"' in m.payload, 60, "the other job's event")
    before = len(watcher.messages("events", flood))
    assert before < 2500, f"{before} events of the flood came first"
    post.wait_sent(timeout=60)
    poll(lambda: len(seqs(watcher, flood)) == 5000, 60, "the flood")
    assert seqs(watcher, flood) == list(range(1, 5001))


def test_what_is_owed_again_by_somebody_else_is_sent(post: Post, mam: Mam, broker: Broker) -> None:
    """Lost: the state of an ended job, put right by nobody when a publisher's older one was acknowledged last."""
    mam.env = broker.env()
    job = post.add(unique("again"))
    post.say(job, "completed")
    run = post.run()
    post.wait_sent(job)
    with post.registry() as registry:
        registry.mark_sent(states=[(job, 0)])          # a late acknowledgement
    post.wait_sent(job)
    assert run.wait(30).code == 0, "nothing is left to do"
    assert_ends_right(post, broker, job)


def test_an_event_the_broker_will_not_have_blocks_nobody_else(post: Post, mam: Mam, own_broker: Any) -> None:
    """Lost: everybody's news, because one agent's long report makes the broker close the connection."""
    broker = own_broker("mosquitto", extra="max_packet_size 20000")
    mam.env = broker.env()
    poisoned, other = unique("poison"), unique("other")
    post.add(poisoned, other)
    post.say(other, "started")
    run = post.run(HASTE)
    post.wait_sent(other)
    post.say(poisoned, "progress", fields={"feedback": "x" * 60000})
    poll(lambda: post.line().get("failures", 0) or post.line().get("connects", 0) > 1, UP_S, "the broker closed")
    post.say(poisoned, "progress", "behind it")
    post.say(other, "progress", "not held up")
    post.wait_sent(other)
    poll(lambda: "held back" in run.stderr, UP_S, lambda: f"said in the log: {run}")
    post.say(other, "completed")
    post.wait_sent(other)
    assert_ends_right(post, broker, other)
    assert post.rows("SELECT count(*) FROM events WHERE job_id = ? AND owed = 1", poisoned) == [(2,)]


@pytest.mark.parametrize("kind", ["nats", "mosquitto"])
@pytest.mark.parametrize("memory", [True, False])
def test_what_a_broker_forgot_it_is_told_again_and_else_nothing(
        post: Post, mam: Mam, own_broker: Any, observe: Callable[..., Observer], kind: str, memory: bool) -> None:
    """Lost: every state and end, after a broker lost its disk; or a storm of repetitions after each restart."""
    broker = own_broker(kind)
    mam.env = broker.env()
    ended, running = post.add(unique("ended")), post.add(unique("running"))
    post.say(ended, "started")
    post.say(ended, "completed")
    post.say(running, "started")
    post.run(HASTE)
    post.wait_sent()
    if memory and kind == "mosquitto":
        broker.wait_written(running.encode())
    watcher = observe(broker)
    connects = post.line()["connects"]
    broker.restart(wipe=not memory)
    poll(lambda: post.line()["connects"] > connects and post.line()["state"] == "up", UP_S, "reconnected")
    watcher.wait_ready()
    if memory:
        post.say(running, "progress", "the next news")
        post.wait_sent()
        again = [m for m in watcher.all if not m.retain and b"the next news" not in m.payload]
        assert again == []
    poll(lambda: state_of(broker, running).get("status") == "running", UP_S, "the running job's state", interval=0.2)
    poll(lambda: end_of(broker, ended).get("event") == "completed", UP_S, "the ended job's end", interval=0.2)
    assert_ends_right(post, broker, ended)


def test_an_end_in_flight_is_taken_back_when_the_job_is_redispatched(post: Post, mam: Mam, broker: Broker,
                                                                     proxy: Any) -> None:
    """Lost: a new attempt, which every later subscriber takes for ended."""
    way = proxy(broker)
    mam.env = way.env(broker)
    job = post.add(unique("again"))
    post.say(job, "started")
    post.run()
    post.wait_sent(job)
    way.stall("down")
    post.say(job, "completed", "the old end")
    poll(lambda: b"the old end" in way.recorded_up, UP_S, "in flight")
    mam("redispatch", job, "--no-deliver", check=0)
    way.resume()
    post.wait_sent(job)
    assert retained(broker, topics(job)[0]) is None
    state = state_of(broker, job)
    assert (state["status"], state["data"]["attempt_id"]) == ("pending", 2)


def test_a_job_with_its_own_broker_is_sent_there_and_only_there(post: Post, mam: Mam, nats: Broker,
                                                                mosquitto: Broker) -> None:
    """Lost: the confidence of a job that was given a broker of its own."""
    mam.env = nats.env()
    default, own = unique("default"), unique("own")
    for job, flags in ((default, []), (own, ["--broker", f"127.0.0.1:{mosquitto.port}"])):
        mam("register", "--agent-session", "queue:q", "--prompt", "x", "--job-id", job, *flags, check=0)
        post.say(job, "started")
    post.run()
    post.wait_sent()
    lines = mam("daemon", "status", check=0).stdout.splitlines()
    for server in (nats, mosquitto):
        assert any(line.startswith(f"broker 127.0.0.1:{server.port}: up") for line in lines), lines
    assert state_of(nats, default)["status"] == state_of(mosquitto, own)["status"] == "running"
    assert not state_of(nats, own) and not state_of(mosquitto, default)


# ---- a registry that cannot be written for a while --------------------------------------------------------------

def full_disk(tmp_path: Path) -> "tuple[Path, str]":
    flag = tmp_path / "full"
    return flag, FULL_DISK.format(flag=str(flag))


def until_met(flag: Path) -> None:
    """Until the daemon has met the full disk."""
    poll(lambda: Path(f"{flag}.met").exists(), UP_S, "the daemon met the full disk")


def test_an_acknowledgement_that_comes_while_the_disk_is_full_is_not_forgotten(
        post: Post, mam: Mam, mosquitto: Broker, proxy: Any, tmp_path: Path) -> None:
    """Lost: all further news of a job whose acknowledgement met a full disk, until the daemon is restarted."""
    way = proxy(mosquitto)
    mam.env = way.env(mosquitto)
    job = post.add(unique("full"))
    flag, code = full_disk(tmp_path)
    post.say(job, "started")
    run = post.run(code)
    post.wait_sent(job)
    way.stall("down")
    post.say(job, "progress", "the disk fills up")
    poll(lambda: b"the disk fills up" in way.recorded_up, UP_S, "sent")
    flag.touch()
    way.resume()
    until_met(flag)
    flag.unlink()
    post.say(job, "completed")
    post.wait_sent(job, 15)
    assert run.code is None or run.code == 0
    assert_ends_right(post, mosquitto, job)


def test_a_message_that_comes_while_the_disk_is_full_is_not_forgotten(
        post: Post, mam: Mam, mosquitto: Broker, tmp_path: Path, observe: Callable[..., Observer]) -> None:
    """Lost: the end of a remote job. The broker has its acknowledgement and never sends it again."""
    mam.env = mosquitto.env()
    far = Far(post, unique("far"))
    flag, code = full_disk(tmp_path)
    run = post.run(code)
    far.wait_subscribed()
    sender = observe(mosquitto, None)
    far.send(sender, 1, "started")
    post.wait_status(far.job, "running")
    flag.touch()
    far.send(sender, 2, "completed")
    until_met(flag)
    flag.unlink()
    post.wait_status(far.job, "completed", 15)
    assert run.code is None or run.code == 0


def test_every_deadline_that_met_a_full_disk_is_kept_later(post: Post, mam: Mam, tmp_path: Path) -> None:
    """Lost: the deadlines of all jobs but one, after a moment without space: those jobs stay open for ever."""
    jobs = [unique("due") for _ in range(3)]
    post.add(*jobs, timeout_sec=1.0)
    flag, code = full_disk(tmp_path)
    moment = post.module.instant()
    for job in jobs:
        post.say(job, "started")
    with post.registry() as registry, registry.write():
        for job in jobs:
            registry._execute("UPDATE jobs SET delivered_mono = ?, delivered_at = ? WHERE job_id = ?",
                              (moment, post.module.utc_now(), job))
    flag.touch()
    run = post.run(code, wait=False)
    until_met(flag)
    time_up = time.monotonic() + 1.5
    poll(lambda: time.monotonic() > time_up, 5, "all three are due")
    flag.unlink()
    for job in jobs:
        assert post.wait_status(job, "error", 15).reason == "deadline_timeout"
    assert run.code is None or run.code == 0


# ---- beats -----------------------------------------------------------------------------------------------------

def beats(post: Post, job_id: str) -> List[Any]:
    return post.rows("SELECT attempt_id, watch, touched_mono FROM beats WHERE job_id = ?", job_id)


def touched(post: Post, job_id: str) -> str:
    return str(beats(post, job_id)[0][2])


def wait_beats(post: Post, job_id: str, count: int = 3) -> None:
    for _ in range(count):
        last = touched(post, job_id)
        poll(lambda: touched(post, job_id) != last, UP_S, lambda: f"a beat: {post.describe()}")


@pytest.mark.parametrize("body", ["zombie", "reaped"])
def test_a_worker_is_alive_as_long_as_its_process_and_no_longer(post: Post, mam: Mam, sleeper: Any, body: str) -> None:
    """Lost: the difference between an agent that thinks and one that has crashed."""
    job, worker = post.add("j"), sleeper()
    mam("publish", job, "--event", "started", "--heartbeat", 0.3, "--watch-pid", worker.pid, check=0)
    wait_beats(post, job)
    worker.kill()
    if body == "reaped":
        worker.wait()
    begun = time.monotonic()
    poll(lambda: not beats(post, job), UP_S, "the beat ends")
    assert time.monotonic() - begun < 5, "within one period, and a loaded machine's delay"
    assert "beat_stopped" in post.notes(job) and post.job(job).status == "running"


@pytest.mark.parametrize("agent", ["a command", "a watched process"])
def test_an_agent_that_is_killed_ends_its_job_for_everybody(post: Post, mam: Mam, mosquitto: Broker, sleeper: Any,
                                                            agent: str) -> None:
    """Lost: the end of a job whose agent was killed: here, and for whoever looks at the broker only later."""
    mam.env = mosquitto.env()
    job = unique("agent")
    if agent == "a command":
        delegate(mam, "echo $$ > pid; exec sleep 300", job=job)
        poll(lambda: post.job(job).started_at and (mam.workspace / "pid").exists(), UP_S, "the command runs")
        os.kill(int((mam.workspace / "pid").read_text()), signal.SIGKILL)
        assert "signal 9" in post.wait_status(job, "error").detail
    else:
        post.add(job, idle_timeout_sec=1.5)
        worker = sleeper()
        mam("publish", job, "--event", "started", "--heartbeat", 0.3, "--watch-pid", worker.pid, check=0)
        wait_beats(post, job, 8)                # longer than idle: it is the beat that keeps it
        assert post.job(job).status == "running"
        worker.kill()
        assert post.wait_status(job, "error").reason == "unresponsive"
        assert "beat_stopped" in post.notes(job)
    post.wait_sent(job)
    assert_ends_right(post, mosquitto, job, "error")
    assert not beats(post, job)
    assert mam("wait", job, timeout=10).code == (1 if agent == "a command" else 2)


@pytest.mark.parametrize("end", ["completed", "redispatch", "timeout"])
def test_a_beat_ends_with_its_attempt(post: Post, mam: Mam, sleeper: Any, end: str) -> None:
    """Lost: the truth, by a worker shown alive after its job ended or was given to another."""
    job = post.add("j", timeout_sec=2.0 if end == "timeout" else 3600.0)
    mam("publish", job, "--event", "started", "--heartbeat", 0.2, "--watch-pid", sleeper().pid, check=0)
    wait_beats(post, job, 2)
    if end == "completed":
        mam("publish", job, "--event", "completed", check=0)
    elif end == "redispatch":
        mam("redispatch", job, "--force", "--no-deliver", check=0)
    else:
        assert post.wait_status(job, "error").reason == "deadline_timeout"
    assert not beats(post, job)


def test_no_beat_follows_the_end_whatever_was_stopped_in_between(post: Post, mam: Mam, mosquitto: Broker,
                                                                 observe: Callable[..., Observer]) -> None:
    """Lost: an end, overruled by the heartbeat of a worker that no longer exists."""
    mam.env = mosquitto.env()
    watcher = observe(mosquitto)
    jobs = [unique("end") for _ in range(6)]
    post.add(*jobs)
    for job in jobs:
        post.say(job, "started", fields={"heartbeat_sec": 0.05})
    run = post.run()
    post.wait_line()
    for job in jobs:
        last = len(post.numbers(job)) and post.numbers(job)[-1]
        poll(lambda: post.numbers(job)[-1] > last, UP_S, "a beat on the wire")
        post.pause(run.pid)                              # somewhere in mid-beat
        post.say(job, "completed")
        resume(run.pid)
    post.wait_sent()
    post.wait_look()
    for job in jobs:
        wait_heard(watcher, job, post.job(job).last_seq)
        last_event = post.rows("SELECT event, seq FROM events WHERE job_id = ? AND seq IS NOT NULL ORDER BY seq DESC "
                               "LIMIT 1", job)[0]
        assert last_event == ("completed", post.job(job).last_seq)
        on_wire = [m.json() for m in watcher.messages("events", job)]
        assert (on_wire[-1]["event"], on_wire[-1]["seq"]) == last_event
        assert_ends_right(post, mosquitto, job)


# The daemon stops itself when the file FLAG is there: with a beat due and not recorded, or recorded and not sent.
STOPS_IN_MID_BEAT = """
import signal
def beat_for(self, due, on_wire, real=mam.Registry.beat_for):
    if {moment!r} == "due" and due and os.path.exists({flag!r}):
        os.unlink({flag!r})
        os.kill(os.getpid(), signal.SIGSTOP)
    last = "SELECT max(seq) FROM events WHERE source = 'beat'"
    before = self._execute(last)
    real(self, due, on_wire)
    if {moment!r} == "recorded" and os.path.exists({flag!r}) and self._execute(last) != before:
        os.unlink({flag!r})
        os.kill(os.getpid(), signal.SIGSTOP)
mam.Registry.beat_for = beat_for
mam.FRESH_S = 1.0
"""


def holds_a_beat(way: Detour) -> bool:
    """Hold up what a daemon sends, if that is soon a beat: what is held up may be a state, and then no beat comes."""
    way.old.stall("up")
    begun = len(way.old.recorded_up)
    with contextlib.suppress(AssertionError):
        return bool(poll(lambda: b"heartbeat" in way.old.recorded_up[begun:], 1))
    way.old.resume("up")
    return False


def stop_in_mid_beat(post: Post, way: Detour, job: str, moment: str, flag: Path) -> int:
    """Run a daemon that beats for a job and stands still in the middle of a beat; its pid."""
    run = post.run(STOPS_IN_MID_BEAT.format(moment=moment, flag=str(flag)))
    post.wait_sent(job)
    poll(lambda: b"heartbeat" in way.old.recorded_up, UP_S, "a beat on the wire")
    if moment == "in flight":
        poll(lambda: holds_a_beat(way), UP_S, "a beat on its way")
        post.pause(run.pid)
    else:
        flag.touch()
        poll(lambda: process_table()[run.pid][1] in "Tt", UP_S, "it stands in mid-beat")
        assert not flag.exists()
    way.part()
    lock = post.mam.registry_dir / "daemon.lock"
    poll(lambda: time.time() - lock.stat().st_mtime > 1.0, UP_S, "known to stand still")
    return run.pid


@pytest.mark.parametrize("moment", ["due", "recorded", "in flight"])
def test_the_end_is_the_last_word_whatever_beat_the_daemon_was_stopped_in(
        post: Post, mam: Mam, mosquitto: Broker, proxy: Any, tmp_path: Path, observe: Callable[..., Observer],
        moment: str) -> None:
    """Lost: an end, overruled by the beat or the state that a suspended daemon had in hand."""
    way = Detour(proxy, mosquitto)
    mam.env = way.env()
    job = post.add(unique("mid"))
    watcher = observe(mosquitto)
    post.say(job, "started", fields={"heartbeat_sec": 0.2})
    pid = stop_in_mid_beat(post, way, job, moment, tmp_path / "flag")
    before = post.job(job).last_seq
    post.inside.patched(mam, "mam.FRESH_S = 1.0\n")("publish", job, "--event", "completed", check=0)
    way.old.resume()
    resume(pid)
    post.wait_gone()
    assert post.owed(job) == 0
    assert post.job(job).last_seq == before + 1 == post.numbers(job)[-1], "a beat was recorded behind the end"
    wait_heard(watcher, job, before + 1)
    on_wire = [m.json() for m in watcher.messages("events", job)]
    assert max((m["seq"], m["event"]) for m in on_wire) == (before + 1, "completed")
    assert len({(m["seq"], m["detail"]) for m in on_wire}) == len({m["seq"] for m in on_wire}), "a number twice"
    assert_ends_right(post, mosquitto, job)


@pytest.mark.parametrize("moment", ["due", "recorded", "in flight"])
def test_a_beat_in_flight_is_no_sign_of_life_of_the_next_attempt(
        post: Post, mam: Mam, mosquitto: Broker, proxy: Any, tmp_path: Path, observe: Callable[..., Observer],
        moment: str) -> None:
    """Lost: the truth about a redispatched job, shown alive by a beat of the worker it was taken from."""
    way = Detour(proxy, mosquitto)
    mam.env = way.env()
    job = post.add(unique("beating"))
    watcher = observe(mosquitto)
    post.say(job, "started", fields={"heartbeat_sec": 0.2})
    pid = stop_in_mid_beat(post, way, job, moment, tmp_path / "flag")
    beat = post.job(job).last_seq
    quick = post.inside.patched(mam, "mam.FRESH_S = 1.0\n")
    quick("redispatch", job, "--force", "--no-deliver", check=0)
    base = post.job(job).last_seq
    way.old.resume()
    resume(pid)
    post.wait_sent(job)
    post.wait_gone()                            # nobody has taken the new attempt: there is nothing to do
    record = post.job(job)
    assert (record.status, record.attempt_id, record.last_seq, record.last_event_at) == ("pending", 2, base, None)
    assert not beats(post, job)
    assert retained(mosquitto, topics(job)[0]) is None
    state = state_of(mosquitto, job)
    assert (state["status"], state["data"]["attempt_id"]) == ("pending", 2)
    quick("publish", job, "--event", "started", "--attempt-id", 2, check=0)
    quick("publish", job, "--event", "completed", "--attempt-id", 2, check=0)
    post.wait_sent(job)
    wait_heard(watcher, job, base + 2)
    numbers = [(m.json()["data"]["attempt_id"], m.json()["seq"], m.json()["event"])
               for m in watcher.messages("events", job) if m.payload]
    assert [one for one in dict.fromkeys(numbers) if one[0] == 2] == [(2, base + 1, "started"),
                                                                     (2, base + 2, "completed")]
    assert numbers[-1][0] == 2 and max(seq for attempt, seq, _ in numbers if attempt == 1) <= base
    assert moment != "recorded" or beat not in seqs(watcher, job), "it was not withdrawn"
    assert_ends_right(post, mosquitto, job)


def test_an_hour_of_beats_is_one_line_without_a_hole(post: Post, mam: Mam, mosquitto: Broker,
                                                     observe: Callable[..., Observer]) -> None:
    """Lost: the disk (2.9 million lines a day), or two seconds at each hole for whoever reads later."""
    mam.env = mosquitto.env()
    job = post.add(unique("beats"))
    watcher = observe(mosquitto)
    post.say(job, "started", fields={"heartbeat_sec": 0.1})
    post.run()
    poll(lambda: len(seqs(watcher, job)) > 6, UP_S, "six beats on the wire")
    post.say(job, "progress", "work")
    poll(lambda: max(seqs(watcher, job)) > max(m.json()["seq"] for m in watcher.messages("events", job)
                                               if m.json()["detail"] == "work") + 3
         if b"work" in b"".join(m.payload for m in watcher.messages("events", job)) else False, UP_S, "more beats")
    post.say(job, "completed")
    post.wait_sent(job)
    rows = post.rows("SELECT source, detail FROM events WHERE job_id = ? AND seq IS NOT NULL ORDER BY seq", job)
    assert [row[0] for row in rows] in (["worker", "beat", "worker", "beat", "worker"],
                                        ["worker", "beat", "beat", "worker", "beat", "worker"],
                                        ["worker", "beat", "worker", "beat", "beat", "worker"],
                                        ["worker", "beat", "beat", "worker", "beat", "beat", "worker"])
    with post.registry() as registry:
        follower = post.module.Follower(registry, [job])
        assert len(follower.poll()) == len(rows) and follower.done      # at once, with nothing to wait for
        assert registry.missing_numbers(registry.job(job)) is None


def test_arming_again_replaces_and_watches_the_new_process_alone(post: Post, mam: Mam, sleeper: Any) -> None:
    """Lost: the sign of life of an agent that was started anew, because its first process ended."""
    job, first, second = post.add("j"), sleeper(), sleeper()
    for worker in (first, second):
        mam("publish", job, "--event", "started", "--heartbeat", 0.2, "--watch-pid", worker.pid, check=0)
    assert [json.loads(row[1])["pid"] for row in beats(post, job)] == [second.pid]
    first.kill()
    first.wait()
    wait_beats(post, job, 3)
    second.kill()
    poll(lambda: not beats(post, job), UP_S, "the beat ends with the second")


def test_a_beat_armed_anew_survives_the_end_of_the_old_process(post: Post, sleeper: Any) -> None:
    """Lost: an agent restarted at the very moment at which the daemon found its first process dead."""
    job, first, second, mod = post.add("j"), sleeper(), sleeper(), post.module
    post.say(job, "started", fields={"heartbeat_sec": 1, "watch": mod.identity_of(first.pid)})
    first.kill()
    first.wait()
    with post.registry() as registry:
        clock = mod.Clock(registry, mod.load_settings(str(registry.directory)), lambda _job: False)
        clock.refresh(registry.open_jobs(), registry.beats(), time.monotonic())
        post.say(job, "started", fields={"heartbeat_sec": 1, "watch": mod.identity_of(second.pid)})
        clock.turn(time.monotonic() + 2)
        assert registry.beat(job) and "beat_stopped" not in post.notes(job)


def test_an_ended_attempt_arms_nothing(post: Post, mam: Mam, sleeper: Any) -> None:
    """Lost: the end, by a worker that says `started` once more when all is over."""
    job = post.add("j")
    post.say(job, "completed")
    done = mam("publish", job, "--event", "started", "--heartbeat", 0.2, "--watch-pid", sleeper().pid, check=4)
    assert "leave your work in place" in done.stderr
    assert not beats(post, job) and post.job(job).status == "completed"


def test_alive_and_progressing_are_two_things(post: Post, mam: Mam, sleeper: Any) -> None:
    """Lost: seeing that an agent lives and gets nowhere."""
    job = post.add("j")
    mam("publish", job, "--event", "started", "--heartbeat", 0.3, "--watch-pid", sleeper().pid, check=0)

    def shown() -> Dict[str, Any]:
        return dict(mam("--json", check=0).json()["open"][0])
    poll(lambda: shown()["progress_s"] > 1.2, UP_S, "no progress for a while", interval=0.2)
    wait_beats(post, job, 1)
    seen = shown()
    assert seen["alive_s"] < seen["progress_s"]


class Container:
    """A shell in a pid namespace of its own, on the same files: an agent's container. It does what it is told."""

    def __init__(self, mam: Mam) -> None:
        self.mam, self._count = mam, 0
        self.shell = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", "while read -r line; do eval \"$line\"; done"],
            stdin=subprocess.PIPE, env=mam.environment(), cwd=mam.workspace)
        self.agent = self.mam.workspace / "agent.pid"
        self.do("sleep 1000 & echo $! > agent.pid")

    def do(self, line: str) -> None:
        """Run a line of shell there to its end; it must succeed."""
        self._count += 1
        done = self.mam.workspace / f"done{self._count}"
        assert self.shell.stdin is not None
        self.shell.stdin.write(f"{line}; echo $? > {done}.new; mv {done}.new {done}\n".encode())
        self.shell.stdin.flush()
        poll(lambda: done.exists() or self.shell.poll() is not None, UP_S, f"done in the container: {line}")
        assert done.read_text() == "0\n", line

    def publish(self, *words: object) -> None:
        self.do(" ".join(shlex.quote(word) for word in self.mam.argv("publish", *words)))

    def arm(self, job: str, heartbeat: float, *words: object) -> None:
        self.publish(job, "--event", "started", "--heartbeat", heartbeat, "--watch-pid", self.agent.read_text().strip(),
                     *words)

    def beating(self) -> List[int]:
        """The pids, here, of what beats beside the agent."""
        found = []
        for pid in self.mam.processes():
            with contextlib.suppress(OSError):
                words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
                found += [pid] if b"_beat" in words else []
        return found

    def close(self) -> None:
        assert self.shell.stdin is not None
        self.shell.stdin.close()
        self.shell.wait(20)


@pytest.fixture
def container(mam: Mam) -> Iterator[Container]:
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("no pid namespaces here")
    if subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this sandbox allows no pid namespace")
    made = Container(mam)
    yield made
    made.close()


def daemon_outside(post: Post) -> int:
    """A daemon that cannot see into the container, with something to do."""
    post.add("other")
    post.say("other", "started")
    return post.run().pid


@pytest.mark.root
def test_an_agent_in_a_container_is_alive_as_long_as_its_process_and_no_longer(post: Post,
                                                                              container: Container) -> None:
    """Lost: an agent in a container, closed as unresponsive while it thinks; or shown alive after its crash."""
    daemon = daemon_outside(post)
    job = post.add("j", heartbeat_sec=0.5, idle_timeout_sec=3.0)
    container.arm(job, 0.5)
    wait_beats(post, job, 8)
    began = time.monotonic()
    poll(lambda: time.monotonic() - began > 3.5, 10, "longer than idle")
    assert post.job(job).status == "running" and len(container.beating()) == 1
    container.do("kill -9 $(cat agent.pid)")
    killed = time.monotonic()
    poll(lambda: not beats(post, job), UP_S, "the beat ends")
    assert time.monotonic() - killed < 3, "within one period, and a loaded machine's delay"
    assert "beat_stopped" in post.notes(job)
    assert post.wait_status(job, "error").reason == "unresponsive"
    poll(lambda: not container.beating(), UP_S, "nothing beats any more")
    assert post.daemons() == [daemon]


@pytest.mark.root
@pytest.mark.parametrize("end", ["completed", "redispatch", "armed again"])
def test_a_beat_in_a_container_ends_with_its_attempt(post: Post, container: Container, end: str) -> None:
    """Lost: the truth, by a beat in a container that keeps a stale attempt alive, or one process more at each start."""
    daemon_outside(post)
    job = post.add("j")
    container.arm(job, 0.3)
    wait_beats(post, job, 2)
    old, = container.beating()
    if end == "completed":
        container.publish(job, "--event", "completed")
        assert not beats(post, job)
    elif end == "redispatch":
        post.mam("redispatch", job, "--force", "--no-deliver", check=0)
        assert not beats(post, job)
        post.say(job, "started", fields={"heartbeat_sec": 1000.0})
        first = touched(post, job)
    else:
        container.arm(job, 0.3)
    poll(lambda: old not in container.beating(), UP_S, "the old one ends")
    if end == "armed again":
        wait_beats(post, job, 2)
        assert len(container.beating()) == 1
    elif end == "redispatch":
        assert touched(post, job) == first and beats(post, job)[0][0] == 2
    else:
        assert not beats(post, job) and post.job(job).status == "completed"


@pytest.mark.root
def test_an_agent_that_is_the_first_process_of_its_container_is_recognised(post: Post, container: Container) -> None:
    """Lost: the end of the beat with the agent, in every container whose command is the agent itself."""
    daemon_outside(post)
    job = post.add("j")
    publish = " ".join(shlex.quote(word) for word in post.mam.argv("publish", job, "--event", "started",
                                                                   "--heartbeat", "0.3"))
    post.mam.stub("claude", f"#!/bin/sh\n{publish}\nread -r line\n")
    agent = subprocess.Popen(["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "claude"],
                             stdin=subprocess.PIPE, env=post.mam.environment(), cwd=post.mam.workspace)
    poll(lambda: beats(post, job), UP_S, "the beat is armed")
    assert json.loads(beats(post, job)[0][1])["pid"] == 1
    wait_beats(post, job, 2)
    agent.communicate()


@pytest.mark.root
def test_a_suspended_agent_in_a_container_gives_no_sign_of_life(post: Post, container: Container) -> None:
    """Lost: the difference between an agent that works and one that stands still."""
    daemon_outside(post)
    job = post.add("j")
    container.arm(job, 0.3)
    wait_beats(post, job, 2)
    container.do("kill -STOP $(cat agent.pid)")
    poll(lambda: is_still(post, job), UP_S, "no beat for a second", interval=0.01)
    container.do("kill -CONT $(cat agent.pid)")
    wait_beats(post, job, 2)


def is_still(post: Post, job: str, seconds: float = 1.0) -> bool:
    before, since = touched(post, job), time.monotonic()
    while touched(post, job) == before:
        if time.monotonic() - since > seconds:
            return True
    return False


@pytest.mark.root
def test_a_command_in_a_container_is_alive_under_a_daemon_outside(post: Post, container: Container) -> None:
    """Lost: a long command, delegated in a container, closed because the daemon cannot see its keeper."""
    daemon_outside(post)
    container.do(" ".join(shlex.quote(word) for word in post.mam.argv(
        "delegate", "--agent-session", "exec:e", "--exec", "while [ ! -f go ]; do sleep 0.05; done", "--prompt", "x",
        "--job-id", "j", "--heartbeat", "0.5", "--idle-timeout", "2", "--detach")))
    poll(lambda: beats(post, "j"), UP_S, "the beat is armed")
    wait_beats(post, "j", 6)
    (post.mam.workspace / "go").touch()
    post.wait_status("j", "completed")
    poll(lambda: not container.beating(), UP_S, "nothing beats any more")


@pytest.mark.root
def test_a_daemon_that_died_with_its_container_is_replaced(post: Post, mam: Mam, container: Container) -> None:
    """Lost: every clock of a host, for ever: a daemon started in a container is gone, and nobody can see that."""
    job = post.add("j", timeout_sec=8.0)
    container.arm(job, 0.3)
    inner = poll(post.daemons, UP_S, "a daemon in the container")
    poll(post.info, UP_S, "it has said so")
    container.close()
    poll(lambda: not set(inner) & set(post.daemons()), UP_S, "it died with the container")
    poll(lambda: mam(check=0) and post.daemons(), UP_S, "another daemon", interval=0.5)
    assert post.wait_status(job, "error").reason == "deadline_timeout"


# ---- deadlines -------------------------------------------------------------------------------------------------

def ended_after(post: Post, job_id: str, moment: float) -> float:
    """Seconds from `moment` (time.time()) to the record of a job's end."""
    text = post.rows("SELECT logged_at FROM events WHERE job_id = ? AND event = 'status_changed' ORDER BY n DESC",
                     job_id)[0][0]
    whole = post.module.parse_utc(text)
    return float(whole + int(text[20:23]) / 1000 - moment)


def test_a_job_that_nobody_began_is_blocked_after_t_and_not_before(post: Post, mam: Mam) -> None:
    """Lost: hours of waiting for an agent that never read its brief; or one that reads for a while."""
    post.add("queued", ack_timeout_sec=0.3, session="queue:nobody")
    post.add("taken", ack_timeout_sec=1.5)
    begun = time.time()
    mam("pick", "--agent-session", "queue:q", check=0)
    job = post.wait_status("taken", "error")
    assert job.reason == "agent_blocked" and ended_after(post, "taken", begun) >= 1.5
    assert post.job("queued").status == "pending", "no deadline runs for what nobody has taken"


def test_silence_is_unresponsive_after_idle_and_every_event_renews_it(post: Post) -> None:
    """Lost: a dead agent's job, open for ever; or a slow agent's, closed between two signs of life."""
    post.add("j", idle_timeout_sec=2.0)
    post.say("j", "started")
    post.run()
    for _ in range(3):
        begun = time.monotonic()
        poll(lambda: time.monotonic() - begun > 1.0, 5, "half of the idle time")
        assert post.say("j").committed
        last = time.time()
    assert post.wait_status("j", "error").reason == "unresponsive"
    assert ended_after(post, "j", last) >= 1.9


def test_the_wall_clock_ends_even_a_lively_job(post: Post) -> None:
    """Lost: the one limit that holds for an agent which is busy for ever."""
    begun = time.time()
    post.add("j", timeout_sec=2.0)
    post.say("j", "started", fields={"heartbeat_sec": 0.1})
    post.run()
    while post.job("j").status == "running":
        post.say("j")
        assert time.time() - begun < UP_S
    assert post.job("j").reason == "deadline_timeout" and ended_after(post, "j", begun) >= 1.0


def test_an_event_between_the_look_and_the_verdict_wins(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost: a living agent's job, closed in the very moment in which it spoke."""
    module = post.module
    post.add("j", idle_timeout_sec=0.05)
    post.say("j", "started")
    real = module.record

    def record(*args: Any, **options: Any) -> Any:
        post.say("j", "progress", "just in time")
        return real(*args, **options)
    monkeypatch.setattr(module, "record", record)
    with post.registry() as registry:
        clock = module.Clock(registry, module.load_settings(str(post.mam.registry_dir)), lambda job_id: False)
        clock.refresh(registry.open_jobs(), {}, time.monotonic() - 10)
        poll(lambda: clock.turn(time.monotonic()), 5, "a verdict was tried")
    assert post.job("j").status == "running" and "refused" in post.notes("j")


def test_a_host_that_slept_closes_nobody_when_it_wakes(post: Post) -> None:
    """Lost: every job of a laptop whose lid was closed for longer than idle."""
    post.add("j", idle_timeout_sec=3.0)
    run = post.run(wait=False)
    post.wait_daemon()
    post.say("j", "started")
    post.wait_look(1)
    assert post.say("j").committed
    post.pause(run.pid)
    begun = time.monotonic()
    poll(lambda: time.monotonic() - begun > 3.5, 10, "a sleep longer than idle")
    resume(run.pid)
    woken = time.time()
    assert post.wait_status("j", "error").reason == "unresponsive"
    assert ended_after(post, "j", woken) >= 2.8, "idle starts anew"


@pytest.mark.parametrize("held_up", ["anywhere", "in mid-turn"])
def test_a_daemon_that_stood_still_for_longer_than_n_closes_no_living_worker(post: Post, sleeper: Any,
                                                                            held_up: str) -> None:
    """Lost: a living worker's job, because nobody gave its signs of life while the daemon was suspended."""
    post.add("j", heartbeat_sec=0.5, heartbeat_misses=4, idle_timeout_sec=2.0)
    watch = post.module.identity_of(sleeper().pid)
    post.say("j", "started", fields={"heartbeat_sec": 0.5, "watch": watch})
    run = post.run("" if held_up == "anywhere" else """
import signal
def held_up(self, *args, real=mam.Clock._deadline):
    mam.Clock._deadline = real                    # the deadline that was planned when it began is looked at
    os.kill(os.getpid(), signal.SIGSTOP)
    return real(self, *args)
mam.Clock._deadline = held_up
""")
    wait_beats(post, "j", 1)
    if held_up == "anywhere":
        post.pause(run.pid)
    poll(lambda: process_table()[run.pid][1] in ("T", "t"), UP_S, "it stands still")
    begun = time.monotonic()
    poll(lambda: time.monotonic() - begun > 4.0, 10, "longer than N and idle")
    resume(run.pid)
    wait_beats(post, "j", 3)
    assert post.job("j").status == "running"


def test_a_daemon_that_is_killed_again_and_again_still_closes_a_dead_worker(post: Post) -> None:
    """Lost: the end of a dead agent's job, for ever: each new daemon began to count silence from nothing."""
    post.add("j", heartbeat_sec=2.0, heartbeat_misses=3, idle_timeout_sec=6.0)
    post.say("j", "started")
    begun = time.monotonic()
    lives = 0
    while post.job("j").status == "running":
        run, lives = post.run(), lives + 1
        born = time.monotonic()
        poll(lambda: time.monotonic() - born > 1.5 or run.code is not None, 10, "a short life")
        run.kill()
        assert time.monotonic() - begun < UP_S
    assert post.job("j").reason == "unresponsive" and lives > 2
    assert ended_after(post, "j", time.time() - (time.monotonic() - begun)) >= 5.9


@pytest.mark.parametrize("gap_s, boot, closed", [(20, "", True), (40, "", False), (20, "another-boot", False)])
def test_a_gap_above_n_begins_anew_and_a_shorter_one_counts(post: Post, gap_s: int, boot: str, closed: bool) -> None:
    """Lost: an agent's whole patience after a night without a daemon; or the verdict, to a gap of some seconds."""
    post.add("j", heartbeat_sec=30, idle_timeout_sec=120)
    post.say("j", "started")
    run = post.run()
    post.wait_look()
    run.kill()
    lock = post.mam.registry_dir / "daemon.lock"

    def back(moment: str, seconds: float) -> str:
        return f"{moment.split()[0]} {float(moment.split()[1]) - seconds:.3f}"
    seen = json.loads(lock.read_text().splitlines()[0])
    assert len(seen["gaps"]) == 1, "the first daemon found that nobody had looked"
    looked = back(seen["looked"], gap_s)
    seen = {"looked": looked.replace(looked.split()[0], boot) if boot else looked,
            "gaps": [[seen["gaps"][0][0], seen["gaps"][0][1] - 1000]]}
    lock.write_text(json.dumps(seen) + "\n" + "half of an older line")
    with post.registry() as registry, registry.write():
        registry._execute("UPDATE jobs SET last_event_mono = ?", (back(post.job("j").last_event_mono, 120),))
    post.run(wait=False)
    if closed:
        assert post.wait_status("j", "error", 10).reason == "unresponsive"
    else:
        post.wait_daemon(but=run.pid)
        post.wait_look(3)
        assert post.job("j").status == "running"


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gaps=st.lists(st.floats(3.1, 100), max_size=12), bearable=st.floats(4, 90))
def test_a_job_is_watched_since_the_last_gap_it_cannot_bear(post: Post, gaps: List[float], bearable: float) -> None:
    """Lost: a verdict too early or too late after many gaps of which only some are remembered."""
    mod = post.module
    clock = mod.Clock(None, None, lambda job: False)
    job = mod.Job(**{**dict.fromkeys(mod.Job._fields), "heartbeat_sec": bearable, "idle_timeout_sec": 1000.0,
                     "ack_timeout_sec": 1000.0})
    now = 10.0
    for gap in gaps:
        now += gap + 1.0
        clock.gap(gap, now)
    ends = [sum(gaps[:at + 1]) + at + 11.0 for at, gap in enumerate(gaps) if gap > bearable]
    assert abs(clock._watched_s(job, now) - (now - max(ends, default=0.0))) < 1e-6
    assert [length for length, _ in clock.gaps] == sorted({length for length, _ in clock.gaps}, reverse=True)


@pytest.mark.parametrize("word", ["started", "set"])
def test_a_job_taken_without_a_claim_has_clocks_that_no_clock_change_moves(
        post: Post, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """Lost: living work, closed because the host's clock was put forward; or a running job that nobody watches."""
    job, mod = post.add("j"), post.module
    post.say(job, word, fields={"status": "running"})
    later = time.time() + 7200
    monkeypatch.setattr(mod.time, "time", lambda: later)
    limits = mod.limits_of(post.job(job), None, 0.0, None)
    assert len(limits) == 2 and all(limit.left_s > 0 for limit in limits)


def test_a_new_attempt_does_not_show_what_the_old_one_said(post: Post) -> None:
    """Lost: trust in the overview, that asked a human for a permission which nobody waits for any more."""
    job = post.add("j")
    post.say(job, "permission_required", "may I?")
    with post.registry() as registry:
        again = registry.transition(job, "redispatch", source="operator", fields={"force": True}).job
    assert (again.last_event, again.last_event_at, again.detail) == (None, None, None)


def test_a_new_daemon_gives_everybody_their_idle_time(post: Post) -> None:
    """Lost: the jobs that were silent while no daemon ran, closed by the first look of the next one."""
    post.add("j", idle_timeout_sec=1.5)
    post.say("j", "started")
    boot, mono = post.module.instant().split(" ")
    with post.registry() as registry, registry.write():
        registry._execute("UPDATE jobs SET last_event_mono = ?", (f"{boot} {float(mono) - 100:.3f}",))
    begun = time.time()
    post.run(wait=False)
    assert post.wait_status("j", "error").reason == "unresponsive"
    assert ended_after(post, "j", begun) >= 1.5


def test_the_check_of_finished_work_may_be_silent(post: Post, mam: Mam) -> None:
    """Lost: finished work, thrown away because its tests ran longer than the agent may be silent."""
    done = mam("delegate", "--agent-session", "exec:e", "--exec", "true", "--prompt", "x", "--validate", "sleep 2.5",
               "--idle-timeout", 1, "--ack-timeout", 1, check=0)
    assert "RESULT" in done.stdout and "completed" in done.stdout


def test_a_remote_job_is_not_closed_while_nobody_could_hear_it(post: Post, mam: Mam, own_broker: Any,
                                                               observe: Callable[..., Observer]) -> None:
    """Lost: remote work, given up because our own broker was down for longer than idle."""
    broker = own_broker("mosquitto")
    mam.env = broker.env()
    far = Far(post, unique("deaf"), idle_timeout_sec=1.5)
    post.run(HASTE)
    far.wait_subscribed()
    with contextlib.closing(observe(broker, None)) as sender:
        far.send(sender, 1, "started")
        post.wait_status(far.job, "running")
    broker.stop()
    poll(lambda: post.line()["state"] != "up", UP_S, "the daemon knows")
    begun = time.monotonic()
    poll(lambda: time.monotonic() - begun > 3.0, 10, "a silence longer than idle")
    assert post.job(far.job).status == "running"
    broker.start()
    far.wait_subscribed()
    heard = time.time()
    assert post.wait_status(far.job, "error").reason == "unresponsive"
    assert ended_after(post, far.job, heard) >= 1.0, "idle starts with the subscription"


def test_a_daemon_born_while_the_broker_is_down_closes_no_remote_job(post: Post, mam: Mam, own_broker: Any,
                                                                     observe: Callable[..., Observer]) -> None:
    """Lost: remote work, given up because a note of the killed daemon's subscription was believed."""
    broker = own_broker("mosquitto")
    mam.env = broker.env()
    far = Far(post, unique("deaf"), idle_timeout_sec=1.0)
    run = post.run()
    far.wait_subscribed()
    with contextlib.closing(observe(broker, None)) as sender:
        far.send(sender, 1, "started")
        post.wait_status(far.job, "running")
    run.kill()
    broker.stop()
    post.run(HASTE, wait=False)
    post.wait_daemon(but=run.pid)
    begun = time.monotonic()
    poll(lambda: time.monotonic() - begun > 2.5 or post.job(far.job).status != "running", 10, "longer than idle")
    assert post.job(far.job).status == "running"


# ---- remote jobs -----------------------------------------------------------------------------------------------

class Far:
    """A remote job and the worker that speaks for it, with the keys that its registration made."""

    def __init__(self, post: Post, job: str, **columns: Any) -> None:
        self.post, self.job = post, job
        post.add(job, session="remote:far", transport="remote", **columns)
        with post.registry() as registry:
            self.keys = registry.attempt_keys(job)
            self.control_key = "control-key-of-the-attempt"
            with registry.write():       # the rest of what a registration with a dispatch secret makes
                registry._execute("UPDATE attempts SET remote_keys = ? WHERE job_id = ?",
                                  (json.dumps({"kid": "k", "control": self.control_key, "presence": "p"}), job))

    def wait_subscribed(self) -> None:
        def done() -> bool:
            moment = self.post.rows("SELECT subscribed_mono FROM jobs WHERE job_id = ?", self.job)[0][0]
            return bool(moment) and self.post.line().get("state") == "up"
        poll(done, UP_S, lambda: f"subscribed: {self.post.describe()}")

    def payload(self, seq: int, event: str = "progress", detail: str = "", attempt: int = 1,
                data: Optional[Dict[str, Any]] = None, **fields: Any) -> Dict[str, Any]:
        token = self.keys[attempt][0] if attempt in self.keys else "none"
        made = self.post.module.event_payload(self.job, seq, event, "2024-05-01T10:00:00Z", detail or f"{event} {seq}",
                                              {"attempt_id": attempt, "dispatch_token": token, **(data or {})})
        return {**made, **fields}

    def signed(self, *args: Any, key: str = "", **fields: Any) -> bytes:
        payload = self.payload(*args, **fields)
        return bytes(self.post.module.sign(payload, key or self.keys[payload["data"]["attempt_id"]][1]))

    def send(self, sender: Observer, *args: Any, **fields: Any) -> None:
        sender.publish(topics(self.job)[0], self.signed(*args, **fields))

    def state(self, seq: int, status: str, last_event: str) -> bytes:
        return self.signed(seq, "state", status, status=status, phase=None, last_event=last_event)


def opened(far: Far, raw: bytes) -> Any:
    """A message as the inbox hands it on to the registry."""
    return far.post.module.accept_message(topics(far.job)[0], raw, topics(far.job)[0].rpartition("/")[0], "events",
                                          far.keys)


@pytest.fixture
def far(post: Post, mam: Mam, broker: Broker) -> Far:
    mam.env = broker.env()
    return Far(post, unique("far"))


def test_a_remote_job_is_followed_each_event_once_and_in_order(post: Post, mam: Mam, broker: Broker,
                                                               observe: Callable[..., Observer]) -> None:
    """Lost: the story of a remote job, when the network doubles and reorders what its worker said."""
    mam.env = broker.env()
    job = unique("far")
    mam("register", "--agent-session", "remote:x", "--job-id", job, "--prompt", "x", check=0)
    record = json.loads(mam("get", job, "--show-secrets", check=0).stdout)
    follower = mam.popen("subscribe", "--job", job, "--remote", "--timeout", 60)
    follower.wait_for("SUBSCRIBED")
    far = Far.__new__(Far)
    far.post, far.job, far.keys = post, job, {1: (record["dispatch_token"], record["auth_token"])}
    far.wait_subscribed()
    sender = observe(broker, None)
    for seq, event in ((2, "progress"), (1, "started"), (2, "progress"), (4, "progress"), (3, "progress"),
                       (1, "started"), (5, "completed"), (5, "completed")):
        far.send(sender, seq, event)
    done = follower.wait()
    assert done.code == 0
    shown = [line for line in done.stdout.splitlines() if f"job={job}" in line]
    assert [f"seq={number} " in line for number, line in enumerate(shown, 1)] == [True] * 5, done.stdout
    poll(lambda: post.info().get("drops", {}).get("duplicate", 0) >= 2 or not post.daemons(), UP_S, "counted")


def hostile(far: Far, other: Far) -> List[Any]:
    """(reason, topic, message) of what must not be believed."""
    events, state = topics(far.job)
    good = far.payload(7)
    key = far.keys[1][1]

    def sign(payload: Any) -> bytes:
        return bytes(far.post.module.sign(payload, key))
    deep = b'{"schema_version":1,"data":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}"
    return [
        ("size", events, b'{"a":"' + b"x" * 300000 + b'"}'),
        ("json", events, far.signed(7)[:-20]),
        ("json", events, b"\xff\xfe{}"),
        ("json", events, deep),
        ("json", events, b'{"schema_version":1,"data":{},"seq":NaN}'),
        ("json", events, b'{"a":1,"a":2}'),
        ("shape", events, b"[1,2,3]"),
        ("shape", events, b'{"schema_version":1,"data":[]}'),
        ("schema_version", events, sign({**good, "schema_version": 2})),
        ("topic", events, other.signed(7)),
        ("vocabulary", events, sign({**good, "event": "exploded"})),
        ("vocabulary", state, far.signed(7)),
        ("attempt", events, sign({**good, "data": {**good["data"], "attempt_id": 9}})),
        ("attempt", events, sign({**good, "data": {**good["data"], "attempt_id": "1"}})),
        ("signature", events, far.signed(7, key="x" * 43)),
        ("signature", events, json.dumps(good).encode()),
        ("signature", events, far.signed(7, "completed").replace(b"completed 7", b"completed 8")),
        ("token", events, sign({**good, "data": {**good["data"], "dispatch_token": "f" * 32}})),
        ("intent", events, far.signed(7, data={"notification_intent": {"seq": 1}})),
        ("intent", events, far.signed(7, data={"notification_intent": "mine"})),
        ("seq", events, sign({**good, "seq": "7"})),
        ("seq", events, sign({**good, "seq": -1})),
        ("seq", events, sign({**good, "seq": True})),
    ]


def test_nothing_foreign_is_believed_and_every_drop_is_counted(far: Far, post: Post, mam: Mam, broker: Broker,
                                                               observe: Callable[..., Observer]) -> None:
    """Lost: a job, ended by whoever can publish; or a daemon, ended by what nobody foresaw."""
    other = Far(post, unique("other"))
    run = post.run()
    far.wait_subscribed()
    other.wait_subscribed()
    sender = observe(broker, None)
    far.send(sender, 1, "started")
    post.wait_status(far.job, "running")
    messages = hostile(far, other)
    for _, topic, raw in messages:
        sender.publish(topic, raw)
        far.send(sender, 1, "started")                       # real ones flow in between
    far.send(sender, 2, "progress")
    poll(lambda: post.job(far.job).last_seq == 2, UP_S, lambda: f"the real event behind them: {post.describe()}")
    wanted = Counter(reason for reason, _, _ in messages)
    wanted["duplicate"] = len(messages)
    poll(lambda: mam("daemon", "status", "--json", check=0).json()["drops"] == wanted, UP_S,
         lambda: f"{dict(wanted)} counted: {post.info()['drops']}", interval=0.2)
    assert "dropped: " in mam("daemon", "status", check=0).stdout
    assert post.numbers(far.job) == [1, 2] and post.numbers(other.job) == []
    assert post.job(far.job).status == "running" and run.code is None
    assert far.keys[1][1] not in run.stderr


def test_a_hole_is_asked_for_at_once_and_filled(far: Far, post: Post, broker: Broker,
                                                observe: Callable[..., Observer]) -> None:
    """Lost: an event that the network dropped, though its owner still has it."""
    post.run()
    far.wait_subscribed()
    sender = observe(broker, f"python/mqtt/jobs/{far.job}/control")
    far.send(sender, 1, "started")
    far.send(sender, 3)
    asked = sender.wait_for(lambda m: b'"resend"' in m.payload, 10, "a resend")
    post.module.verify(asked.json(), far.control_key)
    assert asked.json()["data"]["from_seq"] == 2
    far.send(sender, 2)
    poll(lambda: post.numbers(far.job) == [1, 2, 3], UP_S, "filled")
    with post.registry() as registry:
        assert [event.seq for event in post.module.Follower(registry, [far.job]).poll()] == [1, 2, 3]


def test_a_hole_that_nobody_fills_is_written_down(far: Far, post: Post, broker: Broker,
                                                  observe: Callable[..., Observer]) -> None:
    """Lost: knowing that something is missing."""
    post.run("mam.RESEND_AT_S = (0.0, 0.2, 0.4)\nmam.HOLE_GIVEN_UP_S = 1.0\n")
    far.wait_subscribed()
    sender = observe(broker, f"python/mqtt/jobs/{far.job}/control")
    far.send(sender, 1, "started")
    far.send(sender, 4)
    poll(lambda: "seq_gap" in post.notes(far.job), UP_S, "a seq_gap in the log")
    assert len(resends(sender)) == 3
    assert post.numbers(far.job) == [1, 4] and post.job(far.job).status == "running"
    far.send(sender, 5)
    poll(lambda: post.numbers(far.job) == [1, 4, 5], UP_S, "the next event")
    begun = time.monotonic()
    poll(lambda: time.monotonic() - begun > 1.5, 5, "longer than the asking takes")
    assert post.notes(far.job).count("seq_gap") == 1 and len(resends(sender)) == 3, "the same gap a second time"


def resends(sender: Observer) -> List[int]:
    """From which numbers on events were asked for, in order."""
    return [m.json()["data"]["from_seq"] for m in sender.all if b'"resend"' in m.payload]


def test_a_hole_waits_while_nobody_can_answer_and_is_asked_for_anew(post: Post, mam: Mam, broker: Broker, proxy: Any,
                                                                    observe: Callable[..., Observer]) -> None:
    """Lost: an event that its owner still has, given up because the link was down while it was waited for."""
    way = proxy(broker)
    mam.env = way.env(broker)
    far = Far(post, unique("hole"))
    post.run(HASTE + "mam.RESEND_AT_S = (0.0, 0.3, 0.6)\nmam.HOLE_GIVEN_UP_S = 5.0\n")
    far.wait_subscribed()
    sender = observe(broker, f"python/mqtt/jobs/{far.job}/control")
    far.send(sender, 1, "started")
    far.send(sender, 3)
    sender.wait_for(lambda m: b'"resend"' in m.payload, 10, "a resend")
    way.refuse()
    way.drop()
    poll(lambda: post.line()["state"] != "up", UP_S, "the connection is lost")
    begun = time.monotonic()
    poll(lambda: time.monotonic() - begun > 6, 10, "longer than a hole is waited for")
    sender.clear()
    way.accept()
    poll(lambda: resends(sender)[:3] == [2, 2, 2], UP_S, lambda: f"asked for anew: {post.describe()}")
    far.send(sender, 2)
    poll(lambda: post.numbers(far.job) == [1, 2, 3], UP_S, "filled")
    assert "seq_gap" not in post.notes(far.job)


def test_a_new_daemon_asks_for_the_hole_that_the_old_one_left(far: Far, post: Post, broker: Broker,
                                                              observe: Callable[..., Observer]) -> None:
    """Lost: an event that was asked for by a daemon that was killed before the answer."""
    run = post.run()
    far.wait_subscribed()
    sender = observe(broker, f"python/mqtt/jobs/{far.job}/control")
    far.send(sender, 1, "started")
    far.send(sender, 3)
    poll(lambda: post.numbers(far.job) == [1, 3], UP_S, "stored")
    run.kill()
    sender.clear()
    post.run()
    sender.wait_for(lambda m: b'"resend"' in m.payload, 10, "a resend")
    assert resends(sender)[0] == 2


def test_the_hole_before_an_end_can_still_be_filled(far: Far, post: Post, broker: Broker,
                                                    observe: Callable[..., Observer]) -> None:
    """Lost: what a worker said just before its end, because nobody listens to a job that has ended."""
    post.run()
    far.wait_subscribed()
    sender = observe(broker, f"python/mqtt/jobs/{far.job}/control")
    far.send(sender, 1, "started")
    far.send(sender, 3, "completed")
    sender.wait_for(lambda m: b'"resend"' in m.payload, 10, "a resend")
    assert post.wait_status(far.job, "completed").last_seq == 3
    post.add("other")                        # a commit of somebody else, at which the daemon looks at its subscriptions
    post.wait_look(5)
    far.send(sender, 2)
    poll(lambda: post.numbers(far.job) == [1, 2, 3], UP_S, lambda: f"filled: {post.describe()}")
    post.wait_gone()


@pytest.mark.parametrize("heard", [0, 1])
def test_events_before_a_state_ahead_of_them_are_asked_for(post: Post, mam: Mam, broker: Broker, proxy: Any,
                                                           observe: Callable[..., Observer], heard: int) -> None:
    """Lost: everything a worker said while our connection was down, until it says something more."""
    way = proxy(broker)
    mam.env = way.env(broker)
    far = Far(post, unique("ahead"))
    post.run(HASTE + "mam.HOLE_WAIT_S = 0.3\n")
    far.wait_subscribed()
    sender = observe(broker, f"python/mqtt/jobs/{far.job}/control")
    if heard:
        far.send(sender, 1, "started")
        post.wait_status(far.job, "running")
    way.refuse()
    way.drop()
    poll(lambda: post.line()["state"] != "up", UP_S, "the connection is lost")
    sender.publish(topics(far.job)[1], far.state(3, "running", "progress"), retain=True)
    way.accept()
    sender.wait_for(lambda m: b'"resend"' in m.payload, UP_S, "a resend")
    assert resends(sender) == [heard + 1]
    for number in range(heard + 1, 4):
        far.send(sender, number, "progress" if number > 1 else "started")
    poll(lambda: post.numbers(far.job) == [1, 2, 3], UP_S, "filled")
    assert post.job(far.job).status == "running"


def test_a_state_ahead_whose_events_nobody_has_is_a_gap(far: Far, post: Post, broker: Broker,
                                                        observe: Callable[..., Observer]) -> None:
    """Lost: knowing that something is missing, when only the state tells of it."""
    sender = observe(broker, f"python/mqtt/jobs/{far.job}/control")
    sender.publish(topics(far.job)[1], far.state(2, "running", "progress"), retain=True)
    post.run("mam.RESEND_AT_S = (0.0, 0.2, 0.4)\nmam.HOLE_GIVEN_UP_S = 1.0\nmam.HOLE_WAIT_S = 0.3\n")
    poll(lambda: "seq_gap" in post.notes(far.job), UP_S, lambda: f"a seq_gap in the log: {post.describe()}")
    assert resends(sender) == [1, 1, 1] and post.job(far.job).status == "pending"


@pytest.mark.parametrize("order", ["event", "state", "event, state", "state, event"])
def test_a_cancel_on_the_runners_side_is_one_here_however_it_is_learnt(far: Far, post: Post, broker: Broker,
                                                                       observe: Callable[..., Observer],
                                                                       order: str) -> None:
    """Lost: agreement on how a job ended, or its end: open for ever because the cancelling event went missing."""
    post.run("mam.HOLE_WAIT_S = 0.3\n")
    far.wait_subscribed()
    sender = observe(broker, None)
    far.send(sender, 1, "started")
    for word in order.split(", "):
        if word == "event":
            far.send(sender, 2, "error", data={"reason": "cancelled", "status": "cancelled"})
        else:
            state = far.signed(2, "state", "Job closed", status="cancelled", phase=None, last_event="error",
                               data={"reason": "cancelled"})
            sender.publish(topics(far.job)[1], state, retain=True)
        job = post.wait_status(far.job, "cancelled")
    assert (job.reason, job.outcome, job.last_seq, bool(job.finished_at)) == ("cancelled", "cancelled", 2, True)
    if order.endswith("event"):
        poll(lambda: not post.daemons() or post.rows("SELECT source FROM events WHERE job_id = ? AND seq = 2", far.job)
             == [("remote",)], UP_S, "the real event")
    assert not {"conflict", "late", "refused"} & set(post.notes(far.job))


def test_a_state_that_is_being_checked_ends_nothing(far: Far, post: Post, broker: Broker,
                                                    observe: Callable[..., Observer]) -> None:
    """Lost: the verdict on a job, taken for granted because its worker is done."""
    sender = observe(broker, f"python/mqtt/jobs/{far.job}/control")
    sender.publish(topics(far.job)[1], far.signed(2, "state", "done", status="running", phase="validating",
                                                  last_event="completed"), retain=True)
    post.run("mam.HOLE_WAIT_S = 0.3\n")
    far.wait_subscribed()
    far.send(sender, 1, "started")
    sender.wait_for(lambda m: b'"resend"' in m.payload and m.json()["data"]["from_seq"] == 2, UP_S, "a resend")
    job = post.job(far.job)
    assert (job.status, job.phase, job.outcome, job.last_seq) == ("running", None, None, 1)
    assert post.numbers(far.job) == [1]


def test_a_flood_is_taken_in_whole_and_acknowledged(far: Far, post: Post, broker: Broker,
                                                    observe: Callable[..., Observer]) -> None:
    """Lost: events behind the first thousand, for which a broker waits until those are acknowledged."""
    post.run()
    far.wait_subscribed()
    sender = observe(broker, None)
    count = 1300
    for number in range(1, count + 1):
        large = {"feedback": "x" * 200000} if number % 500 == 0 else None        # more than is read at once
        raw = far.signed(number, "progress" if number > 1 else "started", data=large)
        sender.publish(topics(far.job)[0], raw, wait=False)
    poll(lambda: post.job(far.job).last_seq == count, 60, lambda: f"all of them: {post.describe()}")
    assert post.numbers(far.job) == list(range(1, count + 1))
    assert post.info()["drops"] == {} and post.line()["connects"] == 1
    assert post.job(far.job).transition_seq == count


def test_conflicts_replays_and_old_attempts_change_nothing(far: Far, post: Post, broker: Broker,
                                                           observe: Callable[..., Observer]) -> None:
    """Lost: the present attempt, ended by a word of the one before it, or by an old word said again."""
    post.run()
    far.wait_subscribed()
    sender = observe(broker, None)
    intent = {"notification_intent": {"seq": 2, "event": "progress", "timestamp": "2024-05-01T10:00:00Z"}}
    far.send(sender, 1, "started")
    far.send(sender, 2, data=intent)
    far.send(sender, 3, data=intent)                                   # replayed under another number
    far.send(sender, 2, detail="other words", data=intent)             # the same number, other bytes
    poll(lambda: post.info()["drops"].get("conflict") == 1, UP_S, lambda: f"a conflict: {post.info()['drops']}")
    assert post.info()["drops"].get("replayed") == 1 and "conflict" in post.notes(far.job)
    assert "ALARM" in post.log()
    with post.registry() as registry:
        registry.transition(far.job, "redispatch", source="operator", fields={"force": True})
        far.keys = registry.attempt_keys(far.job)
    far.send(sender, 4, "completed", attempt=1)
    poll(lambda: "late" in post.notes(far.job), UP_S, "the old attempt's word is kept as late")
    assert post.job(far.job).status == "pending"
    far.send(sender, 3, "completed", attempt=2)
    post.wait_status(far.job, "completed")


def test_a_true_story_comes_through_a_storm_of_foreign_messages(far: Far, post: Post, mam: Mam, broker: Broker,
                                                              observe: Callable[..., Observer]) -> None:
    """Lost: one event of a remote worker, or its right place, because others shout on its topics meanwhile."""
    seed = random.SystemRandom().randrange(10 ** 9)
    print(f"seed {seed}")
    rng = random.Random(seed)
    other = Far(post, unique("other"))
    run = post.run()
    far.wait_subscribed()
    other.wait_subscribed()
    sender = observe(broker, None)
    events, state = topics(far.job)
    far.send(sender, 1, "started")
    far.send(sender, 2)
    poll(lambda: post.numbers(far.job) == [1, 2], UP_S, "the first attempt")
    with post.registry() as registry:
        registry.transition(far.job, "redispatch", source="operator", fields={"force": True})
        old, far.keys = far.keys, registry.attempt_keys(far.job)
    follower = mam.popen("watch", far.job, "--json")
    first, last = 3, 32
    told = {number: far.signed(number, "started" if number == first else "completed" if number == last else
                               "progress", attempt=2) for number in range(first, last + 1)}
    foreign = hostile(far, other)
    sent = []
    order = list(range(first, last + 1))
    fours = [order[at:at + 4] for at in range(0, len(order) - 1, 4)]      # reordered, each within its four
    fours[-1].remove(last)
    for four in fours + [[last]]:
        burst = [(events, told[number]) for number in four + rng.sample(four, (len(four) + 1) // 2)]     # and doubled
        rng.shuffle(burst)
        for message in burst:
            noise = [foreign[rng.randrange(len(foreign))][1:],
                     (events, far.signed(rng.randint(1, 40), "completed", attempt=2, key="x" * 43)),           # forged
                     (events, far.signed(rng.randint(3, 40), rng.choice(["completed", "error"]), attempt=1)),  # late
                     (events, told[rng.randint(first, four[0])]),                                                # again
                     (state, far.state(rng.randint(1, 2), "running", "progress")),                       # an old state
                     (events, b""), (events, os.urandom(rng.randint(1, 300)))]
            sent += [rng.choice(noise), message]
    assert set(told.values()) <= {message for _, message in sent} and old[1] == far.keys[1]
    for topic, message in sent:
        sender._client.publish(topic, message, qos=1)       # one behind the other, without waiting
    post.wait_status(far.job, "completed")
    done = follower.wait()
    assert done.code == 0
    shown = [(event["data"]["attempt_id"], event["seq"]) for event in done.ndjson() if "seq" in event]
    assert shown == [(1, 1), (1, 2)] + [(2, number) for number in order], f"seed {seed}: {done}"
    assert post.numbers(far.job) == list(range(1, last + 1)) and post.numbers(other.job) == []
    assert "conflict" not in post.notes(far.job) and post.job(other.job).status == "pending"
    assert run.code is None and post.info()["drops"]["signature"] and post.info()["drops"]["duplicate"]


def test_a_retained_state_alone_ends_a_job(far: Far, post: Post, broker: Broker,
                                           observe: Callable[..., Observer]) -> None:
    """Lost: the end of a job whose last event was lost, though its state stands on the broker."""
    sender = observe(broker, None)
    far.send(sender, 1, "started")
    sender.publish(topics(far.job)[1], far.state(2, "completed", "completed"), retain=True)
    post.run()
    far.wait_subscribed()
    assert post.wait_status(far.job, "completed").last_seq == 2
    sender.publish(topics(far.job)[0], far.signed(2, "completed", "the real words"))
    poll(lambda: not post.daemons() or post.rows("SELECT detail FROM events WHERE job_id = ? AND seq = 2", far.job)
         == [("the real words",)], UP_S, "")


def test_what_was_missed_during_a_loss_is_seen_on_the_state(post: Post, mam: Mam, broker: Broker, proxy: Any,
                                                            observe: Callable[..., Observer]) -> None:
    """Lost: the end that was published while our connection was down."""
    way = proxy(broker)
    mam.env = way.env(broker)
    far = Far(post, unique("missed"))
    post.run(HASTE)
    far.wait_subscribed()
    sender = observe(broker, None)
    far.send(sender, 1, "started")
    post.wait_status(far.job, "running")
    way.refuse()
    way.drop()
    poll(lambda: post.line()["state"] != "up", UP_S, "the connection is lost")
    sender.publish(topics(far.job)[1], far.state(2, "error", "error"), retain=True)
    way.accept()
    post.wait_status(far.job, "error")
    assert "reconnected" in post.log()


def test_an_old_state_again_and_again_is_no_life(post: Post, mam: Mam, mosquitto: Broker,
                                                 observe: Callable[..., Observer]) -> None:
    """Lost: the death of a remote worker, hidden by what a broker repeats."""
    mam.env = mosquitto.env()
    far = Far(post, unique("old"), idle_timeout_sec=2.0)
    post.run()
    far.wait_subscribed()
    sender = observe(mosquitto, None)
    far.send(sender, 1, "started")
    post.wait_status(far.job, "running")

    def closed() -> bool:
        sender.publish(topics(far.job)[1], far.state(1, "running", "started"), retain=True)
        return bool(post.job(far.job).status == "error")
    poll(closed, UP_S, "closed as unresponsive all the same", interval=0.1)
    assert post.job(far.job).reason == "unresponsive"


def test_only_a_remote_runner_beats_for_its_job(post: Post, mam: Mam, mosquitto: Broker,
                                                observe: Callable[..., Observer]) -> None:
    """Lost: the death of a remote host, hidden by beats that our own daemon makes up; and numbers used twice."""
    mam.env = mosquitto.env()
    far = Far(post, unique("beats"), idle_timeout_sec=2.0, heartbeat_sec=0.3)
    post.run()
    far.wait_subscribed()
    sender = observe(mosquitto, None)
    far.send(sender, 1, "started")
    far.send(sender, 2, "progress", "heartbeat", data={"since": 1})
    job = post.wait_status(far.job, "error")
    assert job.reason == "unresponsive" and post.numbers(far.job) == [1, 2]


def test_a_beat_that_is_heard_first_counts_as_started(far: Far, post: Post, broker: Broker,
                                                      observe: Callable[..., Observer]) -> None:
    """Lost: a living remote job, closed as blocked because its `started` went missing."""
    post.run()
    far.wait_subscribed()
    far.send(observe(broker, None), 2, "progress", "heartbeat", data={"since": 1})
    assert post.wait_status(far.job, "running").last_event_mono


def test_a_refused_subscription_is_seen_and_closes_nobody(post: Post, mam: Mam, own_broker: Any) -> None:
    """Lost: knowing why nothing is heard of a remote job; and the job, given up for a right that is missing."""
    broker = own_broker("nats", user="host", password="secret-word",
                        permissions={"host": {"subscribe": {"deny": ["python.mqtt.jobs.>"]}}})
    mam.env = broker.env()
    far = Far(post, unique("denied"), idle_timeout_sec=0.5, ack_timeout_sec=0.5)
    with post.registry() as registry, registry.write():
        registry._execute("UPDATE jobs SET delivered_at = ?, delivered_mono = ?",
                          (post.module.utc_now(), post.module.instant()))
    post.run()
    poll(lambda: "refused a subscription" in post.log(), UP_S, lambda: f"said in the log: {post.describe()}")
    begun = time.monotonic()
    poll(lambda: time.monotonic() - begun > 1.5 or post.job(far.job).status != "pending", 5, "longer than T and idle")
    assert post.job(far.job).status == "pending"
    shown = mam("daemon", "status", "--json", check=0).json()
    assert shown["subscribed"] == 0
    assert "refused" in mam("daemon", "status", check=0).stdout, "an unheard job is not said in the status"


@settings(max_examples=40, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_any_order_and_repetition_of_a_stream_gives_the_same_result(post: Post, data: Any) -> None:
    """Lost: agreement: two hosts that heard the same worker and tell different stories."""
    post.mam.env = {"MQTT_BROKER": "127.0.0.1"}
    far = Far(post, unique("stream"))
    length = data.draw(st.integers(2, 7))
    events = ["started"] + ["progress"] * (length - 2) + [data.draw(st.sampled_from(["completed", "error"]))]
    whole = [opened(far, far.signed(number, event)) for number, event in enumerate(events, 1)]
    order = data.draw(st.permutations(list(range(length)) * 2))
    with post.registry() as registry:
        at = 0
        while at < len(order):
            size = data.draw(st.integers(1, 4))
            registry.take_in([whole[number] for number in order[at:at + size]])
            at += size
        job = registry.job(far.job)
        follower = post.module.Follower(registry, [far.job])
        assert [event.seq for event in follower.poll()] == list(range(1, length + 1))
    assert (job.status, job.last_seq, job.outcome) == (events[-1], length, events[-1])
    assert (job.last_event, job.detail) == (events[-1], f"{events[-1]} {length}")
    assert not {"conflict", "late"} & set(post.notes(far.job))


def test_debts_without_news_are_taken_up_one_lot_after_the_other(post: Post, mam: Mam, mosquitto: Broker) -> None:
    """Lost: minutes, when a broker is to get the states of many thousand jobs again."""
    mam.env = mosquitto.env()
    names = [unique("debt") for _ in range(45)]
    post.add(*names)
    for name in names:
        post.say(name, "started")
    post.run("mam.DEBT_COUNT = 10\nmam.TAKEOVER_S = 6.0\n")
    post.wait_sent()
    with post.registry() as registry, registry.write():
        registry._execute("UPDATE jobs SET state_rev = state_rev + 1")
    poll(lambda: post.owed() < 45, UP_S, "the first lot")
    begun = time.monotonic()
    post.wait_sent()
    assert time.monotonic() - begun < 6, "each lot waited for the next look"


def test_ended_jobs_that_owe_bring_a_line_to_each_broker(post: Post, mam: Mam, mosquitto: Broker) -> None:
    """Lost: news for a second broker, behind a thousand jobs that owe theirs to one that is down."""
    env = mosquitto.env()
    many, one = [f"a{number}" for number in range(12)], unique("z")
    post.add(*many, wire="127.0.0.1:1")
    post.add(one, wire=f"{env['MQTT_BROKER']}:{env['MQTT_PORT']}")
    for name in [*many, one]:
        post.say(name, "started")
        post.say(name, "completed")
    post.run("mam.DEBT_COUNT = 10\n", **env)
    post.wait_sent(one)


# ---- its life --------------------------------------------------------------------------------------------------

STATUS_KEYS = {"alive", "turning", "process", "build", "lines", "subscribed", "armed", "started_at", "drops", "runner",
               "owed_events", "owed_states", "unanswered", "older_build"}


def test_status_stop_and_run_say_what_is(post: Post, mam: Mam, mosquitto: Broker) -> None:
    """Lost: the answer to "is anybody sending this?", for people and for scripts."""
    none = mam("daemon", "status", "--json", check=1)
    assert "no registry" in none.stdout + none.stderr
    mam.env = mosquitto.env()
    job = post.add(unique("life"))
    post.say(job, "started")
    assert mam("daemon", check=1).stdout.startswith("no daemon runs; 1 events are owed")
    shown = mam("daemon", "status", "--json", check=1).json()
    assert set(shown) == STATUS_KEYS and shown["alive"] is False and shown["owed_events"] == 1
    assert "no daemon runs" in mam("daemon", "stop", check=0).stderr
    run = post.run()
    post.wait_sent()
    shown = mam("daemon", "status", "--json", check=0).json()
    assert set(shown) == STATUS_KEYS and shown["alive"] and shown["turning"] and not shown["older_build"]
    assert shown["process"]["pid"] == run.pid and shown["owed_events"] == shown["owed_states"] == 0
    text = mam("daemon", check=0).stdout
    assert text.startswith(f"daemon {run.pid}, up ") and f"broker 127.0.0.1:{mosquitto.port}: up" in text
    refused = mam("daemon", "run", "--json", check=4)
    assert json.loads(refused.stdout)["error"]["code"] == "daemon_runs"
    mam("daemon", "explode", check=64)
    mam("daemon", "stop", check=0)
    assert run.wait().code == 0
    assert mam("daemon", check=1).stdout == "no daemon runs\n"


def test_a_request_to_leave_that_came_too_late_drives_out_no_other(post: Post, mam: Mam) -> None:
    """Lost: all beats of a host until its next command, because a request to a daemon that had died was obeyed."""
    job = post.add("j")
    post.say(job, "started")
    with post.registry() as registry:
        registry.set_meta("daemon_leave", json.dumps({"pid": 1, "start": "0", "boot": "another", "ns": ""}))
    run = post.run()
    post.wait_look(3)
    assert run.code is None
    mam("daemon", "stop", check=0)
    assert run.wait().code == 0


@pytest.mark.parametrize("count", [2, 16])
def test_of_any_number_started_at_once_one_runs(post: Post, mam: Mam, count: int) -> None:
    """Lost: single beats and single sends, when many agents start in the same moment."""
    post.add("j")
    post.say("j", "started")
    results = post.inside.crowd(mam, [["x"]] * count, """
        settings = mam.load_settings(None)
        with mam.Registry(settings.registry_dir) as registry:
            return 10 + mam.start_daemon(registry, settings)
    """)
    assert sorted(result.code for result in results) == [10] * (count - 1) + [11]
    pid = post.wait_daemon()
    assert post.daemons() == [pid]


def test_two_run_at_once_are_one_and_send_everything_once(post: Post, mam: Mam, broker: Broker,
                                                         observe: Callable[..., Observer]) -> None:
    """Lost: one beat a period and one copy of each event, to two daemons that both believe to be the one."""
    mam.env = broker.env()
    job = post.add(unique("two"))
    post.say(job, "started")
    watcher = observe(broker)
    runs = [mam.popen("daemon", "run") for _ in range(2)]
    poll(lambda: [run.code for run in runs].count(4) == 1, UP_S, lambda: f"one is refused: {runs[0]} {runs[1]}")
    one, = [run for run in runs if run.code is None]
    assert post.wait_line() == one.pid and post.daemons() == [one.pid]
    for number in range(4):
        post.say(job, "progress", f"part {number}")
    post.say(job, "completed")
    post.wait_sent(job)
    assert one.wait().code == 0
    wait_heard(watcher, job, 6)
    assert [m.json()["seq"] for m in watcher.messages("events", job)] == [1, 2, 3, 4, 5, 6]
    assert_ends_right(post, broker, job)


@pytest.mark.parametrize("command", ["publish", "pick", "watch", "delegate", "mam"])
def test_it_comes_with_whatever_gives_it_work(post: Post, mam: Mam, command: str) -> None:
    """Lost: every clock and every beat, because nobody thought of starting a service."""
    post.add("j")
    if command in ("watch", "mam"):
        post.say("j", "started")
    orders: Dict[str, List[object]] = {
        "publish": ["publish", "j", "--event", "started"], "pick": ["pick", "--agent-session", "queue:q"],
        "watch": ["watch", "j"], "mam": [],
        "delegate": ["delegate", "--agent-session", "exec:e", "--exec", "sleep 60", "--prompt", "x", "--detach"]}
    mam.popen(*orders[command])
    pid = post.wait_daemon()
    assert post.daemons() == [pid]


def test_it_leaves_when_all_is_done_and_leaves_nothing_behind(post: Post, mam: Mam, mosquitto: Broker) -> None:
    """Lost: a clean host; processes, rows and locks that gather for ever."""
    mam.env = mosquitto.env()
    mam("delegate", "--agent-session", "exec:e", "--exec", "true", "--prompt", "x", "--job-id", unique("clean"),
        check=0)
    post.wait_gone()
    assert not mam.processes()
    assert post.owed() == 0 and post.info() == {} and post.rows("SELECT * FROM senders") == []
    assert "Traceback" not in post.log()


def test_a_killed_daemon_is_back_at_the_next_command_and_at_once_for_who_waits(post: Post, mam: Mam) -> None:
    """Lost: everything a daemon does, for as long as nobody notices that it was killed."""
    post.add("j")
    mam("publish", "j", "--event", "started", check=0)
    first = post.wait_daemon()
    post.kill_daemon()
    mam(check=0)
    second = post.wait_daemon(but=first)
    waiting = mam.popen("wait", "j")
    poll(lambda: waiting.code is None, 1, "it waits")
    post.kill_daemon()
    post.wait_daemon(but=second, timeout=10)
    mam("publish", "j", "--event", "completed", check=0)
    assert waiting.wait().code == 0


def test_sigterm_ends_it_in_good_order(post: Post, mam: Mam, mosquitto: Broker) -> None:
    """Lost: a shutdown that waits for mam, or a log that does not say why it left."""
    mam.env = mosquitto.env()
    job = post.add(unique("term"))
    post.say(job, "started")
    run = post.run()
    post.wait_sent(job)
    assert run.stop().code == 0 and "SIGTERM" in run.stderr
    assert post.rows("SELECT * FROM senders") == []
    assert mam("daemon", check=1).stdout == "no daemon runs\n"


@pytest.mark.parametrize("fate", ["deleted", "replaced"])
def test_it_leaves_with_its_registry(post: Post, mam: Mam, mosquitto: Broker, fate: str) -> None:
    """Lost: memory and a connection, to a daemon of a folder that is no more; or the new registry's own daemon."""
    mam.env = mosquitto.env()
    job = post.add(unique("gone"))
    mam("publish", job, "--event", "started", check=0)
    old = post.wait_line()
    if fate == "deleted":
        shutil.rmtree(mam.registry_dir)
    else:
        mam.registry_dir.rename(mam.folder / "moved")
        post.add(job)
        mam("publish", job, "--event", "started", check=0)
    begun = time.monotonic()
    poll(lambda: old not in post.daemons(), 10, "the old one leaves")
    assert time.monotonic() - begun < 4, "about a second, and a loaded machine's delay"
    if fate == "deleted":
        assert not mam.registry_dir.exists()
    else:
        assert post.daemons() == [post.wait_daemon(but=old)]
        assert "Traceback" not in (mam.folder / "moved" / "daemon.log").read_text()


@pytest.mark.parametrize("arrives", ["nothing", "a beat", "a beat and another daemon"])
def test_what_arrives_while_it_leaves_is_not_left_alone(post: Post, monkeypatch: pytest.MonkeyPatch,
                                                        arrives: str) -> None:
    """Lost: a beat that was armed in the moment between the last look and the unlocking, and that nobody beats."""
    module = post.module
    post.add("j")
    config = module.load_settings(str(post.mam.registry_dir))
    with post.registry() as registry, module.FileLock(module.lock_path(registry)) as lock, \
            module.FileLock(module.lock_path(registry)) as other:
        assert lock.acquire() and not other.acquire()
        daemon = module.Daemon(registry, config, lock)
        assert not registry.has_work(False)
        real = registry.has_work

        def look(wired: bool, *me: str) -> bool:        # called once it has unlocked
            if arrives != "nothing":
                post.say("j", "started", fields={"heartbeat_sec": 30.0})
            if arrives == "a beat and another daemon":
                assert other.acquire()
            return bool(real(wired, *me))
        monkeypatch.setattr(registry, "has_work", look)
        left = daemon._leave()
        assert left is (arrives != "a beat")
        assert other.acquire() is (arrives != "a beat")
        os.close(daemon._wake_fd)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_starter_that_dies_at_once_leaves_one_daemon_or_a_free_lock(post: Post, mam: Mam, moment: str) -> None:
    """Lost: the daemon, because whoever started it was killed with the lock in hand."""
    post.add("j")
    post.say("j", "started")
    hook = ("def spawn(*args, real=mam.spawn_self, **options):\n"
            f"    {'' if moment == 'before' else 'real(*args, **options); '}os.kill(os.getpid(), 9)\n"
            "mam.spawn_self = spawn\n")
    assert post.inside.patched(mam, hook)(check=None).code == -signal.SIGKILL
    if moment == "before":
        mam(check=0)
    pid = post.wait_daemon()
    assert post.daemons() == [pid]
    assert mam("daemon", "run", check=4).code == 4


def test_the_log_has_a_cap(post: Post, mam: Mam) -> None:
    """Lost: the disk, to the log of a daemon that complains for months."""
    post.add("j")
    log = mam.registry_dir / "daemon.log"
    log.write_bytes(b"old line\n" * 150000)
    mam("publish", "j", "--event", "started", check=0)
    post.wait_daemon()
    assert log.stat().st_size < 10000 and (mam.registry_dir / "daemon.log.1").stat().st_size > 1000000
    post.inside.run(mam, """
mam._log_path = sys.argv[1]
mam.LOG_CAP_BYTES = 20000
os.dup2(os.open(mam._log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
for number in range(3000):
    mam.log("complaint %d" % number)
""", mam.folder / "some.log")
    assert (mam.folder / "some.log").stat().st_size < 21000
    assert b"complaint 2999" in (mam.folder / "some.log").read_bytes()


def test_a_log_that_cannot_be_written_ends_no_daemon(post: Post, mam: Mam, mosquitto: Broker) -> None:
    """Lost: every beat and deadline of a host, because its disk was too full to say that it is full."""
    mam.env = mosquitto.env()
    job = post.add(unique("full"))
    post.say(job, "started")
    with open("/dev/full", "w") as full:
        run = subprocess.Popen(mam.argv("daemon", "run"), env=mam.environment(), stderr=full,
                               cwd=mam.workspace)
    try:
        post.wait_line()
        post.wait_sent(job)
        assert run.poll() is None
    finally:
        run.kill()
        run.wait()


def test_a_daemon_of_an_older_build_is_shown(post: Post, mam: Mam) -> None:
    """Lost: the reason why a fixed defect still shows: the old daemon lives on."""
    post.add("j")
    post.say("j", "started")
    post.run("mam.build_id = lambda: '4.0.0-0123456789ab'\n")
    assert "OLDER" in mam("daemon", check=0).stdout
    assert mam("daemon", "--json", check=0).json()["older_build"] is True


def test_a_daemon_born_without_credentials_makes_room_for_one_that_has_them(post: Post, mam: Mam,
                                                                            own_broker: Any) -> None:
    """Lost: all news of this host, because the first command came from a shell without MQTT_PASSWORD."""
    broker = own_broker("nats", user="host", password="right-one")
    mam.env = broker.env()
    job = post.add(unique("born"))
    mam.env = {}
    done = mam("publish", job, "--event", "started", "--attempts", 1, check=2)
    assert "recorded, not sent yet" in done.stderr
    first = post.wait_daemon()
    poll(lambda: post.line().get("final"), UP_S, "it has given up")
    mam.env = broker.env()
    mam("publish", job, "--event", "progress", check=0)
    second = post.wait_daemon(but=first)
    post.wait_line()
    assert post.daemons() == [second]
    assert state_of(broker, job)["seq"] == 2


def test_refused_credentials_are_tried_a_few_times_said_and_replaced(post: Post, mam: Mam, own_broker: Any,
                                                                     proxy: Any) -> None:
    """Lost: an account, locked by a daemon that hammers the broker; or days, because nobody said what is wrong."""
    broker = own_broker("mosquitto", user="host", password="right-one")
    way = proxy(broker)
    mam.env = dict(way.env(broker), MQTT_PASSWORD="wrong-one")
    job = post.add(unique("creds"))
    post.say(job, "started")
    run = post.run(HASTE)
    poll(lambda: post.line().get("final"), UP_S, lambda: f"given up: {post.describe()}")
    tries = way.connections
    assert tries == 4
    with post.registry() as registry:
        for _ in range(3):
            assert post.module.wake_daemon(registry)
            post.say(job)
            post.wait_look(1)
    assert way.connections == tries, "no wake makes it try again"
    assert "refused the credentials" in mam("daemon", check=0).stdout
    done = mam("publish", job, "--event", "progress", check=2)
    assert "refused the credentials" in done.stderr and "wrong-one" not in done.stderr + run.stderr
    mam.env = way.env(broker)
    mam("publish", job, "--event", "completed", check=0)
    assert run.wait().code == 0, "it has made room"
    assert_ends_right(post, broker, job)


@pytest.mark.parametrize("silence", ["at the connect", "in mid-life", "while the dead are fenced off"])
def test_a_broker_that_does_not_answer_holds_up_no_beat_and_no_deadline(post: Post, mam: Mam, mosquitto: Broker,
                                                                        proxy: Any, silence: str) -> None:
    """Lost: the jobs of this host, closed or left open because a broker elsewhere is stuck."""
    way = proxy(mosquitto)
    mam.env = way.env(mosquitto)
    beating, due, later = unique("beats"), unique("due"), unique("later")
    post.add(beating)
    code = ""
    if silence == "at the connect":
        way.blackhole()
    if silence == "while the dead are fenced off":
        hole = proxy(mosquitto)
        hole.blackhole()
        # Two connections of a sender that was killed; the broker answers the first takeover and no other.
        gone = {**post.module.identity_of(os.getpid()), "start": "1"}
        with post.registry() as registry:
            for name in ("hermes-dead1", "hermes-dead2"):
                registry.add_sender(name, f"127.0.0.1:{way.port}", gone)
        code = f"""
class Once(mam.Connection):
    made = 0
    def __init__(self, broker, *rest):
        Once.made += 1
        super().__init__(broker if Once.made == 1 else broker._replace(port={hole.port}), *rest)
mam.Connection = Once
"""
    post.say(beating, "started", fields={"heartbeat_sec": 0.3})
    post.run(code)
    if silence == "in mid-life":
        post.wait_line()
        way.stall()
        post.say(beating)
    if silence == "while the dead are fenced off":
        poll(lambda: hole.connections, UP_S, "it meets the silence")
    for job in (due, later):
        post.add(job, timeout_sec=1.0)
        post.say(job, "started")
        begun = time.time()
        assert post.wait_status(job, "error").reason == "deadline_timeout"
        assert ended_after(post, job, begun) < 6
        begun = time.monotonic()
        wait_beats(post, beating, 2)
        assert time.monotonic() - begun < 5


# ---- taking over -----------------------------------------------------------------------------------------------

def delegate(mam: Mam, command: str, *flags: object, job: str = "j", **env: Optional[str]) -> str:
    mam("delegate", "--agent-session", "exec:e", "--exec", command, "--prompt", "x", "--job-id", job, "--detach",
        *flags, check=0, env=dict(env))
    return job


def test_a_command_whose_keeper_was_killed_is_ended_and_said_to_be_lost(post: Post, mam: Mam) -> None:
    """Lost: a command that nobody owns, running on for ever in a job that never ends."""
    job = delegate(mam, "echo $$ > pid; sleep 300 & wait")
    poll(lambda: (mam.workspace / "pid").exists() and post.job(job).started_at, UP_S, "the command runs")
    run = json.loads(post.job(job).run)
    os.kill(run["supervisor"]["pid"], signal.SIGKILL)
    assert post.wait_status(job, "error").reason == "supervisor_lost"
    poll(lambda: not post.module.group_members(run["group"]), UP_S, "its group is gone")
    post.wait_gone()
    assert not mam.processes()


def test_a_check_whose_keeper_was_killed_is_done_again_and_settled_once(post: Post, mam: Mam) -> None:
    """Lost: finished work that nobody ever looks at."""
    job = delegate(mam, "true", "--validate", "echo once >> ran; test $(wc -l < ran) -gt 1 || sleep 300")
    poll(lambda: (mam.workspace / "ran").exists(), UP_S, "the check runs")
    keeper = json.loads(poll(lambda: post.job(job).supervisor, UP_S, "kept by _supervise"))
    assert keeper["role"] == "_supervise"
    os.kill(keeper["who"]["pid"], signal.SIGKILL)
    post.wait_status(job, "completed")
    ends = post.rows("SELECT source FROM events WHERE job_id = ? AND seq IS NOT NULL AND event = 'completed'", job)
    assert [row[0] for row in ends].count("_supervise") == 1


# A check that says when it runs beside another, does not heed TERM, and waits to be let go.
CHECK = """
import fcntl, os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = open("lock", "a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    open("overlap", "w").close()
with open("checks", "a") as checks:
    checks.write("%d\\n" % os.getpid())
while not os.path.exists("go"):
    time.sleep(0.02)
"""


def checks(mam: Mam) -> List[int]:
    """The pids of the checks that have begun."""
    path = mam.workspace / "checks"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def to_be_checked(post: Post, **columns: Any) -> str:
    """A job whose worker is done, and whose check nobody has begun."""
    mam = post.mam
    mam.env = dict(mam.env, MAM_TERM_GRACE_S="0.2")
    (mam.workspace / "check.py").write_text(CHECK)
    job = post.add("j", validate_cmd=f"exec '{sys.executable}' check.py", workdir=str(mam.workspace), **columns)
    post.say(job, "started")
    post.say(job, "completed")
    return job


@pytest.mark.parametrize("moment, begun", [
    ("before it is recorded", 1), ("before it begins", 1), ("while it runs", 2), ("after its end", 2)])
def test_a_check_never_runs_beside_another(post: Post, mam: Mam, moment: str, begun: int) -> None:
    """Lost: the verdict, to two runs of one test suite in one folder, because the first one's keeper was killed."""
    hook = {
        "before it is recorded": "mam.Registry.begin_check = lambda *args: os.kill(os.getpid(), 9)\n",
        "before it begins": "mam.GatedChild.release = lambda self: os.kill(os.getpid(), 9)\n",
        "while it runs": "import time\n"
                         "def release(self, real=mam.GatedChild.release):\n"
                         "    real(self)\n"
                         "    while not os.path.exists('checks'):\n"
                         "        time.sleep(0.01)\n"
                         "    os.kill(os.getpid(), 9)\n"
                         "mam.GatedChild.release = release\n",
        "after its end": "mam.Registry.end_check = lambda *args: os.kill(os.getpid(), 9)\n"}[moment]
    job = to_be_checked(post)
    if moment == "after its end":
        (mam.workspace / "go").touch()
    assert post.inside.patched(mam, hook)("_supervise", job).code == -signal.SIGKILL
    again = mam.popen("_supervise", job)
    poll(lambda: len(checks(mam)) == begun, UP_S, lambda: f"checks {checks(mam)} of {begun}: {again}")
    assert not (mam.workspace / "overlap").exists()
    (mam.workspace / "go").touch()
    assert again.wait().code == 0
    assert post.job(job).status == "completed" and len(checks(mam)) == begun
    assert post.rows("SELECT checking FROM attempts") == [(None,)]
    poll(lambda: not mam.processes(), UP_S, "nothing is left behind")


@pytest.mark.parametrize("keeper", ["lives", "is killed", "stands still"])
@pytest.mark.parametrize("end", ["cancel", "redispatch"])
def test_a_check_ends_with_its_job_whoever_keeps_it(post: Post, mam: Mam, keeper: str, end: str) -> None:
    """Lost: a folder, to a check that runs on in it after its job was cancelled or given out anew."""
    mam.without_daemon()
    job = to_be_checked(post)
    run = mam.popen("_supervise", job)
    poll(lambda: checks(mam), UP_S, "the check runs")
    group = json.loads(post.job(job).checking)["group"]
    if keeper == "is killed":
        os.kill(run.pid, signal.SIGKILL)
        run.process.wait()
    elif keeper == "stands still":
        post.pause(run.pid)
    mam(*(["cancel", job] if end == "cancel" else ["redispatch", job, "--force", "--no-deliver"]), check=0)
    assert not post.module.group_members(group)
    if keeper == "stands still":
        resume(run.pid)
    if keeper != "is killed":
        assert run.wait().code == 0
    assert post.job(job).status == ("cancelled" if end == "cancel" else "pending")
    assert len(checks(mam)) == 1 and not any(post.rows("SELECT checking FROM attempts WHERE checking IS NOT NULL"))


@pytest.mark.parametrize("keeper", ["is killed", "stands still"])
def test_the_daemon_ends_a_check_that_is_out_of_time(post: Post, mam: Mam, keeper: str) -> None:
    """Lost: a host that is busy for ever with the check of a job that was closed long ago."""
    job = to_be_checked(post, timeout_sec=3.0)
    run = mam.popen("_supervise", job)
    poll(lambda: checks(mam), UP_S, "the check runs")
    post.pause(run.pid)
    mam(check=0)                                # with a daemon
    assert post.wait_status(job, "error").reason == "deadline_timeout"
    if keeper == "is killed":
        os.kill(run.pid, signal.SIGKILL)
    group = checks(mam)[0]
    poll(lambda: not post.module.group_members(group), UP_S, "the check has ended")
    poll(lambda: post.rows("SELECT checking FROM attempts") == [(None,)], UP_S, "that is noted")
    assert len(checks(mam)) == 1


@pytest.mark.parametrize("moment", ["before delivery", "during delivery", "after delivery"])
def test_a_delegator_may_be_killed_at_any_moment(post: Post, mam: Mam, moment: str) -> None:
    """Lost: a job that was never begun, was begun twice, or waits for ever for a worker it does not have."""
    hook = {
        "before delivery": "mam.hand_over = lambda *args: os.kill(os.getpid(), 9)\n",
        "during delivery": "def spawn(argv, *args, real=mam.spawn_self, **options):\n"
                           "    return os.kill(os.getpid(), 9) if argv[0] == '_run' else real(argv, *args, **options)\n"
                           "mam.spawn_self = spawn\n",
        "after delivery": "mam._follow_delegated = lambda *args: os.kill(os.getpid(), 9)\n"}[moment]
    done = post.inside.patched(mam, hook)(
        "delegate", "--agent-session", "exec:e", "--exec", "echo ran >> ran", "--prompt", "x", "--job-id", "j",
        "--ack-timeout", 2)
    assert done.code == -signal.SIGKILL
    mam(check=0)                                     # if it was killed before the daemon had come
    if moment == "during delivery":
        assert post.wait_status("j", "error").reason == "agent_blocked"
        assert not (mam.workspace / "ran").exists()
    else:
        post.wait_status("j", "completed")
        assert (mam.workspace / "ran").read_text() == "ran\n"

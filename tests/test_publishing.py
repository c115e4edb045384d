"""Publishing: recorded first, then brought to the broker, in order, at least once, by whoever comes next.

Each test names a promise; where it fails, news is lost, comes in a wrong order, or tells the wire what it must not.
"""
from __future__ import annotations

import errno
import hmac
import json
import os
import pty
import select
import signal
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import pytest
import rfc8785

from support import free_port, pause, poll, process_table, resume
from support.brokers import Broker, Certificates
from support.cli import Mam, Result
from support.inside import Inside, rows
from support.observer import Message, Observer, retained
from support.proxy import Proxy

ROOT = "python/mqtt/jobs"
CONNACK_BYTES = 4
NOT_SENT, REFUSED, NOT_RECORDED = 2, 4, 75
KILL = "os.kill(os.getpid(), 9)"


@pytest.fixture
def mam(new_mam: Callable[..., Mam]) -> Mam:
    """Publishers on their own, as where no daemon can be started: tests/test_daemon.py has the others."""
    return new_mam("host").without_daemon()


@pytest.fixture
def inside(pyz: Path, session_folder: Path) -> Inside:
    return Inside(pyz, session_folder)


@pytest.fixture
def door(broker: Broker, proxy: Callable[[Any], Proxy]) -> Proxy:
    """The way to the broker, which the test may close."""
    return proxy(broker)


@pytest.fixture
def host(mam: Mam, broker: Broker, door: Proxy) -> Mam:
    """A host whose broker lies behind `door`."""
    mam.env.update(door.env(broker))
    return mam


def register(host: Mam, *args: object, **options: Any) -> str:
    return host("register", "--prompt", "work", "--agent-session", "queue:q", *args, check=0, **options).stdout.strip()


def publish(host: Mam, job: str, event: str, *args: object, **options: Any) -> Result:
    return host("publish", "--job", job, "--event", event, *args, **options)


def key_of(host: Mam, job: str, attempt: int = 1) -> str:
    return str(rows(host.registry_dir, "SELECT auth_token FROM attempts WHERE job_id = ? AND attempt_id = ?",
                    job, attempt)[0][0])


def recorded(host: Mam, job: str) -> List[Tuple[int, str]]:
    return [(line["seq"], line["event"]) for line in host.events(job) if line["seq"] is not None]


def owed(host: Mam, job: str) -> int:
    return int(rows(host.registry_dir, "SELECT count(*) FROM events WHERE job_id = ? AND owed = 1", job)[0][0])


def check_signature(raw: bytes, key: str) -> Dict[str, Any]:
    """The payload, if the signature is right by another implementation than mam's."""
    payload = json.loads(raw)
    claimed = payload["data"].pop("hmac_sig")
    assert hmac.new(key.encode("ascii"), rfc8785.dumps(payload), "sha256").hexdigest() == claimed
    return dict(payload)


class Wire:
    """What an outsider sees of one job."""

    def __init__(self, observer: Observer, broker: Broker, job: str) -> None:
        self.observer, self.broker, self.job = observer, broker, job

    def settle(self) -> List[Message]:
        """Everything that was acknowledged to mam by now, in order: a mark published later has arrived."""
        topic = f"{ROOT}/{self.job}/mark"
        count = sum(message.topic == topic for message in self.observer.all)
        self.observer.publish(topic, b"x")
        poll(lambda: sum(message.topic == topic for message in self.observer.all) > count, 20, "the mark")
        return [message for message in self.observer.all if message.topic != topic]

    def events(self) -> List[Message]:
        return [message for message in self.settle() if message.topic == f"{ROOT}/{self.job}/events"]

    def states(self) -> List[Message]:
        return [message for message in self.settle() if message.topic == f"{ROOT}/{self.job}/state"]

    def first_arrivals(self) -> List[int]:
        """Numbers in the order in which each was first seen; a repetition must be the same bytes."""
        seen: Dict[int, bytes] = {}
        for message in self.events():
            if message.payload:
                seq = message.json()["seq"]
                assert seen.setdefault(seq, message.payload) == message.payload, f"two versions of number {seq}"
        return list(seen)

    def retained(self, kind: str) -> Optional[Dict[str, Any]]:
        raw = retained(self.broker, f"{ROOT}/{self.job}/{kind}")
        return json.loads(raw) if raw else None


@pytest.fixture
def watch_wire(broker: Broker, observe: Callable[..., Observer]) -> Callable[[str], Wire]:
    return lambda job: Wire(observe(broker, f"{ROOT}/{job}/#"), broker, job)


# ---- what arrives ------------------------------------------------------------------------------------------


def test_events_and_state_arrive_signed(host: Mam, broker: Broker, watch_wire: Any) -> None:
    """Anybody with the job's key can check every message; without that, nothing on the wire can be believed."""
    job = register(host, env={"MAM_X": "1"})
    wire = watch_wire(job)
    publish(host, job, "started", check=0)
    publish(host, job, "progress", "--detail", "half é\u3042\U0001f600 \"\\", "--data",
            '{"x": 1.5, "e": 1e21, "\u20ac": [null, true]}', check=0)
    assert wire.retained("events") is None, "only the end is retained"
    assert wire.retained("state")["status"] == "running"
    publish(host, job, "completed", "--detail", "done", check=0)
    key = key_of(host, job)
    events = [check_signature(message.payload, key) for message in wire.events()]
    assert [(event["seq"], event["event"]) for event in events] == recorded(host, job) == [
        (1, "started"), (2, "progress"), (3, "completed")]
    assert events[1]["data"]["x"] == 1.5 and events[1]["detail"].startswith("half é\u3042\U0001f600")
    states = [check_signature(message.payload, key) for message in wire.states()]
    assert [(state["seq"], state["status"], state["last_event"]) for state in states] == [
        (1, "running", "started"), (2, "running", "progress"), (3, "completed", "completed")]
    assert all(state["event"] == "state" and state["job_id"] == job for state in states)
    assert wire.retained("events")["event"] == "completed"
    assert wire.retained("state")["status"] == "completed"


@pytest.mark.parametrize("command, event, status, reason", [
    (["cancel"], "error", "cancelled", "cancelled"),
    (["status", "--set", "completed", "--job"], "completed", "completed", "operator"),
    (["close", "--request", "deadline_timeout", "--job"], "error", "error", "deadline_timeout")],
    ids=["cancel", "status", "close"])
def test_an_operators_end_is_news_as_well(host: Mam, watch_wire: Any, command: List[str], event: str, status: str,
                                          reason: str) -> None:
    """A remote follower waits for the end of a job, whoever ended it."""
    job = register(host)
    wire = watch_wire(job)
    host(*command, job, check=0)
    last = check_signature(wire.events()[-1].payload, key_of(host, job))
    assert (last["event"], last["data"]["reason"], last["data"]["status"]) == (event, reason, status)
    assert wire.retained("events")["event"] == event and wire.retained("state")["status"] == status


def test_a_completed_that_has_to_be_checked_is_not_retained(host: Mam, inside: Inside, watch_wire: Any) -> None:
    """Who comes later must not take an unchecked "completed" for the end."""
    job = register(host, "--artifact", "report.md")
    wire = watch_wire(job)
    publish(inside.patched(host, "mam.ensure_supervisor = lambda *ignored: None"), job, "completed", check=0)
    assert wire.events()[-1].json()["data"]["settles"] is False
    assert wire.retained("events") is None
    assert (wire.retained("state")["status"], wire.retained("state")["phase"]) == ("running", "validating")
    publish(host, job, "completed", check=0)            # said again; starts what settles it
    host.wait_job(job, "error")
    poll(lambda: owed(host, job) == 0 and not host.processes(), 20, "the verdict sent")
    last = check_signature(wire.events()[-1].payload, key_of(host, job))
    assert (last["event"], last["data"]["reason"], last["seq"]) == ("error", "artifact_missing", 2)
    assert wire.retained("events")["seq"] == 2 and wire.retained("state")["status"] == "error"


def test_a_state_shows_the_job_as_it_is_when_it_is_sent(host: Mam, door: Proxy, watch_wire: Any) -> None:
    """A queue of old pictures, replayed later, would show a finished job as running."""
    job = register(host)
    wire = watch_wire(job)
    door.refuse()
    for event in ("started", "progress"):
        publish(host, job, event, "--attempts", 1, check=NOT_SENT)
    door.accept()
    publish(host, job, "completed", check=0)
    assert [message.json()["seq"] for message in wire.events()] == [1, 2, 3]
    assert [(message.json()["seq"], message.json()["status"]) for message in wire.states()] == [(3, "completed")]


def test_without_trouble_everything_is_sent_once(host: Mam, door: Proxy, watch_wire: Any) -> None:
    job = register(host)
    wire = watch_wire(job)
    for event in ("started", "progress", "progress", "completed"):
        publish(host, job, event, check=0)
    assert [message.json()["seq"] for message in wire.events()] == [1, 2, 3, 4]
    assert len(wire.states()) == 4 and door.connections == 4
    publish(host, job, "completed", check=0)        # idempotent: nothing owed, nothing to connect for
    assert door.connections == 4


# ---- without a broker --------------------------------------------------------------------------------------

_LISTENS = """
def hook(event, args):
    if event.startswith("socket.") or event == "import" and args[0].split(".")[0] in ("paho", "ssl", "socket"):
        with open({log!r}, "a") as file:
            file.write("%s %s\\n" % (event, args[0]))
sys.addaudithook(hook)
"""


def test_a_local_job_opens_no_socket(mam: Mam, inside: Inside) -> None:
    """No broker set means no network: v4 silently talked to a public sandbox."""
    log = mam.folder / "audit"
    there = inside.patched(mam, _LISTENS.format(log=str(log)))
    job = register(there)
    for event in ("started", "progress", "completed"):
        publish(there, job, event, check=0)
    for command in (["list"], ["get", job], ["logs", job], ["watch", job], ["redispatch", job, "--no-deliver"],
                    ["cancel", job], ["pick", "--agent-session", "queue:q"]):
        there(*command, check=3 if command[0] == "pick" else 0)
    assert not log.exists(), log.read_text()
    assert recorded(mam, job)[:3] == [(1, "started"), (2, "progress"), (3, "completed")]


@pytest.mark.parametrize("command", [["register", "--prompt", "p", "--agent-session", "queue:q"],
                                     ["pick", "--agent-session", "queue:q"], ["list"], ["get"], ["watch"]],
                         ids=lambda command: command[0])
def test_these_never_touch_the_network_even_with_a_broker(mam: Mam, inside: Inside, command: List[str]) -> None:
    """Looking and registering work on a train."""
    mam.env.update(MQTT_BROKER="127.0.0.1", MQTT_PORT=str(free_port()))
    job = register(mam)
    publish(mam, job, "completed", "--attempts", 1, check=NOT_SENT)
    register(mam)
    log = mam.folder / "audit"
    there = inside.patched(mam, _LISTENS.format(log=str(log)))
    there(*command, *([job] if len(command) == 1 and command[0] != "list" else []), check=0)
    assert not log.exists(), log.read_text()


# ---- exit codes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, code, words", [
    (["--event", "progress"], 0, ""),
    (["--event", "finished"], 1, "must be one of"),
    (["--event", "progress", "--data", "[1]"], 1, "JSON object"),
    (["--event", "progress", "--data", "{"], 1, "--data"),
    (["--event", "progress", "--data", '{"status": 1}'], 1, "reserved"),
    (["--event", "progress", "--data", '{"x": 9007199254740993}'], 1, "2^53"),
    (["--event", "progress", "--detail-file", "/nonexistent"], 64, "/nonexistent"),
    (["--event", "progress", "--attempt-id", "2"], 4, "leave your work in place"),
    (["--event", "progress", "--dispatch-token", "wrong"], 4, "leave your work in place"),
    (["--event", "progress", "--watch-pid", "x"], 64, "--watch-pid"),
    (["--event", "progress", "--heartbeat", "30"], 64, "started"),
    (["--detail", "x"], 64, "--event"),
], ids=lambda value: " ".join(value)[8:50] if isinstance(value, list) else "")
def test_the_exit_code_tells_an_agent_what_to_do_next(mam: Mam, args: List[str], code: int, words: str) -> None:
    """0 go on, 1 mend the command, 4 stop, 64 read the help; and a refused command leaves no event."""
    job = register(mam)
    result = mam("publish", "--job", job, *args, check=code)
    assert words in result.stderr
    assert recorded(mam, job) == ([(1, "progress")] if code == 0 else [])
    assert (result.stdout != "") == (code == 0)


def test_an_unknown_job_is_named(mam: Mam) -> None:
    register(mam)
    assert "deadbeef" in publish(mam, "deadbeef", "progress", check=1).stderr


def test_errors_are_json_when_asked_for(mam: Mam) -> None:
    job = register(mam)
    publish(mam, job, "completed", check=0)
    error = publish(mam, job, "error", "--json", check=REFUSED).json()["error"]
    assert error["code"] == "refused" and "completed" in error["message"] and "leave your work" in error["hint"]


@pytest.mark.parametrize("port, words", [("closed", "refused"), ("abc", "MQTT_PORT"), ("70000", "MQTT_PORT"),
                                         ("0", "MQTT_PORT")])
def test_a_wrong_port_delays_news_and_says_why(mam: Mam, port: str, words: str) -> None:
    number = str(free_port()) if port == "closed" else port
    mam.env.update(MQTT_BROKER="127.0.0.1", MQTT_PORT=number if port == "closed" else "1883")
    job = register(mam)
    mam.env.update(MQTT_PORT=number)
    result = publish(mam, job, "progress", "--attempts", 1, check=NOT_SENT)
    assert "recorded, not sent yet" in result.stderr and words in result.stderr and number in result.stderr
    assert recorded(mam, job) == [(1, "progress")]


def test_a_job_is_not_registered_for_a_port_that_cannot_be(mam: Mam) -> None:
    """Its wire is decided at registration: an impossible one is said then, not at every later event."""
    mam.env.update(MQTT_BROKER="127.0.0.1", MQTT_PORT="abc")
    result = mam("register", "--prompt", "work", "--agent-session", "queue:q", check=1)
    assert "MQTT_PORT is 'abc'" in result.stderr and mam("list").stdout == "(no jobs)\n"


def test_a_server_that_is_no_broker_is_not_believed(mam: Mam, inside: Inside) -> None:
    """A port where something else answers: a sentence, not a traceback, and the event stays owed."""
    import socket
    import threading
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def serve() -> None:
            for _ in range(2):
                client, _ = listener.accept()
                with client:
                    client.recv(4096)
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        mam.env.update(MQTT_BROKER="127.0.0.1", MQTT_PORT=str(listener.getsockname()[1]))
        job = register(mam)
        short = inside.patched(mam, "mam.CONNACK_TIMEOUT_S = 1.0\nmam.BACKOFF_BASE_S = 0.01")
        result = publish(short, job, "progress", "--attempts", 2, check=NOT_SENT)
        assert "recorded, not sent yet" in result.stderr and owed(mam, job) == 1
        thread.join(10)


# ---- a broker that is down, and back -----------------------------------------------------------------------


def test_what_a_dead_broker_missed_is_sent_by_the_next_publish(mam: Mam, own_broker: Any, broker_kind: str,
                                                               observe: Callable[..., Observer]) -> None:
    """News of a job and of its neighbours, in order, by whoever comes first once the broker is back."""
    broker = own_broker(broker_kind)
    mam.env.update(broker.env())
    first, second, third = register(mam), register(mam), register(mam)
    publish(mam, first, "started", check=0)
    broker.stop()
    for event in ("progress", "completed"):
        result = publish(mam, first, event, "--attempts", 1, check=NOT_SENT)
        assert "recorded, not sent yet" in result.stderr and str(broker.port) in result.stderr
    publish(mam, second, "started", "--attempts", 1, check=NOT_SENT)
    broker.start()
    wires = {job: Wire(observe(broker, f"{ROOT}/{job}/#"), broker, job) for job in (first, second, third)}
    publish(mam, third, "started", check=0)
    assert [job for job in wires if owed(mam, job)] == []
    assert wires[first].first_arrivals() == [2, 3] and wires[second].first_arrivals() == [1]
    assert wires[first].retained("events")["event"] == "completed"
    assert wires[first].retained("state")["status"] == "completed"
    assert wires[second].retained("state")["seq"] == 1


def test_the_sweep_brings_no_job_to_a_broker_that_is_not_its_own(mam: Mam, nats: Broker, mosquitto: Broker,
                                                                 proxy: Callable[[Any], Proxy], observe: Any) -> None:
    """One customer's news must not turn up at another's server."""
    closed = proxy(nats)
    closed.refuse()
    elsewhere = register(mam, "--broker", f"127.0.0.1:{closed.port}")
    publish(mam, elsewhere, "progress", "--attempts", 1, check=NOT_SENT)
    seen = Wire(observe(mosquitto, f"{ROOT}/{elsewhere}/#"), mosquitto, elsewhere)
    mam.env.update(mosquitto.env())
    mine = register(mam)
    publish(mam, mine, "progress", check=0)
    assert seen.settle() == [] and owed(mam, elsewhere) == 1 and owed(mam, mine) == 0
    closed.accept()
    publish(mam, elsewhere, "progress", check=0)
    assert owed(mam, elsewhere) == 0 and seen.settle() == []


def test_a_long_backlog_keeps_its_order(host: Mam, inside: Inside, watch_wire: Any) -> None:
    """More than one window of unacknowledged messages: still 1, 2, 3..."""
    job = register(host)
    with inside.registry(host) as registry:
        for number in range(70):
            registry.transition(job, "progress", source="test", fields={"detail": str(number)})
    wire = watch_wire(job)
    publish(host, job, "completed", check=0)
    assert wire.first_arrivals() == list(range(1, 72))
    assert [message.json()["seq"] for message in wire.states()] == [71]


def test_it_tries_as_often_as_it_was_told(host: Mam, inside: Inside, door: Proxy) -> None:
    job = register(host)
    door.refuse()
    quick = inside.patched(host, "mam.BACKOFF_BASE_S = mam.BACKOFF_MAX_S = 0.01")
    for tries in (1, 3):
        before = door.connections
        publish(quick, job, "progress", "--attempts", tries, check=NOT_SENT)
        assert door.connections - before == tries


def test_operators_commands_succeed_without_the_broker(host: Mam, door: Proxy) -> None:
    """A dead broker must not keep anybody from ending a job."""
    door.refuse()
    for command in (["cancel"], ["status", "--set", "error", "--job"], ["redispatch", "--force", "--no-deliver"],
                    ["close", "--request", "unresponsive", "--job"]):
        result = host(*command, register(host), check=0)
        assert "not sent yet" in result.stderr or command[0] == "redispatch"


def test_a_job_that_cannot_be_sent_does_not_fail_anothers_publish(mam: Mam, mosquitto: Broker) -> None:
    """The sweep meets a neighbour whose broker is not there: its trouble, not the publisher's."""
    mine = register(mam, "--broker", f"127.0.0.1:{mosquitto.port}")
    other = register(mam, "--broker", f"127.0.0.1:{free_port()}")
    publish(mam, other, "progress", "--attempts", 1, check=NOT_SENT)
    result = publish(mam, mine, "progress", check=0)
    assert "seq=1" in result.stdout and owed(mam, mine) == 0 and owed(mam, other) == 1


# ---- 64 at once --------------------------------------------------------------------------------------------


def test_64_publishers_at_once_on_one_job_through_a_broker(host: Mam, inside: Inside, watch_wire: Any) -> None:
    """No number twice, none left out, every event on the wire, in order; the last state is the last word."""
    job = register(host)
    wire = watch_wire(job)
    order = ["publish", "--job", job, "--event", "progress", "--detail"]
    results = inside.crowd(host, [[*order, number] for number in range(64)], before="import paho.mqtt.client, ssl")
    assert [result for result in results if result.code != 0] == []
    said = sorted(int(result.stdout.split("seq=")[1].split()[0]) for result in results)
    assert said == list(range(1, 65)) == [seq for seq, _ in recorded(host, job)]
    assert owed(host, job) == 0
    assert wire.first_arrivals() == said
    assert wire.retained("state")["seq"] == 64 == wire.states()[-1].json()["seq"]
    assert {message.json()["detail"] for message in wire.events()} == {str(number) for number in range(64)}


def test_64_publishers_at_once_on_one_local_job(mam: Mam, inside: Inside) -> None:
    job = register(mam)
    order = ["publish", "--job", job, "--event", "progress", "--detail"]
    results = inside.crowd(mam, [[*order, number] for number in range(64)])
    assert [result for result in results if result.code != 0] == []
    said = sorted(int(result.stdout.split("seq=")[1].split()[0]) for result in results)
    assert said == list(range(1, 65)) == [seq for seq, _ in recorded(mam, job)]
    details = {line["seq"]: line["detail"] for line in mam.events(job) if line["seq"]}
    assert all(details[int(result.stdout.split("seq=")[1].split()[0])] == result.args[-1] for result in results)


def test_of_64_ends_at_once_one_wins(mam: Mam, inside: Inside) -> None:
    """Half say completed, half error: one end, and every loser is told so and kept as evidence."""
    job = register(mam)
    results = inside.crowd(mam, [["publish", "--job", job, "--event", ("completed", "error")[number % 2]]
                                 for number in range(64)])
    status = mam.job(job)["status"]
    assert len(recorded(mam, job)) == 1 and recorded(mam, job)[0][1] == status
    for result in results:
        assert result.code == (0 if result.args[-1] == status else REFUSED), result
    assert sum(line["event"] == "late" for line in mam.events(job)) == 63


# ---- brokers that misbehave --------------------------------------------------------------------------------


def test_refused_credentials_are_said_once_and_never_printed(mam: Mam, own_broker: Any, broker_kind: str,
                                                             proxy: Callable[[Any], Proxy]) -> None:
    """Repeating a wrong password locks accounts; showing it gives it away."""
    broker = own_broker(broker_kind, user="worker", password="the-right-one")
    door = proxy(broker)
    mam.env.update(door.env(broker), MQTT_PASSWORD="the-wrong-one")
    job = register(mam)
    result = publish(mam, job, "progress", "--detail", "with the-wrong-one in it", check=NOT_SENT)
    assert "refused the credentials" in result.stderr and "MQTT_PASSWORD" in result.stderr
    assert door.connections == 1
    shown = str(result) + str(mam("logs", job, "--json")) + str(mam("get", job, "--show-secrets"))
    files = b"".join(path.read_bytes() for path in mam.registry_dir.rglob("*") if path.is_file())
    assert "the-wrong-one" not in shown.replace("with the-wrong-one in it", "") and b"the-wrong-one" not in files
    mam.env.update(door.env(broker))
    publish(mam, job, "completed", check=0)
    assert owed(mam, job) == 0


def test_a_broker_that_never_answers_connect(host: Mam, inside: Inside, door: Proxy) -> None:
    """A black hole costs a bounded time, and nothing that was recorded."""
    job = register(host)
    door.blackhole()
    short = inside.patched(host, "mam.CONNACK_TIMEOUT_S = 0.3\nmam.BACKOFF_BASE_S = 0.01")
    result = publish(short, job, "progress", "--attempts", 2, check=NOT_SENT, timeout=20)
    assert "no answer to CONNECT" in result.stderr and door.connections == 2
    door.drop()
    door.accept()
    publish(host, job, "completed", check=0)
    assert owed(host, job) == 0


def test_a_broker_that_never_acknowledges_is_sent_the_same_bytes_again(host: Mam, inside: Inside, door: Proxy,
                                                                       watch_wire: Any) -> None:
    """Arrived or not cannot be known: sent again, and byte for byte so that a receiver can tell."""
    job = register(host)
    wire = watch_wire(job)
    door.hold_after(CONNACK_BYTES, "down")
    short = inside.patched(host, "mam.PUBACK_TIMEOUT_S = 0.3")
    result = publish(short, job, "progress", "--attempts", 1, check=NOT_SENT, timeout=20)
    assert "did not acknowledge" in result.stderr and owed(host, job) == 1
    wire.observer.wait_for(lambda message: message.topic.endswith("/events"))
    door.drop()
    door.resume("down")
    publish(host, job, "completed", check=0)
    assert [message.json()["seq"] for message in wire.events()] == [1, 1, 2]
    assert wire.first_arrivals() == [1, 2]


def test_a_connection_lost_before_the_acknowledgement_is_made_up_for(host: Mam, door: Proxy, watch_wire: Any) -> None:
    """The same publish tries again over a new connection, with the same bytes, and ends well."""
    job = register(host)
    wire = watch_wire(job)
    door.hold_after(CONNACK_BYTES, "down")
    run = host.popen("publish", "--job", job, "--event", "completed")
    wire.observer.wait_for(lambda message: message.topic.endswith("/events"), 20)
    door.drop()
    door.resume("down")
    assert run.wait(30).code == 0
    assert [message.json()["seq"] for message in wire.events()] == [1, 1] and wire.first_arrivals() == [1]
    assert wire.retained("state")["status"] == "completed" and owed(host, job) == 0


@pytest.mark.parametrize("cut", [1, 20, 60, 400])
def test_a_connection_cut_within_a_packet_loses_nothing(host: Mam, door: Proxy, watch_wire: Any, cut: int) -> None:
    job = register(host)
    wire = watch_wire(job)
    door.hold_after(cut, "up")
    run = host.popen("publish", "--job", job, "--event", "completed", "--detail", "x" * 500)
    poll(lambda: door.bytes_up >= cut, 20, "the cut")
    door.drop()
    door.resume("up")
    assert run.wait(30).code == 0 and wire.first_arrivals() == [1] and owed(host, job) == 0


def test_a_broker_with_a_small_limit_does_not_make_it_loop(mam: Mam, own_broker: Any, broker_kind: str,
                                                           proxy: Callable[[Any], Proxy], inside: Inside) -> None:
    """A broker that hangs up on a long message would be called once a second for ever by a client on its own."""
    extra = {"nats": "max_payload: 2048", "mosquitto": "max_packet_size 2048"}[broker_kind]
    broker = own_broker(broker_kind, extra=extra)
    door = proxy(broker)
    mam.env.update(door.env(broker))
    job = register(mam)
    publish(mam, job, "started", check=0)
    before = door.connections
    quick = inside.patched(mam, "mam.BACKOFF_BASE_S = 0.01\nmam.PUBACK_TIMEOUT_S = 1.0")
    result = publish(quick, job, "progress", "--detail", "x" * 4000, "--attempts", 3, check=NOT_SENT, timeout=30)
    assert door.connections - before == 3 and "recorded, not sent yet" in result.stderr
    assert recorded(mam, job) == [(1, "started"), (2, "progress")]


# ---- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detail, data, code", [
    ("x" * 65536, None, 0), ("x" * 65537, None, 1), ('"' * 65536, None, 0), ("\u3042" * 21845, None, 0),
    ("\u3042" * 21846, None, 1), ("x", "y" * (128 * 1024 - 8), 0), ("x", "y" * (128 * 1024 - 7), 1),
    ("x" * 65536, "y" * (128 * 1024 - 8), 0), ('"' * 65536, "y" * (128 * 1024 - 8), 1),
    ("x", '"' * 65536, 1), ("x", "\u0001" * 30000, 1), ("\U0001f600" * 1025, None, 0)],
    ids=["64Ki", "64Ki+1", "quotes", "wide", "wide+1", "data", "data+1", "both", "both grown", "data of quotes",
         "data of controls", "cut within a character"])
def test_no_message_passes_the_limit_and_too_large_is_refused_before_it_is_recorded(
        mam: Mam, inside: Inside, tmp_path: Path, detail: str, data: Optional[str], code: int) -> None:
    """A message that brokers drop would block all that follows; half of one must not be in the log."""
    job = register(mam)
    (tmp_path / "detail").write_text(detail, encoding="utf-8")
    there = inside.patched(mam, "" if data is None else
                           f"text = open({str(tmp_path / 'data')!r}, encoding='utf-8').read()\n"
                           "sys.argv += ['--data', text]")
    (tmp_path / "data").write_text(json.dumps({"x": data}, ensure_ascii=False), encoding="utf-8")
    result = publish(there, job, "progress", "--detail-file", tmp_path / "detail", check=code)
    if code:
        assert recorded(mam, job) == [] and ("more than" in result.stderr), result
        assert mam.job(job)["status"] == "pending"
        return
    with inside.registry(mam) as registry:
        event = next(event for event in registry.events(job) if event.seq)
        _, raw, _ = inside.module.event_message(registry, registry.job(job), event)
    assert len(raw) <= 256 * 1024
    payload = check_signature(raw, key_of(mam, job))
    assert len(payload["detail"].encode("utf-8")) <= 4096
    assert detail.startswith(payload["detail"][:-1]) and payload["detail"][-1] in (detail[-1], "\u2026")
    assert payload["data"].get("feedback", payload["detail"]) == detail
    assert data is None or payload["data"]["x"] == data


# ---- kill -9 of the publisher, at each step ----------------------------------------------------------------

_SPOTS = {
    "before the commit": f"""
execute = mam.Registry._execute
def stop(self, sql, params=()):
    if sql == "COMMIT":
        {KILL}
    return execute(self, sql, params)
mam.Registry._execute = stop
""",
    "after the commit, before connecting": f"""
def stop(self, *args):
    {KILL}
mam.Connection.__init__ = stop
""",
    "connected, before it publishes": f"""
def stop(self, messages):
    {KILL}
mam.Connection.publish = stop
""",
    "published, before the acknowledgement": f"""
def stop(self, messages):
    for topic, payload, retain in messages:
        self._client.publish(topic, payload, qos=1, retain=retain)
    {KILL}
mam.Connection.publish = stop
""",
    "acknowledged, before that is noted": f"""
def stop(self, *args, **named):
    {KILL}
mam.Registry.mark_sent = stop
""",
    "events noted, before the state is sent": f"""
mark = mam.Registry.mark_sent
def stop(self, *args, **named):
    mark(self, *args, **named)
    {KILL}
mam.Registry.mark_sent = stop
""",
    "state acknowledged, before that is noted": f"""
mark = mam.Registry.mark_sent
def stop(self, events=(), states=(), cleared=()):
    if states:
        {KILL}
    mark(self, events, states, cleared)
mam.Registry.mark_sent = stop
""",
}


@pytest.mark.parametrize("spot", list(_SPOTS))
def test_kill_9_of_a_publisher_loses_nothing(host: Mam, inside: Inside, watch_wire: Any, spot: str) -> None:
    """Wherever it died: the registry is whole, and the next publish brings what is owed, in order."""
    job = register(host)
    wire = watch_wire(job)
    publish(host, job, "started", check=0)
    killed = publish(inside.patched(host, _SPOTS[spot]), job, "progress", "--detail", "the killed one")
    assert killed.code == -signal.SIGKILL
    kept = spot != "before the commit"
    assert recorded(host, job) == [(1, "started"), (2, "progress")][:1 + kept]
    record = host.job(job)
    assert record["last_seq"] == 1 + kept and record["status"] == "running"
    assert rows(host.registry_dir, "PRAGMA integrity_check") == [("ok",)]
    publish(host, job, "completed", check=0)
    numbers = [1, 2, 3][:2 + kept]
    assert [seq for seq, _ in recorded(host, job)] == numbers == wire.first_arrivals()
    assert owed(host, job) == 0
    assert (wire.retained("state")["seq"], wire.retained("state")["status"]) == (numbers[-1], "completed")
    assert wire.retained("events")["seq"] == numbers[-1]


# ---- what happens after the record is not the record's failure ---------------------------------------------

_LATER_TROUBLE = {
    "the note of the acknowledgement finds the registry busy": """
import sqlite3
send = mam.Connection.publish
def publish(self, messages):
    send(self, messages)
    global holder
    holder = sqlite3.connect(os.path.join({registry!r}, "mam.db"), isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
mam.Connection.publish = publish
mam.BUSY_WAIT_S = 0.2
""",
    "the disk is full when the job's lock is made": """
def full(registry, job_id):
    raise OSError({enospc}, "No space left on device", "locks")
mam._job_lock = full
""",
    "nothing more can be started": """
def none_left(*args):
    raise OSError({eagain}, "Resource temporarily unavailable")
mam.spawn_self = none_left
""",
}


@pytest.mark.parametrize("trouble", list(_LATER_TROUBLE))
def test_once_recorded_it_is_never_called_not_recorded(host: Mam, inside: Inside, trouble: str) -> None:
    """75, 1 or 70 would make an agent publish the same event a second time: 0 or 2, for it is recorded."""
    job = register(host, "--artifact", "report.md")
    code = _LATER_TROUBLE[trouble].format(registry=str(host.registry_dir), enospc=errno.ENOSPC, eagain=errno.EAGAIN)
    result = publish(inside.patched(host, code), job, "completed")
    assert recorded(host, job)[:1] == [(1, "completed")]
    assert result.code in (0, NOT_SENT) and "run the same command again" not in result.stderr, result


# ---- the job's lock ----------------------------------------------------------------------------------------


def _stopped(pid: int) -> bool:
    return process_table().get(pid, (0, "", ""))[1] in ("T", "t")


def test_a_stopped_sender_does_not_silence_the_others(host: Mam, inside: Inside, door: Proxy,
                                                      watch_wire: Any) -> None:
    """SIGSTOP of the one that holds the job's lock: others wait for it a while, then send without."""
    job = register(host)
    wire = watch_wire(job)
    door.hold_after(CONNACK_BYTES, "down")
    holder = host.popen("publish", "--job", job, "--event", "started")
    wire.observer.wait_for(lambda message: message.topic.endswith("/events"), 20)
    pause(holder.pid)
    door.resume("down")
    short = inside.patched(host, "mam.JOB_LOCK_WAIT_S = 0.3")
    publish(short, job, "completed", check=0, timeout=30)
    assert wire.first_arrivals() == [1, 2] and wire.retained("state")["status"] == "completed"
    resume(holder.pid)
    assert holder.wait(30).code in (0, NOT_SENT)
    assert wire.first_arrivals() == [1, 2] and owed(host, job) == 0
    assert wire.retained("state")["status"] == "completed" and wire.retained("events")["seq"] == 2


def test_a_sender_that_slept_does_not_leave_an_old_state_behind(host: Mam, inside: Inside, watch_wire: Any) -> None:
    """It was stopped with "running" in hand, others sent "completed", it goes on: the last word must be "completed",
    or whoever asks the broker will wait for ever for a job that has ended."""
    job = register(host)
    wire = watch_wire(job)
    sleeper = inside.patched(host, """
send = mam.Connection.publish
def publish(self, messages):
    if messages[0][0].endswith("/state"):
        os.kill(os.getpid(), 19)
        mam.Connection.publish = send
    send(self, messages)
mam.Connection.publish = publish
""").popen("publish", "--job", job, "--event", "started")
    poll(lambda: _stopped(sleeper.pid), 20, lambda: f"the sender stopped: {sleeper}")
    publish(inside.patched(host, "mam.JOB_LOCK_WAIT_S = 0.3"), job, "completed", check=0, timeout=30)
    assert wire.retained("state")["status"] == "completed"
    resume(sleeper.pid)
    assert sleeper.wait(30).code in (0, NOT_SENT)
    assert wire.retained("state")["status"] == "completed"


# ---- a wire that comes later; another attempt --------------------------------------------------------------


def test_a_job_registered_without_a_broker_stays_without_one(mam: Mam, broker: Broker, watch_wire: Any) -> None:
    """DESIGN 7: what was recorded without a wire is never owed later: who wanted no network gets none."""
    job = register(mam)
    publish(mam, job, "started", check=0)
    wire = watch_wire(job)
    publish(mam, job, "progress", check=0, env=dict(broker.env()))
    assert wire.first_arrivals() == [] and owed(mam, job) == 0 and mam.job(job)["wire"] is None


def test_news_goes_to_the_broker_of_the_registration(mam: Mam, broker: Broker, watch_wire: Any) -> None:
    """An agent whose environment knows no broker, or another one, still reaches those who watch the job."""
    mam.env.update(broker.env())
    job = register(mam)
    wire = watch_wire(job)
    publish(mam, job, "started", check=0, env={"MQTT_BROKER": None, "MQTT_PORT": None})
    publish(mam, job, "progress", check=0, env={"MQTT_BROKER": "127.0.0.1", "MQTT_PORT": str(free_port())})
    assert wire.first_arrivals() == [1, 2]
    assert mam.job(job)["wire"] == f"127.0.0.1:{broker.port}"


def test_a_redispatch_clears_the_end_and_withdraws_what_was_owed(host: Mam, door: Proxy, watch_wire: Any) -> None:
    """Else a late subscriber takes the first attempt's end for the second's."""
    job = register(host)
    wire = watch_wire(job)
    publish(host, job, "started", check=0)
    door.refuse()
    publish(host, job, "error", "--detail", "of the first attempt", "--attempts", 1, check=NOT_SENT)
    door.accept()
    host("redispatch", job, "--no-deliver", check=0)
    assert wire.first_arrivals() == [1], "the old end was withdrawn before it was sent"
    state = wire.retained("state")
    assert (state["status"], state["data"]["attempt_id"], state["seq"]) == ("pending", 2, 2)
    publish(host, job, "completed", "--attempt-id", 2, check=0)
    assert wire.first_arrivals() == [1, 3] and wire.retained("events")["seq"] == 3
    check_signature(wire.events()[-1].payload, key_of(host, job, 2))
    host("redispatch", job, "--no-deliver", check=0)
    assert wire.retained("events") is None and wire.retained("state")["data"]["attempt_id"] == 3
    assert wire.events()[-1].payload == b""
    publish(host, job, "started", "--attempt-id", 3, check=0)
    assert wire.first_arrivals() == [1, 3, 4]
    check_signature(wire.states()[-1].payload, key_of(host, job, 3))


def test_a_clearing_that_could_not_be_sent_stays_owed(host: Mam, door: Proxy, watch_wire: Any) -> None:
    job = register(host)
    wire = watch_wire(job)
    publish(host, job, "completed", check=0)
    door.refuse()
    host("redispatch", job, "--no-deliver", check=0)
    assert wire.retained("events")["seq"] == 1
    door.accept()
    publish(host, job, "progress", "--attempt-id", 2, check=0)
    assert wire.retained("events") is None and wire.retained("state")["seq"] == 2


# ---- refused, late, idempotent -----------------------------------------------------------------------------


def test_the_same_end_again_is_fine_and_another_is_refused_and_kept(mam: Mam) -> None:
    """An agent that repeats itself is not scared; one that contradicts is told to leave its work, which is kept."""
    job = register(mam)
    publish(mam, job, "completed", "--detail", "done", check=0)
    again = publish(mam, job, "completed", "--detail", "done again", "--data", '{"n": 1}', check=0)
    assert "already" in again.stderr and again.stdout == ""
    feedback = "long words " * 1000
    (mam.workspace / "report").write_text(feedback)
    for event in ("error", "progress", "started", "permission_required"):
        late = publish(mam, job, event, "--detail-file", "report", "--data", '{"tests": 42}', check=REFUSED)
        assert "ended as completed" in late.stderr and "leave your work in place" in late.stderr
    assert recorded(mam, job) == [(1, "completed")] and mam.job(job)["status"] == "completed"
    kept = [line for line in mam.events(job) if line["event"] == "late"]
    assert [line["source_event"] for line in kept] == ["completed", "error", "progress", "started",
                                                      "permission_required"]
    assert kept[0]["data"] == {"n": 1} and kept[0]["detail"] == "done again"
    assert all(line["data"] == {"tests": 42} and line["feedback"] == feedback.strip() for line in kept[1:])


def test_late_words_are_cleaned_like_any_others(mam: Mam) -> None:
    job = register(mam)
    publish(mam, job, "completed", check=0)
    mam.env["MY_API_TOKEN"] = "sesame-open-42"
    publish(mam, job, "error", "--detail", f"sesame-open-42 in {mam.workspace}/x", "--data",
            '{"key": "sesame-open-42"}', check=REFUSED)
    shown = str(mam("logs", job, "--json", check=0))
    assert "sesame-open-42" not in shown and str(mam.workspace) not in shown
    assert b"sesame-open-42" not in b"".join(
        path.read_bytes() for path in mam.registry_dir.rglob("*") if path.is_file())


def test_a_second_attempt_hears_only_who_names_it(mam: Mam) -> None:
    """A worker of the first attempt that woke up must not end the second."""
    job = register(mam)
    first = mam.job(job)["dispatch_token"]
    publish(mam, job, "started", check=0)
    mam("redispatch", job, "--force", "--no-deliver", check=0)
    second = mam.job(job)["dispatch_token"]
    for flags, env in (([], {}), (["--attempt-id", 1], {}), (["--dispatch-token", first], {}),
                       ([], {"MAM_DISPATCH_TOKEN": first}), ([], {"MAM_ATTEMPT_ID": "1"}),
                       (["--dispatch-token", first], {"MAM_DISPATCH_TOKEN": second}),
                       (["--attempt-id", 2, "--dispatch-token", first], {})):
        refused = publish(mam, job, "completed", *flags, env=env, check=REFUSED)
        assert "leave your work in place" in refused.stderr
    assert mam.job(job)["status"] == "pending"
    late = [line for line in mam.events(job) if line["event"] == "late"]
    assert len(late) == 7 and {line["attempt_id"] for line in late} <= {1, 2}
    for flags, env in ((["--attempt-id", 2], {}), (["--dispatch-token", second], {}),
                       (["--expect-dispatch-token", second], {}), ([], {"MAM_DISPATCH_TOKEN": second}),
                       ([], {"MAM_ATTEMPT_ID": "2"}),
                       (["--attempt-id", 2], {"MAM_DISPATCH_TOKEN": first}),
                       ([], {"MAM_DISPATCH_TOKEN": second, "MAM_JOB_ID": job})):
        publish(mam, job, "progress", *flags, env=env, check=0)
    assert [seq for seq, _ in recorded(mam, job)] == list(range(1, 9))


@pytest.mark.parametrize("name", ["MAM_JOB_ID", "JOB_ID"])
def test_an_agents_own_token_is_not_taken_for_another_jobs(mam: Mam, name: str) -> None:
    """An agent that delegates publishes about its child: its own token must neither refuse nor admit it."""
    mine, child = register(mam), register(mam)
    env = {name: mine, "MAM_DISPATCH_TOKEN": mam.job(mine)["dispatch_token"], "MAM_ATTEMPT_ID": "1"}
    publish(mam, child, "progress", env=env, check=0)
    publish(mam, mine, "progress", env=env, check=0)
    mam("redispatch", child, "--force", "--no-deliver", check=0)
    publish(mam, child, "progress", env={**env, "MAM_ATTEMPT_ID": "2"}, check=REFUSED)
    publish(mam, child, "progress", "--attempt-id", 2, env=env, check=0)


# ---- TLS ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tls_door(own_broker: Any, proxy: Callable[[Any], Proxy]) -> Callable[..., Tuple[Broker, Proxy]]:
    def make(kind: str = "mosquitto", **options: Any) -> Tuple[Broker, Proxy]:
        broker = own_broker(kind, **options)
        return broker, proxy(broker)
    return make


@pytest.mark.parametrize("mtls", [False, True], ids=["tls", "mtls"])
def test_tls_works_with_the_three_variables(mam: Mam, broker_kind: str, tls_door: Any, observe: Any,
                                            mtls: bool) -> None:
    broker, door = tls_door(broker_kind, tls=True, mtls=mtls)
    mam.env.update(door.env(broker))
    job = register(mam)
    wire = Wire(observe(broker, f"{ROOT}/{job}/#"), broker, job)
    publish(mam, job, "completed", "--detail", "over TLS", check=0)
    assert wire.first_arrivals() == [1] and wire.retained("state")["status"] == "completed"
    assert job.encode() not in door.recorded_up, "in the clear"


def test_a_certificate_of_another_authority_is_refused_once(mam: Mam, tls_door: Any, tmp_path: Path) -> None:
    """Somebody in the middle gets nothing, and is not tried again; the message names the certificate."""
    broker, door = tls_door(tls=True)
    mam.env.update(door.env(broker), MQTT_CA_CERTS=str(Certificates(tmp_path / "other").ca))
    job = register(mam)
    result = publish(mam, job, "completed", check=NOT_SENT)
    assert "certificate" in result.stderr.lower() and str(door.port) in result.stderr
    assert door.connections == 1 and owed(mam, job) == 1
    mam.env.pop("MQTT_CA_CERTS")                # the system's authorities do not know it either
    assert "certificate" in publish(mam, job, "completed", check=NOT_SENT).stderr.lower()
    assert door.connections == 2 and owed(mam, job) == 1
    publish(mam, job, "completed", check=0, env={"MQTT_CA_CERTS": str(broker.certificates.ca)})
    assert owed(mam, job) == 0


@pytest.mark.parametrize("case", ["no client certificate", "missing file", "not a certificate", "plain to TLS",
                                  "TLS to plain"])
def test_tls_trouble_is_one_sentence(mam: Mam, tls_door: Any, inside: Inside, tmp_path: Path, case: str) -> None:
    broker, door = tls_door(tls=case != "TLS to plain", mtls=case == "no client certificate")
    mam.env.update(door.env(broker))
    (tmp_path / "text").write_text("no certificate\n")
    if case == "no client certificate":
        del mam.env["MQTT_CERTFILE"], mam.env["MQTT_KEYFILE"]
    elif case == "missing file":
        mam.env["MQTT_CA_CERTS"] = str(tmp_path / "missing")
    elif case == "not a certificate":
        mam.env["MQTT_CERTFILE"] = str(tmp_path / "text")
    else:
        mam.env["MQTT_TLS"] = "false" if case == "plain to TLS" else "true"
    job = register(mam)
    quick = inside.patched(mam, "mam.BACKOFF_BASE_S = 0.01\nmam.CONNACK_TIMEOUT_S = 2.0")
    result = publish(quick, job, "completed", check=NOT_SENT)
    assert "recorded, not sent yet" in result.stderr and len(result.stderr.splitlines()) == 1
    if case in ("missing file", "not a certificate"):
        assert "MQTT_CA_CERTS" in result.stderr and door.connections == 0
    assert owed(mam, job) == 1


def test_a_key_with_a_pass_phrase_asks_nobody(mam: Mam, tls_door: Any, inside: Inside) -> None:
    """OpenSSL would ask on the terminal, and an agent's publish would hang there for ever."""
    broker, door = tls_door(mtls=True)
    locked = broker.folder / "locked.key"
    subprocess.run(["openssl", "pkey", "-in", str(broker.certificates.client_key), "-aes256", "-passout",
                    "pass:sesame", "-out", str(locked)], check=True)
    mam.env.update(door.env(broker), MQTT_KEYFILE=str(locked))
    job = register(mam)
    master, terminal = pty.openpty()
    try:
        there = inside.patched(mam, f"os.open({os.ttyname(terminal)!r}, os.O_RDWR)     # now its own terminal\n"
                                    "open('/dev/tty').close()")
        result = publish(there, job, "completed", check=NOT_SENT, timeout=20)
        assert "pass phrase" in result.stderr and door.connections == 0
        assert select.select([master], [], [], 0)[0] == []
    finally:
        os.close(master)
        os.close(terminal)


# ---- which broker, and what it is told ---------------------------------------------------------------------


def test_a_jobs_own_broker_is_used_over_the_environments(mam: Mam, broker: Broker, proxy: Callable[[Any], Proxy],
                                                         watch_wire: Any) -> None:
    own, other = proxy(broker), proxy(broker)
    mam.env.update(other.env(broker))
    job = register(mam, "--broker", f"mqtt://127.0.0.1:{own.port}")
    wire = watch_wire(job)
    publish(mam, job, "completed", check=0)
    assert wire.first_arrivals() == [1]
    assert own.connections == 1 and other.connections == 0
    assert mam.job(job)["broker"] == {"host": "127.0.0.1", "port": own.port, "tls": False}


def test_the_environments_password_goes_to_no_other_broker(mam: Mam, own_broker: Any, mosquitto: Broker,
                                                           proxy: Callable[[Any], Proxy]) -> None:
    """Credentials are for the broker they were configured with; a job's own one is somebody else's server."""
    secret = own_broker("mosquitto", user="worker", password="for-this-server-only")
    own = proxy(mosquitto)
    mam.env.update(secret.env())
    job = register(mam, "--broker", f"localhost:{own.port}")
    publish(mam, job, "completed", check=0)
    assert own.connections == 1 and b"for-this-server-only" not in own.recorded_up
    assert b"worker" not in own.recorded_up.partition(b"\x30")[0][:200]


def _connects(raw: bytes) -> int:
    return raw.count(b"\x00\x04MQTT\x04")


def test_no_secret_ever_crosses_the_wire(mam: Mam, own_broker: Any, broker_kind: str,
                                         proxy: Callable[[Any], Proxy]) -> None:
    """Signing keys, passwords, secrets of the environment, even if an agent writes them into its report."""
    broker = own_broker(broker_kind, user="worker", password="broker-password-1")
    door = proxy(broker)
    secrets = {"MAM_DISPATCH_SECRET": "dispatch-secret-1", "MAM_DISPATCH_SECRET_PREVIOUS": "previous-secret-1",
               "OPENAI_API_KEY": "sk-something-long-1", "GITHUB_TOKEN": "ghp-something-long-1"}
    mam.env.update(door.env(broker), **secrets)
    job = register(mam)
    values = " ".join(["broker-password-1", *secrets.values()])
    data = json.dumps({"text": values, "list": [values, {values: values}], "broker-password-1": 1})
    words = f"{values} {mam.workspace} {mam.home}"
    publish(mam, job, "started", "--heartbeat", 30, "--watch-pid", os.getpid(), check=0)
    publish(mam, job, "progress", "--detail", words, "--data", data, check=0)
    (mam.workspace / "long").write_text((words + "\n") * 100)
    publish(mam, job, "error", "--detail-file", "long", check=0)
    mam("redispatch", job, "--no-deliver", check=0)
    mam("cancel", job, "--detail", words, check=0)
    raw = door.recorded_up
    keys = [key for key, in rows(mam.registry_dir, "SELECT auth_token FROM attempts")]
    assert len(keys) == 2 and _connects(raw) == 5 == door.connections
    for secret in [*keys, *secrets.values(), str(mam.workspace), str(mam.home)]:
        assert secret.encode() not in raw, secret
    assert raw.count(b"broker-password-1") == 5, "once in each CONNECT, and nowhere else"
    assert b"password" not in raw.replace(b"broker-password-1", b"")


def test_a_registered_job_record_holds_no_password(mam: Mam) -> None:
    mam.env.update(MQTT_BROKER="127.0.0.1", MQTT_PORT=str(free_port()), MQTT_USERNAME="u",
                   MQTT_PASSWORD="never-stored-1")
    job = register(mam, "--broker", "someone@127.0.0.1:1")
    publish(mam, job, "progress", "--attempts", 1, check=NOT_SENT)
    assert b"never-stored-1" not in b"".join(
        path.read_bytes() for path in mam.registry_dir.rglob("*") if path.is_file())
    refused = mam("register", "--prompt", "p", "--agent-session", "queue:q", "--broker", "u:pw@h", check=64)
    assert "MQTT_PASSWORD" in refused.stderr and "u:pw" not in refused.stderr

"""The test equipment itself: if a broker, a proxy or a clean-up does not do what it says, no other test proves much."""
from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, Iterator

import pytest

from support import HOST, ROOT, clean_environment, free_port, kill_marked, marked_pids, new_mark, poll
from support.brokers import BROKERS, Broker, Certificates, connack, connect_packet
from support.cli import Mam
from support.observer import Observer, retained

TRACK = "python/mqtt/jobs"


def topic(suffix: str = "events") -> str:
    return f"{TRACK}/{uuid.uuid4().hex[:8]}/{suffix}"


def environment_with_support(**more: str) -> Dict[str, str]:
    """For an interpreter of its own that imports `support`; nothing of this run's pytest or mam settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MAM_"))}
    paths = [str(ROOT / "tests")] + [path for path in [kept.get("PYTHONPATH", "")] if path]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), **more}


# ---- poll ---------------------------------------------------------------------------------------------------

def test_poll_returns_the_value_or_says_what_was_missing() -> None:
    left = iter([0, "", None, "there"])
    assert poll(lambda: next(left), 5) == "there"
    with pytest.raises(AssertionError, match="not within 0.05 s: the moon"):
        poll(lambda: 0, 0.05, lambda: "the moon")


# ---- brokers ------------------------------------------------------------------------------------------------

def test_what_is_published_is_seen(broker: Broker, observe: Callable[..., Observer]) -> None:
    first, second = topic(), topic("state")
    seen = observe(broker)
    sender = observe(broker, None)
    sender.publish(first, {"seq": 1})
    sender.publish(second, b"\xff\x00", retain=True)
    assert seen.wait_for(lambda m: m.topic == first).json() == {"seq": 1}
    assert seen.wait_for(lambda m: m.topic == second).payload == b"\xff\x00"
    assert [m.topic for m in seen.messages("events", first.split("/")[3])] == [first]
    assert not seen.messages("state", first.split("/")[3])


def test_a_retained_message_is_read_back_and_its_absence_is_certain(broker: Broker,
                                                                    observe: Callable[..., Observer]) -> None:
    sender = observe(broker, None)
    for _ in range(20):
        where = topic("state")
        assert retained(broker, where) is None
        sender.publish(where, b"one", retain=True)
        sender.publish(where, b"two", retain=True)
        poll(lambda: retained(broker, where) == b"two", 5, "the second value")
        sender.publish(where, b"", retain=True)
        poll(lambda: retained(broker, where) is None, 5, "nothing after it was cleared")


def test_an_observer_connects_again_after_a_restart(broker_kind: str, own_broker: Any,
                                                    observe: Callable[..., Observer]) -> None:
    server = own_broker(broker_kind)
    seen = observe(server)
    server.restart()
    poll(lambda: seen.connects == 2, 20, "a second connection")
    seen.wait_ready()
    where = topic()
    observe(server, None).publish(where, b"again")
    seen.wait_for(lambda m: m.topic == where)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_restart_keeps_retained_messages_and_a_wipe_does_not(broker_kind: str, how: str, own_broker: Any) -> None:
    server = own_broker(broker_kind)
    port, pid, where = server.port, server.pid, topic("state")
    with Observer(server, None) as sender:
        sender.publish(where, b"kept", retain=True)
    server.wait_written(b"kept")
    server.restart(kill=how == "kill")
    assert server.port == port and server.pid != pid
    assert retained(server, where) == b"kept"
    server.restart(wipe=True)
    assert retained(server, where) is None


def test_without_persistence_a_restart_forgets(broker_kind: str, own_broker: Any) -> None:
    server = own_broker(broker_kind, persistence=False)
    where = topic("state")
    with Observer(server, None) as sender:
        sender.publish(where, b"gone", retain=True)
    server.restart()
    assert retained(server, where) is None


def test_a_stopped_broker_refuses_and_a_paused_one_is_silent(broker_kind: str, own_broker: Any) -> None:
    server = own_broker(broker_kind)
    server.pause()
    with pytest.raises(socket.timeout):
        connack(server.port, timeout=0.3)
    server.resume()
    assert connack(server.port) == 0
    server.pause()
    server.stop()                           # a paused one can be stopped, too
    with pytest.raises(ConnectionRefusedError):
        connack(server.port)


def test_credentials_are_demanded(broker_kind: str, own_broker: Any) -> None:
    server = own_broker(broker_kind, user="alice", password="pass: \"word\" ü", more_users={"bob": "b"})
    assert server.env() == {"MQTT_BROKER": HOST, "MQTT_PORT": str(server.port),
                            "MQTT_USERNAME": "alice", "MQTT_PASSWORD": "pass: \"word\" ü"}
    assert connack(server.port, "bob", "b") == 0
    assert connack(server.port, "alice", "wrong") in (4, 5)
    assert connack(server.port) in (4, 5)
    with pytest.raises(AssertionError, match="CONNECT refused"):
        Observer(server, None, user="alice", password="wrong")
    with Observer(server) as seen:
        where = topic()
        seen.publish(where, b"hello")
        seen.wait_for(lambda m: m.topic == where)


def test_rights_are_enforced(broker_kind: str, own_broker: Any) -> None:
    options: Any = {"acl": f"user all\ntopic readwrite #\nuser reader\ntopic read {TRACK}/+/events"}
    if broker_kind == "nats":
        subject = TRACK.replace("/", ".") + ".*.events"
        options = {"permissions": {"reader": {"publish": {"deny": ">"}, "subscribe": [subject]}}}
    server = own_broker(broker_kind, user="all", password="a", more_users={"reader": "r"}, **options)
    where = topic()
    with Observer(server, f"{TRACK}/+/events", user="reader", password="r") as reader, Observer(server) as seen:
        reader.publish(where, b"forged")    # acknowledged, and dropped
        seen.publish(where, b"real")
        reader.wait_for(lambda m: m.topic == where)
        seen.wait_for(lambda m: m.topic == where)
        assert {m.payload for m in reader.all + seen.all} == {b"real"}


def test_a_server_moves_if_its_port_was_taken(broker_kind: str, own_broker: Any) -> None:
    server = own_broker(broker_kind, start=False)
    with socket.create_server((HOST, server.port)):
        taken = server.port
        server.start()
        assert server.port != taken and connack(server.port) == 0


def test_a_server_that_cannot_start_shows_its_log(broker_kind: str, own_broker: Any) -> None:
    server = own_broker(broker_kind, start=False, extra="no_such_setting {")
    with pytest.raises(AssertionError, match=r"(?s)at start-up.*([Ee]rror|[Uu]nknown)"):
        server.start()


@pytest.mark.parametrize("mtls", [False, True])
def test_tls(broker_kind: str, mtls: bool, own_broker: Any, observe: Callable[..., Observer], tmp_path: Path) -> None:
    server = own_broker(broker_kind, tls=True, mtls=mtls, user="alice", password="p")
    assert set(server.env()) == {"MQTT_BROKER", "MQTT_PORT", "MQTT_USERNAME", "MQTT_PASSWORD", "MQTT_TLS",
                                 "MQTT_CA_CERTS"} | ({"MQTT_CERTFILE", "MQTT_KEYFILE"} if mtls else set())
    seen, where = observe(server), topic()
    seen.publish(where, b"sealed")
    seen.wait_for(lambda m: m.topic == where)
    with pytest.raises(ssl.SSLCertVerificationError):
        connack(server.port, "alice", "p", Certificates(tmp_path / "other").context())
    with pytest.raises(OSError):
        connack(server.port, "alice", "p")
    if mtls:
        with pytest.raises(OSError):        # a TLS 1.3 server says so only after the handshake
            connack(server.port, "alice", "p", server.certificates.context())


# ---- proxy --------------------------------------------------------------------------------------------------

class Echo:
    """A connection through the proxy and its other end, both in the test's hands."""

    def __init__(self, listener: socket.socket, port: int) -> None:
        self.client = socket.create_connection((HOST, port), timeout=10)
        self.server, _ = listener.accept()
        self.server.settimeout(10)

    def close(self) -> None:
        self.client.close()
        self.server.close()


def read(end: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = end.recv(count - len(found))
        if not more:
            break
        found += more
    return found


def silent(end: socket.socket, seconds: float = 0.2) -> bool:
    """True if nothing arrives; can only err towards true, so it is used beside a proof that bytes were held."""
    end.settimeout(seconds)
    try:
        return end.recv(1) == b"never"
    except socket.timeout:
        return True
    finally:
        end.settimeout(10)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(10)
        yield server


@pytest.fixture
def wire(listener: socket.socket, proxy: Any) -> Iterator[Any]:
    through = proxy(listener.getsockname()[1])
    made = Echo(listener, through.port)
    yield through, made
    made.close()


def test_the_proxy_passes_counts_and_records(wire: Any) -> None:
    through, ends = wire
    ends.client.sendall(b"up" * 1000)
    assert read(ends.server, 2000) == b"up" * 1000
    ends.server.sendall(b"down")
    assert read(ends.client, 4) == b"down"
    assert (through.bytes_up, through.bytes_down) == (2000, 4)
    assert (through.recorded_up, through.recorded_down) == (b"up" * 1000, b"down")
    assert (through.connections, through.open_connections) == (1, 1)
    ends.client.close()
    assert read(ends.server, 1) == b""
    ends.server.close()
    poll(lambda: through.open_connections == 0, 10, "the connection forgotten")


def test_a_stall_holds_one_direction_and_loses_nothing(wire: Any) -> None:
    through, ends = wire
    through.stall("up")
    ends.client.sendall(b"held")
    poll(lambda: through.recorded_up == b"held", 10, "the proxy has the bytes")
    ends.server.sendall(b"free")
    assert read(ends.client, 4) == b"free"
    assert silent(ends.server) and through.bytes_up == 0
    ends.client.shutdown(socket.SHUT_WR)    # an end of stream waits as well
    assert silent(ends.server)
    through.resume()
    assert read(ends.server, 10) == b"held"


def test_a_stalled_direction_takes_no_more_than_a_full_pipe(wire: Any) -> None:
    through, ends = wire
    through.stall()
    ends.client.setblocking(False)
    sent = 0
    payload = os.urandom(1 << 20)
    with pytest.raises(BlockingIOError):
        while sent < 100 << 20:
            sent += ends.client.send(payload)
            poll(lambda: through.recorded_up, 10, "a first part read")
    ends.client.settimeout(10)
    used = time.process_time()
    assert silent(ends.server, 0.5) and time.process_time() - used < 0.4     # it waits without spinning
    through.resume()
    assert len(read(ends.server, sent)) == sent


def test_a_reset_behind_a_stall_is_not_seen_until_it_ends(wire: Any) -> None:
    through, ends = wire
    through.stall()
    ends.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    ends.client.close()
    assert silent(ends.server)
    through.resume()
    with pytest.raises(ConnectionResetError):
        ends.server.recv(1)


def test_hold_after_cuts_where_it_is_told(wire: Any) -> None:
    through, ends = wire
    through.hold_after(3)
    ends.client.sendall(b"abcdef")
    assert read(ends.server, 3) == b"abc"
    assert silent(ends.server) and through.bytes_up == 3
    through.resume("up")
    assert read(ends.server, 3) == b"def"


def test_delay(wire: Any) -> None:
    through, ends = wire
    through.delay(0.3, "down")
    begun = time.monotonic()
    ends.server.sendall(b"late")
    assert read(ends.client, 4) == b"late" and time.monotonic() - begun >= 0.3


def test_drop_resets_both_sides_and_accepts_anew(wire: Any, listener: socket.socket) -> None:
    through, ends = wire
    through.drop()
    for end in (ends.client, ends.server):
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    again = Echo(listener, through.port)
    again.client.sendall(b"x")
    assert read(again.server, 1) == b"x"
    again.close()


@pytest.mark.parametrize("direction", ["up", "down"])
def test_half_close(wire: Any, direction: str) -> None:
    through, ends = wire
    deaf, talking = (ends.client, ends.server) if direction == "down" else (ends.server, ends.client)
    through.half_close(direction)
    assert deaf.recv(1) == b""
    deaf.sendall(b"still")
    assert read(talking, 5) == b"still"


def test_refuse_blackhole_and_accept(wire: Any, listener: socket.socket) -> None:
    through, ends = wire
    through.refuse()
    with socket.create_connection((HOST, through.port), timeout=10) as closed:
        assert closed.recv(1) == b""
    ends.client.sendall(b"x")               # an existing connection is not touched
    assert read(ends.server, 1) == b"x"
    through.blackhole()
    with socket.create_connection((HOST, through.port), timeout=10) as lost:
        lost.sendall(b"anybody?")
        poll(lambda: through.recorded_up.endswith(b"anybody?"), 10, "read")
        assert silent(lost)
    listener.settimeout(0.1)
    with pytest.raises(socket.timeout):
        listener.accept()
    listener.settimeout(10)
    through.accept()
    Echo(listener, through.port).close()
    assert through.connections == 4


def test_a_proxy_before_nothing_breaks_off(proxy: Any) -> None:
    with pytest.raises(OSError):
        connack(proxy(free_port()).port)


def test_the_proxy_between_client_and_broker(broker: Broker, proxy: Any, observe: Callable[..., Observer]) -> None:
    through = proxy(broker)
    seen = observe(broker, port=through.port)
    where = topic()
    through.stall("down")
    observe(broker, None).publish(where, b"a-secret-to-find")
    poll(lambda: b"a-secret-to-find" in through.recorded_down, 10, "the message at the proxy")
    job = where.split("/")[3]               # the server is shared: others have left messages on it
    assert not seen.messages("events", job)
    through.resume()
    seen.wait_for(lambda m: m.topic == where)
    through.drop()
    poll(lambda: seen.connects == 2, 20, "connected again")
    through.blackhole()
    with pytest.raises(socket.timeout):
        connack(through.port, timeout=0.3)
    assert through.env(broker)["MQTT_PORT"] == str(through.port)


def test_a_connect_cut_in_two_is_answered_when_it_is_whole(broker: Broker, proxy: Any) -> None:
    through = proxy(broker)
    through.hold_after(5)
    with socket.create_connection((HOST, through.port), timeout=10) as client:
        client.sendall(connect_packet("cut-" + uuid.uuid4().hex[:8]))
        assert silent(client) and through.bytes_up == 5
        through.resume()
        assert read(client, 4) == b"\x20\x02\x00\x00"


# ---- processes ----------------------------------------------------------------------------------------------

def test_marked_processes_are_found_however_detached(tmp_path: Path) -> None:
    mark = new_mark()
    # A child in its own session that lost its parent, and a grandchild without the mark.
    script = "setsid sleep 1000 & env -u SUITE_MARK sleep 1001 & wait" if shutil.which("setsid") else \
        "sleep 1000 & env -u SUITE_MARK sleep 1001 & wait"
    process = subprocess.Popen(["/bin/sh", "-c", script], env=clean_environment(tmp_path, mark))
    poll(lambda: len(marked_pids(mark)) == 3, 10, lambda: f"three processes, not {marked_pids(mark)}")
    assert len(kill_marked(mark)) == 3
    assert marked_pids(mark) == [] and process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("end", ["exit", "exception", "SIGKILL"])
def test_no_broker_outlives_the_tests(broker_kind: str, end: str, tmp_path: Path) -> None:
    BROKERS[broker_kind].find_binary()
    how = {"exit": "", "exception": "raise SystemExit(3)", "SIGKILL": "os.kill(os.getpid(), 9)"}[end]
    code = (f"import os, sys\nfrom pathlib import Path\nfrom support.brokers import BROKERS\n"
            f"server = BROKERS[{broker_kind!r}](Path(sys.argv[1])).start()\nprint(server.pid, flush=True)\n{how}\n")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "broker")], stdout=subprocess.PIPE, timeout=90,
                          env=environment_with_support())
    assert done.returncode == {"exit": 0, "exception": 3, "SIGKILL": -9}[end]

    def gone() -> bool:
        listing = subprocess.run(["ps", "-o", "stat=", "-p", done.stdout.decode().strip()], stdout=subprocess.PIPE)
        return listing.stdout.strip()[:1] in (b"", b"Z")
    poll(gone, 20, "the broker gone")


# ---- mam helper, on a stand-in script -----------------------------------------------------------------------

STAND_IN = """
import json, os, subprocess, sys, time
verb = sys.argv[1] if len(sys.argv) > 1 else ""
if verb == "env": print(json.dumps(dict(os.environ, cwd=os.getcwd())))
elif verb == "cat": sys.stdout.buffer.write(sys.stdin.buffer.read())
elif verb == "exit": sys.exit(int(sys.argv[2]))
elif verb == "broken": raise ValueError("oops")
elif verb == "sleep": print("sleeping", flush=True); time.sleep(1000)
elif verb == "detach": subprocess.Popen(["sleep", "1000"], start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
elif verb == "leak": subprocess.Popen(["sleep", "1000"], start_new_session=True)
"""


@pytest.fixture
def pretended(tmp_path: Path) -> Iterator[Mam]:
    script = tmp_path / "stand-in.py"
    script.write_text(STAND_IN)
    made = Mam(script, tmp_path / "host", tmp_path / "shiv")
    yield made
    made.close()


def test_a_run_sees_only_a_clean_environment(pretended: Mam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQTT_BROKER", "elsewhere.invalid")
    monkeypatch.setenv("MAM_DISPATCH_SECRET", "x")
    pretended.env["MQTT_PORT"] = "1"
    found = pretended("env", env={"MAM_EXTRA": "y", "LANG": None}, check=0).json()
    # The interpreter itself may add LC_CTYPE; macOS adds its own name for text encoding.
    assert set(found) - {"LC_CTYPE", "__CF_USER_TEXT_ENCODING"} == {"PATH", "HOME", "SHIV_ROOT", "SUITE_MARK",
                                                                   "MQTT_PORT", "MAM_EXTRA", "cwd"}
    assert found["HOME"] == str(pretended.home) and os.path.samefile(found["cwd"], pretended.workspace)
    assert found["PATH"].startswith(str(pretended.bin))


def test_input_and_exit_codes(pretended: Mam) -> None:
    assert pretended("cat").stdout == ""
    assert pretended("cat", input="ü\n").stdout == "ü\n"
    assert pretended("exit", 4, check=(0, 4)).code == 4
    with pytest.raises(AssertionError, match="expected exit 0"):
        pretended("exit", 4, check=0)


def test_a_traceback_fails_the_run(pretended: Mam) -> None:
    with pytest.raises(AssertionError, match="(?s)traceback in.*oops"):
        pretended("broken")
    assert pretended("broken", traceback_ok=True).code == 1
    run = pretended.popen("broken")
    with pytest.raises(AssertionError, match="(?s)traceback in.*oops"):
        run.wait()
    with pytest.raises(AssertionError, match="(?s)traceback in.*oops"):
        pretended.close()
    pretended.background.clear()


def test_a_run_that_hangs_is_told_from_one_that_leaks_its_output(pretended: Mam) -> None:
    with pytest.raises(AssertionError, match="(?s)does not end.*sleeping"):
        pretended("sleep", timeout=3)
    with pytest.raises(AssertionError, match="keeps its output open"):
        pretended("leak", timeout=3)


def test_background_runs_and_what_they_detach_are_ended(pretended: Mam) -> None:
    run = pretended.popen("sleep")
    assert run.wait_for("sleeping") == "sleeping\n" and run.code is None
    pretended("detach", check=0)
    assert len(pretended.processes()) == 2
    assert run.stop().code == -signal.SIGTERM
    with pytest.raises(AssertionError, match="ended without"):
        run.wait_for("more")
    pretended.popen("sleep").wait_for("sleeping")
    pretended.close()
    assert pretended.processes() == []


def test_workers_build_once_and_a_failed_build_once(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    code = ("import sys\nfrom pathlib import Path\nfrom support import cli\ncli.ROOT = Path(sys.argv[1])\n"
            "print(cli.built_pyz(Path(sys.argv[2])).read_text())\n")
    for script, codes in (("echo x >> builds; sleep 0.2; echo artefact > $1", {0}),
                          ("echo x >> builds; echo no wheel; exit 3", {1})):
        (checkout / "build.sh").write_text(script + "\n")
        session = tmp_path / f"session-{codes}"
        workers = [subprocess.Popen([sys.executable, "-c", code, str(checkout), str(session)],
                                    env=environment_with_support(), stdout=subprocess.PIPE,
                                    stderr=subprocess.STDOUT) for _ in range(4)]
        texts = [worker.communicate(timeout=90)[0].decode() for worker in workers]
        assert {worker.returncode for worker in workers} == codes, texts
        assert all(("artefact" if codes == {0} else "no wheel") in text for text in texts), texts
        assert (checkout / "builds").read_text() == "x\n"
        (checkout / "builds").unlink()


# ---- tmux ---------------------------------------------------------------------------------------------------

def test_tmux_is_private(tmux: Any) -> None:
    pane = tmux.new_pane("printf 'ready\\n'; exec cat", name="alice")
    tmux.wait_for(pane, "ready")
    tmux.type(pane, "hello ; #{pane_id}")
    poll(lambda: tmux.capture(pane).count("hello ; #{pane_id}") == 2, 10, "typed and echoed by cat")
    assert re.fullmatch(r"%\d+", pane) and tmux.panes() == [pane]
    assert tmux.pane(pane, "#{session_name}") == "alice"
    # A plain tmux, as mam calls it, sees this server by its environment alone.
    done = subprocess.run(["tmux", "list-sessions", "-F", "#{session_name}"], stdout=subprocess.PIPE, timeout=30,
                          env=dict({"PATH": os.environ["PATH"]}, **tmux.env()))
    assert done.stdout == b"alice\n"
    tmux.close()
    assert marked_pids(tmux.mark) == []
    assert subprocess.run(["tmux", "list-sessions"], stderr=subprocess.PIPE, timeout=30,
                          env=dict({"PATH": os.environ["PATH"]}, **tmux.env())).returncode == 1


# ---- skips --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "xdist"])
@pytest.mark.parametrize("forbidden", [False, True])
def test_skips_are_listed_and_can_be_forbidden(workers: Any, forbidden: bool, tmp_path: Path) -> None:
    # This suite's own conftest.py, over tests written here.
    for name in ("conftest.py", "pytest.ini"):
        shutil.copy(ROOT / "tests" / name, tmp_path / name)
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_fine(): pass\n"
        "def test_without(): pytest.skip('no moon')\n"
        "@pytest.mark.skipif(True, reason='no sun')\ndef test_other(): pass\n"
        "@pytest.mark.xfail\ndef test_expected(): assert False\n")
    (tmp_path / "test_whole.py").write_text("import pytest\npytest.skip('no stars', allow_module_level=True)\n")
    environment = environment_with_support(MAM_NO_SKIP="1" if forbidden else "0")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, str(tmp_path)],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, timeout=110)
    text = done.stdout.decode()
    assert done.returncode == (1 if forbidden else 0), text
    for reason in ("no moon", "no sun", "no stars"):
        assert f"{reason}: 1 of them" in text, text
    assert ("FAILED by MAM_NO_SKIP: test_some.py::test_without" in text) == forbidden, text
    assert "test_expected" not in text.split("skipped", 1)[1], text

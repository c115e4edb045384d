"""What every test may use: waiting for a condition, a port, and processes that never outlive the run.

A process started by the tests carries `SUITE_MARK=<run>.<number>` in its environment, and so does everything
it starts, however detached. At teardown the marked processes are ended one by one, by pid. A small guard
process waits for this one to go and does the same, so nothing is left even after a SIGKILL.
"""
from __future__ import annotations

import atexit
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Set, Tuple, Union

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
MARK = "SUITE_MARK"

_RUN = uuid.uuid4().hex
_numbers = itertools.count(1)


def poll(condition: Callable[[], Any], timeout: float = 10.0,
         message: Union[str, Callable[[], str]] = "", interval: float = 0.01) -> Any:
    """Call `condition` until it returns something true, and return that; AssertionError after `timeout` seconds.

    What `condition` raises goes straight to the caller. `message` may be a function, called only on failure.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            text = message() if callable(message) else message
            raise AssertionError(f"not within {timeout:g} s: {text or repr(condition)} (last value: {value!r})")
        time.sleep(interval)
        interval = min(interval * 1.5, 0.1)


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on.

    It lies below the ranges from which systems take the local end of outgoing connections. A server that is
    stopped and started again on its port would otherwise find it taken by any client, or a client that keeps
    trying the port of a stopped server would one day connect to itself.
    """
    for _ in range(200):
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port between 20000 and 32000")


# ---- processes -------------------------------------------------------------------------------------------

def new_mark() -> str:
    """A mark for `SUITE_MARK`: everything started with it, directly or not, is found by `marked_pids`."""
    _guard()
    return f"{_RUN}.{next(_numbers)}"


def clean_environment(home: Union[str, Path], mark: Optional[str] = None) -> Dict[str, str]:
    """PATH, HOME, LANG and the mark; nothing else of the environment the tests were started in."""
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home),
            "LANG": "en_US.UTF-8" if sys.platform == "darwin" else "C.UTF-8", MARK: mark or new_mark()}


def process_table() -> Dict[int, Tuple[int, str, str]]:
    """pid -> (parent pid, state letter, mark or ""), of every process this user may look at."""
    return _table_of_proc() if os.path.isdir("/proc/self") else _table_of_ps()


def _table_of_proc() -> Dict[int, Tuple[int, str, str]]:
    table = {}
    key = MARK.encode() + b"="
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            # The command name in parentheses may hold anything, so count from its end.
            stat = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
            environ = Path("/proc", name, "environ").read_bytes()
        except OSError:
            continue
        found = [item[len(key):].decode("ascii", "replace") for item in environ.split(b"\0") if item.startswith(key)]
        table[int(name)] = (int(stat[1]), stat[0].decode(), found[0] if found else "")
    return table


def _table_of_ps() -> Dict[int, Tuple[int, str, str]]:
    table = {}
    done = subprocess.run(["ps", "axeww", "-o", "pid=,ppid=,stat=,command="], stdout=subprocess.PIPE,
                          env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}, check=True)
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        fields = line.split()
        found = [word[len(MARK) + 1:] for word in fields[3:] if word.startswith(MARK + "=")]
        if len(fields) > 3:
            table[int(fields[0])] = (int(fields[1]), fields[2][:1], found[0] if found else "")
    return table


def marked_pids(mark: str) -> List[int]:
    """The living processes that carry `mark` (a prefix ending in "." means all of them), and their descendants."""
    table = process_table()
    living = {pid for pid, (_, state, _) in table.items() if state not in ("Z", "X") and pid != os.getpid()}
    found = {pid for pid in living
             if table[pid][2] == mark or (mark.endswith(".") and table[pid][2].startswith(mark))}
    grown: Set[int] = set()
    while grown != found:
        grown = set(found)
        found |= {pid for pid in living if table[pid][0] in grown}
    return sorted(found)


def kill_marked(mark: str, timeout: float = 20.0) -> List[int]:
    """SIGKILL everything that carries `mark`, until nothing does. Returns the pids that had to be ended."""
    ended: Set[int] = set()

    def none_left() -> bool:
        pids = marked_pids(mark)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass                        # gone between the look and the signal
        ended.update(pids)
        return not pids

    poll(none_left, timeout, lambda: f"processes {marked_pids(mark)} survive SIGKILL")
    return sorted(ended)


def pause(pid: int) -> None:
    """SIGSTOP, and wait until no thread of the process runs: the signal alone may take effect a little later."""
    os.kill(pid, signal.SIGSTOP)

    def stands() -> bool:
        tasks = Path("/proc", str(pid), "task")
        if not tasks.exists():
            return process_table()[pid][1] == "T"
        states = [(task / "stat").read_bytes().rpartition(b")")[2].split()[0] for task in tasks.iterdir()]
        return all(state in (b"T", b"t", b"Z", b"X") for state in states)
    poll(stands, 10, f"process {pid} stopped")


def resume(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


_GUARD = """
import os, sys
sys.stdin.buffer.read()
sys.path.insert(0, sys.argv[1])
import support
support.kill_marked(sys.argv[2])
"""
_guard_process: Optional["subprocess.Popen[bytes]"] = None


def _guard() -> None:
    """Start, once, the process that ends what is marked when this one has gone, whatever ended it."""
    global _guard_process
    if _guard_process is not None:
        return
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    _guard_process = subprocess.Popen(
        [sys.executable, "-c", _GUARD, str(ROOT / "tests"), _RUN + "."], stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, env=environment, start_new_session=True)   # Ctrl-C must not reach it
    atexit.register(_end_all)


def short_folder(prefix: str) -> Path:
    """A folder with a short path, for sockets. It stays until everything the tests started has gone."""
    _guard()
    _folders.append(Path(tempfile.mkdtemp(prefix=prefix)))
    return _folders[-1]


_folders: List[Path] = []


def _end_all() -> None:
    kill_marked(_RUN + ".")
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
    if _guard_process is not None and _guard_process.stdin is not None:
        _guard_process.stdin.close()
        _guard_process.wait(20)

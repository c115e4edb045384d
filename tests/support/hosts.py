"""Hosts that share nothing but a broker: network namespaces, each with one cable to a bridge beside the broker.

Nothing is made in the network of the machine itself: the bridge stands in the broker's namespace, and whoever
wants to see what is on the wire goes there for a moment (`Net.inside`). So runs beside each other cannot meet,
and with the namespaces everything is gone.
"""
from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import pwd
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence

import pytest

from . import MARK
from .brokers import BROKERS, Broker
from .cli import Mam, PathLike

BROKER_ADDRESS = "10.77.0.1"
CLONE_NEWNET = 0x40000000
WANTED_PYTHONS = ("3.9", "3.11", "3.13")        # the oldest, one in the middle, the newest

# Waits for this process to go, whatever ends it, and removes what it has not removed itself.
_GUARD = 'cat >/dev/null; for name in "$@"; do ip netns del "$name"; done 2>/dev/null'


class Net:
    """A broker's namespace and one for each of `hosts`; `close()` removes them."""

    def __init__(self, hosts: Sequence[str]) -> None:
        _check_possible()
        self.tag = "mamtest-" + uuid.uuid4().hex[:8]
        self.hosts = list(hosts)
        self._names = [self.namespace(name) for name in ("broker", *self.hosts)]
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "guard", *self._names], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env=environment, start_new_session=True)     # Ctrl-C must not reach it
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        orders = [f"netns add {name}" for name in self._names]
        orders += [f"link add {host} netns {self.namespace('broker')} type veth peer name eth0 "
                   f"netns {self.namespace(host)}" for host in self.hosts]
        done = _ip(orders)
        if done.returncode != 0:
            why = done.stderr.decode("utf-8", "replace").strip()
            if "not permitted" in why or "Permission denied" in why:
                pytest.skip(f"root here may not make network namespaces: {why}")
            raise AssertionError(f"ip: {why}")
        orders = ["link set lo up", "link add bridge type bridge", f"addr add {BROKER_ADDRESS}/24 dev bridge",
                  "link set bridge up"]
        self._order("broker", orders + [f"link set {host} master bridge up" for host in self.hosts])
        for number, host in enumerate(self.hosts, start=2):
            self._order(host, ["link set lo up", f"addr add 10.77.0.{number}/24 dev eth0", "link set eth0 up"])

    def namespace(self, name: str) -> str:
        return f"{self.tag}-{name}"

    def path(self, name: str) -> str:
        return f"/run/netns/{self.namespace(name)}"

    def _order(self, where: str, orders: Sequence[str]) -> None:
        done = _ip(orders, self.namespace(where))
        assert done.returncode == 0, f"ip in {where}: {done.stderr.decode('utf-8', 'replace')}"

    # ---- cables ------------------------------------------------------------------------------------------------

    def unplug(self, host: str) -> None:
        """From now on nothing reaches or leaves the host, and no connection of its is told so."""
        self._order("broker", [f"link set {host} down"])

    def plug(self, *hosts: str) -> None:
        """Undo `unplug`, of all hosts if none is named."""
        self._order("broker", [f"link set {host} up" for host in hosts or self.hosts])

    # ---- being there -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def inside(self, name: str = "broker") -> Iterator[None]:
        """What this thread starts meanwhile (processes, threads, sockets) is in that namespace, and stays there."""
        with open("/proc/thread-self/ns/net") as here, open(self.path(name)) as there:
            _set_namespace(there.fileno())
            try:
                yield
            finally:
                _set_namespace(here.fileno())

    def broker(self, kind: str, folder: Path, start: bool = True, **options: Any) -> Broker:
        """A server in the broker's namespace, reached by hosts at `BROKER_ADDRESS` and, inside, at 127.0.0.1.

        Whatever talks to it, `start()` included, has to be done `inside`.
        """
        with self.inside():
            server = BROKERS[kind](folder, listen="0.0.0.0", **options)
            server.host = BROKER_ADDRESS
            return server.start() if start else server

    def close(self) -> None:
        _ip([f"netns del {name}" for name in self._names], force=True)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(20)


class Host(Mam):
    """A host of a net: `where` is its name there. `of_runner(S)` is the same host, seen with its runner's registry."""

    def __init__(self, net: Net, where: str, program: PathLike, folder: Path, shiv_root: PathLike,
                 python: Optional[str] = None) -> None:
        super().__init__(program, folder, shiv_root, python)
        self.net, self.where = net, where
        self._registry_dir = self.workspace / ".mam"

    @property
    def registry_dir(self) -> Path:
        return self._registry_dir

    def argv(self, *args: object) -> List[str]:
        return ["nsenter", "--net=" + self.net.path(self.where), *super().argv(*args)]

    def of_runner(self, session: str) -> "Host":
        other = copy.copy(self)
        other._registry_dir = self.workspace / ".mam" / f"runner-{session}"
        other.env = {**self.env, "MAM_REGISTRY_DIR": str(other._registry_dir)}
        return other

    def settings(self, *lines: str) -> None:
        """Append lines to the workspace's .mam.env, as a user does."""
        with open(self.workspace / ".mam.env", "a") as file:
            file.write("".join(line.rstrip("\n") + "\n" for line in lines))
        os.chmod(self.workspace / ".mam.env", 0o600)

    def unplug(self) -> None:
        self.net.unplug(self.where)

    def plug(self) -> None:
        self.net.plug(self.where)


def pythons() -> Dict[str, str]:
    """version -> program, of those of WANTED_PYTHONS that are installed; at least the one that runs the tests."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)           # the tests may run with another HOME
    found: Dict[str, str] = {}
    for version in WANTED_PYTHONS:
        places = [str(path) for path in sorted((home / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))]
        path = os.pathsep.join(part for part in os.environ.get("PATH", os.defpath).split(os.pathsep)
                               if part and "shims" not in part)
        places += [place for place in [shutil.which(f"python{version}", path=path)] if place]
        if places:
            found[version] = places[0]
    return found or {"%d.%d" % sys.version_info[:2]: sys.executable}


# ---- what it takes ---------------------------------------------------------------------------------------------

def _check_possible() -> None:
    """Skip, and say why, where there can be no namespaces."""
    if not sys.platform.startswith("linux"):
        pytest.skip("network namespaces are Linux's")
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for program, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(program, path=_path()) is None:
            pytest.skip(f"{program} is not installed ({package})")


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _ip(orders: Sequence[str], namespace: str = "", force: bool = False) -> "subprocess.CompletedProcess[bytes]":
    words = ["ip", *(["-n", namespace] if namespace else []), *(["-force"] if force else []), "-batch", "-"]
    return subprocess.run(words, input="\n".join(orders).encode() + b"\n", stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=60, env={**os.environ, "PATH": _path()})


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def leftovers(tag: str) -> List[str]:
    """The namespaces of a net that are still there."""
    done = subprocess.run(["ip", "netns", "list"], stdout=subprocess.PIPE, env={**os.environ, "PATH": _path()})
    return re.findall(rf"^{re.escape(tag)}\S*", done.stdout.decode(), re.MULTILINE)

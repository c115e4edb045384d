"""Fixtures: brokers, proxies, observers, mam itself, tmux. Everything is real and local to the test run.

A test is skipped only because a program is missing, and the summary says so. With MAM_NO_SKIP=1 a skip is a
failure, so a machine that is meant to run everything cannot quietly run less.
"""
from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, Generator, Iterator, List, Tuple

import pytest

from support.brokers import BROKERS, Broker
from support.cli import Mam, Tmux, built_pyz
from support.observer import ROOT_FILTER, Observer
from support.proxy import Proxy

LOG_LINES_SHOWN = 60


# ---- brokers -----------------------------------------------------------------------------------------------

@pytest.fixture(scope="session")
def shared_brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Broker]]:
    """One server of each kind per worker, started when first asked for. Tests share them by unique job ids."""
    running: Dict[str, Broker] = {}

    def shared(kind: str) -> Broker:
        if kind not in running:
            running[kind] = BROKERS[kind](tmp_path_factory.mktemp(kind), persistence=False).start()
        return running[kind]

    yield shared
    for server in running.values():
        server.stop()


@pytest.fixture
def _lent(shared_brokers: Callable[[str], Broker]) -> Iterator[Callable[[str], Broker]]:
    """Hands out shared servers, and fails the test that ended one; the next test gets a fresh start."""
    lent: List[Broker] = []

    def lend(kind: str) -> Broker:
        server = shared_brokers(kind)
        if not server.alive():
            server.start()
        server.shown_from = server.log_size()       # type: ignore[attr-defined]
        lent.append(server)
        return server

    yield lend
    gone = [server for server in lent if not server.alive()]
    assert not gone, f"shared brokers ended during this test: {gone} (own_broker makes one to be stopped)"


@pytest.fixture(params=list(BROKERS))
def broker_kind(request: pytest.FixtureRequest) -> str:
    """"nats", then "mosquitto": a test that uses it (or `broker`) runs on both."""
    return str(request.param)


@pytest.fixture
def broker(broker_kind: str, _lent: Callable[[str], Broker]) -> Broker:
    """A shared server, of each kind in turn. It may be used, not stopped."""
    return _lent(broker_kind)


@pytest.fixture
def nats(_lent: Callable[[str], Broker]) -> Broker:
    return _lent("nats")


@pytest.fixture
def mosquitto(_lent: Callable[[str], Broker]) -> Broker:
    return _lent("mosquitto")


class OwnBrokers:
    """`own_broker(kind, **options)`: a started server that belongs to the test; see `Broker` for the options."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: List[Broker] = []

    def __call__(self, kind: str, start: bool = True, **options: Any) -> Broker:
        server = BROKERS[kind](self.folder / f"{kind}-{len(self.servers)}", **options)
        self.servers.append(server)
        return server.start() if start else server


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[OwnBrokers]:
    made = OwnBrokers(tmp_path / "brokers")
    yield made
    for server in made.servers:
        server.kill()


@pytest.fixture
def proxy() -> Iterator[Callable[[Any], Proxy]]:
    """`proxy(broker or port)`: a proxy in front of it, closed at the end."""
    made: List[Proxy] = []

    def make(target: Any) -> Proxy:
        made.append(Proxy(target if isinstance(target, int) else target.port))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def observe() -> Iterator[Callable[..., Observer]]:
    """`observe(broker, filter, ...)`: an `Observer`, closed at the end."""
    made: List[Observer] = []

    def make(server: Any, filter: Any = ROOT_FILTER, **options: Any) -> Observer:
        made.append(Observer(server, filter, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


# ---- mam -----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def pyz(session_folder: Path) -> Path:
    """The artefact under test: MAM_PYZ, or built once per run."""
    return built_pyz(session_folder)


@pytest.fixture
def new_mam(pyz: Path, session_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Mam]]:
    """`new_mam("host2")`: another host, with its own workspace, home and environment."""
    made: List[Mam] = []

    def make(name: str, **options: Any) -> Mam:
        made.append(Mam(pyz, tmp_path / name, session_folder / "shiv", **options))
        return made[-1]

    yield make
    failures = []
    for one in made:
        try:
            one.close()
        except AssertionError as error:         # the others have to be closed too
            failures.append(str(error))
    assert not failures, "\n".join(failures)


@pytest.fixture
def mam(new_mam: Callable[..., Mam]) -> Mam:
    return new_mam("host")


@pytest.fixture
def workspace(mam: Mam) -> Path:
    return mam.workspace


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    home = tmp_path / "tmux-home"
    home.mkdir()
    server = Tmux(home)
    yield server
    server.close()


# ---- failures and skips --------------------------------------------------------------------------------------

def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") is not None and os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, None]:
    """A failed test shows what its brokers logged meanwhile."""
    outcome = yield
    report = outcome.get_result()
    if not report.failed:
        return
    servers: List[Broker] = []
    for value in getattr(item, "funcargs", {}).values():
        found = value.servers if isinstance(value, OwnBrokers) else [value] if isinstance(value, Broker) else []
        servers += [server for server in found if server not in servers]
    for server in servers:
        lines = server.log_text(getattr(server, "shown_from", 0)).splitlines()
        report.sections.append((f"log of {server!r}, {len(lines)} lines", "\n".join(lines[-LOG_LINES_SHOWN:])))


def _skipped(config: pytest.Config) -> List[Tuple[str, str]]:
    """(test, reason) of all that was skipped, whole modules included."""
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
    found = []
    for report in terminal.stats.get("skipped", []) if terminal is not None else []:
        why = report.longrepr
        reason = str(why[2]) if isinstance(why, (tuple, list)) and len(why) == 3 else str(why)
        found.append((report.nodeid, reason[len("Skipped: "):] if reason.startswith("Skipped: ") else reason))
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workerinput"):
        return                                  # a worker of xdist; the controller counts for all
    if os.environ.get("MAM_NO_SKIP") == "1" and _skipped(session.config) and exitstatus in (0, 5):
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    by_reason: Dict[str, List[str]] = {}
    for test, reason in _skipped(config):
        by_reason.setdefault(reason, []).append(test)
    if not by_reason:
        return
    forbidden = os.environ.get("MAM_NO_SKIP") == "1"
    terminalreporter.section("skipped, which MAM_NO_SKIP=1 makes a failure" if forbidden else "skipped",
                             red=forbidden, yellow=not forbidden)
    for reason, tests in sorted(by_reason.items()):
        terminalreporter.line(f"{reason}: {len(tests)} of them")
        for test in tests:
            terminalreporter.line(f"    {'FAILED by MAM_NO_SKIP: ' if forbidden else ''}{test}")

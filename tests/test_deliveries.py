"""Deliveries into panes, counted by the agents' own journals: none lost, none doubled, whatever goes wrong beside."""
from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

import pytest

from support import poll
from support.agents import AgentJournal, install
from support.cli import Mam, Tmux
from support.herdr import Herdr

CLAUDE, CODEX, OPENCODE, PI = "claude", "codex", "opencode", "pi"


class Pane(NamedTuple):
    """A session to be made: its agent's name, and the habits and faults of the stand-in."""
    agent: str
    options: Sequence[object] = ()


# Every agent's look; a swallowed Enter in every third paste; a slow start; Enters that are taken for newlines a while
# after a paste; work at the start, and between events.
PANES = (
    Pane("claude-code", ("--swallow-every", 3)), Pane(CODEX, ("--slow-start", 1.0)),
    Pane(OPENCODE, ("--busy", 1.5, "--work", 0.1)), Pane(PI, ("--swallow-enters", 2)),
    Pane("claude-code", ("--suppress-ms", 600, "--work", 0.05)), Pane(CODEX, ("--swallow-every", 2)),
    Pane(OPENCODE, ("--swallow-every", 4, "--slow-start", 0.5)), Pane(PI, ("--suppress-ms", 150, "--busy", 1.0)))


class Desk:
    """A host with sessions whose agents are stand-ins, each with a journal of its own."""

    def __init__(self, mam: Mam, mux: str, herdr: Optional[Herdr] = None, tmux: Optional[Tmux] = None) -> None:
        self.mam, self.mux, self.herdr, self.tmux = mam, mux, herdr, tmux
        for name in (CLAUDE, CODEX, OPENCODE, PI, "robot"):
            install(mam.bin, name, "--like", "plain" if name == "robot" else name, "--think", 0,
                    "--events", "started,completed")
        mam.env["MAM_SESSION_WAIT_S"] = "30"
        if tmux:
            mam.env["MAM_TMUX_SOCKET"] = str(tmux.socket)
        if herdr:
            herdr.install(mam)
        self.journals: Dict[str, AgentJournal] = {}

    def create(self, name: str, pane: Pane, code: int = 0) -> AgentJournal:
        journal = AgentJournal(self.mam.folder / f"{name}.journal")
        self.journals[name] = journal
        words = ["robot"] if pane.agent == "generic" else []
        self.mam("session", "create", name, "--mux", self.mux, "--agent", pane.agent, "--", *words, "--journal",
                 journal.path, *pane.options, check=code)
        return journal

    def words(self, name: str, job: str) -> List[str]:
        return ["delegate", "--agent-session", f"{self.mux}:{name}", "--prompt", f"do {job}", "--job-id", job]

    def serve(self, name: str, pane: Pane, jobs: int, failures: List[str]) -> None:
        """Make a session, and give it one job after the other."""
        try:
            self.create(name, pane)
            for number in range(jobs):
                self.mam(*self.words(name, f"{name}-{number}"), check=0, timeout=100)
        except BaseException as error:          # told by the test, from its own thread
            failures.append(f"{name} {pane}: {error}\n{self.journals[name].describe()}")

    def deliver(self, panes: Sequence[Pane], jobs: int) -> float:
        """`jobs` deliveries into each of the sessions, all at once; the seconds they took."""
        failures: List[str] = []
        began = time.monotonic()
        threads = [threading.Thread(target=self.serve, args=(f"s{number}", pane, jobs, failures))
                   for number, pane in enumerate(panes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, "\n\n".join(failures)
        return time.monotonic() - began

    def check(self, panes: Sequence[Pane], jobs: int) -> int:
        """0 lost, 0 doubled, none elsewhere, nothing left in a composer; how many there were."""
        told = {name: [row["text"] for row in journal.rows("turn")] for name, journal in self.journals.items()}
        for number, name in itertools.product(range(jobs), told):
            found = {other: sum(f"Job {name}-{number}, " in text for text in texts) for other, texts in told.items()}
            assert found == {other: int(other == name) for other in told}, f"{name}-{number}: {found}"
        for name, journal in self.journals.items():
            entered = journal.rows("paste") + [row for row in journal.rows("typed")]
            assert len(entered) == len(journal.submissions()) == jobs == len(told[name]), journal.describe()
            assert not journal.rows("answer") and not journal.rows("interrupted") and not journal.rows("exit")
        return sum(len(texts) for texts in told.values())

    def kill_server(self) -> None:
        """SIGKILL for the multiplexer; a test that uses herdr starts it anew."""
        if self.herdr:
            self.herdr.kill()
        elif self.tmux:
            os.kill(int(self.tmux.run("display-message", "-p", "#{pid}")), signal.SIGKILL)

    def listed(self) -> Dict[str, Dict[str, Any]]:
        return {row["session"]: row for row in self.mam("session", "list", "--all", "--json", check=0).json()}


@contextlib.contextmanager
def load() -> Iterator[None]:
    """A busy loop beside, niced."""
    with subprocess.Popen(["nice", "-n", "5", sys.executable, "-S", "-c", "while True: pass"]) as busy:
        try:
            yield
        finally:
            busy.kill()


@pytest.fixture
def on_tmux(mam: Mam, tmux: Tmux) -> Desk:
    return Desk(mam, "tmux", tmux=tmux)


@pytest.fixture
def on_herdr(mam: Mam, tmp_path: Path) -> Iterator[Desk]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    if not Path("/proc/self").exists():
        pytest.skip("the stand-in for herdr needs /proc")
    (tmp_path / "herdr-home").mkdir()
    herdr = Herdr(tmp_path / "herdr-home")
    yield Desk(mam, "herdr", herdr)
    herdr.close()


# ---- deliveries under load ------------------------------------------------------------------------------------

def deliveries_under_load(desk: Desk, panes: Sequence[Pane], jobs: int) -> None:
    with load():
        seconds = desk.deliver(panes, jobs)
    count = desk.check(panes, jobs)
    swallowed, suppressed, keys = (sum(len(journal.rows(event)) for journal in desk.journals.values())
                                   for event in ("swallowed", "suppressed", "key"))
    print(f"{count} deliveries into {len(panes)} sessions within {seconds:.0f} s; {swallowed} Enters were swallowed, "
          f"{suppressed} suppressed, {keys - count - swallowed - suppressed} pressed into an empty composer")
    assert count == len(panes) * jobs


SOAK = [pytest.mark.soak, pytest.mark.timeout(1200)]
SOON = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("jobs", [pytest.param(25, marks=SOON), pytest.param(75, marks=SOAK)])
def test_deliveries_under_load_are_neither_lost_nor_doubled(on_tmux: Desk, jobs: int) -> None:
    """Lost: a job whose prompt never came, or the work of one that was done twice.

    200 in CI, which take two cores about a minute; 600 in `make soak`.
    """
    deliveries_under_load(on_tmux, PANES, jobs)


@pytest.mark.parametrize("jobs", [pytest.param(3, marks=SOON), pytest.param(15, marks=SOAK)])
def test_deliveries_through_herdr_are_neither_lost_nor_doubled(on_herdr: Desk, jobs: int) -> None:
    """The same through herdr: its own prompt for agents it knows, one line for those that it does not.

    12 in CI, 60 in `make soak`.
    """
    deliveries_under_load(on_herdr, (Pane("claude-code"), Pane(CODEX, ("--suppress-ms", 200)), Pane(PI),
                                     Pane("generic", ("--swallow-enters", 2))), jobs)


# ---- deaths in the middle of one ---------------------------------------------------------------------------------

# The agent as a child of the program that was started, as programs of npm have it: three processes can die.
WRAPPER = """#!/bin/bash
exec -a claude %s -S -c 'import signal, subprocess, sys
sys.exit(abs(subprocess.call(sys.argv[1:])))' %s "$@"
"""


def enough(condition: Callable[[], Any], timeout: float) -> None:
    """Wait for it, but not for ever: it may never come."""
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["agent", "pane", "server"])
@pytest.mark.parametrize("mux", ["tmux", "herdr"])
def test_whoever_is_killed_in_a_delivery_leaves_nothing_open(mux: str, victim: str, request: Any) -> None:
    """Lost: a job that stays open for ever, a session that is only said to be there, a prompt typed into its heir."""
    desk: Desk = request.getfixturevalue("on_" + mux)
    seed = int(os.environ.get("MAM_SOAK_SEED") or random.SystemRandom().randrange(10 ** 9))
    print(f"MAM_SOAK_SEED={seed}")
    rng = random.Random(seed)
    real = desk.mam.bin / "claude"
    real.rename(desk.mam.bin / "claude.real")
    desk.mam.stub("claude", WRAPPER % (sys.executable, desk.mam.bin / "claude.real"))
    rounds = 2 if victim == "server" else 1
    names = [f"r{number}" for number in range(2 if mux == "herdr" else 4)]
    for turn in range(rounds):
        runs = []
        for name in names:
            desk.create(name, Pane("claude-code", ("--events", "started,hang")))
        rows = desk.listed()
        for name in names:
            job = f"{name}-{turn}"
            runs.append(desk.mam.popen(*desk.words(name, job), "--ack-timeout", 3, "--heartbeat", 1,
                                       "--idle-timeout", 4))
        for name in names if victim != "server" else names[:1]:
            journal = desk.journals[name]
            if rng.random() < 0.6:              # between the paste, the Enter and the first event
                enough(lambda: any(f"Job {name}-{turn}," in text for text in journal.pastes()), 30)
                time.sleep(rng.uniform(0.0, 0.8))
            else:                               # before
                time.sleep(rng.uniform(0.0, 1.0))
            if victim == "server":
                desk.kill_server()
            else:
                pid = rows[f"{desk.mux}:{name}"]["process"]["pid"] if victim == "pane" else \
                    journal.rows("start")[-1]["pid"]
                os.kill(pid, signal.SIGKILL)
        poll(lambda: not [row for row in desk.listed().values() if row["status"] == "running"], 30,
             lambda: f"all sessions terminated: {desk.listed()}")
        assert {row["status"] for row in desk.listed().values()} == {"terminated"}
        if mux == "herdr" and victim == "server":
            desk.herdr.start()                  # type: ignore[union-attr]
        heirs = {name: desk.create(name, Pane("claude-code")) for name in names}
        for name, run in zip(names, runs):
            job = f"{name}-{turn}"
            result = run.wait(60)
            known = desk.mam("get", job, "--json").json()          # (killed beforehand: refused, and no job at all)
            assert result.code in (1, 2, 5), str(result)
            assert known.get("status") in ("error", "cancelled") or known["error"]["code"] == "unknown_job", str(known)
            journal = heirs[name]
            assert sum(f"Job {job}," in text for text in journal.pastes()) <= 1, journal.describe()
            assert journal.count(f"Job {job},") <= 1, journal.describe()
            heir = journal.rows("start")[-1]["pid"]
            assert not [row for row in journal.rows(pid=heir) if row["event"] in ("paste", "typed", "key")]
        for name in names:
            desk.mam("session", "stop", name, check=0)


# ---- what a composer holds, and what a dialog asks ---------------------------------------------------------------

AGENTS = ("claude-code", CODEX, OPENCODE, PI)


def together(work: Callable[[str], None], names: Sequence[str]) -> None:
    """The same for several sessions, at once."""
    failures: List[str] = []

    def one(name: str) -> None:
        try:
            work(name)
        except BaseException as error:          # told by the test, from its own thread
            failures.append(f"{name}: {error}")
    threads = [threading.Thread(target=one, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, "\n\n".join(failures)


def test_a_draft_is_left_alone_in_every_composer(on_tmux: Desk) -> None:
    """Lost: a human's half a thought: sent off, sent with ours, or gone."""
    on_tmux.mam.env["MAM_SESSION_WAIT_S"] = "2"

    def refused(agent: str) -> None:
        journal = on_tmux.create(agent, Pane(agent, ("--draft", "half a thought")))
        result = on_tmux.mam(*on_tmux.words(agent, agent), check=5)
        assert "a draft stands in the composer" in result.stderr
        assert not [row for row in journal.rows() if row["event"] in ("paste", "typed", "key", "submit")]
        assert "half a thought" in on_tmux.mam("session", "capture", agent, check=0).stdout
        on_tmux.mam("session", "send", agent, "--keys", "Enter", check=0)
        journal.wait("submit", text="half a thought")
    together(refused, AGENTS)


def test_no_dialog_is_answered_whoever_asks(on_tmux: Desk) -> None:
    """Lost: a Yes that nobody said; or a job for a dialog that a human answered in time."""
    on_tmux.mam.env["MAM_SESSION_WAIT_S"] = "2"

    def untouched(journal: AgentJournal) -> bool:
        return not [row for row in journal.rows() if row["event"] in ("typed", "key", "submit", "answer")]

    def asked(agent: str) -> None:
        journal = on_tmux.create(agent + "-t", Pane(agent, ("--dialog", "trust")), code=5)
        result = on_tmux.mam(*on_tmux.words(agent + "-t", agent + "-t"), check=5)
        assert "waits in a dialog (trust)" in result.stderr and untouched(journal) and not journal.pastes()
        journal = on_tmux.create(agent, Pane(agent, ("--dialog", "permission@paste")))
        run = on_tmux.mam.popen(*on_tmux.words(agent, agent))
        journal.wait("dialog")
        poll(lambda: "permission" in on_tmux.mam("session", "capture", agent, check=0).stderr, 5, "the dialog")
        assert untouched(journal) and len(journal.pastes()) == 1
        on_tmux.mam("session", "send", agent, "--keys", "3", check=0)
        assert run.wait(60).code == 0
        assert [row["choice"] for row in journal.rows("answer")] == ["No"] and len(journal.submissions()) == 1
        assert [row["dialog"] for row in journal.rows("key")] == ["permission", ""] and len(journal.pastes()) == 1
    together(asked, AGENTS)

"""Stand-in agents (`tui_agent.py`) in panes of a private tmux server, or as a program in PATH, and their journals."""
from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

from . import poll
from .cli import PathLike, Tmux

SCRIPT = Path(__file__).with_name("tui_agent.py")


class AgentJournal:
    """What one or several stand-in agents received and did, oldest first."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self, event: str = "", **fields: Any) -> List[Dict[str, Any]]:
        """The rows of this kind whose fields have these values."""
        if not self.path.exists():
            return []
        found = [json.loads(line) for line in self.path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        return [row for row in found if (not event or row["event"] == event)
                and all(row.get(name) == value for name, value in fields.items())]

    def wait(self, event: str, count: int = 1, timeout: float = 20.0, **fields: Any) -> Dict[str, Any]:
        """Wait for the `count`th such row, and return it."""
        poll(lambda: len(self.rows(event, **fields)) >= count, timeout,
             lambda: f"{count} x {event} {fields} in {self.describe()}")
        return self.rows(event, **fields)[count - 1]

    def pastes(self) -> List[str]:
        return [row["text"] for row in self.rows("paste")]

    def submissions(self) -> List[str]:
        """What was submitted by Enter; a prompt of the command line is in `rows("launch")`."""
        return [row["text"] for row in self.rows("submit")]

    def keys(self) -> List[str]:
        return [row["key"] for row in self.rows("key")]

    def ran(self) -> Dict[str, int]:
        """event -> exit status of the publish command that was run for it, in order."""
        return {row["what"]: row["code"] for row in self.rows("ran")}

    def count(self, text: str) -> int:
        """How many prompts that hold `text` reached a turn of work, however they came: 0 is lost, 2 is doubled."""
        return sum(text in row["text"] for row in self.rows("turn"))

    def describe(self) -> str:
        return "\n".join(str({name: value for name, value in row.items() if name != "environment"})[:300]
                         for row in self.rows()[-30:])


def install(folder: Path, name: str, *options: object, journal: Optional[Path] = None) -> AgentJournal:
    """Put an executable `name` ("claude", "codex" ...) into `folder`, such as `mam.bin`: a stand-in with `options`.

    tmux shows `name` as the command in the foreground, as it does for the real one.
    """
    journal = journal or folder / f"{name}.journal"
    words = [sys.executable, "-S", "-E", str(SCRIPT), "--journal", str(journal), "--name", name, *map(str, options)]
    program = folder / name
    program.write_text("#!/bin/bash\nexec -a %s %s \"$@\"\n" % (
        shlex.quote(name), " ".join(shlex.quote(word) for word in words)))
    program.chmod(0o755)
    return AgentJournal(journal)


class TuiAgent(AgentJournal):
    """A stand-in agent as the process of a pane. `options` are those of tui_agent.py, `env` goes to the pane."""

    def __init__(self, tmux: Tmux, folder: Path, *options: object, name: str = "alice", cwd: PathLike = "",
                 env: Optional[Dict[str, str]] = None, ready: bool = True) -> None:
        super().__init__(folder / f"{name}.journal")
        self.tmux, self.name = tmux, name
        program = folder / f"agents-{name}"
        program.mkdir(parents=True, exist_ok=True)
        install(program, "agent", *options, journal=self.path)
        self.pane = tmux.new_pane("exec " + shlex.quote(str(program / "agent")), name=name, cwd=cwd,
                                  env={"TUI_AGENT_TRANSCRIPTS": str(folder / "transcripts"), **(env or {})})
        if ready:
            self.wait("ready")

    @property
    def pid(self) -> int:
        return int(self.tmux.pane(self.pane, "#{pane_pid}"))

    @property
    def session(self) -> str:
        """The conversation's id."""
        return str(self.wait("start")["session"])

    def screen(self) -> str:
        return self.tmux.capture(self.pane)

    def paste(self, text: str, brackets: bool = True) -> None:
        """A paste as tmux makes it, without Enter."""
        self.tmux.run("load-buffer", "-b", "test-paste", "-", input=text.encode())
        self.tmux.run("paste-buffer", *(["-p"] if brackets else []), "-d", "-b", "test-paste", "-t", self.pane)

    def press(self, *keys: str) -> None:
        """Keys by their tmux names: "Enter", "C-c", "Up", "2"."""
        self.tmux.run("send-keys", "-t", self.pane, *keys)

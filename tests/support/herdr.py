"""`herdr` (`herdr_stand_in.py`) in a test's PATH, its server, and the faults a test orders."""
from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

from . import clean_environment, kill_marked, new_mark, poll, short_folder
from .cli import Mam

SCRIPT = Path(__file__).with_name("herdr_stand_in.py")


class HerdrError(Exception):
    """What a command refused: `code` as herdr names it, or "usage"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Herdr:
    """A herdr of its own. `install(mam)` puts it in a host's PATH; agents for its panes belong into `bin`.

    `env` is what its server, and so its panes, get besides a clean environment. `effect_ms` is how long a prompt with
    --wait may show no effect before it is called stalled.
    """

    def __init__(self, home: Path, start: bool = True, env: Optional[Dict[str, str]] = None,
                 effect_ms: int = 5000) -> None:
        self.base = short_folder("herdr-")
        self.bin, self.home = self.base / "bin", home
        self.bin.mkdir()
        self.mark = new_mark()
        self.environment = {**clean_environment(home, self.mark), "TERM": "xterm-256color", **(env or {})}
        self.environment["PATH"] = f"{self.bin}{os.pathsep}{self.environment['PATH']}"
        self._sessions = self.base / "s"
        self.folder = self._sessions / "default"
        self.folder.mkdir(parents=True)
        self._effect_ms = effect_ms
        self.write_program(self.bin)
        self.server: Optional["subprocess.Popen[bytes]"] = None
        if start:
            self.start()

    def write_program(self, folder: Path) -> Path:
        program = folder / "herdr"
        program.write_text("#!/bin/sh\nHERDR_STAND_IN_EFFECT_MS=%d HERDR_STAND_IN=%s exec %s -S -E %s \"$@\"\n" % (
            self._effect_ms, shlex.quote(str(self._sessions)), shlex.quote(sys.executable), shlex.quote(str(SCRIPT))))
        program.chmod(0o755)
        return program

    def install(self, mam: Mam) -> "Herdr":
        """The host's commands find this herdr."""
        self.write_program(mam.bin)
        return self

    # ---- commands --------------------------------------------------------------------------------------------

    def run(self, *args: object, env: Optional[Dict[str, str]] = None, timeout: float = 60.0) \
            -> "subprocess.CompletedProcess[str]":
        return subprocess.run([str(self.bin / "herdr"), *map(str, args)], stdin=subprocess.DEVNULL, timeout=timeout,
                              env={**self.environment, **(env or {})}, cwd=str(self.home), stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, encoding="utf-8")

    def __call__(self, *args: object, timeout: float = 60.0) -> Any:
        """The result of a command, or its text; HerdrError if it was refused."""
        done = self.run(*args, timeout=timeout)
        if done.returncode == 2:
            raise HerdrError("usage", done.stderr)
        if done.returncode != 0:
            error = json.loads(done.stderr)["error"]
            raise HerdrError(error["code"], error["message"])
        return json.loads(done.stdout)["result"] if done.stdout.startswith('{"id"') else done.stdout

    def workspace(self, *args: object, env: Optional[Dict[str, str]] = None) -> str:
        """A new workspace; its pane's id."""
        words: List[object] = []
        for name, value in (env or {}).items():
            words += ["--env", f"{name}={value}"]
        return str(self("workspace", "create", "--no-focus", *words, *args)["root_pane"]["pane_id"])

    def status(self, target: str) -> str:
        return str(self("agent", "get", target)["agent"]["agent_status"])

    def pane_pid(self, pane_id: str) -> int:
        return int(self("pane", "process-info", "--pane", pane_id)["process_info"]["shell_pid"])

    # ---- faults ----------------------------------------------------------------------------------------------

    def fault(self, verb: str, do: str, times: int = 1) -> None:
        """From now on, `times` calls of `verb` ("agent prompt", "*"; -1: all) go wrong.

        error:CODE, down, hang, slow:S, status:S (the agent is said to be that), and for agent prompt: unsubmitted
        (text, no Enter, success), lost (nothing typed, success), stalled (submitted, but refused as
        agent_prompt_stalled), early (--wait does not wait).
        """
        path = self.folder / "faults.json"
        faults = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps(faults + [{"verb": verb, "do": do, "times": times}]))

    def clear_faults(self) -> None:
        (self.folder / "faults.json").unlink()

    def calls(self, verb: str = "") -> List[List[str]]:
        """The words of all commands so far that begin with `verb`, by whomever."""
        path = self.folder / "calls.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row["argv"] for row in rows if " ".join(row["argv"]).startswith(verb)]

    # ---- the server ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """`herdr server`, in the background, until it answers."""
        self.server = subprocess.Popen([str(self.bin / "herdr"), "server"], env=self.environment, cwd=str(self.home),
                                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                       start_new_session=True)
        poll(lambda: (self.folder / "herdr.sock").exists() and self.running(), 20, "a herdr server")

    def running(self) -> bool:
        return bool(json.loads(self.run("status", "server", "--json").stdout)["running"])

    def stop(self) -> None:
        """As asked: the layout is kept for the next start."""
        self("server", "stop")

    def kill(self) -> None:
        """SIGKILL of the server; its panes go with it."""
        state = json.loads((self.folder / "state.json").read_text())
        os.kill(state["pid"], signal.SIGKILL)
        if self.server is not None:
            self.server.wait(20)
        (self.folder / "herdr.sock").unlink()
        poll(lambda: not self.running(), 20, "the end of the herdr server")

    def close(self) -> None:
        kill_marked(self.mark)
        if self.server is not None:
            self.server.wait(20)

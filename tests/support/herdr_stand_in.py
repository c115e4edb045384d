"""A stand-in for the program `herdr` (0.9, protocol 22): its command line, answered as its documents and source say.

JSON envelopes on stdout, error JSON on stderr with exit 1, usage errors as text with exit 2. Panes are real: each is a
shell in a private tmux server, which lives as long as `herdr server` does. What an agent is at is read off its screen
and its title, as herdr does it, and so can be missed. `support.herdr` puts it in a test's PATH and orders faults.

Where herdr's words are not known (the shape of `session list`, the ids after a restart), this is a guess.
Only the standard library, and no import of this package: it is started for every command.
"""
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

VERSION, PROTOCOL = "0.9.5", 22
PROMPT_SUBMIT_DELAY_S = 0.3
PROMPT_EFFECT_TIMEOUT_MS = int(os.environ.get("HERDR_STAND_IN_EFFECT_MS") or 5000)
POLL_S = 0.02
STATUSES = ("idle", "working", "blocked", "done", "unknown")
SETTLED = ("idle", "done", "blocked")
KINDS = {kind: kind for kind in (
    "pi claude codex gemini devin agy cline omp mastracode opencode copilot kimi kiro droid amp grok hermes kilo "
    "qodercli qwen maki letta muse").split()}
KINDS["cursor"] = "cursor-agent"
RESUME = {"codex": "codex resume %s", "opencode": "opencode -s %s"}       # others: KIND --resume ID
SHELLS = ("sh", "bash", "dash", "zsh", "fish", "ash")
KEYS = {"enter": "Enter", "esc": "Escape", "escape": "Escape", "tab": "Tab", "up": "Up", "down": "Down",
        "left": "Left", "right": "Right", "backspace": "BSpace", "space": "Space"}


class Refused(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Usage(Exception):
    """Text on stderr, exit 2."""


class Hang(Exception):
    """A fault: the command never returns."""


def parse(args: List[str], usage: str, places: int = 1, values: str = "", flags: str = "",
          repeated: str = "") -> Tuple[List[str], Dict[str, Any]]:
    """(positionals, options) of a command; Usage where herdr would print its own."""
    found: List[str] = []
    options: Dict[str, Any] = {name: [] for name in repeated.split()}
    queue = list(args)
    while queue:
        word = queue.pop(0)
        name = word[2:] if word.startswith("--") else ""
        if name in flags.split():
            options[name] = True
        elif name in values.split() + repeated.split():
            if not queue:
                raise Usage("missing value for %s" % word)
            value = queue.pop(0)
            if name in options and isinstance(options[name], list):
                options[name].append(value)
            else:
                options[name] = value
        elif word.startswith("--"):
            raise Usage("unknown option: %s" % word)
        else:
            found.append(word)
    if len(found) < places:
        raise Usage("usage: herdr " + usage)
    return found, options


def milliseconds(options: Dict[str, Any], name: str = "timeout") -> Optional[int]:
    if name not in options:
        return None
    if not re.fullmatch(r"[0-9]+", options[name]):
        raise Usage("invalid value for --%s: %s" % (name, options[name]))
    return int(options[name])


# ---- one server --------------------------------------------------------------------------------------------

class Server:
    """State of one herdr session in a folder: state.json under a lock, a tmux socket, what was called, faults."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder, self.name = folder, name
        self.socket = os.path.join(folder, "herdr.sock")
        self._tmux_socket = os.path.join(folder, "tmux")
        os.makedirs(folder, exist_ok=True)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    @contextlib.contextmanager
    def locked(self) -> Iterator[Dict[str, Any]]:
        """The state, to read and change; written back whole."""
        with open(self.path("lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state: Dict[str, Any] = {"pid": 0, "workspaces": {}, "tabs": {}, "panes": {}, "next": 1, "focused": ""}
            if os.path.exists(self.path("state.json")):
                with open(self.path("state.json")) as file:
                    state = json.load(file)
            yield state
            with open(self.path("state.new"), "w") as file:
                json.dump(state, file)
            os.replace(self.path("state.new"), self.path("state.json"))

    def tmux(self, *args: str, input: Optional[bytes] = None, check: bool = True) -> str:
        source: Dict[str, Any] = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
        done = subprocess.run(["tmux", "-S", self._tmux_socket, "-f", "/dev/null", *args], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, **source)
        if check and done.returncode != 0:
            raise Refused("internal_error", "tmux %s: %s" % (args[0], done.stderr.decode("utf-8", "replace").strip()))
        return done.stdout.decode("utf-8", "replace")

    def running(self) -> bool:
        with self.locked() as state:
            if state["pid"] and alive(state["pid"]):
                return bool(self.tmux("list-sessions", check=False))
            self.tmux("kill-server", check=False)       # its panes die with it
            return False

    def fault(self, verb: str) -> str:
        """What was ordered for this command, once taken; "" mostly."""
        if not os.path.exists(self.path("faults.json")):
            return ""
        with self.locked():
            with open(self.path("faults.json")) as file:
                faults = json.load(file)
            for one in faults:
                if one["verb"] in (verb, "*") and one["times"] != 0:
                    one["times"] -= 1
                    with open(self.path("faults.new"), "w") as file:
                        json.dump(faults, file)
                    os.replace(self.path("faults.new"), self.path("faults.json"))
                    return str(one["do"])
        return ""

    def note(self, argv: List[str], code: int) -> None:
        row = json.dumps({"argv": argv, "code": code, "at": time.monotonic(), "pid": os.getpid()}) + "\n"
        descriptor = os.open(self.path("calls.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, row.encode())
        os.close(descriptor)


def alive(pid: int) -> bool:
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def open_server(name: Optional[str]) -> Server:
    """--session, then HERDR_SOCKET_PATH, then HERDR_SESSION, then the default one."""
    base = os.environ["HERDR_STAND_IN"]
    path = os.environ.get("HERDR_SOCKET_PATH", "")
    if not name and path.startswith(base + os.sep):
        name = os.path.basename(os.path.dirname(path))
    name = name or os.environ.get("HERDR_SESSION") or "default"
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise Usage("invalid session name: %s" % name)
    return Server(os.path.join(base, name), name)


# ---- panes and agents --------------------------------------------------------------------------------------

class App:
    """The commands. Each takes the words after its verb, and returns what is printed: a result, a text, or None."""

    def __init__(self, server: Server, fault: str) -> None:
        self.server, self.fault = server, fault

    # ---- looking ---------------------------------------------------------------------------------------------

    def reconcile(self, state: Dict[str, Any]) -> None:
        """Forget panes whose process has ended, and what is empty then; see what every agent is at."""
        form = "#{pane_id}\t#{pane_current_command}\t#{pane_pid}\t#{pane_title}"
        rows = [line.split("\t", 3) for line in self.server.tmux("list-panes", "-a", "-F", form).splitlines()]
        there = {row[0]: row for row in rows if len(row) == 4}
        for pane_id, pane in list(state["panes"].items()):
            if pane["tmux"] not in there:
                del state["panes"][pane_id]
                continue
            _, command, pid, title = there[pane["tmux"]]
            self._observe(state, pane, command, int(pid), title)
        used = {pane["tab_id"] for pane in state["panes"].values()}
        state["tabs"] = {tab: row for tab, row in state["tabs"].items() if tab in used}
        left = {row["workspace_id"] for row in state["tabs"].values()}
        state["workspaces"] = {one: row for one, row in state["workspaces"].items() if one in left}

    def _observe(self, state: Dict[str, Any], pane: Dict[str, Any], command: str, pid: int, title: str) -> None:
        kinds = [kind for kind, program in KINDS.items() if program == os.path.basename(command)]
        agent = kinds[0] if kinds else pane["reported"].get("agent") if command not in SHELLS else None
        if pane["agent"] and not agent:
            pane.update(name=None, session=None, worked=False, launch_pending=False)
        pane.update(agent=agent, pid=pid, command=command, title=title)
        status = self._status(pane, title) if agent else "unknown"
        if status == "idle":
            pane["launch_pending"] = False
            if pane["worked"] and state["focused"] != pane["pane_id"]:
                status = "done"
        pane["worked"] = pane["worked"] or status == "working"
        if self.fault.startswith("status:"):
            status = self.fault[len("status:"):]
        if status != pane["agent_status"]:
            pane["agent_status"] = status
            pane["seq"] += 1
        if agent and kinds:
            pane["session"] = self._session(pane, agent) or pane["session"]

    def _status(self, pane: Dict[str, Any], title: str) -> str:
        screen = self.server.tmux("capture-pane", "-p", "-t", pane["tmux"], check=False)
        if any(sign in screen for sign in ("Enter to confirm", "Esc to cancel", "Press enter to continue")):
            return "blocked"
        if re.search("esc (to )?interrupt|Working\\.\\.\\.", screen) or title[:1] and "\u2801" <= title[0] <= "\u28ff":
            return "working"
        if pane["reported"].get("state"):
            return str(pane["reported"]["state"])
        return "idle" if re.search("[\u2500\u2580]{20}|^\u203a", screen, re.M) else "unknown"

    def _session(self, pane: Dict[str, Any], agent: str) -> Optional[Dict[str, str]]:
        """What an agent's integration would report: here, what a stand-in agent writes down while it lives."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            group = foreground_group(pane["pid"])
            with open("/proc/%d/environ" % group, "rb") as file:
                environ = dict(item.split(b"=", 1) for item in file.read().split(b"\0") if b"=" in item)
            folder = environ.get(b"TUI_AGENT_TRANSCRIPTS") or os.path.join(environ[b"HOME"], b".tui-agent")
            with open(os.path.join(folder, b"live", b"%d.json" % group)) as live:
                return {"source": "herdr:" + agent, "agent": agent, "kind": "id", "value": json.load(live)["sessionId"]}
        return None

    def _pane(self, state: Dict[str, Any], pane_id: str) -> Dict[str, Any]:
        if pane_id not in state["panes"]:
            raise Refused("pane_not_found", "pane %s not found" % pane_id)
        return dict(state["panes"][pane_id], live=state["panes"][pane_id])

    def _agent(self, state: Dict[str, Any], target: str) -> Dict[str, Any]:
        """A pane by its agent's name, its own id, or its terminal's; never by a kind."""
        for pane in state["panes"].values():
            if target in (pane["name"], pane["pane_id"], pane["terminal_id"]) and (pane["agent"] or pane["name"]):
                return dict(pane, live=pane)
        raise Refused("agent_not_found", "agent target %s not found" % target)

    def look(self, find: Callable[[Dict[str, Any], str], Dict[str, Any]], target: str) -> Dict[str, Any]:
        with self.server.locked() as state:
            self.reconcile(state)
            return find(state, target)

    # ---- what is printed -------------------------------------------------------------------------------------

    @staticmethod
    def pane_info(pane: Dict[str, Any]) -> Dict[str, Any]:
        info = {name: pane[name] for name in ("pane_id", "terminal_id", "workspace_id", "tab_id", "agent_status")}
        info.update(focused=False, cwd=pane["cwd"], foreground_cwd=cwd_of(pane.get("pid")) or pane["cwd"], revision=0)
        info.update({name: value for name, value in (
            ("label", pane["label"]), ("agent", pane["agent"]), ("terminal_title", pane.get("title")),
            ("agent_session", pane["session"])) if value})
        return info

    def agent_info(self, pane: Dict[str, Any]) -> Dict[str, Any]:
        info = self.pane_info(pane)
        info.pop("label", None)
        info["state_change_seq"] = pane["seq"]
        info.update({name: value for name, value in (
            ("name", pane["name"]), ("launch_pending", pane["launch_pending"]),
            ("interactive_ready", bool(pane["agent"]) and not pane["launch_pending"])) if value})
        return info

    @staticmethod
    def workspace_info(state: Dict[str, Any], workspace_id: str) -> Dict[str, Any]:
        row = state["workspaces"][workspace_id]
        tabs = [tab for tab, one in state["tabs"].items() if one["workspace_id"] == workspace_id]
        panes = [pane for pane in state["panes"].values() if pane["workspace_id"] == workspace_id]
        return {"workspace_id": workspace_id, "label": row["label"], "number": row["number"], "focused": False,
                "tab_count": len(tabs), "pane_count": len(panes), "active_tab_id": tabs[0] if tabs else None,
                "agent_status": panes[0]["agent_status"] if panes else "unknown"}

    @staticmethod
    def tab_info(state: Dict[str, Any], tab_id: str) -> Dict[str, Any]:
        row = state["tabs"][tab_id]
        panes = [pane for pane in state["panes"].values() if pane["tab_id"] == tab_id]
        return {"tab_id": tab_id, "workspace_id": row["workspace_id"], "label": row["label"], "number": row["number"],
                "focused": False, "pane_count": len(panes), "agent_status": "unknown"}

    # ---- making ----------------------------------------------------------------------------------------------

    def _new_pane(self, state: Dict[str, Any], tab_id: str, cwd: str, env: Dict[str, str],
                  pane_id: str = "", label: str = "") -> Dict[str, Any]:
        """A pane with a shell; with `pane_id`, one that was there before the server went."""
        workspace_id = state["tabs"][tab_id]["workspace_id"]
        if not pane_id:
            number = state["workspaces"][workspace_id]["next_pane"]
            state["workspaces"][workspace_id]["next_pane"] += 1
            pane_id = "%s:p%d" % (workspace_id, number)
        given = {**env, "HERDR_ENV": "1", "HERDR_SOCKET_PATH": self.server.socket, "HERDR_WORKSPACE_ID": workspace_id,
                 "HERDR_BIN_PATH": shutil.which("herdr") or "", "HERDR_TAB_ID": tab_id, "HERDR_PANE_ID": pane_id}
        words = ["new-session", "-d", "-P", "-F", "#{pane_id}", "-x", "120", "-y", "40", "-c", cwd]
        for name, value in given.items():
            words += ["-e", "%s=%s" % (name, value)]
        tmux = self.server.tmux(*words, "exec env -u CODEX_THREAD_ID -u TMUX -u TMUX_PANE /bin/sh").strip()
        state["panes"][pane_id] = {
            "pane_id": pane_id, "tab_id": tab_id, "workspace_id": workspace_id, "tmux": tmux, "cwd": cwd, "env": env,
            "terminal_id": "term_" + uuid.uuid4().hex[:12], "label": label, "name": None, "agent": None, "seq": 0,
            "agent_status": "unknown", "launch_pending": False, "worked": False, "session": None, "reported": {}}
        return dict(state["panes"][pane_id])

    def _new_tab(self, state: Dict[str, Any], workspace_id: str, label: str) -> str:
        row = state["workspaces"][workspace_id]
        tab_id = "%s:t%d" % (workspace_id, row["next_tab"])
        state["tabs"][tab_id] = {"workspace_id": workspace_id, "label": label or str(row["next_tab"]),
                                 "number": row["next_tab"]}
        row["next_tab"] += 1
        return tab_id

    @staticmethod
    def _env(options: Dict[str, Any]) -> Dict[str, str]:
        for pair in options["env"]:
            if "=" not in pair or pair.startswith("="):
                raise Usage("invalid --env: %s (expected KEY=VALUE)" % pair)
        return dict(pair.split("=", 1) for pair in options["env"])

    def workspace_create(self, args: List[str]) -> Any:
        _, options = parse(args, "workspace create", 0, "cwd label", "focus no-focus", "env")
        cwd = options.get("cwd") or os.getcwd()
        with self.server.locked() as state:
            workspace_id = "w%d" % state["next"]
            state["workspaces"][workspace_id] = {"label": options.get("label") or os.path.basename(cwd) or "~",
                                                 "number": state["next"], "next_tab": 1, "next_pane": 1}
            state["next"] += 1
            tab_id = self._new_tab(state, workspace_id, "")
            pane = self._new_pane(state, tab_id, cwd, self._env(options))
            return {"type": "workspace_created", "workspace": self.workspace_info(state, workspace_id),
                    "tab": self.tab_info(state, tab_id), "root_pane": self.pane_info(pane)}

    def workspace_list(self, args: List[str]) -> Any:
        with self.server.locked() as state:
            self.reconcile(state)
            return {"type": "workspace_list",
                    "workspaces": [self.workspace_info(state, one) for one in state["workspaces"]]}

    def workspace_get(self, args: List[str]) -> Any:
        (workspace_id, *_), _ = parse(args, "workspace get <workspace_id>")
        with self.server.locked() as state:
            self.reconcile(state)
            self._need("workspace", state["workspaces"], workspace_id)
            return {"type": "workspace_info", "workspace": self.workspace_info(state, workspace_id)}

    def workspace_close(self, args: List[str]) -> Any:
        (workspace_id, *_), _ = parse(args, "workspace close <workspace_id> [--group]", 1, "", "group")
        with self.server.locked() as state:
            self._need("workspace", state["workspaces"], workspace_id)
            self._close(state, [pane for pane in state["panes"].values() if pane["workspace_id"] == workspace_id])
        return {"type": "ok"}

    def tab_create(self, args: List[str]) -> Any:
        _, options = parse(args, "tab create", 0, "workspace cwd label", "focus no-focus", "env")
        with self.server.locked() as state:
            self.reconcile(state)
            if not state["workspaces"]:
                raise Refused("no_active_workspace", "no active workspace")
            workspace_id = options.get("workspace") or list(state["workspaces"])[-1]
            self._need("workspace", state["workspaces"], workspace_id)
            tab_id = self._new_tab(state, workspace_id, options.get("label") or "")
            pane = self._new_pane(state, tab_id, options.get("cwd") or os.getcwd(), self._env(options))
            return {"type": "tab_created", "tab": self.tab_info(state, tab_id), "root_pane": self.pane_info(pane)}

    def tab_list(self, args: List[str]) -> Any:
        with self.server.locked() as state:
            self.reconcile(state)
            return {"type": "tab_list", "tabs": [self.tab_info(state, one) for one in state["tabs"]]}

    def tab_close(self, args: List[str]) -> Any:
        (tab_id, *_), _ = parse(args, "tab close <tab_id>")
        with self.server.locked() as state:
            self._need("tab", state["tabs"], tab_id)
            self._close(state, [pane for pane in state["panes"].values() if pane["tab_id"] == tab_id])
        return {"type": "ok"}

    @staticmethod
    def _need(what: str, rows: Dict[str, Any], key: str) -> None:
        if key not in rows:
            raise Refused(what + "_not_found", "%s %s not found" % (what, key))

    def _close(self, state: Dict[str, Any], panes: List[Dict[str, Any]]) -> None:
        for pane in panes:
            self.server.tmux("kill-pane", "-t", pane["tmux"], check=False)
        self.reconcile(state)

    # ---- panes -----------------------------------------------------------------------------------------------

    def pane_split(self, args: List[str]) -> Any:
        found, options = parse(args, "pane split [<pane_id>|--pane ID|--current] --direction right|down", 0,
                               "pane direction ratio cwd", "current focus no-focus", "env")
        target = options.get("pane") or (found[0] if found else os.environ.get("HERDR_PANE_ID", ""))
        if options.get("direction") not in ("right", "down"):
            raise Usage("usage: herdr pane split [<pane_id>|--pane ID|--current] --direction right|down")
        with self.server.locked() as state:
            self.reconcile(state)
            old = self._pane(state, target)
            pane = self._new_pane(state, old["tab_id"], options.get("cwd") or old["cwd"], self._env(options))
            return {"type": "pane_info", "pane": self.pane_info(pane)}

    def pane_list(self, args: List[str]) -> Any:
        _, options = parse(args, "pane list [--workspace ID]", 0, "workspace")
        with self.server.locked() as state:
            self.reconcile(state)
            return {"type": "pane_list", "panes": [
                self.pane_info(pane) for pane in state["panes"].values()
                if options.get("workspace") in (None, pane["workspace_id"])]}

    def pane_get(self, args: List[str]) -> Any:
        (pane_id, *_), _ = parse(args, "pane get <pane_id>")
        return {"type": "pane_info", "pane": self.pane_info(self.look(self._pane, pane_id))}

    def pane_rename(self, args: List[str]) -> Any:
        (pane_id, *words), options = parse(args, "pane rename <pane_id> <label>|--clear", 1, "", "clear")
        with self.server.locked() as state:
            self.reconcile(state)
            pane = self._pane(state, pane_id)["live"]
            pane["label"] = "" if options.get("clear") else " ".join(words)
            return {"type": "pane_info", "pane": self.pane_info(pane)}

    def pane_close(self, args: List[str]) -> Any:
        (pane_id, *_), _ = parse(args, "pane close <pane_id>")
        with self.server.locked() as state:
            self.reconcile(state)
            self._close(state, [self._pane(state, pane_id)["live"]])
        return {"type": "ok"}

    def pane_run(self, args: List[str]) -> Any:
        """Text and Enter in one write, with no delay between them."""
        if len(args) < 2:
            raise Usage("usage: herdr pane run <pane_id> <command>")
        self._write(self.look(self._pane, args[0]), " ".join(args[1:]).encode() + b"\r")
        return None

    def pane_send_text(self, args: List[str]) -> Any:
        if len(args) < 2:
            raise Usage("usage: herdr pane send-text <pane_id> <text>")
        self._write(self.look(self._pane, args[0]), " ".join(args[1:]).encode())
        return None

    def pane_send_keys(self, args: List[str]) -> Any:
        if len(args) < 2:
            raise Usage("usage: herdr pane send-keys <pane_id> <key> [key ...]")
        self._press(self.look(self._pane, args[0]), args[1:])
        return None

    def pane_read(self, args: List[str]) -> Any:
        (pane_id, *_), options = parse(args, "pane read <pane_id>", 1, "source lines format", "ansi raw")
        return self._read(self.look(self._pane, pane_id), options)

    def pane_process_info(self, args: List[str]) -> Any:
        _, options = parse(args, "pane process-info [--pane ID|--current]", 0, "pane", "current")
        pane = self.look(self._pane, options.get("pane") or os.environ.get("HERDR_PANE_ID", ""))
        group = foreground_group(pane["pid"])
        return {"type": "pane_process_info", "process_info": {
            "pane_id": pane["pane_id"], "shell_pid": pane["pid"], "foreground_process_group_id": group,
            "tty": self.server.tmux("display-message", "-p", "-t", pane["tmux"], "#{pane_tty}").strip(),
            "foreground_processes": list(processes_of(group))}}

    def pane_wait_output(self, args: List[str]) -> Any:
        (pane_id, *_), options = parse(args, "pane wait-output <pane_id> (--match TEXT | --regex PATTERN)", 1,
                                       "match regex source lines timeout", "raw")
        if ("match" in options) == ("regex" in options):
            raise Usage("usage: herdr pane wait-output <pane_id> (--match TEXT | --regex PATTERN)")
        pattern = re.compile(options.get("regex") or re.escape(options["match"]))
        limit = milliseconds(options)
        begun = time.monotonic()
        while True:
            text = self._read(self.look(self._pane, pane_id), options)
            for line in text.splitlines():
                if pattern.search(line):
                    return {"type": "output_matched", "pane_id": pane_id, "revision": 0, "matched_line": line,
                            "read": {"pane_id": pane_id, "text": text, "truncated": False}}
            if limit is not None and (time.monotonic() - begun) * 1000 >= limit:
                raise Refused("timeout", "timed out waiting for output match")
            time.sleep(POLL_S)

    def pane_report_agent(self, args: List[str]) -> Any:
        (pane_id, *_), options = parse(args, "pane report-agent <pane_id> --source ID --agent LABEL --state STATE", 1,
                                       "source agent state message seq agent-session-id agent-session-path")
        for name in ("source", "agent", "state"):
            if name not in options:
                raise Usage("missing required --%s" % name)
        with self.server.locked() as state:
            self.reconcile(state)
            pane = self._pane(state, pane_id)["live"]
            pane["reported"] = {"agent": options["agent"], "state": options["state"], "source": options["source"]}
            self._reported_session(pane, options)

    def pane_report_agent_session(self, args: List[str]) -> Any:
        (pane_id, *_), options = parse(args, "pane report-agent-session <pane_id> --source ID --agent LABEL", 1,
                                       "source agent seq agent-session-id agent-session-path session-start-source")
        with self.server.locked() as state:
            self.reconcile(state)
            self._reported_session(self._pane(state, pane_id)["live"], options)

    @staticmethod
    def _reported_session(pane: Dict[str, Any], options: Dict[str, Any]) -> None:
        for kind in ("id", "path"):
            if "agent-session-" + kind in options:
                pane["session"] = {"source": options["source"], "agent": options["agent"], "kind": kind,
                                   "value": options["agent-session-" + kind]}

    def pane_release_agent(self, args: List[str]) -> Any:
        (pane_id, *_), _ = parse(args, "pane release-agent <pane_id>", 1, "source agent seq")
        with self.server.locked() as state:
            self.reconcile(state)
            self._pane(state, pane_id)["live"]["reported"] = {}

    # ---- input and output ------------------------------------------------------------------------------------

    def _write(self, pane: Dict[str, Any], data: bytes, brackets: bool = False) -> None:
        """Bytes into the terminal, as they are; with `brackets` only if the program there asked for them."""
        buffer = "b" + uuid.uuid4().hex
        self.server.tmux("load-buffer", "-b", buffer, "-", input=data)
        self.server.tmux("paste-buffer", "-d", "-r", *(["-p"] if brackets else []), "-b", buffer, "-t", pane["tmux"])

    def _press(self, pane: Dict[str, Any], keys: List[str]) -> None:
        names = []
        for key in keys:
            plain = key.lower()
            if plain in KEYS:
                names.append(KEYS[plain])
            elif re.fullmatch(r"(ctrl|c)[+-][a-z]", plain):
                names.append("C-" + plain[-1])
            elif len(key) == 1:
                names.append(key)
            else:
                raise Refused("invalid_key", "unsupported key %s" % key)
        self.server.tmux("send-keys", "-t", pane["tmux"], *names)

    def _read(self, pane: Dict[str, Any], options: Dict[str, Any]) -> str:
        source = options.get("source", "recent")
        if source not in ("visible", "recent", "recent-unwrapped", "detection"):
            raise Usage("invalid read source: %s" % source)
        lines = int(options.get("lines") or 0)
        words = ["capture-pane", "-p", "-t", pane["tmux"]]
        words += ["-J"] if source == "recent-unwrapped" else []
        words += ["-e"] if options.get("ansi") or options.get("format") == "ansi" else []
        words += ["-S", "-"] if source.startswith("recent") else []
        text = self.server.tmux(*words).rstrip("\n")
        rows = text.split("\n")
        return "\n".join(rows[-lines:] if lines else rows[-500:]) + "\n"

    # ---- agents ----------------------------------------------------------------------------------------------

    def agent_list(self, args: List[str]) -> Any:
        if args:
            raise Usage("usage: herdr agent list")
        with self.server.locked() as state:
            self.reconcile(state)
            return {"type": "agent_list", "agents": [self.agent_info(pane) for pane in state["panes"].values()
                                                     if pane["agent"] or pane["name"]]}

    def agent_get(self, args: List[str]) -> Any:
        if len(args) != 1:
            raise Usage("usage: herdr agent get <target>")
        return {"type": "agent_info", "agent": self.agent_info(self.look(self._agent, args[0]))}

    def agent_rename(self, args: List[str]) -> Any:
        if len(args) != 2:
            raise Usage("usage: herdr agent rename <target> <name>|--clear")
        with self.server.locked() as state:
            self.reconcile(state)
            pane = self._agent(state, args[0])["live"]
            self._name(state, args[1]) if args[1] != "--clear" else None
            pane["name"] = None if args[1] == "--clear" else args[1]
            return {"type": "agent_info", "agent": self.agent_info(pane)}

    @staticmethod
    def _name(state: Dict[str, Any], name: str) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,31}", name):
            raise Refused("invalid_agent_name", "invalid agent name %s" % name)
        if any(pane["name"] == name for pane in state["panes"].values()):
            raise Refused("agent_name_taken", "agent name %s is already in use" % name)

    def agent_start(self, args: List[str]) -> Any:
        at = args.index("--") if "--" in args else len(args)
        usage = "agent start <name> --kind KIND --pane ID [--timeout MS] [-- <agent-args...>]"
        found, options = parse(args[:at], usage, 1, "kind pane timeout")
        for name in ("kind", "pane"):
            if name not in options:
                raise Usage("missing required --" + name)
        limit = milliseconds(options)
        argv = [KINDS.get(options["kind"], ""), *args[at + 1:]]
        with self.server.locked() as state:
            self.reconcile(state)
            if not argv[0]:
                raise Refused("unsupported_agent_kind", "unsupported agent kind %s" % options["kind"])
            if limit is not None and not 3000 < limit <= 300000:
                raise Refused("invalid_agent_timeout", "timeout must be greater than 3000 and at most 300000")
            if any(ord(letter) < 32 or ord(letter) == 127 for word in argv for letter in word):
                raise Refused("invalid_agent_argument", "agent arguments must not contain control characters")
            if options["pane"] not in state["panes"]:
                raise Refused("agent_pane_not_found", "pane %s not found" % options["pane"])
            self._name(state, found[0])
            pane = self._pane(state, options["pane"])
            if pane["command"] not in SHELLS or pane["name"]:
                raise Refused("agent_pane_busy", "pane %s is not an idle shell" % pane["pane_id"])
            pane["live"].update(name=found[0], launch_pending=True, worked=False)
            self._write(pane, (" ".join(map(shlex.quote, argv))).encode() + b"\r")
        return {"type": "agent_started", "agent": self._started(found[0], (limit or 30000) / 1000.0), "argv": argv}

    def _started(self, name: str, timeout: float) -> Dict[str, Any]:
        end = time.monotonic() + timeout
        seen = False
        while time.monotonic() < end:
            try:
                pane = self.look(self._agent, name)
            except Refused:
                raise Refused("agent_start_failed", "agent process exited before becoming interactive") from None
            if seen and not pane["agent"]:
                self._unname(name)
                raise Refused("agent_start_failed", "agent process exited before becoming interactive")
            seen = seen or bool(pane["agent"])
            if pane["agent_status"] == "blocked":
                raise Refused("agent_not_ready", "agent %s is blocked during startup and is not ready for prompts"
                              % name)
            if pane["agent"] and pane["agent_status"] in ("idle", "done") and not pane["launch_pending"]:
                return self.agent_info(pane)
            time.sleep(POLL_S)
        self._unname(name)
        raise Refused("timeout", "timed out waiting for agent startup")

    def _unname(self, name: str) -> None:
        with self.server.locked() as state:
            for pane in state["panes"].values():
                if pane["name"] == name:
                    pane.update(name=None, launch_pending=False)

    def agent_prompt(self, args: List[str]) -> Any:
        if len(args) < 2:
            raise Usage("usage: herdr agent prompt <target> <text> [--wait] [--until STATUS]... [--timeout MS]"
                        if not args else "agent prompt requires text")
        _, options = parse(args[2:], "agent prompt", 0, "timeout", "wait", "until")
        for name in ("until", "timeout"):
            if options.get(name) and not options.get("wait"):
                raise Usage("--%s requires --wait" % name)
        until, limit = self._until(options), milliseconds(options)
        if not args[1]:
            raise Refused("empty_agent_prompt", "agent prompt must not be empty")
        pane = self.look(self._agent, args[0])
        if pane["agent_status"] == "blocked":
            raise Refused("agent_blocked", "agent %s is blocked and needs an answer" % args[0])
        if not pane["agent"] or pane["launch_pending"]:
            raise Refused("agent_not_ready", "agent %s is not an active named agent" % args[0])
        if self.fault != "lost":
            self._write(pane, args[1].encode(), brackets=True)
            time.sleep(PROMPT_SUBMIT_DELAY_S)
            if self.fault != "unsubmitted":
                self.server.tmux("send-keys", "-t", pane["tmux"], "Enter")
        if self.fault == "stalled":
            raise self._stalled(pane, PROMPT_EFFECT_TIMEOUT_MS)
        if options.get("wait") and self.fault not in ("unsubmitted", "early"):
            pane = self._prompted(args[0], pane, until, limit)
        return {"type": "agent_prompted", "agent": self.agent_info(pane)}

    @staticmethod
    def _until(options: Dict[str, Any]) -> Tuple[str, ...]:
        for status in options["until"]:
            if status not in STATUSES:
                raise Usage("invalid agent status: %s" % status)
        return tuple(options["until"]) or SETTLED

    @staticmethod
    def _stalled(pane: Dict[str, Any], limit: int) -> Refused:
        return Refused("agent_prompt_stalled", "agent prompt produced no observed state change within %d ms; status is "
                       "%s and state_change_seq remained %d" % (limit, pane["agent_status"], pane["seq"]))

    def _prompted(self, target: str, before: Dict[str, Any], until: Tuple[str, ...], limit: Optional[int]) \
            -> Dict[str, Any]:
        """Activity first, within 5 s, then one of `until`."""
        begun = time.monotonic()
        moved = before["agent_status"] == "working"
        while True:
            pane = self._still(target, before)
            passed = (time.monotonic() - begun) * 1000.0
            moved = moved or pane["seq"] != before["seq"]
            if moved and pane["agent_status"] in until and pane["seq"] != before["seq"]:
                return pane
            if not moved and passed >= PROMPT_EFFECT_TIMEOUT_MS and (limit is None or limit > passed):
                raise self._stalled(pane, PROMPT_EFFECT_TIMEOUT_MS)
            if limit is not None and passed >= limit:
                raise Refused("timeout", "timed out waiting for agent status")
            time.sleep(POLL_S)

    def _still(self, target: str, before: Dict[str, Any]) -> Dict[str, Any]:
        try:
            pane = self.look(self._agent, target)
        except Refused:
            pane = {"agent": None}
        if pane["agent"] != before["agent"] or pane.get("terminal_id") != before["terminal_id"]:
            raise Refused("agent_not_running", "agent is no longer running")
        return pane

    def agent_wait(self, args: List[str]) -> Any:
        (target, *_), options = parse(args, "agent wait <target> [--until STATUS]... [--timeout MS]", 1, "timeout", "",
                                      "until")
        until, limit = self._until(options), milliseconds(options)
        begun, first = time.monotonic(), self.look(self._agent, target)
        while True:
            pane = self._still(target, first)
            if pane["agent_status"] in until:
                return {"type": "agent_info", "agent": self.agent_info(pane)}
            if limit is not None and (time.monotonic() - begun) * 1000 >= limit:
                raise Refused("timeout", "timed out waiting for agent status")
            time.sleep(POLL_S)

    def agent_send_keys(self, args: List[str]) -> Any:
        if len(args) < 2:
            raise Usage("usage: herdr agent send-keys <target> <key> [key ...]")
        pane = self.look(self._agent, args[0])
        if not pane["agent"]:
            raise Refused("agent_not_ready", "agent %s is not an active named agent" % args[0])
        self._press(pane, args[1:])
        return {"type": "ok"}

    def agent_read(self, args: List[str]) -> Any:
        (target, *_), options = parse(args, "agent read <target>", 1, "source lines format", "ansi")
        return self._read(self.look(self._agent, target), options)

    def agent_focus(self, args: List[str]) -> Any:
        """Seen by a person: what was done becomes idle."""
        with self.server.locked() as state:
            self.reconcile(state)
            pane = self._agent(state, args[0])["live"]
            state["focused"] = pane["pane_id"]
            pane["worked"] = False
            self.reconcile(state)
            return {"type": "agent_info", "agent": self.agent_info(pane)}

    def api_snapshot(self, args: List[str]) -> Any:
        with self.server.locked() as state:
            self.reconcile(state)
            panes = list(state["panes"].values())
            return {"type": "session_snapshot", "snapshot": {
                "workspaces": [self.workspace_info(state, one) for one in state["workspaces"]],
                "tabs": [self.tab_info(state, one) for one in state["tabs"]],
                "panes": [self.pane_info(pane) for pane in panes],
                "agents": [self.agent_info(pane) for pane in panes if pane["agent"] or pane["name"]]}}

    def restore(self, resume: bool) -> None:
        """After a restart: the same places and labels, new shells, no agent names; conversations are resumed."""
        with self.server.locked() as state:
            old, state["panes"] = state["panes"], {}
            for pane in old.values():
                new = self._new_pane(state, pane["tab_id"], pane["cwd"], pane["env"], pane["pane_id"], pane["label"])
                session = pane["session"]
                if resume and session and session["kind"] == "id":
                    program = KINDS.get(session["agent"], session["agent"])
                    command = RESUME.get(session["agent"], program + " --resume %s") % shlex.quote(session["value"])
                    self._write(new, command.encode() + b"\r")


def stat_of(pid: int) -> List[bytes]:
    with open("/proc/%d/stat" % pid, "rb") as file:
        return file.read().rpartition(b")")[2].split()


def foreground_group(pid: int) -> int:
    return int(stat_of(pid)[5])


def cwd_of(pid: Optional[int]) -> str:
    with contextlib.suppress(OSError, TypeError, ValueError):
        return os.readlink("/proc/%d/cwd" % foreground_group(pid or -1))
    return ""


def processes_of(group: int) -> Iterator[Dict[str, Any]]:
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(name)
            if int(stat_of(pid)[2]) == group:
                with open("/proc/%d/cmdline" % pid, "rb") as file:
                    argv = file.read().decode("utf-8", "replace").split("\0")[:-1]
                with open("/proc/%d/comm" % pid) as file:
                    comm = file.read().strip()
                first = argv[0] if argv else comm
                yield {"pid": pid, "name": os.path.basename(first), "argv0": first, "argv": argv,
                       "cmdline": " ".join(argv), "cwd": os.readlink("/proc/%d/cwd" % pid)}


# ---- the server's own commands -----------------------------------------------------------------------------

def serve(server: Server) -> int:
    """`herdr server`: in the foreground until `server stop`, SIGTERM, or the death of its terminals."""
    if server.running():
        sys.stderr.write("herdr server is already running\n")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    environment = {name: value for name, value in os.environ.items() if name not in ("TMUX", "TMUX_PANE")}
    os.environ.clear()
    os.environ.update(environment)
    with server.locked() as state:
        state["pid"] = os.getpid()
    server.tmux("new-session", "-d", "-s", "server", "exec sleep 1000000")
    resume = True
    config = os.environ.get("HERDR_CONFIG_PATH") or os.path.join(
        os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "herdr", "config.toml")
    if os.path.exists(config):
        with open(config) as file:
            resume = not re.search(r"resume_agents_on_restore\s*=\s*false", file.read())
    App(server, "").restore(resume)
    open(server.socket, "w").close()
    try:
        while server.tmux("list-sessions", check=False):
            time.sleep(0.1)
        return 1
    finally:
        server.tmux("kill-server", check=False)
        with server.locked() as state:
            if state["pid"] == os.getpid():
                state["pid"] = 0
        with contextlib.suppress(OSError):
            os.unlink(server.socket)


def stop(server: Server) -> int:
    with server.locked() as state:
        pid = state["pid"]
    if not server.running():
        raise Refused("server_not_running", missing(server))
    os.kill(pid, signal.SIGTERM)
    while alive(pid):
        time.sleep(POLL_S)
    return 0


def missing(server: Server) -> str:
    return "no herdr server is running at %s; run `herdr` to start one" % server.socket


def status(server: Server, args: List[str]) -> Any:
    running = server.running()
    info = {"status": "running" if running else "not_running", "running": running, "socket": server.socket,
            "version": VERSION if running else None, "protocol": PROTOCOL if running else None,
            "compatible": True if running else None, "session": None if server.name == "default" else server.name,
            "restart_needed": False}
    if "--json" not in args:
        return "status: %s\nsocket: %s\n" % ("running" if running else "not running", server.socket)
    return json.dumps(info if args[:1] == ["server"] else {
        "client": {"version": VERSION, "channel": "stable", "protocol": PROTOCOL}, "server": info}) + "\n"


def sessions(server: Server, args: List[str]) -> Any:
    base = os.path.dirname(server.folder)
    if args[:1] == ["list"]:
        rows = [{"name": name, "running": Server(os.path.join(base, name), name).running()}
                for name in sorted(os.listdir(base))]
        return json.dumps({"sessions": rows}) + "\n" if "--json" in args else \
            "".join("%s\t%s\n" % (row["name"], "running" if row["running"] else "stopped") for row in rows)
    if args[:1] in (["stop"], ["delete"]) and len(args) > 1:
        other = Server(os.path.join(base, args[1]), args[1])
        if other.running():
            stop(other)
        if args[0] == "delete":
            shutil.rmtree(other.folder)
        return ""
    raise Usage("usage: herdr session list|stop <name>|delete <name> [--json]")


def run(server: Server, args: List[str]) -> Any:
    """(what is printed) of one command. A dict is the result of an envelope."""
    if args[:1] in (["--version"], ["version"]):
        return "herdr %s\n" % VERSION
    if args[:1] == ["status"]:
        return status(server, args[1:])
    if args[:1] == ["session"]:
        return sessions(server, args[1:])
    if args == ["server", "stop"]:
        stop(server)
        return ""
    verb = " ".join(args[:2])
    method = getattr(App, re.sub("[ -]", "_", verb), None) if re.fullmatch(
        r"(workspace|tab|pane|agent|api) [a-z-]+", verb) else None
    if method is None or verb in ("pane info", "agent info", "tab info", "workspace info"):
        raise Usage("unknown command: herdr %s" % verb)
    fault = server.fault(verb)
    if fault == "hang":
        raise Hang()
    if fault.startswith("slow:"):
        time.sleep(float(fault[len("slow:"):]))
    if fault == "down" or not server.running():
        raise Refused("server_not_running", missing(server))
    if fault.startswith("error:"):
        raise Refused(fault[len("error:"):], "ordered by the test")
    return method(App(server, fault), args[2:])


def main() -> int:
    args = sys.argv[1:]
    name = None
    if args[:1] == ["--session"] and len(args) > 1:
        name, args = args[1], args[2:]
    code, server = 0, None
    try:
        server = open_server(name)
        if args == ["server"]:
            return serve(server)
        printed = run(server, args)
        if isinstance(printed, dict):
            sys.stdout.write(json.dumps({"id": "cli:" + ":".join(args[:2]), "result": printed}) + "\n")
        elif printed:
            sys.stdout.write(printed)
    except Refused as error:
        sys.stderr.write(json.dumps({"id": "cli:" + ":".join(args[:2]),
                                     "error": {"code": error.code, "message": error.message}}) + "\n")
        code = 1
    except Usage as error:
        sys.stderr.write("%s\n" % error)
        code = 2
    except Hang:
        server.note(args, -1)
        while True:
            time.sleep(3600)
    server.note(args, code) if server else None
    return code


if __name__ == "__main__":
    sys.exit(main())

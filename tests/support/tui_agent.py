"""A stand-in for an agent's terminal interface, run in a real pane: `python tui_agent.py [options] [PROMPT]`.

Modelled on what Claude Code, Codex and opencode were seen to do (`--like` takes one's habits): a composer at the
bottom, bracketed paste, placeholders for long pastes, start-up dialogs, a spinner, permission dialogs, transcripts on
disk, resume. It obeys as a willing model would: it reads the brief and runs the publish commands that stand in the
prompt, in its own shell. Everything it received is in the journal, one JSON line each; `support.agents` reads it.

Options come from TUI_AGENT_OPTIONS (split as by a shell) and then from the command line. Only the standard library,
and no import of this package: it starts in a pane, hundreds of times.
"""
from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
import tty
import unicodedata
import uuid
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

# ---- what a prompt says ------------------------------------------------------------------------------------

_WORD = r"(?:'[^']*'|\"[^\"]*\"|[^\s'\"`]+)"
_PUBLISH = re.compile(r"(?:%s ){1,4}?publish .*" % _WORD)
_AFTER_COLON = re.compile(r":\s+(%s|\$MAM_PUBLISH_CMD .*)" % _PUBLISH.pattern)
_ALONE = re.compile(r"^\W*?((?=[/~'\"\w.])%s|\$MAM_PUBLISH_CMD .*)" % _PUBLISH.pattern)


def publish_commands(text: str) -> Dict[str, str]:
    """event -> the shell command that reports it, as the prompt gives it: one a line, after a colon or alone."""
    commands: Dict[str, str] = {}
    for line in re.split(r"[\r\n]+", text):
        event = re.search(r"--event[ =](\w+)", line)
        found = event and (_AFTER_COLON.search(line) or _ALONE.search(line.strip()))
        if event and found:
            commands.setdefault(event.group(1), found.group(1).strip().rstrip("`"))
    return commands


def brief_of(text: str) -> str:
    """The path of the brief that the prompt points to, or "": the first absolute path of an .md file."""
    for line in re.split(r"[\r\n]+", text):
        found = None if "--event" in line else re.search(r"(?:^|[\s'\"`(])(/[^\r\n]*?\.md)(?=$|[\s'\"`),.;])", line)
        if found:
            return found.group(1)
    return ""


# ---- options -----------------------------------------------------------------------------------------------

# What `--like` sets, where the command line does not; as seen of claude 2.1.332, codex 0.171.0, opencode 1.18.33 and
# pi 0.73.1. glyph: before the composer's text. hint: dim text in an empty composer. frame: what is around it. A paste
# of more than `limit` (lines, characters) is shown as the placeholder. busy_line, busy_foot: above and below the
# composer while it works; foot: below it when it does not; {sign} turns. ctrl_c: how many end it.
HABITS: Dict[str, Dict[str, Any]] = {
    "claude": {"glyph": "\u276f", "hint": "", "frame": "rules", "placeholder": "[Pasted text #{n} +{more} lines]",
               "limit": (3, 800), "ctrl_c": 2, "suppress_ms": 100.0, "busy_line": "{sign} Unraveling\u2026",
               "busy_foot": "  \u23f8 manual mode on \u00b7 esc to interrupt \u00b7 \u2190 for agents",
               "foot": "  \u23f8 manual mode on \u00b7 ? for shortcuts", "done": "\u273b Worked for {s}s",
               "titles": ("\u2733 Claude Code", "\u2733 Claude Code"),
               "exit_message": "Resume this session with:\nclaude --resume {id}"},
    "codex": {"glyph": "\u203a", "hint": "Ask Codex to do anything", "frame": "none",
              "placeholder": "[Pasted Content {chars} chars]", "limit": (100000, 1000), "ctrl_c": 1,
              "suppress_ms": 120.0, "busy_line": "\u25e6 Working ({s}s \u2022 esc to interrupt)",
              "busy_foot": "  stand-in default \u00b7 {cwd}", "foot": "  stand-in default \u00b7 {cwd}",
              "done": "  Worked for {s}s", "titles": ("{dir}", "{braille} {dir}"),
              "exit_message": "To continue this session, run:\n  codex resume {id}"},
    "opencode": {"glyph": "", "hint": 'Ask anything\u2026 "Fix a TODO in the codebase"', "frame": "gutter",
                 "placeholder": "[Pasted ~{lines} lines]", "limit": (2, 150), "ctrl_c": 1, "suppress_ms": 0.0,
                 "busy_line": "", "busy_foot": "   {blocks}  esc interrupt", "foot": "   {cwd}", "done": "",
                 "titles": ("OpenCode", "OpenCode"), "exit_message": "  Session   A job\n  Continue  opencode -s {id}"},
    "pi": {"glyph": "", "hint": "", "frame": "rules", "placeholder": "[paste #{n} +{lines} lines]", "limit": (10, 1000),
           "ctrl_c": 2, "suppress_ms": 0.0, "busy_line": " {braille} Working...", "busy_foot": "{cwd}",
           "foot": "{cwd}", "done": "", "titles": ("\u03c0 - {dir}", "\u03c0 - {dir}"), "exit_message": ""},
    "plain": {"glyph": "\u276f", "hint": "", "frame": "rules", "placeholder": "", "limit": (0, 0), "ctrl_c": 2,
              "suppress_ms": 0.0, "busy_line": "{sign} Working\u2026 ({s}s \u00b7 esc to interrupt)",
              "busy_foot": "  ? for shortcuts", "foot": "  ? for shortcuts", "done": "",
              "titles": ("\u2733 {name}", "\u2802 {name}"),
              "exit_message": "Resume this session with:\ntui-agent --resume {id}"},
}

_CONFIRM = "Enter to confirm \u00b7 Esc to cancel"

# name -> (question, choices, the preselected one, what each does: go, exit, no or always; foot, numbered)
DIALOGS: Dict[str, Tuple[str, List[str], int, List[str], str, bool]] = {
    "trust": (
        "Accessing workspace:\n\n{cwd}\n\nQuick safety check: Is this a project you created or one you trust?\n\n"
        "Security guide",
        ["No, exit", "Yes, I trust this folder"], 0, ["exit", "go"], _CONFIRM, False),
    "trust-numbered": (
        "Do you trust the files in this folder?\n\n{cwd}",
        ["Yes, proceed", "No, exit"], 1, ["go", "exit"], _CONFIRM, True),
    "bypass": (
        "WARNING: Claude Code running in Bypass Permissions mode\n\nIn Bypass Permissions mode, Claude Code will not "
        "ask for your approval\nbefore running potentially dangerous commands.",
        ["No, exit", "Yes, I accept"], 0, ["exit", "go"], _CONFIRM, True),
    "api-key": (
        "Detected a custom API key in your environment\n\nDo you want to use this API key?",
        ["Yes", "No (recommended)"], 1, ["go", "go"], _CONFIRM, True),
    "permission": (
        "Bash command\n\nRun shell command\n{command}\n\nThis command requires approval\nDo you want to proceed?",
        ["Yes", "Yes, and don\u2019t ask again", "No"], 0, ["go", "always", "no"],
        "Esc to cancel \u00b7 Tab to amend", True),
    "update": (
        "A new version is available",
        ["Update now", "Skip"], 0, ["exit", "go"], "Press enter to continue", True),
}


def parse_options(argv: List[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tui-agent", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("prompt", nargs="?", help="submitted once, when nothing stands in the way any more")
    add("--prompt", dest="prompt_option", metavar="P", help="the same")
    add("-p", "--print", action="store_true", dest="headless", help="no interface: obey the prompt (or stdin), exit")
    add("--like", choices=sorted(HABITS), default="plain")
    add("--name", default="agent", help="in the banner and the title")
    add("--title", help="the terminal's title, instead of the name with a sign of being busy")
    add("--glyph")
    add("--hint", help="dim text in an empty composer")
    add("--placeholder", help="how a long paste is shown: {n} {lines} {more} {chars}; empty: in full")
    add("--composer-rows", type=int, default=12, help="a longer text is shown by its last rows")
    add("--ctrl-c", type=int, help="how many in a second end it; 0: none does, nor does /exit")
    add("--exit-slow", type=float, default=0.0, metavar="S", help="seconds between the wish to exit and the end")
    add("--journal", default=os.environ.get("TUI_AGENT_JOURNAL"))
    add("--no-daemon", action="store_true", help="as codex has it: nothing changes")
    work = parser.add_argument_group("work")
    work.add_argument("--events", default="started,progress,completed",
                      help="what it publishes, in order; 'hang' works for ever, 'none' publishes nothing; after "
                           "permission_required its turn ends, and the next prompt makes it go on")
    work.add_argument("--work", type=float, default=0.0, metavar="S", help="seconds of thought before each event")
    work.add_argument("--think", type=float, default=0.1, metavar="S", help="seconds before the first thing it does")
    work.add_argument("--busy", type=float, default=0.0, metavar="S", help="at work for S seconds from the start")
    work.add_argument("--tool-env", action="append", default=[], metavar="K=V", help="for the commands it runs")
    work.add_argument("--ask-tools", action="store_true",
                      help="a permission dialog before every command, unless allowed by --allowedTools or --yolo")
    work.add_argument("--allowedTools", action="append", default=[], metavar="RULE", help="'Bash(PREFIX:*)' or 'Bash'")
    work.add_argument("--yolo", "--dangerously-skip-permissions", action="store_true")
    keep = parser.add_argument_group("conversations")
    keep.add_argument("--session-id", metavar="ID", help="of a new conversation; refused if there is one")
    keep.add_argument("--resume", "-r", "-s", "--session", metavar="ID",
                      help="a conversation on disk; refused if there is none; also as `resume ID`")
    keep.add_argument("--transcripts", metavar="DIR", default=os.environ.get("TUI_AGENT_TRANSCRIPTS")
                      or os.path.join(os.path.expanduser("~"), ".tui-agent"),
                      help="DIR/ID.jsonl, from the first prompt on; DIR/live/PID.json while it runs")
    faults = parser.add_argument_group("faults", "MOMENT is start, paste (right after one), submit, "
                                       "event:NAME (before it), or seconds from the start")
    faults.add_argument("--slow-start", type=float, default=0.0, metavar="S", help="what comes before is lost")
    faults.add_argument("--drawn-early", action="store_true", help="the composer is seen before input is read")
    faults.add_argument("--dialog", action="append", default=[], metavar="NAME[@MOMENT]",
                        help="one of %s" % ", ".join(DIALOGS))
    faults.add_argument("--draft", default="", help="stands in the composer already")
    faults.add_argument("--swallow-enters", type=int, default=0, metavar="N")
    faults.add_argument("--swallow-every", type=int, default=0, metavar="N",
                        help="the first Enter after every Nth paste, too")
    faults.add_argument("--suppress-ms", type=float, help="an Enter this soon after a paste is a newline")
    faults.add_argument("--lose-pastes", type=int, default=0, metavar="N")
    faults.add_argument("--die", default="", metavar="MOMENT[=STATUS]", help="also by the prompt '/die [STATUS]'")
    if "resume" in argv[:-1]:                    # as codex has it
        at = argv.index("resume")
        argv = argv[:at] + ["--resume"] + argv[at + 1:]
    options = parser.parse_args(argv)
    for name, value in HABITS[options.like].items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    if options.placeholder and not options.limit[0]:
        options.limit = HABITS["claude"]["limit"]
    options.prompt = options.prompt_option or options.prompt
    return options


# ---- journal and conversation ------------------------------------------------------------------------------

class Journal:
    """One line per thing that happened, whole or not at all, however many agents share the file."""

    def __init__(self, path: Optional[str]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if path else None

    def __call__(self, event: str, **fields: Any) -> None:
        if self._fd is not None:
            row = {"event": event, "at": time.monotonic(), "pid": os.getpid(), **fields}
            os.write(self._fd, (json.dumps(row) + "\n").encode())


class Conversation:
    def __init__(self, options: argparse.Namespace) -> None:
        folder = options.transcripts
        self.id = options.resume or options.session_id or str(uuid.uuid4())
        self.path = os.path.join(folder, self.id + ".jsonl")
        self._live = os.path.join(folder, "live", "%d.json" % os.getpid())
        if options.resume and not os.path.exists(self.path):
            sys.exit("No conversation found with session ID: %s" % self.id)
        if options.session_id and not options.resume and os.path.exists(self.path):
            sys.exit("Error: Session ID %s is already in use." % self.id)
        self.others = self._others(os.path.join(folder, "live"))
        os.makedirs(os.path.dirname(self._live), exist_ok=True)
        with open(self._live, "w") as file:
            json.dump({"pid": os.getpid(), "sessionId": self.id, "cwd": os.getcwd()}, file)

    def _others(self, folder: str) -> List[int]:
        """Living processes that are in the same conversation."""
        found = []
        for name in os.listdir(folder) if os.path.isdir(folder) else []:
            try:
                with open(os.path.join(folder, name)) as file:
                    row = json.load(file)
                os.kill(row["pid"], 0)
            except (OSError, ValueError):
                continue                         # gone, or half written
            found += [row["pid"]] if row["sessionId"] == self.id else []
        return found

    def lines(self) -> Iterator[Tuple[str, str]]:
        if os.path.exists(self.path):
            with open(self.path) as file:
                for line in file:
                    row = json.loads(line)
                    yield row["role"], row["text"]

    def add(self, role: str, text: str) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps({"role": role, "text": text, "sessionId": self.id, "cwd": os.getcwd()}) + "\n")

    def close(self) -> None:
        if os.path.exists(self._live):
            os.unlink(self._live)


# ---- the model and its shell tool --------------------------------------------------------------------------

class Turn:
    """One turn of work, in a thread of its own. `step(kind, text)` reports; `allowed(command)` may ask."""

    def __init__(self, options: argparse.Namespace, journal: Journal, session: str, step: Callable[[str, str], None],
                 allowed: Callable[[str], bool], moment: Callable[[str], bool]) -> None:
        self.options, self.journal, self.session = options, journal, session
        self._step, self._allowed, self._moment = step, allowed, moment
        self.stopped = threading.Event()
        self.rest: List[str] = []                # events left when a turn ended with a question
        self._commands: Dict[str, str] = {}
        self._process: Optional["subprocess.Popen[bytes]"] = None

    def run(self, text: str) -> None:
        self.stopped.wait(self.options.think)
        if not publish_commands(text):           # a pointer: what is to be done stands in the file
            text = self._read(brief_of(text)) or text
        commands = publish_commands(text)
        if commands:
            self._commands = commands
            self.rest = [event for event in self.options.events.split(",") if event not in ("", "none")]
            self._read(brief_of(text))
        elif not self.rest:
            self.stopped.wait(self.options.work)
            self._step("say", "I see.")
        while self.rest and not self.stopped.is_set():
            event = self.rest.pop(0)
            if event == "hang":
                self.stopped.wait()
                break
            if self.options.work and self.stopped.wait(self.options.work):
                break
            if event in self._commands:
                if not self._moment("event:" + event) or not self._obey(event, self._commands[event]):
                    self.rest = []
                if event == "permission_required":
                    break

    def _read(self, path: str) -> str:
        if not path or not self._allowed("cat " + path):
            return ""
        code, out = self._shell("cat " + shlex.quote(path))
        self.journal("brief", path=path, code=code, bytes=len(out), text=out[:4000])
        self._step("tool", "Read(%s)" % path)
        return out if code == 0 else ""

    def _obey(self, event: str, command: str) -> bool:
        """Run it as the prompt demands: 75 is tried again, 4 ends the work."""
        for _ in range(20):
            if self.stopped.is_set():
                return False
            if not self._allowed(command):
                self._step("say", "I was not allowed to run that.")
                return False
            code, out = self._shell(command)
            self.journal("ran", what=event, command=command, code=code, out=out[-2000:])
            self._step("tool", "Bash(%s)\n%s" % (command, out.strip()[-400:]))
            if code != 75 or self.stopped.wait(0.5):
                return code != 4
        return False

    def _shell(self, command: str) -> Tuple[int, str]:
        environment = dict(os.environ, TUI_AGENT_SESSION_ID=self.session)
        environment.update(pair.split("=", 1) for pair in self.options.tool_env)
        self._process = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, env=environment,
                                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        out = self._process.communicate()[0]
        return self._process.returncode, out.decode("utf-8", "replace")

    def stop(self) -> None:
        self.stopped.set()
        process = self._process
        if process is not None and process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process = None             # just ended


# ---- the interface -----------------------------------------------------------------------------------------

_KEYS = {b"\r": "Enter", b"\n": "C-j", b"\x1b": "Escape", b"\x7f": "BSpace", b"\t": "Tab"}
_SEQUENCE = re.compile(rb"\x1b(?:\[[0-9;?<]*[ -/]*[@-~]|O[A-Za-z])")
_SEQUENCES = {b"\x1b[A": "Up", b"\x1b[B": "Down", b"\x1b[C": "Right", b"\x1b[D": "Left", b"\x1bOA": "Up",
              b"\x1bOB": "Down", b"\x1b[I": "FocusIn", b"\x1b[O": "FocusOut"}
START, END = b"\x1b[200~", b"\x1b[201~"
BRAILLE = "\u280b\u2819\u2839\u2838\u283c\u2834\u2826\u2827\u2807\u280f"
SPINNER = "\u00b7\u2722\u2733\u2736\u273b\u273d"


class Ended(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class Interface:
    def __init__(self, options: argparse.Namespace, journal: Journal, talk: Conversation) -> None:
        self.options, self.journal, self.talk = options, journal, talk
        self.composer = options.draft
        self._pasted: List[Tuple[str, str]] = []         # (placeholder in the composer, what it stands for)
        self._held, self._typed = b"", ""
        self._dialogs: List[Dict[str, Any]] = []         # the first one is on the screen
        self._pending: List[Tuple[str, str]] = []        # (moment, dialog) still to come
        for name in options.dialog:
            name, _, moment = name.partition("@")
            self._pending.append((moment or ("submit" if name == "permission" else "start"), name))
        self._die = options.die
        self._launch = options.prompt
        self._queue: List[str] = []
        self._turn: Optional[Turn] = None
        self._resting: Optional[Turn] = None             # it asked, and goes on with the next prompt
        self._started = self._turn_began = time.monotonic()
        self._last_paste, self._last_ctrl_c, self._submitted, self._pastes = -1e9, [-1e9], 0, 0
        self._swallow, self._lose = options.swallow_enters, options.lose_pastes
        self._notice = ""
        self._always = False
        self._drawn_rows = self._frame = 0
        self._out: List[str] = []                        # for the transcript, not drawn yet
        self._lock = threading.Lock()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self._ended: Optional[Ended] = None

    # ---- life ------------------------------------------------------------------------------------------------

    def run(self) -> int:
        saved = termios.tcgetattr(0)
        signal.signal(signal.SIGWINCH, lambda *_: self._wake())
        status, why = 1, "crash"
        try:
            self._banner()
            if self.options.drawn_early:
                self._enter_screen()
                self._draw()
            if self.options.slow_start:
                self._sleep_deaf(self.options.slow_start)
            self._enter_screen()
            termios.tcflush(0, termios.TCIFLUSH)
            self._moment("start")
            self.journal("ready")
            self._loop()
        except Ended as ended:
            status, why = ended.status, ended.why
        finally:
            if self._turn:
                self._turn.stop()
            termios.tcsetattr(0, termios.TCSANOW, saved)
            os.write(1, b"\x1b[?2004l\x1b[?25h\r\n")
            self.talk.close()
            self.journal("exit", code=status, why=why)
        return status

    def _enter_screen(self) -> None:
        tty.setraw(0, termios.TCSANOW)
        self._write("\x1b[?2004h")

    def _sleep_deaf(self, seconds: float) -> None:
        """Start slowly: a terminal that nobody reads yet."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(max(0.0, min(0.05, end - time.monotonic())))

    def _banner(self) -> None:
        self._write("\r\n * %s (stand-in), %s\r\n   session %s\r\n\r\n" % (
            self.options.name, os.getcwd(), self.talk.id))
        for role, text in self.talk.lines():
            self._say(self._as_said(text) if role == "user" else "\u25cf " + text)

    def _loop(self) -> None:
        busy_until = self._started + self.options.busy
        while True:
            now = time.monotonic()
            for moment, _ in list(self._pending) + ([(self._die.split("=")[0], "")] if self._die else []):
                if re.fullmatch(r"[0-9.]+", moment) and now - self._started >= float(moment):
                    self._moment(moment)
            if self._ended:
                raise self._ended
            self._busy = bool(self._turn) or now < busy_until
            self._next_prompt()
            self._draw()
            soon = self._busy or any(re.fullmatch(r"[0-9.]+", moment) for moment, _ in self._pending) or \
                re.match(r"[0-9.]", self._die)
            wait = 0.02 if self._held.startswith(b"\x1b") else 0.15 if soon else 5.0
            readable = select.select([0, self._wake_r], [], [], wait)[0]
            if self._wake_r in readable:
                os.read(self._wake_r, 4096)
            if 0 in readable:
                data = os.read(0, 65536)
                if not data:
                    raise Ended(129, "terminal gone")
                self._held += data
            self._take(last=0 not in readable)

    _busy = False

    def _wake(self) -> None:
        try:
            os.write(self._wake_w, b".")
        except BlockingIOError:
            return                               # it is awake already

    def _moment(self, moment: str) -> bool:
        """What was ordered for this moment happens: a dialog, a death. Called from the turn's thread too, which
        waits for the answer; False if it was no."""
        when, _, status = self._die.partition("=")
        if when == moment:
            self._die = ""
            self.journal("dies", moment=moment)
            if status == "KILL":
                os.kill(os.getpid(), signal.SIGKILL)
            self._ended = Ended(int(status or 1), "ordered to die at " + moment)
            self._wake()
            if threading.current_thread() is threading.main_thread():
                raise self._ended
            threading.Event().wait()             # the main thread ends the process
        answers = []
        with self._lock:
            for at, name in [pair for pair in self._pending if pair[0] == moment]:
                self._pending.remove((at, name))
                answers.append(self._show_dialog(name, "rm -rf build"))
        if moment.startswith("event:"):
            for answer in answers:
                answer.wait()
        return not answers or self._last_answer != "no"

    # ---- dialogs ---------------------------------------------------------------------------------------------

    def _show_dialog(self, name: str, command: str) -> threading.Event:
        question, choices, chosen, effects, foot, numbered = DIALOGS[name]
        answered = threading.Event()
        self._dialogs.append({"name": name, "question": question.format(cwd=os.getcwd(), command=command),
                              "choices": choices, "chosen": chosen, "effects": effects, "answered": answered,
                              "effect": "", "foot": foot, "numbered": numbered})
        self.journal("dialog", name=name, preselected=choices[chosen])
        self._wake()
        return answered

    def _dialog_key(self, key: str) -> None:
        dialog = self._dialogs[0]
        count = len(dialog["choices"])
        if key in ("Up", "Down"):
            dialog["chosen"] = (dialog["chosen"] + (1 if key == "Down" else -1)) % count
        elif dialog["numbered"] and key.isdigit() and 1 <= int(key) <= count:
            self._answer(int(key) - 1)
        elif key == "Enter":
            self._answer(dialog["chosen"])
        elif key in ("Escape", "C-c"):
            self._answer(len(dialog["effects"]) - 1 if "no" in dialog["effects"] else dialog["effects"].index("exit")
                         if "exit" in dialog["effects"] else dialog["chosen"])

    def _answer(self, choice: int) -> None:
        dialog = self._dialogs.pop(0)
        dialog["effect"] = dialog["effects"][choice]
        self.journal("answer", name=dialog["name"], choice=dialog["choices"][choice], effect=dialog["effect"])
        self._always = self._always or dialog["effect"] == "always"
        self._last_answer = dialog["effect"]
        dialog["answered"].set()
        if dialog["effect"] == "exit":
            raise Ended(1, "%s: %s" % (dialog["name"], dialog["choices"][choice]))

    _last_answer = ""

    def _allowed(self, command: str) -> bool:
        if not self.options.ask_tools or self.options.yolo or self._always:
            return True
        for rule in self.options.allowedTools:
            inner = re.fullmatch(r"Bash(?:\((.*?)(?::?\*)?\))?", rule)
            if inner and command.startswith(inner.group(1) or ""):
                return True
        with self._lock:
            answered = self._show_dialog("permission", command)
        answered.wait()
        return self._last_answer in ("go", "always")

    # ---- input -----------------------------------------------------------------------------------------------

    def _take(self, last: bool) -> None:
        """Act on what came, but for the beginning of a sequence whose rest is on its way."""
        while self._held:
            held = self._held
            if held.startswith(START):
                end = held.find(END)
                if end < 0:
                    break
                self._held = held[end + len(END):]
                self._flush_typed()
                self._paste(held[len(START):end].decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n"))
                continue
            sequence = _SEQUENCE.match(held)
            if sequence:
                self._held = held[sequence.end():]
                self._key(_SEQUENCES.get(sequence.group(), "?" + sequence.group().decode("latin-1")[1:]))
                continue
            if held.startswith(b"\x1b") and len(held) < 8 and not last:
                break
            size = 1 if held[0] < 0xc0 else 2 if held[0] < 0xe0 else 3 if held[0] < 0xf0 else 4
            if len(held) < size and not last:
                break
            self._held = held[size:]
            character = held[:size]
            if character in _KEYS:
                self._key(_KEYS[character])
            elif character[0] < 32:
                self._key("C-" + chr(character[0] + 96))
            else:
                self._text(character.decode("utf-8", "replace"))
        self._flush_typed()

    def _flush_typed(self) -> None:
        if self._typed:
            self.journal("typed", text=self._typed)
            self._typed = ""

    def _text(self, character: str) -> None:
        if self._dialogs:
            self._key(character)
            return
        self._typed += character
        self.composer += character

    def _paste(self, text: str) -> None:
        lost = "dialog" if self._dialogs else "lost" if self._lose > 0 else ""
        self._lose -= lost == "lost"
        self._pastes += 1
        self._last_paste = time.monotonic()
        if self.options.swallow_every and self._pastes % self.options.swallow_every == 0:
            self._swallow += 1
        self.journal("paste", text=text, lost=lost)
        if not lost:
            lines = text.count("\n") + 1
            shown = text
            if self.options.placeholder and (lines > self.options.limit[0] or len(text) > self.options.limit[1]):
                shown = self.options.placeholder.format(n=self._pastes, lines=lines, more=lines - 1, chars=len(text))
                self._pasted.append((shown, text))
            self.composer += shown
        self._draw()
        self._moment("paste")

    def _key(self, key: str) -> None:
        self._flush_typed()
        self.journal("key", key=key, dialog=self._dialogs[0]["name"] if self._dialogs else "")
        self._notice = ""
        if self._dialogs:
            self._dialog_key(key)
        elif key == "Enter":
            self._enter()
        elif key == "C-c":
            self._ctrl_c()
        elif key == "C-d" and not self.composer and self.options.ctrl_c:
            self._leave("C-d")
        elif key == "Escape" and self._turn:
            self._interrupt()
        elif key == "C-u":
            self.composer = self.composer.rpartition("\n")[0]
        elif key == "C-j":
            self.composer += "\n"
        elif key == "BSpace":
            self.composer = self.composer[:-1]

    def _enter(self) -> None:
        since = (time.monotonic() - self._last_paste) * 1000.0
        if self._swallow > 0:
            self._swallow -= 1
            self.journal("swallowed", ms=since)
        elif since < self.options.suppress_ms:
            self.journal("suppressed", ms=since)
            self.composer += "\n"
        elif self.composer.strip():
            text = self.composer
            for shown, pasted in self._pasted:
                text = text.replace(shown, pasted, 1)
            self.composer, self._pasted = "", []
            self._submit(text.rstrip())

    def _ctrl_c(self) -> None:
        now = time.monotonic()
        if self._turn:
            self._interrupt()
        elif self.composer:
            self.composer, self._pasted = "", []
            now -= 10.0 if self.options.ctrl_c == 1 else 0.0
        self._last_ctrl_c = [at for at in self._last_ctrl_c if now - at < 1.0] + [now]
        if self.options.ctrl_c and len(self._last_ctrl_c) >= self.options.ctrl_c and now > self._started:
            self._leave("C-c")
        self._notice = "Press Ctrl-C again to exit"

    def _interrupt(self) -> None:
        assert self._turn is not None
        self._turn.stop()
        self.journal("interrupted")
        self._say("\u23bf Interrupted by user")

    def _leave(self, why: str) -> None:
        time.sleep(self.options.exit_slow)
        if os.path.exists(self.talk.path):
            self._say(self.options.exit_message.format(id=self.talk.id))
        self._draw(composer=False)
        raise Ended(0, why)

    # ---- turns -----------------------------------------------------------------------------------------------

    def _submit(self, text: str) -> None:
        self._submitted += 1
        self.journal("submit", text=text, n=self._submitted, queued=self._busy)
        self._moment("submit")
        word = text.strip().split()[0]
        if word in ("/exit", "/quit") and self.options.ctrl_c:
            self._leave(word)
        elif word == "/die":
            raise Ended(int((text.split() + ["1"])[1]), "/die")
        elif word == "/clear":
            self._say("(cleared)")
        elif word[0] in "/!":                    # a command of the interface, or the shell's: never the model's
            self.journal("command" if word[0] == "/" else "shell", text=text)
            self._say(("Unknown command: " if word[0] == "/" else "ran in a shell: ") + word)
        else:
            self._queue.append(text)

    def _next_prompt(self) -> None:
        if self._dialogs or self._busy:
            return
        if self._launch:
            self.journal("launch", text=self._launch)
            self._submitted += 1
            self._queue.append(self._launch)
            self._launch = None
        if self._queue:
            text = self._queue.pop(0)
            self.talk.add("user", text)
            self._say(self._as_said(text))
            self._turn_began = time.monotonic()
            self._turn = self._resting or Turn(self.options, self.journal, self.talk.id, self._step, self._allowed,
                                               self._moment)
            self._resting = None
            self._busy = True
            threading.Thread(target=self._work, args=(self._turn, text), daemon=True).start()

    def _work(self, turn: Turn, text: str) -> None:
        self.journal("turn", text=text)
        turn.run(text)
        self.journal("turn_end", stopped=turn.stopped.is_set(), rest=turn.rest)
        if self.options.done:
            self._say(self._filled(self.options.done))
        self._resting = turn if turn.rest and not turn.stopped.is_set() else None
        self._turn = None
        self._wake()

    def _step(self, kind: str, text: str) -> None:
        self.talk.add("assistant" if kind == "say" else "tool", text)
        self._say("\u25cf " + text.replace("\n", "\n  \u23bf "))
        self._wake()

    # ---- screen ----------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        with self._lock:
            self._out.append(text)

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        while data:
            data = data[os.write(1, data):]

    def _draw(self, composer: bool = True) -> None:
        """The new part of the transcript, and below it the composer or a dialog, drawn over the old one."""
        width = max(20, shutil.get_terminal_size().columns if not os.isatty(1) else os.get_terminal_size(1).columns)
        with self._lock:
            said, self._out = self._out, []
        parts = ["\x1b[?25l\r"]
        if self._drawn_rows:
            parts.append("\x1b[%dA" % self._drawn_rows)
        parts.append("\x1b[J")
        for text in said:
            parts += [row + "\r\n" for row in _rows(text, width)] + ["\r\n"]
        rows = (self._dialog_rows(width) if self._dialogs else self._composer_rows(width)) if composer else [""]
        parts.append("\r\n".join(rows))
        self._drawn_rows = len(rows) - 1
        title = self.options.title or self._filled(self.options.titles[int(self._busy)])
        parts.append("\x1b]2;%s\x07\x1b[?25h" % title)
        frame = "".join(parts)
        if said or frame != self._last_frame:
            self._write(frame)
        self._last_frame = frame
        self._frame += 1

    _last_frame = ""

    def _dialog_rows(self, width: int) -> List[str]:
        dialog = self._dialogs[0]
        rows = ["\u2500" * width] + [row for row in _rows(dialog["question"], width - 2)] + [""]
        rows += ["%s %s%s" % ("\u276f" if at == dialog["chosen"] else " ",
                              "%d. " % (at + 1) if dialog["numbered"] else "", choice)
                 for at, choice in enumerate(dialog["choices"])]
        return rows + ["", dialog["foot"]]

    def _composer_rows(self, width: int) -> List[str]:
        options = self.options
        rows = [self._filled(options.busy_line), ""] if self._busy and options.busy_line else []
        rows += ["  queued: " + text.split("\n")[0][:width - 12] for text in self._queue]
        lines = [row for row in _rows(self.composer, width - 6)][-options.composer_rows:]
        if not self.composer and options.hint:
            lines = ["\x1b[2m%s\x1b[0m" % options.hint]
        if options.frame == "gutter":
            rows += ["  \u2503"] + ["  \u2503  " + line for line in lines]
            rows += ["  \u2503", "  \u2503  Build \u00b7 Stand-in Local", "  \u2579" + "\u2580" * (width - 3)]
        else:
            glyph = options.glyph + " " if options.glyph else ""
            rule = ["\u2500" * width] if options.frame == "rules" else []
            rows += rule + [(glyph if not at else " " * len(glyph)) + line for at, line in enumerate(lines)]
            rows += rule or [""]
        foot = "  bypass permissions on" if options.yolo else options.busy_foot if self._busy else options.foot
        return rows + ["  " + self._notice if self._notice else self._filled(foot)[:width]]

    def _as_said(self, text: str) -> str:
        """A prompt in the transcript: with the very glyph of the composer."""
        if self.options.frame == "gutter":
            return "  \u2503  " + text.replace("\n", "\n  \u2503  ")
        return "%s %s" % (self.options.glyph, text.replace("\n", "\n  "))

    def _filled(self, text: str) -> str:
        turn = self._frame
        return text.format(sign=SPINNER[turn % len(SPINNER)], braille=BRAILLE[turn % len(BRAILLE)], cwd=os.getcwd(),
                           blocks="\u25a0" * (turn % 8) + "\u2b1d" * (8 - turn % 8), name=self.options.name,
                           s=int(time.monotonic() - self._turn_began), dir=os.path.basename(os.getcwd()))

def _rows(text: str, width: int) -> List[str]:
    """The text in rows of at most `width` columns; what a terminal would act on is shown as `?`."""
    rows = []
    for line in text.split("\n"):
        row, used = "", 0
        for character in line:
            character = character if character.isprintable() else " " if character == "\t" else "?"
            columns = 2 if unicodedata.east_asian_width(character) in "WF" else 1
            if used + columns > width:
                rows.append(row)
                row, used = "", 0
            row += character
            used += columns
        rows.append(row)
    return rows


def headless(options: argparse.Namespace, journal: Journal, talk: Conversation) -> int:
    """`-p`: obey the prompt, print the last word, exit."""
    text = options.prompt or sys.stdin.read()
    journal("launch", text=text)
    talk.add("user", text)
    said: List[str] = []
    turn = Turn(options, journal, talk.id, lambda kind, what: said.append(what), lambda command: True, lambda at: True)
    turn.run(text)
    print(said[-1] if said else "")
    talk.close()
    journal("exit", code=0, why="done")
    return 0


def main() -> int:
    options = parse_options(shlex.split(os.environ.get("TUI_AGENT_OPTIONS", "")) + sys.argv[1:])
    journal = Journal(options.journal)
    talk = Conversation(options)
    journal("start", argv=sys.argv[1:], session=talk.id, resumed=bool(options.resume), others=talk.others,
            cwd=os.getcwd(), environment=dict(os.environ))
    if options.headless:
        return headless(options, journal, talk)
    return Interface(options, journal, talk).run()


if __name__ == "__main__":
    fcntl.fcntl(0, fcntl.F_GETFD)                # a closed stdin is said at once
    sys.exit(main())

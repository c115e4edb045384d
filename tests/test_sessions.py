"""Sessions: agents in panes of tmux and of herdr, from their creation to the purge of their conversation."""
from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import pytest

from support import ROOT, poll
from support.cli import Mam, Tmux

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
core: Any = importlib.import_module("mam")

# A stand-in for Claude Code: a composer, bracketed pastes, one dialog, a transcript, two C-c to leave. What it is to
# do stands in a file, so that its command line is the agent's own.
AGENT = r'''
import json, os, re, shlex, subprocess, sys, threading, time, tty
folder = os.environ["STUB_FOLDER"]
options = json.load(open(os.path.join(folder, "options.json")))

def log(**row):
    with open(os.path.join(folder, "log"), "a") as file:
        file.write(json.dumps({**row, "pid": os.getpid(), "at": time.monotonic()}) + "\n")

words, session, prompt = sys.argv[1:], None, ""
log(argv=words, env=dict(os.environ), cwd=os.getcwd())
while words:
    word = words.pop(0)
    if word in ("--session-id", "--resume"):
        session = words.pop(0)
    elif not word.startswith("-"):
        prompt = word
path = os.path.expanduser("~/.claude/projects/here/%s.jsonl" % session)
if "--resume" in sys.argv and not os.path.exists(path):
    sys.exit("No conversation found with session ID: %s" % session)
state = {"text": options.get("draft", ""), "dialog": options.get("dialog", ""), "said": "", "busy": False,
         "swallow": options.get("swallow", 0), "dead_after": options.get("die", "")}

def draw():
    rows = ["\x1b[2J\x1b[H", state["said"], "-" * 30]
    if state["dialog"]:
        rows += ["Do you trust the files in this folder?", "\u276f 1. No, exit", "  2. Yes"]
    else:
        rows += ["\u280b Thinking (%.1fs \u00b7 esc to interrupt)" % time.monotonic(), ""] if state["busy"] else []
        shown = "[Pasted text #1 +7 lines]" if state["text"].count("\n") > 3 else state["text"]
        rows += ["\u2500" * 40, "\u276f " + (shown.replace("\n", "\r\n  ") or "\x1b[2mTry \"fix it\"\x1b[0m"),
                 "\u2500" * 40, "  ? for shortcuts"]
    sys.stdout.write("\r\n".join(rows))
    sys.stdout.flush()

def run(text, name):
    line = [line for line in text.splitlines() if "--event " + name in line][0]
    done = subprocess.run(shlex.split(line[line.index(":") + 1:]), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    log(ran=name, code=done.returncode, said=done.stdout.decode())

def act(text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps({"text": text}) + "\n")
    how = re.search(r"Read the file (\S+) now", text)
    if how:
        text = open(how.group(1)).read()
    if "--event" in text:
        state["asked"] = text
        for event in options.get("events", ["started", "completed"]):
            run(text, event)
    elif "Answer" in text:
        run(state["asked"], "completed")

def submit(text):
    log(submit=text)
    if state["dead_after"] == "submit":
        os._exit(3)
    state.update(said="\u276f " + text.splitlines()[0][:30], busy=True)
    def work():
        act(text)
        state["busy"] = False
        draw()
    threading.Thread(target=work, daemon=True).start()

if options.get("die") == "start":
    print("fatal: no credentials")
    sys.exit(7)
tty.setraw(0)
sys.stdout.write("\x1b[?2004h\x1b[?25l")
if options.get("busy"):
    state["busy"] = True
    def spin():
        while state["busy"]:
            draw()
            time.sleep(0.05)
    threading.Thread(target=spin, daemon=True).start()
draw()
log(ready=True)
if prompt and not state["dialog"]:
    submit(prompt)
held, last_c = b"", 0.0
while True:
    data = os.read(0, 65536)
    if not data:
        break
    held += data
    while held:
        paste = re.match(rb"\x1b\[200~(.*?)\x1b\[201~", held, re.S)
        if paste:
            held = held[paste.end():]
            text = paste.group(1).decode().replace("\r", "\n")
            log(paste=text)
            if options.get("dialog_at_paste"):
                state["dialog"] = "permission"
            state["text"] += text
        elif b"\x1b[200~".startswith(held[:6]) or held.startswith(b"\x1b[200~"):
            break
        elif held[0] >= 32:
            end = next((n for n, byte in enumerate(held) if byte < 32), len(held))
            text, held = held[:end].decode(), held[end:]
            log(typed=text)
            if state["dialog"]:
                state["dialog"] = "" if text == "2" else state["dialog"]
            else:
                state["text"] += text
        else:
            key, held = held[:1], held[1:]
            log(key=key.decode("latin-1"), dialog=state["dialog"])
            if key == b"\x03":
                if time.monotonic() - last_c < 1:
                    sys.stdout.write("\r\nclaude --resume %s\r\n" % session)
                    log(left=True)
                    os._exit(0)
                last_c = time.monotonic()
            elif key == b"\r" and state["dialog"]:
                log(answered=state["dialog"])
                os._exit(1)
            elif key == b"\r" and state["swallow"]:
                state["swallow"] -= 1
            elif key == b"\r" and state["text"].strip():
                text, state["text"] = state["text"], ""
                submit(text)
        draw()
'''

# A stand-in for herdr 0.7.5, its panes those of a private tmux server: what mam asks of it, and no more.
HERDR = r'''
import json, os, subprocess, sys
TMUX, FOLDER, AGENTS = %r, %r, %r

def tmux(*words, data=None):
    done = subprocess.run(["tmux", "-S", TMUX, "-f", "/dev/null", *words], input=data, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE)
    if done.returncode:
        fail("pane_not_found", done.stderr.decode())
    return done.stdout.decode()

def fail(code, message):
    sys.stderr.write(json.dumps({"id": "cli", "error": {"code": code, "message": message}}) + "\n")
    sys.exit(1)

def answer(kind, **result):
    print(json.dumps({"id": "cli:" + kind, "result": {"type": kind, **result}}))

def panes():
    done = subprocess.run(["tmux", "-S", TMUX, "list-panes", "-a", "-F",
                           "#{session_name}\t#{pane_pid}\t#{pane_current_command}"], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL)
    rows = [line.split("\t") for line in done.stdout.decode().splitlines()]
    return [row for row in rows if row[0].startswith("w")]

def labels():
    path = os.path.join(FOLDER, "labels")
    return json.load(open(path)) if os.path.exists(path) else {}

words = sys.argv[1:]
with open(os.path.join(FOLDER, "calls"), "a") as file:
    file.write(json.dumps(words) + "\n")
verb, rest = " ".join(words[:2]), words[2:]
if verb == "workspace create":
    known = labels()
    name = "w%%d" %% (len(known) + 1)
    known[name] = rest[rest.index("--label") + 1]
    json.dump(known, open(os.path.join(FOLDER, "labels"), "w"))
    tmux("new-session", "-d", "-s", name, "-x", "200", "-y", "50", "-c", rest[rest.index("--cwd") + 1], "/bin/sh")
    answer("workspace_created", workspace={"workspace_id": name}, root_pane={"pane_id": name + ":p1"})
elif verb == "workspace list":
    answer("workspace_list", workspaces=[{"workspace_id": name, "label": label} for name, label in labels().items()])
elif verb == "pane list":
    answer("pane_list", panes=[{"pane_id": row[0] + ":p1", "workspace_id": row[0], "agent_status": "idle", **(
        {"agent": row[2]} if row[2] in AGENTS else {})} for row in panes()])
elif verb == "agent list":
    extra = os.path.join(FOLDER, "agent_session")
    more = {"agent_session": {"value": open(extra).read()}} if os.path.exists(extra) else {}
    answer("agent_list", agents=[{"pane_id": row[0] + ":p1", "agent": row[2], **more} for row in panes()
                                 if row[2] in AGENTS])
elif verb == "pane process-info":
    for row in panes():
        if row[0] + ":p1" == rest[1]:
            answer("pane_process_info", process_info={"shell_pid": int(row[1]), "foreground_processes": [
                {"pid": int(row[1]), "name": row[2]}]})
            sys.exit(0)
    fail("pane_not_found", "no such pane")
elif verb == "agent prompt":
    target = rest[0].partition(":")[0]
    tmux("load-buffer", "-b", "p", "-", data=rest[1].encode())
    tmux("paste-buffer", "-p", "-d", "-b", "p", "-t", target)
    import time
    time.sleep(0.3)
    tmux("send-keys", "-t", target, "Enter")
    answer("agent_prompted")
else:
    target = rest[0].partition(":")[0] if rest else ""
    if verb == "pane run":
        tmux("send-keys", "-t", target, "-l", rest[1])
        tmux("send-keys", "-t", target, "Enter")
    elif verb == "pane read":
        print(tmux("capture-pane", "-p", "-t", target), end="")
    elif verb == "pane send-text":
        tmux("send-keys", "-t", target, "-l", rest[1])
    elif verb == "pane send-keys":
        tmux("send-keys", "-t", target, *[{"enter": "Enter", "down": "Down"}.get(key, key.replace("ctrl+", "C-"))
                                          for key in rest[1:]])
    elif verb == "pane close":
        tmux("kill-session", "-t", target)
    else:
        sys.stderr.write("usage: herdr\n")
        sys.exit(2)
'''


class Stage:
    """A host with a stand-in agent called claude, and a multiplexer."""

    def __init__(self, mam: Mam, tmux: Tmux, mux: str, known: bool = True) -> None:
        self.mam, self.tmux, self.mux = mam, tmux, mux
        self.folder = mam.folder / "stub"
        self.folder.mkdir()
        self.options()
        script = self.folder / "agent.py"
        script.write_text(AGENT)
        mam.stub("claude", "#!/bin/bash\nSTUB_FOLDER=%s exec -a claude %s -S %s \"$@\"\n" % (
            shlex.quote(str(self.folder)), sys.executable, script))
        mam.env.update(MAM_TMUX_SOCKET=str(tmux.socket), MAM_SESSION_WAIT_S="1")
        if mux == "herdr":
            (self.folder / "herdr.py").write_text(HERDR % (str(tmux.socket), str(self.folder),
                                                           ["claude"] if known else []))
            mam.stub("herdr", "#!/bin/sh\nexec %s -S %s \"$@\"\n" % (sys.executable, self.folder / "herdr.py"))
        self.session = mux + ":alice"

    def options(self, **options: Any) -> None:
        (self.folder / "options.json").write_text(json.dumps(options))

    def rows(self, field: str) -> List[Dict[str, Any]]:
        path = self.folder / "log"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if field in row]

    def values(self, field: str) -> List[Any]:
        return [row[field] for row in self.rows(field)]

    def create(self, *more: object, code: int = 0, name: str = "alice") -> Any:
        return self.mam("session", "create", name, "--mux", self.mux, *more, check=code)

    def delegate(self, job: str, *more: object, code: Optional[int] = 0) -> Any:
        return self.mam("delegate", "--agent-session", self.session, "--prompt", "p", "--job-id", job, *more,
                        check=code)

    def listed(self, *more: str) -> Dict[str, Dict[str, Any]]:
        return {row["session"]: row for row in self.mam("session", "list", "--json", *more, check=0).json()}

    def transcripts(self) -> List[Path]:
        return sorted((self.mam.home / ".claude" / "projects" / "here").glob("*.jsonl"))


@pytest.fixture(params=["tmux", "herdr"])
def stage(request: Any, mam: Mam, tmux: Tmux) -> Stage:
    """On either multiplexer: one set of tests for both."""
    return Stage(mam, tmux, request.param)


@pytest.fixture
def on_tmux(mam: Mam, tmux: Tmux) -> Stage:
    return Stage(mam, tmux, "tmux")


# ---- the life of a session ------------------------------------------------------------------------------------

def test_a_session_from_its_creation_to_its_purge(stage: Stage) -> None:
    """Lost: the main way to work with an interactive agent, several jobs in turn, its conversation kept between."""
    made = stage.create("--json").json()
    assert (made["session"], made["status"], made["state"]) == (stage.session, "running", "ready")
    conversation = made["conversation"]
    for job in ("J1", "J2"):
        result = stage.delegate(job)
        assert f"RESULT job={job} completed" in result.stdout
    poll(lambda: stage.values("code") == [0] * 4, 10, "four publish commands that worked")
    assert len(stage.values("paste")) == 2 and stage.values("key") == ["\r", "\r"]
    assert stage.listed()[stage.session]["last_job"] == "J2" and stage.listed()[stage.session]["job"] is None
    assert "for shortcuts" in stage.mam("session", "capture", "alice", check=0).stdout

    stage.mam("session", "stop", "alice", check=0)
    assert stage.values("left") == [True] and stage.listed() == {}
    ended = stage.listed("--all")[stage.session]
    assert (ended["status"], ended["conversation"]) == ("stopped", conversation)
    archive = json.loads((stage.mam.registry_dir / "agent-sessions.yaml").read_text())
    assert [one["status"] for one in archive["sessions"]] == ["stopped"]

    stage.mam("session", "resume", "alice", check=0)
    assert stage.values("argv")[-1][-2:] == ["--resume", conversation]
    stage.mam("session", "resume", "alice", check=5)
    stage.delegate("J3")
    assert len(stage.transcripts()) == 1
    result = stage.mam("session", "stop", "alice", "--purge-conversation", check=0)
    assert conversation in result.stderr and stage.transcripts() == []
    assert stage.listed("--all")[stage.session]["status"] == "terminated"
    assert "purged" in stage.mam("session", "resume", "alice", check=1).stderr
    assert (stage.mam.registry_dir / "agent-sessions.yaml.bak").exists()
    assert stage.tmux.panes() == []


def test_a_session_is_created_for_a_job(stage: Stage) -> None:
    """Lost: the surest delivery: the prompt in the launch itself, nothing typed at all."""
    result = stage.delegate("J1", "--create")
    assert "RESULT job=J1 completed" in result.stdout and stage.values("paste") == [] and stage.values("key") == []
    words = stage.values("argv")[0]
    assert words[-1].startswith("Job J1, attempt 1, from mam. ") and words[-3] == "--session-id"
    rule = [word for word in words if word.startswith("--allowedTools=")][0]
    launcher = rule.partition("(")[2].partition(" publish:*)")[0]
    assert os.access(launcher, os.X_OK) and "--dangerously-skip-permissions" not in words
    assert stage.listed()[stage.session]["last_job"] == "J1"
    assert "runs already" in stage.delegate("J2", "--create", code=5).stderr
    stage.delegate("J2")
    assert len(stage.values("paste")) == 1


def test_an_agent_herdr_does_not_know_gets_one_line(mam: Mam, tmux: Tmux) -> None:
    """Lost: a prompt of several lines, sent off at its first line break."""
    stage = Stage(mam, tmux, "herdr", known=False)
    stage.create()
    stage.delegate("J1")
    assert stage.values("paste") == [] and len(stage.values("typed")) == 1 and len(stage.values("submit")) == 1


def test_what_an_agent_must_not_inherit(on_tmux: Stage) -> None:
    """Lost: a secret, told to an agent; or a nested agent that takes itself for its outer one."""
    secret = {"MAM_DISPATCH_SECRET": "s" * 40, "MQTT_PASSWORD": "p" * 12, "CLAUDECODE": "1", "CODEX_THREAD_ID": "x"}
    on_tmux.tmux.new_pane("sleep 600", name="other", env=secret)
    for name, value in secret.items():
        on_tmux.tmux.run("set-environment", "-g", name, value)
    on_tmux.mam.env.update(secret)
    on_tmux.create("--yolo", "--workdir", on_tmux.mam.home, "--", "--model", "opus")
    row = on_tmux.rows("argv")[0]
    assert not set(secret) & set(row["env"]) and row["cwd"] == str(on_tmux.mam.home)
    assert row["argv"][1:4] == ["--dangerously-skip-permissions", "--model", "opus"]
    script = on_tmux.mam.registry_dir / "sessions" / "tmux-alice.sh"
    assert script.stat().st_mode & 0o777 == 0o700 and "ssss" not in script.read_text()


# ---- what a session cannot take -------------------------------------------------------------------------------

@pytest.mark.parametrize("options, said", [
    ({"draft": "half a thought"}, "a draft stands in the composer"), ({"dialog": "trust"}, "waits in a dialog (trust)"),
    ({"busy": True}, "is at work")], ids=["draft", "dialog", "busy"])
def test_nothing_is_typed_into_a_session_that_cannot_take_it(stage: Stage, options: Dict[str, Any], said: str) -> None:
    """Lost: a human's draft, an answer nobody gave, a turn of work."""
    stage.options(**options)
    result = stage.create(code=5 if "dialog" in options else 0)
    assert "dialog" not in options or said in result.stderr and ".claude.json" in result.stderr
    result = stage.delegate("J1", code=5)
    assert said in result.stderr
    job = stage.mam.job("J1")
    assert (job["status"], job["reason"], job["delivery"]) == ("cancelled", "session_busy", "none")
    assert stage.values("paste") == stage.values("typed") == stage.values("key") == []


def test_a_dialog_is_answered_by_a_humans_keys(stage: Stage) -> None:
    """Lost: the way out of a dialog without attaching to the pane."""
    stage.options(dialog="trust")
    stage.create(code=5)
    assert "trust" in stage.mam("session", "capture", "alice", check=0).stderr
    stage.mam("session", "send", "alice", "--keys", "2", check=0)
    poll(lambda: stage.mam("session", "capture", "alice", "--json").json()["dialog"] is None, 10, "the composer")
    stage.delegate("J1")


def test_enter_is_repeated_while_our_text_stands_there(stage: Stage) -> None:
    """Lost: a prompt whose Enter was swallowed; or one that was sent twice for it."""
    stage.options(swallow=2)
    stage.create()
    stage.delegate("J1")
    assert len(stage.values("paste")) == 1 and stage.values("key") == ["\r"] * 3 and len(stage.values("submit")) == 1


def test_no_enter_into_a_dialog_that_comes_up_behind_the_paste(on_tmux: Stage) -> None:
    """Lost: "Yes", said to a question nobody has read."""
    on_tmux.options(dialog_at_paste=True)
    on_tmux.create()
    run = on_tmux.mam.popen("delegate", "--agent-session", "tmux:alice", "--prompt", "p", "--job-id", "J1",
                            "--ack-timeout", 2)
    run.wait_for("came up in tmux:alice", 30, "stderr")
    assert run.wait(30).code == 1 and on_tmux.mam.job("J1")["reason"] == "agent_blocked"
    assert on_tmux.values("key") == [] and on_tmux.values("answered") == []


def test_one_job_at_a_time_whatever_the_session_is_called(on_tmux: Stage) -> None:
    """Lost: a second prompt, typed into an agent at work by way of its pane's number."""
    on_tmux.options(events=["started"])
    on_tmux.create()
    on_tmux.delegate("J1", "--detach")
    on_tmux.mam.wait_job("J1", "running")
    pane = on_tmux.listed()["tmux:alice"]["pane"]
    assert on_tmux.listed()["tmux:alice"]["job"] == "J1"
    result = on_tmux.mam("delegate", "--agent-session", "tmux:" + pane, "--prompt", "p", check=5)
    assert "at work on job J1" in result.stderr and len(on_tmux.values("paste")) == 1
    assert "at work on job J1" in on_tmux.mam("session", "stop", "alice", check=5).stderr
    on_tmux.mam("session", "stop", "alice", "--close-job", check=0)
    assert on_tmux.mam.job("J1")["status"] == "cancelled"
    assert on_tmux.listed("--all")["tmux:alice"]["status"] == "stopped"


def test_a_session_may_have_the_name_of_a_pane(on_tmux: Stage) -> None:
    """Lost: every delivery to a session called p0, which waited for its own lock."""
    on_tmux.create(name="p0")
    on_tmux.mam("delegate", "--agent-session", "tmux:p0", "--prompt", "p", check=0)
    assert on_tmux.listed()["tmux:p0"]["pane"] == "%0"


# ---- deaths ---------------------------------------------------------------------------------------------------

def test_a_session_whose_pane_is_gone_is_terminated(stage: Stage) -> None:
    """Lost: an inventory that can be believed, after the agent, its pane or the whole multiplexer died."""
    stage.create()
    stage.create(name="bob")
    pane = stage.listed()[stage.session]["process"]["pid"]
    os.kill(pane, signal.SIGKILL)
    poll(lambda: sorted(stage.listed()) == [stage.mux + ":bob"], 20, "one session")
    assert stage.listed("--all")[stage.session]["status"] == "terminated"
    stage.tmux.run("kill-server")
    assert stage.listed() == {}
    assert [row["status"] for row in stage.listed("--all").values()] == ["terminated"] * 2
    assert len(json.loads((stage.mam.registry_dir / "agent-sessions.yaml").read_text())["sessions"]) == 2
    stage.create()
    assert sorted(stage.listed()) == [stage.session]


def test_an_agent_that_exits_at_its_start_is_said(on_tmux: Stage) -> None:
    """Lost: why it did not come up."""
    on_tmux.options(die="start")
    said = re.compile(r"the agent in tmux:alice exited( with status 7)?: fatal: no credentials")    # (tmux can lose it)
    assert said.search(on_tmux.create(code=1).stderr)
    assert on_tmux.listed() == {} and on_tmux.tmux.panes() == []
    result = on_tmux.delegate("J1", "--create", code=1)
    assert said.search(result.stderr) and on_tmux.mam.job("J1")["reason"] == "spawn_failed"


def test_a_creator_that_was_killed_leaves_nothing_unknown(on_tmux: Stage) -> None:
    """Lost: a running agent that no list shows, or a name that can never be used again."""
    on_tmux.create()
    with core.Registry(str(on_tmux.mam.registry_dir)) as registry:
        row = registry.session("tmux:alice")
        registry.save_session("tmux:alice", {"pane": None, "process": None})         # died before it wrote that
        registry.save_session("tmux:bob", {**row._asdict(), "session": "tmux:bob", "pane": None}, anew=True)
    listed = on_tmux.listed()
    assert sorted(listed) == ["tmux:alice"] and listed["tmux:alice"]["pane"] == row.pane
    on_tmux.create(name="bob")


# ---- conversations --------------------------------------------------------------------------------------------

def test_a_purge_is_refused_while_anyone_is_in_the_conversation(on_tmux: Stage) -> None:
    """Lost: the conversation somebody is just having."""
    on_tmux.create()
    on_tmux.delegate("J1")
    conversation = on_tmux.listed()["tmux:alice"]["conversation"]
    path, = on_tmux.transcripts()

    def refused(why: str, **env: str) -> None:
        result = on_tmux.mam("session", "stop", "alice", "--purge-conversation", check=5, env=dict(env))
        assert why in result.stderr and path.exists()
        assert on_tmux.listed()["tmux:alice"]["status"] == "running"
    refused("this command runs in it (CLAUDE_CODE_SESSION_ID)", CLAUDE_CODE_SESSION_ID=conversation)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", conversation]) as other:
        refused(f"process {other.pid} is in it")
        other.kill()
    with subprocess.Popen([sys.executable, "-c", f"import time; f = open({str(path)!r}); time.sleep(600)"]) as other:
        poll(lambda: str(path) in [os.readlink(str(fd)) for fd in Path(f"/proc/{other.pid}/fd").iterdir()], 10, "open")
        refused(f"process {other.pid} is in it")
        other.kill()
    on_tmux.mam("session", "stop", "alice", check=0)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", conversation]) as other:
        result = on_tmux.mam("session", "resume", "alice", check=5)
        assert f"process {other.pid} is in it" in result.stderr
        result = on_tmux.mam("session", "stop", "alice", "--purge-conversation", check=5)
        assert on_tmux.listed("--all")["tmux:alice"]["status"] == "stopped" and path.exists()
        other.kill()
    on_tmux.mam("session", "stop", "alice", "--purge-conversation", check=0)
    assert not path.exists()


def test_herdrs_own_resume_is_respected(mam: Mam, tmux: Tmux) -> None:
    """Lost: a conversation, spoilt by two processes in it, after herdr's server was started again."""
    stage = Stage(mam, tmux, "herdr")
    stage.create()
    stage.delegate("J1")
    conversation = stage.listed()["herdr:alice"]["conversation"]
    tmux.run("kill-server")
    assert stage.listed() == {}
    back = tmux.new_pane("exec %s --resume %s" % (mam.bin / "claude", conversation), name="w9",
                         env={"HOME": str(mam.home)})
    tmux.wait_for(back, "shortcuts")
    (stage.folder / "agent_session").write_text(conversation)
    stage.mam("session", "resume", "alice", check=0)
    assert stage.listed()["herdr:alice"]["pane"] == "w9:p1" and len(tmux.panes()) == 1
    stage.delegate("J2")


# ---- permission -----------------------------------------------------------------------------------------------

def test_a_job_that_asks_stands_out_and_is_answered(stage: Stage) -> None:
    """Lost: an agent that waits for a human who does not know it, or cannot reach it."""
    stage.options(events=["started", "permission_required"])
    stage.create()
    run = stage.mam.popen("delegate", "--agent-session", stage.session, "--prompt", "p", "--job-id", "J1")
    run.wait_for("PERMISSION required by job J1: what for   -> mam answer J1", stream="stderr")
    assert "PERMISSION" in stage.mam("list", check=0).stdout and stage.mam.job("J1")["asks"] == "what for"
    assert "mam answer J1" in stage.mam(check=0).stdout
    poll(lambda: len(stage.rows("ran")) == 2, 20, "the agent's turn to end")
    stage.mam("answer", "J1", "yes,\nbut gently", check=0)
    assert run.wait(30).code == 0
    assert stage.values("submit")[-1].startswith("Answer to job J1, from mam: yes,")
    result = stage.mam("answer", "J1", "again", check=4)
    assert "asks nothing" in result.stderr


def test_an_answer_that_cannot_be_given_is_refused(on_tmux: Stage) -> None:
    mam = on_tmux.mam
    mam("register", "--prompt", "p", "--agent-session", "exec:x", "--job-id", "E", check=0)
    mam("publish", "E", "--event", "permission_required", "--detail", "may I?", check=0)
    assert "nothing can be typed" in mam("answer", "E", "yes", check=4).stderr
    on_tmux.options(events=["started", "permission_required"])
    on_tmux.create()
    on_tmux.delegate("J1", "--detach")
    poll(lambda: mam.job("J1")["asks"], 20, "the question")
    on_tmux.tmux.run("kill-server")
    assert "no tmux session alice" in mam("answer", "J1", "yes", check=1).stderr
    assert mam("answer", "J1", " ", check=64).stderr and mam("answer", "nobody", "x", check=1).stderr


# ---- a runner that types ---------------------------------------------------------------------------------------

def test_a_runner_hands_its_jobs_to_a_session_of_its_host(on_tmux: Stage, new_mam: Callable[..., Mam],
                                                          mosquitto: Any) -> None:
    """Lost: an interactive agent on another host, which takes one job after the other."""
    wire = {"MQTT_BROKER": "127.0.0.1", "MQTT_PORT": str(mosquitto.port), "MAM_INSECURE_BROKER": "1",
            "MAM_DISPATCH_SECRET": "s" * 40, "MAM_TOPIC_ROOT": "sessions/%d/jobs" % os.getpid()}
    here = new_mam("here", )
    for host in (here, on_tmux.mam):
        host.env.update(wire)
    on_tmux.create()
    runner = on_tmux.mam.popen("remote", "run", "--session", "desk", "--deliver", "tmux:alice")
    runs = [here.popen("delegate", "--agent-session", "remote:desk", "--prompt", "p", "--job-id", f"J{n}",
                       "--wait-for-runner", 30) for n in range(2)]
    for run in runs:
        result = run.wait(60)
        # (that the prompt is in is said as well, unless the agent was done before it could be)
        assert result.code == 0 and "adopted by a runner" in result.stdout, str(result) + runner.stderr
    assert len(on_tmux.values("paste")) == 2 and on_tmux.values("key") == ["\r"] * 2
    runner.stop()


# ---- sending, naming, refusing -----------------------------------------------------------------------------------

def test_sending_is_typing_as_a_human_would(stage: Stage) -> None:
    stage.create()
    stage.mam("session", "send", stage.session, "use the\x1b[201~ other\x03 database", check=0)
    poll(lambda: stage.values("submit") == ["use the[201~ other database"], 10, "what was said")
    for words, said in ((["alice"], "TEXT or --keys"), (["alice", "x", "--keys", "Enter"], "TEXT or --keys"),
                        (["alice", " "], "empty"), (["alice", "--keys", "a\tb"], "no key's name"),
                        (["exec:x", "x"], "no session in a pane")):
        assert said in stage.mam("session", "send", *words, check=64).stderr


def test_a_shell_gets_neither_words_nor_keys(on_tmux: Stage) -> None:
    """Lost: whatever a shell makes of them."""
    pane = on_tmux.tmux.new_pane(name="alice")
    for words in (["hello"], ["--keys", "Enter"]):
        assert "a shell (sh)" in on_tmux.mam("session", "send", "alice", *words, check=5).stderr
    assert "hello" not in on_tmux.tmux.capture(pane)


@pytest.mark.parametrize("words, code, said", [
    (["create", "a/b"], 1, "is not a session"), (["create", "exec:a"], 64, "tmux:NAME or herdr:NAME"),
    (["create", "tmux:a", "--mux", "herdr"], 64, "does not go with"),
    (["create", "a", "--agent", "nobody"], 64, "no agent"),
    (["create", "a", "--agent", "generic"], 64, "no command of its own"),
    (["create", "a", "--agent", "generic", "--", "no-such-program"], 1, "no program no-such-program"),
    (["create", "a", "--workdir", "missing"], 1, "no such folder"), (["create"], 64, "NAME"),
    (["frobnicate"], 64, "no action 'frobnicate'"), (["stop", "a"], 1, "no registry"),
    (["resume", "a"], 1, "no registry"),
    (["capture", "a"], 1, "no tmux session a"), (["list", "x"], 64, "unrecognized")])
def test_bad_input_is_said(on_tmux: Stage, words: List[str], code: int, said: str) -> None:
    result = on_tmux.mam("session", *words, check=code)
    assert said in result.stderr and result.stderr.startswith("mam: ") and not on_tmux.mam.registry_dir.exists()
    error = on_tmux.mam("session", words[0], "--json", *words[1:], check=code).json()["error"]
    assert error["message"] and error["code"]


@pytest.mark.parametrize("words", [["create"], ["list"], ["capture"], ["send"], ["stop"], ["resume"], []])
def test_every_action_has_help_with_examples(mam: Mam, words: List[str]) -> None:
    out = mam("session", *words, "--help", check=0).stdout
    assert "examples:" in out and "mam session" in out


@pytest.mark.parametrize("text, said", [
    ("[", "not JSON"), ("[]", "an object of agents"), ('{"a": 1}', "with an object"),
    ('{"a/b": {}}', "must be a name"),
    ('{"a": {"comand": []}}', "a.comand is no field"), ('{"a": {"command": "x"}}', "a.command must be a list of str"),
    ('{"a": {"busy": ["("]}}', "a.busy has a regular expression"), ('{"a": {"composer": "["}}', "a.composer has"),
    ('{"a": {"dialogs": [{"name": "x"}]}}', "a.dialogs must be a list of objects"),
    ('{"a": {"env": {"x y": "1"}}}', "a.env must be an object"), ('{"a": {"like": "nobody"}}', "which is no agent"),
    ('{"a": {"clear": ["x; rm"]}}', "a.clear must be names")])
def test_the_users_own_profiles_are_checked(on_tmux: Stage, text: str, said: str) -> None:
    """Lost: which agent, and which field, of a file that one writes by hand."""
    on_tmux.mam.registry_dir.mkdir(mode=0o700)
    (on_tmux.mam.registry_dir / "agents.json").write_text(text)
    result = on_tmux.create(code=1)
    assert said in result.stderr and "agents.json" in result.stderr


def test_the_users_own_profile_is_used(on_tmux: Stage) -> None:
    on_tmux.mam.registry_dir.mkdir(mode=0o700)
    (on_tmux.mam.registry_dir / "agents.json").write_text(json.dumps({
        "mine": {"like": "claude-code", "command": ["claude", "--verbose"], "allow": [], "env": {"MINE": "1"}}}))
    on_tmux.delegate("J1", "--create", "--agent", "mine")
    row = on_tmux.rows("argv")[0]
    assert row["argv"][0] == "--verbose" and row["env"]["MINE"] == "1" and row["argv"][-1].startswith("Job J1")


# ---- what a screen shows -----------------------------------------------------------------------------------------

def look(text: str, cursor: Any = None) -> Any:
    rows, solid = core.split_shades(text)
    return core.Look("%1", False, "", False, "x", 1, "", rows, solid, cursor, [], {})


def profile(name: str = "claude-code") -> Any:
    return core.Profile(name=name, **{**core._NO_PROFILE, **core.AGENT_PROFILES[name]})


LINE = "\u2500" * 30
CLAUDE = "\u276f Job J1, attempt 1, from mam.\n\n\u25cf Done. Do you want to proceed? I do.\n\n%s\n" + LINE + \
    "\n%s\n" + LINE + "\n  ? for shortcuts\n\n"


@pytest.mark.parametrize("screen, cursor, agent, draft", [
    (CLAUDE % ("", "\u276f "), None, "claude-code", False),
    (CLAUDE % ("", "\u276f\u00a0Try \"edit <filepath> to...\""), None, "claude-code", False),
    (CLAUDE % ("", "\u276f \x1b[7mT\x1b[0;2mry \"edit it\"\x1b[0m"), None, "claude-code", False),
    (CLAUDE % ("", "\u276f half a thought"), None, "claude-code", True),
    (CLAUDE % ("", "\u276f \n  second line"), None, "claude-code", True),
    ("\u203a \x1b[2mExplain this codebase\x1b[0m\n\n  100% context left\n", (2, 0), "codex", False),
    ("\u203a fix it\n\n  100% context left\n", (8, 0), "codex", True),
    ("  \u2503\n  \u2503  Ask anything... \"Fix\"\n  \u2503\n  \u2503  Build  Big Pickle\n", (5, 1), "opencode", False),
    ("  \u2503\n  \u2503  fix\n  \u2503\n  \u2503  Build  Big Pickle\n", (8, 1), "opencode", True),
    ("  \u2503\n  \u2503  \n  \u2503\n  \u2503  Build \u00b7 Big Pickle\n\n  foot", (5, 5), "opencode", False),
    ("  \u2503\n  \u2503  half\n  \u2503\n  \u2503  Build \u00b7 Big Pickle\n\n  foot", None, "opencode", True),
    ("READY\n\n", (0, 1), "claude-code", False), ("some output\n> ", (2, 1), "generic", False),
    ("some output\n> half", (6, 1), "generic", True), ("aider> ", (7, 0), "generic", False)])
def test_a_draft_is_told_from_a_hint(screen: str, cursor: Any, agent: str, draft: bool) -> None:
    """Lost: a human's words, merged with ours; or every delivery, to a hint that is taken for words."""
    assert core.draft_in(look(screen, cursor), profile(agent)) is draft


def test_our_text_is_known_again_in_the_composer() -> None:
    """Lost: an Enter too few, or one too many."""
    text = "Job J1, attempt 1, from mam. The brief is x\nRead it and do what it says.\nthe last line of it all"
    for shown in (text.replace("\n", "\n  "), "[Pasted text #1 +7 lines]", "[Pasted Content 1311 chars]",
                  "and do what it says.\n  the last line of it all"):
        assert core.holds(look(CLAUDE % ("", "\u276f " + shown)), profile(), text), shown
    for shown in ("", "something else entirely", "Try \"edit\""):
        assert not core.holds(look(CLAUDE % ("", "\u276f " + shown)), profile(), text), shown
    assert core.holds(look("> the last line of it all", (25, 0)), profile("generic"), text)
    after = look("\u276f Job J1, attempt 1, from mam. The brief is x\n\n> ", (2, 2))
    assert not core.holds(after, profile("generic"), text)
    foot = look(LINE + "\n\n" + LINE + "\nthe brief is x\n", (14, 3))   # the cursor below it
    assert not core.holds(foot, profile("pi"), "read the brief is x, and go on from there")
    assert core.holds(look(LINE + "\nhalf of it all\n" + LINE, (14, 1)), profile("pi"), "the other half of it all")


class Failing:
    """A driver whose multiplexer takes a text, and then fails."""

    def __init__(self, pid: int = 0, code: str = "") -> None:
        self.pid, self.code, self.pressed = pid, code, 0

    def type(self, before: Any, text: str) -> bool:
        return False

    def look(self, pane: str) -> Any:
        if self.code:
            raise core.SessionError("it does not answer", code=self.code)
        return look(CLAUDE % ("", "\u276f "))._replace(pid=self.pid)

    def press(self, pane: str, keys: Any) -> None:
        self.pressed += 1


@pytest.mark.parametrize("driver, doubt", [
    (Failing(code="failed"), "what became of the text typed into tmux:x is not known: it does not answer"),
    (Failing(pid=7), "the agent in tmux:x exited while it was prompted")])
def test_what_fails_behind_the_paste_is_a_doubt(driver: Failing, doubt: str, monkeypatch: Any) -> None:
    """Lost: a job, closed as one that nobody got, at which an agent is at work; an Enter to another's heir."""
    monkeypatch.setattr(core, "SEEN_WAIT_S", 0.0)
    session = core.Session.__new__(core.Session)
    session.session, session.driver, session.profile = "tmux:x", driver, profile()
    assert session.type_in(look(CLAUDE % ("", "\u276f ")), "Job J1") == doubt and not driver.pressed
    driver.code = "gone"
    with pytest.raises(core.SessionError):
        session.type_in(look(CLAUDE % ("", "\u276f ")), "Job J1")


@pytest.mark.parametrize("screen, name", [
    (CLAUDE % ("", "\u276f "), None),
    ("Do you trust the files in this folder?\n\n\u276f 1. No, exit\n  2. Yes\n", "trust"),
    ("\u276f Job J1\n\nBash command\n  rm x\nDo you want to proceed?\n\u276f 1. Yes\n  2. No\n", "permission"),
    ("WARNING: Claude Code running in Bypass Permissions mode\n\n\u276f 1. No, exit\n", "bypass"),
    (CLAUDE % ("", "\u276f ") + "  bypass permissions on (shift+tab to cycle)", None),
    ("Detected a custom API key in your environment\n\u276f 2. No (recommended)\n", "api-key"),
    ("Something new\n\u276f 1. This\n  2. That\n", "choice")])
def test_dialogs_are_known_by_name(screen: str, name: Optional[str]) -> None:
    found = core.dialog_in(look(screen), profile())
    assert (found["name"] if found else None) == name


@pytest.mark.parametrize("agent, resumes, words", [
    ("claude-code", False, "claude --allowedTools=Bash(/p publish:*) -y --session-id I P"),
    ("claude-code", True, "claude --allowedTools=Bash(/p publish:*) -y --resume I P"),
    ("codex", False, "codex --no-daemon -y P"), ("codex", True, "codex --no-daemon -y resume I P"),
    ("opencode", False, "opencode -y --prompt P"), ("hermes", False, "hermes chat -y"), ("generic", False, "-y")])
def test_command_lines_of_agents(agent: str, resumes: bool, words: str) -> None:
    plan = core.SessionPlan("tmux:x", agent, "/", "", False, ["-y"])
    values = {"id": "I", "prompt": "P", "publish": "/p publish"}
    assert core.launch_words(profile(agent), plan, values, resumes) == words.replace("(/p publish", "(/p~publish") \
        .replace(" ", "\0").replace("~", " ").split("\0")

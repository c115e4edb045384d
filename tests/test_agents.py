"""Real agent programs in real tmux panes, with a script in place of their model: `make test-agents`.

Each is installed from npm, in the version that stands here, into .build/agents, gets a home of its own with a
configuration that knows only the model on 127.0.0.1, and is taken through whole jobs by its own shell tool. What was
seen of it (delays, screens) is printed, and kept in .build/agents/NAME.seen.
"""
from __future__ import annotations

import fcntl
import json
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple

import pytest

from support import ROOT, poll
from support.cli import Mam, Tmux
from support.model import Model

pytestmark = [pytest.mark.agents, pytest.mark.timeout(900)]
CACHE = ROOT / ".build" / "agents"
INSTALL_S = 600
NOWHERE = "http://127.0.0.1:9"          # a proxy that is not there: nothing beyond this machine is reached


# ---- the agents ------------------------------------------------------------------------------------------------

def configure_opencode(home: Path, model: Model) -> None:
    folder = home / ".config" / "opencode"
    folder.mkdir(parents=True)
    (folder / "opencode.json").write_text(json.dumps({
        "$schema": "https://opencode.ai/config.json", "model": "local/stand-in", "small_model": "local/stand-in",
        "autoupdate": False, "share": "disabled", "permission": {"*": "allow"},
        "provider": {"local": {
            "npm": "@ai-sdk/openai-compatible", "name": "Local", "options": {"baseURL": model.url, "apiKey": "none"},
            "models": {"stand-in": {"name": "Stand-in", "tool_call": True,
                                    "limit": {"context": 100000, "output": 4000}}}}}}))


def configure_pi(home: Path, model: Model) -> None:
    folder = home / ".pi" / "agent"
    folder.mkdir(parents=True)
    (folder / "models.json").write_text(json.dumps({"providers": {"local": {
        "baseUrl": model.url, "api": "openai-completions", "apiKey": "none",
        "models": [{"id": "stand-in", "name": "Stand-in", "contextWindow": 100000, "maxTokens": 4000}]}}}))


def configure_codex(home: Path, model: Model) -> None:
    folder = home / ".codex"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        'model = "stand-in"\nmodel_provider = "local"\napproval_policy = "never"\n'
        'sandbox_mode = "danger-full-access"\ncheck_for_update_on_startup = false\n'
        f'[projects."{home.parent / "workspace"}"]\ntrust_level = "trusted"\n'
        f'[model_providers.local]\nname = "Local"\nbase_url = "{model.url}"\nwire_api = "responses"\n'
        '[analytics]\nenabled = false\n')


def configure_claude(home: Path, model: Model) -> None:
    (home / ".claude.json").write_text(json.dumps({
        "hasCompletedOnboarding": True, "autoUpdates": False, "theme": "dark",
        "projects": {str(home.parent / "workspace"): {"hasTrustDialogAccepted": True}}}))
    folder = home / ".claude"
    folder.mkdir()
    # No more is allowed than what a job needs. Its default, auto mode, asks a server whether a command is safe.
    rule = f"Bash({home.parent}/workspace/.mam/bin/mam-* publish *)"
    (folder / "settings.json").write_text(json.dumps({"permissions": {"allow": [rule]}, "env": {
        "ANTHROPIC_BASE_URL": model.url[:-len("/v1")], "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1"}}))


class Kind(NamedTuple):
    package: str
    version: str
    command: List[str]                  # the first word is in node_modules/.bin
    ready: str                          # on the screen when it takes a prompt
    configure: Callable[[Path, Model], None]
    env: Dict[str, str]
    launch: List[str]                   # before a prompt on the command line
    end: List[str]                      # the keys that end it when nothing is in its composer
    resume: str                         # a pattern: what it says, or where its conversation lies (a path under HOME)
    resume_words: List[str]             # before what the pattern found


KINDS = {
    "opencode": Kind("opencode-ai", "1.18.33", ["opencode"], "ctrl+p commands", configure_opencode, {
        "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1", "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1"},
        ["--prompt"], ["C-c"], r"opencode -s (ses_\w+)", ["-s"]),
    "pi": Kind("@mariozechner/pi-coding-agent", "0.73.1", ["pi", "--provider", "local", "--model", "stand-in"],
               "%/100k", configure_pi, {"PI_SKIP_VERSION_CHECK": "1", "PI_OFFLINE": "1"},
               [], ["C-c", "C-c"], r"(\S+/\.pi/agent/sessions/\S+\.jsonl)", ["--session"]),
    "codex": Kind("@openai/codex", "0.171.0", ["codex", "--no-daemon"], "\u203a", configure_codex, {},
                  [], ["C-c"], r"codex resume ([0-9a-f-]{36})", ["resume"]),
    "claude": Kind("@anthropic-ai/claude-code", "2.1.332", ["claude", "--permission-mode", "default"], "\u276f",
                   configure_claude, {}, [], ["C-c", "C-c"], r"--resume ([0-9a-f-]{36})", ["--resume"]),
}


def installed(name: str) -> Path:
    """The folder of its programs, installed if it is not there; the test is skipped where that cannot be."""
    kind = KINDS[name]
    folder = CACHE / f"{name}-{kind.version}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "whole").exists():
            npm = shutil.which("npm")
            if npm is None:
                pytest.skip("npm is not installed")
            shutil.rmtree(folder, ignore_errors=True)
            try:
                done = subprocess.run([npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder),
                                       f"{kind.package}@{kind.version}"], stdin=subprocess.DEVNULL, timeout=INSTALL_S,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                said = done.stdout.decode("utf-8", "replace").strip()
            except subprocess.TimeoutExpired:
                pytest.skip(f"npm did not install {kind.package}@{kind.version} within {INSTALL_S} s")
            if done.returncode != 0:
                pytest.skip(f"npm could not install {kind.package}@{kind.version}: {said[:200]}")
            (folder / "whole").touch()
    return folder / "node_modules" / ".bin"


# ---- an agent at work ------------------------------------------------------------------------------------------

class RealAgent:
    """One in a pane, and what was seen of it."""

    def __init__(self, name: str, mam: Mam, tmux: Tmux, model: Model) -> None:
        self.kind = KINDS[name]
        self._program = installed(name) / self.kind.command[0]
        self.kind.configure(mam.home, model)
        self.name, self.mam, self.tmux, self.model = name, mam, tmux, model
        self._notes = [f"{self.kind.package} {self.kind.version}"]
        self._screens: List[str] = []
        mam.env.update(MAM_TMUX_SOCKET=str(tmux.socket))
        self.pane = ""

    def start(self, *more: str) -> None:
        """In a new pane, until it takes a prompt, or works on the one of its command line."""
        begun = time.monotonic()
        words = [str(self._program), *self.kind.command[1:], *more]
        if self.pane:
            self.tmux.run("kill-session", "-t", self.name)
        # A second session: without one the server would end with the agent.
        self.tmux.new_pane("exec cat", name="other") if not self.tmux.panes() else None
        self.pane = self.tmux.new_pane(
            "exec " + " ".join(map(shlex.quote, words)), name=self.name, cwd=self.mam.workspace, env={
                "HOME": str(self.mam.home), "SHIV_ROOT": self.mam.environment()["SHIV_ROOT"], "HTTP_PROXY": NOWHERE,
                "HTTPS_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1,localhost", **self.kind.env})
        self.tmux.run("set-option", "-t", self.pane, "remain-on-exit", "on")
        self.wait_screen(self.kind.ready)
        self.note("ready", begun)
        self.keep("ready")
        self.note_text(self.tmux.pane(self.pane, "in the foreground: #{pane_current_command}, title: #{pane_title}"))

    def note_text(self, text: str) -> None:
        self._notes.append(text)

    def note(self, what: str, since: float) -> None:
        self.note_text(f"{what} after {time.monotonic() - since:.2f} s")

    def look(self) -> str:
        """The screen now; the first one that shows a paste is kept."""
        screen = self.tmux.capture(self.pane)
        if re.search(r"\[[Pp]aste", screen) and not any(text.startswith("a paste") for text in self._screens):
            self._keep("a paste", screen)
        return screen

    def keep(self, what: str) -> None:
        self._keep(what, self.tmux.capture(self.pane))

    def _keep(self, what: str, screen: str) -> None:
        lines = [line.rstrip() for line in screen.splitlines() if line.strip()]
        self._screens.append("\n".join([what, *lines]))

    def wait_screen(self, text: str, timeout: float = 120.0) -> None:
        poll(lambda: text in self.look(), timeout, lambda: f"{text!r} on the screen of {self.name}:\n{self.look()}")

    def wait_steps(self, *steps: str) -> None:
        """Until the model was asked for just these, but for titles."""
        def taken() -> List[str]:
            return [step for step in self.model.taken() if step != "title"]
        poll(lambda: len(taken()) >= len(steps), 60, lambda: f"{steps}, so far {taken()}:\n{self.look()}")
        assert taken() == list(steps)

    def job(self, job_id: str, prompt: str) -> Any:
        """A whole job, watched until delegate has ended."""
        begun, before = time.monotonic(), len(self.model.requests)
        run = self.mam.popen("delegate", "--agent-session", f"tmux:{self.name}", "--prompt", prompt, "--job-id", job_id,
                             "--ack-timeout", 60, "--idle-timeout", 120)
        poll(lambda: [self.look(), run.code is not None][1], 200,
             lambda: f"{run}\n{self.model.taken()}\n{self.look()}", interval=0.05)
        self.note(f"{job_id}: ended", begun)
        self.note_text(f"{job_id}: the model was asked for " + ", ".join(
            f"{request.step} at {request.at - begun:.2f} s" for request in self.model.requests[before:]))
        return run.wait()

    def prompts(self, text: str) -> List[str]:
        """What of the longest conversation the user said with `text` in it."""
        return [said for role, said in self.model.conversation() if role == "user" and text in said]

    def close(self, test: str) -> None:
        """What was seen, for people."""
        text = "\n".join(self._notes)
        print(text)
        (CACHE / f"{self.name}.{test}.seen").write_text(
            text + "".join(f"\n\n---- {screen}" for screen in self._screens) + "\n")


@pytest.fixture(params=list(KINDS))
def agent(request: pytest.FixtureRequest, mam: Mam, tmux: Tmux) -> Iterator[RealAgent]:
    with Model() as model:
        made = RealAgent(str(request.param), mam, tmux, model)
        yield made
        made.close(request.node.originalname.split("_")[-1])


def test_a_real_agent_does_whole_jobs_in_its_pane(agent: RealAgent) -> None:
    """Lost: everything this is for. Two jobs in turn, in one session: each prompt arrives whole and once, the brief is
    read, and started, progress and completed are reported by the agent's own shell tool."""
    steps: List[str] = []
    agent.start()
    for number, prompt in enumerate(["Say hello to the first.", "!Line one\n/line two \u00fc\U0001f600\n" * 400], 1):
        job_id = f"J{number}"
        result = agent.job(job_id, prompt)
        assert result.code == 0, result
        events = [row["event"] for row in agent.mam.events(job_id) if row["source"] == "worker" and row["seq"]]
        assert events == ["started", "progress", "completed"], result
        found = agent.prompts(f"Job {job_id},")
        assert len(found) == 1 and found[0].count("--event completed") == 1, found
        results = [text for role, text in agent.model.conversation() if role == "tool"]
        assert any(prompt.split("\n")[0] in text for text in results), results       # the brief, as the tool gave it
        steps += ["brief", "started", "progress", "completed", "end"]
        agent.wait_steps(*steps)                # the end is recorded before the agent has told its model so
        agent.keep(f"after {job_id}")


def test_a_real_agent_is_ended_and_resumed(agent: RealAgent) -> None:
    """Lost: a prompt given at launch; or the conversation, when its agent is stopped and started again."""
    brief = agent.mam.workspace / "brief.md"
    brief.write_text("Say hello.")
    publish = agent.mam.folder / "workspace" / ".mam" / "bin" / "mam-0"       # what is allowed by configure_claude
    publish.parent.mkdir(parents=True, mode=0o700)
    publish.write_text("#!/bin/sh\necho told: $*\n")
    publish.chmod(0o700)
    prompt = f"Job J1, attempt 1. The brief is the file {brief}\nfirst:  {publish} publish --event started\n" \
             f"last:  {publish} publish --event completed"
    agent.start(*agent.kind.launch, prompt)
    agent.wait_steps("brief", "started", "completed", "end")
    assert agent.prompts("Job J1,") == [text for text in agent.prompts("Job J1,") if prompt in text]
    assert len(agent.prompts("Job J1,")) == 1
    agent.wait_screen("The job is done and reported.")
    agent.keep("done")
    begun = time.monotonic()
    # Codex and others show the last words before they take keys again.
    poll(lambda: [agent.tmux.run("send-keys", "-t", agent.pane, *agent.kind.end),
                  agent.tmux.pane(agent.pane, "#{pane_dead}") == "1"][1], 30, agent.look, interval=1.0)
    agent.note_text(f"ended by {' '.join(agent.kind.end)} with status "
                    + agent.tmux.pane(agent.pane, "#{pane_dead_status}"))
    agent.note("ended", begun)
    agent.keep("ended")
    places = "\n".join(str(path) for path in agent.mam.home.rglob("*.jsonl"))
    found = re.search(agent.kind.resume, agent.tmux.capture(agent.pane, history=True) + "\n" + places)
    assert found is not None, agent.look() + places
    agent.start(*agent.kind.resume_words, found.group(1))
    agent.wait_screen("Job J1, attempt 1")
    agent.keep("resumed")
    agent.wait_steps("brief", "started", "completed", "end")        # nothing was said or done again

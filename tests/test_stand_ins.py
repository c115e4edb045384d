"""The stand-ins for agents, their model and herdr: what they were told to get wrong they do, and nothing else."""
from __future__ import annotations

import json
import shutil
import urllib.request
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

from support import poll
from support.agents import TuiAgent, install
from support.cli import Mam, Tmux
from support.herdr import Herdr, HerdrError
from support.model import Model
from support.tui_agent import brief_of, publish_commands

PROMPT = """Job J7, attempt 1, from mam. The brief is the file %s
Report with these shell commands, exactly as they stand:
now, before anything else:  /bin/echo publish --job=J7 --event started --heartbeat 30
at every milestone:         /bin/echo publish --job=J7 --event progress --detail 'half: done'
when you need a human:      /bin/echo publish --job=J7 --event permission_required --detail 'what for'
at the end, if it is done:  /bin/echo publish --job=J7 --event completed --detail 'the result'"""


@pytest.fixture
def brief(tmp_path: Path) -> Path:
    path = tmp_path / "a brief.md"
    path.write_text("Say hello.\n")
    return path


@pytest.fixture
def prompt(brief: Path) -> str:
    return PROMPT % brief


@pytest.fixture
def agent(tmux: Tmux, tmp_path: Path) -> Callable[..., TuiAgent]:
    return lambda *options, **more: TuiAgent(tmux, tmp_path, *options, **more)


def test_commands_are_found_as_they_stand_in_a_prompt(prompt: str, brief: Path) -> None:
    found = publish_commands(prompt)
    assert list(found) == ["started", "progress", "permission_required", "completed"]
    assert found["progress"] == "/bin/echo publish --job=J7 --event progress --detail 'half: done'"
    assert brief_of(prompt) == str(brief) and brief_of("see a.md") == ""
    assert publish_commands("- `'/a b/mam' publish --job=J --event error --detail 'x'`\n"
                            "$MAM_PUBLISH_CMD --event started") == {
        "error": "'/a b/mam' publish --job=J --event error --detail 'x'", "started": "$MAM_PUBLISH_CMD --event started"}


# ---- the agent ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("like, shown", [("plain", "Job J7, attempt 1"), ("claude", "[Pasted text #1 +5 lines]"),
                                         ("opencode", "[Pasted ~6 lines]"), ("codex", "Job J7, attempt 1"),
                                         ("pi", "Job J7, attempt 1")])
def test_an_agent_takes_a_paste_and_works(agent: Callable[..., TuiAgent], tmux: Tmux, prompt: str, like: str,
                                          shown: str) -> None:
    alice = agent("--like", like)
    assert tmux.pane(alice.pane, "#{pane_current_command} #{pane_dead}") == "agent 0"
    alice.paste(prompt)
    alice.wait("paste")
    tmux.wait_for(alice.pane, shown)
    assert alice.submissions() == []
    poll(lambda: [alice.press("Enter"), alice.submissions()][1], 10, alice.describe, interval=0.2)
    alice.wait("turn_end")
    assert alice.pastes() == [prompt] and alice.submissions() == [prompt] and alice.count("Job J7,") == 1
    assert alice.ran() == {"started": 0, "progress": 0, "completed": 0}
    assert alice.rows("brief")[0]["text"] == "Say hello.\n"
    assert "publish --job=J7 --event completed" in alice.screen()


def test_without_brackets_a_newline_submits(agent: Callable[..., TuiAgent]) -> None:
    alice = agent("--work", 0.3)
    alice.paste("one\ntwo\nthree", brackets=False)
    alice.wait("typed", text="three")
    assert alice.submissions() == ["one", "two"] and alice.pastes() == []


def test_what_goes_wrong_with_input(agent: Callable[..., TuiAgent], tmux: Tmux) -> None:
    alice = agent("--swallow-enters", 2, "--lose-pastes", 1, "--draft", "half a thought")
    assert "half a thought" in alice.screen()
    alice.paste("lost")
    alice.wait("paste", text="lost", lost="lost")
    alice.press("C-u")
    alice.paste("kept")
    alice.wait("paste", text="kept", lost="")
    alice.press("Enter", "Enter", "Enter")
    alice.wait("submit")
    assert len(alice.rows("swallowed")) == 2 and alice.submissions() == ["kept"]
    bob = agent("--suppress-ms", 60000, name="bob")
    bob.paste("a")
    bob.press("Enter")
    bob.wait("suppressed")
    assert bob.submissions() == []


def test_a_slow_start_loses_what_comes_before(agent: Callable[..., TuiAgent], tmux: Tmux) -> None:
    alice = agent("--slow-start", 1, "--drawn-early", "--like", "opencode", ready=False)
    tmux.wait_for(alice.pane, "Ask anything")
    assert alice.rows("ready") == []
    alice.paste("early")
    alice.press("Enter")
    alice.wait("ready")
    alice.paste("late")
    alice.press("Enter")
    alice.wait("submit")
    assert alice.pastes() == ["late"] and alice.submissions() == ["late"]


@pytest.mark.parametrize("name, keys, left", [
    ("trust", ["Enter"], False), ("trust", ["Down", "Enter"], True), ("trust-numbered", ["1"], True),
    ("bypass", ["Down", "Enter"], True), ("api-key", ["Enter"], True)])
def test_a_dialog_takes_the_keys(agent: Callable[..., TuiAgent], name: str, keys: List[str], left: bool) -> None:
    alice = agent("--dialog", name)
    alice.wait("dialog", name=name)
    alice.paste("not for you")
    alice.wait("paste", lost="dialog")
    alice.press(*keys)
    alice.wait("answer", name=name)
    if not left:
        assert alice.wait("exit")["code"] == 1
        return
    alice.paste("hello")
    alice.press("Enter")
    assert alice.wait("submit")["text"] == "hello"


def test_a_permission_dialog_may_come_between_paste_and_enter(agent: Callable[..., TuiAgent]) -> None:
    alice = agent("--dialog", "permission@paste")
    alice.paste("p")
    alice.wait("dialog", name="permission")
    alice.press("Enter")                    # it answers the dialog, and submits nothing
    alice.wait("answer", effect="go")
    assert alice.submissions() == []
    alice.press("Enter")
    alice.wait("submit")


def test_tools_that_need_permission(agent: Callable[..., TuiAgent], prompt: str, brief: Path) -> None:
    rules = ["--allowedTools", "Bash(/bin/echo publish:*)", "--allowedTools", f"Bash(cat {brief})"]
    alice = agent("--ask-tools", *rules)
    bob = agent("--ask-tools", name="bob")
    for one in (alice, bob):
        one.paste(prompt)
        one.wait("paste")
        one.press("Enter")
    alice.wait("turn_end")
    assert len(alice.ran()) == 3 and alice.rows("dialog") == []
    bob.wait("dialog", name="permission")
    bob.press("3")
    bob.wait("dialog", 2)
    bob.press("Escape")
    bob.wait("turn_end")
    assert bob.ran() == {} and bob.rows("brief") == []


def test_an_agent_that_asks_goes_on_with_the_answer(agent: Callable[..., TuiAgent], prompt: str) -> None:
    alice = agent("--events", "started,permission_required,completed", "--work", 0.05)
    for text, events in ((prompt, 2), ("yes, do it", 3)):
        alice.paste(text)
        alice.press("Enter")
        alice.wait("ran", events)
    assert list(alice.ran()) == ["started", "permission_required", "completed"]


def test_a_hanging_agent_is_busy_and_is_interrupted(agent: Callable[..., TuiAgent], tmux: Tmux, prompt: str) -> None:
    alice = agent("--events", "started,hang")
    alice.paste(prompt)
    alice.press("Enter")
    tmux.wait_for(alice.pane, "esc to interrupt")
    alice.paste("meanwhile")
    alice.press("Enter")
    alice.wait("submit", queued=True)
    alice.press("Escape")
    alice.wait("turn_end", stopped=True)
    alice.wait("turn", text="meanwhile")


@pytest.mark.parametrize("moment", ["paste", "submit", "event:progress", "0.3", "command"])
def test_an_agent_dies_when_told(agent: Callable[..., TuiAgent], prompt: str, moment: str) -> None:
    alice = agent(*([] if moment == "command" else ["--die", moment + "=7"]))
    if moment != "0.3":
        alice.paste("/die 7" if moment == "command" else prompt)
        alice.press("Enter")
    assert alice.wait("exit")["code"] == 7
    assert len(alice.rows("ran")) == (1 if moment == "event:progress" else 0)


def test_conversations_are_kept_and_resumed(agent: Callable[..., TuiAgent], tmux: Tmux, tmp_path: Path) -> None:
    known = str(uuid.uuid4())
    alice = agent("--session-id", known, "--like", "claude")
    tmux.run("set-option", "-t", alice.pane, "remain-on-exit", "on")
    alice.paste("remember this")
    poll(lambda: [alice.press("Enter"), alice.submissions()][1], 10, alice.describe, interval=0.2)
    alice.wait("turn_end")
    transcript = tmp_path / "transcripts" / (known + ".jsonl")
    assert json.loads(transcript.read_text().splitlines()[0])["text"] == "remember this"
    alice.press("C-c", "C-c")
    assert alice.wait("exit")["code"] == 0
    tmux.wait_for(alice.pane, f"claude --resume {known}")
    assert not list((tmp_path / "transcripts" / "live").iterdir())
    for options, said in ((["--session-id", known], "is already in use"),
                          (["--resume", str(uuid.uuid4())], "No conversation found")):
        name = options[0].strip("-")
        program = tmp_path / name
        program.mkdir()
        install(program, "agent", *options)
        pane = tmux.new_pane(f"{program}/agent; exec cat", env={"TUI_AGENT_TRANSCRIPTS": str(transcript.parent)})
        tmux.wait_for(pane, said)
    bob = agent("resume", known, name="bob")
    tmux.wait_for(bob.pane, "remember this")
    assert bob.session == known and bob.rows("start")[0]["others"] == []
    carol = agent("--resume", known, name="carol")
    assert carol.rows("start")[0]["others"] == [bob.pid]
    bob.paste("/exit")
    bob.press("Enter")
    assert bob.wait("exit")["why"] == "/exit"


def test_a_prompt_of_the_command_line(agent: Callable[..., TuiAgent], prompt: str) -> None:
    alice = agent(prompt, "--dialog", "trust")
    alice.wait("dialog")
    assert alice.rows("launch") == []
    alice.press("Down", "Enter")
    alice.wait("turn_end")
    assert alice.count("Job J7,") == 1 and len(alice.ran()) == 3 and alice.submissions() == []


def test_a_pointer_is_followed(agent: Callable[..., TuiAgent], prompt: str, tmp_path: Path) -> None:
    """One line that points to the instructions, as mam gives it where no text of several lines can be put in."""
    how = tmp_path / "J7.a1.how.md"
    how.write_text(prompt)
    alice = agent("--no-daemon", "--think", 0)
    alice.paste(f"Job J7, attempt 1, from mam. Read the file {how} now and do exactly what it says.")
    alice.press("Enter")
    alice.wait("turn_end")
    assert list(alice.ran()) == ["started", "progress", "completed"] and len(alice.rows("brief")) == 2


# ---- the model ---------------------------------------------------------------------------------------------

PARAMETERS = {"type": "object", "required": ["command", "description"],
              "properties": {"command": {"type": "string"}, "description": {"type": "string"}}}


def chat(data: Any, chunks: List[Any]) -> str:
    if data:
        return str(data["choices"][0]["message"].get("tool_calls", [{"function": {"arguments": ""}}])[0]["function"]
                   ["arguments"])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    return "".join(delta["tool_calls"][0]["function"]["arguments"] for delta in deltas if "tool_calls" in delta)


def responses(data: Any, chunks: List[Any]) -> str:
    done = data or chunks[-1]["response"]
    return str(done["output"][0].get("arguments", ""))


def messages(data: Any, chunks: List[Any]) -> str:
    if data:
        return json.dumps(data["content"][0]["input"]) if data["stop_reason"] == "tool_use" else ""
    return "".join(chunk["delta"].get("partial_json", "") for chunk in chunks if chunk["type"] == "content_block_delta")


# path, name of the conversation, the tools, a result, and how the arguments of a call are found in an answer
DIALECTS: List[Any] = [
    ("/chat/completions", "messages", [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}],
     {"role": "tool", "content": "done"}, chat),
    ("/responses", "input", [{"type": "function", "name": "shell", "parameters": PARAMETERS}],
     {"type": "function_call_output", "output": "done"}, responses),
    ("/messages", "messages", [{"name": "Bash", "input_schema": PARAMETERS}],
     {"role": "user", "content": [{"type": "tool_result", "content": "done"}]}, messages)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, name, tools, result, arguments", DIALECTS, ids=["chat", "responses", "messages"])
def test_the_model_calls_the_shell_tool_step_by_step(prompt: str, brief: Path, stream: bool, path: str, name: str,
                                                     tools: Any, result: Any, arguments: Any) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(**more: Any) -> str:
        body = json.dumps({"model": "m", name: said, "stream": stream, **more}).encode()
        text = opener.open(urllib.request.Request(model.url + path, body), timeout=20).read().decode()
        chunks = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
        return str(arguments(None if stream else json.loads(text), chunks))

    said: List[Dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    commands = []
    with Model() as model:
        while len(commands) < 9:
            call = ask(tools=tools)
            if not call:
                break
            commands.append(json.loads(call)["command"])
            said.append(result)
        ask()
        assert model.taken() == ["brief", "started", "progress", "completed", "end", "title"]
    found = publish_commands(prompt)
    assert commands == [f"cat '{brief}'"] + [found[event] for event in ("started", "progress", "completed")]


# ---- herdr -------------------------------------------------------------------------------------------------

@pytest.fixture
def herdr(tmp_path: Path) -> Iterator[Herdr]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    if not Path("/proc/self").exists():
        pytest.skip("the stand-in for herdr needs /proc")
    made = Herdr(tmp_path, effect_ms=2000)
    yield made
    made.close()


def test_herdr_answers_in_envelopes(herdr: Herdr, mam: Mam) -> None:
    pane = herdr.workspace("--label", "alice", env={"COLOUR": "blue green"})
    assert pane == "w1:p1"
    assert json.loads(herdr.run("workspace", "list").stdout)["id"] == "cli:workspace:list"
    assert herdr("workspace", "list")["workspaces"][0]["label"] == "alice"
    herdr("pane", "run", pane, "echo $COLOUR-$HERDR_PANE_ID-$HERDR_ENV")
    assert herdr("pane", "wait-output", pane, "--match", "blue green-w1:p1-1", "--timeout", 10000)["pane_id"] == pane
    assert "blue green-w1:p1-1" in herdr("pane", "read", pane, "--source", "visible")
    split = herdr("pane", "split", pane, "--direction", "right")["pane"]["pane_id"]
    tab = herdr("tab", "create", "--workspace", "w1")
    assert (split, tab["tab"]["tab_id"], tab["root_pane"]["pane_id"]) == ("w1:p2", "w1:t2", "w1:p3")
    herdr("pane", "close", split)
    assert [row["pane_id"] for row in herdr("pane", "list")["panes"]] == [pane, "w1:p3"]
    info = herdr("pane", "process-info", "--pane", pane)["process_info"]
    assert info["foreground_process_group_id"] == info["shell_pid"]
    for words, code in ((("pane", "get", "w9:p9"), "pane_not_found"), (("agent", "get", "nobody"), "agent_not_found"),
                        (("pane", "send-keys", pane, "hyper+x"), "invalid_key"), (("pane", "read"), "usage"),
                        (("agent", "prompt", pane, "x", "--until", "idle"), "usage"),
                        (("agent", "prompt", pane, "x"), "agent_not_found"),
                        (("agent", "start", "bob", "--kind", "vi", "--pane", pane), "unsupported_agent_kind"),
                        (("agent", "start", "b", "--kind", "codex", "--pane", pane, "--", "a\nb"),
                         "invalid_agent_argument")):
        with pytest.raises(HerdrError) as raised:
            herdr(*words)
        assert raised.value.code == code, words
    herdr.stop()
    done = herdr.install(mam).run("pane", "list")
    assert (done.returncode, json.loads(done.stderr)["error"]["code"]) == (1, "server_not_running")


def test_herdr_prompts_an_agent(herdr: Herdr, prompt: str) -> None:
    journal = install(herdr.bin, "claude", "--like", "claude", "--work", 0.2)
    pane = herdr.workspace()
    started = herdr("agent", "start", "alice", "--kind", "claude", "--pane", pane)
    assert started["argv"] == ["claude"] and started["agent"]["interactive_ready"] is True
    assert (started["agent"]["name"], started["agent"]["agent_status"]) == ("alice", "idle")
    session = started["agent"]["agent_session"]
    assert session == {"source": "herdr:claude", "agent": "claude", "kind": "id",
                       "value": journal.rows("start")[0]["session"]}
    said = herdr("agent", "prompt", "alice", prompt, "--wait", "--until", "working")
    assert (said["type"], said["agent"]["agent_status"]) == ("agent_prompted", "working")
    assert herdr("agent", "wait", "alice", "--timeout", 20000)["agent"]["agent_status"] == "done"
    paste, enter = journal.wait("paste"), journal.wait("key")
    assert journal.submissions() == [prompt] and enter["at"] - paste["at"] >= 0.25 and len(journal.ran()) == 3
    for fault, code, pastes, keys in (("unsubmitted", "", 2, 1), ("lost", "agent_prompt_stalled", 2, 1),
                                      ("error:agent_blocked", "agent_blocked", 2, 1),
                                      ("error:agent_not_ready", "agent_not_ready", 2, 1)):
        herdr.fault("agent prompt", fault)
        try:
            herdr("agent", "prompt", "alice", "again", *(["--wait"] if fault == "lost" else []))
            assert code == "", fault
        except HerdrError as error:
            assert error.code == code
        journal.wait("paste", pastes)
        assert (len(journal.pastes()), len(journal.keys())) == (pastes, keys), fault
    herdr.fault("*", "status:idle", 1)
    assert herdr.status("alice") == "idle"


def test_herdr_sees_a_dialog_and_a_dead_agent(herdr: Herdr) -> None:
    journal = install(herdr.bin, "claude", "--dialog", "trust")
    pane = herdr.workspace()
    with pytest.raises(HerdrError) as raised:
        herdr("agent", "start", "alice", "--kind", "claude", "--pane", pane)
    assert raised.value.code == "agent_not_ready" and herdr.status("alice") == "blocked"
    with pytest.raises(HerdrError) as raised:
        herdr("agent", "prompt", "alice", "p")
    assert raised.value.code == "agent_blocked" and journal.pastes() == []
    herdr("agent", "send-keys", "alice", "enter")
    assert journal.wait("exit")["code"] == 1
    poll(lambda: herdr("agent", "list")["agents"] == [], 10, "no agent any more")


def test_herdr_resumes_agents_after_a_restart(herdr: Herdr) -> None:
    journal = install(herdr.bin, "claude", "--work", 0.5)
    pane = herdr.workspace("--label", "kept")
    herdr("agent", "start", "alice", "--kind", "claude", "--pane", pane)
    herdr("agent", "prompt", "alice", "hello", "--wait", "--until", "done")
    known = journal.rows("start")[0]["session"]
    herdr("agent", "list")
    herdr.kill()
    with pytest.raises(HerdrError):
        herdr("pane", "list")
    herdr.start()
    again = journal.wait("start", 2)
    assert again["resumed"] and again["session"] == known
    found = herdr("pane", "get", pane)["pane"]
    assert found["pane_id"] == pane
    with pytest.raises(HerdrError):
        herdr("agent", "get", "alice")          # names are not kept

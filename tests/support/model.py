"""A language model's place taken by a script: an OpenAI-compatible server on 127.0.0.1 for real agent CLIs.

It answers as a model that obeys would: to a prompt with publish commands it calls the agent's own shell tool, first to
read the brief, then once for each event of `events`, and ends with a sentence. What to do next is read off the
conversation that the agent sends along, so the server keeps no state and any number of agents may use one.
"""
from __future__ import annotations

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import HOST
from .tui_agent import brief_of, publish_commands

SHELL_TOOLS = ("bash", "shell", "run_shell_command", "execute_command", "terminal", "exec_command")
EVENTS = ("started", "progress", "completed")


class Step(NamedTuple):
    """What the model says next: a command for the shell tool, or, without one, the text that ends its turn."""
    name: str
    command: str
    text: str = ""


class Request(NamedTuple):
    at: float                # monotonic
    path: str
    body: Dict[str, Any]
    step: str                # brief, the event, end; title for a request without tools


def text_of(message: Dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content)


def next_step(messages: Sequence[Dict[str, Any]], events: Sequence[str] = EVENTS) -> Step:
    """The step that follows in this conversation. Tool results since the last prompt with commands are counted."""
    prompts = [at for at, message in enumerate(messages)
               if message.get("role") == "user" and publish_commands(text_of(message))]
    if not prompts:
        return Step("end", "", "There is nothing to report in this prompt.")
    prompt = text_of(messages[prompts[-1]])
    commands = publish_commands(prompt)
    brief = brief_of(prompt)
    steps = [Step("brief", "cat '%s'" % brief)] if brief else []
    steps += [Step(event, commands[event]) for event in events if event in commands]
    done = sum(1 for message in messages[prompts[-1]:] if message.get("role") == "tool")
    return steps[done] if done < len(steps) else Step("end", "", "The job is done and reported.")


def shell_call(tools: Sequence[Dict[str, Any]], command: str) -> Optional[Tuple[str, str]]:
    """(name, arguments) of a call of the shell tool among `tools`, with every required argument; None without one."""
    offered = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
               if tool.get("type") == "function"}
    for name in [name for name in SHELL_TOOLS if name in offered] + sorted(offered):
        properties = offered[name].get("properties") or {}
        if "command" not in properties:
            continue
        arguments: Dict[str, Any] = {"command": command}
        for needed in offered[name].get("required") or []:
            kind = properties.get(needed, {}).get("type")
            arguments.setdefault(needed, 60 if kind in ("number", "integer") else
                                 False if kind == "boolean" else "Reports on the job")
        return name, json.dumps(arguments)
    return None


class Model:
    """`with Model() as model:` serves `model.url` ("http://127.0.0.1:PORT/v1"), model name "stand-in".

    delay_s   before each answer, as if it thought
    events    what it publishes, in this order; what the prompt has no command for is left out
    steps     instead of `next_step`: conversation -> Step
    """
    name = "stand-in"

    def __init__(self, events: Sequence[str] = EVENTS, delay_s: float = 0.0,
                 steps: Optional[Callable[[Sequence[Dict[str, Any]]], Step]] = None) -> None:
        self.events, self.delay_s = tuple(events), delay_s
        self.steps = steps or (lambda messages: next_step(messages, self.events))
        self.requests: List[Request] = []
        self._server = ThreadingHTTPServer((HOST, 0), type("Bound", (_Handler,), {"model": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    def taken(self) -> List[str]:
        """The steps of all answers so far."""
        return [request.step for request in self.requests]

    def conversation(self) -> List[Tuple[str, str]]:
        """(role, text) of the longest conversation seen."""
        longest = max((request.body.get("messages") or [] for request in self.requests), key=len, default=[])
        return [(str(message.get("role")), text_of(message)) for message in longest]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model: Model

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the test's stderr; `requests` has it all."""

    def do_GET(self) -> None:
        if self.path.rstrip("/").endswith("/models"):
            self._json(200, {"object": "list", "data": [{"id": Model.name, "object": "model", "owned_by": "tests"}]})
        else:
            self._json(404, {"error": {"message": "no such page: " + self.path, "type": "invalid_request_error"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if not re.search(r"/chat/completions/?$", self.path):
            self._json(404, {"error": {"message": "no such page: " + self.path, "type": "invalid_request_error"}})
            return
        tools = body.get("tools") or []
        step = self.model.steps(body.get("messages") or []) if tools else Step("title", "", "A job")
        call = shell_call(tools, step.command) if step.command else None
        if step.command and call is None:
            step = Step("end", "", "There is no shell tool.")
        self.model.requests.append(Request(time.monotonic(), self.path, body, step.name))
        time.sleep(self.model.delay_s)
        message: Dict[str, Any] = {"role": "assistant", "content": step.text or None}
        if call:
            message["tool_calls"] = [{"id": "call_%d" % len(self.model.requests), "type": "function",
                                      "function": {"name": call[0], "arguments": call[1]}}]
        try:
            self._answer(body, message, "tool_calls" if call else "stop")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True        # the agent was stopped meanwhile

    def _answer(self, body: Dict[str, Any], message: Dict[str, Any], reason: str) -> None:
        base = {"id": "chatcmpl-%d" % len(self.model.requests), "created": int(time.time()),
                "model": body.get("model") or Model.name}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        if not body.get("stream"):
            self._json(200, {**base, "object": "chat.completion", "usage": usage, "choices": [
                {"index": 0, "message": message, "finish_reason": reason}]})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for delta, finish in _deltas(message, reason):
            self._event({**base, "object": "chat.completion.chunk", "choices": [
                {"index": 0, "delta": delta, "finish_reason": finish}]})
        self._event({**base, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, chunk: Dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, code: int, value: Dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _deltas(message: Dict[str, Any], reason: str) -> List[Tuple[Dict[str, Any], Optional[str]]]:
    """The message in pieces, as it is streamed: words one by one, the arguments of a call in two halves."""
    pieces: List[Tuple[Dict[str, Any], Optional[str]]] = [({"role": "assistant", "content": ""}, None)]
    pieces += [({"content": word}, None) for word in re.findall(r"\S+\s*", message["content"] or "")]
    for number, call in enumerate(message.get("tool_calls", [])):
        arguments = call["function"]["arguments"]
        half = len(arguments) // 2
        pieces.append(({"tool_calls": [{"index": number, **call, "function": {
            "name": call["function"]["name"], "arguments": arguments[:half]}}]}, None))
        pieces.append(({"tool_calls": [{"index": number, "function": {"arguments": arguments[half:]}}]}, None))
    return pieces + [({}, reason)]

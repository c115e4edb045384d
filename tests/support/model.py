"""A language model's place taken by a script: a server on 127.0.0.1 for real agent CLIs, in three dialects.

OpenAI's /v1/chat/completions (opencode, pi and most others) and /v1/responses (codex), Anthropic's /v1/messages
(claude), all with and without streaming. It answers as a model that obeys would: to a prompt with publish commands it
calls the agent's own shell tool, first to read the brief, then once for each event of `events`, and ends with a
sentence. What to do next is read off the conversation that the agent sends along, so the server keeps no state and any
number of agents may use one.
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

SHELL_TOOLS = ("bash", "Bash", "exec_command", "shell", "shell_command", "run_shell_command", "execute_command",
               "terminal")
EVENTS = ("started", "progress", "completed")


class Step(NamedTuple):
    """What the model says next: a command for the shell tool, or, without one, the text that ends its turn."""
    name: str
    command: str
    text: str = ""


class Said(NamedTuple):
    """One thing said in a conversation, in whatever dialect: role is system, user, assistant, or tool for a result."""
    role: str
    text: str


class Request(NamedTuple):
    at: float                # monotonic
    path: str
    body: Dict[str, Any]
    said: List[Said]
    step: str                # brief, the event, end; title for a request without tools


def next_step(said: Sequence[Said], events: Sequence[str] = EVENTS) -> Step:
    """The step that follows in this conversation. Tool results since the last prompt with commands are counted."""
    prompts = [at for at, one in enumerate(said) if one.role == "user" and publish_commands(one.text)]
    if not prompts:
        return Step("end", "", "There is nothing to report in this prompt.")
    prompt = said[prompts[-1]].text
    commands = publish_commands(prompt)
    brief = brief_of(prompt)
    steps = [Step("brief", "cat '%s'" % brief)] if brief else []
    steps += [Step(event, commands[event]) for event in events if event in commands]
    done = sum(1 for one in said[prompts[-1]:] if one.role == "tool")
    return steps[done] if done < len(steps) else Step("end", "", "The job is done and reported.")


def shell_call(tools: Dict[str, Dict[str, Any]], command: str) -> Optional[Tuple[str, Dict[str, Any]]]:
    """(name, arguments) of a call of the shell tool among `tools`, with every required argument; None without one."""
    for name in [name for name in SHELL_TOOLS if name in tools] + sorted(tools):
        properties = tools[name].get("properties") or {}
        place = "command" if "command" in properties else "cmd" if "cmd" in properties else ""
        if not place:
            continue
        words = ["/bin/sh", "-c", command] if properties[place].get("type") == "array" else command
        arguments: Dict[str, Any] = {place: words}
        for needed in tools[name].get("required") or []:
            kind = properties.get(needed, {}).get("type")
            arguments.setdefault(needed, 60 if kind in ("number", "integer") else
                                 False if kind == "boolean" else "Reports on the job")
        return name, arguments
    return None


# ---- dialects ------------------------------------------------------------------------------------------------

Event = Tuple[str, Dict[str, Any]]              # of a stream: its name, or "", and its data


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return str(content or "")


class Chat:
    """OpenAI, /v1/chat/completions."""
    path = "/chat/completions"

    @staticmethod
    def read(body: Dict[str, Any]) -> Tuple[List[Said], Dict[str, Dict[str, Any]]]:
        tools = {tool["function"]["name"]: tool["function"].get("parameters") or {}
                 for tool in body.get("tools") or [] if tool.get("type") == "function"}
        return [Said(str(message.get("role")), _text(message.get("content")))
                for message in body.get("messages") or []], tools

    @staticmethod
    def answer(body: Dict[str, Any], number: int, text: str, call: Optional[Tuple[str, Dict[str, Any]]]) \
            -> Tuple[Dict[str, Any], List[Event]]:
        base = {"id": "chatcmpl-%d" % number, "created": int(time.time()), "model": body.get("model")}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        message: Dict[str, Any] = {"role": "assistant", "content": text or None}
        deltas: List[Dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": word} for word in re.findall(r"\S+\s*", text)]
        if call:
            arguments = json.dumps(call[1])
            half = len(arguments) // 2
            head = {"id": "call_%d" % number, "type": "function"}
            message["tool_calls"] = [{**head, "function": {"name": call[0], "arguments": arguments}}]
            deltas.append({"tool_calls": [{"index": 0, **head, "function": {
                "name": call[0], "arguments": arguments[:half]}}]})
            deltas.append({"tool_calls": [{"index": 0, "function": {"arguments": arguments[half:]}}]})
        reason = "tool_calls" if call else "stop"
        whole = {**base, "object": "chat.completion", "usage": usage,
                 "choices": [{"index": 0, "message": message, "finish_reason": reason}]}
        base["object"] = "chat.completion.chunk"
        chunks = [{**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        chunks.append({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        return whole, [("", chunk) for chunk in chunks + [{**base, "choices": [], "usage": usage}]]


class Responses:
    """OpenAI, /v1/responses."""
    path = "/responses"

    @staticmethod
    def read(body: Dict[str, Any]) -> Tuple[List[Said], Dict[str, Dict[str, Any]]]:
        tools = {tool["name"]: tool.get("parameters") or {}
                 for tool in body.get("tools") or [] if tool.get("type") == "function"}
        said = []
        given = body.get("input") or []
        for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
            if str(item.get("type", "")).endswith("call_output"):
                said.append(Said("tool", _text(item.get("output"))))
            elif "role" in item:
                said.append(Said(str(item["role"]), _text(item.get("content"))))
        return said, tools

    @staticmethod
    def answer(body: Dict[str, Any], number: int, text: str, call: Optional[Tuple[str, Dict[str, Any]]]) \
            -> Tuple[Dict[str, Any], List[Event]]:
        item: Dict[str, Any] = {"type": "message", "id": "msg_%d" % number, "role": "assistant", "status": "completed",
                                "content": [{"type": "output_text", "text": text, "annotations": []}]}
        if call:
            item = {"type": "function_call", "id": "fc_%d" % number, "call_id": "call_%d" % number, "name": call[0],
                    "arguments": json.dumps(call[1]), "status": "completed"}
        whole = {"id": "resp_%d" % number, "object": "response", "created_at": int(time.time()), "status": "completed",
                 "model": body.get("model"), "output": [item], "usage": {
                     "input_tokens": 100, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 10,
                     "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 110}}
        begun = {**whole, "status": "in_progress", "output": [], "usage": None}
        events = [("response.created", {"response": begun}),
                  ("response.output_item.added", {"output_index": 0, "item": {**item, "status": "in_progress"}})]
        if not call:
            events.append(("response.output_text.delta", {"output_index": 0, "content_index": 0, "item_id": item["id"],
                                                          "delta": text}))
        events += [("response.output_item.done", {"output_index": 0, "item": item}),
                   ("response.completed", {"response": whole})]
        return whole, [(name, {"type": name, "sequence_number": at, **data}) for at, (name, data) in enumerate(events)]


class Messages:
    """Anthropic, /v1/messages."""
    path = "/messages"

    @staticmethod
    def read(body: Dict[str, Any]) -> Tuple[List[Said], Dict[str, Dict[str, Any]]]:
        tools = {tool["name"]: tool.get("input_schema") or {} for tool in body.get("tools") or []}
        said = [Said("system", _text(body.get("system")))]
        for message in body.get("messages") or []:
            content = message.get("content") or []
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                if part.get("type") == "tool_result":
                    said.append(Said("tool", _text(part.get("content"))))
                elif part.get("type") == "text":
                    said.append(Said(str(message.get("role")), str(part.get("text"))))
        return said, tools

    @staticmethod
    def answer(body: Dict[str, Any], number: int, text: str, call: Optional[Tuple[str, Dict[str, Any]]]) \
            -> Tuple[Dict[str, Any], List[Event]]:
        part: Dict[str, Any] = {"type": "text", "text": text}
        empty, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": text}
        if call:
            part = {"type": "tool_use", "id": "toolu_%d" % number, "name": call[0], "input": call[1]}
            empty, delta = {**part, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(call[1])}
        usage = {"input_tokens": 100, "output_tokens": 10, "cache_creation_input_tokens": 0,
                 "cache_read_input_tokens": 0}
        whole = {"id": "msg_%d" % number, "type": "message", "role": "assistant", "model": body.get("model"),
                 "content": [part], "stop_reason": "tool_use" if call else "end_turn", "stop_sequence": None,
                 "usage": usage}
        events = [("message_start", {"message": {**whole, "content": [], "stop_reason": None}}),
                  ("content_block_start", {"index": 0, "content_block": empty}),
                  ("content_block_delta", {"index": 0, "delta": delta}),
                  ("content_block_stop", {"index": 0}),
                  ("message_delta", {"delta": {"stop_reason": whole["stop_reason"], "stop_sequence": None},
                                     "usage": {"output_tokens": 10}}),
                  ("message_stop", {})]
        return whole, [(name, {"type": name, **data}) for name, data in events]


DIALECTS: Tuple[Any, ...] = (Chat, Responses, Messages)


# ---- the server ----------------------------------------------------------------------------------------------

class Model:
    """`with Model() as model:` serves `model.url` ("http://127.0.0.1:PORT/v1"), by any model name.

    delay_s   before each answer, as if it thought
    events    what it publishes, in this order; what the prompt has no command for is left out
    steps     instead of `next_step`: conversation -> Step
    """
    name = "stand-in"

    def __init__(self, events: Sequence[str] = EVENTS, delay_s: float = 0.0,
                 steps: Optional[Callable[[Sequence[Said]], Step]] = None) -> None:
        self.events, self.delay_s = tuple(events), delay_s
        self.steps = steps or (lambda said: next_step(said, self.events))
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

    def conversation(self) -> List[Said]:
        """The longest conversation seen."""
        return max((request.said for request in self.requests), key=len, default=[])

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

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        if self.path.partition("?")[0].endswith("/models"):
            self._json(200, {"object": "list", "data": [{"id": Model.name, "object": "model", "owned_by": "tests"}]})
        else:
            self._json(404, {"error": {"message": "no such page: " + self.path, "type": "not_found_error"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        path = self.path.partition("?")[0].rstrip("/")
        dialect = [one for one in DIALECTS if path.endswith(one.path)]
        if path.endswith("/count_tokens"):
            self._json(200, {"input_tokens": 100})
        elif dialect:
            self._take_turn(dialect[0], body)
        else:
            self._json(404, {"error": {"message": "no such page: " + self.path, "type": "not_found_error"}})

    def _take_turn(self, dialect: Any, body: Dict[str, Any]) -> None:
        said, tools = dialect.read(body)
        step = self.model.steps(said) if tools else Step("title", "", "A job")
        call = shell_call(tools, step.command) if step.command else None
        if step.command and call is None:
            step = Step("end", "", "There is no shell tool among %s." % sorted(tools))
        self.model.requests.append(Request(time.monotonic(), self.path, body, said, step.name))
        whole, events = dialect.answer(body, len(self.model.requests), step.text, call)
        time.sleep(self.model.delay_s)
        try:
            if body.get("stream"):
                self._stream(events, done=dialect is Chat)
            else:
                self._json(200, whole)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True        # the agent was stopped meanwhile

    def _stream(self, events: Sequence[Event], done: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for name, data in events:
            self.wfile.write(b"event: %s\n" % name.encode() if name else b"")
            self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n" if done else b"")

    def _json(self, code: int, value: Dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

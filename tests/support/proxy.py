"""A TCP proxy on 127.0.0.1 that fails on demand, to stand between a client and a broker.

Directions are seen from the client: "up" goes to the broker, "down" comes from it, "both" is both. One thread
owns every socket, and commands run in that thread: when a method returns, it is in force.
"""
from __future__ import annotations

import queue
import select
import socket
import struct
import threading
import time
import traceback
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple, Union

from . import HOST

HELD_BYTES = 65536      # read ahead of a stalled direction; then the sender feels it, as with a full pipe
READ_BYTES = 65536


class _Way:
    """One direction of all connections: what it does now, and what went through."""

    def __init__(self) -> None:
        self.stalled = False
        self.budget: Optional[int] = None       # bytes that may still pass before it stalls
        self.delay_s = 0.0
        self.passed = 0
        self.recorded = bytearray()


class _Flow:
    """One direction of one connection."""

    def __init__(self, way: _Way, source: socket.socket, sink: Optional[socket.socket]) -> None:
        self.way, self.source, self.sink = way, source, sink
        self.held: Deque[Tuple[float, bytes]] = deque()     # (when it may leave, bytes)
        self.held_bytes = 0
        self.ended = False      # the source said it is done
        self.reset = False      # the source broke off
        self.shut = False       # the sink was told that no more comes

    def due(self, now: float) -> bool:
        return bool(self.held) and not self.way.stalled and not self.shut and self.held[0][0] <= now

    def wants_input(self) -> bool:
        return not self.ended and not self.reset and (self.held_bytes < HELD_BYTES or self.shut or self.sink is None)


class _Link:
    """One client's connection; `server` is None when it is never to reach the broker."""

    def __init__(self, up: _Way, down: _Way, client: socket.socket, server: Optional[socket.socket]) -> None:
        self.client, self.server = client, server
        self.flows = [_Flow(up, client, server)]
        if server is not None:
            self.flows.append(_Flow(down, server, client))
        for end in self.ends():
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ends(self) -> List[socket.socket]:
        return [self.client] + ([self.server] if self.server is not None else [])


class Proxy:
    """`Proxy(port)` forwards to 127.0.0.1:port; clients connect to `.port` (of `host`). Use it with `with`, or
    `close()` it."""

    def __init__(self, target_port: int, host: str = HOST) -> None:
        self.host = host
        self.target_port = target_port
        self.connections = 0            # accepted so far, refused ones included
        self._up, self._down = _Way(), _Way()
        self._mode = "forward"
        self._links: List[_Link] = []
        self._commands: "queue.Queue[Callable[[], None]]" = queue.Queue()
        self._closed = False
        self._failure = ""
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what it does to traffic -------------------------------------------------------------------------

    def stall(self, direction: str = "both") -> None:
        """Hold all bytes and ends of stream; connections stay, new ones too."""
        self._set(direction, stalled=True)

    def resume(self, direction: str = "both") -> None:
        """Undo `stall`, `hold_after` and `delay`; what was held goes on in order."""
        self._set(direction, stalled=False, budget=None, delay_s=0.0)

    def hold_after(self, nbytes: int, direction: str = "up") -> None:
        """Let exactly `nbytes` more pass, over all connections, then stall: cuts a packet in two."""
        self._set(direction, budget=nbytes, stalled=nbytes == 0)

    def delay(self, seconds: float, direction: str = "both") -> None:
        """Every byte read from now on leaves `seconds` later."""
        self._set(direction, delay_s=seconds)

    def drop(self) -> None:
        """Reset every connection, on both sides; what was held is lost. New ones are accepted as before."""
        self._call(self._drop)

    def half_close(self, direction: str = "down") -> None:
        """Send an end of stream: "down" to the clients, "up" to the broker. The other direction works on."""
        self._call(lambda: self._half_close(direction))

    def refuse(self) -> None:
        """New connections are closed at once; `drop()` ends the existing ones."""
        self._call(lambda: setattr(self, "_mode", "refuse"))

    def blackhole(self) -> None:
        """New connections are accepted and read, and nothing ever answers; they stay so until `drop()`."""
        self._call(lambda: setattr(self, "_mode", "blackhole"))

    def accept(self) -> None:
        """New connections are forwarded again."""
        self._call(lambda: setattr(self, "_mode", "forward"))

    def retarget(self, target_port: int) -> None:
        """New connections go to another port."""
        self._call(lambda: setattr(self, "target_port", target_port))

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(lambda: setattr(self, "_closed", True))
            self._thread.join(10)
        assert not self._failure, f"the proxy broke:\n{self._failure}"

    # ---- what went through -------------------------------------------------------------------------------

    @property
    def open_connections(self) -> int:
        return len(self._links)

    @property
    def bytes_up(self) -> int:
        """Bytes handed on to the broker."""
        return self._count(self._up)

    @property
    def bytes_down(self) -> int:
        return self._count(self._down)

    @property
    def recorded_up(self) -> bytes:
        """Every byte clients sent, handed on or not: it has left them."""
        return bytes(self._up.recorded)

    @property
    def recorded_down(self) -> bytes:
        return bytes(self._down.recorded)

    def env(self, broker: Any) -> Dict[str, str]:
        """The environment of `broker.env()`, by way of this proxy."""
        return dict(broker.env(), MQTT_PORT=str(self.port))

    # ---- the thread --------------------------------------------------------------------------------------

    def _call(self, work: Callable[[], None]) -> None:
        done = threading.Event()

        def command() -> None:
            work()
            done.set()

        self._commands.put(command)
        self._wake_in.send(b"w")
        if not done.wait(10):
            raise AssertionError(f"the proxy does not answer {self._failure}")

    def _count(self, way: _Way) -> int:
        """Ask the thread: who has received a byte may look before the thread has counted it."""
        if self._thread.is_alive():
            self._call(lambda: None)
        return way.passed

    def _ways(self, direction: str) -> List[_Way]:
        return {"up": [self._up], "down": [self._down], "both": [self._up, self._down]}[direction]

    def _set(self, direction: str, **settings: Union[bool, int, float, None]) -> None:
        def work() -> None:
            for way in self._ways(direction):
                for name, value in settings.items():
                    setattr(way, name, value)
        self._call(work)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn()
        except BaseException:               # shown by close(): a thread has nobody to raise to
            self._failure = traceback.format_exc()
        finally:
            self._drop()
            for end in (self._listener, self._wake_in, self._wake_out):
                end.close()

    def _turn(self) -> None:
        """Wait for sockets, commands or a delayed byte, and do what can be done."""
        for link in list(self._links):
            self._push(link)
        now = time.monotonic()
        wanted: Dict[int, int] = {self._listener.fileno(): select.POLLIN, self._wake_out.fileno(): select.POLLIN}
        readers: Dict[int, Tuple[_Link, _Flow]] = {}
        wait_s = 60.0
        for link in self._links:
            for flow in link.flows:
                if flow.wants_input():
                    readers[flow.source.fileno()] = (link, flow)
                    wanted[flow.source.fileno()] = wanted.get(flow.source.fileno(), 0) | select.POLLIN
                if flow.sink is not None and flow.due(now):
                    wanted[flow.sink.fileno()] = wanted.get(flow.sink.fileno(), 0) | select.POLLOUT
                elif flow.held and not flow.way.stalled:
                    wait_s = min(wait_s, max(flow.held[0][0] - now, 0.0))
        poller = select.poll()
        for descriptor, events in wanted.items():
            poller.register(descriptor, events)
        ready = dict(poller.poll(wait_s * 1000 + 1))
        for descriptor in ready:
            if descriptor in readers:
                link, flow = readers[descriptor]
                if link in self._links:
                    self._read(flow)
        if self._listener.fileno() in ready:
            self._accept()
        if self._wake_out.fileno() in ready:
            self._obey()

    def _obey(self) -> None:
        try:
            self._wake_out.recv(4096)
        except BlockingIOError:
            pass                            # somebody's wake was read with an earlier one
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return                          # the client gave up first
        self.connections += 1
        if self._mode == "refuse":
            client.close()
            return
        server: Optional[socket.socket] = None
        if self._mode == "forward":
            try:
                server = socket.create_connection((HOST, self.target_port), timeout=5)
            except OSError:
                _reset(client)              # the broker is down, and this client learns it at once
                return
        self._links.append(_Link(self._up, self._down, client, server))

    def _read(self, flow: _Flow) -> None:
        try:
            data = flow.source.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            flow.reset = True
            return
        if not data:
            flow.ended = True
            return
        flow.way.recorded += data
        if flow.sink is not None and not flow.shut:
            flow.held.append((time.monotonic() + flow.way.delay_s, data))
            flow.held_bytes += len(data)

    def _push(self, link: _Link) -> None:
        """Hand on what may go, then ends of stream and resets: in a stalled direction nothing gets past."""
        try:
            for flow in link.flows:
                self._push_flow(flow)
        except OSError:
            self._drop_link(link)
            return
        idle = [flow for flow in link.flows if not flow.held and not flow.way.stalled]
        if any(flow.reset for flow in idle):
            self._drop_link(link)
            return
        for flow in idle:
            if flow.ended and not flow.shut:
                flow.shut = True
                if flow.sink is not None:
                    _shut(flow.sink)
        if all(flow.shut and flow.ended for flow in link.flows):
            self._links.remove(link)
            for end in link.ends():
                end.close()

    def _push_flow(self, flow: _Flow) -> None:
        way, now = flow.way, time.monotonic()
        while flow.sink is not None and flow.due(now):
            when, data = flow.held[0]
            part = data if way.budget is None else data[:way.budget]
            try:
                sent = flow.sink.send(part)
            except BlockingIOError:
                return
            way.passed += sent
            flow.held_bytes -= sent
            if sent == len(data):
                flow.held.popleft()
            else:
                flow.held[0] = (when, data[sent:])
            if way.budget is not None:
                way.budget -= sent
                if way.budget == 0:
                    way.budget, way.stalled = None, True

    def _half_close(self, direction: str) -> None:
        ways = self._ways(direction)
        for link in self._links:
            for flow in link.flows:
                if flow.way in ways and flow.sink is not None and not flow.shut:
                    flow.shut = True
                    flow.held.clear()
                    flow.held_bytes = 0
                    _shut(flow.sink)

    def _drop(self) -> None:
        for link in list(self._links):
            self._drop_link(link)

    def _drop_link(self, link: _Link) -> None:
        self._links.remove(link)
        for end in link.ends():
            _reset(end)


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_WR)
    except OSError:
        pass                                # the peer was faster


def _reset(end: socket.socket) -> None:
    """Close with a RST instead of an orderly end."""
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass                                # macOS refuses this on a socket the peer has already reset
    end.close()

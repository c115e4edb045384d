"""A plain MQTT client that sees what is on the wire, and publishes whatever a test wants to put there."""
from __future__ import annotations

import json
import threading
import time
import traceback
import uuid
from typing import Any, Callable, List, NamedTuple, Optional

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from . import HOST, poll

ROOT_FILTER = "python/mqtt/jobs/#"
ANSWER_S = 20.0         # CONNACK, SUBACK, PUBACK on a loaded machine


class Message(NamedTuple):
    topic: str
    payload: bytes
    retain: bool        # delivered because it was retained, not because it was just published
    at: float           # time.monotonic() of its arrival

    def json(self) -> Any:
        return json.loads(self.payload.decode("utf-8"))


class Observer:
    """Connected and subscribed to `filter` (None: to nothing) when the constructor returns.

    Messages are kept in the order of arrival. It connects again by itself and subscribes anew. `port` leads it
    through a proxy; `user` and `password` replace the broker's. Use it with `with`, or `close()` it.
    """

    def __init__(self, broker: Any, filter: Optional[str] = ROOT_FILTER, port: Optional[int] = None,
                 user: Optional[str] = None, password: Optional[str] = None, qos: int = 1) -> None:
        self.filter, self.qos = filter, qos
        self._changed = threading.Condition()
        self._messages: List[Message] = []
        self._errors: List[str] = []
        self._connects = 0
        self._ready = False
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id="observer-" + uuid.uuid4().hex[:12])
        user = broker.user if user is None else user
        if user is not None:
            self._client.username_pw_set(user, broker.password if password is None else password)
        context = broker.tls_context()
        if context is not None:
            self._client.tls_set_context(context)
        self._client.reconnect_delay_set(1, 1)
        self._client.on_connect = self._guarded(self._on_connect)
        self._client.on_disconnect = self._guarded(self._on_disconnect)
        self._client.on_subscribe = self._guarded(self._on_subscribe)
        self._client.on_message = self._guarded(self._on_message)
        self._client.connect(HOST, port or broker.port, keepalive=60)
        self._client.loop_start()
        try:
            self.wait_ready()
        except BaseException:
            self._leave()
            raise

    def __enter__(self) -> "Observer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- callbacks: an exception in one would end paho's thread without a word ---------------------------------

    def _guarded(self, work: Callable[..., None]) -> Callable[..., None]:
        def callback(*args: Any) -> None:
            try:
                with self._changed:
                    work(*args)
                    self._changed.notify_all()
            except Exception:               # kept, and raised in the test's own thread
                self._errors.append(traceback.format_exc())
        return callback

    def _on_connect(self, client: mqtt.Client, _data: Any, _flags: Any, code: Any, _properties: Any) -> None:
        if code.is_failure:
            self._errors.append(f"CONNECT refused: {code}")
            return
        self._connects += 1
        if self.filter is None:
            self._ready = True
        else:
            client.subscribe(self.filter, qos=self.qos)

    def _on_disconnect(self, *_: Any) -> None:
        self._ready = False

    def _on_subscribe(self, _client: Any, _data: Any, _mid: int, codes: List[Any], _properties: Any) -> None:
        if any(code.is_failure for code in codes):
            self._errors.append(f"SUBSCRIBE {self.filter} refused: {codes}")
            return
        self._ready = True

    def _on_message(self, _client: Any, _data: Any, message: Any) -> None:
        self._messages.append(Message(message.topic, bytes(message.payload), bool(message.retain), time.monotonic()))

    # ---- for tests -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what went wrong in a callback."""
        assert not self._errors, "\n".join(self._errors)

    def wait_ready(self, timeout: float = ANSWER_S) -> None:
        """Wait until it is connected and its subscription acknowledged (again, after a loss)."""
        def ready() -> bool:
            self.check()
            return self._ready
        poll(ready, timeout, f"observer connected and subscribed to {self.filter}")

    @property
    def connects(self) -> int:
        """How often a CONNACK accepted it."""
        return self._connects

    @property
    def all(self) -> List[Message]:
        with self._changed:
            return list(self._messages)

    def messages(self, topic_suffix: str = "", job_id: Optional[str] = None) -> List[Message]:
        """What came so far on topics that end in `topic_suffix` ("events", "state") and have `job_id` as a level."""
        return [message for message in self.all
                if (not topic_suffix or message.topic.endswith("/" + topic_suffix.lstrip("/")))
                and (job_id is None or job_id in message.topic.split("/"))]

    def wait_for(self, predicate: Callable[[Message], Any], timeout: float = 10.0, message: str = "") -> Message:
        """The first message, earlier ones included, for which `predicate` is true."""
        deadline = time.monotonic() + timeout
        seen = 0
        with self._changed:
            while True:
                for candidate in self._messages[seen:]:
                    if predicate(candidate):
                        return candidate
                seen = len(self._messages)
                self.check()
                rest = deadline - time.monotonic()
                if rest <= 0:
                    last = "\n".join(f"  {m.topic} {m.payload[:300]!r}" for m in self._messages[-20:])
                    raise AssertionError(f"not within {timeout:g} s: {message or 'such a message'}; "
                                         f"{seen} arrived, the last:\n{last}")
                self._changed.wait(rest)

    def clear(self) -> None:
        """Forget what came so far."""
        with self._changed:
            self._messages.clear()

    def publish(self, topic: str, payload: Any = b"", retain: bool = False, qos: int = 1, wait: bool = True) -> None:
        """Publish and wait for the acknowledgement. `payload`: bytes, text, or something to be written as JSON."""
        if not isinstance(payload, (bytes, str)):
            payload = json.dumps(payload)
        info = self._client.publish(topic, payload, qos=qos, retain=retain)
        if wait:
            poll(info.is_published, ANSWER_S, f"PUBACK for {topic}")

    def close(self) -> None:
        self._leave()
        self.check()

    def _leave(self) -> None:
        self._client.disconnect()           # first, or loop_stop waits for what is not acknowledged
        self._client.loop_stop()


def retained(broker: Any, topic: str, timeout: float = ANSWER_S) -> Optional[bytes]:
    """The payload retained on `topic` (no wildcards), read back with a fresh client; None if there is none.

    It knows that none is there because a retained message of its own, asked for after `topic` in the same
    SUBSCRIBE, has arrived: brokers serve the filters of one SUBSCRIBE in order.
    """
    marker = "observer/" + uuid.uuid4().hex
    with Observer(broker, filter=None) as client:
        client.publish(marker, b"here", retain=True)
        try:
            client._client.subscribe([(topic, 0), (marker, 0)])
            client.wait_for(lambda m: m.topic == marker and m.retain, timeout, f"marker after {topic}")
            found = [m.payload for m in client.all if m.topic == topic and m.retain]
        finally:
            client.publish(marker, b"", retain=True)
    return found[-1] if found else None

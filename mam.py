#!/usr/bin/env python3
"""mam: hand work to coding agents and know, for certain, what became of it.

A unit of work (a *job*) is delegated to an agent: a command, a tmux pane, a
queue that an agent picks from. The agent reports by events (started, progress,
permission_required, completed, error); mam records each one in a registry (one
SQLite file) together with the change of state it causes, and only then sends a
signed copy to an MQTT broker, if one is configured. Without a broker everything
works on one host, over the registry alone.

    mam delegate --agent-session exec:demo --exec 'claude -p' --prompt-file brief.md
    mam publish --job 918b0612 --event progress --detail "section 1 done"
    mam watch 918b0612

Map of this file (a section uses only those above it):

     1. Constants           protocol, defaults with their unit, variable names
     2. Errors and exit codes  Exit, MamError
     3. Helpers             time, ids, RFC 8785 JSON, redaction, back-off, files
     4. Configuration       workspace, .mam.env, broker settings (only os.environ here)
     5. Model               job, event, and the table that decides every transition (pure)
     6. Envelopes           build, sign, verify what goes over the wire (pure)
     7. Registry            the SQLite file: transitions, outbox, inbox, beats (only sqlite3 here)
     8. Processes           identities, groups, starting ourselves (only subprocess, kill here)
     9. Transport           one MQTT connection (only paho here, imported inside)
    10. Publishing          record, then deliver what is owed
    11. Daemon              sends, takes in, beats, keeps every clock, takes over
    12. Following           read events in order, wait for ends
    13. Running             _run: one command, its output, its exit, its events
    14. Sessions            agents in panes of tmux and herdr: start, prompt, stop, resume
    15. Remote              work on other hosts: keys, runners, what they take on
    16. Delegation          deliver, validate, settle
    18. Views               model to text (no I/O)
    19. Commands            add_x / cmd_x pairs (only argparse here)
    20. Main                dispatch, and the one place where errors are shown

Invariants:

  - An event, the state change it causes and its sequence number are one commit.
  - decide() rules on every change of a job's status or phase; only the registry's
    transition() and, for events from the wire, take_in() and take_in_state() commit one.
  - A terminal status is final for its attempt; only redispatch opens another.
  - No transaction spans network, process or file waits.
  - Only a job's own attempt speaks for it: a stale worker is refused and told.
  - Nothing secret is stored in a record, printed, or put into argv.

To add a command: write add_x(parser) and cmd_x(args) next to each other in
section 19 and name them in COMMANDS. cmd_x returns an exit code.
"""

from __future__ import annotations

import os
import sys
import time
from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:     # typing costs 6 ms at every start, and annotations are never evaluated
    from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

__version__ = "5.0.0"

# ==============================================================================
# 1. Constants
#
# The protocol's fixed words, and every default with its unit and its reason.
# ==============================================================================

SCHEMA_VERSION = 1          # of the wire format and of v4's records
REGISTRY_VERSION = 2        # PRAGMA user_version of mam.db

STATUSES = ("pending", "running", "completed", "error", "cancelled")
OPEN_STATUSES = ("pending", "running")
TERMINAL_STATUSES = ("completed", "error", "cancelled")
EVENTS = ("started", "progress", "permission_required", "completed", "error")
TERMINAL_EVENTS = ("completed", "error")
SESSION_KINDS = ("exec", "tmux", "herdr", "remote", "queue")

DEFAULT_TOPIC_ROOT = "python/mqtt/jobs"
DEFAULT_SESSION = "herdr:claude"     # v4's default, kept for its verbs
DEFAULT_AGENT = "claude-code"
DEFAULT_TIMEOUT_S = 3600
DEFAULT_HEARTBEAT_S = 30             # N: an agent gives a sign of life this often
DEFAULT_HEARTBEAT_MISSES = 4         # K: K x N seconds of silence is unresponsive
DEFAULT_ACK_TIMEOUT_S = 180          # T: a real agent reads the brief before it starts
DEFAULT_MAX_ITERATIONS = 5

MAX_PAYLOAD_BYTES = 256 * 1024       # a signed message; brokers take at least this
MAX_DATA_BYTES = 128 * 1024          # --data in canonical form; leaves room for feedback
MAX_DETAIL_BYTES = 4 * 1024          # longer ones are cut and stand whole in data.feedback
MAX_FEEDBACK_BYTES = 64 * 1024
MAX_PROMPT_BYTES = 4 * 1024 * 1024
MAX_JSON_DEPTH = 32
MAX_SAFE_INTEGER = 2 ** 53 - 1       # RFC 8785, section 3.2.2.3: IEEE 754 doubles
MAX_ENV_FILE_BYTES = 1024 * 1024
READ_AHEAD_BYTES = 64 * 1024         # taken from a connection at once: some 200 events
MAX_INBOUND_BYTES = 16 * 1024 * 1024 # of one packet: no broker of ours sends larger ones
OUTPUT_CAP_BYTES = 50 * 1024 * 1024  # of one command; head and tail are kept
TAIL_BYTES = MAX_FEEDBACK_BYTES      # of the output, in which its last line is looked for
TITLE_CHARS = 80                     # of the prompt, kept apart so lists never load prompts

# What `data` of an event may not carry on its own: mam's own words (DESIGN 7).
RESERVED_DATA = frozenset((
    "hmac_sig", "auth_token", "dispatch_token", "attempt_id", "notification_intent",
    "feedback", "reason", "status", "settles", "artifacts", "spawned", "since"))

BUSY_WAIT_S = 30.0                   # for the registry's writer lock
WAL_LIMIT_BYTES = 4 * 1024 * 1024    # a longer -wal is checkpointed after a commit
CONNACK_TIMEOUT_S = 10.0
PUBACK_TIMEOUT_S = 5.0
TCP_TIMEOUT_S = 5.0
SEND_WINDOW = 20                     # unacknowledged messages on a connection (paho's own limit)
BACKOFF_BASE_S, BACKOFF_FACTOR, BACKOFF_MAX_S = 0.5, 2.0, 8.0
JOB_LOCK_WAIT_S = 5.0                # a publisher waits this long for another one's send
SWEEP_BUDGET_S = 1.0                 # spent on what other jobs owe, after one's own is sent
POLL_S = 0.01                        # a follower's look at data_version costs 2 us
CARE_S = 0.5                         # followers look this often whether the daemon lives
PULSE_S = 30.0                       # `watch` tells at a terminal this often how a job is
HOLE_WAIT_S = 2.0                    # readers wait this long for a missing number
LOOK_S = 0.25                        # the daemon looks this often at the least: a wake can be lost
TOUCH_S = 1.0                        # it touches its lock this often while its loop turns
FRESH_S = 3.0                        # a lock touched longer ago belongs to a daemon that is stuck
DAEMON_WAIT_S = 6.0                  # a publisher leaves an event to a connected daemon for this long
IDLE_LEAVE_S = 3.0                   # with nothing to do for this long, the daemon leaves
TAKEOVER_S = 2.0                     # it looks this often for dead supervisors
DEBT_COUNT = 1000                    # jobs with debts that it takes up at once; the next when those are worked off
DAEMON_WINDOW = 100                  # unacknowledged messages of the daemon on one connection
JOB_TURN_COUNT = 20                  # messages of one job in a row, so that a flood starves nobody
REFUSED_TRY_COUNT = 4                # refused credentials are tried again, in case the broker was starting
REFUSED_PAUSE_S = 300.0              # and after that, seldom
POISON_LOSS_COUNT = 3                # a message alone on its way at so many losses is what kills the connection
INBOX_BATCH_COUNT = 200              # messages taken in by one commit
INBOX_PAUSE_S = 0.02                 # between two such commits: in a flood they are what costs most
WIDE_COUNT = 20                      # remote jobs heard by name; nats-server allows a session 63 QoS 1 subscriptions
CATCH_UP_COUNT = 8                   # and of what comes on top of that, so many at a time
RESEND_AT_S = (0.0, 5.0, 30.0)       # when a hole in a remote job's numbers is asked for
HOLE_GIVEN_UP_S = 60.0               # and when it is written down as a gap
PRESENCE_S = 5.0                     # a runner says this often that it is there
SILENT_S = 10.0                      # one that has not said so for this long does not serve
SETTLE_S = 1.0                       # what a broker retains has come this long after its SUBACK
READ_BACK_COUNT = 16                 # dispatches read back at a time: each is a subscription
READ_BACK_S = 5.0                    # a dispatch that cannot be read back by then was denied
CLOCK_SKEW_S = 300.0                 # by which the clocks of two hosts may differ
ANSWER_WAIT_S = 86400.0              # a runner that was told of an end is listened to for this long
CANCEL_WAIT_S = 6.0                  # `mam cancel` waits this long for the runner's answer
SPAWN_WAIT_S = 30.0                  # a command that was to be spawned and has no process by then never gets one
CANCELLED_COUNT = 100000             # cancels that a runner remembers until their dispatch comes
MIN_SECRET_CHARS = 32                # of MAM_DISPATCH_SECRET: 128 bits even if written in hex
DISPATCH_ROOM_BYTES = 8 * 1024       # what a dispatch needs beside the prompt
REPUBLISH_S = 86400.0                # a broker without memory gets the states of jobs that ended since
LOG_CAP_BYTES = 1024 * 1024          # of daemon.log; the older half is kept as daemon.log.1
TERM_GRACE_S = 5.0                   # between TERM and KILL of a command's group
LINGER_S = 30.0                      # a command that published its own end may still tidy up

# Sandboxes that anybody can read and write: used only if named, with a warning.
PUBLIC_BROKERS = frozenset((
    "broker.hivemq.com", "test.mosquitto.org", "broker.emqx.io", "mqtt.eclipseprojects.io",
    "public.mqtthq.com", "broker.mqttdashboard.com", "demo.nats.io"))

# Nested agents misbehave when they see the outer one's variables (notes on agents).
AGENT_VARIABLES = (
    "CLAUDECODE", "CLAUDE_CODE_CHILD_SESSION", "CLAUDE_CODE_SESSION_ID", "CLAUDE_CODE_ENTRYPOINT",
    "CODEX_THREAD_ID", "CODEX_SESSION_ID", "OPENCODE", "OPENCODE_PID", "GEMINI_CLI",
    "COPILOT_AGENT_SESSION_ID", "HERMES_SESSION_ID")

# Command names by which an agent CLI is recognised among a publisher's ancestors.
AGENT_COMMANDS = frozenset((
    "claude", "codex", "opencode", "hermes", "gemini", "copilot", "cursor-agent", "agy", "grok",
    "goose", "aider", "pi"))

SHELLS = frozenset(("sh", "bash", "zsh", "fish", "dash", "ksh", "tcsh", "csh", "ash", "nu", "xonsh"))

# Programs that take what is typed for commands or for a text of their own, and are no agents.
NOT_AGENTS = frozenset((
    "ssh", "mosh", "sudo", "su", "doas", "docker", "podman", "kubectl", "vi", "vim", "nvim", "nano", "emacs", "less",
    "more", "man", "psql", "mysql", "sqlite3", "gdb", "screen", "tmux", "top", "htop"))

# ==============================================================================
# 2. Errors and exit codes
#
# An error is raised where the fact is known, with what the user can do about it,
# and is shown once, in main. Exit codes are part of the contract (DESIGN 16).
# ==============================================================================


class Exit:
    """Exit codes of every command."""
    OK = 0
    FAILED = 1            # the job failed, or bad input
    TIMEOUT = 2           # timed out; recorded but not sent; nothing to wait for
    BROKER = 3            # broker unreachable or credentials refused; pick: nothing
    REFUSED = 4           # the registry refused the request
    BUSY = 5              # session busy
    USAGE = 64
    INTERNAL = 70
    NOT_RECORDED = 75     # busy or full disk: run the same command again
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


class MamError(Exception):
    """A failure with its message, exit code and what to do about it.

    `code` is a stable word for programs (`--json` prints it).
    """

    def __init__(self, message: str, exit: int = Exit.FAILED, hint: str = "", code: str = "error"):
        super().__init__(message)
        self.message, self.exit, self.hint, self.code = message, exit, hint, code


class EnvFileError(MamError):
    """A `.mam.env` that exists but cannot be used; shown in v4's form, `ERROR: ...`."""

    def __init__(self, path: str, why: str):
        super().__init__("ERROR: %s: cannot read (%s)" % (path, why), code="env_file")


class Terminated(BaseException):
    """SIGTERM arrived; raised in the main thread so that every path can finish up.

    Like KeyboardInterrupt it is no Exception: nothing that deals with failures may take it for one.
    """


# ==============================================================================
# 3. Helpers
#
# Small and without state: time, identifiers, JSON in the RFC 8785 form, taking
# paths and secrets out of text, back-off, files. Nothing here reads the
# environment.
# ==============================================================================


def utc_text(seconds: float) -> str:
    """Seconds since the epoch as ISO 8601 UTC with a trailing Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def utc_now(milliseconds: bool = False) -> str:
    now = time.time()
    return "%s.%03dZ" % (utc_text(now)[:-1], int(now * 1000) % 1000) if milliseconds else utc_text(now)


def parse_utc(text: str) -> float:
    """Seconds since the epoch of a timestamp made by utc_now; 0.0 for anything else."""
    import datetime      # loaded already, by sqlite3
    try:
        return datetime.datetime.fromisoformat(text[:19] + "+00:00").timestamp()
    except (TypeError, ValueError):
        return 0.0


_boot_id = ""


def boot_id() -> str:
    """An identifier of this boot of the host: monotonic clocks compare only within one."""
    global _boot_id
    if not _boot_id:
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                _boot_id = file.read().strip()
        except OSError:   # macOS: the moment of the boot serves as its name
            import ctypes
            buffer, size = ctypes.create_string_buffer(16), ctypes.c_size_t(16)
            ctypes.CDLL(None).sysctlbyname(b"kern.boottime", buffer, ctypes.byref(size), None, 0)
            _boot_id = "boot-" + buffer.raw[:8].hex()
    return _boot_id


def instant() -> str:
    """Now, as `<boot id> <monotonic seconds>`: a moment no clock change can move."""
    return "%s %.3f" % (boot_id(), time.monotonic())


def elapsed_s(since: Optional[str], utc: Optional[str] = None) -> Optional[float]:
    """Seconds since an instant; by the UTC beside it if the host was booted since; else None."""
    boot, _, mono = (since or "").partition(" ")
    if mono and boot == boot_id():
        return max(0.0, time.monotonic() - float(mono))
    return max(0.0, time.time() - parse_utc(utc)) if utc else None


def random_hex(characters: int) -> str:
    return os.urandom((characters + 1) // 2).hex()[:characters]


def base64url(raw: bytes) -> str:
    """Bytes as base64url text without padding (RFC 4648, section 5)."""
    import binascii
    text = binascii.b2a_base64(raw, newline=False).decode("ascii")
    return text.rstrip("=").replace("+", "-").replace("/", "_")


def random_token() -> str:
    """32 random bytes as text: what secrets.token_urlsafe(32) gives, without its import."""
    return base64url(os.urandom(32))


def is_name(text: str) -> bool:
    """Whether text may be a job id or a session name: [A-Za-z0-9_-], 1 to 64 (DESIGN 6)."""
    return 0 < len(text) <= 64 and text.isascii() and text.replace("_", "a").replace("-", "a").isalnum()


class BadJson(ValueError):
    """JSON that cannot be signed or must not be trusted; str() says why."""


def _es_number(value: float) -> str:
    """A float as ECMAScript prints it (RFC 8785, section 3.2.2.3)."""
    if value != value or value in (float("inf"), float("-inf")):
        raise BadJson("NaN and infinities have no JSON form")
    if value == 0:
        return "0"
    if abs(value) < 1e21 and abs(value) > MAX_SAFE_INTEGER:
        raise BadJson("a float from 2^53 to below 1e21 would print as an unsafe integer")
    mantissa, _, exponent_text = repr(value).partition("e")
    sign = "-" if mantissa.startswith("-") else ""
    whole, _, fraction = mantissa.lstrip("-").partition(".")
    fraction = "" if fraction == "0" else fraction
    point = len(whole) + int(exponent_text or 0)       # where the decimal point belongs in digits
    digits = whole + fraction
    stripped = digits.lstrip("0")
    point -= len(digits) - len(stripped)
    digits = stripped.rstrip("0")
    count = len(digits)
    if count <= point <= 21:
        return sign + digits + "0" * (point - count)
    if 0 < point <= 21:
        return sign + digits[:point] + "." + digits[point:]
    if -6 < point <= 0:
        return sign + "0." + "0" * -point + digits
    exponent = point - 1
    return "%s%s%se%s%d" % (sign, digits[0], "." + digits[1:] if count > 1 else "",
                            "+" if exponent > 0 else "-", abs(exponent))


def _utf16(key: str) -> bytes:
    return key.encode("utf-16-be")


def _canonical_text(value: Any, quote: Callable[[str], str], depth: int) -> str:
    kind = type(value)
    if kind is str:
        return quote(value)
    if kind is int:
        if -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER:
            return str(value)
        raise BadJson("an integer beyond 2^53-1")
    if value is None or kind is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if kind is float:
        return _es_number(value)
    if depth <= 0:
        raise BadJson("nested deeper than %d levels" % MAX_JSON_DEPTH)
    if kind is dict:
        try:
            ascii_only = "".join(value).isascii()
        except TypeError:
            raise BadJson("an object key that is no string") from None
        keys = sorted(value) if ascii_only else sorted(value, key=_utf16)
        return "{%s}" % ",".join(
            [quote(key) + ":" + _canonical_text(value[key], quote, depth - 1) for key in keys])
    if kind is list or kind is tuple:
        return "[%s]" % ",".join([_canonical_text(item, quote, depth - 1) for item in value])
    raise BadJson("a %s has no JSON form" % kind.__name__)


def canonical(value: Any) -> bytes:
    """The RFC 8785 (JCS) form of a JSON value, as UTF-8.

    Raises BadJson for what has no interoperable form: NaN, infinities, integers
    beyond 2^53-1 (also when a float would print as one), lone surrogates, nesting
    deeper than MAX_JSON_DEPTH.
    """
    from json.encoder import encode_basestring
    try:
        return _canonical_text(value, encode_basestring, MAX_JSON_DEPTH).encode("utf-8")
    except UnicodeEncodeError:
        raise BadJson("a lone surrogate") from None


def _unique_pairs(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise BadJson("a duplicate key")
    return found


def _no_constant(text: str) -> Any:
    raise BadJson("%s is not JSON" % text)


def _safe_int(text: str) -> int:
    value = int(text)
    if not -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER:
        raise BadJson("an integer beyond 2^53-1")
    return value


def _safe_float(text: str) -> float:
    value = float(text)
    _es_number(value)
    return value


_decoder: Any = None        # made once: making it costs half as much as reading an event with it


def parse_json(raw: bytes, limit: int = MAX_PAYLOAD_BYTES) -> Any:
    """Parse bytes nobody vouches for. Total: raises BadJson with the reason, nothing else.

    Size, strict UTF-8, duplicate keys, NaN, and everything that canonical() refuses.
    """
    global _decoder
    import json
    if len(raw) > limit:
        raise BadJson("%d bytes, more than the %d allowed" % (len(raw), limit))
    _decoder = _decoder or json.JSONDecoder(object_pairs_hook=_unique_pairs, parse_constant=_no_constant,
                                            parse_int=_safe_int, parse_float=_safe_float)
    try:
        text = raw.decode("utf-8")
        value = _decoder.decode(text)
        if "\\u" in text or text.count("{") + text.count("[") > MAX_JSON_DEPTH:
            canonical(value)      # only then can there be a lone surrogate, or too deep a nesting
    except BadJson:
        raise
    except UnicodeDecodeError:
        raise BadJson("not UTF-8") from None
    except RecursionError:
        raise BadJson("nested too deeply") from None
    except ValueError as error:   # JSONDecodeError, and integers of thousands of digits
        raise BadJson("not JSON (%s)" % str(error).split("\n")[0][:120]) from None
    return value


def compact_json(value: Any) -> str:
    """One line of JSON for files and streams."""
    import json
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def clean_text(text: str) -> str:
    """Text without control characters (line breaks and tabs become spaces) or lone surrogates.

    What ends on a terminal must not be able to drive it.
    """
    if text.isprintable():
        return text
    kept = []
    for character in text:
        code = ord(character)
        if character in "\n\r\t\u2028\u2029":
            kept.append(" ")
        elif code < 32 or 127 <= code < 160 or 0xD800 <= code < 0xE000 or code in _DIRECTION_CHARACTERS:
            continue
        else:
            kept.append(character)
    return "".join(kept)


# Characters that reorder what a terminal shows: a detail must read as it was written.
_DIRECTION_CHARACTERS = frozenset([*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x061C, 0x200E, 0x200F])


def is_encodable(text: str) -> bool:
    """Whether text has a UTF-8 form (an argument that is not UTF-8 comes with lone surrogates)."""
    try:
        text.encode("utf-8")
        return True
    except UnicodeEncodeError:
        return False


def hide_secrets(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, "***")
    return text


def hide_secrets_in(value: Any, secrets: Sequence[str]) -> Any:
    """A JSON value with the secrets taken out of every string in it, keys included."""
    if not secrets:
        return value
    if isinstance(value, str):
        return hide_secrets(value, secrets)
    if isinstance(value, list):
        return [hide_secrets_in(item, secrets) for item in value]
    if isinstance(value, dict):
        return {hide_secrets(key, secrets): hide_secrets_in(item, secrets) for key, item in value.items()}
    return value


_path_pattern = None


def _paths() -> Any:
    """What in a text is an absolute path: not inside a word, a relative path or a URL."""
    global _path_pattern
    if _path_pattern is None:
        import re
        _path_pattern = re.compile(
            r"(?P<url>\b[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]*)"
            r"|(?:(?<![A-Za-z0-9_.~/<-])|(?<=\s-[A-Za-z]))(?<!<path>)(?P<path>/[^\s\"'`<>|*?:;,()\[\]{}=&]*)")
    return _path_pattern


def _replace_root(text: str, root: str, mark: str) -> str:
    """Put mark for root wherever it begins a path: not inside a longer one, nor of a longer name."""
    start = text.find(root)
    while start >= 0:
        end = start + len(root)
        following, second = text[end:end + 1], text[end + 1:end + 2]
        ends_here = not (following.isalnum() or following in ("_", "-") or following == "." and second.isalnum())
        before = text[max(0, start - 3):start]
        option = before[-2:-1] == "-" and before[-1:].isalpha() and not before[:-2].strip()      # -I/usr/include
        inside = before[-1:].isascii() and (before[-1:].isalnum() or before[-1:] in ("_", "-", ".", "~", "/"))
        if ends_here and (option or not inside):
            text = text[:start] + mark + text[end:]
            end = start + len(mark)
        start = text.find(root, end)
    return text


def generalise(text: str, workspace: str, home: str, secrets: Sequence[str]) -> str:
    """Text fit to travel: no secret, no control character, no path of this machine.

    The workspace becomes `.`, the home directory `~`, any other absolute path
    `<path>/last`; URLs stay, but for `file:` ones and passwords in them (DESIGN 7).
    """
    # Before and after: a secret may hold control characters, and taking them out may lay one bare.
    text = hide_secrets(clean_text(hide_secrets(text, secrets)), secrets)
    if "/" not in text:
        return text

    roots = sorted(((os.path.normpath(root), mark) for root, mark in ((workspace, "."), (home, "~"))
                    if root and root != "/"), key=lambda pair: -len(pair[0]))

    for root, mark in roots:   # first, so that a root with spaces in it is recognised too
        text = _replace_root(text, root, mark)

    def shorten(match: Any) -> str:
        url = match.group("url")
        if url:
            scheme, _, rest = url.partition("://")
            if scheme.lower() == "file":
                return "<path>/" + rest.rstrip("/").rpartition("/")[2]
            authority, slash, way = rest.partition("/")
            user, at, host = authority.rpartition("@")
            return scheme + "://***@" + host + slash + way if at and ":" in user else url
        path = match.group("path")
        last = path.rstrip("/.").rpartition("/")[2]
        tail = path[len(path.rstrip(".")):]          # the full stop that ends a sentence
        return ("<path>/" + last + tail) if last else path

    return _paths().sub(shorten, text)


def cut_utf8(text: str, limit: int) -> str:
    """Text of at most `limit` bytes in UTF-8, an ellipsis where it was cut."""
    raw = text.encode("utf-8")
    if len(raw) <= limit:
        return text
    return raw[:limit - 3].decode("utf-8", "ignore") + "\u2026"


def backoff_s(attempt: int) -> float:
    """Seconds before retry number `attempt` (from 1): exponential, with jitter so that
    many clients of one broken broker do not return in step."""
    import random
    delay = min(BACKOFF_BASE_S * BACKOFF_FACTOR ** min(attempt - 1, 16), BACKOFF_MAX_S)
    return delay * (0.5 + random.random() / 2)


def write_atomic(path: str, content: bytes, mode: int = 0o600) -> None:
    """Write a file so that a reader or a crash sees the old one or the new one, never a part."""
    temporary = "%s.%d.%s.tmp" % (path, os.getpid(), random_hex(6))
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def format_duration(seconds: float) -> str:
    """`4s`, `3m20s`, `2h05m`, `3d04h`: two units at most."""
    whole = int(seconds)
    if whole < 60:
        return "%ds" % whole
    if whole < 3600:
        return "%dm%02ds" % divmod(whole, 60)
    if whole < 86400:
        return "%dh%02dm" % (whole // 3600, whole % 3600 // 60)
    return "%dd%02dh" % (whole // 86400, whole % 86400 // 3600)


# ==============================================================================
# 4. Configuration
#
# Environment first, then one `.mam.env`. Settings is made once per command and
# handed down; it is the only thing that has seen os.environ. Passwords live here
# and in memory, never in a record, an argument or a line of output.
# ==============================================================================

Broker = namedtuple("Broker", "host port tls username password ca_certs certfile keyfile "
                              "client_id_prefix keepalive_s")

SELF_PATH = os.path.realpath(__file__)   # the launcher of mam.pyz sets its own path here


class Settings:
    """What one command runs with."""

    __slots__ = ("env", "env_file", "workspace", "registry_dir", "home", "_secrets")

    def __init__(self, env: Dict[str, str], env_file: Optional[str], workspace: str,
                 registry_dir: str, home: str):
        self.env = env                      # the environment overlaid on .mam.env
        self.env_file = env_file            # the .mam.env that was read, if any
        self.workspace = workspace          # absolute; what `.` means in a detail
        self.registry_dir = registry_dir    # absolute
        self.home = home
        self._secrets: Optional[List[str]] = None

    def get(self, name: str, default: str = "") -> str:
        return self.env.get(name) or default

    def seconds(self, name: str, default: float) -> float:
        """A positive number of seconds from a variable; MamError when it is none."""
        text = self.get(name)
        return parse_seconds(text, name) if text else default

    def pause(self, name: str, default: float) -> float:
        """The same where work is at stake: 0 is allowed, and nonsense (refused by preflight) means the default."""
        try:
            return 0.0 if self.get(name) == "0" else float(self.seconds(name, default))
        except MamError:
            return default

    def count(self, name: str, default: int) -> int:
        """A positive whole number from a variable; MamError when it is none."""
        text = self.get(name, str(default))
        if whole_number(text, 1, 99999999) is None:
            raise MamError("%s is %r: it must be a positive whole number" % (name, text), code="bad_value")
        return int(text)

    @property
    def secrets(self) -> List[str]:
        """Values of variables that look secret, longest first: never to be printed or sent."""
        if self._secrets is None:
            words = ("PASSWORD", "PASSWD", "SECRET", "TOKEN", "API_KEY", "APIKEY", "PRIVATE_KEY",
                     "ACCESS_KEY", "SESSION_KEY", "CREDENTIAL", "PASSPHRASE")
            found = {value for name, value in self.env.items()
                     if len(value) >= 6 and any(word in name.upper().replace("TOKENS", "") for word in words)
                     and not (value.startswith("/") and os.path.exists(value))}     # a path to a key is none
            self._secrets = sorted(found, key=len, reverse=True)
        return self._secrets

    def generalise(self, text: str) -> str:
        return generalise(text, self.workspace, self.home, self.secrets)


def parse_seconds(text: str, name: str) -> float:
    """Seconds from text: a positive number, at most ten years; whole ones become int."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 315360000:
        raise MamError("%s is %r: it must be a positive number of seconds" % (name, text),
                       code="bad_value")
    return int(value) if value == int(value) else value


def read_env_file(path: str) -> Dict[str, str]:
    """Parse `KEY=value` lines: `#` comments, optional `export` and quotes, nothing expanded.

    Raises EnvFileError naming the line, never its text: it may hold a password.
    """
    import stat
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)     # a FIFO must not hold us
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise EnvFileError(path, "Is a directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else
                                   "not a regular file")
            text = file.read(MAX_ENV_FILE_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise EnvFileError(path, error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise EnvFileError(path, "not UTF-8 at byte %d" % error.start) from None
    values = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("export ") or line.startswith("export\t"):
            line = line[7:].lstrip()
        key, equals, raw = line.partition("=")
        key, value = key.strip(), raw.strip()
        if not equals or not key.isidentifier() or not key.isascii():
            raise EnvFileError(path, "line %d is not KEY=value" % number)
        if value[:1] in ("'", '"'):
            end = value.find(value[0], 1)
            rest = value[end + 1:].strip()
            if end < 0 or (rest and not rest.startswith("#")):
                raise EnvFileError(path, "line %d has an unfinished quote" % number)
            value = value[1:end]
        else:
            value = (" " * (raw[:1] in (" ", "\t")) + value).partition(" #")[0].strip()
        if "\0" in value:
            raise EnvFileError(path, "line %d has a NUL character" % number)
        values[key] = value
    return values


def find_workspace(env: Dict[str, str], start: str) -> Tuple[str, List[str]]:
    """(the workspace, the folders in which a .mam.env is looked for, in order)."""
    named = [os.path.abspath(env[name]) for name in ("MAM_REAL_ROOT", "WORKSPACE_ROOT") if env.get(name)]
    folder = start
    found = None
    while found is None:
        if any(os.path.exists(os.path.join(folder, marker)) for marker in (".mam", ".agents", ".git")):
            found = folder
        elif os.path.dirname(folder) == folder:
            break
        folder = os.path.dirname(folder)
    candidates = named + ([found] if found else []) + [start]
    return candidates[0], candidates


def load_settings(registry_dir: Optional[str] = None) -> Settings:
    """Read the environment and `.mam.env` (DESIGN 15).

    `MAM_ENV_FILE` alone counts if set: missing is skipped and ends the search.
    Raises EnvFileError for a file that exists and cannot be read.
    """
    env = dict(os.environ)
    try:
        start = os.getcwd()
    except OSError:
        if not (registry_dir or env.get("MAM_REGISTRY_DIR") or env.get("MAM_REAL_ROOT")):
            raise MamError("the current folder is gone", code="no_folder", hint="cd to one that is there") from None
        start = "/"
    workspace, folders = find_workspace(env, start)
    named = env.get("MAM_ENV_FILE")
    paths = [named] if named else [os.path.join(folder, ".mam.env") for folder in folders]
    env_file = next((path for path in paths if os.path.lexists(path)), None)
    if env_file:
        env = {**read_env_file(env_file), **env}
    registry = registry_dir or env.get("MAM_REGISTRY_DIR") or os.path.join(workspace, ".mam")
    return Settings(env, env_file, workspace, os.path.abspath(registry),
                    env.get("HOME") or os.path.expanduser("~"))


def whole_number(text: str, low: int, high: int) -> Optional[int]:
    """The number that text is, in plain digits, if it lies within the bounds; else None."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(high))):
        return None
    return int(text) if low <= int(text) <= high else None


def meaningless_variables() -> List[str]:
    """v4's variables that are set and have no meaning here."""
    return [name for name in ("MAM_ENGINE_CAS", "MAM_DELEGATION_PY") if os.environ.get(name)]


def parse_port(text: str, name: str) -> int:
    if whole_number(text, 1, 65535) is None:
        raise MamError("%s is %r: a port is a number from 1 to 65535" % (name, text), code="bad_broker")
    return int(text)


def parse_broker_flag(text: str) -> Dict[str, Any]:
    """The broker block of `--broker [mqtt[s]://][user@]host[:port]`. A password is refused."""
    scheme, found, rest = text.rpartition("://")
    user, _, address = rest.rpartition("@")
    if ":" in user:      # first of all, so that no other message repeats it
        raise MamError("--broker must not hold a password", exit=Exit.USAGE, code="secret_in_argv",
                       hint="set MQTT_PASSWORD in the environment or in .mam.env")
    if found and scheme not in ("mqtt", "mqtts"):
        raise MamError("--broker is %r: the scheme must be mqtt:// or mqtts://" % text, exit=Exit.USAGE)
    if address.count(":") > 1 and not address.endswith("]"):      # an IPv6 address, with a port only if in brackets
        host, colon, port = address.rpartition(":") if "]:" in address else (address, "", "")
    else:
        host, colon, port = address.rpartition(":") if address.count(":") == 1 else (address, "", "")
    if not host or any(character.isspace() or character == "/" for character in host):
        raise MamError("--broker is %r: no host name in it" % text, exit=Exit.USAGE)
    tls = scheme == "mqtts"
    block: Dict[str, Any] = {"host": host.strip("[]"), "tls": tls,
                             "port": parse_port(port, "--broker") if colon else (8883 if tls else 1883)}
    if user:
        block["username"] = user
    return block


def broker_settings(settings: Settings, block: Optional[Dict[str, Any]] = None) -> Optional[Broker]:
    """The broker to use: the job's own block over the environment's; None means no network.

    Raises MamError for a setting that cannot be right.
    """
    block = block or {}
    usual_host = settings.get("MQTT_BROKER")
    host = block.get("host") or usual_host
    if not host:
        return None
    if any(character in "/@" or ord(character) < 33 for character in host) or not is_encodable(host):
        shown = "(not shown)" if "@" in host else repr(host)      # a URL may hold a password
        raise MamError("MQTT_BROKER is %s: not a host name" % shown, code="bad_broker",
                       hint="no URL: the port goes into MQTT_PORT, credentials into MQTT_USERNAME and MQTT_PASSWORD")
    tls_text = settings.get("MQTT_TLS", "false").lower()
    if tls_text not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        raise MamError("MQTT_TLS is %r: it must be true or false" % tls_text, code="bad_broker")
    tls = tls_text in ("true", "1", "yes", "on")
    usual_port = parse_port(settings.get("MQTT_PORT", "8883" if tls else "1883"), "MQTT_PORT")
    port = block.get("port") or usual_port
    keepalive = settings.get("MQTT_KEEPALIVE", "60")
    if whole_number(keepalive, 1, 65535) is None:
        raise MamError("MQTT_KEEPALIVE is %r: it must be 1 to 65535 seconds" % keepalive, code="bad_broker")
    # Credentials go to the broker they were set for: naming another for one job must not collect them.
    usual = not usual_host or (host.lower(), port) == (usual_host.lower(), usual_port)
    username, password, certfile, keyfile = [settings.get(name) if usual else "" for name in (
        "MQTT_USERNAME", "MQTT_PASSWORD", "MQTT_CERTFILE", "MQTT_KEYFILE")]
    return Broker(host, port, bool(block.get("tls", tls and usual)), block.get("username") or username, password,
                  settings.get("MQTT_CA_CERTS"), certfile, keyfile,
                  settings.get("MQTT_CLIENT_ID_PREFIX", "hermes"), int(keepalive))


def broker_block(settings: Settings, block: Optional[Dict[str, Any]] = None) -> Optional[Dict[str, Any]]:
    """Like broker_settings, as the part fit for a record; None when unset or unusable."""
    try:
        broker = broker_settings(settings, block)
    except MamError:
        return None
    return broker and {"host": broker.host, "port": broker.port, "tls": broker.tls, "username": broker.username}


def topic_root(settings: Settings) -> str:
    """MAM_TOPIC_ROOT, checked: MQTT levels of [A-Za-z0-9_-], for NATS maps topics to subjects."""
    root = settings.get("MAM_TOPIC_ROOT", DEFAULT_TOPIC_ROOT)
    if not all(is_name(level) for level in root.split("/")):
        raise MamError("MAM_TOPIC_ROOT is %r: levels of letters, digits, _ and - joined by /" % root,
                       code="bad_value")
    return root


def environment_of_work(settings: Settings, extra: Dict[str, str]) -> Dict[str, str]:
    """The environment of a delegated command: the user's own without what must not leak into it.

    With a broker password set, nothing of the broker: the daemon sends what the work publishes.
    """
    hidden = ["SHIV_", "MAM_DISPATCH_SECRET", "MAM_SESSION_KEY"] + (["MQTT_"] if settings.get("MQTT_PASSWORD") else [])
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(tuple(hidden)) and name not in AGENT_VARIABLES}
    env.update(extra)
    return env


def own_environment(settings: Settings) -> Dict[str, str]:
    """The environment of a background part of mam: all of the user's, the registry pinned."""
    return {**os.environ, "MAM_REGISTRY_DIR": settings.registry_dir, "MAM_REAL_ROOT": settings.workspace}


# ==============================================================================
# 5. Model
#
# A job is what was asked for; an attempt is one try at it, with its own tokens;
# an event is one thing an attempt said. What may change a job's status is one
# table and one pure function, decide(): the registry only carries it out.
# ==============================================================================

# A job with its current attempt: columns of `jobs` (the prompt, which may be large, is
# apart), then, from dispatch_token on, of `attempts`.
Job = namedtuple("Job", (
    "n job_id status phase reason created_at updated_at title agent agent_session role broker "
    "topic_prefix timeout_sec idle_timeout_sec heartbeat_sec heartbeat_misses ack_timeout_sec "
    "expected_artifacts last_seq job_type reviewer reviewer_session max_iterations iteration "
    "attempt_id transport transition_seq state_rev state_sent clear_owed claimed_at claimed_mono "
    "delivered_at delivered_mono started_at finished_at last_event last_event_at last_event_mono "
    "detail parent_job subscribed_mono workdir validate_cmd command feed_stdin wire delivery runner_wait_s supervisor "
    "dispatch_token auth_token seq_base outcome runner run run_ended_at exit_status checking remote_keys dispatch "
    "dispatch_mail control control_mail"))
JOB_COLUMNS = Job._fields[:Job._fields.index("dispatch_token")]
ATTEMPT_COLUMNS = Job._fields[len(JOB_COLUMNS):]

Event = namedtuple("Event", "n job_id attempt_id seq event source timestamp logged_at detail payload "
                            "delivered_at")
DaemonInfo = namedtuple("DaemonInfo", "alive turning process build lines subscribed armed started_at drops runner",
                        defaults=(None,))

# What a remote attempt owes its runner: retained messages, each on the topic of its job and kind.
# *_mail: NOTHING; OWED, to be published; KEPT by the broker; STALE, to be taken off it.
Mail = namedtuple("Mail", "attempt_id dispatch_token remote_keys runner dispatch dispatch_mail control control_mail")
NOTHING, OWED, KEPT, STALE = range(4)
Beat = namedtuple("Beat", "job_id attempt_id period_s watch armed_mono touched_at touched_mono")

# A session that mam has started. status: running, stopped (to be resumed), terminated (its pane went, or its
# conversation was purged), archived (v4's). process: who is in the pane; job_id: the last job that it was given.
SessionRow = namedtuple("SessionRow", "session kind agent status pane socket process workdir conversation job_id "
                                      "created_at updated_at ended_at data")

# The requests of DESIGN 6. `by` says whose word it is: a worker's must come from
# the current attempt, an operator's carries its own authority.
Rule = namedtuple("Rule", "from_statuses to by reason")
REQUESTS = {
    "claim": Rule(("pending",), "running", "session", None),
    "started": Rule(OPEN_STATUSES, "running", "worker", None),
    "progress": Rule(OPEN_STATUSES, "running", "worker", None),
    "permission_required": Rule(OPEN_STATUSES, "running", "worker", None),
    "completed": Rule(OPEN_STATUSES, "completed", "worker", None),
    "error": Rule(OPEN_STATUSES, "error", "worker", None),
    "settled": Rule(("running",), None, "supervisor", None),
    "set": Rule(OPEN_STATUSES, None, "operator", "operator"),
    "cancelled": Rule(OPEN_STATUSES, "cancelled", "operator", "cancelled"),
    "deadline_timeout": Rule(OPEN_STATUSES, "error", "operator", "deadline_timeout"),
    "unresponsive": Rule(OPEN_STATUSES, "error", "operator", "unresponsive"),
    "agent_blocked": Rule(OPEN_STATUSES, "error", "operator", "agent_blocked"),
    "spawn_failed": Rule(OPEN_STATUSES, "error", "operator", "spawn_failed"),
    "supervisor_lost": Rule(OPEN_STATUSES, "error", "operator", "supervisor_lost"),
    "session_busy": Rule(("pending",), "cancelled", "operator", "session_busy"),
    "overruled": Rule(STATUSES, None, "orchestrator", None),
    "redispatch": Rule(STATUSES, "pending", "operator", None),
}
CLOSE_REQUESTS = ("deadline_timeout", "cancelled", "unresponsive", "agent_blocked", "spawn_failed",
                  "supervisor_lost", "session_busy")
TIMEOUT_REASONS = ("deadline_timeout", "unresponsive")

# What a caller believes of the job; None is no opinion. A wrong belief is a refusal.
Expected = namedtuple("Expected", "status attempt token last_seq", defaults=(None, None, None, None))
NO_OPINION = Expected()

# What decide() answers. verdict: commit, idempotent, refused. `late` marks a
# worker's word that came after the end of its attempt, kept as evidence.
Decision = namedtuple("Decision", "verdict reason status phase late", defaults=("", None, None, False))

# What Registry.transition answers (DESIGN 6).
Transition = namedtuple("Transition", "committed idempotent reason job event")


def what_became(job: Job) -> str:
    """One sentence on where a job stands, for somebody whose request came too late."""
    if job.status in OPEN_STATUSES and not job.outcome:
        return "job %s is at attempt %d, %s" % (job.job_id, job.attempt_id, job.status)
    if job.status in OPEN_STATUSES:
        return "attempt %d of job %s has ended as %s and is being checked (%s)" % (
            job.attempt_id, job.job_id, job.outcome, job.phase)
    reason = " (%s)" % job.reason if job.reason else ""
    return "job %s ended as %s%s at %s, attempt %d" % (
        job.job_id, job.status, reason, job.finished_at, job.attempt_id)


def owes_more(job: Job) -> Optional[str]:
    """The phase a worker's `completed` opens when the job is not settled by it; else None.

    A remote job's artifacts are its runner's business. (A review is not owed yet: nothing
    carries one out before loops exist.)
    """
    if job.validate_cmd or job.expected_artifacts != "[]" and job.transport != "remote":
        return "validating"
    return None


def _fenced(job: Job, by: str, expected: Expected) -> Optional[Decision]:
    """The refusal for a request that is not about this attempt as the caller believes it to be."""
    if expected.attempt is not None and expected.attempt != job.attempt_id:
        return Decision("refused", "attempt %s is not the current one: %s" % (
            expected.attempt, what_became(job)), late=by == "worker")
    if expected.token is not None and expected.token != job.dispatch_token:
        return Decision("refused", "the dispatch token is not that of attempt %d: %s" % (
            job.attempt_id, what_became(job)), late=by == "worker")
    if by == "worker" and job.attempt_id > 1 and expected.attempt is None and expected.token is None:
        return Decision("refused", "%s: a worker must name its attempt (--expect-dispatch-token or "
                                   "--attempt-id)" % what_became(job), late=True)
    if expected.status is not None and expected.status != job.status:
        return Decision("refused", "expected status %s: %s" % (expected.status, what_became(job)))
    if expected.last_seq is not None and expected.last_seq != job.last_seq:
        return Decision("refused", "an event arrived in between (seq %d, not %d)" % (
            job.last_seq, expected.last_seq))
    return None


def decide(job: Job, request: str, expected: Expected = NO_OPINION, status: Optional[str] = None,
           force: bool = False) -> Decision:
    """What a request does to a job: the transition table of DESIGN 6, without side effects.

    `status` is the wanted status for `set` and `settled`. Same terminal again is
    idempotent; another one after the end is refused; only redispatch leaves an end.
    """
    rule = REQUESTS[request]
    wanted = rule.to or status
    refusal = _fenced(job, rule.by, expected)
    if refusal:
        return refusal
    if request == "overruled":      # a runner obeys: the compare-and-swap of the host that delegated decides (DESIGN 7)
        verdict = "idempotent" if wanted == job.status else "commit"
        return Decision(verdict, what_became(job), wanted, None)
    if request == "redispatch":
        if job.outcome is None and job.status in OPEN_STATUSES and not force:
            return Decision("refused", "attempt %d has not ended; --force ends it first" % job.attempt_id)
        return Decision("commit", "", "pending", None)
    if job.status in TERMINAL_STATUSES:
        if wanted == job.status and (rule.by == "worker" or rule.reason in (job.reason, "operator")
                                     or request == "cancelled"):
            return Decision("idempotent", "already: %s" % what_became(job), late=rule.by == "worker")
        return Decision("refused", "conflicting %s after terminal: %s" % (request, what_became(job)),
                        late=rule.by == "worker")
    if rule.by == "worker" and job.outcome is not None:
        verdict = "idempotent" if wanted == job.outcome else "refused"
        return Decision(verdict, what_became(job), late=True)
    if job.status not in rule.from_statuses:
        return Decision("refused", "%s needs status %s: %s" % (
            request, " or ".join(rule.from_statuses), what_became(job)))
    if request == "settled" and not job.phase:
        return Decision("refused", "nothing is owed: %s" % what_became(job))
    if request == "set" and wanted in OPEN_STATUSES and job.outcome is not None:
        return Decision("refused", "%s; redispatch opens another attempt" % what_became(job))
    if request == "set" and wanted == job.status:
        return Decision("idempotent", "already: %s" % what_became(job))
    if request == "completed" and owes_more(job):
        return Decision("commit", "", "running", owes_more(job))
    return Decision("commit", "", wanted, None)


def decide_remote(job: Job, payload: Dict[str, Any]) -> Decision:
    """The same for an event of a remote job's runner, which speaks for its host's operator too (DESIGN 7)."""
    data = payload["data"]
    expected = Expected(None, data["attempt_id"], data["dispatch_token"], None)
    if payload["event"] == "completed" and data.get("settles") is False:      # its runner still looks at the artifacts
        decision = decide(job, "progress", expected)
        return decision._replace(phase="validating") if decision.verdict == "commit" else decision
    if payload["event"] == "error" and data.get("status") == "cancelled":
        return decide(job, "cancelled", expected)
    return decide(job, payload["event"], expected)


def can_deliver(job: Job) -> bool:
    """Whether mam brings this job to its session itself (a queue's jobs are picked instead)."""
    kind = job.agent_session.partition(":")[0]
    if kind == "herdr":     # v4's default session: what was only registered for it is brought there by its own means
        return bool(job.supervisor) or job.delivery != "none"
    return kind == "tmux" or kind == "exec" and bool(job.command) or kind == "remote" and bool(job.remote_keys)


def asks_permission(job: Job) -> bool:
    """Whether a job waits for a human's answer."""
    return job.status == "running" and not job.phase and job.last_event == "permission_required"


def exit_of(job: Job) -> int:
    """The exit code that tells how a job ended (DESIGN 10, 11)."""
    if job.status == "completed":
        return Exit.OK
    if job.reason in TIMEOUT_REASONS:
        return Exit.TIMEOUT
    return Exit.BUSY if job.reason == "session_busy" else Exit.FAILED


def exit_of_all(jobs: Sequence[Job]) -> int:
    """The exit code for several jobs: any error wins over a timeout, that over completed."""
    codes = {exit_of(job) for job in jobs}
    if codes <= {Exit.OK}:
        return Exit.OK
    return Exit.TIMEOUT if codes <= {Exit.OK, Exit.TIMEOUT} else (
        codes.pop() if len(codes) == 1 else Exit.FAILED)


def default_detail(request: str, job_id: str, reason: Optional[str]) -> str:
    words = {"started": "started", "progress": "progress", "permission_required": "needs permission",
             "completed": "completed", "error": "failed"}
    if reason and request not in words:
        return "Job %s closed: %s" % (job_id, reason)
    return "Job %s %s" % (job_id, words.get(request, request))


def check_job_id(text: str) -> str:
    if not is_name(text):
        raise MamError("%r is not a job id: 1 to 64 of letters, digits, _ and -" % text[:80], code="bad_job_id")
    return text


def check_session(text: str) -> str:
    """A session is `kind:name`; a tmux one may also be a pane, `tmux:%12`."""
    kind, colon, name = text.partition(":")
    bare = name[1:] if kind == "tmux" and name.startswith("%") else name
    if not colon or kind not in SESSION_KINDS or not is_name(bare):
        raise MamError("%r is not a session: it must be KIND:NAME with KIND one of %s" % (
            text[:80], ", ".join(SESSION_KINDS)), code="bad_session",
            hint="for example exec:demo, tmux:alice or queue:builders")
    return text


def transport_of(session: str) -> str:
    """v4's word for how a prompt travels: remote, herdr, or (new) local."""
    kind = session.partition(":")[0]
    return kind if kind in ("remote", "herdr") else "local"


def check_artifact(path: str, workdir: str) -> str:
    """An expected artifact as a path relative to the workdir; it must lie inside it."""
    relative = os.path.relpath(path, workdir) if os.path.isabs(path) else os.path.normpath(path)
    if not path or not is_inside(relative):
        raise MamError("--artifact %r: it must be a path inside the workdir" % path, code="bad_artifact")
    return relative


def is_inside(path: str) -> bool:
    """Whether a path is relative, leads to nowhere above, and can be a file's name at all."""
    return bool(path) and is_encodable(path) and "\0" not in path and not os.path.isabs(path) \
        and os.path.normpath(path).split("/")[0] != ".."


# ==============================================================================
# 6. Envelopes
#
# What goes over the wire (DESIGN 7). A payload is signed over its RFC 8785 form,
# so that it stays readable JSON and any re-ordering or re-spacing on the way
# changes nothing; a receiver believes nothing before every check has passed.
# ==============================================================================


VOCABULARY = {"events": EVENTS, "state": ("state",), "dispatch": ("dispatch",), "control": ("cancel", "resend"),
              "presence": ("presence",)}


class Rejected(Exception):
    """A message from outside that is not accepted; `reason` is a word fit for counting."""

    def __init__(self, reason: str, explanation: str = ""):
        super().__init__(explanation or reason)
        self.reason = reason


def events_topic(job: Job) -> str:
    return job.topic_prefix + "/events"


def state_topic(job: Job) -> str:
    return job.topic_prefix + "/state"


def dispatch_topic(topic_prefix: str) -> str:
    return topic_prefix + "/dispatch"


def control_topic(topic_prefix: str) -> str:
    return topic_prefix + "/control"


def presence_filter(topic_prefix: str, session: str) -> str:
    """Where the runners of a session say that they are there, one level for each; `+` as session: of all."""
    return "%s-runners/%s/+" % (topic_prefix.rpartition("/")[0], session)


def hkdf_sha256(key: bytes, info: bytes, salt: bytes = b"", length: int = 32) -> bytes:
    """HKDF with SHA-256: extract, then expand to `length` bytes (RFC 5869, sections 2.2 and 2.3)."""
    import hmac
    pseudorandom = hmac.digest(salt or bytes(32), key, "sha256")
    block, made = b"", b""
    for counter in range(1, -(-length // 32) + 1):
        block = hmac.digest(pseudorandom, block + info + bytes([counter]), "sha256")
        made += block
    return made[:length]


def derive_key(key: str, *purpose: Any) -> str:
    """The key for one purpose under another (DESIGN 7). Keys are text, used as its ASCII bytes."""
    return base64url(hkdf_sha256(key.encode("ascii"), canonical(["mam/1", *purpose])))


def session_key(secret: str, session: str) -> str:
    """What a host that serves one session is given: it signs and checks for that session alone."""
    return derive_key(secret, "session", session)


def key_id(key: str) -> str:
    """A name for a session key, fit to travel: it tells which secret made it."""
    return derive_key(key, "kid")[:8]


def attempt_keys(key: str, job_id: str, attempt: int, token: str) -> Tuple[str, Dict[str, str]]:
    """(key of events and states, the others a remote attempt needs) under a session key."""
    return derive_key(key, "event", job_id, attempt, token), {
        "kid": key_id(key), "control": derive_key(key, "control", job_id, attempt, token),
        "presence": derive_key(key, "presence")}


def event_payload(job_id: str, seq: int, event: str, timestamp: str, detail: str,
                  data: Dict[str, Any]) -> Dict[str, Any]:
    """An unsigned event as it goes over the wire; data names the attempt that speaks."""
    return {"schema_version": SCHEMA_VERSION, "seq": seq, "job_id": job_id, "event": event,
            "timestamp": timestamp, "detail": detail, "data": data}


def state_payload(job: Job) -> Dict[str, Any]:
    """The retained picture of a job as it stands now; always built when it is sent."""
    data: Dict[str, Any] = {"dispatch_token": job.dispatch_token, "attempt_id": job.attempt_id}
    if job.reason:
        data["reason"] = job.reason
    payload = event_payload(job.job_id, job.last_seq, "state", job.updated_at, job.detail or "", data)
    payload.update(status=job.status, phase=job.phase, last_event=job.last_event)
    return payload


def unsigned_form(payload: Dict[str, Any]) -> bytes:
    """What of a payload is signed, and kept in the registry: its canonical form without `data.hmac_sig`."""
    data = {name: value for name, value in payload["data"].items() if name != "hmac_sig"}
    return canonical({**payload, "data": data})


def signature(payload: Dict[str, Any], key: str) -> bytes:
    """HMAC-SHA256 over the canonical form of a payload without `data.hmac_sig` (RFC 2104).

    The key is the ASCII bytes of its text form.
    """
    import hmac
    return hmac.digest(key.encode("ascii"), unsigned_form(payload), "sha256")


def sign(payload: Dict[str, Any], key: str) -> bytes:
    """The signed bytes of a payload: canonical, so the same event has the same bytes every time."""
    sig = signature(payload, key).hex()
    return canonical({**payload, "data": {**payload["data"], "hmac_sig": sig}})


def sign_recorded(text: str, key: str) -> bytes:
    """The signed bytes of a recorded event, whose text is canonical and unsigned already: the same as sign()."""
    import hmac
    import json
    payload = json.loads(text)
    payload["data"]["hmac_sig"] = hmac.digest(key.encode("ascii"), text.encode("utf-8"), "sha256").hex()
    return canonical(payload)


def verify(payload: Any, key: str) -> str:
    """The unsigned form, as text, of a payload with the right signature (compared in constant time); else Rejected."""
    import hmac
    data = payload.get("data") if isinstance(payload, dict) else None
    claimed = data.get("hmac_sig") if isinstance(data, dict) else None
    if not isinstance(claimed, str) or len(claimed) != 64:
        raise Rejected("signature", "no signature")
    try:
        claimed_bytes = bytes.fromhex(claimed)
        form = unsigned_form(payload)
        actual = hmac.digest(key.encode("ascii"), form, "sha256")
    except ValueError as error:     # BadJson too
        raise Rejected("signature", str(error)) from None
    if claimed_bytes.hex() != claimed or not hmac.compare_digest(claimed_bytes, actual):   # one form only
        raise Rejected("signature", "wrong signature")
    return form.decode("utf-8")


def dispatch_message(job: Job, mail: Mail, prompt: str) -> Tuple[str, bytes, bool]:
    """An attempt as its one runner is told of it; the same bytes each time (DESIGN 13)."""
    import json
    dispatch, keys = json.loads(mail.dispatch), json.loads(mail.remote_keys)
    data = {"dispatch_token": mail.dispatch_token, "attempt_id": mail.attempt_id, "kid": keys["kid"],
            "session": job.agent_session.partition(":")[2], "runner": mail.runner, "seq_base": job.seq_base,
            "issued_at": dispatch["issued_at"], "expires_at": dispatch["expires_at"], "prompt": prompt,
            "contract": {"agent": job.agent, "role": job.role, "timeout_sec": job.timeout_sec,
                         "idle_timeout_sec": job.idle_timeout_sec, "heartbeat_sec": job.heartbeat_sec,
                         "heartbeat_misses": job.heartbeat_misses, "ack_timeout_sec": job.ack_timeout_sec,
                         "artifacts": json.loads(job.expected_artifacts)}}
    payload = event_payload(job.job_id, 0, "dispatch", dispatch["issued_at"], "", data)
    return dispatch_topic(job.topic_prefix), sign(payload, keys["control"]), True


def control_message(job: Any, word: str, timestamp: str, more: Dict[str, Any],
                    of: Any = None) -> Tuple[str, bytes, bool]:
    """`cancel`, retained, or `resend`: what the runner of an attempt (the mail `of`, or the job's) is asked to do."""
    import json
    of = of or job
    keys = json.loads(of.remote_keys)
    data = {"dispatch_token": of.dispatch_token, "attempt_id": of.attempt_id, "kid": keys["kid"],
            "session": job.agent_session.partition(":")[2], **more}
    payload = event_payload(job.job_id, 0, word, timestamp, "", data)
    return control_topic(job.topic_prefix), sign(payload, keys["control"]), word == "cancel"


def next_mail(mails: Sequence[Mail]) -> Optional[Tuple[str, Mail]]:
    """What to send next of the mails of a job's attempts, oldest first: (what, which), or None.

    One at a time and in this order, so that a runner hears the end of an attempt before the next
    one. `forget_*`: a newer attempt has taken the topic already, and there is nothing to take off it.
    """
    for at, mail in enumerate(mails):
        newer = mails[at + 1:]
        if mail.control_mail == OWED:
            return "control", mail
        if mail.control_mail == STALE:
            taken = any(one.control_mail in (OWED, KEPT) for one in newer)
            return "forget_control" if taken else "clear_control", mail
        if mail.dispatch_mail == STALE:
            taken = any(one.dispatch_mail in (OWED, KEPT) for one in newer)
            return "forget_dispatch" if taken else "clear_dispatch", mail
        if mail.dispatch_mail == OWED:
            return "dispatch", mail
    return None


def accept_message(topic: str, raw: bytes, topic_prefix: str, kind: str,
                   keys: Dict[int, Tuple[str, str]]) -> Tuple[Dict[str, Any], str]:
    """(payload, its unsigned text) of a message from the wire, or Rejected: the checks of DESIGN 7 in their order.

    `kind` is `events` or `state`; `keys` maps an attempt to its (dispatch token, key). The
    attempt that picks the key is covered by the signature made with it.
    """
    payload = _parsed_envelope(topic, raw, topic_prefix, kind)
    data = payload["data"]
    attempt = data.get("attempt_id")
    if type(attempt) is not int or attempt not in keys:
        raise Rejected("attempt", "attempt_id is %r" % (attempt,))
    token, key = keys[attempt]
    text = verify(payload, key)
    if data.get("dispatch_token") != token:
        raise Rejected("token", "the dispatch token is not that of attempt %d" % attempt)
    intent_identity(data)
    if type(payload.get("seq")) is not int or payload["seq"] < 0:
        raise Rejected("seq", "seq is %r" % (payload.get("seq"),))
    return payload, text


def _parsed_envelope(topic: str, raw: bytes, topic_prefix: str, kind: str) -> Dict[str, Any]:
    """The checks that need no key: size, encoding, shape, version, topic, vocabulary."""
    try:
        payload = parse_json(raw)
    except BadJson as error:
        raise Rejected("size" if len(raw) > MAX_PAYLOAD_BYTES else "json", str(error)) from None
    if not isinstance(payload, dict) or not isinstance(payload.get("data"), dict):
        raise Rejected("shape", "not an object with an object `data`")
    version = payload.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise Rejected("schema_version", "schema_version is %r" % (version,))
    if topic != "%s/%s" % (topic_prefix, kind) or topic_prefix.rpartition("/")[2] != payload.get("job_id"):
        raise Rejected("topic", "not on the topic of its own job and kind")
    if payload.get("event") not in VOCABULARY[kind]:
        raise Rejected("vocabulary", "event is %r" % (payload.get("event"),))
    if not isinstance(payload.get("detail"), str) or not isinstance(payload.get("timestamp"), str):
        raise Rejected("shape", "detail or timestamp is no text")
    return payload


def accept_order(topic: str, raw: bytes, kind: str, session: str, keys: Dict[str, str]) -> Dict[str, Any]:
    """The payload of a dispatch or control meant for a runner of this session, or Rejected (DESIGN 13).

    `keys`: the runner's session keys by their kid. The attempt and token that pick the key are
    covered by the signature made with it. What is for another session is `other_session`: not ours to judge.
    """
    payload = _parsed_envelope(topic, raw, topic.rpartition("/")[0], kind)
    data = payload["data"]
    if data.get("session") != session:
        raise Rejected("other_session")
    attempt, token = data.get("attempt_id"), data.get("dispatch_token")
    if not is_name(payload["job_id"]) or type(attempt) is not int or attempt < 1 or not isinstance(token, str) \
            or not is_name(token):
        raise Rejected("attempt", "no job id, attempt or token of the right form")
    kid = data.get("kid")
    if not isinstance(kid, str) or kid not in keys:
        raise Rejected("kid", "signed under secret %.20r, which this runner does not have" % (kid,))
    verify(payload, attempt_keys(keys[kid], payload["job_id"], attempt, token)[1]["control"])
    return payload


Presence = namedtuple("Presence", "session runner state host version slots busy pool serving_s instance beat timestamp")


def presence_message(root: str, presence: Presence, key: str) -> Tuple[str, bytes, bool]:
    """A runner's word that it is there (or, as its last will, that it is not), retained."""
    topic = "%s-runners/%s/%s" % (root, presence.session, presence.runner)
    data = {name: getattr(presence, name) for name in Presence._fields if name != "timestamp"}
    return topic, sign(event_payload(presence.runner, 0, "presence", presence.timestamp, "", data), key), True


def accept_presence(topic: str, raw: bytes, key: str) -> Presence:
    """A runner's presence, or Rejected. Its age is the caller's business."""
    prefix, _, runner = topic.rpartition("/")
    payload = _parsed_envelope(topic + "/presence", raw, topic, "presence")
    data = payload["data"]
    verify(payload, key)
    whole = [data.get(name) for name in ("slots", "busy", "beat")]
    texts = [data.get(name) for name in ("session", "runner", "state", "host", "version", "instance")]
    if not all(type(number) is int and number >= 0 for number in whole) or type(data.get("pool")) is not bool \
            or not all(isinstance(text, str) for text in texts) or type(data.get("serving_s")) not in (int, float):
        raise Rejected("shape", "a presence without its fields")
    if (data["session"], data["runner"]) != (prefix.rpartition("/")[2], runner):
        raise Rejected("topic", "not on the topic of its own runner")
    fields = [clean_text(data[name])[:64] if isinstance(data[name], str) else data[name]
              for name in Presence._fields[:-1]]
    return Presence._make([*fields, payload["timestamp"]])


def intent_identity(data: Dict[str, Any]) -> Optional[str]:
    """What stays the same when a notification is published anew under another number; None without one."""
    intent = data.get("notification_intent")
    if intent is None:
        return None
    fields = [intent.get(name) for name in ("seq", "event", "timestamp")] if isinstance(intent, dict) else []
    if not fields or not all(type(field) in (int, str) for field in fields):
        raise Rejected("intent", "notification_intent has no stable identity")
    return compact_json(fields)


def check_data(data: Any) -> Dict[str, Any]:
    """User data of an event: an object, of allowed names, with a canonical form of fair size."""
    if not isinstance(data, dict):
        raise MamError("--data must be a JSON object, not %s" % type(data).__name__, code="bad_data",
                       hint="for example --data '{\"tests_passed\": 42}'")
    reserved = sorted(RESERVED_DATA.intersection(data))
    if reserved:
        raise MamError("--data uses a reserved name: %s" % ", ".join(reserved), code="bad_data",
                       hint="choose another name; mam sets this one itself")
    try:
        size = len(canonical([data])) - 2          # as deep as it will lie in the event
    except BadJson as error:
        raise MamError("--data cannot be signed: %s" % error, code="bad_data") from None
    if size > MAX_DATA_BYTES:
        raise MamError("--data is %d bytes, more than the %d allowed" % (size, MAX_DATA_BYTES),
                       code="too_large", hint="write it to a file and name the file in the detail")
    return data


def parse_data(text: str) -> Dict[str, Any]:
    try:
        return check_data(parse_json(text.encode("utf-8", "surrogatepass"), 16 * MAX_DATA_BYTES))
    except BadJson as error:
        raise MamError("--data is not usable: %s" % error, code="bad_data",
                       hint="for example --data '{\"tests_passed\": 42}'") from None


def split_detail(text: str) -> Tuple[str, Optional[str]]:
    """(detail, feedback): a detail over 4 KiB is cut and stands whole in data.feedback."""
    size = len(text.encode("utf-8"))
    if size <= MAX_DETAIL_BYTES:
        return text, None
    if size > MAX_FEEDBACK_BYTES:
        raise MamError("the detail is %d bytes, more than the %d allowed" % (size, MAX_FEEDBACK_BYTES),
                       code="too_large", hint="write it to a file and name the file in the detail")
    return cut_utf8(text, MAX_DETAIL_BYTES), text


# ==============================================================================
# 7. Registry
#
# Jobs, attempts, events, beats and sessions in one SQLite file. An event, the
# state change it causes and the number it takes are one transaction, so a crash
# leaves all of it or none. Every statement goes through _execute, which waits for
# a busy file and turns SQLite's failures into errors a user can act on.
# ==============================================================================

_SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE jobs(
  n INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL UNIQUE,
  status TEXT NOT NULL, phase TEXT, reason TEXT, created_at TEXT NOT NULL, updated_at TEXT NOT NULL,
  title TEXT NOT NULL, agent TEXT NOT NULL, agent_session TEXT NOT NULL, role TEXT NOT NULL,
  broker TEXT, topic_prefix TEXT NOT NULL, timeout_sec REAL NOT NULL, idle_timeout_sec REAL NOT NULL,
  heartbeat_sec REAL NOT NULL, heartbeat_misses INTEGER NOT NULL, ack_timeout_sec REAL NOT NULL,
  expected_artifacts TEXT NOT NULL, last_seq INTEGER NOT NULL DEFAULT 0, job_type TEXT NOT NULL,
  reviewer TEXT, reviewer_session TEXT, max_iterations INTEGER NOT NULL, iteration INTEGER NOT NULL DEFAULT 1,
  attempt_id INTEGER NOT NULL, transport TEXT NOT NULL, transition_seq INTEGER NOT NULL DEFAULT 0,
  state_rev INTEGER NOT NULL DEFAULT 1, state_sent INTEGER NOT NULL DEFAULT 0,
  clear_owed INTEGER NOT NULL DEFAULT 0, claimed_at TEXT, claimed_mono TEXT,
  delivered_at TEXT, delivered_mono TEXT, started_at TEXT, finished_at TEXT,
  last_event TEXT, last_event_at TEXT, last_event_mono TEXT, detail TEXT, parent_job TEXT,
  subscribed_mono TEXT, workdir TEXT NOT NULL, validate_cmd TEXT, command TEXT, feed_stdin INTEGER NOT NULL DEFAULT 0,
  wire TEXT, delivery TEXT NOT NULL DEFAULT 'none', runner_wait_s REAL, supervisor TEXT, prompt TEXT NOT NULL);
CREATE INDEX jobs_pending ON jobs(agent_session, n) WHERE status = 'pending';
CREATE INDEX jobs_status ON jobs(status, n);
CREATE INDEX jobs_finished ON jobs(finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX jobs_state_owed ON jobs(n) WHERE wire IS NOT NULL AND (state_sent < state_rev OR clear_owed);
CREATE TABLE attempts(
  job_id TEXT NOT NULL, attempt_id INTEGER NOT NULL, dispatch_token TEXT NOT NULL, auth_token TEXT NOT NULL,
  seq_base INTEGER NOT NULL DEFAULT 0, outcome TEXT, created_at TEXT NOT NULL, ended_at TEXT,
  runner TEXT, run TEXT, run_ended_at TEXT, exit_status INTEGER, checking TEXT,
  remote_keys TEXT, dispatch TEXT, dispatch_mail INTEGER NOT NULL DEFAULT 0,
  control TEXT, control_mail INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY(job_id, attempt_id)) WITHOUT ROWID;
CREATE INDEX attempts_mail ON attempts(job_id) WHERE dispatch_mail OR control_mail;
CREATE INDEX attempts_at_work ON attempts(job_id) WHERE run IS NOT NULL AND run_ended_at IS NULL;
CREATE INDEX attempts_checking ON attempts(job_id) WHERE checking IS NOT NULL;
CREATE TABLE events(
  n INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL, attempt_id INTEGER NOT NULL, seq INTEGER,
  event TEXT NOT NULL, source TEXT NOT NULL, timestamp TEXT NOT NULL, logged_at TEXT NOT NULL,
  detail TEXT NOT NULL, payload TEXT NOT NULL, owed INTEGER NOT NULL DEFAULT 0, delivered_at TEXT,
  UNIQUE(job_id, attempt_id, seq));
CREATE INDEX events_of_job ON events(job_id, n);
CREATE INDEX events_owed ON events(job_id, n) WHERE owed = 1;
CREATE TABLE beats(
  job_id TEXT PRIMARY KEY, attempt_id INTEGER NOT NULL, period_s REAL NOT NULL, watch TEXT,
  armed_mono TEXT NOT NULL, touched_at TEXT NOT NULL, touched_mono TEXT NOT NULL);
CREATE TABLE intents(
  job_id TEXT NOT NULL, identity TEXT NOT NULL, PRIMARY KEY(job_id, identity)) WITHOUT ROWID;
CREATE TABLE senders(client_id TEXT PRIMARY KEY, broker TEXT NOT NULL, process TEXT NOT NULL);
CREATE TABLE sessions(
  session TEXT PRIMARY KEY, kind TEXT NOT NULL, agent TEXT, status TEXT NOT NULL, pane TEXT, workdir TEXT,
  conversation TEXT, job_id TEXT, created_at TEXT NOT NULL, updated_at TEXT NOT NULL, data TEXT,
  socket TEXT, process TEXT, ended_at TEXT);
"""

# What makes a registry of the version before each of these one of this version.
_MIGRATIONS = {2: """
ALTER TABLE jobs ADD COLUMN runner_wait_s REAL;
ALTER TABLE attempts ADD COLUMN remote_keys TEXT;
ALTER TABLE attempts ADD COLUMN dispatch TEXT;
ALTER TABLE attempts ADD COLUMN dispatch_mail INTEGER NOT NULL DEFAULT 0;
ALTER TABLE attempts ADD COLUMN control TEXT;
ALTER TABLE attempts ADD COLUMN control_mail INTEGER NOT NULL DEFAULT 0;
CREATE INDEX attempts_mail ON attempts(job_id) WHERE dispatch_mail OR control_mail;
ALTER TABLE attempts ADD COLUMN checking TEXT;
CREATE INDEX attempts_checking ON attempts(job_id) WHERE checking IS NOT NULL;
ALTER TABLE beats RENAME TO beats_1;
CREATE TABLE beats(
  job_id TEXT PRIMARY KEY, attempt_id INTEGER NOT NULL, period_s REAL NOT NULL, watch TEXT,
  armed_mono TEXT NOT NULL, touched_at TEXT NOT NULL, touched_mono TEXT NOT NULL);
INSERT INTO beats SELECT job_id, attempt_id, period_s, watch, armed_mono, touched_at, touched_mono FROM beats_1;
DROP TABLE beats_1;
ALTER TABLE sessions ADD COLUMN socket TEXT;
ALTER TABLE sessions ADD COLUMN process TEXT;
ALTER TABLE sessions ADD COLUMN ended_at TEXT
"""}

# Where locks, memory maps or both do not work across hosts: SQLite would lose commits.
_SHARED_FILE_SYSTEMS = frozenset((
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "smb2", "9p", "virtiofs", "drvfs", "vboxsf", "afs", "ceph",
    "lustre", "glusterfs", "fuse.sshfs", "fuse.glusterfs", "fuse.vmhgfs-fuse", "prl_fs", "ncpfs",
    "fuse.s3fs", "fuse.rclone", "beegfs", "gpfs", "afpfs", "webdav"))


def file_system_type(path: str, mounts: str) -> str:
    """The type of the file system that holds path, from the text of /proc/self/mounts."""
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def _read_mounts() -> str:
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:      # macOS keeps no such file; its network mounts are not told apart here
        return ""


def _make_private_dir(path: str) -> None:
    """Create a folder 0700; made by root, it takes the owner of the folder above."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    _give_to_owner(path)


def _give_to_owner(path: str) -> None:
    """A file made by root takes the owner of its folder, so that its user can go on using it."""
    if os.geteuid() == 0:
        above = os.stat(os.path.dirname(path))
        if above.st_uid:
            os.chown(path, above.st_uid, above.st_gid)


class FileLock:
    """An flock on a file that is made when needed. Released by close() or by the process's end."""

    def __init__(self, path: str, descriptor: Optional[int] = None):
        """`descriptor`: one that was handed over, locked, by whoever started this process."""
        if descriptor is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _give_to_owner(path)
        self.descriptor = descriptor

    def acquire(self, wait_s: float = 0.0) -> bool:
        """Take the lock within wait_s seconds. False means that somebody else holds it."""
        import fcntl
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.005)

    def close(self) -> None:
        os.close(self.descriptor)

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


if TYPE_CHECKING:
    MakeKeys = Callable[[str, int, str], Tuple[str, Dict[str, str]]]


class Registry:
    """The jobs of one workspace, in `<dir>/mam.db`.

    One object belongs to one process and one thread. A crash between any two
    statements leaves the file as before the transaction or as after it.
    """

    def __init__(self, directory: str, create: bool = False):
        """Open the registry; with `create`, make it if there is none.

        Raises MamError: none there (code `no_registry`), unusable, corrupt, from a newer mam.
        """
        import sqlite3
        self._sqlite = sqlite3
        self.directory = directory
        self.path = os.path.join(directory, "mam.db")
        self._db: Any = None
        self._identity: Any = None
        try:
            self._refuse_shared_file_system()
            if not self._has_content():
                if not create:
                    raise MamError("no registry at %s" % directory, code="no_registry",
                                   hint="a first `mam delegate` or `mam register` makes one; "
                                        "--registry-dir or MAM_REGISTRY_DIR name another")
                self._create()
            self._open()
        except OSError as error:
            raise self._file_error(error) from None

    # -- opening -----------------------------------------------------------------

    def _refuse_shared_file_system(self) -> None:
        folder = os.path.realpath(self.directory)
        kind = file_system_type(folder, _read_mounts())
        if kind in _SHARED_FILE_SYSTEMS:
            raise MamError("the registry %s is on a network or shared file system (%s)" % (
                self.directory, kind), code="shared_file_system",
                hint="SQLite loses commits there: name a local folder with --registry-dir or MAM_REGISTRY_DIR")

    def _has_content(self) -> bool:
        try:
            return os.stat(self.path).st_size > 0
        except FileNotFoundError:
            return False

    def _create(self) -> None:
        """Make the file aside, complete and in WAL mode, and move it into place under a lock.

        So no process ever sees a half-made registry, nor races for the journal mode
        (the busy handler is not consulted for that switch).
        """
        os.makedirs(os.path.dirname(self.directory), exist_ok=True)
        _make_private_dir(self.directory)
        ignore = os.path.join(self.directory, ".gitignore")
        with FileLock(os.path.join(self.directory, "create.lock")) as lock:
            if not lock.acquire(BUSY_WAIT_S):
                raise MamError("another process has been creating %s for %ds" % (self.path, BUSY_WAIT_S),
                               exit=Exit.NOT_RECORDED, code="busy", hint="run the same command again")
            if self._has_content():
                return
            if not os.path.exists(ignore):   # so that `git clean` and `git add .` pass .mam by
                write_atomic(ignore, b"*\n")
                _give_to_owner(ignore)
            fresh = os.path.join(self.directory, "mam.db.new")
            for leftover in (fresh, fresh + "-wal", fresh + "-shm"):
                if os.path.exists(leftover):
                    os.unlink(leftover)
            os.close(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            self._db = self._connect(fresh)
            self._execute("PRAGMA journal_mode=WAL")
            self._execute("PRAGMA synchronous=FULL")
            try:
                self._db.executescript("BEGIN;" + _SCHEMA + "PRAGMA user_version=%d; COMMIT;" % REGISTRY_VERSION)
            except self._sqlite.Error as error:
                raise self._sql_error(error) from None
            self._execute("INSERT INTO meta VALUES('registry_id', ?)", (random_hex(32),))
            self.close()
            _give_to_owner(fresh)
            for stale in (self.path + "-wal", self.path + "-shm"):   # of a file moved away: not of this one
                if os.path.lexists(stale):
                    os.replace(stale, stale + ".old")
            os.rename(fresh, self.path)

    def _connect(self, path: str, options: str = "mode=rw") -> Any:
        quoted = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        try:
            return self._sqlite.connect("file:%s?%s" % (quoted, options), uri=True,
                                        timeout=0.1, isolation_level=None)
        except self._sqlite.Error as error:
            raise self._sql_error(error) from None

    def _open(self) -> None:
        self._db = self._connect(self.path)
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            raise self._gone() from None
        self._identity = (stat.st_dev, stat.st_ino)
        try:
            version = self._execute("PRAGMA user_version")[0][0]
        except MamError as error:
            if error.code not in ("read_only", "cannot_open") or os.path.exists(self.path + "-wal"):
                raise
            # A folder we may not write to, and nobody is writing: read the file as it is.
            self.close()
            self._db = self._connect(self.path, "mode=ro&immutable=1")
            version = self._execute("PRAGMA user_version")[0][0]
        if version > REGISTRY_VERSION:
            raise MamError("the registry %s was made by a newer mam (version %d, this one knows %d)" % (
                self.path, version, REGISTRY_VERSION), code="newer_registry",
                hint="update this mam.pyz, or name another registry with --registry-dir")
        if version < 1:
            raise MamError("%s is not a registry of mam" % self.path, code="corrupt",
                           hint="move it away, or name another registry with --registry-dir")
        self._execute("PRAGMA synchronous=FULL")
        self._execute("PRAGMA wal_autocheckpoint=0")   # see _checkpoint
        if version < REGISTRY_VERSION:
            self._migrate()

    def _migrate(self) -> None:
        """Bring an older registry to this version, all in one transaction; of two that try, the second finds it done.

        A mam of the older version that still runs is told to be updated at its next command.
        """
        try:
            with self.write():
                for version in range(self._execute("PRAGMA user_version")[0][0] + 1, REGISTRY_VERSION + 1):
                    for statement in _MIGRATIONS[version].split(";"):
                        self._execute(statement)
                    self._execute("PRAGMA user_version=%d" % version)
        except MamError as error:
            if error.code == "read_only":
                raise MamError("the registry %s is of an older mam and cannot be written" % self.path, code="read_only",
                               hint="run any command of this mam once as a user who may write it") from None
            raise

    def close(self) -> None:
        if self._db is not None:
            try:
                self._db.close()
            except self._sqlite.Error:
                pass   # the last close checkpoints; what that could not write stays in the -wal
            self._db = None

    def __enter__(self) -> "Registry":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    # -- statements, transactions, failures -----------------------------------------

    def _sql_error(self, error: Exception) -> MamError:
        text = str(error)
        again = "nothing was recorded; run the same command again"
        if "locked" in text or "busy" in text:
            return MamError("the registry %s has been busy for %ds" % (self.path, BUSY_WAIT_S),
                            exit=Exit.NOT_RECORDED, hint=again, code="busy")
        if "full" in text or "disk I/O" in text and self._no_space():   # the -shm cannot grow
            return MamError("the disk is full: %s" % self.path, exit=Exit.NOT_RECORDED,
                            hint="free some space; " + again, code="disk_full")
        if "readonly" in text or "read-only" in text:
            return MamError("the registry %s cannot be written: it is read-only" % self.path, code="read_only",
                            hint="check the owner and mode of the folder, or use --registry-dir")
        if "unable to open" in text:
            return MamError("the registry %s cannot be opened" % self.path, code="cannot_open",
                            hint="check the owner and mode of the folder, or use --registry-dir")
        if "not a database" in text or "malformed" in text or "no such" in text \
                or "no column" in text:
            return MamError("the registry %s is corrupt (%s)" % (self.path, text), code="corrupt",
                            hint="keep a copy of the folder, then move mam.db, mam.db-wal and mam.db-shm away; "
                                 "a new one is made")
        return MamError("the registry %s failed: %s" % (self.path, text), exit=Exit.NOT_RECORDED,
                        hint=again, code="io_error")

    def _no_space(self) -> bool:
        try:
            left = os.statvfs(self.directory)
        except OSError:
            return False
        return left.f_bavail * left.f_frsize < 65536

    def _file_error(self, error: OSError) -> MamError:
        import errno
        where = error.filename or self.directory
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return MamError("the disk is full: %s" % where, exit=Exit.NOT_RECORDED, code="disk_full",
                            hint="free some space; nothing was recorded; run the same command again")
        return MamError("the registry cannot be used: %s: %s" % (where, error.strerror or error),
                        code="cannot_open", hint="check the owner and mode of the folder, or use --registry-dir")

    def _execute(self, sql: str, params: Sequence[Any] = ()) -> List[Any]:
        """Run one statement and fetch everything (an open cursor would freeze data_version)."""
        deadline = 0.0
        while True:
            try:
                return self._db.execute(sql, params).fetchall()
            except self._sqlite.Error as error:
                text = str(error)
                if not ("locked" in text or "busy" in text):
                    raise self._sql_error(error) from None
                now = time.monotonic()
                deadline = deadline or now + BUSY_WAIT_S
                if now >= deadline:
                    raise self._sql_error(error) from None
                time.sleep(0.002 + os.urandom(1)[0] / 255 * 0.02)   # jitter: no two return in step

    def _execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for many rows, inside a transaction: nothing can be busy there."""
        try:
            self._db.executemany(sql, rows)
        except self._sqlite.Error as error:
            raise self._sql_error(error) from None

    def still_there(self) -> bool:
        """Whether the open file is the one at its path (somebody may have deleted the folder)."""
        try:
            stat = os.stat(self.path)
        except OSError:
            return False
        return (stat.st_dev, stat.st_ino) == self._identity

    def _check_still_there(self) -> None:
        if not self.still_there():
            raise self._gone()

    def _gone(self) -> MamError:
        return MamError("the registry %s was removed or replaced while in use" % self.path, exit=Exit.NOT_RECORDED,
                        code="registry_gone", hint="nothing was recorded; run the same command again")

    def write(self, durable: bool = True) -> "_Transaction":
        """A context in which everything is committed together, or nothing is."""
        return _Transaction(self, durable)

    def _checkpoint(self) -> None:
        """Empty a long -wal. TRUNCATE holds the writer lock: SQLite before 3.51.3 can lose
        commits when a checkpoint races a writer, so no other kind is ever run."""
        try:
            if os.stat(self.path + "-wal").st_size < WAL_LIMIT_BYTES:
                return
        except OSError:
            return
        self._db.execute("PRAGMA busy_timeout=0")
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except self._sqlite.Error:
            pass   # the commit stands; the next one past the limit tries again
        finally:
            self._db.execute("PRAGMA busy_timeout=100")

    def data_version(self) -> int:
        """Changes whenever another connection has committed; costs 2 microseconds."""
        return self._execute("PRAGMA data_version")[0][0]

    # -- reading ------------------------------------------------------------------

    _JOB_SQL = "SELECT %s, %s FROM jobs j JOIN attempts a ON a.job_id = j.job_id AND a.attempt_id = j.attempt_id " % (
        ", ".join("j." + column for column in JOB_COLUMNS),
        ", ".join("a." + column for column in ATTEMPT_COLUMNS))
    _EVENT_SQL = "SELECT %s FROM events " % ", ".join(Event._fields)

    def _jobs(self, where: str, params: Sequence[Any] = ()) -> List[Job]:
        return [Job._make(row) for row in self._execute(self._JOB_SQL + where, params)]

    def job(self, job_id: str) -> Job:
        """The job with its current attempt; MamError (code `unknown_job`) if there is none."""
        found = self._jobs("WHERE j.job_id = ?", (check_job_id(job_id),))
        if not found:
            raise MamError("no job %s in %s" % (job_id, self.directory), code="unknown_job",
                           hint="`mam list` shows the jobs of this registry")
        return found[0]

    def jobs(self, status: Optional[str] = None) -> List[Job]:
        """All jobs in the order of registration, or those of one status."""
        if status:
            return self._jobs("WHERE j.status = ? ORDER BY j.n", (status,))
        return self._jobs("ORDER BY j.n")

    def open_jobs(self) -> List[Job]:
        return self._jobs("WHERE j.status IN ('pending', 'running') ORDER BY j.n")

    def jobs_by_id(self, job_ids: Sequence[str]) -> List[Job]:
        found: List[Job] = []
        for start in range(0, len(job_ids), 500):   # SQLite takes 999 parameters
            part = job_ids[start:start + 500]
            found += self._jobs("WHERE j.job_id IN (%s)" % ",".join("?" * len(part)), part)
        return found

    def ended_attempts_at_work(self, job_id: Optional[str] = None) -> List[Tuple[str, int, str]]:
        """(job id, attempt, processes) of attempts that are over and whose command has not been seen to end,
        and of those whose check goes on though nobody waits for its result any more."""
        rows = self._execute("SELECT job_id, attempt_id, run FROM attempts "
                             "WHERE run IS NOT NULL AND run_ended_at IS NULL AND outcome IS NOT NULL UNION ALL "
                             "SELECT a.job_id, a.attempt_id, a.checking FROM attempts a JOIN jobs j USING(job_id) "
                             "WHERE a.checking IS NOT NULL "
                             "AND (j.phase IS NOT 'validating' OR j.attempt_id <> a.attempt_id)")
        return [(row[0], row[1], row[2]) for row in rows if job_id in (None, row[0])]

    def last_ends(self, count: int) -> List[Job]:
        return self._jobs("WHERE j.finished_at IS NOT NULL ORDER BY j.finished_at DESC, j.n DESC LIMIT ?", (count,))

    def counts(self) -> Dict[str, int]:
        return dict(self._execute("SELECT status, count(*) FROM jobs GROUP BY status"))

    def open_in_session(self, names: Sequence[str], but: str = "") -> Optional[str]:
        """The id of another job that has been or is being handed to this session and is open.

        `names`: all by which it goes, such as tmux:alice and tmux:%3.
        """
        rows = self._execute("SELECT job_id FROM jobs WHERE status IN ('pending', 'running') AND agent_session IN (%s) "
                             "AND delivery <> 'none' AND job_id <> ? LIMIT 1" % ",".join("?" * len(names)),
                             (*names, but))
        return rows[0][0] if rows else None

    def prompt(self, job_id: str) -> str:
        return self._execute("SELECT prompt FROM jobs WHERE job_id = ?", (job_id,))[0][0]

    def attempt_token(self, job_id: str, attempt_id: int) -> Optional[str]:
        """The signing key of an attempt."""
        rows = self._execute("SELECT auth_token FROM attempts WHERE job_id = ? AND attempt_id = ?",
                             (job_id, attempt_id))
        return rows[0][0] if rows else None

    def events(self, job_id: Optional[str] = None, after: int = 0, limit: int = -1) -> List[Event]:
        """Log lines after key `after` in the order they were written, of one job or of all."""
        if job_id:
            rows = self._execute(self._EVENT_SQL + "WHERE job_id = ? AND n > ? ORDER BY n LIMIT ?",
                                 (job_id, after, limit))
        else:
            rows = self._execute(self._EVENT_SQL + "WHERE n > ? ORDER BY n LIMIT ?", (after, limit))
        return [Event._make(row) for row in rows]

    def before_first_event(self, job_ids: Sequence[str]) -> int:
        """The key after which all that was logged about these jobs comes."""
        firsts = [self._execute("SELECT min(n) FROM events WHERE job_id = ?", (job_id,))[0][0] for job_id in job_ids]
        return min([n for n in firsts if n], default=1) - 1

    def beat(self, job_id: str) -> Optional[Beat]:
        rows = self._execute("SELECT %s FROM beats WHERE job_id = ?" % ", ".join(Beat._fields), (job_id,))
        return Beat._make(rows[0]) if rows else None

    def count_words(self, job_id: str, attempt: int) -> int:
        """How many events of an attempt there are, beats left out."""
        return int(self._execute("SELECT count(*) FROM events WHERE job_id = ? AND attempt_id = ? AND seq IS NOT NULL "
                                 "AND source <> 'beat'", (job_id, attempt))[0][0])

    def beats(self) -> Dict[str, Beat]:
        return {row[0]: Beat._make(row) for row in self._execute("SELECT %s FROM beats" % ", ".join(Beat._fields))}

    # -- the log ------------------------------------------------------------------

    def _log(self, job: Job, event: str, source: str, detail: str, data: Dict[str, Any],
             attempt: Optional[int] = None) -> None:
        """Append a line for the record only: it has no number and never travels."""
        self._execute(
            "INSERT INTO events(job_id, attempt_id, event, source, timestamp, logged_at, detail, payload) "
            "VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
            (job.job_id, attempt or job.attempt_id, event, source, utc_now(), utc_now(True), detail,
             compact_json(data)))

    def _log_once(self, job: Job, event: str, detail: str, data: Dict[str, Any], attempt: int) -> None:
        """The same for what came over the wire, which may come again and again: a broker can be made to repeat."""
        if not self._execute("SELECT 1 FROM events WHERE job_id = ? AND attempt_id = ? AND seq IS NULL AND event = ? "
                             "AND payload = ? LIMIT 1", (job.job_id, attempt, event, compact_json(data))):
            self._log(job, event, "remote", detail, data, attempt)

    def note(self, job_id: str, event: str, source: str, detail: str, data: Optional[Dict[str, Any]] = None) -> None:
        """Keep something worth knowing in a job's log, in a transaction of its own."""
        with self.write():
            self._log(self.job(job_id), event, source, detail, data or {})

    def _append_event(self, job: Job, event: str, source: str, detail: str, data: Dict[str, Any]) -> Event:
        """Append an event that takes the job's next number; it is owed if the job has a wire."""
        data = {**data, "dispatch_token": job.dispatch_token, "attempt_id": job.attempt_id}
        payload = event_payload(job.job_id, job.last_seq + 1, event, utc_now(), detail, data)
        raw = canonical(payload)
        if len(raw) + 80 > MAX_PAYLOAD_BYTES:    # 80: the signature to come
            raise MamError("the event is %d bytes, more than the %d allowed" % (len(raw), MAX_PAYLOAD_BYTES),
                           code="too_large", hint="shorten the detail or --data")
        logged_at = utc_now(True)
        self._execute(
            "INSERT INTO events(job_id, attempt_id, seq, event, source, timestamp, logged_at, detail, payload, owed) "
            "VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (job.job_id, job.attempt_id, payload["seq"], event, source, payload["timestamp"], logged_at, detail,
             raw.decode("utf-8"), 1 if job.wire else 0))
        n = self._execute("SELECT last_insert_rowid()")[0][0]
        return Event(n, job.job_id, job.attempt_id, payload["seq"], event, source, payload["timestamp"],
                     logged_at, detail, raw.decode("utf-8"), None)

    def _update_job(self, job: Job, changes: Dict[str, Any], visible: bool = True) -> None:
        """Write columns of a job; what a state message shows (`visible`) raises its revision."""
        changes = {"updated_at": utc_now(), **({"state_rev": job.state_rev + 1} if visible else {}), **changes}
        self._execute("UPDATE jobs SET %s WHERE job_id = ?" % ", ".join(name + " = ?" for name in changes),
                      (*changes.values(), job.job_id))

    # -- registration ----------------------------------------------------------------

    def register(self, record: Dict[str, Any], auth_token: Optional[str] = None,
                 dispatch_token: Optional[str] = None, keys: Optional[MakeKeys] = None) -> Job:
        """Insert a pending job from a dict of column values; MamError (`job_exists`) if the id is taken.

        `keys`: of a remote job, makes the keys of an attempt from (job id, attempt, dispatch token).
        """
        job_id = record["job_id"]
        now = utc_now()
        record = {**record, "status": "pending", "created_at": now, "updated_at": now}
        with self.write():
            if self._execute("SELECT 1 FROM jobs WHERE job_id = ?", (job_id,)):
                raise MamError("job already exists: %s" % job_id, code="job_exists",
                               hint="choose another --job-id, or `mam redispatch %s`" % job_id)
            self._execute("INSERT INTO jobs(%s) VALUES(%s)" % (", ".join(record), ", ".join("?" * len(record))),
                          tuple(record.values()))
            self._insert_attempt(job_id, record["attempt_id"], dispatch_token or random_hex(32), 0, keys, auth_token)
            job = self.job(job_id)
            self._log(job, "registered", "registry", job.title,
                      {"agent": job.agent, "agent_session": job.agent_session, "prompt_bytes":
                       len(record["prompt"].encode("utf-8"))})
        return job

    def _insert_attempt(self, job_id: str, attempt: int, token: str, seq_base: int, keys: Optional[MakeKeys],
                        auth_token: Optional[str] = None, runner: Optional[str] = None) -> None:
        """Open an attempt with its signing key: a random one, or (remote) those both hosts can derive."""
        remote_keys = None
        if keys:
            auth_token, remote_keys = keys(job_id, attempt, token)
        self._execute("INSERT INTO attempts(job_id, attempt_id, dispatch_token, auth_token, seq_base, created_at, "
                      "runner, remote_keys) VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
                      (job_id, attempt, token, auth_token or random_token(), seq_base, utc_now(), runner,
                       remote_keys and compact_json(remote_keys)))

    # -- the transition boundary ---------------------------------------------------------

    def transition(self, job_id: str, request: str, *, expected_status: Optional[str] = None,
                   expected_attempt: Optional[int] = None, expected_dispatch_token: Optional[str] = None,
                   expected_last_seq: Optional[int] = None, source: str,
                   fields: Optional[Dict[str, Any]] = None) -> Transition:
        """Change a job's status: the one place that does (DESIGN 6).

        By compare-and-swap in one transaction: what decide() allows is committed together
        with the event it causes; a refusal is an answer with its reason, and what a late
        worker brought stays in the log. `fields`: status (for set, settled), detail,
        feedback, data, reason (for settled, overruled), force, prompt, attempt_id, keys (for
        redispatch), heartbeat_sec, watch (arm a beat).
        """
        fields = fields or {}
        expected = Expected(expected_status, expected_attempt, expected_dispatch_token, expected_last_seq)
        with self.write():
            job = self.job(job_id)
            decision = decide(job, request, expected, fields.get("status"), bool(fields.get("force")))
            event = None
            if decision.verdict == "commit" and request == "redispatch":
                self._redispatch(job, source, fields)
            elif decision.verdict == "commit":
                event = self._commit_change(job, request, decision, source, fields)
            elif decision.late:
                self._log(job, "late", source, fields.get("detail") or "",
                          {"source_event": request, "reason": decision.reason, "data": fields.get("data") or {},
                           "feedback": fields.get("feedback")}, expected_attempt)
            elif decision.verdict == "refused":
                self._log(job, "refused", source, decision.reason, {"request": request})
            job = self.job(job_id)
        return Transition(decision.verdict == "commit", decision.verdict == "idempotent", decision.reason, job, event)

    def _commit_change(self, job: Job, request: str, decision: Decision, source: str,
                       fields: Dict[str, Any]) -> Optional[Event]:
        """Carry out an allowed request: columns, attempt, event and log line, inside a transaction."""
        rule, now, moment = REQUESTS[request], utc_now(), instant()
        ends_job = decision.status in TERMINAL_STATUSES
        reason = fields.get("reason") or rule.reason if ends_job else None
        changes: Dict[str, Any] = {"status": decision.status, "phase": decision.phase, "reason": reason,
                                   "transition_seq": job.transition_seq + 1}
        if decision.status == "running" and not (job.claimed_mono or job.delivered_mono):
            changes.update(claimed_at=now, claimed_mono=moment)     # by pick, by a first word, by an operator
        event = None
        name = self._event_of(job, request, decision.status)
        if name:
            data = {**(fields.get("data") or {})}
            if fields.get("feedback"):
                data["feedback"] = fields["feedback"]
            if decision.phase:
                data["settles"] = False
            if rule.by != "worker":
                data.update(reason=reason or "settled", status=decision.status)
            detail = fields.get("detail") or default_detail(request, job.job_id, reason)
            event = self._append_event(job, name, source, detail, data)
            changes.update(last_seq=event.seq, last_event=name, last_event_at=now, last_event_mono=moment,
                           detail=detail)
            if job.started_at is None and rule.by == "worker":
                changes["started_at"] = now
        elif ends_job:                       # of a remote job: its runner answers with an event of its own
            changes["detail"] = fields.get("detail") or default_detail(request, job.job_id, reason)
        if ends_job:
            changes["finished_at"] = now
        if ends_job and rule.by != "worker":
            self._recall(job, decision.status, reason or "settled")
        if ends_job or decision.phase:
            self._end_attempt(job, request if rule.by == "worker" else decision.status)
        elif fields.get("heartbeat_sec"):
            self._arm_beat(job, fields["heartbeat_sec"], fields.get("watch"))
        if reason == "superseded":      # the topics, and what they retain, are another attempt's by now
            changes["state_sent"] = job.state_rev + 1
        self._update_job(job, changes)
        if decision.status != job.status or decision.phase != job.phase:
            self._log(job, "status_changed", source, decision.status + (" (%s)" % (decision.phase or reason)
                                                                       if decision.phase or reason else ""),
                      {"from": job.status, "to": decision.status, "by": source, "phase": decision.phase})
        return event

    @staticmethod
    def _event_of(job: Job, request: str, status: str) -> Optional[str]:
        """The event a committed request causes; a remote job's events are its runner's alone."""
        if REQUESTS[request].by == "worker":
            return request
        if status in TERMINAL_STATUSES and job.transport != "remote":
            return "completed" if status == "completed" else "error"
        return None

    def _end_attempt(self, job: Job, outcome: str) -> None:
        self._execute("UPDATE attempts SET outcome = coalesce(outcome, ?), ended_at = coalesce(ended_at, ?) "
                      "WHERE job_id = ? AND attempt_id = ?", (outcome, utc_now(), job.job_id, job.attempt_id))
        self._execute("DELETE FROM beats WHERE job_id = ?", (job.job_id,))

    def _recall(self, job: Job, status: str, reason: str) -> None:
        """Owe the runner of a remote attempt word of its end, and take its dispatch off the broker."""
        if job.dispatch and job.outcome is None:
            control = {"status": status, "reason": reason, "issued_at": utc_now(), "moment": instant()}
            self._execute("UPDATE attempts SET control = ?, control_mail = ? WHERE job_id = ? AND attempt_id = ?",
                          (compact_json(control), OWED, job.job_id, job.attempt_id))
        self._retire_dispatch(job)

    def _retire_dispatch(self, job: Job) -> None:
        self._execute("UPDATE attempts SET dispatch_mail = ? WHERE job_id = ? AND attempt_id = ? "
                      "AND dispatch_mail IN (?, ?)", (STALE, job.job_id, job.attempt_id, OWED, KEPT))

    def _redispatch(self, job: Job, source: str, fields: Dict[str, Any]) -> None:
        """Open the next attempt: new tokens, no beat, and nothing more of the old one travels."""
        self._recall(job, "cancelled", "superseded")
        # Whoever had an attempt before is told, also if it had ended: else it may one day retain its old end again.
        self._execute("UPDATE attempts SET control = ?, control_mail = ? WHERE job_id = ? AND (control_mail IN (?, ?) "
                      "OR attempt_id = ? AND dispatch IS NOT NULL)",
                      (_SUPERSEDED % (utc_now(), instant()), OWED, job.job_id, OWED, KEPT, job.attempt_id))
        self._end_attempt(job, "superseded")
        attempt = max(job.attempt_id + 1, int(fields.get("attempt_id") or 0))
        self._insert_attempt(job.job_id, attempt, random_hex(32), job.last_seq, fields.get("keys"))
        self._execute("UPDATE events SET owed = 0 WHERE job_id = ? AND owed = 1", (job.job_id,))
        changes = {**_ATTEMPT_BEGINS, "attempt_id": attempt, "transition_seq": job.transition_seq + 1,
                   "supervisor": fields.get("supervisor")}
        if job.transport != "remote":       # whose topics are its runner's
            changes["clear_owed"] = 1
        if fields.get("prompt") is not None:
            changes.update(prompt=fields["prompt"], title=title_of(fields["prompt"]))
        self._update_job(job, changes)
        self._log(job, "status_changed", source, "pending (attempt %d)" % attempt,
                  {"from": job.status, "to": "pending", "by": source, "attempt_id": attempt}, attempt)

    def edit(self, job_id: str, source: str, changes: Dict[str, Any]) -> None:
        """Change descriptive columns (role, session, prompt, iteration) that are no transition."""
        with self.write():
            job = self.job(job_id)
            self._update_job(job, changes)
            self._log(job, "updated", source, ", ".join(sorted(set(changes) - {"title"})), {})

    def pick(self, session: str) -> Optional[Job]:
        """Claim the oldest pending job of a session, by order of registration; None if there is none.

        Selection and claim are separate transactions; losing the race is not an
        end, the next oldest is tried.
        """
        while True:
            rows = self._execute("SELECT job_id FROM jobs WHERE status = 'pending' AND agent_session = ? "
                                 "ORDER BY n LIMIT 1", (session,))
            if not rows:
                return None
            answer = self.transition(rows[0][0], "claim", expected_status="pending", source=session)
            if answer.committed:
                return answer.job

    # -- delivery, supervision -------------------------------------------------------------

    def move_delivery(self, job_id: str, attempt: int, before: str, after: str) -> bool:
        """Compare-and-swap of an open attempt's delivery (none, sending, sent). False: not ours to deliver."""
        with self.write():
            job = self.job(job_id)
            if (job.attempt_id, job.delivery) != (attempt, before) or job.outcome is not None \
                    or job.status not in OPEN_STATUSES:
                return False
            # From `sending` on the clocks run, so that a deliverer's death leaves no job without them.
            changes: Dict[str, Any] = {"delivery": after, "delivered_at": utc_now(), "delivered_mono": instant()}
            self._update_job(job, changes, visible=False)
            self._log(job, "delivery", "delegate_wrapper", after, {})
            return True

    def claim_session(self, job: Job, names: Sequence[str] = ()) -> Tuple[bool, Optional[str]]:
        """Begin a delivery into a pane: (ours to deliver, the other open job that has the pane).

        `names`: all by which the session goes.

        By compare-and-swap, for a prompt is never injected twice.
        """
        with self.write():
            now = self.job(job.job_id)
            if (now.attempt_id, now.delivery) != (job.attempt_id, "none") or now.outcome is not None \
                    or now.status not in OPEN_STATUSES:
                return False, None
            other = self.open_in_session([now.agent_session, *names], now.job_id)
            if other is None:
                self._execute("UPDATE sessions SET job_id = ? WHERE session = ?", (now.job_id, now.agent_session))
                self._update_job(now, {"delivery": "sending", "delivered_at": utc_now(),
                                       "delivered_mono": instant()}, visible=False)
                self._log(job, "delivery", "delegate_wrapper", "sending", {})
            return other is None, other

    # -- sessions ---------------------------------------------------------------------------

    _SESSION_SQL = "SELECT %s FROM sessions " % ", ".join(SessionRow._fields)

    def session(self, session: str) -> Optional[SessionRow]:
        """A session that mam has started, ended ones included."""
        rows = self._execute(self._SESSION_SQL + "WHERE session = ?", (session,))
        return SessionRow._make(rows[0]) if rows else None

    def sessions(self) -> List[SessionRow]:
        return [SessionRow._make(row) for row in self._execute(self._SESSION_SQL + "ORDER BY created_at, session")]

    def sessions_of_pane(self, pane: str, socket: str) -> List[str]:
        """The names of running sessions in a pane."""
        return [row[0] for row in self._execute("SELECT session FROM sessions WHERE status = 'running' AND pane = ? "
                                                "AND socket = ?", (pane, socket))]

    def save_session(self, session: str, fields: Dict[str, Any], anew: bool = False) -> None:
        """Write columns of a session; `anew`: as a new one, in the place of one of this name that has ended."""
        now = utc_now()
        with self.write():
            if anew:
                row = {**fields, "session": session, "created_at": now, "updated_at": now}
                self._execute("INSERT OR REPLACE INTO sessions(%s) VALUES(%s)" % (
                    ", ".join(row), ", ".join("?" * len(row))), tuple(row.values()))
            else:
                self._execute("UPDATE sessions SET updated_at = ?, %s WHERE session = ?" % ", ".join(
                    name + " = ?" for name in fields), (now, *fields.values(), session))

    def adopt_run(self, job_id: str, attempt: int, run: Dict[str, Any]) -> bool:
        """Become the one process that runs an attempt's command. False: somebody is, or it is over."""
        with self.write():
            job = self.job(job_id)
            if job.attempt_id != attempt or job.delivery != "sending" or job.run or job.outcome is not None:
                return False
            self._write_run(job, run)
            self._log(job, "delivery", "_run", "adopted", {})      # the daemon sees jobs anew by their log
            return True

    def save_run(self, job: Job, run: Dict[str, Any]) -> None:
        """Record the process identities of an attempt's command before it begins."""
        with self.write():
            self._write_run(job, run)

    def _write_run(self, job: Job, run: Dict[str, Any]) -> None:
        self._execute("UPDATE attempts SET run = ? WHERE job_id = ? AND attempt_id = ?",
                      (compact_json(run), job.job_id, job.attempt_id))

    def close_run(self, job_id: str, attempt: int, processes: str) -> None:
        """Note that a command, or a check, is over that nobody saw exit; known by its record, not to be another."""
        with self.write():
            self._execute("UPDATE attempts SET run_ended_at = ? WHERE job_id = ? AND attempt_id = ? "
                          "AND run = ? AND run_ended_at IS NULL", (utc_now(), job_id, attempt, processes))
            self._execute("UPDATE attempts SET checking = NULL WHERE job_id = ? AND attempt_id = ? AND checking = ?",
                          (job_id, attempt, processes))
            self._log(self.job(job_id), "ended_command", "_supervise", "the command was ended", {}, attempt)

    def begin_check(self, job: Job, processes: Dict[str, Any]) -> bool:
        """Record who checks an attempt before the check begins. False: its result is no longer wanted."""
        with self.write():
            now = self.job(job.job_id)
            if now.attempt_id != job.attempt_id or now.phase != "validating":
                return False
            self._execute("UPDATE attempts SET checking = ? WHERE job_id = ? AND attempt_id = ?",
                          (compact_json(processes), job.job_id, job.attempt_id))
            return True

    def end_check(self, job: Job) -> None:
        """Note that nothing of an attempt's check runs any more."""
        with self.write():
            self._execute("UPDATE attempts SET checking = NULL WHERE job_id = ? AND attempt_id = ?",
                          (job.job_id, job.attempt_id))

    def end_run(self, job: Job, exit_status: Optional[int]) -> None:
        """Note that an attempt's command is over, with its exit status (negative: the signal)."""
        with self.write():
            self._execute("UPDATE attempts SET run_ended_at = ?, exit_status = ? WHERE job_id = ? AND attempt_id = ?",
                          (utc_now(), exit_status, job.job_id, job.attempt_id))
            self._log(job, "exited", "_run", "exit status %s" % exit_status, {"exit_status": exit_status},
                      job.attempt_id)

    def drop_supervisor(self, job_id: str, keeper: str) -> None:
        """Note that nobody carries a job any more, unless somebody else has undertaken it meanwhile."""
        with self.write():
            self._execute("UPDATE jobs SET supervisor = NULL WHERE job_id = ? AND supervisor = ?", (job_id, keeper))

    def set_supervisor(self, job_id: str, keeper: str) -> None:
        """Note who carries an open job."""
        with self.write():
            self._execute("UPDATE jobs SET supervisor = ? WHERE job_id = ?", (keeper, job_id))

    # -- beats ----------------------------------------------------------------------------

    def _arm_beat(self, job: Job, period_s: float, watch: Optional[Dict[str, Any]]) -> None:
        moment = instant()
        self._execute("INSERT OR REPLACE INTO beats VALUES(?, ?, ?, ?, ?, ?, ?)",
                      (job.job_id, job.attempt_id, period_s, compact_json(watch) if watch else None,
                       moment, utc_now(), moment))

    _THIS_BEAT = " WHERE job_id = ? AND attempt_id = ? AND watch IS ? AND armed_mono = ?"

    def touch_beat(self, beat: Beat) -> bool:
        """A sign of life. False: the attempt is over, or the beat was armed anew."""
        with self.write(durable=False):
            self._execute("UPDATE beats SET touched_at = ?, touched_mono = ?" + self._THIS_BEAT,
                          (utc_now(), instant(), *beat[:2], beat.watch, beat.armed_mono))
            return bool(self._execute("SELECT changes()")[0][0])

    def drop_beat(self, beat: Beat, source: str, why: str) -> None:
        """Stop a beat and say so; one that was armed anew meanwhile goes on."""
        with self.write():
            self._execute("DELETE FROM beats" + self._THIS_BEAT, (*beat[:2], beat.watch, beat.armed_mono))
            if self._execute("SELECT changes()")[0][0]:
                self._log(self.job(beat.job_id), "beat_stopped", source, why, {}, beat.attempt_id)

    # -- the outbox ------------------------------------------------------------------------

    def owed_events(self, job_id: str, limit: int, after: int = 0) -> List[Event]:
        """What was recorded and not yet acknowledged by the broker, in order."""
        rows = self._execute(self._EVENT_SQL + "WHERE job_id = ? AND owed = 1 AND n > ? ORDER BY n LIMIT ?",
                             (job_id, after, limit))
        return [Event._make(row) for row in rows]

    def owes(self, job_id: str) -> bool:
        """Whether anything of this job is owed to its broker: events, a state, a clearing."""
        return bool(self._execute(
            "SELECT 1 FROM events WHERE job_id = ? AND owed = 1 UNION ALL SELECT 1 FROM jobs "
            "WHERE job_id = ? AND wire IS NOT NULL AND transport <> 'remote' AND last_seq > 0 "
            "AND (state_sent < state_rev OR clear_owed) "
            "LIMIT 1", (job_id, job_id)))

    def is_owed(self, n: int) -> bool:
        return bool(self._execute("SELECT 1 FROM events WHERE n = ? AND owed = 1", (n,)))

    def count_owed(self) -> Tuple[int, int]:
        """(events owed, jobs whose state is owed)."""
        return (self._execute("SELECT count(*) FROM events WHERE owed = 1")[0][0],
                self._execute("SELECT count(*) FROM jobs WHERE wire IS NOT NULL AND transport <> 'remote' "
                              "AND (state_sent < state_rev OR clear_owed) AND last_seq > 0")[0][0])

    def jobs_owing(self, limit: int) -> List[str]:
        return [row[0] for row in self._execute(
            "SELECT DISTINCT job_id FROM events WHERE owed = 1 UNION SELECT job_id FROM jobs "
            "WHERE wire IS NOT NULL AND (state_sent < state_rev OR clear_owed) AND last_seq > 0 "
            "AND transport <> 'remote' UNION SELECT job_id FROM attempts WHERE (dispatch_mail OR control_mail) "
            "AND (dispatch_mail IN (1, 3) OR control_mail IN (1, 3)) LIMIT ?", (limit,))]

    def jobs_owing_each_broker(self) -> List[Job]:
        """A job that owes its state (as whoever owes events does) for each broker that anything is owed to."""
        return self._jobs("WHERE j.n IN (SELECT min(n) FROM jobs WHERE wire IS NOT NULL AND transport <> 'remote' "
                          "AND (state_sent < state_rev OR clear_owed) AND last_seq > 0 GROUP BY wire, broker)")

    def mark_sent(self, events: Sequence[Event] = (), states: Sequence[Tuple[str, int]] = (),
                  cleared: Sequence[str] = ()) -> None:
        """Note what a broker acknowledged. Losing this note sends it again, so it need not be durable.

        An acknowledgement can come late: a state older than one that somebody else has sent since,
        or the last event of an attempt that is over, may now be what the broker retains. Both
        are owed again as they should be.
        """
        with self.write(durable=False):
            now = utc_now()
            for event in events:
                self._execute("UPDATE events SET owed = 0, delivered_at = ? WHERE n = ?", (now, event.n))
                if event.event in TERMINAL_EVENTS:
                    self._execute("UPDATE jobs SET clear_owed = 1 WHERE job_id = ? AND attempt_id <> ?",
                                  (event.job_id, event.attempt_id))
            for job_id, revision in states:
                self._execute("UPDATE jobs SET state_sent = ? WHERE job_id = ?", (revision, job_id))
            for job_id in cleared:
                self._execute("UPDATE jobs SET clear_owed = 0 WHERE job_id = ?", (job_id,))

    def unsend(self, job_id: str) -> None:
        """Owe the state again: an older one may still reach the broker over a connection that was lost."""
        with self.write(durable=False):
            self._execute("UPDATE jobs SET state_rev = state_rev + 1 WHERE job_id = ?", (job_id,))

    def sent_states(self, wire: str, since: str) -> List[Job]:
        """The jobs whose state was sent to a broker last, and first, of those it should retain (open ones, and those
        ended since): what it has kept, with a memory."""
        where = ("WHERE j.wire = ? AND j.state_sent = j.state_rev AND j.last_seq > 0 AND j.reason IS NOT 'superseded' "
                 "AND j.transport <> 'remote' AND (j.finished_at IS NULL OR j.finished_at >= ?) ORDER BY ")
        return [job for order in ("j.updated_at DESC, j.n DESC", "j.updated_at, j.n")
                for job in self._jobs(where + order + " LIMIT 1", (wire, since))]

    def owe_retained_again(self, since: str) -> None:
        """Owe what a broker should retain: states of open jobs and of those ended since, and their last events."""
        with self.write():
            where = "wire IS NOT NULL AND last_seq > 0 AND (finished_at IS NULL OR finished_at >= ?) " \
                    "AND reason IS NOT 'superseded'"
            self._execute("UPDATE events SET owed = 1 WHERE n IN (SELECT max(e.n) FROM events e JOIN jobs j "
                          "ON j.job_id = e.job_id AND j.attempt_id = e.attempt_id WHERE e.seq IS NOT NULL "
                          "AND j.finished_at >= ? AND j.wire IS NOT NULL AND j.transport <> 'remote' "
                          "AND j.reason IS NOT 'superseded' GROUP BY e.job_id)", (since,))
            self._execute("UPDATE jobs SET state_rev = state_rev + 1 WHERE transport <> 'remote' AND " + where,
                          (since,))

    # -- senders: whose connections may still hold bytes -------------------------------------

    def add_sender(self, client_id: str, broker: str, process: Any) -> None:
        with self.write(durable=False):
            self._execute("INSERT OR REPLACE INTO senders VALUES(?, ?, ?)", (client_id, broker, compact_json(process)))

    def claim_sender(self, client_id: str, before: str, process: Any) -> bool:
        """Undertake to end a dead sender's session, by compare-and-swap: of two that see it dead, one does."""
        with self.write(durable=False):
            self._execute("UPDATE senders SET process = ? WHERE client_id = ? AND process = ?",
                          (compact_json(process), client_id, before))
            return bool(self._execute("SELECT changes()")[0][0])

    def abandon_sender(self, client_id: str) -> None:
        """Note that a connection was given up with something on its way: nobody's now, to be taken over."""
        with self.write(durable=False):
            self._execute("UPDATE senders SET process = 'null' WHERE client_id = ?", (client_id,))

    def drop_sender(self, client_id: str) -> None:
        with self.write(durable=False):
            self._execute("DELETE FROM senders WHERE client_id = ?", (client_id,))

    def senders(self, broker: str) -> List[Tuple[str, str]]:
        """(client id, process) of every connection to a broker that was opened and not closed in order."""
        rows = self._execute("SELECT client_id, process FROM senders WHERE broker = ?", (broker,))
        return [(row[0], row[1]) for row in rows]

    # -- the daemon's own notes --------------------------------------------------------------

    def meta(self, key: str) -> Optional[str]:
        rows = self._execute("SELECT value FROM meta WHERE key = ?", (key,))
        return rows[0][0] if rows else None

    def set_meta(self, key: str, value: Optional[str]) -> None:
        with self.write(durable=False):
            if value is None:
                self._execute("DELETE FROM meta WHERE key = ?", (key,))
            else:
                self._execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (key, value))

    def last_key(self) -> int:
        """The key of the newest line of the log."""
        return self._execute("SELECT coalesce(max(n), 0) FROM events")[0][0]

    def changed_jobs(self, after: int) -> Tuple[int, List[str]]:
        """(the last key of the log, the jobs with lines after key `after`)."""
        rows = self._execute("SELECT job_id, max(n) FROM events WHERE n > ? GROUP BY job_id", (after,))
        return max([row[1] for row in rows], default=after), [row[0] for row in rows]

    def has_work(self, wired: bool, me: str = "") -> bool:
        """Whether a daemon is needed: an open job that somebody has in hand, a beat, or (`wired`: where a
        broker may take it) a debt, or a connection other than those of process `me` that was not closed."""
        if self._execute("SELECT 1 FROM beats UNION ALL SELECT 1 FROM attempts WHERE run IS NOT NULL "
                         "AND run_ended_at IS NULL UNION ALL SELECT 1 FROM attempts WHERE checking IS NOT NULL "
                         "UNION ALL SELECT 1 FROM jobs WHERE status IN ('pending', 'running') "
                         "AND (delivery <> 'none' OR claimed_at IS NOT NULL "
                         "OR supervisor IS NOT NULL OR transport = 'remote') LIMIT 1"):
            return True
        return wired and bool(self.jobs_owing(1) or self._execute(
            "SELECT 1 FROM senders WHERE process <> ? UNION ALL SELECT 1 FROM attempts "
            "WHERE (dispatch_mail OR control_mail) AND control_mail = 2 LIMIT 1", (me,)))

    def sender_addresses(self) -> List[str]:
        """The brokers to which connections were opened and not closed in order."""
        return [row[0] for row in self._execute("SELECT DISTINCT broker FROM senders")]

    def beat_for(self, due: Sequence[Beat], on_wire: Callable[[str], bool]) -> None:
        """Give signs of life for living workers, in one transaction that refuses ended attempts.

        With a wire that is up and owes nothing a beat is also a progress event. It replaces its
        delivered predecessor; `data.since` names the last event before the beats, so the numbers
        that are gone with it are no hole.
        """
        with self.write():
            for beat in due:
                self._execute("UPDATE beats SET touched_at = ?, touched_mono = ? WHERE job_id = ? AND attempt_id = ?",
                              (utc_now(), instant(), beat.job_id, beat.attempt_id))
                job = self.job(beat.job_id)
                if job.wire and job.outcome is None and job.attempt_id == beat.attempt_id \
                        and job.status == "running" and on_wire(job.job_id):
                    self._beat_event(job)

    def _beat_event(self, job: Job) -> None:
        since = self._execute("SELECT coalesce(max(seq), 0) FROM events WHERE job_id = ? AND seq IS NOT NULL "
                              "AND source <> 'beat'", (job.job_id,))[0][0]
        event = self._append_event(job, "progress", "beat", "heartbeat", {"since": since})
        self._execute("DELETE FROM events WHERE job_id = ? AND attempt_id = ? AND source = 'beat' AND owed = 0 "
                      "AND seq > ? AND n < ?", (job.job_id, job.attempt_id, since, event.n))
        self._update_job(job, {"last_seq": event.seq})

    # -- remote jobs: what their runners are sent (DESIGN 13) ----------------------------------

    def assign_runner(self, job: Job, runner: str, dispatch: Dict[str, str]) -> bool:
        """Give an attempt to one runner, for good: its dispatch is owed. False: it has one, or is over."""
        with self.write():
            now = self.job(job.job_id)
            if (now.attempt_id, now.delivery, now.runner, now.outcome) != (job.attempt_id, "sending", None, None):
                return False
            self._execute("UPDATE attempts SET runner = ?, dispatch = ?, dispatch_mail = ? WHERE job_id = ? "
                          "AND attempt_id = ?", (runner, compact_json(dispatch), OWED, job.job_id, job.attempt_id))
            self._log(job, "dispatch", "daemon", "to runner %s" % runner, {"runner": runner, **dispatch})
            return True

    def mails(self, job_id: str) -> List[Mail]:
        """The attempts of a job that owe their runner something, or have something kept for it, oldest first."""
        return [Mail._make(row) for row in self._execute(
            "SELECT %s FROM attempts WHERE job_id = ? AND (dispatch_mail OR control_mail) ORDER BY attempt_id" %
            ", ".join(Mail._fields), (job_id,))]

    def mark_mailed(self, job_id: str, attempt: int, what: str) -> None:
        """Note that a broker has acknowledged a mail, unless it was decided anew meanwhile."""
        column = what.rpartition("_")[2] + "_mail"
        before, after = (OWED, KEPT) if what in ("dispatch", "control") else (STALE, NOTHING)
        with self.write(durable=False):
            self._execute("UPDATE attempts SET %s = ? WHERE job_id = ? AND attempt_id = ? AND %s = ?" % (
                column, column), (after, job_id, attempt, before))
            if what == "clear_control":      # whose topic was an older one's too, which is not answered yet
                self._execute("UPDATE attempts SET control_mail = ? WHERE job_id = ? AND attempt_id < ? "
                              "AND control_mail = ?", (OWED, job_id, attempt, KEPT))

    def owe_mails_again(self) -> None:
        """Owe what runners have not answered yet: a broker may have lost it. The same bytes, so it does no harm."""
        if self._execute("SELECT 1 FROM attempts WHERE (dispatch_mail OR control_mail) AND (dispatch_mail = ? "
                         "OR control_mail = ?) LIMIT 1", (KEPT, KEPT)):
            with self.write(durable=False):
                for column in ("dispatch_mail", "control_mail"):
                    self._execute("UPDATE attempts SET %s = ? WHERE (dispatch_mail OR control_mail) AND %s = ?" % (
                        column, column), (OWED, KEPT))

    def forget_unanswered(self, seconds: float) -> None:
        """Take what was told to runners that never answered off the broker, once it is this old."""
        import json
        for job_id, attempt, control in self._execute(
                "SELECT job_id, attempt_id, control FROM attempts WHERE (dispatch_mail OR control_mail) "
                "AND control_mail = ?", (KEPT,)):
            said = json.loads(control)
            if (elapsed_s(said.get("moment"), said["issued_at"]) or 0.0) > seconds:
                with self.write():
                    self._execute("UPDATE attempts SET control_mail = ? WHERE job_id = ? AND attempt_id = ? "
                                  "AND control_mail = ?", (STALE, job_id, attempt, KEPT))

    def answered(self, job_id: str, attempt: int) -> bool:
        """Whether the runner of an attempt that was ended here knows of it, or need not."""
        rows = self._execute("SELECT control_mail FROM attempts WHERE job_id = ? AND attempt_id = ?", (job_id, attempt))
        return not rows or rows[0][0] in (NOTHING, STALE)

    def _take_answer(self, job_id: str, attempt: int, status: Any) -> None:
        """What a runner says of an ended attempt: once it agrees, nothing more need be kept for it."""
        import json
        for (control,) in self._execute("SELECT control FROM attempts WHERE job_id = ? AND attempt_id = ? "
                                        "AND control_mail IN (?, ?)", (job_id, attempt, OWED, KEPT)):
            if json.loads(control)["status"] == status:
                self._execute("UPDATE attempts SET control_mail = ? WHERE job_id = ? AND attempt_id = ?",
                              (STALE, job_id, attempt))
                self._log(self.job(job_id), "answered", "remote", "the runner has ended the attempt", {}, attempt)

    def count_unanswered(self) -> int:
        """How many attempts that were ended here have not been answered by their runner."""
        return int(self._execute("SELECT count(*) FROM attempts WHERE (dispatch_mail OR control_mail) "
                                 "AND control_mail IN (1, 2)")[0][0])

    def _take_as_answer(self, job: Job) -> None:
        """A runner that has begun an attempt has ended those it had before, and need not be told any more."""
        self._execute("UPDATE attempts SET control_mail = ? WHERE job_id = ? AND attempt_id < ? AND runner = ? "
                      "AND control_mail IN (?, ?)", (STALE, job.job_id, job.attempt_id, job.runner, OWED, KEPT))

    def runner_loads(self) -> Dict[str, int]:
        """How many attempts each runner may be at work on: those it was given, and those of which it has not yet
        answered that they are over."""
        return dict(self._execute(
            "SELECT runner, count(*) FROM (SELECT a.runner FROM attempts a JOIN jobs j ON j.job_id = a.job_id "
            "AND j.attempt_id = a.attempt_id WHERE j.status IN ('pending', 'running') AND a.outcome IS NULL "
            "UNION ALL SELECT runner FROM attempts WHERE (dispatch_mail OR control_mail) AND control_mail IN (1, 2)) "
            "WHERE runner IS NOT NULL GROUP BY runner"))

    # -- remote jobs: what a runner keeps (DESIGN 13) ------------------------------------------

    def own_id(self, key: str) -> str:
        """An id that is made once and stays with this registry."""
        with self.write():
            self._execute("INSERT OR IGNORE INTO meta VALUES(?, ?)", (key, random_hex(16)))
        return self.meta(key) or ""

    def adopt(self, record: Dict[str, Any], attempt: int, token: str, seq_base: int, keys: MakeKeys,
              runner: str) -> str:
        """Take in an attempt that another host has opened, under its identity; at most once.

        Answers adopted; known (the same attempt again); stale (a newer one is known); conflict (the
        same attempt with another token).
        """
        job_id = record["job_id"]
        with self.write():
            known = self._execute("SELECT max(attempt_id) FROM attempts WHERE job_id = ?", (job_id,))[0][0]
            if known is not None and known >= attempt:
                row = self._execute("SELECT dispatch_token FROM attempts WHERE job_id = ? AND attempt_id = ?",
                                    (job_id, attempt))
                return "stale" if not row else "known" if row[0][0] == token else "conflict"
            now = utc_now()
            if known is None:
                columns = {**record, "attempt_id": attempt, "last_seq": seq_base, "status": "pending",
                           "created_at": now, "updated_at": now, "clear_owed": int(attempt > 1)}
                self._execute("INSERT INTO jobs(%s) VALUES(%s)" % (", ".join(columns), ", ".join("?" * len(columns))),
                              tuple(columns.values()))
            else:
                before = self.job(job_id)          # what its worker said and is still owed goes out all the same
                self._end_attempt(before, "superseded")
                self._update_job(before, {**_ATTEMPT_BEGINS, **record, "attempt_id": attempt, "last_seq": seq_base,
                                          "transition_seq": before.transition_seq + 1, "clear_owed": 1})
            self._insert_attempt(job_id, attempt, token, seq_base, keys, runner=runner)
            self._log(self.job(job_id), "adopted", "runner", record["title"], {"seq_base": seq_base})
        return "adopted"

    def adopted_jobs(self) -> List[Job]:
        """The open jobs of a runner, in the order in which it took them."""
        return self._jobs("WHERE j.status IN ('pending', 'running') AND a.runner IS NOT NULL ORDER BY j.n")

    def arm_beat(self, job: Job, watch: Any) -> None:
        """Have an attempt seen alive as long as another process than before lives; nothing for an ended one."""
        with self.write():
            now = self.job(job.job_id)
            if now.attempt_id == job.attempt_id and now.outcome is None:
                self._arm_beat(now, now.heartbeat_sec, watch)

    def owe_from(self, job_id: str, attempt: int, seq: int) -> int:
        """Owe the events of the current attempt from a number on again: the same bytes. How many there are."""
        with self.write():
            self._execute("UPDATE events SET owed = 1 WHERE job_id = ? AND attempt_id = ? AND seq >= ? AND EXISTS "
                          "(SELECT 1 FROM jobs WHERE job_id = ? AND attempt_id = ? AND wire IS NOT NULL)",
                          (job_id, attempt, seq, job_id, attempt))
            found = int(self._execute("SELECT changes()")[0][0])
            self._execute("UPDATE jobs SET state_rev = state_rev + 1 WHERE job_id = ? AND attempt_id = ? "
                          "AND reason IS NOT 'superseded'", (job_id, attempt))
            return found

    def owe_answer(self, job_id: str, attempt: int) -> None:
        """Owe the last event of an attempt and the state again: whoever asked has not heard them."""
        with self.write():
            self._execute("UPDATE events SET owed = 1 WHERE n = (SELECT max(n) FROM events WHERE job_id = ? "
                          "AND attempt_id = ? AND seq IS NOT NULL)", (job_id, attempt))
            self._execute("UPDATE jobs SET state_rev = state_rev + 1 WHERE job_id = ? AND reason IS NOT 'superseded'",
                          (job_id,))

    # -- the inbox ----------------------------------------------------------------------------

    def heard_jobs(self) -> List[Job]:
        """The remote jobs whose runners are listened to: open ones, and those whose runner has not yet answered
        that an attempt is over."""
        return self._jobs("WHERE j.transport = 'remote' AND j.wire IS NOT NULL AND (j.status IN ('pending', 'running') "
                          "OR j.job_id IN (SELECT job_id FROM attempts WHERE (dispatch_mail OR control_mail) "
                          "AND control_mail IN (1, 2))) ORDER BY j.n")

    def attempt_keys(self, job_id: str) -> Dict[int, Tuple[str, str]]:
        """(dispatch token, signing key) of every attempt of a job."""
        return {row[0]: (row[1], row[2]) for row in self._execute(
            "SELECT attempt_id, dispatch_token, auth_token FROM attempts WHERE job_id = ?", (job_id,))}

    def mark_subscribed(self, job_ids: Optional[Sequence[str]], moment: Optional[str]) -> None:
        """Note since when jobs' topics are subscribed; None for all that are, None for no longer."""
        with self.write(durable=False):
            if job_ids is None:
                self._execute("UPDATE jobs SET subscribed_mono = ? WHERE subscribed_mono IS NOT NULL", (moment,))
            for job_id in job_ids or ():
                self._execute("UPDATE jobs SET subscribed_mono = ? WHERE job_id = ?", (moment, job_id))

    def take_in(self, messages: Sequence[Tuple[Dict[str, Any], str]]) -> List[str]:
        """Store verified events of remote jobs, (payload, unsigned text), with the transitions they cause.

        All in one transaction. Answers a word for each: accepted, filled (a hole), duplicate, replayed, late, conflict.
        """
        open_: Dict[str, _Arriving] = {}
        with self.write():
            words = [self._take_in_event(payload, text, open_) for payload, text in messages]
            for arriving in open_.values():
                self._write_arrived(arriving)
        return words

    def _take_in_event(self, payload: Dict[str, Any], text: str, open_: Dict[str, _Arriving]) -> str:
        arriving = open_.get(payload["job_id"])
        if arriving is None:
            arriving = open_[payload["job_id"]] = self._arriving(payload["job_id"])
        job, data, seq = arriving.job, payload["data"], payload["seq"]
        attempt = data["attempt_id"]
        if attempt != job.attempt_id or seq <= arriving.top:       # else nothing can be stored under its number
            self._write_arrived(arriving)
            word = self._known(job, payload, text)
            if word:
                return word
        identity = intent_identity(data)
        if identity and self._execute("SELECT 1 FROM intents WHERE job_id = ? AND identity = ?",
                                      (job.job_id, identity)):
            return "replayed"
        decision = decide_remote(job, payload)
        fills = attempt == job.attempt_id and seq < arriving.top
        if decision.verdict != "commit" and not fills:
            self._write_arrived(arriving)
            self._log_once(job, "late", payload["detail"], {
                "source_event": payload["event"], "reason": decision.reason, "data": data, "seq": seq}, attempt)
            if payload["event"] in TERMINAL_EVENTS:
                self._take_answer(job.job_id, attempt, data.get("status"))
            return "late"
        if identity:
            self._execute("INSERT OR IGNORE INTO intents VALUES(?, ?)", (job.job_id, identity))
        arriving.rows.append(_remote_row(payload, text, "remote"))
        if fills and payload["event"] not in TERMINAL_EVENTS:
            if data.get("spawned") is True:
                self._execute("UPDATE jobs SET claimed_at = ?, claimed_mono = ? WHERE job_id = ? "
                              "AND claimed_mono IS NULL", (utc_now(), instant(), job.job_id))
            return "filled"
        arriving.top = max(arriving.top, seq)
        ends = payload["event"] in TERMINAL_EVENTS and data.get("settles") is not False
        if decision.verdict == "commit" and not ends and (decision.status, decision.phase) == (job.status, job.phase):
            arriving.news.append(payload)                # the record is written once for the whole batch
        elif decision.verdict == "commit":
            self._write_arrived(arriving)
            self._apply_remote(arriving.job, payload, decision)
            del open_[job.job_id]
        return "accepted"

    def _arriving(self, job_id: str) -> _Arriving:
        job = self.job(job_id)
        top = self._execute("SELECT max(seq) FROM events WHERE job_id = ? AND attempt_id = ?",
                            (job_id, job.attempt_id))[0][0]
        return _Arriving(job, max(job.last_seq, top or 0))

    def _known(self, job: Job, payload: Dict[str, Any], text: str) -> Optional[str]:
        """What an event is if something is stored under its number already; None if nothing is."""
        attempt, seq = payload["data"]["attempt_id"], payload["seq"]
        known = self._execute("SELECT payload, source, n FROM events WHERE job_id = ? AND attempt_id = ? AND seq = ?",
                              (job.job_id, attempt, seq))
        if not known:
            return None
        if known[0][1] == "state":       # the event behind a state that was taken in before it
            self._execute("UPDATE events SET payload = ?, source = 'remote', detail = ?, event = ? WHERE n = ?",
                          (text, clean_text(payload["detail"]), payload["event"], known[0][2]))
            return "filled"
        if known[0][0] == text:
            return "duplicate"
        self._log_once(job, "conflict", "two different events with number %d" % seq, {"payload": payload}, attempt)
        return "conflict"

    def _write_arrived(self, arriving: _Arriving) -> None:
        """Write what of a job was taken in and is not written yet."""
        if arriving.rows:
            self._execute_many(
                "INSERT INTO events(job_id, attempt_id, seq, event, source, timestamp, logged_at, detail, payload, "
                "delivered_at) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", arriving.rows)
            arriving.rows = []
        if arriving.news:
            changes = self._remote_changes(arriving.job, arriving.news)
            self._update_job(arriving.job, changes)
            arriving.job, arriving.news = arriving.job._replace(**changes), []

    def _remote_changes(self, job: Job, news: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
        """What accepted events, in the order of their arrival, change in their job's record beside its status."""
        now, moment = utc_now(), instant()
        changes: Dict[str, Any] = {
            "transition_seq": job.transition_seq + len(news), "started_at": job.started_at or now,
            "last_seq": max(job.last_seq, *[payload["seq"] for payload in news]),
            "updated_at": now, "state_rev": job.state_rev + len(news)}
        if any(payload["data"].get("spawned") is True for payload in news) \
                or not (job.runner or job.claimed_mono or job.delivered_mono):
            changes.update(claimed_at=now, claimed_mono=moment)      # the wall clock of both sides starts
        if not job.last_event_mono:
            changes["delivery"] = "sent"
            self._retire_dispatch(job)
            self._take_as_answer(job)
        said = [payload for payload in news if not (payload["detail"] == "heartbeat" and "since" in payload["data"])]
        if len(said) < len(news):
            self._execute("INSERT OR REPLACE INTO beats VALUES(?, ?, ?, NULL, ?, ?, ?)",
                          (job.job_id, job.attempt_id, job.heartbeat_sec, moment, now, moment))
        if said or not job.last_event_mono:       # a beat that comes first counts as `started` (DESIGN 6)
            last = (said or news)[-1]
            changes.update(last_event=last["event"], last_event_at=now, last_event_mono=moment,
                           detail=clean_text(last["detail"]))
        return changes

    def _apply_remote(self, job: Job, payload: Dict[str, Any], decision: Decision) -> None:
        """Commit an event of a remote job that changes its status or phase."""
        changes = {**self._remote_changes(job, [payload]), "status": decision.status, "phase": decision.phase}
        if decision.status in TERMINAL_STATUSES:
            reason = payload["data"].get("reason")
            changes.update(finished_at=changes["updated_at"],
                           reason=reason if isinstance(reason, str) and is_name(reason) else None)
        if decision.status in TERMINAL_STATUSES or decision.phase and payload["data"].get("settles") is not False:
            self._end_attempt(job, payload["event"] if decision.phase else decision.status)
        self._update_job(job, changes)
        self._log(job, "status_changed", "remote", decision.status, {
            "from": job.status, "to": decision.status, "by": "remote", "phase": decision.phase})

    def take_in_state(self, payload: Dict[str, Any]) -> str:
        """A retained state whose own event did not come: its end counts, and so does its news as life.

        Answers accepted (the job has ended by it), old_state, or behind: events up to its number are missing.
        """
        with self.write():
            job = self.job(payload["job_id"])
            if payload.get("status") in TERMINAL_STATUSES:
                self._take_answer(job.job_id, payload["data"]["attempt_id"], payload["status"])
            if payload["data"]["attempt_id"] != job.attempt_id or payload["seq"] <= job.last_seq:
                return "old_state"
            if payload.get("status") in TERMINAL_STATUSES:
                event = "completed" if payload["status"] == "completed" else "error"
                as_event = {**payload, "event": event, "data": {**payload["data"], "status": payload["status"]}}
                decision = decide_remote(job, as_event)
                if decision.verdict == "commit":
                    row = _remote_row(as_event, unsigned_form(as_event).decode("utf-8"), "state")
                    self._write_arrived(_Arriving(job, payload["seq"], [row]))
                    self._apply_remote(job, as_event, decision)
                    return "accepted"
            self._execute("UPDATE jobs SET last_event_mono = ? WHERE job_id = ? AND last_event_mono IS NOT NULL",
                          (instant(), job.job_id))
            return "behind"

    def missing_numbers(self, job: Job, whole: int = 0) -> Optional[int]:
        """The first number that is missing in the log of a job's current attempt; None if none is.

        Up to `whole`, none is known to be.
        """
        whole = max(whole, job.seq_base)
        count, top = self._execute("SELECT count(*), max(seq) FROM events WHERE job_id = ? AND attempt_id = ? "
                                   "AND seq > ?", (job.job_id, job.attempt_id, whole))[0]
        if count == (top or whole) - whole:
            return None
        expected = whole + 1
        while True:      # a few at a time: the first one is usually missing at once, and there may be many behind it
            rows = self._execute("SELECT seq, payload FROM events WHERE job_id = ? AND attempt_id = ? AND seq >= ? "
                                 "ORDER BY seq LIMIT 100", (job.job_id, job.attempt_id, expected))
            for seq, payload in rows:
                if seq != expected and not only_beats_between(payload, expected - 1):
                    return expected
                expected = seq + 1
            if not rows:
                return None

    # -- v4 ---------------------------------------------------------------------------------

    def scrub_passwords(self, dry_run: bool) -> List[str]:
        """Take `password` out of stored broker blocks (imported ones); the ids concerned."""
        import json
        found = []
        self._execute("PRAGMA secure_delete=ON")      # not every SQLite overwrites what is deleted
        with self.write():
            for job_id, text in self._execute("SELECT job_id, broker FROM jobs WHERE broker LIKE '%password%'"):
                block = json.loads(text)
                if not block.pop("password", None):
                    continue
                found.append(job_id)
                if not dry_run:
                    self._execute("UPDATE jobs SET broker = ? WHERE job_id = ?", (compact_json(block), job_id))
        return found


class _Arriving:
    """A remote job while a batch of its events is taken in."""

    __slots__ = ("job", "top", "rows", "news")

    def __init__(self, job: Job, top: int, rows: Sequence[Sequence[Any]] = ()):
        self.job = job                                   # as it is written
        self.top = top                                   # the highest number taken in of its current attempt
        self.rows = list(rows)                           # of the log, not yet written
        self.news: List[Dict[str, Any]] = []             # events whose mark on the record is not yet written


def _remote_row(payload: Dict[str, Any], text: str, source: str) -> Sequence[Any]:
    """The line of the log for an event from the wire, as _write_arrived() inserts it."""
    return (payload["job_id"], payload["data"]["attempt_id"], payload["seq"], payload["event"], source,
            clean_text(payload["timestamp"])[:40], utc_now(True), clean_text(payload["detail"]), text, utc_now())


class _Transaction:
    """BEGIN IMMEDIATE to COMMIT. `durable=False` spares the fsync where a loss only means a repetition."""

    __slots__ = ("_registry", "_durable")

    def __init__(self, registry: Registry, durable: bool = True):
        self._registry, self._durable = registry, durable

    def __enter__(self) -> None:
        if not self._durable:
            self._registry._execute("PRAGMA synchronous=NORMAL")
        self._registry._execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: Any, *exc: Any) -> None:
        registry = self._registry
        try:
            if kind is None:   # the check is last, so that nothing is committed into a deleted file
                registry._check_still_there()
                registry._execute("COMMIT")
        finally:
            if registry._db.in_transaction:
                registry._db.rollback()
            if not self._durable:
                registry._execute("PRAGMA synchronous=FULL")
        if kind is None:
            registry._checkpoint()


# What the runner of an attempt is told when another one has begun: from then on it retains nothing of it.
_SUPERSEDED = '{"status":"cancelled","reason":"superseded","issued_at":"%s","moment":"%s"}'

# What a job's record says when an attempt begins.
_ATTEMPT_BEGINS: Dict[str, Any] = {
    "status": "pending", "phase": None, "reason": None, "delivery": "none", "claimed_at": None, "claimed_mono": None,
    "delivered_at": None, "delivered_mono": None, "started_at": None, "finished_at": None, "last_event": None,
    "last_event_at": None, "last_event_mono": None, "detail": None}


def only_beats_between(payload: str, last_seq: int) -> bool:
    """Whether a stored event says that all between number last_seq and itself were beats it replaced."""
    if '"since":' not in payload:
        return False
    import json
    since = json.loads(payload)["data"].get("since")
    return type(since) is int and since <= last_seq


def title_of(prompt: str) -> str:
    """The first line of a prompt that says something, fit for a list."""
    line = next((line for line in prompt.splitlines() if line.strip()), "")
    return clean_text(line.strip())[:TITLE_CHARS]


# ==============================================================================
# 8. Processes
#
# A pid alone means nothing once its process has gone: whoever is watched or
# signalled is known by pid, start time, boot and pid namespace together.
# ==============================================================================


def _stat_fields(pid: int) -> Optional[List[str]]:
    """/proc/<pid>/stat after the command name: [state, ppid, pgrp, ...]; None if there is none."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return file.read().rpartition(b")")[2].decode("ascii").split()
    except (OSError, ValueError):
        return None


def _ps(pid: int, column: str) -> str:
    """One column of ps, for systems without /proc. The zone is fixed: lstart is local time."""
    import subprocess
    done = subprocess.run(["ps", "-o", column + "=", "-p", str(pid)], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
                          env={"TZ": "UTC", "LC_ALL": "C", "PATH": "/bin:/usr/bin"})
    return done.stdout.decode("utf-8", "replace").strip()


def _has_proc() -> bool:
    return os.path.exists("/proc/self/stat")


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def identity_of(pid: int) -> Optional[Dict[str, Any]]:
    """Who a pid is now, in a form that can be stored and compared; None if it does not live."""
    if _has_proc():
        fields = _stat_fields(pid)
        if fields is None or fields[0] in "ZXx":
            return None
        start = fields[19]
    else:
        start = _ps(pid, "lstart")
        if not start or _ps(pid, "stat").startswith("Z"):
            return None
    return {"pid": pid, "start": start, "boot": boot_id(), "ns": _pid_namespace()}


def is_alive(identity: Optional[Dict[str, Any]]) -> Optional[bool]:
    """Whether the very process lives. None: it cannot be seen from here (another pid namespace)."""
    if not identity:
        return False
    if identity.get("boot") != boot_id():
        return False
    if identity.get("ns") != _pid_namespace():
        return None
    return identity_of(identity["pid"]) == identity


def is_stopped(pid: int) -> bool:
    """Whether a process stands still (SIGSTOP, Ctrl-Z, a debugger): it lives, and gives no sign of life."""
    state = (_stat_fields(pid) or [""])[0] if _has_proc() else _ps(pid, "stat")
    return state[:1] in ("T", "t")


def parent_of(pid: int) -> int:
    if _has_proc():
        fields = _stat_fields(pid)
        return int(fields[1]) if fields else 0
    text = _ps(pid, "ppid")
    return int(text) if text.isdigit() else 0


def command_names(pid: int) -> List[str]:
    """The names under which a process may be known: of the program, and of a script it interprets."""
    if not _has_proc():
        return [os.path.basename(word) for word in _ps(pid, "command").split(" ")[:2]]
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            words = file.read().split(b"\0")[:2]
        with open("/proc/%d/comm" % pid, "rb") as file:
            words.append(file.read().strip())
    except OSError:
        return []
    return [os.path.basename(word.decode("utf-8", "replace")) for word in words]


def ancestors() -> List[int]:
    """The processes above this one, the nearest first."""
    found: List[int] = []
    pid = os.getppid()
    while pid > 0 and len(found) < 64:
        found.append(pid)
        pid = parent_of(pid)
    return found


def _process_list() -> List[Tuple[int, int, str]]:
    """(pid, parent, command line) of every living process that can be seen."""
    found = []
    if not _has_proc():
        import subprocess
        out = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,command="], stdout=subprocess.PIPE).stdout
        rows = [line.split(None, 2) for line in out.decode("utf-8", "replace").splitlines()]
        return [(int(row[0]), int(row[1]), row[2]) for row in rows if len(row) == 3]
    for name in os.listdir("/proc"):
        fields = _stat_fields(int(name)) if name.isdigit() else None
        if fields and fields[0] not in "ZXx":
            try:
                with open("/proc/%s/cmdline" % name, "rb") as file:
                    command = file.read().replace(b"\0", b" ").decode("utf-8", "replace")
                found.append((int(name), int(fields[1]), command))
            except OSError:
                continue      # gone meanwhile
    return found


def processes_naming(word: str) -> List[int]:
    """The processes that have a word in their command line."""
    return [pid for pid, _, command in _process_list() if word in command]


def processes_holding(paths: Sequence[str]) -> List[int]:
    """The processes that have one of these files open, as far as this user may see that."""
    if not _has_proc():
        out = run_program(["lsof", "-t", "--", *paths])[1] if paths else ""
        return [int(line) for line in out.split() if line.isdigit()]
    wanted, found = {os.path.realpath(path) for path in paths}, []
    for name in os.listdir("/proc") if wanted else ():
        try:
            folder = "/proc/%s/fd" % name
            if name.isdigit() and any(os.readlink(os.path.join(folder, one)) in wanted for one in os.listdir(folder)):
                found.append(int(name))
        except OSError:
            continue          # another user's, or gone meanwhile
    return found


def family_of(pid: int) -> List[int]:
    """A process and all that descend from it, as far as the line is not broken."""
    rows, family = _process_list(), [pid]
    for one in family:
        family += [child for child, parent, _ in rows if parent == one and child not in family]
    return family


def group_of(pid: int) -> int:
    """The process group of a living process; its own number if it has gone."""
    try:
        return os.getpgid(pid)
    except OSError:
        return pid


def agent_ancestor() -> Optional[int]:
    """The nearest ancestor of this process that is an agent CLI."""
    pid = os.getppid()
    for _ in range(64):
        if pid < 1:
            return None
        if AGENT_COMMANDS.intersection(command_names(pid)):      # (in a container it may well be process 1)
            return pid
        pid = parent_of(pid)
    return None


def group_members(group: int) -> List[int]:
    """The living processes of a process group (zombies are dead)."""
    if not _has_proc():
        import subprocess
        out = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat="], stdout=subprocess.PIPE).stdout.decode()
        rows = [line.split() for line in out.splitlines()]
        return [int(row[0]) for row in rows if len(row) == 3 and row[1] == str(group) and row[2][0] != "Z"]
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat_fields(int(name))
            if fields and fields[2] == str(group) and fields[0] not in "ZXx":
                found.append(int(name))
    return found


def signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass   # gone already, or (macOS) nothing but zombies left


def end_group(group: int, grace_s: float, tick: Callable[[], Any] = lambda: None) -> None:
    """TERM, up to grace_s seconds, KILL, until no member lives. `tick` runs while waiting."""
    import signal
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        if not group_members(group):
            return
        signal_group(group, number)
        deadline = time.monotonic() + wait_s
        while group_members(group) and time.monotonic() < deadline:
            tick()
            time.sleep(0.02)


def self_command() -> List[str]:
    """argv that runs this very mam again, whatever the current folder."""
    return [sys.executable or "python3", SELF_PATH]


def spawn_self(arguments: Sequence[str], env: Dict[str, str], log_path: str, pass_fds: Sequence[int] = ()) -> Any:
    """Start mam detached, in a session of its own; its stderr goes to a file. A Popen."""
    import subprocess
    with open(_open_log(log_path), "ab") as log:
        return subprocess.Popen(self_command() + list(arguments), stdin=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL, stderr=log, env=env, cwd="/",
                                start_new_session=True, close_fds=True, pass_fds=pass_fds)


def _open_log(path: str) -> int:
    """A descriptor to write complaints to; what cannot be logged (a full disk, an odd file) must not stop the work."""
    try:
        if os.path.exists(path) and os.path.getsize(path) > LOG_CAP_BYTES:
            os.replace(path, path + ".1")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        _give_to_owner(path)
        return descriptor
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def spawn_detached(argv: Sequence[str], env: Dict[str, str]) -> None:
    """Start another program that outlives us, in a session of its own, without our streams."""
    import subprocess
    subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                     env=env, cwd="/", start_new_session=True, close_fds=True)


def run_program(argv: Sequence[str], stdin: Optional[bytes] = None, timeout_s: float = 30.0,
                env: Optional[Dict[str, str]] = None) -> Tuple[int, str, str]:
    """Run a helper program to its end: (exit status, stdout, stderr). 127: there is no such program."""
    import subprocess
    try:
        done = subprocess.run(list(argv), input=stdin if stdin is not None else b"", stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, timeout=timeout_s, env=env)
    except (FileNotFoundError, PermissionError):
        return 127, "", "no program %s" % argv[0]
    except subprocess.TimeoutExpired:
        return 124, "", "%s did not answer within %ds" % (argv[0], timeout_s)
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


class GatedChild:
    """A command in its own process group that begins only when it is let.

    Its pid is known, and can be recorded, before its first instruction: if the
    parent dies in between, the gate closes and the command never runs. So no
    command runs that the registry does not know.
    """

    def __init__(self, command: str, workdir: str, env: Dict[str, str], stdin_path: str,
                 output: Optional[int] = None):
        """Fork and wait at the gate. `pid` is also the group.

        Without a descriptor for its `output` there is a pipe, and `output` is its read end.
        """
        gate_read, self._gate = os.pipe()
        self._failure, failure_write = os.pipe()
        self.output, output_write = os.pipe() if output is None else (output, os.dup(output))
        self._status: Optional[int] = None
        self.pid = os.fork()
        if self.pid == 0:
            self._become_command(command, workdir, env, stdin_path, gate_read, failure_write, output_write)
        os.setpgid(self.pid, self.pid)   # both sides set it, so that neither has to wait
        for descriptor in (gate_read, failure_write, output_write):
            os.close(descriptor)

    def _become_command(self, command: str, workdir: str, env: Dict[str, str], stdin_path: str,
                        gate: int, failure: int, output: int) -> None:
        import signal
        try:
            os.setpgid(0, 0)
            os.close(self._gate)       # else the child would hold its own gate open
            for number in (signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            if os.read(gate, 1) != b"g":
                os._exit(0)
            os.chdir(workdir)
            os.dup2(os.open(stdin_path, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.execve("/bin/sh", ["/bin/sh", "-c", command], env)
        except BaseException as error:
            os.write(failure, ("%s: %s" % (type(error).__name__, error)).encode("utf-8", "replace")[:500])
        finally:
            os._exit(126)

    def release(self) -> str:
        """Open the gate. Returns why the command could not be started; "" when it runs."""
        os.write(self._gate, b"g")
        os.close(self._gate)
        with open(self._failure, "rb") as file:     # closed by a successful exec
            return file.read().decode("utf-8", "replace")

    def poll(self) -> Optional[int]:
        """The exit status once it has ended (negative: the signal), else None. Reaps it."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return self._status


def run_shell(command: str, workdir: str, env: Dict[str, str], output: Any, timeout_s: float, grace_s: float,
              stop: Callable[[], bool] = lambda: False,
              known: Callable[[int], bool] = lambda group: True) -> Optional[int]:
    """Run a user's shell command in its own group to its end. 126: it could not be started.

    `known(group)` may record it before its first instruction, or say that it is not to begin.
    None if it did not, or was ended: after timeout_s, or because `stop()` (asked now and then) said so.
    """
    child = GatedChild(command, workdir, env, os.devnull, output.fileno())
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    try:
        if not known(child.pid):
            return None
        failure = child.release()
        if failure:
            os.write(output.fileno(), failure.encode("utf-8", "replace"))
        while time.monotonic() < deadline and not stop():
            if child.poll() is not None:
                return child.poll()
            time.sleep(pause_s)
            pause_s = min(0.05, 2 * pause_s)
        return None
    finally:       # (an unopened gate closes with this process, and the group is ended before)
        end_group(child.pid, grace_s, child.poll)
        child.poll()


def ignore_sigterm() -> None:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def raise_on_sigterm() -> None:
    """Turn SIGTERM into Terminated, so that a command can finish up before it goes."""
    import signal

    def handler(_number: int, _frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated()
    signal.signal(signal.SIGTERM, handler)


# ==============================================================================
# 9. Transport
#
# One MQTT connection, short-lived or the daemon's, driven by hand by one thread: no
# network thread that could die unseen, no exception lost in a callback, and
# nothing that the client could send again by itself after a loss. After any
# failure the client object is thrown away, and the outbox is read again.
# ==============================================================================


class BrokerError(Exception):
    """The broker could not be reached or went away. `final`: trying again will not help."""

    def __init__(self, why: str, final: bool = False):
        super().__init__(why)
        self.why, self.final = why, final


def _tls_context(broker: Broker) -> Any:
    import ssl

    def no_passphrase() -> str:
        raise BrokerError("MQTT_KEYFILE needs a pass phrase: use a key without one", final=True)
    try:
        context = ssl.create_default_context(cafile=broker.ca_certs or None)
        if broker.certfile:
            context.load_cert_chain(broker.certfile, broker.keyfile or None, password=no_passphrase)
    except (OSError, ValueError) as error:     # ssl.SSLError is an OSError
        raise BrokerError("the TLS files cannot be used (MQTT_CA_CERTS, MQTT_CERTFILE, MQTT_KEYFILE): %s" % error,
                          final=True) from None
    return context


def broker_address(broker: Broker) -> str:
    return "%s:%d" % (broker.host, broker.port)


def _new_client(mqtt: Any, client_id: str) -> Any:
    """A paho client that reads ahead and acknowledges in bulk.

    paho reads a packet in three system calls and sends each PUBACK by itself, which is half of
    what a message costs. Both methods are its own, not public: should they go, only the speed does.
    """
    import struct

    class ReadAhead(mqtt.Client):
        ahead, position = b"", 0        # bytes read from the socket, and up to where they were handed on
        pubacks = b""                   # not yet sent

        def _sock_recv(self, size: int) -> bytes:
            if self.position >= len(self.ahead):
                self.send_acks()        # before the broker waits for them
                self.ahead, self.position = super()._sock_recv(max(size, READ_AHEAD_BYTES)), 0
            data = self.ahead[self.position:self.position + size]
            self.position += len(data)
            return data

        def has_more(self) -> bool:
            return self.position < len(self.ahead)

        def _send_puback(self, mid: int) -> Any:
            self.pubacks += struct.pack("!BBH", 0x40, 2, mid)
            return mqtt.MQTT_ERR_SUCCESS

        def send_acks(self) -> None:
            if self.pubacks:
                acks, self.pubacks = self.pubacks, b""
                self._packet_queue(0x40, acks, 0, 1)

    return ReadAhead(mqtt.CallbackAPIVersion.VERSION2, client_id=client_id, clean_session=True,
                     protocol=mqtt.MQTTv311, reconnect_on_failure=False)


class Connection:
    """A connected MQTT 3.1.1 client: QoS 1, clean session, knows what was acknowledged."""

    def __init__(self, broker: Broker, client_id: str = "", window: int = SEND_WINDOW,
                 will: Optional[Tuple[str, bytes, bool]] = None):
        """Connect and wait for CONNACK; BrokerError if that fails within CONNACK_TIMEOUT_S.

        `client_id` is random unless the session of a dead sender is to be taken over. `will`: what
        the broker is to publish when the connection is lost.
        """
        try:
            import paho.mqtt.client as mqtt
        except ImportError:
            raise BrokerError("paho-mqtt is not installed: use mam.pyz, or pip install paho-mqtt", final=True) from None
        self.broker = broker
        self.client_id = client_id or new_client_id(broker)
        self.received: List[Tuple[str, bytes, bool]] = []      # (topic, payload, retained), not yet taken
        self._acked: set = set()
        self._granted: Dict[int, bool] = {}                    # SUBSCRIBE's mid: whether all was granted
        self._connack: Any = None
        self._lost = False                                     # seen while sending; pump() tells it, behind what came
        self._client = _new_client(mqtt, self.client_id)
        self._client.connect_timeout = TCP_TIMEOUT_S
        self._client.max_inflight_messages_set(window)
        self._client.on_connect = self._on_connect
        self._client.on_publish = self._on_publish
        self._client.on_subscribe = self._on_subscribe
        self._client.on_message = self._on_message
        if will:
            self._client.will_set(will[0], will[1], 1, will[2])
        if broker.username:
            self._client.username_pw_set(broker.username, broker.password or None)
        if broker.tls:
            self._client.tls_set_context(_tls_context(broker))
        self._connect()

    # Callbacks run inside pump(), in its thread, and only note what happened.
    def _on_connect(self, _client: Any, _userdata: Any, _flags: Any, reason_code: Any, _properties: Any) -> None:
        self._connack = reason_code

    def _on_publish(self, _client: Any, _userdata: Any, mid: int, _reason_code: Any, _properties: Any) -> None:
        self._acked.add(mid)

    def _on_subscribe(self, _client: Any, _userdata: Any, mid: int, codes: Any, _properties: Any) -> None:
        self._granted[mid] = not any(code.is_failure for code in codes)

    def _on_message(self, _client: Any, _userdata: Any, message: Any) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:      # a topic that is not UTF-8 can be none of ours
            topic = ""
        self.received.append((topic, message.payload, bool(message.retain)))

    def _address(self) -> str:
        return broker_address(self.broker)

    def _connect(self) -> None:
        deadline = time.monotonic() + CONNACK_TIMEOUT_S
        try:
            self._client.connect(self.broker.host, self.broker.port, self.broker.keepalive_s)
        except (OSError, ValueError) as error:     # ValueError: an impossible host name (UnicodeError)
            final = type(error).__name__ == "SSLCertVerificationError" or isinstance(error, ValueError)
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise BrokerError("cannot connect to %s: %s" % (self._address(), reason), final) from None
        while self._connack is None:
            self.pump(deadline - time.monotonic())
            if time.monotonic() > deadline:
                raise BrokerError("no answer to CONNECT from %s within %ds" % (self._address(), CONNACK_TIMEOUT_S))
        if self._connack.is_failure:
            name = str(self._connack)
            refused = name in ("Not authorized", "Bad user name or password")
            self.close()
            raise BrokerError("the broker %s refused the credentials (%s): check MQTT_USERNAME and MQTT_PASSWORD" % (
                self._address(), name) if refused else "the broker %s refused the connection (%s)" % (
                    self._address(), name), final=refused)

    def pump(self, wait_s: float) -> None:
        """Let the client read, write and keep alive, waiting up to wait_s; BrokerError once the connection is lost."""
        if self._lost and not self.received:
            raise BrokerError("the connection to %s was lost" % self._address())
        seen = len(self.received)
        try:
            code = self._client.loop(0.0 if self.has_more() else max(0.0, min(wait_s, 0.5)))     # reads one message
            while code == 0 and (seen < len(self.received) or self.has_more()) \
                    and len(self.received) < INBOX_BATCH_COUNT:
                seen = len(self.received)
                code = self._client.loop_read()                      # and those behind it, to be stored at once
            self._client.send_acks()
        except (OSError, ValueError) as error:
            raise BrokerError("the connection to %s broke: %s" % (self._address(), error)) from None
        if self.received and (code != 0 or self._client._in_packet["remaining_length"] > MAX_INBOUND_BYTES):
            return       # acknowledged already: they are taken first, and the next call tells of the trouble
        if self._client._in_packet["remaining_length"] > MAX_INBOUND_BYTES:
            raise BrokerError("%s sends a packet of %d bytes" % (
                self._address(), self._client._in_packet["remaining_length"]))
        if code != 0 and self._connack is None:
            raise BrokerError("%s closed the connection before answering CONNECT" % self._address())
        if code != 0 and not self._connack.is_failure:
            raise BrokerError("the connection to %s was lost" % self._address())

    def socket(self) -> Any:
        """What becomes readable when the broker has something for us."""
        return self._client.socket()

    def has_more(self) -> bool:
        """Whether something was read from the socket already and not yet handed on by pump()."""
        return bool(self._client.has_more())

    def wants_write(self) -> bool:
        return self._client.want_write()

    def hasten(self) -> None:
        """For a connection on which others wait for answers: else a message behind an acknowledgement waits until TCP
        acknowledges that, which takes 40 ms. It costs a fifth of the rate of a long outbox."""
        import socket
        opened = self._client.socket()
        try:
            if opened is not None:
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            pass      # lost already, which pump() tells

    def post(self, topic: str, payload: bytes, retain: bool) -> int:
        """Send with QoS 1 and do not wait; the message's id comes back from take_acks()."""
        info = self._client.publish(topic, payload, qos=1, retain=retain)
        self._lost = self._lost or info.rc != 0
        return int(info.mid)

    def take_acks(self) -> set:
        """The ids acknowledged since the last call."""
        acks, self._acked = self._acked, set()
        return acks

    def subscribe(self, topics: Sequence[str]) -> int:
        """Ask for topics with QoS 1; granted() tells the answer to the id."""
        code, mid = self._client.subscribe([(topic, 1) for topic in topics])
        self._lost = self._lost or code != 0
        self._granted.pop(mid, None)        # of an earlier one: the numbers come again
        return int(mid or 0)

    def granted(self, mid: int) -> Optional[bool]:
        """Whether the broker granted a subscription in full; None while it has not answered."""
        return self._granted.get(mid)

    def unsubscribe(self, topics: Sequence[str]) -> None:
        self._client.unsubscribe(list(topics))

    def publish(self, messages: Sequence[Tuple[str, bytes, bool]]) -> None:
        """Send (topic, payload, retain) in order and wait until each is acknowledged.

        BrokerError when an acknowledgement is missing for PUBACK_TIMEOUT_S: some may have
        arrived; sending them again is harmless, for they are the same bytes.
        """
        waiting = {self.post(*message) for message in messages}
        deadline = time.monotonic() + PUBACK_TIMEOUT_S
        while waiting:
            self.pump(deadline - time.monotonic())
            acks = self.take_acks()
            waiting -= acks
            if acks:
                deadline = time.monotonic() + PUBACK_TIMEOUT_S
            elif time.monotonic() > deadline:
                raise BrokerError("%s did not acknowledge within %ds" % (self._address(), PUBACK_TIMEOUT_S))

    def close(self) -> None:
        """Say goodbye if the broker still listens; never waits."""
        try:
            self._client.disconnect()
            self._client.loop(0)
        except (OSError, ValueError):
            pass   # it is over either way


def new_client_id(broker: Broker) -> str:
    return "%s-%s" % (broker.client_id_prefix[:32], random_hex(16))


# ==============================================================================
# 10. Publishing
#
# Record first, then deliver what is owed. The outbox is the registry itself: an
# event stays owed until a broker has acknowledged it, whoever sent it, so a crash
# at any point costs at most a second copy of the same bytes.
# ==============================================================================

Delivery = namedtuple("Delivery", "sent why")     # why: what stood in the way, for a person


def broker_of(settings: Settings, job: Job) -> Optional[Broker]:
    """The broker a job's news goes to: the host and port of its wire, with what is set for them here."""
    import json
    if not job.wire:
        return None
    host, _, port = job.wire.rpartition(":")
    block = json.loads(job.broker) if job.broker else {}
    return broker_settings(settings, {**block, "host": host, "port": int(port)})


def wire_of(settings: Settings, block: Optional[Dict[str, Any]]) -> Optional[str]:
    """What to store as a new job's wire: host:port of the broker configured now, None without one.

    It is decided at registration: what is recorded without a wire is never owed later.
    """
    broker = broker_settings(settings, block)
    return broker_address(broker) if broker else None


def _job_lock(registry: Registry, job_id: str) -> FileLock:
    folder = os.path.join(registry.directory, "locks")
    _make_private_dir(folder)
    return FileLock(os.path.join(folder, job_id))


def is_being_sent(registry: Registry, job_id: str) -> bool:
    """Whether a publisher is sending a job's news at this moment."""
    path = os.path.join(registry.directory, "locks", job_id)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False       # no such file: no publisher ever sent by itself
    with FileLock(path, descriptor) as lock:
        return not lock.acquire(0)


def take_over_dead(registry: Registry, broker: Broker, but: str = "") -> List[str]:
    """Client ids of connections to a broker whose process has died, stands still or gave them up, with
    something on its way. They are ours to end now: two that connected with one id would throw each other out."""
    import json
    found = []
    for name, text in registry.senders(broker_address(broker)):
        process = json.loads(text)
        alive = is_alive(process)
        if name != but and (alive is False or alive and is_stopped(process["pid"])) \
                and registry.claim_sender(name, text, identity_of(os.getpid())):
            found.append(name)
    return found


def open_sender(registry: Registry, broker: Broker) -> Connection:
    """A connection whose name stands in the registry before its first byte leaves.

    Bytes of a sender that died may still sit in a stalled connection and would arrive, older,
    behind ours. A broker ends a session when its client id connects again: so the dead one's
    id is taken over, and what it left on the way can arrive no more. Until that has worked
    the dead one's name stays.
    """
    dead = take_over_dead(registry, broker)
    client_id = dead[-1] if dead else new_client_id(broker)
    if not dead:
        registry.add_sender(client_id, broker_address(broker), identity_of(os.getpid()))
    try:
        while len(dead) > 1:
            Connection(broker, dead[0]).close()
            registry.drop_sender(dead.pop(0))
        return Connection(broker, client_id)
    except BrokerError:
        for name in dead:
            registry.abandon_sender(name)
        if not dead:
            registry.drop_sender(client_id)      # nothing was sent by this name
        raise


def close_sender(registry: Registry, connection: Connection) -> None:
    """End a connection on which nothing is on its way any more."""
    connection.close()
    registry.drop_sender(connection.client_id)


def _send_owed(registry: Registry, connection: Connection, job_id: str) -> None:
    """Send what a job owes: a clearing, its events in order, then its state as it is by then.

    The job is read anew for every step, so what was withdrawn in between is not
    sent and a state never shows less than the events before it.
    """
    while True:
        job = registry.job(job_id)
        if job.clear_owed:
            connection.publish([(events_topic(job), b"", True)])
            registry.mark_sent(cleared=[job_id])
        events = registry.owed_events(job_id, SEND_WINDOW)
        if events:
            connection.publish([event_message(registry, job, event) for event in events])
            registry.mark_sent(events=events)
        elif owes_state(job):
            connection.publish([state_message(job)])
            registry.mark_sent(states=[(job_id, job.state_rev)])
        else:
            return


def owes_state(job: Job) -> bool:
    return bool(job.last_seq) and job.state_sent < job.state_rev and job.transport != "remote"


def event_message(registry: Registry, job: Job, event: Event) -> Tuple[str, bytes, bool]:
    """A recorded event as it is published: retained only if it ends the job, and by the attempt it ends."""
    import json
    key = job.auth_token if event.attempt_id == job.attempt_id else registry.attempt_token(
        job.job_id, event.attempt_id) or ""
    retain = event.event in TERMINAL_EVENTS and json.loads(event.payload)["data"].get("settles") is not False \
        and event.attempt_id == job.attempt_id and job.reason != "superseded"    # (else another's news is what is kept)
    return events_topic(job), sign_recorded(event.payload, key), retain


def state_message(job: Job) -> Tuple[str, bytes, bool]:
    return state_topic(job), sign(state_payload(job), job.auth_token), True


def deliver(registry: Registry, settings: Settings, job_id: str, attempts: int = 3,
            sweep: bool = False) -> Delivery:
    """Bring what a job owes to its broker, over a connection of our own (DESIGN 8).

    Tries `attempts` times with back-off. Sends by one process at a time per job: whoever
    waited for the lock and finds nothing owed any more is done without a connection.
    With `sweep`, the same connection then takes along what other jobs owe. Never raises
    for a broker's sake: what is not sent stays owed.
    """
    try:
        return _deliver(registry, settings, job_id, attempts, sweep)
    except MamError as error:      # bad settings; or the registry fails, and it is recorded all the same
        if error.code == "registry_gone":
            raise
        return Delivery(False, error.message)
    except OSError as error:
        return Delivery(False, "%s: %s" % (error.filename or job_id, error.strerror))


def _deliver(registry: Registry, settings: Settings, job_id: str, attempts: int, sweep: bool) -> Delivery:
    broker = broker_of(settings, registry.job(job_id))
    if broker is None:
        return Delivery(not registry.owes(job_id), "no broker is set here (MQTT_BROKER)")
    why = ""
    for attempt in range(1, attempts + 1):
        with _job_lock(registry, job_id) as lock:
            lock.acquire(JOB_LOCK_WAIT_S)   # a stopped holder must not silence everybody else: go on without
            if not registry.owes(job_id):
                return Delivery(True, "")
            try:
                connection = open_sender(registry, broker)
                try:
                    _send_owed(registry, connection, job_id)
                    if sweep:
                        _sweep(registry, settings, connection, job_id)
                except (BrokerError, MamError):
                    registry.abandon_sender(connection.client_id)      # the next to send takes it over
                    raise
                close_sender(registry, connection)
                return Delivery(True, "")
            except BrokerError as error:
                why = error.why
                if error.final:
                    break
        if attempt < attempts:
            time.sleep(backoff_s(attempt))
    return Delivery(not registry.owes(job_id), why)


def _sweep(registry: Registry, settings: Settings, connection: Connection, but: str) -> None:
    """Send what other jobs owe to the same broker, for a short while; the rest keeps for the next."""
    deadline = time.monotonic() + SWEEP_BUDGET_S
    for job_id in registry.jobs_owing(200):
        if time.monotonic() > deadline:
            return
        if job_id == but:
            continue
        with _job_lock(registry, job_id) as lock:
            try:
                if lock.acquire(0) and broker_of(settings, registry.job(job_id)) == connection.broker:
                    _send_owed(registry, connection, job_id)
            except MamError:
                continue   # that job's broker settings are wrong, or the registry is in trouble: its owner is told


def record(registry: Registry, settings: Settings, job_id: str, request: str, *, source: str,
           detail: str = "", data: Optional[Dict[str, Any]] = None, attempt: Optional[int] = None,
           token: Optional[str] = None, last_seq: Optional[int] = None,
           extra: Optional[Dict[str, Any]] = None) -> Transition:
    """Bring an event or a verdict into the registry: cleaned, checked for size, in one transaction.

    Every path that gives a detail comes through here, so none can carry a path or a secret.
    Raises MamError before anything is recorded if it is too large.
    """
    secrets = settings.secrets
    detail, feedback = split_detail(settings.generalise(detail))
    return registry.transition(
        job_id, request, expected_attempt=attempt, expected_dispatch_token=token, expected_last_seq=last_seq,
        source=source, fields={"detail": detail, "feedback": feedback, "data": hide_secrets_in(data or {}, secrets),
                               **(extra or {})})


def warn_public_broker(broker: Optional[Broker]) -> None:
    """A public sandbox is used only when it is named, and never silently."""
    if broker and broker.host.lower().rstrip(".") in PUBLIC_BROKERS:
        sys.stderr.write("mam: WARNING: %s is a PUBLIC sandbox: anybody can read these jobs and publish to them.\n"
                         "mam: WARNING: use a private broker (MQTT_BROKER) for anything real.\n" % broker.host)


# ==============================================================================
# 11. Daemon
#
# One per registry, and only while there is something to do: it sends what is owed,
# takes in what arrives, gives signs of life for living workers, keeps every clock,
# and sees that a job whose supervisor died gets another. One thread does all of it
# (only a connect waits in a thread of its own), so nothing in it can die unseen.
# All it knows it can read from the registry again: killed at any point, it is
# started anew by the next command or by whoever waits.
# ==============================================================================

NO_DAEMON = DaemonInfo(False, False, None, "", {}, 0, 0, "", {})
MAILS = ("dispatch", "control", "clear_dispatch", "clear_control")


def lock_path(registry: Registry) -> str:
    return os.path.join(registry.directory, "daemon.lock")


def wake_path(registry: Registry) -> str:
    return os.path.join(registry.directory, "daemon.wake")


def build_id() -> str:
    """Which mam this is: a daemon of an older build is told apart by it."""
    import hashlib
    with open(SELF_PATH, "rb") as file:
        return "%s-%s" % (__version__, hashlib.sha256(file.read()).hexdigest()[:12])


def daemon_info(registry: Registry) -> DaemonInfo:
    """The registry's daemon as it last described itself; cheap, and takes no lock that a starter wants."""
    import json
    text = registry.meta("daemon")
    if not text:
        return NO_DAEMON
    said = json.loads(text)
    info = NO_DAEMON._replace(**{name: said[name] for name in DaemonInfo._fields if name in said})
    if is_alive(info.process) is False:
        return NO_DAEMON
    try:
        turning = abs(time.time() - os.stat(lock_path(registry)).st_mtime) < FRESH_S
    except OSError:
        return NO_DAEMON
    return info._replace(alive=True, turning=turning)


def daemon_is_elsewhere(registry: Registry) -> bool:
    """Whether a daemon runs in another pid namespace, where it cannot see our processes."""
    process = daemon_info(registry).process
    return bool(process) and is_alive(process) is None


def beat_beside(registry: Registry, settings: Settings, job_id: str, watch: Optional[Dict[str, Any]]) -> None:
    """Leave a small `_beat` beside a process that the daemon cannot see. Without one, silence decides."""
    try:
        if watch and daemon_is_elsewhere(registry):
            spawn_self(["_beat", "--", job_id], own_environment(settings), supervisor_log(registry))
    except (MamError, OSError) as error:     # what was recorded stands
        sys.stderr.write("mam: recorded; no beat can be left beside the agent: %s\n" % error)


def wake_daemon(registry: Registry) -> bool:
    """Make the daemon look at once. False: nobody reads (ENXIO), or there is no FIFO."""
    try:
        descriptor = os.open(wake_path(registry), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(descriptor, b"w")
    except BlockingIOError:
        pass       # full of wakes: it will look
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def start_daemon(registry: Registry, settings: Settings) -> bool:
    """Start a daemon if none lives. The locked descriptor is handed over, so two can never run.

    Dying between lock and hand-over frees the lock.
    """
    with FileLock(lock_path(registry)) as lock:
        if not lock.acquire(0):
            return False
        spawn_self(["_daemon", "--lock-fd", str(lock.descriptor)], own_environment(settings),
                   supervisor_log(registry), pass_fds=(lock.descriptor,))
    return True


def ensure_daemon(registry: Registry, settings: Settings) -> DaemonInfo:
    """The living daemon, after starting one if there is work for it and none lives.

    One that does not turn may have died in a container, where we cannot see it: the lock knows.
    """
    info = daemon_info(registry)
    if not info.turning and os.access(registry.directory, os.W_OK) and registry.has_work(True):
        try:
            start_daemon(registry, settings)
        except OSError as error:     # no more processes, descriptors, space: the next command tries again
            sys.stderr.write("mam: the daemon cannot be started now: %s\n" % error)
    return info


def ask_to_leave(registry: Registry, info: DaemonInfo) -> None:
    """Ask this very daemon to leave, by a row; one that has come since takes it for no request to itself."""
    registry.set_meta("daemon_leave", compact_json(info.process))
    wake_daemon(registry)


def replace_daemon(registry: Registry, settings: Settings, info: DaemonInfo) -> None:
    """Ask a daemon that cannot connect to make room, and start one that can."""
    ask_to_leave(registry, info)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        wake_daemon(registry)
        if start_daemon(registry, settings):
            return
        time.sleep(0.02)


def relieve_daemon(registry: Registry, settings: Settings, job: Job) -> bool:
    """Replace a daemon that cannot reach a job's broker, if that can be reached with our settings."""
    info, broker = daemon_info(registry), broker_of(settings, job)
    if not info.alive or info.runner or not broker:
        return False
    try:
        Connection(broker).close()
    except BrokerError:
        return False
    replace_daemon(registry, settings, info)
    return True


def deliver_event(registry: Registry, settings: Settings, job: Job, event_n: int, attempts: int = 3,
                  wait_s: float = DAEMON_WAIT_S) -> Delivery:
    """Bring a recorded event to its broker: by the daemon if it is connected, else by ourselves (DESIGN 8).

    Leaves a daemon behind that goes on with what is not sent. A publisher without network
    or credentials so publishes as well as any, without importing paho.
    """
    try:
        return _deliver_event(registry, settings, job, event_n, attempts, wait_s)
    except MamError as error:      # bad settings, or the registry is in trouble: it is recorded all the same
        if error.code == "registry_gone":
            raise
        return Delivery(not job.wire, error.message)
    except OSError as error:
        return Delivery(not job.wire, "%s: %s" % (error.filename or job.job_id, error.strerror))


def _deliver_event(registry: Registry, settings: Settings, job: Job, event_n: int, attempts: int,
                   wait_s: float) -> Delivery:
    info = ensure_daemon(registry, settings)
    if not job.wire:
        return Delivery(True, "")
    if _daemon_can_send(info, job):
        wake_daemon(registry)
        sent = _wait_delivered(registry, job.job_id, event_n, wait_s)   # wakes can be lost: it looks anyway
        if sent.sent or _daemon_can_send(daemon_info(registry), job):
            return sent
    sent = deliver(registry, settings, job.job_id, attempts, sweep=True)
    now = daemon_info(registry)                    # as it is by now: it may have heard of the job only since
    if sent.sent and info.alive and now.process == info.process:
        line = now.lines.get(job.wire)
        if (not line or line["final"] or line["failures"] >= REFUSED_TRY_COUNT) and not info.runner:
            replace_daemon(registry, settings, now)     # we could connect and it cannot
        elif line["state"] != "up":
            wake_daemon(registry)                  # the broker is back: it need not wait for its next try
    return sent


def _daemon_can_send(info: DaemonInfo, job: Job) -> bool:
    """Whether the daemon has, or is just making, a connection that this job's news will take."""
    line = info.lines.get(job.wire, {})
    return info.turning and (line.get("state") == "up" or line.get("state") == "dialing" and not line.get("failures"))


def _wait_delivered(registry: Registry, job_id: str, event_n: int, wait_s: float) -> Delivery:
    """Watch an event's row (0: all that the job owes) until its delivery is noted, by whomever.

    Ends early when the daemon has lost its connection, or turns no more.
    """
    deadline = time.monotonic() + wait_s
    wire = registry.job(job_id).wire
    version, next_look = -1, time.monotonic() + LOOK_S
    while True:
        seen = registry.data_version()
        if seen != version:
            version = seen
            if not (registry.is_owed(event_n) if event_n else registry.owes(job_id)):
                return Delivery(True, "")
        now = time.monotonic()
        if now >= next_look:
            next_look = now + LOOK_S
            info = daemon_info(registry)
            line = info.lines.get(wire, {})
            if not info.turning or line.get("failures"):
                return Delivery(False, line.get("why") or "no daemon is connected")
        if now >= deadline:
            return Delivery(False, "the daemon has it in hand")
        time.sleep(0.001)


def supervisor_log(registry: Registry) -> str:
    """Where background parts write what they have to complain of."""
    return os.path.join(registry.directory, "daemon.log")


def keeper_of(role: str) -> str:
    """This process as the one that carries a job, in the form that `jobs.supervisor` holds."""
    return compact_json({"role": role, "who": identity_of(os.getpid())})


def orphaned(job: Job) -> bool:
    """Whether the `_run` of an attempt died without recording how its command ended."""
    import json
    return bool(job.run) and job.outcome is None and is_alive(json.loads(job.run)["supervisor"]) is False


def is_left_behind(run: str) -> bool:
    """Whether the `_run` of a command is dead or stands still, so that it will not end it."""
    import json
    supervisor = json.loads(run)["supervisor"]
    alive = is_alive(supervisor)
    return alive is False or bool(alive) and is_stopped(supervisor["pid"])


def needs_supervisor(job: Job) -> bool:
    """Whether an open job waits for what only `_supervise` does, and nobody does it.

    To be settled; to be handed over, its delegator having died before it could; to have the
    command of a dead `_run` ended.
    """
    import json
    if job.status in TERMINAL_STATUSES:
        return False
    keeper = json.loads(job.supervisor) if job.supervisor else {}
    alive = is_alive(keeper.get("who"))
    if keeper.get("role") == "_supervise" and alive is not False or is_checked_elsewhere(job):
        return False
    undelivered = job.delivery == "none" and can_deliver(job) and keeper.get("role") not in (None, "runner") \
        and alive is False                  # (a runner's next self starts what waits, when a slot is free)
    return bool(job.phase) or undelivered or orphaned(job)


def is_checked_elsewhere(job: Job) -> bool:
    """Whether a remote job's work is done and its runner still looks at the artifacts."""
    return job.transport == "remote" and bool(job.phase) and job.outcome is None


def ensure_supervisor(registry: Registry, settings: Settings, job_id: str) -> None:
    """Start `_supervise` for a job that needs it; looked at anew, for it may just have got one."""
    if needs_supervisor(registry.job(job_id)):
        spawn_self(["_supervise", "--", job_id], own_environment(settings), supervisor_log(registry))


class Dialer:
    """A connect in a thread of its own: a broker that does not answer holds up no beat and no deadline.

    Before it, the sessions of dead senders are taken over and closed, so that nothing of theirs
    arrives behind ours; without a `client_id` that is all. The thread touches nothing but this
    object; its end is seen by `done`.
    """

    def __init__(self, broker: Broker, client_id: str, dead: Sequence[str], wake: Callable[[], None],
                 will: Optional[Tuple[str, bytes, bool]] = None):
        import threading
        self.connection: Optional[Connection] = None
        self.error: Optional[BrokerError] = None
        self.fenced: List[str] = []
        self.done = False
        self._broker, self._client_id, self._dead, self._wake, self._will = broker, client_id, dead, wake, will
        self._thread = threading.Thread(target=self._dial, daemon=True)
        self._thread.start()

    def _dial(self) -> None:
        try:
            for name in self._dead:
                Connection(self._broker, name).close()
                self.fenced.append(name)
            if self._client_id:
                self.connection = Connection(self._broker, self._client_id, DAEMON_WINDOW, self._will)
        except BrokerError as error:
            self.error = error
        except Exception as error:      # whatever it is, it must reach the daemon and not end unseen
            self.error = BrokerError("connecting failed: %s: %s" % (type(error).__name__, error))
        self.done = True
        self._wake()


class _Sending:
    """What of one job is on its way over a line."""

    __slots__ = ("cursor", "flying", "queued", "blocked_until", "losses", "yielded_at")

    def __init__(self) -> None:
        self.cursor = 0             # key of the last event posted on this connection
        self.flying = 0             # messages not yet acknowledged
        self.queued = False         # waiting for its turn in the line's queue
        self.blocked_until = 0.0    # held back: it seems to be what kills the connection
        self.losses = 0             # how often the connection was lost with it alone on its way
        self.yielded_at = 0.0       # since when a publisher is sending it


# kind: event, state, clear, or one of MAILS. revision: of the state; of a mail, the attempt.
_Parcel = namedtuple("_Parcel", "kind job_id event revision")


class Guest:
    """What a runner adds to the daemon of its registry, which it then is itself: these are asked in its loop."""

    stays = False           # whether the daemon is there for its sake, and leaves when done() says so

    def will(self) -> Optional[Tuple[str, bytes, bool]]:
        """What the broker is to publish when the connection is lost."""

    def connected(self, line: Line) -> None:
        """The line has a new connection: nothing is subscribed on it."""

    def disconnected(self) -> None:
        """It is lost; another comes."""

    def may_send(self) -> bool:
        """Whether what the registry owes may go out (not before it is known what was taken back)."""
        return True

    def take(self, received: Sequence[Tuple[str, bytes, bool]]) -> List[Tuple[str, bytes, bool]]:
        """Look at messages; those that are not for it come back."""
        return list(received)

    def turn(self, now: float) -> bool:
        """Do what is due. True if anything was committed."""
        return False

    def done(self) -> bool:
        """Whether to leave now."""
        return False

    def leave(self) -> None:
        """The loop has ended; the connection, if there is one, still stands."""

    def describe(self) -> Any:
        """For `mam daemon status`."""


class Line:
    """The daemon's way to one broker: its connection, what is on it, when to try again.

    After a loss the client object is thrown away and the outbox is read again; the next
    connection takes over the client id, so the broker drops whatever the old one still held.
    """

    def __init__(self, registry: Registry, settings: Settings, broker: Broker, wake: Callable[[], None], guest: Guest):
        from collections import deque
        self.broker = broker
        self.guest = guest
        self.connection: Optional[Connection] = None
        self.failures = self.connects = 0
        self.why = ""
        self.final = False
        self.inbox = Inbox(registry, self)
        self.dispatcher = Dispatcher(registry, settings, self)
        self._registry, self._settings, self._wake = registry, settings, wake
        self._client_id = ""                        # kept for life: each connection takes over the one before
        self._dialer: Optional[Dialer] = None
        self._fencer: Optional[Dialer] = None       # ends sessions of senders that died while we are connected
        self._dead: List[str] = []                  # client ids of dead senders, ours to end
        self._left_on_way = False                   # our client id may still have bytes on an older connection
        self._retry_at = 0.0
        self._queue: Any = deque()                  # job ids with something to send, in turn
        self._jobs: Dict[str, _Sending] = {}
        self._flight: Dict[int, _Parcel] = {}       # by message id
        self._acks: set = set()                     # ids acknowledged, not yet noted
        self._last_ack = 0.0
        self._one_by_one = 0                        # after a loss: this many acknowledgements one at a time
        self._memory: Optional[MemoryCheck] = None
        self._blocked: set = set()
        self._doubtful: set = set()                 # jobs whose state was on its way when the connection was lost

    @property
    def state(self) -> str:
        return "up" if self.connection else "dialing" if self._dialer else "down"

    def describe(self) -> Dict[str, Any]:
        return {"address": broker_address(self.broker), "state": self.state, "why": self.why, "final": self.final,
                "failures": self.failures, "connects": self.connects, "flying": len(self._flight),
                "refused": len(self.inbox.refused)}

    def is_quiet(self, job_id: str) -> bool:
        """Whether a beat of this job can be sent: connected, and nothing of the job before it."""
        sending = self._jobs.get(job_id)
        return self.connection is not None and (sending is None or not (sending.flying or sending.queued))

    def is_idle(self) -> bool:
        """Whether all it was given to send has been sent."""
        return not (self._queue or self._flight)

    def enqueue(self, job_id: str) -> None:
        sending = self._jobs.setdefault(job_id, _Sending())
        if not sending.queued:
            sending.queued = True
            self._queue.append(job_id)

    # -- connecting ------------------------------------------------------------------

    def hurry(self, now: float) -> None:
        """Somebody has news: try again soon, unless it was tried just now or is known to be hopeless."""
        if not self.connection and not self._dialer and not self.final:
            self._retry_at = min(self._retry_at, now + BACKOFF_BASE_S)

    def turn(self, now: float) -> None:
        """One step of everything; never raises for a broker's sake."""
        try:
            self.inbox.note_unheard()
            if now >= self.inbox.due():
                self.inbox.store()
            if self._fencer:
                self._fenced()
            if self.connection:
                self._work(now)
            elif self._dialer:
                self._answered(now)
            elif now >= self._retry_at:
                self._dial()
        except BrokerError as error:
            self._lost(error, now)

    def _dial(self) -> None:
        self._owe_doubtful()
        self._dead += take_over_dead(self._registry, self.broker, self._client_id)
        if not self._client_id and self._dead:
            self._client_id, self._left_on_way = self._dead.pop(), True
        self._client_id = self._client_id or new_client_id(self.broker)
        self._registry.add_sender(self._client_id, broker_address(self.broker), identity_of(os.getpid()))
        self._dialer = Dialer(self.broker, self._client_id, list(self._dead), self._wake, self.guest.will())

    def fence(self) -> None:
        """End the sessions of senders that died while we are connected."""
        if self.connection and not self._fencer:
            self._dead += take_over_dead(self._registry, self.broker, self._client_id)
            if self._dead:
                self._fencer = Dialer(self.broker, "", list(self._dead), self._wake)

    def _fenced(self) -> None:
        fencer = self._fencer
        if not fencer or not fencer.done:
            return
        self._fencer = None
        self._forget_dead(fencer)
        if fencer.fenced:      # what they had on the way may have arrived behind newer news of ours
            self._registry.owe_retained_again(utc_before(REPUBLISH_S))
            for job_id in self._registry.jobs_owing(100000):
                self.enqueue(job_id)

    def _forget_dead(self, dialer: Dialer) -> None:
        for name in dialer.fenced:
            self._registry.drop_sender(name)
            self._dead.remove(name)

    def _answered(self, now: float) -> None:
        dialer = self._dialer
        if not dialer or not dialer.done:
            return
        self._dialer = None
        self._forget_dead(dialer)
        if dialer.connection is None:
            raise dialer.error or BrokerError("no connection")
        self.connection, self.why, self.final = dialer.connection, "", False
        self.connects += 1
        self.failures = 0
        self._left_on_way = False
        self._last_ack = now
        self._memory = MemoryCheck.begin(self._registry, self._settings, self.connection)
        self.inbox.connected()
        self.dispatcher.connected()
        self.guest.connected(self)
        log("connected to %s%s" % (broker_address(self.broker), " again (reconnected)" if self.connects > 1 else ""))
        self._registry.owe_mails_again()
        for job_id in self._registry.jobs_owing(100000):
            self.enqueue(job_id)

    def _lost(self, error: BrokerError, now: float) -> None:
        """The connection is gone, or could not be made: forget it, and plan the next try."""
        if self.connection:
            self.connection.close()
            self._left_on_way = bool(self._flight)
            self._suspect(now)
        self.connection, self._dialer, self._memory = None, None, None
        self._doubtful.update(parcel.job_id for parcel in self._flight.values() if parcel.kind == "state")
        self._flight.clear()
        self._acks.clear()
        self._queue.clear()
        for sending in self._jobs.values():
            sending.cursor, sending.flying, sending.queued = 0, 0, False
        self.failures += 1
        if error.why != self.why:
            log("%s" % error.why)
        self.why, self.final = error.why, error.final and self.failures >= REFUSED_TRY_COUNT
        pause = REFUSED_PAUSE_S if self.final else backoff_s(self.failures)
        self._retry_at = now + pause
        self.inbox.disconnected()
        self.guest.disconnected()

    def _owe_doubtful(self) -> None:
        """Owe again the states that a lost connection may still hold; kept in mind until that is committed."""
        for job_id in list(self._doubtful):
            self._registry.unsend(job_id)
            self._doubtful.discard(job_id)

    def _suspect(self, now: float) -> None:
        """Single out a message at which the connection is lost again and again: its job waits, the others go on."""
        self._one_by_one = max(self._one_by_one, len(self._flight))
        parcels = list(self._flight.values())
        if len(parcels) != 1 or parcels[0].kind not in ("event", "dispatch"):
            return
        sending = self._jobs[parcels[0].job_id]
        sending.losses += 1
        if sending.losses >= POISON_LOSS_COUNT and parcels[0].kind == "dispatch":
            self.dispatcher.give_up(parcels[0].job_id, "the broker closes the connection at its dispatch: is it larger "
                                                       "than the broker takes (MAM_MAX_DISPATCH_BYTES)?")
        elif sending.losses >= POISON_LOSS_COUNT:
            sending.blocked_until = now + min(30.0 * 2 ** (sending.losses - POISON_LOSS_COUNT), 3600.0)
            self._blocked.add(parcels[0].job_id)
            log("job %s is held back: the broker closes the connection at its event %d" % (
                parcels[0].job_id, parcels[0].event.seq))

    def close(self) -> None:
        """Leave in good order. A name under which something may still be on its way is left to the next sender."""
        self.inbox.store()
        self._owe_doubtful()
        if self.connection:
            self.connection.close()
        for name in self._dead + ([self._client_id] if self._flight or self._left_on_way else []):
            self._registry.abandon_sender(name)
        if not self._flight and not self._left_on_way:
            self._registry.drop_sender(self._client_id)

    # -- sending ----------------------------------------------------------------------

    def _work(self, now: float) -> None:
        connection = self.connection
        assert connection is not None
        connection.pump(0)
        self._acks |= connection.take_acks()
        self._settle(now)
        received, connection.received = connection.received, []
        if self._memory:
            received = self._memory.look(received)
        self.inbox.take(self.dispatcher.take(self.guest.take(received)))
        if self._memory and self._memory.over(now):
            if self._memory.forgotten:
                log("%s has lost its memory: what it should retain is sent again" % broker_address(self.broker))
                self._registry.owe_retained_again(utc_before(REPUBLISH_S))
                for job_id in self._registry.jobs_owing(100000):
                    self.enqueue(job_id)
            self._memory = None
        self.inbox.turn(now)
        self.dispatcher.turn(now)
        if self.guest.may_send():
            self._fill(now)
        if self._flight and now - self._last_ack > 2 * PUBACK_TIMEOUT_S:
            raise BrokerError("%s has acknowledged nothing for %ds" % (
                broker_address(self.broker), 2 * PUBACK_TIMEOUT_S))

    def _settle(self, now: float) -> None:
        """Note acknowledgements, all of a turn in one commit, and let their jobs go on.

        They are forgotten only when the commit stands: on a full disk they keep for the next turn.
        """
        parcels = [self._flight[mid] for mid in self._acks if mid in self._flight]
        if not parcels:
            return
        self._last_ack = now
        self._one_by_one = max(0, self._one_by_one - len(parcels))
        self._registry.mark_sent(
            events=[parcel.event for parcel in parcels if parcel.kind == "event"],
            states=[(parcel.job_id, parcel.revision) for parcel in parcels if parcel.kind == "state"],
            cleared=[parcel.job_id for parcel in parcels if parcel.kind == "clear"])
        for parcel in parcels:
            if parcel.kind in MAILS:
                self._registry.mark_mailed(parcel.job_id, parcel.revision, parcel.kind)
                self.dispatcher.mailed(parcel.kind, parcel.job_id)
        for mid in self._acks:
            self._flight.pop(mid, None)
        self._acks.clear()
        for parcel in parcels:
            sending = self._jobs.get(parcel.job_id)
            if sending is None:
                continue
            sending.flying -= 1
            sending.losses = 0
            if sending.flying == 0:
                self.enqueue(parcel.job_id)

    def _fill(self, now: float) -> None:
        """Post while there is room on the connection, a few messages of each job in turn."""
        if not self._flight:
            self._last_ack = now
        for job_id in [job_id for job_id in self._blocked if self._jobs[job_id].blocked_until <= now]:
            self._blocked.discard(job_id)
            self.enqueue(job_id)
        window = 1 if self._one_by_one else DAEMON_WINDOW
        while self._queue and len(self._flight) < window:
            job_id = self._queue.popleft()
            sending = self._jobs[job_id]
            sending.queued = False
            if job_id not in self._blocked and not self._yields(job_id, sending, now):
                self._send_some(job_id, sending, min(JOB_TURN_COUNT, window - len(self._flight)))

    def _yields(self, job_id: str, sending: _Sending, now: float) -> bool:
        """Leave a job for a moment to a publisher that is sending its news (and may have started us):
        they need not go out twice. Not for long, for it may stand still."""
        if sending.flying or not is_being_sent(self._registry, job_id):
            sending.yielded_at = 0.0
            return False
        sending.yielded_at = sending.yielded_at or now
        if now - sending.yielded_at > JOB_LOCK_WAIT_S:
            return False
        sending.blocked_until = now + LOOK_S
        self._blocked.add(job_id)
        return True

    def _send_some(self, job_id: str, sending: _Sending, budget: int) -> None:
        """Post up to `budget` messages of one job: its clearing, its events, or then its state."""
        registry = self._registry
        job = registry.job(job_id)
        if not self.carries(job):
            del self._jobs[job_id]
            return
        if job.transport == "remote":
            self._send_mail(job, sending)
            return
        if job.clear_owed and not sending.flying:
            self._post(_Parcel("clear", job_id, None, 0), (events_topic(job), b"", True))
        events = registry.owed_events(job_id, budget, sending.cursor)
        for event in events:
            self._post(_Parcel("event", job_id, event, 0), event_message(registry, job, event))
            sending.cursor = event.n
        if len(events) == budget:
            self.enqueue(job_id)
        elif not sending.flying and owes_state(job):
            self._post(_Parcel("state", job_id, None, job.state_rev), state_message(job))
        elif not sending.flying:
            del self._jobs[job_id]           # nothing of it is owed: forget it until there is

    def _send_mail(self, job: Job, sending: _Sending) -> None:
        """Post the next thing a remote job's runners are to be told, once the one before is acknowledged."""
        if sending.flying:
            return
        found = next_mail(self._registry.mails(job.job_id))
        while found and found[0].startswith("forget_"):
            self._registry.mark_mailed(job.job_id, found[1].attempt_id, found[0])
            found = next_mail(self._registry.mails(job.job_id))
        if not found:
            del self._jobs[job.job_id]
            return
        what, mail = found
        self._post(_Parcel(what, job.job_id, None, mail.attempt_id), self.dispatcher.message(job, what, mail))

    def carries(self, job: Job) -> bool:
        """Whether a job's news goes over this line."""
        try:
            return broker_of(self._settings, job) == self.broker
        except MamError:
            return False

    def _post(self, parcel: _Parcel, message: Tuple[str, bytes, bool]) -> None:
        assert self.connection is not None
        self._flight[self.connection.post(*message)] = parcel
        self._jobs[parcel.job_id].flying += 1


_ReadBack = namedtuple("_ReadBack", "job_id attempt_id payload until")


class _Seen:
    """What is known of one runner: its last word, and when a live copy of it came."""

    __slots__ = ("presence", "live_at")

    def __init__(self, presence: Presence, live_at: Optional[float]):
        self.presence, self.live_at = presence, live_at      # live_at: monotonic; None: only what is retained

    def lives(self, now: float) -> bool:
        return self.live_at is not None and now - self.live_at < SILENT_S


def heard_anew(before: Optional[_Seen], presence: Presence, retained: bool, now: float) -> Optional[_Seen]:
    """What is known of a runner after a word of it; None if that word tells nothing.

    A retained copy proves no life, for a will need not fire; nor does one that is old by its own
    clock, or older than another of the same process: brokers can be made to repeat.
    """
    if presence.state != "online":      # its will, made when it connected, has no number
        if before is None:
            return _Seen(presence, None)
        same = before.presence.instance == presence.instance
        return _Seen(presence._replace(beat=before.presence.beat), None) if same else None
    if before and before.presence.instance == presence.instance and presence.beat <= before.presence.beat:
        return None
    if retained or abs(time.time() - parse_utc(presence.timestamp)) > CLOCK_SKEW_S:
        return _Seen(presence, None) if before is None or before.live_at is None else None
    return _Seen(presence, now)


class Dispatcher:
    """Hands remote jobs to runners over one line: to whom, and whether the broker has kept what they are told.

    An attempt is given to one runner, once; if that one turns out not to be there, the job is
    closed, never given to another: it might wake up and run it (DESIGN 13).
    """

    def __init__(self, registry: Registry, settings: Settings, line: Line):
        self._registry, self._settings, self._line = registry, settings, line
        self._jobs: List[Job] = []                            # handed over and not yet started
        self._filters: Dict[str, Tuple[int, float]] = {}      # presence filter: (SUBSCRIBE's mid, granted since or 0)
        self._keys: Dict[str, str] = {}                       # session: key of its presence
        self._seen: Dict[Tuple[str, str], _Seen] = {}         # by (session, runner)
        self._read_backs: Dict[str, _ReadBack] = {}           # by topic
        self._unread: List[str] = []                          # job ids whose dispatch is yet to be read back
        self._sent: Dict[str, float] = {}                     # job id: when its dispatch was acknowledged
        self._confirmed: List[_ReadBack] = []                 # read back, and not yet noted
        self.changed = False                                  # something was committed: the jobs are to be read anew

    def connected(self) -> None:
        self._filters.clear()
        self._read_backs.clear()
        self._sent.clear()
        self._unread.clear()
        self._seen = {key: _Seen(seen.presence, None) for key, seen in self._seen.items()}

    def watch(self, jobs: Sequence[Job]) -> None:
        """Bring what is listened to in line with the jobs that wait for a runner."""
        import json
        connection = self._line.connection
        self._jobs = [job for job in jobs if job.status == "pending" and job.delivery in ("sending", "sent")
                      and job.remote_keys and self._line.carries(job)]
        if connection is None:
            return
        if self._jobs:
            connection.hasten()
        wanted: Dict[str, str] = {}
        for job in self._jobs:
            session = job.agent_session.partition(":")[2]
            wanted[self._filter_of(job)] = session
            self._keys[session] = json.loads(job.remote_keys)["presence"]
        for name in wanted:
            if name not in self._filters:
                self._filters[name] = (connection.subscribe([name]), 0.0)
        for name in set(self._filters) - set(wanted):
            connection.unsubscribe([name])
            del self._filters[name]
        waiting = {job.job_id for job in self._jobs}
        self._sent = {job_id: at for job_id, at in self._sent.items() if job_id in waiting}

    # -- what is sent ------------------------------------------------------------------------

    def message(self, job: Job, what: str, mail: Mail) -> Tuple[str, bytes, bool]:
        """(topic, payload, retain) of a mail; the same bytes each time, for it may be sent more than once."""
        import json
        if what == "dispatch":
            return dispatch_message(job, mail, self._registry.prompt(job.job_id))
        if what == "control":
            control = json.loads(mail.control)
            return control_message(job, "cancel", control["issued_at"],
                                   {"status": control["status"], "reason": control["reason"]}, mail)
        topic = dispatch_topic if what == "clear_dispatch" else control_topic
        return topic(job.topic_prefix), b"", True

    def mailed(self, what: str, job_id: str) -> None:
        """A mail was acknowledged. That proves little, a denied one is acknowledged too: so a dispatch is read back."""
        if what == "dispatch":
            self._sent[job_id] = time.monotonic()
            self._read_back(self._registry.job(job_id))

    def _read_back(self, job: Job) -> None:
        connection = self._line.connection
        mail = next((mail for mail in self._registry.mails(job.job_id) if mail.attempt_id == job.attempt_id), None)
        if connection is None or mail is None or mail.dispatch_mail != KEPT:
            return
        if len(self._read_backs) >= READ_BACK_COUNT:
            self._unread.append(job.job_id)
            return
        topic, payload, _ = self.message(job, "dispatch", mail)
        self._read_backs[topic] = _ReadBack(job.job_id, job.attempt_id, payload, time.monotonic() + READ_BACK_S)
        connection.subscribe([topic])

    def take(self, received: Sequence[Tuple[str, bytes, bool]]) -> List[Tuple[str, bytes, bool]]:
        """Look for presences and for dispatches read back; the rest is for the inbox."""
        rest = []
        for topic, raw, retained in received:
            if topic in self._read_backs:
                if raw == self._read_backs[topic].payload:
                    self._confirmed.append(self._read_backs[topic])
                    self._read(topic)
            elif topic.rpartition("/")[0] + "/+" in self._filters:
                self._meet(topic, raw, retained)
            else:
                rest.append((topic, raw, retained))
        return rest

    def _read(self, topic: str) -> None:
        del self._read_backs[topic]
        if self._line.connection:
            self._line.connection.unsubscribe([topic])

    def _meet(self, topic: str, raw: bytes, retained: bool) -> None:
        session = topic.split("/")[-2]
        try:
            presence = accept_presence(topic, raw, self._keys.get(session, ""))
        except Rejected as error:
            if raw:
                self._line.inbox.drop(topic, error)
            return
        skew_s = time.time() - parse_utc(presence.timestamp)
        if not retained and abs(skew_s) > CLOCK_SKEW_S:
            log("runner %s on %s seems not to live: its clock differs from ours by %s" % (
                presence.runner, presence.host, format_duration(abs(skew_s))))
        key = (session, presence.runner)
        seen = heard_anew(self._seen.get(key), presence, retained, time.monotonic())
        if seen:
            self._seen[key] = seen

    # -- to whom ------------------------------------------------------------------------------

    def turn(self, now: float) -> None:
        """Give waiting jobs to runners, close those for whom there is none, read back what was sent before us."""
        connection = self._line.connection
        while self._confirmed:      # (kept for the next turn if the registry is busy or its disk is full)
            self._registry.move_delivery(*self._confirmed[0][:2], "sending", "sent")
            self._confirmed.pop(0)
            self.changed = True
        if connection is None:
            return
        for name, (mid, since) in self._filters.items():
            if not since and connection.granted(mid):
                self._filters[name] = (mid, now)
            elif connection.granted(mid) is False:
                for job in [job for job in self._jobs if self._filter_of(job) == name]:
                    self.give_up(job.job_id, "the broker does not let this user subscribe to %s" % name)
        for topic, read_back in list(self._read_backs.items()):
            if now >= read_back.until:
                self._read(topic)
                self.give_up(read_back.job_id, "the broker has acknowledged the dispatch and not kept it: may this "
                                               "user publish and read %s?" % topic)
        while self._unread and len(self._read_backs) < READ_BACK_COUNT:
            self._read_back(self._registry.job(self._unread.pop(0)))
        loads = self._registry.runner_loads() if self._jobs else {}
        for job in list(self._jobs):
            if job.delivery == "sending" and job.runner is None:
                self._choose(job, now, loads)
            elif job.job_id not in self._sent and job.dispatch_mail == KEPT:      # sent by the daemon before us
                self._sent[job.job_id] = now
                if job.delivery == "sending":
                    self._read_back(job)
            elif now - self._sent.get(job.job_id, now) > SILENT_S and not self._lives(job, now):
                self.give_up(job.job_id, "runner %s does not serve %s any more" % (job.runner, job.agent_session))

    @staticmethod
    def _filter_of(job: Job) -> str:
        return presence_filter(job.topic_prefix, job.agent_session.partition(":")[2])

    def _lives(self, job: Job, now: float) -> bool:
        seen = self._seen.get((job.agent_session.partition(":")[2], job.runner))
        return seen is not None and seen.lives(now)

    def _choose(self, job: Job, now: float, loads: Dict[str, int]) -> None:
        """Give a job to the least loaded living runner; to one known by a retained word alone if it is the only one."""
        session = job.agent_session.partition(":")[2]
        since = self._filters.get(self._filter_of(job), (0, 0.0))[1]
        if not since:
            return
        there = [seen for (name, _), seen in self._seen.items() if name == session and seen.presence.state == "online"
                 and seen.presence.slots]
        living = [seen for seen in there if seen.lives(now)]
        if not living and len(there) == 1 and not job.runner_wait_s and now - since < PRESENCE_S + SETTLE_S \
                and not (there[0].presence.pool and now - since < SETTLE_S):      # (news of others may be on its way)
            living = there
        if living and now - since < PRESENCE_S + SETTLE_S \
                and self._lowest_load(there, loads) < self._lowest_load(living, loads):
            return          # one of a pool that has less to do may be about to give its sign of life
        if living:
            load, runner = min(self._load(seen.presence, loads) for seen in living)
            if load < 1 or now - since > SETTLE_S:      # (a busy one can wait until the others are known)
                self._assign(job, runner, loads)
        elif now - since > (PRESENCE_S if there else 0) + SETTLE_S:
            waited_s = elapsed_s(job.delivered_mono, job.delivered_at) or 0.0
            if not job.runner_wait_s:
                self.give_up(job.job_id, "nobody serves %s (mam remote list)" % job.agent_session)
            elif waited_s > job.runner_wait_s:
                self.give_up(job.job_id, "nobody has served %s for %gs" % (job.agent_session, job.runner_wait_s))

    def _lowest_load(self, runners: Sequence[_Seen], loads: Dict[str, int]) -> float:
        """The lowest load among the runners of a pool; infinity without one."""
        return min([self._load(seen.presence, loads)[0] for seen in runners if seen.presence.pool],
                   default=float("inf"))

    @staticmethod
    def _load(presence: Presence, loads: Dict[str, int]) -> Tuple[float, str]:
        return max(presence.busy, loads.get(presence.runner, 0)) / presence.slots, presence.runner

    def _assign(self, job: Job, runner: str, loads: Dict[str, int]) -> None:
        dispatch = {"issued_at": utc_now(), "expires_at": utc_text(time.time() + job.ack_timeout_sec)}
        self._jobs.remove(job)             # what becomes of it is read with the next look
        self.changed = True
        if self._registry.assign_runner(job, runner, dispatch):
            loads[runner] = loads.get(runner, 0) + 1
            self._line.enqueue(job.job_id)

    def give_up(self, job_id: str, why: str) -> None:
        """Close a job that cannot reach a runner, unless an event of it has come."""
        job = self._registry.job(job_id)
        self._jobs = [one for one in self._jobs if one.job_id != job_id]
        self.changed = True
        if job.status == "pending":
            record(self._registry, self._settings, job_id, "spawn_failed", source="daemon", detail=why,
                   attempt=job.attempt_id, last_seq=job.last_seq)
            self._line.enqueue(job_id)


class MemoryCheck:
    """Whether a broker still retains states that were sent to it: the one that changed last, which a broker that
    comes back with an older store lacks, and the one that has not changed for longest, which others cannot have sent
    since it forgot.

    With clean sessions CONNACK cannot tell; so their topics are subscribed for a moment.
    """

    def __init__(self, connection: Connection, jobs: Sequence[Job]):
        self._connection = connection
        self._missing = {state_topic(job): job for job in jobs}
        self._topics = sorted(self._missing)
        self._mid = connection.subscribe(self._topics)
        self._until = time.monotonic() + 5.0
        self._granted_at: Optional[float] = None

    @classmethod
    def begin(cls, registry: Registry, settings: Settings, connection: Connection) -> Optional[MemoryCheck]:
        """A check on a new connection; None if nothing that was sent can be looked for."""
        jobs = [job for job in registry.sent_states(broker_address(connection.broker), utc_before(REPUBLISH_S))
                if broker_of(settings, job) == connection.broker]
        return cls(connection, jobs) if jobs else None

    @property
    def forgotten(self) -> bool:
        """Whether one of the states has not come (yet)."""
        return bool(self._missing)

    def look(self, received: Sequence[Tuple[str, bytes, bool]]) -> List[Tuple[str, bytes, bool]]:
        """Look for the states among messages; those on other topics, for the inbox."""
        for topic, payload, retained in received:
            if retained and topic in self._missing and self._is_kept(self._missing[topic], payload):
                del self._missing[topic]
        return [message for message in received if message[0] not in self._topics]

    @staticmethod
    def _is_kept(job: Job, payload: bytes) -> bool:
        """Whether it is what was sent; or the state of a later attempt, which another runner has and which proves a
        memory as well."""
        if payload == state_message(job)[1]:
            return True
        try:
            attempt = parse_json(payload)["data"]["attempt_id"]
            return type(attempt) is int and attempt > job.attempt_id
        except (BadJson, KeyError, TypeError):
            return False

    def over(self, now: float) -> bool:
        """Retained messages come right behind the SUBACK; a refused subscription proves nothing, so send again."""
        if self._granted_at is None and self._connection.granted(self._mid) is not None:
            self._granted_at = now
        if self.forgotten and now < self._until and (self._granted_at is None or now < self._granted_at + 1.0):
            return False
        self._connection.unsubscribe(self._topics)
        return True


def utc_before(seconds: float) -> str:
    return utc_text(time.time() - seconds)


_log_path = ""                      # of the daemon's own log, once it is the daemon
_log_times: Dict[str, float] = {}


def log(text: str, kind: str = "") -> None:
    """A line in daemon.log; the same line, or one of the same kind, at most once a minute. The file is capped here.

    Its disk may be the full one, which is when there is something to say: that must not end the daemon.
    """
    now, kind = time.monotonic(), kind or text
    if now - _log_times.get(kind, -60.0) < 60.0:
        return
    if len(_log_times) > 1000:
        _log_times.clear()
    _log_times[kind] = now
    try:
        if _log_path and os.fstat(2).st_size > LOG_CAP_BYTES:
            os.replace(_log_path, _log_path + ".1")
            descriptor = os.open(_log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, 2)
            os.close(descriptor)
        os.write(2, ("%s %s\n" % (utc_now(), text)).encode("utf-8", "replace"))
    except OSError:
        pass   # there is nowhere else to say it


def _root_of(topic: str) -> str:
    """What stands before the job in the topic of its events or state."""
    return topic.rpartition("/")[0].rpartition("/")[0]


class Inbox:
    """What arrives for the open remote jobs over one line: checked, counted, stored in batches."""

    def __init__(self, registry: Registry, line: Line):
        self._registry, self._line = registry, line
        self.drops: Dict[str, int] = {}
        self.subscribed: set = set()                          # job ids whose topics are granted
        self.refused: set = set()
        self.changed: set = set()                             # jobs whose clocks are to be looked at anew
        self._unheard: set = set()                            # no longer subscribed, and not yet noted
        self._waiting: List[Tuple[Dict[str, Any], str]] = []  # verified events, not yet stored
        self._store_at = 0.0                                  # when those are to be stored, unless they are many
        self._asked: Dict[int, List[str]] = {}                # SUBSCRIBE's mid: the jobs in it
        self._topics: Dict[str, Tuple[str, str, str]] = {}    # topic: (job id, prefix, kind)
        self._keys: Dict[str, Dict[int, Tuple[str, str]]] = {}
        self._states: Dict[str, Tuple[float, Dict[str, Any]]] = {}
        self._holes: Dict[str, Tuple[int, int, float]] = {}   # job id: (first missing, times asked, since when)
        self._restored: Dict[str, float] = {}                 # job id: when its runner was asked to say its last again
        self._whole: Dict[str, Tuple[int, int]] = {}          # job id: (attempt, up to where no number is awaited)
        self._told: Dict[str, Tuple[int, int]] = {}           # job id: (attempt, number) of a state ahead of its events
        self._wide: Dict[str, int] = {}                       # topic root heard as a whole: SUBSCRIBE's mid
        self._narrow: set = set()                             # roots that the broker refuses to show as a whole
        self._behind: List[str] = []                          # jobs under a wide root that came after it
        self._catching_up: Optional[int] = None               # SUBSCRIBE's mid for some of them
        self._probes: Dict[str, Tuple[int, Any, float]] = {}  # job id: (SUBSCRIBE's mid, last sign of life, when)

    def connected(self) -> None:
        """Nothing is subscribed on a new connection: a clean session restores nothing.

        Nor is anything asked for, and no hole is given up, until turn() has seen the SUBACK.
        """
        self._asked.clear()
        self._topics.clear()
        self._probes.clear()
        self._wide.clear()
        self._behind.clear()
        self._catching_up = None
        self.subscribed.clear()
        self.refused.clear()

    def disconnected(self) -> None:
        self._unheard |= self.subscribed
        self.connected()
        self.note_unheard()

    def note_unheard(self) -> None:
        """Stop the clocks of jobs that are no longer subscribed; kept in mind until that is committed."""
        if self._unheard:
            self._registry.mark_subscribed(sorted(self._unheard), None)
            self.changed |= self._unheard
            self._unheard = set()

    def watch(self, jobs: Sequence[Job]) -> None:
        """Bring the subscriptions in line with the remote jobs to be heard, and the ended ones that have a hole."""
        connection = self._line.connection
        if connection is None:
            return
        ended = set(self._holes) - {job.job_id for job in jobs}
        wanted = {job.job_id: job for job in [*jobs, *self._registry.jobs_by_id(sorted(ended))]
                  if self._line.carries(job)}
        known = {job_id for job_id, _, _ in self._topics.values()}
        fresh = [job for job_id, job in wanted.items() if job_id not in known]
        for job in fresh:
            for topic, kind in ((events_topic(job), "events"), (state_topic(job), "state")):
                self._topics[topic] = (job.job_id, job.topic_prefix, kind)
        before = set(self._wide)
        self._widen(connection, list(wanted.values()))
        self._ask(connection, [job.job_id for job in fresh if _root_of(events_topic(job)) not in self._wide])
        self._behind += [job.job_id for job in fresh if _root_of(events_topic(job)) in before]
        self._catch_up(connection)
        gone = [topic for topic, (job_id, _, _) in self._topics.items() if job_id not in wanted]
        if gone:
            connection.unsubscribe(gone)
            for topic in gone:
                self.subscribed.discard(self._topics.pop(topic)[0])
        self._keys = {job_id: keys for job_id, keys in self._keys.items() if job_id in wanted}
        self._whole = {job_id: whole for job_id, whole in self._whole.items() if job_id in wanted}
        self._told = {job_id: told for job_id, told in self._told.items() if job_id in wanted}
        self._restored = {job_id: at for job_id, at in self._restored.items() if job_id in wanted}
        self._probes = {job_id: probe for job_id, probe in self._probes.items() if job_id in wanted}

    def _ask(self, connection: Connection, job_ids: Sequence[str], count: int = 50) -> None:
        """Subscribe jobs by name, several at a time."""
        topics: Dict[str, List[str]] = {}
        for topic, (job_id, _, _) in self._topics.items():
            topics.setdefault(job_id, []).append(topic)
        for start in range(0, len(job_ids), count):
            part = job_ids[start:start + count]
            self._asked[connection.subscribe([topic for job_id in part for topic in topics[job_id]])] = list(part)

    def _widen(self, connection: Connection, jobs: Sequence[Job]) -> None:
        """Hear all of a topic root when many of its jobs are wanted; the names are no longer needed then."""
        roots: Dict[str, List[str]] = {}
        for job in jobs:
            roots.setdefault(_root_of(events_topic(job)), []).append(job.job_id)
        for root, job_ids in roots.items():
            if len(job_ids) <= WIDE_COUNT or root in self._wide or root in self._narrow:
                continue
            self._wide[root] = connection.subscribe([root + "/+/events", root + "/+/state"])
            self._asked[self._wide[root]] = job_ids
            connection.unsubscribe([topic for topic in self._topics if _root_of(topic) == root])

    def _catch_up(self, connection: Connection) -> None:
        """Have what is retained of jobs sent that came after their root was subscribed."""
        if self._catching_up is None and self._behind:
            part, self._behind = self._behind[:CATCH_UP_COUNT], self._behind[CATCH_UP_COUNT:]
            part = [job_id for job_id in part if any(known[0] == job_id for known in self._topics.values())]
            self._ask(connection, part)
            self._catching_up = next((mid for mid, job_ids in self._asked.items() if part and job_ids == part), None)

    def _answered(self, connection: Connection, mid: int, job_ids: Sequence[str], granted: bool) -> bool:
        """Tidy up behind an answered SUBSCRIBE. True if its jobs are heard."""
        if mid == self._catching_up:
            self._catching_up = None
            connection.unsubscribe([topic for topic, known in self._topics.items() if known[0] in job_ids] or ["-"])
            self._catch_up(connection)
            return True                      # by their root, whatever was answered to this
        root = next((root for root, wide in self._wide.items() if wide == mid), None)
        if root is not None and not granted:
            log("%s refuses to show all of %s" % (broker_address(self._line.broker), root))
            del self._wide[root]
            self._narrow.add(root)
            still = {known[0] for topic, known in self._topics.items() if _root_of(topic) == root}
            self._ask(connection, sorted(still))
        return granted

    def forget_keys(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self._keys.pop(job_id, None)

    def turn(self, now: float) -> None:
        """Note granted subscriptions; apply states whose events did not come; ask for what is missing."""
        connection = self._line.connection
        if connection:
            self._check_probes(connection, now)
        for mid in list(self._asked) if connection else ():
            granted = connection.granted(mid) if connection else None
            if granted is None:
                continue
            jobs = self._asked.pop(mid)
            if connection and self._answered(connection, mid, jobs, granted):
                self.subscribed.update(jobs)
                self._registry.mark_subscribed(jobs, instant())
                self.changed.update(jobs)
                for job_id in jobs:
                    self._holes.pop(job_id, None)
                    self._look_for_hole(job_id)
            else:
                self.refused.update(jobs)
                log("%s refused a subscription for %d jobs" % (broker_address(self._line.broker), len(jobs)))
        for job_id, (due, payload) in list(self._states.items()):
            if now >= due:
                word = self._registry.take_in_state(payload)
                self._count(word)
                del self._states[job_id]
                self.changed.add(job_id)
                if word == "behind":
                    self._told[job_id] = (payload["data"]["attempt_id"], payload["seq"])
                self._look_for_hole(job_id)
        for job_id in list(self._holes):
            self._ask_again(job_id, now)

    def hears(self, job: Job) -> bool:
        """Whether the broker has answered us since this job was last heard of; asked, if it was not yet.

        On a dead connection all are silent: that is no silence of the runner.
        """
        connection = self._line.connection
        if connection is None:
            return False
        mid, sign, _ = self._probes.get(job.job_id, (0, None, 0.0))
        if sign != (job.last_seq, job.last_event_mono):
            try:
                mid = connection.subscribe([events_topic(job)])
            except BrokerError:
                return False                  # which the line's next turn sees as well
            self._probes[job.job_id] = (mid, (job.last_seq, job.last_event_mono), time.monotonic())
        return connection.granted(mid) is not None

    def _check_probes(self, connection: Connection, now: float) -> None:
        if any(now - asked > 2 * PUBACK_TIMEOUT_S and connection.granted(mid) is None
               for mid, _, asked in self._probes.values()):
            raise BrokerError("%s has not answered for %ds" % (
                broker_address(self._line.broker), 2 * PUBACK_TIMEOUT_S))

    def _count(self, word: str) -> None:
        if word not in ("accepted", "filled", "behind"):
            self.drops[word] = self.drops.get(word, 0) + 1

    def drop(self, topic: str, error: Rejected) -> None:
        self._count(error.reason)
        log("dropped a message on %s: %s (others for this reason are counted)" % (
            clean_text(topic)[:100], clean_text(str(error))[:200]), "dropped " + error.reason)

    def take(self, received: Sequence[Tuple[str, bytes, bool]]) -> None:
        """Check messages and store the good ones; every other is counted under its reason.

        What is good is kept until it is stored: the broker has its acknowledgement already.
        """
        for topic, raw, _retained in received:
            if not raw or topic not in self._topics and _root_of(topic) in self._wide:
                continue                      # a cleared retained message; or of a job that is none of ours
            try:
                payload, text = self._accept(topic, raw)
            except Rejected as error:
                self.drop(topic, error)
                continue
            if payload["event"] != "progress" and payload["data"]["attempt_id"] < max(self._keys[payload["job_id"]]):
                self._restore(payload["job_id"])
            if payload["event"] == "state":
                self._states[payload["job_id"]] = (time.monotonic() + HOLE_WAIT_S, payload)
            else:
                self._waiting.append((payload, text))
        if len(self._waiting) >= INBOX_BATCH_COUNT or time.monotonic() >= self._store_at:
            self.store()

    def _restore(self, job_id: str) -> None:
        """An attempt that is over may just have put its last word over what the broker retains: ask the runner of the
        current one to say its own again."""
        job, now = self._registry.job(job_id), time.monotonic()
        if self._line.connection and job.dispatch and job.last_seq > job.seq_base \
                and now - self._restored.get(job_id, -60.0) > HOLE_WAIT_S:
            self._restored[job_id] = now
            self._line.connection.post(*control_message(job, "resend", utc_now(), {"from_seq": job.last_seq}))

    def is_asking(self) -> bool:
        """Whether events are missing that may still come."""
        return not self.subscribed.isdisjoint(self._holes)

    def due(self) -> float:
        """The monotonic time at which store() is to be called; infinity if nothing waits."""
        return self._store_at if self._waiting else float("inf")

    def store(self) -> None:
        """Commit what was taken; MamError leaves it waiting."""
        while self._waiting:
            part = self._waiting[:INBOX_BATCH_COUNT]
            words = self._registry.take_in(part)
            del self._waiting[:INBOX_BATCH_COUNT]
            for (payload, _), word in zip(part, words):
                self._count(word)
                if word == "conflict":
                    log("ALARM: two different events with number %d of job %s" % (payload["seq"], payload["job_id"]))
            jobs = {payload["job_id"] for payload, _ in part}
            self.changed |= jobs
            for job_id in jobs:
                self._look_for_hole(job_id)
            self._store_at = time.monotonic() + INBOX_PAUSE_S

    def _accept(self, topic: str, raw: bytes) -> Tuple[Dict[str, Any], str]:
        known = self._topics.get(topic)
        if known is None:
            raise Rejected("unknown_topic", "not subscribed")
        job_id, prefix, kind = known
        if job_id not in self._keys:
            self._keys[job_id] = self._registry.attempt_keys(job_id)
        try:
            return accept_message(topic, raw, prefix, kind, self._keys[job_id])
        except Rejected:
            raise
        except Exception as error:      # a defect of the checks must not stop the daemon
            raise Rejected("internal", "%s: %s" % (type(error).__name__, error)) from None

    def _missing(self, job: Job) -> Optional[int]:
        """The first number of a job that is missing and not given up; None if none is."""
        whole = self._up_to(self._whole, job)
        missing = self._registry.missing_numbers(job, whole)
        if missing is None and self._up_to(self._told, job) > max(job.last_seq, whole):
            return max(job.last_seq, whole) + 1
        return missing

    @staticmethod
    def _up_to(numbers: Dict[str, Tuple[int, int]], job: Job) -> int:
        attempt, number = numbers.get(job.job_id, (0, 0))
        return number if attempt == job.attempt_id else 0

    def _look_for_hole(self, job_id: str) -> None:
        job, now = self._registry.job(job_id), time.monotonic()
        missing = self._missing(job)
        whole = max(job.last_seq, self._up_to(self._whole, job)) if missing is None else missing - 1
        self._whole[job_id] = (job.attempt_id, whole)
        if missing is None:
            self._holes.pop(job_id, None)
        elif job_id not in self._holes:
            self._holes[job_id] = (missing, 0, now)
            self._ask_again(job_id, now)
        elif missing != self._holes[job_id][0]:      # answers come: they may be many, and are given their time
            self._holes[job_id] = (missing, min(1, self._holes[job_id][1]), now)

    def _ask_again(self, job_id: str, now: float) -> None:
        """Ask the owner of the numbers for those that are missing; after a while write the gap down.

        Only while its topics are subscribed: else no answer could come, however long it is waited for.
        """
        _, asked, since = self._holes[job_id]
        connection = self._line.connection
        moments = (0.0, *RESEND_AT_S, HOLE_GIVEN_UP_S)
        if connection is None or job_id not in self.subscribed or now - since < moments[asked + 1] - moments[asked]:
            return
        job = self._registry.job(job_id)
        missing = self._missing(job)
        if missing is None:
            del self._holes[job_id]
        elif asked < len(RESEND_AT_S):
            self._holes[job_id] = (missing, asked + 1, now)
            if job.remote_keys:
                connection.post(*control_message(job, "resend", utc_now(), {"from_seq": missing}))
        else:
            self._registry.note(job_id, "seq_gap", "daemon", "number %d and maybe more never arrived" % missing,
                                {"from_seq": missing})
            self._whole[job_id] = (job.attempt_id, max(job.last_seq, self._up_to(self._told, job)))    # said once
            del self._holes[job_id]


_Limit = namedtuple("_Limit", "left_s request why")


def limits_of(job: Job, beat: Optional[Beat], watched_s: float, subscribed_s: Optional[float]) -> List[_Limit]:
    """The clocks that run for an open job, with the seconds each has left (DESIGN 9). Pure but for the time.

    T runs from delivery or claim to the first event, idle from then on, renewed by events
    and beats; both count only while somebody looked (`watched_s`) and, for a remote job,
    was subscribed (`subscribed_s`). The wall clock runs, whoever looks, from delivery; on both
    sides of a remote job from the moment its runner has started the command.
    """
    is_remote = job.transport == "remote"
    in_hand = elapsed_s(job.delivered_mono, job.delivered_at)
    if in_hand is None:
        in_hand = elapsed_s(job.claimed_mono, job.claimed_at)
    if in_hand is None:
        return []                               # nobody has it yet: an unclaimed queue waits without a deadline
    if is_remote and job.delivery == "sending" and not job.last_event_mono:       # a runner is being looked for
        wait_s = job.timeout_sec + (job.runner_wait_s or 0.0)
        return [_Limit(wait_s - in_hand, "spawn_failed", "no runner could be reached within %gs" % wait_s)]
    worked_s = elapsed_s(job.claimed_mono, job.claimed_at) if is_remote and job.runner else in_hand
    limits = []
    if worked_s is not None and not (job.delivery == "none" and job.runner):      # (adopted: it waits for a free slot)
        limits.append(_Limit(job.timeout_sec - worked_s, "deadline_timeout", "no end within %gs" % job.timeout_sec))
    ages = [in_hand, elapsed_s(job.last_event_mono, job.last_event_at) if job.last_event_mono else None,
            elapsed_s(beat.touched_mono, beat.touched_at) if beat else None]
    if is_remote and subscribed_s is None:
        if not limits:                          # not even begun, and deaf: even that has an end
            limits.append(_Limit(job.timeout_sec - min(age for age in ages if age is not None), "deadline_timeout",
                                 "nothing could be heard of it for %gs" % job.timeout_sec))
        return limits
    if subscribed_s is not None and is_remote:
        watched_s = min(watched_s, subscribed_s)
    if job.phase:
        return limits                           # the worker is done; checking has the wall clock only
    if not job.last_event_mono:
        limits.append(_Limit(job.ack_timeout_sec - min(in_hand, watched_s), "agent_blocked",
                             "no event within %gs of delivery" % job.ack_timeout_sec))
        return limits
    silence = min(age for age in [watched_s, *ages[1:]] if age is not None)
    limits.append(_Limit(job.idle_timeout_sec - silence, "unresponsive",
                         "no sign of life for %gs" % job.idle_timeout_sec))
    return limits


class Clock:
    """Beats and deadlines of all open jobs: a heap of what is due next, looked at from the registry when due.

    A verdict names the last event it has seen (`expected_last_seq`), so an event that
    comes between the look and the close wins.
    """

    def __init__(self, registry: Registry, settings: Settings, on_wire: Callable[[str], bool],
                 hears: Callable[[Job], bool] = lambda job: True):
        self._registry, self._settings, self._on_wire, self._hears = registry, settings, on_wire, hears
        self.jobs: Dict[str, Job] = {}              # open ones
        self.beats: Dict[str, Beat] = {}
        self.gaps: List[Tuple[float, float]] = []   # (length, end) of when nobody looked, each longer than all after it
        self._heap: List[Tuple[float, str, str]] = []        # (when, deadline or beat, job id)
        self._due: Dict[Tuple[str, str], float] = {}         # the entry of the heap that counts

    def gap(self, length_s: float, now: float) -> None:
        """Nobody looked for a while. For a job that cannot bear so long a gap, what counts silence starts anew.

        A shorter one counts as watched: a daemon that is killed again and again puts off no verdict for ever.
        """
        if length_s <= FRESH_S:
            return                                  # as long as a turn may take on a busy host
        while self.gaps and self.gaps[-1][0] <= length_s:
            self.gaps.pop()
        self.gaps.append((length_s, now))
        for job in list(self.jobs.values()):
            self._plan_deadline(job, now)

    def _watched_s(self, job: Job, now: float) -> float:
        """For how long somebody has looked, without a gap above N (nor above the silence that decides)."""
        bearable = max(FRESH_S, min(job.heartbeat_sec, job.idle_timeout_sec, job.ack_timeout_sec))
        return now - next((end for length, end in reversed(self.gaps) if length > bearable), 0.0)

    def refresh(self, jobs: Sequence[Job], beats: Dict[str, Beat], now: float) -> None:
        """Take in changed jobs, and the beats as they are."""
        before, self.beats = self.beats, beats
        for job in jobs:
            if job.status in TERMINAL_STATUSES:
                self.jobs.pop(job.job_id, None)
                self._due.pop(("deadline", job.job_id), None)
                continue
            self.jobs[job.job_id] = job
            self._plan_deadline(job, now)
        for job_id in set(before) - set(beats):
            self._due.pop(("beat", job_id), None)
        for job_id, beat in beats.items():
            if before.get(job_id) != beat and not self._is_remote(job_id):
                age = elapsed_s(beat.touched_mono, beat.touched_at) or 0.0
                self._plan_beat(beat, now + max(0.0, beat.period_s - age))

    def _is_remote(self, job_id: str) -> bool:
        """Whether a beat is one we heard: its runner gives it, and would seem to live for ever if we did."""
        job = self.jobs.get(job_id)
        return job is not None and job.transport == "remote"

    def _plan(self, kind: str, job_id: str, when: float) -> None:
        import heapq
        if self._due.get((kind, job_id)) != when:
            self._due[(kind, job_id)] = when
            heapq.heappush(self._heap, (when, kind, job_id))

    def _plan_beat(self, beat: Beat, when: float) -> None:
        """A little early rather than late, so that the beats of a second share a commit and a look."""
        grid = min(1.0, beat.period_s / 4)
        self._plan("beat", beat.job_id, when // grid * grid)

    def _plan_deadline(self, job: Job, now: float) -> None:
        limits = self._limits(job, now)
        if limits:
            self._plan("deadline", job.job_id, now + max(0.0, min(limits).left_s))

    def _limits(self, job: Job, now: float) -> List[_Limit]:
        return limits_of(job, self.beats.get(job.job_id), self._watched_s(job, now), elapsed_s(job.subscribed_mono))

    def next_due(self) -> float:
        """The monotonic time at which something is due; infinity if nothing is."""
        return self._heap[0][0] if self._heap else float("inf")

    def turn(self, now: float) -> bool:
        """Do what is due. True if anything was committed."""
        import heapq
        beats: List[str] = []
        deadlines: List[str] = []
        while self._heap and self._heap[0][0] <= now:
            when, kind, job_id = heapq.heappop(self._heap)
            if self._due.get((kind, job_id)) != when:
                continue                            # planned anew since
            del self._due[(kind, job_id)]
            (beats if kind == "beat" else deadlines).append(job_id)
        for job_id in deadlines:     # first of all, so that a busy registry loses none of them
            self._plan("deadline", job_id, now + LOOK_S)
        committed = self._beat([self.beats[job_id] for job_id in beats if job_id in self.beats], now)
        for job_id in deadlines:
            committed |= self._deadline(job_id, now)
        return committed

    def _beat(self, due: Sequence[Beat], now: float) -> bool:
        """Give a sign of life for each worker whose process lives; a beat of a dead one ends."""
        import json
        living = []
        for beat in due:      # first of all, so that a busy registry stops no beat for good
            self._plan_beat(beat, now + beat.period_s)
        for beat in due:
            watch = json.loads(beat.watch) if beat.watch else {}
            alive = is_alive(watch) if watch else True
            if alive is False:
                self._registry.drop_beat(beat, "daemon", "the watched process %d has ended" % watch["pid"])
                self.beats.pop(beat.job_id, None)        # what was armed anew comes back with the next look
            elif alive and not (watch and is_stopped(watch["pid"])):
                living.append(beat)      # (None: in another pid namespace, where `_beat` stands beside it)
        if living:
            self._registry.beat_for(living, self._on_wire)
            touched, moment = utc_now(), instant()
            for beat in living:
                self.beats[beat.job_id] = beat._replace(touched_at=touched, touched_mono=moment)
        return len(due) > 0

    def _deadline(self, job_id: str, now: float) -> bool:
        """Look at a job whose time may be up, as it is now; close it if it is."""
        if time.monotonic() - now > FRESH_S:
            return False        # this very turn was held up (stopped?): the next one knows of the gap
        job = self._registry.job(job_id)
        beat = self._registry.beat(job_id)
        if beat:
            self.beats[job_id] = beat
        if job.status in TERMINAL_STATUSES:
            return False
        self.refresh([job], self.beats, now)
        limits = self._limits(job, now)
        if not limits or min(limits).left_s > 0:
            return False
        verdict = min(limits)
        if verdict.request in ("unresponsive", "agent_blocked") and not self._hears(job):
            self._plan("deadline", job_id, now + LOOK_S)
            return False
        record(self._registry, self._settings, job_id, verdict.request, source="daemon", detail=verdict.why,
               attempt=job.attempt_id, last_seq=job.last_seq)
        return True     # (refused, if an event came in between: it is planned anew already)


class Daemon:
    """The loop: lines, clock, take-over, and the rules of coming and going."""

    def __init__(self, registry: Registry, settings: Settings, lock: FileLock, guest: Optional[Guest] = None):
        """`guest`: the runner whose registry this is; the daemon then stays until that is done."""
        self._registry, self._settings, self._lock = registry, settings, lock
        self._guest = guest or Guest()
        self._wake_fd = self._open_wake()
        self._lines: Dict[Broker, Line] = {}
        self._clock = Clock(registry, settings, self._on_wire, self._hears)
        self._me = identity_of(os.getpid())
        self._version = -1
        self._cursor: Optional[int] = None     # key of the last line of the log that was looked at
        self._dirty = True
        self._debts: List[str] = []            # job ids taken up, when there may be more than these
        self._touch_at = self._takeover_at = 0.0
        self._turned = self._worked = time.monotonic()
        self._described = ""
        self._started_at = utc_now()
        self._build = build_id()
        self._recall()

    def _open_wake(self) -> int:
        """The FIFO through which others wake us. Opened for writing too, so that it never is at its end."""
        path = wake_path(self._registry)
        try:
            os.mkfifo(path, 0o600)
            _give_to_owner(path)
        except FileExistsError:
            pass       # of the daemon before
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def _recall(self) -> None:
        """Go on with the watch of the daemon before: the gaps it knew of, and the one since its last touch.

        Without them (the first on this boot, half a line) nobody has looked so far.
        """
        import json
        length_s = None
        try:
            seen = json.loads(os.pread(self._lock.descriptor, 4096, 0).partition(b"\n")[0])
            length_s = elapsed_s(seen["looked"])
            if length_s is not None:
                self._clock.gaps = [(length, end) for length, end in seen["gaps"]]
        except (ValueError, KeyError, TypeError):
            length_s = None
        self._clock.gap(float("inf") if length_s is None else length_s, time.monotonic())

    def _touch(self) -> None:
        """Say that the loop turns, and keep for the next daemon when it last did."""
        os.utime(self._lock.descriptor)
        line = compact_json({"looked": instant(), "gaps": self._clock.gaps}) + "\n"
        try:
            os.pwrite(self._lock.descriptor, line.encode("ascii"), 0)
        except OSError:
            pass       # a full disk: the next daemon takes its gap for a longer one, which closes nobody

    def run(self) -> int:
        """Until there is nothing to do, or another is to take over, or the registry has gone."""
        code = Exit.OK
        try:
            while not self._turn():
                self._wait()
        except Terminated:
            log("ended by SIGTERM")
        except KeyboardInterrupt:
            code = Exit.INTERRUPTED
        except MamError as error:
            if error.code != "registry_gone":
                raise
            log(error.message)
        self._guest.leave()
        for line in self._lines.values():
            line.close()
        return code

    def line(self, broker: Broker) -> Line:
        if broker not in self._lines:
            self._lines[broker] = Line(self._registry, self._settings, broker, lambda: _write_wake(self._wake_fd),
                                       self._guest)
        return self._lines[broker]

    def _line_to(self, address: str) -> None:
        """A line to a broker where a sender died, so that its session is taken over."""
        host, _, port = address.rpartition(":")
        try:
            broker = broker_settings(self._settings, {"host": host, "port": int(port)})
        except MamError as error:
            log(error.message)
            return
        if broker:
            self.line(broker)

    def _on_wire(self, job_id: str) -> bool:
        job = self._clock.jobs.get(job_id)
        return job is not None and any(line.is_quiet(job_id) and line.carries(job) for line in self._lines.values())

    def _hears(self, job: Job) -> bool:
        """Whether a job's silence is its own: for one on another host, whether its broker still answers us."""
        return job.transport != "remote" or all(
            line.inbox.hears(job) for line in self._lines.values() if line.carries(job))

    def _turn(self) -> bool:
        """One turn of everything. True: leave."""
        now = time.monotonic()
        self._clock.gap(now - self._turned, now)      # stopped, or the host slept
        self._turned = now
        try:
            if now >= self._touch_at:
                self._touch_at = now + TOUCH_S
                self._touch()
                if not self._registry.still_there():
                    raise MamError("the registry has left its path", code="registry_gone")
                if self._time_to_leave(now) and self._leave():
                    return True
            version = self._registry.data_version()
            if version != self._version or self._dirty:
                self._version, self._dirty = version, False
                self._look(now)
                if self._asked_to_leave():
                    return self._leave(True)
            for line in self._lines.values():
                connects = line.connects
                line.turn(now)
                if line.connects != connects or line.dispatcher.changed:
                    self._dirty = True       # subscriptions are made by a look
                    line.dispatcher.changed = False
                if line.inbox.changed:
                    changed, line.inbox.changed = sorted(line.inbox.changed), set()
                    self._clock.refresh(self._registry.jobs_by_id(changed), self._registry.beats(), now)
            if self._clock.turn(now):
                self._dirty = True
            if self._guest.turn(now):
                self._dirty = True
            if now >= self._takeover_at:
                self._takeover_at = now + TAKEOVER_S
                self._take_over()
            elif self._debts and all(line.is_idle() for line in self._lines.values()):
                self._take_up_debts()
            self._describe()
        except MamError as error:
            if error.exit != Exit.NOT_RECORDED or error.code == "registry_gone":
                raise
            log(error.message)               # busy, or a full disk: everything is still owed, and
            time.sleep(LOOK_S)               # nobody else could record a sign of life either
            self._clock.gap(float("inf"), time.monotonic())
            self._dirty = True
        return False

    def _take_over(self) -> None:
        """See to what others have left behind: jobs, commands, debts, connections."""
        for job in list(self._clock.jobs.values()):
            if needs_supervisor(job):
                ensure_supervisor(self._registry, self._settings, job.job_id)
        for job_id, _, run in self._registry.ended_attempts_at_work():
            if is_left_behind(run):
                spawn_self(["_supervise", "--", job_id], own_environment(self._settings),
                           supervisor_log(self._registry))
        self._registry.forget_unanswered(ANSWER_WAIT_S)
        self._debts = []
        self._take_up_debts()
        for line in self._lines.values():
            line.fence()

    def _take_up_debts(self) -> None:
        """Have sent what is owed without a new line in the log; no further if the same debts are still there."""
        found = self._registry.jobs_owing(DEBT_COUNT)
        before, self._debts = self._debts, found if len(found) == DEBT_COUNT else []
        if found == before:
            self._debts = []
        else:
            self._enqueue(self._registry.jobs_by_id(found))

    def _look(self, now: float) -> None:
        """Read what was committed since: jobs with new lines, the beats, the remote jobs."""
        changed: List[str] = []
        if self._cursor is None:
            cursor = self._registry.last_key()
            jobs = self._registry.open_jobs()
            jobs += self._registry.jobs_owing_each_broker()   # for its line, which takes up the rest
            jobs += [job for job in self._registry.heard_jobs() if job.status in TERMINAL_STATUSES]
            self._registry.mark_subscribed(None, None)        # by the daemon before
            for address in self._registry.sender_addresses():
                self._line_to(address)
        else:
            cursor, changed = self._registry.changed_jobs(self._cursor)
            jobs = self._registry.jobs_by_id(changed)
        self._clock.refresh(jobs, self._registry.beats(), now)
        for job in jobs:
            if needs_supervisor(job):
                ensure_supervisor(self._registry, self._settings, job.job_id)
            try:
                broker = broker_of(self._settings, job)
            except MamError as error:
                log(error.message)
                continue
            if broker:
                self.line(broker)
        remote = self._registry.heard_jobs()
        for line in self._lines.values():
            line.inbox.forget_keys(changed)
            line.inbox.watch(remote)
            line.dispatcher.watch(remote)
        self._enqueue(jobs)
        self._cursor = cursor        # last: if anything failed on the way, all of it is looked at again

    def _enqueue(self, jobs: Sequence[Job]) -> None:
        """Have sent what jobs owe: seen by a new line in the log, or (owed again) by nothing but the debt."""
        for line in self._lines.values():
            for job in jobs if line.connection else ():
                if job.wire and line.carries(job):
                    line.enqueue(job.job_id)

    def _wait(self) -> None:
        """Until a wake, something on a connection, the next thing due, or a quarter of a second."""
        import select
        if self._dirty or any(line.connection and line.connection.has_more() for line in self._lines.values()):
            return
        readers: List[Any] = [self._wake_fd]
        writers: List[Any] = []
        for line in self._lines.values():
            socket = line.connection.socket() if line.connection else None
            if socket is not None and line.connection:
                readers.append(socket)
                if line.connection.wants_write():
                    writers.append(socket)
        due = min([self._clock.next_due(), *[line.inbox.due() for line in self._lines.values()]])
        timeout = min(LOOK_S, max(0.0, due - time.monotonic()))
        try:
            ready, _, _ = select.select(readers, writers, [], timeout)
        except (OSError, ValueError):
            return                           # a socket closed under us: the next turn sees the loss
        if self._wake_fd in ready:
            try:
                os.read(self._wake_fd, 4096)
            except BlockingIOError:
                pass       # somebody else has read it: nobody should, and nothing is lost by it
            for line in self._lines.values():
                line.hurry(time.monotonic())

    # -- coming and going -----------------------------------------------------------------

    def _describe(self) -> None:
        """Say in the registry how things stand, when that has changed."""
        lines: Dict[str, Any] = {broker_address(broker): line.describe() for broker, line in self._lines.items()}
        drops: Dict[str, int] = {}
        for line in self._lines.values():
            for reason, count in line.inbox.drops.items():
                drops[reason] = drops.get(reason, 0) + count
        info = DaemonInfo(True, True, self._me, self._build, lines,
                          sum(len(line.inbox.subscribed) for line in self._lines.values()),
                          len(self._clock.beats), self._started_at, drops, self._guest.describe())
        text = compact_json(info._asdict())
        if text != self._described:
            self._described = text
            self._registry.set_meta("daemon", text)

    def _time_to_leave(self, now: float) -> bool:
        if self._guest.stays:
            return self._guest.done()
        if self._registry.has_work(self._can_send(), compact_json(self._me)) \
                or any(line.inbox.is_asking() for line in self._lines.values()):
            self._worked = now
        return now - self._worked > IDLE_LEAVE_S

    def _can_send(self) -> bool:
        """Whether what is owed is a reason to stay: not to a broker that has refused us for good."""
        return any(not line.final for line in self._lines.values())

    def _asked_to_leave(self) -> bool:
        asked = self._registry.meta("daemon_leave")
        if asked is not None:
            self._registry.set_meta("daemon_leave", None)
        return asked == compact_json(self._me) and not self._guest.stays     # (another: it died before it could obey)

    def _leave(self, whatever: bool = False) -> bool:
        """Unlock, look again, take it back if something came in between: no row is left without a daemon."""
        import fcntl
        self._registry.set_meta("daemon", None)
        self._described = ""
        if whatever:       # before the next one may dial: it is to find what we leave on the way
            for broker in list(self._lines):
                self._lines.pop(broker).close()
        fcntl.flock(self._lock.descriptor, fcntl.LOCK_UN)
        if whatever or self._guest.stays or not self._registry.has_work(self._can_send(), compact_json(self._me)):
            return True
        return not self._lock.acquire(0)     # somebody else has started one meanwhile, or we go on


def _write_wake(descriptor: int) -> None:
    try:
        os.write(descriptor, b"w")
    except BlockingIOError:
        pass        # full of wakes


# ==============================================================================
# 12. Following
#
# Followers only read the registry: history first, then what is committed, woken
# by data_version. Events are shown in the order of their numbers; a missing one is
# waited for, for a short while. Whoever watches never closes a job.
# ==============================================================================


class _Track:
    """What a follower knows of one job."""

    __slots__ = ("job_id", "attempt", "seq", "held", "hole_since", "last_news", "saw_event", "final")

    def __init__(self, job_id: str):
        self.job_id = job_id
        self.attempt, self.seq = 0, 0            # of the last event shown
        self.held: List[Event] = []              # behind a hole, ordered
        self.hole_since: Optional[float] = None  # monotonic
        self.last_news = time.monotonic()        # of this job alone: clocks are separate
        self.saw_event = False
        self.final: Optional[Job] = None         # the job, once it has ended


class Follower:
    """The events of some jobs, in (attempt, seq) order, and their ends."""

    def __init__(self, registry: Registry, job_ids: Sequence[str], attempt: Optional[int] = None,
                 token: Optional[str] = None):
        """Follow from the first event on. `attempt`: only this one and later; `token`: only its events."""
        self._registry = registry
        self._tracks = {job_id: _Track(job_id) for job_id in job_ids}
        self._attempt, self._token = attempt or 0, token
        self._cursor = registry.before_first_event(job_ids)
        self._version = -1
        self._all_unknown = True                # nothing was read yet
        self._not_looked_at: set = set()        # jobs with events newer than what was read of the job
        self._checked_path = time.monotonic()
        self._open = set(job_ids)
        self._fresh_ends: List[Job] = []        # not yet asked for by take_ends
        self._behind_hole: set = set()          # jobs with events that wait for a missing one

    @property
    def pending(self) -> List[str]:
        """Jobs that have not ended (or whose last events are not shown yet)."""
        return [job_id for job_id in self._tracks if job_id in self._open]

    @property
    def done(self) -> bool:
        return not self._open

    def track(self, job_id: str) -> _Track:
        return self._tracks[job_id]

    def beat(self, job_id: str) -> Optional[Beat]:
        return self._registry.beat(job_id)

    def registry_is_there(self) -> bool:
        return self._registry.still_there()

    def ended(self) -> List[Job]:
        """The jobs that have ended, in the order in which they were asked for."""
        return [track.final for track in self._tracks.values() if track.final]

    def take_ends(self) -> List[Job]:
        """The jobs whose end and last event were reached since the last call."""
        fresh, self._fresh_ends = self._fresh_ends, []
        return fresh

    def poll(self) -> List[Event]:
        """The events that can be shown now. Cheap when nothing was committed since."""
        now = time.monotonic()
        if now - self._checked_path > 1.0:
            self._checked_path = now
            if not self.registry_is_there():
                raise MamError("the registry %s was removed or replaced while in use" % self._registry.path,
                               exit=Exit.NOT_RECORDED, code="registry_gone")
        shown: List[Event] = []
        version = self._registry.data_version()
        if version != self._version:
            self._version = version
            self._take_in(now, shown)
        for job_id in list(self._behind_hole):
            self._release(self._tracks[job_id], now, shown)
        return shown

    def _take_in(self, now: float, shown: List[Event]) -> None:
        only = next(iter(self._tracks)) if len(self._tracks) == 1 else None
        changed = set(self._tracks) if self._all_unknown else set()
        self._all_unknown = False
        changed |= self._not_looked_at | self._read(only, now, shown)
        jobs = self._registry.jobs_by_id([job_id for job_id in changed if job_id in self._open])
        self._not_looked_at = self._read(only, now, shown)     # an end seen just now has its event here
        for job in jobs:
            track = self._tracks[job.job_id]
            ended = job.status in TERMINAL_STATUSES and self._speaks_for(job)
            track.final = job if ended else None
            self._settle(track)

    def _read(self, only: Optional[str], now: float, shown: List[Event]) -> set:
        """Take in what was logged since the last reading; the jobs it is about."""
        changed = set()
        while True:
            batch = self._registry.events(only, self._cursor, 1000)
            for event in batch:
                self._cursor = event.n
                track = self._tracks.get(event.job_id)
                if track is None:
                    continue
                changed.add(event.job_id)
                if event.seq is not None and self._wanted(event):
                    self._accept(track, event, now, shown)
            if len(batch) < 1000:
                return changed

    def _speaks_for(self, job: Job) -> bool:
        """Whether the end of the job's current attempt is the one that is waited for."""
        return job.attempt_id >= self._attempt and self._token in (None, job.dispatch_token)

    def _wanted(self, event: Event) -> bool:
        if event.attempt_id < self._attempt:
            return False
        return self._token is None or '"dispatch_token":"%s"' % self._token in event.payload

    def _accept(self, track: _Track, event: Event, now: float, shown: List[Event]) -> None:
        if (event.attempt_id, event.seq) <= (track.attempt, track.seq):
            return   # fills a hole that was passed already: it stands in the log
        track.held.append(event)
        track.held.sort(key=lambda held: (held.attempt_id, held.seq))
        self._release(track, now, shown)

    def _release(self, track: _Track, now: float, shown: List[Event]) -> None:
        """Move to `shown` what follows without a hole, or stands behind one waited for long enough."""
        while track.held:
            event = track.held[0]
            if (event.attempt_id, event.seq) <= (track.attempt, track.seq):
                track.held.pop(0)       # written twice
                continue
            follows = (event.seq == track.seq + 1 or only_beats_between(event.payload, track.seq)
                       or not track.saw_event and (self._attempt or self._token))
            if not follows and track.hole_since is None:
                track.hole_since = now
            if not follows and now - (track.hole_since or now) < HOLE_WAIT_S:
                break
            track.hole_since = None
            track.held.pop(0)
            track.attempt, track.seq = event.attempt_id, event.seq
            track.saw_event, track.last_news = True, now
            shown.append(event)
        (self._behind_hole.add if track.held else self._behind_hole.discard)(track.job_id)
        self._settle(track)

    def _settle(self, track: _Track) -> None:
        if track.final and not track.held and track.job_id in self._open:
            self._open.discard(track.job_id)
            self._fresh_ends.append(track.final)


class Patience:
    """A follower's own clocks, per job: they end the following, never the job."""

    def __init__(self, follower: Follower, timeout_s: Optional[float], idle_s: Dict[str, float],
                 first_s: Dict[str, float]):
        """`idle_s`: seconds of silence after an event; `first_s`: before the first; by job, empty for none."""
        self._follower, self._idle_s, self._first_s = follower, idle_s, first_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._next_look = 0.0

    def _beats(self, job_id: str, limit_s: float) -> bool:
        """Whether the job's beat was touched within the limit: silent, but alive."""
        beat = self._follower.beat(job_id)
        age = elapsed_s(beat.touched_mono, beat.touched_at) if beat else None
        return age is not None and age < limit_s

    def exhausted(self) -> Optional[str]:
        """Why to stop waiting, if so."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            return "wall-clock timeout (%gs); still pending: %s" % (
                self._timeout_s or 0, ", ".join(sorted(self._follower.pending)))
        if not self._idle_s or now < self._next_look:
            return None
        self._next_look = now + 0.1
        for job_id in self._follower.pending:
            track = self._follower.track(job_id)
            limit = self._idle_s[job_id] if track.saw_event else self._first_s[job_id]
            if now - track.last_news >= limit and not self._beats(job_id, limit):
                return "idle timeout (%gs, no events) for %s; still pending: %s" % (
                    limit, job_id, ", ".join(sorted(self._follower.pending)))
        return None


class RemoteEar:
    """Whether the daemon hears the followed jobs of other hosts; what it has to say of that comes by `say`.

    A broker that cannot be reached, or refuses us, ends the following before it has begun
    (exit 3); once a job was heard, a lost connection is outlived.
    """

    def __init__(self, registry: Registry, settings: Settings, jobs: Sequence[Job], subscribed: Callable[[Job], None],
                 say: Callable[[str], None]):
        self._registry, self._settings, self._subscribed, self._say = registry, settings, subscribed, say
        self._relieved: set = set()                  # wires for which a daemon with our settings was tried
        self._deaf = {job.job_id: job for job in jobs if job.transport == "remote" and job.status in OPEN_STATUSES}
        self._wires = {job.wire for job in self._deaf.values()}
        self._connects: Dict[str, int] = {}
        self._give_up = time.monotonic() + 3 * CONNACK_TIMEOUT_S
        self._next_look = 0.0

    def look(self, pending: Sequence[str]) -> None:
        """Raises MamError (exit 3) if a job that is still open cannot be heard."""
        now = time.monotonic()
        if not self._wires or now < self._next_look:
            return
        self._next_look = now + 0.1
        lines = daemon_info(self._registry).lines
        for wire in self._wires:
            connects = lines.get(wire, {}).get("connects", 0)
            if connects > self._connects.get(wire, 0) > 0:
                self._say("reconnected to %s" % wire)
            self._connects[wire] = max(connects, self._connects.get(wire, 0))
        for job in self._registry.jobs_by_id(list(self._deaf)):
            if job.subscribed_mono or job.status in TERMINAL_STATUSES:
                self._subscribed(self._deaf.pop(job.job_id))
        for job_id in set(self._deaf).intersection(pending):
            self._check(job_id, lines.get(self._deaf[job_id].wire, {}), now)

    def _check(self, job_id: str, line: Dict[str, Any], now: float) -> None:
        wire = self._deaf[job_id].wire
        if not wire:
            raise MamError("job %s is remote and has no wire" % job_id, exit=Exit.BROKER, code="broker",
                           hint="set MQTT_BROKER before it is registered")
        if line.get("final") or line.get("failures", 0) >= 3 or now > self._give_up:
            if wire not in self._relieved:           # the daemon may be one born before `.mam.env` was put right
                self._relieved.add(wire)
                if relieve_daemon(self._registry, self._settings, self._deaf[job_id]):
                    return
            why = line.get("why") or "no daemon is connected to " + wire
            raise MamError("job %s cannot be heard: %s" % (job_id, why), exit=Exit.BROKER, code="broker",
                           hint="it is recorded, and runs once the broker is there: do not delegate it again; "
                                "`mam watch %s` follows it, `mam cancel %s` ends it" % (job_id, job_id))


def follow(follower: Follower, emit: Callable[[List[Event]], None], enough: Callable[[], bool],
           tick: Callable[[], Optional[str]] = lambda: None) -> Optional[str]:
    """Show events until `enough()`; returns why `tick` ended it early, if it did."""
    while True:
        events = follower.poll()
        if events:
            emit(events)
        if enough():
            return None
        why = tick()
        if why:
            return why
        if not events:
            time.sleep(POLL_S)


# ==============================================================================
# 13. Running
#
# `_run J` is the detached parent of one command. It owns the command's pipe, its
# output file, its exit status and the events that follow from them; followers and
# delegators may come and go around it. It watches the registry: when its attempt
# is ended by somebody else, the command's group is ended too.
# ==============================================================================


class CappedFile:
    """An output file that never grows past its cap: the head stays, then a ring keeps the tail."""

    def __init__(self, path: str, cap: int = OUTPUT_CAP_BYTES):
        self._path = path
        self._cap, self._head = cap, cap // 2
        self._written = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        _give_to_owner(path)
        self.failed = ""       # why writing stopped (a full disk); the command is not held up by it

    def write(self, data: bytes) -> None:
        """Keep output; on a full disk no more of it, for the command must not be held up."""
        while data and not self.failed:
            if self._written < self._head:
                position, room = self._written, self._head - self._written
            else:
                ring = self._cap - self._head
                position = self._head + (self._written - self._head) % ring
                room = self._cap - position
            try:
                os.pwrite(self._descriptor, data[:room], position)
            except OSError as error:
                self.failed = error.strerror or str(error)
                return
            self._written += min(room, len(data))
            data = data[room:]

    def close(self) -> None:
        """Bring a wrapped ring into reading order, with a line that says what is missing."""
        ring = self._cap - self._head
        if self._written > self._cap and not self.failed:
            turn = (self._written - self._head) % ring
            tail = os.pread(self._descriptor, ring, self._head)
            tail = tail[turn:] + tail[:turn]
            left_out = self._written - self._cap
            mark = b"\n[mam: %d bytes left out here]\n" % left_out
            for _ in range(2):       # the line itself takes room, and its length depends on the number
                mark = b"\n[mam: %d bytes left out here]\n" % (left_out + len(mark))
            os.pwrite(self._descriptor, (mark + tail[len(mark):]), self._head)
        os.close(self._descriptor)


class Run:
    """The life of one attempt's command, from the gate to its recorded end."""

    def __init__(self, registry: Registry, settings: Settings, job: Job):
        self._registry, self._settings, self._job = registry, settings, job
        self._child: Any = None
        self._output: Any = None
        self._tail = b""                        # the last of the output, for the last line
        self._exit_status: Optional[int] = None
        self._started = time.monotonic()
        self._version = registry.data_version()
        self._linger_until: Optional[float] = None
        self._retry_at = 0.0                    # the registry failed: do not ask it before then
        self._ended_by_us = self._out_of_time = self._announced = False

    def _paths(self) -> Tuple[str, str]:
        name = "%s.a%d" % (self._job.job_id, self._job.attempt_id)
        return brief_path(self._registry, self._job), os.path.join(self._registry.directory, "output", name + ".log")

    def go(self) -> int:
        """Run the command to its end and record it. The exit code is `_run`'s own."""
        job, registry = self._job, self._registry
        identity = identity_of(os.getpid())
        adopted: List[bool] = []
        self._insist(lambda: adopted.append(
            registry.adopt_run(job.job_id, job.attempt_id, {"supervisor": identity})))
        if not adopted[0]:
            return Exit.REFUSED       # somebody runs it, or it is over: a command never runs twice
        failure = ""
        try:
            failure = self._start(identity)
            if not failure:
                self._watch()
        except Terminated:
            self._insist(lambda: self._say("supervisor_lost", "mam's supervisor of the command was ended by SIGTERM"))
        except OSError as error:
            failure = "%s: %s" % (error.filename or "the command", error.strerror)
        if failure:
            self._insist(lambda: self._say("spawn_failed", failure))
        ignore_sigterm()         # from here on it only ends and records; a TERM must not stop it halfway
        return self._finish()

    def _insist(self, step: Callable[[], Any]) -> None:
        """Do what must be recorded, again and again while the registry is busy or its disk is full.

        Given up only when the registry is gone, or after a day.
        """
        deadline = time.monotonic() + 86400
        while True:
            try:
                step()
                return
            except MamError as error:
                if error.exit != Exit.NOT_RECORDED or error.code == "registry_gone" or time.monotonic() > deadline:
                    raise
            time.sleep(1.0)

    def _start(self, identity: Any) -> str:
        """Bring the command to life; why not, if it fails."""
        job = self._job
        brief, output_path = self._paths()
        _make_private_dir(os.path.dirname(output_path))
        env = environment_of_work(self._settings, worker_variables(self._registry, self._settings, job))
        missing = self._missing_program(job.command, env)
        if missing:
            return missing
        self._output = CappedFile(output_path)
        self._child = GatedChild(job.command, job.workdir, env, brief if job.feed_stdin else os.devnull)
        run = {"supervisor": identity, "command": identity_of(self._child.pid), "group": self._child.pid}
        self._insist(lambda: self._registry.save_run(job, run))
        return self._child.release()

    def _announce(self) -> None:
        """Record that the command runs. A registry that is busy or full is asked again, and ends no command."""
        job = self._job
        self._registry.move_delivery(job.job_id, job.attempt_id, "sending", "sent")
        if self._registry.job(job.job_id).outcome is None:      # the command may have said all by itself already
            beat = {"heartbeat_sec": job.heartbeat_sec, "watch": identity_of(os.getpid())}
            if job.runner:      # adopted, and so started: now the wall clock of both sides begins
                self._say("progress", "the command runs", beat, {"spawned": True})
            else:
                self._say("started", extra=beat)
        self._announced = True
        beat_beside(self._registry, self._settings, job.job_id, identity_of(os.getpid()))
        ensure_daemon(self._registry, self._settings)
        wake_daemon(self._registry)

    def _missing_program(self, command: str, env: Dict[str, str]) -> str:
        """The shell finds a plain first word, or says so before anything is reported as started."""
        word = command.split()[0] if command.split() else ""
        if not os.path.isdir(self._job.workdir):
            return "no folder %s" % self._job.workdir
        if not word.replace("/", "").replace(".", "").replace("_", "").replace("-", "").isalnum():
            return ""     # a variable, a quote, a bracket: the shell's own business
        if command.split(word, 1)[1].lstrip().startswith("("):
            return ""     # a function's definition
        if "/" in word and not os.access(os.path.join(self._job.workdir, word), os.X_OK):
            return "%s: %s" % (word, "not executable" if os.path.exists(
                os.path.join(self._job.workdir, word)) else "not found")      # dash finds it all the same
        with open(os.devnull, "wb") as nowhere:
            found = run_shell('command -v -- %s' % word, self._job.workdir, env, nowhere, 10.0, 1.0)
        return "" if found in (0, None) else "%s: not found" % word      # None: a host too busy to tell

    def _say(self, request: str, detail: str = "", extra: Optional[Dict[str, Any]] = None,
             data: Optional[Dict[str, Any]] = None) -> Transition:
        return record(self._registry, self._settings, self._job.job_id, request, source="_run", detail=detail,
                      data=data, attempt=self._job.attempt_id, extra=extra)

    def _watch(self) -> None:
        """Pump output and look at the clocks until the command has exited or was ended."""
        import select
        poller = select.poll()
        poller.register(self._child.output, select.POLLIN)
        if self._should_end():
            return
        while self._exit_status is None:
            open_pipe = self._pump(poller, 50)
            self._exit_status = self._child.poll()
            if self._exit_status is not None:
                return
            if not open_pipe:
                time.sleep(0.01)          # it closed its output and goes on
            if self._should_end():
                return

    def _pump(self, poller: Any, wait_ms: int) -> bool:
        """Move what is there from the pipe to the file. False: nobody writes any more."""
        if self._child.output is None:
            return False
        if not poller.poll(wait_ms):
            return True
        data = os.read(self._child.output, 65536)
        if not data:
            poller.unregister(self._child.output)
            os.close(self._child.output)
            self._child.output = None
            return False
        self._output.write(data)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        return True

    def _should_end(self) -> bool:
        """Whether the command's group must end now. A registry in trouble stops no command."""
        now = time.monotonic()
        if self._linger_until is not None:
            return now >= self._linger_until
        if now < self._retry_at:
            return False
        try:
            return self._look(now)
        except MamError as error:
            self._retry_at = now + 1.0
            self._complain(error.message)
            return False

    def _complain(self, what: str) -> None:
        """A line for daemon.log. Its disk may be the full one: that must not end the command's supervisor."""
        try:
            os.write(2, ("%s mam _run %s: %s\n" % (utc_now(), self._job.job_id, what)).encode("utf-8", "replace"))
        except OSError:
            pass   # there is nowhere else to say it

    def _look(self, now: float) -> bool:
        """Keep the wall clock, and see whether somebody else ended the attempt."""
        job = self._job
        if now - self._started > job.timeout_sec:
            self._out_of_time = True       # whatever the registry says: recorded once the command is gone
            return True
        if not self._announced:
            self._announce()
        version = self._registry.data_version()
        if version == self._version:
            return False
        self._version = version
        current = self._registry.job(job.job_id)
        if current.attempt_id != job.attempt_id:
            return True
        if current.outcome in TERMINAL_EVENTS and not current.reason:    # the agent's own end
            self._linger_until = now + self._settings.pause("MAM_LINGER_S", LINGER_S)
            return False
        return current.outcome is not None

    def _finish(self) -> int:
        """End the group, keep the rest of the output, record how it ended, deliver."""
        left_running = self._end_command() if self._child else 0
        exited = self._exit_status is not None and not self._ended_by_us
        if self._out_of_time:
            self._insist(lambda: self._say("deadline_timeout", "no end within %gs" % self._job.timeout_sec))
        elif exited and not self._announced:
            self._insist(self._announce)         # it was over before that could be recorded
        if left_running:
            self._insist(lambda: self._registry.note(
                self._job.job_id, "left_running", "_run",
                "%d processes of the command were left behind and ended" % left_running))
        self._insist(lambda: self._registry.end_run(self._job, self._exit_status))
        if exited:
            self._insist(lambda: self._report_exit(self._exit_status or 0))
        deliver_event(self._registry, self._settings, self._registry.job(self._job.job_id), 0)
        return Exit.OK

    def _end_command(self) -> int:
        """End what lives of the group and take in the last output; how many had been left behind."""
        import select
        poller = select.poll()
        if self._child.output is not None:
            poller.register(self._child.output, select.POLLIN)
        self._ended_by_us = self._exit_status is None
        left_running = 0 if self._ended_by_us else len(group_members(self._child.pid))

        def tick() -> None:
            while self._child.output is not None and poller.poll(0) and self._pump(poller, 0):
                pass
            if self._exit_status is None:
                self._exit_status = self._child.poll()
        end_group(self._child.pid, self._settings.pause("MAM_TERM_GRACE_S", TERM_GRACE_S), tick)
        tick()
        self._output.close()
        if self._output.failed:
            self._complain("output not kept: %s" % self._output.failed)
        return left_running

    def _report_exit(self, status: int) -> None:
        """The exit status decides, unless the agent has said how it ended."""
        if self._registry.job(self._job.job_id).outcome is not None:
            return
        data = {"exit_status": status}
        if status == 0:
            self._say("completed", self._last_line() or "Job %s completed" % self._job.job_id, data=data)
            return
        how = "exit status %d" % status if status > 0 else "ended by signal %d" % -status
        last = self._last_line()
        self._say("error", how + (": " + last if last else ""), data=data)

    def _last_line(self) -> str:
        return last_line(self._settings, self._tail)


def start_run(registry: Registry, settings: Settings, job: Job) -> bool:
    """Have an attempt's command run, once, by a `_run` of its own. False: it is on its way already, or over.

    A crash in between leaves it `sending`: it then never runs, for nobody can tell whether it did.
    """
    if not registry.move_delivery(job.job_id, job.attempt_id, "none", "sending"):
        return False
    spawn_self(["_run", "--attempt-id", str(job.attempt_id), "--", job.job_id], own_environment(settings),
               supervisor_log(registry))
    return True


def end_orphan(registry: Registry, settings: Settings, job: Job) -> None:
    """End the group of a command whose `_run` is dead, then say so: its exit status is lost for good.

    An end that was recorded in its last moments wins: the verdict names the last event.
    """
    job = registry.job(job.job_id)       # read after its death: nothing can be added by it now
    if not orphaned(job):
        return
    end_command(settings, job.run)
    record(registry, settings, job.job_id, "supervisor_lost", source="delegate_wrapper", attempt=job.attempt_id,
           last_seq=job.last_seq, detail="mam's supervisor of the command died; the command was ended")
    registry.end_run(job, None)
    deliver_event(registry, settings, job, 0, attempts=1)


def end_command(settings: Settings, run_text: Optional[str]) -> None:
    """End the process group of a command, if its leader is still the process that was recorded."""
    import json
    run = json.loads(run_text) if run_text else {}
    members = group_members(run["group"]) if "group" in run else []
    same_boot = (run.get("command") or {}).get("boot") == boot_id()
    if members and same_boot and is_alive(run["command"]) is not None:
        leader = identity_of(run["group"])
        if leader is None or leader == run["command"]:   # a dead leader's pid is not reused while its group lives
            end_group(run["group"], settings.pause("MAM_TERM_GRACE_S", TERM_GRACE_S))


def last_line(settings: Settings, tail: bytes) -> str:
    """The last line of an output, fit to travel. A line whose beginning is missing is none: half a secret
    is not recognised, and so the line is cleaned before it is cut."""
    lines = tail.decode("utf-8", "replace").strip().splitlines()
    if not lines or len(tail) >= TAIL_BYTES and len(lines) == 1:
        return ""
    return cut_utf8(settings.generalise(lines[-1].strip()), 1000)


def brief_path(registry: Registry, job: Job) -> str:
    return os.path.join(registry.directory, "briefs", "%s.a%d.md" % (job.job_id, job.attempt_id))


def write_brief(registry: Registry, job: Job) -> str:
    """Put the prompt where the agent reads it, byte for byte."""
    path = brief_path(registry, job)
    _make_private_dir(os.path.dirname(path))
    write_atomic(path, registry.prompt(job.job_id).encode("utf-8", "surrogatepass"))
    _give_to_owner(path)
    return path


def launcher_path(registry: Registry, settings: Settings) -> str:
    """A small script that runs this mam on this registry, at a path without spaces.

    Agents expand MAM_PUBLISH_CMD unquoted, and type the path into a shell.
    """
    import hashlib
    text = "#!/bin/sh\nMAM_REGISTRY_DIR=%s MAM_REAL_ROOT=%s exec %s \"$@\"\n" % (
        _quoted(registry.directory), _quoted(settings.workspace), " ".join(_quoted(word) for word in self_command()))
    name = "mam-" + hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    folders = [os.path.join(registry.directory, "bin"), os.path.join(settings.home, ".cache", "mam"),
               "/tmp/mam-%d" % os.geteuid()]
    for folder in folders:
        if not folder.replace("/", "").replace(".", "").replace("-", "").replace("_", "").isalnum():
            continue
        try:
            os.makedirs(os.path.dirname(folder), exist_ok=True)
            _make_private_dir(folder)
            if os.stat(folder).st_uid not in (os.geteuid(), os.stat(registry.directory).st_uid):
                continue
            path = os.path.join(folder, name)
            if not os.path.exists(path):
                write_atomic(path, text.encode("utf-8", "surrogateescape"), 0o700)
                _give_to_owner(path)
            return path
        except OSError:
            continue   # not writable: try the next place
    raise MamError("no folder without spaces to put a launcher into (tried %s)" % ", ".join(folders),
                   code="no_launcher")


def _quoted(word: str) -> str:
    return "'%s'" % word.replace("'", "'\\''")


def worker_variables(registry: Registry, settings: Settings, job: Job) -> Dict[str, str]:
    """What a worker is told by its environment (DESIGN 11)."""
    return {"JOB_ID": job.job_id, "MAM_JOB_ID": job.job_id, "MAM_JOB_BRIEF": brief_path(registry, job),
            "MAM_PUBLISH_CMD": "%s publish --job=%s" % (launcher_path(registry, settings), job.job_id),
            "MAM_ATTEMPT_ID": str(job.attempt_id), "MAM_DISPATCH_TOKEN": job.dispatch_token,
            "MAM_REGISTRY_DIR": registry.directory, "MAM_REAL_ROOT": settings.workspace}


# ==============================================================================
# 14. Sessions
#
# Agents in panes of tmux or herdr: started, prompted, stopped, resumed. A driver
# knows one multiplexer; all else is written once against it. Keystrokes prove
# nothing: a pane is looked at before anything is typed, the text goes in once, and
# whether it arrived is told by the agent's own `started` alone (DESIGN 12).
# ==============================================================================

PASTE_SETTLE_S = 0.3     # an Enter right behind a paste is swallowed by several agents
LOOK_AGAIN_S = 0.15      # between two looks at a screen; spinners turn faster
SESSION_WAIT_S = 2.0     # for a session to come to rest before it is called busy
BARE_WAIT_S = 0.6        # a screen on which no composer is known must have stood still for this long
START_WAIT_S = 15.0      # for an agent that has just been started to draw its composer (opencode: 6 to 12 s)
SEEN_WAIT_S = 5.0        # for a pasted text to be seen in a composer; an agent under load draws it late
DIALOG_WAIT_S = 10.0     # for a human to answer a dialog that came up behind our paste
ENTER_WAITS_S = (0.8, 1.2, 2.0, 3.0)      # an Enter, then so long for the text to leave the composer
STOP_GRACE_S = 8.0       # for an agent to leave by itself
PANE_WIDTH_CHARS, PANE_HEIGHT_LINES = 120, 50     # wider, and opencode puts a panel beside its composer

# What an agent of each kind is: data only. Lists of words are parts of argv, in which {prompt}, {id}
# (of a conversation), {transcript} (its file) and {publish} (the program that publishes) are filled in;
# `dialogs`, `busy`, `composer`, `hints` and `goodbye` are regular expressions on rows of the screen. `source`
# says whether it was tried by running the agent, or taken from its documentation.
_GLYPH = "[>\u276f\u203a\u00bb](?!\\s*\\d+[.)])"          # a prompt sign, not a menu's
_PASTED = r"\[(?:Pasted (?:text|Content|~?\d+)|paste #)[^\]]*\]"   # agents show a long paste by its size alone
_CONFIRM = r"Enter to confirm|Press enter to continue|Esc to cancel"    # stands under a dialog, not under a composer
_NO_PROFILE: Dict[str, Any] = {
    "also": [], "command": [], "prompt": [], "headless": [], "resume": [], "resume_prompt": [], "preset": [],
    "yolo": [], "allow": [], "variable": "", "transcript": [], "dialogs": [], "busy": ["esc to interrupt"],
    "composer": "", "hints": [], "exit": ["C-c", "C-c"], "goodbye": "", "clear": [], "env": {}, "herdr_kind": "",
    "source": "documented"}
_ASKS = {"name": "permission", "text": r"Do you want to (?:proceed|make this edit|create|allow|run)|Permission required"
                                       r"|Would you like to (?:run|make)|Allow command\?",
         "do": "answer it in the pane, or by mam session send S --keys"}
_TRUST = {"name": "trust", "text": "Do you trust the |or one you trust\\?|I trust this folder",
          "do": "answer it in the pane, or by mam session send S --keys"}
_CHOICE = {"name": "choice",
           "text": "^\\s*[>\u276f\u203a]\\s*\\d+[.)]\\s|\\[y/N\\]\\s*$|\\(y/n\\)\\s*$|" + _CONFIRM,
           "do": "answer it in the pane, or by mam session send S --keys"}
AGENT_PROFILES: Dict[str, Dict[str, Any]] = {
    "claude-code": {
        "also": ["claude"], "command": ["claude"], "prompt": ["{prompt}"], "headless": ["claude", "-p", "{prompt}"],
        "resume": ["--resume", "{id}"], "resume_prompt": ["--resume", "{id}", "{prompt}"],
        "preset": ["--session-id", "{id}"], "yolo": ["--dangerously-skip-permissions"],
        "allow": ["--allowedTools=Bash({publish}:*)"],     # with a `=`: the words after it are not taken for rules
        "variable": "CLAUDE_CODE_SESSION_ID", "transcript": ["~/.claude/projects/*/{id}.jsonl"],
        "dialogs": [
            {"name": "trust", "text": "Do you trust the files|or one you trust\\?|Yes, I trust this folder",
             "do": "answer it in the pane, or set projects[DIR].hasTrustDialogAccepted in ~/.claude.json beforehand"},
            {"name": "bypass", "text": "WARNING: .*Bypass Permissions mode|running in Bypass Permissions mode",
             "do": "answer it in the pane; it comes of --yolo, and `No, exit` is preselected"},
            {"name": "api-key", "text": "Detected a custom API key",
             "do": "answer it in the pane; `No` is preselected"},
            {"name": "onboarding", "text": "Choose the text style|Select login method",
             "do": "run the agent once by hand and finish its first steps"}, _ASKS],
        "composer": "^[\\s\u2502|]*" + _GLYPH, "hints": ['^Try "'], "goodbye": r"claude --resume ([0-9A-Za-z-]{8,64})",
        "clear": ["CLAUDECODE", "CLAUDE_CODE_CHILD_SESSION", "CLAUDE_CODE_SESSION_ID", "CLAUDE_CODE_ENTRYPOINT"],
        "herdr_kind": "claude", "source": "tried"},
    "codex": {
        # Without --no-daemon the tool shells of one pane see another pane's environment.
        "command": ["codex", "--no-daemon"], "prompt": ["{prompt}"],
        "headless": ["codex", "exec", "--skip-git-repo-check", "{prompt}"],
        "resume": ["resume", "{id}"], "resume_prompt": ["resume", "{id}", "{prompt}"],
        "yolo": ["--dangerously-bypass-approvals-and-sandbox"], "variable": "CODEX_THREAD_ID",
        "transcript": ["~/.codex/sessions/*/*/*/rollout-*-{id}.jsonl"], "exit": ["C-c"],
        "dialogs": [
            {"name": "trust", "text": "Do you trust the contents of this directory|allow Codex to work in this folder",
             "do": "answer it in the pane, or set [projects.\"DIR\"] trust_level=\"trusted\" in ~/.codex/config.toml"},
            {"name": "login", "text": "Sign in with ChatGPT", "do": "run the agent once by hand and sign in"},
            {"name": "update", "text": "Update available|Skip until next version", "do": "answer it in the pane"},
            _ASKS],
        "composer": "^[\\s\u258c\u2502|]*" + _GLYPH, "goodbye": r"codex resume ([0-9A-Za-z-]{8,64})",
        "hints": ["^Ask Codex"], "clear": ["CODEX_THREAD_ID", "CODEX_SESSION_ID"], "herdr_kind": "codex",
        "source": "tried"},
    "opencode": {
        "command": ["opencode"], "prompt": ["--prompt", "{prompt}"], "headless": ["opencode", "run", "{prompt}"],
        "resume": ["-s", "{id}"],                          # with --prompt it resumes and never sends the prompt
        "yolo": ["--auto"], "variable": "OPENCODE_SESSION_ID", "busy": ["esc (?:to )?interrupt"], "dialogs": [_ASKS],
        "composer": "^[\\s\u2502|]*\u2503(?!\\s+\\S+ \u00b7 )", "hints": ["^Ask anything"], "exit": ["C-c"],
        "goodbye": r"opencode -s (ses_\w+|[0-9A-Za-z-]{8,64})", "clear": ["OPENCODE", "OPENCODE_PID"],
        "herdr_kind": "opencode", "source": "tried"},
    "hermes": {
        "command": ["hermes", "chat"], "headless": ["hermes", "chat", "-q", "{prompt}", "-Q"], "resume": ["-r", "{id}"],
        "yolo": ["--yolo"], "variable": "HERMES_SESSION_ID", "dialogs": [_ASKS], "clear": ["HERMES_SESSION_ID"],
        "goodbye": r"hermes (?:chat )?(?:-r|--resume) (\S{8,64})", "herdr_kind": "hermes"},
    "pi": {
        "command": ["pi"], "prompt": ["{prompt}"], "headless": ["pi", "-p", "{prompt}"],
        "resume": ["--session", "{transcript}"], "resume_prompt": ["--session", "{transcript}", "{prompt}"],
        "transcript": ["~/.pi/agent/sessions/*/*_{id}.jsonl"], "busy": ["Working\\.\\.\\."],
        "composer": "rules", "herdr_kind": "pi", "source": "tried"},
    "generic": {},
}
Profile = namedtuple("Profile", "name also command prompt headless resume resume_prompt preset yolo allow variable "
                                "transcript dialogs busy composer hints exit goodbye clear env herdr_kind source")

# Variables by which a process knows the conversation it runs in; those of the profiles come on top.
_SESSION_VARIABLES = ("CLAUDE_CODE_SESSION_ID", "ANTIGRAVITY_CONVERSATION_ID", "HERMES_SESSION_ID", "GROK_SESSION_ID",
                      "OPENCODE_SESSION_ID", "CODEX_THREAD_ID")


def agent_profiles(settings: Settings) -> Dict[str, Profile]:
    """The profiles of all known agents: mam's own, with what `.mam/agents.json` adds or overrides."""
    raw = {name: {**_NO_PROFILE, **fields} for name, fields in AGENT_PROFILES.items()}
    folders = [settings.registry_dir]
    if os.path.basename(settings.registry_dir).startswith("runner-"):
        folders.append(os.path.dirname(settings.registry_dir))
    path = next((path for path in (os.path.join(folder, "agents.json") for folder in folders)
                 if os.path.lexists(path)), "")
    if path:
        for name, fields in _read_profiles(path).items():
            like = fields.pop("like", name)
            if like not in raw:
                like = "generic"
            raw[name] = {**raw[like], **({"also": []} if like != name else {}), **fields}
    return {name: Profile(name=name, **fields) for name, fields in raw.items()}


def _read_profiles(path: str) -> Dict[str, Dict[str, Any]]:
    """The user's own profiles, checked; MamError that names the agent and the field."""
    try:
        with open(path, "rb") as file:
            found = parse_json(file.read(MAX_PAYLOAD_BYTES + 1))
    except OSError as error:
        raise MamError("cannot read %s: %s" % (path, error.strerror), code="bad_profile") from None
    except BadJson as error:
        raise MamError("%s: %s" % (path, error), code="bad_profile") from None
    if not isinstance(found, dict):
        raise MamError("%s: it must be an object of agents" % path, code="bad_profile",
                       hint='for example {"my-agent": {"command": ["my-agent"], "prompt": ["{prompt}"]}}')
    for name, fields in found.items():
        if not is_name(name) or not isinstance(fields, dict):
            raise MamError("%s: agent %.80r must be a name with an object" % (path, name), code="bad_profile")
        for field, value in fields.items():
            why = _wrong_in_profile(field, value)
            if why:
                raise MamError("%s: %s.%s %s" % (path, name, clean_text(field)[:40], why), code="bad_profile",
                               hint="the fields are: like, %s" % ", ".join(_NO_PROFILE))
        like = fields.get("like")
        if like is not None and like not in AGENT_PROFILES and like not in found:
            raise MamError("%s: %s.like is %.40r, which is no agent" % (path, name, like), code="bad_profile")
    return {**found}


def _wrong_in_profile(field: str, value: Any) -> str:
    """What is wrong with a field of a user's profile; "" if it can be used."""
    if field != "like" and field not in _NO_PROFILE:
        return "is no field of a profile"
    form = "" if field == "like" else _NO_PROFILE[field]
    if field == "dialogs":
        if not isinstance(value, list) or not all(
                isinstance(one, dict) and sorted(one) == ["do", "name", "text"] and
                all(isinstance(text, str) for text in one.values()) for one in value):
            return "must be a list of objects with name, text and do"
        patterns = [one["text"] for one in value]
    elif isinstance(form, list):
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            return "must be a list of strings"
        patterns = value if field in ("busy", "hints") else []
    elif isinstance(form, dict):
        if not isinstance(value, dict) or not all(
                isinstance(text, str) and is_name(name) for name, text in value.items()):
            return "must be an object of strings"
        patterns = []
    elif not isinstance(value, str):
        return "must be a string"
    else:
        patterns = [value] if field in ("composer", "goodbye") else []
    if field == "clear" and not all(is_name(word) for word in value):
        return "must be names of variables"
    return _bad_pattern(patterns)


def _bad_pattern(patterns: Sequence[str]) -> str:
    import re
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            return "has a regular expression that cannot be used, %.60r: %s" % (pattern, error)
    return ""


def profile_of(settings: Settings, agent: str, command: str = "") -> Profile:
    """The profile of an agent, by the program in the foreground if that is a known one; else the generic one."""
    profiles = agent_profiles(settings)
    for word in (command, agent):
        for profile in profiles.values():
            if word and (word == profile.name or word in profile.also or word in profile.command[:1]):
                return profile
    return profiles["generic"]


def known_profile(settings: Settings, agent: str) -> Profile:
    """The same for an agent that is to be started: one that is not known is an error."""
    profiles = agent_profiles(settings)
    for profile in profiles.values():
        if agent == profile.name or agent in profile.also:
            return profile
    raise MamError("no agent %.60r is known" % agent, exit=Exit.USAGE, code="bad_agent",
                   hint="known are %s; .mam/agents.json adds others" % ", ".join(sorted(profiles)))


class SessionError(Exception):
    """A session that cannot do what is asked now. `busy`: it may later on. `code`: gone, dead, dialog, ..."""

    def __init__(self, why: str, hint: str = "", busy: bool = True, code: str = ""):
        super().__init__(why)
        self.why, self.hint, self.busy, self.code = why, hint, busy, code

    def as_mam_error(self, code: str = "") -> MamError:
        return MamError(self.why, hint=self.hint, exit=Exit.BUSY if self.busy else Exit.FAILED,
                        code=code or ("session_busy" if self.busy else "no_session"))


# -- drivers: what each multiplexer does for us --------------------------------------------------

# A pane as it is now. rows: its screen; solid: the same without what is drawn dim or inverse (hints, cursors);
# cursor: (column, row), None if hidden or unknown; names: the sessions under which the pane is known;
# agent: what herdr has to say of it.
Look = namedtuple("Look", "pane dead exit_status in_mode command pid socket rows solid cursor names agent")


def split_shades(text: str) -> Tuple[List[str], List[str]]:
    """A captured screen with its SGR sequences as (rows of text, the same with dim and inverse parts blank)."""
    import re
    plain, solid, at, pale = [], [], 0, [False, False]
    sequences = r"\x1b\[([0-9;:]*)m|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][0-9A-Z]|[\x0e\x0f]|\Z"
    for found in re.finditer(sequences, text):
        part = text[at:found.start()]
        at = found.end()
        plain.append(part)
        solid.append("".join([character if character == "\n" else " " for character in part]) if any(pale) else part)
        shades = "" if found.group(1) is None else found.group(1) or "0"
        codes = re.sub(r"[345]8[;:](?:5[;:]\d+|2(?:[;:]\d*){3,4})", "colour", shades).split(";")
        for code in codes if shades else ():
            pale = [False, False] if code in ("", "0") else [code == "2" or pale[0] and code != "22",
                                                             code == "7" or pale[1] and code != "27"]
    return "".join(plain).split("\n"), "".join(solid).split("\n")


class TmuxDriver:
    """The user's tmux server, or the one of a socket's name or path."""
    kind = "tmux"
    one_line = False           # whether a pasted text must not have line breaks
    _FORMAT = "\t".join("#{%s}" % name for name in (
        "pane_id", "pane_dead", "pane_dead_status", "pane_in_mode", "pane_current_command", "pane_pid", "socket_path",
        "cursor_x", "cursor_y", "cursor_flag", "session_name", "pane_active", "window_active"))

    def __init__(self, settings: Settings, socket: str = ""):
        self.socket = socket or settings.get("MAM_TMUX_SOCKET")
        self._own_pane = (settings.get("TMUX_PANE"), settings.get("TMUX").partition(",")[0])
        self._tmux = ["tmux"] + (["-S" if "/" in self.socket else "-L", self.socket] if self.socket else [])
        self._settings = settings

    def _run(self, *arguments: str, stdin: Optional[bytes] = None, env: Optional[Dict[str, str]] = None) -> str:
        status, out, err = run_program(self._tmux + list(arguments), stdin, 10.0, env)
        if status != 0:
            why = err.strip() or "exit status %d" % status
            gone = any(word in why for word in ("can't find", "no server running", "No such file or directory",
                                                "Connection refused", "server exited", "lost server", "no current"))
            raise SessionError("tmux %s: %s" % (arguments[0], why), busy=False, code="gone" if gone else "failed")
        return out

    def target(self, name: str) -> str:
        """How the pane of a session that mam has not started is addressed."""
        return name if name.startswith("%") else "=%s:" % name

    def look(self, target: str, patience: int = 2) -> Look:
        """The pane as it is now; SessionError (`gone`) if there is none."""
        out = self._run("display-message", "-p", "-t", target, self._FORMAT, ";",
                        "capture-pane", "-p", "-e", "-t", target)
        line, _, screen = out.partition("\n")
        fields = line.split("\t")
        if len(fields) != 13 or not fields[0]:
            raise SessionError("there is no pane %s" % target, busy=False, code="gone")
        if fields[1] == "1" and not fields[2] and patience:       # not yet reaped; tmux can lose it for good
            time.sleep(0.05)
            return self.look(target, patience - 1)
        if fields[1] == "1":        # the line that says so has scrolled the screen
            screen = self._run("capture-pane", "-p", "-e", "-S", "-%d" % PANE_HEIGHT_LINES, "-t", target)
        rows, solid = split_shades(screen)
        names = ["tmux:" + fields[0]]
        if fields[11] == fields[12] == "1" and is_name(fields[10]):
            names.append("tmux:" + fields[10])
        cursor = (int(fields[7]), int(fields[8])) if fields[9] == "1" else None
        return Look(fields[0], fields[1] == "1", fields[2], fields[3] not in ("", "0"), fields[4].lstrip("-"),
                    int(fields[5] or 0), fields[6], rows, solid, cursor, names, {})

    def is_own(self, look: Look) -> bool:
        """Whether it is the pane in which this very command runs."""
        return (look.pane, look.socket) == self._own_pane

    def create(self, name: str, script: str, workdir: str) -> str:
        """Start a script as the process of a pane in a session of its own: the pane. It stays when the script ends."""
        words = ["new-session", "-d", "-P", "-F", "#{pane_id}", "-s", name, "-x", str(PANE_WIDTH_CHARS),
                 "-y", str(PANE_HEIGHT_LINES), "-c", workdir, "/bin/sh", script, ";",
                 "set-option", "-p", "-t", "=%s:" % name, "remain-on-exit", "on"]
        env = environment_of_work(self._settings, {})      # a new server keeps it for all its panes
        try:
            return self._run(*words, env=env).strip()
        except SessionError as error:
            if error.code != "gone":
                error.hint = "choose another name; that one was not started by mam" if "duplicate" in error.why else ""
                raise
        time.sleep(0.3)                                    # a server that was just going takes its time
        return self._run(*words, env=env).strip()

    def leave_mode(self, pane: str) -> None:
        self._run("send-keys", "-t", pane, "-X", "cancel")

    def type(self, look: Look, text: str) -> bool:
        """Put a text into the pane as one bracketed paste. False: Enter is still to be pressed."""
        buffer = "mam-" + random_hex(12)
        self._run("load-buffer", "-b", buffer, "-", stdin=text.encode("utf-8"))
        self._run("paste-buffer", "-p", "-d", "-b", buffer, "-t", look.pane)
        return False

    def press(self, pane: str, keys: Sequence[str]) -> None:
        self._run("send-keys", "-t", pane, *keys)

    def capture(self, pane: str, lines: int) -> str:
        """The text of the screen; with `lines`, that many lines of history before it."""
        return self._run("capture-pane", "-p", "-J", "-t", pane, *(["-S", "-%d" % lines] if lines else []))

    def kill(self, pane: str, workspace: str = "") -> None:
        self._run("kill-pane", "-t", pane)


_HERDR_KEYS = {"Enter": "enter", "Escape": "esc", "Up": "up", "Down": "down", "Left": "left", "Right": "right",
               "Tab": "tab", "BSpace": "backspace", "Space": "space"}


class HerdrDriver:
    """herdr by its command line, 0.7.5 or later: JSON envelopes, errors on stderr (notes, section 1).

    `socket`: a path, or the name of one of its sessions.
    """
    kind = "herdr"
    one_line = True            # `pane send-text` puts no brackets around it

    def __init__(self, settings: Settings, socket: str = ""):
        self.socket = socket
        self._herdr = [settings.get("HERDR_BIN_PATH", "herdr")]
        self._env: Optional[Dict[str, str]] = None
        if "/" in socket:
            self._env = {**environment_of_work(settings, {}), "HERDR_SOCKET_PATH": socket}
        elif socket:
            self._herdr += ["--session", socket]
        self._own_pane = settings.get("HERDR_PANE_ID")
        self._settings = settings

    def _run(self, *arguments: str, env: Optional[Dict[str, str]] = None) -> str:
        import json
        status, out, err = run_program(self._herdr + list(arguments), None, 30.0, env or self._env)
        if status == 0:
            return out
        code, why = "failed", err.strip() or "exit status %d" % status
        for line in (err + "\n" + out).splitlines():
            try:
                said = json.loads(line)["error"]
                code, why = str(said["code"]), "%s (%s)" % (said["message"], said["code"])
            except (ValueError, KeyError, TypeError):
                continue      # usage errors, and whatever else stands there, are plain text
        gone = code in ("pane_not_found", "workspace_not_found", "agent_not_found", "server_not_running",
                        "agent_pane_not_found", "server_unavailable")
        busy = code in ("agent_blocked", "agent_not_ready", "agent_pane_busy", "agent_not_idle")
        hint = "install herdr >= 0.7.5, or use tmux" if status == 127 else ""
        raise SessionError("herdr %s: %s" % (" ".join(arguments[:2]), why), hint, busy,
                           "no_server" if code.startswith("server_") else "gone" if gone else code)

    def _ask(self, *arguments: str, env: Optional[Dict[str, str]] = None) -> Dict[str, Any]:
        """The `result` of a command's envelope; SessionError for what is none."""
        import json
        out = self._run(*arguments, env=env)
        try:
            result = json.loads(out)["result"]
            if isinstance(result, dict):
                return result
        except (ValueError, KeyError, TypeError):
            pass      # told below
        raise SessionError("herdr %s answered %.60r" % (" ".join(arguments[:2]), out), busy=False, code="failed")

    def target(self, name: str) -> str:
        """The pane of an agent's name, a pane's label, or a kind of agent of which there is one."""
        try:
            agents, panes = self._ask("agent", "list").get("agents") or [], self._panes()
        except SessionError as error:
            if error.code == "no_server":
                raise SessionError(error.why, busy=False, code="gone") from None
            raise
        spaces = [] if any(pane.get("label") == name for pane in panes) else self._spaces(name)
        for field, rows in (("name", agents), ("label", panes), ("agent", agents), ("workspace_id", panes)):
            wanted = spaces if field == "workspace_id" else [name]
            found = sorted({str(row["pane_id"]) for row in rows if row.get(field) in wanted})
            if len(found) == 1:
                return found[0]
            if found:
                raise SessionError("%d panes of herdr are called %s: %s" % (len(found), name, ", ".join(found)),
                                   "give one of them a name of its own: herdr agent rename", False, "ambiguous")
        raise SessionError("herdr has no agent or pane %s" % name, busy=False, code="gone")

    def _spaces(self, name: str) -> List[str]:
        spaces = self._ask("workspace", "list").get("workspaces") or []
        return [space["workspace_id"] for space in spaces if space.get("label") == name]

    def _panes(self) -> List[Dict[str, Any]]:
        return self._ask("pane", "list").get("panes") or []

    def look(self, target: str) -> Look:
        """The pane as it is now; SessionError (`gone`) if there is none."""
        try:
            pane = next((pane for pane in self._panes() if pane.get("pane_id") == target), None)
        except SessionError as error:
            code = "gone" if error.code == "no_server" else error.code
            raise SessionError(error.why, error.hint, error.busy, code) from None
        if pane is None:
            raise SessionError("herdr has no pane %s" % target, busy=False, code="gone")
        info = self._ask("pane", "process-info", "--pane", target).get("process_info") or {}
        front = info.get("foreground_processes") or [{}]
        argv = front[-1].get("argv") or [""]
        command = os.path.basename(str(front[-1].get("name") or front[-1].get("argv0") or argv[0]))
        rows = self._run("pane", "read", target, "--source", "visible", "--lines", "200").split("\n")
        names = [word for word in (pane.get("label"), pane.get("name")) if isinstance(word, str) and is_name(word)]
        return Look(target, False, "", False, command.lstrip("-"), int(info.get("shell_pid") or 0), self.socket,
                    rows, rows, None, ["herdr:" + name for name in names], pane)

    def is_own(self, look: Look) -> bool:
        return bool(self._own_pane) and look.pane == self._own_pane

    def create(self, name: str, script: str, workdir: str) -> str:
        """Start a script as the process of the root pane of a workspace of its own: the pane. A shell is there
        first, and becomes the script."""
        words = ["workspace", "create", "--cwd", workdir, "--label", name, "--no-focus"]
        try:
            made = self._ask(*words)
        except SessionError as error:
            if error.code != "no_server":
                raise
            self._start_server()
            made = self._ask(*words)
        pane = str(made["root_pane"]["pane_id"])
        self._run("pane", "run", pane, "exec /bin/sh " + _quoted(script))
        return pane

    def _start_server(self) -> None:
        """`herdr server` stays in the foreground: it gets a session of its own, and is polled."""
        spawn_detached([*self._herdr, "server"], self._env or environment_of_work(self._settings, {}))
        deadline = time.monotonic() + 10.0
        while True:
            try:
                self._run("status", "server", "--json")
                self._run("workspace", "list")
                return
            except SessionError as error:
                if time.monotonic() > deadline:
                    raise SessionError("herdr's server does not come up: %s" % error.why, busy=False) from None
            time.sleep(0.1)

    def leave_mode(self, pane: str) -> None:
        """herdr keeps no mode that swallows what is typed."""

    def type(self, look: Look, text: str) -> bool:
        """Prompt an agent that herdr knows (True: it has pressed Enter), else put in a line of text."""
        if look.agent.get("agent"):
            self._ask_or_nothing("agent", "prompt", look.pane, text)
            return True
        self._run("pane", "send-text", look.pane, text)
        return False

    def _ask_or_nothing(self, *arguments: str) -> None:
        self._run(*arguments)

    def press(self, pane: str, keys: Sequence[str]) -> None:
        self._run("pane", "send-keys", pane, *[_HERDR_KEYS.get(key, "ctrl+" + key[2:] if key.startswith("C-") else key)
                                               for key in keys])

    def capture(self, pane: str, lines: int) -> str:
        source = "recent" if lines else "visible"
        return self._run("pane", "read", pane, "--source", source, "--lines", str(lines + PANE_HEIGHT_LINES))

    def kill(self, pane: str, workspace: str = "") -> None:
        self._run("pane", "close", pane)


if TYPE_CHECKING:
    from typing import Union
    Driver = Union[TmuxDriver, HerdrDriver]


def driver_of(settings: Settings, kind: str, socket: str = "") -> Driver:
    return HerdrDriver(settings, socket) if kind == "herdr" else TmuxDriver(settings, socket)


# -- what a screen shows ---------------------------------------------------------------------------


def _bare(text: str) -> str:
    """A row of a screen without white space and the lines of boxes."""
    return "".join([character for character in text if not character.isspace() and not
                    0x2500 <= ord(character) < 0x25a0 and character != "|"])


def composer_rows(look: Look, profile: Profile) -> Optional[Tuple[int, int]]:
    """First and last row of the composer: the prompt sign under which the cursor is, else the lowest one.

    A profile's `rules` means that it has no sign, and lies between the two lowest rules.
    """
    import re
    if profile.composer == "rules":
        rules = [n for n, row in enumerate(look.rows) if re.search("^\\s*\u2500{20,}\\s*$", row)][-2:]
        if len(rules) < 2 or any(re.search(_CONFIRM, row) for row in look.rows[rules[0]:]):
            return None
        return rules[0] + 1, max(rules[0] + 1, rules[1] - 1)
    sign = re.compile(profile.composer or "^[\\s\u2502|]*" + _GLYPH)
    found = [n for n, row in enumerate(look.rows) if sign.search(row)]
    if not found:
        return None
    first = found[-1]
    while first - 1 in found:        # a bar beside all of its rows is its sign, too
        first -= 1
    if any(re.search(_CONFIRM, row) for row in look.rows[first:]):
        return None                  # what the sign stands before is a choice
    if look.cursor:
        at = look.cursor[1]
        above = [n for n in found if n <= at and all(_bare(row) for row in look.rows[n + 1:at + 1])]
        first = above[-1] if above else first
    last = first
    while last + 1 < len(look.rows) and _bare(look.rows[last + 1]):
        last += 1
    return first, last


def composer_text(look: Look, profile: Profile, rows: Sequence[str]) -> str:
    """What stands in the composer without its prompt sign; "" if none is seen. `rows`: those of the look, or solid."""
    import re
    where = composer_rows(look, profile)
    if where is None:
        return ""
    sign = re.compile(profile.composer or "^[\\s\u2502|]*" + _GLYPH)
    text = []
    for n in range(where[0], where[1] + 1):
        found = sign.search(look.rows[n])
        text.append(re.split(r"\s{12,}", rows[n][found.end() if found else 0:], maxsplit=1)[0])    # (a panel beside it)
    return "\n".join(text)


def _before_cursor(look: Look, rows: Sequence[str]) -> str:
    """What stands left of the cursor in its row, without a prompt sign; "" when the cursor is hidden."""
    import re
    if not look.cursor or look.cursor[1] >= len(rows):
        return ""
    return re.sub("^[^>\u276f\u203a\u00bb]{0,30}" + _GLYPH, "", rows[look.cursor[1]][:look.cursor[0]])


def draft_in(look: Look, profile: Profile) -> bool:
    """Whether a human's words stand in the composer. The dim hint in an empty one is none."""
    import re
    if composer_rows(look, profile) is None:
        return bool(_bare(_before_cursor(look, look.solid)))
    plain = composer_text(look, profile, look.rows).strip("\u2502|\u2503 \n\t\u00a0")
    if any(re.search(hint, plain) for hint in profile.hints):
        return False
    return bool(_bare(composer_text(look, profile, look.solid)))


def holds(look: Look, profile: Profile, text: str) -> bool:
    """Whether a text of ours stands in the composer: its beginning, its last rows, or the sign for a long paste."""
    import re
    ours = _bare(text)
    where = composer_rows(look, profile) if profile.composer == "rules" and look.cursor else None
    outside = where and not where[0] <= look.cursor[1] <= where[1]      # in the line below it, say
    for shown in (composer_text(look, profile, look.rows), "" if outside else _before_cursor(look, look.rows)):
        if re.search(_PASTED, shown):
            return True
        shown = _bare(shown)
        if ours[:40] in shown or len(shown) >= min(8, len(ours)) and shown in ours:
            return True
    return False


def dialog_in(look: Look, profile: Profile) -> Optional[Dict[str, str]]:
    """The dialog that waits for an answer: what stands above a composer is only talked about."""
    import re
    where = composer_rows(look, profile)
    rows = look.rows[where[1] + 1:] if where else look.rows
    text = "\n".join(rows)
    for dialog in [*profile.dialogs, _TRUST, _ASKS, _CHOICE]:
        if re.search(dialog["text"], text, re.M):
            return {**dialog}
    if look.agent.get("agent_status") == "blocked":
        return {"name": "blocked", "do": "herdr calls it blocked: look at its pane (mam session capture)"}
    return None


def is_busy(look: Look, profile: Profile) -> bool:
    """Whether the lowest part of the screen says that the agent is at work."""
    import re
    rows = [row for row in look.rows if row.strip()][-15:]
    return any(re.search(pattern, row) for row in rows for pattern in profile.busy)


def last_words(look: Look) -> str:
    """The last line on a screen that says something, fit for a message."""
    rows = [row.strip() for row in look.rows if _bare(row) and not row.startswith("Pane is dead")]
    return clean_text(rows[-1])[:200] if rows else ""


class Session:
    """A session: one that mam has started and keeps in its inventory (`row`), or a pane that the user made."""

    __slots__ = ("settings", "session", "row", "driver", "agent", "target", "profile")

    def __init__(self, settings: Settings, session: str, row: Optional[SessionRow], agent: str = ""):
        self.settings, self.session = settings, session
        self.row = row = row if row and row.status == "running" else None       # an ended one may be another's by now
        self.driver = driver_of(settings, session.partition(":")[0], row.socket or "" if row else "")
        self.agent = row.agent or agent if row else agent
        self.profile = profile_of(settings, self.agent)
        self.target = row.pane or "" if row else ""

    def _gone(self, why: str) -> SessionError:
        kind, _, name = self.session.partition(":")
        return SessionError("no %s session %s (%s)" % (kind, name, why), busy=False, code="gone", hint=(
            "start the agent: mam session create %s --mux %s --agent AGENT%s" % (name, kind, (
                ", or tmux new-session -d -s %s AGENT" % name) if kind == "tmux" else "")))

    def look(self) -> Look:
        """The pane as it is now; SessionError (`gone`) if there is none, or another process has its number."""
        import json
        try:
            look = self.driver.look(self.target or self.driver.target(self.session.partition(":")[2]))
        except SessionError as error:
            if error.code != "gone":
                raise
            raise self._gone(error.why) from None
        if self.target and self.row and self.row.process and look.pid and not look.dead:
            known, now = json.loads(self.row.process), identity_of(look.pid)
            seen = known.get("ns") == _pid_namespace()      # (else its processes are none of ours)
            if seen and (known["pid"] != look.pid or now and now != known):      # another server's, which counts anew
                raise self._gone("its pane belongs to another process by now")
        if not self.target:
            self.profile = profile_of(self.settings, self.agent, look.command)
        return look

    def check(self) -> Look:
        """The pane, if what is typed into it would reach an agent."""
        look = self.look()
        if look.dead:
            raise SessionError("the agent in %s has exited%s; its pane is dead" % (
                self.session, " with status " + look.exit_status if look.exit_status else ""), code="dead",
                hint="mam session resume %s" % self.session if self.row else
                "tmux respawn-pane -k -t %s AGENT" % look.pane)
        if self.driver.is_own(look):
            raise SessionError("%s is the pane in which this command runs" % self.session, code="own",
                               hint="delegate from another pane: what is typed here would reach your shell")
        if look.command in SHELLS:
            raise SessionError("a shell (%s) is in the foreground of %s, not an agent" % (look.command, self.session),
                               hint="start the agent there; a prompt must not reach a shell", code="shell")
        if look.command in NOT_AGENTS:
            raise SessionError("%s is in the foreground of %s, not an agent" % (look.command, self.session),
                               hint="leave it first: it would take the prompt for a text or for commands", code="other")
        return look

    def ready(self, wait_s: float, starting: bool = False) -> Look:
        """Wait until the agent rests at an empty composer; SessionError before anything is typed if it does not.

        At rest: two looks show the same, and nothing says that it works. A blank screen is an agent that
        is being started, and so is one (`starting`, or a known one) whose composer is not there yet.
        """
        began, stable_since, before = time.monotonic(), 0.0, None
        while True:
            now = time.monotonic()
            try:
                look = self.check()
            except SessionError as error:
                if error.code != "shell" or not starting or now - began > START_WAIT_S:
                    raise
                time.sleep(0.05)      # the script that becomes the agent
                continue
            if look.in_mode:
                self.driver.leave_mode(look.pane)
                before = None
                continue
            self.refuse_dialog(look)
            why, limit_s = self._unrest(look, wait_s, starting)
            same = before is not None and (look.rows, look.cursor) == (before.rows, before.cursor)
            stable_since = stable_since if same else now
            if same and not why or same and why == "bare" and now - stable_since >= BARE_WAIT_S:
                if draft_in(look, self.profile):
                    raise SessionError("a draft stands in the composer of %s" % self.session, code="draft",
                                       hint="send it or delete it: mam adds nothing to it")
                return look
            if now - began >= limit_s:
                raise SessionError("%s %s" % (self.session, {"": "is at work: its screen does not come to rest",
                                                             "bare": "does not come to rest"}.get(why, why)),
                                   hint="wait until it rests; look at it: mam session capture %s" % self.session)
            before = look
            time.sleep(LOOK_AGAIN_S)

    def _unrest(self, look: Look, wait_s: float, starting: bool) -> Tuple[str, float]:
        """(what speaks against typing now; how long to wait for a change). `bare`: no composer is known."""
        if not any(row.strip() for row in look.rows):
            return "shows nothing: its agent is still starting, or hangs", max(wait_s, START_WAIT_S)
        if is_busy(look, self.profile):
            return "is at work", wait_s
        if composer_rows(look, self.profile) is not None:
            return "", max(wait_s, START_WAIT_S) if starting else wait_s
        is_known = bool(self.profile.composer) and (starting or look.command in (*self.profile.command[:1],
                                                                                 *self.profile.also))
        if is_known:
            return "shows no composer as %s has one (see `composer` in .mam/agents.json)" % self.profile.name, \
                max(wait_s, START_WAIT_S)
        return "bare", max(wait_s, BARE_WAIT_S + 1.0)

    def refuse_dialog(self, look: Look) -> None:
        """SessionError if a dialog waits: it is named, and never answered by an Enter of ours."""
        dialog = dialog_in(look, self.profile)
        if dialog:
            raise SessionError("%s waits in a dialog (%s)" % (self.session, dialog["name"]), code="dialog",
                               hint=dialog["do"].replace(" S ", " %s " % self.session))

    def type_in(self, look: Look, text: str) -> str:
        """Put a text in, once, and press Enter. What is in doubt, for a human; "" if it left the composer.

        Enter is repeated only while our own text is seen in the composer, and never into a dialog. A
        SessionError means that nothing was typed, or (`gone`) that nobody is there any more.
        """
        entered = self.driver.type(look, text)
        try:
            return self._enter(look, text, entered)
        except SessionError as error:      # it is in by now: whoever takes that for a failure would put it in twice
            if error.code == "gone":
                raise
            return "what became of the text typed into %s is not known: %s" % (self.session, error.why)

    def _enter(self, look: Look, text: str, entered: bool) -> str:
        """The second half of it. SessionError (`gone`) if the pane is, and whatever its driver has to say."""
        limit = time.monotonic() + (SEEN_WAIT_S if composer_rows(look, self.profile) else 2 * PASTE_SETTLE_S)
        now = look
        while not entered and not holds(now, self.profile, text) and time.monotonic() < limit \
                and not dialog_in(now, self.profile) and not now.dead:
            time.sleep(0.05)
            now = self.driver.look(look.pane)
        time.sleep(0.0 if entered else PASTE_SETTLE_S)      # (from when it was taken in: Enter must not come with it)
        for turn, wait_s in enumerate(ENTER_WAITS_S):
            doubt = self._in_the_way(look)
            if doubt:
                return doubt
            now = self.driver.look(look.pane)
            if not holds(now, self.profile, text):
                if turn or entered:
                    return ""
                if self.profile.composer and draft_in(now, self.profile):
                    return "the composer of %s holds something else than what was put into it" % self.session
            if turn or not entered:
                self.driver.press(look.pane, ["Enter"])
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline:
                time.sleep(0.1)
                if not holds(self.driver.look(look.pane), self.profile, text):
                    return ""
        return "what was typed still stands in the composer of %s after %d Enters" % (self.session, len(ENTER_WAITS_S))

    def _in_the_way(self, look: Look) -> str:
        """What keeps us from pressing Enter now, after a human was given time to answer a dialog; "" if nothing."""
        deadline = time.monotonic() + DIALOG_WAIT_S
        while True:
            now = self.driver.look(look.pane)
            if now.dead or now.pid != look.pid or now.command in SHELLS:
                return "the agent in %s exited while it was prompted" % self.session
            dialog = dialog_in(now, self.profile)
            if not dialog:
                return ""
            if time.monotonic() > deadline:
                return "a dialog (%s) came up in %s; answer it, then press Enter there" % (dialog["name"], self.session)
            time.sleep(0.2)


def open_session(registry: Optional[Registry], settings: Settings, session: str, agent: str = "") -> Session:
    """A session by its name, `kind:name`, with what the inventory knows of it."""
    row = registry.session(session) if registry else None
    return Session(settings, session, row, agent)


def inventory_of(registry: Registry) -> Registry:
    """The registry that holds the inventory of sessions: of a runner's, the one of its workspace."""
    above, name = os.path.split(registry.directory)
    if name.startswith("runner-") and os.path.exists(os.path.join(above, "mam.db")):
        return Registry(above)
    return registry


def job_in_session(registry: Registry, names: Sequence[str], but: str = "") -> Optional[str]:
    """The open job that a session has, by whichever of its names; jobs of this workspace's runners count too."""
    inventory = inventory_of(registry)
    found = inventory.open_in_session(names, but)
    folders = sorted(os.listdir(inventory.directory)) if not found else []
    for folder in [os.path.join(inventory.directory, name) for name in folders if name.startswith("runner-")]:
        if not found and os.path.exists(os.path.join(folder, "mam.db")):
            with Registry(folder) as runner:
                found = runner.open_in_session(names, but)
    return found


def existing_registry(settings: Settings) -> Optional[Registry]:
    """The registry; None where there is none yet."""
    try:
        return Registry(settings.registry_dir)
    except MamError as error:
        if error.code == "no_registry":
            return None
        raise


def check_pane(settings: Settings, session: str, agent: str = "") -> None:
    """Refuse a session into which nothing could be typed, before anything is registered."""
    try:
        open_session(existing_registry(settings), settings, session, agent).check()
    except SessionError as error:
        raise error.as_mam_error() from None


# -- starting an agent ---------------------------------------------------------------------------------

SessionPlan = namedtuple("SessionPlan", "session agent workdir socket yolo extra")


def new_conversation() -> str:
    """A random UUID (RFC 9562, version 4), as agents want it for a preset session id."""
    digits = random_hex(32)
    return "%s-%s-4%s-%s%s-%s" % (digits[:8], digits[8:12], digits[13:16], "89ab"[int(digits[16], 16) % 4],
                                  digits[17:20], digits[20:])


def launch_words(profile: Profile, plan: SessionPlan, values: Dict[str, str], resumes: bool) -> List[str]:
    """argv of an agent. values: id (of its conversation), transcript, prompt, publish; what has none is left out."""
    def fill(words: Sequence[str]) -> List[str]:
        filled = []
        for word in words:
            for name, value in values.items():
                word = word.replace("{%s}" % name, value)
            filled.append(word)
        return filled
    words = [*profile.command, *(plan.extra if not profile.command else [])]
    words += fill(profile.allow) + (list(profile.yolo) if plan.yolo else [])
    words += list(plan.extra) if profile.command else []
    if resumes:
        return words + fill(profile.resume_prompt if "prompt" in values else profile.resume)
    words += fill(profile.preset) if values.get("id") else []
    return words + (fill(profile.prompt) if "prompt" in values else [])


def find_program(settings: Settings, word: str, workdir: str) -> str:
    """The path of a program as the user's shell would find it; MamError if there is none."""
    folders = [""] if "/" in word else settings.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(":")
    for folder in folders:
        path = os.path.join(workdir, folder, word)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise MamError("no program %s" % word, code="no_program",
                   hint="install it, or name it in .mam/agents.json: {\"AGENT\": {\"command\": [\"/path/to/it\"]}}")


def write_launch_script(registry: Registry, settings: Settings, plan: SessionPlan, profile: Profile,
                        words: Sequence[str]) -> str:
    """The script that becomes the agent: in a file, for a command line of a multiplexer has its limits and is seen.

    It takes away what an agent in a pane must not inherit from the multiplexer's server, which may have
    been started from anywhere: variables of an outer agent, secrets.
    """
    hidden = [*AGENT_VARIABLES, *profile.clear, "MAM_DISPATCH_SECRET", "MAM_DISPATCH_SECRET_PREVIOUS",
              "MAM_SESSION_KEY", "MAM_SESSION_KEY_PREVIOUS", "MAM_JOB_ID", "JOB_ID", "MAM_ATTEMPT_ID",
              "MAM_DISPATCH_TOKEN", "MAM_JOB_BRIEF", "MAM_PUBLISH_CMD", "SHIV_ROOT", "SHIV_ENTRY_POINT",
              "SHIV_INTERPRETER"]
    if settings.get("MQTT_PASSWORD"):
        hidden += ["MQTT_" + name for name in ("BROKER", "PORT", "TLS", "USERNAME", "PASSWORD", "CA_CERTS", "CERTFILE",
                                               "KEYFILE", "CLIENT_ID_PREFIX", "KEEPALIVE")]
    kind = profile.herdr_kind if plan.session.startswith("herdr:") else ""
    values = {"PATH": settings.get("PATH"), "HOME": settings.home, "HERDR_AGENT": kind, **profile.env}
    lines = ["#!/bin/sh", "# %s: started by mam" % plan.session, "unset %s" % " ".join(dict.fromkeys(hidden))]
    lines += ["%s=%s; export %s" % (name, _quoted(value), name) for name, value in values.items() if value]
    lines += ["cd %s || exit 127" % _quoted(plan.workdir), "exec " + " ".join(_quoted(word) for word in words)]
    folder = os.path.join(registry.directory, "sessions")
    _make_private_dir(folder)
    path = os.path.join(folder, plan.session.replace(":", "-") + ".sh")
    write_atomic(path, ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"), 0o700)
    _give_to_owner(path)
    return path


def session_lock(registry: Registry, session: str) -> FileLock:
    """The lock under which one process at a time types into a session, starts or ends it."""
    folder = os.path.join(registry.directory, "locks")
    _make_private_dir(folder)
    kind, _, name = session.partition(":")       # (no name has a `%` in it: a pane's lock is never a session's)
    return FileLock(os.path.join(folder, "pane-%s-%s" % (kind, name.replace(":", "%"))))


def check_plan(registry: Optional[Registry], settings: Settings, plan: SessionPlan) -> Profile:
    """Refuse a session that could not be started: its agent, program, folder, name. The profile of the agent."""
    profile = known_profile(settings, plan.agent)
    kind, _, name = plan.session.partition(":")
    if kind not in ("tmux", "herdr") or not is_name(name):
        raise MamError("%s cannot be created: a session is tmux:NAME or herdr:NAME" % plan.session, exit=Exit.USAGE,
                       code="usage")
    if not os.path.isdir(plan.workdir):
        raise MamError("--workdir %s: no such folder" % plan.workdir, code="bad_workdir")
    if any("\0" in word or not is_encodable(word) for word in plan.extra):
        raise MamError("the words for the agent must be UTF-8 text", exit=Exit.USAGE, code="usage")
    if not profile.command and not plan.extra:
        raise MamError("agent %s has no command of its own" % profile.name, exit=Exit.USAGE, code="no_command",
                       hint="give it behind --, for example: mam session create x --agent generic -- my-agent --flag")
    find_program(settings, (profile.command or plan.extra)[0], plan.workdir)
    row = registry.session(plan.session) if registry else None
    if row and row.status == "running":
        try:
            if not open_session(registry, settings, plan.session).look().dead:
                raise MamError("%s runs already" % plan.session, exit=Exit.BUSY, code="session_runs",
                               hint="choose another name, or end it: mam session stop %s" % plan.session)
        except SessionError as error:
            if error.code != "gone":
                raise error.as_mam_error() from None
    return profile


def create_session(registry: Registry, settings: Settings, plan: SessionPlan, prompt: Optional[str] = None,
                   before: Optional[SessionRow] = None) -> Session:
    """Start an agent as the process of a pane of its own, and take it into the inventory.

    `prompt` goes with the launch (the profile has a form for it); `before` is the row of the session that is
    resumed. The row is written before the pane is made: a crash in between leaves one that reconcile() settles.
    """
    profile = check_plan(registry, settings, plan)
    _clear_name(registry, settings, plan.session)
    resumes = before is not None and has_transcript(settings, profile, before.conversation or "") is not False
    conversation = before.conversation if before else new_conversation() if profile.preset else None
    values = {"publish": launcher_path(registry, settings) + " publish"}
    values.update({"id": conversation} if conversation else {}, **({} if prompt is None else {"prompt": prompt}))
    for path in transcripts(settings, profile, conversation or ""):
        values["transcript"] = path
    words = launch_words(profile, plan, values, resumes)
    words[0] = find_program(settings, words[0], plan.workdir)
    script = write_launch_script(registry, settings, plan, profile, words)
    kind, _, name = plan.session.partition(":")
    driver = driver_of(settings, kind, plan.socket)
    data = {"extra": list(plan.extra), "yolo": plan.yolo}
    registry.save_session(plan.session, {
        "kind": kind, "agent": profile.name, "status": "running", "pane": None, "socket": driver.socket,
        "process": None, "workdir": plan.workdir, "conversation": conversation, "ended_at": None,
        "job_id": None, "data": compact_json(data)}, anew=before is None)
    try:
        pane = driver.create(name, script, plan.workdir)
        look = driver.look(pane)
    except SessionError as error:
        why = "the agent in %s exited at once (%s)" % (plan.session, error.why) if error.code == "gone" else error.why
        end_session(registry, plan.session, "terminated", why)
        raise SessionError(why, error.hint or "run it by hand once: %s" % script, error.busy, error.code) from None
    process = identity_of(look.pid) if look.pid else None
    registry.save_session(plan.session, {"pane": look.pane, "process": compact_json(process) if process else None,
                                         "socket": look.socket or driver.socket})
    return open_session(registry, settings, plan.session)


def _clear_name(registry: Registry, settings: Settings, session: str) -> None:
    """Take away the dead pane that an ended session of this name has left."""
    row = registry.session(session)
    if not row or not row.pane:
        return
    old = Session(settings, session, row._replace(status="running"))
    try:
        look = old.look()
        if look.dead:
            old.driver.kill(look.pane)
    except SessionError:
        pass      # it is gone already, or another's by now


def wait_started(session: Session, wait_s: float, told: Callable[[], bool] = lambda: False) -> Tuple[str, str]:
    """See an agent come up: (ready, dialog, dead or slow; what to say of it). `told`: its own words came already."""
    began, before = time.monotonic(), None
    while time.monotonic() < began + wait_s:
        if told():
            return "ready", ""
        try:
            look = session.look()
        except SessionError as error:
            if error.code == "gone":
                return "dead", "the agent in %s has exited, and its pane is gone" % session.session
            raise
        if look.dead:
            return "dead", "the agent in %s exited%s: %s" % (
                session.session, " with status " + look.exit_status if look.exit_status else "", last_words(look))
        dialog = dialog_in(look, session.profile)
        if dialog and before is not None and before.rows == look.rows:
            return "dialog", "%s waits in a dialog (%s): %s" % (
                session.session, dialog["name"], dialog["do"].replace(" S ", " %s " % session.session))
        still = before is not None and before.rows == look.rows and any(row.strip() for row in look.rows)
        if look.command not in SHELLS and not dialog and (
                composer_rows(look, session.profile) and (still or is_busy(look, session.profile)) or
                still and not session.profile.composer and time.monotonic() > began + 1.0):
            return "ready", ""
        before = look
        time.sleep(LOOK_AGAIN_S)
    return "slow", "%s has not drawn its composer within %gs" % (session.session, wait_s)


# -- the inventory ------------------------------------------------------------------------------------------


def session_record(row: SessionRow, job_id: Optional[str]) -> Dict[str, Any]:
    """A session as it is listed and archived; `job`: the open job it has now."""
    import json
    data = json.loads(row.data) if row.data else {}
    record_ = {name: getattr(row, name) for name in (
        "session", "kind", "agent", "status", "pane", "socket", "workdir", "conversation", "created_at", "updated_at",
        "ended_at")}
    return {**record_, "process": json.loads(row.process) if row.process else None, "job": job_id,
            "last_job": row.job_id, "detail": data.get("detail"), "yolo": bool(data.get("yolo")),
            "purged": bool(data.get("purged"))}


def end_session(registry: Registry, session: str, status: str, detail: str,
                more: Optional[Dict[str, Any]] = None) -> None:
    """Note that a session has ended, and how; it goes into the archive file."""
    import json
    row = registry.session(session)
    if row is None:
        return
    data = {**(json.loads(row.data) if row.data else {}), "detail": detail, **(more or {})}
    registry.save_session(session, {"status": status, "ended_at": utc_now(), "data": compact_json(data)})
    archive_session(registry, session)


def archive_session(registry: Registry, session: str) -> None:
    """Write an ended session into `agent-sessions.yaml` (JSON, which is YAML); what was there is kept as `.bak`.

    A crash in between leaves the old file or the new one. What cannot be read is put aside, not repaired.
    """
    row = registry.session(session)
    path = os.path.join(registry.directory, "agent-sessions.yaml")
    _make_private_dir(os.path.join(registry.directory, "locks"))
    with FileLock(os.path.join(registry.directory, "locks", "archive")) as lock:
        lock.acquire(JOB_LOCK_WAIT_S)
        old, rows = b"", []
        try:
            with open(path, "rb") as file:
                old = file.read()
            found = parse_json(old, 64 * 1024 * 1024)
            rows = [one for one in found["sessions"] if isinstance(one, dict)]
        except FileNotFoundError:
            pass      # the first session that ends
        except (BadJson, KeyError, TypeError):
            log("agent-sessions.yaml cannot be read; it is kept as agent-sessions.yaml.bak")
        if row:
            rows = [one for one in rows if (one.get("session"), one.get("created_at")) != (row.session, row.created_at)]
            rows.append(session_record(row, None))
        if old:
            write_atomic(path + ".bak", old)
        write_atomic(path, (compact_json({"schema_version": SCHEMA_VERSION, "updated_at": utc_now(),
                                          "sessions": rows}) + "\n").encode("utf-8"))
        _give_to_owner(path)


def reconcile(registry: Registry, settings: Settings) -> List[SessionRow]:
    """All sessions, after those whose pane or agent is gone were noted as terminated.

    What cannot be asked (no multiplexer, no answer) stays as it is.
    """
    for row in registry.sessions():
        if row.status == "running":
            try:
                _reconcile_one(registry, settings, row)
            except (SessionError, OSError) as error:
                log("%s cannot be looked at: %s" % (row.session, error))
    return registry.sessions()


def _reconcile_one(registry: Registry, settings: Settings, row: SessionRow) -> None:
    with session_lock(registry, row.session) as lock:
        if not lock.acquire(0):
            return                  # it is being started, prompted or ended
        now = registry.session(row.session)
        if now is None or now.status != "running":
            return
        session = Session(settings, row.session, now)
        try:
            look = session.look()
        except SessionError as error:
            if error.code != "gone":
                raise
            end_session(registry, row.session, "terminated", "its pane is gone")
            return
        if look.dead:
            conversation = known_conversation(now, look) or told_conversation(session.profile, look) \
                or newest_conversation(settings, now, session.profile) or None
            registry.save_session(row.session, {"conversation": conversation})
            end_session(registry, row.session, "terminated", "the agent exited%s: %s" % (
                " with status " + look.exit_status if look.exit_status else "", last_words(look)))
        elif not now.pane:          # whoever started it died before it could write that down
            registry.save_session(row.session, {"pane": look.pane, "socket": look.socket or now.socket,
                                                "process": compact_json(identity_of(look.pid))})


# -- conversations --------------------------------------------------------------------------------------------


def transcripts(settings: Settings, profile: Profile, conversation: str) -> List[str]:
    """The files that hold a conversation, as far as its agent's profile knows where they are."""
    import glob
    found = []
    for pattern in profile.transcript if conversation else ():
        path = pattern.replace("{id}", glob.escape(conversation) if conversation != "*" else "*")
        found += glob.glob(settings.home + path[1:] if path.startswith("~/") else path)
    return sorted(found)


def has_transcript(settings: Settings, profile: Profile, conversation: str) -> Optional[bool]:
    """Whether anything of a conversation was kept. None: the profile does not know where. An agent to which
    nothing was ever said keeps nothing, and cannot resume it."""
    return bool(transcripts(settings, profile, conversation)) if profile.transcript and profile.preset else None


def known_conversation(row: SessionRow, look: Optional[Look]) -> str:
    """The conversation of a session as it was preset, or as herdr tells it; "" if that is not known."""
    told = look.agent.get("agent_session") if look else None
    if not row.conversation and isinstance(told, dict) and is_name(str(told.get("value"))):
        return str(told["value"])
    return row.conversation or ""


def told_conversation(profile: Profile, look: Look) -> str:
    """The conversation that an agent named when it left; "" if it said nothing."""
    import re
    found = re.findall(profile.goodbye, "\n".join(look.rows)) if profile.goodbye else []
    return str(found[-1]) if found else ""


def newest_conversation(settings: Settings, row: SessionRow, profile: Profile) -> str:
    """The conversation of the one transcript that was written in a session's folder since it began: a guess, and none
    if there are several. Nothing is ever deleted by it."""
    found = []
    for path in transcripts(settings, profile, "*"):
        try:
            if os.stat(path).st_mtime >= parse_utc(row.created_at):
                with open(path, "rb") as file:
                    if row.workdir and os.fsencode(row.workdir) in file.read(65536):
                        found.append(path)
        except OSError:
            continue      # deleted meanwhile
    return (_conversation_in(os.path.basename(found[0]), profile) or "") if len(found) == 1 else ""


def _conversation_in(name: str, profile: Profile) -> Optional[str]:
    """The conversation that a transcript's file name holds: a UUID, else what stands where the profile has {id}."""
    import re
    found = re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", name)
    for pattern in profile.transcript if not found else ():
        form = re.escape(os.path.basename(pattern)).replace(r"\{id\}", "([0-9A-Za-z_-]+)").replace(r"\*", ".*")
        found += re.findall("^%s$" % form, name)
    return str(found[-1]) if found else None


def conversation_in_use(settings: Settings, profile: Profile, conversation: str, but: Iterable[int] = ()) -> str:
    """Who is in a conversation: this command, another process that names it or has its transcript open. "" if none.

    `but`: processes that are not meant. This process and those above it name it only as they run this command,
    except an agent among them: that one is in it.
    """
    variables = {*_SESSION_VARIABLES, *(one.variable for one in agent_profiles(settings).values())}
    mine = sorted(name for name in variables if name and settings.get(name) == conversation)
    if mine:
        return "this command runs in it (%s)" % mine[0]
    above = ancestors()
    agent = agent_ancestor()
    chain = {os.getpid(), *(pid for pid in above if pid != agent)}
    holders = set(processes_naming(conversation)) | set(processes_holding(transcripts(settings, profile, conversation)))
    holders -= chain | set(but)
    return "process %d is in it" % min(holders) if holders else ""


# -- stopping, resuming -----------------------------------------------------------------------------------------


def stop_session(registry: Registry, settings: Settings, session_name: str, purge: bool, grace_s: float) -> str:
    """End a session's agent: asked as its profile says, then firmly. With `purge` its conversation is deleted.

    A purge is refused (SessionError, the registration kept) while anyone else is in the conversation. What
    was done, in words.
    """
    row = registry.session(session_name)
    if row is None:
        raise MamError("%s is not in the inventory" % session_name, code="unknown_session",
                       hint="`mam session list` shows those that mam has started; end others by their own means")
    session = Session(settings, session_name, row)
    profile = profile_of(settings, row.agent or "")
    look: Optional[Look] = None
    if row.status == "running":
        try:
            look = session.look()
        except SessionError as error:
            if error.code != "gone":
                raise
    if look and (session.driver.is_own(look) or look.pid and look.pid in ancestors()):
        raise SessionError("%s is the session in which this command runs" % session_name, code="own",
                           hint="stop it from elsewhere")
    conversation = certain = known_conversation(row, look)
    if purge and (conversation or not look):
        _refuse_purge(settings, profile, conversation, look, session_name)
    if look:
        look = _end_agent(session, look, grace_s)
        conversation = certain = conversation or told_conversation(profile, look)
        conversation = conversation or newest_conversation(settings, row, profile)
        registry.save_session(session_name, {"conversation": conversation or None})
        try:
            session.driver.kill(look.pane)
        except SessionError as error:
            if error.code != "gone":
                raise
    words = "%s is stopped" % session_name if row.status == "running" else "%s had ended already" % session_name
    if row.status == "running":
        end_session(registry, session_name, "stopped", "stopped" if look else "its pane was gone")
    if purge and not certain:
        raise SessionError("%s is stopped; which conversation was its is not certain, and none is deleted" %
                           session_name, "delete it by the agent's own means", False, "purge_refused")
    if purge:
        _refuse_purge(settings, profile, conversation, None, session_name)
        for path in transcripts(settings, profile, conversation):
            os.unlink(path)
        end_session(registry, session_name, "terminated", "conversation purged", {"purged": True})
        words += ", its conversation %s deleted" % conversation
    return words


def _refuse_purge(settings: Settings, profile: Profile, conversation: str, look: Optional[Look], name: str) -> None:
    if not conversation:
        raise SessionError("no conversation of %s is known" % name, "stop it without --purge-conversation", False)
    if not profile.transcript:
        raise SessionError("where %s keeps its conversations is not known" % profile.name,
                           "delete it by the agent's own means, or name `transcript` in .mam/agents.json", False)
    used = conversation_in_use(settings, profile, conversation, family_of(look.pid) if look and look.pid else ())
    if used:
        raise SessionError("the conversation %s is not deleted: %s" % (conversation, used), code="purge_refused",
                           hint="end it first; the registration is kept")


def _end_agent(session: Session, look: Look, grace_s: float) -> Look:
    """Ask an agent to leave, wait, then end its process group. The last look at its pane."""
    began = time.monotonic()
    family = [identity_of(pid) for pid in family_of(look.pid)] if look.pid else []
    ask_at = began
    try:
        while not look.dead and time.monotonic() < began + grace_s:
            if look.in_mode:
                session.driver.leave_mode(look.pane)
            if time.monotonic() >= ask_at:
                ask_at += 2.0
                for key in session.profile.exit:
                    session.driver.press(look.pane, [key])
                    time.sleep(0.15)                    # two in one read are one to some
            time.sleep(0.1)
            look = session.driver.look(look.pane)
    except SessionError as error:
        if error.code != "gone":
            raise
    if look.pid and identity_of(look.pid):
        end_group(look.pid, 2.0)
    for identity in family:                        # what an agent has started lives in groups of its own
        if identity and is_alive(identity):
            end_group(group_of(identity["pid"]), 1.0)
    return look


def plan_of(row: SessionRow, extra: Sequence[str], yolo: bool) -> SessionPlan:
    """How a session was started, to be started again; words for its agent, if any are given, replace the old ones."""
    import json
    data = json.loads(row.data) if row.data else {}
    return SessionPlan(row.session, row.agent or "generic", row.workdir or "/", row.socket or "",
                       bool(data.get("yolo")) or yolo, list(extra or data.get("extra") or ()))


def resume_session(registry: Registry, settings: Settings, session_name: str, extra: Sequence[str],
                   yolo: bool) -> Session:
    """Start an ended session's agent again, in its conversation; never a second process in one.

    If herdr has brought it back by itself, that pane is taken into the inventory.
    """
    import json
    row = registry.session(session_name)
    if row is None:
        raise MamError("%s is not in the inventory" % session_name, code="unknown_session",
                       hint="`mam session list --all` shows those that have ended; `mam session create` starts one")
    if row.status == "running":
        raise MamError("%s runs" % session_name, exit=Exit.BUSY, code="session_runs", hint="there is nothing to resume")
    if json.loads(row.data or "{}").get("purged"):
        raise MamError("the conversation of %s was purged" % session_name, code="purged",
                       hint="start it anew: mam session create %s" % session_name)
    profile = profile_of(settings, row.agent or "")
    if not row.conversation or not profile.resume:
        why = "its conversation is not known" if profile.resume else "it is not known how %s resumes one" % profile.name
        raise MamError("%s cannot be resumed: %s" % (session_name, why), code="no_conversation",
                       hint="start it anew: mam session create %s" % session_name)
    adopted = _brought_back(registry, settings, row)
    if adopted:
        return adopted
    used = conversation_in_use(settings, profile, row.conversation)
    if used:
        raise SessionError("%s is not resumed: %s" % (session_name, used), code="in_use",
                           hint="two processes in one conversation spoil it; end the other first")
    return create_session(registry, settings, plan_of(row, extra, yolo), before=row)


def _brought_back(registry: Registry, settings: Settings, row: SessionRow) -> Optional[Session]:
    """The session in a pane where herdr itself has resumed its conversation, as it does when its server restarts."""
    if row.kind != "herdr":
        return None
    driver = HerdrDriver(settings, row.socket or "")
    try:
        agents = driver._ask("agent", "list").get("agents") or []
        for agent in agents:
            if (agent.get("agent_session") or {}).get("value") == row.conversation:
                look = driver.look(str(agent["pane_id"]))
                registry.save_session(row.session, {
                    "status": "running", "pane": look.pane, "ended_at": None,
                    "process": compact_json(identity_of(look.pid)) if look.pid else None})
                return open_session(registry, settings, row.session)
    except SessionError as error:
        if error.code not in ("gone", "no_server"):
            raise
    return None


# -- prompts --------------------------------------------------------------------------------------------------


def injection(registry: Registry, settings: Settings, job: Job, brief: str) -> str:
    """What is typed into a session: a plain header line, the pointer, the exact commands.

    Starts with a word, for a leading `!` or `/` is a command to some agents.
    """
    publish = "%s publish --job=%s --attempt-id %d --expect-dispatch-token=%s" % (
        launcher_path(registry, settings), job.job_id, job.attempt_id, job.dispatch_token)
    return "\n".join((
        "Job %s, attempt %d, from mam. The brief is the file %s" % (job.job_id, job.attempt_id, clean_text(brief)),
        "Read it and do what it says. Report with these shell commands, exactly as they stand:",
        "now, before anything else:  %s --event started --heartbeat %g" % (publish, job.heartbeat_sec),
        "at every milestone:         %s --event progress --detail 'what is done'" % publish,
        "when you need a human:      %s --event permission_required --detail 'what for'" % publish,
        "at the end, if it is done:  %s --event completed --detail 'the result in one line'" % publish,
        "at the end, if it failed:   %s --event error --detail 'why'" % publish,
        "Exit status 2 means recorded, go on. Exit status 75: run the same command again. Exit status 4: this "
        "attempt is over, stop, and leave your work in place."))


def pointer(registry: Registry, job: Job, text: str) -> str:
    """One line that points to the instructions in a file, where no text of several lines can be put in whole."""
    path = os.path.join(registry.directory, "briefs", "%s.a%d.how.md" % (job.job_id, job.attempt_id))
    write_atomic(path, text.encode("utf-8", "surrogatepass"))
    _give_to_owner(path)
    return "Job %s, attempt %d, from mam. Read the file %s now and do exactly what it says." % (
        job.job_id, job.attempt_id, clean_text(path))


def hand_to_session(registry: Registry, settings: Settings, job: Job, plan: Optional[SessionPlan] = None) -> str:
    """Bring a job to its session, once: by its launch if there is a `plan` for one, else by typing. What is in doubt.

    SessionError if the session cannot take it: nothing was typed then. Whoever finds the job delivered, or
    over, does nothing.
    """
    inventory = inventory_of(registry)
    with session_lock(inventory, job.agent_session) as lock:
        if not lock.acquire(30.0):
            raise SessionError("another delivery to %s is going on" % job.agent_session)
        now = registry.job(job.job_id)
        if (now.attempt_id, now.delivery) != (job.attempt_id, "none") or now.status not in OPEN_STATUSES:
            return ""
        text = injection(registry, settings, job, brief_path(registry, job))
        if plan:
            return _launch_with(registry, settings, job, plan, text)
        session = open_session(inventory, settings, job.agent_session, job.agent)
        look = session.check()
        pane = "%s:%s" % (session.driver.kind, look.pane)
        with session_lock(inventory, pane) as pane_lock:       # whatever name it is called by
            if pane != job.agent_session and not pane_lock.acquire(30.0):
                raise SessionError("another delivery to %s is going on" % look.pane)
            names = sorted({job.agent_session, *look.names, *inventory.sessions_of_pane(look.pane, look.socket)})
            _refuse_second(registry, job, names)
            look = session.ready(settings.pause("MAM_SESSION_WAIT_S", SESSION_WAIT_S))
            if not _claim(registry, job, names):
                return ""
            known_to_herdr = bool(look.agent.get("agent"))
            doubt = session.type_in(look, pointer(registry, job, text) if session.driver.one_line and not known_to_herdr
                                    else text)
        registry.move_delivery(job.job_id, job.attempt_id, "sending", "sent")
        return doubt


def _refuse_second(registry: Registry, job: Job, names: Sequence[str]) -> None:
    other = job_in_session(registry, names, job.job_id)
    if other:
        raise SessionError("%s is at work on job %s" % (job.agent_session, other),
                           hint="wait for it (mam wait %s), or cancel it" % other)


def _claim(registry: Registry, job: Job, names: Sequence[str]) -> bool:
    """Become the one who delivers. False: somebody delivers it already, or it is over."""
    ours, other = registry.claim_session(job, names)
    if other:
        _refuse_second(registry, job, names)
    return ours


def _launch_with(registry: Registry, settings: Settings, job: Job, plan: SessionPlan, text: str) -> str:
    """Start a session for a job, the prompt in its launch where the agent takes one there, else typed in."""
    try:
        profile = check_plan(registry, settings, plan)
        if not _claim(registry, job, [job.agent_session]):
            return ""
        session = create_session(registry, settings, plan, text if profile.prompt else None)
    except MamError as error:
        raise SessionError(error.message, error.hint, error.exit == Exit.BUSY, error.code) from None
    registry.save_session(job.agent_session, {"job_id": job.job_id})
    doubt = ""
    if profile.prompt:
        state, doubt = wait_started(session, START_WAIT_S, lambda: bool(registry.job(job.job_id).last_event))
        if state == "dead" and not registry.job(job.job_id).last_event:
            raise SessionError(doubt, busy=False, code="dead")
    else:
        look = session.ready(START_WAIT_S, True)
        with_lines = not session.driver.one_line or bool(look.agent.get("agent"))
        doubt = session.type_in(look, text if with_lines else pointer(registry, job, text))
    registry.move_delivery(job.job_id, job.attempt_id, "sending", "sent")
    return doubt


def deliver_to_session(registry: Registry, settings: Settings, job: Job, plan: Optional[SessionPlan] = None) -> None:
    """Bring a job to its session, or close it and say why (MamError: exit 5, or 1 where waiting is of no use)."""
    try:
        doubt = hand_to_session(registry, settings, job, plan)
    except SessionError as error:
        request = "session_busy" if error.busy and registry.job(job.job_id).status == "pending" else "spawn_failed"
        record(registry, settings, job.job_id, request, source="delegate_wrapper", detail=error.why,
               attempt=job.attempt_id)
        deliver_event(registry, settings, job, 0, attempts=1)
        raise MamError("%s (job %s is closed)" % (error.why, job.job_id), hint=error.hint,
                       exit=Exit.BUSY if error.busy else Exit.FAILED, code=request) from None
    if doubt:
        note_doubt(registry, settings, job, doubt)


def note_doubt(registry: Registry, settings: Settings, job: Job, doubt: str) -> None:
    """Say what may keep a prompt from arriving. It decides nothing: the agent's `started` or its absence does."""
    registry.note(job.job_id, "delivery", "delegate_wrapper", settings.generalise(doubt))
    sys.stderr.write("mam: job %s: %s\n" % (job.job_id, doubt))


def answer_job(registry: Registry, settings: Settings, job: Job, text: str) -> str:
    """Type a human's answer into the session of a job that asks for it. What is in doubt; SessionError if it cannot."""
    header = "Answer to job %s, from mam: " % job.job_id
    inventory = inventory_of(registry)
    with session_lock(inventory, job.agent_session) as lock:
        if not lock.acquire(30.0):
            raise SessionError("a delivery to %s is going on" % job.agent_session)
        session = open_session(inventory, settings, job.agent_session, job.agent)
        doubt = type_message(session, header + text, settings.pause("MAM_SESSION_WAIT_S", SESSION_WAIT_S))
    registry.note(job.job_id, "answer", "operator", settings.generalise(cut_utf8(text, MAX_DETAIL_BYTES)))
    return doubt


def type_message(session: Session, text: str, wait_s: float) -> str:
    """Type a human's words into a session at rest; control characters are left out. What is in doubt."""
    lines = [clean_text(line) for line in text.splitlines()]
    look = session.ready(wait_s)
    one_line = session.driver.one_line and not look.agent.get("agent")
    return session.type_in(look, (" " if one_line else "\n").join(lines))


# ==============================================================================
# 15. Remote
#
# Work on other hosts, which share nothing with us but the broker. A runner is the
# daemon of a registry of its own, with a guest in it: it says that it is there,
# adopts what is dispatched to it, and has it run as any local command is. From
# there on `_run`, the outbox, beats and clocks are those of a local job.
# ==============================================================================


def check_secret(secret: str, name: str) -> str:
    """A secret that keys can be made from; MamError, which does not show it, if it is none."""
    if len(secret) < MIN_SECRET_CHARS or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise MamError("%s is not fit to make keys from: it must be at least %d printable ASCII characters without "
                       "spaces" % (name, MIN_SECRET_CHARS), code="bad_secret",
                       hint="`mam secret new` makes one; every host that has the old one needs a new key then"
                       if "DISPATCH" in name else "`mam secret derive S` makes it, where jobs are delegated")
    return secret


def dispatch_secret(settings: Settings) -> str:
    """MAM_DISPATCH_SECRET, checked; MamError without one."""
    secret = settings.get("MAM_DISPATCH_SECRET")
    if not secret:
        raise MamError("MAM_DISPATCH_SECRET is not set: jobs for other hosts are signed with keys made from it",
                       code="no_secret", hint="make one where jobs are delegated, and only there: "
                                              "mam secret new >> .mam.env")
    return check_secret(secret, "MAM_DISPATCH_SECRET")


def keys_for(settings: Settings, session: str) -> MakeKeys:
    """What makes the keys of an attempt for a remote session, `remote:NAME`."""
    key = session_key(dispatch_secret(settings), session.partition(":")[2])
    return lambda job_id, attempt, token: attempt_keys(key, job_id, attempt, token)


def runner_keys(settings: Settings, session: str) -> Dict[str, str]:
    """A runner's session keys by their kid: those it was given, else those it can derive. The newest comes first."""
    found = []
    for name in ("MAM_SESSION_KEY", "MAM_SESSION_KEY_PREVIOUS"):
        of, _, key = settings.get(name).rpartition(".")
        if of and of != session:
            raise MamError("%s is the key of session %s, not of %s" % (name, of, session), code="wrong_key",
                           hint="where jobs are delegated: mam secret derive %s; each session of a host needs a folder "
                                "with a .mam.env of its own, or the key in its environment" % session)
        if key:
            found.append(check_secret(key, name))
    for name in ("MAM_DISPATCH_SECRET", "MAM_DISPATCH_SECRET_PREVIOUS") if not found else ():
        if settings.get(name):
            found.append(session_key(check_secret(settings.get(name), name), session))
    if not found:
        raise MamError("MAM_SESSION_KEY is not set: a runner needs the key of its session", code="no_secret",
                       hint="where jobs are delegated: mam secret derive %s; that line goes into .mam.env" % session)
    return {key_id(key): key for key in found}


def check_private_broker(settings: Settings, broker: Optional[Broker], insecure: bool) -> Broker:
    """The broker for remote work, refused without TLS and a password unless the user says so (DESIGN 13)."""
    if broker is None:
        raise MamError("no broker is set, and a remote session needs one", code="no_broker",
                       hint="set MQTT_BROKER in the environment or in .mam.env")
    lacks = [word for word, there in (("TLS (MQTT_TLS, or mqtts:// in --broker)", broker.tls), (
        "password (MQTT_PASSWORD) or client certificate (MQTT_CERTFILE)", broker.password or broker.certfile))
        if not there]
    allowed = insecure or settings.get("MAM_INSECURE_BROKER").lower() in ("1", "true", "yes", "on")
    if lacks and not allowed:
        raise MamError("the broker %s has no %s: %s" % (
            broker_address(broker), " and no ".join(lacks), "anybody could send and take jobs" if broker.tls else
            "prompts and results would lie open on the way"), code="insecure_broker",
            hint="on a network you trust: --insecure-broker, or MAM_INSECURE_BROKER=1, here and for the runner")
    return broker


def check_dispatch_size(settings: Settings, prompt: str, artifacts: str) -> None:
    """Refuse a prompt that cannot travel before anything is registered."""
    limit = min(MAX_PAYLOAD_BYTES, settings.count("MAM_MAX_DISPATCH_BYTES", MAX_PAYLOAD_BYTES))
    size = len(canonical(prompt)) + len(artifacts) + DISPATCH_ROOM_BYTES
    if size > limit:
        raise MamError("the prompt takes %d bytes in a dispatch, and %d are allowed" % (size, limit), code="too_large",
                       hint="put the long part where the runner's host finds it, and name that place in the prompt")


# What a dispatch must carry beside its prompt: the type and, of numbers, that they are positive.
_NUMBER = (int, float)
_CONTRACT: Dict[str, Any] = {
    "agent": str, "role": str, "timeout_sec": _NUMBER, "idle_timeout_sec": _NUMBER, "heartbeat_sec": _NUMBER,
    "heartbeat_misses": int, "ack_timeout_sec": _NUMBER, "artifacts": list}


def check_dispatch(data: Dict[str, Any], now: float) -> None:
    """Raise Rejected unless a dispatch that is verified and ours can be carried out now.

    `now`: this host's clock, seconds since the epoch; a clock of the other may differ by CLOCK_SKEW_S.
    """
    contract = data.get("contract")
    if not isinstance(contract, dict) or not isinstance(data.get("prompt"), str) \
            or type(data.get("seq_base")) is not int or not 0 <= data["seq_base"] <= MAX_SAFE_INTEGER // 2:
        raise Rejected("shape", "the dispatch has no prompt, contract or seq_base of the right form")
    for name, kind in _CONTRACT.items():
        value: Any = contract.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) \
                or not isinstance(value, (str, list)) and not 0 < value <= 315360000:
            raise Rejected("shape", "the contract's %s is %.40r" % (name, value))
    if not all(isinstance(path, str) and is_inside(path) for path in contract["artifacts"]):
        raise Rejected("shape", "the contract's artifacts are no relative paths")
    issued_at, expires_at = data.get("issued_at"), data.get("expires_at")
    if not isinstance(issued_at, str) or not isinstance(expires_at, str):
        raise Rejected("shape", "no issued_at or expires_at")
    if parse_utc(issued_at) > now + CLOCK_SKEW_S:
        raise Rejected("from_future", "dispatch of %s, and it is %s here: set the clocks" % (
            clean_text(issued_at)[:40], utc_text(now)))
    if parse_utc(expires_at) < now - CLOCK_SKEW_S:
        raise Rejected("expired", "dispatch of %s was good until %s, and it is %s here" % (
            clean_text(issued_at)[:40], clean_text(expires_at)[:40], utc_text(now)))


def find_runners(broker: Broker, root: str, secret: str, wait_s: float) -> Tuple[List[_Seen], int]:
    """(what the broker knows of runners, how many words of them were signed with other keys).

    Waits until each that is said to be online has given a sign of life, at most `wait_s` seconds.
    """
    connection = Connection(broker)
    mid = connection.subscribe([presence_filter(root + "/x", "+")])
    began, granted_at = time.monotonic(), 0.0
    found: Dict[Tuple[str, str], _Seen] = {}
    strange: set = set()
    while time.monotonic() < began + wait_s:
        connection.pump(0.1)
        received, connection.received = connection.received, []
        now = time.monotonic()
        for topic, raw, retained in received:
            session, runner = topic.split("/")[-2:]
            try:
                presence = accept_presence(topic, raw, derive_key(session_key(secret, session), "presence"))
            except Rejected:
                strange.update([topic] if raw else [])
                continue
            seen = heard_anew(found.get((session, runner)), presence, retained, now)
            if seen:
                found[(session, runner)] = seen
        granted_at = granted_at or (now if connection.granted(mid) else 0.0)
        if granted_at and now - granted_at > SETTLE_S and all(
                seen.live_at or seen.presence.state != "online" for seen in found.values()):
            break
    connection.close()
    return [found[key] for key in sorted(found)], len(strange)


def own_runner_id(registry: Registry) -> str:
    """The id of the runner whose registry this is; MamError for a registry that was copied from another host.

    Two with one id would both take what is given to it, and run it twice.
    """
    import hashlib
    runner = registry.own_id("runner_id")
    try:
        with open("/etc/machine-id", "rb") as file:
            machine = hashlib.sha256(file.read()).hexdigest()[:32]
    except OSError:      # nothing that stays tells one host from another: a live twin is seen by its presence
        return runner
    if registry.meta("runner_machine") is None:
        registry.set_meta("runner_machine", machine)
    elif registry.meta("runner_machine") != machine:
        raise MamError("the runner's registry %s was copied from elsewhere, and its id with it" % registry.directory,
                       exit=Exit.REFUSED, code="copied", hint="move that folder away: a new one is made")
    return runner


def caretaker_of(registry: Registry, settings: Settings) -> Optional[Guest]:
    """For the daemon that is left where a runner was: what obeys the orders that come for its work. None elsewhere."""
    session = registry.meta("runner_session")
    if not session:
        return None
    try:
        broker = broker_settings(settings)
        options = RunnerOptions(session, "", False, "/", 0, False, False, False)
        return broker and Runner(registry, settings, broker, options, runner_keys(settings, session), stays=False)
    except MamError as error:
        log("orders for the work of this runner are not heard: %s" % error.message)
        return None


RunnerOptions = namedtuple("RunnerOptions", "session command feed_stdin workdir slots pool once drain deliver",
                           defaults=(None,))


class Runner(Guest):
    """One runner of a session: its presence, what it takes on, and how much of it runs at a time."""

    def __init__(self, registry: Registry, settings: Settings, broker: Broker, options: RunnerOptions,
                 keys: Dict[str, str], stays: bool = True):
        """`stays=False`: a caretaker, in the daemon that is left where a runner was: it obeys, and takes nothing on."""
        self.stays = stays
        self._registry, self._settings, self._options, self._keys = registry, settings, options, keys
        self._wire = broker_address(broker)
        self._root = topic_root(settings)
        self._me = identity_of(os.getpid())
        self._presence_key = derive_key(next(iter(keys.values())), "presence")
        self._instance = random_hex(16)              # of this process: its words are numbered
        self._beat = 0
        self._presence_at = 0.0                      # when the next word is due
        self._said_busy = 0
        self._line: Optional[Line] = None
        self._connection: Optional[Connection] = None        # the line's, while it stands
        self._presence_mid = self._orders_mid = 0
        self._others_since = self._orders_since = 0.0        # since when others, and orders, are heard; 0: not yet
        self._others: Dict[str, _Seen] = {}
        self._serving_since: Optional[float] = None  # None: another serves, or that is not known yet
        self._waits_for = ""                         # said once
        self._cancelled: Dict[Tuple[str, int], Dict[str, Any]] = {}     # heard before their dispatch
        self._received: List[Tuple[str, bytes, bool]] = []              # and not worked off
        self._resent_at: Dict[str, float] = {}
        self._drops: Dict[str, int] = {}
        self._took = self._committed = False
        self.hopeless: Callable[[], bool] = lambda: False    # whether the broker has refused us from the beginning
        self.denied = ""                             # what the broker does not let us hear, which ends us
        self._look_at = 0.0
        self._version = -1
        self._open: List[Job] = []                   # adopted and not ended
        self._at_work = 0                            # commands of ended attempts that are not gone yet
        self._typing: Dict[str, Any] = {}            # --deliver: the `_deliver` of each job, by its id
        self.id = own_runner_id(registry)
        if stays:
            registry.set_meta("runner_session", options.session)
            self._recover()

    # -- what a crash left (DESIGN 13) -------------------------------------------------------------

    def _recover(self) -> None:
        """Go on where the runner before was: what it had adopted waits here again, what runs is followed on."""
        for job in self._registry.adopted_jobs():
            if not job.phase:              # (else a `_supervise` may be at it)
                self._registry.set_supervisor(job.job_id, keeper_of("runner"))
            if job.last_event and job.delivery == "none":
                self._registry.arm_beat(job, self._me)

    def _answer(self, job: Job) -> None:
        if job.delivery == "withheld":
            record(self._registry, self._settings, job.job_id, "spawn_failed", source="runner", detail=job.detail or "",
                   attempt=job.attempt_id)
        else:
            self._announce(job)

    def _announce(self, job: Job) -> None:
        """`started`, with a beat as long as this runner lives: the work may wait for a free slot."""
        record(self._registry, self._settings, job.job_id, "started", source="runner", attempt=job.attempt_id,
               detail="adopted by a runner", extra={"heartbeat_sec": job.heartbeat_sec, "watch": self._me})

    # -- presence ----------------------------------------------------------------------------------

    def _presence(self, state: str) -> Tuple[str, bytes, bool]:
        import platform
        options = self._options
        slots = 0 if options.once and self._took or options.drain and self._took else options.slots
        serving_s = time.monotonic() - self._serving_since if self._serving_since is not None else 0.0
        presence = Presence(options.session, self.id, state, clean_text(platform.node())[:64], __version__, slots,
                            self._busy(), options.pool, round(serving_s, 3), self._instance, self._beat, utc_now())
        return presence_message(self._root, presence, self._presence_key)

    def _busy(self) -> int:
        return len(self._open) + self._at_work

    def _say_presence(self, now: float) -> None:
        if self._connection:
            self._beat += 1
            self._presence_at, self._said_busy = now + PRESENCE_S, self._busy()
            self._connection.post(*self._presence("online"))

    def will(self) -> Optional[Tuple[str, bytes, bool]]:
        return self._presence("offline") if self.stays else None

    def describe(self) -> Any:
        if not self.stays:
            return None
        return {"session": self._options.session, "id": self.id, "busy": self._busy(), "slots": self._options.slots,
                "state": "waiting" if self._serving_since is None else "serving", "refused": dict(self._drops)}

    # -- the connection ----------------------------------------------------------------------------

    def connected(self, line: Line) -> None:
        """Listen anew: a clean session restores nothing."""
        self._line, self._connection = line, line.connection
        if self._connection:
            self._connection.hasten()
        self._others_since = 0.0
        if self.stays and self._connection:
            self._presence_mid = self._connection.subscribe([presence_filter(self._root + "/x", self._options.session)])
        if self._serving_since is None:
            self._hear(control_topic)
        else:
            self._serve()

    def disconnected(self) -> None:
        self._connection = None

    def may_send(self) -> bool:
        """Not before what was taken back meanwhile has come: an end that was overruled must not be retained again."""
        return self._orders_since > 0.0 and time.monotonic() - self._orders_since > LOOK_S

    def _hear(self, *kinds: Callable[[str], str]) -> None:
        """Listen for orders: for control whether we serve or not, for work of ours may still run."""
        if self._connection:
            self._orders_since = 0.0
            self._orders_mid = self._connection.subscribe([kind(self._root + "/+") for kind in kinds])

    def _serve(self) -> None:
        self._hear(control_topic, dispatch_topic)      # in this order a broker sends what it retains
        self._say_presence(time.monotonic())

    def _look_at_grants(self, connection: Connection, now: float) -> None:
        """Note since when others and orders are heard; what is denied ends a runner, which would be deaf."""
        orders, others = connection.granted(self._orders_mid), connection.granted(self._presence_mid)
        if not self._orders_since and orders is not None:
            self._orders_since = now
        if not self._others_since and others is not None:
            self._others_since = now
        if self.stays and (orders is False or others is False):
            self.denied = "the broker does not let this user subscribe to %s" % (
                "%s/+/control and %s/+/dispatch" % (self._root, self._root) if orders is False else
                presence_filter(self._root + "/x", self._options.session))

    def _stands_aside(self, now: float) -> str:
        """The other runner that serves the session, or may; "" if none does. Of a pool, several do."""
        for seen in self._others.values():
            in_pool = seen.presence.pool and self._options.pool and seen.presence.runner != self.id
            if seen.presence.state != "online" or in_pool:
                continue
            if seen.lives(now) or seen.live_at is None and now - self._others_since < SILENT_S:
                return "%s on %s" % (seen.presence.runner, seen.presence.host)
        return ""

    def _begin(self, now: float) -> None:
        """Serve as soon as nobody else does."""
        if self.stays and self._connection and self._others_since and now - self._others_since > SETTLE_S:
            other = self._stands_aside(now)
            if not other:
                self._serving_since = now
                log("runner %s serves remote:%s on %s, %d at a time" % (
                    self.id, self._options.session, self._wire, self._options.slots))
                self._serve()
            elif other != self._waits_for:
                self._waits_for = other
                log("runner %s serves remote:%s; this one waits until it has been silent for %ds" % (
                    other, self._options.session, SILENT_S))

    def _meet(self, topic: str, raw: bytes, retained: bool, now: float) -> None:
        """Hear of another runner. Of two that began at once, the one that began later steps back."""
        presence = accept_presence(topic, raw, self._presence_key)
        twin = presence.runner == self.id
        if twin and presence.instance == self._instance or not self.stays:
            return
        seen = heard_anew(self._others.get(presence.runner), presence, retained, now)
        if seen:
            self._others[presence.runner] = seen
        if twin and seen and seen.lives(now):
            self.denied = "another process, on %s, has the id of this runner: its registry was copied; remove " \
                          "runner-%s where it is not wanted" % (presence.host, self._options.session)
            return
        if not seen or not seen.lives(now) or self._serving_since is None or presence.pool and self._options.pool:
            return
        mine_s = now - self._serving_since
        if presence.serving_s > mine_s + 1 or presence.serving_s > mine_s - 1 and presence.runner < self.id:
            log("runner %s on %s serves remote:%s as well, and came first: this one takes nothing more" % (
                presence.runner, presence.host, self._options.session))
            self._serving_since = None
            if self._connection:
                self._connection.unsubscribe([dispatch_topic(self._root + "/+")])
                self._connection.post(*self._presence("offline"))

    # -- orders ------------------------------------------------------------------------------------

    def take(self, received: Sequence[Tuple[str, bytes, bool]]) -> List[Tuple[str, bytes, bool]]:
        """Keep presences of others, control and dispatches until they are worked off: the broker has its
        acknowledgement already. What is none of these is not ours."""
        rest = []
        for topic, raw, retained in received:
            orders = topic.startswith(self._root + "/") and topic.endswith(("/control", "/dispatch"))
            if not orders and not topic.startswith(self._root + "-runners/"):
                rest.append((topic, raw, retained))
            elif raw:
                self._received.append((topic, raw, retained))
        return rest

    def _work_off(self, now: float) -> None:
        """Do what was received, each only gone when it is done: on a full disk it waits for the next turn."""
        while self._received:
            topic, raw, retained = self._received[0]
            kind = topic.rpartition("/")[2]
            try:
                if topic.startswith(self._root + "-runners/"):
                    self._meet(topic, raw, retained, now)
                else:
                    payload = accept_order(topic, raw, kind, self._options.session, self._keys)
                    (self._control if kind == "control" else self._dispatch)(payload)
            except Rejected as error:
                self._refused(topic, error)
            except MamError as error:
                if error.exit == Exit.NOT_RECORDED:
                    raise
                self._refused(topic, Rejected("internal", error.message))
            except Exception as error:      # a defect of ours must not stop the runner, nor hold up what comes behind
                self._refused(topic, Rejected("internal", "%s: %s" % (type(error).__name__, error)))
            del self._received[0]

    def _refused(self, topic: str, error: Rejected) -> None:
        if error.reason != "other_session":
            self._drops[error.reason] = self._drops.get(error.reason, 0) + 1
            log("refused a message on %s: %s (others for this reason are counted)" % (
                clean_text(topic)[:100], clean_text(str(error))[:300]), "refused " + error.reason)

    def _dispatch(self, payload: Dict[str, Any]) -> None:
        """Adopt an attempt that is given to this runner; one that cannot be carried out is answered with why."""
        data, job_id = payload["data"], payload["job_id"]
        if data.get("runner") != self.id:
            return
        why, usable = "", True
        try:
            check_dispatch(data, time.time())
        except Rejected as error:
            why, usable = str(error), error.reason != "shape"
        if not why and (self._serving_since is None or self._options.once and self._took):
            why = "the runner takes no more work"
        attempt = data["attempt_id"]
        key = self._keys[data["kid"]]
        cancelled = self._cancelled.get((job_id, attempt))
        if cancelled:
            why = "it was ended before it came: %s" % cancelled["reason"]
        word = self._registry.adopt(
            {**self._record(payload, usable), **({"delivery": "withheld", "detail": why} if why else {})}, attempt,
            data["dispatch_token"], data["seq_base"] if usable else 0, lambda *of: attempt_keys(key, *of), self.id)
        if word == "adopted":          # (what follows from it is done by a look, if we die before)
            self._committed = self._took = True
            log("refused attempt %d of job %s: %s" % (attempt, job_id, why) if why else
                "took attempt %d of job %s" % (attempt, job_id))
        elif word != "known":
            raise Rejected(word, "dispatch of attempt %d is %s" % (attempt, word))
        job = self._registry.job(job_id)
        if cancelled and job.attempt_id == attempt:
            self._overrule(job, cancelled)
            del self._cancelled[(job_id, attempt)]
        elif word == "adopted":
            self._answer(job)

    def _record(self, payload: Dict[str, Any], usable: bool) -> Dict[str, Any]:
        """The job of a dispatch as this host keeps it; of one that is refused for its shape, as much as it takes to
        answer."""
        options, contract = self._options, payload["data"]["contract"] if usable else {}
        prompt = payload["data"]["prompt"] if usable else ""

        def term(name: str, default: Any) -> Any:
            return contract.get(name, default)
        return {
            "job_id": payload["job_id"], "title": title_of(prompt), "prompt": prompt, "job_type": "direct",
            "agent": clean_text(term("agent", DEFAULT_AGENT)), "role": clean_text(term("role", "")),
            "agent_session": options.deliver or "exec:" + options.session,
            "topic_prefix": "%s/%s" % (self._root, payload["job_id"]),
            "timeout_sec": term("timeout_sec", DEFAULT_TIMEOUT_S), "idle_timeout_sec": term("idle_timeout_sec", 120),
            "heartbeat_sec": term("heartbeat_sec", DEFAULT_HEARTBEAT_S),
            "heartbeat_misses": term("heartbeat_misses", DEFAULT_HEARTBEAT_MISSES),
            "ack_timeout_sec": term("ack_timeout_sec", DEFAULT_ACK_TIMEOUT_S),
            "expected_artifacts": compact_json(term("artifacts", [])), "max_iterations": 1, "transport": "local",
            "workdir": options.workdir, "command": options.command, "feed_stdin": int(options.feed_stdin),
            "wire": self._wire, "supervisor": keeper_of("runner")}

    def _control(self, payload: Dict[str, Any]) -> None:
        """`resend`: what is asked for goes out again. `cancel`: the attempt ends here as it has ended there."""
        data, job_id, attempt = payload["data"], payload["job_id"], payload["data"]["attempt_id"]
        found = self._registry.jobs_by_id([job_id])
        if payload["event"] == "resend":
            first, now = data.get("from_seq"), time.monotonic()
            if type(first) is not int or first < 1:
                raise Rejected("shape", "from_seq is %.40r" % (first,))
            if found and now - self._resent_at.get(job_id, -60.0) > 1.0:
                self._resent_at[job_id] = now
                self._registry.owe_from(job_id, attempt, first)
                self._send(job_id)
        elif data.get("status") not in TERMINAL_STATUSES or not is_name(str(data.get("reason"))):
            raise Rejected("shape", "a cancel without a status or reason of the right form")
        elif found and found[0].attempt_id == attempt:
            self._overrule(found[0], data)
        elif not found or found[0].attempt_id < attempt:
            if found:                            # a newer attempt is over, and so is this one
                self._overrule(found[0], {"status": "cancelled", "reason": "superseded"})
            if len(self._cancelled) >= CANCELLED_COUNT:
                del self._cancelled[next(iter(self._cancelled))]          # the oldest
            self._cancelled[(job_id, attempt)] = {"status": data["status"], "reason": data["reason"]}

    def _send(self, job_id: str) -> None:
        """Have sent what is owed again: no line of the log tells of it."""
        if self._line and self._connection:
            self._line.enqueue(job_id)

    def _overrule(self, job: Job, data: Dict[str, Any]) -> None:
        answer = self._registry.transition(
            job.job_id, "overruled", expected_attempt=job.attempt_id, source="runner",
            fields={"status": data["status"], "reason": data["reason"],
                    "detail": "Job %s closed: %s" % (job.job_id, data["reason"])})
        if not answer.committed:
            self._registry.owe_answer(job.job_id, job.attempt_id)
            self._send(job.job_id)
        self._committed = True

    # -- work --------------------------------------------------------------------------------------

    def turn(self, now: float) -> bool:
        """Begin to serve, say that we are there, start what waits. True if anything was committed."""
        connection = self._connection
        if connection:
            self._look_at_grants(connection, now)
        self._work_off(now)
        if self._serving_since is None:
            self._begin(now)
        elif connection and (now >= self._presence_at or self._busy() != self._said_busy and
                             now > self._presence_at - PRESENCE_S + LOOK_S):
            self._say_presence(now)
        if self._committed:          # what was said goes out first: starting a process takes its time
            self._committed, self._look_at = False, 0.0
            return True
        version = self._registry.data_version()
        if version == self._version and now < self._look_at:
            return False
        self._version, self._look_at = version, now + 1.0
        return self._look() or self._committed

    def _look(self) -> bool:
        """Answer what was adopted; start what waits while a slot is free; close what was to be spawned and has no
        process."""
        committed = False
        before, self._open = self._open, self._registry.adopted_jobs()
        gone = {job.job_id for job in before} - {job.job_id for job in self._open}
        for job in self._registry.jobs_by_id(sorted(gone)):
            log("attempt %d of job %s has ended: %s" % (job.attempt_id, job.job_id, job.status))
        leaving = {job_id for job_id, _, _ in self._registry.ended_attempts_at_work()}
        self._at_work = len(leaving)
        free = self._options.slots - len(leaving) - sum(job.delivery in ("sending", "sent") for job in self._open)
        for job in self._open:
            if not job.last_event:      # adopted by a runner that died before it could say so
                self._answer(job)
                self._committed = True
            elif job.delivery == "sending" and not job.run and (elapsed_s(job.delivered_mono) or 0.0) > SPAWN_WAIT_S:
                record(self._registry, self._settings, job.job_id, "supervisor_lost", source="runner",
                       attempt=job.attempt_id, last_seq=job.last_seq,
                       detail="the runner died while it started the command: whether it ran cannot be told")
                committed = True
            elif self.stays and free > 0 and job.delivery == "none" and job.outcome is None \
                    and job.job_id not in leaving:
                free -= 1                    # (the oldest first: of those that wait for a pane, one is typed in)
                committed |= self._spawn(job)
        return committed

    def _spawn(self, job: Job) -> bool:
        try:
            write_brief(self._registry, job)
        except OSError as error:      # no space: it is tried again at the next look
            log("the brief of job %s cannot be written now: %s" % (job.job_id, error))
            return False
        try:
            if self._options.deliver:       # typing takes its time, which a process of its own has
                if job.job_id not in self._typing or self._typing[job.job_id].poll() is not None:
                    self._typing[job.job_id] = spawn_self(
                        ["_deliver", "--attempt-id", str(job.attempt_id), "--", job.job_id],
                        own_environment(self._settings), supervisor_log(self._registry))
                return False
            return start_run(self._registry, self._settings, job)
        except OSError as error:      # no more processes: nothing runs, and the attempt is used up
            record(self._registry, self._settings, job.job_id, "spawn_failed", source="runner", attempt=job.attempt_id,
                   detail="the command could not be started: %s" % error)
            return True

    def done(self) -> bool:
        """Whether --once or --drain has nothing more to do: all that was taken has ended and is sent."""
        options, now = self._options, time.monotonic()
        if self.denied or self.hopeless():
            return True
        waits = options.drain and (not self._orders_since or now - self._orders_since < 2 * SETTLE_S)
        if not (options.once and self._took or options.drain) or waits or self._busy():
            return False
        return not self._registry.adopted_jobs() and not self._registry.jobs_owing(1)

    def leave(self) -> None:
        """End in good order: what only waits here is answered; what runs goes on, and the daemon follows it."""
        if not self.stays:
            return
        try:
            for job in self._registry.adopted_jobs():
                if job.delivery in ("none", "withheld"):
                    record(self._registry, self._settings, job.job_id, "spawn_failed", source="runner",
                           attempt=job.attempt_id, detail=job.delivery == "withheld" and job.detail or
                           "the runner was ended before it began")
            if self._connection:
                self._connection.publish([self._presence("offline")])
        except (BrokerError, MamError) as error:
            log("leaving: %s" % error)


def deliver_adopted(registry: Registry, settings: Settings, job: Job) -> None:
    """Bring a runner's job to the pane of its host; a busy one is waited for, as long as an agent may take to answer.

    Then `spawned`: the wall clock of both sides begins, and the runner's sign of life ends. From here on the
    agent's own words count, and its silence.
    """
    deadline = time.monotonic() + job.ack_timeout_sec
    while True:
        try:
            doubt = hand_to_session(registry, settings, job)
            break
        except SessionError as error:
            now = registry.job(job.job_id)
            if now.outcome is not None or now.attempt_id != job.attempt_id:
                return
            if not error.busy or time.monotonic() > deadline:
                record(registry, settings, job.job_id, "spawn_failed", source="runner", detail=error.why,
                       attempt=job.attempt_id)
                deliver_event(registry, settings, job, 0, attempts=1)
                return
        time.sleep(1.0)
    now = registry.job(job.job_id)
    if now.delivery != "sent" or now.attempt_id != job.attempt_id:
        return
    beat = registry.beat(job.job_id)
    if beat and beat.watch and registry.count_words(job.job_id, job.attempt_id) <= 1:     # else the agent's own
        registry.drop_beat(beat, "runner", "the agent's own signs of life count from here on")
    record(registry, settings, job.job_id, "progress", source="runner", attempt=job.attempt_id,
           detail="the prompt is in %s" % job.agent_session, data={"spawned": True})
    if doubt:
        note_doubt(registry, settings, job, doubt)


# ==============================================================================
# 16. Delegation
#
# From a prompt to a certain end: register, hand over exactly once, follow. What a
# job still owes after its worker is done (artifacts, validation) is settled by
# `_supervise`, which can be killed and started again at any point.
# ==============================================================================


def hand_over(registry: Registry, settings: Settings, job: Job, plan: Optional[SessionPlan] = None) -> Job:
    """Bring a job to its session, once. Whoever finds it on its way already does nothing.

    `plan`: the session is started for it. MamError (exit 5 or 1) when the session cannot take it; the job
    is closed then.
    """
    kind = job.agent_session.partition(":")[0]
    write_brief(registry, job)
    if kind == "exec":
        start_run(registry, settings, job)
    elif kind == "remote":      # the daemon finds a runner, and tells it
        registry.move_delivery(job.job_id, job.attempt_id, "none", "sending")
        wake_daemon(registry)
    elif kind in ("tmux", "herdr"):
        deliver_to_session(registry, settings, job, plan)
    return registry.job(job.job_id)


def preflight_remote(settings: Settings, job: Dict[str, Any], broker: Optional[Broker], insecure: bool) -> None:
    """Refuse a remote job that could not be dispatched: no secret, no or an open broker, too long a prompt."""
    dispatch_secret(settings)
    check_private_broker(settings, broker, insecure)
    check_dispatch_size(settings, job["prompt"], job["expected_artifacts"])


def preflight(settings: Settings, session: str, command: Optional[str], workdir: str, agent: str = "",
              plan: Optional[SessionPlan] = None) -> None:
    """Refuse what cannot work before anything is registered."""
    kind = session.partition(":")[0]
    for variable in ("MAM_TERM_GRACE_S", "MAM_LINGER_S", "MAM_SESSION_WAIT_S"):
        if settings.get(variable) != "0":
            settings.seconds(variable, 1.0)
    if kind == "exec" and not (command or "").strip():
        raise MamError("an exec: session needs a command", exit=Exit.USAGE, code="no_command",
                       hint="for example: --exec 'claude -p --permission-mode acceptEdits' --stdin")
    if kind != "exec" and command:
        raise MamError("--exec goes with an exec: session, not with %s" % session, exit=Exit.USAGE)
    if not os.path.isdir(workdir):
        raise MamError("--workdir %s: no such folder" % workdir, code="bad_workdir")
    if plan:
        check_plan(existing_registry(settings), settings, plan)
    elif kind in ("tmux", "herdr"):
        check_pane(settings, session, agent)


def end_run_of(registry: Registry, settings: Settings, job_id: str) -> None:
    """See the commands of a job's ended attempts gone: wait for their `_run`, or end them in its place."""
    import json
    deadline = time.monotonic() + settings.pause("MAM_TERM_GRACE_S", TERM_GRACE_S) + 6.0
    for _, attempt, text in registry.ended_attempts_at_work(job_id):
        group = json.loads(text).get("group")
        while not is_left_behind(text) and (group is None or group_members(group)) and time.monotonic() < deadline:
            time.sleep(0.02)
        if is_left_behind(text) or group and group_members(group):
            end_command(settings, text)
            registry.close_run(job_id, attempt, text)


def end_left_behind(registry: Registry, settings: Settings, job_id: str) -> None:
    """End the commands of ended attempts whose `_run` is dead or stands still; the others end by themselves."""
    for _, attempt, text in registry.ended_attempts_at_work(job_id):
        if is_left_behind(text):
            end_command(settings, text)
            registry.close_run(job_id, attempt, text)


class Supervisor:
    """Does for one job what takes time and must happen once: hand it over when its delegator died before
    it could, end the command of a dead `_run`, and settle what a worker's `completed` left owed."""

    def __init__(self, registry: Registry, settings: Settings, job_id: str):
        self._registry, self._settings, self._job_id = registry, settings, job_id

    def go(self) -> int:
        """Until none of this is needed any more. At most one per job, by flock; a second leaves at once."""
        folder = os.path.join(self._registry.directory, "locks")
        _make_private_dir(folder)
        end_left_behind(self._registry, self._settings, self._job_id)     # even if a stopped one holds the lock
        with FileLock(os.path.join(folder, self._job_id + ".supervise")) as lock:
            if not lock.acquire(0):
                return Exit.OK
            me = keeper_of("_supervise")
            while needs_supervisor(self._registry.job(self._job_id)):
                self._registry.set_supervisor(self._job_id, me)
                self._carry()
                self._registry.drop_supervisor(self._job_id, me)
        return Exit.OK

    def _carry(self) -> None:
        while True:
            job = self._registry.job(self._job_id)
            if job.status in TERMINAL_STATUSES:
                return
            if orphaned(job):
                end_orphan(self._registry, self._settings, job)
            elif job.delivery == "none" and job.supervisor and can_deliver(job) and not self._in_other_hands(job):
                end_run_of(self._registry, self._settings, job.job_id)
                hand_over(self._registry, self._settings, job)
            elif job.phase == "validating":
                if self._work_is_over(job):
                    self._validate(job)
                else:
                    time.sleep(0.05)
            else:
                return

    @staticmethod
    def _in_other_hands(job: Job) -> bool:
        """Whether a living process other than this one has undertaken to deliver the job."""
        import json
        who = json.loads(job.supervisor)["who"]
        return who["pid"] != os.getpid() and is_alive(who) is not False

    def _work_is_over(self, job: Job) -> bool:
        """Whether the command has exited, so that what it leaves behind stands still."""
        import json
        if not job.run or job.run_ended_at:
            return True
        if is_alive(json.loads(job.run)["supervisor"]) is not False:
            return False
        end_command(self._settings, job.run)       # its `_run` was killed while it tidied up
        self._registry.close_run(job.job_id, job.attempt_id, job.run)
        return True

    def _validate(self, job: Job) -> None:
        """Check artifacts, run --validate, settle the job by what came out."""
        import json
        if job.checking:         # by one like us that died: two checks at once could spoil each other's result
            end_command(self._settings, job.checking)
            self._registry.close_run(job.job_id, job.attempt_id, job.checking)
        artifacts, missing = [], []
        for name in json.loads(job.expected_artifacts) if job.transport != "remote" else ():     # (there, they were)
            found = describe_file(os.path.join(job.workdir, name), name, lambda: self._unwanted(job))
            artifacts.append(found) if found else missing.append(name)
        data = {"artifacts": artifacts} if artifacts else {}
        if missing:
            self._settle(job, "error", "artifact_missing", "missing artifact: %s" % ", ".join(missing), data)
            return
        failure = self._run_validation(job) if job.validate_cmd else ""
        if failure:
            self._settle(job, "error", "validation_failed", failure, data)
        elif failure is not None:
            self._settle(job, "completed", None, job.detail or "", data)

    def _unwanted(self, job: Job) -> bool:
        """Whether the job was closed or redispatched while it is being checked."""
        now = self._registry.job(job.job_id)
        return now.phase != "validating" or now.attempt_id != job.attempt_id

    def _run_validation(self, job: Job) -> Optional[str]:
        """Run --validate in the workdir: "" when it passed, why it failed, None if no longer wanted."""
        path = os.path.join(self._registry.directory, "output", "%s.a%d.validate.log" % (job.job_id, job.attempt_id))
        _make_private_dir(os.path.dirname(path))
        left_s = job.timeout_sec - (elapsed_s(job.delivered_mono or job.claimed_mono,
                                              job.delivered_at or job.claimed_at) or 0)
        env = environment_of_work(self._settings, worker_variables(self._registry, self._settings, job))
        me = identity_of(os.getpid())
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        _give_to_owner(path)
        with open(descriptor, "wb") as output:
            status = run_shell(job.validate_cmd, job.workdir, env, output, max(1.0, left_s),
                               self._settings.pause("MAM_TERM_GRACE_S", TERM_GRACE_S), lambda: self._unwanted(job),
                               lambda group: self._registry.begin_check(job, {
                                   "supervisor": me, "command": identity_of(group), "group": group}))
        self._registry.end_check(job)
        if status == 0:
            return ""
        if status is None:
            return None          # no longer wanted, or the wall clock: the daemon closes the job for it
        with open(path, "rb") as written:
            written.seek(max(0, os.path.getsize(path) - TAIL_BYTES))
            last = last_line(self._settings, written.read())
        return "validation failed (exit status %d)%s" % (status, ": " + last if last else "")

    def _settle(self, job: Job, status: str, reason: Optional[str], detail: str, data: Dict[str, Any]) -> None:
        record(self._registry, self._settings, job.job_id, "settled", source="_supervise", detail=detail, data=data,
               attempt=job.attempt_id, extra={"status": status, "reason": reason})
        deliver_event(self._registry, self._settings, job, 0)


def describe_file(path: str, name: str, stop: Callable[[], bool]) -> Optional[Dict[str, Any]]:
    """Name, size in bytes and sha256 of a file (a folder has no sum); None if there is none.

    Neither a FIFO nor a device is a result: they could keep the reader for ever. `stop` is asked meanwhile.
    """
    import hashlib
    import stat
    if os.path.isdir(path):
        return {"name": name, "folder": True}
    digest = hashlib.sha256()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            for block in iter(lambda: file.read(1 << 22), b""):
                digest.update(block)
                if stop():
                    return None
            return {"name": name, "size": file.tell(), "sha256": digest.hexdigest()}
    except OSError:
        return None


# ==============================================================================
# 18. Views
#
# From the model to text and to JSON. Nothing here reads or writes anything.
# ==============================================================================


def event_line(event: Event) -> str:
    """v4's line for one event on a follower's stdout."""
    return "%s job=%s seq=%d %-20s %s" % (event.timestamp, event.job_id, event.seq, event.event, event.detail)


def event_json(event: Event) -> str:
    """The event as it travels, without its signature; already one line."""
    return harmless_json(event.payload)


def harmless_json(text: str) -> str:
    """JSON with DEL, C1 and direction characters escaped: JSON allows them raw, and some drive a terminal."""
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join([character if not 127 <= ord(character) < 160 and ord(character) not in _DIRECTION_CHARACTERS
                    else "\\u%04x" % ord(character) for character in text])


def log_record(event: Event) -> Dict[str, Any]:
    """One line of a job's log for `logs --json`, numbered events and notes alike."""
    import json
    payload = json.loads(event.payload)
    line = {"event": event.event, "job_id": event.job_id, "attempt_id": event.attempt_id, "seq": event.seq,
            "source": event.source, "timestamp": event.timestamp, "logged_at": event.logged_at,
            "detail": event.detail, "delivered_at": event.delivered_at}
    return {**line, "data": payload["data"]} if event.seq is not None else {**line, **payload}


def log_line(event: Event) -> str:
    return "%-24s %-20s %s" % (event.logged_at, event.event if event.seq is None else
                               "%s #%d" % (event.event, event.seq), event.detail)


def silence_s(job: Job) -> Optional[float]:
    """Seconds since the last event: how long ago the job progressed."""
    return elapsed_s(job.last_event_mono, job.last_event_at) if job.last_event_mono else None


def last_life_s(job: Job, beat: Optional[Beat]) -> Optional[float]:
    """Seconds since the last sign of life: a beat or any event."""
    ages = [silence_s(job), elapsed_s(beat.touched_mono, beat.touched_at) if beat else None]
    known = [age for age in ages if age is not None]
    return min(known) if known else None


def signs_of_life(job: Job, beat: Optional[Beat]) -> Dict[str, Any]:
    """Seconds since the last sign of life, and since the last progress: two things."""
    life, silence = last_life_s(job, beat), silence_s(job)
    return {"alive_s": life and round(life, 1), "progress_s": silence and round(silence, 1)}


def _number(value: float) -> Any:
    return int(value) if value == int(value) else value


def job_record(job: Job, prompt: str, beat: Optional[Beat], show_secrets: bool = False) -> Dict[str, Any]:
    """A job as v4 wrote it, field for field, and what is new behind them."""
    import json
    hidden = "***"
    record_: Dict[str, Any] = {
        "schema_version": SCHEMA_VERSION, "job_id": job.job_id, "status": job.status,
        "created_at": job.created_at, "updated_at": job.updated_at, "prompt": prompt, "agent": job.agent,
        "agent_session": job.agent_session, "role": job.role,
        "broker": json.loads(job.broker) if job.broker else None, "topic_prefix": job.topic_prefix,
        "timeout_sec": _number(job.timeout_sec), "idle_timeout_sec": _number(job.idle_timeout_sec),
        "expected_artifacts": json.loads(job.expected_artifacts), "last_seq": job.last_seq,
        "auth_token": job.auth_token if show_secrets else hidden, "job_type": job.job_type,
        "reviewer": job.reviewer, "reviewer_session": job.reviewer_session, "max_iterations": job.max_iterations,
        "iteration": job.iteration, "dispatch_token": job.dispatch_token, "attempt_id": job.attempt_id,
        "heartbeat_sec": _number(job.heartbeat_sec), "heartbeat_misses": job.heartbeat_misses,
        "ack_timeout_sec": _number(job.ack_timeout_sec), "transport": job.transport}
    broker = record_["broker"]
    if broker and broker.get("password") and not show_secrets:
        broker["password"] = hidden
    for name in ("phase", "reason", "transition_seq", "claimed_at", "delivered_at", "started_at", "finished_at",
                 "last_event", "last_event_at", "detail", "parent_job", "workdir", "validate_cmd", "command",
                 "wire", "delivery", "exit_status"):
        record_[name] = getattr(job, name)
    # The last progress is last_event_at; a sign of life may be later.
    record_["alive_at"] = max([at for at in (job.last_event_at, beat and beat.touched_at) if at], default=None)
    record_["asks"] = (job.detail or "") if asks_permission(job) else None
    return record_


def _ago(seconds: Optional[float]) -> str:
    return "-" if seconds is None else format_duration(seconds) + " ago"


def status_word(job: Job) -> str:
    if job.phase:
        return job.phase
    return "%s (%s)" % (job.status, job.reason) if job.reason not in (None, job.status) else job.status


def job_line(job: Job, beat: Optional[Beat]) -> str:
    """`mam list`: v4's columns first (id, status, session); of an open job, its signs of life; age and title."""
    is_open = job.status in OPEN_STATUSES
    ages = [_ago(age).replace(" ago", "") for age in (last_life_s(job, beat), silence_s(job))]
    signs = "alive %s, progress %s" % tuple(ages) if is_open else ""
    if asks_permission(job):
        return "%s  %-10s  %-16s  %-7s  %-24s  %s" % (
            job.job_id, job.status, job.agent_session, format_duration(elapsed_s(None, job.created_at) or 0),
            "PERMISSION required", (job.detail or "")[:60])
    return "%s  %-10s  %-16s  %-7s  %-24s  %s" % (
        job.job_id, job.phase or job.status, job.agent_session, format_duration(
            elapsed_s(None, job.created_at) or 0), signs, job.title[:44])


def table(heading: Sequence[str], body: Sequence[Sequence[str]], colour: bool) -> List[str]:
    """Aligned columns under a heading."""
    rows = [heading, *body]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    if colour:
        lines[0] = "\x1b[2m%s\x1b[0m" % lines[0]
    return lines


def open_row(job: Job, beat: Optional[Beat]) -> Tuple[str, ...]:
    status = "PERMISSION" if asks_permission(job) else job.phase or job.status
    return (job.job_id, status, format_duration(elapsed_s(None, job.created_at) or 0),
            _ago(last_life_s(job, beat)), _ago(silence_s(job)), job.agent_session,
            (job.detail or "(prompt) " + job.title)[:60])


def took_s(job: Job) -> float:
    """Seconds from a job's start, or its registration, to its end."""
    return max(0.0, parse_utc(job.finished_at) - parse_utc(job.started_at or job.created_at))


def ended_row(job: Job) -> Tuple[str, ...]:
    return (job.job_id, status_word(job), _ago(elapsed_s(None, job.finished_at)), format_duration(took_s(job)),
            job.agent_session, (job.detail or "")[:60])


def overview(directory: str, broker: str, counts: Dict[str, int], open_jobs: Sequence[Job],
             beats: Dict[str, Beat], ends: Sequence[Job], colour: bool) -> List[str]:
    """What is going on, in one screen: open jobs with their signs of life, then the last ends."""
    known = ", ".join("%d %s" % (counts[status], status) for status in STATUSES if counts.get(status))
    lines = ["mam %s  %s  %s" % (__version__, directory, broker), known or "no jobs yet", ""]
    if open_jobs:
        rows = table(("OPEN", "STATUS", "AGE", "ALIVE", "PROGRESS", "SESSION", "LAST WORD"),
                     [open_row(job, beats.get(job.job_id)) for job in open_jobs], colour)
        asking = [job for job in open_jobs if asks_permission(job)]
        for n, job in enumerate(open_jobs, 1) if colour else ():
            rows[n] = "\x1b[1;33m%s\x1b[0m" % rows[n] if asks_permission(job) else rows[n]
        lines += rows + ["  -> mam answer %s 'your answer'" % job.job_id for job in asking] + [""]
    if ends:
        lines += table(("ENDED", "HOW", "WHEN", "TOOK", "SESSION", "RESULT"), [ended_row(job) for job in ends],
                       colour) + [""]
    if not known:
        lines += ["Delegate one:", "  mam delegate --agent-session exec:demo --exec 'claude -p' --stdin "
                                   "--prompt 'say hello'", ""]
    return lines


def overview_json(job: Job, beat: Optional[Beat]) -> Dict[str, Any]:
    return {"job_id": job.job_id, "status": job.status, "phase": job.phase, "reason": job.reason,
            "agent_session": job.agent_session, "title": job.title, "attempt_id": job.attempt_id,
            "created_at": job.created_at, "finished_at": job.finished_at, "last_event": job.last_event,
            "last_event_at": job.last_event_at, "detail": job.detail,
            "asks": (job.detail or "") if asks_permission(job) else None, **signs_of_life(job, beat)}


def daemon_word(info: DaemonInfo) -> str:
    """The daemon in a few words, for the overview."""
    if not info.alive:
        return "no daemon"
    down = [address for address, line in info.lines.items() if line["state"] != "up"]
    return "daemon " + ("STUCK" if not info.turning else "not connected" if down else "up")


def daemon_lines(info: DaemonInfo, owed: Tuple[int, int], unanswered: int, older: bool) -> List[str]:
    """`mam daemon status`."""
    if not info.alive:
        return ["no daemon runs" + ("; %d events are owed" % owed[0] if owed[0] else "")]
    lines = ["daemon %d, up %s, build %s%s%s" % (
        info.process["pid"], format_duration(elapsed_s(None, info.started_at) or 0), info.build,
        " (OLDER than this mam: mam daemon stop)" if older else "", "" if info.turning else ", STUCK")]
    for address, line in sorted(info.lines.items()):
        refused = ", %d remote jobs refused (not heard)" % line["refused"] if line["refused"] else ""
        lines.append("broker %s: %s%s%s" % (address, line["state"], ", " + line["why"] if line["why"] else "", refused))
    lines.append("%d events and %d states owed, %d beats armed, %d remote jobs subscribed" % (
        owed[0], owed[1], info.armed, info.subscribed))
    if unanswered:
        lines.append("%d runners have not answered yet that their work is over" % unanswered)
    if info.runner:
        lines.append("runner %(id)s of remote:%(session)s, %(state)s, busy %(busy)d of %(slots)d" % info.runner)
    if info.drops:
        lines.append("dropped: " + ", ".join("%s %d" % pair for pair in sorted(info.drops.items())))
    return lines


def runner_record(presence: Presence, lives: bool) -> Dict[str, Any]:
    """One runner for `remote list --json`. `silent`: the broker keeps its word, and it has given no sign of life."""
    state = "silent" if presence.state == "online" and not lives else presence.state
    return {**presence._asdict(), "state": state}


def runner_table(runners: Sequence[Tuple[Presence, bool]], colour: bool) -> List[str]:
    """`mam remote list`."""
    if not runners:
        return ["no runner has ever served a session on this broker"]
    rows = []
    for presence, lives in runners:
        slots = "%d of %d%s" % (presence.busy, presence.slots, ", pool" if presence.pool else "")
        rows.append((presence.session, presence.runner, runner_record(presence, lives)["state"], slots, presence.host,
                     presence.version, _ago(elapsed_s(None, presence.timestamp))))
    return table(("SESSION", "RUNNER", "STATE", "BUSY", "HOST", "MAM", "LAST SEEN"), rows, colour)


def session_table(records: Sequence[Dict[str, Any]], colour: bool) -> List[str]:
    """`mam session list`, of session_record()s."""
    if not records:
        return ["no sessions; start one: mam session create alice --agent claude-code"]
    rows = []
    for one in records:
        since = one["created_at"] if one["status"] == "running" else one["ended_at"] or one["updated_at"]
        detail = "" if one["status"] == "running" else one["detail"] or ""
        rows.append((one["session"], one["status"], one["agent"] or "-", one["job"] or "-",
                     _ago(elapsed_s(None, since)), one["conversation"] or "-", one["workdir"] or "-", detail[:60]))
    return table(("SESSION", "STATUS", "AGENT", "JOB", "SINCE", "CONVERSATION", "WORKDIR", ""), rows, colour)


def permission_line(job_id: str, detail: str) -> str:
    """What stands out in a follower's stderr when a job needs a human."""
    return "PERMISSION required by job %s: %s   -> mam answer %s 'your answer'" % (job_id, detail, job_id)


def result_line(job: Job) -> str:
    """The last line of a delegation."""
    return "RESULT job=%s %s after %s: %s" % (
        job.job_id, status_word(job), format_duration(took_s(job)), job.detail or "")


# ==============================================================================
# 19. Commands
#
# Pairs: add_x(parser) declares a command's arguments, cmd_x(args) carries it out
# and returns an exit code. Only the parser of the command at hand is ever built.
# ==============================================================================

Command = namedtuple("Command", "run add summary group")


def _out(line: str) -> None:
    sys.stdout.write(line + "\n")


def _say(line: str) -> None:
    """Something for the person at the terminal that is not the answer."""
    sys.stderr.write("mam: " + line + "\n")


def _dump(value: Any) -> None:
    import json
    _out(harmless_json(json.dumps(value, ensure_ascii=False, indent=2)))


def _wants_colour(settings: Settings) -> bool:
    return sys.stdout.isatty() and not settings.get("NO_COLOR")


def _examples(parser: Any, *examples: str) -> None:
    parser.epilog = "examples:\n" + "\n".join("  " + example for example in examples)


def _add_job(parser: Any, help: str = "job id") -> None:
    parser.add_argument("job", nargs="?", metavar="JOB", help=help)
    parser.add_argument("--job", dest="job_flag", metavar="JOB", help="the same, as v4 wrote it")


def _job_of(args: Any) -> str:
    job_id = args.job_flag or args.job
    if args.job_flag and args.job and args.job_flag != args.job:
        raise MamError("two jobs are named: %r and %r" % (args.job[:80], args.job_flag[:80]), exit=Exit.USAGE,
                       code="usage")
    if not job_id:
        raise MamError("which job? name its id", exit=Exit.USAGE, code="usage", hint="`mam list` shows the jobs")
    return check_job_id(job_id)


def _add_json(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def _positive(text: str) -> float:
    import argparse
    try:
        return parse_seconds(text, "")
    except MamError:
        raise argparse.ArgumentTypeError("%r is not a positive number of seconds" % text) from None


def _positive_or_0(text: str) -> float:
    return 0.0 if text == "0" else _positive(text)


def _count(text: str) -> int:
    import argparse
    if whole_number(text, 1, 99999999) is None:
        raise argparse.ArgumentTypeError("%r is not a positive whole number" % text)
    return int(text)


def _read_text(source: str, what: str) -> str:
    """A file's text, or stdin's for `-`: strict UTF-8, every character kept."""
    try:
        if source == "-":
            raw = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with open(source, "rb") as file:
                raw = file.read(MAX_PROMPT_BYTES + 1)
        if len(raw) > MAX_PROMPT_BYTES:
            raise MamError("%s %s is larger than %d bytes" % (what, source, MAX_PROMPT_BYTES), exit=Exit.USAGE,
                           code="too_large")
        return raw.decode("utf-8")
    except OSError as error:
        raise MamError("cannot read %s %s: %s" % (what, source, error.strerror), exit=Exit.USAGE,
                       code="unreadable") from None
    except UnicodeDecodeError as error:
        raise MamError("cannot read %s %s: not UTF-8 at byte %d" % (what, source, error.start), exit=Exit.USAGE,
                       code="undecodable", hint="convert it, for example with iconv -t utf-8") from None


def _argument_text(text: str, what: str) -> str:
    if not is_encodable(text):
        raise MamError("%s is not UTF-8" % what, exit=Exit.USAGE, code="undecodable")
    return text


def _add_prompt(parser: Any, required: bool) -> None:
    group = parser.add_mutually_exclusive_group(required=required)
    group.add_argument("--prompt", metavar="TEXT", help="the prompt itself")
    group.add_argument("--prompt-file", metavar="FILE", help="read it from a UTF-8 file; - is stdin")


def _prompt_of(args: Any) -> Optional[str]:
    if args.prompt_file is not None:
        prompt = _read_text(args.prompt_file, "--prompt-file")
    elif args.prompt is not None:
        prompt = _argument_text(args.prompt, "--prompt")
    else:
        return None
    if not prompt.strip():
        raise MamError("the prompt is empty", exit=Exit.USAGE, code="usage")
    return prompt


# -- registering -------------------------------------------------------------------


def _add_contract(parser: Any) -> None:
    """What a job can be given at its registration, by v4's names."""
    parser.add_argument("--agent", default=DEFAULT_AGENT, help="kind of agent (default %(default)s)")
    parser.add_argument("--role", default="Worker", help="role of the agent (default %(default)s)")
    parser.add_argument("--timeout", type=_positive, default=DEFAULT_TIMEOUT_S, metavar="S",
                        help="wall clock of the whole job in seconds (default %(default)s)")
    parser.add_argument("--idle-timeout", type=_positive, metavar="S",
                        help="seconds without a sign of life that mean unresponsive (default: misses x heartbeat)")
    parser.add_argument("--heartbeat", "--heartbeat-sec", dest="heartbeat", type=_positive, metavar="N",
                        help="seconds between signs of life (default %s)" % DEFAULT_HEARTBEAT_S)
    parser.add_argument("--heartbeat-misses", type=_count, metavar="K",
                        help="how many may be missed (default %s)" % DEFAULT_HEARTBEAT_MISSES)
    parser.add_argument("--ack-timeout", type=_positive, metavar="T",
                        help="seconds from delivery to the first event (default %s)" % DEFAULT_ACK_TIMEOUT_S)
    parser.add_argument("--artifact", action="append", default=[], dest="artifacts", metavar="PATH",
                        help="a file that must exist in the workdir at the end; may be repeated")
    parser.add_argument("--broker", metavar="[mqtt[s]://][USER@]HOST[:PORT]",
                        help="this job's own broker, over MQTT_BROKER and MQTT_PORT")
    parser.add_argument("--job-id", metavar="ID", help="choose the id ([A-Za-z0-9_-], at most 64)")
    parser.add_argument("--bits", type=int, choices=(32, 128), default=32, help="length of a made id (default 32)")


def _contract(args: Any, settings: Settings, prompt: str, workdir: str) -> Dict[str, Any]:
    """The columns of a new job; everything is checked here, before anything is written."""
    heartbeat = args.heartbeat or settings.seconds("MAM_HEARTBEAT_SEC", DEFAULT_HEARTBEAT_S)
    misses = args.heartbeat_misses or settings.count("MAM_HEARTBEAT_MISSES", DEFAULT_HEARTBEAT_MISSES)
    job_id = check_job_id(args.job_id) if args.job_id is not None else random_hex(32 if args.bits == 128 else 8)
    session = check_session(args.agent_session)
    block = parse_broker_flag(args.broker) if args.broker is not None else None
    for name, value in (("--agent", args.agent), ("--role", args.role), ("the working folder", workdir)):
        _argument_text(value, name)
    return {
        "job_id": job_id, "title": title_of(prompt), "agent": clean_text(args.agent), "agent_session": session,
        "role": clean_text(args.role), "broker": compact_json(block) if block else None,
        "topic_prefix": "%s/%s" % (topic_root(settings), job_id), "timeout_sec": args.timeout,
        "idle_timeout_sec": args.idle_timeout or heartbeat * misses, "heartbeat_sec": heartbeat,
        "heartbeat_misses": misses,
        "ack_timeout_sec": args.ack_timeout or settings.seconds("MAM_ACK_TIMEOUT_S", DEFAULT_ACK_TIMEOUT_S),
        "expected_artifacts": compact_json([check_artifact(path, workdir) for path in args.artifacts]),
        "job_type": "direct", "max_iterations": DEFAULT_MAX_ITERATIONS, "attempt_id": 1,
        "transport": transport_of(session),
        "workdir": workdir, "wire": wire_of(settings, block), "prompt": prompt}


def add_register(parser: Any) -> None:
    _add_prompt(parser, True)
    parser.add_argument("--agent-session", default=DEFAULT_SESSION, metavar="KIND:NAME",
                        help="who is to take it (default %(default)s)")
    _add_contract(parser)
    parser.add_argument("--auth-token", metavar="-", help="read the signing key from stdin; only `-` is accepted")
    parser.add_argument("--job-type", default="direct", choices=("direct", "loop", "discuss"))
    parser.add_argument("--reviewer", help="agent that reviews")
    parser.add_argument("--reviewer-session", metavar="KIND:NAME")
    parser.add_argument("--max-iterations", type=_count, default=DEFAULT_MAX_ITERATIONS)
    parser.add_argument("--dispatch-token", metavar="TOKEN", help="the first attempt's token (made if not given)")
    parser.add_argument("--attempt-id", type=_count, default=1, metavar="N")
    parser.add_argument("--transport", choices=("herdr", "remote"), help="accepted; it follows from the session")
    _examples(parser, "mam register --agent-session queue:builders --prompt-file brief.md",
              "mam pick --agent-session queue:builders")


def cmd_register(args: Any) -> int:
    """Make a pending job and print its id. Never touches the network."""
    settings = load_settings(args.registry_dir)
    record_ = _contract(args, settings, _prompt_of(args) or "", os.getcwd())
    token = None
    if args.auth_token is not None:
        if args.auth_token != "-":
            raise MamError("--auth-token takes only -, and reads the token from stdin", exit=Exit.USAGE,
                           code="secret_in_argv", hint="an argument is visible to every user of this host")
        token = sys.stdin.readline().strip()
        if len(token) < 16 or not token.isascii() or not token.isprintable():
            raise MamError("the token on stdin must be at least 16 printable ASCII characters", code="bad_token")
    if args.dispatch_token is not None and not is_name(args.dispatch_token):
        raise MamError("--dispatch-token must be 1 to 64 of letters, digits, _ and -", exit=Exit.USAGE, code="usage")
    if args.reviewer is not None:
        args.reviewer = clean_text(_argument_text(args.reviewer, "--reviewer"))
    record_.update(job_type=args.job_type, reviewer=args.reviewer, max_iterations=args.max_iterations,
                   reviewer_session=args.reviewer_session and check_session(args.reviewer_session),
                   attempt_id=args.attempt_id)
    keys = None
    if record_["transport"] == "remote" and token is None and settings.get("MAM_DISPATCH_SECRET"):
        keys = keys_for(settings, record_["agent_session"])
    with Registry(settings.registry_dir, create=True) as registry:
        _out(registry.register(record_, token, args.dispatch_token, keys).job_id)
    return Exit.OK


def add_delegate(parser: Any) -> None:
    _add_prompt(parser, True)
    parser.add_argument("--agent-session", required=True, metavar="KIND:NAME",
                        help="exec:NAME (with --exec), tmux:NAME, herdr:NAME, remote:NAME or queue:NAME")
    parser.add_argument("--exec", dest="command", metavar="CMD", help="the command that does the work, for exec:")
    parser.add_argument("--stdin", action="store_true", help="feed the prompt to the command's stdin")
    parser.add_argument("--workdir", metavar="DIR", help="where the work is done (default: here)")
    parser.add_argument("--validate", metavar="CMD", help="a command that must succeed before the job is completed")
    _add_contract(parser)
    parser.add_argument("--wait-for-runner", type=_positive, metavar="S",
                        help="remote: wait up to S seconds for a runner that serves the session (default: not at all)")
    _add_insecure(parser)
    parser.add_argument("--create", action="store_true", help="tmux, herdr: start the session, of --agent in --workdir")
    _add_launch(parser)
    parser.add_argument("--detach", action="store_true", help="print the job id and do not follow")
    parser.add_argument("--cancel-on-exit", action="store_true", help="cancel the job when this command is ended")
    _add_json(parser)
    _examples(parser, "mam delegate --agent-session exec:demo --exec 'claude -p' --stdin --prompt-file brief.md",
              "mam delegate --agent-session tmux:alice --prompt 'fix the failing test' --artifact report.md",
              "mam delegate --agent-session exec:x --exec 'make all' --prompt build --validate 'make check'",
              "mam delegate --create --agent codex --agent-session tmux:bob --workdir src --prompt-file brief.md",
              "mam delegate --agent-session remote:gpu1 --prompt-file brief.md --wait-for-runner 60",
              "mam delegate --agent-session exec:x --exec ./work.sh --prompt go --detach; mam watch JOB")


def cmd_delegate(args: Any) -> int:
    """Register, hand over, follow to the end; the exit code tells how it ended."""
    raise_on_sigterm()
    settings = load_settings(args.registry_dir)
    workdir = os.path.abspath(args.workdir or os.getcwd())
    prompt = _prompt_of(args) or ""
    record_ = _contract(args, settings, prompt, workdir)
    record_.update(command=args.command, feed_stdin=int(args.stdin), validate_cmd=args.validate,
                   runner_wait_s=args.wait_for_runner, supervisor=keeper_of("delegate"))
    for name, text in (("--exec", args.command), ("--validate", args.validate)):
        if text is not None and ("\0" in text or not is_encodable(text)):
            raise MamError("%s must be UTF-8 text" % name, exit=Exit.USAGE, code="usage")
    plan = _plan_of_delegation(args, workdir)
    preflight(settings, args.agent_session, args.command, workdir, args.agent, plan)
    block = None if args.broker is None else parse_broker_flag(args.broker)
    keys = None
    if record_["transport"] == "remote":
        preflight_remote(settings, record_, broker_settings(settings, block), args.insecure_broker)
        keys = keys_for(settings, args.agent_session)
    elif args.wait_for_runner:
        raise MamError("--wait-for-runner goes with a remote: session, not with %s" % args.agent_session,
                       exit=Exit.USAGE, code="usage")
    warn_public_broker(broker_settings(settings, block))
    with Registry(settings.registry_dir, create=True) as registry:
        job = registry.register(record_, keys=keys)
        try:
            ensure_daemon(registry, settings)     # before delivery: from then on its clocks run
            job = _hand_over(registry, settings, job, plan)
            if args.detach:
                _out(compact_json({"job_id": job.job_id}) if args.json else job.job_id)
                return Exit.OK
            _say("job %s registered for %s; `mam watch %s` follows it from elsewhere" % (
                job.job_id, job.agent_session, job.job_id))
            return _follow_delegated(settings, job, args.json)
        except (KeyboardInterrupt, Terminated, BrokenPipeError):
            _leave(registry, settings, job.job_id, args.cancel_on_exit)
            raise


def _add_insecure(parser: Any) -> None:
    parser.add_argument("--insecure-broker", action="store_true",
                        help="remote: allow a broker without TLS or password (also MAM_INSECURE_BROKER=1)")


def _add_launch(parser: Any) -> None:
    parser.add_argument("--yolo", action="store_true",
                        help="start the agent so that it asks no permissions (never a default)")
    parser.add_argument("--mux-socket", metavar="S",
                        help="socket of the multiplexer: tmux: name or path (default: MAM_TMUX_SOCKET, else the "
                             "user's); herdr: session or path")


def _plan_of_delegation(args: Any, workdir: str) -> Optional[SessionPlan]:
    """With --create, how the session is started; else None."""
    if not args.create:
        if args.yolo or args.mux_socket is not None:
            raise MamError("--yolo and --mux-socket go with --create", exit=Exit.USAGE, code="usage")
        return None
    if args.agent_session.partition(":")[0] not in ("tmux", "herdr"):
        raise MamError("--create goes with a tmux: or herdr: session, not with %s" % args.agent_session,
                       exit=Exit.USAGE, code="usage")
    return SessionPlan(args.agent_session, args.agent, workdir, args.mux_socket or "", args.yolo, [])


def _hand_over(registry: Registry, settings: Settings, job: Job, plan: Optional[SessionPlan] = None) -> Job:
    """Hand over, or close the job and say so: whoever is told of a failure must not find it running later."""
    try:
        return hand_over(registry, settings, job, plan)
    except (MamError, OSError) as error:
        if isinstance(error, MamError) and error.code in ("session_busy", "spawn_failed"):
            raise                          # closed already
        why = str(error)
    try:
        record(registry, settings, job.job_id, "spawn_failed", source="delegate_wrapper", detail=why,
               attempt=job.attempt_id)
    except (MamError, OSError):
        raise MamError("job %s is registered and cannot be handed over now (%s)" % (job.job_id, why),
                       hint="do not run this again: mam hands it over later; `mam cancel %s` ends it" % job.job_id,
                       code="undelivered") from None
    raise MamError("%s (job %s is closed)" % (why, job.job_id), code="spawn_failed")


def _follow_delegated(settings: Settings, job: Job, as_json: bool) -> int:
    """Show the events of a job's attempt to its end; its result last."""
    with Registry(settings.registry_dir) as reading:
        follower = Follower(reading, [job.job_id], job.attempt_id)
        follow(follower, _emitter(as_json), lambda: follower.done, _caretaker(settings, follower=follower, jobs=[job]))
        ended = follower.ended()[0]
        _out(compact_json({"result": overview_json(ended, None)}) if as_json else result_line(ended))
        if not _wait_delivered(reading, ended.job_id, 0, 1.0).sent:
            _say("not all of it is sent yet: `mam daemon` tells why")
        return exit_of(ended)


def _caretaker(settings: Settings, clock: Callable[[], Optional[str]] = lambda: None,
               follower: Optional[Follower] = None, jobs: Sequence[Job] = (),
               subscribed: Callable[[Job], None] = lambda job: None) -> Callable[[], Optional[str]]:
    """A follower's tick: its own clock, the daemon's life, and whether it hears remote jobs."""
    try:
        registry = Registry(settings.registry_dir)      # not the follower's: one's own commits wake nobody
    except MamError:
        return clock                   # removed just now, which the follower itself will say
    ear = RemoteEar(registry, settings, jobs, subscribed, _say)
    next_look = [0.0]

    def tick() -> Optional[str]:
        if follower:
            ear.look(follower.pending)
        now = time.monotonic()
        if now >= next_look[0]:
            next_look[0] = now + CARE_S
            ensure_daemon(registry, settings)
        return clock()
    return tick


def _leave(registry: Registry, settings: Settings, job_id: str, cancel: bool) -> None:
    """What a delegator that is ended does about its job: one nobody has is closed, others go on."""
    job = registry.job(job_id)
    if job.status in TERMINAL_STATUSES:
        return
    if cancel or job.delivery == "none" and can_deliver(job):
        _cancel(registry, settings, job_id, "cancelled: the delegator was ended")
    else:
        ensure_daemon(registry, settings)
        _say("job %s goes on; `mam watch %s` follows it, `mam cancel %s` ends it" % (job_id, job_id, job_id))


def _emitter(as_json: bool) -> Callable[[List[Event]], None]:
    render = event_json if as_json else event_line

    def emit(events: List[Event]) -> None:
        sys.stdout.write("\n".join([render(event) for event in events]) + "\n")
        sys.stdout.flush()
        if events[-1].event == "permission_required":      # nothing came after it: somebody waits for a human
            _say(permission_line(events[-1].job_id, events[-1].detail))
    return emit


# -- publishing ----------------------------------------------------------------------


def add_publish(parser: Any) -> None:
    _add_job(parser)
    parser.add_argument("--event", required=True, metavar="E", help=", ".join(EVENTS))
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--detail", metavar="TEXT", help="what happened, in one line")
    group.add_argument("--detail-file", metavar="FILE", help="read it from a file (64 KiB at most); - is stdin")
    parser.add_argument("--data", metavar="JSON", help="an object with facts of your own")
    parser.add_argument("--heartbeat", type=_positive, metavar="N", help="with started: a sign of life every N seconds")
    parser.add_argument("--watch-pid", type=_count, metavar="PID",
                        help="beat as long as this process lives (default: the agent this runs under)")
    parser.add_argument("--expect-dispatch-token", "--dispatch-token", dest="token", metavar="TOKEN",
                        help="the attempt this speaks for (default: MAM_DISPATCH_TOKEN)")
    parser.add_argument("--attempt-id", type=_count, metavar="N", help="the same by number (default: MAM_ATTEMPT_ID)")
    parser.add_argument("--attempts", type=_count, default=3, metavar="N", help="tries to send (default %(default)s)")
    _add_json(parser)
    _examples(parser, "mam publish --job 918b0612 --event started --heartbeat 30",
              "mam publish --job 918b0612 --event progress --detail 'section 1 done' --data '{\"tests\": 42}'",
              "mam publish --job 918b0612 --event completed --detail-file report.md",
              "$MAM_PUBLISH_CMD --event error --detail 'the build is broken'   # inside a delegated command")


def cmd_publish(args: Any) -> int:
    """Record an event, then send it. 0 sent (or no wire), 2 recorded but not sent, 4 refused."""
    settings = load_settings(args.registry_dir)
    job_id = _job_of(args)
    if args.event not in EVENTS:
        raise MamError("--event %r: it must be one of %s" % (args.event, ", ".join(EVENTS)), code="bad_event")
    if args.heartbeat and args.event != "started":
        raise MamError("--heartbeat goes with --event started", exit=Exit.USAGE, code="usage")
    detail = args.detail or ""
    if args.detail_file:
        detail = _read_text(args.detail_file, "--detail-file").strip()
    data = parse_data(args.data) if args.data is not None else {}
    attempt, token = _attempt_of(args, settings, job_id)
    with Registry(settings.registry_dir) as registry:
        extra = {"heartbeat_sec": args.heartbeat, "watch": _watched(args, registry, job_id)} if args.heartbeat else None
        answer = record(registry, settings, job_id, args.event, source="worker", detail=detail, data=data,
                        attempt=attempt, token=token, extra=extra)
        if answer.event:
            if args.json:
                _out(event_json(answer.event))
            elif settings.get("MAM_JOB_ID") != job_id:      # else it would become its command's last line
                _out("%s seq=%d %s" % (job_id, answer.event.seq, args.event))
        elif answer.idempotent:
            _say(answer.reason)
        else:
            raise MamError("refused: %s" % answer.reason, exit=Exit.REFUSED, code="refused",
                           hint="what you reported is kept in the job's log; leave your work in place and stop")
        if answer.job.phase:
            _settle_soon(registry, settings, job_id)
        if extra:
            beat_beside(registry, settings, job_id, extra["watch"])
        sent = deliver_event(registry, settings, answer.job, answer.event.n if answer.event else 0, args.attempts)
        if sent.sent:
            return Exit.OK
        _say("recorded, not sent yet: %s" % sent.why)
        return Exit.TIMEOUT


def _settle_soon(registry: Registry, settings: Settings, job_id: str) -> None:
    """Have the job settled even where no daemon can be started. It is recorded, whatever comes of this."""
    try:
        ensure_supervisor(registry, settings, job_id)
    except (MamError, OSError) as error:
        _say("recorded; the job's supervisor cannot be started: %s" % error)


def _attempt_of(args: Any, settings: Settings, job_id: str) -> Tuple[Optional[int], Optional[str]]:
    """(attempt, token) a publisher speaks for: its flags, else its environment if that is this job's."""
    if args.attempt_id is not None or args.token is not None:
        return args.attempt_id, args.token
    mine = settings.get("MAM_JOB_ID") or settings.get("JOB_ID")
    if mine and mine != job_id:
        return None, None      # an agent that delegates speaks about another job than its own
    attempt = settings.get("MAM_ATTEMPT_ID")
    if attempt and whole_number(attempt, 1, MAX_SAFE_INTEGER) is None:
        raise MamError("MAM_ATTEMPT_ID is %r: it must be a number" % attempt, code="bad_value")
    return int(attempt) if attempt else None, settings.get("MAM_DISPATCH_TOKEN") or None


def _watched(args: Any, registry: Registry, job_id: str) -> Optional[Dict[str, Any]]:
    """The process whose life a beat stands for: as named, the agent of the job's session, or one known by its name."""
    if args.watch_pid is not None:
        identity = identity_of(args.watch_pid)
        if identity is None:
            raise MamError("--watch-pid %d: no such process" % args.watch_pid, code="bad_pid")
        return identity
    ancestor = _session_ancestor(registry, job_id) or agent_ancestor()
    if ancestor is None:
        _say("note: no agent process recognised above this command; the beat lasts until the job's end "
             "(--watch-pid PID names a process to watch)")
        return None
    return identity_of(ancestor)


def _session_ancestor(registry: Registry, job_id: str) -> Optional[int]:
    """The process of the job's own session, if this command runs below it."""
    import json
    found = registry.jobs_by_id([job_id])
    row = inventory_of(registry).session(found[0].agent_session) if found else None
    process = json.loads(row.process) if row and row.status == "running" and row.process else None
    return process["pid"] if process and is_alive(process) and process["pid"] in ancestors() else None


def add_beat(parser: Any) -> None:
    parser.add_argument("job", metavar="JOB")


def cmd_beat(args: Any) -> int:
    """Give signs of life beside a watched process that the daemon cannot see (another pid namespace).

    It belongs to one arming of the beat, ends with it, and takes it back when the process has ended.
    """
    import json
    settings = load_settings(args.registry_dir)
    with Registry(settings.registry_dir) as registry:
        beat = registry.beat(args.job)
        if not beat or not beat.watch:
            return Exit.OK
        watch, due = json.loads(beat.watch), 0.0
        while is_alive(watch) is not None:
            try:
                now = registry.beat(args.job)
                if not now or now.armed_mono != beat.armed_mono:
                    break
                if not is_alive(watch):
                    registry.drop_beat(beat, "_beat", "the watched process %d has ended" % watch["pid"])
                elif time.monotonic() >= due and not is_stopped(watch["pid"]):
                    registry.touch_beat(beat)
                    due = time.monotonic() + beat.period_s
            except MamError as error:      # busy, or a full disk: that is no death of the agent's
                if error.exit != Exit.NOT_RECORDED or error.code == "registry_gone":
                    raise
            time.sleep(min(LOOK_S, beat.period_s))
    return Exit.OK


# -- following -------------------------------------------------------------------------


def add_watch(parser: Any) -> None:
    _add_job(parser)
    parser.add_argument("--attempt-id", type=_count, metavar="N", help="only this attempt and later ones")
    _add_json(parser)
    _examples(parser, "mam watch 918b0612", "mam watch 918b0612 --json | jq .detail")


def cmd_watch(args: Any) -> int:
    """A job's events from the first on, until it ends. Reads only; never closes a job."""
    settings = load_settings(args.registry_dir)
    job_id = _job_of(args)
    with Registry(settings.registry_dir) as registry:
        job = registry.job(job_id)
        follower = Follower(registry, [job_id], args.attempt_id)
        follow(follower, _emitter(args.json), lambda: follower.done,
               _caretaker(settings, _pulse(registry, job_id), follower, [job]))
        ended = follower.ended()[0]
        if not args.json:
            _say(what_became(ended))
        return exit_of(ended)


def _pulse(registry: Registry, job_id: str) -> Callable[[], Optional[str]]:
    """Tell the person at a terminal now and then how a silent job is: alive and progressing are two things."""
    next_look = [time.monotonic() + PULSE_S]

    def tick() -> Optional[str]:
        now = time.monotonic()
        if now >= next_look[0] and sys.stderr.isatty():
            next_look[0] = now + PULSE_S
            job = registry.job(job_id)
            _say("alive %s, progress %s" % (_ago(last_life_s(job, registry.beat(job_id))), _ago(silence_s(job))))
        return None
    return tick


def add_wait(parser: Any) -> None:
    parser.add_argument("jobs", nargs="+", metavar="JOB")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--any", action="store_true", help="until the first of them ends")
    group.add_argument("--all", action="store_true", help="until all have ended (the default)")
    parser.add_argument("--timeout", type=_positive, metavar="S", help="give up waiting after S seconds (exit 2)")
    _add_json(parser)
    _examples(parser, "mam wait 918b0612 77aa01ce", "mam wait --any --timeout 600 918b0612 77aa01ce")


def cmd_wait(args: Any) -> int:
    """Wait for ends; prints a line for each job that has ended."""
    settings = load_settings(args.registry_dir)
    job_ids = list(dict.fromkeys(check_job_id(job_id) for job_id in args.jobs))
    with Registry(settings.registry_dir) as registry:
        jobs = [registry.job(job_id) for job_id in job_ids]
        follower = Follower(registry, job_ids)
        patience = Patience(follower, args.timeout, {}, {})
        shown: List[Job] = []

        def show_ends() -> bool:
            for job in follower.take_ends():
                shown.append(job)
                _out(compact_json(overview_json(job, None)) if args.json else "%s %s" % (
                    job.job_id, status_word(job)))
                sys.stdout.flush()
            return bool(shown) if args.any else follower.done
        why = follow(follower, lambda events: None, show_ends, _caretaker(
            settings, patience.exhausted, follower, jobs))
        if why:
            _say(why)
            return Exit.TIMEOUT
        return exit_of_all(shown)


def add_subscribe(parser: Any) -> None:
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--job", metavar="JOB")
    target.add_argument("--wait-any", action="store_true", help="every job that is pending or running now")
    parser.add_argument("--timeout", type=_positive, metavar="S", help="wall clock (default: the job's)")
    parser.add_argument("--idle-timeout", type=_positive, metavar="S",
                        help="seconds without an event, per job (default: the job's)")
    parser.add_argument("--ack-timeout", type=_positive_or_0, metavar="S",
                        help="seconds more for the first event (default: the job's; "
                             "0: idle counts only from the first event on)")
    parser.add_argument("--expect-retention", action="store_true", help="warn if a job has not ended after 3 s")
    parser.add_argument("--expect-dispatch-token", metavar="TOKEN", help="only events with this token")
    parser.add_argument("--attempt-id", type=_count, metavar="N", help="only this attempt and later ones")
    parser.add_argument("--remote", action="store_true", help="accepted; a job knows whether it is remote")
    parser.add_argument("-v", "--verbose", action="store_true")
    _add_json(parser)
    _examples(parser, "mam subscribe --job 918b0612", "mam subscribe --wait-any --idle-timeout 300")


def cmd_subscribe(args: Any) -> int:
    """v4's subscriber: events of one job or of all open ones. 0 completed, 1 error, 2 timed out, nothing."""
    settings = load_settings(args.registry_dir)
    try:
        registry = Registry(settings.registry_dir)
        jobs = [registry.job(check_job_id(args.job))] if args.job else registry.open_jobs()
    except MamError as error:
        if error.code not in ("unknown_job", "no_registry"):
            raise
        raise MamError(error.message, exit=Exit.TIMEOUT, hint=error.hint, code=error.code) from None
    with registry:
        if not jobs:
            raise MamError("no pending or running jobs to wait for", exit=Exit.TIMEOUT, code="nothing")
        follower = Follower(registry, [job.job_id for job in jobs], args.attempt_id, args.expect_dispatch_token)
        clock = _subscriber_clock(args, follower, jobs)
        for job in jobs:
            if job.transport != "remote":
                _subscribed(job)
        why = follow(follower, _emitter(args.json), lambda: follower.done,
                     _caretaker(settings, clock, follower, jobs, _subscribed))
        if why:
            _say(why)
            return Exit.TIMEOUT
        return exit_of_all(follower.ended())


def _subscribed(job: Job) -> None:
    """v4's line; of a remote job only once the broker has granted the daemon's subscription."""
    _out("SUBSCRIBED %s" % events_topic(job))
    sys.stdout.flush()


def _subscriber_clock(args: Any, follower: Follower, jobs: Sequence[Job]) -> Callable[[], Optional[str]]:
    """v4's budgets: T + idle before a job's first event, idle after it, the wall clock over all."""
    ack = args.ack_timeout
    idle = {job.job_id: args.idle_timeout or job.idle_timeout_sec for job in jobs}
    first = {job.job_id: float("inf") if ack == 0 else idle[job.job_id] + (ack or job.ack_timeout_sec) for job in jobs}
    patience = Patience(follower, args.timeout or max(job.timeout_sec for job in jobs), idle, first)
    warn_at = [time.monotonic() + 3.0 if args.expect_retention else float("inf")]

    def tick() -> Optional[str]:
        if time.monotonic() >= warn_at[0]:
            warn_at[0] = float("inf")
            _say("--expect-retention: no end observed yet of %s" % ", ".join(follower.pending[:10]))
        return patience.exhausted()
    return tick


# -- looking ---------------------------------------------------------------------------


def _check_status(status: Optional[str]) -> None:
    if status is not None and status not in STATUSES:
        raise MamError("invalid status %r; expected one of %s" % (status, ", ".join(STATUSES)), code="bad_status")


def add_list(parser: Any) -> None:
    parser.add_argument("--status", metavar="S", help="only jobs that are %s" % ", ".join(STATUSES))
    _add_json(parser)
    _examples(parser, "mam list", "mam list --status running --json")


def cmd_list(args: Any) -> int:
    """The jobs of this registry in the order of their registration."""
    _check_status(args.status)
    settings = load_settings(args.registry_dir)
    registry = existing_registry(settings)
    jobs = registry.jobs(args.status) if registry else []
    beats = registry.beats() if registry else {}
    if args.json:
        _dump([job_record(job, registry.prompt(job.job_id), beats.get(job.job_id)) for job in jobs]
              if registry else [])
    elif not jobs:
        _out("(no jobs)")
    else:
        sys.stdout.write("".join([job_line(job, beats.get(job.job_id)) + "\n" for job in jobs]))
    return Exit.OK


def add_get(parser: Any) -> None:
    _add_job(parser)
    parser.add_argument("--show-secrets", action="store_true", help="the signing key too")
    parser.add_argument("--json", action="store_true", help="accepted; the record is JSON anyway")
    _examples(parser, "mam get 918b0612 | jq .status")


def cmd_get(args: Any) -> int:
    """One job's record as JSON."""
    settings = load_settings(args.registry_dir)
    job_id = _job_of(args)
    with Registry(settings.registry_dir) as registry:
        _dump(job_record(registry.job(job_id), registry.prompt(job_id), registry.beat(job_id), args.show_secrets))
    return Exit.OK


def add_logs(parser: Any) -> None:
    _add_job(parser)
    parser.add_argument("--list", action="store_true", dest="list_all", help="a line for every job instead")
    parser.add_argument("--output", action="store_true", help="what the job's command printed (--attempt-id N: then)")
    parser.add_argument("--attempt-id", type=_count, metavar="N")
    parser.add_argument("--logs-dir", metavar="DIR", help="accepted; the log is in the registry")
    parser.add_argument("--tail", type=int, default=0, metavar="N", help="only the last N lines")
    _add_json(parser)
    _examples(parser, "mam logs 918b0612", "mam logs 918b0612 --json --tail 5", "mam logs 918b0612 --output")


def cmd_logs(args: Any) -> int:
    """Everything that was recorded about a job, refused and late words included."""
    settings = load_settings(args.registry_dir)
    if args.logs_dir or settings.get("DELEGATE_JOB_LOGS_DIR"):
        _say("--logs-dir and DELEGATE_JOB_LOGS_DIR have no meaning here: the log is in the registry")
    if args.list_all:
        args.status = None
        return cmd_list(args)
    job_id = _job_of(args)
    with Registry(settings.registry_dir) as registry:
        job = registry.job(job_id)
        if args.output:
            return _print_output(registry, job, args.attempt_id or job.attempt_id)
        events = registry.events(job_id)
        for event in events[-args.tail:] if args.tail > 0 else events:
            _out(harmless_json(compact_json(log_record(event))) if args.json else log_line(event))
    return Exit.OK


def _print_output(registry: Registry, job: Job, attempt: int) -> int:
    path = os.path.join(registry.directory, "output", "%s.a%d.log" % (job.job_id, attempt))
    try:
        with open(path, "rb") as file:
            sys.stdout.flush()
            for block in iter(lambda: file.read(1 << 16), b""):
                sys.stdout.buffer.write(block)
    except FileNotFoundError:
        raise MamError("no output of attempt %d of job %s" % (attempt, job.job_id), code="no_output",
                       hint="only exec: jobs have their output kept") from None
    return Exit.OK


def add_overview(parser: Any) -> None:
    _add_json(parser)


def cmd_overview(args: Any) -> int:
    """`mam` alone: open jobs with their signs of life, and the last ends."""
    settings = load_settings(args.registry_dir)
    registry = existing_registry(settings)
    open_jobs, ends, beats, counts = [], [], {}, {}
    if registry:
        ensure_daemon(registry, settings)
        open_jobs, ends, counts = registry.open_jobs(), registry.last_ends(8), registry.counts()
        beats = registry.beats()
    if args.json:
        _dump({"registry": settings.registry_dir, "counts": counts,
               "open": [overview_json(job, beats.get(job.job_id)) for job in open_jobs],
               "ended": [overview_json(job, None) for job in ends]})
        return Exit.OK
    block = broker_block(settings)
    broker = "broker %(host)s:%(port)d" % block if block else "no broker"
    if registry:
        owed = sum(registry.count_owed())
        broker += "  " + daemon_word(daemon_info(registry)) + ("  %d messages not sent yet" % owed if owed else "")
    shown = open_jobs if len(open_jobs) <= 40 else open_jobs[-40:]
    for line in overview(settings.registry_dir, broker, counts, shown, beats, ends, _wants_colour(settings)):
        _out(line)
    if len(shown) < len(open_jobs):
        _out("(%d older open jobs: mam list)" % (len(open_jobs) - len(shown)))
    return Exit.OK


# -- changing --------------------------------------------------------------------------


def add_pick(parser: Any) -> None:
    parser.add_argument("--agent-session", default=DEFAULT_SESSION, metavar="KIND:NAME",
                        help="whose jobs (default %(default)s)")
    _add_json(parser)
    _examples(parser, "mam pick --agent-session queue:builders", "job=$(mam pick --agent-session queue:b) || exit 0")


def cmd_pick(args: Any) -> int:
    """Claim the oldest pending job of a session and print its id; exit 3 if there is none."""
    settings = load_settings(args.registry_dir)
    session = check_session(args.agent_session)
    registry = existing_registry(settings)
    job = registry.pick(session) if registry else None
    if job is None or registry is None:
        return Exit.BROKER       # v4: no pending job for this session
    brief = write_brief(registry, job)
    ensure_daemon(registry, settings)        # T runs from the claim
    try:
        if args.json:
            _dump({**worker_variables(registry, settings, job), "job_id": job.job_id, "brief": brief})
        else:
            _out(job.job_id)
        sys.stdout.flush()
    except OSError:      # nobody reads the answer: the job goes back, or it would be lost
        registry.transition(job.job_id, "set", expected_attempt=job.attempt_id, expected_last_seq=job.last_seq,
                            source=session, fields={"status": "pending"})
        raise
    return Exit.OK


def _cancel(registry: Registry, settings: Settings, job_id: str, detail: str) -> Transition:
    """Close a job as cancelled, tell the broker, and see its command end."""
    answer = record(registry, settings, job_id, "cancelled", source="operator", detail=detail)
    if answer.committed or answer.idempotent:
        end_run_of(registry, settings, job_id)
        _try_delivery(registry, settings, answer.job)
        deadline = time.monotonic() + CANCEL_WAIT_S
        while not registry.answered(job_id, answer.job.attempt_id) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    return answer


def _try_delivery(registry: Registry, settings: Settings, job: Job) -> None:
    """One try; what is not sent stays owed, and an operator's command has succeeded regardless."""
    sent = deliver_event(registry, settings, job, 0, attempts=1, wait_s=2.0)
    if not sent.sent:
        _say("recorded, not sent yet: %s" % sent.why)


def add_cancel(parser: Any) -> None:
    _add_job(parser)
    parser.add_argument("--detail", metavar="TEXT", help="why")
    _examples(parser, "mam cancel 918b0612 --detail 'no longer needed'")


def cmd_cancel(args: Any) -> int:
    """End a job: its command's process group gets TERM, after a grace KILL."""
    settings = load_settings(args.registry_dir)
    job_id = _job_of(args)
    with Registry(settings.registry_dir) as registry:
        answer = _cancel(registry, settings, job_id, args.detail or "")
        if not answer.committed and not answer.idempotent:
            end_left_behind(registry, settings, job_id)
            raise MamError("refused: %s" % answer.reason, exit=Exit.REFUSED, code="refused")
        word = answer.reason if answer.idempotent else "job %s is cancelled" % job_id
        if answer.job.dispatch and not registry.answered(job_id, answer.job.attempt_id):
            word += "; runner %s has not answered yet, and ends the work as soon as it hears of it" % answer.job.runner
        elif answer.job.dispatch and answer.committed:
            word += ", and runner %s has ended it" % answer.job.runner
        _say(word)
    return Exit.OK


def add_redispatch(parser: Any) -> None:
    _add_job(parser)
    parser.add_argument("--force", action="store_true", help="end a running attempt first")
    _add_prompt(parser, False)
    parser.add_argument("--follow", action="store_true", help="follow it as delegate does")
    parser.add_argument("--no-deliver", action="store_true", help="only open the attempt")
    _add_insecure(parser)
    _add_json(parser)
    _examples(parser, "mam redispatch 918b0612", "mam redispatch 918b0612 --force --prompt-file better.md --follow")


def cmd_redispatch(args: Any) -> int:
    """Open another attempt with new tokens, and hand it over as the first one was."""
    settings = load_settings(args.registry_dir)
    job_id, prompt = _job_of(args), _prompt_of(args)
    with Registry(settings.registry_dir) as registry:
        before = registry.job(job_id)
        deliver_it = not args.no_deliver and can_deliver(before)
        if deliver_it and before.transport == "remote":
            text = prompt if prompt is not None else registry.prompt(job_id)
            preflight_remote(settings, {**before._asdict(), "prompt": text}, broker_of(settings, before),
                             args.insecure_broker)
        keeper = keeper_of("delegate") if deliver_it else None     # set with the attempt: nobody else starts it
        answer = _redispatch(registry, settings, job_id, {"force": args.force, "prompt": prompt,
                                                          "supervisor": keeper}, "operator")
        if not answer.committed:
            raise MamError("refused: %s" % answer.reason, exit=Exit.REFUSED, code="refused",
                           hint="mam redispatch %s --force" % job_id)
        job = answer.job
        if deliver_it:
            ensure_daemon(registry, settings)
            job = _hand_over(registry, settings, job)
        _try_delivery(registry, settings, job)
        _say("job %s is at attempt %d, for %s" % (job_id, job.attempt_id, job.agent_session))
        if args.follow:
            return _follow_delegated(settings, job, args.json)
    return Exit.OK


def _redispatch(registry: Registry, settings: Settings, job_id: str, fields: Dict[str, Any],
                source: str) -> Transition:
    """Open the next attempt; the old one's command is gone when this returns."""
    before = registry.job(job_id)
    keeper = fields.get("supervisor") or (None if can_deliver(before) else before.supervisor)   # a queue keeps its own
    keys = keys_for(settings, before.agent_session) if before.remote_keys else None
    answer = registry.transition(job_id, "redispatch", source=source, fields={
        **fields, "supervisor": keeper, "keys": keys})
    if answer.committed:
        end_run_of(registry, settings, job_id)
    return answer


def add_status(parser: Any) -> None:
    _add_job(parser)
    parser.add_argument("--set", required=True, dest="status", metavar="STATUS", help=", ".join(STATUSES))
    _examples(parser, "mam status --job 918b0612 --set completed")


def cmd_status(args: Any) -> int:
    """Set a job's status with an operator's authority. 0 done or already so, 4 refused."""
    return _operator_write(args, {}, args.status)


def add_update(parser: Any) -> None:
    _add_job(parser)
    parser.add_argument("--status", metavar="STATUS", help="`pending` on an ended job opens another attempt")
    parser.add_argument("--agent-session", metavar="KIND:NAME")
    _add_prompt(parser, False)
    parser.add_argument("--iteration", type=_count, metavar="N")
    parser.add_argument("--attempt-id", type=_count, metavar="N", help="with --status pending: number of the attempt")
    parser.add_argument("--role")
    _examples(parser, "mam update --job 918b0612 --status pending --prompt-file better.md")


def cmd_update(args: Any) -> int:
    """Change a job's record; a status goes through the transition boundary."""
    changes: Dict[str, Any] = {}
    if args.agent_session is not None:
        changes["agent_session"] = check_session(args.agent_session)
    prompt = _prompt_of(args)
    if prompt is not None:
        changes.update(prompt=prompt, title=title_of(prompt))
    if args.iteration is not None:
        changes["iteration"] = args.iteration
    if args.role is not None:
        changes["role"] = clean_text(_argument_text(args.role, "--role"))
    return _operator_write(args, changes, args.status, args.attempt_id)


def _operator_write(args: Any, changes: Dict[str, Any], status: Optional[str], attempt: Optional[int] = None) -> int:
    _check_status(status)
    settings = load_settings(args.registry_dir)
    job_id = _job_of(args)
    with Registry(settings.registry_dir) as registry:
        job = registry.job(job_id)
        if status == "pending" and (job.outcome is not None or job.status in TERMINAL_STATUSES):
            answer = _redispatch(registry, settings, job_id, {"attempt_id": attempt}, "registry_cli")
        elif status is not None:
            answer = record(registry, settings, job_id, "set", source="registry_cli", extra={"status": status})
        else:
            answer = Transition(True, False, "", job, None)
            if attempt is not None and attempt != job.attempt_id:
                answer = Transition(False, False, "only a redispatch changes the attempt: use --status pending",
                                    job, None)
        if not answer.committed and not answer.idempotent:
            raise MamError("refused: %s" % answer.reason, exit=Exit.REFUSED, code="refused")
        if changes:
            registry.edit(job_id, "registry_cli", changes)
        if answer.committed and status is not None:
            _try_delivery(registry, settings, registry.job(job_id))
    return Exit.OK


def add_close(parser: Any) -> None:
    _add_job(parser)
    parser.add_argument("--request", required=True, choices=CLOSE_REQUESTS)
    parser.add_argument("--detail", metavar="TEXT")
    parser.add_argument("--expect-dispatch-token", metavar="TOKEN")
    _examples(parser, "mam close --job 918b0612 --request deadline_timeout")


def cmd_close(args: Any) -> int:
    """Close a job for a reason. 0 also when it had ended in another way (said on stderr); 4 refused."""
    settings = load_settings(args.registry_dir)
    job_id = _job_of(args)
    with Registry(settings.registry_dir) as registry:
        answer = record(registry, settings, job_id, args.request, source="delegate_wrapper",
                        detail=args.detail or "", token=args.expect_dispatch_token)
        if answer.committed:
            _try_delivery(registry, settings, answer.job)
        elif answer.idempotent or "after terminal" in answer.reason:
            _say(answer.reason)
        else:
            raise MamError("refused: %s" % answer.reason, exit=Exit.REFUSED, code="refused")
    return Exit.OK


def add_get_feedback(parser: Any) -> None:
    _add_job(parser)
    _examples(parser, "mam get-feedback --job 918b0612")


def cmd_get_feedback(args: Any) -> int:
    """The whole detail of the last completed or error event; an empty line if there is none."""
    import json
    settings = load_settings(args.registry_dir)
    job_id = _job_of(args)
    text = ""
    with Registry(settings.registry_dir) as registry:
        registry.job(job_id)
        for event in reversed(registry.events(job_id)):
            if event.seq is not None and event.event in TERMINAL_EVENTS:
                text = json.loads(event.payload)["data"].get("feedback") or event.detail
                break
    _out(text)
    return Exit.OK


def add_scrub_secrets(parser: Any) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only tell")
    _examples(parser, "mam scrub-secrets --dry-run")


def cmd_scrub_secrets(args: Any) -> int:
    """Take broker passwords out of records (v4 once stored them; mam never does)."""
    settings = load_settings(args.registry_dir)
    registry = existing_registry(settings)
    found = registry.scrub_passwords(args.dry_run) if registry else []
    _out("%s %d record(s) under %s%s" % ("would scrub" if args.dry_run else "scrubbed", len(found),
                                         settings.registry_dir, ": " + ", ".join(found) if found else ""))
    return Exit.OK


# -- the daemon -----------------------------------------------------------------------


def add_daemon(parser: Any) -> None:
    parser.add_argument("action", choices=("status", "stop", "run"), nargs="?", default="status",
                        help="status (default), stop, or run it in the foreground")
    _add_json(parser)
    _examples(parser, "mam daemon", "mam daemon status --json", "mam daemon stop")


def cmd_daemon(args: Any) -> int:
    """The registry's daemon: it comes by itself when there is something to do, and leaves when there is not."""
    settings = load_settings(args.registry_dir)
    if args.action == "run":
        with Registry(settings.registry_dir) as registry, FileLock(lock_path(registry)) as lock:
            if not lock.acquire(0):
                raise MamError("a daemon runs already", exit=Exit.REFUSED, code="daemon_runs", hint="mam daemon stop")
            raise_on_sigterm()
            return Daemon(registry, settings, lock).run()
    with Registry(settings.registry_dir) as registry:
        if args.action == "stop":
            return _stop_daemon(registry)
        info, owed, unanswered = daemon_info(registry), registry.count_owed(), registry.count_unanswered()
        if args.json:
            _dump({**info._asdict(), "owed_events": owed[0], "owed_states": owed[1], "unanswered": unanswered,
                   "older_build": info.alive and info.build != build_id()})
        else:
            for line in daemon_lines(info, owed, unanswered, info.alive and info.build != build_id()):
                _out(line)
        return Exit.OK if info.alive else Exit.FAILED


def _stop_daemon(registry: Registry) -> int:
    """Ask by a row, never by a signal, and wait until the lock is free."""
    info, deadline = daemon_info(registry), time.monotonic() + 5.0
    while not info.alive and time.monotonic() < deadline:
        with FileLock(lock_path(registry)) as lock:
            if lock.acquire(0):
                _say("no daemon runs")
                return Exit.OK
        time.sleep(0.02)                   # one is just being started: it has yet to say who it is
        info = daemon_info(registry)
    if info.runner:
        raise MamError("the daemon here is the runner of remote:%s" % info.runner["session"], exit=Exit.REFUSED,
                       code="runner_runs", hint="end its process, %d" % info.process["pid"])
    ask_to_leave(registry, info)
    with FileLock(lock_path(registry)) as lock:
        if not lock.acquire(5.0):
            raise MamError("the daemon does not leave within 5s", exit=Exit.TIMEOUT, code="stuck",
                           hint="it may be stopped or waiting for the disk: see daemon.log")
    return Exit.OK


def add_run_daemon(parser: Any) -> None:
    parser.add_argument("--lock-fd", type=int, required=True)


def cmd_run_daemon(args: Any) -> int:
    global _log_path
    raise_on_sigterm()
    settings = load_settings(args.registry_dir)
    os.set_inheritable(args.lock_fd, False)     # a child of ours must not hold our lock
    with Registry(settings.registry_dir) as registry, FileLock(lock_path(registry), args.lock_fd) as lock:
        _log_path = supervisor_log(registry)
        return Daemon(registry, settings, lock, caretaker_of(registry, settings)).run()


# -- other hosts ------------------------------------------------------------------------


def add_remote(parser: Any) -> None:
    parser.add_argument("action", choices=("run", "list"), help="serve a session on this host; or show who serves what")
    parser.add_argument("--session", metavar="S", help="run: the session, for jobs to remote:S")
    parser.add_argument("--exec", dest="command", metavar="CMD", help="run: the command that does the work of a job")
    parser.add_argument("--deliver", metavar="KIND:NAME",
                        help="run: instead of --exec, the session on this host that does the work, tmux:X or herdr:X")
    parser.add_argument("--stdin", action="store_true", help="run: feed the prompt to the command's stdin")
    parser.add_argument("--workdir", metavar="DIR", help="run: where the work is done (default: here)")
    parser.add_argument("--parallel", type=_count, default=1, metavar="N", help="run: jobs at a time (default 1)")
    parser.add_argument("--pool", action="store_true",
                        help="run: others may serve the same session; a job goes to the least loaded")
    parser.add_argument("--once", action="store_true", help="run: take one job, and leave when it has ended")
    parser.add_argument("--drain", action="store_true", help="run: take what waits already, and leave when all is done")
    _add_insecure(parser)
    _add_json(parser)
    _examples(parser, "mam remote run --session gpu1 --exec 'claude -p --permission-mode acceptEdits' --stdin",
              "mam remote run --session builders --exec ./work.sh --pool --parallel 4",
              "mam remote run --session desk --deliver tmux:alice", "mam remote list")


def cmd_remote(args: Any) -> int:
    """Run a runner on this host, or list those that the broker knows. Needs a broker and, for a runner, its session's
    key (MAM_SESSION_KEY, made by `mam secret derive S`)."""
    settings = load_settings(args.registry_dir)
    broker = check_private_broker(settings, broker_settings(settings), args.insecure_broker)
    warn_public_broker(broker)
    if args.action == "list":
        return _list_runners(args, settings, broker)
    if not args.session or not is_name(args.session):
        raise MamError("--session %r: a session is 1 to 64 of letters, digits, _ and -" % args.session
                       if args.session else "remote run needs --session: for jobs to remote:S, --session S",
                       exit=Exit.USAGE, code="usage")
    workdir = os.path.abspath(args.workdir or os.getcwd())
    if args.deliver is not None:
        _check_deliver(args)
    elif not (args.command or "").strip() or "\0" in args.command or not is_encodable(args.command):
        raise MamError("--exec: a runner needs a command, in UTF-8", exit=Exit.USAGE, code="no_command",
                       hint="for example: --exec 'claude -p --permission-mode acceptEdits' --stdin")
    preflight(settings, args.deliver or "exec:" + args.session, args.command, workdir)
    options = RunnerOptions(args.session, args.command, args.stdin, workdir, args.parallel, args.pool, args.once,
                            args.drain, args.deliver)
    keys = runner_keys(settings, args.session)
    settings.registry_dir = os.path.join(settings.registry_dir, "runner-" + args.session)
    return _run_runner(settings, broker, options, keys)


def _check_deliver(args: Any) -> None:
    if check_session(args.deliver).partition(":")[0] not in ("tmux", "herdr"):
        raise MamError("--deliver %s: it must be a tmux: or herdr: session of this host" % args.deliver,
                       exit=Exit.USAGE, code="usage")
    if args.command is not None or args.stdin or args.parallel != 1:
        raise MamError("--deliver goes without --exec, --stdin and --parallel: a session does one job at a time",
                       exit=Exit.USAGE, code="usage")


def _run_runner(settings: Settings, broker: Broker, options: RunnerOptions, keys: Dict[str, str]) -> int:
    """Be the daemon of the runner's own registry until it is done, then leave an ordinary one to what still runs."""
    raise_on_sigterm()
    with Registry(settings.registry_dir, create=True) as registry, FileLock(lock_path(registry)) as lock:
        deadline = time.monotonic() + 10.0
        while not lock.acquire(0.1):
            info = daemon_info(registry)
            if info.runner or time.monotonic() > deadline:
                raise MamError("a runner of remote:%s runs here already%s" % (
                    options.session, " (process %d)" % info.process["pid"] if info.process else ""), exit=Exit.BUSY,
                    code="runner_runs", hint="end it, or use another --registry-dir for a second one (with --pool)")
            if info.alive:
                ask_to_leave(registry, info)
        runner = Runner(registry, settings, broker, options, keys)
        daemon = Daemon(registry, settings, lock, runner)
        line = daemon.line(broker)
        runner.hopeless = lambda: line.final and not line.connects
        code = daemon.run()
        registry.set_meta("daemon", None)      # after a SIGTERM it still names us, who live and are no daemon any more
        if runner.denied or runner.hopeless():
            raise MamError(runner.denied or line.why, exit=Exit.BROKER, code="broker",
                           hint="check .mam.env on this host, and the rights of this user")
    with Registry(settings.registry_dir) as registry:
        ensure_daemon(registry, settings)
    return code


def _list_runners(args: Any, settings: Settings, broker: Broker) -> int:
    try:
        found, strange = find_runners(broker, topic_root(settings), dispatch_secret(settings), PRESENCE_S + SETTLE_S)
    except BrokerError as error:
        raise MamError(error.why, exit=Exit.BROKER, code="broker",
                       hint="" if error.final else "check MQTT_BROKER and MQTT_PORT") from None
    if args.json:
        _dump([runner_record(seen.presence, seen.live_at is not None) for seen in found])
    elif found or not strange:
        for line in runner_table([(seen.presence, seen.live_at is not None) for seen in found],
                                 _wants_colour(settings)):
            _out(line)
    if strange:
        _say("runners signed with another secret than MAM_DISPATCH_SECRET here, or another session's key: %d" % strange)
    return Exit.OK


def add_secret(parser: Any) -> None:
    parser.add_argument("action", choices=("new", "derive"), help="make MAM_DISPATCH_SECRET; or a session's key of it")
    parser.add_argument("session", nargs="?", metavar="S", help="derive: the session")
    _add_json(parser)
    _examples(parser, "mam secret new >> .mam.env            # where jobs are delegated",
              "mam secret derive gpu1 | ssh gpu-host 'cat >> work/.mam.env'     # for a host that serves remote:gpu1")


def cmd_secret(args: Any) -> int:
    """Make the secret from which the keys of remote jobs come, or the key of one session: a line for .mam.env. A host
    with a session's key can sign and check for that session, and for no other."""
    settings = load_settings(args.registry_dir)
    if args.action == "new" and not args.session:
        name, value = "MAM_DISPATCH_SECRET", random_token()
    elif args.action == "derive" and args.session and is_name(args.session):
        name = "MAM_SESSION_KEY"
        value = args.session + "." + session_key(dispatch_secret(settings), args.session)
    else:
        raise MamError("secret %s: %s" % (args.action, "takes no session" if args.action == "new" else
                                          "name one session, of letters, digits, _ and -"), exit=Exit.USAGE,
                       code="usage", hint="mam secret derive gpu1")
    _out(compact_json({"name": name, "value": value}) if args.json else "%s=%s" % (name, value))
    return Exit.OK


# -- background parts --------------------------------------------------------------------


def add_run(parser: Any) -> None:
    parser.add_argument("job", metavar="JOB")
    parser.add_argument("--attempt-id", type=_count, required=True)


def cmd_run(args: Any) -> int:
    raise_on_sigterm()
    settings = load_settings(args.registry_dir)
    with Registry(settings.registry_dir) as registry:
        job = registry.job(args.job)
        if job.attempt_id != args.attempt_id:
            return Exit.REFUSED
        return Run(registry, settings, job).go()


def add_deliver(parser: Any) -> None:
    parser.add_argument("job", metavar="JOB")
    parser.add_argument("--attempt-id", type=_count, required=True)


def cmd_deliver(args: Any) -> int:
    """Type a runner's job into the session that does its work."""
    raise_on_sigterm()
    settings = load_settings(args.registry_dir)
    with Registry(settings.registry_dir) as registry:
        job = registry.job(args.job)
        if job.attempt_id == args.attempt_id:
            deliver_adopted(registry, settings, job)
    return Exit.OK


def add_supervise(parser: Any) -> None:
    parser.add_argument("job", metavar="JOB")


def cmd_supervise(args: Any) -> int:
    raise_on_sigterm()
    settings = load_settings(args.registry_dir)
    with Registry(settings.registry_dir) as registry:
        return Supervisor(registry, settings, args.job).go()


# -- sessions -------------------------------------------------------------------------------


def add_session(parser: Any) -> None:
    parser.add_argument("action", nargs="?", metavar="ACTION", help="create, list, capture, send, stop or resume")
    _add_json(parser)
    _examples(parser, "mam session create alice --agent claude-code --workdir src", "mam session list",
              "mam session capture alice", "mam session send alice --keys Down Enter",
              "mam session stop alice", "mam session resume alice", "mam session create --help    # of each action")


def cmd_session(args: Any) -> int:
    """Agents in panes of tmux or herdr, started and kept in an inventory by mam. Alone: the list of them."""
    if args.action is not None:
        raise MamError("no action %r of session" % args.action[:40], exit=Exit.USAGE, code="usage",
                       hint="they are create, list, capture, send, stop and resume")
    args.all = False
    return cmd_session_list(args)


def _add_session_name(parser: Any) -> None:
    parser.add_argument("session", metavar="SESSION", help="NAME, or KIND:NAME as tmux:alice")


def _session_of(registry: Optional[Registry], text: str) -> str:
    """The session that a user means: kind:name, or the name alone where the inventory knows one kind of it."""
    if ":" in text:
        kind = check_session(text).partition(":")[0]
        if kind not in ("tmux", "herdr"):
            raise MamError("%s is no session in a pane" % text, exit=Exit.USAGE, code="usage",
                           hint="those are tmux:NAME and herdr:NAME")
        return text
    check_session("tmux:" + text)
    known = [row for row in registry.sessions() if row.session.partition(":")[2] == text] if registry else []
    running = [row for row in known if row.status == "running"] or known
    if len(running) > 1:
        raise MamError("%s is the name of %s" % (text, " and ".join(row.session for row in running)), exit=Exit.USAGE,
                       code="usage", hint="name its kind too")
    return running[0].session if running else "tmux:" + text


def add_session_create(parser: Any) -> None:
    parser.add_argument("session", metavar="NAME", help="of the session: alice, or tmux:alice")
    parser.add_argument("--agent", default=DEFAULT_AGENT,
                        help="kind of agent: %s, or one of .mam/agents.json (default %%(default)s)" % ", ".join(
                            AGENT_PROFILES))
    parser.add_argument("--mux", choices=("tmux", "herdr"), help="the multiplexer (default tmux)")
    parser.add_argument("--workdir", metavar="DIR", help="where the agent works (default: here)")
    _add_launch(parser)
    parser.add_argument("--wait", type=_positive_or_0, default=30.0, metavar="S",
                        help="seconds for the agent to come up (default 30; 0: do not wait)")
    _add_json(parser)
    _examples(parser, "mam session create alice --agent claude-code --workdir src",
              "mam session create bob --agent codex --mux herdr -- --model gpt-5",
              "mam session create x --agent generic -- my-agent --interactive")


def cmd_session_create(args: Any) -> int:
    """Start an agent as the process of a pane of its own; words behind -- go to its command line. 0: it is ready;
    5: it waits in a dialog, or is slow (it is kept); 1: it exited."""
    settings = load_settings(args.registry_dir)
    kind, colon, name = args.session.rpartition(":")
    if colon and args.mux and args.mux != kind:
        raise MamError("--mux %s does not go with %s" % (args.mux, args.session), exit=Exit.USAGE, code="usage")
    session = check_session("%s:%s" % (kind or args.mux or "tmux", name))
    plan = SessionPlan(session, args.agent, os.path.abspath(args.workdir or os.getcwd()), args.mux_socket or "",
                       args.yolo, args.extra)
    check_plan(existing_registry(settings), settings, plan)
    with Registry(settings.registry_dir, create=True) as registry, session_lock(registry, session) as lock:
        if not lock.acquire(5.0):
            raise MamError("%s is in other hands now" % session, exit=Exit.BUSY, code="session_busy")
        made = _in_session(lambda: create_session(registry, settings, plan))
        return _show_started(registry, settings, made, args.wait, args.json)


def _in_session(step: Callable[[], Any]) -> Any:
    """Do something in a session; what it cannot do becomes the command's error."""
    try:
        return step()
    except SessionError as error:
        raise error.as_mam_error(error.code if error.code not in ("", "failed") else "") from None


def _show_started(registry: Registry, settings: Settings, session: Session, wait_s: float, as_json: bool) -> int:
    """Wait for an agent to come up, and say how that went."""
    state, what = _in_session(lambda: wait_started(session, wait_s)) if wait_s else ("started", "")
    if state == "dead":
        _bury(registry, settings, session)
        raise MamError(what, code="agent_exited", hint="run the agent by hand once in %s" % (
            session.row.workdir if session.row else "its folder"))
    row = registry.session(session.session)
    if as_json and row:
        _dump({**session_record(row, None), "state": state, "what": what})
    elif row:
        _out("%s %s, %s in %s" % (row.session, state, row.agent, row.pane))
    if what:
        _say(what)
    return Exit.OK if state in ("ready", "started") else Exit.BUSY


def _bury(registry: Registry, settings: Settings, session: Session) -> None:
    """Take away the pane of an agent that exited at its start, after its last words were noted."""
    try:
        look = session.look()
        detail = "the agent exited at its start: %s" % last_words(look)
        session.driver.kill(look.pane)
    except SessionError as error:
        detail = error.why
    end_session(registry, session.session, "terminated", detail)


def add_session_list(parser: Any) -> None:
    parser.add_argument("--all", action="store_true", help="ended ones too")
    _add_json(parser)
    _examples(parser, "mam session list", "mam session list --all --json")


def cmd_session_list(args: Any) -> int:
    """The sessions mam has started, after a look at each: one whose pane is gone is terminated from then on."""
    settings = load_settings(args.registry_dir)
    registry = existing_registry(settings)
    records = []
    for row in reconcile(registry, settings) if registry else ():
        if registry and row.status == "running":
            records.append(session_record(row, job_in_session(registry, [row.session, "tmux:%s" % row.pane])))
        elif args.all:
            records.append(session_record(row, None))
    if args.json:
        _dump(records)
    else:
        for line in session_table(records, _wants_colour(settings)):
            _out(line)
    return Exit.OK


def add_session_capture(parser: Any) -> None:
    _add_session_name(parser)
    parser.add_argument("--lines", type=_count, default=0, metavar="N", help="N lines of history before the screen too")
    _add_json(parser)
    _examples(parser, "mam session capture alice", "mam session capture tmux:%3 --lines 200")


def cmd_session_capture(args: Any) -> int:
    """Print what a session's pane shows: text alone, without what could drive your terminal."""
    settings = load_settings(args.registry_dir)
    registry = existing_registry(settings)
    session = open_session(registry, settings, _session_of(registry, args.session))
    look = _in_session(session.look)
    text = _in_session(lambda: session.driver.capture(look.pane, args.lines))
    lines = [clean_text(line) for line in text.rstrip().split("\n")]
    dialog = dialog_in(look, session.profile) if not look.dead else None
    if args.json:
        _dump({"session": session.session, "pane": look.pane, "dead": look.dead, "command": look.command,
               "dialog": dialog and dialog["name"], "lines": lines})
        return Exit.OK
    for line in lines:
        _out(line)
    if look.dead:
        _say("the agent has exited%s" % (" with status " + look.exit_status if look.exit_status else ""))
    elif dialog:
        _say("it waits in a dialog (%s): %s" % (dialog["name"], dialog["do"].replace(" S ", " %s " % session.session)))
    return Exit.OK


def add_session_send(parser: Any) -> None:
    _add_session_name(parser)
    parser.add_argument("text", nargs="?", metavar="TEXT", help="what to say to the agent; - is stdin")
    parser.add_argument("--keys", nargs="+", metavar="KEY",
                        help="press keys instead, by tmux's names: Enter, Down, Escape, C-c, y ...; for dialogs")
    _add_json(parser)
    _examples(parser, "mam session send alice 'use the other database'", "mam session send alice --keys Down Enter")


def cmd_session_send(args: Any) -> int:
    """Type into a session as a human would: only while an agent rests at an empty composer (else exit 5). Keys are
    pressed whatever the agent does, but never into a shell."""
    settings = load_settings(args.registry_dir)
    if (args.text is None) == (not args.keys):
        raise MamError("session send: TEXT or --keys", exit=Exit.USAGE, code="usage")
    for key in args.keys or ():
        if not key.isprintable() or not key.isascii() or len(key) > 20 or key.startswith("-") and len(key) > 1:
            raise MamError("--keys %r is no key's name" % key[:40], exit=Exit.USAGE, code="usage",
                           hint="for example Enter, Down, Escape, C-c, y")
    text = _read_text("-", "the text on") if args.text == "-" else _argument_text(args.text or "", "the text")
    if args.text is not None and not text.strip():
        raise MamError("the text is empty", exit=Exit.USAGE, code="usage")
    registry = existing_registry(settings)
    session = open_session(registry, settings, _session_of(registry, args.session))
    if args.keys:      # without the lock: a delivery may hold it until a dialog is answered by these very keys
        look = _in_session(session.check)
        _in_session(lambda: session.driver.press(look.pane, args.keys))
        return Exit.OK
    lock = session_lock(registry, session.session) if registry else None
    if lock and not lock.acquire(30.0):
        raise MamError("%s is in other hands now" % session.session, exit=Exit.BUSY, code="session_busy")
    doubt = _in_session(lambda: type_message(session, text, settings.pause("MAM_SESSION_WAIT_S", SESSION_WAIT_S)))
    if doubt:
        raise MamError(doubt, exit=Exit.BUSY, code="doubt", hint="look at it: mam session capture %s" % session.session)
    return Exit.OK


def add_session_stop(parser: Any) -> None:
    _add_session_name(parser)
    parser.add_argument("--close-job", action="store_true", help="cancel the job it is at work on, instead of refusing")
    parser.add_argument("--purge-conversation", action="store_true",
                        help="delete its conversation; refused (exit 5) while anyone else is in it")
    parser.add_argument("--grace", type=_positive, default=STOP_GRACE_S, metavar="S",
                        help="seconds for the agent to leave by itself (default %(default)s)")
    _add_json(parser)
    _examples(parser, "mam session stop alice", "mam session stop alice --close-job --purge-conversation")


def cmd_session_stop(args: Any) -> int:
    """End a session's agent: asked first, then firmly. Its conversation is kept, for resume. 5: it has a job."""
    settings = load_settings(args.registry_dir)
    with Registry(settings.registry_dir) as registry:
        name = _session_of(registry, args.session)
        row = registry.session(name)
        with session_lock(registry, name) as lock:
            if not lock.acquire(10.0):
                raise MamError("%s is in other hands now" % name, exit=Exit.BUSY, code="session_busy")
            names = [name, *(["%s:%s" % (row.kind, row.pane)] if row and row.pane else [])]
            job_id = job_in_session(registry, names)      # under the lock: a delivery may just have gone in
            if job_id and not args.close_job:
                raise MamError("%s is at work on job %s" % (name, job_id), exit=Exit.BUSY, code="session_busy",
                               hint="wait for it (mam wait %s), or close it too: --close-job" % job_id)
            if job_id and row and not registry.jobs_by_id([job_id]):
                raise MamError("job %s of %s was given to a runner here: cancel it where it was delegated" % (
                    job_id, name), exit=Exit.BUSY, code="session_busy")
            if job_id and row:
                _cancel(registry, settings, job_id, "cancelled: its session was stopped")
            words = _in_session(lambda: stop_session(registry, settings, name, args.purge_conversation, args.grace))
        after = registry.session(name)
        if args.json and after:
            _dump(session_record(after, None))
        else:
            _say(words)
    return Exit.OK


def add_session_resume(parser: Any) -> None:
    _add_session_name(parser)
    parser.add_argument("--yolo", action="store_true", help="start the agent so that it asks no permissions")
    parser.add_argument("--wait", type=_positive_or_0, default=30.0, metavar="S",
                        help="seconds for the agent to come up (default 30; 0: do not wait)")
    _add_json(parser)
    _examples(parser, "mam session resume alice")


def cmd_session_resume(args: Any) -> int:
    """Start an ended session's agent again, in its conversation; words behind -- replace those of its creation.
    5: the session runs, or somebody is in that conversation."""
    settings = load_settings(args.registry_dir)
    with Registry(settings.registry_dir) as registry:
        name = _session_of(registry, args.session)
        row = registry.session(name)
        if row and row.status == "running":
            reconcile(registry, settings)
        with session_lock(registry, name) as lock:
            if not lock.acquire(5.0):
                raise MamError("%s is in other hands now" % name, exit=Exit.BUSY, code="session_busy")
            made = _in_session(lambda: resume_session(registry, settings, name, args.extra, args.yolo))
            return _show_started(registry, settings, made, args.wait, args.json)


def add_answer(parser: Any) -> None:
    parser.add_argument("job", metavar="JOB", help="job id")
    parser.add_argument("text", metavar="TEXT", help="the answer; - is stdin")
    _examples(parser, "mam answer 918b0612 'yes, delete build/'")


def cmd_answer(args: Any) -> int:
    """Type an answer into the session of a job that asks for permission. 4: it asks nothing, or has no session here;
    5: its session cannot take it now."""
    settings = load_settings(args.registry_dir)
    text = _read_text("-", "the answer on") if args.text == "-" else _argument_text(args.text, "the answer")
    if not text.strip():
        raise MamError("the answer is empty", exit=Exit.USAGE, code="usage")
    with Registry(settings.registry_dir) as registry:
        job = registry.job(args.job)
        kind = job.agent_session.partition(":")[0]
        if not asks_permission(job):
            raise MamError("job %s asks nothing: %s" % (job.job_id, what_became(job)), exit=Exit.REFUSED,
                           code="asks_nothing", hint="mam session send types into a session in any case")
        if kind not in ("tmux", "herdr"):
            raise MamError("job %s is at work in %s, into which nothing can be typed from here" % (
                job.job_id, job.agent_session), exit=Exit.REFUSED, code="no_session",
                hint="on the runner's host: mam --registry-dir .mam/runner-%s answer %s" % (
                    job.agent_session.partition(":")[2], job.job_id) if kind == "remote" else
                "give the agent what it asks for by other means")
        doubt = _in_session(lambda: answer_job(registry, settings, job, text))
        if doubt:
            raise MamError(doubt, exit=Exit.BUSY, code="doubt", hint="look at it: mam session capture %s" % (
                job.agent_session))
        _say("the answer is in %s" % job.agent_session)
    return Exit.OK


# -- help --------------------------------------------------------------------------------


def add_help(parser: Any) -> None:
    parser.add_argument("topic", nargs="?", metavar="COMMAND", help="a command, or v4")


def cmd_help(args: Any) -> int:
    if args.topic in (None, "help"):
        _out(usage_text("main"))
    elif args.topic == "v4":
        _out(usage_text("v4"))
    else:
        build_parser(find_command(args.topic)).print_help()
    return Exit.OK


COMMANDS: Dict[str, Command] = {
    "delegate": Command(cmd_delegate, add_delegate, "hand a prompt to an agent and follow it to its end", "main"),
    "publish": Command(cmd_publish, add_publish, "report an event of a job (what an agent runs)", "main"),
    "watch": Command(cmd_watch, add_watch, "show a job's events until it ends", "main"),
    "wait": Command(cmd_wait, add_wait, "wait until jobs have ended", "main"),
    "list": Command(cmd_list, add_list, "list jobs", "main"),
    "get": Command(cmd_get, add_get, "print one job's record", "main"),
    "logs": Command(cmd_logs, add_logs, "show a job's log, or its command's output", "main"),
    "pick": Command(cmd_pick, add_pick, "claim the oldest pending job of a session", "main"),
    "cancel": Command(cmd_cancel, add_cancel, "end a job and its command", "main"),
    "redispatch": Command(cmd_redispatch, add_redispatch, "open another attempt of a job", "main"),
    "session": Command(cmd_session, add_session, "create, list, capture, send, stop, resume: agents in panes", "main"),
    "answer": Command(cmd_answer, add_answer, "answer a job that asks for permission, in its session", "main"),
    "remote": Command(cmd_remote, add_remote, "serve a session on this host, or list who serves what", "main"),
    "secret": Command(cmd_secret, add_secret, "make the secret of remote jobs, or one session's key", "main"),
    "daemon": Command(cmd_daemon, add_daemon, "show, stop or run the registry's daemon", "main"),
    "help": Command(cmd_help, add_help, "help on a command, or on v4's verbs: help v4", "main"),
    "register": Command(cmd_register, add_register, "make a pending job, print its id", "v4"),
    "submit": Command(cmd_delegate, add_delegate, "v4's name of delegate", "v4"),
    "subscribe": Command(cmd_subscribe, add_subscribe, "follow one job or all open ones", "v4"),
    "status": Command(cmd_status, add_status, "set a job's status", "v4"),
    "update": Command(cmd_update, add_update, "change a job's record", "v4"),
    "close": Command(cmd_close, add_close, "close a job for a reason", "v4"),
    "get-feedback": Command(cmd_get_feedback, add_get_feedback, "print the last result in full", "v4"),
    "scrub-secrets": Command(cmd_scrub_secrets, add_scrub_secrets, "take passwords out of old records", "v4"),
    "session create": Command(cmd_session_create, add_session_create, "start an agent in a pane of its own", "session"),
    "session list": Command(cmd_session_list, add_session_list, "the sessions mam has started", "session"),
    "session capture": Command(cmd_session_capture, add_session_capture, "print what a session shows", "session"),
    "session send": Command(cmd_session_send, add_session_send, "type into a session", "session"),
    "session stop": Command(cmd_session_stop, add_session_stop, "end a session's agent", "session"),
    "session resume": Command(cmd_session_resume, add_session_resume, "start it again, in its conversation", "session"),
    "_run": Command(cmd_run, add_run, "own one command (started by delegate)", "internal"),
    "_supervise": Command(cmd_supervise, add_supervise, "settle one job (started by mam)", "internal"),
    "_deliver": Command(cmd_deliver, add_deliver, "type a runner's job into a session (started by mam)", "internal"),
    "_daemon": Command(cmd_run_daemon, add_run_daemon, "be the daemon (started by mam)", "internal"),
    "_beat": Command(cmd_beat, add_beat, "beat beside an agent in a container (started by mam)", "internal"),
    "_overview": Command(cmd_overview, add_overview, "what is going on (mam alone)", "internal"),
}


def usage_text(group: str) -> str:
    """The list of commands of a group."""
    lines = ["mam %s: hand work to coding agents, and know what became of it" % __version__, "",
             "usage: mam [--registry-dir DIR] [COMMAND] [options]        mam alone shows what is going on", ""]
    if group == "v4":
        lines += ["v4's verbs, with their flags and exit codes:"]
    width = max(len(name) for name in COMMANDS if " " not in name)
    lines += ["  %s  %s" % (name.ljust(width), command.summary) for name, command in COMMANDS.items()
              if command.group == group]
    lines += ["", "mam COMMAND --help shows options and examples." if group == "v4" else
              "mam COMMAND --help shows options and examples; mam help v4 lists v4's verbs.",
              "Exit codes: 0 done, 1 failed or bad input, 2 timed out or not sent yet, 3 broker (pick: nothing),",
              "4 refused, 5 session busy, 64 usage, 70 internal error, 75 not recorded: run it again."]
    return "\n".join(lines)


def find_command(name: str) -> str:
    """The name of a command; MamError that suggests the nearest one."""
    if name in COMMANDS:
        return name
    import difflib
    known = [one for one in COMMANDS if one[0] != "_" and " " not in one]
    near = difflib.get_close_matches(name, known, 1, 0.5)
    raise MamError("no command %r" % name, exit=Exit.USAGE, code="usage",
                   hint="did you mean `mam %s`?" % near[0] if near else "`mam help` lists the commands")


def _help_formatter(prog: str) -> Any:
    """A fixed width: asking the terminal for its own costs an import of shutil at every start."""
    import argparse
    return argparse.RawDescriptionHelpFormatter(prog, width=110, max_help_position=30)


def build_parser(name: str) -> Any:
    """The argument parser of one command."""
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            shown = "" if name == "_overview" else name
            raise MamError("%s: %s" % (shown, message) if shown else message, exit=Exit.USAGE, code="usage",
                           hint="see: mam %s --help" % shown if shown else "see: mam help")
    command = COMMANDS[name]
    parser = Parser(prog="mam " + name, description=command.run.__doc__, allow_abbrev=False,
                    formatter_class=_help_formatter)
    command.add(parser)
    if "--json" not in parser._option_string_actions:
        parser.add_argument("--json", action="store_true", help="errors as JSON")
    parser.add_argument("--registry-dir", metavar="DIR", default=argparse.SUPPRESS,
                        help="the registry (default: MAM_REGISTRY_DIR, else .mam of the workspace)")
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="tracebacks for errors")
    return parser


# ==============================================================================
# 20. Main
#
# Dispatch to one command, and the one place where an error becomes a message: a
# line that begins with `mam:`, a hint below it, never a traceback (but --debug).
# ==============================================================================


def parse_arguments(argv: Sequence[str]) -> Any:
    """(command name, its arguments). Global options may stand before the command, as in v4."""
    rest, before = list(argv), []
    while rest and rest[0].startswith("--"):
        option = rest.pop(0)
        if option == "--version":
            _out("mam %s" % __version__)
            raise SystemExit(0)
        if option == "--help":
            return "help", build_parser("help").parse_args([])
        before.append(option)
        if option == "--registry-dir" and rest:
            before.append(rest.pop(0))
    if rest[:1] == ["-h"]:
        return "help", build_parser("help").parse_args([])
    name = find_command(rest.pop(0)) if rest else "_overview"
    if rest and "%s %s" % (name, rest[0]) in COMMANDS:      # session create
        name += " " + rest.pop(0)
    behind: List[str] = []
    if name in ("session create", "session resume") and "--" in rest:       # words for the agent
        rest, behind = rest[:rest.index("--")], rest[rest.index("--") + 1:]
    args = build_parser(name).parse_args(before + rest)
    args.extra = behind
    for option in ("registry_dir", "debug"):
        if not hasattr(args, option):
            setattr(args, option, None)
    return name, args


def show_error(error: MamError, as_json: bool) -> None:
    if as_json:
        _out(compact_json({"error": {"code": error.code, "message": error.message, "hint": error.hint}}))
    elif isinstance(error, EnvFileError):
        sys.stderr.write(error.message + "\n")
    else:
        sys.stderr.write("mam: %s\n" % error.message + ("mam: %s\n" % error.hint if error.hint else ""))


def _drop_stdout() -> None:
    """Nobody reads stdout any more: let the interpreter's last flush go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def run_command(argv: Sequence[str]) -> int:
    """Run one command; every failure that a user can cause ends in MamError."""
    import errno
    debug = "--debug" in argv
    try:
        try:
            name, args = parse_arguments(argv)
            for variable in meaningless_variables() if COMMANDS[name].group == "v4" else ():
                _say("%s has no meaning here" % variable)
            code = COMMANDS[name].run(args)
        except SystemExit as done:      # --help, --version
            code = done.code or Exit.OK
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_stdout()
        return Exit.BROKEN_PIPE
    except OSError as error:
        if debug:
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        where = "%s: " % error.filename if error.filename else ""
        raise MamError("%s%s" % (where, error.strerror), code="disk_full" if full else "os_error",
                       exit=Exit.NOT_RECORDED if full else Exit.FAILED,
                       hint="free some space, then run the same command again" if full else "") from None


def _open_closed_streams() -> None:
    """Put /dev/null where a standard stream was closed: else the registry would get its descriptor."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))


def main(argv: Optional[Sequence[str]] = None) -> int:
    """The program. Returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        return run_command(argv)
    except MamError as error:
        if "--debug" in argv:
            raise
        try:
            show_error(error, "--json" in argv)
            sys.stdout.flush()
        except BrokenPipeError:
            _drop_stdout()
        return error.exit
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except Terminated:
        return Exit.TERMINATED
    except Exception as error:     # a defect of mam: one line for the user, the rest on request
        if "--debug" in argv:
            raise
        sys.stderr.write("mam: internal error: %s: %s\nmam: run it again with --debug to see where\n" % (
            type(error).__name__, error))
        return Exit.INTERNAL


if __name__ == "__main__":
    sys.exit(main())

"""What a user types and what comes back: bad input by the table, v4's verbs, help, listings, streams.

If a test here fails, somebody sees a traceback, a wrong exit code in a script, a changed registry after a typo,
or a listing whose keys a program no longer finds.
"""
from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import pytest

from support import free_port, poll
from support.cli import Mam, Result

V4_KEYS = ["schema_version", "job_id", "status", "created_at", "updated_at", "prompt", "agent", "agent_session", "role",
           "broker", "topic_prefix", "timeout_sec", "idle_timeout_sec", "expected_artifacts", "last_seq", "auth_token",
           "job_type", "reviewer", "reviewer_session", "max_iterations", "iteration", "dispatch_token", "attempt_id",
           "heartbeat_sec", "heartbeat_misses", "ack_timeout_sec", "transport"]
NEW_KEYS = ["phase", "reason", "transition_seq", "claimed_at", "delivered_at", "started_at", "finished_at",
            "last_event", "last_event_at", "detail", "parent_job", "workdir", "validate_cmd", "command", "wire",
            "delivery", "exit_status", "alive_at", "asks"]
OVERVIEW_KEYS = ["job_id", "status", "phase", "reason", "agent_session", "title", "attempt_id", "created_at",
                 "finished_at", "last_event", "last_event_at", "detail", "asks", "alive_s", "progress_s"]
COMMANDS = ["delegate", "publish", "watch", "wait", "list", "get", "logs", "pick", "cancel", "redispatch", "session",
            "answer", "remote", "secret", "daemon", "help"]
V4_COMMANDS = ["register", "submit", "subscribe", "status", "update", "close", "get-feedback", "scrub-secrets"]
# Those whose answer can be JSON; the errors of the others can (see test_every_command_takes_json).
JSON_COMMANDS = {"delegate", "submit", "publish", "watch", "wait", "list", "get", "logs", "pick", "redispatch",
                 "subscribe"}
STATUSES = "pending, running, completed, error, cancelled"
EVENTS = "started, progress, permission_required, completed, error"
SECRET = "s3cret-never-shown"


# ---- the ground on which bad input falls --------------------------------------------------------------------

@pytest.fixture(scope="module")
def ground(pyz: Path, session_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mam]:
    """A host with jobs `known` (pending), `taken` (running) and `ended`, bad files and bad registries."""
    host = Mam(pyz, tmp_path_factory.mktemp("cli") / "host", session_folder / "shiv").without_daemon()
    for job in ("known", "ended", "taken"):
        host("register", "--job-id", job, "--prompt", "p", "--agent-session", f"queue:{job}", check=0)
    host("status", "--job", "ended", "--set", "completed", check=0)
    host("pick", "--agent-session", "queue:taken", check=0)
    make_bad_files(host.folder)
    make_bad_registries(host)
    yield host
    host.close()


def make_bad_files(folder: Path) -> None:
    for name, content in {
            "undecodable.txt": b"ok\n\xff\n", "empty.txt": b"", "blank.txt": b" \n\t\n", "good.txt": b"do it\n",
            "large.txt": b"x" * (4 * 1024 * 1024 + 1), "detail.txt": b"x" * 65537, "plain": b"x",
            "line.env": b"A=1\nnonsense " + SECRET.encode() + b"\n", "quote.env": b"A='x\n", "bytes.env": b"A=\xff\n",
            "nul.env": b"A=x\0y\n", "export.env": b"export\n"}.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "folder.env").mkdir()
    (folder / "loop.env").symlink_to(folder / "loop.env")
    (folder / "locked.env").write_text("A=1\n")
    (folder / "locked.env").chmod(0)


def make_bad_registries(host: Mam) -> None:
    corrupt, newer, foreign = (host.folder / name for name in ("corrupt", "newer", "foreign"))
    corrupt.mkdir()
    (corrupt / "mam.db").write_bytes(b"this is no database, by far. " * 200)
    shutil.copytree(host.registry_dir, newer)
    with contextlib.closing(sqlite3.connect(newer / "mam.db")) as database:
        database.execute("PRAGMA user_version=99")
    foreign.mkdir()
    with contextlib.closing(sqlite3.connect(foreign / "mam.db")) as database:
        database.execute("CREATE TABLE of_another_program(x)")


def everything(registry: Path) -> Any:
    """All rows of a registry, or the bytes of the files where there is none; None where there is nothing."""
    if not registry.is_dir():
        return registry.read_bytes() if registry.exists() else None
    try:
        with contextlib.closing(sqlite3.connect(f"file:{registry / 'mam.db'}?mode=ro", uri=True)) as database:
            return list(database.iterdump()) + database.execute("PRAGMA user_version").fetchall()
    except sqlite3.DatabaseError:
        return {path.name: path.read_bytes() for path in registry.iterdir() if path.is_file()}


# ---- the table of bad input ---------------------------------------------------------------------------------

class Bad(NamedTuple):
    """One row. `{at}` is the host's folder, `{reg}` the registry; a message that begins with `~` is a regexp."""
    args: Sequence[str]
    message: str
    hint: str = ""
    code: int = 1
    word: str = ""
    env: Dict[str, str] = {}
    stdin: Optional[bytes] = None
    registry: str = ""                  # the folder to be unchanged, if it is not the usual one

    @property
    def id(self) -> str:
        words = [*[f"{name}={value}" for name, value in self.env.items()], *self.args]
        text = " ".join(words).replace("{at}/", "")
        return re.sub(r"[^!-~ ]", "?", text)[:70]


NO_JOB = ("no job nosuch in {reg}", "`mam list` shows the jobs of this registry")
BAD_ID = " is not a job id: 1 to 64 of letters, digits, _ and -"
WHICH = ("which job? name its id", "`mam list` shows the jobs")
BAD_SESSION = " is not a session: it must be KIND:NAME with KIND one of exec, tmux, herdr, remote, queue"
SESSION_HINT = "for example exec:demo, tmux:alice or queue:builders"
DATA_HINT = "for example --data '{\"tests_passed\": 42}'"
ICONV = "convert it, for example with iconv -t utf-8"
OF_A_JOB: List[List[str]] = [
    ["get"], ["publish", "--event", "progress"], ["watch"], ["wait"], ["logs"], ["cancel"], ["redispatch"],
    ["status", "--set", "running"], ["update", "--role", "R"], ["close", "--request", "cancelled"], ["get-feedback"],
    ["subscribe", "--job"]]
PROGRESS = ("publish", "known", "--event", "progress")
DELEGATE = ("delegate", "--agent-session", "exec:x", "--exec", "true", "--prompt", "x")


def rows_about_jobs() -> Iterator[Bad]:
    for command in OF_A_JOB:
        yield Bad([*command, "nosuch"], *NO_JOB, code=2 if command[0] == "subscribe" else 1, word="unknown_job")
        yield Bad([*command, "a/b"], "'a/b'" + BAD_ID, word="bad_job_id")
        if command[0] not in ("wait", "subscribe"):
            yield Bad(command, *WHICH, code=64, word="usage")
    for text in ("a" * 65, "../x", "a.b", "..", "jöb", "a b", "a\nb", "\x1b[31mred", "\udcff"):
        yield Bad(["get", text], repr(text) + BAD_ID, word="bad_job_id")
        yield Bad(["register", "--prompt", "x", "--job-id", text], repr(text) + BAD_ID, word="bad_job_id")
    yield Bad(["get", ""], *WHICH, code=64, word="usage")
    yield Bad(["register", "--prompt", "x", "--job-id", ""], "''" + BAD_ID, word="bad_job_id")
    yield Bad(["get", "-x"], "get: unrecognized arguments: -x", "see: mam get --help", 64, "usage")
    yield Bad(["get", "--job", "-x"], "get: argument --job: expected one argument", "see: mam get --help", 64, "usage")
    yield Bad(["get", "--job=-x"], "no job -x in {reg}", NO_JOB[1], word="unknown_job")
    yield Bad(["get", "known", "extra"], "get: unrecognized arguments: extra", "see: mam get --help", 64, "usage")
    again = ("job already exists: known", "choose another --job-id, or `mam redispatch known`")
    yield Bad(["register", "--job-id", "known", "--prompt", "x"], *again, word="job_exists")
    yield Bad([*DELEGATE, "--job-id", "known"], *again, word="job_exists")
    for command in (["list", "--status"], ["status", "known", "--set"], ["update", "known", "--status"]):
        yield Bad([*command, "nonsense"], f"invalid status 'nonsense'; expected one of {STATUSES}", word="bad_status")
    yield Bad(["publish", "known", "--event", "nonsense"], f"--event 'nonsense': it must be one of {EVENTS}",
              word="bad_event")
    yield Bad(["publish", "known", "--event", "\udcff"], f"--event '\\udcff': it must be one of {EVENTS}",
              word="bad_event")


def rows_about_data() -> Iterator[Bad]:
    for text, why in (
            ("not json", r"~not JSON \(.+\)"), ("", r"~not JSON \(.+\)"), ('{"a":NaN}', "NaN is not JSON"),
            ('{"a":-Infinity}', "-Infinity is not JSON"), ('{"a":1,"a":2}', "a duplicate key"),
            ('{"a":"\udcff"}', "not UTF-8"), ("[" * 60000, "~nested .+")):
        message = f"--data is not usable: {why}" if why[0] != "~" else f"~--data is not usable: {why[1:]}"
        yield Bad([*PROGRESS, "--data", text], message, DATA_HINT, word="bad_data")
    for text, kind in (("[1]", "list"), ("1", "int"), ("null", "NoneType"), ('"x"', "str")):
        yield Bad([*PROGRESS, "--data", text], f"--data must be a JSON object, not {kind}", DATA_HINT, word="bad_data")
    for text, why in (
            ('{"a":9007199254740993}', "an integer beyond 2^53-1"), ('{"a":"\\ud800"}', "a lone surrogate"),
            ('{"a":1e17}', "a float from 2^53 to below 1e21 would print as an unsafe integer"),
            ('{"a":' * 40 + "1" + "}" * 40, "nested deeper than 32 levels")):
        yield Bad([*PROGRESS, "--data", text], f"~--data (is not usable|cannot be signed): {re.escape(why)}",
                  f"~({re.escape(DATA_HINT)})?", word="bad_data")
    # One argument holds less than 128 KiB, so too much data has to grow in its canonical form: 1e-6 is 0.000001.
    large = '{"a":[' + ",".join(["1e-6"] * 20000) + "]}"
    yield Bad([*PROGRESS, "--data", large], "--data is 180007 bytes, more than the 131072 allowed",
              "write it to a file and name the file in the detail", word="too_large")
    for name in ("hmac_sig", "auth_token", "dispatch_token", "attempt_id", "notification_intent", "feedback", "reason",
                 "status", "settles", "artifacts", "spawned", "since"):
        yield Bad([*PROGRESS, "--data", json.dumps({name: 1})], f"--data uses a reserved name: {name}",
                  "choose another name; mam sets this one itself", word="bad_data")


def rows_about_texts() -> Iterator[Bad]:
    long = ("the detail is 65537 bytes, more than the 65536 allowed",
            "write it to a file and name the file in the detail")
    yield Bad([*PROGRESS, "--detail", "x" * 65537], *long, word="too_large")
    yield Bad([*PROGRESS, "--detail-file", "{at}/detail.txt"], *long, word="too_large")
    yield Bad([*PROGRESS, "--detail-file", "-"], *long, word="too_large", stdin=b"x" * 65537)
    yield Bad([*PROGRESS, "--detail-file", "{at}/undecodable.txt"],
              "cannot read --detail-file {at}/undecodable.txt: not UTF-8 at byte 3", ICONV, 64, "undecodable")
    for start in (["register"], ["delegate", "--agent-session", "queue:q"], ["update", "known"],
                  ["redispatch", "ended"]):
        def of(file: str, message: str, hint: str, word: str, start: List[str] = start) -> Bad:
            return Bad([*start, "--prompt-file", file], message, hint, 64, word)
        yield of("{at}/undecodable.txt", "cannot read --prompt-file {at}/undecodable.txt: not UTF-8 at byte 3", ICONV,
                 "undecodable")
        yield Bad([*start, "--prompt", "a", "--prompt-file", "{at}/good.txt"],
                  f"{start[0]}: argument --prompt-file: not allowed with argument --prompt",
                  f"see: mam {start[0]} --help",
                  64, "usage")
        if start != ["register"]:
            continue
        yield of("{at}/missing.txt", "cannot read --prompt-file {at}/missing.txt: No such file or directory", "",
                 "unreadable")
        yield of("{at}/folder", "cannot read --prompt-file {at}/folder: Is a directory", "", "unreadable")
        yield of("{at}/empty.txt", "the prompt is empty", "", "usage")
        yield of("{at}/blank.txt", "the prompt is empty", "", "usage")
    yield Bad(["register", "--prompt-file", "{at}/large.txt"],
              "--prompt-file {at}/large.txt is larger than 4194304 bytes", "", 64, "too_large")
    yield Bad(["register", "--prompt-file", "-"], "cannot read --prompt-file -: not UTF-8 at byte 0", ICONV, 64,
              "undecodable", stdin=b"\xff")
    yield Bad(["register", "--prompt-file", "-"], "the prompt is empty", "", 64, "usage", stdin=b"")
    yield Bad(["register", "--prompt", ""], "the prompt is empty", "", 64, "usage")
    for option in ("--prompt", "--role", "--agent"):
        rest = [] if option == "--prompt" else ["--prompt", "x"]
        yield Bad(["register", *rest, option, "\udcff"], f"{option} is not UTF-8", "", 64, "undecodable")
    yield Bad(["register", "--prompt", "x", "--reviewer", "\udcff"], "--reviewer is not UTF-8", "", 64, "undecodable")
    yield Bad(["register", "--prompt", "x", "--artifact", "\udcff"],
              "--artifact '\\udcff': it must be a path inside the workdir", word="bad_artifact")


def rows_about_configuration() -> Iterator[Bad]:
    for name, why in (
            ("line", "line 2 is not KEY=value"), ("quote", "line 1 has an unfinished quote"),
            ("bytes", "not UTF-8 at byte 2"), ("nul", "line 1 has a NUL character"), ("folder", "Is a directory"),
            ("loop", "Too many levels of symbolic links"), ("export", "line 1 is not KEY=value"),
            *([("locked", "Permission denied")] if os.geteuid() else [])):
        for args in (["list"], *([PROGRESS, ["register", "--prompt", "x"], []] if name == "line" else [])):
            yield Bad(args, "ERROR: {at}/%s.env: cannot read (%s)" % (name, why), word="env_file",
                      env={"MAM_ENV_FILE": "{at}/%s.env" % name})
    port = "MQTT_PORT is %r: a port is a number from 1 to 65535"
    for text in ("nonsense", "0", "65536", "-1", " 1883", "1883x", "1883.0", "²", "00188399"):
        yield Bad(DELEGATE, port % text, word="bad_broker", env={"MQTT_BROKER": "127.0.0.1", "MQTT_PORT": text})
    for name, text, why in (
            ("MQTT_TLS", "perhaps", "it must be true or false"), ("MQTT_TLS", "2", "it must be true or false"),
            ("MQTT_BROKER", "a b", "not a host name"), ("MQTT_BROKER", "a\nb", "not a host name"),
            ("MQTT_KEEPALIVE", "x", "it must be 1 to 65535 seconds"),
            ("MQTT_KEEPALIVE", "0", "it must be 1 to 65535 seconds"),
            ("MQTT_KEEPALIVE", "65536", "it must be 1 to 65535 seconds"),
            ("MQTT_KEEPALIVE", "²", "it must be 1 to 65535 seconds")):
        hint = "~no URL: .+" if name == "MQTT_BROKER" else ""
        yield Bad(DELEGATE, f"{name} is {text!r}: {why}", hint, word="bad_broker",
                  env={"MQTT_BROKER": "127.0.0.1", name: text})
    for text in ("a b", "a//b", "/a", "a/#", "a+b"):
        yield Bad(DELEGATE, f"MAM_TOPIC_ROOT is {text!r}: levels of letters, digits, _ and - joined by /",
                  word="bad_value", env={"MAM_TOPIC_ROOT": text})
    for name in ("MAM_HEARTBEAT_SEC", "MAM_ACK_TIMEOUT_S"):
        for text in ("-1", "0", "nan", "inf", "1e400", "x"):
            yield Bad(["register", "--prompt", "x"], f"{name} is {text!r}: it must be a positive number of seconds",
                      word="bad_value", env={name: text})
    for text in ("-1", "0.5", "x"):     # it is a count: half a heartbeat would be none, and the job dead at once
        yield Bad(["register", "--prompt", "x"], f"~MAM_HEARTBEAT_MISSES is {text!r}: .+", word="bad_value",
                  env={"MAM_HEARTBEAT_MISSES": text})
    for text in ("one", "-1", "²", "9" * 25):
        yield Bad(PROGRESS, f"~MAM_ATTEMPT_ID is {text!r}: .+", word="bad_value", env={"MAM_ATTEMPT_ID": text})
    block = ["register", "--prompt", "x", "--broker"]
    yield Bad([*block, "http://h"], "--broker is 'http://h': the scheme must be mqtt:// or mqtts://", "", 64)
    yield Bad([*block, f"u:{SECRET}@h"], "--broker must not hold a password",
              "set MQTT_PASSWORD in the environment or in .mam.env", 64, "secret_in_argv")
    for text in ("h:0", "h:x", "h:65536"):
        yield Bad([*block, text], f"--broker is {text[2:]!r}: a port is a number from 1 to 65535", word="bad_broker")
    for text in ("", "mqtt://", "a b"):
        yield Bad([*block, text], f"--broker is {text!r}: no host name in it", "", 64)


def rows_about_usage() -> Iterator[Bad]:
    yield Bad(["lst"], "no command 'lst'", "did you mean `mam list`?", 64, "usage")
    yield Bad(["delgate"], "no command 'delgate'", "did you mean `mam delegate`?", 64, "usage")
    yield Bad(["zzzzzz"], "no command 'zzzzzz'", "`mam help` lists the commands", 64, "usage")
    yield Bad(["help", "lst"], "no command 'lst'", "did you mean `mam list`?", 64, "usage")
    yield Bad(["-x"], "no command '-x'", "`mam help` lists the commands", 64, "usage")
    yield Bad(["li\udcffst"], "no command 'li\\udcffst'", "did you mean `mam list`?", 64, "usage")
    yield Bad(["--nonsense"], "~(?!.*_overview).*unrecognized arguments: --nonsense", "~(?!.*_overview).*", 64, "usage")
    yield Bad(["--registry-dir"], "~(?!.*_overview).*argument --registry-dir: expected one argument",
              "~(?!.*_overview).*", 64, "usage")
    for command, required in (
            ("status", "--set"), ("close", "--request"), ("publish", "--event"), ("wait", "JOB")):
        words = [] if command == "wait" else ["known"]
        yield Bad([command, *words], f"{command}: the following arguments are required: {required}",
                  f"see: mam {command} --help", 64, "usage")
    yield Bad(["delegate", "--prompt", "x"], "delegate: the following arguments are required: --agent-session",
              "see: mam delegate --help", 64, "usage")
    yield Bad(["register"], "register: one of the arguments --prompt --prompt-file is required",
              "see: mam register --help",
              64, "usage")
    yield Bad(["subscribe"], "subscribe: one of the arguments --job --wait-any is required",
              "see: mam subscribe --help", 64,
              "usage")
    for command in COMMANDS[:-1] + V4_COMMANDS:
        yield Bad([command, "--nonsense"], f"~{command}: .+", f"see: mam {command} --help", 64, "usage")
    for words in (["wait", "known", "--any", "--all"], ["subscribe", "--job", "known", "--wait-any"],
                  ["publish", "known", "--event", "error", "--detail", "a", "--detail-file", "b"]):
        yield Bad(words, f"~{words[0]}: argument --.+: not allowed with argument --.+",
              f"see: mam {words[0]} --help", 64,
                  "usage")
    yield Bad(["close", "known", "--request", "nonsense"], "~close: argument --request: invalid choice: 'nonsense' .+",
              "see: mam close --help", 64, "usage")
    yield Bad([*PROGRESS, "--heartbeat", "5"], "--heartbeat goes with --event started", "", 64, "usage")
    yield Bad(["publish", "known", "--event", "started", "--heartbeat", "5", "--watch-pid", "99999999"],
              "--watch-pid 99999999: no such process", word="bad_pid")
    yield Bad(["register", "--prompt", "x", "--auth-token", SECRET],
              "--auth-token takes only -, and reads the token from stdin",
              "an argument is visible to every user of this host", 64, "secret_in_argv")
    yield Bad(["register", "--prompt", "x", "--auth-token", "-"],
              "the token on stdin must be at least 16 printable ASCII characters", word="bad_token", stdin=b"short\n")
    yield Bad(["register", "--prompt", "x", "--dispatch-token", "a b"],
              "--dispatch-token must be 1 to 64 of letters, digits, _ and -", "", 64, "usage")
    yield Bad(["get", "known", "--job", "ended"], "~.*known.*ended.*|.*ended.*known.*", "~.*", 64, "usage")


def rows_about_sessions() -> Iterator[Bad]:
    for text in ("demo", "exec:", "exec:a/b", "what:x", "", ":", "tmux:%x y", "queue:\udcff"):
        for start in (["register", "--prompt", "x"], *([["pick"], ["update", "known"], [
                "delegate", "--prompt", "x", "--exec", "true"]] if text == "demo" else [])):
            yield Bad([*start, "--agent-session", text], repr(text) + BAD_SESSION, SESSION_HINT, word="bad_session")
    yield Bad(["delegate", "--agent-session", "exec:x", "--prompt", "x"], "an exec: session needs a command",
              "for example: --exec 'claude -p --permission-mode acceptEdits' --stdin", 64, "no_command")
    yield Bad(["delegate", "--agent-session", "queue:x", "--exec", "true", "--prompt", "x"],
              "--exec goes with an exec: session, not with queue:x", "", 64)
    yield Bad(["delegate", "--agent-session", "herdr:x", "--prompt", "x"], "herdr agent list: no program herdr",
              "install herdr >= 0.7.5, or use tmux", word="no_session")
    yield Bad([*DELEGATE, "--workdir", "{at}/nosuch"], "--workdir {at}/nosuch: no such folder", word="bad_workdir")
    for path in ("/etc/passwd", "../x", "..", "", "a/../../x"):
        yield Bad([*DELEGATE, "--artifact", path], f"--artifact {path!r}: it must be a path inside the workdir",
                  word="bad_artifact")


AWAY = ("delegate", "--agent-session", "remote:gpu1", "--prompt", "x")
SERVE = ("remote", "run", "--session", "gpu1", "--exec", "true")
GOOD_SECRET = "0123456789abcdef0123456789abcdef"
OPEN_BROKER = {"MQTT_BROKER": "127.0.0.1", "MQTT_PORT": "1"}
# All that remote work needs; nobody listens on that port.
FAR = {**OPEN_BROKER, "MAM_DISPATCH_SECRET": GOOD_SECRET, "MAM_SESSION_KEY": GOOD_SECRET, "MAM_INSECURE_BROKER": "1"}


def but(name: str, value: str = "") -> Dict[str, str]:
    """What remote work needs, with another value of one variable."""
    return {**FAR, name: value}


def rows_about_secrets() -> Iterator[Bad]:
    none = ("MAM_DISPATCH_SECRET is not set: jobs for other hosts are signed with keys made from it",
            "make one where jobs are delegated, and only there: mam secret new >> .mam.env")
    unfit = "%s is not fit to make keys from: it must be at least 32 printable ASCII characters without spaces"
    hint = "`mam secret new` makes one; every host that has the old one needs a new key then"
    for args in (AWAY, ["remote", "list"], ["secret", "derive", "gpu1"]):
        yield Bad(args, *none, word="no_secret", env=but("MAM_DISPATCH_SECRET"))
        for text in (SECRET, SECRET + " " * 20 + SECRET, SECRET * 2 + "\u00e9", SECRET * 2 + "\t"):
            yield Bad(args, unfit % "MAM_DISPATCH_SECRET", hint, word="bad_secret",
                      env=but("MAM_DISPATCH_SECRET", text))
    for name in ("MAM_SESSION_KEY", "MAM_SESSION_KEY_PREVIOUS"):
        yield Bad(SERVE, unfit % name, "`mam secret derive S` makes it, where jobs are delegated", word="bad_secret",
                  env=but(name, SECRET))
        yield Bad(SERVE, f"{name} is the key of session gpu9, not of gpu1",
                  "where jobs are delegated: mam secret derive gpu1; each session of a host needs a folder with a "
                  ".mam.env of its own, or the key in its environment", word="wrong_key",
                  env=but(name, "gpu9." + GOOD_SECRET))
    yield Bad(SERVE, unfit % "MAM_DISPATCH_SECRET", hint, word="bad_secret",
              env={**but("MAM_DISPATCH_SECRET", SECRET), "MAM_SESSION_KEY": ""})
    yield Bad(SERVE, "MAM_SESSION_KEY is not set: a runner needs the key of its session",
              "where jobs are delegated: mam secret derive gpu1; that line goes into .mam.env", word="no_secret",
              env={**but("MAM_SESSION_KEY"), "MAM_DISPATCH_SECRET": ""})
    for words in (["derive"], ["derive", "a/b"], ["derive", "remote:gpu1"], ["derive", ""], ["derive", "x" * 65]):
        yield Bad(["secret", *words], "secret derive: name one session, of letters, digits, _ and -",
                  "mam secret derive gpu1", 64, "usage", env=FAR)
    yield Bad(["secret", "new", "gpu1"], "secret new: takes no session", "mam secret derive gpu1", 64, "usage")
    for command in ("secret", "remote"):
        yield Bad([command], f"{command}: the following arguments are required: action",
                  f"see: mam {command} --help", 64, "usage")
        yield Bad([command, "nonsense"], f"~{command}: argument action: invalid choice: 'nonsense' .+",
                  f"see: mam {command} --help", 64, "usage")


def rows_about_other_hosts() -> Iterator[Bad]:
    broker = ("no broker is set, and a remote session needs one", "set MQTT_BROKER in the environment or in .mam.env")
    trust = "on a network you trust: --insecure-broker, or MAM_INSECURE_BROKER=1, here and for the runner"
    login = "password (MQTT_PASSWORD) or client certificate (MQTT_CERTFILE)"
    tls = "TLS (MQTT_TLS, or mqtts:// in --broker)"
    lies_open = "the broker 127.0.0.1:1 has no %s: prompts and results would lie open on the way"
    for args in (AWAY, SERVE, ["remote", "list"]):
        yield Bad(args, *broker, word="no_broker", env={"MAM_DISPATCH_SECRET": GOOD_SECRET})
        env = but("MAM_INSECURE_BROKER")
        yield Bad(args, lies_open % f"{tls} and no {login}", trust, word="insecure_broker", env=env)
        yield Bad(args, lies_open % tls, trust, word="insecure_broker",
                  env={**env, "MQTT_USERNAME": "u", "MQTT_PASSWORD": SECRET})
        yield Bad(args, f"the broker 127.0.0.1:1 has no {login}: anybody could send and take jobs", trust,
                  word="insecure_broker",
                  env={**env, "MQTT_TLS": "true", "MAM_INSECURE_BROKER": "no"})
    for text in ("a/b", "remote:x", "x" * 65, "\udcff"):
        yield Bad(["remote", "run", "--exec", "true", "--session", text],
                  f"--session {text!r}: a session is 1 to 64 of letters, digits, _ and -", "", 64, "usage", env=FAR)
    for words in ([], ["--session", ""]):
        yield Bad(["remote", "run", "--exec", "true", *words],
                  "remote run needs --session: for jobs to remote:S, --session S", "", 64, "usage", env=FAR)
    for more in ([], ["--exec", ""], ["--exec", "  "], ["--exec", "\udcff"]):
        yield Bad(["remote", "run", "--session", "gpu1", *more], "--exec: a runner needs a command, in UTF-8",
                  "for example: --exec 'claude -p --permission-mode acceptEdits' --stdin", 64, "no_command", env=FAR)
    yield Bad([*SERVE, "--workdir", "{at}/nosuch"], "--workdir {at}/nosuch: no such folder", word="bad_workdir",
              env=FAR)
    for text in ("0", "-1", "1.5", "x", "\u00b2"):
        yield Bad([*SERVE, "--parallel=" + text], f"~remote: argument --parallel: '{text}' is not a positive .+",
                  "see: mam remote --help", 64, "usage", env=FAR)
    yield Bad(["remote", "list"], "cannot connect to 127.0.0.1:1: Connection refused",
              "check MQTT_BROKER and MQTT_PORT", 3, "broker", env=FAR)
    yield Bad([*AWAY, "--exec", "true"], "--exec goes with an exec: session, not with remote:gpu1", "", 64, env=FAR)
    for text in ("0", "-1", "x", "nan", "inf"):
        yield Bad([*AWAY, "--wait-for-runner=" + text], f"~delegate: argument --wait-for-runner: '{text}' is not .+",
                  "see: mam delegate --help", 64, "usage", env=FAR)
    yield Bad([*DELEGATE, "--wait-for-runner", "5"], "--wait-for-runner goes with a remote: session, not with exec:x",
              "", 64, "usage")
    elsewhere = "put the long part where the runner's host finds it, and name that place in the prompt"
    yield Bad(["delegate", "--agent-session", "remote:gpu1", "--prompt-file", "-"],
              "the prompt takes 315396 bytes in a dispatch, and 262144 are allowed", elsewhere, word="too_large",
              env=FAR, stdin=b"x" * 300 * 1024)
    yield Bad(AWAY, "the prompt takes 8197 bytes in a dispatch, and 8000 are allowed", elsewhere, word="too_large",
              env=but("MAM_MAX_DISPATCH_BYTES", "8000"))
    for text in ("x", "0", "-5", "1.5"):
        yield Bad(AWAY, f"~MAM_MAX_DISPATCH_BYTES is '{re.escape(text)}': it must be a positive whole number",
                  word="bad_value", env=but("MAM_MAX_DISPATCH_BYTES", text))


def rows_about_registries() -> Iterator[Bad]:
    move = "keep a copy of the folder, then move mam.db, mam.db-wal and mam.db-shm away; a new one is made"
    messages = {
        "corrupt": ("the registry {at}/corrupt/mam.db is corrupt (file is not a database)", move, "corrupt"),
        "newer": ("the registry {at}/newer/mam.db was made by a newer mam (version 99, this one knows 2)",
                  "update this mam.pyz, or name another registry with --registry-dir", "newer_registry"),
        "foreign": ("{at}/foreign/mam.db is not a registry of mam",
                    "move it away, or name another registry with --registry-dir", "corrupt"),
        "plain": ("the registry cannot be used: {at}/plain/mam.db: Not a directory",
                  "check the owner and mode of the folder, or use --registry-dir", "cannot_open")}
    commands = [[*command, "known"] for command in OF_A_JOB] + [
        ["list"], [], ["pick"], ["logs", "--list"], ["scrub-secrets"], ["register", "--prompt", "x"],
        ["subscribe", "--wait-any"]]
    few = [["get", "known"], ["list"], [], ["pick"], [*PROGRESS], ["register", "--prompt", "x"]]
    for name, (message, hint, word) in messages.items():
        for command in commands if name == "corrupt" else few:
            yield Bad(["--registry-dir", "{at}/" + name, *command], message, hint, word=word, registry=name)
    hint = "a first `mam delegate` or `mam register` makes one; --registry-dir or MAM_REGISTRY_DIR name another"
    for command in [*OF_A_JOB, ["subscribe", "--wait-any"]]:
        words = command if command[-1] == "--wait-any" else [*command, "known"]
        yield Bad(["--registry-dir", "{at}/none", *words], "no registry at {at}/none", hint,
                  2 if command[0] == "subscribe" else 1, "no_registry", registry="none")


ROWS = [*rows_about_jobs(), *rows_about_data(), *rows_about_texts(), *rows_about_configuration(), *rows_about_usage(),
        *rows_about_sessions(), *rows_about_secrets(), *rows_about_other_hosts(), *rows_about_registries()]


def matches(wanted: str, text: str) -> bool:
    return re.fullmatch(wanted[1:], text, re.DOTALL) is not None if wanted.startswith("~") else text == wanted


def with_json(args: Sequence[str]) -> List[str]:
    """--json behind the command, where no option can take it for its value."""
    at = 2 if args[:1] == ["--registry-dir"] and len(args) > 1 else 0
    at = min(at + 1, len(args)) if args[at:] and not args[at].startswith("-") else at
    return [*args[:at], "--json", *args[at:]]


def run_row(host: Mam, row: Bad, args: Sequence[str]) -> Result:
    def fill(text: str) -> str:
        return text.replace("{at}", str(host.folder)).replace("{reg}", str(host.registry_dir))
    return host(*map(fill, args), env={name: fill(value) for name, value in row.env.items()}, input=row.stdin)


@pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
def test_bad_input(ground: Mam, row: Bad) -> None:
    def fill(text: str) -> str:
        return text.replace("{at}", str(ground.folder)).replace("{reg}", str(ground.registry_dir))
    registry = ground.folder / row.registry if row.registry else ground.registry_dir
    before = everything(registry)

    result = run_row(ground, row, row.args)
    lines = result.stderr.split("\n", 1) if row.word == "env_file" else result.stderr.splitlines()
    prefix = "" if row.word == "env_file" else "mam: "
    message = lines[0][len(prefix):] if lines else ""
    hint = lines[1][len(prefix):] if len(lines) > 1 else ""
    assert result.code == row.code, result
    assert result.stdout == "", f"an error belongs on stderr alone: {result}"
    assert result.stderr.startswith(prefix) and result.stderr.endswith("\n") and len(lines) <= 2, result
    assert matches(fill(row.message), message), result
    assert matches(fill(row.hint), hint), result
    assert SECRET not in result.stderr, result

    as_json = run_row(ground, row, with_json(list(row.args)))
    assert as_json.stderr == "" and as_json.stdout.count("\n") == 1, as_json
    error = as_json.json()
    assert list(error) == ["error"] and list(error["error"]) == ["code", "message", "hint"], as_json
    if not error["error"]["message"].endswith("unrecognized arguments: --json"):    # of that tells another test
        assert as_json.code == row.code, as_json
        assert error["error"]["code"] == (row.word or "error"), as_json
        assert matches(fill(row.message), error["error"]["message"]), as_json
        assert matches(fill(row.hint), error["error"]["hint"]), as_json
    assert everything(registry) == before, "bad input changed the registry"


NUMBERS: List[Tuple[str, str]] = [
    *[("register --prompt x", option) for option in (
        "--timeout", "--idle-timeout", "--heartbeat-sec", "--heartbeat", "--heartbeat-misses", "--ack-timeout",
        "--bits", "--max-iterations", "--attempt-id")],
    *[("delegate --prompt x --agent-session exec:x --exec true", option) for option in (
        "--timeout", "--idle-timeout", "--heartbeat", "--heartbeat-misses", "--ack-timeout", "--bits")],
    *[("publish known --event started", option) for option in (
        "--heartbeat", "--watch-pid", "--attempt-id", "--attempts")],
    ("watch known", "--attempt-id"), ("wait known", "--timeout"), ("update known", "--iteration"),
    ("update known", "--attempt-id"), ("logs known", "--attempt-id"),
    *[("subscribe --job known", option) for option in (
        "--timeout", "--idle-timeout", "--ack-timeout", "--attempt-id")]]


@pytest.mark.parametrize("command, option", NUMBERS, ids=[f"{of.split()[0]} {option}" for of, option in NUMBERS])
def test_numbers_that_are_none(ground: Mam, command: str, option: str) -> None:
    """A slip in a number is refused before anything runs, never a job with no time at all or an endless one."""
    before = everything(ground.registry_dir)
    texts = ["-1", "0", "nan", "1e400", "9" * 30, "x"] + (["", "inf", "0x10"] if command.startswith("register") else [])
    if option == "--ack-timeout" and command.startswith("subscribe"):
        texts.remove("0")               # v4: the idle clock then runs from the first event only
    for text in texts:
        result = ground(*command.split(), f"{option}={text}", timeout=20)
        assert result.code == 64, result
        assert result.stdout == "", result
        assert result.stderr.startswith(f"mam: {command.split()[0]}: argument ") and option in result.stderr, result
    error = ground(*command.split(), f"{option}=x", "--json").json()["error"]
    assert error["code"] == "usage" and error["message"], error
    assert everything(ground.registry_dir) == before


def test_tail_takes_any_whole_number(ground: Mam) -> None:
    """v4: 0, the default, is all; a negative one too."""
    everything_ = ground("logs", "ended", check=0).stdout
    assert everything_.count("\n") > 1
    for text in ("0", "-1", "9" * 30):
        assert ground("logs", "ended", f"--tail={text}", check=0).stdout == everything_
    assert ground("logs", "ended", "--tail=1", check=0).stdout == everything_.splitlines(True)[-1]
    assert ground("logs", "ended", "--tail=x").code == 64


@pytest.mark.parametrize("command", [
    ["list"], ["publish", "known", "--event", "progress"], ["get", "known"], ["pick"], ["cancel", "known"], []])
def test_a_missing_env_file_is_skipped_and_ends_the_search(new_mam: Callable[..., Mam], command: List[str]) -> None:
    mam = new_mam("host")
    (mam.workspace / ".mam.env").write_text("this line is malformed\n")
    mam("list", check=1)
    mam("register", "--job-id", "known", "--prompt", "x", env={"MAM_ENV_FILE": "/nonexistent/.mam.env"}, check=0)
    result = mam(*command, env={"MAM_ENV_FILE": "/nonexistent/.mam.env"})
    assert result.code == 0 and "ERROR" not in result.stderr, result


REFUSED = [
    (["redispatch", "taken"], "refused: attempt 1 has not ended; --force ends it first"),
    (["update", "known", "--attempt-id", "3"],
     "refused: only a redispatch changes the attempt: use --status pending"),
    (["cancel", "ended"], "refused: conflicting cancelled after terminal: job ended ended as completed .+"),
    (["status", "ended", "--set", "error"], "refused: conflicting set after terminal: job ended ended as completed .+"),
    (["publish", "ended", "--event", "progress"], "refused: conflicting progress after terminal: job ended ended .+"),
    (["publish", "known", "--event", "progress", "--attempt-id", "7"],
     "refused: attempt 7 is not the current one: job known is at attempt 1, pending"),
    (["publish", "known", "--event", "progress", "--expect-dispatch-token", "wrong"],
     "refused: the dispatch token is not that of attempt 1: job known is at attempt 1, pending"),
    (["close", "known", "--request", "cancelled", "--expect-dispatch-token", "wrong"],
     "refused: the dispatch token is not that of attempt 1: .+"),
]


@pytest.mark.parametrize("args, message", REFUSED, ids=[" ".join(args)[:60] for args, _ in REFUSED])
def test_refusals_are_answers(ground: Mam, args: List[str], message: str) -> None:
    """Exit 4 with its reason; the jobs are as before, only the log knows that somebody asked."""
    before = ground("list", "--json", check=0).stdout
    result = ground(*args, check=4)
    assert re.fullmatch(f"mam: {message}\n(mam: .+\n)?", result.stderr) and result.stdout == "", result
    if args[0] == "publish":
        assert "leave your work in place" in result.stderr, result
    if args[0] in JSON_COMMANDS:
        error = ground(*args, "--json", check=4).json()["error"]
        assert error["code"] == "refused" and re.fullmatch(message, error["message"]), error
    assert ground("list", "--json", check=0).stdout == before


@pytest.mark.parametrize("command", COMMANDS + V4_COMMANDS)
def test_every_command_takes_json(ground: Mam, command: str) -> None:
    """A program that always adds --json gets every command's errors as JSON, and no usage error for asking."""
    if command == "help":
        return
    error = ground(command, "--json", *{
        "list": ["--status", "x"], "pick": ["--agent-session", "x"], "scrub-secrets": ["--registry-dir", "corrupt"],
        "register": ["--prompt", ""], "delegate": ["--prompt", "", "--agent-session", "exec:x"],
        "submit": ["--prompt", "", "--agent-session", "exec:x"], "publish": ["nosuch", "--event", "error"],
        "subscribe": ["--job", "nosuch"], "status": ["nosuch", "--set", "error"],
        "close": ["nosuch", "--request", "cancelled"], "remote": ["list"],
        "secret": ["derive"]}.get(command, ["nosuch"]), cwd=ground.folder,
        env={"MAM_REGISTRY_DIR": str(ground.registry_dir)})
    assert "unrecognized arguments" not in error.stdout, error
    assert list(error.json()["error"]) == ["code", "message", "hint"], error


# ---- registries that cannot be written; brokers that refuse -------------------------------------------------

def read_only(host: Mam, *args: str) -> Result:
    """Run mam while the registry's folder cannot be written, for root by a read-only mount of its own."""
    if os.geteuid():
        host.registry_dir.chmod(0o500)
        (host.registry_dir / "mam.db").chmod(0o400)
        try:
            return host(*args)
        finally:
            host.registry_dir.chmod(0o700)
            (host.registry_dir / "mam.db").chmod(0o600)
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    done = subprocess.run(["unshare", "-m", "sh", "-c", script, str(host.registry_dir), *host.argv(*args)],
                          env=host.environment(), cwd=str(host.workspace), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    return Result(done.stdout.decode(), done.stderr.decode(), done.returncode, list(args))


def test_a_read_only_registry_can_be_looked_at_and_says_why_it_cannot_be_changed(mam: Mam) -> None:
    mam("register", "--job-id", "J", "--prompt", "p", check=0)
    before = everything(mam.registry_dir)
    if os.geteuid() == 0 and subprocess.run(
            ["unshare", "-m", "true"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("root without the right to mount cannot be kept from writing")
    for args in (["list"], ["get", "J"], ["logs", "J"], []):
        result = read_only(mam, *args)
        assert result.code == 0 and result.stdout and result.stderr == "", result
    for args in (["publish", "J", "--event", "progress"], ["status", "J", "--set", "completed"], ["cancel", "J"],
                 ["register", "--prompt", "x"], ["pick"], ["update", "J", "--role", "R"],
                 ["close", "J", "--request", "cancelled"], ["redispatch", "J", "--force"],
                 ["delegate", "--agent-session", "exec:x", "--exec", "true", "--prompt", "x"]):
        for extra in ([], ["--json"]) if args[0] in JSON_COMMANDS else ([],):
            result = read_only(mam, *args, *extra)
            assert result.code == 1 and "Traceback" not in result.stderr, result
            text = result.json()["error"]["message"] if extra else result.stderr
            assert re.search("read-only|cannot be written|Read-only file system|Permission denied", text), result
            assert extra or result.stderr.startswith("mam: "), result
    assert everything(mam.registry_dir) == before


def test_refused_credentials_are_said_once_and_shown_to_nobody(mam: Mam, own_broker: Any) -> None:
    """The event is recorded and owed; exit 2 tells so, and what to check. No password is ever printed."""
    broker = own_broker("mosquitto", user="agent", password="the-right-one")
    mam.env.update(broker.env(), MQTT_PASSWORD=SECRET)
    mam("register", "--job-id", "J", "--prompt", "p", check=0)
    published = mam("publish", "J", "--event", "started", check=2)
    assert re.fullmatch(r"mam: recorded, not sent yet: the broker 127\.0\.0\.1:\d+ refused the credentials "
                        r"\(Not authorized\): check MQTT_USERNAME and MQTT_PASSWORD\n", published.stderr), published
    cancelled = mam("cancel", "J", check=0)
    assert "refused the credentials" in cancelled.stderr, cancelled
    for result in (published, cancelled, mam("get", "J", "--show-secrets"), mam("logs", "J", "--json"), mam()):
        assert SECRET not in result.stdout + result.stderr, result
    mam.env["MQTT_PASSWORD"] = "the-right-one"
    mam("publish", "J", "--event", "progress", check=4)


def test_credentials_go_only_to_the_broker_they_are_for(mam: Mam, mosquitto: Any, proxy: Any) -> None:
    """A job with a broker of its own must not hand that one the password of the other."""
    mam.without_daemon()
    own = proxy(mosquitto)
    mam.env.update(MQTT_BROKER="localhost", MQTT_PORT=str(free_port()), MQTT_USERNAME="agent", MQTT_PASSWORD=SECRET)
    mam("register", "--job-id", "J", "--prompt", "p", "--broker", f"127.0.0.1:{own.port}", check=0)
    mam("publish", "J", "--event", "started", check=0)
    assert b"started" in own.recorded_up, "it went to the job's own broker"
    assert SECRET.encode() not in own.recorded_up
    # With no other broker they can only be for this one; how else would a job's own broker get a password?
    del mam.env["MQTT_BROKER"]
    mam("publish", "J", "--event", "progress", check=0)
    assert SECRET.encode() in own.recorded_up


@pytest.mark.parametrize("env", [
    {"MQTT_PORT": "nonsense"}, {"MQTT_PORT": "99999"}, {"MQTT_TLS": "perhaps"}, {"MQTT_PORT": "closed"},
    {"MQTT_TLS": "true", "MQTT_CA_CERTS": "/nonexistent/ca.crt"}, {"MQTT_BROKER": "no.such.host.invalid."}],
    ids=lambda env: " ".join(f"{name}={value}" for name, value in env.items()))
def test_a_wrong_broker_setting_never_costs_an_event(mam: Mam, env: Dict[str, str]) -> None:
    """An agent must not lose its report because somebody mistyped a port: recorded, exit 2, one line that says why."""
    right = {"MQTT_BROKER": env.get("MQTT_BROKER", "127.0.0.1"), "MQTT_PORT": str(free_port())}
    mam("register", "--job-id", "J", "--prompt", "p", check=0, env=dict(right))
    env = {**right, **{name: value for name, value in env.items() if value != "closed"}}
    result = mam("publish", "J", "--event", "progress", "--detail", "kept", "--attempts", "1", env=dict(env))
    assert result.code == 2 and re.fullmatch("mam: recorded, not sent yet: .+\n", result.stderr), result
    assert mam.events("J")[-2]["detail"] == "kept" or mam.events("J")[-1]["detail"] == "kept"
    assert mam("cancel", "J", env=dict(env)).code == 0


# ---- streams ------------------------------------------------------------------------------------------------

READERS: List[List[str]] = [
    ["list"], ["list", "--json"], ["get", "J"], ["logs", "J"], ["logs", "J", "--json"], ["logs", "--list"],
    ["logs", "J", "--output"], [], ["--json"], ["watch", "J"], ["watch", "J", "--json"], ["wait", "J"],
    ["wait", "J", "--json"], ["subscribe", "--job", "J"], ["get-feedback", "J"], ["help"], ["help", "v4"],
    ["help", "list"], ["list", "--help"], ["--help"], ["-h"], ["--version"], ["scrub-secrets", "--dry-run"]]


@pytest.fixture(scope="module")
def talkative(pyz: Path, session_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mam]:
    """A host whose every listing is longer than a pipe holds (64 KiB)."""
    host = Mam(pyz, tmp_path_factory.mktemp("talk") / "host", session_folder / "shiv")
    host("delegate", "--job-id", "J", "--agent-session", "exec:x", "--prompt", "x" * 100000,
         "--exec", "i=0; while [ $i -lt 3000 ]; do echo 'line of output, one of very many of them'; i=$((i+1)); done",
         check=0)
    with contextlib.closing(sqlite3.connect(host.registry_dir / "mam.db")) as database, database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(jobs)") if row[1] not in ("n", "job_id")]
        copied = ", ".join(columns)
        for number in range(1500):
            database.execute(f"INSERT INTO jobs(job_id, {copied}) SELECT ?, {copied} FROM jobs WHERE job_id = 'J'",
                             (f"copy{number}",))
        database.execute("UPDATE jobs SET prompt = 'short' WHERE job_id <> 'J'")
        columns = [row[1] for row in database.execute("PRAGMA table_info(attempts)") if row[1] != "job_id"]
        database.execute(f"INSERT INTO attempts(job_id, {', '.join(columns)}) SELECT j.job_id, a."
                         f"{', a.'.join(columns)} FROM jobs j, attempts a WHERE j.job_id <> 'J' AND a.job_id = 'J'")
        copied = "job_id, attempt_id, event, source, timestamp, logged_at, detail, payload"
        for _ in range(2000):
            database.execute(f"INSERT INTO events({copied}) SELECT {copied} FROM events WHERE n = 1")
    yield host
    host.close()


def shell(host: Mam, script: str, *args: str, timeout: float = 60) -> "subprocess.CompletedProcess[str]":
    """Run a shell script in which "$@" is mam with arguments."""
    return subprocess.run(["bash", "-c", script, "bash", *host.argv(*args)], env=host.environment(),
                          cwd=str(host.workspace), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=timeout, encoding="utf-8")


def assert_quiet(stderr: str) -> None:
    for word in ("Traceback", "internal error", "Exception ignored", "BrokenPipe", "NoneType"):
        assert word not in stderr, stderr


@pytest.mark.parametrize("args", READERS, ids=lambda args: " ".join(args) or "(mam alone)")
def test_nobody_reads_stdout(talkative: Mam, args: List[str]) -> None:
    """`| head -1`, and a reader that has gone before the first byte: exit 141 without a word."""
    headed = shell(talkative, '"$@" | head -n 1 >/dev/null; exit ${PIPESTATUS[0]}', *args)
    assert headed.returncode in (0, 141), headed
    assert_quiet(headed.stderr)
    gone = shell(talkative, 'exec 3> >(exec true); sleep 0.1; "$@" >&3', *args)
    assert gone.returncode == 141, gone
    assert_quiet(gone.stderr)


@pytest.mark.parametrize("args", READERS, ids=lambda args: " ".join(args) or "(mam alone)")
def test_stdout_closed_at_the_start(talkative: Mam, args: List[str]) -> None:
    """cron jobs and service managers start programs with closed streams."""
    closed = shell(talkative, 'exec "$@" >&-', *args)
    assert closed.returncode == 0, closed
    assert_quiet(closed.stderr)


def test_work_is_done_with_stdout_closed(mam: Mam) -> None:
    mam("register", "--job-id", "J", "--prompt", "x", check=0)
    for args, status in ((["pick"], "running"), (["publish", "J", "--event", "completed"], "completed")):
        done = shell(mam, 'exec "$@" >&-', *args)
        assert done.returncode == 0, done
        assert_quiet(done.stderr)
        assert mam.job("J")["status"] == status
    for args, code in ((["register", "--prompt", "x"], 0), (["cancel", "J"], 4),
                       (["delegate", "--agent-session", "exec:x", "--exec", "true", "--prompt", "x"], 0)):
        done = shell(mam, 'exec "$@" >&-', *args)
        assert done.returncode == code, done
        assert_quiet(done.stderr)
    assert [job["status"] for job in mam("list", "--json").json()] == ["completed", "pending", "completed"]


def test_stdin_and_stderr_closed_at_the_start(mam: Mam) -> None:
    for args in (["list"], ["register", "--prompt", "x"], [],
                 ["delegate", "--agent-session", "exec:x", "--exec", "true", "--prompt", "x"]):
        done = shell(mam, 'exec "$@" <&-', *args)
        assert done.returncode == 0, (args, done)
        assert_quiet(done.stderr)
        done = shell(mam, 'exec "$@" 2>&-', *args)
        assert done.returncode == 0 and "Traceback" not in done.stdout, (args, done)
    assert shell(mam, 'exec "$@" 2>&-', "get", "nosuch").returncode == 1


@pytest.mark.parametrize("args", [
    ["register", "--prompt-file", "-"], ["register", "--prompt", "x", "--auth-token", "-"],
    ["publish", "J", "--event", "progress", "--detail-file", "-"]], ids=lambda args: args[-2])
def test_reading_from_a_closed_stdin_is_an_error_in_words(mam: Mam, args: List[str]) -> None:
    mam("register", "--job-id", "J", "--prompt", "x", check=0)
    before = everything(mam.registry_dir)
    done = shell(mam, 'exec "$@" <&-', *args)
    assert_quiet(done.stderr)
    if args[0] == "publish":
        assert done.returncode in (0, 64), done         # nothing to read is an empty detail
        return
    assert done.returncode in (1, 64) and done.stderr.startswith("mam: "), done
    assert everything(mam.registry_dir) == before


# ---- help ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("command", COMMANDS + V4_COMMANDS)
def test_every_command_has_help_with_an_example(mam: Mam, command: str) -> None:
    shown = mam(command, "--help", check=0)
    assert shown.stdout.startswith(f"usage: mam {command}") and shown.stderr == "", shown
    assert "--registry-dir DIR" in shown.stdout
    if command != "help":
        assert re.search(rf"\nexamples:\n  .*mam {command}|\nexamples:\n  mam ", shown.stdout), shown
        assert mam("help", command, check=0).stdout == shown.stdout
        assert all(len(line) <= 130 for line in shown.stdout.splitlines()), shown
    assert mam(command, "-h", check=0).stdout == shown.stdout


def test_help_lists_every_command_once(mam: Mam) -> None:
    main = mam("help", check=0)
    assert mam("--help", check=0).stdout == mam("-h", check=0).stdout == main.stdout
    assert re.findall(r"^  ([a-z][\w-]*)  ", main.stdout, re.MULTILINE) == COMMANDS
    assert re.findall(r"^  ([a-z][\w-]*)  ", mam("help", "v4", check=0).stdout, re.MULTILINE) == V4_COMMANDS
    assert "Exit codes: 0 done" in main.stdout and "_run" not in main.stdout
    assert mam("--version", check=0).stdout == "mam 5.0.0\n"
    assert not mam.registry_dir.exists()


def test_secret_makes_lines_for_an_env_file(mam: Mam) -> None:
    """Appended to .mam.env as they are; each new secret is another, the key of a session is always the same."""
    made = [mam("secret", "new", check=0).stdout for _ in range(2)]
    assert all(re.fullmatch(r"MAM_DISPATCH_SECRET=[\w-]{43}\n", line) for line in made) and made[0] != made[1]
    assert mam("secret", "new", "--json", check=0).json().keys() == {"name", "value"}
    (mam.workspace / ".mam.env").write_text(made[0])
    keys = {session: mam("secret", "derive", session, check=0) for session in ("gpu1", "gpu2")}
    assert all(re.fullmatch(rf"MAM_SESSION_KEY={session}\.[\w-]{{43}}\n", done.stdout)
               for session, done in keys.items())
    assert keys["gpu1"].stdout != keys["gpu2"].stdout
    again = mam("secret", "derive", "gpu1", "--json", check=0).json()
    assert f"{again['name']}={again['value']}\n" == keys["gpu1"].stdout
    assert made[0].split("=")[1].strip() not in keys["gpu1"].stdout + keys["gpu1"].stderr
    assert not mam.registry_dir.exists()


# ---- v4's verbs ---------------------------------------------------------------------------------------------

def test_v4_register_takes_every_flag_of_v4(mam: Mam) -> None:
    (mam.folder / "prompt").write_text("  the prompt\nin two lines\n")
    made = mam("--registry-dir", mam.folder / "v4", "register", "--prompt-file", mam.folder / "prompt", "--agent",
               "codex", "--agent-session", "herdr:codex", "--role", "Planner", "--timeout", "100", "--heartbeat-sec",
               "7", "--heartbeat-misses", "3", "--ack-timeout", "9", "--transport", "herdr", "--dispatch-token",
               "abc-1", "--attempt-id", "2", "--job-id", "v4job", "--bits", "128", "--artifact", "a.md", "--artifact",
               "b/c.md", "--job-type", "loop", "--reviewer", "claude-code", "--reviewer-session", "herdr:reviewer",
               "--max-iterations", "4", "--auth-token", "-", input="0123456789abcdef0123\n", check=0)
    assert made.stdout == "v4job\n"
    record = mam("--registry-dir", mam.folder / "v4", "get", "--job", "v4job", "--show-secrets", check=0).json()
    assert {name: record[name] for name in V4_KEYS if name not in ("created_at", "updated_at")} == {
        "schema_version": 1, "job_id": "v4job", "status": "pending", "prompt": "  the prompt\nin two lines\n",
        "agent": "codex", "agent_session": "herdr:codex", "role": "Planner", "broker": None,
        "topic_prefix": "python/mqtt/jobs/v4job", "timeout_sec": 100, "idle_timeout_sec": 21,
        "expected_artifacts": ["a.md", "b/c.md"], "last_seq": 0, "auth_token": "0123456789abcdef0123",
        "job_type": "loop", "reviewer": "claude-code", "reviewer_session": "herdr:reviewer", "max_iterations": 4,
        "iteration": 1, "dispatch_token": "abc-1", "attempt_id": 2, "heartbeat_sec": 7, "heartbeat_misses": 3,
        "ack_timeout_sec": 9, "transport": "herdr"}
    assert not mam.registry_dir.exists(), "--registry-dir before the verb was not obeyed"


def test_v4_register_defaults(mam: Mam) -> None:
    job = mam("register", "--prompt", "hello", check=0).stdout.strip()
    assert re.fullmatch("[0-9a-f]{8}", job)
    assert re.fullmatch("[0-9a-f]{32}\n", mam("register", "--prompt", "hello", "--bits", "128", check=0).stdout)
    record = mam("get", "--job", job, "--show-secrets", check=0).json()
    assert list(record) == V4_KEYS + NEW_KEYS
    assert {name: record[name] for name in (
        "agent", "agent_session", "role", "timeout_sec", "idle_timeout_sec", "heartbeat_sec", "heartbeat_misses",
        "ack_timeout_sec", "job_type", "max_iterations", "iteration", "attempt_id", "transport", "last_seq")} == {
        "agent": "claude-code", "agent_session": "herdr:claude", "role": "Worker", "timeout_sec": 3600,
        "idle_timeout_sec": 120, "heartbeat_sec": 30, "heartbeat_misses": 4, "ack_timeout_sec": 180,
        "job_type": "direct", "max_iterations": 5, "iteration": 1, "attempt_id": 1, "transport": "herdr", "last_seq": 0}
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", record["auth_token"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["created_at"])


def test_v4_list_get_and_hidden_tokens(mam: Mam) -> None:
    assert mam("list", check=0).stdout == "(no jobs)\n"
    assert mam("list", "--json", check=0).json() == []
    for number in range(3):
        mam("register", "--prompt", f"job {number}: " + "words " * 20, "--job-id", f"j{number}", check=0)
    mam("status", "--job", "j1", "--set", "completed", check=0)
    lines = mam("list", check=0).stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["j0", "pending", "herdr:claude"], ["j1", "completed", "herdr:claude"], ["j2", "pending", "herdr:claude"]]
    assert "job 0: words" in lines[0] and len(lines[0]) < 120
    assert [line.split()[0] for line in mam("list", "--status", "completed").stdout.splitlines()] == ["j1"]
    assert mam("list", "--status", "error", check=0).stdout == "(no jobs)\n"
    records = mam("list", "--json", check=0).json()
    assert [list(record) for record in records] == [V4_KEYS + NEW_KEYS] * 3
    record = mam("get", "--job", "j0", check=0).json()
    assert record == records[0] == mam("get", "j0", "--json").json()
    assert record["auth_token"] == "***" and record["prompt"].endswith("words ")
    assert mam("get", "j0", "--show-secrets").json()["auth_token"] not in ("***", "", None)
    assert mam("get", "j0").stdout.startswith('{\n  "schema_version": 1,\n'), "v4 indented by two"


def test_v4_status(mam: Mam) -> None:
    """0 done or already so, 4 refused, 1 invalid."""
    mam("register", "--prompt", "x", "--job-id", "J", check=0)
    for status, code in (("running", 0), ("running", 0), ("completed", 0), ("completed", 0), ("error", 4),
                         ("running", 4), ("nonsense", 1)):
        result = mam("status", "--job", "J", "--set", status, check=code)
        assert result.stdout == "" and (code == 0) == (result.stderr == ""), result
    assert mam.job("J")["status"] == "completed"
    assert mam("status", "--job", "nosuch", "--set", "running").code == 1


def test_v4_update(mam: Mam) -> None:
    mam("register", "--prompt", "x", "--job-id", "J", check=0)
    (mam.folder / "prompt").write_text("better")
    mam("update", "--job", "J", "--agent-session", "queue:q", "--prompt-file", mam.folder / "prompt", "--iteration",
        "2", "--role", "Reviewer", check=0)
    record = mam.job("J")
    assert [record[name] for name in ("agent_session", "prompt", "iteration", "role")] == [
        "queue:q", "better", 2, "Reviewer"]
    mam("update", "--job", "J", "--status", "completed", check=0)
    mam("update", "--job", "J", "--status", "error", check=4)
    mam("update", "--job", "J", "--status", "pending", "--prompt", "again", "--attempt-id", "5", check=0)
    after = mam.job("J")
    assert (after["status"], after["attempt_id"], after["prompt"]) == ("pending", 5, "again")
    assert after["dispatch_token"] != record["dispatch_token"]
    assert mam("update", "--job", "nosuch", "--role", "R").code == 1


def test_v4_close(mam: Mam) -> None:
    """0, also when the job had ended in another way (the reason on stderr), 4 for a wrong token, 1 unknown."""
    for job in ("A", "B", "C"):
        mam("register", "--prompt", "x", "--job-id", job, check=0)
    token = mam.job("A")["dispatch_token"]
    wrong = mam("close", "--job", "A", "--request", "deadline_timeout", "--expect-dispatch-token", "wrong", check=4)
    assert wrong.stderr.startswith("mam: refused: the dispatch token is not"), wrong
    mam("close", "--job", "A", "--request", "deadline_timeout", "--expect-dispatch-token", token, "--detail",
        "too long", check=0)
    record = mam.job("A")
    assert (record["status"], record["reason"], record["detail"]) == ("error", "deadline_timeout", "too long")
    conflicting = mam("close", "--job", "A", "--request", "cancelled", check=0)
    assert "conflicting" in conflicting.stderr and "after terminal" in conflicting.stderr, conflicting
    assert mam("close", "--job", "A", "--request", "deadline_timeout", check=0).stderr.startswith("mam: already: ")
    mam("close", "--job", "B", "--request", "cancelled", check=0)
    assert mam.job("B")["status"] == "cancelled"
    for request, status in (("unresponsive", "error"), ("agent_blocked", "error")):
        mam("register", "--prompt", "x", "--job-id", request, check=0)
        mam("close", "--job", request, "--request", request, check=0)
        assert (mam.job(request)["status"], mam.job(request)["reason"]) == (status, request)
    assert mam("close", "--job", "nosuch", "--request", "cancelled").code == 1


def test_v4_get_feedback_and_pick(mam: Mam) -> None:
    mam("register", "--prompt", "x", "--job-id", "J", "--agent-session", "queue:q", check=0)
    assert mam("get-feedback", "--job", "J", check=0).stdout == "\n"
    assert mam("pick", "--agent-session", "queue:other", check=3).stdout == ""
    assert mam("pick", "--agent-session", "queue:q", check=0).stdout == "J\n"
    assert mam("pick", "--agent-session", "queue:q", check=3) == ("", "", 3, ["pick", "--agent-session", "queue:q"])
    long = "no. " + "because " * 2000
    mam("publish", "--job", "J", "--event", "progress", "--detail", "not this", check=0)
    mam("publish", "--job", "J", "--event", "error", "--detail", long, check=0)
    assert mam("get-feedback", "--job", "J", check=0).stdout == long + "\n", "all of it, past the 4 KiB of a detail"
    mam("register", "--prompt", "x", "--job-id", "D", check=0)
    assert mam("pick", check=0).stdout == "D\n", "the default session is v4's herdr:claude"


def test_pick_json_tells_an_agent_all_it_needs(mam: Mam) -> None:
    mam("register", "--prompt", "do this\n", "--job-id", "J", "--agent-session", "queue:q", check=0)
    told = mam("pick", "--agent-session", "queue:q", "--json", check=0).json()
    assert sorted(told) == sorted(["JOB_ID", "MAM_JOB_ID", "MAM_JOB_BRIEF", "MAM_PUBLISH_CMD", "MAM_ATTEMPT_ID",
                                   "MAM_DISPATCH_TOKEN", "MAM_REGISTRY_DIR", "MAM_REAL_ROOT", "job_id", "brief"])
    assert Path(told["brief"]).read_text() == "do this\n"
    done = subprocess.run(told["MAM_PUBLISH_CMD"].split() + ["--event", "completed"], env=mam.environment(), cwd="/",
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    assert done.returncode == 0, done
    assert mam.job("J")["status"] == "completed"


def test_v4_logs(mam: Mam) -> None:
    mam("register", "--prompt", "the title", "--job-id", "J", check=0)
    mam("publish", "--job", "J", "--event", "started", check=0)
    mam("publish", "--job", "J", "--event", "progress", "--detail", "half", "--data", '{"n": 1}', check=0)
    text = mam("logs", "J", check=0).stdout
    assert [line.split()[1] for line in text.splitlines()] == ["registered", "started", "status_changed", "progress"]
    assert all(re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z +\w+ ", line) for line in text.splitlines()), text
    assert mam("logs", "J", "--tail", "1", check=0).stdout == text.splitlines(True)[-1]
    records = mam("logs", "J", "--json", check=0).ndjson()
    assert [list(record)[:9] for record in records] == [[
        "event", "job_id", "attempt_id", "seq", "source", "timestamp", "logged_at", "detail", "delivered_at"]] * 4
    assert records[-1]["data"]["n"] == 1 and records[-1]["seq"] == 2
    assert [line.split()[0] for line in mam("logs", "--list", check=0).stdout.splitlines()] == ["J"]
    assert [record["job_id"] for record in mam("logs", "--list", "--json", check=0).json()] == ["J"]
    for run in (mam("logs", "J", "--logs-dir", "/nonexistent", check=0),
                mam("logs", "J", env={"DELEGATE_JOB_LOGS_DIR": "/nonexistent"}, check=0)):
        assert run.stdout == text and "have no meaning here" in run.stderr, run
    assert mam("logs", "nosuch").code == 1


@pytest.mark.parametrize("variable", ["DELEGATE_JOB_LOGS_DIR", "MAM_ENGINE_CAS", "MAM_DELEGATION_PY"])
def test_v4_variables_without_a_meaning_are_said(mam: Mam, variable: str) -> None:
    """Who switched something in v4 learns that the switch is gone; the command works all the same."""
    mam("register", "--prompt", "x", "--job-id", "J", check=0)
    args = ["logs", "J"] if variable == "DELEGATE_JOB_LOGS_DIR" else ["status", "J", "--set", "running"]
    result = mam(*args, env={variable: "0"}, check=0)
    assert result.stderr.startswith("mam: ") and variable in result.stderr, result


def test_v4_scrub_secrets(mam: Mam) -> None:
    """Records that v4 wrote may hold a password: it is told, hidden, and taken out, all else stays."""
    for job in ("old", "empty", "clean"):
        mam("register", "--prompt", "x", "--job-id", job, "--broker", "agent@127.0.0.1:1884", check=0)
    with contextlib.closing(sqlite3.connect(mam.registry_dir / "mam.db")) as database, database:
        for job, password in (("old", SECRET), ("empty", None)):
            block = {"host": "127.0.0.1", "port": 1884, "tls": False, "username": "agent", "password": password}
            database.execute("UPDATE jobs SET broker = ? WHERE job_id = ?", (json.dumps(block), job))
    assert mam.job("old")["broker"]["password"] == "***"
    assert SECRET not in mam("list", "--json").stdout + mam("get", "old").stdout + mam("logs", "old", "--json").stdout
    before = everything(mam.registry_dir)
    dry = mam("scrub-secrets", "--dry-run", check=0)
    assert dry.stdout == f"would scrub 1 record(s) under {mam.registry_dir}: old\n"
    assert everything(mam.registry_dir) == before
    assert mam("scrub-secrets", check=0).stdout == f"scrubbed 1 record(s) under {mam.registry_dir}: old\n"
    assert mam.job("old")["broker"] == {"host": "127.0.0.1", "port": 1884, "tls": False, "username": "agent"}
    assert not any(SECRET in str(line) for line in everything(mam.registry_dir))
    assert mam("scrub-secrets", check=0).stdout == f"scrubbed 0 record(s) under {mam.registry_dir}\n"


@pytest.mark.parametrize("before", [["--registry-dir", "DIR"], ["--registry-dir=DIR"]], ids=["two words", "one word"])
def test_registry_dir_before_and_behind_the_verb(mam: Mam, before: List[str]) -> None:
    folder = str(mam.folder / "elsewhere")
    words = [word.replace("DIR", folder) for word in before]
    mam(*words, "register", "--prompt", "x", "--job-id", "J", check=0)
    assert mam(*words, "get", "J", check=0).json()["job_id"] == "J"
    assert mam("get", "J", *words, check=0).json()["job_id"] == "J"
    assert "J" in mam(*words, check=0).stdout
    assert mam("get", "J", env={"MAM_REGISTRY_DIR": folder}, check=0).json()["job_id"] == "J"
    assert mam(*words, "get", "--", "J", check=0).json()["job_id"] == "J", "-- ends the options of the verb only"


@pytest.mark.parametrize("args", [
    ["list"], ["list", "--json"], [], ["--json"], ["get", "J"], ["logs", "J"], ["logs", "--list"], ["watch", "J"],
    ["wait", "J"], ["subscribe", "--job", "J"], ["subscribe", "--wait-any"], ["pick"],
    ["publish", "J", "--event", "error"], ["cancel", "J"], ["redispatch", "J"], ["status", "J", "--set", "error"],
    ["update", "J", "--role", "R"],
    ["close", "J", "--request", "cancelled"], ["get-feedback", "J"], ["scrub-secrets"], ["help"], ["--version"],
    ["register"], ["register", "--prompt", ""], ["delegate", "--agent-session", "exec:x", "--prompt", "x"]],
    ids=lambda args: " ".join(args) or "(mam alone)")
def test_no_registry_comes_from_looking(ground: Mam, args: List[str], tmp_path: Path) -> None:
    """Only what registers a job makes a .mam: a typo in a folder name must not leave an empty registry there."""
    result = ground(*args, env={"MAM_REGISTRY_DIR": str(tmp_path / "none" / ".mam")})
    assert result.code in (0, 1, 2, 3, 64) and not (tmp_path / "none").exists(), result


# ---- a job id that looks like an option, a folder that is no UTF-8 ------------------------------------------

def test_a_job_whose_id_begins_with_a_dash_runs(mam: Mam) -> None:
    """The id is allowed, so its job must run, report and end like any other, or be refused at once."""
    begun = mam.popen("delegate", "--job-id=-abc", "--agent-session", "exec:x", "--prompt", "x", "--exec",
                      "$MAM_PUBLISH_CMD --event progress --detail 'from the agent'")
    done = begun.wait(20)
    if done.code == 1 and "-abc" in done.stderr:
        return
    assert done.code == 0 and "from the agent" in done.stdout, done


def test_a_working_folder_that_is_no_utf8(mam: Mam) -> None:
    """Such folders exist; a job there runs, or is refused in words before anything is recorded."""
    folder = os.fsencode(mam.folder) + b"/w\xff"
    os.mkdir(folder)
    (mam.folder / "registry").mkdir()
    for args in (["register", "--prompt", "x"],
                 ["delegate", "--agent-session", "exec:x", "--exec", "true", "--prompt", "x"]):
        result = mam(*args, cwd=os.fsdecode(folder), env={"MAM_REGISTRY_DIR": str(mam.folder / "registry")})
        assert result.code in (0, 1, 64) and "internal error" not in result.stderr, result
        assert result.code == 0 or result.stderr.startswith("mam: "), result


# ---- mam alone ----------------------------------------------------------------------------------------------

def table_rows(text: str, heading: str) -> List[List[str]]:
    """The rows under a heading, cut at its columns."""
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(heading))
    starts = [match.start() for match in re.finditer(r"\S+(?: \S+)*", lines[at])]
    found = []
    for line in lines[at + 1:]:
        if not line:
            break
        found.append([line[start:end].strip() for start, end in zip(starts, [*starts[1:], None])])
    return found


def test_mam_alone_in_an_empty_workspace(mam: Mam) -> None:
    shown = mam(check=0)
    assert shown.stdout.startswith(f"mam 5.0.0  {mam.registry_dir}  no broker\nno jobs yet\n"), shown
    assert "mam delegate --agent-session exec:demo" in shown.stdout
    assert mam("--json", check=0).json() == {"registry": str(mam.registry_dir), "counts": {}, "open": [], "ended": []}
    assert not mam.registry_dir.exists()
    with_broker = mam(env={"MQTT_BROKER": "127.0.0.1", "MQTT_PORT": "1885"}, check=0)
    assert with_broker.stdout.splitlines()[0].endswith("broker 127.0.0.1:1885"), "looking connects to nothing"


def test_mam_alone_with_open_and_ended_jobs(mam: Mam) -> None:
    for job in ("waiting", "asking", "silent", "failed", "done"):
        mam("register", "--prompt", f"the {job} one", "--job-id", job, "--agent-session", f"queue:{job}", check=0)
    mam("publish", "asking", "--event", "permission_required", "--detail", "may I delete build/?", check=0)
    mam("publish", "silent", "--event", "started", "--heartbeat", "30", "--watch-pid", os.getpid(), check=0)
    mam("publish", "failed", "--event", "error", "--detail", "no compiler", check=0)
    mam("publish", "done", "--event", "completed", "--detail", "all green", check=0)
    with contextlib.closing(sqlite3.connect(mam.registry_dir / "mam.db")) as database, database:
        # An agent that lives (its beat is fresh) and has not progressed for 50 minutes.
        moment = database.execute("SELECT last_event_mono FROM jobs WHERE job_id = 'silent'").fetchone()[0]
        boot, _, seconds = moment.partition(" ")
        database.execute("UPDATE jobs SET last_event_mono = ? WHERE job_id = 'silent'",
                         (f"{boot} {float(seconds) - 3000:.3f}",))
    shown = mam(check=0).stdout
    assert shown.splitlines()[1] == "1 pending, 2 running, 1 completed, 1 error"
    rows = {row[0]: row[1:] for row in table_rows(shown, "OPEN")}
    assert rows["waiting"][0] == "pending" and rows["waiting"][2:4] == ["-", "-"], shown
    assert rows["waiting"][4:] == ["queue:waiting", "(prompt) the waiting one"], shown
    assert rows["asking"][0] == "PERMISSION" and rows["asking"][5] == "may I delete build/?", shown
    assert rows["silent"][0] == "running" and re.fullmatch(r"\d+s ago", rows["silent"][2]), shown
    assert re.fullmatch(r"50m\d\ds ago", rows["silent"][3]), "progress is told apart from life"
    ends = {row[0]: row[1:] for row in table_rows(shown, "ENDED")}
    assert ends["failed"][0] == "error" and ends["failed"][4] == "no compiler", shown
    assert ends["done"][0] == "completed" and ends["done"][4] == "all green", shown

    value = mam("--json", check=0).json()
    assert list(value) == ["registry", "counts", "open", "ended"]
    assert value["counts"] == {"pending": 1, "running": 2, "completed": 1, "error": 1}
    assert [job["job_id"] for job in value["open"]] == ["waiting", "asking", "silent"]
    assert sorted(job["job_id"] for job in value["ended"]) == ["done", "failed"]
    assert all(list(job) == OVERVIEW_KEYS for job in value["open"] + value["ended"])
    silent = value["open"][2]
    assert silent["alive_s"] < 100 and silent["progress_s"] >= 3000
    assert value["open"][0]["alive_s"] is None and value["open"][0]["progress_s"] is None
    assert value["open"][1]["last_event"] == "permission_required"


def test_mam_alone_shows_a_validating_job(mam: Mam) -> None:
    begun = mam.popen("delegate", "--job-id", "J", "--agent-session", "exec:x", "--exec", "true", "--prompt", "x",
                      "--validate", "until [ -e go ]; do sleep 0.05; done")
    poll(lambda: [job["phase"] for job in mam("list", "--json").json()] == ["validating"], 20, "phase", interval=0.1)
    assert table_rows(mam(check=0).stdout, "OPEN")[0][1] == "validating"
    assert mam("list", check=0).stdout.split()[1] == "validating"
    (mam.workspace / "go").write_text("")
    assert begun.wait(30).code == 0


# ---- terminals ----------------------------------------------------------------------------------------------

def on_a_terminal(host: Mam, *args: str, env: Optional[Dict[str, Optional[str]]] = None) -> str:
    """What a command writes on a terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(host.argv(*args), stdin=slave, stdout=slave, stderr=slave, cwd=str(host.workspace),
                               env=host.environment({"TERM": "xterm-256color", **(env or {})}), start_new_session=True)
    os.close(slave)
    shown = b""
    try:
        while select.select([master], [], [], 30)[0]:
            try:
                data = os.read(master, 65536)
            except OSError:             # Linux says EIO when the last writer has closed
                break
            if not data:
                break
            shown += data
        assert process.wait(30) == 0, shown
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return shown.decode("utf-8").replace("\r\n", "\n")


def test_colour_only_on_a_terminal(mam: Mam) -> None:
    mam("register", "--job-id", "J", "--prompt", "x", check=0)
    plain = mam(check=0).stdout
    assert "\x1b" not in plain
    assert "\x1b[" in on_a_terminal(mam)
    assert re.sub(r"\d+s", "s", re.sub(r"\x1b\[\d*m", "", on_a_terminal(mam))) == re.sub(r"\d+s", "s", plain)
    assert "\x1b" not in on_a_terminal(mam, env={"NO_COLOR": "1"})
    for args in (["list"], ["get", "J"], ["logs", "J"], ["--json"], ["help"]):
        assert "\x1b" not in on_a_terminal(mam, *args), args
    (mam.workspace / ".mam.env").write_text("NO_COLOR=1\n")
    assert "\x1b" not in on_a_terminal(mam)


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31mred \x9b31m \x08\x08 \u202egnp.exe end"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def hostile(pyz: Path, session_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mam]:
    """A host where whatever takes a text was given escape sequences."""
    host = Mam(pyz, tmp_path_factory.mktemp("hostile") / "host", session_folder / "shiv")
    host("register", "--job-id", "J", "--prompt", f"title {ESCAPES}\n{ESCAPES}", "--role", ESCAPES, "--agent", ESCAPES,
         "--reviewer", ESCAPES, check=0)
    host("publish", "J", "--event", "progress", "--detail", f"half {ESCAPES}", "--data", json.dumps({"k": ESCAPES}),
         check=0)
    host("publish", "J", "--event", "completed", "--detail", f"all {ESCAPES}", check=0)
    yield host
    host.close()


@pytest.mark.parametrize("args", [
    [], ["--json"], ["list"], ["list", "--json"], ["get", "J"], ["logs", "J"], ["logs", "J", "--json"], ["watch", "J"],
    ["watch", "J", "--json"], ["wait", "J", "--json"], ["subscribe", "--job", "J"], ["get-feedback", "J"],
    ["logs", "--list"]], ids=lambda args: " ".join(args) or "(mam alone)")
def test_nothing_drives_the_terminal(hostile: Mam, args: List[str]) -> None:
    """A prompt or a report with escape sequences must not retitle, clear or repaint the terminal of who reads it."""
    shown = hostile(*args, check=0)
    assert "end" in shown.stdout or args[:1] == ["wait"], "the words themselves are still there"
    found = RAW.findall(shown.stdout + shown.stderr)
    assert not found, f"raw {found[:5]} in {shown}"
    if "--json" in args or args[:1] == ["get"]:
        for line in ([shown.stdout] if args[:1] != ["watch"] and args[:1] != ["logs"] else shown.stdout.splitlines()):
            json.loads(line)


def test_unicode_is_shown_as_it_was_written(mam: Mam) -> None:
    title = "Größe prüfen — 測試 🚀 ñ عربى"
    mam("register", "--job-id", "J", "--prompt", title, check=0, env={"LANG": "C", "LC_ALL": "C"})
    mam("publish", "J", "--event", "completed", "--detail", title, check=0)
    for args in ([], ["list"], ["get", "J"], ["logs", "J"], ["watch", "J"], ["--json"], ["get-feedback", "J"]):
        for env in ({}, {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}):
            values: Dict[str, Union[str, None]] = dict(env)
            assert title[:40] in mam(*args, env=values, check=0).stdout, (args, env)

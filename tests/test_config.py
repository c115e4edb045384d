"""Where settings come from, and where passwords do not go."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import ROOT, free_port, poll, short_folder
from support.cli import Mam

sys.path.insert(0, str(ROOT))
import mam as program

PASSWORD = "Tr0ub4dor-and-3-horses"


def settings_of(**env: str) -> Any:
    return program.Settings(env, None, "/w", "/w/.mam", "/home/alice")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder to be in, and no setting in the environment."""
    for name in list(os.environ):
        if name.startswith(("MAM_", "MQTT_", "WORKSPACE_ROOT")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "top" / "in" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "top" / "in" / "deep")
    yield tmp_path


# ---- .mam.env ----------------------------------------------------------------------------------------------------

ENV_FILES = [
    ("", {}),
    ("\n\n  \n# a comment\n   # another\n#A=1\n", {}),
    ("A=1", {"A": "1"}),
    ("A=1\r\nB=2\r\n", {"A": "1", "B": "2"}),
    ("\ufeffA=1\n", {"A": "1"}),
    ("export A=1\nexport\tB=2\n  export   C=3\n", {"A": "1", "B": "2", "C": "3"}),
    ("exported=1", {"exported": "1"}),
    ("  A  =  1  \n", {"A": "1"}),
    ("A=\nB=''\nC=\"\"\n", {"A": "", "B": "", "C": ""}),
    ("A='one two'\nB=\"three four\"", {"A": "one two", "B": "three four"}),
    ("A=' padded '", {"A": " padded "}),
    ("A='it is \"quoted\"'\nB=\"it's\"", {"A": 'it is "quoted"', "B": "it's"}),
    ("A='with # inside' # comment", {"A": "with # inside"}),
    ("A=value # comment\nB=value#none\nC=#none", {"A": "value", "B": "value#none", "C": "#none"}),
    ("A= # only a comment\nB=x", {"A": "", "B": "x"}),
    ("A=$HOME\nB=${A}\nC=`id`\nD=$(id)\nE=~\nF=\\n\nG=%A%\nH=\"$HOME\"",
     {"A": "$HOME", "B": "${A}", "C": "`id`", "D": "$(id)", "E": "~", "F": "\\n", "G": "%A%", "H": "$HOME"}),
    ("A=b=c==\n", {"A": "b=c=="}),
    ("A=one\nA=two\n", {"A": "two"}),
    ("_a1=x", {"_a1": "x"}),
    ("PASSWORD=p\u00e4ss\U0001f600", {"PASSWORD": "p\u00e4ss\U0001f600"}),
]


@pytest.mark.parametrize("text, values", ENV_FILES, ids=[repr(text)[:30] for text, _ in ENV_FILES])
def test_an_env_file_is_read_as_it_is_written(tmp_path: Path, text: str, values: Dict[str, str]) -> None:
    """Nothing is expanded: what a user writes is what the broker gets."""
    path = tmp_path / ".mam.env"
    path.write_bytes(text.encode("utf-8"))
    assert program.read_env_file(str(path)) == values


BAD_ENV_FILES = [
    (b"A=1\nnonsense hunter2\n", "line 2 is not KEY=value"),
    (b"hunter2", "line 1 is not KEY=value"),
    (b"=hunter2", "line 1 is not KEY=value"),
    (b"\n\n1A=hunter2", "line 3 is not KEY=value"),
    (b"A-B=hunter2", "line 1 is not KEY=value"),
    (b"A B=hunter2", "line 1 is not KEY=value"),
    (b"export", "line 1 is not KEY=value"),
    (b"export hunter2", "line 1 is not KEY=value"),
    ("\u00c4=hunter2".encode(), "line 1 is not KEY=value"),
    (b"A='hunter2", "line 1 has an unfinished quote"),
    (b'A="hunter2\n', "line 1 has an unfinished quote"),
    (b"A='hunter2' more", "line 1 has an unfinished quote"),
    (b"A=hun\0ter2", "line 1 has a NUL character"),
    (b"A='hun\0ter2'", "line 1 has a NUL character"),
    (b"A=ok\nB=\xff\xfehunter2", "not UTF-8 at byte 7"),
    ("A=hunter2".encode("utf-16"), "not UTF-8 at byte 0"),
]


@pytest.mark.parametrize("content, why", BAD_ENV_FILES, ids=[repr(content)[:30] for content, _ in BAD_ENV_FILES])
def test_a_bad_env_file_is_refused_by_its_line_and_never_quoted(mam: Mam, content: bytes, why: str) -> None:
    """Read half, it would send the work of a whole day to no broker; quoted, its password would be in a log."""
    path = mam.workspace / ".mam.env"
    path.write_bytes(content)
    result = mam("list", check=1)
    assert (result.stdout, result.stderr) == ("", f"ERROR: {path}: cannot read ({why})\n")
    answer = mam("list", "--json", check=1)
    assert answer.json()["error"]["message"] == f"ERROR: {path}: cannot read ({why})"
    assert "hunter2" not in answer.stdout + answer.stderr
    assert not mam.registry_dir.exists()


@pytest.mark.parametrize("words", [["list"], [], ["delegate", "--agent-session", "exec:x", "--exec", "true", "--prompt",
                                   "x"], ["publish", "--job", "j", "--event", "started"], ["register", "--prompt", "x"],
                                   ["watch", "j"], ["pick"]], ids=lambda words: " ".join(words[:1]) or "alone")
def test_every_command_refuses_an_env_file_it_cannot_read(mam: Mam, words: List[str]) -> None:
    path = mam.workspace / ".mam.env"
    path.mkdir()
    result = mam(*words, check=1)
    assert (result.stdout, result.stderr) == ("", f"ERROR: {path}: cannot read (Is a directory)\n")


def test_a_dangling_link_is_no_missing_file(mam: Mam) -> None:
    """Its target is on a disk that is not mounted: going on without it would go on without the broker."""
    path = mam.workspace / ".mam.env"
    path.symlink_to(mam.folder / "away")
    assert mam("list", check=1).stderr == f"ERROR: {path}: cannot read (No such file or directory)\n"


AS_NOBODY = """
import argparse, gettext, locale, os, re, sys
sys.path.insert(0, sys.argv[1])
import mam
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.exit(mam.main(["list"]))
"""


@pytest.mark.root
def test_an_unreadable_env_file_is_refused() -> None:
    """For an ordinary user: root can read everything, and Python's own files may be root's alone."""
    folder = short_folder("env-")
    folder.chmod(0o755)
    path = folder / ".mam.env"
    path.write_text("MQTT_PASSWORD=hunter2\n")
    path.chmod(0o600)
    done = subprocess.run([sys.executable, "-B", "-c", AS_NOBODY, str(ROOT)], cwd=str(folder), timeout=60,
                          env={"PATH": os.defpath, "HOME": "/nonexistent", "MAM_REAL_ROOT": str(folder)},
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == f"ERROR: {path}: cannot read (Permission denied)\n"


@settings(deadline=None, derandomize=True, database=None, max_examples=200,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "any.env"
    path.write_bytes(content)
    try:
        values = program.read_env_file(str(path))
    except program.EnvFileError as refusal:
        assert refusal.message.startswith(f"ERROR: {path}: cannot read (") and refusal.exit == 1
    else:
        assert all(key.isidentifier() and "\0" not in value and "\n" not in value for key, value in values.items())


@settings(deadline=None, derandomize=True, database=None, max_examples=200,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(min_codepoint=33, max_codepoint=0x2000, exclude_characters="'", exclude_categories=[
    "Cs", "Cc", "Zl", "Zp"]), max_size=40))
def test_any_password_in_quotes_arrives_unchanged(tmp_path: Path, password: str) -> None:
    path = tmp_path / "any.env"
    path.write_text(f"MQTT_PASSWORD='{password}'\n", encoding="utf-8")
    assert program.read_env_file(str(path)) == {"MQTT_PASSWORD": password}


# ---- which file, which folder --------------------------------------------------------------------------------------

def place(folder: Path, name: str) -> None:
    """An env file that says where it was found."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".mam.env").write_text(f"MQTT_BROKER={name}\nFROM={name}\n")


# (environment, where files lie, markers, which one is read)
SEARCH = [
    ({}, [], [], None),
    ({}, ["top/in/deep"], [], "top/in/deep"),
    ({}, ["top", "top/in/deep"], ["top/.git"], "top"),
    ({}, ["top", "top/in/deep"], ["top/.agents"], "top"),
    ({}, ["top", "top/in/deep"], ["top/.mam"], "top"),
    ({}, ["top", "top/in"], ["top/.git", "top/in/.mam"], "top/in"),
    ({}, ["top/in/deep"], ["top/.git"], "top/in/deep"),
    ({}, ["top/in"], ["top/.git"], None),
    ({"WORKSPACE_ROOT": "other"}, ["other", "top"], ["top/.git"], "other"),
    ({"MAM_REAL_ROOT": "real", "WORKSPACE_ROOT": "other"}, ["real", "other", "top"], ["top/.git"], "real"),
    ({"MAM_REAL_ROOT": "real", "WORKSPACE_ROOT": "other"}, ["other", "top"], ["top/.git"], "other"),
    ({"MAM_REAL_ROOT": "real"}, ["top"], ["top/.git"], "top"),
    ({"MAM_REAL_ROOT": "real"}, ["top/in/deep"], ["top/.git"], "top/in/deep"),
    ({"MAM_ENV_FILE": "x/.mam.env"}, ["x", "top"], ["top/.git"], "x"),
    ({"MAM_ENV_FILE": "missing"}, ["x", "top", "top/in/deep"], ["top/.git"], None),
    ({"MAM_ENV_FILE": "missing", "MAM_REAL_ROOT": "real"}, ["real"], [], None),
    ({"MAM_ENV_FILE": "", "MAM_REAL_ROOT": "real"}, ["real"], [], "real"),
]


@pytest.mark.parametrize("env, files, markers, read", SEARCH, ids=[f"{row[0]}-{row[1]}" for row in SEARCH])
def test_one_env_file_is_found_by_the_order_promised(host: Path, monkeypatch: pytest.MonkeyPatch, env: Dict[str, str],
                                                     files: List[str], markers: List[str], read: Optional[str]) -> None:
    """The wrong file is the wrong broker."""
    for name in files:
        place(host / name, name)
    for marker in markers:
        (host / marker).mkdir(parents=True)
    for name, value in env.items():
        monkeypatch.setenv(name, str(host / value) if value else "")
    found = program.load_settings()
    assert found.get("FROM") == (read or "")
    assert found.env_file == (str(host / read / ".mam.env") if read else None)


@pytest.mark.parametrize("env, markers, workspace, registry", [
    ({}, [], "top/in/deep", "top/in/deep/.mam"),
    ({}, ["top/.git"], "top", "top/.mam"),
    ({}, ["top/.git", "top/in/.agents"], "top/in", "top/in/.mam"),
    ({"WORKSPACE_ROOT": "other"}, ["top/.git"], "other", "other/.mam"),
    ({"MAM_REAL_ROOT": "real", "WORKSPACE_ROOT": "other"}, [], "real", "real/.mam"),
    ({"MAM_REGISTRY_DIR": "elsewhere/r"}, ["top/.git"], "top", "elsewhere/r"),
])
def test_workspace_and_registry_are_where_they_were_promised(
        host: Path, monkeypatch: pytest.MonkeyPatch, env: Dict[str, str], markers: List[str], workspace: str,
        registry: str) -> None:
    """A publisher that looks into another registry finds no job there, and its report is lost."""
    for marker in markers:
        (host / marker).mkdir(parents=True)
    for name, value in env.items():
        monkeypatch.setenv(name, str(host / value))
    found = program.load_settings()
    assert (found.workspace, found.registry_dir) == (str(host / workspace), str(host / registry))
    assert program.load_settings(str(host / "flag")).registry_dir == str(host / "flag")
    monkeypatch.chdir(host)
    assert program.load_settings("relative").registry_dir == str(host / "relative")


def test_the_environment_wins_over_the_file(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host / "top/in/deep/.mam.env").write_text("MQTT_BROKER=file\nMQTT_PORT=1999\nMQTT_PASSWORD=of-the-file\n")
    monkeypatch.setenv("MQTT_BROKER", "environment")
    broker = program.broker_settings(program.load_settings())
    assert (broker.host, broker.port, broker.password) == ("environment", 1999, "of-the-file")
    monkeypatch.setenv("MQTT_BROKER", "")       # set to nothing: no network for this command
    assert program.broker_settings(program.load_settings()) is None


def test_the_current_folder_may_be_gone(mam: Mam) -> None:
    gone = mam.folder / "gone"
    gone.mkdir()
    argv = mam.argv("list")
    done = subprocess.run(["/bin/sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *argv], cwd=str(gone), timeout=60,
                          env=mam.environment({"MAM_REAL_ROOT": str(mam.workspace)}), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout.decode(), done.stderr.decode()) == (0, "(no jobs)\n", "")


# ---- the broker ----------------------------------------------------------------------------------------------------

DEFAULTS = {"port": 1883, "tls": False, "username": "", "password": "", "ca_certs": "", "certfile": "", "keyfile": "",
            "client_id_prefix": "hermes", "keepalive_s": 60}
BROKERS = [
    ({}, {}),
    ({"MQTT_PORT": "1999"}, {"port": 1999}),
    ({"MQTT_TLS": "true"}, {"tls": True, "port": 8883}),
    ({"MQTT_TLS": "TRUE"}, {"tls": True, "port": 8883}),
    ({"MQTT_TLS": "1", "MQTT_PORT": "1883"}, {"tls": True, "port": 1883}),
    ({"MQTT_TLS": "false"}, {}), ({"MQTT_TLS": "0"}, {}), ({"MQTT_TLS": ""}, {}), ({"MQTT_PORT": ""}, {}),
    ({"MQTT_USERNAME": "u", "MQTT_PASSWORD": PASSWORD}, {"username": "u", "password": PASSWORD}),
    ({"MQTT_CA_CERTS": "/ca", "MQTT_CERTFILE": "/c", "MQTT_KEYFILE": "/k"},
     {"ca_certs": "/ca", "certfile": "/c", "keyfile": "/k"}),
    ({"MQTT_CLIENT_ID_PREFIX": "me", "MQTT_KEEPALIVE": "15"}, {"client_id_prefix": "me", "keepalive_s": 15}),
    ({"MQTT_PORT": "1"}, {"port": 1}), ({"MQTT_PORT": "65535"}, {"port": 65535}),
    ({"MQTT_KEEPALIVE": "65535"}, {"keepalive_s": 65535}),
]


@pytest.mark.parametrize("env, changes", BROKERS, ids=[str(env) for env, _ in BROKERS])
def test_the_variables_make_a_broker(env: Dict[str, str], changes: Dict[str, Any]) -> None:
    found = program.broker_settings(settings_of(MQTT_BROKER="b.example", **env))
    assert found._asdict() == {"host": "b.example", **DEFAULTS, **changes}


@pytest.mark.parametrize("env", [{}, {"MQTT_BROKER": ""}, {"MQTT_PORT": "1883", "MQTT_USERNAME": "u"},
                                 {"MQTT_PORT": "nonsense"}])
def test_no_broker_set_means_no_network(env: Dict[str, str]) -> None:
    """v4 sent the jobs of whoever had not configured it to a public sandbox."""
    assert program.broker_settings(settings_of(**env)) is None
    assert program.broker_block(settings_of(**env)) is None


BAD_BROKERS = [
    ("MQTT_PORT", value) for value in ("0", "65536", "-1", "1883x", "1e3", "18 83", "\u0661", "\u00b2", "0188399",
                                       "9" * 40, "9" * 5000, "+1883")] + [
    ("MQTT_KEEPALIVE", value) for value in ("0", "65536", "-5", "x", "1.5", "\u00b2", "9" * 5000)] + [
    ("MQTT_TLS", value) for value in ("maybe", "2", "tru", "none")] + [
    ("MQTT_BROKER", value) for value in ("a b", "a\tb", "a\x01b", " h")]


@pytest.mark.parametrize("name, value", BAD_BROKERS, ids=[f"{name}-{value[:9]!r}" for name, value in BAD_BROKERS])
def test_a_wrong_setting_is_named(name: str, value: str) -> None:
    """Name and value, not a traceback and not another broker."""
    settings_ = settings_of(**{"MQTT_BROKER": "b.example", "MQTT_PASSWORD": PASSWORD, name: value})
    with pytest.raises(program.MamError) as refusal:
        program.broker_settings(settings_)
    assert name in refusal.value.message and refusal.value.exit == 1 and PASSWORD not in refusal.value.message
    assert program.broker_block(settings_) is None


def test_a_jobs_own_broker_overrides_and_carries_no_password() -> None:
    env = settings_of(MQTT_BROKER="b.example", MQTT_PORT="1999", MQTT_TLS="true", MQTT_USERNAME="u",
                      MQTT_KEEPALIVE="15")
    found = program.broker_settings(env, {"host": "own.example", "port": 1884, "tls": False, "username": "v"})
    assert (found.host, found.port, found.tls, found.username) == ("own.example", 1884, False, "v")
    assert found.keepalive_s == 15
    block = program.broker_block(env)
    assert block == {"host": "b.example", "port": 1999, "tls": True, "username": "u"}
    assert set(block) == set(program.broker_block(env, {"host": "own.example", "port": 1, "tls": False}))


def test_credentials_go_only_to_the_broker_they_were_configured_for() -> None:
    """DESIGN 7: else whoever names a broker for one job collects the password of the usual one."""
    env = settings_of(MQTT_BROKER="b.example", MQTT_USERNAME="u", MQTT_PASSWORD=PASSWORD, MQTT_CERTFILE="/c",
                      MQTT_KEYFILE="/k")
    own = program.broker_settings(env, {"host": "own.example", "port": 1883, "tls": False})
    assert (own.password, own.username, own.certfile, own.keyfile) == ("", "", "", "")
    same = program.broker_settings(env, {"host": "b.example", "port": 1883, "tls": False})
    assert (same.password, same.username, same.certfile) == (PASSWORD, "u", "/c")
    only = settings_of(MQTT_PASSWORD=PASSWORD)  # no other broker is configured: it is for this one
    assert program.broker_settings(only, {"host": "own.example", "port": 1, "tls": False, "username": "v"}).password \
        == PASSWORD


FLAGS = [
    ("h", {"host": "h", "port": 1883, "tls": False}),
    ("broker.example:1884", {"host": "broker.example", "port": 1884, "tls": False}),
    ("mqtt://h", {"host": "h", "port": 1883, "tls": False}),
    ("mqtts://h", {"host": "h", "port": 8883, "tls": True}),
    ("mqtts://h:1", {"host": "h", "port": 1, "tls": True}),
    ("u@h", {"host": "h", "port": 1883, "tls": False, "username": "u"}),
    ("mqtts://u@example.org@h:2", {"host": "h", "port": 2, "tls": True, "username": "u@example.org"}),
    ("[::1]", {"host": "::1", "port": 1883, "tls": False}),
    ("::1", {"host": "::1", "port": 1883, "tls": False}),
    ("[::1]:1884", {"host": "::1", "port": 1884, "tls": False}),
    ("mqtt://u@[fe80::1]:1884", {"host": "fe80::1", "port": 1884, "tls": False, "username": "u"}),
]


@pytest.mark.parametrize("text, block", FLAGS, ids=[text for text, _ in FLAGS])
def test_the_broker_flag_is_understood(text: str, block: Dict[str, Any]) -> None:
    assert program.parse_broker_flag(text) == block


BAD_FLAGS = [("", 64), ("mqtt://", 64), ("http://h", 64), ("://h", 64), ("h h", 64), ("h/x", 64), ("mqtt://h/", 64),
             ("u@", 64), ("h:", None), ("h:x", None), ("h:0", None), ("h:65536", None), ("h:-1", None), (":1883", None)]


@pytest.mark.parametrize("text, code", BAD_FLAGS, ids=[text or "empty" for text, _ in BAD_FLAGS])
def test_a_broker_flag_that_makes_no_sense_is_refused(text: str, code: Optional[int]) -> None:
    with pytest.raises(program.MamError) as refusal:
        program.parse_broker_flag(text)
    assert refusal.value.exit in ((code,) if code else (1, 64)) and "--broker" in refusal.value.message


@pytest.mark.parametrize("text", ["u:%s@h", "mqtt://u:%s@h:1883", "mqtts://:%s@h", "u:%s@h h", "u:%s@", "http://u:%s@h",
                                  "u:@%s@h"])
def test_a_password_on_the_command_line_is_refused_and_not_repeated(text: str) -> None:
    """Every user of the host can read an argument; the refusal must not put it into a log as well."""
    with pytest.raises(program.MamError) as refusal:
        program.parse_broker_flag(text % PASSWORD)
    assert refusal.value.exit == 64
    assert PASSWORD not in refusal.value.message + refusal.value.hint


def test_the_refused_password_is_nowhere_and_no_job_was_made(mam: Mam) -> None:
    result = mam("register", "--prompt", "x", "--broker", f"mqtt://u:{PASSWORD}@h", check=64)
    assert PASSWORD not in result.stdout + result.stderr and "MQTT_PASSWORD" in result.stderr
    assert mam("list", check=0).stdout == "(no jobs)\n"


@pytest.mark.parametrize("root, good", [
    ("python/mqtt/jobs", True), ("a", True), ("a/b-c/D_9", True), ("", True), ("/a", False), ("a/", False),
    ("a//b", False), ("a/+/b", False), ("#", False), ("a/#", False), ("$SYS/a", False), ("a b", False),
    ("a.b", False), ("\u00e9", False), ("a\n", False), ("a/*", False), ("x" * 65, False),
])
def test_the_topic_root_is_one_that_every_broker_takes(root: str, good: bool) -> None:
    """NATS makes a subject of it, where `.`, `*` and `>` mean something; a wildcard would subscribe to everything."""
    settings_ = settings_of(MAM_TOPIC_ROOT=root)
    if good:
        assert program.topic_root(settings_) == (root or "python/mqtt/jobs")
        return
    with pytest.raises(program.MamError) as refusal:
        program.topic_root(settings_)
    assert "MAM_TOPIC_ROOT" in refusal.value.message and refusal.value.exit == 1


def test_the_topic_root_is_where_a_job_is_followed(mam: Mam) -> None:
    job = mam("register", "--prompt", "x", env={"MAM_TOPIC_ROOT": "acme/jobs"}, check=0).stdout.strip()
    assert mam.job(job)["topic_prefix"] == f"acme/jobs/{job}"
    assert mam("register", "--prompt", "x", env={"MAM_TOPIC_ROOT": "acme/#"}, check=1).stderr.startswith("mam: ")


@pytest.mark.parametrize("text, value", [("5", 5), ("0.5", 0.5), ("1e3", 1000), (" 7 ", 7), ("315360000", 315360000)])
def test_seconds_are_read(text: str, value: float) -> None:
    found = program.parse_seconds(text, "MAM_X")
    assert found == value and type(found) is type(value)
    assert settings_of(MAM_X=text).seconds("MAM_X", 99) == value
    assert settings_of().seconds("MAM_X", 99) == 99


@pytest.mark.parametrize("text", ["0", "-1", "x", "nan", "inf", "-inf", "1e99", "5s", "1,5", "0x10", "9" * 5000])
def test_seconds_that_are_none_are_named(text: str) -> None:
    """A job whose deadline is not a number would wait for ever."""
    with pytest.raises(program.MamError) as refusal:
        settings_of(MAM_X=text).seconds("MAM_X", 99)
    assert "MAM_X" in refusal.value.message and refusal.value.exit == 1


@pytest.mark.parametrize("value", ["x", "\u00b2", "-1", "1.5", "9" * 30])
def test_an_attempt_that_is_no_number_is_named(mam: Mam, value: str) -> None:
    """A worker whose environment was mangled must hear of it, and not of an internal error."""
    job = mam("register", "--prompt", "x", check=0).stdout.strip()
    result = mam("publish", "--job", job, "--event", "started", env={"MAM_ATTEMPT_ID": value}, check=(1, 4))
    assert result.code == 4 and value == "9" * 30 or "MAM_ATTEMPT_ID" in result.stderr
    assert mam.job(job)["status"] == "pending"


# ---- what is secret --------------------------------------------------------------------------------------------------

SECRET_NAMES = ["MQTT_PASSWORD", "DB_PASSWD", "MAM_DISPATCH_SECRET", "MAM_DISPATCH_SECRET_PREVIOUS", "GITHUB_TOKEN",
                "OPENAI_API_KEY", "ANTHROPIC_APIKEY", "AWS_SECRET_ACCESS_KEY", "SSH_PRIVATE_KEY", "MY_CREDENTIALS",
                "KEY_PASSPHRASE", "mqtt_password", "client_secret"]
SECRET_VALUES = ["correct-horse", "a/b/c/d/e", "with space in it", "p\u00e4ssw\u00f6rt"]


@pytest.mark.parametrize("value", SECRET_VALUES)
@pytest.mark.parametrize("name", SECRET_NAMES)
def test_what_looks_secret_is_taken_out_of_every_detail(name: str, value: str) -> None:
    settings_ = settings_of(**{name: value, "PATH": "/usr/bin"})
    assert settings_.secrets == [value]
    assert value not in settings_.generalise(f"failed with {value}: denied")


@pytest.mark.parametrize("name", ["MQTT_PASSWORD", "AWS_SECRET_ACCESS_KEY"])
def test_a_secret_may_begin_with_a_slash(name: str) -> None:
    """One key in sixty-four that was made at random does, in base64; it is no path for that."""
    settings_ = settings_of(**{name: "/Zx8+pQ2rT5vW=="})
    assert settings_.secrets == ["/Zx8+pQ2rT5vW=="]
    assert "Zx8" not in settings_.generalise("failed with /Zx8+pQ2rT5vW==: denied")


@pytest.mark.parametrize("name, value", [
    ("PATH", "/usr/local/bin"), ("MAX_TOKENS", "1000000"), ("LANG", "en_US.UTF-8"), ("MQTT_USERNAME", "production"),
    ("MQTT_PASSWORD", ""), ("MQTT_PASSWORD", "ok"), ("KEYBOARD", "qwertz-de"), ("AUTHOR", "somebody"),
    ("SECRET_FILE", "/etc/hosts"),
])
def test_what_is_not_secret_stays_readable(name: str, value: str) -> None:
    """A report in which every third word is *** is no report."""
    assert settings_of(**{name: value}).secrets == []


def test_the_longest_secret_goes_first() -> None:
    """Else the rest of a longer one that contains it would stay."""
    settings_ = settings_of(A_TOKEN="abcdef", B_TOKEN="abcdef-and-more", C_SECRET="xabcdef")
    assert settings_.secrets[0] == "abcdef-and-more" and settings_.secrets[-1] == "abcdef"
    assert settings_.generalise("abcdef-and-more xabcdef abcdef") == "*** *** ***"


@pytest.mark.parametrize("host, warned", [(host, True) for host in sorted(program.PUBLIC_BROKERS)] + [
    ("BROKER.HiveMQ.com", True), ("test.mosquitto.org.", True), ("mqtt.example.org", False), ("localhost", False),
    ("127.0.0.1", False), ("my-broker.hivemq.com.internal", False)])
def test_a_public_sandbox_is_never_used_in_silence(host: str, warned: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Anybody can read there what is being worked on, and publish to it."""
    program.warn_public_broker(program.broker_settings(settings_of(MQTT_BROKER=host)))
    out, err = capsys.readouterr()
    assert out == "" and ("WARNING" in err and "PUBLIC" in err and host in err if warned else err == "")
    program.warn_public_broker(None)
    assert capsys.readouterr() == ("", "")


def test_the_work_does_not_get_what_it_must_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that holds the dispatch secret could forge events of every job; the outer agent's marks confuse it."""
    for name in ("SHIV_ROOT", "SHIV_ENTRY_POINT", "MAM_DISPATCH_SECRET", "MAM_DISPATCH_SECRET_PREVIOUS", "CLAUDECODE",
                 "OPENCODE", "CODEX_THREAD_ID"):
        monkeypatch.setenv(name, "value")
    monkeypatch.setenv("MY_OWN", "kept")
    found = program.environment_of_work(settings_of(), {"MAM_JOB_ID": "j"})
    assert found["MY_OWN"] == "kept" and found["MAM_JOB_ID"] == "j" and "PATH" in found
    assert not [name for name in found if name.startswith(("SHIV_", "MAM_DISPATCH_SECRET"))]
    assert not set(found) & set(program.AGENT_VARIABLES)


# ---- where a password goes -------------------------------------------------------------------------------------------

def holders(folder: Path, secret: bytes) -> List[str]:
    return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.is_symlink() and secret in path.read_bytes()]


def command_lines(pids: List[int]) -> bytes:
    found = b""
    for pid in pids:
        try:
            found += Path("/proc", str(pid), "cmdline").read_bytes() + b"\n"
        except OSError:
            continue                            # gone meanwhile
    return found


@pytest.mark.parametrize("source", ["environment", "file"])
def test_no_password_is_in_a_record_a_log_an_argument_or_an_answer(mam: Mam, source: str) -> None:
    """An agent that quotes its environment, a broker that is down, every way to look at a job: it is nowhere."""
    secrets = {"MQTT_PASSWORD": PASSWORD, "X_API_KEY": "sk-0123456789ab",
               "MAM_DISPATCH_SECRET": "s3cr3t-of-the-dispatch"}
    values = {"MQTT_BROKER": "127.0.0.1", "MQTT_PORT": str(free_port()), "MQTT_USERNAME": "worker", **secrets}
    if source == "environment":
        mam.env.update(values)
    else:
        (mam.workspace / ".mam.env").write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    # The dispatch secret is not even given to an agent, nor is a password that only the environment holds.
    quoted = f"{PASSWORD if source == 'file' else 'no'} sk-0123456789ab"
    facts = '{"said": "%s", "list": ["%s"], "%s": 1}' % (quoted, quoted, quoted.split()[0])
    go = mam.folder / "go"
    work = mam.stub("work", "#!/bin/sh\n"
                    f"echo 'used {quoted}' | $MAM_PUBLISH_CMD --event progress --attempts 1 --detail-file -\n"
                    f"while [ ! -e {go} ]; do sleep 0.05; done\n"
                    # From here on the arguments are the agent's own.
                    f"$MAM_PUBLISH_CMD --event error --attempts 1 --detail 'no luck with {quoted}' --data '{facts}'\n")
    run = mam.popen("delegate", "--agent-session", "exec:demo", "--exec", str(work), "--prompt", "go", "--job-id", "j1",
                    "--validate", "true", env={"MAM_LINGER_S": "0.2"})
    run.wait_for("progress")
    arguments = command_lines(mam.processes())
    go.write_text("")
    ended = run.wait(60)
    assert ended.code == 1 and b"_run" in arguments
    answers = [ended.stdout, ended.stderr]
    for words in (["get", "j1", "--show-secrets"], ["list", "--json"], ["list"], ["logs", "j1", "--json"],
                  ["logs", "j1"], [], ["--json"], ["get-feedback", "--job", "j1"],
                  ["watch", "j1", "--json"], ["wait", "j1", "--json"],
                  ["logs", "j1", "--output"]):
        result = mam(*words)
        answers += [result.stdout, result.stderr]
    mam("daemon", "stop", check=0)         # it would go on trying to reach the broker
    poll(lambda: not mam.processes(), 60, "the end of every process")
    assert "no luck with" in "".join(answers) and "***" in "".join(answers)
    for secret in secrets.values():
        assert secret not in "".join(answers)
        assert secret.encode() not in arguments
        assert holders(mam.registry_dir, secret.encode()) == []

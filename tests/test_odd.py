"""Odd surroundings: what stands in the way where a file was expected, and what must not come of it."""
from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, Dict, List

import pytest
from support import pause, poll, resume
from support.cli import Mam


def delegate(mam: Mam, command: str, *args: object, **options: Any) -> Any:
    return mam("delegate", "--agent-session", "exec:x", "--exec", command, "--prompt", "p", *args, **options)


def test_a_job_that_could_not_be_handed_over_does_not_run_later(mam: Mam) -> None:
    """Lost: one run of two: whoever is told that it failed does it again."""
    mam("register", "--prompt", "x", check=0)
    (mam.registry_dir / "briefs").write_text("in the way")
    result = delegate(mam, "echo ran >> ran", "--job-id", "J", check=1)
    assert "job J is closed" in result.stderr
    (mam.registry_dir / "briefs").unlink()
    mam(check=0)
    assert mam("wait", "J", "--timeout", 5, check=1).stdout == "J error (spawn_failed)\n"
    assert not (mam.workspace / "ran").exists()


def test_a_new_registry_is_not_filled_from_an_old_ones_wal(mam: Mam) -> None:
    """Lost: the new registry, corrupted by what lay beside the one that was moved away."""
    mam.without_daemon()
    mam("register", "--prompt", "old", "--job-id", "old", check=0)
    for name in ("mam.db-wal", "mam.db-shm"):
        (mam.registry_dir / name).write_bytes(os.urandom(65536))
    (mam.registry_dir / "mam.db").unlink()
    mam("register", "--prompt", "new", "--job-id", "new", check=0)
    assert [record["job_id"] for record in mam("list", "--json", check=0).json()] == ["new"]


@pytest.mark.parametrize("make", ["mkfifo out", "ln -s /dev/zero out"])
def test_what_is_no_file_is_no_artifact(mam: Mam, make: str) -> None:
    """Lost: the end of the job: a FIFO is never read to its end, nor is a device."""
    result = delegate(mam, make, "--artifact", "out", timeout=30)
    assert result.code == 1 and "missing artifact: out" in result.stdout


@pytest.mark.parametrize("value", ["-1", "soon", "nan"])
def test_nonsense_for_a_pause_is_refused_before_and_harmless_later(mam: Mam, value: str) -> None:
    """Lost: finished work, to a variable that is read only at its end."""
    for name in ("MAM_TERM_GRACE_S", "MAM_LINGER_S"):
        assert name in delegate(mam, "true", env={name: value}, check=1).stderr
    (mam.workspace / ".mam.env").write_text("")
    go = mam.workspace / "go"
    run = mam.popen("delegate", "--agent-session", "exec:x", "--exec",
                    "while [ ! -e go ]; do sleep 0.02; done; echo fine", "--prompt", "p")
    run.wait_for(" started ")
    (mam.workspace / ".mam.env").write_text(f"MAM_TERM_GRACE_S={value}\nMAM_LINGER_S={value}\n")
    go.write_text("")
    assert run.wait(20).code == 0 and "completed" in run.stdout


@pytest.mark.parametrize("host", ["mqtt://u:sekrit123@h", "u:sekrit123@h", "h/x"])
def test_a_url_is_no_broker_and_its_password_is_not_repeated(mam: Mam, host: str) -> None:
    """Lost: a password, into the registry and onto the screen."""
    result = delegate(mam, "true", env={"MQTT_BROKER": host}, check=1)
    assert "not a host name" in result.stderr and "sekrit123" not in result.stderr + result.stdout
    assert not mam.registry_dir.exists()


def test_a_device_or_a_fifo_is_no_env_file(mam: Mam) -> None:
    """Lost: every command, waiting for a writer, or filling the memory."""
    fifo = mam.workspace / ".mam.env"
    os.mkfifo(fifo)
    for env in ({}, {"MAM_ENV_FILE": "/dev/zero"}):
        result = mam("list", env=dict(env), check=1, timeout=20)
        assert result.stderr.startswith("ERROR: ") and "cannot read (not a regular file)" in result.stderr


def test_a_log_that_cannot_be_written_stops_nothing(mam: Mam) -> None:
    """Lost: all work, to a FIFO where daemon.log should be."""
    mam("register", "--prompt", "x", check=0)
    os.mkfifo(mam.registry_dir / "daemon.log")
    assert delegate(mam, "echo fine", check=0, timeout=30).stdout.endswith("fine\n")
    (mam.registry_dir / "daemon.log").unlink()


def identity(mam: Mam, job: str) -> Dict[str, Any]:
    import sqlite3
    if not (mam.registry_dir / "mam.db").exists():
        return {}
    with sqlite3.connect(mam.registry_dir / "mam.db", timeout=10) as db:
        text = db.execute("SELECT run FROM attempts WHERE job_id = ? AND run IS NOT NULL", (job,)).fetchone()
    return json.loads(text[0]) if text else {}


def group_lives(group: int) -> bool:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[2] == str(group) and fields[0] not in "ZX":
                return True
    return False


def test_a_command_ends_with_its_job_also_when_its_keeper_stands_still(mam: Mam) -> None:
    """Lost: the machine, to work that goes on after its job was closed, unseen."""
    mam.env["MAM_TERM_GRACE_S"] = "1"
    mam.popen("delegate", "--agent-session", "exec:x", "--exec", "exec sleep 300", "--prompt", "p", "--job-id", "J",
              "--timeout", 2)
    run = poll(lambda: "group" in identity(mam, "J") and identity(mam, "J"), 20, "the command")
    poll(lambda: mam.job("J")["status"] == "running", 20, "started")
    pause(run["supervisor"]["pid"])
    try:
        mam.wait_job("J", "error", 20)
        poll(lambda: not group_lives(run["group"]), 20, "the end of the command")
    finally:
        resume(run["supervisor"]["pid"])


def test_the_wall_clock_holds_when_the_registry_is_gone(mam: Mam) -> None:
    """Lost: the only limit that is left when nobody can reach the command any more."""
    mam.env["MAM_TERM_GRACE_S"] = "1"
    mam.popen("delegate", "--agent-session", "exec:x", "--exec", "exec sleep 300", "--prompt", "p", "--job-id", "J",
              "--timeout", 3)
    run = poll(lambda: "group" in identity(mam, "J") and identity(mam, "J"), 20, "the command")
    mam.registry_dir.rename(mam.folder / "gone")
    poll(lambda: not group_lives(run["group"]), 20, "the end of the command")


@pytest.mark.parametrize("command", [
    "python3 -c 'import os; print(\"y\" * 993 + os.environ[\"MY_TOKEN\"])'",
    "python3 -c 'import os; print(os.environ[\"MY_TOKEN\"] + \"z\" * 65530)'"])
def test_half_a_secret_is_none_to_send(mam: Mam, command: str) -> None:
    """Lost: a secret, to a cut through its middle."""
    result = delegate(mam, command, env={"MY_TOKEN": "hunter2secret"}, check=0)
    assert "hunter2" not in result.stdout and "2secret" not in result.stdout


def test_a_pick_that_nobody_reads_gives_the_job_back(mam: Mam) -> None:
    """Lost: the job: claimed, and no agent knows that it has it."""
    mam("register", "--prompt", "x", "--agent-session", "queue:q", "--job-id", "J", check=0)
    read, write = os.pipe()
    os.close(read)
    import subprocess
    done = subprocess.run(mam.argv("pick", "--agent-session", "queue:q"), stdout=write, stderr=subprocess.PIPE,
                          env=mam.environment(), cwd=str(mam.workspace), timeout=30)
    os.close(write)
    assert done.returncode == 141 and b"Traceback" not in done.stderr
    assert mam("pick", "--agent-session", "queue:q", check=0).stdout == "J\n"


def test_tmux_into_the_pane_one_sits_in_is_refused(mam: Mam, tmux: Any) -> None:
    """Lost: whatever a shell does when it executes a brief."""
    pane = tmux.new_pane("sh", name="user")
    words: List[str] = ["env", *[f"{name}={value}" for name, value in mam.environment().items() if name != "TERM"],
                        *mam.argv("delegate", "--agent-session", "tmux:user", "--prompt", "p"), ">", "out", "2>&1"]
    import shlex
    line = " ".join(word if word in (">", "2>&1") else shlex.quote(word) for word in words)
    script = mam.folder / "line.sh"
    script.write_text(f"cd {shlex.quote(str(mam.workspace))}; {line}; echo $? > code\n")
    tmux.type(pane, f". {script}")
    poll(lambda: (mam.workspace / "code").exists() and (mam.workspace / "code").read_text().strip(), 20, "its end")
    assert (mam.workspace / "code").read_text().strip() == "5"
    assert "the pane in which this command runs" in (mam.workspace / "out").read_text()
    assert not mam.registry_dir.exists()


def test_sigterm_ends_a_daemon_in_good_order(mam: Mam) -> None:
    mam("register", "--prompt", "x", "--agent-session", "queue:q", "--job-id", "J", check=0)
    mam("pick", "--agent-session", "queue:q", check=0)
    info = poll(lambda: mam("daemon", "status", "--json").code == 0 and mam("daemon", "status", "--json").json(), 20,
                "a daemon")
    os.kill(info["process"]["pid"], signal.SIGTERM)
    poll(lambda: mam("daemon", "status").code == 1, 20, "no daemon")

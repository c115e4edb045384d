"""The registry: one file that many processes share, that may be killed, starved or deleted at any moment.

Each test names a promise; where it fails, a user loses a job, an event, a secret, or an explanation.
"""
from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

from support import poll, process_table, short_folder
from support.cli import Background, Mam, Result
from support.inside import Inside, as_nobody, new_job, rows, run_git

OURS = ("mam.db", "mam.db-wal", "mam.db-shm")
NOT_RECORDED = 75


@pytest.fixture
def inside(pyz: Path, session_folder: Path) -> Inside:
    return Inside(pyz, session_folder)


@pytest.fixture
def public_host(pyz: Path, session_folder: Path) -> Iterator[Mam]:
    """A host in a folder that every user can reach; the folders of the test run belong to one user alone."""
    folder = short_folder("mam-")
    folder.chmod(0o755)
    host = Mam(pyz, folder / "host", session_folder / "shiv")
    for path in (folder / "host", host.workspace, host.home):
        path.chmod(0o755)
    yield host
    host.close()


def register(host: Mam, *args: object) -> str:
    return host("register", "--prompt", "work", "--agent-session", "queue:q", *args, check=0).stdout.strip()


def publish(host: Mam, job_id: str, event: str, *args: object, **options: Any) -> Result:
    return host("publish", "--job", job_id, "--event", event, *args, **options)


def numbers(host: Mam, job_id: str) -> List[int]:
    return [line["seq"] for line in host.events(job_id) if line["seq"] is not None]


def modes(folder: Path) -> Dict[str, str]:
    """Everything in a folder that anybody but its owner may touch."""
    found = [folder, *folder.rglob("*")]
    return {str(path.relative_to(folder)): oct(path.stat().st_mode & 0o777) for path in found
            if path.stat().st_mode & 0o077}


# ---- creation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", range(3))
def test_64_first_jobs_at_once_are_all_kept(mam: Mam, inside: Inside, turn: int) -> None:
    """A burst of delegations in a fresh workspace must not lose one, nor end in "database is locked"."""
    order = ["register", "--prompt", "work", "--agent-session", "queue:q"]
    results = inside.crowd(mam, [order] * 64)
    assert [result for result in results if result.code != 0] == []
    made = sorted(result.stdout.strip() for result in results)
    assert sorted(job["job_id"] for job in mam("list", "--json", check=0).json()) == made and len(set(made)) == 64
    assert not [name for name in os.listdir(mam.registry_dir) if name.startswith("mam.db.new")]


def test_of_16_jobs_of_one_name_one_is_registered(mam: Mam, inside: Inside) -> None:
    """The losers are told; the winner's prompt is not overwritten."""
    results = inside.crowd(mam, [["register", "--job-id", "same", "--prompt", f"prompt {number}", "--agent-session",
                                  "queue:q"] for number in range(16)])
    winners = [result for result in results if result.code == 0]
    assert len(winners) == 1 and mam.job("same")["prompt"] == winners[0].args[4]
    assert all(result.code == 1 and "already exists" in result.stderr for result in results if result not in winners)


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_nobody_else_can_read_jobs_tokens_and_output(mam: Mam, inside: Inside, umask: int) -> None:
    """Under any umask everything in .mam is for its owner alone, while it is in use as well."""
    host = inside.patched(mam, f"os.umask({umask})")
    job = register(host)
    run = host.popen("delegate", "--agent-session", "exec:e", "--prompt", "p", "--exec", "echo out; read x < go",
                     "--validate", "echo checked")
    os.mkfifo(mam.workspace / "go")
    run.wait_for("started")
    publish(host, job, "progress", check=0)
    assert {"mam.db", "mam.db-wal", "mam.db-shm", ".gitignore", "output"} <= set(os.listdir(mam.registry_dir))
    assert modes(mam.registry_dir) == {}
    assert oct(mam.registry_dir.stat().st_mode & 0o777) == "0o700"
    assert [oct((mam.registry_dir / name).stat().st_mode & 0o777) for name in OURS] == ["0o600"] * 3
    (mam.workspace / "go").write_text("\n")
    assert run.wait().code == 0
    assert modes(mam.registry_dir) == {}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_clean_and_git_add_pass_the_registry_by(mam: Mam) -> None:
    """`git clean -fd` must not delete running jobs, `git add .` must not commit their tokens."""
    shutil.rmtree(mam.workspace / ".git")
    run_git("init", "-q", ".", cwd=mam.workspace)
    job = register(mam)
    (mam.workspace / "litter").write_text("x")
    run_git("clean", "-fdq", cwd=mam.workspace)
    run_git("add", "--all", ".", cwd=mam.workspace)
    assert not (mam.workspace / "litter").exists()
    assert run_git("status", "--porcelain", cwd=mam.workspace) == ""
    assert mam.job(job)["status"] == "pending"


def test_a_gitignore_of_the_users_own_is_left_alone(mam: Mam) -> None:
    mam.registry_dir.mkdir()
    (mam.registry_dir / ".gitignore").write_text("# mine\n")
    register(mam)
    assert (mam.registry_dir / ".gitignore").read_text() == "# mine\n"


_KILLED_CREATION = """
import itertools, json, signal, sqlite3, stat
base = sys.argv[1]
job = json.loads(sys.argv[2])
points = 0
for point in itertools.count(int(sys.argv[3]), 6):
    directory = os.path.join(base, "w%d" % point, ".mam")
    pid = os.fork()
    if pid == 0:
        seen = [-1]
        def count(frame, event, arg):
            if seen[0] < 0 and frame.f_code.co_name == "_create":
                seen[0] = 0
            if seen[0] >= 0:
                seen[0] += 1
                if seen[0] == point:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.setprofile(count)
        mam.Registry(directory, create=True)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.path.exists(os.path.join(directory, "mam.db")):
        mam.Registry(directory).close()          # whole, or not there
    with mam.Registry(directory, create=True) as registry:
        registry.register(job)
        assert registry._execute("PRAGMA journal_mode") == [("wal",)], point
        assert registry._execute("SELECT count(*) FROM meta WHERE key = 'registry_id'") == [(1,)], point
    for name in os.listdir(directory):
        if not name.endswith(".tmp"):
            assert not os.stat(os.path.join(directory, name)).st_mode & 0o077, (point, name)
    assert not [name for name in os.listdir(directory) if name.startswith("mam.db.new")], point
    if os.WIFEXITED(status):
        break
    points += 1
print(points)
"""


@pytest.mark.parametrize("first", [1, 4])
def test_killed_at_any_point_of_creation_the_next_one_works(mam: Mam, inside: Inside, first: int,
                                                            tmp_path: Path) -> None:
    """A first command that is killed must leave nothing that stops the second, and no half-made registry."""
    points = int(inside.run(mam, _KILLED_CREATION, tmp_path, json.dumps(new_job("j1")), first))
    assert points > 10


@pytest.mark.root
def test_what_root_makes_belongs_to_the_owner_of_the_folder(public_host: Mam, inside: Inside) -> None:
    """After one `sudo mam` the user must still be able to use the registry."""
    mam = public_host
    os.chown(mam.workspace, 65534, 65534)
    job = register(mam)
    mam("delegate", "--agent-session", "exec:e", "--prompt", "p", "--exec", "true", "--validate", "true", check=0)
    env: Dict[str, Any] = {"MQTT_BROKER": "127.0.0.1", "MQTT_PORT": "1"}
    mam.env.update(env)
    publish(mam, register(mam), "started", "--attempts", 1, check=2)
    mam.env.clear()
    foreign = [str(path) for path in [mam.registry_dir, *mam.registry_dir.rglob("*")] if path.stat().st_uid != 65534]
    assert foreign == []
    user = inside.patched(mam, as_nobody())
    publish(user, job, "completed", check=0)
    with inside.registry(mam):          # root has it open: -wal and -shm are made anew
        publish(mam, register(mam), "started", check=0)
        publish(user, register(user), "started", check=0)


# ---- refused: said in one sentence, and nothing touched ----------------------------------------------------


@pytest.mark.parametrize("path, mounts, kind", [
    ("/home/u/w/.mam", "/dev/sda / ext4 rw 0 0\nsrv:/h /home nfs4 rw 0 0", "nfs4"),
    ("/home/u/w/.mam", "srv:/h /home nfs rw 0 0\n/dev/sdb /home/u ext4 rw 0 0", "ext4"),
    ("/home/u/w/.mam", "/dev/sdb /home/u ext4 rw 0 0\nsrv:/h /home nfs rw 0 0", "ext4"),
    ("/home2/w/.mam", "/dev/sda / ext4 rw 0 0\nsrv:/h /home nfs rw 0 0", "ext4"),
    ("/mnt/a b/.mam", "/dev/sda / ext4 rw 0 0\n//srv/x /mnt/a\\040b cifs rw 0 0", "cifs"),
    ("/mnt/t\tt/.mam", "/dev/sda / ext4 rw 0 0\nx /mnt/t\\011t fuse.sshfs rw 0 0", "fuse.sshfs"),
    ("/mnt/b\\s/.mam", "/dev/sda / ext4 rw 0 0\nx /mnt/b\\134s virtiofs rw 0 0", "virtiofs"),
    ("/mnt/c/w/.mam", "/dev/sda / ext4 rw 0 0\nC:\\134 /mnt/c 9p rw 0 0", "9p"),
    ("/mnt/c", "x /mnt/c drvfs rw 0 0", "drvfs"),
    ("/w/.mam", "/dev/sda /w ext4 rw 0 0\nsrv:/w /w nfs4 rw 0 0", "nfs4"),       # the later mount hides the earlier
    ("/w/.mam", "srv:/ / nfs4 rw 0 0", "nfs4"),
    ("/w/.mam", "short line\n\n/dev/sda / ext4 rw 0 0", "ext4"),
    ("/w/.mam", "", ""),
])
def test_the_file_system_under_a_path_is_known(inside: Inside, path: str, mounts: str, kind: str) -> None:
    """A wrong answer means lost commits on a network share, or a local disk refused."""
    assert inside.module.file_system_type(path, mounts) == kind


@pytest.mark.parametrize("kind", ["nfs4", "9p", "fuse.sshfs"])
def test_a_network_file_system_is_refused_with_the_way_out(mam: Mam, inside: Inside, kind: str) -> None:
    """SQLite loses commits there; the user has to learn it before the first job, and what to do."""
    there = inside.patched(mam, f"mam._read_mounts = lambda: 'x / ext4 rw 0 0\\nx {mam.workspace} {kind} rw 0 0\\n'")
    result = there("register", "--prompt", "p", "--agent-session", "queue:q", check=1)
    assert kind in result.stderr and "--registry-dir" in result.stderr and result.stderr.startswith("mam: ")
    assert not mam.registry_dir.exists()
    elsewhere = mam.folder / "local"
    there("register", "--prompt", "p", "--agent-session", "queue:q", "--registry-dir", elsewhere, check=0)


def test_a_link_to_a_network_file_system_is_seen_through(mam: Mam, inside: Inside) -> None:
    share = mam.folder / "share"
    share.mkdir()
    mam.registry_dir.symlink_to(share)
    there = inside.patched(mam, f"mam._read_mounts = lambda: 'x / ext4 rw 0 0\\nx {share} nfs4 rw 0 0\\n'")
    assert "nfs4" in there("register", "--prompt", "p", "--agent-session", "queue:q", check=1).stderr


def _garbage_header(data: bytes) -> bytes:
    return bytes(200) + data[200:]


def _garbage_pages(data: bytes) -> bytes:
    return data[:4096] + b"\xa5" * (len(data) - 4096)


def _newer(path: Path) -> None:
    database = sqlite3.connect(str(path))
    database.execute("PRAGMA user_version=99")
    database.close()


def _other_database(path: Path) -> None:
    path.unlink()
    database = sqlite3.connect(str(path))
    database.execute("CREATE TABLE jobs(job_id)")
    database.commit()
    database.close()


def _claims_to_be_ours(path: Path) -> None:
    _other_database(path)
    database = sqlite3.connect(str(path))
    database.execute("PRAGMA user_version=1")
    database.close()


DAMAGES: Dict[str, Tuple[Callable[[Path], object], str]] = {
    "text": (lambda path: path.write_text("these are not the jobs\n" * 400), "corrupt"),
    "short text": (lambda path: path.write_text("no\n"), "corrupt"),
    "garbage header": (lambda path: path.write_bytes(_garbage_header(path.read_bytes())), "corrupt"),
    "garbage pages": (lambda path: path.write_bytes(_garbage_pages(path.read_bytes())), "corrupt"),
    "truncated within the header": (lambda path: os.truncate(path, 50), "not a registry of mam"),
    "truncated to one page": (lambda path: os.truncate(path, 4096), "corrupt"),
    "truncated in a page": (lambda path: os.truncate(path, 30000), "corrupt"),
    "newer": (_newer, "newer mam"),
    "another program's database": (_other_database, "not a registry of mam"),
    "another program's database, version 1": (_claims_to_be_ours, "corrupt"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_file_that_is_no_registry_is_named_and_left_as_it_is(mam: Mam, damage: str) -> None:
    """No traceback, no "internal error", no advice to retry for ever, and the evidence is not overwritten."""
    job = register(mam)
    publish(mam, job, "started", check=0)
    database = mam.registry_dir / "mam.db"
    work, words = DAMAGES[damage]
    work(database)
    before = database.read_bytes()
    for command in (["list"], ["get", job], ["publish", "--job", job, "--event", "progress"], ["watch", job], [],
                    ["register", "--prompt", "p", "--agent-session", "queue:q"]):
        result = mam(*command, check=1)
        assert words in result.stderr and str(mam.registry_dir) in result.stderr, result
        assert all(line.startswith("mam: ") for line in result.stderr.splitlines()), result
    assert database.read_bytes() == before


def test_an_empty_file_becomes_a_registry(mam: Mam) -> None:
    """What an interrupted copy or `touch` leaves must not need a person."""
    mam.registry_dir.mkdir()
    (mam.registry_dir / "mam.db").touch()
    assert "no jobs" in mam("list", check=0).stdout
    job = register(mam)
    assert mam.job(job)["status"] == "pending"
    assert (mam.registry_dir / "mam.db").stat().st_mode & 0o777 == 0o600


def test_a_folder_in_the_place_of_the_file_is_named(mam: Mam) -> None:
    (mam.registry_dir / "mam.db").mkdir(parents=True)
    for command in (["list"], ["register", "--prompt", "p", "--agent-session", "queue:q"]):
        result = mam(*command, check=1)
        assert "mam.db" in result.stderr and "internal" not in result.stderr


def test_a_file_in_the_place_of_the_folder_is_named(mam: Mam) -> None:
    mam.registry_dir.write_text("a file")
    for command in (["list"], ["register", "--prompt", "p", "--agent-session", "queue:q"]):
        result = mam(*command, check=1)
        assert str(mam.registry_dir) in result.stderr and "internal" not in result.stderr


# ---- read-only ---------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("in_use", [False, True], ids=["at rest", "in use"])
def test_a_registry_of_somebody_else_can_be_read(public_host: Mam, inside: Inside, in_use: bool) -> None:
    """Looking works without write permission; a publisher learns that its event is not kept, exit 1."""
    mam = public_host
    job = register(mam)
    publish(mam, job, "started", "--detail", "first words", check=0)
    user = inside.patched(mam, as_nobody())
    registry = inside.registry(mam) if in_use else None
    if registry:
        registry.note(job, "note", "test", "now in the -wal")
    mam.registry_dir.chmod(0o755)
    for name in OURS:
        if (mam.registry_dir / name).exists():
            (mam.registry_dir / name).chmod(0o644)
    try:
        assert job in user("list", check=0).stdout
        assert user("get", job, check=0).json()["status"] == "running"
        assert "first words" in user("logs", job, check=0).stdout
        assert job in user(check=0).stdout
        for command in (["publish", "--job", job, "--event", "progress"], ["cancel", job],
                        ["register", "--prompt", "p", "--agent-session", "queue:q"]):
            result = user(*command, check=1)
            assert "read-only" in result.stderr and result.stderr.startswith("mam: "), result
            assert "nothing was recorded; run" not in result.stderr, "a retry would fail for ever"
    finally:
        if registry:
            registry.close()
    assert numbers(mam, job) == [1] and mam.job(job)["status"] == "running"


@pytest.mark.root
def test_a_registry_of_somebody_else_that_is_private_is_named(public_host: Mam, inside: Inside) -> None:
    """The usual 0700: "no registry" would be a lie, and would make a user register the job a second time."""
    mam = public_host
    job = register(mam)
    user = inside.patched(mam, as_nobody())
    for command in (["list"], ["get", job], ["publish", "--job", job, "--event", "progress"], []):
        result = user(*command, check=1)
        assert str(mam.registry_dir) in result.stderr and "denied" in result.stderr, result


def test_a_read_only_disk_can_be_read(mam: Mam, small_disk: Any) -> None:
    """A snapshot or a full-of-errors disk remounted read-only still tells what became of the jobs."""
    disk = small_disk("2m")
    mam.env["MAM_REGISTRY_DIR"] = str(disk / ".mam")
    job = register(mam)
    publish(mam, job, "started", check=0)
    mam("daemon", "stop", check=0)
    poll(lambda: subprocess.run(["mount", "-o", "remount,ro", str(disk)], stderr=subprocess.DEVNULL).returncode == 0,
         20, "remounted: the daemon's process may take a moment to end")
    assert job in mam("list", check=0).stdout
    assert mam.job(job)["status"] == "running"
    assert "read-only" in publish(mam, job, "progress", check=1).stderr
    assert "read-only" in mam("register", "--prompt", "p", "--agent-session", "queue:q", check=1).stderr.lower()
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    publish(mam, job, "completed", check=0)
    assert numbers(mam, job) == [1, 2]


# ---- the folder is deleted or replaced while in use --------------------------------------------------------


@pytest.mark.parametrize("command", [["watch"], ["wait"], ["subscribe", "--job"]], ids=lambda command: command[0])
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_follower_of_a_deleted_registry_says_so(mam: Mam, command: List[str], how: str) -> None:
    """Following an unlinked file would wait for ever for events that other processes put elsewhere."""
    if command == ["wait"] and not os.path.isdir("/proc/self"):
        pytest.skip("it prints nothing while it waits, and there is no /proc to look into")
    job = register(mam)
    publish(mam, job, "started", check=0)
    run = mam.popen(*command, job)
    if command != ["wait"]:
        run.wait_for("started")
    else:
        poll(lambda: _has_open(run.pid, "mam.db"), 20, "the registry open")
    mam.registry_dir.rename(mam.folder / "old")
    if how == "replaced":
        register(mam, "--job-id", job)
    result = run.wait(20)
    assert result.code == NOT_RECORDED and "removed or replaced" in result.stderr, result


def _has_open(pid: int, name: str) -> bool:
    try:
        links = [os.readlink(entry) for entry in Path("/proc", str(pid), "fd").iterdir()]
    except OSError:
        return False
    return any(os.path.basename(link) == name for link in links)


_VANISHES = """
import shutil
append = mam.Registry._append_event
def vanish(self, *args):
    event = append(self, *args)
    os.rename(self.directory, self.directory + ".old")
    if {new!r}:
        os.rename({new!r}, self.directory)
    return event
mam.Registry._append_event = vanish
"""


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_what_went_into_an_unlinked_file_is_not_called_recorded(mam: Mam, inside: Inside, how: str) -> None:
    """The publisher must be told to publish again: 75, not 0, when the file it wrote to has left its path."""
    job = register(mam)
    new = ""
    if how == "replaced":
        new = str(mam.folder / "new")
        mam("register", "--prompt", "p", "--agent-session", "queue:q", "--job-id", job, "--registry-dir", new, check=0)
    result = publish(inside.patched(mam, _VANISHES.format(new=new)), job, "completed", check=NOT_RECORDED)
    assert "removed or replaced" in result.stderr and "again" in result.stderr and "seq=" not in result.stdout
    old = Path(str(mam.registry_dir) + ".old")
    assert rows(old, "SELECT count(*) FROM events WHERE seq IS NOT NULL") == [(0,)]
    if how == "replaced":
        assert numbers(mam, job) == []
        publish(mam, job, "completed", check=0)
        assert numbers(mam, job) == [1]
    else:
        assert "no registry" in publish(mam, job, "completed", check=1).stderr
        assert not mam.registry_dir.exists(), "a publisher must not make an empty registry in its place"


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_running_command_whose_registry_is_deleted_is_not_left_for_ever(mam: Mam, how: str) -> None:
    """`_run` has nobody to report to any more: the command may end, and then nothing of mam stays behind."""
    go = mam.workspace / "go"
    job = mam("delegate", "--detach", "--agent-session", "exec:e", "--prompt", "p",
              "--exec", f"until test -e {go}; do sleep 0.05; done; exit 3", check=0).stdout.strip()
    mam.wait_job(job, "running")
    mam.registry_dir.rename(mam.folder / "old")
    if how == "replaced":
        register(mam, "--job-id", job)
    go.touch()
    poll(lambda: not mam.processes(), 20, lambda: f"processes {mam.processes()} gone")
    if how == "replaced":
        assert mam.job(job)["status"] == "pending" and numbers(mam, job) == []
    else:
        assert not mam.registry_dir.exists()
    assert rows(mam.folder / "old", "SELECT status FROM jobs") == [("running",)]


# ---- a full disk -------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`small_disk("1m")`: the folder of a file system of that size."""
    made: List[Path] = []

    def make(size: str) -> Path:
        if os.geteuid() != 0:
            pytest.skip("needs root")
        disk = tmp_path / f"disk{len(made)}"
        disk.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(disk)],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            pytest.skip("a tmpfs cannot be mounted here")
        made.append(disk)
        return disk

    yield make
    for disk in made:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Take the last byte."""
    path = disk / "filler"
    with open(path, "ab", buffering=0) as file:
        for size in (65536, 4096, 512, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return path


@pytest.mark.parametrize("in_use", [False, True], ids=["at rest", "in use"])
def test_on_a_full_disk_nothing_is_half_written_and_the_publisher_is_told(mam: Mam, inside: Inside, small_disk: Any,
                                                                          in_use: bool) -> None:
    """75 and "the disk is full": so an agent publishes again once there is space, and its number is not lost."""
    disk = small_disk("1m")
    mam.env["MAM_REGISTRY_DIR"] = str(disk / ".mam")
    job = register(mam)
    publish(mam, job, "started", check=0)
    follower = mam.popen("watch", job) if in_use else None
    if follower:
        follower.wait_for("started")
    before = rows(disk / ".mam", "SELECT * FROM jobs")
    filler = fill(disk)
    for command in (["publish", "--job", job, "--event", "completed", "--data", json.dumps({"x": "y" * 100000})],
                    ["publish", "--job", job, "--event", "error"], ["cancel", job],
                    ["register", "--prompt", "p" * 100000, "--agent-session", "queue:q"],
                    ["pick", "--agent-session", "queue:q"] if not in_use else ["publish", "--job", job, "--event",
                                                                              "progress"]):
        result = mam(*command)
        if command[0] == "pick" and result.code == 3:
            continue                                    # nothing to pick: true, and no write was needed
        assert result.code == NOT_RECORDED and "disk is full" in result.stderr and not result.stdout, result
    looked = mam("list")
    assert looked.code == 0 and job in looked.stdout or "disk is full" in looked.stderr, looked
    filler.unlink()
    assert rows(disk / ".mam", "SELECT * FROM jobs") == before
    assert numbers(mam, job) == [1]
    publish(mam, job, "completed", "--data", json.dumps({"x": "y" * 100000}), check=0)
    assert numbers(mam, job) == [1, 2] and mam.job(job)["status"] == "completed"
    if follower:
        assert follower.wait(20).code == 0
    assert rows(disk / ".mam", "PRAGMA integrity_check") == [("ok",)]


@pytest.mark.parametrize("left", [0, 8192, 40960, 90000])
def test_a_registry_that_cannot_be_made_on_a_full_disk_is_made_later(mam: Mam, small_disk: Any, left: int) -> None:
    """The first command of a workspace meets a full disk: a sentence, and nothing half-made in the way of the next."""
    disk = small_disk("1m")
    mam.env["MAM_REGISTRY_DIR"] = str(disk / ".mam")
    filler = fill(disk)
    os.truncate(filler, filler.stat().st_size - left)
    result = mam("register", "--prompt", "p", "--agent-session", "queue:q", check=NOT_RECORDED)
    assert "full" in result.stderr.lower() or "no space left" in result.stderr.lower(), result
    filler.unlink()
    publish(mam, register(mam), "completed", check=0)


def test_publishing_until_the_disk_is_full_keeps_exactly_what_was_acknowledged(mam: Mam, inside: Inside,
                                                                               small_disk: Any) -> None:
    """Whatever was answered with a number is there afterwards, and nothing else is."""
    disk = small_disk("1m")
    mam.env["MAM_REGISTRY_DIR"] = str(disk / ".mam")
    job = register(mam)
    said = inside.run(mam, """
import json
with mam.Registry(os.environ["MAM_REGISTRY_DIR"]) as registry:
    refused = 0
    for turn in range(10000):
        size = 60000 if not refused else 20000 if refused == 1 else 10
        try:
            answer = registry.transition(sys.argv[1], "progress", source="test", fields={"data": {"x": "y" * size}})
            print(answer.event.seq)
        except mam.MamError as error:
            assert error.exit == 75 and "full" in error.message, (error.exit, error.message)
            refused += 1
            if refused == 4:
                break
    assert refused == 4
""", job)
    assert numbers(mam, job) == [int(word) for word in said.split()] == list(range(1, len(said.split()) + 1))
    assert mam.job(job)["last_seq"] == len(said.split()) > 5


@pytest.mark.parametrize("misses, seconds", [(600, 0.5), (40, 4.6)], ids=["shortly", "longer than its idle time"])
def test_a_running_command_survives_a_full_disk_and_its_end_is_recorded_later(mam: Mam, small_disk: Any, misses: int,
                                                                              seconds: float) -> None:
    """Hours of work must not be lost because the disk was full when it ended. While nobody can record a sign of life,
    its absence proves nothing."""
    disk, go, done = small_disk("2m"), mam.workspace / "go", mam.workspace / "done"
    mam.env["MAM_REGISTRY_DIR"] = str(disk / ".mam")
    job = mam("delegate", "--detach", "--agent-session", "exec:e", "--prompt", "p", "--heartbeat", 0.1,
              "--heartbeat-misses", misses, "--exec",
              f"until test -e {go}; do sleep 0.05; done; sleep {seconds}; echo last words; touch {done}; exit 3",
              check=0).stdout.strip()
    mam.wait_job(job, "running")
    filler = fill(disk)
    go.touch()
    poll(done.exists, 20, "the command going on to its end")
    log = disk / ".mam" / "daemon.log"
    assert rows(disk / ".mam", "SELECT status FROM jobs") == [("running",)]
    filler.unlink()
    record = mam.wait_job(job, "error", 30)
    assert record["reason"] is None
    last = [line for line in mam.events(job) if line["seq"] is not None][-1]
    said = log.read_text() if log.exists() else ""
    assert last["event"] == "error" and last["data"].get("exit_status") == 3, (last, said)
    assert "Traceback" not in said
    poll(lambda: not mam.processes(), 20, "nothing left behind")


# ---- busy --------------------------------------------------------------------------------------------------

_TELLS_THAT_IT_WAITS = """
sleep = mam.time.sleep
def tell(seconds):
    open({path!r}, "w").close()
    sleep(seconds)
mam.time.sleep = tell
"""


def locked(folder: Path) -> sqlite3.Connection:
    holder = sqlite3.connect(str(folder / "mam.db"), isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    return holder


def test_a_publisher_waits_for_a_busy_registry(mam: Mam, inside: Inside) -> None:
    """Somebody else's long write must not cost an event."""
    job = register(mam)
    holder = locked(mam.registry_dir)
    waiting = mam.folder / "waiting"
    run = inside.patched(mam, _TELLS_THAT_IT_WAITS.format(path=str(waiting))).popen(
        "publish", "--job", job, "--event", "completed")
    poll(waiting.exists, 20, lambda: f"the publisher waiting: {run}")
    assert run.code is None and mam.job(job)["status"] == "pending"
    holder.execute("COMMIT")
    holder.close()
    assert run.wait(20).code == 0
    assert mam.job(job)["status"] == "completed"


@pytest.mark.parametrize("command", [["publish", "--event", "progress", "--job"], ["cancel"],
                                     ["status", "--set", "completed", "--job"], ["redispatch", "--force"]],
                         ids=lambda command: command[0])
def test_beyond_its_patience_it_says_that_nothing_was_recorded(mam: Mam, inside: Inside, command: List[str]) -> None:
    job = register(mam)
    holder = locked(mam.registry_dir)
    result = inside.patched(mam, "mam.BUSY_WAIT_S = 0.3")(*command, job, check=NOT_RECORDED)
    assert "busy" in result.stderr and "run the same command again" in result.stderr and not result.stdout
    assert job in mam("list", check=0).stdout, "a writer must not hold up those who only look"
    holder.execute("COMMIT")
    holder.close()
    assert numbers(mam, job) == [] and mam.job(job)["status"] == "pending"


def test_a_stopped_writer_holds_nobody_up_for_ever(mam: Mam, inside: Inside) -> None:
    """SIGSTOP within a transaction: others wait, tell, and go on once it is killed."""
    job = register(mam)
    stopper = inside.patched(mam, """
append = mam.Registry._append_event
def stop(self, *args):
    event = append(self, *args)
    os.kill(os.getpid(), 19)
    return event
mam.Registry._append_event = stop
""").popen("publish", "--job", job, "--event", "progress")
    poll(lambda: process_table()[stopper.pid][1] in ("T", "t"), 20, "the writer stopped")
    publish(inside.patched(mam, "mam.BUSY_WAIT_S = 0.3"), job, "progress", check=NOT_RECORDED)
    stopper.kill()
    publish(mam, job, "progress", check=0)
    assert numbers(mam, job) == [1]


# ---- the write-ahead log, and who reads it -----------------------------------------------------------------


def test_the_wal_stays_short_under_20000_writes_with_a_follower(mam: Mam, inside: Inside) -> None:
    """A follower that looks on for hours must not let the file beside the registry grow to gigabytes."""
    job = register(mam)
    publish(mam, job, "started", check=0)
    follower = mam.popen("watch", job)
    follower.wait_for("started")
    largest, left, limit = inside.run(mam, """
with mam.Registry(sys.argv[2]) as registry:
    registry.transition(sys.argv[1], "started", source="test", fields={"heartbeat_sec": 30})
    largest, beat = 0, registry.beat(sys.argv[1])
    for turn in range(20000):
        if turn % 25 == 0:
            registry.transition(sys.argv[1], "progress", source="test", fields={"detail": "turn %d" % turn})
        else:
            assert registry.touch_beat(beat)
        if turn % 50 == 0:
            largest = max(largest, os.stat(registry.path + "-wal").st_size)
    registry.transition(sys.argv[1], "progress", source="test", fields={"detail": "the last one"})
    print(largest, os.stat(registry.path + "-wal").st_size, mam.WAL_LIMIT_BYTES)
""", job, mam.registry_dir).split()
    assert int(largest) < 2 * int(limit) and int(left) < 2 * int(limit)
    follower.wait_for("the last one", 30)
    assert follower.stdout.count(" progress ") == 801


def test_readers_wake_at_every_commit_of_others_and_at_none_of_their_own(mam: Mam, inside: Inside) -> None:
    """data_version stands still while any statement of a reader is unfinished: then followers would go deaf."""
    inside.add_jobs(mam, "j1", "j2")
    with inside.registry(mam) as reader, inside.registry(mam) as writer:
        reads: List[Callable[[], object]] = [
            lambda: reader.job("j1"), reader.jobs, lambda: reader.jobs("pending"), reader.open_jobs,
            lambda: reader.jobs_by_id(["j1", "j2"]), lambda: reader.last_ends(8), reader.counts,
            lambda: reader.events("j1"), lambda: reader.events(), lambda: reader.beat("j1"),
            reader.beats, lambda: reader.owed_events("j1", 20), lambda: reader.owes("j1"),
            lambda: reader.jobs_owing(10), lambda: reader.has_work(True), lambda: reader.prompt("j1"),
            lambda: reader.attempt_token("j1", 1), lambda: reader.open_in_session("queue:q", "j1")]
        for read in reads:
            before = reader.data_version()
            read()
            assert reader.data_version() == before
            writer.transition("j1", "progress", source="test")
            assert reader.data_version() != before, read
        mine = writer.data_version()
        writer.transition("j1", "progress", source="test")
        assert writer.data_version() == mine


def test_a_follower_prints_what_is_committed_meanwhile(mam: Mam) -> None:
    job = register(mam)
    follower = mam.popen("watch", job)
    publish(mam, job, "progress", "--detail", "one", check=0)
    follower.wait_for("one")
    publish(mam, job, "completed", "--detail", "two", check=0)
    assert follower.wait(20).code == 0 and "two" in follower.stdout


# ---- transitions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("belief", [
    {"expected_status": "running"}, {"expected_attempt": 2}, {"expected_dispatch_token": "0" * 32},
    {"expected_last_seq": 7}], ids=lambda belief: next(iter(belief)))
@pytest.mark.parametrize("request_, fields", [
    ("completed", {}), ("progress", {}), ("cancelled", {}), ("deadline_timeout", {}), ("set", {"status": "completed"}),
    ("claim", {}), ("redispatch", {"force": True})], ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_belief_about_a_job_changes_nothing(mam: Mam, inside: Inside, belief: Dict[str, Any], request_: str,
                                                    fields: Dict[str, Any]) -> None:
    """Compare-and-swap: a verdict about what is no longer so must not overwrite what is; and it says why."""
    inside.add_jobs(mam, "j1")
    with inside.registry(mam) as registry:
        before = registry.job("j1")
        answer = registry.transition("j1", request_, source="test", fields=fields, **belief)
        assert not answer.committed and not answer.idempotent and answer.reason and answer.event is None
        assert registry.job("j1") == before == answer.job
        assert [event.event for event in registry.events("j1")][1:] in (["refused"], ["late"])
        right = {"expected_status": "pending", "expected_attempt": 1, "expected_last_seq": 0,
                 "expected_dispatch_token": before.dispatch_token}
        assert registry.transition("j1", request_, source="test", fields=fields,
                                   **{name: right[name] for name in belief}).committed


_CRASH = """
import json, shutil
base = sys.argv[1]
JOB = json.loads(sys.argv[2])
VARIES = ("timestamp", "dispatch_token", "auth_token")

def picture(directory, exact):
    # Every row; without `exact`, without what differs from one run to the next.
    with mam.Registry(directory) as registry:
        assert registry._execute("PRAGMA quick_check") == [("ok",)]
        found = {}
        for table in ("jobs", "attempts", "events", "beats"):
            columns = [row[1] for row in registry._execute("PRAGMA table_info(%s)" % table)]
            lines = []
            for row in registry._execute("SELECT * FROM %s ORDER BY 1, 2" % table):
                line = dict(zip(columns, row))
                if not exact:
                    line = {name: value is not None if name in VARIES or name.endswith(("_at", "_mono")) else value
                            for name, value in line.items()}
                    if "payload" in line:
                        payload = json.loads(line["payload"])
                        payload.pop("timestamp", None)
                        payload.get("data", {}).pop("dispatch_token", None)
                        line["payload"] = payload
                lines.append(line)
            found[table] = lines
        return found

def job(registry, **columns):
    registry.register({**JOB, "wire": "127.0.0.1:1", **columns})

def after(*requests, **columns):
    def prepare(registry):
        job(registry, **columns)
        for request in requests:
            request = request if isinstance(request, tuple) else (request, {})
            assert registry.transition("j1", request[0], source="test", fields=request[1]).committed, request
    return prepare

def request(name, **fields):
    return lambda registry: registry.transition("j1", name, source="test", fields=fields)

beat = ("started", {"heartbeat_sec": 30})
owing = '["report.md"]'
CASES = {
    "register": (lambda registry: None, job),
    "claim": (after(), request("claim")),
    "pick": (after(), lambda registry: registry.pick("queue:q")),
    "started": (after("claim"), request("started", heartbeat_sec=30, watch={"pid": 1})),
    "progress": (after("started"), request("progress", detail="d", feedback="f", data={"x": 1})),
    "permission_required": (after(beat), request("permission_required")),
    "completed": (after(beat), request("completed", feedback="f")),
    "completed, checks owed": (after(beat, expected_artifacts=owing), request("completed")),
    "error": (after(beat), request("error")),
    "settled": (after(beat, "completed", expected_artifacts=owing), request("settled", status="completed")),
    "settled as an error": (after(beat, "completed", expected_artifacts=owing),
                            request("settled", status="error", reason="artifact_missing")),
    "set": (after(beat), request("set", status="completed")),
    "cancelled": (after(beat), request("cancelled")),
    "deadline_timeout": (after(beat), request("deadline_timeout")),
    "unresponsive": (after(beat), request("unresponsive")),
    "agent_blocked": (after(), request("agent_blocked")),
    "spawn_failed": (after(), request("spawn_failed")),
    "supervisor_lost": (after(beat), request("supervisor_lost")),
    "session_busy": (after(), request("session_busy")),
    "redispatch": (after(beat, "progress", "completed"), request("redispatch", prompt="better")),
    "redispatch by force": (after(beat, "progress"), request("redispatch", force=True)),
    "late": (after("completed"), request("error", detail="too late", data={"x": 1})),
    "refused": (after("completed"), request("cancelled")),
    "edit": (after(), lambda registry: registry.edit("j1", "test", {"role": "Reviewer"})),
    "delivery": (after(), lambda registry: registry.move_delivery("j1", 1, "none", "sending")),
    "session claim": (after(), lambda registry: registry.claim_session(registry.job("j1"))),
    "end of a run": (after("started"), lambda registry: registry.end_run(registry.job("j1"), 3)),
    "sent": (after("started"), lambda registry: registry.mark_sent(registry.events("j1"), [("j1", 2)], ["j1"])),
}

def stopping(registry, at, how):
    execute, done = registry._execute, [0]
    def counted(sql, params=()):
        if done[0] == at:
            done[0] += 1
            how()
        done[0] += 1
        return execute(sql, params)
    registry._execute = counted

def fail():
    raise mam.MamError("the disk is full", exit=75)

wrong, seen = [], {}
for name, (prepare, act) in CASES.items():
    template = os.path.join(base, "template")
    shutil.rmtree(template, ignore_errors=True)
    with mam.Registry(template, create=True) as registry:
        prepare(registry)
    before = picture(template, True)
    reference = os.path.join(base, "reference")
    shutil.rmtree(reference, ignore_errors=True)
    shutil.copytree(template, reference)
    with mam.Registry(reference) as registry:
        act(registry)
    end = picture(reference, False)
    assert end != picture(template, False), name
    for kind in ("exit", "raise"):
        for at in range(1000):
            directory = os.path.join(base, "work")
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(template, directory)
            if kind == "exit":
                pid = os.fork()
                if pid == 0:
                    registry = mam.Registry(directory)
                    stopping(registry, at, lambda: os._exit(9))
                    act(registry)
                    os._exit(0)
                ran_through = os.waitpid(pid, 0)[1] == 0
            else:
                registry = mam.Registry(directory)
                stopping(registry, at, fail)
                try:
                    act(registry)
                    ran_through = True
                except mam.MamError:
                    ran_through = False
                assert not registry._db.in_transaction, (name, at)
                registry.close()
            if picture(directory, True) == before:
                found = "before"
            elif picture(directory, False) == end:
                found = "after"
            else:
                found = "between"
            if found == "between" or ran_through and found != "after":
                wrong.append((name, kind, at, found))
            seen.setdefault(name, set()).add(found)
            if ran_through:
                break
        else:
            wrong.append((name, kind, "does not end"))
print(json.dumps({"wrong": wrong, "never before": [name for name in seen if "before" not in seen[name]],
                  "cases": len(CASES)}))
"""


def test_a_crash_between_any_two_statements_leaves_before_or_after(mam: Mam, inside: Inside, tmp_path: Path) -> None:
    """An event without its state change, or a number without its event, would never be repaired by anybody."""
    found = json.loads(inside.run(mam, _CRASH, tmp_path, json.dumps(new_job("j1"))))
    assert found["wrong"] == [] and found["never before"] == [] and found["cases"] == 28


def test_a_redispatch_leaves_nothing_of_the_old_attempt_in_force(mam: Mam, inside: Inside) -> None:
    """Else an old worker's news, beat or token would pass for the new one's."""
    inside.add_jobs(mam, "j1", wire="127.0.0.1:1")
    with inside.registry(mam) as registry:
        registry.transition("j1", "started", source="test", fields={"heartbeat_sec": 30})
        registry.transition("j1", "progress", source="test")
        old = registry.job("j1")
        assert registry.beat("j1") and len(registry.owed_events("j1", 20)) == 2
        assert not registry.transition("j1", "redispatch", source="test").committed, "it has not ended"
        answer = registry.transition("j1", "redispatch", source="test", fields={"force": True})
        new = answer.job
        assert (new.attempt_id, new.status, new.phase, new.reason, new.delivery) == (2, "pending", None, None, "none")
        assert new.dispatch_token != old.dispatch_token and new.auth_token != old.auth_token
        assert registry.beat("j1") is None and registry.owed_events("j1", 20) == []
        assert new.clear_owed == 1 and new.state_sent < new.state_rev
        assert new.seq_base == 2 == new.last_seq
        assert registry.attempt_token("j1", 1) == old.auth_token, "its kept events stay verifiable"
        refused = registry.transition("j1", "completed", source="worker", expected_dispatch_token=old.dispatch_token)
        assert not refused.committed and refused.job.status == "pending"
        event = registry.transition("j1", "started", source="worker", expected_attempt=2).event
        assert (event.seq, event.attempt_id) == (3, 2)
        assert registry.transition("j1", "completed", source="worker", expected_attempt=2).committed
        again = registry.transition("j1", "redispatch", source="test").job
        assert again.attempt_id == 3 and again.seq_base == 4


# ---- many at once ------------------------------------------------------------------------------------------


def test_32_pickers_take_200_jobs_each_once_and_the_oldest_first(mam: Mam, inside: Inside) -> None:
    """A job taken twice is done twice; one passed over waits for ever."""
    mine = [f"j{number:03d}" for number in range(200)]
    inside.add_jobs(mam, *mine)
    inside.add_jobs(mam, "other", session="queue:other")
    results = inside.crowd(mam, [["pick", "--agent-session", "queue:q"]] * 32, each="""
        while True:
            code = mam.main(argv)
            if code:
                return code
    """)
    assert {result.code for result in results} == {3}
    taken = [result.stdout.split() for result in results]
    assert sorted(job for jobs in taken for job in jobs) == mine
    assert all(jobs == sorted(jobs) for jobs in taken)
    claims = rows(mam.registry_dir, "SELECT job_id FROM events WHERE event = 'status_changed' ORDER BY n")
    assert [job for job, in claims] == mine
    assert mam.job("other")["status"] == "pending"


def test_a_redispatched_job_keeps_its_place_in_the_queue(mam: Mam, inside: Inside) -> None:
    inside.add_jobs(mam, "first", "second", "third")
    assert mam("pick", "--agent-session", "queue:q", check=0).stdout == "first\n"
    mam("redispatch", "first", "--force", "--no-deliver", check=0)
    picked = [mam("pick", "--agent-session", "queue:q", check=0).stdout.strip() for _ in range(3)]
    assert picked == ["first", "second", "third"]
    assert mam("pick", "--agent-session", "queue:q", check=3).stdout == ""


def test_of_16_deliverers_one_may_deliver(mam: Mam, inside: Inside) -> None:
    """A prompt that is injected twice is worked on twice."""
    mine = [f"j{number}" for number in range(12)]
    inside.add_jobs(mam, *mine)
    results = inside.crowd(mam, [[]] * 16, each=f"""
        with mam.Registry({str(mam.registry_dir)!r}) as registry:
            for job in {mine!r}:
                if registry.move_delivery(job, 1, "none", "sending"):
                    print(job)
    """)
    assert {result.code for result in results} == {0}
    assert sorted(word for result in results for word in result.stdout.split()) == sorted(mine)


def test_an_attempt_that_is_over_is_not_delivered(mam: Mam, inside: Inside) -> None:
    inside.add_jobs(mam, "j1", "j2")
    with inside.registry(mam) as registry:
        registry.transition("j1", "cancelled", source="test")
        assert not registry.move_delivery("j1", 1, "none", "sending")
        registry.transition("j2", "redispatch", source="test", fields={"force": True})
        assert not registry.move_delivery("j2", 1, "none", "sending"), "an old deliverer"
        assert registry.move_delivery("j2", 2, "none", "sending")
        assert not registry.move_delivery("j2", 2, "none", "sending")


def test_a_killed_crowd_of_publishers_leaves_whole_events(mam: Mam, inside: Inside) -> None:
    """kill -9 at random moments: numbers without gap, and a job that shows its last event."""
    inside.add_jobs(mam, "j1")
    writer = inside.patched(mam, f"""
import sqlite3
for name in range(8):
    if os.fork() == 0:
        with mam.Registry({str(mam.registry_dir)!r}) as registry:
            for turn in range(100000):
                registry.transition("j1", "progress", source="test", fields={{"detail": "x" * (turn % 3000)}})
os.wait()
""")
    for _ in range(4):
        run: Background = writer.popen("list")
        reached = (rows(mam.registry_dir, "SELECT last_seq FROM jobs")[0][0]) + 40
        poll(lambda reached=reached: rows(mam.registry_dir, "SELECT last_seq FROM jobs")[0][0] >= reached, 30,
             "some events")
        os.killpg(run.pid, signal.SIGKILL)
        run.process.wait(20)
        poll(lambda: not mam.processes(), 20, "all of them dead")
        seqs = [seq for seq, in rows(mam.registry_dir, "SELECT seq FROM events WHERE seq IS NOT NULL ORDER BY n")]
        assert seqs == list(range(1, len(seqs) + 1))
        assert rows(mam.registry_dir, "SELECT last_seq, transition_seq FROM jobs") == [(len(seqs), len(seqs))]
        assert rows(mam.registry_dir, "PRAGMA integrity_check") == [("ok",)]


# ---- secrets, keys -----------------------------------------------------------------------------------------


def test_scrub_secrets_takes_passwords_out_of_records(mam: Mam, inside: Inside) -> None:
    """Records of v4 held the broker's password; afterwards no file of the registry holds it any more."""
    secret = "hunter2-and-more"
    inside.add_jobs(mam, "j1", broker=json.dumps({"host": "h", "password": secret, "username": "u"}))
    inside.add_jobs(mam, "j2", broker=json.dumps({"host": "password.example"}))
    inside.add_jobs(mam, "j3")
    dry = mam("scrub-secrets", "--dry-run", check=0)
    assert "would scrub 1" in dry.stdout and "j1" in dry.stdout and secret not in dry.stdout + dry.stderr
    assert secret in rows(mam.registry_dir, "SELECT broker FROM jobs WHERE job_id = 'j1'")[0][0]
    assert "scrubbed 1" in mam("scrub-secrets", check=0).stdout
    assert "scrubbed 0" in mam("scrub-secrets", check=0).stdout
    assert mam.job("j1")["broker"] == {"host": "h", "username": "u"}
    assert mam.job("j2")["broker"] == {"host": "password.example"}


def test_scrubbed_passwords_are_gone_from_the_file_as_well(mam: Mam, inside: Inside) -> None:
    """A scrub that leaves the password in a free part of the file hands it to whoever gets a copy."""
    secret = "hunter2-and-more"
    inside.add_jobs(mam, "j1", broker=json.dumps({"host": "h", "password": secret, "username": "u"}))
    inside.add_jobs(mam, *[f"k{number}" for number in range(20)])
    # As with an SQLite that was not built to overwrite what is deleted; some are.
    inside.patched(mam, """
opened = mam.Registry._open
def open_registry(self):
    opened(self)
    self._execute("PRAGMA secure_delete=OFF")
mam.Registry._open = open_registry
""")("scrub-secrets", check=0)
    holding = [path.name for path in mam.registry_dir.iterdir() if path.is_file() and secret.encode() in
               path.read_bytes()]
    assert holding == []


def test_no_secret_is_shown_unless_asked_for(mam: Mam) -> None:
    job = register(mam)
    publish(mam, job, "completed", check=0)
    key = rows(mam.registry_dir, "SELECT auth_token FROM attempts")[0][0]
    shown = "".join(str(mam(*command, check=0)) for command in (
        ["get", job], ["get", job, "--json"], ["list", "--json"], ["list"], ["logs", job], ["logs", job, "--json"],
        [], ["--json"], ["watch", job, "--json"]))
    assert key not in shown
    assert mam("get", job, "--show-secrets", check=0).json()["auth_token"] == key


@pytest.mark.parametrize("table", ["events", "jobs"])
def test_a_key_is_never_used_twice(mam: Mam, inside: Inside, table: str) -> None:
    """A follower stands at key n; a new row under an old key would never be shown to it."""
    inside.add_jobs(mam, "j1", "j2")
    highest = rows(mam.registry_dir, f"SELECT max(n) FROM {table}")[0][0]
    database = sqlite3.connect(str(mam.registry_dir / "mam.db"))
    database.execute(f"DELETE FROM {table} WHERE job_id = 'j2'")
    database.commit()
    database.close()
    inside.add_jobs(mam, "j3")
    assert rows(mam.registry_dir, f"SELECT n FROM {table} WHERE job_id = 'j3'")[0][0] > highest


def test_a_path_with_every_awkward_character_holds_a_registry(mam: Mam) -> None:
    """The file is opened by a URI: %, ? and # in a folder's name must not lead to another file."""
    folder = mam.folder / "100% real? #1 é\u3042 'q' \"d\" &mode=ro"
    folder.mkdir()
    env = {"MAM_REGISTRY_DIR": str(folder / ".mam")}
    job = mam("register", "--prompt", "p", "--agent-session", "queue:q", env=env, check=0).stdout.strip()
    publish(mam, job, "completed", env=env, check=0)
    assert json.loads(mam("get", job, env=env, check=0).stdout)["status"] == "completed"
    assert (folder / ".mam" / "mam.db").stat().st_size > 0
    assert re.fullmatch("[0-9a-f]{8}", job)


# ---- an older registry ---------------------------------------------------------------------------------------

# As mam made it before it knew of other hosts (PRAGMA user_version 1).
VERSION_1 = """
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
  wire TEXT, delivery TEXT NOT NULL DEFAULT 'none', supervisor TEXT, prompt TEXT NOT NULL);
CREATE INDEX jobs_pending ON jobs(agent_session, n) WHERE status = 'pending';
CREATE INDEX jobs_status ON jobs(status, n);
CREATE INDEX jobs_finished ON jobs(finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX jobs_state_owed ON jobs(n) WHERE wire IS NOT NULL AND (state_sent < state_rev OR clear_owed);
CREATE TABLE attempts(
  job_id TEXT NOT NULL, attempt_id INTEGER NOT NULL, dispatch_token TEXT NOT NULL, auth_token TEXT NOT NULL,
  seq_base INTEGER NOT NULL DEFAULT 0, outcome TEXT, created_at TEXT NOT NULL, ended_at TEXT,
  runner TEXT, run TEXT, run_ended_at TEXT, exit_status INTEGER,
  PRIMARY KEY(job_id, attempt_id)) WITHOUT ROWID;
CREATE INDEX attempts_at_work ON attempts(job_id) WHERE run IS NOT NULL AND run_ended_at IS NULL;
CREATE TABLE events(
  n INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL, attempt_id INTEGER NOT NULL, seq INTEGER,
  event TEXT NOT NULL, source TEXT NOT NULL, timestamp TEXT NOT NULL, logged_at TEXT NOT NULL,
  detail TEXT NOT NULL, payload TEXT NOT NULL, owed INTEGER NOT NULL DEFAULT 0, delivered_at TEXT,
  UNIQUE(job_id, attempt_id, seq));
CREATE INDEX events_of_job ON events(job_id, n);
CREATE INDEX events_owed ON events(job_id, n) WHERE owed = 1;
CREATE TABLE beats(
  job_id TEXT PRIMARY KEY, attempt_id INTEGER NOT NULL, period_s REAL NOT NULL, watch TEXT,
  armed_at TEXT NOT NULL, armed_mono TEXT NOT NULL, touched_at TEXT NOT NULL, touched_mono TEXT NOT NULL);
CREATE TABLE intents(
  job_id TEXT NOT NULL, identity TEXT NOT NULL, PRIMARY KEY(job_id, identity)) WITHOUT ROWID;
CREATE TABLE senders(client_id TEXT PRIMARY KEY, broker TEXT NOT NULL, process TEXT NOT NULL);
CREATE TABLE sessions(
  session TEXT PRIMARY KEY, kind TEXT NOT NULL, agent TEXT, status TEXT NOT NULL, pane TEXT, workdir TEXT,
  conversation TEXT, job_id TEXT, created_at TEXT NOT NULL, updated_at TEXT NOT NULL, data TEXT);
"""


def make_version_1(folder: Path, source: Path) -> Dict[str, List[Any]]:
    """A registry of version 1 with what stands in the one at `source`; the rows of its tables."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    database = sqlite3.connect(str(folder / "mam.db"), isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.executescript(VERSION_1 + "PRAGMA user_version=1;")
    database.execute("ATTACH ? AS source", (str(source / "mam.db"),))
    for table, columns in columns_of(database).items():
        there = {row[1] for row in database.execute(f"PRAGMA source.table_info({table})")}
        values = ", ".join(name if name in there else "touched_at" for name in columns)
        database.execute(f"INSERT INTO main.{table}({', '.join(columns)}) SELECT {values} FROM source.{table}")
    found = rows_of(database, columns_of(database))
    database.close()
    return found


def columns_of(database: Any) -> Dict[str, List[str]]:
    return {table: [row[1] for row in database.execute(f"PRAGMA main.table_info({table})")]
            for table in ("meta", "jobs", "attempts", "events", "beats", "intents", "senders", "sessions")}


def rows_of(database: Any, columns: Dict[str, List[str]]) -> Dict[str, List[Any]]:
    """All that version 1 knew, but for `armed_at`, which nothing ever read."""
    return {table: database.execute(f"SELECT {', '.join(name for name in names if name != 'armed_at')} "
                                    f"FROM main.{table} ORDER BY 1, 2").fetchall() for table, names in columns.items()}


@pytest.fixture
def old_registry(mam: Mam, inside: Inside, tmp_path: Path) -> Dict[str, List[Any]]:
    """The host's registry, made by version 1: jobs in every state, an armed beat, owed events. What stands in it."""
    host = copy_of(mam, tmp_path / "source")
    inside.add_jobs(host, "waits", "works", "again", "done", wire="127.0.0.1:1")
    with inside.registry(host, False) as registry:
        for job_id in ("works", "again", "done"):
            registry.transition(job_id, "started", source="test", fields={"heartbeat_sec": 30, "watch": {"pid": 1}})
        registry.transition("again", "error", source="test", fields={"detail": "first try"})
        registry.transition("again", "redispatch", source="test")
        registry.transition("again", "started", source="test", expected_attempt=2, fields={"heartbeat_sec": 9})
        registry.transition("done", "completed", source="test", fields={"detail": "all of it"})
        registry.add_sender("hermes-1", "127.0.0.1:1", {"pid": 1})
    made = make_version_1(mam.registry_dir, host.registry_dir)
    assert len(made["jobs"]) == 4 and len(made["attempts"]) == 5 and len(made["beats"]) == 2
    return made


def copy_of(mam: Mam, workspace: Path) -> Any:
    """The same host with another workspace."""
    other = copy.copy(mam)
    other.workspace = workspace
    return other


def as_version_1(mam: Mam) -> Dict[str, List[Any]]:
    """What now stands in the columns of version 1."""
    with contextlib.closing(sqlite3.connect(":memory:")) as old:
        old.executescript(VERSION_1)
        columns = columns_of(old)
    with contextlib.closing(sqlite3.connect(str(mam.registry_dir / "mam.db"))) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (2,)
        return rows_of(database, {table: [name for name in names if name != "armed_at"]
                                  for table, names in columns.items()})


def schema_of(folder: Path) -> Dict[str, Any]:
    """Tables with the names, types and defaults of their columns, in any order, and the indexes."""
    with contextlib.closing(sqlite3.connect(str(folder / "mam.db"))) as database:
        tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found: Dict[str, Any] = {table: sorted(row[1:] for row in database.execute(f"PRAGMA table_info({table})"))
                                 for table in tables}
        found["indexes"] = sorted(row[0] for row in database.execute(
            "SELECT sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"))
    return found


def test_a_registry_of_the_version_before_is_taken_over_whole(mam: Mam, inside: Inside, tmp_path: Path,
                                                              old_registry: Dict[str, List[Any]]) -> None:
    """An update of mam in the middle of work: no job, number, beat or debt is lost, and the work goes on."""
    with inside.registry(mam, False) as registry:
        assert as_version_1(mam) == old_registry
        assert sorted(registry.beats()) == ["again", "works"] and registry.beat("again").attempt_id == 2
        assert [event.seq for event in registry.owed_events("works", 9)] == [1]
        assert registry.job("works").remote_keys is None and registry.mails("works") == []
        event = registry.transition("again", "completed", source="worker", expected_attempt=2).event
        assert (event.seq, event.attempt_id) == (4, 2) and registry.beat("again") is None
        assert registry.jobs_owing(9) and registry.has_work(True)
        registry.own_id("runner_id")
    fresh = copy_of(mam, tmp_path / "fresh")
    inside.add_jobs(fresh, "x")

    def shape(folder: Path) -> Any:
        found = schema_of(folder)
        return {**found, "beats": [row[:2] for row in found["beats"]]}
    assert shape(mam.registry_dir) == shape(fresh.registry_dir), "an updated registry differs from a new one"


def test_of_many_that_update_a_registry_at_once_each_finds_it_whole(mam: Mam, inside: Inside,
                                                                     old_registry: Dict[str, List[Any]]) -> None:
    """The first commands after an update come together: an agent's publish must not fail because a watch was first."""
    mam.without_daemon()
    results = inside.crowd(mam, [["list", "--json"], ["get", "works", "--json"]] * 6)
    assert [result for result in results if result.code != 0] == []
    assert as_version_1(mam) == old_registry


def test_an_update_that_is_killed_halfway_leaves_the_old_registry(mam: Mam, inside: Inside,
                                                                  old_registry: Dict[str, List[Any]]) -> None:
    """At each of its statements; the next command does it whole."""
    for at in range(20):
        done = inside.patched(mam, f"""
import signal
count = [0]
def dying(self, sql, params=(), real=mam.Registry._execute):
    if self._db.in_transaction:
        count[0] += 1
        if count[0] > {at}:
            os.kill(os.getpid(), signal.SIGKILL)
    return real(self, sql, params)
mam.Registry._execute = dying
""")("list", "--json")
        if done.code == 0:
            break
        assert done.code == -signal.SIGKILL, done
        with contextlib.closing(sqlite3.connect(str(mam.registry_dir / "mam.db"))) as database:
            assert database.execute("PRAGMA user_version").fetchone() == (1,)
            assert rows_of(database, columns_of(database)) == old_registry
    else:
        raise AssertionError("it never got through")
    assert at > 8
    assert as_version_1(mam) == old_registry


@pytest.mark.root
def test_an_old_registry_that_may_not_be_written_says_who_has_to_update_it(public_host: Mam, inside: Inside,
                                                                           tmp_path: Path) -> None:
    """Not "no such column": the reader would think it is corrupt."""
    mam = public_host
    source = copy_of(mam, tmp_path / "source")
    inside.add_jobs(source, "j1")
    make_version_1(mam.registry_dir, source.registry_dir)
    mam.registry_dir.chmod(0o755)
    for path in mam.registry_dir.iterdir():
        path.chmod(0o644)
    user = inside.patched(mam, as_nobody())
    for command in (["list"], ["get", "j1"], ["publish", "--job", "j1", "--event", "progress"]):
        result = user(*command, check=1)
        assert "is of an older mam and cannot be written" in result.stderr, result
        assert "run any command of this mam once as a user who may write it" in result.stderr
    assert mam("list", check=0).stdout
    assert "j1" in user("list", check=0).stdout


# ---- what a runner keeps, and what is kept for it ---------------------------------------------------------------


def keys_of(job_id: str, attempt: int, token: str) -> Tuple[str, Dict[str, str]]:
    return f"event-{job_id}-{attempt}-{token}", {"kid": "k", "control": "c", "presence": "p"}


def adopt(registry: Any, job_id: str = "j1", attempt: int = 1, token: str = "t1", seq_base: int = 0,
          **columns: Any) -> str:
    record = {**adoptable(), "job_id": job_id, "wire": "127.0.0.1:1", **columns}
    return str(registry.adopt(record, attempt, token, seq_base, keys_of, "runner"))


def test_an_attempt_is_adopted_once_whatever_comes_again(mam: Mam, inside: Inside) -> None:
    """A broker delivers an order twice, late, or out of order: the work of an attempt is done once, by its order."""
    with inside.registry(mam) as registry:
        assert adopt(registry, attempt=2, token="t2", seq_base=7, prompt="second try") == "adopted"
        job = registry.job("j1")
        assert (job.attempt_id, job.dispatch_token, job.last_seq, job.seq_base) == (2, "t2", 7, 7)
        assert (job.auth_token, job.runner, job.status, job.delivery) == ("event-j1-2-t2", "runner", "pending", "none")
        assert job.clear_owed == 1, "the retained end of the attempt before is to go"
        assert [one.job_id for one in registry.adopted_jobs()] == ["j1"]
        before = inside_rows(mam)
        assert adopt(registry, attempt=2, token="t2", seq_base=7) == "known"
        assert adopt(registry, attempt=2, token="other") == "conflict"
        assert adopt(registry, attempt=1, token="t1") == "stale"
        assert inside_rows(mam) == before
        event = registry.transition("j1", "started", source="runner", expected_attempt=2).event
        assert event.seq == 8
        assert registry.transition("j1", "completed", source="_run", expected_attempt=2).committed
        assert adopt(registry, attempt=2, token="t2") == "known", "done already, and not to be done again"
        assert registry.job("j1").status == "completed" and registry.adopted_jobs() == []


def inside_rows(mam: Mam) -> Any:
    return [rows(mam.registry_dir, f"SELECT * FROM {table}") for table in ("jobs", "attempts", "events")]


def test_the_next_attempt_of_a_known_job_replaces_the_one_before(mam: Mam, inside: Inside) -> None:
    """Else the old one's news would pass for the new one's, or its numbers be given twice; or its result be lost."""
    with inside.registry(mam) as registry:
        assert adopt(registry) == "adopted"
        registry.transition("j1", "started", source="runner", fields={"heartbeat_sec": 30, "watch": {"pid": 1}})
        registry.transition("j1", "progress", source="worker")
        assert adopt(registry, attempt=3, token="t3", seq_base=5, prompt="try again", command="false") == "adopted"
        job = registry.job("j1")
        assert (job.attempt_id, job.dispatch_token, job.seq_base, job.last_seq) == (3, "t3", 5, 5)
        assert (job.status, job.outcome, job.delivery, job.last_event, job.command) == (
            "pending", None, "none", None, "false")
        assert registry.prompt("j1") == "try again"
        assert registry.beat("j1") is None and job.clear_owed == 1
        assert [(event.attempt_id, event.seq) for event in registry.owed_events("j1", 9)] == [(1, 1), (1, 2)]
        late = registry.transition("j1", "completed", source="worker", expected_attempt=1)
        assert not late.committed and registry.job("j1").status == "pending"
        assert registry.transition("j1", "started", source="runner", expected_attempt=3).event.seq == 6
        assert adopt(registry, attempt=2, token="t2") == "stale"


def test_of_16_that_adopt_one_attempt_one_does(mam: Mam, inside: Inside) -> None:
    """Two processes on one runner's registry must not both take an order."""
    inside.add_jobs(mam, "other")
    results = inside.crowd(mam, [[str(number)] for number in range(16)], before="import json", each=f"""
        record = json.loads({json.dumps(json.dumps(adoptable()))})
        with mam.Registry(mam.load_settings().registry_dir) as registry:
            print(registry.adopt(record, 1, "t1", 0, lambda *of: ("key", {{"kid": "k"}}), "r"), registry.own_id("id"))
        return 0""")
    words = [result.stdout.split() for result in results]
    assert sorted(word for word, _ in words) == ["adopted"] + ["known"] * 15
    assert len({own for _, own in words}) == 1, "a registry that has two names is dispatched to under one of them"


def adoptable() -> Dict[str, Any]:
    record = new_job("j1", "exec:s", command="true", transport="local")
    record.pop("attempt_id")
    return record


def test_a_runners_id_stays_with_its_registry(mam: Mam, inside: Inside) -> None:
    """A restarted runner under another name would not take what was given to it before."""
    with inside.registry(mam) as registry:
        first = registry.own_id("runner_id")
        assert re.fullmatch("[0-9a-f]{16}", first) and registry.own_id("runner_id") == first
        assert registry.own_id("another") != first
    with inside.registry(mam) as registry:
        assert registry.own_id("runner_id") == first


MAILS = [   # what was acknowledged, (dispatch, control) as decided meanwhile, and what it is then
    ("dispatch", (1, 0), (2, 0)), ("dispatch", (3, 0), (3, 0)), ("dispatch", (0, 0), (0, 0)),
    ("clear_dispatch", (3, 0), (0, 0)), ("clear_dispatch", (1, 0), (1, 0)), ("clear_dispatch", (2, 0), (2, 0)),
    ("forget_dispatch", (3, 2), (0, 2)), ("control", (3, 1), (3, 2)), ("control", (3, 3), (3, 3)),
    ("clear_control", (0, 3), (0, 0)), ("clear_control", (0, 1), (0, 1)), ("forget_control", (0, 3), (0, 0)),
]


@pytest.mark.parametrize("what, before, after", MAILS)
def test_a_late_acknowledgement_undoes_no_decision(mam: Mam, inside: Inside, what: str, before: Tuple[int, int],
                                                   after: Tuple[int, int]) -> None:
    """A dispatch that is to be taken back counts as sent when its PUBACK comes, and stays on the broker for ever."""
    inside.add_jobs(mam, "j1", session="remote:s", transport="remote")
    with inside.registry(mam) as registry:
        with registry.write():
            registry._execute("UPDATE attempts SET dispatch_mail = ?, control_mail = ?", before)
        registry.mark_mailed("j1", 2, what)         # another attempt's: changes nothing
        registry.mark_mailed("j1", 1, what)
        assert rows(mam.registry_dir, "SELECT dispatch_mail, control_mail FROM attempts") == [after]
        expected = [] if after == (0, 0) else [1]
        assert [mail.attempt_id for mail in registry.mails("j1")] == expected


def test_what_is_asked_for_again_has_the_same_bytes(mam: Mam, inside: Inside) -> None:
    """Other bytes under a number are a conflict, an alarm on the other side; of an old attempt nothing goes out."""
    program = inside.module
    with inside.registry(mam) as registry:
        adopt(registry)
        for number in range(4):
            registry.transition("j1", "progress", source="worker", fields={
                "detail": f"part {number} \u00e9\U0001f600", "data": {"n": 1.5, "k": [None, True]}})

        def signed() -> List[bytes]:
            job = registry.job("j1")
            return [program.event_message(registry, job, event)[1] for event in registry.owed_events("j1", 99)]
        first = signed()
        registry.mark_sent(events=registry.owed_events("j1", 99))
        assert signed() == [] and registry.owe_from("j1", 1, 2) == 3
        assert signed() == first[1:]
        assert registry.owe_from("j1", 2, 1) == 0 and registry.owe_from("nosuch", 1, 1) == 0
        assert registry.owe_from("j1", 1, 99) == 0
        registry.mark_sent(events=registry.owed_events("j1", 99))
        adopt(registry, attempt=2, token="t2", seq_base=4)
        assert registry.owe_from("j1", 1, 1) == 0 and registry.owe_from("j1", 2, 1) == 0 and signed() == []

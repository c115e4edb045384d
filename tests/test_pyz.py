"""The built mam.pyz: the same bytes everywhere, every Python, every home, and always a way to start.

If a test here fails, somebody copies the one file to a host and it does not run there, or runs something else.
"""
from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import pytest

from support import ROOT, poll
from support.cli import Mam

MAX_BYTES = 250_000
SUPPORTED = ["3.9", "3.10", "3.11", "3.12", "3.13"]


def interpreters() -> Dict[str, str]:
    """version -> program, of each Python on PATH, of pyenv, and the one that runs these tests; shims looked through."""
    import pwd
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)           # the tests may run with another HOME
    places = [Path(sys.executable)]
    places += sorted((home / ".pyenv" / "versions").glob("*/bin/python"))
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        if folder and "shims" not in folder:
            places += [path for path in sorted(Path(folder).glob("python[23]*"))
                       if re.fullmatch(r"python[\d.]+", path.name)]
    found: Dict[str, str] = {}
    for place in places:
        try:
            done = subprocess.run(
                [str(place), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            continue
        version = done.stdout.decode().strip()
        if done.returncode == 0 and re.fullmatch(r"\d+\.\d+", version):
            found.setdefault(version, str(place))
    return found


PYTHONS = interpreters()
OLD = sorted(version for version in PYTHONS if tuple(map(int, version.split("."))) < (3, 9))
NEW = sorted((version for version in PYTHONS if version not in OLD), key=lambda text: int(text.split(".")[1]))


class Host:
    """A bare environment to start a pyz in: an empty home, an empty cache, and nothing else."""

    def __init__(self, folder: Path, pyz: Path) -> None:
        self.folder, self.pyz, self.home = folder, pyz, folder / "home"
        self.home.mkdir()
        self.env: Dict[str, str] = {
            "PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.home), "LANG": "C.UTF-8"}

    def __call__(self, *args: str, python: Optional[str] = None, pyz: Optional[Path] = None,
                 env: Optional[Dict[str, Optional[str]]] = None, **options: Any) -> "subprocess.CompletedProcess[str]":
        whole = {**self.env, **(env or {})}
        return subprocess.run([python or sys.executable, str(pyz or self.pyz), *args],
                              env={name: value for name, value in whole.items() if value is not None},
                              cwd=str(options.pop("cwd", self.folder)), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", timeout=120, **options)

    @property
    def cache(self) -> Path:
        """The folder into which the pyz unpacked itself."""
        found = list((self.home / ".shiv").glob("mam_*"))
        assert len(found) == 1, found
        return found[0]


@pytest.fixture
def host(tmp_path: Path, pyz: Path) -> Host:
    return Host(tmp_path, pyz)


def starts(done: "subprocess.CompletedProcess[str]") -> None:
    assert (done.returncode, done.stdout, done.stderr) == (0, "mam 5.0.0\n", ""), done


# ---- the bytes ------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> List[Tuple[str, Path]]:
    """Builds of the same sources in other folders, under another umask, working folder, file mode and date."""
    made: List[Tuple[str, Path]] = []
    for name, umask, cwd, environment in (
            ("one", 0o022, None, {}),
            ("two with a space", 0o077, "/", {"SOURCE_DATE_EPOCH": "86400", "TZ": "Asia/Tokyo"})):
        folder = tmp_path_factory.mktemp("build") / name
        folder.mkdir()
        for file in ("mam.py", "build.sh", "LICENSE"):
            # From the first build's folder: somebody may be writing in the checkout.
            shutil.copyfile((made[0][1].parent if made else ROOT) / file, folder / file)
            (folder / file).chmod(0o644 if name == "one" else 0o700)
        if (ROOT / ".build").is_dir():          # the packages, so that no build here needs a network
            shutil.copytree(ROOT / ".build", folder / ".build", ignore=shutil.ignore_patterns("work.*"))
        done = subprocess.run(["bash", str(folder / "build.sh")], cwd=cwd or str(folder), stdin=subprocess.DEVNULL,
                              env={**os.environ, "PYTHON": sys.executable, **environment}, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, encoding="utf-8", timeout=300,
                              preexec_fn=lambda: os.umask(umask) and None)
        assert done.returncode == 0, done.stdout
        made.append((done.stdout.splitlines()[-1], folder / "mam.pyz"))
    return made


def test_two_builds_in_two_folders_are_the_same_bytes(builds: List[Tuple[str, Path]]) -> None:
    """Who gets the file can rebuild it and compare: nothing of the builder is in it."""
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for _, path in builds]
    assert digests[0] == digests[1]
    assert all(digest in said for digest, (said, _) in zip(digests, builds)), "build.sh tells the sum of the file"
    assert [path.stat().st_mode & 0o777 for _, path in builds] == [0o755, 0o755]
    for _, path in builds:
        assert str(path.parent).encode() not in path.read_bytes()


def test_a_build_leaves_nothing_but_the_result(builds: List[Tuple[str, Path]]) -> None:
    for _, path in builds:
        assert sorted(entry.name for entry in path.parent.iterdir()) == [
            ".build", "LICENSE", "build.sh", "mam.py", "mam.pyz"]
        assert [entry.name for entry in (path.parent / ".build").iterdir() if entry.name.startswith("work")] == []


def test_size_and_contents(pyz: Path) -> None:
    assert pyz.stat().st_size < MAX_BYTES
    assert pyz.read_bytes().startswith(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(pyz) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        licences = {name: archive.read(name).decode() for name in names if not name.endswith((".py", ".bz2"))}
        with tarfile.open(fileobj=io.BytesIO(archive.read("site-packages.tar.bz2"))) as sources:
            assert {(entry.mtime, entry.uid, entry.uname) for entry in sources} == {(0, 0, "")}
            packed = sources.getnames()
    assert "site-packages/mam.py" in packed and "site-packages/paho/mqtt/client.py" in packed
    assert "__main__.py" in names and not [name for name in names + packed if "dist-info" in name or "/click/" in name]
    assert "MIT" in licences["LICENSE"]
    text = "\n".join(text for name, text in licences.items() if "/paho/" in name)
    assert "Eclipse Public License" in text and "Eclipse Distribution License" in text, sorted(licences)


def bytecode(host: Host) -> Optional[Path]:
    """The bytecode that the archive brings, as a first start by the Python that built it leaves it; None if none."""
    with zipfile.ZipFile(host.pyz) as archive:
        tag = re.search(rb"BYTECODE_TAG = .* (\d+), '([a-z]+-\d)(\d+)'\)", archive.read("slow_start.py"))
    assert tag is not None
    size, kind, minor = (part.decode() for part in tag.groups())
    if size == "0":
        return None
    python = PYTHONS.get(f"{kind[-1]}.{minor}")
    if python is None:
        pytest.skip(f"not installed: the Python that built it, {kind}{minor}")
    starts(host("--version", python=python))
    return next(host.cache.rglob(f"mam.{kind}{minor}.pyc"))


def test_the_first_start_compiles_nothing(host: Host) -> None:
    """The bytecode in the archive is taken as it is: it halves the first start of each new version on each host."""
    path = bytecode(host)
    if path is None:
        pytest.skip("the archive has no room for bytecode")
    content = path.read_bytes()
    assert content[4:8] == b"\3\0\0\0", "a .pyc that Python wrote: it knows its source by time, not by hash"
    starts(host("--version"))
    assert path.read_bytes() == content


def test_a_traceback_names_the_right_lines(host: Host) -> None:
    """The bytecode is without line numbers, which nobody sees but with --debug: that start compiles the source."""
    source = (ROOT / "mam.py").read_text(encoding="utf-8").splitlines()
    for _ in range(2):          # without a cache, and from it
        done = host("get", "nosuch", "--registry-dir", str(host.folder / "none"), "--debug")
        assert done.returncode == 1 and "MamError" in done.stderr, done
        shown = re.findall(r'mam\.py", line (\d+), in (\w+)\n +(\S.*)', done.stderr)
        assert len(shown) >= 3, done
        for number, _, text in shown:
            assert text.split("  #")[0].strip() in source[int(number) - 1], (number, text)


# ---- Pythons --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("version", OLD or ["none installed"])
def test_an_old_python_says_what_it_needs_in_one_line(host: Host, version: str) -> None:
    if version not in PYTHONS:
        return                          # test_the_launcher_parses_on_old_pythons stands in
    for args in (["--version"], ["list"], []):
        done = host(*args, python=PYTHONS[version])
        assert done.returncode == 1 and done.stdout == "", done
        said = rf"mam: needs Python 3\.9 or newer, this is {re.escape(version)}\.\d+ \(.+\)\n"
        assert re.fullmatch(said, done.stderr), done
    assert list(host.home.iterdir()) == [], "it must leave nothing behind"


def test_the_launcher_parses_on_old_pythons(pyz: Path) -> None:
    """Without an old Python to try: nothing in __main__.py that one would stumble over before the check."""
    with zipfile.ZipFile(pyz) as archive:
        source = archive.read("__main__.py")
    source.decode("ascii")                      # 2.7 refuses anything else without a coding line
    text = re.sub(rb"#.*", b"", source).decode()
    check = text.index("sys.version_info < (3, 9)")
    assert re.findall(r"^(?:import|from) .*", text[:check], re.MULTILINE) == ["import sys"]
    code = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    for pattern in (r"\bf\"", r":=", r"\bnonlocal\b", r"\basync\b", r"\bawait\b", r"->", r"\byield from\b",
                    r"\bfrom None\b", r"\bprint ", r"^def .*\w: \w", r"^@", r"\bmatch "):
        assert not re.search(pattern, code, re.MULTILINE), pattern
    for version in OLD:
        done = subprocess.run([PYTHONS[version], "-c", "import sys; compile(sys.stdin.read(), 'm', 'exec')"],
                              input=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30)
        assert done.returncode == 0, (version, done.stdout)


def test_every_supported_python_is_tried(pyz: Path) -> None:
    """A machine that lacks one tests less than the README promises, and must say so."""
    missing = [version for version in SUPPORTED if version not in NEW]
    if missing:
        pytest.skip("not installed: Python " + ", ".join(missing))


@pytest.mark.parametrize("version", NEW)
def test_a_whole_job_on_each_python(new_mam: Callable[..., Mam], pyz: Path, version: str) -> None:
    """One file, each Python: a job with a brief, an agent that reports, an artifact and a validation."""
    mam = new_mam("host", python=PYTHONS[version])
    (mam.workspace / "brief.md").write_text("Write result.txt — ünïcode\n")
    agent = ('test "$(cat)" = "Write result.txt — ünïcode" || exit 9; echo 42 > result.txt; '
             "$MAM_PUBLISH_CMD --event progress --detail written && echo the answer")
    done = mam("delegate", "--agent-session", "exec:x", "--stdin", "--exec", agent, "--prompt-file", "brief.md",
               "--artifact", "result.txt", "--validate", "grep -q 42 result.txt", check=0, timeout=90)
    assert re.findall(r"seq=\d+ (\w+)", done.stdout) == ["started", "progress", "completed", "completed"], done
    assert "the answer" in done.stdout.splitlines()[-1], done
    assert mam("--version").stdout == "mam 5.0.0\n"


def test_a_python_built_without_bz2(host: Host) -> None:
    """As pyenv builds them on a host without the headers. It is needed where there is no cache yet, and not later."""
    lacking = host.folder / "lacking"
    lacking.mkdir()
    (lacking / "_bz2.py").write_text("raise ModuleNotFoundError(\"No module named '_bz2'\")\n")
    env: Dict[str, Optional[str]] = {"PYTHONPATH": str(lacking)}
    for home in (None, "/dev/null"):
        done = host("--version", env={**env, **({"HOME": home} if home else {})})
        assert done.returncode == 70 and done.stdout == "", done
        assert re.fullmatch(r"mam: cannot start from .+ needs the module bz2, which .+\n", done.stderr), done
    starts(host("--version"))
    starts(host("--version", env=env))


def test_all_pythons_share_one_cache(host: Host) -> None:
    for version in [*NEW, *NEW]:
        starts(host("--version", python=PYTHONS[version]))
    files = list(host.cache.rglob("mam*.py*"))
    assert len([path for path in files if path.name == "mam.py"]) == 1
    assert len([path for path in files if path.suffix == ".pyc"]) == len(NEW), files


# ---- homes and caches -----------------------------------------------------------------------------------------

def test_first_start_with_an_empty_shiv_root(host: Host) -> None:
    root = host.folder / "made" / "for this"
    for _ in range(2):
        starts(host("--version", env={"SHIV_ROOT": str(root)}))
    assert [entry.name[:4] for entry in root.iterdir()] == ["mam_"] and list(host.home.iterdir()) == []
    for path in [root, *root.rglob("*")]:
        assert not path.stat().st_mode & 0o077, f"others may read or write {path}"


@pytest.mark.parametrize("home", ["missing", "read-only", "empty", "unset", "a file", "relative"])
def test_homes_where_nothing_can_be_written(host: Host, home: str) -> None:
    """A service account, a container, a sandbox: mam runs from its archive, and says nothing about it."""
    value: Optional[str] = {"missing": str(host.folder / "none" / "home"), "empty": "", "unset": None,
                            "a file": str(host.pyz), "relative": "here"}.get(home, str(host.home))
    work = host.folder / "work"
    (work / ".git").mkdir(parents=True)
    shown = []
    if home == "read-only" and os.geteuid() == 0:
        if subprocess.run(["unshare", "-m", "true"], stderr=subprocess.DEVNULL).returncode:
            pytest.skip("root without the right to mount cannot be kept from writing")
        script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
        for args in (["--version"], ["register", "--prompt", "x"], ["list"]):
            shown.append(subprocess.run(
                ["unshare", "-m", "sh", "-c", script, str(host.home), sys.executable, str(host.pyz), *args],
                env=host.env, cwd=str(work), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                encoding="utf-8", timeout=60))
    else:
        if home == "read-only":
            host.home.chmod(0o500)
        for args in (["--version"], ["register", "--prompt", "x"], ["list"]):
            shown.append(host(*args, env={"HOME": value}, cwd=work))
        host.home.chmod(0o700)
    starts(shown[0])
    assert [done.returncode for done in shown] == [0, 0, 0] and not any(done.stderr for done in shown), shown
    assert "pending" in shown[2].stdout
    if home != "unset":                         # without HOME the cache goes to the home of the password file
        assert list(host.home.rglob("*")) == []
    assert sorted(entry.name for entry in work.iterdir()) == [".git", ".mam"], "no cache in the working folder"


def _delete(cache: Path, name: str) -> None:
    next(cache.rglob(name)).unlink()


def _truncate(cache: Path, name: str) -> None:
    path = next(cache.rglob(name))
    path.write_bytes(path.read_bytes()[:100])


def _spoil(cache: Path, name: str) -> None:
    """Another content of the same size."""
    path = next(cache.rglob(name))
    content = path.read_bytes()
    path.write_bytes(b"raise SystemError('spoilt')\n" + b"#" * (len(content) - 28))
    for compiled in cache.rglob(name.replace(".py", ".*.pyc")):
        compiled.unlink()


def _replace_by_folder(cache: Path, name: str) -> None:
    path = next(cache.rglob(name))
    path.unlink()
    path.mkdir()


DAMAGES: List[Tuple[str, Callable[[Path], None]]] = [
    ("mam.py deleted", lambda cache: _delete(cache, "mam.py")),
    ("mam.py cut", lambda cache: _truncate(cache, "mam.py")),
    ("mam.py spoilt", lambda cache: _spoil(cache, "mam.py")),
    ("its pyc cut", lambda cache: _truncate(cache, "mam.*.pyc")),
    ("paho deleted", lambda cache: _delete(cache, "client.py")),
    ("paho's folder deleted", lambda cache: shutil.rmtree(cache / "site-packages" / "paho")),
    ("all deleted but the folder", lambda cache: shutil.rmtree(cache / "site-packages")),
    ("mam.py a folder", lambda cache: _replace_by_folder(cache, "mam.py")),
    ("mam.py writable by others", lambda cache: (cache / "site-packages" / "mam.py").chmod(0o666)),
]


@pytest.mark.parametrize("damage", [damage for _, damage in DAMAGES], ids=[name for name, _ in DAMAGES])
def test_a_damaged_cache_never_stops_mam(host: Host, damage: Callable[[Path], None]) -> None:
    """Cleaners of temporary folders, full disks and crashes take files away: the next start works, and so do all."""
    starts(host("--version"))
    damage(host.cache)
    for _ in range(2):
        starts(host("--version"))
    done = host("publish", "nosuch", "--event", "error", env={"MQTT_BROKER": "127.0.0.1"})
    assert done.returncode == 1 and done.stderr.startswith("mam: no registry at"), done


@pytest.mark.parametrize("damage", [damage for _, damage in DAMAGES[:7]], ids=[name for name, _ in DAMAGES[:7]])
def test_a_damaged_cache_heals(host: Host, damage: Callable[[Path], None]) -> None:
    starts(host("--version"))
    before = {path.relative_to(host.cache): path.read_bytes() for path in host.cache.rglob("*.py")}
    damage(host.cache)
    starts(host("--version"))
    assert {path.relative_to(host.cache): path.read_bytes() for path in host.cache.rglob("*.py")} == before
    assert not [path for path in host.cache.rglob("*") if re.search(r"\.\d+\.[0-9a-f]{8}$", path.name)]


def test_sixteen_first_starts_at_once(host: Host) -> None:
    """A loop that starts many agents on a fresh host must not trip over its own unpacking."""
    running = [subprocess.Popen(
        [sys.executable, str(host.pyz), "--version"], env=host.env, cwd=str(host.folder), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") for _ in range(16)]
    ended = [(*process.communicate(timeout=100), process.returncode) for process in running]
    assert ended == [("mam 5.0.0\n", "", 0)] * 16
    assert not [path for path in host.cache.rglob("*") if re.search(r"\.\d+\.[0-9a-f]{8}$", path.name)]


def test_what_must_not_change_how_it_starts(host: Host) -> None:
    """shiv's own switches, and a PYTHONPATH with another mam or paho in it."""
    evil = host.folder / "evil"
    (evil / "paho").mkdir(parents=True)
    (evil / "mam.py").write_text("raise SystemExit('the wrong mam')\n")
    (evil / "paho" / "__init__.py").write_text("raise SystemExit('the wrong paho')\n")
    for env in ({"PYTHONPATH": str(evil)}, {"SHIV_INTERPRETER": "1"}, {"SHIV_ENTRY_POINT": "os:getcwd"},
                {"SHIV_MODULE": "this"}, {"PYTHONDONTWRITEBYTECODE": "1"}, {"PYTHONOPTIMIZE": "2"}):
        values: Dict[str, Optional[str]] = dict(env)
        starts(host("--version", env=values))
    starts(host("--version", cwd=evil))


# ---- where it lies --------------------------------------------------------------------------------------------

@pytest.fixture
def copied(tmp_path: Path, pyz: Path) -> Iterator[Path]:
    """A copy at a path with spaces and quotes in it."""
    folder = tmp_path / "a 'folder' with $paces — ü"
    folder.mkdir()
    path = folder / "mam copy.pyz"
    shutil.copyfile(pyz, path)
    path.chmod(0o755)
    yield path


AGENT = '$MAM_PUBLISH_CMD --event progress --detail "from the agent" && echo done'


def delegates(mam: Mam) -> None:
    """A job whose background parts and whose agent must find this very file again, from other folders."""
    done = mam("delegate", "--agent-session", "exec:x", "--exec", AGENT, "--prompt", "x", "--workdir", mam.folder,
               "--validate", "true", check=0, timeout=90)
    assert "from the agent" in done.stdout and "RESULT" in done.stdout, done


def test_a_copy_elsewhere_delegates(new_mam: Callable[..., Mam], copied: Path) -> None:
    mam = new_mam("host")
    mam.program = copied
    delegates(mam)
    commands = [Path("/proc", str(pid), "cmdline") for pid in mam.processes()]
    assert not [path for path in commands if path.exists() and b"_run" in path.read_bytes()]
    launchers = [path.read_text() for path in mam.registry_dir.rglob("bin/mam-*")]
    assert launchers == [] or "mam copy.pyz" in launchers[0]


def test_through_a_symlink_and_by_its_shebang(new_mam: Callable[..., Mam], copied: Path) -> None:
    mam = new_mam("host")
    (mam.bin / "python3").symlink_to(sys.executable)
    (mam.bin / "mam").symlink_to(copied)
    for words, cwd in ((["mam"], mam.workspace), (["./mam copy.pyz"], copied.parent), ([str(copied)], mam.home)):
        done = subprocess.run([*words, "--version"], env=mam.environment(), cwd=str(cwd), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", timeout=60,
                              executable=str(mam.bin / "mam") if words == ["mam"] else None)
        starts(done)
    done = subprocess.run(["./mam copy.pyz", "delegate", "--agent-session", "exec:x", "--exec", AGENT, "--prompt", "x",
                           "--validate", "true"], env=mam.environment({"MAM_REGISTRY_DIR": str(mam.registry_dir)}),
                          cwd=str(copied.parent), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, encoding="utf-8", timeout=90)
    assert done.returncode == 0 and "from the agent" in done.stdout, done
    mam.program = mam.bin / "mam"
    delegates(mam)


@pytest.mark.parametrize("how", ["renamed over", "written over", "deleted"])
def test_replaced_under_a_running_mam(new_mam: Callable[..., Mam], copied: Path, how: str) -> None:
    """An update by scp while jobs run: what runs goes on, and imports what it needs later."""
    mam = new_mam("host")
    mam.program = copied
    mam("register", "--job-id", "J", "--prompt", "x", check=0)
    watching = mam.popen("watch", "J")
    begun = mam.popen("delegate", "--agent-session", "exec:x", "--prompt", "x", "--job-id", "R", "--exec",
                      "until [ -e go ]; do sleep 0.05; done; echo over")
    begun.wait_for("started")
    content = copied.read_bytes()
    if how == "renamed over":
        (copied.parent / "new").write_bytes(b"#!/usr/bin/env python3\nprint('another program')\n")
        os.replace(copied.parent / "new", copied)
    elif how == "written over":
        copied.write_bytes(b"#!/usr/bin/env python3\nprint('another program')\n")
    else:
        copied.unlink()
    (mam.workspace / "go").write_text("")
    assert begun.wait(30).code == 0 and "over" in begun.stdout, begun
    copied.write_bytes(content)
    copied.chmod(stat.S_IRWXU)
    mam("publish", "J", "--event", "completed", "--detail", "seen", check=0)
    assert watching.wait(30).code == 0 and "seen" in watching.stdout, watching


def test_an_update_uses_its_own_cache(host: Host, builds: List[Tuple[str, Path]]) -> None:
    """Another build beside the first: both start, neither uses the other's files."""
    other = host.folder / "other.pyz"
    with zipfile.ZipFile(builds[0][1]) as old:
        source = old.read("__main__.py")
        build = re.search(rb'BUILD = "([0-9a-f]{16})"', source)
        assert build is not None
        with zipfile.ZipFile(other, "w") as new:
            for entry in old.infolist():
                new.writestr(entry, old.read(entry).replace(build.group(1), b"0" * 16)
                             if entry.filename == "__main__.py" else old.read(entry))
    starts(host("--version", pyz=builds[0][1]))
    starts(host("--version", pyz=other))
    starts(host("--version", pyz=builds[0][1]))
    assert len(list((host.home / ".shiv").glob("mam_*"))) == 2


def test_a_damaged_archive_says_so(host: Host, pyz: Path) -> None:
    """Half a copy: one line on stderr or Python's own, never a job run by half of mam."""
    half = host.folder / "half.pyz"
    half.write_bytes(pyz.read_bytes()[:-20000])
    done = host("--version", pyz=half)
    assert done.returncode != 0 and done.stdout == "", done
    content = pyz.read_bytes()
    middle = host.folder / "middle.pyz"
    middle.write_bytes(content[:len(content) // 2] + b"\0" * 2000 + content[len(content) // 2 + 2000:])
    done = host("--version", pyz=middle)
    assert done.returncode != 0 or done.stdout == "mam 5.0.0\n", done
    assert done.returncode == 0 or "Traceback" not in done.stderr, done


@pytest.mark.parametrize("home", ["writable", "none"])
def test_one_changed_byte_in_the_archive(host: Host, home: str) -> None:
    """A bad disk, a bad copy: of a changed archive nothing runs and nothing is kept."""
    member = "site-packages.tar.bz2"
    content = host.pyz.read_bytes()
    with zipfile.ZipFile(host.pyz) as archive:
        packed = archive.read(member)
    start = content.index(packed)
    for place in (0, 1, len(packed) // 2, len(packed) - 1):
        changed = bytearray(content)
        changed[start + place] ^= 0x10
        bad = host.folder / "bad.pyz"
        bad.write_bytes(changed)
        root = "/dev/null" if home == "none" else str(host.folder / f"root {place}")
        done = host("--version", pyz=bad, env={"SHIV_ROOT": root})
        assert done.returncode == 70 and done.stdout == "", done
        assert re.fullmatch(rf"mam: cannot start from .+: {re.escape(member)} is damaged.*\n", done.stderr), done
        assert not list(host.folder.glob("root */**/mam.py"))


def test_the_cache_is_not_trusted_when_others_may_write_it(host: Host) -> None:
    """A cache in a shared folder is code that others could replace: mam runs, but not from there."""
    root = host.folder / "shared"
    root.mkdir()
    root.chmod(0o777)
    env: Dict[str, Optional[str]] = {"SHIV_ROOT": str(root)}
    starts(host("--version", env=env))
    for path in root.rglob("mam.py"):
        path.write_text("raise SystemExit('not mine')\n" + "#" * (path.stat().st_size - 29))
        for compiled in root.rglob("mam.*.pyc"):
            compiled.unlink()
    starts(host("--version", env=env))


def test_background_parts_leave_nothing_behind(mam: Mam) -> None:
    delegates(mam)
    poll(lambda: not mam.processes(), 20, lambda: f"processes {mam.processes()} stay after the end of the job")

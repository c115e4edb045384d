"""Running mam as its users do: the built file, in a workspace and a home of its own, with a clean environment."""
from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Collection, Dict, List, NamedTuple, Optional, Union

from . import ROOT, clean_environment, kill_marked, marked_pids, new_mark, poll, short_folder

Text = Union[str, bytes]
PathLike = Union[str, Path]


class Result(NamedTuple):
    stdout: str
    stderr: str
    code: int
    args: List[str]

    def json(self) -> Any:
        return json.loads(self.stdout)

    def ndjson(self) -> List[Any]:
        return [json.loads(line) for line in self.stdout.splitlines() if line.strip()]

    def __str__(self) -> str:
        return (f"mam {' '.join(self.args)[:500]}\nexit {self.code}\n--- stdout\n{self.stdout[-4000:]}\n"
                f"--- stderr\n{self.stderr[-4000:]}")


class Background:
    """A mam command that runs on. Its output goes to files, so it is never held up by a full pipe."""

    def __init__(self, process: "subprocess.Popen[bytes]", args: List[str], folder: Path, traceback_ok: bool) -> None:
        self.process, self.args, self.traceback_ok = process, args, traceback_ok
        self.stdout_path, self.stderr_path = folder / "stdout", folder / "stderr"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_bytes().decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_bytes().decode("utf-8", "replace")

    @property
    def code(self) -> Optional[int]:
        """The exit code, None while it runs, negative for a signal."""
        return self.process.poll()

    def __str__(self) -> str:
        return (f"mam {' '.join(self.args)[:500]}\npid {self.pid}, exit {self.code}\n--- stdout\n"
                f"{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-4000:]}")

    def wait_for(self, text: str, timeout: float = 20.0, stream: str = "stdout") -> str:
        """Wait until `text` is in its output, and return the output so far; fail early if it ended without."""
        def seen() -> str:
            ended = self.code is not None       # before the look: output that came with the end counts
            output = self.stdout if stream == "stdout" else self.stderr
            if text in output:
                return output
            assert not ended, f"ended without {text!r} on {stream}: {self}"
            return ""
        return str(poll(seen, timeout, lambda: f"{text!r} on {stream} of {self}"))

    def wait(self, timeout: float = 60.0) -> Result:
        """Wait for its end."""
        poll(lambda: self.code is not None, timeout, lambda: f"the end of {self}")
        self.check()
        return Result(self.stdout, self.stderr, self.process.returncode, self.args)

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self, timeout: float = 20.0) -> Result:
        """SIGTERM, and wait."""
        self.send_signal(signal.SIGTERM)
        return self.wait(timeout)

    def kill(self) -> None:
        """SIGKILL its process group; what it detached lives on."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass                                # nobody left in the group
        except PermissionError:                 # macOS says this of a group of zombies
            self.process.kill()
        self.process.wait(20)

    def check(self) -> None:
        assert self.traceback_ok or "Traceback" not in self.stderr, f"traceback in {self}"


class Mam:
    """One host: a workspace, a home, an environment. Call it to run a command to its end.

    `env` is added to every run; a folder `bin` comes first in PATH, for stand-ins made by `stub`.
    """

    def __init__(self, program: PathLike, folder: Path, shiv_root: PathLike, python: Optional[str] = None) -> None:
        self.program = Path(program)
        self.python = python or os.environ.get("MAM_TEST_PYTHON") or sys.executable
        self.folder = folder
        self.workspace, self.home, self.bin = folder / "workspace", folder / "home", folder / "bin"
        # An empty .git makes it a workspace of its own, whatever lies in the folders above.
        for path in (self.workspace / ".git", self.home, self.bin):
            path.mkdir(parents=True)
        self.env: Dict[str, str] = {}
        self._held: List[int] = []
        self.mark = new_mark()
        self.background: List[Background] = []
        self._base = clean_environment(self.home, self.mark)
        self._base.update(SHIV_ROOT=str(shiv_root), PATH=f"{self.bin}{os.pathsep}{self._base['PATH']}")

    @property
    def registry_dir(self) -> Path:
        return self.workspace / ".mam"

    def environment(self, env: Optional[Dict[str, Optional[str]]] = None) -> Dict[str, str]:
        """The whole environment of a run; a value of None in `env` takes a variable away."""
        whole: Dict[str, Optional[str]] = {**self._base, **self.env, **(env or {})}
        return {name: value for name, value in whole.items() if value is not None}

    def argv(self, *args: object) -> List[str]:
        return [self.python, str(self.program), *[str(arg) for arg in args]]

    def __call__(self, *args: object, input: Optional[Text] = None, env: Optional[Dict[str, Optional[str]]] = None,
                 cwd: Optional[PathLike] = None, check: Union[None, int, Collection[int]] = None,
                 timeout: float = 60.0, traceback_ok: bool = False) -> Result:
        """Run to the end. `check` is the exit code, or the codes, it must have; None accepts any."""
        process = subprocess.Popen(
            self.argv(*args), stdin=subprocess.DEVNULL if input is None else subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=self.environment(env), cwd=str(cwd or self.workspace), start_new_session=True)
        words = [str(arg) for arg in args]
        try:
            out, err = process.communicate(input.encode("utf-8") if isinstance(input, str) else input, timeout)
        except subprocess.TimeoutExpired as expired:
            ended = process.poll()
            self._kill_group(process)
            what = "does not end" if ended is None else \
                f"ended with {ended}, but something it started keeps its output open"
            raise AssertionError(
                f"mam {' '.join(words)[:500]}: {what} within {timeout:g} s\n--- stdout\n"
                f"{(expired.stdout or b'').decode('utf-8', 'replace')[-4000:]}\n--- stderr\n"
                f"{(expired.stderr or b'').decode('utf-8', 'replace')[-4000:]}") from None
        except BaseException:
            self._kill_group(process)
            raise
        result = Result(out.decode("utf-8"), err.decode("utf-8"), process.returncode, words)
        assert traceback_ok or "Traceback" not in result.stderr, f"traceback in {result}"
        codes = [check] if isinstance(check, int) else check
        assert codes is None or result.code in codes, f"expected exit {check}: {result}"
        return result

    @staticmethod
    def _kill_group(process: "subprocess.Popen[bytes]") -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass                                # ended already; teardown looks for what it left
        process.wait(20)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

    def popen(self, *args: object, input: Optional[Text] = None, env: Optional[Dict[str, Optional[str]]] = None,
              cwd: Optional[PathLike] = None, traceback_ok: bool = False) -> Background:
        """Start in the background, in a process group of its own; it is killed at the end of the test."""
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=str(self.folder)))
        source: Any = subprocess.DEVNULL
        if input is not None:
            (folder / "stdin").write_bytes(input.encode("utf-8") if isinstance(input, str) else input)
            source = open(folder / "stdin", "rb")
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            try:
                process = subprocess.Popen(self.argv(*args), stdin=source, stdout=out, stderr=err,
                                           env=self.environment(env), cwd=str(cwd or self.workspace),
                                           start_new_session=True)
            finally:
                if input is not None:
                    source.close()
        run = Background(process, [str(arg) for arg in args], folder, traceback_ok)
        self.background.append(run)
        return run

    def stub(self, name: str, script: str) -> Path:
        """Put a program `name` first in PATH; `script` includes its #! line."""
        path = self.bin / name
        path.write_text(script)
        path.chmod(0o755)
        return path

    def job(self, job_id: str) -> Dict[str, Any]:
        """The record of a job."""
        return dict(self("get", job_id, "--json", check=0).json())

    def events(self, job_id: str) -> List[Dict[str, Any]]:
        """The log of a job, oldest first."""
        return self("logs", job_id, "--json", check=0).ndjson()

    def wait_job(self, job_id: str, status: Union[str, Collection[str]], timeout: float = 30.0) -> Dict[str, Any]:
        """Poll until the job has `status`, and return its record."""
        wanted = [status] if isinstance(status, str) else list(status)
        last: List[Any] = [None]

        def reached() -> bool:
            last[0] = self.job(job_id)
            return last[0].get("status") in wanted
        poll(reached, timeout, lambda: f"job {job_id} {wanted}, last seen {last[0]}", interval=0.1)
        return dict(last[0])

    def processes(self) -> List[int]:
        """Every living process that came from this host's commands: daemons, runners, and what they run."""
        return marked_pids(self.mark)

    def without_daemon(self) -> "Mam":
        """From now on no daemon can start in the workspace: the test holds its lock, as a daemon would."""
        self.registry_dir.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(self.registry_dir / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._held.append(descriptor)
        return self

    def close(self, traceback_ok: bool = False) -> None:
        """End every process; then complain of tracebacks in background runs and in the daemon's log."""
        for run in self.background:
            run.kill()
        kill_marked(self.mark)
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()
        for run in self.background:
            run.check()
        log = self.registry_dir / "daemon.log"
        text = log.read_bytes().decode("utf-8", "replace") if log.exists() else ""
        assert traceback_ok or "Traceback" not in text, f"traceback in daemon.log:\n{text[-4000:]}"


def built_pyz(session_folder: Path) -> Path:
    """mam.pyz of MAM_PYZ, or built by build.sh, once for all workers of this run, into `session_folder`.

    There, a rebuild in the checkout does not change the file under running tests. A failed build is not repeated
    by the other workers.
    """
    given = os.environ.get("MAM_PYZ")
    if given:
        path = Path(given).resolve()
        assert path.is_file(), f"MAM_PYZ={given}: no such file"
        return path
    target, failed = session_folder / "mam.pyz", session_folder / "build.failed"
    session_folder.mkdir(parents=True, exist_ok=True)
    with open(session_folder / "build.lock", "w") as lock:
        _lock(lock.fileno(), 300)
        if failed.exists():
            raise AssertionError(failed.read_text())
        if not target.exists():
            done = subprocess.run(["bash", "build.sh", str(target)], cwd=str(ROOT), stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
            if done.returncode != 0 or not target.is_file():
                failed.write_text(f"build.sh: exit {done.returncode}, {target.name} "
                                  f"{'made' if target.exists() else 'is missing'}\n"
                                  + done.stdout.decode("utf-8", "replace")[-8000:])
                raise AssertionError(failed.read_text())
    return target


def _lock(descriptor: int, timeout: float) -> None:
    """flock with a deadline."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            assert time.monotonic() < deadline, f"another build holds the lock for more than {timeout:g} s"
            time.sleep(0.05)


class Tmux:
    """A private tmux server. `env()` makes a plain `tmux`, and so mam, talk to it and to no other.

    The socket is named by its path: with a name (-L), tmux falls back to the user's own server when TMUX_TMPDIR
    is not there. For the same reason the folder outlives the server: a mam that is still alive finds nothing.
    """

    def __init__(self, home: Path) -> None:
        self.binary = shutil.which("tmux") or "tmux"
        # A socket path has room for about 100 bytes, less than a test's own folder may need.
        self._sockets = short_folder("tmux-")
        self.socket = self._sockets / f"tmux-{os.getuid()}" / "default"     # where TMUX_TMPDIR makes tmux look
        self.socket.parent.mkdir(mode=0o700)
        self.mark = new_mark()
        self._environment = dict(clean_environment(home, self.mark), TMUX_TMPDIR=str(self._sockets),
                                 TERM="xterm-256color", SHELL="/bin/sh")

    def env(self) -> Dict[str, str]:
        return {"TMUX_TMPDIR": str(self._sockets)}

    def run(self, *args: str, check: bool = True, input: Optional[bytes] = None) -> str:
        """Run a tmux command against this server and return what it printed."""
        source: Dict[str, Any] = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
        done = subprocess.run([self.binary, "-S", str(self.socket), "-f", "/dev/null", *args], env=self._environment,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=30, **source)
        assert not check or done.returncode == 0, f"tmux {args}: {done.stderr.decode('utf-8', 'replace')}"
        return str(done.stdout, "utf-8", "replace")

    def new_pane(self, command: str = "", name: str = "", width: int = 120, height: int = 40, cwd: PathLike = "",
                 env: Optional[Dict[str, str]] = None) -> str:
        """Run `command` (default: sh) in a session of its own and return the pane's id."""
        words = ["new-session", "-d", "-P", "-F", "#{pane_id}", "-x", str(width), "-y", str(height)]
        words += ["-s", name] if name else []
        words += ["-c", str(cwd)] if cwd else []
        for variable, value in (env or {}).items():
            words += ["-e", f"{variable}={value}"]
        return self.run(*words, command or "/bin/sh").strip()

    def capture(self, pane: str, history: bool = False) -> str:
        """The text on the pane's screen, wrapped lines joined; with `history` also what scrolled away."""
        return self.run("capture-pane", "-p", "-J", "-t", pane, *(["-S", "-"] if history else []))

    def wait_for(self, pane: str, text: str, timeout: float = 20.0) -> str:
        """Wait until `text` is on the screen."""
        last = [""]

        def seen() -> bool:
            last[0] = self.capture(pane)
            return text in last[0]
        poll(seen, timeout, lambda: f"{text!r} in pane {pane}:\n{last[0]}")
        return last[0]

    def type(self, pane: str, text: str, enter: bool = True) -> None:
        """Type `text` as keys, then Enter."""
        self.run("send-keys", "-t", pane, "-l", "--", text)
        if enter:
            self.run("send-keys", "-t", pane, "Enter")

    def pane(self, pane: str, format: str) -> str:
        """One fact of a pane, such as "#{pane_pid}"."""
        return self.run("display-message", "-p", "-t", pane, format).strip()

    def panes(self) -> List[str]:
        return self.run("list-panes", "-a", "-F", "#{pane_id}", check=False).split()

    def close(self) -> None:
        self.run("kill-server", check=False)
        kill_marked(self.mark)

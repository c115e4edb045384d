"""mam from the inside: the very file that is packed in the artefact under test, imported, patched, or run by a crowd.

Users run the artefact; a test that has to stop mam between two of its own steps, or to have many of them take the
same step at the same moment, runs a small program that imports it.
"""
from __future__ import annotations

import copy
import fcntl
import importlib.util
import io
import itertools
import json
import os
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, List, Optional, Sequence

from . import cli

_numbers = itertools.count(1)

_HEAD = """\
import os, sys
sys.path.insert(0, {packages!r})
import mam
mam.SELF_PATH = {pyz!r}
"""

# Forked, so that all are past their start-up when the gate opens. Each one's output goes to files of its own.
_CROWD = """
import json, signal, sqlite3
folder = sys.argv[1]
with open(os.path.join(folder, "orders"), encoding="utf-8") as file:
    orders = json.load(file)
{before}
def each(number, argv):
    {each}
gate, opener = os.pipe()
children = []
for number, argv in enumerate(orders):
    pid = os.fork()
    if pid == 0:
        os.close(opener)
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(os.path.join(folder, "%d.%s" % (number, name)), os.O_WRONLY | os.O_CREAT, 0o600),
                    descriptor)
        code = 99
        try:
            os.read(gate, 1)
            code = each(number, argv)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            import traceback
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code or 0)
    children.append(pid)
os.close(opener)
for pid in children:
    _, status = os.waitpid(pid, 0)
    print(os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status))
"""


class Inside:
    """What is packed in `pyz`, unpacked once per run into `folder`."""

    _module: Optional[ModuleType] = None        # imported once, whoever asks

    def __init__(self, pyz: Path, folder: Path) -> None:
        self.pyz = pyz
        self.packages = folder / "inside" / "site-packages"
        with open(folder / "inside.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (self.packages / "whole").exists():
                with zipfile.ZipFile(str(pyz)) as archive, \
                        tarfile.open(fileobj=io.BytesIO(archive.read("site-packages.tar.bz2"))) as sources:
                    sources.extractall(str(folder / "inside"))
                (self.packages / "whole").touch()

    @property
    def module(self) -> Any:
        """mam, imported here under another name: other tests may have imported another file."""
        if Inside._module is None:
            spec = importlib.util.spec_from_file_location("mam_inside", str(self.packages / "mam.py"))
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules["mam_inside"] = module
            spec.loader.exec_module(module)
            Inside._module = module
        return Inside._module

    def registry(self, host: cli.Mam, create: bool = True) -> Any:
        """The registry of a host, opened here. Close it, or use it with `with`."""
        return self.module.Registry(str(host.registry_dir), create)

    def add_jobs(self, host: cli.Mam, *job_ids: str, session: str = "queue:q", **columns: Any) -> None:
        """Register jobs without a start of mam for each."""
        with self.registry(host) as registry:
            for job_id in job_ids:
                registry.register(new_job(job_id, session, **columns))

    def _program(self, host: cli.Mam, code: str) -> Path:
        path = host.folder / f"program-{next(_numbers)}.py"
        path.write_text(_HEAD.format(packages=str(self.packages), pyz=str(self.pyz)) + code)
        return path

    def patched(self, host: cli.Mam, code: str) -> cli.Mam:
        """The same host, where `code` runs between the import of mam and its start."""
        other = copy.copy(host)
        other.program = self._program(host, code + "\nsys.exit(mam.main())\n")
        return other

    def run(self, host: cli.Mam, code: str, *args: object, timeout: float = 110.0) -> str:
        """Run a program that imports mam, in the host's environment, to its good end; what it printed."""
        other = copy.copy(host)
        other.program = self._program(host, code)
        return other(*args, timeout=timeout, check=0).stdout

    def crowd(self, host: cli.Mam, orders: Sequence[Sequence[object]], each: str = "return mam.main(argv)",
              before: str = "", timeout: float = 110.0) -> List[cli.Result]:
        """Do `each(number, argv)` for every order at the same moment, in a process each; their results in order."""
        folder = host.folder / f"crowd-{next(_numbers)}"
        folder.mkdir()
        words = [[str(word) for word in order] for order in orders]
        (folder / "orders").write_text(json.dumps(words))
        code = _CROWD.format(each=textwrap.indent(textwrap.dedent(each), "    ").lstrip(), before=before)
        codes = self.run(host, code, folder, timeout=timeout).split()
        results = []
        for number, code in enumerate(codes):
            out, err = ((folder / f"{number}.{name}").read_bytes().decode("utf-8", "replace")
                        for name in ("out", "err"))
            assert "Traceback" not in err, err
            results.append(cli.Result(out, err, int(code), words[number]))
        assert len(results) == len(orders)
        return results


def new_job(job_id: str, session: str = "queue:q", **columns: Any) -> Dict[str, Any]:
    """The columns of a job as `Registry.register` takes them."""
    record: Dict[str, Any] = {
        "job_id": job_id, "title": "work", "prompt": "work", "agent": "claude-code", "agent_session": session,
        "role": "Worker", "broker": None, "topic_prefix": f"python/mqtt/jobs/{job_id}", "timeout_sec": 3600,
        "idle_timeout_sec": 120, "heartbeat_sec": 30, "heartbeat_misses": 4, "ack_timeout_sec": 180,
        "expected_artifacts": "[]", "job_type": "direct", "max_iterations": 5, "attempt_id": 1,
        "transport": "queue", "workdir": "/", "wire": None}
    record.update(columns)
    return record


def rows(registry_dir: Path, sql: str, *params: object) -> List[Any]:
    """What a question to the registry's file answers, asked without mam."""
    import sqlite3
    database = sqlite3.connect(f"file:{registry_dir / 'mam.db'}?mode=rw", uri=True, timeout=20)
    try:
        return database.execute(sql, params).fetchall()
    finally:
        database.close()


def as_nobody(code: str = "") -> str:
    """For `patched`: go on as the user 65534, who owns nothing here."""
    # Imported before: the interpreter's own folder may be closed to others.
    return code + """
import argparse, binascii, ctypes, datetime, difflib, errno, fcntl, hashlib, hmac, json, select, signal, sqlite3
import encodings.ascii, encodings.latin_1, encodings.utf_16_be, encodings.utf_8_sig, subprocess, traceback
mam.build_parser("list")
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
"""


def run_git(*args: str, cwd: Path) -> str:
    done = subprocess.run(["git", *args], cwd=str(cwd), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=60,
                          env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(cwd),
                               "GIT_CONFIG_NOSYSTEM": "1", "GIT_CEILING_DIRECTORIES": str(cwd.parent)})
    assert done.returncode == 0, done.stdout.decode("utf-8", "replace")
    return done.stdout.decode("utf-8", "replace")

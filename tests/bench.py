"""What things cost: `make bench`, or `MAM_PYZ=... python tests/bench.py [--quick]`.

Every row is a median of runs that alternate with the baseline's, so a busy machine slows both; the ratios carry
over to other machines, the milliseconds do not. A missed bar is shown as MISS and does not fail the run.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import marshal
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from support import ROOT, clean_environment, kill_marked, new_mark
from support.brokers import BROKERS, Broker

PYTHON = sys.executable         # of the venv: no shim, and no .pth files of other packages that slow each start

RSS_UNIT = 1024 * 1024 if sys.platform == "darwin" else 1024       # of ru_maxrss, to MB

BARE_PAHO = """
import os
import paho.mqtt.client as mqtt
client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
client.connect("127.0.0.1", int(os.environ["MQTT_PORT"]))
client.loop_start()
client.publish("python/mqtt/jobs/bench/events", b"x" * 300, qos=1).wait_for_publish(10)
client.disconnect()
client.loop_stop()
"""

# Records as fast as it can, one transaction for each event, by the function every publisher uses.
WRITER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import mam
settings = mam.load_settings(sys.argv[2])
with mam.Registry(settings.registry_dir) as registry:
    print(time.perf_counter())
    for number in range(int(sys.argv[4])):
        mam.record(registry, settings, sys.argv[3], "progress", source="worker", detail="event %d" % number)
    print(time.perf_counter(), flush=True)
    mam.record(registry, settings, sys.argv[3], "completed", source="worker", detail="all")
"""

# In processor seconds, so that a busy machine changes nothing; beside it what json and hmac alone take.
VERIFIER = """
import hmac, json, sys, time
sys.path.insert(0, sys.argv[1])
import mam
key = mam.random_token()
data = {"dispatch_token": mam.random_hex(32), "attempt_id": 1, "custom_metric": 42}
raws = [mam.sign(mam.event_payload("918b0612", seq, "progress", mam.utc_now(), "section %d of the report is done" % seq,
                                   data), key) for seq in range(1, 2001)]
topic, prefix = "python/mqtt/jobs/918b0612/events", "python/mqtt/jobs/918b0612"
for _ in range(int(sys.argv[2])):
    start = time.process_time()
    for raw in raws:
        mam.open_envelope(topic, raw, prefix, "events", key)
    middle = time.process_time()
    for raw in raws:
        json.loads(raw.decode("utf-8"))
        hmac.digest(key.encode("ascii"), raw, "sha256")
    print(len(raws) / (middle - start), len(raws) / (time.process_time() - middle))
"""


# Starts programs for the bench: a process inherits its parent's peak memory, so the parent has to be small.
STARTER = """
import marshal, os, sys, time
while True:
    try:
        argv, env, folder, out = marshal.load(sys.stdin.buffer)
    except EOFError:
        break
    start = time.perf_counter()
    pid = os.fork()
    if not pid:
        try:
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 1)
            os.dup2(1, 2)
            os.execve(argv[0], argv, env)
        finally:
            os._exit(127)
    _, status, usage = os.wait4(pid, 0)
    end = time.perf_counter()
    marshal.dump((end - start, end, os.waitstatus_to_exitcode(status), usage.ru_maxrss), sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""


class Run(NamedTuple):
    ms: float
    peak_mb: float


class Row(NamedTuple):
    what: str
    value: str
    ratio: str
    bar: str
    verdict: str
    peak: str


class Case(NamedTuple):
    """Something to time: `argv` anew for every run, after `prepare`, which is not timed."""
    name: str
    argv: Callable[[], List[str]]
    env: Dict[str, str]
    prepare: Callable[[], None] = lambda: None
    codes: Tuple[int, ...] = (0,)


class Starter:
    """A small process that starts programs, one at a time, waits for each and tells what it took."""

    def __init__(self, env: Dict[str, str], workspace: Path, folder: Path) -> None:
        self.env, self.workspace = env, str(workspace)
        descriptor, self.out = tempfile.mkstemp(dir=str(folder))
        os.close(descriptor)
        self.process = subprocess.Popen([PYTHON, "-I", "-S", "-c", STARTER], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, env=env)

    def begin(self, argv: List[str], env: Optional[Dict[str, str]] = None) -> None:
        assert self.process.stdin is not None
        marshal.dump((argv, {**self.env, **(env or {})}, self.workspace, self.out), self.process.stdin)
        self.process.stdin.flush()

    def end(self, name: str, codes: Tuple[int, ...] = (0,)) -> Tuple[Run, float]:
        """Wait for the end: (what it took, when it was by perf_counter, which all processes share)."""
        assert self.process.stdout is not None
        seconds, moment, code, peak = marshal.load(self.process.stdout)
        assert code in codes, f"{name}: exit {code}\n{self.text()[-2000:]}"
        return Run(seconds * 1000, peak / RSS_UNIT), moment

    def text(self) -> str:
        return Path(self.out).read_text("utf-8", "replace")


class Bench:
    def __init__(self, pyz: Path, folder: Path, runs: int) -> None:
        self.pyz, self.folder, self.runs = pyz, folder, runs
        self.home, self.workspace = folder / "home", folder / "workspace"
        for path in (self.home, self.workspace / ".git"):
            path.mkdir(parents=True)
        self.mark = new_mark()
        self.base = clean_environment(self.home, self.mark)
        self.base.update(SHIV_ROOT=str(folder / "shiv"))
        self.rows: List[Row] = []
        self._starter: Optional[Starter] = None

    # -- running -------------------------------------------------------------------------------------------

    def mam(self, *args: str) -> List[str]:
        return [PYTHON, str(self.pyz), *args]

    def call(self, *args: str, env: Optional[Dict[str, str]] = None, codes: Tuple[int, ...] = (0,)) -> str:
        """Run mam once, untimed, and return what it printed."""
        done = subprocess.run(self.mam(*args), env={**self.base, **(env or {})}, cwd=str(self.workspace),
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              encoding="utf-8")
        assert done.returncode in codes, f"mam {args}: exit {done.returncode}: {done.stderr}"
        return done.stdout

    def starter(self) -> "Starter":
        return Starter(self.base, self.workspace, self.folder)

    def once(self, case: Case) -> Run:
        """Start, wait, and tell the time and the peak memory of that process."""
        case.prepare()
        if self._starter is None:
            self._starter = self.starter()
        self._starter.begin(case.argv(), case.env)
        return self._starter.end(case.name, case.codes)[0]

    def compare(self, *cases: Case, runs: Optional[int] = None) -> Dict[str, Run]:
        """The medians of cases that take turns, so that what slows the machine slows all of them."""
        found: Dict[str, List[Run]] = {case.name: [] for case in cases}
        for case in cases:
            self.once(case)                     # warm: caches of files, first compilation
        for _ in range(runs or self.runs):
            for case in cases:
                found[case.name].append(self.once(case))
        return {name: Run(statistics.median(run.ms for run in taken), max(run.peak_mb for run in taken))
                for name, taken in found.items()}

    # -- the table -----------------------------------------------------------------------------------------

    def row(self, what: str, run: Run, base: Optional[Tuple[str, Run]] = None, bar: Optional[float] = None) -> None:
        ratio = run.ms / base[1].ms if base else None
        self.add(what, f"{run.ms:.1f} ms", "" if ratio is None or base is None else f"{ratio:.2f} x {base[0]}",
                 "" if bar is None else f"<= {bar:g} x", None if bar is None or ratio is None else ratio <= bar,
                 f"{run.peak_mb:.0f} MB")

    def add(self, what: str, value: str, ratio: str = "", bar: str = "", passed: Optional[bool] = None,
            peak: str = "") -> None:
        self.rows.append(Row(what, value, ratio, bar, "" if passed is None else "pass" if passed else "MISS", peak))
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{what}")

    def table(self) -> str:
        rows = [Row("", "median", "ratio (same run)", "bar", "", "peak"), *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(Row._fields))]
        return "\n".join("  ".join(cell.rjust(width) if column == 1 else cell.ljust(width) for column, (cell, width)
                                   in enumerate(zip(row, widths))).rstrip() for row in rows)


# ---- what is measured ----------------------------------------------------------------------------------------

def interpreter(bench: Bench) -> None:
    size = bench.pyz.stat().st_size
    bench.add("mam.pyz", f"{size} bytes", "", "< 250000", size < 250000)
    bare = Case("python", lambda: [PYTHON, "-c", "pass"], {})
    bench.row("python -c pass", bench.compare(bare)["python"])


def local_and_wire(bench: Bench, servers: Sequence[Broker]) -> None:
    """`mam list`, and `mam publish` with and without a broker, against a bare script that sends one message."""
    publish = ["publish", "--event", "progress", "--detail", "section 1 done", "--job"]
    program = shutil.which("mosquitto_pub")
    bench.call("register", "--prompt", "local", "--job-id", "local")
    cases = [Case("local", lambda: bench.mam(*publish, "local"), {}), Case("list", lambda: bench.mam("list"), {})]
    for server in servers:
        kind, wire = server.kind, server.env()
        bench.call("register", "--prompt", "wire", "--job-id", kind, env=wire)
        cases += [Case(f"bare {kind}", lambda: [PYTHON, "-c", BARE_PAHO], wire),
                  Case(f"wire {kind}", lambda kind=kind: bench.mam(*publish, kind), wire)]
        if program:
            words = [program, "-h", "127.0.0.1", "-p", str(server.port), "-q", "1", "-m", "x" * 300, "-t",
                     "python/mqtt/jobs/bench/events"]
            cases.append(Case(f"pub {kind}", lambda words=words: words, {}))
    found = bench.compare(*cases)
    bare = {server.kind: (f"bare paho, {server.kind}", found[f"bare {server.kind}"]) for server in servers}
    for kind, base in bare.items():
        bench.row(f"bare paho script, {kind}", base[1])
        if program:
            bench.row(f"mosquitto_pub -q 1, {kind}", found[f"pub {kind}"], base)
    fastest = min(bare.values(), key=lambda base: base[1].ms) if bare else None
    bench.row("mam publish, no broker", found["local"], fastest, 0.7)
    bench.row("mam list", found["list"], fastest, 0.7)
    for kind, base in bare.items():
        bench.row(f"mam publish through {kind}", found[f"wire {kind}"], base, 1.5)


def first_starts(bench: Bench) -> None:
    cold = bench.folder / "cold"

    def empty() -> None:
        shutil.rmtree(cold, ignore_errors=True)
    for words in (["--version"], ["list"]):
        name = "mam " + words[0]
        found = bench.compare(Case("first", lambda: bench.mam(*words), {"SHIV_ROOT": str(cold)}, empty),
                              Case("warm", lambda: bench.mam(*words), {}))
        bench.row(f"{name}, warm", found["warm"])
        bench.row(f"{name}, first start", found["first"], ("warm", found["warm"]), 2.5)


def fill(bench: Bench, registry: Path, jobs: int, pending: int = 50) -> None:
    """A registry with many jobs, nearly all ended; the pending ones are the newest. Copies of one job of mam's own."""
    bench.call("--registry-dir", str(registry), "register", "--prompt", "copied", "--agent-session", "queue:bench",
               "--job-id", "model")
    with contextlib.closing(sqlite3.connect(registry / "mam.db")) as database, database:
        names = [row[1] for row in database.execute("PRAGMA table_info(jobs)") if row[1] != "n"]
        model = dict(zip(names, database.execute(f"SELECT {', '.join(names)} FROM jobs").fetchone()))

        def rows() -> Iterator[Tuple[Any, ...]]:
            for number in range(jobs):
                job = {**model, "job_id": f"j{number:07d}"}
                if number < jobs - pending:
                    job.update(status="completed", finished_at=job["created_at"], last_seq=2)
                yield tuple(job[name] for name in names)
        database.executemany(f"INSERT INTO jobs({', '.join(names)}) VALUES({', '.join('?' * len(names))})", rows())
        names = [row[1] for row in database.execute("PRAGMA table_info(attempts)") if row[1] != "job_id"]
        database.execute(f"INSERT INTO attempts(job_id, {', '.join(names)}) SELECT j.job_id, a.{', a.'.join(names)} "
                         "FROM jobs j, attempts a WHERE a.job_id = 'model' AND j.job_id <> 'model'")
        names = ["attempt_id", "event", "source", "timestamp", "logged_at", "detail", "payload"]
        database.execute(f"INSERT INTO events(job_id, {', '.join(names)}) SELECT j.job_id, e.{', e.'.join(names)} "
                         "FROM jobs j, events e WHERE e.job_id = 'model' AND j.job_id <> 'model'")


def many_jobs(bench: Bench, large: int) -> None:
    """A pending job is found as fast among many ended ones as among few."""
    sizes = {"small": 1000, "large": large}
    for name, jobs in sizes.items():
        fill(bench, bench.folder / name, jobs)
    for what, words in (("pick", ["pick", "--agent-session", "queue:bench"]),
                        ("list --status pending", ["list", "--status", "pending"])):
        found = bench.compare(*[
            Case(name, lambda name=name: bench.mam("--registry-dir", str(bench.folder / name), *words), {},
                 lambda name=name: again(bench.folder / name)) for name in sizes])
        base = (f"{sizes['small']:,} jobs", found["small"])
        bench.row(f"mam {what}, {sizes['small']:,} jobs", found["small"])
        bench.row(f"mam {what}, {large:,} jobs", found["large"], base, 1.5 if what == "pick" else None)


def again(registry: Path) -> None:
    """Make pending again what a pick has taken, so that every run finds the same registry."""
    with contextlib.closing(sqlite3.connect(registry / "mam.db", timeout=30)) as database, database:
        database.execute("UPDATE jobs SET status = 'pending', claimed_at = NULL, claimed_mono = NULL "
                         "WHERE status = 'running'")


def following(bench: Bench, module: Path, events: int, rounds: int) -> None:
    """From the first commit to the last line on a follower's stdout, while the writer goes as fast as it can."""
    rates, writers, lags, peaks, writer_peaks = [], [], [], [], []
    watching, writing = bench.starter(), bench.starter()
    for number in range(rounds):
        job = f"follow{number}"
        bench.call("register", "--prompt", "x", "--job-id", job)
        watching.begin(bench.mam("watch", job))
        writing.begin([PYTHON, "-c", WRITER, str(module), str(bench.workspace / ".mam"), job, str(events)])
        written, _ = writing.end("writer")
        began, last = map(float, writing.text().split())
        followed, end = watching.end("mam watch")
        lines = watching.text().count(" seq=")
        assert lines == events + 1, f"the follower showed {lines} of {events + 1} events"
        rates.append(events / (end - began))
        writers.append(events / (last - began))
        lags.append((end - last) * 1000)
        peaks.append(followed.peak_mb)
        writer_peaks.append(written.peak_mb)
    bench.add("events recorded by one writer", f"{statistics.median(writers):,.0f} /s",
              peak=f"{max(writer_peaks):.0f} MB")
    bench.add("events from commit to a follower's stdout", f"{statistics.median(rates):,.0f} /s",
              f"{statistics.median(rates) / statistics.median(writers):.2f} x the writer", peak=f"{max(peaks):.0f} MB")
    bench.add("follower's end after the last commit", f"{statistics.median(lags):.1f} ms")


def verifying(bench: Bench, module: Path) -> None:
    starter = bench.starter()
    starter.begin([PYTHON, "-c", VERIFIER, str(module), str(max(bench.runs, 5))])
    run, _ = starter.end("verifier")
    words = list(map(float, starter.text().split()))
    rate, plain = statistics.median(words[::2]), statistics.median(words[1::2])
    bench.add("signed events verified, per processor second", f"{rate:,.0f} /s",
              f"{plain / rate:.2f} x json.loads + hmac", ">= 15000 /s", rate >= 15000, f"{run.peak_mb:.0f} MB")


def delegating(bench: Bench) -> None:
    found = bench.compare(
        Case("delegate", lambda: bench.mam(
            "delegate", "--agent-session", "exec:x", "--exec", "true", "--prompt", "x"), {}),
        Case("version", lambda: bench.mam("--version"), {}), runs=max(5, bench.runs))
    bench.row("mam delegate --agent-session exec:x --exec true", found["delegate"], ("mam --version", found["version"]))


def unpacked(bench: Bench) -> Path:
    """The folder in which `import mam` finds the module of this very pyz."""
    bench.call("--version")
    return next((bench.folder / "shiv").glob("mam_*/site-packages"))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Times mam against baselines of the same run.")
    parser.add_argument("--quick", action="store_true", help="fewer runs and 10,000 instead of 100,000 jobs")
    parser.add_argument("--json", action="store_true", help="the rows as JSON")
    args = parser.parse_args(argv)
    pyz = Path(os.environ.get("MAM_PYZ") or ROOT / "mam.pyz").resolve()
    if not pyz.is_file():
        parser.error(f"no {pyz}: set MAM_PYZ, or run `make bench`")
    folder = Path(tempfile.mkdtemp(prefix="mam-bench-"))
    bench = Bench(pyz, folder, 7 if args.quick else 21)
    servers: List[Broker] = []
    try:
        module = unpacked(bench)
        interpreter(bench)
        for kind, server_class in BROKERS.items():
            try:
                servers.append(server_class(folder / kind, persistence=False).start())
            except BaseException as error:      # pytest's skip: the program is not installed
                if type(error).__name__ != "Skipped":
                    raise
                bench.add(f"through {kind}", "not installed")
        local_and_wire(bench, servers)
        first_starts(bench)
        many_jobs(bench, 10_000 if args.quick else 100_000)
        following(bench, module, 500 if args.quick else 3000, 3)
        verifying(bench, module)
        delegating(bench)
    finally:
        for server in servers:
            server.stop()
        kill_marked(bench.mark)
        shutil.rmtree(folder, ignore_errors=True)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    if args.json:
        print(json.dumps([row._asdict() for row in bench.rows], indent=2))
        return 0
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians of "
          f"{bench.runs} runs each, in turn with their baseline\n")
    print(bench.table())
    missed = [row.what for row in bench.rows if row.verdict == "MISS"]
    print("\n" + (f"{len(missed)} missed: {'; '.join(missed)}" if missed else "every bar is met"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What things cost: `make bench`, or `MAM_PYZ=... python tests/bench.py [--quick]`.

Every row is a median of runs that alternate with the baseline's, so a busy machine slows both; the ratios carry
over to other machines, the milliseconds do not. A missed bar is shown as MISS and does not fail the run.

The first table is about commands, the second about the daemon, the third about agents in panes. "No daemon" means
that none can be started: the bench holds its lock. "A daemon at hand" is one that lives for the whole comparison and
is connected.
"""
from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import marshal
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from support import ROOT, clean_environment, kill_marked, new_mark, poll
from support.agents import install
from support.brokers import BROKERS, Broker
from support.cli import Tmux
from support.inside import new_job

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

# Registers jobs and records what workers said of them, as every publisher does; sends nothing.
MAKER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import mam
settings = mam.load_settings(sys.argv[2])
with open(sys.argv[3]) as file:
    jobs, events, armed, watched = json.load(file)
watch = mam.identity_of(watched)
with mam.Registry(settings.registry_dir, True) as registry:
    for job in jobs:
        registry.register(job)
    for job_id in armed:
        mam.record(registry, settings, job_id, "started", source="worker",
                   extra={"heartbeat_sec": registry.job(job_id).heartbeat_sec, "watch": watch})
    for number in range(events):
        for job in jobs:
            mam.record(registry, settings, job["job_id"], "progress", source="worker", detail="event %d" % number)
"""

# The messages of a remote job, signed with the key of its registration, written to a file one behind the other.
SIGNER = """
import marshal, sys
sys.path.insert(0, sys.argv[1])
import mam
with mam.Registry(sys.argv[2]) as registry:
    token, key = registry.attempt_keys(sys.argv[3])[1]
data = {"dispatch_token": token, "attempt_id": 1}
with open(sys.argv[5], "wb") as file:
    marshal.dump([mam.sign(mam.event_payload(sys.argv[3], seq, "progress" if seq > 1 else "started", mam.utc_now(),
                                             "event %d" % seq, data), key)
                  for seq in range(1, int(sys.argv[4]) + 1)], file)
"""

# A bare paho loop that publishes messages with QoS 1 and paho's own window; prints the first and last moment.
BARE_SENDER = """
import marshal, os, sys, time
import paho.mqtt.client as mqtt
with open(sys.argv[1], "rb") as file:
    messages = marshal.load(file)
client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
acked = []
client.on_publish = lambda *_: acked.append(1)
client.connect("127.0.0.1", int(os.environ["MQTT_PORT"]))
client.loop_start()
while not client.is_connected():
    time.sleep(0.001)
print(time.perf_counter())
for message in messages:
    client.publish(sys.argv[2], message, qos=1)
while len(acked) < len(messages):
    time.sleep(0.001)
print(time.perf_counter(), flush=True)
client.disconnect()
client.loop_stop()
"""

# A bare paho loop that receives and counts; prints the moment of the last.
BARE_RECEIVER = """
import os, sys, time
import paho.mqtt.client as mqtt
left = [int(sys.argv[1])]
def received(client, userdata, message):
    left[0] -= 1
    if not left[0]:
        print(time.perf_counter(), flush=True)
        client.disconnect()
client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
client.on_connect = lambda *_: client.subscribe(sys.argv[2], qos=1)
client.on_subscribe = lambda *_: print("ready", flush=True)
client.on_message = received
client.connect("127.0.0.1", int(os.environ["MQTT_PORT"]))
client.loop_forever()
"""

# A bare paho request and its reply, with QoS 1, between two processes that are connected: the second answers the
# first, which prints what each round took in seconds.
BARE_REPLIER = """
import os, sys
import paho.mqtt.client as mqtt
client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
client.on_connect = lambda *_: client.subscribe("bench/request", qos=1)
client.on_subscribe = lambda *_: print("ready", flush=True)
client.on_message = lambda client, userdata, message: client.publish("bench/reply", message.payload, qos=1)
client.connect("127.0.0.1", int(os.environ["MQTT_PORT"]))
client.loop_forever()
"""
BARE_REQUESTER = """
import os, sys, time
import paho.mqtt.client as mqtt
took = []
def ask():
    took.append(time.perf_counter())
    client.publish("bench/request", b"x" * 1000, qos=1)
def replied(client, userdata, message):
    took[-1] = time.perf_counter() - took[-1]
    ask() if len(took) < int(sys.argv[1]) else client.disconnect()
client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
client.on_connect = lambda *_: client.subscribe("bench/reply", qos=1)
client.on_subscribe = lambda *_: ask()
client.on_message = replied
client.connect("127.0.0.1", int(os.environ["MQTT_PORT"]))
client.loop_forever()
print(*took)
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
keys = {1: (data["dispatch_token"], key)}
for _ in range(int(sys.argv[2])):
    start = time.process_time()
    for raw in raws:
        mam.accept_message(topic, raw, prefix, "events", keys)
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
        self.tables: Dict[str, List[Row]] = {}
        self.rows: List[Row] = []
        self._starter: Optional[Starter] = None
        self._held: List[int] = []

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

    def script(self, source: str, *args: object, env: Optional[Dict[str, str]] = None) -> str:
        """Run a program of this file to its good end; what it printed."""
        return subprocess.run([PYTHON, "-c", source, *map(str, args)], env={**self.base, **(env or {})}, check=True,
                              cwd=str(self.workspace), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              encoding="utf-8").stdout

    # -- with and without a daemon -------------------------------------------------------------------------

    def forbid_daemon(self, registry: Path) -> Dict[str, str]:
        """From now on no daemon can be started for a registry: we hold its lock. The environment that names it."""
        registry.mkdir(mode=0o700, exist_ok=True)
        self._held.append(os.open(registry / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        fcntl.flock(self._held[-1], fcntl.LOCK_EX)
        return {"MAM_REGISTRY_DIR": str(registry)}

    def keep_daemon(self, registry: Path, wire: Dict[str, str]) -> Dict[str, str]:
        """A daemon that stays, for a job that is said to be alive as long as we are; connected, with a broker."""
        env = {**wire, "MAM_REGISTRY_DIR": str(registry)}
        self.call("register", "--prompt", "stay", "--job-id", "stay", env=env)
        self.call("publish", "stay", "--event", "started", "--heartbeat", "30", "--watch-pid", str(os.getpid()),
                  env=env)

        def ready() -> bool:
            status = json.loads(self.call("daemon", "status", "--json", env=env, codes=(0, 1)) or "{}")
            return bool(status.get("turning")) and all(line["state"] == "up" for line in status["lines"].values())
        poll(ready, 30, "a daemon at hand")
        return env

    @contextlib.contextmanager
    def daemon(self, registry: Path, env: Dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
        """A daemon in the foreground, ended by SIGTERM behind the block."""
        with open(self.folder / "daemon.out", "wb") as out:
            process = subprocess.Popen(self.mam("--registry-dir", str(registry), "daemon", "run"), stdout=out,
                                       stderr=out, stdin=subprocess.DEVNULL, cwd=str(self.workspace),
                                       env={**self.base, **env})
        try:
            yield process
            assert process.poll() is None, (self.folder / "daemon.out").read_text("utf-8", "replace")[-2000:]
        finally:
            process.terminate()
            process.wait(30)

    def make(self, module: Path, registry: Path, jobs: Sequence[Dict[str, Any]], events: int = 0,
             armed: Sequence[str] = ()) -> None:
        """A registry with these jobs, `events` progress events of each, and a beat for each of `armed`."""
        plan = self.folder / "plan.json"
        plan.write_text(json.dumps([list(jobs), events, list(armed), os.getpid()]))
        self.script(MAKER, module, registry, plan, env={"MAM_REGISTRY_DIR": str(registry)})

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

    # -- the tables ----------------------------------------------------------------------------------------

    def begin_table(self, title: str) -> None:
        self.rows = self.tables.setdefault(title, [])

    def row(self, what: str, run: Run, base: Optional[Tuple[str, Run]] = None, bar: Optional[float] = None) -> None:
        ratio = run.ms / base[1].ms if base else None
        self.add(what, f"{run.ms:.1f} ms", "" if ratio is None or base is None else f"{ratio:.2f} x {base[0]}",
                 "" if bar is None else f"<= {bar:g} x", None if bar is None or ratio is None else ratio <= bar,
                 f"{run.peak_mb:.0f} MB")

    def rate(self, what: str, count: int, seconds: Sequence[float], base: Optional[Tuple[str, Sequence[float]]] = None,
             bar: Optional[float] = None, peak: Optional[float] = None) -> None:
        """A rate over the median of some times, and how it compares with a baseline's."""
        middle = statistics.median(seconds)
        ratio = statistics.median(base[1]) / middle if base else None
        self.add(what, f"{count / middle:,.0f} /s", "" if ratio is None or base is None else f"{ratio:.2f} x {base[0]}",
                 "" if bar is None else f">= {bar:g} x", None if bar is None or ratio is None else ratio >= bar,
                 "" if peak is None else f"{peak:.0f} MB")

    def add(self, what: str, value: str, ratio: str = "", bar: str = "", passed: Optional[bool] = None,
            peak: str = "") -> None:
        self.rows.append(Row(what, value, ratio, bar, "" if passed is None else "pass" if passed else "MISS", peak))
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{what}")

    @staticmethod
    def table(found: Sequence[Row]) -> str:
        rows = [Row("", "median", "ratio (same run)", "bar", "", "peak"), *found]
        widths = [max(len(row[column]) for row in rows) for column in range(len(Row._fields))]
        return "\n".join("  ".join(cell.rjust(width) if column == 1 else cell.ljust(width) for column, (cell, width)
                                   in enumerate(zip(row, widths))).rstrip() for row in rows)


# ---- what is measured ----------------------------------------------------------------------------------------

def interpreter(bench: Bench) -> None:
    size = bench.pyz.stat().st_size
    bench.add("mam.pyz", f"{size} bytes", "", "< 250000", size < 250000)
    bare = Case("python", lambda: [PYTHON, "-c", "pass"], {})
    bench.row("python -c pass", bench.compare(bare)["python"])


def local_and_wire(bench: Bench, servers: Sequence[Broker]) -> Dict[str, Tuple[Tuple[str, Run], Run]]:
    """`mam list`, and `mam publish` with and without a broker and a daemon, against a bare script that sends one
    message. Returns, by kind of broker, the baseline and what a publish with a daemon took."""
    publish = ["publish", "--event", "progress", "--detail", "section 1 done", "--job"]
    program = shutil.which("mosquitto_pub")
    alone = bench.forbid_daemon(bench.folder / "alone")
    served = bench.keep_daemon(bench.folder / "served", {})
    cases = []
    for name, env in (("no daemon", alone), ("daemon", served)):
        bench.call("register", "--prompt", "local", "--job-id", "local", env=env)
        cases += [Case(f"local {name}", lambda: bench.mam(*publish, "local"), env),
                  Case(f"list {name}", lambda: bench.mam("list"), env)]
    for server in servers:
        kind, wire = server.kind, server.env()
        served = bench.keep_daemon(bench.folder / f"served-{kind}", wire)
        bench.call("register", "--prompt", "wire", "--job-id", kind, env={**alone, **wire})
        bench.call("register", "--prompt", "wire", "--job-id", kind, env=served)
        cases += [Case(f"bare {kind}", lambda: [PYTHON, "-c", BARE_PAHO], wire),
                  Case(f"wire {kind}", lambda kind=kind: bench.mam(*publish, kind), {**alone, **wire}),
                  Case(f"daemon {kind}", lambda kind=kind: bench.mam(*publish, kind), served)]
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
    for what, name in (("mam publish, no broker", "local"), ("mam list", "list")):
        bench.row(f"{what}, no daemon", found[f"{name} no daemon"], fastest, 0.7)
        bench.row(f"{what}, a daemon at hand", found[f"{name} daemon"], fastest, 0.7)
    for kind, base in bare.items():
        bench.row(f"mam publish through {kind}, no daemon", found[f"wire {kind}"], base, 1.5)
    through_daemon(bench, servers, publish)
    return {kind: (base, found[f"daemon {kind}"]) for kind, base in bare.items()}


def through_daemon(bench: Bench, servers: Sequence[Broker], publish: Sequence[str]) -> None:
    """Make sure that it was the daemons that sent: each still has its first connection, and publish needs no paho."""
    for server in servers:
        env = {**server.env(), "MAM_REGISTRY_DIR": str(bench.folder / f"served-{server.kind}")}
        status = json.loads(bench.call("daemon", "status", "--json", env=env))
        assert [line["connects"] for line in status["lines"].values()] == [1], status
        done = subprocess.run(bench.mam(*publish, server.kind), cwd=str(bench.workspace), stdout=subprocess.DEVNULL,
                              env={**bench.base, **env, "PYTHONPROFILEIMPORTTIME": "1"}, stderr=subprocess.PIPE)
        assert done.returncode == 0 and b"import time:" in done.stderr and b"paho" not in done.stderr


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
        bench.forbid_daemon(bench.folder / name)
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


# ---- the daemon ----------------------------------------------------------------------------------------------

# ---- sessions ------------------------------------------------------------------------------------------------

def sessions(bench: Bench, runs: int) -> None:
    """From the start of `mam delegate`, and from its claim, to the Enter that submits the prompt; the agent rests."""
    what = "delivery to a ready tmux agent"
    if shutil.which("tmux") is None:
        bench.add(what, "no tmux")
        return
    tmux = Tmux(bench.home)
    try:
        folder = bench.folder / "agents"
        folder.mkdir()
        journal = install(folder, "claude", "--like", "claude", "--think", 0, "--events", "completed")
        env = {"MAM_REGISTRY_DIR": str(bench.folder / "sessions"), "MAM_TMUX_SOCKET": str(tmux.socket),
               "PATH": f"{folder}{os.pathsep}{bench.base['PATH']}"}
        bench.call("session", "create", "alice", "--mux", "tmux", "--agent", "claude-code", env=env)
        begun, handed, peaks = [], [], []
        look, starter = Look(bench.folder / "sessions"), bench.starter()
        for number in range(runs + 1):          # the first one warms
            job = f"delivery-{number}"
            began = time.monotonic()
            starter.begin(bench.mam("delegate", "--agent-session", "tmux:alice", "--prompt", "x", "--job-id", job), env)
            while look.one("SELECT delivery FROM jobs WHERE job_id = ?", job) in (None, "none"):
                time.sleep(0.005)
            claimed = time.monotonic()
            peaks.append(starter.end("delegate")[0].peak_mb)
            submit = journal.wait("submit", number + 1)["at"]
            journal.wait("turn_end", number + 1)
            begun.append(submit - began)
            handed.append(submit - claimed)
        seconds = statistics.median(begun[1:])
        bench.add(what, f"{seconds * 1000:.0f} ms", "", "<= 1 s", seconds <= 1.0, f"{max(peaks):.0f} MB")
        bench.add("of it from `delivery sending` on", f"{statistics.median(handed[1:]) * 1000:.0f} ms")
    finally:
        tmux.close()


class Look:
    """Questions to a registry, asked beside the daemon that works on it."""

    def __init__(self, registry: Path) -> None:
        self.database = sqlite3.connect(str(registry / "mam.db"), timeout=30, isolation_level=None)

    def one(self, sql: str, *params: object) -> Any:
        row = self.database.execute(sql, params).fetchone()
        return row and row[0]

    def up(self) -> bool:
        """Whether the daemon has said that it is connected."""
        text = self.one("SELECT value FROM meta WHERE key = 'daemon'")
        lines = json.loads(text)["lines"] if text else {}
        return bool(lines) and all(line["state"] == "up" for line in lines.values())

    def owes(self) -> bool:
        return bool(self.one("SELECT 1 FROM events WHERE owed = 1 LIMIT 1") or self.one(
            "SELECT 1 FROM jobs WHERE wire IS NOT NULL AND last_seq > 0 AND transport <> 'remote' "
            "AND state_sent < state_rev LIMIT 1"))

    def spread_beats(self, period_s: int) -> None:
        """Spread the beats evenly over the period, as those of jobs that were begun at any time are."""
        rows = self.database.execute("SELECT job_id, touched_mono FROM beats").fetchall()
        now = time.monotonic()
        self.database.execute("BEGIN")
        self.database.executemany("UPDATE beats SET touched_mono = ? WHERE job_id = ?", [
            (f"{mono.split()[0]} {now - period_s * number / len(rows):.3f}", job_id)
            for number, (job_id, mono) in enumerate(rows)])
        self.database.execute("COMMIT")

    def oldest_beat_s(self) -> float:
        """The age of the oldest sign of life. Instants are a boot id and a monotonic time."""
        rows = self.database.execute("SELECT touched_mono FROM beats").fetchall()
        return time.monotonic() - min(float(row[0].rpartition(" ")[2]) for row in rows)


def wait_until(condition: Callable[[], Any], seconds: float = 300.0) -> float:
    """Look every 5 ms, and return the moment when it was so, by perf_counter."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {condition}"
        time.sleep(0.005)
    return time.perf_counter()


def memory_of(pid: int, field: str) -> float:
    """VmRSS or VmHWM (the peak) of a process, in MiB."""
    lines = Path("/proc", str(pid), "status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def processor_s(pid: int) -> float:
    fields = Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def address(wire: Dict[str, str]) -> Optional[str]:
    return f"{wire['MQTT_BROKER']}:{wire['MQTT_PORT']}" if wire else None


def armed(bench: Bench, module: Path, servers: Sequence[Broker], jobs: int, period_s: int, seconds: float) -> None:
    """Many workers with a sign of life each, every `period_s`; with a broker, each is also an event and a state."""
    for name, wire in [("no broker", {}), *[(server.kind, server.env()) for server in servers]]:
        registry = bench.folder / f"armed-{name.replace(' ', '-')}"
        names = [f"armed{number}" for number in range(jobs)]
        bench.make(module, registry, [new_job(name, wire=address(wire), heartbeat_sec=period_s, workdir="/tmp")
                                      for name in names], armed=names)
        look = Look(registry)
        look.spread_beats(period_s)
        with bench.daemon(registry, wire) as process:
            wait_until(lambda: look.one("SELECT 1 FROM meta WHERE key = 'daemon'") and not look.owes())
            time.sleep(2)                       # the start is over, and what it left behind
            oldest, spent, began = 0.0, processor_s(process.pid), time.monotonic()
            while time.monotonic() < began + seconds:
                oldest = max(oldest, look.oldest_beat_s())
                time.sleep(0.2)
            share = 100 * (processor_s(process.pid) - spent) / (time.monotonic() - began)
            resident, peak = memory_of(process.pid, "VmRSS"), memory_of(process.pid, "VmHWM")
            assert look.one("SELECT count(*) FROM beats") == jobs
        what = f"{jobs:,} beats at N = {period_s}, {name}"
        bench.add(f"{what}: resident", f"{resident:.1f} MiB", "", "<= 45 MiB", resident <= 45, f"{peak:.0f} MB")
        bench.add(f"{what}: of one core, over {seconds:g} s", f"{share:.1f} %", "", "<= 5 %", share <= 5)
        bench.add(f"{what}: oldest", f"{oldest:.1f} s", "", f"<= {period_s + 1} s", oldest <= period_s + 1)


def outbox(bench: Bench, module: Path, servers: Sequence[Broker], events: int, rounds: int, jobs: int = 20) -> None:
    """Events recorded while nobody could send them, then sent by a daemon that starts; beside a bare paho loop that
    publishes as many messages of that size with its usual window."""
    for server in servers:
        wire, model = server.env(), bench.folder / f"owed-{server.kind}"
        names = [f"owed{number}" for number in range(jobs)]
        bench.make(module, model, [new_job(name, wire=address(wire)) for name in names], events // jobs)
        messages = bench.folder / "messages"
        bench.script(SIGNER, module, model, names[0], events, messages)
        sent: List[float] = []
        whole: List[float] = []
        bare: List[float] = []
        bare_whole: List[float] = []
        peaks: List[float] = []
        for number in range(rounds):
            registry = bench.folder / f"owed-{server.kind}-{number}"
            shutil.copytree(model, registry)
            look = Look(registry)
            assert look.one("SELECT count(*) FROM events WHERE owed = 1") == events
            began = time.perf_counter()
            with bench.daemon(registry, wire) as process:
                connected = wait_until(look.up)
                end = wait_until(lambda: not look.owes())
                peaks.append(memory_of(process.pid, "VmHWM"))
            sent.append(end - connected)
            whole.append(end - began)
            began = time.perf_counter()
            first, last = map(float, bench.script(BARE_SENDER, messages, "bench/owed", env=wire).split())
            bare.append(last - first)
            bare_whole.append(last - began)
        bench.rate(f"bare paho loop, {events:,} messages, {server.kind}", events, bare)
        bench.rate(f"{events:,} owed events by the daemon, {server.kind}", events, sent,
                   (f"bare paho, {server.kind}", bare), 0.5, max(peaks))
        bench.rate(f"{events:,} owed events, its start included, {server.kind}", events, whole,
                   ("bare paho, start included", bare_whole))


def inbox(bench: Bench, module: Path, servers: Sequence[Broker], events: int, rounds: int) -> None:
    """Signed events of a remote job, from the first publish to the commit of the last; beside a bare paho loop that
    receives and counts the same messages from the same publisher."""
    for server in servers:
        wire, model, topic = server.env(), bench.folder / f"far-{server.kind}", "python/mqtt/jobs/far/events"
        bench.make(module, model, [new_job("far", "remote:far", transport="remote", wire=address(wire))])
        messages = bench.folder / "messages"
        bench.script(SIGNER, module, model, "far", events, messages)
        taken: List[float] = []
        bare: List[float] = []
        peaks: List[float] = []
        for number in range(rounds):
            registry = bench.folder / f"far-{server.kind}-{number}"
            shutil.copytree(model, registry)
            look = Look(registry)
            with bench.daemon(registry, wire) as process:
                wait_until(lambda: look.up() and look.one("SELECT subscribed_mono FROM jobs"))
                sender = bench.starter()
                sender.begin([PYTHON, "-c", BARE_SENDER, str(messages), topic], wire)
                end = wait_until(lambda: look.one("SELECT last_seq FROM jobs") == events)
                sender.end("sender")
                stored = look.one("SELECT count(*) FROM events WHERE seq IS NOT NULL")
                assert stored == events, f"{stored} of {events} events stored"
                peaks.append(memory_of(process.pid, "VmHWM"))
            taken.append(end - float(sender.text().split()[0]))
            receiver = subprocess.Popen([PYTHON, "-c", BARE_RECEIVER, str(events), topic], env={**bench.base, **wire},
                                        stdout=subprocess.PIPE, encoding="utf-8")
            assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
            sender.begin([PYTHON, "-c", BARE_SENDER, str(messages), topic], wire)
            end = float(receiver.communicate(timeout=300)[0])
            sender.end("sender")
            bare.append(end - float(sender.text().split()[0]))
        bench.rate(f"bare paho loop receives {events:,} messages, {server.kind}", events, bare)
        bench.rate(f"{events:,} remote events verified and stored, {server.kind}", events, taken,
                   (f"bare paho, {server.kind}", bare), 0.6, max(peaks))


def remote(bench: Bench, servers: Sequence[Broker], jobs: int, seconds: float) -> None:
    """A job for a runner on the other side of a broker, from its dispatch to its `started` in the registry of the
    host that delegates; beside a bare paho request and reply, and one start of the interpreter. Then what a runner
    costs that has nothing to do."""
    start_ms = bench.compare(Case("python", lambda: [PYTHON, "-c", "pass"], {}))["python"].ms
    for server in servers:
        registry, far = bench.folder / f"orders-{server.kind}", bench.folder / f"runner-{server.kind}"
        env = {**server.env(), "MAM_INSECURE_BROKER": "1", "MAM_DISPATCH_SECRET": "bench" * 8,
               "MAM_REGISTRY_DIR": str(registry)}
        with open(bench.folder / "runner.out", "wb") as out:
            runner = subprocess.Popen(
                bench.mam("remote", "run", "--session", "bench", "--exec", "true", "--parallel", "4"), stdout=out,
                stderr=out, stdin=subprocess.DEVNULL, cwd=str(bench.workspace),
                env={**bench.base, **env, "MAM_REGISTRY_DIR": str(far)})
        wait_until(lambda: "serves" in (bench.folder / "runner.out").read_text("utf-8", "replace"))
        replier = subprocess.Popen([PYTHON, "-c", BARE_REPLIER], env={**bench.base, **server.env()},
                                   stdout=subprocess.PIPE, encoding="utf-8")
        assert replier.stdout is not None and replier.stdout.readline() == "ready\n"
        bench.keep_daemon(registry, env)
        bare: List[float] = []
        taken: List[float] = []
        for number in range(jobs):
            bare += map(float, bench.script(BARE_REQUESTER, 20, env=server.env()).split())
            bench.call("delegate", "--agent-session", "remote:bench", "--prompt", "nothing", "--job-id", f"o{number}",
                       "--detach", env=env)
            bench.call("wait", f"o{number}", env=env)
            log = [json.loads(line) for line in bench.call("logs", f"o{number}", "--json", env=env).splitlines()]
            at = {line["event"]: float(line["logged_at"][-7:-1]) for line in reversed(log)}
            taken.append((at["started"] - at["dispatch"]) % 60)
        replier.kill()
        rtt_ms, took_ms = statistics.median(bare) * 1000, statistics.median(taken) * 1000
        bench.add(f"bare paho request and reply, {server.kind}", f"{rtt_ms:.1f} ms")
        bench.add(f"dispatch to started, {server.kind}", f"{took_ms:.1f} ms",
                  f"{took_ms / (3 * rtt_ms + start_ms):.2f} x (3 requests + 1 python)", "<= 1 x",
                  took_ms <= 3 * rtt_ms + start_ms)
        wait_until(lambda: not Look(far / "runner-bench").one("SELECT 1 FROM jobs WHERE finished_at IS NULL"))
        time.sleep(2)                           # the last job's traffic is over
        spent, began = processor_s(runner.pid), time.monotonic()
        time.sleep(seconds)
        share = 100 * (processor_s(runner.pid) - spent) / (time.monotonic() - began)
        resident, peak = memory_of(runner.pid, "VmRSS"), memory_of(runner.pid, "VmHWM")
        bench.add(f"an idle runner, {server.kind}: resident", f"{resident:.1f} MiB", "", "<= 35 MiB", resident <= 35,
                  f"{peak:.0f} MB")
        bench.add(f"an idle runner, {server.kind}: of one core, over {seconds:g} s", f"{share:.2f} %", "", "<= 0.5 %",
                  share <= 0.5)
        runner.terminate()
        runner.wait(30)


def unpacked(bench: Bench) -> Path:
    """The folder in which `import mam` finds the module of this very pyz."""
    bench.call("--version")
    return next((bench.folder / "shiv").glob("mam_*/site-packages"))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Times mam against baselines of the same run.")
    parser.add_argument("--quick", action="store_true", help="fewer runs, jobs and events, and shorter periods")
    parser.add_argument("--json", action="store_true", help="the rows as JSON")
    args = parser.parse_args(argv)
    pyz = Path(os.environ.get("MAM_PYZ") or ROOT / "mam.pyz").resolve()
    if not pyz.is_file():
        parser.error(f"no {pyz}: set MAM_PYZ, or run `make bench`")
    before = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="mam-bench-"))
    bench = Bench(pyz, folder, 7 if args.quick else 21)
    servers: List[Broker] = []
    complete = False
    try:
        module = unpacked(bench)
        bench.begin_table("commands")
        interpreter(bench)
        for kind, server_class in BROKERS.items():
            try:
                # Mosquitto drops what a slow subscriber has not taken beyond 1,000 messages; nothing may be lost here.
                extra = "max_queued_messages 0" if kind == "mosquitto" else ""
                servers.append(server_class(folder / kind, persistence=False, extra=extra).start())
            except BaseException as error:      # pytest's skip: the program is not installed
                if type(error).__name__ != "Skipped":
                    raise
                bench.add(f"through {kind}", "not installed")
        at_hand = local_and_wire(bench, servers)
        first_starts(bench)
        many_jobs(bench, 10_000 if args.quick else 100_000)
        following(bench, module, 500 if args.quick else 3000, 3)
        verifying(bench, module)
        delegating(bench)
        bench.begin_table("the daemon")
        for kind, (base, publish) in at_hand.items():
            bench.row(f"mam publish through {kind}, a daemon at hand", publish, base, 1.0)
        events, rounds = (2000, 3) if args.quick else (10_000, 3)
        outbox(bench, module, servers, events, rounds)
        inbox(bench, module, servers, events, rounds)
        if Path("/proc/self").is_dir():
            # As many beats a second, so that what they cost is comparable.
            armed(bench, module, servers, *((100, 3, 9) if args.quick else (1000, 30, 30)))
        bench.begin_table("sessions")
        sessions(bench, 5 if args.quick else 11)
        bench.begin_table("other hosts")
        if Path("/proc/self").is_dir():
            remote(bench, servers, *((5, 10) if args.quick else (11, 60)))
        complete = True
    except KeyboardInterrupt:      # what was measured is shown all the same
        pass
    finally:
        for server in servers:
            server.stop()
        kill_marked(bench.mark)
        shutil.rmtree(folder, ignore_errors=True)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    if args.json:
        print(json.dumps({title: [row._asdict() for row in rows] for title, rows in bench.tables.items()}, indent=2))
        return 0 if complete else 130
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {before:.1f} at the start and "
          f"{os.getloadavg()[0]:.1f} at the end; medians of {bench.runs} runs each, in turn with their baseline"
          + ("; --quick: fewer runs, jobs and events, and N = 3 instead of 30" if args.quick else ""))
    for rows in bench.tables.values():
        print("\n" + bench.table(rows))
    missed = [row.what for rows in bench.tables.values() for row in rows if row.verdict == "MISS"]
    print("\n" + (f"{len(missed)} missed: {'; '.join(missed)}" if missed else "every bar is met")
          + ("" if complete else "; interrupted, so there is no more"))
    return 0 if complete else 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

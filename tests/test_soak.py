"""What takes minutes: every fault of the daemon's tests again and again, and a host on which processes are killed.

    pytest -m soak test_soak.py                         MAM_SOAK_SEED=n repeats one run's lots
"""
from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set

import pytest
import test_daemon

from support import poll
from support.cli import Background, Mam
from support.daemons import Post, unique
from support.observer import Observer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
ROUNDS = 20
JOBS, KILLS, WATCHERS = 50, 200, 12
SPARE = 8           # jobs more, so that fifty run at each kill

inside, post, far, sleeper = test_daemon.inside, test_daemon.post, test_daemon.far, test_daemon.sleeper


@pytest.fixture(autouse=True)
def again(request: pytest.FixtureRequest) -> Any:
    return getattr(request, "param", None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The tests taken from the other module run `ROUNDS` times."""
    if metafunc.function.__module__ == test_daemon.__name__:
        metafunc.parametrize("again", range(ROUNDS), indirect=True)


# The broker stopped before the terminal publish and started after the agent left.
test_down = test_daemon.test_an_end_that_could_not_be_sent_arrives_when_the_broker_is_back
# The daemon killed between commit and send, between send and PUBACK; stopped, and going on with old news in hand.
test_killed = test_daemon.test_a_daemon_killed_in_mid_send_loses_nothing
test_still = test_daemon.test_a_daemon_that_stands_still_does_not_stop_publishers
test_backwards = test_daemon.test_a_state_never_goes_backwards
test_late_state = test_daemon.test_a_state_that_arrives_late_from_a_living_daemon_is_put_right
test_in_flight = test_daemon.test_an_end_in_flight_is_taken_back_when_the_job_is_redispatched
# The daemon stopped in mid-beat; a redispatch with a beat in flight.
test_mid_beat = test_daemon.test_the_end_is_the_last_word_whatever_beat_the_daemon_was_stopped_in
test_many_ends = test_daemon.test_no_beat_follows_the_end_whatever_was_stopped_in_between
test_beat_in_flight = test_daemon.test_a_beat_in_flight_is_no_sign_of_life_of_the_next_attempt
test_beat_ends = test_daemon.test_a_beat_ends_with_its_attempt
# The agent killed.
test_agent_killed = test_daemon.test_an_agent_that_is_killed_ends_its_job_for_everybody
test_agent_watched = test_daemon.test_a_worker_is_alive_as_long_as_its_process_and_no_longer
# Two daemons started at once.
test_at_once = test_daemon.test_of_any_number_started_at_once_one_runs
test_two_run = test_daemon.test_two_run_at_once_are_one_and_send_everything_once
test_leaving = test_daemon.test_what_arrives_while_it_leaves_is_not_left_alone
test_starter = test_daemon.test_a_starter_that_dies_at_once_leaves_one_daemon_or_a_free_lock
# A publisher with no network; a daemon born without credentials.
test_no_network = test_daemon.test_a_publisher_with_no_network_publishes_in_order_through_the_daemon
test_no_paho = test_daemon.test_an_agent_without_paho_publishes_in_order_through_the_daemon
test_born = test_daemon.test_a_daemon_born_without_credentials_makes_room_for_one_that_has_them
# Foreign messages forged, replayed, reordered, doubled, hostile, while real ones flow.
test_storm = test_daemon.test_a_true_story_comes_through_a_storm_of_foreign_messages
test_foreign = test_daemon.test_nothing_foreign_is_believed_and_every_drop_is_counted
test_conflicts = test_daemon.test_conflicts_replays_and_old_attempts_change_nothing
test_reordered = test_daemon.test_a_remote_job_is_followed_each_event_once_and_in_order
# Taking over.
test_keeper = test_daemon.test_a_command_whose_keeper_was_killed_is_ended_and_said_to_be_lost
test_check = test_daemon.test_a_check_whose_keeper_was_killed_is_done_again_and_settled_once
test_delegator = test_daemon.test_a_delegator_may_be_killed_at_any_moment


# ---- two hundred kills -----------------------------------------------------------------------------------------

# An agent that reports until it is told to stop, and writes down what became of each report.
AGENT = """: an-agent; echo $$ >> ran.$JOB_ID; n=0
while [ ! -e stop ] && [ ! -e stop.$JOB_ID ]; do
    n=$((n+1)); $MAM_PUBLISH_CMD --event progress --detail "step $n"; echo "$n $?" >> said.$JOB_ID
    i=0; while [ $i -lt PAUSE ] && [ ! -e stop ] && [ ! -e stop.$JOB_ID ]; do sleep 1; i=$((i+1)); done
done"""
# What is killed, and the least that each must have been: `mam`'s background parts, its commands, and the agent.
LEAST = {"_daemon": 15, "_run": 15, "_supervise": 10, "agent": 15, "publish": 15, "delegate": 15, "follow": 15}
ROLES = {**{role: role for role in LEAST}, "watch": "follow", "subscribe": "follow"}
KILLS_S = 1200.0            # two hundred kills take three minutes on two idle cores


class Victim(NamedTuple):
    role: str
    pid: int
    job: str


def victim(pid: int) -> Optional[Victim]:
    """What a process of this host is, if it is one to be killed."""
    try:
        words = Path("/proc", str(pid), "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        if words[:2] == ["/bin/sh", "-c"] and words[2].startswith(": an-agent;"):
            environ = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
            return Victim("agent", pid, [word[7:].decode() for word in environ if word.startswith(b"JOB_ID=")][0])
    except (OSError, IndexError):
        return None
    if len(words) < 3 or not words[1].endswith(".pyz") or words[2] not in ROLES:
        return None
    named = [word[6:] for word in words if word.startswith("--job=")]
    named += words[words.index("--") + 1:][:1] if "--" in words else []
    return Victim(ROLES[words[2]], pid, named[0] if named else "")


def victims(mam: Mam) -> List[Victim]:
    return [one for one in map(victim, mam.processes()) if one is not None]


def job_followed(run: Background) -> str:
    """The job whose events a background command prints; "" if it prints none."""
    if run.args[0] == "delegate":
        return "" if "--detach" in run.args else run.args[run.args.index("--job-id") + 1]
    return run.args[2] if run.args[0] == "subscribe" else run.args[1]


class Host50:
    """Fifty jobs that run at once, those who follow them, and who of them all was killed."""

    def __init__(self, post: Post, rng: random.Random) -> None:
        self.post, self.mam, self.rng = post, post.mam, rng
        self.jobs: List[str] = []
        self.runs: List[Background] = []
        self.watching: Dict[str, Background] = {}
        self.killed: Counter[str] = Counter()
        self.killed_pids: Set[int] = set()
        self.harmed: Set[str] = set()           # jobs whose end may be an error: their work itself was killed
        self.stopped: Set[str] = set()          # jobs whose agent was told to come to an end

    def open_jobs(self) -> List[str]:
        return [row[0] for row in self.post.rows("SELECT job_id FROM jobs WHERE status IN ('pending', 'running')")]

    def registered(self) -> List[str]:
        return [row[0] for row in self.post.rows("SELECT job_id FROM jobs ORDER BY n")]

    def delegate(self) -> None:
        number = len(self.jobs)
        job = unique(f"j{number}")
        self.jobs.append(job)
        flags: List[object] = ["--detach"] if number % 3 == 0 else ["--json"]
        flags += ["--validate", "sleep 6"] if number % 2 == 0 else []
        self.runs.append(self.mam.popen(
            "delegate", "--agent-session", "exec:e", "--exec", AGENT.replace("PAUSE", str(self.rng.randint(6, 14))),
            "--prompt", "x", "--job-id", job, "--timeout", 3600, "--heartbeat", 10, "--idle-timeout", 300,
            "--ack-timeout", 30, *flags))

    def running(self) -> int:
        return int(self.post.rows("SELECT count(*) FROM jobs WHERE status = 'running'")[0][0])

    def refill(self, at_once: int) -> None:
        """Keep fifty jobs and a few more open."""
        known = set(self.registered())
        starting = sum(run.code is None and run.args[0] == "delegate" and run.args[run.args.index("--job-id") + 1]
                       not in known for run in self.runs)
        going = len(self.open_jobs()) + starting
        for _ in range(min(JOBS + SPARE - going, at_once - starting)):
            self.delegate()

    def follow(self) -> None:
        """Keep a dozen followers; who was killed is started again, and then has to see all."""
        for job, run in list(self.watching.items()):
            if run.code is not None:
                del self.watching[job]
                if run.pid in self.killed_pids:
                    self.watch(job)
        jobs = self.open_jobs()
        while jobs and len(self.watching) < min(WATCHERS, len(jobs)):
            self.watch(self.rng.choice([job for job in jobs if job not in self.watching]))

    def watch(self, job: str) -> None:
        words = ["watch", job] if self.rng.random() < 0.5 else ["subscribe", "--job", job, "--idle-timeout", "3600"]
        self.watching[job] = self.mam.popen(*words, "--json")
        self.runs.append(self.watching[job])

    def kill_one(self) -> None:
        """SIGKILL for a process of a kind taken by lot, if one is found soon."""
        missing = [role for role, least in LEAST.items() if self.killed[role] < least]
        role = self.rng.choice(missing if missing and self.rng.random() < 0.5 else sorted(LEAST))
        if role == "_supervise":
            self.end_one_to_be_checked()
        deadline = time.monotonic() + 0.5
        found: List[Victim] = []
        while not found and time.monotonic() < deadline:
            found = [one for one in victims(self.mam) if one.role == role]
        if not found:
            return
        chosen = self.rng.choice(found)
        if chosen.role in ("_run", "agent"):
            self.harmed.add(chosen.job)
        try:
            os.kill(chosen.pid, signal.SIGKILL)
        except ProcessLookupError:
            return                              # it ended between the look and the signal
        self.killed_pids.add(chosen.pid)
        self.killed[role] += 1
        if role == "delegate":
            run = next(run for run in self.runs if run.pid == chosen.pid)
            job = run.args[run.args.index("--job-id") + 1]
            if self.post.rows("SELECT 1 FROM jobs WHERE job_id = ? AND delivery = 'sent'", job) == []:
                self.harmed.add(job)

    def end_one_to_be_checked(self) -> None:
        """Tell an agent whose work is to be validated to come to its end: that is what `_supervise` is for."""
        ready = [row[0] for row in self.post.rows(
            "SELECT job_id FROM jobs WHERE status = 'running' AND phase IS NULL AND validate_cmd IS NOT NULL "
            "AND started_at IS NOT NULL") if row[0] not in self.stopped | self.harmed]
        if ready and len(self.stopped & set(self.open_jobs())) < 6:
            job = self.rng.choice(ready)
            self.stopped.add(job)
            (self.mam.workspace / f"stop.{job}").touch()

    def steps(self) -> Dict[str, Any]:
        """job -> what changes when it progresses: its last number that is no beat's, its phase."""
        return {row[0]: row[1:] for row in self.post.rows(
            "SELECT job_id, (SELECT max(seq) FROM events e WHERE e.job_id = j.job_id AND source <> 'beat'), phase, "
            "status FROM jobs j WHERE status IN ('pending', 'running')")}


def lines_of(path: Path) -> List[str]:
    return path.read_text().splitlines() if path.exists() else []


def check_follower(run: Background, log: Dict[int, Any], killed: bool) -> None:
    """Each event once, in order, as it is in the log; all of them, and the right exit code, if it was not killed."""
    lines = run.stdout.split("\n")
    shown = [event for event in (json.loads(line) for line in lines[:-1] if line and not line.startswith("SUBSCRIBED "))
             if "seq" in event]
    numbers = [event["seq"] for event in shown]
    assert numbers == sorted(set(numbers)), f"not once and in order: {run}"
    for event in shown:
        told = log.get(event["seq"])
        if told is None:            # a beat, replaced by the next one
            assert event["detail"] == "heartbeat" and event["data"]["since"] < event["seq"], f"{event} of {run}"
        else:
            assert (event["event"], event["detail"], event["timestamp"]) == told, f"{event} is not {told}: {run}"
    assert killed == (run.code == -signal.SIGKILL), f"{run}"
    if not killed:
        assert not set(log) - set(numbers), f"{sorted(set(log) - set(numbers))} not printed by {run}"
        assert run.code in (0, 1, 2) and "Traceback" not in run.stderr, f"{run}"


def check_reports(host: Host50, job: str, log: Dict[int, Any]) -> None:
    """What an agent was told of its reports is so: recorded are those that were said to be, and each once."""
    steps = Counter(detail for _, detail, _ in log.values() if detail.startswith("step "))
    assert not steps or max(steps.values()) == 1, f"recorded twice in {job}: {steps}"
    for line in lines_of(host.mam.workspace / f"said.{job}"):
        step, code = line.split()
        assert code in ("0", "2", "4", "137", "143"), f"step {step} of {job} ended with {code}"
        if code in ("0", "2"):
            assert steps[f"step {step}"] == 1, f"step {step} of {job}, {code} to its agent, is not recorded"
        if code == "4":
            assert steps[f"step {step}"] == 0 and job in host.harmed, f"step {step} of {job} was refused"


def check_job(host: Host50, job: str, watcher: Observer) -> Dict[int, Any]:
    """One job's own story: its end, its numbers, its one run, and all of it on the wire. Its events, by number."""
    post = host.post
    record = post.job(job)
    rows = post.rows("SELECT seq, event, detail, timestamp, source FROM events WHERE job_id = ? AND seq IS NOT NULL "
                     "ORDER BY seq", job)
    log = {row[0]: tuple(row[1:4]) for row in rows}
    with post.registry() as registry:
        assert registry.missing_numbers(record) is None, f"a hole in {sorted(log)} of {job}"
    assert len(log) == len(rows) and record.attempt_id == 1, f"a number twice in {job}: {rows}"
    ran = len(lines_of(host.mam.workspace / f"ran.{job}"))
    assert ran <= 1, f"{job} ran {ran} times"
    if job not in host.harmed:
        assert (record.status, ran) == ("completed", 1), f"nobody harmed {job}: {record}"
    assert rows and rows[-1][0] == record.last_seq and rows[-1][1] in ("completed", "error"), f"{job}: {rows[-3:]}"
    poll(lambda: [m for m in watcher.messages("state", job) if m.json()["seq"] == record.last_seq], 30,
         f"the last state of {job} on the wire")
    if watcher.connects == 1:
        heard = list(dict.fromkeys(m.json()["seq"] for m in watcher.messages("events", job) if m.payload))
        wanted = [row[0] for row in rows if row[4] != "beat"]
        assert [seq for seq in heard if seq in set(wanted)] == wanted, f"{heard} of {job} on the wire, not {wanted}"
        assert heard[-1] == record.last_seq, f"{heard} of {job} on the wire"
    state = [m.json() for m in watcher.messages("state", job)][-1]
    assert (state["status"], state["seq"]) == (record.status, record.last_seq)
    return log


@pytest.mark.timeout(2400)
def test_two_hundred_kills_over_fifty_jobs_lose_nothing(post: Post, mam: Mam, own_broker: Any,
                                                                observe: Callable[..., Observer]) -> None:
    """Lost: on a bad day, anything: an event, an end, a follower's story, the registry itself."""
    seed = int(os.environ.get("MAM_SOAK_SEED") or random.SystemRandom().randrange(10 ** 9))
    print(f"MAM_SOAK_SEED={seed}")
    rng = random.Random(seed)
    broker = own_broker("nats")
    mam.env = broker.env()
    watcher = observe(broker)
    post.inside.registry(mam).close()           # it is there before the first look
    host = Host50(post, rng)
    begun = time.monotonic()
    while sum(host.killed.values()) < KILLS:
        assert time.monotonic() - begun < KILLS_S, f"only {dict(host.killed)} within {KILLS_S:g} s"
        host.refill(4)
        host.follow()
        if host.running() >= JOBS:
            host.kill_one()
        time.sleep(rng.uniform(0.0, 1.0))       # the pace of the kills, and no condition
    print(f"killed: {sum(host.killed.values())} in {time.monotonic() - begun:.0f} s, {dict(host.killed)}; "
          f"{len(host.jobs)} jobs, {len(host.runs)} followers and delegators")
    assert sum(host.killed.values()) == KILLS and all(host.killed[role] >= count for role, count in LEAST.items())

    mam(check=0)                                # if the last one killed was the daemon
    before = host.steps()

    def stuck() -> Dict[str, Any]:
        now = host.steps()
        return {job: was for job, was in before.items() if now.get(job) == was}
    poll(lambda: not stuck(), 180, lambda: f"each job ends or progresses, but {stuck()}: {post.describe()}",
         interval=0.5)
    (mam.workspace / "stop").touch()
    poll(lambda: not host.open_jobs(), 180, lambda: f"""all jobs ended: {post.describe()} {post.rows(
        "SELECT job_id, status, phase, delivery, last_event FROM jobs WHERE finished_at IS NULL")}""", interval=0.5)
    post.wait_sent(timeout=120)
    assert post.rows("PRAGMA integrity_check") == [("ok",)]

    logs = {job: check_job(host, job, watcher) for job in host.registered()}
    for job in set(host.jobs) - set(logs):
        assert job in host.harmed and not (mam.workspace / f"ran.{job}").exists(), f"{job} was never registered"
    for job, log in logs.items():
        check_reports(host, job, log)
    again = sorted({job_followed(run) for run in host.runs if run.pid in host.killed_pids} & set(logs))
    for start in range(0, len(again), 4):
        fresh = [mam.popen("watch", job, "--json") for job in again[start:start + 4]]
        host.runs += fresh
        for run in fresh:
            run.wait()
    for run in host.runs:
        if job_followed(run) in logs:
            poll(lambda: run.code is not None, 60, lambda: f"a follower of an ended job ends: {run}")
            check_follower(run, logs[job_followed(run)], run.pid in host.killed_pids)
    followed = sum(job_followed(run) in logs and run.pid not in host.killed_pids for run in host.runs)
    print(f"{followed} followers saw everything once and in order, {len(again)} of them again from the beginning; "
          f"{len(host.harmed & set(logs))} of {len(logs)} jobs were harmed")
    post.wait_gone(60)
    assert not mam.processes(), "something is left running"

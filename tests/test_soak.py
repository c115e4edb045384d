"""What takes minutes: every fault of the daemon's tests again and again, and a host on which processes are killed.

    pytest -m soak test_soak.py                         MAM_SOAK_SEED=n repeats one run's choice of victims
"""
from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest
import test_daemon

from support import poll
from support.cli import Background, Mam
from support.daemons import Post, topics, unique
from support.observer import Observer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
ROUNDS = 20
JOBS, KILLS, STEPS = 50, 200, 6

inside, post, far, sleeper = test_daemon.inside, test_daemon.post, test_daemon.far, test_daemon.sleeper


@pytest.fixture(autouse=True)
def again(request: pytest.FixtureRequest) -> Any:
    return getattr(request, "param", None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The tests taken from the other module run `ROUNDS` times."""
    if metafunc.function.__module__ == test_daemon.__name__:
        metafunc.parametrize("again", range(ROUNDS), indirect=True)


# The broker stopped before the terminal publish; the daemon killed and stopped at every point; states on the wire.
test_down = test_daemon.test_an_end_that_could_not_be_sent_arrives_when_the_broker_is_back
test_killed = test_daemon.test_a_daemon_killed_in_mid_send_loses_nothing
test_still = test_daemon.test_a_daemon_that_stands_still_does_not_stop_publishers
test_backwards = test_daemon.test_a_state_never_goes_backwards
test_late_state = test_daemon.test_a_state_that_arrives_late_from_a_living_daemon_is_put_right
test_in_flight = test_daemon.test_an_end_in_flight_is_taken_back_when_the_job_is_redispatched
# Beats, and the death of who is watched.
test_mid_beat = test_daemon.test_no_beat_follows_the_end_whatever_was_stopped_in_between
test_beat_ends = test_daemon.test_a_beat_ends_with_its_attempt
test_agent_killed = test_daemon.test_a_worker_is_alive_as_long_as_its_process_and_no_longer
# Coming and going.
test_at_once = test_daemon.test_of_any_number_started_at_once_one_runs
test_no_network = test_daemon.test_an_agent_without_paho_publishes_in_order_through_the_daemon
test_born = test_daemon.test_a_daemon_born_without_credentials_makes_room_for_one_that_has_them
test_leaving = test_daemon.test_what_arrives_while_it_leaves_is_not_left_alone
test_starter = test_daemon.test_a_starter_that_dies_at_once_leaves_one_daemon_or_a_free_lock
# Foreign messages while real ones flow.
test_foreign = test_daemon.test_nothing_foreign_is_believed_and_every_drop_is_counted
test_conflicts = test_daemon.test_conflicts_replays_and_old_attempts_change_nothing
# Taking over.
test_keeper = test_daemon.test_a_command_whose_keeper_was_killed_is_ended_and_said_to_be_lost
test_check = test_daemon.test_a_check_whose_keeper_was_killed_is_done_again_and_settled_once
test_delegator = test_daemon.test_a_delegator_may_be_killed_at_any_moment


VICTIMS = ("_daemon", "_run", "publish", "watch", "delegate", "_supervise")
WORK = "; ".join(f"$MAM_PUBLISH_CMD --event progress --detail 'step {step}'; sleep 0.3" for step in range(STEPS))


def victims(mam: Mam) -> List[Tuple[str, int]]:
    """(role, pid) of mam's own processes; the work itself is not among them."""
    found = []
    for pid in mam.processes():
        try:
            words = Path("/proc", str(pid), "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        roles = [word for word in words[1:4] if word in VICTIMS]
        if roles and any(word.endswith(".pyz") for word in words[:3]):
            found.append((roles[0], pid))
    return found


def printed(run: Background) -> List[Dict[str, Any]]:
    """The events a follower printed; a killed one's last line may be cut."""
    lines = run.stdout.split("\n")
    events = [json.loads(line) for line in lines[:-1] if line]
    return [event for event in events if "seq" in event]


def check_follower(run: Background, numbers: Dict[str, List[int]]) -> None:
    """Each event once, in order, nothing made up; all of them if it lived to the end."""
    shown = [(event["data"]["attempt_id"], event["seq"]) for event in printed(run)]
    assert shown == sorted(set(shown)), f"{run}"
    job = run.args[run.args.index("--job-id") + 1] if "--job-id" in run.args else run.args[1]
    if run.code is not None and run.code >= 0:
        missing = set(numbers[job]) - {seq for _, seq in shown}
        assert not missing, f"{sorted(missing)} of {job} not printed by {run}"


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
    jobs = [unique(f"j{number}") for number in range(JOBS)]
    followers: List[Background] = []
    waiting = list(jobs)
    killed: Dict[str, int] = {}
    watching: Dict[str, Background] = {}
    before: List[Tuple[str, int]] = []
    begun = time.monotonic()
    while sum(killed.values()) < KILLS and time.monotonic() - begun < 500:
        running = sum(run.code is None for run in followers)
        if waiting and running < 14:
            followers.append(mam.popen("delegate", "--agent-session", "exec:e", "--exec", WORK, "--prompt", "x",
                                       "--json", "--job-id", waiting.pop(), "--timeout", 300, "--heartbeat", 1,
                                       "--idle-timeout", 60))
        known = [job for job in jobs if job not in waiting]
        for job in rng.sample(known, min(len(known), 3)):
            if (job not in watching or watching[job].code is not None) and len(followers) < 400 and \
                    post.rows("SELECT 1 FROM jobs WHERE job_id = ?", job):
                watching[job] = mam.popen("watch", job, "--json")
                followers.append(watching[job])
        now = victims(mam)
        found, before = [one for one in now if one in before], now      # who was there at the last look too
        if found and len(known) > 10:
            role = rng.choice(sorted({role for role, _ in found}))
            pid = rng.choice([pid for name, pid in found if name == role])
            try:
                os.kill(pid, signal.SIGKILL)
                killed[role] = killed.get(role, 0) + 1
            except ProcessLookupError:
                pass                            # it ended between the look and the signal
        time.sleep(rng.uniform(0.1, 0.6))      # the pace of the kills, and no condition
        if not waiting and not post.rows("SELECT 1 FROM jobs WHERE status IN ('pending', 'running') LIMIT 1"):
            waiting = [unique("more") for _ in range(10)]
            jobs += waiting
    print(f"killed: {killed}")
    jobs = [job for job in jobs if post.rows("SELECT 1 FROM jobs WHERE job_id = ?", job)]

    def all_ended() -> bool:
        mam(check=0)                            # a user looks now and then
        return not post.rows("SELECT 1 FROM jobs WHERE status IN ('pending', 'running') LIMIT 1")
    poll(all_ended, 300, lambda: f"""all jobs ended: {post.describe()} {post.rows(
        "SELECT job_id, status, phase, delivery, last_event FROM jobs WHERE finished_at IS NULL")}""", interval=0.5)
    post.wait_sent(timeout=120)
    assert post.rows("PRAGMA integrity_check") == [("ok",)]
    numbers = {job: post.numbers(job) for job in jobs}
    with post.registry() as registry:
        for job in jobs:
            record = registry.job(job)
            assert registry.missing_numbers(record) is None and len(set(numbers[job])) == len(numbers[job])
            assert numbers[job] == [] or numbers[job][-1] == record.last_seq
    for run in followers:
        poll(lambda: run.code is not None, 60, lambda: f"a follower of an ended job ends: {run}")
        check_follower(run, numbers)
    for job in jobs:
        record = post.job(job)
        if not record.last_seq:
            continue
        states = [m.json() for m in watcher.messages("state", job)]
        assert (states[-1]["status"], states[-1]["seq"]) == (record.status, record.last_seq)
        ends = [m.json() for m in watcher.all if m.topic == topics(job)[0] and m.payload]
        assert ends[-1]["seq"] == record.last_seq and ends[-1]["event"] in ("completed", "error")

"""Ranks as the tasks of one Spark job in barrier mode: all of them at once, or none.

A task only starts a process of its own and waits for it. So a rank never lives in a worker that Spark has used or
will use for something else, and how it ends is the launcher's matter: for Spark, no task has failed.

Without a master and without a session, this process starts a Spark of its own on loopback, which ends with the run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pyspark import BarrierTaskContext, InheritableThread, SparkContext

from syncline.errors import UsageError
from syncline.launcher.engines.seam import Engine, Layout, Order
from syncline.launcher.engines.spark_driver import Driver, check_master, words_of
from syncline.launcher.starting import LOOPBACK

ROOM_SECONDS = 15.0
"""How long further executors may take to come, or earlier work to leave."""
FIRST_SECONDS = 60.0
"""How long the first executor may take."""
PLACE_SECONDS = 60.0
"""How long Spark may take to place tasks for which it has said to have room."""
_LINGER_SECONDS = 3.0
_CANCEL_SECONDS = 10.0
_LOOK_SECONDS = 0.2
_RANK = """
import pickle, sys
sys.path += [path for path in sys.argv[2:] if path not in sys.path]
from syncline.machine import end_with
end_with(int(sys.argv[1]))
from syncline.launcher.engines.rank_life import live
live(*pickle.load(sys.stdin.buffer))
"""


def connect(master: str | None) -> SparkEngine:
    """The Spark of this process's session, or of the spark-submit that started it, or at the master, or its own."""
    context = SparkContext._active_spark_context
    if context is not None:
        if master not in (None, context.master):
            raise UsageError(
                f"this process uses the Spark at {context.master} already, so it cannot use {master}.",
                action="Leave the master out, or stop that session first.",
            )
        return SparkEngine(context)
    if master is not None:
        check_master(master)
    driver = Driver(master)
    return SparkEngine(driver.context, driver)


class SparkEngine(Engine):
    name = "spark"

    def __init__(self, context: Any, driver: Driver | None = None) -> None:
        self._context = context
        self._driver = driver
        self.is_own = driver is not None and driver.is_own
        self._is_here = context.master.startswith("local")
        self.address = LOOPBACK if self._is_here else socket.gethostbyname(context.getConf().get("spark.driver.host"))
        self._job: InheritableThread | None = None
        self._workers = 0
        self._begun = 0.0
        self._failure = ""

    def layout(self, workers: int, threads: int | None, hosts: int | None) -> Layout:
        """Spark itself chooses where tasks go: one after the other on each executor, in turn."""
        if self.is_own:
            if hosts is not None:
                raise UsageError("a Spark of its own has one host.", action="Leave --hosts out, or give --master.")
            return Layout(1, threads)
        conf = self._context.getConf()
        if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
            raise UsageError(
                "Spark runs no barrier job while it allocates executors dynamically.",
                action="Set spark.dynamicAllocation.enabled to false.",
            )
        count = min(workers, len(self._wait_for_room(workers)))
        if hosts not in (None, count) or workers % count:
            raise UsageError(
                f"Spark spreads tasks over all its hosts: {workers} workers would be on {count}, not equally or not "
                "as asked.",
                action="Leave --hosts out, and choose a number of --workers that those hosts can share equally.",
            )
        return Layout(count, threads or int(conf.get("spark.task.cpus", "1")))

    def start(self, order: Order) -> None:
        self._workers, self._begun, self._failure = order.workers, time.monotonic(), ""
        self._group = f"syncline-{uuid.uuid4().hex}"
        numbers = self._context.parallelize(range(order.workers), order.workers)
        job = numbers.barrier().mapPartitions(functools.partial(_task, order))
        with self._interpreter():
            job._jrdd  # noqa: B018 Spark notes here which Python runs the tasks
        self._job = InheritableThread(target=self._run, args=(job,), name="syncline-spark-job", daemon=True)
        self._job.start()

    def lost(self) -> Mapping[int, str]:
        """Tasks of a barrier job end together."""
        failure = self._failure or self._waiting_in_vain()
        return dict.fromkeys(range(self._workers), failure) if failure else {}

    def stop(self) -> None:
        if self._job is None:
            return
        self._job.join(_LINGER_SECONDS)  # ranks that have ended let their tasks end
        if self._job.is_alive():
            with contextlib.suppress(Exception):  # a Spark that is gone
                self._context.cancelJobGroup(self._group)
            self._job.join(_CANCEL_SECONDS)
        self._job = None

    def close(self) -> None:
        self.stop()
        if self._driver is not None:
            self._driver.close()

    def _run(self, job: Any) -> None:
        try:
            self._context.setJobGroup(self._group, f"{self._workers} ranks of Syncline")
            job.collect()
        except Exception as error:
            self._failure = words_of(error)

    @contextlib.contextmanager
    def _interpreter(self) -> Iterator[None]:
        """Without PYSPARK_PYTHON, Spark takes the first python3 on the PATH, which need not be this one."""
        before = self._context.pythonExec
        if "PYSPARK_PYTHON" not in os.environ and (self._is_here or self._driver is not None):
            self._context.pythonExec = sys.executable
        try:
            yield
        finally:
            self._context.pythonExec = before

    def _wait_for_room(self, workers: int) -> Counter[str]:
        """Free slots by host."""
        begun = time.monotonic()
        while True:
            slots, taken = self._slots()
            free = +(slots - taken)
            if free.total() >= workers:
                return free
            will_not_grow = self._context.master.startswith("local[") and slots.total() < workers
            patience = ROOM_SECONDS if slots.total() else FIRST_SECONDS
            if will_not_grow or time.monotonic() > begun + patience:
                raise UsageError(
                    f"Spark has no room for {workers} workers: they need as many free slots at once, and it "
                    f"has {free.total()} free of {slots.total()}.",
                    action="Use fewer --workers, or give the application more executors or cores.",
                )
            time.sleep(_LOOK_SECONDS)

    def _slots(self) -> tuple[Counter[str], Counter[str]]:
        """By host: all of them, and those where a task runs now."""
        slots: Counter[str] = Counter()
        taken: Counter[str] = Counter()
        executors = self._context._jsc.sc().statusStore().executorList(True)
        for executor in map(executors.apply, range(executors.size())):
            slots[_host(executor.hostPort())] += executor.maxTasks()
            taken[_host(executor.hostPort())] += executor.activeTasks()
        return slots, taken

    def _waiting_in_vain(self) -> str:
        if self._job is None or time.monotonic() < self._begun + PLACE_SECONDS:
            return ""
        tracker = self._context.statusTracker()
        for job in tracker.getJobIdsForGroup(self._group):
            for stage in getattr(tracker.getJobInfo(job), "stageIds", ()):
                about = tracker.getStageInfo(stage)
                if about is not None and about.numActiveTasks + about.numCompletedTasks:
                    return ""
        return f"other work has left no {self._workers} slots free at once for {PLACE_SECONDS:g} s"


def _task(order: Order, _numbers: Iterable[int]) -> Iterator[None]:
    """In a Python worker of Spark. Fails only if the rank's process could not say what was wrong to the launcher."""
    context = BarrierTaskContext.get()
    hosts = [_host(info.address) for info in context.getTaskInfos()]
    count = Counter(hosts)
    if len(count) != (order.hosts or 1) or len(set(count.values())) != 1:
        found = ", ".join(f"{number} on {host}" for host, number in count.items())
        raise RuntimeError(f"it has not spread tasks over {order.hosts or 1} hosts equally: {found}")
    number = context.partitionId()
    command = [sys.executable, "-P", "-c", _RANK, str(os.getpid()), *filter(None, sys.path)]
    seat = pickle.dumps((order, number, hosts[number]))
    ended = subprocess.run(command, input=seat, stderr=subprocess.PIPE, check=False)
    if ended.returncode and ended.stderr:
        raise RuntimeError(ended.stderr.decode(errors="replace").strip().splitlines()[-1])
    return iter(())


def _host(address: str) -> str:
    """Without the port, which is the executor's."""
    return re.sub(r":\d+$", "", address)

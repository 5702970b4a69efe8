"""A Spark of this process's own, on loopback: its start, its jobs and what Spark counted of them, its end.

Spark is a JVM that runs tasks in Python processes. It lives as long as this process does: it ends by itself when the
pipe from us closes, however that happens, and takes its processes and temporary files with it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import itertools
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.errors import CommunicationError, DeadlineError, PlanError
from syncline.machine import cores

LOOPBACK = "127.0.0.1"
MEMORY = "4g"
"""Most that the JVM takes: at the end of a job it holds what all tasks of the last stage sent."""
END_S = 10.0
SETTINGS = {
    "spark.app.name": "syncline",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "OFF",
    "spark.driver.host": LOOPBACK,
    "spark.driver.bindAddress": LOOPBACK,
    "spark.driver.memory": MEMORY,
    "spark.driver.maxResultSize": "0",
    "spark.driver.extraJavaOptions": "-XX:-UsePerfData",
}


@dataclass(frozen=True)
class Counted:
    """What Spark's own listener counted of one job."""

    stages: int
    tasks: int
    result_bytes: int
    """That tasks sent to the driver."""
    shuffle_bytes: int
    """That tasks wrote for tasks of the next stage, as Spark compressed it."""


def check_installed(method: str) -> None:
    """Refuse before anything starts where pyspark or Java is missing."""
    if importlib.util.find_spec("pyspark") is None:
        raise PlanError(
            f"method {method} needs the package pyspark, which is not installed.",
            action="Install Syncline with its extra: pip install 'syncline[spark]', or '.[spark]' in a clone.",
        )
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        raise PlanError(
            f"method {method} needs Java, which Spark runs on, and there is none.",
            action="Install Java 17 or newer, or set JAVA_HOME.",
        )


class SparkJobs:
    """One SparkContext. A process can have only one: get it from `spark_jobs`."""

    def __init__(self, slots: int) -> None:
        from pyspark import SparkConf, SparkContext

        os.environ["PYSPARK_PYTHON"] = sys.executable  # or tasks would run in whichever python3 is first on the path
        os.environ["SPARK_LOCAL_IP"] = LOOPBACK
        os.environ["SPARK_LAUNCHER_OPTS"] = "-XX:-UsePerfData"  # no files of the JVM's in the temporary folder
        conf = SparkConf(loadDefaults=False).setAll([*SETTINGS.items(), ("spark.master", f"local[{slots}]")])
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        with _without_words():
            self.context = SparkContext(conf=conf, environment={"PYTHONPATH": path})
        self._number = itertools.count()
        atexit.register(self.end)

    def share(self, value: Any) -> tuple[Any, int]:
        """A broadcast of the value, and the bytes of its pickle."""
        shared = self.context.broadcast(value)
        return shared, os.path.getsize(shared._path)

    def tree_aggregate(
        self, items: Sequence[Any], on_item: Callable[[Any, Any], Any], combine: Callable[[Any, Any], Any], *,
        depth: int, deadline_s: float, name: str,
    ) -> tuple[Any, Counted]:  # fmt: skip
        """One job with a task for each item; the driver gets the sum. `name` is for messages."""
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]

        context, group = self.context, f"syncline-{next(self._number)}"
        context.setJobGroup(group, name, interruptOnCancel=True)
        late = threading.Event()

        def give_up() -> None:
            late.set()
            context.cancelJobGroup(group)

        timer = threading.Timer(deadline_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            total = context.parallelize(items, len(items)).treeAggregate(None, on_item, combine, depth)
        except Py4JError as error:
            if late.is_set():
                message = f"{name} did not end within {deadline_s:g} s."
                raise DeadlineError(message, action="Look for a task that hangs, or raise deadline_s.") from None
            raise _explained(name, str(getattr(error, "java_exception", error))) from None
        finally:
            timer.cancel()
        return total, self._counted(group)

    def _counted(self, group: str) -> Counted:
        """Spark's listener gets its figures a moment after the job has ended."""
        spark, tracker = self.context._jsc.sc(), self.context.statusTracker()
        spark.listenerBus().waitUntilEmpty()
        jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(group)]
        stages = [
            spark.statusStore().lastStageAttempt(number) for job in jobs if job is not None for number in job.stageIds
        ]
        return Counted(
            len(stages),
            sum(stage.numCompleteTasks() for stage in stages),
            sum(stage.resultSize() for stage in stages),
            sum(stage.shuffleWriteBytes() for stage in stages),
        )

    def end(self) -> None:
        """Stop Spark and wait until its JVM is gone. A second call does nothing."""
        global _jobs
        gateway = self.context._gateway
        if gateway is None:
            return
        _jobs = None
        atexit.unregister(self.end)
        with contextlib.suppress(Exception):  # it may be gone already
            self.context.stop()
        with contextlib.suppress(Exception):
            gateway.shutdown()
        type(self.context)._gateway = type(self.context)._jvm = None  # or the next context would call this JVM
        gateway.proc.stdin.close()
        with contextlib.suppress(Exception):
            gateway.proc.wait(END_S)


_jobs: SparkJobs | None = None


def spark_jobs(slots: int) -> SparkJobs:
    """This process's Spark, started at the first call; later calls get the same one."""
    global _jobs
    if _jobs is None:
        _jobs = SparkJobs(min(slots, cores()))
    return _jobs


def _explained(name: str, text: str) -> CommunicationError:
    """Of a job whose tasks did not raise: a task's process was killed, or Spark itself gave up."""
    lines = text.splitlines()
    task = re.search(r"Task (\d+) in stage", text)
    which = f"partition {task[1]} of {name}" if task else name
    cause = next((line for line in lines if "Python worker exited" in line), lines[0] if lines else "no reason given")
    return CommunicationError(
        f"{which} failed: {cause.rpartition('SparkException: ')[2]}",
        action="Was its process killed, for lack of memory perhaps?",
    )


@contextlib.contextmanager
def _without_words() -> Any:
    """Spark and its JVM greet on stderr before they can be told not to."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)

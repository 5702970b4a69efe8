"""A Spark driver for one run: its JVM, its folder for temporary files, its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway

from syncline.errors import UsageError
from syncline.launcher.starting import LOOPBACK

_REACH_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
"""Spark itself asks something that is no master for a minute."""
_END_SECONDS = 10.0
_MOST_RANKS = 10_000
"""As at home, there may be more ranks than cores: a slot is only a number."""


def check_master(master: str) -> None:
    """A UsageError if ranks cannot run there, or nobody listens at a `spark://` address."""
    if master.startswith("sc://"):
        raise UsageError(
            f"{master} is a Spark Connect server, which runs no barrier jobs.",
            action="Give the cluster's own master, e.g. spark://HOST:7077.",
        )
    if not master.startswith("spark://"):
        return
    failures = []
    for place in master.removeprefix("spark://").split(","):
        host, _, port = place.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_REACH_SECONDS).close()
            return
        except (OSError, ValueError, OverflowError) as error:
            failures.append(f"{place}: {error}")
    raise UsageError(
        f"there is no Spark master at {master} ({'; '.join(failures)}).",
        action="Start one, or correct --master; it is written as spark://HOST:PORT.",
    )


class Driver:
    """A SparkContext, and the JVM that it runs in if there was none. `is_own`: the whole Spark is this process's."""

    def __init__(self, master: str | None) -> None:
        was_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
        self.is_own = master is None and not was_submitted
        self._gateway: Any = None
        self._folder = ""
        self._gave_up = ""
        conf = SparkConf()
        conf.setAll(_settings(f"local[{_MOST_RANKS}]" if self.is_own else master))
        needs_jvm = SparkContext._gateway is None and not was_submitted
        if needs_jvm:
            _check_java()
        try:
            if needs_jvm:
                self._start_jvm(conf)
            with self._answering_in_time(master or ""), _handler_kept():
                self.context = SparkContext(conf=conf, gateway=self._gateway)
        except BaseException as error:
            why = self._gave_up or (
                words_of(error) if hasattr(error, "java_exception") else self._said() or str(error)
            )
            self.close()
            if not isinstance(error, Exception):
                raise
            raise UsageError(f"Spark does not start{f' with {master}' if master else ''}: {why}") from None
        self.context.setLogLevel("ERROR")

    def close(self) -> None:
        if hasattr(self, "context"):
            with contextlib.suppress(Exception), _handler_kept():  # a Spark that is gone
                self.context.stop()
        if self._gateway is not None:
            with contextlib.suppress(Exception):
                self._gateway.shutdown()
            self._end_jvm(self._gateway.proc)
            SparkContext._gateway = SparkContext._jvm = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start_jvm(self, conf: Any) -> None:
        """Out of reach of the terminal's signals: a Ctrl-C must find it alive, to end ranks in order."""
        self._folder = tempfile.mkdtemp(prefix="spark-")
        options = f"-Djava.io.tmpdir={self._folder} -XX:-UsePerfData"
        conf.set("spark.driver.extraJavaOptions", options)
        with Path(self._folder, "log").open("w") as log:
            self._gateway = launch_gateway(conf, {"stdout": log, "stderr": log, "start_new_session": True})

    @contextlib.contextmanager
    def _answering_in_time(self, master: str) -> Iterator[None]:
        timer = threading.Timer(_ANSWER_SECONDS, self._give_up)
        if self._gateway is not None and master.startswith("spark://"):
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        self._gave_up = f"what listens there did not answer as a Spark master within {_ANSWER_SECONDS:g} s."
        self._gateway.proc.kill()

    def _said(self) -> str:
        """The JVM's last line that is no part of a stack."""
        with contextlib.suppress(OSError):
            lines = Path(self._folder, "log").read_text().splitlines()
            line = next((line for line in reversed(lines) if line.strip() and not line[0].isspace()), "")
            return line.removeprefix('Exception in thread "main" ')
        return ""

    def _end_jvm(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # it lives as long as this is open
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def words_of(error: BaseException) -> str:
    """Why Spark failed: the last line of what it says that is no part of a stack."""
    java = getattr(error, "java_exception", None)
    lines = str(java.getMessage() if java is not None else error).splitlines()
    further = (" ", "\t", "Caused by:", "Driver stacktrace:")
    telling = [line for line in lines if line.strip() and not line.startswith(further)]
    return telling[-1][:300] if telling else type(error).__name__


def _check_java() -> None:
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    if shutil.which(java) is None:
        raise UsageError(f"Spark needs Java, and there is no {java}.", action="Install Java 17, or set JAVA_HOME.")


def _settings(master: str | None) -> list[tuple[str, str]]:
    """All that is not set here is as spark-defaults.conf and spark-submit have it."""
    settings = {
        "spark.app.name": "syncline",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.dynamicAllocation.enabled": "false",  # barrier jobs need this
    }
    if master is not None:
        settings["spark.master"] = master
        if master.startswith("local"):
            settings |= {"spark.driver.host": LOOPBACK, "spark.driver.bindAddress": LOOPBACK}
    return list(settings.items())


@contextlib.contextmanager
def _handler_kept() -> Iterator[None]:
    """Spark sets a handler for SIGINT; ours, and the user's, stay."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, handler)

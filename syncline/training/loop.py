"""The loop around the step: epochs, loss lines, evaluation, checkpoints, timing."""

from __future__ import annotations

import math
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from syncline.comm.communicator import Communicator
from syncline.errors import DriftError, NotFiniteError, RunFolderError
from syncline.folders import Folder
from syncline.plan import Plan
from syncline.training import checkpoint
from syncline.training.checkpoint import Progress
from syncline.training.evaluate import Evaluation, evaluate, evaluate_per_rank
from syncline.training.health import LossWatch, Replicas, refuse_spoiled_weights
from syncline.training.manifest import find_checkpoints
from syncline.training.step import StepResult, Worker, discarded_backward, seed_forward, train_step
from syncline.training.watching import StepWatch
from syncline.workload.data.loading import announced
from syncline.workload.recipes import learning_rate, set_learning_rate
from syncline.workload.sharding import Sharding
from syncline.workload.tasks import Task


class Observer(Protocol):
    """Whoever shows what happens. Only rank 0's is asked to draw anything."""

    def step(self, step: int, total: int, loss: float, units_per_s: float) -> None: ...
    def doing(self, what: str) -> None: ...
    def line(self, text: str) -> None: ...


@dataclass(frozen=True)
class Loop:
    """One rank's training run."""

    plan: Plan
    worker: Worker
    sharding: Sharding
    communicator: Communicator
    observer: Observer
    checkpoints: Folder | None
    """Where checkpoints go; none are written if absent."""
    watch: StepWatch | None = None
    """What is counted and profiled around each step."""

    @cached_property
    def replicas(self) -> Replicas:
        return Replicas(self.worker.model, self.communicator)

    @cached_property
    def loss_watch(self) -> LossWatch:
        return LossWatch()

    @cached_property
    def _warned(self) -> list[NotFiniteError]:
        """The first of this rank, if it went on."""
        return []

    @property
    def task(self) -> Task:
        return self.worker.batches.task

    @property
    def total_steps(self) -> int:
        return self.plan.steps or (self.plan.epochs or 1) * self.sharding.steps_per_epoch

    def learning_rate(self, step: int) -> float:
        """From the step's number alone, so that a resumed run uses the same rates."""
        lengths = (self.total_steps, self.plan.global_batch, self.sharding.steps_per_epoch)
        return learning_rate(self.plan.optimizer, step, *lengths)

    def run(self, *, resume: bool = False) -> tuple[Progress, list[float]]:
        """Train to the end of the plan. Returns how far it came and each step's seconds on the slowest rank."""
        progress = Progress()
        if resume and self.checkpoints is not None:
            about = (self.checkpoints, self.plan, self.worker)
            progress = checkpoint.load(*about, self.communicator, self.observer.line)
            self._check(progress)
            self.replicas.agreed = progress.step
            self._evaluate_epoch(progress)  # a stop may have come before it was done
        if self.worker.sync.rebuilds_after_first_backward:
            discarded_backward(self.worker, next(self.sharding.epoch(0)))
        seconds: list[float] = []
        try:
            while progress.step < self.total_steps:
                self._run_epoch(progress, seconds)
        except (NotFiniteError, DriftError) as error:
            error.action += f" {self._last_checkpoint()}"
            raise
        return progress, self._slowest(seconds)

    def _check(self, progress: Progress) -> None:
        """A place that no run of this plan comes to would never end."""
        steps = self.sharding.steps_per_epoch
        expected = progress.epoch * steps + progress.step_in_epoch
        folder = self.checkpoints and self.checkpoints.path
        if progress.step != expected or progress.epoch < 0 or not 0 <= progress.step_in_epoch <= steps:
            raise RunFolderError(
                f"the checkpoint in {folder} is at step {progress.step}, epoch {progress.epoch}, which "
                f"this plan with {steps} steps an epoch does not come to.",
                action="Put plan and data back as they were, or start a new run.",
            )

    def _run_epoch(self, progress: Progress, seconds: list[float]) -> None:
        upcoming = self.sharding.epoch(progress.epoch, progress.step_in_epoch)
        for shard in announced(self.worker.batches, upcoming, self.worker.accumulate):
            self.worker.log.step = progress.step
            rate = self.learning_rate(progress.step)
            set_learning_rate(self.worker.optimizer, rate)
            seed_forward(self.plan.seed, self.communicator.rank, progress.step)
            with self.watch.step(progress.step) if self.watch else nullcontext():
                start_ns = time.monotonic_ns()
                result = train_step(self.worker, shard)
                end_ns = time.monotonic_ns()
            self._note(progress, result, start_ns, end_ns, rate)
            seconds.append((end_ns - start_ns) / 1e9)
            per_second = shard.num_global * self.task.units_per_sample / seconds[-1]
            self.observer.step(progress.step, self.total_steps, result.loss, per_second)
            self._look_at_loss(progress, result, rate)
            if progress.step % self.plan.log_every == 0:
                self._loss_line(progress, result, rate)
            if self.plan.check_every and progress.step % self.plan.check_every == 0:
                self._compare_weights(progress.step)
            ended = progress.step == self.total_steps
            every = self.plan.checkpoint.every
            if every and progress.step % every == 0 and not ended and not self._epoch_ended(progress):
                self._save(progress)
            if ended:
                break
        self._end_epoch(progress)

    def _epoch_ended(self, progress: Progress) -> bool:
        return progress.step_in_epoch == self.sharding.steps_per_epoch

    def _note(self, progress: Progress, result: StepResult, start_ns: int, end_ns: int, rate: float) -> None:
        log = self.worker.log
        log.add("step", start=start_ns, end=end_ns, learning_rate=rate)
        if not self.plan.replayed and math.isfinite(result.loss):
            log.add("loss", value=result.loss, samples=result.num_samples)
        log.flush()
        progress.step += 1
        progress.step_in_epoch += 1
        progress.loss_sum += result.loss * result.num_samples
        progress.score_sum += result.score_sum
        progress.num_samples += result.num_samples

    def _look_at_loss(self, progress: Progress, result: StepResult, rate: float) -> None:
        """What rank 0 sees of its own loss; and what any rank has to say, in its output, if it goes on with NaN."""
        if self.plan.replayed:
            return
        line = self.loss_watch.look(progress.step, result.loss, result.guess_loss, rate)
        if line:
            self.observer.line(line)
        if result.not_finite is not None and not self._warned:
            self._warned.append(result.not_finite)
            text = f"{result.not_finite} {self._last_checkpoint()}"
            # Another rank's observer draws nothing, and its output goes to a file.
            self.observer.line(text) if self.communicator.rank == 0 else print(text, file=sys.stderr, flush=True)

    def _compare_weights(self, step: int) -> None:
        """Collective."""
        self.worker.sync.synchronize()
        self.replicas.compare(step)

    def _last_checkpoint(self) -> str:
        if self.checkpoints is None or not (saved := list(find_checkpoints(self.checkpoints).values())):
            return "There is no checkpoint yet."
        return f"The last good checkpoint is {self.checkpoints.path / saved[-1]}."

    def _loss_line(self, progress: Progress, result: StepResult, rate: float) -> None:
        """The loss over the global batch of this step, and each rank's own."""
        if self.plan.replayed:
            self.observer.line(f"step {progress.step:>5}/{self.total_steps}  compute {self.plan.compute_note}")
            return
        own = torch.tensor([result.loss * result.num_samples, result.num_samples], dtype=torch.float64)
        parts = self._all_gather("loss line", own)
        loss = sum(float(part[0]) for part in parts) / sum(float(part[1]) for part in parts)
        by_rank = [float(part[0] / part[1]) if part[1] else None for part in parts]
        line = {"step": progress.step, "loss": loss, "by_rank": by_rank, "learning_rate": rate}
        progress.loss_lines.append(line)
        step = f"step {progress.step:>5}/{self.total_steps}"
        self.observer.line(f"epoch {progress.epoch}  {step}  loss {loss:.4f}  rate {rate:.4g}")

    def _end_epoch(self, progress: Progress) -> None:
        """Totals of the epoch over all ranks, then a checkpoint, then evaluation: a stop there costs no training."""
        self.worker.sync.synchronize()
        if not self.plan.replayed:
            self._total_epoch(progress)
        if self._epoch_ended(progress):
            progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
            progress.loss_sum, progress.score_sum, progress.num_samples = 0.0, 0.0, 0
        self._save(progress)
        self._evaluate_epoch(progress)

    def _total_epoch(self, progress: Progress) -> None:
        sums = [progress.loss_sum, progress.score_sum, progress.num_samples]
        parts = self._all_gather("epoch totals", torch.tensor(sums, dtype=torch.float64))
        loss, score, samples = (sum(float(part[i]) for part in parts) for i in range(3))
        entry: dict[str, Any] = {
            "epoch": progress.epoch,
            "steps": progress.step_in_epoch,
            "train_loss": loss / samples,
            f"train_{self.task.metric}": self.task.mean_score(score, int(samples)),
            "train_per_rank": [self._own_totals(part) for part in parts],
        }
        progress.epochs.append(entry)
        if not self.plan.evaluate:
            self.observer.line(self._trained(entry))

    def _trained(self, entry: dict[str, Any]) -> str:
        score = self.task.describe(entry[f"train_{self.task.metric}"] * self.task.answers_per_sample, 1)
        return f"epoch {entry['epoch']}  training loss {entry['train_loss']:.4f}, {score}"

    def _evaluate_epoch(self, progress: Progress) -> None:
        """Of an epoch that has just ended, unless that was done before a stop."""
        ended = progress.step_in_epoch == 0 or progress.step == self.total_steps
        if self.plan.evaluate and ended and progress.epochs and "test_loss" not in progress.epochs[-1]:
            text = self._evaluate(progress.epochs[-1])
            self.observer.line(f"{self._trained(progress.epochs[-1])}{text}")

    def _own_totals(self, sums: torch.Tensor) -> dict[str, float | None]:
        """A rank's training loss and score over its own shards; None where it had no sample."""
        loss, score, samples = sums.tolist()
        if not samples:
            return {"loss": None, self.task.metric: None}
        return {"loss": loss / samples, self.task.metric: self.task.mean_score(score, int(samples))}

    def _evaluate(self, entry: dict[str, Any]) -> str:
        about = (self.worker.model, self.worker.batches, self.communicator, self.plan.precision)
        with self.worker.log.span("evaluate"):
            result = evaluate(*about, self.plan.test_samples, self._evaluated)
        entry |= self._figures("test_", result)
        if self.plan.eval_per_rank:
            by_rank = evaluate_per_rank(*about, self.plan.test_samples, self._evaluated)
            entry["test_per_rank"] = [self._figures("", own) for own in by_rank]
            for rank, own in enumerate(by_rank):
                self.observer.line(f"  rank {rank}'s own buffers: test {self._described(own)}")
        return f"; test {self._described(result)}"

    def _evaluated(self, done: int, total: int) -> None:
        self.observer.doing(f"evaluating, {done / total:.0%} of the test set")

    def _figures(self, prefix: str, result: Evaluation) -> dict[str, Any]:
        mean = self.task.mean_score(result.score_sum, result.num_samples)
        figures = {"loss": result.loss, self.task.metric: mean, self.task.asked: self._answers(result)}
        if self.task.counts_right_answers:
            figures["correct"] = int(result.score_sum)
        return {f"{prefix}{name}": value for name, value in figures.items()}

    def _described(self, result: Evaluation) -> str:
        text = f"loss {result.loss:.4f}, {self.task.describe(result.score_sum, result.num_samples)}"
        return text + (
            f" ({int(result.score_sum)}/{self._answers(result)})" if self.task.counts_right_answers else ""
        )

    def _answers(self, result: Evaluation) -> int:
        return result.num_samples * self.task.answers_per_sample

    def _save(self, progress: Progress) -> None:
        if self.checkpoints is not None:
            self._compare_weights(progress.step)
            if self.worker.on_nan == "stop":
                refuse_spoiled_weights(self.worker.model, rank=self.communicator.rank, step=progress.step - 1)
            self.worker.log.flush(force=True)  # what a checkpoint holds, the log holds too
            with self.worker.log.span("checkpoint"):
                about = (self.checkpoints, self.plan, self.worker, progress)
                checkpoint.save(*about, self.communicator)

    def _slowest(self, seconds: list[float]) -> list[float]:
        """A synchronous step lasts as long as its slowest rank needs."""
        if not seconds:
            return []
        parts = self._all_gather("step times", torch.tensor(seconds, dtype=torch.float64))
        return [float(value) for value in torch.stack(parts).amax(0)]

    def _all_gather(self, scope: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        with self.communicator.scope(scope):
            return [part.cpu() for part in self.communicator.all_gather(tensor.to(self.communicator.device))]

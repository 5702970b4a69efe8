"""The loop around the step: epochs, loss lines, evaluation, checkpoints, timing."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from syncline.comm.communicator import Communicator
from syncline.plan import Plan
from syncline.training import checkpoint
from syncline.training.checkpoint import Progress
from syncline.training.evaluate import Evaluation, evaluate, evaluate_per_rank
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
    checkpoints: Path | None
    """Where checkpoints go; none are written if absent."""
    watch: StepWatch | None = None
    """What is counted and profiled around each step."""
    keeper: int = 0
    """The rank that writes there what all ranks share."""

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
            progress = checkpoint.load(self.checkpoints, self.worker, self.communicator, self.keeper)
        if self.worker.sync.rebuilds_after_first_backward:
            discarded_backward(self.worker, next(self.sharding.epoch(0)))
        seconds: list[float] = []
        while progress.step < self.total_steps:
            self._run_epoch(progress, seconds)
        return progress, self._slowest(seconds)

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
            if progress.step % self.plan.log_every == 0:
                self._loss_line(progress, result, rate)
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
        if not self.plan.replayed:
            log.add("loss", value=result.loss, samples=result.num_samples)
        log.flush()
        progress.step += 1
        progress.step_in_epoch += 1
        progress.loss_sum += result.loss * result.num_samples
        progress.score_sum += result.score_sum
        progress.num_samples += result.num_samples

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
        """Totals of the epoch over all ranks, then evaluation, then a checkpoint."""
        self.worker.sync.synchronize()
        if not self.plan.replayed:
            self._total_epoch(progress)
        if self._epoch_ended(progress):
            progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
            progress.loss_sum, progress.score_sum, progress.num_samples = 0.0, 0.0, 0
        self._save(progress)

    def _total_epoch(self, progress: Progress) -> None:
        sums = [progress.loss_sum, progress.score_sum, progress.num_samples]
        parts = self._all_gather("epoch totals", torch.tensor(sums, dtype=torch.float64))
        loss, score, samples = (sum(float(part[i]) for part in parts) for i in range(3))
        entry: dict[str, Any] = {
            "epoch": progress.epoch,
            "steps": progress.step_in_epoch,
            "train_loss": loss / samples,
            f"train_{self.task.metric}": self.task.mean_score(score, int(samples)),
        }
        text = f"epoch {progress.epoch}  training loss {loss / samples:.4f}, "
        text += self.task.describe(score, int(samples))
        if self.plan.evaluate:
            text += self._evaluate(entry)
        self.observer.line(text)
        progress.epochs.append(entry)

    def _evaluate(self, entry: dict[str, Any]) -> str:
        self.observer.doing("evaluating")
        with self.worker.log.span("evaluate"):
            result = evaluate(self.worker.model, self.worker.batches, self.communicator, self.plan.precision)
        entry |= self._figures("test_", result)
        if self.plan.eval_per_rank:
            by_rank = evaluate_per_rank(
                self.worker.model, self.worker.batches, self.communicator, self.plan.precision
            )
            entry["test_per_rank"] = [self._figures("", own) for own in by_rank]
            for rank, own in enumerate(by_rank):
                self.observer.line(f"  rank {rank}'s own buffers: test {self._described(own)}")
        return f"; test {self._described(result)}"

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
            self.worker.log.flush(force=True)  # what a checkpoint holds, the log holds too
            with self.worker.log.span("checkpoint"):
                checkpoint.save(self.checkpoints, self.worker, progress, self.communicator, self.keeper)

    def _slowest(self, seconds: list[float]) -> list[float]:
        """A synchronous step lasts as long as its slowest rank needs."""
        if not seconds:
            return []
        parts = self._all_gather("step times", torch.tensor(seconds, dtype=torch.float64))
        return [float(value) for value in torch.stack(parts).amax(0)]

    def _all_gather(self, scope: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        with self.communicator.scope(scope):
            return [part.cpu() for part in self.communicator.all_gather(tensor.to(self.communicator.device))]

"""Composition: use cases, from a plan to a finished run folder, once for every place and every verb.

    run = syncline.train(model="vgg11", method="bucketed", workers=2, steps=20)
    syncline.compare(methods=["ddp", "bucketed"], workers=2).table()
    syncline.verify(workers=4).holds

They return values, raise Syncline's errors and print nothing unless asked (`show`). The process that calls them owns
the run: it makes the folder, holds its lock, starts the ranks in their place, and writes status and summary, once.
Torch is imported late: a wrong plan is refused in milliseconds.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.errors import Interrupted, PlanError, RunFolderError
from syncline.launcher.places import Nodes, Place, place_for
from syncline.machine import oversubscription
from syncline.methods import BASELINE, BLOCK, METHODS, PLANNED_AFTER
from syncline.plan import Plan, load_plan
from syncline.readiness import make_ready
from syncline.remote import new_folder, shown
from syncline.results import Certificates, Comparison, Probe
from syncline.running import Job, started
from syncline.store import Run, RunFolder, load_run, resumable_run, run_with_steps
from syncline.units import parse_bytes
from syncline.voice import Show, Voice

if TYPE_CHECKING:
    from syncline.accounting.explanation import Explanation
    from syncline.study.cells import Cell

COMPARED = tuple(name for name, row in METHODS.items() if row.compared)
"""What `compare` compares unless told otherwise."""
SENDING = tuple(name for name, row in METHODS.items() if row.takes_turns and not row.alone)
"""What `verify` certifies unless told otherwise."""
BACKENDS = ("gloo", "shared-memory", "mpi")
PROBED = ("gloo", "shared-memory")
PROBED_BYTES = tuple(1000 * 4**power for power in range(8))
"""1 kB to 16.4 MB."""
MOST_BYTES = 1_000_000_000
PROBE_VISITS = 7

PlanSource = Plan | Path | str | None
"""A plan, the path of one in TOML, or None for the defaults."""


def train(
    plan: PlanSource = None, *,
    model: str | None = None, data: str | None = None, data_dir: Path | str | None = None, method: str | None = None,
    workers: int | None = None, threads: int | None = None, global_batch: int | None = None,
    steps: int | None = None, epochs: int | None = None, recipe: str | None = None,
    optimizer: str | None = None, clip_norm: float | None = None, precision: str | None = None,
    seed: int | None = None, compute: str | None = None,
    hosts: int | None = None, link: str | None = None, max_restarts: int | None = None,
    settings: Mapping[str, Any] | None = None,
    run_dir: Path | str | None = None, place: Place | None = None, show: Show = "nothing",
) -> Run:  # fmt: skip
    """Train a model on many workers, with one method.

    Keywords override the plan; `settings` takes any other plan key ("optimizer.learning_rate"). The run is written to
    `run_dir`, or to a new folder below runs/.
    """
    flags = {
        "model": model, "data": data, "data_dir": data_dir, "method": method, "workers": workers, "threads": threads,
        "global_batch": global_batch, "steps": steps, "epochs": epochs, "recipe": recipe, "seed": seed,
        "optimizer.name": optimizer, "optimizer.clip_norm": clip_norm, "precision": precision,
        "compute": compute, "hosts": hosts, "link": link, "max_restarts": max_restarts,
    }  # fmt: skip
    given, voice, folder = make_plan(plan, flags, settings), Voice(show), _new_folder(run_dir, place)
    with at(place, given, voice) as (place, given):
        return Run(_train(resolved(given, place, voice), place, voice, run_dir=folder).path)


def resume(run: Run | Path | str | None = None, *, place: Place | None = None, show: Show = "nothing") -> Run:
    """Continue a training run from its last checkpoint: the one given, or the newest below runs/.

    A node other than node 0 needs no run: it is told which one, and its plan.
    """
    voice = Voice(show)
    if isinstance(place, Nodes) and not place.owns_run:
        old, given = None, place.plan_of_node_0()
    else:
        old = resumable_run(run.path if isinstance(run, Run) else run)
        given = old.plan()
        if given.replayed:
            raise RunFolderError(
                f"{shown(old.path)} is a replayed run: it keeps no checkpoints.", action="Start a new run."
            )
    with at(place, given, voice) as (place, given):
        return Run(_train(resolved(given, place, voice, quiet=True), place, voice, old=old).path)


def compare(
    plan: PlanSource = None, *, methods: Sequence[str] = COMPARED,
    model: str | None = None, data: str | None = None, data_dir: Path | str | None = None,
    workers: int | None = None, threads: int | None = None, global_batch: int | None = None,
    steps: int = 10, warmup: int = 2, optimizer: str | None = None, clip_norm: float | None = None,
    precision: str | None = None, seed: int | None = None, compute: str | None = None,
    hosts: int | None = None, link: str | None = None, settings: Mapping[str, Any] | None = None,
    run_dir: Path | str | None = None, place: Place | None = None, when_busy: str = "go", show: Show = "nothing",
) -> Comparison:  # fmt: skip
    """Time methods side by side: they take turns step by step on the same batches, in one world of ranks.

    `when_busy`: what to do if other programs keep the machine busy, "go", "wait" or "refuse".
    """
    names, voice, folder = method_names(methods), Voice(show), _new_folder(run_dir, place)
    flags = {
        "model": model, "data": data, "data_dir": data_dir, "workers": workers, "threads": threads,
        "global_batch": global_batch, "steps": steps, "measure.warmup": warmup, "seed": seed, "compute": compute,
        "hosts": hosts, "link": link, "method": leading(names),
        "optimizer.name": optimizer, "optimizer.clip_norm": clip_norm, "precision": precision,
    }  # fmt: skip
    with at(place, make_plan(plan, flags, settings), voice) as (place, given):
        names = method_names(methods, given)
        names = _without_single(names, voice) if given.replayed else names
        names = _on_several_hosts(names, is_default=tuple(methods) == COMPARED) if given.hosts > 1 else names
        make_ready(when_busy, voice)
        chosen = resolved(given, place, voice)
        return Comparison(Run(_compare(chosen, names, place, voice, run_dir=folder).path))


def verify(
    *, workers: int | Sequence[int] = 2, methods: Sequence[str] = SENDING, models: Sequence[str] = ("cnn", "vgg11"),
    transfer_dtype: str | None = None, batch_norm: str | None = None, precision: str | None = None,
    threads: int | None = None, seed: int | None = None, hosts: int | None = None, link: str | None = None,
    place: Place | None = None, show: Show = "nothing",
) -> Certificates:  # fmt: skip
    """Prove that each method computes what one worker would.

    Two references: the same shards run one after the other, and one worker on the whole batch.
    """
    names = method_names(methods)
    if transfer_dtype:
        names = [name for name in names if "transfer_dtype" in METHODS[name].options]
    if not names or any(METHODS[name].sends_nothing for name in names):
        silent = " and ".join(name for name, row in METHODS.items() if row.sends_nothing)
        raise PlanError(f"nothing to certify: {silent} send nothing, and not all methods support 16-bit transfers.")
    sizes = [workers] if isinstance(workers, int) else list(workers)
    flags = {
        "threads": threads, "seed": seed, "batch_norm": batch_norm, "precision": precision,
        "options.transfer_dtype": transfer_dtype,
        "hosts": hosts, "link": link, "data": "synthetic", "method": leading(names),
    }  # fmt: skip
    plans = [make_plan(None, {**flags, "workers": size, "model": model}) for size in sizes for model in models]
    voice, rows = Voice(show), []
    with place.opened() if place is not None else nullcontext():
        for plan in plans[:: len(models)]:
            with at(place, plan, voice) as (where, given):
                names = method_names(methods, given)
                names = [name for name in names if not transfer_dtype or "transfer_dtype" in METHODS[name].options]
                if given.hosts > 1:
                    names = _on_several_hosts(names, is_default=tuple(methods) == SENDING)
                chosen = resolved(given, where, voice, quiet=True)
                with where.joined(chosen, voice) as ranks:
                    from syncline import worker

                    rows += ranks.run(worker.certify, (chosen, names, list(models), voice), chosen, None)
    return Certificates(rows)


def probe(
    *, workers: int | None = None, backends: Sequence[str] = PROBED, sizes: Sequence[int | str] = PROBED_BYTES,
    repeats: int = PROBE_VISITS, threads: int | None = None, hosts: int | None = None, link: str | None = None,
    run_dir: Path | str | None = None, place: Place | None = None, show: Show = "nothing",
) -> Probe:  # fmt: skip
    """Time all-reduce, send and receive, broadcast, gather and scatter by message size, and fit latency and rate."""
    names, num_bytes = _backends(backends), _message_sizes(sizes)
    if repeats < 1:
        raise PlanError(f"--repeats {repeats} measures nothing.", action="Use at least 1.")
    flags = {"workers": workers, "threads": threads, "hosts": hosts, "link": link}
    plan, voice = make_plan(None, {**flags, "data": "synthetic", "method": "all-reduce"}), Voice(show)
    if plan.workers < 2:
        raise PlanError("a probe needs another rank to talk to.", action="Use at least 2 workers.")
    folder = _new_folder(run_dir, place)
    with at(place, plan, voice) as (place, plan):
        if plan.hosts > 1:
            names = _between_hosts(names, is_default=tuple(backends) == PROBED)
        if "mpi" in names:
            place.settled(plan.replace(method="mpi"))  # refused where mpiexec cannot start ranks
            from syncline.launcher.mpi import mpiexec_command

            mpiexec_command(plan.workers)  # better to learn now that there is none than after the others' turn
        run = _probe(plan, names, num_bytes, repeats, place, voice, run_dir=folder)
    return Probe(Run(run.path))


def explain(
    run: Run | Path | str | None = None, *, method: str | None = None, probe: Run | Path | str | None = None
) -> Explanation:
    """Say where the time of a run went and what would help most: the run given, or the newest below runs/ with steps.

    `probe` is a probe run for the rate of the link; without it, the newest that fits.
    """
    from syncline.accounting.explanation import explain as explain_run

    return explain_run(_opened(run), method=method, probe=_probe_run(probe) if probe is not None else None)


def run_cell(cell: Cell, path: Path, voice: Voice | None = None, place: Place | None = None) -> None:
    """Run one cell of a study into its run folder. Raises UsageError if it cannot run here."""
    voice = voice or Voice()
    with at(place, cell.plan, voice) as (where, given):
        _run_cell(cell, resolved(given, where, voice), where, path, voice)


def _run_cell(cell: Cell, plan: Plan, place: Place, path: Path, voice: Voice) -> None:
    check_needed(cell.methods)
    if cell.run == "train":
        run = _train(plan, place, voice, run_dir=path)
        shutil.rmtree(run.checkpoints, ignore_errors=True)  # a study never continues a cell
    elif cell.run == "compare":
        _compare(plan, list(cell.methods), place, voice, run_dir=path)
    elif cell.run == "probe":
        backends = _between_hosts(list(PROBED), is_default=True) if plan.hosts > 1 else list(PROBED)
        _probe(plan, backends, list(PROBED_BYTES), plan.steps or PROBE_VISITS, place, voice, run_dir=path)
    else:
        with started(cell.run, plan, place, voice, label=cell.stage, run_dir=path) as job:
            from syncline import worker

            if cell.run == "verify":
                rows = job.on_ranks(worker.certify, plan, list(cell.methods), [plan.model], voice)
            else:
                rows = job.on_ranks(worker.call, plan, cell.call)
            job.finish({"rows": rows})


@contextmanager
def at(place: Place | None, plan: Plan, voice: Voice) -> Iterator[tuple[Place, Plan]]:
    """The place of a run, reached, and the plan as settled there; without one, where such a plan usually runs."""
    place = place or place_for(plan)
    voice.doing("reaching the place of the run")
    check_needed([plan.method])
    with place.opened():
        yield place, place.settled(plan)


def check_needed(methods: Sequence[str]) -> None:
    """Refuse methods whose package is not installed, before any rank starts."""
    for name in methods:
        if METHODS[name].world == "tasks":
            from syncline.sync.spark_jobs import check_installed

            check_installed(name)


def make_plan(plan: PlanSource, overrides: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> Plan:
    """A plan, or a file's plan, changed by the keys given; None means 'not given'."""
    given = {**overrides, **(settings or {})}
    if given.get("data_dir") is not None:
        given["data_dir"] = str(given["data_dir"])
    return load_plan(plan if isinstance(plan, Plan) else _path(plan), given)


def resolved(plan: Plan, place: Place, voice: Voice, *, quiet: bool = False) -> Plan:
    """The plan with data and threads filled in; says which data it uses and whether cores are short."""
    from syncline.resolve import resolve

    place.prepare(plan)  # it loads torch while the data is checked
    voice.doing("checking the data")
    ranks_here = place.ranks_here(plan)
    progress = voice.fetched if voice.has_bar else None
    plan, sentence = resolve(plan, ranks_per_host=ranks_here, num_hosts=plan.hosts, progress=progress)
    if not quiet:
        voice.say(sentence)
    warning = oversubscription(ranks_here, plan.threads or 1)
    if warning and not plan.replayed:
        voice.warn(warning)
    return plan


def where_to_continue(run: RunFolder) -> str:
    try:
        step = run.checkpoint_step()
    except OSError:
        return "after the last checkpoint"  # node 0, which has it, is gone already
    return "from the start (no checkpoint yet)" if step is None else f"after step {step}"


def _train(
    plan: Plan, place: Place, voice: Voice, *, run_dir: Path | None = None, old: RunFolder | None = None
) -> RunFolder:
    job: Job | None = None
    try:
        with started(
            "train", plan, place, voice, label=f"{plan.method}-{plan.workers}", run_dir=run_dir, old=old
        ) as job:
            threads = "1 thread" if plan.threads == 1 else f"{plan.threads} threads"
            note = f", compute {plan.compute_note}" if plan.replayed else ""
            note += "" if plan.precision == "float32" else f", {plan.precision}"
            voice.say(
                f"{plan.model}, {plan.method}, {plan.workers} x {threads}{note}; run folder {shown(job.run.path)}"
            )
            if job.resumes:
                voice.say(f"continuing {where_to_continue(job.run)}")
            from syncline import worker

            job.finish(job.on_ranks(worker.train, plan, job.run, job.resumes, voice))
            return job.run
    except (Interrupted, KeyboardInterrupt) as error:
        message = error.message if isinstance(error, Interrupted) else "Stopped by Ctrl-C."
        if job is None:
            raise Interrupted(message) from None
        resume = f"syncline train --resume {shown(job.run.path)}{job.ranks.how_to_resume}"
        raise Interrupted(message, action=f"Continue {where_to_continue(job.run)} with: {resume}") from None


def _compare(plan: Plan, names: list[str], place: Place, voice: Voice, *, run_dir: Path | None) -> RunFolder:
    # Two halves of a comparison cannot be compared: it does not restart.
    plan = in_blocks(plan.replace(max_restarts=0), names)
    with started("compare", plan, place, voice, label=str(plan.workers), run_dir=run_dir) as job:
        from syncline import worker

        rows = job.on_ranks(worker.compare, plan, job.run, names, voice)
        about = {"workers": plan.workers, "compute": plan.compute_note, "global_batch": plan.global_batch}
        job.finish({**about, "rows": rows})
    return job.run


def in_blocks(plan: Plan, names: Sequence[str]) -> Plan:
    """A method whose transfers go on into the next step takes turns of several steps: a turn of one would be a
    barrier. Steps and warm-up are made whole turns, at least as many as such a method needs to plan its transfers."""
    block = plan.measure.block
    goes_on = any(METHODS[name].goes_on(plan.options_for(name)) for name in names)
    if block == 1 and goes_on:
        block = BLOCK
    if block == 1:
        return plan
    least = PLANNED_AFTER if goes_on else 0
    warmup = -(-max(plan.measure.warmup, least) // block) * block
    steps = max(-(-(plan.steps or 1) // block), 3) * block
    return plan.replace(steps=steps, measure=plan.measure.model_copy(update={"warmup": warmup, "block": block}))


def _probe(
    plan: Plan,
    backends: list[str],
    sizes: list[int],
    visits: int,
    place: Place,
    voice: Voice,
    *,
    run_dir: Path | None,
) -> RunFolder:
    label = f"{'+'.join(backends)}-{plan.workers}"
    with started("probe", plan, place, voice, label=label, run_dir=run_dir) as job:
        from syncline import worker
        from syncline.measure.probing import summarise

        rows: list[dict[str, Any]] = []
        if within := [name for name in backends if name != "mpi"]:
            rows += job.on_ranks(worker.probe, plan, within, sizes, visits, voice)
        if "mpi" in backends:  # mpiexec starts ranks of its own; the other backends share one world
            rows += job.on_ranks(worker.probe, plan.replace(method="mpi"), ["mpi"], sizes, visits, voice)
        job.finish(summarise(rows, workers=plan.workers, hosts=plan.hosts, link=plan.link))
    return job.run


def leading(names: Sequence[str]) -> str:
    """The method that decides how many ranks there are: the first that sends, if any does."""
    return next((name for name in names if not METHODS[name].alone), names[-1])


def method_names(words: Sequence[str], plan: Plan | None = None) -> list[str]:
    """The methods, each once; refuses unknown ones with the plan's error. With a plan, `auto` is what suits it."""
    from syncline.resolve import choose_for_plan

    if not words:
        raise PlanError("no method given.", action=f"Choose from {', '.join(METHODS)}.")
    rows = [load_plan(None, {"method": word}).method_row for word in words]
    for row in rows:
        if not row.is_choice and not row.takes_turns:
            raise PlanError(
                f"method {row.name} has its own processes and cannot take turns with other methods.",
                action=f"Time it with `syncline train --method {row.name}`.",
            )
    names = [row.name for row in rows]
    check_needed(names)
    if plan is not None:
        chosen, _ = choose_for_plan(plan, plan.hosts)
        names = [chosen if row.is_choice else row.name for row in rows]
    return list(dict.fromkeys(names))


def _without_single(names: list[str], voice: Voice) -> list[str]:
    """One worker on the whole batch has no recorded times: those are of a worker's share."""
    others = [name for name in names if METHODS[name].world != "worker"]
    if not others:
        raise PlanError(
            f"replayed times are for one worker's share, so {BASELINE} has none for the whole batch.",
            action=f"Choose other methods, or `syncline train --method {BASELINE}` for one worker on its share.",
        )
    if len(others) < len(names):
        voice.warn(f"leaving out {BASELINE}: replayed times are for one worker's share.")
    return others


def _on_several_hosts(names: list[str], *, is_default: bool) -> list[str]:
    """What can run there: shared memory, and our own Spark, stay within one host. Refused if the user named it."""
    local = [name for name in names if METHODS[name].in_memory or METHODS[name].world == "tasks"]
    if local and not is_default:
        raise PlanError(f"method {local[0]} needs all ranks on one host.", action="Leave it out with several hosts.")
    return [name for name in names if name not in local]


def _between_hosts(backends: list[str], *, is_default: bool) -> list[str]:
    """Shared memory and this machine's mpiexec stay within one host."""
    within = [name for name in backends if name != "gloo"]
    if within and not is_default:
        raise PlanError(
            f"backend {within[0]} works on one host only.", action="Use --backend gloo with several hosts."
        )
    return ["gloo"]


def _backends(names: Sequence[str]) -> list[str]:
    unknown = [name for name in names if name not in BACKENDS]
    if unknown or not names:
        what = f"backend {unknown[0]!r} cannot be probed." if unknown else "no backend given."
        raise PlanError(what, action=f"Choose from {', '.join(BACKENDS)}.")
    return list(dict.fromkeys(names))


def _message_sizes(sizes: Sequence[int | str]) -> list[int]:
    num_bytes = sorted({parse_bytes(size) if isinstance(size, str) else size for size in sizes})
    for size in num_bytes:
        if size % 4 or size > MOST_BYTES:
            raise PlanError(
                f"--sizes {size} is not a multiple of 4 up to 1 GB: messages are made of 4-byte numbers.",
                action="Write it as 64kB,1MB.",
            )
    if not num_bytes:
        raise PlanError("--sizes is empty.", action="Write it as 64kB,1MB.")
    return num_bytes


def _opened(run: Run | Path | str | None) -> Run:
    return run if isinstance(run, Run) else run_with_steps(run)


def _probe_run(run: Run | Path | str) -> Run:
    opened = run if isinstance(run, Run) else load_run(run)
    if opened.kind != "probe":
        raise RunFolderError(f"{opened.path} is not a probe run.", action="Make one with `syncline probe`.")
    return opened


def _new_folder(run_dir: Path | str | None, place: Place | None) -> Path | None:
    """Only who owns the run makes it."""
    return new_folder(run_dir) if place is None or place.owns_run else None


def _path(path: Path | str | None) -> Path | None:
    return Path(path) if path is not None else None

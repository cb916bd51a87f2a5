"""Save checkpoints while training continues.

A save has four parts, and only one save runs at a time:
1. A few small collectives plan which rank writes what. Training waits for this part.
2. Each rank's share is copied to host memory. The next step computes meanwhile, but does not update weights before the
   copy is complete (staging.py).
3. A thread on each rank writes and fsyncs the rank's files. The threads exchange results over a gloo group.
4. The main rank's thread writes metadata and manifest, renames the folder, updates `latest`, and deletes old
   checkpoints.

The plan, the file format and the metadata come from megatron-core, but its asynchronous save is not used: it forks the
trainer to write, waits for ever if the fork is killed, and leaves a manager process after a SIGKILL of the rank.
Threads are used instead, because they end with the process, and because torch releases the GIL while it writes.
"""

from __future__ import annotations

import contextlib
import io
import queue
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from gsa_train.checkpoint.files import Manifest, prune, publish, step_folder, write_manifest
from gsa_train.checkpoint.finite import not_finite
from gsa_train.checkpoint.host_memory import HostMemory
from gsa_train.checkpoint.load import RunState, sharded_state, sharding_metadata
from gsa_train.checkpoint.staging import Copies, begin_copies
from gsa_train.checkpoint.write import BACKEND, Bucket, Written, write_metadata, write_share
from gsa_train.config import CheckpointConfig
from gsa_train.distributed.megatron_versions import SAVE_OPTIONS
from gsa_train.distributed.objects import first_said, from_main, gathered
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.interface import PhaseOptimizer

LONGEST_SAVE = timedelta(hours=2)
"""Longest wait of the ranks' threads for the slowest writer. A rank that dies ends the wait at once."""

FILE_BYTES, FEWEST_FILES, MOST_FILES = 2 << 30, 2, 8
"""Bytes per file, and limits for a rank's number of files. Several threads write faster than one, but a thousand
ranks must not write too many files."""


class CheckpointError(RuntimeError):
    """Too many saves have failed in a row, so the run stops."""


class SaveLost(RuntimeError):
    """A rank's thread could not tell the other ranks how its save ended, so the ranks may disagree about the save."""


@dataclass(frozen=True)
class SaveResult:
    """Describes the end of one save, equal on every rank except `stall_seconds`."""

    step: int
    phase: str
    folder: Path
    error: str | None
    """The cause if there is no checkpoint of this step."""
    stall_seconds: float
    """How long this rank's training waited."""
    save_seconds: float
    """Time from the beginning until `latest` named the checkpoint, or until the save had failed."""
    bytes: int = 0
    """Sum over all ranks."""
    warnings: list[str] = field(default_factory=list)
    """Failures other than the save's own."""
    not_finite: bool = False
    """The state has values that are not finite, so a retry would fail as well."""


@dataclass
class _Save:
    state: RunState
    folder: Path
    """The folder under its temporary name."""
    began: float
    common: bytes = b""
    """The state that is not sharded, on the main rank."""
    writer: Any = None
    metadata: Any = None
    """Metadata of all files, on the main rank."""
    buckets: list[Bucket] = field(default_factory=list)
    copies: Copies | None = None
    """The copies to which the tensors in `buckets` now refer."""
    stall_seconds: float = 0.0
    future: Future[SaveResult] | None = None


class CheckpointSaver:
    """Saves checkpoints of one run. Its methods are collective, except `close`, `reserve`, `hold_update` and
    `take_held_seconds`."""

    def __init__(
        self,
        checkpoints: Path,
        config: CheckpointConfig,
        parallel: Parallel,
        durable_step: int | None = None,
        small_files: Mapping[str, bytes] | None = None,
    ):
        """
        Args:
            durable_step: step of the checkpoint from which the run resumed.
            small_files: name -> content of further files in each checkpoint, such as the tokenizer, so that a copied
                checkpoint is complete.
        """
        self.checkpoints, self._config, self._parallel = checkpoints, config, parallel
        self._small_files = small_files or {}
        self._group = dist.new_group(backend="gloo", timeout=LONGEST_SAVE)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._host_memory = HostMemory()
        self._copy_thread = ThreadPoolExecutor(1, "checkpoint-copy")
        self._save: _Save | None = None
        self._held_seconds = 0.0
        self._retry_step: int | None = None
        self._next_try = 0
        self.durable_step = durable_step
        """Step of the newest durable checkpoint."""
        self.failures = 0
        """Number of failed saves since the last successful one."""
        self.last_error = ""

    def reserve(self, model: Model, phase_optimizer: PhaseOptimizer) -> None:
        """Begin to allocate host memory for this phase's saves, so that they need not wait for the allocation."""
        if self._config.async_save:
            sizes = share_of_save(model, phase_optimizer, self._parallel)
            self._host_memory.reserve([each.nbytes for each in sizes if each.is_cuda])

    def hold_update(self) -> None:
        """Make later work on the device and on the host wait until the save in progress has copied its tensors. Call
        this before any work that changes or frees weights or optimizer state."""
        if self._save is not None and self._save.copies is not None:
            self._save.copies.hold_update()

    def take_held_seconds(self) -> float:
        """Returns how long updates of this rank waited for copies, in saves that ended since the last call."""
        held, self._held_seconds = self._held_seconds, 0.0
        return held

    def is_due(self, step: int) -> bool:
        """Whether a regular save is due at this step, or the retry of a failed one."""
        return step % self._config.every_steps == 0 or step == self._retry_step

    def has(self, step: int) -> bool:
        """Whether this step's checkpoint is durable or being saved."""
        return step == self.durable_step or (self._save is not None and self._save.state.step == step)

    def begin(self, state: RunState, model: Model, phase_optimizer: PhaseOptimizer) -> list[SaveResult]:
        """Start a save of the current state. Returns the results of all ended saves that no earlier call returned.

        The call first waits for any save in progress. Without `checkpoint.async_save`, the call also waits for the new
        save. If the last allowed retry has failed, no save starts, because `check` will stop the run. If a rank's state
        has NaN or infinite values, nothing is saved, and the last returned result has the error.
        """
        ended = self.ended(now=state.step, wait=True)
        if self.failures > self._config.save_retries:
            return ended
        self._retry_step = None
        began = time.perf_counter()
        final = step_folder(self.checkpoints, state.step)
        save = _Save(state, final.with_name(f".tmp_{final.name}"), began)
        with phase_optimizer.whole_weights(changes=False):
            fault = not_finite(model, phase_optimizer, self._parallel)
            if fault is not None:
                return [*ended, _result(save, fault, not_finite=True)]
            # No thread uses the group now.
            error = first_said(_make_folder(save.folder) if self._parallel.is_main else None, self._group)
            if error is None:
                _plan(save, model, phase_optimizer, self._parallel)
                error = first_said(self._copy(save, waits=not phase_optimizer.weights_stay), self._group)
                if save.copies is not None and error is not None:
                    with contextlib.suppress(Exception):  # the save has failed already
                        save.copies.wait()
        save.stall_seconds = time.perf_counter() - began
        if error is not None:
            if self._parallel.is_main:
                shutil.rmtree(save.folder, ignore_errors=True)
            return [*ended, self._count(_result(save, error), now=state.step)]
        save.future = self._thread.submit(self._write, save)
        self._save = save
        if self._config.async_save:
            return ended
        return [*ended, *self.ended(now=state.step, wait=True)]

    def ended(self, now: int, wait: bool = False) -> list[SaveResult]:
        """Returns the result of the save in progress if it has ended on every rank, else an empty list.

        While a save is in progress, the call is collective and waits for the device.

        Args:
            now: the step that the run has reached.

        Raises:
            SaveLost: on this rank only. The other ranks' threads wait for this rank's thread until this process ends.
        """
        save = self._save
        if save is None or save.future is None:
            return []
        if wait:
            before = time.perf_counter()
            save.future.exception()  # only waits
            save.stall_seconds += time.perf_counter() - before
        over = save.future.done()
        if over and (failure := save.future.exception()) is not None:
            raise SaveLost(
                f"rank {self._parallel.rank}: how the save of step {save.state.step} ended could not be agreed on by "
                f"all ranks: {failure!r}; the same command continues from the newest checkpoint"
            ) from failure
        if not wait:
            done = torch.tensor(int(over), device=self._parallel.device)
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
            if not done.item():
                return []
        self._save = None
        if not self._config.async_save:
            self._host_memory.release()
        held = 0.0 if save.copies is None else save.copies.held_seconds()
        self._held_seconds += held
        result = replace(save.future.result(), stall_seconds=save.stall_seconds + held)
        return [self._count(result, now)]

    def check(self) -> None:
        """
        Raises:
            CheckpointError: more saves in a row have failed than `checkpoint.save_retries` allows, on every rank.
        """
        if self.failures > self._config.save_retries:
            dist.barrier()  # the main rank logs the failure before the launcher ends any rank
            raise CheckpointError(
                f"{self.failures} saves in a row failed (checkpoint.save_retries = {self._config.save_retries}); "
                f"the newest checkpoint is of step {self.durable_step or 0}. The last error: {self.last_error}"
            )

    def next_try(self) -> str:
        """Returns a text that says what follows the last failure."""
        if self.failures > self._config.save_retries:
            return "this was the last try"
        return f"next try at step {self._next_try}, or at the end of the run"

    def close(self) -> None:
        """Wait for the save in progress, so that its files are complete whatever stops the training. Not collective."""
        self._thread.shutdown(wait=True)
        self._copy_thread.shutdown(wait=True)
        self._host_memory.close()

    def _count(self, result: SaveResult, now: int) -> SaveResult:
        self._retry_step = None
        if result.error is None:
            self.failures, self.durable_step = 0, result.step
        else:
            self.failures += 1
            self.last_error = result.error
            self._retry_step = now + self._config.retry_after_steps * 2 ** (self.failures - 1)
            every = self._config.every_steps
            self._next_try = min(self._retry_step, (now // every + 1) * every)
        return result

    def _copy(self, save: _Save, waits: bool) -> str | None:
        """Begin to copy this rank's share of the tensors to host memory. If `waits`, return only when the copies are
        complete. Returns None, or an error text if there is no memory for the copies."""
        try:
            groups = [tensors for _, _, (_, tensors) in save.buckets]
            save.copies = begin_copies(groups, self._host_memory, self._copy_thread)
            if waits:
                save.copies.wait()
        except (RuntimeError, MemoryError) as error:
            save.buckets = []
            self._host_memory.release()
            return f"rank {self._parallel.rank}: no copy in host memory: {error}"
        return None

    # --- in the thread: no use of megatron-core's groups, nor of the device except to wait for copies ---

    def _write(self, save: _Save) -> SaveResult:
        """Write and publish the checkpoint. Collective over the ranks' threads.

        The threads communicate twice: they gather what each has written, and the main rank's thread sends the result.
        A failed thread sends its error instead of raising it, because the other threads wait for its message.
        """
        ranks = gathered(self._write_mine(save), self._group)
        result: Any = None
        if self._parallel.is_main:
            try:
                result = self._publish(save, ranks)
            except Exception as error:  # noqa: BLE001  whatever it is, the other ranks hear of it
                result = _result(save, f"rank 0: {error!r}")
            if result.error is not None:
                shutil.rmtree(save.folder, ignore_errors=True)
        ended: SaveResult = from_main(result, self._group)
        return ended

    def _write_mine(self, save: _Save) -> Written:
        rank = self._parallel.rank
        try:
            if save.copies is not None:
                save.copies.wait()
            others = {}
            if self._parallel.is_main:
                others[save.folder / COMMON_STATE_FNAME] = save.common
                others[save.folder / "config.yaml"] = save.state.config_yaml.encode()
                others.update({save.folder / name: content for name, content in self._small_files.items()})
            return write_share(save.writer, save.buckets, others, rank)
        except Exception as error:  # noqa: BLE001  such as a device error, or no more threads
            return Written([f"rank {rank}: {error!r}"])
        finally:
            save.buckets = []

    def _publish(self, save: _Save, ranks: Sequence[Written]) -> SaveResult:
        errors = [error for written in ranks for error in written.errors]
        if errors:
            return _result(save, errors[0])
        files = write_metadata(save.writer, save.metadata, save.folder, ranks)
        write_manifest(save.folder, Manifest(save.state.run, save.state.run_id, save.state.step, files))
        final = step_folder(self.checkpoints, save.state.step)
        publish(save.folder, final)
        # made before the deletion of old checkpoints, which may take longer
        result = _result(save, None, bytes=sum(record.bytes for record in files.values()))
        config = self._config
        try:
            warnings = prune(self.checkpoints, config.keep_last, final, config.keep_every_steps)
        except OSError as error:  # The checkpoint exists, and a later save tries again.
            warnings = [f"old checkpoints could not be deleted: {error}"]
        return replace(result, warnings=warnings)


def _result(save: _Save, error: str | None, **more: Any) -> SaveResult:
    return SaveResult(
        step=save.state.step,
        phase=save.state.phase_name,
        folder=save.folder.with_name(save.folder.name.removeprefix(".tmp_")),
        error=error,
        stall_seconds=save.stall_seconds,
        save_seconds=time.perf_counter() - save.began,
        **more,
    )


def _make_folder(folder: Path) -> str | None:
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        return f"rank 0: {error}"
    return None


# --- the plan --------------------------------------------------------------------------------------------


class _Planner(TorchDistSaveShardedStrategy):
    """Keeps megatron-core's plan of the files, from which megatron-core would make a request for its own writers."""

    writer: Any
    metadata: Any

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, *_: Any, **__: Any) -> AsyncRequest:
        self.writer, self.metadata = writer, planned[1]
        return AsyncRequest(None, (), [])


def share_of_save(model: Model, phase_optimizer: PhaseOptimizer, parallel: Parallel) -> list[torch.Tensor]:
    """Returns approximately the tensors that this rank writes. If several ranks hold a tensor, its index decides which
    of them counts it, so no communication is needed."""
    weights = [parameter.detach() for chunk in model.chunks for parameter in chunk.parameters()]
    state = [tensor for part in phase_optimizer.state_parts() for tensor in part.tensors.values()]
    rank, count = dist.get_rank(parallel.groups.dp_cp), parallel.groups.dp_cp.size()
    group = phase_optimizer.state_group
    copies = count if group is None else max(1, count // group.size())
    return [*weights[rank::count], *state[rank % copies :: copies]]


def files_of(share_bytes: int) -> int:
    """Returns the number of files in which a rank writes its share, one thread each."""
    return min(MOST_FILES, max(FEWEST_FILES, -(-share_bytes // FILE_BYTES)))


def _plan(save: _Save, model: Model, phase_optimizer: PhaseOptimizer, parallel: Parallel) -> None:
    """Plan which rank writes which tensors, and what else the main rank writes. Collective; writes nothing."""
    metadata = sharding_metadata(parallel)
    content = {
        **sharded_state(model, phase_optimizer, metadata),
        "run": dict(vars(save.state)),
        "content_metadata": {key: value for key, value in metadata.items() if key != "dp_cp_group"},
    }
    sharded, common = save_preprocess(content)
    if parallel.is_main:
        # Serialize now, because step counts change with the next step.
        buffer = io.BytesIO()
        torch.save(common, buffer)
        save.common = buffer.getvalue()
    bytes_of_share = sum(each.nbytes for each in share_of_save(model, phase_optimizer, parallel))
    planner = _Planner(*BACKEND, thread_count=files_of(bytes_of_share))
    # megatron-core would start a manager process for this queue, through which its writers report.
    filesystem_async._results_queue = queue.Queue()
    FullyParallelSaveStrategyWrapper(planner, parallel.groups.dp_cp).async_save(
        sharded, save.folder, **SAVE_OPTIONS
    )
    save.writer, save.metadata = planner.writer, planner.metadata
    save.buckets, planner.writer.write_buckets = planner.writer.write_buckets, None

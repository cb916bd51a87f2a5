"""Write TensorBoard's events of a run. If they cannot be written, training continues without them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsa_train.metrics.lost_records import Outage
from gsa_train.metrics.panels import tensorboard_layout

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Writes the event files. After an error, it opens a new file, because TensorBoard's writer thread has ended."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        """
        Args:
            resume_step: hide later steps in earlier files; None hides nothing.
        """
        self._folder = folder
        self._outage = Outage("tensorboard", "lost records are counted")
        self._resume_step = resume_step
        """Hides later steps when the first file is opened. None once the file exists."""
        self._writer: SummaryWriter | None = None
        with contextlib.suppress(OSError):  # The first record tries again, and reports the error.
            self._open()

    def log(self, record: Mapping[str, Any], scalars: Mapping[str, float], disk_works: bool) -> None:
        """Write and flush, so that a kill right after this call loses nothing.

        Args:
            disk_works: whether other files can be written. If not, no event file is opened, because it would stay
                empty.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        try:
            if self._writer is None and not disk_works:
                raise OSError("metrics.jsonl cannot be written either")
            writer = self._writer or self._open()
            assert writer.file_writer is not None
            # One event is much faster than one for each of a record's hundreds of scalars.
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
            writer.file_writer.add_summary(Summary(value=values), record["step"])
            writer.flush()
            self._outage.end(record)
        except OSError as error:
            self._outage.go_on(record, error)
            self._outage.lose([record["step"]])
            self.close()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            # Each record was flushed, so only the failed one is left.
            with contextlib.suppress(OSError):
                writer.close()

    def _open(self) -> SummaryWriter:
        # Imported here, so that readers of metrics.jsonl do not wait for the import.
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides the steps of earlier event files from purge_step on.
        purge_step = None if self._resume_step is None else self._resume_step + 1
        self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)
        self._writer.add_custom_scalars(tensorboard_layout())
        self._resume_step = None
        return self._writer

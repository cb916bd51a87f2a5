"""Define exit codes of `launch/pretrain.py`; docs/reference/configuration.md says what to do about each."""

FAILED = 1
"""An error (including bad data) or a hang."""
REFUSED = 2
"""Incorrect usage, config or run folder, refusal by W&B, or a checkpoint that does not fit: every start would fail."""
SAVE_FAILED = 3
"""Saving failed, also in its retries."""
STOPPED_BY_MONITOR = 13
"""A spike, or non-finite weights, optimizer state or last validation."""
CORRUPTED = 14
"""Numbers that should be equal differed. After a transient fault, start again from the last checkpoint."""
UNHEALTHY = 15
"""A device failed the check before the first step. Start again without that device."""
STOPPED = 75
"""Stopped on request: start the same command again. This is EX_TEMPFAIL of sysexits.h."""
INTERRUPTED = 130
"""Ctrl-C before the first step, or twice. Nothing was saved. This is the shell's code for SIGINT."""

"""Exit codes of `launch/pretrain.py`; docs/reference/configuration.md says what to do about each."""

FAILED = 1
"""An error, bad data included, or a hang."""
REFUSED = 2
"""Wrong use: what is wrong is so on every start."""
SAVE_FAILED = 3
"""Also in its retries."""
STOPPED_BY_MONITOR = 13
"""A spike, or weights, optimizer state or a last validation that are not finite."""
CORRUPTED = 14
"""Numbers that should be equal were not. A new start from the last checkpoint is right for a fault that passes."""
UNHEALTHY = 15
"""A device failed the check before the first step. A new start is right where that device is left out."""
STOPPED = 75
"""Asked to stop, and did: start the same command again. EX_TEMPFAIL of sysexits.h."""
INTERRUPTED = 130
"""Ctrl-C before the first step, or twice: nothing was saved. What a shell makes of SIGINT."""

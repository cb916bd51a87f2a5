"""Files of a run folder that others than the run itself look for; without torch, which the run loads."""

from __future__ import annotations

LOCK = "lock"
"""Says who writes the folder, or wrote it last. It stays."""
MONITOR_STOP = "monitor_stop.json"
"""The spike that ended the run. Gone once a start goes on all the same."""

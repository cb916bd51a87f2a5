"""Writes a run's folder without a run."""

import json

PHASES = ((30, "warm-up"), (60, "sparse"))
START = {"layout": "2 ranks on cpu", "device": "x86", "host": "node7", "commit": "abc123", "torch": "2.13"}
SPIKE = {"event": "spike", "phase": "sparse", "signal": "loss", "value": 9.0, "threshold": 7.5}


def write_run(folder, *events, every=10, starts=(0,)):
    folder.mkdir(parents=True)
    records = []
    for step in range(every, 61, every):
        phase = next(name for end, name in PHASES if step <= end)
        record = {"step": step, "phase": phase, "loss": 8.0 - step / 20, "tokens": 1000 * step}
        record |= {"lrs": {"base": 1e-3}, "layer_recall": [0.25, None if step < 20 else 0.5]}
        record |= {"head_first_token_attention": [[0.1, 0.5], [step / 100, "NaN"]]}
        records.append(record)
    records += events
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (folder / "config.yaml").write_text("run:\n  name: <script>alert(1)</script>\n")
    lines = [json.dumps({"unix_seconds": 1e9 + step, "step": step, **START}) for step in starts]
    (folder / "starts.jsonl").write_text("\n".join(lines) + "\n" + '{"unix_sec')

"""Writes a run's folder as a report finds it, without a run."""

import json

PHASES = ((30, "warm-up"), (60, "sparse"))
START = {"layout": "2 ranks on cpu", "device": "x86", "host": "node7", "commit": "abc123", "torch": "2.13"}
SPIKE = {"event": "spike", "phase": "sparse", "signal": "loss", "value": 9.0, "threshold": 7.5}


def write_run(folder, *events, every=10, starts=(0,)):
    folder.mkdir(parents=True)
    records = []
    for step in range(every, 61, every):
        phase = next(name for end, name in PHASES if step <= end)
        record = {"step": step, "phase": phase, "loss": 8.0 - step / 20, "tokens": 1000 * step, "spikes": 1}
        record |= {"spikes_per_100k_steps": 1e5 / 60, "spike_score": 0.0, "lrs": {"base": 1e-3}}
        record |= {
            "k_mean": 5.0,
            "k_min": 2.0,
            "k_max": 9.0,
            "layer_recall": [0.25, None if step < 20 else 0.5],
            "head_first_token_attention": [[0.1, 0.5], [step / 100, "NaN"]],
            "sink_by_position": {"0": 0.25, "1-3": 0.75},
        }
        records.append(record)
    records += events
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (folder / "config.yaml").write_text("run:\n  name: <script>alert(1)</script>\n")
    lines = [json.dumps({"unix_seconds": 1e9 + step, "step": step, **START}) for step in starts]
    (folder / "starts.jsonl").write_text("\n".join(lines) + "\n" + '{"unix_sec')

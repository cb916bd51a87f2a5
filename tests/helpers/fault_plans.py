"""Builds plans for faulty_runs.py: several runs with faults from one process that has imported everything."""

import json
from pathlib import Path
from typing import Any

import yaml

from helpers.runs import REPOSITORY, run_script


class FaultPlan:
    """Describes runs `folder/<name>` of the demo's config, with changes to these sections and these phases."""

    def __init__(self, folder: Path, sections: dict[str, dict[str, Any]], phases: list[dict[str, Any]]):
        self.folder, self._config = folder, folder / "config.yaml"
        config = yaml.safe_load((REPOSITORY / "configs/demo.yaml").read_text())
        for section, fields in sections.items():
            config[section] = {**config.get(section, {}), **fields}
        self._config.write_text(yaml.safe_dump(config | {"phases": phases}))

    def run(self, name: str, *overrides: str, ranks: int = 1, **faults: Any) -> dict[str, Any]:
        """Describe a run of a wave; its ranks print to `folder/<name>.log.<rank>`."""
        arguments = ["--config", str(self._config), f"run.dir={self.folder}", f"run.name={name}", *overrides]
        log = str(self.folder / f"{name}.log")
        return {"name": name, "ranks": ranks, "arguments": arguments, "faults": faults, "log": log}

    def carry_out(self, waves: list[list[dict[str, Any]]]) -> dict[str, list[int]]:
        """Run wave after wave, with a wave's runs in parallel; return the exit codes of each run's ranks."""
        plan = self.folder / "plan.json"
        plan.write_text(json.dumps(waves))
        log = self.folder / "plan.log"
        run_script(["tests/helpers/faulty_runs.py", str(plan)], log, ranks=1, launcher="python")
        codes: dict[str, list[int]] = json.loads(plan.with_suffix(".codes").read_text())
        return codes

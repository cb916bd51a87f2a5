"""Create a W&B workspace with a run's panels: python launch/wandb_workspace.py --entity NAME [--project P] [--print]

The command saves a view of the project and prints its address. The view has the panels of the HTML report
(gsa_train/metrics/panels.py), over tokens. `--print` prints the view as JSON, without a key or network. The command
needs the extra `workspace` and a W&B API key. The exit code is 2 for wrong use, a missing key, or a refusal by W&B.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_train.config import LoggingConfig
from gsa_train.metrics.panels import LAYERS, PANELS, SECTIONS, Panel, tag_of
from gsa_train.metrics.wandb_sink import has_wandb_key
from gsa_train.process.as_command import as_command

try:
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws
except ModuleNotFoundError as missing:
    if missing.name is None or not missing.name.startswith("wandb_workspaces"):
        raise
    sys.exit(
        "launch/wandb_workspace.py needs wandb-workspaces; run in the checkout: pip install '.[workspace]'"
    )

AXIS = "tokens"


@as_command()
def main() -> int:
    parser = argparse.ArgumentParser(prog="wandb_workspace.py", description="Create a W&B workspace.")
    parser.add_argument("--entity", required=True, help="user or team that the project belongs to")
    parser.add_argument("--project", default=LoggingConfig().wandb_project, help="(default: %(default)s)")
    parser.add_argument("--name", default="GSA pretraining", help="of the view (default: %(default)s)")
    parser.add_argument("--print", action="store_true", help="print the workspace as JSON, create nothing")
    arguments = parser.parse_args()
    workspace = build_workspace(arguments.entity, arguments.project, arguments.name)
    if arguments.print:
        print(json.dumps(spec_of(workspace), indent=2))
        return 0
    if not has_wandb_key(os.environ):
        print(
            "no W&B API key: set WANDB_API_KEY or run `wandb login`; --print shows the workspace without one",
            file=sys.stderr,
        )
        return 2
    import wandb

    try:
        workspace.save()
    except (wandb.Error, OSError, ValueError) as error:
        print(f"W&B did not take the workspace: {error}", file=sys.stderr)
        return 2
    print(workspace.url)
    return 0


def build_workspace(entity: str, project: str, name: str) -> ws.Workspace:
    """Build a section for each section of the panel list, and a collapsed section for the layers."""
    sections = [
        ws.Section(
            name=title,
            panels=[_line_plot(panel) for panel in PANELS if panel.section == section],
            is_open=True,
            layout_settings=ws.SectionLayoutSettings(columns=3, rows=2),
        )
        for section, title in SECTIONS.items()
    ]
    layers = [
        wr.LinePlot(title=label, x=AXIS, metric_regex=f"^{tag_of(key)}/layer_.+$")
        for key, label in LAYERS.items()
    ]
    sections.append(ws.Section(name="Layers", panels=[*layers]))
    settings = ws.WorkspaceSettings(x_axis=AXIS, point_visualization_method="bucketing")
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections, settings=settings)


def _line_plot(panel: Panel) -> wr.LinePlot:
    options: dict[str, Any] = {"title": panel.label, "x": AXIS}
    if panel.scale == "log":
        options["log_y"] = True
    if panel.scale == "share":
        options["range_y"] = (0, 1)
    if panel.per_set or panel.per_entry:  # only the run knows the names of these lines
        return wr.LinePlot(metric_regex=f"^({'|'.join(panel.tags)})$", **options)
    return wr.LinePlot(y=[tag_of(key) for key in panel.keys], **options)


def spec_of(workspace: ws.Workspace) -> dict[str, Any]:
    """Return the specification that W&B stores."""
    view = workspace._to_model()
    return dict(view.model_dump(mode="json", by_alias=True, exclude_none=True))


if __name__ == "__main__":
    sys.exit(main())

"""Runs a notebook's code cells without Jupyter. `python tests/helpers/notebooks.py examples/*.ipynb` also writes their
output and figures into the notebooks."""

import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

PNG_DPI = 56


def run(path: Path) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """Execute the code cells in order. Exceptions propagate, and their traceback has the number of the cell.

    Returns:
        the names that the cells define, and the outputs of each code cell in the notebook format
    """
    import matplotlib

    matplotlib.use("Agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, source in enumerate(code_cells(path)):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"{path.name}, code cell {number}", "exec"), namespace)
        outputs.append([*_stream(printed.getvalue()), *_drawn_figures()])
    return namespace, outputs


def code_cells(path: Path) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def write_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    outputs = iter(run(path)[1])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = next(outputs), None
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _stream(text: str) -> list[dict[str, Any]]:
    if not text:
        return []
    return [{"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}]


def _drawn_figures() -> list[dict[str, Any]]:
    from matplotlib import pyplot

    outputs = []
    for number in pyplot.get_fignums():
        png = io.BytesIO()
        pyplot.figure(number).savefig(png, format="png", dpi=PNG_DPI, bbox_inches="tight")
        data = {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": ["<Figure>"]}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    pyplot.close("all")
    return outputs


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_outputs(Path(name))

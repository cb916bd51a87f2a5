"""Serve an exported model over HTTP: launch/serve.py of a checkout, `gsa-serve` of an installation.

    python launch/serve.py --hf DIR [--host HOST] [--port PORT] [--server vllm|transformers] [options of the server]

The default server is vLLM where it is installed, and otherwise transformers. Both offer OpenAI's API. Further options
go to the server, and `vllm serve --help` or `transformers serve --help` lists them. Exit code 2 means incorrect usage,
a folder without a GSA model, or a missing package.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from gsa_data.whole_files import MODEL_FILES, read_json_object
from gsa_train.process.as_command import as_command


@as_command()
def main() -> int:
    parser = argparse.ArgumentParser(description="Serve an exported model over HTTP.", allow_abbrev=False)
    parser.add_argument(
        "--hf", type=Path, metavar="DIR", required=True, help="a folder that export_hf.py wrote"
    )
    parser.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1, for this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="(default: 8000)")
    servers = ("vllm", "transformers")
    parser.add_argument("--server", choices=servers, help="(default: vllm where it is installed)")
    arguments, options = parser.parse_known_args()
    server = arguments.server or ("vllm" if find_spec("vllm") else "transformers")
    if (problem := model_problem(arguments.hf) or missing_package(server)) is not None:
        print(problem, file=sys.stderr)
        return 2
    print(f"{server} serves {arguments.hf} at http://{arguments.host}:{arguments.port}/v1", flush=True)
    words = ["serve", str(arguments.hf), "--host", arguments.host, "--port", str(arguments.port), *options]
    if server == "vllm":
        os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", *words])
    serve_by_transformers(words)
    return 0


def model_problem(folder: Path) -> str | None:
    try:
        model_type = read_json_object(folder / "config.json").get("model_type")
        for name in MODEL_FILES[1:]:
            if (folder / name).exists():
                read_json_object(folder / name)
    except ValueError as error:
        return f"--hf {folder}: {error}"
    if model_type != "gsa":
        return f"--hf {folder}: model_type is {model_type!r}; give a folder that export_hf.py wrote"
    return None


def missing_package(server: str) -> str | None:
    """Return what to install before the server can start, or None if nothing is missing."""
    if server == "transformers":
        needed = ("transformers", "fastapi", "uvicorn", "openai", "accelerate")
        if missing := [name for name in needed if find_spec(name) is None]:
            return f"the package {missing[0]} is not installed; run: pip install 'transformers[serving]'"
    elif find_spec("vllm") is None:
        return "vLLM is not installed; run make setup-vllm in the checkout, or pass --server transformers"
    elif "gsa" not in entry_points(group="vllm.general_plugins").names:
        return "vLLM has no plug-in for GSA; run in the checkout: pip install ./kernels ./gsa_hf ./serving/gsa_vllm"
    return None


def serve_by_transformers(words: list[str]) -> None:
    import transformers
    from transformers.cli.transformers import app

    import gsa_hf

    # `transformers serve` looks for the model's class in transformers only, even with --trust-remote-code.
    transformers.GSAForCausalLM = gsa_hf.GSAForCausalLM  # type: ignore[attr-defined]  # added here
    app(words)

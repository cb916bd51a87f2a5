"""Tests that a start imports megatron-core without loggers and compilers that no run calls."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from gsa_train.distributed.megatron_import import at_first_call

COMMAND = Path(__file__).parents[2] / "gsa_train" / "commands" / "pretrain.py"
UNUSED = ["wandb", "torch.utils.tensorboard", "tensorboard", "torch._inductor", "torch._dynamo"]
UNUSED += ["transformers", "deepspeed", "matplotlib", "pandas", "scipy", "networkx", "pyarrow"]


def imports_of_the_command() -> str:
    """Return all imports in the order of the source, also late ones of `run_command`."""
    tree = ast.parse(COMMAND.read_text("utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert any(isinstance(node, ast.ImportFrom) and node.module == "gsa_train.train" for node in found)
    return "\n".join(ast.unparse(node) for node in found if "__future__" not in ast.unparse(node))


def test_a_start_imports_none_of_what_its_config_may_leave_out() -> None:
    code = "from gsa_train.distributed.megatron_import import import_megatron\nimport_megatron()\n"
    code += imports_of_the_command()
    code += f"\nimport sys, torch\nprint([name for name in {UNUSED} if name in sys.modules], torch.compile.__module__)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[] torch", done.stderr


def test_a_function_is_compiled_when_it_is_called_with_its_options_and_once() -> None:
    compiled: list[Any] = []

    def compile_now(function: Any, **options: Any) -> Any:
        compiled.append(options)
        return lambda *arguments, **named: ("compiled", function(*arguments, **named))

    @lambda function: at_first_call(compile_now, function)
    def plain(x: torch.Tensor, by: int = 2) -> torch.Tensor:
        """Doubles."""
        return x * by

    with_options = at_first_call(compile_now, dynamic=True)(plain.__wrapped__)
    assert compiled == []
    assert plain.__doc__ == "Doubles."
    for function, options in ((plain, {}), (with_options, {"dynamic": True})):
        for _ in range(2):
            kind, result = function(torch.ones(2), by=3)
            assert (kind, result.tolist()) == ("compiled", [3.0, 3.0])
        assert compiled.pop() == options
        assert compiled == []

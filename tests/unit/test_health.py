"""Tests that the health check names each device that multiplies, stores or sends wrongly, and no good device."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from gsa_train.distributed.parallel import DeviceError
from gsa_train.reliability.health import check, device_checks, links, products
from gsa_train.reliability.health.check import UnhealthyDevice, check_health, check_presence, note_bad_nodes
from gsa_train.reliability.health.findings import Exchange, Finding, nodes_of_bad_devices, nodes_of_bad_links
from gsa_train.reliability.health.products import CHECKED_ROWS, LARGEST, make_problem
from helpers.single_rank import single_rank

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", device_checks.GPU_SIZES.values())
def test_sums_are_exact_in_fp32_and_results_in_bf16(size: tuple[int, int, int]) -> None:
    _, inner, signs = size
    assert 2 * inner * LARGEST**2 + 9 * signs < 1 << 24
    results = torch.tensor([a * b * signs for a in products.FACTORS for b in products.FACTORS])
    assert torch.equal(results.bfloat16().float(), results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_product_is_its_known_result_to_the_last_bit(dtype: torch.dtype) -> None:
    """fp64 has another known result."""
    problem = make_problem(128, 96, 32, dtype, CPU)
    assert problem.a.shape == (128, 2 * 96 + 32)
    assert torch.equal(products.multiply(problem), problem.expected)
    assert torch.equal(problem.a.double() @ problem.b.double(), problem.expected.double())
    assert torch.equal(problem.expected[:CHECKED_ROWS], problem.expected_rows)
    assert problem.expected.unique().numel() > 8
    assert products.wrong_products(problem, 0.0, least=3) == (0, 3)


def wrong_in(monkeypatch: pytest.MonkeyPatch, product: int, row: int, value: float) -> None:
    """Falsify one element of one product, counted from 1."""
    multiply, calls = products.multiply, []

    def sometimes(problem: products.Problem) -> torch.Tensor:
        result = multiply(problem)
        calls.append(1)
        if len(calls) == product:
            result[row, 3] = value
        return result

    monkeypatch.setattr(products, "multiply", sometimes)


@pytest.mark.parametrize("value", [1.0, float("nan")])
@pytest.mark.parametrize(("product", "row"), [(1, 200), (2, 1)])
def test_a_wrong_element_is_found_in_any_product(product, row, value, monkeypatch):
    wrong_in(monkeypatch, product, row, value)
    (fault,) = device_checks.faults_of_device(CPU, 1.0)
    assert "wrong elements in 2 products of float32 matrices of 256 x 256" in fault


def test_a_device_that_also_compares_wrongly_is_found_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(128, 96, 32, torch.float32, CPU)
    monkeypatch.setattr(products, "multiply", lambda problem: problem.expected.fill_(5.0))
    wrong, _ = products.wrong_products(problem, 0.0, least=2)
    assert wrong > 1000


def test_a_wrong_word_of_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_checks.faults_of_device(CPU, 1.0) == []
    write = device_checks.write

    def stuck_bit(block: torch.Tensor, word: int) -> None:
        write(block, word)
        block[12_345] |= 2

    monkeypatch.setattr(device_checks, "write", stuck_bit)
    (fault,) = device_checks.faults_of_device(CPU, 1.0)
    assert fault == "1 wrong words of memory with the pattern 0x55, in 4 MiB"


def test_the_peak_that_a_run_reports_excludes_the_memory_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check takes most of a GPU's memory; here a CPU's memory replaces it."""
    called: list[object] = []
    empty = torch.empty
    monkeypatch.setattr(device_checks, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 18, 1 << 19))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("given back"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", called.append)

    def on_the_host(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        called.append(device)
        return empty(*size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", on_the_host)
    device = torch.device("cuda", 0)
    assert list(device_checks._memory_faults(device)) == []
    assert called == [device] * 3 + ["given back", device]


def test_a_bad_device_refuses_the_start_is_named_and_noted_for_slurm(tmp_path, monkeypatch):
    parallel = single_rank()
    monkeypatch.setenv("GSA_SUBMISSION", str(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    check_health(parallel, 1.0)
    assert not (tmp_path / "bad_nodes").exists()
    wrong_in(monkeypatch, 1, 0, 0.5)
    with pytest.raises(UnhealthyDevice) as found:
        check_health(parallel, 1.0)
    said = "1 of 1 devices are not healthy:\n  CPU of local rank 0 on node7: 1 wrong elements"
    assert said in str(found.value)
    assert (tmp_path / "bad_nodes").read_text() == "node7\n"
    note_bad_nodes(["node3", "node7"])
    assert (tmp_path / "bad_nodes").read_text() == "node7\nnode3\n"

    read_text = Path.read_text

    def while_another_node_notes(path: Path, *args: Any, **kwargs: Any) -> str:
        known = read_text(path, *args, **kwargs)
        with path.open("a") as file:
            file.write("node9\n")
        return known

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", while_another_node_notes)
        note_bad_nodes(["node5"])
    assert (tmp_path / "bad_nodes").read_text() == "node7\nnode3\nnode9\nnode5\n"


class Gpus:
    """Simulates `count` GPUs; the last one may fail."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "set_device", raising(error) if error else lambda index: None)
        ones = torch.ones
        monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))


BROKEN = RuntimeError("CUDA error: ECC\nmore")


@pytest.mark.parametrize(
    ("count", "error", "said"),
    [
        (7, None, "GPU 7 on n3: of 8 GPUs that Slurm has given 7 are found. Leave out n3"),
        (0, None, "of 8 GPUs that Slurm has given 0 are found"),
        (8, BROKEN, "GPU 7 on n3: it fails at once: CUDA error: ECC. Leave out n3"),
    ],
)
def test_a_gpu_that_is_lost_or_fails_at_once_is_named_before_ranks_meet(
    count, error, said, tmp_path, monkeypatch
):
    """An unnamed GPU would leave other ranks waiting for its rank, and its node would not be excluded."""
    for name, value in (("LOCAL_RANK", "7"), ("SLURMD_NODENAME", "n3"), ("SLURM_GPUS_ON_NODE", "8")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GSA_SUBMISSION", str(tmp_path))
    Gpus(8, monkeypatch)
    check_presence()
    assert not (tmp_path / "bad_nodes").exists()
    Gpus(count, monkeypatch, error)
    with pytest.raises(UnhealthyDevice, match=said):
        check_presence()
    assert (tmp_path / "bad_nodes").read_text() == "n3\n"


def test_more_ranks_than_gpus_are_wrong_use_and_no_bad_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of a user's own srun may each see one of the GPUs that Slurm counts."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.delenv("GSA_SUBMISSION", raising=False)
    Gpus(1, monkeypatch)
    with pytest.raises(DeviceError, match="local rank 1 has no GPU of its own, as this machine shows 1"):
        check_presence()
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_presence()
    Gpus(0, monkeypatch)
    check_presence()


def raising(error: Exception | type[Exception]) -> Any:
    def call(*_: Any, **__: Any) -> None:
        raise error

    return call


def test_a_device_that_fails_is_bad_and_not_only_one_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the failing rank alone would leave the others waiting, and its node would not be excluded."""
    monkeypatch.setattr(check, "faults_of_device", raising(BROKEN))
    assert check.check_device(CPU, 0, 1.0).faults == ["its check failed: CUDA error: ECC"]


def test_memory_that_others_take_meanwhile_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checks, "CPU_SIZES", {})
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", raising(torch.OutOfMemoryError("out of memory")))
        assert device_checks.faults_of_device(CPU, 1.0) == []


def linked(*nodes: str, bad: Sequence[int]) -> list[str]:
    """Return reports of ranks on these nodes; the `bad` ones receive nothing from the previous rank."""
    findings = [Finding(node, 0, "", ["nothing"] * (rank in bad)) for rank, node in enumerate(nodes)]
    return nodes_of_bad_links(findings)


def test_of_links_the_node_that_explains_most_is_named_and_its_neighbours_are_not() -> None:
    assert linked("a", "a", "b", "b", "c", "c", "d", "d", bad=[2, 4]) == ["b"]
    assert linked("a", "a", "b", "b", "c", "c", bad=[3]) == ["b"]  # within it
    assert linked("a", "b", "c", "d", bad=[2]) == ["b", "c"]  # either
    assert linked("a", "b", "c", "d", "e", "f", bad=[1, 2, 4]) == ["b", "d", "e"]
    assert linked("a", "b", "c", bad=[]) == []


def test_where_all_nodes_would_be_named_none_is() -> None:
    """The cause is then between the nodes, which the job needs. A single node is named for its device."""
    for nodes, bad, named in (("aabb", {1}, ["a"]), ("aabb", {0, 1, 3}, []), ("aa", {1}, ["a"])):
        findings = [Finding(node, 0, "", ["wrong"] * (rank in bad)) for rank, node in enumerate(nodes)]
        assert nodes_of_bad_devices(findings) == named
    assert linked("a", "b", bad=[0]) == []
    assert linked("a", "b", "c", bad=[0, 1, 2]) == []


@pytest.mark.parametrize("count", [1, 5, 64, 200])
def test_a_sum_over_ranks_is_known_and_exact(count: int) -> None:
    found = sum(links.pattern(rank, 100, CPU) for rank in range(count))
    assert torch.equal(torch.as_tensor(found), links.expected_sum(count, 100, CPU))
    assert (1 << 18) * (links.VALUES - 1) < 1 << 24, "a sum over many ranks is exact"


@pytest.mark.parametrize("call", [links.faults_of_neighbours, links.faults_of_sums])
def test_a_link_that_fails_at_once_is_a_finding(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("batch_isend_irecv", "all_reduce"):
        monkeypatch.setattr(torch.distributed, name, raising(RuntimeError("NCCL error: remote\nmore")))
    monkeypatch.setattr(torch.distributed, "P2POp", lambda *_: None)
    single_rank()
    (fault,) = call(CPU)
    assert fault.endswith("failed: NCCL error: remote")


class Ranks:
    """Holds some ranks of a job, each in a thread, that exchange their findings."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gsa_train.reliability.health.findings.ANSWER_SECONDS", 2.0)
        self._store, self._count = torch.distributed.HashStore(), count
        self.first: list[int] = []
        """Ranks that had the findings before all others."""

    def tell(self, *ranks: int) -> dict[int, list[Finding]]:
        with ThreadPoolExecutor(len(ranks)) as threads:
            return dict(zip(ranks, threads.map(self._tell, ranks), strict=True))

    def _tell(self, rank: int) -> list[Finding]:
        exchange = object.__new__(Exchange)
        exchange._rank, exchange._count, exchange._store = rank, self._count, self._store
        exchange._devices = [Finding(f"n{each}", 0, "") for each in range(self._count)]
        mine = Finding(f"n{rank}", 0, "", ["bad"] if rank == 1 else [])
        return exchange.tell_all("devices", mine, lambda _: self.first.append(rank))


@pytest.mark.parametrize(("missing", "first"), [(None, 0), (2, 0), (0, 3), (3, 0)])
def test_a_rank_that_does_not_answer_is_named_by_the_others(missing, first, monkeypatch):
    """A device may hang in its driver instead of failing."""
    ranks = Ranks(4, monkeypatch)
    there = [rank for rank in range(4) if rank != missing]
    found = ranks.tell(*there)
    assert all(found[rank] == found[there[0]] for rank in there)
    bad = {each.node: each.faults[0] for each in found[there[0]] if each.faults}
    expected = {"n1": "bad"}
    if missing is not None:
        expected[f"n{missing}"] = f"rank {missing} has not answered for 2 s: its device or its host hangs"
    assert bad == expected
    assert ranks.first == [first]


class NeverDone:
    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: Any) -> bool:
        raise RuntimeError(f"Timed out waiting {timeout}")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_transfer_that_does_not_end_is_given_up(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    single_rank()
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    times = iter([0.0, 1.0, links.longest_seconds(1) + 1])
    clock = (lambda: next(times)) if backend == "nccl" else iter([0.0, 99.0]).__next__
    assert not links._done([NeverDone()], clock=clock)

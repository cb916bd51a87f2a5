"""Compares FP8 operations on a CUDA device with reference code, and FP8 training with bf16 training.
tests/kernels/test_fp8.py tests the quantizing kernel, and test_graphs_on_gpu.py tests FP8 in CUDA graphs."""

import pytest
import torch
from test_step_on_gpu import Trainer, config_of

from gsa_kernels.fused.fp8 import reference
from gsa_kernels.fused.fp8.op import fused_magnitudes, fused_quantize
from gsa_kernels.fused.fp8.reference import E4M3, E5M2
from gsa_train.model.mcore import fp8_linears
from gsa_train.model.mcore.fp8_linears import Fp8ColumnLinear, product, quantize
from gsa_train.optimizer.mcore import close_optimizer

FP8 = "train.linear_layers=fp8"
STEPS = 20


@pytest.fixture(autouse=True)
def _has_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs FP8: compute capability 8.9 or more")


@pytest.mark.parametrize("shape", [(4096, 2048, 5504), (16, 16, 16), (1000, 512, 1376)])
@pytest.mark.parametrize(
    ("left", "dtype", "fast"),
    [(E4M3, torch.bfloat16, True), (E5M2, torch.bfloat16, False), (E5M2, torch.float32, False)],
)
def test_products_match_their_definition(
    left: torch.dtype, dtype: torch.dtype, fast: bool, shape: tuple[int, int, int]
) -> None:
    torch.manual_seed(0)
    m, k, n = shape
    a, b = (torch.randn(size, k, device="cuda", dtype=torch.bfloat16) for size in (m, n))
    x, y = (quantize([t], f8, (False,), None)[0] for t, f8 in ((a * 1e-6, left), (b, E4M3)))
    found = product(x.rows, y.rows, x.inverse_scale, y.inverse_scale, dtype, fast)
    expected = reference.product(x.rows, y.rows, x.inverse_scale, y.inverse_scale, torch.float64)
    assert found.dtype == dtype
    # bf16 rounds by at most 2^-9. The tensor cores keep about 14 bits of a sum.
    assert (found - expected).norm() < (3e-3 if dtype == torch.bfloat16 or fast else 1e-3) * expected.norm()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_large_matrices_have_the_bits_of_the_definition(dtype: torch.dtype) -> None:
    """The kernels' other cases: tests/kernels/test_fp8.py."""
    torch.manual_seed(0)
    shapes = ((16384, 5504), (2048, 5504), (16, 16), (4112, 1376))
    matrices = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    for pair in (matrices[:2], matrices[2:], matrices[:1]):
        transposes = tuple(True for _ in pair)
        found, defined = (op(*pair) for op in (fused_magnitudes, reference.magnitudes))
        assert torch.equal(found.amax(1), defined.amax(1))
        ours, theirs = (op(pair, found, dtype, transposes) for op in (fused_quantize, reference.quantize))
        for one, other in zip(ours, theirs, strict=True):
            for this, that in zip(one, other, strict=True):
                assert torch.equal(*(each.flatten().view(torch.uint8) for each in (this, that)))


def test_swiglus_tensors_are_not_read_for_their_magnitudes(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[int] = set()

    def find(*tensors: torch.Tensor) -> torch.Tensor:
        read.update(tensor.numel() for tensor in tensors)
        return fused_magnitudes(*tensors)

    monkeypatch.setattr(fp8_linears, "operations", lambda on_gpu: (find, fused_quantize))
    trainer = Trainer(config_of("standard_1.7b", FP8))
    trainer.step(0)
    train, model = trainer.config.train, trainer.config.model
    tokens = train.micro_batch_size * train.seq_len_tokens
    assert tokens * model.hidden_size in read
    assert not read & {tokens * model.ffn_hidden_size, tokens * 2 * model.ffn_hidden_size}
    close_optimizer(trainer.model, trainer.optimizer)


def losses(name: str, *overrides: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on the same batches again and again, two of them."""
    trainer = Trainer(config_of(name, *overrides))
    results = [trainer.step(step % 2) for step in range(STEPS)]
    numbers = [float(result.loss_sum / result.loss_tokens) for result in results]
    in_fp8 = any(isinstance(module, Fp8ColumnLinear) for module in trainer.model.gpt.modules())
    assert in_fp8 == (FP8 in overrides)
    weights = {key: p.detach().clone() for key, p in trainer.model.gpt.named_parameters()}
    close_optimizer(trainer.model, trainer.optimizer)
    return numbers, weights


@pytest.mark.parametrize("name", ["gsa_1.7b", "standard_1.7b"])
def test_training_follows_bf16_and_repeats_its_bits(name: str) -> None:
    in_bf16, _ = losses(name)
    in_fp8, weights = losses(name, FP8)
    again, same = losses(name, FP8)
    assert in_fp8 == again
    assert all(torch.equal(weight, same[key]) for key, weight in weights.items())
    assert in_fp8 != in_bf16
    assert in_fp8[-1] < in_fp8[0] - 1
    assert in_fp8[0] == pytest.approx(in_bf16[0], rel=2e-3)
    # AdamW's first updates have the sign of the gradient, so rounding a small gradient can turn an update around.
    assert in_fp8 == pytest.approx(in_bf16, abs=0.3)

"""Use Gated Sparse Attention in a plain torch model. A GPU runs the fused kernels, and a CPU runs plain torch.

PYTHONPATH=kernels python examples/gsa_in_your_model.py [STEPS]
"""

import sys
from pathlib import Path

import torch
from torch import nn

from gsa_kernels import GatedSparseAttention

device = "cpu"
if torch.cuda.is_available():
    from gsa_kernels.miscompile_guard import refuse_wrong_sums

    refuse_wrong_sums()  # Triton compiles some sums wrongly on some GPUs
    device = "cuda"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = GatedSparseAttention(
            hidden_size=64,
            num_heads=4,
            num_kv_heads=1,
            head_dim=32,
            indexer_dim=16,
            k_base=16,
            k_min=8,
            k_max=32,
        )
        self.norms = nn.ModuleList(nn.RMSNorm(64) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attended = self.attention.forward_with_loss(self.norms[0](x))
        x = x + attended.output
        return x + self.mlp(self.norms[1](x)), attended.indexer_loss


def main(steps: int) -> None:
    torch.manual_seed(0)
    text = torch.frombuffer(
        bytearray(Path(__file__).read_bytes()), dtype=torch.uint8
    ).long()  # learns this file
    embed, blocks, head = nn.Embedding(256, 64), [Block(), Block()], nn.Linear(64, 256)
    model = nn.ModuleList([embed, *blocks, head]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - 129, (8,))
        tokens = torch.stack([text[start : start + 129] for start in starts]).to(device)
        x, indexer_losses = embed(tokens[:, :-1]), []
        for block in blocks:
            x, indexer_loss = block(x)
            indexer_losses.append(indexer_loss)
        loss = nn.functional.cross_entropy(head(x).flatten(0, 1), tokens[:, 1:].flatten())
        indexer_loss = torch.stack(indexer_losses).mean()
        optimizer.zero_grad()
        (loss + indexer_loss).backward()  # the indexer loss trains only the indexers
        optimizer.step()
        for block in blocks:
            block.attention.update_variance_ema()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, indexer loss {indexer_loss.item():.4f}")


if __name__ == "__main__":
    steps = sys.argv[1] if len(sys.argv) > 1 else "100"
    if not steps.isdecimal():
        sys.exit(f"{steps}: give a number of steps")
    main(int(steps))

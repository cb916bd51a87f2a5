"""Takes three steps of DistributedDataParallel on a GSA model with gradient checkpointing, on each rank."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from helpers.hf import distinct_tokens, tiny_model


def main() -> None:
    dist.init_process_group("gloo")
    for coefficient in (0.0, 0.5):
        for reentrant in (False, True):
            train(coefficient, reentrant)
    dist.destroy_process_group()


def train(coefficient: float, reentrant: bool) -> None:
    model = tiny_model(indexer_loss_coef=coefficient).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    wrapped, before = DistributedDataParallel(model), [each.detach().clone() for each in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = distinct_tokens(2, 16, seed=dist.get_rank())
    for _ in range(3):  # a missing gradient raises an error in the second step
        optimizer.zero_grad()
        wrapped(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
        learns = "indexer" not in name or coefficient > 0
        assert torch.equal(parameter, old) != learns, (name, coefficient, reentrant)
        own = parameter.detach().clone()
        dist.broadcast(parameter.data, src=0)
        assert torch.equal(parameter, own), (name, "differs between the ranks")


if __name__ == "__main__":
    main()

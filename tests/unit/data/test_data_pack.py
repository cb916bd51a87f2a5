import random

import numpy as np
import pytest
import torch

from gsa_data.pack import Cursor, document_ids, document_starts, loss_mask, pack

EOS = 2


@pytest.mark.parametrize("seq_len_tokens", [1, 2, 5, 16, 100])
def test_each_token_is_a_label_once_and_cursors_point_at_the_next_block(seq_len_tokens: int) -> None:
    rng = random.Random(seq_len_tokens)
    documents = [
        np.array([rng.randrange(3, 99) for _ in range(rng.randrange(0, 40))] + [EOS], np.int32)
        for _ in range(60)
    ]
    stream = np.concatenate(documents).tolist()
    starts = np.cumsum([0] + [len(document) for document in documents])
    pieces = [(Cursor(0, 1, number, 0), document) for number, document in enumerate(documents)]

    blocks = list(pack(pieces, seq_len_tokens))

    assert len(blocks) == (len(stream) - 1) // seq_len_tokens
    for number, (block, cursor) in enumerate(blocks):
        begin = number * seq_len_tokens
        assert block.dtype == np.int32
        assert block.tolist() == stream[begin : begin + seq_len_tokens + 1]
        assert starts[cursor.document] + cursor.token_offset == begin + seq_len_tokens
        assert cursor.token_offset < len(documents[cursor.document])


@pytest.mark.parametrize("attend_across_documents", [True, False])
def test_document_ids_and_loss_mask_by_brute_force(attend_across_documents: bool) -> None:
    tokens = torch.randint(0, 5, (40, 23), generator=torch.Generator().manual_seed(0))
    tokens[0] = EOS
    ids = document_ids(tokens, EOS)
    mask = loss_mask(tokens, EOS, attend_across_documents)
    assert ids.dtype == torch.int32
    assert mask.dtype == torch.float32
    for row, row_ids, row_mask in zip(tokens.tolist(), ids.tolist(), mask.tolist(), strict=True):
        document = 0
        for token, found_id, found_mask in zip(row, row_ids, row_mask, strict=True):
            assert found_id == document
            assert found_mask == (0.0 if token == EOS and not attend_across_documents else 1.0)
            document += token == EOS


def test_document_starts() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 2, 2, 2, 2]], dtype=torch.int32)
    expected = torch.tensor([[0, 0, 2, 2, 2, 5], [0, 1, 2, 2, 2, 2]], dtype=torch.int32)
    starts = document_starts(ids)
    assert torch.equal(starts, expected)
    assert starts.dtype == torch.int32
    assert torch.equal(document_starts(ids, query_start=3), expected[:, 3:])

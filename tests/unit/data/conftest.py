from pathlib import Path

import pytest
import sentencepiece
from data_corpus import document, write_corpus

from gsa_data.faults import warn_once
from gsa_data.shards import Manifest, build_manifest
from gsa_data.tokenize import Tokenizer
from helpers.chats import make_tokenizer

SAMPLE = Path(__file__).parents[3] / "data" / "sample"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tiny.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(document(number) for number in range(200)),
            model_writer=file,
            vocab_size=320,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            pad_id=-1,
            minloglevel=2,
        )
    return Tokenizer(str(path))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Write 5 shards of 40 documents: fewer shards than lanes, and several epochs per short run."""
    root = tmp_path_factory.mktemp("corpus")
    write_corpus(root, num_shards=5, documents_per_shard=40)
    return build_manifest(str(root))


@pytest.fixture(scope="session")
def sample_folder() -> Path:
    return SAMPLE


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("chat_tokenizer"))


@pytest.fixture(scope="module")
def chat_tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer(str(tokenizer_file))


@pytest.fixture(autouse=True)
def warns_again() -> None:
    warn_once.cache_clear()

"""What several tests of the model share."""

import pytest

from forkpoint.model.tiktoken_tokenizer import TiktokenTokenizer
from tests.support.tiktoken_folder import K3, added, published_size_tokens


@pytest.fixture(scope="session")
def published() -> TiktokenTokenizer:
    """K3's control tokens above as many ranks as it has, so that they have their published ids."""
    tokens = published_size_tokens()
    return TiktokenTokenizer(tokens, added(K3, len(tokens)))

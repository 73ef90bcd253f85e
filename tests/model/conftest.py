"""What several tests of the model share."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from forkpoint.model.tiktoken_tokenizer import TiktokenTokenizer

collect_ignore = [] if find_spec("tiktoken") else ["test_chat.py", "test_tiktoken.py"]
"""The model's other tests run where nothing can be installed."""


@pytest.fixture(scope="session")
def published() -> "TiktokenTokenizer":
    """K3's control tokens above as many ranks as it has, so that they have their published ids."""
    from tests.support.tiktoken_folder import K3, published_size_tokens, tokenizer_of

    return tokenizer_of(K3, published_size_tokens())

"""What several tests of the model share."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from forkpoint.model.text.tiktoken_tokenizer import TiktokenTokenizer

NEEDED = {
    "tiktoken": ["test_chat.py", "test_tiktoken.py"],
    "blake3": ["test_checkpoint.py", "test_digest.py", "test_loading.py"],
}
collect_ignore = [file for package, files in NEEDED.items() if not find_spec(package) for file in files]
"""The model's other tests run where nothing can be installed."""


@pytest.fixture(scope="session")
def published() -> "TiktokenTokenizer":
    """K3's control tokens above as many ranks as it has, so that they have their published ids."""
    from tests.support.tiktoken_folder import K3, published_size_tokens, tokenizer_of

    return tokenizer_of(K3, published_size_tokens())

"""`python -m tests.mutations.under NAME`: run the test of a mutation under it. `--well`: without it."""

import sys

import pytest

from tests.mutations.importing import install
from tests.mutations.listing import MUTATIONS


def main() -> int:
    """pytest's exit code."""
    name, well = sys.argv[1], "--well" in sys.argv
    mutation = next(mutation for mutation in MUTATIONS if mutation.name == name)
    if not well:
        install(mutation)
    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line", *mutation.test]))


if __name__ == "__main__":
    sys.exit(main())

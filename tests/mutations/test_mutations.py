"""A few mutations in every run of the suite; `python -m tests.mutations` tries all."""

import pytest

from tests.mutations.importing import ROOT, mutated
from tests.mutations.listing import MUTATIONS
from tests.mutations.mutation import Mutation
from tests.mutations.trial import attempt


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.fast], ids=lambda m: m.name)
def test_the_mistake_is_found(mutation: Mutation) -> None:
    trial = attempt(mutation)
    assert trial.caught, f"code {trial.code}: {trial.problem}"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_every_mutation_still_changes_what_it_names(mutation: Mutation) -> None:
    assert mutated(mutation) != (ROOT / mutation.path).read_text(encoding="utf-8")
    assert (ROOT / mutation.test[0].partition("::")[0]).is_file()


def test_names_are_their_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)

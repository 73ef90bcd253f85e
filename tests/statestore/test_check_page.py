"""docs/check.md names every kind of finding, and no other."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
KIND = re.compile(r'"([A-Z]+(?:_[A-Z]+)+|DATABASE)"')


def test_the_page_about_findings_names_every_kind_and_no_other() -> None:
    sources = [
        *(ROOT / "statestore" / "checks").glob("*.py"),
        *(ROOT / "statestore").glob("*/selfcheck.py"),
        ROOT / "statestore" / "redis" / "blobs.py",
    ]
    made = {kind for source in sources for kind in KIND.findall(source.read_text(encoding="utf-8"))}
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    told = {kind for row in page.splitlines() if row.startswith("| `") for kind in re.findall(r"`([A-Z_]+)`", row)}
    assert made == told

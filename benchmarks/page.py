"""Generated tables inside pages that people write: what stands between two marks."""

from typing import Final

END: Final = "<!-- end -->"


def filled_between(page: str, begin: str, text: str) -> str:
    """The page with `text` between `begin` and the next END. Raises ValueError when the marks are not there once."""
    before, mark, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not mark or not end or begin in after:
        raise ValueError(f"the page needs {begin} and {END}, once and in this order")
    return f"{before}{begin}\n{text}\n{end}{after}"

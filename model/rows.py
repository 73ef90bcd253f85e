"""RowBatch: the rows (tokens) that one forward pass consumes, of several sequences packed one after another."""

from dataclasses import dataclass

from forkpoint.limits import NORM_ROWS, PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of N sequences. Sequence n owns rows `cu_seqlens[n]:cu_seqlens[n+1]`, the first at position `starts[n]`.

    `slots[n]` is its KDA slot (no slot twice) and `page_tables[n]` its page ids in order of position, which must reach
    past its last row.
    """

    token_ids: list[int]
    cu_seqlens: list[int]
    starts: list[int]
    slots: list[int]
    page_tables: list[list[int]]

    @property
    def sequences(self) -> int:
        """N, the number of sequences."""
        return len(self.slots)

    @property
    def rows(self) -> int:
        """R, the number of rows."""
        return len(self.token_ids)

    def length(self, sequence: int) -> int:
        """Number of rows of a sequence."""
        return self.cu_seqlens[sequence + 1] - self.cu_seqlens[sequence]

    def kept_rows(self) -> list[tuple[int, int, int]]:
        """(slot, place, row) of the rows of each sequence's last two positions, kept in its slot at position % 2."""
        kept: list[tuple[int, int, int]] = []
        for sequence, slot in enumerate(self.slots):
            end_row, length = self.cu_seqlens[sequence + 1], self.length(sequence)
            end = self.starts[sequence] + length
            for back in range(1, min(NORM_ROWS, length) + 1):
                kept.append((slot, (end - back) % NORM_ROWS, end_row - back))
        return kept

    def check(self, vocab_size: int) -> None:
        """Raise ValueError if the lists do not fit together: a programming error of the caller, not of a client."""
        count = self.sequences
        if not (len(self.cu_seqlens) == count + 1 and len(self.starts) == len(self.page_tables) == count):
            raise ValueError(f"{count} slots, but {len(self.starts)} starts and {len(self.page_tables)} page tables")
        if self.cu_seqlens[0] != 0 or self.cu_seqlens[-1] != self.rows:
            raise ValueError(f"cu_seqlens runs {self.cu_seqlens[0]}..{self.cu_seqlens[-1]}, there are {self.rows} rows")
        if len(set(self.slots)) != count:
            raise ValueError(f"a slot appears twice in {self.slots}")
        for sequence in range(count):
            end = self.starts[sequence] + self.length(sequence)
            if self.length(sequence) < 0 or self.starts[sequence] < 0:
                raise ValueError(
                    f"sequence {sequence} starts at {self.starts[sequence]} and has {self.length(sequence)} rows"
                )
            if len(self.page_tables[sequence]) * PAGE_TOKENS < end:
                raise ValueError(f"sequence {sequence} reaches position {end}, its pages end before")
        if self.token_ids and not 0 <= min(self.token_ids) <= max(self.token_ids) < vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {vocab_size}")

"""A product of its own for each head: MLA's absorbed projections."""

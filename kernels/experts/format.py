"""What of MXFP4 a config and a list of tensors need: no torch here, so that `plan` needs none."""

from typing import Final

GROUP: Final = 32
"""Elements of a row that share a scale."""

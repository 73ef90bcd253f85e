"""Pages of list calls. A page token is opaque to clients and belongs to one list: the key of the last row sent."""

import base64
import binascii
import json
from collections.abc import Callable, Iterable
from typing import TypeVar

from google.protobuf.message import Message

from forkpoint.errors import InvalidFieldError
from forkpoint.limits import PAGE_BYTES_MAX, PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX

M = TypeVar("M", bound=Message)


def page_size(asked: int) -> int:
    """How many rows to send: 0 means the default, and nobody gets more than the maximum."""
    if asked < 0:
        raise InvalidFieldError("page_size", f"{asked} is negative")
    return min(asked or PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX)


def page_token(listing: str, last: str) -> str:
    """The token for the page after key `last` of `listing` (the call and what it lists)."""
    return base64.urlsafe_b64encode(json.dumps([listing, last]).encode()).decode()


def page_start(token: str, listing: str) -> str:
    """The key after which the page starts; "" without a token. Raises InvalidFieldError for a token of another list."""
    if not token:
        return ""
    try:
        stored, last = json.loads(base64.b64decode(token.encode(), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, TypeError) as error:
        raise InvalidFieldError("page_token", "is none of this service") from error
    if stored != listing or not isinstance(last, str):
        raise InvalidFieldError("page_token", "belongs to another list")
    return last


def cut_page(rows: Iterable[M], size: int, key: Callable[[M], str], listing: str) -> tuple[list[M], str]:
    """The first rows that make up a page, and the token of the next page ("" on the last).

    `rows` holds at least one row more than `size` when there are more. A page is cut early rather than outgrow a
    message, but always holds one row.
    """
    page: list[M] = []
    filled = 0
    for row in rows:
        filled += row.ByteSize()
        if page and (len(page) == size or filled > PAGE_BYTES_MAX):
            return page, page_token(listing, key(page[-1]))
        page.append(row)
    return page, ""

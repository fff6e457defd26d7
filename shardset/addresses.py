"""Addresses in a form that may be shown: without passwords."""

import re

# All between :// and the last @ before a slash. A password may contain a slash; a port is not a password.
_USER = re.compile(r"(?<=://)(?:[^/\s]*@|[^/\s:@]+:(?!\d+/)\S*@)")


def masked(text: str) -> str:
    """The text with `***` for user and password in each address: `http://***@host`."""
    return _USER.sub("***@", text)

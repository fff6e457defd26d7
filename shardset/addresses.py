"""Addresses as they may be shown: without the password that somebody wrote into one."""

import re

# What stands between :// and the last @ before a slash. A password may hold a slash itself, a port is no password.
_USER = re.compile(r"(?<=://)(?:[^/\s]*@|[^/\s:@]+:(?!\d+/)\S*@)")


def masked(text: str) -> str:
    """The text with *** in place of user and password in each address: `http://***@host`."""
    return _USER.sub("***@", text)


def without_user(url: str) -> str:
    """The address without user and password."""
    return _USER.sub("", url)

"""Messages show addresses without their passwords."""

import pytest

from shardset.errors import DamagedShard, masked


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pw@host/x: gone", "http://***@host/x: gone"),
        ("http://user:p@w@host", "http://***@host"),
        ("http://user:p/w@host:80/x", "http://***@host:80/x"),
        ("http://token@host", "http://***@host"),
        ("from http://a:b@c/d to http://e:f@g", "from http://***@c/d to http://***@g"),
        ("http://127.0.0.1:8080/a@2", "http://127.0.0.1:8080/a@2"),
        ("gs://bucket/train/a@2: 403: me@project.com may not", "gs://bucket/train/a@2: 403: me@project.com may not"),
        ("gs://bucket: 403: me@project.com", "gs://bucket: 403: me@project.com"),
    ],
)
def test_an_address_is_shown_without_user_and_password(text, shown):
    assert masked(text) == shown
    assert str(DamagedShard(text)) == shown


def test_a_message_is_one_line_without_control_characters():
    error = DamagedShard("a\x1b[2J\nb\udcff: café")
    assert str(error) == r"a\x1b[2J\nb\udcff: café"

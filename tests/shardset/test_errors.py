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
        (
            "gs://bucket/train/a@2: 403: me@project.com may not",
            "gs://bucket/train/a@2: 403: me@project.com may not",
        ),
        ("gs://bucket: 403: me@project.com", "gs://bucket: 403: me@project.com"),
        ("http://user:p@w/x@host:80/y: gone", "http://***@host:80/y: gone"),
        ("http://user:p@[::1]:9000/x", "http://***@[::1]:9000/x"),
        ("https://host/set?sig=a;b,c: gone", "https://host/set?*** gone"),
        ("'https://host/set?sig=a', expected", "'https://host/set?***', expected"),
        ("az://container/set?sv=1&sig=a", "az://container/set?***"),
        ("s3://bucket/a?X-Amz-Signature=a", "s3://bucket/a?***"),
        ("'s3://KEY:SEC/RET/x': no", "'s3://***': no"),
        ("s3://KEY:SECRET", "s3://***"),
        (
            "AWS_ENDPOINT_URL is user:p@w@host:9000, expected",
            "AWS_ENDPOINT_URL is ***@host:9000, expected",
        ),
        ("the emulator at user:pw@localhost", "the emulator at ***@localhost"),
        ("proxy=user:pw@host/x", "***@host/x"),
        ("http://localhost:9000: refused", "http://localhost:9000: refused"),
        ("http://[::1]:9000/x", "http://[::1]:9000/x"),
        ("at localhost:9000, 12:30 me@project.com", "at localhost:9000, 12:30 me@project.com"),
        ("gs://bucket: is not there", "gs://bucket: is not there"),
        ("photos/a:b@2.jpg: cut short", "photos/a:b@2.jpg: cut short"),
    ],
)
def test_an_address_is_shown_without_user_and_password(text, shown):
    assert masked(text) == shown
    assert str(DamagedShard(text)) == shown


def test_a_message_is_one_line_without_control_characters():
    error = DamagedShard("a\x1b[2J\nb\udcff: café")
    assert str(error) == r"a\x1b[2J\nb\udcff: café"

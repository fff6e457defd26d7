"""`import shardset` as a user meets it: the base requirements suffice, and the reader says what it
lacks.
"""

import inspect
import re
import sys

import pytest

import shardset
from tests.makers.documented import REPOSITORY, start

DECODERS = ["cv2", "kornia_rs", "pyspng", "simplejpeg"]
OTHERS = ["apache_beam", "jinja2", "jpegio", "scipy", "timm", "torch", "torchvision", "webdataset"]
LACKS = r".*\nshardset.errors.MissingLibrary: the library .*`pip install 'shardset\[read\]'`.*\n"
URL = r"<class .*> memory://a\n"


@pytest.mark.parametrize(
    ("missing", "code", "printed", "error"),
    [
        (DECODERS + OTHERS, "shardset.Manifest, shardset.open_storage('memory://a').url", URL, ""),
        (OTHERS, "shardset.Stream, shardset.ImageSpec", r"<class .*> <class .*>\n", ""),
        (DECODERS, "shardset.Stream", "", LACKS),
        (DECODERS, "shardset.ImageSpec", "", LACKS),
    ],
)
def test_the_library_needs_the_base_requirements_and_the_reader_its_extra(
    missing, code, printed, error
):
    block = f"import sys; sys.modules.update(dict.fromkeys({missing}))"
    done = start([sys.executable, "-c", f"{block}; import shardset; print({code})"], REPOSITORY)
    assert re.fullmatch(error, done.stderr, re.S), done.stderr
    assert done.returncode == bool(error)
    assert re.fullmatch(printed, done.stdout)


@pytest.mark.parametrize("name", shardset.__all__)
def test_every_public_name_is_there(name):
    assert getattr(shardset, name) is not None


@pytest.mark.parametrize(
    "name", sorted({*shardset.__all__} - {"Batch", "StreamOptions", "__version__"})
)
def test_every_public_name_documents_its_arguments(name):
    value = getattr(shardset, name)
    documented = re.findall(r"\n    \*{0,2}(\w+): ", inspect.getdoc(value))
    found = inspect.signature(value).parameters.keys()
    # MixedStream has `**options`, which Stream documents.
    assert found <= {*documented, "args", "kwargs"} or "options" in documented


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'shardset' has no attribute 'Streams'"):
        shardset.Streams  # noqa: B018

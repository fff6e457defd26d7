"""Types that threads decode are prepared when their modules are imported; msgspec crashes where two
threads do it.
"""

import subprocess
import sys

import pytest

# In a process of its own, in which nothing has been decoded yet.
PROGRAM = """
import importlib, pkgutil, sys
import msgspec
import pipelines, shardset, trainer

def modules(package):
    return [name for _, name, _ in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]

def below(kind):
    return {kind}.union(*map(below, kind.__subclasses__()))

def is_prepared(kind):
    called = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name))
    try:
        msgspec.json.Decoder(kind)
    except TypeError:
        return True  # nobody can decode it
    finally:
        sys.setprofile(None)
    return "get_class_annotations" not in called

for package in (shardset, pipelines, trainer):
    for name in modules(package):
        if not name.endswith(("__main__", ".torchtpu")):
            importlib.import_module(name)
packages = ("shardset", "pipelines", "trainer")
own = [kind for kind in below(msgspec.Struct) if kind.__module__.partition(".")[0] in packages]
# In one order: whoever asks for a type prepares the types of its fields too.
own.sort(key=lambda kind: kind.__name__)
print(*(kind.__name__ for kind in own if not is_prepared(kind)))
"""

NEVER_DECODED = [
    "Compacted",
    "DifferentSample",
    "Extent",
    "RawSample",
    "Record",
    "Repaired",
    "SampleRow",
    "SplitNumbers",
]


@pytest.mark.slow
def test_every_record_is_prepared_before_threads_decode_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == NEVER_DECODED

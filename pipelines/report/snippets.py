"""The code and commands on the page: how to load the set, verify it and train on it."""

from shardset.format.images import IMAGE_FIELDS
from shardset.format.manifest import Manifest


def loading_code(manifest: Manifest) -> str:
    """Python code for plain webdataset, to run in the folder of the manifest."""
    name = _train_split(manifest)
    split = manifest.splits[name]
    images = [field for field in split.fields if field in IMAGE_FIELDS] or [
        next((field for field in split.fields if field.rpartition(".")[2] in IMAGE_FIELDS), split.fields[0])
    ]
    stem, paths = split.shards[0].path[:-10], [shard.path for shard in split.shards]
    if paths != [f"{stem}{number:06d}.tar" for number in range(len(paths))]:
        first = "import json\n"
        urls = f"[shard['path'] for shard in json.load(open('manifest.json'))['splits'][{name!r}]['shards']]"
    else:
        first = ""
        urls = repr(paths[0] if len(paths) == 1 else f"{stem}{{{paths[0][-10:-4]}..{paths[-1][-10:-4]}}}.tar")
    labels = ", 'cls'" if sum(split.class_totals) == split.num_samples else ""
    # `a;b` is the first of them that a sample has.
    fields = repr(";".join(images)) + labels
    decode = ""
    if "avif" in images:  # which webdataset does not take for an image by itself
        decode = f'.decode(webdataset.imagehandler("pil", {images}))'
    elif images[0].rpartition(".")[2] in IMAGE_FIELDS:
        decode = '.decode("pil")'
    return (
        f"{first}import webdataset\n\n"
        f"samples = webdataset.WebDataset({urls}, shardshuffle={min(100, split.num_shards)})\n"
        f"for sample in samples.shuffle(1000){decode}.to_tuple({fields}):\n    ...\n"
    )


def training_commands(manifest: Manifest) -> str:
    """The commands that verify the set and train on it."""
    train = _train_split(manifest)
    others = [name for name in manifest.splits if name != train]
    settings = "" if train == "train" else f" --set train_split={train}"
    settings += f" --set eval_split={others[0]}" if len(others) > 1 else ""
    return f"python -m pipelines verify . --deep\npython -m trainer train --manifest . --run-dir run{settings}\n"


def _train_split(manifest: Manifest) -> str:
    return "train" if "train" in manifest.splits else next(iter(manifest.splits))

"""OpenCLIP: start this with the arguments of open_clip_train.main; `--train-data` is the set.

An epoch of OpenCLIP's is the next `--train-num-samples` of exact passes over the split `train`. So
checkpoints come as often as you like, and every sample is seen once per pass, also after a resume
on another number of GPUs.
"""

import itertools
import sys
from collections.abc import Iterator

import open_clip_train.data
import open_clip_train.main
import torch

import shardset


class VirtualEpochs:
    """What OpenCLIP's loop takes for data and for its loader."""

    def __init__(self, args, preprocess, is_train, epoch=0, tokenizer=None) -> None:
        crop, *_, normalize = preprocess.transforms
        self.dataloader, self.epoch, self.tokenizer = self, epoch, tokenizer
        self.mean, self.std = (
            torch.tensor(each).view(3, 1, 1) for each in (normalize.mean, normalize.std)
        )
        window = shardset.RandomResizedCrop(tuple(crop.scale), interpolation="bicubic")
        self.stream = shardset.Stream(
            args.train_data,
            "train",
            batch_size=args.batch_size,
            rank=args.rank,
            world_size=args.world_size,
            image=shardset.ImageSpec(size=crop.size[0], crop=window),
            targets={"text": shardset.Text("txt")},
        )
        size = args.batch_size * args.world_size
        self.num_batches = (args.train_num_samples or self.stream.split.num_samples) // size
        self.num_samples = self.num_batches * size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = divmod(self.epoch * self.num_batches, len(self.stream))
        for _, _, batch in itertools.islice(self.stream.epochs(*start), self.num_batches):
            images = torch.from_numpy(batch["image"]).permute(0, 3, 1, 2) / 255
            yield (images - self.mean) / self.std, self.tokenizer(batch["text"])


if __name__ == "__main__":
    open_clip_train.data.get_dataset_fn = lambda path, kind: VirtualEpochs
    open_clip_train.main.main(sys.argv[1:])

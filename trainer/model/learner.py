"""The arithmetic of a step: model, loss, optimizer and moving average, on whatever a runtime
offers.
"""

import copy
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.functional import cross_entropy

from shardset.order.permutation import derive_key
from trainer.config import TrainConfig
from trainer.data import step_rows
from trainer.data.step_rows import Seen
from trainer.errors import CheckpointError, memory_errors
from trainer.model import batch_transforms, networks
from trainer.model.losses import Partners, losses_of
from trainer.run_folder.checkpoint_state import LearnerState
from trainer.runtime.base import Runtime, TensorBatch

COUNTERS = ("step", "lookahead_step")
"""The names in timm's optimizers of a count of steps that all weights have in common: lamb, adan,
lookahead.
"""


class Learner:
    """A model that learns.

    `state` is what `Learner.state` gave earlier, on any strategy; None for fresh weights.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: TrainConfig,
        num_classes: int,
        state: LearnerState | None,
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._num_classes = num_classes
        # A checkpoint holds all weights, so none are downloaded again.
        fresh = config.model if state is None else replace(config.model, pretrained=None)
        sizes = {config.image.size, config.image.size_in_evaluation}
        net = networks.trainable(fresh, num_classes, config.seed, sizes)
        self._normalize = batch_transforms.Normalize(config.image.mean, config.image.std)
        if config.sync_batch_norm:
            net = runtime.synchronize_norms(net)
        ema = copy.deepcopy(net) if config.regularize.ema_decay else None
        self._scaler = GradScaler(runtime.device.type, enabled=runtime.precision == "fp16")
        guarded = memory_errors()
        to_device = guarded(runtime.module_to_device)
        self.net = to_device(net)
        self._average = None if ema is None else to_device(ema)
        self._eval_net = self.net if self._average is None else self._average
        self._averaged = _pairs_of_layers(self._eval_net, self.net)
        runtime.module_to_device(self._normalize)
        self._optimizer = networks.optimizer(
            config.optimizer, self.net, runtime.optimizer_options(config.optimizer.name)
        )
        if state is not None:
            self._load(state)
        runtime.mark_replicated(self._tensors())
        runtime.accelerate({self.net, self._eval_net}, compile=config.compile, tf32=config.tf32)
        self._parallel = runtime.data_parallel(self.net)
        self._train = guarded(runtime.compiled(self._train_step, "train step"))
        self._eval = guarded(runtime.compiled(self._eval_step, "evaluation step"))

    def train_step(
        self, batch: TensorBatch, learning_rate: float, key: int, weight: float
    ) -> torch.Tensor:
        """One update; returns the step's row (see step_rows.py) on the device, for
        `Runtime.fetch`.

        `batch` holds `image` uint8 [B, H, W, 3], `label` int64, `weight` float32, and maybe `flip`
        and `mix`. With `id` (see rows.ids_as_floats) the row has the samples of all replicas.
        `weight` is the number of samples of the global batch, without pads.
        """
        self._parallel.train()
        networks.set_training(self.net, self._config.model)
        self._runtime.seed(key)
        number = self._runtime.number
        return self._train(batch, number(learning_rate), number(weight))

    def eval_step(self, batch: TensorBatch) -> torch.Tensor:
        """The row of an evaluation step, for `Runtime.fetch`, with the averaged weights if the run
        keeps them.
        """
        self._eval_net.eval()
        return self._eval(batch)

    def broadcast_buffers(self) -> None:
        """Gives all replicas the BatchNorm statistics of replica 0; before an evaluation and a
        checkpoint.
        """
        self._runtime.broadcast_buffers(self.net)
        if self._average is not None:
            self._runtime.broadcast_buffers(self._average)

    def state(self) -> LearnerState:
        """Weights, averaged weights and moments on the CPU: plain tensors that any strategy can
        load.
        """
        names = self._weight_names()
        moments = self._optimizer.state_dict()["state"]
        on_device = {
            "model": self.net.state_dict(),
            "ema": None if self._average is None else self._average.state_dict(),
            "optimizer": {names[number]: values for number, values in moments.items()},
            "optimizer_counters": {
                name: value
                for name, value in self._optimizer.param_groups[0].items()
                if name in COUNTERS
            },
            "scaler": self._scaler.state_dict(),
        }
        return self._runtime.to_host(on_device)

    def _load(self, state: LearnerState) -> None:
        """Takes what `state` gave earlier.

        Raises CheckpointError for the weights of another model.
        """
        try:
            self.net.load_state_dict(state["model"])
            if self._average is not None:
                # A checkpoint without averages: they start from its weights.
                self._average.load_state_dict(state["ema"] or state["model"])
        except RuntimeError as error:
            reasons = textwrap.shorten(str(error), 300, placeholder=" ...")
            raise CheckpointError(
                f"the checkpoint's weights are not of this model, {self._config.model.name!r}:"
                f" {reasons}; it has changed since, or give the --model that the run had"
            ) from error
        saved, counters = state["optimizer"], state["optimizer_counters"]
        numbered = enumerate(self._weight_names())
        groups = [
            {**group, **copy.deepcopy(counters)}
            for group in self._optimizer.state_dict()["param_groups"]
        ]
        moments = {number: saved[name] for number, name in numbered if name in saved}
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        if state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])

    def _weight_names(self) -> list[str]:
        """Weights in the order in which the optimizer numbers them: those without weight decay come
        first.
        """
        names = {id(parameter): name for name, parameter in self.net.named_parameters()}
        groups = self._optimizer.param_groups
        return [names[id(parameter)] for group in groups for parameter in group["params"]]

    def _tensors(self) -> Iterator[torch.Tensor]:
        """All that lives on the device from step to step."""
        for module in filter(None, (self.net, self._average)):
            yield from itertools.chain(module.parameters(), module.buffers())
        for moments in self._optimizer.state.values():
            for value in moments.values():
                if isinstance(value, torch.Tensor) and value.device == self._runtime.device:
                    yield value

    def _train_step(
        self, batch: TensorBatch, rate: float | torch.Tensor, total: float | torch.Tensor
    ) -> torch.Tensor:
        # Every count-th sample, so that a part has as many of each device's samples.
        count = self._config.accumulate
        *parts, last = (
            {name: tensor[start::count] if count > 1 else tensor for name, tensor in batch.items()}
            for start in range(count)
        )
        with self._runtime.no_sync(self._parallel):
            passes = [self._pass(part, total) for part in parts]
        passes.append(self._pass(last, total))
        self._runtime.reduce_gradients(self._optimizer)
        if self._config.regularize.clip_norm:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), self._config.regularize.clip_norm)
        self._runtime.update(self._optimizer, rate, self._scaler)
        if self._config.regularize.ema_decay:
            _average_in(self._averaged, self._config.regularize.ema_decay)
        return self._row(passes)

    def _pass(self, batch: TensorBatch, total: float | torch.Tensor) -> Seen:
        """Forward and backward of a part; the gradient belongs to the mean over all samples of all
        replicas.
        """
        images, partners = self._images(batch)
        logits = self._logits(self._parallel, images)
        losses = losses_of(self._config.regularize, logits, batch["label"], partners)
        # Replicas average their gradients: times their number that is the sum, over the weight of
        # the whole batch.
        loss = (losses * batch["weight"]).sum() * self._runtime.num_replicas / total
        torch.autograd.backward(self._scaler.scale(loss))
        return step_rows.seen(batch, losses.detach(), logits.detach())

    def _row(self, passes: Sequence[Seen]) -> torch.Tensor:
        """The row of a step (see step_rows.py): the sums of its passes, and the samples of all
        replicas if asked.
        """
        sums = torch.stack([seen.sums for seen in passes]).sum(0)
        samples = [seen.samples for seen in passes if seen.samples is not None]
        if not samples:
            return sums
        return torch.cat([sums, self._runtime.of_all(torch.cat(samples)).flatten()])

    def _logits(self, net: nn.Module, images: torch.Tensor) -> torch.Tensor:
        with self._runtime.autocast():
            logits: torch.Tensor = net(images)
        networks.check_logits(logits, self._config.model.name, self._num_classes)
        return logits.float()

    def _images(self, batch: TensorBatch) -> tuple[torch.Tensor, Partners | None]:
        images = self._normalize(batch["image"], batch.get("flip"))
        if "mix" not in batch:
            return images, None
        repeats = self._config.image.augment_repeats
        blend, own_share = batch_transforms.mixed(
            images, batch_transforms.partners(images, repeats), batch["mix"]
        )
        return blend, Partners(own_share, batch_transforms.partners(batch["label"], repeats))

    @torch.no_grad()
    def _eval_step(self, batch: TensorBatch) -> torch.Tensor:
        logits = self._logits(self._eval_net, self._normalize(batch["image"]))
        losses = cross_entropy(logits, batch["label"], reduction="none")
        # a view may weigh samples: that is for training
        once = (batch["weight"] > 0).to(batch["weight"].dtype)
        return self._row([step_rows.seen(batch | {"weight": once}, losses, logits)])


def step_key(seed: int, epoch: int, step: int) -> int:
    """The seed of the randomness inside the model in a step."""
    return derive_key(seed, "inside the model", epoch, step)


@torch.no_grad()
def _average_in(layers: Sequence[tuple[nn.Module, nn.Module, str]], decay: float) -> None:
    """Moves the averaged weights and statistics a little towards the net's; counters are copied."""
    pairs = [(getattr(average, name), getattr(layer, name)) for average, layer, name in layers]
    counters = [pair for pair in pairs if not pair[0].is_floating_point()]
    moving = [pair for pair in pairs if pair[0].is_floating_point()]
    torch._foreach_lerp_([old for old, _ in moving], [new for _, new in moving], 1 - decay)
    if counters:
        torch._foreach_copy_([old for old, _ in counters], [new for _, new in counters])


def _pairs_of_layers(average: nn.Module, net: nn.Module) -> list[tuple[nn.Module, nn.Module, str]]:
    """The layers of all that a state holds, and its name there; shared weights once.

    Not the tensors: a layer may replace its buffer in a step.
    """
    tensors = net.state_dict(keep_vars=True)
    places = {id(tensor): name.rpartition(".") for name, tensor in tensors.items()}
    paths = [(path, name) for path, _, name in places.values()]
    return [(average.get_submodule(path), net.get_submodule(path), name) for path, name in paths]

"""The settings of a run without a recipe: they follow from the shard set, the machine and what the
user gave.

Each rule returns settings for its part, from what was given or chosen before it, and overrides
nothing. The batch size and the epochs depend on the set alone, so the same command takes the same
steps on any machine.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardset.order.budget import BUDGET_BYTES
from shardset.settings import value_text
from shardset.storage.base import stat_or_none
from shardset.storage.open import open_storage
from trainer import config as configs
from trainer.config import TrainConfig, mixed_sets
from trainer.flags import FLAGS, ConfigFlags
from trainer.run_folder import names
from trainer.runtime.machine import Machine, machine

if TYPE_CHECKING:
    from trainer.data.set_facts import SetFacts

NAME = "auto"
"""What `config.recipe` says of a run whose settings were chosen here."""

TINY_SIDE = 32  # up to this side `tiny_resnet` is enough on a CPU
# small images without colour are mostly letters and digits, whose mirror images mean something else
GREY_SIDE = 64
# up to this side equal images are cropped from padded images; resizing would blur them
SMALL_SIDE = 96
MANY_SAMPLES, HUGE_SAMPLES = 20_000, 500_000
LARGE_SIZE, LARGE_SIZE_CPU = 224, 128
# of batches of 256, close to the best on two small sets (docs/dev/log/train.md)
RATE, FINE_TUNING_RATE = 3e-3, 2e-3
FINE_TUNING_BATCH = 64  # smaller batches have its rate
FINE_TUNING_STEPS = 500  # 10 epochs of a small set end before its last layer has learnt
RESIZE = 8 / 7  # an evaluation resizes the shorter side to 256 for a crop of 224

Settings = dict[str, Any]
InputOf = Callable[[str, str], Settings]
"""The settings of a model's images, if they are known: from its name and `model.pretrained`."""


def choose(
    facts: "SetFacts", machine: Machine, given: Mapping[str, Any], input_of: InputOf
) -> Settings:
    """The settings that were not given."""
    settings = dict(given)

    def add(others: Settings) -> None:
        for key, value in others.items():
            settings.setdefault(key, value)

    add(_model(facts, machine, given))
    add(input_settings(settings, settings["model.name"], input_of) or _size(facts, machine))
    add(_crop(facts, settings))
    add(steps_of(facts.num_samples, settings, machine.num_processes))
    add(_optimizer(settings))
    add(_memory(machine))
    return {"recipe": NAME} | {key: value for key, value in settings.items() if key not in given}


def input_settings(given: Mapping[str, Any], model: str, input_of: InputOf) -> Settings:
    """With pretrained weights, the settings that follow from their model, less those that were
    given.
    """
    pretrained = given.get("model.pretrained")
    if pretrained is None:
        return {}
    settings = input_of(str(given.get("model.name", model)), pretrained)
    if settings and "image.size" in given:
        scale = given["image.size"] / settings["image.size"]
        settings["image.eval_resize"] = math.ceil(scale * settings["image.eval_resize"])
    return {key: value for key, value in settings.items() if key not in given}


def _model(facts: "SetFacts", machine: Machine, settings: Mapping[str, Any]) -> Settings:
    side = min(facts.side, settings.get("image.size", facts.side))
    is_pretrained = settings.get("model.pretrained") is not None
    is_tiny = side <= TINY_SIDE and not is_pretrained
    is_large = side > SMALL_SIDE and (is_pretrained or facts.num_samples >= MANY_SAMPLES)
    if machine.device == "cpu":
        name = "trainer.model:tiny_resnet" if is_tiny else "resnet18"
    else:
        name = "resnet50" if is_large else "resnet18"
    has_small_stem = is_tiny and name == "resnet18" == settings.get("model.name", name)
    return {"model.name": name, "model.stem": "cifar" if has_small_stem else "imagenet"}


def _size(facts: "SetFacts", machine: Machine) -> Settings:
    if facts.side <= SMALL_SIDE:
        return {"image.size": facts.side}
    largest = LARGE_SIZE_CPU if machine.device == "cpu" else LARGE_SIZE
    return {"image.size": min(largest, facts.side // 32 * 32)}


def _crop(facts: "SetFacts", settings: Settings) -> Settings:
    size = settings["image.size"]
    is_small = facts.is_uniform and facts.side <= SMALL_SIDE
    crop: Settings = {"image.train_crop": "random"}
    if is_small and size == facts.side:
        crop = {"image.train_crop": "pad", "image.pad": min(size - 1, max(1, size // 8))}
    return {
        **crop,
        "image.eval_resize": size if is_small else math.ceil(size * RESIZE),
        "image.flip": not (facts.is_grey and facts.side <= GREY_SIDE),
    }


def steps_of(num_samples: int, given: Mapping[str, Any], num_processes: int = 1) -> Settings:
    """Batch size and epochs: at least about 20 steps per epoch, more epochs for small sets, and 500
    steps to fine-tune.

    The batch divides over the processes and holds each image as often as asked.
    """
    batch, epochs = 1 << round(math.log2(min(256, max(16, num_samples / 24)))), 30
    if num_samples >= HUGE_SAMPLES:
        batch, epochs = 1024, 90
    elif given.get("model.pretrained") is not None:
        batch, epochs = min(FINE_TUNING_BATCH, batch), 10
    repeats = given.get("image.augment_repeats") or 1
    unit = math.lcm(num_processes, repeats)
    batch = given.get("global_batch_size", -(-batch // unit) * unit)
    if given.get("model.pretrained") is not None:
        epochs = max(epochs, -(-FINE_TUNING_STEPS // -(-num_samples * repeats // batch)))
    return {"global_batch_size": batch, "epochs": epochs}


def _optimizer(settings: Settings) -> Settings:
    """AdamW, which trains convolutions and transformers alike; the rate grows with the root of the
    batch size.
    """
    is_pretrained = settings.get("model.pretrained") is not None
    batch = max(settings["global_batch_size"], FINE_TUNING_BATCH if is_pretrained else 1)
    rate = FINE_TUNING_RATE if is_pretrained and not settings.get("model.freeze") else RATE
    rate = settings.get("optimizer.learning_rate", float(f"{rate * math.sqrt(batch / 256):.1g}"))
    head = (
        {"optimizer.head_learning_rate": 10 * rate}
        if is_pretrained and not settings.get("model.freeze")
        else {}
    )
    return {
        "optimizer.name": "adamw",
        "optimizer.learning_rate": rate,
        "optimizer.weight_decay": 0.05,
        "schedule.warmup_epochs": min(5.0, settings["epochs"] / 10),
        "regularize.label_smoothing": 0.1,
        **(head if rate else {}),
    }


def _memory(machine: Machine) -> Settings:
    # Both streams take at most a quarter. A power of two: hosts whose memory differs by a little
    # choose the same.
    budget = 1 << max(1 << 26, machine.host_bytes // 8).bit_length() - 1
    small_budget = {"budget_bytes": budget} if budget < BUDGET_BYTES else {}
    return {"precision": machine.precision, **small_budget, **strategy_on(machine)}


def strategy_on(machine: Machine) -> Settings:
    """On one CPU plain PyTorch: it starts at once, and what its steps need is known."""
    is_plain = machine.device == "cpu" and machine.num_processes == 1 and not machine.asks_for_xla
    return {"strategy": "single"} if is_plain else {}


# --- from flags to a configuration ----------------------------------------------------------------


def resolve(flags: ConfigFlags) -> tuple[TrainConfig, str]:
    """The configuration that the flags mean, and what to tell about it (maybe nothing).

    Raises ConfigError.

    Without a recipe, a run folder keeps its settings, unless it has no checkpoint and another set
    is named; a new run has those that follow from the set and the machine.
    """
    given = flags.given
    if flags.recipe is None and not given.get("fake_data"):
        run_dir = str(given.get("run_dir", TrainConfig().run_dir))
        recorded = _recorded(run_dir, given.get("manifest"))
        if recorded is not None:
            same = strategy_on(machine()) if recorded.recipe == NAME else {}
            config = flags.config(configs.continued(recorded, run_dir), same)
            return config, f"settings of {run_dir}/{configs.RECORD}"
        if given.get("manifest") is not None:
            from trainer.data.set_facts import survey
            from trainer.data.splits import load_once

            split = given.get("train_split", TrainConfig().train_split)
            sets = [load_once(url) for url, _ in mixed_sets(given.get("mix"))] or [
                load_once(given["manifest"])
            ]
            facts = survey(sets[0], split)
            facts = replace(
                facts, num_samples=sum(each.part(split).selection.num_kept for each in sets)
            )
            here = machine()
            chosen = choose(facts, here, given, _input_of)
            return flags.config(chosen=chosen), table(chosen, facts, here)
    return flags.config(chosen=input_settings(given, flags.config().model.name, _input_of)), ""


def _recorded(run_dir: str, manifest: str | None) -> TrainConfig | None:
    """The settings that a run folder keeps."""
    folder = open_storage(run_dir)
    is_trained = bool(names.steps(folder))
    if not is_trained and stat_or_none(folder, configs.RECORD) is None:
        return None
    recorded = configs.recorded(folder)
    is_same = manifest is None or configs.absolute(manifest) == recorded.manifest
    return recorded if is_trained or is_same else None


def _input_of(name: str, weights: str) -> Settings:
    from trainer.model import pretrained

    return pretrained.input_of(name, weights)


# --- what is printed ------------------------------------------------------------------------------


def table(chosen: Settings, facts: "SetFacts", machine: Machine) -> str:
    """What was chosen, as the flags that would say so: one on each line."""
    flags = [
        (
            f"  {FLAGS[key]} {value_text(value)}"
            if key in FLAGS
            else f"  --set {key}={value_text(value)}"
        )
        for key, value in chosen.items()
        if key != "recipe"
    ]
    processes = f", {machine.num_processes} processes" if machine.num_processes > 1 else ""
    title = (
        f"chosen for {facts.num_samples:,} {'grey ' * facts.is_grey}images of"
        f" {'about ' * (not facts.is_uniform)}{facts.side} pixels in"
        f" {facts.num_classes} classes, on {machine.name}{processes}; give a flag to change one:"
    )
    return "\n".join([title, *flags])


def note(config: TrainConfig) -> str:
    """Which of several splits the run evaluates on, if none was named: maybe nothing.

    Reads the manifest then.
    """
    if config.manifest is None or config.eval_split is not None:
        return ""
    from trainer.data.splits import eval_split_of, load_once

    manifest = load_once(config.manifest).manifest
    chosen = eval_split_of(config, manifest)
    others = [name for name in manifest.splits if name not in (config.train_split, chosen)]
    if not others:
        return ""
    names = ", ".join(map(repr, others))
    return (
        f"note: evaluates on {chosen!r}, not on {names}; --set eval_split={others[-1]} changes that"
    )

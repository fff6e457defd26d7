"""What a run does that its settings don't show: lines to print before it starts."""

from trainer.config import TrainConfig
from trainer.data.loaded import load_once


def notes(config: TrainConfig) -> list[str]:
    """A line for each choice that may be unexpected. Reads the manifest where no split to evaluate on is named."""
    return [f"note: {text}" for text in (*_of_split(config), *_of_weights(config))]


def _of_split(config: TrainConfig) -> list[str]:
    if config.manifest is None or config.fake_data or config.eval_split is not None:
        return []
    from trainer.data.splits import eval_split_of, other_splits

    manifest = load_once(config.manifest).manifest
    if len(others := other_splits(config, manifest)) < 2:
        return []
    chosen = eval_split_of(config, manifest)
    rest = [name for name in others if name != chosen]
    return [f"evaluates on {chosen!r}, not on {', '.join(map(repr, rest))}; --set eval_split={rest[-1]} changes that"]


def _of_weights(config: TrainConfig) -> list[str]:
    if config.model.pretrained is None:
        return []
    from trainer.model import pretrained

    return pretrained.differences(config)

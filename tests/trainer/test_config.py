import pytest
from torch import nn

from shardset.errors import ConfigError
from shardset.settings import assignments, settings_of, value_text, values_of, with_values
from trainer import config as configs
from trainer import recipes
from trainer.config import TrainConfig
from trainer.model import networks


def changed(*texts: str):
    return with_values(recipes.default(), assignments(texts))


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_knows_its_name_and_survives_json(name):
    config = recipes.recipe(name)
    assert config.recipe == name
    assert configs.from_dict(configs.to_dict(config)) == config


def test_an_unknown_recipe_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean 'cifar10_resnet18'"):
        recipes.recipe("cifar10_resnet81")


def test_the_settings_of_imagenet_are_those_of_the_paper():
    plain = recipes.imagenet_resnet50()
    assert plain.optimizer.learning_rate / plain.global_batch_size * 256 == pytest.approx(0.1)
    assert plain.global_batch_size // 32 == 128  # for each of 32 devices
    assert all(
        group["nesterov"]
        for group in networks.optimizer(plain.optimizer, nn.Linear(2, 2)).param_groups
    )


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("epochs=3", "epochs", 3),
        ("optimizer.learning_rate=0.25", "optimizer.learning_rate", 0.25),
        ("image.flip=false", "image.flip", False),
        ("max_steps=7", "max_steps", 7),
        ("eval_split=test", "eval_split", "test"),
        ("regularize.ema_decay=none", "regularize.ema_decay", None),
        ("profile_steps=20:25", "profile_steps", (20, 25)),
        (
            "model.kwargs=drop_rate=0.1,betas=[0.9,0.95],act_layer=gelu,qkv_bias=false,depth=2",
            "model.kwargs",
            {
                "drop_rate": 0.1,
                "betas": [0.9, 0.95],
                "act_layer": "gelu",
                "qkv_bias": False,
                "depth": 2,
            },
        ),
        ("image.mean=0.5:0.4:0.3", "image.mean", (0.5, 0.4, 0.3)),
    ],
)
def test_a_setting_is_read_as_its_fields_type(setting, key, value):
    parsed = values_of(changed(setting))[key]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("learning_rate=1", "did you mean 'optimizer.learning_rate'"),
        ("epochs=many", "epochs is many, expected int >= 1"),
        ("strategy=gpu", "strategy is gpu, expected auto, ddp, replica, single or spmd"),
        ("optimizer=sgd", "no setting 'optimizer'"),
        ("epochs", "KEY=VALUE"),
        ("epochs=0", "epochs is 0, expected int >= 1"),
        ("run_dir=", "run_dir is empty"),
        ("target_accuracy=76", "target_accuracy is 76, expected finite float > 0 and <= 1 or none"),
        ("profile_steps=7", "profile_steps is 7, expected START:STOP, for example 10:15"),
        (
            "stall_timeout_s=10000000000",
            "stall_timeout_s is 10000000000, expected int >= 1 and <= 1000000000",
        ),
        (
            "image.eval_size=300",
            r"image\.eval_resize is 256, expected at least image\.eval_size, 300",
        ),
        (
            "image.eval_resize=128",
            r"expected at least image\.size, 224.* --set image\.eval_resize=224",
        ),
        ("image.flip=sometimes", "image.flip is sometimes, expected true or false"),
        ("image.auto_augment=rand-m12", "magnitude 0 to 10"),
        ("image.auto_augment=random", "augmentation 'random': expected trivial, or rand"),
        ("model.kwargs=depth", "model.kwargs is depth, expected NAME=VALUE, several with commas"),
        ("regularize.bce_threshold=0.2", "bce_threshold is of regularize.loss=bce"),
        ("regularize.ema_decay=-0.1", "ema_decay is -0.1, expected finite float >= 0 and < 1"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate is nan, expected finite float"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        changed(setting)


def test_arguments_of_a_model_are_written_as_they_are_read():
    config = changed("model.kwargs=a=0.1,b=[0.9,0.95],c=gelu,d=true")
    again = changed(f"model.kwargs={value_text(config.model.kwargs)}")
    assert again == config


def test_padding_that_may_leave_nothing_of_an_image_is_refused():
    settings = ["image.size=8", "image.eval_resize=8", "image.pad=8"]
    assert changed(*settings).image.pad == 8  # another crop takes no padding
    with pytest.raises(ConfigError, match=r"image\.pad is 8, expected less than image\.size, 8"):
        changed(*settings, "image.train_crop=pad")


def test_settings_that_belong_together_are_changed_at_once():
    config = changed("cache_dir=/tmp/x", "cache_bytes=7", "image.size=8", "image.pad=1")
    assert (config.cache_dir, config.cache_bytes, config.image.size, config.image.pad) == (
        "/tmp/x",
        7,
        8,
        1,
    )
    with pytest.raises(ConfigError, match="belong together"):
        changed("cache_dir=/tmp/x")


def test_every_setting_has_a_help_line():
    settings = settings_of(TrainConfig)
    assert all(setting.help and setting.help[0].islower() for setting in settings.values())
    assert all(setting.expected for setting in settings.values())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": "3"}, "epochs is .*, expected "),
        ({"fake_data": True, "manifest": "gs://bucket/set"}, "fake_data"),
    ],
)
def test_a_record_refuses_wrong_values_without_a_command_line(values, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**values)

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.format import manifest as manifests
from shardset.program import OK, USAGE
from shardset.settings import values_of, with_values
from shardset.storage.open import open_storage
from shardset.stream.stream import Stream
from tests.makers.shardset import encode, image_sample, new_set, pixels, png_samples
from tests.makers.training import losses, shard_set, tiny_config
from trainer import cli as command
from trainer import config as configs
from trainer import defaults, recipes
from trainer.data.set_facts import SetFacts, survey
from trainer.data.splits import load_once, open_data
from trainer.defaults import choose, resolve
from trainer.flags import ConfigFlags
from trainer.runtime.machine import Machine

GIB = 1 << 30
LAPTOP = Machine(device="cpu", name="CPU", precision="fp32", num_processes=1, host_bytes=16 * GIB)
GPU = replace(LAPTOP, device="cuda", name="GPU", precision="bf16", host_bytes=128 * GIB)
DIGITS = SetFacts(num_samples=1_500, num_classes=10, side=8, is_uniform=True, is_grey=True)
CIFAR = SetFacts(num_samples=50_000, num_classes=10, side=32, is_uniform=True, is_grey=False)
PHOTOS = SetFacts(num_samples=100_000, num_classes=100, side=375, is_uniform=False, is_grey=False)


def of_imagenet(name, weights):
    colours = {"image.mean": (0.5, 0.5, 0.5), "image.std": (0.25, 0.25, 0.25)}
    return {"image.size": 224, "image.eval_resize": 235} | colours


def chosen(facts, machine, given=None):
    given = given or {}
    return with_values(recipes.default(), choose(facts, machine, given, of_imagenet) | given)


facts = st.builds(
    SetFacts,
    num_samples=st.integers(1, 5_000_000),
    num_classes=st.integers(1, 2000),
    side=st.integers(1, 4000),
    is_uniform=st.booleans(),
    is_grey=st.booleans(),
)
machines = st.builds(
    Machine,
    device=st.sampled_from(["cpu", "cuda", "tpu"]),
    name=st.just("machine"),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    num_processes=st.integers(1, 64),
    host_bytes=st.integers(1 << 20, 1 << 40),
)
given_settings = st.fixed_dictionaries(
    {},
    optional={
        "image.size": st.integers(1, 600),
        "global_batch_size": st.integers(1, 5000),
        "optimizer.learning_rate": st.floats(0, 10),
        "model.name": st.sampled_from(["resnet50", "vit_tiny_patch16_224"]),
        "model.pretrained": st.sampled_from(["timm", "weights.safetensors"]),
        "model.freeze": st.booleans(),
    },
)


@given(facts, machines, given_settings)
@settings(max_examples=50)
def test_a_configuration_keeps_what_was_given_and_its_steps_do_not_depend_on_the_machine(
    facts, machine, own
):
    values = values_of(chosen(facts, machine, own))
    assert {key: values[key] for key in own} == own
    assert values["global_batch_size"] % machine.num_processes == 0 or "global_batch_size" in own
    other = chosen(facts, replace(GPU, num_processes=machine.num_processes), own)
    assert (other.epochs, other.global_batch_size) == (
        values["epochs"],
        values["global_batch_size"],
    )


def test_all_hosts_choose_a_batch_that_holds_each_image_as_often_as_asked_and_one_budget():
    hosts = [replace(LAPTOP, host_bytes=num_bytes) for num_bytes in (15_620 << 20, 15_628 << 20)]
    assert len({chosen(PHOTOS, host).budget_bytes for host in hosts}) == 1
    sizes = [
        chosen(
            CIFAR, replace(LAPTOP, num_processes=processes), {"image.augment_repeats": repeats}
        ).global_batch_size
        for processes, repeats in [(1, 3), (2, 3), (4, 3), (4, 2)]
    ]
    assert sizes == [258, 258, 264, 256]


def test_small_equal_images_keep_their_size_and_large_ones_are_cropped():
    digits, cifar, photos = (chosen(facts, LAPTOP) for facts in (DIGITS, CIFAR, PHOTOS))
    # digits mean another thing
    assert [config.image.flip for config in (digits, cifar, photos)] == [False, True, True]
    assert (digits.image.size, digits.image.train_crop, digits.image.eval_resize) == (8, "pad", 8)
    assert (cifar.image.size, cifar.image.train_crop, cifar.image.pad) == (32, "pad", 4)
    assert (photos.image.size, photos.image.train_crop, photos.image.eval_resize) == (
        128,
        "random",
        147,
    )
    assert (chosen(PHOTOS, GPU).image.size, chosen(PHOTOS, GPU).precision) == (224, "bf16")


def test_what_is_given_decides_what_follows_from_it():
    assert chosen(PHOTOS, GPU, {"image.size": 64}).image.eval_resize == 74
    assert chosen(DIGITS, LAPTOP, {"image.size": 32}).image.train_crop == "random"
    small, large = (
        chosen(CIFAR, GPU, {"global_batch_size": size}).optimizer.learning_rate
        for size in (64, 256)
    )
    assert (small, large) == (0.002, 0.003)
    assert chosen(CIFAR, GPU, {"epochs": 3}).schedule.warmup_epochs == pytest.approx(0.3)


def test_pretrained_weights_bring_their_images():
    config = chosen(PHOTOS, LAPTOP, {"model.pretrained": "timm"})
    assert (config.image.size, config.image.eval_resize, config.image.mean) == (
        224,
        235,
        (0.5, 0.5, 0.5),
    )
    assert config.optimizer.head_learning_rate == pytest.approx(10 * config.optimizer.learning_rate)
    smaller = chosen(PHOTOS, LAPTOP, {"model.pretrained": "timm", "image.size": 112})
    assert (smaller.image.size, smaller.image.eval_resize) == (112, 118)


@pytest.mark.parametrize(
    ("num_samples", "given"),
    [
        (225, {}),
        (3_000, {"global_batch_size": 4}),
        (3_000, {"image.augment_repeats": 3}),
        (225, {"model.freeze": True}),
    ],
)
def test_fine_tuning_takes_500_steps_at_the_rate_of_a_batch_of_64(num_samples, given):
    facts = replace(PHOTOS, num_samples=num_samples)
    config = chosen(facts, LAPTOP, {"model.pretrained": "timm", **given})
    steps = -(-num_samples * config.image.augment_repeats // config.global_batch_size)
    assert config.epochs == max(10, math.ceil(500 / steps))
    assert config.optimizer.learning_rate == (0.002 if config.model.freeze else 0.001)


# --- with real sets and folders -------------------------------------------------------------------


def flags(**values: str):
    names = {key.replace("__", "."): value for key, value in values.items()}
    return ConfigFlags(recipe=None, values=names, changes=[])


def test_a_look_at_a_set_finds_size_and_colour(tmp_path):
    small = manifests.load(shard_set(tmp_path / "small", size=12))
    assert survey(small, "train") == SetFacts(
        num_samples=52, num_classes=10, side=12, is_uniform=True, is_grey=False
    )
    grey = encode(pixels(0, 80, 96)[..., 0], "png")
    samples = {
        name: [image_sample(name, serial, grey, "png", 2) for serial in range(4)]
        for name in ("train", "val")
    }
    found = survey(manifests.load(new_set(samples)), "train")
    assert (found.side, found.is_uniform, found.is_grey) == (80, False, True)


def test_a_recipe_stays_as_it_is_but_for_what_another_image_size_scales():
    plain = ConfigFlags(recipe="digits_smoke", values={"manifest": "x"}, changes=[])
    assert resolve(plain) == (replace(recipes.digits_smoke(), manifest="x"), "")
    smaller = ConfigFlags(recipe="default", values={"image.size": "112"}, changes=[])
    assert resolve(smaller)[0].image.eval_resize == 128
    assert resolve(replace(smaller, changes=["image.eval_resize=112"]))[0].image.eval_resize == 112


def test_a_bare_command_trains_and_its_run_folder_is_enough_to_resume_with_what_was_chosen(
    manifest, tmp_path, capsys
):
    # Few steps, on one device: compiling would take longer than the run.
    words = f"""train --manifest {manifest} --strategy single --set log_every_steps=1 --epochs 2
        --global-batch-size 26 --lr 0.01 --run-dir""".split()
    run = str(tmp_path / "run")
    assert command.main([*words, run, "--max-steps", "3"]) == OK
    printed = capsys.readouterr().out
    assert "chosen for 52 images of 8 pixels in 10 classes" in printed
    assert re.search(r"^  --image-size 8$", printed, flags=re.M)
    assert "{" not in printed
    first = configs.recorded(open_storage(run))
    assert (first.recipe, first.model.name) == ("auto", "trainer.model:tiny_resnet")
    assert first.image.size == 8
    assert command.main(["train", "--run-dir", run, "--strategy", "single"]) == OK
    again = configs.recorded(open_storage(run))
    assert "chosen" not in capsys.readouterr().out
    assert again == replace(first, max_steps=None)
    assert len(losses(run)) == 4
    assert command.main([*words, str(tmp_path / "whole")]) == OK
    assert losses(run) == losses(tmp_path / "whole")


def set_of(*splits):
    return new_set({name: png_samples(name, 52, size=8) for name in splits})


def test_a_set_with_val_and_test_trains_without_a_flag_and_says_on_what_it_evaluates(
    tmp_path, capsys
):
    three = set_of("test", "train", "val")
    words = f"train --manifest {three} --strategy single --epochs 1 --max-steps 1 --run-dir"
    assert command.main([*words.split(), str(tmp_path / "run")]) == OK
    printed = capsys.readouterr().out
    note = "note: evaluates on 'val', not on 'test'; --set eval_split=test changes that\n"
    assert printed.index("chosen for 52 images") < printed.index(note)
    assert defaults.note(tiny_config(three, "run", eval_split="test")) == ""
    assert defaults.note(tiny_config(set_of("train", "test"), "run")) == ""


def test_a_run_killed_before_its_first_checkpoint_keeps_its_settings(manifest, tmp_path):
    recorded = configs.from_anywhere(tiny_config(manifest, tmp_path, epochs=7))
    (tmp_path / configs.RECORD).write_text(configs.to_json(recorded))
    for named in ({}, {"manifest": manifest}):
        config, _ = resolve(flags(run_dir=str(tmp_path), **named))
        assert config == replace(recorded, strategy="auto")
    other, about = resolve(flags(run_dir=str(tmp_path), manifest=set_of("train", "val")))
    assert (other.epochs, about[:10]) == (30, "chosen for")


def test_a_run_without_a_recipe_parses_its_manifest_once(manifest, tmp_path):
    config, _ = resolve(flags(manifest=manifest, run_dir=str(tmp_path / "run")))
    data = open_data(config, 0, 1)
    for stream in (data.train, data.evaluation):
        assert isinstance(stream, Stream)
        assert stream.manifest is load_once(manifest).manifest


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train", "--learning-rate", "1"], "did you mean --lr?"),
        (["train", "--imagesize", "8"], "did you mean '--image-size'?"),
        (["train", "--batch-size", "8"], "did you mean '--global-batch-size'?"),
        (["train", "--label-smoothing", "0.1"], "did you mean --set regularize.label_smoothing=?"),
        (
            ["--debug", "report", "run"],
            "--debug; write it after the verb: shardset report --debug ...",
        ),
        (["report", "run", "--batch-size", "3"], "arguments: --batch-size 3; see"),
        (["trian"], "did you mean 'train'"),
        ([], "required"),
    ],
)
def test_a_flag_that_is_nearly_one_is_named(words, hint, capsys):
    with pytest.raises(SystemExit) as exit_code:
        command.main(words)
    assert exit_code.value.code == USAGE
    assert hint in capsys.readouterr().err

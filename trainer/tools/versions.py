"""The check of `doctor` whether torch and its libraries fit together, and which back end for TPUs is there."""

from collections.abc import Mapping

from trainer.tools.checks import TORCH_XLA, CheckResult

OLDEST, NEWEST = (2, 9), (2, 15)
"""Versions of torch that the trainer is tested with."""
TORCHTPU = ((2, 11), (2, 15))
"""Oldest and newest torch that torch_tpu 0.2 is built for."""
STABLE_VISION, STABLE_TORCH = (0, 29), (2, 14)
"""From here on torchvision fits every newer torch. Before, 0.24 belongs to 2.9, 0.25 to 2.10, and so on."""

Installed = Mapping[str, str | None]


def check_versions(installed: Installed, pins: Mapping[str, str], num_chips: int) -> CheckResult:
    """The versions of torch, torchvision and the back end for TPUs match. A mix fails to load, or is slow."""
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in installed.items())
    text += f"; back end for TPUs: {_backend(installed)}"
    if (advice := _mismatch(installed, num_chips)) is not None:
        return CheckResult("versions", "fail", text, f"{advice}; {_reinstall(installed, num_chips)}")
    if num_chips and installed["torch_xla"] and installed["libtpu"] != pins.get("libtpu", installed["libtpu"]):
        advice = f"torch_xla was built for libtpu {pins['libtpu']}; another one can be slow or fail"
        return CheckResult("versions", "warn", text, f"{advice}; {_reinstall(installed, num_chips)}")
    if _release(installed["torch"]) > NEWEST:
        return CheckResult("versions", "warn", text, f"torch is newer than {_text(NEWEST)}, the newest that is tested")
    return CheckResult("versions", "pass", text)


def _backend(installed: Installed) -> str:
    names = [name for name in ("torch_xla", "torch_tpu") if installed[name]]
    return " and ".join(names) or "none, so the strategies are ddp and single"


def _mismatch(installed: Installed, num_chips: int) -> str | None:
    """What does not fit together, as advice; None if everything does."""
    xla, torch_tpu, vision = installed["torch_xla"], installed["torch_tpu"], installed["torchvision"]
    torch = _release(installed["torch"])
    if torch < OLDEST:
        return f"torch {_text(OLDEST)} or newer is needed"
    if xla and torch_tpu:
        return "torch_xla and torch_tpu need different versions of torch: keep one of them in an environment"
    if xla and _release(xla) != torch:
        return f"torch_xla must be of the same version as torch, so torch {TORCH_XLA} is needed"
    if torch_tpu and not TORCHTPU[0] <= torch <= TORCHTPU[1]:
        return f"torch_tpu {torch_tpu} needs torch {_text(TORCHTPU[0])} to {_text(TORCHTPU[1])}"
    if num_chips and not ((xla or torch_tpu) and installed["libtpu"]):
        return "a TPU needs libtpu, and torch_xla or torch_tpu"
    if vision and not _vision_fits(_release(vision), torch):
        return f"torchvision {_text(_vision_of(torch))} belongs to torch {_text(torch)}"
    return None


def _reinstall(installed: Installed, num_chips: int) -> str:
    if installed["torch_tpu"] and not installed["torch_xla"]:
        extra = ",torchtpu"
    else:
        extra = ",tpu" if num_chips else ",xla" if installed["torch_xla"] else ""
    return f"install them together: pip install 'shardset[trainer{extra}]'"


def _vision_fits(vision: tuple[int, ...], torch: tuple[int, ...]) -> bool:
    return vision >= STABLE_VISION if torch >= STABLE_TORCH else vision == _vision_of(torch)


def _vision_of(torch: tuple[int, ...]) -> tuple[int, ...]:
    return min((0, torch[1] + 15), STABLE_VISION)


def _release(version: str | None) -> tuple[int, ...]:
    """(2, 9) of 2.9.1+cpu; () of a library that is not there."""
    return tuple(int(number) for number in version.split(".")[:2]) if version else ()


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

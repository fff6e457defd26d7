"""Pure: what gcloud says about a TPU -> where it stands, and what follows from how a training ended."""

import json
from dataclasses import dataclass
from typing import Any, Literal

Standing = Literal["absent", "coming", "ready", "leaving", "stopped", "gone"]
Verdict = Literal["done", "stopped", "again", "unreachable", "failed"]

SAVED = 3
"""The trainer was asked to stop and has saved (trainer/__main__.py)."""

STOPPED = 4
"""The same, and `tpu stop` asked for it (trainer/tpu/worker.py)."""

UNREACHABLE = 255
"""gcloud could not reach a worker by ssh."""

_COMING = {"CREATING", "ACCEPTED", "PROVISIONING", "WAITING_FOR_RESOURCES"}
_NODE_COMING = {"CREATING", "STARTING", "RESTARTING", "REIMAGING", "REPAIRING", "UNHIDING"}
_LEAVING = {"SUSPENDING", "DELETING", "STOPPING", "HIDING"}
_GONE = {"SUSPENDED", "FAILED", "PREEMPTED", "TERMINATED", "UNKNOWN", "HIDDEN"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudState:
    """What gcloud described: the states of the TPU VM and of its queued request, None for what is not there."""

    node: str | None = None
    request: str | None = None
    accelerator_type: str | None = None
    num_workers: int = 0
    reason: str = ""

    @property
    def text(self) -> str:
        """The states, for a line."""
        parts = [f"TPU VM {self.node}"] if self.node else []
        parts += [f"queued request {self.request}"] if self.request else []
        return ", ".join(parts) + (f" ({self.reason})" if self.reason else "") if parts else "absent"


def seen(node: str | None, request: str | None) -> CloudState:
    """From the JSON of both descriptions; None where there is nothing of that name."""
    vm: dict[str, Any] = json.loads(node) if node else {}
    asked: dict[str, Any] = json.loads(request) if request else {}
    state = asked.get("state", {})
    specs = asked.get("tpu", {}).get("nodeSpec") or [{}]
    wanted = specs[0].get("node", {}).get("acceleratorType", "")
    return CloudState(
        node=vm.get("state", "STATE_UNSPECIFIED") if node else None,
        request=state.get("state", "STATE_UNSPECIFIED") if request else None,
        accelerator_type=(vm.get("acceleratorType") or wanted).rpartition("/")[2] or None,
        num_workers=len(vm.get("networkEndpoints", ())),
        reason=state.get("failedData", {}).get("error", {}).get("message", "") or vm.get("healthDescription", ""),
    )


def standing(found: CloudState) -> Standing:
    """Where a TPU stands.

    `coming` and `leaving` change by themselves; `stopped` can be started; what is `gone` has to be deleted and created
    again.
    """
    if found.node is None and found.request is None:
        return "absent"
    if found.request in _LEAVING or found.node in _LEAVING:
        return "leaving"
    if found.request in _GONE or found.node in _GONE:
        return "gone"
    if found.node == "STOPPED":
        return "stopped"
    if found.node == "READY" and found.request in (None, "ACTIVE"):
        return "ready"
    if found.request in _COMING or found.node in _NODE_COMING:
        return "coming"
    # An active request has its TPU VM; without one, somebody deleted it by hand.
    return "gone" if found.node is None else "coming"


def was_taken_away(found: CloudState) -> bool:
    """Whether it was there, or about to be, and was preempted; a request that was never met was not."""
    return found.request == "SUSPENDED" or found.node in ("PREEMPTED", "TERMINATED")


def verdict(code: int, now: Standing) -> Verdict:
    """What follows from the exit code of a training and from where the TPU stands after it.

    With several workers gcloud returns the first code that is not 0, so the standing says more than the code.
    """
    if code == 0:
        return "done"
    if code == STOPPED:
        return "stopped"
    if now != "ready" or code == SAVED:
        return "again"
    return "unreachable" if code == UNREACHABLE else "failed"

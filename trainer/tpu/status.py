"""Pure functions: from the JSON of gcloud to the status of a TPU, from the exit code of a training to what follows."""

import json
from dataclasses import dataclass
from typing import Any, Literal

TpuStatus = Literal["absent", "pending", "ready", "ending", "stopped", "unusable"]
Outcome = Literal["done", "stopped", "retry", "unreachable", "failed"]

SAVED = 3
"""Exit code of a trainer that was asked to stop and has saved (trainer/cli.py)."""

STOPPED = 4
"""Exit code of a trainer that `tpu stop` asked to stop (trainer/tpu/worker.py)."""

UNREACHABLE = 255
"""Exit code of gcloud if it could not reach a worker by ssh."""

_STATES: dict[TpuStatus, set[str]] = {
    "ending": {"SUSPENDING", "DELETING", "STOPPING", "HIDING"},
    "unusable": {"SUSPENDED", "FAILED", "PREEMPTED", "TERMINATED", "UNKNOWN", "HIDDEN"},
    "stopped": {"STOPPED"},
}
"""By status, the states of a TPU VM or of its request that mean it. The first match counts."""

_WAITING = {"CREATING", "ACCEPTED", "PROVISIONING", "WAITING_FOR_RESOURCES"}
"""States of a request that has no TPU VM yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudState:
    """The states of a TPU VM and of its queued request, in the words of gcloud; None if it does not exist."""

    node: str | None = None
    request: str | None = None
    accelerator_type: str | None = None
    num_workers: int = 0
    reason: str = ""

    @property
    def text(self) -> str:
        """The states in words."""
        parts = [f"TPU VM {self.node}"] if self.node else []
        parts += [f"queued request {self.request}"] if self.request else []
        return ", ".join(parts) + (f" ({self.reason})" if self.reason else "") if parts else "absent"


def parse_state(node: str | None, request: str | None) -> CloudState:
    """The state, from the JSON descriptions of the TPU VM and its request; None if it does not exist."""
    vm: dict[str, Any] = json.loads(node) if node else {}
    queued: dict[str, Any] = json.loads(request) if request else {}
    state = queued.get("state", {})
    specs = queued.get("tpu", {}).get("nodeSpec") or [{}]
    requested_type = specs[0].get("node", {}).get("acceleratorType", "")
    return CloudState(
        node=vm.get("state", "STATE_UNSPECIFIED") if node else None,
        request=state.get("state", "STATE_UNSPECIFIED") if request else None,
        accelerator_type=(vm.get("acceleratorType") or requested_type).rpartition("/")[2] or None,
        num_workers=len(vm.get("networkEndpoints", ())),
        reason=state.get("failedData", {}).get("error", {}).get("message", "") or vm.get("healthDescription", ""),
    )


def status_of(state: CloudState) -> TpuStatus:
    """The status of a TPU.

    `pending` and `ending` pass, `stopped` can be started, `unusable` must be deleted and created again.
    """
    if state.node is None and state.request is None:
        return "absent"
    for status, names in _STATES.items():
        if state.request in names or state.node in names:
            return status
    if state.node == "READY" and state.request in (None, "ACTIVE"):
        return "ready"
    # An active request without a TPU VM: somebody deleted the VM by hand.
    return "unusable" if state.node is None and state.request not in _WAITING else "pending"


def was_preempted(state: CloudState) -> bool:
    """Whether the TPU was preempted, even before it was ready. An expired request was not preempted."""
    return state.request == "SUSPENDED" or state.node in ("PREEMPTED", "TERMINATED")


def outcome_of(code: int, status: TpuStatus) -> Outcome:
    """What follows from the exit code of a training and the status of the TPU after it.

    For several workers gcloud returns the first code that is not 0, so the status says more than the code.
    """
    if code == 0:
        return "done"
    if code == STOPPED:
        return "stopped"
    if status != "ready" or code == SAVED:
        return "retry"
    return "unreachable" if code == UNREACHABLE else "failed"

"""The steps of one TPU VM or slice: create it, set it up, train on it, delete it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardset.errors import ConfigError
from trainer.errors import CloudError
from trainer.tpu import commands
from trainer.tpu.commands import Command, TpuNode, TpuRequest
from trainer.tpu.gcloud import CommandFailed, CommandResult, Runner, require_success
from trainer.tpu.status import (
    SAVED,
    STOPPED,
    UNREACHABLE,
    CloudState,
    Outcome,
    TpuStatus,
    outcome_of,
    parse_state,
    status_of,
    was_preempted,
)

SOURCE = Path(__file__).parents[2]
NUM_STATE_CHECKS = 4
"""How often to check for a preemption after a failed training. gcloud shows it a little later."""


class TpuUnavailable(CloudError):
    """The TPU can no longer become ready."""

    def __init__(self, text: str, state: CloudState) -> None:
        super().__init__(text)
        self.state = state


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingAttempt:
    """The end of one training: its command, the state of the TPU afterwards, and what follows."""

    result: CommandResult
    state: CloudState
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuVm:
    """The steps of the verbs. `pause` waits between two checks of the state; `backend` is what `install` installs."""

    node: TpuNode
    runner: Runner
    pause: Callable[[], None]
    backend: str = "xla"

    def state(self) -> CloudState:
        """The current state."""
        # The request first: once it is active its TPU VM exists, so the pair is never seen as half gone.
        request = self.runner.capture(commands.describe_request(self.node))
        vm = self.runner.capture(commands.describe(self.node))
        return parse_state(_described(vm), _described(request))

    def require_ready(self) -> CloudState:
        """The current state. Raises CloudError unless the TPU is ready."""
        state = self.state()
        if status_of(state) != "ready":
            raise CloudError(f"{self.node.name}: {state.text}; {advice(self.node, status_of(state))}")
        return state

    def wait_until_ready(self) -> None:
        """Returns when the TPU is ready. Raises TpuUnavailable once it can no longer become ready."""
        last_text = ""
        while True:
            state = self.state()
            status = status_of(state)
            if status == "ready":
                self.runner.log(f"{self.node.name} is READY, {state.num_workers or 1} workers")
                return
            if status in ("unusable", "stopped", "absent"):
                raise TpuUnavailable(f"{self.node.name}: {state.text}; {advice(self.node, status)}", state)
            if last_text != state.text:
                last_text = state.text
                self.runner.log(f"waiting for {self.node.name}: {last_text}; Ctrl-C leaves the request in the queue")
            self.pause()

    def wait_while_ending(self) -> CloudState:
        """The state, once a deletion or suspension in progress has ended."""
        while status_of(state := self.state()) == "ending":
            self.pause()
        return state

    def request_creation(self, request: TpuRequest) -> None:
        """Creates the TPU VM, or queues the request for it."""
        require_success(self.runner.follow(commands.create(request)))

    def install(self, wheel: Path | None) -> None:
        """Installs the wheel on all workers; None builds one from this source tree."""
        if wheel is None:
            wheel = SOURCE / "build" / "tpu" / commands.WHEEL
            require_success(self.runner.follow(commands.build_wheel(SOURCE, wheel.parent)))
        require_success(self.runner.follow(commands.copy_wheel(self.node, wheel)))
        require_success(self.runner.follow(commands.install(self.node, wheel.name, self.backend)))

    def delete(self, state: CloudState) -> None:
        """Deletes the queued request with its TPU VM, or a TPU VM that was created without a request."""
        command = commands.delete(self.node) if state.request is None else commands.delete_request(self.node)
        result = self.runner.follow(command)
        if not result.is_absent:
            require_success(result)

    def ensure_ready(self, request: TpuRequest, wheel: Path | None) -> None:
        """Creates the TPU and installs the wheel, unless it is ready already."""
        state = self.wait_while_ending()
        status = status_of(state)
        check_type(state, request)
        if status == "ready":
            return
        if status == "unusable":
            self.delete(state)
        if status in ("unusable", "absent"):
            self.request_creation(request)
        self.wait_until_ready()
        self.install(wheel)

    def train_once(self, command: Command, request: TpuRequest | None, wheel: Path | None) -> TrainingAttempt:
        """Trains until the command ends. With `request`, first creates and sets up the TPU if needed."""
        result = self._failed_preparation(request, wheel)
        if result is None:
            result = self.runner.follow(command)
        state = self._settled_state(result.code)
        return TrainingAttempt(result=result, state=state, outcome=outcome_of(result.code, status_of(state)))

    def _failed_preparation(self, request: TpuRequest | None, wheel: Path | None) -> CommandResult | None:
        """The command that failed because the TPU was preempted during its preparation; None if the TPU is ready."""
        if request is None:
            return None
        try:
            self.ensure_ready(request, wheel)
        except TpuUnavailable as error:
            if not was_preempted(error.state):
                raise
            return CommandResult(command=commands.create(request), code=UNREACHABLE, errors=str(error))
        except CommandFailed as error:
            # Only a preemption during the setup may be tried again; any other failure would repeat.
            if status_of(self.state()) not in ("unusable", "ending"):
                raise
            return error.result
        return None

    def _settled_state(self, code: int) -> CloudState:
        """The state after a command that ended with `code`. After a failure, waits for a preemption to show."""
        state = self.state()
        for _ in range(NUM_STATE_CHECKS if code not in (0, SAVED, STOPPED) else 0):
            if status_of(state) != "ready":
                break
            self.pause()
            state = self.state()
        return state


def check_type(state: CloudState, request: TpuRequest) -> None:
    """Raises ConfigError if the TPU exists and has another type."""
    if state.accelerator_type not in (None, request.accelerator_type):
        raise ConfigError(
            f"{request.node.name} is there as {state.accelerator_type}, expected {request.accelerator_type}; "
            "choose another name, or delete it first"
        )


def advice(node: TpuNode, status: TpuStatus) -> str:
    """What to do about a TPU with this status."""
    start = f"gcloud compute tpus tpu-vm start {node.name} --zone={node.zone}"
    return {
        "absent": "create it with `python -m trainer tpu create`",
        "pending": "`python -m trainer tpu create` waits until it is ready",
        "ending": "wait until it is gone, then create it again",
        "stopped": f"start it with `{start}`, or delete it",
        "unusable": "it can't be used any more: delete it with `python -m trainer tpu delete`, then create it again",
        "ready": "it is ready",
    }[status]


def _described(result: CommandResult) -> str | None:
    return None if result.is_absent else require_success(result).output

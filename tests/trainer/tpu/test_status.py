import json

import pytest

from trainer.tpu.status import (
    SAVED,
    STOPPED,
    UNREACHABLE,
    CloudState,
    outcome_of,
    parse_state,
    status_of,
    was_preempted,
)


@pytest.mark.parametrize(
    ("node", "request_", "expected"),
    [
        (None, None, "absent"),
        ("READY", None, "ready"),
        ("READY", "ACTIVE", "ready"),
        (None, "WAITING_FOR_RESOURCES", "pending"),
        (None, "PROVISIONING", "pending"),
        ("CREATING", "PROVISIONING", "pending"),
        ("REPAIRING", "ACTIVE", "pending"),
        ("READY", "PROVISIONING", "pending"),
        ("STATE_UNSPECIFIED", None, "pending"),
        ("READY", "SUSPENDING", "ending"),
        ("DELETING", None, "ending"),
        ("PREEMPTED", None, "unusable"),
        ("PREEMPTED", "SUSPENDED", "unusable"),
        ("TERMINATED", None, "unusable"),
        (None, "FAILED", "unusable"),
        (None, "ACTIVE", "unusable"),
        ("STOPPED", None, "stopped"),
    ],
)
def test_where_a_tpu_stands(node, request_, expected):
    assert status_of(CloudState(node=node, request=request_)) == expected


@pytest.mark.parametrize(
    ("code", "now", "expected"),
    [
        (0, "ready", "done"),
        (0, "unusable", "done"),
        (STOPPED, "ready", "stopped"),
        (SAVED, "ready", "retry"),
        (SAVED, "unusable", "retry"),
        (1, "unusable", "retry"),
        (1, "absent", "retry"),
        (1, "pending", "retry"),
        (UNREACHABLE, "ending", "retry"),
        (UNREACHABLE, "ready", "unreachable"),
        (1, "ready", "failed"),
        (2, "ready", "failed"),
        (127, "ready", "failed"),
    ],
)
def test_what_follows_from_how_a_training_ended(code, now, expected):
    assert outcome_of(code, now) == expected


def test_descriptions_are_read_as_gcloud_gives_them():
    node = {
        "state": "READY",
        "acceleratorType": "v4-32",
        "networkEndpoints": [{"ipAddress": "10.130.0.2"}] * 4,
        "runtimeVersion": "tpu-ubuntu2204-base",
    }
    spec = [{"node": {"acceleratorType": "projects/p/locations/z/acceleratorTypes/v4-32"}, "nodeId": "t"}]
    request = {"state": {"state": "ACTIVE"}, "tpu": {"nodeSpec": spec}}
    found = parse_state(json.dumps(node), json.dumps(request))
    assert found == CloudState(node="READY", request="ACTIVE", accelerator_type="v4-32", num_workers=4)
    assert parse_state(None, json.dumps(request)).accelerator_type == "v4-32"
    assert parse_state(None, None) == CloudState()


def test_the_reason_of_a_failed_request_is_told():
    state = {"state": "FAILED", "failedData": {"error": {"code": 8, "message": "no capacity until 6h passed"}}}
    assert "no capacity until 6h passed" in parse_state(None, json.dumps({"state": state})).text


def test_a_description_without_a_state_is_not_taken_for_ready():
    assert status_of(parse_state("{}", None)) == "pending"


@pytest.mark.parametrize(
    ("node", "request_", "expected"),
    [
        ("PREEMPTED", None, True),
        (None, "SUSPENDED", True),
        ("TERMINATED", "ACTIVE", True),
        (None, "FAILED", False),
        (None, None, False),
        ("STOPPED", None, False),
    ],
)
def test_a_request_that_was_never_met_was_not_taken_away(node, request_, expected):
    assert was_preempted(CloudState(node=node, request=request_)) is expected

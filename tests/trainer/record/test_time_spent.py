from trainer.record import time_spent
from trainer.record.time_spent import TimeSpent


def test_the_parts_add_up_to_the_whole() -> None:
    now = [100.0]
    spent = TimeSpent(lambda: now[0])
    spent.parts |= {"input_wait_seconds": 5.0, "first_step_seconds": 10.0}
    spent.parts |= {"evaluation_seconds": 3.0, "checkpoint_seconds": 2.0}
    now[0] += 100.0
    seconds = spent.seconds()
    assert sum(seconds.values()) == 100.0
    assert seconds["step_seconds"] == 80.0
    assert time_spent.in_words(seconds) == (
        "steps 80 % (80.0 s), waiting for data 5 % (5.0 s), the first step 10 % (10.0 s), "
        "evaluations 3 % (3.0 s), checkpoints 2 % (2.0 s)"
    )


def test_a_record_without_parts_says_nothing() -> None:
    assert time_spent.in_words(dict.fromkeys(time_spent.PARTS, 0.0)) == ""

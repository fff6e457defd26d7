"""What a run writes down of itself."""

from trainer.telemetry.metrics import EvalRecord, FinalRecord, StepRecord

STEP = StepRecord(
    device="cpu",
    epoch=0,
    step=0,
    global_step=0,
    loss=2.0,
    top1=0.1,
    rate=90.0,
    global_rate=80.0,
    learning_rate=0.1,
)
EVALUATION = EvalRecord(
    split="val", epoch=0, global_step=10, samples=20, loss=1.2, top1=0.55, top5=0.9, seconds=0.5
)
FINAL = FinalRecord(
    split="val",
    accuracy=0.55,
    best_accuracy=0.55,
    best_epoch=0,
    epochs=1,
    global_step=10,
    seconds=130.0,
    seconds_to_target=None,
)

"""A Beam runner that promises what Beam promises and no more, for pipelines in a simulation.

Each bundle of elements is processed at least once, by workers that may die or be slow, sometimes by
two at a time; the results of one attempt are taken. A bundle that fails four times fails the job.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import apache_beam as beam
from apache_beam import pvalue
from apache_beam.internal.cloudpickle import cloudpickle
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pipeline import AppliedPTransform, PipelineVisitor
from apache_beam.runners.runner import PipelineResult, PipelineRunner, PipelineState
from apache_beam.transforms import core, userstate
from apache_beam.transforms.util import Reshuffle
from apache_beam.utils.shared import Shared
from apache_beam.utils.windowed_value import WindowedValue

from shardset.per_process import PerProcess
from tests.simulation.baton import Baton, Process, Task, baton

ATTEMPTS = 4
CHANCE_OF_TWO = 0.1


def new_worker() -> Process:
    """The process of a worker; a simulation puts its own function here."""
    return baton().process("worker")


def new_job() -> Process:
    """The process of a job; a simulation puts its own function here."""
    return baton().process("job")


class SimRunner(PipelineRunner):
    """Runs the job in a separate process, which lives on if its launcher dies."""

    def run_pipeline(self, pipeline: beam.Pipeline, options: object) -> PipelineResult:
        simulation = baton()
        task = simulation.start(lambda: _run(simulation, pipeline), "job", new_job())
        return _Result(task)

    def is_fnapi_compatible(self) -> bool:
        return True  # spares a round trip of the pipeline through its message


@contextmanager
def quick_beam() -> Iterator[None]:
    """A block in which Beam builds pipelines at a tenth of the cost: nothing is expanded that this
    runner knows. What it shares in a process is shared in one of the simulation.
    """
    real, views = PipelineOptions.view_as, {}

    def view_as(options: PipelineOptions, view: type[PipelineOptions]) -> PipelineOptions:
        key = id(options), view
        if key not in views:
            # with the options, so that no others get their id
            views[key] = options, real(options, view)
        return views[key][1]

    with ExitStack() as exits:
        exits.enter_context(patch.object(PipelineOptions, "view_as", view_as))
        exits.enter_context(
            patch.object(Shared, "acquire", lambda shared, make: _shared(shared._key, make))
        )
        exits.enter_context(patch.object(userstate, "get_dofn_specs", lambda step: (set(), set())))
        for known in (Reshuffle, core.GroupByKey, core.CombinePerKey):
            exits.enter_context(
                patch.object(known, "expand", lambda self, values: pvalue.PCollection.from_(values))
            )
        yield


@PerProcess
def _shared(key: str, make: Callable[[], object]) -> object:
    """What the copies of a Shared have in one process."""
    return make()


class _Result(PipelineResult):
    def __init__(self, task: Task) -> None:
        super().__init__(PipelineState.RUNNING)
        self._task = task

    def wait_until_finish(self, duration: object = None) -> str:
        baton().wait(lambda: self._task.is_over)
        if self._task.error:
            raise self._task.error
        return PipelineState.DONE if self._task.is_done else PipelineState.FAILED

    def metrics(self) -> "_Result":
        return self

    def query(self) -> dict[str, list[Any]]:
        return {"counters": []}


Values = dict[Any, list[Any]]
"""The elements of each PCollection."""


def _run(simulation: Baton, pipeline: beam.Pipeline) -> None:
    values: Values = {}
    for node in _steps(pipeline):
        (collection,) = node.outputs.values()
        values[collection] = _output(simulation, node, values)


def _steps(pipeline: beam.Pipeline) -> list[AppliedPTransform]:
    """The steps in order; of composites that this runner knows, the whole."""
    found: list[AppliedPTransform] = []
    known = (beam.Create, Reshuffle, core.CombinePerKey, core.ParDo)

    class Visitor(PipelineVisitor):
        inside: AppliedPTransform | None = None

        def enter_composite_transform(self, node: AppliedPTransform) -> None:
            if self.inside is None and isinstance(node.transform, known):
                found.append(node)
                self.inside = node

        def leave_composite_transform(self, node: AppliedPTransform) -> None:
            if self.inside is node:
                self.inside = None

        def visit_transform(self, node: AppliedPTransform) -> None:
            if self.inside is None:
                found.append(node)

    pipeline.visit(Visitor())
    return found


def _output(simulation: Baton, node: AppliedPTransform, values: Values) -> list[Any]:
    transform = node.transform
    if isinstance(transform, beam.Create):
        return list(transform.values)
    elements = values[node.inputs[0]]
    if isinstance(transform, core.ParDo):
        return _processed(simulation, transform, elements, values)
    elements = _shuffled(simulation, elements)
    if isinstance(transform, core.CombinePerKey):
        return [(key, transform.fn.apply(group)) for key, group in _grouped(elements).items()]
    return elements


def _grouped(elements: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = defaultdict(list)
    for key, value in elements:
        groups[key].append(value)
    return groups


def _shuffled(simulation: Baton, elements: Sequence[Any]) -> list[Any]:
    return simulation.random.sample(elements, len(elements))


# --- bundles --------------------------------------------------------------------------------------


def _processed(
    simulation: Baton, step: core.ParDo, elements: list[Any], values: Values
) -> list[Any]:
    sides = [_side_input(side, values) for side in step.side_inputs]
    args, kwargs = core.util.insert_values_in_args(step.args, step.kwargs, sides)
    pickled = cloudpickle.dumps(step.fn)

    def attempt(bundle: Sequence[Any]) -> list[Any]:
        return list(_results(cloudpickle.loads(pickled), bundle, args, kwargs))

    output: list[Any] = []
    job = simulation.running.process
    bundles = [
        simulation.start(
            lambda bundle=bundle: _at_least_once(simulation, lambda: attempt(bundle)), "bundle", job
        )
        for bundle in _bundles(simulation, elements)
    ]
    for bundle in bundles:
        simulation.wait(lambda bundle=bundle: bundle.is_over)
        if bundle.error:
            raise bundle.error
        output += bundle.result
    return output


def _bundles(simulation: Baton, elements: list[Any]) -> Iterator[list[Any]]:
    start = 0
    while start < len(elements):
        size = simulation.random.randint(1, 3)
        yield elements[start : start + size]
        start += size


def _at_least_once(simulation: Baton, attempt: Callable[[], list[Any]]) -> list[Any]:
    """The results of the first attempt that succeeds."""
    failures = 0
    while True:
        both = 2 if simulation.random.random() < CHANCE_OF_TWO else 1
        tasks = [simulation.start(attempt, "attempt", new_worker()) for _ in range(both)]
        simulation.wait(
            lambda tasks=tasks: (
                all(task.is_over for task in tasks) or any(map(_has_succeeded, tasks))
            )
        )
        for task in filter(_has_succeeded, tasks):
            return task.result
        errors = [task.error for task in tasks if task.error]
        failures += 1
        if errors and failures >= ATTEMPTS:
            raise errors[0]
        simulation.sleep(1.0)


def _has_succeeded(task: Task) -> bool:
    return task.is_done and task.error is None


def _results(
    step: beam.DoFn, bundle: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[Any]:
    step.setup()
    step.start_bundle()
    for element in bundle:
        for result in step.process(element, *args, **kwargs) or ():
            yield result.value if isinstance(result, WindowedValue) else result
    step.finish_bundle()
    step.teardown()


def _side_input(side: pvalue.AsSideInput, values: Values) -> Any:
    elements = values[side.pvalue]
    if isinstance(side, pvalue.AsSingleton):
        (value,) = elements
        return value
    return dict(elements) if isinstance(side, pvalue.AsDict) else list(elements)

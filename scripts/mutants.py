"""Mutants: small changes of the code that the tests of the same folder should notice.

    python -m scripts.mutants shardset/order              100 mutants
    python -m scripts.mutants pipelines/plan 20 --seed 7  20 others

Prints a line for each mutant, the difference of each one that no test noticed, and the share that
was noticed. Works in a copy; nothing here changes. Cosmic Ray has the kinds of changes.
"""

import argparse
import ast
import difflib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parent.parent
MARKS = "not slow and not nightly and not gcs"
COPIED = ("shardset", "pipelines", "trainer", "tests", "benchmarks", "scripts", "examples", "docs")
LEFT_OUT = ("VariableReplacer", "VariableInserter", "RemoveDecorator")
"""Kinds of changes that need settings, or that mostly end in an import error."""


class Mutant(NamedTuple):
    """A module of the copy with one change."""

    path: Path
    line: int
    code: str


class _NoAnnotations(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def meaning(code: str) -> str:
    """What two modules have in common if only their annotations differ."""
    return ast.dump(_NoAnnotations().visit(ast.parse(code)))


def places(code: str) -> dict[int, list[tuple[str, int]]]:
    """The changes that a module allows, by line: the name of the operator and its occurrence."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    tree, found = get_ast(code), dict[int, list[tuple[str, int]]]()
    for name in plugins.operator_names():
        operator = plugins.get_operator(name)
        if name.rpartition("/")[2] in LEFT_OUT:
            continue
        positions = (at for node in ast_nodes(tree) for at in operator().mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            found.setdefault(start[0], []).append((name, occurrence))
    return found


def mutants(folder: Path, rng: random.Random) -> Iterator[Mutant]:
    """One change for each line that allows one, in random order."""
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    codes = {path: path.read_text() for path in sorted(folder.rglob("*.py"))}
    allowed = {path: places(code) for path, code in codes.items()}
    lines = [(path, line) for path, found in allowed.items() for line in sorted(found)]
    rng.shuffle(lines)
    for path, line in lines:
        name, occurrence = rng.choice(allowed[path][line])
        code = mutate_code(codes[path], plugins.get_operator(name)(), occurrence)
        with suppress(SyntaxError):  # some operators take a sign from where a comma follows it
            if code and meaning(code) != meaning(codes[path]):
                yield Mutant(path, line, code)


def noticed(copy: Path, tests: str, timeout_s: float | None) -> str:
    """The test that fails first, `time` if they take too long; empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", MARKS]
    try:
        run = subprocess.run(
            [*command, tests], cwd=copy, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return "time"
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "" if run.returncode == 0 else (failed or ["ERROR"])[0].split(" - ")[0]


def main() -> int:
    """Runs the mutants of one folder. Returns 1 if one lives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("number", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tests, lives = f"tests/{options.folder}", []
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / name, copy / name, ignore=ignored)
        for file in (path for path in REPOSITORY.iterdir() if path.is_file()):
            shutil.copy(file, copy)
        started = time.monotonic()
        if failed := noticed(copy, tests, None):
            sys.exit(f"without a change {failed} fails already")
        timeout_s = 60 + 5 * (time.monotonic() - started)
        found = mutants(copy / options.folder, random.Random(options.seed))
        for number, mutant in zip(range(options.number), found, strict=False):
            before = mutant.path.read_text()
            mutant.path.write_text(mutant.code)
            killer = noticed(copy, tests, timeout_s)
            mutant.path.write_text(before)
            where = f"{mutant.path.relative_to(copy)}:{mutant.line}"
            print(f"{number + 1:3} {where}: {killer or 'LIVES'}", flush=True)
            if not killer:
                lives.append(where)
                changed = difflib.unified_diff(before.split("\n"), mutant.code.split("\n"), n=0)
                print("\n".join(f"    {line}" for line in list(changed)[2:]), flush=True)
    print(f"{options.folder}: {options.number - len(lives)} of {options.number} were noticed")
    return 1 if lives else 0


if __name__ == "__main__":
    sys.exit(main())

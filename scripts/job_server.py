"""A job server of Apache Beam from Maven Central, as one jar for `java -jar`."""

import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
RUNNER_VERSION = "2.62.0"
"""Of Beam's runners in Java, which speak the same protocol as the newer Python."""

_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>local</groupId><artifactId>jars</artifactId><version>1</version>
  <dependencies>{}</dependencies>
</project>
"""
_DEPENDENCY = """
    <dependency>
      <groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>
    </dependency>"""


class FetchError(Exception):
    """A jar can't be fetched; says what to do."""


def fetch(jar: Path, main: str, artifacts: Sequence[str]) -> Path:
    """Downloads GROUP:ARTIFACT:VERSION with all that they need into `jars` next to `jar`, once.

    Returns `jar`, which starts the class `main`.
    """
    if jar.exists():
        return jar
    for tool in ("java", "mvn"):
        if shutil.which(tool) is None:
            raise FetchError(
                f"{tool} is not on the PATH; on Debian: apt-get install openjdk-17-jre-headless"
                " maven"
            )
    folder = jar.parent
    shutil.rmtree(folder / "jars", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    listed = "".join(_DEPENDENCY.format(*artifact.split(":")) for artifact in artifacts)
    (folder / "pom.xml").write_text(_POM.format(listed))
    goal = ["mvn", "-B", "-ntp", "-q", "-f", str(folder / "pom.xml"), _COPY]
    _run([*goal, f"-DoutputDirectory={folder / 'jars'}", "-DincludeScope=runtime"])
    _write_launcher(jar, main, sorted((folder / "jars").glob("*.jar")))
    return jar


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise FetchError(
            f"{command[0]} failed: {(done.stdout + done.stderr).strip()[:2000]}; check the network"
        )


def _write_launcher(path: Path, main: str, jars: Sequence[Path]) -> None:
    """A jar that only names its main class and the jars beside it: what `java -jar` needs.

    Appears whole or not.
    """
    names = " ".join(f"jars/{jar.name}" for jar in jars)
    lines = ["Manifest-Version: 1.0", f"Main-Class: {main}", f"Class-Path: {names}"]
    part = path.with_suffix(".part")
    with zipfile.ZipFile(part, "w") as jar:
        jar.writestr("META-INF/MANIFEST.MF", "".join(map(_manifest_line, lines)))
    part.replace(path)


def _manifest_line(line: str) -> str:
    """A line of a jar's manifest, which may not be longer than 72 bytes: what follows begins with a
    space.
    """
    return "\r\n ".join([line[:70], *(line[i : i + 69] for i in range(70, len(line), 69))]) + "\r\n"

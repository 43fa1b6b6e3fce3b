"""A runner of GitHub workflows for tests: enough of the format to run the shell steps of a job in a folder.

Expressions are those of contexts, comparisons and ``always()``.  An action of this repository is its ``action.yml``;
those of GitHub are a copy of a folder each: checkouts, artifacts and the cache lie beside the workspace.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from reference_pages import account
from ruamel.yaml import YAML
from warm_processes import Programs

ROOT: Final = Path(__file__).resolve().parent.parent
OURS: Final = re.compile(rf"{account()}/pytest-gemm@.*|\./?")
_CONTEXT: Final = re.compile(r"'[^']*'|[A-Za-z_][\w-]*(?:\.[\w-]+)+")
_BLOCK: Final = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def load(text: str) -> dict[str, Any]:
    """YAML 1.2, in which ``on`` is a word."""
    found = YAML(typ="safe", pure=True).load(text)
    assert isinstance(found, dict)
    return found


def examples(page: Path) -> dict[str, str]:
    """The workflows in a page, by name."""
    return {str(load(text)["name"]): text for text in _BLOCK.findall(page.read_text(encoding="utf-8"))}


@dataclasses.dataclass
class Step:
    """A step that ran.

    Attributes:
        name: its name, or what it uses or runs.
        status: exit status.
        output: what it printed.
        outputs: what it left for other steps.
    """

    name: str
    status: int = 0
    output: str = ""
    outputs: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Runner:
    """Runs jobs in ``folder/workspace``.

    Attributes:
        folder: for everything.
        context: the contexts that all jobs have, ``github`` for instance.
        environment: variables of every step.
        checkouts: folders by ``ref``; a checkout copies one, and without a known ``ref`` leaves the workspace alone.
    """

    folder: Path
    context: dict[str, Any]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    checkouts: dict[str, Path] = dataclasses.field(default_factory=dict)
    steps: list[Step] = dataclasses.field(default_factory=list)

    @property
    def workspace(self) -> Path:
        """Where steps run."""
        return self.folder / "workspace"

    def defaults(self, options: str) -> None:
        """Give every run of pytest these options, in place of those that were given so before."""
        self.environment["PYTEST_ADDOPTS"] = f"-p no:hypothesispytest {options}"

    def job(self, text: str, name: str, **contexts: Any) -> list[Step]:
        """Run one job of a workflow, with the first combination of its matrix unless another one is given."""
        workflow = load(text)
        job = workflow["jobs"][name]
        matrix = contexts.pop("matrix", None) or next(combinations(job))
        context = {**self.context, **contexts, "matrix": matrix, "steps": {}, "env": {}}
        for level in (workflow, job):
            context["env"].update({key: self._filled(value, context) for key, value in level.get("env", {}).items()})
        self.steps = []
        if self._true(job.get("if", ""), context, False):
            self._all(job["steps"], context)
        return self.steps

    def named(self, name: str) -> Step:
        """The step of this name that ran last."""
        return [step for step in self.steps if step.name == name][-1]

    def _all(self, steps: list[dict[str, Any]], context: dict[str, Any]) -> bool:
        """Run steps; returns whether one failed."""
        failed = False
        for step in steps:
            if not self._true(step.get("if", ""), context, failed):
                continue
            done = self._step(step, context)
            context["steps"][step.get("id", "")] = {
                "outputs": done.outputs,
                "outcome": "failure" if done.status else "success",
            }
            failed |= done.status != 0 and not step.get("continue-on-error", False)
        return failed

    def _step(self, step: dict[str, Any], context: dict[str, Any]) -> Step:
        given = {key: self._filled(value, context) for key, value in step.get("with", {}).items()}
        variables = {key: self._filled(value, context) for key, value in step.get("env", {}).items()}
        done = Step(step.get("name") or step.get("uses") or step["run"])
        if "run" in step:
            where = self.workspace / self._filled(step.get("working-directory", "."), context)
            self._shell(done, self._filled(step["run"], context), where, {**context["env"], **variables})
        elif OURS.fullmatch(step["uses"]):
            self._ours(done, given, context)
        else:
            getattr(self, "_" + re.sub(r"\W", "_", step["uses"].partition("@")[0].removeprefix("actions/")))(
                done, given
            )
        self.steps.append(done)
        return done

    def _shell(self, done: Step, script: str, where: Path, variables: Mapping[str, str]) -> None:
        channels = {name: self.folder / name for name in ("GITHUB_OUTPUT", "GITHUB_ENV", "GITHUB_STEP_SUMMARY")}
        for name in ("GITHUB_OUTPUT", "GITHUB_ENV"):
            channels[name].write_text("")
        environment = {**os.environ, **self.environment, **variables, **{k: str(v) for k, v in channels.items()}}
        environment |= {"GITHUB_ACTIONS": "true", "CI": "true", "GITHUB_WORKSPACE": str(self.workspace)}
        found = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=where, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        done.status, done.output = found.returncode, found.stdout
        done.outputs = dict(line.split("=", 1) for line in channels["GITHUB_OUTPUT"].read_text().splitlines())

    def _ours(self, done: Step, given: dict[str, str], context: dict[str, Any]) -> None:
        action = load((ROOT / "action.yml").read_text(encoding="utf-8"))
        assert set(given) <= set(action["inputs"]), f"no such input: {set(given) - set(action['inputs'])}"
        inputs = {name: given.get(name, one["default"]) for name, one in action["inputs"].items()}
        inner = {**context, "inputs": inputs, "steps": {}}
        done.status = int(self._all(action["runs"]["steps"], inner))
        done.outputs = {name: self._filled(one["value"], inner) for name, one in action["outputs"].items()}

    # -- GitHub's own actions ------------------------------------------------------------------------------------

    def _checkout(self, done: Step, given: Mapping[str, str]) -> None:
        if source := self.checkouts.get(given.get("ref", "")):
            shutil.copytree(source, self.workspace / given.get("path", "."), dirs_exist_ok=True)

    def _setup_python(self, done: Step, given: Mapping[str, str]) -> None:
        """The test's own Python stands first in PATH."""

    def _upload_artifact(self, done: Step, given: Mapping[str, str]) -> None:
        for line in given["path"].split("\n"):
            source = self.workspace / line.strip()
            if line.strip() and source.exists():
                # One folder is stored as its content, several paths by their names.
                name = source.name if source.is_file() or "\n" in given["path"].strip() else "."
                target = self.folder / "artifacts" / given["name"] / name
                if source.is_dir():
                    shutil.copytree(source, target, dirs_exist_ok=True)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, target)

    def _download_artifact(self, done: Step, given: Mapping[str, str]) -> None:
        source = self.folder / "artifacts" / given.get("name", "")
        shutil.copytree(source, self.workspace / given.get("path", "."), dirs_exist_ok=True)

    def _cache_restore(self, done: Step, given: Mapping[str, str]) -> None:
        kept = sorted((self.folder / "caches").glob(f"{given['restore-keys']}*"), key=os.path.getmtime)
        if kept:
            shutil.copytree(kept[-1], given["path"], dirs_exist_ok=True, symlinks=True)
            done.outputs["cache-matched-key"] = kept[-1].name

    def _cache_save(self, done: Step, given: Mapping[str, str]) -> None:
        shutil.copytree(given["path"], self.folder / "caches" / given["key"], symlinks=True)

    # -- expressions ---------------------------------------------------------------------------------------------

    def _filled(self, text: object, context: Mapping[str, Any]) -> str:
        """A text with the values of its expressions."""
        return re.sub(r"\$\{\{(.*?)\}\}", lambda found: str(self._value(found[1], context)), str(text))

    def _true(self, condition: str, context: Mapping[str, Any], failed: bool) -> bool:
        """Whether a step runs; without a function of the status only where nothing has failed."""
        text = re.sub(r"^\$\{\{(.*)\}\}$", r"\1", condition)
        asks = "always()" in text or "cancelled()" in text
        return (asks or not failed) and (not text or bool(self._value(text, context)))

    def _value(self, expression: str, context: Mapping[str, Any]) -> object:
        def looked_up(found: re.Match[str]) -> str:
            if found[0].startswith("'"):
                return found[0]
            value: Any = context
            for word in found[0].split("."):
                value = value.get(word, "") if isinstance(value, Mapping) else ""
            return repr(value)

        text = _CONTEXT.sub(looked_up, expression).replace("&&", " and ").replace("||", " or ")
        text = re.sub(r"!(?!=)", " not ", text).strip()
        return eval(text, {"always": lambda: True, "cancelled": lambda: False, "__builtins__": {}})


def combinations(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Those of a job's matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    if "include" in matrix:
        yield from matrix["include"]
    else:
        for values in itertools.product(*matrix.values()):
            yield dict(zip(matrix, values, strict=True))


_PIP: Final = """#!{python}
# Installs nothing: packages are there, and folders are imported from where they are.
import pathlib, sys
site = next(pathlib.Path(sys.argv[0]).absolute().parent.parent.glob("lib/python*/site-packages"), None)
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
for word in sys.argv[1:]:
    if site and word.startswith(".") and pathlib.Path(word).is_dir():
        site.joinpath("local.pth").write_text(str(pathlib.Path(word).absolute()))
"""

_PYTHON: Final = """#!/bin/bash
if [[ "$1 $2" == "-m venv" ]]; then
    {python} -m venv --without-pip "$3"
    for folder in "$3"/lib/python*/site-packages; do
        echo "import site; site.addsitedir('{site}')" >"$folder/outer.pth"
    done
    cp {bin}/pip "$3/bin/pip"
    mv "$3/bin/python" "$3/bin/python-real"
    sed "s|'{python}'|'$PWD/$3/bin/python-real'|" {warm} >"$3/bin/python"
    chmod +x "$3/bin/python"
    grep -qF "'$PWD/$3/bin/python-real'" "$3/bin/python"
else
    exec {warm} "$@"
fi
"""


def environment(folder: Path, programs: Programs) -> dict[str, str]:
    """Variables for jobs that install nothing and leave the user's cache alone.

    The first ``python`` in PATH makes environments that have this one's packages; ``pip`` only keeps ``pip.log``.
    Both begin where PyTorch is imported.
    """
    (folder / "bin").mkdir()
    site = next(path for path in sys.path if path.endswith("site-packages"))
    for name, text in (("pip", _PIP), ("python", _PYTHON)):
        script = folder / "bin" / name
        # By the name that `Programs` wrote: a console script's sys.executable may end with python3.
        python = Path(sys.executable).parent / "python"
        known = {"python": python, "warm": programs.python, "log": str(folder / "pip.log")}
        script.write_text(text.format(**known, site=site, bin=script.parent))
        script.chmod(0o755)
    path = os.pathsep.join(
        [str(folder / "bin"), str(programs.folder), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    return {
        "PATH": path,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTEST_ADDOPTS": "-p no:hypothesispytest",
        "PYTEST_XDIST_AUTO_NUM_WORKERS": "1",  # each would import PyTorch
    }

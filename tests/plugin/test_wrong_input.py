"""Wrong input, as data: what is given, the exit status, and what the one message says.

Options that are wrong, that contradict each other or that the run would ignore end with exit status 4 and one
paragraph that names the option and the value.  A mistake in the code of a test module is an error of its collection,
as pytest has it for any other, and ends with 2; a wrong argument of a command ends with 4 too.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from warm_processes import Programs

from pytest_gemm import check
from pytest_gemm.config import effect
from pytest_gemm.core.text import shown
from pytest_gemm.plugin import plugin
from pytest_gemm.tools import cli

for _command in cli.COMMANDS.values():  # pytester forgets what is imported later, and numpy is imported once only
    importlib.import_module(_command["module"])

ROOT = Path(__file__).resolve().parents[2]

CONFTEST = """
    def pytest_gemm_register_backends(registry):
        registry.add_callable("mine", lambda a, b: a @ b)
"""

JUDGED = """
    import pytest

    @pytest.mark.gemm(problems=["mm:f32:nn:8x16x32"], any_problem=True)
    def test_product(gemm_case, gemm_check):
        gemm_check(gemm_case)
"""

TIMED = """
    import pytest

    @pytest.mark.gemm(problems=["mm:f32:nn:8x16x32"], any_problem=True)
    def test_speed(gemm_case, gemm_speed):
        gemm_speed(gemm_case)
"""


@dataclasses.dataclass(frozen=True)
class Wrong:
    """One wrong input.

    Attributes:
        given: the command line after ``pytest``; of a file or a marker, what is wrong in it.
        says: what the message has to contain.
    """

    given: str
    says: tuple[str, ...]


def wrong(*rows: tuple[str, ...]) -> list[object]:
    """Parameters of a test; without a phrase the message repeats the last word of what is given."""
    return [pytest.param(Wrong(row[0], row[1:] or (shlex.split(row[0])[-1],)), id=shown(row[0])) for row in rows]


# -- values of options -------------------------------------------------------------------------------

VALUES = wrong(
    ("--gemm-backends=", "--gemm-backends= is empty", "auto"),
    ("--gemm-backends=mien", "--gemm-backends=mien", "did you mean 'mine'?", "aten", "was called in", "conftest.py"),
    ("--gemm-backends=aten,,mine", "--gemm-backends=aten,,mine", "empty"),
    ("--gemm-backends=aten,aten", "aten is given twice"),
    ("--gemm-backends=auto,aten", "give auto alone"),
    ("--gemm-allow=nothing", "--gemm-allow=nothing", "missing, unjudged, slower, no-baseline"),
    ("--gemm-level=fast", "--gemm-level=fast", "quick, full, exhaustive"),
    ("--gemm-level", "--gemm-level: expected one argument"),
    ("--gemm-candidates=0", "--gemm-candidates=0", "a number from 1"),
    ("--gemm-candidates=" + "9" * 5000, "--gemm-candidates=999", "...", "a number from 1"),
    ("--gemm-candidates=winer", "did you mean 'winner'?"),
    ("--gemm-problem=mm:f32:nq:8x8x8", "unknown layout 'nq'", "nn nt tn tt", "^"),
    ("--gemm-problem=absent.toml", "--gemm-problem: absent.toml: cannot be read"),
    ("--gemm-problem=gemm:f32:nn:8x8x8", "unknown op 'gemm' (did you mean 'mm'?)"),
    ("--gemm-problem=mm:float16:nn:8x8x8", "unknown dtype 'float16' (did you mean 'f16'?)"),
    ("--gemm-ops=matmul", "unknown op 'matmul' (did you mean 'mm'?)"),
    ("--gemm-ops mm --gemm-ops bmm", "--gemm-ops is given twice, mm and bmm"),
    ("--gemm-seed=-1", "--gemm-seed=-1", "whole number"),
    ("--gemm-seed=٣",),
    ("--gemm-seed=" + "9" * 5000, "--gemm-seed=999", "1000000000000000000 at most"),
    ("--gemm-fuzz=soon", "--gemm-fuzz=soon", "in seconds"),
    ("--gemm-fuzz=0",),
    ("--gemm-guard=page", "did you mean 'pages'?"),
    ("--gemm-threads=1,x", "'x' is no number of threads"),
    ("--gemm-threads=100000", "--gemm-threads=100000: give", "at most"),
    ("--gemm-timeout=nan",),
    ("--gemm-timeout=" + "9" * 400, "1000000000 at most"),
    ("--gemm-timeout=1,2,3", "RUN or RUN,COMPILE"),
    ("--gemm-set=cutlass.arch=sm_90a", "90a for instance"),
    ("--gemm-set=cutlass.allow='('", "not a regular expression"),
    ("--gemm-set=cutlass.job=2", "no setting 'cutlass.job' (did you mean 'cutlass.jobs'?)", "cutlass.arch"),
    ("--gemm-set=jobs=2", "--gemm-set=jobs=2: give it as NAME.KEY=VALUE"),
    ("--gemm-set=run.inline=maybe", "--gemm-set=run.inline=maybe: give one of yes, no"),
    ("--gemm-set=run.machine=epyc-9555", "=epyc-9555: unknown machine (did you mean 'epyc-9755'?)", "NVIDIA L4"),
    ("--gemm-known-failures=absent.toml", "--gemm-known-failures: absent.toml: cannot be read"),
    ("--gemm-known-failures=folder", "--gemm-known-failures: folder: is no regular file"),
    ("--gemm-output=/proc/no", "cannot be written"),
    ("--gemm-baselines=empty.toml", "--gemm-baselines=empty.toml: is no folder"),
    ("--gemm-comparator=atan", "--gemm-comparator=atan", "did you mean 'aten'?"),
    ("--gemm-record test_it.py", "put the option last"),
    ("--gemm-levl=full", "--gemm-levl=full", "did you mean '--gemm-level'?"),
    ("--gemm-dtype=f16", "--gemm-dtype=f16: it is part of the problem line", "--gemm-problem=mm:f16:nn"),
    ("--gemm-rtol=1e-3", "--gemm-rtol=1e-3: there are no tolerances", "accumulate='f16'"),
    ("--gemm-output='a\udcffb'", "\\udcff", "cannot be printed"),
)

# -- options that contradict each other, or that the run would ignore ----------------------------------

COMBINATIONS = wrong(
    ("--gemm-problem=mm:f32:nn:8x8x8 --gemm-ops=addmm", "--gemm-ops=addmm: excludes all of --gemm-problem=mm:f32"),
    ("--gemm-fuzz=60 --gemm-problem=mm:f32:nn:8x8x8", "leave out --gemm-problem"),
    ("--gemm-fuzz=60 --gemm-modes=aoti", "--gemm-modes=aoti has no effect: --gemm-fuzz ignores it"),
    ("--gemm-fuzz=60 --gemm-threads=1,2", "--gemm-threads=1,2 has no effect"),
    ("--gemm-fuzz=60 -n 2", "leave out -n"),
    ("--gemm-fuzz=60 --gemm-set=run.machine=l4", "--gemm-set=run.machine=l4 has no effect: --gemm-fuzz ignores it"),
    ("--gemm-isa=avx2 --gemm-set=run.machine=epyc-9554", "--gemm-isa=avx2: run.machine=epyc-9554 has its own"),
    ("--gemm-threads=2 --gemm-set=run.machine=epyc-9554", "--gemm-threads=2: run.machine=epyc-9554 has its own"),
    ("--gemm-compile-only --gemm-device=cpu", "--gemm-compile-only: there is no CUDA device here"),
    ("--gemm-compile-only --gemm-set=cutlass.arch=90a -n 2", "leave out -n"),
    ("--gemm-against=x --gemm-sessions=1", "--gemm-sessions=1", "2 sessions"),
    # No selected backend heeds them.
    ("--gemm-backends=aten --gemm-isa=avx2", "--gemm-isa=avx2 has no effect", "(aten)", "add one of cpp"),
    ("--gemm-backends=mine --gemm-candidates=3", "--gemm-candidates=3 has no effect", "(mine)", "cpp, triton"),
    ("--gemm-backends=triton --gemm-set=cutlass.jobs=2", "--gemm-set=cutlass.jobs=2 has no effect"),
    ("--gemm-guard=pages --gemm-device=cuda", "--gemm-guard=pages has no effect", "computes on the CPU"),
    ("--gemm-backends=mine --gemm-comparator=mine", "--gemm-comparator=mine has no effect"),
    ("--gemm-set=speed.windows=16 --gemm-device=cuda", "--gemm-set=speed.windows=16 has no effect"),
    ("--gemm-backends=aten --gemm-set=run.machine=epyc-9554", "(aten) compiles as on that machine", "add one of cpp"),
    ("--gemm-backends=cpp --gemm-set=run.machine=h100", "(cpp) compiles as on that machine", "add one of triton"),
    # No collected test is timed.
    ("--gemm-backends=mine --gemm-record", "--gemm-record=yes has no effect: none of the 1 collected test(s)"),
    ("--gemm-backends=mine --gemm-set=speed.wait=9", "--gemm-set=speed.wait=9 has no effect: none of the 1 collected"),
    ("--gemm-fuzz=1 --gemm-backends=mine", "--gemm-fuzz: none of these tests fuzzes"),
)

# All collected tests are timed.
TIMED_ONLY = wrong(
    ("--gemm-modes=eager", "--gemm-modes=eager has no effect: all collected cases are timed"),
    ("--gemm-threads=1,2", "--gemm-threads=1,2 has no effect: all collected cases are timed"),
    ("--gemm-backends=mine,cpp --gemm-set=run.machine=epyc-9554", "2 of the 2 collected test(s) are timed"),
)

# Those that know the distributions, and so torch.
DISTRIBUTIONS = wrong(
    ("--gemm-distributions=rnad", "--gemm-distributions=rnad: unknown distribution 'rnad' (did you mean 'rand'?)"),
    (
        "--gemm-distributions=rand-positive --gemm-problem=int_mm:i8-i8-i32:nt:17x16x16",
        "--gemm-distributions=rand-positive: does not apply to --gemm-problem=int_mm:i8-i8-i32:nt:17x16x16",
    ),
)

# -- ini files ------------------------------------------------------------------------------------------

INI = wrong(
    ("gemm_levl = full", "gemm_levl (ini): there is no key gemm_levl (did you mean 'gemm_level'?)"),
    ("gemm-level = full", "gemm-level (ini)"),
    ("gemm_backends = mien", "gemm_backends (ini)=mien", "did you mean 'mine'?"),
    ("gemm_set =\n  cutlass.jobs=x", "gemm_set (ini)=cutlass.jobs=x"),
    ("gemm_level = fu\x07ll", "gemm_level (ini)=fu\\x07ll", "cannot be printed"),
)

# -- the ledger -------------------------------------------------------------------------------------------

ENTRY = '[[known-failure]]\nid = "x"\nreason = "y"\nbackend = "mine"\n'

LEDGERS = wrong(
    ('[[known-failure]]\nid = "x"\nbackend = \n', "ledger.toml", "3"),
    (f"{ENTRY}{ENTRY}", "ledger.toml", "'x'"),
    (f'{ENTRY}distrbution = "rand"\n', "ledger.toml:5", "did you mean 'distribution'?"),
)

# -- the hook that registers backends ------------------------------------------------------------------------

HOOKS = wrong(
    ("registry.add_callable('aten', f)", "two backends are called 'aten'"),
    ("registry.add_callable('auto', f)", "other than 'auto'"),
    ("registry.add_callable('none', f)", "other than 'auto' and 'none'"),
    ("registry.add_callable('x', lambda a: a)", "backend 'x': matmul is <function", "give a function of A and B"),
    ("registry.add_callable('x', 5)", "backend 'x': matmul is 5; give a function"),
    ("registry.add_callable('x', f, dtypes='f32')", "backend 'x': dtypes is 'f32'; give names"),
    ("registry.add_callable('x', f, dtypes=('f33',))", "unknown dtype 'f33' (did you mean 'f32'?)"),
    ("registry.add_callable('x', f, accumulate='f31')", "accumulate is 'f31'; give one of f64, f32, f16"),
    ("registry.add_callable('x', f, imports='numpy')", "imports is 'numpy'; give names, as (\"numpy\",)"),
    ("registry.add_callable('x', f, bind=5)", "bind is 5; give a function of the problem and its tensors"),
    ("registry.add_callable('x', f, bind=f, linear=lambda a, b, c, d: a)", "bind= computes a bias and an activation"),
    ("registry.add_callable('x', f, candidates='64')", "candidates is '64'; give names, or a function of the problem"),
    ("registry.add_callable('x', f, candidates=('64',))", "give a function of A and B, and candidate="),
    ("registry.add_callable('x', f, epilogue='once')", "epilogue is 'once'; give one of fused, eager, either"),
    ("registry.add_callable('x', f, devices='cuda')", "devices is 'cuda'; give names, as (\"cuda\",)"),
    ("registry.add(object())", "a backend needs a name"),
    ("registry.add(Mine)", "Mine is a class: register an object of it, Mine()"),
    ("registry.add(changed(availability=None))", "backend 'named' (Mine) lacks availability()"),
    ("registry.add(changed(devices='cpu'))", "backend 'named': devices is 'cpu'"),
    ("registry.add(changed(devices=('gpu',)))", "backend 'named': devices is ('gpu',)"),
)

HOOK = """
    torch_dtype = type("torch.float32", (), {})()

    def f(a, b):
        return a @ b

    class Mine:
        name = "named"
        def availability(self, device): ...
        def supports(self, problem, request=None): ...
        def prepare(self, problem, operands, request=None): ...

    def changed(**attributes):
        made = Mine()
        vars(made).update(attributes)
        return made

    def pytest_gemm_register_backends(registry):
        """

# -- markers ----------------------------------------------------------------------------------------------

MARKERS = wrong(
    ("problem=['mm:f32:nn:1x1x1']", "no keyword 'problem' (did you mean 'problems'?)"),
    ("['mm:f32:nn:1x1x1']", "the gemm marker takes keywords only"),
    ("problems='mm:f32:nn:1x1x1'", "the gemm marker's problems is 'mm:f32:nn:1x1x1'; it takes a list of lines"),
    ("problems=['mm:f32:nn:1x1']", "shape: 2 sizes"),
    ("shapes='shapes.toml'", "the gemm marker's shapes is 'shapes.toml'; it takes the Path"),
    (
        "problems=['mm:f32:nn:1x1x1'], distributions='rand'",
        "the gemm marker's distributions is 'rand'; it takes a list",
    ),
    ("problems=['mm:f32:nn:1x1x1'], any_problem='no'", "the gemm marker's any_problem is 'no'; it takes True or"),
    ("problems=['mm:f32:nn:1x1x1'], shares='inductor'", "the gemm marker's shares is 'inductor'; it takes functions"),
)

# -- commands -----------------------------------------------------------------------------------------------

COMMANDS = wrong(
    ("baseline", "required", "COMMAND"),
    ("baseline record nowhere", "nowhere", "holds no sessions"),
    ("results folder", "folder", "has no run.jsonl"),
    ("baseline record sessions", "sessions/1.jsonl"),
    ("baseline record nowhere --sessions=0", "--sessions=0: give 1 or more"),
)


# -- the grammar of problem lines ------------------------------------------------------------------------------

LINES = wrong(
    ("--gemm-problem=mm:f32:nn:8x8x8:quant.static", "--gemm-problem: quant: mm takes no static; these do: qlinear"),
    ("--gemm-problem=mm:f32:nn:" + "9" * 5000 + "x8x8", "--gemm-problem: op: a line of 5014 characters"),
)
SET = '[[set]]\nname = "mine"\n'
SHAPES = wrong(  # shapes files
    ("", "shapes.toml"),
    (f'{SET}problems = ["mm:f32:nn:8x8"]\n', "shapes.toml", "2 sizes"),
    (f'{SET}problem = "mm:{{dtype}}:nn:8x8x8"\n', "shapes.toml", "dtype"),
    (f'{SET}problms = ["mm:f32:nn:8x8x8"]\n', "shapes.toml:3: unknown key 'problms' (did you mean 'problems'?)"),
    (f'{SET}problem = "mm:f32:nn:8x8x8"\ndevise = "cpu"\n', "shapes.toml:4", "'devise' (did you mean 'device'?)"),
)
SHARES = wrong(  # the gate
    ("--gemm-undecided=maybe", "a percentage"),
    ("--gemm-set=speed.wait=soon", "--gemm-set=speed.wait=soon: give seconds"),
)
RAISING_HOOKS = wrong(  # a hook that raises
    ("registry.add_callable('x')", "conftest.py:", "missing 1 required positional argument"),
    ("raise KeyError('no board')", "KeyError", "conftest.py:", "no board"),
)


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A backend, a test of it, folders, an empty file, and files of something else."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=JUDGED)
    pytester.mkdir("folder")
    pytester.mkdir("sessions")
    (pytester.path / "empty.toml").touch()
    for name in ("other.json", "sessions/1.jsonl"):
        (pytester.path / name).write_text("[5]\n")
    return pytester


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    # Without the plugin that collects all garbage, five times, at the end of each run.
    return pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", "-p", "no:unraisableexception", "--collect-only", *args
    )


def assert_one_message(text: str, says: Iterable[str]) -> None:
    """One paragraph that says this, of a length that somebody reads, and nothing of our insides."""
    for phrase in says:
        assert phrase in text
    assert "Traceback" not in text
    assert "INTERNALERROR" not in text
    assert not re.search(r"pytest_gemm/\w+\.py|_pytest/", text)
    assert text.count("ERROR: ") <= 1
    assert "\n\n" not in text.strip()
    assert len(text) < 1200


def assert_refused(result: pytest.RunResult, says: Iterable[str]) -> None:
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert_one_message(result.stderr.str(), says)
    for word in ("Traceback", "INTERNALERROR", "passed", "failed"):
        assert word not in result.stdout.str()


@pytest.mark.slow
@pytest.mark.parametrize("case", [*VALUES, *COMBINATIONS, *LINES, *SHARES])
def test_a_wrong_command_line(project: pytest.Pytester, case: Wrong) -> None:
    assert_refused(run(project, *shlex.split(case.given)), case.says)


def test_an_unknown_backend_where_none_is_registered_names_the_folder_and_the_hook(project: pytest.Pytester) -> None:
    (project.path / "conftest.py").unlink()
    folder = f"no conftest.py in {project.path} or above has the hook pytest_gemm_register_backends"
    assert_refused(run(project, "--gemm-backends=mine", "test_it.py"), ["unknown backend 'mine'", folder])


@pytest.mark.parametrize("case", TIMED_ONLY)
def test_an_option_that_no_timed_test_heeds(project: pytest.Pytester, case: Wrong) -> None:
    project.makepyfile(test_it=TIMED)
    assert_refused(run(project, "--gemm-backends=mine", *shlex.split(case.given)), case.says)


@pytest.mark.parametrize("case", INI)
def test_a_wrong_value_in_the_ini_file(project: pytest.Pytester, case: Wrong) -> None:
    project.makeini(f"[pytest]\n{case.given}\n")
    assert_refused(run(project), case.says)


@pytest.mark.parametrize("case", LEDGERS)
def test_a_wrong_ledger(project: pytest.Pytester, case: Wrong) -> None:
    (project.path / "ledger.toml").write_text(case.given)
    assert_refused(run(project, "--gemm-known-failures=ledger.toml"), case.says)


@pytest.mark.slow
@pytest.mark.parametrize("case", SHAPES)
def test_a_wrong_shapes_file(project: pytest.Pytester, case: Wrong) -> None:
    project.makepyfile(test_it=TIMED)
    (project.path / "shapes.toml").write_text(case.given)
    assert_refused(run(project, "--gemm-shapes=shapes.toml"), case.says)


@pytest.mark.parametrize("case", [*HOOKS, *RAISING_HOOKS])
def test_a_wrong_registration(project: pytest.Pytester, case: Wrong) -> None:
    project.makeconftest(f"{HOOK}{case.given}")
    assert_refused(run(project), case.says)


@pytest.mark.slow
@pytest.mark.parametrize("case", MARKERS)
def test_a_wrong_marker_is_an_error_of_the_collection(project: pytest.Pytester, case: Wrong) -> None:
    project.makepyfile(
        test_it=f"import pytest\n@pytest.mark.gemm({case.given})\ndef test_product(gemm_case, gemm_check): pass"
    )
    result = run(project, "--gemm-backends=mine")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    text = result.stdout.str()
    for phrase in case.says:
        assert phrase in text
    assert not re.search(r"Traceback|INTERNALERROR|pytest_gemm/\w+\.py", text)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("case", COMMANDS)
def test_a_wrong_argument_of_a_command(case: Wrong, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(shlex.split(case.given))
    assert end.value.code == pytest.ExitCode.USAGE_ERROR
    assert_one_message(capsys.readouterr().err, case.says)


# -- what is right stays right ------------------------------------------------------------------------------


def test_an_empty_value_in_the_ini_file_stands_for_the_default(project: pytest.Pytester) -> None:
    project.makeini("[pytest]\ngemm_seed =\ngemm_ops = addmm\ngemm_backends = mine\n")
    run(project, "-o", "gemm_ops=").assert_outcomes()
    run(project, "-o", "gemm_ops=").stdout.fnmatch_lines(["*seed 0*", "*1 test collected*"])


def test_an_ini_file_may_have_options_that_this_run_ignores(project: pytest.Pytester) -> None:
    project.makeini(
        "[pytest]\ngemm_sessions = 5\ngemm_candidates = all\ngemm_isa = native\naddopts = --gemm-allow=slower\n"
    )
    assert run(project, "--gemm-backends=mine").ret == 0


def test_the_last_of_two_values_counts_where_they_do_not_add_up(project: pytest.Pytester) -> None:
    result = run(project, "--gemm-seed=1", "--gemm-backends=aten", "--gemm-seed=2", "--gemm-backends=mine")
    result.stdout.fnmatch_lines(["gemm: backends mine; *seed 2*"])


def test_an_option_that_another_plugin_declares_is_not_misspelt(project: pytest.Pytester) -> None:
    project.makeconftest(
        f"{CONFTEST}\n    def pytest_addoption(parser):\n"
        "        parser.addoption('--gemm-board')\n        parser.addini('gemm_board', '')\n"
    )
    project.makeini("[pytest]\ngemm_board = 1\n")
    assert run(project, "--gemm-backends=mine", "--gemm-board=2").ret == 0


@pytest.mark.slow
def test_a_rerun_line_has_no_option_that_would_be_refused(project: pytest.Pytester) -> None:
    registry = project.parseconfigure("--gemm-backends=auto", "--gemm-candidates=3", "--gemm-set=cutlass.allow=a|b")
    settings = plugin.run_of(registry).settings
    settings = dataclasses.replace(settings, loading=())
    assert effect.rerun_options(settings, "mine", timed=False) == ()
    assert effect.rerun_options(settings, "cpp", timed=False) == ("--gemm-candidates=3",)
    assert set(effect.rerun_options(settings, "cutlass")) == {"--gemm-candidates=3", "--gemm-set=cutlass.allow=a|b"}


# -- as a user meets it -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--gemm-problem=", "--gemm-problem= is empty"),
        ("--gemm-backends=mine --gemm-record -n 1", "--gemm-record=yes has no effect"),
    ],
)
def test_a_wrong_command_line_in_a_process(
    project: pytest.Pytester, programs: Programs, options: str, says: str
) -> None:
    command = [programs.python, "-m", "pytest", "-p", "no:cacheprovider", *shlex.split(options)]
    done = subprocess.run(command, cwd=project.path, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 4
    assert_one_message(done.stderr, [says])
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("case", DISTRIBUTIONS)
def test_wrong_distributions(project: pytest.Pytester, case: Wrong) -> None:
    assert_refused(run(project, *shlex.split(case.given)), case.says)


def test_a_torch_that_is_too_old_is_named_wherever_it_is_met(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed, said = (
        metadata.version,
        "torch 2.10.1+cpu is older than 2.11, the oldest release that pytest-gemm supports",
    )
    monkeypatch.setattr(metadata, "version", lambda name: "2.10.1+cpu" if name == "torch" else installed(name))
    pytester.makepyfile(JUDGED)
    result = pytester.runpytest_inprocess()
    assert said in result.stdout.str()
    assert pytester.runpytest_inprocess("--gemm-backends=aten").ret == pytest.ExitCode.USAGE_ERROR
    with pytest.raises(SystemExit, match=str(cli.USAGE_ERROR)):
        cli.main(["judge", "mine.py:matmul"])
    assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match=re.escape(said)):
        check(print)

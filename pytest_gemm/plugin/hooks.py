"""The hooks of a run of GEMM tests; every decision is made in a package below.

``plugin.py`` registers one :class:`GemmRun` where it finds that GEMM tests are run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gemm.config import config as config_module
from pytest_gemm.config import effect
from pytest_gemm.config.config import CONFIG, SPEED_WORKER
from pytest_gemm.core.case_id import CandidateSelection, CaseId, threads_text
from pytest_gemm.core.extras import lacking
from pytest_gemm.core.text import message
from pytest_gemm.failures import text
from pytest_gemm.machine import processor, software
from pytest_gemm.plugin import batches, division, reports, review, selection, startup, xdist
from pytest_gemm.plugin.termination import STATUS, Termination
from pytest_gemm.record.lines import Head, Totals
from pytest_gemm.record.reader import Run
from pytest_gemm.record.writer import OfTest, Writer
from pytest_gemm.report import terminal
from pytest_gemm.run import known, parts, precompile, progress, timeline
from pytest_gemm.storage import cache, files
from pytest_gemm.verdict import Red, uncalled, verdict
from pytest_gemm.worker.keeper import KEEPER

if TYPE_CHECKING:
    from pytest_gemm.judging.case import Case
    from pytest_gemm.judging.judge import Judge
    from pytest_gemm.run.check import GemmCheck
    from pytest_gemm.run.guarded import GuardedJudge
    from pytest_gemm.worker.process import Workers

# Allocations between two collections of young objects; an import of torch makes hundreds of thousands that stay, and a
# compile as many that do not.
_GC_THRESHOLD: Final = 50_000
_JUDGED = pytest.StashKey[OfTest]()
_VERDICTS = pytest.StashKey[list[str]]()


# -- the run ------------------------------------------------------------------------------------------------


class GemmRun:
    """The hooks, and what they share.

    Attributes:
        settings: what the run was asked for.
        totals: of the run so far.
    """

    def __init__(self, config: pytest.Config) -> None:
        """Read the configuration, and prepare what this process needs.

        Raises:
            pytest.UsageError: for wrong input.
        """
        self._config = config
        self._is_worker, self._folder = hasattr(config, "workerinput"), _folder_of(config)
        self._closing = contextlib.ExitStack()
        self._termination: Termination | None = None
        self._harvest: list[precompile.Harvest] | None = None
        self._measured: list[Any] | None = None  # of speed.report.rows.Run; a run without timed tests imports none
        self._trials: Any = None  # a fuzzing.check.Trials, likewise
        self._judging: Workers | None = None
        self._guarded: GuardedJudge | None = None
        self._fuzzed: list[str] = []
        self._pages: list[Path] = []
        self._shown_header = False
        self._taking: dict[str, str] = {}  # a test that takes a problem, by the problem's line
        if not config.pluginmanager.has_plugin(SPEED_WORKER):
            processor.wait_passively()
        self.settings = dataclasses.replace(config_module.read(config), loading=effect.loading(config))
        effect.check_backends(self.settings)
        config.stash[CONFIG] = self.settings
        self.totals = Totals(notes=self.settings.notes, narrowed=selection.is_narrowed(config, self.settings))
        reports_run = not self._is_worker and not config.pluginmanager.has_plugin(SPEED_WORKER)
        head = reports.head(self.settings, config.invocation_params.args) if reports_run else Head()
        self._writer = Writer(Run(head, totals=self.totals))
        division.register(config, self._writer)
        self._review = review.Review(config, self._writer)
        startup.register(config)
        self._batches = batches.Batches(self.settings, self._folder)
        config.pluginmanager.register(self._batches, "gemm-batches")
        if reports_run:
            timeline.register(config)
            cache.tidy()
            if (output := self.settings.output) is not None:
                self._claim(output)
            self._writer.open(self.settings.file("run.jsonl"))
            config.pluginmanager.register(self._review, "gemm-review")
            self._termination = Termination()
            self._closing.callback(self._termination.close)
        self._closing.callback(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])

    def _claim(self, output: Path) -> None:
        """Keep other runs out of a folder, and remove the failures of an earlier one."""
        try:
            self._closing.enter_context(files.claimed(output))
        except files.LockTimeoutError as error:
            raise pytest.UsageError(f"--gemm-output: {error}; name another folder, or wait for its end") from None
        if not self._config.option.collectonly:
            with self._writer.writing(output / "failures"):
                text.remove(output)

    def pytest_unconfigure(self) -> None:
        """End what was started for this run."""
        self._closing.close()

    def _display(self) -> progress.Display:
        return progress.Display.of(self._config)

    # -- collection

    def pytest_sessionstart(self) -> None:
        """Start gathering."""
        settings, config = self.settings, self._config
        if settings.fuzz:
            self.totals.narrowed = True  # a drawn case does not show that an entry of the ledger is stale
        # Before a backend is asked whether it is available, and where PyTorch is imported: one import serves both.
        if self._is_worker and self._runs_tests() and not startup.shared_keeper(config):
            import torch  # noqa: F401  # see above
        if self._runs_tests() and (keeper := startup.keeper(settings, config)) is not None:
            config.stash[KEEPER] = keeper
            self._closing.callback(keeper.close)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Find the backends that are missing: with xdist this process collects nothing, and its workers have begun."""
        if not self._is_worker:
            self.totals.missing = selection.missing(self.settings)

    def _runs_tests(self) -> bool:
        return not self._config.option.collectonly

    def header(self) -> str:
        """What was selected."""
        settings = self.settings
        names = ", ".join(backend.name for backend in settings.backends)
        threads = " and ".join(threads_text(*count) for count in settings.thread_axis or ((settings.threads, 0),))
        head = f"gemm: backends {names}; level {settings.level}, seed {settings.seed}, {threads} thread(s) a process"
        head += f"; compiled as on {settings.machine}" if settings.machine else ""
        return head + (f"; shard {settings.options['shard']}" if settings.shard else "")

    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> str | None:
        """The header, where a GEMM test was collected."""
        return self.header() if any(selection.parameter_of(item) is not None for item in items) else None

    def generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give a marked test its cases."""
        settings = self.settings
        if "gemm_fuzz" in metafunc.fixturenames:
            names = [backend.name for backend in selection.available(settings)] if settings.fuzz else []
            metafunc.parametrize("gemm_fuzz", names, indirect=True)
        if "gemm_case" not in metafunc.fixturenames:
            return
        if settings.fuzz:
            metafunc.parametrize("gemm_case", [], indirect=True)
            return
        try:
            request = selection.read_marker(metafunc.definition.get_closest_marker("gemm"))
            found = selection.select(request, settings)
        except selection.MarkerError as error:
            raise pytest.fail.Exception(f"{metafunc.definition.nodeid}: {error}", pytrace=False) from None
        self._taking |= dict.fromkeys((one.case.problem for one in found), metafunc.definition.nodeid)
        metafunc.parametrize("gemm_case", found, ids=[str(one.case) for one in found], indirect=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Take out the placeholders of marked tests that no problem was selected for."""
        kept = [item for item in items if not selection.is_placeholder(item)]
        if self.settings.fuzz:
            kept = [item for item in kept if "gemm_fuzz" in getattr(item, "fixturenames", ())]
            if items and not kept and selection.available(self.settings):
                raise pytest.UsageError(
                    "--gemm-fuzz: none of these tests fuzzes; name conformance/test_fuzz.py, "
                    "or --pyargs pytest_gemm.conformance where the package is installed"
                )
        if gone := set(items) - set(kept):
            items[:] = kept
            self._config.hook.pytest_deselected(items=list(gone))
        timed = [case for case in map(selection.timed, items) if case is not None]
        if timed and self._config.getoption("benchmark_only", default=False):
            # They ask for the fixture once they have readings, and it looks for tests that have it from the start.
            raise pytest.UsageError("--benchmark-only skips every timed test; leave it out, and name the timed tests")
        if timed and self._folder is not None:
            files.leave(self._folder, "cases", timed)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """A conftest that leaves out cases narrows the run; a shard leaves them to others."""
        self.totals.narrowed |= self.settings.shard is None and any(map(selection.parameter_of, items))

    # -- before the tests

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist: compile what the collected tests need, and time.  With it the controller does, see below."""
        if self._is_worker:
            return
        timed = [case for case in map(selection.timed, session.items) if case is not None]
        self._prepare([item.nodeid for item in session.items], timed)

    def collected_by(self, ids: Sequence[str]) -> None:
        """With xdist: the first worker to have collected names all tests.  The others wait, and so does the first."""
        if not self._shown_header and any(map(selection.case_id, ids)):
            self._shown_header = True
            self._display().line(self.header())
        folder = self._folder
        if self._measured is not None or folder is None:
            self._precompile(ids)
            return
        files.leave(folder, "measured", self._prepare(ids, files.left(folder, "cases")))

    def _prepare(self, ids: Sequence[str], timed: Collection[tuple[CaseId, str]]) -> list[Any]:
        """Compile what the collected tests need, and time; returns what was measured.

        An option that no collected test heeds is refused, unless tests are missing for a reason that the run gives.
        """
        cases = [case for case in map(selection.case_id, ids) if case is not None]
        settings, lines = self.settings, {case.problem for case in cases}
        untaken = effect.untaken(settings, lines, self._taking) if selection.available(settings) else []
        if cases and untaken:
            raise pytest.UsageError(untaken[0])
        if not self.totals.missing:
            effect.check_cases(self.settings, tests=len(ids), cases=len(cases), timed=len(timed))
        if (settings.typed or not ids) and not (cases or settings.fuzz or settings.shard or self.totals.failed):
            self.totals.notes += untaken or [f"no case was selected here; the suite of the package: {effect.SUITE}"]
        if self._config.option.collectonly:
            return []
        self._precompile(ids)
        return self._measure(timed)

    def _measure(self, timed: Collection[tuple[CaseId, str]]) -> list[Any]:
        """Have sessions time the cases before the first test asks for them."""
        measured: list[Any] = []
        self._measured = measured
        settings, totals, config = self.settings, self.totals, self._config
        if not timed or settings.compile_only:
            return measured
        if why := lacking("scipy"):
            raise pytest.UsageError(f"timed tests need the extra speed: {why}")
        from pytest_gemm.speed import controller
        from pytest_gemm.speed.request import Project

        totals.narrowed = True  # a few shapes do not show that an entry of the ledger is stale
        measured += controller.measure(settings, dict(timed), Project.of(config), self._display())
        totals.undecided = any(made.decided_too_little for made in measured)
        for made in measured:
            self._writer.lose(made.lost)
        return measured

    def _precompile(self, ids: Iterable[str]) -> None:
        if self._harvest is not None:
            return
        names = self.settings.registry.names()
        cases = [case for case in map(selection.case_id, ids) if case is not None and case.backend in names]
        display = self._display()
        if self.settings.compile_only:
            for reason in selection.without_part(self.settings):
                display.line(reason.text)
        self._harvest = precompile.run(self.settings, cases, display)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """With ``--gemm-compile-only`` nothing runs."""
        keeper = self._config.stash.get(KEEPER, None)
        if keeper is not None and not self._is_worker and any(map(selection.parameter_of, session.items)):
            keeper.prepare(cuda="cuda" in self.settings.devices.values())
        return True if self.settings.compile_only else None

    # -- xdist

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> object | None:
        """With ``-n`` and a GEMM option given: keep what shares an artifact or a reference on one worker."""
        known = timeline.read(timeline.path_of(self.settings))
        every = CandidateSelection(self.settings.wanted_candidates).is_of_all

        def together() -> dict[str, str]:
            return {} if self._folder is None else dict(files.left(self._folder, "batches"))

        return xdist.scheduler(config, log, known, together, every=every)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, config: pytest.Config, specs: Sequence[Any]) -> None:
        """Several GPUs are shared out among the workers; and files are exchanged with them."""
        self._folder = Path(tempfile.mkdtemp(prefix="pytest-gemm-"))
        self._closing.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self.totals.notes += filter(None, [xdist.pin(config, specs)])
        startup.before_workers(self.settings, config, specs)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of this machine where files are exchanged, and what starts the kernels' processes."""
        if node.gateway.spec.popen and self._folder is not None:
            node.workerinput["gemm_folder"] = str(self._folder)
        if (keeper := self._config.stash.get(KEEPER, None)) is not None:
            node.workerinput["gemm_keeper"] = (keeper.address, os.getpid())

    # -- fixtures

    @contextlib.contextmanager
    def judge(self) -> Iterator[Judge]:
        """One judge a process, so that backends share operands and references."""
        import torch

        from pytest_gemm.judging.judge import Judge

        torch.set_num_threads(self.settings.threads)
        # What is loaded by now stays: torch and a compiler are millions of objects that every collection would visit.
        gc.freeze()
        settings, workers = self.settings, self._workers()
        self._judging = workers
        if settings.guard == "pages" and workers is not None:
            from pytest_gemm.run.guarded import GuardedJudge

            self._guarded = GuardedJudge(settings, workers)
        eager = known.eager_refusal(settings.ledger)
        yield Judge(eager, settings.reference, None, settings.stream, settings.ledger.statements, workers)
        if workers is not None:
            workers.close()

    def _workers(self) -> Workers | None:
        """The processes of the kernels, which do not run yet; ``None`` where kernels run in this process."""
        from pytest_gemm.worker.process import Workers

        keeper = self._config.stash.get(KEEPER, None)
        return None if keeper is None else Workers(keeper, self.settings.limits)

    def case(self, request: pytest.FixtureRequest) -> Case:
        """The case of a test that carries the marker."""
        parameter = getattr(request, "param", None)
        if parameter is None:
            pytest.fail("gemm_case needs the marker: @pytest.mark.gemm(problems=[...])", pytrace=False)
        return selection.case_of(parameter, self.settings)

    @contextlib.contextmanager
    def check(self, node: pytest.Function, judge: Judge) -> Iterator[GemmCheck]:
        """What judges a case and ends its test."""
        from pytest_gemm.run.check import GemmCheck

        check = GemmCheck(
            *(self.settings, judge, node.originalname, selection.target(node), self._judging, self._guarded),
            "gemm_speed" in node.fixturenames,
        )
        node.stash[_JUDGED] = check.judged
        judge.reference = self.settings.judged_by(of_level=selection.is_of_level(node))
        if announced := self._batches.announced(node):
            judge.announced = announced
        yield check

    def speed_check(self, request: pytest.FixtureRequest, check: GemmCheck) -> Callable[[Case], object]:
        """What ends a timed test as the gate judges it."""
        from pytest_gemm.speed.check import SpeedCheck

        if self._folder is not None and self._measured is None:
            self._measured = list(files.left(self._folder, "measured"))

        def benchmark(clock: Callable[[], float]) -> Any:
            """Requested when there are rounds: a benchmark that is not used is an error to pytest-benchmark."""
            request.node.add_marker(pytest.mark.benchmark(timer=clock), append=False)
            return request.getfixturevalue("benchmark")

        shows = self._config.pluginmanager.has_plugin("benchmark")
        made = SpeedCheck(self.settings, check, self._measured or [], benchmark if shows else None)
        request.node.stash[_VERDICTS] = made.verdicts
        return made

    def fuzz_check(self, request: pytest.FixtureRequest) -> Callable[[], None]:
        """What fuzzes one backend for its share of the time."""
        from pytest_gemm.fuzzing.check import FuzzCheck, Trials

        config, settings = self._config, self.settings
        capture: Any = config.pluginmanager.get_plugin("capturemanager")
        uncaptured = capture.global_and_fixture_disabled if capture else contextlib.nullcontext
        if self._trials is None:
            workers = self._workers()
            self._trials = Trials(settings, workers)
            if workers is not None:
                self._closing.callback(workers.close)
        check = FuzzCheck(settings, self._trials, self._display(), uncaptured, config.invocation_params.dir)
        request.node.stash[_JUDGED] = check.judged
        share = settings.fuzz / len(selection.available(settings))

        def fuzz() -> None:
            try:
                check(settings.registry[request.param], share)
            finally:
                self._fuzzed.extend(check.lines)

        return fuzz

    # -- reports

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach what was judged to the report: attributes of plain data travel through xdist."""
        made: Any = yield  # pytest keeps and ships extra attributes
        if call.when == "setup" and (asked := selection.parameter_of(item)) is not None:
            made.gemm_asked = asked.case.backend
        if (judged := item.stash.get(_JUDGED, None)) is not None:
            verdicts: list[str] = item.stash.get(_VERDICTS, [])
            reports.attach(made, item, call.when, judged, verdicts)
        return made  # type: ignore[no-any-return]  # a report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Position of our own for what pytest would call skipped and xfailed."""
        return reports.status_words(report)

    @pytest.hookimpl(tryfirst=True)  # before xdist sends it
    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        """Make the words of a warning printable: a kernel may have said them, and a worker has to send them."""
        said = message(warning_message.message) if isinstance(warning_message.message, Warning) else ""
        if said and said != str(warning_message.message):
            warning_message.message = pytest.PytestWarning(said)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in what a test judged, in the process that writes the summary."""
        if self._is_worker:
            return
        if asked := getattr(report, "gemm_asked", ""):
            self.totals.asked.add(asked)
        data = getattr(report, "gemm", None)
        judged = OfTest() if data is None else OfTest.of(data)
        if data is not None and str(report.outcome) == "rerun":  # pytest-rerunfailures: another attempt follows
            self.totals.reruns += 1
        elif data is not None:
            self._writer.absorb(judged, report.nodeid)
        if report.failed:
            self.totals.failed.add(reports.why_failed(report, judged.outcomes))
            self._review.failed(report, judged)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected is a failure of the run."""
        if report.failed and not self._is_worker:
            self.totals.failed.add(Red.CASE)

    # -- end

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A backend that is missing, or a stale ledger entry, turns a green run red."""
        if self._is_worker:
            return
        totals, settings = self.totals, self.settings
        totals.notes += [*map(precompile.note, self._harvest or []), *_unknown_torch()]
        left = {} if settings.fuzz or settings.compile_only else parts.uncalled(settings, self._writer.run.outcomes)
        totals.uncalled = {name: names for name, names in left.items() if name in totals.asked}
        if totals.narrowed or selection.names_files(self._config):
            totals.notes += [cause.text.partition(": ")[0] for cause in uncalled(self._writer.run)]
            totals.uncalled = {}
        if self._termination is not None and self._termination.received:
            session.exitstatus = STATUS
        self._writer.close(session.exitstatus)
        self._pages = reports.write_speed(settings, self._writer, self._measured or [])
        self._review.write(self._measured or [])
        if self._measured:
            from pytest_gemm.speed.check import hide_tables

            hide_tables(self._config)
        if settings.compile_only and exitstatus == pytest.ExitCode.OK:
            complete = all(one.complete for one in self._harvest or [])
            session.exitstatus = exitstatus = pytest.ExitCode.OK if complete else pytest.ExitCode.TESTS_FAILED
        if session.exitstatus == exitstatus:
            totals.status = int(exitstatus)
            session.exitstatus, _ = verdict(self._writer.run)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The backend x op table and what belongs to it."""
        if self._is_worker:
            return
        if self._measured:
            reports.show_speed(self._measured, self._pages, terminalreporter)
        run, settings = self._writer.run, self.settings
        harvests = (self._harvest or []) if settings.compile_only else []
        lines = [line for harvest in harvests for line in precompile.complaints(harvest)]
        if settings.fuzz:
            lines += self._fuzzed
            lines += [f"{name} cannot run: {reason}" for name, reason in self.totals.missing.items()]
        elif not self._measured or reports.shows_more_than_times(run):
            lines += terminal.summary(run, verbose=self._config.get_verbosity() > 0)
        lines += terminal.incomplete(run)
        if lines:
            terminalreporter.section("GEMM backends")
            for line in lines:
                terminalreporter.write_line(line)


def _folder_of(config: pytest.Config) -> Path | None:
    """Where a worker of xdist and the controller exchange files; ``None`` for a worker of another machine."""
    given = getattr(config, "workerinput", {})
    return Path(given["gemm_folder"]) if "gemm_folder" in given else None


def _unknown_torch() -> tuple[str, ...]:
    """What a run says of a torch that is newer than this version; a known one is not even imported."""
    if not software.unknown_torch():
        return ()
    from pytest_gemm.backends.inductor import torch_compat

    return torch_compat.lacks()

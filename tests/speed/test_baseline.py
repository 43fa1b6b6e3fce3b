"""Baselines: what a file looks like, what replaces a line, and that nothing is lost, whatever happens meanwhile."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from speed_runs import stored

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Reason, Status
from pytest_gemm.speed.baseline import entry as entry_module
from pytest_gemm.speed.baseline import record as record_module
from pytest_gemm.speed.baseline import store as store_module
from pytest_gemm.speed.baseline.entry import Baseline, BaselineError
from pytest_gemm.speed.baseline.store import Store
from pytest_gemm.speed.data import Peaks, Sample, Session, session_text
from pytest_gemm.speed.gate import estimates
from pytest_gemm.speed.gate import policy as policy_module
from pytest_gemm.storage import cache
from pytest_gemm.tools import cli

KEY = "amd-epyc-avx2-4c"
SMALL, MIDDLE, LARGE = (f"mm:f32:nn:{n}x64x64" for n in (16, 32, 64))


def entry(problem: str = SMALL, us: float = 100.0, **facts: Any) -> Baseline:
    """A baseline of four sessions around a time in microseconds, twice as fast as its comparator."""
    subject = (us, 1.02 * us, 0.99 * us, 1.01 * us)
    known = stored(
        CaseId("cpp", problem),
        subject,
        comparator="aten",
        comparator_us=tuple(2.0 * one for one in subject),
        contract="c0ffee",
        software={"torch": "2.13.0"},
        commit="abc123",
        date="2026-01-01T10:00:00+00:00",
    )
    return replace(known, **facts)


def days_later(old: Baseline, us: float, day: int = 2, **facts: Any) -> Baseline:
    return entry(old.case.problem, us, date=f"2026-01-{day:02}T10:00:00+00:00", commit=f"day{day}", **facts)


def figures(reading: estimates.Reading | None) -> tuple[float, float]:
    """Subject and comparator in microseconds."""
    assert reading is not None
    assert reading.comparator is not None
    return 1e6 * reading.subject, 1e6 * reading.comparator


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # which has the last recording
    return Store(tmp_path / "baselines", KEY)


def file_of(store: Store) -> Path:
    return store.path("cpp")


def record(store: Store, *entries: Baseline) -> list[store_module.Change]:
    return store.record(entries, slower=())


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What the command line prints."""
    assert cli.main(["baseline", *map(str, words)]) == 0
    return capsys.readouterr().out


# -- the file ------------------------------------------------------------------------------------------------------


def test_a_line_has_its_figures_first_and_short(store: Store) -> None:
    facts: dict[str, Any] = {
        "selected": ("tile-a",),
        "tflops": 1.234567,
        "minimum_effect": 0.03456,
        "roofline": 0.51239,
    }
    record(store, entry(us=1e6 / 3, **facts))
    assert file_of(store).read_text(encoding="utf-8") == (
        '{"problem": "mm:f32:nn:16x64x64", "comparator": "aten", "median_us": 335000.0, "tflops": 1.235,'
        ' "roofline": 0.512, "detectable": 0.0346, "spread": 0.01, "picked": ["tile-a"],'
        ' "subject_us": [333330.0, 340000.0, 330000.0, 336670.0],'
        ' "comparator_us": [666670.0, 680000.0, 660000.0, 673330.0],'
        ' "contract": "c0ffee", "software": {"torch": "2.13.0"}, "commit": "abc123",'
        ' "date": "2026-01-01T10:00:00+00:00", "epochs": [{"date": "2026-01-01T10:00:00+00:00",'
        ' "commit": "abc123", "contract": "c0ffee", "subject_us": 335000.0, "comparator_us": 670000.0}]}\n'
    )


@pytest.mark.parametrize(
    "one",
    [
        entry(),
        entry(comparator="", comparator_us=(), software={}, commit="", date=""),
        entry(candidate="tile-a|64, ü\u2028", gbs=12.5, selected=("a", "b"), spread=0.0),
    ],
    ids=["usual", "bare", "odd-name"],
)
def test_what_was_recorded_is_loaded(store: Store, one: Baseline) -> None:
    record(store, one)
    assert store.load("cpp") == {one.case: replace(one, epochs=(one.beginning(),))}


def test_a_case_that_was_stored_under_another_spelling_is_found(store: Store) -> None:
    record(store, entry(f"{SMALL}:scale"))
    path = file_of(store)
    path.write_text(path.read_text(encoding="utf-8").replace(":scale", ":scale-0.50"), encoding="utf-8")
    assert [case.problem for case in store.load("cpp")] == [f"{SMALL}:scale"]


def test_files_are_sorted_by_case_and_hold_one_backend_each(store: Store) -> None:
    other = entry(backend="triton")
    recorded = record(store, entry(LARGE), other, entry(SMALL), entry(MIDDLE))
    assert [one.case.problem for one in store.load("cpp").values()] == sorted([SMALL, MIDDLE, LARGE])
    assert store.backends() == ["cpp", "triton"]
    assert set(store.load_all()) == {one.new.case for one in recorded}
    assert [one.kind for one in recorded] == ["new"] * 4


def test_lines_of_other_cases_stay_byte_by_byte(store: Store) -> None:
    record(store, entry(SMALL), entry(LARGE))
    small, large = file_of(store).read_text(encoding="utf-8").splitlines()
    by_hand = small.replace(", ", ",").replace("100.0", "1e2")
    file_of(store).write_text(f"{large}\n\n{by_hand}", encoding="utf-8")  # also: unsorted, a blank line, no end
    record(store, entry(LARGE, 200.0, epochs=()))
    lines = file_of(store).read_text(encoding="utf-8").splitlines()
    assert lines[0] == by_hand
    assert [Baseline.parse(line, "cpp").case.problem for line in lines] == [SMALL, LARGE]


@pytest.mark.parametrize("name", ["../evil", "a/b", "", ".hidden"])
def test_names_stay_within_the_folder(store: Store, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a file"):
        store.path(name)
    with pytest.raises(ValueError, match="cannot name a folder"):
        Store(store.folder, name)


# -- what replaces a line ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "reason"),
    [
        ((), ""),
        ((), "the new tile is smaller"),
        (("cpp-mm:f16:*",), "the new tile is smaller"),
        (("cpp-mm:*",), " \n"),
    ],
    ids=["nothing", "not-named", "another-named", "no-reason"],
)
def test_a_slow_down_that_nobody_accepted_is_refused(store: Store, accept: Sequence[str], reason: str) -> None:
    record(store, entry())
    before = file_of(store).read_bytes()
    slow = days_later(entry(), 130.0)
    recorded = store.record([slow], slower={slow.case}, accept=accept, reason=reason)
    assert file_of(store).read_bytes() == before
    (line,) = (line for line in map(str, recorded) if line.startswith("refused"))
    assert f"to store it: pytest-gemm baseline accept cpp-{SMALL} --reason " in line
    assert "100 us -> 131 us (+30.0%)" in line
    assert [one.kind for one in recorded] == ["refused"]


@pytest.mark.parametrize("accept", [f"cpp-{SMALL}@tile[4]", "cpp-mm:f32:*"])
def test_an_accepted_slow_down_is_stored_with_its_reason(store: Store, accept: str) -> None:
    old = entry(candidate="tile[4]")
    record(store, old)
    slow = replace(old, subject_us=tuple(1.3 * us for us in old.subject_us))
    reason = "größere\n accumulators \udcff"  # the last: a byte of the command line that is no UTF-8
    recorded = store.record([slow], slower={slow.case}, accept=[accept], reason=reason)
    now = store.load("cpp")[slow.case]
    assert (now.subject_us[0], now.reason, now.epoch) == (130.0, "größere accumulators \udcff", 2)
    assert "größere accumulators" in file_of(store).read_text(encoding="utf-8"), "as a reader of the file wants it"
    (line,) = map(str, recorded)
    assert line.startswith(f"accepted cpp-{SMALL}@tile[4]: 100 us -> 131 us (+30.0%), accepted: größere")


def test_a_slow_drift_is_measured_from_the_beginning_of_the_epoch(store: Store) -> None:
    record(store, entry())
    case = entry().case
    assert store.load("cpp")[case].stored().first is None, "it is this very recording"
    for day, us in ((2, 101.0), (3, 102.0)):
        record(store, days_later(entry(), us, day))
    now = store.load("cpp")[case]
    assert figures(now.stored().first) == pytest.approx((100.5, 201.0))
    store.record([days_later(entry(), 130.0, 4)], slower={case}, accept=["*"], reason="wider accumulators")
    assert store.load("cpp")[case].stored().first is None
    record(store, days_later(entry(), 131.0, 5))
    now = store.load("cpp")[case]
    assert figures(now.stored().first) == pytest.approx((130.65, 261.3))
    assert now.epochs[0] == entry().beginning(), "the first of all is kept"
    assert [one.commit for one in now.epochs] == ["abc123", "day4"]


@pytest.mark.parametrize(
    ("facts", "slower", "reason"),
    [
        ({"contract": "beef"}, True, "timed in another way (c0ffee -> beef)"),
        ({"comparator": "frozen"}, False, "comparator changed (aten -> frozen)"),
        ({"comparator": "", "comparator_us": ()}, False, "comparator changed (aten -> none)"),
    ],
    ids=["contract", "comparator", "no-comparator"],
)
def test_figures_that_do_not_compare_begin_an_epoch(
    store: Store, facts: dict[str, Any], slower: bool, reason: str
) -> None:
    record(store, entry())
    new = days_later(entry(), 150.0, **facts)
    recorded = store.record([new], slower={new.case} if slower else ())
    assert list(map(str, recorded)) == [
        f"restarted cpp-{SMALL}: 100 us -> 151 us, not comparable: {reason}; epoch 2 begins"
    ]
    assert store.load("cpp")[new.case].epochs == (entry().beginning(), new.beginning(reason))


def test_a_slow_down_does_not_pass_as_a_change_of_comparator(store: Store) -> None:
    record(store, entry())
    new = days_later(entry(), 150.0, comparator="frozen")
    assert [one.kind for one in store.record([new], slower={new.case})] == ["refused"]


# -- files that are wrong ------------------------------------------------------------------------------------------


def _replaced(old: str, new: str) -> Callable[[str], str]:
    def change(line: str) -> str:
        assert old in line
        return line.replace(old, new, 1)

    return change


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda line: line[:200], "torn or broken at column [0-9]+: .*; restore the line from git"),
        (lambda line: f"<<<<<<< HEAD\n{line}", "a conflict that git left; keep one"),
        (_replaced(LARGE, SMALL), f"cpp-{SMALL} stands on line 1 already .dates 2026-01-01.* keep one"),
        (_replaced('"spread"', '"sprad"'), "unknown field `sprad`.*newer pytest-gemm"),
        (_replaced('"spread"', '"problem": "x", "spread"'), "duplicate key 'problem'"),
        (_replaced("99.0", "0"), r"Expected `float` > 1e-300 - at `\$.subject_us\[2\]`"),
        (_replaced(", 99.0", ""), "subject_us and comparator_us have 3 and 4 sessions"),
        (
            _replaced('"median_us": 100.5', '"median_us": 90.5'),
            "median_us is 90.5, but the median of subject_us is 100.5",
        ),
        (_replaced('"comparator": "aten", ', ""), "comparator and comparator_us need each other"),
    ],
)
def test_a_broken_line_is_named_and_never_written_over(store: Store, spoil: Callable[[str], str], words: str) -> None:
    record(store, entry(SMALL), entry(LARGE))
    record(store, entry(backend="aten"))
    small, large = file_of(store).read_text(encoding="utf-8").splitlines()
    broken = f"{small}\n{spoil(large)}\n"
    file_of(store).write_text(broken, encoding="utf-8")
    healthy = store.path("aten").read_bytes()
    with pytest.raises(BaselineError, match=words) as caught:
        store.load("cpp")
    assert str(caught.value).startswith(f"{file_of(store)}:2: ")
    with pytest.raises(BaselineError):
        record(store, entry(MIDDLE), entry(backend="aten", us=5.0))
    assert file_of(store).read_text(encoding="utf-8") == broken
    assert store.path("aten").read_bytes() == healthy, "a recording is stored as a whole or not at all"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty; restore it"),
        (b"{}\n\xff", "jsonl:2: is not UTF-8"),
        (os.mkdir, "cannot be read: Is a directory"),
        (os.mkfifo, "cannot be read: it is no regular file"),
        (lambda path: os.symlink("/dev/zero", path), "cannot be read: it is no regular file"),
        (lambda path: os.truncate(os.open(path, os.O_WRONLY | os.O_CREAT), 1 << 40), "it has 1048576 MiB, and 256 are"),
    ],
    ids=["empty", "binary", "folder", "pipe", "endless", "huge"],
)
def test_a_file_that_is_none_is_named(store: Store, content: bytes | Callable[[Path], None], words: str) -> None:
    store.place.mkdir(parents=True)
    if isinstance(content, bytes):
        file_of(store).write_bytes(content)
    else:
        content(file_of(store))
    with pytest.raises(BaselineError, match=words):
        record(store, entry())


# -- other processes -----------------------------------------------------------------------------------------------

_CHILD = """
import dataclasses, os, signal, sys, time
from pathlib import Path
from pytest_gemm.speed.baseline import entry as entries, store as stores
store = stores.Store(Path(sys.argv[1]), sys.argv[2])
def entry(problem, us):
    facts = {"spread": 0.0, "contract": "", "software": {}, "commit": "", "date": "", "epochs": ()}
    return entries.Baseline(backend="cpp", problem=problem, subject_us=(float(us),), **facts)
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def start(store: Store, code: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CHILD + code, str(store.folder), store.hardware, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def end(child: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Wait for a process: its exit status and the words that it printed and nobody has read."""
    printed, _ = child.communicate()
    return child.returncode, printed.split()


@pytest.mark.slow
def test_recorders_at_once_lose_nothing(store: Store) -> None:
    # A pause between reading and writing: without the lock every recorder would write what it read before the others.
    code = """
fsync = os.fsync
def slow(handle):
    time.sleep(0.02)
    fsync(handle)
os.fsync = slow
for number in range(5):
    store.record([entry(f"{sys.argv[3]}-{number}", 1)], slower=())
"""
    children = [start(store, code, name) for name in "abc"]
    assert [end(child) for child in children] == 3 * [(0, [])]
    assert {case.problem for case in store.load("cpp")} == {f"{name}-{n}" for name in "abc" for n in range(5)}
    assert [path.name for path in store.place.iterdir()] == ["cpp.jsonl"], "no lock file stays"


@pytest.mark.parametrize("where", ["os.fsync = die", "os.replace = die"], ids=["before-flush", "before-replace"])
def test_a_recorder_that_is_killed_leaves_the_old_file(store: Store, where: str) -> None:
    code = f"""
store.record([entry("x", 1), entry("y", 1)], slower=())
{where}
store.record([entry("x", 2), entry("y", 2)], slower=())
"""
    assert end(start(store, code)) == (-signal.SIGKILL, [])
    assert {one.subject_us for one in store.load("cpp").values()} == {(1.0,)}
    record(store, entry(backend="aten"))  # clears up, of any backend
    assert sorted(path.name for path in store.place.iterdir()) == ["aten.jsonl", "cpp.jsonl"]


def test_a_recorder_waits_for_another_one_and_not_for_ever(store: Store) -> None:
    record(store, entry())
    impatient = dataclasses.replace(store, wait=-1.0)
    with store._lock():
        with pytest.raises(
            BaselineError, match=rf"is being written by another recording \(process {os.getpid()} holds"
        ):
            record(impatient, entry(LARGE))
        assert list(impatient.load("cpp")) == [entry().case], "reading needs no lock"
    record(impatient, entry(LARGE))


def test_a_full_disk_leaves_the_old_file(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    record(store, entry())
    before = file_of(store).read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(BaselineError, match="cannot be written: No space left on device"):
            record(store, entry(LARGE))
    assert [path.read_bytes() for path in store.place.iterdir()] == [before]


# -- sessions ------------------------------------------------------------------------------------------------------


def sample(us: float, problem: str = SMALL, **facts: Any) -> Sample:
    case = CaseId("cpp", problem)
    subject = (us * 1.1e-6, us * 1e-6, us * 0.9e-6)
    known = Sample(case, "cpu", Status.PASSED, None, subject, (us * 2e-6,) * 3, "aten")
    return replace(known, **facts)


def sessions(*samples: Sequence[Sample], **facts: Any) -> list[Session]:
    known = Session(
        KEY,
        {"torch": "2.13.0"},
        "c0ffee",
        date="2026-01-01T10:00:00+00:00",
        commit="abc123",
        peaks=Peaks({"f32": 1e11}, 1e10),
    )
    known = replace(known, **facts)
    return [replace(known, index=i, samples=tuple(one)) for i, one in enumerate(samples)]


def test_a_session_gives_one_figure_however_often_it_timed_the_case() -> None:
    ran = sessions(
        [sample(50.0), sample(10.0, selected=("b",))], [sample(11.0, selected=("a",))], [sample(12.0, selected=("b",))]
    )
    (one,) = record_module.from_sessions(ran, k=3)[0]
    assert one.subject_us == pytest.approx((10.0, 11.0, 12.0))
    assert one.comparator_us == pytest.approx((20.0, 22.0, 24.0))
    assert (one.comparator, one.selected) == ("aten", ("a", "b"))
    assert one.spread == pytest.approx(0.1)
    flops, moved = 2 * 16 * 64 * 64, 4 * (16 * 64 + 64 * 64 + 16 * 64)
    assert one.tflops == pytest.approx(flops / 11e-6 / 1e12)
    assert one.gbs == pytest.approx(moved / 11e-6 / 1e9)
    assert one.roofline == pytest.approx(max(flops / 1e11, moved / 1e10) / 11e-6)
    assert (one.contract, one.commit, one.date) == ("c0ffee", "abc123", "2026-01-01T10:00:00+00:00")


@pytest.mark.parametrize(
    ("odd", "code", "words"),
    [
        ([], "too-few-estimates", "2 of 2 sessions gave an estimate, 3 are needed"),
        ([sample(1.0, disturbed="others ran")], "too-few-estimates", "2 of 3 .*1 of them disturbed: others ran"),
        (
            [sample(1.0, status=Status.INCORRECT, reason=Reason("x", "wrong in row 3"))],
            "too-few-estimates",
            "2 of 3 .*1 of them incorrect: wrong in row 3",
        ),
        ([sample(1.0, comparator_name="frozen")], "mixed-comparators", "differs between sessions: aten / frozen"),
        ([sample(1.0, comparator=(), comparator_name="")], "mixed-comparators", "none / aten"),
    ],
    ids=["absent", "disturbed", "incorrect", "other-comparator", "no-comparator"],
)
def test_a_case_without_enough_figures_is_left_out_with_the_reason(
    odd: Sequence[Sample], code: str, words: str
) -> None:
    ran = sessions(*([sample(1.0), sample(5.0, LARGE)] for _ in range(2)), [*odd, sample(5.0, LARGE)])
    made, left_out = record_module.from_sessions(ran, k=3)
    assert [one.case.problem for one in made] == [LARGE]
    (reason,) = left_out.values()
    assert reason.code == code
    assert re.search(words, reason.text)


GOOD = sessions([sample(1.0)], [sample(1.0)], [sample(1.0)])


@pytest.mark.parametrize(
    ("ran", "code", "words", "forced"),
    [
        (GOOD, None, "", None),
        (GOOD[:2], "too-few-sessions", "2 of 3", None),
        ([], "too-few-sessions", "0 of 3", "too-few-sessions"),
        (sessions(*3 * [[sample(1.0)]], commit="abc+dirty"), "dirty-tree", "abc.dirty", None),
        (
            sessions(*3 * [[sample(1.0, disturbed="throttled: thermal"), sample(1.0, LARGE)]]),
            "disturbed",
            "3 of 6 samples were disturbed, for instance: throttled: thermal",
            None,
        ),
        (
            sessions([sample(1.0, disturbed="load")], *2 * [[sample(1.0), sample(1.0, MIDDLE), sample(1.0, LARGE)]]),
            None,
            "",
            None,
        ),
        ([*GOOD, replace(GOOD[0], hardware="x")], "mixed-sessions", "hardware key: .* / x", "mixed-sessions"),
        ([*GOOD, replace(GOOD[0], contract="x")], "mixed-sessions", "timing contract", "mixed-sessions"),
        ([*GOOD, replace(GOOD[0], commit="x")], "mixed-sessions", "commit: abc123 / x", "mixed-sessions"),
        ([*GOOD, replace(GOOD[0], software={})], "mixed-sessions", "torch 2.13.0", "mixed-sessions"),
    ],
    ids=["good", "few", "none", "dirty", "busy", "nearly-quiet", "hardware", "contract", "commit", "software"],
)
def test_what_makes_no_baseline_is_refused(
    ran: Sequence[Session], code: str | None, words: str, forced: str | None
) -> None:
    found = record_module.recordable(ran, k=3)
    assert (found.code if found else None) == code
    assert found is None or re.search(words, found.text)
    with_force = record_module.recordable(ran, k=3, force=True)
    assert (with_force.code if with_force else None) == forced


def test_the_gate_gets_seconds_and_is_told_of_other_software(store: Store) -> None:
    other = entry(LARGE, contract="beef")
    record(store, entry(software={"torch": "2.12.0", "triton": "3.6"}), other)
    (now,) = sessions([])
    known = store.load("cpp")
    found = record_module.stored(known, now)
    assert list(found) == [entry().case]
    one = found[entry().case]
    assert figures(one.readings[1]) == pytest.approx((102.0, 204.0))
    assert one.note == "recorded with torch 2.12.0 (now 2.13.0), triton 3.6 (now absent)"


@pytest.mark.parametrize(("count", "busy"), [(1, 0), (5, 3), (12, 0)], ids=["1", "5-of-which-3-busy", "12"])
def test_a_recording_that_the_gate_finds_slower_needs_an_accept(store: Store, count: int, busy: int) -> None:
    noise = random.Random(0)
    policy = policy_module.Policy.for_device("cpu")

    def timed(us: float, problem: str, is_busy: bool) -> Sample:
        us *= noise.gauss(1.0, 0.003) * (3.0 if is_busy else 1.0)
        return sample(us, problem, comparator=(1e-4,) * 3, disturbed="others ran" if is_busy else "")

    def ran(slow_down: float, count: int = entry_module.SESSIONS, busy: int = 0) -> list[Session]:
        by_problem = {SMALL: 100.0 * (1.0 + slow_down), MIDDLE: 200.0, LARGE: 300.0}
        return sessions(*([timed(us, name, i < busy) for name, us in by_problem.items()] for i in range(count)))

    made = record_module.from_sessions(ran(0.0), policy=policy)[0]
    assert all(0.0 < (one.minimum_effect or 0.0) < 0.08 for one in made)
    record(store, *made, entry("mm:f32:nn:8x8x8"))  # the last is not measured again
    known = store.load_all()
    assert all(one.stored().first is None for one in known.values()), "rounding does not make an epoch"
    assert not record_module.got_slower(known, ran(0.0, count, busy), policy)
    slow = ran(0.1, count, busy)
    slower = record_module.got_slower(known, slow, policy)
    assert list(slower) == [entry(SMALL).case]
    recorded = store.record(record_module.from_sessions(slow, k=count - busy)[0], slower=slower)
    assert [one.kind for one in recorded] == ["updated", "updated", "refused"]
    assert [recorded[-1].new.case] == list(slower)


@pytest.mark.parametrize("count", [1, 3, 12])
def test_a_thin_baseline_that_got_slower_needs_an_accept_whatever_is_forced(store: Store, count: int) -> None:
    policy = policy_module.Policy.for_device("cpu")

    def ran(us: float, count: int) -> list[Session]:
        return sessions(*([sample(us + 0.1 * number)] for number in range(count)), commit="abc123+dirty")

    thin, slow = ran(100.0, policy.fewest_stored - 1), ran(150.0, count)
    record_module.record_sessions(store, thin, policy, k=len(thin), force=True)
    before = file_of(store).read_text(encoding="utf-8")
    done, refused = record_module.record_sessions(store, slow, policy, force=True)
    assert [one.new.case for one in done if one.kind == "refused"] == list(refused) == [entry().case]
    assert "got slower" in refused[entry().case]
    assert file_of(store).read_text(encoding="utf-8") == before
    done, refused = record_module.record_sessions(store, slow, policy, force=True, accept=["cpp-*"], reason="safer")
    assert ([one.kind for one in done], refused) == (["accepted"], {})
    # What is as fast replaces it without a word.
    done, refused = record_module.record_sessions(store, ran(150.5, 12), policy, force=True)
    assert ([one.kind for one in done], refused) == (["updated"], {})


def test_only_what_force_can_mend_names_it(store: Store) -> None:
    policy = policy_module.Policy.for_device("cpu")
    few, mixed = sessions([sample(1.0)]), [*sessions([sample(1.0)]), *sessions([sample(1.0)], commit="other")]
    for ran, named in ((few, True), (mixed, False)):
        _, refused = record_module.record_sessions(store, ran, policy)
        assert ("--gemm-record=force" in refused[entry().case]) == named


# -- the command line ----------------------------------------------------------------------------------------------


def kept_in(folder: Path, slower: float = 1.0, count: int = 12, hardware: str = KEY) -> None:
    """Sessions of two cases in a folder; the small one takes so many times 10 us."""
    folder.mkdir(exist_ok=True)
    for one in sessions(
        *([sample(slower * (10 + 0.01 * i), comparator=(2e-5,) * 3), sample(20.0, LARGE)] for i in range(count)),
        hardware=hardware,
    ):
        (folder / f"{hardware}-{one.index:03}.jsonl").write_text(session_text(one), encoding="utf-8")


def test_kept_sessions_are_recorded_but_for_those_that_were_cut_short(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "samples"
    kept_in(folder, count=6)
    cut_short = folder / f"{KEY}-005.jsonl"
    cut_short.write_text(cut_short.read_text(encoding="utf-8").partition('{"end"')[0], encoding="utf-8")
    words = ("record", folder, "--baselines", store.folder)
    assert cli.main(["baseline", *map(str, words)]) == 1
    said = capsys.readouterr().out
    assert f"{cut_short.name} did not come to its end and is left out" in said
    assert f"nothing was recorded in {store.place}:" in said
    assert "not recorded: 5 of 12 sessions were measured (measure the others too, or give --force)" in said
    assert "--gemm-" not in said
    assert store.load("cpp") == {}
    assert f"new cpp-{SMALL}: 10.0 us" in run(capsys, *words, "--sessions", 5)
    assert len(store.load("cpp")[CaseId("cpp", SMALL)].subject_us) == 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cpp-*"], "is slower than its baseline, so that it could be accepted; record it with --gemm-record"),
        (["cpp-*", "--baselines=other"], "other: no case 'cpp-*' of "),
        (["cpp-*", "--samples=other"], "other: holds no sessions (*.jsonl); record first, or name the samples folder"),
    ],
    ids=["not-slower", "another-store", "no-samples"],
)
def test_accept_stores_nothing_where_nothing_waits(
    words: list[str],
    says: str,
    store: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept_in(tmp_path / "now")
    run(capsys, "record", tmp_path / "now", "--baselines", store.folder)
    before = file_of(store).read_bytes()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="4"):
        cli.main(["baseline", "accept", *words, "--reason=smaller tiles"])
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "other").exists()
    assert file_of(store).read_bytes() == before


def test_the_printed_command_accepts_the_slower_case_and_no_other(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judgement is that of the recording, whatever a pattern leaves of its cases."""
    for name, slower in (("then", 1.0), ("now", 1.5)):
        kept_in(tmp_path / name, slower, count=5)
        words = ("record", tmp_path / name, "--baselines", store.folder, "--sessions=5", "--force")
        cli.main(["baseline", *map(str, words)])
    (printed,) = re.findall(r"to store it: pytest-gemm (baseline .*'why it may be slower')", capsys.readouterr().out)
    large = store.load("cpp")[CaseId("cpp", LARGE)]
    with pytest.raises(SystemExit, match="4"):
        cli.main(["baseline", "accept", "cpp-*f16*", "--reason=smaller tiles"])
    assert f"it could be accepted; accept one of: cpp-{SMALL}" in " ".join(capsys.readouterr().err.split())
    # In whatever folder it is printed; with the recording's store, sessions and force.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(shlex.split(printed)) == 0
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines()[1:]] == ["accepted cpp-mm"]
    known = store.load("cpp")
    assert (known[CaseId("cpp", SMALL)].reason, known[CaseId("cpp", LARGE)]) == ("why it may be slower", large)
    assert not list(Path().iterdir())


def test_kept_sessions_of_a_cpu_and_a_gpu_are_recorded_each_in_its_own_store(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["amd-epyc-avx2-4c", "nvidia-h200-sm90-700w"]
    for hardware in keys:
        kept_in(tmp_path / "samples", count=5, hardware=hardware)
    said = run(capsys, "record", tmp_path / "samples", "--baselines", store.folder, "--sessions", 5)
    assert said.count(f"new cpp-{SMALL}: 10.0 us") == 2
    assert store_module.hardware_keys(store.folder) == keys


# -- what kills, damages and fills ---------------------------------------------------------------------------------

_WRITES = {f"os.{name}" for name in ("rename", "remove", "rmdir", "mkdir", "symlink", "truncate", "chmod")}


def in_fork(prepared: Callable[[], object], *words: object) -> tuple[int, str]:
    """Exit status of the command in a process that is changed first, negative for a signal; and what it says."""
    said, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        for number in (1, 2):
            os.dup2(end, number)
        status = 70  # a traceback
        try:
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
            prepared()
            status = cli.main(["baseline", *map(str, words)])
        except SystemExit as error:
            status = int(error.code or 0)
        finally:
            os._exit(status)
    os.close(end)
    with os.fdopen(said, encoding="utf-8") as file:
        text = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def killing(moment: int) -> Callable[[], None]:
    """What has the process killed right before its so-manyth change of the file system or of a lock."""

    def prepared() -> None:
        left = iter(range(1, moment))

        def look(event: str, given: tuple[Any, ...]) -> None:
            flags = given[2] if event == "open" else 0
            opens = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if (opens or event in _WRITES or event == "fcntl.flock") and next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)

    return prepared


def recorded(store: Store, tmp_path: Path) -> tuple[Path, Path, dict[CaseId, Baseline]]:
    """Samples of then, which are stored, and of now, of which one case is slower; and the baselines."""
    for name, slower in (("then", 1.0), ("now", 1.5)):
        kept_in(tmp_path / name, slower, count=5)
    cli.main(["baseline", "record", str(tmp_path / "then"), f"--baselines={store.folder}", "--sessions=5"])
    return tmp_path / "then", tmp_path / "now", store.load("cpp")


def last_samples() -> Path:
    known = cache.last_recording()
    assert known is not None
    return known.samples


@pytest.mark.parametrize("moment", range(1, 11))
@pytest.mark.parametrize(("task", "before"), [("record", 0), ("record", 3), ("accept", 0)])
def test_whatever_moment_a_command_is_killed_at_nothing_is_lost(
    store: Store, tmp_path: Path, task: str, before: int, moment: int
) -> None:
    then, now, old = recorded(store, tmp_path)
    words: tuple[object, ...] = ("record", now, f"--baselines={store.folder}", "--sessions=5")
    if task == "accept":
        cli.main(["baseline", *map(str, words)])
        old, words = store.load("cpp"), ("accept", "cpp-*", "--reason=tiles")
    sessions_then = {path: path.read_bytes() for path in (*then.iterdir(), *now.iterdir())}
    assert in_fork(killing(before + moment), *words) == (-signal.SIGKILL, "")
    assert last_samples() in {then, now}
    found = store.load("cpp")
    assert found.keys() == old.keys()
    is_stored = task == "accept" and found != old
    assert {path: path.read_bytes() for path in sessions_then} == sessions_then
    status, said = in_fork(lambda: None, *words)
    assert status == (4 if is_stored else task == "record"), said
    assert last_samples() == now
    assert [path.name for path in store.place.iterdir()] == ["cpp.jsonl"]
    assert store.load("cpp")[CaseId("cpp", SMALL)].reason == ("tiles" if task == "accept" else "")


def limited(most: int) -> Callable[[], None]:
    """What lets the process write files of so many bytes, as a disk that fills up."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.mark.parametrize(
    ("most", "why"), [(0, "cannot be locked: File too large"), (600, "cannot be written: File too")]
)
@pytest.mark.parametrize("task", ["record", "accept"])
def test_where_no_file_can_be_written_one_line_says_so(
    store: Store, tmp_path: Path, task: str, most: int, why: str
) -> None:
    _, now, old = recorded(store, tmp_path)
    words: tuple[object, ...] = ("record", now, f"--baselines={store.folder}", "--sessions=5")
    if task == "accept":
        cli.main(["baseline", *map(str, words)])
        old, words = store.load("cpp"), ("accept", "cpp-*", "--reason=tiles")
    status, said = in_fork(limited(most), *words)
    assert (status, said.count("error: ")) == (4, 1), said
    assert why in said
    assert store.load("cpp") == old
    assert [path.name for path in store.place.iterdir()] == ["cpp.jsonl"]


def test_a_store_that_is_read_only_stays_as_it_is(store: Store, tmp_path: Path) -> None:
    _, now, old = recorded(store, tmp_path)

    def another_user() -> None:
        """Who may read all, and write to temporary files alone."""
        os.umask(0)
        tempfile.tempdir = str(tmp_path / "tmp")
        os.mkdir(tempfile.tempdir, 0o777)
        for path in (*store.place.rglob("*"), store.place):
            path.chmod(0o555)
        if os.getuid() == 0:
            # A worker of xdist has one folder more.
            for path in (tmp_path, *(p for p in tmp_path.parents if p.name.startswith(("pytest-", "popen-")))):
                path.chmod(0o755)
            os.setuid(65534)

    status, said = in_fork(another_user, "record", now, f"--baselines={store.folder}", "--sessions=5")
    assert (status, said.count("error: ")) == (4, 1), said
    assert f"{file_of(store)}: cannot be written: Permission denied; what stood there stays" in said
    assert store.load("cpp") == old


@pytest.mark.parametrize(
    ("damaged", "how", "says"),
    [
        ("last-recording.json", lambda _: "[]", "is damaged: Expected `object`, got `array`; record again"),
        ("last-recording.json", lambda text: text[:-9], "is damaged: Input data was truncated"),
        ("last-recording.json", lambda text: text.replace('"sessions":5', '"sessions":0'), "Expected `int` >= 1"),
        ("session", lambda text: text[:40] + "\n", "session:1: not a line of a session: JSON is malformed"),
        ("session", lambda text: text.replace('"device":"cpu"', '"device":"x"'), "session:2: not a line of a session"),
        ("session", lambda text: text.replace('"contract"', '"shape"'), "session:1: not a line of a session"),
        ("session", lambda _: "", "session: the line about the session is missing"),
        ("cpp.jsonl", lambda text: text.replace("[10.", "[5e-324, 10.", 1), "cpp.jsonl:1: Expected `float` > 1e-300"),
    ],
)
def test_what_is_damaged_is_named_and_nothing_is_stored(
    store: Store, tmp_path: Path, damaged: str, how: Callable[[str], str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    then, now, _ = recorded(store, tmp_path)
    place = cache.home() / damaged if damaged.startswith("last") else file_of(store)
    if damaged == "session":
        place = sorted(then.iterdir())[0].rename(then / "session.jsonl")
        says = says.replace("session", "session.jsonl", 1)
    changed = how(place.read_text(encoding="utf-8"))
    assert changed != place.read_text(encoding="utf-8")
    place.write_text(changed, encoding="utf-8")
    before = file_of(store).read_bytes()
    words = ["record", *([str(now)] if damaged.startswith("cpp") else [])]
    with pytest.raises(SystemExit, match="4"):
        cli.main(["baseline", *words, f"--baselines={store.folder}"])
    assert says in " ".join(capsys.readouterr().err.split())
    assert file_of(store).read_bytes() == before

"""The ledger: what an entry matches, what a bad file is told, and when an entry is stale."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.ledger import reader
from pytest_gemm.ledger.entry import Comparison, Comparisons, Entry, Environment, Globs, LedgerError
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record.lines import Head, Terms, Totals, Use, merge_use
from pytest_gemm.record.reader import Run
from pytest_gemm.verdict import causes

XEON = Environment("2.13.0+cpu", ("avx2", "avx512f", "avx512_vnni", "amx_tile"), architecture="x86_64")
EPYC = Environment("2.13.0+cpu", ("avx2", "avx512f", "avx512_vnni"), architecture="x86_64")
GRAVITON = Environment("2.13.0+cpu", ("asimd", "sve"), architecture="aarch64")
LINE = "linear:bf16:nt:8x256x2664:bias+gelu:a.padded"
SHIPPED = Path(__file__).parents[2] / "conformance" / "known_failures.toml"


HEAD = '[[known-failure]]\nid = "first"\nreason = "r"\nbackend = "cpp"\n'
OTHER = HEAD.replace("first", "second")


def load(path: Path, text: str) -> Ledger:
    file = path / "ledger.toml"
    file.write_text(text, encoding="utf-8")
    return Ledger.load(file)


def only(path: Path, body: str) -> Entry:
    """The entry whose keys, beyond the required ones, are ``body``."""
    text = f'[[known-failure]]\nid = "x"\nreason = "r"\n{body}\n'
    (entry,) = load(path, text if "backend" in body else text.replace("\nreason", '\nbackend = "cpp"\nreason')).entries
    return entry


def outcome(status: Status = Status.INCORRECT, backend: str = "cpp", **facts: str) -> Outcome:
    distribution, line = facts.get("distribution", "int-1"), facts.get("line", LINE)
    return Outcome(CaseId(backend, line), distribution, 0, status, test=facts.get("test", "test_linear"))


def matches(entry: Entry, ended: Outcome | None = None, environment: Environment = EPYC, line: str = LINE) -> bool:
    ended = ended or outcome()
    ended = dataclasses.replace(ended, case=dataclasses.replace(ended.case, problem=line))
    return Ledger((entry,)).match(ended, Problem.parse(line), environment) is entry


# -- matching --------------------------------------------------------------------------------------


def test_an_entry_with_the_required_keys_matches_every_incorrect_case_of_its_backend(tmp_path: Path) -> None:
    entry = only(tmp_path, "")
    assert matches(entry)
    assert not matches(entry, outcome(backend="aten"))
    assert not matches(entry, outcome(Status.PASSED))
    assert not matches(entry, outcome(Status.CRASHED))


@pytest.mark.parametrize(("body", "expected"), [
    ('backend = "c*"', True), ('backend = ["aten", "cpp"]', True), ('backend = "!cpp"', False),
    ('backend = ["*", "!cpp"]', False), ('test = "test_lin*"', True), ('test = "test_mm"', False),
    ('distribution = ["int-*", "one-hot"]', True), ('distribution = "random*"', False),
    ('distribution = "!int-2"', True), ('device = "cuda"', False), ('problem = "linear:bf16:*x2664:*"', True),
    ('problem = "linear:f16:*"', False), ('problem = ["mm:*", "linear:*"]', True), (f'problem = "{LINE}"', True),
    ('torch = ">=2.12,<2.14"', True), ('torch = "==2.13.0"', True), ('torch = "<2.13"', False),
    ('isa = "avx512*"', True), ('isa = "amx*"', False), ('isa = ["avx512*", "!amx*"]', True),
    ('isa = ["avx512*", "!avx2"]', False),
    ('status = "incorrect"', True), ('status = ["crashed", "fallback"]', False), ('where = { op = "linear" }', True),
    ('where = { op = ["mm", "?mm"] }', False), ('where = { dtypes = "bf16", layout = "?t" }', True),
    ('where = { dtypes = "bf16", layout = "?n" }', False), ('where = { epilogue = "gelu*" }', True),
    ('where = { epilogue = ["relu", "bias"] }', True), ('where = { epilogue = "relu" }', False),
    ('where = { epilogue = "!*" }', False), ('where = { flags = "a.*" }', True),
    ('where = { flags = "!m.dynamic" }', True), ('where = { flags = "!a.padded" }', False), ("where = { m = 8 }", True),
    ("where = { m = 9 }", False), ('where = { m = ">=4", n = "==256" }', True),
    ('where = { m = ">=4", n = "!=256" }', False), ('where = { k = ["%16!=0", "<4096"] }', True),
    ('where = { k = ["%16!=0", "<2664"] }', False), ('where = { batch = ">=0" }', False),
])  # fmt: skip
def test_predicates(tmp_path: Path, body: str, expected: bool) -> None:
    assert matches(only(tmp_path, body)) is expected


@pytest.mark.parametrize(
    ("body", "line", "environment", "expected"),
    [
        ('isa = ["avx512*", "!amx*"]', LINE, EPYC, True),  # all names of the machine together
        ('isa = ["avx512*", "!amx*"]', LINE, XEON, False),
        ('isa = ["x86_64", "!amx*"]', LINE, EPYC, True),
        ('isa = ["x86_64", "!amx*"]', LINE, GRAVITON, False),  # what x86 calls AMX no other architecture has
        ('where = { epilogue = "!*", flags = "!*" }', "mm:f32:nn:8x8x8", EPYC, True),
        ('where = { epilogue = "!*", flags = "!*" }', "mm:f32:nn:8x8x8:relu", EPYC, False),
        ('where = { epilogue = "!*", flags = "!*" }', "mm:f32:nn:8x8x8:a.padded", EPYC, False),
        ('where = { batch = ">2" }', "bmm:f32:nn:3x8x8x8", EPYC, True),
        ('where = { batch = ">2" }', "bmm:f32:nn:2x8x8x8", EPYC, False),
    ],
)
def test_predicates_of_other_machines_and_problems(
    tmp_path: Path, body: str, line: str, environment: Environment, expected: bool
) -> None:
    assert matches(only(tmp_path, body), environment=environment, line=line) is expected


@pytest.mark.parametrize(
    ("threads", "expected"),  # of the case: 0 are the run's own two
    [('">1"', [True, False, True, True]), ('["%2==0", "<5"]', [True, False, True, False]), ("7", [False] * 3 + [True])],
)
def test_threads_are_those_of_the_case_or_else_of_the_run(tmp_path: Path, threads: str, expected: list[bool]) -> None:
    entry = only(tmp_path, f"threads = {threads}")
    run = dataclasses.replace(EPYC, threads=2)
    assert [matches(entry, environment=run.at("avx2", count)) for count in (0, 1, 4, 7)] == expected
    assert not matches(entry, environment=EPYC)  # the number is unknown


@pytest.mark.parametrize(("version", "specifier", "expected"), [
    ("2.13.0+cu130", "==2.13.0", True), ("2.14.0.dev20260101+cpu", "<2.14", False),
    ("2.14.0a0+gitabcdef", ">=2.14", True), ("2.13.1", ">=2.11,<2.13.1", False), ("unknown", ">=2.11", False),
])  # fmt: skip
def test_torch_versions(tmp_path: Path, version: str, specifier: str, expected: bool) -> None:
    entry = only(tmp_path, f'torch = "{specifier}"')
    assert matches(entry, environment=Environment(version)) is expected


def test_the_first_matching_entry_explains(tmp_path: Path) -> None:
    ledger = load(tmp_path, HEAD + 'where.m = ">100"\n' + OTHER + 'link = "https://example.org/1"')
    found = ledger.match(outcome(), Problem.parse(LINE), EPYC)
    assert found is not None
    assert (found.id, found.link) == ("second", "https://example.org/1")
    big = Problem.parse(LINE).resized({"m": 101})
    found = ledger.match(outcome(line=big.line), big, EPYC)
    assert found is not None
    assert found.id == "first"


def test_only_entries_that_crash_apply_before_a_run(tmp_path: Path) -> None:
    ledger = load(tmp_path, HEAD + OTHER + 'crashes = true\nwhere = { m = "<=16" }')
    small = Problem.parse(LINE)
    found = ledger.applicable("cpp", small, "test_linear", EPYC)
    assert found is not None
    assert found.id == "second"
    assert ledger.applicable("aten", small, "test_linear", EPYC) is None
    assert ledger.applicable("cpp", small.resized({"m": 17}), "test_linear", EPYC) is None


@pytest.mark.parametrize("text", ["4", "=4", ">=", ">=-1", "%0==0", "% ==0", ">=4 and <8", "> 4.5"])
def test_what_is_no_comparison(text: str) -> None:
    with pytest.raises(ValueError, match="is not a comparison"):
        Comparison.parse(text)


@pytest.mark.parametrize(("text", "below", "at", "above"), [
    ("<16", True, False, False), ("<=16", True, True, False), ("==16", False, True, False), ("!=16", True, False, True),
    (">=16", False, True, True), (" > 16 ", False, False, True), ("%16==0", False, True, False),
    ("% 16 != 0", True, False, True), ("%16>0", True, False, True),
])  # fmt: skip
def test_comparisons(text: str, below: bool, at: bool, above: bool) -> None:
    comparison = Comparison.parse(text)
    assert [comparison.holds(size) for size in (15, 16, 17)] == [below, at, above]


# -- the file --------------------------------------------------------------------------------------

# The id is on line 6, what follows begins on line 9.
SECOND = HEAD + OTHER


@pytest.mark.parametrize(("text", "line", "said"), [
    (SECOND + 'distrbution = "int-1"', 9, ["'distrbution' (did you mean 'distribution'?)", "known: id reason"]),
    (SECOND + 'choice = "*,s5,*"', 9, ["unknown key 'choice'"]),
    (SECOND + 'm = ">1"', 9, ["unknown key 'm' (it belongs into where = { m = ... })"]),
    (SECOND + 'where = { epilog = "relu" }', 9, ["unknown key 'epilog' in where (did you mean 'epilogue'?)"]),
    (SECOND + '[known-failure.where]\nop = "mm"\nm = ">=x"', 11, ["m '>=x' is no comparison", '"%16!=0"']),
    (SECOND + "where = 3", 9, ["where is 3", "write where ="]),
    (SECOND + 'where = { op = "bm" }', 9, ["op 'bm' matches nothing (did you mean 'bmm'?); known: ", " mm addmm"]),
    (SECOND + 'where = { flags = "a.pad" }', 9, ["flags 'a.pad' matches nothing (did you mean 'a.padded'?)"]),
    (SECOND + 'where = { epilogue = ["relu", "scale-0.5"] }', 9, ["'scale-0.5' is not canonical", "write 'scale'"]),
    (SECOND + 'device = "gpu"', 9, ["device 'gpu' matches nothing", "known: cpu cuda"]),
    (SECOND + 'status = ["incorect"]', 9, ["'incorect' is unknown (did you mean 'incorrect'?)", "timed-out"]),
    (SECOND + 'torch = "2.13"', 9, ["torch '2.13' is no version range", ">=2.12,<2.14"]),
    (SECOND + 'problem = ["mm:*",\n"x"]', 9, ["problem 'x'", "is missing; a line is op:dtypes"]),
    (SECOND + 'threads = ["many"]', 9, ["threads ['many'] is no comparison", '">=4"']),
    (SECOND + 'where = { threads = ">1" }', 9, ["unknown key 'threads' in where (it belongs beside where: thr"]),
    (SECOND + 'threads = ["<2", "!=1"]', 9, ["threads ['<2', '!=1']: no number of threads is that"]),
    (SECOND + 'crashes = "yes"', 9, ["crashes is 'yes'", "true or false"]),
    (SECOND + 'crashes = true\ndistribution = "x"', 10, ["distribution beside crashes = true", "delete distrib"]),
    (SECOND + 'problem = "mm:f99:nn:1x1x1"', 9, ["problem 'mm:f99:nn:1x1x1'", "unknown dtype 'f99'"]),
    (SECOND + 'problem = "mm:f32-f32-f32:nn:1x1x1"', 9, ["1x1x1' is not canonical", "write 'mm:f32:nn:1x1x1'"]),
    (SECOND + 'isa = ["!avx512*", "!amx*"]', 9, ["every pattern excludes", 'isa = ["x86_64", "!avx512*"]']),
    (SECOND + 'isa = ["avx51"]', 9, ["isa 'avx51' matches nothing (did you mean 'avx512"]),
    (SECOND + 'mode = "aotti"', 9, ["mode 'aotti' matches nothing (did you mean 'aoti'?)", "known: eager static"]),
    (SECOND + 'guard = "start"', 9, ["guard 'start' matches nothing", "known: end begin"]),
    (SECOND + 'device = ["cpu", "!cpu"]', 9, ["device ['cpu', '!cpu']: what matches is excluded"]),
    (SECOND + 'problem = "lineer:bf16:*"', 9, ["op 'lineer' matches nothing (did you mean 'linear'?)"]),
    (SECOND + 'problem = "mm:bf61:*"', 9, ["dtypes 'bf61' matches nothing"]),
    (SECOND + 'where = { k = [">64", "<32"] }', 9, ["k ['>64', '<32']: no size is that"]),
    (SECOND + 'torch = ">=2.14,<2.12"', 9, ["torch '>=2.14,<2.12': no release from 2.11 on is in this range"]),
    (SECOND + "id.x = 1", 9, ["is not TOML"]),
    (SECOND.replace("second", "first"), 6, ["id 'first' stands on line 2 already", "ids are unique"]),
    (SECOND.replace('id = "second"\n', ""), 5, ["id is missing", 'id = "cpp-bf16-tail"']),
    (SECOND.replace('id = "second"', 'id = " "'), 6, ["id is ' '"]),
    (HEAD + '[[known-failure]]\nid = "b"\nreason = "r"\n', 5, ["backend is missing", 'backend = "cpp"']),
    (HEAD + '[[known-failure]]\nid = "b"\nbackend = "r"\n', 5, ["reason is missing"]),
    ('\n[[known_failure]]\nid = "x"', 2, ["unknown table 'known_failure' (did you mean 'known-failure'?)"]),
    ('[known-failure]\nid = "x"', 1, ["known-failure is not a list of tables", "write [[known-failure]]"]),
    ("known-failure = 3", 1, ["known-failure is not a list of tables"]),
    ("\n\nid = x", 3, ["is not TOML", "Invalid value"]), ('a = "x', 1, ["is not TOML"]),
    ('# comment\n\na = """x', 3, ["is not TOML"]),
])  # fmt: skip
def test_a_broken_file_is_told_where_and_what(tmp_path: Path, text: str, line: int, said: list[str]) -> None:
    with pytest.raises(LedgerError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'ledger.toml'}:{line}: ")
    assert caught.value.line == line
    for words in said:
        assert words in message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pipe", "is no regular file; name a TOML file"),  # and is not waited for
        ("", "is no regular file; name a TOML file"),
        ("nowhere.toml", r"nowhere\.toml: cannot be read \(No such file or directory\); name a TOML"),
    ],
)
def test_what_is_no_file_is_told(tmp_path: Path, name: str, words: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LedgerError, match=words):
        Ledger.load(tmp_path / name)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    assert load(tmp_path, "\ufeff" + HEAD).entries


def test_a_backend_is_one_that_there_is(tmp_path: Path) -> None:
    file = tmp_path / "ledger.toml"
    file.write_text(HEAD.replace('"cpp"', '["*", "!ccp"]'), encoding="utf-8")
    assert Ledger.load(file).entries, "who reads a record does not know what was registered"
    with pytest.raises(
        LedgerError, match=r"toml:4: backend 'ccp' matches nothing \(did you mean 'cpp'\?\); known: aten cpp"
    ):
        Ledger.load(file, ("aten", "cpp"))


def test_the_oldest_release_is_the_one_that_the_package_asks_for() -> None:
    assert f'"torch>={reader._OLDEST}"' in (SHIPPED.parent.parent / "pyproject.toml").read_text(encoding="utf-8")


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "ledger.toml"
    file.write_bytes(b'# caf\xc3\xa9\nid = "\xff"\n')
    with pytest.raises(LedgerError, match=r"ledger\.toml:2: is not UTF-8"):
        Ledger.load(file)


def test_an_inline_list_of_tables_is_read_too(tmp_path: Path) -> None:
    ledger = load(tmp_path, 'known-failure = [{ id = "a", reason = "r", backend = "cpp" }]')
    assert [entry.id for entry in ledger.entries] == ["a"]
    with pytest.raises(LedgerError, match=r"ledger\.toml:1: backend is missing"):
        load(tmp_path, 'known-failure = [{ id = "a", reason = "r" }]')


def test_the_shipped_ledger_can_be_read_and_so_can_the_example_in_its_comments(tmp_path: Path) -> None:
    Ledger.load(SHIPPED)
    text = SHIPPED.read_text(encoding="utf-8")
    example = [line[4:] for line in text.splitlines() if line.startswith("#   ")]
    assert "crashes = true" in "\n".join(example)
    (entry,) = load(tmp_path, "\n".join(line for line in example if "crashes" not in line)).entries
    assert entry.conditions["backend"] == Globs(("cpp",))
    assert entry.conditions["m"] == Comparisons((Comparison(">=", 4),))
    assert entry.line == 1


# -- bookkeeping -----------------------------------------------------------------------------------


def entry_named(name: str, backend: str = "cpp", statuses: tuple[Status, ...] = (Status.INCORRECT,)) -> Entry:
    return Entry(name, "r", {"backend": Globs((backend,))}, status=frozenset(statuses))


def note(use: Use, ledger: Ledger, *outcomes: Outcome) -> list[str]:
    found = [ledger.note(use, o, Problem.parse(o.problem), EPYC) for o in outcomes]
    return [entry.id if entry else "" for entry in found]


def stale(use: Use, ledger: Ledger) -> list[str]:
    terms = Terms(entries=tuple(entry.id for entry in ledger.entries))
    return [cause.name for cause in causes(Run(Head(terms=terms), totals=Totals(use=use)))]


def test_note_returns_what_explains_and_counts_for_every_entry_that_does() -> None:
    ledger, use = Ledger((entry_named("a"), entry_named("b", "*"))), Use()
    assert note(use, ledger, outcome(), outcome(backend="aten"), outcome(Status.PASSED)) == ["a", "b", ""]
    assert use == {"failed": {"a": 1, "b": 2}, "passed": {"a": 1, "b": 1}}


def test_an_entry_that_passes_wherever_it_applies_is_stale() -> None:
    ledger, use = Ledger((entry_named("fixed"), entry_named("alive"), entry_named("elsewhere", "aten"))), Use()
    note(use, Ledger(ledger.entries[:1]), outcome(Status.PASSED))
    note(use, Ledger(ledger.entries[1:]), outcome(Status.PASSED), outcome(Status.INCORRECT))
    assert stale(use, ledger) == ["fixed"]


@pytest.mark.parametrize("status", [Status.UNSUPPORTED, Status.NOT_RUN, Status.KNOWN_FAILURE])
def test_what_did_not_run_is_no_pass(status: Status) -> None:
    ledger, use = Ledger((entry_named("a"),)), Use()
    assert note(use, ledger, outcome(status)) == [""]
    assert stale(use, ledger) == []


def test_an_entry_whose_cases_fail_in_another_way_is_not_stale_and_explains_nothing() -> None:
    ledger, use = Ledger((entry_named("a"),)), Use()
    assert note(use, ledger, outcome(Status.CRASHED), outcome(Status.PASSED)) == ["", ""]
    assert use["differed"] == {"a": 1}
    assert stale(use, ledger) == []


def test_the_counts_of_workers_add_up() -> None:
    ledger, here, there, both = Ledger((entry_named("a"),)), Use(), Use(), Use()
    note(here, ledger, outcome(Status.PASSED))
    note(there, ledger, outcome(Status.PASSED), outcome(), outcome(Status.CRASHED))
    for use in (here, there):
        merge_use(both, json.loads(json.dumps(use)))
    assert both == {"failed": {"a": 1}, "differed": {"a": 1}, "passed": {"a": 2}}
    assert stale(here, ledger) == ["a"]
    assert stale(both, ledger) == []


@pytest.mark.parametrize("lines", [
    'backend = "*"', 'backend = ["*", "cpp"]\ntest = "*"\nwhere = { op = "*", m = ">=0" }',
    'backend = "*"\ntorch = ">=0"\nthreads = ">=0"\nstatus = ["incorrect", "crashed"]', 'backend = "*"\ncrashes = true',
])  # fmt: skip
def test_an_entry_that_matches_every_case_is_an_error(tmp_path: Path, lines: str) -> None:
    with pytest.raises(LedgerError, match=r"ledger\.toml:4: the entry matches every case; name the backend"):
        only(tmp_path, lines)


@pytest.mark.parametrize("line", ['where = { m = ">=2" }', 'isa = "avx512*"', 'torch = "<2.14"', 'test = "!test_x"'])
def test_an_entry_of_any_backend_is_allowed_where_something_narrows_it(tmp_path: Path, line: str) -> None:
    assert only(tmp_path, f'backend = "*"\n{line}').id == "x"


@pytest.mark.parametrize(("group", "code", "known"), [
    ("-64", "32:{}kslices=1,threads=2,blocks=1.1.20,cache=1.1.19", True), ("-64", "32:a-b-c:Mx64x640,threads=2", True),
    ("-64", "32:{}kslices=3,blocks=1.1.7,cache=1.1.2", True), ("-64", "64:{}blocks=1.1.10,cache=1.1.3", False),
    ("-64", "32:{}kslices=1,threads=2,blocks=1.1.20,cache=1.1.18", False), ("-32", "32:{}cache=1.1.19", False),
    ("", "32:{}blocks=1.1.20,cache=1.1.18", True), ("", "32:{}kslices=2,threads=2,blocks=1.1.10,cache=1.1.4", True),
    ("", "32:{}blocks=1.1.20,cache=1.1.12", False), ("", "64:{}blocks=1.1.10,cache=1.1.3", True),
    ("", "128:{}blocks=1.1.5,cache=1.1.3", False), ("", "32:{}blocks=1.1.20,cache=1.1.6", True),
])  # fmt: skip
def test_int4_is_known_to_be_wrong_where_a_block_of_k_begins_within_a_group(group: str, code: str, known: bool) -> None:
    line = f"woq_int4:bf16-i4-bf16:nt:1x64x640:quant.group{group}"
    text = f"CppMicroGemmWoQInt4Avx512-4x64x{code.format('bf16-u8-f32:1x64x640,')}"
    ended = dataclasses.replace(outcome(line=line), configuration=(text,))
    assert (Ledger.load(SHIPPED).match(ended, Problem.parse(line), EPYC) is not None) == known

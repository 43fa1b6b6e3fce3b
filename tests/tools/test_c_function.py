"""A function of C in ``pytest-gemm judge``: its prototype is read, it is called as that says, and faults are told."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from pytest_gemm.tools import c_function, cli
from pytest_gemm.tools.kernel import Form, Kernel

C = r"""
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
typedef const float* M;
static float wide(uint16_t x) { union { uint32_t bits; float value; } u = {(uint32_t)x << 16}; return u.value; }
#define PRODUCT(T, A, B, C) \
  for (long i = 0; i < m; i++) for (long j = 0; j < n; j++) { T s = 0; for (long l = 0; l < k; l++) s += A * B; C; }
void usual(int m, int n, int k, M a, M b, float* c) { PRODUCT(float, a[i*k+l], b[l*n+j], c[i*n+j] = s) }
void columns(int m, int n, int k, M a, M b, float* c) { usual(n, m, k, b, a, c); }
int order(float* c, M a, M b, size_t m, size_t n, size_t k) { usual(m, n, k, a, b, c); return 0; }
void dgemm_(const char* ta, const char* tb, const int* rows, const int* cols, const int* inner, const double* alpha,
            const double* a, const int* lda, const double* b, const int* ldb, const double* beta, double* c,
            const int* ldc, size_t one, size_t two) {
  long m = *rows, n = *cols, k = *inner;
  PRODUCT(double, a[*ta == 'N' ? i + l * *lda : l + i * *lda], b[*tb == 'N' ? l + j * *ldb : j + l * *ldb],
          c[i + j * *ldc] = one * two * *alpha * s + (*beta ? *beta * c[i + j * *ldc] : 0))
}
void cblas(int layout, int ta, int tb, int m, int n, int k, float alpha, M a, int lda, M b, int ldb, float beta,
           float* c, int ldc) {
  if (layout != 101 || lda < 1 || ldb < 1 || ldc < 1) return;
  PRODUCT(float, a[ta == 111 ? i*lda+l : l*lda+i], b[tb == 111 ? l*ldb+j : j*ldb+l], c[i*ldc+j] = alpha * s + beta)
}
void linear(M x, M w, int ldw, M b, float* y, int m, int n, int k) {
  PRODUCT(float, x[i*k+l], w[j*ldw+l], y[i*n+j] = s + b[j])
}
void codes(int64_t m, short n, unsigned char k, const int8_t* a, const int8_t* b, int32_t* c, int alpha) {
  PRODUCT(int32_t, a[i*k+l], b[l*n+j], c[i*n+j] = alpha * s)
}
void halves(int m, int n, int k, const uint16_t* a, const uint16_t* b, float* c) {
  PRODUCT(float, wide(a[i*k+l]), wide(b[l*n+j]), c[i*n+j] = s)
}
bool fixed(int m, int n, int k, M a, M b, float* c, int nt, float* ws, void* stream, char side, const int* two) {
  for (int i = 0; i < 4096; i++) ws[i] = i;
  usual(m, n, k, a, b, c);
  return nt == 4 && !stream && side == 'L' && *two == 2;
}
void sides(M a, M b, float* c, int rows_a, int cols_a, int cols_b) { usual(rows_a, cols_b, cols_a, a, b, c); }
int never_null(int m, int n, int k, M a, M b, float* c) { usual(m, n, k, a, b, c); return !a || !b || !c; }
int square(M a, M b, float* c, int n) { usual(n, n, n, a, b, c); return n % 2; }
void one_column(float* c, M x, M w, int inner, int rows) { usual(rows, 1, inner, w, x, c); }
void transposed_only(char tb, int m, int n, int k, M a, M b, float* c) {
  if (tb == 'T') linear(a, b, k, c, c, m, n, k);
}
void _Z4gemmiiiPKfS0_Pf(void) {}
void aborts(void) { abort(); }
void hangs(void) { for (volatile int i = 0; !i;); }
"""
CALLS = """
usual:
usual: void f(int, int, int, const float*, const float*, float*)
usual: extern "C" __attribute__((visibility("default"))) API void f(unsigned M, long long N, ptrdiff_t K,
  float const a[], const float b[static 1], /* C */ float* __restrict__ c) noexcept;
columns: void f(int n, int m, int k, const float* b, const float* a, float* c)
order: status_t f(float*, const float*, const float*, size_t, size_t, size_t)
order: void f(float *dst, const float *restrict lhs, const float *rhs, size_t rows, size_t cols, size_t inner) { }
dgemm_: void dgemm_(const char *transb, const char *transa, const int *n, const int *m, const int *k, double *alpha,
  double *b, const int *ldb, const double *a, const int *lda, const double *beta, double *c, int *ldc, size_t, size_t)
cblas: void cblas_sgemm(enum CBLAS_ORDER Order, const enum CBLAS_TRANSPOSE TransA, CBLAS_TRANSPOSE TransB, blasint M,
  int N, int K, float alpha, const float *A, int lda, const float *B, int ldb, float beta, float *C, int ldc)
linear: void f(float const *x, const float* W, int ldw, const float* b, float *y, int m, int out_features, int k)
codes: void f(int64_t m, short n, unsigned char k, signed char *a, int8_t b[], int c[], int32_t alpha)
halves: void f(int m, int n, int k, const uint16_t* a, const unsigned short* b, float* c)
fixed: bool f(int m, int n, int k, float* a, float* b, float* c, int nt=4, float* ws=4096, cudaStream_t stream=NULL,
  char side='L', const int* two=2)
never_null: int f(int m, int n, int k, float* a, float* b, float* c)
sides: void f(float *A, float *B, float *C, int rowsA, int numACols, int widthB)
"""
DTYPES = {"dgemm_": torch.float64, "codes": torch.int8, "halves": torch.bfloat16}
OUT = ("a", "b", "out")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("c")
    (folder / "mine.c").write_text(C)
    (folder / "cuda.c").write_text('const char needs[] = "libcudart.so"; void f(void) {}')
    for name in ("mine", "cuda"):
        command = ["cc", "-O1", "-shared", "-fPIC", f"{name}.c", "-o", f"{name}.so"]
        subprocess.run(command, check=True, cwd=folder)
    return str(folder / "mine.so")


@pytest.mark.parametrize("case", re.split(r"\n(?! )", CALLS.strip()))
def test_a_function_is_called_as_its_prototype_says(library: str, case: str) -> None:
    symbol, _, signature = case.partition(":")
    forms = [Form(("a", "b", "bias", "out"), weight=True)] if symbol == "linear" else [Form(OUT)]
    forms += [Form(OUT, weight=True, columns=True)] * ("trans" in signature.lower())
    for form, (m, n, k) in itertools.product(forms, ((3, 5, 7), (4, 1, 2), (2, 3, 0))):
        a, b, bias = (torch.randint(-3, 4, size) for size in ((m, k), (k, n), (n,)))
        operands = (one.to(DTYPES.get(symbol, torch.float32)) for one in (a, b, bias))
        result = Kernel(f"{library}:{symbol}", form, signature.strip())(*operands)
        assert torch.equal(result.long(), a @ b + bias * ("bias" in form.roles))


def test_a_matrix_times_a_column_is_judged_by_columns(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    signature = "--signature=void f(float* c, float* b, float* a, int k, int m)"
    assert cli.main(["judge", f"{library}:one_column", signature, "--problem=mm:f32:nn:64x1x128"]) == 0
    assert "right (1 of 1 problem)" in capsys.readouterr().out


def test_a_function_that_is_told_how_b_lies_has_to_take_it_as_it_is(
    library: str, capsys: pytest.CaptureFixture[str]
) -> None:
    signature = "--signature=void f(char transb, int m, int n, int k, float* a, float* b, float* c)"
    assert cli.main(["judge", f"{library}:transposed_only", signature, "--problem=mm:f32:nn:17x65x127"]) == 1
    said = capsys.readouterr().out
    assert "as mm; f32; on cpu" in said
    assert "'--signature=void f(char transb" in " ".join(said.split())  # of the rerun


def test_an_assumed_prototype_is_on_the_screen(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["judge", f"{library}:usual", "--problem=mm:f32:nt:17x65x127"]) == 0
    assert "assumed: void f(int m, int n, int k, const float* a" in " ".join(capsys.readouterr().out.split())


def test_what_a_function_does_not_take_is_refused(library: str) -> None:
    kernel = Kernel(f"{library}:square", Form(OUT), "int f(const float* a, const float* b, float* c, int n)")
    assert torch.equal(kernel(torch.eye(4), torch.ones(4, 4)), torch.ones(4, 4))
    for size, says in (((4, 5), "square matrices: its prototype has no m and no k"), ((5, 5), "square returned 1")):
        with pytest.raises(ValueError, match=says):
            kernel(torch.ones(size), torch.ones(size[1], 5))


@pytest.mark.parametrize(
    ("signature", "says"),
    [
        ("void f(int m, int p, int k, float* a, float* b, float* c)", "cannot hand over 'int p'"),
        ("void f(int m, int n, int k, float** a, float* b, float* c)", "cannot hand over 'float** a'"),
        ("void f(int m, int n, int k, const T* a, const T* b, T* c)", "cannot hand over 'const T* a'"),
        ("void f(Layout layout, int m, int n, int k, float* a, float* b, float* c)", "hand over 'Layout layout'"),
        ("static void f(int m, int n, int k, float* a, float* b, float* c)", "a static function is no symbol"),
        ("void f(int m, int n, int k, float* a, float* b, float* c, float* out)", "'float* out' is a second c"),
        ("matmul", "give a function of C with pointers"),
    ],
)
def test_a_prototype_that_says_too_little_is_told_by_its_parameter(signature: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        c_function.read(signature)


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("mine.so:usua", "mine.so has no function 'usua' (did you mean 'usual'?)"),
        ("mine.so:dgemm", "(did you mean 'dgemm_'?)"),
        ("mine.so:gemm", 'but _Z4gemmiiiPKfS0_Pf: declare it extern "C"'),
        ("cuda.so:f", "it calls CUDA, so say where its pointers point to: --device=cpu or --device=cuda"),
        ("mine.c:usual", "mine.c is a source: judge mine.so:usual after cc -O2 -shared -fPIC mine.c -o mine.so"),
        ("mine.py::matmul", "did you mean mine.py:matmul?"),
        ("mine.py:matmull", "mine.py has no function 'matmull' (did you mean 'matmul'?)"),
        ("mine.so:columns", "its result is no product; it was called by an assumed prototype, void f(int m, int n"),
        ("mine.so:aborts", "SIGABRT (Aborted); it was called by an assumed prototype, void f(int m, int n, int k,"),
        ("mine.so:hangs", "it was called by an assumed prototype, void f(int m, int n, int k, const float* a,"),
    ],
)
def test_a_name_or_an_assumption_that_is_not_right_ends_with_4(
    library: str, kernel: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(library).parent)
    Path("mine.py").write_text("def matmul(a, b):\n    return a @ b\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["judge", kernel, "--time-limit=3"])
    assert ended.value.code == cli.USAGE_ERROR
    assert says in capsys.readouterr().err

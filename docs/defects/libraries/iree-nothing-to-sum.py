"""iree-compile for llvm-cpu ends with SIGFPE on a matmul with K = 0.

Needs iree-base-compiler alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import iree.compiler

PROGRAM = """
func.func @main(%a: tensor<4x0xf32>, %b: tensor<0x4xf32>, %c: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %sum = linalg.matmul ins(%a, %b : tensor<4x0xf32>, tensor<0x4xf32>) outs(%c : tensor<4x4xf32>) -> tensor<4x4xf32>
  return %sum : tensor<4x4xf32>
}
"""
try:
    iree.compiler.compile_str(PROGRAM, target_backends=["llvm-cpu"], extra_args=["--iree-llvmcpu-target-cpu=host"])
except iree.compiler.CompilerToolError as error:
    print(next(line for line in str(error).splitlines() if "rror code" in line))
    sys.exit(1)
print("it compiles")

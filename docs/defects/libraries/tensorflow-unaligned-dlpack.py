"""TensorFlow on a CPU: a product of an operand that from_dlpack took at an unaligned address ends the process with SIGABRT.

Needs tensorflow-cpu alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import subprocess
import sys

PRODUCT = """
import numpy as np
import tensorflow as tf
memory = np.ones(3 * 32 * 24 + 1, np.float32)
a = tf.experimental.dlpack.from_dlpack(memory[{start}:][:3 * 32 * 24].reshape(3, 32, 24).__dlpack__())
print(float(tf.matmul(a, tf.ones((3, 24, 16)))[0, 0, 0]))
"""
answers = []
for start in (0, 1):
    ran = subprocess.run([sys.executable, "-c", PRODUCT.format(start=start)], capture_output=True, text=True, check=False)
    last = next((line for line in ran.stderr.splitlines() if "Check failed" in line), "")
    answers.append(ran.stdout.strip() or f"the process ended with status {ran.returncode} {last}")
    print(f"{4 * start} bytes further: {answers[-1]}")
sys.exit(int(answers[0] != answers[1]))
